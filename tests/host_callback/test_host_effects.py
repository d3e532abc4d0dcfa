"""Taps and calls together with the rest: derivatives of `pjit`, stages, donation, other effects."""

import json
import os
import subprocess
import sys

import jax
from jax import lax
from jax.experimental import checkify, io_callback
from jax.extend.core import check_jaxpr
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, counted, mesh_of, put
import pytest
from tapped import Listener

import spmd
from spmd import P, host_callback as hcb, pjit

X = (np.arange(16, dtype=np.float32).reshape(4, 4) - 6) / 8
STACK = np.stack([X, 2 * X, -X])
A, B, AB = P("a"), P("b"), P("a", "b")

pytestmark = pytest.mark.usefixtures("checked_without_optimizer")


@pytest.fixture
def mesh():
    """The 2x2 mesh `a, b`; four devices compile faster than eight."""
    return mesh_of({"a": 2, "b": 2}, (3, 0, 2, 1))


@pytest.fixture
def log():
    """A log that must be empty in the end."""
    made = Listener()
    yield made
    assert made.take() == []


def values(seen):
    """What arrived, in order."""
    return [s.arg for s in seen]


def names(seen):
    """The names of the transformations of each call."""
    return [tuple(name for name, _ in s.transforms) for s in seen]


def assert_values(seen, *wanted):
    """Asserts that these values arrived, in this order."""
    assert len(seen) == len(wanted)
    for s, w in zip(seen, wanted, strict=True):
        np.testing.assert_allclose(s.arg, w, rtol=1e-5, atol=1e-6)


def assert_blocks(seen, value, spec, mesh):
    """Asserts that each device called once, with its block of a value."""
    assert {s.device for s in seen} == set(mesh.devices.flat)
    assert len(seen) == mesh.size
    made = put(value, mesh, spec)
    held = {s.device: np.asarray(s.data) for s in made.addressable_shards}
    for s in seen:
        np.testing.assert_allclose(s.arg, held[s.device], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(value)[s.shard.index].shape, s.arg.shape)


# Transformations of calls of `pjit`


