"""A progress bar that is driven from inside of a compiled loop."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
from jax.custom_batching import custom_vmap
import jax.numpy as jnp
import numpy as np

from spmd import _jax
from spmd.errors import ArgumentError, Failure, OptionError, explain, show_value
from spmd.host_callback._api import is_first_device, mesh_axes, not_scalar, tap
from spmd.host_callback._pools import fork_safe_lock
from spmd.host_callback._receiver import receiver

if TYPE_CHECKING:  # rich is loaded with the first step that is shown
    from rich.console import Console, RenderableType
    from rich.progress import Task

#: A bar moves at most this often, unless `every` says otherwise.
_UPDATES = 200


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Progress:
    """A progress bar that a compiled loop moves; :func:`progress` makes one.

    Call it in the body of the loop. Equal bars are one bar, and one compiled program. It closes
    after its last step; where the loop may end early, use it as a context manager or call
    :meth:`close`.

    Attributes:
        length: The number of steps.
        description: What stands before the bar.
        every: How many steps it moves at a time.
        per_device: Whether each device has a bar of its own.
        console: A console of rich; None for its global one, on the standard output.
    """

    __module__ = "spmd.host_callback"

    length: int
    description: str
    every: int
    per_device: bool
    console: Any

    def __call__(self, step: Any, value: Any = None) -> Any:
        """Tells that a step is done.

        Under `vmap` the bar shows the slowest element. Inside of `shard_map` and `pmap` the first
        device moves it, unless `per_device`.

        Args:
            step: Which, counted from 0: an integer scalar, such as what `scan` goes over.
            value: What to return, so that the bar can stand in an expression.

        Returns:
            `value` if it is given, else `step`.

        Raises:
            TypeError: `step` is no integer scalar.
        """
        if got := not_scalar(step, np.integer):
            failure = Failure(
                what="cannot tell which step is done",
                expected="an integer scalar, counted from 0",
                got=got,
                error=ArgumentError,
            )
            raise explain("progress", [failure])
        _close_at_exit()
        if not isinstance(step, _jax.core.Tracer):
            self._send_if_due(int(step))
        else:  # the length may not fit into a small type
            self._tell(step.astype(jnp.int32) if step.dtype.itemsize < 4 else step)
        return step if value is None else value

    def close(self) -> None:
        """Waits for the programs that were started, and ends the display where it is."""
        receiver.wait("progress")
        _close(self)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _tell(self, step: Any) -> None:
        # A condition per element of a batch would send every step of all of them.
        @custom_vmap
        def tell(step: Any) -> Any:
            self._send_if_due(step)
            return step

        @tell.def_vmap
        def _(axis_size: int, in_batched: Any, step: Any) -> Any:
            del axis_size, in_batched
            tell(jnp.min(step))  # the slowest
            return step, True

        tell(step)

    def _send_if_due(self, step: Any) -> None:
        moves = (step == 0) | ((step + 1) % self.every == 0) | (step + 1 == self.length)
        due = moves & (step >= 0) & (step < self.length)
        axes = _jax.mesh.manual_axes()
        if axes and not self.per_device:
            due = due & is_first_device(axes)
        if isinstance(due, (bool, np.bool_)):
            if due:
                self._send(step)
        else:
            jax.lax.cond(due, self._send, lambda step: None, jnp.asarray(step))

    def _send(self, step: Any) -> None:
        rows = _device_count() if self.per_device else 1
        tap("progress", _Update(self, rows), step, False, 0, self.per_device)


@dataclass(frozen=True, slots=True)
class _Update:
    """The host function: moves the bar, of which there are so many."""

    bar: Progress
    rows: int

    @property
    def __name__(self) -> str:
        return self.bar.description or "progress"

    def __call__(self, step: Any, transforms: Any, *, shard: Any = None) -> None:
        del transforms
        _move(self.bar, self.rows, int(step) + 1, None if shard is None else shard.device)


def progress(
    iterable_length: int,
    *,
    description: str = "",
    every: int | None = None,
    per_device: bool = False,
    console: Any = None,
) -> Progress:
    """Makes a progress bar that is driven from inside of a compiled loop.

    A loop of a thousand steps::

        bar = progress(1000, description="training")

        @jax.jit
        def train(state):
            def body(state, step):
                return bar(step, update(state)), None
            return jax.lax.scan(body, state, jnp.arange(1000))

    In a terminal it is a bar of rich; elsewhere a line is printed after every tenth of the steps.

    Args:
        iterable_length: The number of steps.
        description: What stands before the bar.
        every: After how many steps the host is told; the other steps cost a comparison. By
            default so that it is told at most 200 times.
        per_device: Whether each device of the program has a bar of its own.
        console: A console of rich; None for its global one, on the standard output.

    Returns:
        The bar, to call with each step.

    Raises:
        TypeError: A length or `every` is no integer, or `console` cannot print.
        ValueError: A length or `every` is out of range.
    """
    failures = [*_count_failures("iterable_length", iterable_length, 0)]
    if every is not None:
        failures += _count_failures("every", every, 1)
    if console is not None and not callable(getattr(console, "print", None)):
        failure = Failure(
            what="cannot draw on console",
            expected="a rich.console.Console",
            got=show_value(console),
            error=ArgumentError,
        )
        failures.append(failure)
    if failures:
        raise explain("progress", failures)
    length = int(iterable_length)
    every = max(1, -(-length // _UPDATES)) if every is None else int(every)
    return Progress(length, str(description), every, bool(per_device), console)


def _device_count() -> int:
    """How many devices of this process will move a bar."""
    manual, sizes = _jax.mesh.manual_axes(), _jax.mesh.manual_mesh() or dict(mesh_axes())
    count = math.prod(n for axis, n in sizes.items() if axis in manual or not manual)
    return min(count, jax.local_device_count())


@functools.lru_cache(maxsize=1)
def _close_at_exit() -> None:
    atexit.register(_exit)


def _exit() -> None:
    receiver.wait("progress at exit")
    for screen in [*_screens.values()]:
        for bar in [*screen.groups]:
            _close(bar)


def _count_failures(name: str, value: Any, least: int) -> Iterator[Failure]:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < least:
        yield Failure(
            what=f"cannot count with this {name}",
            given=f"{name}={value!r}"[:100],
            expected=f"a number of steps, {least} or more",
            error=OptionError if is_integer else ArgumentError,
        )


# The bars that are open, by console: rich allows one display on each

_REFRESHES_PER_SECOND = 10.0
#: Where the console is no terminal, a bar prints this many lines.
_LINES = 10

_lock = fork_safe_lock()
_screens: dict[Console, _Screen] = {}


def _move(bar: Progress, rows: int, completed: int, device: Any) -> None:
    """Shows how many steps are completed, on one of so many devices or, for None, at all."""
    with _lock:
        console = _console_of(bar)
        screen = _screens.get(console)
        if screen is None:
            screen = _screens[console] = _Screen(console)
        screen.move(bar, rows, completed, device)
        _drop_idle(console)


def _close(bar: Progress) -> None:
    """Ends a bar where it is; its next step opens it again."""
    with _lock:
        console = _console_of(bar)
        if console in _screens:
            _screens[console].close(bar)
            _drop_idle(console)


def _console_of(bar: Progress) -> Console:
    from rich import get_console

    return bar.console or get_console()


def _drop_idle(console: Console) -> None:
    if all(group.is_done for group in _screens[console].groups.values()):
        _screens.pop(console).display.stop()


def _display(console: Console, *, is_live: bool) -> Any:
    from rich import progress as rich

    class Rows(rich.Progress):
        """A display whose rows stand in the order of the devices."""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(sorted(self.tasks, key=lambda task: task.fields["place"]))

    return Rows(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        disable=not is_live,
    )


@dataclass(slots=True)
class _Group:
    """The rows of one bar."""

    place: int
    rows: int
    tasks: dict[Any, Task] = field(default_factory=dict)
    closed: bool = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is expected to move any more."""
        finished = all(task.finished for task in self.tasks.values())
        return self.closed or (finished and len(self.tasks) >= self.rows)


