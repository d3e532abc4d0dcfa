"""pmap: the straight line of `pjit`, for a function of one device.

parse (at decoration) -> flatten -> find the mapped axes -> trace -> `PjitCall` -> bind -> (impl
rule) lower -> compile -> execute -> unflatten. The bind is that of `pjit_p`, with a `shard_map` in
the jaxpr, so every rule, stage and report of `pjit` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import contextlib
import functools
import os
from typing import Any
import weakref

import jax
import jax.tree_util as jtu

from spmd import _api, _dispatch, _jax, _options
from spmd._api import PjitFunction
from spmd._binding import Binding, Flat, binding_of, flatten
from spmd._call import PjitCall
from spmd._mesh import auto_mesh
from spmd._pickled import check_version, find_device
from spmd._pmap._levels import Nest, nest_here, run_in_nest
from spmd._pmap._mapping import Mapped, spec_along
from spmd._pmap._options import PmapOptions, find_mapping, globally, parse
from spmd._pmap._threads import Entries, Starts
from spmd._spec import UNSPECIFIED
from spmd._starting import not_starting
from spmd._trace import Signature, Trace, differences, trace
from spmd.errors import Failure, OptionError, explain, refuse

_MISSING: Any = object()


def pmap(
    fun: Callable = _MISSING,
    axis_name: str | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    global_arg_shapes: Sequence[Sequence[int] | None] | None = None,
) -> Any:
    """Maps `fun` over an axis of its arguments, each element on a device of its own.

    Args:
        fun: A function of pytrees of arrays: what one device computes. Left out: `pmap` returns a
            decorator.
        axis_name: The name by which collectives in `fun` refer to the mapped axis.
        in_axes: Which axis of each argument is mapped: one number for all, or a tuple with one
            entry per positional argument, each a pytree prefix of it. None: every device gets the
            argument whole. Arguments passed by name are mapped over axis 0.
        out_axes: Where the mapped axis stands in each result, a pytree prefix. None: the result of
            the first device stands for all.
        static_broadcasted_argnums: Positions of arguments that are Python values, part of the
            program's key.
        devices: The devices to run on, as many as the axis is long. None: the first ones.
        backend: The platform to run on.
        axis_size: The length of the axis, over all processes; needed where no argument is mapped.
        donate_argnums: Positions of arguments whose buffers the program may reuse; what is passed
            by name is not donated.
        global_arg_shapes: Per positional argument the shape of one element of the mapped axis, or
            None; compared with what is passed.

    In a run of several processes each passes its own part of the mapped arguments, of as many
    elements as it has devices that run, and gets its own part of the results.

    Returns:
        A function like `fun`, of arguments and results with the mapped axis; see
        :class:`PmapFunction`.

    Raises:
        TypeError: `fun` is not callable, an axis no integer, or `axis_name` no string.
        ValueError: An option names an argument that does not exist, or a size is out of range.

    Example:
        >>> spmd.pmap(lambda x: x / jax.lax.psum(x, "i"), "i")(jnp.arange(4.0))
    """
    options = {k: v for k, v in locals().items() if k != "fun"}
    if fun is _MISSING:
        return functools.partial(_pmap, options)
    return _pmap(options, fun)


def _pmap(options: dict[str, Any], fun: Callable) -> Any:
    if not callable(fun):
        fix = "pmap(fun, axis_name='i'), or @pmap(axis_name='i') above a def"
        raise explain("pmap", [_options.not_callable(fun, fix)])
    if options["devices"] is not None:
        options = options | {"devices": tuple(options["devices"])}
    return pmap_function(fun, options)


class _Line:
    """The straight line of one mapped function."""

    def __init__(self, fun: Callable, options: PmapOptions):
        self.fun = fun
        self.options = options
        self.bindings = _bindings(fun, options)
        self.programs = Entries()
        self.starts = Starts()
        # What runs where `jax.disable_jit` switches the dispatcher off.
        self.unjitted = functools.partial(_run_unjitted, self)

    def walk(self, args: tuple, kwargs: Any) -> tuple[Flat, Binding]:
        """Walks the line up to the bind."""
        _jax.rules.load_late_rules()
        if nest_here():
            failure = Failure(
                what="cannot be traced, lowered or compiled by itself inside of another pmap",
                fix="stop at the outermost one; for shapes, jax.eval_shape(f, ...)",
                error=OptionError,
            )
            raise explain(self.options.subject, [failure])
        flat = self.flatten(args, kwargs)
        return flat, self.binding_of(flat)

    def flatten(self, args: tuple, kwargs: Any) -> Flat:
        """Flattens the arguments of a call."""
        nums, count = self.options.params.static_nums, len(args)
        if nums and max(nums) >= count:
            failure = Failure(
                what=f"has no positional argument {max(nums)}",
                given=f"static_broadcasted_argnums={nums[0] if len(nums) == 1 else tuple(nums)}",
                expected="these arguments by position, not by name",
                got=f"a call with {count} positional argument{'s' * (count != 1)}",
                error=OptionError,
            )
            raise explain(self.options.subject, [failure])
        flat = flatten(self.options, args, kwargs)  # type: ignore[arg-type] - has what it reads
        return flat if jax.process_count() == 1 else globally(self.options, flat)

    def binding_of(self, flat: Flat) -> Binding:
        """Returns what a call does, traced at the first of its signature."""
        make = functools.partial(_make_binding, self.fun, self.options, flat.signature)
        return self.bindings.get(_key(flat.signature), make)

    def compile(self, flat: Flat, binding: Binding) -> None:
        """Compiles what a call does, at the first of its signature, however many threads call."""
        values = [*binding.consts, *flat.leaves]
        if (
            any(isinstance(v, _jax.core.Tracer) for v in values)
            or not _jax.core.trace_state_clean()
        ):
            return

        def make() -> bool:
            if "local" not in flat.semantics:  # else compiled when they are on the devices
                _dispatch.check_alive(values, binding.call)
                _dispatch.prepare(values, _jax.transform.plain_jaxpr(binding.jaxpr), binding.call)
            return True

        self.programs.get(_key(flat.signature), make)

    def clear(self) -> None:
        """Forgets all programs."""
        self.bindings.clear()
        self.programs.clear()


def _run_unjitted(line: _Line, /, *args: Any, **kwargs: Any) -> Any:
    return not_starting(_run_eagerly, line, args, kwargs)


def _run_eagerly(line: _Line, args: tuple, kwargs: dict[str, Any]) -> Any:
    flat = line.flatten(args, kwargs)
    if nest := nest_here():
        return _run_inside(line, flat, nest)
    axes, size = find_mapping(line.options, flat.signature)
    dynamic, by_name = jtu.tree_unflatten(flat.signature.tree, flat.leaves)

    def run(nest: Nest) -> Any:
        if len(nest.levels) > 1:  # JAX runs no shard_map over some axes by itself
            with jax.disable_jit(False):
                return _call(line, *args, **kwargs)[0]
        mapped = Mapped(line.fun, line.options, flat.signature, axes, nest, nest.names[0])
        return mapped(*dynamic, **by_name)

    return run_in_nest(line.options, size, run)


def _run_inside(line: _Line, flat: Flat, nest: Nest) -> Any:
    """Runs a call that is part of what another `pmap` maps, on an axis of its mesh."""
    rows = zip(flat.leaves, flat.signature.arg_names, strict=True)
    gone = [n for x, n in rows if isinstance(x, _jax.core.Array) and x.is_deleted()]
    refuse(line.options.subject, map(_dispatch.gone_failure, gone))
    axes, size = find_mapping(line.options, flat.signature)
    axis = nest.axis(line.options, size)
    parts = [nest.origin(x) for x in flat.leaves]
    for part, dim in zip(parts, axes, strict=True):
        if part is not None and dim is not None:
            nest.split(part, dim, axis)
    dynamic, by_name = jtu.tree_unflatten(flat.signature.tree, flat.leaves)
    mapped = Mapped(line.fun, line.options, flat.signature, axes, nest, axis, parts)
    with nest.between():
        results = mapped(*dynamic, **by_name)
    return jtu.tree_map(_jax.transform.untyped, results)


def _key(signature: Signature) -> tuple[Signature, Any]:
    """What a program depends on: the arguments, and what is set in JAX, here and globally."""
    return signature, _jax.core.trace_context()


def _make_binding(fun: Callable, options: PmapOptions, signature: Signature) -> Binding:
    axes, size = find_mapping(options, signature)
    bare = Signature(
        tree=signature.tree,
        avals=signature.avals,
        positions=signature.positions,
        statics=(),
        arg_names=signature.arg_names,
    )

    def run(nest: Nest) -> tuple[Trace, PjitCall]:
        axis, mesh = nest.names[0], nest.mesh()
        mapped = Mapped(fun, options, signature, axes, nest, axis)
        # What mesh a caller has set is of no account, as its size must be otherwise.
        clear = (
            contextlib.nullcontext()
            if _jax.mesh.manual_axes()
            else _jax.mesh.abstract_mesh_set(None)
        )
        with clear:
            traced = trace(mapped, bare, auto_mesh(mesh), options.subject, fun)
        # What an inner level maps may well stay where it is, too.
        outs = [
            spec_along(a, axis) if len(nest.levels) == 1 else UNSPECIFIED for a in mapped.out_axes
        ]
        call = PjitCall(
            name=options.name,
            mesh=mesh,
            in_axis_resources=tuple(
                spec_along(a, axis, nest.splits.get(i)) for i, a in enumerate(axes)
            ),
            out_axis_resources=tuple(outs),
            donated_invars=signature.donated,
            in_positional_semantics=("global",) * len(axes),
            arg_names=signature.arg_names,
            given=("",) * len(axes),
            kind="pmap",
        )
        return traced, call

    traced, call = run_in_nest(options, size, run)
    return binding_of(traced, call)


def _is_settled(binding: Binding) -> bool:
    """Whether a binding has no values of the trace that it was made in."""
    return not any(isinstance(c, _jax.core.Tracer) for c in binding.consts)


def _make_entries(fun: Callable, options: PmapOptions) -> Entries:
    del fun, options
    return Entries(_is_settled)


# Code that maps a function anew at each step finds its bindings again.
_bindings = _jax.core.weakref_lru_cache(_make_entries)


class PmapFunction(PjitFunction):
    """What `pmap` returns: call it, or stop on the way with `trace`, `lower` or `eval_shape`.

    It keeps one program per signature: shapes, dtypes, weak types and structure of the arguments,
    the values of static ones, and what is set in JAX. A copy, by `copy` or by pickling, has the
    same function and options and no programs.
    """

    __module__ = "spmd"
    __slots__ = ()

    def __repr__(self) -> str:
        return f"<spmd.pmap of `{self._line.options.name}`>"

    def __reduce__(self) -> Any:
        if name := _options.global_name(self):
            return name
        return _restore, (_VERSION, _state(self))

    @property
    def _cache_size(self) -> int:
        """How many signatures have a program."""
        return len(self._line.programs)

    @property
    def _cache_miss(self) -> Callable:
        """What is called with arguments of a new kind; it returns results, and more for C++."""
        return functools.partial(_call, self._line)

    def _debug_cache_keys(self) -> str:
        """The signatures that have a program, in words."""
        keys = self._line.programs.keys()
        head = f"The cache contains {len(keys)} element{'s' * (len(keys) != 1)}:"
        return "\n\n".join([head, *map(_show_key, keys)])

    def _debug_compute_cache_key(self, /, *args: Any, **kwargs: Any) -> str:
        """The signature of arguments, or of some of them, in words; calls nothing."""
        return _show_key(_key(flatten(self._line.options, args, kwargs).signature))

    def explain_miss(self, /, *args: Any, **kwargs: Any) -> str:
        """Says why a call with these arguments would compile, against the nearest program.

        Args:
            *args: As for a call; nothing is run.
            **kwargs: Likewise, by name.

        Returns:
            What differs; an empty string where there is a program.
        """
        line = self._line
        key = _key(line.flatten(args, kwargs).signature)
        keys = line.programs.keys()
        if key in keys:
            return ""
        if not keys:
            return "nothing was compiled before"
        alike = [k for k in keys if k[0] == key[0]]
        if alike:
            return min((_context_difference(k[1], key[1]) for k in alike), key=len)
        return "; ".join(differences([(k[0], None) for k in keys], key[0], None))

    def add_post_hook(self, hook: Callable[[Any, tuple, dict[str, Any], Any], Any]) -> None:
        """Has a function called after each call, with ``(function, args, kwargs, outputs)``.

        Args:
            hook: What it returns is dropped; what it raises, the call raises.
        """
        own: Any = type(self)
        inner = own.__call__
        me = weakref.ref(self)

        def hooked(*args: Any, **kwargs: Any) -> Any:
            outputs = inner(*args, **kwargs)
            hook(me(), args, kwargs, outputs)
            return outputs

        hooked._clear_cache = inner._clear_cache  # type: ignore[attr-defined] - as a dispatcher
        own.__call__ = staticmethod(hooked)


def pmap_function(fun: Callable, given: dict[str, Any]) -> PmapFunction:
    """Builds the callable for a function and the options as a user gives them."""
    options = parse(fun, **given)
    line = _Line(_as_key(fun), options)
    miss, directly = functools.partial(_miss, line), functools.partial(_call_directly, line)
    dispatch = _dispatch.dispatcher(line.unjitted, options.name, miss, options.params, "spmd.pmap")
    call = line.starts.one_at_a_time(dispatch, directly)
    wrapped: Any = _api.instance_of(PmapFunction, fun, line, call)
    wrapped.__name__ = getattr(fun, "__name__", options.name)
    wrapped._given = given
    if options.params.signature is not None:
        wrapped.__signature__ = options.params.signature
    _lines[id(line)] = line
    return wrapped


def _as_key(fun: Callable) -> Callable:
    """A callable that caches can hold by a weak reference, equal to itself alone."""
    try:
        hash(fun)
        weakref.ref(fun)
    except TypeError:
        return functools.update_wrapper(functools.partial(fun), fun)
    return fun


def _call_directly(line: _Line, /, *args: Any, **kwargs: Any) -> Any:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined] - made by JAX at import
        return line.unjitted(*args, **kwargs)
    return _call(line, *args, **kwargs)[0]


def _miss(line: _Line, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
    """What the dispatcher calls."""
    return line.starts.miss(_call, line, *args, **kwargs)


def _prepare(line: _Line, args: tuple, kwargs: dict[str, Any]) -> tuple[Flat, Binding]:
    flat, binding = line.walk(args, kwargs)
    line.compile(flat, binding)
    return flat, binding


@_jax.core.api_boundary
def _call(line: _Line, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
    """Calls once; returns results, data for the C++ dispatcher or None, and False (keep it)."""
    nest = nest_here()
    if nest is not None:
        flat = line.flatten(args, kwargs)
        return not_starting(_run_inside, line, flat, nest), None, False
    flat, binding = not_starting(_prepare, line, args, kwargs)
    learns = line.starts.program(binding.jaxpr, binding.call.mesh)
    outs, data, keep = _api.call_bound(line, flat, binding, args, kwargs)
    return outs, data if learns() else None, keep


_lines: weakref.WeakValueDictionary[int, _Line] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    """Forgets what threads that stay with the parent were making."""
    global _bindings
    _bindings = _jax.core.weakref_lru_cache(_make_entries)
    for ref in _lines.valuerefs():
        if line := ref():
            line.bindings.after_fork()
            line.programs.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _clear_all() -> None:
    """Forgets the programs of all functions."""
    _bindings.cache_clear()
    for ref in _lines.valuerefs():  # a copy, which other threads may add to
        if line := ref():
            line.clear()


_clearer = _jax.core.Clearer(_clear_all, "spmd.pmap")

# Copies

#: Of the pickled form; another one is refused.
_VERSION = 1
#: What a wrapper has of its function, and not from a user.
_OWN = ("__wrapped__", "__signature__", "_given")


def _state(wrapped: Any) -> dict[str, Any]:
    own = {k: v for k, v in vars(wrapped).items() if k not in _OWN}
    given = dict(wrapped._given)
    if given["devices"] is not None:
        given["devices"] = tuple((d.platform, d.id) for d in given["devices"])
    return {"fun": wrapped._line.fun, "options": given, "attributes": own}


def _restore(version: int, state: dict[str, Any]) -> PmapFunction:
    check_version("A pickled pmap", version, _VERSION)
    given = dict(state["options"])
    if given["devices"] is not None:
        given["devices"] = tuple(find_device("A pickled pmap", p, i) for p, i in given["devices"])
    wrapped = pmap_function(state["fun"], given)
    vars(wrapped).update(state["attributes"])
    return wrapped


# What a key says


def _show_key(key: tuple[Signature, Any]) -> str:
    signature, context = key
    rows = [
        f"{name}: {_jax.core.short_aval(aval)}{', weak type' * getattr(aval, 'weak_type', False)}"
        for name, aval in zip(signature.arg_names, signature.avals, strict=True)
    ]
    rows += [f"static {where}: {static.value!r}" for where, static in signature.statics]
    rows += [f"structure: {signature.tree}"]
    settings = [f"{n}={v!r}" for n, v in _named(context).items() if v != _at_import.get(n)]
    rows += [f"set in JAX: {', '.join(settings)}"] * bool(settings)
    return "\n".join(rows)


def _named(context: Any) -> dict[str, Any]:
    values = context if isinstance(context, tuple) else (context,)
    names = _jax.core.trace_context_names()
    if len(names) != len(values):
        names = [str(i) for i in range(len(values))]
    return dict(zip(names, values, strict=True))


_at_import = _named(_jax.core.trace_context())


def _context_difference(old: Any, new: Any) -> str:
    before, now = _named(old), _named(new)
    changed = [n for n in now if before.get(n) != now[n]]
    return "; ".join(f"set in JAX: {n} is {now[n]!r}, before {before.get(n)!r}" for n in changed)
