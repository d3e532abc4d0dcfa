"""A pmap in a pmap: what `jax.vmap` in `jax.vmap` computes, with each element on a device."""

import contextlib
import functools
import gc
import math
import threading
import weakref

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import jax.tree_util as jtu
import numpy as np
from oracle import assert_sharded, counted, mesh_of, put
import pytest

import spmd
from spmd import host_callback, pmap

X = np.sin(np.arange(24, dtype=np.float32)).reshape(4, 2, 3)
#: Whether JAX lets a callback through a shard_map over the last axes of a mesh.
TAPS = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)


def nested(levels, body, names=("i", "j")):
    """Maps `body` once per name, the first of them outermost."""
    for name in reversed(names):
        body = levels(body, axis_name=name)
    return body


def slow(*values):
    """Parameters that only the slow tests have."""
    return [pytest.param(v, marks=pytest.mark.slow) for v in values]


def weights(x):
    """A cotangent whose elements all differ."""
    return np.cos(np.arange(math.prod(x.shape), dtype=np.float32)).reshape(x.shape)


def assert_close(got, want):
    """Asserts that two trees hold the same values, up to the order of summation."""
    assert jtu.tree_structure(got) == jtu.tree_structure(want)
    for (path, g), w in zip(jtu.tree_flatten_with_path(got)[0], jtu.tree_leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), jtu.keystr(path)
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5, err_msg=jtu.keystr(path))


def assert_like(fun, want, *args):
    """Asserts that two functions have the same values and the same gradients."""
    shapes = jax.tree.leaves(jax.eval_shape(want, *args))
    floats = [np.issubdtype(x.dtype, np.floating) for x in shapes]
    cotangents = [weights(x) for x, is_float in zip(shapes, floats, strict=True) if is_float]

    def values_and_gradients(f):
        def chosen(*args):
            out = f(*args)
            leaves = zip(jax.tree.leaves(out), floats, strict=True)
            return [x for x, is_float in leaves if is_float], out

        def run(*args):
            _, back, out = jax.vjp(chosen, *args, has_aux=True)
            return out, back(cotangents)

        return jax.jit(run)(*args)

    out, gradients = values_and_gradients(want)
    assert_close(fun(*args), out)
    assert_close(values_and_gradients(fun), (out, gradients))


# Collectives


def collectives(x, axis, permutes=True):
    """What each collective makes of an array [8, 3]; `axis` is a name or several."""
    n = lax.axis_size(axis)
    x = jnp.tanh(x)
    index = lax.axis_index(axis)
    found = {
        "psum": lax.psum(x, axis),
        "pmean": lax.pmean(x, axis) * x,
        "pmax": lax.pmax(lax.stop_gradient(x), axis) * x,
        "pmin": lax.pmin(lax.stop_gradient(x), axis) * x,
        "all_gather": lax.all_gather(x, axis),
        "all_gather in the middle": lax.all_gather(x, axis, axis=1),
        "all_gather tiled": lax.all_gather(x, axis, axis=1, tiled=True),
        "psum_scatter": lax.psum_scatter(x[:n], axis),
        "psum_scatter tiled": lax.psum_scatter(x, axis, tiled=True),
        "all_to_all": lax.all_to_all(x[:n], axis, 0, 0),
        "all_to_all tiled": lax.all_to_all(x, axis, 0, 1, tiled=True),
        "axis_index": index,
        "by index": lax.dynamic_index_in_dim(x, index, keepdims=False) * index.astype(x.dtype),
        "constant": lax.psum(2, axis),
        "tree": lax.psum({"x": x, "y": 2 * x[0]}, axis),
    }
    if permutes:
        found["ppermute"] = lax.ppermute(x, axis, [(k, (k + 3) % n) for k in range(n)])
        found["pshuffle"] = lax.pshuffle(x, axis, [*range(1, n), 0])
    return found


def by_vmap(body, axis, names):
    """Maps ``body(x, axis)`` by vmap, the axes of a tuple as a single one, in its order."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    others = [n for n in names if n not in axes]
    order, front = [names.index(a) for a in (*axes, *others)], range(len(names))

    def back(y, sizes):
        return jnp.moveaxis(y.reshape(*sizes, *y.shape[1:]), front, order)

    def run(x):
        x = jnp.moveaxis(x, order, front)
        sizes = x.shape[: len(axes)]
        flat = x.reshape(-1, *x.shape[len(axes) :])
        outs = nested(jax.vmap, lambda x: body(x, "flat"), ("flat", *others))(flat)
        return jax.tree.map(lambda y: back(y, sizes), outs)

    return run


def assert_collectives(body, axis, names, sizes):
    """Asserts values and gradients of ``body(x, axis)``, mapped over all names."""
    x = np.sin(np.arange(math.prod(sizes) * 24, dtype=np.float32)).reshape(*sizes, 8, 3)
    assert_like(
        nested(pmap, functools.partial(body, axis=axis), names), by_vmap(body, axis, names), x
    )


def in_order(axis):
    """Whether the axes are in the order of nesting; JAX 0.12 permutes along no others."""
    return isinstance(axis, str) or [*axis] == sorted(axis)


@pytest.mark.few(0)
@pytest.mark.parametrize("axis", ["i", "j", *slow(("i", "j"), ("j", "i"))], ids=str)
def test_collectives_of_two_levels(axis):
    """Each collective over the outer, the inner and both axes, and its gradient, are vmap's."""
    body = functools.partial(collectives, permutes=in_order(axis))
    assert_collectives(body, axis, ("i", "j"), (4, 2))


@pytest.mark.few(0)
@pytest.mark.parametrize(
    "axis", ["i", "j", "k", ("i", "k"), ("j", "k"), ("i", "j", "k"), ("k", "i", "j")], ids=str
)
def test_collectives_of_three_levels(axis):
    """So are those over any of three axes, also two that are no neighbours, in either order."""
    body = functools.partial(collectives, permutes=in_order(axis))
    assert_collectives(body, axis, ("i", "j", "k"), (2, 2, 2))


# Groups of each axis, out of order; their members in that order.
GROUPS = {
    "i": [[0, 3], [2, 1]],
    "j": [[1], [0]],
    ("i", "j"): [[0, 5, 3, 6], [4, 2, 7, 1]],
}


