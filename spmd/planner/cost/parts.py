"""The operations of a program that a layout may make cost anything; those of one kind are one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from spmd.planner.cost.demand import TABLES
from spmd.planner.cost.fusion import Fusion, is_fusible
from spmd.planner.cost.lives import Lives
from spmd.planner.cost.reads import Reads
from spmd.planner.cost.stacks import SLICES
from spmd.planner.program.structure import UPDATES, Graph, Operation


class Kind(NamedTuple):
    """What tensors that a layout places alike have in common; one that is `apart` is by itself.

    A product's result that is kept as a wider value has `own` bytes before that.
    """

    shape: tuple[int, ...]
    classes: tuple[int | None, ...]
    is_state: bool
    nbytes: float
    fixed: tuple[tuple[str, int], ...] | None
    apart: int | None = None
    own: float | None = None


class Part(NamedTuple):
    """An operation that runs often, with the vector work beside it, by kind.

    Its turn is the number of sums up to its own, where no product depends on it. A product reads
    each operand as so many values, and then others beside them; it writes its result, and tables.
    The kinds and the shapes are those of what the operation takes and makes.
    """

    one: Operation
    runs: int
    kinds: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_fusible: bool
    beside: Mapping[int, float]
    turn: int | None
    reads: tuple[tuple[int, ...], ...]
    written: tuple[int, ...]


class Parts:
    """The operations of a program, those of the same kinds as one.

    Attributes:
        all: the operations.
        alike: by value, the first one that has the same part in the same operations.

    Args:
        graph: the program.
        kind_of: by value, the number of its kind.
        fusion: what vector work is beside which operation.
        lives: how long values are there.
        reads: what products read and write.
        last: by sum that no product depends on, how many sums are before it.
    """

    def __init__(
        self,
        graph: Graph,
        kind_of: Sequence[int],
        fusion: Fusion,
        lives: Lives,
        reads: Reads,
        last: Mapping[int, int],
    ):
        self.graph, self.kind_of, self.lives = graph, kind_of, lives
        self.reads, self.last = reads, last
        self.alike = {i: i for i in range(len(graph.tensors))}
        self.all = [*self._merged(fusion)]

    def _merged(self, fusion: Fusion) -> Iterator[Part]:
        """The operations; those of the same kinds are one, about the first of alike values.

        Two values are alike that are the same operands and results of the same operations.
        """
        keys: dict[int, Any] = {}
        for n, one in enumerate(self.graph.operations):
            if not is_fusible(one) or len({self.kind_of[i] for i in one.tensors}) > 1:
                kinds = tuple(self.kind_of[i] for i in one.tensors)
                steps = tuple(sorted(fusion.beside.get(n, {}).items()))
                turn = self.last.get(one.tensors[-1])
                brief = tuple(i in self.lives.brief for i in one.tensors)
                own = one.name, one.factors, kinds, one.flops, one.types, one.passes, one.runs
                *reads, written = self._reads(n, one)
                read = tuple(tuple(sorted(self.kind_of[i] for i in found)) for found in reads)
                wrote = tuple(self.kind_of[i] for i in written)
                keys[n] = *own, steps, turn, brief, read, wrote
        self._find_alike(keys)
        merged: dict[Any, list[int]] = defaultdict(list)
        for n, key in keys.items():
            merged[key, tuple(self.alike[i] for i in self.graph.operations[n].tensors)].append(n)
        for (_, tensors), found in merged.items():
            first = self.graph.operations[found[0]]
            one = dataclasses.replace(first, tensors=tensors)
            beside = {k: len(found) * n for k, n in fusion.beside.get(found[0], {}).items()}
            turn = self.last.get(first.tensors[-1])
            *reads, written = self._reads(found[0], first)
            yield Part(
                one=one,
                runs=len(found) * one.runs,
                kinds=tuple(self.kind_of[i] for i in tensors),
                shapes=tuple(self.graph.tensors[i].shape for i in tensors),
                is_fusible=is_fusible(one),
                beside=beside,
                turn=turn,
                reads=tuple(reads),
                written=written,
            )

    def _reads(self, n: int, one: Operation) -> tuple[Any, ...]:
        """What a product reads for each operand, what beside them, and what it writes."""
        if not one.flops:
            return ((one.tensors[-1],),)
        found = *self.reads.operands[n], self.reads.beside[n]
        return *(tuple(sorted(each)) for each in found), self.reads.written[n]

    def _find_alike(self, keys: Mapping[int, Any]) -> None:
        """Finds, for each value, the first one that has the same part in the same operations."""
        numbers: dict[Any, int] = {}
        uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for n, key in keys.items():
            number = numbers.setdefault(key, len(numbers))
            for place, i in enumerate(self.graph.operations[n].tensors):
                uses[i].append((number, place))
        first: dict[Any, int] = {}
        for i, found in uses.items():
            self.alike[i] = first.setdefault((self.kind_of[i], tuple(sorted(found))), i)


def tables_of(graph: Graph) -> Iterator[int]:
    """Whole rows, as a gather makes them and a scatter takes them, and the tables that it makes."""
    for one in graph.operations:
        if one.name not in TABLES:
            continue
        table, *rows = (0, -1) if one.name == "gather" else (-1, 2, -1)
        for n in rows:
            columns = one.factors[n][-1:]
            is_wide = columns not in ((), (None,)) and columns == one.factors[table][-1:]
            if is_wide and len(graph.tensors[one.tensors[n]].shape) == 2:
                yield one.tensors[n]


def left_by_manual(graph: Graph) -> Iterator[tuple[int, tuple[tuple[str, int], ...]]]:
    """Where a `shard_map` leaves its results."""
    for one in graph.operations:
        names = one.factors[-1]
        if one.manual and names.count(None) < len(names):
            at = ((axis, names.index(name)) for axis, name in one.manual if name is not None)
            yield one.tensors[-1], tuple(at)


def traffic(one: Operation, nbytes: Sequence[float], *, is_changed: bool) -> float:
    """Bytes that an operation reads and writes on a device.

    Args:
        one: the operation.
        nbytes: of each value, what is in main memory.
        is_changed: whether it writes a slice that was changed: that is read for what uses it.
    """
    if one.name in SLICES:
        return 0.0  # what uses a slice reads it where it is
    if one.name == "gather":
        return sum(nbytes[one.operands :])
    if one.name in UPDATES:
        return (1 if is_changed else 2) * min(nbytes[1:2], default=0.0)
    return sum(nbytes)
