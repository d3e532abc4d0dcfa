"""What the page of a report shows, as plain values: records in the order and words of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from spmd.inspection.records.arrays import Argument, Excerpt
from spmd.inspection.records.names import short_path
from spmd.inspection.records.origins import Origins, ValueOrigins
from spmd.inspection.records.report import (
    Buffer,
    Collective,
    Memory,
    Report,
    Shapes,
    Source,
    Total,
    skipped_findings,
)
from spmd.inspection.records.sizes import show_bytes, show_count, show_seconds
from spmd.inspection.records.sums import KEYS, NO_MODULE, by_line, grouped, line_of, spread, sum_of
from spmd.inspection.show import words
from spmd.inspection.show.page import clock
from spmd.inspection.show.page.clock import color as color
from spmd.inspection.show.times import Times

_LEVELS = 9


def view(report: Report) -> dict[str, Any]:
    """Everything that the template and the script of the page draw."""
    found, times = report.collectives, Times(report)
    alike, groups = words.alike(found), _groups(report.origins)
    return {
        "title": report.name or "report",
        "report": report,
        "figures": [*_figures(report, times)],
        "skipped": skipped_findings(report),
        "totals": [*_totals(report, times)],
        "directions": [(name, typeset(sent)) for name, sent in words.directions(report)],
        "modules": [*_modules(report, times)],
        "files": _files(report, groups, times),
        "lost": _lost(report),
        "rows": sorted((_row(some, found, times) for some in alike), key=_rank),
        "times": times,
        "time": clock.view(times, report.mesh),
        "kinds": sorted({one.kind for one in found}),
        "axes": sorted({axis for one in found for axis in one.axis_names}),
        "groups": [(_title(rows[0][1]), rows) for rows in groups.values()],
        # What leads from an argument to its value:
        "made": {one.name: f"value-{i}" for i, one in reversed(groups.get("argument", []))},
        "memory": _memory(report.memory) if report.memory else None,
        "data": data(report, alike),
    }


def data(report: Report, alike: Iterable[Sequence[int]]) -> dict[str, Any]:
    """What the script draws on demand: details of a row, and the picture of an argument."""
    frames: dict[Source, int] = {}
    details: list[dict[str, Any] | None] = [None] * len(report.collectives)
    for places in alike:
        details[places[0]] = _detail([report.collectives[i] for i in places], frames)
    return {
        "details": details,
        "frames": [[short_path(f.file), f.line, f.function] for f in frames],
        "mesh": [[name, size] for name, size in report.mesh.items()],
        "devices": list(report.device_ids),
        "arguments": [_placed(one) for one in report.arguments],
    }


# What the templates ask for


def typeset(text: str) -> str:
    """A figure of ours with the signs of print in place of those of ASCII."""
    return text.replace(">= ", "≥ ").replace(" -> ", " → ")


def count(number: int) -> str:
    """A large number in steps of a thousand: ``1.2 G``."""
    return show_count(number).rstrip()


def percent(part: int, whole: int) -> float:
    """How much of a bar is filled; what is not 0 is seen."""
    return max(1.0, round(100 * part / whole, 2)) if part and whole else 0.0


# The whole


def _figures(report: Report, times: Times) -> Iterator[tuple[str, str, str]]:
    """Label, figure and what it is of."""
    total, cost, time = report.total, report.cost, report.time
    if time:
        used = ", ".join(f"{name} {share}" for name, share in time.utilization.items())
        yield words.TITLES["time"], show_seconds(time.seconds), f"{used}; bound by {time.bound}"
    unknown = f"; {total.unknown:,} run an unknown number of times" if total.unknown else ""
    took = f"; {said}" if (said := times.summary(report.collectives)) else ""
    yield "On the wire", typeset(words.wire(total)), f"sent by each device in a call{took}"
    runs = words.plural(total.executions, "run")
    yield "Collectives", f"{total.sites:,}", f"{runs} in a call{unknown}"
    if not report.predicted:  # a preview counts neither
        loops = "a lower bound: a loop of unknown length" if cost.unknown_loops else "per device"
        yield "FLOPs", count(cost.flops), loops
        yield "Main memory traffic", show_bytes(cost.hbm_bytes), "read and written per device"
    if report.memory:
        yield "Memory", show_bytes(report.memory.peak), "needed on each device"


def _totals(report: Report, times: Times) -> Iterator[dict[str, Any]]:
    """Sums by kind and mesh axes."""
    found = report.collectives if times.time else ()
    shares = grouped(found, lambda one: (one.kind, one.mesh_axes))
    for (kind, axes), total in report.totals("kind", "axis").items():
        took = times.cells(shares.get((kind, axes), ()))
        yield {"kind": kind, "axes": axes, "total": total, "took": took}


def _modules(report: Report, times: Times) -> Iterator[dict[str, Any]]:
    """Sums by module; nothing where no collective is in one."""
    sums, found = report.totals("module"), report.collectives if times.time else ()
    shares = grouped(found, KEYS["module"])
    for name, total in sums.items() if any(sums) else ():
        took = times.cells(shares.get(name, ()))
        yield {"name": name or NO_MODULE, "total": total, "took": took}


# Source


def _files(report: Report, groups: Mapping[Any, Any], times: Times) -> list[dict[str, Any]]:
    """Files with their lines, the most bytes first; then those that only excerpts have."""
    shares = grouped(report.collectives, lambda one: one.source and one.source.file)
    files = {file: sum_of(found) for file, found in shares.items() if file is not None}
    for excerpt in report.excerpts:
        files.setdefault(excerpt.file, Total.zeros())
    made = {key: f"made-{i}" for i, key in enumerate(groups)}
    sent = _sent(report, times)
    return [
        {
            "path": short_path(file),
            "total": total,
            "took": times.summary(shares.get(file, ())),
            "parts": [
                [_line(file, one.first + i, text, sent, made) for i, text in enumerate(one.lines)]
                for one in _excerpts(file, report, sent)
            ],
        }
        for file, total in sorted(files.items(), key=lambda item: -item[1].wire_bytes)
    ]


def _excerpts(file: str, report: Report, sent: Iterable[tuple[str, int]]) -> list[Excerpt]:
    """The text of a file; lines whose text could not be read have their bytes all the same."""
    excerpts = [one for one in report.excerpts if one.file == file]
    shown = {one.first + i for one in excerpts for i in range(len(one.lines))}
    bare = [n for name, n in sent if name == file and n not in shown]
    excerpts += [Excerpt(file=file, first=n, lines=("",)) for n in bare]
    return sorted(excerpts, key=lambda one: one.first)


def _line(
    file: str, number: int, text: str, sent: Mapping[Any, Any], made: Mapping[Any, str]
) -> dict[str, Any]:
    nothing = {"wire": "", "took": "", "share": 0.0, "level": 0, "what": ""}
    place = {"number": number, "text": text, "key": f"{short_path(file)}:{number}"}
    return place | sent.get((file, number), nothing) | {"made": made.get((file, number), "")}


def _sent(report: Report, times: Times) -> dict[tuple[str, int], dict[str, Any]]:
    """By file and line, what it puts on the wire, and by which collectives."""
    shares = grouped(
        report.collectives, lambda one: one.source and (one.source.file, one.source.line)
    )
    shares.pop(None, None)
    sums = {key: sum_of(found) for key, found in shares.items()}
    most = max((total.wire_bytes for total in sums.values()), default=0)
    filled = {key: percent(total.wire_bytes, most) for key, total in sums.items()}
    return {
        key: {
            "wire": typeset(words.wire(sums[key])),
            "took": times.summary(found),
            "share": filled[key],
            # Levels start at 1, so that a line that sends anything is seen.
            "level": min(_LEVELS, 1 + int(filled[key] * _LEVELS / 100)),
            "what": ", ".join(dict.fromkeys(map(_what, found))),
        }
        for key, found in shares.items()
    }


def _what(one: Collective) -> str:
    return f"{one.kind} over {', '.join(one.mesh_axes)}" if one.mesh_axes else one.kind


def _lost(report: Report) -> str:
    """Bytes of what has no line, in words; empty where all have one."""
    lost = grouped(report.collectives, line_of).get(None)
    return typeset(words.wire(sum_of(lost))) if lost else ""


# Ledger


def _row(places: Sequence[int], found: Sequence[Collective], times: Times) -> dict[str, Any]:
    """A row of the ledger: a collective, or several that are alike."""
    alike = [found[i] for i in places]
    one, took = words.together(alike), times.of(alike)
    place, name = words.show_place(one.source), place_name(one)
    function = one.source.function.rpartition(".<locals>.")[2] if one.source else ""
    return {
        "index": places[0],
        "one": one,
        "count": len(alike),
        "rank": sum(map(words.ranking, alike)),
        "took": times.shown(took),
        "seconds": took or (0.0, 0.0),
        "place": place,
        "places": "\n".join(lines_of(one)),
        "name": name,
        "function": function if place.endswith(name) else "",
        "marks": _marks(one),
    }


def _rank(row: Mapping[str, Any]) -> int:
    return -row["rank"]


def lines_of(one: Collective) -> list[str]:
    """The lines that have a part in a collective, and its own."""
    found = [words.show_place(share.source) for share in (*by_line(one), one)]
    return [*dict.fromkeys(filter(None, found))]


def place_name(one: Collective) -> str:
    """The line of a collective, or how many lines have a part in it."""
    return spread(one) or words.show_place(one.source).rpartition("/")[2]


def _marks(one: Collective) -> list[str]:
    consumer = ["line of its consumer"] * one.source_is_consumer
    return [text for text, _ in words.marks(one)] + consumer


def _detail(alike: Sequence[Collective], frames: dict[Source, int]) -> dict[str, Any]:
    """What a row opens to; where it has several collectives, what is not the same is listed."""
    one = alike[0]
    return {
        "shapes": show_shapes(one.shapes),
        "alike": _alike(alike),
        "op": _listed(other.op_name for other in alike),
        "hlo": _listed(other.name for other in alike),
        "groups": _listed((other.groups for other in alike), "; or "),
        "group_size": one.group_size,
        "marks": _marks(one),
        "parts": [*_parts(one)],
        "frames": [frames.setdefault(frame, len(frames)) for frame in one.frames],
    }


def _alike(alike: Sequence[Collective]) -> str:
    """How many places a row stands for, and how often each runs; empty for one."""
    runs = ", ".join(words.known(one.executions) for one in alike)
    return f"{len(alike):,} places of the program, which run {runs} times" if len(alike) > 1 else ""


def _listed(texts: Iterable[str], between: str = ", ") -> str:
    return between.join(dict.fromkeys(filter(None, texts)))


def _parts(one: Collective) -> Iterator[str]:
    """What each line has in a combined collective, in words."""
    for share in by_line(one) if one.parts else ():
        source = share.source
        place = f"{words.show_place(source)} {source.function}" if source else words.NO_LINE
        used = "for " if share.source_is_consumer else ""
        yield f"{show_bytes(words.ranking(share))} {used}{place}: {show_shapes(share.shapes)}"


def show_shapes(shapes: Shapes) -> str:
    """Shapes before and after, once where they are the same."""
    before, after = (", ".join(map(str, side)) for side in shapes)
    return after if before == after else f"{before or 'nothing'} → {after or 'nothing'}"


# Shardings


def _groups(origins: Origins) -> dict[Any, list[tuple[int, ValueOrigins]]]:
    """Values with their places: arguments, outputs, and those of each line by file and number."""
    groups: dict[Any, list[tuple[int, ValueOrigins]]] = {}
    for i, value in enumerate(origins.values):
        line = value.source and (value.source.file, value.source.line)
        key = line if value.kind == "result" else value.kind
        groups.setdefault(key, []).append((i, value))
    return groups


def _title(value: ValueOrigins) -> str:
    titles = {"argument": "Arguments", "output": "Outputs"}
    return titles.get(value.kind) or words.show_place(value.source) or words.NO_LINE


# Mesh and memory


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
        "classes": classes,
        "chart": _chart(memory, sizes) if any(memory.live) else None,
        "buffers": [(one, *_alive(one, memory.places)) for one in memory.buffers],
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
        "base": y(held),
        "area": f"0,{y(held)} {' '.join(corners)} {_WIDTH},{y(held)}",
        "places": f"{memory.places:,}",
    }


def _alive(one: Buffer, places: int) -> tuple[float, float]:
    """Where a buffer's time begins in program order, and how long it is, in percent."""
    if not places:
        return 0.0, 0.0
    width = 100 * (one.last - one.first + 1) / places
    return round(100 * one.first / places, 2), max(0.5, round(width, 2))