def of_groups(x, axis, groups=None):
    """What collectives over groups make of an array [4, 3]."""
    n = lax.psum(1, axis, axis_index_groups=groups)
    x = jnp.tanh(x)
    return {
        "psum": lax.psum(x, axis, axis_index_groups=groups),
        "pmean": lax.pmean(x, axis, axis_index_groups=groups) * x,
        "pmax": lax.pmax(lax.stop_gradient(x), axis, axis_index_groups=groups) * x,
        "all_gather": lax.all_gather(x, axis, axis_index_groups=groups),
        "psum_scatter": lax.psum_scatter(x[:n], axis, axis_index_groups=groups),
        "all_to_all": lax.all_to_all(x, axis, 0, 1, axis_index_groups=groups, tiled=True),
    }


@pytest.mark.slow
@pytest.mark.parametrize("axis", [("i", "j"), *slow("i", "j")], ids=str)
def test_groups_of_an_axis(axis):
    """With axis_index_groups, each group is what vmap makes of its elements alone."""
    x = np.sin(np.arange(96, dtype=np.float32)).reshape(4, 2, 4, 3)
    groups = np.array(GROUPS[axis])
    dim = {"i": 0, "j": 1, ("i", "j"): 0}[axis]

    def want(x):
        flat = x.reshape(8, *x.shape[2:]) if isinstance(axis, tuple) else x
        grouped = jnp.moveaxis(flat, dim, 0)[groups]
        names = ("group", "k") if isinstance(axis, tuple) else ("group", "k", "other")
        outs = nested(jax.vmap, lambda x: of_groups(x, "k"), names)(grouped)
        inverse = np.argsort(groups.ravel())

        def back(y):
            y = y.reshape(-1, *y.shape[2:])[inverse]
            return (
                y.reshape(x.shape[:2] + y.shape[1:]) if flat is not x else jnp.moveaxis(y, 0, dim)
            )

        return jax.tree.map(back, outs)

    body = functools.partial(of_groups, axis=axis, groups=GROUPS[axis])
    assert_like(nested(pmap, body), want, x)


# Which axes are mapped


@pytest.mark.slow
def test_axes_of_trees():
    """Both levels take prefixes of trees, axes from the end, None, and arguments by name."""

    def body(tree, y, *, z):
        a = tree["a"] * tree["b"] + y
        return {"both": a * z, "inner": lax.psum(a, "j"), "outer": lax.psum(a, "i")}, (a.sum(),)

    def levels(mapped):
        @functools.partial(
            mapped,
            axis_name="i",
            in_axes=({"a": -1, "b": None}, 1),
            out_axes=({"both": -1, "inner": 1, "outer": None}, 0),
        )
        def outer(tree, y, z=X):
            return mapped(
                body,
                axis_name="j",
                in_axes=({"a": 1, "b": -2}, None),
                out_axes=({"both": 0, "inner": None, "outer": -1}, 0),
            )(tree, y, z=z)

        return outer

    rng = np.random.default_rng(0)
    shapes = ((3, 2, 4), (2, 3), (3, 4))
    a, b, y = (rng.normal(size=s).astype(np.float32) for s in shapes)
    fun, want = levels(pmap), levels(jax.vmap)
    assert_like(
        lambda t, y, z: fun(t, y, z=z), lambda t, y, z: want(t, y, z=z), {"a": a, "b": b}, y, X
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(30))
def test_axes_at_random(seed):
    """Two or three levels with random axes of two arguments and two results are as in vmap."""
    rng = np.random.default_rng(seed)
    names = "ijk"[: rng.integers(2, 4)]
    sizes = {n: 2 if len(names) == 3 else int(rng.integers(1, 3)) * 2 for n in names}
    sizes["j"] = 2
    summed = tuple(n for n in names if rng.random() < 0.5)
    options = {n: {"in_axes": [], "out_axes": []} for n in names}

    def choose(option, mapped):
        """Chooses the place of each axis in an array [3, 5], from inside; returns its shape."""
        shape = (3, 5)
        for n in reversed(names):
            at = int(rng.integers(len(shape) + 1))
            if n not in mapped:
                options[n][option].append(None)
                continue
            shape = (*shape[:at], sizes[n], *shape[at:])
            options[n][option].append(at - len(shape) if rng.random() < 0.5 else at)
        return shape

    args = [
        rng.normal(size=choose("in_axes", mapped)).astype(np.float32)
        for mapped in (names, [n for n in names if rng.random() < 0.5])
    ]
    choose("out_axes", names)
    choose("out_axes", [n for n in names if n not in summed])

    def levels(mapped):
        def fun(x, y):
            x = jnp.tanh(x) * y
            return x, lax.psum(x, summed) if summed else x

        for n in reversed(names):
            fun = mapped(fun, axis_name=n, **{k: tuple(v) for k, v in options[n].items()})
        return fun

    assert_like(levels(pmap), levels(jax.vmap), *args)


# Inside and around


def body(x):
    """What one device computes of an array [3]."""
    return jnp.sin(x) * lax.psum(x, "j") + lax.axis_index("i").astype(x.dtype)


def inner(mapped, fun=body, **options):
    """The second level, by `pmap` or `vmap`."""
    return mapped(fun, axis_name="j", **options)


def in_while(mapped, x):
    """Three turns of a loop around the inner level."""
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, inner(mapped)(c[1])), (0, x))[1]


def closure_of_index(mapped, x):
    """A value that depends on the outer axis alone, used on the inner one."""
    i = lax.axis_index("i")
    return inner(mapped, lambda v: v * (i + lax.axis_index("j")).astype(v.dtype))(x)


def custom_vjp(mapped, forward, backward):
    """A function of an array [2, 3] with levels in its value, its forward or its backward rule."""

    @jax.custom_vjp
    def fun(x):
        return inner(mapped)(x) if forward else jnp.sin(x)

    def fun_fwd(x):
        return fun(x), x

    def fun_bwd(x, ct):
        last = inner(mapped, lambda x, ct: ct * lax.psum(jnp.cos(x), "j"))
        return (last(x, ct) if backward else ct * jnp.cos(x),)

    fun.defvjp(fun_fwd, fun_bwd)
    return fun


