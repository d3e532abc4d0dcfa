"""Dead code, type checking, host callbacks, mutable references and `checkify` in calls."""

import re
import traceback

import jax
from jax import lax
from jax.ad_checkpoint import print_saved_residuals
from jax.experimental import checkify, io_callback
from jax.extend.core import check_jaxpr
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, counted, mesh_of, put
import pytest

import spmd
from spmd import P, pjit

X = (np.arange(16, dtype=np.float32).reshape(4, 4) - 6) / 8
V = jnp.cos  # the direction of a JVP is a function of the point
STACK = np.stack([X, 2 * X, -X])
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
A, B, AB = P("a"), P("b"), P("a", "b")

pytestmark = pytest.mark.usefixtures("checked_without_optimizer")


@pytest.fixture
def mesh():
    """The 2x2 mesh `a, b`; four devices compile faster than eight."""
    return mesh_of({"a": 2, "b": 2})


def by_jit(fun, *_, **__):
    """Wraps as the peer does."""
    return jax.jit(fun)


def by_pjit(mesh):
    """Returns what wraps a function with specs of its inputs and outputs."""
    return lambda fun, *specs, **options: pjit(fun, *specs, mesh=mesh, **options)


def close(got, want):
    """Asserts that two trees have the same structure and values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), **CLOSE)


# Dead code


def two_results(x, y):
    """Two results of which each needs one argument, and a third that needs both."""
    return {"x": jnp.sin(x), "y": jnp.cos(y), "both": jnp.tanh(x * y)}


def work_of(text):
    """How many sines, cosines and tanhs a module computes."""
    return tuple(text.count(f"stablehlo.{name} ") for name in ("sine", "cosine", "tanh"))


def inputs_of(text):
    """How many inputs the entry of a module has."""
    return re.findall(r"func\.func public @main\((.*?)\) ->", text)[0].count("%arg")


DEAD = {
    # The value that is asked for: sines, cosines, tanhs and inputs of the program.
    "one result": (lambda f: lambda x, y: f(x, y)["x"], (1, 0, 0), 1),
    "the other": (lambda f: lambda x, y: f(x, y)["y"], (0, 1, 0), 1),
    "both": (lambda f: lambda x, y: f(x, y)["both"], (0, 0, 1), 2),
    "none": (lambda f: lambda x, y: (f(x, y), x)[1], (0, 0, 0), 1),
    "gradient of one": (
        lambda f: jax.grad(lambda x, y: f(x, y)["x"].sum()),
        (0, 1, 0),
        1,
    ),
    "gradient of an unused argument": (
        lambda f: jax.grad(lambda x, y: f(x, y)["x"].sum(), argnums=1),
        (0, 0, 0),
        0,
    ),
    "gradient of both": (
        lambda f: jax.grad(lambda x, y: f(x, y)["both"].sum(), argnums=(0, 1)),
        (0, 0, 1),
        2,
    ),
    "vmap": (lambda f: lambda x, y: jax.vmap(f)(x[None], y[None])["y"], (0, 1, 0), 1),
    "tangent only": (
        lambda f: lambda x, y: jax.jvp(lambda x: f(x, y)["x"], (x,), (x,))[1],
        (0, 1, 0),
        1,
    ),
    "nested": (lambda f: lambda x, y: f(f(x, y)["x"], y)["x"], (2, 0, 0), 1),
    "scan": (
        lambda f: lambda x, y: lax.scan(lambda c, _: (f(c, y)["x"], None), x, None, length=2)[0],
        (1, 0, 0),
        1,
    ),
    "scan with outputs that nobody wants": (
        lambda f: lambda x, y: lax.scan(lambda c, _: (f(c, y)["x"], f(c, y)), x, None, length=2)[0],
        (1, 0, 0),
        1,
    ),
    "checkpoint": (
        lambda f: jax.grad(jax.checkpoint(lambda x, y: f(x, y)["x"].sum())),
        (0, 1, 0),
        1,
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("case", DEAD)
def test_dead_code_does_not_reach_the_program(case, mesh):
    """What nobody uses is neither computed nor an input; one function that is used once counts."""
    asked, work, inputs = DEAD[case]
    fun = asked(pjit(two_results, (A, B), AB, mesh=mesh))
    lowered = jax.jit(fun).lower(X, X)
    compiled = lowered.compile().as_text()
    if case != "nested":
        assert work_of(lowered.as_text()) == work
    assert inputs_of(lowered.as_text()) == inputs
    live = tuple(len(re.findall(rf" {n}\(", compiled)) for n in ("sine", "cosine", "tanh"))
    assert live == work
    close(jax.jit(fun)(X, X), jax.jit(asked(jax.jit(two_results)))(X, X))


def test_dead_argument_of_a_call(mesh):
    """An argument that the body does not use is no parameter of the program, unless kept."""
    for keep, inputs in ((False, 1), (True, 2)):
        fun = pjit(lambda x, y: x * 2, (A, B), A, keep_unused=keep, mesh=mesh)
        assert inputs_of(fun.lower(X, X).as_text()) == inputs
        assert_sharded(fun(X, X), 2 * X, A, mesh)


def test_dead_residuals_are_not_saved(mesh, capsys):
    """The residuals of a gradient are those that the results in use need."""
    for use, most in (("x", 1), ("y", 1), ("both", 4)):
        saved = []
        for wrap in (by_pjit(mesh), by_jit):
            call = wrap(two_results, (A, B), AB)
            print_saved_residuals(lambda x, y, c=call, u=use: c(x, y)[u], X, X)
            saved.append(len(capsys.readouterr().out.splitlines()))
        assert 0 < saved[0] == saved[1] <= most


def test_dead_results_under_eager_gradient(mesh):
    """An eager gradient compiles no program for a result that nobody uses."""
    fun = pjit(lambda x: (jnp.sin(x), jnp.cos(x).sum()), A, (A, None), mesh=mesh)
    grad, first = counted(jax.grad(lambda x: fun(x)[0].sum()), put(X, mesh, A))
    close(grad, np.cos(X))
    assert first.compiles == 2
    _, again = counted(jax.grad(lambda x: fun(x)[0].sum()), put(X, mesh, A))
    assert again == spmd.Counts()


# Type checking


def test_call_with_arguments_of_another_type_is_refused(mesh):
    """JAX's checker compares the operands of a call with the types of its body."""
    fun = pjit(lambda x, y: x.sum() + y.sum(), (A, B), mesh=mesh)
    jaxpr = jax.make_jaxpr(fun)(X, np.ones(6, np.float32)).jaxpr
    check_jaxpr(jaxpr)
    (eqn,) = jaxpr.eqns
    for wrong in (
        eqn.replace(invars=eqn.invars[::-1]),
        eqn.replace(invars=eqn.invars[:1]),
        eqn.replace(outvars=jaxpr.invars[:1]),
    ):
        with pytest.raises(Exception, match="pjit"):
            check_jaxpr(jaxpr.replace(eqns=[wrong]))


