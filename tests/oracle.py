"""What every device must hold, counted in NumPy, and a sampler of programs to try it on.

The oracle slices the whole value by the mesh coordinate of each device; it asks no sharding of
JAX or of `spmd` where a block lies.
"""

from collections.abc import Callable
from dataclasses import dataclass
import math

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

import spmd


def block_of(value, spec, mesh, coordinate):
    """The block of `value` that the device at `coordinate` (``{axis: index}``) must hold."""
    slices = []
    for dim, entry in enumerate((*spec, *(None,) * (value.ndim - len(spec)))):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        index = 0
        for axis in axes:  # from major to minor
            index = index * mesh.shape[axis] + coordinate[axis]
        size = value.shape[dim] // math.prod(mesh.shape[a] for a in axes)
        slices.append(slice(index * size, (index + 1) * size))
    return value[tuple(slices)]


def assert_sharded(array, expected, spec, mesh, **tolerance):
    """Asserts that each device of the mesh holds its block of `expected`, and no more."""
    expected = np.asarray(expected)
    assert array.shape == expected.shape
    held = {s.device: np.asarray(s.data) for s in array.addressable_shards}
    assert set(held) == set(mesh.devices.flat)
    for at, device in np.ndenumerate(mesh.devices):
        block = block_of(expected, spec, mesh, dict(zip(mesh.axis_names, at, strict=True)))
        np.testing.assert_allclose(held[device], block, **tolerance)


def put(value, mesh, spec):
    """Commits a value to a mesh, through JAX alone."""
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    return jax.device_put(value, jax.sharding.NamedSharding(plain, spec))


def counted(call, *args, **kwargs):
    """Returns the result of a call and what it traced, lowered and compiled."""
    before = spmd.counts()
    result = call(*args, **kwargs)
    return result, spmd.counts() - before


def mesh_of(shape, order=None):
    """A mesh of the first devices with axes ``{name: size}``; `order` permutes them."""
    devices = np.array(jax.devices())
    devices = devices[: math.prod(shape.values())] if order is None else devices[list(order)]
    return spmd.Mesh(devices.reshape(tuple(shape.values())), tuple(shape))


# The sampler

MESHES = {
    "4x2": ({"data": 4, "model": 2}, None),
    "2x2x2": ({"a": 2, "b": 2, "c": 2}, None),
    "8": ({"x": 8}, None),
    "2x4 permuted": ({"data": 2, "model": 4}, (3, 1, 7, 5, 0, 2, 6, 4)),
    "1": ({"x": 1}, None),
}


@dataclass(frozen=True)
class Case:
    """One program: a function twice, in JAX and in NumPy, and how to place it."""

    fun: Callable
    reference: Callable
    args: tuple
    mesh: spmd.Mesh
    in_specs: tuple
    out_spec: P

    def pjit(self, **options):
        """The function under test."""
        return spmd.pjit(
            self.fun,
            in_axis_resources=self.in_specs,
            out_axis_resources=self.out_spec,
            mesh=self.mesh,
            **options,
        )


def _matmul(x, w):
    return jax.numpy.tanh(x @ w)


def _mixed(x, w):
    return (x * x).sum(axis=1) - jax.numpy.exp(-x).mean(axis=1) + w.max()


def _scores(x, w):
    scores = jax.nn.softmax(x @ w.T @ w, axis=-1)
    return jax.numpy.flip(scores, 0) * jax.numpy.arange(8.0, dtype=x.dtype)[None, :]


def _np_scores(x, w):
    e = np.exp(x @ w.T @ w)
    return np.flip(e / e.sum(-1, keepdims=True), 0) * np.arange(8.0, dtype=x.dtype)[None, :]


# JAX function, the same in NumPy, shapes of the arguments, rank of the result.
FUNCTIONS = {
    "matmul": (_matmul, lambda x, w: np.tanh(x @ w), ((16, 8), (8, 24)), 2),
    "mixed": (
        _mixed,
        lambda x, w: (x * x).sum(1) - np.exp(-x).mean(1) + w.max(),
        ((8, 16), (8,)),
        1,
    ),
    "scores": (_scores, _np_scores, ((8, 8), (16, 8)), 2),
}


def _random_spec(rng, axes, rank):
    entries = [()] * rank
    for axis in rng.permutation(axes):
        if rank and rng.random() < 0.6:
            entries[rng.integers(rank)] += (str(axis),)
    return P(*(e or None for e in entries))


def sample(seed, function, mesh):
    """A program with random values and specs; every dimension is a multiple of 8."""
    rng = np.random.default_rng(seed)
    fun, reference, shapes, out_rank = FUNCTIONS[function]
    on = mesh_of(*MESHES[mesh])
    specs = [_random_spec(rng, on.axis_names, n) for n in (*map(len, shapes), out_rank)]
    args = tuple(rng.uniform(-1, 1, s).astype(np.float32) for s in shapes)
    return Case(fun, reference, args, on, tuple(specs[:-1]), specs[-1])


# Every other pair: each function on several meshes, each mesh with some function.
SAMPLES = [
    (seed, function, mesh)
    for seed, (function, mesh) in enumerate((f, m) for m in MESHES for f in FUNCTIONS)
    if seed % 2 == 0
]
