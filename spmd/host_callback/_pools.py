"""Threads and memory that are used again, and what XLA reads when it starts.

Completing a future of XLA runs the rest of its program in the thread that completes it, up to the
next collective, where it waits for the other devices: each program needs a thread of its own.

Fresh memory costs the kernel up to ten times as much as the copy of a large operand into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import ctypes
import math
import os
import queue
import re
import sys
import threading
from typing import Any

import jax
import numpy as np

from spmd import _jax


def fork_safe_lock() -> threading.Lock:
    """Returns a lock that a forked process has free, whoever held it."""
    lock = threading.Lock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined] - of CPython
    return lock


# Threads on which suspended programs go on

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

    def forget(self) -> None:
        """Drops the threads that a forked process does not have."""
        self._idle.clear()


#: Shared by all devices.
threads = Threads()


class Reaper:
    """A thread that comes to what has gone when the thread that let it go is done with that."""

    def __init__(self, name: str, task: Callable[[Any], None]):
        self._name, self._task = name, task
        self._lock = fork_safe_lock()
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._dead: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._started = False  # a forked process does not have the thread

    def prepare(self) -> None:
        """Starts the thread, once; not to be called in a collection."""
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def take(self, dead: Any = None) -> None:
        """Takes what has gone, without a lock: may be called in a collection."""
        self._dead.put(dead)

    def _work(self) -> None:
        while True:
            self._task(self._dead.get())


# Threads and passes of XLA

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

    From JAX 0.11 on a pass of XLA takes the body of a `shard_map` that has our token only for a
    function without operands, and copies its loops: each of their taps arrived 49 times.
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


# Memory for large operands, used again where nobody holds it

#: Bytes from which on memory is used again, and how many are kept for that at most.
LARGE = 1 << 20
_KEPT = 128 << 20

_free: dict[int, list[np.ndarray]] = {}
_kept = 0
_lock = fork_safe_lock()
_counts_references = getattr(sys, "_is_gil_enabled", lambda: True)()


def empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array whose values are not set, as a view of memory that may be used again."""
    global _kept
    size = math.prod(shape, start=dtype.itemsize)
    with _lock:
        free = _free.get(size)
        raw = free.pop() if free else None
        _kept -= size if raw is not None else 0
    if raw is None:
        raw = np.empty(size, np.uint8)
    return raw.view(dtype).reshape(shape)


def recycle(values: list[np.ndarray]) -> None:
    """Takes back what :func:`empty` gave and nobody else holds; empties the list."""
    global _kept
    while values and _counts_references:
        # A view of any kind holds the memory that it is of, and so does an array of JAX.
        raw = values.pop().base
        if raw is None or raw.nbytes < LARGE or sys.getrefcount(raw) > _ALONE:
            continue
        with _lock:
            if _kept + raw.nbytes <= _KEPT:
                _free.setdefault(raw.nbytes, []).append(raw)
                _kept += raw.nbytes


def release() -> None:
    """Gives back what is kept."""
    global _kept
    with _lock:
        _free.clear()
        _kept = 0


def _references_of_one() -> int:
    values = [np.empty(1, np.uint8).view()]
    raw = values.pop().base
    return sys.getrefcount(raw)


#: What `sys.getrefcount` says of memory that only :func:`recycle` holds.
_ALONE = _references_of_one()


def prefer_huge_pages(address: int, size: int) -> None:
    """Has the kernel hand out memory that is not touched yet in pieces of 2 MiB, as NumPy does.

    In pieces of 4 KiB it takes four times as long to write 64 MB there for the first time.
    """
    start = -(-address // _HUGE) * _HUGE
    if (length := (address + size - start) // _HUGE * _HUGE) > 0 and _madvise is not None:
        _madvise(start, length, _MADV_HUGEPAGE)  # a hint: it may be refused


_HUGE = 2 << 20
_MADV_HUGEPAGE = 14  # of Linux
_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
