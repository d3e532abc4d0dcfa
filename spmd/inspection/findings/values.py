"""Findings on values between arguments and results, from how Shardy's propagation splits them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
import itertools
import math
from typing import Any, NamedTuple

from spmd.inspection.records.names import direction_of, users_own
from spmd.inspection.records.report import DTYPES, Finding, Shape, Source
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.propagation import Propagation, Value, frames_at

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

    Args:
        found: how the annotations split the values.
        compiled: the shapes that take memory in the compiled program. The partitioner may do
            better than the annotations demand, and values may be fused away.
        told: values that are whole because of what another finding says.
    """
    # Of several meshes that give an axis several sizes, which one to split over cannot be known.
    if math.prod(found.axis_sizes.values()) == 1 or found.names:
        return
    lines = Lines(found)
    residuals = {i for i in _residuals(found) if _shape(found.values[i]) in compiled}
    yield from _whole(found, lines, _without(residuals, told), "replicated-residual")
    # What is kept is made, stacked and read on the same line.
    known = {lines[i].key for i in residuals}
    others = {i for i in _large_results(found) if _shape(found.values[i]) in compiled} - residuals
    others = {i for i in others if lines[i].key not in known}
    yield from _whole(found, lines, _without(others, told), "replicated-value")
    yield from _uneven(found, lines, compiled)


# Lines


class _Line(NamedTuple):
    """Where a value is made.

    Args:
        own: the user's line that makes it, or calls what does; None where all is in libraries.
        inner: the innermost line, whoever's it is.
    """

    own: Source | None
    inner: Source | None

    @property
    def key(self) -> tuple[str, int]:
        """What values of the same line have in common."""
        source = self.own or self.inner
        return (source.file, source.line) if source else ("", 0)


class Lines(dict[int, _Line]):
    """The line of each value, read where it is asked for: that takes time."""

    def __init__(self, found: Propagation):
        super().__init__()
        self._values = found.values

    def __missing__(self, i: int) -> _Line:
        value = self._values[i]
        parts = (passes.frames_of(one.location) for one in around_of(value))
        frames = itertools.chain(frames_at(value), *parts)
        inner = next(frames, None)
        own = next(filter(users_own, itertools.chain([inner], frames)), None)
        self[i] = _Line(own=own, inner=inner)
        return self[i]


def around_of(value: Value) -> Iterator[Any]:
    """The operations of MLIR that a value is inside of, such as calls, innermost first.

    The operations of a function of its own, as `jax.jit` makes one, have only the frames and the
    name stack from there on: the call of it has the rest.
    """
    one = value.operation
    while one is not None and (one := one.parent) is not None and one.name != "func.func":
        one = one.operation
        yield one


# Sizes


def _shape(value: Value) -> Shape:
    return Shape(dtype=value.dtype, dims=value.shape)


def _nbytes(value: Value) -> int:
    """Bytes of all of a value; none of what is no array, such as a token."""
    return _shape(value).nbytes if value.dtype in DTYPES else 0


def parts_of(found: Propagation, axes: Iterable[str]) -> int:
    """In how many parts a dimension is split over these axes."""
    return math.prod(passes.size_of(axis, found.axis_sizes) for axis in axes)


