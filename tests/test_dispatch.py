"""Repeated calls: right by value however the arguments lie, compiled once, and without Python."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import gc
import glob
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

from benchmarks.file_changes import first_call
import jax
from jax.experimental import io_callback
from jax.experimental.layout import Format, Layout
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, counted, mesh_of, put
import pytest

import spmd
from spmd import NamedSharding, P, _dispatch, pjit
from spmd._pmap import _threads

NOTHING = spmd.Counts()
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def weigh(x):
    """A function whose value shows which element came from where."""
    return x * 2 + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)


def fresh():
    """The same function as a new one, which no other test has traced."""
    return lambda x: weigh(x)


def weighed(x):
    """The same in NumPy."""
    return x * 2 + np.arange(x.size, dtype=x.dtype).reshape(x.shape)


def run_alone(source, **env):
    """Runs a script in a process of its own; returns what it printed."""
    head = """
        import jax, jax.numpy as jnp, numpy as np, spmd
        from spmd import P, pjit
        mesh = spmd.make_mesh({"data": 4, "model": 2})
    """
    script = textwrap.dedent(head) + textwrap.dedent(source)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-3000:]}"
    return done.stdout


# The trap of the fast path: it moves no argument

ELSEWHERE = {
    "another dimension": ({"data": 4, "model": 2}, None, P(None, "data")),
    "replicated": ({"data": 4, "model": 2}, None, P()),
    "axes in another order": ({"data": 4, "model": 2}, None, P(("model", "data"))),
    "devices in another order": ({"data": 4, "model": 2}, range(7, -1, -1), P(("data", "model"))),
    "another mesh": ({"model": 2, "data": 4}, (5, 0, 3, 6, 1, 4, 7, 2), P(("data", "model"))),
    "another shape of mesh": ({"x": 8}, (1, 0, 3, 2, 5, 4, 7, 6), P("x")),
}


@pytest.mark.parametrize("order", ["right first", "wrong first"])
@pytest.mark.parametrize("case", ELSEWHERE)
def test_argument_placed_otherwise_is_right_at_every_call(mesh, case, order):
    """An argument that lies elsewhere gives the right numbers however often it is passed."""
    shape, permuted, spec = ELSEWHERE[case]
    here = P(("data", "model"))
    f = pjit(weigh, in_axis_resources=here, out_axis_resources=here, mesh=mesh)
    right, wrong = put(X, mesh, here), put(X, mesh_of(shape, permuted), spec)
    turns = [right, right, wrong, wrong, wrong, right, wrong]
    for arg in turns if order == "right first" else turns[2:] + turns:
        assert_sharded(f(arg), weighed(X), here, mesh)
    assert wrong.sharding.is_equivalent_to(put(X, mesh_of(shape, permuted), spec).sharding, 2)


@pytest.mark.parametrize("case", ELSEWHERE)
def test_argument_without_spec_is_right_at_every_call(mesh, case):
    """Without a spec an argument may lie anywhere on the devices, at any call."""
    shape, permuted, spec = ELSEWHERE[case]
    f = pjit(weigh, mesh=mesh)
    right, wrong = put(X, mesh, P("data")), put(X, mesh_of(shape, permuted), spec)
    for arg in (right, wrong, wrong, wrong, right, wrong, right):
        np.testing.assert_array_equal(f(arg), weighed(X))


def test_one_of_many_arguments_placed_otherwise(mesh):
    """A single misplaced leaf among well placed ones is enough to leave the fast path."""
    spec = P("data")
    f = pjit(lambda xs: [weigh(x) for x in xs], in_axis_resources=(spec,), mesh=mesh)
    good = [put(X + i, mesh, spec) for i in range(4)]
    for bad in (None, 2, 2, 2, None, 0, 3, 3):
        xs = list(good)
        if bad is not None:
            xs[bad] = put(X + bad, mesh, P("model", "data"))
        for i, y in enumerate(f(xs)):
            np.testing.assert_array_equal(y, weighed(X + i))


def test_sizes_change_between_calls(mesh):
    """Each size is its own program, well or badly placed, and the next call is right again."""
    f = pjit(weigh, in_axis_resources=P("data"), out_axis_resources=P("data"), mesh=mesh)
    for rows, spec in [(8, P("data")), (16, P(None, "data")), (8, P()), (16, P("data"))] * 3:
        x = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)
        assert_sharded(f(put(x, mesh, spec)), weighed(x), P("data"), mesh)


def test_uneven_size_is_refused_at_every_call(mesh):
    """A size that does not divide is an error at the second and third call too, and heals."""
    f = pjit(weigh, in_axis_resources=P("data"), mesh=mesh)
    np.testing.assert_array_equal(f(put(X, mesh, P("data"))), weighed(X))
    bad = put(np.zeros((6, 8), np.float32), mesh, P())
    for _ in range(3):
        with pytest.raises(spmd.ShardingError, match="dimension 0 to be divisible by 4"):
            f(bad)
    np.testing.assert_array_equal(f(put(X, mesh, P("data"))), weighed(X))


def test_uneven_result_of_jit_comes_in_right(mesh):
    """An uneven array that a partitioner left somewhere is taken by value, call after call."""
    odd = np.arange(42, dtype=np.float32).reshape(6, 7)
    f = pjit(weigh, in_axis_resources=P("model"), out_axis_resources=P("model"), mesh=mesh)
    placed = jax.jit(lambda x: x + 0)(put(odd, mesh, P()))
    for arg in (odd, placed, put(odd, mesh, P("model")), placed, placed):
        assert_sharded(f(arg), weighed(odd), P("model"), mesh)


def test_mesh_with_other_devices_is_refused_at_every_call(mesh):
    """An argument committed to devices outside of the mesh never reaches the fast path."""
    f = pjit(weigh, in_axis_resources=P("data"), mesh=mesh)
    f(put(X, mesh, P("data")))
    for elsewhere in (jax.device_put(X, jax.devices()[3]), put(X, mesh_of({"data": 2}), P("data"))):
        for _ in range(3):
            with pytest.raises(spmd.MeshError, match="from other devices"):
                f(elsewhere)


def test_mesh_of_the_context_decides_at_every_call():
    """One function under two meshes in turn runs on each of them, fast path included."""
    f = pjit(weigh, in_axis_resources=P("x"), out_axis_resources=P("x"))
    meshes = [mesh_of({"x": 8}), mesh_of({"x": 8}, range(7, -1, -1)), mesh_of({"x": 4})]
    for mesh in meshes * 3:
        with mesh:
            assert_sharded(f(X), weighed(X), P("x"), mesh)
            assert_sharded(f(put(X, mesh, P("x"))), weighed(X), P("x"), mesh)


def test_every_kind_of_argument_in_turn(mesh):
    """Host arrays, uncommitted and committed arrays of the same values mix freely."""
    f = pjit(weigh, in_axis_resources=P("data"), out_axis_resources=P("data"), mesh=mesh)
    kinds = [X, jnp.asarray(X), put(X, mesh, P("data")), put(X, mesh, P("model"))]
    for arg in kinds * 2 + kinds[::-1] * 2:
        assert_sharded(f(arg), weighed(X), P("data"), mesh)


def _static_sum(x, n):
    return x * 5 - int(n) if isinstance(n, bool) else x + n


def test_replacing_static_values_never_mixes_programs(mesh):
    """Static arguments choose the program at every call: 1, 1.0 and True are three."""
    f = pjit(_static_sum, static_argnums=1, mesh=mesh)
    x = put(X, mesh, P("data"))
    for n in (1, 2, 1.0, True, False, 2, True, 1):
        want = X * 5 - int(n) if isinstance(n, bool) else X + n
        np.testing.assert_array_equal(f(x, n), want)


@pytest.mark.parametrize("spec", [P("data"), None], ids=["given", "left out"])
def test_argument_in_another_memory_layout_is_right_at_every_call(mesh, spec):
    """An array whose elements lie column by column gives the right numbers, fast path or not."""
    options = {} if spec is None else {"in_axis_resources": spec}
    f = pjit(weigh, mesh=mesh, **options)
    good = put(X, mesh, P("data"))
    odd = jax.device_put(X, Format(Layout((1, 0)), good.sharding))
    elsewhere = jax.device_put(X, Format(Layout((1, 0)), put(X, mesh, P(None, "data")).sharding))
    for arg in (odd, odd, good, good, odd, odd, elsewhere, elsewhere, good, odd):
        np.testing.assert_array_equal(f(arg), weighed(X))
    compiled = f.lower(good).compile()
    for arg in (odd, good, odd):
        np.testing.assert_array_equal(compiled(arg), weighed(X))


def test_donated_argument_in_another_memory_layout(mesh):
    """Donation of such an array works too: right numbers, and it is gone."""
    f = donating(mesh)
    for _ in range(2):
        x = jax.device_put(X, Format(Layout((1, 0)), put(X, mesh, P("data")).sharding))
        assert_sharded(f(x, X), 2 * X, P("data"), mesh)
        assert x.is_deleted()


@pytest.mark.parametrize("case", ELSEWHERE)
def test_moving_happens_on_the_devices(mesh, case):
    """A misplaced argument is resharded by the devices: its value never visits the host."""
    shape, permuted, spec = ELSEWHERE[case]
    f = pjit(weigh, in_axis_resources=P(("data", "model")), mesh=mesh)
    x = put(X, mesh_of(shape, permuted), spec)
    f(x).block_until_ready()
    assert x._npy_value is None  # where JAX keeps the host's copy
    np.testing.assert_array_equal(f(x), weighed(X))


def test_moving_under_settings_that_stop_programs(mesh, monkeypatch):
    """Moving an argument is not the user's program: settings for that one do not touch it."""
    monkeypatch.setattr("spmd._jax.dispatch.make_dispatcher", lambda *args: None)
    f = pjit(lambda x: jnp.where(jnp.isnan(x), 0, x), in_axis_resources=P("data"), mesh=mesh)
    x = put(np.where(X > 50, np.nan, X), mesh, P(None, "model"))
    want = np.where(X > 50, 0, X)
    with jax.debug_nans(True):
        np.testing.assert_array_equal(f(x), want)
    with jax.disable_jit():
        np.testing.assert_array_equal(f(x), want)


