"""How often the body of a while loop runs.

Some backends print the count; TPU does not. Then it is worked out from the loop itself: a counter
that starts at a constant, that the body moves by a constant, and that the condition compares with
a constant. Anything else is unknown, and unknown is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re

from spmd.inspection._hlo import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True, slots=True)
class _Number:
    """An integer ``state[index] + offset``, or just ``offset`` where the index is None."""

    index: int | None
    offset: int


class _State:
    """The tuple that a loop carries."""


Constants = Mapping[int, int]
"""Elements of a loop's state that keep one known value in all iterations, by index."""

_SAME = ("copy", "bitcast", "reshape", "convert", "optimization-barrier", "bitcast-convert")
_COUNTABLE = re.compile(r"\(|(?:pred|[su]\d+)\[\]")
_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What is known of a while loop.

    Args:
        trips: how often the body runs; None where that is unknown.
        constants: elements of its state that never change, and their values.
    """

    trips: int | None
    constants: Constants


def loop_of(
    instruction: Instruction, computation: Computation, module: Module, constants: Constants
) -> Loop:
    """Work out a while loop.

    Args:
        instruction: the ``while``.
        computation: the computation that it stands in.
        module: the module of both.
        constants: what is known of the state of the loop whose body `computation` is.

    Returns:
        Its trip count and the constants that its own body may rely on.
    """
    callees = instruction.callees()
    body = module.computations.get(callees.get("body", ("",))[0])
    condition = module.computations.get(callees.get("condition", ("",))[0])
    if body is None or condition is None:
        return Loop(trips=instruction.trip_count, constants={})
    outside = _Reader(module, computation, [_State()], constants)
    start = outside.elements(instruction.operand_names[0])
    after = _Reader(module, body, [_State()], {}).root_elements()
    known = {
        i: value
        for i, (before, element) in enumerate(zip(start, after, strict=False))
        if element == _Number(i, 0) and (value := _constant(before)) is not None
    }
    trips = instruction.trip_count
    if trips is None:
        trips = _trips(module, condition, body, start, known)
    return Loop(trips=trips, constants=known)


def _constant(value: object) -> int | None:
    return value.offset if isinstance(value, _Number) and value.index is None else None


def _trips(
    module: Module,
    condition: Computation,
    body: Computation,
    start: Sequence[object],
    known: Constants,
) -> int | None:
    test = _Reader(module, condition, [_State()], known).comparison()
    if test is None:
        return None
    counter, limit, direction = test
    after = _Reader(module, body, [_State()], known).root_elements()
    if counter.index is None or counter.index >= min(len(start), len(after)):
        return None
    first, moved = _constant(start[counter.index]), after[counter.index]
    if first is None or not isinstance(moved, _Number) or moved.index != counter.index:
        return None
    return count_trips(first + counter.offset, limit, moved.offset, direction)


def count_trips(first: int, limit: int, step: int, direction: str) -> int | None:
    """How often ``x`` passes ``x direction limit`` when it starts at `first` and moves by `step`.

    Args:
        first: the value at the first test.
        limit: what it is compared with.
        step: what each iteration adds.
        direction: ``LT``, ``LE``, ``GT``, ``GE`` or ``NE``.

    Returns:
        The count; None where the loop would not end.
    """
    if direction in ("GT", "GE"):
        first, limit, step = -first, -limit, -step
        direction = {"GT": "LT", "GE": "LE"}[direction]
    if direction == "NE":
        distance = limit - first
        if distance == 0:
            return 0
        whole = step != 0 and distance % step == 0 and distance // step > 0
        return distance // step if whole else None
    if direction not in ("LT", "LE"):
        return None
    limit += direction == "LE"
    if first >= limit:
        return 0
    return -((first - limit) // step) if step > 0 else None


class _Reader:
    """Reads integers out of one computation.

    Args:
        module: the module.
        computation: where the names are looked up.
        arguments: values of its parameters.
        constants: known elements of the loop state among them.
    """

    def __init__(
        self,
        module: Module,
        computation: Computation,
        arguments: Sequence[object],
        constants: Constants,
    ):
        self.module = module
        self.root = computation.root
        self.arguments = arguments
        self.constants = constants
        self.instructions = {one.name: one for one in computation.instructions}
        self.values: dict[str, object] = {}

    def value(self, name: str) -> object:
        """A `_Number`, a `_State`, a list of values for a tuple, or None for anything else."""
        if name not in self.values:
            self.values[name] = self._read(name)
        return self.values[name]

    def _read(self, name: str) -> object:
        instruction = self.instructions.get(name)
        # Arrays are nothing to count with, and most of a program is made of them.
        if instruction is None or not _COUNTABLE.match(instruction.type):
            return None
        if instruction.opcode in _SAME:
            return self.value(instruction.operand_names[0])
        rule = _RULES.get(instruction.opcode)
        return rule(self, instruction) if rule else None

    def operands(self, instruction: Instruction) -> list[object]:
        return [self.value(name) for name in instruction.operand_names]

    def elements(self, name: str) -> list[object]:
        """The values of a tuple's elements; none where the value is no tuple."""
        value = self.value(name)
        return value if isinstance(value, list) else []

    def root_elements(self) -> list[object]:
        return self.elements(self.root.name) if self.root else []

    def comparison(self) -> tuple[_Number, int, str] | None:
        """The root as ``counter direction constant``."""
        if self.root is None:
            return None
        found = self.value(self.root.name)
        return found if isinstance(found, tuple) else None


