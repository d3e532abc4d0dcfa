"""pjit: the straight line from a user's call to the devices, in file order.

parse (at decoration) -> flatten -> resolve inputs -> trace -> resolve outputs -> PjitCall -> bind
-> (impl rule) lower -> compile -> execute -> unflatten. `trace()`, `lower()` and `compile()` stop
at a point on it. The eager call is the same line behind the C++ dispatcher's lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
import functools
import sys
import types
from typing import Any
import weakref

import jax
from jax.sharding import NamedSharding, Sharding
import jax.tree_util as jtu
import numpy as np

from spmd import _dispatch, _jax
from spmd._arguments import (
    Parameters,
    argument_names,
    argument_specs,
    donated_leaves,
    parse_parameters,
    split_arguments,
)
from spmd._call import PjitCall
from spmd._constraint import sharding_constraint_p
from spmd._local import global_shape, global_to_local, local_to_global
from spmd._mesh import (
    auto_mesh,
    check_parts,
    current_mesh,
    enclosing_pjit,
    plain_mesh,
    show_mesh,
)
from spmd._pjit import clear_rule_caches, nested_mesh_failure, pjit_p
from spmd._resolve import (
    from_array_failure,
    mesh_of_leaves,
    no_mesh,
)
from spmd._spec import (
    FROM_ARRAY,
    UNSPECIFIED,
    ParsedPartitionSpec,
    SpecTree,
    broadcast_prefix,
    parse_specs,
    show_spec,
)
from spmd._trace import Signature, Trace, clear_trace_cache, evict_trace, trace
from spmd.errors import ArgumentError, Failure, MeshError, OptionError, explain
from spmd.stages import Compiled, Lowered, Origin, Traced

_MISSING: Any = object()

# Parse


@dataclass(frozen=True, kw_only=True)
class PjitOptions:
    """Everything that was said at decoration. Equal options of equal functions share programs."""

    name: str
    in_specs: SpecTree
    out_specs: SpecTree
    params: Parameters
    mesh: Any
    keep_unused: bool
    inline: bool
    positional_semantics: str
    implicit_reshard: str | None
    compiler_options: tuple[tuple[str, Any], ...]
    # Computed once: the record is part of the key of every lookup.
    _hash: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        parts = (self.name, self.in_specs, self.out_specs, self.params, self.mesh)
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash

    @property
    def static_option(self) -> str:
        """What to declare an argument static with."""
        return "static_argnames"

    @property
    def subject(self) -> str:
        """The first words of a message."""
        return f"pjit of `{self.name}`"


def pjit(
    fun: Callable = _MISSING,
    in_axis_resources: Any = UNSPECIFIED,
    out_axis_resources: Any = UNSPECIFIED,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    *,
    static_argnames: str | Sequence[str] = (),
    donate_argnames: str | Sequence[str] = (),
    keep_unused: bool = False,
    inline: bool = False,
    mesh: Any = None,
    positional_semantics: str = "global",
    implicit_reshard: str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    in_shardings: Any = UNSPECIFIED,
    out_shardings: Any = UNSPECIFIED,
) -> Any:
    """Compiles `fun` and partitions it over the devices of a mesh.

    The mesh is the one that is active where the function is *called*. What a spec leaves open the
    partitioner decides.

    Args:
        fun: A function of pytrees of arrays. Left out: `pjit` returns a decorator.
        in_axis_resources: Specs of the arguments: one for all, a tuple with one entry per
            argument that is not static (a list counts as one), or a dict by parameter name; each
            entry is a pytree prefix of its argument. A leaf is a PartitionSpec, None
            (replicated), a sharding, or :data:`FROM_ARRAY`. Left out: committed arrays stay
            as they are, everything else is replicated.
        out_axis_resources: Specs of the results, a pytree prefix; ``P.UNCONSTRAINED`` leaves a
            dimension to the partitioner. Left out: the partitioner chooses.
        static_argnums: Positions of arguments that are Python values, part of the program's key.
        donate_argnums: Positions of arguments whose buffers the program may reuse.
        static_argnames: As `static_argnums`, by name.
        donate_argnames: As `donate_argnums`, by name.
        keep_unused: Whether arguments that the function does not use stay in the program.
        inline: Whether an outer trace takes the operations over, where no spec is given.
        mesh: The mesh to use instead of the active one. An ``AbstractMesh``, which has no
            devices, will do to trace and lower.
        positional_semantics: ``"global"``: every process passes the whole of a host array;
            ``"local"``: each passes, and gets, its own part.
        implicit_reshard: What to do about a committed argument that is placed otherwise than its
            spec says: ``"allow"`` moves it, ``"warn"`` moves it and warns, ``"error"`` refuses.
            None: what ``SPMD_IMPLICIT_RESHARD`` says, else ``"allow"``.
        compiler_options: Options for the compiler, by name.
        in_shardings: Another name of `in_axis_resources`.
        out_shardings: Another name of `out_axis_resources`.

    Returns:
        A function like `fun`, with ``.trace``, ``.lower``, ``.eval_shape`` and ``.clear_cache``.

    Raises:
        TypeError: `fun` is not callable, or a leaf is no spec.
        ValueError: An option names an argument that does not exist, or two options disagree.

    Example:
        >>> with Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")):
        ...     f = pjit(layer, in_axis_resources=(P("data"), P(None, "model")))
        ...     y = f(x, w)
    """
    options = {k: v for k, v in locals().items() if k != "fun"}
    if fun is _MISSING:
        return functools.partial(_pjit, options)
    return _pjit(options, fun)


def _pjit(options: dict[str, Any], fun: Callable) -> Any:
    if not callable(fun):
        fix = "pjit(fun, in_axis_resources=...), or @pjit(in_axis_resources=...) above a def"
        raise explain("pjit", [not_callable(fun, fix)])
    held = _weakly_referable(fun)
    wrapped = pjit_function(held, parse(held, **options))
    wrapped.__wrapped__ = fun
    return wrapped


def not_callable(fun: Any, fix: str) -> Failure:
    """The failure of what is no function."""
    return Failure(
        what="needs a function",
        given=f"{fun!r}"[:100],
        expected="something callable",
        got=type(fun).__name__,
        fix=fix,
        error=ArgumentError,
    )


def _unhashable_function(fun: Any) -> Failure:
    return Failure(
        what="cannot hash the function: its programs are kept under it",
        given=f"{fun!r}"[:100],
        expected="a function whose result depends on its arguments alone",
        got=f"a {type(fun).__name__} without __hash__",
        fix="freeze its class (@dataclass(frozen=True)), or pass what changes as an argument",
        error=ArgumentError,
    )


def global_name(wrapper: Any) -> str | None:
    """The name by which pickle finds a wrapped function in its module, if it does."""
    name = getattr(wrapper, "__qualname__", "")
    found: Any = sys.modules.get(getattr(wrapper, "__module__", None) or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is wrapper else None


def _weakly_referable(fun: Callable) -> Callable:
    """Caches hold functions weakly, by hash; a few builtins allow no weak reference."""
    try:
        hash(fun)
    except TypeError:
        raise explain("pjit", [_unhashable_function(fun)]) from None
    try:
        weakref.ref(fun)
    except TypeError:

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return fun(*args, **kwargs)

        stand_in.__name__ = stand_in.__qualname__ = _jax.core.fun_name(fun)
        return functools.wraps(fun)(stand_in)
    return fun


def parse(
    fun: Callable,
    *,
    in_axis_resources: Any,
    out_axis_resources: Any,
    in_shardings: Any,
    out_shardings: Any,
    static_argnums: Any,
    static_argnames: Any,
    donate_argnums: Any,
    donate_argnames: Any,
    keep_unused: bool,
    inline: bool,
    mesh: Any,
    positional_semantics: str,
    implicit_reshard: str | None,
    compiler_options: Mapping[str, Any] | None,
) -> PjitOptions:
    """Reads everything that can be read without arguments.

    Raises:
        TypeError: A leaf is no spec, or `mesh` no mesh.
        ValueError: Options contradict each other or the signature.
    """
    name = _jax.core.fun_name(fun)
    subject = f"pjit of `{name}`"
    ins = _one_of(subject, "in_axis_resources", in_axis_resources, "in_shardings", in_shardings)
    outs = _one_of(
        subject, "out_axis_resources", out_axis_resources, "out_shardings", out_shardings
    )
    specs = [
        parse_specs(
            tuple(v) if isinstance(v, list) and role == "input" else v, n, subject, role=role
        )
        for (n, v), role in ((ins, "input"), (outs, "output"))
    ]
    params = parse_parameters(
        fun, subject, static_argnums, static_argnames, donate_argnums, donate_argnames
    )
    failures = _choice_failures(mesh, positional_semantics, implicit_reshard)
    leaf_mesh, clash = mesh_of_leaves(
        [x for s in specs for x in s.leaves], [n for s in specs for n in s.names]
    )
    failures += clash
    if mesh is not None and leaf_mesh is not None and not failures:
        failures += _mesh_clash("the option mesh", mesh, specs)
    if failures:
        raise explain(subject, failures)
    return PjitOptions(
        name=name,
        in_specs=specs[0],
        out_specs=specs[1],
        params=params,
        mesh=plain_mesh(mesh),
        keep_unused=bool(keep_unused),
        inline=bool(inline),
        positional_semantics=positional_semantics,
        implicit_reshard=implicit_reshard,
        compiler_options=tuple(sorted((compiler_options or {}).items())),
    )


def _one_of(subject: str, name: str, value: Any, alias: str, other: Any) -> tuple[str, Any]:
    if other is UNSPECIFIED:
        return name, value
    if value is UNSPECIFIED:
        return alias, other
    failure = Failure(
        what=f"got both {name} and {alias}: they are two names of one option",
        fix=f"keep {name}",
        error=OptionError,
    )
    raise explain(subject, [failure])


def _choice_failures(mesh: Any, semantics: str, reshard: str | None) -> list[Failure]:
    failures = []
    if mesh is not None and not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        failures.append(
            Failure(
                what="cannot use this mesh",
                given=f"mesh={mesh!r}"[:100],
                expected="a spmd.Mesh, a jax.sharding.Mesh or an AbstractMesh",
                got=type(mesh).__name__,
                error=ArgumentError,
            )
        )
    if semantics not in ("global", "local"):
        failures.append(
            Failure(
                what="cannot read positional_semantics",
                expected="'global' or 'local'",
                got=repr(semantics),
                error=OptionError,
            )
        )
    if reshard is not None and reshard not in _dispatch.RESHARD_MODES:
        failure = _dispatch.bad_reshard_mode(reshard)
        failures.append(replace(failure, what="cannot read implicit_reshard"))
    return failures


def _mesh_clash(where: str, mesh: Any, specs: Sequence[SpecTree]) -> list[Failure]:
    rows = [(n, x) for s in specs for n, x in zip(s.names, s.leaves, strict=True)]
    return [
        Failure(
            what=f"cannot use {name}: it is on another mesh",
            given=f"{show_spec(leaf)} on {show_mesh(leaf.mesh)}",
            expected=f"{show_mesh(mesh)}, from {where}",
            fix="use PartitionSpecs, or build the NamedShardings from this mesh",
            error=MeshError,
        )
        for name, leaf in rows
        if isinstance(leaf, NamedSharding) and auto_mesh(leaf.mesh) != auto_mesh(mesh)
    ]


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
    """Binds and flattens the arguments of a call.

    Raises:
        TypeError: An argument is no array.
    """
    split = split_arguments(options.params, args, kwargs, options.subject)
    leaves, tree = jtu.tree_flatten(split.dynamic)
    names = _names(options.params, split.positions, tree)
    signature = Signature(
        tree=tree,
        avals=_avals(leaves, names, options),
        positions=split.positions,
        statics=split.statics,
        arg_names=names,
    )
    local = options.positional_semantics == "local"
    # An array that exists is global: its sharding already says which part is where.
    semantics = tuple(
        "local" if local and not isinstance(x, jax.Array) else "global" for x in leaves
    )
    return Flat(leaves=leaves, signature=signature, semantics=semantics)


_names = functools.lru_cache(maxsize=4096)(argument_names)


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


_METHOD = (
    "take it off the class and apply it to obj.{function}, which closes over the object;\n"
    "or declare self static with {static}, where the object has a hash;\n"
    "or register its class as a pytree"
)


# Resolve inputs


def find_mesh(options: PjitOptions, flat: Flat) -> Any:
    """Returns the mesh of a call: the option's, the active one, or that of its shardings.

    Raises:
        RuntimeError: There is none, or the shardings are of another one.
    """
    leaves = (*options.in_specs.leaves, *options.out_specs.leaves)
    leaf_mesh = _dispatch.mesh_of([x for x in leaves if isinstance(x, Sharding)])
    mesh = options.mesh if options.mesh is not None else plain_mesh(current_mesh())
    if mesh is not None:
        clash = _mesh_clash("the context", mesh, (options.in_specs, options.out_specs))
        if clash and (outer := enclosing_pjit()) and options.mesh is None:
            clash = [nested_mesh_failure(leaf_mesh, outer)]
        if clash:
            raise explain(options.subject, clash)
        return mesh
    mesh = leaf_mesh
    if mesh is None and not any(isinstance(x, ParsedPartitionSpec) for x in leaves):
        concrete = _concrete(flat.leaves)
        mesh = _dispatch.mesh_of([_dispatch.placed_sharding(x) for x in concrete])
        if mesh is None and len(concrete) < len(flat.leaves):
            return None  # under a transformation only the impl rule sees what the arrays have
    if mesh is None:
        raise explain(options.subject, [no_mesh()])
    return mesh


def _concrete(leaves: Sequence[Any]) -> list[Any]:
    return [v for x in leaves if not isinstance(v := _jax.core.underlying(x), _jax.core.Tracer)]


def resolve_inputs(
    options: PjitOptions, signature: Signature, semantics: Sequence[str], mesh: Any
) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[Any, ...]]:
    """Gives every argument its spec and checks it.

    Returns:
        Per leaf the resource, the option it came from, and the aval of the global value.

    Raises:
        ValueError: A spec does not fit; all that do not are named.
    """
    leaves, given = argument_specs(
        options.in_specs, options.params, signature.positions, signature.tree, options.subject
    )
    if "local" in semantics and mesh is not None:
        check_parts(mesh, options.subject)
    failures, avals, resources = [], [], []
    rows = zip(leaves, given, signature.avals, signature.arg_names, semantics, strict=True)
    for raw, where, aval, name, kind in rows:
        on = mesh.local_mesh if kind == "local" and mesh is not None else mesh
        what = f"{'local ' if kind == 'local' else ''}argument {name}"
        leaf, failure = _dispatch.resolve_leaf(raw, aval, mesh, what, where, on=on)
        resources.append(leaf)
        failures.append(failure)
        avals.append(aval if failure or kind == "global" else _global_aval(aval, leaf, mesh))
    if failures := [f for f in failures if f]:
        raise explain(options.subject, failures)
    return tuple(resources), given, tuple(avals)


def _global_aval(aval: Any, leaf: Any, mesh: Any) -> Any:
    return aval.update(shape=global_shape(aval.shape, leaf, mesh))


def check_from_array(flat: Flat, plan: Plan, options: PjitOptions) -> None:
    """Checks that every argument under FROM_ARRAY has a sharding to take.

    Raises:
        ValueError: One has none, or one on another mesh.
    """
    failures = []
    for i in plan.from_array:
        value = _jax.core.underlying(flat.leaves[i])
        if isinstance(value, _jax.core.Tracer):
            continue  # inside a program the partitioner decides what a value has
        name = f"argument {flat.signature.arg_names[i]}"
        failures.append(from_array_failure(value, plan.call.mesh, name))
    if failures := [f for f in failures if f]:
        raise explain(options.subject, failures)


def check_refs(flat: Flat, plan: Plan, options: PjitOptions) -> None:
    """Checks that no mutable reference is two arguments.

    Raises:
        ValueError: One is, or is an argument and closed over.
    """
    values, names = [*plan.consts, *flat.leaves], plan.call.arg_names
    first: dict[int, str] = {}
    failures = [
        Failure(
            what=f"cannot take one reference as {first[id(values[i])]} and as {names[i]}",
            given=f"{_jax.core.short_aval(plan.jaxpr.in_avals[i])}{_jax.core.used_at()}",
            expected="each mutable reference once: a program updates it in place",
            fix="pass a second jax.new_ref with a copy of the value",
            error=ArgumentError,
        )
        for i in plan.refs
        if first.setdefault(id(values[i]), names[i]) != names[i]
    ]
    if failures:
        raise explain(options.subject, failures)


# Resolve outputs


def resolve_outputs(options: PjitOptions, traced: Trace, mesh: Any) -> tuple[Any, ...]:
    """Gives every result its spec and checks it.

    Raises:
        ValueError: A spec does not fit; all that do not are named.
    """
    specs = options.out_specs
    found = broadcast_prefix(specs.indices(), traced.out_tree, specs.name, "result")
    if isinstance(found, Failure):
        raise explain(options.subject, [found])
    rows = [
        _dispatch.resolve_leaf(specs.leaves[i], aval, mesh, name, specs.names[i])
        for i, aval, name in zip(found, traced.jaxpr.out_avals, traced.out_names, strict=True)
    ]
    if failures := [f for _, f in rows if f]:
        raise explain(options.subject, failures)
    return tuple(leaf for leaf, _ in rows)


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
class Plan:
    """What a call of one signature does, up to the values.

    Attributes:
        jaxpr: Closed jaxpr of the body.
        call: The record for the equation.
        consts: Values of an outer trace, which come before the arguments.
        out_tree: Structure of the results.
        out_names: What to call each result.
        from_array: Indices of the arguments under FROM_ARRAY.
        refs: Indices of the mutable references among constants and arguments.
    """

    jaxpr: Any
    call: PjitCall
    consts: tuple[Any, ...]
    out_tree: Any
    out_names: tuple[str, ...]
    from_array: tuple[int, ...]
    refs: tuple[int, ...]


@_jax.core.weakref_lru_cache
def make_plan(
    fun: Callable,
    options: PjitOptions,
    signature: Signature,
    semantics: tuple[str, ...],
    mesh: Any,
) -> Plan:
    """Resolves and traces a call: everything that depends on its signature only."""
    resources, given, avals = resolve_inputs(options, signature, semantics, mesh)
    traced = _traced(fun, replace(signature, avals=avals), resources, mesh, options.subject)
    outs = resolve_outputs(options, traced, mesh)
    donated = donated_leaves(options.params, signature.positions, signature.tree)
    call = PjitCall(
        name=options.name,
        mesh=mesh,
        in_axis_resources=tuple(UNSPECIFIED if r is FROM_ARRAY else r for r in resources),
        out_axis_resources=outs,
        donated_invars=donated,
        in_positional_semantics=semantics,
        arg_names=signature.arg_names,
        given=given,
        keep_unused=options.keep_unused,
        inline=options.inline,
        implicit_reshard=options.implicit_reshard,
        compiler_options=options.compiler_options,
    )
    names = [f"closed-over value {i}" for i in range(len(traced.consts))]
    return Plan(
        jaxpr=_constrain_outputs(traced.jaxpr, outs, mesh),
        call=call.add_inputs(names, leading=True) if names else call,
        consts=traced.consts,
        out_tree=traced.out_tree,
        out_names=traced.out_names,
        from_array=tuple(i for i, r in enumerate(resources) if r is FROM_ARRAY),
        refs=_jax.core.ref_indices(traced.jaxpr),
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


# Bind, unflatten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The straight line of one decorated function."""

    fun: Callable
    options: PjitOptions

    def plan(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Flat, Plan]:
        """Walks the line up to the bind."""
        _jax.rules.load_late_rules()
        options = self.options
        flat = flatten(options, args, kwargs)
        mesh = find_mesh(options, flat)
        plan = make_plan(self.fun, options, flat.signature, flat.semantics, mesh)
        if plan.from_array:
            check_from_array(flat, plan, options)
        if len(plan.refs) > 1:
            check_refs(flat, plan, options)
        return flat, plan


