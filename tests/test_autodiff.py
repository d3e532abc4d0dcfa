"""Derivatives of calls: values, symbolic zeros, shardings, collectives, residuals, donation.

Values are compared with the unsharded function, collectives with a hand-written `jax.jit`,
residuals with those of `jax.jit` and with the buffers that exist already.
"""

import functools

import jax
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, counted, mesh_of, put
import pytest

import spmd
from spmd import FROM_ARRAY, P, _dispatch, inspection, pjit, with_sharding_constraint
from spmd.primitives import pjit_p

RNG = np.random.default_rng(1)
X = RNG.uniform(-1, 1, (8, 4)).astype(np.float32)
W = RNG.uniform(-1, 1, (8, 4)).astype(np.float32)
V = RNG.uniform(0.1, 1, 8).astype(np.float32)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
NOTHING = spmd.Counts()


def close(got, want, **tolerance):
    """Asserts that two trees have the same structure, dtypes and values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        if g.dtype == float0:
            assert g.shape == w.shape
            continue
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), **(tolerance or CLOSE))


def plain(mesh):
    """JAX's own mesh."""
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)


# Every derivative


def rotate(x, w):
    """A function of two arrays with two results and an integer one."""
    h = jnp.sin(x * w[::-1])
    return {"h": h * jnp.roll(x, 1), "s": (h * w).sum(), "i": jnp.argmax(h)}


def scalar(f, x, w):
    """A scalar of its results."""
    out = f(x, w)
    return (out["h"] ** 2).sum() * 0.5 + out["s"]


def rotate_on(mesh, **options):
    """The same, each argument split over an axis of its own."""
    return pjit(
        rotate,
        in_axis_resources=(P("data"), P("model")),
        out_axis_resources={"h": P(("data", "model")), "s": P(), "i": P()},
        mesh=mesh,
        **options,
    )


def _vjp(f):
    def derivative(x, w):
        out, pull = jax.vjp(f, x, w)
        ct = {"h": jnp.cos(out["h"]), "s": out["s"] * 3, "i": np.zeros((), float0)}
        return out, pull(ct)

    return derivative


def _both(transform):
    return lambda f: transform(functools.partial(scalar, f), argnums=(0, 1))


def _reverse_over_reverse(f):
    inner = jax.grad(functools.partial(scalar, f), argnums=(0, 1))
    return jax.grad(lambda x, w: sum((g**3).sum() for g in inner(x, w)), argnums=(0, 1))


