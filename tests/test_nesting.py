"""Calls in control flow, in each other, in manual regions, and in programs that travel.

Every program is written once for a `wrap` and run twice: with `pjit`, and with `jax.jit`, which is
what it is compared with.
"""

import functools
from pathlib import Path
import re
import textwrap

import jax
from jax import export, lax
import jax.extend
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, mesh_of, put
import pytest

import spmd
from spmd import P, pjit, with_sharding_constraint

X = (np.arange(16, dtype=np.float32).reshape(4, 4) - 6) / 8
V = np.cos(X * 8)
STACK = np.stack([X, 2 * X, -X])
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
A, B, AB, NB = P("a"), P("b"), P("a", "b"), P(None, "b")

pytestmark = pytest.mark.usefixtures("checked_without_optimizer")


@pytest.fixture
def mesh():
    """The 2x2 mesh `a, b`; four devices compile faster than eight."""
    return mesh_of({"a": 2, "b": 2})


def by_jit(fun, *_, **options):
    """Wraps as the peer does."""
    return jax.jit(fun, **options)


def by_pjit(mesh):
    """Returns what wraps a function with specs of its inputs and outputs."""

    def wrap(fun, *specs, **options):
        return pjit(fun, *specs, mesh=mesh, **options)

    return wrap


def close(got, want):
    """Asserts that two trees have the same structure and values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if w.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(np.asarray(g), np.asarray(w), **CLOSE)


def weighed(tree):
    """One number in which each element of a tree has another weight."""
    return sum(
        (x.astype(np.float32) * jnp.arange(1.0, 1 + x.size).reshape(x.shape)).sum()
        for x in jax.tree.leaves(tree)
    )


# Programs


def cond_of_two_calls(wrap):
    """Branches that take and return other specs."""
    one = wrap(lambda x: jnp.sin(x) * x, A, AB)
    two = wrap(jnp.cos, NB, B)
    return lambda x: lax.cond(x.sum() > 0, one, two, x)


def switch_of_three_calls(wrap):
    """An index that differs between examples under vmap."""
    calls = [wrap(lambda x, k=k: jnp.sin(x * k), s, s) for k, s in ((1.0, A), (2.0, B), (3.0, P()))]
    return lambda x: lax.switch((x[0, 0] * 8 + 7).astype(int) % 3, calls, x)


def while_of_calls(wrap):
    """Predicate and body are calls; the length depends on the value."""
    small = wrap(lambda c: (c[0] < 9) & (jnp.abs(c[1]).max() < 3))
    grow = wrap(lambda c: (c[0] + 1, jnp.sin(c[1]) * 0.1 + c[1] * 1.5), ((P(), A),), (P(), B))
    return lambda x: lax.while_loop(small, grow, (0, x))[1]


def fori_of_a_call(wrap):
    """The loop index is an argument of the call."""
    step = wrap(lambda i, x: jnp.sin(x) + i.astype(x.dtype) * 0.1, (None, A), B)
    return lambda x: lax.fori_loop(0, 3, step, x)


def fori_in_a_call_in_a_fori(wrap):
    """A loop around a call around a loop."""
    inner = wrap(lambda x: lax.fori_loop(0, 2, lambda i, x: jnp.sin(x), x), A, B)
    return lambda x: lax.fori_loop(0, 2, lambda i, x: inner(x), x)


def while_in_a_call_in_a_fori(wrap):
    """A loop of unknown length inside of one of known length."""
    inner = wrap(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 1.5 + 1, x), A, B)
    return lambda x: lax.fori_loop(0, 2, lambda i, x: jnp.sin(inner(x)), x)


def scan_of_trees(wrap):
    """Carry, inputs and outputs are trees, with an integer in the carry."""

    def step(c, x):
        return {"v": c["v"] * jnp.cos(x)[None, :], "n": c["n"] + 1}, (c["v"].sum(0), c["n"])

    call = wrap(step, ({"v": A, "n": None}, B), ({"v": B, "n": None}, (None, None)))
    return lambda x: lax.scan(call, {"v": x, "n": jnp.int32(0)}, x)


def scan_in_reverse(wrap):
    """Backwards, two steps at a time."""
    step = wrap(lambda c, x: (c * jnp.cos(x), c + x), (B, A), (A, B))
    return lambda x: lax.scan(step, x[0], x, reverse=True, unroll=2)


def scan_of_a_donating_call(wrap):
    """The call says that it donates the carry."""
    step = wrap(lambda c, x: (c * jnp.cos(x), c + x), (B, A), (A, B), donate_argnums=0)
    return lambda x: lax.scan(step, x[0], x)


def scan_without_inputs(wrap):
    """No input, no output, no spec."""
    step = wrap(lambda c, _: (jnp.sin(c), None))
    return lambda x: lax.scan(step, x, None, length=3)[0]


def map_in_batches(wrap):
    """`lax.map` that maps two rows at a time, and one that is left."""
    row = wrap(lambda r: jnp.sin(r) * r.sum(), A, B)
    return lambda x: lax.map(row, jnp.concatenate([x, x[:1]]), batch_size=2)


def associative_scan_of_pairs(wrap):
    """The combination is a call on pairs, along the other axis and backwards."""
    combine = wrap(lambda p, q: (p[0] * q[0], q[1] + p[1] * q[0]), A)
    return lambda x: lax.associative_scan(combine, (x, x + 1), axis=1, reverse=True)


def everything_inside(wrap):
    """Loops and branches inside of a call, over other calls."""
    row = wrap(lambda r: jnp.sin(r) * r.sum(), A, B)

    def fun(x):
        y = lax.map(row, x)
        z, _ = lax.scan(lambda c, r: (row(c) * 0.2 + r, None), x[0], x)
        z += lax.cond(z.sum() > 0, row, lambda v: v, z)
        z += lax.switch(1, [row, lambda v: v * 2, row], z)
        r = lax.associative_scan(lambda p, q: p * q, x)
        return y + r + z[None, :]

    return wrap(fun, A, B)


def checkpointed_scan_of_nested_calls(wrap):
    """A call in a call in a checkpoint in a scan in a checkpoint."""
    inner = wrap(lambda y: jnp.sin(y) * y, B, A)
    outer = wrap(lambda x: inner(x) * 2, A, B)
    step = jax.checkpoint(lambda c, r: (outer(c) * r, c.sum()))
    return jax.checkpoint(lambda x: lax.scan(step, x[0], x))


def cond_in_scan(wrap):
    """One branch calls, the other does not."""
    call = wrap(jnp.sin, A, B)

    def step(c, r):
        return lax.cond(r.sum() > 0, lambda c: (call(c), c.sum()), lambda c: (c * r, r.sum()), c)

    return lambda x: lax.scan(step, x[0], x)


def switch_of_calls_in_scan(wrap):
    """The index is an input of the scan."""
    calls = [wrap(lambda x, k=k: jnp.sin(x * k) * x, s, s) for k, s in ((1.0, A), (2.0, B))]
    step = jax.checkpoint(lambda c, i: (lax.switch(i, calls, c), None))
    return lambda x: lax.scan(step, x, jnp.array([0, 1, 0]))[0]


def custom_vjp_around_calls(wrap):
    """Function and both rules are calls, in a call."""
    call = wrap(jnp.sin, A, B)
    fun = jax.custom_vjp(lambda x: call(x))
    forward = wrap(lambda x: (jnp.sin(x), jnp.cos(x)), A, B)
    fun.defvjp(forward, wrap(lambda r, ct: (r * ct * 10,), A, (A,)))
    return wrap(lambda x: fun(x) * x, A, A)


def custom_jvp_around_calls(wrap):
    """Function and rule are calls, in a scan."""
    call, rule = wrap(jnp.sin, A, B), wrap(lambda p, t: t * p * 5, A, A)
    fun = jax.custom_jvp(lambda x: call(x))
    fun.defjvp(lambda p, t: (call(p[0]), rule(p[0], t[0])))
    return lambda x: lax.scan(lambda c, _: (fun(c), None), x, None, length=2)[0]


def custom_linear_solve(wrap):
    """The operator and the solver are calls."""

    def fun(x):
        matrix = jnp.eye(4) * 3 + 1
        solve = wrap(lambda b: jnp.linalg.solve(matrix, b), P(), P())
        operator = wrap(lambda v: matrix @ v, A, A)
        return lax.custom_linear_solve(operator, x[0], lambda _, b: solve(b), symmetric=True)

    return fun


def reduce_by_a_call(wrap):
    """The monoid of `lax.reduce` is a call."""
    add = wrap(lambda p, q: p + q * 1.0)
    return lambda x: lax.reduce(jnp.sin(x), np.float32(0), add, (0,))


def by_platform(wrap):
    """`lax.platform_dependent` chooses between calls inside of a call."""
    one, two = wrap(jnp.sin, A, B), wrap(jnp.cos, A, B)
    return wrap(lambda x: lax.platform_dependent(x, cpu=one, default=two) * x, A, B)


def vectorized(wrap):
    """`jnp.vectorize` of a call."""
    return jnp.vectorize(wrap(lambda v: v / (2 + v.sum()), B, B), signature="(n)->(n)")


def barrier(wrap):
    """`lax.optimization_barrier` between two calls."""
    call = wrap(jnp.sin, A, B)
    return wrap(lambda x: lax.optimization_barrier(call(x)) * lax.optimization_barrier(x), B, A)


#: Reverse mode has no rule for a loop of unknown length, forward mode none for a custom_vjp.
NO_REVERSE = (while_of_calls, while_in_a_call_in_a_fori)
NO_FORWARD = (custom_vjp_around_calls,)
LONG = (scan_of_trees, map_in_batches, scan_in_reverse, custom_linear_solve)
SECOND_ORDER = (cond_of_two_calls, fori_of_a_call, custom_jvp_around_calls, by_platform, barrier)
PROGRAMS = (
    cond_of_two_calls,
    switch_of_three_calls,
    fori_of_a_call,
    fori_in_a_call_in_a_fori,
    scan_of_trees,
    scan_in_reverse,
    scan_of_a_donating_call,
    scan_without_inputs,
    map_in_batches,
    associative_scan_of_pairs,
    everything_inside,
    checkpointed_scan_of_nested_calls,
    cond_in_scan,
    switch_of_calls_in_scan,
    custom_jvp_around_calls,
    custom_linear_solve,
    reduce_by_a_call,
    by_platform,
    vectorized,
    barrier,
    *NO_REVERSE,
    *NO_FORWARD,
)
programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)


def value(fun):
    """The function itself."""
    return fun


def gradient(fun):
    """The gradient of one number of the result."""
    return jax.grad(lambda x: weighed(fun(x)))


def tangent(fun):
    """The JVP in a fixed direction."""
    return lambda x: jax.jvp(fun, (x,), (jnp.asarray(V),))[1]


def mapped(transform):
    """The transformed function over three examples, stacked along a trailing dimension."""

    def both(fun):
        over = jax.vmap(transform(fun), in_axes=-1)
        return lambda x: over(jnp.stack([x, 2 * x, -x], axis=-1))

    return both


def rematerialized(fun):
    """The gradient of the checkpointed function."""
    return gradient(jax.checkpoint(fun))


def hessian_vector(fun):
    """Forward over reverse."""
    return lambda x: jax.jvp(gradient(fun), (x,), (jnp.asarray(V),))[1]


def transforms_of(program):
    """The transformations that the program has; some take too long to compile for all of them."""
    if program is everything_inside:
        return [value, rematerialized]
    if program is custom_vjp_around_calls:
        return [mapped(value), mapped(gradient), rematerialized]
    if program in NO_REVERSE:
        return [value, tangent, mapped(value)]
    found = [tangent] if program in LONG else [tangent, mapped(gradient)]
    if program is checkpointed_scan_of_nested_calls:
        found = [tangent, hessian_vector]  # the checks of JAX 0.10 fail on its own vmap of this
    if program is not associative_scan_of_pairs:
        found += [rematerialized]
    if program in SECOND_ORDER:
        found += [hessian_vector]
    return found


@pytest.mark.few(0)
@programs
def test_transformed_under_jit(program, mesh):
    """Every transformation of a program gives under `jax.jit` what the peer gives."""
    transforms = transforms_of(program)

    def all_of(wrap):
        fun = program(wrap)
        return jax.jit(lambda x: [t(fun)(x) for t in transforms])

    close(all_of(by_pjit(mesh))(X), all_of(by_jit)(X))


EAGER = (
    cond_of_two_calls,
    while_of_calls,
    fori_of_a_call,
    scan_of_a_donating_call,
    checkpointed_scan_of_nested_calls,
    custom_vjp_around_calls,
    by_platform,
)


@pytest.mark.few(1)
@pytest.mark.parametrize("program", EAGER, ids=lambda p: p.__name__)
def test_eager(program, mesh):
    """Value and gradient without an outer `jax.jit` are the peer's."""
    transform = tangent if program in NO_REVERSE else gradient
    fun, peer = program(by_pjit(mesh)), program(by_jit)
    close(fun(X), jax.jit(peer)(X))
    close(transform(fun)(X), jax.jit(transform(peer))(X))


