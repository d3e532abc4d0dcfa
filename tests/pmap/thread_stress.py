"""Everything that threads do with `spmd.pmap`: ``thread_stress.py stress LIMIT SECONDS``."""

import copy
import functools
import gc
import pickle
import random
import time

import jax
from jax import lax
import numpy as np
import pytest
from thread_tools import N, X, free, in_threads, live, main, same, settled

import spmd
from spmd import pmap
from spmd._pmap import _api


def scaled(x, n):
    """Scales by a static number, and adds what all have together."""
    return x * np.float32(n) + lax.psum(x, "i")


SCALED = pmap(scaled, "i", static_broadcasted_argnums=1)
GROW = pmap(lambda x: x + 1, donate_argnums=0)
TREES = pmap(
    lambda t, y: {"sum": t["a"] + lax.pmean(y, "i"), "y": y}, "i", in_axes=(0, 1), out_axes=-1
)
NESTED = pmap(lambda x: pmap(lambda y: y + lax.psum(y, ("i", "j")), "j")(x), "i")
SHARED = [SCALED, GROW, TREES, NESTED]


class Worker:
    """One thread of the long run; each action is a method that begins with `do_`."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.own = pmap(scaled, "i", static_broadcasted_argnums=1)
        self.kept = []
        self.done = dict.fromkeys(ACTIONS, 0)

    def run(self, end):
        """Acts until the time is over."""
        while time.monotonic() < end:
            (name,) = self.random.choices([*ACTIONS], [*ACTIONS.values()])
            getattr(self, f"do_{name}")()
            self.done[name] += 1
        return self.done

    def array(self, *shape, dtype=np.float32):
        """Whole numbers, by NumPy, or on a device, or on all."""
        size = (N, *shape)
        x = np.array([self.random.randrange(8) for _ in range(np.prod(size))], dtype).reshape(size)
        where = self.random.randrange(3)
        if where == 1:
            return x, jax.device_put(x, self.random.choice(jax.devices()))
        return x, GROW_FROM(x) if where == 2 else x

    def do_call(self):
        """A signature of many, by a shared function or an own one."""
        x, given = self.array(self.random.randrange(1, 7))
        n = self.random.randrange(3)
        fun = self.random.choice([SCALED, self.own])
        same(fun(given, n), x * n + x.sum(0))

    def do_tree(self):
        """Trees, an axis that is not the first, and one counted from the end."""
        a, given = self.array(2)
        y = np.arange(2 * N, dtype=np.float32).reshape(2, N)
        out = TREES({"a": given}, y)
        same(out["sum"], (a + y.mean(1)).T)
        same(out["y"], y)

    def do_donate(self):
        """A donated array is gone, and says so."""
        x, _ = self.array(self.random.randrange(1, 4))
        first = GROW(x)
        same(GROW(first), x + 2)
        with pytest.raises(spmd.DonatedArrayError):
            GROW(first)

    def do_nest(self):
        """Two levels."""
        if N < 2:
            return
        x = np.arange(N, dtype=np.float32).reshape(2, N // 2) + self.random.randrange(5)
        same(NESTED(x), x + x.sum())

    def do_make(self):
        """A function that is made, called and dropped, now and then with itself in a cycle."""
        k = np.float32(self.random.randrange(5))
        fun = pmap(lambda x: x + k + lax.psum(k, "i"), "i")
        fun.me = fun if self.random.random() < 0.5 else None
        x, given = self.array()
        same(fun(given), x + k + N * k)
        if self.random.random() < 0.3:
            self.kept = [*self.kept[-2:], fun]

    def do_copy(self):
        """A copy has no programs, and computes the same."""
        by = [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))]
        other = self.random.choice(by)(self.own)
        assert other._cache_size == 0
        x, given = self.array()
        same(other(given, 2), x * 2 + x.sum())
        assert other._cache_size <= 1  # another thread may have cleared all

    def do_fail(self):
        """A trace that fails, and a program that does not compile."""

        def fails(x):
            if x.ndim:
                raise ValueError("no")
            return jax.ffi.ffi_call("spmd_none", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

        fun = pmap(fails)
        for x, said in ((X[:, None], "no"), (X, "spmd_none")):
            with pytest.raises((ValueError, RuntimeError), match=said):
                fun(x)
        assert fun._cache_size == 0

    def do_hook(self):
        """A hook sees each call."""
        fun, told = pmap(scaled, "i", static_broadcasted_argnums=1), []
        fun.add_post_hook(lambda *call: told.append(call[0]))
        x, given = self.array()
        for n in (1, 1, 2):
            same(fun(given, n), x * n + x.sum())
        assert told == [fun] * 3

    def do_grad(self):
        """A derivative."""
        x, _ = self.array()
        out, pull = jax.vjp(lambda x: SCALED(x, 2), x)
        same(out, 2 * x + x.sum())
        same(pull(out)[0], 2 * np.asarray(out) + np.asarray(out).sum())

    def do_trace(self):
        """A call in a trace."""
        assert (
            jax.eval_shape(jax.vmap(lambda x: SCALED(x, 1)), np.ones((2, N), np.float32)).ndim == 2
        )
        SCALED._debug_cache_keys()
        SCALED.explain_miss(X, 1)

    def do_clear(self):
        """Programs are forgotten."""
        self.random.choice([*SHARED, self.own]).clear_cache()

    def do_clear_all(self):
        """All programs are forgotten, of all threads."""
        jax.clear_caches()

    def do_collect(self):
        """A collection."""
        gc.collect()


#: What a thread does, and how often.
ACTIONS = {
    "call": 40, "tree": 8, "donate": 8, "nest": 6, "make": 8, "copy": 3, "fail": 3, "hook": 3,
    "grad": 4, "trace": 3, "clear": 1, "clear_all": 0.2, "collect": 2,
}  # fmt: skip

GROW_FROM = pmap(lambda x: x)
SHARED.append(GROW_FROM)


def stress(seconds):
    """Everything at once; at the end the counts are those of a hand count."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50, 3, 3)
    before = live()
    end = time.monotonic() + float(seconds)
    workers = [Worker(seed) for seed in range(8)]
    found = in_threads([functools.partial(w.run, end) for w in workers])
    for error in found:
        if isinstance(error, BaseException):
            raise error
    gc.set_threshold(*thresholds)
    total = {name: sum(done[name] for done in found) for name in ACTIONS}
    print(total)
    assert all(total[name] for name in ACTIONS if float(seconds) >= 30), total
    assert live() == before + len(workers) + sum(len({*w.kept}) for w in workers)
    del workers, found
    assert live() == before
    assert len(_api._lines) == len(SHARED)
    free()
    for fun in SHARED:
        fun.clear_cache()
    rows = [np.ones((N, k), np.float32) for k in (1, 2, 3)]
    calls = [functools.partial(SCALED, x, n) for x in rows for n in (0, 1)] * 2
    counts = spmd.counts()
    for call, out in zip(calls, in_threads(calls), strict=True):
        x, n = call.args
        same(out, x * n + N)
    settled(SCALED, 6)
    assert (spmd.counts() - counts).compiles <= 6  # one is for a program that JAX still has
    for fun in SHARED[1:]:
        settled(fun, 0)


if __name__ == "__main__":
    main(globals())
