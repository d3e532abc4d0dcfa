"""Products in groups (`jax.lax.ragged_dot`), which Shardy does not know and XLA splits.

XLA replaces ``chlo.ragged_dot`` by an operation of its own before it runs Shardy, with a rule that
Shardy's passes do not have here: it splits rows, columns and terms, sums what is split along its
terms, and needs all groups, and all of what is ragged, on each device. The passes are told the
rule; and where they make exchanges explicit, they are given a product that asks for the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
import math
from typing import Any, NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

from spmd.inspection.shardy import passes
from spmd.inspection.shardy.passes import Dimensions

KIND = "ragged_dot"
NAME = f"chlo.{KIND}"
_MARK = "spmd.ragged"


class Ragged(NamedTuple):
    """The dimensions of a product in groups, by the factors that they are split along.

    Attributes:
        left: of the first operand.
        right: of the second.
        counts: of the third, the size of each group.
        made: of the result.
        sizes: by factor.
        summed: the factors that are added up.
        whole: those of which each device needs all.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    counts: tuple[str, ...]
    made: tuple[str, ...]
    sizes: Mapping[str, int]
    summed: tuple[str, ...]
    whole: tuple[str, ...]

    @property
    def sides(self) -> tuple[tuple[str, ...], ...]:
        """Those of the operands and of the result."""
        return self.left, self.right, self.counts, self.made


def read(operation: Any) -> Ragged:
    """Reads a product in groups."""
    shapes = [passes.shape_of(one) for one in operation.operands]
    numbers = passes.numbers_of(operation, "ragged_dot_dimension_numbers")
    names, sizes = iter(passes.FACTORS), {}

    def new(size: int) -> str:
        name = next(names)
        sizes[name] = size
        return name

    left, right = ([""] * len(shape) for shape in shapes[:2])
    for kind in ("batching", "contracting"):
        sides = (numbers.get(f"{side}_{kind}_dimensions", ()) for side in ("lhs", "rhs"))
        for i, j in zip(*sides, strict=True):
            left[i] = right[j] = new(shapes[0][i])
    group = new(shapes[2][-1])
    for i in numbers.get("rhs_group_dimensions", ()):
        right[i] = group
    rows, columns = _fill(left, shapes[0], new), _fill(right, shapes[1], new)
    summed = [left[i] for i in numbers.get("lhs_contracting_dimensions", ())]
    batch = [left[i] for i in numbers.get("lhs_batching_dimensions", ())]
    ragged = {left[i] for i in numbers["lhs_ragged_dimensions"]}
    outer = [group] if ragged & {*summed} else []
    counts = [*map(new, shapes[2][:-1]), group]
    return Ragged(
        left=tuple(left),
        right=tuple(right),
        counts=tuple(counts),
        made=(*outer, *batch, *rows, *columns),
        sizes=sizes,
        summed=tuple(summed),
        whole=tuple(sorted({*ragged, *counts})),
    )


def _fill(held: list[str], shape: Sequence[int], new: Callable[[int], str]) -> list[str]:
    """Names the dimensions that have none, and gives their names."""
    found = []
    for i, size in enumerate(shape):
        if not held[i]:
            held[i] = new(size)
            found.append(held[i])
    return found


def rule(operation: Any) -> str:
    """The rule of a product in groups, as Shardy writes it."""
    own = read(operation)
    added = [name for name in own.summed if name not in own.whole]
    return passes.rule_text(
        (own.left, own.right, own.counts), (own.made,), sizes=own.sizes,
        kinds={"reduction": added, "need_replication": own.whole},
    )  # fmt: skip


def split(own: Ragged, shardings: Sequence[Dimensions]) -> dict[str, tuple[str, ...]]:
    """The axes that split each factor, where operands and result ask for several.

    As Shardy decides it: what most elements are split by comes first. Found by compiling: at a tie
    the second operand's dimensions do, then what is summed.
    """
    votes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for names, dimensions in zip(own.sides, shardings, strict=True):
        elements = math.prod(own.sizes[name] for name in names)
        for name, one in zip(names, dimensions, strict=True):
            if one.axes:
                votes[name, one.axes] += elements

    def rank(one: tuple[str, tuple[str, ...]]) -> tuple[int, bool, bool]:
        return -votes[one], one[0] in own.whole, one[0] in own.summed

    found: dict[str, tuple[str, ...]] = {}
    for name, axes in sorted(votes, key=rank):
        taken = {axis for used in found.values() for axis in used}
        if name not in found and taken.isdisjoint(axes):
            found[name] = axes
    return {name: axes for name, axes in found.items() if name not in own.whole}


