"""Code of XLA's CPU backend without what is read and never used: the bodies of compiled fusions.

A program in its written form has the machine code of each fusion and, in its HLO, the operations
that the fusion was made of. Most of the time of loading goes into those. Here each such fusion
becomes one opaque operation of the same name, operands and result, and the HLO as it was is kept
beside the code. Whether code has the functions that it calls is read from the same form.

The form is protobuf's. The numbers of fields are those of XLA's ``hlo.proto`` and of the messages
around it; where something is not as expected, the code is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import zlib

#: From what follows the runtime's own header to the HLO: executable, compilation result, module and
#: its configuration.
_WAY = (1, 1, 1)
#: To the operations that the runtime runs: executable, compilation result.
_THUNKS = (1, 6)
# HloModuleProto
_COMPUTATIONS = 3
# HloComputationProto
_INSTRUCTIONS, _COMPUTATION_ID = 2, 5
# HloInstructionProto
_OPCODE, _FUSION_KIND, _TARGET, _CALLED, _BACKEND_CONFIG = 2, 11, 28, 38, 43
_OF_FUSIONS = (_OPCODE, _FUSION_KIND, _CALLED, _BACKEND_CONFIG)

#: How an operation starts that calls a function of the program's own: its kind, which is field 1.
_CALLING = (b"\n\x06kernel", b"\n\x04sort")

#: Kinds that become machine code. The runtime builds others when it reads them, from their bodies.
_COMPILED = (b"kLoop", b"kInput", b"kOutput")


def trim(code: bytes) -> tuple[bytes, bytes] | None:
    """A program without the bodies of compiled fusions, and what `untrim` needs.

    None where there is nothing to take out, or the form is not known.
    """
    try:
        module = _message_at(code, _WAY)
        slim = _trim_module(module)
        if len(slim) >= len(module):
            return None
        return _with_module(code, slim), zlib.compress(module)
    except WireError:
        return None


def untrim(code: bytes, kept: bytes) -> bytes:
    """The program as it was before `trim`; a `WireError` where that has not made these two."""
    try:
        return _with_module(code, zlib.decompress(kept))
    except zlib.error as error:
        raise WireError(str(error)) from None


def calls_functions(code: bytes) -> bool:
    """Whether what a program runs includes functions of its own, which its code has to have.

    False where the form is not known.
    """
    try:
        thunks = _message_at(code, _THUNKS)
    except WireError:
        return False
    return any(kind in thunks for kind in _CALLING)


def _message_at(code: bytes, way: tuple[int, ...]) -> bytes:
    message = _rest_of(code)[1]
    for number in way:
        message = bytes_of(parse(message), number)
    return message


def _with_module(code: bytes, module: bytes) -> bytes:
    header, rest = _rest_of(code)
    return header + _replaced(rest, _WAY, module)


def _rest_of(code: bytes) -> tuple[bytes, bytes]:
    """The runtime's own header, before which its length stands, and what follows."""
    length, at = read_varint(code, 0)
    return code[: at + length], code[at + length :]


def _trim_module(module: bytes) -> bytes:
    """A module whose compiled fusions are calls of something unknown, without their bodies.

    Computations that such a body calls stay: the plan of memory has values of theirs. A body that
    the runtime builds from stays too, whatever is in it.
    """
    fields = parse(module)
    bodies = [_body(v) for n, _, v in fields if n == _COMPUTATIONS and isinstance(v, bytes)]
    compiled = _called(bodies, lambda kind: kind in _COMPILED)
    built = _called(bodies, lambda kind: kind is not None and kind not in _COMPILED)
    for body in bodies:
        if body.number not in built:
            body.instructions = [*map(_opaque, body.instructions)]
    gone = compiled - _called(bodies, lambda _: True)
    rest = [field for field in fields if field[0] != _COMPUTATIONS]
    left = [body.build() for body in bodies if body.number not in gone]
    return build(rest + [(_COMPUTATIONS, _BYTES, body) for body in left])


