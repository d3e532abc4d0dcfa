"""Host functions by the numbers that compiled programs know them by, and how those are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
import math
import secrets
import sys
from typing import Any, NamedTuple
import weakref

import numpy as np

from spmd import _jax
from spmd.host_callback._ffi import bury, bury_soon
from spmd.host_callback._pools import Reaper, fork_safe_lock
from spmd.host_callback._records import HostCall

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How one operand of this global shape is split.

    Attributes:
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
        rows = zip(self.shape, self.coordinates[partition], self.local_shape, strict=True)
        return tuple(slice(min(n, i * k), min(n, (i + 1) * k)) for n, i, k in rows)

    def trim(self, partition: int) -> Slices | None:
        """What to take of the memory of a partition; None for all of it."""
        extents = tuple(s.stop - s.start for s in self.index(partition))
        return None if extents == self.local_shape else tuple(slice(0, n) for n in extents)


def placement(shape: Sequence[int], sharding: Any, partitions: int) -> Placement:
    """Reads how an operand is split from the sharding that the partitioner chose."""
    ndim = len(shape)
    tiles, places = (1,) * ndim, [(0,) * ndim] * partitions
    if sharding.is_tiled() and not (sharding.is_replicated() or sharding.is_maximal()):
        dims = sharding.tile_assignment_dimensions()
        tiles = tuple(dims[:ndim])
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


#: Elements of less than a byte travel as these, and arrive as what they are.
_CARRIERS = {
    "int2": np.int8,
    "int4": np.int8,
    "uint2": np.uint8,
    "uint4": np.uint8,
    "float4_e2m1fn": np.float32,
}


def carrier(dtype: Any) -> np.dtype:
    """The dtype that values of a dtype have on their way between device and host."""
    return np.dtype(_CARRIERS.get(np.dtype(dtype).name, dtype))


class Entry:
    """A host function that compiled programs call; dies with the last of them.

    Attributes:
        id: A random number: that of another process means nothing here.
        carriers: Per operand the dtype that it arrives in.
        size: The bytes of all operands in a program on one device.
    """

    def __init__(self, call: HostCall, avals: tuple[Any, ...]):
        self.call = call
        self.avals = avals
        self.id = secrets.randbits(63)
        self.dtypes = [dtype for _, dtype in avals]
        self.carriers = [carrier(d) for d in self.dtypes]
        sizes = zip(avals, self.carriers, strict=True)
        self.size = sum(math.prod(shape) * c.itemsize for (shape, _), c in sizes)
        # What a program was split like, by the text that its calls carry.
        self._sites: dict[str, Site] = {}

    def site(self, text: str) -> Site:
        """What was said about the calls that carry a text."""
        return self._sites[text]

    def add_site(self, site: Site) -> str:
        """Keeps what is said about some calls; returns the text that they are to carry."""
        text = repr(site)
        self._sites[text] = site
        return text


_reaper = Reaper("spmd.host_callback destroy", lambda _: bury_soon())


class Kept:
    """What the Python side of a program keeps: when it goes, the program soon does, too."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry):
        self.entry = entry
        _reaper.prepare()

    def __del__(self, ends: Any = sys.is_finalizing, take: Any = _reaper.take) -> None:
        if not ends():
            take()

    def __reduce__(self) -> Any:
        # A serialized executable takes what it keeps alive along; host functions do not travel.
        return (unknown, (self.entry.id,))


class Part(NamedTuple):
    """What one partition of a program holds.

    Attributes:
        indices: Under ``"shards"``, per operand the part of the global array.
        trims: Per operand what to take of its memory, None for all of it; None if nothing is
            padded.
    """

    coordinates: dict[str, int]
    indices: list[Slices]
    trims: list[Slices | None] | None


@dataclass(slots=True, eq=False, repr=False)
class Site:
    """How the programs are split that hold one call.

    Attributes:
        mode: Who calls: ``"one"`` device with everything, or each with its part, ``"shards"``;
            inside of `shard_map` each by itself, ``"each"``, or surely all, ``"together"``.
        axes: Those of the mesh.
        placements: Under ``"shards"``, how each operand is split.
    """

    mode: str
    partitions: int
    axes: dict[str, int]
    placements: tuple[Placement, ...] = ()
    _parts: dict[int, Part] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        return f"{self.mode}, {self.partitions}, {self.axes}, {self.placements}"

    def part(self, partition: int) -> Part:
        """What one partition holds; found out once."""
        part = self._parts.get(partition)
        if part is None:
            coordinates = mesh_coordinates(self.axes, partition)
            indices = [p.index(partition) for p in self.placements]
            trims = [p.trim(partition) for p in self.placements]
            padded = any(t is not None for t in trims)
            part = self._parts[partition] = Part(coordinates, indices, trims if padded else None)
        return part


_lock = fork_safe_lock()
_by_id: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
_by_call: weakref.WeakValueDictionary[Any, Entry] = weakref.WeakValueDictionary()


def register(call: HostCall, avals: tuple[Any, ...]) -> Entry:
    """Returns the entry of a host function; equal calls of equal operands share one."""
    bury()  # the main thread may be busy for ever
    with _lock:
        entry = _by_call.get((call, avals))
        if entry is None:
            entry = Entry(call, avals)
            _by_call[call, avals] = _by_id[entry.id] = entry
        return entry


def find(number: int) -> Entry | None:
    """Returns the entry of this number, or None."""
    return _by_id.get(number)


def unknown(number: int) -> str:
    """What a program is told that calls a host function of another process."""
    return (
        f"host callback {number:#x} is not known in this process: the program was compiled by "
        "another one, whose host functions do not travel with it; compile it here"
    )
