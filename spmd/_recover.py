"""Recover: OpSharding -> PartitionSpec, and back; integer arithmetic only.

Lowering a spec numbers the devices of a mesh in row-major order, moves whole mesh axes, and
flattens the result into a list: the device assignment. Its entry ``i`` is a sum of strides, one
per axis, so the axes can be read off again. Mesh axes of size 1 leave no trace in it. All other
axes of a mesh have different strides, even where their sizes are equal, so an axis is found by its
stride and never by its size.

A device of an OpSharding is a position in the device assignment of its program, which is the
row-major order of ``mesh.devices``; the device's own id does not matter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
import math
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec
import numpy as np

from spmd import _jax
from spmd._mesh import show_mesh
from spmd._spec import REPLICATED, ParsedPartitionSpec
from spmd.errors import Failure, RecoveryError, SpecTypeError, explain, refuse

_Type = _jax.core.OpSharding.Type


class _NoSpecError(Exception):
    """Why there is no PartitionSpec, for the function that knows what was given."""

    def __init__(self, why: str, **rows: str):
        super().__init__(why)
        self.failure = Failure(what=f"has no PartitionSpec: {why}", error=RecoveryError, **rows)


# Device assignments


def strides_for_sizes(sizes: Sequence[int]) -> np.ndarray:
    """Returns the row-major strides of an array, in elements.

    Args:
        sizes: Sizes of the dimensions, from major to minor.

    Returns:
        int64 array of ``len(sizes)`` strides: ``[2, 3, 4]`` gives ``[12, 4, 1]``.
    """
    minor_to_major = [1, *list(sizes)[:0:-1]]
    return np.cumprod(minor_to_major, dtype=np.int64)[::-1][: len(sizes)]


def unflatten_superdims(assignment: Sequence[int]) -> list[tuple[int, int]]:
    """Reads the dimensions of an array off a flat device assignment.

    Neighbouring dimensions that are also neighbours in the unpermuted array cannot be told apart
    and come as one superdimension.

    Inverse: entry ``i`` of `assignment` is the sum of ``digit * stride`` over the result, the
    digits being those of ``i`` in the mixed radix of the sizes. So ``np.arange(n)``, reshaped to
    the sizes by falling stride, transposed to their order here from major to minor, and flattened,
    gives `assignment`.

    Args:
        assignment: A permutation of ``range(n)``.

    Returns:
        ``(size, stride)`` pairs from minor to major: ``[0, 2, 4, 1, 3, 5]`` gives
        ``[(3, 2), (2, 1)]`` and ``range(6)`` gives ``[(6, 1)]``.

    Raises:
        RecoveryError: `assignment` is no permutation, or not of that form.
    """
    devices = np.ravel(assignment)
    try:
        _check_permutation(devices, devices.size)
        return _superdims(devices)
    except _NoSpecError as e:
        failure = e.failure
    raise explain("Device assignment", [failure])


def explode_superdims(
    sizes: Sequence[int], dims: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Cuts superdimensions into the dimensions of a known array.

    Inverse: merging neighbours ``(s, t * k), (k, t)`` of the result into ``(s * k, t)`` gives
    `dims` again, in reverse.

    Args:
        sizes: Sizes of the array's dimensions, from major to minor; size 1 leaves no trace.
        dims: ``(size, stride)`` pairs from minor to major, as from :func:`unflatten_superdims`.

    Returns:
        ``(size, stride)`` pairs from major to minor, each a dimension of `sizes` with its stride.

    Raises:
        RecoveryError: The superdimensions are not made of whole dimensions of the array.
    """
    pieces = _pieces(sizes, dims)
    if pieces is None or any(p.size != sizes[p.axis] for p in pieces):
        whole = ", ".join(map(str, sizes)) or "none"
        failure = Failure(
            what="has no PartitionSpec: it is not made of whole dimensions",
            given=f"(size, stride) {', '.join(map(str, dims))}",
            expected=f"runs of dimensions of an array of sizes {whole}",
            error=RecoveryError,
        )
        raise explain("Superdimension list", [failure])
    return [(p.size, p.stride) for p in pieces]