class _Screen:
    """The display of one console."""

    def __init__(self, console: Console):
        self.groups: dict[Progress, _Group] = {}
        self.is_live = console.is_terminal and not console.is_dumb_terminal
        self.display = _display(console, is_live=self.is_live)
        self.display.start()

    def move(self, bar: Progress, rows: int, completed: int, device: Any) -> None:
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

    def close(self, bar: Progress) -> None:
        group = self.groups.get(bar)
        if group is None or group.is_done:
            return
        group.closed = True
        for task in group.tasks.values():
            self.display.stop_task(task.id)
            if task.completed != task.fields["printed"]:
                self._print(task)

    def _open(self, bar: Progress, rows: int) -> _Group:
        before = self.groups.pop(bar, None)
        for task in before.tasks.values() if before else ():
            self.display.remove_task(task.id)
        place = max((group.place for group in self.groups.values()), default=-1) + 1
        return self.groups.setdefault(bar, _Group(place, rows))

    def _add_row(self, bar: Progress, group: _Group, device: Any) -> Task:
        names = [bar.description, "" if device is None else f"{device.platform}:{device.id}"]
        place = (group.place, 0 if device is None else device.id)
        number = self.display.add_task(
            " ".join(filter(None, names)), total=bar.length, place=place, printed=0
        )
        return next(task for task in self.display.tasks if task.id == number)

    def _print(self, task: Task) -> None:
        """Prints one row, where none is shown all the time."""
        task.fields["printed"] = task.completed
        if not self.is_live:
            self.display.console.print(self.display.make_tasks_table([task]))