def test_transformed_jaxprs_pass_the_checks(mesh):
    """Every transformation of a call leaves a jaxpr that JAX's checker accepts."""
    call = pjit(lambda x: {"s": jnp.sin(x), "n": x.sum(), "i": jnp.argmax(x)}, A, mesh=mesh)

    def scalar(x):
        return lax.scan(lambda c, _: (call(c)["s"], call(c)["n"]), x, None, length=2)[1].sum()

    for fun in (
        scalar,
        jax.grad(scalar),
        jax.vmap(jax.grad(scalar)),
        jax.grad(jax.checkpoint(scalar)),
        lambda x: jax.jvp(jax.grad(scalar), (x,), (x,)),
        lambda x: jax.linearize(scalar, x)[1](x),
    ):
        x = STACK if fun is not scalar and "vmap" in repr(fun) else X
        shape = jax.ShapeDtypeStruct((3, 4, 4) if x is STACK else (4, 4), np.float32)
        jaxpr = jax.make_jaxpr(fun)(shape)
        check_jaxpr(jaxpr.jaxpr)


# Host callbacks


def effects_of(kind, log):
    """An identity that appends the sum of its argument to `log`."""

    def note(v):
        log.append(round(float(np.sum(v)), 2))

    def ordered_io(x):
        io_callback(note, None, x.sum(), ordered=True)
        return x

    def io(x):
        io_callback(note, None, x.sum())
        return x

    def debug(x):
        jax.debug.callback(note, x.sum())
        return x

    def ordered_debug(x):
        jax.debug.callback(note, x.sum(), ordered=True)
        return x

    def returned(v):
        note(v)
        return np.asarray(v)

    @jax.custom_jvp
    def pure(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(returned, shape, x, vmap_method="sequential")

    pure.defjvp(lambda p, t: (pure(p[0]), t[0]))
    return locals()[kind]


S0, S1, S2 = (round(float(np.sum(v)), 2) for v in (X, np.sin(X), np.sin(np.sin(X))))
MAPPED = [round(float(v.sum()), 2) for v in STACK]


def loop(f, n=3):
    """`n` steps of a loop."""
    return lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=n)[0]


