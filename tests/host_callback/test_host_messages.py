"""What `id_tap`, `id_print`, `call`, `configure` and the environment refuse, and inline mode."""

import functools
import inspect
import os
import subprocess
import sys
import textwrap
import threading

import jax
from jax import lax
import numpy as np
from oracle import mesh_of, put
import pytest
from tapped import Log, inline, same

import spmd
from spmd import P, host_callback as hcb, pjit

F = np.float32


def host(arg, transforms):
    """Must not be called where a message is tested."""
    raise AssertionError


def answer(arg):
    """Must not be called either."""
    raise AssertionError


class Unhashable:
    """Can be called, and has no hash."""

    __hash__ = None

    def __call__(self, *_):
        """Must not be called."""
        raise AssertionError

    def __repr__(self):
        return "Unhashable()"


X = F(1)
ARGUMENT, OPTION = spmd.ArgumentError, spmd.OptionError
KINDS = {"id_tap": functools.partial(hcb.id_tap, host), "id_print": hcb.id_print}
KINDS["call"] = functools.partial(hcb.call, answer)

MESSAGES = {
    "a function of the other kind": (
        lambda: hcb.id_tap(answer, X, tap_with_device=True),
        ARGUMENT,
        """
        id_tap cannot call `answer` with arg, transforms, device=...: too many positional arguments.
          expected  a function that is called as answer(arg, transforms, device=...)
          got       answer(arg)
        """,
    ),
    "a function that is not told its shard": (
        lambda: hcb.call(answer, X, result_shape=X, per_shard=True),
        ARGUMENT,
        """
        call cannot call `answer` with arg, shard=...: got an unexpected keyword argument 'shard'.
          expected  a function that is called as answer(arg, shard=...)
          got       answer(arg)
        """,
    ),
    "keyword": (
        lambda: hcb.id_tap(host, X, what="x"),
        ARGUMENT,
        """
        id_tap does not take the keyword what.
          expected  result, tap_with_device, device_index, per_shard
          fix       bind them: id_tap(functools.partial(host, what=...), arg)
        """,
    ),
    "keywords": (
        lambda: hcb.id_tap(host, X, what="x", tap_with_devices=True),
        ARGUMENT,
        """
        id_tap does not take the keywords what, tap_with_devices (did you mean 'tap_with_device'?).
          expected  result, tap_with_device, device_index, per_shard
          fix       bind them: id_tap(functools.partial(host, what=..., tap_with_devices=...), arg)
        """,
    ),
    "keyword of call": (
        lambda: hcb.call(answer, X, what="x"),
        TypeError,
        """
        call() got an unexpected keyword argument 'what'
        """,
    ),
    "no tap": (
        lambda: hcb.id_tap(None, X),
        ARGUMENT,
        """
        id_tap has nothing to call.
          expected  a function of the host
          got       NoneType: None
        """,
    ),
    "arguments the wrong way round": (
        lambda: hcb.id_tap(F(1), host),
        ARGUMENT,
        """
        id_tap has nothing to call.
          expected  a function of the host
          got       float32: np.float32(1.0)
        id_tap cannot send arg: it is no array.
          expected  arrays and numbers
          got       function: <function host at 0x...>
        """,
    ),
    "number": (
        lambda: hcb.id_tap(host, [2**40]),
        ARGUMENT,
        """
        id_tap cannot send arg[0]: it is too large a number.
          expected  integers of 32 bits, or of 64 with jax_enable_x64
          got       1099511627776
          fix       send it as a float, or enable x64
        """,
    ),
    "no function to call": (
        lambda: hcb.call(3, X),
        ARGUMENT,
        """
        call has nothing to call.
          expected  a function of the host
          got       int: 3
        """,
    ),
    "no hash": (
        lambda: hcb.id_tap(Unhashable(), X),
        ARGUMENT,
        """
        id_tap cannot tell calls of `Unhashable` apart: it has no hash.
          got       Unhashable: Unhashable()
          fix       pass a function, a method, or an object with __hash__
        """,
    ),
    "no hash for call": (
        lambda: hcb.call(Unhashable(), X),
        ARGUMENT,
        """
        call cannot tell calls of `Unhashable` apart: it has no hash.
          got       Unhashable: Unhashable()
          fix       pass a function, a method, or an object with __hash__
        """,
    ),
    "no stream": (
        lambda: hcb.id_print(X, output_stream="out.txt"),
        ARGUMENT,
        """
        id_print cannot print to output_stream.
          expected  an object with a method write, such as an open file
          got       str: 'out.txt'
        """,
    ),
    "no shape": (
        lambda: hcb.call(answer, X, result_shape={"a": "f32[]", "b": (X, float)}),
        hcb.ResultShapeError,
        """
        call cannot read a shape from result_shape['a'].
          expected  numbers, arrays, jax.ShapeDtypeStruct, or anything with shape and dtype
          got       str: 'f32[]'
        call cannot read a shape from result_shape['b'][1].
          expected  numbers, arrays, jax.ShapeDtypeStruct, or anything with shape and dtype
          got       type: <class 'float'>
        """,
    ),
    "method": (
        lambda: hcb.call(answer, X, vmap_method="sequentil"),
        OPTION,
        """
        call does not know this way to batch (did you mean 'sequential'?).
          given     vmap_method='sequentil'
          expected  'sequential', 'expand_dims', 'broadcast_all' or None
        """,
    ),
    "vmap": (
        lambda: jax.vmap(lambda x: hcb.call(answer, x, result_shape=x))(np.ones(2, F)),
        hcb.TransformationError,
        """
        call cannot apply vmap to `answer`: it is a function of the host.
          expected  a function that JAX can see into, or a rule
          fix       pass vmap_method='sequential', 'expand_dims' or 'broadcast_all' to call, or wrap it in jax.custom_batching.custom_vmap
        """,  # noqa: E501 - compared as it is printed
    ),
    "grad": (
        lambda: jax.grad(lambda x: hcb.call(answer, x, result_shape=x))(X),
        hcb.TransformationError,
        """
        call cannot apply jvp or grad to `answer`: it is a function of the host.
          expected  a function that JAX can see into, or a rule
          fix       wrap it in jax.custom_jvp or jax.custom_vjp, whose rules may use call themselves
        """,
    ),
    "queue of nothing": (
        lambda: hcb.configure(max_queue_bytes=0),
        OPTION,
        """
        host_callback cannot set max_queue_bytes.
          given     configure(max_queue_bytes=0)
          expected  a positive number of bytes
        """,
    ),
    "queue of words": (
        lambda: hcb.configure(max_queue_bytes="much"),
        OPTION,
        """
        host_callback cannot set max_queue_bytes.
          given     configure(max_queue_bytes='much')
          expected  a positive number of bytes
        """,
    ),
    "queue of no number": (
        lambda: hcb.configure(max_queue_bytes=float("nan")),
        OPTION,
        """
        host_callback cannot set max_queue_bytes.
          given     configure(max_queue_bytes=nan)
          expected  a positive number of bytes
        """,
    ),
}
for _kind, _bind in KINDS.items():
    MESSAGES[f"{_kind}: no array"] = (
        functools.partial(_bind, {"a": [X, "text"], "b": object, "c": np.array(["x"])}),
        ARGUMENT,
        f"""
        {_kind} cannot send arg['a'][1]: it is no array.
          expected  arrays and numbers
          got       str: 'text'
          fix       give text as a label, id_print(x, what='loss'), or bind it by functools.partial
        {_kind} cannot send arg['b']: it is no array.
          expected  arrays and numbers
          got       type: <class 'object'>
        {_kind} cannot send arg['c']: it is no array.
          expected  arrays and numbers
          got       ndarray: array(['x'], dtype='<U1')
        """,
    )
    for _index in (-1, 1.5, "0", None):
        MESSAGES[f"{_kind}: device_index={_index}"] = (
            functools.partial(_bind, X, device_index=_index),
            OPTION,
            f"""
            {_kind} has no such device.
              given     device_index={_index!r}
              expected  the number of a device of the mesh, from 0
            """,
        )


