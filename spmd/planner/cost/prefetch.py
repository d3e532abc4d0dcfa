"""The argument that is in vector memory from the beginning, and what finds no room beside it.

XLA's memory space assignment fetches one argument before the program begins (a cross-program
prefetch, ``cross_program_prefetch_index`` in the text of a compiled program): the largest one that
fits. It stays until its product. A loop in between that writes into a large value and reads a slice
of it, such as the keys and values of a decoder, copies that slice to vector memory; where it finds
no room, it is written to main memory and read again. A loop that gathers something makes all its
slices at once: XLA's scheduler has them beside the gathers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from spmd.planner.cost.machine import Machine
from spmd.planner.program.structure import UPDATES, Graph


class _Slice(NamedTuple):
    """A slice that a loop copies.

    Attributes:
        at: its number among the operations.
        tensor: what is copied.
        loop: that copies it.
        runs: in one call.
    """

    at: int
    tensor: int
    loop: int
    runs: int


class Prefetch:
    """What the argument that is fetched first leaves no room for.

    Attributes:
        slices: that loops copy.
        inside: by value that an operation in such a loop takes, the loop.
        until: by argument that may be fetched, the number of the last product that reads it.

    Args:
        graph: the program.
        kinds: by tensor, the number of its kind.
    """

    def __init__(self, graph: Graph, kinds: Sequence[int]):
        self.kinds = kinds
        self.nbytes = [one.nbytes for one in graph.tensors]
        self.slices = [*_slices(graph)]
        self.until = _until(graph) if self.slices else {}
        self.inside = dict(_inside(graph, {one.loop for one in self.slices}) if self.slices else ())

    def spilled(
        self,
        parts: Sequence[float],
        gathered: Iterable[int],
        elsewhere: Container[int],
        machine: Machine,
    ) -> float:
        """Bytes that are written to main memory and read again.

        Args:
            parts: by kind, the share of a value that a device has.
            gathered: values that are read after a gather, or in parts.
            elsewhere: what products read after an exchange, or in a loop of their own.
            machine: what the program is for.
        """
        if not machine.room:
            return 0.0
        fitting = ((self._size(i, parts), i) for i in self.until if i not in elsewhere)
        taken, first = max((one for one in fitting if one[0] <= machine.room), default=(0.0, None))
        until = 0 if first is None else self.until[first]
        at_once = {self.inside[i] for i in gathered if i in self.inside}
        beside: defaultdict[int, float] = defaultdict(float)
        found = 0.0
        for one in self.slices:
            size = self._size(one.tensor, parts)
            room = machine.room - (taken if one.at < until else 0.0) - beside[one.loop]
            if size > max(machine.near, room):
                found += 2 * one.runs * size
            elif one.loop in at_once:
                beside[one.loop] += size
        return found

    def _size(self, tensor: int, parts: Sequence[float]) -> float:
        """Bytes of a value on a device."""
        return self.nbytes[tensor] * parts[self.kinds[tensor]]


def _slices(graph: Graph) -> Iterator[_Slice]:
    """The slices that a loop reads of what it has written into."""
    written: set[int] = set()
    for n, one in enumerate(graph.operations):
        if not one.loops:
            continue
        if one.name in UPDATES or (one.passes_on and written.intersection(one.tensors)):
            written.add(one.tensors[-1])
        elif one.name == "dynamic_slice" and one.tensors[0] in written:
            yield _Slice(n, one.tensors[-1], one.loops[-1], one.runs)


def _inside(graph: Graph, loops: Container[int]) -> Iterator[tuple[int, int]]:
    """What operations in these loops take of the program's arrays, with the loop.

    What comes from sizes alone, such as a mask, each device makes for itself.
    """
    given = {i for i, one in enumerate(graph.tensors) if one.kind == "argument" and one.shape}
    before = 0
    while before < len(given):  # what enters a loop is known after what is in it
        before = len(given)
        for one in graph.operations:
            if given.intersection(one.tensors[: one.operands]):
                given.update(one.tensors[one.operands :])
    for one in graph.operations:
        if one.loops and one.loops[-1] in loops:
            yield from ((i, one.loops[-1]) for i in one.tensors[: one.operands] if i in given)


def _until(graph: Graph) -> dict[int, int]:
    """By argument that products outside of loops read, the number of the last of these."""
    return {
        i: n
        for n, one in enumerate(graph.operations)
        if one.flops and not one.loops
        for i in one.tensors[: one.operands]
        if i in graph.arguments
    }