def unflatten_array(named_sizes: Mapping[Any, int], assignment: Sequence[int]) -> list[Any]:
    """Recovers the order of mesh axes from a flat device assignment.

    Inverse: ``np.arange(n).reshape(sizes).transpose(order).ravel()`` gives `assignment`, the order
    being the result followed (or preceded) by the axes of size 1.

    Args:
        named_sizes: Mesh axis names and sizes, in the order of the mesh.
        assignment: A permutation of ``range(n)``, `n` the number of devices.

    Returns:
        Names from major to minor, without axes of size 1.

    Raises:
        RecoveryError: No order of whole axes gives this assignment.
    """
    devices, names = np.ravel(assignment), list(named_sizes)
    try:
        _check_permutation(devices, math.prod(named_sizes.values()))
        pieces = _read_axes(named_sizes, devices)
        for p in pieces:
            if p.size != named_sizes[names[p.axis]]:
                raise _part_of_axis(named_sizes, p, "moves a part")
        return [names[p.axis] for p in pieces]
    except _NoSpecError as e:
        failure = e.failure
    raise explain("Device assignment", [failure])


class _Piece(NamedTuple):
    """A run of positions along one mesh axis: all of it, or a part."""

    axis: int  # position among the axes of the mesh
    size: int
    stride: int  # distance of neighbours in the row-major order of the mesh


def _check_permutation(devices: np.ndarray, n: int) -> None:
    if devices.size == 0 or not np.array_equal(np.sort(devices), np.arange(n)):
        expected = f"every device position of 0..{n - 1} once"
        raise _malformed(expected, got=_show_list(devices.tolist()))


def _superdims(devices: np.ndarray) -> list[tuple[int, int]]:
    dims, rest, rebuilt = [], devices, np.zeros(1, dtype=np.int64)
    while rest.size > 1 and rest[0] == 0:
        stride = int(rest[1])
        off = np.flatnonzero(rest != stride * np.arange(rest.size))
        size = int(off[0]) if off.size else rest.size
        dims.append((size, stride))
        rebuilt = np.add.outer(stride * np.arange(size), rebuilt).ravel()
        rest = rest[::size]
    # The strides were read off single entries. Only the whole list proves them.
    if not np.array_equal(rebuilt, devices):
        raise _no_axis_order(devices)
    return dims


def _pieces(sizes: Sequence[int], dims: Sequence[tuple[int, int]]) -> list[_Piece] | None:
    """Cuts superdimensions at axis boundaries; from major to minor, None where a cut is ragged."""
    axes = list(zip(sizes, strides_for_sizes(sizes).tolist(), strict=True))
    pieces = []
    for size, stride in dims:
        while size > 1:
            piece = _piece(axes, size, stride)
            if piece is None:
                return None
            pieces.append(piece)
            size, stride = size // piece.size, stride * piece.size
    return pieces[::-1]


def _piece(axes: list[tuple[int, int]], size: int, stride: int) -> _Piece | None:
    """The minor end of a superdimension: as much of it as lies in one axis."""
    for axis, (axis_size, axis_stride) in enumerate(axes):
        span = axis_stride * axis_size
        if axis_stride <= stride < span:
            room = span // stride
            ragged = span % stride or max(size, room) % min(size, room)
            return None if ragged else _Piece(axis, min(size, room), stride)
    return None


def _read_axes(mesh_shape: Mapping[Any, int], devices: np.ndarray) -> list[_Piece]:
    pieces = _pieces(list(mesh_shape.values()), _superdims(devices))
    if pieces is None:
        raise _no_axis_order(devices)
    return pieces


# OpSharding -> PartitionSpec


def parse_op_sharding(op_sharding: Any, mesh: Any) -> ParsedPartitionSpec | list[Any]:
    """Recovers the PartitionSpec that an OpSharding stands for on a mesh.

    Inverse: ``parse_op_sharding(get_aval_sharding_proto(aval, spec, mesh), mesh)`` has the
    partitions of `spec` up to axes of size 1, which an OpSharding does not record.

    A value that nothing splits gives :data:`REPLICATED`, however it is spelled. Any other gives one
    entry per dimension of the value, unsplit trailing ones included, and as the spec to show its
    own: ``P('data', None)`` for a matrix that is split by rows.

    Args:
        op_sharding: An ``OpSharding`` proto, as from an executable's ``get_parameter_shardings()``
            and ``get_output_shardings()``.
        mesh: The mesh whose devices, in row-major order, are the program's device assignment.
            Only its axis names and sizes are read, so an ``AbstractMesh`` will do.

    Returns:
        The spec; for a TUPLE a list with one per element.

    Raises:
        RecoveryError: No PartitionSpec on `mesh` says this. The message tells why: parts of an
            axis, a device order that no order of axes gives, MANUAL, UNKNOWN, UNREDUCED, MAXIMAL
            on a mesh of several devices, another number of devices, or a malformed device list.
            All bad elements of a tuple are told at once.
        TypeError: `op_sharding` is no OpSharding.
    """
    failures: list[Failure] = []
    spec = _parse(op_sharding, mesh, "", failures)
    refuse("OpSharding", failures)
    return spec


