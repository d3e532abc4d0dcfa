"""An assertion on where arrays are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
import jax.tree_util as jtu
import numpy as np

from spmd import _jax
from spmd._mesh import current_mesh, plain_mesh, show_devices
from spmd._resolve import is_equivalent, recovered, show_aval, show_sharding, spec_failure
from spmd._spec import UNCONSTRAINED, ParsedPartitionSpec, broadcast_prefix, show_spec, spec_of
from spmd.errors import ArgumentError, Failure, SpecTypeError, explain

# pytest shows the user's line and the message, and no frame of this file.
__tracebackhide__ = True

_SUBJECT = "assert_sharding"


def assert_sharding(x: Any, expected: Any, *, mesh: Any = None) -> None:
    """Asserts that arrays are sharded as expected.

    Shardings are compared by what they mean, not by how they are written: ``P("data")`` and
    ``P("data", None)`` are the same for a matrix, and axes of size 1 do not count. A dimension
    that is ``P.UNCONSTRAINED`` in `expected` may be split in any way.

    Args:
        x: an array, a `jax.ShapeDtypeStruct` with a sharding, or a pytree of them.
        expected: a PartitionSpec, None for a replicated array, a `jax.sharding.Sharding`, or a
            pytree of them of which each leaf stands for all leaves of `x` below it, as in
            ``in_axis_resources``.
        mesh: what the PartitionSpecs are on; by default the mesh that each array is on itself, or
            for an array on none the one that is active here.

    Raises:
        AssertionError: arrays are sharded otherwise; all of them are told, by path.
        TypeError: a leaf of `expected` is no spec, `x` has no leaves, or it is traced by an
            enclosing `jit`.
        ValueError: `expected` is no pytree prefix of `x`.

    Example:
        assert_sharding(params, {"embed": P("model"), "layers": P(None, "model")})
    """
    paths, treedef = jtu.tree_flatten_with_path(x)
    leaves = [("x" + jtu.keystr(path), value) for path, value in paths]
    if not leaves:
        failure = Failure(
            what="has nothing to look at",
            expected="an array, or a pytree with one or more",
            got=f"{x!r}"[:100],
            error=ArgumentError,
        )
        raise explain(_SUBJECT, [failure])
    _refuse_tracers(leaves)
    wanted = _spread(expected, treedef)
    mesh = _read_mesh(mesh)
    failures = [
        failure
        for (name, value), (spec_name, spec) in zip(leaves, wanted, strict=True)
        if (failure := _check(value, name, spec, spec_name, mesh))
    ]
    if failures:
        raise AssertionError(str(explain(_SUBJECT, failures)))


# Arguments


def _refuse_tracers(leaves: Sequence[tuple[str, Any]]) -> None:
    if traced := [name for name, value in leaves if isinstance(value, _jax.core.Tracer)]:
        failure = Failure(
            what=f"cannot see where {traced[0]} is: it is traced, and has no place yet",
            expected="arrays, outside of jit, grad, vmap and shard_map",
            got=f"{len(traced)} tracer{'s' * (len(traced) != 1)}",
            fix="inside of a function, demand the sharding: x = with_sharding_constraint(x, spec);"
            "\nor assert on the function's result, outside of it",
            error=ArgumentError,
        )
        raise explain(_SUBJECT, [failure])


def _read_mesh(mesh: Any) -> Any:
    mesh = plain_mesh(mesh)
    if mesh is None or isinstance(mesh, (AbstractMesh, Mesh)):
        return mesh
    failure = Failure(
        what="cannot read mesh", expected="a Mesh", got=f"{mesh!r}"[:100], error=ArgumentError
    )
    raise explain(_SUBJECT, [failure])


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, Sharding))


def _spread(expected: Any, treedef: Any) -> list[tuple[str, Any]]:
    """One expected spec per leaf of the values, with the name that its user gave it."""
    paths, prefix = jtu.tree_flatten_with_path(expected, is_leaf=_is_leaf)
    named = [("expected" + jtu.keystr(path), spec) for path, spec in paths]
    failures = [_no_spec(name, spec) for name, spec in named if not _is_leaf(spec)]
    if failures:
        raise explain(_SUBJECT, failures)
    indices = jtu.tree_unflatten(prefix, range(len(named)))
    spread = broadcast_prefix(indices, treedef, "expected", "x")
    if isinstance(spread, Failure):
        raise explain(_SUBJECT, [spread])
    return [named[i] for i in spread]


def _no_spec(name: str, spec: Any) -> Failure:
    return Failure(
        what=f"cannot read {name}",
        given=f"{spec!r}"[:100],
        expected="a PartitionSpec, None for replicated, or a Sharding",
        fix=f"write P({spec!r})" if isinstance(spec, str) else "wrap the mesh axes: P('data')",
        error=SpecTypeError,
    )


# Comparison


def _check(value: Any, name: str, spec: Any, spec_name: str, mesh: Any) -> Failure | None:
    """Why one array is not sharded as one leaf of `expected` says; None where it is."""
    got = getattr(value, "sharding", None)
    if not isinstance(got, Sharding):
        return _nowhere(value, name, spec)
    if not isinstance(spec, Sharding):
        mesh = _mesh_for(got, mesh)
        if mesh is None:
            return Failure(
                what=f"needs a mesh to read {_show(spec)} for {name}, and there is none here",
                got=f"{name} {_show_place(got)}",
                fix="assert_sharding(x, spec, mesh=mesh), or place x with a NamedSharding",
            )
    elif isinstance(spec, NamedSharding):
        mesh = spec.mesh
    if isinstance(spec, (NamedSharding, PartitionSpec)):
        axes = spec.spec if isinstance(spec, NamedSharding) else spec
        parsed = ParsedPartitionSpec.from_user_input(axes, spec_name, allow_unconstrained=True)
        if failure := spec_failure(parsed, value, mesh, name, spec_name, boundary=False):
            return failure
    wanted = spec if isinstance(spec, Sharding) else _on(mesh, spec, got)
    return None if _agrees(got, wanted, value.ndim) else _elsewhere(value, name, got, wanted)


def _mesh_for(got: Sharding, mesh: Any) -> Any:
    """The mesh that a PartitionSpec is read on."""
    if not isinstance(got, NamedSharding):
        return plain_mesh(current_mesh()) if mesh is None else mesh
    # A struct made under an abstract mesh has no devices to compare.
    kinds = {isinstance(m, Mesh) for m in (got.mesh, mesh)}
    if mesh is None or (len(kinds) == 2 and list(got.mesh.shape.items()) == [*mesh.shape.items()]):
        return got.mesh
    return mesh


def _on(mesh: Any, spec: PartitionSpec | None, got: Sharding) -> NamedSharding:
    # A spec says nothing of memory kinds; hardware that lacks one differs in its devices too.
    spec = PartitionSpec() if spec is None else spec
    try:
        return NamedSharding(mesh, spec, memory_kind=got.memory_kind)
    except ValueError:
        return NamedSharding(mesh, spec)


def _agrees(got: Sharding, wanted: Sharding, ndim: int) -> bool:
    if not isinstance(wanted, NamedSharding) or UNCONSTRAINED not in wanted.spec:
        return is_equivalent(got, wanted, ndim)
    found = _parts(got, wanted.mesh, ndim)
    if found is None or got.memory_kind != wanted.memory_kind:
        return False
    demanded = _parts(wanted, wanted.mesh, ndim) or []
    return all(d is UNCONSTRAINED or d == f for d, f in zip(demanded, found, strict=True))


def _parts(sharding: Sharding, mesh: Any, ndim: int) -> list[Any] | None:
    """Mesh axes per dimension, without axes of size 1; None where no spec on `mesh` says it."""
    spec = _spec_on(sharding, mesh, ndim)
    if spec is None:
        return None
    parts = ParsedPartitionSpec.from_user_input(spec, "spec", allow_unconstrained=True).partitions
    trimmed = [p if p is UNCONSTRAINED else tuple(a for a in p if mesh.shape[a] > 1) for p in parts]
    return trimmed + [()] * (ndim - len(trimmed))


def _spec_on(sharding: Sharding, mesh: Any, ndim: int) -> PartitionSpec | None:
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding.spec
    found = recovered(sharding, ndim, mesh) if isinstance(mesh, Mesh) else None
    spec = None if found is sharding else spec_of(found)
    return None if spec is None else spec.to_partition_spec()


# Failures


def _nowhere(value: Any, name: str, spec: Any) -> Failure:
    kind, fix = f"a {type(value).__name__}", "give a jax.Array"
    if isinstance(value, jax.ShapeDtypeStruct):
        kind, fix = "a ShapeDtypeStruct without a sharding", "jax.ShapeDtypeStruct(..., sharding=)"
    elif isinstance(value, (np.ndarray, np.generic)):
        kind, fix = "a NumPy array, which is on the host", "jax.device_put(x, sharding)"
    return Failure(what=f"finds {name} without a sharding", expected=_show(spec), got=kind, fix=fix)


def _elsewhere(value: Any, name: str, got: Sharding, wanted: Sharding) -> Failure:
    expected, is_named = _show(wanted), isinstance(got, NamedSharding)
    is_alone = not is_named and got.num_devices == 1 < wanted.num_devices
    if isinstance(wanted, NamedSharding) and is_alone:
        committed = "" if getattr(value, "committed", True) else ", where nobody has placed it"
        return Failure(
            what=f"finds {name} on one device only",
            expected=expected + _piece(wanted, value),
            got=f"{show_aval(value)} {_show_place(got)}{committed}",
            fix="jax.device_put(x, NamedSharding(mesh, spec)), or return it from a pjit function",
        )
    mesh = wanted.mesh if isinstance(wanted, NamedSharding) else None
    # As a NamedSharding on the mesh, where there is one.
    spec = None if is_named else _spec_on(got, mesh, value.ndim)
    found = _show(got if mesh is None or spec is None else NamedSharding(mesh, spec))
    if found == expected:  # the difference is in what a spec and a mesh's sizes do not tell
        expected, found = (
            f"{t}, {_show_devices(s)}" for t, s in ((expected, wanted), (found, got))
        )
    return Failure(
        what=f"finds {name} sharded otherwise",
        expected=expected + _piece(wanted, value),
        got=found + _piece(got, value),
    )


def _show(spec: Any) -> str:
    if isinstance(spec, Sharding):
        return show_sharding(spec)
    return show_spec(PartitionSpec() if spec is None else spec)


def _show_place(got: Sharding) -> str:
    return f"on {show_devices(sorted(got.device_set, key=lambda d: d.id))}"


def _show_devices(sharding: Sharding) -> str:
    mesh = getattr(sharding, "mesh", None)
    if mesh is not None and not isinstance(mesh, Mesh):
        return "without devices"
    memory = f", memory {sharding.memory_kind}" if sharding.memory_kind else ""
    return f"{show_devices(list(sharding._device_assignment))}{memory}"


def _piece(sharding: Sharding, value: Any) -> str:
    """What each device holds, where that is the same for all."""
    if isinstance(sharding, NamedSharding) and UNCONSTRAINED in sharding.spec:
        return ""
    try:
        shape = sharding.shard_shape(value.shape)
    except ValueError:
        return ""
    return f"; {show_aval(jax.ShapeDtypeStruct(shape, value.dtype))} per device"
