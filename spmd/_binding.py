"""From the arguments of a call to what it binds, in file order: flatten to PjitCall."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Sharding
import jax.tree_util as jtu
import numpy as np

from spmd import _jax
from spmd._arguments import argument_specs, describe_leaves, split_arguments
from spmd._call import PjitCall
from spmd._constraint import sharding_constraint_p
from spmd._doors import opened
from spmd._local import global_shape
from spmd._mesh import active_mesh, auto_mesh, check_parts, enclosing_pjit, plain_mesh
from spmd._options import PjitOptions, mesh_clash
from spmd._pjit import nested_mesh_failure
from spmd._resolve import from_array_failure, mesh_of, no_mesh, resolve_leaves
from spmd._spec import FROM_ARRAY, UNSPECIFIED, ParsedPartitionSpec
from spmd._trace import Signature, Trace, trace
from spmd.errors import ArgumentError, Failure, PlanError, explain

# Flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """The arguments of one call.

    Attributes:
        leaves: Their values, static ones left out.
        signature: Everything else about them.
        semantics: Per leaf ``"global"`` or ``"local"``.
    """

    leaves: list[Any]
    signature: Signature
    semantics: tuple[str, ...]


def flatten(options: PjitOptions, args: tuple, kwargs: Mapping[str, Any]) -> Flat:
    """Binds and flattens the arguments of a call."""
    split = split_arguments(options.params, args, kwargs, options.subject)
    leaves, tree = jtu.tree_flatten(split.dynamic)
    names, donated = describe_leaves(options.params, split.positions, tree)
    signature = Signature(
        tree=tree,
        avals=_avals(leaves, names, options),
        positions=split.positions,
        statics=split.statics,
        arg_names=names,
        donated=donated,
    )
    local = options.positional_semantics == "local"
    # An array that exists is global: its sharding already says which part is where.
    semantics = tuple(
        "local" if local and not isinstance(x, jax.Array) else "global" for x in leaves
    )
    return Flat(leaves=leaves, signature=signature, semantics=semantics)


def _avals(leaves: Sequence[Any], names: Sequence[str], options: PjitOptions) -> tuple[Any, ...]:
    try:
        return tuple([_jax.core.abstractify(x) for x in leaves])
    except (TypeError, ValueError, OverflowError):
        found = [_no_array(x, n) for x, n in zip(leaves, names, strict=True)]
        words = {"static": options.static_option, "function": options.name}
        bad = [replace(f, fix=f.fix.format(**words)) for f in found if f]
        if not bad:
            raise
        raise explain(options.subject, bad) from None


def _no_array(value: Any, name: str) -> Failure | None:
    try:
        _jax.core.abstractify(value)
    except (TypeError, ValueError, OverflowError) as e:
        what = f"cannot take argument {name}: it is no array"
        expected = "arrays, numbers, and containers of them"
        got = f"{type(value).__name__}: {value!r}"
        fix = "declare it static with {static}, or convert it with jnp.asarray"
        if name == "self":
            what, fix = f"{what}, but the object of a method", _METHOD
        elif callable(value) and not isinstance(value, type) and not name.isidentifier():
            fix = _MODULE
        if isinstance(e, OverflowError):
            what = f"cannot take argument {name}: the number is too large"
            expected = f"a number that fits into {jax.dtypes.canonicalize_dtype(int)}"
            fix = "pass a float, or enable jax_enable_x64"
        elif isinstance(value, (np.ndarray, np.generic)):
            what = f"cannot take argument {name}: JAX has no dtype for it"
            expected = "an array of numbers or booleans"
            got = f"an array of dtype {value.dtype}"
            fix = "convert it with astype, or declare it static with {static}"
        return Failure(what=what, expected=expected, got=got[:100], fix=fix, error=ArgumentError)
    return None


_MODULE = (
    "pass the arrays alone, with Equinox those of eqx.partition(module, eqx.is_array),\n"
    "and eqx.combine them with the rest inside; or declare its argument static with {static}"
)
_METHOD = (
    "take it off the class and apply it to obj.{function}, which closes over the object;\n"
    "or declare self static with {static}, where the object has a hash;\n"
    "or register its class as a pytree"
)


# Resolve inputs


def find_mesh(options: PjitOptions, flat: Flat) -> Any:
    """Returns the mesh of a call: the option's, the active one, or that of its shardings."""
    leaves = (*options.in_specs.leaves, *options.out_specs.leaves)
    shardings = [x for x in leaves if isinstance(x, Sharding)]
    leaf_mesh = mesh_of(shardings) if shardings else None
    mesh = options.mesh if options.mesh is not None else active_mesh()
    if mesh is None and options.plan is not None:
        mesh = plain_mesh(options.plan.mesh)
    if mesh is not None:
        specs = (options.in_specs, options.out_specs)
        clash = mesh_clash("the context", mesh, specs) if shardings else []
        if clash and (outer := enclosing_pjit()) and options.mesh is None:
            clash = [nested_mesh_failure(leaf_mesh, outer)]
        if clash:
            raise explain(options.subject, clash)
        return mesh
    mesh = leaf_mesh
    if mesh is None and not any(isinstance(x, ParsedPartitionSpec) for x in leaves):
        held = map(_jax.core.underlying, flat.leaves)
        concrete = [v for v in held if not isinstance(v, _jax.core.Tracer)]
        mesh = mesh_of(_jax.dispatch.placed_shardings(concrete))
        if mesh is None and len(concrete) < len(flat.leaves):
            return None  # under a transformation only the impl rule sees what the arrays have
    if mesh is None:
        raise explain(options.subject, [no_mesh()])
    return mesh


