"""What the page of a sweep shows, as plain values: time and MFU against devices, and a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import math
from typing import Any, NamedTuple

from spmd.inspection.records.sizes import show_bytes, show_count, show_seconds, show_share
from spmd.inspection.records.sweep import Sweep, SweepRow
from spmd.inspection.records.time import Time
from spmd.inspection.show import times, words
from spmd.inspection.show.page import clock
from spmd.inspection.show.page.view import typeset


def view(sweep: Sweep) -> dict[str, Any]:
    """Everything that the template draws."""
    found = times.timed(sweep)
    longest = max((time.seconds for _, time in found), default=0.0)
    axes = dict.fromkeys(axis for row in sweep for axis in row.mesh)
    return {
        "title": sweep.name,
        "sweep": sweep,
        "mesh": dict.fromkeys(axes, 1),
        "timed": bool(found),
        "best": times.best(sweep),
        "over": ["+".join(axes) or "none" for axes in sweep.axes],
        "rows": [_row(row, sweep, longest, axes) for row in sweep],
        "charts": [*_charts(found)] if len(found) > 1 else [],
        "legend": _legend(found, axes),
        "notes": [*_notes(sweep)],
    }


def _row(row: SweepRow, sweep: Sweep, longest: float, axes: Any) -> dict[str, Any]:
    total, time, share = row.total, row.time, None
    if row.peak is not None and row.capacity:
        share = row.peak / row.capacity
    return {
        "row": row,
        "time": show_seconds(time.seconds) if time else "",
        "seconds": time.seconds if time else 0.0,
        "parts": [*clock.parts(time, axes, time.seconds / longest)] if time and longest else [],
        "used": times.utilization(time) if time else "",
        "mfu": (time.mfu if time.mfu is not None else time.hfu) if time else 0.0,
        "bound": time.bound if time else "",
        "wire": typeset(words.wire(total)) if total else "",
        "over": [_over(row, axes) for axes in sweep.axes],
        "flops": show_count(row.flops).rstrip() if row.flops is not None else "",
        "hbm": show_bytes(row.hbm_bytes) if row.hbm_bytes is not None else "",
        "peak": words.known(row.peak, show_bytes) if row.report else "",
        "share": "too large" if row.fits is False else "" if share is None else show_share(share),
        "note": words.refused(row),
    }


def _over(row: SweepRow, axes: tuple[str, ...]) -> str:
    """Bytes over a set of axes; nothing where the mesh lacks one or nothing crosses it."""
    total = row.by_axis.get(axes)
    return typeset(words.wire(total)) if total else ""


def _legend(found: Sequence[tuple[SweepRow, Time]], axes: Any) -> list[tuple[str, str]]:
    """Each kind of piece in the bars, with its class."""
    pieces = (
        (part["class"], part["label"]) for _, time in found for part in clock.parts(time, axes, 1.0)
    )
    return [*dict.fromkeys(pieces)]


def _notes(sweep: Sweep) -> Iterator[str]:
    if any(row.total and row.total.unknown for row in sweep):
        yield "≥ is a lower bound: some collectives run in loops of unknown length"
    if any(row.stand_in for row in sweep):
        yield f"CPU stand-ins (*): {words.ANOTHER_BACKEND}"
    if any(row.stand_in and row.report and row.time is None for row in sweep):
        yield words.NO_TIME


# Charts

_WIDTH, _HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 14, 14, 46
_STEPS = (1, 2, 5)


class _Point(NamedTuple):
    """One mesh of a chart."""

    devices: int
    value: float
    title: str


class _Scale(NamedTuple):
    """From a figure to a place in a chart."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