@pytest.mark.slow
@pytest.mark.parametrize("program", [switch_of_three_calls, cond_in_scan], ids=lambda p: p.__name__)
def test_eager_vmap(program, mesh):
    """An eager vmap maps loops and branches, predicates that differ included."""
    close(jax.vmap(program(by_pjit(mesh)))(STACK), jax.jit(jax.vmap(program(by_jit)))(STACK))


# Loops


def test_loop_keeps_a_carry_where_its_call_wants_it(mesh):
    """A loop whose call takes and returns one spec moves no carry: no collective in it."""
    step = pjit(lambda c, _: (jnp.sin(c) * 2, None), (A, None), (A, None), mesh=mesh)
    run = jax.jit(lambda x: lax.scan(step, x, None, length=5)[0])
    x = put(X, mesh, A)
    text = run.lower(x).compile().as_text()
    assert not re.search(r"all-(gather|reduce|to-all)|collective-permute", text)
    assert_sharded(run(x), jax.jit(program_of_five_steps)(X), A, mesh, **CLOSE)


def program_of_five_steps(x):
    """What the loop computes."""
    for _ in range(5):
        x = jnp.sin(x) * 2
    return x


def test_donated_carry_survives_the_loop(mesh):
    """A loop of a donating call donates nothing of the caller's."""
    step = pjit(lambda c, x: (c * x, c), (B, A), (A, B), donate_argnums=0, mesh=mesh)
    first, xs = put(X[0] + 2, mesh, B), put(X + 2, mesh, A)
    for _ in range(2):
        carry, _ = lax.scan(step, first, xs)
        close(carry, np.prod(np.concatenate([X[:1], X]) + 2, axis=0))


