"""Tier two: the exchanges that Shardy makes of the best layouts of all meshes, and of experts."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from spmd import stages
from spmd.inspection.compile.preview import previewed
from spmd.inspection.compile.timed import Asked
from spmd.planner.cost.estimate import Estimate, Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.pins import Way
from spmd.planner.program.layout import Fixed, Layout, fixed_at
from spmd.planner.program.structure import Graph
from spmd.planner.tiers.choice import FOUND, WRITTEN, Choice, place_of
from spmd.planner.tiers.looking import INSTEAD, Looking
from spmd.planner.written import written_places

_LOOKED_AT = 12
"""Layouts that are looked at, of all meshes together."""
_OF_EACH = 2
"""Of each mesh at least so many, if they are near."""
_AFTER_THOSE = 12
"""So many more, where they seem better than the best of those."""
_FAR = 1.5
"""More than so many times the best prediction is not near: exchanges can only add."""
_FEWER = 0.9
"""Below so many times what is predicted with pins, a layout is looked at without any as well."""


def preview_best(looking: Looking) -> None:
    """Shardy's own exchanges of the best of all meshes, and of the experts that are near."""
    ranked = looking.unlike(looking.ranked(range(len(looking.choices))))
    scores = [looking.rules.score(one) for one in looking.choices]
    most = _FAR * min(scores, default=0.0)
    enough = INSTEAD * max(1, looking.top)
    of_mesh: dict[Any, int] = {}
    known: list[float] = []
    of_place: dict[Any, float] = {}
    for i in ranked:
        one = looking.choices[i]
        of_mesh[one.mesh] = of_mesh.get(one.mesh, 0) + 1
        is_extra = of_mesh[one.mesh] <= _OF_EACH and scores[i] <= most
        if one.written or (len(known) >= _LOOKED_AT and not is_extra):
            continue
        # Exchanges can only add: what seems to be behind as many as may be compiled is. So is
        # what seems to be behind what is like it.
        if len(known) >= enough and (
            scores[i] > sorted(known)[enough - 1]
            or scores[i] >= of_place.get(place_of(one), math.inf)
        ):
            continue
        if looking.is_late():
            return
        looking.say()
        looking.choices[i] = looking.previewed(one)
        known.append(looking.rules.score(looking.choices[i]))
        of_place.setdefault(place_of(one), scores[i])
    _preview_until_sure(looking, ranked, 1)
    named = [i for i, one in enumerate(looking.choices) if one.name not in (FOUND, WRITTEN)]
    _preview_until_sure(looking, named, looking.named)
    _unpin(looking)


def _preview_until_sure(looking: Looking, among: Sequence[int], count: int) -> None:
    """Looks at what seems to be among so many best of some, until it is known that they are."""
    for _ in range(_AFTER_THOSE):
        fitting = [i for i in among if looking.choices[i].fits(looking.rules.budget)]
        seconds = _seconds_at_least(looking)
        fitting.sort(key=lambda i: seconds[i])
        at = next((i for i in fitting[:count] if looking.choices[i].told is None), None)
        if at is None or looking.is_late():
            return
        looking.say()
        looking.choices[at] = looking.previewed(looking.choices[at])


def _seconds_at_least(looking: Looking) -> list[float]:
    """What each one takes, as far as Shardy's exchanges are known.

    To the estimate of one that was found they add no less than to those of all others that were
    found on its mesh: unlike ones have been looked at. One with the figures of another may well
    be the same program.
    """
    added: dict[Any, float] = {}
    alike: dict[Estimate, float] = {}
    for one in looking.choices:
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

    return [*map(at_least, looking.choices)]


def _unpin(looking: Looking) -> None:
    """The best layouts of each mesh without pins, where Shardy then makes far fewer exchanges.

    One is the best as Shardy makes it. Another is the best by its estimate without pins, which
    these may cost the more; it has to be better than all others. Most layouts need their pins:
    without, propagation places the activations otherwise. Where exchanges are little of the
    time, none is looked at.
    """
    own = [i for i, one in enumerate(looking.choices) if one.layout]
    told = [i for i in own if looking.choices[i].told is not None]
    first = looking.first_of_each(looking.ranked(told), lambda one: one.mesh)
    first = [i for i in first if _seems_far(looking.choices[i])]
    for i in first:
        _without_pins(looking, looking.choices[i], math.inf)
    scores = (looking.rules.score(one) for one in looking.choices if one.told is not None)
    least = min(scores, default=math.inf)
    meshes = {looking.choices[i].mesh for i in told if _seems_far(looking.choices[i])}
    own = [i for i in own if looking.choices[i].mesh in meshes]
    own.sort(key=lambda i: _rank_without_pins(looking, looking.choices[i]))
    for i in looking.first_of_each(own, lambda one: one.mesh):
        if i not in first:
            _without_pins(looking, looking.choices[i], least)


def _seems_far(one: Choice) -> bool:
    """Whether Shardy makes far more of a layout than the estimate."""
    return one.estimate.seconds < _FEWER * one.predicted


def _rank_without_pins(looking: Looking, one: Choice) -> tuple[bool, float]:
    """The rank by the estimate alone, of what is not pinned."""
    estimate = looking.estimated(one, one.layout, Way(free=True))
    return not looking.rules.fits(estimate), estimate.seconds


def _without_pins(looking: Looking, one: Choice, most: float) -> None:
    """Adds a layout without pins, if it is far better so, and takes no longer than `most`."""
    pins = looking.pins(one, Way(free=True))
    if pins == one.pins or looking.is_late():
        return
    estimate = looking.estimated(one, one.layout, Way(free=True))
    free = looking.previewed(dataclasses.replace(one, pins=pins, estimate=estimate))
    if one.told is not None:
        most = min(_FEWER * one.predicted, most)
    if free.predicted < most:
        looking.choices.append(free)


def add_written(looking: Looking, written: Sequence[stages.Lowered]) -> None:
    """The program as its user wrote it."""
    for lowered in written if looking.choices else ():
        found = previewed(lowered, Asked(chip=looking.chip), subject="plan")
        machine = looking.machine(lowered.mesh)
        if found.time is None or machine is None:
            continue
        graph = looking.program.graph(lowered.mesh)
        estimate = _of_written(looking, lowered, graph, machine)
        choice = Choice(
            name=WRITTEN, mesh=lowered.mesh, graph=graph, layout=None,
            kept=(), ins=(), outs=(), pins=(),
            estimate=dataclasses.replace(
                estimate, compute=max(estimate.compute, found.time.compute), peak=math.inf
            ),
            exchange=found.time.exchange, told=found.collectives, written=lowered,
        )  # fmt: skip
        looking.choices.append(choice)


def _of_written(
    looking: Looking, lowered: stages.Lowered, graph: Graph, machine: Machine
) -> Estimate:
    """The estimate for places that a user wrote, with what suits them best in between.

    Where values inside lie nobody says before a compile; layouts that were found are tried.
    """
    ins, outs = written_places(lowered)
    kept = looking.program.kept(lowered.mesh)
    at = fixed_at(graph, len(ins), kept)
    places = {at[i]: one for i, one in enumerate((*ins, *outs)) if i in at and one is not None}
    estimate = Estimator(graph, machine, Fixed.of(places))
    layouts = {Layout.of(dict.fromkeys(machine.sizes, ()))}
    layouts |= {one.layout for one in looking.choices if one.layout and one.graph is graph}
    return min(map(estimate, layouts), key=lambda one: one.seconds)
