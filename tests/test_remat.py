"""`jax.checkpoint` around and inside of calls: every policy is obeyed, counted in the jaxpr.

What is recomputed and what is saved is compared with `jax.jit` in the place of `pjit`, and, for
the policies that differ, with a count by hand.
"""

from collections import Counter

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, mesh_of, put
import pytest

from spmd import P, pjit, with_sharding_constraint

X = (np.arange(16, dtype=np.float32).reshape(4, 4) - 6) / 8
W = (np.arange(16, dtype=np.float32).reshape(4, 4) % 5 - 2) / 4
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
A, B, AB = P("a"), P("b"), P("a", "b")

pytestmark = pytest.mark.usefixtures("checked_without_optimizer")


@pytest.fixture
def mesh():
    """The 2x2 mesh `a, b`; four devices compile faster than eight."""
    return mesh_of({"a": 2, "b": 2})


def layer(x, w):
    """Three products; results between them have names."""
    first = checkpoint_name(jnp.sin(x @ w), "first")
    second = checkpoint_name(jnp.log(2 + first * x), "second")
    return jnp.tanh(jnp.einsum("bij,bjk->bik", (second @ w)[None], w[None])[0])


@jax.jit
def plain_gradient(x, w):
    """The gradients of the layer without any checkpoint."""
    return jax.grad(lambda x, w: layer(x, w).sum(), argnums=(0, 1))(x, w)


def by_jit(fun, *_):
    """Wraps as the peer does."""
    return jax.jit(fun)


def by_pjit(mesh):
    """Returns what wraps a function with specs of its inputs and outputs."""
    return lambda fun, *specs: pjit(fun, *specs, mesh=mesh)


def close(got, want):
    """Asserts that two trees have the same values."""
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(np.asarray(g), np.asarray(w), **CLOSE), got, want
    )


def sub_jaxprs(eqn):
    """The jaxprs among the parameters of an equation."""
    for param in eqn.params.values():
        for value in param if isinstance(param, (tuple, list)) else (param,):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield inner


def operations(jaxpr):
    """How often each primitive occurs, at any depth."""
    found = Counter()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found[eqn.primitive.name] += 1
        for inner in sub_jaxprs(eqn):
            found += operations(inner)
    return found


def work_of(fun, *args):
    """How many products, sines, logarithms and tanhs a function computes."""
    found = operations(jax.make_jaxpr(fun)(*args))
    return tuple(found[name] for name in ("dot_general", "sin", "log", "tanh"))