def test_loop_traces_its_call_once(mesh):
    """A call is traced once however long the loop, and however often it runs."""
    traced = []

    def fun(x):
        traced.append(1)
        return jnp.sin(x)

    step = pjit(fun, A, A, mesh=mesh)
    for n in (2, 5):
        jax.block_until_ready(lax.fori_loop(0, n, lambda i, x: step(x), X))
        loop = jax.jit(lambda x, n=n: lax.fori_loop(0, n, lambda i, x: step(x), x))
        jax.block_until_ready(loop(X))
    assert len(traced) == 1


# Several meshes


def test_one_inner_function_under_two_meshes(mesh):
    """A function without a mesh of its own runs, nested too, on the mesh of each call."""
    inner = pjit(jnp.sin, out_axis_resources=P("a"))
    outer = pjit(lambda x: inner(x) * 2, out_axis_resources=P("a"))
    other = mesh_of({"a": 4})
    for m in (mesh, other, mesh):
        with m:
            assert_sharded(outer(X), 2 * np.sin(X), P("a"), m, **CLOSE)
            close(jax.grad(lambda x: outer(x).sum())(X), 2 * np.cos(X))


def test_two_meshes_of_the_same_devices_in_one_jit(mesh):
    """One `jax.jit` may call on two meshes that order the same devices alike."""
    other = mesh_of({"z": 4})
    one, two = pjit(jnp.sin, A, A, mesh=mesh), pjit(jnp.cos, P("z"), P("z"), mesh=other)
    fun = jax.jit(lambda x: two(one(x)))
    assert_sharded(fun(X), np.cos(np.sin(X)), P("z"), other, **CLOSE)
    close(jax.jit(jax.grad(lambda x: fun(x).sum()))(X), -np.sin(np.sin(X)) * np.cos(X))


