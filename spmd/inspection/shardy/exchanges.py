"""The collectives in a module of Shardy, before compilation, as records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
import re
from typing import Any

import numpy as np

from spmd.inspection.hlo import groups as hlo_groups
from spmd.inspection.hlo.ledger import wire_bytes
from spmd.inspection.records.names import direction_of, user_source
from spmd.inspection.records.report import Collective, Shapes
from spmd.inspection.shardy import passes, trips as shardy_trips
from spmd.inspection.shardy.passes import Dimensions
from spmd.inspection.shardy.targets import Exchange, local_shape, target_of


def exchanges(module: Any, platform: str = "") -> tuple[Collective, ...]:
    """Lists the collectives of a module that Shardy's passes made explicit.

    Args:
        module: after ``sdy-reshard-to-collectives``.
        platform: whose compiler's rules change them; by default what the shardings ask for.

    Returns:
        One record for each place in the program, in the order in which it reaches them, with the
        executions of all calls of a function together.
    """
    return tuple(_Reader(module, platform).function("main").values())


_Found = dict[Any, Collective]
"""Collectives by the operation that stands for them, and the number of the one among several."""


class _Reader:
    """Walks a module as it runs. Each function is read once, however often it is called."""

    def __init__(self, module: Any, platform: str):
        self.functions = passes.functions(module)
        self.sizes = passes.axis_sizes(module)
        self.target = target_of(platform)(self.functions, self.sizes)
        self.after: dict[Any, Any] = {}
        self.done: dict[str, _Found] = {}

    def function(self, name: str) -> _Found:
        """The collectives of one call of a function."""
        if name not in self.done:
            self.done[name] = self._blocks(self.functions[name])
        return self.done[name]

    def _blocks(self, operation: Any) -> _Found:
        found: _Found = {}
        for block in passes.blocks(operation):
            _add(found, self._block(block))
        return found

    def _block(self, block: Any) -> _Found:
        found: _Found = {}
        done: set[object] = set()
        for view in block.operations:
            operation = view.operation
            if exchange := _KINDS.get(_name(operation)):
                asked = exchange(operation, self.sizes)
                if asked.group_size > 1 and not _again(operation, done):
                    for i, one in enumerate(self.target.sent(operation, asked)):
                        found[operation, i] = _record(operation, one)
                        self.after[operation, i] = one.after
            elif operation.name in _HOLDERS or operation.name == "func.call":
                inner = self._inside(operation)
                _add(found, {place: _within(one, operation) for place, one in inner.items()})
        return found

    def _inside(self, operation: Any) -> _Found:
        """The collectives of one execution of an operation that holds others."""
        match operation.name:
            case "func.call":
                return self.function(passes.callee_of(operation))
            case "stablehlo.while":
                return self._loop(operation)
            case "stablehlo.case" | "stablehlo.if":
                found = self._blocks(operation)
                return {p: dataclasses.replace(c, conditional=True) for p, c in found.items()}
        return self._blocks(operation)

    def _loop(self, operation: Any) -> _Found:
        trips = shardy_trips.trip_count(operation)
        condition, body = map(self._block, passes.blocks(operation))
        checks = None if trips is None else trips + 1
        found = {place: _repeated(one, checks) for place, one in condition.items()}
        for place, one in body.items():
            loop = self.after.get(place)
            once = loop is not None and loop == operation
            _add(found, {place: one if once else _repeated(one, trips)})
        return found


_HOLDERS = (
    "stablehlo.while",
    "stablehlo.case",
    "stablehlo.if",
    "sdy.manual_computation",
    "sdy.named_computation",
)


def _add(found: _Found, more: _Found) -> None:
    """Adds collectives; those of a place that is there already run as often as both together."""
    for place, one in more.items():
        if (known := found.get(place)) is None:
            found[place] = one
            continue
        counts = known.executions, one.executions
        found[place] = dataclasses.replace(
            known,
            executions=None if None in counts else sum(count or 0 for count in counts),
            conditional=known.conditional and one.conditional,
            in_loop=known.in_loop or one.in_loop,
        )


def _repeated(one: Collective, times: int | None) -> Collective:
    known = times is not None and one.executions is not None
    executions = (times or 0) * (one.executions or 0) if known else None
    return dataclasses.replace(one, executions=executions, in_loop=True)


def _within(one: Collective, holder: Any) -> Collective:
    """A collective inside of another operation: its name stack goes on from there."""
    frames = one.frames
    if not frames or passes.takes_part_in_loops(holder):
        frames = passes.frames_of(holder.location)
    op_name = _joined(passes.op_name_of(holder.location), one.op_name)
    return dataclasses.replace(
        one,
        frames=frames,
        source=user_source(frames),
        op_name=op_name,
        direction=direction_of(op_name),
    )


def _record(operation: Any, found: Exchange) -> Collective:
    operand, result = (sum(shape.nbytes for shape in shapes) for shapes in found.shapes)
    frames = passes.frames_of(operation.location)
    op_name = passes.op_name_of(operation.location)
    return Collective(
        kind=found.kind,
        mesh_axes=found.mesh_axes,
        shapes=found.shapes,
        dtype=", ".join(dict.fromkeys(shape.dtype for shape in found.shapes.operands)),
        payload_bytes=max(operand, result),
        wire_bytes=wire_bytes(found.kind, operand, result, found.group_size),
        group_size=found.group_size,
        executions=found.times,
        source=user_source(frames),
        frames=frames,
        direction=direction_of(op_name),
        op_name=op_name,
        is_async=False,
        combined=1 if found.kind == "all-to-all" else max(1, len(found.shapes.operands)),
        name=operation.name,
    )


_SAYING = ("out_sharding", "gathering_axes", "reduce_scatter_axes", "reduction_axes", "params")


def _again(operation: Any, done: set[object]) -> bool:
    """Whether a block has done the same with the same value already; compilers do it once."""
    if not operation.name.startswith("sdy."):
        return False
    texts = tuple(passes.text_of(operation, name) for name in _SAYING)
    key = (operation.name, operation.operands[0], texts)
    return key in done or bool(done.add(key))


def _joined(outer: str, inner: str) -> str:
    """A name stack; functions that are lowered once have only the end of theirs."""
    first = outer.partition("/")[0]
    if not outer or not inner or inner.startswith(first):
        return inner or outer
    return f"{outer}/{inner}"


# What Shardy's collectives send

_AXES = re.compile(r"\{((?:\"(?:[^\"\\]|\\.)*\"|[^{}\"])*)\}")
_MOVED = re.compile(r"\{((?:\"(?:[^\"\\]|\\.)*\"|[^{}\"])*)\}: (\d+)->(\d+)")


def _exchange(
    kind: str,
    operation: Any,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    *,
    more: Mapping[int, Sequence[str]] | None = None,
    fewer: Mapping[int, Sequence[str]] | None = None,
) -> Exchange:
    """An exchange over axes, which split some dimensions more, or fewer, before than after."""
    result = local_shape(operation.results[0].type, passes.out_sharding(operation), sizes)
    before, after = [*result.dims], [*result.dims]
    for d, split in (more or {}).items():
        before[d] = -(-before[d] // _count(split, sizes))
        # All blocks are of one size, so what they make together may be longer than the array.
        after[d] = max(after[d], before[d] * _count(split, sizes))
    for d, split in (fewer or {}).items():
        before[d] *= _count(split, sizes)
    places = {name: place for place, name in enumerate(sizes)}
    return Exchange(
        kind=kind,
        mesh_axes=tuple(sorted(axes, key=lambda a: places.get(_axis_of(a), len(places)))),
        group_size=_count(axes, sizes),
        shapes=Shapes(
            (dataclasses.replace(result, dims=tuple(before)),),
            (dataclasses.replace(result, dims=tuple(after)),),
        ),
    )


def _count(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(passes.size_of(axis, sizes) for axis in axes)


def _axis_of(axis: str) -> str:
    return axis.partition(":(")[0]


def _lists(operation: Any, name: str) -> dict[int, tuple[str, ...]]:
    """Axes by dimension, of an attribute such as ``[{"data"}, {}]``."""
    found = _AXES.findall(passes.text_of(operation, name))
    return {d: axes for d, text in enumerate(found) if (axes := passes.axes_in(text))}


def _flat(by_dimension: Mapping[int, Sequence[str]]) -> list[str]:
    return [axis for axes in by_dimension.values() for axis in axes]


def _all_gather(operation: Any, sizes: Mapping[str, int]) -> Exchange:
    axes = _lists(operation, "gathering_axes")
    return _exchange("all-gather", operation, _flat(axes), sizes, more=axes)


def _reduce_scatter(operation: Any, sizes: Mapping[str, int]) -> Exchange:
    axes = _lists(operation, "reduce_scatter_axes")
    return _exchange("reduce-scatter", operation, _flat(axes), sizes, fewer=axes)


def _all_reduce(operation: Any, sizes: Mapping[str, int]) -> Exchange:
    axes = passes.axes_in(passes.text_of(operation, "reduction_axes"))
    return _exchange("all-reduce", operation, axes, sizes)


def _all_to_all(operation: Any, sizes: Mapping[str, int]) -> Exchange:
    more, fewer = {}, {}
    for text, source, target in _MOVED.findall(passes.text_of(operation, "params")):
        more[int(source)] = fewer[int(target)] = passes.axes_in(text)
    return _exchange("all-to-all", operation, _flat(more), sizes, more=more, fewer=fewer)


def _collective_permute(operation: Any, sizes: Mapping[str, int]) -> Exchange:
    """Shards stay as large as they are, and change places."""
    found = _exchange("collective-permute", operation, (), sizes)
    after = passes.out_sharding(operation)
    before = passes.sharding_of(operation.operands[0], after)
    groups = hlo_groups.connected(_moves(before, after, sizes))
    return dataclasses.replace(
        found,
        mesh_axes=hlo_groups.mesh_axes_of(groups, sizes),
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
    size = passes.size_of(axis, sizes)
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


# What the user's own collectives send


_Groups = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]
"""Devices that exchange with each other, and the mesh axes that they are along."""


def _manual(
    kind: str,
    groups_of: Callable[[Any, Mapping[str, int]], _Groups] | None = None,
    data: int | None = None,
) -> Callable[[Any, Mapping[str, int]], Exchange]:
    """Reads a collective that a ``shard_map`` calls: its types are per device already.

    The first `data` operands are sent; by default all are.
    """

    def read(operation: Any, sizes: Mapping[str, int]) -> Exchange:
        groups, axes = (groups_of or _group_of)(operation, sizes)
        shardings = passes.shardings_in(passes.text_of(operation, "sdy.sharding"))
        # Axes that are not manual may split what the shard_map sees.
        results = tuple(
            local_shape(result.type, shardings[i] if i < len(shardings) else (), sizes)
            for i, result in enumerate(operation.results)
        )
        operands = tuple(
            local_shape(operand.type, shardings[i] if i < len(shardings) else (), sizes)
            for i, operand in enumerate([*operation.operands][:data])
        )
        return Exchange(
            kind=kind,
            mesh_axes=axes,
            group_size=max(map(len, groups), default=1),
            shapes=Shapes(operands, results),
        )

    return read


def _groups_of_a_call(operation: Any, sizes: Mapping[str, int]) -> _Groups:
    rows = np.array(operation.attributes["backend_config"]["replica_groups"])
    groups = tuple(tuple(row) for row in rows.tolist())
    return groups, hlo_groups.mesh_axes_of(groups, sizes)


def _name(operation: Any) -> str:
    """The name of an operation; of a call out of the module, the name of what it calls."""
    if operation.name != "stablehlo.custom_call":
        return operation.name
    return f"stablehlo.{operation.attributes['call_target_name'].value}"


def _group_of(operation: Any, sizes: Mapping[str, int]) -> _Groups:
    name = "replica_groups"
    if "source_target_pairs" in operation.attributes:
        name = "source_target_pairs"
    text = passes.text_of(operation, name)
    if "mesh_axes" in text:
        axes = [*_mesh_axes(text, sizes)]
        places = {axis: place for place, axis in enumerate(sizes)}
        axes.sort(key=lambda axis: places.get(_axis_of(axis), len(places)))
        return ((*range(_count(axes, sizes)),),), tuple(axes)
    rows = np.array(operation.attributes[name])
    groups = tuple(tuple(int(n) for n in row if n >= 0) for row in rows)
    if name == "source_target_pairs":
        groups = hlo_groups.connected(groups)
    return groups, hlo_groups.mesh_axes_of(groups, sizes)


_AXIS_REF = re.compile(r'axis_ref<name = ("(?:[^"\\]|\\.)*")([^>]*(?:<[^>]*>)?)')
_PART = re.compile(r"\((\d+)\)(\d+)")


def _mesh_axes(text: str, sizes: Mapping[str, int]) -> Iterator[str]:
    for name, rest in _AXIS_REF.findall(text):
        part = _PART.search(rest)
        yield passes.axes_in(name)[0] + (f":({part[1]}){part[2]}" if part else "")


_KINDS: Mapping[str, Callable[[Any, Mapping[str, int]], Exchange]] = {
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
    # What it sends is the most that its operand allows; the others are where to write, and sizes.
    "stablehlo.ragged_all_to_all": _manual("ragged-all-to-all", _groups_of_a_call, 1),
    "stablehlo.reduce_scatter": _manual("reduce-scatter"),
}
