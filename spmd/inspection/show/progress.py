"""That something is going on, on the standard error: for people, not for logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from spmd.inspection.records.sizes import show_seconds
from spmd.inspection.show.words import plural

_TOLD_EVERY = 0.1
"""Seconds between what a terminal is told of a search."""


@contextlib.contextmanager
def showing(what: str, *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows what is going on, and gives a function to say more.

    A terminal has one line that moves and is gone in the end. Elsewhere there is a line each time
    with `lines`, else nothing.
    """
    console = _console()
    start = time.monotonic()
    if console.is_terminal and not console.is_jupyter:
        with console.status(what) as status:
            yield lambda text: status.update(f"{what}, {time.monotonic() - start:.0f} s: {text}")
        return
    say = console.print if lines else _nothing
    say(f"{what} ...", markup=False)
    yield lambda text: say(text, markup=False, soft_wrap=True)  # a log breaks no line
    say(f"{what}: {time.monotonic() - start:.1f} s", markup=False)


@contextlib.contextmanager
def planning(what: str, *, lines: bool = False) -> Iterator[Callable[[Any], None]]:
    """Shows how far a search for a plan is, and gives a function that takes records of that.

    A terminal has a bar that is gone in the end. Elsewhere there is a line for each compile with
    `lines`, else nothing. With `lines` both say it where a plan was found on the disk.
    """
    console = _console()
    if console.is_terminal and not console.is_jupyter:
        # What moves comes first in the text, which is cut where the terminal ends.
        cut = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        text = TextColumn("{task.description}", markup=False, table_column=cut)
        columns = BarColumn(8), TimeElapsedColumn(), text
        with Progress(*columns, console=console, transient=True, expand=True) as bar:
            task = bar.add_task(what, total=None)

            def move(one: Any) -> None:
                bar.update(task, description=f"{progress_said(one)} ({what})")
                if one.kept and lines:
                    console.print(f"{what}: {progress_said(one)}", markup=False)

            yield _seldom(move)
        return
    with showing(what, lines=lines) as say:
        last = ""

        def tell(one: Any) -> None:
            nonlocal last
            if one.kept or (one.compiling and one.compiling != last):
                say(progress_said(one))
            last = one.compiling

        yield tell


def _console() -> Console:
    """Of the standard error; a terminal stays one while a report catches what is written there."""
    console = Console(stderr=True, highlight=False, emoji=False)
    is_terminal = console.is_terminal or None
    return Console(stderr=True, highlight=False, emoji=False, force_terminal=is_terminal)


def _seldom(tell: Callable[[Any], None]) -> Callable[[Any], None]:
    """Tells what is compiled at once, and all else now and then: a search sees thousands."""
    last = 0.0

    def told(one: Any) -> None:
        nonlocal last
        if one.kept or one.compiling or time.monotonic() - last > _TOLD_EVERY:
            last = time.monotonic()
            tell(one)

    return told


def progress_said(one: Any) -> str:
    """``2,842 plans tried; best so far 4.27 ms; compiling Megatron``."""
    if one.kept:
        return "found on the disk, as an earlier start searched it"
    said = [f"{plural(one.tried, 'plan')} tried"]
    if one.best is not None:
        said.append(f"best so far {show_seconds(one.best)}")
    if one.compiling:
        said.append(f"compiling {one.compiling}")
    return "; ".join(said)


@contextlib.contextmanager
def quiet() -> Iterator[Callable[[Any], None]]:
    """In the place of `showing` and `planning`, where nothing is to be seen."""
    yield _nothing


def _nothing(*_: object, **__: object) -> None:
    pass
