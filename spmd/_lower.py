"""Lower: a jaxpr and its shardings become a StableHLO module, and a call inside of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import logging
from typing import Any

from spmd import _jax
from spmd._call import PjitCall
from spmd._counts import count
from spmd._resolve import to_shardings

logger = logging.getLogger(__name__)


def _program_key(
    jaxpr: Any, call: PjitCall, mesh: Any, shardings: Sequence[Any]
) -> tuple[PjitCall, Any, Any]:
    """Returns what a program depends on besides its jaxpr: equal programs are made once.

    How a spec was spelled, what an argument is called and what a message would show are left out
    of the call; where its inputs are is the last part of the key.
    """
    program = replace(
        call,
        mesh=mesh,
        in_axis_resources=(),
        out_axis_resources=to_shardings(call.out_axis_resources, mesh),
        in_positional_semantics=(),
        arg_names=(),
        given=(),
        inline=False,
        implicit_reshard=None,
    )
    return program, mesh, _jax.dispatch.placement_key(shardings, jaxpr.in_avals)


def lower(jaxpr: Any, call: PjitCall, mesh: Any, shardings: Sequence[Any]) -> Any:
    """Lowers a call with inputs in `shardings`; equal programs have one MeshComputation."""
    key = _program_key(jaxpr, call, mesh, shardings)
    # However the mesh was entered outside, an equal one is one module.
    with _jax.mesh.tracing_under(mesh):
        return _lower(jaxpr, *key)


def lower_and_compile(
    jaxpr: Any, call: PjitCall, mesh: Any, shardings: Sequence[Any]
) -> tuple[Any, Sequence[Any]]:
    """Returns JAX's executable of a call, and the constants on its devices that it takes first."""
    key = _program_key(jaxpr, call, mesh, shardings)
    with _jax.mesh.tracing_under(mesh):
        return _compile(jaxpr, *key)


@_jax.core.weakref_lru_cache
def _lower(jaxpr: Any, call: PjitCall, mesh: Any, in_key: Any) -> Any:
    _complete(jaxpr, call, mesh)
    lowering = _jax.lowering.lower_module(
        jaxpr,
        call.name,
        in_key.shardings,
        call.out_axis_resources,
        call.donated_invars,
        mesh,
        keep_unused=call.keep_unused,
        compiler_options=call.compiler_options,
    )
    count("lowerings")
    logger.debug("Lowered pjit of `%s`", call.name)
    return _pinned(lowering, call)


@_jax.core.weakref_lru_cache
def _compile(jaxpr: Any, *key: Any) -> tuple[Any, Sequence[Any]]:
    lowering, is_new = _lower(jaxpr, *key), True
    try:
        executable, consts, is_new = _jax.lowering.compile_lowering(lowering)
    finally:
        if is_new:  # what the compiler was given, whether it took it or not
            count("compiles")
    return executable, consts


def _complete(jaxpr: Any, call: PjitCall, mesh: Any) -> None:
    """Adds what a function of several levels is traced without: see `docs/design/pmap.md`."""
    if call.kind == "pmap" and len(mesh.axis_names) > 1:
        _jax.transform.place_axis_indices(jaxpr.jaxpr)


def lower_for_export(
    jaxpr: Any,
    call: PjitCall,
    mesh: Any,
    shardings: Sequence[Any],
    platforms: Sequence[str],
    parameters: Any,
) -> Any:
    """Lowers a call to a module for these platforms that `jax.export` can serialize.

    `parameters` are JAX's own of an export, or None.
    """
    _complete(jaxpr, call, mesh)
    with _jax.mesh.tracing_under(mesh):
        lowering = _jax.lowering.lower_module(
            jaxpr,
            call.name,
            shardings,
            to_shardings(call.out_axis_resources, mesh),
            call.donated_invars,
            mesh,
            keep_unused=call.keep_unused,
            platforms=tuple(platforms),
            parameters=parameters,
        )
    return _pinned(lowering, call)


def _pinned(lowering: Any, call: PjitCall) -> Any:
    """A lowering with the constraints of its plan, if it has one."""
    return lowering if call.pins is None else _jax.lowering.edited(lowering, call.pins)


def clear_lower_cache() -> None:
    """Forgets all modules and programs."""
    _lower.cache_clear()
    _compile.cache_clear()


def lower_inner_call(ctx: Any, *args: Any, jaxpr: Any, call: PjitCall) -> Sequence[Any]:
    """Emits a call inside of another program, with its shardings as constraints."""
    _complete(jaxpr, call, call.mesh)
    ins = _inside(call.in_axis_resources, call.mesh)
    outs = _inside(call.out_axis_resources, call.mesh)
    key = ("spmd.pjit", call.name, jaxpr, tuple(ins), tuple(outs))
    return _jax.lowering.lower_call(ctx, args, jaxpr, call.name, ins, outs, key)


def _inside(resources: Sequence[Any], mesh: Any) -> list[Any]:
    shardings = to_shardings(resources, mesh, inside=True)
    return [None if s is _jax.core.UNSPECIFIED else s for s in shardings]
