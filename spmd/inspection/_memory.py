"""What a compiled program keeps in a device's memory, and which lines ask for it.

The totals are the compiler's own. It does not say what they consist of, so the largest arrays are
found by walking the schedule: an array is alive from the instruction that makes it to the last one
that reads it, unless it lies in the memory of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import heapq
import itertools
import math
import re
from typing import Any, TypeAlias

from spmd.inspection._hlo import Computation, Instruction, Module, parse_shapes, tuple_elements
from spmd.inspection._records import Buffer, Memory, Shape
from spmd.inspection._source import frames_of, user_source

LARGEST = 20
"""How many arrays a report names."""


def memory_of(
    module: Module,
    analysis: Any,
    *,
    arg_names: Sequence[str] = (),
    largest: int = LARGEST,
) -> Memory | None:
    """Reads the compiler's memory plan.

    Arguments, outputs, temporaries, the aliased part and code are the compiler's figures. The peak
    is ``arguments + outputs - aliased + temporaries + code``, on every backend. XLA's own
    ``peak_memory_in_bytes`` is something else: on CPU it leaves temporaries out, and on TPU it
    counts arrays in on-chip VMEM and leaves code out. Measured with libtpu for v5e, where a program
    is refused exactly when the sum above exceeds 16,909,334,528 bytes (16 GiB less 258 MiB and
    2 KiB that the runtime reserves), to the 3 KiB by which one program was told to be too large.

    Temporaries that live at the peak sum up to ``temporaries`` within 25 % for programs whose
    temporaries matter; what is missing is fragmentation, alignment and the sharing of memory that
    the compiler decided and does not print.

    Args:
        module: the compiled module, which is scheduled.
        analysis: what ``compiled.memory_analysis()`` gives; None where the backend gives nothing.
        arg_names: paths of the program's parameters; where their number differs, the names that
            the module itself has are used.
        largest: how many arrays to name.

    Returns:
        The plan of one device, or None without an analysis.
    """
    if analysis is None:
        return None
    sizes = {
        "arguments": int(analysis.argument_size_in_bytes),
        "outputs": int(analysis.output_size_in_bytes),
        "temporaries": int(analysis.temp_size_in_bytes),
        "code": int(analysis.generated_code_size_in_bytes),
    }
    aliased = int(analysis.alias_size_in_bytes)
    peak = sum(sizes.values()) - aliased
    found = largest_buffers(module, arg_names=arg_names, largest=largest)
    return Memory(**sizes, aliased=aliased, peak=peak, buffers=found)


def largest_buffers(
    module: Module,
    *,
    arg_names: Sequence[str] = (),
    largest: int | None = LARGEST,
) -> tuple[Buffer, ...]:
    """The largest arrays of a scheduled module, largest first.

    An array that the compiler gave no line has that of the first instruction that writes into it,
    else of the first that reads it. Constants and arrays outside of main memory are left out.

    Args:
        module: the compiled module.
        arg_names: as in `memory_of`.
        largest: how many; None for all.
    """
    if module.entry not in module.computations:
        return ()
    schedule = _Schedule(module)
    _place_results(schedule, _donations(module.header))
    _share_memory(schedule)
    if not schedule.tiled:
        _hide_in_outputs(schedule.arrays)
    alive = _alive_at_peak(schedule.arrays, schedule.now)
    shown = [array for array in schedule.arrays if array.home != _ELSEWHERE]
    names = arg_names if len(arg_names) == len(schedule.parameters) else ()
    count = len(shown) if largest is None else largest

    def at_peak(array: _Array) -> bool:
        return array.home != _TEMPORARY or id(array) in alive

    return tuple(
        _buffer(array, module, names, at_peak=at_peak(array))
        for array in heapq.nlargest(count, shown, key=lambda a: (a.nbytes, at_peak(a)))
    )


# Types

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=? ]*)\](?:\{([^{}]*)\})?")
_TILE = re.compile(r":[^T]*T\(([\d,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_ELEMENT_BITS = re.compile(r"E\((\d+)\)")
_HOST = 5


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """One array of a type: where in the tuple it stands, and the memory that it takes."""

    path: tuple[int, ...]
    shape: Shape
    nbytes: int


@functools.lru_cache(maxsize=1 << 14)
def _leaves(text: str, tiled: bool) -> tuple[_Leaf, ...]:
    """The arrays of a type that lie in main memory.

    Args:
        text: the type as XLA prints it.
        tiled: True on TPU, where layouts have tiles and spaces other than 0 are on the chip.
    """
    if not text.startswith("("):
        shapes = parse_shapes(text)
        size = _nbytes(text, shapes[0], tiled) if shapes else 0
        return (_Leaf((), shapes[0], size),) if size else ()
    return tuple(
        _Leaf((i, *leaf.path), leaf.shape, leaf.nbytes)
        for i, element in enumerate(tuple_elements(text))
        for leaf in _leaves(element, tiled)
    )


def type_arrays(text: str, *, tiled: bool) -> tuple[tuple[Shape, int], ...]:
    """The arrays of a type that lie in main memory, with the bytes that they take there.

    Args:
        text: the type as XLA prints it.
        tiled: True on TPU, where arrays take whole tiles.
    """
    return tuple((leaf.shape, leaf.nbytes) for leaf in _leaves(text, tiled))


def _nbytes(text: str, shape: Shape, tiled: bool) -> int:
    """Bytes that an array takes, with what the layout adds; 0 outside of main memory."""
    found = _ARRAY.match(text)
    layout = (found[3] or "") if found else ""
    space = _SPACE.search(layout)
    if space and int(space[1]) and (tiled or int(space[1]) == _HOST):
        return 0
    if not tiled:
        return shape.nbytes
    bits = _ELEMENT_BITS.search(layout)
    padded = Shape(dtype=shape.dtype, dims=_padded(shape.dims, layout))
    return -(-math.prod(padded.dims) * int(bits[1]) // 8) if bits else padded.nbytes


def _padded(dims: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The dimensions, from major to minor, rounded up to whole tiles."""
    tile = _TILE.match(layout[layout.find(":") :]) if ":" in layout else None
    if not tile:
        return dims
    order = [int(d) for d in layout.partition(":")[0].split(",") if d]
    sizes = [dims[d] for d in reversed(order)] or [1]
    steps = [int(s) for s in tile[1].split(",") if s.isdigit()]
    # A tile of higher rank than the array has leading dimensions of one.
    sizes = [1] * (len(steps) - len(sizes)) + sizes
    steps = [1] * (len(sizes) - len(steps)) + steps
    return tuple(-(-size // step) * step for size, step in zip(sizes, steps, strict=True))


# Values

_ARGUMENT, _OUTPUT, _TEMPORARY, _ELSEWHERE = "argument", "output", "temporary", "elsewhere"
_NEVER = -1


@dataclasses.dataclass(slots=True, eq=False)
class _Array:
    """One array and the time that it lives, counted in instructions of the whole program.

    Args:
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

    made_by: Instruction
    shape: Shape
    nbytes: int
    birth: int
    death: int
    home: str = _TEMPORARY
    since: int = _NEVER
    lies_in: _Array | None = None
    writer: Instruction | None = None
    reader: Instruction | None = None


_Value: TypeAlias = "_Array | tuple[_Value, ...] | None"
"""What an instruction gives: an array, a tuple, or nothing that main memory holds."""


def _arrays(value: _Value) -> Iterator[_Array]:
    if isinstance(value, _Array):
        yield value
    elif value is not None:
        for element in value:
            yield from _arrays(element)


def _at(value: _Value, path: Sequence[int]) -> _Value:
    for index in path:
        if not isinstance(value, tuple) or index >= len(value):
            return None
        value = value[index]
    return value


def _pairs(a: _Value, b: _Value) -> Iterator[tuple[_Array, _Array]]:
    """Arrays that stand at the same place of two values."""
    if isinstance(a, _Array) and isinstance(b, _Array):
        yield a, b
    elif isinstance(a, tuple) and isinstance(b, tuple):
        for x, y in zip(a, b, strict=False):
            yield from _pairs(x, y)


# The schedule

_NOT_READING = frozenset(
    {"bitcast", "get-tuple-element", "tuple", "opt-barrier", "optimization-barrier", "domain"}
)
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


class _Schedule:
    """Walks the entry of a module, and on the way what it calls, in the order of execution.

    Args:
        module: the compiled module.
    """

    def __init__(self, module: Module):
        self.module = module
        self.arrays: list[_Array] = []
        self.parameters: dict[int, _Value] = {}
        # What may lie in the memory of its operands, which is not printed.
        self.offers: list[tuple[Instruction, list[_Value], _Value]] = []
        self.now = 0
        entry = module.computations[module.entry]
        self.tiled = any("T(" in one.type for one in entry.instructions)
        self._walked: set[str] = set()
        self.result = self.walk(entry, None)

    def walk(self, computation: Computation, operands: list[_Value] | None) -> _Value:
        """Walks one computation and gives its result.

        Args:
            computation: the computation.
            operands: its parameters; None for the entry, which has the program's arguments.
        """
        self._walked.add(computation.name)
        walk = _Walk(self, operands)
        for one in computation.instructions:
            walk.step(one)
        result = walk.values.get(computation.root.name) if computation.root else None
        for array in _arrays(result):
            array.death = max(array.death, self.now)
        return result

    def called(self, one: Instruction, operands: list[_Value], *roles: str) -> list[_Value]:
        """Walks the computations that an instruction names and gives their results.

        In a compiled module each has one caller. In any other, what it needs at the second call
        is not looked at again.
        """
        named = one.callees()
        names = [name for role in roles for name in named.get(role, ())]
        return [
            self.walk(self.module.computations[name], operands)
            for name in names
            if name in self.module.computations and name not in self._walked
        ]

    def fused(self, one: Instruction) -> Computation | None:
        """The inside of a fusion; None for another instruction."""
        found = _CALLS.search(one.attributes) if one.opcode == "fusion" else None
        return self.module.computations.get(found[1]) if found else None

    def may_overwrite(self, one: Instruction, operand: int, result: int) -> bool:
        """Whether a result of an instruction may lie where one of its operands does."""
        if one.opcode in _IN_PLACE:
            return operand == result
        if one.opcode != "fusion":
            return one.opcode in _ELEMENTWISE
        fused = self.fused(one)
        return fused is not None and _is_pointwise(fused, operand)

    def new(self, one: Instruction, kept: Mapping[tuple[int, ...], _Value]) -> _Value:
        """The value of an instruction, all of whose arrays are new but those kept, by path."""
        made: dict[tuple[int, ...], _Value] = {}
        for leaf in _leaves(one.type, self.tiled):
            if leaf.path in kept:
                made[leaf.path] = kept[leaf.path]
                continue
            array = _Array(one, leaf.shape, leaf.nbytes, self.now, self.now)
            self.arrays.append(array)
            made[leaf.path] = array
        return _assembled(made)


class _Walk:
    """Walks one computation.

    Args:
        schedule: of the module.
        operands: values of the computation's parameters; None for the entry.
    """

    def __init__(self, schedule: _Schedule, operands: list[_Value] | None):
        self.schedule = schedule
        self.operands = operands
        self.values: dict[str, _Value] = {}

    def step(self, one: Instruction) -> None:
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

    def _read(self, one: Instruction, operands: Iterable[_Value]) -> None:
        has_line = _has_line(one)
        for value in operands:
            for array in _arrays(value):
                array.death = self.schedule.now
                if has_line and array.reader is None:
                    array.reader = one

    # Rules

    def _parameter(self, one: Instruction, operands: list[_Value]) -> _Value:
        number = int(one.operands)
        if self.operands is not None:
            return self.operands[number] if number < len(self.operands) else None
        value = self.schedule.new(one, {})
        for array in _arrays(value):
            array.home = _ARGUMENT
        self.schedule.parameters[number] = value
        return value

    def _nothing(self, one: Instruction, operands: list[_Value]) -> _Value:
        return None

    def _first(self, one: Instruction, operands: list[_Value]) -> _Value:
        return operands[0] if operands else None

    def _tuple(self, one: Instruction, operands: list[_Value]) -> _Value:
        return tuple(operands)

    def _element(self, one: Instruction, operands: list[_Value]) -> _Value:
        found = _INDEX.search(one.attributes)
        return _at(operands[0], (int(found[1]),)) if found and operands else None

    def _loop(self, one: Instruction, operands: list[_Value]) -> _Value:
        results = self.schedule.called(one, operands, "condition", "body")
        state = operands[0] if operands else None
        # What an iteration hands on lies where its own state lay.
        for old, new in _pairs(state, results[-1] if results else None):
            if new is not old and new.home == _TEMPORARY:
                new.home, new.since = _ELSEWHERE, old.death
            if old.writer is None:
                old.writer = new.writer or _line_of(new)
        return state

    def _branches(self, one: Instruction, operands: list[_Value]) -> _Value:
        # Branch k takes operand k + 1, and all leave their results in the same place.
        named, value = one.callees(), None
        roles = ("branch_computations", "true_computation", "false_computation")
        names = [name for role in roles for name in named.get(role, ())]
        for name, operand in zip(names, operands[1:], strict=False):
            if name in self.schedule.module.computations:
                value = self.schedule.walk(self.schedule.module.computations[name], [operand])
        return value if value is not None else self.schedule.new(one, {})

    def _call(self, one: Instruction, operands: list[_Value]) -> _Value:
        results = self.schedule.called(one, operands, "to_apply")
        return results[0] if results else self.schedule.new(one, {})

    def _started(self, one: Instruction, operands: list[_Value]) -> _Value:
        """``(operands, results, ...)``, except for a copy, whose result comes first."""
        if one.opcode == "async-start":
            self.schedule.called(one, operands, "calls")
        if one.opcode == "all-reduce-start":
            return self.schedule.new(one, {})
        if one.opcode == "copy-start":
            return self.schedule.new(one, {(1,): self._first(one, operands)})
        kept = {(0, i): value for i, value in enumerate(operands)}
        return self.schedule.new(one, {(0,): self._first(one, operands), **kept})

    def _awaited(self, one: Instruction, operands: list[_Value]) -> _Value:
        value = self._first(one, operands)
        if one.opcode.endswith("-update") or one.opcode == "all-reduce-done":
            return value
        return _at(value, (0,) if one.opcode in ("copy-done", "recv-done") else (1,))

    def _sent(self, one: Instruction, operands: list[_Value]) -> _Value:
        return self.schedule.new(one, {(0,): self._first(one, operands)})

    def _computed(self, one: Instruction, operands: list[_Value]) -> _Value:
        kept = _aliases(one, operands, tiled=self.schedule.tiled)
        value = self.schedule.new(one, kept)
        if kept or "update" in one.name:
            # Where the new part comes from says more than the loop that stores it.
            line = self._part_written(one, operands) or (one if _has_line(one) else None)
            for array in _arrays(value):
                array.writer = array.writer or line
        if not self.schedule.tiled:
            self.schedule.offers.append((one, operands, value))
        return value

    def _part_written(self, one: Instruction, operands: list[_Value]) -> Instruction | None:
        """The instruction that makes the part which an update stores; None where unknown."""
        fused = self.schedule.fused(one)
        if fused is None:
            return next((_line_of(a) for a in _arrays(tuple(operands[1:2]))), None)
        inner = {each.name: each for each in fused.instructions}
        found = fused.root
        while found is not None and found.opcode in _PASSES:
            names = found.operand_names
            found = inner.get(names[found.opcode == "dynamic-update-slice"])
        if found is not None and found.opcode == "parameter":
            given = operands[int(found.operands)]
            found = _line_of(given) if isinstance(given, _Array) else None
        return found if found is not None and _has_line(found) else None


_RULES: dict[str, Callable[[_Walk, Instruction, list[_Value]], _Value]] = {
    "parameter": _Walk._parameter,
    "constant": _Walk._nothing,
    "after-all": _Walk._nothing,
    "send-done": _Walk._nothing,
    "add-dependency": _Walk._first,
    "bitcast": _Walk._first,
    "domain": _Walk._first,
    "opt-barrier": _Walk._first,
    "optimization-barrier": _Walk._first,
    "tuple": _Walk._tuple,
    "get-tuple-element": _Walk._element,
    "while": _Walk._loop,
    "conditional": _Walk._branches,
    "call": _Walk._call,
    "send": _Walk._sent,
}


def _aliases(
    one: Instruction, operands: list[_Value], *, tiled: bool
) -> dict[tuple[int, ...], _Value]:
    """Results that lie in an operand because the program says so."""
    kept: dict[tuple[int, ...], _Value] = {}
    if "output_to_operand_aliasing=" in one.attributes:
        text = one.attribute("output_to_operand_aliasing") or ""
        for path, number, inner in _PAIR.findall(text):
            if int(number) < len(operands):
                kept[_path(path)] = _at(operands[int(number)], _path(inner))
    if tiled and '"aliasing_operands"' in one.attributes:
        kept |= _printed_aliases(one, operands)
    return {path: value for path, value in kept.items() if value is not None}


def _printed_aliases(one: Instruction, operands: list[_Value]) -> dict[tuple[int, ...], _Value]:
    """TPU prints what lies in the same memory: operands count first, then results."""
    text = one.attributes.partition('"aliasing_operands"')[2].partition("]}]}")[0]
    count = len(tuple_elements(one.type)) if one.type.startswith("(") else 0
    paths = [(i,) for i in range(count)] or [()]
    kept: dict[tuple[int, ...], _Value] = {}
    for group in _GROUP.findall(text + "]}"):
        numbers = [int(n) for n in re.findall(r"\d+", group)]
        sources = [operands[n] for n in numbers if n < len(operands)]
        results = [n - len(operands) for n in numbers if n >= len(operands)]
        kept |= {paths[r]: sources[0] for r in results if sources and r < len(paths)}
    return kept


def _is_pointwise(fused: Computation, number: int) -> bool:
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
        if _keeps_place(one, used, dims):
            reached[one.name] = dims
            fits = fits or one.opcode in _UPDATES
        else:
            fits = False
    return fits and fused.root is not None and fused.root.name in reached


def _dims(text: str) -> str:
    """Dimensions and layout of a type, without the element type."""
    return text.partition("[")[2]


def _keeps_place(one: Instruction, used: Sequence[int], dims: str) -> bool:
    if one.opcode in _UPDATES:
        return used[0] == 0
    return one.opcode in _ELEMENTWISE and _dims(one.type) == dims


def _assembled(made: Mapping[tuple[int, ...], _Value]) -> _Value:
    """The value whose arrays stand at these paths."""
    if not made or () in made:
        return made.get(())
    inner: dict[int, dict[tuple[int, ...], _Value]] = {}
    for path, value in made.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    return tuple(_assembled(inner.get(i, {})) for i in range(max(inner) + 1))


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in text.split(",") if i.strip())


def _has_line(one: Instruction) -> bool:
    return "stack_frame_id=" in one.attributes or "source_line=" in one.attributes


def _line_of(array: _Array) -> Instruction | None:
    return array.made_by if _has_line(array.made_by) else array.writer


# Who lies where

_TRIED = 1000
_SLOTS = 100


def _share_memory(schedule: _Schedule) -> None:
    """Lets results take over the memory of operands that nothing reads later."""
    # Backwards, so that a chain of operations ends up in the memory of its last result.
    for one, operands, value in reversed(schedule.offers):
        for k, result in enumerate(_arrays(value)):
            for i, operand in enumerate(operands):
                if (
                    isinstance(operand, _Array)
                    and _can_follow(result, operand)
                    and schedule.may_overwrite(one, i, k)
                ):
                    _join(result, operand)
                    break


def _can_follow(result: _Array, operand: _Array) -> bool:
    if operand.home != _TEMPORARY or operand.death != result.birth:
        return False
    return operand.nbytes == result.nbytes and (
        result.home == _TEMPORARY or operand.birth > result.since
    )


def _join(result: _Array, operand: _Array) -> None:
    if result.home == _TEMPORARY:
        operand.death -= 1
        return
    operand.home, operand.since = _ELSEWHERE, result.since
    operand.lies_in = result if result.home == _OUTPUT else result.lies_in


def _hide_in_outputs(arrays: Sequence[_Array]) -> None:
    """Moves temporaries into outputs that are not made yet, as XLA does on CPU and GPU."""
    start = {id(array): array.birth for array in arrays if array.home == _OUTPUT}
    for array in arrays:
        if array.lies_in is not None:
            start[id(array.lies_in)] = min(start[id(array.lies_in)], array.birth)
    outputs = (array for array in arrays if array.home == _OUTPUT)
    largest = heapq.nlargest(_SLOTS, outputs, key=_size)
    slots = [(output, [(start[id(output)], math.inf)]) for output in largest]
    temporaries = (array for array in arrays if array.home == _TEMPORARY)
    for one in heapq.nlargest(_TRIED, temporaries, key=_size) if slots else ():
        for output, taken in slots:
            free = all(one.death < start or end < one.birth for start, end in taken)
            if one.nbytes <= output.nbytes and free:
                taken.append((one.birth, one.death))
                one.home = _ELSEWHERE
                break


def _size(array: _Array) -> int:
    return array.nbytes


def _alive_at_peak(arrays: Iterable[_Array], length: int) -> set[int]:
    """Identities of the temporaries that are alive when they take most together."""
    own = [array for array in arrays if array.home == _TEMPORARY]
    change = [0] * (length + 2)
    for array in own:
        change[array.birth] += array.nbytes
        change[array.death + 1] -= array.nbytes
    alive = list(itertools.accumulate(change))
    when = alive.index(max(alive))
    return {id(array) for array in own if array.birth <= when <= array.death}


# Arguments and results


def _donations(header: str) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]]]:
    """By path of an output, the parameter and the path in it where that output lies."""
    _, found, text = header.partition("input_output_alias={")
    if not found:
        return {}
    text = text.partition("entry_computation_layout")[0]
    return {_path(out): (int(n), _path(inner)) for out, n, inner in _PAIR.findall(text)}


def _place_results(
    schedule: _Schedule, donated: Mapping[tuple[int, ...], tuple[int, tuple[int, ...]]]
) -> None:
    for path, (number, inner) in donated.items():
        argument = _at(schedule.parameters.get(number), inner)
        for result, given in _pairs(_at(schedule.result, path), argument):
            if result.home == _TEMPORARY:
                result.home, result.since = _ELSEWHERE, given.death
    for array in _arrays(schedule.result):
        if array.home == _TEMPORARY:
            array.home = _OUTPUT


def _buffer(array: _Array, module: Module, arg_names: Sequence[str], *, at_peak: bool) -> Buffer:
    one = array.made_by
    argument = array.home == _ARGUMENT
    line = one if argument else _line_of(array) or array.reader or one
    name = arg_names[int(one.operands)] if argument and arg_names else ""
    return Buffer(
        name=one.name,
        shape=array.shape,
        nbytes=array.nbytes,
        kind=array.home,
        source=user_source(frames_of(line, module)),
        op_name=name or line.op_name or one.op_name,
        at_peak=at_peak,
    )