policies = jax.checkpoint_policies
#: Policy, and how many products, sines, logarithms and tanhs the gradient computes, by hand.
#: Without a checkpoint it has 9 products, three forward and six backward, and one of each of the
#: others. The derivative of tanh needs its own result, which nobody can save by name, so the
#: products that lead to it come again, unless they are saved themselves.
POLICIES = {
    "default": (None, (12, 2, 2, 2)),
    "everything": (policies.everything_saveable, (9, 1, 1, 1)),
    "nothing": (policies.nothing_saveable, (12, 2, 2, 2)),
    "dots": (policies.dots_saveable, (9, 2, 2, 2)),
    "dots without batch": (policies.dots_with_no_batch_dims_saveable, (10, 2, 2, 2)),
    "names": (policies.save_only_these_names("first"), (12, 1, 2, 2)),
    "two names": (policies.save_only_these_names("first", "second"), (12, 1, 1, 2)),
    "other names": (policies.save_any_names_but_these("first"), (12, 2, 1, 2)),
    "anything but names": (policies.save_anything_except_these_names("first"), (9, 1, 1, 1)),
    "one of two": (
        policies.save_from_both_policies(
            policies.save_only_these_names("second"), policies.dots_saveable
        ),
        (9, 2, 1, 2),
    ),
    "offloaded names": (
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["first"],
            names_which_can_be_offloaded=["second"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        (12, 1, 1, 2),
    ),
    "offloaded dots": (
        policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        (10, 2, 2, 2),
    ),
}
PLACES = {
    "around": lambda wrap, **o: jax.checkpoint(wrap(layer, (A, B), AB), **o),
    "inside": lambda wrap, **o: wrap(jax.checkpoint(layer, **o), (A, B), AB),
    "around two": lambda wrap, **o: jax.checkpoint(wrap(wrap(layer, (A, B), AB), (B, A), B), **o),
    "between two": lambda wrap, **o: wrap(jax.checkpoint(wrap(layer, (A, B), AB), **o), (B, A), B),
}


def gradient_of(place, wrap, **options):
    """The gradient of the layer with a checkpoint at a place."""
    fun = PLACES[place](wrap, **options)
    return jax.grad(lambda x, w: fun(x, w).sum(), argnums=(0, 1))


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", POLICIES)
def test_policy_decides_what_is_saved_and_what_is_computed_again(name, place, mesh, capsys):
    """A gradient saves the values, by type, and computes again exactly what the policy says."""
    policy, work = POLICIES[name]
    saved = []
    for wrap in (by_pjit(mesh), by_jit):
        assert work_of(gradient_of(place, wrap, policy=policy), X, W) == work
        print_saved_residuals(PLACES[place](wrap, policy=policy), X, W)
        saved.append(sorted(line.split()[0] for line in capsys.readouterr().out.splitlines()))
    assert saved[0] == saved[1]


def test_counts_of_policies_differ():
    """The table tells policies apart: a policy that is ignored is noticed."""
    assert len({work for _, work in POLICIES.values()}) >= 7


VALUES = ("default", "everything", "dots", "two names", "anything but names", "offloaded names")


@pytest.mark.few(0)
@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("name", VALUES)
def test_values_under_a_policy(name, place, mesh):
    """Gradients are right and placed like their inputs, under `jax.jit` and, for two, eagerly."""
    grad = gradient_of(place, by_pjit(mesh), policy=POLICIES[name][0])
    want = plain_gradient(X, W)
    if name in ("default", "two names"):
        close(grad(X, W), want)
    for got, value, spec in zip(jax.jit(grad)(X, W), want, (A, B), strict=True):
        assert_sharded(got, value, spec, mesh, **CLOSE)


@pytest.mark.parametrize("place", ["around", "inside"])
def test_offloaded_values_leave_the_device(place, mesh):
    """An offloading policy moves the named value to host memory and back, inside of the call."""
    # Counted in the jaxpr: a program for CPU has one memory, and lowers no such move.
    options = {"policy": POLICIES["offloaded names"][0]}
    counts = [
        operations(jax.make_jaxpr(gradient_of(place, wrap, **options))(X, W))["device_put"]
        for wrap in (by_pjit(mesh), by_jit)
    ]
    assert counts == [2, 2]
    _, pull = jax.vjp(PLACES[place](by_pjit(mesh), **options), X, W)
    kinds = [r.sharding.memory_kind for r in jax.tree.leaves(pull) if isinstance(r, jax.Array)]
    assert kinds.count("pinned_host") == 1


def test_compiled_program_computes_again(mesh):
    """With CSE prevented the compiled gradient has the second exponential; without, one."""
    jax.config.update("jax_disable_most_optimizations", False)

    def exponentials(**options):
        fun = jax.checkpoint(pjit(lambda x: jnp.exp(jnp.sin(x)), A, A, mesh=mesh), **options)
        grad = jax.jit(jax.value_and_grad(lambda x: fun(x).sum()))
        lowered = grad.lower(put(X, mesh, A))
        return lowered.compile().as_text().count(" exponential(")

    assert exponentials(prevent_cse=True) == 2
    assert exponentials(prevent_cse=False) == 1
    assert exponentials(policy=policies.everything_saveable) == 1


def test_residuals_across_a_checkpoint_are_split(mesh):
    """A saved value is as split as the computation that made it, eagerly too."""

    def fun(x, w):
        return jnp.sin(checkpoint_name(x @ w, "kept"))

    call = pjit(fun, (A, P(None, "b")), AB, mesh=mesh)
    saving = jax.checkpoint(call, policy=policies.save_only_these_names("kept"))
    _, pull = jax.vjp(saving, put(X, mesh, A), put(W, mesh, P(None, "b")))
    arrays = [r for r in jax.tree.leaves(pull) if getattr(r, "shape", ()) == (4, 4)]
    (kept,) = [r for r in arrays if np.allclose(r, X @ W, atol=1e-5)]
    assert_sharded(kept, X @ W, AB, mesh, **CLOSE)


# Where checkpoints meet other things


@pytest.mark.slow
def test_nested_checkpoints(mesh):
    """Checkpoints in checkpoints recompute as often as the peer's, with the same gradient."""

    def build(wrap):
        one = wrap(lambda x: jnp.exp(jnp.sin(x)), A, B)
        two = wrap(jax.checkpoint(lambda x: one(jnp.sin(one(x)))), B, A)
        three = jax.checkpoint(lambda x: two(jax.checkpoint(two)(x)))
        return jax.grad(lambda x: jax.checkpoint(three)(x).sum())

    ours, peer = build(by_pjit(mesh)), build(by_jit)
    assert work_of(ours, X) == work_of(peer, X)
    close(jax.jit(ours)(X), jax.jit(peer)(X))


@pytest.mark.slow
def test_checkpoint_of_scan_and_scan_of_checkpoint(mesh):
    """Loops of calls in checkpoints and of checkpoints in calls save and compute as the peer's."""
    policy = policies.save_only_these_names("first")

    def build(wrap):
        step = wrap(lambda c, w: (layer(c, w), None), (A, B), (A, None))
        saved = jax.checkpoint(step, policy=policy)
        loop = wrap(lambda x, ws: lax.scan(saved, x, ws)[0], (A, None), A)
        whole = jax.checkpoint(lambda x, ws: lax.scan(step, x, ws)[0], policy=policy)
        return jax.grad(lambda x, ws: loop(x, ws).sum() + whole(x, ws).sum(), argnums=(0, 1))

    ws = np.stack([W, -W])
    ours, peer = build(by_pjit(mesh)), build(by_jit)
    assert work_of(ours, X, ws) == work_of(peer, X, ws)
    close(jax.jit(ours)(X, ws), jax.jit(peer)(X, ws))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["around", "inside"])
