"""Draws the differences of two reports in a terminal or a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from spmd.inspection.records.diff import Delta, Diff, Pair
from spmd.inspection.records.report import Collective, Total
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.show import words
from spmd.inspection.show.cells import axes_cell
from spmd.inspection.show.layout import (
    Cell,
    Column,
    Flow,
    Grid,
    Row,
    cell,
    clean,
    not_shown,
    sections,
)
from spmd.inspection.show.terminal import LIMIT, RESHARDS, line_cell, reshard_cells

_MARKS = {"+": "green", "-": "red", "~": "yellow"}


def render_diff(diff: Diff, *, limit: int | None = LIMIT) -> RenderableType:
    """Everything in which two reports differ, section by section, as `Diff.show` says."""
    a, b = (clean(name) for name in diff.names)
    bodies = [
        ("Differences of the whole", _header(diff) if diff.header else None),
        (words.TITLES["time"], _table(words.time_figures(diff))),
        ("Collectives", _collectives(diff, limit)),
        (words.TITLES["totals"], _totals(diff)),
        (words.TITLES["modules"], _modules(diff)),
        (words.TITLES["figures"], _table(words.figures(diff, words.show_flops, str))),
        (words.TITLES["reshards"], _reshards(diff)),
    ]
    change = words.time_change(diff)
    head = [Text.assemble((a, "bold"), " -> ", (b, "bold")), *[Text(change, "bold")] * bool(change)]
    return sections(Group(*map(Flow, head)), bodies)


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
        return Flow(Text(f"the same in both: {words.plural(len(diff.unchanged), 'collective')}"))
    rows = sorted(words.compared(diff), key=_size_of_change)
    shown = rows[:limit]
    table = Grid(_COLUMNS, (_row(row, _mesh(diff)) for row in shown))
    hidden = not_shown(len(rows) - len(shown), "row")
    return Group(Flow(*map(Text, counts)), Text(), table, *hidden)


_Sides = tuple[Collective, ...]
"""A collective of one report, or that of the first and that of the second."""


def _size_of_change(row: words.Compared) -> int:
    first, *second = map(words.ranking, row.sides)
    return -abs(first - sum(second))


def _mesh(diff: Diff) -> Mapping[str, int]:
    """The axes of both meshes, which gives each its colour."""
    return {**diff.meshes[0], **diff.meshes[1]}


def _row(row: words.Compared, mesh: Mapping[str, int]) -> Row:
    sides = row.sides
    one = sides[-1]
    return Row(
        cells=(
            cell(row.mark, style=_MARKS[row.mark]),
            cell(f"{one.kind}{words.times_sign(row.count)}"),
            axes_cell(one.mesh_axes, mesh),
            _both(sides, "payload_bytes", show_bytes),
            _both(sides, "executions", "{:,}".format),
            _both(sides, "total_wire_bytes", show_bytes),
            cell(one.direction),
            line_cell(one),
        ),
        notes=tuple(Text(clean(note), style="dim") for note in _notes(sides)),
    )


def _both(sides: _Sides, name: str, show: words.Show) -> Cell:
    """A figure, or that of one report and that of the other."""
    values = dict.fromkeys(getattr(one, name) for one in sides)
    return cell(" -> ".join(words.known(value, show) for value in values))


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


_SUMS = (Column(title="sites", right=True, rank=2, label="sites"), *_DELTAS)


def _totals(diff: Diff) -> RenderableType | None:
    differing = [delta for delta in diff.totals if delta.a != delta.b]
    if not differing:
        return None
    mesh = _mesh(diff)
    rows = [
        Row(cells=(cell(d.kind), axes_cell(d.mesh_axes, mesh), *_total_cells(d.a, d.b)))
        for d in differing
    ]
    everything = (cell("all"), cell(""), *_total_cells(*diff.total))
    rows.append(Row(cells=everything, style="bold", rule=True))
    same = len(diff.totals) - len(differing)
    note = [Flow(Text(f"{words.plural(same, 'more sum')} of kind and axes without a change"))]
    table = Grid((Column(title="kind"), Column(title="mesh axes"), *_SUMS), rows)
    return Group(table, *note * bool(same))


def _modules(diff: Diff) -> RenderableType | None:
    differing = words.modules(diff)
    if not differing:
        return None
    rows = (
        Row(cells=(cell(one.module or words.NO_MODULE), *_total_cells(one.a, one.b)))
        for one in differing[:LIMIT]
    )
    hidden = not_shown(len(differing[LIMIT:]), "module")
    return Group(Grid((Column(title="module"), *_SUMS), rows), *hidden)


def _total_cells(a: Total, b: Total) -> Iterator[Cell]:
    return map(cell, words.total_cells(a, b, show_change))


def show_change(a: float, b: float, show: words.Show = show_bytes) -> str:
    """A difference with its sign, and its share of the first figure."""
    if a == b:
        return "none"
    return words.signed(b - a, show) + (f" ({(b - a) / a:+.1%})" if a else "")


def _table(figures: Iterable[tuple[Delta, words.Show]]) -> RenderableType | None:
    rows = [_figure_row(*figure) for figure in figures]
    return Grid((Column(title="figure"), *_DELTAS), rows) if rows else None


_NAMES = {
    "flops": "FLOPs",
    "hbm_bytes": "HBM bytes",
    "seconds": "time of a call",
    "mfu": "MFU",
    "hfu": "HFU",
}


def _figure_row(delta: Delta, show: words.Show) -> Row:
    name = _NAMES.get(delta.name)
    sides = (words.known(delta.a, show), words.known(delta.b, show))
    change_as = words.change_of(delta, show)
    change = "unknown" if "unknown" in sides else show_change(delta.a or 0, delta.b or 0, change_as)
    return Row(cells=tuple(map(cell, (name or delta.name.replace("_", " "), *sides, change))))


def _reshards(diff: Diff) -> RenderableType | None:
    rows = [
        Row(cells=(cell(mark, style=_MARKS[mark]), *reshard_cells(one)))
        for mark, one in words.reshards(diff)
    ]
    return Grid((Column(), *RESHARDS), rows) if rows else None
