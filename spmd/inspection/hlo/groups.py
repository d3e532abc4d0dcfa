"""Which devices take part in a collective together, and which mesh axes they lie along.

XLA spells replica groups in four ways, and numbers the participants in up to three. Both are
turned into *logical devices*: position ``i`` of the program's device assignment, which for a mesh
is ``mesh.devices.flat[i]``, whatever ids the devices have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import itertools
import math
import re

import numpy as np

from spmd.inspection.hlo.text import Instruction, Module, base_opcode, integers

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
# XLA writes names of axes as they are, brackets and line ends included. A single quote in one it
# cannot read itself.
_NAME = r"'[^']*'"
_MESH = re.compile(
    rf"mesh\[(?P<axes>(?:{_NAME}|[^\]'])*)\]"
    r"(?:,? ?device_ids=\((?P<devices>[^{]*)\))?"
    rf" ?\{{(?P<names>(?:{_NAME}|[^}}'])*)\}}"
)
_SENT_PAIRS = re.compile(r'\b_xla_send_recv_source_target_pairs="?(\{(?:\{[\d, ]*\},?)*\})')
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_AXIS_REF = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_PART = re.compile(r":\((\d+)\)(\d+)$")
_DEVICE_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")


def expand_replica_groups(text: str) -> Groups:
    """Expand the text of a ``replica_groups`` attribute to lists of numbers.

    Args:
        text: one of ``{{0,1},{2,3}}``, ``{}`` (one group of all, given as no group at all), the
            iota form ``[4,2]<=[2,4]T(1,0)``, and the mesh form
            ``mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x':(2)2}``.

    Returns:
        The groups, each in the order written.

    Raises:
        ValueError: the text is none of these.
    """
    text = text.strip()
    if text.startswith("{"):
        return tuple(integers(group) for group in re.findall(r"\{([\d, ]+)\}", text))
    if iota := _IOTA.match(text):
        shape, dims, perm = map(integers, iota.groups())
        return _rows(counted(dims, perm).reshape(shape[0], -1))
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh["axes"], mesh["devices"], mesh["names"])
    raise ValueError(f"replica groups in an unknown spelling: {text!r}")


def counted(dims: Sequence[int], perm: Sequence[int]) -> np.ndarray:
    """The devices of an iota form, XLA's V2 device list: count up, reshape, transpose."""
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(perm) if perm else ids


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())


def _mesh_groups(axes: str, devices: str | None, names: str) -> Groups:
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    iota = _DEVICE_IOTA.match((devices or "").strip())
    ids = np.array(integers(devices) or range(math.prod(sizes.values())))
    ids = counted(*map(integers, iota.groups())) if iota else ids
    references = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in _AXIS_REF.findall(names)
    ]
    return _along(ids, sizes, references)


def groups_along(axes: Iterable[str], sizes: Mapping[str, int]) -> Groups:
    """The devices of a mesh, by their places in it, that lie along axes or parts of them.

    Args:
        axes: names, or parts as `mesh_axes_of` spells them: ``x:(2)2``. A part that no name
            describes, ``x:part``, counts as all of its axis.
        sizes: of the mesh axes.
    """
    ids = np.arange(math.prod(sizes.values()))
    return _along(ids, sizes, [part_of(one, sizes) for one in axes])


def part_of(axis: str, sizes: Mapping[str, int]) -> tuple[str, int, int]:
    """The axis that one is, or is a part of, the devices along more major parts, and its own."""
    if axis in sizes:
        return axis, 1, sizes[axis]
    if part := _PART.search(axis):
        return axis[: part.start()], int(part[1]), int(part[2])
    whole = axis.removesuffix(":part")
    return whole, 1, sizes.get(whole, 1)


