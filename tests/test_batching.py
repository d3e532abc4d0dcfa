"""Batching: `vmap` of calls and of constraints, against the unsharded function.

Where a dimension goes, which mesh axes split it, and what a conflict says.
"""

import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, counted, mesh_of
import pytest

import spmd
from spmd import P, pjit, with_sharding_constraint
from spmd.partition_spec import SpecSync
from spmd.primitives import pjit_p, sharding_constraint_p

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (3, 8, 4, 2)).astype(np.float32)
W = RNG.uniform(-1, 1, (4, 2)).astype(np.float32)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
here = __file__.rsplit("/", 1)[-1]


def close(got, want, **tolerance):
    """Asserts that two trees have the same structure and values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), **(tolerance or CLOSE))


def refusal(call, error=ValueError):
    """The text of the error that a call raises."""
    with pytest.raises(error) as e:
        call()
    return re.sub(r"used at \S*/", "used at ", re.sub(r"(:\d+)+ \(", ":N (", str(e.value)))


def equations(f, *args):
    """Our equations in the jaxpr of `f`, outermost first, as ``(primitive, params)``."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive in (pjit_p, sharding_constraint_p):
                found.append((eqn.primitive, eqn.params))
            for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(sub):
                    walk(sub if hasattr(sub, "eqns") else sub.jaxpr)

    def is_jaxpr(x):
        return hasattr(x, "eqns") or hasattr(x, "jaxpr")

    walk(jax.make_jaxpr(f)(*args).jaxpr)
    return found


def annotations(f, *args):
    """The constraints in the StableHLO of `jax.jit(f)`."""
    text = jax.jit(f).lower(*args).as_text()
    return re.findall(r"sdy.sharding_constraint %\S+ <@mesh, (\[.*\])> ", text)


# Axes in and out


def mixed(tree, w, n):
    """A tree in and out; `n` is an integer that takes part."""
    h = jnp.tanh(tree["a"] @ w) + tree["b"][0]
    return {"h": h * n.astype(h.dtype), "s": (h.sum(axis=0), tree["b"][0] * 2), "c": w + 1}


def mixed_on(mesh, **options):
    """The same, split over both axes."""
    return pjit(
        mixed,
        in_axis_resources=({"a": P("data"), "b": P(None, "model")}, P("model"), None),
        out_axis_resources={"h": P("data", "model"), "s": P(), "c": P()},
        mesh=mesh,
        **options,
    )


MIXED = [
    ((0, None, None), 0),
    (({"a": -1, "b": 0}, None, None), {"h": -1, "s": (1, 0), "c": None}),
    (({"a": 1, "b": [-2]}, 0, 0), {"h": 1, "s": (-1, 2), "c": 2}),
    (({"a": None, "b": None}, -1, None), {"h": -2, "s": (0, None), "c": 1}),
    ((None, None, 0), {"h": 2, "s": (None, None), "c": None}),
    (({"a": 2, "b": 2}, 1, 0), (-1)),
]


