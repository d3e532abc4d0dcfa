"""A progress bar that is driven from inside of a compiled loop."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
import functools
import math
import sys
from typing import Any

import jax
from jax.custom_batching import custom_vmap
import jax.numpy as jnp
import numpy as np

from spmd import _jax
from spmd.errors import ArgumentError, Failure, OptionError, explain, show_value
from spmd.host_callback._api import _axes, _tap
from spmd.host_callback._receiver import receiver

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
        if failure := _step_failure(step):
            raise explain("progress", [failure])
        _close_at_exit()
        if not isinstance(step, _jax.core.Tracer):
            self._tell(int(step))
        elif step.dtype.itemsize < 4:
            self._tell(step.astype(jnp.int32))  # the length may not fit into its own type
        else:
            self._tell(step)
        return step if value is None else value

    def close(self) -> None:
        """Waits for the programs that were started, and ends the display where it is."""
        from spmd.host_callback import _bars

        receiver.wait("progress")
        _bars.close(self)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _tell(self, step: Any) -> None:
        if isinstance(step, int):
            self._send_if(step, self._is_due(step))
            return

        # A condition per element of a batch would send every step of all of them.
        @custom_vmap
        def tell(step: Any) -> Any:
            self._send_if(step, self._is_due(step))
            return step

        @tell.def_vmap
        def _(axis_size: int, in_batched: Any, step: Any) -> Any:
            del axis_size, in_batched
            slowest = jnp.min(step)
            tell(slowest)
            return step, True

        tell(step)

    def _is_due(self, step: Any) -> Any:
        moves = (step == 0) | ((step + 1) % self.every == 0) | (step + 1 == self.length)
        return moves & (step >= 0) & (step < self.length)

    def _send_if(self, step: Any, due: Any) -> None:
        axes = _jax.mesh.manual_axes()
        if axes and not self.per_device:
            due = due & functools.reduce(
                jnp.logical_and, (jax.lax.axis_index(a) == 0 for a in axes)
            )
        if isinstance(due, (bool, np.bool_)):
            if due:
                self._send(step)
        else:
            jax.lax.cond(due, self._send, lambda step: None, jnp.asarray(step))

    def _send(self, step: Any) -> None:
        rows = _device_count() if self.per_device else 1
        _tap("progress", _Update(self, rows), step, False, 0, self.per_device)


@dataclass(frozen=True, slots=True)
class _Update:
    """The host function: moves the bar, of which there are so many."""

    bar: Progress
    rows: int

    @property
    def __name__(self) -> str:
        return self.bar.description or "progress"

    def __call__(self, step: Any, transforms: Any, *, shard: Any = None) -> None:
        from spmd.host_callback import _bars

        del transforms
        _bars.move(self.bar, self.rows, int(step) + 1, None if shard is None else shard.device)


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
    failures = _count_failures("iterable_length", iterable_length, 0)
    if every is not None:
        failures += _count_failures("every", every, 1)
    if console is not None and not callable(getattr(console, "print", None)):
        failures.append(_no_console(console))
    if failures:
        raise explain("progress", failures)
    length = int(iterable_length)
    every = max(1, -(-length // _UPDATES)) if every is None else int(every)
    return Progress(length, str(description), every, bool(per_device), console)


def _device_count() -> int:
    """How many devices of this process will move a bar."""
    manual, sizes = _jax.mesh.manual_axes(), _jax.mesh.manual_mesh() or dict(_axes())
    count = math.prod(n for axis, n in sizes.items() if axis in manual or not manual)
    return min(count, jax.local_device_count())


@functools.lru_cache(maxsize=1)
def _close_at_exit() -> None:
    atexit.register(_exit)


def _exit() -> None:
    receiver.wait("progress at exit")
    if bars := sys.modules.get("spmd.host_callback._bars"):
        bars.close_all()


# Failures


def _step_failure(step: Any) -> Failure | None:
    try:
        aval = _jax.core.abstractify(step)
        if not aval.shape and jnp.issubdtype(aval.dtype, np.integer):
            return None
        got = _jax.core.short_aval(aval)
    except (TypeError, ValueError, OverflowError):
        got = show_value(step)
    return Failure(
        what="cannot tell which step is done",
        expected="an integer scalar, counted from 0",
        got=got,
        error=ArgumentError,
    )


def _count_failures(name: str, value: Any, least: int) -> list[Failure]:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if is_integer and value >= least:
        return []
    return [
        Failure(
            what=f"cannot count with this {name}",
            given=f"{name}={value!r}"[:100],
            expected=f"a number of steps, {least} or more",
            error=OptionError if is_integer else ArgumentError,
        )
    ]


def _no_console(console: Any) -> Failure:
    return Failure(
        what="cannot draw on console",
        expected="a rich.console.Console",
        got=show_value(console),
        error=ArgumentError,
    )
