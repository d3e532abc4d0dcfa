"""Tier one: of each mesh the layouts that are best by classes alone, among thousands."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
import math
from typing import Any, NamedTuple

from spmd.planner.cost.estimate import Estimate, Estimator
from spmd.planner.search.descent import Candidate, best_first, search
from spmd.planner.search.experts import experts
from spmd.planner.tiers.choice import FOUND, Choice
from spmd.planner.tiers.looking import Looking

_KEPT = 24
"""Layouts of a mesh that the first tier leaves."""
_OF_EQUAL = 6
"""Of layouts of a mesh with the same figures at most so many, or as many as are compiled."""


class _Mesh(NamedTuple):
    """A mesh, what a program takes on it, and its experts by name."""

    mesh: Any
    estimate: Estimator
    experts: dict[str, Candidate]


def estimate_layouts(looking: Looking, meshes: Iterable[Any]) -> None:
    """The best layouts of each mesh, and its experts, by classes alone.

    Meshes with better experts come first: of those that are farther from the best, less is
    looked at.
    """
    on = [*_open(looking, meshes)]
    on.sort(key=lambda one: min((named.score for named in one.experts.values()), default=0.0))
    best = math.inf
    for mesh, estimate, named in on:
        if looking.choices and looking.is_late():
            return
        looking.seen = []
        try:
            found = search(
                estimate,
                looking.rules,
                starts=[one.layout for one in named.values()],
                best=best,
                seed=looking.seed,
                saw=looking.saw,
            )
        except KeyboardInterrupt:
            looking.choices += _kept(looking, best_first(looking.seen), estimate, mesh)
            raise
        best = min(best, found[0].score)
        looking.choices += _kept(looking, found, estimate, mesh)
        looking.choices += (
            looking.choice(name, one, estimate.graph, mesh) for name, one in named.items()
        )


def _open(looking: Looking, meshes: Iterable[Any]) -> Iterator[_Mesh]:
    """The program on each mesh that it is for; at the deadline on the first one at least."""
    estimate: Estimator | None = None
    for mesh in meshes:
        if estimate and looking.is_late():
            return
        machine = looking.machine(mesh)
        if machine is None or not looking.program.is_for(mesh):
            continue
        graph = looking.program.graph(mesh)
        if estimate and estimate.graph is graph and estimate.machine.count == machine.count:
            estimate = estimate.on(machine)
        else:
            estimate = Estimator(graph, machine, looking.rules.fixed)
        looking.estimators[mesh] = estimate
        known = experts(graph, machine.sizes) if looking.seeds else {}
        named = {
            name: Candidate(layout, cost := estimate(layout), looking.rules.score(cost))
            for name, layout in known.items()
            if looking.rules.allow(layout)
        }
        yield _Mesh(mesh, estimate, named)


def _kept(
    looking: Looking, found: Sequence[Candidate], estimate: Estimator, mesh: Any
) -> Iterator[Choice]:
    """The best candidates that place arrays otherwise than those before."""
    seen: set[Any] = set()
    alike: collections.Counter[Estimate] = collections.Counter()
    for one in found:
        said = estimate.said(one.layout)
        if said in seen or alike[one.cost] == max(_OF_EQUAL, looking.top):
            continue
        choice = looking.choice(FOUND, one, estimate.graph, mesh)
        if choice.pins + choice.ins not in seen:
            alike[one.cost] += 1
            yield choice
        seen |= {said, choice.pins + choice.ins}
        if alike.total() == _KEPT:
            break
