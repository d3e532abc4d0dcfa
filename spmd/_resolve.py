"""Resolve: parsed specs, a mesh and avals become shardings; every check that a user can trip.

Functions here return failures as data, one per bad leaf; the caller raises them all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import functools
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding
import numpy as np

from spmd import _jax
from spmd._mesh import auto_mesh, is_described, plain_mesh, show_devices, show_mesh
from spmd._recover import parse_op_sharding, parsed_spec
from spmd._spec import (
    UNCONSTRAINED,
    UNSPECIFIED,
    ParsedPartitionSpec,
    SpecSync,
    show_origin,
    show_spec,
    spec_of,
)
from spmd.errors import Failure, MeshError, RecoveryError, did_you_mean, explain, refuse

# Leaves


def canonical_leaf(leaf: Any) -> Any:
    """Turns a NamedSharding that a user gave into its spec; what no spec says stays as it is."""
    if isinstance(leaf, NamedSharding) and leaf.memory_kind in (None, _default_memory(leaf)):
        return ParsedPartitionSpec.from_user_input(leaf.spec, "spec", allow_unconstrained=True)
    return leaf


def _default_memory(sharding: NamedSharding) -> str | None:
    if isinstance(sharding.mesh, AbstractMesh):
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
    given = [f"{name} on {show_mesh(m)}, {_devices_text(m)}" for m, name in found.items()]
    failure = Failure(
        what="got shardings on different meshes",
        given="\n".join(given),
        expected="one mesh for all of them",
        fix="build all NamedShardings from the same mesh",
        error=MeshError,
    )
    return next(iter(found)), [failure]


def _devices_text(mesh: Any) -> str:
    return "no devices" if isinstance(mesh, AbstractMesh) else show_devices(list(mesh.devices.flat))


def no_mesh(*, constraint: bool = False) -> Failure:
    """The failure of a call, or of a `with_sharding_constraint`, that needs a mesh and has none."""
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

show_aval = _jax.core.short_aval


def spec_failure(
    spec: Any, aval: Any, mesh: Any, subject: str, given: str, *, boundary: bool
) -> Failure | None:
    """Checks a spec or NamedSharding against a mesh and the aval it is for; anything else passes.

    `subject` is the value, as ``"argument batch['x']"``, and `given` where the spec was given. At a
    boundary dimensions must divide evenly.
    """
    if (spec := _spec_of(spec)) is None:
        return None
    unknown = [a for a in spec.axes if a not in mesh.shape]
    uneven = _uneven(spec, aval, mesh) if boundary and not unknown else []
    too_long = len(spec.partitions) > aval.ndim
    if not (unknown or too_long or uneven):
        return None
    shown = f"{given} = {show_origin(spec)} on {show_mesh(mesh)}"
    if unknown:
        return _unknown_axis(unknown, mesh, subject, shown)
    if too_long:
        return _too_long(spec, aval, subject, shown)
    return _indivisible(spec, aval, uneven, subject, shown)


def _spec_of(resource: Any) -> ParsedPartitionSpec | None:
    return resource if isinstance(resource, ParsedPartitionSpec) else spec_of(resource)


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


def _uneven(spec: Any, aval: Any, mesh: Any) -> list[tuple[int, int, int]]:
    """Number, size and factor of each dimension that does not divide evenly."""
    rows = enumerate(zip(aval.shape, spec.partitions, strict=False))
    found = [(dim, size, axes_size(part, mesh)) for dim, (size, part) in rows]
    # Of a symbolic size of `jax.export` only the caller of the export knows whether it divides.
    return [row for row in found if isinstance(row[1], int) and row[1] % row[2]]


def _indivisible(
    spec: Any, aval: Any, bad: Sequence[tuple[int, int, int]], subject: str, given: str
) -> Failure:
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


def _manual_failure(spec: Any, manual: frozenset[Any], subject: str, given: str) -> Failure | None:
    """An enclosing `shard_map` maps over an axis that the spec uses."""
    if not manual or (spec := _spec_of(spec)) is None:
        return None
    taken = sorted(repr(a) for a in manual & set(spec.axes))
    if not taken:
        return None
    return Failure(
        what=f"cannot split {subject} over mesh axis {', '.join(taken)}",
        given=f"{given} = {show_origin(spec)}{_jax.core.used_at()}",
        expected="axes that no enclosing shard_map maps over: inside of it they are gone",
        fix=f"drop {taken[0]} from the spec, or from the shard_map's axis_names",
    )


def _devices_failure(sharding: Any, mesh: Any, subject: str, given: str) -> Failure | None:
    """A sharding, no NamedSharding, was given for a value and has other devices than the mesh."""
    if not isinstance(sharding, Sharding) or isinstance(sharding, NamedSharding):
        return None
    if not isinstance(mesh, AbstractMesh) and _jax.dispatch.device_order(sharding) == [
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


def resolve_leaves(
    rows: Iterable[tuple[Any, Any, str, str, Any]],
    mesh: Any,
    manual: frozenset[Any],
    *,
    boundary: bool = True,
) -> list[tuple[Any, Failure | None]]:
    """Returns what each leaf of a user's specs says of a value, and what is wrong with it.

    A row is a leaf, the aval of its value, what the value is called, where the leaf was given, and
    the part of `mesh` that the value is for. `manual` axes are gone: an enclosing `shard_map` maps
    over them. At a boundary dimensions must divide evenly. What comes back for a leaf is a spec, a
    marker or a NamedSharding.
    """

    def resolved(
        leaf: Any, aval: Any, subject: str, given: str, on: Any
    ) -> tuple[Any, Failure | None]:
        # What shard_map took away explains a shape that does not fit: it comes first.
        failure = _devices_failure(leaf, mesh, subject, given)
        if failure := failure or _manual_failure(leaf, manual, subject, given):
            return leaf, failure
        leaf = canonical_leaf(leaf)
        if isinstance(leaf, Sharding) and not isinstance(leaf, NamedSharding):
            leaf = recovered(leaf, aval.ndim, mesh)
            if isinstance(leaf, Sharding) and not isinstance(leaf, NamedSharding):
                return leaf, _unsaid_failure(leaf, mesh, subject, given)
        return leaf, spec_failure(leaf, aval, on, subject, given, boundary=boundary)

    return [resolved(*row) for row in rows]


def _unsaid_failure(sharding: Any, mesh: Any, subject: str, given: str) -> Failure:
    # Without a spec it would be lost where a transformation adds a dimension.
    return Failure(
        what=f"cannot split {subject}: no spec on this mesh says the sharding",
        given=f"{given} = {sharding}"[:100],
        expected=f"a sharding that splits dimensions over axes of {show_mesh(mesh)}",
        fix="enter the mesh whose axes it splits over, or write a NamedSharding",
    )


def resource_of(value: Any, mesh: Any) -> Any:
    """Returns what a call says of a value that is already on the devices of its mesh.

    That is the spec of its sharding; the sharding itself where no spec says it; UNSPECIFIED where
    it is not known, in an outer trace, or where nobody has chosen one.
    """
    placed = None if isinstance(value, _jax.core.Tracer) else placed_sharding(value)
    return UNSPECIFIED if placed is None else recovered(placed, value.ndim, mesh)


@functools.lru_cache(maxsize=4096)
def recovered(sharding: Any, ndim: int, mesh: Any) -> Any:
    if _jax.dispatch.device_order(sharding) != [*mesh.devices.flat]:
        return UNSPECIFIED
    try:
        spec: Any = parse_op_sharding(_jax.dispatch.op_sharding(sharding, ndim), mesh)
    except RecoveryError:
        return sharding
    # An OpSharding says nothing of memory: what lies elsewhere than usual keeps its own.
    named = NamedSharding(mesh, spec.to_partition_spec(), memory_kind=sharding.memory_kind)
    return spec if canonical_leaf(named) is not named else named


# Shardings


def get_aval_sharding_proto(aval: Any, spec: ParsedPartitionSpec | PartitionSpec, mesh: Any) -> Any:
    """Returns the OpSharding proto of a value that is split by a spec over a mesh.

    Inverse of :func:`parse_op_sharding`, up to axes of size 1. A dimension that is left to the
    partitioner counts as unsplit: an OpSharding alone cannot say otherwise.

    Args:
        aval: What has a `shape` and a `dtype`. Only the rank counts: dimensions may be uneven.
        spec: What a user wrote, or its parsed form.
        mesh: A mesh that has the axes of `spec`; an ``AbstractMesh`` will do.

    Returns:
        An ``OpSharding`` proto, with an iota device list where XLA can write one.

    Raises:
        ValueError: `spec` is longer than the rank, or names an axis twice or one that is unknown.
        TypeError: `spec` is no spec.
    """
    parsed = parsed_spec(spec)
    failure = spec_failure(parsed, aval, mesh, "the value", "spec", boundary=False)
    refuse("get_aval_sharding_proto", [failure])
    sharding = NamedSharding(plain_mesh(mesh), parsed.to_partition_spec())
    return sharding._to_xla_hlo_sharding(len(aval.shape)).to_proto()


def to_sharding(resource: Any, mesh: Any, *, inside: bool = False) -> Any:
    """Returns the JAX sharding of one resource, or JAX's UNSPECIFIED.

    Inside of a program a dimension that vmap added is left to the partitioner; at its boundary it
    is unsharded.
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


