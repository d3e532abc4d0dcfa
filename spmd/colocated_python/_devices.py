"""CPU devices on the hosts of other devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, overload

import jax
from jax.sharding import Mesh
import numpy as np

from spmd.colocated_python import _specs
from spmd.errors import Failure, MeshError, explain


@overload
def colocated_cpu_devices(devices_or_mesh: Mesh) -> Mesh: ...


@overload
def colocated_cpu_devices(devices_or_mesh: Sequence[Any]) -> tuple[Any, ...]: ...


def colocated_cpu_devices(devices_or_mesh: Any) -> Any:
    """Returns CPU devices of the hosts that devices are on.

    A CPU device stands for itself. The accelerators of a process have its CPU devices in the
    order of their numbers, whatever the order in which they are given.

    Args:
        devices_or_mesh: Devices, or a mesh of them.

    Returns:
        As many CPU devices in the same order, or a mesh of them with the same shape and axes.

    Raises:
        MeshError: A process has fewer CPU devices than accelerators.
    """
    if not isinstance(devices_or_mesh, Mesh):
        return tuple(_colocated([*devices_or_mesh]))
    mesh = devices_or_mesh
    devices = np.empty(mesh.devices.size, object)
    devices[:] = _colocated([*mesh.devices.flat])
    devices = devices.reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _colocated(devices: list[Any]) -> list[Any]:
    if all(d.platform == "cpu" for d in devices):
        return devices
    places = _places({d.client for d in devices if d.platform != "cpu"})
    cpus = defaultdict(list)
    for device in jax.devices("cpu"):
        cpus[device.process_index].append(device)
    failures = [
        _too_few(d, cpus[d.process_index])
        for d in devices
        if d.platform != "cpu" and places[d] >= len(cpus[d.process_index])
    ]
    if failures:
        raise explain("colocated_cpu_devices", failures[:1])
    return [d if d.platform == "cpu" else cpus[d.process_index][places[d]] for d in devices]


def _places(clients: set[Any]) -> dict[Any, int]:
    """Which of the accelerators of its process a device is."""
    places: dict[Any, int] = {}
    for client in clients:
        of_process = defaultdict(list)
        for device in sorted(client.devices(), key=lambda d: d.id):
            of_process[device.process_index].append(device)
        for found in of_process.values():
            places.update((d, i) for i, d in enumerate(found))
    return places


def _too_few(device: Any, cpus: list[Any]) -> Failure:
    return Failure(
        what=f"has no CPU device for {device}",
        expected="as many CPU devices as accelerators in each process",
        got=f"devices {_specs.show_devices(cpus)} in process {device.process_index}",
        fix="set jax_num_cpu_devices to the number of accelerators before JAX starts",
        error=MeshError,
    )
