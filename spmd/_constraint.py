"""The primitive `sharding_constraint_p`, all its rules, and `with_sharding_constraint`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding
import jax.tree_util as jtu

from spmd import _jax
from spmd._call import batch_resource
from spmd._dispatch import gone_failure
from spmd._mesh import (
    auto_mesh,
    current_mesh,
    described_failure,
    enclosing_pjit,
    show_mesh,
)
from spmd._pjit import (
    Text,
    check_spmd_axes,
    nested_mesh_failure,
    other_manual_mesh,
    spec_text,
    spmd_axes,
)
from spmd._resolve import (
    is_equivalent,
    mesh_of,
    mesh_of_leaves,
    no_mesh,
    placed_sharding,
    resolve_leaves,
    spec_failure,
    to_sharding,
)
from spmd._spec import (
    UNCONSTRAINED,
    ParsedPartitionSpec,
    SpecSync,
    parse_specs,
)
from spmd.errors import ArgumentError, Failure, explain, refuse, show_value

_SUBJECT = "with_sharding_constraint"


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Constrains how values are split over the mesh.

    Inside of a traced function the partitioner has to place the value so; dimensions need not
    divide evenly there (it pads). On concrete arrays it places them.

    Args:
        x: Pytree of arrays.
        axis_resources: Pytree prefix of specs: a PartitionSpec, in which ``P.UNCONSTRAINED``
            leaves a dimension to the partitioner, None (replicated) or a sharding.

    Returns:
        `x` with the constraint.

    Raises:
        RuntimeError: There is no mesh.
        ValueError: A spec does not fit its value; eagerly, a dimension does not divide evenly.
        TypeError: A leaf of `axis_resources` is no spec, or one of `x` no array.
    """
    specs = parse_specs(axis_resources, "axis_resources", _SUBJECT, role="constraint")
    paths, treedef = jtu.tree_flatten_with_path(x)
    found = specs.broadcast(treedef, "x")
    if isinstance(found, Failure):
        raise explain(_SUBJECT, [found])
    mesh, failures = mesh_of_leaves(specs.leaves, specs.names)
    if mesh is None and (mesh := current_mesh()) is None:
        mesh = mesh_of([x for x in specs.leaves if isinstance(x, Sharding)])
    if mesh is None:
        failures = [no_mesh(constraint=True)]
    refuse(_SUBJECT, failures)
    mesh = auto_mesh(mesh)
    resolved = [
        _resolve(value, specs.leaves[i], mesh, "x" + jtu.keystr(path), specs.names[i])
        for (path, value), i in zip(paths, found, strict=True)
    ]
    refuse(_SUBJECT, [failure for _, failure in resolved])
    rows = zip(paths, resolved, strict=True)
    out = [_constrain(value, resource, mesh) for (_, value), (resource, _) in rows]
    return jtu.tree_unflatten(treedef, out)


def _constrain(value: Any, resource: Any, mesh: Any) -> Any:
    typed = isinstance(value, _jax.core.Tracer) and _jax.mesh.has_explicit_type(value)
    if typed and isinstance(resource, ParsedPartitionSpec):
        # A type that says something else would win over the constraint at the next operation.
        value = _jax.mesh.retyped(value, resource.to_partition_spec())
    return sharding_constraint_p.bind(value, axis_resources=resource, mesh=mesh)


def _resolve(value: Any, leaf: Any, mesh: Any, name: str, given: str) -> tuple[Any, Failure | None]:
    """What a leaf of the specs says of a value, and what is wrong with it."""
    if (aval := _jax.core.aval_of(value)) is None:
        return leaf, Failure(
            what=f"cannot constrain {name}: it is no array",
            got=show_value(value),
            expected="arrays and numbers",
            error=ArgumentError,
        )
    concrete = not isinstance(value, _jax.core.Tracer)
    if concrete and getattr(value, "is_deleted", bool)():
        return leaf, gone_failure(name)
    row = (leaf, aval, f"argument {name}", given, mesh)
    eager = concrete and _jax.core.trace_state_clean()
    [found] = resolve_leaves([row], mesh, _jax.mesh.manual_axes(), boundary=eager)
    return found


# Parameters
#
# axis_resources: ParsedPartitionSpec, or a raw sharding that no spec can say
# mesh:           the plain mesh

# Primitive

sharding_constraint_p = _jax.core.Primitive("sharding_constraint")

# Impl


