"""The way of one axis from the annotation that it comes from to a value."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math

from spmd.inspection.shardy import passes
from spmd.inspection.shardy.propagation import Mark, Propagation, Value


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
    *way, (end, _, _) = _back(found, i, axis)
    return _start(found, end, axis, [hop for _, _, hop in way if hop])


def mark_of(found: Propagation, i: int, axis: str) -> Mark | None:
    """The annotation that `route_of` leads to.

    Ways of many values end alike: each part of a way is gone once.

    Args:
        found: the program.
        i: index of the value, which is split over the axis.
        axis: of the mesh, or a part of one.
    """
    passed = []
    for at, before, hop in _back(found, i, axis):
        key = (at, axis, before)
        passed.append(key)
        if hop is None and key not in found.ends:
            found.ends[key] = _start(found, at, axis, []).mark
        if key in found.ends:
            break
    mark = found.ends[passed[-1]]
    found.ends.update(dict.fromkeys(passed, mark))
    return mark


def _back(found: Propagation, i: int, axis: str) -> Iterator[tuple[int, float, Hop | None]]:
    """Each value on the way back, the step before which it was left, and the hop that led there."""
    before: float = math.inf
    while not _asks(found.values[i], axis):
        if found.values[i].kind == "output":
            step, hop = before, _returned(found, i)
        else:
            step, hop = _reached(found, i, axis, before)
        if hop is None:
            break
        yield i, before, hop
        i, before = hop.source, step
    yield i, before, None


def _start(found: Propagation, i: int, axis: str, hops: list[Hop]) -> Route:
    """The whole route, from the value that a way back ends at."""
    if _asks(found.values[i], axis):
        return Route(found.values[i].mark, tuple(reversed(hops)))
    return _pinned(found, i, axis, hops)


def _asks(value: Value, axis: str) -> bool:
    """Whether the value's own annotation has the axis where the value has it.

    The pass names another annotation here if one asks for the same.
    """
    if value.mark is None:
        return False
    pairs = zip(value.axes, value.mark.dimensions, strict=True)
    return any(axis in axes and _covers(asked.axes, axis) for axes, asked in pairs)


def _covers(axes: tuple[str, ...], axis: str) -> bool:
    return any(one in (axis, passes.whole_of(axis)) for one in axes)


def _returned(found: Propagation, i: int) -> Hop:
    """The only way to an output without an annotation of its own is from what is returned."""
    (k,) = found.values[i].links
    return Hop(k, found.links[k].values[0], i)


def _reached(found: Propagation, i: int, axis: str, before: float) -> tuple[float, Hop | None]:
    """The latest step before another one by which the axis came to a value.

    One of the axis itself goes before one of a part of it, or of the whole that it is a part of.
    """
    axis = passes.written(axis, found.names)
    steps = [
        (arrival.axis == axis, arrival.step, arrival.hop)
        for arrival in _arrivals(found, i).get(passes.whole_of(axis), ())
        if arrival.step < before
    ]
    if not steps:
        return 0, None
    _, step, hop = max(steps, key=lambda one: one[:2])
    return step, hop


@dataclasses.dataclass(frozen=True, slots=True)
class _Arrival:
    """An axis that came to a value."""

    axis: str
    step: int
    hop: Hop


def _arrivals(found: Propagation, i: int) -> dict[str, list[_Arrival]]:
    """All axes that came to a value, by the name of the whole axis."""
    arrivals = found.arrivals.get(i)
    if arrivals is None:
        arrivals = found.arrivals[i] = {}
        for k in found.values[i].links:
            for move in found.links[k].moves:
                if i in move.targets:
                    one = _Arrival(move.axis, move.step, Hop(k, move.source, i))
                    arrivals.setdefault(passes.whole_of(move.axis), []).append(one)
    return arrivals


def _pinned(found: Propagation, i: int, axis: str, hops: list[Hop]) -> Route:
    """The rest of a route that began before propagation: an annotation was put on a neighbour."""
    axis = passes.written(axis, found.names)
    mark = found.marks.get(found.values[i].origins.get(passes.whole_of(axis), ""))
    if mark is None:
        mark = found.marks.get(found.values[i].origins.get(axis, ""))
    for k in found.values[i].links if mark else ():
        for other in found.links[k].values:
            if other != i and found.values[other].mark is mark:
                return Route(mark, (Hop(k, other, i), *reversed(hops)))
    return Route(mark, tuple(reversed(hops)))
