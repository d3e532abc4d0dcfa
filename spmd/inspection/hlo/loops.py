"""How often the body of a while loop runs.

Some backends print the count; TPU does not. Then it is worked out from the loop itself: a counter
that starts at a constant, that the body moves by a constant, and that the condition compares with
a constant. Anything else is unknown, and unknown is said.

Integers of a program are those of their type: a step of 4294967293 takes 3 from an unsigned
counter, and a counter that leaves its range comes in at the other end. Each value is therefore kept
with the range of the counter in which the sum that stands for it is true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import operator
import re
from typing import NamedTuple

from spmd.inspection.hlo.text import Computation, Instruction, Module


class _Range(NamedTuple):
    """Integers from `low` to `high`, both included."""

    low: int
    high: int

    def __and__(self, other: _Range) -> _Range:
        return _Range(max(self.low, other.low), min(self.high, other.high))

    def wrap(self, value: int) -> int:
        """The integer that the bits of `value` stand for in a type of this range."""
        return (value - self.low) % (self.high - self.low + 1) + self.low

    def holds(self, *values: int) -> bool:
        return all(self.low <= value <= self.high for value in values)


@dataclasses.dataclass(frozen=True, slots=True)
class _Number:
    """An integer: ``state[index] + offset``, or just ``offset`` where the index is None.

    The sum holds where the element of the state is within `valid`.
    """

    index: int | None
    offset: int
    valid: _Range


class _Test(NamedTuple):
    """A comparison of a number with a constant."""

    number: _Number
    limit: int
    direction: str


class _State:
    """The tuple that a loop carries."""


Constants = Mapping[int, int]
"""Elements of a loop's state that keep one known value in all iterations, by index."""

_SAME = ("copy", "copy-start", "copy-done", "bitcast", "reshape", "convert", "bitcast-convert",
         "opt-barrier")  # fmt: skip
_COUNTABLE = re.compile(r"\(|(?:pred|[su]\d+)\[\]")
_INTEGER = re.compile(r"([su])(\d+)\[\]")
_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}
_NEGATED = {"LT": "GE", "GE": "LT", "LE": "GT", "GT": "LE", "NE": "EQ", "EQ": "NE"}
# Compilers nest fusions in calls two or three deep; a text may nest anything.
_DEEPEST = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What is known of a while loop.

    Attributes:
        trips: how often the body runs; None where that is unknown.
        constants: elements of its state that never change, and their values.
    """

    trips: int | None
    constants: Constants


def _trips(
    module: Module, condition: Computation, body: Computation, start: Constants, known: Constants
) -> int | None:
    test = Reader(module, condition, known).result()
    if not isinstance(test, _Test):
        return None
    counter, limit, direction = test
    if counter.index is None:
        return None if _HOLDS[direction](counter.offset, limit) else 0
    first = start.get(counter.index)
    moved = _at(Reader(module, body, known).elements(), counter.index)
    if first is None or not isinstance(moved, _Number) or moved.index != counter.index:
        return None
    trips = count_trips(first + counter.offset, limit, moved.offset, direction)
    if trips is None:
        return None
    # The counter moves one way, so its first and last value tell about all.
    last = first + trips * moved.offset
    if not counter.valid.holds(first, last):
        return None
    return trips if not trips or moved.valid.holds(first, last - moved.offset) else None


_HOLDS: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "NE": operator.ne, "EQ": operator.eq,
}  # fmt: skip


def count_trips(first: int, limit: int, step: int, direction: str) -> int | None:
    """How often ``x`` passes ``x direction limit`` when it starts at `first` and moves by `step`.

    The direction is one of ``LT``, ``LE``, ``GT``, ``GE``, ``NE`` and ``EQ``. Without an end, it is
    None.
    """
    if direction not in _HOLDS:
        return None
    if not _HOLDS[direction](first, limit):
        return 0
    if direction == "EQ":
        return 1 if step else None
    if direction == "NE":
        trips, rest = divmod(limit - first, step) if step else (0, 1)
        return trips if trips > 0 and not rest else None
    distance = abs(limit - first) + (direction in ("LE", "GE"))
    speed = step if direction in ("LT", "LE") else -step
    return -(-distance // speed) if speed > 0 else None


def _at(values: Sequence[object], index: int) -> object:
    return values[index] if index < len(values) else None


def _range(type_text: str) -> _Range | None:
    """The integers of a scalar type; None for another type."""
    found = _INTEGER.match(type_text)
    if not found:
        return None
    size = 2 ** int(found[2])
    return _Range(0, size - 1) if found[1] == "u" else _Range(-size // 2, size // 2 - 1)


@dataclasses.dataclass(eq=False)
class Reader:
    """Reads integers out of one computation, at most `_DEEPEST` calls deep.

    Its parameters have the values `arguments`, and known elements of a loop's state `constants`.
    """

    module: Module
    computation: Computation
    constants: Constants
    arguments: Sequence[object] = (_State(),)
    depth: int = 0
    values: dict[str, object] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """By name."""
        return {one.name: one for one in self.computation.instructions}

    def constants_of(self, operand: str) -> Constants:
        """The elements of a tuple that are constants."""
        value = self.value(operand)
        if isinstance(value, _State):
            return self.constants
        elements = value if isinstance(value, list) else ()
        numbers = {i: one for i, one in enumerate(elements) if isinstance(one, _Number)}
        return {i: one.offset for i, one in numbers.items() if one.index is None}

    def loop(self, instruction: Instruction) -> Loop:
        """Work out a ``while``: its trip count, and the constants that its body may rely on."""
        callees = instruction.callees()
        body = self.module.computations.get(callees.get("body", ("",))[0])
        condition = self.module.computations.get(callees.get("condition", ("",))[0])
        if body is None or condition is None or not instruction.operand_names:
            return Loop(trips=instruction.trip_count, constants={})
        start = self.constants_of(instruction.operand_names[0])
        after = Reader(self.module, body, {}).elements()
        # What the body hands on as it got it.
        kept = {i: one for i, one in enumerate(after) if isinstance(one, _Number)}
        kept = {i: one for i, one in kept.items() if (one.index, one.offset) == (i, 0)}
        known = {i: n for i, n in start.items() if i in kept and kept[i].valid.holds(n)}
        trips = instruction.trip_count
        if trips is None:
            trips = _trips(self.module, condition, body, start, known)
        return Loop(trips=trips, constants=known)

    def value(self, name: str) -> object:
        """A `_Number`, a `_Test`, a `_State`, a list of values for a tuple, or None."""
        # Chains of operands may be longer than Python's stack is deep.
        pending = [(name, False)]
        while pending:
            current, entered = pending.pop()
            if entered:
                self.values[current] = self._read(self.instructions[current])
            elif current not in self.values:
                self.values[current] = None
                one = self.instructions.get(current)
                # Arrays are nothing to count with, and most of a program is made of them.
                if one and _COUNTABLE.match(one.type) and one.opcode in _RULES:
                    pending.append((current, True))
                    pending += [(operand, False) for operand in one.operand_names]
        return self.values[name]

    def _read(self, one: Instruction) -> object:
        found = _RULES[one.opcode](self, one)
        if isinstance(found, _Number) and one.opcode != "copy-start":
            return _fitted(found, _range(one.type))
        if isinstance(found, _Test) and not one.type.startswith("pred[]"):
            return None
        return found

    def operands(self, one: Instruction) -> list[object]:
        """The values of an instruction's operands, which were read before it."""
        return [self.values.get(name) for name in one.operand_names]

    def result(self) -> object:
        """The value of the computation."""
        root = self.computation.root
        return self.value(root.name) if root else None

    def elements(self) -> list[object]:
        """The values of the elements of the result; none where that is no tuple."""
        value = self.result()
        return value if isinstance(value, list) else []


