"""Threads on which suspended programs go on.

Completing a future of XLA runs the rest of its program in the thread that completes it, up to the
next collective, where it waits for the other devices: each program needs a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
import os
import queue
import re
import threading

import jax

from spmd import _jax

_Task = Callable[[], None]


class Threads:
    """As many threads as there are tasks at a time, used again; none before the first task."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[_Task]] = []

    def run(self, task: _Task) -> None:
        """Runs a task on a thread that has nothing else to do; returns at once."""
        try:
            self._idle.pop().put(task)
        except IndexError:
            threading.Thread(
                target=self._work, args=(task,), name="spmd.host_callback resume", daemon=True
            ).start()

    def _work(self, task: _Task) -> None:
        tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        while True:
            task()
            self._idle.append(tasks)
            task = tasks.get()


#: Shared by all devices.
threads = Threads()


def forget_threads() -> None:
    """Drops the threads that a forked process does not have."""
    threads._idle.clear()


def reserve_threads() -> None:
    """Asks XLA for threads beyond those that suspended programs can hold.

    Its pool has as many as there are cores, or devices if those are more; each device that waits
    for a host function holds one. Without another one no program could run in a host function.
    XLA reads the variable when JAX starts, and has no other switch for it.
    """
    if "NPROC" in os.environ or _jax.backends_started():
        return
    flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = max(int(flag[1]) if flag else 1, jax.config.values["jax_num_cpu_devices"])
    os.environ["NPROC"] = str((os.cpu_count() or 1) + 2 * devices)
