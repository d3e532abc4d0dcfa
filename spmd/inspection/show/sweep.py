"""Draws a sweep in a terminal or a log. All figures come from the records."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from spmd.inspection.records.report import axis_name
from spmd.inspection.records.sizes import show_bytes, show_count, show_seconds
from spmd.inspection.records.sweep import Sweep, SweepRow
from spmd.inspection.records.time import Time
from spmd.inspection.show.cells import figure_cell, show_mesh, show_ratio
from spmd.inspection.show.lanes import legend, stack
from spmd.inspection.show.layout import Cell, Column, Flow, Grid, Indented, Row, bar, cell, clean
from spmd.inspection.show.times import best, timed, utilization
from spmd.inspection.show.words import (
    ANOTHER_BACKEND,
    NO_TIME,
    TITLES,
    known,
    plural,
    refused,
    wire,
)

_BOUND = ">= is a lower bound: some collectives run in loops of unknown length"


def render_sweep(sweep: Sweep) -> RenderableType:
    """A table of one row for each mesh, and what its signs mean."""
    meshes = plural(len(sweep), "mesh", "meshes")
    heading = Text.assemble((clean(sweep.name), "bold"), f" on {meshes}, per device and call")
    table = Grid(_columns(sweep), (_row(row, sweep) for row in sweep))
    notes = [*_notes(sweep)]
    head = [heading, *[Text(clean(best(sweep)), "bold")] * bool(best(sweep))]
    parts = [*map(Flow, head), Text(), table, *_chart(sweep), *[Text()] * bool(notes), *notes]
    return Indented(Group(*parts), by=0)


def _notes(sweep: Sweep) -> Iterator[RenderableType]:
    if any(row.total and row.total.unknown for row in sweep):
        yield Flow(Text(_BOUND, style="dim"))
    if any(row.stand_in for row in sweep):
        yield Flow(Text(f"CPU stand-ins (*): {ANOTHER_BACKEND}", style="yellow"))
    if any(row.stand_in and row.report and row.time is None for row in sweep):
        yield Flow(Text(NO_TIME, style="dim"))


# Time against the number of devices

_CHART = (
    Column(title="devices", right=True),
    Column(title="mesh"),
    Column(title="time", right=True),
    Column(ornament=True, rank=1),
    Column(title="MFU", right=True),
    Column(ornament=True, rank=2),
)
_LONGEST, _WHOLE = 40, 20


def _chart(sweep: Sweep) -> Iterator[RenderableType]:
    """A bar for the time of each mesh, made of its parts, and one for its MFU."""
    found = timed(sweep)
    if len(found) < 2:
        return
    longest = max(time.seconds for _, time in found)
    yield Text()
    yield Text(TITLES["times"], style="bold")
    yield Grid(_CHART, (_chart_row(row, time, longest) for row, time in found))
    yield legend()


def _chart_row(row: SweepRow, time: Time, longest: float) -> Row:
    drawn = stack(time, row.mesh, max(1, round(_LONGEST * time.seconds / longest)))
    used = time.mfu if time.mfu is not None else time.hfu
    return Row(
        cells=(
            cell(f"{row.num_devices:,}"),
            (show_mesh(row.mesh),) if row.mesh else cell("none", style="dim"),
            cell(show_seconds(time.seconds), style="bold"),
            (drawn,),
            cell(utilization(time)),
            cell(bar(min(used, 1.0), 1.0, _WHOLE), style="cyan"),
        )
    )


def _columns(sweep: Sweep) -> list[Column]:
    over = ["+".join(map(clean, axes)) or "none" for axes in sweep.axes]
    timed = any(row.time for row in sweep)
    times = [
        Column(title="time", right=True, label="time"),
        Column(title="MFU", right=True, rank=1, label="MFU"),
        Column(title="bound by", rank=7, label="bound by"),
    ]
    return [
        Column(title="devices"),
        Column(title="mesh"),
        *times * timed,
        Column(title="wire", right=True, label="wire"),
        *(Column(title=f"over {a}", right=True, rank=2, label=f"over {a}") for a in over),
        Column(title="FLOPs", right=True, rank=3, label="FLOPs"),
        Column(title="FLOPs/wire B", right=True, rank=5, label="FLOPs per wire byte"),
        Column(title="HBM traffic", right=True, rank=4, label="HBM traffic"),
        Column(title="peak", right=True, rank=1, label="peak memory"),
        Column(title="of HBM", right=True, rank=1, label="of HBM"),
        Column(title="compile", right=True, rank=6, label="compiled in"),
    ]


def _row(row: SweepRow, sweep: Sweep) -> Row:
    return Row(
        cells=(
            cell(row.label + " *" * row.stand_in),
            (show_mesh(row.mesh),) if row.mesh else cell("none", style="dim"),
            *(_times(row) if any(one.time for one in sweep) else ()),
            figure_cell(wire(row.total), "bold") if row.total else cell(""),
            *(_over(row, axes) for axes in sweep.axes),
            cell(show_count(row.flops).strip()) if row.flops is not None else cell(""),
            _intensity(row),
            cell(show_bytes(row.hbm_bytes)) if row.hbm_bytes is not None else cell(""),
            _peak(row),
            _share(row),
            cell(f"{row.seconds:.1f} s") if row.seconds is not None else cell(""),
        ),
        notes=() if row.report and not row.unread else (_note(row),),
    )


def _times(row: SweepRow) -> tuple[Cell, ...]:
    """Time of a call, MFU or else HFU, and what bounds it."""
    if row.time is None:
        return (cell(""),) * 3
    seconds = cell(show_seconds(row.time.seconds), style="bold")
    return seconds, cell(utilization(row.time)), cell(row.time.bound)


def _over(row: SweepRow, axes: tuple[str, ...]) -> Cell:
    """Bytes over a set of axes: nothing where the mesh lacks one, 0 where nothing crosses it."""
    if total := row.by_axis.get(axes):
        return figure_cell(wire(total))
    there = all(axis_name(axis) in row.mesh for axis in axes)
    return cell("0 B", style="dim") if there and row.report else cell("")


def _intensity(row: SweepRow) -> Cell:
    total = row.total
    if total is None or total.unknown or not total.wire_bytes or row.flops is None:
        return cell("")
    return cell(show_ratio(row.flops, total.wire_bytes))


def _peak(row: SweepRow) -> Cell:
    peak = "" if row.report is None else known(row.peak, show_bytes)
    return figure_cell(peak, "red" if row.fits is False else "")


def _share(row: SweepRow) -> Cell:
    """The share of a device's memory, or that it is too small."""
    if row.fits is False:
        return cell("too large", style="red")
    if row.peak is None or not row.capacity:
        return cell("")
    share = row.peak / row.capacity
    return cell("<1%" if 0 < share < 0.01 else f"{share:.0%}")


def _note(row: SweepRow) -> Text:
    """That the program does not fit, or that parts of it are missing in the figures."""
    return Text(clean(refused(row)), style="bold red" if row.unread else "red")
