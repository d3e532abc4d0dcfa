"""A repeated call of a mapped function on 8 devices, against `jax.pmap` and our own `pjit`.

Of threads each waits for its results: with more in flight stock JAX may hang.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax import lax
import numpy as np

from spmd import P, pjit, pmap, shard_at, unstack

from .dispatch import add, mesh, repeat
from .paired import Result, compare


def _versus_stock(
    name: str, values: tuple, target: float, turns: int, calls: int, *, placed: bool = True
) -> Result:
    """Arguments are results of each, which lie as it wants them, or NumPy arrays."""
    ours, peer = pmap(add), jax.pmap(add)
    return compare(
        f"pmap, {name}, vs jax.pmap",
        repeat(ours, ours(*values) if placed else values),
        repeat(peer, peer(*values) if placed else values),
        target=target,
        turns=turns,
        calls=calls,
    )


def _versus_pjit(turns: int, calls: int) -> Result:
    values = (np.zeros((8, 4), np.float32),)
    ours = pmap(add)
    peer = pjit(add, in_axis_resources=P("x"), out_axis_resources=P("x"), mesh=mesh(8))
    return compare(
        "pmap, 1 argument, vs spmd.pjit",
        repeat(ours, ours(*values)),
        repeat(peer, peer(*values)),
        target=1.05,
        turns=turns,
        calls=calls,
    )


def _weighted(w: jax.Array, x: jax.Array) -> jax.Array:
    """What one device computes: a residual, a collective, and an argument of each kind."""
    return jax.numpy.sin(w * x) * lax.pmean(x, "i")


def _transformed(turns: int) -> Iterator[Result]:
    """Eager derivatives and vmap, of functions that are transformed anew at each call."""
    w, x = np.ones(8, np.float32), np.ones((8, 4), np.float32)
    grads = {"grad": jax.grad, "value_and_grad": jax.value_and_grad}
    for name in (*grads, "vjp", "jvp", "linearize", "vmap"):
        ours, peer = pmap(_weighted, "i"), jax.pmap(_weighted, "i")
        placed = pmap(lambda w, x: (w, x))(w, x)

        def work(mapped: Callable, name: str = name, placed: Any = placed) -> Callable[[int], None]:
            def once() -> Any:
                if name in grads:
                    return grads[name](lambda w, x: mapped(w, x).sum())(*placed)
                if name == "vjp":
                    out, back = jax.vjp(mapped, *placed)
                    return back(out)
                if name == "jvp":
                    return jax.jvp(mapped, placed, placed)
                if name == "linearize":
                    return jax.linearize(mapped, *placed)[1](*placed)
                return jax.vmap(mapped, in_axes=(None, 1))(placed[0], placed[1])

            def run(calls: int) -> None:
                for _ in range(calls):
                    jax.block_until_ready(once())

            return run

        yield compare(
            f"{name} of pmap, vs jax.pmap",
            work(ours),
            work(peer),
            target=1.05,
            turns=turns,
            calls=5,
        )


def _in_threads(pool: ThreadPoolExecutor, fun: Callable, value: jax.Array) -> Callable:
    def work(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(fun(value))

    def run(calls: int) -> None:
        for done in [pool.submit(work, calls) for _ in range(8)]:
            done.result()

    return run


def _threads(turns: int) -> Result:
    x = np.zeros((8, 4), np.float32)
    ours, peer = pmap(lambda x: x + 1), jax.pmap(lambda x: x + 1)
    with ThreadPoolExecutor(8) as pool:
        return compare(
            "pmap, 8 threads with 20 calls each, vs jax.pmap",
            _in_threads(pool, ours, ours(x)),
            _in_threads(pool, peer, peer(x)),
            target=1.00,
            turns=turns,
            calls=20,
        )


def _slices(turns: int) -> Iterator[Result]:
    x = pmap(lambda x: x + 1)(np.zeros((8, 1024), np.float32))

    def repeated(work: Callable) -> Callable[[int], None]:
        def run(calls: int) -> None:
            for _ in range(calls):
                jax.block_until_ready(work(x))

        return run

    whole = repeated(list)
    at, indexed = repeated(lambda x: shard_at(x, 0)), repeated(lambda x: x[0])
    name = "shard_at(x, 0), vs x[0]"
    yield compare(name, at, indexed, target=0.20, turns=turns, calls=20)
    yield compare("unstack(x), vs list(x)", repeated(unstack), whole, target=None, turns=turns)


def run(turns: int) -> Iterator[Result]:
    """All comparisons of mapped functions."""
    x = np.zeros((8, 4), np.float32)
    hundred = tuple(x + i for i in range(100))
    yield _versus_stock("1 argument", (x,), 0.95, turns, 100)
    yield _versus_stock("100 arguments", hundred, 1.00, turns, 10)
    yield _versus_stock("1 NumPy argument", (x,), 1.00, turns, 20, placed=False)
    yield _versus_pjit(turns, 100)
    yield from _transformed(turns)
    yield _threads(turns)
    yield from _slices(turns)
