"""What compiled programs call on the CPU: each call is an item for the thread of its device."""

from __future__ import annotations

from collections.abc import Callable
import functools
import gc
import threading
from typing import Any

import jax
import numpy as np

from spmd import _jax
from spmd.host_callback import _registry
from spmd.host_callback._ffi import (
    Buffer,
    Frame,
    Future,
    capsule,
    compile_handler,
    execute_handler,
    hold,
)
from spmd.host_callback._pools import fork_safe_lock, threads
from spmd.host_callback._receiver import receiver
from spmd.host_callback._registry import Entry
from spmd.host_callback._running import Call, Tap

#: Names of the handler and of what the partitioner replaces by it.
TARGET = "spmd_host_callback"
PARTITIONED = "spmd_host_callback_partitioned"

# Attributes, sorted by name as XLA keeps them
_ID, _SITE = 0, 1


@functools.lru_cache(maxsize=1024)
def _device(ordinal: int) -> Any:
    # In a run of several processes too XLA says the number that a device has among all.
    return next(d for d in jax.local_devices(backend="cpu") if d.id == ordinal)


_jax.core.register_cache(_device, "devices of host callbacks")


class _Meeting:
    """A call in a program on several devices: all of them get the results, or the error, together.

    A device that failed by itself would leave the others in their next collective for ever.
    """

    def __init__(self, callers: int, arrivals: int):
        self.arrived: set[int] = set()
        self.arrivals = arrivals
        self._lock = threading.Lock()
        self._missing = callers
        self._error: str | None = None
        self._shared: Any = None
        self._waiting: list[tuple[Callable[..., None], list[Any] | None]] = []

    def join(self, finish: Callable[..., None], own: list[Any] | None) -> bool:
        """A device waits for results, its own or shared ones; returns whether they are to come."""
        with self._lock:
            if self._missing:
                self._waiting.append((finish, own))
                return True
        finish(self._shared, self._error)
        return False

    def settle(self, own: list[Any] | None, results: Any, error: str | None) -> None:
        """A host function has returned, or failed."""
        # The host function may use the memory of its result again, long before all are here.
        results = None if results is None else [np.array(v) for v in results]
        if own is not None:
            own.append(results)
        with self._lock:
            self._missing -= 1
            self._shared = results
            self._error = self._error or error
            if self._missing:
                return
        for finish, rows in self._waiting:
            finish(self._shared if rows is None else rows[0], self._error)
        self._waiting.clear()


_meetings: dict[tuple[int, int], list[_Meeting]] = {}
_meetings_lock = fork_safe_lock()


def _meeting(frame: Frame, entry: Entry, partition: int, callers: int, arrivals: int) -> _Meeting:
    """Returns the meeting of this execution of a call; a loop has one after the other."""
    key = (frame.run_id(), entry.id)
    with _meetings_lock:
        meetings = _meetings.setdefault(key, [])
        found = next((m for m in meetings if partition not in m.arrived), None)
        if found is None:
            found = _Meeting(callers, arrivals)
            meetings.append(found)
        found.arrived.add(partition)
        if len(found.arrived) == found.arrivals:
            meetings.remove(found)
            if not meetings:
                del _meetings[key]
        return found


def _execute(frame: Frame) -> str | None:
    number = frame.integer(_ID)
    entry = _registry.find(number)
    if entry is None:
        return _registry.unknown(number)
    buffers = frame.arguments()
    device = _device(frame.device_ordinal())
    site, partition = None, 0
    if len(buffers) > len(entry.dtypes):
        partition = int(buffers.pop(0).copy(np.dtype(np.uint32)))
        site = entry.site(frame.text(_SITE).decode())
    if entry.call.out_tree is not None:
        _execute_call(frame, Call(entry, device, site, partition, buffers))
    elif site is None or site.mode != "one" or partition == entry.call.device_index:
        receiver.submit(Tap(entry, device, site, partition, buffers), frame.suspend)
    return None


def _execute_call(frame: Frame, due: Call) -> None:
    site, partition = due.site, due.partition
    outs = frame.results()
    future = frame.suspend()
    due.finish = functools.partial(_finish, future, outs)
    if site is not None and site.mode != "each" and jax.process_count() == 1:
        callers = 1 if site.mode == "one" else site.partitions
        meeting = _meeting(frame, due.entry, partition, callers, site.partitions)
        own: list[Any] | None = None if site.mode == "one" else []
        if not meeting.join(due.finish, own):
            return
        if site.mode == "one" and partition != due.entry.call.device_index:
            return
        due.finish = functools.partial(meeting.settle, own)
    receiver.submit(due, frame.suspend)


def _finish(future: Future, buffers: list[Buffer], results: Any, error: str | None) -> None:
    if error is not None:
        threads.run(functools.partial(future.set_error, error))
        return
    for buffer, value in zip(buffers, results, strict=True):
        buffer.write(value)
    threads.run(future.set_available)


def _instantiate(frame: Frame) -> str | None:
    number = frame.integer(_ID)
    entry = _registry.find(number)
    if entry is None:
        return _registry.unknown(number)
    # A collection would delete other executables in the middle of what XLA does with this one.
    collects = gc.isenabled()
    gc.disable()
    try:
        hold(frame, entry)
    finally:
        if collects:
            gc.enable()
    return None


_execute_handler, _instantiate_handler = execute_handler(_execute), compile_handler(_instantiate)


# At import, which starts nothing: a program of another process that is loaded before any is made
# here is to be told why it cannot run.
_stages = {"instantiate": capsule(_instantiate_handler), "execute": capsule(_execute_handler)}
jax.ffi.register_ffi_target(TARGET, _stages, platform="cpu")
