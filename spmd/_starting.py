"""Starting programs: one thread at a time where devices meet, and not too many in flight."""

from __future__ import annotations

from collections.abc import Callable, Collection
import contextlib
import os
import threading
from typing import Any

import jax

#: Held while a program is started on several devices. Two programs that different threads start at
#: the same time may reach their devices in different order, and wait for one another for ever. One
#: on a single device has nothing to meet, and may run in the thread that starts it.
starting = threading.RLock()
os.register_at_fork(after_in_child=starting._at_fork_reinit)  # type: ignore[attr-defined] - of CPython

# As `threading.enumerate`, without a lock and a list.
threads: Any = getattr(threading, "_active", (None, None))

#: XLA lets 32 programs wait for a device of the CPU. A further one takes a thread of its pool or
#: blocks who starts it, and then none of them ends.
_MOST_FLYING = 16


def not_starting(work: Callable, *args: Any) -> Any:
    """Lets other threads start programs while this one traces, compiles or waits.

    What gives `starting` back and takes it again is in C, where no signal comes in between.
    """
    held: Any = starting  # as `threading.Condition` does
    state = held._release_save() if held._is_owned() else None
    try:
        return work(*args)
    finally:
        if state is not None:
            held._acquire_restore(state)


class _Flying(threading.local):
    """How many programs this thread has started on each device since it waited for one there."""

    def __init__(self) -> None:
        self.counts: dict[Any, int] = {}


_flying = _Flying()


def wait_now_and_then(outs: Any, devices: Collection[Any] = (None,)) -> None:
    """Waits for a program that was started, so that few enough of all threads are in flight.

    `devices` are those that run it, or one that stands for all where they are not told apart.
    """
    counts, most = _flying.counts, 0
    for device in devices:
        counts[device] = count = counts.get(device, 0) + 1
        most = max(most, count)
    if most * len(threads) < _MOST_FLYING:
        return
    for device in devices:  # which run what they are given in order
        counts[device] = 0
    with contextlib.suppress(RuntimeError):  # for the user to see
        not_starting(jax.block_until_ready, outs)
