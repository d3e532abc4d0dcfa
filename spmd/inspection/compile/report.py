"""From a function, or any stage of it, to a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import itertools
import linecache
import logging
import os
import re
from typing import Any
import warnings

import jax

import spmd
from spmd import _jax, _mesh, _resolve, stages
from spmd.errors import ReportError
from spmd.inspection.compile import program
from spmd.inspection.compile.arguments import arguments_of
from spmd.inspection.compile.timed import (
    Asked,
    asked,
    time_of_program,
    with_model_flops,
    with_scatters,
)
from spmd.inspection.compile.warned import compile_and_catch, warnings_of
from spmd.inspection.findings.rematerialization import rematerializations
from spmd.inspection.findings.rules import Findings, Program, findings, ignored_constraints
from spmd.inspection.hlo.calls import visits
from spmd.inspection.hlo.cost import cost_of
from spmd.inspection.hlo.ledger import ledger
from spmd.inspection.hlo.text import Module, parse_modules
from spmd.inspection.records.arrays import Excerpt
from spmd.inspection.records.later import Later, without_findings
from spmd.inspection.records.names import is_library
from spmd.inspection.records.report import (
    Collective,
    Cost,
    Finding,
    Memory,
    Report,
    Reshard,
    Source,
    Unread,
)
from spmd.inspection.shardy.passes import frames_of, module_of, operations_in
from spmd.inspection.shardy.propagation import Propagation, propagate
from spmd.inspection.shardy.why import function_of, origins_later

logger = logging.getLogger(__name__)


def report(
    f: Any,
    /,
    *args: Any,
    mesh: Any = None,
    chip: Any = None,
    model_flops: float | None = None,
    **kwargs: Any,
) -> Report:
    """Compile a function, and say what the program does between and on its devices.

    Nothing is run: the arguments may be arrays or `jax.ShapeDtypeStruct`s.

    Args:
        f: a function of `spmd.pjit` or `jax.jit`, or what one of them was traced, lowered or
            compiled to, `jax.stages.Lowered` and `jax.stages.Compiled` included; also a method that
            is one, and a `functools.partial` of one.
        *args: what the function is called with; none for a stage, which has them already.
        mesh: the mesh to compile for, real or from `spmd.topology`. By default it is the current
            mesh or the function's own, and for `jax.jit` the mesh of its shardings.
        chip: whose figures `Report.time` is to use: a `spmd.inspection.Chip`, a name of
            `spmd.inspection.CHIPS`, or the file of ``spmd calibrate``. By default those of the
            devices; CPUs have none.
        model_flops: floating-point operations of one call on all devices, for the MFU. By default
            those of the products in the program before it is partitioned.
        **kwargs: keyword arguments of the call. For one called as an option here, report
            ``f.lower(...)``.

    Returns:
        The collectives with their lines, axes and bytes, the cost, the memory, and the time.

    Raises:
        TypeError: `f` is nothing that can be compiled, a stage is given arguments, `mesh` is no
            mesh, or there is no such chip.
        RuntimeError: the program is for another mesh.

    Example:
        report = spmd.report(step, state, batch)
        print(report)
    """
    wish = asked(chip, model_flops, subject="report")
    if isinstance(f, Report):
        given = {"chip": chip, "model_flops": model_flops}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        program.refuse_arguments(f, args, kwargs, subject="report", verb="report")
        return f
    with program.entered(mesh):
        with ignored_constraints() as ignored:
            found = program.lower(f, args, kwargs, subject="report", verb="report")
        if isinstance(found, program.COMPILED):
            compiled, lowered, is_new = found, program.lowered_of(found), False
        else:
            is_new = not _jax.lowering.is_compiled(found._lowering)
            compiled, lowered = compile_and_catch(found), found
        own = program.mesh_of(compiled, mesh)
        with _keeping_all():
            made = _report_of(compiled, own, lowered, [*ignored.values()], wish)
        if not is_new and _jax.lowering.may_have_other_lines() and _has_other_lines(made, lowered):
            warnings.warn(_OTHER_LINES, stacklevel=2)
        return made


@contextlib.contextmanager
def _keeping_all() -> Iterator[None]:
    """While a program is read, nothing is looked through for garbage.

    Hardly anything of what is read becomes garbage meanwhile, and to look through it, and through
    all that JAX keeps, takes up to a quarter of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_OTHER_LINES = (
    "report: the lines are those of another version of the source. Before the report, JAX took the "
    "program from its persistent compilation cache, whose key leaves lines out. Report a function "
    "before it is called or compiled, or set jax_compilation_cache_include_metadata_in_key."
)


