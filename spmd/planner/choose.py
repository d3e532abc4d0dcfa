"""From a program and meshes to the few layouts that were compiled, best first.

Three tiers, each dearer than the one before: `estimate` for thousands of layouts of a mesh,
Shardy's own exchanges for the best of all meshes, and the compiler for the best of those.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import math
import statistics
import time
from typing import Any, NamedTuple
import warnings

import spmd
from spmd import stages
from spmd._mesh import show_axes
from spmd.inspection.compile.preview import previewed
from spmd.inspection.compile.timed import Asked, links_of
from spmd.inspection.compile.warned import compile_and_catch
from spmd.inspection.hlo.oom import out_of_memory
from spmd.inspection.records.plan import Entries, Pin, added_by_compiler
from spmd.inspection.records.report import Collective, Report
from spmd.inspection.records.sums import once, sum_of
from spmd.inspection.timing.chips import Chip
from spmd.planner import cache
from spmd.planner.cost.estimate import Estimate, Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.pins import Pinned, Way
from spmd.planner.program.layout import Fixed, Layout, fixed_at
from spmd.planner.program.structure import Graph
from spmd.planner.search.descent import Candidate, Rules, best_first, coarse, search
from spmd.planner.search.experts import experts, roles_of
from spmd.planner.verify import Program, annotated, entries_of, places_of_compiled, planned
from spmd.planner.written import written_places

FOUND = "found"
WRITTEN = "as written"

_KEPT = 24
"""Layouts of a mesh that the first tier leaves."""
_LOOKED_AT = 12
"""Those that the second tier looks at, of all meshes together."""
_OF_EACH = 2
"""Of each mesh at least so many, if they are near."""
_OF_EQUAL = 6
"""Of layouts of a mesh with the same figures at most so many, or as many as are compiled."""
_AFTER_THOSE = 12
"""So many more, where they seem better than the best of those."""
_FAR = 1.5
"""More than so many times the best prediction is not near: exchanges can only add."""
_NEAR = 1.2
"""Up to so many times the best prediction, what is unlike comes before what is alike."""
_AS_MUCH = 1.05
"""Up to so many times the seconds of exchanges, fewer pins are worth a compile."""
_FEWER = 0.9
"""Below so many times what is predicted with pins, a layout is looked at without any as well."""
_INSTEAD = 2
"""Up to so many times as many are compiled where some do not keep to the memory."""
_HARDLY = 1.02
"""Up to so many times the seconds of the best, what is unlike it is pinned in other ways too."""
_SAME = 0.998
"""Above so many times the seconds before, a change of pins does not stay for the next ones."""


class Progress(NamedTuple):
    """How far a search is.

    Attributes:
        tried: layouts so far.
        best: seconds of the best one so far; None before the first.
        compiling: what the compiler works on; empty where it does not.
        kept: whether the plan was found on the disk: it was searched for in an earlier start.
    """

    tried: int
    best: float | None
    compiling: str
    kept: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout on a mesh, and what is known of it.

    Attributes:
        name: ``found``, that of an expert, or ``as written``.
        mesh: that it is for.
        graph: the program as it was lowered for this mesh.
        layout: what its axes split; None for a program as it was written.
        kept: the leaves of the arguments that the program has.
        ins: places of all leaves.
        outs: places of the results.
        pins: constraints inside.
        estimate: of the first tier; for a program as it was written that of the preview, which
            knows no peak.
        exchange: seconds of exchanges, as Shardy makes them; None before it did.
        told: the exchanges as Shardy makes them for the chip, or for the compiler that was asked;
            None before it did.
        report: of the compiled program; None for one that was not compiled.
        failure: what the compiler said of a program that it refused.
        needed: bytes that a refused program needs, where the compiler says it.
        written: the program as it was written.
    """

    name: str
    mesh: Any
    graph: Graph
    layout: Layout | None
    kept: tuple[int, ...]
    ins: tuple[Entries, ...]
    outs: tuple[Entries, ...]
    pins: tuple[Pin, ...]
    estimate: Estimate
    exchange: float | None = None
    told: tuple[Collective, ...] | None = None
    report: Report | None = None
    failure: str = ""
    needed: int | None = None
    written: stages.Lowered | None = None

    @property
    def predicted(self) -> float:
        """Seconds, before anything was compiled.

        Of exchanges the tier counts that sees more: classes know rings and gathers ahead of their
        use, and Shardy what lies between the values that are pinned.
        """
        more = (self.exchange or 0.0) - self.estimate.exchange
        return self.estimate.seconds + max(0.0, more)

    @property
    def seconds(self) -> float:
        """Of a call: compiled for hardware that has a time, or else predicted.

        What a compiler for CPUs adds to the exchanges, others may add as well.
        """
        if self.report is None or self.report.time is None:
            return self.predicted
        if not self.is_stand_in:
            return self.report.time.seconds
        if self.told is None:
            return self.predicted
        told, sent = (sum_of(once(x)).wire_bytes for x in (self.told, self.report.collectives))
        return self.predicted + added_by_compiler(told, sent, self.report.time.exchange)

    @property
    def is_stand_in(self) -> bool:
        """Whether CPUs stand in for the hardware."""
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def peak(self) -> float:
        """Bytes of a device: as the compiler says, or else estimated."""
        if self.needed is not None:
            return self.needed
        memory = self.report.memory if self.report else None
        return memory.peak if memory else self.estimate.peak

    def fits(self, budget: float | None) -> bool:
        """Whether the compiled program, or else the estimate, keeps to a budget in bytes."""
        return not self.failure and (budget is None or self.peak <= budget)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What was looked at, and how long that took.

    Attributes:
        choices: the best one first; those that keep to the budget come first.
        tried: layouts that were estimated.
        searched: seconds without compilers.
        compiled: seconds that compilers took.
        compiles: how many programs they were asked for, beside what they said before.
        complete: whether neither a time limit nor an interrupt ended it.
    """

    choices: tuple[Choice, ...]
    tried: int
    searched: float
    compiled: float
    compiles: int
    complete: bool

    @property
    def refused(self) -> str:
        """What the compiler said, where it took none of the layouts, and not for their memory."""
        asked = [one for one in self.choices if one.report or one.failure]
        lasting = [one.failure for one in asked if one.failure and one.needed is None]
        return lasting[0] if lasting and len(lasting) == len(asked) else ""


def choose(
    program: Program,
    meshes: Sequence[Any],
    chip: Chip,
    *,
    rules: Rules | None = None,
    top: int = 3,
    seeds: bool = True,
    seed: int = 0,
    written: Sequence[stages.Lowered] = (),
    tell: Callable[[Progress], None] = lambda one: None,
    named: int | None = None,
    cached: bool = True,
) -> Chosen:
    """The best layouts of all meshes, and the experts.

    A time limit, or an interrupt, ends it with the best so far.

    Args:
        program: what to plan.
        meshes: to choose among.
        chip: whose figures to use.
        rules: what a layout may do.
        top: how many are compiled, beside the best experts.
        seeds: whether experts are starts of the search, and compiled too.
        seed: of what the search tries at random.
        written: the program as its user wrote it, for meshes that it is for.
        tell: is told how far it is.
        named: how many experts are compiled; one less than `top` by default, and at least one.
        cached: whether what compilers say is kept on disk and found again.
    """
    looking = _Looking(program, chip, rules or Rules(), top, seeds, seed, tell, named, cached)
    try:
        looking.estimate(meshes)
        looking.add_written(written)
        looking.preview()
        looking.compile(meshes)
    except KeyboardInterrupt:
        if not looking.choices:
            raise
        looking.complete = False
    return looking.chosen()


class _Mesh(NamedTuple):
    """A mesh, what a program takes on it, and its experts by name."""

    mesh: Any
    estimate: Estimator
    experts: dict[str, Candidate]


class _Looking:
    """A search on its way."""

    def __init__(
        self,
        program: Program,
        chip: Chip,
        rules: Rules,
        top: int,
        seeds: bool,
        seed: int,
        tell: Callable[[Progress], None],
        named: int | None = None,
        cached: bool = True,
    ):
        self.cached = cached
        self.program, self.chip, self.rules = program, chip, rules
        self.top, self.seeds, self.seed, self.tell = top, seeds, seed, tell
        self.named = max(1, top - 1) if named is None else named
        self.choices: list[Choice] = []
        self.seen: list[Candidate] = []  # of the mesh that is searched
        self.tried, self.compiled, self.compiles, self.complete = 0, 0.0, 0, True
        self.best: float | None = None
        self.start = time.monotonic()
        self._known: dict[int, Pinned] = {}
        self._estimators: dict[tuple[Any, bool | None], Estimator] = {}

    # Tier one

    def estimate(self, meshes: Iterable[Any]) -> None:
        """The best layouts of each mesh, and its experts, by classes alone.

        Meshes with better experts come first: of those that are farther from the best, less is
        looked at.
        """
        on = [*self._open(meshes)]
        on.sort(key=lambda one: min((named.score for named in one.experts.values()), default=0.0))
        best = math.inf
        for mesh, estimate, named in on:
            if self.choices and self._is_late():
                return
            self.seen = []
            try:
                found = search(
                    estimate,
                    self.rules,
                    starts=[one.layout for one in named.values()],
                    best=best,
                    seed=self.seed,
                    saw=self._saw,
                )
            except KeyboardInterrupt:
                self.choices += self._kept(best_first(self.seen), estimate, mesh)
                raise
            best = min(best, found[0].score)
            self.choices += self._kept(found, estimate, mesh)
            self.choices += (
                self._choice(name, one, estimate.graph, mesh) for name, one in named.items()
            )

    def _open(self, meshes: Iterable[Any]) -> Iterator[_Mesh]:
        """The program on each mesh that it is for; at the deadline on the first one at least."""
        estimate: Estimator | None = None
        for mesh in meshes:
            if estimate and self._is_late():
                return
            machine = self._machine(mesh)
            if machine is None or not self.program.is_for(mesh):
                continue
            graph = self.program.graph(mesh)
            if estimate and estimate.graph is graph and estimate.machine.count == machine.count:
                estimate = estimate.on(machine)
            else:
                estimate = Estimator(graph, machine, self.rules.fixed)
            self._estimators[mesh, None] = estimate
            known = experts(graph, machine.sizes) if self.seeds else {}
            named = {
                name: Candidate(layout, cost := estimate(layout), self.rules.score(cost))
                for name, layout in known.items()
                if self.rules.allow(layout)
            }
            yield _Mesh(mesh, estimate, named)

    def _machine(self, mesh: Any) -> Machine | None:
        """What its devices can do; None where their links are not known."""
        sizes = dict(mesh.shape)
        links, _ = links_of(self.chip, [*mesh.devices.flat], sizes)
        return None if links is None else Machine(self.chip, links, sizes)

    def _saw(self, one: Candidate) -> None:
        self.tried += 1
        self.seen.append(one)
        if self.rules.fits(one.cost) and (self.best is None or one.cost.seconds < self.best):
            self.best = one.cost.seconds
        self.tell(Progress(self.tried, self.best, ""))

    def _kept(self, found: Sequence[Candidate], estimate: Estimator, mesh: Any) -> Iterator[Choice]:
        """The best candidates that place arrays otherwise than those before."""
        seen: set[Any] = set()
        alike: collections.Counter[Estimate] = collections.Counter()
        for one in found:
            said = estimate.said(one.layout)
            if said in seen or alike[one.cost] == max(_OF_EQUAL, self.top):
                continue
            choice = self._choice(FOUND, one, estimate.graph, mesh)
            if choice.pins + choice.ins not in seen:
                alike[one.cost] += 1
                yield choice
            seen |= {said, choice.pins + choice.ins}
            if alike.total() == _KEPT:
                break

    def _choice(self, name: str, one: Candidate, graph: Graph, mesh: Any) -> Choice:
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
        return dataclasses.replace(found, pins=self._pins(found, Way()))

    # Tier two

    def preview(self) -> None:
        """Shardy's own exchanges of the best of all meshes, and of the experts that are near."""
        ranked = sorted(range(len(self.choices)), key=lambda i: self._rank(self.choices[i]))
        ranked = self._unlike(ranked)
        scores = [self.rules.score(one) for one in self.choices]
        most = _FAR * min(scores, default=0.0)
        enough = _INSTEAD * max(1, self.top)
        of_mesh: dict[Any, int] = {}
        known: list[float] = []
        of_place: dict[Any, float] = {}
        for i in ranked:
            one = self.choices[i]
            of_mesh[one.mesh] = of_mesh.get(one.mesh, 0) + 1
            is_extra = of_mesh[one.mesh] <= _OF_EACH and scores[i] <= most
            if one.written or (len(known) >= _LOOKED_AT and not is_extra):
                continue
            # Exchanges can only add: what seems to be behind as many as may be compiled is. So is
            # what seems to be behind what is like it.
            if len(known) >= enough and (
                scores[i] > sorted(known)[enough - 1]
                or scores[i] >= of_place.get(_place_of(one), math.inf)
            ):
                continue
            if self._is_late():
                return
            self.tell(Progress(self.tried, self.best, ""))
            self.choices[i] = self._previewed(one)
            known.append(self.rules.score(self.choices[i]))
            of_place.setdefault(_place_of(one), scores[i])
        self._preview_best(ranked, 1)
        named = [i for i, one in enumerate(self.choices) if one.name not in (FOUND, WRITTEN)]
        self._preview_best(named, self.named)
        self._unpin()

    def _preview_best(self, among: Sequence[int], count: int) -> None:
        """Looks at what seems to be among so many best of some, until it is known that they are."""
        for _ in range(_AFTER_THOSE):
            fitting = [i for i in among if self.choices[i].fits(self.rules.budget)]
            seconds = self._seconds_at_least()
            fitting.sort(key=lambda i: seconds[i])
            at = next((i for i in fitting[:count] if self.choices[i].told is None), None)
            if at is None or self._is_late():
                return
            self.tell(Progress(self.tried, self.best, ""))
            self.choices[at] = self._previewed(self.choices[at])

    def _seconds_at_least(self) -> list[float]:
        """What each one takes, as far as Shardy's exchanges are known.

        To the estimate of one that was found they add no less than to those of all others that were
        found on its mesh: unlike ones have been looked at. One with the figures of another may well
        be the same program.
        """
        added: dict[Any, float] = {}
        alike: dict[Estimate, float] = {}
        for one in self.choices:
            if one.told is not None:
                alike[one.estimate] = min(one.predicted, alike.get(one.estimate, math.inf))
                if one.name == FOUND:
                    more = one.predicted - one.estimate.seconds
                    added[one.mesh] = min(more, added.get(one.mesh, math.inf))

        def at_least(one: Choice) -> float:
            if one.told is not None:
                return one.predicted
            if one.estimate in alike:
                return alike[one.estimate]
            return one.predicted + (added.get(one.mesh, 0.0) if one.name == FOUND else 0.0)

        return [*map(at_least, self.choices)]

    def _unpin(self) -> None:
        """The best layouts of each mesh without pins, where Shardy then makes far fewer exchanges.

        One is the best as Shardy makes it. Another is the best by its estimate without pins, which
        these may cost the more; it has to be better than all others. Most layouts need their pins:
        without, propagation places the activations otherwise. Where exchanges are little of the
        time, none is looked at.
        """
        own = [i for i, one in enumerate(self.choices) if one.layout]
        told = [i for i in own if self.choices[i].told is not None]
        first = [i for i in self._best_of_each_mesh(told, self._rank) if self._seems_far(i)]
        for i in first:
            self._without_pins(self.choices[i], math.inf)
        scores = (self.rules.score(one) for one in self.choices if one.told is not None)
        least = min(scores, default=math.inf)
        meshes = {self.choices[i].mesh for i in told if self._seems_far(i)}
        own = [i for i in own if self.choices[i].mesh in meshes]
        for i in self._best_of_each_mesh(own, self._rank_without_pins):
            if i not in first:
                self._without_pins(self.choices[i], least)

    def _seems_far(self, i: int) -> bool:
        """Whether Shardy makes far more of a layout than the estimate."""
        return self.choices[i].estimate.seconds < _FEWER * self.choices[i].predicted

    def _best_of_each_mesh(
        self, among: Iterable[int], rank: Callable[[Choice], tuple[Any, ...]]
    ) -> list[int]:
        ranked = sorted(among, key=lambda i: rank(self.choices[i]))
        return self._unlike_in(ranked, lambda one: one.mesh)

    def _without_pins(self, one: Choice, most: float) -> None:
        """Adds a layout without pins, if it is far better so, and takes no longer than `most`."""
        pins = self._pins(one, Way(free=True))
        if pins == one.pins or self._is_late():
            return
        estimate = self._estimated(one, one.layout, Way(free=True))
        free = self._previewed(dataclasses.replace(one, pins=pins, estimate=estimate))
        if one.told is not None:
            most = min(_FEWER * one.predicted, most)
        if free.predicted < most:
            self.choices.append(free)

    def _previewed(self, one: Choice) -> Choice:
        return as_shardy_makes(one, self.program, self.chip)

    def add_written(self, written: Sequence[stages.Lowered]) -> None:
        """The program as its user wrote it."""
        for lowered in written if self.choices else ():
            found = previewed(lowered, Asked(chip=self.chip), subject="plan")
            machine = self._machine(lowered.mesh)
            if found.time is None or machine is None:
                continue
            graph = self.program.graph(lowered.mesh)
            estimate = self._of_written(lowered, graph, machine)
            choice = Choice(
                name=WRITTEN, mesh=lowered.mesh, graph=graph, layout=None,
                kept=(), ins=(), outs=(), pins=(),
                estimate=dataclasses.replace(
                    estimate, compute=max(estimate.compute, found.time.compute), peak=math.inf
                ),
                exchange=found.time.exchange, told=found.collectives, written=lowered,
            )  # fmt: skip
            self.choices.append(choice)

    def _of_written(self, lowered: stages.Lowered, graph: Graph, machine: Machine) -> Estimate:
        """The estimate for places that a user wrote, with what suits them best in between.

        Where values inside lie nobody says before a compile; layouts that were found are tried.
        """
        ins, outs = written_places(lowered)
        kept = self.program.kept(lowered.mesh)
        at = fixed_at(graph, len(ins), kept)
        places = {at[i]: one for i, one in enumerate((*ins, *outs)) if i in at and one is not None}
        estimate = Estimator(graph, machine, Fixed.of(places))
        layouts = {Layout.of(dict.fromkeys(machine.sizes, ()))}
        layouts |= {one.layout for one in self.choices if one.layout and one.graph is graph}
        return min(map(estimate, layouts), key=lambda one: one.seconds)

    # Tier three

    def compile(self, meshes: Iterable[Any] = ()) -> None:
        """The compiler's word on the best ones, and on the best experts.

        Args:
            meshes: to search once more where the compiler needs more memory than the estimate says.
        """
        if not self.top:
            return
        for is_wanted, count in (
            (lambda one: one.name == FOUND, self.top),
            (lambda one: one.name not in (FOUND, WRITTEN), self.named),
            (lambda one: one.name == WRITTEN, 1),
        ):
            at = [i for i, one in enumerate(self.choices) if is_wanted(one)]
            at.sort(key=lambda i: self._rank(self.choices[i]))
            if not self._compile_first(self._unlike(at), count):
                return
        # Where none of these keeps to the memory, the smallest ones may.
        left = {
            one.peak: i
            for i, one in reversed([*enumerate(self.choices)])
            if not one.report and not one.failure
        }
        for _, i in sorted(left.items())[: self.top]:
            if any(one.report and one.fits(self.rules.budget) for one in self.choices):
                break
            if not self._compile(i):
                return
        self._look_again(meshes)
        if self.top > 1:
            self._vary()

    def _compile_first(self, ranked: Sequence[int], count: int) -> bool:
        """Compiles so many of them; False where the time is up.

        As many more take the places of those that do not keep to the memory as compiled, as far as
        these seem to.
        """
        left = count
        for n, i in enumerate(ranked[: _INSTEAD * count]):
            if not left or (n >= count and not self.choices[i].fits(self.rules.budget)):
                break
            if not self._compile(i):
                return False
            left -= self.choices[i].fits(self.rules.budget)
        return True

    def _look_again(self, meshes: Iterable[Any]) -> None:
        """What is best in less memory, where a compiler needs more than the estimate says.

        Only where what fits is slower than what seemed to fit: by what the compiler said of that, a
        search knows how much less to look for.
        """
        budget = self.rules.budget
        asked = [one for one in self.choices if one.report or one.needed is not None]
        over = [
            one
            for one in asked
            if one.layout and self.rules.fits(one.estimate) and not one.fits(budget)
        ]
        if budget is None or not over or self._is_late():
            return
        fits = min((one.seconds for one in asked if one.fits(budget)), default=math.inf)
        if fits <= _NEAR * min(one.predicted for one in over):
            return
        given, before = self.rules, [*self.choices]
        more = statistics.median(one.peak / one.estimate.peak for one in over)
        smaller = dataclasses.replace(given, budget=budget / more)
        self.rules = smaller
        try:
            self.estimate(meshes)
            self.preview()
        finally:
            self.rules = given
        known = {program_of(one) for one in before}
        found = self.choices[len(before) :]
        self.choices = before + [one for one in found if program_of(one) not in known]
        left = [
            i
            for i, one in enumerate(self.choices)
            if smaller.fits(one.estimate) and one.layout and not one.report and not one.failure
        ]
        left.sort(key=lambda i: self._rank(self.choices[i]))
        self._compile_first(self._unlike(left), self.top)

    def _vary(self) -> None:
        """The best ones again: activations split otherwise, and products pinned otherwise."""
        for i in self._best()[:1]:
            self._split_width(i)
        for i in self._best():
            self._pin_otherwise(i)

    def _best(self) -> list[int]:
        """The best one that was compiled, and others that are hardly slower, if there are any.

        One is of another mesh, or an expert beside what was found; and one places large arguments
        otherwise. Where none keeps to the memory, the smallest of each mesh.
        """
        asked = [i for i, one in enumerate(self.choices) if one.report or one.needed is not None]
        ranked = sorted(asked, key=lambda i: self._standing(self.choices[i]))
        fitting = [i for i in ranked if self.choices[i].fits(self.rules.budget)]
        if not fitting:
            return self._unlike_in(ranked, lambda one: one.mesh)[: self.top]
        most = _HARDLY * self.choices[fitting[0]].seconds
        near = [i for i in fitting if self.choices[i].seconds <= most]
        by_name = self._unlike_in(near, lambda one: (one.mesh, one.name == FOUND))
        by_place = self._unlike_in(near, lambda one: (one.mesh, _places_of_large(one)))
        return [*dict.fromkeys([*by_name[:2], *by_place[:2]])]

    def _unlike_in(self, ranked: Iterable[int], key: Callable[[Choice], Any]) -> list[int]:
        """The first one of each key."""
        found: dict[Any, int] = {}
        for i in ranked:
            found.setdefault(key(self.choices[i]), i)
        return [*found.values()]

    def _split_width(self, at: int) -> None:
        """One again, whose activations are split by their width between products, if it is near.

        So MaxText's rules have it (`base.yml`, ``activation_embed``). Sums are scattered then and
        gathered again, in as many bytes as they are made whole. How much shorter the elementwise
        work in between is only a compiler knows.
        """
        best = self.choices[at]
        if best.is_stand_in or best.layout is None or self._is_late():
            return
        roles, layout = roles_of(best.graph), best.layout
        for axis, order in best.layout.orders:
            if {*order} & {*roles.hidden}:
                width = (c for c in roles.stored[:1] if c not in order)
                layout = layout.with_order(axis, (*order, *width))
        if layout == best.layout or not self.rules.allow(layout):
            return
        found = Candidate(layout, self._estimated(best, layout, Way()), 0.0)
        other = self._previewed(self._choice(FOUND, found, best.graph, best.mesh))
        if other.predicted <= _NEAR * best.predicted:
            self.choices.append(other)
            self._compile(len(self.choices) - 1)

    def _pin_otherwise(self, at: int) -> None:
        """One again, whose products gather and add up in other ways, or as they will.

        What gains nothing but noise does not stay for the next changes, which it may bar; all of
        that is tried together in the end.
        """
        usual, way = self.choices[at], Way()
        if usual.layout is None or usual.pins == self._pins(usual, Way(free=True)):
            return
        little: dict[str, bool] = {}
        for change in (
            {"whole": True},
            *[{"whole": False}] * bool(usual.estimate.first),
            {"ahead": False},
            {"turned": False},
            {"loose": True},
            {"free": True},
            little,
        ):
            best = self.choices[at]
            if best.is_stand_in or self._is_late():
                return
            other = way._replace(**change)
            pins = self._pins(usual, other)
            if pins == best.pins or ("whole" in change and way.whole is not None):
                continue
            # What products gather ahead of their use they would not without pins.
            if other.free and self._gathers_ahead(usual, way):
                continue
            estimate = self._estimated(best, usual.layout, other)
            one = dataclasses.replace(best, pins=pins, estimate=estimate)
            one = self._previewed(dataclasses.replace(one, report=None, failure="", needed=None))
            sends_more = (one.exchange or 0.0) > (best.exchange or 0.0) * _AS_MUCH
            if sends_more and (other.loose or other.free):
                continue
            self.choices.append(one)
            self._compile(len(self.choices) - 1)
            found = self.choices.pop()
            is_known = found.report or found.needed is not None
            if is_known and self._standing(found) < self._standing(best):
                self.choices[at] = found
                if self._is_same(found, best):
                    little |= change
                else:
                    way = other

    def _standing(self, one: Choice) -> tuple[bool, float]:
        """Of two that were compiled, the faster one is better, or the smaller one if none fits."""
        fits = one.fits(self.rules.budget)
        return not fits, one.seconds if fits else one.peak

    def _is_same(self, one: Choice, other: Choice) -> bool:
        """Whether one that was compiled is as good as another, but for what is noise."""
        (over, own), (is_other_over, before) = self._standing(one), self._standing(other)
        return over == is_other_over and own > _SAME * before

    def _pins(self, one: Choice, way: Way) -> tuple[Pin, ...]:
        assert one.layout is not None
        first = self._estimators[one.mesh, None].summed_first(one.estimate)
        return self._pinned(one.graph).pins(one.layout, dict(one.mesh.shape), way, first)

    def _estimated(self, one: Choice, layout: Layout | None, way: Way) -> Estimate:
        """What a layout costs on the mesh of another one, as it is pinned.

        Sums go around where results are left to propagation.
        """
        assert layout is not None
        first = False if way.loose or way.free else way.whole
        key = one.mesh, first
        if first is not None and key not in self._estimators:
            self._estimators[key] = self._estimators[one.mesh, None].summing(first=first)
        return self._estimators[key](layout)

    def _pinned(self, graph: Graph) -> Pinned:
        if id(graph) not in self._known:  # the program keeps its graphs
            self._known[id(graph)] = Pinned(graph, self.rules.fixed)
        return self._known[id(graph)]

    def _gathers_ahead(self, one: Choice, way: Way) -> bool:
        return self._pins(one, way._replace(ahead=False)) != self._pins(one, way)

    def _compile(self, i: int) -> bool:
        """Compiles one; False where the time is up."""
        if self._is_late():
            return False
        one = self.choices[i]
        own = program_of(one)
        same = next((c for c in self.choices if c.report and program_of(c) == own), None)
        if same:
            self.choices[i] = dataclasses.replace(one, told=same.told, report=same.report)
            return True
        if one.told is None:
            one = self._previewed(one)
        lowered = one.written or planned(self.program, one.mesh, one.ins, one.outs, one.pins)
        if one.is_stand_in:  # its compiler is asked for bytes, which are others than the chip's
            told = previewed(lowered, Asked(), subject="plan").collectives
            one = dataclasses.replace(one, told=told)
        self.choices[i] = self._asked(one, lowered)
        return True

    def _asked(self, one: Choice, lowered: stages.Lowered) -> Choice:
        """The same with what the compiler says of it, or said of it before."""
        # Of what its user wrote, only the compiled program tells where results lie.
        is_kept = self.cached and cache.folder() is not None and not one.written
        key = cache.key_of_program(lowered, self.chip) if is_kept else ""
        if key and (found := cache.find_compiled(key)):
            return dataclasses.replace(
                one, report=found.report, failure=found.failure, needed=found.needed
            )
        doing = f"{one.name} on {show_axes(one.mesh.shape)}"
        self.tell(Progress(self.tried, self.best, doing))
        self.compiles += 1
        start = time.monotonic()
        try:
            one = _compiled(one, lowered, self.chip)
        finally:
            self.compiled += time.monotonic() - start
        if key and (one.report or one.needed is not None):  # any other failure may be of the moment
            cache.keep_compiled(key, cache.Compiled(one.report, one.failure, one.needed))
        return one

    def _unlike(self, ranked: Sequence[int]) -> list[int]:
        """The same choices: those that are not much slower than the first and unlike all before.

        After them come those that place large arguments, or have figures, as one before them.
        """
        seen: set[Any] = set()
        first: list[int] = []
        for i in ranked:
            one = self.choices[i]
            if one.predicted > _NEAR * self.choices[ranked[0]].predicted:
                break
            # With equal figures it may well be the same program, under other names of its axes.
            keys = {_place_of(one), (one.estimate, one.exchange)}
            if keys.isdisjoint(seen):
                seen |= keys
                first.append(i)
        return [*first, *(i for i in ranked if i not in {*first})]

    def _rank(self, one: Choice) -> tuple[bool, bool, float, float]:
        """What Shardy's exchanges are not known of seems faster than it is, and comes later.

        Of what does not fit, what needs less is better too: a compiler that makes room for it
        computes again. Of two that are as fast the smaller one is better.
        """
        fits, is_known = one.fits(self.rules.budget), one.told is not None
        return not fits, not is_known, self.rules.score(one), coarse(one.peak)

    def _rank_without_pins(self, one: Choice) -> tuple[bool, float]:
        """The rank by the estimate alone, of what is not pinned."""
        estimate = self._estimated(one, one.layout, Way(free=True))
        return not self.rules.fits(estimate), estimate.seconds

    def _is_late(self) -> bool:
        late = self.rules.deadline is not None and time.monotonic() > self.rules.deadline
        self.complete = self.complete and not late
        return late

    def chosen(self) -> Chosen:
        """The answer so far: what was compiled comes first, since more is known of it."""

        def rank(one: Choice) -> tuple[Any, ...]:
            known = bool(one.report or one.failure) or not any(c.report for c in self.choices)
            # Only a compiler tells where the results of what was written lie.
            known = known and not (one.written and not one.report)
            return (not (known and one.fits(self.rules.budget)), not known, *self._rank(one))

        found = sorted(self.choices, key=rank)
        if not any(one.fits(self.rules.budget) for one in found):
            found.sort(key=lambda one: (one.failure != "" and one.needed is None, one.peak))
        took = time.monotonic() - self.start
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


