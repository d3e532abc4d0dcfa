"""A repeated call with rightly placed arguments, against `jax.jit` and `jax.pmap`."""

from collections.abc import Callable, Iterator

import jax
from jax.sharding import NamedSharding
import numpy as np

from spmd import P, pjit

from .paired import Result, compare


def mesh(n: int) -> jax.sharding.Mesh:
    """The first `n` devices in a row."""
    return jax.sharding.Mesh(np.array(jax.devices()[:n]), ("x",))


def add(*args):
    """A program that takes no time."""
    return jax.tree.map(lambda x: x + 1, args)


def repeat(f: Callable, args: tuple) -> Callable[[int], None]:
    """Calls a function so many times with these arguments, and waits once."""

    def run(calls: int) -> None:
        for _ in range(calls):
            out = f(*args)
        jax.block_until_ready(out)

    return run


def _versus_jit(name: str, devices: int, values: tuple, turns: int, calls: int) -> Result:
    sharding = NamedSharding(mesh(devices), P("x"))
    args = jax.device_put(values, sharding)
    ours = pjit(add, in_axis_resources=P("x"), out_axis_resources=P("x"), mesh=mesh(devices))
    peer = jax.jit(add, in_shardings=sharding, out_shardings=sharding)
    return compare(
        f"call, {name}, vs jax.jit",
        repeat(ours, args),
        repeat(peer, args),
        target=1.05,
        turns=turns,
        calls=calls,
    )


def _versus_pmap(name: str, values: tuple, turns: int, calls: int) -> Result:
    ours = pjit(add, in_axis_resources=P("x"), out_axis_resources=P("x"), mesh=mesh(8))
    peer = jax.pmap(add)
    placed = jax.device_put(values, NamedSharding(mesh(8), P("x")))
    peers = peer(*values)  # its own results lie as it wants its arguments
    return compare(
        f"call, {name}, vs jax.pmap",
        repeat(ours, placed),
        repeat(peer, peers),
        target=1.00,
        turns=turns,
        calls=calls,
    )


def _donating(name: str, devices: int, values: tuple, turns: int, calls: int) -> Result:
    """A state that is donated and fed back, as in a training loop."""
    sharding = NamedSharding(mesh(devices), P("x"))
    options = {"in_shardings": sharding, "out_shardings": sharding, "donate_argnums": 0}

    def loop(f: Callable) -> Callable[[int], None]:
        state = jax.jit(add, out_shardings=sharding)(*values)

        def run(calls: int) -> None:
            nonlocal state
            for _ in range(calls):
                state = f(state)
            jax.block_until_ready(state)

        return run

    def step(state):
        return add(*state)

    return compare(
        f"call, donated {name}, vs jax.jit",
        loop(pjit(step, **options)),
        loop(jax.jit(step, **options)),
        target=1.10,
        turns=turns,
        calls=calls,
    )


def _gradient(name: str, devices: int, count: int, turns: int, calls: int) -> Result:
    """An eager gradient: forward half, backward half, and what JAX does around both."""
    sharding = NamedSharding(mesh(devices), P("x"))
    values = [np.full((8, 4), i, np.float32) for i in range(count)]

    def loss(*args):
        return sum((jax.numpy.sin(x) * x).sum() for x in args)

    def gradient(f: Callable) -> Callable:
        return jax.grad(f, argnums=tuple(range(count)))

    args = jax.device_put(values, sharding)
    ours = pjit(loss, in_axis_resources=P("x"), out_axis_resources=None, mesh=mesh(devices))
    whole = NamedSharding(mesh(devices), P())
    peer = jax.jit(loss, in_shardings=sharding, out_shardings=whole)
    return compare(
        f"eager jax.grad, {name}",
        repeat(gradient(ours), tuple(args)),
        repeat(gradient(peer), tuple(args)),
        target=1.05,
        turns=turns,
        calls=calls,
    )


def run(turns: int) -> Iterator[Result]:
    """All comparisons of calls, those of 8 devices where there are so many."""
    x = np.zeros((8, 4), np.float32)
    hundred = tuple(x + i for i in range(100))
    tree = ({f"layer{i}": {f"w{j}": x for j in range(10)} for i in range(100)},)
    yield _versus_jit("1 argument on 1 device", 1, (x,), turns, 500)
    yield _donating("1 leaf on 1 device", 1, (x,), turns, 500)
    yield _donating("100 leaves on 1 device", 1, hundred, turns, 50)
    yield _gradient("1 argument on 1 device", 1, 1, turns, 20)
    yield _gradient("20 arguments on 1 device", 1, 20, turns, 5)
    if jax.device_count() < 8:
        return
    yield _versus_jit("1 argument on 8 devices", 8, (x,), turns, 100)
    yield _versus_jit("100 arguments on 8 devices", 8, hundred, turns, 10)
    yield _versus_jit("1,000 leaves on 8 devices", 8, tree, turns, 2)
    yield _donating("1 leaf on 8 devices", 8, (x,), turns, 100)
    yield _donating("100 leaves on 8 devices", 8, hundred, turns, 10)
    yield _gradient("1 argument on 8 devices", 8, 1, turns, 10)
    yield _versus_pmap("1 argument on 8 devices", (x,), turns, 100)
    yield _versus_pmap("100 arguments on 8 devices", hundred, turns, 10)
