"""What the present machine can do: products, copies and exchanges, measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from spmd.errors import Failure, MeshError, explain
from spmd.inspection.compile.topology import is_described
from spmd.inspection.timing.chips import Chip, chip_of
from spmd.inspection.timing.clock import REACHED

_TURNS = 7
#: Seconds that a turn of runs that are queued takes at least, and their number at most.
_TURN, _MOST_CALLS = 0.02, 64
#: Seconds that all runs of one size may take: a larger product is not tried.
_BUDGET = 2.0
_SMALLEST, _LARGEST = 256, 16_384
#: Bytes of an array that no cache holds; on CPU of those of all devices, which share a memory.
_LARGE, _LARGE_ON_CPU = 2**28, 2**27


def calibrate(devices: Any = None, *, say: Callable[[str], None] | None = None) -> Chip:
    """Measures what the devices of this process can do, for ``chip=``.

    All devices work at once, as in a step. Products are of bf16, on CPU of f32; their size doubles
    until a run takes long. Copies add a number to each element of an array. Exchanges gather an
    array on all devices; two sizes tell the bandwidth from the time that each message takes. Each
    is the median of several runs. It takes some seconds.

    Args:
        devices: to measure, or a mesh of them; by default all of this process. They count as one
            box. One device alone exchanges nothing: its chip has exchanges as fast as its memory,
            and the times that are made with it say so.
        say: is told what goes on.

    Returns:
        The chip. Its memory is so fast that `Report.time` gives a copy the time that was measured.
        Of a TPU that spmd knows only the memory is measured: the compiler's cycles go by the known
        peak.

    Raises:
        RuntimeError: a device is only described, and cannot run anything.

    Example:
        chip = spmd.inspection.calibrate()
        spmd.report(step, state, batch, chip=chip).time
    """
    given = jax.local_devices() if devices is None else getattr(devices, "devices", devices)
    found = [*np.asarray(given, dtype=object).flat]
    tell = say or (lambda text: None)
    if not all(isinstance(one, jax.Device) for one in found) or not found or is_described(found):
        failure = Failure(
            what="needs devices that can run something",
            expected="devices of this machine, such as jax.devices()",
            got=repr(found[:1])[1:-1][:200] or "none",
            error=MeshError,
        )
        raise explain("calibrate", [failure])
    first = found[0]
    tell("copies")
    hbm = _copy_speed(found) / REACHED
    known = chip_of(first.device_kind)
    if known is not None and not known.box:
        return dataclasses.replace(known, hbm=hbm)
    tell("products")
    flops = _product_speed(found)
    link, hop = hbm, 0.0
    if len(found) > 1:
        tell("exchanges")
        link, hop = _exchange_speed(found)
    return Chip(
        name=first.device_kind, flops=flops, hbm=hbm, link=link, hop=hop,
        box=len(found), across=link, doubled=known.doubled if known else (),
    )  # fmt: skip


def _seconds(run: Callable[[], Any], *, queued: bool) -> float:
    """The median of several turns, after one run that compiles.

    Args:
        run: begins what is timed.
        queued: whether a turn begins so many runs that it takes long. What the host does for one
            of them then goes on while the device does another. Virtual CPU devices share the
            host's cores, so they have one run in flight.
    """
    jax.block_until_ready(run())
    calls, taken = 1, []
    while len(taken) < _TURNS:
        start = time.perf_counter()
        last = None
        for _ in range(calls):  # a device runs them in order, and forgets all but the last
            last = run()
        jax.block_until_ready(last)
        turn = time.perf_counter() - start
        if queued and not taken and turn < _TURN and calls < _MOST_CALLS:
            calls *= 2
            continue
        taken.append(turn / calls)
    # A clock has steps; nothing takes no time.
    return max(statistics.median(taken), 1e-9)


def _is_queued(devices: Sequence[Any]) -> bool:
    return devices[0].platform != "cpu"


def _product_speed(devices: Sequence[Any]) -> float:
    """FLOPs in a second of one device, in the largest product that there is time for."""
    dtype = jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16
    multiply = jax.jit(jnp.matmul)
    size, best = _SMALLEST, 0.0
    while True:
        # Numbers that differ: a device that is fed the same ones needs less power, and is faster.
        x = jax.random.uniform(jax.random.key(0), (size, size), dtype, -1, 1)
        xs = [jax.device_put(x, device) for device in devices]
        taken = _seconds(lambda xs=xs: [multiply(x, x) for x in xs], queued=_is_queued(devices))
        best = max(best, 2 * size**3 / taken)
        # Twice the size takes eight times as long.
        if 8 * taken * (_TURNS + 1) > _BUDGET or size >= _LARGEST:
            return best
        size *= 2


def _large(devices: Sequence[Any]) -> int:
    """Elements of an array of f32 on each device that is large, and not too large for them."""
    shared = devices[0].platform == "cpu"
    nbytes = _LARGE_ON_CPU // len(devices) if shared else _LARGE
    return max(1024, nbytes // 4)


def _copy_speed(devices: Sequence[Any]) -> float:
    """Bytes in a second of one device that an addition to each element reads and writes."""
    add = jax.jit(lambda x: x + 1)
    xs = [jax.device_put(np.zeros(_large(devices), np.float32), device) for device in devices]
    return 2 * xs[0].nbytes / _seconds(lambda: [add(x) for x in xs], queued=_is_queued(devices))


def _exchange_speed(devices: Sequence[Any]) -> tuple[float, float]:
    """Bytes in a second into a device, and seconds that any exchange takes, however small."""
    mesh = Mesh(np.array(devices), ("device",))
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("device", None))
    gather = jax.jit(lambda x: x, out_shardings=whole)
    count = len(devices)
    taken, received = [], []
    for size in (16, _large(devices) // count):
        x = jax.device_put(np.zeros(size * count, np.float32), split)
        taken.append(_seconds(lambda x=x: gather(x), queued=_is_queued(devices)))
        received.append(x.nbytes * (1 - 1 / count))
    if taken[1] < 2 * taken[0]:  # what each message takes hides what the bytes take
        return received[1] / taken[1], 0.0
    speed = (received[1] - received[0]) / (taken[1] - taken[0])
    return speed, max(0.0, taken[0] - received[0] / speed)
