"""One program per signature: what is part of it, who compiles it, and what is told about it."""

import contextlib
import functools
import threading
import time

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
from oracle import counted, mesh_of
import pytest

from spmd import pmap
from spmd._pmap import _threads
from spmd._pmap._threads import Entries

X = np.arange(8, dtype=np.float32).reshape(4, 2)


def double(x):
    """What one device computes."""
    return x * 2


def test_what_makes_a_program():
    """Shapes, dtypes, weak types, trees, static values and JAX's settings; nothing else does."""
    fun = pmap(lambda x, n: jax.tree.map(lambda v: v * n, x), static_broadcasted_argnums=1)
    mesh = mesh_of({"a": 4})
    same = [X, X + 1, jnp.asarray(X), jax.device_put(X, NamedSharding(mesh, P("a")))]
    same += [jax.device_put(X, jax.devices()[5])]
    outs, spent = counted(lambda: [fun(x, 3) for x in same])
    for x, out in zip(same, outs, strict=True):
        np.testing.assert_array_equal(out, np.asarray(x) * 3)
    assert (spent.traces, spent.compiles, fun._cache_size) == (1, 1, 1)
    others = [
        lambda: fun(X[:2], 3),
        lambda: fun(X.astype(np.int32), 3),
        lambda: fun((X,), 3),
        lambda: fun(X, 4),
        lambda: fun(X, 3.0),
        lambda: fun(X[:, 0], 3),
        lambda: fun(lax.full((4,), 2.0), 3),  # of a weak type
    ]
    for count, other in enumerate(others, 2):
        other()
        other()
        assert fun._cache_size == count
    with jax.numpy_dtype_promotion("standard"):
        fun(X, 3)
    assert fun._cache_size == len(others) + 2
    fun(X, 3)
    assert fun._cache_size == len(others) + 2


def test_x64_is_part_of_the_key():
    """A program for 64 bits is another one."""
    fun = pmap(lambda x: x + 1)
    fun(np.arange(4))
    with jax.enable_x64(True):
        assert fun(np.arange(4)).dtype == np.int64
    assert fun._cache_size == 2


def test_keys_in_words():
    """They say what each leaf is; settings only where they are not JAX's own."""
    fun = pmap(lambda tree, n: tree["x"] * n, static_broadcasted_argnums=1)
    assert fun._debug_cache_keys() == "The cache contains 0 elements:"
    fun({"x": X}, 3)
    settings = "set in JAX: "
    (said,) = fun._debug_cache_keys().split("\n\n")[1:]
    rows = [row for row in said.splitlines() if not row.startswith(settings)]
    assert rows == [
        "tree['x']: f32[4,2]",
        "static 1: 3",
        "structure: PyTreeDef((({'x': *},), {}))",
    ]
    assert fun._debug_compute_cache_key({"x": X}, 3) == said
    partial = fun._debug_compute_cache_key({"x": jnp.float32(1) * 2, "y": 2})
    assert partial.splitlines()[:2] == ["tree['x']: f32[]", "tree['y']: i32[], weak type"]
    with jax.debug_key_reuse(False), jax.default_matmul_precision("float32"):
        assert "jax_default_matmul_precision='float32'" in fun._debug_compute_cache_key({"x": X}, 3)
    assert fun._cache_size == 1


def test_explain_miss():
    """It names the argument that differs from the nearest program, or the setting of JAX."""
    fun = pmap(lambda x, y, n: x + y * n, static_broadcasted_argnums=2)
    assert fun.explain_miss(X, X, 1) == "nothing was compiled before"
    fun(X, X, 1)
    fun(X[:2], X[:2], 1)
    assert fun.explain_miss(X, X + 1, 1) == ""
    assert fun.explain_miss(X, X[0], 1) == "y is f32[2], before f32[4,2]"
    assert fun.explain_miss(X, X, 2) == "static arguments differ"
    with jax.numpy_rank_promotion("warn"):
        assert "jax_numpy_rank_promotion is 'warn', before 'raise'" in fun.explain_miss(X, X, 1)
    assert fun._cache_size == 2


@pytest.mark.slow
def test_clearing():
    """`clear_cache` and `jax.clear_caches` forget programs; the next call compiles."""
    fun = pmap(double)
    for clear in (fun.clear_cache, jax.clear_caches):
        fun(X)
        assert fun._cache_size == 1
        clear()
        assert fun._cache_size == 0
        _, spent = counted(fun, X)
        assert spent.compiles == 1


def test_tracers_make_no_entry():
    """A call in a trace is part of that program; the one outside is made as ever."""
    fun = pmap(double)
    np.testing.assert_array_equal(jax.jit(fun)(X), X * 2)
    np.testing.assert_array_equal(jax.vmap(fun)(X[None]), X[None] * 2)
    assert jax.grad(lambda x: fun(x).sum())(X).shape == X.shape
    assert fun._cache_size == 0
    scale = jnp.float32(3)

    @jax.jit
    def closes(s):
        return pmap(lambda x: x * s)(X)

    np.testing.assert_array_equal(closes(scale), X * 3)
    np.testing.assert_array_equal(fun(X), X * 2)
    assert fun._cache_size == 1


