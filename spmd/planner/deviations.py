"""What a compiled program sends otherwise than Shardy's exchanges say, and why.

Exchanges that the compiler combined are taken apart first, and alike ones added up: compilers peel
loops and move lines. What both have is taken off both. The rest is compared from the strictest
likeness to the loosest. What runs an unknown number of times counts once on each side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import math
from operator import attrgetter
from typing import Any, NamedTuple

from spmd.inspection.records.diff import matched
from spmd.inspection.records.names import users_own
from spmd.inspection.records.plan import LEAST, Deviation
from spmd.inspection.records.report import Collective, Shape, Shapes, Source
from spmd.inspection.records.sums import once


def deviations(
    predicted: Iterable[Collective], compiled: Iterable[Collective]
) -> tuple[Deviation, ...]:
    """Differences in wire bytes above 2% of the larger total, with their causes.

    Args:
        predicted: what a preview says.
        compiled: what the compiler made of the same program.

    Returns:
        The largest difference first. What cancels out over the same axes is left out.
    """
    a, b = _lines(predicted), _lines(compiled)
    limit = LEAST * max(_sent(a), _sent(b))
    rows = _together(_compared(a, b))
    found = [one for one in _uncancelled(rows, limit) if abs(one.change) > limit]
    return tuple(sorted(found, key=lambda one: (-abs(one.change), one.mesh_axes, one.cause)))


# What is sent, alike exchanges together


@dataclasses.dataclass(slots=True, kw_only=True)
class _Line:
    """Alike exchanges, as far as nothing of the other side corresponds to them.

    Attributes:
        kind: of them.
        axes: that they cross.
        dtype: of what they send.
        elements: before or after each, whichever are more.
        shape: of one of them.
        group: devices that exchange with each other.
        each: wire bytes of one.
        times: how often they run, as far as they are left.
        whole: how often they run.
        other: how often the same run on the other side.
        places: executions by line, as far as they are left.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    elements: int
    shape: Shape
    group: int
    each: float = 0.0
    times: int = 0
    whole: int = 0
    other: int = 0
    places: Counter[Source | None] = dataclasses.field(default_factory=Counter)

    @property
    def source(self) -> Source | None:
        """The line of most executions; one that is known, if there is one."""
        ranked = sorted(self.places.items(), key=lambda item: (item[0] is None, -item[1]))
        return ranked[0][0] if ranked else None

    def taken(self, times: int) -> int:
        """Wire bytes of so many executions, which are left no more."""
        self.times -= times
        return round(times * self.each)


_ALL = attrgetter("kind", "axes", "dtype", "elements", "group")


def _lines(found: Iterable[Collective]) -> list[_Line]:
    lines: dict[Any, _Line] = {}
    for one in once(found):
        for shapes, wire, source in _parts(one):
            if not one.executions or not wire:
                continue
            line = _line(one, shapes)
            line = lines.setdefault(_ALL(line), line)
            # Bytes of parts may be rounded otherwise.
            line.each = (line.each * line.times + wire * one.executions) / (
                line.times + one.executions
            )
            line.times += one.executions
            line.whole = line.times
            line.places[source] += one.executions
    return [*lines.values()]


def _parts(one: Collective) -> Iterator[tuple[Shapes, int, Source | None]]:
    """The exchanges that a collective was combined from: shapes, wire bytes, and lines."""
    for part in one.parts or (one,):
        own = users_own(part.source)
        # Several operations of one line differ in their columns.
        place = dataclasses.replace(own, column=0) if own else None
        yield part.shapes, part.wire_bytes, place


def _line(one: Collective, shapes: Shapes) -> _Line:
    larger = max(shapes, key=_elements)
    return _Line(
        kind=one.kind,
        axes=one.mesh_axes,
        dtype=", ".join(dict.fromkeys(shape.dtype for shape in shapes.operands)),
        elements=_elements(larger),
        shape=max(larger, key=lambda shape: math.prod(shape.dims)),
        group=one.group_size,
    )


def _elements(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape.dims) for shape in shapes)


def _sent(lines: Iterable[_Line]) -> float:
    return sum(line.times * line.each for line in lines)


# From the strictest likeness to the loosest


