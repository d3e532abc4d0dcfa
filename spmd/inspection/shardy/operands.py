"""Where products take their operands, and make their results.

Shardy's pass that makes exchanges explicit has a product done where its operands and its result are
split by most axes together. XLA goes by rules of its own, which do not always send less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import functools
import math
from typing import Any, TypeAlias

from jax.extend.mlir import ir

from spmd.inspection.shardy import passes

Axes: TypeAlias = tuple[tuple[str, ...], ...]
"""By dimension, the axes that split it."""

_ASKED = "spmd.asked"
"""An attribute of a product: where its result was to lie."""

_Names: TypeAlias = tuple[tuple[str, ...], ...]
"""Of two operands and a result, the names of their dimensions: those that are one have one."""


def place(product: Any, meshes: Mapping[str, Mapping[str, int]]) -> None:
    """Places the result of a product, or its operands, as XLA does.

    Args:
        product: of matrices, or a convolution; one of groups of channels stays as it is.
        meshes: sizes of the axes of each mesh, by its symbol.
    """
    found = product.attributes
    found[_ASKED] = found["sdy.sharding"] if "sdy.sharding" in found else ir.UnitAttr.get()
    if _is_grouped(product):
        return
    places = tuple(map(passes.axes_of, (*product.operands, product.results[0])))
    mesh = passes.mesh_with({axis for one in places for axes in one for axis in axes}, meshes)
    if mesh is None:
        return
    names = _names_of(product)
    summed = _summed_first(names, places)
    if summed is not None:
        passes.make_at(product, summed, mesh)
    elif product.name == "stablehlo.dot_general":
        sizes = {axis: size for axis, size in meshes[mesh].items() if size > 1}
        for n, taken in enumerate(_taken(product, names, places, sizes)):
            if taken != places[n]:
                value = product.operands[n]
                product.operands[n] = passes.placed_for(product, value, taken, mesh)


def is_made_in_parts(product: Any, axes: Iterable[str]) -> bool:
    """Whether a product's result was to be split over the axes, before `place` had it elsewhere.

    Where Shardy places values, it always may be.
    """
    if _ASKED not in product.attributes:
        return True
    return {*axes} <= {*passes.axes_in(passes.text_of(product, _ASKED))}


@functools.lru_cache(maxsize=1 << 12)
def _summed_first(names: _Names, places: tuple[Axes, ...]) -> Axes | None:
    """Where a product is summed, if its operands are split alike along what is summed over.

    That is where they lie; the result is placed otherwise after that. Shardy's pass would gather
    operands that are smaller than the result; XLA sums, however large it is.
    """
    *sides, made = names
    held: Mapping[str, tuple[str, ...]] = {}
    for own, place in zip(sides, places, strict=False):
        axes_of = dict(zip(own, place, strict=True))
        if any(held.get(name, axes) != axes for name, axes in axes_of.items()):
            return None
        held = {**held, **axes_of}
    summed = {axis for name, axes in held.items() if name not in made for axis in axes}
    wanted = places[-1]
    kept = tuple(tuple(axis for axis in axes if axis not in summed) for axes in wanted)
    is_as_held = kept == tuple(held.get(name, ()) for name in made)
    return kept if is_as_held and kept != wanted else None


def _taken(
    product: Any, names: _Names, places: tuple[Axes, ...], sizes: Mapping[str, int]
) -> list[Axes]:
    """Where a product takes its operands: where its result lies, on all dimensions of that.

    What one operand alone is split over, of what is summed over, is summed or gathered: whichever
    sends less. It is gathered, too, where devices along any axis would do the same, or where one
    splits neither operand before that does so after. In a `shard_map` it is summed.
    """
    taken = [_as_made(names, places, n) for n in range(2)]
    if passes.is_manual(product):
        return taken
    held = {
        axis
        for before, after in zip(places, taken, strict=False)
        for own, axes in zip(before, after, strict=True)
        for axis in {*own} & {*axes}
    }
    made = {
        axis
        for own, place in zip(names, taken, strict=False)
        for name, axes in zip(own, place, strict=True)
        if name in names[-1]
        for axis in axes
    }
    for n, place in enumerate(taken):
        whole = _without_sums(names, taken, n)
        parts = passes.count_of({*_axes_in(place)} - {*_axes_in(whole)}, sizes)
        if parts == 1:
            continue
        gather = (parts - 1) * _elements(product.operands[n], _axes_in(places[n]), sizes)
        total = 2 * (parts - 1) / parts * _elements(product.results[0], made, sizes)
        if gather < total or not {*sizes} <= held:
            taken[n] = whole
    return taken


@functools.lru_cache(maxsize=1 << 12)
def _as_made(names: _Names, places: tuple[Axes, ...], n: int) -> Axes:
    """An operand where the result lies, but for what is summed over, and axes that sum both.

    Shardy's pass would place the result otherwise, where that is smaller.
    """
    made = dict(zip(names[-1], places[-1], strict=True))
    other = dict(zip(names[1 - n], places[1 - n], strict=True))
    own = dict(zip(names[n], places[n], strict=True))
    summed = {
        axis for name, axes in own.items() if name not in made for axis in {*axes} & {*other[name]}
    }
    decided = {*_axes_in(places[-1])} - summed
    found = []
    for name, axes in own.items():
        first = tuple(axis for axis in made.get(name, ()) if axis in decided)
        is_more = axes[: len(first)] == first
        more = (a for a in axes if is_more and not any(passes.overlap(a, b) for b in decided))
        found.append((*first, *more))
    return tuple(found)


def _without_sums(names: _Names, places: Sequence[Axes], n: int) -> Axes:
    """An operand that is whole along what is summed over, where the other one is."""
    other = dict(zip(names[1 - n], places[1 - n], strict=True))
    return tuple(
        tuple(axis for axis in axes if name in names[-1] or axis in other[name])
        for name, axes in zip(names[n], places[n], strict=True)
    )


def _axes_in(place: Axes) -> list[str]:
    return [axis for axes in place for axis in axes]


def _elements(value: Any, axes: Iterable[str], sizes: Mapping[str, int]) -> float:
    """Those of a value that a device has."""
    return math.prod(passes.shape_of(value)) / passes.count_of(axes, sizes)


def _is_grouped(product: Any) -> bool:
    """Whether a convolution is one of groups of channels, or of batches."""
    counts = "feature_group_count", "batch_group_count"
    return any(int(product.attributes[one]) > 1 for one in counts if one in product.attributes)


def _names_of(product: Any) -> _Names:
    """Names of the dimensions of a product's operands and result."""
    if product.name == "stablehlo.convolution":
        left, right, made = passes.labels_of(product)
        # What goes over the window has a name of its own in each.
        return (
            tuple([{"f": "i"}.get(name, f"input {name}") for name in left]),
            tuple([{"i": "i"}.get(name, f"kernel {name}") for name in right]),
            tuple([{"b": "input b", "f": "kernel o"}.get(name, f"result {name}") for name in made]),
        )
    ranks = [len(passes.shape_of(one)) for one in product.operands]
    return _names_in(passes.text_of(product, "dot_dimension_numbers"), *ranks)


@functools.lru_cache(maxsize=1 << 10)
def _names_in(text: str, *ranks: int) -> _Names:
    """The same, of what a product of matrices says of the dimensions of its operands."""
    numbers = passes.numbers_in(text)
    sides = []
    for side, rank in zip(("lhs", "rhs"), ranks, strict=True):
        batch, terms = (
            numbers.get(f"{side}_{kind}_dimensions", ()) for kind in ("batching", "contracting")
        )
        names = [f"{side} {d}" for d in range(rank)]
        for kind, numbered in (("batch", batch), ("term", terms)):
            for n, d in enumerate(numbered):
                names[d] = f"{kind} {n}"
        sides.append(tuple(names))
    free = (name for names in sides for name in names if name[:3] in ("lhs", "rhs"))
    shared = (name for name in sides[0] if name.startswith("batch"))
    batch = sorted(shared, key=lambda name: int(name.split()[1]))
    return sides[0], sides[1], (*batch, *free)
