"""Resolving: parsed specs, a mesh and values become shardings."""

import math
import re

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest
from strategies import FakeDevice, fake_mesh, mesh_shapes, specs

import spmd
from spmd import FROM_ARRAY, pjit
from spmd._mesh import show_devices, show_mesh
from spmd._resolve import (
    axes_size,
    canonical_leaf,
    device_failure,
    input_sharding,
    is_equivalent,
    mesh_of_leaves,
    placed_sharding,
    show_sharding,
    spec_failure,
    to_sharding,
)
from spmd._spec import BATCH, UNSPECIFIED
from spmd.partition_spec import ParsedPartitionSpec

U = P.UNCONSTRAINED
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def parsed(spec):
    """A spec as its user gave it."""
    return ParsedPartitionSpec.from_user_input(spec, "spec", allow_unconstrained=True)


def double(x):
    """The function of most tests."""
    return jax.tree.map(lambda v: v * 2, x)


def put(value, mesh, *spec):
    """An array that is committed to a mesh."""
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def placed_as(x, mesh, *spec):
    """Whether an array lies so on the mesh, device by device."""
    wanted = NamedSharding(mesh, P(*spec)).devices_indices_map(x.shape)
    return {s.device: s.index for s in x.addressable_shards} == wanted


# Checks


@st.composite
def values(draw):
    """A mesh, a spec on it, and a shape that it may or may not fit."""
    shape = draw(mesh_shapes(max_axes=3, sizes=(1, 2, 3, 4), max_devices=64))
    spec = draw(specs(tuple(shape), draw(st.integers(0, 3))))
    dims = draw(st.lists(st.integers(0, 24), max_size=3))
    return fake_mesh(shape), spec, tuple(dims)


@given(values())
@settings(max_examples=150, deadline=None)
def test_specs_fit_where_numpy_can_split(case):
    """At a boundary a spec passes exactly where NumPy splits every dimension into equal parts."""
    mesh, spec, dims = case
    aval = jax.ShapeDtypeStruct(dims, np.float32)
    failure = spec_failure(parsed(spec), aval, mesh, "x", "spec", boundary=True)
    try:
        for dim, entry in enumerate(spec):
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            np.split(np.empty(dims), math.prod(mesh.shape[a] for a in axes), axis=dim)
    except (ValueError, IndexError):
        assert failure is not None
    else:
        assert failure is None
    if len(spec) <= len(dims):
        assert spec_failure(parsed(spec), aval, mesh, "x", "spec", boundary=False) is None


@given(values())
@settings(max_examples=150, deadline=None)
def test_arithmetic_of_a_message(case):
    """Size, factor and remainder add up, and the padded size is the next that fits."""
    mesh, spec, dims = case
    aval = jax.ShapeDtypeStruct(dims, np.float32)
    failure = spec_failure(parsed(spec), aval, mesh, "x", "spec", boundary=True)
    if failure is None or "divisible" not in failure.expected:
        return
    for size, quotient, factor, rest in re.findall(r"(\d+) = (\d+)\*(\d+) \+ (\d+)", failure.got):
        assert int(size) == int(quotient) * int(factor) + int(rest)
        assert 0 < int(rest) < int(factor)
    dim, padded = map(int, re.match(r"pad dimension (\d+) to (\d+)", failure.fix).groups())
    axes = spec[dim] if isinstance(spec[dim], tuple) else (spec[dim],)
    factor = math.prod(mesh.shape[a] for a in axes)
    assert padded == min(n for n in range(dims[dim], 200) if n % factor == 0)


def test_axes_size():
    """An entry splits its dimension into the product of its axes."""
    mesh = fake_mesh({"a": 2, "b": 3})
    assert [axes_size(p, mesh) for p in ((), ("a",), ("b", "a"), U, BATCH)] == [1, 2, 6, 1, 1]


def test_constraint_inside_may_be_uneven(in_mesh):
    """Evenness is asked of boundaries only."""
    aval = jax.ShapeDtypeStruct((30,), np.float32)
    spec = parsed(P("data"))
    assert spec_failure(spec, aval, in_mesh, "x", "s", boundary=False) is None
    assert spec_failure(spec, aval, in_mesh, "x", "s", boundary=True) is not None


@pytest.mark.parametrize("leaf", [UNSPECIFIED, FROM_ARRAY], ids=repr)
def test_what_says_nothing_always_fits(in_mesh, leaf):
    """A leaf without a spec has nothing to check."""
    aval = jax.ShapeDtypeStruct((), np.float32)
    assert spec_failure(leaf, aval, in_mesh, "x", "s", boundary=True) is None


# Shardings


def test_to_sharding(mesh):
    """A spec becomes the NamedSharding of the same axes; nothing said becomes JAX's marker."""
    assert to_sharding(parsed(P("data")), mesh) == NamedSharding(mesh, P("data"))
    assert to_sharding(parsed(None), mesh) == NamedSharding(mesh, P())
    assert not isinstance(to_sharding(UNSPECIFIED, mesh), NamedSharding)
    raw = NamedSharding(mesh, P("model"))
    assert to_sharding(raw, mesh) is raw


