"""The primitive under every transformation, against NumPy and the unsharded function.

One sampler (`oracle.SAMPLES`) of functions, meshes and specs drives the tests; the oracle counts
in NumPy what each device must hold.
"""

from concurrent.futures import ThreadPoolExecutor
import dataclasses
import functools
import subprocess
import sys
import threading

import jax
from jax._src.sharding_impls import GSPMDSharding
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, sparse
from jax.experimental.jet import jet
from jax.extend.core import check_jaxpr
import jax.numpy as jnp
import numpy as np
from oracle import SAMPLES, assert_sharded, counted, mesh_of, put, sample
import pytest

import spmd
from spmd import NamedSharding, P, _jax, pjit, primitives, with_sharding_constraint
from spmd._dispatch import references
from spmd._jax.core import HloSharding
from spmd._mesh import plain_mesh
from spmd._resolve import resource_of
from spmd._spec import UNSPECIFIED

X = (np.arange(64, dtype=np.float32).reshape(8, 8) - 30) / 40
W = (np.arange(128, dtype=np.float32).reshape(8, 16) % 7 - 3) / 5
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
sampled = pytest.mark.parametrize(
    "case", [pytest.param(s, id=f"{s[1]} on {s[2]}") for s in SAMPLES]
)


@pytest.fixture(autouse=True)
def _checks():
    """Every jaxpr that a test makes is type-checked."""
    with jax.enable_checks(True):
        yield


def close(got, want, **tolerance):
    """Asserts that two trees have the same values."""
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, **(tolerance or CLOSE)),
        jax.tree.map(np.asarray, got),
        jax.tree.map(np.asarray, want),
    )


def layer(x, w):
    """A function with a constraint inside."""
    h = with_sharding_constraint(jnp.tanh(x @ w), P("data", "model"))
    return (h * h).sum(axis=1)


def plain_layer(x, w):
    """The same without any partitioning."""
    h = jnp.tanh(x @ w)
    return (h * h).sum(axis=1)


def layer_on(mesh, **options):
    """The layer, split both ways."""
    return pjit(
        layer,
        in_axis_resources=(P("data"), P(None, "model")),
        out_axis_resources=P("data"),
        mesh=mesh,
        **options,
    )


# Eager


@sampled
def test_sampled_values_and_shards(case):
    """Every device holds its block of what NumPy computes, for host and for placed arguments."""
    case = sample(*case)
    f, want = case.pjit(), case.reference(*case.args)
    assert_sharded(f(*case.args), want, case.out_spec, case.mesh, **CLOSE)
    placed = [put(a, case.mesh, s) for a, s in zip(case.args, case.in_specs, strict=True)]
    for _ in range(2):
        assert_sharded(f(*placed), want, case.out_spec, case.mesh, **CLOSE)


@sampled
def test_sampled_program_compiled_ahead(case):
    """The compiled stage computes what NumPy does, and reports the specs it was given."""
    case = sample(*case)
    compiled = case.pjit().lower(*case.args).compile()
    want = case.reference(*case.args)
    assert_sharded(compiled(*case.args), want, case.out_spec, case.mesh, **CLOSE)
    if case.mesh.size == 1:
        return
    out = NamedSharding(case.mesh, compiled.out_specs)
    assert out.is_equivalent_to(NamedSharding(case.mesh, case.out_spec), want.ndim)


# Inside jax.jit


@pytest.mark.few(3)
@sampled
def test_sampled_inside_jit(case):
    """Inside `jax.jit` values are right, on all devices, for host and placed arguments."""
    case = sample(*case)
    f = jax.jit(lambda *args: case.pjit()(*args) * 2)
    want = case.reference(*case.args) * 2
    y = f(*case.args)
    close(y, want)
    assert y.sharding.device_set == set(case.mesh.devices.flat)
    assert_sharded(jax.jit(case.pjit())(*case.args), want / 2, case.out_spec, case.mesh, **CLOSE)


def test_jit_inside_pjit(mesh):
    """`jax.jit` and its own pjit work inside of a pjit function."""
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w))
    f = pjit(
        lambda x, w: inner(x, w).sum(axis=1) + inner(x * 2, w).sum(axis=1),
        in_axis_resources=(P("data"), P(None, "model")),
        out_axis_resources=P("data"),
        mesh=mesh,
    )
    want = np.tanh(X @ W).sum(1) + np.tanh(2 * X @ W).sum(1)
    assert_sharded(f(X, W), want, P("data"), mesh, **CLOSE)


def test_pjit_in_pjit(in_mesh):
    """A nested call has its own specs, and the outer one its own."""
    inner = pjit(jnp.sin, in_axis_resources=P("model"), out_axis_resources=P(None, "data"))

    def outer(x):
        return inner(x) + inner(inner(x)).T

    f = pjit(outer, in_axis_resources=P("data"), out_axis_resources=P("data", "model"))
    want = np.sin(X) + np.sin(np.sin(X)).T
    assert_sharded(f(X), want, P("data", "model"), in_mesh, **CLOSE)
    close(jax.grad(lambda x: f(x).sum())(X), jax.grad(lambda x: _twice_sin(x).sum())(X))


def _twice_sin(x):
    return jnp.sin(x) + jnp.sin(jnp.sin(x)).T


def test_three_levels_and_mixed_nesting(in_mesh):
    """A pjit in jit in pjit in jit, under grad and vmap, is the plain function."""
    innermost = pjit(jnp.cos, in_axis_resources=P("model"))
    middle = jax.jit(lambda x: innermost(x) * x)
    outer = pjit(middle, in_axis_resources=P("data"), out_axis_resources=P("data"))
    top = jax.jit(lambda x: outer(x).sum())
    close(top(X), (np.cos(X) * X).sum())
    close(jax.grad(top)(X), np.cos(X) - X * np.sin(X))
    stack = np.stack([X, X + 1, X + 2])
    close(jax.vmap(jax.grad(top))(stack), np.cos(stack) - stack * np.sin(stack))


# Differentiation


