"""A walk through a scheduled program: which arrays it makes, and from when to when they live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import re
from typing import TypeAlias

from spmd.inspection.hlo import text as hlo
from spmd.inspection.hlo.calls import calls_of
from spmd.inspection.hlo.layouts import leaves
from spmd.inspection.records.report import Shape

# Values

Path: TypeAlias = tuple[int, ...]
"""A place in nested tuples, by index."""

Aliases: TypeAlias = dict[Path, tuple[int, Path]]
"""By place in a result, the operand and the place in it where that lies."""

ARGUMENT, OUTPUT, TEMPORARY, ELSEWHERE = "argument", "output", "temporary", "elsewhere"
_NEVER = -1


@dataclasses.dataclass(slots=True, eq=False)
class Array:
    """One array and the time that it lives, counted in instructions of the whole program.

    Attributes:
        made_by: the instruction.
        shape: per device.
        nbytes: with padding.
        birth: when it is made.
        death: when it is read last.
        home: kind of the memory; elsewhere where it lies in that of another array.
        since: for an array elsewhere: after when no one else needs that memory.
        lies_in: for an array elsewhere: the output whose memory that is.
        writer: the first instruction that has a line and writes into it later.
        reader: the first instruction that has a line and reads it.
    """

    made_by: hlo.Instruction
    shape: Shape
    nbytes: int
    birth: int
    death: int
    home: str = TEMPORARY
    since: int = _NEVER
    lies_in: Array | None = None
    writer: hlo.Instruction | None = None
    reader: hlo.Instruction | None = None


Value: TypeAlias = "Array | tuple[Value, ...] | None"
"""What an instruction gives: an array, a tuple, or nothing that main memory holds."""


def arrays_in(value: Value) -> Iterator[Array]:
    """The arrays of a value, which may be a tuple of tuples."""
    if isinstance(value, Array):
        yield value
    elif value is not None:
        for element in value:
            yield from arrays_in(element)


def value_at(value: Value, path: Path) -> Value:
    """The part of a value at a path of indices; None where it has no such part."""
    for index in path:
        if not isinstance(value, tuple) or index >= len(value):
            return None
        value = value[index]
    return value


def pairs_of(a: Value, b: Value) -> Iterator[tuple[Array, Array]]:
    """Arrays that stand at the same place of two values."""
    if isinstance(a, Array) and isinstance(b, Array):
        yield a, b
    elif isinstance(a, tuple) and isinstance(b, tuple):
        for x, y in zip(a, b, strict=False):
            yield from pairs_of(x, y)


# The schedule

_RENAMES = ("bitcast", "domain", "opt-barrier", "optimization-barrier")
_NOT_READING = frozenset({*_RENAMES, "get-tuple-element", "tuple"})
_ELEMENTWISE = frozenset({
    "abs", "add", "and", "atan2", "bitcast", "bitcast-convert", "cbrt", "ceil", "clamp", "compare",
    "convert", "copy", "cosine", "count-leading-zeros", "divide", "erf", "exponential",
    "exponential-minus-one", "floor", "is-finite", "log", "log-plus-one", "logistic", "maximum",
    "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "real", "reduce-precision",
    "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left",
    "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract", "tan",
    "tanh", "xor",
})  # fmt: skip
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})
_PASSES = frozenset({"bitcast", "convert", "copy", "dynamic-update-slice", "reshape", "transpose"})
# Their result k may lie in operand k.
_IN_PLACE = _UPDATES | {"sort"}
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_GROUP = re.compile(r'"indices":\[([^\]]*)\]')
_PAIR = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


class Schedule:
    """Walks the entry of a module, and on the way what it calls, in the order of execution."""

    def __init__(self, module: hlo.Module):
        self.module = module
        self.arrays: list[Array] = []
        self.parameters: dict[int, Value] = {}
        # What may lie in the memory of its operands, which is not printed.
        self.offers: list[tuple[hlo.Instruction, list[Value], Value]] = []
        self.now = 0
        entry = module.computations[module.entry]
        self.tiled = any("T(" in one.type for one in entry.instructions)
        self._walked: set[str] = set()
        self.result = self.walk(entry, None)

    def walk(self, computation: hlo.Computation, operands: list[Value] | None) -> Value:
        """Walks one computation and gives its result; the entry has the program's arguments."""
        self._walked.add(computation.name)
        walk = _Walk(self, operands)
        for one in computation.instructions:
            walk.step(one)
        result = walk.values.get(computation.root.name) if computation.root else None
        for array in arrays_in(result):
            array.death = max(array.death, self.now)
        return result

    def called(self, one: hlo.Instruction, operands: list[Value]) -> list[Value]:
        """Walks the computations that an instruction calls and gives their results.

        In a compiled module each has one caller. In any other, what it needs at the second call
        is not looked at again.
        """
        return [
            self.walk(self.module.computations[name], operands)
            for name, _ in calls_of(one)
            if name in self.module.computations and name not in self._walked
        ]

    def fused(self, one: hlo.Instruction) -> hlo.Computation | None:
        """The inside of a fusion; None for another instruction."""
        found = _CALLS.search(one.attributes) if one.opcode == "fusion" else None
        return self.module.computations.get(found[1]) if found else None

    def may_overwrite(self, one: hlo.Instruction, operand: int, result: int) -> bool:
        """Whether a result of an instruction may lie where one of its operands does."""
        if one.opcode in _IN_PLACE:
            return operand == result
        if one.opcode != "fusion":
            return one.opcode in _ELEMENTWISE
        fused = self.fused(one)
        return fused is not None and _is_pointwise(fused, operand)

    def new(self, one: hlo.Instruction, kept: Mapping[Path, Value]) -> Value:
        """The value of an instruction, all of whose arrays are new but those kept, by path."""
        made: dict[Path, Value] = {}
        for leaf in leaves(one.type, self.tiled):
            if leaf.path in kept:
                made[leaf.path] = kept[leaf.path]
            else:
                made[leaf.path] = array = Array(one, leaf.shape, leaf.nbytes, self.now, self.now)
                self.arrays.append(array)
        return _assembled(made)


