"""Code that is written for Explicit axes, inside of `pjit`."""

import contextlib

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard
import numpy as np
import pytest

import spmd
from spmd import pjit, with_sharding_constraint

X = np.arange(64, dtype=np.float32).reshape(8, 8)
NAMES = ("data", "model")


@pytest.fixture
def explicit():
    """A mesh as jax.make_mesh makes it: with axes that are part of types."""
    return jax.make_mesh((4, 2), NAMES)


W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)

#: Bodies that are written for Explicit axes, what they give and where it lies.
TYPED = {
    "out_sharding": (
        lambda x, w: jnp.einsum("bd,df->bf", x, w, out_sharding=P("data")),
        X @ W,
        P("data"),
    ),
    "reshard": (lambda x, w: reshard(x, P("data")) @ reshard(w, P()), X @ W, P("data")),
    "gather": (
        lambda x, w: x.at[jnp.array([5, 1, 2, 3])].get(out_sharding=P("data")),
        X[[5, 1, 2, 3]],
        P("data"),
    ),
    "creation": (
        lambda x, w: x + jnp.ones((8, 8), x.dtype, out_sharding=P("data", "model")),
        X + 1,
        P("data", "model"),
    ),
    "type of another": (lambda x, w: reshard(x, jax.typeof(w).sharding), X, P("model")),
    "loop": (
        lambda x, w: jax.lax.fori_loop(0, 3, lambda i, c: reshard(c, P("data", "model")) * 2, x),
        X * 8,
        P("data", "model"),
    ),
    "constraint": (
        lambda x, w: with_sharding_constraint(reshard(x, P("data")), P("model", "data")) * 2,
        X * 2,
        P("model", "data"),
    ),
    "constraint of a dimension": (
        lambda x, w: (
            with_sharding_constraint(reshard(x, P("data")), P(P.UNCONSTRAINED, "model")) * 2
        ),
        X * 2,
        P("data", "model"),
    ),
}


#: The same without a word of types.
UNTYPED = {
    "out_sharding": lambda x, w: x @ w,
    "reshard": lambda x, w: x @ w,
    "gather": lambda x, w: x[jnp.array([5, 1, 2, 3])],
    "creation": lambda x, w: x + 1,
    "type of another": lambda x, w: x,
    "loop": lambda x, w: x * 8,
    "constraint": lambda x, w: x * 2,
    "constraint of a dimension": lambda x, w: x * 2,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["option", "set"])
@pytest.mark.parametrize("case", TYPED)
def test_code_for_explicit_axes(explicit, case, how):
    """`reshard` and `out_sharding=` run inside of `pjit` as inside of `jax.jit`."""
    body, want, spec = TYPED[case]
    specs = (P("data", "model"), P("model"))
    given = {"mesh": explicit} if how == "option" else {}
    f = pjit(body, in_axis_resources=specs, **given)
    # A traced call needs the type of its result where the mesh is set.
    typed = pjit(body, in_axis_resources=specs, out_axis_resources=spec, **given)
    with contextlib.nullcontext() if given else jax.set_mesh(explicit):
        placed = [
            jax.device_put(v, NamedSharding(explicit, s))
            for v, s in zip((X, W), specs, strict=True)
        ]
        for args in ((X, W), placed):
            y = f(*args)
            np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
            assert y.sharding.is_equivalent_to(NamedSharding(explicit, spec), 2)
        stacked = jax.vmap(typed, (0, None))(np.stack([X, -X]), W)
        gradient = jax.jit(jax.grad(lambda x, w: (typed(x, w) ** 2).sum()))(*placed)
    np.testing.assert_allclose(stacked[0], want, rtol=1e-4, atol=1e-4)
    plain = jax.grad(lambda x: (UNTYPED[case](x, W) ** 2).sum())(X)
    np.testing.assert_allclose(gradient, plain, rtol=1e-3, atol=1e-3)


def test_code_for_one_explicit_axis():
    """Only the Explicit axes are part of types; the others stay the partitioner's."""
    mesh = jax.make_mesh((4, 2), NAMES, axis_types=(AxisType.Explicit, AxisType.Auto))
    seen = []

    def body(x, w, n):
        y = jnp.einsum("bd,df->bf", x, w, out_sharding=P("data"))
        seen.append([jax.typeof(v).sharding.spec for v in (x, w, n, y)])
        return y * n

    f = pjit(body, (P("data", "model"), P("model"), None), mesh=mesh)
    np.testing.assert_allclose(f(X, W, 2.0), 2 * X @ W, rtol=1e-4, atol=1e-4)
    assert seen == [[P("data", None), P(None, None), P(), P("data", None)]]


def test_one_body_has_the_types_of_each_pjit(explicit):
    """Two `pjit`s of one function that differ in their specs alone each see their own types."""

    def there_and_back(x):
        return reshard(reshard(x, P()) * 2, jax.typeof(x).sharding)

    for spec in (P("data"), P("model"), P("data", "model"), P("data")):
        y = pjit(there_and_back, in_axis_resources=spec, mesh=explicit)(X)
        np.testing.assert_array_equal(y, 2 * X)
        assert y.sharding.is_equivalent_to(NamedSharding(explicit, spec), 2)


def test_code_for_explicit_axes_needs_specs(explicit):
    """The type of an argument is what its spec says; without one the error names it."""
    f = pjit(lambda x, w: reshard(x, P("data")) + w, in_shardings=(None, spmd.FROM_ARRAY))
    w = jax.device_put(W, NamedSharding(explicit, P("data")))
    with jax.set_mesh(explicit), pytest.raises(spmd.ShardingError) as e:
        f(X, w)
    assert str(e.value) == (
        "pjit of `<lambda>` cannot tell the type of argument w.\n"
        "  given     a body for Explicit axes (reshard, out_sharding=), "
        "where a type has a sharding\n"
        "  expected  a spec of every argument in in_axis_resources\n"
        "  fix       give in_axis_resources, or in_shardings: P() for what is not split"
    )


def test_other_errors_of_a_body_are_told_once(explicit, mesh):
    """A body is traced again for Explicit axes only where JAX asks for them."""
    traced = []

    def wrong(x):
        traced.append(x)
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own"):
        pjit(wrong, P("data"), mesh=explicit)(X)
    assert len(traced) == 1
    # Nor where the mesh has no such axes: there JAX's answer is right.
    with pytest.raises(ValueError, match="of type Auto or Manual"):
        pjit(lambda x: reshard(x, P("model")), P("data"), mesh=mesh)(X)