# A hit runs no Python


def python_calls(call):
    """Names of the Python functions that run during a call."""
    seen = []

    def profile(frame, event, _):
        if event == "call":
            seen.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen[1:]  # the first one is `call` itself


def leaves(n, mesh, spec):
    """Some well placed arrays."""
    return [put(X + i, mesh, spec) for i in range(n)]


HITS = {
    "one argument on one device": ({"data": 1}, lambda m: (put(X, m, P("data")),), {}),
    "one argument on 8 devices": ({"data": 8}, lambda m: (put(X, m, P("data")),), {}),
    "100 arguments": ({"data": 8}, lambda m: tuple(leaves(100, m, P("data"))), {}),
    "a tree": (
        {"data": 8},
        lambda m: ({"a": leaves(3, m, P("data")), "b": (put(X, m, P("data")), None)},),
        {},
    ),
    "a static argument": (
        {"data": 8},
        lambda m: (put(X, m, P("data")), "static"),
        {"static_argnums": 1},
    ),
}


@pytest.mark.parametrize("case", HITS)
def test_hit_runs_no_python(case):
    """A repeated call with rightly placed arguments runs no Python function at all."""
    shape, arguments, options = HITS[case]
    mesh = mesh_of(shape)

    def fun(*args):
        return jax.tree.map(lambda x: x if isinstance(x, str) else x + 1, args[0])

    with mesh:
        f = pjit(fun, in_axis_resources=P("data"), out_axis_resources=P("data"), **options)
        args = arguments(mesh)
        jax.block_until_ready([f(*args), f(*args)])
        ran = python_calls(lambda: f(*args))
        # C++ does not say which static argument has no hash: one frame of ours is around it.
        assert ran == [] or (
            options and [r.rpartition("/")[2] for r in ran] == ["_dispatch.py:guarded"]
        )
        # The instrument itself sees Python where there is some.
        misplaced = jax.tree.map(lambda x: x if isinstance(x, str) else np.asarray(x), args)
        spmd.clear_caches()
        assert python_calls(lambda: f(*misplaced)) != []


def test_hit_by_keyword_runs_no_python(mesh):
    """Keyword arguments take the fast path as positional ones do."""
    f = pjit(lambda x, y: x - y, in_axis_resources=(P("data"), P("model")), mesh=mesh)
    x, y = put(X, mesh, P("data")), put(X + 1, mesh, P("model"))
    f(x, y=y), f(x, y=y)
    assert python_calls(lambda: f(x, y=y)) == []
    np.testing.assert_array_equal(f(y=y, x=x), X - (X + 1))


def test_outputs_of_a_hit_are_like_those_of_a_miss(mesh):
    """Shape, dtype, weak type, sharding and commitment do not depend on who answered."""
    f = pjit(lambda x: {"y": x + 1, "n": 3, "k": jax.random.key(0)}, mesh=mesh)
    x = put(X, mesh, P("data"))
    first, second, third = f(x), f(x), f(x)
    for other in (second, third):
        assert jax.tree.structure(other) == jax.tree.structure(first)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            assert (a.aval, a.committed, a.sharding) == (b.aval, b.committed, b.sharding)
    np.testing.assert_array_equal(
        jax.random.key_data(third["k"]), jax.random.key_data(jax.random.key(0))
    )


# Counted work


def test_feeding_an_output_back_does_not_recompile(mesh):
    """A training loop compiles once, and from its second step on nothing is done twice."""
    f = pjit(
        lambda w, x: (w + x.mean(), (w * w).sum()),
        in_axis_resources=(P("model"), P("data")),
        out_axis_resources=(P("model"), None),
        mesh=mesh,
    )
    w, (_, first) = np.zeros((4, 2), np.float32), counted(lambda: None)
    (w, _), first = counted(f, w, X)
    assert first == spmd.Counts(traces=1, lowerings=1, compiles=1)
    for _ in range(3):
        (w, _), again = counted(f, w, X)
        assert again == NOTHING
    np.testing.assert_allclose(w, np.full((4, 2), 4 * X.mean()))


def test_feeding_back_what_the_partitioner_chose_settles(mesh):
    """Without output specs a loop compiles at most once more, for the layout it settles on."""
    f = pjit(lambda w: w * 2, mesh=mesh)
    w, first = counted(f, X)
    assert first.compiles == 1
    w, second = counted(f, w)
    w, third = counted(f, w)
    assert (second, third) == (NOTHING, NOTHING)
    np.testing.assert_array_equal(w, X * 8)


def test_numpy_first_and_own_replicated_output_next_is_one_program(mesh):
    """NumPy and the program's own replicated result share one trace and one program."""
    f = pjit(lambda s: s + 1, out_axis_resources=None, mesh=mesh)
    y, first = counted(f, X)
    assert first == spmd.Counts(traces=1, lowerings=1, compiles=1)
    y, second = counted(f, y)
    y, third = counted(f, y)
    assert (second, third) == (NOTHING, NOTHING)
    assert_sharded(y, X + 3, P(), mesh)


