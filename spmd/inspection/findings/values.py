"""Findings on arguments that are whole on every device, and on values between them and results."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
import functools
import itertools
import math
import re
from typing import NamedTuple

from jax.sharding import PartitionSpec

from spmd._spec import show_spec
from spmd.inspection.records.arrays import Argument
from spmd.inspection.records.names import direction_of, users_own
from spmd.inspection.records.report import DTYPES, Finding, Shape, Source
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.propagation import Propagation, Value, frames_at, walk

#: Bytes of an array on one device from which on it is worth a finding.
LARGE = 1 << 20

#: Bytes of padding on one device that are.
PADDED = 1 << 16

#: Operations whose results take no memory of their own: what reads them computes them again.
_FREE = ("constant", "iota", "broadcast_in_dim", "sharding_constraint")


def value_findings(
    found: Propagation, compiled: Container[Shape], told: Container[int] = ()
) -> Iterator[Finding]:
    """All findings on values of a program; none on a mesh of one device.

    They are on shapes that take memory in the compiled program: the partitioner may do better than
    the annotations demand, and values may be fused away. What other findings told is left out.
    """
    # Of several meshes that give an axis several sizes, which one to split over cannot be known.
    if math.prod(found.axis_sizes.values()) == 1 or found.names:
        return
    lines = Lines(found)
    wholes = [i for i, value in enumerate(found.values) if _is_whole(value)]
    residuals = {i for i in _residuals(found, wholes) if _shape(found.values[i]) in compiled}
    yield from _whole(found, lines, residuals, told, "replicated-residual")
    # What is kept is made, stacked and read on the same line.
    known = {lines[i].key for i in residuals}
    others = {
        i for i in _large_results(found, wholes) if _shape(found.values[i]) in compiled
    } - residuals
    others = {i for i in others if lines[i].key not in known}
    yield from _whole(found, lines, others, told, "replicated-value")
    yield from _uneven(found, lines, compiled)


# Lines


class _Line(NamedTuple):
    """Where a value is made: the line of the user's that makes it or calls what does, and any."""

    own: Source | None
    inner: Source | None

    @property
    def key(self) -> Place:
        """What values of the same line have in common."""
        return place_of(self.own or self.inner)


Place = tuple[str, int]
"""A file and a line."""


def place_of(source: Source | None) -> Place:
    """The file and the line of a source; one for all without."""
    return (source.file, source.line) if source else ("", 0)


def name_of(source: Source) -> str:
    """The name of a file and a line in it, without folders."""
    return f"{source.file.rpartition('/')[2]}:{source.line}"


def where(own: Source | None) -> str:
    """Where a constraint is written: on the user's line, if there is one."""
    return "on that line" if own else "on what goes into that library or comes out of it"


class Lines(dict[int, _Line]):
    """The line of each value, read where it is asked for: that takes time."""

    def __init__(self, found: Propagation):
        super().__init__()
        self._values = found.values

    def __missing__(self, i: int) -> _Line:
        value = self._values[i]
        holders = passes.holders_of(value.operation) if value.operation is not None else ()
        parts = (passes.frames_of(one.location) for one in holders)
        frames = itertools.chain(frames_at(value), *parts)
        inner = next(frames, None)
        own = next(filter(users_own, itertools.chain([inner], frames)), None)
        self[i] = _Line(own=own, inner=inner)
        return self[i]


# Sizes


def _shape(value: Value) -> Shape:
    return Shape(dtype=value.dtype, dims=value.shape)


def _nbytes(value: Value) -> int:
    """Bytes of all of a value; none of what is no array, such as a token."""
    return _size(value.dtype, value.shape)


@functools.lru_cache(maxsize=1 << 12)
def _size(dtype: str, dims: tuple[int, ...]) -> int:
    return Shape(dtype=dtype, dims=dims).nbytes if dtype in DTYPES else 0


def parts_of(found: Propagation, axes: Iterable[str]) -> int:
    """In how many parts a dimension is split over these axes."""
    return passes.count_of(axes, found.axis_sizes)


