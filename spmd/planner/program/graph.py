"""Dimensions that operations tie to each other, and the operations between them.

A plan splits classes of dimensions, and not dimensions: the batch of the arguments is the batch of
every value that comes from them. Shardy's rules say which dimensions of an operation go together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
import math
import re
from typing import Any

from jax.extend.mlir import ir

from spmd.inspection.records.report import Shape
from spmd.inspection.shardy import passes, ragged
from spmd.inspection.shardy.flops import bf16_passes, element_types, kernel_work
from spmd.inspection.shardy.flow import trip_count
from spmd.inspection.shardy.products import products_in
from spmd.inspection.shardy.propagation import Link, Propagation, propagate, walk
from spmd.planner.program.alike import tied
from spmd.planner.program.optimizer import with_state
from spmd.planner.program.structure import (
    WINDOW,
    Graph,
    Operation,
    Tensor,
    early,
    with_weights,
)
from spmd.planner.program.sums import regroup

PINNED = (*passes.PRODUCTS, ragged.NAME, "stablehlo.gather", "stablehlo.scatter")
"""Operations whose operands and results a plan constrains: what decides how a program is split.

Beside them stand reshapes to and from the blocks that a loop takes one after the other. What a
product is transposed to has the number of the product.
"""

TRANSPOSE = "stablehlo.transpose"

_BETWEEN = ("sdy.sharding_constraint", "stablehlo.optimization_barrier")
_NUMBER = "spmd.number"
_DONATED = ("jax.buffer_donor", "tf.aliasing_output")
_RULE = "sdy.sharding_rule"
_WHOLE = re.compile(r"need_replication=\{([^}]*)\}")
_MANUAL = "shard_map"
_RESHAPE = "stablehlo.reshape"
_SLICED = ("dynamic_slice", "dynamic_update_slice")
_SCATTER, _BATCHED = "scatter_dimension_numbers", "input_batching_dims"
_LOOP = "stablehlo.while"
# What a compiler fuses with its neighbours reads and writes no memory of its own.
_FUSED = frozenset((
    "abs", "add", "and", "atan2", "bitcast_convert", "broadcast_in_dim", "cbrt", "ceil", "clamp",
    "compare", "complex", "constant", "convert", "cosine", "divide", "erf", "erf_inv",
    "exponential", "exponential_minus_one", "floor", "imag", "iota", "is_finite", "log",
    "log_plus_one", "logistic", "maximum", "minimum", "multiply", "negate", "not",
    "optimization_barrier", "or", "pad", "popcnt", "power", "real", "reduce_precision",
    "remainder", "reshape", "return", "reverse", "round_nearest_afz", "round_nearest_even",
    "rsqrt", "select", "sharding_constraint", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sine", "sqrt", "square", "subtract", "tan", "tanh",
    "transpose", "while", "xor",
))  # fmt: skip


def numbered(operation: Any) -> list[Any]:
    """The operations of a module that a plan may pin, in an order that lowering again gives."""
    return [
        one
        for one in passes.operations_in(operation)
        if one.name in PINNED or (one.name == _RESHAPE and _changes_rank(one))
    ]


def turned(product: Any) -> Any:
    """The transpose that a product's result is for; None where it is for anything else.

    Constraints may be in between, such as those of `marks`.
    """
    value = product.results[0]
    while passes.is_used_once(value):
        user, operand = passes.user_of(next(iter(value.uses)))
        if user.name == TRANSPOSE:
            return user
        if user.name not in _BETWEEN:
            return None
        value = user.results[operand]
    return None


def _changes_rank(reshape: Any) -> bool:
    """Whether a reshape splits dimensions, or merges some; those of size 1 do not count."""
    before, after = (
        sum(size > 1 for size in passes.shape_of(value))
        for value in (reshape.operands[0], reshape.results[0])
    )
    return before != after


def graph_of(module: Any, *, subject: str) -> Graph:
    """Reads a lowered module, whose own shardings do not matter."""
    with module.context:
        copy = module.operation.clone().operation
        regroup(copy)
        kind = ir.IntegerType.get_signless(64)
        for number, one in enumerate(numbered(copy)):
            after = turned(one) if one.name in passes.PRODUCTS else None
            for each in (one, after) if after else (one,):
                each.attributes[_NUMBER] = ir.IntegerAttr.get(kind, number)
    found = propagate(_Copy(copy, module.context), subject=subject, steps=False)
    donated = donated_in(copy)
    with module.context:
        read = _Reader(found, donated).read()
    graph = with_state(tied(read))
    return dataclasses.replace(graph, early=frozenset(early(graph)))


def with_ranks(graph: Graph, ins: Sequence[int], outs: Sequence[int]) -> Graph:
    """A graph whose arguments and outputs have these ranks for who calls it: nothing splits more.

    A key of random numbers is an array of one dimension more inside of a program. Tokens, which
    come before arguments and outputs, are none.
    """
    tensors = list(graph.tensors)
    for kind, ranks in (("argument", ins), ("output", outs)):
        found = [i for i, one in enumerate(tensors) if one.kind == kind]
        for i, rank in zip(found[len(found) - len(ranks) :], ranks, strict=True):
            one = tensors[i]
            inner = len(one.shape) - rank
            own = (*one.classes[:rank], *(None,) * inner)
            tensors[i] = dataclasses.replace(one, classes=own, inner=inner)
    there = {(t.name, d) for t in tensors for d, c in enumerate(t.classes) if c is not None}
    classes = {n: tuple(p for p in places if p in there) for n, places in graph.classes.items()}
    return dataclasses.replace(graph, tensors=tuple(tensors), classes=classes)


def donated_in(module: Any) -> list[bool]:
    """Whether the memory of each argument of a module may be a result's."""
    entries = passes.entries_of(passes.functions(module)["main"], "arg_attrs")
    return [any(name in one for name in _DONATED) for one in entries]


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """What passes want of a module."""

    operation: Any
    context: Any