@pytest.mark.parametrize("spec", [P("data"), P(None, ("data", "model")), None])
def test_every_way_to_pass_the_same_value_is_one_program(mesh, spec):
    """Where a spec is given, NumPy, uncommitted, misplaced and placed arrays share one program."""
    f = pjit(fresh(), in_axis_resources=(spec,), out_axis_resources=P("data"), mesh=mesh)
    args = [
        X,
        jnp.asarray(X),
        put(X, mesh, P("model")),
        put(X, mesh, P() if spec is None else spec),
    ]
    _, work = counted(lambda: [f(a) for a in args * 3])
    assert work == spmd.Counts(traces=1, lowerings=1, compiles=1)


def test_equal_specs_in_other_words_compile_once(mesh):
    """One spec in three spellings, a NamedSharding among them, is one program."""
    fun = fresh()
    said = [P("data", None), P(("data",), None), NamedSharding(mesh, P("data", None))]
    work = counted(lambda: [pjit(fun, in_axis_resources=s, mesh=mesh)(X) for s in said])[1]
    assert work == spmd.Counts(traces=1, lowerings=1, compiles=1)


def test_equal_function_spec_and_mesh_trace_and_compile_once():
    """Decorating an equal function again, on an equal mesh, costs nothing."""

    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, x):
            return x * self.by

        def __eq__(self, other):
            return isinstance(other, Scale) and self.by == other.by

        def __hash__(self):
            return hash(self.by)

    functions = [Scale(2), Scale(2), Scale(3), Scale(2)]
    totals = []
    for scale in functions:
        with mesh_of({"data": 8}):
            y, work = counted(pjit(scale, in_axis_resources=P("data")), X)
        np.testing.assert_array_equal(y, X * scale.by)
        totals.append(work)
    once = spmd.Counts(traces=1, lowerings=1, compiles=1)
    assert totals == [once, NOTHING, once, NOTHING]


@pytest.mark.slow
def test_a_first_call_seldom_changes_files():
    """A first call goes from file to file about as often as `docs/design/house.md` says."""
    first_call((16,))
    assert 0 < sum(first_call((8, 4)).values()) <= 84  # by what is cached already


def test_equal_mesh_entered_in_every_way_is_one_program():
    """Our mesh, JAX's own contexts and the argument are one program when the meshes are equal."""
    ours, plain = mesh_of({"x": 8}), jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    f = pjit(fresh(), in_axis_resources=P("x"), out_axis_resources=P("x"))

    def calls():
        with ours:
            f(X)
        with jax.set_mesh(plain):
            f(X)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with plain:
                f(X)
        with mesh_of({"x": 8}), ours:
            f(X)

    assert counted(calls)[1] == spmd.Counts(traces=1, lowerings=1, compiles=1)


def test_another_mesh_or_spec_or_dtype_compiles_anew(mesh):
    """Sharing programs never goes too far."""
    fun, base = fresh(), {"in_axis_resources": P("data"), "mesh": mesh}
    pjit(fun, **base)(X)
    other = mesh_of({"data": 2, "model": 4})
    for options, x in [
        ({**base, "in_axis_resources": P("model")}, X),
        ({**base, "mesh": other}, X),
        ({**base, "out_axis_resources": P("model")}, X),
        (base, X.astype(np.int32)),
        (base, X[:4]),
    ]:
        y, work = counted(pjit(fun, **options), x)
        assert work.compiles == 1
        np.testing.assert_array_equal(y, weighed(x))


def test_clear_cache_of_one_function(mesh):
    """A function's own `clear_cache` makes it, and no other, compile again."""
    f, g = (pjit(lambda x, n=n: x + n, mesh=mesh) for n in (1, 2))
    x = put(X, mesh, P("data"))
    f(x), g(x), f(x), g(x)
    f.clear_cache()
    assert counted(g, x)[1] == NOTHING
    assert counted(f, x)[1].traces == 1


@pytest.mark.parametrize("clear", [spmd.clear_caches, jax.clear_caches], ids=["spmd", "jax"])
def test_clearing_forgets_everything(mesh, clear):
    """After either clear, traces, lowerings and programs are made anew, fast path included."""
    f = pjit(fresh(), in_axis_resources=P("data"), mesh=mesh)
    x = put(X, mesh, P("data"))
    f(x), f(x)
    assert counted(f, x)[1] == NOTHING
    clear()
    y, work = counted(f, x)
    assert work == spmd.Counts(traces=1, lowerings=1, compiles=1)
    np.testing.assert_array_equal(y, weighed(X))
    assert counted(f, x)[1] == NOTHING


# Threads


def together(calls):
    """Runs the calls at the same moment, each in a thread of its own."""
    barrier = threading.Barrier(len(calls))

    def one(call):
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result(timeout=120) for f in [pool.submit(one, c) for c in calls]]


def test_threads_compile_a_function_once():
    """Ten threads that call one function at once share one trace and one program."""
    mesh = mesh_of({"x": 4})
    traced = []

    def fun(x):
        traced.append(threading.get_ident())
        time.sleep(0.1)  # wide enough a window for a second trace
        return weigh(x)

    f = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))

    def call(i):
        with mesh:
            return f(X + i)

    results, work = counted(together, [lambda i=i: call(i) for i in range(10)])
    assert work == spmd.Counts(traces=1, lowerings=1, compiles=1)
    assert len(traced) == 1
    for i, y in enumerate(results):
        assert_sharded(y, weighed(X + i), P("x"), mesh)


def test_threads_with_different_signatures_work_at_the_same_time():
    """Tracing of one signature does not wait for that of another."""
    mesh = mesh_of({"x": 2})
    inside = threading.Barrier(2, timeout=60)

    def fun(x):
        inside.wait()  # passes only if both are being traced at once
        return x + 1

    f = pjit(fun, in_axis_resources=P("x"), mesh=mesh)
    a, b = together([lambda: f(X), lambda: f(X[:4])])
    np.testing.assert_array_equal(a, X + 1)
    np.testing.assert_array_equal(b, X[:4] + 1)


class _Announced:
    """A lock that says who comes to take it."""

    def __init__(self, lock):
        self.lock, self.coming = lock, threading.Event()

    def __enter__(self):
        self.coming.set()
        self.lock.acquire()

    def __exit__(self, *exc):
        self.lock.release()


STARTS = {
    "a call": lambda f, x: f(x),
    "a compiled call": lambda f, x: f.lower(x).compile()(x),
    "both halves of a gradient": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
}


@pytest.mark.parametrize("case", STARTS)
@pytest.mark.parametrize("devices", [1, 8])
def test_programs_whose_devices_meet_start_one_after_the_other(monkeypatch, case, devices):
    """A program on several devices waits for the thread that starts one; others do not."""
    lock = _Announced(threading.RLock())
    monkeypatch.setattr(_dispatch, "starting", lock)
    mesh = mesh_of({"data": devices})
    f = pjit(lambda x: jnp.sin(x), in_shardings=P("data"), out_shardings=P("data"), mesh=mesh)
    x = put(X, mesh, P("data"))
    results, done = [], threading.Event()

    def work():
        try:
            results.append(jax.block_until_ready(STARTS[case](f, x)))
        finally:
            done.set()

    with lock:
        lock.coming.clear()
        other = threading.Thread(target=work)
        other.start()
        either = done if devices == 1 else lock.coming
        assert either.wait(100)
        assert lock.coming.is_set() == (devices > 1)
        assert done.is_set() == (devices == 1)
    other.join(100)
    want = np.cos(X) if "gradient" in case else np.sin(X)
    np.testing.assert_allclose(results[0], want, rtol=1e-5, atol=1e-6)