def shard_of(found: Propagation, value: Value) -> Shape:
    """The part of a value that a device holds, padding included."""
    pairs = zip(value.shape, value.axes, strict=True)
    return Shape(dtype=value.dtype, dims=tuple(-(-n // parts_of(found, axes)) for n, axes in pairs))


def _is_whole(value: Value) -> bool:
    """Whether every device holds all of a large result, though nobody asked for that."""
    asked = value.local or any(value.axes) or value.mark is not None
    kept = value.kind == "result" and value.name not in _FREE
    return kept and not asked and _nbytes(value) >= LARGE


def _largest_by_line(lines: Lines, sizes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Of the values of each line the one with most bytes, and these."""
    best: dict[Place, tuple[int, int]] = {}
    for one in sizes.items():
        key = lines[one[0]].key
        best[key] = max(best.get(key, one), one, key=lambda pair: pair[1])
    yield from best.values()


# Values that are whole on every device


def _large_results(found: Propagation, wholes: Iterable[int]) -> Iterator[int]:
    """Results that are whole, but for what has the shape of an argument that is whole itself.

    The gradient of a weight is often made transposed, and a weight transposed to make others. A
    loop takes arguments apart along their first dimension.
    """
    given = [v.shape for v in found.values if v.kind == "argument" and not any(v.axes)]
    arguments = {*given, *(s[1:] for s in given), *((1, *s[1:]) for s in given)}
    for i in wholes:
        value = found.values[i]
        if value.plain and not _forms(found, i) & arguments and frames_at(value):
            yield i


#: What turns a value over, or writes it otherwise, and leaves it what it is.
_TURNS = ("transpose", "reshape", "convert", "reverse")


def _forms(found: Propagation, i: int) -> set[tuple[int, ...]]:
    """The shapes of a value, of what it is turned to, and of what it was turned from."""

    def turned(i: int) -> Iterator[int]:
        turns = (link.values for link in found.links_of(i) if link.name in _TURNS)
        return itertools.chain.from_iterable(turns)

    return {found.values[i].shape for i, _, _ in walk([i], turned)}


def _is_argument(found: Propagation, i: int) -> bool:
    """Whether a value is an argument, turned over."""
    while found.values[i].kind == "result":
        turns = (one for one in found.links_of(i) if one.values[-1] == i and one.name in _TURNS)
        link = next(turns, None)
        if link is None:
            return False
        i = link.values[0]
    return True


def _residuals(found: Propagation, wholes: Iterable[int]) -> Iterator[int]:
    """Of the results that are whole, those that the backward pass takes from the forward pass."""
    for i in wholes:
        if direction_of(found.values[i].op_name) == "forward":
            taking = (link for link in found.links_of(i) if i in link.values[: link.operands])
            backward = any(direction_of(link.op_name) == "backward" for link in taking)
            if backward and not _is_argument(found, i):
                yield i


def _whole(
    found: Propagation, lines: Lines, indices: Iterable[int], told: Container[int], kind: str
) -> Iterator[Finding]:
    sizes = {i: _nbytes(found.values[i]) for i in sorted(indices) if i not in told}
    for i, nbytes in _largest_by_line(lines, sizes):
        value, shape = found.values[i], _shape(found.values[i])
        residual = kind == "replicated-residual"
        yield Finding(
            kind=kind,
            subject=f"{shape} of {value.name} is kept whole on every device for the backward pass"
            if residual
            else f"{shape} of {value.name} is whole on every device",
            source=lines[i].own,
            nbytes=nbytes,
            measure="memory",
            facts=_facts(lines[i]),
            fix=_constraint(found, value, lines[i])
            + (", or jax.checkpoint around it" if residual else ""),
        )


def _facts(line: _Line) -> tuple[str, ...]:
    if line.own:
        return (f"no mesh axis reaches it; why('{name_of(line.own)}') shows where they stop",)
    library = [f"it is made in a library, at {name_of(line.inner)}"] if line.inner else []
    return ("no mesh axis reaches it", *library)


def split_of(
    shape: Sequence[int], mesh: Mapping[str, int], dimensions: Iterable[int] | None = None
) -> str | None:
    """A spec that would split an array, over the largest mesh axis that divides a dimension.

    Dimensions are tried in this order, or the largest first. It is None where no axis divides any.
    """
    for d in dimensions or sorted(range(len(shape)), key=lambda d: -shape[d]):
        for axis in sorted(mesh, key=lambda name: -mesh[name]):
            if mesh[axis] > 1 and shape[d] % mesh[axis] == 0:
                return show_axes([*[()] * d, (axis,)])
    return None


def show_axes(axes: Iterable[Iterable[str]]) -> str:
    """The spec that splits each dimension over these axes, without whole ones at its end."""
    entries = [tuple(names) or None for names in axes]
    while entries and not entries[-1]:
        entries.pop()
    return show_spec(PartitionSpec(*entries))


def _constraint(found: Propagation, value: Value, line: _Line) -> str:
    """The constraint that would split a value."""
    # What a loop stacks is made in its body, without the first dimension.
    stacked = value.name == "while" and len(value.shape) > 1
    shape = value.shape[1:] if stacked else value.shape
    # The first dimension of what is computed is the batch, as a rule.
    spec = split_of(shape, found.axis_sizes, range(len(shape))) or "P(...)"
    there = "in the body of the loop" if stacked else where(line.own)
    return f"with_sharding_constraint(value, {spec}) {there}"


# Padding


def _uneven(found: Propagation, lines: Lines, compiled: Container[Shape]) -> Iterator[Finding]:
    padding = functools.cache(functools.partial(_padding, found))  # values have few shapes
    sizes = {
        i: waste
        for i, value in enumerate(found.values)
        if value.plain and not value.local
        if (waste := padding(value.dtype, value.shape, value.axes)) >= PADDED
        if shard_of(found, value) in compiled
    }
    for i, waste in _largest_by_line(lines, sizes):
        value = found.values[i]
        d = next(d for d, n in enumerate(value.shape) if n % parts_of(found, value.axes[d]))
        n, axes = value.shape[d], value.axes[d]
        parts = parts_of(found, axes)
        held = -(-n // parts)
        yield Finding(
            kind="uneven-split",
            subject=f"{n} elements are split over {parts} devices",
            source=lines[i].own,
            nbytes=waste,
            measure="memory",
            facts=(
                f"dimension {d} of {_shape(value)} of {value.name or value.kind}, "
                f"over {', '.join(axes)}",
                f"each device holds {held} and computes with them; "
                f"{held * parts - n} of all are padding",
            ),
            fix=f"make the dimension {held * parts}, or split another one",
        )


def _padding(
    found: Propagation, dtype: str, dims: tuple[int, ...], split: Sequence[Iterable[str]]
) -> int:
    """Bytes of a shard that hold no element of the value, on average over the devices."""
    pairs = [(n, parts_of(found, axes)) for n, axes in zip(dims, split, strict=True)]
    if all(n % parts == 0 for n, parts in pairs):
        return 0
    shard = _size(dtype, tuple(-(-n // parts) for n, parts in pairs))
    return shard - _size(dtype, dims) // math.prod(parts for _, parts in pairs)


# Arguments

#: How many subtrees have a finding of their own, and how many leaves a finding names.
_NAMED = 5

_Keys = tuple[str, ...]
"""A path in parts: the name of the argument, then the key of each level below."""


def whole_arguments(arguments: Sequence[Argument], mesh: Mapping[str, int]) -> Iterator[Finding]:
    """A finding for each subtree all of whose large leaves are whole on every device.

    Of the arguments, those that are split count too. On one device nothing can be split.
    """
    if math.prod(mesh.values()) == 1:
        return
    groups = sorted(_subtrees(arguments).items(), key=lambda one: -_sum(one[1]))
    for keys, leaves in groups[:_NAMED]:
        below = [a for a in arguments if _keys(a.path)[: len(keys)] == keys]
        name, several = "".join(keys), len(leaves) > 1
        fix = _several(name, leaves, below, mesh) if several else _one(leaves, mesh)
        yield _finding(f"the {len(leaves)} large leaves of {name}", leaves, fix)
    if rest := [leaf for _, leaves in groups[_NAMED:] for leaf in leaves]:
        rest.sort(key=_by_size)
        yield _finding(f"{len(rest)} more large arguments", rest, _one(rest, mesh))


def _finding(subject: str, leaves: Sequence[Argument], fix: str) -> Finding:
    several, rest = len(leaves) > 1, len(leaves) - _NAMED
    return Finding(
        kind="replicated-argument",
        subject=f"{subject if several else leaves[0].path} {'are' if several else 'is'} whole on "
        "every device",
        source=None,
        nbytes=_sum(leaves),
        measure="memory",
        facts=(
            *(f"{a.path}: {Shape(dtype=a.dtype, dims=a.shape)}" for a in leaves[:_NAMED]),
            *([f"and {rest} more"] if rest > 0 else []),
        ),
        fix=f"{fix}; if it has to be whole in a computation, a split argument is gathered where "
        "it is used",
    )


def _sum(leaves: Sequence[Argument]) -> int:
    return sum(a.nbytes for a in leaves)


def _subtrees(arguments: Sequence[Argument]) -> Mapping[_Keys, list[Argument]]:
    """The leaves that are large and whole, largest first, by the subtree that they are all of.

    A subtree is as large as it can be without another large leaf in it, and named by what all of
    these leaves have in common.
    """
    # By all of it: a large leaf that is split is no reason to name a subtree that it is in.
    parts = [math.prod(split.parts for split in a.splits or ()) for a in arguments]
    pairs = zip(arguments, parts, strict=True)
    large = [(_keys(a.path), a) for a, n in pairs if a.nbytes * n >= LARGE]
    split = {keys[:n] for keys, a in large if not _is_unsplit(a) for n in range(len(keys))}
    tops: dict[_Keys, list[tuple[_Keys, Argument]]] = {}
    for keys, a in large:
        if _is_unsplit(a):
            above = (keys[:n] for n in range(1, len(keys)) if keys[:n] not in split)
            tops.setdefault(next(above, keys), []).append((keys, a))
    return {
        _common([keys for keys, _ in below]): sorted((a for _, a in below), key=_by_size)
        for below in tops.values()
    }


def _common(paths: Sequence[_Keys]) -> _Keys:
    """The keys that all paths begin with."""
    pairs = itertools.takewhile(lambda keys: len({*keys}) == 1, zip(*paths, strict=False))
    return tuple(keys[0] for keys in pairs)


def _by_size(a: Argument) -> int:
    return -a.nbytes


def _is_unsplit(a: Argument) -> bool:
    return a.splits is not None and all(split.parts == 1 for split in a.splits)


_KEY = re.compile(r"""\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]'"])*\]|\.\w+""")


def _keys(path: str) -> _Keys:
    """The keys that a path consists of; one where it is not written as JAX writes paths."""
    name = re.match(r"[^.\[]*", path)
    keys = ((name[0] if name else ""), *_KEY.findall(path))
    return keys if "".join(keys) == path else (path,)


def _one(leaves: Sequence[Argument], mesh: Mapping[str, int]) -> str:
    spec = split_of(leaves[0].shape, mesh)
    how = f"as {spec}" if spec else "padded to a multiple of a mesh axis"
    return f"split {leaves[0].path} {how}"


def _several(
    name: str, leaves: Sequence[Argument], below: Sequence[Argument], mesh: Mapping[str, int]
) -> str:
    """What to write for a subtree: one spec for all of it, or for its large leaves, or for one."""
    if all(map(_is_unsplit, below)) and (spec := _common_split(below, mesh)):
        return f"split all of {name} as {spec}"
    if spec := _common_split(leaves, mesh):
        return f"split each of these leaves as {spec}"
    return f"a spec for each of these leaves: {_one(leaves, mesh)}"


def _common_split(arguments: Sequence[Argument], mesh: Mapping[str, int]) -> str | None:
    """A spec that splits all of some arrays, over the largest mesh axis that can."""
    for d in range(min(len(a.shape) for a in arguments)):
        common = math.gcd(*(a.shape[d] for a in arguments))
        if spec := split_of((common,), mesh):
            return f"P({'None, ' * d}{spec[2:]}"
    return None
