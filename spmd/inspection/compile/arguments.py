"""How the arguments of a compiled program lie on its mesh, as records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import math
import re
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmd import _jax, _resolve, stages
from spmd._recover import parse_op_sharding
from spmd._spec import show_spec
from spmd.errors import RecoveryError
from spmd.inspection.records.arrays import Argument, Split

_NO_NAME = re.compile(r"(Arg_\d+\.\d+)?")


def arguments_of(compiled: Any, mesh: Any, names: Sequence[str]) -> tuple[Argument, ...]:
    """The arrays that a program takes, on its mesh, which is None where it has none.

    They have the `names` of the program's parameters where there are as many as arrays.
    """
    return tuple(
        argument(name, aval, sharding, mesh) for name, aval, sharding in _leaves(compiled, names)
    )


def _leaves(compiled: Any, names: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(compiled, stages.Compiled):
        yield from compiled._taken_arguments()
        return
    infos = jax.tree_util.tree_leaves_with_path(compiled.args_info)
    shardings, _ = _jax.lowering.shardings_of(compiled)
    if len(infos) != len(shardings):
        return  # what the program does not use has no sharding, and nothing says which it is
    # JAX names no argument where one is a reference.
    if len(names) != len(infos) or all(map(_NO_NAME.fullmatch, names)):
        names = [_call_path(path) for path, _ in infos]
    for name, (_, info), sharding in zip(names, infos, shardings, strict=True):
        yield name, jax.ShapeDtypeStruct(info.shape, info.dtype), sharding


def _call_path(path: Sequence[Any]) -> str:
    """``args[0]['w']`` or ``rate`` for a path in ``(args, kwargs)``."""
    if path[0].idx == 0:
        return f"args{jax.tree_util.keystr(tuple(path[1:]))}"
    return f"{path[1].key}{jax.tree_util.keystr(tuple(path[2:]))}"


def argument(name: str, aval: Any, sharding: Any, mesh: Any) -> Argument:
    """One array on the mesh of a program; it has no sharding where the program does not use it."""
    splits = splits_of(aval.shape, sharding, mesh)
    elements = math.prod(s.block for s in splits) if splits is not None else math.prod(aval.shape)
    return Argument(
        path=name,
        dtype=_jax.core.short_aval(aval).partition("[")[0],
        shape=tuple(aval.shape),
        sharding=_show(sharding),
        splits=splits,
        nbytes=elements * aval.dtype.itemsize,
    )


def _show(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        return show_spec(sharding.spec)
    return "not used" if sharding is None else _resolve.show_sharding(sharding)


def splits_of(shape: Sequence[int], sharding: Any, mesh: Any) -> tuple[Split, ...] | None:
    """How a sharding cuts each dimension; None where no PartitionSpec on the mesh says it."""
    if mesh is None or sharding is None:
        return None
    spec = _spec_on(sharding, mesh, len(shape))
    return None if spec is None else splits_of_spec(shape, spec, dict(mesh.shape))


def splits_of_spec(shape: Sequence[int], spec: Any, mesh: Mapping[str, int]) -> tuple[Split, ...]:
    """How a PartitionSpec cuts each dimension of a shape; unconstrained ones count as whole."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return tuple(
        Split.of(size, _axes(entry), mesh) for size, entry in zip(shape, entries, strict=True)
    )


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _spec_on(sharding: Any, mesh: Any, ndim: int) -> Any:
    if isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == dict(mesh.shape):
        return sharding.spec
    try:
        parsed: Any = parse_op_sharding(_jax.dispatch.op_sharding(sharding, ndim), mesh)
        return parsed.to_partition_spec()
    except (RecoveryError, AttributeError):
        return None  # a part of an axis, say, or a sharding that the compiler has no form for
