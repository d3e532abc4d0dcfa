"""From a function, or any stage of it, to a compiled program, its mesh and its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import inspect
import types
from typing import Any

import jax
import numpy as np

import spmd
from spmd import _jax, _mesh, stages
from spmd.errors import ArgumentError, Failure, MeshError, ReportError, explain
from spmd.inspection.compile.topology import limit_of
from spmd.inspection.hlo.memory import memory_of
from spmd.inspection.hlo.text import Module
from spmd.inspection.records.report import Memory

_TRACED = (stages.Traced, jax.stages.Traced)
_LOWERED = (stages.Lowered, jax.stages.Lowered)
COMPILED = (stages.Compiled, jax.stages.Compiled)
STAGES = (*_TRACED, *_LOWERED, *COMPILED)


def entered(mesh: Any) -> Any:
    """A context in which a function is lowered for a mesh; None is that of the function."""
    if mesh is None:
        return contextlib.nullcontext()
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh if isinstance(mesh, spmd.Mesh) else spmd.Mesh(mesh.devices, mesh.axis_names)
    failure = Failure(
        what="cannot use this mesh",
        given=f"mesh={mesh!r}"[:100],
        expected="a spmd.Mesh or jax.sharding.Mesh, such as spmd.topology and spmd.make_mesh give",
        got=type(mesh).__name__,
        error=ArgumentError,
    )
    raise explain("report", [failure])


def stage_of(f: Any) -> Any:
    """The stage that another library's stage keeps, as those of Flax and Equinox do; else `f`."""
    if isinstance(f, STAGES):
        return f
    kept = (getattr(f, name, None) for name in ("traced", "lowered", "compiled"))
    return next((one for one in kept if isinstance(one, STAGES)), f)


def lower(
    f: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, subject: str, verb: str
) -> Any:
    """Walks from wherever `f` stands to a program that is lowered or compiled already.

    An error starts with `subject` and names the function that was called (`verb`): `f` is nothing
    that can be compiled, or a stage is given arguments.
    """
    f = stage_of(f)
    if isinstance(f, STAGES):
        refuse_arguments(f, args, kwargs, subject=subject, verb=verb)
        return f.lower() if isinstance(f, _TRACED) else f
    function, args, kwargs = unbound(f, args, kwargs)
    method: Any = getattr(function, "lower", None)
    # Strings have a `lower`, too, and other libraries' objects one that gives something else.
    lowered: Any = None
    if callable(function) and callable(method):
        try:
            lowered = stage_of(method(*args, **kwargs))
        except TypeError:
            if failure := call_failure(function, args, kwargs, verb):
                raise explain(subject, [failure]) from None
            raise
    if not isinstance(lowered, _LOWERED):
        raise explain(subject, [_nothing_to_compile(f, verb)])
    return lowered


def call_failure(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], verb: str
) -> Failure | None:
    """Says that all arguments were given as one tuple, where that is why a call failed."""
    if kwargs or len(args) != 1 or not isinstance(args[0], (tuple, list)):
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # some callables have none
    if _binds(signature, args) or not _binds(signature, args[0]):
        return None
    name = getattr(function, "__name__", "f")
    return Failure(
        what=f"cannot call `{name}` with these arguments",
        expected=f"arguments for its parameters {signature}"[:200],
        got=f"one {type(args[0]).__name__} of {len(args[0])}",
        fix=f"{_written(verb, name)}: the arguments follow one by one",
        error=ArgumentError,
    )


def _binds(signature: inspect.Signature, args: Sequence[Any]) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def refuse_arguments(
    f: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, subject: str, verb: str
) -> None:
    """Sees that what has its arguments already is given none."""
    if args or kwargs:
        name = type(f).__name__
        failure = Failure(
            what=f"takes no arguments for a {name}, which has them already",
            expected=f"{verb}({name.lower()}), or {verb}(function, *args)",
            error=ArgumentError,
        )
        raise explain(subject, [failure])


#: Of `functools.partial`, and of the class of Equinox that stands for it.
_PARTIAL = ("func", "args", "keywords")


