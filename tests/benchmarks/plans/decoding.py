"""A word more for each of many texts, by a decoder whose keys and values are kept.

The decoder is Llama's (Dubey et al., 2024), its weights are bfloat16. All texts are equally long.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from .logical import BARE, Bare
from .training import array, ids

_FAR = -1e9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Its sizes.

    Attributes:
        batch: texts.
        length: words that there is room for.
        layers: that are scanned.
        width: of the residual stream.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: of a head.
        hidden: width of the MLP.
        vocab: different words.
        dtype: of all of it.
    """

    batch: int
    length: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    dtype: str = "bfloat16"


_LAYER = {
    "norm1": "embed", "q": "embed heads dim", "k": "embed kv_heads dim", "v": "embed kv_heads dim",
    "o": "heads dim embed", "norm2": "embed", "gate": "embed hidden", "up": "embed hidden",
    "down": "hidden embed",
}  # fmt: skip
NAMES = {
    "layers": {name: f"layers {dims}" for name, dims in _LAYER.items()},
    "words": "vocab embed", "norm": "embed", "logits": "embed vocab",
}  # fmt: skip
# In this order as in MaxText (`ar_cache_axis_order`): a word is written in one piece.
CACHE = dict.fromkeys("kv", "layers keys kv_heads texts dim")
_OF_LAYER = "keys kv_heads texts dim"


def shapes(model: Decoding) -> tuple[Any, Any, Any, Any]:
    """Of the parameters, the keys and values, the last words, and how many there are."""
    sizes = {
        "layers": model.layers, "embed": model.width, "heads": model.heads, "dim": model.head_dim,
        "kv_heads": model.kv_heads, "hidden": model.hidden, "vocab": model.vocab,
        "texts": model.batch, "keys": model.length,
    }  # fmt: skip

    def shape(dims: str) -> Any:
        return array(*(sizes[name] for name in dims.split()), dtype=jnp.dtype(model.dtype))

    return jax.tree.map(shape, NAMES), jax.tree.map(shape, CACHE), ids(model.batch), ids()


def step(params: Any, cache: Any, words: Any, count: Any, keep: Bare = BARE) -> tuple[Any, Any]:
    """Keys and values with those of the last words, and the most likely next ones."""
    x = keep.activation(params["words"][words], "batch embed")

    # All keys and values are carried, so that each layer writes a word into them, and no more.
    def layer(carry: Any, of_layer: Any) -> tuple[Any, None]:
        (x, cache), (number, weights) = carry, of_layer
        w = {name: keep.used(leaf, _LAYER[name]) for name, leaf in weights.items()}
        return _layer(w, x, cache, number, count, keep), None

    numbers = jnp.arange(cache["k"].shape[0])
    (x, cache), _ = lax.scan(layer, (x, cache), (numbers, params["layers"]))
    logits = _normed(x, params["norm"]) @ keep.used(params["logits"], "embed vocab")
    return cache, jnp.argmax(keep.activation(logits, "batch vocab"), axis=-1).astype(jnp.int32)


def _layer(w: Any, x: Any, cache: Any, number: Any, count: Any, keep: Bare) -> tuple[Any, Any]:
    y = keep.activation(_normed(x, w["norm1"]), "batch embed")
    q, k, v = (jnp.einsum("be,ehd->bhd", y, w[name]) for name in "qkv")
    q = keep.activation(q, "texts heads dim")
    new = {"k": k, "v": v}
    cache = {
        name: keep.activation(_written(cache[name], new[name], number, count), CACHE[name])
        for name in cache
    }
    of_layer = {
        name: keep.activation(lax.dynamic_index_in_dim(leaf, number, keepdims=False), _OF_LAYER)
        for name, leaf in cache.items()
    }
    found = keep.activation(_attended(q, of_layer, count), "texts heads dim")
    x = keep.activation(x + jnp.einsum("bhd,hde->be", found, w["o"]), "batch embed")
    y = keep.activation(_normed(x, w["norm2"]), "batch embed")
    hidden = keep.activation(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), "batch hidden")
    return keep.activation(x + hidden @ w["down"], "batch embed"), cache


def _written(cache: Any, new: Any, number: Any, count: Any) -> Any:
    """Keys or values of a word ``[texts, kv_heads, dim]``, put at its place in a layer."""
    zero = jnp.zeros((), count.dtype)
    start = number.astype(count.dtype), count, zero, zero, zero
    return lax.dynamic_update_slice(cache, jnp.swapaxes(new, 0, 1)[None, None], start)


def _attended(q: Any, cache: Any, count: Any) -> Any:
    """Queries ``[texts, heads, dim]`` look at all keys up to the last one."""
    k, v = cache["k"], cache["v"]
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    scores = jnp.einsum("bgnd,sgbd->bgns", grouped, k).astype(jnp.float32) / q.shape[2] ** 0.5
    seen = jnp.arange(k.shape[0]) <= count
    scores = jnp.where(seen[None, None, None], scores, _FAR)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgns,sgbd->bgnd", weights, v).reshape(q.shape)


def _normed(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(lax.square(wide), axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale[None]
