"""Local and global arrays: what one process holds, and what all processes hold together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.tree_util as jtu

from spmd import _jax
from spmd._local import global_to_local, local_to_global
from spmd._mesh import check_parts, current_mesh, plain_mesh
from spmd._resolve import no_mesh, spec_failure, to_sharding
from spmd._spec import broadcast_prefix, parse_specs
from spmd._trace import no_array
from spmd.errors import Failure, explain


def host_local_to_global(tree: Any, mesh: Any, specs: Any) -> Any:
    """Joins what each process holds into global arrays.

    Every process calls it with parts of the same shapes, along the mesh axes of `specs`: if the
    mesh axis ``data`` runs over all processes, ``P("data")`` stacks their parts along dimension 0.

    Args:
        tree: A pytree of this process's parts: host arrays, numbers, or arrays on its devices.
        mesh: The mesh of all processes; None: the active one.
        specs: PartitionSpecs of the global arrays, a pytree prefix of `tree`.

    Returns:
        A pytree of global ``jax.Array``; with one process the parts are the whole.

    Raises:
        RuntimeError: There is no mesh, or the devices of this process form no box of it.
        TypeError: A leaf is no array, or no spec.
        ValueError: A spec does not fit its part; all that do not are named.
    """
    return _converted("host_local_to_global", tree, mesh, specs, to_global=True)


def global_to_host_local(tree: Any, mesh: Any, specs: Any) -> Any:
    """Takes this process's parts out of global arrays: the inverse of `host_local_to_global`.

    Args:
        tree: A pytree of global arrays.
        mesh: The mesh of all processes; None: the active one.
        specs: How the parts are cut, a pytree prefix of `tree`; an array that is placed otherwise
            is moved first.

    Returns:
        A pytree of ``jax.Array`` on the devices of this process.

    Raises:
        RuntimeError: There is no mesh, or the devices of this process form no box of it.
        TypeError: A leaf is no array, or no spec.
        ValueError: A spec does not fit its array; all that do not are named.
    """
    return _converted("global_to_host_local", tree, mesh, specs, to_global=False)


def _converted(subject: str, tree: Any, mesh: Any, specs: Any, *, to_global: bool) -> Any:
    mesh = plain_mesh(current_mesh() if mesh is None else mesh)
    if mesh is None:
        raise explain(subject, [no_mesh()])
    check_parts(mesh, subject)
    names, values, treedef = flatten(subject, tree)
    parsed = parse_specs(specs, "specs", subject, role="input")
    found = broadcast_prefix(parsed.indices(), treedef, "specs", "tree")
    if isinstance(found, Failure):
        raise explain(subject, [found])
    leaves = [parsed.leaves[i] for i in found]
    rows = zip(leaves, values, names, [parsed.names[i] for i in found], strict=True)
    cut = mesh.local_mesh if to_global else mesh
    failures = [
        spec_failure(leaf, _jax.core.abstractify(v), cut, n, given, boundary=True)
        for leaf, v, n, given in rows
    ]
    if failures := [f for f in failures if f]:
        raise explain(subject, failures)
    pairs = zip(values, leaves, strict=True)
    if to_global:
        return treedef.unflatten(local_to_global(v, spec, mesh) for v, spec in pairs)
    placed = (jax.device_put(v, to_sharding(spec, mesh)) for v, spec in pairs)
    return treedef.unflatten(global_to_local(v, mesh) for v in placed)


def flatten(subject: str, tree: Any) -> tuple[list[str], list[Any], Any]:
    """Names and values of the leaves of a tree, which all are arrays, and its structure."""
    paths, treedef = jtu.tree_flatten_with_path(tree)
    names = [f"tree{jtu.keystr(path)}" for path, _ in paths]
    values = [value for _, value in paths]
    rows = [(no_array(v, n), n) for v, n in zip(values, names, strict=True)]
    if bad := [replace(f, what=f"cannot take {n}: it is no array") for f, n in rows if f]:
        raise explain(subject, bad)
    return names, values, treedef
