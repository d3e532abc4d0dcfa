"""The primitive `pjit_p` and all its rules.

A rule is three moves: transform the jaxpr, transform the call, bind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
import functools
from itertools import compress
from typing import Any

from spmd import _dispatch, _jax
from spmd._call import PjitCall
from spmd._lower import lower_inner_call
from spmd._mesh import auto_mesh, enclosing_pjit, show_mesh, traced_under
from spmd._resolve import resource_of, to_sharding
from spmd._spec import (
    BATCH,
    UNCONSTRAINED,
    UNSPECIFIED,
    ParsedPartitionSpec,
    show_origin,
    show_spec,
)
from spmd.errors import Failure, MeshError, OptionError, ShardingError, did_you_mean, explain

# Parameters
#
# jaxpr: closed jaxpr of the body, where JAX looks for sub-jaxprs
# call:  PjitCall, everything else

# Primitive

pjit_p = _jax.core.Primitive("pjit")
pjit_p.multiple_results = True

# Impl

pjit_p.def_impl(_dispatch.run)

# Abstract evaluation


def _pjit_abstract_eval(*avals: Any, jaxpr: Any, call: PjitCall) -> tuple[Any, Any]:
    del avals
    _check_enclosing_mesh(call)
    return jaxpr.out_avals, _jax.core.positional_effects(jaxpr)


pjit_p.def_effectful_abstract_eval(_pjit_abstract_eval)


def _check_enclosing_mesh(call: PjitCall) -> None:
    if call.mesh is None:
        return
    outer = enclosing_pjit()
    if outer is not None and outer[0] != auto_mesh(call.mesh):
        raise explain(call.subject, [nested_mesh_failure(call.mesh, outer)])
    if failure := other_manual_mesh(call.mesh):
        raise explain(call.subject, [failure])


def other_manual_mesh(mesh: Any) -> Failure | None:
    """A `pmap`, or a `shard_map` over another mesh, has split the devices already."""
    manual = _jax.mesh.manual_mesh()
    if not manual or manual == dict(mesh.shape):
        return None
    return Failure(
        what="cannot run inside of a pmap, or of a shard_map over another mesh",
        given=f"{show_mesh(mesh)}{_jax.core.used_at()}",
        expected="the mesh of the shard_map, of which each device runs this code by itself",
        fix="call the plain function there, or map with jax.vmap(..., spmd_axis_name=...) instead",
        error=MeshError,
    )


def nested_mesh_failure(mesh: Any, outer: tuple[Any, str]) -> Failure:
    """A mesh was changed inside of a program, which runs on one."""
    return Failure(
        what=f"cannot change the mesh inside of {outer[1]}",
        given=f"{show_mesh(mesh)}{_jax.core.used_at()}",
        expected=f"the mesh of the outer function: {show_mesh(outer[0])}",
        fix="call it outside, or enter one mesh around both",
        error=MeshError,
    )


# Type checking


def _pjit_typecheck(ctx_factory: Any, *in_atoms: Any, jaxpr: Any, call: PjitCall) -> Any:
    for what, given, avals in (
        ("inputs", call.in_axis_resources, jaxpr.in_avals),
        ("outputs", call.out_axis_resources, jaxpr.out_avals),
    ):
        if len(given) != len(avals):
            raise TypeError(f"{call.name}: {len(given)} specs for {len(avals)} {what} of a jaxpr")
    return _jax.transform.check_call(ctx_factory, pjit_p, in_atoms, jaxpr, {"call": call})


_jax.core.custom_typechecks[pjit_p] = _pjit_typecheck

# Staging


def _pjit_stage(trace: Any, source_info: Any, *args: Any, jaxpr: Any, call: PjitCall) -> Any:
    if call.compiler_options:
        failure = Failure(
            what="cannot have compiler_options inside of another program",
            given=f"compiler_options={dict(call.compiler_options)}{_jax.core.used_at()}",
            expected="options on the outermost function: a program is compiled as a whole",
            fix="move them to the outer pjit or jit",
            error=OptionError,
        )
        raise explain(call.subject, [failure])
    resources = (*call.in_axis_resources, *call.out_axis_resources)
    if call.inline and all(r is UNSPECIFIED for r in resources):
        inner = _jax.core.inner_jaxpr(jaxpr)
        out = _jax.transform.inline_jaxpr_into_trace(trace, source_info, inner, jaxpr.consts, *args)
        return [trace.to_jaxpr_tracer(x, source_info) for x in out]
    params = {"jaxpr": jaxpr, "call": call}
    return trace.default_process_primitive(pjit_p, args, params, source_info=source_info)


_jax.transform.custom_staging_rules[pjit_p] = _pjit_stage


# Lowering

# Not cacheable: the function has its own key, and a cached equation loses source locations.
_jax.lowering.register_lowering(pjit_p, lower_inner_call, cacheable=False)


def _pjit_shardings(eqn: Any) -> list[Any]:
    call = eqn.params["call"]
    resources = (*call.in_axis_resources, *call.out_axis_resources)
    if call.mesh is not None:
        # Even a call whose specs say nothing runs on all devices of its mesh.
        resources = (*resources, ParsedPartitionSpec(None, ()))
    return [to_sharding(r, call.mesh) for r in resources if r is not UNSPECIFIED]


_jax.lowering.declare_shardings(pjit_p, _pjit_shardings)

# Batching


def _pjit_batch(axis_data: Any, vals: Any, dims: Any, *, jaxpr: Any, call: PjitCall) -> Any:
    axes = spmd_axes(axis_data)
    subject = call.subject
    # Before the body: a conflict of the function's own specs names the function.
    check_spmd_axes(axes, call.mesh, call.in_axis_resources, dims, subject)
    new_jaxpr, out_dims = _batch(jaxpr, call, axis_data, tuple(dims))
    check_spmd_axes(axes, call.mesh, call.out_axis_resources, out_dims, subject)
    outs = pjit_p.bind(*vals, jaxpr=new_jaxpr, call=call.batch(dims, out_dims, axes))
    return outs, out_dims


@traced_under
def _batch(jaxpr: Any, call: PjitCall, axis_data: Any, dims: tuple[Any, ...]) -> Any:
    del call
    return _jax.transform.batch_jaxpr(jaxpr, axis_data, dims)


_jax.transform.fancy_batchers[pjit_p] = _pjit_batch


def spmd_axes(axis_data: Any) -> tuple[Any, ...]:
    """The mesh axes of `vmap(..., spmd_axis_name=...)`."""
    name = axis_data.spmd_name
    return () if name is None else tuple(name) if isinstance(name, (tuple, list)) else (name,)


def check_spmd_axes(
    axes: Sequence[Any], mesh: Any, resources: Sequence[Any], dims: Sequence[Any], subject: str
) -> None:
    """A mesh axis that splits the mapped dimension exists, and splits no other one too."""
    if mesh is not None and (unknown := [a for a in axes if a not in mesh.shape]):
        failure = _unmapped(
            unknown,
            unknown[0],
            expected=f"mesh axes out of {', '.join(map(repr, mesh.axis_names))}",
            got=f"an unknown axis{did_you_mean(unknown[0], mesh.axis_names)}",
            fix="use an axis of the mesh, or enter the mesh that has it",
        )
        raise explain(subject, [failure])
    if repeated := [a for i, a in enumerate(axes) if a in axes[:i]]:
        fix = f"drop one {repeated[0]!r}"
        failure = _unmapped(repeated, axes, " twice", expected="each mesh axis once", fix=fix)
        raise explain(subject, [failure])
    for resource, dim in zip(resources, dims, strict=True):
        if dim is None or not isinstance(resource, ParsedPartitionSpec):
            continue
        if taken := [a for a in axes if a in resource.axes]:
            failure = _unmapped(
                taken,
                taken[0],
                expected="a mesh axis that the mapped function does not use",
                got=f"the spec {show_origin(resource)}",
                fix=f"drop {taken[0]!r} from the spec, or map over another axis",
            )
            raise explain(subject, [failure])


def _unmapped(axes: Sequence[Any], name: Any, how: str = "", **rows: str) -> Failure:
    what = f"cannot be mapped over mesh axis {', '.join(map(repr, axes))}{how}"
    given = f"vmap(spmd_axis_name={name!r}){_jax.core.used_at()}"
    return Failure(what=what, given=given, error=ShardingError, **rows)


# JVP


def _pjit_jvp(primals: Any, tangents: Any, *, jaxpr: Any, call: PjitCall) -> Any:
    nz_in = tuple(type(t) is not _jax.core.Zero for t in tangents)
    jvp, jvp_call, nz_out = _jvp(jaxpr, call, nz_in)
    outs = pjit_p.bind(*primals, *compress(tangents, nz_in), jaxpr=jvp, call=jvp_call)
    count = len(jaxpr.out_avals)
    return outs[:count], _with_zeros(outs[count:], nz_out, jaxpr)


@traced_under
def _jvp(jaxpr: Any, call: PjitCall, nz_in: tuple[bool, ...]) -> tuple[Any, PjitCall, list[bool]]:
    jvp, nz_out = _jax.transform.jvp_jaxpr(jaxpr, nz_in, instantiate=False)
    return jvp, call.jvp(nz_in, nz_out), nz_out


def _with_zeros(dense: Sequence[Any], nz_out: Sequence[bool], jaxpr: Any) -> list[Any]:
    """Tangents of all outputs of a jaxpr, from those that are not zero."""
    found, avals = iter(dense), jaxpr.out_avals
    return [
        next(found) if nz else _jax.core.Zero(a.to_tangent_aval())
        for nz, a in zip(nz_out, avals, strict=True)
    ]


_jax.transform.primitive_jvps[pjit_p] = _pjit_jvp

# Linearization


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class _Halves:
    """A call split into what runs now and a rest that runs later; residuals pass between.

    Attributes:
        known: Closed jaxpr of the first half: its outputs, then the residuals that are no input
            and no output already.
        known_call: How it is called.
        in_rest: Per output of the whole call, whether the rest has an output for it: the value
            (partial evaluation), or the tangent (linearization).
        rest: Closed jaxpr of the second half: it takes the residuals, then its own inputs.
        rest_call: How it is called, but for the shardings of computed residuals.
        inputs: Per residual the input of the first half that it is, or None.
        outputs: Per residual that is none of those, the output that it is.
        kept: Names of inputs that would have been donated and are residuals.
    """

    known: Any
    known_call: PjitCall
    in_rest: tuple[bool, ...]
    rest: Any
    rest_call: PjitCall
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    kept: tuple[str, ...]

    def run_known(
        self, args: Sequence[Any], like: Sequence[Any] = ()
    ) -> tuple[Sequence[Any], list[Any], PjitCall]:
        """Runs the first half; returns its outputs, the residuals, and the call of the rest.

        `like` has, per input of the rest that is no residual, a value that is placed like it.
        """
        results = pjit_p.bind(*args, jaxpr=self.known, call=self.known_call)
        computed = iter(self.outputs)
        residuals = [results[next(computed)] if i is None else args[i] for i in self.inputs]
        if any(isinstance(v, _jax.core.Tracer) for v in (*args, *results)):
            return results, residuals, self.rest_call  # the partitioner places them, once for both
        if self.kept:
            _dispatch.warn_kept(self.kept, self.rest_call)
        return results, residuals, _placed(self.rest_call, (*residuals, *like))


def _placed(call: PjitCall, values: Sequence[Any]) -> PjitCall:
    """The call with what is known of where its inputs are, where nothing else is said of them."""
    given = call.in_axis_resources
    if call.mesh is None or UNSPECIFIED not in given:
        return call
    unknown = (None,) * (len(given) - len(values))
    pairs = zip((*values, *unknown), given, strict=True)
    return _with_inputs(
        call,
        tuple(resource_of(v, call.mesh) if g is UNSPECIFIED else g for v, g in pairs),
    )


@functools.lru_cache(maxsize=4096)
def _with_inputs(call: PjitCall, resources: tuple[Any, ...]) -> PjitCall:
    # What no user said is no mistake of theirs.
    pairs = zip(call.given, call.in_axis_resources, strict=True)
    said = tuple("" if r is UNSPECIFIED else g for g, r in pairs)
    return replace(call, in_axis_resources=resources, given=said)


def clear_rule_caches() -> None:
    """Forgets what the rules derived from the calls that they met."""
    _with_inputs.cache_clear()
    _split.cache_clear()
    for derived in (_batch, _jvp, _linearize, _transpose):
        derived.cache_clear()


def _halves(
    *,
    consts: Sequence[Any],
    known: Any,
    known_call: PjitCall,
    in_rest: Sequence[bool],
    rest: Any,
    rest_call: PjitCall,
    forwarded: Sequence[int | None],
) -> _Halves:
    """Builds the halves of a call, of which `consts` are the constants.

    `known` returns all computed residuals and `rest` takes all residuals first, which the calls do
    not say. `forwarded` says of each residual which of the constants and then the inputs of the
    first half it is; None where it is computed.
    """
    n_out, n_consts = len(known_call.out_axis_resources), len(consts)
    known, outputs = _jax.transform.repeated_outputs(known, n_out)
    # What both halves close over is a constant of both.
    shared = [consts[i] if i is not None and i < n_consts else None for i in forwarded]
    rest = _jax.transform.bind_inputs(rest, shared)
    inputs = [None if i is None else i - n_consts for i in forwarded if i is None or i >= n_consts]
    alive = known_call.keep_alive(i for i in inputs if i is not None)
    changed = [a != b for a, b in zip(known_call.donated_invars, alive.donated_invars, strict=True)]
    # An input that is a residual is wanted in the rest where it is wanted in the first half.
    wanted = known_call.in_axis_resources
    resources = [UNSPECIFIED if i is None else wanted[i] for i in inputs]
    names = residual_names(rest_call, len(inputs))
    return _Halves(
        known=known,
        known_call=alive.add_outputs(len(known.out_avals) - n_out),
        in_rest=tuple(in_rest),
        rest=rest,
        rest_call=rest_call.add_inputs(names, leading=True, resources=resources),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        kept=tuple(compress(known_call.arg_names, changed)),
    )


def _pjit_linearize(
    nz_in: tuple[bool, ...], is_vjp: bool, *primals: Any, jaxpr: Any, call: PjitCall
) -> Any:
    halves = _linearize(jaxpr, call, nz_in, is_vjp)
    # A tangent, and so the cotangent, is placed like its primal even if only that one knows how.
    results, residuals, linear = halves.run_known(primals, [*compress(primals, nz_in)])

    def push(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        dense = compress(tangents, nz_in)
        outs = pjit_p.bind(*residuals, *dense, jaxpr=halves.rest, call=linear)
        return _with_zeros(outs, halves.in_rest, jaxpr)

    return results[: len(jaxpr.out_avals)], list(halves.in_rest), residuals, push


@traced_under
def _linearize(jaxpr: Any, call: PjitCall, nz_in: tuple[bool, ...], is_vjp: bool) -> _Halves:
    known, nz_out, forwarded, linear = _jax.transform.linearize_jaxpr(jaxpr, nz_in, is_vjp=is_vjp)
    return _halves(
        consts=jaxpr.consts,
        known=known,
        known_call=call,
        in_rest=nz_out,
        rest=linear,
        rest_call=call.linear_map(nz_in, nz_out),
        forwarded=forwarded,
    )


_jax.rules.linearization_rule(pjit_p, _pjit_linearize)

# Partial evaluation


def _pjit_partial_eval(trace: Any, *tracers: Any, jaxpr: Any, call: PjitCall) -> Any:
    """Runs what is known now and stages the rest; what passes between are residuals.

    A residual leaves the known half with the sharding that the compiler chose and enters the
    unknown half with the sharding that it has: nothing is replicated, nothing compiled twice.
    """
    unk_in = tuple(not t.pval.is_known() for t in tracers)
    halves = _split(jaxpr, call, unk_in)
    known_args = [t.pval.get_known() for t in tracers if t.pval.is_known()]
    results, residuals, rest_call = halves.run_known(known_args)
    unk_args = [*map(trace.new_instantiated_const, residuals), *compress(tracers, unk_in)]
    params = {"jaxpr": halves.rest, "call": rest_call}
    staged = iter(_jax.transform.stage_unknown(trace, pjit_p, unk_args, params, halves.rest))
    known = iter(results)
    return [next(staged) if unknown else next(known) for unknown in halves.in_rest]


@_jax.core.weakref_lru_cache
def _split(jaxpr: Any, call: PjitCall, unk_in: tuple[bool, ...]) -> _Halves:
    known, unknown, unk_out, _, forwarded = _jax.transform.partial_eval_jaxpr(
        jaxpr, unk_in, instantiate=False
    )
    return _halves(
        consts=jaxpr.consts,
        known=known,
        known_call=call.keep([not u for u in unk_in], [not u for u in unk_out]),
        in_rest=unk_out,
        rest=unknown,
        rest_call=call.keep(unk_in, unk_out),
        forwarded=forwarded,
    )


_jax.transform.custom_partial_eval_rules[pjit_p] = _pjit_partial_eval


def _pjit_partial_eval_custom(
    unk_in: Sequence[bool],
    inst_in: Sequence[bool],
    known_out: Sequence[bool],
    staged_out: Sequence[bool],
    res_out: int,
    res_in: int,
    known: dict[str, Any],
    staged: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The calls of both halves where a loop or a rematerialization policy splits the equation."""
    # What the staged half takes too is not given away, by neither.
    call = known["call"].keep_alive(
        i for i, (unk, inst) in enumerate(zip(unk_in, inst_in, strict=True)) if inst and not unk
    )
    known_call = call.keep([not u for u in unk_in], known_out).add_outputs(res_out)
    names = residual_names(call, res_in)
    staged_call = call.keep(inst_in, staged_out).add_inputs(names, leading=True)
    return dict(known, call=known_call), dict(staged, call=staged_call)


