"""The way into a file and back: `Compiled.save` and `spmd.load`, and what cannot go it."""

from __future__ import annotations

from collections.abc import Iterator
import itertools
import os
from pathlib import Path
import re
from typing import Any

import jax

import spmd
from spmd import _jax
from spmd._mesh import described_failure, plain_mesh, show_devices, show_mesh
from spmd._resolve import show_sharding
from spmd.bundle import _codec, _fingerprint, _format
from spmd.bundle._codec import Devices, Field, FormError, NotPlainError, UnwritableError
from spmd.bundle._fingerprint import Difference
from spmd.bundle._program import Program, decode_program, encode_program
from spmd.bundle._trim import calls_functions, trim
from spmd.errors import ArgumentError, BundleError, Failure, SpmdError, explain, show_value
from spmd.stages import Compiled, Types

# Writing


def save(compiled: Compiled, path: str | os.PathLike[str]) -> None:
    """Writes a program to a file, as `Compiled.save` says.

    Raises:
        TypeError: `compiled` is nothing that `spmd.pjit` compiled.
    """
    if not isinstance(compiled, Compiled):
        raise explain("bundle", [_no_program(compiled)])
    subject = compiled._call.subject
    kinds = (_loaded_failures, _callback_failures, _reference_failures, _mesh_failures)
    if failures := [failure for failures in kinds for failure in failures(compiled)]:
        raise explain(subject, failures)
    ordered = tuple(compiled.mesh.devices.flat)
    devices = Devices(ordered=ordered, by_id={d.id: d for d in ordered})
    try:
        code = _jax.files.serialized(compiled._executable)
        if not _is_complete(code, ordered):
            raise explain(subject, [_incomplete()])
        header = {
            "spmd": spmd.__version__,
            "fingerprint": _fingerprint.fingerprint(ordered),
            "custom_calls": _custom_calls(compiled),
            "program": encode_program(compiled),
        }
        sections = [*_slim(code, ordered), *map(_codec.constant_bytes, compiled._hoisted)]
        header["seal"] = _read_back(compiled, header, sections, devices).seal(*sections[:2])
        data = _format.pack(header, sections)
    except (NotPlainError, UnwritableError, FormError) as error:
        raise explain(subject, [_unwritable(error)]) from None
    except jax.errors.JaxRuntimeError as error:
        raise explain(subject, [_unserializable(error)]) from None
    _format.write(Path(path), data)


#: A program of fewer FLOPs runs in the thread that calls it, by XLA's own count.
_CHEAP = 1000


def _slim(code: bytes, devices: tuple[Any, ...]) -> tuple[bytes, bytes]:
    """Code that loads faster and runs alike, and what was taken out of it; empty if nothing was."""
    if devices[0].platform != "cpu" or (parts := trim(code)) is None:
        return code, b""
    try:
        flops, plan = _jax.files.planned(parts[0], devices)
    except jax.errors.JaxRuntimeError:
        return code, b""
    alike = flops >= _CHEAP and plan == _jax.files.planned(code, devices)[1]
    return parts if alike else (code, b"")


def _read_back(
    compiled: Compiled, header: dict[str, Any], sections: list[bytes], devices: Devices
) -> Program:
    """Reads what is to be written: what would come out otherwise is not written at all."""
    parts = _format.unpack(_format.pack(header, sections))
    again = decode_program(parts.header["program"], devices, parts.sections[2:])
    pairs = {
        "arguments": (again.stage.in_tree, compiled.in_tree),
        "results": (again.stage.out_tree, compiled.out_tree),
        "types of arguments": (again.stage._jaxpr.in_avals, [*compiled._jaxpr.in_avals]),
        "types of results": (again.stage._jaxpr.out_avals, [*compiled._jaxpr.out_avals]),
        "shardings of arguments": ([*again.shardings], [*compiled._shardings]),
        "shardings of results": ([*again.results], [*compiled._out_shardings()]),
        "static arguments": (again.stage._signature.statics, compiled._signature.statics),
    }
    for where, (got, expected) in pairs.items():
        if got != expected:
            raise FormError(where, str(expected)[:200], str(got)[:200])
    return again


# What is not written: whatever ties a program to the process that it is in


def _no_program(given: Any) -> Failure:
    of_jit = (jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled, type(jax.jit(_slim)))
    got, fix = show_value(given), ""
    if isinstance(given, of_jit):
        got = f"{type(given).__name__} of jax.jit"
        fix = "spmd.pjit in the place of jax.jit, which takes the same options"
    elif isinstance(given, (str, os.PathLike)):
        fix = "bundle.save(compiled, path): the program comes first"
    return Failure(
        what="is made of what spmd.pjit compiled, and of nothing else",
        expected="spmd.pjit(f, ...).lower(*args).compile()",
        got=got,
        fix=fix,
        error=ArgumentError,
    )


def _unsaved(why: str, **more: str) -> Failure:
    return Failure(what=f"cannot be saved: {why}", error=BundleError, **more)


