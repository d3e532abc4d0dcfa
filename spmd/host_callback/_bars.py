"""The progress bars that are open, by console: rich allows one display on each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from rich import get_console
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as Display,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from spmd.host_callback._threads import fork_safe_lock

_REFRESHES_PER_SECOND = 10.0
#: Where the console is no terminal, a bar prints this many lines.
_LINES = 10

_lock = fork_safe_lock()
_screens: dict[Console, _Screen] = {}


class Bar(Protocol):
    """What is told of a `spmd.host_callback.Progress`; equal ones are one bar."""

    @property
    def length(self) -> int:
        """The number of steps."""
        ...

    @property
    def description(self) -> str:
        """What stands before the bar."""
        ...

    @property
    def console(self) -> Any:
        """A console of rich; None for its global one."""
        ...


def move(bar: Bar, rows: int, completed: int, device: Any) -> None:
    """Shows how many steps of a bar are completed, on one device or at all.

    Args:
        bar: Which.
        rows: How many devices move it.
        completed: Number of steps.
        device: Which device; None for a bar of the whole program.
    """
    with _lock:
        console = bar.console or get_console()
        screen = _screens.get(console)
        if screen is None:
            screen = _screens[console] = _Screen(console)
        screen.move(bar, rows, completed, device)
        _drop_idle(console)


def close(bar: Bar) -> None:
    """Ends a bar where it is; its next step opens it again."""
    with _lock:
        console = bar.console or get_console()
        if console in _screens:
            _screens[console].close(bar)
            _drop_idle(console)


def close_all() -> None:
    """Ends all bars."""
    for screen in [*_screens.values()]:
        for bar in [*screen.groups]:
            close(bar)


def _drop_idle(console: Console) -> None:
    if all(group.is_done for group in _screens[console].groups.values()):
        _screens.pop(console).display.stop()


class _Rows(Display):
    """A display whose rows stand in the order of the devices."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(sorted(self.tasks, key=lambda task: task.fields["place"]))


class _Group:
    """The rows of one bar."""

    def __init__(self, place: int, rows: int):
        self.place = place
        self.rows = rows
        self.tasks: dict[Any, Task] = {}
        self.closed = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is expected to move any more."""
        finished = all(task.finished for task in self.tasks.values())
        return self.closed or (finished and len(self.tasks) >= self.rows)


class _Screen:
    """The display of one console."""

    def __init__(self, console: Console):
        self.groups: dict[Bar, _Group] = {}
        self.is_live = console.is_terminal and not console.is_dumb_terminal
        self.display = _Rows(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            disable=not self.is_live,
        )
        self.display.start()

    def move(self, bar: Bar, rows: int, completed: int, device: Any) -> None:
        group = self.groups.get(bar)
        if group is None or group.closed:
            group = self._open(bar, rows)
        task = group.tasks.get(device)
        if task is None:
            task = group.tasks[device] = self._add_row(bar, group, device)
        elif completed == 1:
            self.display.reset(task.id)
            task.fields["printed"] = 0
        if completed > task.completed:
            self.display.update(task.id, completed=completed)
        if task.completed * _LINES // bar.length > task.fields["printed"] * _LINES // bar.length:
            self._print(task)

    def close(self, bar: Bar) -> None:
        group = self.groups.get(bar)
        if group is None or group.is_done:
            return
        group.closed = True
        for task in group.tasks.values():
            self.display.stop_task(task.id)
            if task.completed != task.fields["printed"]:
                self._print(task)

    def _open(self, bar: Bar, rows: int) -> _Group:
        before = self.groups.pop(bar, None)
        for task in before.tasks.values() if before else ():
            self.display.remove_task(task.id)
        place = max((group.place for group in self.groups.values()), default=-1) + 1
        return self.groups.setdefault(bar, _Group(place, rows))

    def _add_row(self, bar: Bar, group: _Group, device: Any) -> Task:
        names = [bar.description, "" if device is None else f"{device.platform}:{device.id}"]
        place = (group.place, 0 if device is None else device.id)
        number = self.display.add_task(
            " ".join(filter(None, names)), total=bar.length, place=place, printed=0
        )
        return self._task(number)

    def _task(self, number: TaskID) -> Task:
        return next(task for task in self.display.tasks if task.id == number)

    def _print(self, task: Task) -> None:
        """Prints one row, where none is shown all the time."""
        task.fields["printed"] = task.completed
        if not self.is_live:
            self.display.console.print(self.display.make_tasks_table([task]))