def argument(shape, axis, dtype=np.float32):
    """Random values of `shape` with a dimension of size 3 at `axis`, or without."""
    if axis is not None:
        axis = axis if axis >= 0 else len(shape) + 1 + axis
        shape = (*shape[:axis], 3, *shape[axis:])
    return RNG.uniform(-2, 2, shape).astype(dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize("axes", MIXED, ids=[str(i) for i in range(len(MIXED))])
def test_any_axes_of_a_tree(axes, mesh):
    """Leading, middle, negative and missing axes, per leaf or per subtree, as JAX maps them."""
    in_axes, out_axes = axes
    flat = (
        [in_axes[0], in_axes[0]] if not isinstance(in_axes[0], dict) else list(in_axes[0].values())
    )
    b = flat[1][0] if isinstance(flat[1], list) else flat[1]
    tree = {"a": argument((8, 4), flat[0]), "b": [argument((8, 2), b)]}
    args = (tree, argument((4, 2), in_axes[1]), argument((), in_axes[2], np.int32))
    want = jax.vmap(mixed, in_axes, out_axes)(*args)
    f = jax.vmap(mixed_on(mesh), in_axes, out_axes)
    close(f(*args), want)
    close(jax.jit(f)(*args), want)


def test_no_argument_mapped(mesh):
    """Only `axis_size` says how many there are: one call, results unmapped or repeated."""
    seen = []

    def fun(x):
        seen.append(x.shape)
        return jnp.sin(x), lax.axis_index("i") * 2

    f = pjit(fun, in_axis_resources=P("data"), out_axis_resources=(P("data"), P()), mesh=mesh)
    mapped = jax.vmap(f, in_axes=None, out_axes=(None, 0), axis_size=3, axis_name="i")
    close(mapped(X[0]), (np.sin(X[0]), np.arange(0, 6, 2, np.int32)))
    repeated = jax.vmap(f, in_axes=None, out_axes=1, axis_size=3, axis_name="i")
    want = np.stack([np.sin(X[0])] * 3, axis=1), np.arange(0, 6, 2, np.int32)
    close(jax.vmap(f, None, (1, 0), axis_size=3, axis_name="i")(X[0]), want)
    assert set(seen) == {(8, 4, 2)}
    del repeated


def test_no_argument_at_all(mesh):
    """A function without arguments is mapped by `axis_size` alone."""
    f = pjit(lambda: (lax.axis_index("i"), jnp.arange(8.0)), out_axis_resources=P(), mesh=mesh)
    got = jax.vmap(f, axis_name="i", axis_size=4, out_axes=(0, None))()
    close(got, (np.arange(4, dtype=np.int32), np.arange(8, dtype=np.float32)))


def test_mapped_result_with_out_axes_none_is_refused_as_by_jit(mesh):
    """A result that is mapped cannot come out unmapped: JAX's own words, as for `jax.jit`."""
    f = pjit(jnp.sin, in_axis_resources=P("data"), mesh=mesh)
    ours, jits = [refusal(lambda g=g: jax.vmap(g, out_axes=None)(X)) for g in (f, jax.jit(jnp.sin))]
    assert ours == jits


@pytest.mark.slow
def test_mapped_sizes_of_zero_and_one(mesh):
    """No example, or one, is a number of examples too."""
    f = pjit(lambda x: jnp.tanh(x).sum(0), P("data"), P(), mesh=mesh)
    for n in (0, 1):
        close(jax.vmap(f)(X[:n]), np.tanh(X[:n]).sum(1))
        close(jax.vmap(jax.grad(lambda x: f(x).sum()))(X[:n]), 1 - np.tanh(X[:n]) ** 2)


# Where the new dimension lies


def row(x, w):
    """A constraint on each side of a product."""
    x = with_sharding_constraint(x, P("data"))
    return with_sharding_constraint(x @ w, P(None, "model"))


def row_on(mesh, **options):
    """The same as a call, split."""
    options = {"in_axis_resources": (P("data"), None), "out_axis_resources": P("data"), **options}
    return pjit(row, mesh=mesh, **options)


XS = X[..., 0].copy()  # [3, 8, 4]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("in_axis", "out_axis", "inputs", "spec"),
    [
        (0, 0, P(None, "data"), P(None, "data")),
        (1, -1, P("data"), P("data")),
        (2, 1, P("data"), P("data")),
    ],
)
def test_eager_boundary_is_unsharded(in_axis, out_axis, inputs, spec, mesh):
    """Each device holds all examples of its rows, of results and of gradients."""
    xs = np.moveaxis(XS, 0, in_axis)
    y = jax.vmap(row_on(mesh), (in_axis, None), out_axis)(xs, W)
    assert_sharded(y, np.moveaxis(XS @ W, 0, out_axis), spec, mesh, **CLOSE)
    g = jax.vmap(jax.grad(lambda x, w: (row_on(mesh)(x, w) ** 2).sum()), (in_axis, None), in_axis)
    want = np.moveaxis(2 * (XS @ W) @ W.T, 0, in_axis)
    assert_sharded(g(xs, W), want, inputs, mesh, **CLOSE)


