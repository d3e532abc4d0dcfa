"""Constraints: eager ones place, traced ones bind the partitioner; values never change."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

import spmd
from spmd import pjit, with_sharding_constraint
from spmd.primitives import sharding_constraint_p

U = P.UNCONSTRAINED
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def put(value, mesh, *spec):
    """An array that is committed to a mesh."""
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def placed_as(x, mesh, *spec):
    """Whether an array lies so on the mesh, device by device."""
    wanted = NamedSharding(mesh, P(*spec)).devices_indices_map(x.shape)
    return {s.device: s.index for s in x.addressable_shards} == wanted


def constraints(jaxpr):
    """The constraint equations of a jaxpr, in jaxprs within it too."""
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] if eqn.primitive is sharding_constraint_p else []
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                found += constraints(inner)
    return found


def specs(f, *args):
    """The specs of all constraints in the jaxpr of a function, in order."""
    jaxpr = jax.make_jaxpr(f)(*args)
    return [e.params["axis_resources"].to_partition_spec(U) for e in constraints(jaxpr)]


def annotations(f, *args):
    """The shardings of all constraints in the StableHLO of a function."""
    text = jax.jit(f).lower(*args).as_text()
    return re.findall(r"sdy\.sharding_constraint %\S+ <@\w+, (\[.*?\])>", text)


# Eager


@pytest.mark.parametrize(
    "spec", [("data",), (None, "model"), ("model", "data"), (("data", "model"),)]
)
@pytest.mark.parametrize("committed", [False, True])
def test_eager_places(in_mesh, spec, committed):
    """On a concrete array the constraint places it, from the host or from another sharding."""
    x = put(X, in_mesh, None, "data") if committed else X
    y = with_sharding_constraint(x, P(*spec))
    np.testing.assert_array_equal(y, X)
    assert placed_as(y, in_mesh, *spec)
    assert y.sharding.mesh == in_mesh


def test_eager_replicates(in_mesh):
    """None is replicated: every device holds all of it."""
    y = with_sharding_constraint(put(X, in_mesh, "data"), None)
    assert placed_as(y, in_mesh)
    assert y.is_fully_replicated


def test_eager_takes_numbers(in_mesh):
    """A number becomes an array on the mesh."""
    y = with_sharding_constraint(2.0, P())
    assert float(y) == 2
    assert y.sharding.device_set == set(in_mesh.devices.flat)


def test_eager_brings_arrays_from_other_devices(in_mesh):
    """An array on one device is brought to the mesh: placing is what an eager constraint does."""
    y = with_sharding_constraint(jax.device_put(X, jax.devices()[3]), P("data"))
    np.testing.assert_array_equal(y, X)
    assert placed_as(y, in_mesh, "data")


def test_eager_on_the_mesh_of_a_sharding(mesh):
    """A NamedSharding brings its mesh along, without any context and against one."""
    other = spmd.Mesh(mesh.devices.reshape(2, 4), ("a", "b"))
    sharding = NamedSharding(other, P("a"))
    assert with_sharding_constraint(X, sharding).sharding.is_equivalent_to(sharding, 2)
    with mesh:
        assert with_sharding_constraint(X, sharding).sharding.is_equivalent_to(sharding, 2)


def test_trees(in_mesh):
    """Specs are a prefix of a tree of values; each leaf gets its own."""
    tree = {"a": X, "b": [X + 1, (X + 2, None)]}
    y = with_sharding_constraint(tree, {"a": P("data"), "b": [None, P("model")]})
    assert jax.tree.structure(y) == jax.tree.structure(tree)
    for got, want, spec in [
        (y["a"], X, ("data",)),
        (y["b"][0], X + 1, ()),
        (y["b"][1][0], X + 2, ("model",)),
    ]:
        np.testing.assert_array_equal(got, want)
        assert placed_as(got, in_mesh, *spec)


def test_list_is_no_tuple(in_mesh):
    """Unlike for arguments, a list of specs matches a list only."""
    assert with_sharding_constraint([X], [P("data")])[0].shape == X.shape
    with pytest.raises(ValueError, match="axis_resources is a list of 1 element"):
        with_sharding_constraint((X,), [P("data")])


def test_eager_unconstrained_keeps_the_rest(in_mesh):
    """An open dimension of a placed array stays as it is; of any other it is unsharded."""
    x = put(X, in_mesh, "data")
    assert placed_as(with_sharding_constraint(x, P(U, "model")), in_mesh, "data", "model")
    assert placed_as(with_sharding_constraint(x, P(U, None)), in_mesh, "data")
    assert placed_as(with_sharding_constraint(x, P(U, U)), in_mesh, "data")
    assert placed_as(with_sharding_constraint(X, P(U, "model")), in_mesh, None, "model")


def test_eager_unconstrained_gives_up_a_taken_axis(in_mesh):
    """An axis that the constraint uses elsewhere leaves the open dimension."""
    x = put(X, in_mesh, ("data", "model"))
    y = with_sharding_constraint(x, P(U, "model"))
    np.testing.assert_array_equal(y, X)
    assert placed_as(y, in_mesh, "data", "model")


def test_eager_uneven(in_mesh):
    """An eager constraint is a boundary: uneven is an error there, and nothing is placed."""
    with pytest.raises(spmd.ShardingError, match="pad dimension 0 to 12"):
        with_sharding_constraint(np.ones(10, np.float32), P("data"))


# Traced


def test_traced_is_one_equation(in_mesh):
    """In a trace it is an equation with the parsed spec and the mesh, which prints readably."""
    jaxpr = jax.make_jaxpr(lambda x: with_sharding_constraint(x, P("data", U)))(X)
    (eqn,) = constraints(jaxpr)
    assert set(eqn.params) == {"axis_resources", "mesh"}
    assert eqn.params["axis_resources"].user_spec == P("data", U)
    assert eqn.params["mesh"] == in_mesh
    text = str(jaxpr)
    assert "sharding_constraint[" in text
    assert "spec=P('data', P.UNCONSTRAINED)" in text
    assert "mesh=data=4, model=2" in text
    assert "ParsedPartitionSpec" not in text


@pytest.mark.parametrize(
    ("spec", "annotation"),
    [
        (P("data"), '[{"data"}, {}]'),
        (P(None, "model"), '[{}, {"model"}]'),
        (P(("model", "data")), '[{"model", "data"}, {}]'),
        (None, "[{}, {}]"),
        (P("data", U), '[{"data"}, {?}]'),
        (P(U, U), "[{?}, {?}]"),
    ],
    ids=str,
)
def test_stablehlo_says_it(in_mesh, spec, annotation):
    """The module has the constraint: closed dimensions as written, open ones open."""
    assert annotations(lambda x: with_sharding_constraint(x * 2, spec), X) == [annotation]


def test_compiled_program_obeys(in_mesh):
    """The compiled program holds the value as the constraint says."""

    def f(x):
        return with_sharding_constraint(x * 2, P(None, "model"))

    for wrap in (jax.jit, pjit):
        y = wrap(f)(X)
        np.testing.assert_array_equal(y, 2 * X)
        assert placed_as(y, in_mesh, None, "model")


def test_several_constraints_of_one_value(in_mesh):
    """Constraints in sequence all stand in the module, in order."""

    def f(x):
        x = with_sharding_constraint(x, P("data"))
        x = with_sharding_constraint(x * 2, P("model"))
        return with_sharding_constraint(x + 1, None)

    assert annotations(f, X) == ['[{"data"}, {}]', '[{"model"}, {}]', "[{}, {}]"]
    np.testing.assert_array_equal(jax.jit(f)(X), 2 * X + 1)


def test_traced_uneven(in_mesh):
    """Inside of a function dimensions need not divide: the partitioner pads, values are right."""
    x = np.arange(30, dtype=np.float32).reshape(10, 3)

    def f(x):
        y = with_sharding_constraint(x * 2, P("data", "model"))
        return y.sum(axis=0), jnp.cumsum(y, axis=0)

    assert annotations(f, x) == ['[{"data"}, {"model"}]']
    total, running = pjit(f, None, None)(x)
    np.testing.assert_array_equal(total, 2 * x.sum(0))
    np.testing.assert_array_equal(running, np.cumsum(2 * x, 0))


def test_empty_dimension(in_mesh):
    """A dimension of size zero can be constrained."""
    x = np.ones((0, 4), np.float32)
    assert jax.jit(lambda x: with_sharding_constraint(x, P("data")))(x).shape == (0, 4)
    assert with_sharding_constraint(x, P("data")).shape == (0, 4)


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, jnp.bfloat16, np.complex64, np.float16])
def test_any_dtype(in_mesh, dtype):
    """Any dtype goes through unchanged, eagerly and traced."""
    x = np.asarray(X > 3, dtype)
    for f in (lambda x: x, jax.jit):
        y = f(lambda x: with_sharding_constraint(x, P("data")))(x)
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, x)


def test_random_keys(in_mesh):
    """Typed PRNG keys are values like any other: the spec is that of their logical shape."""
    keys = jax.random.split(jax.random.key(0), 8)
    f = jax.jit(lambda k: with_sharding_constraint(k, P("data")))
    np.testing.assert_array_equal(jax.random.key_data(f(keys)), jax.random.key_data(keys))
    eager = with_sharding_constraint(keys, P("data"))
    np.testing.assert_array_equal(jax.random.key_data(eager), jax.random.key_data(keys))


# Transformations, against NumPy


def square(x):
    """Squares, with a constraint on the way."""
    return with_sharding_constraint(x * x, P("data", None))


def test_grad(in_mesh):
    """The gradient is that of the function, and the cotangent is constrained like the value."""

    def loss(x):
        return (square(x) * x).sum()

    for f in (jax.grad(loss), jax.jit(jax.grad(loss)), pjit(jax.grad(loss), P("data"))):
        np.testing.assert_allclose(f(X), 3 * X**2, rtol=1e-6)
    assert specs(jax.grad(loss), X).count(P("data", None)) == 2


def test_jvp_and_vjp(in_mesh):
    """Tangents and cotangents go through with their values."""
    y, dy = jax.jvp(square, (X,), (np.ones_like(X),))
    np.testing.assert_array_equal(y, X**2)
    np.testing.assert_array_equal(dy, 2 * X)
    assert placed_as(dy, in_mesh, "data")
    _, pull = jax.vjp(square, X)
    np.testing.assert_array_equal(pull(jnp.ones_like(X))[0], 2 * X)


def test_second_derivative(in_mesh):
    """Derivatives of derivatives go through."""
    f = jax.grad(lambda x: jax.grad(lambda v: (square(v) * v).sum())(x).sum())
    np.testing.assert_allclose(jax.jit(f)(X), 6 * X, rtol=1e-6)


def test_hessian_vector_product_and_linearize(in_mesh):
    """Linearization keeps the constraint on the linear half."""
    y, linear = jax.linearize(square, X)
    np.testing.assert_array_equal(y, X**2)
    np.testing.assert_array_equal(linear(jnp.asarray(X)), 2 * X * X)


@pytest.mark.parametrize(
    ("in_axis", "spec", "annotation"),
    [
        (0, P(U, "data", None), '[{?}, {"data"}, {}]'),
        (1, P("data", U, None), '[{"data"}, {?}, {}]'),
    ],
)
def test_vmap_inside(in_mesh, in_axis, spec, annotation):
    """Under vmap the spec moves with its dimensions, and the new one is the partitioner's."""
    x = np.stack([X, X + 1, X + 2], axis=in_axis)
    f = jax.vmap(square, in_axes=in_axis, out_axes=in_axis)
    np.testing.assert_array_equal(jax.jit(f)(x), x**2)
    assert specs(f, x) == [spec]
    assert annotations(f, x) == [annotation]


