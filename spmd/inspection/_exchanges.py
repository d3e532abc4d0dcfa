"""The collectives in a module of Shardy, before compilation, as records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
import re
from typing import Any

import numpy as np

from spmd.inspection import _groups, _shardy, _trips
from spmd.inspection._ledger import wire_bytes
from spmd.inspection._records import Collective, Shape, Shapes, Source
from spmd.inspection._shardy import Dimensions
from spmd.inspection._source import direction_of, user_source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """How the operations of one block run.

    Args:
        executions: how often; None where the data decide.
        conditional: True in a branch.
        in_loop: True in a loop.
        op_name: of the call that the block is the body of.
        frames: likewise, for operations without frames of their own.
    """

    executions: int | None = 1
    conditional: bool = False
    in_loop: bool = False
    op_name: str = ""
    frames: tuple[Source, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """What one operation sends: kind, crossed axes, devices in a group, and shapes per device."""

    kind: str
    mesh_axes: tuple[str, ...]
    group_size: int
    shapes: Shapes


def exchanges(module: Any) -> Iterator[Collective]:
    """Lists the collectives of a module that Shardy's passes made explicit.

    Args:
        module: after ``sdy-reshard-to-collectives``.

    Yields:
        One record for each place in the program, with the functions that it calls taken over, in
        program order.
    """
    reader = _Reader(module)
    for block in _shardy.blocks(reader.functions["main"]):
        yield from reader.block(block, _Around())


class _Reader:
    """Walks a module as it runs."""

    def __init__(self, module: Any):
        self.functions = _shardy.functions(module)
        self.sizes = _shardy.axis_sizes(module)

    def block(self, block: Any, around: _Around) -> Iterator[Collective]:
        done: set[object] = set()
        for view in block.operations:
            operation = view.operation
            name = operation.name
            if exchange := _KINDS.get(name):
                found = exchange(operation, self.sizes)
                if found.group_size > 1 and not _again(operation, done):
                    yield self._record(operation, found, around)
            elif name in ("func.call", "call"):
                yield from self._call(operation, around)
            elif name == "stablehlo.while":
                yield from self._loop(operation, around)
            elif name in ("stablehlo.case", "stablehlo.if"):
                inside = dataclasses.replace(self._inside(operation, around), conditional=True)
                for inner in _shardy.blocks(operation):
                    yield from self.block(inner, inside)
            elif name in ("sdy.manual_computation", "sdy.named_computation"):
                for inner in _shardy.blocks(operation):
                    yield from self.block(inner, self._inside(operation, around))

    def _call(self, operation: Any, around: _Around) -> Iterator[Collective]:
        name = _shardy.text_of(operation, "callee").removeprefix("@").strip('"')
        for inner in _shardy.blocks(self.functions[name]):
            yield from self.block(inner, self._inside(operation, around))

    def _loop(self, operation: Any, around: _Around) -> Iterator[Collective]:
        trips = _trips.trip_count(operation)
        condition, body = _shardy.blocks(operation)
        inside = dataclasses.replace(self._inside(operation, around), in_loop=True)
        times = around.executions
        known = None not in (times, trips)
        checks = (times or 0) * ((trips or 0) + 1) if known else None
        yield from self.block(condition, dataclasses.replace(inside, executions=checks))
        runs = (times or 0) * (trips or 0) if known else None
        yield from self.block(body, dataclasses.replace(inside, executions=runs))

    def _inside(self, operation: Any, around: _Around) -> _Around:
        return dataclasses.replace(
            around,
            op_name=_joined(around.op_name, _shardy.op_name_of(operation.location)),
            frames=_shardy.frames_of(operation.location) or around.frames,
        )

    def _record(self, operation: Any, found: _Exchange, around: _Around) -> Collective:
        operand, result = (sum(shape.nbytes for shape in shapes) for shapes in found.shapes)
        frames = _shardy.frames_of(operation.location) or around.frames
        op_name = _joined(around.op_name, _shardy.op_name_of(operation.location))
        return Collective(
            kind=found.kind,
            mesh_axes=found.mesh_axes,
            shapes=found.shapes,
            dtype=", ".join(dict.fromkeys(shape.dtype for shape in found.shapes.operands)),
            payload_bytes=max(operand, result),
            wire_bytes=wire_bytes(found.kind, operand, result, found.group_size),
            group_size=found.group_size,
            executions=around.executions,
            source=user_source(frames),
            frames=frames,
            direction=direction_of(op_name),
            op_name=op_name,
            is_async=False,
            combined=1 if found.kind == "all-to-all" else max(1, len(found.shapes.operands)),
            conditional=around.conditional,
            in_loop=around.in_loop,
            name=operation.name,
        )


_SAYING = ("out_sharding", "gathering_axes", "reduce_scatter_axes", "reduction_axes", "params")


def _again(operation: Any, done: set[object]) -> bool:
    """Whether a block has done the same with the same value already; compilers do it once."""
    if not operation.name.startswith("sdy."):
        return False
    texts = tuple(_shardy.text_of(operation, name) for name in _SAYING)
    key = (operation.name, operation.operands[0], texts)
    return key in done or bool(done.add(key))


def _joined(outer: str, inner: str) -> str:
    """A name stack; functions that are lowered once have only the end of theirs."""
    first = outer.partition("/")[0]
    if not outer or not inner or inner.startswith(first):
        return inner or outer
    return f"{outer}/{inner}"


# What Shardy's collectives send

_MOVED = re.compile(r"\{((?:\"(?:[^\"\\]|\\.)*\"|[^{}\"])*)\}: (\d+)->(\d+)")


def _local(kind: Any, dimensions: Dimensions, sizes: Mapping[str, int]) -> Shape:
    """The shape on one device, the largest where a dimension does not divide."""
    dims, dtype = _shardy.dims_of(kind)
    parts = [math.prod(_shardy.size_of(a, sizes) for a in one.axes) for one in dimensions]
    parts += [1] * (len(dims) - len(parts))
    local = tuple(-(-dim // part) for dim, part in zip(dims, parts, strict=True))
    return Shape(dtype=_shardy.hlo_dtype(dtype), dims=local)


def _out_sharding(operation: Any) -> Dimensions:
    found = _shardy.shardings_in(_shardy.text_of(operation, "out_sharding"))
    dims, _ = _shardy.dims_of(operation.results[0].type)
    return found[0] if found else _shardy.open_sharding(len(dims))


def _exchange(
    kind: str,
    operation: Any,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    *,
    more: Mapping[int, Sequence[str]] | None = None,
    fewer: Mapping[int, Sequence[str]] | None = None,
) -> _Exchange:
    """An exchange over axes, which split some dimensions more, or fewer, before than after."""
    result = _local(operation.results[0].type, _out_sharding(operation), sizes)
    before, after = [*result.dims], [*result.dims]
    for d, split in (more or {}).items():
        before[d] = -(-before[d] // _count(split, sizes))
        # All blocks are of one size, so what they make together may be longer than the array.
        after[d] = max(after[d], before[d] * _count(split, sizes))
    for d, split in (fewer or {}).items():
        before[d] *= _count(split, sizes)
    places = {name: place for place, name in enumerate(sizes)}
    return _Exchange(
        kind=kind,
        mesh_axes=tuple(sorted(axes, key=lambda a: places.get(_axis_of(a), len(places)))),
        group_size=_count(axes, sizes),
        shapes=Shapes(
            (dataclasses.replace(result, dims=tuple(before)),),
            (dataclasses.replace(result, dims=tuple(after)),),
        ),
    )


def _count(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(_shardy.size_of(axis, sizes) for axis in axes)


def _axis_of(axis: str) -> str:
    return axis.partition(":(")[0]


def _lists(operation: Any, name: str) -> dict[int, tuple[str, ...]]:
    """Axes by dimension, of an attribute such as ``[{"data"}, {}]``."""
    found = re.findall(r"\{([^{}]*)\}", _shardy.text_of(operation, name))
    return {d: axes for d, text in enumerate(found) if (axes := _shardy.axes_in(text))}


def _flat(by_dimension: Mapping[int, Sequence[str]]) -> list[str]:
    return [axis for axes in by_dimension.values() for axis in axes]


def _all_gather(operation: Any, sizes: Mapping[str, int]) -> _Exchange:
    axes = _lists(operation, "gathering_axes")
    return _exchange("all-gather", operation, _flat(axes), sizes, more=axes)


def _reduce_scatter(operation: Any, sizes: Mapping[str, int]) -> _Exchange:
    axes = _lists(operation, "reduce_scatter_axes")
    return _exchange("reduce-scatter", operation, _flat(axes), sizes, fewer=axes)


def _all_reduce(operation: Any, sizes: Mapping[str, int]) -> _Exchange:
    axes = _shardy.axes_in(_shardy.text_of(operation, "reduction_axes"))
    return _exchange("all-reduce", operation, axes, sizes)


def _all_to_all(operation: Any, sizes: Mapping[str, int]) -> _Exchange:
    more, fewer = {}, {}
    for text, source, target in _MOVED.findall(_shardy.text_of(operation, "params")):
        more[int(source)] = fewer[int(target)] = _shardy.axes_in(text)
    return _exchange("all-to-all", operation, _flat(more), sizes, more=more, fewer=fewer)


def _collective_permute(operation: Any, sizes: Mapping[str, int]) -> _Exchange:
    """Shards stay as large as they are, and change places."""
    found = _exchange("collective-permute", operation, (), sizes)
    after = _out_sharding(operation)
    before = _sharding_of(operation.operands[0], after)
    groups = _groups.connected(_moves(before, after, sizes))
    return dataclasses.replace(
        found,
        mesh_axes=_groups.mesh_axes_of(groups, sizes),
        group_size=max(map(len, groups), default=1),
    )


def _moves(
    before: Dimensions, after: Dimensions, sizes: Mapping[str, int]
) -> Iterator[tuple[int, int]]:
    """Which device sends its shard to which; replicas keep the order of the axes left over."""
    cut = _cuts((*before, *after), sizes)
    names = [piece for axis in sizes for piece in cut[axis]]
    devices = np.arange(math.prod(sizes.values())).reshape([size for _, _, size in names])
    holders, takers = (
        devices.transpose(_order(dimensions, names)).ravel() for dimensions in (before, after)
    )
    yield from zip(holders.tolist(), takers.tolist(), strict=True)


_Piece = tuple[str, int, int]
"""A part of an axis: its name, the parts before it, its size."""


def _piece(axis: str, sizes: Mapping[str, int]) -> _Piece:
    found = _PART.search(axis.removeprefix(_axis_of(axis)))
    size = _shardy.size_of(axis, sizes)
    return (_axis_of(axis), int(found[1]), size) if found else (axis, 1, size)


def _cuts(dimensions: Dimensions, sizes: Mapping[str, int]) -> dict[str, list[_Piece]]:
    """The axes in the largest pieces that no part of one cuts."""
    bounds = {name: {1, size} for name, size in sizes.items()}
    for axis in (a for one in dimensions for a in one.axes):
        name, first, size = _piece(axis, sizes)
        bounds[name] |= {first, first * size}
    return {
        name: [(name, a, b // a) for a, b in itertools.pairwise(sorted(found))]
        for name, found in bounds.items()
    }


def _order(dimensions: Dimensions, pieces: Sequence[_Piece]) -> list[int]:
    """The pieces as a sharding orders them, those that it does not use last."""
    used = []
    for axis in (a for one in dimensions for a in one.axes):
        name, first, size = _piece(axis, _whole(pieces))
        inside = (i for i, p in enumerate(pieces) if p[0] == name and first <= p[1] < first * size)
        used += inside
    return [*used, *(i for i in range(len(pieces)) if i not in used)]


def _whole(pieces: Sequence[_Piece]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, _, size in pieces:
        sizes[name] = sizes.get(name, 1) * size
    return sizes


def _sharding_of(value: Any, default: Dimensions) -> Dimensions:
    """The sharding of an operand, as what makes it says."""
    if not hasattr(value, "result_number"):
        return _entering(value, default)
    operation = getattr(value.owner, "operation", value.owner)
    if "out_sharding" in operation.attributes:
        return _out_sharding(operation)
    name = "sharding" if operation.name == "sdy.sharding_constraint" else "sdy.sharding"
    return _nth(_shardy.text_of(operation, name), value.result_number, value)


def _entering(value: Any, default: Dimensions) -> Dimensions:
    """The sharding of what enters a block."""
    operation, i = value.owner.owner.operation, value.arg_number
    if operation.name == "func.func":
        entries = _shardy.entries_of(operation, "arg_attrs")
        return _nth(str(entries[i].get("sdy.sharding", "")) if i < len(entries) else "", 0, value)
    if operation.name == "stablehlo.while":
        return _nth(_shardy.text_of(operation, "sdy.sharding"), i, value)
    return default


def _nth(text: str, i: int, value: Any) -> Dimensions:
    found = _shardy.shardings_in(text)
    dims, _ = _shardy.dims_of(value.type)
    return found[i] if i < len(found) else _shardy.open_sharding(len(dims))


# What the user's own collectives send


def _manual(kind: str) -> Callable[[Any, Mapping[str, int]], _Exchange]:
    """Reads a collective that a ``shard_map`` calls: its types are per device already."""

    def read(operation: Any, sizes: Mapping[str, int]) -> _Exchange:
        groups, axes = _group_of(operation, sizes)
        shardings = _shardy.shardings_in(_shardy.text_of(operation, "sdy.sharding"))
        # Axes that are not manual may split what the shard_map sees.
        results = tuple(
            _local(result.type, shardings[i] if i < len(shardings) else (), sizes)
            for i, result in enumerate(operation.results)
        )
        operands = tuple(
            _local(operand.type, shardings[i] if i < len(shardings) else (), sizes)
            for i, operand in enumerate(operation.operands)
        )
        return _Exchange(
            kind=kind,
            mesh_axes=axes,
            group_size=max(map(len, groups), default=1),
            shapes=Shapes(operands, results),
        )

    return read


def _group_of(
    operation: Any, sizes: Mapping[str, int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    name = "replica_groups"
    if "source_target_pairs" in operation.attributes:
        name = "source_target_pairs"
    text = _shardy.text_of(operation, name)
    if "mesh_axes" in text:
        axes = [*_mesh_axes(text, sizes)]
        places = {axis: place for place, axis in enumerate(sizes)}
        axes.sort(key=lambda axis: places.get(_axis_of(axis), len(places)))
        return ((*range(_count(axes, sizes)),),), tuple(axes)
    rows = np.array(operation.attributes[name])
    groups = tuple(tuple(int(n) for n in row if n >= 0) for row in rows)
    if name == "source_target_pairs":
        groups = _groups.connected(groups)
    return groups, _groups.mesh_axes_of(groups, sizes)


_AXIS_REF = re.compile(r'axis_ref<name = ("(?:[^"\\]|\\.)*")([^>]*(?:<[^>]*>)?)')
_PART = re.compile(r"\((\d+)\)(\d+)")


def _mesh_axes(text: str, sizes: Mapping[str, int]) -> Iterator[str]:
    for name, rest in _AXIS_REF.findall(text):
        part = _PART.search(rest)
        yield _shardy.axes_in(name)[0] + (f":({part[1]}){part[2]}" if part else "")


_KINDS: Mapping[str, Callable[[Any, Mapping[str, int]], _Exchange]] = {
    "sdy.all_gather": _all_gather,
    "sdy.all_reduce": _all_reduce,
    "sdy.all_to_all": _all_to_all,
    "sdy.collective_permute": _collective_permute,
    "sdy.reduce_scatter": _reduce_scatter,
    "stablehlo.all_gather": _manual("all-gather"),
    "stablehlo.all_reduce": _manual("all-reduce"),
    "stablehlo.all_to_all": _manual("all-to-all"),
    "stablehlo.collective_broadcast": _manual("collective-broadcast"),
    "stablehlo.collective_permute": _manual("collective-permute"),
    "stablehlo.reduce_scatter": _manual("reduce-scatter"),
}
