"""From a function, or any stage of it, to a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import functools
import importlib.metadata
import itertools
import re
import types
from typing import Any

import jax

import spmd
from spmd import _jax, _mesh, _resolve, stages
from spmd.errors import ArgumentError, Failure, MeshError, ReportError, explain
from spmd.inspection._cost import cost_of
from spmd.inspection._hlo import Module, parse_modules
from spmd.inspection._ledger import ledger
from spmd.inspection._memory import memory_of
from spmd.inspection._records import Cost, Memory, Report, Reshard
from spmd.inspection._walk import visits


def report(f: Any, /, *args: Any, mesh: Any = None, **kwargs: Any) -> Report:
    """Compile a function, and say what the program does between and on its devices.

    Nothing is run: the arguments may be arrays or `jax.ShapeDtypeStruct`s.

    Args:
        f: a function of `spmd.pjit` or `jax.jit`, or what one of them was traced, lowered or
            compiled to, `jax.stages.Lowered` and `jax.stages.Compiled` included; also a method that
            is one, and a `functools.partial` of one.
        *args: what the function is called with; none for a stage, which has them already.
        mesh: the mesh to compile for, real or from `spmd.topology`. By default it is the current
            mesh or the function's own, and for `jax.jit` the mesh of its shardings.
        **kwargs: keyword arguments of the call. For one called ``mesh``, report ``f.lower(...)``.

    Returns:
        The collectives with their lines, axes and bytes, the cost, and the memory.

    Raises:
        TypeError: `f` is nothing that can be compiled, a stage is given arguments, or `mesh` is no
            mesh.
        RuntimeError: the program is for another mesh.

    Example:
        report = spmd.report(step, state, batch)
        print(report)
    """
    if isinstance(f, Report) and not args and not kwargs:
        return f
    with _entered(mesh):
        compiled = _compiled(f, args, kwargs)
        return _report_of(compiled, _mesh_of(compiled, mesh))


def _entered(mesh: Any) -> Any:
    if mesh is None:
        return contextlib.nullcontext()
    if not isinstance(mesh, jax.sharding.Mesh):
        raise explain("report", [_no_mesh(mesh)])
    return mesh if isinstance(mesh, spmd.Mesh) else spmd.Mesh(mesh.devices, mesh.axis_names)


def _no_mesh(mesh: Any) -> Failure:
    return Failure(
        what="cannot use this mesh",
        given=f"mesh={mesh!r}"[:100],
        expected="a spmd.Mesh or jax.sharding.Mesh, such as spmd.topology and spmd.make_mesh give",
        got=type(mesh).__name__,
        error=ArgumentError,
    )


_LOWERED = (stages.Lowered, jax.stages.Lowered)
_COMPILED = (stages.Compiled, jax.stages.Compiled)


def _compiled(f: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Walk from wherever `f` stands to a compiled program."""
    if isinstance(f, (*_LOWERED, *_COMPILED, stages.Traced, jax.stages.Traced, Report)):
        if args or kwargs:
            raise explain("report", [_stage_with_arguments(f)])
        f = f.lower() if isinstance(f, (stages.Traced, jax.stages.Traced)) else f
        return f if isinstance(f, _COMPILED) else f.compile()
    function, args, kwargs = _unbound(f, args, kwargs)
    lower = getattr(function, "lower", None)
    # Strings have a `lower`, too, and other libraries' wrappers one that gives something else.
    lowered: Any = lower(*args, **kwargs) if callable(function) and callable(lower) else None
    if not isinstance(lowered, _LOWERED):
        raise explain("report", [_nothing_to_compile(f)])
    return lowered.compile()


