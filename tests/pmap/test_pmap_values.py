"""What a mapped function computes: against a loop over devices in NumPy, and against `jax.vmap`."""

import functools

from hypothesis import given, settings, strategies as st
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

import spmd
from spmd import pmap

SIZES = [1, 2, 8]
SOME_SLOW = [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 8))]


def values(*shape):
    """Small different numbers, which no sum rounds."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 3


def looped(fun, args, in_axes, out_axes):
    """The oracle: `fun` of one slice at a time, on NumPy, and the results stacked."""
    size = next(x.shape[a] for x, a in zip(args, in_axes, strict=True) if a is not None)
    rows = []
    for i in range(size):
        rows.append(
            fun(*(x if a is None else x.take(i, a) for x, a in zip(args, in_axes, strict=True)))
        )
    columns = zip(*rows, strict=True)
    return [c[0] if a is None else np.stack(c, a) for c, a in zip(columns, out_axes, strict=True)]


@pytest.mark.few(6)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("in_axes", "out_axes"),
    [
        ((0, 0), (0, 0)),
        ((1, None), (1, None)),
        ((-1, 0), (-1, 0)),
        ((-3, None), (2, None)),
        ((2, 0), (-3, 0)),
        ((0, None), (-2, None)),
    ],
    ids=str,
)
def test_axes(in_axes, out_axes, size):
    """Any axis of an argument may be mapped, and may stand anywhere in a result."""
    shape = [3, 4]
    shape.insert(in_axes[0] if in_axes[0] >= 0 else in_axes[0] + 3, size)
    args = values(*shape), values(size) if in_axes[1] == 0 else values(4)

    def fun(x, y):
        return x * 2 + (y if np.ndim(y) == 0 else y[None]), y * 3

    got = pmap(fun, in_axes=in_axes, out_axes=out_axes)(*args)
    for g, w in zip(got, looped(fun, args, in_axes, out_axes), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_axes(data):
    """As above, for any rank, axes and size."""
    size = data.draw(st.integers(1, 8))
    rank = data.draw(st.integers(0, 3))
    shape = [data.draw(st.integers(0, 3)) for _ in range(rank)]
    into, out = (data.draw(st.integers(-rank - 1, rank)) for _ in range(2))
    shape.insert(into if into >= 0 else into + rank + 1, size)
    x = values(*shape)
    got = pmap(lambda x: (x + 1,), in_axes=into, out_axes=(out,))(x)
    np.testing.assert_array_equal(got[0], looped(lambda x: (x + 1,), [x], [into], [out])[0])
    assert got[0].sharding.num_devices == size


def test_trees():
    """Axes are a pytree prefix of arguments and results; None is an empty tree of values."""
    batch = {"x": values(4, 3), "y": (values(3, 4), None)}

    @functools.partial(
        pmap, in_axes=({"x": 0, "y": 1}, None), out_axes={"sum": 0, "whole": None, "none": 0}
    )
    def fun(batch, shift):
        return {"sum": batch["x"] + batch["y"][0], "whole": shift, "none": None}

    got = fun(batch, np.float32(2))
    np.testing.assert_array_equal(got["sum"], batch["x"] + batch["y"][0].T)
    assert got["whole"] == 2
    assert got["none"] is None


def test_arguments_by_name():
    """They are mapped over axis 0, whatever `in_axes` says of the others, in any order."""
    fun = pmap(lambda x, *, y, z: x + y * z, in_axes=1)
    x, y, z = values(3, 4), values(4, 3), values(4)
    want = x.T + y * z[:, None]
    np.testing.assert_array_equal(fun(x, y=y, z=z), want)
    np.testing.assert_array_equal(fun(x, z=z, y=y), want)
    assert fun._cache_size == 1


def test_static_arguments():
    """Static arguments are Python values, wherever they stand, and do not count for `in_axes`."""

    @functools.partial(pmap, static_broadcasted_argnums=(0, 2), in_axes=(None, 1, None, None))
    def fun(how, x, n, y):
        assert how in ("add", "mul")
        return x[:n] + y if how == "add" else x[:n] * y

    x = values(3, 4)
    np.testing.assert_array_equal(fun("add", x, 2, 5.0), (x[:2] + 5).T)
    np.testing.assert_array_equal(fun("mul", x, 3, 5.0), (x * 5).T)
    assert fun._cache_size == 2


def test_no_array_argument():
    """With `axis_size` a function needs no array to map."""
    np.testing.assert_array_equal(
        pmap(lambda: lax.axis_index("i") * 2, "i", axis_size=5)(), 2 * np.arange(5)
    )
    whole = pmap(lambda x: x + lax.axis_index("i"), "i", in_axes=None, axis_size=3)(np.int32(4))
    np.testing.assert_array_equal(whole, [4, 5, 6])


@pytest.mark.parametrize("numbers", [[5], [6, 2], [7, 6, 5, 4, 3, 2, 1, 0]], ids=len)
def test_devices(numbers):
    """The devices given run, in their order."""
    devices = [jax.devices()[i] for i in numbers]
    x = values(len(numbers), 3)
    out = pmap(lambda x: x * 2, "i", devices=devices)(x)
    np.testing.assert_array_equal(out, x * 2)
    assert [s.device for s in sorted(out.addressable_shards, key=lambda s: s.index[0].start or 0)]
    mesh = jax.sharding.Mesh(np.array(devices), ("i",))
    assert out.sharding == NamedSharding(mesh, P("i"))
    on_platform = pmap(lambda x: x * 2, backend=jax.default_backend())(x)
    np.testing.assert_array_equal(on_platform, x * 2)


# Collectives

GROUPS = [[0, 3], [1, 2]]
ORDERS = {1: [0], 2: [1, 0], 8: [2, 0, 3, 1, 7, 5, 4, 6]}
COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmean": lambda x: lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pmin": lambda x: lax.pmin(x, "i"),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "all_gather tiled": lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i"),
    "psum_scatter tiled": lambda x: lax.psum_scatter(x, "i", tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "i", [(i, ORDERS[len(x)][i]) for i in range(len(x))]),
    "pshuffle": lambda x: lax.pshuffle(x, "i", ORDERS[len(x)]),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0),
    "axis_index": lambda x: x * lax.axis_index("i").astype(np.float32),
    "axis_size": lambda x: x * lax.psum(1, "i"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("size", SOME_SLOW)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name, size):
    """Each collective, and the gradient through it, as under `jax.vmap` with the axis named."""
    fun = COLLECTIVES[name]
    x = values(size, size, 3)
    mapped, oracle = pmap(fun, "i"), jax.vmap(fun, axis_name="i")
    np.testing.assert_array_equal(mapped(x), oracle(x))
    if name in ("pmax", "pmin"):
        return  # JAX has no derivative of these

    def loss(f, x):
        y = f(x)
        return (y * jnp.arange(y.size, dtype=np.float32).reshape(y.shape)).sum()

    grads = [jax.grad(functools.partial(loss, f))(jnp.asarray(x)) for f in (mapped, oracle)]
    np.testing.assert_allclose(*grads, rtol=1e-6)


def test_groups():
    """Collectives in groups of devices."""
    x = values(4, 3)
    got = pmap(lambda x: lax.psum(x, "i", axis_index_groups=GROUPS), "i")(x)
    np.testing.assert_array_equal(got[0], x[0] + x[3])
    np.testing.assert_array_equal(got[2], x[1] + x[2])
    gathered = pmap(lambda x: lax.all_gather(x, "i", axis_index_groups=GROUPS), "i")(x)
    np.testing.assert_array_equal(gathered[3], x[[0, 3]])
    np.testing.assert_array_equal(gathered[1], x[[1, 2]])

    def loss(x):
        return (pmap(lambda x: lax.psum(x, "i", axis_index_groups=GROUPS), "i")(x) * x).sum()

    # Each element is in the sum of its own group, twice: by itself, and by its partner.
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(x))[0], 2 * (x[0] + x[3]), rtol=1e-6)


# Transformations


def centred(x):
    """A function of one device that talks to the others."""
    return jnp.sin(x) - lax.pmean(x, "i")


X = values(4, 3) / 7
MAPPED, ORACLE = pmap(centred, "i"), jax.vmap(centred, axis_name="i")
AROUND = {
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f, in_axes=2, out_axes=1)(np.stack([x, x + 1], 2)),
    "grad": lambda f, x: jax.grad(lambda x: (f(x) ** 2).sum())(x),
    "value_and_grad": lambda f, x: jax.value_and_grad(lambda x: (f(x) ** 2).sum())(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x * 2,)),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "hessian": lambda f, x: jax.hessian(lambda x: (f(x) ** 2).sum())(x[:, :1]),
    "remat": lambda f, x: jax.grad(lambda x: jax.checkpoint(f)(f(x)).sum())(x),
    "scan": lambda f, x: lax.scan(lambda c, _: (f(c), c.sum()), x, None, length=3),
    "cond": lambda f, x: lax.cond(x.sum() > 0, f, lambda x: x, x),
    "make_jaxpr": lambda f, x: jax.eval_shape(f, x).shape,
    "pjit": lambda f, x: (
        spmd.pjit(f, mesh=spmd.make_mesh({"a": len(x)}))(x) if f is ORACLE else f(x)
    ),
}
INSIDE = {
    "jit": jax.jit(centred),
    "vmap": jax.vmap(centred),
    "grad": jax.grad(lambda x: centred(x).sum()),
    "scan": lambda x: lax.scan(lambda c, _: (centred(c), None), x, None, length=3)[0],
    "remat": jax.checkpoint(centred),
    "while": lambda x: lax.fori_loop(0, 3, lambda _, x: centred(x), x),
    "cond": lambda x: lax.cond(lax.psum(x, "i")[0] > 0, centred, lambda x: x, x),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("size", SOME_SLOW)
@pytest.mark.parametrize("name", AROUND)
def test_transformations_around(name, size):
    """JAX's transformations of a mapped function, as of a vectorized one."""
    got, want = (AROUND[name](f, values(size, 3) / 7) for f in (MAPPED, ORACLE))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("size", SOME_SLOW)