_jax.rules.partial_eval_rule(pjit_p, _pjit_partial_eval_custom)


def residual_names(call: PjitCall, count: int) -> list[str]:
    """What messages call the residuals of a call."""
    return [f"residual {i} of {call.name}" for i in range(count)]


# Transpose


def _pjit_transpose(cts: Any, *args: Any, jaxpr: Any, call: PjitCall) -> Any:
    flat, key = _jax.transform.flatten_transpose(cts, args)
    nz_cts = tuple(type(ct) is not _jax.core.Zero for ct in cts)
    transposed, back, out_tree = _transpose(jaxpr, call, key, nz_cts)
    try:
        results = pjit_p.bind(*flat, jaxpr=transposed, call=back)
    except _jax.transform.InternalFloatingPointError as e:
        _jax.transform.find_nan_backward(e, jaxpr, cts, args)
    return _jax.transform.accumulate(out_tree, args, results)


@traced_under
def _transpose(
    jaxpr: Any, call: PjitCall, key: Any, nz_cts: tuple[bool, ...]
) -> tuple[Any, PjitCall, Any]:
    transposed, out_tree, kept, has_ct, logs = _jax.transform.transpose_jaxpr(jaxpr, key)
    return transposed, call.transpose(kept, nz_cts, has_ct).add_outputs(logs), out_tree