class PjitFunction:
    """What `pjit` returns: call it, or stop on the way with `trace`, `lower` or `eval_shape`.

    Every instance has a class of its own, whose ``__call__`` is JAX's C++ dispatcher: a call that
    it knows runs no Python.
    """

    __module__ = "spmd"
    __slots__ = ("__dict__", "__weakref__", "_line")

    __wrapped__: Any

    def __get__(self, obj: Any, kind: Any = None) -> Any:
        method: Any = self
        return self if obj is None else types.MethodType(method, obj)

    def __repr__(self) -> str:
        return f"<spmd.pjit of `{self._line.options.name}`>"

    @_jax.core.api_boundary
    def trace(self, /, *args: Any, **kwargs: Any) -> Traced:
        """Traces for these arguments.

        Args:
            *args: Arrays, or ``jax.ShapeDtypeStruct`` with or without sharding.
            **kwargs: Likewise, by name.
        """
        line = self._line
        flat, plan = line.plan(args, kwargs)
        signature = Origin(
            params=line.options.params,
            positions=flat.signature.positions,
            statics=flat.signature.statics,
            in_tree=flat.signature.tree,
            out_tree=plan.out_tree,
            out_names=plan.out_names,
            consts=plan.consts,
        )
        placed = tuple(_dispatch.placed_sharding(x) for x in (*plan.consts, *flat.leaves))
        return Traced(plan.jaxpr, plan.call, placed, signature)

    @_jax.core.api_boundary
    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers for these arguments; see :meth:`trace`."""
        return self.trace(*args, **kwargs).lower()

    @_jax.core.api_boundary
    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns shapes and dtypes of the results, as ``jax.ShapeDtypeStruct``."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets the traces and programs of this function."""
        dispatch: Any = type(self).__call__
        dispatch._clear_cache()
        make_plan.evict_weakref(self._line.fun)
        evict_trace(self._line.fun)


