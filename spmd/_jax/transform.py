"""Jaxprs under JAX's transformations: batched, linearized, transposed, evaluated in part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax._src import api_util, core, effects, source_info_util
from jax._src.interpreters import ad, batching, mlir, partial_eval as pe

from spmd._jax.core import (
    ShapedArray,
    close_jaxpr,
    inner_jaxpr,
    positional_effects,
    trace_to_jaxpr,
    unknown_debug_info,
    weakref_lru_cache,
)
from spmd._jax.mesh import abstract_mesh_set, partly_manual
from spmd._jax.versions import STRUCTURED_RESIDUALS

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


def bind_inputs(jaxpr: Any, values: Sequence[Any]) -> Any:
    """Makes inputs of a closed jaxpr without constants its constants, where a value is not None."""
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

    Returns the closed jaxpr, and per output from `first` on which of its outputs that is.
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
    """Splits a closed jaxpr into its value and its linear map, to be transposed if `is_vjp`.

    Returns the closed jaxpr of the outputs and computed residuals; per output, whether it has a
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


def plain_jaxpr(jaxpr: Any) -> Any:
    """Returns a closed jaxpr without operations of hijax; its values have to be plain."""
    return pe.lower_jaxpr2(jaxpr) if jaxpr.is_high else jaxpr


#: What the runtime raises when `jax_debug_nans` finds one in a program.
InternalFloatingPointError = api_util.InternalFloatingPointError
#: Runs a function unjitted to find the operation that made a NaN; always raises.
find_nan = api_util.maybe_recursive_nan_check


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
    """Flattens what a transpose rule gets: cotangents, then accumulators of linear inputs, values.

    Zeros stay symbolic. Returns the inputs of the transposed jaxpr, and what that one depends on.
    """
    primals, specs = ad.project_accums(args)
    flat, in_tree = jax.tree_util.tree_flatten((primals, list(cts_in)))
    return flat, (in_tree, tuple(core.typeof(x) for x in flat), specs)


def transpose_jaxpr(jaxpr: Any, key: Any) -> tuple[Any, Any, list[bool], list[bool], int]:
    """Builds the jaxpr that turns cotangents of the outputs into cotangents of the linear inputs.

    `key` is from :func:`flatten_transpose`. Returns the transposed closed jaxpr, the tree of its
    outputs, per argument whether it is still an input, per argument whether it has a cotangent, and
    how many outputs follow those.
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

    return trace_to_jaxpr(transposed, in_avals, unknown_debug_info(jaxpr)), out_tree


#: Makes an array of a symbolic zero.
instantiate = ad.instantiate_zeros
#: Whether a transpose rule is to return a cotangent of this argument.
is_linear = ad.is_undefined_primal
#: The symbolic zero tangent of a value.
zero_tangent: Any = ad.p2tz


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


def place_axis_indices(jaxpr: Any, mesh: Any = None) -> None:
    """Says to each `axis_index` what the mesh is where it stands, if its trace did not say it.

    JAX lowers it by a `shard_map` over the other axes, which needs the mesh of the context. The
    equations of the open jaxpr are changed in place.
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
