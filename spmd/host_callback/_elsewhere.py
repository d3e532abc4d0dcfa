"""Taps and calls of GPU and TPU programs, by way of JAX's own Python callbacks.

Order, values, transformations, asynchrony and errors of taps are those of the CPU. What JAX's
callbacks cannot keep: one shard per call outside of `shard_map`, another `device_index` than 0,
and the device of a program on one of several devices of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import threading
from typing import Any

import jax
import numpy as np

from spmd import _jax
from spmd.errors import Failure, OptionError, explain
from spmd.host_callback._items import Call, Tap
from spmd.host_callback._receiver import receiver
from spmd.host_callback._registry import Entry, Site


class HostFunctionError(RuntimeError):
    """The host function of a `call` failed; the text says how."""


def lower(ctx: Any, operands: Sequence[Any], entry: Entry) -> Sequence[Any]:
    """Emits a callback of JAX that hands its operands over as the handlers of the CPU do."""
    call = entry.call
    partitions, axes, manual = _jax.lowering.partition_of(ctx)
    platform = _jax.lowering.platforms_of(ctx)[0]
    if failure := _failure(entry, platform, partitions, manual):
        raise explain(call.kind, [failure])
    site = Site("each", partitions, axes) if manual and partitions > 1 else None
    stack = () if call.stack is None else (call.stack,)
    results = [((*stack, *shape), dtype) for shape, dtype in call.results]
    devices = _jax.lowering.mesh_devices(ctx) if site else []
    fun = functools.partial(_received, entry, platform, site, devices)
    return _jax.host.emit_python_callback(
        ctx, fun, operands, results, by_partition=site is not None
    )


def _failure(entry: Entry, platform: str, partitions: int, manual: bool | None) -> Failure | None:
    call = entry.call
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


class _Received:
    """An operand that JAX has copied."""

    def __init__(self, values: np.ndarray):
        self._values = values

    def size(self, dtype: np.dtype) -> int:
        return self._values.nbytes

    def copy(self, dtype: np.dtype) -> np.ndarray:
        return self._values


class _Pause:
    """What a thread of JAX waits for, in place of the future of a suspended program."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set_available = self._event.set
        self.wait = self._event.wait

    def suspend(self) -> _Pause:
        return self


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
        receiver.submit(tap, pause.suspend)
        if tap.resume is not None:
            pause.wait()
        return ()
    outcome: list[Any] = []

    def finish(results: Any, error: str | None) -> None:
        outcome.extend((results, error))
        pause.set_available()

    receiver.submit(Call(entry, device, site, partition, buffers, finish), pause.suspend)
    pause.wait()
    results, error = outcome
    if error is not None:
        raise HostFunctionError(error)
    return tuple(v.astype(d) for v, (_, d) in zip(results, entry.call.results, strict=True))
