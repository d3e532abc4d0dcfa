"""What of a compiled program cannot be in a file: whatever ties it to the process it is in."""

from __future__ import annotations

import re
from typing import Any

import jax

from spmd import _jax
from spmd._mesh import described_failure, show_mesh
from spmd.bundle._trim import calls_functions
from spmd.errors import BundleError, Failure
from spmd.stages import Compiled, Types

#: Primitives that call Python while a program runs, and what they are called in it.
_CALLS = ("host_tap", "host_call", "callback", "debug_print")
_CALLBACK_TARGETS = re.compile(r"xla_.*python.*callback|spmd_")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


def refusals(compiled: Compiled) -> list[Failure]:
    """All that keeps a program out of a file, in the order in which a user mends it."""
    kinds = (_loaded_failures, _callback_failures, _reference_failures, _mesh_failures)
    return [failure for failures in kinds for failure in failures(compiled)]


def _loaded_failures(compiled: Compiled) -> list[Failure]:
    if not isinstance(compiled._jaxpr, Types):
        return []
    return [
        Failure(
            what="cannot be saved: it was loaded from a file",
            fix="copy that file",
            error=BundleError,
        )
    ]


def incomplete_failure(compiled: Compiled, code: bytes) -> Failure | None:
    """XLA's CPU backend has given code without its functions.

    It does so for a program that it has itself read, as JAX does from its persistent cache: such
    code loads, and fails when it runs. Code that never had functions, as that of one library call,
    calls none, and loses something else when it is read and written.
    """
    if _platform(compiled) != "cpu" or _jax.files.OBJECT_FILE in code:
        return None
    devices = list(compiled.mesh.devices.flat)
    if not calls_functions(code) and _jax.files.rewritten_size(code, devices) != len(code):
        return None
    return Failure(
        what="cannot be saved: JAX took it from its persistent compilation cache, and XLA writes "
        "no complete code of such a program",
        expected="a program that was compiled in this process",
        fix="save it in a process with JAX_ENABLE_COMPILATION_CACHE=0",
        error=BundleError,
    )


def _callback_failures(compiled: Compiled) -> list[Failure]:
    ties = _jax.files.ties_of(compiled._executable)
    ties += [t for t in custom_calls(compiled) if _CALLBACK_TARGETS.match(t)]
    if not ties:
        return []
    calls = [
        f"{name} at {line}" if line else name
        for name, line, _ in _jax.core.equations(compiled._jaxpr)
        if any(call in name for call in _CALLS)
    ]
    return [
        Failure(
            what="cannot be saved: it calls into the process that compiled it",
            expected="a program without taps, prints and callbacks",
            got="\n".join(dict.fromkeys(calls)) or ", ".join(ties),
            fix="compile it without them, such as behind a static argument",
            error=BundleError,
        )
    ]


def custom_calls(compiled: Compiled) -> list[str]:
    """Functions of libraries that the program calls by name and that a process must know."""
    known = _jax.files.custom_call_targets(_platform(compiled))
    return sorted({*_TARGET.findall(compiled.as_text() or "")} & known)


def _platform(compiled: Compiled) -> str:
    return next(iter(compiled.mesh.devices.flat)).platform


def _reference_failures(compiled: Compiled) -> list[Failure]:
    names = [compiled._call.arg_names[i] for i in compiled._refs]
    names += compiled._call.arg_names[: len(compiled._signature.consts)]
    return [
        Failure(
            what=f"cannot be saved: argument {name} is a mutable reference",
            fix="pass the array, and return what it becomes",
            error=BundleError,
        )
        for name in dict.fromkeys(names)
    ]


def _mesh_failures(compiled: Compiled) -> list[Failure]:
    mesh: Any = compiled.mesh
    fix = ""
    if described_failure(mesh):
        got = f"{show_mesh(mesh)}, whose devices are only described"
        fix = "compile and save it where the devices are"
    elif any(d.process_index != jax.process_index() for d in mesh.devices.flat):
        got = f"{show_mesh(mesh)}, of several processes"
    else:
        return []
    return [
        Failure(
            what="cannot be saved: it does not run on devices of this process alone",
            expected="a mesh of devices of this process",
            got=got,
            fix=fix,
            error=BundleError,
        )
    ]