def test_threads_have_their_own_mesh():
    """A mesh entered in one thread is not seen by another, and is part of the lookup."""
    f = pjit(weigh, in_axis_resources=P("x"), out_axis_resources=P("x"))
    orders = [range(8), range(7, -1, -1)] * 4
    entered = threading.Barrier(len(orders), timeout=60)

    def call(i):
        mesh = mesh_of({"x": 8}, orders[i])
        with mesh:
            entered.wait()
            for _ in range(3):
                assert_sharded(f(X + i), weighed(X + i), P("x"), mesh)

    together([lambda i=i: call(i) for i in range(len(orders))])
    assert spmd.current_mesh() is None


def test_failing_trace_leaves_nothing(mesh):
    """After a failed trace the next call works, and the context is as before."""
    broken = True

    def fun(x):
        if broken:
            raise KeyError("not yet")
        return x + 1

    f = pjit(fun, in_axis_resources=P("data"), mesh=mesh)
    for _ in range(2):
        with pytest.raises(KeyError, match="not yet"):
            f(X)
        assert spmd.current_mesh() is None
    broken = False
    y, work = counted(f, X)
    np.testing.assert_array_equal(y, X + 1)
    assert work == spmd.Counts(traces=1, lowerings=1, compiles=1)


STEPS = {
    "trace": "/jax/core/compile/jaxpr_trace_duration",
    "lowering": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compile": "/jax/core/compile/backend_compile_duration",
}


@contextlib.contextmanager
def interrupted_after(step):
    """Has an interrupt come where JAX says how long a step took; it still counts as running."""

    def listen(event, duration, **_):
        if event == STEPS[step]:
            raise KeyboardInterrupt

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.few(5)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("way", ["call", "pmap", "grad", "vmap", "compiled"])
def test_after_an_interrupt_all_is_cached_again(mesh, way, step, monkeypatch):
    """What was interrupted is made at the next call, and never again; then C++ has it."""
    # Threads that other tests have left would have a `pmap` take a lock and count.
    monkeypatch.setattr(_threads, "threads", (None,))

    def fun(x):
        return x * 2

    f = pjit(fun, in_axis_resources=P("data"), out_axis_resources=P("data"), mesh=mesh)
    run = {
        "call": f,
        "pmap": spmd.pmap(fun),
        "grad": jax.grad(lambda x: f(x).sum()),
        "vmap": jax.vmap(f, spmd_axis_name="model"),
        "compiled": lambda x: f.lower(x).compile()(x),
    }[way]
    x = spmd.pmap(lambda x: x)(X) if way == "pmap" else put(X, mesh, P("data"))
    expected = np.full_like(X, 2) if way == "grad" else X * 2
    with interrupted_after(step):
        run(x)
    assert spmd.current_mesh() is None
    np.testing.assert_array_equal(run(x), expected)
    for _ in range(2):
        y, work = counted(run, x)
        np.testing.assert_array_equal(y, expected)
        assert work == NOTHING
    if way in ("call", "pmap"):
        ran = python_calls(lambda: run(x))
        assert [r.rpartition("/")[2] for r in ran] == ["_threads.py:start"] * (way == "pmap")


def test_failing_trace_in_many_threads_leaves_nothing(mesh):
    """A failure reaches every thread that waits for the trace, and the function heals."""
    broken = True

    def fun(x):
        if broken:
            time.sleep(0.05)
            raise KeyError("not yet")
        return x + 1

    f = pjit(fun, in_axis_resources=P("data"), mesh=mesh)

    def call():
        with pytest.raises(KeyError, match="not yet"):
            f(X)
        return True

    assert together([call] * 8) == [True] * 8
    broken = False
    np.testing.assert_array_equal(f(X), X + 1)


# Memory


@pytest.mark.slow
def test_dropped_functions_die_with_their_programs():
    """Caches hold a function weakly: create, compile, call, drop leaves nothing behind."""
    from spmd import _binding, _dispatch, _lower, _trace

    caches = [_binding.make_binding, _trace._trace, _dispatch._prepare, _lower._compile]
    mesh = mesh_of({"x": 1})
    spmd.clear_caches()

    def round_trip(i):
        def fun(x):
            return x + i

        f = pjit(fun, in_axis_resources=P("x"), mesh=mesh)
        np.testing.assert_array_equal(f(X[:1]), X[:1] + i)
        f(X[:1])
        return weakref.ref(fun), weakref.ref(f)

    dead = [round_trip(i) for i in range(30)]
    gc.collect()
    assert [r() for pair in dead for r in pair] == [None] * 60
    assert [c.cache_info().currsize for c in caches] == [0] * len(caches)


@pytest.mark.slow
def test_ten_thousand_rounds_do_not_grow():
    """10,000 times create, evaluate, drop: functions die, caches and objects stay few."""
    from spmd import _binding, _trace

    mesh = mesh_of({"x": 8})

    def round_trip(i):
        def fun(x):
            return x

        f = pjit(fun, in_axis_resources=P("x"), mesh=mesh)
        assert f.eval_shape(X).shape == (8, 8)
        return weakref.ref(fun)

    for i in range(200):
        round_trip(i)
    gc.collect()
    objects = len(gc.get_objects())
    refs = [round_trip(i) for i in range(10_000)]
    gc.collect()
    assert sum(r() is not None for r in refs) == 0
    refs.clear()
    assert len(gc.get_objects()) - objects < 2_000
    assert _binding.make_binding.cache_info().currsize < 100
    assert _trace._trace.cache_info().currsize < 100


@pytest.mark.slow
def test_ten_thousand_wrappers_of_one_function_do_not_grow(mesh):
    """Decorating one function again and again shares its program and leaves no wrappers."""

    def fun(x):
        return x + 1

    x = put(X, mesh, P("data"))

    def round_trip():
        f = pjit(fun, in_axis_resources=P("data"), mesh=mesh)
        f(x)
        return weakref.ref(f)

    round_trip()
    gc.collect()
    objects, before = len(gc.get_objects()), spmd.counts()
    refs = [round_trip() for _ in range(2_000)]
    gc.collect()
    assert spmd.counts() - before == NOTHING
    assert sum(r() is not None for r in refs) == 0
    refs.clear()
    assert len(gc.get_objects()) - objects < 1_000


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)  # minutes, on a busy machine
def test_thousands_of_programs_do_not_grow():
    """3,000 rounds with a program compiled in each leave neither programs nor memory behind."""
    resource = pytest.importorskip("resource")
    mesh = mesh_of({"x": 1})

    def round_trip(i):
        def fun(x):
            return x + i

        f = pjit(fun, in_axis_resources=P("x"), mesh=mesh)
        f(X[:1])
        return weakref.ref(fun)

    for i in range(500):
        round_trip(i)
    gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refs = [round_trip(i) for i in range(2_500)]
    gc.collect()
    assert sum(r() is not None for r in refs) == 0
    # kilobytes; a program that stays takes some hundreds of them.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 50_000


# Donation


def donating(mesh, **options):
    """A function that takes its first argument's buffers."""
    return pjit(
        lambda x, y: x + y,
        in_axis_resources=P("data"),
        out_axis_resources=P("data"),
        donate_argnums=0,
        mesh=mesh,
        **options,
    )


def test_donated_argument_is_gone_and_the_result_right(mesh):
    """A donated array is deleted at every call, the other argument is not."""
    f, y = donating(mesh), put(X, mesh, P("data"))
    for i in range(4):
        x = put(X + i, mesh, P("data"))
        assert_sharded(f(x, y), 2 * X + i, P("data"), mesh)
        assert x.is_deleted()
        assert not y.is_deleted()


