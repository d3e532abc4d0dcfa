"""Classes: when their objects are made, what they share, when they go."""

import gc
import pickle
import threading
import weakref

from colocated_tools import LONG, in_threads, like, put, same
import jax
import numpy as np
import pytest

from spmd.colocated_python import barrier, colocated_python_class

ONES = np.ones(8, np.float32)


class Counter:
    """Counts."""

    made = 0

    def __init__(self, start, *, step=1):
        type(self).made += 1
        self.count, self.step = start, step

    def add(self, x):
        """Adds a step; returns `x` times the count."""
        self.count += self.step
        return like(x, np.asarray(x) * self.count)

    def __call__(self, x):
        return self.add(x)

    @staticmethod
    def twice(x):
        return like(x, np.asarray(x) * 2)

    @classmethod
    def kind(cls, x):
        assert cls is Counter
        return x

    def nothing(self, x):
        self.count += 100


@pytest.fixture
def counter():
    """The wrapped class; the count of its objects starts anew."""
    Counter.made = 0
    yield colocated_python_class(Counter)
    barrier()


def test_the_constructor_is_deferred(counter):
    """It runs with the first method that is called, once, with the arguments that were given."""
    c = counter(10, step=2)
    assert Counter.made == 0
    np.testing.assert_array_equal(c.add(put(ONES)), ONES * 12)
    np.testing.assert_array_equal(c.add(put(ONES)), ONES * 14)
    np.testing.assert_array_equal(c.add(put(np.ones(16))), np.ones(16) * 16)
    assert Counter.made == 1


def test_methods_share_state(counter):
    """All methods work on one object, those without results included; objects share nothing."""
    one, two = counter(0), counter(50)
    x = put(ONES)
    one.nothing(x)
    one.nothing(x)
    np.testing.assert_array_equal(one(x), ONES * 201)
    np.testing.assert_array_equal(two(x), ONES * 51)
    np.testing.assert_array_equal(counter.add(one, x), ONES * 202)
    assert Counter.made == 2


def test_a_keyword_argument_may_have_any_name():
    """Names of our own parameters are free for those of a constructor and of a method."""

    class Sums:
        def __init__(*args, **given):
            args[0].given = given

        def __call__(*args, **others):
            mine, x = args
            return x + mine.given["self"] + mine.given["wrapper"] + others["wrapper"]

    sums, x = colocated_python_class(Sums)(self=1, wrapper=2), put(np.ones(8, np.float32))
    np.testing.assert_array_equal(sums(x, wrapper=x), 5 * np.ones(8))


def test_static_and_class_methods(counter):
    """They are called as Python calls them."""
    c = counter(0)
    np.testing.assert_array_equal(c.twice(put(ONES)), ONES * 2)
    np.testing.assert_array_equal(c.kind(put(ONES)), ONES)


def test_methods_can_be_specialized():
    """A specialized method returns before it has run, its constructor included."""
    began, go = threading.Event(), threading.Event()

    class Slow:
        def __init__(self):
            began.set()
            assert go.wait(LONG)

        def get(self, x):
            return x

    obj = colocated_python_class(Slow)()
    y = obj.get.specialize(out_specs_fn=same)(put(ONES))
    assert began.wait(LONG)
    assert not y.is_ready()
    go.set()
    np.testing.assert_array_equal(y, ONES)


def test_one_constructor_for_all_threads():
    """However many threads call first, one object is made."""
    made = []

    class Single:
        def __init__(self):
            made.append(self)

        def get(self, x):
            return x

        def other(self, x):
            return x

    for _ in range(10):
        made.clear()
        obj = colocated_python_class(Single)()
        x = put(ONES)
        works = [lambda: np.asarray(obj.get(x)), lambda: np.asarray(obj.other(x))] * 3  # noqa: B023 - run before obj changes
        for result in in_threads(*works):
            np.testing.assert_array_equal(result, ONES)
        assert len(made) == 1


def test_a_constructor_that_fails():
    """Its error is that of the call; the next call tries again."""
    fails = [True, False]

    class Fragile:
        def __init__(self):
            if fails.pop(0):
                raise OSError("busy")

        def get(self, x):
            return x

    obj = colocated_python_class(Fragile)()
    with pytest.raises(OSError, match="busy"):
        obj.get(put(ONES))
    np.testing.assert_array_equal(obj.get(put(ONES)), ONES)


def test_destruction_waits_for_calls():
    """The object goes when its wrapper and its calls have, and not in the thread that let go."""
    gone, go = threading.Event(), threading.Event()
    where = []

    class Held:
        def __del__(self):
            where.append(threading.current_thread().name)
            gone.set()

        def get(self, x):
            assert go.wait(LONG)
            assert not gone.is_set()
            return x

    obj = colocated_python_class(Held)()
    results = [obj.get.specialize(out_specs_fn=same)(put(ONES)) for _ in range(3)]
    ref = weakref.ref(obj)
    gc.disable()
    try:
        del obj
        assert ref() is None
        assert not gone.is_set()
        go.set()
        for y in results:
            np.testing.assert_array_equal(y, ONES)
        assert gone.wait(LONG)
    finally:
        gc.enable()
    assert len(where) == 1
    assert where[0].startswith("spmd.colocated_python")


def test_an_object_that_was_never_made():
    """A wrapper whose methods were not called leaves nothing, and makes nothing."""
    made = []

    class Lazy:
        def __init__(self):
            made.append(1)

        def get(self, x):
            return x

    obj = colocated_python_class(Lazy)()
    ref = weakref.ref(obj)
    del obj
    assert ref() is None
    assert not made


def test_metadata(counter):
    """Class and methods have the names, texts and signatures of the original."""
    assert (counter.__name__, counter.__doc__) == ("Counter", "Counts.")
    assert counter.__module__ == __name__
    c = counter(0)
    assert c.add.__doc__ == Counter.add.__doc__
    assert repr(c.add) == "<spmd.colocated_python of `Counter.add`>"
    assert c.add is c.add


def test_wrong_constructor_arguments(counter):
    """They are refused where they are given, before any host is asked."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'stride'"):
        counter(0, stride=2)


def test_errors_name_the_method(counter):
    """Checks and failures say which method of which class it was."""
    c = counter(0)
    with pytest.raises(ValueError, match=r"^colocated_python of `Counter.add` cannot take arg"):
        c.add(ONES)
    with pytest.raises(ValueError, match=r"cannot take argument x\."):
        c.add(ONES)
    y = c.add.specialize(out_specs_fn=lambda x: (x, x))(put(ONES))[0]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"`Counter.add` returned another tree"):
        y.block_until_ready()


def test_attributes_stay_on_the_hosts(counter):
    """An attribute is no method; a wrapper is not pickled."""
    c = counter(0)
    with pytest.raises(AttributeError) as caught:
        _ = c.count
    assert str(caught.value) == (
        "'Counter' object has no method 'count' here: its attributes are on the hosts, where its "
        "methods can return them"
    )
    with pytest.raises(TypeError, match="cannot pickle 'Counter' object: what it stands for"):
        pickle.dumps(c)
