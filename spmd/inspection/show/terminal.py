"""Draws a report in a terminal or a log. All figures come from the records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import itertools
from pathlib import PurePath
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from spmd.inspection.records.names import short_path
from spmd.inspection.records.report import (
    DIRECTIONS,
    Buffer,
    Collective,
    Finding,
    Memory,
    Report,
    Reshard,
    Shape,
    Shapes,
    Source,
    Total,
    skipped_findings,
)
from spmd.inspection.records.sizes import show_bytes, show_count
from spmd.inspection.records.sums import KEYS, NO_MODULE, by_line, grouped, line_of, spread, sum_of
from spmd.inspection.show.layout import (
    Cell,
    Column,
    Grid,
    Indented,
    Row,
    bar,
    cell,
    clean,
    flow,
    plain as plain,
)

#: Rows of the ledger that are drawn where nothing else is asked for.
LIMIT = 40
#: Lines that are listed below a row that was combined from exchanges of several.
LINES_OF_ONE = 8
_WIDE = 60
# Pairs that stay apart for most colour-blind readers; the names say the same without colour.
_AXIS_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")
_STAND_IN = "CPU stand-in: another backend fuses and combines differently"
_PREDICTED = "predicted, before compilation: compilers combine, move and replace exchanges"


# Whole report


def render_report(
    report: Report, *, all_frames: bool = False, limit: int | None = LIMIT
) -> RenderableType:
    """Everything that a report tells, section by section.

    Args:
        report: what is drawn.
        all_frames: show the whole stack of each collective, libraries included.
        limit: the most collectives to list, those with most bytes on the wire; None for all.
    """
    sections = [
        ("Collectives, by bytes on the wire", render_collectives(report, all_frames, limit)),
        ("Totals, per device and call", render_totals(report)),
        ("Bytes on the wire, by source", render_sources(report, limit)),
    ]
    if not report.collectives:
        del sections[1:3]
    elif any(module for module in report.totals("module")):
        sections.append(("Bytes on the wire, by module", render_modules(report, limit)))
    if not report.predicted:
        title = "Communication and computation, per device and call"
        sections.append((title, render_cost(report)))
    if report.memory:
        sections.append(("Memory, per device", render_memory(report.memory)))
    if report.findings or skipped_findings(report):
        sections.insert(0, ("Findings", _findings(report, limit)))
    if report.reshards and not report.findings:
        sections.append(("Arguments moved before the program", render_reshards(report.reshards)))
    parts: list[RenderableType] = [render_header(report)]
    for title, body in sections:
        parts += [Text(), Text(title, style="bold"), Indented(body)]
    return Indented(Group(*parts), by=0)


def render_header(report: Report) -> RenderableType:
    """What was compiled, for which devices, by which versions."""
    name = Text(clean(report.name), style="bold")
    kind = report.device_kind
    backend = report.backend if kind in ("", report.backend) else f"{report.backend} ({kind})"
    devices = plural(report.num_devices, "device")
    axes = show_mesh(report.mesh)
    where = Text.assemble("mesh ", axes, f" of {devices}") if axes else Text(f"{devices}, no mesh")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [
        Flow(Text.assemble(name, " on ", clean(backend)), where),
        Flow(Text(_STAND_IN, style="yellow")) if report.stand_in else None,
        Flow(Text(_PREDICTED, style="yellow")) if report.predicted else None,
        Flow(Text(clean(str(report.unread)), style="bold red")) if report.unread else None,
        Flow(Text(clean(report.prediction), style="yellow")) if report.prediction else None,
        Flow(Text(clean(versions), style="dim")) if versions else None,
    ]
    return Group(*(line for line in lines if line))


class Flow:
    """Parts of a sentence, with lines broken between them."""

    def __init__(self, *parts: Text):
        self.parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from flow(self.parts, options.max_width)


# Names and numbers


def plural(count: int, noun: str, many: str = "") -> str:
    """A count with its noun: ``1 device``, ``8 devices``."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def show_mesh(mesh: Mapping[str, int]) -> Text:
    """Mesh axes as one writes them for ``--mesh``, each in its own colour."""
    styles = axis_styles(mesh)
    parts = (Text(f"{clean(name)}={size}", style=styles[name]) for name, size in mesh.items())
    return Text(", ").join(parts)


def axis_styles(mesh: Mapping[str, int]) -> dict[str, str]:
    """A colour for each mesh axis, by its place in the mesh: the same in all sections."""
    return dict(zip(mesh, itertools.cycle(_AXIS_STYLES), strict=False))


def axes_cell(mesh_axes: Sequence[str], styles: Mapping[str, str]) -> Cell:
    """Mesh axes, each in its colour; parts of an axis have the colour of the axis."""
    if not mesh_axes:
        return cell("none", style="dim")
    parts = (Text(clean(a), style=styles.get(a.partition(":")[0], "")) for a in mesh_axes)
    return (Text(", ").join(parts),)


