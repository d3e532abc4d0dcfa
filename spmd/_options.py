"""What `pjit` is told at decoration, checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
import functools
import sys
from typing import Any, ClassVar
import weakref

import jax
from jax.sharding import NamedSharding

from spmd import _dispatch, _jax
from spmd._arguments import Parameters, parse_parameters
from spmd._doors import opened
from spmd._mesh import auto_mesh, plain_mesh, show_mesh
from spmd._resolve import mesh_of_leaves
from spmd._spec import AUTO, UNSPECIFIED, SpecTree, parse_specs, show_spec
from spmd.errors import ArgumentError, Failure, MeshError, OptionError, explain

MISSING: Any = object()

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
    #: A plan that says where everything lies, or None.
    plan: Any = None
    # Computed once: the record is part of the key of every lookup.
    _hash: int = field(init=False, compare=False)
    #: The first words of a message.
    subject: str = field(init=False, compare=False)
    #: Whether the planner says where something lies.
    is_planned: bool = field(init=False, compare=False)
    #: What to declare an argument static with.
    static_option: ClassVar[str] = "static_argnames"

    def __post_init__(self) -> None:
        parts = (self.name, self.in_specs, self.out_specs, self.params, self.mesh)
        object.__setattr__(self, "_hash", hash(parts))
        object.__setattr__(self, "subject", f"pjit of `{self.name}`")
        leaves = (*self.in_specs.leaves, *self.out_specs.leaves)
        object.__setattr__(
            self, "is_planned", self.plan is not None or any(x is AUTO for x in leaves)
        )

    def __hash__(self) -> int:
        return self._hash


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
        failure = Failure(
            what="cannot hash the function: its programs are kept under it",
            given=f"{fun!r}"[:100],
            expected="a function whose result depends on its arguments alone",
            got=f"a {type(fun).__name__} without __hash__",
            fix="freeze its class (@dataclass(frozen=True)), or pass what changes as an argument",
            error=ArgumentError,
        )
        raise explain("pjit", [failure]) from None
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
    plan: Any,
) -> tuple[Callable, PjitOptions]:
    """Reads what can be read without arguments; returns `fun` too, as one that caches can hold."""
    fun = _weakly_referable(fun)
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
    failures = [*_choice_failures(mesh, positional_semantics, implicit_reshard)]
    failures += _plan_failures(plan, [ins, outs])
    if any(isinstance(x, NamedSharding) for s in specs for x in s.leaves):
        _, clash = mesh_of_leaves(
            [x for s in specs for x in s.leaves], [n for s in specs for n in s.names]
        )
        failures += clash
        if mesh is not None and not failures:
            failures += mesh_clash("the option mesh", mesh, specs)
    if failures:
        raise explain(subject, failures)
    return fun, PjitOptions(
        name=name,
        in_specs=specs[0],
        out_specs=specs[1],
        params=params,
        mesh=None if mesh is None else plain_mesh(mesh),
        keep_unused=bool(keep_unused),
        inline=bool(inline),
        positional_semantics=positional_semantics,
        implicit_reshard=implicit_reshard,
        compiler_options=tuple(sorted((compiler_options or {}).items())),
        plan=plan,
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


def _choice_failures(mesh: Any, semantics: str, reshard: str | None) -> Iterator[Failure]:
    if mesh is not None and not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        yield Failure(
            what="cannot use this mesh",
            given=f"mesh={mesh!r}"[:100],
            expected="a spmd.Mesh, a jax.sharding.Mesh or an AbstractMesh",
            got=type(mesh).__name__,
            error=ArgumentError,
        )
    if semantics not in ("global", "local"):
        yield Failure(
            what="cannot read positional_semantics",
            expected="'global' or 'local'",
            got=repr(semantics),
            error=OptionError,
        )
    if reshard is not None and reshard not in _dispatch.RESHARD_MODES:
        yield replace(_dispatch.bad_reshard_mode(reshard), what="cannot read implicit_reshard")


def _plan_failures(plan: Any, given: Sequence[tuple[str, Any]]) -> Iterator[Failure]:
    if plan is None:
        return
    if not isinstance(plan, opened("Plan")):
        yield Failure(
            what="cannot use this plan",
            given=f"plan={plan!r}"[:100],
            expected="a plan, as spmd.plan(...) and spmd.Plan.load(...) give it",
            got=type(plan).__name__,
            error=ArgumentError,
        )
    elif said := [name for name, value in given if value is not UNSPECIFIED]:
        yield Failure(
            what=f"got both a plan and {' and '.join(said)}: the plan says where everything lies",
            fix=f"leave {' and '.join(said)} out, or plan again with fixed=",
            error=OptionError,
        )


def mesh_clash(where: str, mesh: Any, specs: Sequence[SpecTree]) -> list[Failure]:
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