#: How to use the function, and by hand what the host sees.
USES = {
    "twice": (lambda f: (f(X), f(X)), [S0, S0]),
    "jit": (lambda f: jax.jit(f)(X), [S0]),
    "nested": (lambda f: jax.jit(lambda x: f(f(x)))(X), [S0, S1]),
    "unused": (lambda f: jax.jit(lambda x: (f(x), x)[1])(X), [S0]),
    "scan": (lambda f: loop(f)(X), [S0, S1, S2]),
    "scan in jit": (lambda f: jax.jit(loop(f))(X), [S0, S1, S2]),
    "while": (
        lambda f: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, X)),
        [S0, S1],
    ),
    "taken branch": (lambda f: lax.cond(X.sum() > 0, f, lambda x: x, X), [S0]),
    "other branch": (lambda f: lax.cond(X.sum() < 0, f, lambda x: x, X), []),
}
#: What has no rule for an effect whose order counts, or for an `io_callback`.
DIFFERENTIATED = {
    "gradient": (lambda f: jax.grad(lambda x: f(x).sum())(X), [S0]),
    "gradient in jit": (lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X), [S0]),
    "jvp": (lambda f: jax.jvp(f, (X,), (X,)), [S0]),
    "linear map twice": (
        lambda f: (lambda push: (push(X), push(X)))(jax.linearize(f, X)[1]),
        [S0],
    ),
    "pull back twice": (lambda f: (lambda pull: (pull(X), pull(X)))(jax.vjp(f, X)[1]), [S0]),
    "gradient of scan": (lambda f: jax.grad(lambda x: loop(f)(x).sum())(X), [S0, S1, S2]),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(lambda x: f(x).sum()))(X), [S0, S0]),
}
VMAPPED = {
    "vmap": (lambda f: jax.vmap(f)(STACK), MAPPED),
    "vmap in jit": (lambda f: jax.jit(jax.vmap(f))(STACK), MAPPED),
}
#: Kinds of callback, and what may be done with them.
KINDS = {
    "ordered_io": USES,
    "io": USES | VMAPPED,
    "debug": USES | DIFFERENTIATED | VMAPPED,
    "ordered_debug": USES | DIFFERENTIATED | VMAPPED,
}
#: Effects whose order counts, and those that many devices can have.
ORDERED, ONE_DEVICE = ("ordered_io", "ordered_debug"), ("ordered_debug",)


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("kind", "use"), [(kind, use) for kind, uses in KINDS.items() for use in uses]
)
def test_callback_runs_as_often_as_the_function(kind, use, mesh):
    """A host callback in a call runs exactly as often as a hand count says, in program order."""
    if kind in ONE_DEVICE:
        mesh = mesh_of({"a": 1, "b": 1})
    log = []
    effect = effects_of(kind, log)
    call = pjit(lambda x: jnp.sin(effect(x)), A, B, mesh=mesh)
    run, want = KINDS[kind][use]
    jax.block_until_ready(run(call))
    jax.effects_barrier()
    assert (log if kind in ORDERED else sorted(log)) == (want if kind in ORDERED else sorted(want))


@pytest.mark.slow
@pytest.mark.parametrize("use", ["scan", "gradient of scan", "vmap", "checkpoint", "unused"])
def test_pure_callback_gives_its_values(use, mesh):
    """A pure callback computes on the host what the program needs, and the derivative follows."""
    log = []
    effect = effects_of("pure", log)
    run, _ = (USES | DIFFERENTIATED | VMAPPED)[use]
    got = run(pjit(lambda x: jnp.sin(effect(x)), A, B, mesh=mesh))
    close(got, run(jax.jit(jnp.sin)))
    jax.effects_barrier()
    assert bool(log) == (use != "unused")  # a pure callback is dead code where nobody uses it


