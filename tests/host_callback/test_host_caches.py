"""What is compiled once and used again, across calls and processes, and what goes away again."""

import contextlib
from dataclasses import dataclass
import functools
import gc
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import weakref

import jax
from jax.experimental import serialize_executable
import jax.numpy as jnp
import numpy as np
from oracle import counted, mesh_of
from own_process import run_alone
import pytest
from tapped import Listener

import spmd
from spmd import P, host_callback as hcb
from spmd.host_callback import _ffi, _registry

X = np.arange(8, dtype=np.float32)

# Across processes

_PROGRAM = """
import json, pathlib, sys
import jax, numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from spmd import host_callback as hcb

role, folder = sys.argv[1], pathlib.Path(sys.argv[2])
for name, value in {
    "jax_compilation_cache_dir": str(folder / "cache"),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    jax.config.update(name, value)
hits = []
jax.monitoring.register_event_listener(
    lambda name, **_: hits.append(1) if name == "/jax/compilation_cache/cache_hits" else None
)
said, found = [], {}
first = lambda x, *_, **__: said.append(["first", x.tolist()])
second = lambda x, *_, **__: said.append(["second", (-x).tolist()])
tap = {"first": first, "second": second}[role]
mesh = Mesh(np.array(jax.devices()), ("x",))
X = np.arange(8, dtype=np.float32)

def told(name, call):
    said.clear()
    hits.clear()
    try:
        value = np.asarray(call()).tolist()
    except Exception as error:
        value = f"{type(error).__name__}: {error}"
    hcb.barrier_wait()
    found[name] = {"said": sorted(said), "value": value, "hits": len(hits)}

def make(tap):
    # The same text of a program in both processes.
    def program(x):
        return hcb.id_tap(tap, x) + 1
    def shards(x):
        return hcb.id_tap(tap, x, per_shard=True) * 2
    def called(x):
        return hcb.call(lambda x: tap(x) or x + 10, x, result_shape=x)
    return (
        jax.jit(program),
        jax.jit(shards, in_shardings=NamedSharding(mesh, P("x"))),
        jax.jit(called),
    )

saved = folder / "saved.json"
if role == "second":
    for name, text in json.loads(saved.read_text()).items():
        def load():
            import pickle
            given = pickle.loads(bytes.fromhex(text))
            devices = jax.devices() if name == "shards" else jax.devices()[:1]
            return serialize_executable.deserialize_and_load(*given, execution_devices=devices)(X)
        told(f"{name} of the other process", load)
program, shards, called = make(tap)
told("bare", lambda: jax.jit(lambda x: x * 3)(X))
told("program", lambda: program(X))
told("shards", lambda: shards(X))
told("called", lambda: called(X))
if role == "first":
    import pickle
    fresh = dict(zip(("program", "shards", "called"), make(tap)))
    if jax.__version_info__ < (0, 12):
        del fresh["shards"]  # XLA cannot serialize ordered effects on several devices
    saved.write_text(json.dumps({
        name: pickle.dumps(serialize_executable.serialize(f.lower(X).compile())).hex()
        for name, f in fresh.items()
    }))
else:
    for name, text in json.loads(saved.read_text()).items():
        told(f"{name} of the other process, later", load)
from spmd.host_callback import _registry
found["numbers"] = [*_registry._by_id]
print(json.dumps(found))
"""


def _process(role, folder):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, role, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What two processes say that share a cache and run equal programs with other functions."""
    folder = tmp_path_factory.mktemp("shared")
    return _process("first", folder), _process("second", folder)


@pytest.mark.slow
def test_persistent_cache_is_shared(processes):
    """The cache works: a program without host functions is found in the second process."""
    assert [p["bare"]["hits"] for p in processes] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "value"), [("program", X + 1), ("shards", X * 2), ("called", X + 10)]
)
def test_each_process_runs_its_own_function(program, value, processes):
    """With JAX's persistent cache each process calls its own host function, with its values."""
    for found, name, sign in zip(processes, ("first", "second"), (1, -1), strict=True):
        arrays = [[v] for v in sorted(sign * X)] if program == "shards" else [(sign * X).tolist()]
        assert found[program]["said"] == [[name, a] for a in arrays]
        assert found[program]["value"] == value.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["", ", later"])
@pytest.mark.parametrize(
    "program", ["program", "called"] + ["shards"] * (jax.__version_info__ >= (0, 12))
)
def test_executable_of_another_process(program, when, processes):
    """A serialized executable that another process made is refused with the reason, not run."""
    found = processes[1][f"{program} of the other process{when}"]
    assert found["said"] == []
    assert "is not known in this process: the program was compiled by another one" in found["value"]