def _compared(a: Sequence[_Line], b: Sequence[_Line]) -> Iterator[Deviation]:
    """Every difference, however small, and also what is sent otherwise in as many bytes."""
    _take_off(a, b)
    yield from _alike(a, b, _STRICT)
    yield from _over_parts(a, b)
    yield from _alike(a, b, _ELSEWHERE)
    yield from _left(a, b, lambda one: one.other > 0)
    yield from _alike(a, b, _PIECES)
    yield from _left(a, b, lambda one: True)


def _take_off(a: Sequence[_Line], b: Sequence[_Line]) -> None:
    """Takes off both sides what both have, wherever it stands."""
    for i, j in matched(a, b, [(_ALL, _ALL)])[0].items():
        one, other = a[i], b[j]
        one.other, other.other = other.whole, one.whole
        one.places, other.places = one.places - other.places, other.places - one.places
        both = min(one.times, other.times)
        one.times, other.times = one.times - both, other.times - both


class _Likeness(NamedTuple):
    """Keys that are equal where a line of one side became one of the other, and what is said.

    Where `is_all`, all that is left of both corresponds, and else as many executions.
    """

    of_a: Callable[[_Line], Any]
    of_b: Callable[[_Line], Any]
    cause: Callable[[_Line, _Line], str]
    is_all: bool = False


def _alike(
    a: Iterable[_Line], b: Iterable[_Line], likenesses: Iterable[_Likeness]
) -> Iterator[Deviation]:
    for likeness in likenesses:
        while True:
            left, right = ([one for one in side if one.times] for side in (a, b))
            partners, _, _ = matched(left, right, [likeness[:2]])
            if not partners:
                break
            for i, j in partners.items():
                yield _became(left[i], right[j], likeness)


def _became(one: _Line, other: _Line, likeness: _Likeness) -> Deviation:
    cause, both = likeness.cause(one, other), min(one.times, other.times)
    sent, got = (x.taken(x.times if likeness.is_all else both) for x in (one, other))
    found = _deviation(one, sent, got, cause)
    return dataclasses.replace(found, source=one.source or other.source)


def _deviation(one: _Line, predicted: int, compiled: int, cause: str) -> Deviation:
    return Deviation(
        kind=one.kind,
        mesh_axes=one.axes,
        source=one.source,
        predicted=predicted,
        compiled=compiled,
        cause=cause,
    )


def _over_parts(a: Sequence[_Line], b: Sequence[_Line]) -> Iterator[Deviation]:
    """What is one exchange over several axes on one side, and on the other one for each."""
    for one in a:
        if pieces := _pieces(one, b):
            sent, got = _taken(one, pieces)
            yield _deviation(one, sent, got, f"one for each of {_axes(pieces)}, not one for all")
    for one in b:
        if pieces := _pieces(one, a):
            got, sent = _taken(one, pieces)
            yield _deviation(one, sent, got, f"one for all, not one for each of {_axes(pieces)}")


def _pieces(whole: _Line, others: Sequence[_Line]) -> list[_Line]:
    """Lines of the same kind over parts of the axes that make all of them; none if none do."""
    found, left = [], {*whole.axes} if whole.times else set()
    # One that comes later may be of what the earlier ones leave each device.
    for one in sorted(others, key=lambda one: -one.elements):
        is_alike = (one.kind, one.dtype) == (whole.kind, whole.dtype) and one.times > 0
        if is_alike and whole.elements % one.elements == 0 and {*one.axes} & left == {*one.axes}:
            found.append(one)
            left -= {*one.axes}
    return found if len(found) > 1 and not left else []


def _taken(whole: _Line, pieces: Sequence[_Line]) -> tuple[int, int]:
    both = min(one.times for one in (whole, *pieces))
    return whole.taken(both), sum(one.taken(both) for one in pieces)


def _axes(lines: Iterable[_Line]) -> str:
    return " and ".join(sorted("+".join(one.axes) for one in lines))


def _left(
    a: Iterable[_Line], b: Iterable[_Line], is_told: Callable[[_Line], bool]
) -> Iterator[Deviation]:
    """What only one side has, or has more often."""
    for lines, is_predicted in ((a, True), (b, False)):
        for one in lines:
            if one.times and is_told(one):
                both = min(one.whole, one.other)
                sent, got = both + one.times * is_predicted, both + one.times * (not is_predicted)
                nbytes = round(sent * one.each), round(got * one.each)
                yield _deviation(one, *nbytes, _runs(sent, got))
                one.times = 0