def custom_jvp(mapped, value):
    """A function of an array [2, 3] with levels in its value and its rule, or in its rule."""

    @jax.custom_jvp
    def fun(x):
        return inner(mapped)(x) if value else jnp.sin(x)

    @fun.defjvp
    def fun_jvp(primals, tangents):
        rule = inner(mapped, lambda x, t: t * lax.psum(jnp.cos(x), "j"))
        return fun(*primals), rule(*primals, *tangents)

    return fun


# What the outer level maps, of one slice [2, 3], by name.
INSIDE = {
    "scan": lambda m, x: lax.scan(lambda c, _: (inner(m)(c), c[0]), x, None, length=3),
    "fori_loop": lambda m, x: lax.fori_loop(0, 3, lambda _, x: inner(m)(x), x),
    "cond": lambda m, x: lax.cond(x[0, 0] > 0, inner(m), lambda x: x * 2, x),
    "switch": lambda m, x: lax.switch(2, [jnp.sin, jnp.cos, inner(m)], x),
    "remat": lambda m, x: jax.checkpoint(inner(m))(x),
    "remat in the inner": lambda m, x: inner(m, jax.checkpoint(body))(x),
    "jit": lambda m, x: jax.jit(inner(m))(x),
    "jit in the inner": lambda m, x: inner(m, jax.jit(body))(x),
    "vmap between": lambda m, x: jax.vmap(inner(m), in_axes=1, out_axes=1)(x[..., None]),
    "vmap in the inner": lambda m, x: inner(m, jax.vmap(body))(x),
    "grad": lambda m, x: jax.grad(lambda x: inner(m)(x).sum())(x),
    "grad in the inner": lambda m, x: inner(m, jax.grad(lambda x: body(x).sum()))(x),
    "jvp": lambda m, x: jax.jvp(inner(m), (x,), (x * x,)),
    "vjp": lambda m, x: jax.vjp(inner(m), x)[1](x),
    "stacked before, summed after": lambda m, x: inner(m, lambda a, b: a * b)(
        jnp.stack([x[0], 2 * x[1]]), x
    ).sum(0),
    "psum after": lambda m, x: lax.psum(inner(m)(x), "i"),
    "psum before": lambda m, x: inner(m)(lax.psum(x, "i")),
    "constants": lambda m, x: inner(m)(np.ones((2, 3), np.float32)) + x,
    "axis_size": lambda m, x: (
        x + inner(m, lambda: lax.axis_index("j"), axis_size=2)().astype(x.dtype)[:, None]
    ),
    "by name": lambda m, x: inner(m, lambda *, a, b: a * lax.psum(b, "j"))(b=x, a=x),
    "in turn": lambda m, x: inner(m)(jnp.sin(inner(m)(x))),
    "custom_vjp": lambda m, x: custom_vjp(m, forward=True, backward=False)(x),
    "custom_vjp, both rules": lambda m, x: custom_vjp(m, forward=True, backward=True)(x),
    "custom_jvp": lambda m, x: custom_jvp(m, value=True)(x),
    "custom_jvp, rule beside a level": lambda m, x: inner(m)(custom_jvp(m, value=False)(x)),
    "custom_vjp, rule beside a level": lambda m, x: inner(m)(custom_vjp(m, False, True)(x)),
    "custom_vjp inside of grad": lambda m, x: jax.grad(
        lambda x: custom_vjp(m, forward=False, backward=True)(x).sum()
    )(x),
    "closure": lambda m, x: inner(m, lambda v: v * x.sum(0) + x[1])(x),
    "closure, reduced": lambda m, x: inner(m, lambda v: v * lax.psum(x, ("i", "j")).sum(0))(x),
    "closure alone": lambda m, x: inner(m, lambda v: x)(x[:, 0]),
    "closure in scan": lambda m, x: inner(
        m, lambda v: lax.scan(lambda c, r: (c * r + x[0], c.sum()), v, x)[0]
    )(x),
    "closure, of index": closure_of_index,
}


# Those that take longest and say least.
SLOW_INSIDE = (
    "custom_vjp, rule beside a level",
    "vmap between",
    "remat",
    "psum after",
    "axis_size",
    "custom_jvp, rule beside a level",
    "custom_vjp, both rules",
    "closure in scan",
    "switch",
    "fori_loop",
    "in turn",
    "jvp",
    "vjp",
    "grad in the inner",
    "vmap in the inner",
    "remat in the inner",
    "jit in the inner",
    "psum before",
    "by name",
    "custom_vjp",
    "closure, reduced",
    "closure alone",
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [*(n for n in INSIDE if n not in SLOW_INSIDE), *slow(*SLOW_INSIDE)]
)
def test_inside_of_the_outer_function(name):
    """What stands between or in the levels is as with vmap, in values and gradients."""
    fun = INSIDE[name]
    assert_like(*(m(functools.partial(fun, m), axis_name="i") for m in (pmap, jax.vmap)), X)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [custom_jvp, custom_vjp])
def test_rules_that_map_deeper_than_their_function(kind):
    """Such a rule is traced after the mesh was made: an error, but for derivatives inside."""
    flags = (False,) if kind is custom_jvp else (False, True)
    fun = pmap(lambda x: kind(pmap, *flags)(x), axis_name="i")
    np.testing.assert_allclose(fun(X), np.sin(X), rtol=1e-6)
    with pytest.raises(spmd.OptionError) as raised:
        jax.grad(lambda x: fun(x).sum())(X)
    assert str(raised.value) == (
        "pmap of `<lambda>` maps deeper than pmap of `<lambda>`, in a rule of a function that it "
        "calls.\n"
        "  expected  in rules of custom_jvp and custom_vjp only levels that the function has, too\n"
        "  fix       map with jax.vmap in the rule"
    )

    def inside(m):
        return m(jax.grad(lambda x: kind(m, *flags)(x).sum()), axis_name="i")

    assert_close(inside(pmap)(X), inside(jax.vmap)(X))


def test_while_loop():
    """A while loop has no gradient; its value is that of vmap."""
    fun, want = (m(functools.partial(in_while, m), axis_name="i") for m in (pmap, jax.vmap))
    assert_close(fun(X), want(X))


