"""A program as a plan sees it: values, the operations between them, and classes of dimensions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
import dataclasses
import itertools

_LARGE = 0.01
"""From this share of all arguments and outputs on, one of these is large, and so is a class."""
_MOST_OTHERS = 12
"""So many classes of arguments may be beside those of products; of more, the rest is tied."""
_KEPT = 4
"""So many are not tied then."""
_MOST = 48
"""So many classes of products a search goes through; of more, all but the first half is tied."""

WINDOW = "window"
"""The factor of a convolution's window, where its rule has none: no layout splits it."""

UPDATES = ("dynamic_update_slice", "scatter")
"""Operations that write into their first operand."""

# What computes nothing: names for places, and what is made of nothing.
NO_WORK = frozenset((
    "bitcast_convert", "broadcast_in_dim", "constant", "iota", "optimization_barrier", "pad",
    "reshape", "return", "sharding_constraint", "transpose", "while",
))  # fmt: skip
_IN_PLACE = ("bitcast_convert", "optimization_barrier", "reshape", "transpose", "while")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A value of the program.

    Attributes:
        kind: ``argument``, ``output`` or ``result``.
        name: path of an argument or output, else the operation that makes it.
        shape: of the whole array.
        classes: of each dimension; None for one of size 1.
        nbytes: of the whole array.
        is_state: whether only the optimizer has it: moments, and gradients on the way to them.
        donated: whether an argument's memory may be a result's.
        inner: how many dimensions at the end are the program's own, such as that of a key of random
            numbers: nothing splits them.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    classes: tuple[int | None, ...]
    nbytes: float
    is_state: bool = False
    donated: bool = False
    inner: int = 0


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
        is_state: whether all that it makes is the optimizer's, and so is how it is split.
        whole: factors along which it needs all of its operands, such as that which it sorts.
        loops: around it, the outermost first; what enters or leaves a loop is in it.
        manual: by axis, the factor that it splits, or None, where a `shard_map` takes or gives a
            value: no layout changes that.
        types: the element types of a product's operands, by the names of HLO.
        passes: products of bf16 that a TPU makes of it, as its precision asks.
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
    is_state: bool = False
    whole: frozenset[str] = frozenset()
    loops: tuple[int, ...] = ()
    manual: tuple[tuple[str, str | None], ...] = ()
    types: frozenset[str] = frozenset()
    passes: int = 1

    @property
    def passes_on(self) -> bool:
        """Whether its result is its operand, in the same place."""
        return self.name in _IN_PLACE

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
            arguments that are in it, such as ``("batch", 0)``. Classes that are alike in layers
            which are written out are one.
        sizes: of these classes: the largest dimension.
        constants: values that come from no argument: a compiler makes them where they are used.
        early: values that come from arguments without a product or a sum: they can be sent ahead.
        arguments: those of the program.
        kernels: FLOPs of the kernels written by hand on a device, which no layout splits.
    """

    tensors: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    classes: dict[int, tuple[tuple[str, int], ...]]
    sizes: dict[int, int]
    constants: frozenset[int] = frozenset()
    early: frozenset[int] = frozenset()
    arguments: frozenset[int] = frozenset()
    kernels: int = 0


def with_weights(graph: Graph) -> Graph:
    """A graph with the classes that a plan may split, and their sizes.

    Those are of products, and large ones of arguments that have none of these: a program without
    products has only such.
    """
    weights = _of_products(graph)
    more = _of_arguments(graph, weights) + _of_tables(graph, weights)
    numbers = [n for n, _ in (*weights.most_common(), *more.most_common(_MOST_OTHERS))]
    names: dict[int, list[tuple[str, int]]] = {number: [] for number in numbers}
    sizes: dict[int, int] = {}
    for tensor in graph.tensors:
        for d, (number, size) in enumerate(zip(tensor.classes, tensor.shape, strict=True)):
            if number in names:
                sizes[number] = max(size, sizes.get(number, 0))
                if tensor.kind == "argument":
                    names[number].append((tensor.name, d))
    classes = {n: tuple(found) for n, found in names.items() if n in sizes}
    return dataclasses.replace(graph, classes=classes, sizes=sizes)


def of_many(graph: Graph) -> list[Tensor]:
    """Arguments and outputs whose classes are more, or smaller, than a plan looks at.

    They are none where these are a few bytes, as those of all biases of a model.
    """
    weights = _of_products(graph)
    more = _of_arguments(graph, weights)
    kept = _MOST_OTHERS if len(more) <= _MOST_OTHERS else _KEPT
    left = others(graph, {*weights, *(n for n, _ in more.most_common(kept))})
    return left if sum(one.nbytes for one in left) >= _least(graph) else []


def of_small_products(graph: Graph) -> list[int]:
    """The classes of the smallest products, where there are more than a search goes through."""
    found = [n for n, _ in _of_products(graph).most_common()]
    return sorted(found[_MOST // 2 :]) if len(found) > _MOST else []


def _of_products(graph: Graph) -> Counter[int]:
    """The classes of products, by FLOPs."""
    weights: Counter[int] = Counter()
    for one in graph.operations:
        if one.flops:
            weights.update(dict.fromkeys(one.by_class, one.flops * one.runs))
    return weights


def others(graph: Graph, known: Container[int]) -> list[Tensor]:
    """The arguments and outputs that have no class of these."""
    ends = (one for one in graph.tensors if one.kind != "result" and max(one.shape, default=1) > 1)
    return [one for one in ends if not any(c in known for c in one.classes if c is not None)]


def _of_arguments(graph: Graph, known: Container[int]) -> Counter[int]:
    """Large classes of arguments and outputs that have no class of these, by their bytes."""
    found: Counter[int] = Counter()
    for one in others(graph, known):
        found.update(dict.fromkeys((c for c in one.classes if c is not None), round(one.nbytes)))
    least = _least(graph)
    return Counter({c: nbytes for c, nbytes in found.items() if nbytes >= least})


def _of_tables(graph: Graph, known: Container[int]) -> Counter[int]:
    """Classes of large tables that rows are looked up in, such as the words of an embedding."""
    least = _least(graph)
    shapes = {one.shape for one in graph.tensors if one.kind != "result" and one.nbytes >= least}
    tables = (graph.tensors[one.tensors[0]] for one in graph.operations if one.name == "gather")
    found: Counter[int] = Counter()
    for table in tables:
        if table.shape in shapes:
            own = (c for c in table.classes if c is not None and c not in known)
            found |= Counter(dict.fromkeys(own, round(table.nbytes)))
    return found


def _least(graph: Graph) -> float:
    """Bytes from which on something is worth an exchange."""
    return sum(one.nbytes for one in graph.tensors if one.kind != "result") * _LARGE


# What comes early with its operands, beside what is fused with their users.
_CHEAP = ("concatenate", "dynamic_slice", "slice")


def early(graph: Graph) -> set[int]:
    """Values that come from arguments without a product or a sum: they can be sent ahead."""
    found = {i for i, one in enumerate(graph.tensors) if one.kind == "argument"}
    before = 0
    while before < len(found):  # what enters a loop is known after what is in it
        before = len(found)
        for one in graph.operations:
            own = [i for i in one.tensors[: one.operands] if graph.tensors[i].shape]
            if one.name == "while":
                own = own[:1] if one.tensors[1:2] == one.tensors[-1:] else []
            if own and found.issuperset(own) and (one.is_fused or one.name in _CHEAP):
                found.update(result for result, _ in one.results)
    return found


def pinned(graph: Graph) -> Iterator[tuple[int, Operation]]:
    """The operations that a plan constrains, by their number; of several calls the first one."""
    found = sorted(
        (one.number, i) for i, one in enumerate(graph.operations) if one.number is not None
    )
    for number, group in itertools.groupby(found, lambda pair: pair[0]):
        yield number, graph.operations[next(group)[1]]
