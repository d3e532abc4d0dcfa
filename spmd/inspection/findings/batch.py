"""Findings on batches that no mesh axis splits.

Nothing in a program says which of its arguments is the batch: `x @ w` is one product, whichever of
the two was trained. So several things that hold of a batch and seldom of a weight are looked for,
and where none is found nothing is said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
import dataclasses
import functools
import itertools
import math

from spmd.inspection.findings.values import LARGE, shard_of
from spmd.inspection.findings.work import Repeated
from spmd.inspection.records.names import direction_of
from spmd.inspection.records.report import DTYPES, Finding, Shape, axis_name
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.products import PRODUCTS
from spmd.inspection.shardy.propagation import Link, Propagation, walk

_Place = tuple[int, int]
"""A value and one of its dimensions."""

#: What keeps two products in a row from being one product: activations, norms and masks.
_NONLINEAR = frozenset({
    "abs", "clamp", "cosine", "erf", "exponential", "exponential_minus_one", "log", "log_plus_one",
    "logistic", "maximum", "minimum", "power", "rsqrt", "select", "sine", "sqrt", "tanh",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch that no mesh axis splits.

    Attributes:
        size: how many rows it has.
        arguments: the values that it comes in.
        axis: of the mesh, that would split it.
        nbytes: of the largest value with these rows.
        places: the dimensions that would be split with it, in the backward pass as well.
    """

    size: int
    arguments: Sequence[int]
    axis: str
    nbytes: int
    places: frozenset[_Place]

    @property
    def values(self) -> set[int]:
        """All values with these rows, which are whole because of them."""
        return {i for i, _ in self.places}

    def splits(self, link: Link) -> bool:
        """Whether an operation would be split with the batch."""
        pairs = zip(link.values, link.factors, strict=True)
        return any((i, d) in self.places for i, dims in pairs for d in range(len(dims)))


def unsplit_batches(found: Propagation, compiled: Container[Shape]) -> Iterator[Batch]:
    """The batches that an axis would split, and none does, by their size.

    Their values take memory in the compiled program, which has arrays of the shapes `compiled`.
    """
    if math.prod(found.axis_sizes.values()) == 1:
        return
    by_size: dict[int, dict[int, frozenset[_Place]]] = {}
    # What a program returns again, or the gradient of, is a weight.
    returned = {value.shape for value in found.values if value.kind == "output"}
    for i, value in enumerate(found.values):
        rows = value.kind == "argument" and value.shape and value.shape[0] > 1
        if rows and not value.axes[0] and value.shape not in returned:
            places = _region(found, i)
            if places and _is_batch(found, places):
                by_size.setdefault(value.shape[0], {})[i] = places
    for size, regions in by_size.items():
        places = frozenset[_Place]().union(*regions.values())
        axis = _free_axis(found, places, size)
        arrays = [found.values[i] for i, _ in places if found.values[i].dtype in DTYPES]
        shards = [shard_of(found, value) for value in arrays]
        nbytes = max((shard.nbytes for shard in shards if shard in compiled), default=0)
        if axis and nbytes >= LARGE:
            yield Batch(
                size=size,
                arguments=[*regions],
                axis=axis,
                nbytes=nbytes,
                places=_followers(found, regions),
            )


def batch_finding(found: Propagation, batch: Batch, work: Repeated | None) -> Finding:
    """The finding on a batch, with the work that is repeated because of it."""
    names = ", ".join(found.values[i].name for i in batch.arguments)
    n = found.axis_sizes[batch.axis]
    return Finding(
        kind="unsharded-batch",
        subject=f"the {batch.size} rows of {names} are on every device",
        source=None,
        nbytes=batch.nbytes - batch.nbytes // n,
        flops=work.flops if work else 0,
        measure="memory",
        facts=(
            f"the {n} devices along {batch.axis!r} all compute the same rows",
            *([work.fact] if work else []),
            "bytes are of the largest value with that dimension",
        ),
        fix=f"P({batch.axis!r}) for {names} in in_axis_resources",
    )


def _free_axis(found: Propagation, places: Iterable[_Place], size: int) -> str | None:
    """The largest mesh axis that splits none of these values, and divides the dimension."""
    taken = {axis_name(axis) for i, _ in places for d in found.values[i].axes for axis in d}
    free = [a for a, n in found.axis_sizes.items() if n > 1 and size % n == 0 and a not in taken]
    return max(free, key=lambda axis: found.axis_sizes[axis], default=None)


# The dimensions that are split as the first one of an argument is


def _region(found: Propagation, argument: int) -> frozenset[_Place] | None:
    """The dimensions that are split as the first one of an argument is, in the forward pass.

    It is None where a product sums over it, or a part of it is split.
    """
    beyond: dict[_Place, list[_Place]] = {}
    for (i, d), _, _ in walk([(argument, 0)], beyond.__getitem__):
        pairs = [(link, _factors(link, i, d)) for link in _links(found, i, backward=False)]
        if found.values[i].axes[d] or any(_sums(*pair) for pair in pairs):
            return None
        beyond[i, d] = [place for pair in pairs for place in _related(*pair)]
    return frozenset(beyond)


