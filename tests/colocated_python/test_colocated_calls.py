"""Calls: values, when they return, in which order they run, and where errors go."""

import logging
import platform
import threading
import time

from colocated_tools import LONG, Gate, in_threads, like, put, same, spread
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np
import pytest

from spmd import P
from spmd.colocated_python import (
    ColocatedPythonError,
    _lanes,
    _promises,
    _waiting,
    barrier,
    colocated_python,
)

ONES = np.ones(8, np.float32)


@pytest.fixture(autouse=True)
def _all_over():
    """No test leaves calls or errors to the next."""
    yield
    barrier()


# Values


@pytest.mark.parametrize("spec", [P("x"), P(), P(None)], ids=str)
@pytest.mark.parametrize("devices", [8, 2, 1])
def test_values_and_shardings(devices, spec):
    """First, asynchronous and specialized calls return NumPy's values, placed as said."""
    x = put(np.arange(16), spread(devices, spec))
    fun = colocated_python(lambda x: {"twice": like(x, np.asarray(x) * 2), "same": x})
    stated = fun.specialize(out_specs_fn=lambda x: {"twice": x, "same": x})
    for result in (fun(x), fun(x), stated(x)):
        np.testing.assert_array_equal(result["twice"], np.arange(16) * 2)
        np.testing.assert_array_equal(result["same"], np.arange(16))
        assert result["twice"].sharding == result["same"].sharding == x.sharding
        assert result["twice"].committed
        assert not result["twice"].aval.weak_type


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "bfloat16", "float16", "complex64", "int4"]
)
def test_dtypes(dtype):
    """Results have the bits of what the function returned, sub-byte elements included."""
    values = np.array([0, 1, 1, 0, 1, 0, 0, 1]).astype(jnp.dtype(dtype))
    x = jax.device_put(values, spread())
    fun = colocated_python(lambda x: x)
    for result in (fun(x), fun(x)):
        assert result.dtype == dtype
        np.testing.assert_array_equal(np.asarray(result), values)


def test_sixty_four_bits():
    """A result of 64 bits keeps them, though the caller's setting is gone when it is made."""
    with jax.enable_x64(True):
        x = jax.device_put(np.arange(8) + 2**40, spread())
        fun = colocated_python(lambda x: x).specialize(out_specs_fn=same)
        result = fun(x)
    assert result.dtype == np.int64
    np.testing.assert_array_equal(np.asarray(result), np.arange(8) + 2**40)


def test_keys():
    """Random keys are taken and returned, at the cost of waiting for the function."""
    keys = jax.random.split(jax.random.key(0), 3)
    fun = colocated_python(lambda keys: keys)
    for result in (fun(keys), fun(keys)):
        np.testing.assert_array_equal(jax.random.key_data(result), jax.random.key_data(keys))


def test_strings():
    """Arrays of strings are taken and returned, also beside numbers, at the cost of waiting."""
    text = np.array(["abcd", "", "ü", "a" * 40, "e", "f", "g", "h"], np.dtypes.StringDType())

    def upper(x):
        found = np.array([s.upper() for s in np.asarray(x)], text.dtype)
        length = np.array([len(s) for s in found], np.int32)
        return jax.device_put((found, length), x.sharding)

    fun = colocated_python(upper)
    stated = fun.specialize(
        out_specs_fn=lambda x: (x, jax.ShapeDtypeStruct(x.shape, np.int32, sharding=x.sharding))
    )
    x = jax.device_put(text, spread())
    for words, length in (fun(x), fun(x), stated(x), stated(x)):
        assert words.sharding == length.sharding == x.sharding
        assert [*np.asarray(words)] == ["ABCD", "", "Ü", "A" * 40, "E", "F", "G", "H"]
        assert [*np.asarray(length)] == [4, 0, 1, 40, 1, 1, 1, 1]


