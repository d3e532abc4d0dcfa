"""What the compiler makes of a layout: the program with its pins, compiled and reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import copy
import dataclasses
import functools
from typing import Any

import jax

import spmd
from spmd import _jax, stages
from spmd.inspection.records.report import Report
from spmd.planner.layout import Fixed, Layout, places_of, spec_of
from spmd.planner.pins import Pin, pin, pins_of
from spmd.planner.structure import Graph


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is planned: a function, its arguments, and what `pjit` is told of it.

    Attributes:
        function: that is called.
        args: its arguments, or structs of their shapes.
        options: of `pjit`, such as ``donate_argnums``.
    """

    function: Any
    args: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def lowered(self, mesh: Any, ins: Any = None, outs: Any = None) -> stages.Lowered:
        """Lowered for a mesh, with specs of its arguments and results; None leaves them open."""
        return self._step(mesh, ins, outs).lower(*self.args)

    def out_tree(self, mesh: Any) -> Any:
        """The structure of its results, which a trace tells."""
        return self._step(mesh).trace(*self.args).out_tree

    def _step(self, mesh: Any, ins: Any = None, outs: Any = None) -> Any:
        specs = {"in_axis_resources": ins, "out_axis_resources": outs}
        return spmd.pjit(self.function, mesh=mesh, **specs, **self.options)


def specs_of(
    graph: Graph,
    layout: Layout,
    sizes: Mapping[str, int],
    kind: str,
    fixed: Fixed | None = None,
) -> list[Any]:
    """Where the arguments or the outputs lie, in their order."""
    places = places_of(graph.tensors, layout, sizes, fixed)
    return [
        spec_of(found, len(one.shape))
        for one, found in zip(graph.tensors, places, strict=True)
        if one.kind == kind
    ]


def planned(
    program: Program, mesh: Any, graph: Graph, layout: Layout, fixed: Fixed | None = None
) -> stages.Lowered:
    """The program as a layout wants it, lowered with its pins."""
    sizes = dict(mesh.shape)
    specs = {kind: specs_of(graph, layout, sizes, kind, fixed) for kind in ("argument", "output")}
    ins = jax.tree.unflatten(jax.tree.structure(program.args), specs["argument"])
    outs = jax.tree.unflatten(program.out_tree(mesh), specs["output"])
    lowered = program.lowered(mesh, ins, outs)
    return pinned(lowered, pins_of(graph, layout, sizes, fixed))


def pinned(lowered: stages.Lowered, pins: Sequence[Pin]) -> stages.Lowered:
    """A lowered program with constraints; the one that is given stays as it is."""
    own = copy.copy(lowered)
    own._lowering = _jax.lowering.edited(lowered._lowering, functools.partial(pin, pins=pins))
    return own


def verified(lowered: stages.Lowered, chip: Any = None) -> Report:
    """What the compiled program does, in the time of a chip; by default of its own devices."""
    return spmd.report(lowered.compile(), chip=chip)
