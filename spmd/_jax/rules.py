"""How a primitive with the parameters `jaxpr` and `call` registers each of its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import importlib
import sys
import threading
from typing import Any

import jax
from jax._src import core
from jax._src.interpreters import ad, partial_eval as pe, remat
from jax._src.state import discharge

from spmd._jax.core import inner_jaxpr, is_ref, weakref_lru_cache
from spmd._jax.transform import plain_jaxpr
from spmd._jax.versions import MERGED_JAXPR, REMAT_RETURNS_RESIDUALS, STRUCTURED_RESIDUALS


def linearization_rule(primitive: Any, rule: Callable) -> None:
    """Registers how a primitive is linearized.

    The rule gets which inputs have tangents, whether the linear map is there to be transposed, the
    inputs and the parameters. It returns the outputs, which of them have tangents, the residuals,
    and the linear map as a function of residuals and tangents.
    """

    def adapted(is_vjp: bool, nz_in: Sequence[bool], *primals: Any, **params: Any) -> Any:
        outs, nz_out, residuals, push = rule(tuple(nz_in), is_vjp, *primals, **params)
        if not STRUCTURED_RESIDUALS:
            return outs, nz_out, residuals, push
        return outs, nz_out, residuals, None, lambda res, _, *tangents: push(res, *tangents)

    ad.primitive_linearizations[primitive] = adapted


def partial_eval_rule(primitive: Any, update: Callable) -> None:
    """Registers how an equation splits where a rematerialization policy or a loop splits it.

    `update` gets which inputs are unknown, which of them stay inputs of the staged half, which
    outputs each half keeps, how many residuals leave and enter, and the parameters of both halves;
    it returns both parameters.
    """
    rule: Any = functools.partial(pe.closed_call_partial_eval_custom_rule, "jaxpr", update)
    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def rematerialization_rule(primitive: Any, update: Callable) -> None:
    """Registers how a call runs once for its outputs and again for its derivative.

    `update` gets the call, and how many residuals leave the first run and enter the second; it
    returns the calls of both.
    """

    def rule(context: Any, *args: Any, jaxpr: Any, call: Any) -> Any:
        split: Any = remat.remat_jaxpr
        if MERGED_JAXPR:
            more = (context.policy, context.custom_vjp_rules, True)
            first, again, shared = split(jaxpr, *more)
        else:
            first, again, count = split(jaxpr, context)
            shared = [None] * count
        first_call, again_call = update(call, shared.count(None), len(shared))
        results = primitive.bind(*args, jaxpr=first, call=first_call)
        outs = results[: len(jaxpr.out_avals)]
        computed = iter(results[len(outs) :])
        residuals = [next(computed) if i is None else outs[i] for i in shared]

        def rerun(residuals: Sequence[Any], *args: Any) -> Any:
            return primitive.bind(*residuals, *args, jaxpr=again, call=again_call)

        if REMAT_RETURNS_RESIDUALS:
            return outs, residuals, rerun
        return outs, functools.partial(rerun, residuals)

    remat.rules[primitive] = rule


def dead_code_rule(primitive: Any, keep: Callable) -> None:
    """Registers which inputs and equations of a call are left if some outputs are not used.

    `keep` gets the call, which inputs and which outputs are left; it returns the call of those.
    """

    def rule(used_out: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        *live, eqn = rest  # releases with one class of jaxprs say which references live on
        if not any(used_out) and not pe.has_effects(eqn, *live):
            return [False] * len(eqn.invars), None
        jaxpr, used_in = _without_dead_code(eqn.params["jaxpr"], tuple(used_out), *map(tuple, live))
        if not any(used_in) and not any(used_out) and not jaxpr.effects:
            return used_in, None
        if all(used_in) and all(used_out) and jaxpr is eqn.params["jaxpr"]:
            return used_in, eqn
        invars = [v for v, used in zip(eqn.invars, used_in, strict=True) if used]
        outvars = [v for v, used in zip(eqn.outvars, used_out, strict=True) if used]
        call = keep(eqn.params["call"], used_in, used_out)
        found = core.eqn_effects(jaxpr, invars)
        return used_in, eqn.replace(
            invars=invars,
            outvars=outvars,
            params=dict(eqn.params, jaxpr=jaxpr, call=call),
            effects=found,
        )

    pe.dce_rules[primitive] = rule


def _without_dead_code(jaxpr: Any, used_out: tuple[bool, ...], *live: Any) -> tuple[Any, Any]:
    if not MERGED_JAXPR:
        return _closed_without_dead_code(jaxpr, used_out)
    # JAX has a cache of its own; one here would keep alive a jaxpr that comes back as it is.
    tokens = [a is core.abstract_token for a in jaxpr.in_avals]
    more = {"live_inputs": live[0]} if live else {}
    return pe.dce_jaxpr(jaxpr, used_out, instantiate=tokens, **more)


@weakref_lru_cache
def _closed_without_dead_code(jaxpr: Any, used_out: tuple[bool, ...]) -> tuple[Any, Any]:
    inner, used_in = pe.dce_jaxpr(jaxpr.jaxpr, used_out)
    return core.ClosedJaxpr(inner, jaxpr.consts), used_in


def discharge_rule(primitive: Any, update: Callable) -> None:
    """Registers how a call of mutable references becomes one of values.

    `update` gets the call and which inputs are references; it returns the call whose outputs are
    followed by the last values of those.
    """

    def rule(in_avals: Any, _: Any, *args: Any, jaxpr: Any, call: Any, **more: Any) -> Any:
        refs = [is_ref(a) for a in jaxpr.in_avals]
        pure = discharge.discharge_state(jaxpr, **more)
        results = primitive.bind(*args, jaxpr=pure, call=update(call, refs))
        last = iter(results[len(jaxpr.out_avals) :])
        values = [next(last) if r else None for r in refs]
        return values, results[: len(jaxpr.out_avals)]

    def with_context(ctx: Any, *args: Any, **params: Any) -> Any:
        strip = {"strip_memory_space": ctx.strip_memory_space}
        return rule(ctx.in_avals, ctx.out_avals, *args, **params, **strip)

    fitting: Any = with_context if hasattr(discharge, "DischargeContext") else rule
    discharge.register_discharge_rule(primitive)(fitting)


def hijax_rule(primitive: Any, update: Callable) -> None:
    """Registers how a call whose body has operations of `jax.experimental.hijax` becomes plain.

    `update` gets the call, how many arrays each input and each output consists of; it returns the
    call of those arrays.
    """

    def to_lojax(*args: Any, jaxpr: Any, call: Any) -> Any:
        parts = [a.lower_val(x) for a, x in zip(jaxpr.in_avals, args, strict=True)]
        plain = plain_jaxpr(jaxpr)
        sizes = [len(a.lo_ty()) for a in jaxpr.out_avals]
        values = [x for xs in parts for x in xs]
        results = primitive.bind(
            *values, jaxpr=plain, call=update(call, [len(xs) for xs in parts], sizes)
        )
        return pe.raise_lo_outs(jaxpr.out_avals, results)

    primitive.is_high = lambda *_, jaxpr, **__: jaxpr.is_high
    primitive.to_lojax = to_lojax


#: What registers a rule with a module that `import jax` does not load, and whether to load it.
_late_rules: list[tuple[str, bool, Callable[[Any], None]]] = []
_late_rules_lock = threading.RLock()


def late_rule(module: str, register: Callable[[Any], None], *, load: bool = False) -> None:
    """Registers a rule with a part of JAX that loads late.

    One that does without the rule in silence is loaded, before there is an equation.
    """
    _late_rules.append((module, load, register))


def load_late_rules() -> None:
    """Registers rules with what has been loaded; called before a call is bound."""
    if not any(load or name in sys.modules for name, load, _ in _late_rules):
        return
    with _late_rules_lock:
        for rule in tuple(_late_rules):
            name, load, register = rule
            if load or name in sys.modules:
                register(importlib.import_module(name))
                _late_rules.remove(rule)


def checkify_rule(primitive: Any, update: Callable) -> None:
    """Registers how `jax.experimental.checkify` finds the errors inside of a call.

    `update` gets the call, and how many error values enter and leave before the others; it returns
    the call with those.
    """

    def register(checkify: Any) -> None:
        split = 3 if hasattr(checkify, "CheckifyContext") else 2

        def rule(*args: Any, jaxpr: Any, call: Any) -> Any:
            *ctx, error, enabled = args[:split]
            errors, tree = jax.tree_util.tree_flatten(error)
            values = [*errors, *args[split:]]
            avals = [core.typeof(v) for v in values]
            checked, out_tree, _ = checkify.jaxpr_to_checkify_jaxpr(
                *ctx, jaxpr, enabled, tree, *avals
            )
            n_out = out_tree.num_leaves - len(jaxpr.out_avals)
            new_call = update(call, len(errors), n_out)
            results = primitive.bind(*values, jaxpr=checked, call=new_call)
            return jax.tree_util.tree_unflatten(out_tree, results)

        checkify.error_checks[primitive] = rule

    late_rule("jax._src.checkify", register, load=True)


def jet_rule(primitive: Any, update: Callable) -> None:
    """Registers how `jax.experimental.jet` carries Taylor series through a call.

    `update` gets the call and the order of the series; it returns the call of values and series.
    """

    def register(jet: Any) -> None:
        def rule(primals: Any, series: Any, *, jaxpr: Any, call: Any) -> Any:
            values, tree = jax.tree_util.tree_flatten((primals, series))
            order = len(series[0])
            avals = tuple(core.shaped_abstractify(v) for v in values)
            new, out_tree = jet._jet_jaxpr(jaxpr, order, avals, tree)
            results = primitive.bind(*values, jaxpr=new, call=update(call, order))
            return jax.tree_util.tree_unflatten(out_tree(), results)

        jet.jet_rules[primitive] = rule

    late_rule("jax.experimental.jet", register)


def sparsify_rule(primitive: Any, update: Callable) -> None:
    """Registers how `jax.experimental.sparse.sparsify` runs a call on sparse values.

    `update` is as in :func:`hijax_rule`.
    """

    def register(sparse: Any) -> None:
        def rule(env: Any, *values: Any, jaxpr: Any, call: Any) -> Any:
            new, out_tree = sparse._sparsify_jaxpr(env, jaxpr, *values)
            arrays = sparse.spvalues_to_arrays(env, values)
            sizes_in = [len(jax.tree_util.tree_leaves(a)) for a in arrays]
            sizes_out = [t.num_leaves for t in out_tree.children()]
            flat = jax.tree_util.tree_leaves(arrays)
            results = primitive.bind(*flat, jaxpr=new, call=update(call, sizes_in, sizes_out))
            return sparse.arrays_to_spvalues(env, jax.tree_util.tree_unflatten(out_tree, results))

        sparse.sparse_rules_bcoo[primitive] = rule
        sparse.sparse_rules_bcsr[primitive] = rule

    late_rule("jax.experimental.sparse.transform", register)


def key_reuse_rule(primitive: Any) -> None:
    """Lets `jax.debug_key_reuse` look into the calls of a primitive with a parameter `jaxpr`."""

    def register(key_reuse: Any) -> None:
        @key_reuse.dynamic_key_reuse_signature
        def signature(eqn: Any) -> Any:
            return key_reuse.jaxpr_type_signature(inner_jaxpr(eqn.params["jaxpr"]))

        key_reuse.key_reuse_signatures[primitive] = signature

    late_rule("jax.experimental.key_reuse._core", register)
