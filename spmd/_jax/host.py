"""Effects and calls of the host, their tokens, and loops around them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax._src import config, core, dispatch, effects, sharding_impls, util
from jax._src.interpreters import batching, mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir.dialects import hlo
import numpy as np

from spmd._jax.core import (
    ShapedArray,
    jaxpr_as_fun,
    physical_shape,
    register_cache,
    trace_to_jaxpr,
    unknown_debug_info,
)
from spmd._jax.dispatch import device_order
from spmd._jax.lowering import custom_call
from spmd._jax.transform import batch_jaxpr


class HostEffect(effects.Effect):
    """What an equation does on the host, in program order."""

    def __str__(self) -> str:
        return "Host"


HOST_EFFECT = HostEffect()
for _registry in (
    effects.ordered_effects,
    effects.shardable_ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
    effects.partial_eval_kept_effects,  # without it the gradient of a scan drops the equation
):
    _registry.add_type(HostEffect)
_while = jax.lax.while_p
_jax_while_batch = batching.fancy_primitive_batchers[_while]


def _while_batch(axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Batches a loop whose predicate has a host effect with the predicate in its body.

    JAX lowers an ordered effect of a batched predicate to a loop that does not stop elements. An
    element that has stopped goes along with the others: the predicate gets its last value again,
    and not what the body makes of it.
    """
    predicate = params["cond_jaxpr"]
    if HOST_EFFECT not in predicate.effects:
        return _jax_while_batch(axis_data, args, dims, **params)
    consts = params["cond_nconsts"], params["body_nconsts"]
    test, step = jaxpr_as_fun(predicate), jaxpr_as_fun(params["body_jaxpr"])

    def loop(*args: Any) -> Any:
        test_consts, step_consts, state = util.split_list(args, consts)

        def body(carry: Sequence[Any]) -> list[Any]:
            going, *old = carry
            made = step(*step_consts, *old)
            new = [jax.lax.select(going, m, o) for m, o in zip(made, old, strict=True)]
            return [*test(*test_consts, *new), *new]

        first = test(*test_consts, *state)
        return jax.lax.while_loop(lambda carry: carry[0], body, [*first, *state])[1:]

    avals = predicate.in_avals[: consts[0]] + params["body_jaxpr"].in_avals
    jaxpr = trace_to_jaxpr(loop, avals, unknown_debug_info(params["body_jaxpr"]))
    batched, out_dims = batch_jaxpr(jaxpr, axis_data, tuple(dims))
    return jaxpr_as_fun(batched)(*args), out_dims


batching.fancy_primitive_batchers[_while] = _while_batch

#: What every error says that a host function of ours gives to XLA.
CALL_FAILED = "call of `"


def govern_tokens(started: Callable[[], None], must_settle: Callable[[], bool]) -> Any:
    """Takes over how programs with a host effect follow one another in a thread.

    JAX hands the token of one program to the next. Where the first failed, the next ones would fail
    too; here they get a token of their own as soon as the first has ended either way.

    `started` is called in the thread that starts such a program, before it starts; `must_settle`
    says whether a program has to wait until the one before has ended. Returns the tokens of the
    programs that were started, as a deque that grows; whoever reads it removes those that are
    ready.
    """
    running: collections.deque[Any] = collections.deque()
    tokens: Any = dispatch.RuntimeTokenSet
    jax_get, jax_set = tokens.get_token_input, tokens.set_token_result

    def get_token_input(self: Any, effect: Any, devices: Sequence[Any]) -> Any:
        if effect is not HOST_EFFECT:
            return jax_get(self, effect, devices)
        started()
        held = _held_tokens(self)
        for others, before in [*held.items()]:
            if before._buf.is_ready() or not set(others).isdisjoint(devices):
                if others == tuple(devices) and not before._buf.is_ready() and not must_settle():
                    return before
                del held[others]
                if not ended_well(before._buf):
                    drop_failed_tokens()
        return _fresh_token(tuple(devices))

    def set_token_result(self: Any, effect: Any, token: Any) -> None:
        jax_set(self, effect, token)
        if effect is HOST_EFFECT:
            _held_tokens(self)[tuple(device_order(token._buf.sharding))] = token
            running.append(token._buf)

    tokens.get_token_input = get_token_input
    tokens.set_token_result = set_token_result
    return running


