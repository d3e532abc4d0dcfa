"""Draws a run of the demo in the terminal. All figures come from the records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import contextlib
import itertools
import math
import time

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from spmd.demo.records import TOLERANCE, DemoReport, Parameter, Verification
from spmd.inspection import Diff, Report
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.show.diff import render_diff
from spmd.inspection.show.layout import Flow, Indented, sections
from spmd.inspection.show.terminal import render_findings

_PLAIN_LINES = 8
#: Collectives of a difference that are drawn.
_CHANGES = 2


def follow(
    losses: Iterable[float], *, what: str, steps: int, tokens_per_step: int, console: Console
) -> Iterator[float]:
    """Pass losses through, with a progress bar in a terminal and a few plain lines elsewhere."""
    start = time.perf_counter()
    with _step_printer(what, steps, console) as show:
        for done, loss in enumerate(losses, 1):
            show(done, loss, done * tokens_per_step / (time.perf_counter() - start))
            yield loss


@contextlib.contextmanager
def _step_printer(what: str, steps: int, console: Console):
    if not console.is_interactive:
        every = max(1, steps // _PLAIN_LINES)

        def show(done: int, loss: float, speed: float) -> None:
            if done % every == 0 or done == steps:
                console.print(f"{what} {done}/{steps}  loss {loss:.3f}  {speed:,.0f} tokens/s")

        yield show
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        console=console,
        expand=True,
    )
    with bar:
        task = bar.add_task(what, total=steps, loss=math.nan, speed=0.0)
        yield lambda done, loss, speed: bar.update(task, completed=done, loss=loss, speed=speed)


def print_report(console: Console, report: DemoReport) -> None:
    """Draw everything that is known after training."""
    slip, repair, verification = report.slip, report.repair, report.verification
    bodies = [
        ("Loss", _loss(report, console)),
        ("Parameters", _parameters(report.parameters)),
        ("One parameter on the mesh", report.picture),
        ("One step, compiled", report.step),
        ("A slip, found", _slip(slip, repair) if slip and repair else None),
        ("Verification", _verification(verification) if verification else None),
    ]
    console.print(sections(Group(), bodies))


def _loss(report: DemoReport, console: Console) -> RenderableType:
    first, last = report.losses[0], report.final_loss
    summary = Text.assemble(
        (f"{first:.3f}", "bold"),
        " at the first step, ",
        (f"{last:.3f}", "bold green"),
        f" over the last ones; chance is ln({report.vocab}) = {math.log(report.vocab):.3f}",
    )
    times = (
        f"{report.compile_seconds:.1f} s to compile, {report.train_seconds:.1f} s for "
        f"{len(report.losses)} steps, {report.tokens_per_second:,.0f} tokens/s"
    )
    if console.options.ascii_only:
        return Group(summary, times)
    return Group(sparkline(report.losses, min(60, console.width - 4)), summary, times)


def sparkline(values: tuple[float, ...], width: int) -> str:
    """A curve in one line of block characters, each the mean of an equal share of the values."""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    levels = "▁▂▃▄▅▆▇█"
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((mean - low) * scale)] for mean in means)


def _parameters(rows: tuple[Parameter, ...]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for column in ("name", "shape", "PartitionSpec"):
        table.add_column(column, no_wrap=True)
    for column in ("whole", "per device"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        style = "dim" if row.bytes_per_device == row.bytes_total else ""
        table.add_row(
            row.name,
            ",".join(map(str, row.shape)),
            Text(row.spec, style="" if style else "cyan"),
            show_bytes(row.bytes_total),
            show_bytes(row.bytes_per_device),
        )
    count = sum(math.prod(row.shape) for row in rows)
    whole = show_bytes(sum(row.bytes_total for row in rows))
    part = show_bytes(sum(row.bytes_per_device for row in rows))
    table.add_section()
    table.add_row("all", f"{count:,}", "", whole, part, style="bold")
    return table


def _slip(slip: Report, repair: Diff) -> RenderableType:
    intro = Text(
        "The same step without P('data') for its batch, and without the constraint on the residual "
        "stream; compiled, never run:"
    )
    return Group(
        Flow(intro),
        Indented(render_findings(slip.findings)),
        Text(),
        Flow(Text("Against it, the step that was trained:")),
        Indented(render_diff(repair, limit=_CHANGES)),
    )


def _verification(verification: Verification) -> RenderableType:
    verdict = ("the same", "bold green") if verification.passed else ("NOT the same", "bold red")
    return Text.assemble(
        "trained unsharded on one device, the loss curve is ",
        verdict,
        f":\nlargest difference {verification.largest_difference:.1e} at step "
        f"{verification.step}, allowed {TOLERANCE:.0e}",
    )