def pjit_function(fun: Callable, options: PjitOptions) -> PjitFunction:
    """Builds the callable for a function and its options."""
    line = _Line(fun=fun, options=options)
    miss = functools.partial(_call, line)
    dispatch = _dispatch.dispatcher(fun, options.name, miss, options.params, options)
    body = {"__call__": staticmethod(dispatch), "__slots__": (), "__module__": "spmd"}
    wrapped: Any = type("PjitFunction", (PjitFunction,), body)()
    wrapped._line = line
    functools.update_wrapper(wrapped, fun)
    return wrapped


@_jax.core.api_boundary
def _call(line: _Line, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
    """Calls once; returns results, data for the C++ dispatcher or None, and False (keep it)."""
    flat, plan = line.plan(args, kwargs)
    return call_planned(line, flat, plan, args, kwargs)


def call_planned(
    line: Any, flat: Flat, plan: Plan, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Any, Any, bool]:
    """The rest of the line of a call: bind, execute, unflatten; returns what `_call` does."""
    leaves = flat.leaves
    if "local" in flat.semantics:
        leaves = _to_global(leaves, flat, plan)
    values = [*plan.consts, *leaves]
    repeatable = _dispatch.may_repeat(values)
    try:
        outs = _bind(values, plan, line.options)
    except _jax.transform.InternalFloatingPointError as e:
        _jax.transform.find_nan(e, line.fun, args, kwargs)
        raise
    data = None
    if repeatable and line.options.params.keeps_order(args, kwargs):
        data = _dispatch.fast_path_data(values, plan.jaxpr, plan.call, plan.out_tree, outs)
    if line.options.positional_semantics == "local":
        outs, data = _to_local(outs, plan), None
    return jtu.tree_unflatten(plan.out_tree, outs), data, False


def _bind(values: Sequence[Any], plan: Plan, options: PjitOptions) -> Sequence[Any]:
    mesh = plan.call.mesh
    if _jax.mesh.explicit_axes() or _jax.mesh.has_explicit_axes(mesh):
        traced = [v for v in values if isinstance(v, _jax.core.Tracer)]
        if traced and _jax.mesh.explicit_axes():
            return _bind_typed(values, plan, options)
        if any(map(_jax.core.is_derived, traced)):
            raise explain(options.subject, [_not_set(mesh)])
        if traced and any(map(_jax.mesh.has_explicit_type, values)):
            with _jax.mesh.typing_under(mesh):
                return _bind_typed(values, plan, options)
    return pjit_p.bind(*values, jaxpr=plan.jaxpr, call=plan.call)


def _bind_typed(values: Sequence[Any], plan: Plan, options: PjitOptions) -> Sequence[Any]:
    """Binds where shardings are types: a traced result needs one, which the boundary says."""
    outs = plan.call.out_axis_resources
    vague = [
        n
        for n, r in zip(plan.out_names, outs, strict=True)
        if not isinstance(r, ParsedPartitionSpec) or r.has_unconstrained
    ]
    if vague:
        raise explain(options.subject, [_vague_output(n) for n in vague])
    specs = [_jax.mesh.explicit_part(r.to_partition_spec()) for r in outs]
    call = plan.call
    if call.mesh is not None:
        call = replace(call, mesh=auto_mesh(call.mesh))
    inside = functools.partial(pjit_p.bind, jaxpr=plan.jaxpr, call=call)
    boundary: Any = jax.sharding.auto_axes(lambda *v: inside(*v), out_sharding=specs)
    return boundary(*values)


def _not_set(mesh: Any) -> Failure:
    return Failure(
        what="cannot be differentiated eagerly on a mesh with Explicit axes that is not set",
        given=f"{show_mesh(mesh)}{_jax.core.used_at()}",
        expected="jax.set_mesh around it: the types of derivatives refer to that mesh",
        fix="with jax.set_mesh(mesh): ..., or differentiate inside of jax.jit,\n"
        "or use a mesh with Auto axes",
        error=MeshError,
    )


def _vague_output(name: str) -> Failure:
    return Failure(
        what=f"cannot tell the type of {name}",
        given="a trace under jax.set_mesh with Explicit axes, where a type has a sharding",
        expected="a full spec of every result in out_axis_resources",
        fix="give out_axis_resources, or use a mesh with Auto axes",
    )


def _to_global(leaves: Sequence[Any], flat: Flat, plan: Plan) -> list[Any]:
    call = plan.call
    resources = call.in_axis_resources[len(plan.consts) :]
    return [
        local_to_global(x, r, call.mesh)
        if kind == "local" and not isinstance(x, _jax.core.Tracer)
        else x
        for x, r, kind in zip(leaves, resources, flat.semantics, strict=True)
    ]


def _to_local(outs: Sequence[Any], plan: Plan) -> list[Any]:
    return [
        x if isinstance(x, _jax.core.Tracer) else global_to_local(x, plan.call.mesh) for x in outs
    ]


def clear_caches() -> None:
    """Forgets every trace, lowering and program of `spmd`; arrays and meshes stay."""
    make_plan.cache_clear()
    _names.cache_clear()
    clear_trace_cache()
    clear_rule_caches()
    _dispatch.clear_dispatch_caches()
    for clear in caches_of_features:
        clear()


#: What features have to forget too; they add it when they are imported.
caches_of_features: list[Callable[[], None]] = []


class _Clearer:
    """Lets `jax.clear_caches` clear ours."""

    def cache_clear(self) -> None:
        clear_caches()

    def cache_info(self) -> None:
        return None

    def cache_keys(self) -> list[Any]:
        return []


_clearer = _Clearer()
_jax.core.register_cache(_clearer, "spmd")

__all__ = ["Compiled", "Lowered", "Traced", "clear_caches", "pjit"]