def refused(thunk, error, golden):
    """Asserts that something raises exactly this, and calls nothing."""
    with pytest.raises(error) as caught:
        thunk()
    assert type(caught.value) is error
    assert without_addresses(str(caught.value)) == textwrap.dedent(golden).strip()
    hcb.barrier_wait()


def without_addresses(message):
    """A message whose addresses are dots."""
    parts = message.split(" at 0x")
    return " at 0x...".join([parts[0], *(p.lstrip("0123456789abcdef") for p in parts[1:])])


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    """Each mistake is told in full: what, given, expected, got and fix."""
    refused(*MESSAGES[name])


@pytest.mark.parametrize("name", [n for n in MESSAGES if n not in ("vmap", "grad")])
def test_messages_inline(name):
    """Inline mode refuses what is refused otherwise, in the same words."""
    if "queue" in name:
        return
    with inline():
        refused(*MESSAGES[name])


@pytest.mark.parametrize("name", ["no array", "keyword", "no tap", "device_index=-1"])
def test_messages_while_tracing(name):
    """In a traced function the same is said, when it is traced."""
    name = name if name in MESSAGES else f"id_tap: {name}"
    thunk, error, golden = MESSAGES[name]
    with pytest.raises(error) as caught:
        jax.make_jaxpr(lambda x: (thunk(), x)[1])(X)
    assert without_addresses(str(caught.value)) == textwrap.dedent(golden).strip()