def test_arguments_in_other_orders():
    """With devices said, each argument and result has an order of them of its own."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("x",))
    x, y = put(np.arange(8)), put(np.arange(8), jax.sharding.NamedSharding(mesh, P("x")))

    def swap(x, y):
        return y, like(x, np.asarray(x) + np.asarray(y))

    fun = colocated_python(swap).specialize(devices=jax.devices())
    stated = fun.specialize(out_specs_fn=lambda x, y: (y, x))
    for reversed_, total in (fun(x, y), fun(x, y), stated(x, y)):
        assert (reversed_.sharding, total.sharding) == (y.sharding, x.sharding)
        np.testing.assert_array_equal(reversed_, np.arange(8))
        np.testing.assert_array_equal(total, 2 * np.arange(8))
        for shard in reversed_.addressable_shards:
            assert shard.device == jax.devices()[7 - shard.index[0].start]
            np.testing.assert_array_equal(shard.data, [shard.index[0].start])


@pytest.mark.parametrize("shape", [(0, 3), (), (8, 300_000)], ids=str)
def test_sizes(shape):
    """Empty, scalar and large results (those have programs of their own) arrive."""
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    spec = P("x") if shape and shape[0] else P()
    x = put(values, spread(8, spec))
    fun = colocated_python(lambda x: (x, x)).specialize(out_specs_fn=lambda x: (x, x))
    for result in jax.tree.leaves([fun(x), fun(x)]):
        np.testing.assert_array_equal(result, values)
        assert result.sharding == x.sharding


def test_result_on_reversed_devices():
    """Shards go to the devices that their sharding names, in whatever order it does."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("x",))
    x = put(np.arange(8), jax.sharding.NamedSharding(mesh, P("x")))
    fun = colocated_python(lambda x: x).specialize(out_specs_fn=same)
    for shard in fun(x).addressable_shards:
        assert shard.device == jax.devices()[7 - shard.index[0].start]
        np.testing.assert_array_equal(shard.data, [shard.index[0].start])


def test_programs_inside():
    """A function may compute with JAX, on one device and on all of them."""
    x = put(ONES)
    fun = colocated_python(lambda x: x + jnp.sum(x))
    np.testing.assert_array_equal(fun(x), ONES + 8)
    np.testing.assert_array_equal(fun(x), ONES + 8)


def test_arguments_are_the_callers():
    """The function gets arrays in the memory of the caller's, large and small."""
    for shape in ((8,), (8, 1 << 20)):
        x = put(np.zeros(shape))
        pointers = [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
        seen = []

        def fun(x, seen=seen):
            seen.append([s.data.unsafe_buffer_pointer() for s in x.addressable_shards])

        fun = colocated_python(fun)
        fun(x)
        fun(x)
        barrier()
        assert seen == [pointers, pointers]


def test_metadata():
    """A wrapped function has the name, text and signature of its function."""

    def scale(x, *, by=2):
        """Scales."""

    wrapped = colocated_python(scale)
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == ("scale", "Scales.", scale)
    assert repr(wrapped) == "<spmd.colocated_python of `scale`>"
    stated = wrapped.specialize(devices=jax.devices())
    assert stated.__name__ == "scale"


def test_keyword_arguments():
    """Keywords reach the function by name, and are part of what it is known by."""
    x = put(ONES)
    fun = colocated_python(lambda x, *, y=None: x if y is None else y)
    np.testing.assert_array_equal(fun(x), ONES)
    np.testing.assert_array_equal(fun(x, y=put(ONES * 3)), ONES * 3)
    fun = colocated_python(lambda x, **others: others["self"] - x)  # the name of one of ours
    np.testing.assert_array_equal(fun(x, self=put(ONES * 3)), ONES * 2)


# Asynchrony


@pytest.mark.parametrize("devices", [8, 1])
def test_a_call_returns_before_its_function(devices):
    """Arrays are there while the function waits, other programs run, and consumers are started."""
    gate, x = Gate(), put(ONES, spread(devices))
    fun = colocated_python(gate).specialize(out_specs_fn=same)
    y = fun(x)
    assert gate.began.wait(LONG)
    assert not y.is_ready()
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(x), ONES + 1)  # on the same devices
    z = jax.jit(lambda y: y + 1)(y)
    assert not z.is_ready()
    gate.go.set()
    np.testing.assert_array_equal(z, ONES * 3)


def test_the_second_call_of_a_function_that_is_not_specialized():
    """The first call ends with its function; the second returns before it."""
    gate, x = Gate(), put(ONES)
    fun = colocated_python(gate)
    gate.go.set()
    fun(x)
    assert gate.ended.is_set()
    gate.go.clear()
    gate.began.clear()
    y = fun(x)
    assert gate.began.wait(LONG)
    assert not y.is_ready()
    gate.go.set()
    np.testing.assert_array_equal(y, ONES * 2)


def test_arguments_that_are_not_ready():
    """A call with the result of a pending call returns, and its function gets it when ready."""
    gate, x = Gate(), put(ONES)
    first = colocated_python(gate).specialize(out_specs_fn=same)
    second = colocated_python(lambda x: like(x, np.asarray(x) + 1)).specialize(out_specs_fn=same)
    y = second(first(x))
    assert not y.is_ready()
    gate.go.set()
    np.testing.assert_array_equal(y, ONES * 3)