class _Walk:
    """Walks one computation, whose parameters have the values `operands`; None for the entry."""

    def __init__(self, schedule: Schedule, operands: list[Value] | None):
        self.schedule = schedule
        self.operands = operands
        self.values: dict[str, Value] = {}

    def step(self, one: hlo.Instruction) -> None:
        """Gives one instruction its value."""
        operands = [self.values.get(name) for name in one.operand_names]
        rule = _RULES.get(one.opcode)
        if rule is None and one.opcode.endswith("-start"):
            rule = _Walk._started
        elif rule is None and one.opcode.endswith(("-done", "-update")):
            rule = _Walk._awaited
        # What it calls runs first.
        value = (rule or _Walk._computed)(self, one, operands)
        if one.opcode not in _NOT_READING:
            self._read(one, operands)
        self.values[one.name] = value
        self.schedule.now += 1

    def _read(self, one: hlo.Instruction, operands: Iterable[Value]) -> None:
        has_line = _has_line(one)
        for value in operands:
            for array in arrays_in(value):
                array.death = self.schedule.now
                if has_line and array.reader is None:
                    array.reader = one

    # Rules

    def _parameter(self, one: hlo.Instruction, operands: list[Value]) -> Value:
        number = int(one.operands)
        if self.operands is not None:
            return self.operands[number] if number < len(self.operands) else None
        value = self.schedule.new(one, {})
        for array in arrays_in(value):
            array.home = ARGUMENT
        self.schedule.parameters[number] = value
        return value

    def _first(self, one: hlo.Instruction, operands: list[Value]) -> Value:
        return operands[0] if operands else None

    def _element(self, one: hlo.Instruction, operands: list[Value]) -> Value:
        found = _INDEX.search(one.attributes)
        return value_at(operands[0], (int(found[1]),)) if found and operands else None

    def _call(self, one: hlo.Instruction, operands: list[Value]) -> Value:
        results = self.schedule.called(one, operands)
        return results[0] if results else self.schedule.new(one, {})

    def _loop(self, one: hlo.Instruction, operands: list[Value]) -> Value:
        results = self.schedule.called(one, operands)
        state = operands[0] if operands else None
        # What an iteration hands on lies where its own state lay.
        for old, new in pairs_of(state, results[-1] if results else None):
            if new is not old and new.home == TEMPORARY:
                new.home, new.since = ELSEWHERE, old.death
            if old.writer is None:
                old.writer = new.writer or line_of(new)
        return state

    def _branches(self, one: hlo.Instruction, operands: list[Value]) -> Value:
        # Branch k takes operand k + 1, and all leave their results in the same place.
        value = None
        for (name, _), operand in zip(calls_of(one), operands[1:], strict=False):
            if name in self.schedule.module.computations:
                value = self.schedule.walk(self.schedule.module.computations[name], [operand])
        return value if value is not None else self.schedule.new(one, {})

    def _started(self, one: hlo.Instruction, operands: list[Value]) -> Value:
        """``(operands, results, ...)``, except for a copy, whose result comes first."""
        if one.opcode == "async-start":
            self.schedule.called(one, operands)
        if one.opcode == "all-reduce-start":
            return self.schedule.new(one, {})
        if one.opcode == "copy-start":
            return self.schedule.new(one, {(1,): self._first(one, operands)})
        kept = {(0, i): value for i, value in enumerate(operands)}
        return self.schedule.new(one, {(0,): self._first(one, operands), **kept})

    def _awaited(self, one: hlo.Instruction, operands: list[Value]) -> Value:
        value = self._first(one, operands)
        if one.opcode.endswith("-update") or one.opcode == "all-reduce-done":
            return value
        return value_at(value, (0,) if one.opcode in ("copy-done", "recv-done") else (1,))

    def _computed(self, one: hlo.Instruction, operands: list[Value]) -> Value:
        kept = _aliases(one, operands, tiled=self.schedule.tiled)
        value = self.schedule.new(one, kept)
        if kept or "update" in one.name:
            # Where the new part comes from says more than the loop that stores it.
            line = self._part_written(one, operands) or (one if _has_line(one) else None)
            for array in arrays_in(value):
                array.writer = array.writer or line
        if not self.schedule.tiled:
            self.schedule.offers.append((one, operands, value))
        return value

    def _part_written(self, one: hlo.Instruction, operands: list[Value]) -> hlo.Instruction | None:
        """The instruction that makes the part which an update stores; None where unknown."""
        fused = self.schedule.fused(one)
        if fused is None:
            return next((line_of(a) for a in arrays_in(tuple(operands[1:2]))), None)
        inner = {each.name: each for each in fused.instructions}
        found = fused.root
        while found is not None and found.opcode in _PASSES:
            names = found.operand_names
            found = inner.get(names[found.opcode == "dynamic-update-slice"])
        if found is not None and found.opcode == "parameter":
            given = operands[int(found.operands)]
            found = line_of(given) if isinstance(given, Array) else None
        return found if found is not None and _has_line(found) else None


