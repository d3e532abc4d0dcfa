"""Stacks that a loop takes slices of, changes and puts together again, such as caches of layers.

Something is written into a slice where that is, and the slice to a stack of its own. Where this is
returned in the memory of an argument, it is copied there. libtpu has what is written into a slice
in one piece, and so a cache's words by position first: a stack that a loop around the loop carries
is turned before that, and turned back. Where a scatter writes, XLA copies the stack in each turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spmd.planner.program.structure import UPDATES, Graph, Operation

SLICES = ("dynamic_slice", "slice")
# How often all of a stack is read or written where it is copied, and where it is turned twice.
_COPIED, _TURNED = 2, 4


class _Slice(NamedTuple):
    """A slice that something was written into: where along, and how."""

    is_by_first: bool
    is_scattered: bool


class Stacks:
    """The slices of a program, and the stacks of those that something was written into.

    Attributes:
        sources: by slice, what it is one of: it is read where that is, changed or not.
        changed: slices that something was written into.
        filled: stacks of changed slices, in their loop and after it, with what the slices are of.
        moved: by stack, how often it is read or written beside its loop.
        beside: stacks that are there once more in a loop, with that loop.

    Args:
        graph: the program.
        are_turned: whether stacks are, as on TPUs.
    """

    def __init__(self, graph: Graph, *, are_turned: bool):
        self.graph, self.are_turned = graph, are_turned
        self.sources: dict[int, int] = {}
        self.changed: dict[int, _Slice] = {}
        self.filled: dict[int, int] = {}
        self.moved: dict[int, int] = {}
        self.beside: list[tuple[int, int]] = []
        self._parts: dict[int, _Slice] = {}
        for one in graph.operations:
            self._follow(one)
            if one.name == "while" and one.tensors[1] in self.filled:
                self._leave(one)
        self.moved |= dict.fromkeys(self._copied(), _COPIED)

    def _follow(self, one: Operation) -> None:
        """Goes on from a stack, or a slice, to what is one too."""
        first, *others, last = one.tensors
        if one.name in SLICES:
            self.sources[last] = self.sources.get(first, first)
        elif first in self.sources and one.passes_on:
            self.sources[last] = self.sources[first]
            if first in self.changed:
                self.changed[last] = self.changed[first]
        elif first in self.sources and one.name in UPDATES:
            self.sources[last] = self.sources[first]
            is_scattered = one.name == "scatter"
            own, new = one.factors[0], one.factors[2 if is_scattered else 1]
            self.changed[last] = _Slice({*own[:1]}.isdisjoint(new), is_scattered)
        if one.name == "dynamic_update_slice" and others[0] in self.changed:
            part = others[0]
            if self.sources[part] != first:  # else it is changed in place
                self.filled[last] = self.sources[part]
                self._parts[last] = self.changed[part]

    def _leave(self, one: Operation) -> None:
        """A stack is complete, or leaves a loop around its own."""
        _, stack, last = one.tensors
        self.filled[last] = self.filled[stack]
        part = self._parts.get(stack)
        if part is None or len(one.loops) < 2:
            return
        if self.are_turned and not part.is_by_first:
            self.moved[stack] = _TURNED
            self.beside.append((stack, one.loops[-2]))
        if part.is_scattered:
            self.moved[stack] = self.moved.get(stack, 0) + one.runs * _COPIED
            self.beside.append((stack, one.loops[-2]))

    def _copied(self) -> Iterator[int]:
        """Outputs that are such stacks, and have the memory of the argument that slices are of."""
        tensors = self.graph.tensors
        entered: dict[int, int] = {}
        alone: set[int] = set()
        for one in self.graph.operations:
            first, *_, last = one.tensors
            if one.name == "while":
                entered[last] = first
                if one.tensors[1] in self._parts and len(one.loops) == 1:
                    alone.add(last)
            elif one.name == "return" and first in alone:
                own = self.filled[first]
                argument = tensors[entered.get(own, own)]
                if argument.donated and argument.shape == tensors[last].shape:
                    yield last