def _along(
    ids: np.ndarray, sizes: Mapping[str, int], references: Sequence[tuple[str, int, int]]
) -> Groups:
    # Split each axis where a reference takes a part of it, `'x':(pre)size`, then bring the parts
    # that are named to the end, in the order in which they are named.
    # An axis in pieces, major to minor: its name, the product of the sizes before, and the size.
    parts = []
    for name, size in sizes.items():
        ends = [(low, low * part) for n, low, part in references if n == name]
        edges = sorted({1, size, *itertools.chain(*ends)}) if size > 1 else [1, 1]
        parts += [(name, low, high // low) for low, high in itertools.pairwise(edges)]
    grid = ids.reshape([size for _, _, size in parts])
    inside = [parts.index(reference) for reference in references]
    outside = [i for i in range(len(parts)) if i not in inside]
    count = math.prod(size for _, _, size in references)
    return _rows(grid.transpose(outside + inside).reshape(-1, count))


def logical_groups(instruction: Instruction, module: Module) -> Groups:
    """The groups of one collective as logical devices of the whole program.

    XLA numbers the participants by replica, by partition, or by both flattened into one, as the
    attributes ``channel_id`` and ``use_global_device_ids`` say (XLA's "collective op group mode").
    """
    groups = expand_replica_groups(written_groups(instruction))
    if _pairs(instruction):
        groups = connected(groups)
    replicas, partitions = range(module.num_replicas), range(module.num_partitions)

    def flat(r: int, p: int) -> int:
        return r * module.num_partitions + p

    match numbering(instruction):
        case "both":
            return groups or (tuple(flat(r, p) for r in replicas for p in partitions),)
        case "replicas":
            groups = groups or (tuple(replicas),)
            return tuple(tuple(flat(r, p) for r in group) for p in partitions for group in groups)
        case "replicas, all partitions":
            groups = groups or (tuple(replicas),)
            return tuple(tuple(flat(r, p) for r in group for p in partitions) for group in groups)
    groups = groups or (tuple(partitions),)
    return tuple(tuple(flat(r, p) for p in group) for r in replicas for group in groups)


def written_groups(instruction: Instruction) -> str:
    """The groups, or the pairs of a permute, as XLA prints them."""
    return _pairs(instruction) or instruction.attribute("replica_groups") or "{}"


def _pairs(instruction: Instruction) -> str | None:
    """Sources and targets, which a send and its recv have among the front-end's attributes."""
    if instruction.opcode not in ("send", "recv"):
        return instruction.attribute("source_target_pairs")
    found = _SENT_PAIRS.search(instruction.attributes)
    return found[1] if found else None


def numbering(instruction: Instruction) -> str:
    """What the numbers in the groups of a collective count.

    Where a channel is given and `use_global_device_ids` is not, the groups of a reduction or a
    gather, which know that flag, name replicas, and every partition joins in. Those of the others
    name partitions.
    """
    if instruction.attribute("use_global_device_ids") == "true":
        return "both"
    if instruction.attribute("channel_id") is None:
        return "replicas"
    gathers = base_opcode(instruction) in ("all-reduce", "all-gather", "reduce-scatter")
    return "replicas, all partitions" if gathers else "partitions"


def connected(pairs: Iterable[Sequence[int]]) -> Groups:
    """The sets of devices that the source and target pairs of a permute join, smallest first."""
    group_of: dict[int, list[int]] = {}
    for source, target in pairs:
        larger, smaller = (group_of.setdefault(device, [device]) for device in (source, target))
        if larger is smaller:
            continue
        if len(larger) < len(smaller):
            larger, smaller = smaller, larger
        larger += smaller
        # Only the smaller one moves: a ring through a whole pod has thousands of pairs.
        group_of.update(dict.fromkeys(smaller, larger))
    groups = {id(group): group for group in group_of.values()}
    return tuple(sorted(tuple(sorted(group)) for group in groups.values()))


def mesh_axes_of(groups: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes, in order, along which the members of groups of logical devices differ.

    Where groups take only a part of an axis, its name says which, as `Collective.mesh_axes` has it.
    """
    names, sizes = tuple(axis_sizes), tuple(axis_sizes.values())
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(group)
    by_size.pop(1, None)
    rows = [np.sort(np.array(equal), axis=1) for equal in by_size.values()]
    if any(row.min() < 0 or row.max() >= math.prod(sizes) for row in rows):
        return ()
    found = [_parts(row, sizes) for row in rows]
    shown = []
    for i in sorted(set().union(*found)):
        (part, *others) = {parts.get(i) for parts in found}
        if others or part is None:
            shown.append(f"{names[i]}:part")
        else:
            shown.append(names[i] if part == (1, sizes[i]) else f"{names[i]}:({part[0]}){part[1]}")
    return tuple(shown)


_Part = tuple[int, int] | None
"""Sizes before and of the part of an axis that groups take; None where it is no such part."""


def _parts(rows: np.ndarray, sizes: Sequence[int]) -> dict[int, _Part]:
    """The axes along which groups of one size vary, and the part of each that they take."""
    coordinates = np.unravel_index(rows, sizes)
    axes = [i for i, axis in enumerate(coordinates) if (axis != axis[:, :1]).any()]
    # Evenly spaced coordinates of one group may be such a part.
    parts: dict[int, _Part] = dict.fromkeys(axes)
    for i in axes:
        values = np.unique(coordinates[i][0])
        if len(values) > 1:
            inner = len(values) * int(values[1] - values[0])
            parts[i] = None if sizes[i] % inner else (sizes[i] // inner, len(values))
    whole = {i: part for i, part in parts.items() if part}
    are_whole = len(whole) == len(axes) and _are_blocks(rows, whole, sizes)
    return parts if are_whole else dict.fromkeys(axes)


def _are_blocks(
    rows: np.ndarray, parts: Mapping[int, tuple[int, int]], sizes: Sequence[int]
) -> bool:
    """Whether every row is a group that one gets by going through just these parts of the axes."""
    # Each axis as sizes before, of and after its part.
    cuts = [(*parts.get(i, (size, 1)), size) for i, size in enumerate(sizes)]
    split = [(before, count, size // (before * count)) for before, count, size in cuts]
    inside = [3 * i + 1 for i in range(len(sizes))]
    outside = [i for i in range(3 * len(sizes)) if i not in inside]
    grid = np.arange(math.prod(sizes)).reshape([n for three in split for n in three])
    blocks = grid.transpose(outside + inside).reshape(-1, math.prod(n for _, n, _ in split))
    if blocks.shape[1] != rows.shape[1]:
        return False
    blocks = np.sort(blocks, axis=1)
    starting = np.full(grid.size, -1)
    starting[blocks[:, 0]] = np.arange(len(blocks))
    wanted = starting[rows[:, 0]]
    return bool((wanted >= 0).all() and (blocks[wanted] == rows).all())
