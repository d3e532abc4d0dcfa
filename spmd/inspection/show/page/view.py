"""What the page of a report shows, as plain values: records in the order and words of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import itertools
from typing import Any

from spmd.inspection.records.arrays import Argument, Excerpt
from spmd.inspection.records.names import short_path
from spmd.inspection.records.report import (
    DIRECTIONS,
    Buffer,
    Collective,
    Memory,
    Report,
    Shapes,
    Source,
    Total,
    skipped_findings,
)
from spmd.inspection.records.sizes import show_bytes, show_count
from spmd.inspection.records.sums import NO_MODULE, by_line, grouped, line_of, spread, sum_of
from spmd.inspection.show.page import shardings

_COLORS = 6
_LEVELS = 9


def view(report: Report) -> dict[str, Any]:
    """Everything that the template and the script of the page draw."""
    order = sorted(range(len(report.collectives)), key=lambda i: -_rank(report.collectives[i]))
    return {
        "title": report.name or "report",
        "report": report,
        "mesh": axes_view(report.mesh),
        "figures": [*_figures(report)],
        "findings": findings(report),
        "skipped": skipped_findings(report),
        "totals": [*_totals(report)],
        "directions": [*_directions(report)],
        "modules": [*_modules(report)],
        "files": _files(report),
        "lost": _lost(report),
        "rows": [_row(i, report.collectives[i], report.mesh) for i in order],
        "kinds": sorted({one.kind for one in report.collectives}),
        "axes": sorted({axis for one in report.collectives for axis in one.axis_names}),
        "shardings": shardings.view(report.origins, _colors(report.mesh)),
        "arguments": [*_arguments(report)],
        "memory": _memory(report.memory) if report.memory else None,
        "data": data(report),
    }


def data(report: Report) -> dict[str, Any]:
    """What the script draws on demand: details of a row, and the picture of an argument."""
    frames: dict[Source, int] = {}
    details = [_detail(one, frames) for one in report.collectives]
    return {
        "details": details,
        "frames": [[short_path(f.file), f.line, f.function] for f in frames],
        "mesh": [[name, size] for name, size in report.mesh.items()],
        "devices": list(report.device_ids),
        "arguments": [_placed(one) for one in report.arguments],
    }


def _rank(one: Collective) -> int:
    total = one.total_wire_bytes
    return one.wire_bytes if total is None else total


# The whole


def axes_view(mesh: Mapping[str, int]) -> list[dict[str, Any]]:
    """Axes with a colour each, by their place in the mesh."""
    return [
        {"name": name, "size": size, "color": i % _COLORS}
        for i, (name, size) in enumerate(mesh.items())
    ]


def _figures(report: Report) -> Iterator[dict[str, str]]:
    total, cost = report.total, report.cost
    unknown = f"; {total.unknown:,} run an unknown number of times" if total.unknown else ""
    yield _figure("On the wire", bounded(total, total.wire_bytes), "sent by each device in a call")
    runs = "1 run" if total.executions == 1 else f"{total.executions:,} runs"
    yield _figure("Collectives", f"{total.sites:,}", f"{runs} in a call{unknown}")
    loops = "a lower bound: a loop of unknown length" if cost.unknown_loops else "per device"
    yield _figure("FLOPs", count(cost.flops), loops)
    yield _figure("Main memory traffic", show_bytes(cost.hbm_bytes), "read and written per device")
    if report.memory:
        yield _figure("Memory", show_bytes(report.memory.peak), "needed on each device")


def _figure(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def count(number: int) -> str:
    """A large number in steps of a thousand: ``1.2 G``."""
    power = min((len(str(number)) - 1) // 3, 6)
    return f"{number / 1000**power:.1f} {' KMGTPE'[power]}" if power > 0 else f"{number}"


def bounded(total: Total, nbytes: int) -> str:
    """Bytes of a sum, said to be a lower bound where some of it is unknown."""
    if total.unknown and total.unknown == total.sites:
        return "unknown"
    return f"≥ {show_bytes(nbytes)}" if total.unknown else show_bytes(nbytes)


#: What the bytes of a finding are, by `Finding.measure`.
_MEASURES = {"memory": "held by each device", "wire": "sent by each device in a call", "": ""}


def findings(report: Report) -> list[dict[str, Any]]:
    """What a reader should look at first."""
    return [
        {
            "title": one.subject,
            "place": f"{short_path(one.source.file)}:{one.source.line}" if one.source else "",
            "flops": f"{show_count(one.flops)}FLOP" if one.flops else "",
            "nbytes": show_bytes(one.nbytes) if one.measure else "",
            "measure": _MEASURES.get(one.measure, ""),
            "facts": one.facts,
            "fix": one.fix,
        }
        for one in report.findings
    ]


def _totals(report: Report) -> Iterator[dict[str, Any]]:
    sums = report.totals("kind", "axis")
    most = max((total.wire_bytes for total in sums.values()), default=0)
    for (kind, axes), total in sums.items():
        yield {
            "kind": kind,
            "axes": chips(axes, report.mesh),
            "total": total,
            "wire": bounded(total, total.wire_bytes),
            "payload": bounded(total, total.payload_bytes),
            "share": percent(total.wire_bytes, most),
        }


def _modules(report: Report) -> Iterator[dict[str, Any]]:
    """Sums by module; nothing where no collective is in one."""
    sums = report.totals("module")
    most = max((total.wire_bytes for total in sums.values()), default=0)
    for name, total in sums.items() if any(sums) else ():
        yield {
            "name": name or NO_MODULE,
            "wire": bounded(total, total.wire_bytes),
            "sites": total.sites,
            "share": percent(total.wire_bytes, most),
        }


def _directions(report: Report) -> Iterator[tuple[str, str]]:
    sums = report.totals("direction")
    for name in DIRECTIONS:
        if name in sums:
            yield name, bounded(sums[name], sums[name].wire_bytes)


def _colors(mesh: Mapping[str, int]) -> dict[str, int]:
    return {axis["name"]: axis["color"] for axis in axes_view(mesh)}


def chips(axes: Sequence[str], mesh: Mapping[str, int]) -> list[dict[str, Any]]:
    """Mesh axes with the colours that they have everywhere on the page."""
    colors = _colors(mesh)
    return [{"name": a, "color": colors.get(a.partition(":")[0], 0)} for a in axes]


def percent(part: int, whole: int) -> float:
    """How much of a bar is filled; what is not 0 is seen."""
    return max(1.0, round(100 * part / whole, 2)) if part and whole else 0.0


# Source


def _files(report: Report) -> list[dict[str, Any]]:
    lines = _by_line(report.collectives)
    most = max((sent.wire_bytes for sent, _ in lines.values()), default=0)
    files: dict[str, Total] = {}
    by_file = grouped(report.collectives, lambda one: one.source and one.source.file)
    files |= {file: sum_of(found) for file, found in by_file.items() if file is not None}
    for excerpt in report.excerpts:
        files.setdefault(excerpt.file, Total.zeros())
    ranked = sorted(files.items(), key=lambda item: -item[1].wire_bytes)
    _, made = shardings.anchors(report.origins)
    found = [_file(file, whole, report, lines, most) for file, whole in ranked]
    for (file, _), shown in zip(ranked, found, strict=True):
        for line in itertools.chain.from_iterable(shown["parts"]):
            line["made"] = made.get((file, line["number"]), "")
    return found


def _lost(report: Report) -> str:
    """Bytes of what has no line, in words; empty where all have one."""
    lost = grouped(report.collectives, line_of).get(None, [])
    return bounded(sum_of(lost), sum_of(lost).wire_bytes) if lost else ""


def _by_line(found: Iterable[Collective]) -> dict[tuple[str, int], tuple[Total, list[str]]]:
    """Sums by file and line, with what runs there in words."""
    shares = grouped(found, lambda one: one.source and (one.source.file, one.source.line))
    shares.pop(None, None)
    return {key: (sum_of(ones), [*dict.fromkeys(map(_what, ones))]) for key, ones in shares.items()}


def _file(
    file: str, whole: Total, report: Report, lines: Mapping[Any, Any], most: int
) -> dict[str, Any]:
    parts = [one for one in report.excerpts if one.file == file]
    shown = {n for part in parts for n in range(part.first, part.first + len(part.lines))}
    # Lines whose text could not be read have their bytes all the same.
    bare = sorted(n for f, n in lines if f == file and n not in shown)
    parts += [Excerpt(file=file, first=n, lines=("",)) for n in bare]
    return {
        "path": short_path(file),
        "wire": bounded(whole, whole.wire_bytes) if whole.sites else "",
        "sites": whole.sites,
        "parts": [
            [_line(file, part.first + i, text, lines, most) for i, text in enumerate(part.lines)]
            for part in sorted(parts, key=lambda part: part.first)
        ],
    }


def _line(file: str, number: int, text: str, lines: Mapping[Any, Any], most: int) -> dict[str, Any]:
    whole, words = lines.get((file, number), (None, []))
    share = percent(whole.wire_bytes, most) if whole else 0.0
    return {
        "number": number,
        "text": text,
        "wire": bounded(whole, whole.wire_bytes) if whole else "",
        "share": share,
        # Levels start at 1, so that a line that sends anything is seen.
        "level": min(_LEVELS, 1 + int(share * _LEVELS / 100)) if whole else 0,
        "what": ", ".join(words),
        "key": f"{short_path(file)}:{number}",
    }


def _what(one: Collective) -> str:
    return f"{one.kind} over {', '.join(one.mesh_axes)}" if one.mesh_axes else one.kind


# Ledger


def _row(index: int, one: Collective, mesh: Mapping[str, int]) -> dict[str, Any]:
    source, sent = one.source, one.total_wire_bytes
    named = place_name(one)
    return {
        "index": index,
        "one": one,
        "axes": chips(one.mesh_axes, mesh),
        "axis_names": " ".join(one.axis_names),
        "payload": show_bytes(one.payload_bytes),
        "wire": show_bytes(one.wire_bytes),
        "runs": "unknown" if one.executions is None else f"{one.executions:,}",
        "total": "unknown" if sent is None else show_bytes(sent),
        "rank": _rank(one),
        "place": _place(source),
        "places": "\n".join(places(one)),
        "name": named,
        "function": source.function.rpartition(".<locals>.")[2]
        if source and _place(source).endswith(named)
        else "",
        "marks": [*marks(one)],
    }


def _place(source: Source | None) -> str:
    return f"{short_path(source.file)}:{source.line}" if source else ""


def places(one: Collective) -> list[str]:
    """The lines that have a part in a collective, and its own."""
    found = [_place(share.source) for share in (*by_line(one), one)]
    return [*dict.fromkeys(filter(None, found))]


def place_name(one: Collective) -> str:
    """The line of a collective, or how many lines have a part in it."""
    return spread(one) or _place(one.source).rpartition("/")[2]


def marks(one: Collective) -> Iterator[str]:
    """What sets a collective apart, in words."""
    if one.conditional:
        yield "in a branch"
    if one.executions is None and one.in_loop:
        yield "in a loop of unknown length"
    if one.is_async:
        yield "async"
    if one.combined > 1:
        yield f"combined from {one.combined}"
    if one.source_is_consumer:
        yield "line of its consumer"


def _detail(one: Collective, frames: dict[Source, int]) -> dict[str, Any]:
    return {
        "shapes": show_shapes(one.shapes),
        "op": one.op_name,
        "hlo": one.name,
        "groups": one.groups,
        "group_size": one.group_size,
        "marks": [*marks(one)],
        "parts": [*_parts(one)],
        "frames": [frames.setdefault(frame, len(frames)) for frame in one.frames],
    }


def _parts(one: Collective) -> Iterator[str]:
    """What each line has in a combined collective, in words."""
    for share in by_line(one) if one.parts else ():
        place = f"{_place(share.source)} {share.source.function}" if share.source else "no line"
        used = "for " if share.source_is_consumer else ""
        yield f"{show_bytes(_rank(share))} {used}{place}: {show_shapes(share.shapes)}"


def show_shapes(shapes: Shapes) -> str:
    """Shapes before and after, once where they are the same."""
    before, after = (", ".join(map(str, side)) for side in shapes)
    return after if before == after else f"{before or 'nothing'} → {after or 'nothing'}"


# Mesh and memory


def _arguments(report: Report) -> Iterator[dict[str, Any]]:
    origins, _ = shardings.anchors(report.origins)
    for one in report.arguments:
        yield {
            "one": one,
            "shape": f"{one.dtype}[{','.join(map(str, one.shape))}]",
            "nbytes": show_bytes(one.nbytes),
            "origin": origins.get(one.path, ""),
        }


def _placed(one: Argument) -> dict[str, Any]:
    return {
        "path": one.path,
        "dtype": one.dtype,
        "shape": list(one.shape),
        "sharding": one.sharding,
        "nbytes": show_bytes(one.nbytes),
        "splits": one.splits and [[list(s.axes), s.parts, s.block] for s in one.splits],
        "scalar": one.splits is not None and not one.shape,
    }


_CLASSES = (
    ("arguments", "Arguments"),
    ("outputs", "Outputs, less what lies in donated arguments"),
    ("temporaries", "Temporaries"),
    ("code", "Code"),
)


def _memory(memory: Memory) -> dict[str, Any]:
    sizes = {name: getattr(memory, name) for name, _ in _CLASSES}
    # A report that is written by hand may say anything.
    sizes["outputs"] = max(0, sizes["outputs"] - memory.aliased)
    classes, start = [], 0.0
    for name, label in _CLASSES:
        width = 100 * sizes[name] / memory.peak if memory.peak else 0.0
        classes.append(
            {"name": name, "label": label, "nbytes": show_bytes(sizes[name]),
             "start": round(start, 3), "width": round(width, 3)}
        )  # fmt: skip
        start += width
    return {
        "peak": show_bytes(memory.peak),
        "aliased": show_bytes(memory.aliased) if memory.aliased else "",
        "classes": classes,
        "chart": _chart(memory, sizes) if any(memory.live) else None,
        "buffers": [_buffer(one, memory.places) for one in memory.buffers],
    }


_WIDTH, _HEIGHT = 1000, 160


def _chart(memory: Memory, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Steps of an area over program order, on top of what is held all the time."""
    held = sizes["arguments"] + sizes["outputs"] + sizes["code"]
    top = held + max(memory.live)

    def y(nbytes: int) -> float:
        return round(_HEIGHT * (1 - nbytes / top), 1)

    step = _WIDTH / len(memory.live)
    corners = (
        f"{round(i * step + end, 1)},{y(held + nbytes)}"
        for i, nbytes in enumerate(memory.live)
        for end in (0.0, step)
    )
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "held": show_bytes(held),
        "most": show_bytes(max(memory.live)),
        "top": show_bytes(top),
        "base": y(held),
        "area": f"0,{y(held)} {' '.join(corners)} {_WIDTH},{y(held)}",
        "places": f"{memory.places:,}",
    }


def _buffer(one: Buffer, places: int) -> dict[str, Any]:
    source = one.source
    place = f"{short_path(source.file)}:{source.line}" if source else ""
    width = one.last - one.first + 1
    return {
        "one": one,
        "shape": str(one.shape),
        "nbytes": show_bytes(one.nbytes),
        "place": place,
        "name": place.rpartition("/")[2],
        "label": one.op_name if one.kind == "argument" and one.op_name else one.name,
        "start": round(100 * one.first / places, 2) if places else 0.0,
        "width": max(0.5, round(100 * width / places, 2)) if places else 0.0,
    }