def source_cell(source: Source | None, *, prefix: str = "") -> Cell:
    """A line with its function, or as much of the path as there is room for."""
    if source is None:
        return cell("no line", style="dim")
    path = short_path(source.file)
    base = PurePath(path).name or path
    function = source.function
    # The function says more than the directories, which the tree of files has in full.
    spellings = [
        f"{path}:{source.line} {function}",
        f"{base}:{source.line} {function}",
        f"{base}:{source.line} {function.rpartition('.<locals>.')[2]}",
        f"{base}:{source.line}",
    ]
    return cell(*(f"{prefix}{spelling}".rstrip() for spelling in spellings))


def shapes_cell(shapes: Shapes) -> Cell:
    """Shapes before and after, in full and then in shorter and shorter spellings."""
    before, after = _counted(shapes.operands), _counted(shapes.results)
    if before == after:
        return cell(", ".join(after), *_shortened(after))
    full = f"{', '.join(before) or 'nothing'} -> {', '.join(after) or 'nothing'}"
    short = [" -> ".join(pair) for pair in zip(_shortened(before), _shortened(after), strict=True)]
    return cell(full, *short)


def _counted(shapes: Iterable[Shape]) -> list[str]:
    """Equal neighbours as one, with how many there are."""
    runs = ((shape, len(list(run))) for shape, run in itertools.groupby(shapes))
    return [f"{shape} x{count}" if count > 1 else str(shape) for shape, count in runs]


def _shortened(shapes: list[str]) -> list[str]:
    """The first shape and how many follow it."""
    if len(shapes) < 2:
        return ["".join(shapes) or "nothing"]
    return [f"{shapes[0]} + {len(shapes) - 1} more"]


def show_ratio(a: int, b: int) -> str:
    """What `a` is in units of `b`, with three digits."""
    ratio = a / b
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def show_total(total: Total) -> str:
    """Bytes on the wire of a sum, said to be a lower bound where it is one."""
    return _bound(total, show_bytes(total.wire_bytes))


def _bound(total: Total, figure: str) -> str:
    if total.unknown and total.unknown == total.sites:
        return "unknown"
    return f">= {figure}" if total.unknown else figure


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
    """The ledger as a table, the most bytes on the wire first.

    Args:
        report: what is drawn.
        all_frames: show the whole stack below each row.
        limit: the most rows; None for all.
    """
    if not report.collectives:
        return Indented(Flow(Text(_why_none(report))), by=0)
    ranked = sorted(report.collectives, key=lambda one: -ranking(one))
    shown = ranked[:limit]
    styles = axis_styles(report.mesh)
    table = Grid(_LEDGER, (_ledger_row(one, styles, all_frames) for one in shown))
    return Indented(Group(table, *_hidden(ranked[len(shown) :])), by=0)


def ranking(one: Collective) -> int:
    """Wire bytes of a call, or those of one execution where the number of them is unknown."""
    total = one.total_wire_bytes
    return one.wire_bytes if total is None else total


def _why_none(report: Report) -> str:
    if report.num_devices == 1:
        return "no collectives: the program runs on one device"
    if report.unread:
        return "no collectives in the text that was understood"
    return "no collectives: the devices exchange nothing while the program runs"


def _hidden(rest: Sequence[Collective]) -> Iterator[RenderableType]:
    if rest:
        text = (
            f"{plural(len(rest), 'more row')} ({show_total(sum_of(rest))} on the wire), not shown"
        )
        yield Flow(Text(text, style="dim"))


