"""The bytes of a bundle: a fixed prefix, a JSON header, sections, and a checksum of all of it.

========================  ============================================================
8 bytes                   ``MAGIC``
4 bytes, little endian    version of the format
4 bytes                   length of the header
header                    a JSON object, ASCII; its ``sections`` are the lengths of those
sections                  one after the other: the program in two parts, then constants
32 bytes                  SHA-256 of everything before
========================  ============================================================

Nothing of a file is looked at, beside magic and version, before its checksum is found right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import hashlib
import itertools
import json
import os
from pathlib import Path
import secrets
import stat
import struct
from typing import Any, NamedTuple, NoReturn

from spmd.bundle._codec import Field, FormError
from spmd.errors import BundleError, Failure, SpmdError, explain

#: The first byte is no text; the line ends show a transfer that changed them.
MAGIC = b"\x93SPMD\r\n\x1a"
VERSION = 1

_PREFIX = struct.Struct("<8sII")
_DIGEST = hashlib.sha256().digest_size
_CODE_SECTIONS, _MOST_SECTIONS = 2, 1 << 20


class Parts(NamedTuple):
    """What a bundle consists of: the header, not yet validated, and views of the sections."""

    header: Field
    sections: tuple[memoryview, ...]


def pack(header: Mapping[str, Any], sections: Sequence[bytes]) -> bytes:
    """The bytes of a bundle; the lengths of the sections are added to its header."""
    data = {**header, "sections": [len(s) for s in sections]}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii")
    body = b"".join([_PREFIX.pack(MAGIC, VERSION, len(text)), text, *sections])
    return body + hashlib.sha256(body).digest()


def unpack(data: bytes) -> Parts:
    """Takes a bundle apart; a `FormError` where it is none, was changed, or has no header."""
    whole = memoryview(data)
    if whole[: len(MAGIC)] != MAGIC[: len(whole)] or not data:
        start = f"the bytes {data[: len(MAGIC)].hex(' ')}" if data else "an empty file"
        raise FormError("file", "a bundle of spmd, which starts as one", start)
    if len(whole) < _PREFIX.size + _DIGEST:
        raise FormError("file", f"at least {_PREFIX.size + _DIGEST} bytes", f"{len(whole)} bytes")
    _, version, length = _PREFIX.unpack_from(whole)
    if version != VERSION:
        raise FormError("format", f"version {VERSION}", f"version {version}")
    body, digest = whole[:-_DIGEST], whole[-_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise FormError("checksum", "the SHA-256 of the file", "another: it was changed or cut off")
    if _PREFIX.size + length > len(body):
        raise FormError("header", f"{length} bytes", f"a file of {len(whole)} bytes")
    header = Field(_json(bytes(body[_PREFIX.size : _PREFIX.size + length])), "header")
    return Parts(header=header, sections=_sections(header, body[_PREFIX.size + length :]))


def _json(text: bytes) -> Any:
    try:
        return json.loads(text.decode("ascii"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormError("header", "JSON", f"{type(error).__name__}: {error}"[:200]) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _sections(header: Field, rest: memoryview) -> tuple[memoryview, ...]:
    lengths = [f.integer(0, len(rest)) for f in header["sections"].items(_MOST_SECTIONS)]
    if sum(lengths) != len(rest) or len(lengths) < _CODE_SECTIONS:
        got = f"{len(lengths)} of {sum(lengths)} bytes"
        raise FormError("header.sections", f"sections of {len(rest)} bytes together", got)
    ends = itertools.accumulate(lengths)
    return tuple(rest[end - length : end] for length, end in zip(lengths, ends, strict=True))


def write(path: Path, data: bytes) -> None:
    """Writes a file so that there is the old one or all of the new one, never a part.

    A device or a named pipe is written to; it is no file that could be replaced.
    """
    path = path.resolve()  # a link stays one
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def malformed(subject: str, error: FormError) -> SpmdError:
    """The exception that tells a user what is wrong with a file."""
    what = f"cannot be read: its {error.where} is not what it has to be"
    fix = "copy or save it again"
    if error.where == "file":
        what = "is no bundle, or only the beginning of one"
        fix = "give the path that Compiled.save wrote"
    failure = Failure(what=what, expected=error.expected, got=error.got, fix=fix, error=BundleError)
    return explain(subject, [failure])
