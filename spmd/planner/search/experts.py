"""What people do by hand, found in the structure of a program.

The roles of classes are guessed from what arguments and products have them. Where a program has no
class for a role, the plans that need one are absent. Sources: data parallelism and FSDP as in ZeRO
(arXiv:1910.02054), of which ZeRO-1 splits the optimizer alone; Megatron-LM (arXiv:1909.08053), with
sequence parallelism (arXiv:2205.05198); context parallelism as in ring attention
(arXiv:2310.01889); expert parallelism as in GShard (arXiv:2006.16668).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
import functools
import math

from spmd.planner.program.layout import Layout
from spmd.planner.program.optimizer import outputs_of
from spmd.planner.program.structure import Graph, Operation, Tensor

# A class that fewer bytes of the parameters have is none of theirs: a table of positions has that
# of the sequence.
_FEW = 0.1
# A class that the most of the products' work has.
_MOST = 0.9
_MOST_CLASSES = 5

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What classes of a program are for; None, or nothing, where it has none of that kind.

    Attributes:
        batch: of examples, which no parameter has.
        length: of a sequence: another one that no parameter has.
        expert: along which activations and parameters are multiplied side by side.
        stored: classes of parameters, so that each has one of them: the first one is the width,
            which most of them have.
        hidden: likewise, without the width: what a layer widens, and makes narrow again.
    """

    batch: int | None
    length: int | None
    expert: int | None
    stored: tuple[int, ...]
    hidden: tuple[int, ...]


def roles_of(graph: Graph, parts: int = 1) -> Roles:
    """What the classes of a program are for.

    Args:
        graph: the program.
        parts: into how many parts the hidden classes can be split.
    """
    return _Reader(graph).roles(parts)