@pytest.mark.few(1)
@sampled
def test_sampled_vjp_and_jvp(case):
    """Both derivatives agree with the unsharded function's and with each other.

    Each is placed like what it is the derivative of: gradients like inputs, tangents like outputs.
    """
    case = sample(*case)
    rng = np.random.default_rng(7)
    tangents = tuple(rng.normal(size=a.shape).astype(np.float32) for a in case.args)
    out, out_dot = jax.jvp(case.pjit(), case.args, tangents)
    want, want_dot = jax.jit(functools.partial(jax.jvp, case.fun))(case.args, tangents)
    assert_sharded(out, want, case.out_spec, case.mesh, **CLOSE)
    assert_sharded(out_dot, want_dot, case.out_spec, case.mesh, rtol=1e-4, atol=1e-4)
    primal, pull = jax.vjp(case.pjit(), *case.args)
    ct = rng.normal(size=primal.shape).astype(np.float32)
    assert_sharded(primal, want, case.out_spec, case.mesh, **CLOSE)
    cts = pull(ct)
    plain = jax.jit(lambda args, ct: jax.vjp(case.fun, *args)[1](ct))(case.args, ct)
    for c, w, spec in zip(cts, plain, case.in_specs, strict=True):
        assert_sharded(c, w, spec, case.mesh, rtol=1e-4, atol=1e-4)
    forward = float((np.asarray(out_dot) * ct).sum())
    backward = sum(float((np.asarray(c) * t).sum()) for c, t in zip(cts, tangents, strict=True))
    np.testing.assert_allclose(forward, backward, rtol=1e-3, atol=1e-3)


def test_grad_inside_jit(mesh):
    """`jit(grad(pjit))` gives the gradients of the plain function."""
    f = layer_on(mesh)
    got = jax.jit(jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1)))(X, W)
    close(got, jax.grad(lambda x, w: plain_layer(x, w).sum(), argnums=(0, 1))(X, W))


def test_grad_inside_pjit(in_mesh):
    """A whole training step inside of one pjit, constraint included, is the plain step."""

    def step(f, w, x):
        value, g = jax.value_and_grad(lambda w: f(x, w).sum())(w)
        return w - 0.1 * g, value

    f = pjit(
        functools.partial(step, layer),
        in_axis_resources=(P(None, "model"), P("data")),
        out_axis_resources=(P(None, "model"), None),
    )
    w, want = W, W
    for _ in range(3):
        w, value = f(w, X)
        want, want_value = step(plain_layer, want, X)
        assert_sharded(w, want, P(None, "model"), in_mesh, **CLOSE)
        close(value, want_value)


@pytest.mark.slow
def test_second_derivatives(mesh):
    """Hessian-vector products, forward over reverse and reverse over reverse."""
    f = layer_on(mesh)

    def loss(f, x):
        return f(x, W).sum()

    def hvp(f, x, v):
        return jax.jvp(jax.grad(functools.partial(loss, f)), (x,), (v,))[1]

    def grad_of_grad(f, x, v):
        return jax.grad(lambda x: (jax.grad(functools.partial(loss, f))(x) * v).sum())(x)

    for derivative in (hvp, grad_of_grad):
        close(derivative(f, X, X + 1), derivative(plain_layer, X, X + 1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_jacobians(mesh):
    """`jacfwd` and `jacrev`, which map a derivative over basis vectors."""
    f = pjit(
        lambda x: jnp.sin(x) * x[::-1],
        in_axis_resources=P("data"),
        out_axis_resources=P("data"),
        mesh=mesh,
    )
    x = np.linspace(0, 1, 8, dtype=np.float32)
    want = jax.jacrev(lambda x: jnp.sin(x) * x[::-1])(x)
    close(jax.jacfwd(f)(x), want)
    close(jax.jacrev(f)(x), want)


def test_linearize(mesh):
    """The linear map of `jax.linearize` is the JVP at that point, as often as it is called."""
    y, push = jax.linearize(layer_on(mesh), X, W)
    close(y, plain_layer(X, W))
    for v in (X, X * 2):
        close(push(v, W), jax.jvp(plain_layer, (X, W), (v, W))[1])


def test_grad_of_some_arguments_and_of_integers(mesh):
    """Arguments that are not differentiated, integers too, take part and get no cotangent."""

    def fun(x, n, w):
        return (x * n.astype(x.dtype)).sum() * w["scale"] + (w["bias"] ** 2).sum()

    f = pjit(fun, in_axis_resources=(P("data"), P("model"), None), mesh=mesh)
    n, w = np.arange(64).reshape(8, 8), {"scale": np.float32(2), "bias": X}
    close(jax.grad(f, argnums=(0, 2))(X, n, w), jax.grad(fun, argnums=(0, 2))(X, n, w))
    got = jax.grad(f, argnums=1, allow_int=True)(X, n, w)
    assert got.dtype == jax.dtypes.float0


def test_grad_of_outputs_of_which_some_are_unused(mesh):
    """A result that the loss does not use has a symbolic zero as cotangent."""

    def fun(x, w):
        return {"a": jnp.sin(x), "b": x @ w, "n": jnp.argmax(x)}

    f = pjit(fun, in_axis_resources=(P("data"), None), out_axis_resources=P(), mesh=mesh)
    close(jax.grad(lambda x: f(x, W)["a"].sum())(X), np.cos(X))
    close(jax.grad(lambda w: f(X, w)["a"].sum())(W), np.zeros_like(W))


def test_custom_derivatives_inside(mesh):
    """`custom_vjp` and `custom_jvp` inside of a call keep their rules."""

    @jax.custom_vjp
    def twisted(x):
        return x * 2

    twisted.defvjp(lambda x: (x * 2, x), lambda x, ct: (ct * x * 100,))

    @jax.custom_jvp
    def bent(x):
        return x * 3

    bent.defjvp(lambda p, t: (p[0] * 3, t[0] * 7))
    f = pjit(lambda x: twisted(x) + bent(x), in_axis_resources=P("data"), mesh=mesh)
    close(jax.grad(lambda x: f(x).sum())(X), X * 100 + 7)
    close(jax.jvp(bent_on(mesh, bent), (X,), (X,))[1], X * 7)


def bent_on(mesh, bent):
    """A function with a custom JVP, split over the mesh."""
    return pjit(bent, in_axis_resources=P("data"), mesh=mesh)


def test_grad_of_checkpointed_call(mesh):
    """`jax.checkpoint` around and inside of a call gives the plain gradient."""
    want = jax.grad(lambda x: plain_layer(x, W).sum())(X)
    around = jax.checkpoint(lambda x: layer_on(mesh)(x, W).sum())
    close(jax.grad(around)(X), want)
    inside = pjit(jax.checkpoint(layer), in_axis_resources=(P("data"), None), mesh=mesh)
    close(jax.grad(lambda x: inside(x, W).sum())(X), want)
    close(jax.jit(jax.grad(around))(X), want)


def test_checkpoint_policy_sees_names_inside(mesh):
    """A policy that saves named values finds them inside of a call."""

    def fun(x):
        return jnp.sin(checkpoint_name(jnp.sin(x), "kept"))

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    f = pjit(fun, in_axis_resources=P("data"), mesh=mesh)
    around = jax.checkpoint(lambda x: f(x).sum(), policy=policy)
    want = np.cos(np.sin(X)) * np.cos(X)
    close(jax.grad(around)(X), want)
    close(jax.jit(jax.grad(around))(X), want)


# Residuals


def test_each_half_of_a_gradient_compiles_once(mesh):
    """The first gradient compiles a forward and a backward program, the next ones none."""
    f = pjit(
        lambda x, w: jnp.tanh(x @ w),
        in_axis_resources=(P("data"), P(None, "model")),
        out_axis_resources=P("data", "model"),
        mesh=mesh,
    )
    x, w = put(X, mesh, P("data")), put(W, mesh, P(None, "model"))
    grad = jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))
    _, first = counted(grad, x, w)
    assert first.compiles == 2
    assert first.traces == 1
    for _ in range(2):
        assert counted(grad, x, w)[1] == spmd.Counts()