def test_many_pending_calls():
    """More calls than XLA lets wait for a device are in flight, and all get their values."""
    gate, x = Gate(), put(ONES[:1], spread(1))
    wait = colocated_python(gate).specialize(out_specs_fn=same)
    add = colocated_python(lambda x: like(x, np.asarray(x) + 1)).specialize(out_specs_fn=same)
    results = [wait(x)]
    for _ in range(60):
        results.append(add(results[-1]))
    assert not results[-1].is_ready()
    np.testing.assert_array_equal(jnp.ones(3) + 1, [2, 2, 2])
    gate.go.set()
    assert [float(r[0]) for r in results] == [2.0 + i for i in range(61)]


# Order


def test_programs_after_a_rest(caplog):
    """A function that computes on all devices after its call returned is told of, once.

    The next call returns when the function has.
    """
    gate, x, ended = Gate(), put(ONES), []

    def compute(x):
        y = gate(x) + 1
        ended.append(1)
        return y

    fun = colocated_python(compute).specialize(out_specs_fn=same)
    y = fun(x)
    assert gate.began.wait(LONG)
    gate.go.set()
    np.testing.assert_array_equal(y, ONES * 3)
    assert [r.getMessage() for r in caplog.records] == [
        "colocated_python of `compute` has started a program on several devices after its call "
        "had returned: if a program that needs its result was started before, both wait for ever; "
        "wait for the result of the first call before it is used: later ones return when the "
        "function has"
    ]
    for i in range(3):
        np.testing.assert_array_equal(fun(x), ONES * 3)
        assert len(ended) == i + 2
    assert len(caplog.records) == 1


class Tells(logging.Handler):
    """Calls a function for each record."""

    def __init__(self, tell):
        super().__init__()
        self.tell = tell

    def emit(self, record):
        self.tell(record.getMessage())


def test_a_function_that_waits_for_its_caller_is_told_of(monkeypatch):
    """Who waits for a function that rests is told why, once, and goes on when it has returned."""
    monkeypatch.setattr(_waiting, "_PATIENCE", 0.05)
    x, go, told = put(ONES), threading.Event(), []

    def waits(x):
        y = x + 1
        go.wait(20)
        return y

    fun = colocated_python(waits)
    go.set()
    fun(x)
    go.clear()
    handler = Tells(lambda text: (told.append(text), go.set()))
    _waiting.logger.addHandler(handler)
    try:
        np.testing.assert_array_equal(fun(x), ONES + 1)
    finally:
        _waiting.logger.removeHandler(handler)
    assert told == [
        "colocated_python of `waits` rests, and its caller waits for it, since it has started "
        "programs on several devices: such a function must not wait for what its caller does after "
        "the call"
    ]


def test_programs_of_other_functions():
    """A function that starts no program is not waited for, whatever others do."""
    gate, x = Gate(), put(ONES)
    gate.go.set()
    fun = colocated_python(gate)
    colocated_python(lambda x: x * 2)(x)
    fun(x)
    assert not fun._habit.meets
    gate.go.clear()
    assert not fun(x).is_ready()
    gate.go.set()


def test_a_look_for_nans_goes_on():
    """What the process has JAX do with each result is done in functions, too."""
    x, divide = put(np.zeros(8)), jax.jit(lambda x: x / x)
    divide(x)
    divide(x)
    before = jax.config.values["jax_debug_nans"]
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError, match="nan"):
            colocated_python(divide)(x)
    finally:
        jax.config.update("jax_debug_nans", before)


def test_program_order():
    """Calls of one thread run in order, with results and without, sharded and not."""
    log = []

    @colocated_python
    def note(x):
        log.append(int(np.asarray(x).flat[0]))

    @colocated_python
    def give(x):
        log.append(int(np.asarray(x).flat[0]))
        return x

    for start in range(0, 40, 4):
        note(put(np.full(8, start)))
        give(put(np.full(8, start + 1)))
        note(put(start + 2, SingleDeviceSharding(jax.devices()[3])))
        give(put(start + 3, SingleDeviceSharding(jax.devices()[5])))
    barrier()
    assert log == list(range(40))