@pytest.mark.parametrize("use", ["gradient", "vmap"])
def test_ordered_io_callback_has_no_derivative_and_no_map(use, mesh):
    """What `jax.jit` refuses of an ordered `io_callback`, a call refuses in the same words."""
    run, _ = (DIFFERENTIATED | VMAPPED)[use]
    texts = []
    for wrap in (by_pjit(mesh), by_jit):
        effect = effects_of("ordered_io", [])
        with pytest.raises(ValueError, match="IO callback") as e:
            run(wrap(lambda x, effect=effect: jnp.sin(effect(x)), A, B))
        texts.append(str(e.value))
    assert texts[0] == texts[1]


def test_debug_print_in_a_loop_in_a_call(mesh, capfd):
    """Prints of a loop inside of a call come once per step, eagerly and from an outer program."""

    def fun(x):
        def step(c, i):
            jax.debug.print("step {} {}", i, c.sum())
            return c + 1, None

        return lax.scan(step, x, jnp.arange(3))[0]

    call = pjit(fun, A, A, mesh=mesh)
    for run in (call, jax.jit(call), jax.jit(jax.grad(lambda x: call(x).sum()))):
        jax.block_until_ready(run(X))
        jax.effects_barrier()
        lines = [s for s in capfd.readouterr().out.splitlines() if s.startswith("step")]
        assert lines == [f"step {i} {X.sum() + 16 * i}" for i in range(3)]


def test_results_of_an_ordered_callback_in_a_loop(mesh):
    """Values that an ordered callback returns flow through the loop in order."""
    state = [0.0]

    def tick(v):
        state[0] += 1
        return np.float32(state[0])

    def fun(x):
        return x + io_callback(tick, jax.ShapeDtypeStruct((), np.float32), x[0, 0], ordered=True)

    call = pjit(fun, A, A, mesh=mesh)
    close(jax.jit(loop(call))(X), X + 6)
    close(call(X), X + 4)
    close(jax.jit(lambda x: call(call(x)))(X), X + 11)


# Mutable references


class Refs:
    """Makes references: on the mesh for `pjit`, on one device for the peer."""

    def __init__(self, mesh=None):
        self.mesh = mesh
        self.wrap = by_jit if mesh is None else by_pjit(mesh)

    def new(self, value):
        """A reference that holds a value."""
        return jax.new_ref(jnp.asarray(value) if self.mesh is None else put(value, self.mesh, A))


def write(r, x):
    """Replaces what is there."""
    r[...] = r[...] * 2 + x


def ref_argument(m):
    """Several calls in a row on one reference, with and without a result."""
    r = m.new(X)
    f = m.wrap(write, (A, A))
    g = m.wrap(lambda r, x: (write(r, x), r[0] + 1)[1], (A, B))
    f(r, X), f(r, X)
    return g(r, X), f(r, -X), r[...]


def ref_argument_under_jit(m):
    """A call on a reference, twice in an outer program, which runs twice."""
    r, f = m.new(X), m.wrap(write, (A, A))
    g = jax.jit(lambda r, x: (f(r, x), f(r, x * 2), r[1])[2])
    return g(r, X), g(r, X), r[...]


def ref_read_only(m):
    """A reference that is only read."""
    r, f = m.new(X), m.wrap(lambda r: jnp.sin(r[...]), A, B)
    return f(r), jax.jit(f)(r), r[...]


def ref_inside(m):
    """A reference that lives and dies inside of the call."""

    def fun(x):
        r = jax.new_ref(x)
        r[0] = jnp.sin(r[0]) * 2
        r[1:3, 2] = x[1:3, 0]
        jax.ref.addupdate(r, 3, x[0])
        return jax.ref.freeze(r) * r.shape[0]

    f = m.wrap(fun, A, B)
    grad = jax.grad(lambda x: f(x).sum())
    both = jax.jit(lambda x: (f(x), grad(x), jax.vmap(grad)(jnp.stack([x, -x]))))
    return f(X), both(X)


def ref_closed_over(m):
    """A reference that the function closes over."""
    r = m.new(X)
    f = m.wrap(lambda x: write(r, x), A)
    f(X), jax.jit(f)(X), f(X)
    return r[...]