def test_vmap_eager(in_mesh):
    """Eagerly the new dimension is unsharded, the others as the spec says."""
    x = np.stack([X, X + 1, X + 2])
    y = jax.vmap(lambda v: with_sharding_constraint(v, P("data")))(x)
    np.testing.assert_array_equal(y, x)
    assert placed_as(y, in_mesh, None, "data")


def test_vmap_over_a_mesh_axis(in_mesh):
    """spmd_axis_name splits the new dimension, eagerly and traced."""
    x = np.stack([X + i for i in range(4)])
    f = jax.vmap(lambda v: with_sharding_constraint(v, P("model")), spmd_axis_name="data")
    y = f(x)
    np.testing.assert_array_equal(y, x)
    assert placed_as(y, in_mesh, "data", "model")
    assert annotations(f, x) == ['[{"data"}, {"model"}, {}]']


def test_nested_vmap(in_mesh):
    """Two new dimensions are both inserted where they are."""
    x = np.stack([np.stack([X, X + 1, X + 2])] * 2)
    f = jax.vmap(jax.vmap(square))
    np.testing.assert_array_equal(jax.jit(f)(x), x**2)
    assert annotations(f, x) == ['[{?}, {?}, {"data"}, {}]']


def test_vmap_of_grad(in_mesh):
    """Per-example gradients go through."""
    x = np.stack([X, X + 1])
    f = jax.vmap(jax.grad(lambda v: square(v).sum()))
    np.testing.assert_array_equal(jax.jit(f)(x), 2 * x)


