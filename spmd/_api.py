"""pjit: the straight line from a user's call to the devices.

parse (at decoration, `_options`) -> flatten -> resolve inputs -> trace -> resolve outputs ->
PjitCall (`_binding`) -> bind (here) -> impl rule (`_pjit`) -> lower -> compile -> execute
(`_dispatch`) -> unflatten. `trace()`, `lower()` and `compile()` stop at a point on it. The eager
call is the same line behind the C++ dispatcher's lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
import functools
import types
from typing import Any, cast

import jax
import jax.tree_util as jtu

from spmd import _dispatch, _jax
from spmd._arguments import describe_leaves
from spmd._binding import (
    Binding,
    Flat,
    check_from_array,
    check_not_traced,
    check_refs,
    find_mesh,
    flatten,
    make_binding,
)
from spmd._doors import opened
from spmd._local import global_to_local, local_to_global
from spmd._mesh import auto_mesh, show_mesh
from spmd._options import MISSING, PjitOptions, not_callable, parse
from spmd._pjit import clear_rule_caches, pjit_p
from spmd._spec import UNSPECIFIED, ParsedPartitionSpec
from spmd._trace import clear_trace_cache, evict_trace
from spmd.errors import Failure, MeshError, explain
from spmd.stages import Compiled, Lowered, Origin, Traced


def pjit(
    fun: Callable = MISSING,
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
    plan: Any = None,
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
            (replicated), a sharding, :data:`FROM_ARRAY`, or :data:`AUTO`: the planner chooses.
            Left out: committed arrays stay as they are, everything else is replicated; beside
            AUTO for results it means AUTO.
        out_axis_resources: Specs of the results, a pytree prefix; ``P.UNCONSTRAINED`` leaves a
            dimension to the partitioner, AUTO a result to the planner. Left out: the partitioner
            chooses; beside AUTO for arguments the planner.
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
        plan: A :class:`Plan` that says where everything lies, instead of specs.
        in_shardings: Another name of `in_axis_resources`.
        out_shardings: Another name of `out_axis_resources`.

    Returns:
        A function like `fun`, with ``.trace``, ``.lower``, ``.plan``, ``.eval_shape`` and
        ``.clear_cache``.

    Raises:
        TypeError: `fun` is not callable, or a leaf is no spec.
        ValueError: An option names an argument that does not exist, or two options disagree.

    A call of the function raises :class:`PlanError` where the plan is of another program, mesh or
    version, and where the call is a part of a larger program.

    Example:
        >>> with Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")):
        ...     f = pjit(layer, in_axis_resources=(P("data"), P(None, "model")))
        ...     y = f(x, w)
    """
    options = {k: v for k, v in locals().items() if k != "fun"}
    if fun is MISSING:
        return functools.partial(_pjit, options)
    return _pjit(options, fun)


def _pjit(options: dict[str, Any], fun: Callable) -> Any:
    if not callable(fun):
        fix = "pjit(fun, in_axis_resources=...), or @pjit(in_axis_resources=...) above a def"
        raise explain("pjit", [not_callable(fun, fix)])
    # A plan says where all lies, and shardings of `jax.jit` would be constraints inside of it.
    if options["plan"] is not None and _jax.dispatch.shardings_of_jit(fun):
        fun = cast(Any, fun).__wrapped__
    wrapped = pjit_function(*parse(fun, **options))
    wrapped.__wrapped__ = fun
    return wrapped


# Bind, unflatten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The straight line of one decorated function."""

    fun: Callable
    options: PjitOptions

    def walk(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Flat, Binding]:
        """Walks the line up to the bind."""
        _jax.rules.load_late_rules()
        options = self.options
        flat = flatten(options, args, kwargs)
        if options.is_planned:
            check_not_traced(flat, options)
        mesh = find_mesh(options, flat)
        binding = make_binding(self.fun, options, flat.signature, flat.semantics, mesh)
        if binding.from_array:
            check_from_array(flat, binding, options)
        if len(binding.refs) > 1:
            check_refs(flat, binding, options)
        return flat, binding

    def clear(self) -> None:
        """Forgets all traces and programs."""
        make_binding.evict_weakref(self.fun)
        evict_trace(self.fun)


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
        flat, binding = line.walk(args, kwargs)
        signature = Origin(
            params=line.options.params,
            positions=flat.signature.positions,
            statics=flat.signature.statics,
            in_tree=flat.signature.tree,
            out_tree=binding.out_tree,
            out_names=binding.out_names,
            consts=binding.consts,
            changed=binding.changed,
        )
        placed = _jax.dispatch.placed_shardings((*binding.consts, *flat.leaves))
        return Traced(binding.jaxpr, binding.call, placed, signature)

    @_jax.core.api_boundary
    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers for these arguments; see :meth:`trace`."""
        return self.trace(*args, **kwargs).lower()

    @_jax.core.api_boundary
    def plan(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns where arguments, results and what is inside lie, and why.

        That is the plan of a function with AUTO among its specs, or with ``plan=``; of any other
        function it is what `spmd.plan` chooses for its mesh, or for the active one.

        Args:
            *args: Arrays, or ``jax.ShapeDtypeStruct``.
            **kwargs: Likewise, by name.

        Returns:
            A :class:`Plan`.

        Raises:
            PlanError: No plan is possible.
        """
        if self._line.options.is_planned:
            return self._line.walk(args, kwargs)[1].plan
        return opened("plan_function")(self, args, kwargs)

    @_jax.core.api_boundary
    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns shapes and dtypes of the results, as ``jax.ShapeDtypeStruct``."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets the traces and programs of this function."""
        dispatch: Any = type(self).__call__
        dispatch._clear_cache()
        self._line.clear()