def ref_of_an_outer_trace(m):
    """References made in an outer program, passed and closed over."""

    def fun(x):
        r = jax.new_ref(x)
        m.wrap(write, (A, A))(r, x)
        m.wrap(lambda x: write(r, jnp.sin(x)), A)(x)
        return r[...]

    return jax.jit(fun)(X), jax.jit(jax.grad(lambda x: (fun(x) ** 2).sum()))(X)


def ref_in_loops(m):
    """Calls on references in scan, fori, while and cond."""
    r, f = m.new(X), m.wrap(write, (A, A))
    lax.scan(lambda c, x: (f(r, X * x), None), None, jnp.arange(3.0))
    lax.fori_loop(0, 2, lambda i, c: (f(r, X), c)[1], 0)
    lax.while_loop(lambda i: i < 2, lambda i: (f(r, X), i + 1)[1], 0)
    lax.cond(True, lambda: f(r, X), lambda: None)
    lax.cond(False, lambda: f(r, X), lambda: None)
    return r[...]


def ref_and_loop_inside(m):
    """A loop inside of a call accumulates into an argument."""

    def fun(r, xs):
        def step(c, x):
            r[0] = r[0] + x
            return c + r[1], r[0].sum()

        return lax.scan(step, xs[0], xs)

    r, f = m.new(X), m.wrap(fun, (A, A), (B, None))
    return f(r, X), jax.jit(f)(r, X), r[...]


def ref_through_a_gradient(m):
    """The gradient of a function that writes and reads a reference in a call."""

    def loss(x):
        r = jax.new_ref(x * 0)
        m.wrap(lambda r, x: r.__setitem__(..., jnp.sin(x) * x), (A, A))(r, x)
        m.wrap(lambda r: r.__setitem__(..., r[...] ** 2), A)(r)
        return r[...].sum()

    grad = jax.grad(loss)
    checkpointed = jax.jit(jax.grad(jax.checkpoint(loss)))
    forward = jax.jit(lambda x: jax.jvp(loss, (x,), (V(x),)))
    return grad(X), jax.jit(grad)(X), checkpointed(X), forward(X), jax.jit(jax.vmap(grad))(STACK)


def ref_beside_a_gradient(m):
    """A gradient of a call that logs into a reference."""
    r = m.new(np.zeros_like(X))

    def fun(x, r):
        r[...] += lax.stop_gradient(x) * 2
        return jnp.sin(x)

    f = m.wrap(fun, (A, A), B)
    grads = [jax.grad(lambda x: f(x, r).sum())(X), jax.jit(jax.grad(lambda x: f(x, r).sum()))(X)]
    return grads, r[...]


def ref_that_gradients_accumulate_into(m):
    """`vjp(...).with_refs` adds cotangents of a call into a reference, in a loop too."""
    r, f = m.new(np.zeros_like(X)), m.wrap(jnp.sin, A, A)

    def step(r, x):
        jax.vjp(f, x)[1].with_refs(r)(jnp.ones_like(x))

    step(r, jnp.asarray(X))
    jax.jit(lambda r, xs: lax.scan(lambda c, x: (step(r, x), None), None, xs))(r, STACK)
    return r[...]


def ref_that_a_custom_vjp_writes(m):
    """A cotangent that is stashed in a reference inside of a call."""
    r = m.new(np.zeros_like(X))
    stash = jax.custom_vjp(lambda r, x: x)
    stash.defvjp(lambda r, x: (x, r), lambda r, ct: (r.__setitem__(..., ct), (None, ct))[1])
    f = m.wrap(lambda x: jnp.sin(stash(r, x)).sum(), A)
    return jax.grad(f)(X), r[...]


def ref_mapped(m):
    """A reference with a mapped dimension."""
    r = jax.new_ref(jnp.asarray(STACK))
    f = m.wrap(write, (A, A))
    jax.vmap(f)(r, STACK)
    return r[...]


def ref_in_nested_calls(m):
    """Calls in calls on one reference, and a tree of references."""
    t = {"a": m.new(X), "b": [m.new(2 * X)]}
    inner = m.wrap(lambda r: r.__setitem__(..., r[...] * 2), A)
    swap = m.wrap(lambda a, b: jax.ref.swap(a, ..., b[...]), (A, A), B)
    outer = m.wrap(lambda t: (inner(t["a"]), inner(t["a"]), swap(t["a"], t["b"][0]))[2], A, A)
    return outer(t), t["a"][...], t["b"][0][...], jax.freeze(t["a"])