def resolve_inputs(
    options: PjitOptions,
    signature: Signature,
    semantics: Sequence[str],
    mesh: Any,
    manual: frozenset[Any],
) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[Any, ...]]:
    """Gives every argument its spec and checks it; names all that do not fit.

    Returns per leaf the resource, the option it came from, and the aval of the global value.
    """
    leaves, given = argument_specs(
        options.in_specs, options.params, signature.positions, signature.tree, options.subject
    )
    if "local" in semantics and mesh is not None:
        check_parts(mesh, options.subject)
    rows = [
        (leaf, aval, f"argument {name}", where, mesh)
        if kind == "global"
        else (leaf, aval, f"local argument {name}", where, mesh and mesh.local_mesh)
        for leaf, aval, name, where, kind in zip(
            leaves, signature.avals, signature.arg_names, given, semantics, strict=True
        )
    ]
    found = resolve_leaves(rows, mesh, manual)
    if failures := [f for _, f in found if f]:
        raise explain(options.subject, failures)
    avals = [
        aval if kind == "global" else aval.update(shape=global_shape(aval.shape, leaf, mesh))
        for (leaf, _), aval, kind in zip(found, signature.avals, semantics, strict=True)
    ]
    return tuple(leaf for leaf, _ in found), given, tuple(avals)


def check_from_array(flat: Flat, binding: Binding, options: PjitOptions) -> None:
    """Checks that every argument under FROM_ARRAY has a sharding to take."""
    values = [(i, _jax.core.underlying(flat.leaves[i])) for i in binding.from_array]
    failures = [
        from_array_failure(value, binding.call.mesh, f"argument {flat.signature.arg_names[i]}")
        for i, value in values
        if not isinstance(value, _jax.core.Tracer)  # of those the partitioner decides
    ]
    if failures := [f for f in failures if f]:
        raise explain(options.subject, failures)


def check_not_traced(flat: Flat, options: PjitOptions) -> None:
    """Checks that a call whose places a plan says is the outermost program."""
    traced = [x for x in flat.leaves if isinstance(x, _jax.core.Tracer)]
    if traced:
        raise explain(options.subject, [planned_inside(traced[0])])