def test_trailing_nones_are_one_sharding(mesh):
    """P('data') and P('data', None) mean the same and give equal shardings."""
    short, long = parsed(P("data")), parsed(P("data", None, None))
    assert to_sharding(short, mesh) == to_sharding(long, mesh)
    assert to_sharding(parsed(P(None)), mesh) == to_sharding(parsed(None), mesh)


def test_sharding_carries_the_plain_mesh(mesh):
    """What is handed to JAX is JAX's own mesh, so that JAX's caches hit."""
    f = pjit(double, P("data"), P("data"))
    with mesh:
        out = f(X).sharding.mesh
    assert type(out) is jax.sharding.Mesh
    assert out == mesh


def test_dimension_of_vmap(mesh):
    """What vmap added is unsharded at a boundary and the partitioner's inside."""
    spec = parsed(P("model")).insert_axis_partitions(0, BATCH)
    assert to_sharding(spec, mesh).spec == P(None, "model")
    assert to_sharding(spec, mesh, inside=True).spec == P(U, "model")


def test_partly_unconstrained(mesh):
    """At a boundary a partly open spec is open; inside it says what it says."""
    spec = parsed(P(U, "model"))
    assert not isinstance(to_sharding(spec, mesh), NamedSharding)
    assert to_sharding(spec, mesh, inside=True).spec == P(U, "model")


def test_canonical_leaf(mesh):
    """A NamedSharding is its spec, unless it asks for other memory."""
    assert canonical_leaf(NamedSharding(mesh, P("data"))) == parsed(P("data"))
    pinned = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    assert canonical_leaf(pinned) is pinned
    assert canonical_leaf(UNSPECIFIED) is UNSPECIFIED


def test_mesh_of_leaves(mesh):
    """The mesh is that of the NamedShardings, axis types aside; without one there is none."""
    explicit = jax.make_mesh((4, 2), ("data", "model"))
    leaves = [UNSPECIFIED, NamedSharding(mesh, P()), NamedSharding(explicit, P("data"))]
    found, failures = mesh_of_leaves(leaves, ["a", "b", "c"])
    assert found == mesh
    assert not failures
    assert mesh_of_leaves([UNSPECIFIED, parsed(P("x"))], ["a", "b"]) == (None, [])


# Placed arguments


def test_placed_sharding(mesh):
    """Only what is committed has a place to keep."""
    x = put(X, mesh, "data")
    assert placed_sharding(x) == x.sharding
    assert placed_sharding(jnp.ones(3)) is None
    assert placed_sharding(X) is None
    struct = jax.ShapeDtypeStruct((8,), np.float32)
    assert placed_sharding(struct) is None
    with_sharding = jax.ShapeDtypeStruct((8,), np.float32, sharding=x.sharding)
    assert placed_sharding(with_sharding) == x.sharding


@pytest.mark.parametrize(
    ("resource", "placed", "wanted", "moves"),
    [
        (P("data"), None, P("data"), False),
        (P("data"), P("data", None), P("data"), False),
        (P("data"), P("model"), P("data"), True),
        (None, P("data"), P(), True),
        (UNSPECIFIED, None, P(), False),
        (UNSPECIFIED, P("model"), P("model"), False),
    ],
)
def test_input_sharding(mesh, resource, placed, wanted, moves):
    """A spec decides; without one a committed argument stays and all else is replicated."""
    resource = resource if resource is UNSPECIFIED else parsed(resource)
    placed = placed and NamedSharding(mesh, placed)
    got, has_to_move = input_sharding(resource, placed, 2, mesh)
    assert got.is_equivalent_to(NamedSharding(mesh, wanted), 2)
    assert has_to_move == moves


def test_is_equivalent(mesh):
    """Equivalent is the same data on the same devices, not the same words."""
    turned = spmd.Mesh(mesh.devices.reshape(2, 4), ("data", "model"))
    a = NamedSharding(mesh, P(("data", "model")))
    assert is_equivalent(a, NamedSharding(turned, P(("data", "model"))), 1)
    assert not is_equivalent(NamedSharding(mesh, P("data")), NamedSharding(turned, P("data")), 1)


def test_device_failure(mesh):
    """The set of devices counts; their order is put right by a move."""
    flipped = spmd.Mesh(mesh.devices[::-1], ("data", "model"))
    assert device_failure(None, mesh, "x") is None
    assert device_failure(NamedSharding(flipped, P()), mesh, "x") is None
    small = spmd.Mesh(mesh.devices[:1], ("data", "model"))
    assert device_failure(NamedSharding(small, P()), mesh, "x").error is spmd.MeshError
    assert device_failure(NamedSharding(mesh, P()), small, "x").error is spmd.MeshError