def to_shardings(resources: Iterable[Any], mesh: Any, *, inside: bool = False) -> tuple[Any, ...]:
    """Returns :func:`to_sharding` of each resource."""
    return tuple([to_sharding(r, mesh, inside=inside) for r in resources])


def trimmed(spec: PartitionSpec) -> PartitionSpec:
    """Returns the shortest spec that means the same: P('x') for P('x', None)."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def _named(mesh: Any, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, trimmed(spec))  # one form, so that equal programs compile once


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

placed_sharding = _jax.dispatch.placed_sharding


def place(
    jaxpr: Any, call: Any, placed: Sequence[Any]
) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """Decides where the inputs of an eager call have to be, of which some are `placed`.

    Returns the mesh, the sharding of each input, and the indices of those that have to move.
    """
    mesh = call.mesh if call.mesh is not None else mesh_of(placed)
    if mesh is None:
        # Nothing here is placed anywhere, as a cotangent of ones: where JAX puts such values.
        mesh = jax.sharding.Mesh(np.array([_jax.mesh.default_device()]), ("device",))
    names = call.arg_names
    # The devices of a pmap are chosen by size, not by its user: there, arrays of others are moved.
    failures = [
        device_failure(p, mesh, f"argument {n}")
        for p, n in zip(placed, names, strict=True)
        if call.kind != "pmap"
    ]
    failures += _batch_failures(jaxpr, call, mesh)
    if failures := [f for f in failures if f]:
        raise explain(call.subject, failures)
    found = [
        input_sharding(r, p, a.ndim, mesh)
        for r, p, a in zip(call.in_axis_resources, placed, jaxpr.in_avals, strict=True)
    ]
    return mesh, tuple(s for s, _ in found), tuple(i for i, (_, m) in enumerate(found) if m)


def _batch_failures(jaxpr: Any, call: Any, mesh: Any) -> list[Failure | None]:
    """Checks the specs that vmap changed; all others were checked against the user's values."""
    outs = [f"result {i}" for i in range(len(jaxpr.out_avals))]
    rows = zip(
        (*call.in_axis_resources, *call.out_axis_resources),
        (*jaxpr.in_avals, *jaxpr.out_avals),
        (*(f"argument {n}" for n in call.arg_names), *outs),
        (*call.given, *outs),
        strict=True,
    )
    return [
        spec_failure(spec, aval, mesh, subject, given, boundary=True)
        for spec, aval, subject, given in rows
        if isinstance(spec, ParsedPartitionSpec) and spec.sync == SpecSync.OUT_OF_SYNC
    ]