@pytest.mark.parametrize(
    ("in_axis", "rows", "product"),
    [
        (0, '[{?}, {"data"}, {}]', '[{?}, {}, {"model"}]'),
        (1, '[{"data"}, {?}, {}]', '[{}, {?}, {"model"}]'),
        (-1, '[{"data"}, {}, {?}]', '[{}, {?}, {"model"}]'),
    ],
)
def test_inside_the_new_dimension_is_unconstrained(in_axis, rows, product, mesh):
    """In StableHLO the new dimension is `{?}`, in a call's specs and in each constraint."""
    f = jax.vmap(row_on(mesh), in_axes=(in_axis, None))
    # The arguments, the constraint on the first, that on the product, the result.
    result = rows.replace("{}, {?}", "{?}, {}")
    want = [rows, "[{}, {}]", rows, product, result]
    assert annotations(f, np.moveaxis(XS, 0, in_axis), W) == want


def test_two_new_dimensions_are_unconstrained(mesh):
    """Each of two nested maps adds one `{?}`, in its own place."""
    f = pjit(jnp.sin, in_axis_resources=P("data", "model"), mesh=mesh)
    xs = np.zeros((8, 3, 4, 2), np.float32)
    nested = jax.vmap(jax.vmap(f, in_axes=1, out_axes=1), in_axes=3, out_axes=3)
    assert annotations(nested, xs) == ['[{"data"}, {?}, {"model"}, {?}]']
    assert_sharded(nested(xs + 1), np.sin(xs + 1), P("data", None, "model"), mesh, **CLOSE)


def test_a_call_in_a_mapped_call(mesh):
    """The inner call's new dimension is free even where the outer call is at the boundary."""
    inner = pjit(jnp.sin, P(None, "model"), P(None, "model"), mesh=mesh)
    f = pjit(lambda x: inner(x) + x, P("data"), P("data"), mesh=mesh)
    y = jax.vmap(f)(XS)
    assert_sharded(y, np.sin(XS) + XS, P(None, "data"), mesh, **CLOSE)
    text = f.lower(XS[0]).as_text()
    assert "?" not in text
    assert annotations(jax.vmap(f), XS).count('[{?}, {}, {"model"}]') == 2


def test_constraint_with_the_users_own_unconstrained(in_mesh):
    """The user's P.UNCONSTRAINED and the new dimension are both left open."""
    U = P.UNCONSTRAINED
    f = jax.vmap(lambda x: with_sharding_constraint(x, P(U, "model")), in_axes=1, out_axes=1)
    assert annotations(f, np.zeros((8, 3, 4), np.float32)) == ['[{?}, {?}, {"model"}]']


# spmd_axis_name


def test_record_says_how_far_its_specs_are_from_the_users(mesh):
    """A dimension alone permutes a spec; a mesh axis that vmap put in makes it another one."""
    f = pjit(
        lambda x: with_sharding_constraint(x, P("model")), P(None, "model"), P("model"), mesh=mesh
    )
    for name, sync, entry in (
        (None, SpecSync.DIM_PERMUTE, None),
        ("data", SpecSync.OUT_OF_SYNC, ("data",)),
    ):
        (_, call), (_, inner) = equations(jax.vmap(f, spmd_axis_name=name), X[..., :2, :])
        call = call["call"]
        specs = (*call.in_axis_resources, *call.out_axis_resources, inner["axis_resources"])
        assert [s.sync for s in specs] == [sync] * 3
        first = [s.partitions[0] for s in specs]
        assert first == [entry] * 3 if name else [repr(p) for p in first] == ["BATCH"] * 3
        assert [s.unsafe_user_spec for s in specs] == [P(None, "model"), P("model"), P("model")]