DERIVATIVES = {
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (w, x)),
    "jvp of one": lambda f: lambda x, w: jax.jvp(lambda w: f(x, w), (w,), (x,)),
    "vjp": _vjp,
    "grad": _both(jax.grad),
    "value_and_grad": _both(jax.value_and_grad),
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](w, x),
    "jacfwd": lambda f: jax.jacfwd(lambda x, w: f(x, w)["h"], argnums=(0, 1)),
    "jacrev": lambda f: jax.jacrev(lambda x, w: f(x, w)["h"], argnums=(0, 1)),
    "hessian": _both(jax.hessian),
    "reverse over reverse": _reverse_over_reverse,
    "forward over reverse": lambda f: (
        lambda x, w: jax.jvp(jax.grad(functools.partial(scalar, f), argnums=(0, 1)), (x, w), (w, x))
    ),
    "reverse over forward": lambda f: jax.grad(
        lambda x, w: jax.jvp(functools.partial(scalar, f), (x, w), (w, x))[1], argnums=(0, 1)
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative(name, mesh):
    """Each derivative is that of the unsharded function, eagerly and in `jax.jit`."""
    derivative = DERIVATIVES[name]
    want = jax.jit(derivative(rotate))(V, V[::-1] * 2)
    ours = derivative(rotate_on(mesh))
    close(ours(V, V[::-1] * 2), want, rtol=1e-4, atol=1e-4)
    if name in ("vjp", "linearize", "hessian", "reverse over forward"):
        close(jax.jit(ours)(V, V[::-1] * 2), want, rtol=1e-4, atol=1e-4)


def test_linear_transpose(mesh):
    """The transpose of a linear call is it backwards, placed as the input is."""

    def linear(x):
        return (x[::-1] * 2).sum(axis=1), x[:, :2]

    f = pjit(linear, P("data", "model"), (P("data"), P()), mesh=mesh)
    cts = (np.arange(8, dtype=np.float32), X[:, :2])
    want = jax.linear_transpose(linear, X)(cts)
    for like in (X, jax.ShapeDtypeStruct(X.shape, X.dtype)):
        (got,) = jax.linear_transpose(f, like)(cts)
        assert_sharded(got, want[0], P("data", "model"), mesh, **CLOSE)
    twice = jax.linear_transpose(jax.linear_transpose(f, X), cts)
    close(twice((X,)), (jax.jit(linear)(X),))


def test_transpose_of_what_is_not_linear_names_the_operation(mesh):
    """A call that is not linear has no transpose: JAX's own words."""
    f = pjit(jnp.sin, P("data"), mesh=mesh)
    with pytest.raises(NotImplementedError) as ours:
        jax.linear_transpose(f, X)(X)
    with pytest.raises(NotImplementedError) as jits:
        jax.linear_transpose(jax.jit(jnp.sin), X)(X)
    assert str(ours.value) == str(jits.value)


@pytest.mark.slow
def test_has_aux(mesh):
    """What is carried along beside value and derivative comes out as computed."""

    def fun(x, w):
        return (jnp.tanh(x) * w).sum(), {"n": jnp.argmax(x), "x": x, "none": None}

    f = pjit(fun, (P("data"), P("data")), (P(), P()), mesh=mesh)
    for transform in (
        lambda g: jax.value_and_grad(g, argnums=1, has_aux=True)(X, W),
        lambda g: jax.grad(g, has_aux=True)(X, W),
        lambda g: jax.jvp(lambda x: g(x, W), (X,), (W,), has_aux=True),
        lambda g: jax.jacrev(g, has_aux=True)(X, W),
        lambda g: jax.jacfwd(g, has_aux=True)(X, W),
        lambda g: _aux_of_vjp(g),
    ):
        close(transform(f), transform(fun))


def _aux_of_vjp(g):
    value, pull, aux = jax.vjp(lambda x: g(x, W), X, has_aux=True)
    return value, pull(jnp.float32(2)), aux


@pytest.mark.slow
def test_has_aux_outside_of_the_call(mesh):
    """A value between two calls that comes out as aux is that of this trace."""
    f = pjit(jnp.sin, P("data"), P("data"), mesh=mesh)

    def loss(f, x):
        h = f(x)
        return (f(h) * x).sum(), h

    close(*[jax.grad(functools.partial(loss, g), has_aux=True)(X) for g in (f, jnp.sin)])


@pytest.mark.slow
def test_one_array_as_two_arguments(mesh):
    """The derivative of a repeated argument is the sum of both."""
    f = pjit(lambda a, b: a * jnp.sin(b), (P("data"), P(None, "model")), P("data"), mesh=mesh)
    x = put(X, mesh, P("data"))
    want = np.sin(X) + X * np.cos(X)
    for g in (jax.grad(lambda x: f(x, x).sum()), jax.jit(jax.grad(lambda x: f(x, x).sum()))):
        np.testing.assert_allclose(g(x), want, **CLOSE)
        np.testing.assert_allclose(g(X), want, **CLOSE)
    da, db = jax.grad(lambda a, b: f(a, b).sum(), (0, 1))(x, x)
    assert_sharded(da, np.sin(X), P("data"), mesh, **CLOSE)
    assert_sharded(db, X * np.cos(X), P(None, "model"), mesh, **CLOSE)
    _, push = jax.linearize(lambda x: f(x, x), x)
    np.testing.assert_allclose(push(x), want * X, **CLOSE)


@pytest.mark.slow
def test_result_given_twice_and_passed_through(mesh):
    """A result that is another one, or an argument, has a cotangent of its own."""

    def fun(x, w):
        y = jnp.exp(x) * w
        return y, y, x, w

    f = pjit(fun, P("data"), P("data"), mesh=mesh)
    cts = (X, 2 * X, W, -W)
    close(jax.vjp(f, X, W)[1](cts), jax.vjp(fun, X, W)[1](cts))
    close(jax.jvp(f, (X, W), (W, X)), jax.jit(lambda: jax.jvp(fun, (X, W), (W, X)))())


@pytest.mark.slow
def test_result_that_does_not_depend_on_the_argument(mesh):
    """Gradients of constants, of cut off values and of unused arguments are zeros."""

    def fun(x, w, unused):
        return jnp.ones(4) * 2, jax.lax.stop_gradient(x) * w, unused["a"]

    f = pjit(fun, P("data"), P(), mesh=mesh)
    args = (X, W, {"a": V})

    def loss(g, *args):
        c, y, _ = g(*args)
        return c.sum() + y.sum()

    for mode in (lambda g: g, jax.jit):
        close(
            mode(jax.grad(functools.partial(loss, f), (0, 1, 2)))(*args),
            jax.grad(functools.partial(loss, fun), (0, 1, 2))(*args),
        )


# Symbolic zeros


def watched():
    """A product with rules that tell what they were given, and the list that they tell it to."""
    seen = []

    @jax.custom_jvp
    def forward(x, w, n):
        return x * w * n.astype(x.dtype)

    def rule(primals, tangents):
        seen.append(tuple(type(t) is SymbolicZero for t in tangents))
        x, w, n = primals
        dx, dw = (t * 1 if type(t) is not SymbolicZero else None for t in tangents[:2])
        dot = jnp.zeros_like(x)
        dot = dot if dx is None else dot + dx * w * n.astype(x.dtype)
        dot = dot if dw is None else dot + dw * x * n.astype(x.dtype)
        return forward(*primals), dot

    forward.defjvp(rule, symbolic_zeros=True)
    return forward, seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("derivative", "want", "zeros"),
    [
        (lambda f: jax.grad(lambda x: f(x, W).sum())(X), 3 * W, {(False, True, True)}),
        (lambda f: jax.jvp(lambda w: f(X, w), (W,), (X,))[1], 6 * X * X, {(True, False, True)}),
        (
            lambda f: jax.linearize(f, X, W)[1](X, W),
            9 * X * W,
            {(False, False, True), (True, False, True)},
        ),
        (lambda f: jax.jit(jax.grad(lambda w: f(X, w).sum()))(W), 6 * X, {(True, False, True)}),
    ],
    ids=["grad", "jvp", "linearize", "jit grad"],
)
def test_symbolic_zeros_reach_a_custom_jvp(derivative, want, zeros, mesh):
    """What is not differentiated, or is an integer, is a SymbolicZero in the rule."""
    fun, seen = watched()

    def twice(x, w):
        n = jnp.int32(3)
        return fun(x, w, n) + fun(jax.lax.stop_gradient(x), w, n)

    close(derivative(pjit(twice, P("data"), P("data"), mesh=mesh)), want)
    assert set(seen) == zeros