def test_donated_buffers_are_reused(mesh):
    """The result lies where the donated argument lay: donation reaches the compiler."""
    f, y = donating(mesh), put(X, mesh, P("data"))
    for _ in range(3):
        x = jax.jit(lambda x: x + 0)(y)  # buffers of the device's own, not NumPy's memory
        before = {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
        after = {s.data.unsafe_buffer_pointer() for s in f(x, y).addressable_shards}
        assert before == after


@pytest.mark.parametrize("case", ELSEWHERE)
def test_donated_argument_placed_otherwise(mesh, case):
    """Donation and resharding together: right numbers, and the original is gone."""
    shape, permuted, spec = ELSEWHERE[case]
    f, y = donating(mesh), put(X, mesh, P("data"))
    for i in range(3):
        x = put(X + i, mesh_of(shape, permuted), spec)
        assert_sharded(f(x, y), 2 * X + i, P("data"), mesh)
        assert x.is_deleted()
        well = put(X + i, mesh, P("data"))
        assert_sharded(f(well, y), 2 * X + i, P("data"), mesh)
        assert well.is_deleted()


def test_donated_host_array_stays(mesh):
    """A NumPy array has no device buffers to give: it can be passed again."""
    f, x = donating(mesh), X.copy()
    for _ in range(3):
        assert_sharded(f(x, X), 2 * X, P("data"), mesh)
    np.testing.assert_array_equal(x, X)


def test_donated_and_unusable(mesh):
    """Donation that no result can use warns where `jax.jit` does, and the numbers are right."""
    said = []
    for transform in (
        lambda f: pjit(f, in_axis_resources=P("data"), donate_argnums=0, mesh=mesh),
        lambda f: jax.jit(f, donate_argnums=0),
    ):
        f = transform(lambda x: x.sum())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [float(f(put(X, mesh, P("data")))) for _ in range(3)] == [X.sum()] * 3
        said.append([str(w.message) for w in caught])
    assert said[0] == said[1]


def test_donated_array_used_again_names_it(mesh):
    """A donated array passed again is an error with its name, at every further call."""
    f, y = donating(mesh), put(X, mesh, P("data"))
    f(put(X, mesh, P("data")), y), f(put(X, mesh, P("data")), y)
    x = put(X, mesh, P("data"))
    f(x, y)
    for _ in range(3):
        with pytest.raises(spmd.DonatedArrayError) as e:
            f(x, y)
        assert str(e.value) == (
            "pjit of `<lambda>` cannot use argument x: its buffers are gone.\n"
            "  expected  an array that was not donated to an earlier call and not deleted\n"
            "  fix       use the result of the call that took it, or do not donate it"
        )
        assert isinstance(e.value, RuntimeError)
    assert_sharded(f(put(X, mesh, P("data")), y), 2 * X, P("data"), mesh)


def test_same_array_donated_and_read_is_an_error(mesh):
    """One array as donated and as other argument is refused, and the next call is right."""
    f = donating(mesh)
    for _ in range(3):
        x = put(X, mesh, P("data"))
        with pytest.raises(RuntimeError) as e:
            f(x, x)
        if isinstance(e.value, spmd.DonatedArrayError):
            assert str(e.value) == (
                "pjit of `<lambda>` cannot donate argument x and use it as argument y too.\n"
                "  expected  a donated array to be one argument only: its buffers are given away\n"
                "  fix       do not donate it, or pass a copy"
            )
    assert_sharded(f(put(X, mesh, P("data")), put(X, mesh, P("data"))), 2 * X, P("data"), mesh)


@pytest.mark.parametrize("count", [1, 8])
def test_donating_hit_runs_almost_no_python(count):
    """A repeated call that donates runs in C++; older releases need two frames to stay alive."""
    mesh = mesh_of({"data": count})
    f = pjit(
        lambda state, x: jax.tree.map(lambda s: s + x, state),
        in_shardings=P("data"),
        out_shardings=P("data"),
        donate_argnums=0,
        mesh=mesh,
    )
    x = put(X, mesh, P("data"))
    guards = ["_dispatch.py:guarded", "dispatch.py:arrays_of"][: 2 if count > 1 else 1]
    guards *= jax.__version_info__ < (0, 12)
    state = f(f(leaves(3, mesh, P("data")), x), x)
    ran = python_calls(lambda: f(state, x))
    assert [r.rpartition("/")[2] for r in ran] == guards
    by_name = f(state=f(state=leaves(3, mesh, P("data")), x=x), x=x)
    ran = python_calls(lambda: f(state=by_name, x=x))
    assert [r.rpartition("/")[2] for r in ran] == guards
    assert all(s.is_deleted() for s in (*state, *by_name))


def test_what_a_donating_hit_leaves(mesh):
    """Only what the program took is gone, not what it reads, cannot use or gets from the host."""
    f = pjit(
        lambda a, b, c: (a + c, b.sum()),
        in_shardings=P("data"),
        out_shardings=(P("data"), P()),
        donate_argnames=("a", "b"),
        mesh=mesh,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of `b`, at the compile
        for i in range(4):
            host = X.copy()
            a, b, c = (put(X + i, mesh, P("data")) for _ in range(3))
            (total, _), by_host = f(a, c=c, b=b), f(host, b, c)
            assert [x.is_deleted() for x in (a, b, c)] == [True, False, False]
            np.testing.assert_array_equal(total, 2 * (X + i))
            np.testing.assert_array_equal(by_host[0], host + X + i)
            np.testing.assert_array_equal(host, X)


def test_donated_keys_on_repeated_calls(mesh):
    """Keys of random numbers are donated and refused as arrays are."""
    every = NamedSharding(mesh, P())
    f = pjit(lambda k: jax.random.fold_in(k, 1), out_shardings=P(), donate_argnums=0, mesh=mesh)
    for seed in range(5):
        key = jax.device_put(jax.random.key(seed), every)
        want = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1))
        np.testing.assert_array_equal(jax.random.key_data(f(key)), want)
        assert key.is_deleted()
        with pytest.raises(spmd.DonatedArrayError):
            f(key)


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: f.lower(X, X).compile()])
@pytest.mark.parametrize("count", [1, 8])
def test_donated_array_is_refused_after_many_calls(count, transform):
    """The tenth call refuses as the first does: an array that is gone, and one that is read too."""
    mesh = mesh_of({"data": count})
    f = transform(donating(mesh))
    for _ in range(9):
        f(put(X, mesh, P("data")), put(X, mesh, P("data")))
    x, y = put(X, mesh, P("data")), put(X, mesh, P("data"))
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError)) as e:  # 0.12 answers by itself
            f(x, x)
        assert isinstance(e.value, spmd.DonatedArrayError) or jax.__version_info__ >= (0, 12)
    x = put(X, mesh, P("data"))
    f(x, y)
    for _ in range(2):
        with pytest.raises(spmd.DonatedArrayError, match="cannot use argument x: its buffers"):
            f(x, y)
    f(y, put(X, mesh, P("data")))
    # Two arguments that are only read may be one array.
    g = pjit(lambda x, y, z: x + y * z, in_shardings=P("data"), donate_argnums=0, mesh=mesh)
    y = put(X, mesh, P("data"))
    for _ in range(4):
        np.testing.assert_array_equal(g(put(X, mesh, P("data")), y, y), X + X * X)