def mesh_of(placed: Sequence[Any]) -> Any:
    """Returns the mesh that committed arguments are on, or None where none is committed.

    Arrays that know devices and no mesh get one with a single axis over those devices.
    """
    known = [s for s in placed if s is not None]
    named = [s.mesh for s in known if isinstance(s, NamedSharding)]
    if named or not known:
        return named[0] if named else None
    return jax.sharding.Mesh(np.array(known[0]._device_assignment), ("device",))


def input_sharding(
    resource: Any, placed: Sharding | None, ndim: int, mesh: Any
) -> tuple[Any, bool]:
    """Decides where an argument has to be, and whether it is committed elsewhere."""
    free = isinstance(resource, ParsedPartitionSpec) and resource.has_unconstrained
    if resource is UNSPECIFIED or free:  # what is said of a dimension is said inside
        # What no one placed is the same on all devices: NumPy first and the program's own
        # replicated result next are then one program.
        wanted = _kept(placed, mesh) if placed is not None else _named(mesh, PartitionSpec())
    else:
        wanted = to_sharding(resource, mesh, inside=False)
    abstract = isinstance(wanted, NamedSharding) and isinstance(wanted.mesh, AbstractMesh)
    moves = placed is not None and not abstract and not is_equivalent(placed, wanted, ndim)
    return wanted, moves


def _kept(placed: Sharding, mesh: Any) -> Sharding:
    """The sharding of a placed argument, on the devices of the mesh in the order of the mesh."""
    if mesh is None or (
        not isinstance(mesh, AbstractMesh) and placed._device_assignment == tuple(mesh.devices.flat)
    ):
        return placed
    if isinstance(placed, NamedSharding) and dict(placed.mesh.shape) == dict(mesh.shape):
        return _named(mesh, placed.spec)
    return _named(mesh, PartitionSpec())


def device_failure(placed: Sharding | None, mesh: Any, subject: str) -> Failure | None:
    """A committed argument lives on other devices than the mesh has."""
    if placed is None or isinstance(mesh, AbstractMesh):
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

    The resource tells how much of `wanted` the user wrote.
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
