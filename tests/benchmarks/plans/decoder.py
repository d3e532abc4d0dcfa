"""Decoders as GPT-2 (Radford et al., 2019) and Llama (Touvron et al., 2023) have them.

Weights are float32 and used in bfloat16. Constraints stand where MaxText has them: at the
embedding, before and after attention, in the MLP, at the residual stream, and at the logits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from . import attention, mixture
from .logical import Bare
from .training import array, ids

_RESIDUAL = "batch norm_length embed"
_WHOLE = "batch length embed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Sizes of a decoder, and how it is written.

    Attributes:
        batch: sequences of a step.
        length: words of a sequence.
        layers: that are scanned, or one after the other.
        width: of the residual stream.
        heads: of queries.
        kv_heads: of keys and values; 0 for as many as queries.
        head_dim: of a head.
        hidden: width of the MLP.
        vocab: different words; GPT-2's 50,257 are padded to 50,304, as its users do.
        gated: as Llama is: gated MLPs, RMS norms, rotary embedding, no biases.
        scanned: whether the layers are stacked.
        remat: whether a layer is computed again for its gradient.
        experts: MLPs of a layer, of which each word goes to one; 0 for a single MLP.
        dtype: that is computed in.
        attend: ``plain``, ``blocks`` or ``splash``: see `attention`.
    """

    batch: int
    length: int
    layers: int
    width: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 64
    hidden: int
    vocab: int
    gated: bool = False
    scanned: bool = True
    remat: bool = True
    experts: int = 0
    dtype: str = "bfloat16"
    attend: str = "plain"


def names(model: Decoder) -> Any:
    """Of the dimensions of the parameters."""
    layer = _layer_names(model)
    if model.scanned:
        layers: Any = {name: f"layers {dims}" for name, dims in layer.items()}
    else:
        layers = [layer] * model.layers
    return {"layers": layers, **_outer_names(model)}


def _layer_names(model: Decoder) -> dict[str, str]:
    found = {
        "norm1": "embed", "q": "embed heads dim", "k": "embed kv_heads dim",
        "v": "embed kv_heads dim", "o": "heads dim embed", "norm2": "embed",
        "up": "embed hidden", "down": "hidden embed",
    }  # fmt: skip
    if model.experts:
        return found | mixture.NAMES
    if model.gated:
        return found | {"gate": "embed hidden"}
    biases = {
        "norm1_bias": "embed", "q_bias": "heads dim", "k_bias": "kv_heads dim",
        "v_bias": "kv_heads dim", "o_bias": "embed", "norm2_bias": "embed",
        "up_bias": "hidden", "down_bias": "embed",
    }  # fmt: skip
    return found | biases


def _outer_names(model: Decoder) -> dict[str, str]:
    if _is_plain(model):
        return {"words": "vocab embed", "norm": "embed", "logits": "embed vocab"}
    return {
        "words": "vocab embed", "places": "positions embed", "norm": "embed", "norm_bias": "embed"
    }  # fmt: skip


def _is_plain(model: Decoder) -> bool:
    """Without biases and learned positions."""
    return model.gated or model.experts > 0


def params(model: Decoder) -> Any:
    """Their shapes."""
    sizes = {
        "layers": model.layers, "embed": model.width, "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads, "dim": model.head_dim, "hidden": model.hidden,
        "vocab": model.vocab, "positions": model.length, "experts": model.experts,
    }  # fmt: skip
    return jax.tree.map(lambda dims: array(*(sizes[name] for name in dims.split())), names(model))


BATCH = {"words": "batch length", "next": "batch length"}


def batch(model: Decoder) -> Any:
    """Words, and those that follow them."""
    return dict.fromkeys(BATCH, ids(model.batch, model.length))


def loss(model: Decoder, params: Any, batch: Any, keep: Bare) -> Any:
    """The mean cross-entropy of the next words."""
    x = _embedded(model, params, batch["words"], keep)

    # Defined here, so that no cache of JAX takes it for that of another layout.
    def layer(x: Any, p: Any) -> tuple[Any, None]:
        return _layer(model, p, x, keep), None

    if model.remat:
        layer = jax.checkpoint(layer)
    if model.scanned:
        x, _ = lax.scan(layer, x, params["layers"])
    else:
        for p in params["layers"]:
            x, _ = layer(x, p)
    x = keep.activation(_normed(x, params, "norm"), _WHOLE)
    if "logits" in params:
        logits = x @ keep.used(params["logits"].astype(x.dtype), "embed vocab")
    else:
        logits = x @ keep.used(params["words"].astype(x.dtype), "vocab embed").T
    logits = keep.activation(logits, "batch length vocab").astype(jnp.float32)
    # A sum with a mask, and no lookup: words may be split.
    right = jax.nn.one_hot(batch["next"], model.vocab, dtype=jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(right * logits, axis=-1))


def _embedded(model: Decoder, params: Any, words: Any, keep: Bare) -> Any:
    table = keep.used(params["words"].astype(model.dtype), "vocab embed")
    x = keep.activation(table[words], _RESIDUAL)
    if "places" in params:
        x = x + params["places"].astype(x.dtype)[None]
    return keep.activation(x, _RESIDUAL)


def _layer(model: Decoder, p: Any, x: Any, keep: Bare) -> Any:
    dims = _layer_names(model)
    w = {name: keep.used(leaf.astype(x.dtype), dims[name]) for name, leaf in p.items()}
    x = keep.activation(x, _RESIDUAL)
    y = keep.activation(_normed(x, w, "norm1"), _WHOLE)
    x = keep.activation(x + _attention(model, w, y, keep), _RESIDUAL)
    y = keep.activation(_normed(x, w, "norm2"), _WHOLE)
    mlp = mixture.mixed if model.experts else _mlp
    return keep.activation(x + mlp(w, y, keep), _RESIDUAL)


def _normed(x: Any, w: Any, name: str) -> Any:
    """An RMS norm, or a layer norm where there is a bias."""
    wide, bias = x.astype(jnp.float32), w.get(f"{name}_bias")
    if bias is not None:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(lax.square(wide), axis=-1, keepdims=True) + 1e-5)
    wide = wide.astype(x.dtype) * w[name].astype(x.dtype)[None, None]
    return wide if bias is None else wide + bias.astype(x.dtype)[None, None]


def _attention(model: Decoder, w: Any, x: Any, keep: Bare) -> Any:
    q, k, v = (jnp.einsum("bte,ehd->bthd", x, w[name]) for name in "qkv")
    if _is_plain(model):
        q, k = attention.rotated(q), attention.rotated(k)
    else:
        named = zip((q, k, v), "qkv", strict=True)
        q, k, v = (one + w[f"{name}_bias"][None, None] for one, name in named)
    q = keep.activation(q, "batch length heads dim")
    k, v = (keep.activation(one, "batch keys kv_heads dim") for one in (k, v))
    found = getattr(attention, model.attend)(q / model.head_dim**0.5, k, v, keep)
    found = keep.activation(found, "batch length heads dim")
    out = jnp.einsum("bthd,hde->bte", found, w["o"])
    return keep.activation(out + w["o_bias"][None, None] if "o_bias" in w else out, _RESIDUAL)


def _mlp(w: Any, x: Any, keep: Bare) -> Any:
    if "gate" in w:
        hidden = jax.nn.silu(x @ w["gate"]) * (x @ w["up"])
    else:
        hidden = jax.nn.gelu(x @ w["up"] + w["up_bias"][None, None])
    out = keep.activation(hidden, "batch length hidden") @ w["down"]
    return keep.activation(out + w["down_bias"][None, None] if "down_bias" in w else out, _RESIDUAL)