class _Reader:
    """Makes a graph of a propagated module."""

    def __init__(self, found: Propagation, donated: Sequence[bool]):
        self.found, self.donated = found, donated
        self.parents: dict[tuple[int, int], tuple[int, int]] = {}
        self.trips = functools.cache(trip_count)
        self.whole_in = functools.cache(_whole_in)
        self.loops: dict[Any, int] = {}
        self.sliced: set[tuple[int, int]] = set()
        self.products = {id(one.link): (one.runs or 1, one.flops) for one in products_in(found)}

    def read(self) -> Graph:
        apart = [link for link in self.found.links if _compound(link)]
        for link in self.found.links:
            if not _compound(link):
                self._tie(link)
        self.sliced = {self._root(place) for link in self.found.links for place in self._cut(link)}
        for link in apart:
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
        return with_weights(
            Graph(
                tensors=tensors,
                operations=operations,
                classes={},
                sizes={},
                constants=_constants(tensors, operations),
                arguments=frozenset(_arguments(tensors)),
                kernels=kernel_work(self.found).flops,
            )
        )

    def _root(self, place: tuple[int, int]) -> tuple[int, int]:
        while (parent := self.parents.setdefault(place, place)) != place:
            self.parents[place] = self.parents.get(parent, parent)
            place = parent
        return place

    def _tie(self, link: Link) -> None:
        """Puts dimensions of one factor into one class; of several factors the major one counts.

        What a loop takes one after the other stays by itself: a device that has a part of it would
        send that in every turn.
        """
        blocks = self._blocks(link)
        for name, (first, *others) in _places(link).items():
            for other in others if name not in blocks else ():
                self.parents[self._root(other)] = self._root(first)

    def _blocks(self, link: Link) -> set[str]:
        """The factors of a reshape that are the blocks which a loop takes one after the other."""
        names, places = _compound(link), _places(link)
        return {n for n in names if not self.sliced.isdisjoint(map(self._root, places[n]))}

    def _cut(self, link: Link) -> Iterator[tuple[int, int]]:
        """The dimensions of which a loop takes, or writes, one element in a turn."""
        if link.name not in _SLICED:
            return
        own = self.found.values[link.values[-1]].operation
        whole, part = (link.values[0], link.values[1 if "update" in link.name else -1])
        sizes = zip(self.found.values[whole].shape, self.found.values[part].shape, strict=True)
        for d, (size, taken) in enumerate(sizes):
            if size > taken == 1 and any(True for _ in _around(own)):
                yield whole, d

    def _tensors(self) -> Iterator[Tensor]:
        for i, value in enumerate(self.found.values):
            yield Tensor(
                kind=value.kind,
                name=value.name,
                shape=value.shape,
                classes=tuple(self._class(i, d) for d in range(len(value.shape))),
                nbytes=Shape(dtype=value.dtype, dims=value.shape).nbytes,
                donated=i < len(self.donated) and self.donated[i],
            )

    def _class(self, i: int, d: int) -> int | None:
        return self.numbers[self._root((i, d))] if self.found.values[i].shape[d] > 1 else None

    def _operation(self, link: Link) -> Operation:
        factors = tuple(
            tuple(_major(names, link.sizes) for names in dimensions) for dimensions in link.factors
        )
        own = self.found.values[link.values[-1]].operation
        if link.name == _MANUAL:
            return self._edge(link, own)
        runs, flops = self.products.get(id(link), (self._runs(own), 0))
        if is_elementwise := _is_elementwise(link):
            flops = 0
        return Operation(
            name=link.name,
            tensors=link.values,
            operands=link.operands,
            factors=factors,
            by_class=self._by_class(link, factors),
            sizes={**link.sizes, **self._window(link, factors)},
            runs=runs,
            flops=flops,
            is_fused=is_elementwise or self._is_fused(link, own),
            number=self._number(link, own),
            whole=self.whole_in(own.attributes[_RULE]) if _has_rule(own) else frozenset(),
            loops=self._loops(own, link.name),
            types=frozenset(element_types(own)) if flops else frozenset(),
            passes=bf16_passes(own) if flops else 1,
        )

    def _window(self, link: Link, factors: Sequence[Sequence[str | None]]) -> dict[str, int]:
        """Elements of a convolution's window, where its rule has no factors for them."""
        if link.name != "convolution":
            return {}
        kernel = zip(self.found.values[link.values[1]].shape, factors[1], strict=True)
        return {WINDOW: math.prod(size for size, name in kernel if name is None)}

    def _number(self, link: Link, own: Any) -> int | None:
        """Of an operation that is pinned; a reshape is, where it has blocks of a loop."""
        if own is None or _NUMBER not in own.attributes:
            return None
        if own.name == _RESHAPE and not self._blocks(link):
            return None
        return int(ir.IntegerAttr(own.attributes[_NUMBER]).value)

    def _edge(self, link: Link, own: Any) -> Operation:
        """What goes into a `shard_map`, or comes out of it: the value outside has factors."""
        values = [self.found.values[i] for i in link.values]
        names = tuple(
            tuple(None if value.local else f"d{d}" for d in range(len(value.shape)))
            for value in values
        )
        outside = next(value for value in values if not value.local)
        asked = values[-1].mark.dimensions if values[-1].mark else ()
        split = {axis: f"d{d}" for d, one in enumerate(asked) for axis in one.axes}
        return Operation(
            name=link.name,
            tensors=link.values,
            operands=link.operands,
            factors=names,
            by_class={},
            sizes={f"d{d}": size for d, size in enumerate(outside.shape)},
            runs=self._runs(own),
            flops=0,
            is_fused=False,
            number=None,
            loops=self._loops(own, link.name),
            manual=tuple((axis, split.get(axis)) for axis in self.found.axis_sizes),
        )

    def _is_fused(self, link: Link, own: Any) -> bool:
        """Whether a compiler makes an operation a part of its neighbours.

        Among these are a look for one element of each row, and a table of zeros with one written,
        where the rows are a batch: `jnp.take_along_axis`. Where rows are told by their numbers, as
        in ``scores[rows, labels]``, it is written into a table that is there.
        """
        if link.name in ("gather", "scatter"):
            if link.name == "scatter" and _BATCHED not in str(own.attributes[_SCATTER]):
                return False
            shapes = [[n for n in self.found.values[i].shape if n > 1] for i in link.values]
            first, second = (0, -1) if link.name == "gather" else (0, 2)
            return any(
                shapes[first][:d] + shapes[first][d + 1 :] == shapes[second]
                for d in range(len(shapes[first]))
            )
        return link.name in _FUSED or not own

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
        return math.prod(self.trips(loop) or 1 for loop in _around(operation))

    def _loops(self, operation: Any, name: str) -> tuple[int, ...]:
        """The loops around an operation, by number; those of an edge of a loop end with it."""
        around = [*_around(operation)]
        if name == "while":
            around = [_owner(operation.operands[0]), *around]
        return tuple(self.loops.setdefault(loop, len(self.loops)) for loop in reversed(around))


