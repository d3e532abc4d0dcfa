"""Two transformations of a sharded function, drawn at random, against the plain function.

The sampler is in `transformations.py`. `pytest` draws a few cases; `pytest -m slow` about 1,000
others, half of which soak, and with `--transformation-cases N` as many as one likes. Old and new
releases of JAX draw slow cases of their own.
"""

import functools
import math
import zlib

from hypothesis import Phase, given, seed, settings
import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
from oracle import counted, mesh_of, put
import pytest
from transformations import TRANSFORMATIONS, Case, T, cases, check

from spmd import Counts, P, pjit, with_sharding_constraint

PER_TEST = 3
PARTS = (1, 2) if jax.__version_info__ < (0, 11) else (3, 4)
U = P.UNCONSTRAINED


@pytest.fixture(autouse=True)
def _quick_compiles():
    """Programs are compiled with few optimizations, and forgotten: thousands need gigabytes."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


# The sampler


def draw(outer, count, part):
    """Checks `count` drawn cases with this outer transformation, the same ones in every run."""
    failed, tries = [], 0

    @seed(zlib.crc32(f"{outer} {part}".encode()))
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        # To explain a failure takes longer than to find it.
        phases=[Phase.generate, Phase.shrink],
    )
    @given(cases(outer))
    def run(case):
        nonlocal tries
        tries += bool(failed)
        if tries > 100 and case not in failed:
            return  # small enough
        try:
            check(case)
        except BaseException:
            failed.append(case)
            raise

    run()


@pytest.mark.few(1)
@pytest.mark.parametrize("outer", TRANSFORMATIONS)
def test_two_transformations(outer):
    """`outer(inner(pjit(f)))` is `outer(inner(f))`, with all declared shardings, traced once."""
    with jax.enable_checks(True):
        draw(outer, PER_TEST, 0)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("outer", TRANSFORMATIONS)
def test_two_transformations_many_cases(outer, part, pytestconfig):
    """As above, for other cases, as many as `--transformation-cases` says."""
    total = pytestconfig.getoption("--transformation-cases")
    draw(outer, math.ceil(total / len(TRANSFORMATIONS) / len(PARTS)), part)


# What the sampler found

FOUND = {
    "a scan whose linear map is transposed and differentiated": Case(
        "scan", T("grad"), T("linear_transpose"), ins=None, outs=None
    ),
    "a gradient with respect to an input that was a residual": Case(
        "linear", T("vjp"), T("linear_transpose"), ins=(P("a"),), outs=None
    ),
    "a gradient through a linear map that keeps an input": Case(
        "custom_jvp",
        T("value_and_grad", pick=3),
        T("linearize"),
        mesh={"a": 2, "b": 2, "c": 2},
        ins=(P("b"), P()),
        outs=(P(None, ("c", "b", "a")),),
        at=P("a", ("c", "b")),
    ),
    "a committed cotangent of an unconstrained result": Case(
        "linear", T("vjp"), T("value_and_grad", pick=2),
        ins=None, outs=(P(U, U),), kinds=("placed",),
    ),
    "a product of unconstrained results": Case(
        "custom_jvp", T("jacrev", pick=3), T("twice"), mesh={"a": 3}, devices=(0, 1, 2),
        ins=None, outs=(P(U, U),), at=P("a"), kinds=("host", "elsewhere"),
    ),
    "a residual that is not committed": Case(
        "complex", T("identity"), T("vjp"), mesh={"c": 2}, devices=(1, 6),
        ins=None, outs=None, at=P("c"), kinds=("loose",), seed=9,
    ),
    "a cotangent that is a residual and not committed": Case(
        "scan", T("linearize"), T("grad"), devices=(6, 5, 4, 2, 1, 7, 0, 3),
        ins=(P(None, ("b", "a")), P()), outs=None, seed=5,
    ),
    "a loop over residuals on a permuted mesh": Case(
        "nested", T("grad"), T("map", in_axes=(2, None), size=1), devices=(7, 2, 3, 5, 0, 1, 4, 6),
        ins=None, outs=None, kinds=("placed", "loose"),
    ),
}  # fmt: skip


@pytest.mark.few(0)
@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_cases_that_once_failed(case):
    """What the sampler once found holds."""
    check(case)


# Second derivatives, by finite differences

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
W = np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8) / 3


def _loss(x, w):
    h = with_sharding_constraint(jnp.tanh(x @ w), P("data", "model"))
    return (h * h).sum()


def _scanned(x, w):
    def step(c, row):
        c = with_sharding_constraint(jnp.sin(c * row[None, :]), P("model", "data"))
        return c, c.mean(axis=0)

    return jax.lax.scan(step, x, w[:3])


def _branching(x, w):
    y = jax.lax.cond(x[0, 0] < 0, lambda x: x @ w, lambda x: x * w, x)
    return with_sharding_constraint(jax.nn.softmax(y, axis=1), P(None, ("model", "data")))


@jax.checkpoint
def _rematerialized(x, w):
    return {"y": with_sharding_constraint(jnp.tanh(x * w), P("model")).sum(axis=0) ** 2}


@pytest.mark.few(0)
@pytest.mark.parametrize("fun", [_loss, _scanned, _branching, _rematerialized])
def test_second_derivatives_by_finite_differences(fun, mesh):
    """First and second derivatives, forward and reverse, are limits of difference quotients."""
    f = pjit(fun, in_axis_resources=(P("data"), P(None, "model")), mesh=mesh)
    check_grads(f, (X, W), order=2, modes=("fwd", "rev"), atol=0.03, rtol=0.03, eps=1e-2)


# Counts


def _fresh(mesh):
    # A function that no other test has traced.
    return pjit(
        lambda x, w: _loss(x, w),
        in_axis_resources=(P("data"), P(None, "model")),
        out_axis_resources=P(),
        mesh=mesh,
    )


def _counts_of(*calls):
    """What each call traced, lowered and compiled."""
    found = []
    for call in calls:
        result, count = counted(call)
        jax.block_until_ready(result)
        found.append((count.traces, count.lowerings, count.compiles))
    return found


NONE = (0, 0, 0)  # traces, lowerings, compiles
STACK = np.stack([X, 2 * X, -X])
everything = jax.checkpoint_policies.everything_saveable


def _half_square(f):
    """A function of which a gradient of the gradient can be taken."""
    return lambda x, w: (jax.grad(f)(x, w) ** 2).sum() / 2


# Per pattern: what is called, given the function; then per call what has to happen. A call, a JVP
# and a mapped call are one program; a gradient is two, a forward and a backward half.
PATTERNS = {
    "call": (lambda f: [f, f], [(1, 1, 1), NONE]),
    "grad": (lambda f: [jax.grad(f), jax.grad(f)], [(1, 2, 2), NONE]),
    # The trace is there; the forward half is not the call: it returns residuals too.
    "call, then grad": (lambda f: [f, jax.grad(f), f], [(1, 1, 1), (0, 2, 2), NONE]),
    # Each needs other residuals and has other results: two programs each.
    "grad of other arguments": (
        lambda f: [jax.grad(f), jax.grad(f, 1), jax.grad(f, (0, 1)), jax.grad(f)],
        [(1, 2, 2), (0, 2, 2), (0, 2, 2), NONE],
    ),
    "grad of a function made anew": (
        lambda f: [jax.grad(lambda x, w: f(x, w) * 2), jax.grad(lambda x, w: f(x, w) * 3)],
        [(1, 2, 2), NONE],
    ),
    # Both calls have the same two halves.
    "grad of a sum of two calls": (
        lambda f: [jax.grad(lambda x, w: f(x, w) + f(2 * x, w))] * 2,
        [(1, 2, 2), NONE],
    ),
    "jvp": (
        lambda f: [lambda x, w: jax.jvp(f, (x, w), (x, w))] * 2,
        [(1, 1, 1), NONE],
    ),
    "vmap": (
        lambda f: [lambda x, w, n=n: jax.vmap(f, (0, None))(STACK[:n], w) for n in (3, 3, 2)],
        [(1, 1, 1), NONE, (0, 1, 1)],
    ),
    "vmap of grad": (
        lambda f: [lambda x, w: jax.vmap(jax.grad(f), (0, None))(STACK, w)] * 2,
        [(1, 2, 2), NONE],
    ),
    # One program for all basis vectors; jacrev has a forward half too.
    "jacfwd": (lambda f: [jax.jacfwd(f)] * 2, [(1, 1, 1), NONE]),
    "jacrev": (lambda f: [jax.jacrev(f)] * 2, [(1, 2, 2), NONE]),
    # The JVP of both halves of the gradient, mapped over the basis.
    "hessian": (lambda f: [jax.hessian(f)] * 2, [(1, 2, 2), NONE]),
    "Hessian-vector product": (
        lambda f: [lambda x, w: jax.jvp(lambda x: jax.grad(f)(x, w), (x,), (x,))] * 2,
        [(1, 2, 2), NONE],
    ),
    # Each half of the gradient has two halves.
    "grad of grad": (lambda f: [jax.grad(_half_square(f))] * 2, [(1, 4, 4), NONE]),
    # The value, then at the backward pass the value with residuals and the pullback. Called one by
    # one, JAX cannot save across the two whatever the policy says; stock jit compiles three too.
    "grad of checkpoint": (lambda f: [jax.grad(jax.checkpoint(f))] * 2, [(1, 3, 3), NONE]),
    "grad of checkpoint that saves": (
        lambda f: [jax.grad(jax.checkpoint(f, policy=everything))] * 2,
        [(1, 3, 3), NONE],
    ),
    # The program is JAX's own.
    "jit": (lambda f: [jax.jit(f)] * 2, [(1, 0, 0), NONE]),
    "jit of grad": (lambda f: [jax.jit(jax.grad(f))] * 2, [(1, 0, 0), NONE]),
    "jit of grad of checkpoint": (
        lambda f: [jax.jit(jax.grad(jax.checkpoint(f)))] * 2,
        [(1, 0, 0), NONE],
    ),
    "scan": (
        lambda f: [lambda x, w: jax.lax.scan(lambda c, x: (c + f(x, w), None), 0.0, STACK)] * 2,
        [(1, 0, 0), NONE],
    ),
    # Two functions, one program.
    "pjit of grad": (
        lambda f: [pjit(lambda x, w: jax.grad(f)(x, w))] * 2,
        [(2, 1, 1), NONE],
    ),
    "make_jaxpr, then call": (lambda f: [jax.make_jaxpr(f), f], [(1, 0, 0), (0, 1, 1)]),
    "linear_transpose of jvp": (lambda f: [functools.partial(_pulled, f)] * 2, [(1, 2, 2), NONE]),
}


def _pulled(f, x, w):
    push = functools.partial(_push, f, x, w)
    return jax.linear_transpose(push, x)(np.float32(1))


def _push(f, x, w, t):
    return jax.jvp(lambda x: f(x, w), (x,), (t,))[1]


@pytest.mark.few(1)
@pytest.mark.parametrize(("calls", "want"), PATTERNS.values(), ids=PATTERNS)
def test_traces_lowerings_and_compiles(calls, want, in_mesh):
    """Each pattern of calls traces the body once and compiles what it needs, once."""
    x, w = put(X, in_mesh, P("data")), put(W, in_mesh, P(None, "model"))
    functions = calls(_fresh(in_mesh))
    assert _counts_of(*(functools.partial(f, x, w) for f in functions)) == want


def test_training_loop_compiles_once(mesh):
    """In a training loop only the first step compiles: a forward and a backward half."""
    gradient = jax.value_and_grad(_fresh(mesh), argnums=1)
    x, w = put(X, mesh, P("data")), put(W, mesh, P(None, "model"))
    found, losses = [], []
    for _ in range(5):
        (loss, dw), count = counted(gradient, x, w)
        w = jax.block_until_ready(w - 0.01 * dw)
        found.append(count)
        losses.append(float(loss))
    assert found == [Counts(traces=1, lowerings=2, compiles=2)] + [Counts()] * 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_linear_map_compiles_once(mesh):
    """The map that `linearize` or `vjp` returns compiles at its first use, also after another."""
    f = _fresh(mesh)
    x, w = put(X, mesh, P("data")), put(W, mesh, P(None, "model"))
    maps = []

    def linearize():
        y, push = jax.linearize(f, x, w)
        maps.append(lambda: push(x, w))
        return y

    def pull():
        y, pull = jax.vjp(f, x, w)
        maps.append(lambda: pull(np.float32(1)))
        return y

    first = [(1, 1, 1), (0, 1, 1), NONE, NONE, NONE]
    assert _counts_of(linearize, *[lambda: maps[-1]()] * 3, linearize) == first
    assert _counts_of(lambda: maps[-1]()) == [NONE]
    found = _counts_of(pull, *[lambda: maps[-1]()] * 2, pull, lambda: maps[-1]())
    assert found[2:] == [NONE] * 3
    assert sum(compiles for _, _, compiles in found) <= 2
    assert all(traces == 0 for traces, _, _ in found)


def test_shapes_have_programs_of_their_own():
    """The trace of another shape is another one; going back costs nothing."""
    f = _fresh(mesh_of({"data": 2, "model": 2}))
    small = X[:4], W
    calls = [functools.partial(jax.grad(f), *args) for args in ((X, W), small, (X, W), small)]
    assert _counts_of(*calls) == [(1, 2, 2), (1, 2, 2), NONE, NONE]
