"""Reads the text of a compiled HLO module into records.

This is syntax only: which computations there are, which instructions they hold, which computation
calls which. What a collective costs and which mesh axis it crosses is worked out in `_groups.py`
and `_ledger.py`.

XLA prints one instruction a line, so the reader goes line by line, and every match is anchored at
the opcode's own place in the line: fusions, metadata and operands name collectives too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses
import math
import re

# Sizes in bits, from XLA's primitive types; sub-byte elements are packed.
_BITS = {
    "pred": 8, "token": 0, "opaque": 0,
    "s1": 1, "s2": 2, "s4": 4, "s8": 8, "s16": 16, "s32": 32, "s64": 64,
    "u1": 1, "u2": 2, "u4": 4, "u8": 8, "u16": 16, "u32": 32, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8, "f8e4m3fn": 8,
    "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
}  # fmt: skip

_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=? ]*)\]")
# The type of a tuple ends at the first ")" that a blank and an opcode follow: inside a tuple a ")"
# is followed by ",", "}", "(" or ")".
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\("
)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .* )?\{$")
_HEADER = re.compile(r"HloModule (?P<name>[^\s,]+)")
_OPERAND = re.compile(r"(?:^|[ ,(])%([\w.\-]+)")
_CALLEE = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The element type and the dimensions of one array in a program.

    Args:
        dtype: XLA's name of the element type, such as ``f32`` or ``bf16``.
        dims: sizes per device.
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes on one device, with elements below a byte packed."""
        return -(-math.prod(self.dims) * _BITS[self.dtype] // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a computation, cut into its parts.

    Args:
        name: its name, without the percent sign.
        opcode: what it does, such as ``all-reduce-start``.
        type: the text of its result type.
        operands: the text between the parentheses after the opcode.
        attributes: the text after them.
    """

    name: str
    opcode: str
    type: str
    operands: str
    attributes: str

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        return tuple(_OPERAND.findall(self.operands))

    @property
    def op_name(self) -> str:
        """The name stack that JAX gave the operation, or an empty string."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int | None:
        """How often the body of a while loop runs, where the compiler printed it."""
        found = _TRIP_COUNT.search(self.attributes)
        return int(found[1]) if found else None

    def attribute(self, name: str) -> str | None:
        """The text of one attribute up to the comma that ends it, or None without it."""
        found = re.search(rf"(?:^|, ){re.escape(name)}=", self.attributes)
        if not found:
            return None
        value = _until_comma(self.attributes, found.end())
        # Replica groups over a mesh with a device order hold a comma outside of all brackets.
        if value.startswith("mesh[") and not value.endswith("}"):
            rest = _until_comma(self.attributes, found.end() + len(value) + 1)
            return f"{value},{rest}"
        return value

    def callees(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations that this instruction calls, by the attribute that says so."""
        # Strings may hold anything, the names of other computations included.
        text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', self.attributes)
        return {
            role: tuple(re.findall(r"[\w.\-]+", names)) for role, names in _CALLEE.findall(text)
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A named sequence of instructions.

    Args:
        name: its name, without the percent sign.
        instructions: its lines, in program order.
    """

    name: str
    instructions: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A compiled program.

    Args:
        name: as in ``HloModule jit_step``.
        entry: name of the computation that runs first; empty in a module without one.
        computations: all of them, by name.
        num_replicas: how many replicas run it.
        num_partitions: over how many devices each replica is partitioned.
    """

    name: str
    entry: str
    computations: dict[str, Computation]
    num_replicas: int
    num_partitions: int


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """All array shapes in the text of a type, those of a tuple in order.

    A dynamic dimension ``<=8`` counts with its bound.
    """
    return tuple(
        Shape(dtype=dtype, dims=tuple(int(d.strip("<= ")) for d in dims.split(",") if d.strip()))
        for dtype, dims in _SHAPE.findall(text)
        if dtype in _BITS
    )


def tuple_elements(text: str) -> tuple[str, ...]:
    """The elements of a tuple type, one level deep; another type is its own only element."""
    text = re.sub(r"/\*.*?\*/", "", text).strip()
    if not text.startswith("("):
        return (text,)
    inner, elements, start = text[1:-1], [], 0
    while start < len(inner):
        element = _until_comma(inner, start)
        elements.append(element.strip())
        start += len(element) + 1
    return tuple(elements)


def parse_module(text: str) -> Module:
    """Read the text that ``compiled.as_text()`` gives.

    Args:
        text: one HLO module.

    Returns:
        The module; one without computations for an empty text.
    """
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.startswith("HloModule ")), "")
    found = _HEADER.match(header)
    entry, computations = "", {}
    for name, is_entry, body in _computations(lines):
        computations[name] = Computation(name=name, instructions=tuple(body))
        entry = name if is_entry else entry
    return Module(
        name=found["name"] if found else "",
        entry=entry,
        computations=computations,
        num_replicas=_header_count(header, "replica_count"),
        num_partitions=_header_count(header, "num_partitions"),
    )


def _computations(lines: Iterable[str]) -> Iterator[tuple[str, bool, list[Instruction]]]:
    lines = iter(lines)
    for line in lines:
        # The tables at the head of a module, such as FileLocations, have lines that end in "}".
        found = _COMPUTATION.match(line)
        if found:
            yield found["name"], bool(found["entry"]), list(_instructions(lines))


def _instructions(lines: Iterator[str]) -> Iterator[Instruction]:
    for line in lines:
        if line.startswith("}"):
            return
        found = _INSTRUCTION.match(line)
        if found:
            end = _closing(line, found.end() - 1)
            yield Instruction(
                name=found["name"],
                opcode=found["opcode"],
                type=found["type"],
                operands=line[found.end() : end],
                attributes=line[end + 1 :].removeprefix(", "),
            )


def _header_count(header: str, name: str) -> int:
    # XLA leaves a count of one out.
    found = re.search(rf"\b{name}=(\d+)", header)
    return int(found[1]) if found else 1


_BRACKET_OR_QUOTE = re.compile(r'[()\[\]{},]|"(?:[^"\\]|\\.)*"')


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at ``start``."""
    depth = 0
    for token in _BRACKET_OR_QUOTE.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0:
            return token.start()
    return len(text)


def _until_comma(text: str, start: int) -> str:
    """The text from ``start`` to the next comma outside all brackets and strings."""
    depth = 0
    for token in _BRACKET_OR_QUOTE.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0 and token[0] == ",":
            return text[start : token.start()]
    return text[start:]