def _held_tokens(tokens: Any) -> dict[tuple[Any, ...], Any]:
    """The last token of a thread on each set of devices that it has used."""
    return vars(tokens).setdefault("_spmd_tokens", {})


def forget_tokens() -> None:
    """Drops the tokens of this thread, whose programs belong to the process that was forked."""
    held = dispatch.runtime_tokens
    held.clear()
    _held_tokens(held).clear()


@functools.lru_cache(maxsize=64)
def _fresh_token(devices: tuple[Any, ...]) -> Any:
    replicated = sharding_impls.GSPMDSharding.get_replicated(devices)
    return core.Token(jax.device_put(np.zeros(0, np.bool_), replicated))


register_cache(_fresh_token, "tokens of host effects")


def ended_well(array: Any) -> bool:
    """Waits until the program that makes an array has ended; returns whether it did not fail."""
    try:
        array.block_until_ready()
    except RuntimeError:
        return False
    return True


def drop_failed_tokens() -> None:
    """Forgets the tokens of this thread whose programs failed: JAX would raise them again."""
    held = dispatch.runtime_tokens
    ordered = held.current_tokens.get(HOST_EFFECT)
    if ordered is not None and not ended_well(ordered):
        del held.current_tokens[HOST_EFFECT]
    for device, token in [*held.output_runtime_tokens.items()]:
        try:
            token.block_until_ready()
        except RuntimeError as error:
            if CALL_FAILED in str(error):  # else it is for jax.effects_barrier to raise
                del held.output_runtime_tokens[device]


def emit_host_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    results: Sequence[tuple[Sequence[int], Any]],
    attributes: dict[str, int | str] | str,
    *,
    by_partition: bool,
) -> list[Any]:
    """Emits a call to the host, after all earlier ones of the program; returns MLIR values.

    `target` is a handler with its attributes, or a partitioner, with a text for it, that puts one
    in its place. With `by_partition` the handler is told first which partition calls.
    """
    operands = list(operands)
    if by_partition:
        operands = [hlo.PartitionIdOp().result, *operands]
    token = ctx.tokens_in.get(HOST_EFFECT)
    token, *outs = values = custom_call(target, token, operands, results, attributes)
    if by_partition and not config.use_shardy_partitioner.value:
        manual = xla_client.OpSharding()
        manual.type = xla_client.OpSharding.Type.MANUAL
        mlir.set_sharding(ctx.module_context, values[0].owner, manual)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({HOST_EFFECT: token})))
    return outs


def keep_with_program(ctx: Any, value: Any, partitions: int) -> None:
    """Keeps a value alive as long as the Python side of the program that is being lowered."""
    ctx.module_context.add_keepalive(value)
    if partitions > 1 and jax.__version_info__ < (0, 12):
        # The persistent compilation cache would serialize an executable with tokens on several
        # devices, which crashes that jaxlib; a module that seems to have a callback is left out.
        ctx.module_context.add_host_callback(lambda *args: args)


#: Tells JAX's caches of rules to hold parameters of a type weakly, as they hold jaxprs.
hold_weakly: Any = util.weakref_cache_key_types.add


def emit_python_callback(
    ctx: Any,
    fun: Callable,
    operands: Sequence[Any],
    results: Sequence[tuple[Sequence[int], Any]],
    *,
    by_partition: bool,
) -> list[Any]:
    """Emits a call to the host as JAX's own callbacks make it; see :func:`emit_host_call`."""
    from jax._src import callback  # here, for programs on other platforms than the CPU

    avals = [ShapedArray(*physical_shape(a)) for a in ctx.avals_in]
    if by_partition:
        operands = [hlo.PartitionIdOp().result, *operands]
        avals = [ShapedArray((), np.dtype(np.uint32)), *avals]
    outs = [ShapedArray(tuple(shape), dtype) for shape, dtype in results]
    context = ctx.module_context.axis_context
    values, token, _ = callback.emit_python_callback(
        ctx.replace(avals_in=avals, avals_out=outs),
        fun,
        ctx.tokens_in.get(HOST_EFFECT),
        [*operands],
        avals,
        outs,
        has_side_effect=True,
        returns_token=True,
        sharding=callback._callback_op_sharding(context, None, outs),
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({HOST_EFFECT: token})))
    return [*values]