def test_executable_of_this_process():
    """A serialized executable that is loaded again in its process keeps its host function."""
    log = Listener()
    compiled = jax.jit(lambda x: log.tap(x) + 1).lower(X).compile()
    given = serialize_executable.serialize(compiled)
    again = serialize_executable.deserialize_and_load(*given, execution_devices=jax.devices()[:1])
    del compiled, given
    jax.clear_caches()
    gc.collect()
    np.testing.assert_array_equal(again(X), X + 1)
    (seen,) = log.take()
    np.testing.assert_array_equal(seen.arg, X)


def test_unknown_number_is_explained():
    """What a program is told whose host function lives elsewhere, literally."""
    assert _registry.unknown(0x1F) == (
        "host callback 0x1f is not known in this process: the program was compiled by another one, "
        "whose host functions do not travel with it; compile it here"
    )


@pytest.mark.slow
def test_numbers_are_random(processes):
    """The numbers of host functions are 63 random bits: no two processes agree by chance."""
    numbers = [n for found in processes for n in found["numbers"]]
    assert len(set(numbers)) == len(numbers) >= 6
    assert all(0 <= n < 2**63 for n in numbers)
    assert max(numbers) > 2**50


# Compiles


@contextlib.contextmanager
def compiles():
    """Counts what the backend compiles, as a list that grows."""
    found = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@dataclass(frozen=True)
class Equal:
    """A host function that equals others of its label."""

    log: Listener
    label: str

    def __call__(self, x, transforms=()):
        self.log((self.label, x), transforms)
        return x

    def method(self, x, transforms=()):
        """The same, as a method."""
        return self(x, transforms)


def identity(x, *_, **__):
    """A host function of the module."""
    return x


_bound = functools.partial(identity)

# How each of two eager taps is made: whether they share one program.
SHARED = {
    "function": (lambda _: hcb.id_tap(identity, jnp.ones(3)), True),
    "function, other options": (
        lambda i: hcb.id_tap(identity, jnp.ones(3), per_shard=bool(i)),
        False,
    ),
    "other shape": (lambda i: hcb.id_tap(identity, jnp.ones(3 + i)), False),
    "other tree": (lambda i: hcb.id_tap(identity, {i: jnp.ones(3)}), False),
    "lambda": (lambda _: hcb.id_tap(lambda x, t: None, jnp.ones(3)), False),
    "equal objects": (lambda _: hcb.id_tap(Equal(LOG, "a"), jnp.ones(3)), True),
    "unequal objects": (lambda i: hcb.id_tap(Equal(LOG, "ab"[i]), jnp.ones(3)), False),
    "methods of equal objects": (lambda _: hcb.id_tap(METHODS.method, jnp.ones(3)), True),
    "one partial": (lambda _: hcb.id_tap(_bound, jnp.ones(3)), True),
    "equal labels": (lambda _: hcb.id_print(jnp.ones(3), output_stream=NOWHERE, b=1, a="x"), True),
    "labels in another order": (
        lambda i: hcb.id_print(
            jnp.ones(3), output_stream=NOWHERE, **[{"a": 1, "b": 2}, {"b": 2, "a": 1}][i]
        ),
        True,
    ),
    "unequal labels": (lambda i: hcb.id_print(jnp.ones(3), output_stream=NOWHERE, a=i), False),
    "unhashable labels": (
        lambda _: hcb.id_print(jnp.ones(3), output_stream=NOWHERE, a=[1, 2]),
        True,
    ),
    "call": (lambda _: hcb.call(identity, jnp.ones(3), result_shape=jnp.ones(3)), True),
    "call by a struct": (
        lambda i: hcb.call(
            identity,
            jnp.ones(3),
            result_shape=[jnp.ones(3), jax.ShapeDtypeStruct((3,), jnp.float32)][i],
        ),
        True,
    ),
}
LOG = Listener()
METHODS = Equal(LOG, "m")


class Nowhere:
    """A stream that forgets."""

    def write(self, text):
        """Forgets a text."""


NOWHERE = Nowhere()


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED)
def test_eager_calls_share_programs(case):
    """Two eager calls of equal host functions compile once, of others twice."""
    make, shared = SHARED[case]
    jnp.ones(3), jnp.ones(4)
    jax.clear_caches()
    jnp.ones(3), jnp.ones(4)
    with compiles() as found:
        make(0)
        first = len(found)
        make(1)
        hcb.barrier_wait()
    assert first == 1
    assert len(found) - first == (0 if shared else 1)
    LOG.take()


