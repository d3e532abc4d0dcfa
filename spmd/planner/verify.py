"""The program that is planned, and what the compiler makes of it with the pins of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import copy
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd import P, _jax, stages
from spmd._resolve import trimmed
from spmd._spec import UNSPECIFIED, ParsedPartitionSpec
from spmd.inspection.records.plan import Entries, Pin, Placed
from spmd.inspection.records.report import Report
from spmd.planner.layout import Fixed, Layout, places_of, spec_of
from spmd.planner.pins import pin, pins_of
from spmd.planner.structure import Graph


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What is planned: a function, its arguments, and what `pjit` is told of it.

    Attributes:
        function: that is called.
        args: its arguments, or structs of their shapes.
        options: of `pjit`, such as ``donate_argnums``.
        trace: gives the trace for a mesh, where that is not of such a function.
    """

    function: Any = None
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trace: Callable[[Any], stages.Traced] | None = None
    _traces: dict[Any, stages.Traced] = dataclasses.field(default_factory=dict, init=False)

    def traced(self, mesh: Any) -> stages.Traced:
        """Its trace for a mesh, whose specs are open."""
        if mesh not in self._traces:
            trace = self.trace or self._trace
            self._traces[mesh] = trace(mesh)
        return self._traces[mesh]

    def _trace(self, mesh: Any) -> stages.Traced:
        return spmd.pjit(self.function, mesh=mesh, **self.options).trace(*self.args)

    def lowered(
        self, mesh: Any, ins: Sequence[P] | None = None, outs: Sequence[P] | None = None
    ) -> stages.Lowered:
        """Lowered for a mesh, with specs of its arguments and results.

        Without them they are open, and arguments that the function does not use are kept.
        """
        traced = copy.copy(self.traced(mesh))
        call = traced._call
        if ins is None and outs is None:
            traced._call = dataclasses.replace(call, keep_unused=True)
        else:
            traced._call = dataclasses.replace(
                call,
                in_axis_resources=resources(ins, len(call.in_axis_resources)),
                out_axis_resources=resources(outs, len(call.out_axis_resources)),
            )
        traced._placed = (None,) * len(traced._placed)
        return traced.lower()


def resources(specs: Sequence[P] | None, count: int) -> tuple[Any, ...]:
    """Specs as a call holds them; constants, which come first, have none."""
    if specs is None:
        return (UNSPECIFIED,) * count
    # A key is an array of one dimension more inside of the program, which nothing splits.
    own = [ParsedPartitionSpec.from_user_input(trimmed(spec), "plan") for spec in specs]
    return (*(UNSPECIFIED,) * (count - len(own)), *own[len(own) - count :])


def spec_of_entries(entries: Entries) -> P:
    """A PartitionSpec, without what says nothing at its end."""
    parts = [axes[0] if len(axes) == 1 else axes or None for axes in entries]
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)


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
    lowered = program.lowered(mesh, specs["argument"], specs["output"])
    return pinned(lowered, pins_of(graph, layout, sizes, fixed))


def pinned(lowered: stages.Lowered, pins: Sequence[Pin]) -> stages.Lowered:
    """A lowered program with constraints; the one that is given stays as it is."""
    own = copy.copy(lowered)
    own._lowering = _jax.lowering.edited(lowered._lowering, functools.partial(pin, pins=pins))
    return own


def verified(lowered: stages.Lowered, chip: Any = None) -> Report:
    """What the compiled program does, in the time of a chip; by default of its own devices."""
    return spmd.report(lowered.compile(), chip=chip)


def structs(args: Any) -> Any:
    """Arguments as shapes, which are on no devices."""
    return jax.tree.map(_struct, args)


def _struct(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    return leaf


def open_leaves(stage: stages.Traced | Any) -> tuple[list[Placed], list[Placed]]:
    """Arguments and results of a trace, or of the binding of a call, that nothing places yet."""
    if isinstance(stage, stages.Traced):
        jaxpr, call, signature = stage._jaxpr, stage._call, stage._signature
        consts, outs = signature.consts, signature.out_names
    else:
        jaxpr, call, consts, outs = stage.jaxpr, stage.call, stage.consts, stage.out_names
    skip = len(consts)
    return (
        [*map(_open_leaf, call.arg_names[skip:], jaxpr.in_avals[skip:])],
        [*map(_open_leaf, outs, jaxpr.out_avals)],
    )


def _open_leaf(name: str, aval: Any) -> Placed:
    return Placed(name=name, dtype=_dtype(aval), shape=tuple(aval.shape), spec=())


_LETTERS = {"int": "s", "uint": "u", "float": "f", "bfloat": "bf", "complex": "c"}


def _dtype(aval: Any) -> str:
    """XLA's name of an element type; of keys, that of what they are made of."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return "u32"
    kind, size, rest = re.fullmatch(r"([a-z]+)(\d*)(.*)", aval.dtype.name).groups()
    return "pred" if kind == "bool" else _LETTERS[kind] + size + rest.replace("_", "")