def _constraint_impl(x: Any, *, axis_resources: Any, mesh: Any) -> Any:
    # Under eager grad or vmap the user's call saw a tracer.
    aval, where = _jax.core.abstractify(x), ("argument x", "axis_resources")
    refuse(_SUBJECT, [spec_failure(axis_resources, aval, mesh, *where, boundary=True)])
    refuse(_SUBJECT, [described_failure(mesh)])
    wanted, placed = _eager_sharding(x, axis_resources, mesh), placed_sharding(x)
    in_place = placed is None or is_equivalent(placed, wanted, x.ndim)
    if in_place or not isinstance(axis_resources, ParsedPartitionSpec):
        return jax.device_put(x, wanted)
    return _jax.dispatch.reshard([x], [wanted])[0]


def _eager_sharding(x: Any, resource: Any, mesh: Any) -> Any:
    """The sharding to place an array in; an unconstrained dimension stays as it is."""
    if not isinstance(resource, ParsedPartitionSpec) or not resource.has_unconstrained:
        return to_sharding(resource, mesh)
    have = getattr(x, "sharding", None)
    kept: tuple[Any, ...] = ()
    if isinstance(have, NamedSharding) and auto_mesh(have.mesh) == mesh:
        kept = ParsedPartitionSpec.from_user_input(have.spec, "spec").partitions
    kept += ((),) * (len(resource) - len(kept))
    parts = [
        tuple(a for a in kept[i] if a not in resource.axes) if part is UNCONSTRAINED else part
        for i, part in enumerate(resource)
    ]
    return to_sharding(ParsedPartitionSpec(None, parts, SpecSync.OUT_OF_SYNC), mesh)


sharding_constraint_p.def_impl(_constraint_impl)

# Abstract evaluation


def _constraint_abstract_eval(x: Any, *, axis_resources: Any, mesh: Any) -> Any:
    del axis_resources
    outer = enclosing_pjit()
    if outer is not None and outer[0] != mesh:
        raise explain(_SUBJECT, [nested_mesh_failure(mesh, outer)])
    refuse(_SUBJECT, [other_manual_mesh(mesh)])
    return x


sharding_constraint_p.def_abstract_eval(_constraint_abstract_eval)

# Lowering


def _constraint_lower(ctx: Any, x: Any, *, axis_resources: Any, mesh: Any) -> Sequence[Any]:
    sharding = to_sharding(axis_resources, mesh, inside=True)
    value = _jax.lowering.wrap_with_sharding(ctx, x, ctx.avals_in[0], ctx.avals_out[0], sharding)
    return _jax.lowering.free_in_branch([value])


# Not cacheable: what is emitted depends on whether a branch of `cond` is around it.
_jax.lowering.register_lowering(sharding_constraint_p, _constraint_lower, cacheable=False)


def _constraint_shardings(eqn: Any) -> list[Any]:
    resource, mesh = eqn.params["axis_resources"], eqn.params["mesh"]
    return [to_sharding(resource, mesh, inside=True)]


_jax.lowering.declare_shardings(sharding_constraint_p, _constraint_shardings)

# Batching


def _constraint_batch(
    axis_data: Any, vals: Any, dims: Any, *, axis_resources: Any, mesh: Any
) -> Any:
    (x,), (dim,) = vals, dims
    axes = spmd_axes(axis_data)
    check_spmd_axes(axes, mesh, [axis_resources], [dim], _SUBJECT)
    batched = batch_resource(axis_resources, dim, axes)
    if not isinstance(batched, ParsedPartitionSpec):
        return x, dim  # a raw sharding has no meaning at another rank
    return sharding_constraint_p.bind(x, axis_resources=batched, mesh=mesh), dim


_jax.transform.fancy_batchers[sharding_constraint_p] = _constraint_batch

# JVP, Transpose


def _constraint_transpose(ct: Any, _: Any, **params: Any) -> tuple[Any]:
    return (sharding_constraint_p.bind(ct, **params),)


_jax.transform.deflinear(sharding_constraint_p, _constraint_transpose)

# Printing


def _constraint_pp(eqn: Any, context: Any, settings: Any) -> Any:
    resource, mesh = eqn.params["axis_resources"], eqn.params["mesh"]
    params = {
        "spec": spec_text(resource),
        "mesh": Text(show_mesh(mesh).removeprefix("mesh ")),
    }
    return _jax.core.pp_equation(eqn, context, settings, params)


_jax.core.pp_eqn_rules[sharding_constraint_p] = _constraint_pp