def _loaded_failures(compiled: Compiled) -> Iterator[Failure]:
    if isinstance(compiled._jaxpr, Types):
        yield _unsaved("it was loaded from a file", fix="copy that file")


#: Primitives that call Python while a program runs, and what they are called in it.
_CALLS = ("host_tap", "host_call", "callback", "debug_print")
_CALLBACK_TARGETS = re.compile(r"xla_.*python.*callback|spmd_")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


def _callback_failures(compiled: Compiled) -> Iterator[Failure]:
    ties = _jax.files.ties_of(compiled._executable)
    ties += [t for t in _custom_calls(compiled) if _CALLBACK_TARGETS.match(t)]
    if not ties:
        return
    calls = [
        f"{name} at {line}" if line else name
        for name, line, _ in _jax.core.equations(compiled._jaxpr)
        if any(call in name for call in _CALLS)
    ]
    yield _unsaved(
        "it calls into the process that compiled it",
        expected="a program without taps, prints and callbacks",
        got="\n".join(dict.fromkeys(calls)) or ", ".join(ties),
        fix="compile it without them, such as behind a static argument",
    )


def _custom_calls(compiled: Compiled) -> list[str]:
    """Functions of libraries that the program calls by name and that a process must know."""
    known = _jax.files.custom_call_targets(compiled.mesh.devices.flat[0].platform)
    return sorted({*_TARGET.findall(compiled.as_text() or "")} & known)


def _reference_failures(compiled: Compiled) -> Iterator[Failure]:
    names = [compiled._call.arg_names[i] for i in compiled._refs]
    names += compiled._call.arg_names[: len(compiled._signature.consts)]
    fix = "pass the array, and return what it becomes"
    for name in dict.fromkeys(names):
        yield _unsaved(f"argument {name} is a mutable reference", fix=fix)


def _mesh_failures(compiled: Compiled) -> Iterator[Failure]:
    mesh: Any = compiled.mesh
    fix = ""
    if described_failure(mesh):
        got = f"{show_mesh(mesh)}, whose devices are only described"
        fix = "compile and save it where the devices are"
    elif any(d.process_index != jax.process_index() for d in mesh.devices.flat):
        got = f"{show_mesh(mesh)}, of several processes"
    else:
        return
    why = "it does not run on devices of this process alone"
    yield _unsaved(why, expected="a mesh of devices of this process", got=got, fix=fix)


def _is_complete(code: bytes, devices: tuple[Any, ...]) -> bool:
    """Whether XLA's CPU backend has given code with its functions.

    It leaves them out of a program that it has itself read, as JAX does from its persistent cache:
    such code loads, and fails when it runs. Code that never had functions, as that of one library
    call, calls none, and loses something else when it is read and written.
    """
    if devices[0].platform != "cpu" or _jax.files.OBJECT_FILE in code:
        return True
    return not calls_functions(code) and _jax.files.rewritten_size(code, [*devices]) != len(code)


def _incomplete() -> Failure:
    return _unsaved(
        "JAX took it from its persistent compilation cache, and XLA writes no complete code of "
        "such a program",
        expected="a program that was compiled in this process",
        fix="save it in a process with JAX_ENABLE_COMPILATION_CACHE=0",
    )


def _unwritable(error: NotPlainError | UnwritableError | FormError) -> Failure:
    if isinstance(error, UnwritableError):
        cls, reason = error.args
        return _unsaved(
            f"its arguments or results hold {cls}, {reason}",
            expected="tuples, lists, dicts, named tuples and registered classes of a module, with "
            "plain values beside their leaves",
        )
    if isinstance(error, FormError):
        why = f"its {error.where} would come back otherwise"
        return _unsaved(why, expected=error.expected, got=error.got)
    (value,) = error.args
    if isinstance(error, _codec.NanError):
        return _unsaved(
            "a static argument or a value beside leaves is NaN, which is not equal to itself, so "
            "no call of the loaded program would match",
            expected="values that are equal to what is read back",
            got=show_value(value),
            fix="pass it as an array, or None in its place",
        )
    is_sharding = isinstance(value, jax.sharding.Sharding)
    return _unsaved(
        "something that belongs to it has no written form",
        expected="static arguments of plain values, dtypes of JAX, meshes with named axes",
        got=show_sharding(value) if is_sharding else show_value(value),
    )


def _unserializable(error: Exception) -> Failure:
    got = str(error).partition("\n")[0][:300]
    # XLA's CPU backend puts the comparison of a sort where it runs, and cannot write it then.
    fix = "save it before its first call" if "is not serializable" in got else ""
    return _unsaved("the runtime gives no written form of its code", got=got, fix=fix)


# Reading


