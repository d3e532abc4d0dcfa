"""Transformations on meshes of every kind: Explicit, abstract, partial, permuted, 3-D, of size 1.

The oracle slices the unsharded result by the coordinate of each device of the mesh.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
import numpy as np
from oracle import assert_sharded, counted, mesh_of, put
import pytest

import spmd
from spmd import P, pjit, with_sharding_constraint

RNG = np.random.default_rng(3)
X = RNG.uniform(-1, 1, (8, 8)).astype(np.float32)
W = RNG.uniform(-1, 1, (8, 8)).astype(np.float32)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def wave(x, w):
    """A product between nonlinear functions."""
    return jnp.sin(jnp.tanh(x @ w) * x)


def pinned(spec, x, w):
    """The same, with a constraint on the middle."""
    return jnp.sin(with_sharding_constraint(jnp.tanh(x @ w), spec) * x)


def grads(f):
    """Gradients by both arguments."""
    return jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))


def looped(f):
    """A loop of calls, differentiated."""

    def run(x, w):
        return jax.lax.scan(lambda c, w: (f(c, w), c.sum()), x, jnp.stack([w, -w]))[0].sum()

    return jax.grad(run, argnums=(0, 1))


@functools.cache
def wanted():
    """Unsharded: the value, its gradients, those of a loop, and values of a stack."""
    stack = np.stack([X, -X])
    plain = (wave, grads(wave), looped(wave), jax.vmap(wave, (0, None)))
    return [
        np_tree(jax.jit(g)(*a)) for g, a in zip(plain, [(X, W)] * 3 + [(stack, W)], strict=True)
    ]


def np_tree(tree):
    """Host copies."""
    return jax.tree.map(np.asarray, tree)


def check(f, mesh, specs, out):
    """Every transformation of a call gives the unsharded values, block by block."""
    value, gradient, loop, stacked = wanted()
    placed = [put(v, mesh, s) for v, s in zip((X, W), specs, strict=True)]

    def same(got, want, *where):
        for g, w, s in zip(jax.tree.leaves(got), jax.tree.leaves(want), where, strict=True):
            assert_sharded(g, w, s, mesh, **CLOSE)

    same(f(X, W), value, out)
    same(f(*placed), value, out)
    same(grads(f)(*placed), gradient, *specs)
    same(jax.jit(grads(f))(X, W), gradient, *specs)
    for g, w in zip(jax.jit(looped(f))(*placed), loop, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)
        assert g.sharding.device_set == set(mesh.devices.flat)
    same(jax.vmap(f, (0, None))(np.stack([X, -X]), W), stacked, P(None, *out))


MESHES = {
    "the last 4 of 8": ({"data": 4, "model": 1}, (4, 5, 6, 7)),
    "4 of 8 permuted": ({"data": 2, "model": 2}, (6, 1, 3, 4)),
    "1 of 8": ({"data": 1, "model": 1}, (5,)),
    "8 permuted": ({"data": 4, "model": 2}, (3, 1, 7, 5, 0, 2, 6, 4)),
    "an axis of size 1": ({"one": 1, "data": 4, "model": 2}, range(8)),
    "3-D": ({"data": 2, "model": 2, "depth": 2}, (1, 0, 3, 2, 5, 4, 7, 6)),
}


@pytest.mark.few(0)
@pytest.mark.parametrize("name", MESHES)
def test_mesh(name):
    """On any part of the devices, in any order and shape, every transformation is right."""
    shape, order = MESHES[name]
    mesh = mesh_of(shape, order)
    rows = ("depth", "data") if "depth" in shape else ("one", "data") if "one" in shape else "data"
    specs, out = (P(rows), P(None, "model")), P("model", rows)
    fun = functools.partial(pinned, P(rows, "model"))
    check(pjit(fun, specs, out, mesh=mesh), mesh, specs, out)


@pytest.mark.slow
def test_two_parts_of_the_devices_in_turn():
    """One function runs on both halves of the devices, each with results of its own."""
    halves = [mesh_of({"data": 4}, range(4)), mesh_of({"data": 4}, range(4, 8))]
    f = pjit(wave, (P("data"), P()), P("data"))
    value, gradient, *_ = wanted()
    for _ in range(2):
        for half in halves:
            with half:
                assert_sharded(f(X, W), value, P("data"), half, **CLOSE)
                dx, dw = grads(f)(X, W)
            assert_sharded(dx, gradient[0], P("data"), half, **CLOSE)
            assert_sharded(dw, gradient[1], P(), half, **CLOSE)
    with halves[0]:
        y, pull = jax.vjp(f, X, W)
    with halves[1]:  # the backward half runs where the forward one did
        dx, _ = pull(2 * y)
    assert_sharded(dx, gradient[0], P("data"), halves[0], **CLOSE)


OTHER_DEVICES = """\
pjit of `wave` cannot take argument x from other devices.
  given     P('data') on mesh data=4
  expected  4 devices cpu:0..3 of mesh data=4
  got       4 devices cpu:4..7
  fix       jax.device_put(x, NamedSharding(mesh, spec)), or leave the array uncommitted"""


@pytest.mark.parametrize("transform", ["call", "grad", "vmap", "jvp", "linearize"])
def test_argument_on_the_other_half_is_refused(transform):
    """An array on devices that the mesh does not have is an error under every transformation."""
    here, there = mesh_of({"data": 4}, range(4)), mesh_of({"data": 4}, range(4, 8))
    f = pjit(wave, (P("data"), P()), P("data"), mesh=here)
    x = put(X, there, P("data"))
    call = {
        "call": lambda: f(x, W),
        "grad": lambda: grads(f)(x, W),
        "vmap": lambda: jax.vmap(f, (None, 0))(x, W[None]),
        "jvp": lambda: jax.jvp(lambda w: f(x, w), (W,), (W,)),
        "linearize": lambda: jax.linearize(f, x, W),
    }[transform]
    with pytest.raises(spmd.MeshError) as e:
        call()
    assert str(e.value) == OTHER_DEVICES


def test_tangent_and_cotangent_on_the_other_half_are_refused():
    """A tangent or cotangent on other devices is called by what it is."""
    here, there = mesh_of({"data": 4}, range(4)), mesh_of({"data": 4}, range(4, 8))
    f = pjit(wave, (P("data"), P()), P("data"), mesh=here)
    _, pull = jax.vjp(f, X, W)
    with pytest.raises(spmd.MeshError, match="cannot take argument cotangent 0 of wave from other"):
        pull(put(X, there, P("data")))
    with pytest.raises(spmd.MeshError, match="cannot take argument the tangent of x from other"):
        jax.jvp(lambda x: f(x, W), (X,), (put(X, there, P("data")),))


def test_permuted_meshes_share_traces_and_no_programs():
    """The same axes over devices in another order trace once and compile apart."""
    orders = [range(8), range(7, -1, -1)]
    f = pjit(lambda x: jnp.cos(x) * 1.25, P("data"), P("data"))
    seen = []
    for order in orders:
        with mesh_of({"data": 8}, order) as mesh:
            for _ in range(2):
                y, counts = counted(f, X)
                assert_sharded(y, np.cos(X) * 1.25, P("data"), mesh, **CLOSE)
                seen.append(counts.compiles)
    assert seen == [1, 0, 1, 0]


# Explicit axes


EXPLICIT = {
    "all": (AxisType.Explicit, AxisType.Explicit),
    "one": (AxisType.Explicit, AxisType.Auto),
}


@pytest.mark.few(0)
@pytest.mark.parametrize("axes", EXPLICIT)
@pytest.mark.parametrize("how", ["mesh=", "set_mesh"])
def test_explicit_mesh(axes, how):
    """With Explicit axes, given or set, every transformation is right, and results are typed."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=EXPLICIT[axes])
    specs, out = (P("data"), P(None, "model")), P("model", "data")
    given = how == "mesh="
    fun = functools.partial(pinned, P("data", "model"))
    f = pjit(fun, specs, out, **({"mesh": mesh} if given else {}))
    value, gradient, _, stacked = wanted()
    with contextlib.nullcontext() if given else jax.set_mesh(mesh):
        placed = [
            jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip((X, W), specs, strict=True)
        ]
        for args in ((X, W), placed):
            y = f(*args)
            assert_sharded(y, value, out, mesh, **CLOSE)
        assert y.sharding.mesh.axis_types == EXPLICIT[axes]
        # Eagerly, with a mesh that is not set, JAX has no mesh for the types of derivatives.
        for g in (jax.jit(grads(f)), *([] if given else [grads(f)])):
            got = g(*placed)
            for d, w, s in zip(got, gradient, specs, strict=True):
                assert_sharded(d, w, s, mesh, **CLOSE)
        moved = jax.jit(lambda x, w: f(x, w) * 2)(*placed)
        assert_sharded(moved, 2 * value, out, mesh, **CLOSE)
        stack = jax.vmap(f, (0, None))(np.stack([X, -X]), W)
        np.testing.assert_allclose(stack, stacked, **CLOSE)