def ref_by_stages(m):
    """Lowering and compiling ahead, and a jaxpr that is evaluated."""
    r, f = m.new(X), m.wrap(write, (A, A))
    compiled = f.lower(r, X).compile()
    compiled(r, X), compiled(r, X)
    jaxpr = jax.make_jaxpr(f)(r, X)
    jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, r, jnp.asarray(X))
    return r[...], f.eval_shape(r, X) is None


REFS = [v for k, v in list(globals().items()) if k.startswith("ref_")]


@pytest.mark.few(1)
@pytest.mark.parametrize("program", REFS, ids=lambda p: p.__name__)
def test_reference(program, mesh):
    """Programs that read and write references give what the peer gives, and leave it there."""
    close(program(Refs(mesh)), program(Refs()))


def test_reference_keeps_its_sharding(mesh):
    """A write inside of a call leaves the reference where it was, and compiles once."""
    r, f = jax.new_ref(put(X, mesh, AB)), pjit(write, mesh=mesh)
    _, first = counted(f, r, X)
    _, again = counted(f, r, X)
    assert (first.compiles, again.compiles) == (1, 0)
    assert_sharded(r[...], 4 * X + 3 * X, AB, mesh, **CLOSE)


def test_reference_given_twice_is_refused(mesh):
    """One reference as two arguments is an error that names both, before anything runs."""
    r = jax.new_ref(put(X, mesh, A))

    def both(a, b):
        a[...] = b[...] * 2

    f = pjit(both, mesh=mesh)
    for call in (f.lower, f):  # a call would wait for itself for ever
        with pytest.raises(spmd.ArgumentError) as e:
            call(r, r)
        message = re.sub("used at .*", "used at LINE", str(e.value))
        assert message.startswith("pjit of `both` cannot take one reference as a and as b.\n")
        assert "used at LINE" in message
    np.testing.assert_array_equal(r[...], X)


# Checkify


def logarithm(x):
    """NaN below zero."""
    return jnp.log(x)


def checked(x):
    """A check of the user's own."""
    checkify.check(x[0, 0] > 0, "the first is {v}", v=x[0, 0])
    return x * 2