def test_other_transformations_of_a_checkpoint(place, mesh):
    """Second derivatives, maps and linear maps of a checkpointed call are the peer's."""
    policy = policies.save_only_these_names("first")

    def all_of(wrap):
        fun = PLACES[place](wrap, policy=policy)

        def scalar(x):
            return fun(x, jnp.asarray(W)).sum()

        def run(x):
            if place == "around":
                _, push = jax.linearize(scalar, x)
                return push(jnp.cos(x)), jax.jvp(jax.grad(scalar), (x,), (jnp.cos(x),))[1]
            mapped = jax.vmap(jax.grad(scalar))(jnp.stack([x, -x]))
            return mapped, jax.grad(jax.checkpoint(scalar))(x)

        return jax.jit(run)

    close(all_of(by_pjit(mesh))(X), all_of(by_jit)(X))


def test_constraint_in_a_checkpoint(mesh):
    """A constraint is kept in the recomputation too."""

    def fun(x):
        return jnp.exp(with_sharding_constraint(jnp.sin(x), AB))

    call = jax.checkpoint(pjit(fun, A, B, mesh=mesh))
    grad = jax.jit(jax.grad(lambda x: call(x).sum()))
    text = grad.lower(X).as_text()
    # Of the value, of the value again, and of its cotangent.
    assert 2 <= text.count('[{"a"}, {"b"}]') <= 3
    close(grad(X), np.exp(np.sin(X)) * np.cos(X))


def test_names_and_policies_of_ones_own(mesh):
    """A policy of the user's own is asked about the operations of the body, not about the call."""
    asked = set()

    def policy(primitive, *_, **__):
        asked.add(primitive.name)
        return primitive.name == "sin"

    fun = jax.checkpoint(pjit(lambda x: jnp.exp(jnp.sin(x)) * 2, A, A, mesh=mesh), policy=policy)
    work = work_of(jax.grad(lambda x: fun(x).sum()), X)
    assert {"sin", "exp"} <= asked
    assert "pjit" not in asked
    assert work == (0, 1, 0, 0)


def test_static_arguments_of_a_checkpoint(mesh):
    """A checkpoint with static arguments passes them on to the call."""
    call = pjit(lambda x, power: jnp.sin(x) ** power, A, A, static_argnums=1, mesh=mesh)
    fun = jax.checkpoint(call, static_argnums=1)
    want = 3 * np.sin(X) ** 2 * np.cos(X)
    close(jax.grad(lambda x: fun(x, 3).sum())(X), want)


def test_donated_argument_of_a_checkpointed_call(mesh):
    """A donating call in a checkpoint under `jax.jit` keeps what the recomputation needs."""
    call = pjit(lambda x: jnp.exp(jnp.sin(x)), A, A, donate_argnums=0, mesh=mesh)
    grad = jax.jit(jax.grad(lambda x: jax.checkpoint(call)(x).sum()))
    x = put(X, mesh, A)
    for _ in range(2):
        close(grad(x), np.exp(np.sin(X)) * np.cos(X))


@pytest.mark.slow
def test_optimized_rematerialization_of_a_custom_vjp(mesh):
    """A custom_vjp with `optimize_remat` around and inside of calls keeps its own rules."""
    runs = []

    def forward(x):
        runs.append("forward")
        return inner(x), jnp.cos(x)

    inner = pjit(jnp.sin, A, A, mesh=mesh)
    fun = jax.custom_vjp(lambda x: inner(x))
    fun.defvjp(forward, lambda c, ct: (100 * c * ct,), optimize_remat=True)
    outer = pjit(lambda x: fun(x) * 2, A, A, mesh=mesh)
    for call in (fun, outer, jax.checkpoint(outer)):
        double = 1 if call is fun else 2
        for grad in (
            jax.grad(lambda x, call=call: call(x).sum()),
            jax.jit(jax.grad(lambda x, call=call: call(x).sum())),
        ):
            close(grad(X), 100 * double * np.cos(X))
    assert runs


@pytest.mark.slow
@pytest.mark.skipif(
    "jax_remat3" not in jax.config.values, reason="this JAX has one implementation of checkpoint"
)
@pytest.mark.parametrize("place", PLACES)
def test_new_implementation_of_checkpoint(place, mesh):
    """Under `jax_remat3` values and work are the peer's, with and without a policy."""
    jax.config.update("jax_remat3", True)
    try:
        for name in ("default", "names", "dots"):
            grads = [
                gradient_of(place, wrap, policy=POLICIES[name][0])
                for wrap in (by_pjit(mesh), by_jit)
            ]
            assert work_of(grads[0], X, W) == work_of(grads[1], X, W)
        want = plain_gradient(X, W)
        close(jax.jit(grads[0])(X, W), want)
        if place == "inside":
            close(grads[0](X, W), want)
    finally:
        jax.config.update("jax_remat3", False)
