"""The way of an axis from its annotation to a value, or where it stopped, and what kept it out.

Every operation is looked at once from each dimension that it relates, however many values are asked
about: where an axis stops, and why, is the same for all of them. Only how far away it is differs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

from spmd.inspection.shardy import passes
from spmd.inspection.shardy.passes import Factors
from spmd.inspection.shardy.propagation import Link, Mark, Move, Propagation, Value, walk

# Routes


class Hop(NamedTuple):
    """From one value of an operation to another; all three are indices."""

    link: int
    source: int
    target: int


def route_of(found: Propagation, i: int, axis: str) -> tuple[Mark | None, tuple[Hop, ...]]:
    """The annotation that an axis comes from, by the steps of the pass, and the hops from there.

    The annotation is None where it is unknown.
    """
    *way, (end, _, _) = _back(found, i, axis)
    mark, first = _start(found, end, axis)
    hops = [hop for _, _, hop in reversed(way) if hop]
    return mark, (*first, *hops)


def mark_of(found: Propagation, i: int, axis: str) -> Mark | None:
    """The annotation that `route_of` leads to.

    Ways of many values end alike: each part of a way is gone once.
    """
    passed = []
    for at, before, hop in _back(found, i, axis):
        key = (at, axis, before)
        passed.append(key)
        if hop is None and key not in found.ends:
            found.ends[key], _ = _start(found, at, axis)
        if key in found.ends:
            break
    mark = found.ends[passed[-1]]
    found.ends.update(dict.fromkeys(passed, mark))
    return mark


def _back(found: Propagation, i: int, axis: str) -> Iterator[tuple[int, float, Hop | None]]:
    """Each value on the way back, the step before which it was left, and the hop that led there."""
    before: float = math.inf
    while not _asks(found.values[i], axis):
        step, hop = _reached(found, i, axis, before)
        if hop is None:
            break
        yield i, before, hop
        i, before = hop.source, step
    yield i, before, None


def _asks(value: Value, axis: str) -> bool:
    """Whether the value's own annotation has the axis where the value has it.

    The pass names another annotation here if one asks for the same.
    """
    if value.mark is None:
        return False
    pairs = zip(value.axes, value.mark.dimensions, strict=True)
    return any(axis in axes and _has(asked.axes, axis) for axes, asked in pairs)


def _reached(found: Propagation, i: int, axis: str, before: float) -> tuple[float, Hop | None]:
    """The latest step before another one by which the axis came to a value.

    One of the axis itself goes before one of a part of it, or of the whole that it is a part of.
    """
    if found.values[i].kind == "output":  # it has no other way than from what is returned
        (k,) = found.values[i].links
        return before, Hop(k, found.links[k].values[0], i)
    axis = passes.written(axis, found.names)
    steps = [
        (move.axis == axis, move.step, hop)
        for move, hop in _arrivals(found, i).get(passes.whole_of(axis), ())
        if move.step < before
    ]
    _, step, hop = max(steps, key=lambda one: one[:2], default=(False, 0, None))
    return step, hop


def _arrivals(found: Propagation, i: int) -> dict[str, list[tuple[Move, Hop]]]:
    """The moves of all axes that came to a value, by the name of the whole axis."""
    arrivals = found.arrivals.get(i)
    if arrivals is None:
        arrivals = found.arrivals[i] = {}
        for k in found.values[i].links:
            for move in found.links[k].moves:
                if i in move.targets:
                    whole = passes.whole_of(move.axis)
                    arrivals.setdefault(whole, []).append((move, Hop(k, move.source, i)))
    return arrivals


def _start(found: Propagation, i: int, axis: str) -> tuple[Mark | None, tuple[Hop, ...]]:
    """The annotation at the value that a way back ends at, or at a neighbour, with the hop from it.

    Before propagation begins, Shardy puts some annotations on neighbours.
    """
    value = found.values[i]
    if _asks(value, axis):
        return value.mark, ()
    axis = passes.written(axis, found.names)
    names = (value.origins.get(name, "") for name in (passes.whole_of(axis), axis))
    mark = next(filter(None, map(found.marks.get, names)), None)
    for k in value.links if mark else ():
        for other in found.links[k].values:
            if other != i and found.values[other].mark is mark:
                return mark, (Hop(k, other, i),)
    return mark, ()


# Conflicts


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
    distance: int = 0


def conflicts(found: Propagation, i: int) -> list[Stop]:
    """The annotations that did not get through to a value, the nearest first.

    Of stops that differ in neither axis, annotations nor reason the nearest is given, and of
    equally near ones the first in the program's order of operations.
    """
    stops = []
    for dimension in range(len(found.values[i].shape)):
        place = (i, dimension)
        region = _region_of(found, place)
        for distance, k in region.nearest(place):
            stop = region.stops[k]
            stops.append(dataclasses.replace(stop, dimension=dimension, distance=distance))
    return sorted(stops, key=lambda stop: stop.distance)


# Regions


_Place = tuple[int, int]
"""A value and one of its dimensions."""


def _region_of(found: Propagation, place: _Place) -> _Region:
    if place not in found.regions:
        region = _Region(place, lambda one: _look_once(found, one))
        for one in region.beyond:
            # At an annotation several regions end; what is said about it is the same in each.
            found.regions.setdefault(one, region)
    return found.regions[place]


_Kind = tuple[str, int, int, str]
"""Of stops that are alike in this, the nearest stands for all."""

_Near = tuple[int, int]
"""How many operations away the nearest stop of a kind is, and its index."""


class _Region:
    """The dimensions that one gets to from one of them, and the stops at its border.

    From any two dimensions without an annotation one gets to the same.
    """

    def __init__(self, start: _Place, look: Callable[[_Place], _Look]):
        self.beyond: dict[_Place, tuple[_Place, ...]] = {}
        stops: list[Stop] = []
        for place, _, _ in walk([start], self.beyond.__getitem__):
            self.beyond[place], here = look(place)
            stops += here
        #: Whatever it was that one began with, in the order of the program.
        self.stops = sorted(stops, key=lambda stop: (stop.link, stop.at, stop.dimension))
        self.kinds: defaultdict[_Kind, list[int]] = defaultdict(list)
        self.at: defaultdict[_Place, list[int]] = defaultdict(list)
        for k, stop in enumerate(self.stops):
            self.kinds[_kind(stop)].append(k)
            self.at[stop.at, stop.dimension].append(k)
        self.walks = 0
        self.tables: list[dict[_Place, _Near]] = []

    def nearest(self, place: _Place) -> list[_Near]:
        """The nearest stop of each kind, in order of distance."""
        # A walk from one dimension takes as long as a search from all stops of one kind.
        if self.walks < len(self.kinds):
            self.walks += 1
            return sorted(self._walk(place).values())
        self.tables = self.tables or [self._search(stops) for stops in self.kinds.values()]
        return sorted(table[place] for table in self.tables if place in table)

    def _walk(self, start: _Place) -> dict[_Kind, _Near]:
        """The nearest stop of each kind to one dimension."""
        near: dict[_Kind, _Near] = {}
        for place, _, distance in walk([start], self.beyond.__getitem__):
            for k in self.at.get(place, ()):
                kind, this = _kind(self.stops[k]), (distance, k)
                near[kind] = min(near.get(kind, this), this)
        return near

    def _search(self, stops: list[int]) -> dict[_Place, _Near]:
        """The nearest of some stops, in order, to each dimension from which one gets to one."""
        at: dict[_Place, int] = {}
        for k in stops:
            at.setdefault((self.stops[k].at, self.stops[k].dimension), k)
        found = walk(at, self.before.__getitem__)
        return {place: (distance, at[stop]) for place, stop, distance in found}

    @functools.cached_property
    def before(self) -> Mapping[_Place, list[_Place]]:
        """The other way round: from which dimensions one gets to one."""
        before: defaultdict[_Place, list[_Place]] = defaultdict(list)
        for place, others in self.beyond.items():
            for other in others:
                before[other].append(place)
        return before


def _kind(stop: Stop) -> _Kind:
    return (stop.axis, id(stop.lost), id(stop.won), stop.reason)


# Places

_Look = tuple[tuple[_Place, ...], list[Stop]]


def _look_once(found: Propagation, place: _Place) -> _Look:
    if found.values[place[0]].mark is None:
        return _look(found, place)  # it lies in one region
    if place not in found.looks:
        found.looks[place] = _look(found, place)
    return found.looks[place]


def _look(found: Propagation, place: _Place) -> _Look:
    """The dimensions next to one that are split alike, and the axes that do not get to it."""
    beyond: list[_Place] = []
    stops: list[Stop] = []
    for k in found.values[place[0]].links:
        relation = _relation_of(found, k)
        beyond += _alike(found, k, relation, place)
        if not relation.even:
            stops += _stops(found, k, relation, place)
    return tuple(dict.fromkeys(beyond)), stops


def _alike(found: Propagation, k: int, relation: _Relation, place: _Place) -> Iterator[_Place]:
    """The dimensions that must be split as one is, and are, beyond an operation."""
    value, dimension = place
    if found.values[value].mark is not None:
        return  # what is beyond has no say in how it is split
    link = found.links[k]
    for p, one in enumerate(link.values):
        if one == value:
            for q, d in relation.alike.get((p, dimension), ()):
                yield link.values[q], d


def _stops(found: Propagation, k: int, relation: _Relation, place: _Place) -> Iterator[Stop]:
    """The axes that an operation has beyond, and that do not get to a dimension."""
    rows = [*_rows(found.links[k], relation, place)]
    stopped = [(row, axis) for row in rows for axis in row.theirs if not _has(row.mine, axis)]
    for row, axis in stopped:
        reason, met = _reason(found, k, place, row, rows, axis)
        tie = reason == "tie"
        yield Stop(
            axis=axis,
            dimension=place[1],
            link=k,
            at=place[0],
            reason=reason,
            lost=mark_of(found, row.other[0], axis),
            won=None if tie else met,
            against=met if tie else None,
            kept=found.values[place[0]].axes[place[1]],
        )


class _Row(NamedTuple):
    """Another dimension with a factor of one, and the axes that split the factor in both."""

    factor: str
    mine: tuple[str, ...]
    other: _Place
    theirs: tuple[str, ...]


def _rows(link: Link, relation: _Relation, place: _Place) -> Iterator[_Row]:
    """The dimensions that an operation relates to one."""
    value, dimension = place
    for p, one in enumerate(link.values):
        if one != value or dimension >= len(link.factors[p]):
            continue
        for factor in link.factors[p][dimension]:
            members = relation.members[factor]
            mine = next(axes for q, d, axes in members if (q, d) == (p, dimension))
            for q, d, theirs in members:
                if q != p:
                    yield _Row(factor, mine, (link.values[q], d), theirs)


# Operations

_Axes = tuple[str, ...]
_Side = tuple[int, int]
"""A position among an operation's values, and a dimension of the value there."""


