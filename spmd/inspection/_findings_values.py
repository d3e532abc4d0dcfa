"""Findings on values between arguments and results, from how Shardy's propagation splits them."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math

from spmd.inspection import _shardy
from spmd.inspection._propagation import Link, Propagation, Value, frames_at
from spmd.inspection._records import DTYPES, Finding, Shape, Source
from spmd.inspection._source import direction_of, user_source

#: Bytes of an array on one device from which on it is worth a finding.
LARGE = 1 << 20

#: Bytes of padding on one device that are.
PADDED = 1 << 16

#: Operations whose results take no memory of their own: what reads them computes them again.
_FREE = ("constant", "iota", "broadcast_in_dim", "sharding_constraint")


def value_findings(found: Propagation, compiled: Container[Shape]) -> Iterator[Finding]:
    """All findings on values of a program; none on a mesh of one device.

    Args:
        found: how the annotations split the values.
        compiled: the shapes that take memory in the compiled program. The partitioner may do
            better than the annotations demand, and values may be fused away.
    """
    # Of several meshes that give an axis several sizes, which one to split over cannot be known.
    if math.prod(found.axis_sizes.values()) == 1 or found.names:
        return
    yield from _unsharded_batch(found, compiled)
    residuals = {i for i in _residuals(found) if _shape(found.values[i]) in compiled}
    kept = [*_whole(found, residuals, "replicated-residual")]
    yield from kept
    # What is kept is made, stacked and read on the same line.
    others = {i for i in _large_results(found) if _shape(found.values[i]) in compiled} - residuals
    for one in _whole(found, others, "replicated-value"):
        if all(_line(one.source) != _line(other.source) for other in kept):
            yield one
    yield from _uneven(found, compiled)


# Sizes


def _shape(value: Value) -> Shape:
    return Shape(dtype=value.dtype, dims=value.shape)


def _nbytes(value: Value) -> int:
    """Bytes of all of a value; none of what is no array, such as a token."""
    return _shape(value).nbytes if value.dtype in DTYPES else 0


def _parts(found: Propagation, axes: Iterable[str]) -> int:
    return math.prod(_shardy.size_of(axis, found.axis_sizes) for axis in axes)


def _shard(found: Propagation, value: Value) -> Shape:
    """The part of a value that a device holds, padding included."""
    pairs = zip(value.shape, value.axes, strict=True)
    return Shape(dtype=value.dtype, dims=tuple(-(-n // _parts(found, axes)) for n, axes in pairs))


def _is_whole(value: Value) -> bool:
    """Whether every device holds all of a value, though nobody asked for that."""
    return not value.local and not any(value.axes) and value.mark is None


def _largest_by_line(found: Propagation, sizes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Of the values of each of the user's lines the one with most bytes, and these."""
    best: dict[tuple[str, int], tuple[int, int]] = {}
    for i, nbytes in sizes.items():
        line = _line(user_source(frames_at(found.values[i])))
        if line not in best or nbytes > best[line][1]:
            best[line] = (i, nbytes)
    yield from best.values()


def _line(source: Source | None) -> tuple[str, int]:
    return (source.file, source.line) if source else ("", 0)


# Values that are whole on every device


def _large_results(found: Propagation) -> Iterator[int]:
    """Results of operations, but for what has the shape of an argument that is whole itself.

    A loop takes arguments apart along their first dimension.
    """
    wholes = [v.shape for v in found.values if v.kind == "argument" and not any(v.axes)]
    arguments = {*wholes, *(s[1:] for s in wholes), *((1, *s[1:]) for s in wholes)}
    for i, value in enumerate(found.values):
        if value.kind == "result" and value.plain and value.name not in _FREE:
            is_new = value.shape not in arguments
            if is_new and _is_whole(value) and _nbytes(value) >= LARGE and frames_at(value):
                yield i


def _residuals(found: Propagation) -> Iterator[int]:
    """Values that the forward pass makes whole, and the backward pass takes."""
    backward = [link for link in found.links if direction_of(link.op_name) == "backward"]
    for i in {i for link in backward for i in link.values[: link.operands]}:
        value = found.values[i]
        forward = value.kind == "result" and direction_of(value.op_name) == "forward"
        large = _nbytes(value) >= LARGE
        if forward and large and value.name not in _FREE and _is_whole(value):
            yield i


def _whole(found: Propagation, indices: Iterable[int], kind: str) -> Iterator[Finding]:
    sizes = {i: _nbytes(found.values[i]) for i in sorted(indices)}
    for i, nbytes in _largest_by_line(found, sizes):
        value, shape = found.values[i], _shape(found.values[i])
        source = user_source(frames_at(value))
        residual = kind == "replicated-residual"
        yield Finding(
            kind=kind,
            subject=f"{shape} of {value.name} is kept whole on every device for the backward pass"
            if residual
            else f"{shape} of {value.name} is whole on every device",
            source=source,
            nbytes=nbytes,
            measure="memory",
            facts=(f"no mesh axis reaches it; why('{_place(source)}') shows where they stop",)
            if source
            else ("no mesh axis reaches it",),
            fix=_constraint(found, value) + (", or jax.checkpoint around it" if residual else ""),
        )


def _place(source: Source) -> str:
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


def _constraint(found: Propagation, value: Value) -> str:
    """The constraint that would split a value."""
    # What a loop stacks is made in its body, without the first dimension.
    stacked = value.name == "while" and len(value.shape) > 1
    shape = value.shape[1:] if stacked else value.shape
    # The first dimension of what is computed is the batch, as a rule.
    spec = split_of(shape, found.axis_sizes, range(len(shape))) or "P(...)"
    where = "in the body of the loop" if stacked else "on that line"
    return f"with_sharding_constraint(value, {spec}) {where}"