# Transformed


def weighted(w, x):
    """What one device computes: a residual, a collective, an argument of each kind."""
    return jnp.sin(w * x) * lax.psum(x, "i")


def both(mapped, *args):
    """Loss and gradients with respect to all arguments."""
    return jax.value_and_grad(lambda *args: mapped(*args).sum(), (0, 1))(*args)


def pulled(mapped, *args):
    """Result and cotangents."""
    out, pull = jax.vjp(mapped, *args)
    return out, pull(jnp.cos(out))


def pushed(mapped, *args):
    """Result and tangents."""
    return jax.jvp(mapped, args, jax.tree.map(jnp.cos, args))


def linearized(mapped, *args):
    """Result and tangents, in two steps."""
    out, push = jax.linearize(mapped, *args)
    return out, push(*jax.tree.map(jnp.cos, args))


def stacked(mapped, w, x):
    """Over a further axis."""
    return jax.vmap(mapped, in_axes=(None, 1))(w, jnp.stack([x, -x], 1))


#: How a function is mapped, how that is transformed, and how often it compiles.
TRANSFORMED = {
    "value_and_grad": (lambda f: pmap(f, "i"), both, 2),
    "vjp": (lambda f: pmap(f, "i"), pulled, 2),
    "jvp": (lambda f: pmap(f, "i"), pushed, 1),
    "linearize": (lambda f: pmap(f, "i"), linearized, 2),
    "vmap": (lambda f: pmap(f, "i"), stacked, 1),
    "mapped anew": (lambda f: lambda *args: pmap(f, "i")(*args), both, 2),
    "static": (
        lambda f: functools.partial(
            pmap(lambda g, *args: g(*args), "i", static_broadcasted_argnums=0), f
        ),
        both,
        2,
    ),
    "donated": (lambda f: pmap(f, "i", donate_argnums=1), both, 2),
}


