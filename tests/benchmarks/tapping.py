"""Taps against `jax.debug.callback`, ordered and not: until the host functions have run.

What may hang or abort runs in a process of its own, under a hard limit; there "no result" is one.
"""

from collections.abc import Callable, Iterator
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from spmd import P, host_callback as hcb

from .paired import Result, compare

_MB64 = (16, 1024, 1024)  # of float32
_HARD_LIMIT = 120  # seconds


def _nothing(value, transforms=()):
    """A host function that does nothing."""


def _touch(value, transforms=()):
    """A host function that looks at what it gets."""
    np.asarray(value)


def _ours(host: Callable) -> Callable:
    return lambda x: hcb.id_tap(host, x)


def _stock(host: Callable, *, ordered: bool) -> Callable:
    return lambda x: jax.debug.callback(host, x, ordered=ordered)


def _runner(program: Callable, x: jax.Array, barrier: Callable) -> Callable[[int], None]:
    def run(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(program(x))
            barrier()

    return run


def _many(tap: Callable) -> Callable:
    def program(x):
        for _ in range(100):
            x = x + 1
            tap(x)
        return x

    return jax.jit(program)


def _loop(tap: Callable) -> Callable:
    def step(_, x):
        tap(x)
        return x + 1

    return jax.jit(lambda x: jax.lax.fori_loop(0, 2000, step, x))


def _large(tap: Callable) -> Callable:
    def program(x):
        tap(x)
        return x[0, 0, 0]

    return jax.jit(program)


def _versus_stock(
    name: str, make: Callable, host: Callable, x: jax.Array, target: float, turns: int
) -> Iterator[Result]:
    ours = _runner(make(_ours(host)), x, hcb.barrier_wait)
    for ordered in (False, True):
        peer = _runner(make(_stock(host, ordered=ordered)), x, jax.effects_barrier)
        title = f"{name}, vs debug.callback{', ordered' * ordered}"
        yield compare(title, ours, peer, target=target, turns=turns)


def _sharded() -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    return jax.device_put(jnp.ones(_MB64, jnp.float32), NamedSharding(mesh, P("x")))


def _per_shard(x: jax.Array, host: Callable) -> Callable[[int], None]:
    def shard(value, transforms, *, shard):
        host(value)

    def program(x):
        hcb.id_tap(shard, x, per_shard=True)
        return x[:, :1, :1]

    return _runner(jax.jit(program), x, hcb.barrier_wait)


def _by_shard_map(x: jax.Array, host: Callable) -> Callable[[int], None]:
    def local(x):
        jax.debug.callback(host, x)
        return x[:, :1, :1]

    mesh = x.sharding.mesh
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    return _runner(program, x, jax.effects_barrier)


def _sleeper(*_, **__):
    time.sleep(0.01)


def _slow(turns: int) -> Result:
    """How long the device program takes; the host functions are waited for between the turns."""

    def timed(program: Callable, barrier: Callable) -> tuple[Callable, list[float]]:
        spent: list[float] = []
        x = jnp.float32(0)
        jax.block_until_ready(program(x))
        barrier()

        def run() -> None:
            start = time.perf_counter()
            jax.block_until_ready(program(x))
            spent.append(time.perf_counter() - start)
            barrier()

        return run, spent

    ours, our_times = timed(_many(_ours(_sleeper)), hcb.barrier_wait)
    peer, peer_times = timed(_many(_stock(_sleeper, ordered=True)), jax.effects_barrier)
    for _ in range(max(3, turns // 10)):
        ours()
        peer()
    return Result(
        name="100 taps that sleep 10 ms: device, vs ordered",
        ours=float(np.median(our_times)),
        peer=float(np.median(peer_times)),
        ratios=[a / b for a, b in zip(our_times, peer_times, strict=True)],
        target=0.10,
    )


def _dispatch(turns: int) -> Iterator[Result]:
    """What a program pays per call for having a tap, and that one without pays nothing."""
    for devices in sorted({1, min(8, jax.device_count())}):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
        x = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P("x")))

        def never(x):
            zero = x.sum() * 0
            jax.lax.cond(zero > 0, lambda: (hcb.id_tap(_nothing, zero), None)[1], lambda: None)
            return x + 1

        def stock(x):
            zero = x.sum() * 0
            jax.lax.cond(
                zero > 0,
                lambda: jax.debug.callback(_nothing, zero),
                lambda: None,
            )
            return x + 1

        def plain(x):
            return x + 1 + x.sum() * 0

        tapped, stocked = jax.jit(never), jax.jit(stock)
        ours = _runner(tapped, x, lambda: None)
        yield compare(
            f"a tap that is not reached, {devices} devices, vs debug.callback",
            ours,
            _runner(stocked, x, lambda: None),
            target=None,
            turns=turns,
            calls=20,
        )
        yield compare(
            f"a tap that is not reached, {devices} devices, vs none",
            ours,
            _runner(jax.jit(plain), x, lambda: None),
            target=None,
            turns=turns,
            calls=20,
        )


_WHOLE = """
import json, os, sys, time
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=8")
import jax, numpy as np
from benchmarks import tapping
x = tapping._sharded()
if sys.argv[1] == "stock":
    tap = lambda x: jax.debug.callback(tapping._nothing, x)
    run = tapping._runner(tapping._large(tap), x, jax.effects_barrier)
else:
    run = tapping._per_shard(x, tapping._nothing)
run(2)
times = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    run(1)
    times.append(time.perf_counter() - start)
print(json.dumps(times))
"""


def _alone(which: str, turns: int) -> list[float] | None:
    """The times of a process of its own; None where it did not end in time, or aborted."""
    tests = pathlib.Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    command = [sys.executable, "-c", _WHOLE, which, str(turns)]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, timeout=_HARD_LIMIT, check=True, text=True
        )
    except subprocess.SubprocessError:
        return None
    return json.loads(done.stdout.splitlines()[-1])


def _versus_whole(turns: int) -> Result | str:
    name = "64 MB on 8, per_shard, vs debug.callback of all"
    ours, peer = _alone("spmd", turns), _alone("stock", turns)
    if ours is None:
        return f"{name}: no result of ours"
    if peer is None:
        return f"{name}: no result of the peer within {_HARD_LIMIT} s; ours {np.median(ours):.4f} s"
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    medians = float(np.median(ours)), float(np.median(peer))
    return Result(name=name, ours=medians[0], peer=medians[1], ratios=ratios, target=0.20)


def run(turns: int) -> Iterator[Result | str]:
    """Yields one result per comparison."""
    zero = jnp.float32(0)
    yield from _versus_stock("100 scalar taps", _many, _nothing, zero, 0.30, turns)
    few = max(5, turns // 5)
    yield from _versus_stock("2,000 in a fori_loop", _loop, _nothing, zero, 0.30, few)
    large = jnp.ones(_MB64, jnp.float32)
    yield from _versus_stock("64 MB on one device", _large, _touch, large, 0.50, few)
    yield from _versus_stock("64 MB, not looked at", _large, _nothing, large, 0.50, few)
    if jax.device_count() == 8:
        yield from _of_shards(few)
    yield _slow(turns)
    yield from _dispatch(few)


def _of_shards(few: int) -> Iterator[Result | str]:
    x = _sharded()
    for host, how in ((_touch, ""), (_nothing, ", not looked at")):
        title = f"64 MB on 8, per_shard{how}, vs shard_map"
        yield compare(
            title, _per_shard(x, host), _by_shard_map(x, host), target=0.60, turns=2 * few
        )
    yield _versus_whole(few)
