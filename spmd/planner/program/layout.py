"""A plan: which classes of dimensions each mesh axis splits, in an order.

An axis goes to the first class of its order that a value has. This one rule says data parallelism
(``data: batch``), FSDP (``data: batch, width``), Megatron (``model: heads, hidden, vocabulary``),
and sequence, context and expert parallelism. Values of the optimizer may have an order of their
own (ZeRO-1), and arguments and outputs may keep places that no order gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
from typing import Protocol, TypeAlias

from spmd import P
from spmd.planner.program.structure import Graph

Orders: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""By axis, major to minor, classes; the first one first."""


class Placed(Protocol):
    """What a layout wants of an array: its shape, and the class of each dimension, or None."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        ...

    @property
    def classes(self) -> tuple[int | None, ...]:
        """Of its dimensions."""
        ...

    @property
    def is_state(self) -> bool:
        """Whether only the optimizer has it."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What each mesh axis splits.

    Attributes:
        orders: by axis, major to minor, the classes that it splits, the first one first.
        state: likewise, of values that only the optimizer has: these classes come before those of
            `orders`. ZeRO-1 is ``data: width`` here, and ``data: batch`` there.
        last: pairs of an axis and a class; of two dimensions of the class in one value, the axis
            splits the last one, and not the first one.
    """

    orders: Orders
    state: Orders = ()
    last: frozenset[tuple[str, int]] = frozenset()

    @classmethod
    def of(
        cls,
        orders: Mapping[str, Sequence[int]],
        state: Mapping[str, Sequence[int]] | None = None,
        last: Iterable[tuple[str, int]] = (),
    ) -> Layout:
        """From mappings."""
        return cls(_frozen(orders), _frozen(state or {}), frozenset(last))

    def with_order(self, axis: str, classes: Sequence[int]) -> Layout:
        """With another order of one axis."""
        return dataclasses.replace(self, orders=_with(self.orders, axis, classes))

    def with_state(self, axis: str, classes: Sequence[int]) -> Layout:
        """With another order of one axis for values of the optimizer."""
        return dataclasses.replace(self, state=_with(self.state, axis, classes))

    def turned(self, axis: str, number: int) -> Layout:
        """With the other one of two dimensions of a class, split by an axis."""
        return dataclasses.replace(self, last=self.last ^ {(axis, number)})

    def order(self, *, is_state: bool) -> Orders:
        """By axis, what it splits: of values of the optimizer, or of all others."""
        if not (is_state and self.state):
            return self.orders
        first = dict(self.state)
        return tuple((axis, (*first.get(axis, ()), *classes)) for axis, classes in self.orders)

    def places(self, tensor: Placed, sizes: Mapping[str, int]) -> dict[str, int]:
        """The dimension that each axis splits.

        An axis passes over a dimension that it does not divide. Of two dimensions of one class it
        takes the first one, or the last one.
        """
        found: dict[str, int] = {}
        left = list(tensor.shape)
        for axis, classes in self.order(is_state=tensor.is_state):
            for d in self._candidates(axis, tensor.classes, classes):
                if left[d] % sizes[axis] == 0:
                    found[axis] = d
                    left[d] //= sizes[axis]
                    break
        return found

    def _candidates(
        self, axis: str, own: Sequence[int | None], classes: Sequence[int]
    ) -> Iterator[int]:
        for wanted in classes:
            found = [d for d, number in enumerate(own) if number == wanted]
            yield from reversed(found) if (axis, wanted) in self.last else found

    def spec(self, tensor: Placed, sizes: Mapping[str, int]) -> P:
        """Where an array lies: an entry for each dimension."""
        return spec_of(self.places(tensor, sizes), len(tensor.shape))


def _frozen(orders: Mapping[str, Sequence[int]]) -> Orders:
    return tuple((axis, tuple(classes)) for axis, classes in orders.items())


def _with(orders: Orders, axis: str, classes: Sequence[int]) -> Orders:
    return _frozen({**dict(orders), axis: classes})


def spec_entries(places: Mapping[str, int], rank: int) -> list[tuple[str, ...]]:
    """Axes by dimension."""
    entries: list[list[str]] = [[] for _ in range(rank)]
    for axis, d in places.items():
        entries[d].append(axis)
    return [*map(tuple, entries)]


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """Places that arguments and outputs keep, whatever a layout says.

    Attributes:
        places: by the index of a tensor, the dimension that each axis splits; of two axes on one
            dimension, the major one first.
    """

    places: tuple[tuple[int, tuple[tuple[str, int], ...]], ...] = ()

    @classmethod
    def of(cls, places: Mapping[int, Mapping[str, int]]) -> Fixed:
        """From a mapping."""
        return cls(tuple((i, tuple(found.items())) for i, found in sorted(places.items())))

    def to_dict(self) -> dict[int, dict[str, int]]:
        """The same as a mapping."""
        return {i: dict(found) for i, found in self.places}


def fixed_at(graph: Graph, arguments: int, kept: Sequence[int]) -> dict[int, int]:
    """By leaf of the arguments, and then of the results, its tensor.

    Args:
        graph: the program.
        arguments: how many leaves those have.
        kept: which of these the program has.
    """
    ins = [i for i, one in enumerate(graph.tensors) if one.kind == "argument"]
    outs = [i for i, one in enumerate(graph.tensors) if one.kind == "output"]
    at = dict(zip(kept, ins[len(ins) - len(kept) :], strict=True))
    return at | {arguments + i: output for i, output in enumerate(outs)}


def places_of(
    tensors: Sequence[Placed],
    layout: Layout,
    sizes: Mapping[str, int],
    fixed: Fixed | None = None,
    at: Iterable[int] | None = None,
) -> dict[int, dict[str, int]]:
    """The dimension that each axis splits, of all tensors or of those that stand at some places.

    It is as it is fixed, or else as a layout says.
    """
    kept = fixed.to_dict() if fixed else {}
    known: dict[object, dict[str, int]] = {}  # most values are of few kinds

    def place(one: Placed) -> dict[str, int]:
        kind = one.shape, one.classes, one.is_state
        if kind not in known:
            known[kind] = layout.places(one, sizes)
        return known[kind]

    wanted = range(len(tensors)) if at is None else at
    return {i: kept[i] if i in kept else place(tensors[i]) for i in wanted}


def spec_of(places: Mapping[str, int], rank: int) -> P:
    """Where an array lies: an entry for each dimension."""
    return P(*(axes or None for axes in spec_entries(places, rank)))