def test_vmap_with_a_name_between():
    """Collectives in the inner function see the axis of a vmap between the levels, too."""

    def levels(m):
        def summed(x):
            return jnp.sin(x) * lax.psum(x, ("i", "j", "v")) + lax.psum(x, "v")

        def outer(x):
            between = jax.vmap(inner(m, summed), in_axes=1, out_axes=1, axis_name="v")
            return between(x)

        return m(outer, axis_name="i")

    assert_like(levels(pmap), levels(jax.vmap), X)


AROUND = {
    "jit": jax.jit,
    "vmap": functools.partial(jax.vmap, in_axes=2, out_axes=1),
    "remat": jax.checkpoint,
    "grad": lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x * x,)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x * x),
    "jacfwd": jax.jacfwd,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), c.sum()), x, None, length=2),
    "cond": lambda f: lambda x: lax.cond(x[0, 0, 0] < 1, f, jnp.sin, x),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["jit", "vmap", *slow(*(n for n in AROUND if n not in ("jit", "vmap")))]
)
def test_around_both_levels(name):
    """Every transformation of the whole nested function is that of vmap in vmap."""

    def levels(m):
        fun = (lambda x: x.sum() * body(x)) if name == "vmap" else body
        return AROUND[name](m(lambda x: inner(m, fun)(jnp.cos(x)) * 2, axis_name="i"))

    x = np.moveaxis(np.stack([X, 2 * X]), 0, 2) if name == "vmap" else X
    if name in ("jit", "vmap", "remat"):
        assert_like(levels(pmap), levels(jax.vmap), x)
    assert_close(levels(pmap)(x), jax.jit(levels(jax.vmap))(x))


@pytest.mark.slow
def test_second_derivatives():
    """The Hessian of a nested function is that of vmap in vmap."""
    fun, want = (
        jax.hessian(lambda x, m=m: jnp.sin(nested(m, body)(x)).sum()) for m in (pmap, jax.vmap)
    )
    assert_close(fun(X), jax.jit(want)(X))


def test_transpose():
    """A linear nested function has the transpose of vmap: a broadcast for each sum."""
    fun = nested(pmap, lambda x: lax.psum(x, "i") + 2 * x)
    (back,) = jax.linear_transpose(fun, X)(X)
    np.testing.assert_allclose(back, X.sum(0, keepdims=True) + 2 * X, rtol=1e-6)


@pytest.mark.slow
def test_values_from_around_both_levels():
    """Both functions may use tracers and arrays of the caller; they get gradients."""
    w, table = np.float32(3), jnp.arange(3.0)

    def loss(w, m=pmap):
        return m(lambda x: inner(m, lambda v: v * w * table)(x) * w)(X).sum()

    want = float((X * np.arange(3)).sum())
    np.testing.assert_allclose(loss(w), want * 9, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(loss)(w), want * 6, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(w), want * 6, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(loss)(np.float32([1, 2])), [want, want * 4], rtol=1e-5)


def test_static_and_donated_arguments_of_the_inner():
    """Static ones reach the function as they are; donated ones are still there afterwards."""
    seen = []

    def scaled(n, x):
        seen.append(n)
        return x * n

    inside = pmap(scaled, in_axes=(None, 0), static_broadcasted_argnums=0, donate_argnums=1)
    fun = pmap(lambda x: inside(3.0, x) + x + inside(2.0, x), axis_name="i")
    x = pmap(lambda x: x)(X)
    np.testing.assert_allclose(fun(x), X * 6, rtol=1e-6)
    assert seen == [3.0, 2.0]
    assert not x.is_deleted()


@pytest.mark.parametrize("order", [0, *slow(1)])
def test_siblings(order):
    """Inner levels of one size share an axis; a name that one of them has counts for it."""

    def levels(m):
        siblings = [m(lambda x: x * 2), inner(m, lambda x: lax.psum(x, "j"))]
        first, last = siblings[::-1] if order else siblings
        return m(lambda x: first(x) + last(x) * first(x), axis_name="i")

    assert_like(levels(pmap), levels(jax.vmap), X)
    assert levels(pmap)(X).sharding.mesh.axis_names == ("i", "j")


NAMES = {
    (None, None): ("pmap", "pmap2"),
    (None, "j"): ("pmap", "j"),
    ("i", None): ("i", "pmap2"),
    (None, None, None): ("pmap", "pmap2", "pmap3"),
    ("i", None, "k"): ("i", "pmap2", "k"),
}


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_levels_without_names(names):
    """Collectives reach the levels that have a name; the axes of the others are still there."""
    given = tuple(n for n in names if n is not None)
    x = X.reshape(2, 2, 2, 3) if len(names) == 3 else X

    def total(x):
        return x * lax.psum(x, given) if given else x * 2

    fun = nested(pmap, total, names)
    np.testing.assert_allclose(fun(x), nested(jax.vmap, total, names)(x), rtol=1e-6)
    assert fun(x).sharding.spec == P(*NAMES[names])


@pytest.mark.parametrize("names", [(None, "pmap"), ("pmap2", None), (None, None, "pmap2")], ids=str)
def test_names_that_a_level_without_one_could_have(names):
    """A name that was given is that of its level, whatever the others are called."""
    x = X.reshape(2, 2, 2, 3) if len(names) == 3 else X
    (name,) = (n for n in names if n)
    fun, want = (nested(m, lambda x: x * lax.psum(x, name), names) for m in (pmap, jax.vmap))
    np.testing.assert_allclose(fun(x), want(x), rtol=1e-6)


def test_another_thread_while_this_one_traces():
    """A call in another thread is one at the top, also while this one traces a level."""
    twice = pmap(lambda x: x * 2)

    def fun(x):
        found = []
        thread = threading.Thread(target=lambda: found.append(np.asarray(twice(X))), daemon=True)
        thread.start()
        thread.join(60)
        return twice(x) + found[0][0]

    np.testing.assert_allclose(pmap(fun, axis_name="i")(X), 2 * (X + X[0]), rtol=1e-6)


# Programs


def outer(fun=lambda x: x * lax.psum(x, "j"), **options):
    """A nested function of arrays [4, 2, ...] that adds 1 after the inner level."""
    inside = pmap(fun, axis_name="j")

    def plus_one(x):
        return inside(x) + 1

    return pmap(plus_one, axis_name="i", **options)