# Devices that are not there

ONE = "expected  0: the program runs on one device"
SOME = "expected  0 to 3: the program runs on 4 devices"


def on_one(fun):
    """Eager, of an array on one device."""
    return fun


def on_four(fun):
    """By pjit, on four devices."""
    return pjit(fun, P(), P(), mesh=mesh_of({"a": 4}))


def on_four_by_jit(fun):
    """By jit, of an array on four devices."""
    mesh = mesh_of({"a": 4})
    return lambda x: jax.jit(fun)(put(np.full(4, x), mesh, P("a")))


PROGRAMS = {
    "eager": (on_one, 1, ONE),
    "jit": (jax.jit, 1, ONE),
    "pjit": (on_four, 4, SOME),
    "jit of a sharded array": (on_four_by_jit, 4, SOME),
}
REACHED = {
    "id_tap": (lambda x, n: hcb.id_tap(host, x, device_index=n), "host"),
    "id_print": (lambda x, n: hcb.id_print(x, device_index=n), "id_print"),
    "call": (lambda x, n: hcb.call(answer, x, result_shape=x, device_index=n), "answer"),
}


@pytest.mark.parametrize("kind", REACHED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_device_index_out_of_range(program, kind):
    """A `device_index` that no device of the program has is an error, not another device."""
    wrap, index, expected = PROGRAMS[program]
    bind, name = REACHED[kind]
    golden = f"""
        {kind} cannot reach `{name}` from device {index}.
          given     device_index={index}
          {expected}
        """
    refused(lambda: wrap(lambda x: bind(x, index))(X), OPTION, golden)


def test_device_index_out_of_range_inline():
    """Inline mode says the same of an array on one device, and of one on four."""
    mesh = mesh_of({"a": 4})
    for x, index, expected in ((X, 1, ONE), (put(np.ones(4, F), mesh, P("a")), 4, SOME)):
        golden = f"""
            id_tap cannot reach `host` from device {index}.
              given     device_index={index}
              {expected}
            """
        with inline():
            refused(lambda x=x, i=index: hcb.id_tap(host, x, device_index=i), OPTION, golden)


# Names


def test_names_of_host_functions():
    """Messages name functions, methods, partial applications and objects as users know them."""

    def named(func):
        with pytest.raises(ARGUMENT) as caught:
            jax.grad(lambda x: hcb.call(func, x, result_shape=x))(X)
        return str(caught.value).split("`")[1]

    class Model:
        def method(self, x):
            return x

        def __call__(self, x):
            return x

    assert named(answer) == "answer"
    assert named(functools.partial(host, transforms=())) == "host"
    assert named(Model().method).endswith("method")
    assert named(Model()) == "Model"
    assert named(lambda x: x) == "<lambda>"


# Inline


def test_inline_runs_in_the_stack_of_the_caller():
    """An inline tap, print and call run in the caller's thread, below the caller's frame."""
    seen = []

    def note(*_, **__):
        stack = [frame.function for frame in inspect.stack()]
        seen.append(
            (threading.current_thread(), "test_inline_runs_in_the_stack_of_the_caller" in stack)
        )

    class Stream:
        def write(self, text):
            note()

    def called(x):
        note()
        return x

    here = threading.current_thread()
    with inline():
        hcb.id_tap(note, X)
        hcb.id_print(X, output_stream=Stream())
        hcb.call(called, X, result_shape=X)
        hcb.id_tap(note, X, tap_with_device=True)
        jax.vmap(lambda x: hcb.id_tap(note, x))(np.ones(2, F))
        jax.grad(lambda x: hcb.id_tap(note, x))(X)
    assert seen == [(here, True)] * 6
    hcb.id_tap(note, X)
    hcb.barrier_wait()
    assert seen[6:] == [(seen[6][0], False)]
    assert seen[6][0] is not here


def test_inline_leaves_traced_programs():
    """Under inline mode what is in a traced function is called as otherwise."""
    threads = []

    def note(*_):
        threads.append(threading.current_thread())

    with inline():
        jax.jit(lambda x: hcb.id_tap(note, x))(X)
        lax.fori_loop(0, 2, lambda i, c: hcb.id_tap(note, c), X)
        hcb.barrier_wait()
    assert len(threads) == 3
    assert threading.current_thread() not in threads


def test_inline_raises_at_the_call():
    """Inline, what a host function raises is raised by the call itself, and by no barrier."""

    class OddError(Exception):
        pass

    error = OddError("odd")

    def fail(*_):
        raise error

    with inline():
        for thunk in (
            lambda: hcb.id_tap(fail, X),
            lambda: hcb.call(fail, X, result_shape=X),
            lambda: jax.vmap(lambda x: hcb.id_tap(fail, x))(np.ones(2, F)),
        ):
            with pytest.raises(OddError) as caught:
                thunk()
            assert caught.value is error
        hcb.barrier_wait()
    hcb.barrier_wait()


RESULTS = {
    "tree": (
        lambda x: {"a": x},
        X,
        """
        call of `<lambda>` got another result than its result_shape says.
          expected  a tree PyTreeDef(*)
          got       a tree PyTreeDef({'a': *})
        """,
    ),
    "shape": (
        lambda x: {"a": np.ones((2, 3), F)},
        {"a": jax.ShapeDtypeStruct((3, 2), F)},
        """
        call of `<lambda>` got another result than its result_shape says.
          expected  result['a'] = f32[3,2]
          got       result['a'] = f32[2,3]
        """,
    ),
    "dtype": (
        lambda x: x,
        np.int32(0),
        """
        call of `<lambda>` got another result than its result_shape says.
          expected  result = i32[]
          got       result = f32[]
        """,
    ),
    "no number": (
        lambda x: "text",
        X,
        """
        call of `<lambda>` got another result than its result_shape says.
          expected  result = f32[]
          got       result = <U4[]
        """,
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_inline_results_are_checked(name):
    """Inline, a result of another kind is refused by the call itself; otherwise where waited."""
    func, shape, golden = RESULTS[name]
    golden = textwrap.dedent(golden).strip()
    with inline(), pytest.raises(hcb.ResultError) as caught:
        hcb.call(func, X, result_shape=shape)
    assert str(caught.value) == golden
    hcb.barrier_wait()
    with pytest.raises(RuntimeError) as caught:
        jax.block_until_ready(jax.jit(lambda x: hcb.call(func, x, result_shape=shape))(X))
    assert golden in str(caught.value)
    with pytest.raises(hcb.CallbackException) as caught:
        hcb.barrier_wait()
    assert golden in str(caught.value)


def test_inline_values():
    """Inline, taps and calls get and return what they do otherwise."""
    mesh = mesh_of({"a": 2})
    x = put(np.arange(4, dtype=F), mesh, P("a"))
    log, devices = Log(), []

    def called(v, *, device):
        devices.append(device)
        return (v * 2).astype(np.float64), [7]

    def fun(x):
        x = log.tap("x", x)
        y, n = hcb.call(
            called, x, result_shape=(x, [np.int32(0)]), call_with_device=True, device_index=1
        )
        return log.tap("y", (x, None, y), result={"y": y, "n": n})

    with inline():
        got = fun(x)
        calls = log.calls
        log.calls = []
    want = fun(x)
    same(got, want)
    same(calls, log.take())
    assert devices == [jax.devices()[1]] * 2
    assert got["y"].devices() <= {*jax.devices()}


def test_inline_per_shard():
    """Inline, `per_shard` makes one call per shard, in the caller's thread."""
    mesh = mesh_of({"a": 2, "b": 2})
    x = put(np.arange(16, dtype=F).reshape(4, 4), mesh, P("a", "b"))
    seen = []

    def note(value, transforms, *, shard):
        seen.append((threading.current_thread(), shard, value))

    with inline(), mesh:
        hcb.id_tap(note, x, per_shard=True)
    assert {shard.device for _, shard, _ in seen} == {*mesh.devices.flat}
    for thread, shard, value in seen:
        assert thread is threading.current_thread()
        same(value, np.asarray(x)[shard.index])
        at = tuple(shard.coordinates[name] for name in mesh.axis_names)
        assert mesh.devices[at] is shard.device


# Configuration


def test_configure_without_arguments_restores_the_defaults():
    """Each `configure` sets everything: what is not given is its default again."""
    threads = []

    def tap():
        hcb.id_tap(lambda *_: threads.append(threading.current_thread()), X)
        hcb.barrier_wait()
        return threads[-1] is threading.current_thread()

    try:
        assert not tap()
        hcb.configure(inline=True)
        assert tap()
        hcb.configure(max_queue_bytes=1)
        assert not tap()
        hcb.configure(inline=True, max_queue_bytes=10**12)
        assert tap()
        hcb.configure(inline=False)
        assert not tap()
        hcb.configure(inline=True)
        with pytest.raises(OPTION):
            hcb.configure(max_queue_bytes=-1)
        assert tap()  # what is refused changes nothing
    finally:
        hcb.configure()
    assert not tap()


#: Prints whether a tap runs in the main thread: by the environment, told otherwise, and again.
SCRIPT = """
import threading
import jax, numpy as np
from spmd import host_callback as hcb

threads = []
note = lambda *_: threads.append(threading.current_thread() is threading.main_thread())
hcb.id_tap(note, np.float32(1))
hcb.barrier_wait()
hcb.configure(inline=False)
hcb.id_tap(note, np.float32(1))
hcb.barrier_wait()
hcb.configure()
hcb.id_tap(note, np.float32(1))
hcb.barrier_wait()
print(threads)
"""


def python(script, **environ):
    """Runs a script in a process of its own; returns its exit status, output and last lines."""
    found = {**os.environ, "JAX_PLATFORMS": "cpu", **environ}
    done = subprocess.run(
        [sys.executable, "-c", script], env=found, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("value", ["TRUE"])
def test_inline_by_environment(value):
    """SPMD_HOST_CALLBACK_INLINE makes eager calls inline, until `configure` says otherwise."""
    status, out, err = python(
        SCRIPT, SPMD_HOST_CALLBACK_INLINE=value, SPMD_HOST_CALLBACK_MAX_QUEUE_BYTES="1e3"
    )
    assert (status, out) == (0, "[True, False, True]\n"), err


QUEUE = """
import threading
import jax, numpy as np
from spmd import host_callback as hcb

go, seen = threading.Event(), []
def slow(value, transforms):
    assert go.wait(60)
    seen.append(value.size)
x = np.zeros(100, np.float32)
program = jax.jit(lambda x: hcb.id_tap(slow, hcb.id_tap(slow, x + 1)) * 2).lower(x).compile()
thread = threading.Thread(target=lambda: jax.block_until_ready(program(x)))
thread.start()
thread.join(SECONDS)
print(thread.is_alive(), seen)
go.set()
thread.join(60)
hcb.barrier_wait()
print(thread.is_alive(), seen)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("size", "pauses"), [("500", True), ("800", False)])
def test_queue_by_environment(size, pauses):
    """SPMD_HOST_CALLBACK_MAX_QUEUE_BYTES bounds what may wait: two of 400 bytes, or one."""
    # A program that pauses goes on only after this; one that does not needs no such time.
    script = QUEUE.replace("SECONDS", "0.5" if pauses else "60")
    status, out, err = python(script, SPMD_HOST_CALLBACK_MAX_QUEUE_BYTES=size)
    assert (status, out) == (0, f"{pauses} []\nFalse [100, 100]\n"), err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "option", "expected"),
    [
        ("INLINE", "perhaps", "inline", "1 or 0, true or false"),
        ("MAX_QUEUE_BYTES", "lots", "max_queue_bytes", "a positive number of bytes"),
        ("MAX_QUEUE_BYTES", "-1", "max_queue_bytes", "a positive number of bytes"),
    ],
)
def test_environment_is_checked(name, value, option, expected):
    """A variable that cannot be read is told by name when the module is imported."""
    name = f"SPMD_HOST_CALLBACK_{name}"
    status, out, err = python("import spmd.host_callback", **{name: value})
    assert (status, out) == (1, "")
    golden = (
        f"spmd.OptionError: host_callback cannot set {option}.\n"
        f"  given     {name}={value}\n"
        f"  expected  {expected}\n"
    )
    assert err.endswith(golden)
