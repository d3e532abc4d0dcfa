"""Causal attention of ``[batch, length, heads, head_dim]``; heads of keys and values may be fewer.

`plain` makes all scores at once, `blocks` those of a block of keys after another (Rabe and Staats,
"Self-attention Does Not Need O(n^2) Memory", 2021), and `splash` calls JAX's Pallas kernel.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from .logical import Bare

_FAR = -1e9
_BLOCK = 1024


def rotated(x: Any) -> Any:
    """Rotary embedding."""
    half = x.shape[-1] // 2
    places = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None]
    angles = places / 10_000 ** (jnp.arange(half, dtype=jnp.float32) / half)[None]
    sin, cos = (f(angles).astype(x.dtype)[None, :, None] for f in (jnp.sin, jnp.cos))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def plain(q: Any, k: Any, v: Any, keep: Bare) -> Any:
    """With all scores at once."""
    shared = q.shape[2] // k.shape[2]
    if shared > 1:  # each head of keys is for some of queries
        k, v = (jnp.repeat(one, shared, axis=2) for one in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
    scores = jnp.where(_seen(q.shape[1], jnp.arange(k.shape[1])), scores, _FAR)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def blocks(q: Any, k: Any, v: Any, keep: Bare) -> Any:
    """With the scores of a block of keys at a time."""
    size = min(_BLOCK, k.shape[1])
    count = k.shape[1] // size

    def add(carry: Any, block: Any) -> tuple[Any, None]:
        found, total, highest = carry
        k, v, start = block
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
        scores = jnp.where(_seen(q.shape[1], start + jnp.arange(size)), scores, _FAR)
        new = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new[..., None])
        old = jnp.exp(highest - new)
        part = jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v).astype(jnp.float32)
        found = found * jnp.swapaxes(old, 1, 2)[..., None] + part
        return (found, total * old + jnp.sum(weights, axis=-1), new), None

    def split(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    none = jnp.zeros(q.shape, jnp.float32)
    total = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    carry = none, total, total + _FAR
    starts = size * jnp.arange(count)
    (found, total, _), _ = lax.scan(jax.checkpoint(add), carry, (split(k), split(v), starts))
    return (found / jnp.swapaxes(total, 1, 2)[..., None]).astype(q.dtype)


def _seen(length: int, keys: Any) -> Any:
    """Where a query looks: ``[1, 1, length, keys]``."""
    return (jnp.arange(length)[:, None] >= keys[None])[None, None]