@contextlib.contextmanager
def compiles_of_jax():
    """A list that grows with each compile, whoever asked for it."""
    found = []

    def listen(event, *_, **__):
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.few(0)
@pytest.mark.filterwarnings("ignore::spmd.DonationWarning")
@pytest.mark.parametrize("case", TRANSFORMED)
def test_an_eager_transformation_compiles_once(case):
    """It traces once and compiles each half once, whatever the values, and they are right."""
    map_over, transform, compiles = TRANSFORMED[case]
    mapped = map_over(lambda w, x: weighted(w, x))
    alone = jax.vmap(weighted, axis_name="i")
    args = [(np.linspace(1, 2, 4, dtype=np.float32) * i, X / (3 + i)) for i in (1, 2, 3)]
    wanted = jax.tree.map(np.asarray, [transform(alone, *a) for a in args])
    arrays = jax.tree.map(jnp.array, args)
    first, spent = counted(transform, mapped, *arrays[0])
    assert (spent.traces, spent.lowerings, spent.compiles) == (1, compiles, compiles)
    with compiles_of_jax() as found:
        rest, again = counted(lambda: [transform(mapped, *a) for a in arrays[1:]])
    assert (again.traces, again.lowerings, again.compiles, found) == (0, 0, 0, [])
    for got, right in zip(jax.tree.leaves([first, *rest]), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


def test_an_eager_gradient_in_two_levels_compiles_once():
    """The levels are found at the first call only."""
    inner = lambda row: pmap(lambda v: v * lax.psum(v, "j"), "j")(row)  # noqa: E731 - one expression
    grad = jax.grad(lambda x: pmap(inner, "i")(x).sum())
    for scale, spent in [(1, (1, 2)), (3, (0, 0))]:
        x = jnp.asarray(X * scale)
        got, now = counted(grad, x)
        want = 2 * scale * X.sum(1, keepdims=True)
        np.testing.assert_allclose(got, np.broadcast_to(want, X.shape))
        assert (now.traces, now.compiles) == spent


def test_a_plan_with_values_of_a_trace_is_for_that_trace():
    """A function that closes over a traced value is traced anew in each trace."""
    held = {}
    mapped = pmap(lambda x: x * held["w"])

    def loss(w):
        held["w"] = w
        return mapped(X).sum()

    for w in (2.0, 5.0):
        value, slope = jax.value_and_grad(loss)(w)
        np.testing.assert_allclose((value, slope), (X.sum() * w, X.sum()))
    assert len(mapped._line.bindings) == 0


# Threads


def in_threads(count, work):
    """Runs `work(number)` in threads that start together; returns what each returned or raised."""
    start = threading.Barrier(count)
    found = [None] * count

    def run(i):
        start.wait(60)
        try:
            found[i] = work(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return found


def test_one_compile_per_signature():
    """Sixteen threads with four signatures compile four times.

    On one device: XLA may hang where threads start programs on several virtual devices at once.
    """
    traced = []

    def fun(x):
        traced.append(x.shape)
        return x * 2 + lax.axis_index("i").astype(x.dtype)

    mapped = pmap(fun, "i")
    work = lambda i: mapped(np.ones((1, 1 + i % 4), np.float32))  # noqa: E731 - one expression
    found, spent = counted(in_threads, 16, work)
    assert (sorted(traced), spent.compiles) == ([(n,) for n in (1, 2, 3, 4)], 4)
    for i, out in enumerate(found):
        np.testing.assert_array_equal(out, np.full((1, 1 + i % 4), 2, np.float32))


def test_one_trace_for_the_gradients_of_all_threads():
    """Eight threads that differentiate at once trace once, and compile each half once."""
    traced = []

    def fun(x):
        traced.append(x.shape)
        return x**2 + lax.axis_index("i").astype(x.dtype)

    mapped = pmap(fun, "i")
    grad = jax.grad(lambda x: mapped(x).sum())
    found, spent = counted(in_threads, 8, lambda i: grad(jnp.full((1, 2), float(i))))
    assert (traced, spent.compiles) == ([(2,)], 2)
    for i, out in enumerate(found):
        np.testing.assert_array_equal(out, np.full((1, 2), 2.0 * i, np.float32))


@pytest.mark.slow
def test_a_failing_trace_releases_who_waits():
    """All callers get the same error, nothing is kept, and the next call makes it anew."""
    fails = True

    def fun(x):
        time.sleep(0.05)
        if fails:
            raise ValueError("not yet")
        return x * 2

    mapped = pmap(fun)
    found = in_threads(8, lambda _: mapped(X))
    assert {str(e) for e in found} == {"not yet"}
    assert mapped._cache_size == 0
    fails = False
    np.testing.assert_array_equal(mapped(X), X * 2)
    assert mapped._cache_size == 1


def test_entries_wait_for_their_own_only():
    """While one entry is made, another is; who asks for the first waits."""
    entries, order = Entries(), []
    begun, go = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go.wait(60)
        order.append("slow")
        return "slow entry"

    def work(i):
        if i == 0:
            return entries.get("slow", slow)
        assert begun.wait(60)
        if i == 1:
            fast = entries.get("fast", lambda: order.append("fast") or "fast entry")
            go.set()
            return fast
        return entries.get("slow", slow)

    assert in_threads(4, work) == ["slow entry", "fast entry", "slow entry", "slow entry"]
    assert order == ["fast", "slow"]
    assert entries.keys() == ["fast", "slow"]


def test_entries_of_one_caller():
    """An entry that is not for others is made by each who asks, also by those who waited."""
    entries = Entries(keeps=lambda entry: entry < 0)
    made = in_threads(4, lambda i: entries.get("a", lambda: time.sleep(0.02) or i))
    assert made == [0, 1, 2, 3]
    assert (len(entries), entries._making) == (0, {})
    assert (entries.get("a", lambda: -1), entries.get("a", lambda: 7)) == (-1, -1)


def test_the_oldest_entry_goes(monkeypatch):
    """There are no more than so many."""
    monkeypatch.setattr(_threads, "_MOST", 2)
    entries = Entries()
    for i in range(4):
        assert entries.get(i, lambda i=i: -i) == -i
    assert entries.keys() == [2, 3]


def test_an_entry_that_another_finished_meanwhile():
    """Who looked just before the entry was there finds it behind the lock, and makes none."""

    class Late(dict):
        """Another caller makes the entry between the first look and its answer."""

        def get(self, key, default=None):
            found = super().get(key, default)
            if key == "a" and not self:
                entries.get("b", lambda: "first")
                self[key] = self["b"]
            return found

    entries = Entries()
    entries._entries = Late()
    assert entries.get("a", lambda: "second") == "first"


def test_an_entry_that_asks_for_itself():
    """A maker that asks for its own entry is run again, and does not wait for itself."""
    entries, depth = Entries(), []

    def make():
        depth.append(1)
        return entries.get("a", make) if len(depth) < 3 else "made"

    assert entries.get("a", make) == "made"
    assert len(depth) == 3


def test_an_interrupted_maker():
    """An interrupt is the thread's own: another makes the entry."""
    entries = Entries()
    begun, go = threading.Event(), threading.Event()

    def interrupted():
        begun.set()
        assert go.wait(60)
        raise KeyboardInterrupt

    def work(i):
        if i == 0:
            with contextlib.suppress(KeyboardInterrupt):
                entries.get("a", interrupted)
            return None
        assert begun.wait(60)
        threading.Timer(0.05, go.set).start()
        return entries.get("a", lambda: "made")

    assert in_threads(2, work) == [None, "made"]
