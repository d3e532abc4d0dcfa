"""The program that is planned, and what the compiler makes of it with the pins of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import copy
import dataclasses
import functools
import logging
import re
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import P, _jax, stages
from spmd._mesh import show_axes
from spmd._resolve import trimmed
from spmd._spec import UNSPECIFIED, ParsedPartitionSpec, spec_of
from spmd.inspection.records.plan import Entries, Pin, Placed
from spmd.inspection.shardy.passes import module_of, quoted
from spmd.planner.pins import annotate, pin
from spmd.planner.program.graph import graph_of, with_ranks
from spmd.planner.program.layout import Fixed, Layout, places_of, spec_entries
from spmd.planner.program.structure import Graph

logger = logging.getLogger(__name__)

_LONGEST = 300
"""Characters of what a function raises for a mesh."""
_MESH = re.compile(r"^ *sdy\.mesh .*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What is planned: a function, its arguments, and what `pjit` is told of it.

    Attributes:
        function: that is called.
        args: its arguments, or structs of their shapes.
        kwargs: likewise, by name.
        options: of `pjit`, such as ``donate_argnums``.
        trace: gives the trace for a mesh, where that is not of such a function.
        called: what the function is called in code that a person pastes.
        passed_over: what the function raised, by the meshes that it was found not to be for.
        fixed: places of arguments, by leaf, which they have even where the function does not use
            them.
    """

    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trace: Callable[[Any], stages.Traced] | None = None
    called: str = ""
    passed_over: dict[str, str] = dataclasses.field(default_factory=dict, init=False)
    fixed: dict[int, Entries] = dataclasses.field(default_factory=dict, init=False)
    _known: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)
    _graphs: dict[str, Graph] = dataclasses.field(default_factory=dict, init=False)

    def fresh(self) -> Program:
        """The same, to be traced anew."""
        return dataclasses.replace(self)

    def traced(self, mesh: Any) -> stages.Traced:
        """Its trace for a mesh, whose specs are open."""
        return self._once("trace", self.trace or self._trace, mesh)

    def is_for(self, mesh: Any) -> bool:
        """Whether the function can be traced for a mesh: a `shard_map` in it may not divide."""
        try:
            self.traced(mesh)
        except Exception as error:  # whatever the user's code does
            name = show_axes(mesh.shape)
            logger.info("plan: not for %s", name, exc_info=error)
            line = str(error).strip().partition("\n")[0][:_LONGEST]
            self.passed_over[name] = f"{type(error).__name__}: {line}".rstrip(": ")
            return False
        return True

    def graph(self, mesh: Any) -> Graph:
        """The classes of its dimensions, and what ties them."""
        return self._once("graph", self._graph, mesh)

    def named_axes(self, meshes: Sequence[Any]) -> frozenset[str]:
        """The mesh axes that the function itself names, in a `shard_map` for instance.

        That is asked of one of the meshes whose axes are all above 1, if the function is for one:
        JAX may leave out the others.
        """
        wide = (mesh for mesh in meshes if min(mesh.shape.values(), default=0) > 1)
        mesh = next(filter(self.is_for, wide), meshes[0])
        text = _MESH.sub("", self.lowered(mesh).as_text())
        return frozenset(axis for axis in mesh.shape if quoted(axis) in text)

    def kept(self, mesh: Any) -> tuple[int, ...]:
        """Which leaves of the arguments the program has: those that it uses."""
        return self._once("kept", self._kept, mesh)

    def _once(self, what: str, make: Callable[[Any], Any], mesh: Any) -> Any:
        if (what, mesh) not in self._known:
            self._known[what, mesh] = make(mesh)
        return self._known[what, mesh]

    def _graph(self, mesh: Any) -> Graph:
        """Programs for several meshes that differ in nothing but the mesh have one graph."""
        lowered = self.lowered(mesh)
        text = _MESH.sub("", lowered.as_text())
        if text not in self._graphs:
            graph = graph_of(module_of(lowered, subject="plan"), subject="plan")
            self._graphs[text] = with_ranks(graph, *self._ranks_inside(mesh))
        return self._graphs[text]

    def _ranks_inside(self, mesh: Any) -> tuple[list[int], list[int]]:
        """Ranks of the arguments of the module, and of its results, as the function has them."""
        jaxpr = self.traced(mesh)._jaxpr
        kept = _jax.lowering.kept_arguments(self.lowered(mesh)._lowering)
        return [jaxpr.in_avals[i].ndim for i in kept], [one.ndim for one in jaxpr.out_avals]

    def _kept(self, mesh: Any) -> tuple[int, ...]:
        skip = len(self.traced(mesh)._signature.consts)
        found = _jax.lowering.kept_arguments(self.lowered(mesh)._lowering)
        return tuple(i - skip for i in found if i >= skip)

    def _ranks(self, mesh: Any) -> tuple[int, ...]:
        leaves, _ = open_leaves(self.traced(mesh))
        return tuple(len(one.shape) for one in leaves)

    def _trace(self, mesh: Any) -> stages.Traced:
        own = spmd.pjit(self.function, mesh=mesh, **self.options)
        return own.trace(*self.args, **self.kwargs)

    def lowered(
        self, mesh: Any, ins: Sequence[P] | None = None, outs: Sequence[P] | None = None
    ) -> stages.Lowered:
        """Lowered for a mesh, with specs of its arguments and results; without, they are open."""
        if ins is None and outs is None:
            return self._once("open", self._lower, mesh)
        return self._lower(mesh, ins, outs)

    def _lower(
        self, mesh: Any, ins: Sequence[P] | None = None, outs: Sequence[P] | None = None
    ) -> stages.Lowered:
        traced = copy.copy(self.traced(mesh))
        call = traced._call
        traced._call = dataclasses.replace(
            call,
            in_axis_resources=resources(ins, len(call.in_axis_resources)),
            out_axis_resources=resources(outs, len(call.out_axis_resources)),
        )
        traced._placed = (None,) * len(traced._placed)
        with warnings.catch_warnings():
            # Layouts that nobody asked for may find no use for what is donated.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return traced.lower()

    def whole(self, mesh: Any, ins: Sequence[Entries]) -> tuple[Entries, ...]:
        """Places of all leaves, from those of the arguments that a module has.

        Constants may come before them there. What the function does not use is not split, if it is
        not fixed.
        """
        found: list[Entries] = [((),) * rank for rank in self._once("ranks", self._ranks, mesh)]
        kept = self.kept(mesh)
        placed = zip(kept, ins[len(ins) - len(kept) :], strict=True)
        for i, entries in (*self.fixed.items(), *placed):
            found[i] = entries
        return tuple(found)