def shard_of(found: Propagation, value: Value) -> Shape:
    """The part of a value that a device holds, padding included."""
    pairs = zip(value.shape, value.axes, strict=True)
    return Shape(dtype=value.dtype, dims=tuple(-(-n // parts_of(found, axes)) for n, axes in pairs))


def _is_whole(value: Value) -> bool:
    """Whether every device holds all of a value, though nobody asked for that."""
    return not value.local and not any(value.axes) and value.mark is None


def _largest_by_line(lines: Lines, sizes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Of the values of each line the one with most bytes, and these."""
    best: dict[tuple[str, int], tuple[int, int]] = {}
    for i, nbytes in sizes.items():
        key = lines[i].key
        if key not in best or nbytes > best[key][1]:
            best[key] = (i, nbytes)
    yield from best.values()


# Values that are whole on every device


def _large_results(found: Propagation) -> Iterator[int]:
    """Results of operations, but for what has the shape of an argument that is whole itself.

    The gradient of a weight is often made transposed, and a weight transposed to make others.
    """
    arguments = _whole_shapes(found)
    for i, value in enumerate(found.values):
        if value.kind == "result" and value.plain and value.name not in _FREE:
            large = _is_whole(value) and _nbytes(value) >= LARGE
            if large and not _forms(found, i) & arguments and frames_at(value):
                yield i


def _whole_shapes(found: Propagation) -> set[tuple[int, ...]]:
    """The shapes of arguments that are whole, and of what a loop takes them apart to.

    A loop takes arguments apart along their first dimension.
    """
    wholes = [v.shape for v in found.values if v.kind == "argument" and not any(v.axes)]
    return {*wholes, *(s[1:] for s in wholes), *((1, *s[1:]) for s in wholes)}


#: What turns a value over, or writes it otherwise, and leaves it what it is.
_TURNS = ("transpose", "reshape", "convert", "reverse")


def _forms(found: Propagation, i: int) -> set[tuple[int, ...]]:
    """The shapes of a value, of what it is turned to, and of what it was turned from."""
    pending, seen = [i], {i}
    while pending:
        for link in map(found.links.__getitem__, found.values[pending.pop()].links):
            if link.name in _TURNS:
                fresh = {*link.values} - seen
                seen |= fresh
                pending += fresh
    return {found.values[i].shape for i in seen}


def _is_argument(found: Propagation, i: int) -> bool:
    """Whether a value is an argument, turned over."""
    while found.values[i].kind == "result":
        links = (found.links[k] for k in found.values[i].links if found.links[k].values[-1] == i)
        link = next((link for link in links if link.name in _TURNS), None)
        if link is None:
            return False
        i = link.values[0]
    return True


def _without(values: Iterable[int], told: Container[int]) -> set[int]:
    return {i for i in values if i not in told}


def _residuals(found: Propagation) -> Iterator[int]:
    """Values that the forward pass makes whole, and the backward pass takes."""
    backward = [link for link in found.links if direction_of(link.op_name) == "backward"]
    for i in {i for link in backward for i in link.values[: link.operands]}:
        value = found.values[i]
        forward = value.kind == "result" and direction_of(value.op_name) == "forward"
        large = _nbytes(value) >= LARGE and _is_whole(value)
        if forward and large and value.name not in _FREE and not _is_argument(found, i):
            yield i


def _whole(
    found: Propagation, lines: Lines, indices: Iterable[int], kind: str
) -> Iterator[Finding]:
    sizes = {i: _nbytes(found.values[i]) for i in sorted(indices)}
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
            facts=tuple(_where(lines[i])),
            fix=_constraint(found, value, lines[i])
            + (", or jax.checkpoint around it" if residual else ""),
        )


def _where(line: _Line) -> Iterator[str]:
    if line.own:
        yield f"no mesh axis reaches it; why('{place_of(line.own)}') shows where they stop"
        return
    yield "no mesh axis reaches it"
    if line.inner:
        yield f"it is made in a library, at {place_of(line.inner)}"


def place_of(source: Source) -> str:
    """The name of a file and a line in it, without folders."""
    return f"{source.file.rpartition('/')[2]}:{source.line}"


def split_of(
    shape: Sequence[int], mesh: Mapping[str, int], dimensions: Iterable[int] | None = None
) -> str | None:
    """A spec that would split an array, over the largest mesh axis that divides a dimension.

    Args:
        shape: of the array.
        mesh: size by axis name.
        dimensions: in which order they are tried; by default the largest first.

    Returns:
        None where no axis divides any dimension.
    """
    for d in dimensions or sorted(range(len(shape)), key=lambda d: -shape[d]):
        for axis in sorted(mesh, key=lambda name: -mesh[name]):
            if mesh[axis] > 1 and shape[d] % mesh[axis] == 0:
                return f"P({', '.join([*['None'] * d, repr(axis)])})"
    return None


def _constraint(found: Propagation, value: Value, line: _Line) -> str:
    """The constraint that would split a value."""
    # What a loop stacks is made in its body, without the first dimension.
    stacked = value.name == "while" and len(value.shape) > 1
    shape = value.shape[1:] if stacked else value.shape
    # The first dimension of what is computed is the batch, as a rule.
    spec = split_of(shape, found.axis_sizes, range(len(shape))) or "P(...)"
    elsewhere = "on that line" if line.own else "on what goes into that library or comes out of it"
    where = "in the body of the loop" if stacked else elsewhere
    return f"with_sharding_constraint(value, {spec}) {where}"


# Padding


def _uneven(found: Propagation, lines: Lines, compiled: Container[Shape]) -> Iterator[Finding]:
    sizes = {
        i: waste
        for i, value in enumerate(found.values)
        if value.plain and not value.local and (waste := _padding(found, value)) >= PADDED
        if shard_of(found, value) in compiled
    }
    for i, waste in _largest_by_line(lines, sizes):
        value = found.values[i]
        d = next(d for d, n in enumerate(value.shape) if n % parts_of(found, value.axes[d]))
        n, axes = value.shape[d], value.axes[d]
        parts = parts_of(found, axes)
        yield Finding(
            kind="uneven-split",
            subject=f"{n} elements are split over {parts} devices",
            source=lines[i].own,
            nbytes=waste,
            measure="memory",
            facts=(
                f"dimension {d} of {_shape(value)} of {value.name or value.kind}, "
                f"over {', '.join(axes)}",
                f"each device holds {-(-n // parts)} and computes with them; "
                f"{-(-n // parts) * parts - n} of all are padding",
            ),
            fix=f"make the dimension {-(-n // parts) * parts}, or split another one",
        )


def _padding(found: Propagation, value: Value) -> int:
    """Bytes of a shard that hold no element of the value, on average over the devices."""
    pairs = [(n, parts_of(found, axes)) for n, axes in zip(value.shape, value.axes, strict=True)]
    if all(n % parts == 0 for n, parts in pairs) or value.dtype not in DTYPES:
        return 0
    shard = shard_of(found, value).nbytes
    return shard - _shape(value).nbytes // math.prod(parts for _, parts in pairs)