class _Relation(NamedTuple):
    """Which dimensions an operation relates, whatever its values are.

    Attributes:
        members: of a factor, the positions and dimensions that have it, and the axes there.
        alike: of a position and a dimension, those that are split alike and must be.
        even: whether all that have a factor are split alike, so that no axis stops.
    """

    members: Mapping[str, Sequence[tuple[int, int, _Axes]]]
    alike: Mapping[_Side, Sequence[_Side]]
    even: bool


def _relation_of(found: Propagation, k: int) -> _Relation:
    if k not in found.relations:
        link = found.links[k]
        axes = tuple(found.values[i].axes for i in link.values)
        sizes = tuple(link.sizes.items()), tuple(found.axis_sizes.items())
        found.relations[k] = _relation(link.factors, link.stops, axes, *sizes)
    return found.relations[k]


_Sizes = tuple[tuple[str, int], ...]


@functools.lru_cache(maxsize=1 << 12)  # layers of a program have the same
def _relation(
    factors: tuple[Factors, ...],
    stops: frozenset[str],
    axes: tuple[tuple[_Axes, ...], ...],
    factor_sizes: _Sizes,
    axis_sizes: _Sizes,
) -> _Relation:
    sizes = dict(factor_sizes), dict(axis_sizes)
    members: defaultdict[str, list[tuple[int, int, _Axes]]] = defaultdict(list)
    for p, dimensions in enumerate(factors):
        for d, names in enumerate(dimensions):
            for name in names:
                members[name].append((p, d, _axes_of(axes[p][d], names, name, *sizes)))
    alike: defaultdict[_Side, list[_Side]] = defaultdict(list)
    for name, sides in members.items():
        for (p, d, mine), (q, other, theirs) in itertools.permutations(sides, 2):
            if p != q and mine == theirs and name not in stops:
                alike[p, d].append((q, other))
    even = all(len({one for *_, one in sides}) == 1 for sides in members.values())
    return _Relation(members, alike, even)