def test_residuals_keep_the_sharding_of_the_compiler(mesh):
    """What passes from forward to backward is split as the computation is, not replicated."""
    f = pjit(
        lambda x, w: jnp.tanh(x @ w),
        in_axis_resources=(P("data"), P(None, "model")),
        out_axis_resources=P("data", "model"),
        mesh=mesh,
    )
    x, w = put(X, mesh, P("data")), put(W, mesh, P(None, "model"))
    _, pull = jax.vjp(f, x, w)
    residuals = [
        r for r in jax.tree.leaves(pull) if isinstance(r, jax.Array) and r.shape == (8, 16)
    ]
    computed = [r for r in residuals if r is not w]
    assert computed
    for r in computed:
        assert r.sharding.shard_shape(r.shape) == (2, 8), r.sharding


def test_donated_argument_that_is_a_residual(mesh):
    """A donated argument that the backward pass needs is kept, with a warning, and right."""
    f = pjit(
        lambda x, w: x * w,
        in_axis_resources=P("data"),
        out_axis_resources=P("data"),
        donate_argnums=0,
        mesh=mesh,
    )
    x, w = put(X, mesh, P("data")), put(X + 2, mesh, P("data"))
    with pytest.warns(spmd.DonationWarning) as caught:
        y, pull = jax.vjp(f, x, w)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    first, given, fix = str(caught[0].message).splitlines()
    assert first == (
        "pjit of `<lambda>` does not donate argument x: its derivative needs the value."
    )
    assert given.startswith("  given     argument x among those to donate, used at ")
    assert given.endswith("(test_donated_argument_that_is_a_residual)")
    assert fix == (
        "  fix       differentiate inside of the function that donates, or do not donate it"
    )
    assert not x.is_deleted()
    close(y, X * (X + 2))
    close(pull(np.ones_like(X)), (X + 2, X))


def test_donated_argument_that_is_no_residual(mesh):
    """A donated argument that the backward pass does not need is donated, without a warning."""
    f = pjit(
        jnp.sin,
        in_axis_resources=P("data"),
        out_axis_resources=P("data"),
        donate_argnums=0,
        mesh=mesh,
    )
    x = put(X, mesh, P("data"))
    y, pull = jax.vjp(f, x)
    assert x.is_deleted()
    close(y, np.sin(X))
    ct = put(np.ones_like(X), mesh, P("data"))
    close(pull(ct), (np.cos(X),))
    close(pull(ct), (np.cos(X),))  # neither residuals nor cotangents are donated


# Batching


@pytest.mark.few(3)
@sampled
def test_sampled_vmap(case):
    """Mapping over a new leading or trailing dimension gives the stacked results."""
    case = sample(*case)
    x, w = case.args
    want = np.stack([case.reference(v, w) for v in (x, 2 * x, -x)], axis=-1)
    for axis in (0, x.ndim):
        xs = np.stack([x, 2 * x, -x], axis=axis)
        got = jax.vmap(case.pjit(), in_axes=(axis, None), out_axes=-1)(xs, w)
        close(got, want)
        assert got.sharding.device_set == set(case.mesh.devices.flat)


def test_vmap_boundary_is_unsharded(mesh):
    """At an eager boundary the new dimension is not split; the others follow the spec."""
    f = layer_on(mesh)
    xs = np.stack([X, X + 1, X + 2])
    y = jax.vmap(f, in_axes=(0, None))(xs, W)
    want = np.stack([plain_layer(x, W) for x in xs])
    assert_sharded(y, want, P(None, "data"), mesh, **CLOSE)
    y = jax.vmap(f, in_axes=(1, None), out_axes=1)(np.moveaxis(xs, 0, 1), W)
    assert_sharded(y, want.T, P("data"), mesh, **CLOSE)


