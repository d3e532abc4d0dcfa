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


def prepare_xla() -> None:
    """Sets what XLA reads from the environment when JAX starts, and has no other switch for.

    Its pool has as many threads as there are cores, or devices if those are more; each device that
    waits for a host function holds one. Without another one no program could run in a host
    function.

    In JAX 0.12 a pass of XLA for functions without operands takes the body of a `shard_map` for
    one that has our token only, and copies its loops: each of their taps arrived 49 times.
    """
    if _jax.backends_started():
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if _jax.WRAPS_TOKEN_ONLY_BODIES and "xla_disable_hlo_passes" not in flags:
        wrong = "--xla_disable_hlo_passes=nullary-function-wrap-inliner"
        os.environ["XLA_FLAGS"] = f"{flags} {wrong}".strip()
    if "NPROC" not in os.environ:
        flag = re.search(r"xla_force_host_platform_device_count=(\d+)", flags)
        devices = max(int(flag[1]) if flag else 1, jax.config.values["jax_num_cpu_devices"])
        os.environ["NPROC"] = str((os.cpu_count() or 1) + 2 * devices)
