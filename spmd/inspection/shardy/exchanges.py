"""The collectives in a module of Shardy, before compilation, as records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np

from spmd.inspection.hlo import groups as hlo_groups
from spmd.inspection.records.names import direction_of, user_source
from spmd.inspection.records.report import Collective, Shapes
from spmd.inspection.shardy import passes, places
from spmd.inspection.shardy.flow import trip_count
from spmd.inspection.shardy.targets import target_of
from spmd.inspection.shardy.targets.base import AXES, Exchange, axes_by_dimension, local_shape


def exchanges(module: Any, platform: str = "") -> tuple[Collective, ...]:
    """The collectives of a module after ``sdy-reshard-to-collectives``, in the program's order.

    The rules of the platform's compiler change them; without a platform they are what the shardings
    ask for.
    """
    return read(module, platform).collectives


class Exchanges(NamedTuple):
    """The collectives of a module.

    Attributes:
        collectives: as `exchanges` gives them.
        together: for each of them a number that those have in common which the compiler sends as
            one, with a message's delay once; None for one that is sent alone.
    """

    collectives: tuple[Collective, ...]
    together: tuple[int | None, ...]


def read(
    module: Any, platform: str = "", chip: str = "", slice_of: Sequence[int] = ()
) -> Exchanges:
    """The collectives of a module, and which of them are sent as one.

    Args:
        module: after the passes.
        platform: whose compiler's rules to use.
        chip: the name of its generation, if known.
        slice_of: sizes of the slice's dimensions, if known.
    """
    main, sizes = passes.functions(module)["main"], passes.axis_sizes(module)
    reader = _Reader(sizes, target_of(platform)(main, sizes, chip, slice_of))
    found = reader.inside(main)
    return Exchanges(tuple(found.values()), tuple(map(reader.together.get, found)))


_Found = dict[Any, Collective]
"""Collectives by the operation that stands for them, and the number of the one among several."""


class _Reader:
    """Walks a program as it runs."""

    def __init__(self, sizes: Mapping[str, int], target: Any):
        self.sizes, self.target = sizes, target
        self.after: dict[Any, Any] = {}
        self.together: dict[Any, int] = {}
        self.numbers: dict[Any, int] = {}

    def _block(self, block: Any) -> _Found:
        found: _Found = {}
        done: set[object] = set()
        for view in block.operations:
            operation = view.operation
            if asked := _asked_by(operation, self.sizes):
                if asked.group_size > 1 and not _again(operation, done):
                    for i, one in enumerate(self.target.sent(operation, asked)):
                        found[operation, i] = _record(operation, one)
                        self.after[operation, i] = one.after
                        if one.turn is not None:
                            key = one.after or block, one.mesh_axes, one.turn
                            number = self.numbers.setdefault(key, len(self.numbers))
                            self.together[operation, i] = number
            elif operation.name in passes.HOLDERS:
                inner = self.inside(operation)
                found |= {place: _within(one, operation) for place, one in inner.items()}
        return found

    def inside(self, operation: Any) -> _Found:
        """The collectives of one execution of an operation that holds others, or of a function."""
        if operation.name == passes.LOOP:
            return self._loop(operation)
        found: _Found = {}
        for block in passes.blocks(operation):
            found |= self._block(block)
        if operation.name in ("stablehlo.case", "stablehlo.if"):
            return {p: dataclasses.replace(c, conditional=True) for p, c in found.items()}
        return found

    def _loop(self, operation: Any) -> _Found:
        trips = trip_count(operation)
        condition, body = map(self._block, passes.blocks(operation))
        checks = None if trips is None else trips + 1
        found = {place: _repeated(one, checks) for place, one in condition.items()}
        for place, one in body.items():
            loop = self.after.get(place)
            once = loop is not None and loop == operation
            found[place] = one if once else _repeated(one, trips)
        return found


def _repeated(one: Collective, times: int | None) -> Collective:
    known = times is not None and one.executions is not None
    executions = (times or 0) * (one.executions or 0) if known else None
    return dataclasses.replace(one, executions=executions, in_loop=True)


def _within(one: Collective, holder: Any) -> Collective:
    """A collective inside of another operation: its name stack goes on from there."""
    frames = one.frames or passes.frames_of(holder.location)
    op_name = passes.joined(passes.op_name_of(holder.location), one.op_name)
    return dataclasses.replace(
        one,
        frames=frames,
        source=user_source(frames),
        op_name=op_name,
        direction=direction_of(op_name),
    )


def _record(operation: Any, found: Exchange) -> Collective:
    frames = passes.frames_of(operation.location)
    op_name = passes.op_name_of(operation.location)
    return Collective(
        kind=found.kind,
        mesh_axes=found.mesh_axes,
        shapes=found.shapes,
        dtype=", ".join(dict.fromkeys(shape.dtype for shape in found.shapes.operands)),
        payload_bytes=found.payload,
        wire_bytes=found.wire,
        group_size=found.group_size,
        executions=found.times,
        source=user_source(frames),
        frames=frames,
        direction=direction_of(op_name),
        op_name=op_name,
        is_async=False,
        combined=1 if found.kind == "all-to-all" else max(1, len(found.shapes.operands)),
        name=operation.name,
        groups=found.groups,
    )


_SAYING = ("out_sharding", "gathering_axes", "reduce_scatter_axes", "reduction_axes", "params")


def _again(operation: Any, done: set[object]) -> bool:
    """Whether a block has done the same with the same value already; compilers do it once."""
    if not operation.name.startswith("sdy."):
        return False
    texts = tuple(passes.text_of(operation, name) for name in _SAYING)
    key = (operation.name, operation.operands[0], texts)
    return key in done or bool(done.add(key))


# What is sent

_SHARDYS = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")
_KINDS = frozenset(
    (
        *(f"sdy.{name}" for name in _SHARDYS),
        *(f"stablehlo.{name}" for name in _SHARDYS),
        *("stablehlo.collective_broadcast", "stablehlo.ragged_all_to_all"),
    )
)


def _asked_by(operation: Any, sizes: Mapping[str, int]) -> Exchange | None:
    """What an operation sends; None for what is no collective."""
    name = operation.name
    if name == "stablehlo.custom_call":  # a call out of the module, by the name of what it calls
        name = f"stablehlo.{operation.attributes['call_target_name'].value}"
    if name not in _KINDS:
        return None
    dialect, _, kind = name.replace("_", "-").partition(".")
    read = _permuted if name == "sdy.collective_permute" else _resharded
    return (read if dialect == "sdy" else _manual)(kind, operation, sizes)


_MOVED = re.compile(AXES.pattern + r": (\d+)->(\d+)")


def _resharded(kind: str, operation: Any, sizes: Mapping[str, int]) -> Exchange:
    """A collective of Shardy: its axes split some dimensions more, or fewer, before than after."""
    more: dict[int, tuple[str, ...]] = {}
    fewer: dict[int, tuple[str, ...]] = {}
    match kind:
        case "all-gather":
            more = axes_by_dimension(operation, "gathering_axes")
        case "reduce-scatter":
            fewer = axes_by_dimension(operation, "reduce_scatter_axes")
        case "all-to-all":
            for text, source, target in _MOVED.findall(passes.text_of(operation, "params")):
                more[int(source)] = fewer[int(target)] = passes.axes_in(text)
    axes = [axis for split in (more or fewer).values() for axis in split]
    axes += passes.axes_in(passes.text_of(operation, "reduction_axes"))
    result = local_shape(operation.results[0].type, passes.out_sharding(operation), sizes)
    before, after = [*result.dims], [*result.dims]
    for d, split in more.items():
        before[d] = -(-before[d] // passes.count_of(split, sizes))
        # All blocks are of one size, so what they make together may be longer than the array.
        after[d] = max(after[d], before[d] * passes.count_of(split, sizes))
    for d, split in fewer.items():
        before[d] *= passes.count_of(split, sizes)
    operand, result = (dataclasses.replace(result, dims=tuple(d)) for d in (before, after))
    return Exchange(
        kind=kind,
        mesh_axes=_in_order(axes, sizes),
        group_size=passes.count_of(axes, sizes),
        shapes=Shapes((operand,), (result,)),
    )


def _in_order(axes: Iterable[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Axes as the mesh has them; those that it does not have last."""
    places = {name: place for place, name in enumerate(sizes)}
    return tuple(sorted(axes, key=lambda axis: places.get(passes.whole_of(axis), len(places))))