def _has_other_lines(report: Report, lowered: Any) -> bool:
    """Whether a collective has a line that the program was not lowered from."""
    used = {(one.source.file, one.source.line) for one in report.collectives if one.source}
    if lowered is None or not used:
        return False
    module = lowered.compiler_ir()
    with module.context:
        frames = (frames_of(one.location) for one in operations_in(module.operation))
        return bool(used - {(frame.file, frame.line) for found in frames for frame in found})


def _report_of(
    compiled: Any, mesh: Any, lowered: Any, ignored: Sequence[Source], wish: Asked
) -> Report:
    devices = program.devices_of(compiled)
    axis_sizes = dict(mesh.shape) if mesh is not None else {}
    modules = parse_modules(program.text_of(compiled))
    visited = [visits(module) for module in modules]
    pairs = [*zip(modules, visited, strict=True)]
    for_cpu = devices[0].platform == "cpu"
    found = tuple(one for m, v in pairs for one in ledger(m, v, axis_sizes, for_cpu=for_cpu))
    memory = program.memory_plan(compiled, modules)
    parameters = _parameter_names(modules)
    unread = [line for module in modules for line in module.unread]
    report = Report(
        name=_name(compiled, modules),
        backend=devices[0].platform,
        device_kind=devices[0].device_kind,
        stand_in=for_cpu,
        mesh=axis_sizes,
        num_devices=len(devices),
        versions=versions(),
        collectives=found,
        cost=sum((cost_of(m, v) for m, v in pairs), Cost.zeros()),
        memory=memory,
        reshards=_reshards(compiled) if isinstance(compiled, stages.Compiled) else (),
        arguments=arguments_of(compiled, mesh, parameters),
        device_ids=tuple(device.id for device in devices),
        excerpts=excerpts(found, memory),
        unread=Unread(lines=len(unread), first=unread[0].strip()[:200]) if unread else None,
        _origins=origins_later(lowered, found, subject="report"),
    )
    facts = Program(
        report=report,
        modules=pairs,
        parameters=parameters,
        donated=_donated(compiled, report),
        rematerialized=rematerializations(warnings_of(compiled), modules[-1], axis_sizes)
        if modules
        else (),
        # On one device, and meant for one, there is nothing to constrain.
        ignored=ignored if len(devices) > 1 or _is_partitioned_here() else (),
    )
    work_out, words = findings(facts), _words(compiled)
    # Not the stage: it holds the arrays that a function closes over.
    module = _foreseen(functools.partial(module_of, lowered, subject="report")) if lowered else None
    time = time_of_program(pairs, axis_sizes, devices, wish)
    if time is not None:
        time = with_scatters(with_model_flops(time, lowered, wish, devices), found)
    later = Later(functools.partial(_findings, work_out, words, module))
    return without_findings(dataclasses.replace(report, time=time, _findings_later=later))


def _findings(work_out: Findings, words: Mapping[str, str], module: Any) -> tuple[Finding, ...]:
    with _keeping_all():
        return _spoken(work_out(_propagation(module)), words)


def _is_partitioned_here() -> bool:
    mesh = _mesh.current_mesh()
    return mesh is not None and mesh.size > 1


def _words(compiled: Any) -> Mapping[str, str]:
    """What `spmd.pjit` calls by other names than what was called."""
    if not isinstance(compiled, stages.Compiled):
        return {
            "in_axis_resources": "in_shardings of jax.jit, as NamedSharding(mesh, spec)",
            "with_sharding_constraint": "jax.lax.with_sharding_constraint",
        }
    given = any(name.startswith("in_shardings") for name in compiled._call.given)
    return {"in_axis_resources": "in_shardings"} if given else {}


def _spoken(found: tuple[Finding, ...], words: Mapping[str, str]) -> tuple[Finding, ...]:
    """Findings in the words of what was called: rules write those of `spmd.pjit`."""
    if not words:
        return found
    pattern = re.compile("|".join(words))
    return tuple(
        dataclasses.replace(one, fix=pattern.sub(lambda word: words[word[0]], one.fix))
        for one in found
    )


def _propagation(module: Any) -> Propagation | None:
    """How the values of a program are split, where that can be known."""
    if module is None:
        return None
    return _foreseen(functools.partial(propagate, module, subject="report", steps=False))


