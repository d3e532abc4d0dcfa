"""CPU devices next to others; accelerators are stood in for by objects like theirs."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from spmd import MeshError
from spmd.colocated_python import _api, colocated_cpu_devices


class _Client:
    pass


class Accelerator:
    """One of four, two per process."""

    platform = "gpu"

    def __init__(self, number, client):
        self.id, self.process_index, self.client = number, number // 2, client

    def __repr__(self):
        return f"Accelerator({self.id})"


@pytest.fixture
def accelerators(monkeypatch):
    """Four accelerators in two processes, and six CPU devices, three in each."""
    client = _Client()
    devices = [Accelerator(i, client) for i in range(4)]
    client.devices = lambda: devices[::-1]
    cpus = [
        SimpleNamespace(id=i, platform="cpu", process_index=i // 3, name=f"cpu {i}")
        for i in range(6)
    ]
    monkeypatch.setattr(_api.jax, "devices", lambda kind: cpus)
    return devices


def test_cpu_devices_stand_for_themselves():
    """In the order in which they are given, a mesh with its shape, axes and their types."""
    devices = jax.devices()
    assert colocated_cpu_devices(devices[::-1]) == tuple(devices[::-1])
    assert colocated_cpu_devices([]) == ()
    mesh = jax.sharding.Mesh(np.array(devices[::-1]).reshape(4, 2), ("data", "model"))
    assert colocated_cpu_devices(mesh) == mesh
    explicit = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    assert colocated_cpu_devices(explicit) == explicit


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0), (1,), (3, 3)])
def test_the_order_of_accelerators(accelerators, order):
    """Each has its own CPU device, the same in every order and selection."""
    found = colocated_cpu_devices([accelerators[i] for i in order])
    expected = {0: "cpu 0", 1: "cpu 1", 2: "cpu 3", 3: "cpu 4"}
    assert [d.name for d in found] == [expected[i] for i in order]


def test_too_few_cpu_devices(accelerators, monkeypatch):
    """A process with fewer CPU devices than accelerators cannot have one for each."""
    cpus = [SimpleNamespace(id=i, platform="cpu", process_index=i) for i in range(2)]
    monkeypatch.setattr(_api.jax, "devices", lambda kind: cpus)
    with pytest.raises(MeshError) as caught:
        colocated_cpu_devices(accelerators)
    assert str(caught.value) == (
        "colocated_cpu_devices has no CPU device for Accelerator(1).\n"
        "  expected  as many CPU devices as accelerators in each process\n"
        "  got       devices 0 (cpu) in process 0\n"
        "  fix       set jax_num_cpu_devices to the number of accelerators before JAX starts"
    )


def test_jax_without_the_cpu(accelerators, monkeypatch):
    """A process that starts only its accelerators is told how it starts the CPU too."""

    def refuse(kind):
        raise RuntimeError(f"Unknown backend {kind}")

    monkeypatch.setattr(_api.jax, "devices", refuse)
    with pytest.raises(MeshError) as caught:
        colocated_cpu_devices(accelerators)
    assert str(caught.value) == (
        "colocated_cpu_devices finds no CPU devices.\n"
        "  expected  JAX to start the CPU beside the accelerators\n"
        "  got       JAX_PLATFORMS=cpu\n"  # what tests start with
        "  fix       set JAX_PLATFORMS=cpu,cpu before JAX starts, or leave it out"
    )
    config = SimpleNamespace(values={"jax_platforms": None})
    monkeypatch.setattr(_api.jax, "config", config)
    with pytest.raises(RuntimeError, match="Unknown backend cpu"):
        colocated_cpu_devices(accelerators)