@pytest.mark.slow
def test_scan(in_mesh):
    """A constraint in the body of a loop holds in every step, and differentiates."""

    def f(x):
        def body(carry, y):
            carry = with_sharding_constraint(carry + y, P(None, "model"))
            return carry, carry.sum()

        return jax.lax.scan(body, x, jnp.stack([x, 2 * x, 3 * x]))

    last, sums = pjit(f, P("data"))(X)
    np.testing.assert_array_equal(last, 7 * X)
    np.testing.assert_allclose(sums, np.array([2, 4, 7]) * X.sum(), rtol=1e-6)
    assert annotations(f, X) == ['[{}, {"model"}]']
    np.testing.assert_allclose(jax.grad(lambda x: f(x)[0].sum())(X), np.full_like(X, 7), rtol=1e-6)


@pytest.mark.parametrize("loop", ["while", "cond", "fori", "checkpoint"])
def test_control_flow(in_mesh, loop):
    """Constraints live in loops, branches and rematerialized functions."""
    f = {
        "while": lambda x: jax.lax.while_loop(lambda v: v.max() < 1000, square, x),
        "cond": lambda x: jax.lax.cond(x.sum() > 0, square, lambda v: v, x),
        "fori": lambda x: jax.lax.fori_loop(0, 2, lambda _, v: square(v), x),
        "checkpoint": jax.checkpoint(square),
    }[loop]
    want = {"while": X**4, "cond": X**2, "fori": X**4, "checkpoint": X**2}[loop]
    np.testing.assert_allclose(jax.jit(f)(X), want, rtol=1e-6)
    assert annotations(f, X) == ['[{"data"}, {}]']
    if loop in ("cond", "checkpoint"):
        np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(X), 2 * X)


