"""Protobuf's wire format: messages of which only the numbers of fields are known."""

from __future__ import annotations

VARINT, BYTES = 0, 2
_FIXED = {1: 8, 5: 4}

Fields = list[tuple[int, int, int | bytes]]
"""Number, wire type and value of each field of a message, in order."""


class WireError(ValueError):
    """A message is of another form than it has to be."""


def parse(message: bytes) -> Fields:
    """The fields of a message.

    Raises:
        WireError: It is none.
    """
    fields: Fields = []
    at = 0
    while at < len(message):
        tag, at = read_varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = read_varint(message, at)
            fields.append((number, wire, value))
            continue
        if wire == BYTES:
            size, at = read_varint(message, at)
        elif wire in _FIXED:
            size = _FIXED[wire]
        else:
            raise WireError(f"wire type {wire}")
        fields.append((number, wire, message[at : at + size]))
        at += size
    if at != len(message):
        raise WireError("it ends too early")
    return fields


def build(fields: Fields) -> bytes:
    """The message of some fields."""
    found = bytearray()
    for number, wire, value in fields:
        found += varint(number << 3 | wire)
        if isinstance(value, int):
            found += varint(value)
            continue
        if wire == BYTES:
            found += varint(len(value))
        found += value
    return bytes(found)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and where the next field starts.

    Raises:
        WireError: The data end before it does.
    """
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


def number_of(fields: Fields, number: int) -> int:
    """The number in a field; 0 where it is absent, since 0 is not written."""
    return next((v for n, _, v in fields if n == number and isinstance(v, int)), 0)


def numbers_of(fields: Fields, number: int) -> list[int]:
    """Those in a repeated field, which are written one by one or together.

    Raises:
        WireError: The data end before they do.
    """
    found: list[int] = []
    for n, _, value in fields:
        if n != number:
            continue
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = read_varint(value, at)
            found.append(one)
    return found


def bytes_of(fields: Fields, number: int) -> bytes:
    """The text or message in a field that has to be there once.

    Raises:
        WireError: It is not.
    """
    found = [value for n, _, value in fields if n == number]
    if len(found) != 1 or not isinstance(found[0], bytes):
        raise WireError(f"field {number} is there {len(found)} times")
    return found[0]


def replaced(message: bytes, way: tuple[int, ...], inner: bytes) -> bytes:
    """A message in which the one at the end of a way of fields, each there once, is another.

    Raises:
        WireError: There is no such way.
    """
    if not way:
        return inner
    fields = parse(message)
    own = replaced(bytes_of(fields, way[0]), way[1:], inner)
    return build([(n, wire, own if n == way[0] else value) for n, wire, value in fields])
