"""What compiled programs call on the CPU: each call is an item for the thread of its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import threading
from typing import Any

import jax
import numpy as np

from spmd.host_callback import _registry
from spmd.host_callback._ffi import Buffer, Frame, Future, capsule, handler, hold
from spmd.host_callback._receiver import Item, receiver
from spmd.host_callback._registry import Entry, Site
from spmd.host_callback._running import (
    call_results,
    called_with,
    error_text,
    without_own_frames,
)
from spmd.host_callback._threads import threads

#: Names of the handler and of what the partitioner replaces by it.
TARGET = "spmd_host_callback"
PARTITIONED = "spmd_host_callback_partitioned"

# Attributes, sorted by name as XLA keeps them
_ID, _SITE = 0, 1


@functools.lru_cache(maxsize=1024)
def _device(ordinal: int) -> Any:
    return next(d for d in jax.local_devices(backend="cpu") if d.local_hardware_id == ordinal)


class _Tap(Item):
    __slots__ = ("buffers", "entry", "partition", "site")

    def __init__(self, device: Any, entry: Entry, buffers: list[Buffer]):
        size = sum(b.size(d) for b, d in zip(buffers, entry.carriers, strict=True))
        super().__init__(device, size)
        self.entry = entry
        self.buffers = buffers
        self.site: Site | None = None
        self.partition = 0

    def read(self) -> list[np.ndarray]:
        values = [b.copy(d) for b, d in zip(self.buffers, self.entry.carriers, strict=True)]
        return trimmed(values, self.site, self.partition)

    def run(self) -> None:
        entry = self.entry
        try:
            called_with(entry, self.operands, self.device, self.site, self.partition)
        except BaseException as error:  # a host function may well call sys.exit
            receiver.failed(without_own_frames(error), f"{entry.call.kind} of `{entry.call.name}`")


class _Call(_Tap):
    __slots__ = ("finish",)

    urgent = True

    def __init__(self, device: Any, entry: Entry, buffers: list[Buffer], finish: Callable):
        super().__init__(device, entry, buffers)
        self.size = 0  # it waits in the memory of the device
        self.finish = finish

    def run(self) -> None:
        entry = self.entry
        try:
            self.operands = self.read()
            value = called_with(entry, self.operands, self.device, self.site, self.partition)
            results = call_results(entry.call, value)
        except BaseException as error:  # as above
            receiver.failed(without_own_frames(error), f"call of `{entry.call.name}`")
            self.finish(None, error_text(entry.call, error))
        else:
            self.finish(results, None)


def trimmed(values: Sequence[np.ndarray], site: Site | None, partition: int) -> list[np.ndarray]:
    """Cuts off the padding of uneven shards."""
    if site is None or not site.placements:
        return [*values]
    trims = [p.trim(partition) for p in site.placements]
    return [v if t is None else v[t].copy() for v, t in zip(values, trims, strict=True)]


class _Meeting:
    """A call in a program on several devices: all of them get the results, or the error, together.

    A device that failed by itself would leave the others in their next collective for ever.
    """

    def __init__(self, callers: int, arrivals: int):
        self.lock = threading.Lock()
        self.arrived: set[int] = set()
        self.open = arrivals
        self.missing = callers
        self.error: str | None = None
        self.shared: Any = None
        self.waiting: list[tuple[Future, list[Buffer], Any]] = []

    def settle(self, results: Any, error: str | None) -> None:
        """One of the callers has its results."""
        with self.lock:
            self.missing -= 1
            self.shared = results
            self.error = self.error or error
            if self.missing:
                return
            waiting, self.waiting = self.waiting, []
        for future, buffers, own in waiting:
            _finish(future, buffers, self.shared if own is None else own[0], self.error)


_meetings: dict[tuple[int, int], list[_Meeting]] = {}
_meetings_lock = threading.Lock()


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
        if len(found.arrived) == found.open:
            meetings.remove(found)
            if not meetings:
                del _meetings[key]
        return found


def _finish(future: Future, buffers: list[Buffer], results: Any, error: str | None) -> None:
    if error is not None:
        threads.run(functools.partial(future.set_error, error))
        return
    for buffer, value in zip(buffers, results, strict=True):
        buffer.write(value)
    threads.run(future.set_available)


def _suspender(frame: Frame) -> Callable[[], Callable[[], None]]:
    return lambda: frame.suspend().set_available


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
    if entry.call.out_tree is None:
        if site is None or site.mode != "one" or partition == entry.call.device_index:
            tap = _Tap(device, entry, buffers)
            tap.site, tap.partition = site, partition
            receiver.submit(tap, _suspender(frame))
        return None
    _execute_call(frame, entry, device, buffers, site, partition)
    return None


def _execute_call(
    frame: Frame,
    entry: Entry,
    device: Any,
    buffers: list[Buffer],
    site: Site | None,
    partition: int,
) -> None:
    outs = frame.results()
    future = frame.suspend()
    if site is None or site.mode == "each":
        call = _Call(device, entry, buffers, functools.partial(_finish, future, outs))
    else:
        callers = 1 if site.mode == "one" else site.partitions
        meeting = _meeting(frame, entry, partition, callers, site.partitions)
        own: list[Any] | None = None if site.mode == "one" else []
        with meeting.lock:
            settled = not meeting.missing
            if not settled:
                meeting.waiting.append((future, outs, own))
        if settled:
            _finish(future, outs, meeting.shared, meeting.error)
            return
        if site.mode == "one" and partition != entry.call.device_index:
            return
        call = _Call(device, entry, buffers, functools.partial(_settle, meeting, own))
    call.site, call.partition = site, partition
    receiver.submit(call, _suspender(frame))


def _settle(meeting: _Meeting, own: list[Any] | None, results: Any, error: str | None) -> None:
    if own is not None:
        own.append(results)
    meeting.settle(results, error)


def _instantiate(frame: Frame) -> str | None:
    number = frame.integer(_ID)
    entry = _registry.find(number)
    if entry is None:
        return _registry.unknown(number)
    hold(frame, entry)
    return None


_execute_handler, _instantiate_handler = handler(_execute), handler(_instantiate)


@functools.lru_cache(maxsize=1)
def register_handlers() -> None:
    """Makes the handlers known to XLA, once per process."""
    stages = {"instantiate": capsule(_instantiate_handler), "execute": capsule(_execute_handler)}
    jax.ffi.register_ffi_target(TARGET, stages, platform="cpu")