@pytest.mark.few(1)
@pytest.mark.parametrize("in_axis", [0, 1, 2, -1])
def test_axis_is_put_where_the_dimension_is(in_axis, mesh):
    """The mapped dimension, wherever it is, is split over the axis: inputs, results, gradients."""
    xs = np.concatenate([XS, XS[:1]])
    f = pjit(jnp.sin, P(None, "model"), P(None, "model"), mesh=mesh)
    moved = np.moveaxis(xs, 0, in_axis)
    spec = [None, "model"]
    spec.insert(in_axis % 3, "data")
    kw = {"in_axes": in_axis, "out_axes": in_axis, "spmd_axis_name": "data"}
    y = jax.vmap(f, **kw)(moved)
    assert_sharded(y, np.sin(moved), P(*spec), mesh, **CLOSE)
    g = jax.vmap(jax.grad(lambda x: f(x).sum()), **kw)(moved)
    assert_sharded(g, np.cos(moved), P(*spec), mesh, **CLOSE)
    pushed = jax.vmap(lambda x: jax.jvp(f, (x,), (x,))[1], **kw)(moved)
    assert_sharded(pushed, np.cos(moved) * moved, P(*spec), mesh, **CLOSE)


def test_two_nested_axes():
    """Two nested maps split their dimensions over two axes, in any order of nesting."""
    mesh = mesh_of({"a": 2, "b": 2, "c": 2})
    f = pjit(jnp.sin, P("c"), P("c"), mesh=mesh)
    xs = RNG.uniform(-1, 1, (2, 2, 4)).astype(np.float32)
    y = jax.vmap(jax.vmap(f, spmd_axis_name="b"), spmd_axis_name="a")(xs)
    assert_sharded(y, np.sin(xs), P("a", "b", "c"), mesh, **CLOSE)
    twisted = jax.vmap(jax.vmap(f, 1, 1, spmd_axis_name="a"), 0, 0, spmd_axis_name="b")
    ys = np.moveaxis(xs, 2, 1)  # [2, 4, 2]
    assert_sharded(twisted(ys), np.sin(ys), P("b", "c", "a"), mesh, **CLOSE)
    one_named = jax.vmap(jax.vmap(f), spmd_axis_name="b")
    assert_sharded(one_named(xs), np.sin(xs), P("b", None, "c"), mesh, **CLOSE)


@pytest.mark.slow
def test_axis_in_scan_and_cond(mesh):
    """Inside of loops and branches the calls are split over the axis too."""
    f = pjit(jnp.sin, P(None, "model"), P(None, "model"), mesh=mesh)

    def run(g, x):
        x, _ = lax.scan(lambda c, _: (g(c), None), x, None, length=2)
        return lax.cond(x.sum() > 0, g, lambda x: x, x)

    xs = np.concatenate([XS, XS[:1]])
    mapped = jax.vmap(functools.partial(run, f), spmd_axis_name="data")
    close(mapped(xs), jax.vmap(functools.partial(run, jnp.sin))(xs))
    calls = [p["call"] for e, p in equations(mapped, xs)]
    assert calls
    assert all(c.in_axis_resources[0].partitions[0] == ("data",) for c in calls)


AXIS_IN_USE = """\
pjit of `row` cannot be mapped over mesh axis 'data'.
  given     vmap(spmd_axis_name='data'), used at test_batching.py:N (test_axis_in_use_by_the_inputs.<locals>.<lambda>)
  expected  a mesh axis that the mapped function does not use
  got       the spec P('data')
  fix       drop 'data' from the spec, or map over another axis"""  # noqa: E501 compared as it is printed


def test_axis_in_use_by_the_inputs(mesh):
    """A mesh axis of an input's spec cannot split the mapped dimension too."""
    f = row_on(mesh)
    text = refusal(lambda: jax.vmap(f, (0, None), spmd_axis_name="data")(XS, W), spmd.ShardingError)
    assert text == AXIS_IN_USE


def test_axis_in_use_by_an_unmapped_input_is_free(mesh):
    """An argument that is not mapped may use the axis: no dimension of it is new."""
    f = pjit(lambda x, w: x + w, (P(None, "model"), P("data")), P(None, "model"), mesh=mesh)
    xs = np.concatenate([XS, XS[:1]])
    w = RNG.uniform(-1, 1, (8, 4)).astype(np.float32)
    y = jax.vmap(f, (0, None), spmd_axis_name="data")(xs, w)
    assert_sharded(y, xs + w, P("data", None, "model"), mesh, **CLOSE)


