"""The layouts that are worth a look, by moves from several starts.

A move puts a class into the order of an axis, takes one out, puts one elsewhere in it or into that
of another axis, or has an axis split the other one of two dimensions. From each start moves
are taken until none helps, or others are better. What was seen on the way is kept, so that a later
stage can choose among the best that differ. Where there are few layouts of a small program, all of
them are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
import itertools
import math
import random
import time
from typing import NamedTuple, Protocol

from spmd.planner.cost.estimate import Estimate, Estimator
from spmd.planner.program.layout import Fixed, Layout
from spmd.planner.search.moves import Space

# Over a budget, a layout counts as this many times slower for each part that is too much: it is
# never as good as one that fits, and of two that do not fit the smaller one is better.
_OVER = 1000.0
_FEW = 300_000
"""Layouts, times operations, that are all looked at if there are no more."""
_STARTS = 8
"""Starts from which moves are tried, of those that are given and of others."""
_NEAR = 2.0
"""How much slower than the best so far a given start may be. Of 786 descents for the benchmark's
cases, on 16 chips, 64 chips and 8 GPUs, 41 were from farther ones, and none of these found anything
better by more than 0.3 %."""
_FAR = 1.05
"""Where what comes of the given starts is so much slower than another mesh, no others are tried.
These made 5 of 117 meshes of the benchmark's cases faster by more than 0.3 %, and only those of
decoding by more than 2 %."""
_ROUNDS = 2
"""After so many rounds of moves a descent is given up that is behind the best layout so far. Of 754
such descents for the benchmark's cases and others, nine found something better after that: by 0.3 %
at most, but for two on meshes that are 5 % and more behind. After one round it would be too early:
the best layout of GPT-2 XL on 64 chips comes of a descent that is 22 % behind then."""
_AGAIN = 3
"""Searches from what a few moves at random make of the best layout."""
_SHAKEN = 3


class Cost(Protocol):
    """What is known of a layout."""

    @property
    def seconds(self) -> float:
        """Of a call."""
        ...

    @property
    def peak(self) -> float:
        """Bytes of a device at the worst moment."""
        ...


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
        deadline: by `time.monotonic`, after which nothing more is looked at; None for no limit.
        fixed: places that arguments and outputs keep; a search has them from its estimate.
    """

    budget: float | None = None
    never: frozenset[tuple[int, str]] = frozenset()
    deadline: float | None = None
    fixed: Fixed | None = None

    def allow(self, layout: Layout) -> bool:
        """Whether no axis splits what it must not."""
        orders = (*layout.orders, *layout.state)
        return not any((c, axis) in self.never for axis, order in orders for c in order)

    def fits(self, cost: Cost) -> bool:
        """Whether a layout keeps to the budget."""
        return self.budget is None or cost.peak <= self.budget

    def score(self, cost: Cost) -> float:
        """What is to be as small as possible: seconds, and what is over the budget."""
        if self.budget is None or self.fits(cost):
            return cost.seconds
        return cost.seconds * (1 + _OVER * (cost.peak / self.budget))


def search(
    estimate: Estimator,
    rules: Rules,
    *,
    starts: Iterable[Layout] = (),
    best: float = math.inf,
    seed: int = 0,
    saw: Callable[[Candidate], None] = lambda one: None,
) -> list[Candidate]:
    """The layouts that were seen, best first.

    Layouts that differ in nothing but the names of two axes that are alike are one.

    Args:
        estimate: of the program on a machine.
        rules: what a layout may do.
        starts: to begin from, beside those that split one class on each axis.
        best: the score of the best layout of other meshes.
        seed: of what is tried at random.
        saw: is told each one.
    """
    found = _Search(estimate, rules, saw)
    with found:
        found.look(Layout.of(dict.fromkeys(found.space.allowed, ())))
        if found.descend_from(starts, within=_NEAR) and found.best().score > _FAR * best:
            return found.ranked()
        found.descend_from(found.space.starts())
        found.enumerate(_FEW)
        if found.best().score < best:
            found.shake(random.Random(seed), _AGAIN)
        if not rules.fits(found.best().cost):
            found.shrink()
    return found.ranked()


