"""Reshards for which the partitioner gives every device the whole array.

XLA says so nowhere but in a warning while it compiles. `compile.warned` catches it, and here it is
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import contextlib
import dataclasses
import itertools
import math
import operator
import re
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh

from spmd import _jax
from spmd._recover import parse_op_sharding
from spmd.errors import RecoveryError
from spmd.inspection.findings.values import show_axes
from spmd.inspection.hlo.groups import counted, expand_replica_groups
from spmd.inspection.hlo.text import Module, frames_of, integers, parse_instruction, parse_shapes
from spmd.inspection.records.names import user_source
from spmd.inspection.records.report import Shape, Source

_Axes = tuple[tuple[str, ...], ...]
"""The mesh axes that split each dimension, major to minor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rematerialization:
    """A value that every device gets whole, because it is split anew in one go.

    Attributes:
        source: the user's line that makes the value; None where the warning names none, as for an
            argument.
        op_name: its name-stack path; for an argument, the argument's path.
        shape: of all of it. Where a split is uneven, padding is part of it; where `given` cannot
            be read, it is the part of one device.
        given: how it is split; where that is no PartitionSpec on the mesh, as XLA writes it.
        wanted: how it is to be split, in the same way.
        route: shardings to constrain it to in between, in order, so that each step is a cheap
            exchange; none where none is known.
        nbytes: bytes of the whole value, which each device holds for a while.
        sites: places in the program of which all of this holds.
    """

    source: Source | None
    op_name: str
    shape: Shape
    given: str
    wanted: str
    route: tuple[str, ...]
    nbytes: int
    sites: int = 1


#: All that is read of a warning; what lacks a part of it is none, and passed on.
PARTS = (
    r"\[SPMD\] Involuntary full rematerialization\. .*? "
    r"from sharding (?P<given>\{.*?\}) to (?P<wanted>\{.*?\}) efficiently "
    r"for HLO operation (?P<operation>%?[\w.\-]+ = (?P<shape>[a-z]\w*\[[\d,]*\])\S* .*)"
)


# Reading


def rematerializations(
    lines: Iterable[str], module: Module, axis_sizes: Mapping[str, int]
) -> tuple[Rematerialization, ...]:
    """Reads the partitioner's warnings, with the table of frames of the program that came of it.

    Each line of the user's and each pair of shardings has a record; a text of another form has
    none. The axes of the mesh are in its order, and empty without one.
    """
    found: dict[tuple[Any, ...], Rematerialization] = {}
    for line in lines:
        if one := _read(line, module, axis_sizes):
            name = "" if one.source else one.op_name
            key = (one.source, name, one.shape, one.given, one.wanted)
            sites = found[key].sites + 1 if key in found else 1
            found[key] = dataclasses.replace(found.get(key, one), sites=sites)
    return tuple(found.values())


def _read(line: str, module: Module, axis_sizes: Mapping[str, int]) -> Rematerialization | None:
    parts = re.search(PARTS, line)
    operation = parse_instruction(f"  {parts['operation']}") if parts else None
    if parts is None or operation is None or not (shapes := parse_shapes(parts["shape"])):
        return None
    given, wanted = _tiling(parts["given"]), _tiling(parts["wanted"])
    axes = [_axes(one, axis_sizes) if one else None for one in (given, wanted)]
    shape = _whole(shapes[0], given)
    return Rematerialization(
        source=user_source(frames_of(operation, module)),
        op_name=operation.op_name,
        shape=shape,
        given=parts["given"] if axes[0] is None else show_axes(axes[0]),
        wanted=parts["wanted"] if axes[1] is None else show_axes(axes[1]),
        route=_route(*axes),
        nbytes=shape.nbytes,
    )


def _whole(shard: Shape, given: _Tiling | None) -> Shape:
    """The shape of all of a value: a warning has that of its part on one device."""
    if given is None or len(given.tiles) != len(shard.dims):
        return shard
    dims = tuple(n * parts for n, parts in zip(shard.dims, given.tiles, strict=True))
    return Shape(dtype=shard.dtype, dims=dims)


# Shardings