def test_axis_in_use_by_a_result(mesh):
    """A conflict of a result's spec is told likewise, and with the spec that the user wrote."""
    f = pjit(jnp.sin, None, P(None, ("model", "data")), mesh=mesh)
    text = refusal(lambda: jax.vmap(f, spmd_axis_name="data")(np.zeros((4, 8, 8), np.float32)))
    assert text.splitlines()[0] == "pjit of `sin` cannot be mapped over mesh axis 'data'."
    assert "  got       the spec P(None, ('model', 'data'))\n" in text
    assert "  fix       drop 'data' from the spec, or map over another axis" in text


def test_axis_in_use_by_a_constraint(in_mesh):
    """A conflict inside names the constraint and the line that mapped."""
    f = pjit(lambda x: with_sharding_constraint(x, P("data")), P(None, "model"))
    for g in (f, f.__wrapped__):
        text = refusal(
            lambda g=g: jax.vmap(g, spmd_axis_name="data")(np.zeros((4, 8, 8), np.float32))
        )
        assert (
            text.splitlines()[0]
            == "with_sharding_constraint cannot be mapped over mesh axis 'data'."
        )
        assert "used at test_batching.py:N (" in text
        assert "  got       the spec P('data')\n" in text


def test_axis_twice_by_nested_maps(mesh):
    """The second of two nested maps over one axis is told what the first one made of the spec."""
    f = pjit(jnp.sin, P(None, "model"), mesh=mesh)
    xs = np.zeros((4, 4, 8, 8), np.float32)
    twice = jax.vmap(jax.vmap(f, spmd_axis_name="data"), spmd_axis_name="data")
    text = refusal(lambda: twice(xs), spmd.ShardingError)
    assert text.splitlines()[0] == "pjit of `sin` cannot be mapped over mesh axis 'data'."
    assert "got       the spec P(None, 'model'), which vmap made P('data', None, 'model')\n" in text
    # Under grad the same, though the calls are made by the rules.
    graded = jax.vmap(jax.grad(lambda x: f(x).sum()), spmd_axis_name="data")
    text = refusal(lambda: jax.vmap(graded, spmd_axis_name="data")(xs), spmd.ShardingError)
    assert text.splitlines()[0] == "pjit of `sin` cannot be mapped over mesh axis 'data'."


def test_one_axis_twice_in_one_name(mesh):
    """A tuple that names one mesh axis twice is refused in our words."""
    f = pjit(jnp.sin, P(None, "model"), mesh=mesh)
    map2 = jax.vmap(f, spmd_axis_name=("data", "data"))
    text = refusal(lambda: map2(np.zeros((16, 8, 8), np.float32)), spmd.ShardingError)
    assert text.splitlines()[0] == "pjit of `sin` cannot be mapped over mesh axis 'data' twice."


UNKNOWN_AXIS = """\
pjit of `row` cannot be mapped over mesh axis 'modle'.
  given     vmap(spmd_axis_name='modle'), used at test_batching.py:N (test_unknown_axis.<locals>.<lambda>)
  expected  mesh axes out of 'data', 'model'
  got       an unknown axis (did you mean 'model'?)
  fix       use an axis of the mesh, or enter the mesh that has it"""  # noqa: E501 compared as it is printed


def test_unknown_axis(mesh):
    """A mesh axis that does not exist is told with those that do, eagerly and inside of jit."""
    f = jax.vmap(row_on(mesh), in_axes=(0, None), spmd_axis_name="modle")
    assert refusal(lambda: f(XS, W)) == UNKNOWN_AXIS
    first = UNKNOWN_AXIS.splitlines()[0]
    assert refusal(lambda: jax.jit(f)(XS, W)).splitlines()[0] == first