# Calls in calls


@pytest.mark.slow
def test_mixed_nesting_of_jit_and_pjit(mesh):
    """`pjit`, `jit` and loops nest four deep in every order, under a gradient."""
    wrap = by_pjit(mesh)

    def nest(order):
        fun = jnp.sin
        for kind in order:
            last = fun
            fun = {
                "p": lambda f: wrap(lambda x: f(x) * 1.5, A, B),
                "j": lambda f: jax.jit(lambda x: f(x) * 1.5),
                "s": lambda f: lambda x: lax.scan(lambda c, _: (f(c) * 1.5, None), x, None, 1)[0],
                "c": lambda f: jax.checkpoint(lambda x: f(x) * 1.5),
            }[kind](last)
        return fun

    for order in ("jpjp", "pjpj", "spcp", "pspc", "cpjs"):
        fun = nest(order)
        got = jax.jit(lambda x, fun=fun: (fun(x), gradient(fun)(x)))(X)
        weights = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
        close(got, (np.sin(X) * 1.5**4, np.cos(X) * 1.5**4 * weights))


def test_constraint_between_nested_calls(mesh):
    """A constraint beside nested calls finds the mesh of the function that it is in."""
    inner = pjit(lambda x: with_sharding_constraint(jnp.sin(x), B), A, A, mesh=mesh)
    outer = pjit(lambda x: with_sharding_constraint(inner(x), NB) * 2, A, AB, mesh=mesh)
    assert_sharded(outer(X), 2 * np.sin(X), AB, mesh, **CLOSE)
    text = outer.lower(X).as_text()
    assert text.count('[{"b"}, {}]') == 1
    assert text.count('[{}, {"b"}]') == 1