def _foreseen(ask: Callable[[], Any]) -> Any:
    """What Shardy's passes tell of a program; None where they cannot."""
    try:
        return ask()
    except ReportError:
        return None  # lowered for another partitioner, or by a jaxlib without the passes
    except Exception:  # whatever a program has that is not foreseen, it has a report
        logger.warning("report: its findings are not complete", exc_info=True)
        return None


def _donated(compiled: Any, report: Report) -> list[str]:
    """Paths of the arguments that were given away."""
    if isinstance(compiled, stages.Compiled):
        given = {*compiled.donate_argnums}
        flags = [i in given for i in range(len(report.arguments))]
    else:
        flags = [info.donated for info in jax.tree.leaves(compiled.args_info)]
    if len(flags) != len(report.arguments):
        return []
    return [a.path for a, flag in zip(report.arguments, flags, strict=True) if flag]


def versions() -> Mapping[str, str]:
    """Versions of what decides how a program is compiled."""
    return {
        "spmd": spmd.__version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }


def _name(compiled: Any, modules: tuple[Module, ...]) -> str:
    if isinstance(compiled, stages.Compiled):
        return compiled.name
    return function_of(modules[0].name) if modules else ""


def _parameter_names(modules: tuple[Module, ...]) -> list[str]:
    """Paths of the parameters of the last module, which holds the program."""
    entry = modules[-1].computations.get(modules[-1].entry) if modules else None
    found = [one for one in entry.instructions if one.opcode == "parameter"] if entry else []
    return [one.op_name for one in sorted(found, key=lambda one: int(one.operands))]


# Arguments that move


def _reshards(compiled: stages.Compiled) -> tuple[Reshard, ...]:
    return tuple(
        Reshard(
            argument=name,
            given=_resolve.show_sharding(given),
            wanted=_resolve.show_sharding(wanted),
            nbytes=_moved_bytes(aval, given, wanted),
        )
        for name, aval, given, wanted in compiled._moved_arguments()
    )


def _moved_bytes(aval: Any, given: Any, wanted: Any) -> int:
    """Bytes that the device which lacks most of its new shard has to receive."""
    held = given.devices_indices_map(aval.shape)
    needed = wanted.devices_indices_map(aval.shape)
    missing = (
        _count(index, index, aval.shape) - _count(index, held[device], aval.shape)
        for device, index in needed.items()
    )
    # Keys of random numbers have a dtype that NumPy does not know, and a size.
    return max(missing, default=0) * aval.dtype.itemsize


def _count(a: tuple[slice, ...], b: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    """Elements that two blocks of an array have in common."""
    common = 1
    for x, y, size in zip(a, b, shape, strict=True):
        (x0, x1, _), (y0, y1, _) = x.indices(size), y.indices(size)
        common *= max(0, min(x1, y1) - max(x0, y0))
    return common


# Source text

AROUND = 4
"""Lines of context before and after each line that is pointed at."""
_WIDTH = 500


def excerpts(found: Iterable[Collective], memory: Memory | None) -> tuple[Excerpt, ...]:
    """The lines around the frames of collectives and around the lines of buffers, by file and line.

    Libraries are left out, and so are files that cannot be read, and lines that a file no longer
    has. Of a line longer than 500 characters the first 500 are kept.
    """
    sites = [site for one in found for site in (one, *one.parts)]
    pointed = [place for site in sites for place in (*site.frames, site.source)]
    pointed += [buffer.source for buffer in memory.buffers] if memory else []
    lines: dict[str, set[int]] = {}
    for source in filter(None, pointed):
        lines.setdefault(source.file, set()).add(source.line)
    files = (file for file in sorted(lines) if not is_library(file))
    return tuple(excerpt for file in files for excerpt in _of_file(file, lines[file]))


def _of_file(file: str, lines: Iterable[int]) -> Iterator[Excerpt]:
    # Cells of a notebook are in the cache and in no file. A relative name would be looked for in
    # all of sys.path, and another file found.
    if file not in linecache.cache and not os.path.isabs(file):
        return
    linecache.checkcache(file)
    text = linecache.getlines(file)
    around = (range(n - AROUND, n + AROUND + 1) for n in lines if 0 < n <= len(text))
    near = sorted({n for some in around for n in some if 0 < n <= len(text)})
    # Numbers that follow each other differ from their places in the list by the same.
    for _, run in itertools.groupby(enumerate(near), lambda place: place[1] - place[0]):
        shown = [n for _, n in run]
        kept = (text[n - 1].rstrip("\r\n")[:_WIDTH] for n in shown)
        yield Excerpt(file=file, first=shown[0], lines=tuple(kept))
