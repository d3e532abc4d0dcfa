"""The primitives `host_tap_p` and `host_call_p`, and all their rules.

A tap is the identity on its operands and tells the host what they are; a call has the results of
its host function. Both carry one parameter, the record `call`, and one ordered effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp

from spmd import _jax
from spmd.errors import ArgumentError, Failure, explain
from spmd.host_callback import _lowering, _running
from spmd.host_callback._receiver import options
from spmd.host_callback._records import HostCall

#: The ways in which `vmap` treats a call.
METHODS = ("sequential", "expand_dims", "broadcast_all")

# Parameters
#
# call: HostCall

# Primitive

host_tap_p = _jax.core.Primitive("host_tap")
host_tap_p.multiple_results = True
host_call_p = _jax.core.Primitive("host_call")
host_call_p.multiple_results = True

# Impl


def _host_impl(primitive: Any, *args: Any, call: HostCall) -> Sequence[Any]:
    if options.inline:
        return _run_here(args, call)
    with jax.disable_jit(False):  # else the program would be this call again
        return _program(primitive, call)(*args)


@functools.lru_cache(maxsize=64)
def _program(primitive: Any, call: HostCall) -> Any:
    def host_callback(*args: Any) -> Any:
        return primitive.bind(*args, call=call)

    return jax.jit(host_callback)


_jax.core.register_cache(_program, "eager host callbacks")
_as_arrays = jax.jit(lambda args: args)


def _run_here(args: Sequence[Any], call: HostCall) -> Sequence[Any]:
    """Runs the host function in the thread of the caller, whose stack a debugger sees."""
    if args:  # numbers become arrays, and all of them lie on the same devices
        args = _as_arrays(args)
    sharding = args[0].sharding if args else None
    count = len(sharding.device_set) if sharding is not None else 1
    if failure := _lowering.split_failure(call, count, manual=False):
        raise explain(call.kind, [failure])
    mesh = getattr(sharding, "mesh", None)
    return _running.run_here(call, args, dict(mesh.shape) if mesh is not None else {})


host_tap_p.def_impl(functools.partial(_host_impl, host_tap_p))
host_call_p.def_impl(functools.partial(_host_impl, host_call_p))

# Abstract evaluation


def _tap_abstract_eval(*avals: Any, call: HostCall) -> tuple[Any, set[Any]]:
    del call
    return avals, {_jax.host.HOST_EFFECT}


def _call_abstract_eval(*avals: Any, call: HostCall) -> tuple[Any, set[Any]]:
    del avals
    outs = [_jax.core.varying_aval(shape, dtype) for shape, dtype in call.outputs]
    return outs, {_jax.host.HOST_EFFECT}


host_tap_p.def_effectful_abstract_eval(_tap_abstract_eval)
host_call_p.def_effectful_abstract_eval(_call_abstract_eval)

# Lowering


def _tap_lower(ctx: Any, *operands: Any, call: HostCall) -> Sequence[Any]:
    _lowering.lower(ctx, *operands, call=call)
    return operands


# Not cacheable: the entry that a program calls has to be kept alive by that program.
_jax.lowering.register_lowering(host_tap_p, _tap_lower, cacheable=False)
_jax.lowering.register_lowering(host_call_p, _lowering.lower, cacheable=False)

# Batching


def _tap_batch(args: Sequence[Any], dims: Sequence[Any], *, call: HostCall) -> tuple[Any, Any]:
    return host_tap_p.bind(*args, call=call.transformed("batch", tuple(dims))), dims


def _call_batch(args: Sequence[Any], dims: Sequence[Any], *, call: HostCall) -> tuple[Any, Any]:
    if call.vmap_method is None:
        raise explain("call", [_no_rule(call, "vmap", _VMAP)])
    if call.stack is not None and call.vmap_method != "sequential":
        failure = Failure(
            what=f"cannot apply vmap to `{call.name}` all at once: the batch may be split over "
            "devices",
            given=f"per_shard=True, vmap_method={call.vmap_method!r}",
            fix="use vmap_method='sequential', or call inside of jax.shard_map",
            error=TransformationError,
        )
        raise explain("call", [failure])
    front = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    batch = _batch_sequentially if call.vmap_method == "sequential" else _batch_at_once
    outs = batch(front, dims, call)
    return outs, [0] * len(outs)


def _batch_sequentially(args: Sequence[Any], dims: Sequence[Any], call: HostCall) -> Sequence[Any]:
    def one(batched: Sequence[Any]) -> Any:
        rest = iter(batched)
        operands = [x if d is None else next(rest) for x, d in zip(args, dims, strict=True)]
        return host_call_p.bind(*operands, call=call)

    return jax.lax.map(one, [x for x, d in zip(args, dims, strict=True) if d is not None])


def _batch_at_once(args: Sequence[Any], dims: Sequence[Any], call: HostCall) -> Sequence[Any]:
    size = next(len(x) for x, d in zip(args, dims, strict=True) if d is not None)
    given = 1 if call.vmap_method == "expand_dims" else size
    operands = [
        jnp.broadcast_to(x, (given, *x.shape)) if d is None else x
        for x, d in zip(args, dims, strict=True)
    ]
    results = tuple(((size, *shape), dtype) for shape, dtype in call.results)
    return host_call_p.bind(*operands, call=replace(call, results=results))


_jax.transform.primitive_batchers[host_tap_p] = _tap_batch
_jax.transform.primitive_batchers[host_call_p] = _call_batch

# JVP

_VMAP = (
    "pass vmap_method='sequential', 'expand_dims' or 'broadcast_all' to call, or wrap it in "
    "jax.custom_batching.custom_vmap"
)
_JVP = "wrap it in jax.custom_jvp or jax.custom_vjp, whose rules may use call themselves"


class TransformationError(ArgumentError, NotImplementedError):
    """A `call` cannot be transformed; a NotImplementedError as in the classic API."""

    __module__ = "spmd.host_callback"


def _no_rule(call: HostCall, transformation: str, fix: str) -> Failure:
    return Failure(
        what=f"cannot apply {transformation} to `{call.name}`: it is a function of the host",
        expected="a function that JAX can see into, or a rule",
        fix=fix,
        error=TransformationError,
    )


def _tap_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: HostCall) -> tuple:
    return host_tap_p.bind(*primals, call=call), [*tangents]


def _call_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: HostCall) -> tuple:
    if any(type(t) is not _jax.core.Zero for t in tangents):
        raise explain("call", [_no_rule(call, "jvp or grad", _JVP)])
    outs = host_call_p.bind(*primals, call=call)
    return outs, [_jax.transform.zero_tangent(o) for o in outs]


_jax.transform.primitive_jvps[host_tap_p] = _tap_jvp
_jax.transform.primitive_jvps[host_call_p] = _call_jvp

# Transpose


def _tap_transpose(cts: Sequence[Any], *args: Any, call: HostCall) -> Sequence[Any]:
    # A tap that was given tangents is given their cotangents.
    values = [_jax.transform.instantiate(ct) for ct in cts]
    outs = host_tap_p.bind(*values, call=call.transformed("transpose"))
    return [o if _jax.transform.is_linear(x) else None for o, x in zip(outs, args, strict=True)]


def _call_transpose(cts: Sequence[Any], *args: Any, call: HostCall) -> Any:
    del cts, args
    raise explain("call", [_no_rule(call, "transposition", _JVP)])


_jax.transform.primitive_transposes[host_tap_p] = _tap_transpose
_jax.transform.primitive_transposes[host_call_p] = _call_transpose

# Rematerialization


def _host_remat(
    saveable: Any, unks_in: Sequence[bool], inst_in: Sequence[bool], eqn: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Runs in both passes, unless the policy saves the results or nothing is known."""
    count = len(eqn.outvars)
    needed = _jax.transform.uninstantiated(eqn, inst_in)
    if any(unks_in):
        return None, eqn, [True] * count, [True] * count, needed
    avals = [v.aval for v in eqn.invars]
    if _jax.transform.is_saved(saveable(eqn.primitive, *avals, **eqn.params)):
        return eqn, None, [False] * count, [False] * count, []
    return eqn, eqn, [False] * count, [True] * count, needed


_jax.transform.partial_eval_custom_rules[host_tap_p] = _host_remat
_jax.transform.partial_eval_custom_rules[host_call_p] = _host_remat

# Printing


def _host_pp(eqn: Any, context: Any, settings: Any) -> Any:
    return _jax.core.pp_equation(eqn, context, settings, eqn.params["call"].shown())


_jax.core.pp_eqn_rules[host_tap_p] = _host_pp
_jax.core.pp_eqn_rules[host_call_p] = _host_pp
