"""What the tests of host functions share: a log of their calls, and the ways to run a program."""

import contextlib
from typing import Any, NamedTuple

import jax
import numpy as np
from oracle import mesh_of
import pytest

from spmd import P, host_callback as hcb, pjit


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


class Seen(NamedTuple):
    """One call of a host function."""

    arg: Any
    transforms: Any
    device: Any
    shard: Any


class Listener:
    """A host function that keeps the calls that it gets, in order."""

    def __init__(self):
        self._seen = []

    def __call__(self, arg, transforms=(), *, device=None, shard=None):
        self._seen.append(Seen(arg, transforms, device, shard))

    def take(self):
        """Waits, and returns the calls since the last time."""
        hcb.barrier_wait()
        seen, self._seen = self._seen, []
        return seen

    def tap(self, arg, **options):
        """Taps a value into this listener, with the device."""
        return hcb.id_tap(self, arg, tap_with_device=True, **options)

    def shards(self, arg, **options):
        """Taps every shard of a value into this listener."""
        return self.tap(arg, per_shard=True, **options)


def by_pjit(fun):
    """On two devices, of which the first calls."""
    return pjit(fun, mesh=mesh_of({"a": 2}))


def by_shard_map(fun, mesh):
    """Wraps a function of one shard."""
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    spec = P("x")
    return jax.jit(jax.shard_map(fun, mesh=plain, in_specs=spec, out_specs=spec, check_vma=False))


#: Ways to run one program whose taps have one order.
WAYS = {"eager": lambda fun: fun, "jit": jax.jit, "pjit": by_pjit}


def mainly(ways):
    """The ways as parameters: the default run has `jit`, and leaves the others to the slow one."""
    return [pytest.param(way, marks=[pytest.mark.slow] * (way != "jit")) for way in ways]


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
