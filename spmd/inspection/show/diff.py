"""Draws the differences of two reports in a terminal or a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from spmd.inspection.records.diff import Delta, Diff, Pair, TotalDelta
from spmd.inspection.records.report import Collective, Total
from spmd.inspection.records.sizes import show_bytes, show_count
from spmd.inspection.records.sums import NO_MODULE
from spmd.inspection.show.layout import Cell, Column, Grid, Indented, Row, cell, clean
from spmd.inspection.show.terminal import (
    LIMIT,
    Flow,
    axes_cell,
    axis_styles,
    line_cell,
    plural,
    ranking,
    show_total,
)

_MARKS = {"+": "green", "-": "red", "~": "yellow"}


def render_diff(diff: Diff, *, limit: int | None = LIMIT) -> RenderableType:
    """Everything in which two reports differ, section by section.

    Args:
        diff: what is drawn.
        limit: the most collectives to list, those whose bytes differ most; None for all.
    """
    a, b = (clean(name) for name in diff.names)
    parts: list[RenderableType] = [Flow(Text.assemble((a, "bold"), " -> ", (b, "bold")))]
    sections = [
        ("Differences of the whole", _header(diff) if diff.header else None),
        ("Collectives", _collectives(diff, limit)),
        ("Totals, per device and call", _totals(diff)),
        ("Bytes on the wire, by module", _modules(diff)),
        ("Cost and memory, per device", _figures(diff)),
        ("Arguments moved before the program", _reshards(diff)),
    ]
    for title, body in sections:
        if body is not None:
            parts += [Text(), Text(title, style="bold"), Indented(body)]
    return Indented(Group(*parts), by=0)


def _header(diff: Diff) -> RenderableType:
    columns = (Column(title="what"), Column(title="a", rank=1), Column(title="b", rank=1))
    rows = (Row(cells=(cell(d.what), cell(d.a), cell(d.b))) for d in diff.header)
    return Grid(columns, rows)


# Collectives

_COLUMNS = (
    Column(),
    Column(title="kind"),
    Column(title="mesh axes"),
    Column(title="payload", right=True, rank=2, label="payload"),
    Column(title="runs", right=True, rank=1, label="runs"),
    Column(title="total wire", right=True, label="total wire"),
    Column(title="direction", rank=2),
    Column(title="line", rank=3),
)


def _collectives(diff: Diff, limit: int | None) -> RenderableType:
    counts = (
        f"{len(diff.added)} added (+)",
        f"{len(diff.removed)} removed (-)",
        f"{len(diff.changed)} changed (~)",
        f"{len(diff.unchanged)} unchanged",
    )
    if not diff:
        return Flow(Text(f"the same in both: {plural(len(diff.unchanged), 'collective')}"))
    rows = sorted(_compared(diff), key=_size_of_change)
    shown = rows[:limit]
    styles = axis_styles({**diff.meshes[0], **diff.meshes[1]})
    hidden = len(rows) - len(shown)
    note = [Flow(Text(f"{plural(hidden, 'more row')}, not shown", style="dim"))] * bool(hidden)
    table = Grid(_COLUMNS, (_row(*row, styles) for row in shown))
    return Group(Flow(*map(Text, counts)), Text(), table, *note)


_Sides = tuple[Collective, ...]
"""A collective of one report, or that of the first and that of the second."""


def _compared(diff: Diff) -> Iterator[tuple[str, _Sides]]:
    yield from (("+", (one,)) for one in diff.added)
    yield from (("-", (one,)) for one in diff.removed)
    yield from (("~", (pair.a, pair.b)) for pair in diff.changed)


def _size_of_change(marked: tuple[str, _Sides]) -> int:
    first, *second = map(ranking, marked[1])
    return -abs(first - sum(second))


def _row(mark: str, sides: _Sides, styles: Mapping[str, str]) -> Row:
    one = sides[-1]
    return Row(
        cells=(
            cell(mark, style=_MARKS[mark]),
            cell(one.kind),
            axes_cell(one.mesh_axes, styles),
            _both(sides, "payload_bytes", show_bytes),
            _both(sides, "executions", lambda count: f"{count:,}"),
            _both(sides, "total_wire_bytes", show_bytes),
            cell(one.direction),
            line_cell(one),
        ),
        notes=tuple(Text(clean(note), style="dim") for note in _notes(sides)),
    )


def _both(sides: _Sides, name: str, show: Callable[[int], str]) -> Cell:
    """A figure, or that of one report and that of the other."""
    values = dict.fromkeys(getattr(one, name) for one in sides)
    return cell(" -> ".join("unknown" if v is None else show(v) for v in values))


_CHANGES: dict[str, Callable[[Collective], str]] = {
    "shapes": lambda one: _shapes(one),
    "wire_bytes": lambda one: f"wire {show_bytes(one.wire_bytes)}",
    "group_size": lambda one: f"groups of {one.group_size}",
    "conditional": lambda one: "in a branch" if one.conditional else "in no branch",
    "is_async": lambda one: "async" if one.is_async else "not async",
    "combined": lambda one: f"combined from {one.combined}",
}


def _notes(sides: _Sides) -> Iterator[str]:
    if len(sides) == 1:
        yield _shapes(sides[0])
        yield sides[0].op_name
        return
    for name in Pair(a=sides[0], b=sides[1]).changes:
        if show := _CHANGES.get(name):
            yield " -> ".join(map(show, sides))


def _shapes(one: Collective) -> str:
    operands, results = (", ".join(map(str, shapes)) for shapes in one.shapes)
    return operands if operands == results else f"({operands}) to ({results})"


# Totals and figures

_DELTAS = (
    Column(title="a", right=True, label="a"),
    Column(title="b", right=True, label="b"),
    Column(title="change", right=True, rank=1, label="change"),
)


def _totals(diff: Diff) -> RenderableType | None:
    differing = [delta for delta in diff.totals if delta.a != delta.b]
    if not differing:
        return None
    styles = axis_styles({**diff.meshes[0], **diff.meshes[1]})
    rows = [_total_row(delta, styles) for delta in differing]
    a, b = diff.total
    everything = (cell("all"), cell(""), *_total_cells(a, b))
    rows.append(Row(cells=everything, style="bold", rule=True))
    same = len(diff.totals) - len(differing)
    note = [Flow(Text(f"{plural(same, 'more sum')} of kind and axes without a change"))]
    table = Grid((Column(title="kind"), Column(title="mesh axes"), *_SUMS, *_DELTAS), rows)
    return Group(table, *note * bool(same))


def _modules(diff: Diff) -> RenderableType | None:
    differing = [delta for delta in diff.modules if delta.a != delta.b]
    if not any(delta.module for delta in differing):
        return None
    shown = differing[:LIMIT]
    rows = (
        Row(cells=(cell(one.module or NO_MODULE), *_total_cells(one.a, one.b))) for one in shown
    )
    hidden = len(differing) - len(shown)
    note = [Flow(Text(f"{plural(hidden, 'more module')}, not shown", style="dim"))] * bool(hidden)
    return Group(Grid((Column(title="module"), *_SUMS, *_DELTAS), rows), *note)


_SUMS = (Column(title="sites", right=True, rank=2, label="sites"),)


def _total_row(delta: TotalDelta, styles: Mapping[str, str]) -> Row:
    kind, axes = cell(delta.kind), axes_cell(delta.mesh_axes, styles)
    return Row(cells=(kind, axes, *_total_cells(delta.a, delta.b)))


def _total_cells(a: Total, b: Total) -> tuple[Cell, ...]:
    sites = f"{a.sites:,}" if a.sites == b.sites else f"{a.sites:,} -> {b.sites:,}"
    known = a == b or not (a.unknown or b.unknown)
    change = show_change(a.wire_bytes, b.wire_bytes, show_bytes) if known else "unknown"
    return cell(sites), cell(show_total(a)), cell(show_total(b)), cell(change)


def show_change(a: int, b: int, show: Callable[[int], str]) -> str:
    """A difference with its sign, and its share of the first figure."""
    if a == b:
        return "none"
    sign = "+" if b > a else "-"
    share = f" ({sign}{abs(b - a) / a:.1%})" if a else ""
    return f"{sign}{show(abs(b - a))}{share}"


def _figures(diff: Diff) -> RenderableType | None:
    shows = {"flops": lambda count: f"{show_count(count)}FLOP", "hbm_bytes": show_bytes}
    names = {"flops": "FLOPs", "hbm_bytes": "HBM bytes"}
    rows = [
        _figure_row(names.get(d.name, d.name.replace("_", " ")), d, shows.get(d.name, str))
        for d in diff.cost
        if d.a != d.b
    ]
    rows += [_figure_row(d.name, d, show_bytes) for d in diff.memory if d.a != d.b]
    if not rows:
        return None
    return Grid((Column(title="figure"), *_DELTAS), rows)


def _figure_row(name: str, delta: Delta, show: Callable[[int], str]) -> Row:
    sides = ("unknown" if side is None else show(side) for side in (delta.a, delta.b))
    known = delta.a is not None and delta.b is not None
    change = show_change(delta.a or 0, delta.b or 0, show) if known else "unknown"
    return Row(cells=(cell(name), *map(cell, sides), cell(change)))


def _reshards(diff: Diff) -> RenderableType | None:
    marked: Sequence[tuple[str, Any]] = [
        *(("+", one) for one in diff.reshards_added),
        *(("-", one) for one in diff.reshards_removed),
    ]
    if not marked:
        return None
    columns = (
        Column(),
        Column(title="argument"),
        Column(title="bytes", right=True, label="bytes"),
        Column(title="given", rank=1, label="given"),
        Column(title="wanted", rank=1, label="wanted"),
    )
    rows = (
        Row(
            cells=(
                cell(mark, style=_MARKS[mark]),
                cell(one.argument),
                cell(show_bytes(one.nbytes)),
                cell(one.given),
                cell(one.wanted),
            )
        )
        for mark, one in marked
    )
    return Grid(columns, rows)