class _LateError(Exception):
    """The deadline is over."""


class _Search:
    """What was seen of the layouts of a program; ends quietly at the deadline."""

    def __init__(self, estimate: Estimator, rules: Rules, saw: Callable[[Candidate], None]):
        self.estimate, self.rules, self.saw = estimate, rules, saw
        self.space = Space(estimate.graph, estimate.machine, rules.never, estimate.fixed)
        self.seen: dict[Layout, Candidate] = {}
        self.ended: set[Layout] = set()

    def __enter__(self) -> _Search:
        return self

    def __exit__(self, kind: type | None, *_: object) -> bool:
        return kind is _LateError

    def look(self, layout: Layout) -> Candidate:
        """A layout with its cost."""
        layout = self.space.canonical(layout)
        if layout not in self.seen:
            if self.seen and self.rules.deadline and time.monotonic() > self.rules.deadline:
                raise _LateError
            cost = self.estimate(layout)
            self.seen[layout] = Candidate(layout, cost, self.rules.score(cost))
            self.saw(self.seen[layout])
        return self.seen[layout]

    def descend_from(self, starts: Iterable[Layout], within: float = math.inf) -> bool:
        """Descends from the best of some layouts, and says whether there are any.

        Args:
            starts: the layouts.
            within: how often the best score so far one of them may have.
        """
        seen = sorted(map(self.begin, starts), key=_score)
        for one in seen[:_STARTS]:
            if one.score <= within * self.best().score:
                self.descend(one.layout)
        return bool(seen)

    def begin(self, start: Layout) -> Candidate:
        """A layout that others may be near; it is told by its own name, too."""
        found = self.look(self.space.permitted(start))
        self.seen.setdefault(start, found._replace(layout=start))
        return found

    def descend(self, start: Layout) -> None:
        """Takes the best move of each kind, one kind after the other, until none helps.

        It ends early where others are better: what is behind after two rounds stays so.
        """
        best = self.look(start)
        for n in itertools.count(1):
            if best.layout in self.ended:
                return
            self.ended.add(best.layout)
            for moves in self.space.kinds:
                best = min([best, *map(self.look, moves(best.layout))], key=_score)
            if n >= _ROUNDS and best.score > self.best().score:
                return

    def enumerate(self, most: int) -> None:
        """Looks at all orders of classes, if there are few in a small program, and goes on."""
        if self.space.count() * len(self.estimate.graph.operations) <= most:
            self.descend(min(map(self.look, self.space.all()), key=_score).layout)

    def shake(self, chance: random.Random, times: int) -> None:
        """Begins again from what moves at random make of the best layout."""
        for _ in range(times):
            layout = self.best().layout
            for _ in range(_SHAKEN):
                layout = chance.choice([layout, *self.space.moves(layout)])
            self.descend(layout)

    def shrink(self) -> None:
        """Goes to what needs least, however long it takes, and on from there if that fits."""
        best = min(self.seen.values(), key=_peak)
        while not self.rules.fits(best.cost):
            better = min(map(self.look, self.space.moves(best.layout)), key=_peak, default=best)
            if better.cost.peak >= best.cost.peak:
                return
            best = better
        self.descend(best.layout)

    def best(self) -> Candidate:
        """The best one so far."""
        return min(self.seen.values(), key=_score)

    def ranked(self) -> list[Candidate]:
        """All that were seen, best first."""
        return best_first(self.seen.values())


def coarse(nbytes: float) -> float:
    """Bytes in steps of a tenth: what is less speaks for none of two layouts that are as fast."""
    return round(math.log1p(nbytes) / math.log(1.1)) if math.isfinite(nbytes) else nbytes


def best_first(seen: Iterable[Candidate]) -> list[Candidate]:
    """Candidates, best first: of two that are as fast, the smaller one."""
    return sorted(seen, key=_score)


def _score(one: Candidate) -> tuple[float, float]:
    return one.score, coarse(one.cost.peak)


def _peak(one: Candidate) -> tuple[float, float]:
    return one.cost.peak, one.score