WANT = X * X.sum(1, keepdims=True) + 1


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_program_per_signature(depth):
    """A level is met by tracing, so each function is traced once more than what it calls."""
    seen = []

    def level(i):
        if i == depth:
            return lambda x: x * 2
        mapped = pmap(level(i + 1), axis_name="ijk"[i])

        def fun(x):
            seen.append(i)
            return mapped(x)

        return fun

    fun = pmap(level(1), axis_name="i")
    x = X.reshape(2, 2, 2, 3)
    out, spent = counted(fun, x)
    np.testing.assert_array_equal(out, x * 2)
    assert (spent.traces, spent.lowerings, spent.compiles) == (1, 1, 1)
    assert [seen.count(i) for i in range(1, depth)] == [depth - i + 1 for i in range(1, depth)]
    seen.clear()
    same = [x + 1, jnp.asarray(x), jax.device_put(x, jax.devices()[5]), out, fun(x)]
    _, spent = counted(lambda: [fun(y) for y in same])
    assert (spent.traces, spent.compiles, fun._cache_size, seen) == (0, 0, 1, [])
    fun(x[..., :2])
    assert fun._cache_size == 2
    assert fun.explain_miss(x) == ""
    fun.clear_cache()
    assert fun._cache_size == 0
    np.testing.assert_array_equal(fun(x), x * 2)


def test_the_inner_one_alone():
    """One function has programs of its own at the top, and none for where it is an inner one."""
    inside = pmap(lambda x: x * lax.psum(x, "j"), axis_name="j")
    fun = pmap(lambda x: inside(x), axis_name="i")
    first = inside(X[0])
    assert first.sharding.mesh.axis_names == ("j",)
    for _ in range(2):
        np.testing.assert_allclose(fun(X), WANT - 1, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(inside(X[0]), first)
    assert (inside._cache_size, fun._cache_size) == (1, 1)
    other = pmap(lambda x: inside(x) * 2)
    np.testing.assert_allclose(other(X[:2]), 2 * (WANT - 1)[:2], rtol=1e-6, atol=1e-6)
    assert (inside._cache_size, fun._cache_size) == (1, 1)


def test_a_jitted_inner_one_in_several_places():
    """What `jax.jit` keeps of an inner level is not taken for that of another mesh or depth."""
    jitted = jax.jit(pmap(lambda x: x * 2))
    in_two = pmap(lambda x: jitted(x), axis_name="i")
    in_three = pmap(lambda x: pmap(lambda x: jitted(x), axis_name="j")(x), axis_name="i")
    backwards = pmap(lambda x: jitted(x), axis_name="i", devices=jax.devices()[::-1])
    for _ in range(2):
        for fun in (jitted, in_two, backwards, jitted):
            np.testing.assert_array_equal(fun(X), X * 2)
        np.testing.assert_array_equal(in_three(X.reshape(2, 2, 2, 3)), X.reshape(2, 2, 2, 3) * 2)
    assert backwards(X).addressable_shards[0].device == jax.devices()[7]


KEEPS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "cond": lambda fun: lambda x: lax.cond(x.sum() > 99, fun, fun, x),
    "scan": lambda fun: functools.partial(
        lambda step, x: lax.scan(step, x, None, length=1)[0], lambda c, _: (fun(c), None)
    ),
}


@pytest.mark.parametrize("name", ["jit", *slow("cond", "remat", "scan")])
def test_what_jax_keeps_of_an_inner_level(name):
    """A trace that JAX keeps is not used where its axis has another name or there are more."""
    fun = KEEPS[name](pmap(lambda x: x * 2))
    named = pmap(lambda x: lax.psum(x, "j"), axis_name="j")
    deeper = pmap(lambda x: pmap(lambda x: x * 3)(x))
    alone = pmap(lambda x: fun(x), axis_name="i")
    beside_name = pmap(lambda x: fun(x) + named(x), axis_name="i")
    beside_more = pmap(lambda x: fun(x) + deeper(x), axis_name="i")
    x = X[:2, :, :2]
    for _ in range(2):
        np.testing.assert_allclose(alone(x), x * 2, rtol=1e-6)
        np.testing.assert_allclose(beside_more(x), x * 5, rtol=1e-6)
        np.testing.assert_allclose(beside_name(x), 2 * x + x.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(pmap(lambda x: fun(x), axis_name="q")(x), x * 2, rtol=1e-6)


def test_a_function_that_maps_itself():
    """The levels may be those of one function."""

    def fun(x):
        return mapped(x) if x.ndim else x * 2

    mapped = pmap(fun)
    x = X[:2, :, :2]
    np.testing.assert_array_equal(mapped(x), x * 2)
    assert mapped(x).sharding.spec == P("pmap", "pmap2", "pmap3")


def test_threads():
    """Threads that trace nested functions at once know nothing of each other's levels."""
    funs = [outer(), pmap(lambda x: pmap(lambda x: x * 3)(x)), pmap(lambda x: x * 4)]
    want = [WANT, X * 3, X * 4]
    barrier = threading.Barrier(6, timeout=60)
    found: list = [None] * 6

    def call(i):
        barrier.wait()
        found[i] = np.asarray(funs[i % 3](X))

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for i, value in enumerate(found):
        np.testing.assert_allclose(value, want[i % 3], rtol=1e-6, atol=1e-6)
    assert [f._cache_size for f in funs] == [1, 1, 1]


@pytest.mark.slow
def test_nothing_is_kept():
    """Levels are found by traces that end early; they leak no tracer and keep no function."""
    with jax.checking_leaks():
        checked = outer()
        gradient = jax.grad(lambda x: checked(x).sum())(X)
        np.testing.assert_allclose(checked(X), WANT, rtol=1e-6, atol=1e-6)
    total = X.sum(1, keepdims=True)
    np.testing.assert_allclose(gradient, 2 * np.broadcast_to(total, X.shape), rtol=1e-5, atol=1e-6)

    class Held:
        factor = 2.0

    def make():
        held = Held()
        return outer(lambda x: x * held.factor), weakref.ref(held)

    fun, alive = make()
    fun(X)
    fun(X[:2])
    del fun
    for _ in range(5):  # JAX 0.10.2 lets go of one thing at a time
        gc.collect()
    assert alive() is None


def test_a_function_that_changes_its_mind():
    """Whether it calls an inner level may differ from trace to trace; the last one counts."""
    calls = []

    def fun(x):
        calls.append(x)
        return pmap(lambda x: x * 2)(x) if len(calls) == 1 else x * 2

    np.testing.assert_array_equal(pmap(fun)(X), X * 2)
    assert len(calls) == 2


# Where things lie


@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 2), (2, 1), (8, 1), (1, 8), (2, 4), (1, 1, 1), (1, 2, 1)], ids=str
)
def test_sizes(sizes):
    """Axes of any size make a grid of the first devices, each with one element."""
    names = tuple("ijk"[: len(sizes)])
    x = np.arange(math.prod(sizes) * 3, dtype=np.float32).reshape(*sizes, 3)
    fun = nested(pmap, lambda x: x * lax.axis_index(names).astype(x.dtype), names)
    want = x * np.arange(math.prod(sizes)).reshape(*sizes, 1)
    assert_sharded(fun(x), want, P(*names), mesh_of(dict(zip(names, sizes, strict=True))))