def _places_of_large(one: Choice) -> Any:
    """Where arguments lie of which each is a hundredth of all bytes."""
    arguments = [tensor for tensor in one.graph.tensors if tensor.kind == "argument"]
    least = sum(tensor.nbytes for tensor in arguments) / 100
    own = arguments[len(arguments) - len(one.kept) :]
    places = zip(own, (one.ins[i] for i in one.kept), strict=True)
    return tuple(place for tensor, place in places if tensor.nbytes >= least)


def _place_of(one: Choice) -> Any:
    """The same, on a mesh of which sizes."""
    return tuple(size for size in one.mesh.shape.values() if size > 1), _places_of_large(one)


def program_of(one: Choice) -> Any:
    """What is equal for two layouts that are one program."""
    return one.mesh, one.ins, one.outs, one.pins, id(one.written)


def _compiled(one: Choice, lowered: stages.Lowered, chip: Chip) -> Choice:
    try:
        with warnings.catch_warnings(action="ignore"):  # of layouts that nobody asked for
            compiled = compile_and_catch(lowered, by_lines=False)
    except Exception as e:
        verdict = out_of_memory(e)
        text = str(e).strip().partition("\n")[0]
        needed = verdict and (verdict.needed or verdict.available)
        return dataclasses.replace(one, failure=text or type(e).__name__, needed=needed)
    if one.written:
        ins, outs = places_of_compiled(compiled)
        one = dataclasses.replace(one, ins=ins, outs=outs)
    return dataclasses.replace(one, report=spmd.report(compiled, chip=chip))
