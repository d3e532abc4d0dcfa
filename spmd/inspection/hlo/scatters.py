"""All-reduces of whose result each device needs only its own part.

A compiler of TPUs or GPUs writes these as reduce-scatters, which send half of the bytes. That of
CPUs leaves the all-reduce and the slice behind it. Which part a device takes is worked out from its
number, for all devices at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import functools
import math
import re
from typing import NamedTuple, TypeAlias

import numpy as np

from spmd.inspection.hlo.calls import Visit, calls_of
from spmd.inspection.hlo.groups import logical_groups, numbering, written_groups
from spmd.inspection.hlo.parts import Around, Place
from spmd.inspection.hlo.text import Instruction, Module, parse_shapes

#: Their result is their operand, be it in another form or type.
_PASSES = {"bitcast", "convert", "copy", "reshape", "transpose"}
_INSIDES = ("fusion", "call")
_DEEPEST = 64
_INTEGER = re.compile(r"[su]\d+\[")

_Numbers: TypeAlias = np.ndarray | None
"""Whole numbers, by logical device in the first dimension; None where they are not known."""
_Path: TypeAlias = tuple[int, ...]


class _Form(NamedTuple):
    """A result that is the sum in some form, and how it became that."""

    one: Instruction
    home: str
    route: tuple[str, ...] = ()


class Scatters:
    """Finds the operands of all-reduces whose sums are needed in parts only."""

    def __init__(
        self, module: Module, visited: Mapping[str, Visit], around: Callable[[str], Around]
    ):
        self.module = module
        self.visited = visited
        self.around = around
        self.numbers = _DeviceNumbers(module, visited, around)
        self.groups: dict[object, _Numbers] = {}

    def sliced(self, one: Instruction, home: str) -> tuple[int, ...]:
        """The operands of an all-reduce of which each device needs its own part only."""
        groups = self._groups(one)
        if groups is None:
            return ()
        forms = self._sums(one, home)
        return tuple(i for i, form in forms if self._is_sliced(form, groups))

    def _sums(self, one: Instruction, home: str) -> list[tuple[int, list[_Form]]]:
        """By operand, what its sum first is; of several sums, the elements of the result."""
        if not one.type.startswith("("):
            return [(0, [_Form(one, home)])]
        elements: dict[int, list[_Form]] = {}
        for user in self.around(home).used_directly(one):
            if user.opcode != "get-tuple-element":
                return []
            elements.setdefault(int(user.attribute("index") or 0), []).append(_Form(user, home))
        return [] if one.is_root else sorted(elements.items())

    def _groups(self, one: Instruction) -> _Numbers:
        """Devices that sum together, a row for each group; None where sizes differ or are one."""
        key = numbering(one), written_groups(one)
        if key not in self.groups:
            groups = logical_groups(one, self.module)
            alike = len({len(group) for group in groups}) == 1 and len(groups[0]) > 1
            self.groups[key] = np.array(groups) if alike else None
        return self.groups[key]

    def _is_sliced(self, forms: Iterable[_Form], groups: np.ndarray) -> bool:
        """Whether all that becomes of a sum is one and the same slice of it."""
        pending, slices = [*forms], set()
        while pending:
            form = pending.pop()
            for step in self._uses(form):
                if isinstance(step, _Form):
                    pending.append(step)
                    continue
                dimension = step and self._own_part(step, groups)
                if dimension is None:
                    return False
                slices.add((form.route, dimension))
        return len(slices) == 1

    def _uses(self, form: _Form) -> Iterator[_Form | Place | None]:
        """What uses a sum: the sum in another form, a slice of it, or None for what needs all."""
        one, home, route = form
        around = self.around(home)
        if one.is_root or one.name == around.instructions[-1].name:
            caller = self.numbers.caller(home)
            inside = caller if caller and caller[0].opcode in _INSIDES else None
            yield _Form(inside[0], inside[1], route) if inside else None
        for user in around.used_directly(one):
            for number in (i for i, name in enumerate(user.operand_names) if name == one.name):
                yield self._use(form, user, number)

    def _use(self, form: _Form, user: Instruction, number: int) -> _Form | Place | None:
        _, home, route = form
        if user.opcode in _PASSES:
            turned = user.opcode not in ("convert", "copy")
            return _Form(user, home, (*route, user.type) if turned else route)
        if user.opcode == "dynamic-slice" and number == 0:
            return user, home
        for name, _ in calls_of(user) if user.opcode in _INSIDES else ():
            return self._parameter(name, number, route)
        return None

    def _parameter(self, name: str, number: int, route: tuple[str, ...]) -> _Form | None:
        """A sum inside of an operation that takes it as an operand."""
        inside = self.module.computations[name].instructions if name in self.visited else ()
        for one in inside:
            if one.opcode == "parameter" and one.operands == str(number):
                return _Form(one, name, route)
        return None

    def _own_part(self, place: Place, groups: np.ndarray) -> int | None:
        """The dimension that a slice splits, the n-th device of each group taking the n-th part."""
        one, home = place
        given, taken = self.around(home).types.get(one.operand_names[0], ""), one.type
        (whole, *_), (part, *_) = (
            [s.dims for s in parse_shapes(t)] or [()] for t in (given, taken)
        )
        split = [d for d, sizes in enumerate(zip(whole, part, strict=False)) if len({*sizes}) > 1]
        if len(split) != 1 or len(one.operand_names) != 1 + len(whole):
            return None
        (dimension,) = split
        size, count = part[dimension], groups.shape[1]
        starts = self.numbers.of(one.operand_names[1 + dimension], home)
        if starts is None or size * count != whole[dimension]:
            return None
        return dimension if (starts[groups] == np.arange(count) * size).all() else None


# Which part: numbers that follow from that of the device


class _DeviceNumbers:
    """Works out integers of a program for all devices at once."""

    def __init__(
        self, module: Module, visited: Mapping[str, Visit], around: Callable[[str], Around]
    ):
        self.module = module
        self.visited = visited
        self.around = around
        self.devices = np.arange(module.num_replicas * module.num_partitions)
        self.known: dict[tuple[str, str, _Path], _Numbers] = {}

    @functools.cached_property
    def callers(self) -> dict[str, list[Place]]:
        """By computation, the instructions that it runs inside."""
        found: dict[str, list[Place]] = {}
        for home in self.visited:
            for one in self.module.computations[home].instructions:
                for name, _ in calls_of(one):
                    found.setdefault(name, []).append((one, home))
        return found

    def caller(self, home: str) -> Place | None:
        """The only instruction that a computation runs inside; None for none or several."""
        found = self.callers.get(home, ())
        return found[0] if len(found) == 1 else None

    def of(self, name: str, home: str, element: _Path = (), depth: int = 0) -> _Numbers:
        """The value of an instruction, or of an element of it."""
        key = name, home, element
        if key not in self.known:
            self.known[key] = None  # of a circle, which no program of XLA has, nothing is known
            self.known[key] = self._worked_out(name, home, element, depth)
        return self.known[key]

    def _worked_out(self, name: str, home: str, element: _Path, depth: int) -> _Numbers:
        around = self.around(home)
        if name not in around.places or depth > _DEEPEST:
            return None
        one = around.instructions[around.places[name]]
        if one.opcode in _HANDS_ON:
            return self._handed_on(one, home, element, depth + 1)
        if element or not _INTEGER.match(one.type):
            return None
        rule = _RULES.get(one.opcode)
        if rule is None:
            return self._own(one)
        operands = [self.of(operand, home, (), depth + 1) for operand in one.operand_names]
        known = [values for values in operands if values is not None]
        return rule(one, known) if len(known) == len(operands) else None

    def _own(self, one: Instruction) -> _Numbers:
        """What an instruction makes without operands."""
        match one.opcode:
            case "partition-id":
                return self.devices % self.module.num_partitions
            case "replica-id":
                return self.devices // self.module.num_partitions
            case "constant":
                dims, found = _dims(one), [int(n) for n in re.findall(r"-?\d+", one.operands)]
                if len(found) != math.prod(dims):
                    return None
                return np.broadcast_to(np.reshape(found, dims), (len(self.devices), *dims))
        return None

    def _handed_on(self, one: Instruction, home: str, element: _Path, depth: int) -> _Numbers:
        """What another instruction or computation makes."""
        match one.opcode:
            case "get-tuple-element":
                path = (int(one.attribute("index") or 0), *element)
                return self.of(one.operand_names[0], home, path, depth)
            case "tuple":
                return self.of(one.operand_names[element[0]], home, element[1:], depth)
            case "parameter":
                return self._argument(one, home, element, depth)
        for name, _ in calls_of(one):
            root = self.module.computations[name].root if name in self.visited else None
            return self.of(root.name, name, element, depth) if root else None
        return None

    def _argument(self, one: Instruction, home: str, element: _Path, depth: int) -> _Numbers:
        """What a computation is given: in a loop, what it also hands on as it is."""
        found = self.caller(home)
        if found is None:
            return None
        caller, outside = found
        if caller.opcode == "while":
            is_kept = self._is_kept(one, home, element)
            return self.of(caller.operand_names[0], outside, element, depth) if is_kept else None
        if caller.opcode not in _INSIDES:
            return None
        return self.of(caller.operand_names[int(one.operands)], outside, element, depth)

    def _is_kept(self, state: Instruction, home: str, element: _Path) -> bool:
        """Whether the body of a loop hands on an element of its state as it was given."""
        around, root = self.around(home), self.module.computations[home].root
        if root is None or root.opcode != "tuple" or len(element) != 1:
            return False
        name = root.operand_names[element[0]]
        while name in around.places:
            one = around.instructions[around.places[name]]
            if one.opcode != "copy":
                same = one.opcode == "get-tuple-element" and one.operand_names[0] == state.name
                return same and one.attribute("index") == str(element[0])
            name = one.operand_names[0]
        return False


_HANDS_ON = {"call", "fusion", "get-tuple-element", "parameter", "tuple"}


def _dims(one: Instruction) -> _Path:
    return parse_shapes(one.type)[0].dims


def _reshaped(one: Instruction, operands: list[np.ndarray]) -> _Numbers:
    return operands[0].reshape(-1, *_dims(one))


def _spread(one: Instruction, values: np.ndarray) -> _Numbers:
    """One number at every place of an array."""
    ones = [1] * len(_dims(one))
    return np.broadcast_to(values.reshape(-1, *ones), (len(values), *_dims(one)))


def _looked_up(one: Instruction, operands: list[np.ndarray]) -> _Numbers:
    """A part of a table, from where an index says on, as far as the table goes."""
    table, *starts = operands
    if len(starts) != 1 or table.ndim != 2:
        return None
    (size,) = _dims(one)
    start = np.clip(starts[0].reshape(-1), 0, table.shape[1] - size)
    return np.take_along_axis(table, start[:, None] + np.arange(size), axis=1)


def _divided(one: Instruction, operands: list[np.ndarray]) -> _Numbers:
    """A quotient or a remainder of numbers that are not negative."""
    a, b = operands
    if (a < 0).any() or (b <= 0).any():
        return None
    return a // b if one.opcode == "divide" else a % b


_RULES: dict[str, Callable[[Instruction, list[np.ndarray]], _Numbers]] = {
    **dict.fromkeys(("bitcast", "convert", "copy", "reshape"), _reshaped),
    **dict.fromkeys(("divide", "remainder"), _divided),
    "add": lambda one, operands: operands[0] + operands[1],
    "broadcast": lambda one, operands: _spread(one, operands[0]) if operands[0].ndim == 1 else None,
    "clamp": lambda one, operands: np.clip(operands[1], operands[0], operands[2]),
    "dynamic-slice": _looked_up,
    "maximum": lambda one, operands: np.maximum(*operands),
    "minimum": lambda one, operands: np.minimum(*operands),
    "multiply": lambda one, operands: operands[0] * operands[1],
    "subtract": lambda one, operands: operands[0] - operands[1],
}
