"""Code of XLA's CPU backend without what is read and never used: the bodies of compiled fusions.

A program in its written form has the machine code of each fusion and, in its HLO, the operations
that the fusion was made of. Most of the time of loading goes into those. Here each such body
becomes one call with its parameters, and the HLO as it was is kept beside the code.

The form is protobuf's. The numbers of fields are those of XLA's ``hlo.proto`` and of the messages
around it; where something is not as expected, the code is left as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
import zlib

from spmd.bundle._wire import (
    BYTES,
    VARINT,
    Fields,
    WireError,
    build,
    bytes_of,
    number_of,
    numbers_of,
    parse,
    read_varint,
    replaced,
    varint,
)

#: From what follows the runtime's own header to the HLO: executable, compilation result, module and
#: its configuration.
_WAY = (1, 1, 1)
# HloModuleProto and HloComputationProto
_COMPUTATIONS = 3
_NAME, _INSTRUCTIONS, _COMPUTATION_ID, _ROOT = 1, 2, 5, 6
# HloInstructionProto, whose name is field 1 too
_OPCODE, _SHAPE, _FUSION_KIND, _TARGET, _ID, _OPERANDS, _CALLED = 2, 3, 11, 28, 35, 36, 38

#: Kinds that become machine code. The runtime builds others when it reads them, from their bodies.
_COMPILED = (b"kLoop", b"kInput", b"kOutput")


def trim(code: bytes) -> tuple[bytes, bytes] | None:
    """Takes the bodies of compiled fusions out of a program.

    Args:
        code: The program, as the runtime writes it.

    Returns:
        The program without them, and what :func:`untrim` needs; None where there is nothing to take
        out, or the form is not known.
    """
    try:
        module = _rest_of(code)[1]
        for number in _WAY:
            module = bytes_of(parse(module), number)
        slim = _trim_module(module)
        if len(slim) >= len(module):
            return None
        return _with_module(code, slim), zlib.compress(module)
    except (WireError, KeyError):
        return None


def untrim(code: bytes, kept: bytes) -> bytes:
    """The program as it was before :func:`trim`.

    Args:
        code: The program without bodies.
        kept: The other thing that :func:`trim` gave.

    Raises:
        WireError: It gave something else.
    """
    try:
        return _with_module(code, zlib.decompress(kept))
    except zlib.error as error:
        raise WireError(str(error)) from None


def _with_module(code: bytes, module: bytes) -> bytes:
    header, rest = _rest_of(code)
    return header + replaced(rest, _WAY, module)


def _rest_of(code: bytes) -> tuple[bytes, bytes]:
    """The runtime's own header, before which its length stands, and what follows."""
    length, at = read_varint(code, 0)
    return code[: at + length], code[at + length :]


def _trim_module(module: bytes) -> bytes:
    fields = parse(module)
    bodies = [parse(v) for n, _, v in fields if n == _COMPUTATIONS and isinstance(v, bytes)]
    compiled = _compiled(bodies)
    trimmed = (
        _trim_body(one) if number_of(one, _COMPUTATION_ID) in compiled else build(one)
        for one in bodies
    )
    return build(
        [(n, wire, next(trimmed) if n == _COMPUTATIONS else value) for n, wire, value in fields]
    )


def _compiled(bodies: Sequence[Fields]) -> set[int]:
    """Computations that only fusions call which are compiled."""
    calls, compiled = Counter[int](), Counter[int]()
    for body in bodies:
        for instruction in _instructions(body):
            called = numbers_of(instruction, _CALLED)
            calls.update(called)
            if any(n == _FUSION_KIND and value in _COMPILED for n, _, value in instruction):
                compiled.update(called)
    return {one for one, count in compiled.items() if calls[one] == count}


def _trim_body(body: Fields) -> bytes:
    """A computation with the same parameters and result, and nothing between but one call."""
    instructions = {number_of(one, _ID): one for one in _instructions(body)}
    parameters = {i: p for i, p in instructions.items() if bytes_of(p, _OPCODE) == b"parameter"}
    root = number_of(body, _ROOT)
    if root in parameters:
        return build(body)
    call: Fields = [
        (_NAME, BYTES, bytes_of(instructions[root], _NAME)),
        (_OPCODE, BYTES, b"custom-call"),
        (_SHAPE, BYTES, bytes_of(instructions[root], _SHAPE)),
        (_TARGET, BYTES, b"fusion"),
        (_ID, VARINT, root),
        (_OPERANDS, BYTES, b"".join(map(varint, parameters))),
    ]
    own: Fields = [(_INSTRUCTIONS, BYTES, build(one)) for one in [*parameters.values(), call]]
    return build([field for field in body if field[0] != _INSTRUCTIONS] + own)


def _instructions(body: Fields) -> Iterator[Fields]:
    return (parse(v) for n, _, v in body if n == _INSTRUCTIONS and isinstance(v, bytes))