NOT_DIVISIBLE = """\
pjit of `sin` cannot split argument x.
  given     in_axis_resources = P(None, 'model'), which vmap made P('data', None, 'model') on mesh data=4, model=2
  expected  dimension 0 to be divisible by 4
  got       f32[3,8,4]: 3 = 0*4 + 3
  fix       pad dimension 0 to 4, or leave it unsharded with P(None, None, 'model')"""  # noqa: E501 compared as it is printed


def test_examples_that_do_not_divide(mesh):
    """At the boundary the mapped dimension divides evenly, or the message says what vmap made."""
    f = pjit(jnp.sin, P(None, "model"), mesh=mesh)
    assert refusal(lambda: jax.vmap(f, spmd_axis_name="data")(XS)) == NOT_DIVISIBLE
    close(jax.jit(jax.vmap(f, spmd_axis_name="data"))(XS), np.sin(XS))  # the partitioner pads


# Collectives over the mapped axis


def _swap(x):
    return lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)])


COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "i"), lambda x: np.stack([x.sum(0)] * 3)),
    "pmean": (lambda x: x - lax.pmean(x, "i"), lambda x: x - x.mean(0)),
    "pmax": (lambda x: lax.pmax(x, "i"), lambda x: np.stack([x.max(0)] * 3)),
    "all_gather": (lambda x: lax.all_gather(x, "i")[::-1], lambda x: np.stack([x[::-1]] * 3)),
    "all_gather tiled": (
        lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
        lambda x: np.stack([np.concatenate(list(x), axis=1)] * 3),
    ),
    "axis_index": (
        lambda x: x + lax.axis_index("i").astype(x.dtype),
        lambda x: x + np.arange(3, dtype=np.float32)[:, None, None],
    ),
    "axis_size": (lambda x: x * lax.axis_size("i"), lambda x: x * 3),
    "ppermute": (_swap, lambda x: np.roll(x, 1, axis=0)),
    "psum of a constant": (lambda x: x * lax.psum(1, "i"), lambda x: x * 3),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_over_the_mapped_axis(name, mesh):
    """A collective over the vmapped `axis_name` in a call is that of the examples."""
    fun, want = COLLECTIVES[name]
    f = pjit(fun, P("data"), mesh=mesh)
    close(jax.vmap(f, axis_name="i")(XS), want(XS))
    if name != "pmax":  # JAX has no derivative of pmax

        def loss(g, xs):
            return (jax.vmap(g, axis_name="i")(xs) ** 2).sum()

        close(*[jax.jit(jax.grad(functools.partial(loss, g)))(XS) for g in (f, fun)])


def test_collective_over_two_mapped_axes(mesh):
    """Of two nested named maps a call sees both."""

    def fun(x):
        return x / lax.psum(x, ("i", "j")) + lax.psum(x, "j")

    f = pjit(fun, P("data"), P("data"), mesh=mesh)
    xs = X[:2] + 3
    got, want = (jax.vmap(jax.vmap(g, 2, 2, axis_name="j"), axis_name="i")(xs) for g in (f, fun))
    close(got, want)


def test_one_function_under_maps_of_several_sizes_and_names(mesh):
    """What a trace saw of a mapped axis, its size and whether it was there, is not kept."""
    f = pjit(lambda x: x * lax.axis_size("i"), P("data"), P("data"), mesh=mesh)
    for n in (1, 2, 3, 2):
        close(jax.vmap(f, axis_name="i")(X[:n]), X[:n] * n)
    with pytest.raises(NameError):
        f(X[0])
    with pytest.raises(NameError):
        jax.vmap(f, axis_name="j")(X)
    close(jax.vmap(f, axis_name="i")(X), X * 3)


def test_mesh_axis_named_like_the_mapped_axis(mesh):
    """A mapped axis may be called as a mesh axis is: they have nothing to do with each other."""
    f = pjit(lambda x: lax.psum(x, "data"), P("data"), P("data"), mesh=mesh)
    y = jax.vmap(f, axis_name="data")(X)
    assert_sharded(y, np.stack([X.sum(0)] * 3), P(None, "data"), mesh, **CLOSE)


# Nested transformations