_AROUND = {
    **dict.fromkeys(("JVPTracer", "LinearizeTracer"), "jax.grad or another derivative"),
    "BatchTracer": "jax.vmap",
}


def planned_inside(tracer: Any) -> Failure:
    """A plan is of a whole program, and this call is a part of one."""
    outer = _AROUND.get(type(tracer).__name__, "jax.jit or another transformation")
    return Failure(
        what=f"cannot be planned inside of {outer}",
        given=f"AUTO or plan=, with a traced argument{_jax.core.used_at()}",
        expected="the outermost program: a plan places its arguments and results",
        fix="plan the outer function: pjit(outer, in_axis_resources=AUTO);\n"
        "or write the specs that spmd.plan(...).code() prints",
        error=PlanError,
    )


def check_refs(flat: Flat, binding: Binding, options: PjitOptions) -> None:
    """Checks that no mutable reference is two arguments, or an argument and closed over."""
    values, names = [*binding.consts, *flat.leaves], binding.call.arg_names
    first: dict[int, str] = {}
    failures = [
        Failure(
            what=f"cannot take one reference as {first[id(values[i])]} and as {names[i]}",
            given=f"{_jax.core.short_aval(binding.jaxpr.in_avals[i])}{_jax.core.used_at()}",
            expected="each mutable reference once: a program updates it in place",
            fix="pass a second jax.new_ref with a copy of the value",
            error=ArgumentError,
        )
        for i in binding.refs
        if first.setdefault(id(values[i]), names[i]) != names[i]
    ]
    if failures:
        raise explain(options.subject, failures)


# Resolve outputs


def resolve_outputs(
    options: PjitOptions, traced: Trace, mesh: Any, manual: frozenset[Any]
) -> tuple[Any, ...]:
    """Gives every result its spec and checks it; names all that do not fit."""
    specs = options.out_specs
    at = specs.broadcast(traced.out_tree, "result")
    if isinstance(at, Failure):
        raise explain(options.subject, [at])
    rows = [
        (specs.leaves[i], aval, name, specs.names[i], mesh)
        for i, aval, name in zip(at, traced.jaxpr.out_avals, traced.out_names, strict=True)
    ]
    found = resolve_leaves(rows, mesh, manual)
    if failures := [f for _, f in found if f]:
        raise explain(options.subject, failures)
    return tuple(leaf for leaf, _ in found)


def _constrain_outputs(jaxpr: Any, resources: Sequence[Any], mesh: Any) -> Any:
    """Constrains partly unconstrained results inside of the jaxpr.

    At the boundary of a program a sharding is all or nothing.
    """
    if not any(isinstance(r, ParsedPartitionSpec) and r.has_unconstrained for r in resources):
        return jaxpr

    def constrained(*args: Any) -> list[Any]:
        outs = _jax.core.jaxpr_as_fun(jaxpr)(*args)
        return [
            sharding_constraint_p.bind(o, axis_resources=r, mesh=auto_mesh(mesh))
            if isinstance(r, ParsedPartitionSpec) and r.has_unconstrained
            else o
            for o, r in zip(outs, resources, strict=True)
        ]

    return _jax.core.trace_to_jaxpr(
        constrained, jaxpr.in_avals, _jax.core.inner_jaxpr(jaxpr).debug_info
    )


# PjitCall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Binding:
    """What a call of one signature does, up to the values.

    Attributes:
        jaxpr: Closed jaxpr of the body.
        call: The record for the equation.
        consts: Values of an outer trace, which come before the arguments.
        out_tree: Structure of the results.
        out_names: What to call each result.
        from_array: Indices of the arguments under FROM_ARRAY.
        refs: Indices of the mutable references among constants and arguments.
        changed: Names of leaves that the function changes in place.
        plan: Of the planner, if it says where something lies.
    """

    jaxpr: Any
    call: PjitCall
    consts: tuple[Any, ...]
    out_tree: Any
    out_names: tuple[str, ...]
    from_array: tuple[int, ...]
    refs: tuple[int, ...]
    changed: tuple[str, ...] = ()
    plan: Any = None


