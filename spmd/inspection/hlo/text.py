"""Reads the text of a compiled HLO module into records.

This is syntax only: which computations there are, which instructions they hold, which computation
calls which, and the table of Python frames at the head of the module. What a collective costs,
which mesh axis it crosses and how often a loop runs is worked out in the files beside this one.

An instruction ends where its brackets and strings are closed: most take one line, that of a Pallas
kernel with metadata several. Every match is anchored at the opcode's own place: fusions, metadata
and operands name collectives too. What is not understood is kept, in `Module.unread`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import itertools
import re
from typing import NamedTuple

from spmd.inspection.records.report import DTYPES, Shape, Source

# Only names of mesh axes stand in single quotes, and nothing is escaped there.
_QUOTED = r""""(?:[^"\\]|\\.)*"|'[^']*'"""
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=? ]*)\]")
# The type of a tuple ends at the first ")" that a blank and an opcode follow: inside a tuple a ")"
# is followed by ",", "}", "(" or ")".
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\("
    # Most have neither brackets nor strings in their operands.
    r"(?:(?P<operands>[^()\"]*)\)(?:, )?)?"
)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .* )?\{$")
_HEADER = re.compile(r"HloModule (?P<name>[^\s,]+)")
# A comment such as /*index=5*/ may stand before an operand without a blank.
_OPERAND = re.compile(r"(?:^|[ ,(/])%([\w.\-]+)")
_BARE_NAMES = re.compile(r"[a-zA-Z_][\w.\-]*(?:, [a-zA-Z_][\w.\-]*)*")
_LITERALS = ("parameter", "constant", "iota")
_ROLES = "calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
_ROLE = re.compile(f"(?:{_ROLES})=")
_CALLEE = re.compile(rf"\b({_ROLES})=(\{{[^}}]*\}}|%?[\w.\-]+)")
_QUOTE = re.compile("[\"']")
_NAME = re.compile(r"[\w.\-]+")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME_ID = re.compile(r"\bstack_frame_id=(\d+)")
_TABLE_ROW = re.compile(r"(\d+) (.*)")
_FIELD = re.compile(r"\b(\w+)=(\d+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class _Parts(NamedTuple):
    """The fields of an `Instruction`."""

    name: str
    opcode: str
    type: str
    operands: str
    attributes: str
    is_root: bool = False


class Instruction(_Parts):
    """One line of a computation, cut into its parts.

    There are hundreds of thousands, and a tuple is made three times faster than a dataclass.

    Attributes:
        name: its name, without the percent sign.
        opcode: what it does, such as ``all-reduce-start``.
        type: the text of its result type.
        operands: the text between the parentheses after the opcode.
        attributes: the text after them.
        is_root: True where its result is that of the computation.
    """

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        names = _OPERAND.findall(self.operands)
        if not names and self.opcode not in _LITERALS:
            # Short texts of XLA leave out percent signs, and types with them.
            bare = re.sub(r"/\*.*?\*/", "", self.operands)
            return tuple(bare.split(", ")) if _BARE_NAMES.fullmatch(bare) else ()
        return tuple(names)

    @property
    def op_name(self) -> str:
        """The name stack that JAX gave the operation, or an empty string."""
        found = _OP_NAME.search(self.attributes, self._metadata)
        return unescape(found[1]) if found else ""

    @property
    def frame_id(self) -> int:
        """Its row in the module's table of stack frames; 0 where it has none."""
        found = _FRAME_ID.search(self.attributes, self._metadata)
        return int(found[1]) if found else 0

    @property
    def _metadata(self) -> int:
        """Where its metadata starts: what a user wrote before may hold the same words."""
        if self.attributes.startswith("metadata={"):
            return 0
        return max(self.attributes.find(", metadata={"), 0)

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

    def callees(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the computations that this instruction calls, by the attribute that says so."""
        return self._callees

    @functools.cached_property
    def _callees(self) -> Mapping[str, tuple[str, ...]]:
        text = self.attributes
        # Strings may hold anything, the names of other computations included.
        string = _QUOTE.search(text)
        if string and _ROLE.search(text, string.start()):
            text = re.sub(_QUOTED, '""', text)
        elif string:
            text = text[: string.start()]
        return {role: tuple(_NAME.findall(names)) for role, names in _CALLEE.findall(text)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """A named sequence of instructions.

    Attributes:
        name: its name, without the percent sign.
        instructions: its lines, in program order.
    """

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def opcodes(self) -> frozenset[str]:
        """What its instructions do: most computations have nothing of what is looked for."""
        return frozenset([one.opcode for one in self.instructions])

    @functools.cached_property
    def types(self) -> Mapping[str, str]:
        """The texts of types, by the names of instructions."""
        return {one.name: one.type for one in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The instruction whose result is that of the computation: the last one without a mark."""
        last = self.instructions[-1] if self.instructions else None
        return next((one for one in self.instructions if one.is_root), last)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A compiled program.

    Attributes:
        name: as in ``HloModule jit_step``.
        entry: name of the computation that runs first; empty in a module without one.
        computations: all of them, by name.
        num_replicas: how many replicas run it.
        num_partitions: over how many devices each replica is partitioned.
        frames: the table of stack frames: by number, the place and the number of the caller's
            frame, which is 0 for the outermost.
        header: the first line, with properties of the whole module.
        loops: the loop whose arrays an instruction takes apart or stacks, by name of that
            instruction; also each loop by its name stack. See `loop_of`.
        unread: the lines that were not understood, and those that start an exchange between hosts,
            which nothing here reads. What they do is missing in all that is worked out.
    """

    name: str
    entry: str
    computations: dict[str, Computation]
    num_replicas: int
    num_partitions: int
    frames: dict[int, tuple[Source, int]] = dataclasses.field(default_factory=dict)
    header: str = ""
    loops: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def loop_of(self, one: Instruction) -> Instruction | None:
        """The loop whose arrays an instruction takes apart or stacks, if JAX made it do so.

        The frames of such an instruction may be those of another program.
        """
        own = _LOOPS_OWN.match(one.op_name) if _INDEXING in one.attributes else None
        # What the compiler moved out of the loop, or names in a warning, has the loop's name stack.
        return (self.loops.get(one.name) or self.loops.get(own["loop"])) if own else None


def base_opcode(one: Instruction) -> str:
    """What an instruction does, or starts to do: ``call`` for a ``call-start``."""
    return one.opcode.removesuffix("-start")


def result_type(one: Instruction) -> str:
    """The type of what an instruction gives, or of what its start will have given at its end.

    Starts give (operands, result, contexts...), copies (result, operand, contexts...), and
    all-reduces the result alone.
    """
    if not one.opcode.endswith("-start") or one.opcode == "all-reduce-start":
        return one.type
    elements = tuple_elements(one.type)
    if len(elements) < 2:
        return one.type
    return elements[0] if one.opcode == "copy-start" else elements[1]


def integers(text: str | None) -> tuple[int, ...]:
    """The whole numbers in a text, such as that of an attribute, which may be missing."""
    return tuple(map(int, re.findall(r"\d+", text or "")))


@functools.lru_cache(maxsize=1 << 14)
def parse_shapes(text: str) -> tuple[Shape, ...]:
    """All array shapes in the text of a type, those of a tuple in order.

    A dynamic dimension ``<=8`` counts with its bound.
    """
    return tuple(
        Shape(dtype=dtype, dims=tuple(int(d.strip("<= ")) for d in dims.split(",") if d.strip()))
        for dtype, dims in _SHAPE.findall(text)
        if dtype in DTYPES and dtype not in ("token", "opaque")
    )


@functools.lru_cache(maxsize=1 << 14)
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


def parse_modules(text: str) -> tuple[Module, ...]:
    """Read the text that ``compiled.as_text()`` gives: one module, or several after each other.

    Args:
        text: HLO modules.

    Returns:
        The modules in order; none for an empty text.
    """
    if not text.strip():
        return ()
    # A line end before it all is as long as what its place is off by.
    starts = [found.start() for found in re.finditer(r"\nHloModule ", f"\n{text}")]
    edges = [0, *starts[1:], len(text)]  # what stands before the first is read, too
    return tuple(parse_module(text[a:b]) for a, b in itertools.pairwise(edges))


def parse_module(text: str) -> Module:
    """Read one HLO module.

    Args:
        text: the module, as ``compiled.as_text()`` gives it.

    Returns:
        The module; one without computations for an empty text.
    """
    unread: list[str] = []
    lines = text.replace("\r\n", "\n").split("\n")[::-1]  # the next one is the last
    header = _header(lines, unread)
    found = _HEADER.match(header)
    entry, computations = "", {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    for name, is_entry, body in _computations(lines, tables, unread):
        computations[name] = Computation(name=name, instructions=tuple(body))
        entry = name if is_entry else entry
    if _HOST_EXCHANGE in text:
        unread += [line for line in text.splitlines() if _HOST_EXCHANGE in line]
    return Module(
        name=found["name"] if found else "",
        entry=entry,
        computations=computations,
        num_replicas=_number(header, "replica_count", 1),  # XLA leaves a count of one out
        num_partitions=_number(header, "num_partitions", 1),
        frames=_frames(tables),
        header=header,
        loops=_loops(computations) if _INDEXING in text else {},
        unread=tuple(unread),
    )


# An array in the memory of hosts that a program needs otherwise split: hosts exchange it in calls
# of libtpu's own, whose groups are numbers of devices and not of partitions.
_HOST_EXCHANGE = 'custom_call_target="MegaScaleCollectiveInputStart"'


# Functions of JAX's own take apart and stack what goes through a loop. It traces them once in a
# process, so that their frames are those of the first loop, in whatever program that was.
_INDEXING = "index_in_dim)/"
_LOOPS_OWN = re.compile(r"(?P<loop>.*/while)/\w+/jit\(dynamic_(?:update_)?index_in_dim\)/")
_CALLERS = ("while", "fusion", "call", "conditional", "async-start")


def _loops(computations: Mapping[str, Computation]) -> dict[str, Instruction]:
    """The loop of each instruction of JAX's own functions, by the name of the instruction."""
    everything = [(one, home) for home in computations.values() for one in home.instructions]
    calls = [(one, home) for one, home in everything if one.opcode in _CALLERS]
    callers = {
        callee: (one, home)
        for one, home in calls
        for names in one.callees().values()
        for callee in names
    }
    found = {one.op_name: one for one, _ in calls if one.opcode == "while"}
    for one, home in everything:
        own = _LOOPS_OWN.match(one.op_name) if _INDEXING in one.attributes else None
        if own and (loop := _around(home, own["loop"], callers)):
            found[one.name] = loop
    return found


def _around(
    computation: Computation, name: str, callers: Mapping[str, tuple[Instruction, Computation]]
) -> Instruction | None:
    """The loop of a name that a computation runs in; two loops of a function have one name."""
    for _ in callers:  # a text that is not XLA's may have circles
        if computation.name not in callers:
            break
        one, computation = callers[computation.name]
        if one.opcode == "while" and one.op_name == name:
            return one
    return None


def _header(lines: list[str], unread: list[str]) -> str:
    while lines:
        if (line := lines.pop()).startswith("HloModule "):
            return _whole(line, lines) if _end_of_line(line) is None else line
        _keep(line, unread)
    return ""


def _keep(line: str, unread: list[str]) -> None:
    """Keeps a line that nothing understands; empty ones and comments say nothing."""
    if line and not line.isspace() and not line.lstrip().startswith("//"):
        unread.append(line)


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def _computations(
    lines: list[str], tables: dict[str, dict[int, str]], unread: list[str]
) -> Iterator[tuple[str, bool, list[Instruction]]]:
    """Give every computation; on the way, fill the tables at the head of the module."""
    while lines:
        line = lines.pop()
        if line in tables:
            tables[line].update(_table(lines, unread))
        # A row of a table may end in "}", too.
        elif found := _COMPUTATION.match(line):
            yield found["name"], bool(found["entry"]), _instructions(lines, unread)
        else:
            _keep(line, unread)


def _table(lines: list[str], unread: list[str]) -> Iterator[tuple[int, str]]:
    while lines:
        found = _TABLE_ROW.match(line := lines.pop())
        if not found:
            _keep(line, unread)
            return
        yield int(found[1]), found[2]


def _frames(tables: dict[str, dict[int, str]]) -> dict[int, tuple[Source, int]]:
    files, functions = tables["FileNames"], tables["FunctionNames"]
    locations = {number: _numbers(row) for number, row in tables["FileLocations"].items()}
    places = {
        number: Source(
            file=_unquoted(files.get(row.get("file_name_id", 0), "")),
            line=row.get("line", 0),
            column=row.get("column", 0) + 1,
            function=_unquoted(functions.get(row.get("function_name_id", 0), "")),
        )
        for number, row in locations.items()
    }
    stacks = {number: _numbers(row) for number, row in tables["StackFrames"].items()}
    frames = {
        number: (places.get(row.get("file_location_id", 0)), row.get("parent_frame_id", 0))
        for number, row in stacks.items()
    }
    # The printed number of the caller is one too high, so that no outermost frame says 0. Should a
    # release print the number itself, one does.
    excess = min((caller for _, caller in frames.values()), default=0) > 0
    return {n: (place, caller - excess) for n, (place, caller) in frames.items() if place}


def _number(text: str, name: str, default: int = 0) -> int:
    found = re.search(rf"\b{name}=(\d+)", text)
    return int(found[1]) if found else default


def _numbers(row: str) -> dict[str, int]:
    return {name: int(number) for name, number in _FIELD.findall(row)}


def _unquoted(text: str) -> str:
    return unescape(text[1:-1] if text.startswith('"') else text)


def unescape(text: str) -> str:
    """A string as XLA writes it, with C escapes for quotes and for what is not printable ASCII."""
    if "\\" not in text:
        return text
    return text.encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")


def _instructions(lines: list[str], unread: list[str]) -> list[Instruction]:
    """The instructions up to the end of a computation."""
    found: list[Instruction] = []
    last = ""
    while lines:
        line = lines.pop()
        if one := parse_instruction(line):
            found.append(one)
            last = line
        elif line == "}" and last.count("{") == last.count("}"):  # as nearly all are
            return found
        elif _end_of_line(last) is None:
            lines.append(line)
            whole = _whole(last, lines)
            found[-1] = parse_instruction(whole) or found[-1]
            unread += [last] * (whole == last)
            last = ""
        elif line.startswith("}"):
            return found
        elif _COMPUTATION.match(line):
            lines.append(line)
            break
        else:
            _keep(line, unread)
    unread.append("the end of a computation")
    return found


def _whole(line: str, lines: list[str]) -> str:
    """A line with those that its open brackets and strings go on in; alone if it has no end."""
    stop = len(lines)
    while stop and not (_INSTRUCTION.match(lines[stop - 1]) or _COMPUTATION.match(lines[stop - 1])):
        stop -= 1
    text = "\n".join([line, *reversed(lines[stop:])])
    end = _end_of_line(text)
    if end is None:
        return line
    del lines[len(lines) - text.count("\n", 0, end) :]
    return text[:end]


def _end_of_line(text: str) -> int | None:
    """Where the first line ends that leaves no bracket and no string open; None if none does."""
    depth = 0
    for token in _STRUCTURE.finditer(text):
        if token[0] in "\"'" or (token[0] == "\n" and depth <= 0):
            return token.start() if token[0] == "\n" else None
        depth += (token[0] in "([{") - (token[0] in ")]}")
    return len(text) if depth <= 0 else None


def parse_instruction(line: str) -> Instruction | None:
    """Read one line of a computation, with the blanks it starts with; None if it is none."""
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    root, name, kind, opcode, operands = found.groups()
    attributes = line[found.end() :]
    if operands is None:
        end = _closing(line, found.end() - 1)
        operands, attributes = line[found.end() : end], line[end + 1 :].removeprefix(", ")
    return Instruction(name, opcode, kind, operands, attributes, root is not None)


_BRACKET_OR_QUOTE = re.compile(rf"[()\[\]{{}},]|{_QUOTED}")
# A quote that stands alone opens a string that has no end.
_STRUCTURE = re.compile(rf"[()\[\]{{}}\n]|{_QUOTED}|[\"']")


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


# Lines

# What JAX before 0.10 and other front-ends write instead of a frame.
_FILE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"\bsource_line=(\d+)")


def frames_of(instruction: Instruction, module: Module) -> tuple[Source, ...]:
    """The Python frames of an instruction, innermost first, those of libraries included.

    What takes apart or stacks the arrays of a loop has those of the loop: its own are of the first
    loop that JAX has traced in the process, in whatever program that was.
    """
    instruction = module.loop_of(instruction) or instruction
    number, frames = instruction.frame_id, {}
    while number in module.frames and number not in frames:
        frames[number], number = module.frames[number]
    if frames:
        return tuple(frames.values())
    file, line = (pattern.search(instruction.attributes) for pattern in (_FILE, _LINE))
    if not file or not line:
        return ()
    return (Source(file=unescape(file[1]), line=int(line[1]), column=0, function=""),)
