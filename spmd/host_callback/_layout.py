"""Which part of a global array each device of a program holds: integer arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import math
from typing import Any

import numpy as np

from spmd import _jax

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How one operand is split.

    Attributes:
        shape: Its global shape.
        tiles: Into how many parts each dimension is split.
        coordinates: Per partition its place in `tiles`, ``[partitions, ndim]``.
    """

    shape: tuple[int, ...]
    tiles: tuple[int, ...]
    coordinates: tuple[tuple[int, ...], ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape that every device holds, padding included."""
        return tuple(-(-n // t) for n, t in zip(self.shape, self.tiles, strict=True))

    def index(self, partition: int) -> Slices:
        """The part of the global array that a partition holds; empty where it holds padding."""
        return tuple(
            slice(min(n, i * k), min(n, (i + 1) * k))
            for n, i, k in zip(
                self.shape, self.coordinates[partition], self.local_shape, strict=True
            )
        )

    def trim(self, partition: int) -> Slices | None:
        """What to take of the memory of a partition; None for all of it."""
        extents = tuple(s.stop - s.start for s in self.index(partition))
        return None if extents == self.local_shape else tuple(slice(0, n) for n in extents)


def placement(shape: Sequence[int], sharding: Any, partitions: int) -> Placement:
    """Reads how an operand is split from the sharding that the partitioner chose."""
    ndim = len(shape)
    if sharding.is_replicated() or sharding.is_maximal() or not sharding.is_tiled():
        tiles, places = (1,) * ndim, [(0,) * ndim] * partitions
    else:
        dims = sharding.tile_assignment_dimensions()
        tiles = tuple(dims[:ndim])
        places = [(0,) * ndim] * partitions
        for at, device in enumerate(sharding.tile_assignment_devices()):
            places[device] = tuple(int(i) for i in np.unravel_index(at, dims)[:ndim])
    return Placement(shape=tuple(shape), tiles=tiles, coordinates=tuple(places))


def stacked(shape: Sequence[int], partitions: int) -> Any:
    """The sharding of one result per device, stacked along a new leading dimension."""
    if partitions == 1:
        return _jax.core.HloSharding.replicate()
    return _jax.core.HloSharding.iota_tile([partitions] + [1] * len(shape))


def mesh_coordinates(axes: dict[str, int], partition: int) -> dict[str, int]:
    """The place of a partition in the mesh; partitions are numbered from major to minor."""
    if not axes or partition >= math.prod(axes.values()):
        return {}
    places = np.unravel_index(partition, tuple(axes.values()))
    return {name: int(i) for name, i in zip(axes, places, strict=True)}