def f_of(x, w):
    """A scalar function."""
    return (jnp.tanh(x @ w) ** 2).sum()


@pytest.mark.slow
def test_vmap_of_grad_of_vmap(mesh):
    """Per-example gradients of a mapped loss, with a mesh axis on either map or none."""
    f = pjit(f_of, (P(None, "model"), P("model")), P(), mesh=mesh)
    xs = np.stack([np.stack([x, 2 * x, -x, x + 1]) for x in (*XS, XS[0])])  # [4, 4, 8, 4]

    def total(g, outer, inner):
        mapped = jax.vmap(g, (0, None), spmd_axis_name=inner)
        grads = jax.grad(lambda x, w: mapped(x, w).sum(), (0, 1))
        return jax.vmap(grads, (0, None), spmd_axis_name=outer)

    want = total(f_of, None, None)(xs, W)
    close(total(f, None, None)(xs, W), want)
    for outer, inner in (("data", None), (None, "data")):
        close(jax.jit(total(f, outer, inner))(xs, W), want)
    dx, _ = total(f, "data", None)(xs, W)
    assert_sharded(dx, want[0], P("data", None, None, "model"), mesh, **CLOSE)
    dx, _ = total(f, None, "data")(xs, W)
    assert_sharded(dx, want[0], P(None, "data", None, "model"), mesh, **CLOSE)


@pytest.mark.slow
def test_jacobians_and_hessians_under_vmap(mesh):
    """Derivatives that map themselves are mapped once more."""

    def fun(x):
        return jnp.sin(x) * x[::-1]

    f = pjit(fun, P("data"), P("data"), mesh=mesh)
    xs = XS[..., 0].copy()
    jacobian = np.stack([np.diag(np.cos(x) * x[::-1]) + np.diag(np.sin(x))[:, ::-1] for x in xs])
    for transform in (jax.jacfwd, jax.jacrev):
        close(jax.jit(jax.vmap(transform(f)))(xs), jacobian)
    hessian = jax.vmap(jax.hessian(lambda x: f(x).sum()))
    close(hessian(xs), jax.jit(jax.vmap(jax.hessian(lambda x: fun(x).sum())))(xs))


@pytest.mark.slow
def test_vmap_of_linearize_and_of_vjp(mesh):
    """The linear map of a mapped call may be mapped over its argument."""
    f = pjit(f_of, (P("data"), None), P(), mesh=mesh)
    _, push = jax.linearize(jax.vmap(f, (0, None)), XS, W)
    _, plain = jax.linearize(jax.vmap(f_of, (0, None)), XS, W)
    dws = np.stack([W, 2 * W])
    close(jax.vmap(push, (None, 0))(XS, dws), jax.vmap(plain, (None, 0))(XS, dws))
    _, pull = jax.vjp(jax.vmap(f, (0, None)), XS, W)
    _, plain = jax.vjp(jax.vmap(f_of, (0, None)), XS, W)
    cts = np.eye(3, dtype=np.float32)
    close(jax.vmap(pull)(cts), jax.vmap(plain)(cts))


def test_vmap_of_scan_of_call_with_unmapped_carry(mesh):
    """A carry that becomes mapped in the loop, since the call mixes it with mapped values."""
    f = pjit(lambda c, x: jnp.tanh(c + x), (P("data"), P("data")), P("data"), mesh=mesh)

    def run(g, x):
        return lax.scan(lambda c, _: (g(c, x), c.sum()), jnp.ones((8, 4), x.dtype), None, length=3)

    close(*[jax.vmap(functools.partial(run, g))(XS) for g in (f, f.__wrapped__)])


def test_compiles_of_a_mapped_call_are_counted(mesh):
    """A mapped call compiles once, also where `vmap` and the function are made anew each time."""
    f = pjit(lambda x, w: f_of(x, w) * 2, (P("data"), None), mesh=mesh)
    first = counted(lambda: jax.vmap(f, (0, None))(XS, W))[1]
    assert (first.traces, first.compiles) == (1, 1)
    for _ in range(2):
        assert counted(lambda: jax.vmap(lambda x: f(x, W))(XS))[1].traces == 0
        assert counted(lambda: jax.vmap(f, (0, None))(XS, W))[1] == spmd.Counts()


