"""JAX's contexts of a mesh, types with Explicit axes, and devices that are only described."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any

import jax
from jax._src import (
    clusters,
    config,
    core,
    distributed,
    hardware_utils,
    mesh as mesh_lib,
    sharding_impls,
    xla_bridge,
)
from jax._src.lib import xla_client
import numpy as np


def has_explicit_axes(mesh: Any) -> bool:
    """Whether shardings over some axes of a mesh of devices are part of types."""
    return isinstance(mesh, mesh_lib.Mesh) and mesh_lib.AxisType.Explicit in mesh.axis_types


def has_explicit_type(x: Any) -> bool:
    """Whether the type of a value has a sharding over Explicit axes."""
    sharding = getattr(core.typeof(x), "sharding", None)
    return sharding is not None and sharding.mesh._any_axis_explicit


def explicit_part(spec: Any, mesh: Any = None) -> Any:
    """What of a spec is part of a type on a mesh, or under `jax.set_mesh`: its Explicit axes."""
    typed = set((mesh_lib.get_abstract_mesh() if mesh is None else mesh).explicit_axes)
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
    return jax.P(*(tuple(a for a in e if a in typed) or None for e in entries))


def retyped(x: Any, spec: Any) -> Any:
    """Reshards a value whose type has a sharding, so that its type says what `spec` does."""
    have = core.typeof(x).sharding
    entries = [*spec, *[None] * (x.ndim - len(spec))]
    kept = [h if e is jax.P.UNCONSTRAINED else e for e, h in zip(entries, have.spec, strict=True)]
    return jax.sharding.reshard(x, explicit_part(kept, have.mesh))


def explicit_axes() -> bool:
    """Whether `jax.set_mesh` is active with axes whose shardings are part of types."""
    return mesh_lib.get_abstract_mesh()._any_axis_explicit


def meets_explicit_axes(mesh: Any) -> bool:
    """Whether shardings are part of types here, or are over some axes of a mesh of devices."""
    return explicit_axes() or has_explicit_axes(mesh)


#: What JAX answers, under Auto axes, to code that is written for Explicit ones.
_NOT_EXPLICIT = ("axis names that are of type Auto", "non-None and have a non-empty mesh")


def needs_explicit_axes(error: ValueError) -> bool:
    """Whether JAX refused `reshard` or `out_sharding=` since no axis is Explicit."""
    return any(text in str(error) for text in _NOT_EXPLICIT)


#: Entries that tell our contexts from `with jax_mesh:` in the keys of JAX's caches.
_ENTERED = mesh_lib.Mesh(np.array(["entered"], dtype=object), ("spmd.Mesh",))
_TRACING = mesh_lib.Mesh(np.array(["tracing"], dtype=object), ("spmd.pjit",))


def default_device() -> Any:
    """The device of values that nobody placed."""
    return config.default_device.value or jax.local_devices()[0]


def thread_mesh() -> Any:
    """The mesh of `with jax_mesh:` in this thread; empty where there is none."""
    return mesh_lib.thread_resources.env.physical_mesh


#: The mesh of `jax.set_mesh` in this thread; empty where there is none.
set_mesh_value: Any = mesh_lib.get_concrete_mesh


def abstract_mesh_value() -> Any:
    """The mesh of `jax.sharding.use_abstract_mesh`, or None; a `shard_map` enters one too."""
    mesh = mesh_lib.get_abstract_mesh()
    return None if mesh.empty or mesh._any_axis_manual else mesh


def push_mesh(mesh: Any) -> None:
    """Enters a mesh as JAX's own context manager does, without its DeprecationWarning."""
    resources = mesh_lib.thread_resources
    for entry in (_ENTERED, mesh):
        resources.stack.append(resources.stack[-1].with_mesh(entry))
    _mesh_stack_changed()


def pop_mesh() -> None:
    """Undoes :func:`push_mesh`."""
    del mesh_lib.thread_resources.stack[-2:]
    _mesh_stack_changed()