@pytest.mark.slow
def test_symbolic_zeros_reach_a_custom_vjp(mesh):
    """The rules see which arguments are perturbed, and that no cotangent came."""
    seen = []

    @jax.custom_vjp
    def twist(x, w):
        return x * w, x + w

    def forward(x, w):
        seen.append((x.perturbed, w.perturbed))
        return (x.value * w.value, x.value + w.value), (x.value, w.value)

    def backward(residuals, cts):
        seen.append(tuple(type(ct) is SymbolicZero for ct in cts))
        x, w = residuals
        ct = cts[1] if type(cts[0]) is SymbolicZero else cts[0]
        return 5 * ct * w, 7 * ct * x

    twist.defvjp(forward, backward, symbolic_zeros=True)
    f = pjit(twist, P("data"), P("data"), mesh=mesh)
    close(jax.grad(lambda x: f(x, W)[0].sum())(X), 5 * W)
    assert seen == [(True, False), (False, True)]
    seen.clear()
    close(jax.grad(lambda w: f(X, w)[1].sum())(W), 7 * X)
    assert seen == [(False, True), (True, False)]
    seen.clear()
    close(
        jax.jit(jax.grad(lambda x, w: sum(o.sum() for o in f(x, w)), (0, 1)))(X, W), (5 * W, 7 * X)
    )
    assert seen == [(True, True), (False, False)]


def test_unused_tangents_make_no_inputs(mesh):
    """Only what is perturbed becomes a tangent: the equation says so, in jvp and backwards."""
    f = rotate_on(mesh)
    jaxpr = jax.make_jaxpr(lambda x, t: jax.jvp(lambda x: f(x, V), (x,), (t,)))(V, V)
    (eqn,) = (e for e in jaxpr.eqns if e.primitive is pjit_p)
    call = eqn.params["call"]
    assert len(call.in_axis_resources) == 3
    assert call.arg_names[2] == "the tangent of x"
    assert len(call.out_axis_resources) == 5  # three results, two of them with tangents
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: f(x, V)["s"]))(V)
    backward = [e for e in jaxpr.eqns if e.primitive is pjit_p][-1]
    assert sum("cotangent" in n for n in backward.params["call"].arg_names) == 1
    assert len(backward.outvars) == 1


# Integers and keys


def noisy(x, n, key, flag):
    """A function with arguments and results that have no derivative."""
    noise = jax.random.key_data(key).sum().astype(x.dtype)
    y = x * n.astype(x.dtype) + noise * flag.astype(x.dtype)
    return y, n + 1, jax.random.fold_in(key, 1), ~flag