def _charts(found: Sequence[tuple[SweepRow, Time]]) -> Iterator[dict[str, Any]]:
    """Time of a call against devices, and MFU, or HFU where some MFU is not known."""
    seconds = [_point(row, time.seconds, show_seconds) for row, time in found]
    first = found[0][0].num_devices * found[0][1].seconds
    ideal = [first / n for n in _counts(seconds)]
    scale = _logarithmic([*(one.value for one in seconds), *ideal])
    yield {
        "title": words.TITLES["time"],
        "note": "dashed: as many times faster as there are devices more",
        **_chart(seconds, scale, min, ideal),
    }
    name = "hfu" if any(time.mfu is None for _, time in found) else "mfu"
    shares = [_point(row, getattr(time, name), show_share) for row, time in found]
    yield {
        "title": name.upper(),
        "note": f"{times.UTILIZATION[name.upper()]}, as a share of the peak",
        **_chart(shares, _from_zero([one.value for one in shares]), max),
    }


def _counts(points: Iterable[_Point]) -> list[int]:
    return sorted({one.devices for one in points})


def _point(row: SweepRow, value: float, show: words.Show) -> _Point:
    return _Point(row.num_devices, value, f"{times.mesh_of(row)}: {show(value)}")


def _chart(
    points: Sequence[_Point],
    scale: _Scale,
    best: Callable[..., float],
    ideal: Sequence[float] = (),
) -> dict[str, Any]:
    """Places of points, of the line through the best of each number of devices, and of ticks."""
    counts = _counts(points)
    across = _across(counts)
    tops = [best(one.value for one in points if one.devices == count) for count in counts]
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "bottom": _HEIGHT - _BOTTOM,
        "points": [
            {"x": across(one.devices), "y": round(scale.place(one.value), 1), "title": one.title}
            for one in points
        ],
        "line": _path(counts, tops, across, scale),
        "ideal": _path(counts, ideal, across, scale) if ideal and len(counts) > 1 else "",
        "columns": [(across(count), f"{count:,}") for count in _thinned(counts)],
        "lines": [(round(scale.place(value), 1), text) for value, text in scale.ticks],
    }


def _path(
    counts: Sequence[int],
    values: Sequence[float],
    across: Callable[[int], float],
    scale: _Scale,
) -> str:
    places = ((across(n), round(scale.place(v), 1)) for n, v in zip(counts, values, strict=True))
    return " ".join(f"{x},{y}" for x, y in places)


def _across(counts: Sequence[int]) -> Callable[[int], float]:
    """Doubling the devices is as wide everywhere."""
    low, high = math.log2(counts[0]), math.log2(counts[-1])
    inner = _WIDTH - _LEFT - _RIGHT - 40

    def place(count: int) -> float:
        share = (math.log2(count) - low) / (high - low) if high > low else 0.5
        return round(_LEFT + 20 + inner * share, 1)

    return place


def _thinned(counts: Sequence[int], most: int = 7) -> Sequence[int]:
    step = -(-len(counts) // most)
    return counts[::step]


def _logarithmic(values: Sequence[float]) -> _Scale:
    """Times, where half is as far below everywhere."""
    least, most = min(values) / 1.15, max(values) * 1.15
    inner = _HEIGHT - _TOP - _BOTTOM
    steps = (
        step * 10.0**power
        for power in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        for step in _STEPS
    )
    ticks = [(step, show_round(step)) for step in steps if least <= step <= most]

    def place(value: float) -> float:
        return _HEIGHT - _BOTTOM - inner * math.log(value / least) / math.log(most / least)

    return _Scale(place, ticks)


def show_round(seconds: float) -> str:
    """A time of one digit without zeros behind it: ``200 ms``."""
    figure, _, unit = show_seconds(seconds).partition(" ")
    figure = figure.rstrip("0").rstrip(".") if "." in figure else figure
    return f"{figure} {unit}"


def _from_zero(values: Sequence[float]) -> _Scale:
    """Shares from 0 to the tenth above the largest."""
    top = max(0.1, math.ceil(10 * max(values)) / 10)
    step = 0.1 if top <= 0.5 else 0.2
    inner = _HEIGHT - _TOP - _BOTTOM
    ticks = [(i * step, f"{i * step:.0%}") for i in range(round(top / step + 1e-9) + 1)]
    ticks = [(value, text) for value, text in ticks if value <= top + 1e-9]
    return _Scale(lambda value: _HEIGHT - _BOTTOM - inner * value / top, ticks)