class _Tiling(NamedTuple):
    """How a value is split.

    Attributes:
        tiles: into how many parts each dimension is.
        devices: all of them, tile by tile, as positions in the program's device assignment.
        plain: False where they do not simply hold parts and copies, as in a `shard_map`.
    """

    tiles: tuple[int, ...]
    devices: tuple[int, ...]
    plain: bool


_TILES = re.compile(r"\{devices=\[([\d,]+)\]((?:<=\[[\d,]+\])?)(?:T\(([\d,]+)\))?([\d,]*)(.*)\}$")
_MESH = re.compile(r"\{(mesh\[.*?\].*?),? \[([^\]]*)\](.*)\}$")
_GROUPS = re.compile(r"last_tile_dims=\{([^}]*)\}")


def _tiling(text: str) -> _Tiling | None:
    """Reads a sharding as XLA prints it; None for one that does not split dimensions."""
    if found := _TILES.match(text):
        return _by_tiles(*found.groups())
    if found := _MESH.match(text):
        with contextlib.suppress(ValueError):  # names of axes with brackets
            return _by_mesh(*found.groups())
    return None


def _by_tiles(sizes: str, iota: str, moved: str | None, listed: str, rest: str) -> _Tiling:
    tiles, devices = integers(sizes), integers(listed)
    if iota:
        devices = tuple(counted(integers(iota), integers(moved)).ravel().tolist())
    groups = _GROUPS.search(rest)
    kinds = groups[1].replace(" ", "").split(",") if groups else []
    last = len(kinds) or int("last_tile_dim_replicate" in rest)
    plain = {*kinds} <= {"replicated"}
    return _Tiling(tiles=tiles[: len(tiles) - last], devices=devices, plain=plain)


def _by_mesh(mesh: str, dimensions: str, rest: str) -> _Tiling:
    names = re.findall(r"\{([^}]*)\}", dimensions)
    tiles = tuple(len(expand_replica_groups(f"{mesh} {{{one}}}")[0]) for one in names)
    # The groups over all axes that split hold one device of each tile, in the order of the tiles.
    groups = expand_replica_groups(f"{mesh} {{{', '.join(filter(None, names))}}}")
    devices = tuple(itertools.chain.from_iterable(zip(*groups, strict=True)))
    plain = not re.search(r"\b(?:unreduced|manual)=\{.", rest)
    return _Tiling(tiles=tiles, devices=devices, plain=plain)


def _axes(one: _Tiling, axis_sizes: Mapping[str, int]) -> _Axes | None:
    """The mesh axes that split each dimension; None where no PartitionSpec says this."""
    if not one.plain or not axis_sizes:
        return None
    proto = _jax.core.OpSharding()
    proto.type = _jax.core.OpSharding.Type.OTHER
    copies = len(one.devices) // math.prod(one.tiles)
    proto.tile_assignment_dimensions = [*one.tiles, copies]
    proto.tile_assignment_devices = list(one.devices)
    proto.replicate_on_last_tile_dim = True
    mesh = AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes))
    try:
        spec: Any = parse_op_sharding(proto, mesh)
    except RecoveryError:
        return None
    partitions = spec.partitions
    return (*partitions, *[()] * (len(one.tiles) - len(partitions)))


def _route(given: _Axes | None, wanted: _Axes | None) -> tuple[str, ...]:
    """The shardings that a value may take in between, each a cheap exchange from the one before.

    By the axes that both have: first those that go are gathered, next the others move to where they
    are to be, and last those that come split what is there. If there are none, those that come
    split first, so that only parts are gathered.
    """
    if given is None or wanted is None:
        return ()
    steps = [_restricted(given, wanted), _restricted(wanted, given)]
    if not any(steps[0]):
        steps = [tuple(map(operator.add, given, wanted))]
    return tuple(show_axes(one) for one in dict.fromkeys(steps) if one not in (given, wanted))


def _restricted(axes: _Axes, others: _Axes) -> _Axes:
    common = {*itertools.chain.from_iterable(others)}
    return tuple(tuple(name for name in names if name in common) for names in axes)