NOISY = (X, np.arange(32, dtype=np.int32).reshape(8, 4), jax.random.key(5), np.bool_(True))


def _zeros(like):
    """The tangent type of each leaf: ones, or float0."""

    def zero(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype.kind in "ib":
            return np.zeros(x.shape, float0)
        return jnp.ones(x.shape, x.dtype)

    return jax.tree.map(zero, like)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["jvp", "vjp", "linearize", "grad", "jit vjp", "vmap jvp"])
def test_integers_booleans_and_keys(how, mesh):
    """Arguments and results without a derivative have float0 tangents and cotangents."""
    f = pjit(noisy, (P("data"), P("data"), None, None), P(), mesh=mesh)
    tangents = _zeros(NOISY)
    cotangents = _zeros(jax.eval_shape(noisy, *NOISY))

    def run(g):
        if how == "jvp":
            return jax.jvp(g, NOISY, tangents)[1]
        if how == "linearize":
            return jax.linearize(g, *NOISY)[1](*tangents)
        if how == "grad":
            loss = jax.grad(lambda *a: g(*a)[0].sum(), argnums=(0, 1, 2, 3), allow_int=True)
            return loss(*NOISY)
        if how == "jit vjp":
            return jax.jit(lambda *a: jax.vjp(g, *a)[1](cotangents)[0])(*NOISY)
        if how == "vmap jvp":
            return jax.vmap(lambda t: jax.jvp(g, NOISY, (t, *tangents[1:]))[1][0])(np.stack([X, W]))
        return jax.vjp(g, *NOISY)[1](cotangents)

    close(run(f), run(noisy))


def test_grad_of_an_integer_is_refused_as_by_jit(mesh):
    """Without `allow_int` JAX's own words."""
    f = pjit(lambda n: n.sum() * 2.0, P("data"), mesh=mesh)
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(f)(NOISY[1])


# Rules of the user's own