NOT_SET = """\
pjit of `wave` cannot be differentiated eagerly on a mesh with Explicit axes that is not set.
  given     mesh data=4, model=2, used at"""


@pytest.mark.slow
def test_eager_gradient_on_an_explicit_mesh_that_is_not_set():
    """Where `jax.jit` fails on the types of derivatives, the message says what to do."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    f = pjit(wave, (P("data"), P()), P("data"), mesh=mesh)
    with pytest.raises(spmd.MeshError) as e:
        grads(f)(X, W)
    assert str(e.value).startswith(NOT_SET)
    assert "fix       with jax.set_mesh(mesh): ..." in str(e.value)
    for got, want in zip(jax.jit(grads(f))(X, W), wanted()[1], strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)


@pytest.mark.slow
def test_scan_on_an_explicit_mesh():
    """A loop of calls whose carry keeps its type, differentiated, with the mesh set."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    f = pjit(wave, (P("data"), P()), P("data", None))
    loop = wanted()[2]

    def run(x, ws):
        return jax.lax.scan(lambda c, w: (f(c, w), c.sum()), x, ws)[0].sum()

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
        ws = jax.device_put(np.stack([W, -W]), NamedSharding(mesh, P()))
        for g in (jax.grad(run, argnums=(0, 1)), jax.jit(jax.grad(run, argnums=(0, 1)))):
            dx, dws = g(x, ws)
            np.testing.assert_allclose(dx, loop[0], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(dws[0] - dws[1], loop[1], rtol=1e-4, atol=1e-4)
            assert jax.typeof(dx).sharding.spec == P("data", None)


VAGUE = """\
pjit of `wave` cannot tell the type of result.
  given     a trace under jax.set_mesh with Explicit axes, where a type has a sharding
  expected  a full spec of every result in out_axis_resources
  fix       give out_axis_resources, or use a mesh with Auto axes"""


def test_explicit_mesh_without_a_result_spec():
    """Where types have shardings a traced result needs a spec; an eager one does not."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    f = pjit(wave, (P("data"), P()))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(f(X, W), wanted()[0], **CLOSE)
        for g in (jax.jit(f), grads(f)):
            with pytest.raises(ValueError) as e:
                g(X, W)
            assert str(e.value) == VAGUE


# Abstract meshes


ABSTRACT = AbstractMesh((4, 2), ("data", "model"))
SHAPES = (jax.ShapeDtypeStruct(X.shape, X.dtype),) * 2


def abstract(how):
    """The function on a mesh without devices, given as a mesh or by its shardings."""
    if how == "mesh=":
        return pjit(wave, (P("data"), P(None, "model")), P("data"), mesh=ABSTRACT)
    named = [NamedSharding(ABSTRACT, s) for s in (P("data"), P(None, "model"), P("data"))]
    return pjit(wave, tuple(named[:2]), named[2])


@pytest.mark.parametrize("how", ["mesh=", "shardings"])
def test_abstract_mesh_lowers(how):
    """A mesh without devices is enough to trace, to lower and to differentiate."""
    f = abstract(how)
    assert f.eval_shape(*SHAPES).shape == X.shape
    assert [a.shape for a in f.trace(*SHAPES).jaxpr.out_avals] == [X.shape]
    text = f.lower(*SHAPES).as_text()
    assert "num_partitions = 8" in text
    assert '<@mesh, [{"data"}, {}]>' in text
    assert '["data"=4, "model"=2]' in text
    with mesh_of({"data": 4, "model": 2}):
        real = pjit(wave, (P("data"), P(None, "model")), P("data")).lower(*SHAPES).as_text()
    assert text == real
    jaxpr = str(jax.make_jaxpr(grads(f))(*SHAPES))
    assert jaxpr.count("name=wave") == 2


@pytest.mark.parametrize("how", ["mesh=", "shardings"])
def test_abstract_mesh_cannot_run(how):
    """A call or a compile needs devices: the message names the function and says so."""
    f = abstract(how)
    calls = [lambda: f(X, W), lambda: f.lower(*SHAPES).compile(), lambda: grads(f)(X, W)]
    for call in calls:
        with pytest.raises(spmd.MeshError) as e:
            call()
        assert str(e.value).startswith("pjit of `wave` ")
        assert "AbstractMesh" in str(e.value)
        assert "devices" in str(e.value)
    with pytest.raises(spmd.MeshError) as e:
        with_sharding_constraint(X, NamedSharding(ABSTRACT, P("data")))
    assert str(e.value).startswith("with_sharding_constraint ")
    assert "AbstractMesh" in str(e.value)
