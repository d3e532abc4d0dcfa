"""From an array, a traced value, a sharding or a spec of JAX to a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
import operator
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding
import numpy as np

from spmd import _jax, _mesh, _resolve
from spmd._spec import ParsedPartitionSpec, show_spec
from spmd.errors import Failure, OptionError, explain, show_value
from spmd.inspection.compile.arguments import splits_of_spec
from spmd.inspection.records.pictures import (
    Picture,
    Pictures,
    Shard,
    no_mesh,
    no_shape,
    no_sharding,
    shards_of,
)

_SUBJECT = "visualize"
_PLACES = "No devices are known: numbers are places on the mesh, the last axis fastest."


def visualize(x_or_sharding: Any, *, shape: Sequence[int] | None = None) -> Picture | Pictures:
    """Shows which device holds which part of an array, or of each array of a tree.

    Args:
        x_or_sharding: an array of JAX, also one that is being traced, inside of `jax.shard_map`
            too; a `jax.ShapeDtypeStruct` with a sharding; a sharding; or a PartitionSpec for the
            mesh that is active. An array of NumPy is drawn where `jax.numpy.asarray` places it.
            Also a pytree of all these.
        shape: of the array, for a sharding or a spec, which have none. A dimension need not be
            divisible: the last shards are then smaller, as in the middle of a program.

    Returns:
        A picture of any rank: `print` it, put it last in a cell of a notebook, or `save` it as
        HTML. It is complete in itself: nothing is printed here. For a pytree, a picture of each
        leaf with its path, of which the first twenty are drawn.

    Raises:
        ArgumentError: there is no sharding in what is given.
        OptionError: the shape is missing, or given where there is one already.
        ShardingError: the spec does not fit the shape or the mesh.
        MeshError: a PartitionSpec is given, and no mesh is active.

    Example:
        print(spmd.visualize(P("data", "model"), shape=(8, 16)))
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(x_or_sharding)
    if jax.tree_util.treedef_is_leaf(tree) or not leaves:
        return picture_of(x_or_sharding, shape)
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    return Pictures(pictures={name: picture_of(leaf, shape, name) for name, leaf in named})


def picture_of(given: Any, shape: Sequence[int] | None, path: str = "") -> Picture:
    """The picture of one array or sharding; `path` is its place in a tree."""
    if isinstance(given, Tracer):
        _refuse_shape(shape, "a traced value")
        # Eager `grad` works on an array that lies somewhere; under `vmap` that has another shape.
        held = _jax.core.underlying(given)
        if isinstance(held, Tracer) or held.shape != given.shape:
            return _of_traced(given)
        given = held
    if isinstance(given, (Sharding, PartitionSpec)):
        if shape is None:
            raise no_shape(f"a {type(given).__name__}")
        # Only the dimensions count, so any element type does for the checks.
        aval = jax.ShapeDtypeStruct(_dims(shape), jax.numpy.float32)
        if isinstance(given, PartitionSpec):
            if (mesh := _mesh.current_mesh()) is None:
                raise no_mesh()
            given = _Placed(mesh, given)
        return _of_sharding(given, aval, typed=False)
    if isinstance(given, (np.ndarray, np.generic, bool, int, float, complex)):
        _refuse_shape(shape, "an array")
        # The default device is a matter of several options, which JAX combines.
        sharding = jax.numpy.zeros(()).sharding
        picture = _of_sharding(sharding, _jax.core.abstractify(given), typed=True)
        note = "It is in the memory of the host: this is where jax.numpy.asarray places it."
        return dataclasses.replace(picture, notes=(note,))
    sharding = getattr(given, "sharding", None)
    if not isinstance(sharding, Sharding):
        raise no_sharding(given, path)
    _refuse_shape(shape, "an array")
    return _of_sharding(sharding, given, typed=True)


def _dims(shape: Any) -> tuple[int, ...]:
    try:
        dims = tuple(map(operator.index, shape))
    except TypeError:
        dims = None
    if dims is None or any(n < 0 for n in dims):
        failure = Failure(
            what="takes the shape of the array",
            expected="a tuple of whole numbers that are not negative, such as shape=(8, 16)",
            got=f"shape={show_value(shape)}",
            error=OptionError,
        )
        raise explain(_SUBJECT, [failure])
    return dims


def picture_on(mesh: Any, spec: PartitionSpec, shape: Sequence[int]) -> Picture:
    """The picture of a PartitionSpec, checked in words of ours, on a mesh that may be abstract."""
    # Only the dimensions count, so any element type does for the checks.
    aval = jax.ShapeDtypeStruct(tuple(shape), jax.numpy.float32)
    return _of_sharding(_Placed(mesh, spec), aval, typed=False)