def test_vmap_inside_is_left_to_the_partitioner(in_mesh):
    """Inside of a program the new dimension of a call and of a constraint is unconstrained."""
    f = jax.vmap(layer_on(in_mesh), in_axes=(0, None))
    text = jax.jit(f).lower(np.stack([X] * 8), W).as_text()
    assert 'sdy.sharding_constraint %arg0 <@mesh, [{?}, {"data"}, {}]>' in text
    assert '<@mesh, [{?}, {"data"}, {"model"}]>' in text


def test_vmap_does_not_gather_a_mapped_dimension(mesh):
    """A batch split over an axis that the function leaves free stays split inside of jit."""
    f = pjit(
        lambda x: x * 2, in_axis_resources=P("model"), out_axis_resources=P("model"), mesh=mesh
    )
    xs = put(np.stack([X] * 8), mesh, P("data", "model"))
    text = jax.jit(jax.vmap(f)).lower(xs).compile().as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text


def test_vmap_spmd_axis_name(mesh):
    """`spmd_axis_name` splits the mapped dimension over that axis, at inputs and outputs."""
    f = pjit(
        lambda x: with_sharding_constraint(jnp.sin(x), P("model")),
        in_axis_resources=P("model"),
        out_axis_resources=P("model"),
        mesh=mesh,
    )
    xs = np.stack([X + i for i in range(4)])
    y = jax.vmap(f, spmd_axis_name="data")(xs)
    assert_sharded(y, np.sin(xs), P("data", "model"), mesh, **CLOSE)
    y = jax.vmap(f, in_axes=1, out_axes=1, spmd_axis_name="data")(np.moveaxis(xs, 0, 1))
    assert_sharded(y, np.sin(np.moveaxis(xs, 0, 1)), P("model", "data"), mesh, **CLOSE)
    grads = jax.vmap(jax.grad(lambda x: f(x).sum()), spmd_axis_name="data")(xs)
    assert_sharded(grads, np.cos(xs), P("data", "model"), mesh, **CLOSE)


def test_vmap_spmd_axis_name_of_several_axes():
    """The mapped dimension may be split over two axes at once."""
    mesh = mesh_of({"a": 2, "b": 2, "c": 2})
    f = pjit(jnp.sin, in_axis_resources=P("c"), out_axis_resources=P("c"), mesh=mesh)
    xs = np.stack([X + i for i in range(4)])
    y = jax.vmap(f, spmd_axis_name=("a", "b"))(xs)
    assert_sharded(y, np.sin(xs), P(("a", "b"), "c"), mesh, **CLOSE)


def test_vmap_spmd_axis_name_in_use_is_refused(mesh):
    """An axis that the function uses already cannot split the mapped dimension too."""
    f = layer_on(mesh)
    with pytest.raises(spmd.ShardingError, match="mesh axis 'data'") as e:
        jax.vmap(f, in_axes=(0, None), spmd_axis_name="data")(np.stack([X] * 4), W)
    assert "pjit of `layer`" in str(e.value)
    assert "test_pjit.py" in str(e.value)


@pytest.mark.slow
def test_vmap_of_vmap_and_of_grad(mesh):
    """Two new dimensions, and per-example gradients, agree with the plain function."""
    f = layer_on(mesh)
    xs = np.stack([np.stack([X * i + j for i in range(2)]) for j in range(3)])
    got = jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(0, None))(xs, W)
    close(got, jax.vmap(jax.vmap(plain_layer, (0, None)), (0, None))(xs, W))

    def loss(f, x, w):
        return f(x, w).sum()

    per_example = [
        jax.vmap(jax.grad(functools.partial(loss, g), argnums=(0, 1)), in_axes=(0, None))(xs[0], W)
        for g in (f, plain_layer)
    ]
    close(*per_example)
    of_vmap = [
        jax.grad(lambda w, g=g: jax.vmap(g, in_axes=(0, None))(xs[0], w).sum())(W)
        for g in (f, plain_layer)
    ]
    close(*of_vmap)


def test_vmap_with_axis_name_and_collectives_inside(mesh):
    """A named mapped axis is visible inside of the call."""
    f = pjit(lambda x: x / jax.lax.psum(x, "i"), in_axis_resources=P("data"), mesh=mesh)
    xs = np.stack([X + 2, X + 3, X + 4])
    close(jax.vmap(f, axis_name="i")(xs), xs / xs.sum(0))


def test_vmap_of_unmapped_output(mesh):
    """A result that does not depend on the mapped argument keeps its rank."""
    f = pjit(lambda x, y: (x * 2, y + 1), in_axis_resources=P("data"), mesh=mesh)
    a, b = jax.vmap(f, in_axes=(0, None), out_axes=(0, None))(np.stack([X, X + 1]), X)
    close((a, b), (np.stack([X, X + 1]) * 2, X + 1))


@pytest.mark.slow
def test_vmap_with_raw_keys(mesh):
    """Typed PRNG keys pass as arguments, mapped or not."""
    f = pjit(lambda k: jax.random.normal(k, (8,)), out_axis_resources=P("data"), mesh=mesh)
    keys = jax.random.split(jax.random.key(3), 4)
    close(f(keys[0]), jax.random.normal(keys[0], (8,)))
    close(jax.vmap(f)(keys), jax.vmap(lambda k: jax.random.normal(k, (8,)))(keys))


# Control flow


@pytest.mark.slow
def test_inside_scan(mesh):
    """A call in the body of `scan`, values and gradients."""

    def run(f, x, w):
        return jax.lax.scan(lambda c, w: (c + f(c, w)[:, None], c.sum()), x, w)

    ws = np.stack([W, W * 0.5, -W])
    f = layer_on(mesh)
    close(run(f, X, ws), run(plain_layer, X, ws))
    close(jax.jit(functools.partial(run, f))(X, ws), run(plain_layer, X, ws))
    grads = [
        jax.grad(lambda x, ws, g=g: run(g, x, ws)[0].sum(), argnums=(0, 1))(X, ws)
        for g in (f, plain_layer)
    ]
    close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_inside_cond_and_switch(mesh):
    """A call in one branch only, values and gradients, taken or not."""
    f = layer_on(mesh)

    def run(f, flag, x):
        return jax.lax.cond(flag, lambda x: f(x, W), lambda x: x.sum(axis=1), x)

    def loss(f, flag, x):
        return run(f, flag, x).sum()

    for flag in (True, False):
        close(run(f, flag, X), run(plain_layer, flag, X))
        close(jax.jit(functools.partial(run, f))(flag, X), run(plain_layer, flag, X))
        close(*[jax.grad(functools.partial(loss, g, flag))(X) for g in (f, plain_layer)])


