"""Which device holds which part of an array: the record, and how it is found."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

from spmd.errors import (
    ArgumentError,
    Failure,
    MeshError,
    OptionError,
    did_you_mean,
    explain,
)
from spmd.inspection.records.arrays import Argument, Split
from spmd.inspection.records.shown import Saved
from spmd.inspection.records.sizes import show_bytes

if TYPE_CHECKING:
    from spmd.inspection.records.report import Report


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of an array, and the devices that hold it.

    Attributes:
        index: ``(start, stop)`` by dimension; equal where a device holds nothing.
        devices: ids of those that hold it, in mesh order; of a mesh without devices, places in it.
        at: inside of `jax.shard_map`, the place on the manual axes over which the value varies,
            as ``(axis, place)`` pairs; `index` is then within the value of that place.
    """

    index: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]
    at: tuple[tuple[str, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(stop - start for start, stop in self.index)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picture(Saved):
    """Which device holds which part of an array; `print` it, or let a notebook show it.

    Attributes:
        shape: of the whole array; inside of `jax.shard_map`, that of its value on one place.
        dtype: in short, such as ``f32``; empty where only a shape is known.
        itemsize: bytes of an element; 0 where that is not known.
        sharding: as one writes it.
        mesh: size by axis name; empty where the sharding has no mesh.
        platform: of the devices; empty for a mesh that has none.
        shards: every part once, in the order of the array. Empty where nothing is known yet.
        notes: what else has to be known, in sentences.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    sharding: str
    mesh: Mapping[str, int]
    platform: str
    shards: tuple[Shard, ...]
    notes: tuple[str, ...] = ()

    __hash__ = None  # type: ignore[assignment]  # it holds a mapping


#: Pictures that are drawn of one tree; what it has beyond them is counted.
MOST_DRAWN = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pictures(Saved):
    """What `visualize` gives for a tree: `print` it, or let a notebook show it.

    Attributes:
        pictures: by path of the leaf, such as ``['layers'][0]['w']``, in the order of the tree.
    """

    pictures: dict[str, Picture]

    __hash__ = None  # type: ignore[assignment]  # it holds a dict

    @property
    def drawn(self) -> list[tuple[str, Picture]]:
        """The first ones with their paths, as many as are drawn."""
        return [*self.pictures.items()][:MOST_DRAWN]

    @property
    def rest(self) -> str:
        """What is said of those that are not drawn; empty where all are."""
        more = len(self.pictures) - MOST_DRAWN
        return f"and {more:,} more, not drawn: give a part of the tree" if more > 0 else ""


# From splits to shards


def shards_of(
    shape: Sequence[int],
    splits: Sequence[Split],
    mesh: Mapping[str, int],
    device_ids: Sequence[int],
    varying: Sequence[str] = (),
) -> tuple[Shard, ...]:
    """Every part of an array with its devices; over manual axes that vary, whole values differ."""
    found: dict[Any, list[int]] = {}
    places = itertools.product(*map(range, mesh.values()))
    for place, device in zip(places, device_ids, strict=True):
        coordinate = dict(zip(mesh, place, strict=True))
        at = tuple((axis, coordinate[axis]) for axis in varying)
        pairs = zip(splits, shape, strict=True)
        index = tuple(split.range_at(coordinate, size, mesh) for split, size in pairs)
        found.setdefault((at, index), []).append(device)
    return tuple(
        Shard(index=index, devices=tuple(devices), at=at)
        for (at, index), devices in sorted(found.items())
    )


def of_argument(report: Report, path: str) -> Picture:
    """The picture of an argument of a report, by its path there, such as ``batch['x']``."""
    found = next((one for one in report.arguments if one.path == path), None)
    if found is None:
        paths = [one.path for one in report.arguments]
        shown = ", ".join(paths[:12]) + (f" and {len(paths) - 12} more" if paths[12:] else "")
        failure = Failure(
            what=f"has no argument {path}{did_you_mean(path, paths)}",
            expected=f"one of {shown}" if paths else "a report that holds its arguments",
            error=OptionError,
        )
        raise explain(f"report of `{report.name}`", [failure])
    return _of_argument(report, found)


def _of_argument(report: Report, one: Argument) -> Picture:
    shards: tuple[Shard, ...] = ()
    if one.splits is not None and len(report.device_ids) == math.prod(report.mesh.values()):
        shards = shards_of(one.shape, one.splits, report.mesh, report.device_ids)
    elements = math.prod(split.block for split in one.splits) if one.splits else 1
    return Picture(
        shape=one.shape,
        dtype=one.dtype,
        itemsize=one.nbytes // elements if elements else 0,
        sharding=one.sharding,
        mesh=report.mesh,
        platform=report.backend,
        shards=shards,
        notes=() if shards else ("No PartitionSpec says which part lies where.",),
    )


# Pictures in two dimensions


Part = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A picture of two dimensions: one for each block of the others.

    Attributes:
        title: the block of the others; empty where there is one sheet only.
        rows: what stands before each row; empty texts where no dimension goes down.
        columns: what stands above each column; empty texts where none goes to the right.
        cells: by row and column; what is not there no device holds.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[int, int], Shard]


def sheets(picture: Picture) -> tuple[Sheet, ...]:
    """The two-dimensional pictures of an array of any rank.

    The last two dimensions that are cut go down and to the right; there is a sheet for each block
    of the cut dimensions before them, and for each place on manual axes. Where nothing but manual
    axes tells devices apart, one sheet has the places on them instead.
    """
    if not picture.shards:
        return ()
    ranges = _ranges(picture)
    if ranges is None:
        return (_sheet_of_places(picture.shards),)
    row_dim, column_dim = _drawn_dims(ranges)
    drawn = {row_dim, column_dim}
    others = [d for d, cuts in enumerate(ranges) if d not in drawn and len(cuts) > 1]
    groups: dict[Any, list[Shard]] = {}
    for shard in picture.shards:
        groups.setdefault((shard.at, tuple(shard.index[d] for d in others)), []).append(shard)

    def place(shard: Shard, dim: int | None) -> int:
        return 0 if dim is None else bisect.bisect_left(ranges[dim], shard.index[dim])

    def labels(dim: int | None) -> tuple[str, ...]:
        return ("",) if dim is None else tuple(f"{a}:{b}" for a, b in ranges[dim])

    return tuple(
        Sheet(
            title=_sheet_title(at, dict(zip(others, block, strict=True)), len(ranges)),
            rows=labels(row_dim),
            columns=labels(column_dim),
            cells={(place(s, row_dim), place(s, column_dim)): s for s in found},
        )
        for (at, block), found in groups.items()
    )


def directions(picture: Picture) -> str:
    """Which dimensions go which way; empty for a matrix and below, where that is plain."""
    if len(picture.shape) < 3 or not picture.shards:
        return ""
    ranges = _ranges(picture)
    if ranges is None:
        return ""
    down, right = _drawn_dims(ranges)
    ways = ((down, "down"), (right, "to the right"))
    return ", ".join(f"dimension {dim} {way}" for dim, way in ways if dim is not None)


def _ranges(picture: Picture) -> list[list[Part]] | None:
    """The blocks of each dimension; None where nothing but manual axes tells devices apart."""
    ranges = [sorted({s.index[d] for s in picture.shards}) for d in range(len(picture.shape))]
    whole = all(len(cuts) == 1 for cuts in ranges)
    return None if whole and picture.shards[0].at else ranges


def _sheet_of_places(shards: Sequence[Shard]) -> Sheet:
    """Places on manual axes: the last axis to the right, the others down."""
    rows = list(dict.fromkeys(shard.at[:-1] for shard in shards))
    columns = list(dict.fromkeys(shard.at[-1:] for shard in shards))
    return Sheet(
        title="",
        rows=tuple(_show_at(place) for place in rows),
        columns=tuple(_show_at(place) for place in columns),
        cells={(rows.index(s.at[:-1]), columns.index(s.at[-1:])): s for s in shards},
    )


def _show_at(at: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{axis}={place}" for axis, place in at)


def _drawn_dims(ranges: Sequence[Sequence[Part]]) -> tuple[int | None, int | None]:
    cut = [d for d, cuts in enumerate(ranges) if len(cuts) > 1]
    if len(ranges) < 2:
        return None, 0 if ranges else None
    if len(ranges) == 2 or not cut:
        return len(ranges) - 2, len(ranges) - 1
    if len(cut) == 1:
        # A last dimension goes to the right, as in a matrix; any other goes down.
        return (None, cut[0]) if cut[0] == len(ranges) - 1 else (cut[0], None)
    return cut[-2], cut[-1]


def _sheet_title(at: Sequence[tuple[str, int]], block: Mapping[int, Part], rank: int) -> str:
    parts = [f"{block[d][0]}:{block[d][1]}" if d in block else ":" for d in range(rank)]
    index = f"[{', '.join(parts)}]" if block else ""
    return "  ".join(part for part in (_show_at(at), index) if part)


# Words


def show_devices(ids: Sequence[int], *, most: int = 5) -> str:
    """Ids in few words: runs as ``0-7``, equal steps as ``0-56 by 8``, and otherwise the first."""
    steps = {b - a for a, b in itertools.pairwise(ids)}
    if len(ids) > 2 and len(steps) == 1:
        step = steps.pop()
        if step == 1:
            return f"{ids[0]}-{ids[-1]}"
        if step > 1 and len(ids) > 4:
            return f"{ids[0]}-{ids[-1]} by {step}"
    shown = ",".join(map(str, ids[:most]))
    return f"{shown},... ({len(ids):,})" if len(ids) > most else shown


def summary(picture: Picture) -> str:
    """How many shards of which size are on how many devices each, and which dimensions go where."""
    return "; ".join(filter(None, (_sizes(picture), directions(picture))))


def _sizes(picture: Picture) -> str:
    if not picture.shards:
        return ""
    full = [shard for shard in picture.shards if math.prod(shard.shape)] or [*picture.shards]
    sizes = sorted({shard.shape for shard in full}, key=math.prod)
    parts = [_count(len(full), "shard"), "of", _size(picture, sizes[-1])]
    if len(sizes) > 1:
        parts += ["down to", _size(picture, sizes[0])]
    copies = sorted({len(shard.devices) for shard in full})
    on = _count(copies[0], "device") if len(copies) == 1 else f"{copies[0]} to {copies[-1]} devices"
    empty = sum(len(shard.devices) for shard in picture.shards) - sum(
        len(shard.devices) for shard in full
    )
    more = f"; {_count(empty, 'device')} with nothing" if empty else ""
    return f"{' '.join(parts)}, {'each ' if len(full) > 1 else ''}on {on}{more}"


def _size(picture: Picture, shape: Sequence[int]) -> str:
    text = f"{picture.dtype}[{','.join(map(str, shape))}]"
    if not picture.itemsize:
        return text
    return f"{text} ({show_bytes(math.prod(shape) * picture.itemsize)})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def heading(picture: Picture) -> str:
    """The array, its sharding and the mesh."""
    mesh = ", ".join(f"{name}={size}" for name, size in picture.mesh.items())
    array = f"{picture.dtype}[{','.join(map(str, picture.shape))}]"
    return f"{array} as {picture.sharding}{f' on mesh {mesh}' if mesh else ''}"


def no_shape(what: str) -> Exception:
    """The error of a sharding that is given without a shape."""
    failure = Failure(
        what=f"needs the shape of the array: {what} has none",
        fix="spmd.visualize(..., shape=(8, 16))",
        error=OptionError,
    )
    return explain("visualize", [failure])


def no_mesh() -> Exception:
    """The error of a PartitionSpec without a mesh."""
    failure = Failure(
        what="needs a mesh for a PartitionSpec, and there is none here",
        fix='with spmd.make_mesh({"data": 4, "model": 2}): ...\nor give a NamedSharding',
        error=MeshError,
    )
    return explain("visualize", [failure])


def no_sharding(given: object, path: str = "") -> Exception:
    """The error of something that lies on no devices; `path` is its place in a tree."""
    failure = Failure(
        what=f"finds no sharding in {f'leaf {path}' if path else 'what it is given'}",
        expected="an array of JAX, a ShapeDtypeStruct with a sharding, a sharding or a "
        "PartitionSpec",
        got=f"a value of type {type(given).__name__}",
        error=ArgumentError,
    )
    return explain("visualize", [failure])