def test_no_function_is_left_in_a_cond_that_is_known(mesh):
    """A call in a branch that is not taken is never run, and the taken one is."""
    seen = []

    def noisy(name):
        def fun(x):
            jax.debug.callback(lambda: seen.append(name))
            return jnp.sin(x)

        return pjit(fun, A, A, mesh=mesh)

    fun = jax.jit(lambda flag, x: lax.cond(flag, noisy("yes"), noisy("no"), x))
    for flag in (True, False, True):
        jax.block_until_ready(fun(flag, X))
        jax.effects_barrier()
    assert seen == ["yes", "no", "yes"]


# Manual regions


@pytest.mark.slow
def test_over_other_axes_of_a_shard_map(mesh):
    """Inside of a region that maps `a`, calls over `b` work: eager, grad, vmap, scan, in a call."""
    sine = pjit(jnp.sin, B, B, mesh=mesh)
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    region = functools.partial(jax.shard_map, mesh=plain, in_specs=A, out_specs=A, axis_names={"a"})

    def body(x):
        y = lax.scan(lambda c, _: (sine(c), None), x, None, length=2)[0]
        return y * (1 + lax.axis_index("a").astype(x.dtype)) * lax.psum(np.float32(1), "a")

    scale = np.repeat(np.float32([2, 4]), 2)[:, None]
    want = np.sin(np.sin(X)) * scale
    slope = np.cos(np.sin(X)) * np.cos(X) * scale
    manual = region(body)
    outer = pjit(lambda x: manual(x) * 2, A, A, mesh=mesh)
    close(region(lambda x: sine(x))(X), np.sin(X))
    close(jax.jit(manual)(X), want)
    assert_sharded(outer(X), 2 * want, A, mesh, **CLOSE)
    close(jax.grad(lambda x: outer(x).sum())(X), 2 * slope)
    mapped_gradient = jax.vmap(jax.grad(lambda x: manual(x).sum()))
    close(jax.jit(mapped_gradient)(np.stack([X, X])), np.stack([slope, slope]))
    close(jax.jit(jax.vmap(manual))(np.stack([X, X])), np.stack([want, want]))


def told_where(call, error, message, mark):
    """Checks the whole text of an error, with ``LINE`` for the line of this file with `mark`."""
    with pytest.raises(error) as caught:
        call()
    text, file, line, name, rest = re.split(
        r"used at (.*?):(\d+)(?::\d+)? \((.*?)\)", str(caught.value)
    )
    lines = Path(__file__).read_text().splitlines()
    assert file == __file__
    assert lines[int(line) - 1].endswith(f"# {mark}")
    assert text + "used at LINE" + rest == textwrap.dedent(message).strip("\n")
    assert name


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_over_the_same_axes_of_a_shard_map(mesh, around):
    """Where a region maps all axes none is left; the error names function, axis and line."""
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    double = pjit(lambda batch: batch * 2, None, AB, mesh=mesh)
    region = jax.shard_map(
        lambda x: double(x),  # manual
        mesh=plain,
        in_specs=A,
        out_specs=A,
    )
    message = """
        pjit of `<lambda>` cannot split result over mesh axis 'a', 'b'.
          given     out_axis_resources = P('a', 'b'), used at LINE
          expected  axes that no enclosing shard_map maps over: inside of it they are gone
          fix       drop 'a' from the spec, or from the shard_map's axis_names
    """
    told_where(lambda: around(region)(X), spmd.ShardingError, message, "manual")


def test_without_specs_in_a_fully_manual_region(mesh):
    """A call that splits nothing is the function itself on each block."""
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    call = pjit(lambda x: x - x.mean(), mesh=mesh)
    region = jax.shard_map(lambda x: call(x), mesh=plain, in_specs=AB, out_specs=AB)
    blocks = X.reshape(2, 2, 2, 2)
    want = (blocks - blocks.mean(axis=(1, 3), keepdims=True)).reshape(4, 4)
    for fun in (region, jax.jit(region)):
        close(fun(X), want)


