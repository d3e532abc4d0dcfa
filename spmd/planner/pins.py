"""A layout, written into a lowered module: constraints around what decides how it is split.

The module is a copy. JAX may share the one that it lowered with a function of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
import math
from typing import Any, NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from spmd.errors import ArgumentError, Failure
from spmd.inspection.records.plan import Entries, Pin
from spmd.inspection.shardy import passes, ragged
from spmd.planner.cost.demand import TABLES, Demand
from spmd.planner.program.graph import TRANSPOSE, numbered, turned
from spmd.planner.program.layout import Fixed, Layout, places_of, spec_entries
from spmd.planner.program.structure import Graph, Operation, pinned
from spmd.planner.program.sums import regroup

_BRANCHES = ("stablehlo.case", "stablehlo.if")


class Way(NamedTuple):
    """How the products of a layout are pinned; what is faster only a compiler knows.

    Attributes:
        ahead: whether what is known before its use, such as a weight, is put where a product wants
            it. Else a compiler that is to multiply by parts of an operand sends them around, and
            multiplies by one after the other.
        whole: whether all sums are made before each device takes its part of them, or none: the
            parts of these go around likewise. Else those that are thought to be faster so.
        turned: whether a product's result that is but transposed is pinned after that. So a
            compiler makes it in that order. An exchange in between would end in another one, and
            what it is added to, such as an optimizer's moments, would be copied to that.
        loose: whether results of products are left to propagation.
        free: whether nothing is pinned: places of arguments and results say all.
    """

    ahead: bool = True
    whole: bool | None = None
    turned: bool = True
    loose: bool = False
    free: bool = False


class Pinned:
    """The operations of a program that plans pin, and which of them all layouts pin alike.

    Args:
        graph: the program.
        fixed: places that arguments and outputs keep.
    """

    def __init__(self, graph: Graph, fixed: Fixed | None = None):
        self.graph, self.fixed = graph, fixed
        self._kept = fixed.to_dict() if fixed else {}
        self._alike: dict[Any, list[tuple[int, Operation]]] = {}
        for number, one in pinned(graph):
            self._alike.setdefault(self._kind(one), []).append((number, one))
        self._turned = {one.number: one.factors for one in graph.operations if _is_turned(one)}

    def _kind(self, one: Operation) -> Any:
        """All that the pins of an operation depend on, beside the layout."""
        tensors = self.graph.tensors
        found = ((tensors[i], self._kept.get(i), i in self.graph.early) for i in one.tensors)
        return (
            one.factors,
            bool(one.flops),
            one.operands,
            one.is_state,
            one.whole,
            one.name,
            *(
                (t.shape, t.classes, t.is_state, t.nbytes, is_early, _key(at))
                for t, at, is_early in found
            ),
        )

    def pins(
        self,
        layout: Layout,
        sizes: Mapping[str, int],
        way: Way,
        first: Container[int] = (),
    ) -> tuple[Pin, ...]:
        """What a layout says of each operation, by its number.

        Args:
            layout: what the mesh axes split.
            sizes: of these.
            way: how products are pinned.
            first: results of products whose sums are made first, where the way leaves that open.
        """
        if way.free:
            return ()
        own = {i for ((_, one), *_) in self._alike.values() for i in one.tensors}
        places = places_of(self.graph.tensors, layout, sizes, self.fixed, own)
        found: list[Pin] = []
        for alike in self._alike.values():
            known: dict[bool, tuple[Entries | None, ...]] = {}
            for number, one in alike:
                whole = one.tensors[-1] in first if way.whole is None else way.whole
                if whole not in known:
                    asked = way._replace(whole=whole)
                    known[whole] = self._specs(alike[0][1], layout, sizes, places, asked)
                specs = known[whole]
                name, (*others, last) = _name_in_module(one), specs
                turn = self._turned.get(number)
                if way.turned and turn and last:
                    found.append(Pin(number, name, (*others, None)))
                    found.append(Pin(number, TRANSPOSE, (None, _transposed(last, *turn))))
                else:
                    found.append(Pin(number, name, specs))
        return tuple(sorted(found, key=lambda one: one.number))

    def _specs(
        self,
        one: Operation,
        layout: Layout,
        sizes: Mapping[str, int],
        places: Mapping[int, Mapping[str, int]],
        way: Way,
    ) -> tuple[Entries | None, ...]:
        """Of its operands and results; None for what is left to propagation."""
        own = [places[i] for i in one.tensors]
        if one.flops:
            ahead = self.graph.early if way.ahead else ()
            demand = _demand(one, layout, sizes, own, self.graph)
            own = [
                (want if i in ahead or _is_mixed(want, at) else at)
                if n < one.operands
                else demand.made(n, first=bool(way.whole))
                for n, (i, want, at) in enumerate(zip(one.tensors, demand.wanted, own, strict=True))
            ]
        elif one.name in TABLES:
            own = _together(one, own, _demand(one, layout, sizes, own, self.graph).wanted)
        kept = one.operands if one.flops and way.loose else len(own)
        ranks = [len(self.graph.tensors[i].shape) for i in one.tensors[:kept]]
        specs = (tuple(spec_entries(at, n)) for at, n in zip(own, ranks, strict=False))
        return (*specs, *(None for _ in own[kept:]))


def _name_in_module(one: Operation) -> str:
    return ragged.NAME if one.name == ragged.KIND else f"stablehlo.{one.name}"


def _together(
    one: Operation, places: Sequence[Mapping[str, int]], wanted: Sequence[Mapping[str, int]]
) -> list[Mapping[str, int]]:
    """Places of a gather or a scatter, whose rows lie as the table does that they are of.

    A table is where it is wanted, if an axis splits the number of its rows that is to split another
    dimension: XLA looks up all rows in each part, and adds these up. It ends the process where a
    dimension of a table is split over some axes, and that of its rows over the same ones and more.
    """
    found = [*places]
    is_gather = one.name == "gather"
    count = 1 if is_gather else (one.operands - 1) // 2
    for n in range(count):
        tables, row = ([n], -1) if is_gather else ([n, one.operands + n], count + 1 + n)
        names, rows = one.factors[n], one.factors[row]
        if any(wanted[n].get(a, d) != d and names[d] not in rows for a, d in places[n].items()):
            found = [wanted[i] if i in tables else at for i, at in enumerate(found)]
        for d, name in enumerate(rows):
            own = [a for a, at in found[row].items() if at == d]
            asked = [a for a, at in found[n].items() if name and names[at] == name]
            if asked and own[: len(asked)] == asked:
                dropped = own[len(asked) :]
                found[row] = {a: at for a, at in found[row].items() if a not in dropped}
    return found


def _is_turned(one: Operation) -> bool:
    """Whether a product's result is for this transpose alone, whose number is the product's."""
    return one.name == "transpose" and one.number is not None


def _transposed(
    entries: Entries, before: Sequence[str | None], after: Sequence[str | None]
) -> Entries:
    """A spec with the dimensions in another order; those of size 1 have no factors."""
    by_factor = dict(zip(before, entries, strict=True))
    return tuple(by_factor[name] if name else () for name in after)


def _is_mixed(want: Mapping[str, int], at: Mapping[str, int]) -> bool:
    """Whether of the axes that split one dimension of an operand a product wants only some.

    Compilers that find such an operand may gather the other one, however large it is.
    """
    stay = {d for a, d in at.items() if want.get(a) == d}
    return any(d in stay for a, d in at.items() if want.get(a) != d)


def _demand(
    one: Operation,
    layout: Layout,
    sizes: Mapping[str, int],
    places: Sequence[Mapping[str, int]],
    graph: Graph,
) -> Demand:
    nbytes = [
        graph.tensors[i].nbytes / math.prod(sizes[axis] for axis in at)
        for i, at in zip(one.tensors, places, strict=True)
    ]
    return Demand(one, layout, sizes, places, nbytes)


def _key(at: Mapping[str, int] | None) -> tuple[tuple[str, int], ...] | None:
    """Where a value is fixed; whole on every device is not the same as nowhere."""
    return None if at is None else tuple(at.items())


class MisfitError(Exception):
    """Pins that are of another program; carries the failure."""


def pin(module: Any, pins: Sequence[Pin], mesh: str = "mesh") -> None:
    """Writes constraints into a module.

    Raises:
        MisfitError: the module has other operations than those that the pins are of, or other
            axes. A constraint of another rank would end the process in Shardy.
    """
    if not pins:
        return
    regroup(module.operation)
    operations = numbered(module.operation)
    held: dict[Any, Any] = {}
    axes = passes.meshes(module.operation).get(mesh, {})
    with module.context, ir.Location.unknown(module.context):
        for one in pins:
            _check_axes(one, axes)
            operation = _checked(one, operations[one.number : one.number + 1])
            for n, entries in enumerate(one.specs[: len(operation.operands)]):
                if entries:
                    operation.operands[n] = _constrained(
                        operation, n, passes.sharding_attribute(entries, mesh), held
                    )
            for result, entries in _results(operation, one):
                if _ends_branch(result):
                    continue
                asked = passes.sharding_attribute(entries, mesh)
                value = passes.placed_after(result, sdy.ShardingConstraintOp, asked)
                held[value, str(asked), operation.block] = value


def annotate(
    module: Any,
    sizes: Mapping[str, int],
    ins: Sequence[Entries],
    outs: Sequence[Entries],
    mesh: str = "mesh",
) -> None:
    """Writes the places of arguments and results into a module, as lowering them would.

    Constants that are arguments of the module come before those that have places.

    Args:
        module: of a program whose places are open. Without arguments it names no mesh.
        sizes: of the axes of the mesh.
        ins: of the last arguments, by dimension the axes that split it.
        outs: the same of the last results.
        mesh: what the module calls the mesh.
    """
    with module.context, ir.Location.unknown(module.context):
        if mesh not in passes.meshes(module.operation):
            axes = [sdy.MeshAxisAttr.get(axis, size) for axis, size in sizes.items()]
            with ir.InsertionPoint.at_block_begin(passes.block_of(module.operation)):
                sdy.MeshOp(mesh, sdy.MeshAttr.get(axes))
        main = passes.functions(module.operation)["main"]
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        for name, count, entries in (
            ("arg_attrs", len(kind.inputs), ins),
            ("res_attrs", len(kind.results), outs),
        ):
            given = passes.entries_of(main, name) or [None] * count
            main.attributes[name] = _with_places(given, entries, mesh)


def _with_places(given: Sequence[Any], entries: Sequence[Entries], mesh: str) -> Any:
    """Attributes of all arguments or results, of which the last ones get places."""
    found = [{one.name: one.attr for one in attr or ()} for attr in given]
    for attr, spec in zip(found[len(found) - len(entries) :], entries, strict=True):
        attr["sdy.sharding"] = passes.sharding_attribute(spec, mesh)
    return ir.ArrayAttr.get([ir.DictAttr.get(attr) for attr in found])


def _constrained(operation: Any, n: int, sharding: Any, held: dict[Any, Any]) -> Any:
    """An operand with a constraint: what was constrained so before in its block has one already.

    The compiler would keep two of them apart, and send what they ask for twice.
    """
    value = operation.operands[n]
    key = value, str(sharding), operation.block
    if key not in held:
        with ir.InsertionPoint(operation):
            held[key] = sdy.ShardingConstraintOp(value, sharding).result
    return held[key]


def _ends_branch(result: Any) -> bool:
    """Whether a branch returns a value: XLA wants one sharding there for all branches."""
    users = (passes.user_of(use)[0] for use in result.uses)
    return any(
        user.name == "stablehlo.return" and user.parent.operation.name in _BRANCHES
        for user in users
    )


def _results(operation: Any, one: Pin) -> Iterator[tuple[Any, Entries]]:
    found = zip(operation.results, one.specs[len(operation.operands) :], strict=True)
    return ((result, entries) for result, entries in found if entries)


def _checked(one: Pin, found: Sequence[Any]) -> Any:
    """The operation of a pin, which is the one of its number, or what that is transposed to."""
    if one.name == TRANSPOSE:
        found = [after for each in found if each.results and (after := turned(each))]
    values = (value for each in found for side in (each.operands, each.results) for value in side)
    ranks = [len(passes.shape_of(value)) for value in values]
    names = [each.name for each in found]
    if names != [one.name] or not _has_ranks(one, ranks):
        raise MisfitError(
            Failure(
                what="is of another program",
                given=f"constraints around operation {one.number}, {one.name}",
                got=names[0] if names else "no such operation",
                error=ArgumentError,
            )
        )
    return found[0]


def _check_axes(one: Pin, axes: Container[str]) -> None:
    """Checks that the axes of a pin are those of a mesh, each once in a spec."""
    for spec in filter(None, one.specs):
        named = [axis for entry in spec for axis in entry]
        if wrong := [a for a in named if a not in axes or named.count(a) > 1]:
            raise MisfitError(
                Failure(
                    what="is of another mesh, or was edited",
                    given=f"constraints around operation {one.number}, {one.name}",
                    expected="axes of the mesh, each once in a spec",
                    got=", ".join(map(repr, dict.fromkeys(wrong))),
                    error=ArgumentError,
                )
            )


def _has_ranks(one: Pin, ranks: Sequence[int]) -> bool:
    if len(one.specs) != len(ranks):
        return False
    pairs = zip(one.specs, ranks, strict=True)
    return all(spec is None or len(spec) == rank for spec, rank in pairs)
