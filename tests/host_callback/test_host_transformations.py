"""Taps under JAX's transformations: how often they call, with which values and which record."""

from dataclasses import dataclass

from hypothesis import given, settings, strategies as st
import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun
import jax.numpy as jnp
import numpy as np
from oracle import mesh_of
import pytest
from tapped import WAYS, Log, mainly, run, same

from spmd import P, host_callback as hcb, pjit

F = np.float32
X = np.array([1, 2, 3], F)
M = np.arange(6, dtype=F).reshape(2, 3)


def batch(*dims):
    """How a tap is told of a vmap."""
    return ("batch", {"batch_dims": dims})


TRANSPOSE = ("transpose", {})


def silent(_, arg, **options):
    """In the place of a tap, in the function that the tapped one is compared with."""
    return options.get("result", arg)


def check(program, calls, *args, way="jit"):
    """Asserts what a program calls, and that its results are those of the same without taps.

    Args:
        program: Takes a tap, returns a function.
        calls: What is counted by hand: name, value, transformations.
        *args: Arguments of the function.
        way: One of `WAYS`.
    """
    log = Log()
    got = run(WAYS[way](program(log.tap)), *args)
    close(got, run(WAYS[way](program(silent)), *args))
    seen = log.take()
    assert [(name, transforms) for name, _, transforms in seen] == [(n, t) for n, _, t in calls]
    for (_, value, _), (_, want, _) in zip(seen, calls, strict=True):
        close(value, want)