def test_threads_overlap():
    """Functions that were called from different threads run at the same time."""
    both = threading.Barrier(2)

    def meet(x):
        both.wait(LONG)
        return x

    fun = colocated_python(meet).specialize(out_specs_fn=same)
    x = put(ONES)
    for result in in_threads(*[lambda: np.asarray(fun(x))] * 2):
        np.testing.assert_array_equal(result, ONES)


def spare():
    """The programs that an idle lane has started for the next call."""
    barrier()
    with _lanes.lanes._changed:
        return next((x.spares[0] for x in reversed(_lanes.lanes._idle) if x.spares), None)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
@pytest.mark.parametrize("devices", [8, 1])
def test_a_call_takes_programs_that_have_started(devices, seconds):
    """The second call returns the array that was made after the first one or beside it."""

    def slow(x):
        time.sleep(seconds)
        return like(x, np.asarray(x) + 1)

    fun = colocated_python(slow).specialize(out_specs_fn=same)
    for i in range(4):
        started = spare()
        y = fun(put(np.full(8, i, np.float32), spread(devices)))
        np.testing.assert_array_equal(y, np.full(8, i + 1))
        if i:
            assert started.promise.number not in _promises._promises
            assert started.outputs is spare().outputs


@pytest.mark.slow
def test_calls_unlike_the_last_one():
    """Programs that have started for another function, shape or sharding are given up."""
    twice = colocated_python(lambda x: like(x, np.asarray(x) * 2)).specialize(out_specs_fn=same)
    more = colocated_python(lambda x: like(x, np.asarray(x) + 1)).specialize(out_specs_fn=same)
    for i in range(3):
        for size in (8, 16):
            for spec in (P("x"), P()):
                x = put(np.full(size, i, np.float32), spread(8, spec))
                ys = twice(x), more(x), twice(x)
                for y, value in zip(ys, (2 * i, i + 1, 2 * i), strict=True):
                    np.testing.assert_array_equal(y, np.full(size, value))
                    assert y.sharding == x.sharding
    _promises.all_arrived(LONG)
    assert not _promises._promises


@pytest.mark.slow
def test_programs_for_no_call_end(monkeypatch):
    """When no call comes, what has started for one ends, and its place is free."""
    monkeypatch.setattr(_lanes, "_KEPT", 0.05)
    fun = colocated_python(lambda x: x).specialize(out_specs_fn=same)
    fun(put(ONES))
    barrier()
    _promises.all_arrived(LONG)
    assert not _promises._promises
    assert spare() is None
    assert not any(lane.gates for lane in _lanes.lanes._all)
    assert not +_lanes.lanes._load
    np.testing.assert_array_equal(fun(put(ONES)), ONES)


def test_large_results_are_not_made_in_advance():
    """What takes much memory is made for calls alone."""
    x = put(np.zeros((8, 1 << 18), np.float32))
    fun = colocated_python(lambda x: x).specialize(out_specs_fn=same)
    fun(x).block_until_ready()
    fun(x).block_until_ready()
    assert spare() is None or spare().outputs.specs.leaves[0].shape != x.shape


def test_a_call_inside_of_a_call():
    """A colocated function calls others, itself included, and waits for those it called."""
    x, log = put(ONES), []
    inner = colocated_python(lambda x: log.append("inner"))

    @colocated_python
    def outer(x, y=None):
        inner(x)
        inner(x)
        barrier()
        log.append("outer")
        return x if y is not None else outer(x, x)

    np.testing.assert_array_equal(outer(x), ONES)
    assert log == ["inner", "inner", "outer"] * 2


def test_a_function_that_calls_itself():
    """Its first call may need others of the same kind, before it is known what it returns."""
    left = [5]

    @colocated_python
    def down(x):
        left[0] -= 1
        return x if left[0] <= 0 else down(x)

    np.testing.assert_array_equal(down(put(ONES)), ONES)
    assert left == [0]


# Discovery


def test_concurrent_first_calls_discover_once():
    """Of eight first calls at once one finds out what is returned; the others are not first."""
    running, most, lock = [0], [0], threading.Lock()
    ready = []

    def fun(x):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            ready.append(wrapped._functions.find(key()).outputs is None)
        with lock:
            running[0] -= 1
        return x

    def key():
        return next(iter(wrapped._functions._fast))

    wrapped = colocated_python(fun)
    x = put(ONES)
    for result in in_threads(*[lambda: np.asarray(wrapped(x))] * 8):
        np.testing.assert_array_equal(result, ONES)
    assert (ready.count(True), len(ready)) == (1, 8)