def test_callback_in_a_program_compiles_once():
    """A program with taps compiles once, however often it is called."""
    log, x = Listener(), jnp.asarray(X)
    fun = jax.jit(lambda x: log.tap(x, per_shard=True) * 2)
    with compiles() as found:
        for _ in range(20):
            fun(x)
    assert len(found) == 1
    assert len(log.take()) == 20
    mesh = mesh_of({"x": 8})
    fun = spmd.pjit(log.shards, P("x"), P("x"), mesh=mesh)
    _, first = counted(fun, X)
    _, again = counted(lambda: [fun(X) for _ in range(5)])
    assert (first.traces, first.lowerings, first.compiles) == (1, 1, 1)
    assert (again.traces, again.lowerings, again.compiles) == (0, 0, 0)
    assert len(log.take()) == 8 * 6


def test_equal_callbacks_are_one_entry():
    """Programs of equal host functions call one entry, which lives as long as one of them."""
    log, x = Listener(), jnp.asarray(X)
    jax.clear_caches()
    gc.collect()
    before = set(_registry._by_id)
    programs = [jax.jit(lambda x, i=i: hcb.id_tap(Equal(log, "one"), x) + i) for i in range(3)]
    for program in programs:
        program(x)
    assert len(set(_registry._by_id) - before) == 1
    assert len(log.take()) == 3
    del programs[:2], program
    gc.collect()
    assert len(set(_registry._by_id) - before) == 1
    programs[0](x)
    assert [s.arg[0] for s in log.take()] == ["one"]


# Lifetimes


class Host:
    """A host function that can be seen to die."""

    def __call__(self, x, *_, **__):
        return x


def _jitted(host):
    jax.jit(lambda x: hcb.id_tap(host, x))(X)


def _called(host):
    jax.jit(lambda x: hcb.call(host, x, result_shape=x))(X)


def _batched(host):
    jax.jit(jax.vmap(jax.grad(lambda x: hcb.id_tap(host, x) ** 2)))(X)


def _looped(host):
    jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, hcb.id_tap(host, x)), 0, x))(X)


def _staged(host):
    jax.jit(lambda x: hcb.id_tap(host, x)).lower(X).compile()(X)


def _never_run(host):
    jax.jit(lambda x: hcb.id_tap(host, x)).lower(X).compile()


def _only_lowered(host):
    jax.jit(lambda x: hcb.id_tap(host, x)).lower(X)


def _only_traced(host):
    jax.make_jaxpr(lambda x: hcb.id_tap(host, x))(X)


def _of_shards(host):
    spmd.pjit(lambda x: hcb.id_tap(host, x, per_shard=True), P("x"), P("x"), mesh=_mesh())(X)


def _mapped(host):
    jax.jit(
        jax.shard_map(
            lambda x: hcb.id_tap(host, x),
            mesh=jax.sharding.Mesh(_mesh().devices, ("x",)),
            in_specs=P("x"),
            out_specs=P("x"),
        )
    )(X)


@functools.cache
def _mesh():
    return mesh_of({"x": 8})


LIVES = [_jitted, _called, _batched, _looped, _staged, _never_run]
LIVES += [_only_lowered, _only_traced, _of_shards, _mapped]
LIVES = [
    f if f in (_called, _never_run, _of_shards) else pytest.param(f, marks=pytest.mark.slow)
    for f in LIVES
]


def settle():
    """Waits until nothing is under way, and collects what nobody holds."""
    hcb.stop_outfeed_receiver()  # the threads hold the call that they made last
    gc.collect()
    hcb.barrier_wait()  # drops what belonged to the executables that just went


def left_of(make, count, seconds=10):
    """Makes programs, each with a host function of its own; returns how many of what are left.

    A thread of XLA may hold the last program for a moment after it was compiled: until all are
    gone, but no longer than so many seconds, it looks again.
    """
    settle()
    before = len(_registry._by_id), len(_registry._by_call), len(_ffi._states)
    hosts = []
    for _ in range(count):
        host = Host()
        hosts.append(weakref.ref(host))
        make(host)
    del host
    end = time.monotonic() + seconds
    while True:
        settle()
        after = len(_registry._by_id), len(_registry._by_call), len(_ffi._states)
        entries = [max(0, b - a) for a, b in zip(before, after, strict=True)]
        left = sum(h() is not None for h in hosts), *entries
        if not any(left) or time.monotonic() > end:
            return left
        time.sleep(0.01)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", LIVES, ids=lambda f: f.__name__.strip("_"))
def test_host_functions_die_with_their_programs(make):
    """When a program is gone its host function is, and what the registry held of it."""
    make(Host())  # what JAX compiles once for all of them
    assert left_of(make, 4) == (0, 0, 0, 0)