@pytest.mark.parametrize("name", INSIDE)
def test_transformations_inside(name, size):
    """JAX's transformations in a mapped function, as in a vectorized one."""
    fun, x = INSIDE[name], values(size, 3) / 7
    np.testing.assert_allclose(
        pmap(fun, "i")(x), jax.vmap(fun, axis_name="i")(x), rtol=2e-5, atol=1e-6
    )


def test_gradient_of_a_parallel_training_step():
    """Data parallel training as classic code wrote it equals training on the whole batch."""
    rng = np.random.default_rng(0)
    w, x, y = (rng.normal(size=s).astype(np.float32) for s in ((5,), (8, 4, 5), (8, 4)))

    def loss(w, x, y):
        return ((x @ w - y) ** 2).mean()

    @functools.partial(pmap, axis_name="i", in_axes=(None, 0, 0), out_axes=None)
    def step(w, x, y):
        return w - 0.1 * lax.pmean(jax.grad(loss)(w, x, y), "i")

    want = w
    for _ in range(3):
        w = step(w, x, y)
        want = want - 0.1 * jax.grad(loss)(want, x.reshape(32, 5), y.reshape(32))
    np.testing.assert_allclose(w, want, rtol=1e-5)


# Stages


def test_stages():
    """Lowered and compiled programs run, and their report names the axis of the collective."""
    lowered = MAPPED.lower(X)
    assert "all_reduce" in lowered.as_text()
    compiled = lowered.compile()
    np.testing.assert_allclose(compiled(X), ORACLE(X), rtol=1e-6)
    (collective,) = spmd.report(MAPPED, X).collectives
    assert (collective.kind, collective.mesh_axes) == ("all-reduce", ("i",))
    assert MAPPED.eval_shape(X).shape == X.shape
    assert "shard_map" in str(MAPPED.trace(X).jaxpr)
    assert jax.make_jaxpr(MAPPED)(X).in_avals[0].shape == X.shape


