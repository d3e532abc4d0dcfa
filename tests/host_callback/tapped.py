"""What the tests of host functions share: a log of their calls, and the ways to run a program."""

import contextlib

import jax
import numpy as np
from oracle import mesh_of

from spmd import host_callback as hcb, pjit


class Log:
    """The calls of host functions, in their order: ``(name, argument, transforms)``."""

    def __init__(self):
        self.calls = []
        self._taps = {}

    def host(self, name):
        """The host function of this name, one and the same for each name."""

        def tapped(arg, transforms):
            self.calls.append((name, arg, transforms))

        return self._taps.setdefault(name, tapped)

    def tap(self, name, arg, **options):
        """A tap of this name."""
        return hcb.id_tap(self.host(name), arg, **options)

    def take(self):
        """Waits for all host functions; returns the calls since the last time."""
        hcb.barrier_wait()
        calls, self.calls = self.calls, []
        return calls

    def values(self):
        """As `take`, without the transformations."""
        return [(name, arg) for name, arg, _ in self.take()]

    def scalars(self):
        """As `take`, names and Python numbers or lists of them."""
        return [(name, jax.tree.map(lambda x: x.tolist(), arg)) for name, arg, _ in self.take()]


def by_pjit(fun):
    """On two devices, of which the first calls."""
    return pjit(fun, mesh=mesh_of({"a": 2}))


#: Ways to run one program whose taps have one order.
WAYS = {"eager": lambda fun: fun, "jit": jax.jit, "pjit": by_pjit}


def run(fun, *args):
    """Runs a program to its end; returns its results as NumPy arrays."""
    return jax.tree.map(np.asarray, jax.block_until_ready(fun(*args)))


def same(got, want):
    """Asserts that two trees have equal structure, dtypes and values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        np.testing.assert_array_equal(g, w)


@contextlib.contextmanager
def inline():
    """Eager calls run host functions in this thread."""
    hcb.configure(inline=True)
    try:
        yield
    finally:
        hcb.configure()
