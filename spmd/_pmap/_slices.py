"""The slices of a mapped array, on their own devices; and arrays made of one value per device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import functools
import math
import operator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
import jax.tree_util as jtu
import numpy as np

from spmd import _jax, errors
from spmd._pmap._options import UNNAMED, repeated_devices
from spmd.errors import Failure, explain, refuse, show_value


def shard_at(x: jax.Array, index: int, axis: int | None = None) -> jax.Array:
    """Returns one slice of an array along its mapped axis, where it is: ``x[index]`` for axis 0.

    No other device takes part, and on the CPU nothing is copied; `x` may be donated afterwards, the
    slice stays. Of an array that nested `pmap` functions have split, the slice is still split over
    the devices that hold it.

    Args:
        x: An array of which each device holds one element along `axis`.
        index: Which slice; negative: counted from the end.
        axis: The mapped axis. None: the first axis that is split so.

    Returns:
        An array without that axis, on the device that holds it.

    Raises:
        TypeError: `x` is no array, or is traced.
        IndexError: There is no such slice.
        ValueError: `x` is not split so, or another process has the slice.
        RuntimeError: `x` was donated or deleted.

    Example:
        >>> x = spmd.pmap(lambda x: x + 1)(np.arange(8))
        >>> spmd.shard_at(x, 3).devices()
    """
    slices = _slices(x, axis, "shard_at")
    at = index if type(index) is int else _index(index)
    if not -len(slices) <= at < len(slices):
        failure = Failure(
            what=f"has no slice {at}",
            expected=f"{-len(slices)} to {len(slices) - 1}: the mapped axis has size {len(slices)}",
            error=SliceError,
        )
        raise explain("shard_at", [failure])
    return _take(x, slices[at], "shard_at")


def unstack(x: jax.Array, axis: int | None = None) -> list[jax.Array]:
    """Returns all slices of an array along its mapped axis, each where it is.

    Args:
        x: As for :func:`shard_at`.
        axis: Likewise.

    Returns:
        One array per element of the mapped axis.

    Raises:
        TypeError: `x` is no array, or is traced.
        ValueError: `x` is not split so, or other processes have some slices.
        RuntimeError: `x` was donated or deleted.
    """
    return [_take(x, s, "unstack") for s in _slices(x, axis, "unstack")]


class SliceError(errors.SpmdError, IndexError):
    """There is no such slice."""

    __module__ = "spmd"


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where a slice is.

    Attributes:
        number: Which one it is.
        axis: The axis that it is without.
        parts: Which of the arrays of one device, that this process has, make it up.
        shape: Its shape.
        sharding: Its sharding, or None where other processes have parts of it.
    """

    number: int
    axis: int
    parts: tuple[int, ...]
    shape: tuple[int, ...]
    sharding: Any


def _slices(x: Any, axis: int | None, subject: str) -> Sequence[_Slice]:
    if not isinstance(x, jax.Array) or isinstance(x, _jax.core.Tracer):
        raise explain(subject, [_no_array(x)])
    if x.is_deleted():
        failure = Failure(
            what="cannot take slices of this array: its buffers are gone",
            expected="an array that was not donated to an earlier call and not deleted",
            error=errors.DonatedArrayError,
        )
        raise explain(subject, [failure])
    found = _layout(x.sharding, x.shape, axis)
    if isinstance(found, Failure):
        raise explain(subject, [found])
    return found


def _take(x: Any, found: _Slice, subject: str) -> jax.Array:
    if found.sharding is None:
        failure = Failure(
            what=f"cannot take slice {found.number}: devices of other processes hold it",
            got=f"process {jax.process_index()} of {jax.process_count()}",
            fix="take the slices of this process's own devices",
            error=errors.ShardingError,
        )
        raise explain(subject, [failure])
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        keys = shard_at(jax.random.key_data(x), found.number, found.axis)
        return jax.random.wrap_key_data(keys, impl=jax.random.key_impl(x))
    arrays = _jax.dispatch.local_parts(x)
    parts = [_jax.dispatch.without_axis(arrays[i], found.axis) for i in found.parts]
    if len(parts) == 1:
        return parts[0]
    return jax.make_array_from_single_device_arrays(found.shape, found.sharding, parts)


