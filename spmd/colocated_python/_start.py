"""The start of the programs of one call, by one thread for another one."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import threading
from typing import Any

import jax

from spmd.colocated_python._outputs import Outputs, Plan
from spmd.colocated_python._promises import Promise


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Starts programs as they are meant, whatever the process has set for its own.

    Results have the dtypes that they were said to have, nobody looks at values that are not there
    (which would wait for them), and to tell a program which one it is, is no transfer of the user.
    """
    with (
        jax.enable_x64(True),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
    ):
        yield


class Latch:
    """What one thread waits for; a lock is the cheapest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.open = self._lock.release

    def wait(self, seconds: float = -1) -> bool:
        """Waits, for so many seconds at most; returns whether it is open, to one thread once."""
        return self._lock.acquire(timeout=seconds)


class Start:
    """The programs of one call, which a lane starts.

    Attributes:
        promise: What they wait for.
        error: Why they did not start.
    """

    def __init__(self, outputs: Outputs, plan: Plan):
        self.outputs = outputs
        self.plan = plan
        self.promise = Promise(plan.programs)
        self.error: BaseException | None = None
        self._arrays: list[Any] = []
        self._started = Latch()

    def begin(self) -> None:
        """Starts the programs, and wakes the caller."""
        try:
            self._arrays = self.outputs.start(self.promise, self.plan)
        except BaseException as error:  # for the caller
            self.error = error
            self.promise.settle(None, "its programs did not start")
            self.promise.forget()
        self._started.open()

    def arrays(self) -> list[Any]:
        """Waits until the programs are started; returns their arrays, to the caller alone."""
        self._started.wait()
        if self.error is not None:
            raise self.error
        arrays, self._arrays = self._arrays, []
        return arrays

    def give_up(self) -> None:
        """Lets the programs end: nobody wants their arrays."""
        self.promise.settle(None)

    def now(self) -> list[Any]:
        """Starts the programs of a call that is over: none of them has to wait."""
        with settings():
            return self.outputs.start(self.promise, self.plan)