def _refuse_shape(shape: Sequence[int] | None, what: str) -> None:
    if shape is not None:
        failure = Failure(
            what=f"takes no shape with {what}, which has one",
            given=f"shape={tuple(shape)}",
            fix="leave it out",
            error=OptionError,
        )
        raise explain(_SUBJECT, [failure])


class _Placed(NamedTuple):
    """A PartitionSpec on a mesh, which JAX would check for a NamedSharding in words of its own."""

    mesh: Any
    spec: PartitionSpec


def _of_sharding(sharding: Any, aval: Any, *, typed: bool) -> Picture:
    named = isinstance(sharding, (NamedSharding, _Placed))
    mesh = dict(sharding.mesh.shape) if named else {}
    if named:
        _check(sharding, aval)
        splits = splits_of_spec(aval.shape, sharding.spec, mesh)
        ids, platform = _devices(sharding.mesh)
        shards = shards_of(aval.shape, splits, mesh, ids)
    else:
        platform = next(iter(sharding.device_set)).platform
        shards = _listed(sharding, aval.shape)
    return Picture(
        shape=tuple(aval.shape),
        dtype=_jax.core.short_aval(aval).partition("[")[0] if typed else "",
        itemsize=aval.dtype.itemsize if typed else 0,
        sharding=show_spec(sharding.spec) if named else _resolve.show_sharding(sharding),
        mesh=mesh,
        platform=platform,
        shards=shards,
        notes=tuple(_notes(sharding.spec, platform)) if named else (),
    )


def _check(sharding: Any, aval: Any) -> None:
    parsed = ParsedPartitionSpec.from_user_input(sharding.spec, "spec", allow_unconstrained=True)
    failure = _resolve.spec_failure(
        parsed, aval, sharding.mesh, "the array", "the spec", boundary=False
    )
    if failure:
        raise explain(_SUBJECT, [failure])


def _devices(mesh: Any) -> tuple[Sequence[int], str]:
    """Ids of the devices in mesh order, and their platform; places for a mesh without devices."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return range(math.prod(mesh.shape.values())), ""
    return [device.id for device in mesh.devices.flat], mesh.devices.flat[0].platform


def _notes(spec: Any, platform: str) -> Iterator[str]:
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        yield "Unconstrained dimensions are drawn whole: the partitioner decides about them."
    if partial := getattr(spec, "unreduced", None):
        axes = ", ".join(sorted(map(str, partial)))
        yield f"Devices along {axes} hold parts of a sum, which are not added up yet."
    if not platform:
        yield _PLACES


def _listed(sharding: Any, shape: Sequence[int]) -> tuple[Shard, ...]:
    """The parts of a sharding that has no spec, as it lists them itself."""
    found: dict[Any, list[int]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        ranges = tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
        found.setdefault(ranges, []).append(device.id)
    return tuple(Shard(index=i, devices=tuple(sorted(d))) for i, d in sorted(found.items()))


# Values that are being traced


def _of_traced(x: Any) -> Picture:
    aval = jax.typeof(x)
    mesh, spec = aval.sharding.mesh, aval.sharding.spec
    sizes = dict(mesh.shape)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = [name for name in sizes if types[name] == AxisType.Manual]
    auto = [name for name in sizes if types[name] == AxisType.Auto]
    varying, checked = _jax.core.varying_axes(aval)
    differing = [name for name in manual if name in varying or not checked]
    # The devices are known where this thread has entered the mesh.
    current = _mesh.current_mesh()
    entered = current is not None and dict(current.shape) == sizes
    ids, platform = _devices(current if entered else mesh)
    notes = [*_traced_notes(manual, differing, auto, checked, sizes)]
    shards, shown = (), "a traced value"
    if len(auto) < len(sizes):
        splits, shown = splits_of_spec(aval.shape, spec, sizes), show_spec(spec)
        shards = shards_of(aval.shape, splits, sizes, ids, differing)
        notes += [_PLACES] if shards and not platform else []
    return Picture(
        shape=tuple(aval.shape),
        dtype=_jax.core.short_aval(aval).partition("[")[0],
        itemsize=aval.dtype.itemsize,
        sharding=shown,
        mesh=sizes,
        platform=platform,
        shards=shards,
        notes=tuple(notes),
    )


def _traced_notes(
    manual: Sequence[str],
    differing: Sequence[str],
    auto: Sequence[str],
    checked: bool,
    sizes: Mapping[str, int],
) -> Iterator[str]:
    if manual:
        yield f"Inside of shard_map over {', '.join(manual)}: the shape is that of one place."
        if not checked:
            yield "check_vma=False: what is drawn apart may be the same."
        elif same := [name for name in manual if name not in differing]:
            yield f"The value is the same along {', '.join(same)}."
    if auto:
        axes = ", ".join(auto)
        yield f"How {axes} split{'s' * (len(auto) == 1)} it, the partitioner decides later."
    if not sizes:
        yield (
            "No mesh is known while this is traced: spmd.report says what the partitioner decides."
        )