def _runs(predicted: int, compiled: int) -> str:
    """``runs 6 times, not 12``, and ``once`` for 1."""
    if not predicted:
        return "no sharding asks for it"
    if not compiled:
        return "the compiler does without it"
    first = "once" if compiled == 1 else f"{compiled:,} times"
    second = "once" if predicted == 1 else f"{predicted:,}{' times' * (compiled == 1)}"
    return f"runs {first}, not {second}"


def _other_dtype(one: _Line, other: _Line) -> str:
    return f"sent as {other.dtype}, not {one.dtype}"


def _other_kind(one: _Line, other: _Line) -> str:
    differ = one.dtype != other.dtype
    return f"{_named(other, differ)}, not {_named(one, differ)}"


def _named(one: _Line, dtype: bool = False) -> str:
    article = "an" if one.kind[0] in "aeiou" else "a"
    return f"{article} {one.kind}{f' of {one.dtype}' * dtype}"


def _other_axes(one: _Line, other: _Line) -> str:
    return f"over {', '.join(other.axes)}, not over {', '.join(one.axes)}"


def _other_pieces(one: _Line, other: _Line) -> str:
    if one.times == other.times:
        return f"of {other.shape}, not {one.shape}"
    return f"{other.times:,} of {other.shape}, not {one.times:,} of {one.shape}"


_PERMUTE = "collective-permute"
_RINGS = frozenset({"all-gather", "all-reduce", "reduce-scatter"})
"""What compilers replace by permutes around a ring, so that products go on meanwhile."""


def _whole(one: _Line) -> Any:
    return (one.axes, one.elements) if one.kind in _RINGS else None


def _around(one: _Line) -> Any:
    """What parts that go around a ring are of."""
    return (one.axes, one.elements * one.group) if one.kind == _PERMUTE else None


def _halves(one: _Line) -> Any:
    """What parts are of that go around it in both directions, a half in each."""
    return (one.axes, one.elements * one.group * 2) if one.kind == _PERMUTE else None


def _into_ring(one: _Line, other: _Line) -> str:
    return "its parts go around a ring"


def _out_of_ring(one: _Line, other: _Line) -> str:
    return f"{_named(other)}, not parts around a ring"


_BUT_DTYPE = attrgetter("kind", "axes", "elements", "group")
_BUT_KIND = attrgetter("axes", "elements", "dtype")
_BUT_BOTH = attrgetter("axes", "elements")
_BUT_AXES = attrgetter("kind", "dtype", "elements")
_BUT_SHAPE = attrgetter("kind", "axes")

_STRICT = (
    _Likeness(_BUT_DTYPE, _BUT_DTYPE, _other_dtype),
    _Likeness(_whole, _around, _into_ring, True),
    _Likeness(_whole, _halves, _into_ring, True),
    _Likeness(_around, _whole, _out_of_ring, True),
    _Likeness(_halves, _whole, _out_of_ring, True),
    _Likeness(_BUT_KIND, _BUT_KIND, _other_kind),
    _Likeness(_BUT_BOTH, _BUT_BOTH, _other_kind),
)
_ELSEWHERE = (_Likeness(_BUT_AXES, _BUT_AXES, _other_axes),)
_PIECES = (_Likeness(_BUT_SHAPE, _BUT_SHAPE, _other_pieces, True),)


# What is told


def _together(rows: Iterable[Deviation]) -> list[Deviation]:
    """Differences of one cause over the same axes as one, with the line of the largest."""
    groups: dict[Any, list[Deviation]] = {}
    for one in rows:
        groups.setdefault((one.kind, one.mesh_axes, one.cause), []).append(one)
    return [
        dataclasses.replace(
            max(found, key=lambda one: (abs(one.change), one.source is not None)),
            predicted=sum(one.predicted for one in found),
            compiled=sum(one.compiled for one in found),
        )
        for found in groups.values()
    ]


def _uncancelled(rows: Sequence[Deviation], limit: float) -> Iterator[Deviation]:
    """Without those that cancel each other out over the same axes."""
    by_axes: dict[Any, list[Deviation]] = {}
    for one in sorted(rows, key=lambda one: -abs(one.change)):
        by_axes.setdefault(one.mesh_axes, []).append(one)
    for found in by_axes.values():
        if abs(sum(one.change for one in found)) <= limit:
            continue
        while found:
            one = found.pop(0)
            other = next((x for x in found if abs(one.change + x.change) <= limit), None)
            if other is None or one.change * other.change >= 0:
                yield one
            else:
                found.remove(other)
