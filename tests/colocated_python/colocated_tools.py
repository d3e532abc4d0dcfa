"""What the tests of colocated Python share."""

import threading

import jax
from jax.sharding import NamedSharding
import numpy as np

from spmd import P

#: Seconds that one thread waits for another at most.
LONG = 30


_SPLIT = P("x")


def spread(count=8, spec=_SPLIT):
    """A sharding over so many devices."""
    return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:count]), ("x",)), spec)


def put(values, sharding=None):
    """An array of float32, by default spread over all devices."""
    return jax.device_put(np.asarray(values, np.float32), sharding or spread())


def like(x, values):
    """An array of other values that lies as `x` does, made without a program."""
    return jax.device_put(np.asarray(values, x.dtype), x.sharding)


def same(*specs):
    """An `out_specs_fn`: the result is as the first argument."""
    return specs[0]


def in_threads(*works):
    """Runs functions in threads that start together; returns what each returned or raised."""
    start = threading.Barrier(len(works))
    found = [None] * len(works)

    def run(i, work):
        start.wait(LONG)
        try:
            found[i] = work()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG)
        assert not thread.is_alive(), "a thread hangs"
    return found


class Gate:
    """A host function that waits until it is let go, and says when it begins and ends."""

    def __init__(self):
        self.began, self.go, self.ended = (threading.Event() for _ in range(3))

    def __call__(self, x):
        self.began.set()
        assert self.go.wait(LONG)
        self.ended.set()
        return like(x, np.asarray(x) * 2)
