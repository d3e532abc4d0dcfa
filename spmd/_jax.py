"""The only file that imports `jax._src` or `jaxlib`: every private name, with its reason.

It owns signatures, not only names: where two supported JAX releases spell a thing differently,
the difference ends here.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import importlib
import pathlib
import sys
import threading
from typing import Any, NoReturn
import weakref

import jax
from jax._src import (
    api,
    api_util,
    clusters,
    compiler,
    config,
    core,
    dispatch,
    distributed,
    dtypes,
    effects,
    hardware_utils,
    linear_util,
    mesh as mesh_lib,
    sharding_impls,
    source_info_util,
    stages,
    traceback_util,
    tree_util,
    util,
    xla_bridge,
)
from jax._src.interpreters import ad, batching, mlir, partial_eval as pe, pxla, remat
from jax._src.lib import _jax, lapack, xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func as func_dialect, hlo
from jax._src.random import prng
from jax._src.state import discharge
from jax._src.state.types import AbstractRef
from jax.experimental.layout import Layout
import jaxlib.version
import numpy as np

# Version

#: ClosedJaxpr and Jaxpr are one class; DCE rules take live inputs; transposes return logs.
MERGED_JAXPR = not hasattr(core, "ClosedJaxpr") or core.ClosedJaxpr is core.Jaxpr

#: Linearization rules may return residuals that keep a structure of their own.
STRUCTURED_RESIDUALS = "structured_residuals" in ad.LinearizeTrace.__annotations__

#: Rematerialization rules return their residuals; before, a function that holds them.
REMAT_RETURNS_RESIDUALS = jax.__version_info__ >= (0, 12)

#: The C++ fast path looks whether an array was deleted. Before, it crashes the process.
FAST_PATH_CHECKS_DELETED = jax.__version_info__ >= (0, 12)

#: An empty result has shards of its whole shape, whatever its sharding says.
EMPTY_RESULTS_ARE_WHOLE = jax.__version_info__ < (0, 12)

#: XLA mistakes the body of a `shard_map` whose only operand is a token for one without operands.
WRAPS_TOKEN_ONLY_BODIES = jax.__version_info__ >= (0, 12)

#: A token that leaves a `shard_map` over some axes aborts the process in XLA.
CRASHES_ON_NESTED_TOKENS = jax.__version_info__ < (0, 12)

#: Whether XLA keeps the error function as a call that it does not partition.
ERF_IS_OPAQUE = jax.__version_info__ < (0, 12)

#: Whether programs on CPU devices of several processes never end once 33 of them are in flight.
HANGS_WHEN_CROWDED = jax.__version_info__ < (0, 12)

# Caches


def weakref_lru_cache(compute: Callable) -> Any:
    """Caches a function of a weakly held argument and hashable ones.

    The cache knows JAX's trace context, is cleared by `jax.clear_caches`, and computes an entry
    once however many threads ask for it.
    """

    @functools.wraps(compute)
    def computed(key: Any, *args: Any) -> Any:
        try:
            return compute(key, *args)
        except BaseException:
            # JAX keeps an entry without a result, and would compute it anew at every call.
            cached.evict_weakref(key)
            raise

    cached: Any = util.weakref_lru_cache(computed)
    return cached


#: Registers an object with `cache_clear` to be cleared by `jax.clear_caches`.
register_cache = util.register_cache

# Core

Primitive = core.Primitive
Array = xla_client.ArrayImpl
Tracer = core.Tracer
ShapedArray = core.ShapedArray
Zero = ad.Zero
jaxpr_as_fun = core.jaxpr_as_fun
positional_effects = core.positional_effects
trace_state_clean = core.trace_state_clean
pp_eqn_rules = core.pp_eqn_rules
custom_typechecks = core.custom_typechecks
UNSPECIFIED = sharding_impls.UNSPECIFIED
OpSharding = xla_client.OpSharding
#: The proto class hides its `named_sharding` field and reads as REPLICATED then; this one sees it.
HloSharding = xla_client.HloSharding


def abstractify(x: Any) -> Any:
    """Returns the aval of an argument without its sharding, so that placement causes no retrace."""
    aval = core.shaped_abstractify(x)
    return _without_sharding(aval) if type(aval) is ShapedArray else aval


@functools.lru_cache(maxsize=4096)
def _without_sharding(aval: Any) -> Any:
    # Inside shard_map the aval says over which manual axes the value varies: that must stay.
    if aval.sharding.mesh.empty or aval.sharding.mesh._any_axis_manual:
        return aval
    return aval.update(sharding=None)


def is_ref(aval: Any) -> bool:
    """Whether an aval is that of a mutable reference."""
    return isinstance(aval, AbstractRef)


def ref_indices(jaxpr: Any) -> tuple[int, ...]:
    """Which inputs of a closed jaxpr are mutable references."""
    return tuple(i for i, a in enumerate(jaxpr.in_avals) if is_ref(a))


def buffer_of(x: Any) -> Any:
    """Returns the array that a mutable reference holds now; anything else is itself."""
    return x._refs._buf if isinstance(x, core.Ref) else x


def set_buffer(ref: Any, array: Any) -> None:
    """Lets a mutable reference hold another array of equal value."""
    ref._refs._buf = array


def short_aval(aval: Any) -> str:
    """Returns ``f32[30,512]``."""
    return f"{dtypes.short_dtype_name(aval.dtype)}[{','.join(map(str, aval.shape))}]"


def underlying(x: Any) -> Any:
    """Returns the value that eager `grad` or `vmap` works on; a staged tracer has none: itself."""
    while True:
        if isinstance(x, (ad.JVPTracer, ad.LinearizeTracer)):
            x = x.primal
        elif isinstance(x, batching.BatchTracer):
            x = x.val
        else:
            return x


def is_derived(x: Any) -> bool:
    """Whether an eager `grad`, `jvp` or the like works on a value."""
    derived = isinstance(x, (ad.JVPTracer, ad.LinearizeTracer))
    return derived and not isinstance(underlying(x), Tracer)


def inner_jaxpr(jaxpr: Any) -> Any:
    """Returns the open jaxpr of a closed one; they are one object since JAX 0.11."""
    return jaxpr if MERGED_JAXPR else jaxpr.jaxpr


def close_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Attaches the values of its constants to a jaxpr."""
    return jaxpr.with_consts(consts) if MERGED_JAXPR else core.ClosedJaxpr(jaxpr, consts)


