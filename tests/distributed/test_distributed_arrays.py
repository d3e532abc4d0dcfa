"""Local and global inputs in one process, where a process's part is the whole."""

import jax
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, put
import pytest

from spmd import P, distributed, pjit
from spmd._spec import UNSPECIFIED, ParsedPartitionSpec

X = np.arange(64, dtype=np.float32).reshape(8, 8)


def local(mesh, **options):
    """A function whose host inputs are this process's part."""
    return pjit(
        lambda x: x * 2,
        in_axis_resources=P("data"),
        out_axis_resources=P("data"),
        positional_semantics="local",
        mesh=mesh,
        **options,
    )


def test_local_host_array(mesh):
    """A host array under local semantics is placed by its spec; the result is this part."""
    for _ in range(3):
        assert_sharded(local(mesh)(X), 2 * X, P("data"), mesh)


def test_local_takes_a_global_array_as_it_is(mesh):
    """An array that exists is global under either semantics, well placed or not."""
    f = local(mesh)
    for x in (put(X, mesh, P("data")), put(X, mesh, P(None, "model")), jnp.asarray(X)):
        for _ in range(2):
            assert_sharded(f(x), 2 * X, P("data"), mesh)


def test_semantics_are_recorded_per_input(mesh):
    """The record says of each input what the caller passed."""
    for semantics, want in (("local", ("local", "global")), ("global", ("global", "global"))):
        f = pjit(lambda x, y: x + y, positional_semantics=semantics, mesh=mesh)
        call = f.trace(X, put(X, mesh, P()))._call
        assert call.in_positional_semantics == want


def test_local_sizes_are_checked_against_the_local_mesh(mesh):
    """An indivisible local input says that it is local."""
    with pytest.raises(ValueError) as e:
        local(mesh)(X[:6])
    assert str(e.value) == (
        "pjit of `<lambda>` cannot split local argument x.\n"
        "  given     in_axis_resources = P('data') on mesh data=4, model=2\n"
        "  expected  dimension 0 to be divisible by 4\n"
        "  got       f32[6,8]: 6 = 1*4 + 2\n"
        "  fix       pad dimension 0 to 8, or leave it unsharded with P(None)"
    )
    f = pjit(lambda x: x, in_axis_resources=P("data"), mesh=mesh)
    with pytest.raises(ValueError, match="cannot split argument x"):
        f(X[:6])


def test_local_numbers_and_trees(mesh):
    """Numbers and trees of host values pass under local semantics."""
    f = pjit(lambda t: jax.tree.map(lambda v: v + 1, t), positional_semantics="local", mesh=mesh)
    out = f({"a": 1, "b": 2.5, "c": X})
    assert (int(out["a"]), float(out["b"])) == (2, 3.5)
    np.testing.assert_array_equal(out["c"], X + 1)


def test_local_under_transformations(mesh):
    """Under jit, grad and vmap values are traced, and right."""
    f = local(mesh)
    np.testing.assert_array_equal(jax.jit(f)(X), 2 * X)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(X), np.full_like(X, 2))
    np.testing.assert_array_equal(jax.vmap(f)(np.stack([X, X])), np.stack([X, X]) * 2)


def test_local_keeps_dtypes(mesh):
    """64-bit host values follow JAX's own setting."""
    f = local(mesh)
    assert f(X.astype(np.float64)).dtype == np.float32
    with jax.enable_x64(True):
        assert f(X.astype(np.float64)).dtype == np.float64


def test_conversions(mesh):
    """In one process the local part is all of it, in both directions."""
    spec = ParsedPartitionSpec.from_user_input(P("data"), "spec")
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    assert distributed.global_shape((8, 8), spec, plain) == (8, 8)
    assert distributed.global_shape((8, 8), UNSPECIFIED, plain) == (8, 8)
    whole = distributed.local_to_global(X, spec, plain)
    assert_sharded(whole, X, P("data"), mesh)
    np.testing.assert_array_equal(distributed.global_to_local(whole, plain), X)


def test_unknown_semantics():
    """Anything but "global" and "local" is refused with both."""
    with pytest.raises(ValueError, match="'global' or 'local'"):
        pjit(lambda x: x, positional_semantics="private")