RISKY = {
    "donated after many calls, then to the same function": """
        f = pjit(lambda x: x + 1, in_axis_resources=P("data"), out_axis_resources=P("data"),
                 donate_argnums=0, mesh=mesh)
        for _ in range(5):
            f(jax.device_put(X, S))
        x = jax.device_put(X, S); f(x)
        use = lambda: f(x)
    """,
    "donated after many calls, then to another function": """
        f = pjit(lambda x: x + 1, in_axis_resources=P("data"), out_axis_resources=P("data"),
                 donate_argnums=0, mesh=mesh)
        g = pjit(lambda x: x * 2, in_axis_resources=P("data"), mesh=mesh)
        for _ in range(5):
            f(jax.device_put(X, S)); g(jax.device_put(X, S))
        x = jax.device_put(X, S); f(x)
        use = lambda: g(x)
    """,
    "donated by keyword, beside a static argument": """
        f = pjit(lambda x, n: x + n, in_axis_resources=P("data"), out_axis_resources=P("data"),
                 static_argnums=1, donate_argnames="x", mesh=mesh)
        for _ in range(5):
            f(x=jax.device_put(X, S), n=3)
        x = jax.device_put(X, S); f(x=x, n=3)
        use = lambda: f(x=x, n=3)
    """,
    "donated and read at once, after many calls": """
        f = pjit(lambda x, y: x + y, in_axis_resources=P("data"), out_axis_resources=P("data"),
                 donate_argnums=0, mesh=mesh)
        for _ in range(5):
            f(jax.device_put(X, S), jax.device_put(X, S))
        x = jax.device_put(X, S)
        use = lambda: f(x, x)
    """,
    "twice in one donated tree, after many calls": """
        f = pjit(lambda xs: [x + 1 for x in xs], in_axis_resources=P("data"),
                 out_axis_resources=P("data"), donate_argnums=0, mesh=mesh)
        for _ in range(5):
            f([jax.device_put(X, S), jax.device_put(X, S)])
        x = jax.device_put(X, S)
        use = lambda: f([x, x])
    """,
    "donated by jax.jit, then donated": """
        f = jax.jit(lambda x: x + 1, donate_argnums=0)
        g = pjit(lambda x: x * 2, in_axis_resources=P("data"), out_axis_resources=P("data"),
                 donate_argnums=0, mesh=mesh)
        for _ in range(5):
            g(jax.device_put(X, S)); f(jax.device_put(X, S))
        x = jax.device_put(X, S); f(x)
        use = lambda: g(x)
    """,
    "donated to a compiled call after many, then used": """
        f = pjit(lambda x: x + 1, in_axis_resources=P("data"), out_axis_resources=P("data"),
                 donate_argnums=0, mesh=mesh).lower(X).compile()
        for _ in range(5):
            f(jax.device_put(X, S))
        x = jax.device_put(X, S); f(x)
        use = lambda: f(x)
    """,
    "donated twice to the same function": """
        f = pjit(lambda x: x + 1, in_axis_resources=P("data"), out_axis_resources=P("data"),
                 donate_argnums=0, mesh=mesh)
        x = jax.device_put(X, S); f(x)
        x = jax.device_put(X, S); f(x)
        use = lambda: f(x)
    """,
    "donated, then used by another function": """
        f = pjit(lambda x: x + 1, in_axis_resources=P("data"), out_axis_resources=P("data"),
                 donate_argnums=0, mesh=mesh)
        g = pjit(lambda x: x * 2, in_axis_resources=P("data"), mesh=mesh)
        for _ in range(3):
            g(jax.device_put(X, S))
        x = jax.device_put(X, S); f(x)
        use = lambda: g(x)
    """,
    "donated to a first call that fails, then used by another function": """
        import contextlib
        f = pjit(lambda x: jnp.log(-1 - x), in_axis_resources=P("data"),
                 out_axis_resources=P("data"), donate_argnums=0, mesh=mesh)
        g = pjit(lambda x: x * 2, in_axis_resources=P("data"), mesh=mesh)
        for _ in range(3):
            g(jax.device_put(X, S))
        x = jax.device_put(X, S)
        try:
            with jax.debug_nans(True), contextlib.redirect_stdout(None):  # JAX tells of it
                f(x)
        except RuntimeError:
            use = lambda: g(x)
    """,
    "donated by jax.jit, then used": """
        f = jax.jit(lambda x: x + 1, donate_argnums=0)
        g = pjit(lambda x: x * 2, in_axis_resources=P("data"), mesh=mesh)
        for _ in range(3):
            g(jax.device_put(X, S)); f(jax.device_put(X, S))
        x = jax.device_put(X, S); f(x)
        use = lambda: g(x)
    """,
    "deleted, then used": """
        g = pjit(lambda x: x * 2, in_axis_resources=P("data"), mesh=mesh)
        for _ in range(3):
            g(jax.device_put(X, S))
        x = jax.device_put(X, S); x.delete()
        use = lambda: g(x)
    """,
    "donated to a compiled call, then used": """
        f = pjit(lambda x: x + 1, in_axis_resources=P("data"), out_axis_resources=P("data"),
                 donate_argnums=0, mesh=mesh)
        g = pjit(lambda x: x * 2, in_axis_resources=P("data"), mesh=mesh)
        for _ in range(3):
            g(jax.device_put(X, S))
        x = jax.device_put(X, S)
        f.lower(x).compile()(x)
        use = lambda: g(x)
    """,
}


@pytest.mark.few(0)
@pytest.mark.parametrize("case", RISKY)
def test_array_that_is_gone_never_crashes(case):
    """Using a donated or deleted array is an exception at every call, never a crash."""
    if case == "donated by jax.jit, then used" and jax.__version_info__ < (0, 12):
        pytest.skip("this JAX crashes by itself: jax.jit leaves no trace of what it donated")
    out = run_alone(
        """
        X = np.arange(64, dtype=np.float32).reshape(8, 8)
        S = jax.sharding.NamedSharding(jax.sharding.Mesh(mesh.devices, mesh.axis_names), P("data"))
        """
        + RISKY[case]
        + """
        for _ in range(3):
            try:
                use()
            except (RuntimeError, ValueError) as e:
                print("refused")
        """
    )
    assert out.split() == ["refused"] * 3


# Implicit resharding


def misplaced(mesh, mode=None):
    """A function, and an argument that does not lie as the function says."""
    f = pjit(weigh, in_axis_resources=P("data"), implicit_reshard=mode, mesh=mesh)
    f(put(X, mesh, P("data")))
    return f, put(X, mesh, P(None, "model"))


TEXT = """\
pjit of `weigh` has to reshard argument x.
  given     in_axis_resources = P('data') on mesh data=4, model=2
  expected  the argument to be there already
  got       P(None, 'model') on mesh data=4, model=2
  fix       place it so before the call, or take what it has with FROM_ARRAY"""


@pytest.mark.parametrize("by", ["argument", "environment", "default"])
def test_implicit_reshard_allow(mesh, by, monkeypatch):
    """Allowed, and by default, an argument is moved without a word."""
    if by == "environment":
        monkeypatch.setenv("SPMD_IMPLICIT_RESHARD", "allow")
    f, x = misplaced(mesh, "allow" if by == "argument" else None)
    for _ in range(3):
        np.testing.assert_array_equal(f(x), weighed(X))


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_implicit_reshard_warn(mesh, by, monkeypatch):
    """The warning has its own category, names both specs, and points to the user's line."""
    if by == "environment":
        monkeypatch.setenv("SPMD_IMPLICIT_RESHARD", "warn")
    f, x = misplaced(mesh, "warn" if by == "argument" else None)
    for _ in range(3):
        with pytest.warns(spmd.ImplicitReshardWarning) as caught:
            y = f(x)
        line = sys._getframe().f_lineno - 1
        np.testing.assert_array_equal(y, weighed(X))
        assert [(str(w.message), w.filename, w.lineno) for w in caught] == [(TEXT, __file__, line)]
    assert issubclass(spmd.ImplicitReshardWarning, UserWarning)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_implicit_reshard_error(mesh, by, monkeypatch):
    """The error is a ValueError that names both specs and FROM_ARRAY; well placed is fine."""
    if by == "environment":
        monkeypatch.setenv("SPMD_IMPLICIT_RESHARD", "error")
    f, x = misplaced(mesh, "error" if by == "argument" else None)
    for _ in range(3):
        with pytest.raises(ValueError) as e:
            f(x)
        assert str(e.value) == TEXT
        assert type(e.value) is spmd.ShardingError
    for fine in (put(X, mesh, P("data", None)), X, jnp.asarray(X)):
        np.testing.assert_array_equal(f(fine), weighed(X))