def pjit_function(fun: Callable, options: PjitOptions) -> PjitFunction:
    """Builds the callable for a function and its options."""
    line = _Line(fun=fun, options=options)
    miss = functools.partial(_call, line)
    dispatch = _dispatch.dispatcher(fun, options.name, miss, options.params, options)
    return instance_of(PjitFunction, fun, line, dispatch)


def instance_of(kind: type[PjitFunction], fun: Callable, line: Any, call: Callable) -> Any:
    """Makes the only object of a class below `kind`: `fun` with a line, called by `call`."""
    body = {"__call__": staticmethod(call), "__slots__": (), "__module__": "spmd"}
    wrapped: Any = type(kind.__name__, (kind,), body)()
    wrapped._line = line
    return functools.update_wrapper(wrapped, fun)


@_jax.core.api_boundary
def _call(line: _Line, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
    """Calls once; returns results, data for the C++ dispatcher or None, and False (keep it)."""
    flat, binding = line.walk(args, kwargs)
    return call_bound(line, flat, binding, args, kwargs)


def call_bound(
    line: Any, flat: Flat, binding: Binding, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Any, Any, bool]:
    """The rest of the line of a call: bind, execute, unflatten; returns what `_call` does."""
    leaves = flat.leaves
    if "local" in flat.semantics:
        leaves = _to_global(leaves, flat, binding)
    values = [*binding.consts, *leaves]
    repeatable = _dispatch.may_repeat(values)
    try:
        outs = _bind(values, binding, line.options)
    except _jax.transform.InternalFloatingPointError as e:
        _jax.transform.find_nan(e, line.fun, args, kwargs)
        raise
    data = None
    if repeatable and (not kwargs or line.options.params.keeps_order(args, kwargs)):
        data = _dispatch.fast_path_data(values, binding.jaxpr, binding.call, binding.out_tree, outs)
    if line.options.positional_semantics == "local":
        data, mesh = None, binding.call.mesh
        outs = [x if isinstance(x, _jax.core.Tracer) else global_to_local(x, mesh) for x in outs]
    return jtu.tree_unflatten(binding.out_tree, outs), data, False


def _bind(values: Sequence[Any], binding: Binding, options: PjitOptions) -> Sequence[Any]:
    mesh = binding.call.mesh
    if _jax.mesh.meets_explicit_axes(mesh):
        traced = [v for v in values if isinstance(v, _jax.core.Tracer)]
        if traced and _jax.mesh.explicit_axes():
            return _bind_typed(values, binding, options)
        if any(map(_jax.core.is_derived, traced)):
            raise explain(options.subject, [_not_set(mesh)])
        if traced and any(map(_jax.mesh.has_explicit_type, values)):
            with _jax.mesh.typing_under(mesh):
                return _bind_typed(values, binding, options)
    return pjit_p.bind(*values, jaxpr=binding.jaxpr, call=binding.call)


def _bind_typed(values: Sequence[Any], binding: Binding, options: PjitOptions) -> Sequence[Any]:
    """Binds where shardings are types: a traced result needs one, which the boundary says."""
    outs = binding.call.out_axis_resources
    vague = [
        n
        for n, r in zip(binding.out_names, outs, strict=True)
        if not isinstance(r, ParsedPartitionSpec) or r.has_unconstrained
    ]
    if vague:
        raise explain(options.subject, [_vague_output(n) for n in vague])
    specs = [_jax.mesh.explicit_part(r.to_partition_spec()) for r in outs]
    call = binding.call
    if call.mesh is not None:
        call = replace(call, mesh=auto_mesh(call.mesh))
    inside = functools.partial(pjit_p.bind, jaxpr=binding.jaxpr, call=call)
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


def _to_global(leaves: Sequence[Any], flat: Flat, binding: Binding) -> list[Any]:
    call = binding.call
    resources = call.in_axis_resources[len(binding.consts) :]
    return [
        local_to_global(x, r, call.mesh)
        if kind == "local" and not isinstance(x, _jax.core.Tracer)
        else x
        for x, r, kind in zip(leaves, resources, flat.semantics, strict=True)
    ]


def clear_caches() -> None:
    """Forgets every trace, lowering and program of `spmd`; arrays and meshes stay."""
    make_binding.cache_clear()
    describe_leaves.cache_clear()
    clear_trace_cache()
    clear_rule_caches()
    _dispatch.clear_dispatch_caches()
    for clear in caches_of_features:
        clear()


#: What features have to forget too; they add it when they are imported.
caches_of_features: list[Callable[[], None]] = []


_clearer = _jax.core.Clearer(clear_caches, "spmd")

__all__ = ["Compiled", "Lowered", "Traced", "clear_caches", "pjit"]