@pytest.mark.parametrize("specs", [(), (A, A)], ids=["without specs", "with specs"])
def test_pmap_around(mesh, specs):
    """A pmap around a call is refused: its devices run one by one, the call on all."""

    def double(x):
        return x * 2

    call = pjit(double, *specs, mesh=mesh)
    message = """
        pjit of `double` cannot run inside of a pmap, or of a shard_map over another mesh.
          given     mesh a=2, b=2, used at LINE
          expected  the mesh of the shard_map, of which each device runs this code by itself
          fix       call the plain function there, or map with jax.vmap(..., spmd_axis_name=...) instead
    """  # noqa: E501 compared as it is printed
    around = jax.pmap(lambda x: call(x))  # pmap
    told_where(lambda: around(STACK[:2]), spmd.MeshError, message, "pmap")


# Jaxprs and shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [fori_of_a_call, custom_jvp_around_calls, cond_in_scan],
    ids=lambda p: p.__name__,
)
def test_jaxpr_is_a_function_again(program, mesh):
    """A jaxpr of a program or of its gradient evaluates, compiles and transforms like it."""
    fun, peer = program(by_pjit(mesh)), program(by_jit)
    jaxpr = jax.make_jaxpr(fun)(X)
    flat = jax.jit(lambda x: jax.tree.leaves(peer(x)))
    close(jax.jit(lambda x: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, x))(X), flat(X))
    again = jax.extend.core.jaxpr_as_fun(jaxpr)
    close(jax.jit(gradient(again))(X), jax.jit(gradient(flat))(X))
    back = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(gradient(fun))(X))
    close(jax.jit(back)(X), [jax.jit(gradient(peer))(X)])


def test_eager_evaluation_of_a_jaxpr_keeps_specs(mesh):
    """Evaluating a jaxpr of a call places its results as the call does."""
    jaxpr = jax.make_jaxpr(pjit(jnp.sin, A, AB, mesh=mesh))(X)
    (y,) = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, X)
    assert_sharded(y, np.sin(X), AB, mesh, **CLOSE)


@programs
def test_eval_shape(program, mesh):
    """Shapes and dtypes are known without compiling, and are those of the peer."""
    before = spmd.counts()
    got = jax.eval_shape(program(by_pjit(mesh)), jax.ShapeDtypeStruct((4, 4), np.float32))
    assert (spmd.counts() - before).compiles == 0
    assert got == jax.eval_shape(program(by_jit), X)


# Export


def exported(fun, *args):
    """Writes a function to bytes and reads it back."""
    written = export.export(fun)(*args)
    return export.deserialize(written.serialize(vjp_order=1))


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["pjit", "jit of pjit"])
def test_export_round_trip(mesh, around):
    """An exported function runs on a mesh with its specs, values and gradient unchanged."""
    fun = pjit(lambda x: jnp.sin(x) * 2, A, AB, mesh=mesh)
    again = exported(around(fun), jax.ShapeDtypeStruct((4, 4), np.float32))
    assert again.nr_devices == 4
    x = put(X, mesh, A)
    assert_sharded(jax.jit(again.call)(x), 2 * np.sin(X), AB, mesh, **CLOSE)
    grad = jax.jit(jax.grad(lambda x: again.call(x).sum()))(x)
    assert_sharded(grad, 2 * np.cos(X), A, mesh, **CLOSE)


def test_export_says_shardings_of_the_boundary(mesh):
    """The boundary of an exported call has the shardings of its specs."""
    fun = pjit(lambda x, y: (x @ y, x.sum()), (A, B), (AB, None), mesh=mesh)
    got = export.export(fun)(X, X)
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    for shardings, specs, avals in (
        (got.in_shardings_jax(plain), (A, B), got.in_avals),
        (got.out_shardings_jax(plain), (AB, P()), got.out_avals),
    ):
        for sharding, spec, aval in zip(shardings, specs, avals, strict=True):
            want = jax.sharding.NamedSharding(plain, spec)
            assert sharding.is_equivalent_to(want, aval.ndim)


@pytest.mark.slow
def test_export_of_a_transformed_program(mesh):
    """A gradient of loops of calls, with a closed-over array, travels."""
    weights = put(X + 1, mesh, A)
    step = pjit(lambda c, _: (jnp.sin(c @ weights), None), (A, None), (A, None), mesh=mesh)
    grad = jax.jit(jax.grad(lambda x: lax.scan(step, x, None, length=2)[0].sum()))
    again = exported(grad, jax.ShapeDtypeStruct((4, 4), np.float32))
    peer = jax.grad(lambda x: jnp.sin(jnp.sin(x @ (X + 1)) @ (X + 1)).sum())
    close(jax.jit(again.call)(put(X, mesh, A)), peer(X))