_RULES: dict[str, Callable[[_Walk, hlo.Instruction, list[Value]], Value]] = {
    "parameter": _Walk._parameter,
    **dict.fromkeys(("constant", "after-all", "send-done"), lambda walk, one, operands: None),
    **dict.fromkeys((*_RENAMES, "add-dependency"), _Walk._first),
    "tuple": lambda walk, one, operands: tuple(operands),
    "get-tuple-element": _Walk._element,
    "while": _Walk._loop,
    "conditional": _Walk._branches,
    "call": _Walk._call,
    "send": lambda walk, one, operands: walk.schedule.new(one, {(0,): walk._first(one, operands)}),
}


def _aliases(one: hlo.Instruction, operands: list[Value], *, tiled: bool) -> dict[Path, Value]:
    """Results that lie in an operand because the program says so."""
    kept: dict[Path, Value] = {}
    if "output_to_operand_aliasing=" in one.attributes:
        text = one.attribute("output_to_operand_aliasing") or ""
        for path, (number, inner) in parse_aliases(text).items():
            if number < len(operands):
                kept[path] = value_at(operands[number], inner)
    if tiled and '"aliasing_operands"' in one.attributes:
        kept |= _printed_aliases(one, operands)
    return {path: value for path, value in kept.items() if value is not None}


def _printed_aliases(one: hlo.Instruction, operands: list[Value]) -> dict[Path, Value]:
    """TPU prints what lies in the same memory: operands count first, then results."""
    text = one.attributes.partition('"aliasing_operands"')[2].partition("]}]}")[0]
    count = len(hlo.tuple_elements(one.type)) if one.type.startswith("(") else 0
    paths = [(i,) for i in range(count)] or [()]
    kept: dict[Path, Value] = {}
    for group in _GROUP.findall(text + "]}"):
        numbers = hlo.integers(group)
        sources = [operands[n] for n in numbers if n < len(operands)]
        results = [n - len(operands) for n in numbers if n >= len(operands)]
        kept |= {paths[r]: sources[0] for r in results if sources and r < len(paths)}
    return kept


def _is_pointwise(fused: hlo.Computation, number: int) -> bool:
    """Whether a fusion may write its result over a parameter.

    Each element of the result needs no other element of the parameter, or the parameter is what
    the fusion updates a part of.
    """
    reached: dict[str, str] = {}
    fits = True
    for one in fused.instructions:
        if one.opcode == "parameter":
            if one.operands == str(number):
                reached[one.name] = _dims(one.type)
            continue
        used = [i for i, name in enumerate(one.operand_names) if name in reached]
        if not used:
            continue
        dims = reached[one.operand_names[used[0]]]
        is_update = one.opcode in _UPDATES
        if used[0] == 0 if is_update else one.opcode in _ELEMENTWISE and _dims(one.type) == dims:
            reached[one.name] = dims
            fits = fits or is_update
        else:
            fits = False
    return fits and fused.root is not None and fused.root.name in reached


def _dims(text: str) -> str:
    """Dimensions and layout of a type, without the element type."""
    return text.partition("[")[2]


def _assembled(made: Mapping[Path, Value]) -> Value:
    """The value whose arrays stand at these paths."""
    if not made or () in made:
        return made.get(())
    inner: dict[int, dict[Path, Value]] = {}
    for path, value in made.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    return tuple(_assembled(inner.get(i, {})) for i in range(max(inner) + 1))


def parse_aliases(text: str) -> Aliases:
    """Reads ``{1}: (0, {})``."""
    found = _PAIR.findall(text)
    return {hlo.integers(out): (int(n), hlo.integers(inner)) for out, n, inner in found}


def _has_line(one: hlo.Instruction) -> bool:
    return "stack_frame_id=" in one.attributes or "source_line=" in one.attributes


def line_of(array: Array) -> hlo.Instruction | None:
    """The instruction whose line an array has: what made it, or else what wrote into it."""
    return array.made_by if _has_line(array.made_by) else array.writer