def _read_constant(reader: _Reader, one: Instruction) -> object:
    try:
        return _Number(None, int(one.operands))
    except ValueError:
        return None


def _read_parameter(reader: _Reader, one: Instruction) -> object:
    index = int(one.operands)
    return reader.arguments[index] if index < len(reader.arguments) else None


def _read_element(reader: _Reader, one: Instruction) -> object:
    whole, index = reader.value(one.operand_names[0]), int(one.attribute("index") or 0)
    if isinstance(whole, _State):
        known = reader.constants.get(index)
        return _Number(index, 0) if known is None else _Number(None, known)
    return whole[index] if isinstance(whole, list) and index < len(whole) else None


def _read_tuple(reader: _Reader, one: Instruction) -> object:
    return reader.operands(one)


def _read_sum(reader: _Reader, one: Instruction) -> object:
    a, b = reader.operands(one)
    if not isinstance(a, _Number) or not isinstance(b, _Number):
        return None
    if one.opcode == "subtract":
        if b.index is not None:
            return None
        b = _Number(None, -b.offset)
    if a.index is not None and b.index is not None:
        return None
    return _Number(a.index if b.index is None else b.index, a.offset + b.offset)


def _read_comparison(reader: _Reader, one: Instruction) -> object:
    a, b = reader.operands(one)
    direction = one.attribute("direction") or ""
    if not isinstance(a, _Number) or not isinstance(b, _Number):
        return None
    if a.index is None:
        a, b, direction = b, a, _SWAPPED.get(direction, "")
    return (a, b.offset, direction) if b.index is None else None


def _read_call(reader: _Reader, one: Instruction) -> object:
    role = "to_apply" if one.opcode == "call" else "calls"
    callee = reader.module.computations.get(one.callees().get(role, ("",))[0])
    if callee is None or callee.root is None:
        return None
    inner = _Reader(reader.module, callee, reader.operands(one), reader.constants)
    return inner.value(callee.root.name)


_RULES: dict[str, Callable[[_Reader, Instruction], object]] = {
    "constant": _read_constant,
    "parameter": _read_parameter,
    "get-tuple-element": _read_element,
    "tuple": _read_tuple,
    "add": _read_sum,
    "subtract": _read_sum,
    "compare": _read_comparison,
    "fusion": _read_call,
    "call": _read_call,
}
