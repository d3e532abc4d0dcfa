"""The way of one axis from the annotation that it comes from to a value."""

from __future__ import annotations

import dataclasses
import math

from spmd.inspection._propagation import Mark, Propagation, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """From one value of an operation to another; all three are indices."""

    link: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """The annotation that an axis comes from, and the hops from there; None where it is unknown."""

    mark: Mark | None
    hops: tuple[Hop, ...]


def route_of(found: Propagation, i: int, axis: str) -> Route:
    """Follows an axis of a value back to the user's annotation, by the steps of the pass.

    Args:
        found: the program.
        i: index of the value, which is split over the axis.
        axis: of the mesh, or a part of one.
    """
    hops: list[Hop] = []
    before: float = math.inf
    while not _asks(found.values[i], axis):
        if found.values[i].kind == "output":
            step, hop = before, _returned(found, i)
        else:
            step, hop = _reached(found, i, axis, before)
        if hop is None:
            return _pinned(found, i, axis, hops)
        hops.append(hop)
        i, before = hop.source, step
    return Route(found.values[i].mark, tuple(reversed(hops)))


def _asks(value: Value, axis: str) -> bool:
    """Whether the value's own annotation has the axis where the value has it.

    The pass names another annotation here if one asks for the same.
    """
    if value.mark is None:
        return False
    pairs = zip(value.axes, value.mark.dimensions, strict=True)
    return any(axis in axes and _covers(asked.axes, axis) for axes, asked in pairs)


def _covers(axes: tuple[str, ...], axis: str) -> bool:
    return any(one in (axis, axis.partition(":")[0]) for one in axes)


def _returned(found: Propagation, i: int) -> Hop:
    """The only way to an output without an annotation of its own is from what is returned."""
    (k,) = found.values[i].links
    return Hop(k, found.links[k].values[0], i)


def _reached(found: Propagation, i: int, axis: str, before: float) -> tuple[float, Hop | None]:
    """The latest step before another one by which the axis came to a value."""
    steps = [
        (move.axis == axis, move.step, Hop(k, move.source, i))
        for k in found.values[i].links
        for move in found.links[k].moves
        if i in move.targets and move.step < before and _same(move.axis, axis)
    ]
    if not steps:
        return 0, None
    _, step, hop = max(steps, key=lambda one: one[:2])
    return step, hop


def _same(a: str, b: str) -> bool:
    return a.partition(":")[0] == b.partition(":")[0]


def _pinned(found: Propagation, i: int, axis: str, hops: list[Hop]) -> Route:
    """The rest of a route that began before propagation: an annotation was put on a neighbour."""
    mark = found.marks.get(found.values[i].origins.get(axis.partition(":")[0], ""))
    if mark is None:
        mark = found.marks.get(found.values[i].origins.get(axis, ""))
    for k in found.values[i].links if mark else ():
        for other in found.links[k].values:
            if other != i and found.values[other].mark is mark:
                return Route(mark, (Hop(k, other, i), *reversed(hops)))
    return Route(mark, tuple(reversed(hops)))