# Padding


def _uneven(found: Propagation, compiled: Container[Shape]) -> Iterator[Finding]:
    sizes = {
        i: waste
        for i, value in enumerate(found.values)
        if value.plain and not value.local and (waste := _padding(found, value)) >= PADDED
        if _shard(found, value) in compiled
    }
    for i, waste in _largest_by_line(found, sizes):
        value = found.values[i]
        d = next(d for d, n in enumerate(value.shape) if n % _parts(found, value.axes[d]))
        n, axes = value.shape[d], value.axes[d]
        parts = _parts(found, axes)
        yield Finding(
            kind="uneven-split",
            subject=f"{n} elements are split over {parts} devices",
            source=user_source(frames_at(value)),
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
    pairs = [(n, _parts(found, axes)) for n, axes in zip(value.shape, value.axes, strict=True)]
    if all(n % parts == 0 for n, parts in pairs) or value.dtype not in DTYPES:
        return 0
    shard = _shard(found, value).nbytes
    return shard - _shape(value).nbytes // math.prod(parts for _, parts in pairs)


# The batch


@dataclasses.dataclass(frozen=True, slots=True)
class _Region:
    """The dimensions that are split as one dimension of an argument is.

    Args:
        places: values and their dimensions.
        is_batch: whether it is the first dimension of an operand of a product of matrices, and
            no such product sums over it.
    """

    places: frozenset[tuple[int, int]]
    is_batch: bool


def _unsharded_batch(found: Propagation, compiled: Container[Shape]) -> Iterator[Finding]:
    by_size: dict[int, list[int]] = {}
    regions = {}
    # What a program returns again, or the gradient of, is a weight.
    weights = {value.shape for value in found.values if value.kind == "output"}
    for i, value in enumerate(found.values):
        rows = value.kind == "argument" and value.shape and value.shape[0] > 1
        if rows and not value.axes[0] and value.shape not in weights:
            region = _region(found, i)
            if region is not None and region.is_batch:
                by_size.setdefault(value.shape[0], []).append(i)
                regions[i] = region
    for size, arguments in by_size.items():
        places = frozenset[tuple[int, int]]().union(*(regions[i].places for i in arguments))
        axis = _free_axis(found, places, size)
        arrays = [found.values[i] for i, _ in places if found.values[i].dtype in DTYPES]
        shards = [_shard(found, value) for value in arrays]
        nbytes = max((shard.nbytes for shard in shards if shard in compiled), default=0)
        if axis and nbytes >= LARGE:
            yield _batch_finding(found, size, arguments, axis, nbytes)


def _batch_finding(
    found: Propagation, size: int, arguments: Sequence[int], axis: str, nbytes: int
) -> Finding:
    names = ", ".join(found.values[i].name for i in arguments)
    n = found.axis_sizes[axis]
    return Finding(
        kind="unsharded-batch",
        subject=f"the {size} rows of {names} are on every device",
        source=None,
        nbytes=nbytes - nbytes // n,
        measure="memory",
        facts=(
            f"the {n} devices along {axis!r} all compute the same rows",
            "bytes are of the largest value with that dimension",
        ),
        fix=f"P({axis!r}) for {names} in in_axis_resources",
    )


def _free_axis(found: Propagation, places: Iterable[tuple[int, int]], size: int) -> str | None:
    """The largest mesh axis that splits none of these values, and divides the dimension."""
    taken = {axis.partition(":")[0] for i, _ in places for d in found.values[i].axes for axis in d}
    free = [a for a, n in found.axis_sizes.items() if n > 1 and size % n == 0 and a not in taken]
    return max(free, key=lambda axis: found.axis_sizes[axis], default=None)


def _region(found: Propagation, argument: int) -> _Region | None:
    """The region of the first dimension of an argument in the forward pass.

    Returns:
        None where a product of matrices sums over it, or a part of it is split.
    """
    pending = deque([(argument, 0)])
    seen = {(argument, 0)}
    is_batch = False
    while pending:
        i, d = pending.popleft()
        if found.values[i].axes[d]:
            return None
        for k in found.values[i].links:
            link = found.links[k]
            if direction_of(link.op_name) == "backward":
                continue
            factors = _factors(link, i, d)
            if link.name == "dot_general" and factors & _summed(link):
                return None
            is_batch = is_batch or (link.name == "dot_general" and d == 0 and bool(factors))
            for place in _related(link, factors):
                if place not in seen:
                    seen.add(place)
                    pending.append(place)
    return _Region(frozenset(seen), is_batch)


def _factors(link: Link, i: int, d: int) -> set[str]:
    pairs = zip(link.values, link.factors, strict=True)
    return {name for value, dims in pairs if value == i and d < len(dims) for name in dims[d]}


def _related(link: Link, factors: set[str]) -> Iterator[tuple[int, int]]:
    for value, dims in zip(link.values, link.factors, strict=True):
        for d, names in enumerate(dims):
            # A dimension of several factors is split as its first one is.
            if names and names[0] in factors:
                yield value, d


@functools.lru_cache(maxsize=1 << 12)
def _summed_in(factors: tuple, operands: int) -> frozenset[str]:
    inside = {name for dims in factors[:operands] for names in dims for name in names}
    return frozenset(inside - {n for dims in factors[operands:] for names in dims for n in names})


def _summed(link: Link) -> frozenset[str]:
    """The factors that a product of matrices sums over."""
    return _summed_in(link.factors, link.operands)
