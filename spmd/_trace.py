"""Trace: a Python function of pytrees becomes a jaxpr of flat values, once per signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
from dataclasses import dataclass, field
import itertools
import logging
from typing import Any
import weakref

import jax
import jax.tree_util as jtu

from spmd import _jax
from spmd._arguments import join_arguments
from spmd._counts import count
from spmd._mesh import show_mesh, tracing
from spmd.errors import ArgumentError, Failure, explain, show_value

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What a trace depends on, besides the function and JAX's own context.

    Attributes:
        tree: Structure of ``(args, kwargs)`` without the static ones.
        avals: One per leaf.
        positions: Original position of each positional argument.
        statics: Static arguments by position or name.
        arg_names: What the user calls each leaf.
        donated: Whether each leaf is donated; the parameters say it, so it tells nothing apart.
        explicit: The mesh axes that are part of the types of values inside.
        types: Of each leaf the spec of its type; empty where no axis is explicit.
    """

    tree: Any
    avals: tuple[Any, ...]
    positions: tuple[int, ...]
    statics: tuple[Any, ...]
    arg_names: tuple[str, ...]
    donated: tuple[bool, ...] = field(default=(), compare=False)
    explicit: tuple[Any, ...] = ()
    types: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Trace:
    """A traced function.

    Attributes:
        jaxpr: Closed jaxpr; its inputs are `consts`, then the leaves of the arguments.
        consts: Values of an outer trace, and references, that the function closes over.
        refs: Indices of the mutable references among all inputs.
        out_tree: Structure of the results.
        out_names: What to call each result, e.g. ``"result['loss']"``.
        changed: Names of leaves that the function changes in place, such as weights of a Flax
            module. No result has what they become.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    refs: tuple[int, ...]
    out_tree: Any
    out_names: tuple[str, ...]
    changed: tuple[str, ...] = ()


def trace(
    fun: Callable,
    signature: Signature,
    mesh: Any,
    subject: str,
    origin: Callable | None = None,
) -> Trace:
    """Traces `fun`, or returns the trace of an equal function, signature and mesh.

    The body sees the mesh, or None. `origin` is the user's function, where `fun` is made from it.
    """
    with tracing(mesh, subject):
        return _trace(fun, signature, mesh, subject, origin)


@_jax.core.weakref_lru_cache
def _trace(
    fun: Callable, signature: Signature, mesh: Any, subject: str, origin: Callable | None
) -> Trace:
    forbidden, explains = _jax.core.trace_switches()
    if forbidden:
        raise RuntimeError(f"{subject} would trace, and jax_no_tracing is set.")
    if explains:
        _explain_miss(origin or fun, signature, mesh, subject)
    out_tree, out_names, changed = None, [], []

    def flat_fun(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        dynamic = jtu.tree_unflatten(signature.tree, leaves)
        args, kwargs = join_arguments(signature.positions, signature.statics, dynamic)
        objects = _objects(dynamic)
        paths, out_tree = jtu.tree_flatten_with_path(fun(*args, **kwargs))
        out_names[:] = ["result" + jtu.keystr(path) for path, _ in paths]
        values = [value for _, value in paths]
        changed[:] = _changed(objects, signature.arg_names, values)
        found = [no_array(v, n) for v, n in zip(values, out_names, strict=True)]
        if failures := [f for f in found if f]:
            raise explain(subject, failures)
        return values

    body: Callable = flat_fun
    if signature.explicit:
        axes, types = signature.explicit, signature.types
        body = jax.sharding.explicit_axes(flat_fun, axes=axes, in_sharding=types)
    kind = subject.split(" of `")[0]
    jaxpr, consts, refs = _jax.core.trace_function(
        body, fun, signature.avals, signature.arg_names, out_names, kind
    )
    count("traces")
    return Trace(
        jaxpr=jaxpr, consts=consts, refs=refs, out_tree=out_tree, out_names=tuple(out_names),
        changed=tuple(changed),
    )  # fmt: skip


_PLAIN = (dict, list, tuple, type(None))


def _objects(tree: Any) -> list[tuple[Any, list[Any]]]:
    """Each part of a tree that is no plain container, with its leaves."""
    parts = jax.tree.leaves(tree, is_leaf=lambda one: not isinstance(one, _PLAIN))
    return [(one, jax.tree.leaves(one)) for one in parts]


def _changed(
    objects: Sequence[tuple[Any, list[Any]]], names: Sequence[str], results: Sequence[Any]
) -> Iterator[str]:
    """The leaves that are others now, by name, but for those that are among the results."""
    left, given = iter(names), {*map(id, results)}
    for one, before in objects:
        own = [*itertools.islice(left, len(before))]
        # What an object is now may be no tree of arrays any more.
        with contextlib.suppress(Exception):
            after = jax.tree.leaves(one)
            rows = zip(own, before, after, strict=False)
            yield from (n for n, a, b in rows if a is not b and id(b) not in given)


def no_array(value: Any, name: str) -> Failure | None:
    """Says that a result is no array, or None if it is one."""
    if isinstance(value, _jax.core.Tracer) or _jax.core.aval_of(value) is not None:
        return None
    return Failure(
        what=f"cannot return {name}: it is no array",
        expected="arrays, numbers, None, and containers of them",
        got=show_value(value),
        error=ArgumentError,
    )


def evict_trace(fun: Callable) -> None:
    """Forgets the traces of one function."""
    _trace.evict_weakref(fun)


def clear_trace_cache() -> None:
    """Forgets all traces."""
    _trace.cache_clear()
    _seen.clear()


# Explaining a miss (`jax_explain_cache_misses`)

_seen: weakref.WeakKeyDictionary[Callable, list[tuple[Signature, Any]]] = (
    weakref.WeakKeyDictionary()
)


def _explain_miss(fun: Callable, signature: Signature, mesh: Any, subject: str) -> None:
    earlier = _seen.setdefault(fun, [])
    reasons = differences(earlier, signature, mesh) if earlier else ["it was never traced before"]
    logger.warning(
        "Trace cache miss of %s%s: %s",
        subject,
        _jax.core.used_at(),
        "; ".join(reasons),
    )
    earlier[:] = [*earlier[-7:], (signature, mesh)]


def differences(
    earlier: Sequence[tuple[Signature, Any]], signature: Signature, mesh: Any
) -> list[str]:
    """What separates a signature from the nearest earlier one."""
    found = [_difference(old, old_mesh, signature, mesh) for old, old_mesh in earlier]
    return min(found, key=len) or ["JAX's own context differs (x64, precision, ...)"]


def _difference(old: Signature, old_mesh: Any, new: Signature, mesh: Any) -> list[str]:
    reasons = []
    if old_mesh != mesh:
        reasons.append(f"now on {show_mesh(mesh)}, before on {show_mesh(old_mesh)}")
    if old.statics != new.statics:
        reasons.append("static arguments differ")
    if old.tree != new.tree:
        return [*reasons, f"now the structure {new.tree}, before {old.tree}"]
    for arg, a, b in zip(new.arg_names, old.avals, new.avals, strict=True):
        if a != b:
            weak = " (weak type)" if a.weak_type != b.weak_type else ""
            now, before = _jax.core.short_aval(b), _jax.core.short_aval(a)
            reasons.append(f"{arg} is {now}, before {before}{weak}")
    return reasons
