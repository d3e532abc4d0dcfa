"""Executables as bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import compiler, core
from jax._src.interpreters import pxla
from jax._src.lib import lapack, xla_client
import numpy as np


def serialized(executable: Any) -> bytes:
    """The runtime's own form of a program; a JaxRuntimeError where it has none."""
    return executable.xla_executable.serialize()


#: How the functions of a program start in its written form, on Linux.
OBJECT_FILE = b"\x7fELF"


def rewritten_size(data: bytes, devices: Sequence[Any]) -> int:
    """The size, in bytes, of what :func:`serialized` gives of a program that was read again."""
    return len(_read_program(data, devices).serialize())


def planned(data: bytes, devices: Sequence[Any]) -> tuple[float, list[Any]]:
    """What the runtime plans by when it reads what :func:`serialized` gave.

    These are FLOPs by its own count, and all else that tells of its inputs, results and memory.
    """
    program = _read_program(data, devices)
    stats = program.get_compiled_memory_stats()
    sizes = {n: getattr(stats, n) for n in dir(stats) if n.endswith(("_in_bytes", "_bytes"))}
    layouts = program.get_parameter_layouts(), program.get_output_layouts()
    shardings = program.get_parameter_shardings(), program.get_output_shardings()
    plan = [*layouts, *([*map(str, found or ())] for found in shardings), sizes]
    return program.cost_analysis().get("flops", 0.0), plan


def _read_program(data: bytes, devices: Sequence[Any]) -> Any:
    assignment = np.array([[d.id for d in devices]])
    # Without the options it keeps the devices that it was compiled for.
    options = compiler.get_compile_options(1, len(devices), assignment)
    device_list = xla_client.DeviceList(tuple(devices))
    return devices[0].client.deserialize_executable(data, device_list, options)


def parts_of(executable: Any) -> Any:
    """What JAX knows of a MeshExecutable beside the runtime's program.

    `name`, `input_avals`, `input_shardings`, `output_avals`, `output_shardings`, `kept_var_idx`
    and `committed` are needed to build it again; constants count among the inputs.
    """
    return executable._unloaded_executable


def kept_inputs(executable: Any) -> dict[int, tuple[Any, Any]]:
    """Sharding and layout of each input that a MeshExecutable has, by its number, constants first.

    What the program does not use is left out.
    """
    pairs = zip(executable._in_shardings, executable._xla_in_layouts, strict=True)
    return dict(zip(sorted(executable._kept_var_idx), pairs, strict=True))


def output_layouts(executable: Any) -> Sequence[Any]:
    """The layout of each result of a MeshExecutable."""
    return executable._xla_out_layouts


def ties_of(executable: Any) -> list[str]:
    """What ties a program to the process that compiled it."""
    parts = executable._unloaded_executable
    if parts is None:
        return ["a form that JAX does not keep"]
    found = [
        *(f"the effect {e}" for e in (*parts.ordered_effects, *parts.unordered_effects)),
        *("a callback into Python" for _ in parts.host_callbacks or parts.keepalive or ()),
        *("an argument in a layout of its own" for x in parts.dispatch_in_layouts if x),
    ]
    return [*dict.fromkeys(found)]


def load_executable(
    data: bytes,
    devices: Sequence[Any],
    *,
    name: str,
    in_avals: Sequence[Any],
    kept: Sequence[int],
    in_shardings: Sequence[Any],
    out_avals: Sequence[Any],
    out_shardings: Sequence[Any],
    committed: bool,
) -> Any:
    """Makes a MeshExecutable of what :func:`serialized` gave, which the runtime trusts.

    The devices are in the order in which it numbers them. Of the inputs, constants first, the
    program has those of `kept`, and a sharding for each of these. ValueError: the program has
    others, or other results; JaxRuntimeError: the runtime refuses it.
    """
    program = _read_program(data, devices)
    counts = len(program.get_parameter_layouts()), len(program.get_output_layouts())
    if counts != (len(kept), len(out_avals)):
        raise ValueError(f"the program has {counts[0]} inputs and {counts[1]} results")
    read = [in_avals[i] for i in kept]
    in_layouts, out_layouts = pxla._get_layouts_from_executable(
        program, [None] * len(kept), [None] * len(out_avals), 0, read, out_avals
    )
    debug_info = core.DebugInfo("pjit", name, None, None)
    return pxla.UnloadedMeshExecutable(
        xla_executable=program,
        device_list=xla_client.DeviceList(tuple(devices)),
        backend=devices[0].client,
        input_avals=read,
        input_shardings=[*in_shardings],
        output_avals=[*out_avals],
        output_shardings=[*out_shardings],
        committed=committed,
        name=name,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx={*kept},
        mut=None,
        xla_in_layouts=in_layouts,
        dispatch_in_layouts=[None] * len(kept),
        xla_out_layouts=out_layouts,
        all_args_info=pxla.AllArgsInfo(in_avals=[*in_avals], debug_info=debug_info),
        pgle_profiler=None,
    ).load()


def custom_call_targets(platform: str) -> set[str]:
    """Functions of libraries that programs may call here, by name."""
    return {*xla_client.custom_call_targets(_XLA_NAMES.get(platform, platform))}


_XLA_NAMES = {"cpu": "Host", "gpu": "CUDA", "cuda": "CUDA", "rocm": "ROCM"}


#: Finds the functions of LAPACK, as a lowering does: a call before that ends the process.
start_lapack: Any = lapack._lapack.initialize
