"""A search on its way: what is asked of it, and the layouts that it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import time
from typing import Any

from spmd.inspection.compile.preview import previewed
from spmd.inspection.compile.timed import Asked, links_of
from spmd.inspection.records.plan import Pin
from spmd.inspection.timing.chips import Chip
from spmd.planner.cost.estimate import Estimate, Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.pins import Pinned, Way
from spmd.planner.program.layout import Layout
from spmd.planner.program.structure import Graph
from spmd.planner.search.descent import Candidate, Rules, coarse
from spmd.planner.tiers.choice import Choice, Chosen, Progress, place_of
from spmd.planner.verify import Program, annotated, entries_of

NEAR = 1.2
"""Up to so many times the best prediction, what is unlike comes before what is alike."""
INSTEAD = 2
"""Up to so many times as many are compiled where some do not keep to the memory."""


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Looking:
    """A search on its way.

    Attributes:
        program: what is planned.
        chip: whose figures are used.
        rules: what a layout may do.
        top: how many layouts are compiled, beside experts.
        seeds: whether experts are starts of the search, and compiled too.
        seed: of what the search tries at random.
        tell: is told how far it is.
        named: how many experts are compiled.
        cached: whether what compilers say is kept on disk and found again.
        choices: the layouts that are known, in the order in which they were found.
        estimators: by mesh, of layouts that are pinned as usual.
        seen: layouts of the mesh that is searched.
        tried: how many layouts were estimated.
        best: seconds of the best one of these; None before the first.
        compiles: how many programs compilers were asked for.
        compiled: seconds that they took.
        complete: whether nothing ended it before its end.
    """

    program: Program
    chip: Chip
    rules: Rules = dataclasses.field(default_factory=Rules)
    top: int = 3
    seeds: bool = True
    seed: int = 0
    tell: Callable[[Progress], None] = lambda one: None
    named: int = 1
    cached: bool = True
    choices: list[Choice] = dataclasses.field(default_factory=list)
    estimators: dict[Any, Estimator] = dataclasses.field(default_factory=dict)
    seen: list[Candidate] = dataclasses.field(default_factory=list)
    tried: int = 0
    best: float | None = None
    compiles: int = 0
    compiled: float = 0.0
    complete: bool = True

    def __post_init__(self):
        self._start = time.monotonic()
        self._known: dict[int, Pinned] = {}
        self._as_pinned: dict[tuple[Any, bool | None, bool], Estimator] = {}

    def machine(self, mesh: Any) -> Machine | None:
        """What its devices can do; None where their links are not known."""
        sizes = dict(mesh.shape)
        links, _ = links_of(self.chip, [*mesh.devices.flat], sizes)
        return None if links is None else Machine(self.chip, links, sizes)

    def saw(self, one: Candidate) -> None:
        """Takes down a layout that was estimated."""
        self.tried += 1
        self.seen.append(one)
        if self.rules.fits(one.cost) and (self.best is None or one.cost.seconds < self.best):
            self.best = one.cost.seconds
        self.say()

    def say(self, compiling: str = "") -> None:
        """Tells how far it is."""
        self.tell(Progress(self.tried, self.best, compiling))

    def choice(self, name: str, one: Candidate, graph: Graph, mesh: Any) -> Choice:
        """A layout on a mesh, pinned as usual."""
        ins, outs = entries_of(graph, one.layout, mesh.shape, self.rules.fixed)
        found = Choice(
            name=name,
            mesh=mesh,
            graph=graph,
            layout=one.layout,
            kept=self.program.kept(mesh),
            ins=self.program.whole(mesh, ins),
            outs=outs,
            pins=(),
            estimate=one.cost,
        )
        return dataclasses.replace(found, pins=self.pins(found, Way()))

    def pins(self, one: Choice, way: Way) -> tuple[Pin, ...]:
        """The constraints of a layout, as a way of pinning has them."""
        assert one.layout is not None
        first = self.estimators[one.mesh].summed_first(one.estimate)
        return self._pinned(one.graph).pins(one.layout, dict(one.mesh.shape), way, first)

    def estimated(self, one: Choice, layout: Layout | None, way: Way) -> Estimate:
        """What a layout costs on the mesh of another one, as it is pinned.

        Sums go around where results are left to propagation.
        """
        assert layout is not None
        usual = self.estimators[one.mesh]
        first = False if way.loose or way.free else way.whole
        ahead = way.ahead or way.free
        if first is None and ahead:
            return usual(layout)
        key = one.mesh, first, ahead
        if key not in self._as_pinned:
            self._as_pinned[key] = usual.as_pinned(sums_first=first, ahead=ahead)
        return self._as_pinned[key](layout)

    def _pinned(self, graph: Graph) -> Pinned:
        if id(graph) not in self._known:  # the program keeps its graphs
            self._known[id(graph)] = Pinned(graph, self.rules.fixed)
        return self._known[id(graph)]

    def previewed(self, one: Choice) -> Choice:
        """The same with its exchanges as Shardy makes them."""
        return as_shardy_makes(one, self.program, self.chip)

    def ranked(self, among: Iterable[int]) -> list[int]:
        """Of these choices the best ones first, as far as is known before they are compiled."""
        return sorted(among, key=lambda i: self.rank(self.choices[i]))

    def first_of_each(self, ranked: Iterable[int], key: Callable[[Choice], Any]) -> list[int]:
        """The first one of each key."""
        found: dict[Any, int] = {}
        for i in ranked:
            found.setdefault(key(self.choices[i]), i)
        return [*found.values()]

    def unlike(self, ranked: Sequence[int]) -> list[int]:
        """The same choices: those that are not much slower than the first and unlike all before.

        After them come those that place large arguments, or have figures, as one before them.
        """
        seen: set[Any] = set()
        first: list[int] = []
        for i in ranked:
            one = self.choices[i]
            if one.predicted > NEAR * self.choices[ranked[0]].predicted:
                break
            # With equal figures it may well be the same program, under other names of its axes.
            keys = {place_of(one), (one.estimate, one.exchange)}
            if keys.isdisjoint(seen):
                seen |= keys
                first.append(i)
        return [*first, *(i for i in ranked if i not in {*first})]

    def rank(self, one: Choice) -> tuple[bool, bool, float, float]:
        """What Shardy's exchanges are not known of seems faster than it is, and comes later.

        Of what does not fit, what needs less is better too: a compiler that makes room for it
        computes again. Of two that are as fast the smaller one is better.
        """
        fits, is_known = one.fits(self.rules.budget), one.told is not None
        return not fits, not is_known, self.rules.score(one), coarse(one.peak)

    def is_late(self) -> bool:
        """Whether the time is up."""
        late = self.rules.deadline is not None and time.monotonic() > self.rules.deadline
        self.complete = self.complete and not late
        return late

    def chosen(self) -> Chosen:
        """The answer so far: what was compiled comes first, since more is known of it."""

        def rank(one: Choice) -> tuple[Any, ...]:
            known = bool(one.report or one.failure) or not any(c.report for c in self.choices)
            # Only a compiler tells where the results of what was written lie.
            known = known and not (one.written and not one.report)
            return (not (known and one.fits(self.rules.budget)), not known, *self.rank(one))

        found = sorted(self.choices, key=rank)
        if not any(one.fits(self.rules.budget) for one in found):
            found.sort(key=lambda one: (one.failure != "" and one.needed is None, one.peak))
        took = time.monotonic() - self._start
        return Chosen(
            choices=tuple(found),
            tried=self.tried,
            searched=took - self.compiled,
            compiled=self.compiled,
            compiles=self.compiles,
            complete=self.complete,
        )


def as_shardy_makes(one: Choice, program: Program, chip: Chip) -> Choice:
    """A layout with the exchanges that Shardy makes of it for a chip."""
    ins = [one.ins[i] for i in one.kept]
    lowered = annotated(program.lowered(one.mesh), ins, one.outs, one.pins)
    found = previewed(lowered, Asked(chip=chip), subject="plan", products=False)
    seconds = found.time.exchange if found.time else None
    return dataclasses.replace(one, exchange=seconds, told=found.collectives)