def test_inside_while(mesh):
    """A call in body and predicate of a `while_loop`."""
    grow = pjit(lambda x: x * 1.5 + 1, in_axis_resources=P("data"), mesh=mesh)
    small = pjit(lambda x: x.sum() < 1000, in_axis_resources=P("data"), mesh=mesh)
    got = jax.lax.while_loop(small, grow, jnp.asarray(X))
    want = X
    while want.sum() < 1000:
        want = want * np.float32(1.5) + 1
    close(got, want)


def test_fori_loop_and_map_inside(in_mesh):
    """Loops inside of a pjit function run inside of it."""

    def fun(x):
        x = jax.lax.fori_loop(0, 3, lambda i, x: x * 2, x)
        return jax.lax.map(jnp.sin, x)

    f = pjit(fun, in_axis_resources=P(None, "data"), out_axis_resources=P("model"))
    assert_sharded(f(X), np.sin(X * 8), P("model"), in_mesh, **CLOSE)


def test_vmap_of_a_while_whose_length_depends_on_the_example(mesh):
    """Mapped loops that stop at different times give each example its own result."""
    step = pjit(lambda x: x * 2, in_axis_resources=P("data"), mesh=mesh)

    def run(x):
        return jax.lax.while_loop(lambda x: x.max() < 100, step, x)

    xs = np.stack([np.full(8, v, np.float32) for v in (1.0, 30.0, 7.0)])
    want = xs * np.array([[128.0], [4.0], [16.0]], np.float32)
    close(jax.vmap(run)(xs), want)


# Closures


def test_closed_over_constants(mesh):
    """Arrays that a function closes over, placed or not, are part of the program."""
    host, device, placed = W, jnp.asarray(W), put(W, mesh, P("model"))
    f = pjit(lambda x: x @ host + x @ device + x @ placed, in_axis_resources=P("data"), mesh=mesh)
    for _ in range(3):
        close(f(X), 3 * X @ W)
    close(jax.grad(lambda x: f(x).sum())(X), jax.grad(lambda x: (3 * x @ W).sum())(X))
    close(jax.jit(f)(X), 3 * X @ W)


def test_closed_over_constant_that_changes(mesh):
    """A function made anew with another constant is another program."""

    def build(c):
        return pjit(lambda x: x * c, in_axis_resources=P("data"), mesh=mesh)

    for c in (np.float32(2), jnp.float32(3), put(X, mesh, P("data")), X + 1):
        close(build(c)(X), X * np.asarray(c))


@pytest.mark.slow
def test_closed_over_tracers(mesh):
    """A function may close over values that are being traced by grad, vmap, jit and scan."""

    def make(w):
        return pjit(lambda x: x @ w, in_axis_resources=P("data"), mesh=mesh)

    def value(w):
        return (make(w)(X) ** 2).sum()

    def plain(w):
        return ((X @ w) ** 2).sum()

    close(jax.grad(value)(W), jax.grad(plain)(W))
    close(jax.jit(value)(W), plain(W))
    close(jax.jit(jax.grad(value))(W), jax.grad(plain)(W))
    close(jax.jvp(value, (W,), (W,)), jax.jvp(plain, (W,), (W,)))
    ws = np.stack([W, 2 * W])
    close(jax.vmap(value)(ws), jax.vmap(plain)(ws))
    close(jax.vmap(jax.grad(value))(ws), jax.vmap(jax.grad(plain))(ws))
    got = jax.lax.scan(lambda c, w: (c, value(w)), 0, ws)[1]
    close(got, jax.vmap(plain)(ws))


@pytest.mark.slow
def test_closed_over_tracers_do_not_leak(mesh):
    """Nothing keeps a tracer that a function closed over once its trace is done."""

    def value(w):
        return pjit(lambda x: x * w, in_axis_resources=P("data"), mesh=mesh)(X).sum()

    with jax.checking_leaks():
        close(jax.grad(value)(np.float32(2)), X.sum())
        close(jax.jit(jax.grad(value))(np.float32(2)), X.sum())
        close(jax.vmap(value)(np.float32([2, 3])), np.float32([2, 3]) * X.sum())


def test_closed_over_tracers_of_several_traces(mesh):
    """The same inner function called under grad twice uses the values of each trace."""

    def value(w, x):
        inner = pjit(lambda x: x * w, in_axis_resources=P("data"), mesh=mesh)
        return (inner(x) + inner(x * 2)).sum()

    for w in (1.0, 2.0, 3.0):
        close(jax.grad(value)(np.float32(w), X + w), (3 * (X + w)).sum())


# Manual regions


@pytest.mark.slow
def test_shard_map_inside(in_mesh):
    """A `shard_map` inside of a call sees the mesh, and its collectives are right."""

    def fun(x):
        body = jax.shard_map(
            lambda b: b / jax.lax.psum(b.sum(), ("data", "model")),
            mesh=jax.sharding.Mesh(in_mesh.devices, in_mesh.axis_names),
            in_specs=P("data", "model"),
            out_specs=P("data", "model"),
        )
        return body(x) * 2

    f = pjit(fun, in_axis_resources=P("data"), out_axis_resources=P("data"))
    want = 2 * X / X.sum()
    assert_sharded(f(X), want, P("data"), in_mesh, **CLOSE)
    close(jax.grad(lambda x: f(x)[0, 0])(X), jax.grad(lambda x: (2 * x / x.sum())[0, 0])(X))
    close(jax.jit(f)(X), want)


