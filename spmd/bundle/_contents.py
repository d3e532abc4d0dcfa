"""What a bundle holds, read from its header alone: the code is given to nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import os
from pathlib import Path

from spmd import _jax
from spmd.bundle import _fingerprint, _format
from spmd.bundle._api import compare
from spmd.bundle._codec import Field, FormError, decode_aval, decode_main_mesh
from spmd.bundle._fingerprint import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An argument or a result of a program.

    Attributes:
        name: What the user calls it.
        type: Its dtype and shape, such as ``f32[512,64]``.
        sharding: Its spec, such as ``P('data', None)``, or what else says where it lies.
        donated: Whether the program may reuse its buffers.
    """

    name: str
    type: str
    sharding: str
    donated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a bundle holds.

    Attributes:
        name: The function.
        mesh: Axis sizes by name.
        devices: The numbers of the devices that it was compiled for, in mesh order.
        arguments: Per flat argument.
        results: Per flat result.
        compiled_for: Versions, devices, flags and configuration by name.
        spmd: The version of this library that wrote it.
        code_bytes: Size of the compiled code, in bytes.
        total_bytes: Size of the file, in bytes.
        differences: Why this process could not load it; empty if it could.
    """

    name: str
    mesh: Mapping[str, int]
    devices: tuple[int, ...]
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]
    compiled_for: Mapping[str, str | tuple[str, ...]]
    spmd: str
    code_bytes: int
    total_bytes: int
    differences: tuple[Difference, ...]


def contents(path: str | os.PathLike[str]) -> Contents:
    """Reads what a bundle holds; its code is not loaded, and no class of its trees is looked up.

    Args:
        path: The file.

    Raises:
        ValueError: The file is no bundle, or was changed or cut off.
        OSError: The file cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        return _contents(_format.unpack(data), len(data))
    except FormError as error:
        raise _format.malformed(f"bundle `{os.fspath(path)}`", error) from None


def _contents(parts: _format.Parts, size: int) -> Contents:
    header, program = parts.header, parts.header["program"]
    mesh, ids = decode_main_mesh(program)
    wrote = _fingerprint.decode(header["fingerprint"])
    avals = [_show_aval(f) for f in program["avals"].items()]
    shardings = [_show_sharding(f) for f in program["shardings"].items()]
    arguments = [f.row(5) for f in program["arguments"].items()]
    results = [f.row(2) for f in program["results"].items()]
    names = program["out_names"].strings()
    return Contents(
        name=program["name"].string(),
        mesh=mesh,
        devices=tuple(ids),
        arguments=tuple(
            Value(name=n.string(), type=a.of(avals), sharding=s.of(shardings), donated=d.boolean())
            for n, a, s, _, d in arguments
        ),
        results=tuple(
            Value(
                name=names[i] if i < len(names) else f"result {i}",
                type=a.of(avals),
                sharding=s.of(shardings),
                donated=False,
            )
            for i, (a, s) in enumerate(results)
        ),
        compiled_for=wrote,
        spmd=header["spmd"].string(),
        code_bytes=len(parts.sections[0]),
        total_bytes=size,
        differences=tuple(compare(wrote, ids, None)[1]),
    )


def _show_aval(field: Field) -> str:
    *rest, _ = field.row(5)
    plain = Field([*(f.value for f in rest), False], field.where)  # its mesh needs no devices
    return _jax.core.short_aval(decode_aval(plain, None))


def _show_sharding(field: Field) -> str:
    kind, inner = field.only()
    if kind != "named":
        return kind
    _, entries, memory = inner.row(3)
    parts = ", ".join(_show_entry(e) for e in entries.items(64))
    usual = memory.value is None or memory.string() in ("device", "unpinned_host")
    return f"P({parts})" + ("" if usual else f" in {memory.string()}")


def _show_entry(field: Field) -> str:
    if type(field.value) is list:
        return repr(field.strings())
    return repr(None if field.value is None else field.string())
