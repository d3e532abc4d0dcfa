"""Dimensions that operations tie to each other, and the operations between them.

A plan splits classes of dimensions, and not dimensions: the batch of the arguments is the batch of
every value that comes from them. Shardy's rules say which dimensions of an operation go together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any

from jax.extend.mlir import ir

from spmd.inspection.records.report import Shape
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.flow import trip_count
from spmd.inspection.shardy.products import products_in
from spmd.inspection.shardy.propagation import Link, Propagation, propagate

PINNED = ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.gather", "stablehlo.scatter")
"""Operations whose operands and results a plan constrains: what decides how a program is split."""

_NUMBER = "spmd.number"
# What a compiler fuses with its neighbours reads and writes no memory of its own.
_FUSED = frozenset((
    "abs", "add", "and", "broadcast_in_dim", "ceil", "clamp", "compare", "constant", "convert",
    "cosine", "divide", "exponential", "exponential_minus_one", "floor", "iota", "is_finite", "log",
    "log_plus_one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "power",
    "reshape", "return", "rsqrt", "select", "sharding_constraint", "sign", "sine", "sqrt", "square",
    "subtract", "tanh", "transpose", "while", "xor",
))  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A value of the program.

    Attributes:
        kind: ``argument``, ``output`` or ``result``.
        name: path of an argument or output, else the operation that makes it.
        shape: of the whole array.
        classes: of each dimension; None for one of size 1.
        nbytes: of the whole array.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    classes: tuple[int | None, ...]
    nbytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation, and how the dimensions of what it takes and makes belong together.

    Attributes:
        name: of the operation.
        tensors: indices of its operands, then of its results.
        operands: how many of them are operands.
        factors: by tensor and dimension, a factor of the operation, or None.
        by_class: the factors of a class, those of results first, in the order of dimensions.
        sizes: by factor.
        runs: in one call.
        flops: of one run, where it is a product.
        is_fused: whether a compiler makes it a part of its neighbours.
        number: among the operations that a plan pins; None for another one.
    """

    name: str
    tensors: tuple[int, ...]
    operands: int
    factors: tuple[tuple[str | None, ...], ...]
    by_class: dict[int, tuple[str, ...]]
    sizes: dict[str, int]
    runs: int
    flops: int
    is_fused: bool
    number: int | None

    @property
    def results(self) -> Iterator[tuple[int, tuple[str | None, ...]]]:
        """Its results, with the factors of their dimensions."""
        return zip(self.tensors[self.operands :], self.factors[self.operands :], strict=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A program as a plan sees it.

    Attributes:
        tensors: of the program, arguments first, outputs last.
        operations: between them.
        classes: that a plan may split, those of most products first: each with the dimensions of
            arguments that are in it, such as ``("batch", 0)``.
        sizes: of these classes: the largest dimension.
    """

    tensors: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    classes: dict[int, tuple[tuple[str, int], ...]]
    sizes: dict[int, int]


def numbered(operation: Any) -> list[Any]:
    """The operations of a module that a plan pins, in an order that lowering again gives, too."""
    return [one for one in passes.operations_in(operation) if one.name in PINNED]


def graph_of(module: Any, *, subject: str) -> Graph:
    """Reads a lowered module, whose own shardings do not matter."""
    with module.context:
        copy = module.operation.clone().operation
        kind = ir.IntegerType.get_signless(64)
        for number, one in enumerate(numbered(copy)):
            one.attributes[_NUMBER] = ir.IntegerAttr.get(kind, number)
    found = propagate(_Copy(copy, module.context), subject=subject, steps=False)
    with module.context:
        return _Reader(found).read()


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """What passes want of a module."""

    operation: Any
    context: Any


class _Reader:
    """Makes a graph of a propagated module."""

    def __init__(self, found: Propagation):
        self.found = found
        self.parents: dict[tuple[int, int], tuple[int, int]] = {}
        self.trips = functools.cache(trip_count)
        self.products = {id(one.link): (one.runs or 1, one.flops) for one in products_in(found)}

    def read(self) -> Graph:
        for link in self.found.links:
            self._tie(link)
        roots = dict.fromkeys(
            self._root((i, d))
            for i, value in enumerate(self.found.values)
            for d, size in enumerate(value.shape)
            if size > 1
        )
        self.numbers = {root: number for number, root in enumerate(roots)}
        tensors = tuple(self._tensors())
        operations = tuple(map(self._operation, self.found.links))
        return Graph(tensors=tensors, operations=operations, **_split_by_plans(tensors, operations))

    def _root(self, place: tuple[int, int]) -> tuple[int, int]:
        while (parent := self.parents.setdefault(place, place)) != place:
            self.parents[place] = self.parents.get(parent, parent)
            place = parent
        return place

    def _tie(self, link: Link) -> None:
        """Puts dimensions of one factor into one class; of several factors the major one counts."""
        places: dict[str, tuple[int, int]] = {}
        for i, dimensions in zip(link.values, link.factors, strict=False):
            for d, names in enumerate(dimensions):
                if name := _major(names, link.sizes):
                    first = places.setdefault(name, (i, d))
                    self.parents[self._root((i, d))] = self._root(first)

    def _tensors(self) -> Iterator[Tensor]:
        for i, value in enumerate(self.found.values):
            yield Tensor(
                kind=value.kind,
                name=value.name,
                shape=value.shape,
                classes=tuple(self._class(i, d) for d in range(len(value.shape))),
                nbytes=Shape(dtype=value.dtype, dims=value.shape).nbytes,
            )

    def _class(self, i: int, d: int) -> int | None:
        return self.numbers[self._root((i, d))] if self.found.values[i].shape[d] > 1 else None

    def _operation(self, link: Link) -> Operation:
        factors = tuple(
            tuple(_major(names, link.sizes) for names in dimensions) for dimensions in link.factors
        )
        own = self.found.values[link.values[-1]].operation
        runs, flops = self.products.get(id(link), (self._runs(own), 0))
        return Operation(
            name=link.name,
            tensors=link.values,
            operands=link.operands,
            factors=factors,
            by_class=self._by_class(link, factors),
            sizes=dict(link.sizes),
            runs=runs,
            flops=flops,
            is_fused=link.name in _FUSED or not own or link.name.startswith("call of"),
            number=_number(own),
        )

    def _by_class(
        self, link: Link, factors: Sequence[Sequence[str | None]]
    ) -> dict[int, tuple[str, ...]]:
        sides = [*zip(link.values, factors, strict=False)]
        found: dict[int, dict[str, None]] = {}
        for i, names in [*sides[link.operands :], *sides[: link.operands]]:
            for d, name in enumerate(names):
                number = self._class(i, d)
                if name is not None and number is not None:
                    found.setdefault(number, {})[name] = None
        return {number: tuple(names) for number, names in found.items()}

    def _runs(self, operation: Any) -> int:
        """How often an operation runs; in a loop of unknown length, once."""
        if operation is None:
            return 1
        around = passes.holders_of(operation)
        loops = [one for one in around if one.name == "stablehlo.while"]
        return math.prod(self.trips(loop) or 1 for loop in loops)


def _major(names: Sequence[str], sizes: Any) -> str | None:
    """The factor that a dimension is split along first."""
    return next((name for name in names if sizes.get(name, 0) > 1), None)


def _number(operation: Any) -> int | None:
    if operation is None or _NUMBER not in operation.attributes:
        return None
    return int(ir.IntegerAttr(operation.attributes[_NUMBER]).value)


def _split_by_plans(tensors: Sequence[Tensor], operations: Sequence[Operation]) -> dict[str, Any]:
    """The classes that products or large arguments have, and their sizes."""
    weights: Counter[int] = Counter()
    for one in operations:
        if one.flops:
            weights.update(dict.fromkeys(one.by_class, one.flops * one.runs))
    names: dict[int, list[tuple[str, int]]] = {number: [] for number, _ in weights.most_common()}
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for d, (number, size) in enumerate(zip(tensor.classes, tensor.shape, strict=True)):
            if number in names:
                sizes[number] = max(size, sizes.get(number, 0))
                if tensor.kind == "argument":
                    names[number].append((tensor.name, d))
    return {"classes": {n: tuple(found) for n, found in names.items()}, "sizes": sizes}


def pinned(graph: Graph) -> Iterator[tuple[int, Operation]]:
    """The operations that a plan constrains, by their number; of several calls the first one."""
    found = sorted(
        (one.number, i) for i, one in enumerate(graph.operations) if one.number is not None
    )
    for number, group in itertools.groupby(found, lambda pair: pair[0]):
        yield number, graph.operations[next(group)[1]]
