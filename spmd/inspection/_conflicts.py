"""Where an axis stopped on its way to a value, and what kept it out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
import dataclasses

from spmd.inspection import _shardy
from spmd.inspection._propagation import Link, Mark, Propagation, Value
from spmd.inspection._routes import route_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """An axis that an operation has on one side and not on the other; `Conflict` says the rest."""

    axis: str
    dimension: int
    link: int
    at: int
    reason: str
    lost: Mark | None
    won: Mark | None
    against: Mark | None
    kept: tuple[str, ...]
    distance: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A dimension of a value, and how many operations away it is."""

    value: int
    dimension: int
    distance: int


def conflicts(found: Propagation, i: int) -> list[Stop]:
    """The annotations that did not get through to a value, the nearest first.

    Args:
        found: the program.
        i: index of the value.
    """
    stops: dict[object, Stop] = {}
    for dimension in range(len(found.values[i].shape)):
        for stop in _border(found, i, dimension):
            key = (dimension, stop.axis, id(stop.lost), id(stop.won), stop.reason)
            stops.setdefault(key, stop)
    return sorted(stops.values(), key=lambda stop: stop.distance)


def _border(found: Propagation, i: int, dimension: int) -> Iterator[Stop]:
    """Every axis that stops at the region of a dimension, in order of distance."""
    pending = deque([_Place(i, dimension, 0)])
    seen = {(i, dimension)}
    while pending:
        place = pending.popleft()
        for k in found.values[place.value].links:
            for factor, mine, other, theirs in _related(found, k, place):
                missing = [axis for axis in theirs if not _has(mine, axis)]
                for axis in missing:
                    yield _stop(found, k, factor, place, other, axis, dimension)
                next_to = (other.value, other.dimension)
                alike = not missing and mine == theirs
                if alike and next_to not in seen and _goes_on(found, k, factor, place):
                    seen.add(next_to)
                    pending.append(other)


def _goes_on(found: Propagation, k: int, factor: str, place: _Place) -> bool:
    """Whether what is beyond an operation has a say in how a dimension is split."""
    return found.values[place.value].mark is None and factor not in found.links[k].stops


def _related(
    found: Propagation, k: int, place: _Place
) -> Iterator[tuple[str, tuple[str, ...], _Place, tuple[str, ...]]]:
    """The dimensions that an operation relates to one: factor, its axes there, place, axes here."""
    key = (k, place.value, place.dimension)
    rows = found.related.get(key)
    if rows is None:
        rows = found.related[key] = [*_find_related(found, *key)]
    for factor, mine, value, dimension, theirs in rows:
        yield factor, mine, _Place(value, dimension, place.distance + 1), theirs


def _find_related(
    found: Propagation, k: int, i: int, dimension: int
) -> Iterator[tuple[str, tuple[str, ...], int, int, tuple[str, ...]]]:
    link = found.links[k]
    for p, value in enumerate(link.values):
        if value != i or dimension >= len(link.factors[p]):
            continue
        for factor in link.factors[p][dimension]:
            mine = _axes_of(found, link, p, dimension, factor)
            for q, other in enumerate(link.values):
                for d, factors in enumerate(link.factors[q]):
                    if q != p and factor in factors:
                        yield factor, mine, other, d, _axes_of(found, link, q, d, factor)


def _axes_of(found: Propagation, link: Link, p: int, d: int, factor: str) -> tuple[str, ...]:
    """The axes that split one factor of a dimension, which consists of factors, major to minor."""
    axes = found.values[link.values[p]].axes[d]
    factors = link.factors[p][d]
    if len(factors) == 1:
        return axes
    rest = list(axes)
    for name in factors:
        size, taken = link.sizes.get(name, 1), []
        while rest and size > 1:
            size //= max(_shardy.size_of(rest[0], found.axis_sizes), 1)
            taken.append(rest.pop(0))
        if name == factor:
            return tuple(taken)
    return ()


def _has(axes: tuple[str, ...], axis: str) -> bool:
    return any(one in (axis, axis.partition(":")[0]) for one in axes)


def _stop(
    found: Propagation,
    k: int,
    factor: str,
    place: _Place,
    other: _Place,
    axis: str,
    dimension: int,
) -> Stop:
    reason, other_mark = _reason(found, k, factor, place, other, axis)
    return Stop(
        axis=axis,
        dimension=dimension,
        link=k,
        at=place.value,
        reason=reason,
        lost=route_of(found, other.value, axis).mark,
        won=None if reason == "tie" else other_mark,
        against=other_mark if reason == "tie" else None,
        kept=found.values[place.value].axes[place.dimension],
        distance=place.distance,
    )


def _reason(
    found: Propagation, k: int, factor: str, place: _Place, other: _Place, axis: str
) -> tuple[str, Mark | None]:
    """Why an axis stopped at a value, and the annotation that it met."""
    value = found.values[place.value]
    if factor in found.links[k].stops:
        return "operation", None
    for d, axes in enumerate(value.axes):
        if d != place.dimension and _has(axes, axis):
            return "taken", route_of(found, place.value, _own(axes, axis)).mark
    if kept := value.axes[place.dimension]:
        return "split", route_of(found, place.value, kept[0]).mark
    if value.mark is not None and value.dimensions[place.dimension].closed:
        return "closed", value.mark
    if user := _user_elsewhere(found, k, factor, axis):
        return "taken", route_of(found, *user).mark
    if rival := _rival(found, k, factor, place, other):
        return "tie", route_of(found, *rival).mark
    return "operation", None


def _rival(
    found: Propagation, k: int, factor: str, place: _Place, other: _Place
) -> tuple[int, str] | None:
    """A value that wants the same dimension of an operation split over other axes."""
    theirs = found.values[other.value].axes[other.dimension]
    for _, _, there, axes in _related(found, k, place):
        if there.value != other.value and axes and not {*axes} & {*theirs}:
            return there.value, axes[0]
    return None


def _own(axes: tuple[str, ...], axis: str) -> str:
    return axis if axis in axes else axis.partition(":")[0]


def _user_elsewhere(found: Propagation, k: int, factor: str, axis: str) -> tuple[int, str] | None:
    """A value of an operation that has an axis on another dimension of the operation."""
    link = found.links[k]
    for p, i in enumerate(link.values):
        value: Value = found.values[i]
        for d, factors in enumerate(link.factors[p]):
            if factor not in factors and _has(value.axes[d], axis):
                return i, _own(value.axes[d], axis)
    return None
