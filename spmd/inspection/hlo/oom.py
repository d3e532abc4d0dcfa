"""Reads what the TPU compiler says about a program that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import re

from spmd.errors import Failure, OutOfMemoryError
from spmd.inspection.hlo.layouts import leaves
from spmd.inspection.records.report import Buffer, Source
from spmd.inspection.records.sizes import show_bytes

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
# Before it plans anything, the compiler adds up what must be there at once, arguments and outputs
# included, and calls the sum temporaries.
_EARLY = re.compile(
    rf"total memory required for [\w ]+ \({_SIZE}\) exceeds available HBM \({_SIZE}\)"
)
_LATE = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_EXCEEDED = re.compile(rf"Exceeded hbm capacity by {_SIZE}")
_UNSIZED = re.compile(r"Ran out of memory (?:on HBM|in memory space hbm)\b")

_PLACE = re.compile(r"^ *\d+\. Size: +" + _SIZE, re.MULTILINE)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FILE = re.compile(r'source_file="([^"]*)"')
_LINE = re.compile(r"source_line=(\d+)")
_SHAPE = re.compile(r"^ *Shape: (.*)$", re.MULTILINE)
_LABEL = re.compile(r"^ *XLA label: (.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A verdict of the compiler.

    Attributes:
        needed: bytes on each device, to the digits that the compiler gives, arguments and outputs
            included; None where it gives none, or rounds them to what there is.
        available: bytes that there are; None where it does not say.
        buffers: the largest arrays that it names, largest first.
    """

    needed: int | None
    available: int | None
    buffers: tuple[Buffer, ...] = ()


def out_of_memory(error: object) -> OutOfMemory | None:
    """What an exception, its causes included, or the text of one says about a device's memory.

    It is None where that is about something else, on-chip memory included.
    """
    for text in _texts(error):
        early = _EARLY.search(text)
        if found := early or _LATE.search(text):
            needed, available = _bytes(*found.groups()[:2]), _bytes(*found.groups()[2:])
            # What is too much has more digits than the sum.
            if not early and (excess := _EXCEEDED.search(text)):
                needed = available + _bytes(*excess.groups())
            return OutOfMemory(
                needed=needed if needed > available else None,
                available=available,
                buffers=() if early else _buffers(text),
            )
        if _UNSIZED.search(text):
            return OutOfMemory(needed=None, available=None, buffers=_buffers(text))
    return None


def explain_oom(error: object) -> str | None:
    """An exception of the compiler about too little memory, in readable lines.

    Args:
        error: an exception, whose causes are read too, or the text of one.

    Returns:
        Text for a message, whose first line has no subject; None for another exception.

    Example:
        needs 17.0 GiB of 15.8 GiB on each device: 1.2 GiB too much
          largest
            8.0 GiB  temporary  f32[16,1024,131072]  jit(step)/dot_general
    """
    verdict = out_of_memory(error)
    if verdict is None:
        return None
    return "\n".join([shortage(verdict), *buffer_lines(verdict.buffers)])


def oom_failure(error: object, given: str = "") -> Failure | None:
    """An exception of the compiler about too little memory, as a failure to explain.

    Args:
        error: as in `explain_oom`.
        given: what the program was compiled for.

    Returns:
        The failure; None for another exception.
    """
    verdict = out_of_memory(error)
    if verdict is None:
        return None
    return Failure(
        what=f"does not fit: it {shortage(verdict)}",
        given=given,
        got="\n".join(line.strip() for line in buffer_lines(verdict.buffers)),
        fix="spmd.fits(f, *args, vary=(argument, dimension)) finds the largest size that fits",
        error=OutOfMemoryError,
    )


def shortage(verdict: OutOfMemory, where: str = "each device") -> str:
    """What a verdict says, as a clause: how much is needed, of how much, and the difference."""
    if verdict.available is None:
        return f"needs more memory than {where} has"
    if verdict.needed is None:
        return f"needs a little more than the {show_bytes(verdict.available)} on {where}"
    excess = show_bytes(verdict.needed - verdict.available)
    given = f"{show_bytes(verdict.needed)} of {show_bytes(verdict.available)}"
    return f"needs {given} on {where}: {excess} too much"


def buffer_lines(buffers: tuple[Buffer, ...], limit: int = 5) -> Iterator[str]:
    """The largest arrays, one a line, below a title."""
    if buffers:
        yield "  largest"
    for buffer in buffers[:limit]:
        place = [str(p) for p in (buffer.source, buffer.op_name) if p] or [buffer.name]
        yield f"    {show_bytes(buffer.nbytes):>9}  {buffer.kind:<9}  {buffer.shape}  " + "  ".join(
            place
        )


def _texts(error: object) -> Iterator[str]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield str(error)
        cause = getattr(error, "__cause__", None)
        error = cause if cause is not None else getattr(error, "__context__", None)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _buffers(text: str) -> tuple[Buffer, ...]:
    starts = [found.start() for found in _PLACE.finditer(text)]
    parts = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    found = [buffer for part in parts if (buffer := _buffer(part)) is not None]
    return tuple(sorted(found, key=lambda one: -one.nbytes))


def _buffer(part: str) -> Buffer | None:
    shape, label = _SHAPE.search(part), _LABEL.search(part)
    arrays = leaves(shape[1], True) if shape and not shape[1].startswith("(") else ()
    if not arrays:
        return None
    name = label[1].strip() if label else ""
    kind = next((k for k in ("argument", "output") if name.lower().startswith(k)), "temporary")
    op_name, file, line = (p.search(part) for p in (_OP_NAME, _FILE, _LINE))
    source = None
    if file and line:
        source = Source(file=file[1], line=int(line[1]), column=0, function="")
    return Buffer(
        name=name.partition(" = ")[0],
        shape=arrays[0].shape,
        nbytes=arrays[0].nbytes,
        kind=kind,
        source=source,
        op_name=op_name[1].replace("\\'", "'") if op_name else "",
        at_peak=True,
    )