@functools.lru_cache(maxsize=1024)
def _layout(sharding: Any, shape: tuple[int, ...], axis: int | None) -> Sequence[_Slice] | Failure:
    """Finds the slices along an axis, or says why there are none."""
    if not isinstance(sharding, NamedSharding):
        return _not_mapped(sharding, shape, axis)
    parts = tuple(sharding.spec) + (None,) * (len(shape) - len(sharding.spec))
    names = [() if p is None else p if isinstance(p, tuple) else (p,) for p in parts]
    sizes = [math.prod(sharding.mesh.shape[n] for n in group) for group in names]
    mapped = [i for i, n in enumerate(shape) if names[i] and sizes[i] == n]
    if axis is None:
        if not mapped:
            return _not_mapped(sharding, shape, axis)
        axis = mapped[0]
    elif axis not in range(-len(shape), len(shape)) or axis % len(shape) not in mapped:
        return _not_mapped(sharding, shape, axis)
    axis %= len(shape)
    rest = PartitionSpec(*parts[:axis], *parts[axis + 1 :])
    left = shape[:axis] + shape[axis + 1 :]
    return tuple(
        _slice(sharding, names[axis], index, axis, rest, left) for index in range(shape[axis])
    )


def _slice(
    sharding: Any,
    names: Sequence[Any],
    index: int,
    axis: int,
    spec: PartitionSpec,
    shape: tuple[int, ...],
) -> _Slice:
    mesh = sharding.mesh
    place = np.unravel_index(index, [mesh.shape[n] for n in names])
    at = dict(zip(names, place, strict=True))
    devices = np.asarray(mesh.devices[tuple(at.get(n, slice(None)) for n in mesh.axis_names)])
    others = tuple(n for n in mesh.axis_names if n not in at)
    held = {d: i for i, d in enumerate(_jax.dispatch.local_device_order(sharding))}
    chosen = [d for d in np.ravel(devices) if d in held]
    if len(chosen) < devices.size:
        return _Slice(index, axis, (), shape, None)
    if len(chosen) == 1:
        result: Any = SingleDeviceSharding(chosen[0], memory_kind=sharding.memory_kind)
    else:
        result = NamedSharding(Mesh(devices, others), spec, memory_kind=sharding.memory_kind)
    return _Slice(index, axis, tuple(held[d] for d in chosen), shape, result)


_jax.core.register_cache(_layout, "slices of mapped arrays")


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Any]) -> Any:
    """Puts one value on each device; together they are arrays with a new leading axis.

    Args:
        shards: Pytrees of arrays or numbers of one structure, shapes and dtypes, one per device.
        devices: The devices.

    Returns:
        A pytree of arrays of shape ``[devices, ...]``, split over the first dimension as `pmap`
        splits its results.

    Raises:
        TypeError: `shards` is no sequence, or a leaf is no array.
        ValueError: Numbers, structures, shapes or dtypes differ, or a device comes twice.
    """
    refuse("device_put_sharded", [*_device_failures(devices), _number_failure(shards, devices)])
    paths, first = jtu.tree_flatten_with_path(shards[0])
    rows, trees = zip(*map(jtu.tree_flatten, shards), strict=True)
    differ = [_tree_failure(i, tree, first) for i, tree in enumerate(trees) if tree != first]
    refuse("device_put_sharded", differ)
    names = [jtu.keystr(path) for path, _ in paths]
    columns = [_column(name, leaves) for name, *leaves in zip(names, *rows, strict=True)]
    refuse("device_put_sharded", [f for _, found in columns for f in found])
    return jtu.tree_unflatten(first, [_stack(leaves, devices) for leaves, _ in columns])


def device_put_replicated(x: Any, devices: Sequence[Any]) -> Any:
    """Puts a value on each device; together they are arrays with a new leading axis.

    Args:
        x: A pytree of arrays or numbers.
        devices: The devices.

    Returns:
        A pytree of arrays of shape ``[devices, ...]``, split over the first dimension.

    Raises:
        TypeError: A leaf is no array.
        ValueError: There is no device, or one comes twice.
    """
    paths, tree = jtu.tree_flatten_with_path(x)
    columns = [_column(jtu.keystr(path), [leaf]) for path, leaf in paths]
    failures = [f for _, found in columns for f in found]
    refuse("device_put_replicated", _device_failures(devices) + failures)
    leaves = [_stack(found * len(devices), devices) for found, _ in columns]
    return jtu.tree_unflatten(tree, leaves)