def test_results_stay_split():
    """What the inner level maps lies split over both axes, with no collective to bring it there."""
    mesh = mesh_of({"i": 4, "j": 2})
    fun = pmap(
        lambda x: (inner(pmap, lambda v: (v, v, lax.psum(v, "j")), out_axes=(0, 1, None))(x), x),
        axis_name="i",
        out_axes=((-1, 1, 0), 0),
    )
    (first, second, third), whole = fun(X)
    assert_sharded(first, np.moveaxis(X, 0, 2), P("j", None, "i"), mesh)
    assert_sharded(second, np.transpose(X, (2, 0, 1)), P(None, "i", "j"), mesh)
    assert_sharded(third, X.sum(1), P("i"), mesh, rtol=1e-6)
    np.testing.assert_array_equal(whole, X)  # how it lies is XLA's choice
    kinds = [(c.kind, c.mesh_axes) for c in spmd.report(fun, X).collectives]
    assert kinds == [("all-reduce", ("j",))]


def test_state_that_goes_round_stays_split():
    """A result that is the next argument is neither gathered nor copied; donated, it is reused."""
    step = pmap(lambda x: inner(pmap, lambda v: v + 1)(x), axis_name="i", donate_argnums=0)
    state = step(X)
    before = {s.device: s.data.unsafe_buffer_pointer() for s in state.addressable_shards}
    for i in range(2, 5):
        old, state = state, step(state)
        assert old.is_deleted()
        # A copy: JAX 0.11 does not donate what NumPy looks at.
        np.testing.assert_allclose(state + 0, X + i, rtol=1e-6)
    assert state.sharding.spec == P("i", "j")
    after = {s.device: s.data.unsafe_buffer_pointer() for s in state.addressable_shards}
    assert after == before


