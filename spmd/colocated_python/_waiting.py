"""How long a caller waits for its host function, which may start programs of its own.

XLA's CPU client runs programs on several devices one at a time, in the order in which they are
started. A program that needs the result of a function and is started before the function's own is
in line first, and both wait for ever. So who calls a function that starts such programs gets its
arrays when the function has returned: all that it has started is in line by then.

What a function does is seen while it runs. Of one that has never run to its end nothing is known:
its caller waits until it returns or rests. No clock can tell, since on a busy machine a function
may get no processor for as long as one likes.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
from dataclasses import dataclass
import logging
from pathlib import Path
import threading

from spmd import _jax
from spmd.colocated_python._promises import Latch
from spmd.colocated_python._specs import subject

logger = logging.getLogger(__name__)

#: Seconds for which a thread has to sleep to be at rest. One that waits for the interpreter wakes
#: every 0.005.
_REST = 0.02

#: Seconds after which who waits for a function that rests is told why.
_PATIENCE = 10.0

_TASKS = Path("/proc/self/task")
_here = threading.local()


@dataclass(eq=False)
class Habit:
    """What has been seen of a host function, whatever it was called with.

    Attributes:
        meets: Whether it has started programs on several devices.
        is_known: Whether it has run to its end.
    """

    meets: bool = False
    is_known: bool = False


class Visit:
    """One run of a host function, and the caller that may wait for it."""

    def __init__(self, name: str, habit: Habit):
        self._name = name
        self._habit = habit
        self._returned = Latch()
        self._is_alone = False

    def __enter__(self) -> None:
        _here.visit = self
        _watch()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _here.visit = None
        self._habit.is_known |= kind is None
        self._returned.open()

    def wait(self, thread: threading.Thread, *, is_spread: bool) -> None:
        """Waits, in the caller, until programs that need the result may be started.

        The function runs in that thread, and `is_spread` where its arrays are on several devices.
        """
        habit = self._habit
        is_unknown = is_spread and not habit.is_known
        has_returned = is_unknown and self._wait_for_rest(thread)
        if habit.meets and not has_returned:
            self._wait_for_return(thread)
        self._is_alone = True

    def _wait_for_rest(self, thread: threading.Thread) -> bool:
        """Waits until the function returns, rests or is seen to meet; returns whether the first."""
        before = None
        while not self._habit.meets:
            if self._returned.wait(_REST):
                return True
            now = _turns(thread)
            if now is not None and now == before:
                break
            before = now
        return False

    def _wait_for_return(self, thread: threading.Thread) -> None:
        """Waits until the function returns; says once where that may be for ever."""
        is_told = False
        while not self._returned.wait(_PATIENCE):
            before = _turns(thread)
            if self._returned.wait(_REST):  # a latch says it once
                return
            if not is_told and before is not None and _turns(thread) == before:
                logger.warning(_RESTS, subject(self._name))
                is_told = True

    def started(self) -> None:
        """The function has started a program on several devices."""
        if not self._habit.meets:
            self._habit.meets = True
            if self._is_alone:
                logger.warning(_LATE, subject(self._name))


def started() -> None:
    """What this thread runs has started a program on several devices."""
    visit: Visit | None = getattr(_here, "visit", None)
    if visit is not None:
        visit.started()


_watch = _jax.dispatch.watch_starts(started)


_LATE = (
    "%s has started a program on several devices after its call had returned: if a program that "
    "needs its result was started before, both wait for ever; wait for the result of the first "
    "call before it is used: later ones return when the function has"
)


_RESTS = (
    "%s rests, and its caller waits for it, since it has started programs on several devices: such "
    "a function must not wait for what its caller does after the call"
)


def _turns(thread: threading.Thread) -> Sequence[tuple[str, int]] | None:
    """How often a thread and those of XLA have gone to sleep; None while one of them is awake.

    XLA starts and compiles programs in threads of its own, and who called it sleeps meanwhile.
    """
    found = []
    for task in sorted(_TASKS.iterdir()) if _TASKS.exists() else []:
        with contextlib.suppress(OSError):  # it has just ended
            name, *lines = (task / "status").read_text().splitlines()
            if name.startswith("Name:\ttf_XLA") or task.name == str(thread.native_id):
                fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                if not fields["State"].startswith("S"):
                    return None
                found.append((task.name, int(fields["voluntary_ctxt_switches"])))
    return found