def _fitted(number: _Number, limits: _Range | None) -> _Number | None:
    """What becomes of a number in a type: a constant wraps, a sum holds while it fits."""
    if limits is None:
        return None
    if number.index is None:
        return _Number(None, limits.wrap(number.offset), limits)
    fits = _Range(limits.low - number.offset, limits.high - number.offset)
    return dataclasses.replace(number, valid=number.valid & fits)


def _read_same(reader: Reader, one: Instruction) -> object:
    return _at(reader.operands(one), 0)


def _read_constant(reader: Reader, one: Instruction) -> object:
    limits = _range(one.type)
    try:
        return limits and _Number(None, int(one.operands), limits)
    except ValueError:
        return None


def _read_element(reader: Reader, one: Instruction) -> object:
    whole, index = _read_same(reader, one), int(one.attribute("index") or 0)
    if not isinstance(whole, _State):
        return _at(whole, index) if isinstance(whole, list) else None
    limits, known = _range(one.type), reader.constants.get(index)
    if limits is None:
        return None
    return _Number(index, 0, limits) if known is None else _Number(None, known, limits)


def _read_sum(reader: Reader, one: Instruction) -> object:
    values = [value for value in reader.operands(one) if isinstance(value, _Number)]
    if len(values) != 2:
        return None
    a, b = values
    sign = -1 if one.opcode == "subtract" else 1
    if a.index is None and sign > 0:
        a, b = b, a
    if b.index is not None:
        return None
    return dataclasses.replace(a, offset=_smallest(a.offset + sign * b.offset, a, one.type))


def _smallest(offset: int, number: _Number, type_text: str) -> int:
    """The offset next to zero that moves a counter of a type to the same place."""
    limits = _range(type_text)
    if number.index is None or limits is None:
        return offset
    size = limits.high - limits.low + 1
    return (offset + size // 2) % size - size // 2


def _read_comparison(reader: Reader, one: Instruction) -> object:
    values = [value for value in reader.operands(one) if isinstance(value, _Number)]
    direction = one.attribute("direction")
    if len(values) != 2 or direction not in _SWAPPED:
        return None
    a, b = values
    if a.index is None:
        a, b, direction = b, a, _SWAPPED[direction]
    return _Test(a, b.offset, direction) if b.index is None else None


def _read_not(reader: Reader, one: Instruction) -> object:
    test = _read_same(reader, one)
    return test._replace(direction=_NEGATED[test.direction]) if isinstance(test, _Test) else None


def _read_call(reader: Reader, one: Instruction) -> object:
    role = "to_apply" if one.opcode == "call" else "calls"
    callee = reader.module.computations.get(one.callees().get(role, ("",))[0])
    if callee is None or reader.depth == _DEEPEST:
        return None
    arguments, depth = reader.operands(one), reader.depth + 1
    return Reader(reader.module, callee, reader.constants, arguments, depth).result()


_RULES: dict[str, Callable[[Reader, Instruction], object]] = {
    **dict.fromkeys(_SAME, _read_same),
    "constant": _read_constant,
    "parameter": lambda reader, one: _at(reader.arguments, int(one.operands)),
    "get-tuple-element": _read_element,
    "tuple": Reader.operands,
    "add": _read_sum,
    "subtract": _read_sum,
    "compare": _read_comparison,
    "not": _read_not,
    "fusion": _read_call,
    "call": _read_call,
}