def separate_live_consts(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Turns constants into leading inputs if one is a tracer of an outer trace or a reference."""
    if not any(isinstance(c, (Tracer, core.Ref)) for c in jaxpr.consts):
        return jaxpr, []
    jaxpr, consts = pe.separate_consts(jaxpr)
    return jaxpr, list(consts)


def trace_to_jaxpr(fun: Callable, avals: Sequence[Any], debug_info: Any) -> Any:
    """Traces a function of flat arguments to a closed jaxpr."""
    wrapped = linear_util.wrap_init(fun, debug_info=debug_info)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, avals)
    return close_jaxpr(jaxpr, consts)


def debug_info(fun: Callable, arg_names: Sequence[str], result_paths: Any) -> Any:
    """Names of the arguments and results, for jaxprs, StableHLO locations and messages."""
    return core.DebugInfo(
        "pjit", api_util.fun_sourceinfo(fun) or "<unknown>", tuple(arg_names), result_paths
    )


def result_paths(jaxpr: Any, paths: Sequence[str]) -> None:
    """Records how the user calls each result; they are known only after the trace."""
    inner = inner_jaxpr(jaxpr)
    inner._debug_info = inner.debug_info._replace(result_paths=tuple(paths))


def unknown_debug_info(jaxpr: Any) -> Any:
    """The debug info of a jaxpr whose inputs were rearranged."""
    return inner_jaxpr(jaxpr).debug_info.with_unknown_names()


def fun_name(fun: Callable) -> str:
    """The name of a function as JAX shows it; looks through partials and methods."""
    return util.fun_name(fun, type(fun).__name__)


def current_source() -> str:
    """``file:line (function)`` of the user's frame that is running."""
    if found := source_info_util.summarize(source_info_util.current()):
        return found
    # JAX looks no further up than the trace that is running; `jit` of our function has no line.
    frame = sys._getframe(1)
    while frame and not source_info_util.is_user_filename(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def hide_own_frames() -> None:
    """Hides our files from users' tracebacks and from source locations of operations.

    The demo's model, in a folder of its own, is user code.
    """
    package = pathlib.Path(__file__).parent
    for path in package.rglob("*.py"):
        if package / "demo" not in path.parents:
            traceback_util.register_exclusion(str(path))
            source_info_util.register_exclusion(str(path))


def is_user_file(name: str) -> bool:
    """Whether a file is neither JAX's nor ours."""
    return source_info_util.is_user_filename(name)


def used_at() -> str:
    """``", used at file:line (function)"``, or nothing where JAX itself is the caller."""
    source = current_source()
    return f", used at {source}" if source else ""


api_boundary: Any = traceback_util.api_boundary
#: What is set in JAX, here and globally, that a trace depends on; hashable.
trace_context = config.trace_context


def trace_context_names() -> Sequence[str]:
    """What the entries of a context are called; nothing where JAX does not say."""
    try:
        return config.trace_context_names()
    except NotImplementedError:
        return ()


# Timing events of JAX (`jax_log_compiles`)


def no_tracing() -> bool:
    """Whether `jax_no_tracing` forbids to trace."""
    return config.no_tracing.value


def explain_cache_misses() -> bool:
    """Whether `jax_explain_cache_misses` asks for the reason of every trace."""
    return config.explain_cache_misses.value


def log_elapsed(fmt: str, name: str) -> Any:
    """A context that logs how long tracing took, as `jax_log_compiles` asks for."""
    return dispatch.log_elapsed_time(fmt, name, event=dispatch.JAXPR_TRACE_EVENT)


# Transformations

batch_jaxpr = batching.batch_jaxpr2
fancy_batchers = batching.fancy_primitive_batchers
jvp_jaxpr = ad.jvp_jaxpr
primitive_jvps = ad.primitive_jvps
deflinear = ad.deflinear2
custom_partial_eval_rules = pe.custom_partial_eval_rules
fancy_transposes = ad.fancy_transposes
partial_eval_jaxpr = pe.partial_eval_jaxpr_nounits_fwd
inline_jaxpr_into_trace = pe.inline_jaxpr_into_trace
custom_staging_rules = pe.custom_staging_rules


def has_explicit_axes(mesh: Any) -> bool:
    """Whether shardings over some axes of a mesh of devices are part of types."""
    return isinstance(mesh, mesh_lib.Mesh) and mesh_lib.AxisType.Explicit in mesh.axis_types


def has_explicit_type(x: Any) -> bool:
    """Whether the type of a value has a sharding over Explicit axes."""
    sharding = getattr(core.typeof(x), "sharding", None)
    return sharding is not None and sharding.mesh._any_axis_explicit


def explicit_part(spec: Any, mesh: Any = None) -> Any:
    """What of a spec is part of a type on a mesh, or under `jax.set_mesh`: its Explicit axes."""
    typed = set((mesh_lib.get_abstract_mesh() if mesh is None else mesh).explicit_axes)
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
    return jax.P(*(tuple(a for a in e if a in typed) or None for e in entries))


def retyped(x: Any, spec: Any) -> Any:
    """Reshards a value whose type has a sharding, so that its type says what `spec` does."""
    have = core.typeof(x).sharding
    entries = [*spec, *[None] * (x.ndim - len(spec))]
    kept = [h if e is jax.P.UNCONSTRAINED else e for e, h in zip(entries, have.spec, strict=True)]
    return jax.sharding.reshard(x, explicit_part(kept, have.mesh))


def explicit_axes() -> bool:
    """Whether `jax.set_mesh` is active with axes whose shardings are part of types."""
    return mesh_lib.get_abstract_mesh()._any_axis_explicit


#: What JAX answers, under Auto axes, to code that is written for Explicit ones.
_NOT_EXPLICIT = ("axis names that are of type Auto", "non-None and have a non-empty mesh")


def needs_explicit_axes(error: ValueError) -> bool:
    """Whether JAX refused `reshard` or `out_sharding=` since no axis is Explicit."""
    return any(text in str(error) for text in _NOT_EXPLICIT)


def bind_inputs(jaxpr: Any, values: Sequence[Any]) -> Any:
    """Makes inputs of a closed jaxpr without constants its constants.

    Args:
        jaxpr: The jaxpr.
        values: Per input its value, or None where it stays an input.
    """
    known = [v is not None for v in values] + [False] * (len(jaxpr.in_avals) - len(values))
    consts = [v for v in values if v is not None]
    if not consts:
        return jaxpr
    inner = inner_jaxpr(pe.move_binders_to_front(jaxpr, known))
    # Where there is no such function, the first inputs are those whose values are attached.
    if lift := getattr(pe, "convert_invars_to_constvars", None):
        inner = lift(inner, len(consts))
    return close_jaxpr(inner, consts)


def repeated_outputs(jaxpr: Any, first: int) -> tuple[Any, list[int]]:
    """Drops outputs from `first` on that repeat an earlier one.

    Returns:
        The closed jaxpr, and per output from `first` on which of its outputs that is.
    """
    outvars = inner_jaxpr(jaxpr).outvars
    seen = {id(v): i for i, v in reversed([*enumerate(outvars[:first])])}
    at, keep = [], [True] * first
    kept = first
    for var in outvars[first:]:
        found = None if isinstance(var, core.Literal) else seen.get(id(var))
        keep.append(found is None)
        if found is None:
            found = seen[id(var)] = kept
            kept += 1
        at.append(found)
    return (jaxpr if all(keep) else pe.prune_closed_jaxpr_outputs(jaxpr, keep)), at


def linearize_jaxpr(
    jaxpr: Any, nz_in: Sequence[bool], *, is_vjp: bool
) -> tuple[Any, list[bool], list[int | None], Any]:
    """Splits a closed jaxpr into its value and its linear map.

    Args:
        jaxpr: Closed jaxpr.
        nz_in: Per input, whether it has a tangent.
        is_vjp: Whether the linear map is there to be transposed.

    Returns:
        The closed jaxpr of the outputs and computed residuals; per output, whether it has a
        tangent; per residual, the constant or input that it is, or None where it is computed; the
        closed jaxpr of the linear map, which takes the residuals, then the tangents.
    """
    found: Any = ad.linearize_jaxpr(jaxpr, nz_in, is_vjp=is_vjp)
    known, layout, nz_out, forwarded, linear = found
    if not STRUCTURED_RESIDUALS:
        return known, list(nz_out), list(forwarded), linear
    structured = len(layout.unpack()[2])
    tangents = len(linear.in_avals) - len(forwarded) - structured
    residual = [True] * len(forwarded) + [False] * tangents + [True] * structured
    linear = pe.move_binders_to_front(linear, residual)
    return known, list(nz_out), [*forwarded, *[None] * structured], linear


def linearization_rule(primitive: Any, rule: Callable) -> None:
    """Registers how a primitive is linearized.

    Args:
        primitive: The primitive.
        rule: Given which inputs have tangents, whether the linear map is there to be transposed,
            the inputs and the parameters, returns the outputs, which of them have tangents, the
            residuals, and the linear map as a function of residuals and tangents.
    """

    def adapted(is_vjp: bool, nz_in: Sequence[bool], *primals: Any, **params: Any) -> Any:
        outs, nz_out, residuals, push = rule(tuple(nz_in), is_vjp, *primals, **params)
        if not STRUCTURED_RESIDUALS:
            return outs, nz_out, residuals, push
        return outs, nz_out, residuals, None, lambda res, _, *tangents: push(res, *tangents)

    ad.primitive_linearizations[primitive] = adapted


def partial_eval_rule(primitive: Any, update: Callable) -> None:
    """Registers how an equation splits where a rematerialization policy or a loop splits it.

    Args:
        primitive: A primitive with a parameter `jaxpr`.
        update: Given which inputs are unknown, which of them stay inputs of the staged half, which
            outputs each half keeps, how many residuals leave and enter, and the parameters of
            both halves; returns both parameters.
    """
    rule: Any = functools.partial(pe.closed_call_partial_eval_custom_rule, "jaxpr", update)
    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def rematerialization_rule(primitive: Any, update: Callable) -> None:
    """Registers how a call runs once for its outputs and again for its derivative.

    Args:
        primitive: A primitive with the parameters `jaxpr` and `call`.
        update: Given the call, and how many residuals leave the first run and enter the second,
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

    Args:
        primitive: A primitive with the parameters `jaxpr` and `call`.
        keep: Given the call, which inputs and which outputs are left, returns the call of those.
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

    Args:
        primitive: A primitive with the parameters `jaxpr` and `call`.
        update: Given the call and which inputs are references, returns the call whose outputs are
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

    Args:
        primitive: A primitive with the parameters `jaxpr` and `call`.
        update: Given the call, how many arrays each input and each output consists of, returns
            the call of those arrays.
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

    primitive.is_high = lambda *_, jaxpr, **__: inner_jaxpr(jaxpr).is_high
    primitive.to_lojax = to_lojax


def plain_jaxpr(jaxpr: Any) -> Any:
    """Returns a closed jaxpr without operations of hijax; its values have to be plain."""
    return pe.lower_jaxpr2(jaxpr) if inner_jaxpr(jaxpr).is_high else jaxpr


#: What registers a rule with a module that `import jax` does not load, and whether to load it.
_late_rules: list[tuple[str, bool, Callable[[Any], None]]] = []
_late_rules_lock = threading.RLock()


def late_rule(module: str, register: Callable[[Any], None], *, load: bool = False) -> None:
    """Registers a rule with a part of JAX that loads late.

    Args:
        module: Its name.
        register: Given the module, registers the rule.
        load: Whether the module does without the rule in silence: then it is loaded before there
            is an equation.
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

    Args:
        primitive: A primitive with the parameters `jaxpr` and `call`.
        update: Given the call, and how many error values enter and leave before the others,
            returns the call with those.
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

    Args:
        primitive: A primitive with the parameters `jaxpr` and `call`.
        update: Given the call and the order of the series, returns the call of values and series.
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

    Args:
        primitive: A primitive with the parameters `jaxpr` and `call`.
        update: Given the call, how many arrays each input and each output consists of, returns
            the call of those arrays.
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


#: What the runtime raises when `jax_debug_nans` finds one in a program.
InternalFloatingPointError = api_util.InternalFloatingPointError


def find_nan(error: Exception, fun: Callable, args: Any, kwargs: Any) -> None:
    """Runs a function unjitted to find the operation that made a NaN; always raises."""
    api_util.maybe_recursive_nan_check(error, fun, args, kwargs)


def find_nan_backward(
    error: Exception, jaxpr: Any, cts: Sequence[Any], args: Sequence[Any]
) -> NoReturn:
    """Runs a backward pass op by op to find the one that made a NaN; always raises."""
    try:
        ad.backward_pass3(inner_jaxpr(jaxpr), False, jaxpr.consts, args, cts)
    except (FloatingPointError, ZeroDivisionError) as found:
        raise found from None
    api_util._raise_no_nan_in_deoptimized(error)
    raise error


def check_call(ctx_factory: Any, primitive: Any, in_atoms: Any, jaxpr: Any, params: Any) -> Any:
    """Type-checks an equation that calls `jaxpr`."""
    call = dict(params, call_jaxpr=inner_jaxpr(jaxpr))
    return core._check_call(ctx_factory, primitive, in_atoms, call)


def stage_unknown(
    trace: Any, primitive: Any, tracers_in: Sequence[Any], params: Any, jaxpr: Any
) -> list[Any]:
    """Records an equation of the unknown half of a partial evaluation; returns its outputs."""
    outs = [pe.JaxprTracer(trace, pe.PartialVal.unknown(a), None) for a in jaxpr.out_avals]
    recipe = pe.new_eqn_recipe(
        trace,
        list(tracers_in),
        outs,
        primitive,
        params,
        positional_effects(jaxpr),
        source_info_util.current(),
    )
    for out in outs:
        out.recipe = recipe
    if effects.partial_eval_kept_effects.filter_in(jaxpr.effects):
        trace.effect_handles.append(pe.EffectHandle(list(tracers_in), recipe))
    return outs


def flatten_transpose(cts_in: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], Any]:
    """Flattens what a transpose rule is given.

    Args:
        cts_in: Cotangents of the outputs; Zeros stay symbolic.
        args: Accumulators of the linear inputs, values of the others.

    Returns:
        The inputs of the transposed jaxpr, and what that one depends on.
    """
    primals, specs = ad.project_accums(args)
    flat, in_tree = jax.tree_util.tree_flatten((primals, list(cts_in)))
    return flat, (in_tree, tuple(core.typeof(x) for x in flat), specs)


def transpose_jaxpr(jaxpr: Any, key: Any) -> tuple[Any, Any, list[bool], list[bool], int]:
    """Builds the jaxpr that turns cotangents of the outputs into cotangents of the linear inputs.

    Args:
        jaxpr: Closed jaxpr, linear in the inputs that had accumulators.
        key: From :func:`flatten_transpose`.

    Returns:
        The transposed closed jaxpr, the tree of its outputs, per argument whether it is still an
        input, per argument whether it has a cotangent, and how many outputs follow those.
    """
    transposed, out_tree = _transpose_jaxpr(jaxpr, *key)
    avals, logs = jax.tree_util.tree_unflatten(out_tree, transposed.out_avals)
    kept = [kind is None or kind is ad.RefAccum for kind, _ in key[2]]
    has_ct = [isinstance(a, core.AbstractValue) for a in avals]
    return transposed, out_tree, kept, has_ct, len(jax.tree_util.tree_leaves(logs))


def accumulate(out_tree: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
    """Adds the results of a transposed jaxpr up; returns what JAX wants back from the rule."""
    cts, logs = jax.tree_util.tree_unflatten(out_tree, results)
    for arg, ct in zip(args, cts, strict=True):
        if isinstance(arg, ad.ValAccum):
            arg.accum(ct)
    return logs


@weakref_lru_cache
def _transpose_jaxpr(jaxpr: Any, in_tree: Any, in_avals: tuple, specs: Any) -> tuple[Any, Any]:
    out_tree = None

    def transposed(*flat: Any) -> list[Any]:
        nonlocal out_tree
        primals, cts_in = jax.tree_util.tree_unflatten(in_tree, flat)
        args = ad.unproject_accums(specs, primals)
        logs = ad.backward_pass3(inner_jaxpr(jaxpr), False, jaxpr.consts, args, cts_in)
        cts = [a.freeze() if isinstance(a, ad.ValAccum) else None for a in args]
        outs, out_tree = jax.tree_util.tree_flatten((cts, logs))
        return outs

    wrapped = linear_util.wrap_init(transposed, debug_info=unknown_debug_info(jaxpr))
    new_jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, in_avals)
    return close_jaxpr(new_jaxpr, consts), out_tree


def pp_equation(eqn: Any, context: Any, settings: Any, params: dict[str, Any]) -> Any:
    """Prints an equation with other parameters than it has."""
    shown = eqn.replace(params=params)
    names = [*(n for n in params if n != "jaxpr"), *(n for n in params if n == "jaxpr")]
    return core._pp_eqn(shown, context, settings, params=names)


# Mesh context

#: Entries that tell our contexts from `with jax_mesh:` in the keys of JAX's caches.
_ENTERED = mesh_lib.Mesh(np.array(["entered"], dtype=object), ("spmd.Mesh",))
_TRACING = mesh_lib.Mesh(np.array(["tracing"], dtype=object), ("spmd.pjit",))


def default_device() -> Any:
    """The device of values that nobody placed."""
    return config.default_device.value or jax.local_devices()[0]


def thread_mesh() -> Any:
    """The mesh of `with jax_mesh:` in this thread; empty where there is none."""
    return mesh_lib.thread_resources.env.physical_mesh


def set_mesh_value() -> Any:
    """The mesh of `jax.set_mesh` in this thread; empty where there is none."""
    return mesh_lib.get_concrete_mesh()


def abstract_mesh_value() -> Any:
    """The mesh of `jax.sharding.use_abstract_mesh`, or None; a `shard_map` enters one too."""
    mesh = mesh_lib.get_abstract_mesh()
    return None if mesh.empty or mesh._any_axis_manual else mesh


def is_abstract(mesh: Any) -> bool:
    """Whether a mesh has axes and no devices."""
    return isinstance(mesh, mesh_lib.AbstractMesh)


def push_mesh(mesh: Any) -> None:
    """Enters a mesh as JAX's own context manager does, without its DeprecationWarning."""
    resources = mesh_lib.thread_resources
    for entry in (_ENTERED, mesh):
        resources.stack.append(resources.stack[-1].with_mesh(entry))
    _mesh_stack_changed()


def pop_mesh() -> None:
    """Undoes :func:`push_mesh`."""
    del mesh_lib.thread_resources.stack[-2:]
    _mesh_stack_changed()


def _mesh_stack_changed() -> None:
    resources = mesh_lib.thread_resources
    resources.env = resources.stack[-1]
    entered = tuple(e.physical_mesh for e in resources.stack if not e.physical_mesh.empty)
    config.mesh_context_manager.set_local(entered)


@contextlib.contextmanager
def typing_under(mesh: Any) -> Iterator[None]:
    """Makes a mesh the one that the types of traced values refer to."""
    devices = mesh_lib.empty_concrete_mesh if is_abstract(mesh) else mesh
    concrete = sharding_impls._internal_use_concrete_mesh(devices)
    with concrete, abstract_mesh_set(mesh.abstract_mesh):
        yield


@contextlib.contextmanager
def tracing_under(mesh: Any) -> Iterator[None]:
    """Lets code that is traced find `mesh`, and nothing else, where JAX looks for one."""
    manual = mesh_lib.get_abstract_mesh()._any_axis_manual
    resources, outer = mesh_lib.thread_resources, mesh_lib.thread_resources.stack
    meshes = (_TRACING,) if is_abstract(mesh) else (_TRACING, mesh)
    with contextlib.ExitStack() as stack:
        if not manual:
            stack.enter_context(typing_under(mesh))
        # What was entered outside is not part of the key: the same mesh traces once.
        resources.stack = [outer[0], *(outer[0].with_mesh(m) for m in meshes)]
        _mesh_stack_changed()
        try:
            yield
        finally:
            resources.stack = outer
            _mesh_stack_changed()


@contextlib.contextmanager
def abstract_mesh_set(mesh: Any) -> Iterator[None]:
    """Makes a mesh, or with None no mesh, the one of new types, whatever it was before."""
    empty = mesh_lib.empty_abstract_mesh  # JAX lets no mesh follow one of another size
    with mesh_lib.use_abstract_mesh(empty), mesh_lib.use_abstract_mesh(mesh or empty):
        yield


def partly_manual(mesh: Any, axes: Sequence[Any]) -> Any:
    """The abstract mesh inside of a `shard_map` over some axes."""
    return mesh.abstract_mesh.update_axis_types(dict.fromkeys(axes, mesh_lib.AxisType.Manual))


def bound_axes() -> frozenset[Any]:
    """The axes that collectives may name where code is traced now."""
    return frozenset(core.get_axis_env().axis_sizes)


def manual_axes() -> frozenset[Any]:
    """The mesh axes that an enclosing `shard_map` maps over."""
    return frozenset(mesh_lib.get_abstract_mesh().manual_axes)


def manual_mesh() -> dict[Any, int]:
    """Axes ``{name: size}`` of the mesh that an enclosing `shard_map` is over; else empty."""
    mesh = mesh_lib.get_abstract_mesh()
    return dict(mesh.shape) if mesh._any_axis_manual else {}


def mesh_fields(mesh: Any) -> dict[str, Any]:
    """The fields of a mesh, to build an equal one of a subclass."""
    return vars(mesh)


# Devices that are not there


def tpu_chips() -> int:
    """How many TPU chips this machine has; looks at the PCI bus and starts nothing."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0]


def new_cpu_devices(count: int) -> list[Any]:
    """Virtual CPU devices of a client of their own: JAX's has as many as when it started."""
    return xla_client.make_cpu_client(num_devices=count).devices()


def lowered_devices(lowered: Any) -> tuple[Any, ...]:
    """The devices of a `jax.stages.Lowered`, which says them nowhere; none for an abstract mesh."""
    return tuple(lowered._lowering._device_list or ())


def is_described(device: Any) -> bool:
    """Whether a device is only described: programs are compiled for it and cannot run."""
    client = getattr(device, "client", None)
    return getattr(client, "runtime_type", "") == "compile_only_runtime"


# Shardings inside of a program

_sharding_sources: dict[Any, Callable[[Any], Sequence[Any]]] = {}


def declare_shardings(primitive: Any, shardings_of: Callable[[Any], Sequence[Any]]) -> None:
    """Tells JAX which shardings an equation of `primitive` holds.

    An outer `jax.jit` derives the devices of its program from the shardings inside of it, and
    looks only at its own primitives: without this, `jit(pjit(f))` would be built for one device.
    """
    _sharding_sources[primitive] = shardings_of


def _intermediate_shardings(jaxpr: Any) -> list[Any]:
    # JAX's function recurses through its module's global, so it finds us at every level.
    found = list(_jax_intermediate_shardings(jaxpr))
    for eqn in jaxpr.eqns:
        if shardings_of := _sharding_sources.get(eqn.primitive):
            source = dispatch.SourceInfo(eqn.source_info, eqn.primitive.name)
            found += [(s, source) for s in shardings_of(eqn)]
    return found


_jax_intermediate_shardings = dispatch.get_intermediate_shardings
dispatch.get_intermediate_shardings = _intermediate_shardings


def wrap_with_sharding(ctx: Any, value: Any, aval_in: Any, aval_out: Any, sharding: Any) -> Any:
    """Emits the operation that constrains a value, in the partitioner's own terms."""
    ndim = aval_in.ndim
    axis_ctx = ctx.module_context.axis_context
    if isinstance(axis_ctx, sharding_impls.SPMDAxisContext) and axis_ctx.manual_axes:
        sharding = mlir.add_manual_axes(axis_ctx, sharding, ndim)
    if jax.dtypes.issubdtype(aval_in.dtype, jax.dtypes.extended):
        physical: Any = core.physical_aval(aval_in)
        ndim = physical.ndim
    if not config.use_shardy_partitioner.value:
        dims = {i for i, p in enumerate(sharding.spec) if p is jax.P.UNCONSTRAINED}
        proto = sharding._to_xla_hlo_sharding(ndim).to_proto()
        return mlir.wrap_with_sharding_op(ctx, value, aval_out, proto, unspecified_dims=dims)
    sdy = sharding._to_sdy_sharding(ndim)
    return mlir.wrap_with_sharding_op(ctx, value, aval_out, sdy)


def free_in_branch(values: Sequence[Any]) -> Sequence[Any]:
    """Separates values of a branch of `cond` from their shardings.

    The results of all branches must be split alike, which the partitioner sees to only where no
    result is itself the value that a sharding is put on.
    """
    at: Any = ir.InsertionPoint.current
    if not values or at.block.owner.name != "stablehlo.case":
        return values
    return [*hlo.OptimizationBarrierOp(values).results]


def lower_call(
    ctx: Any,
    args: Sequence[Any],
    jaxpr: Any,
    name: str,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    key: Any,
) -> Sequence[Any]:
    """Emits a call of `jaxpr` as a function of the module, built once per `key`.

    Args:
        ctx: The lowering context of the equation.
        args: MLIR values of the arguments.
        jaxpr: Closed jaxpr.
        name: Name of the function.
        in_shardings: Per argument a sharding or None.
        out_shardings: Per result a sharding or None.
        key: Equal keys share one function.
    """
    module = ctx.module_context
    built = module.cached_primitive_lowerings.get(key)
    if built is None:
        built = _build_function(ctx, jaxpr, name, in_shardings, out_shardings)
        module.cached_primitive_lowerings[key] = built
    func, ordered, const_args = built
    consts = [
        mlir.ir_constants(c, const_lowering=ctx.const_lowering, aval=a) for c, a in const_args
    ]
    tokens = [ctx.tokens_in.get(e) for e in ordered]
    operands, _ = mlir.ir_tree_registry.flatten((*ctx.dim_var_values, *tokens, *consts, *args))
    out_types = [mlir.aval_to_ir_types(module, a) for a in ctx.avals_out]
    types, _ = mlir.ir_tree_registry.flatten([mlir.token_type()] * len(ordered) + out_types)
    stack = ctx.name_stack.extend(util.wrap_name("pjit", name))
    with mlir.source_info_to_location(module, None, stack, ctx.traceback):
        symbol = ir.FlatSymbolRefAttr.get(func.name.value)
        call = func_dialect.CallOp(types, symbol, operands)
    results = list(call.results)
    if ordered:
        out_tokens = dict(zip(ordered, results[: len(ordered)], strict=True))
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet(out_tokens)))
    return free_in_branch(results[len(ordered) :])