def close(got, want):
    """Asserts that two trees have equal structure and nearly equal values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-5, atol=1e-5)


pytestmark = pytest.mark.usefixtures("checked_without_optimizer")

all_ways = pytest.mark.parametrize("way", WAYS)
mainly_jit = pytest.mark.parametrize("way", mainly(WAYS))

# Batching


def square(tap):
    """Taps a number and its square."""
    return lambda x: tap("x,x^2", (x, x * x))[1]


VMAPPED = {
    "one dimension": (
        lambda tap: jax.vmap(square(tap)),
        [("x,x^2", (X, X * X), (batch(0, 0),))],
        (X,),
    ),
    "dimension 1": (
        lambda tap: jax.vmap(lambda x: tap("x", x), in_axes=1, out_axes=1),
        [("x", M, (batch(1),))],
        (M,),
    ),
    "the last dimension": (
        lambda tap: jax.vmap(lambda x: tap("x", x), in_axes=-1),
        [("x", M, (batch(1),))],
        (M,),
    ),
    "not all": (
        lambda tap: jax.vmap(lambda x, y: tap("t", {"x": x, "y": y, "none": None}), (0, None)),
        [("t", {"x": X, "y": F(5), "none": None}, (batch(0, None),))],
        (X, F(5)),
    ),
    "nothing of it": (
        lambda tap: jax.vmap(lambda x, y: (tap("y", y), x)[1], (0, None)),
        [("y", F(5), ())],
        (X, F(5)),
    ),
    "a constant and nothing": (
        lambda tap: jax.vmap(lambda x: (tap("c", F(2)), tap("empty", []), x)[2]),
        [("c", F(2), ()), ("empty", [], ())],
        (X,),
    ),
    "two levels": (
        lambda tap: jax.vmap(jax.vmap(lambda x: tap("x", x))),
        [("x", M, (batch(0), batch(0)))],
        (M,),
    ),
    "two levels of several operands": (
        lambda tap: jax.vmap(
            jax.vmap(lambda x, y, z: tap("t", (x, y, z))[0], (0, None, None)), (None, 0, None)
        ),
        # The inner one sees an x of three; the outer one a y of two beside it.
        [("t", (X, F([7, 8]), F(9)), (batch(0, None, None), batch(None, 0, None)))],
        (X, F([7, 8]), F(9)),
    ),
    "columns of rows": (
        lambda tap: jax.vmap(jax.vmap(lambda x: tap("x", x)), in_axes=1),
        [("x", M, (batch(0), batch(1)))],
        (M,),
    ),
    "in jit in vmap": (
        lambda tap: jax.vmap(jax.jit(jax.vmap(jax.jit(lambda x: tap("x", x))))),
        [("x", M, (batch(0), batch(0)))],
        (M,),
    ),
    "a result that is not sent": (
        lambda tap: jax.vmap(lambda x: tap("sum", x.sum(), result=x * 2)),
        [("sum", M.sum(1), (batch(0),))],
        (M,),
    ),
    "scan": (
        lambda tap: jax.vmap(
            lambda x: lax.scan(lambda c, i: (tap("c", c) + tap("i", i), None), x, F([1, 2]))[0]
        ),
        [("c", X, (batch(0),)), ("i", F(1), ()), ("c", X + 1, (batch(0),)), ("i", F(2), ())],
        (X,),
    ),
    "loop of a common length": (
        lambda tap: jax.vmap(
            lambda x: lax.while_loop(
                lambda c: tap("p", c[0]) < 2, lambda c: (c[0] + 1, tap("b", c[1]) * 2), (F(0), x)
            )[1]
        ),
        [("p", F(0), ()), ("b", X, (batch(0),)), ("p", F(1), ()), ("b", X * 2, (batch(0),))]
        + [("p", F(2), ())],
        (X,),
    ),
    "loop of lengths of their own": (
        lambda tap: jax.vmap(
            lambda x: lax.while_loop(lambda x: x < 2, lambda x: tap("b", x + 1), x)
        ),
        # Elements that are done go along, and keep their values.
        [("b", F([1, 2, 3, 4, 5]), (batch(0),)), ("b", F([2, 3, 3, 4, 5]), (batch(0),))],
        (np.arange(5, dtype=F),),
    ),
    "predicate of lengths of their own": (
        lambda tap: jax.vmap(
            lambda x: lax.while_loop(lambda x: tap("p", x < 2), lambda x: tap("b", x + 1), x)
        ),
        [
            ("p", np.array([1, 1, 0, 0, 0], bool), (batch(0),)),
            ("b", F([1, 2, 3, 4, 5]), (batch(0),)),
            ("p", np.array([1, 0, 0, 0, 0], bool), (batch(0),)),
            ("b", F([2, 3, 3, 4, 5]), (batch(0),)),
            ("p", np.array([0, 0, 0, 0, 0], bool), (batch(0),)),
        ],
        (np.arange(5, dtype=F),),
    ),
    "predicate of elements that have stopped": (
        lambda tap: jax.vmap(
            lambda x, y: lax.while_loop(
                lambda c: tap("p", c)[0] < 3, lambda c: (c[0] + 1, tap("b", c[1]) * 2), (x, y)
            )[1]
        ),
        # The last of them never runs the body, and the first runs it three times.
        [
            ("p", (F([0, 2, 5]), F([1, 1, 1])), (batch(0, 0),)),
            ("b", F([1, 1, 1]), (batch(0),)),
            ("p", (F([1, 3, 5]), F([2, 2, 1])), (batch(0, 0),)),
            ("b", F([2, 2, 1]), (batch(0),)),
            ("p", (F([2, 3, 5]), F([4, 2, 1])), (batch(0, 0),)),
            ("b", F([4, 2, 1]), (batch(0),)),
            ("p", (F([3, 3, 5]), F([8, 2, 1])), (batch(0, 0),)),
        ],
        (F([0, 2, 5]), F([1, 1, 1])),
    ),
    "only the predicate taps": (
        lambda tap: jax.vmap(lambda x: lax.while_loop(lambda x: tap("p", x) >= 2, jnp.sqrt, x)),
        [("p", X * X, (batch(0),)), ("p", X, (batch(0),))]
        # 1 was done from the beginning.
        + [("p", np.sqrt(F([1, 2, 3])), (batch(0),))],
        (X * X,),
    ),
    "cond of one side for all": (
        lambda tap: jax.vmap(
            lambda p, x: lax.cond(p, lambda x: tap("yes", x), lambda x: tap("no", x), x),
            (None, 0),
        ),
        [("yes", X, (batch(0),))],
        (np.bool_(True), X),
    ),
    "switch of one branch for all": (
        lambda tap: jax.vmap(
            lambda i, x: lax.switch(i, [lambda x, n=n: tap(n, x) for n in "abc"], x), (None, 0)
        ),
        [("b", X, (batch(0),))],
        (np.int32(1), X),
    ),
    "custom rules": (
        lambda tap: jax.vmap(custom(tap)),
        [("jvp", X, (batch(0),)), ("vjp", X, (batch(0),))],
        (X,),
    ),
    "checkpoint": (
        lambda tap: jax.vmap(jax.checkpoint(square(tap))),
        [("x,x^2", (X, X * X), (batch(0, 0),))],
        (X,),
    ),
    "map by twos": (
        lambda tap: lambda x: lax.map(lambda x: tap("x", x), x, batch_size=2),
        [("x", X[:2], (batch(0),)), ("x", X[2:], (batch(0),))],
        (X,),
    ),
    "of a gradient": (
        lambda tap: jax.vmap(jax.grad(square(tap))),
        [("x,x^2", (X, X * X), (batch(0, 0),))],
        (X,),
    ),
    "of a gradient of a checkpoint": (
        lambda tap: jax.vmap(jax.grad(jax.checkpoint(square(tap)))),
        [("x,x^2", (X, X * X), (batch(0, 0),))] * 2,
        (X,),
    ),
}


def custom(tap):
    """Taps in functions that have derivatives of their own."""

    @jax.custom_jvp
    def first(x):
        return tap("jvp", x)

    @jax.custom_vjp
    def second(x):
        return tap("vjp", x)

    first.defjvp(lambda p, t: (first(*p), 3 * t[0]))
    second.defvjp(lambda x: (second(x), None), lambda _, ct: (5 * ct,))
    return lambda x: second(first(x))


@pytest.mark.few(8)
@mainly_jit
@pytest.mark.parametrize("case", VMAPPED)
def test_vmap(case, way):
    """A vmap makes one call with the batched value, and says which dimensions are batched."""
    program, calls, args = VMAPPED[case]
    check(program, calls, *args, way=way)


@all_ways
def test_vmap_of_cond_that_differs_by_element(way):
    """Where elements take different sides both run, for all elements, and each keeps its own."""
    log = Log()

    def side(p, x):
        return lax.cond(p, lambda x: log.tap("yes", x + 1), lambda x: log.tap("no", x - 1), x)

    fun = WAYS[way](jax.vmap(side))
    same(run(fun, np.array([True, False, True]), X), F([2, 1, 4]))
    assert sorted(log.scalars()) == [("no", [0, 1, 2]), ("yes", [2, 3, 4])]


def test_vmap_over_a_mesh_axis():
    """A vmap that is spread over an axis of the mesh sends the whole batched value."""
    log = Log()
    mesh = mesh_of({"a": 4})
    fun = jax.vmap(lambda x: log.tap("x", x) * 2, spmd_axis_name="a")
    x = np.arange(8, dtype=F).reshape(4, 2)
    same(run(pjit(fun, P("a"), P("a"), mesh=mesh), x), 2 * x)
    ((name, value, transforms),) = log.take()
    assert (name, transforms) == ("x", (batch(0),))
    same(value, x)


def test_vmap_by_a_rule_of_its_own():
    """A rule of `custom_vmap` decides what is sent; nothing is recorded."""
    log = Log()

    @jax.custom_batching.custom_vmap
    def one(x):
        return log.tap("one", x)

    @one.def_vmap
    def _(size, batched, x):
        return log.tap("all", x.sum()) * jnp.ones(size, F), batched[0]

    same(run(jax.vmap(one), X), F([6, 6, 6]))
    assert log.take() == [("all", F(6), ())]


@pytest.mark.parametrize("way", ["jit", "pjit"])
def test_without_jit(way):
    """Under `disable_jit` the same is called, in the same order."""
    log = Log()
    fun = WAYS[way](looped(log.tap))
    with jax.disable_jit():
        same(run(fun, F(2)), F(32))
    assert log.scalars() == [("x,x^2", (2, 4)), ("x,x^2", (4, 16))]


def test_transforms_are_the_own_of_each_call():
    """What a host function does to the record of one call no other call sees."""
    seen = []

    def host(arg, transforms):
        seen.append(repr(transforms))
        transforms[0][1]["batch_dims"] = "changed"
        transforms[0][1]["more"] = 1

    fun = jax.jit(jax.vmap(lambda x: hcb.id_tap(host, x)))
    run(fun, X), run(fun, X)
    run(jax.vmap(lambda x: hcb.id_tap(host, x)), X)
    hcb.barrier_wait()
    assert seen == ["(('batch', {'batch_dims': (0,)}),)"] * 3


# Derivatives


def cube(tap):
    """The third power, by way of the second."""

    def fun(x):
        y = x * x
        tap("x,x^2", (x, y))
        return y * x

    return fun


def at(x):
    """The call of `cube` at a point."""
    return ("x,x^2", (F(x), F(x * x)), ())


def looped(tap):
    """Two steps of `cube` halved."""
    return lambda x: lax.scan(lambda c, _: (cube(tap)(c) / 2, None), x, None, length=2)[0]


def whiled(tap):
    """The same as a while."""
    return lambda x: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, cube(tap)(c[1]) / 2), (0, x)
    )[1]


def branched(tap):
    """`cube` on one side, a sine on the other."""
    return lambda x: lax.cond(x > 0, cube(tap), lambda x: jnp.sin(tap("no", x)), x)


def policy(name):
    """A checkpoint with a policy of JAX."""
    return lambda fun: jax.checkpoint(fun, policy=getattr(jax.checkpoint_policies, name))


def pushed(fun):
    """Linearizes once, and pushes two tangents."""
    return lambda x: (lambda y, push: (y, push(F(1)), push(F(2))))(*jax.linearize(fun, x))


def pulled(fun):
    """Linearizes once, and pulls two cotangents back."""
    return lambda x: (lambda y, pull: (y, pull(F(1)), pull(F(2))))(*jax.vjp(fun, x))


TWO, FOUR = at(2), at(4)  # half of the cube of 2 is 4
DIFFERENTIATED = {
    "jvp": (lambda tap: lambda x: jax.jvp(cube(tap), (x,), (F(0.1),)), [TWO]),
    "grad": (lambda tap: jax.grad(cube(tap)), [TWO]),
    "value and grad": (lambda tap: jax.value_and_grad(cube(tap)), [TWO]),
    "grad of grad": (lambda tap: jax.grad(jax.grad(cube(tap))), [TWO]),
    "forward over reverse": (lambda tap: jax.jacfwd(jax.jacrev(cube(tap))), [TWO]),
    "reverse over forward": (lambda tap: jax.jacrev(jax.jacfwd(cube(tap))), [TWO]),
    "linearize, pushed twice": (lambda tap: pushed(cube(tap)), [TWO]),
    "vjp, pulled twice": (lambda tap: pulled(cube(tap)), [TWO]),
    "jit in grad": (lambda tap: jax.grad(jax.jit(cube(tap))), [TWO]),
    "grad of scan": (lambda tap: jax.grad(looped(tap)), [TWO, at(4)]),
    "jvp of scan": (lambda tap: lambda x: jax.jvp(looped(tap), (x,), (x,)), [TWO, at(4)]),
    "linearize of scan": (lambda tap: pushed(looped(tap)), [TWO, at(4)]),
    "jvp of while": (lambda tap: lambda x: jax.jvp(whiled(tap), (x,), (x,)), [TWO, at(4)]),
    "grad of cond": (lambda tap: jax.grad(branched(tap)), [TWO]),
    "jvp of cond": (lambda tap: lambda x: jax.jvp(branched(tap), (x,), (x,)), [TWO]),
    "grad by custom rules": (
        lambda tap: jax.grad(custom(tap)),
        [("jvp", F(2), ()), ("vjp", F(2), ())],
    ),
    "checkpoint without derivative": (lambda tap: jax.checkpoint(cube(tap)), [TWO]),
    "checkpoint": (lambda tap: jax.grad(jax.checkpoint(cube(tap))), [TWO, TWO]),
    "checkpoint in jit": (lambda tap: jax.grad(jax.jit(jax.checkpoint(cube(tap)))), [TWO, TWO]),
    "checkpoint of jit": (lambda tap: jax.grad(jax.checkpoint(jax.jit(cube(tap)))), [TWO, TWO]),
    "checkpoint, first one of two": (
        lambda tap: jax.grad(lambda x: cube(tap)(jax.checkpoint(cube(tap))(x))),
        [TWO, at(8), TWO],
    ),
    "checkpoint of checkpoint": (
        lambda tap: jax.grad(jax.checkpoint(jax.checkpoint(cube(tap)))),
        [TWO, TWO, TWO],
    ),
    "checkpoint, pulled twice": (lambda tap: pulled(jax.checkpoint(cube(tap))), [TWO, TWO, TWO]),
    "checkpoint of scan": (
        lambda tap: jax.grad(jax.checkpoint(looped(tap))),
        [TWO, FOUR, TWO, FOUR],
    ),
    "scan of checkpoint": (
        lambda tap: jax.grad(looped_checkpoint(tap)),
        [TWO, FOUR, FOUR, TWO],
    ),
    "everything saveable": (
        lambda tap: jax.grad(policy("everything_saveable")(cube(tap))),
        [TWO],
    ),
    "everything saveable, in scan": (
        lambda tap: jax.grad(policy("everything_saveable")(looped(tap))),
        [TWO, FOUR],
    ),
    "everything saveable, in cond": (
        lambda tap: jax.grad(policy("everything_saveable")(branched(tap))),
        [TWO],
    ),
    "nothing saveable": (
        lambda tap: jax.grad(policy("nothing_saveable")(cube(tap))),
        [TWO, TWO],
    ),
    "products saveable": (
        lambda tap: jax.grad(policy("dots_saveable")(cube(tap))),
        [TWO, TWO],
    ),
    "jvp of checkpoint": (
        lambda tap: lambda x: jax.jvp(jax.checkpoint(cube(tap)), (x,), (x,)),
        [TWO],
    ),
}


def looped_checkpoint(tap):
    """Two steps, each of which is done again on the way back."""
    step = jax.checkpoint(lambda x: cube(tap)(x) / 2)
    return lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0]


@pytest.mark.few(1)
@mainly_jit
@pytest.mark.parametrize("case", DIFFERENTIATED)
def test_derivatives_see_primal_values(case, way):
    """A derivative calls with primal values only, once; a checkpoint does so on each pass."""
    program, calls = DIFFERENTIATED[case]
    check(program, calls, F(2), way=way)


@all_ways
def test_derivatives_beside_integers(way):
    """Operands without a derivative go through jvp, grad and vjp beside those with one."""
    log = Log()

    def fun(x, n):
        x, n = log.tap("x,n", (x, n))
        return x * n.astype(F)

    three = np.int32(3)
    zero = np.zeros((), jax.dtypes.float0)
    made = WAYS[way](lambda x, n: jax.jvp(fun, (x, n), (F(2), zero)))
    same(run(made, F(5), three), (F(15), F(6)))
    same(run(WAYS[way](jax.grad(fun)), F(5), three), F(3))
    gradients = run(jax.grad(fun, argnums=(0, 1), allow_int=True), F(5), three)
    same(gradients, (F(3), zero))
    assert log.scalars() == [("x,n", (5, 3))] * 3


# Tangents and cotangents


def with_tangents(tap):
    """The third power, whose tangents are tapped by a function that returns nothing."""

    @jax.custom_jvp
    def tangents(arg):
        return None

    @tangents.defjvp
    def _(primals, directions):
        tap("tangents", directions[0])
        return None, None

    def fun(x):
        y = x * x
        tap("x,x^2", (x, y))
        tangents((x, y))
        return y * x

    return fun


def through_tangents(tap):
    """The third power, whose tangents go through a tap."""

    @jax.custom_jvp
    def same_value(arg):
        return arg

    same_value.defjvp(lambda p, t: (p[0], tap("tangents", t[0])))

    def fun(x):
        x, y = same_value((x, x * x))
        return y * x

    return fun


def with_cotangents(tap):
    """The third power, whose cotangents are tapped."""

    @jax.custom_vjp
    def same_value(arg):
        return arg

    def backward(_, ct):
        tap("cotangents", ct)
        return (ct,)

    same_value.defvjp(lambda arg: (same_value(arg), None), backward)

    def fun(x):
        y = x * x
        tap("x,x^2", (x, y))
        x, y = same_value((x, y))
        return y * x

    return fun


def steps(fun):
    """Two steps of a function in a scan."""
    return lambda x: lax.scan(lambda c, _: (fun(c), None), x, None, length=2)[0]


THREE = ("x,x^2", (F(3), F(9)), ())
NINES = (F([1, 4, 9]), X)  # cotangents of x and x * x in x * (x * x): x * x and x
LINEAR = {
    "tangents": (
        lambda tap: lambda x: jax.jvp(with_tangents(tap), (x,), (F(0.1),)),
        [THREE, ("tangents", (F(0.1), F(0.6)), ())],
        F(3),
    ),
    "tangents, not differentiated": (with_tangents, [THREE], F(3)),
    "tangents, batched": (
        lambda tap: jax.vmap(lambda x: jax.jvp(with_tangents(tap), (x,), (F(0.5),))),
        [
            ("x,x^2", (X, X * X), (batch(0, 0),)),
            # The direction is the same for all.
            ("tangents", (F(0.5), X), (batch(None, 0),)),
        ],
        X,
    ),
    "through tangents": (
        lambda tap: lambda x: jax.jvp(through_tangents(tap), (x,), (F(0.1),)),
        [("tangents", (F(0.1), F(0.6)), ())],
        F(3),
    ),
    "through tangents, on the way back": (
        lambda tap: jax.grad(through_tangents(tap)),
        [("tangents", (F(9), F(3)), (TRANSPOSE,))],
        F(3),
    ),
    "through tangents, both ways": (
        lambda tap: (
            lambda x: (
                jax.jvp(through_tangents(tap), (x,), (F(1),)),
                jax.grad(through_tangents(tap))(x),
            )
        ),
        [("tangents", (F(1), F(6)), ()), ("tangents", (F(9), F(3)), (TRANSPOSE,))],
        F(3),
    ),
    "through tangents, pushed twice": (
        lambda tap: pushed(through_tangents(tap)),
        [("tangents", (F(1), F(6)), ()), ("tangents", (F(2), F(12)), ())],
        F(3),
    ),
    "through tangents, pulled twice": (
        lambda tap: pulled(through_tangents(tap)),
        [("tangents", (F(9), F(3)), (TRANSPOSE,)), ("tangents", (F(18), F(6)), (TRANSPOSE,))],
        F(3),
    ),
    "transposed": (
        lambda tap: lambda x: jax.linear_transpose(lambda v: tap("t", v) * 3, x)(x)[0],
        [("t", F(9), (TRANSPOSE,))],
        F(3),
    ),
    "vmap of grad": (
        lambda tap: jax.vmap(jax.grad(through_tangents(tap))),
        [("tangents", NINES, (TRANSPOSE, batch(0, 0)))],
        X,
    ),
    "grad of vmap": (
        lambda tap: jax.grad(lambda x: jax.vmap(through_tangents(tap))(x).sum()),
        [("tangents", NINES, (batch(0, 0), TRANSPOSE))],
        X,
    ),
    "through tangents in scan": (
        lambda tap: jax.grad(steps(through_tangents(tap))),
        # From the last step: the cotangents there, at 8, and those at 2.
        [
            ("tangents", (F(64), F(8)), (TRANSPOSE,)),
            ("tangents", (F(192 * 4), F(192 * 2)), (TRANSPOSE,)),
        ],
        F(2),
    ),
    "cotangents": (
        lambda tap: jax.grad(with_cotangents(tap)),
        [THREE, ("cotangents", (F(9), F(3)), ())],
        F(3),
    ),
    "cotangents, not differentiated": (with_cotangents, [THREE], F(3)),
    "cotangents, batched": (
        lambda tap: jax.vmap(jax.grad(with_cotangents(tap))),
        [
            ("x,x^2", (X, X * X), (batch(0, 0),)),
            ("cotangents", NINES, (batch(0, 0),)),
        ],
        X,
    ),
    "cotangents in scan": (
        lambda tap: jax.grad(steps(with_cotangents(tap))),
        [
            ("x,x^2", (F(2), F(4)), ()),
            ("x,x^2", (F(8), F(64)), ()),
            ("cotangents", (F(64), F(8)), ()),
            ("cotangents", (F(192 * 4), F(192 * 2)), ()),
        ],
        F(2),
    ),
    "cotangents in checkpoint": (
        lambda tap: jax.grad(jax.checkpoint(with_cotangents(tap))),
        [THREE, THREE, ("cotangents", (F(9), F(3)), ())],
        F(3),
    ),
}


@pytest.mark.few(1)
@mainly_jit
@pytest.mark.parametrize("case", LINEAR)
def test_tangents_and_cotangents(case, way):
    """Custom rules tap tangents and cotangents; a tap of tangents records that it is transposed."""
    program, calls, x = LINEAR[case]
    check(program, calls, x, way=way)


def test_unused_tangents_are_zero_on_the_way_back():
    """On the way back nothing comes back to a tap of tangents that returns nothing: zeros."""
    check(
        lambda tap: jax.grad(with_tangents(tap)),
        [THREE, ("tangents", (F(0), F(0)), (TRANSPOSE,))],
        F(3),
    )


@all_ways
def test_cotangents_of_integers(way):
    """A custom rule may tap the cotangents of integers, which have a dtype of their own."""
    log = Log()

    @jax.custom_vjp
    def same_value(arg):
        return arg

    same_value.defvjp(lambda a: (a, None), lambda _, ct: (log.tap("ct", ct),))

    def fun(x, n):
        x, n = same_value((x, n))
        return (x * n.astype(F)).sum()

    same(run(WAYS[way](jax.grad(fun)), X, np.array([4, 5, 6], np.int32)), F([4, 5, 6]))
    ((_, (ct, zeros), _),) = log.take()
    same(ct, F([4, 5, 6]))
    assert (zeros.dtype, zeros.shape) == (jax.dtypes.float0, (3,))


# Tracing


def everything(tap):
    """Taps in all that is traced on its own."""

    def fun(x):
        x = looped(tap)(branched(tap)(x))
        x = jax.vmap(custom(tap))(x[None])[0] + through_tangents(tap)(x)
        return jax.grad(jax.checkpoint(with_cotangents(tap)))(x)

    return fun


TRACINGS = {
    "make_jaxpr": lambda fun: jax.make_jaxpr(fun)(F(1)),
    "make_jaxpr of grad": lambda fun: jax.make_jaxpr(jax.grad(fun))(F(1)),
    "make_jaxpr of vmap": lambda fun: jax.make_jaxpr(jax.vmap(fun))(X),
    "eval_shape": lambda fun: jax.eval_shape(fun, F(1)),
    "trace": lambda fun: jax.jit(fun).trace(F(1)),
    "lower": lambda fun: jax.jit(fun).lower(F(1)),
    "compile": lambda fun: jax.jit(fun).lower(F(1)).compile(),
    "pjit, trace": lambda fun: pjit(fun, mesh=mesh_of({"a": 2})).trace(F(1)),
    "pjit, eval_shape": lambda fun: pjit(fun, mesh=mesh_of({"a": 2})).eval_shape(F(1)),
    "pjit, lower": lambda fun: pjit(fun, mesh=mesh_of({"a": 2})).lower(F(1)),
    "pjit, compile": lambda fun: pjit(fun, mesh=mesh_of({"a": 2})).lower(F(1)).compile(),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("tracing", TRACINGS)
def test_tracing_never_calls(tracing):
    """Tracing, lowering and compiling call no host function."""
    log = Log()

    def host(x):
        log.calls.append("call")
        return x

    def with_calls(x):
        return everything(log.tap)(x) + hcb.call(host, lax.stop_gradient(x), **SEQUENTIAL)

    TRACINGS[tracing](with_calls)
    assert log.take() == []


SEQUENTIAL = {"result_shape": F(0), "vmap_method": "sequential"}


def test_a_jaxpr_keeps_its_taps():
    """What was traced calls when it is evaluated, not before; dead code is kept there too."""
    log = Log()

    def fun(x):
        log.tap("dead", x * 2)
        return x + 1

    jaxpr = jax.make_jaxpr(jax.jit(fun))(F(1))
    assert log.take() == []
    for _ in range(2):
        assert run(jaxpr_as_fun(jaxpr), F(4)) == [F(5)]
        assert log.scalars() == [("dead", 8)]


def test_a_jaxpr_shows_its_taps():
    """A jaxpr prints the host function and the transformations of a tap."""

    def host(arg, transforms):
        raise AssertionError

    jaxpr = jax.make_jaxpr(jax.vmap(lambda x: hcb.id_tap(host, x)))(X)
    assert "host_tap[func=host transforms=batch(0,)] " in " ".join(str(jaxpr).split())


# Values, whatever the transformations


@dataclass(frozen=True)
class Stack:
    """A body and what is applied to it, innermost first: data, so that a failure can be pasted."""

    body: str
    layers: tuple

    def apply(self, tap):
        """The transformed function of a vector."""
        fun = BODIES[self.body](tap)
        for layer in self.layers:
            fun = LAYERS[layer](fun)
        return fun

    def is_differentiable(self):
        """Whether JAX has the derivatives that are asked for."""
        refused = REFUSED.get(self.body, ())
        return not set(self.layers) & {*refused} and self.layers.count("grad") < 2


def _mixed(tap):
    def fun(x):
        tap("dead", x.sum())
        y = jnp.sin(tap("x", x))
        return tap("pair", (x, y), result=x * y)

    return fun


def _scan(tap):
    return lambda x: lax.scan(
        lambda c, i: (jnp.tanh(tap("c", c) + tap("i", i)), tap("dead", i) * 0), x, F([1, 2])
    )[0]


def _cond(tap):
    def fun(x):
        big = tap("p", x.sum() > 1)
        return lax.cond(big, lambda x: tap("yes", x) * x, lambda x: jnp.cos(tap("no", x)), x)

    return fun


def _while(tap):
    # Forward derivatives only; the number of rounds is the element's own.
    def fun(x):
        def body(c):
            return c[0] + 1, tap("b", c[1]) * F(0.5)

        return lax.while_loop(lambda c: (tap("p", c[1]) > 0.5).any(), body, (0, x))[1]

    return fun


def _both(tap):
    def fun(x):
        step = jax.checkpoint(lambda c: custom(tap)(c) * with_cotangents(tap)(c))
        return step(through_tangents(tap)(x))

    return fun


BODIES = {"mixed": _mixed, "scan": _scan, "cond": _cond, "while": _while, "both": _both}
LAYERS = {
    "jit": jax.jit,
    "pjit": WAYS["pjit"],
    "checkpoint": jax.checkpoint,
    "jvp": lambda fun: lambda x: jax.jvp(fun, (x,), (jnp.cos(x),))[1],
    "grad": lambda fun: jax.grad(lambda x: jnp.sum(fun(x) ** 2)),
    "linearize": lambda fun: lambda x: jax.linearize(fun, x)[1](x),
    # A vector as one row of a matrix, and as its columns
    "vmap": lambda fun: lambda x: jax.vmap(fun)(jnp.stack([x, -x, 2 * x])).sum(0),
    "vmap 1": lambda fun: lambda x: jax.vmap(fun, 1, 1)(jnp.stack([x, 3 - x], 1)).sum(1),
    "map": lambda fun: lambda x: lax.map(fun, jnp.stack([x, x + 1])).sum(0),
}
#: What has no rule for a while, and for a `custom_vjp`, whose own rule is for one derivative.
REFUSED = {"while": ("grad",), "both": ("jvp", "linearize")}

stacks = st.builds(
    Stack,
    st.sampled_from([*BODIES]),
    st.lists(st.sampled_from([*LAYERS]), min_size=1, max_size=4).map(tuple),
).filter(lambda stack: stack.is_differentiable())


def check_stack(stack):
    """Asserts that a stack computes with taps what it computes without, and calls something."""
    x = F([0.3, 1.7, -0.8])
    log = Log()
    close(run(stack.apply(log.tap), x), run(stack.apply(silent), x))
    assert log.take()


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(stacks)
def test_values_are_those_without_taps(stack):
    """No stack of transformations computes anything else because there are taps in it."""
    check_stack(stack)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=50, deadline=None, database=None)
@given(stacks)
def test_values_are_those_without_taps_for_many(stack):
    """As above, for stacks that differ from run to run."""
    check_stack(stack)


# Batched values, element by element

#: Per level and operand the batched dimension, or None.
LEVELS = st.lists(
    st.tuples(st.sampled_from([None, 0, 1, -1]), st.sampled_from([None, 0, 1, -2])).filter(
        lambda dims: dims != (None, None)
    ),
    min_size=1,
    max_size=3,
)


def element(value, dims, at):
    """One element of a batched value: a leaf, per level its dimension, and where."""
    for dim, i in zip(reversed(dims), at, strict=True):  # the outermost is the last
        value = value if dim is None else np.take(value, i, axis=dim)
    return value


def _elementwise(tap):
    """Taps of all that two operands give, in a loop and in functions."""

    def fun(x, y):
        tap("xy", {"x": x, "y": y})
        tap("sum", x.sum() + y.sum())

        def step(c, row):
            tap("row", (row, c, y))
            return c + row.sum(), tap("out", row * 2)

        total, rows = lax.scan(step, y.max(), x)
        return tap("end", (total, rows.T, jnp.outer(x.sum(1), y)))

    return fun


def check_elements(levels):
    """Asserts that each element of what vmaps send is what the function sends for that element."""
    sizes = (2, 3, 2)[: len(levels)]
    rng = np.random.default_rng(0)
    args = []
    for operand, shape in enumerate([(2, 3), (2, 2)]):
        for size, dims in zip(sizes, reversed(levels), strict=True):  # from the innermost
            if (dim := dims[operand]) is not None:
                at = dim if dim >= 0 else len(shape) + 1 + dim
                shape = (*shape[:at], size, *shape[at:])
        args.append(rng.integers(0, 9, shape).astype(F))
    log = Log()
    fun = _elementwise(log.tap)
    for dims in reversed(levels):
        fun = jax.vmap(fun, in_axes=dims)
    run(jax.jit(fun), *args)
    batched = log.take()
    single_fun = jax.jit(_elementwise(log.tap))
    # `levels` are from the outermost, sizes from the innermost.
    for at in np.ndindex(*reversed(sizes)):
        values = args
        for dims, i in zip(levels, at, strict=True):
            values = [
                v if d is None else np.take(v, i, axis=d) for v, d in zip(values, dims, strict=True)
            ]
        run(single_fun, *values)
        single = log.take()
        assert [n for n, *_ in batched] == [n for n, *_ in single]
        for (_, all_of, transforms), (_, one, _) in zip(batched, single, strict=True):
            check_element(all_of, transforms, at, one)


def check_element(batched, transforms, at, one):
    """Asserts that one element of a batched tree is a given one."""
    leaves, tree = jax.tree.flatten(batched)
    assert tree == jax.tree.structure(one)
    per_level = [params["batch_dims"] for _, params in transforms]
    assert len(per_level) <= len(at)
    if len(per_level) < len(at):
        return  # not all levels batch it: which one is missing the record does not say
    for n, (leaf, want) in enumerate(zip(leaves, jax.tree.leaves(one), strict=True)):
        got = element(leaf, [dims[n] for dims in per_level], at)
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(LEVELS)
def test_elements_of_batched_values(levels):
    """The record says where in a batched value each element lies, for vmaps of any dimensions."""
    check_elements(levels)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=40, deadline=None, database=None)
@given(LEVELS)
def test_elements_of_batched_values_for_many(levels):
    """As above, for dimensions that differ from run to run."""
    check_elements(levels)
