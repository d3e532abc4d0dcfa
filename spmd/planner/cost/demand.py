"""What operations ask of the links under a layout.

Each axis goes to one factor of an operation: the first in its order that the operation has. An
operand that the axis splits otherwise is gathered or exchanged, and a result whose factor was
summed over is added up. What compilers do beyond that is left to later `tiers`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
import functools
from typing import NamedTuple, TypeAlias

from spmd.inspection.shardy.places import stand_ins
from spmd.planner.program.layout import Layout
from spmd.planner.program.structure import Graph, Operation

# A table is looked up, or added to, where its rows are whole, or where parts of all of them are.
TABLES = ("gather", "scatter")
_TAKES_HELD = (*TABLES, "reduce")
"""Of these an axis may split what it splits of their operands and results, too."""

_PRODUCTS = ("dot_general", "convolution")

Places: TypeAlias = Sequence[Mapping[str, int]]
"""By operand and result, the dimension that each axis splits."""


class Exchanged(NamedTuple):
    """An exchange that an operation demands.

    Attributes:
        kind: of the collective.
        axes: that it goes over.
        nbytes: on its larger side.
        tensor: the operand that is sent, or the sum that is added up; None for another result.
        before: where parts change places, the axes that split it, as Shardy writes them.
        after: the axes that split it then.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    tensor: int | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class Demand:
    """An operation under a layout.

    Args:
        one: the operation.
        layout: what its axes split.
        sizes: of the mesh axes.
        places: of what it takes and makes.
        nbytes: on a device, of what it takes and makes.
        total: the value that its results are added to before they are used.
        one_sum: whether its sums over several axes are one, as `is_one_sum` has it.
    """

    def __init__(
        self,
        one: Operation,
        layout: Layout,
        sizes: Mapping[str, int],
        places: Places,
        nbytes: Sequence[float],
        total: int | None = None,
        *,
        one_sum: bool = False,
    ):
        self.one_sum = one_sum
        self.one, self.layout, self.sizes, self.total = one, layout, sizes, total
        self.places, self.nbytes = places, nbytes
        self.chosen = self._chosen()

    @functools.cached_property
    def wanted(self) -> list[dict[str, int]]:
        """By operand and result, the dimension that each axis splits while it runs."""
        return [
            {axis: names.index(name) for axis, name in self.chosen.items() if name in names}
            for names in self.one.factors
        ]

    def made(self, n: int, *, first: bool) -> dict[str, int]:
        """Where a result is, before devices take their parts of a sum that is made `first`.

        Of a dimension that a product splits already, compilers do not scatter a sum: they gather
        operands.
        """
        at, want = self.places[n], self.wanted[n]
        split = {d for a, d in at.items() if a in want}
        return {a: d for a, d in at.items() if a in want or not (first or d in split)}

    def asked(self, n: int, *, first: bool) -> frozenset[tuple[str, int]]:
        """Where XLA's propagation thinks that a product wants an operand: axes and dimensions.

        As its result lies, and along what is summed over as the other operands do.
        """
        factors = self.one.factors
        found = {a: factors[-1][d] for a, d in self.made(-1, first=first).items()}
        for m in range(self.one.operands):
            for a, d in self.places[m].items() if m != n else ():
                found.setdefault(a, factors[m][d])
        own = factors[n]
        return frozenset((a, own.index(name)) for a, name in found.items() if name in own)

    def _chosen(self) -> dict[str, str]:
        """The factor that each axis splits."""
        one = self.one
        if one.manual:
            return {axis: name for axis, name in one.manual if name is not None}
        found: dict[str, str] = {}
        left = dict(one.sizes)
        takes_held = one.name in _TAKES_HELD
        for axis, classes in self.layout.order(is_state=one.is_state):
            names = self._named(axis, classes, left)
            if takes_held:
                names += [
                    n for n in self._held(axis) if n not in names and self._fits(axis, n, left)
                ]
            if names:
                name = found[axis] = self._nearest(axis, names)
                left[name] //= self.sizes[axis]
        return found

    def _named(self, axis: str, classes: Sequence[int], left: Mapping[str, int]) -> list[str]:
        """The factors that an axis may split of the first class that has such."""
        by_class = self.one.by_class
        for c in classes:
            if c in by_class and (found := [n for n in by_class[c] if self._fits(axis, n, left)]):
                return found
        return []

    def _fits(self, axis: str, name: str, left: Mapping[str, int]) -> bool:
        return name not in self.one.whole and left.get(name, 1) % self.sizes[axis] == 0

    def _held(self, axis: str) -> Iterator[str]:
        """The factors that an axis splits of the operation's operands and results."""
        for names, places in zip(self.one.factors, self.places, strict=False):
            if name := _at(names, places.get(axis)):
                yield name

    def _nearest(self, axis: str, names: Sequence[str]) -> str:
        """Of several factors, that for which the fewest bytes are moved, or which words decide."""
        if len(names) == 1:
            return names[0]
        own = self._of_words(axis) if self.one.name in TABLES else None
        if own is not None and own in names:
            return own
        return min(names, key=lambda name: self._misplaced(axis, name))

    def _of_words(self, axis: str) -> str | None:
        """The factor along which an axis splits the words of each table, if it splits both.

        Tables are whole then: see `spmd.inspection.shardy.tables`.
        """
        n = 0 if self.one.name == "gather" else -1
        table, words = ((self.one.factors[i], self.places[i].get(axis)) for i in (n, 1))
        number, own = _at(*table), _at(*words)
        return own if number in words[0] and own is not None and own not in table[0] else None

    def _misplaced(self, axis: str, name: str) -> float:
        found = 0.0
        for names, places, nbytes in zip(self.one.factors, self.places, self.nbytes, strict=False):
            has = _at(names, places.get(axis))
            if has != (name if name in names else None):
                found += nbytes * (1 if has and name in names else self.sizes[axis])
        return found

    @functools.cached_property
    def sent(self) -> list[Exchanged]:
        """What has to be sent before the operation and after it."""
        return [*self._exchanges()]

    def _exchanges(self) -> Iterator[Exchanged]:
        for n, names in enumerate(self.one.factors):
            if self.one.manual and not any(names):
                continue  # what each device has for itself
            if n >= self.one.operands:
                yield from self._after(n, names)
            elif self.places[n]:
                yield from self._before(n, names)

    def _before(self, n: int, names: Sequence[str | None]) -> Iterator[Exchanged]:
        own = self.one.tensors[n]
        whole: list[str] = []
        for axis, d in self.places[n].items():
            wanted, has = self.chosen.get(axis), _at(names, d)
            if has is not None and has == wanted:
                continue
            if wanted is not None and wanted in names:
                yield Exchanged("all-to-all", (axis,), self.nbytes[n], own)
            else:
                whole.append(axis)
        if whole:
            nbytes = self.nbytes[n] * self.times(whole)
            yield Exchanged("all-gather", tuple(whole), nbytes, own)
        if whole and (inner := self._inside(n, whole)):
            axes = tuple(axis for axis in self.sizes if axis in (*whole, *inner))
            yield Exchanged("collective-permute", axes, self.nbytes[n], own)

    def _after(self, n: int, names: Sequence[str | None]) -> Iterator[Exchanged]:
        found: dict[str, list[str]] = {"reduce-scatter": [], "all-reduce": [], "all-gather": []}
        for axis, name in self.chosen.items():
            d = self.places[n].get(axis)
            if name not in names:
                found["all-reduce" if d is None else "reduce-scatter"].append(axis)
            elif d is None:
                found["all-gather"].append(axis)
            elif names[d] != name:
                yield Exchanged("all-to-all", (axis,), self.nbytes[n])
        if sums := self._at_once(n, found["reduce-scatter"], found["all-reduce"]):
            yield from sums
            del found["reduce-scatter"], found["all-reduce"]
        for kind, axes in found.items():
            if axes:
                more = self.times(axes) if kind == "reduce-scatter" else 1
                total = None if kind == "all-gather" else self.total
                if kind == "reduce-scatter" and (inner := self._inside(n, axes)):
                    kind, more = "all-reduce", more * self.times(inner)
                yield Exchanged(kind, tuple(axes), self.nbytes[n] * more, total)

    def _at_once(self, n: int, kept: Sequence[str], rest: Sequence[str]) -> list[Exchanged]:
        """The sum of a product over all its axes, where along other ones devices do the same.

        Those make each another part of what is kept, so that a sum of parts is enough, and then the
        parts change places. Too few of them have it summed whole, if no part is kept over some of
        the axes: see `spmd.inspection.shardy.targets.partitioned`.
        """
        if not kept or self.one.name not in _PRODUCTS:
            return []
        free = [
            axis
            for axis, size in self.sizes.items()
            if size > 1 and axis not in self.places[n] and axis not in self.chosen
        ]
        if not free and not (self.one_sum and rest):
            return []
        others, summed = stand_ins(kept, free, self.sizes), (*kept, *rest)
        if others is None:
            whole = self.nbytes[n] * self.times(kept)
            return [Exchanged("all-reduce", summed, whole, self.total)] if rest else []
        after = tuple(self.places[n])
        before = tuple(part for axis in after for part in others.get(axis, (axis,)))
        return [
            Exchanged("all-reduce", summed, self.nbytes[n]),
            Exchanged("collective-permute", after, self.nbytes[n], None, before, after),
        ]

    def _inside(self, n: int, moved: Sequence[str]) -> list[str]:
        """The axes that split a dimension within the parts that these axes make of it, and stay.

        The devices that then have neighbouring parts are not those of one group of these axes:
        before parts are put together they change places, and a sum is made whole.
        """
        found: list[str] = []
        for d in {self.places[n].get(axis) for axis in moved} - {None}:
            along = [axis for axis, place in self.places[n].items() if place == d]
            first = min(along.index(axis) for axis in moved if axis in along)
            found += [axis for axis in along[first:] if axis not in moved]
        return found

    def times(self, axes: Sequence[str]) -> int:
        """Devices along axes."""
        count = 1
        for axis in axes:
            count *= self.sizes[axis]
        return count