def _around(operation: Any) -> Iterator[Any]:
    """The loops around an operation, the innermost first."""
    holders = () if operation is None else passes.holders_of(operation)
    return (one for one in holders if one.name == _LOOP)


def _owner(value: Any) -> Any:
    """The operation of control flow that a value enters or leaves."""
    owner = value.owner
    return passes.operation_of(owner.owner if isinstance(owner, ir.Block) else owner)


def _has_rule(operation: Any) -> bool:
    return operation is not None and _RULE in operation.attributes


def _whole_in(rule: Any) -> frozenset[str]:
    """The factors of a rule along which an operation needs all of its operands."""
    found = _WHOLE.findall(str(rule))
    return frozenset(name.strip() for names in found for name in names.split(",") if name.strip())


def _arguments(tensors: Sequence[Tensor]) -> Iterator[int]:
    return (i for i, one in enumerate(tensors) if one.kind == "argument")


def _constants(tensors: Sequence[Tensor], operations: Sequence[Operation]) -> frozenset[int]:
    """Values that come from no argument."""
    after: dict[int, set[int]] = defaultdict(set)
    for one in operations:
        for i in one.tensors[: one.operands]:
            after[i].update(one.tensors[one.operands :])
    reached = {i for i, _, _ in walk(_arguments(tensors), lambda i: after[i])}
    return frozenset(range(len(tensors))) - reached


def _places(link: Link) -> dict[str, list[tuple[int, int]]]:
    """By factor, the dimensions that are split along it first."""
    found: dict[str, list[tuple[int, int]]] = {}
    for i, dimensions in zip(link.values, link.factors, strict=False):
        for d, names in enumerate(dimensions):
            if name := _major(names, link.sizes):
                found.setdefault(name, []).append((i, d))
    return found


def _compound(link: Link) -> set[str]:
    """Of a reshape that splits or merges dimensions, the major factors of these."""
    if link.name != "reshape":
        return set()
    found = (
        _major(names, link.sizes)
        for dimensions in link.factors
        for names in dimensions
        if sum(link.sizes.get(name, 0) > 1 for name in names) > 1
    )
    return {name for name in found if name}


def _is_elementwise(link: Link) -> bool:
    """Whether a product adds nothing up: compilers make a multiplication of it."""
    if link.name != "dot_general":
        return False
    made = {*itertools.chain(*link.factors[-1])}
    return all(size == 1 or name in made for name, size in link.sizes.items())


def _major(names: Sequence[str], sizes: Any) -> str | None:
    """The factor that a dimension is split along first."""
    return next((name for name in names if sizes.get(name, 0) > 1), None)