def test_custom_rules_inside_with_nondiff_arguments(mesh):
    """`nondiff_argnums`, functions too, reach the rules as they are."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
    def apply(fun, x, power):
        return fun(x) ** power

    apply.defvjp(
        lambda fun, x, power: (apply(fun, x, power), (x,)),
        lambda fun, power, res, ct: (ct * fun(res[0]) * (10 * power),),
    )

    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def times(x, factor):
        return x * factor

    times.defjvp(lambda factor, p, t: (times(p[0], factor), t[0] * factor * 100))
    f = pjit(lambda x: apply(jnp.sin, x, 2) + times(x, 3.0), P("data"), P("data"), mesh=mesh)
    want = np.sin(X) * 20 + 300
    for g in (jax.grad(lambda x: f(x).sum()), jax.jit(jax.grad(lambda x: f(x).sum()))):
        np.testing.assert_allclose(g(X), want, **CLOSE)


@pytest.mark.slow
def test_custom_rules_around(mesh):
    """A call may be the function, and be used in the rules, of a custom derivative."""
    f = pjit(jnp.sin, P("data"), P("data"), mesh=mesh)
    half = pjit(lambda ct, x: ct * x / 2, P("data"), P("data"), mesh=mesh)
    around = jax.custom_vjp(lambda x: f(x))
    around.defvjp(lambda x: (f(x), x), lambda x, ct: (half(ct, x),))
    g = jax.grad(lambda x: around(x).sum())(put(X, mesh, P("data")))
    assert_sharded(g, X / 2, P("data"), mesh, **CLOSE)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(jax.grad(lambda x: around(x).sum())))(X[None]), X[None] / 2
    )
    pushed = jax.custom_jvp(lambda x: f(x))
    pushed.defjvp(lambda p, t: (f(p[0]), half(t[0], p[0])))
    np.testing.assert_allclose(jax.jvp(pushed, (X,), (X,))[1], X * X / 2, **CLOSE)
    np.testing.assert_allclose(jax.grad(lambda x: pushed(x).sum())(X), X / 2, **CLOSE)
    np.testing.assert_allclose(jax.hessian(lambda v: pushed(v).sum())(V), np.eye(8) / 2, **CLOSE)


def test_custom_vjp_decorates_a_call(mesh):
    """`jax.custom_vjp` of a pjit function itself, with a default argument and a keyword."""
    f = jax.custom_vjp(pjit(lambda x, scale: x * scale, {"x": P("data")}, P("data"), mesh=mesh))
    f.defvjp(lambda x, scale: (x * scale, scale), lambda s, ct: (ct * 9, None))
    np.testing.assert_allclose(jax.grad(lambda x: f(x, 2.0).sum())(X), np.full_like(X, 9))


# Shardings


SPECS = ({"up": P(None, "model"), "down": P("model")}, P("data"))
PARAMS = {
    "up": RNG.uniform(-1, 1, (8, 16)).astype(np.float32),
    "down": RNG.uniform(-1, 1, (16, 4)).astype(np.float32),
}
BATCH = RNG.uniform(-1, 1, (8, 8)).astype(np.float32)


def mlp(constrain, w, x):
    """Two products, with a constraint between them."""
    h = constrain(jnp.tanh(x @ w["up"]), P("data", "model"))
    return ((h @ w["down"]) ** 2).sum(axis=1)


def mlp_on(mesh, **options):
    """The call."""
    fun = functools.partial(mlp, with_sharding_constraint)
    return pjit(fun, SPECS, P("data"), mesh=mesh, **options)


def hand_written(mesh):
    """The same in JAX alone: value and gradients, placed as the arguments are."""

    def named(spec):
        return jax.sharding.NamedSharding(plain(mesh), spec)

    def constrain(x, spec):
        return jax.lax.with_sharding_constraint(x, named(spec))

    def loss(w, x):
        return constrain(mlp(constrain, w, x), P("data")).sum()

    ins = jax.tree.map(named, SPECS)
    grad = jax.value_and_grad(loss, argnums=(0, 1))
    return jax.jit(grad, in_shardings=ins, out_shardings=(named(P()), ins))


def placed(mesh):
    """The arguments where the call wants them."""
    return jax.tree.map(lambda v, s: put(v, mesh, s), (PARAMS, BATCH), SPECS)


def exchanges(texts, mesh):
    """Kind, axes and bytes of every collective of some programs."""
    rows = [c for t in texts for c in inspection.collectives(t, mesh.shape)]
    return sorted((c.kind, c.mesh_axes, c.payload_bytes) for c in rows)


@pytest.fixture
def programs(monkeypatch):
    """The HLO of each program that an eager call runs, in order."""
    texts, execute = [], _dispatch.execute

    def spy(executable, *args):
        texts.append(executable.xla_executable.hlo_modules()[0].to_string())
        return execute(executable, *args)

    monkeypatch.setattr(_dispatch, "execute", spy)
    return texts


def loss_of(f):
    """Value and gradients of the sum of a call."""
    return jax.value_and_grad(lambda w, x: f(w, x).sum(), argnums=(0, 1))


@pytest.mark.slow
def test_gradients_are_split_like_inputs_without_further_collectives(mesh, programs):
    """Both halves of an eager gradient exchange no byte that the hand-written step would not."""
    args = placed(mesh)
    want = hand_written(mesh)(*args)
    value, grads = loss_of(mlp_on(mesh))(*args)
    close((value, grads), want)
    jax.tree.map(lambda g, w, s: assert_sharded(g, w, s, mesh, **CLOSE), grads, want[1], SPECS)
    assert len(programs) == 2
    by_hand = hand_written(mesh).lower(*args).compile().as_text()
    ours, theirs = exchanges(programs, mesh), exchanges([by_hand], mesh)
    assert {kind for kind, _, _ in ours} == {"all-reduce"}
    assert len(ours) == len(theirs) == 3
    assert sum(row[2] for row in ours) <= sum(row[2] for row in theirs)


@pytest.mark.few(1)
@pytest.mark.parametrize("placed_already", [True, False])
def test_gradient_in_one_jit_exchanges_what_the_hand_written_does(mesh, placed_already):
    """`jit(grad(pjit f))` and the hand-written program have the same collectives."""
    args = placed(mesh) if placed_already else (PARAMS, BATCH)
    text = jax.jit(loss_of(mlp_on(mesh))).lower(*args).compile().as_text()
    by_hand = hand_written(mesh).lower(*placed(mesh)).compile().as_text()
    if placed_already:
        assert exchanges([text], mesh) == exchanges([by_hand], mesh)
    assert "all-gather" not in text
    assert "all-to-all" not in text


@pytest.mark.slow
def test_gradients_of_jit_are_split_like_inputs(mesh):
    """Inside of `jax.jit`, and of a jit of its own per half, gradients have the inputs' specs."""
    want = hand_written(mesh)(*placed(mesh))[1]
    f = mlp_on(mesh)
    in_one = jax.jit(loss_of(f))(*placed(mesh))[1]

    @jax.jit
    def forward(w, x):
        y, pull = jax.vjp(f, w, x)
        return y, pull

    y, pull = forward(*placed(mesh))
    in_two = jax.jit(lambda pull, ct: pull(ct))(pull, jnp.ones_like(y))
    for grads in (in_one, in_two, pull(jnp.ones_like(y))):
        jax.tree.map(lambda g, w, s: assert_sharded(g, w, s, mesh, **CLOSE), grads, want, SPECS)