def test_what_the_stages_say_is_what_jax_says():
    """Arguments, results, shardings and layouts are those of `jax.pmap`, but for the axis' name."""
    stages = []
    for mapped in (pmap, jax.pmap):
        fun = mapped(lambda w, x: (w * x, x.sum()), "i", in_axes=(None, 0), donate_argnums=1)
        lowered = fun.lower(X[0], X)
        stages.append((lowered, lowered.compile()))
    for ours, theirs in zip(*stages, strict=True):
        assert ours.in_tree == theirs.in_tree
        assert ours.out_tree == theirs.out_tree
        assert ours.donate_argnums == theirs.donate_argnums == (1,)
        infos = [jax.tree.leaves(stage.args_info) for stage in (ours, theirs)]
        rows = [[(a.shape, a.dtype, a.donated) for a in stage] for stage in infos]
        assert rows[0] == rows[1]
    ours, theirs = stages[0][-1], stages[1][-1]
    for name in ("input_shardings", "output_shardings"):
        got, want = jax.tree.leaves(getattr(ours, name)), jax.tree.leaves(getattr(theirs, name))
        assert all(g.is_equivalent_to(w, 2) for g, w in zip(got, want, strict=True))
    for name in ("input_formats", "output_formats"):
        got, want = jax.tree.leaves(getattr(ours, name)), jax.tree.leaves(getattr(theirs, name))
        assert [f.layout for f in got] == [f.layout for f in want]


