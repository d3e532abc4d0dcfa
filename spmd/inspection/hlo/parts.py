"""Where a collective comes from; for a combined one, each exchange that it was combined from.

The compiler keeps the frames of the first, and its name or all names. The others are found by what
makes their operands, or by what uses their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import heapq
import itertools
from typing import NamedTuple

from spmd.inspection.hlo.calls import Visit
from spmd.inspection.hlo.text import Computation, Instruction, Module, frames_of
from spmd.inspection.records.names import direction_of, is_written, joined, user_source
from spmd.inspection.records.report import Collective, Part, Shapes, Source

Place = tuple[Instruction, str]
"""An instruction, and the name of the computation that it stands in."""


class Origin(NamedTuple):
    """Where an exchange comes from, under the names of the fields of its record."""

    frames: tuple[Source, ...]
    op_name: str
    direction: str
    source_is_consumer: bool = False


class Around:
    """What is near an instruction: the types, users and makers in one computation."""

    def __init__(self, computation: Computation):
        self.instructions = computation.instructions
        self.types = computation.types
        self.places = {one.name: i for i, one in enumerate(computation.instructions)}

    @functools.cached_property
    def _used_by(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, one in enumerate(self.instructions):
            for name in dict.fromkeys(one.operand_names):
                found.setdefault(name, []).append(i)
        return found

    def used_directly(self, one: Instruction) -> list[Instruction]:
        """The instructions that use a result, in program order."""
        return [self.instructions[i] for i in self._used_by.get(one.name, ())]

    def users(self, one: Instruction) -> Iterator[Instruction]:
        """The instructions that use a result, and those that use theirs, in program order."""
        return self._reached(one, lambda other: self._used_by.get(other.name, ()), 1)

    def makers(self, one: Instruction) -> Iterator[Instruction]:
        """The instructions that make the operands, and theirs, the nearest first."""
        places = self.places
        return self._reached(
            one, lambda other: (places[n] for n in other.operand_names if n in places), -1
        )

    def _reached(
        self, one: Instruction, after: Callable[[Instruction], Iterable[int]], way: int
    ) -> Iterator[Instruction]:
        pending = [way * i for i in after(one)]
        heapq.heapify(pending)
        seen: set[int] = set()
        while pending:
            i = way * heapq.heappop(pending)
            if i not in seen:
                seen.add(i)
                yield self.instructions[i]
                for j in after(self.instructions[i]):
                    heapq.heappush(pending, way * j)


class _Value(NamedTuple):
    """A result of an instruction, or an element of it, by the indices of nested tuples."""

    name: str
    computation: str
    element: tuple[int, ...] = ()


#: Their result is their operand in another form; a slice is stacked into, or taken from, an array.
_PASSES_ON = {
    "bitcast": 0, "bitcast-convert": 0, "convert": 0, "copy": 0, "copy-done": 0, "copy-start": 0,
    "dynamic-slice": 0, "dynamic-update-slice": 1, "optimization-barrier": 0, "reshape": 0,
    "transpose": 0,
}  # fmt: skip
_CALLS = {"fusion": "calls", "call": "to_apply", "async-start": "calls", "while": "body"}


def divided(total: int, weights: Sequence[int]) -> list[int]:
    """A number in integer shares by weight; they add up to it."""
    whole = sum(weights)
    if not whole:
        return [total, *itertools.repeat(0, len(weights) - 1)]
    ends = [total * end // whole for end in itertools.accumulate(weights)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


@dataclasses.dataclass(frozen=True, slots=True)
class Divider:
    """Finds the parts of the combined collectives of a module."""

    module: Module
    visited: Mapping[str, Visit]
    around: Callable[[str], Around]

    def parts(self, whole: Collective, places: Sequence[Place]) -> tuple[Part, ...]:
        """The parts of a collective, by operand; `places` are its own, then what it runs in."""
        operands, results = whole.shapes
        results = results if len(results) == len(operands) else ()
        weights = [shape.nbytes for shape in operands]
        shares = [divided(n, weights) for n in (whole.payload_bytes, whole.wire_bytes)]
        columns = zip(operands, *shares, self._origins(whole, places), strict=True)
        return tuple(
            Part(
                shapes=Shapes((shape,), results[i : i + 1]),
                payload_bytes=payload,
                wire_bytes=wire,
                source=user_source(origin.frames),
                **origin._asdict(),
            )
            for i, (shape, payload, wire, origin) in enumerate(columns)
        )

    def _origins(self, whole: Collective, places: Sequence[Place]) -> Iterator[Origin]:
        count, operands = len(whole.shapes.operands), places[0][0].operand_names
        names = joined(next((one.op_name for one, _ in places if one.op_name), ""))
        names = names if len(names) == count else [names[0], *[""] * (count - 1)]
        for i, name in enumerate(names):
            if len(operands) != count:  # not XLA's own text
                yield Origin((), name, direction_of(name))
                continue
            found = self._origin(places, i, name)
            # The compiler kept what it knew of the first. A psum of a tree is all of one line.
            if not found.frames and (i == 0 or is_written(name or names[0])):
                found = found._replace(
                    frames=whole.frames, source_is_consumer=whole.source_is_consumer
                )
            yield found

    def _origin(self, places: Sequence[Place], i: int, name: str) -> Origin:
        """Where a part comes from: its line, its name and its direction."""
        whole, home = places[0]
        made = [*self._made_by(_Value(whole.operand_names[i], home))]
        own = (one.op_name for one, _ in made if not self._is_loops(one))
        stack = name or next(filter(None, own), "")
        for one, is_consumer in self._candidates(made, places, i, name):
            if not self._is_loops(one) and (frames := frames_of(one, self.module)):
                direction = direction_of(name or one.op_name)
                return Origin(frames, stack or one.op_name, direction, is_consumer)
        return Origin((), stack, direction_of(stack))

    def _candidates(
        self, made: Sequence[Place], places: Sequence[Place], i: int, name: str
    ) -> Iterator[tuple[Instruction, bool]]:
        """Instructions that may have the line of a part, and whether they use its result.

        These are what makes the operand, by its name if it has one, and then all that this is made
        from. An argument is made by nothing: its line is that of the first to use it.
        """
        yield from ((one, False) for one, _ in sorted(made, key=lambda p: p[0].op_name != name))
        behind = ((one, True) for one in self._users(places, i))
        # All that goes into it, the last first, in the computation of each that makes it.
        before = ((o, False) for one, home in made for o in self.around(home).makers(one))
        is_argument = any(one.opcode == "parameter" for one, _ in made[-1:])
        yield from itertools.chain(*([behind, before] if is_argument else [before, behind]))

    def _is_loops(self, one: Instruction) -> bool:
        # It has the line of the loop, which is that of everything in it.
        return self.module.loop_of(one) is not None

    # What makes an operand

    def _made_by(self, value: _Value | None) -> Iterator[Place]:
        """What makes a value, from what only hands it on to what makes it.

        Operations with several results come last: their line is that of one of the results.
        """
        seen: set[_Value] = set()
        several: list[Place] = []
        while value and value not in seen:
            seen.add(value)
            around = self.around(value.computation)
            if (place := around.places.get(value.name)) is None:
                break
            one = around.instructions[place]
            if value.element or one.opcode == "get-tuple-element":
                several.append((one, value.computation))
            else:
                yield one, value.computation
            value = self._before(one, value, seen)
        yield from several

    def _before(self, one: Instruction, value: _Value, seen: set[_Value]) -> _Value | None:
        """The value that an instruction hands on; None for one that makes its own."""
        names, computation, element = one.operand_names, value.computation, value.element
        if one.opcode == "parameter":
            return self._argument(one, value, seen)
        if inside := one.callees().get(_CALLS.get(one.opcode, "")):
            called = self.module.computations.get(inside[0])
            root = called.root if called else None
            return _Value(root.name, inside[0], element) if root else None
        operand = _PASSES_ON.get(one.opcode, len(names))
        if one.opcode == "get-tuple-element":
            operand, element = 0, (int(one.attribute("index") or 0), *element)
        elif one.opcode == "tuple" and element:
            operand, element = element[0], element[1:]
        return _Value(names[operand], computation, element) if operand < len(names) else None

    def _argument(self, one: Instruction, value: _Value, seen: set[_Value]) -> _Value | None:
        """What a computation is given for its parameter: in a loop, what the last turn made."""
        visit = self.visited.get(value.computation)
        caller = visit.caller if visit else None
        if visit is None or caller is None or caller.opcode not in _CALLS:
            return None
        if caller.opcode != "while":
            number = int(one.operands)
            names = caller.operand_names
            return _Value(names[number], visit.home, value.element) if number < len(names) else None
        root = self.module.computations[value.computation].root
        again = self._before(root, value, seen) if root and root.opcode == "tuple" else None
        if again and again not in seen:
            return again
        # What the loop hands on as it is comes from before it.
        return _Value(caller.operand_names[0], visit.home, value.element)

    # Who uses a result

    def _users(self, places: Sequence[Place], i: int) -> Iterator[Instruction]:
        for one, home in places:
            around = self.around(home)
            for element in _elements(around, one, i):
                yield element
                yield from around.users(element)


def _elements(around: Around, one: Instruction, i: int) -> Iterator[Instruction]:
    """The instructions that take one of several results; those of a start come with its done."""
    for user in around.used_directly(one):
        if user.opcode.endswith("-done"):
            yield from _elements(around, user, i)
        elif user.opcode == "get-tuple-element" and user.attribute("index") == str(i):
            yield user