_jax.transform.fancy_transposes[pjit_p] = _pjit_transpose

# Rematerialization


def _pjit_remat(call: PjitCall, res_out: int, res_in: int) -> tuple[PjitCall, PjitCall]:
    call = call.keep_alive(range(len(call.donated_invars)))  # both runs take the same arguments
    names = residual_names(call, res_in)
    return call.add_outputs(res_out), call.add_inputs(names, leading=True)


_jax.rules.rematerialization_rule(pjit_p, _pjit_remat)

# Dead code

_jax.rules.dead_code_rule(pjit_p, PjitCall.keep)

# Mutable references

_jax.rules.discharge_rule(pjit_p, PjitCall.discharge)

# Checks


def _pjit_checkify(call: PjitCall, errors_in: int, errors_out: int) -> PjitCall:
    names = [f"error value {i} of checkify" for i in range(errors_in)]
    return call.add_inputs(names, leading=True).add_outputs(errors_out, leading=True)


_jax.rules.checkify_rule(pjit_p, _pjit_checkify)
_jax.rules.key_reuse_rule(pjit_p)

# Taylor series, sparse values, values of several arrays

_jax.rules.jet_rule(pjit_p, PjitCall.series)
_jax.rules.sparsify_rule(pjit_p, PjitCall.expand)
_jax.rules.hijax_rule(pjit_p, PjitCall.expand)