def cube(tap, mesh, spec=AB):
    """``x ** 3``, with a tap of ``x ** 2``."""
    return pjit(lambda x: tap(x * x) * x, spec, spec, mesh=mesh)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradient(around, mesh, log):
    """The gradient of a call taps primal values once, whole and per shard."""
    f = cube(log.tap, mesh)
    np.testing.assert_allclose(around(jax.grad(lambda x: f(x).sum()))(X), 3 * X**2, rtol=1e-5)
    assert_values(log.take(), X**2)
    f = cube(log.shards, mesh)
    np.testing.assert_allclose(around(jax.grad(lambda x: f(x).sum()))(X), 3 * X**2, rtol=1e-5)
    assert_blocks(log.take(), X**2, AB, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_tangents(around, mesh, log):
    """A forward derivative of a call taps primal values once; linearize does, and its map not."""
    f = cube(log.tap, mesh)
    out, tangent = around(lambda x: jax.jvp(f, (x,), (2 * x,)))(X)
    np.testing.assert_allclose(out, X**3, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tangent, 6 * X**3, rtol=1e-5, atol=1e-6)
    assert_values(log.take(), X**2)

    def linear(x):
        out, along = jax.linearize(f, x)
        return out, along(x), along(2 * x)

    _, once, twice = around(linear)(X)
    np.testing.assert_allclose(once, 3 * X**3, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(twice, 6 * X**3, rtol=1e-5, atol=1e-6)
    assert_values(log.take(), X**2)


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_checkpoint(around, mesh, log):
    """Under checkpoint a call taps twice in a gradient, inside and around of pjit."""
    for f in (
        jax.checkpoint(cube(log.tap, mesh)),
        pjit(jax.checkpoint(lambda x: jnp.sin(log.tap(x * x))), AB, AB, mesh=mesh),
    ):
        around(jax.grad(lambda x, f=f: f(x).sum()))(X)
        assert_values(log.take(), X**2, X**2)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_map(around, mesh, log):
    """Under vmap a call taps once, with the batched value and its dimension."""
    f = cube(log.tap, mesh)
    np.testing.assert_allclose(around(jax.vmap(f))(STACK), STACK**3, rtol=1e-5, atol=1e-6)
    (seen,) = log.take()
    np.testing.assert_allclose(seen.arg, STACK**2, rtol=1e-5)
    assert seen.transforms == (("batch", {"batch_dims": (0,)}),)
    f = cube(log.shards, mesh)
    around(jax.vmap(f, 2, 1))(np.moveaxis(STACK, 0, 2))
    seen = log.take()
    assert len(seen) == 4
    for s in seen:
        ((name, params),) = s.transforms
        assert name == "batch"
        (dim,) = params["batch_dims"]
        np.testing.assert_allclose(s.arg, np.moveaxis(STACK, 0, dim)[s.shard.index] ** 2, rtol=1e-5)
        assert s.arg.shape == np.moveaxis(np.empty((3, 2, 2)), 0, dim).shape


def test_gradients_per_example(mesh, log):
    """A gradient per example taps once, with all examples."""
    f = cube(log.tap, mesh)
    got = jax.jit(jax.vmap(jax.grad(lambda x: f(x).sum())))(STACK)
    np.testing.assert_allclose(got, 3 * STACK**2, rtol=1e-5)
    seen = log.take()
    assert_values(seen, STACK**2)
    assert names(seen) == [("batch",)]


def test_cotangents_per_shard(mesh, log):
    """A custom rule taps gradients where they lie: each device its own block."""
    watch = jax.custom_vjp(lambda x: x)
    watch.defvjp(lambda x: (x, None), lambda _, ct: (log.shards(ct),))
    f = pjit(lambda x, w: jnp.tanh(watch(x) @ w).sum(), (AB, B), mesh=mesh)
    wanted = ((1 - np.tanh(X @ X) ** 2) @ X.T).astype(np.float32)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(X, X), wanted, rtol=1e-4, atol=1e-5)
    seen = log.take()
    assert {s.device for s in seen} == set(mesh.devices.flat)
    for s in seen:
        np.testing.assert_allclose(s.arg, wanted[s.shard.index], rtol=1e-4, atol=1e-5)


def test_call_with_a_rule(mesh, log):
    """A call of the host inside of a custom derivative differentiates inside of pjit."""

    @jax.custom_vjp
    def host_sin(x):
        return hcb.call(np.sin, x, result_shape=x)

    def forward(x):
        return host_sin(x), x

    def backward(x, ct):
        return (ct * hcb.call(np.cos, log.tap(x), result_shape=x),)

    host_sin.defvjp(forward, backward)
    f = pjit(lambda x: host_sin(x * 2).sum(), AB, mesh=mesh)
    np.testing.assert_allclose(jax.grad(f)(X), 2 * np.cos(2 * X), rtol=1e-5)
    assert_values(log.take(), 2 * X)


@pytest.mark.parametrize(
    "use",
    [
        lambda f: lambda x: (f(x), x)[1],
        lambda f: lambda x: jax.grad(lambda x: (f(x), x.sum())[1])(x),
        lambda f: lambda x: lax.scan(lambda c, _: ((f(c), c)[1], None), x, None, length=1)[0],
        lambda f: lambda x: jax.vjp(lambda y: (f(x), y)[1], x)[0],
        lambda f: lambda x: lax.cond(True, lambda x: (f(x), x)[1], lambda x: x, x),
        lambda f: lambda x: jax.checkpoint(lambda x: (f(x), x)[1])(x),
    ],
    ids=["unused", "grad", "scan", "vjp", "cond", "checkpoint"],
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_calls_that_nobody_uses_still_tap(around, use, mesh, log):
    """Dead code elimination keeps a call of pjit whose results nobody wants, if it taps."""
    f = pjit(lambda x: log.tap(x * 3), AB, AB, mesh=mesh)
    around(use(f))(X)
    assert_values(log.take(), 3 * X)


# Programs inside of programs


def test_order_through_calls(mesh, log):
    """Taps around, between and inside of calls in calls arrive in program order, per device too."""
    inner = pjit(lambda x: log.tap(x + 1), B, A, mesh=mesh)

    def outer(x):
        x = inner(log.tap(x))
        x = lax.fori_loop(0, 2, lambda _, x: inner(x), x)
        return log.tap(inner(x) * 2)

    f = pjit(outer, AB, AB, mesh=mesh)
    for _ in range(3):
        f(X)
    assert_values(log.take(), *[X, X + 1, X + 2, X + 3, X + 4, 2 * X + 8] * 3)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_branches_with_other_taps(around, mesh, log):
    """Branches that tap differently, in different ways, report the branch that runs."""
    other = Listener()
    branches = [
        lambda x: log.tap(x + 1),
        lambda x: (other.shards(x), log.tap(other.tap(x) * 2))[1],
        lambda x: x,
        lambda x: hcb.call(lambda x: x * 5, x, result_shape=x),
    ]
    f = around(pjit(lambda i, x: lax.switch(i, branches, x), (None, AB), AB, mesh=mesh))
    for i, wanted in enumerate([X + 1, X * 2, X, X * 5]):
        assert_sharded(f(np.int32(i), X), wanted, AB, mesh, rtol=1e-6)
    assert_values(log.take(), X + 1, 2 * X)
    seen = other.take()
    assert_blocks([s for s in seen if s.shard], X, AB, mesh)
    assert_values([s for s in seen if not s.shard], X)


def test_branches_of_branches(mesh, log):
    """A branch in a branch in a loop taps what runs, in order."""

    def step(i, x):
        return lax.cond(
            i % 2 == 0,
            lambda x: lax.cond(i > 1, lambda x: log.tap(x + 10), lambda x: log.tap(x + 1), x),
            lambda x: x * 2,
            x,
        )

    f = pjit(lambda x: lax.fori_loop(0, 4, step, x), AB, AB, mesh=mesh)
    np.testing.assert_allclose(f(X), 2 * (2 * (X + 1) + 10), rtol=1e-6)
    assert_values(log.take(), X + 1, 2 * (X + 1) + 10)


def test_shard_map_inside(mesh, log):
    """Inside of a shard_map inside of pjit each device taps its block, between whole taps."""
    local = jax.shard_map(
        lambda x: log.tap(x * 2),
        mesh=jax.sharding.Mesh(mesh.devices, mesh.axis_names),
        in_specs=AB,
        out_specs=AB,
    )
    f = pjit(lambda x: log.tap(local(log.tap(x))), AB, AB, mesh=mesh)
    assert_sharded(f(X), 2 * X, AB, mesh)
    seen = log.take()
    first = mesh.devices.flat[0]
    assert [s.arg.shape for s in seen if s.device == first] == [(4, 4), (2, 2), (4, 4)]
    assert sorted(s.arg.shape for s in seen) == [(2, 2)] * 4 + [(4, 4)] * 2


def test_programs_on_other_devices_in_turn(log):
    """Programs on different devices, some of which overlap, are in order on each device."""
    orders = (0, 1), (2, 3), (3, 1, 0, 2)
    meshes = [mesh_of({"x": len(order)}, order) for order in orders]
    runs = [pjit(log.shards, P("x"), P("x"), mesh=m) for m in meshes]
    alone = jax.jit(log.shards)
    for i in range(10):
        for run in runs:
            run(np.full(4, i, np.float32))
        alone(jax.device_put(np.full(4, i, np.float32), jax.devices()[1]))
    seen = log.take()
    for device in jax.devices()[:4]:
        mine = [s.arg[0] for s in seen if s.device == device]
        assert mine == sorted(mine)
        assert len(mine) == 10 * (3 if device.id == 1 else 2)


# Donation and references


@pytest.mark.parametrize("options", [{}, {"per_shard": True}], ids=str)
def test_donated_arguments(options, mesh, log):
    """What a tap was given of a donated argument stays what it was."""

    def step(x):
        x = log.tap(x, **options)
        return x * 2 + 1

    f = pjit(step, AB, AB, mesh=mesh, donate_argnums=0)
    x = put(np.ones((64, 64), np.float32), mesh, AB)
    for _ in range(8):
        old, x = x, f(x)
        assert old.is_deleted()
    value = 1
    seen = log.take()
    for device in mesh.devices.flat:
        mine = [s.arg for s in seen if s.device == device]
        assert len(mine) == (8 if options or device == mesh.devices.flat[0] else 0)
        value = 1
        for arg in mine:
            assert (arg == value).all()
            value = 2 * value + 1
    np.testing.assert_array_equal(x[0, 0], 2**9 - 1)


def test_references(mesh, log):
    """Taps of a mutable reference see what was written before them, and not what comes later."""
    r = jax.new_ref(put(X, mesh, AB))

    def fun(r):
        log.tap(r[...])
        r[...] = r[...] + 1
        log.tap(r[...])
        r[...] = hcb.call(lambda x: x * 2, r[...], result_shape=X)

    f = pjit(fun, mesh=mesh)
    f(r)
    f(r)
    second = 2 * (X + 1)
    assert_values(log.take(), X, X + 1, second, second + 1)
    np.testing.assert_allclose(r[...], 2 * (second + 1), rtol=1e-6)


# Stages


def test_stages(mesh, log):
    """Tracing, lowering and compiling call nobody; what is compiled calls, each time."""
    f = pjit(log.shards, AB, AB, mesh=mesh)
    traced = f.trace(X)
    lowered = traced.lower()
    compiled = lowered.compile()
    assert log.take() == []
    for _ in range(3):
        assert_sharded(compiled(X), X, AB, mesh)
    assert len(log.take()) == 12
    f(X)
    assert len(log.take()) == 4
    again = f.lower(X).compile()
    del f, traced, lowered, compiled
    assert_sharded(again(X), X, AB, mesh)
    assert_blocks(log.take(), X, AB, mesh)


def test_report_calls_nobody(mesh, log):
    """A report of a function that taps and calls runs nothing, and counts what it cannot see."""

    def fun(tap):
        return pjit(lambda x: jnp.sin(tap(x @ x)), AB, AB, mesh=mesh)

    bare, tapped = spmd.report(fun(lambda x: x), X), spmd.report(fun(log.shards), X)
    assert tapped.cost.opaque_calls == bare.cost.opaque_calls + 1
    assert tapped.cost.flops == bare.cost.flops
    assert len(tapped.collectives) == len(bare.collectives)


def test_counts(mesh, log):
    """A call that taps is traced, lowered and compiled once."""
    f = pjit(log.tap, AB, AB, mesh=mesh)
    _, first = counted(f, X)
    _, again = counted(f, X)
    assert (first.traces, first.lowerings, first.compiles) == (1, 1, 1)
    assert (again.traces, again.lowerings, again.compiles) == (0, 0, 0)
    assert len(log.take()) == 2


def test_export_is_refused(mesh, log):
    """A program that calls this process cannot be exported; JAX says why."""
    for fun in (jax.jit(log.tap), jax.jit(pjit(log.shards, AB, AB, mesh=mesh))):
        with pytest.raises(NotImplementedError, match="serialization of host_callbacks"):
            jax.export.export(fun)(X)


# Printed programs


def reached(x, *_, **__):
    """A host function with a name."""
    return x


def test_jaxpr_of_taps(mesh):
    """A jaxpr shows the host function by name, and what is not the default."""

    def fun(x):
        hcb.id_tap(reached, x)
        hcb.id_tap(reached, (x, x), device_index=2)
        x = hcb.id_tap(reached, x, per_shard=True, tap_with_device=True)
        hcb.id_print(x, what="x")
        return hcb.call(reached, x, result_shape=x)

    assert str(jax.make_jaxpr(fun)(X)) == (
        "{ lambda ; a:f32[4,4]. let\n"
        "    _:f32[4,4] = host_tap[func=reached] a\n"
        "    _:f32[4,4] _:f32[4,4] = host_tap[func=reached device_index=2] a a\n"
        "    b:f32[4,4] = host_tap[func=reached per_shard=True] a\n"
        "    _:f32[4,4] = host_tap[func=id_print] b\n"
        "    c:f32[4,4] = host_call[func=reached] b\n"
        "  in (c,) }"
    )
    mapped = jax.vmap(jax.vmap(lambda x, y: hcb.id_tap(reached, (x, y))[0], (0, None)))
    assert str(jax.make_jaxpr(mapped)(X, X)) == (
        "{ lambda ; a:f32[4,4] b:f32[4,4]. let\n"
        "    c:f32[4,4] _:f32[4,4] = host_tap[\n"
        "      func=reached\n"
        "      transforms=batch(0, None) batch(0, 0)\n"
        "    ] a b\n"
        "  in (c,) }"
    )


def test_jaxpr_has_the_effect():
    """The effect is ordered, stands in the type of a program, and has a name."""
    jaxpr = jax.make_jaxpr(lambda x: hcb.id_tap(reached, x))(X)
    (effect,) = jaxpr.effects
    assert str(effect) == "Host"
    check_jaxpr(jaxpr.jaxpr)


# Other effects


def test_beside_ordered_prints_and_callbacks(mesh, log, capsys):
    """Taps, ordered prints and ordered callbacks of one program each keep their own order."""
    called = []

    def fun(x):
        for i in range(4):
            log.tap(x + i)
            jax.debug.print("line {}", i, ordered=True)
            io_callback(lambda v: called.append(int(v)), None, jnp.int32(i), ordered=True)
        return x

    jax.jit(fun)(X)
    jax.jit(fun)(X)
    jax.effects_barrier()
    assert_values(log.take(), *[X + i for i in range(4)] * 2)
    assert called == [0, 1, 2, 3] * 2
    assert capsys.readouterr().out.splitlines() == [f"line {i}" for i in range(4)] * 2


def test_ordered_callbacks_live_on_after_a_failed_call(capsys):
    """A call that fails takes neither later taps nor JAX's own ordered callbacks with it."""
    called = []

    def fails(x):
        raise ValueError("the host has had enough")

    @jax.jit
    def other(x):
        io_callback(lambda v: called.append(float(v)), None, x, ordered=True)
        return x + 1

    with pytest.raises(jax.errors.JaxRuntimeError, match="the host has had enough"):
        jax.jit(lambda x: hcb.call(fails, x, result_shape=x))(jnp.ones(())).block_until_ready()
    assert other(jnp.float32(3)) == 4
    jax.effects_barrier()
    assert called == [3.0]
    with pytest.raises(hcb.CallbackException, match="the host has had enough"):
        hcb.barrier_wait()
    assert other(jnp.float32(4)) == 5
    jax.effects_barrier()
    assert called == [3.0, 4.0]


def test_checkify(mesh, log):
    """Programs that tap are checked, and tap once."""
    f = checkify.checkify(
        pjit(lambda x: jnp.log(log.tap(x)), AB, AB, mesh=mesh), errors=checkify.nan_checks
    )
    error, _ = f(X)
    assert "nan generated" in error.get()
    error, out = jax.jit(f)(X + 2)
    assert error.get() is None
    np.testing.assert_allclose(out, np.log(X + 2), rtol=1e-5)
    assert_values(log.take(), X, X + 2)


def test_without_jit(mesh, log):
    """Without jit, taps and calls run one by one, with the same values in the same order."""

    def fun(x):
        x = hcb.call(lambda x: x + 1, log.tap(x), result_shape=x)
        return lax.cond(x.sum() > -1e9, lambda x: log.tap(x * 2), lambda x: x, x)

    with jax.disable_jit():
        out = fun(jnp.asarray(X))
        np.testing.assert_allclose(out, 2 * (X + 1), rtol=1e-6)
        hcb.barrier_wait()
    assert_values(log.take(), X, 2 * (X + 1))


def test_nan_debugging(mesh, log):
    """With `jax_debug_nans` a NaN in a program that taps is an error; the taps have arrived."""
    f = jax.jit(lambda x: jnp.log(log.tap(x)))
    with jax.debug_nans(True):
        np.testing.assert_allclose(f(X + 2), np.log(X + 2), rtol=1e-5)
        with pytest.raises(FloatingPointError, match="nan"):
            f(X)
    seen = log.take()
    assert {s.arg.tobytes() for s in seen} == {X.tobytes(), (X + 2).tobytes()}


# Programs without taps


_UNTOUCHED = """
import json, sys, threading
import jax, jax.numpy as jnp, numpy as np
import spmd
from spmd import P

loaded = "spmd.host_callback" in sys.modules
if sys.argv[1] == "early":
    from spmd import host_callback as hcb
mesh = spmd.Mesh(np.array(jax.devices()[:4]), ("x",))
one = jax.jit(lambda x: x * 2)
many = spmd.pjit(lambda x: x @ x, P("x"), P("x"), mesh=mesh)
mapped = jax.shard_map(
    lambda: jax.lax.fori_loop(0, 3, lambda i, c: c + jax.lax.axis_index("x"), 0)[None],
    mesh=jax.sharding.Mesh(mesh.devices, ("x",)), in_specs=(), out_specs=P("x"), check_vma=False,
)
x, y = jnp.ones(4), many(np.ones((4, 4), np.float32))
from jax._src import dispatch
tokens = dispatch.RuntimeTokenSet

def python_calls(fun, *args):
    for _ in range(3):
        fun(*args)
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name)
                   if event == "call" else None)
    fun(*args)
    sys.setprofile(None)
    return calls

def state():
    before = spmd.counts()
    again = python_calls(many, y)
    after = spmd.counts() - before
    return {
        "jit": python_calls(one, x),
        "pjit": again,
        "counts": [after.traces, after.lowerings, after.compiles],
        "text": [
            stage.as_text()
            for lowered in (one.lower(x), many.lower(y), jax.jit(mapped).lower())
            for stage in (lowered, lowered.compile())
        ],
        "threads": threading.active_count(),
        "hooks": [tokens.get_token_input.__module__, tokens.set_token_result.__module__],
    }

found = {"loaded by spmd": loaded, "before": state()}
from spmd import host_callback as hcb
found["imported"] = state()
seen = []
jax.jit(lambda x: hcb.id_tap(lambda v, t: seen.append(v), x))(x)
spmd.pjit(lambda x: hcb.id_tap(lambda v, t: seen.append(v), x), P("x"), P("x"), mesh=mesh)(y)
hcb.barrier_wait()
hcb.stop_outfeed_receiver()
found["used"] = state()
found["seen"] = len(seen)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def untouched():
    """What a process says of programs without taps: before, with the module, and after taps."""
    return _untouched("late")


def _untouched(when):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _UNTOUCHED, when],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_import_changes_nothing(untouched):
    """The module is no part of `import spmd`; importing it starts no thread and hooks nothing."""
    assert not untouched["loaded by spmd"]
    assert untouched["imported"] == untouched["before"]
    assert all(m.startswith("jax.") for m in untouched["before"]["hooks"])


@pytest.mark.slow
def test_programs_without_taps_keep_their_fast_path(untouched):
    """Also after taps have run, programs without them are the same and run no Python."""
    before, used = untouched["before"], untouched["used"]
    assert untouched["seen"] == 2
    assert before["jit"] == used["jit"] == []
    assert before["pjit"] == used["pjit"]
    assert before["counts"] == used["counts"] == [0, 0, 0]
    assert before["text"] == used["text"]
    assert "spmd_host_callback" not in "".join(used["text"])


@pytest.mark.slow
def test_programs_without_taps_compile_to_the_same(untouched):
    """Imported before JAX starts, the module leaves programs without taps what they were."""
    early = _untouched("early")
    assert early["before"]["text"] == untouched["before"]["text"]
    assert early["before"]["jit"] == []
    assert early["before"]["threads"] == untouched["before"]["threads"]