# From the call


def test_left_out_inputs_keep_their_sharding(mesh):
    """A committed argument without a spec stays where it is: the program is built for it."""
    f = pjit(double)
    with mesh:
        x = put(X, mesh, "model", "data")
        compiled = f.lower(x).compile()
        assert compiled.in_shardings[0][0].is_equivalent_to(x.sharding, 2)
        np.testing.assert_array_equal(f(x), 2 * X)


def test_left_out_inputs_on_devices_in_another_order(mesh):
    """A committed argument on the same devices in another order keeps its split, and its values."""
    order = np.random.default_rng(0).permutation(8)
    permuted = spmd.Mesh(mesh.devices.flat[order].reshape(4, 2), ("data", "model"))
    f = pjit(double)
    with mesh:
        for _ in range(3):
            y = f(put(X, permuted, "data", "model"))
            np.testing.assert_array_equal(y, 2 * X)
            assert list(y.sharding.mesh.devices.flat) == list(mesh.devices.flat)


def test_outputs_follow_their_specs(mesh):
    """Each result lies as its spec says, device by device."""
    f = pjit(lambda x: {"a": x, "b": [x, x.T]}, P("data"), {"a": None, "b": P("model", "data")})
    with mesh:
        y = f(np.zeros((8, 8), np.float32))
    assert placed_as(y["a"], mesh)
    assert placed_as(y["b"][0], mesh, "model", "data")
    assert placed_as(y["b"][1], mesh, "model", "data")


def test_outputs_partly_unconstrained(mesh):
    """In an output P.UNCONSTRAINED leaves one dimension open and keeps the others."""
    with mesh:
        y = pjit(double, P("data"), P(U, "model"))(X)
        np.testing.assert_array_equal(y, 2 * X)
        assert {s.data.shape[1] for s in y.addressable_shards} == {2}
        z = pjit(double, P("data"), P(U, None))(X)
        assert {s.data.shape[1] for s in z.addressable_shards} == {4}


def test_from_array_takes_what_each_argument_has(mesh):
    """One function under FROM_ARRAY is one program per sharding, none of them moves anything."""
    f = pjit(double, FROM_ARRAY, implicit_reshard="error")
    with mesh:
        for spec in [("data",), ("model", "data"), (("data", "model"),), ()]:
            x = put(X, mesh, *spec)
            for _ in range(2):
                np.testing.assert_array_equal(f(x), 2 * X)
            assert f.lower(x).compile().in_shardings[0][0].is_equivalent_to(x.sharding, 2)


def test_no_mesh_is_needed_where_leaves_bring_one(mesh):
    """Where every leaf is a NamedSharding or FROM_ARRAY the call needs no active mesh."""
    x = put(X, mesh, "data")
    out = pjit(double, NamedSharding(mesh, P("data")))(X)
    np.testing.assert_array_equal(out, 2 * X)
    assert out.sharding.device_set == set(mesh.devices.flat)
    np.testing.assert_array_equal(pjit(double, FROM_ARRAY)(x), 2 * X)
    both = pjit(lambda a, b: a + b, (FROM_ARRAY, NamedSharding(mesh, P(None, "model"))))
    np.testing.assert_array_equal(both(x, X), 2 * X)
    np.testing.assert_array_equal(pjit(double)(x), 2 * X)


def test_positional_semantics_are_recorded(mesh):
    """Under local semantics host values are local and a jax.Array is global, per input."""
    f = pjit(lambda d: d["a"] + d["b"], P("data"), positional_semantics="local")
    with mesh:
        call = f.trace({"a": X, "b": put(X, mesh, "data")})._call
        assert call.in_positional_semantics == ("local", "global")
        np.testing.assert_array_equal(f({"a": X, "b": put(X, mesh)}), 2 * X)
        assert pjit(double).trace(X)._call.in_positional_semantics == ("global",)


# Words


def test_show_mesh(mesh):
    """A mesh is shown by its axes."""
    assert show_mesh(mesh) == "mesh data=4, model=2"
    assert show_mesh(None) == "an empty mesh"


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([3], "device cpu:3"),
        ([0, 1, 2], "3 devices cpu:0..2"),
        ([2, 0, 1], "3 devices cpu:2,0,1"),
        ([*range(0, 40, 2)], "20 devices cpu:0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30,…"),
    ],
)
def test_show_devices(ids, shown):
    """Runs of device ids are abbreviated, other orders are shown, long ones cut."""
    assert show_devices([FakeDevice(i) for i in ids]) == shown


def test_show_sharding(mesh):
    """A sharding is shown by its spec and mesh, or by its class and devices."""
    assert show_sharding(NamedSharding(mesh, P("data"))) == "P('data') on mesh data=4, model=2"
    single = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    assert show_sharding(single) == "SingleDeviceSharding on device cpu:2"
