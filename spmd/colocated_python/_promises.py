"""Arrays that exist at once and are filled later, by programs that wait for a host function.

A program on one CPU device calls a handler of XLA's foreign function interface. The handler takes
the values if they are there, and else suspends the program with a future, which whoever brings the
values completes. So that XLA does not run it in the thread that starts it, which would have to
wait, the program has something to compute as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import itertools
import os
import threading
import time
from typing import Any

import jax
import numpy as np

from spmd import _api
from spmd.host_callback._ffi import Frame, Future, capsule, execute_handler, write

TARGET = "spmd_colocated_python"

_numbers = itertools.count(1)
_promises: dict[int, Promise] = {}

#: The product of two matrices of this size has eight times the work that XLA runs inline.
_SIZE = 16


class Promise:
    """The values of one call, which some programs write to their results.

    Attributes:
        number: What the programs know it by.
    """

    def __init__(self, programs: Sequence[tuple[int, ...]]):
        """Keeps which values each of the programs wants, by their places."""
        self.number = next(_numbers)
        self._programs = programs
        self._left = len(programs)
        self._lock = threading.Lock()
        self._values: Sequence[np.ndarray] | None = None
        self._error: str | None = None
        self._settled = False
        self._waiting: list[tuple[Future, int, list[int]]] = []
        _promises[self.number] = self

    def arrive(self, program: int, results: list[int], suspend: Callable[[], Future]) -> Any:
        """A program wants its values; returns the text of an error, or None."""
        with self._lock:
            if not self._settled:
                self._waiting.append((suspend(), program, results))
                return None
        return self._write(program, results)

    def settle(self, values: Sequence[np.ndarray] | None, error: str | None = None) -> None:
        """The values are there, or never will be; with neither nor an error nobody wants them."""
        with self._lock:
            if self._settled:
                return
            self._values, self._error, self._settled = values, error, True
            waiting, self._waiting = self._waiting, []
        for future, program, results in waiting:
            message = self._write(program, results)
            if message is None:
                future.set_available()
            else:
                future.set_error(message)

    def forget(self) -> None:
        """No program of it will come any more."""
        _promises.pop(self.number, None)
        self._values = None

    def _write(self, program: int, results: list[int]) -> str | None:
        if self._error is not None:
            # What depends on this program fails before it gets here.
            self.forget()
            return self._error
        if self._values is not None:
            for place, address in zip(self._programs[program], results, strict=False):
                write(address, self._values[place])
        with self._lock:
            self._left -= 1
            left = self._left
        if not left:
            self.forget()
        return None


def _execute(frame: Frame) -> str | None:
    number, program = frame.numbers()
    promise = _promises.get(number)
    if promise is None:
        return "spmd.colocated_python: the call that this program belongs to is over"
    return promise.arrive(program, frame.places(0), frame.suspend)


_handler = execute_handler(_execute)
jax.ffi.register_ffi_target(TARGET, {"execute": capsule(_handler)}, platform="cpu")


# A forked process has no programs of its parent.
os.register_at_fork(after_in_child=_promises.clear)


def all_arrived(seconds: float) -> None:
    """Waits until every program has its values, but for no longer than so many seconds."""
    end = time.monotonic() + seconds
    while _promises and time.monotonic() < end:
        time.sleep(0.001)


# Programs

Results = tuple[tuple[tuple[int, ...], Any], ...]


@functools.lru_cache(maxsize=4096)
def program(results: Results, *, waits: bool) -> Callable[[np.ndarray, Any], Sequence[Any]]:
    """Returns a program with results of these shapes and dtypes.

    Args:
        results: Shape and dtype of each.
        waits: Whether its input is that of another that waits, and not something to compute with.
    """
    outs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    call = jax.ffi.ffi_call(TARGET, outs)

    def colocated_python(number: Any, x: Any) -> Any:
        return call(number, x if waits else x @ x)

    return jax.jit(colocated_python)


@functools.lru_cache(maxsize=1024)
def work(device: Any) -> Any:
    """Something to compute with, on a device."""
    return jax.device_put(np.zeros((_SIZE, _SIZE), np.float32), device)


def _clear() -> None:
    program.cache_clear()
    work.cache_clear()


_api.caches_of_features.append(_clear)


def number(promise: Promise, place: int) -> np.ndarray:
    """What a program of a promise is known by."""
    n = promise.number
    return np.array((n & 0xFFFFFFFF, n >> 32, place, 0), np.uint32)  # read as two 64-bit numbers
