"""Candidates of a plan by memory and time: places of points, names, ticks, and the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple, TypeAlias

from spmd.inspection.records.plan import Candidate, Plan
from spmd.inspection.records.sizes import show_bytes, show_seconds
from spmd.inspection.show import plan_words as said

_WIDTH, _HEIGHT = 560, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 34, 26, 54
_MARGIN = 1.2
"""How much wider the axes are than the points, as a factor."""
_BUDGET_SHOWN = 6.0
"""A budget that is so many times larger than all points is told and not drawn."""
_LONGEST = 22
_LADDERS = ((1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
"""Steps of ticks within ten, from coarse to fine."""
_LEAST_TICKS, _MOST_TICKS = 3, 6
_NARROW = 4.0
"""A scale whose ends are less than this apart, as a factor, has ticks at equal distances."""


def view(plan: Plan) -> dict[str, Any] | None:
    """Everything that the picture shows; None where there is nothing to compare."""
    points = [_point(one, plan) for one in plan.candidates]
    if len(points) < 2:
        return None
    across, budget = [one.nbytes for one in points], plan.budget
    is_drawn = budget is not None and max(across) * _BUDGET_SHOWN >= budget > 0
    x = _scale([*across, *[float(budget or 0)] * is_drawn], _LEFT, _WIDTH - _RIGHT)
    y = _scale([one.seconds for one in points], _HEIGHT - _BOTTOM, _TOP)
    places = [(round(x.place(one.nbytes), 1), round(y.place(one.seconds), 1)) for one in points]
    line = round(x.place(float(budget or 0)), 1) if is_drawn else None
    names = _names(points, places, line)
    return {
        "width": _WIDTH, "height": _HEIGHT,
        "left": _LEFT, "right": _WIDTH - _RIGHT, "top": _TOP, "bottom": _HEIGHT - _BOTTOM,
        "points": [
            {"x": place[0], "y": place[1], "class": one.look, "title": one.title, "name": name}
            for one, place, name in zip(points, places, names, strict=True)
        ],
        "columns": _apart([(round(x.place(at), 1), text) for at, text in _ticks(x, _BYTES)]),
        "lines": [(round(y.place(at), 1), text) for at, text in _ticks(y, _SECONDS)],
        "budget": line,
        "budget_said": "" if budget is None else show_bytes(budget),
    }  # fmt: skip


# Points


class _Point(NamedTuple):
    """A candidate as it is drawn; `name` is empty where it has none in the picture."""

    nbytes: float
    seconds: float
    look: str
    name: str
    title: str


def _point(one: Candidate, plan: Plan) -> _Point:
    is_chosen, kind = one is plan.chosen, kind_of(one)
    hollow = "hollow" if one.peak is None else ""
    over = "" if one.fits(plan.budget) else "over"
    axes = ", ".join(f"{name}={size}" for name, size in one.axes.items())
    figures = f"{show_seconds(one.seconds)}, {show_bytes(one.needed)}"
    name = said.title(one) if is_chosen or kind != "found" else ""
    return _Point(
        # What is not known, and what takes no time, has a place all the same.
        nbytes=float(max(1, one.needed)),
        seconds=max(1e-9, one.seconds),
        look=" ".join(filter(None, [kind, "chosen" if is_chosen else "", hollow, over])),
        name=name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…",
        title=f"{said.title(one)} on {axes or 'no mesh'}: {figures}; {said.verdict(one, plan)}",
    )


def kind_of(one: Candidate) -> str:
    """Where a candidate comes from: ``found``, ``written`` by the user, or an ``expert``.

    What was found and is an expert's program is that expert's.
    """
    if one.same:
        return "expert"
    return {"found": "found", "as written": "written"}.get(one.name, "expert")


# Names beside points


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def hits(self, other: _Box) -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)


_Place: TypeAlias = tuple[float, float]
_SIDES = (
    ("start", 15, 5), ("end", -15, 5), ("middle", 0, -15), ("middle", 0, 25),
    ("end", -4, -15), ("start", 4, -15), ("end", -4, 25), ("start", 4, 25),
)  # fmt: skip
_FARTHER = tuple(
    (side, round(right * away), round(down * away) + 5)
    for away in (30, 46, 64, 84)
    for side, right, down in (
        ("start", 1, 0), ("end", -1, 0), ("start", 0.9, -0.4), ("start", 0.9, 0.4),
        ("end", -0.9, -0.4), ("end", -0.9, 0.4), ("start", 0.6, -0.8), ("start", 0.6, 0.8),
        ("end", -0.6, -0.8), ("end", -0.6, 0.8), ("middle", 0, -1), ("middle", 0, 1),
    )
)  # fmt: skip
"""Places that a line leads to, where none of the sides is free."""
_LETTER, _LINE = 7.6, 16


def _names(
    points: Sequence[_Point], places: Sequence[_Place], line: float | None
) -> list[dict[str, Any] | None]:
    """Where each name stands, once, so that it hits no point, name or line; None where it would.

    Names that stand beside their points come before those that a line leads to, which passes by
    names and other lines, and may be behind a point.
    """
    taken = [_Box(x - 9, y - 9, x + 9, y + 9) for x, y in places]
    taken += [_Box(line - 2, 0, line + 2, _HEIGHT)] if line is not None else []
    found: list[dict[str, Any] | None] = [None] * len(points)
    # What was compiled comes first; of several points of one name only the first has it.
    order = sorted(range(len(points)), key=lambda i: "hollow" in points[i].look)
    first = {points[i].name: i for i in reversed(order) if points[i].name}
    order = [i for i in order if first.get(points[i].name) == i]
    drawn: list[_Box] = []
    for sides in (_SIDES, _FARTHER):
        for i in [i for i in order if not found[i]]:
            one, (x, y) = points[i], places[i]
            for side, right, down in sides:
                box = _box(one.name, side, x + right, y + down)
                end = _nearest(box, x, y) if sides is _FARTHER else None
                along = _along(x, y, *end) if end else []
                if _is_free(box, taken) and not any(a.hits(b) for a in along for b in drawn):
                    found[i] = {
                        "text": one.name, "side": side, "x": x + right, "y": y + down,
                        "line": end and {"x1": x, "y1": y, "x2": end[0], "y2": end[1]},
                    }  # fmt: skip
                    taken += [box, *along]
                    drawn += [box, *along]
                    break
    return found


def _along(x: float, y: float, to_x: float, to_y: float) -> list[_Box]:
    """Places on a line beside its point, so near each other that nothing is between them."""
    count = math.ceil(math.hypot(to_x - x, to_y - y) / 4)
    at = ((x + (to_x - x) * i / count, y + (to_y - y) * i / count) for i in range(3, count))
    return [_Box(a - 2, b - 2, a + 2, b + 2) for a, b in at]


def _nearest(box: _Box, x: float, y: float) -> _Place:
    """Where on the edge of a name a line from a point ends."""
    return min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)


def _box(name: str, side: str, x: float, y: float) -> _Box:
    width = _LETTER * len(name)
    left = x - {"start": 0.0, "end": width, "middle": width / 2}[side]
    return _Box(left, y - _LINE + 4, left + width, y + 4)


def _is_free(box: _Box, taken: Sequence[_Box]) -> bool:
    inside = box.left >= _LEFT and box.right <= _WIDTH - _RIGHT and box.top >= 0
    return inside and box.bottom <= _HEIGHT - _BOTTOM and not any(map(box.hits, taken))


# Scales


class _Scale(NamedTuple):
    """From a figure to a place, where half is as far away everywhere."""

    place: Callable[[float], float]
    least: float
    most: float


def _scale(values: Sequence[float], start: float, end: float) -> _Scale:
    least, most = min(values) / _MARGIN, max(values) * _MARGIN

    def place(value: float) -> float:
        return start + (end - start) * math.log(value / least) / math.log(most / least)

    return _Scale(place, least, most)


# Ticks


class _Units(NamedTuple):
    """Units of a figure with their names, largest first."""

    all: Sequence[tuple[float, str]]

    def of(self, value: float) -> tuple[float, str]:
        """The largest unit that leaves at least one."""
        return next((one for one in self.all if value >= one[0] * (1 - 1e-9)), self.all[-1])

    def above(self, unit: float) -> float:
        """The next larger unit."""
        return min((one for one, _ in self.all if one > unit), default=math.inf)

    def show(self, value: float, unit: tuple[float, str]) -> tuple[float, str]:
        """A figure, and its text in a unit without zeros at its end."""
        return value, f"{value / unit[0]:g} {unit[1]}"


_SECONDS = _Units([(1000.0, "ks"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])
_BYTES = _Units(
    [(1024.0**i, name) for i, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))][::-1]
)


def _ticks(scale: _Scale, units: _Units) -> list[tuple[float, str]]:
    """Round figures within a scale, three at least and seven at most."""
    if scale.most < _NARROW * scale.least:
        return _even(scale, units)
    found: list[float] = []
    for ladder in _LADDERS:
        rungs = (
            step * 10**ten * unit
            for unit, _ in reversed(units.all)
            for ten in range(3)
            for step in ladder
            if step * 10**ten * unit < units.above(unit)
        )
        found = [one for one in rungs if scale.least <= one <= scale.most]
        if len(found) >= _LEAST_TICKS:
            break
    thinned = found[:: -(-len(found) // _MOST_TICKS) or 1]
    return [units.show(one, units.of(one)) for one in thinned]


def _apart(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Those of ticks in a row whose texts do not run into each other."""
    found: list[tuple[float, str]] = []
    for place, text in ticks:
        if not found or place - found[-1][0] > _LETTER * (len(text) + len(found[-1][1]) + 2) / 2:
            found.append((place, text))
    return found


def _even(scale: _Scale, units: _Units) -> list[tuple[float, str]]:
    """Figures at equal distances."""
    unit = units.of(scale.most)
    least, most = scale.least / unit[0], scale.most / unit[0]
    power = math.floor(math.log10(most - least)) - 1
    step = next(
        size * 10.0**ten
        for ten in (power, power + 1)
        for size in (1, 2, 2.5, 5)
        if (most - least) / (size * 10.0**ten) <= _MOST_TICKS
    )
    places = range(math.ceil(least / step), math.floor(most / step) + 1)
    return [units.show(i * step * unit[0], unit) for i in places]