def test_export_with_symbolic_sizes(mesh):
    """A size that is a symbol at export is split at the call."""
    fun = jax.jit(pjit(lambda x: jnp.sin(x) * 2, A, A, mesh=mesh))
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("n, 4"), np.float32)
    again = exported(fun, shape)
    for n in (4, 8):
        x = np.concatenate([X] * (n // 4))
        assert_sharded(jax.jit(again.call)(put(x, mesh, A)), 2 * np.sin(x), A, mesh, **CLOSE)


def test_exported_function_inside_of_a_call(mesh):
    """An exported program may be called inside of a pjit function, and loops over it."""
    again = exported(pjit(jnp.sin, A, A, mesh=mesh), jax.ShapeDtypeStruct((4, 4), np.float32))

    def twice(x):
        return lax.fori_loop(0, 2, lambda i, x: again.call(x), x)

    outer = pjit(twice, A, B, mesh=mesh)
    assert_sharded(outer(X), np.sin(np.sin(X)), B, mesh, **CLOSE)


# Closed-over constants


def functions_of(text):
    """The names of the private functions of a module."""
    return re.findall(r"func\.func private @([\w.]+)\(", text)


MARKED = np.full((4, 4), 3.25, np.float32) + np.eye(4, dtype=np.float32)


def marked_constants(text):
    """In how many places a module holds the values of `MARKED`."""
    return len([line for line in text.splitlines() if "4.25" in line])


@pytest.mark.parametrize("outer", [jax.jit, pjit], ids=["jit", "pjit"])
@pytest.mark.parametrize("kind", ["host", "device", "mesh"])
def test_constant_of_nested_calls_is_lowered_once(mesh, outer, kind):
    """An array is in the module once for each function that uses it, however often it is called."""
    place = {"host": np.asarray, "device": jnp.asarray, "mesh": lambda v: put(v, mesh, A)}
    constant = place[kind](MARKED)

    def scale(x):
        return x * constant

    def shift(x):
        return jnp.sin(x) + constant

    with mesh:
        one, two = pjit(scale, A, A), pjit(shift, B, B)
        fun = outer(lambda x: two(one(x)) + one(one(x)) + two(x))
        text = fun.lower(X).as_text()
        got = fun(X)
    assert len(functions_of(text)) == marked_constants(text) == 2
    close(got, np.sin(X * MARKED) + MARKED + X * MARKED**2 + np.sin(X) + MARKED)


def test_constant_in_a_scan_and_its_gradient_is_lowered_once(mesh):
    """Loops, gradients and checkpoints of a call do not copy what it closes over."""
    value = jnp.asarray(MARKED)

    def count(wrap):
        step = wrap(lambda c: jnp.sin(c @ value), A, A)
        body = jax.checkpoint(lambda c, _: (step(c), None))
        fun = jax.jit(jax.grad(lambda x: lax.scan(body, x, None, length=3)[0].sum()))
        return marked_constants(fun.lower(X).as_text())

    assert 0 < count(by_pjit(mesh)) <= count(by_jit)


def _double_sine(x):
    return jnp.sin(x) * 2


def test_calls_of_one_inner_function_are_one_function(mesh):
    """Calls in branches, loops and other calls share one function of the module."""
    inner = pjit(_double_sine, A, A, mesh=mesh)
    middle = pjit(lambda x: inner(inner(x)), A, A, mesh=mesh)

    def fun(x):
        y = lax.scan(lambda c, _: (inner(c), None), middle(x), None, length=2)[0]
        return lax.cond(y.sum() > 0, inner, lambda x: x, y) + inner(y)

    for outer in (jax.jit, functools.partial(pjit, mesh=mesh)):
        text = outer(fun).lower(X).as_text()
        assert text.count("stablehlo.sine") == 1
        bodies = text.split("func.func private @")[1:]
        (name,) = [body.split("(")[0] for body in bodies if "stablehlo.sine" in body]
        assert text.count(f"call @{name}(") == 5


# Names and places


def layer_with_a_scope(x):
    """The function whose operations are looked for."""
    with jax.named_scope("my_scope"):
        y = jnp.sin(x)
        return jnp.exp(y) * x  # the product


def frames(text):
    """``{stack_frame_id: set of (file, line)}`` of a printed HLO module."""
    tables = {
        name: re.findall(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)[0].splitlines()
        for name in ("FileNames", "FileLocations", "StackFrames")
    }
    files = {r.split(" ", 1)[0]: r.split(" ", 1)[1].strip('"') for r in tables["FileNames"]}
    places = {}
    for row in tables["FileLocations"]:
        fields = dict(re.findall(r"(\w+)=(\d+)", row))
        places[row.split()[0]] = files[fields["file_name_id"]], int(fields["line"])
    return {
        row.split()[0]: places[re.search(r"file_location_id=(\d+)", row)[1]]
        for row in tables["StackFrames"]
    }


SCOPED = {
    "call": lambda f: f,
    "gradient": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: f(x).sum())),
    "gradient of scan": lambda f: jax.grad(
        lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0].sum()
    ),
    "nested": lambda f: jax.jit(lambda x: f(f(x))),
}


