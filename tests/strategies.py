"""Hypothesis strategies for meshes and specs; no strategy needs a real device."""

from dataclasses import dataclass
import math

from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec as P
import numpy as np


@dataclass(frozen=True)
class FakeDevice:
    """What a mesh needs to know of a device, for meshes larger than the machine."""

    id: int
    platform: str = "cpu"
    device_kind: str = "fake"
    process_index: int = 0


def fake_mesh(shape, order=None):
    """A mesh of fake devices with axes ``{name: size}``; `order` permutes the device ids."""
    n = math.prod(shape.values())
    ids = range(n) if order is None else order
    devices = np.array([FakeDevice(i) for i in ids], dtype=object)
    return Mesh(devices.reshape(tuple(shape.values())), tuple(shape))


@st.composite
def mesh_shapes(draw, min_axes=1, max_axes=5, sizes=(1, 2, 2, 3, 4, 6, 7), max_devices=1024):
    """Axes ``{name: size}`` of a mesh; equal sizes, common factors and size 1 are frequent."""
    shape = {}
    for name in "abcdefgh"[: draw(st.integers(min_axes, max_axes))]:
        room = max_devices // math.prod(shape.values())
        shape[name] = draw(st.sampled_from([s for s in sizes if s <= room] or [1]))
    return shape


@st.composite
def meshes(draw, **kwargs):
    """Meshes of fake devices, half of them with device ids out of order."""
    shape = draw(mesh_shapes(**kwargs))
    n = math.prod(shape.values())
    seed = draw(st.none() | st.integers(0, 2**16))
    return fake_mesh(shape, None if seed is None else np.random.default_rng(seed).permutation(n))


@st.composite
def specs(draw, axis_names, rank):
    """A PartitionSpec of `rank` entries that deals some of the axes to dimensions, in any order."""
    entries = [()] * rank
    if rank:
        used = draw(st.lists(st.sampled_from(list(axis_names)), unique=True))
        for axis in used:
            entries[draw(st.integers(0, rank - 1))] += (axis,)
    return P(*entries)


@st.composite
def meshes_and_specs(draw, max_rank=4, **kwargs):
    """A mesh of fake devices and a spec of up to `max_rank` entries on it."""
    mesh = draw(meshes(**kwargs))
    return mesh, draw(specs(mesh.axis_names, draw(st.integers(0, max_rank))))