def test_implicit_reshard_argument_beats_environment(mesh, monkeypatch):
    """What is said at the function counts before what is said of the process."""
    monkeypatch.setenv("SPMD_IMPLICIT_RESHARD", "error")
    f, x = misplaced(mesh, "allow")
    np.testing.assert_array_equal(f(x), weighed(X))


def test_implicit_reshard_environment_is_read_at_each_call(mesh, monkeypatch):
    """The mode may change while the process runs."""
    f, x = misplaced(mesh)
    f(x)
    monkeypatch.setenv("SPMD_IMPLICIT_RESHARD", "error")
    with pytest.raises(spmd.ShardingError, match="has to reshard argument x"):
        f(x)
    monkeypatch.delenv("SPMD_IMPLICIT_RESHARD")
    np.testing.assert_array_equal(f(x), weighed(X))


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_implicit_reshard_unknown_mode(mesh, by, monkeypatch):
    """A mode that does not exist is an error with the three that do."""
    if by == "environment":
        monkeypatch.setenv("SPMD_IMPLICIT_RESHARD", "yes")

    def call():
        f, x = misplaced(mesh, "yes" if by == "argument" else None)
        f(x)

    with pytest.raises(spmd.OptionError, match="'allow', 'warn' or 'error'"):
        call()


def test_implicit_reshard_names_every_misplaced_argument(mesh):
    """Several misplaced leaves come in one error, by path."""
    f = pjit(
        lambda batch: batch["x"] + batch["y"],
        in_axis_resources=({"x": P("data"), "y": P("model")},),
        implicit_reshard="error",
        mesh=mesh,
    )
    wrong = {"x": put(X, mesh, P("model")), "y": put(X, mesh, P("data"))}
    with pytest.raises(spmd.ShardingError) as e:
        f(wrong)
    assert "reshard argument batch['x']" in str(e.value)
    assert "reshard argument batch['y']" in str(e.value)


@pytest.mark.slow
def test_implicit_reshard_error_lets_transformations_pass(mesh):
    """Under "error", grad of well placed arguments works: no one misplaced its cotangents."""
    f = pjit(
        lambda x, w: jnp.tanh(x @ w),
        in_axis_resources=(P("data"), P(None, "model")),
        out_axis_resources=P("data", "model"),
        implicit_reshard="error",
        mesh=mesh,
    )
    x, w = put(X / 64, mesh, P("data")), put(X / 64, mesh, P(None, "model"))
    got = jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))(x, w)
    want = jax.grad(lambda x, w: jnp.tanh(x @ w).sum(), argnums=(0, 1))(X / 64, X / 64)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


# Without the C++ dispatcher


@pytest.fixture
def no_fast_path(monkeypatch):
    """A JAX that has no dispatcher of the kind that we use."""
    monkeypatch.setattr("spmd._jax.dispatch.make_dispatcher", lambda *args: None)


def test_python_dispatcher_stands_in(mesh, no_fast_path):
    """Without JAX's dispatcher everything works the same, only slower."""
    f = pjit(
        lambda x, n, *, y: x * n + y,
        in_axis_resources=(P("data"), P("data")),
        out_axis_resources=P("data"),
        static_argnums=1,
        donate_argnames="y",
        mesh=mesh,
    )
    assert type(type(f).__call__).__name__ == "PythonDispatcher"
    for x_spec in (P("data"), P(None, "model"), P("data")):
        y = put(X, mesh, P("data"))
        assert_sharded(f(put(X, mesh, x_spec), 3, y=y), 4 * X, P("data"), mesh)
        assert y.is_deleted()
        with pytest.raises(spmd.DonatedArrayError):
            f(X, 3, y=y)
    _, work = counted(lambda: f(X, 3, y=put(X, mesh, P("data"))))
    assert work == NOTHING
    f.clear_cache()
    assert counted(lambda: f(X, 3, y=X))[1].traces == 1
    assert f.lower(X, 3, y=X).compile().in_specs[0][0] == P("data")


def test_python_dispatcher_in_classes_and_transformations(mesh, no_fast_path):
    """The stand-in works as a method and under JAX's transformations."""

    class Model:
        def __init__(self, by):
            self.by = by

        @spmd.pjit(static_argnums=0, mesh=mesh)
        def scale(self, x):
            return x * self.by

    np.testing.assert_array_equal(Model(3).scale(X), X * 3)
    f = pjit(lambda x: jnp.sin(x).sum(), in_axis_resources=P("data"), mesh=mesh)
    np.testing.assert_allclose(jax.grad(f)(X), np.cos(X), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(f)(X), np.sin(X).sum(), rtol=1e-5)
    with jax.disable_jit():
        np.testing.assert_allclose(f(X), np.sin(X).sum(), rtol=1e-5)


# Effects


def test_debug_print_prints_at_every_call(mesh, capfd):
    """A print inside of a function appears once per call, repeated calls included."""

    def fun(x):
        jax.debug.print("sum {}", x.sum())
        return x + 1

    f = pjit(fun, in_axis_resources=P("data"), mesh=mesh)
    for i in range(3):
        np.testing.assert_array_equal(f(put(X + i, mesh, P("data"))), X + i + 1)
    jax.effects_barrier()
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("sum")]
    assert printed == [f"sum {(X + i).sum()}" for i in range(3)]


@pytest.mark.parametrize("ordered", [False, True])
def test_io_callback_runs_at_every_call(ordered):
    """Host callbacks run once per call; ordered ones in program order."""
    mesh, seen = mesh_of({"x": 1}), []

    def fun(x):
        first = io_callback(
            lambda v: seen.append(float(v)) or np.float32(len(seen)),
            jax.ShapeDtypeStruct((), jnp.float32),
            x.sum(),
            ordered=ordered,
        )
        return x + first

    f = pjit(fun, in_axis_resources=P("x"), mesh=mesh)
    for i in range(1, 4):
        np.testing.assert_array_equal(f(X[:1] + i), X[:1] + 2 * i)
    jax.effects_barrier()
    assert seen == [float((X[:1] + i).sum()) for i in range(1, 4)]


def test_effects_inside_an_outer_jit(mesh, capfd):
    """The effect of an inner call is an effect of the outer program."""

    def fun(x):
        jax.debug.print("inner {}", x.sum())
        return x + 1

    f = jax.jit(pjit(fun, in_axis_resources=P("data"), mesh=mesh))
    f(X), f(X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count(f"inner {X.sum()}") == 2


# Settings of JAX


def test_debug_nans_raises_at_every_call(mesh):
    """`jax_debug_nans` finds a NaN at the first and at repeated calls, also switched on late."""
    f = pjit(jnp.log, in_axis_resources=P("data"), mesh=mesh)
    x = put(X - 10, mesh, P("data"))
    f(x), f(x)
    with jax.debug_nans(True):
        for _ in range(3):
            with pytest.raises(FloatingPointError, match="nan"):
                f(x)
        np.testing.assert_allclose(f(put(X + 1, mesh, P("data"))), np.log(X + 1), rtol=1e-5)
    assert np.isnan(f(x)).any()


def test_disable_jit_runs_the_function_itself(mesh):
    """Under `jax.disable_jit` the user's function runs with concrete values at every call."""
    seen = []

    def fun(x):
        seen.append(float(x.sum()))  # would fail on a tracer
        return spmd.with_sharding_constraint(x * 2, P("data"))

    with mesh:
        f = pjit(fun, in_axis_resources=P("data"), out_axis_resources=P("data"))
        with jax.disable_jit():
            for i in range(2):
                np.testing.assert_array_equal(f(X + i), (X + i) * 2)
    assert seen == [X.sum(), (X + 1).sum()]


def test_x64_is_part_of_the_key(mesh):
    """Values are double under x64 and single outside of it, in turn."""
    f = pjit(lambda x: x / 3, in_axis_resources=P("data"), mesh=mesh)
    wide = np.arange(8.0) + 1e-9
    # JAX 0.10.2 may crash where one process passes host arrays of 64 bits under both settings,
    # through `jax.jit` as well.
    given = jnp.asarray if jax.__version_info__ < (0, 12) else lambda x: x
    for _ in range(2):
        with jax.enable_x64(True):
            y = f(given(wide))
            assert y.dtype == np.float64
            np.testing.assert_allclose(y, wide / 3, rtol=1e-15)
        y = f(given(wide))
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, wide / 3, rtol=1e-6)