# Shards that stay as large as they are, and change places


def _permuted(kind: str, operation: Any, sizes: Mapping[str, int]) -> Exchange:
    after = passes.out_sharding(operation)
    before = passes.sharding_of(operation.operands[0], after)
    asked = _resharded(kind, operation, sizes)
    return asked.between(places.moves(before, after, sizes), sizes)


# What the user's own collectives send


def _manual(kind: str, operation: Any, sizes: Mapping[str, int]) -> Exchange:
    """A collective that a ``shard_map`` calls: its types are per device already."""
    ragged = kind == "ragged-all-to-all"
    groups, axes = _groups_of(operation, sizes)
    # It sends the most that its operand allows; the others are where to write, and sizes.
    sent = [*operation.operands][: 1 if ragged else None]
    # Axes that are not manual may split what the shard_map sees.
    shardings = passes.shardings_in(passes.text_of(operation, "sdy.sharding"))
    operands, results = (
        tuple(
            local_shape(value.type, shardings[i] if i < len(shardings) else (), sizes)
            for i, value in enumerate(values)
        )
        for values in (sent, operation.results)
    )
    return Exchange(
        kind=kind,
        mesh_axes=axes,
        group_size=max(map(len, groups), default=1),
        shapes=Shapes(operands, results),
    )


def _groups_of(
    operation: Any, sizes: Mapping[str, int]
) -> tuple[hlo_groups.Groups, tuple[str, ...]]:
    """Devices that exchange with each other, and the mesh axes that they are along."""
    attributes, name = operation.attributes, "replica_groups"
    if "source_target_pairs" in attributes:
        name = "source_target_pairs"
    elif operation.name == "stablehlo.custom_call":
        attributes = attributes["backend_config"]
    elif "mesh_axes" in (text := passes.text_of(operation, name)):
        axes = _in_order(_mesh_axes(text), sizes)
        return ((*range(passes.count_of(axes, sizes)),),), axes
    rows = np.array(attributes[name])
    groups = tuple(tuple(int(n) for n in row if n >= 0) for row in rows)
    if name == "source_target_pairs":
        groups = hlo_groups.connected(groups)
    return groups, hlo_groups.mesh_axes_of(groups, sizes)


_AXIS_REF = re.compile(r'axis_ref<name = ("(?:[^"\\]|\\.)*")([^>]*(?:<[^>]*>)?)')
_PART = re.compile(r"\((\d+)\)(\d+)")


def _mesh_axes(text: str) -> Iterator[str]:
    for name, rest in _AXIS_REF.findall(text):
        part = _PART.search(rest)
        yield passes.axes_in(name)[0] + (f":({part[1]}){part[2]}" if part else "")