def replace(module: Any, operations: Iterable[Any]) -> None:
    """Puts a product that asks for the same exchanges in the place of each one in groups."""
    meshes = passes.meshes(module)
    for one in [one for one in operations if one.name == NAME]:
        _replace(one, meshes)


def _replace(operation: Any, meshes: Mapping[str, Mapping[str, int]]) -> None:
    own = read(operation)
    values = (*operation.operands, operation.results[0])
    shardings = [passes.sharding_of(value) for value in values]
    axes = {axis for each in shardings for one in each for axis in one.axes}
    mesh = passes.mesh_with(axes, meshes)
    if mesh is None:
        return
    chosen = split(own, shardings)

    def entries(names: Iterable[str]) -> list[tuple[str, ...]]:
        return [chosen.get(name, ()) for name in names]

    def placed(value: Any, names: Iterable[str]) -> Any:
        """A value that is made here, and where it is."""
        text = passes.per_value(passes.sharding_text(entries(names), mesh))
        value.owner.attributes["sdy.sharding"] = ir.Attribute.parse(text)
        return value

    def moved(value: Any, held: Dimensions, wanted: list[tuple[str, ...]]) -> Any:
        """A value in another place."""
        if [one.axes for one in held] == wanted:
            return value
        text = passes.sharding_text(wanted, mesh)
        return sdy.ReshardOp(value, ir.Attribute.parse(text)).result

    with ir.InsertionPoint(operation), operation.location:
        left, right = (
            moved(value, held, entries(names))
            for value, held, names in zip(values[:2], shardings, own.sides, strict=False)
        )
        kind = ir.RankedTensorType(operation.results[0].type).element_type
        group = own.counts[-1]
        names = [name for name in own.right if name != group]
        if len(names) < len(own.right):
            right = placed(_first(right, own.right.index(group)), own.right)
            inner = ir.RankedTensorType(right.type).element_type
            shape = ir.RankedTensorType.get([own.sizes[name] for name in names], inner)
            right = placed(stablehlo.reshape(shape, right), names)
        made = [name for name in own.made if name != group]
        result = placed(_product(own, left, right, names, made, kind), made)
        if len(made) < len(own.made):
            shape = ir.RankedTensorType.get([own.sizes[name] for name in own.made], kind)
            at = [own.made.index(name) for name in made]
            result = placed(
                stablehlo.broadcast_in_dim(shape, result, ir.DenseI64ArrayAttr.get(at)), own.made
            )
        result = moved(
            result,
            tuple(passes.Dimension(axes) for axes in entries(own.made)),
            [one.axes for one in shardings[-1]],
        )
    operation.results[0].replace_all_uses_with(result)
    operation.erase()


def _first(value: Any, d: int) -> Any:
    """The first of the groups along a dimension."""
    shape = ir.RankedTensorType(value.type).shape
    ends = [1 if i == d else size for i, size in enumerate(shape)]
    starts, ends, steps = (
        ir.DenseI64ArrayAttr.get(one) for one in ([0] * len(shape), ends, [1] * len(shape))
    )
    return stablehlo.slice(value, starts, ends, steps)


def _product(
    own: Ragged, left: Any, right: Any, names: Sequence[str], made: Sequence[str], kind: Any
) -> Any:
    batch = [name for name in own.left if name in names and name in made]
    numbers = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=[own.left.index(name) for name in batch],
        rhs_batching_dimensions=[names.index(name) for name in batch],
        lhs_contracting_dimensions=[own.left.index(name) for name in own.summed],
        rhs_contracting_dimensions=[names.index(name) for name in own.summed],
    )
    shape = ir.RankedTensorType.get([own.sizes[name] for name in made], kind)
    result = stablehlo.dot_general(shape, left, right, numbers)
    result.owner.attributes[_MARK] = ir.UnitAttr.get()
    return result


def stands_in(operation: Any) -> bool:
    """Whether an operation is here for a product in groups."""
    return _MARK in operation.attributes
