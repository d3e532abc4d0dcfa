"""What the page shows of the time of a call, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from spmd.inspection.records.sizes import show_seconds, show_share
from spmd.inspection.records.time import Event, Time
from spmd.inspection.show import times, words

_COLORS = 6
_WAITS = 8
"""The most lines that are listed below the bar."""


def color(axis: str, mesh: Iterable[str]) -> int:
    """The colour that an axis has everywhere on the page."""
    return (words.number_of(axis, mesh) or 0) % _COLORS


def view(found: times.Times, mesh: Mapping[str, int]) -> dict[str, Any] | None:
    """The bar of a call, the lines that wait, and a layer as lanes; None where it has no time."""
    time = found.time
    if time is None or not time.seconds:
        return None
    waits = found.waits()
    return {
        "parts": [*parts(time, mesh)],
        "said": times.beside(time).capitalize(),
        "explained": [(name.capitalize(), text) for name, text in times.EXPLAINED.items()],
        "utilization": [(name, share, times.UTILIZATION[name])
                        for name, share in time.utilization.items()],
        "doubts": time.unknown[: times.DOUBTS],
        "more_doubts": time.unknown[times.DOUBTS :],
        "waits": [_wait(one, waits[0], time) for one in waits[:_WAITS]],
        "more": len(waits[_WAITS:]),
        "title": times.layer_title(time),
        "ticks": [*times.ticks(time)],
        "lanes": [*_lanes(time, mesh)],
    }  # fmt: skip


def parts(time: Time, mesh: Iterable[str], whole: float = 1.0) -> Iterator[dict[str, Any]]:
    """The parts of a bar one after the other, in percent; `whole` is the share that it fills."""
    start = 0.0
    for label, axes, seconds in words.time_parts(time):
        width = 100 * whole * seconds / time.seconds
        yield {
            "class": f"time-{label.partition(' ')[0]} {_axis(axes or (), mesh)}",
            "label": label.capitalize(),
            "shown": show_seconds(seconds),
            "share": show_share(seconds / time.seconds),
            "start": round(start, 3),
            "width": round(width, 3),
        }
        start += width


def _axis(axes: Sequence[str], mesh: Iterable[str]) -> str:
    """The colour of an axis; of several, that of the first and the last one mixed."""
    mixed = f" with-{color(axes[-1], mesh)}" if len(axes) > 1 else ""
    return f"axis-{color(axes[0], mesh)}{mixed}" if axes else "axis-none"


def _wait(one: times.Wait, longest: times.Wait, time: Time) -> dict[str, Any]:
    place = words.show_place(one.source)
    return {
        "place": place,
        "name": place.rpartition("/")[2],
        "function": one.source.function.rpartition(".<locals>.")[2] if one.source else "",
        "axes": one.mesh_axes,
        "kinds": ", ".join(one.kinds),
        "shown": show_seconds(one.seconds),
        "share": show_share(one.seconds / time.seconds),
        "width": max(1.0, round(100 * one.seconds / longest.seconds, 2)),
    }


def _lanes(time: Time, mesh: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """A layer of the schedule: by lane, its events in percent of the layer."""
    span = times.end_of(time.layer)
    for lane in times.lanes(time):
        yield {
            "name": lane.title,
            "busy": lane.busy,
            "axes": [*dict.fromkeys(axis for axes in lane.mesh_axes for axis in axes)],
            "events": [
                {
                    "class": f"time-{one.kind} {_axis(one.mesh_axes, mesh)}",
                    "title": _title(one),
                    "start": round(100 * one.start / span, 3),
                    "width": round(100 * one.seconds / span, 3),
                }
                for one in lane.events
            ],
        }


def _title(one: Event) -> str:
    over = f" over {', '.join(one.mesh_axes)}" if one.mesh_axes else ""
    return f"{one.name}{over}: {show_seconds(one.seconds)}, from {show_seconds(one.start)} on"