def _axes_of(
    axes: _Axes,
    factors: Sequence[str],
    factor: str,
    sizes: Mapping[str, int],
    axis_sizes: Mapping[str, int],
) -> _Axes:
    """The axes that split one factor of a dimension, which consists of factors, major to minor."""
    if len(factors) == 1:
        return axes
    rest = list(axes)
    for name in factors:
        size, taken = sizes.get(name, 1), []
        while rest and size > 1:
            size //= max(passes.size_of(rest[0], axis_sizes), 1)
            taken.append(rest.pop(0))
        if name == factor:
            return tuple(taken)
    return ()


def _has(axes: _Axes, axis: str) -> bool:
    return axis in axes or passes.whole_of(axis) in axes


# Reasons


def _reason(
    found: Propagation, k: int, place: _Place, row: _Row, rows: list[_Row], axis: str
) -> tuple[str, Mark | None]:
    """Why an axis stopped at a value, and the annotation that it met."""
    value = found.values[place[0]]
    if row.factor in found.links[k].stops:
        return "operation", None
    for d, axes in enumerate(value.axes):
        if d != place[1] and _has(axes, axis):
            return "taken", mark_of(found, place[0], _own(axes, axis))
    if kept := value.axes[place[1]]:
        return "split", mark_of(found, place[0], kept[0])
    if value.mark is not None and value.dimensions[place[1]].closed:
        return "closed", value.mark
    if user := _user_elsewhere(found, k, row.factor, axis):
        return "taken", mark_of(found, *user)
    if rival := _rival(found, row, rows):
        return "tie", mark_of(found, *rival)
    return "operation", None


def _rival(found: Propagation, row: _Row, rows: list[_Row]) -> tuple[int, str] | None:
    """A value that wants the same dimension of an operation split over other axes."""
    theirs = found.values[row.other[0]].axes[row.other[1]]
    for one in rows:
        if one.other[0] != row.other[0] and one.theirs and not {*one.theirs} & {*theirs}:
            return one.other[0], one.theirs[0]
    return None


def _own(axes: tuple[str, ...], axis: str) -> str:
    return axis if axis in axes else passes.whole_of(axis)


def _user_elsewhere(found: Propagation, k: int, factor: str, axis: str) -> tuple[int, str] | None:
    """A value of an operation that has an axis on another dimension of the operation."""
    link = found.links[k]
    for p, i in enumerate(link.values):
        for axes, factors in zip(found.values[i].axes, link.factors[p], strict=False):
            if factor not in factors and _has(axes, axis):
                return i, _own(axes, axis)
    return None