def _ledger_row(one: Collective, styles: Mapping[str, str], all_frames: bool) -> Row:
    total = one.total_wire_bytes
    return Row(
        cells=(
            cell(one.kind),
            axes_cell(one.mesh_axes, styles),
            shapes_cell(one.shapes),
            cell(show_bytes(one.payload_bytes)),
            cell(show_bytes(one.wire_bytes)),
            runs_cell(one.executions),
            unknown_cell() if total is None else cell(show_bytes(total), style="bold"),
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
    figures = [show_bytes(ranking(share)) for share in found]
    width = max(map(len, figures))
    most = len(found) if all_lines else LINES_OF_ONE
    for figure, share in list(zip(figures, found, strict=True))[:most]:
        place = source_cell(share.source, prefix="for " if share.source_is_consumer else "")[0]
        shapes = shapes_cell(share.shapes)
        shown = shapes[0] if len(shapes[0]) < _WIDE else shapes[-1]
        yield Text.assemble(f"{figure:>{width}}  ", place, "  ", (str(shown), "dim"))
    if rest := found[most:]:
        figure = show_bytes(sum(map(ranking, rest)))
        yield Text(f"{figure:>{width}}  {plural(len(rest), 'more line')}", style="dim")


def runs_cell(executions: int | None) -> Cell:
    """How often something runs."""
    return unknown_cell() if executions is None else cell(f"{executions:,}")


def unknown_cell() -> Cell:
    """A figure that the compiler does not tell; it is never guessed."""
    return cell("unknown", style="yellow")


def _marks(one: Collective) -> Iterator[Text]:
    marks = (
        (one.conditional, "in a branch", "yellow"),
        (one.executions is None and one.in_loop, "in a loop of unknown length", "yellow"),
        (one.is_async, "async", "dim"),
        (one.combined > 1, f"combined from {one.combined}", "dim"),
        (one.source is None and bool(one.op_name), clean(one.op_name), "dim"),
    )
    return (Text(text, style=style) for holds, text, style in marks if holds)


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
    styles = axis_styles(report.mesh)
    by_kind = report.totals("kind", "axis")
    most = max((total.wire_bytes for total in by_kind.values()), default=0)
    rows = [
        _total_row(cell(kind), axes_cell(axes, styles), total, most)
        for (kind, axes), total in by_kind.items()
    ]
    if len(rows) > 1:
        rows.append(_total_row(cell("all"), cell(""), report.total, 0, last=True))
    return Indented(Group(Grid(_TOTALS, rows), Flow(*_directions(report))), by=0)


def _total_row(kind: Cell, axes: Cell, total: Total, most: int, *, last: bool = False) -> Row:
    return Row(
        cells=(
            kind,
            axes,
            cell(f"{total.sites:,}"),
            cell(_bound(total, f"{total.executions:,}")),
            cell(_bound(total, show_bytes(total.payload_bytes))),
            cell(show_total(total)),
            cell("" if last else bar(total.wire_bytes, most), style="cyan"),
        ),
        rule=last,
        style="bold" if last else "",
    )


def _directions(report: Report) -> Iterator[Text]:
    sums = report.totals("direction")
    known = [name for name in DIRECTIONS if name in sums]
    for place, name in enumerate((*known, *sorted(sums.keys() - set(known)))):
        prefix = "" if place else "by direction: "
        yield Text(f"{prefix}{clean(name)} {show_total(sums[name])}")


# Sources

_SOURCES = (
    Column(title="file and line"),
    Column(title="wire", right=True, label="wire"),
    Column(title="what", rank=1),
)


def render_sources(report: Report, limit: int | None = LIMIT) -> RenderableType:
    """A tree of files and lines with the bytes that each puts on the wire.

    Args:
        report: what is drawn.
        limit: the most lines over all files; None for all.
    """
    of_lines = _ranked(grouped(report.collectives, line_of))
    files = _ranked(grouped(report.collectives, lambda one: one.source and one.source.file))
    kept = dict(list(of_lines.items())[:limit])
    below: dict[str | None, dict[Source, list[Collective]]] = {}
    for source, found in kept.items():
        below.setdefault(source and source.file, {}).update({source: found} if source else {})
    styles = axis_styles(report.mesh)
    rows: list[Row] = []
    for file, found in files.items():
        if file in below:
            rows.append(_file_row(file, found))
            rows += _line_rows(below[file], styles)
    hidden = len(of_lines) - len(kept)
    note = [Flow(Text(f"{plural(hidden, 'more line')}, not shown", style="dim"))] * bool(hidden)
    return Indented(Group(Grid(_SOURCES, rows), *note), by=0)


def _ranked(groups: Mapping[Any, list[Collective]]) -> dict[Any, list[Collective]]:
    """Groups of collectives, the most bytes on the wire first."""
    return dict(sorted(groups.items(), key=lambda item: -sum(map(ranking, item[1]))))


_MODULES = (Column(title="module"), *_SOURCES[1:])


def render_modules(report: Report, limit: int | None = LIMIT) -> RenderableType:
    """The bytes that each scope of the name stack puts on the wire, layers of a kind as one.

    Args:
        report: what is drawn.
        limit: the most modules; None for all.
    """
    modules = _ranked(grouped(report.collectives, KEYS["module"]))
    styles = axis_styles(report.mesh)
    rows = [
        Row(cells=(cell(name or NO_MODULE), cell(show_total(sum_of(found))), _what(found, styles)))
        for name, found in list(modules.items())[:limit]
    ]
    hidden = len(modules) - len(rows)
    note = [Flow(Text(f"{plural(hidden, 'more module')}, not shown", style="dim"))] * bool(hidden)
    return Indented(Group(Grid(_MODULES, rows), *note), by=0)


def _file_row(file: str | None, found: Iterable[Collective]) -> Row:
    path = "no line" if file is None else short_path(file)
    name = cell(path, PurePath(path).name or path)
    return Row(cells=(name, cell(show_total(sum_of(found))), cell("")), style="bold")


def _line_rows(lines: Mapping[Source, list[Collective]], styles: Mapping[str, str]) -> list[Row]:
    rows = []
    for place, (source, found) in enumerate(lines.items(), 1):
        branch = f"{'└' if place == len(lines) else '├'}─ {source.line}"
        name = cell(f"{branch} {source.function}".rstrip(), branch)
        rows.append(Row(cells=(name, cell(show_total(sum_of(found))), _what(found, styles))))
    return rows


def _what(found: Iterable[Collective], styles: Mapping[str, str]) -> Cell:
    kinds = dict.fromkeys((one.kind, one.mesh_axes) for one in found)
    parts = [Text.assemble(clean(k), " ", axes_cell(axes, styles)[0]) for k, axes in kinds]
    short = [] if len(parts) < 2 else [Text.assemble(parts[0], f" + {len(parts) - 1} more")]
    return Text("; ").join(parts), *short


# Cost


def render_cost(report: Report) -> RenderableType:
    """FLOPs, bytes of main memory and bytes on the wire, and what they are to each other."""
    cost, total = report.cost, report.total
    bound, of_bounds = "lower bound", "ratio of lower bounds"
    computed, sent = bool(cost.unknown_loops or cost.opaque_calls), bool(total.unknown)
    figures = [
        ("FLOPs", f"{show_count(cost.flops)}FLOP", bound if computed else ""),
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
        (cost.unknown_loops, plural(cost.unknown_loops, "loop") + " of unknown length"),
        (cost.opaque_calls, plural(cost.opaque_calls, "custom call")),
        (unknown, plural(unknown, "collective") + " of unknown runs"),
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
    """Bars of memory by class, and the largest buffers.

    Args:
        memory: what is drawn.
        limit: the most buffers; None for all.
    """
    parts = ("arguments", "outputs", "temporaries", "aliased", "code", "peak")
    most = max(getattr(memory, name) for name in parts)
    rows = [_memory_row(name, getattr(memory, name), most) for name in parts]
    bars = Grid((Column(), Column(right=True), Column(rank=1, ornament=True)), rows)
    if not memory.buffers:
        return Indented(bars, by=0)
    shown = memory.buffers[:limit]
    rest = len(memory.buffers) - len(shown)
    note = [Text(f"{plural(rest, 'more buffer')}, not shown", style="dim")] * bool(rest)
    buffers = Grid(_BUFFERS, map(_buffer_row, shown))
    return Indented(Group(bars, Text(), buffers, *map(Flow, note)), by=0)


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

_MEASURES = {"memory": "of memory", "wire": "on the wire"}


def _findings(report: Report, limit: int | None) -> RenderableType:
    parts = [render_findings(report.findings, limit)] if report.findings else []
    if why := skipped_findings(report):
        parts.append(Flow(Text(why, style="dim")))
    return Group(*parts)


def render_findings(findings: Sequence[Finding], limit: int | None = LIMIT) -> RenderableType:
    """What costs more than it has to: the sentence, the cost and line, the facts, and the fix."""
    shown = findings[:limit]
    parts: list[RenderableType] = []
    for one in shown:
        flops = f"{show_count(one.flops)}FLOP repeated" if one.flops else ""
        nbytes = f"{show_bytes(one.nbytes)} {_MEASURES.get(one.measure, '')}" if one.measure else ""
        place = f"{clean(str(one.source))}" if one.source else ""
        where = "; ".join(text for text in (flops, nbytes, place) if text)
        parts.append(Flow(Text(clean(one.subject), style="yellow"), Text(where)))
        parts += [Indented(Flow(Text(clean(fact), style="dim"))) for fact in one.facts]
        parts.append(Indented(Flow(Text.assemble(("fix  ", "bold"), clean(one.fix)))))
    if rest := len(findings) - len(shown):
        parts.append(Text(f"and {rest} more", style="dim"))
    return Group(*parts)


# Arguments

_RESHARDS = (
    Column(title="argument"),
    Column(title="bytes", right=True, label="bytes"),
    Column(title="given", rank=1, label="given"),
    Column(title="wanted", rank=1, label="wanted"),
)


def render_reshards(reshards: Iterable[Reshard]) -> RenderableType:
    """Arguments that a call moves before the program starts, the most bytes first."""
    rows = (
        Row(cells=(cell(r.argument), cell(show_bytes(r.nbytes)), cell(r.given), cell(r.wanted)))
        for r in sorted(reshards, key=lambda r: -r.nbytes)
    )
    return Indented(Grid(_RESHARDS, rows), by=0)
