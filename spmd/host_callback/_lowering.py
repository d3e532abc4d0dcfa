"""From an equation to the call of a handler, by the way in which the program is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import gc
import threading
from typing import Any
import warnings

import jax
import numpy as np

from spmd import _jax
from spmd.errors import Failure, OptionError, explain
from spmd.host_callback import _ffi, _registry
from spmd.host_callback._ffi import Buffer, Frame, Future, capsule
from spmd.host_callback._pools import copies_loops, fork_safe_lock, threads
from spmd.host_callback._receiver import receiver
from spmd.host_callback._records import HostCall
from spmd.host_callback._registry import Entry, Site, carrier, placement, stacked
from spmd.host_callback._running import Call, Tap

_LATE = (
    "spmd.host_callback was imported after JAX had started. From JAX 0.11 on, XLA then copies the "
    "loops of a shard_map whose operands nobody needs, and each tap in them arrives many times: "
    "import spmd.host_callback before the first array, or set "
    "XLA_FLAGS=--xla_disable_hlo_passes=nullary-function-wrap-inliner"
)

#: Names of the handler and of what the partitioner replaces by it.
_TARGET = "spmd_host_callback"
_PARTITIONED = "spmd_host_callback_partitioned"

#: Attributes of the handler, sorted by name as XLA keeps them.
_ID, _SITE = 0, 1

#: Where handlers written in Python can read the memory of the device.
NATIVE = ("cpu",)


def lower(ctx: Any, *operands: Any, call: HostCall) -> Sequence[Any]:
    """Emits the call of a handler; returns the values of the results of a `call`."""
    receiver.prepare()
    receiver.calls_used = receiver.calls_used or call.out_tree is not None
    entry = _registry.register(call, tuple(_jax.core.physical_shape(a) for a in ctx.avals_in))
    if _jax.lowering.platforms_of(ctx) != NATIVE:
        return _lower_elsewhere(ctx, operands, entry)
    _jax.host.keep_with_program(ctx, _registry.Kept(entry), _jax.lowering.partition_of(ctx)[0])
    values = [
        v if c == d else _jax.lowering.convert_elements(v, c)
        for v, d, c in zip(operands, entry.dtypes, entry.carriers, strict=True)
    ]
    outs = _emit(ctx, values, entry)
    return [
        v if carrier(d) == d else _jax.lowering.convert_elements(v, d)
        for v, (_, d) in zip(outs, call.results, strict=True)
    ]


def _emit(ctx: Any, values: Sequence[Any], entry: Entry) -> Sequence[Any]:
    call = entry.call
    partitions, axes, manual = _jax.lowering.partition_of(ctx)
    results = [(shape, carrier(dtype)) for shape, dtype in call.outputs]
    if failure := split_failure(call, partitions, manual=manual):
        raise explain(call.kind, [failure])
    target, by_partition = _TARGET, partitions > 1 and bool(manual)
    attributes: Any = {"id": entry.id}
    if by_partition:
        if copies_loops():
            warnings.warn(_LATE, stacklevel=2)
        mode = "together" if _jax.lowering.runs_on_all_devices([*axes]) else "each"
        attributes["site"] = entry.add_site(Site(mode, partitions, axes))
    elif partitions > 1:
        _register_partitioner()
        site = Site("shards" if call.per_shard else "one", partitions, axes or dict(call.axes))
        target, attributes = _PARTITIONED, f"{entry.id} {entry.add_site(site)}"
    return _jax.host.emit_host_call(
        ctx, target, values, results, attributes, by_partition=by_partition
    )


def split_failure(call: HostCall, partitions: int, *, manual: bool | None) -> Failure | None:
    """Says why a call cannot be made from a program that is split so, or None."""
    what = f"cannot reach `{call.name}`"
    if manual is None:
        return Failure(
            what=f"{what} from a shard_map over some axes of the mesh",
            expected="a shard_map over all axes, or none",
            fix="leave axis_names out, or call outside of it; a pmap in a pmap is one, too",
            error=OptionError,
        )
    several_processes = partitions > 1 and jax.process_count() > 1
    if several_processes and not manual and not call.per_shard and call.out_tree is not None:
        return Failure(
            what=f"{what} with the whole operand: the results of one process do not reach others",
            got=f"{jax.process_count()} processes",
            fix="call in shard_map or with per_shard=True, or broadcast by jax.experimental."
            "multihost_utils",
            error=OptionError,
        )
    if not manual and not 0 <= call.device_index < partitions:
        several = f"0 to {partitions - 1}: the program runs on {partitions} devices"
        return Failure(
            what=f"{what} from device {call.device_index}",
            given=f"device_index={call.device_index}",
            expected=several if partitions > 1 else "0: the program runs on one device",
            error=OptionError,
        )
    if not manual and call.stack not in (None, partitions):
        return Failure(
            what=f"{what} from every shard",
            given=f"per_shard=True, traced for {call.stack} device{'s' * (call.stack != 1)}",
            got=f"a program on {partitions} devices",
            fix="trace it under its mesh: `with spmd.Mesh(...)`, jax.set_mesh, or shard_map",
            error=OptionError,
        )
    return None


# The partitioner


@functools.lru_cache(maxsize=1)
def _register_partitioner() -> None:
    """Tells XLA how to split a call, once per process."""
    _jax.lowering.register_partitioner(_PARTITIONED, _partition, _spread)


def _found(text: str | bytes) -> tuple[Entry, Site]:
    number, _, site = (text.decode() if isinstance(text, bytes) else text).partition(" ")
    entry = _registry.find(int(number))
    if entry is None:
        raise RuntimeError(_registry.unknown(int(number)))
    return entry, entry.site(site)


def _partition(
    arg_shapes: Any, arg_shardings: Any, result_shape: Any, result_sharding: Any, text: Any
) -> tuple[bytes, Any, Any]:
    """Returns the program of one device, and how operands and results are split for it."""
    del result_sharding
    entry, site = _found(text)
    shapes = [shape for shape, _ in entry.avals]
    token, *shardings = arg_shardings
    if site.mode == "one":
        shardings = [_jax.core.HloSharding.replicate() for _ in shardings]
    places = [
        placement(shape, sharding, site.partitions)
        for shape, sharding in zip(shapes, shardings, strict=True)
    ]
    final = Site(site.mode, site.partitions, site.axes, tuple(places) * (site.mode == "shards"))
    operands = [(p.local_shape, c) for p, c in zip(places, entry.carriers, strict=True)]
    stack = () if entry.call.stack is None else (1,)
    results = [((*stack, *shape), carrier(d)) for shape, d in entry.call.results]
    attributes: dict[str, int | str] = {"id": entry.id, "site": entry.add_site(final)}
    module = _jax.lowering.shard_module(_TARGET, operands, results, attributes)
    spread = _spread(arg_shapes, arg_shardings, result_shape, text)
    return module, [token, *shardings], spread


def _spread(arg_shapes: Any, arg_shardings: Any, result_shape: Any, text: Any) -> Any:
    """Returns how the results are split: whole everywhere, or one per device."""
    del arg_shapes, arg_shardings
    entry, site = _found(text)
    token = _jax.core.HloSharding.replicate()
    if not result_shape.is_tuple():
        return token
    if entry.call.stack is None:
        parts = [_jax.core.HloSharding.replicate() for _ in entry.call.results]
    else:
        parts = [stacked(shape, site.partitions) for shape, _ in entry.call.results]
    return _jax.core.HloSharding.tuple_sharding(result_shape, [token, *parts])


# Handlers: what programs call on the CPU; each call is an item for the thread of its device


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
        _ffi.hold(frame, entry)
    finally:
        if collects:
            gc.enable()
    return None


_execute_handler = _ffi.execute_handler(_execute)
_instantiate_handler = _ffi.compile_handler(_instantiate)


# At import, which starts nothing: a program of another process that is loaded before any is made
# here is to be told why it cannot run.
_stages = {"instantiate": capsule(_instantiate_handler), "execute": capsule(_execute_handler)}
jax.ffi.register_ffi_target(_TARGET, _stages, platform="cpu")


# GPU and TPU programs
#
# Order, values, transformations, asynchrony and errors of taps are those of the CPU. What JAX's own
# Python callbacks cannot keep: one shard per call outside of `shard_map`, another `device_index`
# than 0, and the device of a program on one of several devices of this process.


class HostFunctionError(RuntimeError):
    """The host function of a `call` failed; the text says how."""


def _lower_elsewhere(ctx: Any, operands: Sequence[Any], entry: Entry) -> Sequence[Any]:
    """Emits a callback of JAX that hands its operands over as the handlers of the CPU do."""
    call = entry.call
    partitions, axes, manual = _jax.lowering.partition_of(ctx)
    platform = _jax.lowering.platforms_of(ctx)[0]
    if failure := _failure_elsewhere(call, platform, partitions, manual):
        raise explain(call.kind, [failure])
    site = Site("each", partitions, axes) if manual and partitions > 1 else None
    devices = _jax.lowering.mesh_devices(ctx) if site else []
    fun = functools.partial(_received, entry, platform, site, devices)
    return _jax.host.emit_python_callback(
        ctx, fun, operands, call.outputs, by_partition=site is not None
    )


def _failure_elsewhere(
    call: HostCall, platform: str, partitions: int, manual: bool | None
) -> Failure | None:
    what = f"cannot reach `{call.name}` from a program for {platform} "
    if manual is None:
        return Failure(
            what=what + "inside of a shard_map over some axes of the mesh",
            expected="a shard_map over all axes, or none",
            error=OptionError,
        )
    if partitions == 1 or manual:
        return None
    if call.per_shard:
        return Failure(
            what=what + "shard by shard",
            given="per_shard=True",
            fix="wrap it in jax.shard_map, where each device calls by itself",
            error=OptionError,
        )
    if call.device_index:
        return Failure(
            what=what + f"from device {call.device_index}",
            given=f"device_index={call.device_index}",
            expected="device_index=0",
            error=OptionError,
        )
    return None


class _Received(Buffer):
    """An operand that JAX has copied."""

    __slots__ = ("_values",)

    def __init__(self, values: np.ndarray):
        self._values = values

    def size(self, dtype: np.dtype) -> int:
        return self._values.nbytes

    def copy(self, dtype: np.dtype) -> np.ndarray:
        return self._values


class _Pause(threading.Event):
    """What a thread of JAX waits for, in place of the future of a suspended program."""

    set_available = threading.Event.set


def _received(
    entry: Entry, platform: str, site: Site | None, devices: Sequence[Any], *arrays: Any
) -> tuple[Any, ...]:
    """Takes operands that JAX has brought to the host; waits in a thread of JAX."""
    values = [np.array(x) for x in arrays]
    partition = int(values.pop(0)) if site else 0
    device = devices[partition] if devices else jax.local_devices(backend=platform)[0]
    buffers = [_Received(v) for v in values]
    pause = _Pause()
    if entry.call.out_tree is None:
        tap = Tap(entry, device, site, partition, buffers)
        receiver.submit(tap, lambda: pause)
        if tap.resume is not None:
            pause.wait()
        return ()
    outcome: list[Any] = []

    def finish(results: Any, error: str | None) -> None:
        outcome.extend((results, error))
        pause.set_available()

    due = Call(entry, device, site, partition, buffers)
    due.finish = finish
    receiver.submit(due, lambda: pause)
    pause.wait()
    results, error = outcome
    if error is not None:
        raise HostFunctionError(error)
    return tuple(v.astype(d) for v, (_, d) in zip(results, entry.call.results, strict=True))
