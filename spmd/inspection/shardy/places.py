"""Which device has which part of a value, and which sends its own to which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math

import numpy as np

from spmd.inspection.hlo.groups import Groups, part_of
from spmd.inspection.shardy.passes import Dimensions


def moves(before: Dimensions, after: Dimensions, sizes: Mapping[str, int]) -> Groups:
    """Pairs of source and target where parts change places; replicas keep the order of the rest.

    Args:
        before: what splits the value, in as many parts as after.
        after: what splits it then.
        sizes: of the mesh axes, major to minor.
    """
    return tuple(zip(_order(before, sizes), _order(after, sizes), strict=True))


def _order(dimensions: Dimensions, sizes: Mapping[str, int]) -> list[int]:
    """The devices in the order of their places along the axes that a sharding names, in turn."""
    shape = tuple(sizes.values())
    devices = np.arange(math.prod(shape))
    places = dict(zip(sizes, np.unravel_index(devices, shape), strict=True))
    keys = [devices]
    for axis in (axis for one in reversed(dimensions) for axis in reversed(one.axes)):
        name, before, size = part_of(axis, sizes)
        keys.append(places[name] * before * size // sizes[name] % size)
    return np.lexsort(keys).tolist()


def stand_ins(
    kept: Sequence[str], free: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, tuple[str, ...]] | None:
    """For each kept axis as many devices along free axes, from the first on; None for too few.

    Of an axis that is longer the major part is taken, as Shardy writes it: ``data:(1)2``.
    """
    found: dict[str, tuple[str, ...]] = {}
    left = [(axis, 1, sizes[axis]) for axis in free if sizes[axis] > 1]
    for axis in kept:
        needed, taken = sizes[axis], []
        while needed > 1:
            if not left:
                return None
            name, before, size = left.pop(0)
            part = math.gcd(needed, size)
            if part not in (needed, size):
                return None
            taken.append(name if part == sizes[name] else f"{name}:({before}){part}")
            needed //= part
            if part < size:
                left.insert(0, (name, before * part, size // part))
        found[axis] = tuple(taken)
    return found
