"""A report as trace events, for ui.perfetto.dev and chrome://tracing.

One process has the program order, in which bytes stand for time. Where the time of a call is known,
another has a layer of the schedule, in microseconds.

The format is the "Trace Event Format" of the Chromium project, in its JSON object form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import json
import os
from pathlib import Path
from typing import Any

from spmd.inspection.records.codec import values
from spmd.inspection.records.report import Collective, Report
from spmd.inspection.show.times import by_lane, lane_title
from spmd.inspection.show.words import NO_LINE, ranking

_PROCESS, _LAYER = 1, 2
_UNIT = 1000
# Viewers count nanoseconds in 64 bits: all events together stay far below their end.
_LONGEST = 10**12


def trace_events(report: Report) -> list[dict[str, Any]]:
    """Events for the tracks and the collectives of a report, as `Report.trace_events` says."""
    axes_in_order = dict.fromkeys(one.mesh_axes for one in report.collectives)
    tracks = {axes: track for track, axes in enumerate(axes_in_order, 1)}
    unit = bytes_per_microsecond(report)
    events = _names(report, tracks, unit)
    start = 0
    for one in report.collectives:
        # What moves nothing, or next to nothing, is still to be seen.
        length = max(ranking(one) // unit, 1)
        events.append(_event(one, start, length, tracks[one.mesh_axes]))
        start += length
    return events + [*layer_events(report)]


def layer_events(report: Report) -> Iterator[dict[str, Any]]:
    """One layer of the schedule in a process of its own, in real microseconds."""
    if report.time is None:
        return
    title = f"{report.name}: one layer on {report.time.chip}, in time"
    yield _meta("process_name", 0, {"name": title}, _LAYER)
    for track, (lane, events) in enumerate(by_lane(report.time).items(), 1):
        yield _meta("thread_name", track, {"name": lane_title(lane)}, _LAYER)
        yield _meta("thread_sort_index", track, {"sort_index": track}, _LAYER)
        for one in events:
            yield {
                "name": one.name,
                "cat": one.kind,
                "ph": "X",
                "ts": one.start * 1e6,
                "dur": one.seconds * 1e6,
                "pid": _LAYER,
                "tid": track,
                "args": {"mesh_axes": list(one.mesh_axes)},
            }


def bytes_per_microsecond(report: Report) -> int:
    """How many bytes on the wire are drawn as a microsecond: 1000, or a power of it."""
    total, unit = sum(map(ranking, report.collectives)), _UNIT
    while total // unit > _LONGEST:
        unit *= 1000
    return unit


def _names(report: Report, tracks: Mapping[tuple[str, ...], int], unit: int) -> list[dict]:
    title = f"{report.name}: bytes on the wire, not time (1 us = {unit:,} bytes)"
    events = [_meta("process_name", 0, {"name": title})]
    for axes, track in tracks.items():
        events.append(_meta("thread_name", track, {"name": ", ".join(axes) or "none"}))
        events.append(_meta("thread_sort_index", track, {"sort_index": track}))
    return events


def _meta(name: str, track: int, args: dict[str, Any], process: int = _PROCESS) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": track, "ts": 0, "args": args}


def _event(one: Collective, start: int, length: int, track: int) -> dict[str, Any]:
    runs = {1: "", None: " (unknown runs)"}.get(one.executions, f" x{one.executions}")
    return {
        "name": one.kind + runs,
        "cat": one.direction,
        "ph": "X",
        "ts": start,
        "dur": length,
        "pid": _PROCESS,
        "tid": track,
        "args": _arguments(one),
    }


def _arguments(one: Collective) -> dict[str, Any]:
    """All fields, in a form that the detail panes of viewers show whole."""
    shapes = {side: ", ".join(map(str, shapes)) for side, shapes in one.shapes._asdict().items()}
    place = one.source and f"{one.source} {one.source.function}"
    frames = [f"{frame} {frame.function}" for frame in one.frames]
    derived = {
        "total_payload_bytes": one.total_payload_bytes,
        "total_wire_bytes": one.total_wire_bytes,
    }
    parts = [f"{part.wire_bytes} B: {part.source or part.op_name or NO_LINE}" for part in one.parts]
    texts = {"shapes": shapes, "source": place, "frames": frames, "parts": parts}
    return values(one) | texts | derived


def save_trace(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes the trace of a report to a file, as `Report.save_trace` says."""
    layer = f"; those of process {_LAYER} are times, in microseconds" if report.time else ""
    about = {
        "durations": f"bytes on the wire per device and call; they are not times{layer}",
        "bytes_per_microsecond": bytes_per_microsecond(report),
        "unknown_runs": "a collective of unknown runs is as long as one execution",
        "function": report.name,
        "backend": report.backend,
        "device_kind": report.device_kind,
        "stand_in": report.stand_in,
        "mesh": ", ".join(f"{axis}={size}" for axis, size in report.mesh.items()),
        "num_devices": report.num_devices,
        "versions": dict(report.versions),
    }
    trace = {"traceEvents": trace_events(report), "displayTimeUnit": "ms", "otherData": about}
    Path(path).write_text(json.dumps(trace), encoding="utf-8")