def test_sum_needs_no_gather_backwards(mesh, programs):
    """The gradient of a sum is made where it stays: no collective backwards at all."""
    f = pjit(lambda x: (x * 3).sum(), P("data", "model"), P(), mesh=mesh)
    g = jax.grad(f)(put(X, mesh, P("data", "model")))
    assert_sharded(g, np.full_like(X, 3), P("data", "model"), mesh)
    assert exchanges(programs[-1:], mesh) == []


def test_gradient_of_an_argument_whose_sharding_is_its_own(mesh):
    """Under FROM_ARRAY the gradient is split as the array is."""
    f = pjit(lambda x: (x * 3).sum(), FROM_ARRAY, P(), mesh=mesh)
    g = jax.grad(f)(put(X, mesh, P("data", "model")))
    assert_sharded(g, np.full_like(X, 3), P("data", "model"), mesh)


def test_tangents_are_split_like_their_primals(mesh):
    """Tangents in and out are placed as primals are, wherever they came from."""
    f = pjit(lambda x: jnp.sin(x).T, P("data", "model"), P("model", "data"), mesh=mesh)
    for t in (X, put(X, mesh, P()), put(X, mesh, P("model", "data"))):
        y, dy = jax.jvp(f, (X,), (t,))
        assert_sharded(y, np.sin(X).T, P("model", "data"), mesh, **CLOSE)
        assert_sharded(dy, (np.cos(X) * X).T, P("model", "data"), mesh, **CLOSE)
        assert_sharded(
            jax.linearize(f, X)[1](t), (np.cos(X) * X).T, P("model", "data"), mesh, **CLOSE
        )


# Residuals


def arrays(pull):
    """The arrays that a linear map holds."""
    return [r for r in jax.tree.leaves(pull) if isinstance(r, jax.Array)]


def buffers(x):
    """Where an array lies on each device."""
    return tuple(s.data.unsafe_buffer_pointer() for s in x.addressable_shards)


def peer(fun, mesh, ins, outs):
    """The function under plain `jax.jit` with the same specs."""

    def named(spec):
        return jax.sharding.NamedSharding(plain(mesh), spec)

    is_spec = {"is_leaf": lambda s: isinstance(s, P)}
    ins, outs = (jax.tree.map(named, s, **is_spec) for s in (ins, outs))
    return jax.jit(fun, in_shardings=ins, out_shardings=outs)


@pytest.mark.parametrize("transform", [jax.vjp, jax.linearize], ids=["vjp", "linearize"])
def test_known_results_and_forwarded_inputs_are_not_copied(transform, mesh):
    """A residual that is a result or an argument is that very array: no buffer is new."""
    f = pjit(lambda x, w: (jnp.exp(x * w), x + w), P("data"), P("data"), mesh=mesh)
    x, w = put(X, mesh, P("data")), put(W, mesh, P("data"))
    (y, z), linear = transform(f, x, w)
    held = {buffers(r) for r in arrays(linear)}
    assert held == {buffers(x), buffers(w), buffers(y)}
    assert any(r is x for r in arrays(linear))
    del z


@pytest.mark.slow
def test_no_residual_is_held_twice(mesh):
    """However often a value is needed backwards, one buffer of it is held."""

    def fun(x, w):
        e = jnp.tanh(x)
        return e * w, (e * w * e, e + 0)

    f = pjit(fun, P("data"), P("data"), mesh=mesh)
    x, w = put(X, mesh, P("data")), put(W, mesh, P("data"))
    _, pull = jax.vjp(f, x, w)
    held = arrays(pull)
    assert len({buffers(r) for r in held}) == len({id(r) for r in held})
    values = [np.asarray(r).tobytes() for r in {buffers(r): r for r in held}.values()]
    assert len(values) == len(set(values))
    _, theirs = jax.vjp(peer(fun, mesh, (P("data"),) * 2, P("data")), x, w)
    assert len({buffers(r) for r in held}) <= len({buffers(r) for r in arrays(theirs)})