def test_default_matmul_precision_is_part_of_the_key(mesh):
    """A setting that changes what is traced traces anew, and is found again."""
    f = pjit(lambda x: x @ x, in_axis_resources=P("data"), mesh=mesh)
    f(X)
    with jax.default_matmul_precision("highest"):
        text = f.lower(X).as_text()
        assert "HIGHEST" in text
        assert counted(f, X)[1].compiles == 1
        assert counted(f, X)[1] == NOTHING
    assert "HIGHEST" not in f.lower(X).as_text()


def test_weak_types_are_kept(mesh):
    """A Python number stays weak through a call, and a strong one strong."""
    f = pjit(lambda x: x + 1, mesh=mesh)
    for _ in range(3):
        assert f(2).weak_type
        assert f(2).dtype == np.int32
        assert not f(np.int32(2)).weak_type
        assert f(2.5).weak_type
        assert f(2.5).dtype == np.float32
        assert (f(2.5) * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_log_compiles(mesh, caplog):
    """`jax_log_compiles` tells of each trace and compile with the function's name."""

    def counted_function(x):
        return x + 1

    f = pjit(counted_function, in_axis_resources=P("data"), mesh=mesh)
    with jax.log_compiles(), caplog.at_level(logging.DEBUG):
        f(X)
        said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert any(m.startswith("Finished tracing counted_function for pjit in") for m in said)
        assert any(
            m.startswith("Finished XLA compilation of") and "counted_function" in m for m in said
        )
        caplog.clear()
        f(X)
        assert [m for r in caplog.records if "counted_function" in (m := r.getMessage())] == []


def test_explain_cache_misses(mesh, caplog):
    """`jax_explain_cache_misses` says what differs from the nearest earlier call, and where."""

    def told(x):
        return x + 1

    f = pjit(told, in_axis_resources=P("data"), mesh=mesh)
    jax.config.update("jax_explain_cache_misses", True)
    try:
        with caplog.at_level(logging.WARNING, logger="spmd._trace"):
            f(X)
            f(X)
            f(X[:4])
            f(X.astype(np.int32))
    finally:
        jax.config.update("jax_explain_cache_misses", False)
    said = [r.getMessage() for r in caplog.records if r.name == "spmd._trace"]
    assert len(said) == 3
    assert "it was never traced before" in said[0]
    assert "x is f32[4,8], before f32[8,8]" in said[1]
    assert "x is i32[8,8], before f32[8,8]" in said[2]
    assert all("pjit of `told`" in m and "test_dispatch.py" in m for m in said)


def test_no_tracing_is_honoured(mesh):
    """`jax_no_tracing` lets known calls through and refuses new ones."""
    f = pjit(fresh(), in_axis_resources=P("data"), mesh=mesh)
    f(X)
    jax.config.update("jax_no_tracing", True)
    try:
        f(X)
        with pytest.raises(RuntimeError, match="jax_no_tracing"):
            f(X[:4])
    finally:
        jax.config.update("jax_no_tracing", False)


def test_loggers_are_named_after_their_modules(mesh, caplog):
    """What a module logs comes under its own name, below `spmd`."""
    with caplog.at_level(logging.DEBUG, logger="spmd"):
        f, x = misplaced(mesh)
        f(x)
    told = {r.name: r.getMessage() for r in caplog.records if r.name.startswith("spmd")}
    assert told["spmd._dispatch"] == "pjit of `weigh` reshards 1 arguments"
    for name, module in list(sys.modules.items()):
        if name.startswith("spmd.") and isinstance(
            logger := getattr(module, "logger", None), logging.Logger
        ):
            assert logger.name == name


@pytest.mark.slow
def test_profile_shows_the_call(mesh, tmp_path):
    """A profile has an event with the function's name around each call, fast or not."""

    def very_visible(x):
        return x + 1

    f = pjit(very_visible, in_axis_resources=P("data"), mesh=mesh)
    x = put(X, mesh, P("data"))
    f(x).block_until_ready()
    with jax.profiler.trace(tmp_path):
        f(x).block_until_ready()
        f(X).block_until_ready()
    (path,) = glob.glob(f"{tmp_path}/**/*.xplane.pb", recursive=True)
    profile = jax.profiler.ProfileData.from_file(path)
    events = [e for p in profile.planes for line in p.lines for e in line.events]
    starts = {e.start_ns for e in events if e.name == "PjitFunction(very_visible)"}
    assert len(starts) >= 2


def test_counts_are_public_and_subtract():
    """The counters are a frozen record; the difference of two counts a stretch of code."""
    a = spmd.Counts(traces=3, lowerings=2, compiles=1)
    assert a - spmd.Counts(traces=1, lowerings=1, compiles=1) == spmd.Counts(traces=2, lowerings=1)
    with pytest.raises(AttributeError):
        a.traces = 5


@pytest.mark.parametrize("same", [False, True], ids=["other arrays first", "one array twice first"])
def test_keywords_in_any_order(mesh, same):
    """Keyword arguments reach their parameters at every call, whatever taught the fast path."""
    one, three = put(X, mesh, P("data")), put(3 * X, mesh, P("data"))

    # By name the arguments come as a, b: not the order of the parameters.
    def minus(b, a, scale=1):
        return (b - a) * scale

    f = pjit(minus, in_axis_resources=P("data"), static_argnames="scale")
    with mesh:
        if same:
            f(b=one, a=one), f(b=one, a=one)
        for _ in range(3):
            for got in (
                f(one, three),
                f(one, a=three),
                f(b=one, a=three),
                f(a=three, b=one),
                f(a=three, b=one, scale=1),
            ):
                np.testing.assert_array_equal(got, -2 * X)
            np.testing.assert_array_equal(f(a=one, b=three), 2 * X)
            np.testing.assert_array_equal(f(a=one, scale=2, b=three), 4 * X)


def test_spelling_makes_no_other_program(in_mesh):
    """Specs that mean the same, however written, trace once and compile once."""

    def fun(v):
        return v * 5

    spellings = [
        {"in_axis_resources": P("data")},
        {"in_axis_resources": P("data", None)},
        {"in_axis_resources": (P("data"),)},
        {"in_shardings": {"v": P(("data",))}},
        {"in_axis_resources": NamedSharding(in_mesh._plain, P("data"))},
        {"in_axis_resources": P("data"), "implicit_reshard": "warn"},
    ]
    before = spmd.counts()
    for options in spellings:
        np.testing.assert_array_equal(pjit(fun, **options)(X), 5 * X)
    assert spmd.counts() - before == spmd.Counts(traces=1, lowerings=1, compiles=1)
    pjit(fun, in_axis_resources=P("model"))(X)
    pjit(fun, in_axis_resources=P("data"), donate_argnums=0)(X)
    assert (spmd.counts() - before).compiles == 3
