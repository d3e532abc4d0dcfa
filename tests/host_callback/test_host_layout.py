"""Which part of an array each partition holds, against JAX's own account and brute force."""

import itertools
import math

from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding
import numpy as np
import pytest
from strategies import fake_mesh, mesh_shapes, meshes, meshes_and_specs, specs

from spmd._jax.core import HloSharding
from spmd.host_callback._registry import Placement, Site, mesh_coordinates, placement, stacked


def hlo_of(mesh, spec, rank):
    """The compiler's form of a spec."""
    return NamedSharding(mesh, spec)._to_xla_hlo_sharding(rank)


def parts_of(mesh, spec, rank):
    """The axes of each dimension."""
    entries = (*spec, *(None,) * (rank - len(spec)))
    return [() if e is None else e if isinstance(e, tuple) else (e,) for e in entries]


def slices(index):
    """Slices as pairs, with what None means."""
    return tuple((s.start, s.stop) for s in index)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data(), meshes_and_specs(max_rank=4, max_devices=64))
def test_even_shards_are_those_of_jax(data, mesh_and_spec):
    """Where dimensions divide, partition i holds what JAX says that the i-th device holds."""
    mesh, spec = mesh_and_spec
    rank = data.draw(st.integers(len(spec), len(spec) + 2))
    shape = tuple(
        math.prod(mesh.shape[a] for a in axes) * data.draw(st.integers(1, 3))
        for axes in parts_of(mesh, spec, rank)
    )
    found = placement(shape, hlo_of(mesh, spec, rank), mesh.size)
    wanted = NamedSharding(mesh, spec).devices_indices_map(shape)
    assert found.local_shape == NamedSharding(mesh, spec).shard_shape(shape)
    for partition, device in enumerate(mesh.devices.flat):
        ranges = [s.indices(n)[:2] for s, n in zip(wanted[device], shape, strict=True)]
        assert slices(found.index(partition)) == tuple(ranges)
        assert found.trim(partition) is None


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data(), meshes(max_devices=32))
def test_uneven_shards_are_those_of_brute_force(data, mesh):
    """Element by element: padding is cut from what a partition holds, and nothing else."""
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    spec = data.draw(specs(mesh.axis_names, len(shape)))
    found = placement(shape, hlo_of(mesh, spec, len(shape)), mesh.size)
    value = np.arange(1, math.prod(shape) + 1).reshape(shape)
    axes = parts_of(mesh, spec, len(shape))
    counts = [math.prod(mesh.shape[a] for a in names) for names in axes]
    local = tuple(math.ceil(n / c) for n, c in zip(shape, counts, strict=True))
    assert found.local_shape == local
    # The compiler pads at the end to equal parts, here with zeros.
    pad = [(0, k * c - n) for k, c, n in zip(local, counts, shape, strict=True)]
    padded = np.pad(value, pad) if pad else value
    for partition, at in enumerate(np.ndindex(*mesh.devices.shape)):
        coordinate = dict(zip(mesh.axis_names, at, strict=True))
        block = padded
        for dim, names in enumerate(axes):
            place = 0
            for name in names:
                place = place * mesh.shape[name] + coordinate[name]
            block = block.take(range(place * local[dim], (place + 1) * local[dim]), axis=dim)
        assert block.shape == local
        trim = found.trim(partition)
        trimmed = block if trim is None else block[trim]
        np.testing.assert_array_equal(value[found.index(partition)], trimmed)
        assert np.count_nonzero(trimmed) == trimmed.size
        assert np.count_nonzero(block) == trimmed.size
        assert (trim is None) == (trimmed.shape == local)


#: A sharding of the compiler, a shape, and what the partitions hold of it, by hand.
TEXTS = {
    "replicated": ("{replicated}", (5,), [[(0, 5)]] * 4),
    "tiled": ("{devices=[4]<=[4]}", (8,), [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]),
    "out of order": ("{devices=[4]2,0,3,1}", (8,), [[(2, 4)], [(6, 8)], [(0, 2)], [(4, 6)]]),
    "transposed": (
        "{devices=[2,2]<=[2,2]T(1,0)}",
        (4, 6),
        [[(0, 2), (0, 3)], [(2, 4), (0, 3)], [(0, 2), (3, 6)], [(2, 4), (3, 6)]],
    ),
    "replicas": (
        "{devices=[2,2]<=[4] last_tile_dim_replicate}",
        (5,),
        [[(0, 3)], [(0, 3)], [(3, 5)], [(3, 5)]],
    ),
    "replicas out of order": (
        "{devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate}",
        (7, 3),
        [[(0, 7), (0, 2)], [(0, 7), (2, 3)]] * 2,
    ),
    "two kinds of replicas": (
        "{devices=[1,2,2]<=[4] last_tile_dims={manual, replicated}}",
        (7,),
        [[(0, 7)]] * 4,
    ),
    "only padding": ("{devices=[4]<=[4]}", (2,), [[(0, 1)], [(1, 2)], [(2, 2)], [(2, 2)]]),
    "nothing": ("{devices=[4,1]<=[4]}", (0, 3), [[(0, 0), (0, 3)]] * 4),
    "scalar": ("{replicated}", (), [[]] * 4),
}


@pytest.mark.parametrize("case", TEXTS)
def test_shardings_of_the_compiler(case):
    """What the compiler may say is read as it is meant."""
    text, shape, wanted = TEXTS[case]
    found = placement(shape, HloSharding.from_string(text), 4)
    assert [slices(found.index(i)) for i in range(4)] == [tuple(w) for w in wanted]


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("partitions", [1, 2, 6, 8])
def test_stacked_results(partitions, shape):
    """Of results that are stacked, partition i holds row i, all of it."""
    found = placement((partitions, *shape), stacked(shape, partitions), partitions)
    for partition in range(partitions):
        row = (partition, partition + 1)
        assert slices(found.index(partition)) == (row, *((0, n) for n in shape))


@given(mesh_shapes(max_devices=64))
def test_mesh_coordinates(shape):
    """The i-th partition lies at the i-th place of the mesh, from major to minor."""
    mesh = fake_mesh(shape)
    for partition, at in enumerate(np.ndindex(*mesh.devices.shape)):
        found = mesh_coordinates(shape, partition)
        assert found == dict(zip(shape, at, strict=True))
        assert all(type(i) is int for i in found.values())
    assert mesh_coordinates(shape, mesh.size) == {}


def test_no_mesh_has_no_coordinates():
    """Without axes there is nothing to say."""
    assert [mesh_coordinates({}, i) for i in range(3)] == [{}] * 3


def test_sites_of_one_text_are_one():
    """What programs carry tells sites apart that differ in anything."""
    places = [
        Placement(shape=shape, tiles=(tiles,), coordinates=tuple((i,) for i in order))
        for shape in ((8,), (4,))
        for tiles in (2, 1)
        for order in ((0, 1), (1, 0))
    ]
    sites = [
        Site(mode, partitions, axes, (place,) * count)
        for mode, partitions, axes, place, count in itertools.product(
            ("one", "shards"), (2, 4), ({"x": 2}, {"y": 2}, {}), places, (1, 2)
        )
    ]
    assert len({repr(s) for s in sites}) == len(sites)