def _build_function(
    ctx: Any, jaxpr: Any, name: str, in_shardings: Sequence[Any], out_shardings: Sequence[Any]
) -> tuple[Any, tuple[Any, ...], Sequence[Any]]:
    ordered = tuple(effects.ordered_effects.filter_in(jaxpr.effects))
    const_args = core.jaxpr_const_args(inner_jaxpr(jaxpr))
    more = {"out_avals": jaxpr.out_avals} if MERGED_JAXPR else {}
    func = mlir.lower_jaxpr_to_fun(
        ctx.module_context,
        name,
        jaxpr,
        ordered,
        num_const_args=len(const_args),
        in_avals=(*(a for _, a in const_args), *jaxpr.in_avals),
        arg_shardings=[*(None for _ in const_args), *in_shardings],
        result_shardings=list(out_shardings),
        # Shardings on the arguments of an inner function are lost on the way to HLO.
        use_sharding_annotations=False,
        **more,
    )
    return func, ordered, const_args


register_lowering = mlir.register_lowering

# Ordered effects on the host


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

    JAX hands the token of one program to the next. Where the first failed, the next ones would
    fail too; here they get a token of their own as soon as the first has ended either way.

    Args:
        started: Called in the thread that starts such a program, before it starts.
        must_settle: Whether a program has to wait until the one before has ended.

    Returns:
        The tokens of the programs that were started, as a deque that grows; whoever reads it
        removes those that are ready.
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