def resources(specs: Sequence[P] | None, count: int) -> tuple[Any, ...]:
    """Specs as a call holds them; constants, which come first, have none."""
    if specs is None:
        return (UNSPECIFIED,) * count
    # A key has one dimension more inside of the program, of which its entry says nothing.
    own = [ParsedPartitionSpec.from_user_input(trimmed(spec), "plan") for spec in specs]
    return (*(UNSPECIFIED,) * (count - len(own)), *own[len(own) - count :])


def spec_of_entries(entries: Entries) -> P:
    """A PartitionSpec, without what says nothing at its end."""
    return trimmed(ParsedPartitionSpec(None, entries).to_partition_spec())


def entries_of(
    graph: Graph, layout: Layout, sizes: Mapping[str, int], fixed: Fixed | None = None
) -> tuple[tuple[Entries, ...], tuple[Entries, ...]]:
    """Where all arguments and all outputs lie."""
    tensors = graph.tensors
    ends = [i for i, one in enumerate(tensors) if one.kind != "result"]
    entries: dict[str, list[Entries]] = {"argument": [], "output": []}
    known: dict[Any, Entries] = {}  # most of them have one of few places
    for i, found in places_of(tensors, layout, sizes, fixed, ends).items():
        key = *found.items(), len(tensors[i].shape)
        if key not in known:
            known[key] = tuple(spec_entries(found, len(tensors[i].shape)))
        entries[tensors[i].kind].append(known[key])
    return tuple(entries["argument"]), tuple(entries["output"])