def _unbound(f: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """The function behind methods and partial calls, with all of its arguments."""
    while True:
        if isinstance(f, types.MethodType):
            f, args = f.__func__, (f.__self__, *args)
        elif isinstance(f, functools.partial):
            f, args, kwargs = f.func, (*f.args, *args), {**f.keywords, **kwargs}
        else:
            return f, args, kwargs


def _stage_with_arguments(f: Any) -> Failure:
    return Failure(
        what=f"takes no arguments for a {type(f).__name__}, which has them already",
        expected=f"report({type(f).__name__.lower()}), or report(function, *args)",
        error=ArgumentError,
    )


def _nothing_to_compile(f: Any) -> Failure:
    return Failure(
        what="cannot compile this",
        expected="a function of spmd.pjit or jax.jit, or a stage of one",
        got=f"{getattr(f, '__name__', '')} {type(f)}".strip(),
        fix="report(spmd.pjit(f, in_axis_resources=...), *args)" if callable(f) else "",
        error=ArgumentError,
    )


def _mesh_of(compiled: Any, mesh: Any) -> Any:
    """The mesh that the axes of a program belong to, or None."""
    if mesh is None:
        own = _own_mesh(compiled)
        return own if own is not None else _current(compiled)
    if isinstance(compiled, stages.Compiled):
        # All axes of a program are Auto inside, whatever those of its mesh are.
        if _mesh.auto_mesh(mesh) != _mesh.auto_mesh(compiled.mesh):
            raise explain("report", [_bound_elsewhere(mesh, compiled.mesh)])
        return mesh
    # A program of `jax.jit` may be read with other names for the axes of its devices.
    if failure := _runs_elsewhere(compiled, mesh):
        raise explain("report", [failure])
    return mesh


def _own_mesh(compiled: Any) -> Any:
    if isinstance(compiled, stages.Compiled):
        return compiled.mesh
    found = (getattr(sharding, "mesh", None) for sharding in _shardings(compiled))
    return next((mesh for mesh in found if mesh is not None and mesh.axis_names), None)


def _bound_elsewhere(mesh: Any, own: Any) -> Failure:
    shown, owned = _mesh.show_mesh(mesh), _mesh.show_mesh(own)
    return Failure(
        what="cannot compile for another mesh than the function's own",
        given=shown,
        expected=f"{owned}, to which the function is bound"
        + (", of other devices or in another order" if shown == owned else ""),
        error=MeshError,
    )


def _runs_elsewhere(compiled: Any, mesh: Any) -> Failure | None:
    devices, wanted = _devices(compiled), [*mesh.devices.flat]
    if devices == wanted:
        return None
    order = ", in another order" if {*devices} == {*wanted} else ""
    return Failure(
        what="cannot match the program with this mesh",
        given=_mesh.show_mesh(mesh),
        got=f"a program for {_mesh.show_devices(devices)}{order}",
        fix="give arguments shardings over the mesh, as in jax.jit(f, in_shardings=...)",
        error=MeshError,
    )


def _current(compiled: Any) -> Any:
    mesh = _mesh.current_mesh()
    return mesh if mesh is not None and [*mesh.devices.flat] == _devices(compiled) else None


def _shardings(compiled: Any) -> list[Any]:
    return jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))


def _devices(compiled: Any) -> list[Any]:
    """The devices of a program, in the order in which it numbers them."""
    if isinstance(compiled, stages.Compiled):
        return [*compiled.mesh.devices.flat]
    found = next(iter(_shardings(compiled)), None)
    return jax.devices()[:1] if found is None else _jax.device_order(found)


def _report_of(compiled: Any, mesh: Any) -> Report:
    devices = _devices(compiled)
    axis_sizes = dict(mesh.shape) if mesh is not None else {}
    modules = parse_modules(_text_of(compiled))
    visited = [visits(module) for module in modules]
    pairs = [*zip(modules, visited, strict=True)]
    return Report(
        name=_name(compiled, modules),
        backend=devices[0].platform,
        device_kind=devices[0].device_kind,
        stand_in=devices[0].platform == "cpu",
        mesh=axis_sizes,
        num_devices=len(devices),
        versions=versions(),
        collectives=tuple(
            itertools.chain.from_iterable(ledger(m, v, axis_sizes) for m, v in pairs)
        ),
        cost=sum((cost_of(m, v) for m, v in pairs), Cost.zeros()),
        memory=_memory(modules, compiled.memory_analysis()),
        reshards=_reshards(compiled) if isinstance(compiled, stages.Compiled) else (),
    )


def _text_of(compiled: Any) -> str:
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        # A libtpu of another age writes programs that this jaxlib cannot read.
        failure = Failure(
            what="cannot read what the compiler made",
            got=str(error).partition("\n")[0][:200],
            expected="a compiler of the same release as jaxlib",
            fix=f"pip install 'jax[tpu]=={jax.__version__}', which brings the libtpu that fits",
            error=ReportError,
        )
        raise explain("report", [failure]) from None


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
    # XLA's names hold no angle brackets.
    name = re.sub("^(p?jit|pmap)_", "", modules[0].name) if modules else ""
    return "<lambda>" if name.strip("_") == "lambda" else name


def _memory(modules: Sequence[Module], analysis: Any) -> Memory | None:
    # Of several modules the compiler gives one plan, and the last one holds the program.
    return memory_of(modules[-1], analysis) if modules else None


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
