"""How `vmap` treats a `call`, by its `vmap_method`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from spmd.host_callback._records import HostCall

METHODS = ("sequential", "expand_dims", "broadcast_all")


def batch(
    primitive: Any, args: Sequence[Any], dims: Sequence[Any], call: HostCall
) -> tuple[Sequence[Any], Sequence[int]]:
    """Applies `vmap` to a call.

    Args:
        primitive: The primitive to bind.
        args: Operands.
        dims: Per operand its batched dimension, or None.
        call: Its `vmap_method` is one of :data:`METHODS`.

    Returns:
        The results, batched along dimension 0.
    """
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    front = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    if call.vmap_method == "sequential":
        outs = _sequential(primitive, front, dims, call)
    else:
        outs = _at_once(primitive, front, dims, call, size)
    return outs, [0] * len(outs)


def _sequential(
    primitive: Any, args: Sequence[Any], dims: Sequence[Any], call: HostCall
) -> Sequence[Any]:
    def one(batched: Sequence[Any]) -> Any:
        rest = iter(batched)
        operands = [x if d is None else next(rest) for x, d in zip(args, dims, strict=True)]
        return primitive.bind(*operands, call=call)

    return jax.lax.map(one, [x for x, d in zip(args, dims, strict=True) if d is not None])


def _at_once(
    primitive: Any, args: Sequence[Any], dims: Sequence[Any], call: HostCall, size: int
) -> Sequence[Any]:
    given = 1 if call.vmap_method == "expand_dims" else size
    operands = [
        jnp.broadcast_to(x, (given, *x.shape)) if d is None else x
        for x, d in zip(args, dims, strict=True)
    ]
    results = tuple(((size, *shape), dtype) for shape, dtype in call.results)
    return primitive.bind(*operands, call=replace(call, results=results))
