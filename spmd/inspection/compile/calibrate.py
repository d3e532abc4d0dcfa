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
from spmd.inspection.timing.chips import Chip, chip_of

#: Seconds that a measurement may take; sizes double until one run takes a tenth of it.
_BUDGET = 2.0
_TURNS = 7


def calibrate(
    devices: Sequence[Any] | None = None, *, say: Callable[[str], None] | None = None
) -> Chip:
    """Measures what the devices of this process can do, for ``chip=``.

    Products are of bf16, on CPU of f32; their size doubles until a run takes long enough to be
    measured. Copies add a number to each element of an array. Exchanges gather an array on all
    devices; two sizes tell the bandwidth from the time that each message takes. Each is the median
    of several runs. It takes some seconds.

    Args:
        devices: to measure; by default all of this process. They count as one box.
        say: is told what goes on.

    Returns:
        The chip. Of a TPU that spmd knows, peak and clock are the known ones, since the compiler's
        cycles go by them.

    Raises:
        RuntimeError: a device is only described, and cannot run anything.

    Example:
        chip = spmd.inspection.calibrate()
        spmd.report(step, state, batch, chip=chip).time
    """
    found = [*(jax.local_devices() if devices is None else devices)]
    tell = say or (lambda text: None)
    if not found or not all(hasattr(device, "memory_stats") for device in found):
        failure = Failure(what="needs devices that can run something", error=MeshError)
        raise explain("calibrate", [failure])
    first = found[0]
    tell("products")
    flops = _product_speed(first)
    tell("copies")
    hbm = _copy_speed(first)
    link, hop = hbm, 0.0
    if len(found) > 1:
        tell("exchanges")
        link, hop = _exchange_speed(found)
    known = chip_of(first.device_kind)
    if known is not None and not known.box:
        return dataclasses.replace(known, hbm=hbm)
    return Chip(
        name=first.device_kind, flops=flops, hbm=hbm, link=link, hop=hop,
        box=len(found), across=link,
    )  # fmt: skip


def _seconds(run: Callable[[], Any]) -> float:
    """The median of several runs, after one that compiles."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(_TURNS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _product_speed(device: Any) -> float:
    """FLOPs in a second of the largest product that there is time for."""
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    multiply = jax.jit(jnp.matmul)
    size, best = 256, 0.0
    while True:
        x = jax.device_put(np.ones((size, size), dtype), device)
        taken = _seconds(lambda x=x: multiply(x, x))
        best = max(best, 2 * size**3 / taken)
        if taken * _TURNS * 8 > _BUDGET or size >= 16_384:
            return best
        size *= 2


def _copy_speed(device: Any) -> float:
    """Bytes in a second that an addition to each element reads and writes."""
    add = jax.jit(lambda x: x + 1)
    size = 2**24
    while True:
        x = jax.device_put(np.zeros(size, np.float32), device)
        taken = _seconds(lambda x=x: add(x))
        if taken * _TURNS * 2 > _BUDGET / 10 or size >= 2**28:
            return 2 * x.nbytes / taken
        size *= 2


def _exchange_speed(devices: Sequence[Any]) -> tuple[float, float]:
    """Bytes in a second into a device, and seconds that any exchange takes, however small."""
    mesh = Mesh(np.array(devices), ("device",))
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("device", None))
    gather = jax.jit(lambda x: x, out_shardings=whole)
    count = len(devices)
    taken, received = [], []
    for size in (2**10, 2**24):
        x = jax.device_put(np.zeros(size * count, np.float32), split)
        taken.append(_seconds(lambda x=x: gather(x)))
        received.append(x.nbytes * (1 - 1 / count))
    speed = (received[1] - received[0]) / max(taken[1] - taken[0], 1e-9)
    return speed, max(0.0, taken[0] - received[0] / speed)