# Printing


def _pjit_pp(eqn: Any, context: Any, settings: Any) -> Any:
    call = eqn.params["call"]
    params: dict[str, Any] = {"name": call.name}
    if call.mesh is not None:
        params["mesh"] = Text(show_mesh(call.mesh).removeprefix("mesh "))
    params["in"] = _specs_text(call.in_axis_resources)
    params["out"] = _specs_text(call.out_axis_resources)
    if any(call.donated_invars):
        params["donated"] = Text(",".join(compress(call.arg_names, call.donated_invars)))
    params["jaxpr"] = eqn.params["jaxpr"]
    return _jax.core.pp_equation(eqn, context, settings, params)


_jax.core.pp_eqn_rules[pjit_p] = _pjit_pp


class Text(str):
    """A parameter that prints without quotes."""

    __slots__ = ()

    __repr__ = str.__str__


def spec_text(resource: Any) -> Text:
    """How a jaxpr shows a resource: a dimension that vmap added is free inside of a program."""
    if isinstance(resource, ParsedPartitionSpec) and BATCH in resource.partitions:
        resource = resource.to_partition_spec(batch=UNCONSTRAINED)
    return Text("*" if resource is UNSPECIFIED else show_spec(resource))


def _specs_text(resources: Sequence[Any]) -> Text:
    return Text("(" + ", ".join(map(spec_text, resources)) + ")")