@pytest.mark.parametrize("case", SCOPED)
def test_scope_and_line_survive_into_the_program(case, mesh):
    """Compiled operations keep scope and line of the body, as the peer's do."""
    found = []
    for wrap in (by_pjit(mesh), by_jit):
        fun = SCOPED[case](wrap(layer_with_a_scope, A, A))
        text = jax.jit(fun).lower(X).compile().as_text()
        table = frames(text)
        lines = Path(__file__).read_text().splitlines()
        rows = re.findall(r'op_name="([^"]*)"[^}]*?stack_frame_id=(\d+)', text)
        scoped = {
            (name.rsplit("/", 1)[1], lines[table[frame][1] - 1].strip())
            for name, frame in rows
            if "my_scope" in name and table[frame][0] == __file__
        }
        paths = {re.sub(r"\bpjit\(", "jit(", name) for name, _ in rows if "my_scope" in name}
        found.append((scoped, {p.replace("eval_jaxpr", "closed_call") for p in paths}))
    (ours, our_paths), (theirs, _) = found
    assert any("the product" in line for _, line in ours)
    assert {line for _, line in ours} >= {line for _, line in theirs}
    assert all("jit(layer_with_a_scope)" in p for p in our_paths)


def test_each_call_of_one_function_keeps_its_own_line(mesh):
    """Two calls of one function on two lines are two places in the module."""
    call = pjit(_double_sine, A, A, mesh=mesh)

    def fun(x):
        y = call(x)
        return call(y)

    text = jax.jit(fun).lower(X).as_text(debug_info=True)
    calls = re.findall(r"call @_double_sine\(.*loc\((#loc\d+)\)", text)
    assert len(calls) == len(set(calls)) == 2


# Other transformations of JAX


@pytest.mark.slow
def test_leak_checker_finds_nothing(mesh):
    """Nested loops of calls leak no tracer."""
    with jax.checking_leaks():
        fun = cond_in_scan(by_pjit(mesh))
        close(jax.jit(gradient(fun))(X), jax.jit(gradient(cond_in_scan(by_jit)))(X))


def test_compile_time_evaluation(mesh):
    """`jax.ensure_compile_time_eval` runs a call while the function around it is traced."""
    total = pjit(lambda x: x.sum(), A, mesh=mesh)

    def fun(x):
        with jax.ensure_compile_time_eval():
            scale = float(total(jnp.ones((4, 4))))
        return x * scale

    close(jax.jit(fun)(X), X * 16)
    close(pjit(fun, A, A, mesh=mesh)(X), X * 16)


def test_custom_batching(mesh):
    """`custom_vmap` inside keeps its rule; `sequential_vmap` of a call runs it for each."""

    @jax.custom_batching.custom_vmap
    def fun(x):
        return jnp.sin(x)

    @fun.def_vmap
    def _(size, batched, x):
        return jnp.sin(x) * 7, batched[0]

    close(jax.vmap(pjit(fun, A, A, mesh=mesh))(STACK), 7 * np.sin(STACK))
    one_by_one = jax.custom_batching.sequential_vmap(pjit(jnp.sin, A, A, mesh=mesh))
    close(jax.vmap(one_by_one)(STACK), np.sin(STACK))


def test_closure_convert(mesh):
    """A call that closes over a tracer becomes a function of it."""

    def fun(x):
        scale = x[0]
        call, consts = jax.closure_convert(pjit(lambda y: y @ scale, A, mesh=mesh), x)
        return call(x, *consts).sum()

    close(jax.grad(fun)(X), jax.grad(lambda x: (x @ x[0]).sum())(X))


def test_linear_transpose_of_a_loop(mesh):
    """The transpose of a loop of linear calls is the loop of their transposes."""
    triple = pjit(lambda x: x[::-1] * 3, A, B, mesh=mesh)
    fun = jax.linear_transpose(lambda x: lax.fori_loop(0, 3, lambda i, x: triple(x), x), X)
    close(fun(X)[0], X[::-1] * 27)
