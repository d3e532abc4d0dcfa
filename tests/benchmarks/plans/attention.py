"""Causal attention of ``[batch, length, heads, head_dim]``; heads of keys and values may be fewer.

`plain` makes all scores at once, `blocks` those of a block of keys after another (Rabe and Staats,
"Self-attention Does Not Need O(n^2) Memory", 2021), and `splash` calls JAX's Pallas kernel.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

import spmd

from .logical import Bare

_FAR = -1e9
_BLOCKS = 32
_KERNEL_BLOCK = 512  # sa_block_q and others of MaxText's base.yml
_HEADS = "heads", "kv_heads", "kv_heads"
_SIZES = (
    "block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
    "block_kv_dkv_compute", "block_q_dq", "block_kv_dq",
)  # fmt: skip


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
    count = min(_BLOCKS, k.shape[1])
    size = k.shape[1] // count

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


def splash(q: Any, k: Any, v: Any, keep: Bare) -> Any:
    """By the kernel, on the heads and rows of each device, as MaxText calls it.

    Where there is no TPU, `plain` stands in for it.
    """
    mesh = spmd.current_mesh()
    if mesh is None or mesh.devices.flat[0].platform != "tpu":
        return plain(q, k, v, keep)
    from jax.experimental.pallas.ops.tpu import splash_attention

    specs = [
        keep.local(one, f"batch length {name} dim")
        for one, name in zip((q, k, v), _HEADS, strict=True)
    ]
    shared = specs[0][2]
    axes = (shared,) if isinstance(shared, str) else shared or ()
    heads = q.shape[2] // math.prod(mesh.shape[axis] for axis in axes)
    # Keys that are whole beside queries that are split: each device takes those of its own.
    if specs[1][2] != shared:
        k, v = (jnp.repeat(one, q.shape[2] // k.shape[2], axis=2) for one in (k, v))
        specs[1:] = [specs[0]] * 2
    mask = splash_attention.CausalMask((q.shape[1], k.shape[1]))
    sizes = splash_attention.BlockSizes(**dict.fromkeys(_SIZES, min(_KERNEL_BLOCK, q.shape[1])))

    def local(q: Any, k: Any, v: Any) -> Any:
        kernel = splash_attention.make_splash_mha(
            splash_attention.MultiHeadMask([mask] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
        )
        q, k, v = (jnp.swapaxes(one, 1, 2) for one in (q, k, v))
        return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2)

    call = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
    )
    return call(q, k, v)


def _seen(length: int, keys: Any) -> Any:
    """Where a query looks: ``[1, 1, length, keys]``."""
    return (jnp.arange(length)[:, None] >= keys[None])[None, None]