# Values of no bytes

F0 = jax.dtypes.float0
FLOAT0 = {
    "through": (lambda z, x: (z, x), (4, 3)),
    "made": (lambda z, x: (np.zeros((5,), F0), x), (4, 5)),
    "empty": (lambda z, x: (np.zeros((0,), F0), x), (4, 0)),
    "gradient": (
        lambda z, x: (jax.grad(lambda n: n.astype(x.dtype), allow_int=True)(np.int32(1)), x),
        (4,),
    ),
}


@pytest.mark.parametrize("how", ["call", "vmap", "compiled", "jit", "pjit"])
@pytest.mark.parametrize("case", FLOAT0)
def test_float0(case, how):
    """Tangents of integers go in and come out, at the first call and at repeated ones."""
    # So does `jax.jit` of a `shard_map` with such a constant, without this library; neither end of
    # the range of JAX skips it.
    if case == "empty" and how != "pjit" and (0, 11) <= jax.__version_info__ < (0, 12):
        pytest.skip("XLA of JAX 0.11 crashes on an empty constant that a shard_map takes")
    fun, shape = FLOAT0[case]
    z = np.zeros((4, 3), F0)
    f = mapped = pmap(fun)
    if how == "vmap":
        f = lambda z, x: jax.tree.map(lambda v: v[0], jax.vmap(mapped)(z[None], x[None]))  # noqa: E731 - one expression
    elif how == "compiled":
        f = mapped.lower(z, X).compile()
    elif how == "jit":
        f = jax.jit(mapped)
    elif how == "pjit":  # whose mesh is part of the type of its results
        mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4])
        f = spmd.pjit(jax.vmap(fun), spmd.P("i"), spmd.P("i"), mesh=mesh)
    for _ in range(3):
        none, x = f(z, X)
        assert (none.dtype, none.shape) == (F0, shape)
        np.testing.assert_array_equal(x, X)


def test_derivatives_by_integers():
    """They are float0, and so are the tangents that go in."""
    n = np.arange(12).reshape(4, 3)
    mapped = pmap(lambda x, n: (x * n.astype(x.dtype), n))
    _, tangents = jax.jvp(mapped, (X, n), (X, np.zeros(n.shape, F0)))
    np.testing.assert_allclose(tangents[0], X * n)
    assert (tangents[1].dtype, tangents[1].shape) == (F0, n.shape)
    grads = jax.grad(lambda x, n: mapped(x, n)[0].sum(), (0, 1), allow_int=True)(X, n)
    np.testing.assert_allclose(grads[0], n)
    assert (grads[1].dtype, grads[1].shape) == (F0, n.shape)
    copies = spmd.device_put_replicated(grads[1], jax.devices())
    assert (copies.dtype, copies.shape) == (F0, (8, *n.shape))


def test_unjitted():
    """Under `jax.disable_jit` each device's function runs operation by operation."""
    seen = []

    def fun(x):
        seen.append(x)
        return x * 2

    with jax.disable_jit():
        for _ in range(2):
            np.testing.assert_array_equal(pmap(fun)(X), X * 2)
    assert len(seen) == 2
