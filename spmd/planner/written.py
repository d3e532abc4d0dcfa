"""The specs that a user gave to the function that is planned: fixed beside AUTO, else a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

import spmd
from spmd._api import PjitFunction
from spmd._binding import flatten, resolve_inputs, resolve_outputs
from spmd._spec import AUTO, UNSPECIFIED, ParsedPartitionSpec
from spmd._trace import trace
from spmd.errors import SpmdError


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


def given_specs(f: PjitFunction, args: Sequence[Any], meshes: Sequence[Any]) -> dict[str, Any]:
    """By name of an argument or result the PartitionSpec that its user gave.

    Raises:
        SpmdError: they fit none of the meshes; what the first one says.
    """
    errors: list[SpmdError] = []
    for mesh in meshes:
        try:
            return dict(_given_on(f, args, mesh))
        except SpmdError as e:
            errors.append(e)
    raise errors[0]


def _given_on(f: PjitFunction, args: Sequence[Any], mesh: Any) -> Iterator[tuple[str, Any]]:
    options = dataclasses.replace(f._line.options, mesh=mesh)
    flat = flatten(options, tuple(args), {})
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
    f: PjitFunction, args: Sequence[Any], meshes: Sequence[Any]
) -> Iterator[Any]:
    """The program as it is, for each mesh that its specs fit."""
    for mesh in meshes:
        try:
            with spmd.Mesh(mesh.devices, mesh.axis_names):
                yield f.lower(*args)
        except SpmdError:
            continue  # it is for other axes, or does not divide by these
