"""A decoder-only character transformer, written the way sharded models are written.

The parameters are a flat dict of arrays; those of the blocks are stacked along a leading layer
dimension and the forward pass scans over it, so that the compiled program holds one block however
many there are. Attention heads and hidden units are split over the mesh axis ``model``, sequences
over the axis ``data`` (Shoeybi et al., "Megatron-LM", 2019).
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math

import jax
from jax import Array, lax
import jax.numpy as jnp

from spmd import PartitionSpec as P, with_sharding_constraint

Params = dict[str, Array]
Constrain = Callable[[Array], Array]


def shard_residual(x: Array) -> Array:
    """Split the residual stream ``[batch, seq_len, d_model]`` by sequence, over the axis data."""
    return with_sharding_constraint(x, P("data", None, None))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of the model.

    Attributes:
        vocab: number of different characters.
        seq_len: characters per sequence.
        layers: number of blocks.
        d_model: width of the residual stream.
        heads: attention heads per block.
        d_ff: width of the hidden layer of each block's MLP.
    """

    vocab: int
    seq_len: int = 32
    layers: int = 4
    d_model: int = 128
    heads: int = 8
    d_ff: int = 512

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.heads


def param_specs() -> dict[str, P]:
    """The PartitionSpec of each parameter, by name."""
    return {
        "embed": P(),
        "position": P(),
        "block.norm1": P(),
        "block.qkv": P(None, None, "model"),
        "block.out": P(None, "model"),
        "block.norm2": P(),
        "block.up": P(None, None, "model"),
        "block.down": P(None, "model"),
        "norm": P(),
        "head": P(),
    }


def _shapes(c: Config) -> dict[str, tuple[int, ...]]:
    return {
        "embed": (c.vocab, c.d_model),
        "position": (c.seq_len, c.d_model),
        "block.norm1": (c.layers, c.d_model),
        "block.qkv": (c.layers, c.d_model, c.heads, 3, c.head_dim),
        "block.out": (c.layers, c.heads, c.head_dim, c.d_model),
        "block.norm2": (c.layers, c.d_model),
        "block.up": (c.layers, c.d_model, c.d_ff),
        "block.down": (c.layers, c.d_ff, c.d_model),
        "norm": (c.d_model,),
        "head": (c.d_model, c.vocab),
    }


def count_parameters(config: Config) -> int:
    """How many numbers the model learns."""
    return sum(math.prod(shape) for shape in _shapes(config).values())


def _scales(c: Config) -> dict[str, float]:
    residual = (2 * c.layers) ** -0.5
    return {
        "embed": 0.5,
        "position": 0.1,
        "block.qkv": c.d_model**-0.5,
        "block.out": residual * c.d_model**-0.5,
        "block.up": c.d_model**-0.5,
        "block.down": residual * c.d_ff**-0.5,
        # A head that starts at almost nothing makes the first loss ln(vocab).
        "head": 0.1 * c.d_model**-0.5,
    }


def init(key: Array, config: Config) -> Params:
    """Draw the parameters: normal with the usual scales, ones for the norms."""
    shapes, scales = _shapes(config), _scales(config)
    keys = dict(zip(scales, jax.random.split(key, len(scales)), strict=True))
    return {
        name: scales[name] * jax.random.normal(keys[name], shape)
        if name in scales
        else jnp.ones(shape)
        for name, shape in shapes.items()
    }


def _rms_norm(x: Array, gain: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain[None, None]


def _attention(x: Array, qkv: Array, out: Array) -> Array:
    q, k, v = jnp.einsum("bsd,dhte->tbshe", x, qkv)
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, out)


def _mlp(x: Array, up: Array, down: Array) -> Array:
    return jax.nn.gelu(x @ up) @ down


def _block(x: Array, p: Params, constrain: Constrain) -> Array:
    x = x + _attention(_rms_norm(x, p["norm1"]), p["qkv"], p["out"])
    x = x + _mlp(_rms_norm(x, p["norm2"]), p["up"], p["down"])
    return constrain(x)


def logits(params: Params, tokens: Array, constrain: Constrain = shard_residual) -> Array:
    """Scores of the next character, ``[batch, seq_len, vocab]``, of tokens ``[batch, seq_len]``.

    The residual stream is constrained at the end of every block.
    """
    x = jnp.take(params["embed"], tokens, axis=0) + params["position"][None]
    blocks = {
        name.removeprefix("block."): value
        for name, value in params.items()
        if name.startswith("block.")
    }
    x, _ = lax.scan(lambda x, p: (_block(x, p, constrain), None), x, blocks)
    return _rms_norm(x, params["norm"]) @ params["head"]


def loss(params: Params, tokens: Array, constrain: Constrain = shard_residual) -> Array:
    """Mean cross entropy, in nats per character, of predicting each character from those before.

    Tokens are ``[batch, seq_len + 1]``, int32.
    """
    scores = jax.nn.log_softmax(logits(params, tokens[:, :-1], constrain))
    picked = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)
    return -jnp.mean(picked)