def _at(names: Sequence[str | None], d: int | None) -> str | None:
    return names[d] if d is not None and d < len(names) else None


# Sums

_LINEAR = ("convert", "reshape", "transpose")


def totals(graph: Graph) -> dict[int, int]:
    """By value that an operation sums up, that which it is a term of: only that is exchanged."""
    makers = {result: one for one in graph.operations for result, _ in one.results}
    return {
        term: result
        for result, found in _terms(graph, _users(graph)).items()
        if makers[result].name == "add"
        for term in found
    }


def turns(graph: Graph) -> dict[int, int]:
    """By value that is summed up in a loop which only adds it to a total, how many turns that has.

    The total is exchanged after the loop, where no device keeps a part of it.
    """
    users = _users(graph)
    terms = _terms(graph, users)
    found: dict[int, int] = {}
    for edge in graph.operations:
        if edge.name != "while":
            continue
        _, made, total = edge.tensors
        inside = [one for one in users[total] if edge.loops[-1] in one.loops]
        if len(inside) != 1 or inside[0].name != "add":
            continue
        (add,) = inside
        if made != add.tensors[-1] or users[made] != [edge]:
            continue
        added = {i for i in add.tensors[: add.operands] if i != total}
        if len(added) == 1 and len(users[one := added.pop()]) == 1:
            found |= dict.fromkeys(terms.get(one, ()), add.runs // edge.runs)
    return found


def _users(graph: Graph) -> dict[int, list[Operation]]:
    """By value, what takes it, as often as it does."""
    found: dict[int, list[Operation]] = defaultdict(list)
    for one in graph.operations:
        for i in one.tensors[: one.operands]:
            found[i].append(one)
    return found


def _terms(graph: Graph, users: Mapping[int, Sequence[Operation]]) -> dict[int, list[int]]:
    """By value that is a sum, or what several sums add up to, those that are used for it alone."""
    terms: dict[int, list[int]] = {}
    for one in graph.operations:
        result = one.tensors[-1]
        if one.flops or one.name in ("scatter", "reduce"):
            terms[result] = [result]
        elif one.name == "add" or one.name in _LINEAR:
            operands = one.tensors[: one.operands]
            sides = [terms.get(i, []) if len(users[i]) == 1 else [] for i in operands]
            if all(sides) and sides:
                terms[result] = [term for side in sides for term in side]
    return terms


def last(graph: Graph) -> dict[int, int]:
    """Values that no product depends on, with how many sums are made one after the other for them.

    Those of as many are sent together: gradients, and after them their norms.
    """
    found = _multiplied_by_none(graph)
    turns: dict[int, int] = {}
    for one in graph.operations:
        before = max((turns.get(i, 0) for i in one.tensors[: one.operands]), default=0)
        is_sum = one.flops or one.name in ("reduce", "scatter")
        turns.update((i, before + bool(is_sum)) for i, _ in one.results if i in found)
    return turns


def _multiplied_by_none(graph: Graph) -> set[int]:
    makers: dict[int, list[int]] = {}
    found = {*range(len(graph.tensors))}
    for n, one in enumerate(graph.operations):
        for result, _ in one.results:
            makers.setdefault(result, []).append(n)
    pending = [i for one in graph.operations if one.flops for i in one.tensors[: one.operands]]
    while pending:
        if (i := pending.pop()) in found:
            found.discard(i)
            for n in makers.get(i, ()):
                one = graph.operations[n]
                pending += one.tensors[: one.operands]
    return found