def load(path: str | os.PathLike[str], *, mesh: Any = None) -> Compiled:
    """Loads a program that `Compiled.save` has written: no trace, no lowering, no compile.

    The file holds compiled code, which runs with all rights of this process: the checksum finds
    damage, not malice. Load no file that you would not run.

    Args:
        path: The file.
        mesh: Devices to run on, of the same kind and in a mesh of the same axes; by default those
            of the same numbers as where it was saved.

    Returns:
        The program, which acts as the :class:`Compiled` that was saved. It has no jaxpr and no
        StableHLO; its HLO, analyses and report are there.

    Raises:
        ValueError: The file is no bundle, was changed or cut off, is for other versions, devices
            or flags, which are named, or has pytree nodes of a class that is not registered here.
        TypeError: `mesh` is no mesh.
        OSError: The file cannot be read.

    Example:
        >>> pjit(step, ...).lower(state, batch).compile().save("step.spmd")
        >>> spmd.load("step.spmd")(state, batch)
    """
    subject = f"bundle `{os.fspath(path)}`"
    data = Path(path).read_bytes()
    try:
        parts = _format.unpack(data)
        devices = _find_devices(subject, parts.header, plain_mesh(mesh))
        _start_libraries(subject, parts.header, devices)
        program = decode_program(parts.header["program"], devices, parts.sections[2:])
        if parts.header["seal"].string() != program.seal(*parts.sections[:2]):
            raise FormError("header.seal", "the digest of its code and types", "another")
    except FormError as error:
        raise _format.malformed(subject, error) from None
    code, kept = map(bytes, parts.sections[:2])
    try:
        return program.compiled(code, kept, devices)
    except (ValueError, RuntimeError) as error:  # JaxRuntimeError is one, and XLA's others too
        if isinstance(error, SpmdError):
            raise
        raise _unloaded(
            subject,
            "here: the runtime refuses its code",
            got=str(error).partition("\n")[0][:300],
            fix="compile and save it again here",
        ) from None


def _unloaded(
    subject: str, why: str, error: type[SpmdError] = BundleError, **more: str
) -> SpmdError:
    return explain(subject, [Failure(what=f"cannot be loaded {why}", error=error, **more)])


def _find_devices(subject: str, header: Field, mesh: Any) -> Devices:
    """The devices that a program is to run on, if it was compiled for what this process has."""
    sizes, ids = _codec.decode_main_mesh(header["program"])
    if mesh is not None:
        _check_mesh(subject, mesh, sizes)
    found, differences = compare(_fingerprint.decode(header["fingerprint"]), ids, mesh)
    if differences:
        raise explain(subject, [_fingerprint.failure_of(differences)])
    return Devices(ordered=found, by_id=dict(zip(ids, found, strict=True)))


def _check_mesh(subject: str, mesh: Any, sizes: dict[str, int]) -> None:
    if not isinstance(mesh, jax.sharding.Mesh):
        expected = "a spmd.Mesh or jax.sharding.Mesh"
        got = show_value(mesh)
        raise _unloaded(subject, "onto this mesh", ArgumentError, expected=expected, got=got)
    if [*mesh.shape.items()] != [*sizes.items()]:
        why = "onto this mesh: it was compiled for another"
        raise _unloaded(subject, why, given=show_mesh(mesh), expected=_codec.show_sizes(sizes))


def compare(wrote: Any, ids: list[int], mesh: Any) -> tuple[tuple[Any, ...], list[Difference]]:
    """The devices of this process for a program, and how the two differ.

    `wrote` is the fingerprint of the program. Without a mesh, its devices are those of `ids` here.
    """
    if mesh is not None:
        found = tuple(mesh.devices.flat)
        return found, _fingerprint.differences(wrote, _fingerprint.fingerprint(found))
    try:
        available = jax.devices(str(wrote.get("platform")))
    except RuntimeError:  # there is no such platform
        available = jax.devices()
    local = {d.id: d for d in available if d.process_index == jax.process_index()}
    found = tuple(local[i] for i in ids if i in local)
    here = _fingerprint.fingerprint(found or available)
    differences = _fingerprint.differences(wrote, {**here, "devices": str(len(found))})
    if len(found) < len(ids):
        shown = f"{len(ids)} of the numbers {_ranges(ids)}"
        missing = Difference(field="devices", bundle=shown, here=show_devices(available))
        differences = [missing if d.field == "devices" else d for d in differences]
    return found, differences


_MOST_RUNS = 8


def _ranges(ids: list[int]) -> str:
    """The numbers in order, a run of them as its ends."""
    groups = itertools.groupby(enumerate(sorted(ids)), lambda place: place[1] - place[0])
    runs = [[i for _, i in run] for _, run in groups]
    shown = [f"{run[0]}..{run[-1]}" if run[1:] else f"{run[0]}" for run in runs[:_MOST_RUNS]]
    return ", ".join(shown + ["…"] * (len(runs) > _MOST_RUNS))


def _start_libraries(subject: str, header: Field, devices: Devices) -> None:
    """Makes the functions that a program calls known, as lowering it would have done."""
    wanted = header["custom_calls"].strings()
    missing = {*wanted} - _jax.files.custom_call_targets(devices.ordered[0].platform)
    if missing:
        raise _unloaded(
            subject,
            "here: it calls functions that are not registered",
            expected=", ".join(sorted(missing)),
            fix="import what registers them with jax.ffi before",
        )
    if any(name.startswith("lapack") for name in wanted):
        _jax.files.start_lapack()