def planned(
    program: Program,
    mesh: Any,
    ins: Sequence[Entries],
    outs: Sequence[Entries],
    pins: Sequence[Pin],
) -> stages.Lowered:
    """The program with places and pins, lowered to be compiled."""
    specs = ([spec_of_entries(one) for one in side] for side in (ins, outs))
    return pinned(program.lowered(mesh, *specs), pins)


def annotated(
    lowered: stages.Lowered, ins: Sequence[Entries], outs: Sequence[Entries], pins: Sequence[Pin]
) -> stages.Lowered:
    """An open lowering with places and pins, to be previewed: it knows nothing of the places.

    `ins` has those of the arguments that the lowering has.
    """

    def edit(module: Any) -> None:
        annotate(module, lowered.mesh.shape, ins, outs)
        pin(module, pins)

    own = copy.copy(lowered)
    own._lowering = _jax.lowering.edited(lowered._lowering, edit)
    return own


def pinned(lowered: stages.Lowered, pins: Sequence[Pin]) -> stages.Lowered:
    """A lowered program with constraints; the one that is given stays as it is."""
    own = copy.copy(lowered)
    own._lowering = _jax.lowering.edited(lowered._lowering, functools.partial(pin, pins=pins))
    return own


def places_of_compiled(
    compiled: stages.Compiled,
) -> tuple[tuple[Entries, ...], tuple[Entries, ...]]:
    """Where the arguments and the results of a compiled program lie, whoever chose it."""
    skip = len(compiled._signature.consts)
    ins = zip(compiled._jaxpr.in_avals[skip:], compiled._shardings[skip:], strict=True)
    outs = jax.tree.leaves(compiled.out_info)
    return (
        tuple(_entries_of_sharding(sharding, aval.ndim) for aval, sharding in ins),
        tuple(_entries_of_sharding(one.sharding, one.ndim) for one in outs),
    )


def _entries_of_sharding(sharding: Any, rank: int) -> Entries:
    """What a sharding says of each dimension; nothing where it is none of a mesh."""
    found = spec_of(sharding)
    return entries_of_parts(found.partitions if found else (), rank)


def entries_of_parts(parts: Sequence[Any], rank: int) -> Entries:
    """The axes of each dimension, of a spec that may say nothing of some."""
    return (*(e if isinstance(e, tuple) else () for e in parts), *((),) * (rank - len(parts)))


def structs(args: Any) -> Any:
    """Arguments as shapes, which are on no devices."""
    return jax.tree.map(_struct, args)


def _struct(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        try:
            leaf = _jax.core.abstractify(leaf)  # of a type that JAX has
        except (TypeError, ValueError):
            return leaf  # which `pjit` says
    # A number of NumPy may be a static argument, or a part of one.
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, np.generic):
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    return leaf


def open_leaves(traced: stages.Traced) -> tuple[list[Placed], list[Placed]]:
    """Arguments and results of a trace, that nothing places yet."""
    names = traced._call.arg_names[len(traced._signature.consts) :]
    avals = open_avals(traced)
    ins = [*map(_open_leaf, names, avals)]
    return ins, [*map(_open_leaf, traced._signature.out_names, avals[len(ins) :])]


def open_avals(traced: stages.Traced) -> list[Any]:
    """Types of the arguments and results of a trace."""
    skip = len(traced._signature.consts)
    return [*traced._jaxpr.in_avals[skip:], *traced._jaxpr.out_avals]


def _open_leaf(name: str, aval: Any) -> Placed:
    return Placed(name=name, dtype=_dtype(aval), shape=tuple(aval.shape), spec=())


_LETTERS = {"int": "s", "uint": "u", "float": "f", "bfloat": "bf", "complex": "c"}


def _dtype(aval: Any) -> str:
    """XLA's name of an element type; of a key, ``key`` and its bits."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype))
        return f"key{32 * words.size}"
    if aval.dtype == jax.dtypes.float0:  # lowered as what is false
        return "pred"
    kind, size, rest = re.findall(r"([a-z]+)(\d*)(.*)", aval.dtype.name)[0]
    return "pred" if kind == "bool" else _LETTERS[kind] + size + rest.replace("_", "")
