"""Each record by its class: what draws it as text."""

from __future__ import annotations

import functools
from typing import Any

from rich.console import Console, RenderableType

from spmd.inspection.records.diff import Diff
from spmd.inspection.records.origins import Why
from spmd.inspection.records.pictures import Picture, Pictures
from spmd.inspection.records.plan import Plan
from spmd.inspection.records.report import Report
from spmd.inspection.records.sweep import Sweep
from spmd.inspection.show.diff import render_diff
from spmd.inspection.show.layout import plain
from spmd.inspection.show.pictures import render_picture, render_pictures
from spmd.inspection.show.plan import render_plan
from spmd.inspection.show.sweep import render_sweep
from spmd.inspection.show.terminal import render_report
from spmd.inspection.show.why import render_why


@functools.singledispatch
def drawing(record: Any, **options: Any) -> RenderableType:
    """A record for a terminal or a log, with options of the function that draws it."""
    raise TypeError(type(record))


drawing.register(Diff, render_diff)
drawing.register(Picture, render_picture)
drawing.register(Pictures, render_pictures)
drawing.register(Plan, render_plan)
drawing.register(Report, render_report)
drawing.register(Sweep, render_sweep)
drawing.register(Why, render_why)


def text_of(record: Any) -> str:
    """A record as plain text, 100 columns wide."""
    return plain(drawing(record))


def show(record: Any, console: Console | None = None, **options: Any) -> None:
    """Prints a record in colour, as wide as the terminal is."""
    (console or Console()).print(drawing(record, **options))