class _Reader:
    """Guesses roles."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.products = [one for one in graph.operations if one.flops]
        self.arguments = [one for one in graph.tensors if one.kind == "argument"]
        self.work = self._work()

    def roles(self, parts: int) -> Roles:
        batch = self._batch()
        given = [one for one in self.arguments if batch is None or batch in one.classes]
        length = self._length(batch, given)
        parameters = [
            one
            for one in self.arguments
            if not one.is_state and batch not in one.classes and self._is_planned(one)
        ]
        if batch is None and length is not None:
            parameters = [one for one in parameters if length not in one.classes]
        barred = {batch, length}
        expert = self._expert(batch, {c for one in parameters for c in one.classes} - barred)
        stored = self._cover(parameters, given, lambda c: c not in barred)
        barred |= {expert, *stored[:1], *self._summed_by_scores(batch, length)}
        hidden = self._cover(
            parameters, given, lambda c: c not in barred and self.graph.sizes[c] % parts == 0
        )
        return Roles(batch=batch, length=length, expert=expert, stored=stored, hidden=hidden)

    def _summed_by_scores(self, batch: int | None, length: int | None) -> set[int]:
        """Classes that products of two activations sum over, such as the widths of heads."""
        found: set[int] = set()
        for one in self.products:
            both = all(batch in self.graph.tensors[i].classes for i in one.tensors[:2])
            summed = {*_summed(one)}
            if batch is not None and both and length not in summed:
                found |= summed - {batch}
        return found

    def _is_planned(self, one: Tensor) -> bool:
        return any(c in self.graph.classes for c in one.classes)

    def _work(self) -> Counter[int]:
        """By class, the work of the products that have it; of no products, bytes of arguments."""
        found: Counter[int] = Counter()
        for one in self.products:
            found.update(dict.fromkeys(one.by_class, one.flops * one.runs))
        for one in () if self.products else self.arguments:
            leading = next((c for c in one.classes if c is not None), None)
            found.update({leading: int(one.nbytes)} if leading is not None else {})
        return Counter({c: work for c, work in found.items() if c in self.graph.classes})

    # Examples and sequences

    def _batch(self) -> int | None:
        """The class of examples.

        A program that learns nothing never sums over them in a product. One that learns returns
        its parameters, and examples are what else it is given. Without products, they are what
        comes first in most bytes of the arguments.
        """
        if not self.products:
            return min(self.work, key=self._rank, default=None)
        found = self._never_summed()
        return self._given() if found is None else found

    def _never_summed(self) -> int | None:
        total = sum(one.flops * one.runs for one in self.products)
        summed = {c for one in self.products for c in _summed(one)}
        kept, given = self._sides
        # Of a program that learns nothing only few arguments come back, such as what it goes on.
        barred = {c for one in kept for c in one.classes} if len(kept) > len(given) else set()
        barred -= {c for one in given for c in one.classes}
        found = [
            c
            for c, work in self.work.items()
            if c not in summed | barred and work >= _MOST * total > 0
        ]
        return min(found, key=self._rank, default=None)

    @functools.cached_property
    def _sides(self) -> tuple[list[Tensor], list[Tensor]]:
        """The arguments that come back, those of the optimizer among them, and all others."""
        inputs = {i for i in outputs_of(self.graph).values() if i is not None}
        kept, given = ([], [])
        for i, one in enumerate(self.graph.tensors):
            if one.kind == "argument":
                (kept if i in inputs or one.is_state else given).append(one)
        return kept, given

    def _given(self) -> int | None:
        kept, given = self._sides
        shares = _shares(kept)
        candidates = {
            c
            for one in given
            for c in one.classes
            if c in self.graph.classes and shares[c] < _FEW and not self._meets_itself(c)
        }
        return min(candidates, key=self._rank, default=None)

    def _length(self, batch: int | None, given: Sequence[Tensor]) -> int | None:
        if not self.products:
            return None
        others = [one for one in self.arguments if not one.is_state and batch not in one.classes]
        shares = _shares(others) if batch is not None else Counter()
        candidates = {
            c
            for one in given
            for c in one.classes
            if c in self.graph.classes and c != batch and shares[c] < _FEW
        }
        if batch is None:
            candidates = {c for c in candidates if self._meets_itself(c)}
        return min(candidates, key=self._rank, default=None)

    def _rank(self, c: int) -> tuple[float, int]:
        """Most work first; then what comes first in values."""
        places = [
            one.classes.index(c)
            for one in self.graph.tensors
            if c in one.classes and one.kind != "output"
        ]
        return -self.work[c], sum(places) * 1000 // max(1, len(places))

    def _meets_itself(self, c: int) -> bool:
        """Whether a value has two dimensions of a class, as scores of attention have."""
        return any(one.classes.count(c) > 1 for one in self.graph.tensors)

    # Parameters

    def _expert(self, batch: int | None, among: Collection[int | None]) -> int | None:
        """The class along which a product has activations and parameters side by side."""
        found: Counter[int] = Counter()
        for one in self.products:
            a, b = (batch in self.graph.tensors[i].classes for i in one.tensors[:2])
            if batch is None or a == b:
                continue
            beside = {*one.factors[0]} & {*one.factors[1]} & {*one.factors[-1]} - {None}
            for c, names in one.by_class.items():
                if c in among and c in self.graph.classes and beside.intersection(names):
                    found[c] += one.flops * one.runs
        return max(found, key=lambda c: found[c], default=None)

    def _cover(
        self, parameters: Sequence[Tensor], given: Sequence[Tensor], may: Callable[[int], bool]
    ) -> tuple[int, ...]:
        """Classes so that most bytes of the parameters have one: each time the one of most bytes.

        Of classes of the same bytes, that of examples counts; of such as heads and their widths,
        the first dimension.
        """
        of_examples = {c for one in given for c in one.classes}
        found: list[int] = []
        left = [*parameters]
        total = sum(one.nbytes for one in left)
        while left and len(found) < _MOST_CLASSES:
            sums: Counter[int] = Counter()
            for one in left:
                own = dict.fromkeys(c for c in one.classes if c in self.graph.classes)
                sums.update({c: one.nbytes for c in own if c is not None and may(c)})
            if not sums or max(sums.values()) < total * _FEW / _MOST_CLASSES:
                break
            most = max(sums.values())
            equal = [c for c in sums if sums[c] == most]
            found.append(min(equal, key=lambda c: (c not in of_examples, self._place(c))))
            left = [one for one in left if found[-1] not in one.classes]
        return tuple(found)

    def _place(self, c: int) -> int:
        """How far behind a class stands in arguments."""
        return sum(one.classes.index(c) for one in self.arguments if c in one.classes)


def _summed(one: Operation) -> Iterator[int]:
    """The classes that a product sums over."""
    made = {name for names in one.factors[one.operands :] for name in names}
    for c, names in one.by_class.items():
        if not made.intersection(names):
            yield c


def _shares(tensors: Sequence[Tensor]) -> Counter[int | None]:
    """By class, the share of all bytes of values that have it."""
    total = sum(one.nbytes for one in tensors) or 1
    found: Counter[int | None] = Counter()
    for one in tensors:
        for c in {*one.classes}:
            found[c] += one.nbytes / total  # pyright: ignore[reportArgumentType]
    return found


# Plans


def experts(graph: Graph, sizes: Mapping[str, int]) -> dict[str, Layout]:
    """Plans by the names that people have for them.

    Those that a program has no classes for are absent.

    Args:
        graph: the program.
        sizes: of the mesh axes, major to minor.
    """
    axes = tuple(axis for axis, size in sizes.items() if size > 1)
    reader = _Reader(graph)
    roles = functools.cache(reader.roles)
    found = dict(_Plans(graph, sizes, axes).of_one(roles(1)))
    for n in range(1, len(axes)):
        for data, model in ((axes[:n], axes[n:]), (axes[n:], axes[:n])):
            parts = math.prod(sizes[axis] for axis in model)
            for name, layout in _Plans(graph, sizes, axes).of_two(roles(parts), data, model):
                found.setdefault(name if data == axes[:n] else f"{name}, {_SWAPPED}", layout)
    if len(axes) == 1:
        parts = sizes[axes[0]]
        for name, layout in _Plans(graph, sizes, axes).of_two(roles(parts), (), axes):
            found.setdefault(name, layout)
    return {name: layout for name, layout in found.items() if any(o for _, o in layout.orders)}


_SWAPPED = "axes swapped"


@dataclasses.dataclass(frozen=True, slots=True)
class _Plans:
    """Writes plans for a mesh."""

    graph: Graph
    sizes: Mapping[str, int]
    axes: Axes

    def of_one(self, roles: Roles) -> Iterator[tuple[str, Layout]]:
        """What uses all axes alike."""
        axes = self._dividing(roles.batch)
        if roles.batch is None or not axes:
            return
        batch = dict.fromkeys(axes, (roles.batch,))
        yield "data parallel", self._layout(batch)
        if any(one.is_state for one in self.graph.tensors):
            yield "ZeRO-1", self._layout(batch, dict.fromkeys(axes, roles.stored))
        if roles.stored:
            yield "FSDP", self._layout(dict.fromkeys(axes, (roles.batch, *roles.stored)))

    def of_two(self, roles: Roles, data: Axes, model: Axes) -> Iterator[tuple[str, Layout]]:
        """What uses some axes for examples, and others within one."""
        if not self._divides(roles.batch, data):
            return
        batch = () if roles.batch is None else (roles.batch,)
        first = dict.fromkeys(data, batch)
        whole = dict.fromkeys(data, (*batch, *roles.stored))
        has_state = bool(data) and any(one.is_state for one in self.graph.tensors)
        if roles.hidden:
            hidden = dict.fromkeys(model, roles.hidden)
            yield "Megatron", self._layout({**first, **hidden})
            if has_state:
                state = dict.fromkeys(data, roles.stored)
                yield "ZeRO-1 x TP", self._layout({**first, **hidden}, state)
            if data:
                yield "FSDP x TP", self._layout({**whole, **hidden})
        if self._divides(roles.length, model) and roles.length is not None:
            yield from self._along(roles, roles.length, first, whole, model)
        if self._divides(roles.expert, model) and roles.expert is not None:
            yield from self._experts(roles, roles.expert, first, whole, model)

    def _along(
        self,
        roles: Roles,
        length: int,
        first: dict[str, tuple[int, ...]],
        whole: dict[str, tuple[int, ...]],
        model: Axes,
    ) -> Iterator[tuple[str, Layout]]:
        """What splits sequences."""
        if roles.hidden:
            hidden = dict.fromkeys(model, (*roles.hidden, length))
            yield "Megatron + sequence", self._layout({**first, **hidden})
            if first:
                yield "FSDP x TP + sequence", self._layout({**whole, **hidden})
        yield "context parallel", self._layout({**first, **dict.fromkeys(model, (length,))})
        if roles.stored:
            split = dict.fromkeys(model, (length, *roles.stored))
            yield "context parallel x FSDP", self._layout({**whole, **split})

    def _experts(
        self,
        roles: Roles,
        expert: int,
        first: dict[str, tuple[int, ...]],
        whole: dict[str, tuple[int, ...]],
        model: Axes,
    ) -> Iterator[tuple[str, Layout]]:
        """What gives each device experts of its own, and examples where that divides."""
        both = roles.batch is not None and self._divides(roles.batch, self.axes)
        rest = (roles.batch,) if both and roles.batch is not None else roles.hidden
        split = dict.fromkeys(model, (expert, *rest))
        yield "expert parallel", self._layout({**first, **split})
        if first and roles.stored:
            yield "expert parallel x FSDP", self._layout({**whole, **split})

    def _layout(
        self,
        orders: Mapping[str, tuple[int, ...]],
        state: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Layout:
        return Layout.of({axis: orders.get(axis, ()) for axis in self.axes}, state)

    def _divides(self, c: int | None, axes: Axes) -> bool:
        """Whether axes split a class evenly; the batch of no examples is split by no axes."""
        return not axes or (c is not None and self.graph.sizes[c] % self._count(axes) == 0)

    def _dividing(self, c: int | None) -> Axes:
        """As many axes as divide a class."""
        if c is None:
            return ()
        ways = [self.axes, *((axis,) for axis in self.axes)]
        fitting = [axes for axes in ways if self._divides(c, axes)]
        return max(fitting, key=self._count, default=())

    def _count(self, axes: Axes) -> int:
        return math.prod(self.sizes[axis] for axis in axes)
