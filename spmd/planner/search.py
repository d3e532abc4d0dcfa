"""The layouts that are worth a look, by moves from several starts.

A move puts a class into the order of an axis, takes one out, or puts one first. From each start the
best move is taken until none helps; what was seen on the way is kept, so that a later stage can
choose among the best that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import itertools
import time
from typing import NamedTuple, TypeAlias

from spmd.planner.estimate import Estimate, Estimator, Machine
from spmd.planner.layout import Fixed, Layout
from spmd.planner.structure import Graph

# Over a budget, a layout counts as this many times slower for each part that is too much: it is
# never as good as one that fits, and of two that do not fit the smaller one is better.
_OVER = 1000.0
_MOST_CLASSES = 5
_Pairs: TypeAlias = set[tuple[int | None, int | None]]


class Candidate(NamedTuple):
    """A layout with what it is thought to cost."""

    layout: Layout
    cost: Estimate
    score: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a plan may do.

    Attributes:
        budget: bytes on a device; None for no limit.
        never: pairs of a class and an axis.
        fixed: places that arguments and outputs keep.
        deadline: by `time.monotonic`, after which no start is begun; None for no limit.
    """

    budget: float | None = None
    never: frozenset[tuple[int, str]] = frozenset()
    fixed: Fixed | None = None
    deadline: float | None = None

    def allow(self, layout: Layout) -> bool:
        """Whether no axis splits what it must not."""
        orders = (*layout.orders, *layout.state)
        return not any((c, axis) in self.never for axis, order in orders for c in order)

    def fits(self, cost: Estimate) -> bool:
        """Whether a layout keeps to the budget."""
        return self.budget is None or cost.peak <= self.budget

    def score(self, cost: Estimate) -> float:
        """What is to be as small as possible: seconds, and what is over the budget."""
        if self.budget is None or self.fits(cost):
            return cost.seconds
        return cost.seconds * (1 + _OVER * (cost.peak / self.budget))


def search(
    graph: Graph,
    machine: Machine,
    rules: Rules,
    *,
    starts: Iterable[Layout] = (),
    saw: Callable[[Candidate], None] = lambda one: None,
) -> list[Candidate]:
    """The layouts that were seen, best first.

    Args:
        graph: the program.
        machine: what it is for.
        rules: what a layout may do.
        starts: to begin from, beside those that split one class on each axis.
        saw: is told each one.
    """
    estimate = Estimator(graph, machine, rules.fixed)
    seen: dict[Layout, Candidate] = {}

    together = _together(graph)

    def look(layout: Layout) -> Candidate:
        layout = Layout(tuple((axis, _sorted(order, together)) for axis, order in layout.orders))
        if layout not in seen:
            cost = estimate(layout)
            seen[layout] = Candidate(layout, cost, rules.score(cost))
            saw(seen[layout])
        return seen[layout]

    allowed = {
        axis: [
            c
            for c, largest in graph.sizes.items()
            if largest % size == 0 and (c, axis) not in rules.never
        ]
        for axis, size in machine.sizes.items()
        if size > 1
    }
    for start in itertools.chain(starts, _starts(allowed)):
        if rules.deadline is not None and seen and time.monotonic() > rules.deadline:
            break
        best = look(start)
        while True:
            better = min(map(look, _moves(best.layout, allowed)), key=lambda one: one.score)
            if better.score >= best.score:
                break
            best = better
    return sorted(seen.values(), key=lambda one: one.score)


def _together(graph: Graph) -> _Pairs:
    """Pairs that an operation or a value has both of: only of these an order says anything."""
    groups = [one.by_class for one in graph.operations] + [one.classes for one in graph.tensors]
    different = {*map(frozenset, groups)}
    return {pair for group in different for pair in itertools.permutations(group, 2)}


def _sorted(
    order: tuple[int, ...], together: set[tuple[int | None, int | None]]
) -> tuple[int, ...]:
    """One order for all that say the same: neighbours that never meet stand by their numbers."""
    found = [*order]
    for _ in order:
        for i, pair in enumerate(itertools.pairwise(found)):
            if pair[0] > pair[1] and pair not in together:
                found[i], found[i + 1] = found[i + 1], found[i]
    return tuple(found)


def _starts(allowed: Mapping[str, list[int]]) -> Iterator[Layout]:
    """Nothing split, and one class on each axis: those of most products first."""
    yield Layout.of(dict.fromkeys(allowed, ()))
    choices = ([(c,) for c in classes[:_MOST_CLASSES]] for classes in allowed.values())
    for chosen in itertools.product(*choices):
        yield Layout.of(dict(zip(allowed, chosen, strict=True)))


def _moves(layout: Layout, allowed: Mapping[str, list[int]]) -> Iterator[Layout]:
    orders = dict(layout.orders)
    for axis, classes in orders.items():
        for c in allowed.get(axis, ()):
            others = [one for one in classes if one != c]
            if c in classes:
                yield layout.with_order(axis, others)
            if len(others) < _MOST_CLASSES:
                for at in range(len(others) + 1):
                    if (moved := (*others[:at], c, *others[at:])) != classes:
                        yield layout.with_order(axis, moved)
    yield layout  # so that there is always one
