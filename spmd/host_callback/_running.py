"""How a host function is called, and what is made of its results."""

from __future__ import annotations

from collections.abc import Sequence
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from spmd import _jax
from spmd.host_callback._records import HostCall, Shard, described
from spmd.host_callback._registry import Entry, Site, carrier


class ResultError(TypeError):
    """A host function returned something else than its `result_shape` says."""


def called_with(
    entry: Entry, operands: Sequence[np.ndarray], device: Any, site: Site | None, partition: int
) -> Any:
    """Calls the host function of an entry with operands as they came from a device."""
    call = entry.call
    values = [
        v if v.dtype == d else v.astype(d) for v, d in zip(operands, entry.dtypes, strict=True)
    ]
    arguments: dict[str, Any] = {"device": device} if call.with_device else {}
    if call.per_shard:
        arguments["shard"] = _shard(call, values, device, site, partition)
    return run(call, values, arguments)


def run(call: HostCall, values: Sequence[np.ndarray], arguments: dict[str, Any]) -> Any:
    """Calls the host function with the values of the leaves of its argument."""
    arg = jtu.tree_unflatten(call.in_tree, values)
    if call.out_tree is None:
        return call.func(arg, described(call.transforms), **arguments)
    return call.func(arg, **arguments)


def _shard(
    call: HostCall, values: Sequence[np.ndarray], device: Any, site: Site | None, partition: int
) -> Shard:
    if site is None:  # one device holds all
        indices = [tuple(slice(0, n) for n in v.shape) for v in values]
    elif site.mode == "each":
        return Shard(device=device, coordinates=site.coordinates(partition), index=None)
    else:
        indices = [p.index(partition) for p in site.placements]
    coordinates = {} if site is None else site.coordinates(partition)
    index = jtu.tree_unflatten(call.in_tree, indices)
    return Shard(device=device, coordinates=coordinates, index=index)


def call_results(call: HostCall, value: Any) -> list[np.ndarray]:
    """Returns the leaves of what a host function returned, as the device takes them.

    Raises:
        ResultError: They are not what `result_shape` says.
    """
    leaves, tree = jtu.tree_flatten(value)
    if tree != call.out_tree:
        raise ResultError(_mismatch(call, f"a tree {tree}", f"a tree {call.out_tree}"))
    found = []
    names = [f"result{jtu.keystr(path)}" for path, _ in jtu.tree_flatten_with_path(value)[0]]
    for name, leaf, (shape, dtype) in zip(names, leaves, call.results, strict=True):
        array = np.asarray(leaf)
        if array.dtype != dtype and array.dtype.kind in "biufc":
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
        if array.shape != shape or array.dtype != dtype:
            got, expected = (_show(a.dtype, a.shape) for a in (array, np.empty(shape, dtype)))
            raise ResultError(_mismatch(call, f"{name} = {got}", f"{name} = {expected}"))
        found.append(np.ascontiguousarray(array).reshape(shape).astype(carrier(dtype), copy=False))
    return found


def _show(dtype: Any, shape: tuple[int, ...]) -> str:
    try:
        return _jax.short_aval(jax.ShapeDtypeStruct(shape, dtype))
    except TypeError:
        return f"{dtype}[{','.join(map(str, shape))}]"  # e.g. strings


def _mismatch(call: HostCall, got: str, expected: str) -> str:
    return (
        f"call of `{call.name}` got another result than its result_shape says.\n"
        f"  expected  {expected}\n  got       {got}"
    )


def error_text(call: HostCall, error: BaseException) -> str:
    """What a program is told whose host function failed."""
    if isinstance(error, ResultError):
        return str(error)
    stack = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    return f"call of `{call.name}` raised {kind}: {error}\n{stack}"


def run_here(
    call: HostCall, args: Sequence[Any], values: Sequence[np.ndarray], devices: Any
) -> Any:
    """Runs the host function of an eager call in this thread; it raises what that one raises.

    Args:
        call: The record.
        args: The arrays, of which a tap is the identity.
        values: Their values.
        devices: Where they are.
    """
    device = devices[min(call.device_index, len(devices) - 1)]
    arguments: dict[str, Any] = {"device": device} if call.with_device else {}
    if call.per_shard:
        index = jtu.tree_unflatten(
            call.in_tree, [tuple(slice(0, n) for n in v.shape) for v in values]
        )
        arguments["shard"] = Shard(device=device, coordinates={}, index=index)
    value = run(call, values, arguments)
    if call.out_tree is None:
        return args
    stack = () if call.stack is None else (call.stack,)
    results = zip(call_results(call, value), call.results, strict=True)
    return [jnp.asarray(v.astype(d)).reshape((*stack, *s)) for v, (s, d) in results]