def test_inside_of_pjit(in_mesh):
    """The first example of the issue: constraint, sum, specs at both ends."""

    def layer(x, w):
        h = with_sharding_constraint(jnp.tanh(x @ w), P("data", "model"))
        return h.sum(axis=1)

    w = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)
    f = pjit(layer, in_axis_resources=(P("data"), P(None, "model")), out_axis_resources=P("data"))
    y = f(X, w)
    np.testing.assert_allclose(y, np.tanh(X @ w).sum(1), rtol=1e-5, atol=1e-6)
    assert placed_as(y, in_mesh, "data")
    text = f.lower(X, w).as_text()
    assert "sdy.sharding_constraint" in text
    assert '[{"data"}, {"model"}]' in text


def test_memory_kind_of_a_sharding(in_mesh):
    """A NamedSharding of other memory is taken as it is, which no spec could say."""
    sharding = NamedSharding(in_mesh, P("data"), memory_kind="pinned_host")
    y = with_sharding_constraint(X, sharding)
    np.testing.assert_array_equal(y, X)
    assert y.sharding.memory_kind == "pinned_host"


def test_one_trace_for_equal_constraints(in_mesh):
    """A constraint leaves nothing behind that would trace a function again."""

    def fresh(x):
        return with_sharding_constraint(x + 3, P("data"))

    f, before = pjit(fresh), spmd.counts()
    for _ in range(3):
        np.testing.assert_array_equal(f(X), X + 3)
    done = spmd.counts() - before
    assert (done.traces, done.lowerings, done.compiles) == (1, 1, 1)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(lambda v: f(v).sum()),
        lambda f: lambda v: jax.vmap(f)(np.stack([v, v])),
    ],
    ids=["grad", "vmap"],
)
def test_uneven_under_an_eager_transformation(transform, in_mesh):
    """Eagerly a dimension has to divide evenly, also where grad or vmap stands between."""
    with pytest.raises(spmd.ShardingError, match="to be divisible by 4"):
        transform(lambda v: with_sharding_constraint(v, P("data")))(np.ones(6, np.float32))