RESIDUALS = {
    "products": (
        lambda x, w: jnp.tanh(jnp.sin(x) @ w.T),
        (P("data"), P("model")),
        P("data", "model"),
    ),
    "reduction": (
        lambda x, w: jnp.exp(jnp.sin(x).sum(0, keepdims=True)) * jnp.cos(w),
        (P("data"), P("data")),
        P(),
    ),
    "transposed": (lambda x, w: jnp.sin(x.T) * jnp.cos(w).T, (P("data"), P()), P("model", "data")),
    "replicated": (lambda x, w: jnp.sin(x) * jnp.cos(w), (P(), P()), P()),
    "both axes": (lambda x, w: jnp.sin(x + w) ** 2, (P(("data", "model")), P()), P("data")),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", RESIDUALS)
def test_residuals_lie_as_the_compiler_chose(name, mesh):
    """Per shape, what is held on a device is no larger than what stock `vjp(jit)` holds."""
    fun, ins, outs = RESIDUALS[name]
    args = [put(v, mesh, s) for v, s in zip((X, W), ins, strict=True)]
    _, pull = jax.vjp(pjit(fun, ins, outs, mesh=mesh), *args)
    _, theirs = jax.vjp(peer(fun, mesh, ins, outs), *args)

    def held(linear):
        unique = {buffers(r): r for r in arrays(linear)}.values()
        return sum(r.addressable_shards[0].data.nbytes for r in unique)

    assert held(pull) <= held(theirs)
    close(pull(jnp.ones_like(fun(X, W))), theirs(jnp.ones_like(fun(X, W))))


@pytest.mark.slow
def test_residual_whose_sharding_no_spec_says(mesh):
    """A residual split in a way that the mesh has no names for stays so, and comes in again."""
    mesh = mesh_of({"x": 8})
    other = jax.sharding.Mesh(mesh.devices.reshape(2, 4), ("a", "b"))
    halves = jax.sharding.NamedSharding(other, P("b", "a"))

    def fun(x):
        h = jax.lax.with_sharding_constraint(jnp.sin(x), halves)
        return (jax.lax.with_sharding_constraint(jnp.tanh(h), halves) ** 2).sum(axis=1)

    x = RNG.uniform(-1, 1, (8, 8)).astype(np.float32)
    f = pjit(fun, P("x"), P("x"), mesh=mesh)
    _, pull = jax.vjp(f, x)
    shards = [r.sharding.shard_shape(r.shape) for r in arrays(pull) if r.shape == (8, 8)]
    assert (2, 4) in shards
    want = jax.grad(lambda x: (jnp.tanh(jnp.sin(x)) ** 2).sum())(x)
    for _ in range(2):
        (got,) = pull(np.ones(8, np.float32))
        assert_sharded(got, want, P("x"), mesh, **CLOSE)


@pytest.mark.parametrize("how", ["eager", "jit", "jit per half"])
def test_one_compile_per_half(how, mesh):
    """A gradient in a training loop compiles each half once, whoever compiles it."""

    def build(c):
        return pjit(
            lambda x, w: jnp.tanh(x @ w.T) * c, (P("data"), P("model")), P("data"), mesh=mesh
        )

    f, x, w = build(1.5), put(X, mesh, P("data")), put(W, mesh, P("model"))
    grad = jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))
    if how == "jit":
        grad = jax.jit(grad)
    elif how == "jit per half":
        forward = jax.jit(lambda x, w: jax.vjp(f, x, w))
        backward = jax.jit(lambda pull, ct: pull(ct))

        def grad(x, w):
            y, pull = forward(x, w)
            return backward(pull, jnp.ones_like(y))

    compiles = []

    def listen(event, seconds, **_):
        del seconds
        compiles.append(event) if event.endswith("backend_compile_duration") else None

    (dx, dw), first = counted(grad, x, w)
    assert first.traces == 1
    assert first.compiles == (2 if how == "eager" else 0)
    jax.block_until_ready(grad(x - 0.1 * dx, w - 0.1 * dw))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(2):
            (dx, dw), again = counted(grad, x, w)
            assert again == NOTHING
            x, w = jax.block_until_ready((x - 0.1 * dx, w - 0.1 * dw))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiles == []


def test_each_half_is_one_program(mesh, programs):
    """Forward and backward run one program each, with no copy of the forward one in between."""
    f = mlp_on(mesh)
    y, pull = jax.vjp(f, *placed(mesh))
    assert len(programs) == 1
    for _ in range(3):
        assert counted(lambda: jax.block_until_ready(pull(jnp.ones_like(y))))[1].traces == 0
    assert len(set(programs)) == 2


