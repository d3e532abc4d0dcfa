"""Colocated Python: when a call returns, and what one costs end to end."""

from collections.abc import Callable, Iterator
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from spmd import P
from spmd.colocated_python import barrier, colocated_cpu_devices, colocated_python

from .paired import Result, compare

_MB64 = (16, 1024, 1024)  # of float32
_AT_ONCE = 300e-6  # seconds


def _put(values: np.ndarray, devices: int) -> jax.Array:
    there = colocated_cpu_devices(jax.devices())
    mesh = jax.sharding.Mesh(np.array(there[:devices]), ("x",))
    spec = P(None, "x") if values.ndim > 1 else P("x")
    return jax.device_put(values, NamedSharding(mesh, spec))


def _specialized(fun: Callable) -> Callable:
    return colocated_python(fun).specialize(out_specs_fn=lambda x: x)


def _returns(name: str, fun: Callable, x: jax.Array, turns: int) -> Result:
    """The seconds until a call returns; nothing of an earlier one is left then."""
    call = _specialized(fun)
    call(x).block_until_ready()
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        y = call(x)
        times.append(time.perf_counter() - start)
        y.block_until_ready()
        barrier()
    return Result(
        name=name,
        ours=float(np.median(times)),
        peer=_AT_ONCE,
        ratios=[t / _AT_ONCE for t in times],
        target=1.0,
    )


def _sleeper(x: jax.Array) -> jax.Array:
    time.sleep(0.01)
    return x


def _nothing(x: jax.Array) -> jax.Array:
    return x


def _runner(call: Callable, x: jax.Array) -> Callable[[int], None]:
    def run(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(call(x))

    return run


def _end_to_end(devices: int, turns: int) -> Result:
    x = _put(np.ones(8, np.float32), devices)

    @jax.jit
    def stock(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    name = f"nothing, end to end, {devices} devices, vs pure_callback"
    ours = _runner(_specialized(_nothing), x)
    return compare(name, ours, _runner(stock, x), target=3.0, turns=turns, calls=20)


def _overlapped(turns: int) -> Result:
    """A host function beside device work in the same time: as long as the longer of the two."""
    seconds = 1.0

    def host(x):
        time.sleep(seconds)
        return x

    x = _put(np.ones(8, np.float32), 8)
    call = _specialized(host)
    w = jnp.ones((400, 400), jnp.float32)
    step = jax.jit(lambda w: jax.lax.fori_loop(0, 200, lambda _, w: jnp.tanh(w @ w), w))
    jax.block_until_ready((step(w), call(x)))

    def both(_: int) -> None:
        y = call(x)
        jax.block_until_ready((step(w), y))

    def longer(_: int) -> None:
        start = time.perf_counter()
        jax.block_until_ready(step(w))
        time.sleep(max(0.0, seconds - (time.perf_counter() - start)))

    return compare("1 s beside device work, vs the longer", both, longer, target=1.1, turns=turns)


def _large(devices: int, turns: int) -> Result:
    """64 MB there and back, beside one copy of them by XLA."""
    x = _put(np.ones(_MB64, np.float32), devices)
    pointers = [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]

    def host(x):
        assert [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] == pointers
        return x

    copy = jax.jit(jnp.copy)
    name = f"64 MB there and back, {devices} devices, vs a copy"
    ours = _runner(_specialized(host), x)
    return compare(name, ours, _runner(copy, x), target=None, turns=turns)


def run(turns: int) -> Iterator[Result]:
    """Yields one result per comparison."""
    counts = sorted({1, min(8, jax.device_count())})
    for devices in counts:
        x = _put(np.ones(8, np.float32), devices)
        yield _returns(f"a call that takes 10 ms returns, {devices} devices", _sleeper, x, turns)
        yield _returns(f"a call that does nothing returns, {devices} devices", _nothing, x, turns)
    few = max(5, turns // 5)
    yield from (_end_to_end(devices, few) for devices in counts)
    yield _overlapped(3)
    yield from (_large(devices, few) for devices in counts)