SQUARE = X.reshape(2, 2, 2, 3)[..., :2].reshape(4, 2, 2)
# A function of the mapping, and its arguments.
SHARED = {
    "whole as well": (lambda m: lambda x: inner(m)(x) + x, 0, (X,)),
    "two dimensions": (
        lambda m: lambda x: inner(m)(x) + inner(m, in_axes=1, out_axes=1)(x),
        0,
        (SQUARE,),
    ),
    "transposed": (lambda m: lambda x: inner(m)(x) + inner(m)(x.T), 0, (SQUARE,)),
    "one of all": (lambda m: lambda x, y: inner(m)(x) * inner(m)(y), (0, None), (X, X[0])),
    "another axis": (lambda m: lambda x: inner(m)(x), -2, (np.swapaxes(X, 0, 1),)),
    "twice the same": (lambda m: lambda x, y: inner(m, lambda a, b: a * b)(x, y), 0, (X, X)),
    "summed": (lambda m: lambda x: inner(m)(x) + lax.psum(x, "i"), 0, (X,)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "two dimensions",
        "one of all",
        *slow(*(n for n in SHARED if n not in ("two dimensions", "one of all"))),
    ],
)
def test_arguments_that_an_inner_level_splits(name):
    """However else the outer function uses them; also where they lie split already."""
    fun, in_axes, args = SHARED[name]
    ours, want = (m(fun(m), axis_name="i", in_axes=in_axes) for m in (pmap, jax.vmap))
    expected = want(*args)
    mesh = mesh_of({"i": 4, "j": 2})
    for spec in (None, P("j"), P(None, "j")):
        placed = args if spec is None else [put(x, mesh, spec) for x in args if x.ndim == 3]
        assert_close(ours(*placed, *args[len(placed) :]), expected)
    assert ours._cache_size == 1


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
def test_devices_of_the_outermost(order):
    """It has those of all levels, the axis of the innermost fastest."""
    x = X[: len(order) // 2]
    fun = outer(devices=[jax.devices()[i] for i in order])
    mesh = mesh_of({"i": len(order) // 2, "j": 2}, order)
    for _ in range(2):
        assert_sharded(fun(x), WANT[: len(x)], P("i", "j"), mesh, rtol=1e-6, atol=1e-6)


def test_backend_of_the_outermost():
    """It counts for all levels, which may say the same."""
    inside = pmap(lambda x: x * 2, backend="cpu")
    fun = pmap(lambda x: inside(x), backend="cpu")
    np.testing.assert_array_equal(fun(X), X * 2)


def test_inside_of_a_mesh():
    """A mesh that the caller has entered changes nothing."""
    mesh = mesh_of({"data": 2, "model": 4})
    with mesh:
        assert outer()(X).sharding.spec == P("i", "j")
    with jax.set_mesh(Mesh(mesh.devices, mesh.axis_names)):
        assert_sharded(outer()(X), WANT, P("i", "j"), mesh_of({"i": 4, "j": 2}), rtol=1e-6)


# Stages


def test_stages():
    """Lowering, compiling and abstract evaluation know all levels; they run nothing."""
    fun = outer()
    compiled = fun.lower(X).compile()
    out = compiled(X)
    np.testing.assert_allclose(out, WANT, rtol=1e-6, atol=1e-6)
    assert out.sharding.spec == P("i", "j")
    for report in (compiled.report(), spmd.report(fun, X)):
        assert [(c.kind, c.mesh_axes) for c in report.collectives] == [("all-reduce", ("j",))]
        assert str(report).splitlines()[0] == "plus_one on cpu; mesh i=4, j=2 of 8 devices"
    shape = jax.ShapeDtypeStruct((4, 2, 3), np.float32)
    for found in (fun.eval_shape(X), jax.eval_shape(fun, X), fun.trace(X).out_info):
        assert (found.shape, found.dtype) == (shape.shape, shape.dtype)
    jaxpr = jax.make_jaxpr(fun)(X)
    np.testing.assert_allclose(
        jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, X)[0], WANT, rtol=1e-6, atol=1e-6
    )


def test_stages_of_the_inner_within_the_outer():
    """The outer function may ask for the shapes of the inner one, without calling it."""
    inside = pmap(lambda x: x * lax.psum(x, "j"), axis_name="j")

    def fun(x):
        assert jax.eval_shape(inside, x).shape == x.shape
        assert jax.make_jaxpr(inside)(x).out_avals[0].shape == x.shape
        return x

    np.testing.assert_array_equal(pmap(fun, axis_name="i")(X), X)


@pytest.mark.parametrize("stage", ["lower", "trace", "eval_shape"])
def test_stages_of_the_inner_alone(stage):
    """The stages that `spmd` adds stop at the outermost level, and say so within it."""
    inside = pmap(same, axis_name="j")
    with pytest.raises(spmd.OptionError) as raised:
        pmap(lambda x: (getattr(inside, stage)(x), x)[1], axis_name="i")(X)
    assert str(raised.value) == (
        "pmap of `same` cannot be traced, lowered or compiled by itself inside of another pmap.\n"
        "  fix       stop at the outermost one; for shapes, jax.eval_shape(f, ...)"
    )


def test_inside_of_pjit():
    """A pjit over the same devices and axes may call all levels; over another mesh it may not."""
    mesh = mesh_of({"i": 4, "j": 2})
    np.testing.assert_allclose(spmd.pjit(outer(), mesh=mesh)(X), WANT, rtol=1e-6, atol=1e-6)
    with pytest.raises(spmd.MeshError) as raised:
        spmd.pjit(outer(), mesh=mesh_of({"a": 2, "b": 4}))(X)
    assert str(raised.value).splitlines()[0] == (
        "pmap of `plus_one` cannot change the mesh inside of pjit of `plus_one`."
    )


@pytest.mark.slow
def test_without_jit():
    """`jax.disable_jit` changes no value."""
    fun = outer()
    with jax.disable_jit():
        np.testing.assert_allclose(fun(X), WANT, rtol=1e-6, atol=1e-6)
        flat = pmap(lambda x: pmap(lambda x: x * 2)(x))
        np.testing.assert_array_equal(flat(X), X * 2)
    np.testing.assert_allclose(fun(X), WANT, rtol=1e-6, atol=1e-6)


# Errors


def test_code_that_catches_everything():
    """A handler around the inner call sees its errors, and nothing of how levels are found."""
    caught = []

    def careful(x):
        try:
            return inside(x)
        except Exception as error:
            caught.append(error)
            return x
        finally:
            with contextlib.suppress(Exception):
                inside(x)

    inside = pmap(lambda x: x * 2, axis_name="j")
    np.testing.assert_array_equal(pmap(careful, axis_name="i")(X), X * 2)
    assert caught == []

    def careless(x):
        try:
            return inside(x)
        except BaseException:  # even so
            return x * 0

    np.testing.assert_array_equal(pmap(careless, axis_name="i")(X), X * 2)

    def fails(x):
        try:
            return pmap(raises)(x)
        except KeyError as error:
            caught.append(error)
            return inside(x) + 1  # the level that failed is open no more

    def raises(x):
        raise KeyError("mine")

    np.testing.assert_array_equal(pmap(fails, axis_name="i")(X), X * 2 + 1)
    assert {str(e) for e in caught} == {"'mine'"}


def test_errors_of_the_inner_function():
    """They reach the caller, at every call; afterwards everything is as before."""
    is_bad = [True]

    def sometimes(x):
        if is_bad:
            raise KeyError("mine")
        return x * lax.psum(x, "j")

    fun = outer(sometimes)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            fun(X)
    # No level is left open.
    np.testing.assert_array_equal(pmap(lambda x: x * 2, axis_name="j")(X), X * 2)
    is_bad.clear()
    np.testing.assert_allclose(fun(X), WANT, rtol=1e-6, atol=1e-6)
    assert fun._cache_size == 1


def two(first, second):
    """A function of one slice that calls both."""

    def calls_both(x):
        return first(x).sum() + second(x).sum()

    return pmap(calls_both, axis_name="i")


def same(x):
    """What one device computes."""
    return x


DEVICES = "devices=(CpuDevice(id=0), CpuDevice(id=1))"
REFUSED = {
    "too few devices": (
        lambda: outer()(np.zeros((4, 3), np.float32)),
        spmd.MeshError,
        """
pmap of `plus_one` needs 4 x 3 devices.
  expected  mapped axes of sizes whose product is 8 or less
  got       8 cpu devices
  fix       map with jax.vmap, or with pmap of vmap over [devices, elements of each]
""",
    ),
    "too few devices for three": (
        lambda: pmap(lambda x: outer()(x), axis_name="h")(np.zeros((2, 4, 2), np.float32)),
        spmd.MeshError,
        """
pmap of `<lambda>` needs 2 x 4 x 2 devices.
  expected  mapped axes of sizes whose product is 8 or less
  got       8 cpu devices
  fix       map with jax.vmap, or with pmap of vmap over [devices, elements of each]
""",
    ),
    "devices= of the outer level alone": (
        lambda: outer(devices=jax.devices()[:4])(X),
        spmd.MeshError,
        """
pmap of `plus_one` needs another number of devices.
  given     devices= with 4
  expected  4 x 2, the product of the mapped axes
""",
    ),
    "devices= too long": (
        lambda: outer(devices=jax.devices())(X[:2]),
        spmd.MeshError,
        """
pmap of `plus_one` needs another number of devices.
  given     devices= with 8
  expected  2 x 2, the product of the mapped axes
""",
    ),
    "devices= of the inner": (
        lambda: pmap(lambda x: pmap(same, devices=jax.devices()[:2])(x))(X),
        spmd.OptionError,
        f"""
pmap of `same` cannot choose its devices inside of pmap of `<lambda>`.
  given     {DEVICES}
  fix       say devices where the outermost pmap is made; it counts for all of them
""",
    ),
    "backend= of the inner": (
        lambda: pmap(lambda x: pmap(same, backend="cpu")(x))(X),
        spmd.OptionError,
        """
pmap of `same` cannot choose its backend inside of pmap of `<lambda>`.
  given     backend='cpu'
  fix       say backend where the outermost pmap is made; it counts for all of them
""",
    ),
    "a name twice": (
        lambda: nested(pmap, same, ("i", "i"))(X),
        spmd.OptionError,
        """
pmap of `same` cannot map over the axis 'i' a second time.
  given     axis_name='i'
  expected  another name than that of pmap of `same`
  fix       name each level differently, or leave the inner name out
""",
    ),
    "a name of two levels above": (
        lambda: nested(pmap, same, ("i", None, "i"))(X),
        spmd.OptionError,
        """
pmap of `same` cannot map over the axis 'i' a second time.
  given     axis_name='i'
  expected  another name than that of pmap of `same`
  fix       name each level differently, or leave the inner name out
""",
    ),
    "siblings of two sizes": (
        lambda: two(pmap(same), pmap(lambda x: x, in_axes=1))(X[:2]),
        spmd.OptionError,
        """
pmap of `<lambda>` has another size than pmap of `same`, which the same function calls.
  expected  2: the devices form one grid for the whole function
  got       3
  fix       give both the same size, or map one of them with jax.vmap
""",
    ),
    "siblings of two names": (
        lambda: two(pmap(same, axis_name="j"), pmap(lambda x: x, axis_name="k"))(X),
        spmd.OptionError,
        """
pmap of `<lambda>` has another axis_name than pmap of `same`, which the same function calls.
  expected  'j': the devices form one grid for the whole function
  got       'k'
  fix       give both the same axis_name, or map one of them with jax.vmap
""",
    ),
    "nothing to map": (
        lambda: pmap(lambda x: pmap(same, in_axes=None)(x))(X),
        spmd.OptionError,
        """
pmap of `same` maps nothing: no argument has an axis to map.
  expected  at least one argument without None in in_axes, or axis_size
""",
    ),
    "an axis out of range": (
        lambda: pmap(lambda x: pmap(same, in_axes=2)(x))(X),
        spmd.OptionError,
        """
pmap of `same` cannot map argument x over axis 2.
  expected  an axis of f32[2,3]
  got       2 axes
""",
    ),
    "a result out of range": (
        lambda: pmap(lambda x: pmap(same, out_axes=-3)(x))(X),
        spmd.OptionError,
        """
pmap of `same` cannot put the mapped axis of result at -3.
  given     f32[3] on each device
  expected  an axis from -2 to 1
""",
    ),
    "no array": (
        lambda: pmap(lambda x: pmap(lambda x: "no")(x))(X),
        spmd.ArgumentError,
        """
pmap of `<lambda>` cannot return result: it is no array.
  expected  arrays, numbers, None, and containers of them
  got       str: 'no'
""",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    """Each mistake has its own words, and leaves nothing behind."""
    call, error, message = REFUSED[case]
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message.strip("\n")
    np.testing.assert_array_equal(pmap(same, axis_name="i")(X), X)


def test_too_few_devices_are_said_where_the_inner_level_is():
    """The traceback leads to the call that needs them."""
    with pytest.raises(spmd.MeshError) as raised:
        outer()(np.zeros((4, 3), np.float32))
    assert "plus_one" in [entry.name for entry in raised.traceback]


def test_axes_that_are_not_open():
    """The name of the inner axis means nothing outside of the inner function."""
    fun = pmap(lambda x: lax.psum(inner(pmap, same)(x), "j"), axis_name="i")
    with pytest.raises(NameError) as e:
        fun(X)
    assert str(e.value) == (
        "pmap of `<lambda>` names the axis 'j', which nothing around it maps.\n"
        "  expected  one of 'i'\n"
        "  got       axis_name='i'\n"
        "  fix       pmap(fun, axis_name='j')"
    )
    assert isinstance(e.value, spmd.AxisNameError)


# Taps


def tapped(where):
    """A nested function with a tap in the inner or the outer function; and what it was told."""
    told = []

    def tap(value, transforms):
        told.append(np.asarray(value))

    def innermost(x):
        return (host_callback.id_tap(tap, x) if where == "inner" else x) * lax.psum(x, "j")

    def outermost(x):
        return inner(pmap, innermost)(host_callback.id_tap(tap, x) if where == "outer" else x)

    return pmap(outermost, axis_name="i"), told


REFUSED_TAP = """\
id_tap cannot reach `tap` from a shard_map over some axes of the mesh.
  expected  a shard_map over all axes, or none
  fix       leave axis_names out, or call outside of it; a pmap in a pmap is one, too"""


def test_callbacks_of_jax_in_the_innermost_function():
    """They run on each device with its element, on all versions of JAX."""
    shape = jax.ShapeDtypeStruct((3,), np.float32)

    def halved(x):
        return jax.pure_callback(lambda x: np.asarray(x) / 2, shape, x) * lax.axis_size("j")

    np.testing.assert_array_equal(nested(pmap, halved)(X), X)


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["inner", "outer"])
def test_taps(where):
    """In the innermost function each device calls, where JAX can do it; else the error says so."""
    fun, told = tapped(where)
    if where == "inner" and TAPS:
        np.testing.assert_allclose(fun(X), WANT - 1, rtol=1e-6, atol=1e-6)
        host_callback.barrier_wait()
        rows = sorted(map(tuple, told))
        np.testing.assert_array_equal(rows, sorted(map(tuple, X.reshape(8, 3))))
        return
    for _ in range(2):
        with pytest.raises(spmd.OptionError) as raised:
            fun(X)
        assert str(raised.value) == REFUSED_TAP
    assert told == []
    np.testing.assert_allclose(outer()(X), WANT, rtol=1e-6, atol=1e-6)