@dataclass(slots=True)
class _Body:
    """A computation."""

    number: int
    instructions: list[_Fields]
    rest: _Fields

    def build(self) -> bytes:
        own: _Fields = [(_INSTRUCTIONS, _BYTES, build(one)) for one in self.instructions]
        return build(self.rest + own)


def _body(message: bytes) -> _Body:
    fields = parse(message)
    own = [parse(v) for n, _, v in fields if n == _INSTRUCTIONS and isinstance(v, bytes)]
    rest = [field for field in fields if field[0] != _INSTRUCTIONS]
    return _Body(number_of(fields, _COMPUTATION_ID), own, rest)


def _kind_of(instruction: _Fields) -> int | bytes | None:
    """The kind of a fusion, None of anything else."""
    return next((value for n, _, value in instruction if n == _FUSION_KIND), None)


def _called(bodies: list[_Body], by: Callable[[int | bytes | None], bool]) -> set[int]:
    """The computations that instructions of some kinds call."""
    return {
        one
        for body in bodies
        for instruction in body.instructions
        if by(_kind_of(instruction))
        for one in numbers_of(instruction, _CALLED)
    }


def _opaque(instruction: _Fields) -> _Fields:
    """All of a compiled fusion but what it is made of; of anything else, all."""
    if _kind_of(instruction) not in _COMPILED:
        return instruction
    own: _Fields = [(_OPCODE, _BYTES, b"custom-call"), (_TARGET, _BYTES, b"fusion")]
    return [field for field in instruction if field[0] not in _OF_FUSIONS] + own


# Protobuf's wire format: messages of which only the numbers of fields are known

_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}

_Fields = list[tuple[int, int, int | bytes]]
"""Number, wire type and value of each field of a message, in order."""


class WireError(ValueError):
    """A message is of another form than it has to be."""


def parse(message: bytes) -> _Fields:
    """The fields of a message."""
    fields: _Fields = []
    at = 0
    while at < len(message):
        tag, at = read_varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = read_varint(message, at)
        elif wire == _BYTES or wire in _FIXED:
            size, at = (_FIXED[wire], at) if wire in _FIXED else read_varint(message, at)
            value, at = message[at : at + size], at + size
        else:
            raise WireError(f"wire type {wire}")
        fields.append((number, wire, value))
    if at != len(message):
        raise WireError("it ends too early")
    return fields


def build(fields: _Fields) -> bytes:
    """The message of some fields."""
    found = bytearray()
    for number, wire, value in fields:
        found += varint(number << 3 | wire)
        if isinstance(value, int):
            found += varint(value)
            continue
        if wire == _BYTES:
            found += varint(len(value))
        found += value
    return bytes(found)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and where the next field starts."""
    number = shift = 0
    while at < len(data):
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
    raise WireError("it ends too early")


def varint(number: int) -> bytes:
    """A number that is not negative, as it is written."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def number_of(fields: _Fields, number: int) -> int:
    """The number in a field; 0 where it is absent, since 0 is not written."""
    return next((v for n, _, v in fields if n == number and isinstance(v, int)), 0)


def numbers_of(fields: _Fields, number: int) -> list[int]:
    """Those in a repeated field, which are written one by one or together."""
    found: list[int] = []
    for value in (value for n, _, value in fields if n == number):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = read_varint(value, at)
            found.append(one)
    return found


def bytes_of(fields: _Fields, number: int) -> bytes:
    """The text or message in a field that has to be there once."""
    found = [value for n, _, value in fields if n == number]
    if len(found) != 1 or not isinstance(found[0], bytes):
        raise WireError(f"field {number} is there {len(found)} times")
    return found[0]


def _replaced(message: bytes, way: tuple[int, ...], inner: bytes) -> bytes:
    """A message in which the one at the end of a way of fields, each there once, is another."""
    if not way:
        return inner
    fields = parse(message)
    own = _replaced(bytes_of(fields, way[0]), way[1:], inner)
    return build([(n, wire, own if n == way[0] else value) for n, wire, value in fields])
