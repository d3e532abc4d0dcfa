"""Resolve: parsed specs, a mesh and avals become shardings; every check that a user can trip.

Functions here return failures as data, one per bad leaf; the caller raises them all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
import numpy as np

from spmd import _jax
from spmd._mesh import auto_mesh, is_described, show_devices, show_mesh
from spmd._spec import (
    UNCONSTRAINED,
    UNSPECIFIED,
    ParsedPartitionSpec,
    show_origin,
    show_spec,
    spec_of,
)
from spmd.errors import Failure, MeshError, did_you_mean

# Leaves


def canonical_leaf(leaf: Any) -> Any:
    """Turns a NamedSharding that a user gave into its spec; what no spec says stays as it is."""
    if isinstance(leaf, NamedSharding) and leaf.memory_kind in (None, _default_memory(leaf)):
        return ParsedPartitionSpec.from_user_input(leaf.spec, "spec", allow_unconstrained=True)
    return leaf


def _default_memory(sharding: NamedSharding) -> str | None:
    if _jax.mesh.is_abstract(sharding.mesh):
        return None
    devices: Any = sharding.mesh.devices
    return devices.flat[0].default_memory().kind


def mesh_of_leaves(leaves: Sequence[Any], names: Sequence[str]) -> tuple[Any, list[Failure]]:
    """Returns the one mesh of all NamedShardings among `leaves`, or None."""
    found: dict[Any, str] = {}
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, NamedSharding):
            found.setdefault(auto_mesh(leaf.mesh), name)
    if len(found) < 2:
        return next(iter(found), None), []
    return next(iter(found)), [
        Failure(
            what="got shardings on different meshes",
            given="\n".join(
                f"{name} on {show_mesh(m)}, {_devices_text(m)}" for m, name in found.items()
            ),
            expected="one mesh for all of them",
            fix="build all NamedShardings from the same mesh",
            error=MeshError,
        )
    ]


def _devices_text(mesh: Any) -> str:
    return "no devices" if _jax.mesh.is_abstract(mesh) else show_devices(list(mesh.devices.flat))


def no_mesh(*, constraint: bool = False) -> Failure:
    """The failure of a call that needs a mesh and has none.

    Args:
        constraint: Whether it is `with_sharding_constraint` that needs it.
    """
    otherwise = "pjit(..., mesh=mesh), or a NamedSharding for every argument"
    if constraint:
        otherwise = "a NamedSharding instead of the PartitionSpec"
    return Failure(
        what="needs a mesh, and there is none here",
        expected="a mesh that is active where the function is called",
        fix=f'with spmd.make_mesh({{"data": jax.device_count()}}): ...\nor {otherwise}',
        error=MeshError,
    )


# Specs on a mesh


def spec_failure(
    spec: Any, aval: Any, mesh: Any, subject: str, given: str, *, boundary: bool
) -> Failure | None:
    """Checks one spec against a mesh and the shape it is for.

    Args:
        spec: ParsedPartitionSpec or NamedSharding; anything else passes.
        aval: What has a `shape` and a `dtype`.
        mesh: The mesh of the call.
        subject: The value, e.g. ``"argument batch['x']"``.
        given: Where the spec was given, e.g. ``"in_axis_resources['batch']"``.
        boundary: Whether dimensions must divide evenly.
    """
    if (spec := spec_of(spec)) is None:
        return None
    shown = f"{given} = {show_origin(spec)} on {show_mesh(mesh)}"
    unknown = [a for a in spec.axes if a not in mesh.shape]
    if unknown:
        return _unknown_axis(unknown, mesh, subject, shown)
    if len(spec) > aval.ndim:
        return _too_long(spec, aval, subject, shown)
    return _indivisible(spec, aval, mesh, subject, shown) if boundary else None


def _unknown_axis(unknown: list[Any], mesh: Any, subject: str, given: str) -> Failure:
    hint = did_you_mean(unknown[0], mesh.shape)
    axes = ", ".join(repr(a) for a in mesh.axis_names)
    return Failure(
        what=f"cannot split {subject}",
        given=given,
        expected=f"mesh axes out of {axes}",
        got=f"unknown axis {', '.join(map(repr, unknown))}{hint}",
        fix="use an axis of the mesh, or enter the mesh that has it",
    )


def _too_long(spec: Any, aval: Any, subject: str, given: str) -> Failure:
    n = aval.ndim
    return Failure(
        what=f"cannot split {subject}",
        given=given,
        expected=f"a spec of at most {n} entr{'y' if n == 1 else 'ies'}",
        got=f"{show_aval(aval)}, which has rank {n}; "
        f"the spec has {len(spec)} entr{'y' if len(spec) == 1 else 'ies'}",
        fix=f"shorten the spec to {n} entr{'y' if n == 1 else 'ies'}" if n else "write P()",
    )


def _indivisible(spec: Any, aval: Any, mesh: Any, subject: str, given: str) -> Failure | None:
    bad = []
    for dim, part in enumerate(spec):
        factor = axes_size(part, mesh)
        # Of a symbolic size of `jax.export` only the caller of the export knows whether it divides.
        if isinstance(aval.shape[dim], int) and aval.shape[dim] % factor:
            bad.append((dim, aval.shape[dim], factor))
    if not bad:
        return None
    dim, size, factor = bad[0]
    padded = math.ceil(size / factor) * factor
    parts = [p if i != dim else () for i, p in enumerate(spec.partitions)]
    unsplit = show_spec(ParsedPartitionSpec(None, parts).to_partition_spec())
    arithmetic = "; ".join(
        f"{s} = {s // f}*{f} + {s % f}" + (f" in dimension {d}" if len(bad) > 1 else "")
        for d, s, f in bad
    )
    return Failure(
        what=f"cannot split {subject}",
        given=given,
        expected="; ".join(f"dimension {d} to be divisible by {f}" for d, _, f in bad),
        got=f"{show_aval(aval)}: {arithmetic}",
        fix=f"pad dimension {dim} to {padded}, or leave it unsharded with {unsplit}",
    )


def axes_size(part: Any, mesh: Any) -> int:
    """Into how many pieces one entry of a spec splits its dimension."""
    return math.prod(mesh.shape[a] for a in part) if isinstance(part, tuple) else 1


def show_aval(aval: Any) -> str:
    """Returns ``f32[30,512]``."""
    return _jax.core.short_aval(aval)


def manual_failure(spec: Any, subject: str, given: str) -> Failure | None:
    """An enclosing `shard_map` maps over an axis that the spec uses."""
    if (spec := spec_of(spec)) is None:
        return None
    taken = sorted(repr(a) for a in _jax.mesh.manual_axes() & set(spec.axes))
    if not taken:
        return None
    return Failure(
        what=f"cannot split {subject} over mesh axis {', '.join(taken)}",
        given=f"{given} = {show_origin(spec)}{_jax.core.used_at()}",
        expected="axes that no enclosing shard_map maps over: inside of it they are gone",
        fix=f"drop {taken[0]} from the spec, or from the shard_map's axis_names",
    )


def devices_failure(sharding: Any, mesh: Any, subject: str, given: str) -> Failure | None:
    """A sharding that was given for a value is on other devices than the mesh has.

    Args:
        sharding: A sharding other than a NamedSharding; anything else passes.
        mesh: The mesh of the call.
        subject: The value, e.g. ``"argument x"``.
        given: Where the sharding was given, e.g. ``"in_shardings"``.
    """
    if not isinstance(sharding, Sharding) or isinstance(sharding, NamedSharding):
        return None
    if not _jax.mesh.is_abstract(mesh) and _jax.dispatch.device_order(sharding) == [
        *mesh.devices.flat
    ]:
        return None
    return Failure(
        what=f"cannot place {subject}: its sharding and the mesh have other devices",
        given=f"{given} = {show_sharding(sharding)}",
        expected=f"{_devices_text(mesh)}, in the order of {show_mesh(mesh)}",
        fix="write a PartitionSpec, or a NamedSharding on this mesh",
        error=MeshError,
    )


# Shardings


def to_sharding(resource: Any, mesh: Any, *, inside: bool = False) -> Any:
    """Returns the JAX sharding of one resource, or JAX's UNSPECIFIED.

    Args:
        resource: ParsedPartitionSpec, ``UNSPECIFIED`` or a raw sharding.
        mesh: The plain mesh.
        inside: Whether the value is inside of a program, where a dimension that vmap added is
            left to the partitioner; at its boundary it is unsharded.
    """
    if resource is UNSPECIFIED:
        return _jax.core.UNSPECIFIED
    if not isinstance(resource, ParsedPartitionSpec):
        return resource
    if resource.has_unconstrained and not inside:
        return _jax.core.UNSPECIFIED  # the jaxpr constrains it inside
    if inside:
        return _named(auto_mesh(mesh), resource.to_partition_spec(batch=UNCONSTRAINED))
    return _named(mesh, resource.to_partition_spec())


def _named(mesh: Any, spec: PartitionSpec) -> NamedSharding:
    parts = list(spec)
    # P('x', None) and P('x') mean the same: one form, so that equal programs compile once.
    while parts and parts[-1] is None:
        parts.pop()
    return NamedSharding(mesh, PartitionSpec(*parts))


def is_equivalent(a: Sharding, b: Sharding, ndim: int) -> bool:
    """Whether two shardings place the same data on the same devices, in the same order."""
    return a is b or a.is_equivalent_to(b, ndim)


def show_sharding(sharding: Any) -> str:
    """Returns a sharding as its spec and mesh where it has them."""
    if isinstance(sharding, NamedSharding):
        return f"{show_spec(sharding.spec)} on {show_mesh(sharding.mesh)}"
    devices = sorted(sharding.device_set, key=lambda d: d.id)
    return f"{type(sharding).__name__} on {show_devices(devices)}"


# Arguments of an eager call


def placed_sharding(arg: Any) -> Sharding | None:
    """Returns the sharding of a committed array or of a struct that has one, else None."""
    held = _jax.core.buffer_of(arg)
    sharding = getattr(held, "sharding", None)
    if sharding is None or not getattr(held, "_committed", True):
        return None
    if held is not arg and sharding.num_devices == 1:
        # `jax.new_ref` commits to a device even what nobody placed there.
        return None
    return sharding


def input_sharding(
    resource: Any, placed: Sharding | None, ndim: int, mesh: Any
) -> tuple[Any, bool]:
    """Decides where an argument has to be, and whether it is there.

    Args:
        resource: What the call says of the input.
        placed: Sharding of the committed argument, or None.
        ndim: Rank of the argument.
        mesh: The mesh of the call.

    Returns:
        The sharding, and whether a committed argument has to move.
    """
    free = isinstance(resource, ParsedPartitionSpec) and resource.has_unconstrained
    if resource is UNSPECIFIED or free:  # what is said of a dimension is said inside
        # What no one placed is the same on all devices: NumPy first and the program's own
        # replicated result next are then one program.
        wanted = _kept(placed, mesh) if placed is not None else _named(mesh, PartitionSpec())
    else:
        wanted = to_sharding(resource, mesh, inside=False)
    abstract = isinstance(wanted, NamedSharding) and _jax.mesh.is_abstract(wanted.mesh)
    moves = placed is not None and not abstract and not is_equivalent(placed, wanted, ndim)
    return wanted, moves


def _kept(placed: Sharding, mesh: Any) -> Sharding:
    """The sharding of a placed argument, on the devices of the mesh in the order of the mesh."""
    if mesh is None or (
        not _jax.mesh.is_abstract(mesh) and placed._device_assignment == tuple(mesh.devices.flat)
    ):
        return placed
    if isinstance(placed, NamedSharding) and dict(placed.mesh.shape) == dict(mesh.shape):
        return _named(mesh, placed.spec)
    return _named(mesh, PartitionSpec())


def device_failure(placed: Sharding | None, mesh: Any, subject: str) -> Failure | None:
    """A committed argument lives on other devices than the mesh has."""
    if placed is None or _jax.mesh.is_abstract(mesh):
        return None
    want = set(mesh.devices.flat)
    if placed.device_set == want:
        return None
    have = sorted(placed.device_set, key=lambda d: d.id)
    fix = "jax.device_put(x, NamedSharding(mesh, spec)), or leave the array uncommitted"
    if is_described(mesh):
        fix = "pass a jax.ShapeDtypeStruct: nothing can be placed on devices that are not there"
    return Failure(
        what=f"cannot take {subject} from other devices",
        given=f"{show_sharding(placed)}",
        expected=f"{show_devices(list(mesh.devices.flat))} of {show_mesh(mesh)}",
        got=show_devices(have),
        fix=fix,
        error=MeshError,
    )


def from_array_failure(arg: Any, mesh: Any, subject: str) -> Failure | None:
    """FROM_ARRAY was given for something that has no sharding, or one of another mesh."""
    placed = placed_sharding(arg)
    if placed is None and isinstance(arg, jax.Array):
        return None  # nobody has placed it: the program does
    if placed is None:
        kind, place = f"a {type(arg).__name__}", "jax.device_put the array first"
        if isinstance(arg, jax.ShapeDtypeStruct):
            kind, place = "a ShapeDtypeStruct without a sharding", "give the struct a sharding"
        elif isinstance(arg, (np.ndarray, np.generic)):
            kind = "a host array"
        return Failure(
            what=f"cannot take the sharding of {subject} from the array",
            given="FROM_ARRAY",
            expected="a jax.Array (or struct) with a sharding",
            got=kind,
            fix=f"write a PartitionSpec, or {place}",
        )
    if not isinstance(placed, NamedSharding) or auto_mesh(placed.mesh) == auto_mesh(mesh):
        return None
    return Failure(
        what=f"cannot take the sharding of {subject} from an array on another mesh",
        given="FROM_ARRAY",
        expected=f"an array on {show_mesh(mesh)}",
        got=f"an array on {show_mesh(placed.mesh)}",
        fix="place it on this mesh, or write a PartitionSpec",
    )


def reshard_failure(
    placed: Sharding, wanted: Any, resource: Any, subject: str, given: str
) -> Failure:
    """An argument is placed otherwise than the call says.

    Args:
        placed: Where the argument is.
        wanted: Where it has to be.
        resource: What the call says of it, which tells how much of `wanted` the user wrote.
        subject: The argument.
        given: Where the spec was given.
    """
    said = f"{given} = {show_sharding(wanted)}"
    if isinstance(resource, ParsedPartitionSpec):
        said = f"{given} = {show_origin(resource)} on {show_mesh(wanted.mesh)}"
    elif resource is UNSPECIFIED:
        said = f"no spec, which means {show_sharding(wanted)}"
    return Failure(
        what=f"has to reshard {subject}",
        given=said,
        expected="the argument to be there already",
        got=show_sharding(placed),
        fix="place it so before the call, or take what it has with FROM_ARRAY",
    )
