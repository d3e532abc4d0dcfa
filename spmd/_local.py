"""What one process holds of a global array, and the array of which it holds a part."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec
import numpy as np

from spmd._resolve import axes_size, to_sharding
from spmd._spec import UNSPECIFIED, ParsedPartitionSpec


def global_shape(shape: tuple[int, ...], spec: Any, mesh: Any) -> tuple[int, ...]:
    """Returns the shape of the value of which each process holds a part of `shape`.

    Args:
        shape: Shape of one process's part.
        spec: ParsedPartitionSpec of the value; anything else: the value is not split.
        mesh: The mesh of all processes.
    """
    if not isinstance(spec, ParsedPartitionSpec):
        return shape
    local = mesh.local_mesh
    parts = spec.partitions + ((),) * (len(shape) - len(spec))
    return tuple(
        n * axes_size(p, mesh) // axes_size(p, local) for n, p in zip(shape, parts, strict=True)
    )


def local_to_global(value: Any, spec: Any, mesh: Any) -> jax.Array:
    """Builds the global array of which a host array, a number or an array here is a part."""
    spec = ParsedPartitionSpec(None, ()) if spec is UNSPECIFIED else spec
    if isinstance(value, jax.Array) and isinstance(spec, ParsedPartitionSpec):
        # What is on the devices already stays there.
        named = spec.to_partition_spec()
        return multihost_utils.host_local_array_to_global_array(value, mesh, named)
    sharding = to_sharding(spec, mesh)
    local = np.asarray(value, dtype=jax.dtypes.canonicalize_dtype(np.asarray(value).dtype))
    return jax.make_array_from_process_local_data(
        sharding, local, global_shape(local.shape, spec, mesh)
    )


def global_to_local(value: jax.Array, mesh: Any) -> Any:
    """Returns this process's part of a global array; with one process that is all of it."""
    if jax.process_count() == 1:
        return value
    spec = getattr(value.sharding, "spec", PartitionSpec())
    return multihost_utils.global_array_to_host_local_array(value, mesh, spec)