def _parse(op_sharding: Any, mesh: Any, where: str, failures: list[Failure]) -> Any:
    what = f"element {where} " if where else ""
    if not isinstance(op_sharding, _jax.core.OpSharding):
        failure = _not_a_proto(op_sharding)
        failures.append(replace(failure, what=what + failure.what))
        return None
    if op_sharding.type == _Type.TUPLE:
        elements = enumerate(op_sharding.tuple_shardings)
        return [_parse(e, mesh, f"{where}[{i}]", failures) for i, e in elements]
    proto = _readable(op_sharding)
    try:
        return _parse_leaf(proto, mesh.shape)
    except _NoSpecError as e:
        given = f"{_show(proto)} on {show_mesh(mesh)}"
        failures.append(replace(e.failure, what=what + e.failure.what, given=given))
        return None


def _readable(op_sharding: Any) -> Any:
    if op_sharding.type != _Type.REPLICATED:
        return op_sharding
    # XLA's newer form names mesh axes in a field that the Python proto does not show. Such a proto
    # says REPLICATED in `type`, whatever it means.
    return _jax.core.HloSharding.v3_to_v2_sharding(
        _jax.core.HloSharding.from_proto(op_sharding)
    ).to_proto()


def _parse_leaf(proto: Any, mesh_shape: Mapping[Any, int]) -> ParsedPartitionSpec:
    num_devices = math.prod(mesh_shape.values())
    if _is_replicated(proto, num_devices):
        return REPLICATED
    tiles, devices = _tiles(proto, num_devices)
    partitions = _partitions(tiles, _read_axes(mesh_shape, devices), mesh_shape)
    if not any(partitions):
        return REPLICATED
    spec = ParsedPartitionSpec(None, partitions).to_partition_spec()
    return ParsedPartitionSpec(spec, partitions)


def _is_replicated(proto: Any, num_devices: int) -> bool:
    """Whether all devices hold the whole value; where not, the proto says tiles."""
    if proto.type == _Type.REPLICATED or (proto.type == _Type.MAXIMAL and num_devices == 1):
        return True
    if proto.type == _Type.MAXIMAL:
        raise _NoSpecError(
            "it is MAXIMAL on a mesh of several devices",
            expected=f"a value that all {num_devices} devices hold, or a part on each",
            got=f"the whole value on device {_show_list(proto.tile_assignment_devices)} alone",
        )
    if proto.type != _Type.OTHER:
        raise _unsayable_type(_Type(proto.type), "it is")
    return False


def _tiles(proto: Any, num_devices: int) -> tuple[list[int], np.ndarray]:
    """Returns the tiles per dimension, and the devices, those of one tile in rising order."""
    sizes, groups = list(proto.tile_assignment_dimensions), _group_types(proto)
    if math.prod(sizes) != num_devices:
        raise _NoSpecError(
            "it is tiled over another number of devices",
            expected=f"tiles for the {num_devices} devices of the mesh",
            got=f"{math.prod(sizes)} tiles",
            fix="use the mesh that the sharding was made on",
        )
    rank = len(sizes) - len(groups)
    if rank < 0:
        raise _malformed(f"at most {len(sizes)} last_tile_dims", f"{len(groups)} last_tile_dims")
    for size, kind in zip(sizes[rank:], groups, strict=True):
        if size > 1 and kind != _Type.REPLICATED:
            raise _unsayable_type(kind, f"groups of {size} devices are")
    devices = _devices(proto)
    _check_permutation(devices, num_devices)
    # Replicas hold the same data, so their order says nothing. Rising order is that of the mesh.
    groups_of_replicas = devices.reshape(math.prod(sizes[:rank]), -1)
    return sizes[:rank], np.sort(groups_of_replicas, axis=1).ravel()


def _group_types(proto: Any) -> list[Any]:
    """The types of the trailing tile dimensions that split devices and no dimension."""
    if proto.last_tile_dims:
        return [_Type(kind) for kind in proto.last_tile_dims]
    return [_Type.REPLICATED] if proto.replicate_on_last_tile_dim else []


