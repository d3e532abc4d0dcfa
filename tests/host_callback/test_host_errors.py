"""Host functions that fail: what is said where, and that all goes on afterwards."""

import functools
import gc
import logging
import threading
import traceback
import weakref

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from oracle import mesh_of, put
from own_process import run_alone
import pytest
from tapped import by_shard_map

from spmd import P, SpmdError, host_callback as hcb, pjit

X = np.arange(8, dtype=np.float32)


MORE = ("eager", "the last device", "pjit")
WAYS = (
    "one device",
    "eight devices",
    "shard_map",
    *(pytest.param(w, marks=pytest.mark.slow) for w in MORE),
)


def wrapped(fun, mesh, way):
    """A function of `X` in one of the ways, bound to its argument."""
    split = put(X, mesh, P("x"))
    run, x = {
        "eager": (fun, X),
        "one device": (jax.jit(fun), X),
        "the last device": (jax.jit(fun), jax.device_put(X, mesh.devices[7])),
        "eight devices": (jax.jit(fun), split),
        "pjit": (pjit(fun, P("x"), P("x"), mesh=mesh), X),
        "shard_map": (by_shard_map(fun, mesh), split),
    }[way]
    return functools.partial(run, x)


def no_luck(v):
    """A host function that fails."""
    raise ValueError(f"no luck with {v.dtype}")


def calling(host, **options):
    """A function of `X` that depends on the result of a host function."""
    return lambda x: hcb.call(host, x * 2, result_shape=x, **options) + 1


def good(x):
    """A function of `X` with a call that succeeds."""
    return hcb.call(lambda v: v + 1, x, result_shape=x) * 3


def surfaced(run):
    """Runs what must fail; returns what is raised where the result is waited for."""
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(run())
    return str(raised.value)


def at_barrier():
    """Returns what the barrier raises, which it does once."""
    with pytest.raises(hcb.CallbackException) as raised:
        hcb.barrier_wait()
    hcb.barrier_wait()
    return raised.value


def all_devices_work():
    """Each device runs a program of its own, and all of them one together."""
    for device in jax.devices():
        x = jax.device_put(X, device)
        np.testing.assert_array_equal(np.asarray(jnp.cumsum(x)), np.cumsum(X))
    split = put(X, mesh_of({"x": 8}), P("x"))
    assert float(jax.jit(jnp.sum)(split)) == X.sum()


# What a call says


def short(v):
    """Returns less than it should."""
    return v[:-1].copy()


def rounded(v):
    """Returns integers."""
    return v.astype(np.int32)


def listed(v):
    """Returns another tree."""
    return [v, v]


def text(v):
    """Returns no numbers."""
    return str(v.dtype)


def nothing(v):
    """Forgets its return statement."""
    del v