def _mesh_stack_changed() -> None:
    resources = mesh_lib.thread_resources
    resources.env = resources.stack[-1]
    entered = tuple(e.physical_mesh for e in resources.stack if not e.physical_mesh.empty)
    config.mesh_context_manager.set_local(entered)


@contextlib.contextmanager
def typing_under(mesh: Any) -> Iterator[None]:
    """Makes a mesh the one that the types of traced values refer to."""
    devices = mesh_lib.empty_concrete_mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh
    concrete = sharding_impls._internal_use_concrete_mesh(devices)
    with concrete, abstract_mesh_set(mesh.abstract_mesh):
        yield


@contextlib.contextmanager
def tracing_under(mesh: Any) -> Iterator[None]:
    """Lets code that is traced find `mesh`, and nothing else, where JAX looks for one."""
    manual = mesh_lib.get_abstract_mesh()._any_axis_manual
    resources, outer = mesh_lib.thread_resources, mesh_lib.thread_resources.stack
    meshes = (_TRACING,) if isinstance(mesh, jax.sharding.AbstractMesh) else (_TRACING, mesh)
    with contextlib.ExitStack() as stack:
        if not manual:
            stack.enter_context(typing_under(mesh))
        # What was entered outside is not part of the key: the same mesh traces once.
        resources.stack = [outer[0], *(outer[0].with_mesh(m) for m in meshes)]
        _mesh_stack_changed()
        try:
            yield
        finally:
            resources.stack = outer
            _mesh_stack_changed()


@contextlib.contextmanager
def abstract_mesh_set(mesh: Any) -> Iterator[None]:
    """Makes a mesh, or with None no mesh, the one of new types, whatever it was before."""
    empty = mesh_lib.empty_abstract_mesh  # JAX lets no mesh follow one of another size
    with mesh_lib.use_abstract_mesh(empty), mesh_lib.use_abstract_mesh(mesh or empty):
        yield


def partly_manual(mesh: Any, axes: Sequence[Any]) -> Any:
    """The abstract mesh inside of a `shard_map` over some axes."""
    return mesh.abstract_mesh.update_axis_types(dict.fromkeys(axes, mesh_lib.AxisType.Manual))


def bound_axes() -> frozenset[Any]:
    """The axes that collectives may name where code is traced now."""
    return frozenset(core.get_axis_env().axis_sizes)


def manual_axes() -> frozenset[Any]:
    """The mesh axes that an enclosing `shard_map` maps over."""
    return frozenset(mesh_lib.get_abstract_mesh().manual_axes)


def manual_mesh() -> dict[Any, int]:
    """Axes ``{name: size}`` of the mesh that an enclosing `shard_map` is over; else empty."""
    mesh = mesh_lib.get_abstract_mesh()
    return dict(mesh.shape) if mesh._any_axis_manual else {}


def tpu_chips() -> int:
    """How many TPU chips this machine has; looks at the PCI bus and starts nothing."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0]


def has_gpu() -> bool:
    """Whether this machine has a GPU of NVIDIA's; looks at its files and starts nothing."""
    return hardware_utils.has_visible_nvidia_gpu()


def new_cpu_devices(count: int) -> list[Any]:
    """Virtual CPU devices of a client of their own: JAX's has as many as when it started."""
    return xla_client.make_cpu_client(num_devices=count).devices()


def is_described(device: Any) -> bool:
    """Whether a device is only described: programs are compiled for it and cannot run."""
    client = getattr(device, "client", None)
    return getattr(client, "runtime_type", "") == "compile_only_runtime"


#: Whether JAX has made its clients.
backends_started = xla_bridge.backends_are_initialized


def coordination_client() -> Any:
    """The client of the service that `jax.distributed` starts, which keeps keys and values."""
    return distributed.global_state.client


#: Fills what was not given, of address, number of processes, process, device ids, method, timeout,
#: from the environment: SLURM, Open MPI, Kubernetes, Cloud TPU. `jax.distributed.initialize` does
#: that by itself, and connects at once; who wants to know where to, has to ask before.
detected_cluster: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params