@_jax.core.weakref_lru_cache
def make_binding(
    fun: Callable,
    options: PjitOptions,
    signature: Signature,
    semantics: tuple[str, ...],
    mesh: Any,
) -> Binding:
    """Resolves and traces a call: everything that depends on its signature only."""
    binding = bind_open(fun, options, signature, semantics, mesh)
    if not options.is_planned:
        return binding
    call, plan = opened("plan_of_call")(binding, fun, options, signature)
    return replace(binding, call=call, plan=plan)


def bind_open(
    fun: Callable,
    options: PjitOptions,
    signature: Signature,
    semantics: tuple[str, ...],
    mesh: Any,
) -> Binding:
    """Resolves and traces a call, and leaves open what is the planner's to say."""
    manual = _jax.mesh.manual_axes()
    resources, given, avals = resolve_inputs(options, signature, semantics, mesh, manual)
    traced = _traced(fun, replace(signature, avals=avals), resources, mesh, options.subject)
    outs = resolve_outputs(options, traced, mesh, manual)
    call = PjitCall(
        name=options.name,
        mesh=mesh,
        in_axis_resources=tuple(UNSPECIFIED if r is FROM_ARRAY else r for r in resources),
        out_axis_resources=outs,
        donated_invars=signature.donated,
        in_positional_semantics=semantics,
        arg_names=signature.arg_names,
        given=given,
        keep_unused=options.keep_unused,
        inline=options.inline,
        implicit_reshard=options.implicit_reshard,
        compiler_options=options.compiler_options,
    )
    return binding_of(
        replace(traced, jaxpr=_constrain_outputs(traced.jaxpr, outs, mesh)),
        call,
        from_array=tuple(i for i, r in enumerate(resources) if r is FROM_ARRAY),
    )


def binding_of(traced: Trace, call: PjitCall, from_array: tuple[int, ...] = ()) -> Binding:
    """Builds the binding of a call, which does not know yet what the function closes over."""
    names = [f"closed-over value {i}" for i in range(len(traced.consts))]
    return Binding(
        jaxpr=traced.jaxpr,
        call=call.add_inputs(names, leading=True) if names else call,
        consts=traced.consts,
        out_tree=traced.out_tree,
        out_names=traced.out_names,
        from_array=from_array,
        refs=traced.refs,
        changed=traced.changed,
    )


def _traced(
    fun: Callable, signature: Signature, resources: Sequence[Any], mesh: Any, subject: str
) -> Trace:
    """Traces with Auto axes, or as an Explicit mesh has them where the body is written for that.

    Code for Auto axes is the rule, and most of it does not run with sharded types; `reshard` and
    `out_sharding=` in the body are errors of JAX under Auto axes.
    """
    try:
        return trace(fun, signature, auto_mesh(mesh), subject)
    except ValueError as e:
        if not (_jax.mesh.has_explicit_axes(mesh) and _jax.mesh.needs_explicit_axes(e)):
            raise
    rows = [*zip(signature.arg_names, signature.avals, resources, strict=True)]
    vague = [n for n, a, r in rows if a.ndim and not isinstance(r, ParsedPartitionSpec)]
    if vague:
        raise explain(subject, [_vague_input(n) for n in vague])
    specs = [r.to_partition_spec() if a.ndim else jax.P() for _, a, r in rows]
    types = tuple(_jax.mesh.explicit_part(s, mesh) for s in specs)
    typed = replace(signature, explicit=tuple(mesh.explicit_axes), types=types)
    return trace(fun, typed, auto_mesh(mesh), subject)


def _vague_input(name: str) -> Failure:
    return Failure(
        what=f"cannot tell the type of argument {name}",
        given="a body for Explicit axes (reshard, out_sharding=), where a type has a sharding",
        expected="a spec of every argument in in_axis_resources",
        fix="give in_axis_resources, or in_shardings: P() for what is not split",
    )
