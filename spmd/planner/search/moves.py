"""Which layouts there are, and what lies next to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from typing import TypeAlias

from spmd.planner.cost.machine import Machine
from spmd.planner.program.layout import Fixed, Layout, Orders
from spmd.planner.program.structure import Graph

Kind: TypeAlias = Callable[[Layout], Iterator[Layout]]
"""Of moves: what is one such move away from a layout."""

_MOST_CLASSES = 5
_MOST_OF_STATE = 3
_SINGLE = 5
"""Classes of which each start has one for each axis."""


class Space:
    """The layouts of a program on a mesh.

    Attributes:
        allowed: by axis, the classes that it may split, those of most products first.
        of_state: likewise, those that values of the optimizer have.
        turning: classes that a value has twice.
        kinds: of moves, in the order in which a search tries them.

    Args:
        graph: the program.
        machine: what it is for.
        never: pairs of a class and an axis that are barred.
        fixed: places that arguments and outputs keep.
    """

    def __init__(
        self, graph: Graph, machine: Machine, never: frozenset[tuple[int, str]], fixed: Fixed
    ):
        dims = _dims(graph)
        self.allowed = {
            axis: [
                c
                for c, found in dims.items()
                if (c, axis) not in never and any(d % size == 0 for d in found)
            ]
            for axis, size in machine.sizes.items()
            if size > 1
        }
        state = {c for one in graph.tensors if one.is_state for c in one.classes}
        self.of_state = {a: [c for c in found if c in state] for a, found in self.allowed.items()}
        self.turning = _twice(graph)
        self._together = _together(graph)
        self._fixed = _classes_of(graph, fixed)
        self._alike = _alike(machine, self.allowed, fixed)
        self._sorted = functools.cache(self._in_order)
        self.kinds = [*self._kinds()]

    # One for all that say the same

    def canonical(self, layout: Layout) -> Layout:
        """One layout for all that say the same."""
        orders = {axis: self._sorted(order) for axis, order in layout.orders}
        state = {axis: self._sorted(order) for axis, order in layout.state if order}
        last = {(a, c) for a, c in layout.last if c in (*orders.get(a, ()), *state.get(a, ()))}
        for axes in self._alike:
            said = sorted(
                (orders.get(a, ()), state.get(a, ()), sorted(c for x, c in last if x == a))
                for a in axes
            )
            last = {(a, c) for a, c in last if a not in axes}
            for axis, (order, own, turned) in zip(axes, reversed(said), strict=True):
                orders[axis] = order
                state[axis] = own
                last |= {(axis, c) for c in turned}
        kept = {axis: order for axis, order in state.items() if order}
        return Layout.of(orders, {axis: kept[axis] for axis in orders if axis in kept}, last)

    def _in_order(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Neighbours that never meet stand by their numbers."""
        found = [*order]
        for _ in order:
            for i, pair in enumerate(itertools.pairwise(found)):
                if pair[0] > pair[1] and pair not in self._together:
                    found[i], found[i + 1] = found[i + 1], found[i]
        return tuple(found)

    def permitted(self, layout: Layout) -> Layout:
        """A layout with all axes, without what is barred, or does not divide."""
        orders = dict(layout.orders)
        return Layout(
            tuple((a, self._only(a, orders.get(a, ()))) for a in self.allowed),
            tuple((a, self._only(a, order)) for a, order in layout.state if a in self.allowed),
            layout.last,
        )

    def _only(self, axis: str, order: Iterable[int]) -> tuple[int, ...]:
        return tuple(c for c in order if c in self.allowed[axis])

    # Where to begin

    def starts(self) -> Iterator[Layout]:
        """One class on each axis; and what is fixed, or a `shard_map` has, alone and before it."""
        if any(self._fixed.values()):
            for ways in _around(max(map(len, self._fixed.values()))):
                yield self.permitted(Layout.of(self._ordered(ways)))
        choices = ([(c,) for c in classes[:_SINGLE]] for classes in self.allowed.values())
        for chosen in itertools.product(*choices):
            yield Layout.of(dict(zip(self.allowed, chosen, strict=True)))
            if any(self._fixed.values()):
                merged = {
                    axis: (*self._fixed.get(axis, ()), *own)
                    for axis, own in zip(self.allowed, chosen, strict=True)
                }
                yield Layout.of({axis: (*dict.fromkeys(order),) for axis, order in merged.items()})

    def _ordered(self, ways: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {
            axis: tuple(classes[i] for i in ways if i < len(classes))
            for axis, classes in self._fixed.items()
        }

    # All of them

    def count(self) -> int:
        """How many layouts there are, without those of the optimizer and of dimensions."""
        return math.prod(
            sum(math.perm(len(classes), n) for n in range(_most(classes) + 1))
            for classes in self.allowed.values()
        )

    def all(self) -> Iterator[Layout]:
        """All of these."""
        ways = (
            [
                order
                for n in range(_most(classes) + 1)
                for order in itertools.permutations(classes, n)
            ]
            for classes in self.allowed.values()
        )
        for chosen in itertools.product(*ways):
            yield Layout.of(dict(zip(self.allowed, chosen, strict=True)))

    # What lies next to one

    def moves(self, layout: Layout) -> Iterator[Layout]:
        """What is one move away."""
        return itertools.chain.from_iterable(kind(layout) for kind in self.kinds)

    def _kinds(self) -> Iterator[Kind]:
        for axis in self.allowed:
            for kind in (self._reordered, self._of_optimizer, self._turned):
                yield functools.partial(kind, axis=axis)
        for a, b in itertools.combinations(self.allowed, 2):
            yield functools.partial(self._swapped, a=a, b=b)
        for a, b in itertools.permutations(self.allowed, 2):
            yield functools.partial(self._given, a=a, b=b)

    def _reordered(self, layout: Layout, axis: str) -> Iterator[Layout]:
        """Another order of what an axis splits."""
        order = dict(layout.orders)[axis]
        for one in _next(order, self.allowed[axis], _MOST_CLASSES):
            yield layout.with_order(axis, one)

    def _of_optimizer(self, layout: Layout, axis: str) -> Iterator[Layout]:
        """Another order of what an axis splits of the optimizer's values alone."""
        order = dict(layout.state).get(axis, ())
        for one in _next(order, self.of_state[axis], _MOST_OF_STATE):
            yield layout.with_state(axis, one)

    def _turned(self, layout: Layout, axis: str) -> Iterator[Layout]:
        """The other one of two dimensions of a class."""
        for c in (*dict(layout.orders)[axis], *dict(layout.state).get(axis, ())):
            if c in self.turning:
                yield layout.turned(axis, c)

    def _swapped(self, layout: Layout, a: str, b: str) -> Iterator[Layout]:
        """Two axes exchange what they split."""
        orders, state = (_exchanged(one, a, b) for one in (layout.orders, layout.state))
        yield self.permitted(dataclasses.replace(layout, orders=orders, state=state))

    def _given(self, layout: Layout, a: str, b: str) -> Iterator[Layout]:
        """One axis gives a class to another."""
        orders = dict(layout.orders)
        for c in orders[a]:
            if c in self.allowed[b] and c not in orders[b]:
                left = tuple(x for x in orders[a] if x != c)
                for at in range(min(len(orders[b]) + 1, _MOST_CLASSES)):
                    order = (*orders[b][:at], c, *orders[b][at:])[:_MOST_CLASSES]
                    yield layout.with_order(a, left).with_order(b, order)


def _around(count: int) -> Iterator[tuple[int, ...]]:
    """Orders of so many, with each one first: those after it, or those before it, follow."""
    for first in range(count):
        ways = (*range(first, count), *range(first))
        yield from dict.fromkeys((ways, ways[:1] + ways[:0:-1]))


def _most(classes: Sequence[int]) -> int:
    return min(len(classes), _MOST_CLASSES)


def _next(order: tuple[int, ...], allowed: Iterable[int], most: int) -> Iterator[tuple[int, ...]]:
    """Orders with one class more, one less, or one elsewhere."""
    for c in allowed:
        others = tuple(one for one in order if one != c)
        if c in order:
            yield others
        if len(others) < most:
            for at in range(len(others) + 1):
                if (moved := (*others[:at], c, *others[at:])) != order:
                    yield moved


def _exchanged(orders: Orders, a: str, b: str) -> Orders:
    names = {a: b, b: a}
    by_axis = {names.get(axis, axis): order for axis, order in orders}
    return tuple((axis, by_axis[axis]) for axis, _ in orders if axis in by_axis)


def _dims(graph: Graph) -> dict[int, set[int]]:
    """By class, the sizes of its dimensions in arguments and outputs, and the largest of all."""
    found = {c: {largest} for c, largest in graph.sizes.items()}
    for one in (one for one in graph.tensors if one.kind != "result"):
        for c, size in zip(one.classes, one.shape, strict=True):
            if c in found:
                found[c].add(size)
    return found


def _twice(graph: Graph) -> frozenset[int]:
    """Classes that a value has twice."""
    return frozenset(
        c
        for one in graph.tensors
        for c, times in Counter(one.classes).items()
        if c is not None and times > 1
    )


def _together(graph: Graph) -> set[tuple[int | None, int | None]]:
    """Pairs that an operation or a value has both of: only of these an order says anything."""
    groups = [one.by_class for one in graph.operations] + [one.classes for one in graph.tensors]
    different = {*map(frozenset, groups)}
    return {pair for group in different for pair in itertools.permutations(group, 2)}


def _classes_of(graph: Graph, fixed: Fixed) -> dict[str, tuple[int, ...]]:
    """By axis, the classes of what it splits by fixed places, or around a `shard_map`."""
    found: dict[str, dict[int, None]] = {}
    for i, axis, d in _given(graph, fixed):
        c = graph.tensors[i].classes[d]
        if c in graph.classes:
            found.setdefault(axis, {})[c] = None
    return {axis: tuple(classes) for axis, classes in found.items()}


def _given(graph: Graph, fixed: Fixed) -> Iterator[tuple[int, str, int]]:
    """Values with an axis and the dimension that it splits, whatever a layout says."""
    for i, places in fixed.places:
        yield from ((i, axis, d) for axis, d in places)
    for one in graph.operations:
        for axis, name in one.manual:
            for i, names in zip(one.tensors, one.factors, strict=True):
                if name is not None and name in names:
                    yield i, axis, names.index(name)


def _alike(
    machine: Machine, allowed: Mapping[str, list[int]], fixed: Fixed
) -> list[tuple[str, ...]]:
    """Axes that may change their names: over which exchanges take as long, and nothing is fixed."""
    used = {axis for _, places in fixed.places for axis, _ in places}
    groups: dict[object, list[str]] = {}
    for axis, classes in allowed.items():
        kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
        times = tuple(round(machine.exchange(kind, (axis,), 2**20), 9) for kind in kinds)
        key = axis if axis in used else (machine.sizes[axis], times, tuple(classes))
        groups.setdefault(key, []).append(axis)
    return [tuple(group) for group in groups.values() if len(group) > 1]