def test_inside_shard_map_over_another_axis(mesh):
    """Inside of a partly manual region a call may use the axes that are left."""
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    f = pjit(lambda x: jnp.sin(x) * 2, in_axis_resources=P("model"), mesh=mesh)
    mapped = jax.shard_map(
        lambda x: f(x) + jax.lax.axis_index("data").astype(x.dtype),
        mesh=plain,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    want = np.sin(X) * 2 + np.repeat(np.arange(4, dtype=np.float32), 2)[:, None]
    close(jax.jit(mapped)(X), want)


def test_axis_of_an_enclosing_shard_map_is_refused(mesh):
    """An axis that a `shard_map` maps over is gone inside; the error names function and line."""
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)

    def inner_function(x):
        return x * 2

    f = pjit(inner_function, in_axis_resources=P("data"), mesh=mesh)
    mapped = jax.shard_map(
        lambda x: f(x), mesh=plain, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with pytest.raises(spmd.ShardingError, match="mesh axis 'data'") as e:
        jax.jit(mapped)(X)
    assert "pjit of `inner_function`" in str(e.value)
    assert "test_pjit.py" in str(e.value)


# Constraints


def test_constraint_transforms(in_mesh):
    """A constraint is the identity under grad, jvp, vmap and jit."""

    def fun(x):
        return jnp.sin(with_sharding_constraint(x, P("data", "model")))

    close(jax.jit(fun)(X), np.sin(X))
    close(jax.grad(lambda x: fun(x).sum())(X), np.cos(X))
    close(jax.jvp(jax.jit(fun), (X,), (X,)), (np.sin(X), np.cos(X) * X))
    close(jax.vmap(jax.jit(fun))(np.stack([X, X + 1])), np.sin(np.stack([X, X + 1])))


def test_constraint_places_an_eager_array(in_mesh):
    """On concrete arrays the constraint places the array."""
    tree = with_sharding_constraint({"a": X, "b": X + 1}, {"a": P("data"), "b": P(None, "model")})
    assert_sharded(tree["a"], X, P("data"), in_mesh)
    assert_sharded(tree["b"], X + 1, P(None, "model"), in_mesh)


def test_uneven_constraint_inside(in_mesh):
    """Inside of a function a constraint may be uneven; the values do not change."""
    odd = np.arange(35, dtype=np.float32).reshape(5, 7)
    f = pjit(lambda x: with_sharding_constraint(x * 2, P("data", "model")) + 1)
    close(f(odd), odd * 2 + 1)
    close(jax.grad(lambda x: f(x).sum())(odd), np.full_like(odd, 2))


# The jaxpr


def test_jaxpr_prints_specs(mesh):
    """A jaxpr shows name, mesh and specs of a call, not the record."""
    assert str(jax.make_jaxpr(layer_on(mesh))(X, W)) == LAYER
    f = pjit(
        lambda s, x: s + x.sum(),
        in_axis_resources=(None, P(("data", "model"))),
        donate_argnums=0,
        mesh=mesh,
    )
    assert str(jax.make_jaxpr(f)(np.float32(0), X)) == DONATING


LAYER = """\
{ lambda ; a:f32[8,8] b:f32[8,16]. let
    c:f32[8] = pjit[
      name=layer
      mesh=data=4, model=2
      in=(P('data'), P(None, 'model'))
      out=(P('data'))
      jaxpr={ lambda ; d:f32[8,8] e:f32[8,16]. let
          f:f32[8,16] = dot_general[
            dimension_numbers=(([1], [0]), ([], []))
            preferred_element_type=float32
          ] d e
          g:f32[8,16] = tanh f
          h:f32[8,16] = sharding_constraint[
            spec=P('data', 'model')
            mesh=data=4, model=2
          ] g
          i:f32[8,16] = mul h h
          j:f32[8] = reduce_sum[axes=(1,) out_sharding=None] i
        in (j,) }
    ] a b
  in (c,) }"""

DONATING = """\
{ lambda ; a:f32[] b:f32[8,8]. let
    c:f32[] = pjit[
      name=<lambda>
      mesh=data=4, model=2
      in=(None, P(('data', 'model')))
      out=(*)
      donated=s
      jaxpr={ lambda ; d:f32[] e:f32[8,8]. let
          f:f32[] = reduce_sum[axes=(0, 1) out_sharding=None] e
          g:f32[] = add d f
        in (g,) }
    ] a b
  in (c,) }"""


def test_jaxpr_holds_two_parameters(mesh):
    """The equation has exactly `jaxpr` and `call`; fields keep the founding names."""
    jaxpr = jax.make_jaxpr(layer_on(mesh, donate_argnums=1))(X, W)
    (eqn,) = jaxpr.eqns
    assert eqn.primitive is primitives.pjit_p
    assert set(eqn.params) == {"jaxpr", "call"}
    call = eqn.params["call"]
    assert [tuple(r) for r in call.in_axis_resources] == [(("data",),), ((), ("model",))]
    assert call.donated_invars == (False, True)
    assert call.name == "layer"
    assert call.mesh == mesh


def test_jaxpr_is_checked(mesh):
    """A call whose record does not fit its body is refused by JAX's own type checker."""
    inner = jax.make_jaxpr(layer_on(mesh))(X, W).jaxpr
    check_jaxpr(inner)
    (eqn,) = inner.eqns
    short = dataclasses.replace(eqn.params["call"], in_axis_resources=())
    wrong = eqn.replace(params=dict(eqn.params, call=short))
    with pytest.raises(Exception, match="0 specs for 2 inputs of a jaxpr"):
        check_jaxpr(inner.replace(eqns=[wrong]))


# Effects under transformations


def test_effect_in_scan_inside_jit():
    """An ordered callback in a call in a loop in a jit runs once per step, in order."""
    mesh, seen = mesh_of({"x": 1}), []

    def fun(x):
        io_callback(lambda v: seen.append(int(v)), None, x, ordered=True)
        return x + 1

    f = pjit(fun, mesh=mesh)
    jax.jit(lambda: jax.lax.fori_loop(0, 4, lambda i, x: f(x), 0))()
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]


# Rules of the user's own