def _followers(found: Propagation, arguments: Iterable[int]) -> frozenset[_Place]:
    """The dimensions that are split as the first ones of arguments are, in both passes."""

    def beyond(place: _Place) -> Iterator[_Place]:
        links = found.links_of(place[0])
        return itertools.chain.from_iterable(_related(k, _factors(k, *place)) for k in links)

    return frozenset(place for place, _, _ in walk(((i, 0) for i in arguments), beyond))


def _links(found: Propagation, i: int, backward: bool) -> Iterator[Link]:
    """The operations with a value that are, or are not, of the backward pass."""
    for k in found.values[i].links:
        if _is_backward(found, found.links[k]) == backward:
            yield found.links[k]


def _is_backward(found: Propagation, link: Link) -> bool:
    """Whether an operation, or a call that it is in, belongs to the backward pass."""
    if direction_of(link.op_name) == "backward":
        return True
    made = found.values[link.values[-1]].operation
    holders = passes.holders_of(made) if made is not None else ()
    names = (passes.op_name_of(one.location) for one in holders)
    return any(direction_of(name) == "backward" for name in names)


def _factors(link: Link, i: int, d: int) -> set[str]:
    pairs = zip(link.values, link.factors, strict=True)
    return {name for value, dims in pairs if value == i and d < len(dims) for name in dims[d]}


def _related(link: Link, factors: set[str], first: int = 0) -> Iterator[_Place]:
    """The dimensions with one of some factors, of the values from a position on."""
    for value, dims in zip(link.values[first:], link.factors[first:], strict=True):
        for d, names in enumerate(dims):
            # A dimension of several factors is split as its first one is.
            if names and names[0] in factors:
                yield value, d


@functools.lru_cache(maxsize=1 << 12)
def _summed_in(factors: tuple, operands: int) -> frozenset[str]:
    inside = {name for dims in factors[:operands] for names in dims for name in names}
    return frozenset(inside - {n for dims in factors[operands:] for names in dims for n in names})


def _sums(link: Link, factors: set[str]) -> bool:
    """Whether an operation is a product of matrices that sums over one of some factors."""
    if link.name not in PRODUCTS:
        return False
    return bool(factors & _summed_in(link.factors, link.operands))


# What holds of a batch


def _is_batch(found: Propagation, places: frozenset[_Place]) -> bool:
    """Whether anything tells these dimensions from those of a weight."""
    uses = [(link, i, d) for i, d in places for link in _links(found, i, backward=False)]
    rows = [(link, i) for link, i, d in uses if d == 0 and _is_row(link, i, d)]
    return bool(rows) and (
        # It is the batch of a convolution, which knows its kernel,
        any(link.name == "convolution" and link.values[0] == i for link, i in rows)
        # or its values are positions in a table, as tokens are.
        or any(link.name == "gather" and link.values[1] == i for link, i, _ in uses)
        or _is_deep(found, places)
        or _is_in_gradient(found, places)
    )


def _is_row(link: Link, i: int, d: int) -> bool:
    """Whether a product has a dimension of this operand and not of the other, and keeps it.

    What both have is a head or an expert as well as an example.
    """
    if link.name not in PRODUCTS or i not in link.values[: link.operands]:
        return False
    factors = _factors(link, i, d)
    operands = [{n for names in dims for n in names} for dims in link.factors[: link.operands]]
    return sum(bool(factors & names) for names in operands) == 1 and not _sums(link, factors)


def _is_deep(found: Propagation, places: Iterable[_Place]) -> bool:
    """Whether it goes through two products, and through something in between that bends.

    The rows of a weight are in the result of one product, and the next one sums over them.
    """
    reached = dict.fromkeys(places, 0)
    pending = deque(reached)
    while pending:
        i, d = pending.popleft()
        stage = reached[i, d]  # 0 before the first product, 1 after it, 2 after what bends
        for link in _links(found, i, backward=False):
            if i not in link.values[: link.operands]:
                continue
            row = _is_row(link, i, d)
            if row and stage == 2:
                return True
            then = 2 if stage == 1 and link.name in _NONLINEAR else stage
            then = 1 if stage == 0 and row and d == 0 else then
            for place in _related(link, _factors(link, i, d), first=link.operands):
                if reached.get(place, -1) < then:
                    reached[place] = then
                    pending.append(place)
    return False


def _is_in_gradient(found: Propagation, places: Iterable[_Place]) -> bool:
    """Whether the gradient of another argument, which is a result, sums over it."""
    beyond: dict[_Place, list[_Place]] = {}
    for (i, d), _, _ in walk(places, beyond.__getitem__):
        beyond[i, d] = []
        for link in _links(found, i, backward=True):
            factors = _factors(link, i, d)
            if not _sums(link, factors):
                beyond[i, d] += _related(link, factors)
            elif _is_returned(found, link.values[-1]):
                return True
    return False


def _is_returned(found: Propagation, value: int) -> bool:
    """Whether a result with the shape of a weight comes of a value without another product."""
    weights = {v.shape for v in found.values if v.kind == "argument" and len(v.shape) > 1}

    def results(i: int) -> Iterator[int]:
        for link in found.links_of(i):
            if link.name not in PRODUCTS and i in link.values[: link.operands]:
                yield from link.values[link.operands :]

    ends = (found.values[i] for i, _, _ in walk([value], results))
    return any(end.kind == "output" and end.shape in weights for end in ends)
