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


def fork_safe_lock() -> threading.Lock:
    """Returns a lock that a forked process has free, whoever held it."""
    lock = threading.Lock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined] - of CPython
    return lock


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


_WRONG_PASS = "nullary-function-wrap-inliner"
_DISABLED = "--xla_disable_hlo_passes="


def copies_loops() -> bool:
    """Whether taps in the loops of some `shard_map` may arrive many times; see `prepare_xla`."""
    return _jax.versions.WRAPS_TOKEN_ONLY_BODIES and not _prepared


_prepared = False
_set_threads = False


def prepare_xla(threads: int = 0) -> None:
    """Sets what XLA reads from the environment when JAX starts, and has no other switch for.

    Its pool has as many threads as there are cores, or devices if those are more; each device that
    waits for a host function holds one. Without another one no program could run in a host
    function.

    `threads` are some more for what suspends programs by itself.

    In JAX 0.12 a pass of XLA for functions without operands takes the body of a `shard_map` for
    one that has our token only, and copies its loops: each of their taps arrived 49 times.
    """
    global _prepared, _set_threads
    flags = os.environ.get("XLA_FLAGS", "")
    _prepared = _WRONG_PASS in flags
    if _jax.mesh.backends_started():
        return
    if _jax.versions.WRAPS_TOKEN_ONLY_BODIES and not _prepared:
        if _DISABLED in flags:
            flags = flags.replace(_DISABLED, f"{_DISABLED}{_WRONG_PASS},")
        else:
            flags = f"{flags} {_DISABLED}{_WRONG_PASS}".strip()
        os.environ["XLA_FLAGS"] = flags
    _prepared = True
    if "NPROC" not in os.environ or _set_threads:
        _set_threads = True
        flag = re.search(r"xla_force_host_platform_device_count=(\d+)", flags)
        devices = max(int(flag[1]) if flag else 1, jax.config.values["jax_num_cpu_devices"])
        os.environ["NPROC"] = str((os.cpu_count() or 1) + 2 * devices + threads)