def test_rules_of_a_custom_vjp_find_the_mesh_of_their_call(mesh):
    """A custom_vjp in a function with a mesh of its own may constrain in both of its rules."""

    def split(x):
        return with_sharding_constraint(x, P("data"))

    @jax.custom_vjp
    def triple(x):
        return split(3 * x)

    triple.defvjp(lambda x: (split(3 * x), None), lambda _, ct: (split(7 * ct),))
    f = pjit(lambda x: triple(x).sum(), P("data"), None, mesh=mesh)
    x = np.ones((8, 4), np.float32)
    # Seven, not three: the gradient is that of the rule.
    for gradient in (
        jax.grad(f),
        jax.jit(jax.grad(f)),
        lambda x: jax.vjp(f, x)[1](np.float32(1))[0],
    ):
        np.testing.assert_array_equal(gradient(x), np.full((8, 4), 7, np.float32))
    np.testing.assert_array_equal(jax.vmap(jax.grad(f))(x[None])[0], np.full((8, 4), 7))


def test_rules_of_a_custom_vmap_find_the_mesh_of_their_call(mesh):
    """A custom_vmap in a function with a mesh of its own may constrain in its rule."""

    @jax.custom_batching.custom_vmap
    def double(x):
        return 2 * x

    @double.def_vmap
    def rule(axis_size, in_batched, x):
        return with_sharding_constraint(2 * x + axis_size, P(None, "data")), in_batched[0]

    f = pjit(double, P("data"), P("data"), mesh=mesh)
    np.testing.assert_array_equal(jax.vmap(f)(np.stack([X, X])), np.stack([2 * X + 2] * 2))


# Residuals of the compiler's own making


def test_sharding_that_no_spec_says_stays_as_it_is():
    """A residual with parts of an axis keeps the compiler's sharding in the record."""
    mesh = mesh_of({"x": 8})
    tiled = HloSharding.iota_tile([2, 4])
    sharding = GSPMDSharding(tuple(mesh.devices.flat), tiled)
    value = jax.make_array_from_callback((2, 8), sharding, lambda i: np.ones((2, 8))[i])
    assert resource_of(value, plain_mesh(mesh)) is sharding


def test_a_given_sharding_that_no_spec_says_is_refused():
    """A sharding over parts of an axis is an error, and not lost under vmap."""
    mesh = mesh_of({"x": 8})
    sharding = GSPMDSharding(tuple(mesh.devices.flat), HloSharding.iota_tile([4, 2]))
    batch = np.ones((3, 8, 8), np.float32)

    def constrained(x):
        return with_sharding_constraint(x, sharding)

    refused = r"no spec on this mesh says the sharding\.\n.*devices=\[4,2\]"
    for f in (pjit(lambda x: x, in_shardings=sharding, mesh=mesh), constrained):
        for call in (f, jax.vmap(f), jax.jit(jax.vmap(f))):
            with pytest.raises(spmd.ShardingError, match=refused):
                call(batch[0] if call is f else batch)
    f = pjit(lambda x: x, out_shardings=sharding, mesh=mesh)
    with pytest.raises(spmd.ShardingError, match=refused):
        f(batch[0])


def test_what_speaks_for_nothing_is_unspecified(mesh):
    """Host values, uncommitted arrays, tracers and other device orders have no resource."""
    plain = plain_mesh(mesh)
    assert resource_of(X, plain) is UNSPECIFIED
    assert resource_of(jnp.asarray(X), plain) is UNSPECIFIED
    other = jax.sharding.Mesh(mesh.devices[::-1], mesh.axis_names)
    assert resource_of(put(X, other, P("data")), plain) is UNSPECIFIED
    assert resource_of(put(X, mesh, P("data")), plain).partitions == (("data",), ())
    jax.jit(lambda x: resource_of(x, plain) is UNSPECIFIED or 1 / 0)(X)


def test_closed_over_arrays_are_no_residuals(mesh):
    """What both halves close over is a constant of both: the second takes no argument for it."""
    table = np.arange(8.0, dtype=np.float32)[:, None]
    f = pjit(lambda x: jnp.sin(x) * table, P("data"), P("data"), mesh=mesh)
    _, pull = jax.vjp(f, X)
    held = [r for r in jax.tree.leaves(pull) if hasattr(r, "shape")]
    assert [r.shape for r in held] == [(8, 8)]  # the cosine
    close(pull(np.ones_like(X)), (np.cos(X) * table,))


# Rules with parts of JAX that load late


@pytest.mark.slow
def test_jet_through_a_call(mesh):
    """Taylor series go through a call, at the specs of their values."""
    f = pjit(lambda x, y: (jnp.sin(x) * y, x), (P("data"), P("model")), P("data"), mesh=mesh)
    series = ((X, 2 * X), (X + 1, X - 1))
    got = jet(f, (X, X + 2), series)
    want = jet(lambda x, y: (jnp.sin(x) * y, x), (X, X + 2), series)
    close(got, want)
    eqns = jax.make_jaxpr(lambda *s: jet(f, (X, X + 2), s))(*series).eqns
    (eqn,) = [e for e in eqns if e.primitive is primitives.pjit_p]
    assert [r.partitions[0] for r in eqn.params["call"].in_axis_resources] == (
        [("data",), ("model",)] + [("data",)] * 2 + [("model",)] * 2
    )


@pytest.mark.slow
def test_sparse_arguments(mesh):
    """`sparsify` runs a call on sparse matrices."""
    dense = X * (X > 0.3)
    f = pjit(lambda s, w: (s @ w, s * 2), (P("data"), P(None, "model")), mesh=mesh)
    product, twice = sparse.sparsify(f)(sparse.BCOO.fromdense(dense), W)
    close(product, dense @ W)
    close(twice.todense(), dense * 2)


@pytest.mark.slow
def test_key_reuse_is_found_inside(mesh):
    """With `jax.debug_key_reuse` a key that a call consumed cannot be used again."""
    f = pjit(lambda k: jax.random.normal(k, (8,)), out_axis_resources=P("data"), mesh=mesh)
    key = jax.random.key(0)
    for _ in range(3):
        f(key)  # a repeated call, in C++, that nobody checks
    with jax.debug_key_reuse(True):
        key = jax.random.key(1)
        f(key)
        with pytest.raises(jax.errors.KeyReuseError):
            f(key)


