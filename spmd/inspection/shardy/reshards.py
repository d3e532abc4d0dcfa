"""How XLA's partitioner places a value otherwise: in which steps, where one does not do.

Shardy asks for the cheapest exchanges between two placements. XLA has a few ways, and takes the
first that fits the number of parts of each dimension: it slices, gathers, or sends parts of one
dimension to another, and where that is not enough it slices or gathers one dimension before. Where
nothing fits, it makes the value whole on each device and slices that. Found by compiling 1,510
changes of two and three dimensions on ``4x2`` and ``2x2x2``; both ends of JAX do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import functools
import math
from typing import Any, NamedTuple, TypeAlias

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from spmd.inspection.hlo.groups import part_of
from spmd.inspection.shardy import operands, passes, ragged, tables
from spmd.inspection.shardy.operands import Axes

_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("abs", "add", "and", "atan2", "bitcast_convert", "cbrt", "ceil", "clamp", "compare"),
        *("complex", "convert", "cosine", "count_leading_zeros", "divide", "exponential"),
        *("exponential_minus_one", "floor", "imag", "is_finite", "log", "log_plus_one"),
        *("logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power"),
        *("real", "reduce_precision", "remainder", "round_nearest_afz", "round_nearest_even"),
        *("rsqrt", "select", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
        *("sign", "sine", "sqrt", "subtract", "tan", "tanh", "xor"),
    )
)


class Atom(NamedTuple):
    """A part of a mesh axis that has no smaller ones.

    Attributes:
        axis: that it is of.
        before: devices along the parts of it that are more major.
        size: devices along it; a prime number.
    """

    axis: str
    before: int
    size: int


Atoms: TypeAlias = tuple[Atom, ...]
Placement: TypeAlias = tuple[Atoms, ...]
"""By dimension, what splits it, the major one first."""


def replace(module: Any, operations: Iterable[Any]) -> None:
    """Puts the steps of XLA in the place of each change that it does not make in one."""
    meshes = passes.meshes(module)
    for one in [one for one in operations if one.name == "sdy.reshard"]:
        mesh = passes.mesh_in(passes.text_of(one, "sharding"))
        if mesh in meshes and not _is_for_table(one):
            manual = _manual_axes(one)
            sizes = ((axis, size) for axis, size in meshes[mesh].items() if axis not in manual)
            _give_all(one.operands[0], mesh, meshes)
            _replace(one, mesh, tuple(sizes))


def _give_all(value: Any, mesh: str, meshes: Mapping[str, Mapping[str, int]]) -> None:
    """Has every device what one has alone, such as what the host gives: it has a mesh of its own.

    Shardy changes no mesh, and before JAX 0.11 it refuses to.
    """
    maker = passes.maker_of(value)
    if maker is None or "sdy.sharding" not in maker.attributes:
        return
    own = passes.mesh_in(passes.text_of(maker, "sdy.sharding"))
    if own not in meshes or meshes[own]:  # that of one device has no axes
        return
    ranks = [len(passes.shape_of(result)) for result in maker.results]
    whole = [passes.sharding_text(((),) * rank, mesh) for rank in ranks]
    maker.attributes["sdy.sharding"] = ir.Attribute.parse(passes.per_value(*whole))


def _manual_axes(operation: Any) -> set[str]:
    """Those of the `shard_map`s around an operation: no value inside is split over them."""
    around = (one for one in passes.holders_of(operation) if one.name == passes.MANUAL)
    return {axis for one in around for axis in passes.axes_in(passes.text_of(one, "manual_axes"))}


def agree(module: Any, operations: Iterable[Any]) -> None:
    """Places the operands of operations on each element as their results are, as XLA does.

    Operands that are all in one place stay there, and the result is placed otherwise. Shardy's pass
    would have all done where operands and results are split by most axes together. Products and
    lookups in many tables have ways of their own: see `operands` and `tables`.
    """
    meshes = passes.meshes(module)
    known: dict[Any, Axes] = {}
    for one in operations:
        name = one.name
        if name in _ELEMENTWISE or _is_on_elements(name):
            _agree(one, meshes, known)
        elif name in passes.PRODUCTS and not ragged.stands_in(one):
            with one.location:
                operands.place(one, meshes)
        elif name in tables.NAMES:
            with one.location:
                tables.place(one, meshes)


def _is_on_elements(name: str) -> bool:
    """Whether an operation of CHLO works on each element by itself, as nearly all of them do."""
    return name.startswith("chlo.") and name not in (ragged.NAME, passes.TOP_K)


def _agree(operation: Any, meshes: Mapping[str, Mapping[str, int]], known: dict[Any, Axes]) -> None:
    """The same of one operation; `known` has where values before it are, and then its own."""
    result = operation.results[0]
    wanted = known[result] = passes.made_at(operation)
    given = [*operation.operands]
    for operand in given:
        if operand not in known:
            known[operand] = passes.axes_of(operand)
    if all(known[operand] == wanted for operand in given):
        return
    held = {n: known[one] for n, one in enumerate(given) if _is_of_shape(one, result)}
    places = {*held.values()}
    if places <= {wanted}:
        return
    used = {axis for one in (wanted, *places) for axes in one for axis in axes}
    mesh = passes.mesh_with(used, meshes)
    if mesh is None:
        return
    with operation.location:
        if len(places) == 1 < len(held):
            (own,) = places
            known[result] = own
            passes.make_at(operation, own, mesh)
            return
        for n, axes in held.items():
            if axes != wanted:
                operation.operands[n] = passes.placed_for(operation, given[n], wanted, mesh)


def _is_of_shape(value: Any, result: Any) -> bool:
    if value.type == result.type:
        return True
    return passes.shape_of(value) == passes.shape_of(result)


def _is_for_table(operation: Any) -> bool:
    """Whether rows are taken from it, or added: XLA places these in ways of its own."""
    users = (passes.operation_of(use.owner).name for use in operation.results[0].uses)
    return any(name in ("stablehlo.gather", "stablehlo.scatter") for name in users)


def _replace(operation: Any, mesh: str, sizes: tuple[tuple[str, int], ...]) -> None:
    value, result = operation.operands[0], operation.results[0]
    before, after = passes.axes_of(value), passes.axes_of(result)
    used = {passes.whole_of(axis) for axes in (*before, *after) for axis in axes}
    if not used <= {axis for axis, _ in sizes}:
        return  # Shardy may split values of a `shard_map` over its axes, which XLA never does
    for axes in between(before, after, sizes):
        text = passes.sharding_text(axes, mesh)
        with ir.InsertionPoint(operation), operation.location:
            value = sdy.ReshardOp(value, ir.Attribute.parse(text)).result
    operation.operands[0] = value


@functools.lru_cache(maxsize=1 << 12)
def between(before: Axes, after: Axes, sizes: tuple[tuple[str, int], ...]) -> tuple[Axes, ...]:
    """The placements that XLA goes through from one to another.

    Args:
        before: by dimension, the axes that split it.
        after: the same of the other one.
        sizes: of the axes of the mesh, in its order.

    Returns:
        As these two, those between them: none where one step does.
    """
    whole = dict(sizes)
    atoms = tuple(atom for axis in whole for atom in _atoms(axis, whole))
    source, target = (
        tuple(tuple(atom for axis in axes for atom in _atoms(axis, whole)) for axes in one)
        for one in (before, after)
    )
    free = tuple(atom for atom in atoms if not any(atom in one for one in source))
    found = [one for one in _steps(source, free, target) if one != target]
    return tuple(tuple(_axes(atoms, whole) for atoms in one) for one in found)


def _steps(source: Placement, free: Atoms, target: Placement) -> Iterator[Placement]:
    """What lies between two placements; `free` is what splits nothing of the first one."""
    before, after = (tuple(map(_count, one)) for one in (source, target))
    pairs = [*enumerate(zip(before, after, strict=True))]
    grown, shrunk = [d for d, (a, b) in pairs if a < b], [d for d, (a, b) in pairs if a > b]
    if not grown or not shrunk:  # slices or gathers, and devices that change places
        return
    left = _count(free)
    asked = left * math.prod(before) // math.prod(after)
    new = [d for d in grown if before[d] == 1 and after[d] % left == 0]
    like = [d for d in sorted((*shrunk, *grown)) if before[d] * left == asked]
    if left == asked and (moved := _moved(source, target)):
        yield from moved
    elif asked == 1 < left and not source[0] and (*source[1:], free) == target:
        yield (*source[1:], ())
    elif asked == 1 < left and new and (moved := _sliced(source, new[0], free, target)):
        yield from moved
    elif asked > left and like:
        # As many devices as are to have the same: a dimension with so many parts is whole first.
        yield (gathered := _with(source, like[0], ()))
        yield from _steps(gathered, (*source[like[0]], *free), target)
    else:
        yield from _gathered(source, free, target, is_part=left == asked and len(shrunk) == 1)


def _sliced(source: Placement, d: int, free: Atoms, target: Placement) -> list[Placement]:
    """A dimension that nothing splits in slices of the devices that have the same, then moves."""
    sliced = _with(source, d, free)
    moved = _moved(sliced, target)
    return [sliced, *moved] if moved else []


def _moved(source: Placement, target: Placement) -> list[Placement]:
    """The placements while dimensions give parts of theirs to others; none where that cannot be.

    Each gives its minor parts where another one asks for as many times more; or else all of them,
    where there are the numbers of parts of before, in another order. Where XLA takes an axis, or
    several, apart in another order than they are in, Shardy's way is kept.
    """
    before, after = (tuple(map(_count, one)) for one in (source, target))
    sizes = [*enumerate(zip(before, after, strict=True))]
    pairs = _alike(
        {d: a / b for d, (a, b) in sizes if a > b}, {d: b / a for d, (a, b) in sizes if b > a}
    )
    is_all = pairs is None
    if pairs is None:
        changed = [(d, a, b) for d, (a, b) in sizes if a != b]
        pairs = _alike(
            {d: a for d, a, _ in changed if a > 1}, {d: b for d, _, b in changed if b > 1}
        )
    found: list[Placement] = []
    while pairs:
        at = next((i for i, (_, d) in enumerate(pairs) if not is_all or not source[d]), None)
        if at is None:
            return []
        one, d = pairs.pop(at)
        minor = source[one] if is_all else _minor(source[one], before[one] // after[one])
        if minor is None:
            return [target]
        kept = source[one][: len(source[one]) - len(minor)]
        source = _with(_with(source, one, kept), d, (*source[d], *minor))
        found.append(source)
    return found


def _alike(given: Mapping[int, float], asked: Mapping[int, float]) -> list[tuple[int, int]] | None:
    """Dimensions that give as much as others ask for; None where some are left."""
    waiting, found = dict(asked), []
    for d, times in given.items():
        other = next((o for o, n in waiting.items() if n == times), None)
        if other is None:
            return None
        del waiting[other]
        found.append((d, other))
    return None if waiting else found


def _gathered(
    source: Placement, free: Atoms, target: Placement, *, is_part: bool
) -> Iterator[Placement]:
    """Dimensions whole that are to have another number of parts, and then in parts again.

    Those are in the order of what was gathered: devices may have to change places afterwards.
    Where `is_part`, what is gathered keeps as many parts as it is to have.
    """
    counts = [*map(_count, target)]
    changed = [d for d, one in enumerate(source) if _count(one) != counts[d]]
    gathered = source
    for d in changed:
        kept = _major(source[d], counts[d]) or () if is_part else ()
        gathered = _with(gathered, d, kept)
        free = (*source[d][len(kept) :], *free)
    yield gathered
    if all(b[: len(a)] == a for a, b in zip(gathered, target, strict=True)):
        return
    for d in [d for d in changed if _count(gathered[d]) != counts[d]]:
        major = _major(free, counts[d])
        if major is None:
            return
        gathered, free = _with(gathered, d, major), free[len(major) :]
    yield gathered


def _with(placement: Placement, d: int, atoms: Atoms) -> Placement:
    return (*placement[:d], atoms, *placement[d + 1 :])


def _count(atoms: Sequence[Atom]) -> int:
    return math.prod(one.size for one in atoms)


def _minor(atoms: Atoms, count: int) -> Atoms | None:
    """The last of some atoms that make so many parts; None where none do."""
    tails = (atoms[i:] for i in range(len(atoms) + 1))
    return next((one for one in tails if _count(one) == count), None)


def _major(atoms: Atoms, count: int) -> Atoms | None:
    """The first of some atoms that make so many parts; None where none do."""
    heads = (atoms[:i] for i in range(len(atoms) + 1))
    return next((one for one in heads if _count(one) == count), None)


def _atoms(axis: str, sizes: Mapping[str, int]) -> Iterator[Atom]:
    """The smallest parts of an axis, or of a part of one, the major one first."""
    own, before, size = part_of(axis, sizes)
    while size > 1:
        prime = next(n for n in range(2, size + 1) if size % n == 0)
        yield Atom(own, before, prime)
        before, size = before * prime, size // prime


def _axes(atoms: Sequence[Atom], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes, or parts of some, that atoms are."""
    found: list[Atom] = []
    for one in atoms:
        if found and found[-1].axis == one.axis and _end(found[-1]) == one.before:
            last = found.pop()
            one = last._replace(size=last.size * one.size)
        found.append(one)
    return tuple(
        one.axis if one.size == sizes[one.axis] else f"{one.axis}:({one.before}){one.size}"
        for one in found
    )


def _end(one: Atom) -> int:
    return one.before * one.size
