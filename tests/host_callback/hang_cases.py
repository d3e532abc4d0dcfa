"""One row of the table of hangs: ``hang_cases.py CORES LAYOUT WAY TOUCH SIZE...``.

It runs in a process of its own, on so many cores. Each size goes through one program, many in
flight, and several threads. What is about to run is printed first, so that whoever has to kill
this process knows where it stood.
"""

import os
import sys
import threading

if hasattr(os, "sched_setaffinity"):  # before XLA counts the cores for its threads
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

import spmd
from spmd import P, host_callback as hcb, pjit

LARGE = 2**24  # bytes, from which on a program does no arithmetic on its operand
MESH = spmd.make_mesh({"x": 8})
PLAIN = jax.sharding.Mesh(MESH.devices, MESH.axis_names)


class Host:
    """A host function that counts its calls and, if it touches its argument, adds it up."""

    def __init__(self, touch):
        self.touch = touch
        self.lock = threading.Lock()
        self.calls = self.total = 0

    def tap(self, arg, transforms=(), **_):
        """Adds up what arrived, as a tap."""
        del transforms
        total = int(np.asarray(arg).sum()) if self.touch else 0
        with self.lock:
            self.calls += 1
            self.total += total

    def call(self, arg, **_):
        """The same, with a result."""
        self.tap(arg)
        return np.float32(1)


def handed_over(host, x, way):
    """Hands `x` to the host function, in one of the ways; returns ones."""
    per_shard = way.endswith("per_shard")
    if way.startswith("call"):
        return hcb.call(host.call, x, result_shape=np.float32(0), per_shard=per_shard)
    hcb.id_tap(host.tap, x, per_shard=per_shard)
    return jnp.float32(1)


def steps(size):
    """How often a program hands its operand over."""
    return 1 if size >= LARGE else 2


def program(host, spec, way, size):
    """A step with collectives before, between and after its host functions; all ones stay ones."""

    def body(x, ones, total):
        for _ in range(steps(size)):
            y = x if size >= LARGE else x * (total(ones) / 8).astype(x.dtype)
            ones = ones * (total(ones) / 8) * handed_over(host, y, way).mean()
        return total(ones), x[:1].sum().astype(jnp.float32)

    def of_shards(x, ones):
        ones, first = body(x, ones, lambda v: lax.psum(v.sum(), "x"))
        return ones, lax.pmax(first, "x")

    if not way.endswith("shard_map"):
        return pjit(lambda x, ones: body(x, ones, jnp.sum), (spec, P("x")), P(), mesh=MESH)
    specs = (spec, P("x"))
    return jax.jit(
        jax.shard_map(of_shards, mesh=PLAIN, in_specs=specs, out_specs=P(), check_vma=False)
    )


def started(run, args, flight, many):
    """Starts programs without waiting; returns their results."""
    if flight == "one":
        return [run(*args)]
    if flight == "many":
        return [run(*args) for _ in range(many)]
    outs = []
    count = min(4, many)
    gate = threading.Barrier(count)

    def work():
        gate.wait()
        outs.extend([run(*args) for _ in range(many // count)])

    workers = [threading.Thread(target=work) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outs


def operand(size, spec):
    """Ones of so many bytes, or one byte per device where that is less than can be split."""
    dtype = np.float32 if size >= 32 else np.uint8
    count = max(size // np.dtype(dtype).itemsize, 8 if spec else 1)
    return jax.device_put(np.ones(count, dtype), NamedSharding(PLAIN, spec))


def main(layout, way, touch, *sizes):
    """Runs one row."""
    spec = P("x") if layout == "sharded" else P()
    copies = 8 if way.endswith(("per_shard", "shard_map")) else 1
    parts = 8 if layout == "sharded" and copies == 8 else 1
    ones = jax.device_put(np.ones(8, np.float32), NamedSharding(PLAIN, P("x")))
    host = Host(touch == "touching")
    for size in map(int, sizes):
        x = operand(size, spec)
        run = program(host, spec, way, size)
        for flight in ("one", "many", "threads"):
            print(f"{layout} {way} {touch} {size} {flight}", flush=True)
            host.calls = host.total = 0
            outs = started(run, (x, ones), flight, 2 if size >= LARGE else 16)
            hcb.barrier_wait()
            calls = len(outs) * steps(size) * copies
            assert host.calls == calls, (host.calls, calls)
            assert host.total == (calls * x.size // parts if host.touch else 0), host.total
            assert [tuple(map(float, out)) for out in outs] == [(8.0, 1.0)] * len(outs)
    print("passed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[2:])
