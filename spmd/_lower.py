"""Lower: a jaxpr and its shardings become a StableHLO module, and a call inside of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import logging
from typing import Any

from spmd import _jax
from spmd._call import PjitCall
from spmd._counts import count
from spmd._resolve import to_sharding
from spmd._spec import UNSPECIFIED

logger = logging.getLogger(__name__)


def program_of(call: PjitCall, mesh: Any) -> PjitCall:
    """Returns what of a call a program depends on: equal programs are made once.

    How a spec was spelled, what an argument is called and what a message would show are left out;
    inputs are left to the key of their shardings.
    """
    outs = [to_sharding(r, mesh) for r in call.out_axis_resources]
    return replace(
        call,
        mesh=mesh,
        in_axis_resources=(),
        out_axis_resources=tuple(UNSPECIFIED if s is _jax.core.UNSPECIFIED else s for s in outs),
        in_positional_semantics=(),
        arg_names=(),
        given=(),
        inline=False,
        implicit_reshard=None,
    )


def lower(jaxpr: Any, call: PjitCall, mesh: Any, in_key: Any) -> Any:
    """Lowers a call to a module of its own.

    Args:
        jaxpr: Closed jaxpr.
        call: From :func:`program_of`.
        mesh: The mesh whose devices the module is for.
        in_key: :func:`spmd._jax.dispatch.placement_key` of the shardings of the inputs.

    Returns:
        JAX's lowering (a MeshComputation).
    """
    # However the mesh was entered outside, an equal one is one module.
    with _jax.mesh.tracing_under(mesh):
        return _lower(jaxpr, call, mesh, in_key)


def _complete(jaxpr: Any, call: PjitCall, mesh: Any) -> None:
    """Adds what a function of several levels is traced without: see `docs/design/pmap.md`."""
    if call.kind == "pmap" and len(mesh.axis_names) > 1:
        _jax.transform.place_axis_indices(jaxpr.jaxpr)


@_jax.core.weakref_lru_cache
def _lower(jaxpr: Any, call: PjitCall, mesh: Any, in_key: Any) -> Any:
    _complete(jaxpr, call, mesh)
    outs = [to_sharding(r, mesh) for r in call.out_axis_resources]
    lowering = _jax.lowering.lower_module(
        jaxpr,
        call.name,
        in_key.shardings,
        outs,
        call.donated_invars,
        mesh,
        keep_unused=call.keep_unused,
        compiler_options=call.compiler_options,
    )
    count("lowerings")
    logger.debug("Lowered pjit of `%s`", call.name)
    return lowering


def lower_for_export(
    jaxpr: Any,
    call: PjitCall,
    mesh: Any,
    shardings: Sequence[Any],
    platforms: Sequence[str],
    parameters: Any,
) -> Any:
    """Lowers a call to a module that `jax.export` can serialize; see :func:`lower`.

    Args:
        jaxpr: Closed jaxpr.
        call: From :func:`program_of`.
        mesh: The mesh whose devices the module is for.
        shardings: One per input.
        platforms: The platforms that the module is for.
        parameters: JAX's own parameters of an export, or None.
    """
    _complete(jaxpr, call, mesh)
    with _jax.mesh.tracing_under(mesh):
        return _jax.lowering.lower_module(
            jaxpr,
            call.name,
            shardings,
            [to_sharding(r, mesh) for r in call.out_axis_resources],
            call.donated_invars,
            mesh,
            keep_unused=call.keep_unused,
            platforms=tuple(platforms),
            parameters=parameters,
        )


def clear_lower_cache() -> None:
    """Forgets all modules."""
    _lower.cache_clear()


def lower_inner_call(ctx: Any, args: Sequence[Any], jaxpr: Any, call: PjitCall) -> Sequence[Any]:
    """Emits a call inside of another program, with its shardings as constraints."""
    _complete(jaxpr, call, call.mesh)
    ins = _inside(call.in_axis_resources, call.mesh)
    outs = _inside(call.out_axis_resources, call.mesh)
    key = ("spmd.pjit", call.name, jaxpr, tuple(ins), tuple(outs))
    return _jax.lowering.lower_call(ctx, args, jaxpr, call.name, ins, outs, key)


def _inside(resources: Sequence[Any], mesh: Any) -> list[Any]:
    shardings = [to_sharding(r, mesh, inside=True) for r in resources]
    return [None if s is _jax.core.UNSPECIFIED else s for s in shardings]