EVERY = checkify.all_checks
#: Which errors to look for, the program, its arguments, and whether it must find one.
CHECKED = {
    "nan": (checkify.nan_checks, lambda w: w(logarithm, A, B), (X,), "nan generated"),
    "no nan": (checkify.nan_checks, lambda w: w(logarithm, A, B), (X + 2,), None),
    "nan is not looked for": (checkify.user_checks, lambda w: w(logarithm, A, B), (X,), None),
    "division": (checkify.div_checks, lambda w: w(jnp.divide, (A, A), B), (X, X), "by zero"),
    "index": (
        checkify.index_checks,
        lambda w: w(lambda x, i: x[i], (A, None)),
        (X, np.int32(7)),
        "out-of-bounds",
    ),
    "index inside": (
        checkify.index_checks,
        lambda w: w(lambda x, i: x[i], (A, None)),
        (X, np.int32(2)),
        None,
    ),
    "user": (checkify.user_checks, lambda w: w(checked, A, B), (X,), "the first is -0.75"),
    "user is content": (checkify.user_checks, lambda w: w(checked, A, B), (X + 2,), None),
    "all at once, user": (EVERY, lambda w: w(checked, A, B), (X,), "the first is"),
    "all at once, nan": (EVERY, lambda w: w(logarithm, A, B), (X,), "nan generated"),
    "nested": (
        EVERY,
        lambda w: w(lambda x: w(logarithm, B, A)(x) * 2, A, B),
        (X,),
        "nan generated",
    ),
    "scan of calls": (EVERY, lambda w: loop(w(logarithm, A, A)), (X + 3,), "nan generated"),
    "scan in a call": (EVERY, lambda w: w(loop(logarithm), A, B), (X + 3,), "nan generated"),
    "scan that is fine": (EVERY, lambda w: loop(w(logarithm, A, A), 1), (X + 3,), None),
    "while": (
        EVERY,
        lambda w: (
            lambda x: lax.while_loop(
                w(lambda c: c[0] < 3), lambda c: (c[0] + 1, w(logarithm, A, A)(c[1])), (0, x)
            )[1]
        ),
        (X + 3,),
        "nan generated",
    ),
    "branch": (
        EVERY,
        lambda w: lambda x: lax.cond(x.sum() > 0, w(logarithm, A, A), lambda x: x, x),
        (X,),
        "nan generated",
    ),
    "other branch": (
        EVERY,
        lambda w: lambda x: lax.cond(x.sum() < 0, w(logarithm, A, A), lambda x: x, x),
        (X,),
        None,
    ),
    "gradient": (
        checkify.float_checks,
        lambda w: jax.grad(lambda x: w(lambda x: jnp.sqrt(x).sum(), A)(x)),
        (np.maximum(X, 0),),
        "by zero",
    ),
    "gradient of checkpoint": (
        EVERY,
        lambda w: jax.grad(lambda x: jax.checkpoint(w(logarithm, A, A))(x).sum()),
        (X,),
        "nan generated",
    ),
    "vmap": (EVERY, lambda w: jax.vmap(w(logarithm, A, A)), (STACK,), "nan generated"),
    "vmap of a user's check": (EVERY, lambda w: jax.vmap(w(checked, A, A)), (STACK,), "the first"),
    "dead": (EVERY, lambda w: w(lambda x: (jnp.log(x), x)[1], A, A), (X,), "nan generated"),
    "debug check": (
        checkify.user_checks,
        lambda w: w(lambda x: (checkify.debug_check(x[0, 0] > 0, "negative"), x)[1], A, A),
        (X,),
        "negative",
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CHECKED)
def test_checkify(case, mesh):
    """`checkify` of calls finds what it finds in `jax.jit`, eagerly and under it, or nothing."""
    errors, build, args, expected = CHECKED[case]
    want_error, want = jax.jit(checkify.checkify(build(by_jit), errors=errors))(*args)
    fun = checkify.checkify(build(by_pjit(mesh)), errors=errors)
    for run in (fun, jax.jit(fun)):
        error, got = run(*args)
        text = error.get()
        if expected is None:
            assert text is None
            assert want_error.get() is None
            close(got, want)
        else:
            assert expected in text
            assert (
                text.splitlines()[0].split(" (")[0]
                == (want_error.get().splitlines()[0].split(" (")[0])
            )
            with pytest.raises(checkify.JaxRuntimeError):
                error.throw()


def test_checkify_names_the_line_of_the_body(mesh):
    """An error names the line of the user's function, not one of ours."""
    _, build, args, _ = CHECKED["nan"]
    error, _ = checkify.checkify(build(by_pjit(mesh)), errors=EVERY)(*args)
    with pytest.raises(checkify.JaxRuntimeError) as e:
        error.throw()
    frames = traceback.extract_tb(e.value.__cause__.__traceback__)
    assert [f.name for f in frames if f.filename == __file__][-1] == "logarithm"


@pytest.mark.slow
def test_derivatives_and_maps_of_checkify(mesh):
    """A checked call differentiates, maps per example, and lives inside of a call."""
    fun = checkify.checkify(pjit(logarithm, A, A, mesh=mesh), errors=EVERY)
    close(jax.grad(lambda x: fun(x)[1].sum())(X + 2), 1 / (X + 2))
    errors, _ = jax.jit(jax.vmap(fun))(STACK + np.float32([2, 0, 9])[:, None, None])
    assert errors.get().count("nan generated") == 1
    assert "at mapped index 1" in errors.get()
    inside = pjit(lambda x: checkify.checkify(logarithm, errors=EVERY)(x), A, mesh=mesh)
    for run in (inside, jax.jit(inside)):
        assert "nan generated" in run(X)[0].get()
        assert run(X + 2)[0].get() is None


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_check_without_checkify_is_refused(around, mesh):
    """A check that nobody functionalized is JAX's own error, as under `jax.jit`."""
    texts = []
    for wrap in (by_pjit(mesh), by_jit):
        with pytest.raises(ValueError, match=r"checkify\.check.*not functionalized") as e:
            around(wrap(checked, A, B))(X)
        texts.append(str(e.value).splitlines()[0])
    assert texts[0] == texts[1]