def varying_aval(shape: Sequence[int], dtype: Any) -> Any:
    """The aval of a value that each device of an enclosing `shard_map` has by itself."""
    mesh = mesh_lib.get_abstract_mesh()
    if not mesh._any_axis_manual or not config._check_vma.value:
        return ShapedArray(tuple(shape), dtype)
    varying = core.ManualAxisType(varying=frozenset(mesh.manual_axes))
    whole = jax.NamedSharding(mesh, jax.P(*(None for _ in shape)))
    return ShapedArray(tuple(shape), dtype, sharding=whole, manual_axis_type=varying)


def varying_axes(aval: Any) -> tuple[frozenset[str], bool]:
    """Manual axes over which a traced value differs, and whether `shard_map` keeps account."""
    kind = getattr(aval, "manual_axis_type", None)
    return getattr(kind, "varying", frozenset()), bool(config._check_vma.value)


def physical_shape(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array behind an aval; that of a PRNG key has a dimension more."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        aval = core.physical_aval(aval)
    return tuple(aval.shape), np.dtype(aval.dtype)


def partition_of(ctx: Any) -> tuple[int, dict[str, int], bool | None]:
    """How the program around an equation is split.

    Returns:
        The number of devices, the axes of the mesh where an enclosing `shard_map` or the types of
        the operands say them, and whether the equation is in the program of one device already:
        None where it is so along some axes only.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.SPMDAxisContext) and context.manual_axes:
        whole = frozenset(context.mesh.axis_names) <= context.manual_axes
        if CRASHES_ON_NESTED_TOKENS and _nested_region(context.mesh.axis_names):
            whole = False
        # An axis that the user did not name, of a pmap, is no axis of a mesh.
        axes = {n: s for n, s in context.mesh.shape.items() if n != "_internal_pmap_axis_name"}
        return context.mesh.size, axes, whole or None
    count = getattr(context, "num_devices", None) or getattr(context, "size", 1)
    meshes = [getattr(context, "abstract_mesh", None)]
    meshes += [a.sharding.mesh for a in ctx.avals_in if isinstance(a, ShapedArray)]
    return count, next((dict(m.shape) for m in meshes if m is not None and not m.empty), {}), False


def _nested_region(names: Sequence[Any]) -> bool:
    """Whether several nested `shard_map` together are over all axes."""
    at: Any = ir.InsertionPoint.current
    region = at.block.owner
    return region.name == "sdy.manual_computation" and any(
        f'"{n}"' not in str(region.attributes["manual_axes"]) for n in names
    )


def runs_on_all_devices(names: Sequence[Any]) -> bool:
    """Whether what is lowered now is run by every device of an enclosing `shard_map`.

    Inside of a branch or a loop each device may go its own way, and a nested `jit` may be called
    from one.

    Args:
        names: The axes of the mesh.
    """
    at: Any = ir.InsertionPoint.current
    if at.block.owner.name != "sdy.manual_computation":
        return False
    # A region over all axes is in no other one, of which only some devices may come here.
    return not _nested_region(names)


def emit_host_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    results: Sequence[tuple[Sequence[int], Any]],
    attributes: dict[str, int | str] | str,
    *,
    by_partition: bool,
) -> list[Any]:
    """Emits a call to the host, after all earlier ones of the program.

    Args:
        ctx: The lowering context of an equation with a host effect.
        target: Name of the handler, or of the partitioner that puts one in its place.
        operands: MLIR values.
        results: Shape and dtype of each result.
        attributes: Those of a handler, or a text for a partitioner.
        by_partition: Whether the handler is told first which partition calls.

    Returns:
        MLIR values of the results.
    """
    operands = list(operands)
    if by_partition:
        operands = [hlo.PartitionIdOp().result, *operands]
    token = ctx.tokens_in.get(HOST_EFFECT)
    token, *outs = values = _custom_call(target, token, operands, results, attributes)
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
        ctx.module_context.add_host_callback(_no_callback)


def _no_callback(*args: Any) -> tuple[Any, ...]:
    return args


def hold_weakly(record: type) -> None:
    """Tells JAX's caches of rules to hold parameters of a type weakly, as they hold jaxprs."""
    util.weakref_cache_key_types.add(record)


def backends_started() -> bool:
    """Whether JAX has made its clients."""
    return xla_bridge.backends_are_initialized()


# Several processes


def coordination_client() -> Any:
    """The client of the service that `jax.distributed` starts, which keeps keys and values."""
    return distributed.global_state.client


def detected_cluster(
    address: str | None,
    processes: int | None,
    process: int | None,
    device_ids: Sequence[int] | None,
    method: str | None,
    timeout: int,
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Fills what was not given from the environment: SLURM, Open MPI, Kubernetes, Cloud TPU.

    `jax.distributed.initialize` does that by itself, and connects at once; who wants to know
    beforehand where it will connect to has to ask.
    """
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params
    return found(address, processes, process, device_ids, method, timeout)


def platforms_of(ctx: Any) -> tuple[str, ...]:
    """The platforms that the module of an equation is made for."""
    return tuple(ctx.module_context.platforms)


def mesh_devices(ctx: Any) -> list[Any]:
    """The devices of an enclosing `shard_map`; empty where there are none."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return [] if mesh is None or is_abstract(mesh) else [*mesh.devices.flat]


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


def _custom_call(
    target: str, token: Any, operands: Sequence[Any], results: Sequence[Any], attributes: Any
) -> list[Any]:
    types = [mlir.token_type()] + [_tensor(*r) for r in results]
    if isinstance(attributes, dict):
        attributes = {
            k: ir.StringAttr.get(v) if isinstance(v, str) else mlir.i64_attr(v)
            for k, v in attributes.items()
        }
    ranks = [len(ir.RankedTensorType(o.type).shape) for o in operands]
    call = mlir.custom_call(
        target,
        result_types=types,
        operands=[token, *operands],
        backend_config=attributes,
        has_side_effect=True,
        operand_layouts=[[], *(range(r - 1, -1, -1) for r in ranks)],
        result_layouts=[[], *(range(len(r[0]) - 1, -1, -1) for r in results)],
    )
    return [*call.results]


def _tensor(shape: Sequence[int], dtype: Any) -> Any:
    return ir.RankedTensorType.get(shape, mlir.dtype_to_ir_type(np.dtype(dtype)))


def convert_elements(value: Any, dtype: Any) -> Any:
    """Emits a conversion of an MLIR value to another dtype."""
    shape = ir.RankedTensorType(value.type).shape
    return hlo.ConvertOp(_tensor(shape, dtype), value).result


def shard_module(
    target: str,
    operands: Sequence[tuple[Sequence[int], Any]],
    results: Sequence[tuple[Sequence[int], Any]],
    attributes: dict[str, int | str],
) -> bytes:
    """Builds the program of one device that calls a handler with a token, partition and operands.

    Args:
        target: Name of the handler.
        operands: Shape and dtype of each operand on one device.
        results: Shape and dtype of each result on one device.
        attributes: Attributes of the call.
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            token = mlir.token_type()
            types = [token, *(_tensor(*o) for o in operands)]
            outs = [token, *(_tensor(*r) for r in results)]
            func = func_dialect.FuncOp("main", ir.FunctionType.get(types, outs))
            with ir.InsertionPoint(func.add_entry_block()):
                first, *rest = func.arguments
                rest = [hlo.PartitionIdOp().result, *rest]
                func_dialect.ReturnOp(_custom_call(target, first, rest, results, attributes))
        return mlir.module_to_bytecode(module)


def register_partitioner(name: str, partition: Callable, spread: Callable) -> None:
    """Registers what takes the place of custom calls when a program is split.

    Args:
        name: Target of the custom calls.
        partition: Function of the operand shapes, operand shardings, result shape, result sharding
            and text of a call; returns a module, operand shardings and the result sharding.
        spread: Function of the operand shapes, operand shardings, result shape and text; returns
            the sharding of the result.
    """
    xla_client.register_custom_call_partitioner(
        name,
        lambda sharding, shape, text: sharding,
        partition,
        spread,
        can_side_effecting_have_replicated_sharding=True,
    )


def typed_mesh(values: Sequence[Any]) -> Any:
    """The mesh that the types of values are split over, without its devices; else None."""
    types = [core.typeof(x) for x in values]
    meshes = [a.sharding.mesh for a in types if isinstance(a, ShapedArray)]
    return next((m for m in meshes if not m.empty), None)


def canonical_dtype(dtype: Any) -> Any:
    """The dtype that values have on devices: 32 bits for 64 unless x64 is enabled."""
    return jax.dtypes.canonicalize_dtype(dtype)


def physical_value(x: Any) -> Any:
    """The array behind a PRNG key; anything else is itself."""
    if jax.dtypes.issubdtype(core.typeof(x).dtype, jax.dtypes.extended):
        return jax.random.key_data(x)
    return x


def instantiate(tangent: Any) -> Any:
    """Makes an array of a symbolic zero."""
    return ad.instantiate_zeros(tangent)


def is_linear(x: Any) -> bool:
    """Whether a transpose rule is to return a cotangent of this argument."""
    return ad.is_undefined_primal(x)


def zero_tangent(x: Any) -> Any:
    """The symbolic zero tangent of a value."""
    return ad.p2tz(x)


def uninstantiated(eqn: Any, instantiated: Sequence[bool]) -> list[Any]:
    """The input variables of an equation that a second pass has only as residuals."""
    pairs = zip(eqn.invars, instantiated, strict=True)
    return [v for v, here in pairs if isinstance(v, core.Var) and not here]


def is_saved(decision: Any) -> bool:
    """Whether the policy of a checkpoint keeps a result."""
    return not isinstance(pe.ensure_enum(decision), pe.RecomputeType)


primitive_transposes = ad.primitive_transposes
primitive_batchers = batching.primitive_batchers
partial_eval_custom_rules = pe.partial_eval_jaxpr_custom_rules


# Moving arrays


ArrayImpl = xla_client.ArrayImpl
_ONLY_ARRAYS = frozenset((ArrayImpl,))
_flatten = tree_util.default_registry.flatten  # a frame less than `tree_leaves`


def arrays_of(tree: Any) -> list[Any]:
    """The arrays on devices among the leaves of a tree, those behind PRNG keys too."""
    leaves, _ = _flatten(tree, None)
    if _ONLY_ARRAYS.issuperset(map(type, leaves)):
        return leaves
    bare = [x._base_array if isinstance(x, prng.PRNGKeyArray) else x for x in leaves]
    return [x for x in bare if isinstance(x, ArrayImpl)]


def has_own_layout(x: Any) -> bool:
    """Whether an array's elements lie in another order than programs read their arguments in."""
    # Asking a deleted array crashes JAX 0.10.
    if not isinstance(x, ArrayImpl) or x.is_deleted():
        return False
    try:
        layout = x._pjrt_layout
    except RuntimeError:
        return False  # a backend that knows no layouts
    return not _is_default_layout(layout, x.sharding, x.shape, x.dtype)


@functools.lru_cache(maxsize=4096)
def _is_default_layout(layout: Any, sharding: Any, shape: tuple[int, ...], dtype: Any) -> bool:
    layout = Layout.from_pjrt_layout(layout)
    return pxla.is_default_layout(layout, sharding, ShapedArray(shape, dtype))


def reshard(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Copies arrays to other shardings over the same devices, without the host.

    `jax.device_put` alone copies to the host and back, except where the order of devices differs.
    """
    moved = list(arrays)
    pairs = enumerate(zip(arrays, shardings, strict=True))
    here = [i for i, (a, s) in pairs if a.sharding._device_assignment == s._device_assignment]
    if here:
        program = _resharder(tuple(shardings[i] for i in here))
        # What a user switched on or off for the call is not meant for this program.
        off = (config.disable_jit, config.debug_nans, config.debug_infs, config.no_tracing)
        with contextlib.ExitStack() as stack:
            for state in off:
                stack.enter_context(state(False))
            for i, new in zip(here, program([arrays[i] for i in here]), strict=True):
                moved[i] = new
    for i in set(range(len(moved))) - set(here):
        moved[i] = jax.device_put(arrays[i], shardings[i], may_alias=False)
    if moved and next(iter(shardings[0].device_set)).platform == "cpu":
        # Virtual devices share few threads: collectives of many pending programs can deadlock.
        jax.block_until_ready(moved)
    return moved


@functools.lru_cache(maxsize=1024)
def _resharder(shardings: tuple[Any, ...]) -> Any:
    def reshard(arrays: list[Any]) -> list[Any]:
        return arrays

    return jax.jit(reshard, out_shardings=list(shardings))


# Dispatch


def lower_module(
    jaxpr: Any,
    name: str,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    donated: Sequence[bool],
    mesh: Any,
    *,
    keep_unused: bool,
    compiler_options: tuple[tuple[str, Any], ...] = (),
    platforms: tuple[str, ...] | None = None,
    parameters: Any = None,
) -> Any:
    """Lowers a closed jaxpr to a StableHLO module with shardings on its inputs and outputs.

    Args:
        jaxpr: Closed jaxpr.
        name: Name of the function.
        in_shardings: One per input.
        out_shardings: One per output.
        donated: Per input, whether its buffers may be reused.
        mesh: The mesh of the program.
        keep_unused: Whether inputs that it does not use stay inputs of the module.
        compiler_options: Pairs for the compiler.
        platforms: Of an export: those that the module is for.
        parameters: Of an export: JAX's own parameters of the lowering.
    """
    if is_abstract(mesh):
        platforms = platforms or (jax.default_backend(),)
    return pxla.lower_sharding_computation(
        jaxpr,
        "pjit",
        name,
        tuple(in_shardings),
        tuple(out_shardings),
        (None,) * len(in_shardings),
        (None,) * len(out_shardings),
        tuple(donated),
        keep_unused=keep_unused,
        context_mesh=mesh,
        compiler_options_kvs=compiler_options,
        lowering_platforms=platforms,
        lowering_parameters=parameters or mlir.LoweringParameters(),
        pgle_profiler=None,
    )


def is_compiled(lowering: Any) -> bool:
    """Whether JAX keeps an executable with this lowering: compiling again costs nothing."""
    return lowering._executable is not None


def lines_in_cache_key() -> Any:
    """A context in which JAX's persistent cache gives no program of another version of the source.

    Else its key leaves lines and names out: a program comes with those that it was stored with.
    """
    return config.compilation_cache_include_metadata_in_key(True)


def may_have_other_lines() -> bool:
    """Whether programs may come from JAX's persistent cache with lines of another version."""
    return (
        config.enable_compilation_cache.value
        and bool(config.compilation_cache_dir.value)
        and not config.compilation_cache_include_metadata_in_key.value
    )


def executable_of(compiled: Any) -> Any:
    """What JAX keeps of a compiled program: one object, however often it is asked for."""
    return compiled._executable


def shardings_of(compiled: Any) -> tuple[list[Any], list[Any]]:
    """How what a program of `jax.jit` takes and gives lies on its devices, in order.

    What it does not use has None. The lists and not the trees that JAX makes of them: a program
    that writes to references gives their values besides what its function returns.
    """
    return [*compiled._input_shardings_flat()], [*compiled._executable._out_shardings]


def placement_key(shardings: Sequence[Any], avals: Sequence[Any]) -> Any:
    """A key under which shardings that mean the same on these avals are equal."""
    return pxla.SemanticallyEqualShardings(tuple(shardings), tuple(avals))


def op_sharding(sharding: Any, ndim: int) -> Any:
    """The OpSharding that a compiler reads for this sharding."""
    return sharding._to_xla_hlo_sharding(ndim).to_proto()


def device_order(sharding: Any) -> list[Any]:
    """The devices of a sharding in the order in which programs number them."""
    return [*sharding._device_assignment]


def local_device_order(sharding: Any) -> list[Any]:
    """The devices of this process among them: in this order an array holds its parts."""
    return [d for d in device_order(sharding) if d.process_index == xla_bridge.process_index()]


def local_parts(x: Any) -> Sequence[Any]:
    """The arrays of one device each that this process has of an array."""
    return x._arrays


def device_list(sharding: Any) -> Any:
    """The devices of a sharding as one hashable object that JAX keeps; equal lists are equal."""
    return sharding._internal_device_list


def copier(devices: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns what copies arrays of one device each, ready or not, to these devices by one call.

    `jax.device_put` takes 30 µs per array; this takes 10.
    """
    single = [_single_device(d) for d in devices]
    lists = [s._internal_device_list for s in single]
    semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(single)
    copy = xla_client.batched_copy_array_to_devices_with_sharding
    return lambda arrays: copy(arrays, lists, single, semantics)


def assembler(shape: Sequence[int], dtype: Any, sharding: Any) -> Callable[[list[Any]], Any]:
    """Returns what makes an array of its local parts, one per device in the sharding's order.

    `jax.make_array_from_single_device_arrays` checks each time what is known here: 25 µs.
    """
    aval = ShapedArray(shape, np.dtype(dtype))
    return lambda parts: Array(aval, sharding, parts, committed=True, _skip_checks=True)


_single_device = functools.lru_cache(maxsize=1024)(jax.sharding.SingleDeviceSharding)
util.register_cache(_single_device, "shardings of one device")


def asynchronous_cpu() -> bool:
    """Whether programs of the CPU may run while their caller goes on.

    `jax.config` makes a dictionary of all its values for each look at one of its flags: 10 µs.
    """
    return bool(xla_bridge._CPU_ENABLE_ASYNC_DISPATCH.value)


def watch_starts(started: Callable[[], None]) -> Callable[[], None]:
    """Tells of programs on several CPU devices, in the thread that starts them.

    JAX starts a program that it has started before without Python, and then calls a hook; what
    the process has set as such is called as well.

    Args:
        started: Called before such a program starts, or after it where it starts without Python.

    Returns:
        What a thread calls to have `started` called there, until it sets `jax_debug_nans` or
        the like for itself: JAX has one hook for them all. In other threads it may be called, too.
    """
    program: Any = pxla.ExecuteReplicated
    jax_execute, hook = program.__call__, api._post_hook_state

    def started_on(devices: Sequence[Any]) -> None:
        if len(devices) > 1 and devices[0].platform == "cpu":
            started()

    def execute(self: Any, *args: Any) -> Any:
        started_on(self._local_devices)
        return jax_execute(self, *args)

    def after(fun: Any, args: Any, kwargs: Any, out: Any) -> None:
        if (hook_of_all := hook.get_global()) is not None:
            hook_of_all(fun, args, kwargs, out)
        first = next((x for x in jax.tree.leaves(out) if isinstance(x, Array)), None)
        if first is not None:
            started_on(local_device_order(first.sharding))

    program.__call__ = execute
    return lambda: hook.set_local(after)


def without_axis(x: Any, axis: int) -> Any:
    """An array of one device without an axis of size 1: on the CPU in the same memory.

    There it waits until the array is there. The memory stays as long as one of the two does, and
    is not donated meanwhile.
    """
    (device,) = x.devices()
    if device.platform != "cpu" or x.dtype.name in _SUB_BYTE:
        return _squeeze(x, (axis,))
    view = np.squeeze(np.asarray(x), axis)
    aval = ShapedArray(view.shape, view.dtype, weak_type=x.weak_type)
    return pxla.batched_device_put(
        aval, sharding_impls.SingleDeviceSharding(device), [view], [device]
    )


_SUB_BYTE = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
_squeeze = jax.jit(jax.lax.squeeze, static_argnums=1)


def has_effects(jaxpr: Any) -> bool:
    """Whether anything in an open jaxpr has an effect; a collective has one on its named axis."""
    return any(
        eqn.effects or any(has_effects(inner) for inner in core.jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def place_axis_indices(jaxpr: Any, mesh: Any = None) -> None:
    """Says to each `axis_index` what the mesh is where it stands, if its trace did not say it.

    JAX lowers it by a `shard_map` over the other axes, which needs the mesh of the context.

    Args:
        jaxpr: An open jaxpr; equations are changed in place.
        mesh: The abstract mesh around it, or None.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive is jax.lax.axis_index_p and eqn.ctx.cur_abstract_mesh.empty and mesh:
            with abstract_mesh_set(mesh):
                eqn.ctx = core.JaxprEqnContext()
        inside = mesh
        if eqn.primitive.name == "shard_map":
            names = eqn.params["newly_manual_axes"]
            inside = partly_manual(eqn.params["mesh"], tuple(names))
        for inner in core.jaxprs_in_params(eqn.params):
            place_axis_indices(inner, inside)


def _without_mesh(x: Any) -> Any:
    return ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)


def _untyped_transpose(ct: Any, _: Any) -> tuple[Any]:
    return (ct if type(ct) is ad.Zero else untyped_p.bind(ct),)


# An identity: the type of its result says no mesh, and goes with values of any.
untyped_p = core.Primitive("untyped")
untyped_p.def_impl(lambda x: x)
untyped_p.def_abstract_eval(_without_mesh)
mlir.register_lowering(untyped_p, lambda _, x: [x])
ad.deflinear2(untyped_p, _untyped_transpose)
batching.defvectorized(untyped_p)


def untyped(x: Any) -> Any:
    """A traced value with a type that says no mesh; anything else as it is."""
    return untyped_p.bind(x) if type(core.typeof(x)) is ShapedArray else x


def args_info(in_tree: Any, avals: Sequence[Any], donated: Sequence[bool]) -> Any:
    """The tree of argument descriptions that JAX's stages hold."""
    infos = [stages.ArgInfo(a, d) for a, d in zip(avals, donated, strict=True)]
    return in_tree.unflatten(infos)


def const_args(hoisted: Sequence[Any], executable: Any) -> Sequence[Any]:
    """The constants that the program takes as leading arguments, placed on its devices."""
    return executable.shard_const_args(hoisted)


def fast_path_data(executable: Any, consts: Sequence[Any], out_tree: Any, outs: Any) -> Any:
    """What the C++ dispatcher needs to run a program again; None if it must not.

    Args:
        executable: The MeshExecutable.
        consts: Its constant arguments.
        out_tree: Tree of the results.
        outs: Flat results of the first run.
    """
    call = executable.unsafe_call
    if (
        not isinstance(call, pxla.ExecuteReplicated)
        or call.ordered_effects
        or call.has_unordered_effects
        or call.mut
        or config.no_execution.value
        or config.debug_key_reuse.value
    ):
        return None
    outs, out_tree = pxla.reflatten_outputs_for_dispatch(out_tree, outs)
    if not all(isinstance(o, ArrayImpl) for o in outs):
        return None
    return pxla.MeshExecutableFastpathData(
        executable.xla_executable,
        out_tree,
        _physical(executable._in_shardings, executable.in_avals),
        [o.sharding for o in outs],
        [o.aval for o in outs],
        [o._committed for o in outs],
        [i in executable._kept_var_idx for i in range(len(executable._all_args_info.in_avals))],
        executable._dispatch_in_layouts,
        consts,
    )


def _physical(shardings: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Shardings of the arrays that back extended dtypes such as PRNG keys."""
    return [
        sharding_impls.physical_sharding(a, s)
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended)
        else s
        for s, a in zip(shardings, avals, strict=True)
    ]


# Programs in files

JAXLIB_VERSION = jaxlib.version.__version__


def serialized(executable: Any) -> bytes:
    """The runtime's own form of a program.

    Raises:
        JaxRuntimeError: The runtime has none for it.
    """
    return executable.xla_executable.serialize()


#: How the functions of a program start in its written form, on Linux.
OBJECT_FILE = b"\x7fELF"


def rewritten_size(data: bytes, devices: Sequence[Any]) -> int:
    """The size, in bytes, of what :func:`serialized` gives of a program that was read again."""
    return len(_read_program(data, devices).serialize())


def planned(data: bytes, devices: Sequence[Any]) -> tuple[float, list[Any]]:
    """What the runtime plans by when it reads what :func:`serialized` gave.

    Returns:
        FLOPs by its own count, and all else that tells of its inputs, results and memory.
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


def equations(jaxpr: Any) -> Iterator[tuple[str, str, bool]]:
    """Name, line and whether it has an effect, of each equation in a jaxpr and inside of those."""
    for eqn in getattr(jaxpr, "eqns", ()):
        yield eqn.primitive.name, source_info_util.summarize(eqn.source_info), bool(eqn.effects)
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


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
    """Makes a MeshExecutable of what :func:`serialized` gave.

    Args:
        data: The runtime's form; the runtime trusts it.
        devices: The devices that run it, in the order in which it numbers them.
        name: What profiles call it.
        in_avals: Per input, constants first.
        kept: Which inputs the program has; the others are not used.
        in_shardings: Per input that it has.
        out_avals: Per result.
        out_shardings: Per result.
        committed: Whether results are committed to their devices.

    Raises:
        ValueError: The program has other inputs or results.
        JaxRuntimeError: The runtime refuses it.
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


def start_lapack() -> None:
    """Finds the functions of LAPACK, as a lowering does: a call before that ends the process."""
    lapack._lapack.initialize()


def make_aval(
    shape: Sequence[int], dtype: Any, *, weak_type: bool, memory: str | None, sharding: Any
) -> Any:
    """The type of an array.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        weak_type: Whether it gives way to others in promotion.
        memory: Name of a memory space, or None for the usual one.
        sharding: The sharding that its type says, or None.
    """
    space = core.MemorySpace.Device if memory is None else core.MemorySpace[memory]
    return ShapedArray(
        tuple(shape), dtype, weak_type=weak_type, sharding=sharding, memory_space=space
    )


#: Names of the memory spaces that a type may say.
MEMORY_SPACES = tuple(core.MemorySpace.__members__)


def memory_space_of(aval: Any) -> str | None:
    """Name of the memory space that a type says; None for the usual one."""
    space = aval.memory_space
    return None if space is core.MemorySpace.Device else space.name


def key_dtypes() -> dict[str, Any]:
    """The dtypes of arrays of random keys, by the name of what makes the numbers."""
    return {name: prng.KeyTy(impl) for name, impl in prng.prngs.items()}


def tiling_of(sharding: Any) -> tuple[list[int], list[int], bool] | None:
    """Tiles, order of devices and replication in the last dimension of a GSPMDSharding.

    None for other shardings, and for those that say something else than tiles.
    """
    if not isinstance(sharding, sharding_impls.GSPMDSharding):
        return None
    hlo = sharding._hlo_sharding
    if not hlo.is_tiled() or hlo.subgroup_types():
        return None
    order = [*hlo.tile_assignment_devices()]
    return [*hlo.tile_assignment_dimensions()], order, hlo.replicate_on_last_tile_dim()


def tiled_sharding(
    devices: Sequence[Any], tiles: Sequence[int], order: Sequence[int], last: bool, memory: Any
) -> Any:
    """The GSPMDSharding of what :func:`tiling_of` gave, over these devices."""
    proto = xla_client.OpSharding()
    proto.type = xla_client.OpSharding.Type.OTHER
    proto.tile_assignment_dimensions = [*tiles]
    proto.tile_assignment_devices = [*order]
    proto.replicate_on_last_tile_dim = last
    return sharding_impls.GSPMDSharding(tuple(devices), proto, memory_kind=memory)


def registered_nodes() -> dict[type, Any]:
    """The types of pytree nodes that this process knows; `from_iter` builds one of its children."""
    return tree_util._registry


def make_dispatcher(
    fun: Callable | None,
    name: str,
    cache_miss: Callable,
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
    key: Any,
) -> Any:
    """Returns a callable that answers repeated calls in C++, or None where JAX has no such thing.

    Args:
        fun: The user's function, held weakly by the cache; None for a dispatcher with its own.
        name: Shown in profiles.
        cache_miss: Called as `fun` is; returns results, fast-path data or None, and False.
        static_argnums: Positions that are part of the key by value.
        static_argnames: Likewise, by name.
        key: What else tells two dispatchers of one function apart.
    """
    if not hasattr(_jax, "pjit"):
        return None
    failed = False

    @api_boundary
    def miss(*args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        try:
            found = cache_miss(*args, **kwargs)
        except BaseException:
            failed = True
            raise
        if failed:  # C++ learns nothing of a signature that has failed, until it forgets it
            failed = False
            held()._clear_cache()
        return found

    shared = () if fun is None else (_dispatch_cache(),)
    dispatch = _jax.pjit(
        name,
        fun,
        miss,
        list(static_argnums),
        list(static_argnames),
        key,
        tree_util.dispatch_registry,
        pxla.cc_shard_arg,
        *shared,
    )
    if fun is not None:
        dispatch._fun = fun  # what JAX runs again, unjitted, when jax_debug_nans finds one
    held: Any = weakref.ref(dispatch)
    return dispatch


@functools.lru_cache(maxsize=1)
def _dispatch_cache() -> Any:
    return _jax.PjitFunctionCache(capacity=8192)


def clear_dispatch_cache() -> None:
    """Forgets what the C++ dispatchers learned, and how to move arrays."""
    _resharder.cache_clear()
    _dispatch_cache().clear()