@pytest.mark.slow
def test_a_program_that_dies_in_a_thread_of_xla_needs_no_interpreter():
    """XLA drops what a program held without the GIL: at exit, to ask for it ends the process."""
    script = """
    import ctypes, gc
    from spmd.host_callback import _ffi

    f = jax.jit(lambda x: hcb.call(np.sum, x, result_shape=x[0]))
    say(f(X))
    (state,) = _ffi._states
    libc = ctypes.PyDLL(None)  # holds the GIL
    thread = ctypes.c_ulong()
    deleter, state = ctypes.c_void_p(_ffi._type_info[2]), ctypes.c_void_p(state)
    libc.pthread_create(ctypes.byref(thread), None, deleter, state)
    libc.pthread_join(thread, None)
    say(len(_ffi._states))
    gc.collect()
    say(len(_ffi._states))
    os._exit(0)  # XLA would drop it once more
    """
    assert run_alone(script) == ["28.0", "1", "0"]


def test_a_host_function_goes_without_a_collection():
    """Soon after the last reference to its program, though no collection and no program comes."""
    host = Host()
    alive = weakref.ref(host)
    call = functools.partial(hcb.call, host, result_shape=np.float32(0))
    compiled = jax.jit(call).lower(np.float32(1)).compile()
    compiled(np.float32(1))
    hcb.stop_outfeed_receiver()
    gc.collect()
    gc.disable()
    try:
        jax.clear_caches()
        del host, call, compiled
        end = time.monotonic() + 20
        while alive() is not None and time.monotonic() < end:
            time.sleep(0.01)
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_programs_that_die_while_the_main_thread_is_blocked():
    """Host functions go while the main thread waits, which is the one that Python interrupts."""
    left = []

    def work():
        _jitted(Host())
        left.append(left_of(_jitted, 10))

    settle()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert left == [(0, 0, 0, 0)]


@pytest.mark.slow
@pytest.mark.soak
def test_300_programs():
    """Of 300 programs with a host function each, nothing is left."""
    assert left_of(_jitted, 300) == (0, 0, 0, 0)


@pytest.mark.slow
def test_eager_host_functions_are_kept_in_part():
    """Eager calls keep the programs of the last host functions, and no more than 256 of them."""
    alive, *entries = left_of(lambda host: hcb.id_tap(host, X), 300, seconds=0)
    assert max(alive, *entries) <= 256
    jax.clear_caches()
    settle()


def _resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_many_programs(request):
    """Of many programs with a host function each nothing is left, and memory does not grow.

    By default a fifth of the 10,000 that `--host-programs 10000` runs, which take four minutes.
    """
    count = request.config.getoption("--host-programs")
    assert left_of(_jitted, count // 5) == (0, 0, 0, 0)
    settled = _resident()
    for make, share in ((_jitted, 0.7), (_called, 0.05), (_of_shards, 0.05)):
        assert left_of(make, int(count * share)) == (0, 0, 0, 0)
    # A host function that each program leaked with its executable would be 100 KB times as many.
    assert _resident() - settled < 64e6


def test_pending_taps_outlive_their_program():
    """A tap that waits for its turn is delivered although its program and all caches are gone."""
    go, seen = threading.Event(), []
    jax.jit(lambda: hcb.id_tap(lambda x, t: go.wait(60), jnp.zeros(1)))()
    jax.jit(lambda x: hcb.id_tap(lambda x, t: seen.append(x), x))(X)
    jax.clear_caches()
    gc.collect()
    go.set()
    hcb.barrier_wait()
    (found,) = seen
    np.testing.assert_array_equal(found, X)


def test_running_programs_keep_their_host_functions():
    """A program that is dropped while it runs calls all the same."""
    log = Listener()
    x = jnp.eye(400)

    def program(x):
        return log.tap(jax.lax.fori_loop(0, 50, lambda i, x: x @ x, x)[0, 0])

    jax.jit(program)(x)
    del x
    jax.clear_caches()
    gc.collect()
    (seen,) = log.take()
    assert seen.arg == 1


@pytest.mark.slow
def test_threads_register_at_once():
    """Equal and unequal host functions of many threads are each called, once per program."""
    logs = [Listener() for _ in range(4)]
    x = jnp.asarray(X)
    start = threading.Barrier(8)

    def work(number):
        start.wait(60)
        for i in range(6):
            log = logs[(number + i) % 4]
            jax.jit(lambda x, log=log, i=i: hcb.id_tap(Equal(log, "t"), x) + number * i)(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sum(len(log.take()) for log in logs) == 48