def _devices(proto: Any) -> np.ndarray:
    sizes, perm = list(proto.iota_reshape_dims), list(proto.iota_transpose_perm)
    if not sizes:
        return np.asarray(proto.tile_assignment_devices, dtype=np.int64)
    if sorted(perm) != list(range(len(sizes))):
        expected = f"iota_transpose_perm to permute the {len(sizes)} iota_reshape_dims"
        raise _malformed(expected, f"iota_reshape_dims {sizes}, iota_transpose_perm {perm}")
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(perm).ravel()


def _partitions(
    tiles: Sequence[int], pieces: Sequence[_Piece], mesh_shape: Mapping[Any, int]
) -> tuple[tuple[Any, ...], ...]:
    """Deals the axes, from major to minor, to the dimensions; what is left over replicates."""
    names, rest = list(mesh_shape), iter(pieces)
    partitions = []
    for dim, ways in enumerate(tiles):
        axes = []
        while ways > 1:
            piece = next(rest)
            axis = names[piece.axis]
            used = math.gcd(ways, piece.size)
            if used not in (ways, piece.size):
                raise _cuts_across(dim, tiles[dim], axis, piece.size)
            if used != mesh_shape[axis]:
                major = piece._replace(size=used, stride=piece.stride * piece.size // used)
                raise _part_of_axis(mesh_shape, major, f"splits dimension {dim} over a part")
            axes.append(axis)
            ways //= used
        partitions.append(tuple(axes))
    return tuple(partitions)


# OpSharding -> the axes of some mesh


class TileAxis(NamedTuple):
    """An axis that a mesh has to have for an OpSharding.

    Attributes:
        dim: The dimension that it splits; None where it replicates.
        size: How many positions it has.
        stride: Distance of neighbours in the row-major order of the devices.
    """

    dim: int | None
    size: int
    stride: int


def tile_axes(op_sharding: Any, num_devices: int) -> tuple[int | None, list[TileAxis]] | Failure:
    """Reads the axes of a mesh off an OpSharding, where none is known, or says why it cannot.

    Neighbouring axes that could be one come as one. Sorted by falling stride, they are the mesh.
    Returns the rank of the value, None if all devices hold it whole; and dimension by dimension,
    from major to minor, its axes, those that replicate last.
    """
    if not isinstance(op_sharding, _jax.core.OpSharding):
        return _not_a_proto(op_sharding)
    proto = _readable(op_sharding)
    try:
        return _tile_axes(proto, num_devices)
    except _NoSpecError as e:
        return replace(e.failure, what=f"has no ShardingSpec: {e}", given=_show(proto))


def _tile_axes(proto: Any, num_devices: int) -> tuple[int | None, list[TileAxis]]:
    if proto.type == _Type.TUPLE:
        raise _NoSpecError("it is a TUPLE", fix="take its tuple_shardings one by one")
    if _is_replicated(proto, num_devices):
        return None, [TileAxis(None, num_devices, 1)] * (num_devices > 1)
    tiles, devices = _tiles(proto, num_devices)
    groups = [*enumerate(tiles), (None, num_devices // math.prod(tiles))]
    rest, axes = _superdims(devices), []
    for dim, ways in reversed(groups):
        while ways > 1:
            size, stride = rest.pop(0)
            used = math.gcd(ways, size)
            if used not in (ways, size):
                raise _no_axis_order(devices)
            axes.append(TileAxis(dim, used, stride))
            if used < size:
                rest.insert(0, (size // used, stride * used))
            ways //= used
    return len(tiles), axes[::-1]


# Failures


def _no_axis_order(devices: np.ndarray) -> _NoSpecError:
    return _NoSpecError(
        "no order of mesh axes gives its device order",
        expected="the devices of a mesh in row-major order, moved by whole axes",
        got=f"device order {_show_list(devices)}",
        fix="use the mesh that the sharding was made on",
    )


def _part_of_axis(mesh_shape: Mapping[Any, int], piece: _Piece, what: str) -> _NoSpecError:
    axis, axis_size = list(mesh_shape.items())[piece.axis]
    axis_stride = int(strides_for_sizes(list(mesh_shape.values()))[piece.axis])
    step = piece.stride // axis_stride
    factors = [f for f in (axis_size // (piece.size * step), piece.size, step) if f > 1]
    return _NoSpecError(
        f"it {what} of mesh axis {axis!r}",
        expected="whole mesh axes: a PartitionSpec cannot name a part of one",
        got=f"{piece.size} of the {axis_size} positions of {axis!r}, {step} apart",
        fix=f"give the mesh axes of sizes {', '.join(map(str, factors))} in place of {axis!r}",
    )


def _cuts_across(dim: int, tiles: int, axis: Any, size: int) -> _NoSpecError:
    return _NoSpecError(
        "no order of mesh axes gives its tiles",
        expected=f"dimension {dim} in as many tiles as its mesh axes have positions",
        got=f"{tiles} tiles, which cut across the {size} positions of axis {axis!r}",
        fix="use the mesh that the sharding was made on",
    )


_MEANING = {
    _Type.MANUAL: "the program itself says what each device holds, as in shard_map",
    _Type.UNKNOWN: "the partitioner has not decided yet",
    _Type.UNREDUCED: "the devices hold partial results that are still to be reduced",
}


def _unsayable_type(kind: Any, what: str) -> _NoSpecError:
    return _NoSpecError(
        f"{what} {kind.name}",
        expected="REPLICATED, or dimensions tiled over the devices of the mesh",
        got=f"{kind.name}: {_MEANING.get(kind, 'of no use for the data of one value')}",
    )


def _malformed(expected: str, got: str) -> _NoSpecError:
    return _NoSpecError("it is malformed", expected=expected, got=got)


def _not_a_proto(value: Any) -> Failure:
    is_hlo = isinstance(value, _jax.core.HloSharding)
    return Failure(
        what="cannot be parsed",
        given=repr(value),
        expected="an OpSharding proto",
        got=f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins."),
        fix="pass its .to_proto()" if is_hlo else "",
        error=SpecTypeError,
    )


def _show(proto: Any) -> str:
    """Writes a proto as HLO text does: ``{devices=[2,4]<=[8] last_tile_dim_replicate}``."""
    if proto.type == _Type.MAXIMAL:
        return f"{{maximal device={_show_list(proto.tile_assignment_devices)}}}"
    if proto.type != _Type.OTHER:
        return f"{{{_Type(proto.type).name.lower()}}}"
    tiles = _commas(proto.tile_assignment_dimensions)
    return f"{{devices=[{tiles}]{_show_devices(proto)}{_show_groups(proto)}}}"


def _show_devices(proto: Any) -> str:
    sizes, perm = list(proto.iota_reshape_dims), list(proto.iota_transpose_perm)
    if not sizes:
        return _show_list(proto.tile_assignment_devices).replace(" ", "")
    moved = "" if perm == sorted(perm) else f"T({_commas(perm)})"
    return f"<=[{_commas(sizes)}]{moved}"


def _show_groups(proto: Any) -> str:
    if proto.last_tile_dims:
        kinds = ", ".join(_Type(kind).name.lower() for kind in proto.last_tile_dims)
        return f" last_tile_dims={{{kinds}}}"
    return " last_tile_dim_replicate" if proto.replicate_on_last_tile_dim else ""


def _commas(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _show_list(values: Any) -> str:
    shown = [str(v) for v in values[:16]]
    return ", ".join(shown + ["…"] * (len(values) > 16)) or "none"


# PartitionSpec -> OpSharding


def get_array_mapping(spec: ParsedPartitionSpec | PartitionSpec) -> OrderedDict[Any, int]:
    """Returns the dimension that each mesh axis of a spec splits.

    Axes come dimension by dimension and from major to minor within one. A dimension that is left
    to the partitioner has none.

    Args:
        spec: What a user wrote, or its parsed form.

    Returns:
        Mesh axis -> dimension: ``P('data', ('x', 'y'))`` gives ``data: 0, x: 1, y: 1``.

    Raises:
        ValueError: A mesh axis stands twice in `spec`.
        TypeError: `spec` is no spec.
    """
    parts = enumerate(parsed_spec(spec))
    return OrderedDict((axis, d) for d, part in parts if isinstance(part, tuple) for axis in part)


def parsed_spec(spec: Any) -> ParsedPartitionSpec:
    """Parses what is a PartitionSpec, or None, and not parsed already."""
    if isinstance(spec, ParsedPartitionSpec):
        return spec
    return ParsedPartitionSpec.from_user_input(spec, "spec", allow_unconstrained=True)


__all__ = [
    "explode_superdims",
    "get_array_mapping",
    "parse_op_sharding",
    "strides_for_sizes",
    "unflatten_array",
    "unflatten_superdims",
]
