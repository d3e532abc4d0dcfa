"""Local and global inputs in one process, where a process's part is the whole."""

import jax
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, put
import pytest

import spmd
from spmd import P, distributed, pjit
from spmd._mesh import scattered_failure
from spmd._spec import UNSPECIFIED
from spmd.errors import explain
from spmd.partition_spec import ParsedPartitionSpec

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


# What a user calls


def test_there_and_back(mesh):
    """In one process the part is the whole; specs are a prefix of the tree, numbers stay values."""
    tree = {"x": X, "y": [X[0], 3.5], "n": None}
    specs = {"x": P("data", "model"), "y": P(), "n": None}
    placed = distributed.host_local_to_global(tree, mesh, specs)
    assert_sharded(placed["x"], X, P("data", "model"), mesh)
    assert_sharded(placed["y"][0], X[0], P(), mesh)
    assert float(placed["y"][1]) == 3.5
    assert placed["n"] is None
    back = distributed.global_to_host_local(placed, mesh, specs)
    np.testing.assert_array_equal(back["x"], X)
    with mesh:
        moved = distributed.global_to_host_local(placed["x"], None, P(None, "model"))
        assert_sharded(moved, X, P(None, "model"), mesh)


@pytest.mark.parametrize("name", ["host_local_to_global", "global_to_host_local"])
def test_bad_arguments(mesh, name):
    """Leaves, specs and sizes that do not fit are named by path; a missing mesh is told."""
    fun = getattr(distributed, name)
    with pytest.raises(spmd.MeshError, match=f"{name} needs a mesh, and there is none here"):
        fun(X, None, P("data"))
    with pytest.raises(spmd.ArgumentError, match=r"cannot take tree\['a'\]: it is no array"):
        fun({"a": "text"}, mesh, P())
    with pytest.raises(spmd.SpecTypeError):
        fun({"a": X}, mesh, {"a": "data"})
    with pytest.raises(spmd.ShardingError) as e:
        fun({"a": X[:6], "b": X, "c": X}, mesh, {"a": P("data"), "b": P("dat"), "c": P("data")})
    assert str(e.value) == (
        f"{name} cannot split tree['a'].\n"
        "  given     specs['a'] = P('data') on mesh data=4, model=2\n"
        "  expected  dimension 0 to be divisible by 4\n"
        "  got       f32[6,8]: 6 = 1*4 + 2\n"
        "  fix       pad dimension 0 to 8, or leave it unsharded with P(None)\n"
        f"{name} cannot split tree['b'].\n"
        "  given     specs['b'] = P('dat') on mesh data=4, model=2\n"
        "  expected  mesh axes out of 'data', 'model'\n"
        "  got       unknown axis 'dat' (did you mean 'data'?)\n"
        "  fix       use an axis of the mesh, or enter the mesh that has it"
    )
    with pytest.raises(spmd.ShardingError):
        fun({"a": X}, mesh, [P()])


class Owned:
    """A device of some process."""

    def __init__(self, process):
        self.process_index = process


class Grid:
    """A mesh of several processes, as far as the rule of boxes looks at it."""

    def __init__(self, owners, names):
        self.devices = np.vectorize(Owned)(np.array(owners))
        self.axis_names = names
        self.shape = dict(zip(names, self.devices.shape, strict=True))


BOXES = [
    ([[0, 0], [1, 1]], {0: True, 1: True}),
    ([[0, 1], [0, 1]], {0: True, 1: True}),
    ([[0, 1], [1, 0]], {0: False, 1: False}),
    ([[0, 0], [0, 1]], {0: False, 1: True}),
    ([[0, 1, 0]], {0: False, 1: True}),
    ([[[0, 0], [0, 0]], [[1, 1], [2, 2]]], {0: True, 1: True, 2: True}),
    ([[[0, 1], [0, 1]], [[1, 0], [0, 1]]], {0: False, 1: False}),
]


@pytest.mark.parametrize(("owners", "fits"), BOXES, ids=str)
def test_boxes(owners, fits):
    """A process has a part if and only if its places are all those between their corners."""
    grid = Grid(owners, ("a", "b", "c")[: np.ndim(owners)])
    for process, fit in fits.items():
        assert (scattered_failure(grid, process) is None) == fit


def test_who_has_no_device():
    """A process without a device in the mesh has no part of anything."""
    failure = scattered_failure(Grid([0, 1], ("x",)), 2)
    assert str(explain("f", [failure])) == (
        "f cannot use mesh x=2 here: it has no device of process 2.\n"
        "  got       these processes, x from left to right\n"
        "            0 1\n"
        "  fix       build the mesh from devices of every process that calls"
    )


def test_a_large_mesh_is_drawn_in_part():
    """Of many rows the first sixteen are drawn, numbers in columns."""
    owners = np.arange(80).reshape(20, 2, 2) % 11
    text = explain("f", [scattered_failure(Grid(owners, ("a", "b", "c")), 3)]).args[0]
    rows = text.split("from left to right\n")[1].splitlines()
    assert rows[0] == "            a=0, b=0    0  1"
    assert rows[15] == "            a=7, b=1    8  9"
    assert rows[16] == "            ... 24 more rows"