# Rules of the user's own


def test_custom_vmap_inside(mesh):
    """A `custom_vmap` in a call uses its own rule, with what is mapped and how many."""
    seen = []

    @jax.custom_batching.custom_vmap
    def scaled(x, w):
        return x * w

    @scaled.def_vmap
    def _rule(axis_size, in_batched, x, w):
        seen.append((axis_size, in_batched))
        w = w if in_batched[1] else w[None]
        # Ten times too much: the rule was used.
        return x * w * 10, True

    f = pjit(lambda x, w: scaled(x, w) + 1, (P("data"), P("data")), P("data"), mesh=mesh)
    close(f(X[0], X[1]), X[0] * X[1] + 1)
    close(jax.vmap(f, (0, None))(X, X[1]), 10 * X * X[1] + 1)
    close(jax.jit(jax.vmap(f))(X, X), 10 * X * X + 1)
    assert seen == [(3, [True, False]), (3, [True, True])]
    _, dy = jax.vmap(lambda x: jax.jvp(f, (x, X[1]), (x, X[1])))(X)
    close(dy, 20 * X * X[1])


def test_custom_vmap_around(mesh):
    """The rule of a `custom_vmap` may call a partitioned function."""
    f = pjit(jnp.sin, P("data"), P("data"), mesh=mesh)
    g = jax.custom_batching.custom_vmap(lambda x: f(x))
    g.def_vmap(lambda axis_size, batched, xs: (jax.vmap(f)(xs) * axis_size, True))
    close(jax.vmap(g)(X), np.sin(X) * 3)
    close(g(X[0]), np.sin(X[0]))


def test_sequential_vmap_inside(mesh):
    """`sequential_vmap` in a call runs the examples in a loop."""
    f = pjit(jax.custom_batching.sequential_vmap(jnp.sin), P("data"), P("data"), mesh=mesh)
    close(jax.vmap(f)(X), np.sin(X))


# Keys


@pytest.mark.slow
def test_keys_mapped_in_every_place(mesh):
    """Typed keys, split over the mesh and mapped over any dimension, are the same keys."""
    keys = jax.random.split(jax.random.key(7), (4, 8))

    def draw(k, x):
        return (jax.random.key_data(k) % 9).astype(x.dtype) * x, k[::-1]

    def on(axis):
        specs = (P(axis), None)
        return pjit(draw, specs, specs[:1] * 2, mesh=mesh)

    x = np.float32([2, 3])[None]
    want, flipped = jax.vmap(draw, (0, None))(keys, x)
    y, out = jax.vmap(on("data"), (0, None))(keys, x)
    assert_sharded(y, want, P(None, "data"), mesh, **CLOSE)
    assert (jax.random.key_data(out) == jax.random.key_data(flipped)).all()
    close(jax.jit(jax.vmap(on("data"), (1, None)))(keys.T, x)[0], want)
    split = jax.vmap(on("model"), (0, None), spmd_axis_name="data")
    assert_sharded(split(keys, x)[0], want, P("data", "model"), mesh, **CLOSE)
    grads = jax.vmap(jax.grad(lambda x, k: on("data")(k, x)[0].sum()), (None, 0))(x, keys)
    close(grads, jax.vmap(jax.grad(lambda x, k: draw(k, x)[0].sum()), (None, 0))(x, keys))


@pytest.mark.slow
def test_keys_that_are_constrained(in_mesh):
    """A constraint on keys has the keys' own dimensions, and one more under vmap."""
    keys = jax.random.split(jax.random.key(7), (3, 8))

    def fun(k):
        return jax.vmap(jax.random.uniform)(with_sharding_constraint(k, P("data")))

    f = pjit(fun, P("data"), P("data"))
    want = jax.vmap(jax.vmap(jax.random.uniform))(keys)
    close(jax.vmap(f)(keys), want)
    close(jax.jit(jax.vmap(fun))(keys), want)