def _column(name: str, leaves: Sequence[Any]) -> tuple[list[Any], list[Failure]]:
    """The arrays of one leaf, one per device, and what is wrong with them."""
    avals = [_jax.core.aval_of(leaf) for leaf in leaves]
    failures = [
        _no_leaf(f"shards[{i}]{name}" if len(leaves) > 1 else f"x{name}", leaves[i])
        for i, aval in enumerate(avals)
        if aval is None
    ]
    if not failures and len({(a.shape, a.dtype) for a in avals}) > 1:
        shown = [f"shards[{i}]{name}: {_jax.core.short_aval(a)}" for i, a in enumerate(avals)]
        failures.append(_kind_failure(name, shown))
    return [*leaves], failures


def _stack(leaves: Sequence[Any], devices: Sequence[Any]) -> Any:
    mesh = Mesh(np.array(devices), (UNNAMED,))
    parts = [
        jax.device_put(x[None] if isinstance(x, (jax.Array, np.ndarray)) else _row(x), d)
        for x, d in zip(leaves, devices, strict=True)
        if d.process_index == jax.process_index()
    ]
    shape = (len(devices), *parts[0].shape[1:])
    if parts[0].dtype == jax.dtypes.float0:
        return np.zeros(shape, jax.dtypes.float0)  # which is on no device
    return jax.make_array_from_single_device_arrays(
        shape, NamedSharding(mesh, PartitionSpec(UNNAMED)), parts
    )


def _row(number: Any) -> np.ndarray:
    aval = _jax.core.abstractify(number)
    return np.asarray(number, aval.dtype)[None]


def _index(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:
        failure = Failure(
            what="cannot read the index",
            expected="an integer",
            got=show_value(index),
            error=errors.ArgumentError,
        )
        raise explain("shard_at", [failure]) from None


# Failures


def _no_array(x: Any) -> Failure:
    traced = isinstance(x, _jax.core.Tracer)
    return Failure(
        what="cannot say where a traced value lies" if traced else "takes arrays only",
        expected="an array that exists",
        got="a value inside of jit, grad or vmap" if traced else show_value(x),
        fix="call it on what the transformed function returns" if traced else "",
        error=errors.ArgumentError,
    )


def _not_mapped(sharding: Any, shape: tuple[int, ...], axis: int | None) -> Failure:
    where = "an axis" if axis is None else f"axis {axis}"
    return Failure(
        what="finds no mapped axis" if axis is None else f"cannot take slices along axis {axis}",
        expected=f"{where} of which each device holds one element, as in results of pmap",
        got=f"shape {shape}, {sharding}",
        fix="index it: x[i] gathers what is needed",
        error=errors.ShardingError,
    )


def _device_failures(devices: Sequence[Any]) -> list[Failure]:
    if not len(devices):
        return [Failure(what="has no device", given="devices=[]", error=errors.OptionError)]
    return repeated_devices(devices)


def _number_failure(shards: Any, devices: Sequence[Any]) -> Failure | None:
    if not isinstance(shards, Sequence) or isinstance(shards, (str, bytes)):
        return Failure(
            what="takes one value per device",
            expected="a list or tuple of pytrees",
            got=show_value(shards),
            error=errors.ArgumentError,
        )
    if len(shards) == len(devices):
        return None
    return Failure(
        what="needs one value per device",
        expected=f"{len(devices)} values",
        got=f"{len(shards)}",
        error=errors.OptionError,
    )


def _tree_failure(index: int, tree: Any, first: Any) -> Failure:
    return Failure(
        what=f"cannot stack shards[{index}]: it has another structure than shards[0]",
        expected=f"{first}",
        got=f"{tree}",
        error=errors.OptionError,
    )


def _no_leaf(name: str, leaf: Any) -> Failure:
    return Failure(
        what=f"cannot put {name}: it is no array",
        expected="arrays and numbers",
        got=show_value(leaf),
        error=errors.ArgumentError,
    )


def _kind_failure(name: str, rows: Sequence[str]) -> Failure:
    return Failure(
        what=f"cannot stack values of different kinds{' at ' + name if name else ''}",
        expected="one shape and dtype",
        got="\n".join(rows[:20]),
        error=errors.OptionError,
    )
