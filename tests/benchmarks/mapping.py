"""A repeated call of a mapped function on 8 devices, against `jax.pmap` and our own `pjit`."""

from collections.abc import Iterator

import jax
import numpy as np

from spmd import P, pjit, pmap

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


def run(turns: int) -> Iterator[Result]:
    """All comparisons of mapped functions."""
    x = np.zeros((8, 4), np.float32)
    hundred = tuple(x + i for i in range(100))
    yield _versus_stock("1 argument", (x,), 0.95, turns, 100)
    yield _versus_stock("100 arguments", hundred, 1.00, turns, 10)
    yield _versus_stock("1 NumPy argument", (x,), 1.00, turns, 20, placed=False)
    yield _versus_pjit(turns, 100)