# Donation


def shifted(mesh):
    """A call that donates an argument of which nothing is needed backwards."""

    def shift(x, w):
        return x + w * w

    return pjit(shift, P("data"), P("data"), donate_argnums=0, mesh=mesh)


def fresh(mesh, value=X):
    """A new array in place."""
    return put(value, mesh, P("data"))


def test_tangents_are_donated_with_their_primals(mesh):
    """The tangent of a donated argument is given away too; other tangents are not."""
    x, w, dx, dw = (fresh(mesh, X + i) for i in range(4))
    y, dy = jax.jvp(shifted(mesh), (x, w), (dx, dw))
    assert [v.is_deleted() for v in (x, w, dx, dw)] == [True, False, True, False]
    close((y, dy), (X + (X + 1) ** 2, X + 2 + 2 * (X + 1) * (X + 3)))


ONE_ARRAY = """\
pjit of `shift` cannot donate argument x and use it as argument the tangent of x too.
  expected  a donated array to be one argument only: its buffers are given away
  fix       do not donate it, or pass a copy"""


def test_primal_and_tangent_that_are_one_donated_array(mesh):
    """One array cannot be given away twice; the message names both uses."""
    x, w = fresh(mesh), fresh(mesh)
    with pytest.raises(spmd.DonatedArrayError) as e:
        jax.jvp(shifted(mesh), (x, w), (x, w))
    assert str(e.value) == ONE_ARRAY
    assert not x.is_deleted()


def test_donation_of_what_is_not_needed_again(mesh):
    """Differentiating, a donated argument that is no residual is given away, without a word."""
    for transform in (jax.vjp, jax.linearize):
        x, w = fresh(mesh), fresh(mesh, W)
        transform(shifted(mesh), x, w)
        assert x.is_deleted()
        assert not w.is_deleted()


def test_residuals_and_cotangents_are_never_donated(mesh):
    """A backward half may run as often as one likes, on the same cotangent."""
    w, ct = fresh(mesh, W), fresh(mesh)
    _, pull = jax.vjp(shifted(mesh), fresh(mesh), w)
    for _ in range(3):
        close(pull(ct), (X, 2 * W * X))
    assert not any(r.is_deleted() for r in (ct, w, *arrays(pull)))
    everything = pjit(jnp.sin, P("data"), P("data"), donate_argnums=0, mesh=mesh)
    _, pull = jax.vjp(everything, fresh(mesh))
    for _ in range(2):
        close(pull(ct), (np.cos(X) * X,))
    assert not ct.is_deleted()


def scale(x, w):
    """Backwards each argument is needed."""
    return x * w["by"]


KEPT = {
    "vjp": (lambda f, x, w: jax.vjp(lambda x: f(x, w), x)[1](jnp.ones_like(X))[0], W, "w['by']"),
    "grad": (lambda f, x, w: jax.grad(lambda x: f(x, w).sum())(x), W, "w['by']"),
    "linearize": (
        lambda f, x, w: jax.linearize(lambda w: f(x, w), w)[1]({"by": jnp.asarray(W)}),
        X * W,
        "x",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_donated_input_that_is_a_residual_is_kept_with_a_warning(name, mesh):
    """It is not donated; the warning names the function and what is kept, and nothing else."""
    derivative, want, kept = KEPT[name]
    f = pjit(scale, P("data"), P("data"), donate_argnums=(0, 1), mesh=mesh)
    x, w = fresh(mesh), fresh(mesh, W)
    with pytest.warns(spmd.DonationWarning) as caught:
        got = derivative(f, x, {"by": w})
    np.testing.assert_allclose(got, want, **CLOSE)
    assert [x.is_deleted(), w.is_deleted()] == [kept != "x", kept == "x"]
    (one,) = caught
    assert issubclass(one.category, UserWarning)
    text = str(one.message)
    assert "pjit of `scale`" in text
    assert f"argument {kept}" in text
    assert ("argument x" in text) == (kept == "x")
    assert one.filename == __file__


def test_donation_does_not_warn_where_nothing_is_kept(mesh):
    """No warning without a derivative, nor where the derivative does not need the argument."""
    f = pjit(scale, P("data"), P("data"), donate_argnums=0, mesh=mesh)
    x = fresh(mesh)
    close(f(x, {"by": W}), X * W)
    assert x.is_deleted()
    x = fresh(mesh)
    close(jax.grad(lambda x: f(x, {"by": W}).sum())(x), W)
    assert x.is_deleted()
