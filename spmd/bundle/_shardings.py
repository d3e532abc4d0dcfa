"""Meshes and shardings as JSON values, with devices by number, and back onto other devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import math
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np

from spmd import _jax
from spmd._mesh import show_mesh
from spmd.bundle._fields import Field, FormError
from spmd.bundle._values import NotPlainError

_MOST_AXES = 64
_MOST_DEVICES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a program.

    Attributes:
        ordered: In the order in which the program numbers them.
        by_id: The same, by the number that they had where the bundle was written.
    """

    ordered: tuple[Any, ...]
    by_id: Mapping[int, Any]


# Meshes


def encode_mesh(mesh: Any) -> Any:
    """A mesh as JSON: axes with sizes and types, and the numbers of its devices.

    Raises:
        NotPlainError: A name of an axis is no string.
    """
    for name in mesh.axis_names:
        if type(name) is not str:
            raise NotPlainError(name)
    types = (t.name for t in mesh.axis_types)
    axes = [[n, s, t] for (n, s), t in zip(mesh.shape.items(), types, strict=True)]
    return {"axes": axes, "devices": [d.id for d in mesh.devices.flat]}


def decode_axes(field: Field) -> tuple[dict[str, int], tuple[AxisType, ...]]:
    """Sizes by name, and the types, of the axes of a mesh.

    Raises:
        FormError: It is no mesh.
    """
    sizes: dict[str, int] = {}
    types = []
    for axis in field["axes"].items(_MOST_AXES):
        name, size, kind = axis.items(3, exactly=3)
        if name.string() in sizes:
            raise name.refuse("a name for each axis")
        sizes[name.string()] = size.integer(1, _MOST_DEVICES)
        types.append(AxisType[kind.one_of("Auto", "Explicit", "Manual")])
    return sizes, tuple(types)


def decode_ids(field: Field) -> list[int]:
    """The numbers of the devices of a mesh, in its order.

    Raises:
        FormError: They are not as many as its axes say, or not distinct.
    """
    sizes, _ = decode_axes(field)
    ids = [f.integer(0, 1 << 40) for f in field["devices"].items(_MOST_DEVICES)]
    if len({*ids}) != len(ids) or len(ids) != math.prod(sizes.values()):
        raise FormError(field.where, f"distinct devices for {_show_sizes(sizes)}", str(ids)[:200])
    return ids


def _show_sizes(sizes: Mapping[str, int]) -> str:
    return "mesh " + ", ".join(f"{n}={s}" for n, s in sizes.items())


def decode_mesh(field: Field, devices: Devices) -> Any:
    """The mesh over the devices at hand.

    Raises:
        FormError: It is no mesh, or has a device that the program does not.
    """
    sizes, types = decode_axes(field)
    found = np.empty(math.prod(sizes.values()), object)
    found[:] = [_device(i, field, devices) for i in decode_ids(field)]
    return jax.sharding.Mesh(found.reshape(tuple(sizes.values())), tuple(sizes), types)


def _device(number: int, field: Field, devices: Devices) -> Any:
    if number not in devices.by_id:
        raise FormError(field.where, "devices of the program's mesh", f"device {number}")
    return devices.by_id[number]


# Shardings


class Encoder:
    """Turns shardings into JSON, with the meshes that they have in common in a table.

    Attributes:
        meshes: The table; its first is the mesh of the program.
    """

    def __init__(self, mesh: Any):
        self.meshes = [encode_mesh(mesh)]
        self._indices = {mesh: 0}

    def encode(self, sharding: Any) -> Any:
        """A sharding as JSON.

        Raises:
            NotPlainError: It is of a kind that has no written form.
        """
        if isinstance(sharding, NamedSharding):
            if sharding.mesh not in self._indices:
                self._indices[sharding.mesh] = len(self.meshes)
                self.meshes.append(encode_mesh(sharding.mesh))
            spec = _encode_spec(sharding.spec)
            return {"named": [self._indices[sharding.mesh], spec, sharding.memory_kind]}
        if isinstance(sharding, SingleDeviceSharding):
            (device,) = sharding.device_set
            return {"single": [device.id, sharding.memory_kind]}
        if tiling := _jax.dispatch.tiling_of(sharding):
            ids = [d.id for d in _jax.dispatch.device_order(sharding)]
            return {"tiled": [*tiling, ids, sharding.memory_kind]}
        raise NotPlainError(sharding)


def _encode_spec(spec: PartitionSpec) -> list[Any]:
    if spec.unreduced or spec.reduced:
        raise NotPlainError(spec)
    entries = []
    for entry in spec:
        if entry is not None and type(entry) not in (str, tuple):
            raise NotPlainError(spec)
        entries.append(list(entry) if type(entry) is tuple else entry)
    return entries


def decode_sharding(field: Field, meshes: Sequence[Any], devices: Devices) -> Any:
    """What :meth:`Encoder.encode` was given.

    Args:
        field: Its place.
        meshes: The table of meshes.
        devices: The devices at hand.

    Raises:
        FormError: It wrote no such thing.
    """
    kind, inner = field.only()
    if kind == "named":
        index, entries, memory = inner.items(3, exactly=3)
        mesh = index.of(meshes)
        spec = _decode_spec(entries, mesh)
        return NamedSharding(mesh, spec, memory_kind=_memory(memory, devices))
    if kind == "single":
        number, memory = inner.items(2, exactly=2)
        device = _device(number.integer(0, 1 << 40), number, devices)
        return SingleDeviceSharding(device, memory_kind=_memory(memory, devices))
    if kind == "tiled":
        return _decode_tiled(inner, devices)
    raise field.refuse("a sharding")


def _decode_spec(field: Field, mesh: Any) -> PartitionSpec:
    entries: list[Any] = []
    used: list[str] = []
    for entry in field.items(_MOST_AXES):
        names = entry.strings() if type(entry.value) is list else ()
        names = (entry.string(),) if type(entry.value) is str else names
        used += names
        entries.append(None if entry.is_none else names)
    if len({*used}) != len(used) or not {*used} <= {*mesh.axis_names}:
        raise field.refuse(f"a spec over {show_mesh(mesh)}, each axis once")
    return PartitionSpec(*entries)


def _memory(field: Field, devices: Devices) -> str | None:
    if field.is_none:
        return None
    kinds = [m.kind for m in devices.ordered[0].addressable_memories()]
    return field.one_of(*kinds)


def _decode_tiled(field: Field, devices: Devices) -> Any:
    tiles, order, last, ids, memory = field.items(5, exactly=5)
    count = len(devices.ordered)
    dims = [f.integer(1, count) for f in tiles.items(_MOST_AXES)]
    places = [f.integer(0, count - 1) for f in order.items(count, exactly=count)]
    if math.prod(dims) != count or len({*places}) != count:
        raise field.refuse(f"{count} tiles, one for each device")
    found = [_device(f.integer(0, 1 << 40), f, devices) for f in ids.items(count, exactly=count)]
    if len({*found}) != count:
        raise ids.refuse("each device once")
    return _jax.dispatch.tiled_sharding(
        found, dims, places, last.boolean(), _memory(memory, devices)
    )


def check_fits(sharding: Any, aval: Any, where: str) -> None:
    """Sees that a sharding fits a value.

    Raises:
        FormError: It splits more dimensions than there are, or one unevenly.
    """
    try:
        sharding.shard_shape(aval.shape)
        _jax.dispatch.op_sharding(sharding, aval.ndim)
    except (ValueError, IndexError) as error:  # JAX indexes the dimensions by the spec
        raise FormError(
            where, f"a sharding of {_jax.core.short_aval(aval)}", str(error)[:200]
        ) from None