def test_a_failing_first_call_caches_nothing():
    """The error of a first call is its caller's; the next call finds out, and later are async."""
    fails = [True, True, False, False]

    def fun(x):
        if fails.pop(0):
            raise KeyError("missing")
        return x

    wrapped = colocated_python(fun)
    for _ in range(2):
        with pytest.raises(KeyError, match="missing") as caught:
            wrapped(put(ONES))
    host = f"process 0 ({platform.node()})"
    assert caught.value.__notes__[0] == f"raised by colocated_python of `fun` on {host}"
    np.testing.assert_array_equal(wrapped(put(ONES)), ONES)
    np.testing.assert_array_equal(wrapped(put(ONES)), ONES)


def test_a_failing_first_call_releases_who_waits():
    """Threads that wait for a first call which fails try by themselves."""
    calls, lock = [], threading.Lock()

    def fun(x):
        with lock:
            calls.append(1)
            if len(calls) <= 3:
                raise ValueError(f"call {len(calls)}")
        return x

    wrapped = colocated_python(fun)
    x = put(ONES)
    results = in_threads(*[lambda: np.asarray(wrapped(x))] * 6)
    errors = sorted(str(r) for r in results if isinstance(r, ValueError))
    assert errors == ["call 1", "call 2", "call 3"]
    assert len(calls) == 6


# Errors


def test_an_error_is_raised_by_the_array():
    """It names function, host and line; later calls and programs work."""

    def broken(x):
        raise ValueError("no such file")

    fun = colocated_python(broken).specialize(out_specs_fn=lambda x: (x, x))
    one, two = fun(put(ONES))
    for y in (one, two):
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            y.block_until_ready()
        text = str(caught.value)
        line = broken.__code__.co_firstlineno + 1
        assert text.startswith(
            f"UNKNOWN: colocated_python of `broken` failed on process 0 ({platform.node()}).\n"
            f'  ValueError: no such file\n  File "{__file__}", line {line}, in broken\n'
        )
        assert "/_calls.py" not in text
    np.testing.assert_array_equal(put(ONES) + 1, ONES * 2)
    fine = colocated_python(lambda x: x).specialize(out_specs_fn=same)
    np.testing.assert_array_equal(fine(put(ONES)), ONES)


@pytest.mark.slow
def test_an_error_of_a_large_result():
    """Parts that have programs of their own fail as well, and leave nothing behind."""

    def broken(x):
        raise ValueError("large")

    x = put(np.zeros((8, 1 << 18)))
    y = colocated_python(broken).specialize(out_specs_fn=same)(x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="large"):
        y.block_until_ready()
    for shard in y.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError, match="large"):
            shard.data.block_until_ready()
    barrier()
    _promises.all_arrived(LONG)
    assert not _promises._promises


def test_an_argument_that_failed():
    """A call with the result of a failed one fails with its error; the function does not run."""
    ran = []

    def broken(x):
        raise ValueError("first")

    first = colocated_python(broken).specialize(out_specs_fn=same)
    second = colocated_python(lambda x: ran.append(1) or x).specialize(out_specs_fn=same)
    y = second(first(put(ONES)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)`<lambda>` failed.*Error: first"):
        y.block_until_ready()
    assert not ran


def test_errors_without_results(caplog):
    """Errors of functions without results are logged at once, and raised by the next barrier."""

    def note(x):
        raise OSError(f"disk {int(np.asarray(x)[0])} full")

    fun = colocated_python(note).specialize(out_specs_fn=lambda x: None)
    with caplog.at_level(logging.ERROR):
        fun(put(ONES))
        fun(put(ONES * 2))
        with pytest.raises(ColocatedPythonError) as caught:
            barrier()
    host = f"process 0 ({platform.node()})"
    assert str(caught.value) == (
        f"colocated_python of `note` failed on {host}: OSError: disk 1 full.\n"
        f"colocated_python of `note` failed on {host}: OSError: disk 2 full."
    )
    assert isinstance(caught.value.__cause__, OSError)
    assert [r.getMessage() for r in caplog.records] == ["colocated_python of `note` failed"] * 2
    barrier()


def test_a_function_that_ends_its_thread():
    """What is no Exception is an error of the call, too."""

    def leave(x):
        raise SystemExit(3)

    y = colocated_python(leave).specialize(out_specs_fn=same)(put(ONES))
    with pytest.raises(jax.errors.JaxRuntimeError, match="SystemExit: 3"):
        y.block_until_ready()
    np.testing.assert_array_equal(colocated_python(lambda x: x)(put(ONES)), ONES)
