"""Draws a report in a terminal or a log. All figures come from the records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from spmd.inspection.records.names import short_path
from spmd.inspection.records.report import (
    Buffer,
    Collective,
    Finding,
    Memory,
    Report,
    Reshard,
    Source,
    Total,
    skipped_findings,
)
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.records.sums import KEYS, NO_MODULE, by_line, grouped, line_of, spread, sum_of
from spmd.inspection.show import words
from spmd.inspection.show.cells import (
    axes_cell,
    figure_cell,
    shapes_cell,
    show_mesh,
    show_ratio,
    source_cell,
)
from spmd.inspection.show.lanes import render_time
from spmd.inspection.show.layout import (
    Cell,
    Column,
    Flow,
    Grid,
    Indented,
    Row,
    bar,
    cell,
    clean,
    not_shown,
    sections,
)
from spmd.inspection.show.times import NONE, Times

#: Rows of the ledger that are drawn where nothing else is asked for.
LIMIT = 40
#: Lines that are listed below a row that was combined from exchanges of several.
LINES_OF_ONE = 8
_WIDE = 60


# Whole report


def render_report(
    report: Report, *, all_frames: bool = False, limit: int | None = LIMIT
) -> RenderableType:
    """Everything that a report tells, section by section, as `Report.show` says."""
    times = Times(report)
    bodies = [
        ("Collectives, by bytes on the wire", render_collectives(report, all_frames, limit)),
        (words.TITLES["totals"], render_totals(report)),
        ("Bytes on the wire, by source", render_sources(report, limit)),
    ]
    if not report.collectives:
        del bodies[1:3]
    elif any(module for module in report.totals("module")):
        bodies.append((words.TITLES["modules"], render_modules(report, limit)))
    if not report.predicted:
        title = "Communication and computation, per device and call"
        bodies.append((title, render_cost(report)))
    if report.time:
        bodies.insert(
            0, (words.TITLES["time"], render_time(report.time, times.waits(), report.mesh))
        )
    if report.memory:
        bodies.append(("Memory, per device", render_memory(report.memory)))
    if report.findings or skipped_findings(report):
        bodies.insert(0, ("Findings", _findings(report, times, limit)))
    if report.reshards and not report.findings:
        bodies.append((words.TITLES["reshards"], render_reshards(report.reshards)))
    return sections(render_header(report), bodies)


def render_header(report: Report) -> RenderableType:
    """What was compiled, for which devices, by which versions."""
    name = Text(clean(report.name), style="bold")
    devices = words.plural(report.num_devices, "device")
    axes = show_mesh(report.mesh)
    where = Text.assemble("mesh ", axes, f" of {devices}") if axes else Text(f"{devices}, no mesh")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [
        Flow(Text.assemble(name, " on ", clean(words.show_backend(report))), where),
        Flow(Text(clean(words.headline(report)), "bold" if report.time else "dim")),
        Flow(Text(f"CPU stand-in: {words.ANOTHER_BACKEND}", "yellow")) if report.stand_in else None,
        Flow(Text(words.PREDICTED, style="yellow")) if report.predicted else None,
        Flow(Text(clean(str(report.unread)), style="bold red")) if report.unread else None,
        Flow(Text(clean(report.prediction), style="yellow")) if report.prediction else None,
        Flow(Text(clean(versions), style="dim")) if versions else None,
    ]
    return Group(*(line for line in lines if line))


# Beside bytes

_TIMES = (
    Column(title="time", right=True, rank=1, label="time"),
    Column(title="exposed", right=True, rank=1, label="exposed"),
)


def _timed(columns: Sequence[Column], report: Report, after: str = "wire") -> list[Column]:
    """Columns with those of time behind the one of bytes, where times are known."""
    at = 1 + next(i for i, column in enumerate(columns) if column.title == after)
    return [*columns[:at], *_TIMES * bool(report.time), *columns[at:]]


def _time_cells(times: Times, found: Iterable[Collective], style: str = "") -> Iterator[Cell]:
    """How long some collectives take, and how much of a call nothing hides."""
    if times.time:
        seconds, share = times.cells(found)
        yield cell(seconds, style=style)
        yield cell(share, style="dim" if share == NONE else style)


# Ledger

_LEDGER = (
    Column(title="kind"),
    Column(title="mesh axes"),
    Column(title="shapes", rank=4),
    Column(title="payload", right=True, rank=2, label="payload"),
    Column(title="wire", right=True, rank=2, label="wire"),
    Column(title="runs", right=True, rank=1, label="runs"),
    Column(title="total wire", right=True, label="total wire"),
    Column(title="direction", rank=1),
    Column(title="line", rank=3),
)


def render_collectives(
    report: Report, all_frames: bool = False, limit: int | None = LIMIT
) -> RenderableType:
    """The ledger as a table, the most bytes on the wire first; what is alike is one row."""
    found = report.collectives
    if not found:
        why = words.why_none(report)
        text = f"no collectives: {why}" if why else "no collectives in the text that was understood"
        return Indented(Flow(Text(text)), by=0)
    places = [[i] for i in range(len(found))] if all_frames else words.alike(found)
    alike = [[found[i] for i in some] for some in places]
    alike.sort(key=lambda some: -sum(map(words.ranking, some)))
    shown, rest = alike[:limit], alike[limit:] if limit is not None else []
    times = Times(report)
    rows = [_ledger_row(some, times, report, all_frames) for some in shown]
    table = Grid(_timed(_LEDGER, report, "total wire"), rows)
    sent = f" ({words.wire(sum_of(one for some in rest for one in some))} on the wire)"
    return Indented(Group(table, *not_shown(len(rest), "row", sent)), by=0)


def _ledger_row(alike: Sequence[Collective], times: Times, report: Report, all_frames: bool) -> Row:
    one = words.together(alike)
    return Row(
        cells=(
            cell(f"{one.kind}{words.times_sign(len(alike))}"),
            axes_cell(one.mesh_axes, report.mesh),
            shapes_cell(one.shapes),
            cell(show_bytes(one.payload_bytes)),
            cell(show_bytes(one.wire_bytes)),
            figure_cell(words.known(one.executions)),
            figure_cell(words.known(one.total_wire_bytes, show_bytes), "bold"),
            *_time_cells(times, alike),
            cell(one.direction),
            line_cell(one),
        ),
        notes=tuple(_marks(one)),
        lines=(*_parts(one, all_frames), *(_frames(one) if all_frames else ())),
    )


def line_cell(one: Collective) -> Cell:
    """The line of a collective, or how many lines have a part in it."""
    if several := spread(one):
        return cell(several)
    return source_cell(one.source, prefix="for " if one.source_is_consumer else "")


def _parts(one: Collective, all_lines: bool) -> Iterator[Text]:
    """What each line has in a combined collective."""
    found = by_line(one)
    if not one.parts or [line_of(share) for share in found] == [line_of(one)]:
        return
    figures = [show_bytes(words.ranking(share)) for share in found]
    width = max(map(len, figures))
    most = len(found) if all_lines else LINES_OF_ONE
    for figure, share in list(zip(figures, found, strict=True))[:most]:
        place = source_cell(share.source, prefix="for " if share.source_is_consumer else "")[0]
        shapes = shapes_cell(share.shapes)
        shown = shapes[0] if len(shapes[0]) < _WIDE else shapes[-1]
        yield Text.assemble(f"{figure:>{width}}  ", place, "  ", (str(shown), "dim"))
    if rest := found[most:]:
        figure = show_bytes(sum(map(words.ranking, rest)))
        yield Text(f"{figure:>{width}}  {words.plural(len(rest), 'more line')}", style="dim")


def _marks(one: Collective) -> Iterator[Text]:
    yield from (Text(text, "yellow" if doubt else "dim") for text, doubt in words.marks(one))
    if one.source is None and one.op_name:
        yield Text(clean(one.op_name), "dim")


def _frames(one: Collective) -> Iterator[Text]:
    if one.source is not None and one.op_name:
        yield Text(clean(one.op_name), style="dim")
    for frame in one.frames:
        yield Text(f"{clean(short_path(frame.file))}:{frame.line} {clean(frame.function)}", "dim")


# Totals

_TOTALS = (
    Column(title="kind"),
    Column(title="mesh axes"),
    Column(title="sites", right=True, rank=1, label="sites"),
    Column(title="runs", right=True, rank=1, label="runs"),
    Column(title="payload", right=True, rank=2, label="payload"),
    Column(title="wire", right=True, label="wire"),
    Column(rank=3, ornament=True),
)


def render_totals(report: Report) -> RenderableType:
    """Sums of the ledger by kind and mesh axes, and by direction."""
    by_kind = report.totals("kind", "axis")
    most = max((total.wire_bytes for total in by_kind.values()), default=0)
    times = Times(report)
    shares = grouped(report.collectives, lambda one: (one.kind, one.mesh_axes))
    rows = [
        _total_row(
            cell(kind), axes_cell(axes, report.mesh), total, most, *_time_cells(times, found)
        )
        for (kind, axes), total in by_kind.items()
        for found in (shares[kind, axes],)
    ]
    if len(rows) > 1:
        took = _time_cells(times, report.collectives)
        rows.append(_total_row(cell("all"), cell(""), report.total, 0, *took, last=True))
    ways = [Text(f"{clean(name)} {sent}") for name, sent in words.directions(report)]
    if ways:
        ways[0] = Text("by direction: ") + ways[0]
    return Indented(Group(Grid(_timed(_TOTALS, report), rows), Flow(*ways)), by=0)


def _total_row(
    kind: Cell, axes: Cell, total: Total, most: int, *took: Cell, last: bool = False
) -> Row:
    return Row(
        cells=(
            kind,
            axes,
            cell(f"{total.sites:,}"),
            cell(words.bounded(total, f"{total.executions:,}")),
            cell(words.bounded(total, show_bytes(total.payload_bytes))),
            cell(words.wire(total)),
            *took,
            cell("" if last else bar(total.wire_bytes, most), style="cyan"),
        ),
        rule=last,
        style="bold" if last else "",
    )


# Sources

_SOURCES = (
    Column(title="file and line"),
    Column(title="wire", right=True, label="wire"),
    Column(title="what", rank=1),
)


def render_sources(report: Report, limit: int | None = LIMIT) -> RenderableType:
    """A tree of files and lines with the bytes that each puts on the wire."""
    of_lines = _ranked(grouped(report.collectives, line_of))
    files = _ranked(grouped(report.collectives, lambda one: one.source and one.source.file))
    kept = dict(list(of_lines.items())[:limit])
    below: dict[str | None, dict[Source, list[Collective]]] = {}
    for source, found in kept.items():
        below.setdefault(source and source.file, {}).update({source: found} if source else {})
    rows: list[Row] = []
    times = Times(report)
    for file, found in files.items():
        if file in below:
            rows += [_file_row(file, found, times), *_line_rows(below[file], times, report.mesh)]
    hidden = not_shown(len(of_lines) - len(kept), "line")
    return Indented(Group(Grid(_timed(_SOURCES, report), rows), *hidden), by=0)


def _ranked(groups: Mapping[Any, list[Collective]]) -> dict[Any, list[Collective]]:
    """Groups of collectives, the most bytes on the wire first."""
    return dict(sorted(groups.items(), key=lambda item: -sum(map(words.ranking, item[1]))))


_MODULES = (Column(title="module"), *_SOURCES[1:])


def render_modules(report: Report, limit: int | None = LIMIT) -> RenderableType:
    """The bytes that each scope of the name stack puts on the wire, layers of a kind as one."""
    modules, times = _ranked(grouped(report.collectives, KEYS["module"])), Times(report)
    rows = [
        _sum_row(cell(name or NO_MODULE), found, times, report.mesh)
        for name, found in list(modules.items())[:limit]
    ]
    hidden = not_shown(len(modules) - len(rows), "module")
    return Indented(Group(Grid(_timed(_MODULES, report), rows), *hidden), by=0)


def _file_row(file: str | None, found: Sequence[Collective], times: Times) -> Row:
    path = words.NO_LINE if file is None else short_path(file)
    name, sent = cell(path, PurePath(path).name or path), cell(words.wire(sum_of(found)))
    return Row(cells=(name, sent, *_time_cells(times, found), cell("")), style="bold")


def _line_rows(
    lines: Mapping[Source, list[Collective]], times: Times, mesh: Iterable[str]
) -> Iterator[Row]:
    for place, (source, found) in enumerate(lines.items(), 1):
        branch = f"{'└' if place == len(lines) else '├'}─ {source.line}"
        yield _sum_row(cell(f"{branch} {source.function}".rstrip(), branch), found, times, mesh)


def _sum_row(name: Cell, found: Sequence[Collective], times: Times, mesh: Iterable[str]) -> Row:
    """What some of the collectives put on the wire, and which they are."""
    kinds = dict.fromkeys((one.kind, one.mesh_axes) for one in found)
    parts = [Text.assemble(clean(k), " ", axes_cell(axes, mesh)[0]) for k, axes in kinds]
    short = [] if len(parts) < 2 else [Text.assemble(parts[0], f" + {len(parts) - 1} more")]
    what = (Text("; ").join(parts), *short)
    sent = cell(words.wire(sum_of(found)))
    return Row(cells=(name, sent, *_time_cells(times, found), what))


# Cost


def render_cost(report: Report) -> RenderableType:
    """FLOPs, bytes of main memory and bytes on the wire, and what they are to each other."""
    cost, total = report.cost, report.total
    bound, of_bounds = "lower bound", "ratio of lower bounds"
    computed, sent = bool(cost.unknown_loops or cost.opaque_calls), bool(total.unknown)
    figures = [
        ("FLOPs", words.show_flops(cost.flops), bound if computed else ""),
        ("HBM bytes", show_bytes(cost.hbm_bytes), bound if cost.unknown_loops else ""),
        ("wire bytes", show_bytes(total.wire_bytes), bound if sent else ""),
    ]
    doubt = of_bounds if computed or sent else ""
    if cost.flops and total.wire_bytes:
        figures.append(("FLOPs per wire byte", show_ratio(cost.flops, total.wire_bytes), doubt))
    if cost.hbm_bytes and total.wire_bytes:
        ratio = show_ratio(total.wire_bytes, cost.hbm_bytes)
        figures.append(("wire bytes per HBM byte", ratio, doubt))
    rows = (Row(cells=(cell(n), cell(f), cell(note, style="yellow"))) for n, f, note in figures)
    table = Grid((Column(), Column(right=True), Column(rank=1)), rows)
    return Indented(Group(table, Flow(*_uncounted(report))), by=0)


def _uncounted(report: Report) -> Iterator[Text]:
    cost, unknown = report.cost, report.total.unknown
    reasons = (
        (cost.unknown_loops, words.plural(cost.unknown_loops, "loop") + " of unknown length"),
        (cost.opaque_calls, words.plural(cost.opaque_calls, "custom call")),
        (unknown, words.plural(unknown, "collective") + " of unknown runs"),
    )
    reasons = [text for count, text in reasons if count]
    for place, text in enumerate(reasons):
        yield Text(text if place else f"not counted: {text}", style="yellow")


# Memory

_BUFFERS = (
    Column(title="largest"),
    Column(title="bytes", right=True, label="bytes"),
    Column(title="shape", rank=1),
    Column(title="line", rank=2),
    Column(title="at peak", rank=1, label="at peak:"),
)


def render_memory(memory: Memory, *, limit: int | None = 10) -> RenderableType:
    """Bars of memory by class, and the largest buffers."""
    parts = ("arguments", "outputs", "temporaries", "aliased", "code", "peak")
    most = max(getattr(memory, name) for name in parts)
    rows = [_memory_row(name, getattr(memory, name), most) for name in parts]
    bars = Grid((Column(), Column(right=True), Column(rank=1, ornament=True)), rows)
    if not memory.buffers:
        return Indented(bars, by=0)
    shown = memory.buffers[:limit]
    hidden = not_shown(len(memory.buffers) - len(shown), "buffer")
    return Indented(Group(bars, Text(), Grid(_BUFFERS, map(_buffer_row, shown)), *hidden), by=0)


def _memory_row(name: str, count: int, most: int) -> Row:
    peak = name == "peak"
    drawn = cell(bar(count, most), style="magenta" if peak else "cyan")
    cells = (cell(name), cell(show_bytes(count)), drawn)
    return Row(cells=cells, style="bold" if peak else "", rule=peak)


def _buffer_row(one: Buffer) -> Row:
    place = cell(one.op_name or one.name) if one.source is None else source_cell(one.source)
    peak = cell("yes", style="magenta") if one.at_peak else cell("no", style="dim")
    cells = (cell(one.kind), cell(show_bytes(one.nbytes)), cell(one.shape), place, peak)
    return Row(cells=cells)


# Findings


def _findings(report: Report, times: Times, limit: int | None) -> RenderableType:
    parts = [render_findings(report.findings, limit, times)] if report.findings else []
    if why := skipped_findings(report):
        parts.append(Flow(Text(why, style="dim")))
    return Group(*parts)


def render_findings(
    findings: Sequence[Finding], limit: int | None = LIMIT, times: Times | None = None
) -> RenderableType:
    """What costs more than it has to: the sentence, the cost and line, the facts, and the fix."""
    shown = findings[:limit]
    parts: list[RenderableType] = []
    for one in shown:
        where = [f"{figure} {short}" for figure, short, _ in words.costs(one)]
        where += filter(None, [times.cost(one)] if times else [])
        where += [clean(str(one.source))] * bool(one.source)
        parts.append(Flow(Text(clean(one.subject), style="yellow"), Text("; ".join(where))))
        parts += [Indented(Flow(Text(clean(fact), style="dim"))) for fact in one.facts]
        parts.append(Indented(Flow(Text.assemble(("fix  ", "bold"), clean(one.fix)))))
    if rest := len(findings) - len(shown):
        parts.append(Text(f"and {rest} more", style="dim"))
    return Group(*parts)


# Arguments

RESHARDS = (
    Column(title="argument"),
    Column(title="bytes", right=True, label="bytes"),
    Column(title="given", rank=1, label="given"),
    Column(title="wanted", rank=1, label="wanted"),
)


def render_reshards(reshards: Iterable[Reshard]) -> RenderableType:
    """Arguments that a call moves before the program starts, the most bytes first."""
    ranked = sorted(reshards, key=lambda one: -one.nbytes)
    return Indented(Grid(RESHARDS, (Row(cells=reshard_cells(one)) for one in ranked)), by=0)


def reshard_cells(one: Reshard) -> tuple[Cell, ...]:
    """What is moved, and from where to where."""
    return cell(one.argument), cell(show_bytes(one.nbytes)), cell(one.given), cell(one.wanted)
