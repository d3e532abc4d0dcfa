"""Arguments for other devices than those where they lie: their shardings by the names of axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
import jax.tree_util as jtu

from spmd import _api, _mesh
from spmd._arguments import argument_names, parse_parameters
from spmd._resolve import placed_sharding, show_sharding
from spmd.errors import Failure, ShardingError, explain
from spmd.inspection.compile.program import shape_of


def mesh_of_arguments(arguments: Any) -> Any:
    """The mesh that the first argument with a `NamedSharding` lies on; None without one."""
    placed = (placed_sharding(leaf) for leaf in jax.tree.leaves(arguments))
    return next((one.mesh for one in placed if isinstance(one, NamedSharding)), None)


def carried(
    f: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Any, *, subject: str
) -> tuple[Any, Any]:
    """The arguments of a call for a mesh: what lies elsewhere is split over the axes it is named.

    There it becomes a `jax.ShapeDtypeStruct`. Without a mesh, arguments stay as they are. A
    sharding without names is dropped, and so is one over axes that the mesh lacks where the
    function is of `spmd.pjit`, whose specs are its own. Of any other function nothing but the
    argument says how to split it, so this is an error with the first words `subject`.
    """
    if mesh is None:
        return args, kwargs
    leaves, tree = jtu.tree_flatten((tuple(args), dict(kwargs)))
    lacking = {
        i: missing
        for i, leaf in enumerate(leaves)
        if (missing := _axes(placed_sharding(leaf)) - {*mesh.axis_names})
        and not isinstance(f, _api.PjitFunction)
    }
    if lacking:
        fun: Any = getattr(f, "__wrapped__", f)
        params = parse_parameters(fun, subject, (), (), (), ())
        names = argument_names(params, range(len(args)), tree)
        raise explain(subject, [_no_axes(names[i], leaves[i], lacking[i], mesh) for i in lacking])
    return jtu.tree_unflatten(tree, [_carried(leaf, mesh) for leaf in leaves])


def _carried(leaf: Any, mesh: Any) -> Any:
    sharding: Any = placed_sharding(leaf)
    if sharding is None or sharding.device_set == {*mesh.devices.flat}:
        return leaf
    carries = isinstance(sharding, NamedSharding) and _axes(sharding) <= {*mesh.axis_names}
    return shape_of(leaf, _moved(sharding, mesh) if carries else None)


def shape_on(leaf: Any, mesh: Any, name: str) -> Any:
    """An array as its shape, placed on a mesh as it is placed where it lies; `name` is for errors.

    A NamedSharding goes over by the names of its axes. Any other over several devices stays, and is
    an error where the mesh lacks some of them. One device stands for no other, so what is committed
    to a device that the mesh lacks is placed nowhere. Without a mesh, arrays stay on their devices.
    """
    sharding: Any = placed_sharding(leaf)
    if mesh is None or sharding is None:
        return shape_of(leaf, sharding)
    if isinstance(sharding, NamedSharding):
        if missing := sorted(_axes(sharding) - {*mesh.axis_names}):
            raise explain(name, [_lacks_axes(sharding, mesh, missing)])
        sharding = _moved(sharding, mesh)
    elif not sharding.device_set <= {*mesh.devices.flat}:
        if len(sharding.device_set) > 1:
            raise explain(name, [_nameless(sharding, mesh)])
        sharding = None
    return shape_of(leaf, sharding)


def _moved(sharding: Any, mesh: Any) -> Any:
    own, plain = sharding.mesh, _mesh.plain_mesh(mesh)
    if own == plain or own == plain.abstract_mesh:
        return sharding
    # Programs are other ones where the axes of a mesh are Explicit.
    types = dict(zip(own.axis_names, own.axis_types, strict=True))
    auto = jax.sharding.AxisType.Auto
    plain = plain.update(axis_types=tuple(types.get(axis, auto) for axis in plain.axis_names))
    return NamedSharding(plain, sharding.spec, memory_kind=sharding.memory_kind)


def _lacks_axes(sharding: Any, mesh: Any, missing: Sequence[str]) -> Failure:
    return Failure(
        what="cannot be placed on the mesh by the names of its axes",
        given=show_sharding(sharding),
        expected=f"axes that {_mesh.show_mesh(mesh)} has, for which it is compiled",
        got=f"no axis {', '.join(map(repr, missing))}",
        fix="name these axes in --mesh, or give shapes without shardings",
    )


def _nameless(sharding: Any, mesh: Any) -> Failure:
    return Failure(
        what="cannot be placed on other devices than its own",
        given=show_sharding(sharding),
        expected=f"a NamedSharding, which goes over to {_mesh.show_mesh(mesh)} by names of axes",
        got=type(sharding).__name__,
        fix="jax.device_put(x, NamedSharding(mesh, spec)), or shapes without shardings",
    )


def _axes(sharding: Any) -> set[str]:
    """The axes that split an array, or none where nothing names them."""
    if not isinstance(sharding, NamedSharding):
        return set()
    parts = (part if isinstance(part, tuple) else (part,) for part in sharding.spec)
    return {axis for part in parts for axis in part} & {*sharding.mesh.axis_names}


def _no_axes(name: str, leaf: Any, missing: Iterable[str], mesh: Any) -> Failure:
    own: Any = placed_sharding(leaf)
    sizes = {**dict(mesh.shape), **dict.fromkeys(sorted(missing), 1)}
    return Failure(
        what=f"cannot split argument {name} there as it is here",
        given=f"{own.spec} over {_mesh.show_mesh(own.mesh)}",
        expected=f"axes of {_mesh.show_mesh(mesh)}",
        fix=f"mesh={sizes}, or the sizes that you want with all of these axes",
        error=ShardingError,
    )
