"""From a program and meshes to the few layouts that were compiled, best first.

Three tiers, each dearer than the one before: `estimate` for thousands of layouts of a mesh,
Shardy's own exchanges for the best of each mesh, and the compiler for the best of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
from typing import Any

import spmd
from spmd.inspection.compile.timed import links_of
from spmd.inspection.records.report import Report
from spmd.inspection.shardy.passes import module_of
from spmd.inspection.timing.chips import Chip
from spmd.planner.estimate import Estimate, Machine
from spmd.planner.graph import graph_of
from spmd.planner.layout import Layout
from spmd.planner.search import Candidate, Rules, search
from spmd.planner.structure import Graph
from spmd.planner.verify import Program, planned, verified

_LOOKED_AT = 8
"""Layouts of each mesh that the second tier looks at."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout on a mesh, and what is known of it.

    Attributes:
        mesh: that it is for.
        graph: the program as it was lowered for this mesh.
        layout: what its axes split.
        estimate: of the first tier.
        predicted: seconds, with the exchanges that Shardy makes of the layout.
        report: of the compiled program; None for one that was not compiled.
    """

    mesh: Any
    graph: Graph
    layout: Layout
    estimate: Estimate
    predicted: float
    report: Report | None = None

    def fits(self, budget: float | None) -> bool:
        """Whether the compiled program, or else the estimate, keeps to a budget in bytes."""
        memory = self.report.memory if self.report else None
        return budget is None or (memory.peak if memory else self.estimate.peak) <= budget

    @property
    def seconds(self) -> float:
        """Of a call: compiled, or else predicted."""
        found = self.report.time if self.report else None
        return found.seconds if found else self.predicted


def choose(
    program: Program,
    meshes: Iterable[Any],
    chip: Chip,
    *,
    rules: Rules | None = None,
    top: int = 3,
) -> list[Choice]:
    """The best layouts of all meshes, the best one first; those that keep to the budget come first.

    Args:
        program: what to plan.
        meshes: to choose among.
        chip: whose figures to use.
        rules: what a layout may do.
        top: how many are compiled.
    """
    rules = rules or Rules()
    found = [one for mesh in meshes for one in _predicted(program, mesh, chip, rules)]
    found.sort(key=lambda one: (not one.fits(rules.budget), one.predicted))
    compiled = [
        dataclasses.replace(
            one, report=verified(planned(program, one.mesh, one.graph, one.layout), chip)
        )
        for one in found[:top]
    ]
    return sorted(compiled, key=lambda one: (not one.fits(rules.budget), one.seconds))


def _predicted(program: Program, mesh: Any, chip: Chip, rules: Rules) -> Iterator[Choice]:
    """The best layouts of a mesh, with the exchanges that Shardy makes of them."""
    sizes = dict(mesh.shape)
    links, _ = links_of(chip, [*mesh.devices.flat], sizes)
    if links is None:
        return
    graph = graph_of(module_of(program.lowered(mesh), subject="plan"), subject="plan")
    machine = Machine(chip, links, sizes)
    for one in _different(search(graph, machine, rules), graph, sizes):
        lowered = planned(program, mesh, graph, one.layout)
        found = spmd.preview(lowered, chip=chip).time
        exchange = found.exchange if found else one.cost.exchange
        yield Choice(
            mesh=mesh,
            graph=graph,
            layout=one.layout,
            estimate=one.cost,
            predicted=one.cost.compute + one.cost.memory + exchange,
        )


def _different(
    found: list[Candidate], graph: Graph, sizes: Mapping[str, int]
) -> Iterator[Candidate]:
    """The best candidates, of those that place all arrays alike one."""
    seen = set()
    for one in found:
        places = tuple(tuple(one.layout.places(t, sizes).items()) for t in graph.tensors)
        if places not in seen:
            seen.add(places)
            yield one
        if len(seen) == _LOOKED_AT:
            return
