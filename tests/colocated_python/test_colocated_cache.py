"""Which calls share what is known of a function, and what is left of functions that are gone."""

import gc
import weakref

from colocated_tools import put, same, spread
import jax
import numpy as np
import pytest

import spmd
from spmd import P
from spmd.colocated_python import barrier, colocated_python, colocated_python_class
from spmd.colocated_python._calls import fast_key

ONES = np.ones(8, np.float32)


def counted():
    """A function, and how often it was asked for its results' specs."""
    asked = []
    fun = colocated_python(lambda x: x)
    return fun.specialize(out_specs_fn=lambda x: asked.append(x) or x), asked


def test_equal_shardings_share():
    """Shardings that are equal and not identical find the same entry, each by the slow way once."""
    fun, asked = counted()
    one, two = put(ONES, spread()), put(ONES, spread())
    assert one.sharding is not two.sharding
    functions = fun._functions
    key = [fast_key(jax.tree.structure(((x,), {})), [x]) for x in (one, two)]
    fun(one)
    assert functions.find(key[0]) is not None
    assert functions.find(key[1]) is None
    fun(two)
    assert functions.find(key[1]) is not None
    assert functions.find(key[0]) is None
    assert (len(asked), len(functions), len(functions._fast)) == (1, 1, 1)


def test_every_difference_is_another_entry():
    """Tree, shape, dtype and sharding tell calls apart."""
    fun, asked = counted()
    arrays = [
        put(ONES),
        put(np.ones(16)),
        jax.device_put(np.ones(8, np.int32), spread()),
        put(ONES, spread(8, P())),
        put(ONES, spread(4)),
    ]
    for _ in range(2):
        for x in arrays:
            fun(x)
    assert len(asked) == len(fun._functions) == 5


def test_identities_are_of_living_shardings():
    """What a fast key names is held as long as the key is there, so no other has its place."""
    fun, _ = counted()
    for _ in range(200):
        fun(put(ONES, spread()))
        ((key, function),) = fun._functions._fast.items()
        assert key[1][0][2] == id(function.held[0])
    assert len(fun._functions) == 1


@pytest.mark.parametrize("clear", [jax.clear_caches, spmd.clear_caches])
def test_clearing(clear):
    """Both ways of clearing forget what is known; the next call finds it out."""
    fun, asked = counted()
    x = put(ONES)
    fun(x)
    fun(x)
    assert len(asked) == 1
    clear()
    assert len(fun._functions) == 0
    np.testing.assert_array_equal(fun(x), ONES)
    assert len(asked) == 2


def test_clearing_while_a_call_is_in_flight():
    """A call that is made finishes."""
    fun, _ = counted()
    results = []
    for _ in range(20):
        results.append(fun(put(ONES)))
        spmd.clear_caches()
    for result in results:
        np.testing.assert_array_equal(result, ONES)


def test_no_cycles():
    """A function, its entries and its arguments go with the last reference to them."""

    def make(x):
        def host(x):
            return x

        stated = colocated_python(host).specialize(out_specs_fn=same)
        plain = colocated_python(host)
        for fun in (stated, plain, plain):
            jax.block_until_ready(fun(x))
        return [weakref.ref(o) for o in (host, stated, plain)]

    x = put(ONES)
    gc.collect()
    gc.disable()
    try:
        refs = make(x)
        barrier()
        _idle_lanes_forget()
        assert [r() for r in refs] == [None] * 3
    finally:
        gc.enable()


def test_no_cycles_of_errors():
    """An error holds no call, and a failed call no arguments, once its array is gone."""

    class Token:
        pass

    token = Token()
    ref = weakref.ref(token)

    def host(x, token=token):
        raise ValueError

    del token
    gc.collect()
    gc.disable()
    try:
        fun = colocated_python(host).specialize(out_specs_fn=same)
        with pytest.raises(jax.errors.JaxRuntimeError):
            fun(put(ONES)).block_until_ready()
        barrier()
        del fun, host
        _idle_lanes_forget()
        assert ref() is None
    finally:
        gc.enable()


def _idle_lanes_forget():
    """What a thread took last is gone when it took the next."""
    colocated_python(lambda x: x).specialize(out_specs_fn=same)(put(ONES)).block_until_ready()
    barrier()


def _objects():
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.soak])]
)
def test_no_leak(count):
    """So many functions and objects, called and dropped, leave no more than a few do."""

    class Adder:
        def __init__(self, k):
            self.k = k

        def get(self, x):
            return x

    adders = colocated_python_class(Adder)
    x = put(ONES[:1], spread(1))

    def rounds(n):
        for i in range(n):
            y = colocated_python(lambda x: x).specialize(out_specs_fn=same)(x)
            if i % 10 == 0:
                y = adders(1).get(y)
        jax.block_until_ready(y)
        barrier()

    rounds(30)
    before = _objects()
    rounds(count)
    assert _objects() - before < 100