LENGTH = {True: 1, False: 8}  # of what a shard_map has, and of the whole
MISMATCHES = {
    short: ("result = f32[{n}]", "result = f32[{m}]"),
    rounded: ("result = f32[{n}]", "result = i32[{n}]"),
    listed: ("a tree PyTreeDef(*)", "a tree PyTreeDef([*, *])"),
    text: ("result = f32[{n}]", "result = <U7[]"),
    nothing: ("a tree PyTreeDef(*)", "a tree PyTreeDef(None)"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("host", MISMATCHES, ids=lambda h: h.__name__)
def test_a_result_of_the_wrong_kind(host, way, row):
    """Shape, dtype or tree: both exceptions name the function, what was expected and given."""
    said = surfaced(wrapped(calling(host), row, way))
    n = LENGTH[way == "shard_map"]
    expected, got = (s.format(n=n, m=n - 1) for s in MISMATCHES[host])
    wanted = (
        f"call of `{host.__name__}` got another result than its result_shape says.\n"
        f"  expected  {expected}\n  got       {got}"
    )
    assert wanted in said
    error = at_barrier()
    assert wanted in str(error)
    assert isinstance(error.__cause__, TypeError)
    assert str(error.__cause__) == wanted
    np.testing.assert_array_equal(np.asarray(wrapped(good, row, way)()), (X + 1) * 3)
    all_devices_work()


def test_no_shape_where_something_is_returned():
    """Who leaves result_shape out is told to say it."""
    said = surfaced(lambda: jax.jit(lambda x: hcb.call(lambda x: x + 1, x))(X))
    assert "\n  expected  a tree PyTreeDef(None)\n  got       a tree PyTreeDef(*)\n" in said
    assert "call(f, x, result_shape=...)" in said
    with pytest.raises(hcb.CallbackException):
        hcb.barrier_wait()


@pytest.mark.parametrize(
    ("given", "hints"), [((8,), True), ([8], False), ((8, 8), False), ((8.0,), False)], ids=str
)
def test_a_shape_where_an_example_is_due(given, hints):
    """Who gives a shape, which is a tuple of scalars, is told how to say it."""
    said = surfaced(lambda: jax.jit(lambda x: hcb.call(short, x, result_shape=given))(X))
    fix = (
        "\n  got       a tree PyTreeDef(*)\n  fix       a tuple of numbers is a tuple of scalar "
        "results; for one array pass jax.ShapeDtypeStruct(shape, dtype)"
    )
    assert (fix in said) == hints
    with pytest.raises(hcb.CallbackException):
        hcb.barrier_wait()


def test_the_wrong_leaf_of_a_tree_is_named():
    """Of several results the one that is wrong is named by its path."""

    def host(v):
        return {"a": v, "b": (v, v.sum())}

    shape = {"a": X, "b": (X, X)}
    said = surfaced(jax.jit(lambda: hcb.call(host, X, result_shape=shape)))
    assert "expected  result['b'][1] = f32[8]\n  got       result['b'][1] = f32[]" in said
    at_barrier()


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_in_a_call(way, row):
    """It surfaces where the result is waited for, with its traceback, and at the barrier."""
    said = surfaced(wrapped(calling(no_luck), row, way))
    assert "call of `no_luck` raised ValueError: no luck with float32\nTraceback" in said
    assert "in no_luck\n" in said
    error = at_barrier()
    count = "8 exceptions" if way == "shard_map" else "one exception"
    last = "The last one was" if way == "shard_map" else "It was"
    head = f"Host functions raised {count} since the last barrier_wait. {last}:\nTraceback"
    assert str(error).startswith(head)
    assert "in no_luck\n" in str(error)
    assert str(error).rstrip().endswith("ValueError: no luck with float32")
    assert type(error.__cause__) is ValueError
    frames = traceback.extract_tb(error.__cause__.__traceback__)
    assert frames[-1].name == "no_luck"
    np.testing.assert_array_equal(np.asarray(wrapped(good, row, way)()), (X + 1) * 3)
    all_devices_work()


def test_kinds_of_exceptions():
    """What is raised is an error of this library, and a RuntimeError."""
    assert issubclass(hcb.CallbackException, SpmdError)
    assert issubclass(hcb.CallbackException, RuntimeError)
    assert hcb.TapFunctionException is hcb.CallbackException
    assert hcb.CallbackException.__module__ == "spmd.host_callback"


# Afterwards


@pytest.mark.parametrize("way", WAYS)
def test_programs_started_right_after_a_failing_one(way, row):
    """Nothing is waited for: later programs give their values, and their taps arrive in order."""
    seen = []

    def tapped(i, x):
        hcb.id_tap(lambda v, _: seen.append((i, float(v))), x.max())
        return good(x)

    bad = wrapped(calling(no_luck), row, way)
    outs, failed = [], 0
    for i in range(3):
        try:
            outs.append((None, bad()))
        except jax.errors.JaxRuntimeError:  # small programs run in the caller
            failed += 1
        outs.append((i, wrapped(functools.partial(tapped, i), row, way)()))
    for i, out in outs:
        if i is None:
            surfaced(lambda out=out: out)
            failed += 1
        else:
            np.testing.assert_array_equal(np.asarray(out), (X + 1) * 3)
    assert failed == 3
    copies = 8 if way == "shard_map" else 1
    count = f"raised {3 * copies} exceptions since"
    assert count in str(at_barrier())
    assert len(seen) == 3 * copies
    assert [i for i, _ in seen] == sorted(i for i, _ in seen)
    all_devices_work()


@pytest.mark.parametrize("way", ["one device", "eight devices", "pjit", "shard_map"])
def test_failing_programs_of_several_threads(way, row):
    """In each thread the programs after a failing one give their values; all errors are counted."""
    bad, fine = wrapped(calling(no_luck), row, way), wrapped(good, row, way)
    fine()
    gate = threading.Barrier(3)
    wrong = []

    def work():
        gate.wait()
        for _ in range(3):
            try:
                failing = bad()
            except jax.errors.JaxRuntimeError:
                failing = None
            after = fine()
            if failing is not None:
                try:
                    jax.block_until_ready(failing)
                    wrong.append("did not fail")
                except jax.errors.JaxRuntimeError:
                    pass  # as it should
            if not np.array_equal(np.asarray(after), (X + 1) * 3):
                wrong.append(np.asarray(after))
        jax.effects_barrier()  # of this thread

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert f"raised {9 * (8 if way == 'shard_map' else 1)} exceptions" in str(at_barrier())
    all_devices_work()


@pytest.mark.parametrize("way", WAYS)
def test_the_same_program_succeeds_later(way, row):
    """A compiled program whose host function failed once is as good as before."""
    broken = threading.Event()
    broken.set()

    def host(v):
        if broken.is_set():
            raise OSError("disk is full")
        return v

    run = wrapped(calling(host), row, way)
    for _ in range(2):
        broken.set()
        assert "disk is full" in surfaced(run)
        at_barrier()
        broken.clear()
        np.testing.assert_array_equal(np.asarray(run()), X * 2 + 1)


@pytest.mark.parametrize("way", ["eight devices", "pjit"])
def test_what_depends_on_a_failed_result(way, row):
    """A program that is given a failed result fails too, calls nobody, and blocks nobody."""
    seen = []
    failed = wrapped(calling(no_luck), row, way)()
    after = jax.jit(lambda x: hcb.id_tap(lambda v, _: seen.append(v), x.sum()))(failed)
    other = wrapped(good, row, way)()
    assert "no luck" in surfaced(lambda: after)
    np.testing.assert_array_equal(np.asarray(other), (X + 1) * 3)
    assert "raised one exception" in str(at_barrier())
    assert not seen
    all_devices_work()


@pytest.mark.parametrize("way", ["one device", "eight devices", "pjit", "shard_map"])
def test_a_failing_iteration_of_a_loop(way, row):
    """The loop ends with the iteration that fails; the one before it were made."""
    seen = []

    def host(i):
        seen.append(int(i))
        if i == 3:
            raise ValueError("at three")
        return i

    def fun(x):
        def step(c, i):
            return c + hcb.call(host, i, result_shape=i).astype(c.dtype), None

        return lax.scan(step, x, jnp.arange(6))[0]

    assert "call of `host` raised ValueError: at three" in surfaced(wrapped(fun, row, way))
    at_barrier()
    assert sorted(set(seen)) == [0, 1, 2, 3]
    np.testing.assert_array_equal(np.asarray(wrapped(good, row, way)()), (X + 1) * 3)


@pytest.mark.parametrize("way", ["one device", "eight devices", "pjit", "shard_map"])
@pytest.mark.parametrize("taken", [True, False])
def test_a_failing_branch(way, taken, row):
    """Only the branch that is taken can fail; where nothing follows that holds for shards too."""

    def fun(x):
        return lax.cond(x.sum() >= (0 if taken else 1000), calling(no_luck), good, x)

    run = wrapped(fun, row, way)
    if taken:
        assert "no luck" in surfaced(run)
        at_barrier()
    else:
        np.testing.assert_array_equal(np.asarray(run()), (X + 1) * 3)


@pytest.mark.parametrize("way", ["shard_map", "per_shard"])
def test_one_of_several_devices_fails(way, row):
    """One device fails before a collective: the program ends for all of them, with its error."""

    def host(v, **_):
        if v[0] == 6:
            raise ValueError("on one device")
        return v

    def of_shard(x):
        return x + lax.psum(hcb.call(host, x, result_shape=x), "x")

    def whole(x):
        shard = jax.ShapeDtypeStruct((1,), x.dtype)
        return x + hcb.call(host, x, result_shape=shard, per_shard=True).sum()

    fun = (by_shard_map if way == "shard_map" else lambda f, m: pjit(f, P("x"), P("x"), mesh=m))(
        of_shard if way == "shard_map" else whole, row
    )
    assert "call of `host` raised ValueError: on one device" in surfaced(lambda: fun(X))
    assert "raised one exception" in str(at_barrier())
    np.testing.assert_array_equal(np.asarray(fun(X + 8)), X + 8 + (X + 8).sum())


def test_a_failing_rule_of_a_derivative(row):
    """What a host function raises in a backward pass surfaces like any other."""

    @jax.custom_vjp
    def host_sin(x):
        return hcb.call(np.sin, x, result_shape=x)

    def backward(x, ct):
        return (hcb.call(no_luck, x, result_shape=x) * ct,)

    host_sin.defvjp(lambda x: (host_sin(x), x), backward)
    run = pjit(jax.grad(lambda x: host_sin(x).sum()), P("x"), P("x"), mesh=row)
    assert "call of `no_luck` raised ValueError" in surfaced(lambda: run(X))
    at_barrier()


def test_one_element_of_a_batch_fails():
    """Under `vmap_method="sequential"` the elements before the one that fails were called."""
    seen = []

    def host(v):
        seen.append(float(v))
        if v == 2:
            raise ValueError("second")
        return v

    run = jax.jit(jax.vmap(lambda x: hcb.call(host, x, result_shape=x, vmap_method="sequential")))
    assert "ValueError: second" in surfaced(lambda: run(X))
    at_barrier()
    assert seen == [0, 1, 2]


# Exceptions of unusual kinds


UNUSUAL = {
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "StopIteration": StopIteration(),
    "NUL": ValueError("before\0after"),
    "no Unicode": ValueError("\udcff"),
    "long": ValueError("x" * 10**6),
    "a group": ExceptionGroup("several", [ValueError("one"), ValueError("two")]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_exceptions(case, row, monkeypatch):
    """Whatever is raised surfaces, at the call and at the barrier, and ends no thread."""
    # pytest-xdist cannot pass on a log that is no Unicode.
    monkeypatch.setattr(logging.getLogger("spmd.host_callback._receiver"), "disabled", True)

    def host(v, *_):
        del v
        raise UNUSUAL[case]

    kind = type(UNUSUAL[case]).__name__
    for way in ("one device", "pjit"):
        assert f"call of `host` raised {kind}" in surfaced(wrapped(calling(host), row, way))
        assert at_barrier().__cause__ is UNUSUAL[case]
        jax.block_until_ready(wrapped(lambda x: hcb.id_tap(host, x) + 1, row, way)())
        assert at_barrier().__cause__ is UNUSUAL[case]
        np.testing.assert_array_equal(np.asarray(wrapped(good, row, way)()), (X + 1) * 3)


@pytest.mark.slow
def test_an_exception_without_text():
    """An exception that raises where it is printed ends no thread, and its kind is told."""
    script = """
    logging.getLogger("spmd.host_callback").setLevel(logging.CRITICAL)

    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def host(v, *_):
        raise Unprintable

    run = jax.jit(lambda x: hcb.call(host, x, result_shape=x))
    try:
        jax.block_until_ready(run(XS))
    except jax.errors.JaxRuntimeError as error:
        say("call of `host` raised Unprintable" in str(error))
    jax.jit(lambda x: hcb.id_tap(host, x))(XS)
    try:
        hcb.barrier_wait()
    except hcb.CallbackException as error:
        say(type(error.__cause__).__name__, str(error).splitlines()[0])
    """
    head = "Host functions raised 2 exceptions since the last barrier_wait. The last one was:"
    assert run_alone(script, limit=20) == ["True", f"Unprintable {head}"]


def test_a_result_that_cannot_be_read():
    """An object that raises when it is read as an array is an error like any other."""

    class Odd:
        def __array__(self, dtype=None, copy=None):
            raise OSError("cannot be read")

    def host(v):
        del v
        return Odd()

    assert "call of `host` raised OSError: cannot be read" in surfaced(
        jax.jit(functools.partial(calling(host), X))
    )
    at_barrier()


# Taps


@pytest.mark.parametrize("way", WAYS)
def test_taps_that_raise(way, row, caplog):
    """The program gives its values, later taps arrive; each error is logged, the barrier counts."""
    seen = []

    def broken(i, v, transforms):
        del transforms
        seen.append(i)
        if i % 2:
            raise LookupError(f"tap {i} of {v.dtype}")

    def fun(x):
        for i in range(4):
            hcb.id_tap(functools.partial(broken, i), x)
        return x * 2

    run = wrapped(fun, row, way)
    copies = 8 if way == "shard_map" else 1
    with caplog.at_level(logging.ERROR, logger="spmd.host_callback"):
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(run()), X * 2)
        error = at_barrier()
    assert sorted(seen) == sorted([0, 1, 2, 3] * 2 * copies)
    if copies == 1:
        assert seen == [0, 1, 2, 3] * 2
    count = 4 * copies
    head = (
        f"Host functions raised {count} exceptions since the last barrier_wait. "
        "The last one was:\nTraceback (most recent call last):\n"
    )
    assert str(error).startswith(head)
    assert str(error).rstrip().endswith("LookupError: tap 3 of float32")
    assert type(error.__cause__) is LookupError
    assert str(error.__cause__) == "tap 3 of float32"
    logged = [r.getMessage() for r in caplog.records if r.name.startswith("spmd.host_callback")]
    assert len(logged) == count
    for message in logged:
        assert message.startswith("id_tap of `broken` raised an exception:\nTraceback")
        assert "in broken\n" in message


def test_one_error_is_said_to_be_one(caplog):
    """The text of the barrier after a single error, word by word."""

    def broken(v, transforms):
        raise ZeroDivisionError("by zero")

    with caplog.at_level(logging.ERROR, logger="spmd.host_callback"):
        jax.jit(lambda x: hcb.id_tap(broken, x))(X)
        said = str(at_barrier())
    first, second, *_, last = said.rstrip().splitlines()
    assert first == ("Host functions raised one exception since the last barrier_wait. It was:")
    assert (second, last) == (
        "Traceback (most recent call last):",
        "ZeroDivisionError: by zero",
    )


def test_errors_of_taps_and_calls_are_counted_together():
    """The barrier tells the last error, whatever it came from, and how many there were."""

    def tap(v, transforms):
        raise KeyError("tap")

    jax.jit(lambda x: hcb.id_tap(tap, x))(X)
    surfaced(jax.jit(functools.partial(calling(no_luck), X)))
    error = at_barrier()
    assert "raised 2 exceptions" in str(error)
    assert type(error.__cause__) is ValueError


def test_the_printer_fails(row):
    """A stream that cannot be written to stops neither the program nor later prints."""
    lines = []

    class Stream:
        def write(self, text):
            if not lines:
                lines.append("failed")
                raise BrokenPipeError("nobody listens")
            lines.append(text)

    stream = Stream()
    run = pjit(lambda x: hcb.id_print(x.sum(), output_stream=stream) + x, P("x"), P("x"), mesh=row)
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(run(X)), X.sum() + X)
    assert type(at_barrier().__cause__) is BrokenPipeError
    assert lines == ["failed", "28.\n"]


def test_errors_wait_for_whoever_asks_first():
    """An error of one thread's program is raised by the barrier of another thread, once."""

    def tap(v, transforms):
        raise KeyError("tap")

    raised = []
    jax.block_until_ready(jax.jit(lambda x: hcb.id_tap(tap, x))(X))
    gate = threading.Barrier(4)

    def work():
        gate.wait()
        try:
            hcb.barrier_wait()
        except hcb.CallbackException as error:
            raised.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == 1


def test_stopping_keeps_errors():
    """`stop_outfeed_receiver` raises nothing; the errors are there at the next barrier."""

    def tap(v, transforms):
        raise KeyError("tap")

    jax.jit(lambda x: hcb.id_tap(tap, x))(X)
    hcb.stop_outfeed_receiver()
    assert type(at_barrier().__cause__) is KeyError


@pytest.mark.slow
def test_a_log_handler_that_raises():
    """Not even an error while an error is logged stops the thread of the device."""
    script = """
    class Broken(logging.Handler):
        def emit(self, record):
            raise OSError("log is full")

    logging.getLogger("spmd.host_callback").addHandler(Broken())
    seen = []

    def tap(v, transforms):
        seen.append(float(v))
        raise ValueError("tap")

    def host(v):
        raise ValueError("call")

    jax.jit(lambda x: hcb.id_tap(tap, x))(X[0])
    jax.jit(lambda x: hcb.id_tap(tap, x))(X[1])
    try:
        jax.block_until_ready(jax.jit(lambda x: hcb.call(host, x, result_shape=x))(XS))
    except jax.errors.JaxRuntimeError as error:
        say("call of `host` raised ValueError: call" in str(error))
    try:
        hcb.barrier_wait()
    except hcb.CallbackException as error:
        say(str(error).splitlines()[0])
    say(seen)
    """
    assert run_alone(script, stderr=None) == [
        "True",
        "Host functions raised 3 exceptions since the last barrier_wait. The last one was:",
        "[0.0, 1.0]",
    ]


# The end of the process


@pytest.mark.few(0)
@pytest.mark.parametrize("asked", ["both", "at the result", "at the barrier", "nowhere"])
def test_exit_after_errors(asked):
    """After errors of every kind the process ends with code 0 and writes nothing more."""
    script = f"""
    logging.getLogger("spmd.host_callback").setLevel(logging.CRITICAL)

    def bad(v):
        raise ValueError("no luck")

    def tap(v, transforms):
        raise ValueError("no luck")

    def fun(x):
        hcb.id_tap(tap, x)
        return hcb.call(bad, x, result_shape=x)

    asked = {asked!r}
    ways = {{
        "one device": (jax.jit(fun), X), "eight devices": (jax.jit(fun), XS),
        "pjit": (pjit(fun, P("x"), P("x"), mesh=mesh), X), "shard_map": (sharded(fun), XS),
    }}
    for name, (run, x) in ways.items():
        try:
            out = run(x)
            if asked in ("at the result", "both"):
                jax.block_until_ready(out)
        except jax.errors.JaxRuntimeError:
            say("raised")
    if asked in ("at the barrier", "both"):
        try:
            hcb.barrier_wait()
        except hcb.CallbackException as error:
            say(str(error).splitlines()[0])
    """
    result = ["raised"] * (4 if asked in ("at the result", "both") else 1)
    line = "Host functions raised 22 exceptions since the last barrier_wait. The last one was:"
    barrier = [line] if asked in ("at the barrier", "both") else []
    assert run_alone(script) == [*result, *barrier]


@pytest.mark.slow
def test_ctrl_c():
    """Interrupts of the main thread, wherever they find it, leave taps, calls and barrier alive."""
    script = """
    import signal, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    seen, ended = [], []
    tap = jax.jit(lambda x: hcb.id_tap(lambda v, t: seen.append(1), x))
    call = jax.jit(lambda x: hcb.call(lambda v: v + 1, x, result_shape=x))
    for i in range(30):
        run = tap if i % 2 else call
        run(X).block_until_ready()
        timer = threading.Timer(0.003 + 0.0004 * i, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            until = time.monotonic() + 0.1
            while time.monotonic() < until:
                run(X)
            timer.join()
        except KeyboardInterrupt:
            ended.append(i)
        except jax.errors.JaxRuntimeError as error:
            assert "KeyboardInterrupt" in str(error), error
            ended.append(i)
    try:
        hcb.barrier_wait()
    except hcb.CallbackException as error:
        assert "KeyboardInterrupt" in str(error), error
    seen.clear()
    print(np.asarray(call(X))[0], tap(X)[1])
    hcb.barrier_wait()
    say(seen, len(ended) > 15)
    """
    assert run_alone(script, stderr=None)[-1] == "[1] True"


def test_errors_keep_one_operand():
    """However many taps raise, only the last one's operands are kept; after a barrier, none."""
    operands = []

    def fails(v, _):
        operands.append(weakref.ref(v))
        raise OSError("full")

    program = jax.jit(lambda x: hcb.id_tap(fails, x, result=0.0))
    for i in range(5):
        program(np.float32(i))
    with pytest.raises(hcb.CallbackException, match="5 exceptions") as caught:
        hcb.barrier_wait()
    assert sum(ref() is not None for ref in operands) == 1
    del caught
    gc.collect()
    assert not any(ref() is not None for ref in operands)


@pytest.mark.slow
def test_errors_of_other_effects_are_left_to_jax():
    """A barrier that tells the error of a tap leaves what JAX's own callbacks raised to JAX."""
    run_alone(
        """
        import jax, pytest
        import spmd.host_callback as hcb

        def fails(*_):
            raise OSError("full")

        jax.jit(lambda x: hcb.id_tap(fails, x, result=0.0))(1.0)
        with pytest.raises(Exception, match="full"):
            jax.jit(lambda x: jax.experimental.io_callback(fails, None, x, ordered=True))(1.0)
            jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
            with pytest.raises(hcb.CallbackException):
                hcb.barrier_wait()
            jax.effects_barrier()
        """,
        stderr=None,
    )
