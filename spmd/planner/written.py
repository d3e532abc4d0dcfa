"""The specs that a user gave to the function that is planned: fixed beside AUTO, else a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding

import spmd
from spmd import _jax, stages
from spmd._api import PjitFunction, pjit_function
from spmd._binding import flatten, resolve_inputs, resolve_outputs
from spmd._spec import AUTO, UNSPECIFIED, ParsedPartitionSpec
from spmd._trace import trace
from spmd.errors import Failure, PlanError, SpmdError, explain
from spmd.inspection.compile.carrying import mesh_of_arguments
from spmd.planner.asked import places_of


def without_shardings(f: Any, subject: str) -> Any:
    """The function of a `jax.jit` with shardings as one of `spmd.pjit` with specs; else as it is.

    Its own shardings would be constraints inside of the program.
    """
    found = _jax.dispatch.shardings_of_jit(f)
    if found is None:
        return f
    leaves = [one for one in jax.tree.leaves(found) if not isinstance(one, NamedSharding)]
    if leaves:
        failure = Failure(
            what="cannot compare the shardings of this jax.jit",
            expected="a NamedSharding for each",
            got=", ".join(dict.fromkeys(type(one).__name__ for one in leaves)),
            fix="plan the function itself, without jax.jit",
            error=PlanError,
        )
        raise explain(subject, [failure])
    ins, outs = (
        jax.tree.map(
            lambda one: UNSPECIFIED if one is None else one.spec, side, is_leaf=lambda x: x is None
        )
        for side in found
    )
    own = _jax.dispatch.options_of_jit(f)
    return spmd.pjit(f.__wrapped__, in_axis_resources=ins, out_axis_resources=outs, **own)


def written_mesh(f: Any, args: Any) -> Any:
    """The mesh that the shardings of a `jax.jit`, or else of the arguments, name; None for none."""
    given = jax.tree.leaves(_jax.dispatch.shardings_of_jit(f))
    own = next((one.mesh for one in given if isinstance(one, NamedSharding)), None)
    found = mesh_of_arguments(args) if own is None else own
    return found if isinstance(found, jax.sharding.Mesh) else None  # some have no devices


def has_auto(f: Any) -> bool:
    """Whether AUTO is among the specs of a function."""
    return (
        isinstance(f, PjitFunction)
        and f._line.options.plan is None
        and any(leaf is AUTO for leaf in _leaves(f))
    )


def has_specs(f: Any) -> bool:
    """Whether a function has specs of its own, all of which are given."""
    if not isinstance(f, PjitFunction) or f._line.options.plan is not None:
        return False
    return not has_auto(f) and any(leaf is not UNSPECIFIED for leaf in _leaves(f))


def _leaves(f: PjitFunction) -> Sequence[Any]:
    options = f._line.options
    return (*options.in_specs.leaves, *options.out_specs.leaves)


def given_specs(
    f: PjitFunction, args: Sequence[Any], kwargs: Mapping[str, Any], meshes: Sequence[Any]
) -> dict[str, Any]:
    """By name of an argument or result the PartitionSpec that its user gave.

    Raises:
        SpmdError: they fit none of the meshes; what the first one says.
    """
    errors: list[SpmdError] = []
    for mesh in meshes:
        try:
            return dict(_given_on(f, args, kwargs, mesh))
        except SpmdError as e:
            errors.append(e)
    raise errors[0]


def _given_on(
    f: PjitFunction, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Any
) -> Iterator[tuple[str, Any]]:
    options = dataclasses.replace(f._line.options, mesh=mesh)
    flat = flatten(options, tuple(args), kwargs)
    signature = flat.signature
    ins, _, avals = resolve_inputs(options, signature, flat.semantics, mesh, frozenset())
    signature = dataclasses.replace(signature, avals=avals)
    traced = trace(f._line.fun, signature, mesh, options.subject)
    outs = resolve_outputs(options, traced, mesh, frozenset())
    yield from fixed_of((*signature.arg_names, *traced.out_names), (*ins, *outs))


def fixed_of(names: Sequence[str], resources: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """By name, what a call says of a value whole: not AUTO, and no dimension left open."""
    for name, resource in zip(names, resources, strict=True):
        if isinstance(resource, ParsedPartitionSpec) and not resource.has_unconstrained:
            yield name, resource.to_partition_spec()


def lowered_as_written(
    f: PjitFunction,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    meshes: Sequence[Any],
    misfits: dict[str, str],
) -> Iterator[stages.Lowered]:
    """The program as it is, for each mesh that its specs fit.

    Args:
        f: the function, whose own mesh does not count.
        args: that it is called with.
        kwargs: likewise, by name.
        meshes: to choose among.
        misfits: is told, if the specs fit none of these, why not the first one.
    """
    errors: list[str] = []
    for mesh in meshes:
        own = pjit_function(f._line.fun, dataclasses.replace(f._line.options, mesh=mesh))
        try:
            yield own.lower(*args, **kwargs)
        except SpmdError as e:  # it is for other axes, or does not divide by these
            errors.append(f"{type(e).__name__}: {e}".partition("\n")[0])
    if len(errors) == len(meshes):
        misfits["its own specs"] = errors[0]


def written_places(lowered: stages.Lowered) -> tuple[list[Any], list[Any]]:
    """Of each leaf of the arguments and of the results the dimension that each axis splits.

    None for one that the partitioner places.
    """
    call, skip = lowered._call, len(lowered._signature.consts)
    return (
        [_places(one, {}) for one in call.in_axis_resources[skip:]],
        [_places(one, None) for one in call.out_axis_resources],
    )


def _places(resource: Any, default: dict[str, int] | None) -> dict[str, int] | None:
    if not isinstance(resource, ParsedPartitionSpec):
        return default
    return None if resource.has_unconstrained else places_of(resource)