def unbound(
    f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """The function behind methods and partial calls, with all of its arguments."""
    while True:
        if isinstance(f, types.MethodType):
            f, args = f.__func__, (f.__self__, *args)
        elif all(hasattr(f, name) for name in _PARTIAL):
            f, args, kwargs = f.func, (*f.args, *args), {**f.keywords, **kwargs}
        else:
            return f, args, kwargs


def _written(verb: str, function: str) -> str:
    return f"{verb}({function}, {'name, ' * (verb == 'why')}*args)"


def _nothing_to_compile(f: Any, verb: str) -> Failure:
    pjit = "spmd.pjit(f, in_axis_resources=...)"
    fix = f"{_written(verb, 'jax.jit(f)')}, or {_written(verb, pjit)}" if callable(f) else ""
    if isinstance(next(iter(jax.tree.leaves(f)), None), (jax.Array, np.ndarray)):
        fix = f"{_written(verb, 'f')}: the function, and not what a call of it gives"
    return Failure(
        what="cannot compile this",
        expected="a function of spmd.pjit or jax.jit, or a stage of one",
        got=f"{getattr(f, '__name__', '')} {type(f)}".strip(),
        fix=fix,
        error=ArgumentError,
    )


def mesh_of(compiled: Any, mesh: Any) -> Any:
    """The mesh that the axes of a program belong to, or None."""
    if mesh is None:
        if (own := _own_mesh(compiled)) is not None:
            return own
        current = _mesh.current_mesh()  # which is asked last: it may be ambiguous
        same = current is not None and [*current.devices.flat] == devices_of(compiled)
        return current if same else None
    if isinstance(compiled, stages.Compiled):
        # All axes of a program are Auto inside, whatever those of its mesh are.
        if _mesh.auto_mesh(mesh) != _mesh.auto_mesh(compiled.mesh):
            raise explain("report", [_bound_elsewhere(mesh, compiled.mesh)])
        return mesh
    # A program of `jax.jit` may be read with other names for the axes of its devices.
    devices, wanted = devices_of(compiled), [*mesh.devices.flat]
    if devices != wanted:
        order = ", in another order" if {*devices} == {*wanted} else ""
        shown = f"{_mesh.show_devices(devices)}{order}"
        raise explain("report", [_other_devices(mesh, shown)])
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


def _other_devices(mesh: Any, devices: str) -> Failure:
    return Failure(
        what="cannot match the program with this mesh",
        given=_mesh.show_mesh(mesh),
        got=f"a program for {devices}",
        fix="give arguments shardings over the mesh, as in jax.jit(f, in_shardings=...)",
        error=MeshError,
    )


def check_lowered(lowered: Any, count: int, mesh: Any, *, subject: str) -> None:
    """Sees that a program is for a mesh, as `mesh_of` does for what is compiled; None is any.

    Of a program of `jax.jit` only the `count` of devices is known before it is compiled.
    """
    if mesh is None:
        return
    if isinstance(lowered, stages.Lowered):
        if _mesh.auto_mesh(mesh) != _mesh.auto_mesh(lowered.mesh):
            raise explain(subject, [_bound_elsewhere(mesh, lowered.mesh)])
    elif count != mesh.size:
        raise explain(subject, [_other_devices(mesh, f"{count} device{'s' * (count != 1)}")])


def _shardings(compiled: Any) -> list[Any]:
    return jax.tree.leaves(_jax.lowering.shardings_of(compiled))


def lowered_of(stage: Any) -> Any:
    """What a lowered or compiled stage was lowered to; None where that is gone."""
    if not isinstance(stage, COMPILED):
        return stage
    # Stages of JAX do not keep the one before.
    return stage._lowered if isinstance(stage, stages.Compiled) else None


def devices_of(compiled: Any) -> list[Any]:
    """The devices of a program, in the order in which it numbers them."""
    if isinstance(compiled, stages.Compiled):
        return [*compiled.mesh.devices.flat]
    found = next(iter(_shardings(compiled)), None)
    return jax.devices()[:1] if found is None else _jax.dispatch.device_order(found)


def shape_of(leaf: Any, sharding: Any = None) -> Any:
    """An array as its shape and dtype, on a sharding or on none; another value as it is."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    weak = bool(getattr(leaf, "weak_type", False))
    is_ref = isinstance(leaf, jax.Ref) or getattr(leaf, "is_ref", False)
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak, is_ref=is_ref
    )


def text_of(compiled: Any) -> str:
    """The text of a compiled program; an error where this jaxlib cannot read it."""
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


def memory_plan(compiled: Any, modules: Sequence[Module]) -> Memory | None:
    """What the compiler planned; None where it tells nothing."""
    # Of several modules the compiler gives one plan, and the last one holds the program.
    if not modules:
        return None
    capacity = limit_of(devices_of(compiled)[0])
    return memory_of(modules[-1], compiled.memory_analysis(), capacity=capacity)