@pytest.mark.slow
def test_checkify_loads_with_the_first_call():
    """A check inside of a call that was traced before checkify was imported is not lost."""
    code = """
import jax, numpy as np, sys
import spmd
f = spmd.pjit(lambda x: 1 / x, spmd.P("x"), mesh=spmd.make_mesh({"x": 8}))
g = jax.jit(f)
g(np.ones(8, np.float32)), f(np.ones(8, np.float32))
from jax.experimental import checkify
for h in (f, g):
    error, _ = checkify.checkify(h, errors=checkify.float_checks)(np.zeros(8, np.float32))
    assert "division by zero" in error.get(), error
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nan_in_a_backward_pass_is_found(mesh):
    """With `jax_debug_nans` a NaN that only the backward pass makes names its operation."""
    f = pjit(lambda x: jnp.sqrt(x).sum(), P("data"), P(), mesh=mesh)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan.* encountered in mul"):
        jax.grad(lambda x: f(x) * 0.0)(np.zeros((8, 8), np.float32))


# What a review found


def test_gradient_stays_in_the_memory_of_its_argument(mesh):
    """The gradient of an array in pinned_host memory is there too, without a spec that says so."""
    host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    f = pjit(
        lambda a, b: jnp.sin(a) * jax.device_put(b, host.with_memory_kind("device")), mesh=mesh
    )
    args = put(X, mesh, P("data")), jax.device_put(X, host)
    da, db = jax.grad(lambda a, b: f(a, b).sum(), (0, 1))(*args)
    assert (da.sharding.memory_kind, db.sharding.memory_kind) == ("device", "pinned_host")
    close(db, np.sin(X))


def test_inside_a_trace_nothing_is_known_of_residuals(mesh):
    """Where a closed-over array lies is no part of a program that is being traced."""
    f = pjit(lambda y, a: jnp.sin(y) * a, mesh=mesh)
    for spec in (P("data"), P("model")):
        a = put(X, mesh, spec)
        jaxpr = jax.make_jaxpr(jax.grad(lambda y, a=a: f(y, a).sum()))(X)
        calls = [e.params["call"] for e in jaxpr.eqns if e.primitive is primitives.pjit_p]
        assert len(calls) == 2
        assert {r for c in calls for r in c.in_axis_resources} == {UNSPECIFIED}


def test_a_tangent_without_a_spec_may_be_anywhere(mesh):
    """What no user said of a tangent is no implicit resharding of theirs."""
    f = pjit(lambda a: jnp.sin(a) * a, mesh=mesh, implicit_reshard="error")
    _, push = jax.linearize(f, put(X, mesh, P("data")))
    close(push(put(X, mesh, P("model"))), X * (np.cos(X) * X + np.sin(X)))


@pytest.mark.slow
def test_donated_argument_of_a_checkpointed_call(mesh):
    """Rematerialization takes the argument again, so the first run does not give it away."""
    f = pjit(lambda a: jnp.sin(a) * a, P("data"), donate_argnums=0, mesh=mesh)
    x = put(X, mesh, P("data"))
    want = np.cos(X) * X + np.sin(X)
    close(jax.grad(jax.checkpoint(lambda a: f(a).sum()))(x), want)
    close(jax.grad(jax.checkpoint(lambda a: f(a).sum()))(x), want)


def test_threads_take_turns_with_a_reference(mesh):
    """No update of a mutable reference is lost, whichever thread makes it."""

    def add(total, y):
        total[...] += y

    f = pjit(add, P("data"), mesh=mesh)
    total, ones = jax.new_ref(jnp.zeros((8, 4))), np.ones((8, 4), np.float32)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(f, total, ones) for _ in range(40)]:
            done.result(60)
    close(total[...], 40 * ones)


def test_programs_with_other_references_do_not_wait(mesh):
    """A program holds its own references only: a callback in it may run one with others."""
    mine, other = (jax.new_ref(jnp.zeros((8, 4))) for _ in range(2))
    place = NamedSharding(plain_mesh(mesh), P("data"))

    def take(*refs):
        with references([(r, place) for r in refs]):
            return [r.sharding for r in refs]

    with ThreadPoolExecutor(2) as pool:
        with references([(mine, place)]):
            assert pool.submit(take, other).result(60) == [place]
            waiting = pool.submit(take, other, mine)
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
        assert waiting.result(60) == [place, place]


def test_late_rules_are_registered_once_by_whoever_comes_first(monkeypatch):
    """Threads that all make the first call find the rules registered when they go on."""
    registered, ready = [], threading.Barrier(8)
    rules = [(name, True, lambda _, name=name: registered.append(name)) for name in ("os", "re")]
    monkeypatch.setattr(_jax.rules, "_late_rules", rules)

    def first():
        ready.wait(60)
        _jax.rules.load_late_rules()
        assert {*registered} == {"os", "re"}

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(first) for _ in range(8)]:
            done.result(60)
    assert sorted(registered) == ["os", "re"]


def test_clear_caches_clears_the_rules_too(mesh):
    """After `spmd.clear_caches` a derivative is built anew."""
    f = pjit(lambda x: jnp.sin(x), P("data"), mesh=mesh)

    def gradient(x):
        return jax.grad(lambda x: f(x).sum())(x)

    gradient(X)
    assert counted(gradient, X)[1] == spmd.Counts()
    spmd.clear_caches()
    assert counted(gradient, X)[1] == spmd.Counts(traces=1, lowerings=2, compiles=2)


def test_lower_for_other_platforms(mesh):
    """A trace lowers for platforms that are not here, as `jax.jit` does."""
    traced = pjit(jnp.sin, P("data"), mesh=mesh).trace(X)
    lowered = traced.lower(lowering_platforms=("tpu",))
    assert isinstance(lowered, jax.stages.Lowered)
    assert "num_partitions = 8" in lowered.as_text()
