"""Which mesh a call runs on: the context of this thread, and the meshes JAX keeps.

Precedence: ``pjit(mesh=...)``, then ``with spmd.Mesh(...)``, then JAX's own ``with mesh:`` and
``jax.set_mesh``, which must agree where both are set (JAX keeps no record of which is inner).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import math
import threading
from typing import Any, Literal

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType
import numpy as np

from spmd import _jax
from spmd.errors import ArgumentError, Failure, MeshError, explain, refuse


class Mesh(jax.sharding.Mesh):
    """A grid of devices with named axes, and a context in which `pjit` finds it.

    It equals the `jax.sharding.Mesh` of the same devices and names, and is accepted wherever one
    is; unlike that one it is entered without a deprecation warning. Shardings that `spmd` builds
    carry the plain JAX mesh.

    Args:
        devices: Array of devices, one dimension per mesh axis.
        axis_names: One name per dimension, or a single string for one dimension.
        axis_types: As in JAX; axes of every type act as Auto inside of a `pjit` function.

    Raises:
        ValueError: The number of names is not the rank of `devices`.
        RuntimeError: Two axes have one name.

    Example:
        >>> with Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")):
        ...     y = pjit(f, in_axis_resources=P("data"))(x)
    """

    __module__ = "spmd"

    _plain: Any

    def __new__(cls, devices: Any, axis_names: Any, axis_types: Any = None) -> Mesh:
        plain = jax.sharding.Mesh(np.asarray(devices), axis_names, axis_types)
        if len(plain.shape) < len(plain.axis_names):
            failure = Failure(
                what="cannot be built",
                given=f"axis_names={tuple(plain.axis_names)}",
                expected="a name of its own for each axis",
                fix="rename one of them: a PartitionSpec could not tell them apart",
                error=MeshError,
            )
            raise explain("Mesh", [failure])
        # JAX interns its meshes and always builds the base class.
        self = object.__new__(cls)
        self.__dict__.update(vars(plain), _plain=plain)
        return self

    def __init__(self, *args: Any, **kwargs: Any):
        del args, kwargs  # __new__ did it all

    def __enter__(self) -> Mesh:
        _context.meshes.append(self)
        _jax.mesh.push_mesh(self._plain)
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> Literal[False]:
        _context.meshes.pop()
        _jax.mesh.pop_mesh()
        return False

    def __eq__(self, other: object) -> bool:
        return plain_mesh(other) is self._plain

    def __hash__(self) -> int:
        return hash(self._plain)

    def __reduce__(self) -> Any:
        # Devices do not pickle; the process that reads this has its own of the same ids.
        if is_described(self):
            failure = Failure(
                what="cannot be pickled: its devices are only described",
                got=show_mesh(self),
                fix="send the name and the sizes, and call spmd.topology with them there",
                error=MeshError,
            )
            raise explain("Mesh", [failure])
        ids = [(d.platform, d.id) for d in self.devices.flat]
        return (_unpickle, (ids, self.devices.shape, self.axis_names, self.axis_types))

    def __copy__(self) -> Mesh:
        return self

    def __deepcopy__(self, memo: Any) -> Mesh:
        return self


def _unpickle(ids: Any, shape: Any, axis_names: Any, axis_types: Any) -> Mesh:
    platforms = {platform for platform, _ in ids}
    here = {(d.platform, d.id): d for p in platforms for d in jax.devices(p)}
    if missing := [f"{p}:{i}" for p, i in ids if (p, i) not in here]:
        failure = Failure(
            what="cannot be unpickled: this process lacks its devices",
            expected=", ".join(f"{p}:{i}" for p, i in ids),
            got=f"no {', '.join(missing)}",
            error=MeshError,
        )
        raise explain("Mesh", [failure])
    devices = np.empty(len(ids), dtype=object)
    devices[:] = [here[key] for key in ids]
    return Mesh(devices.reshape(shape), axis_names, axis_types)


class _Context(threading.local):
    """What this thread has entered.

    Attributes:
        meshes: Meshes entered with `with`, innermost last.
        tracing: ``(mesh, function name)`` of the pjit functions being traced, innermost last.
    """

    def __init__(self) -> None:
        self.meshes: list[Mesh] = []
        self.tracing: list[tuple[Any, str]] = []


_context = _Context()


def plain_mesh(mesh: Any) -> Any:
    """Returns the JAX mesh that a mesh stands for; other values unchanged."""
    return mesh._plain if isinstance(mesh, Mesh) else mesh


def auto_mesh(mesh: Any) -> Any:
    """Returns the plain JAX mesh with all axes Auto; None stays None."""
    mesh = plain_mesh(mesh)
    if mesh is None or all(t == AxisType.Auto for t in mesh.axis_types):
        return mesh
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def make_mesh(
    axes: Mapping[str, int], axis_names: None = None, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """Builds a mesh whose axes suit the interconnect.

    Args:
        axes: Size per axis name, in order from major to minor; one size may be -1: what is left.
        axis_names: Not taken: names given apart from sizes, as to `jax.make_mesh`, are answered
            with what to write.
        devices: Devices to use; by default all, or the first ones if fewer are asked for.

    Returns:
        A mesh of shape `tuple(axes.values())`.

    Raises:
        RuntimeError: The sizes do not fit the devices.
        TypeError: `axes` maps no names to whole numbers.

    Example:
        >>> make_mesh({"data": 4, "model": 2})
    """
    pool = list(jax.devices() if devices is None else devices)
    refuse("Mesh", [_axes_failure(axes, axis_names)])
    names, sizes = tuple(axes), [*axes.values()]
    if -1 in sizes:
        sizes[sizes.index(-1)] = len(pool) // -math.prod(sizes)
    size = math.prod(sizes)
    if not 0 < size <= len(pool) or (-1 in axes.values() and size != len(pool)):
        raise explain("Mesh", [_size_failure(axes, pool, chosen=devices is not None)])
    return Mesh(laid_out(tuple(sizes), pool[:size]), names)


def laid_out(sizes: tuple[int, ...], pool: Sequence[Any]) -> Any:
    """Lays devices out as `jax.make_mesh` does, and also where that one gives up."""
    names = tuple(f"axis{n}" for n in range(len(sizes)))
    types = (AxisType.Auto,) * len(names)
    try:
        return jax.make_mesh(sizes, names, axis_types=types, devices=pool).devices
    except (NotImplementedError, ValueError):
        if len({getattr(d, "slice_index", 0) for d in pool}) > 1:
            raise  # JAX names the function for several slices
    # An axis takes a part of a physical one: slower there, and still a mesh.
    try:
        return mesh_utils.create_device_mesh(sizes, pool, allow_split_physical_axes=True)
    except ValueError:  # JAX 0.10 cannot split into factors of any order
        return np.array(pool).reshape(sizes)


def _axes_failure(axes: Any, names: Any) -> Failure | None:
    """What is wrong with the axes whatever the devices are."""
    expected, error = "a dict of sizes by name, such as {'data': 4, 'model': 2}", ArgumentError
    given = f"{axes!r}" if names is None else f"{axes!r}, {names!r}"
    sizes: list[Any] = list(axes.values()) if isinstance(axes, Mapping) else [None]
    if names is None and all(isinstance(s, (int, np.integer)) for s in sizes):
        if sizes and sizes.count(-1) < 2 and all(s > 0 or s == -1 for s in sizes):
            return None
        expected, error = "one axis or more of positive sizes, of which one may be -1", MeshError
    fix = _as_one_dict(axes, names)
    return Failure(what="cannot be built", given=given, expected=expected, fix=fix, error=error)


def _as_one_dict(axes: Any, names: Any) -> str:
    """What to write for sizes and names that `jax.make_mesh` takes, or for pairs of both."""
    if isinstance(axes, Mapping):
        return f"spmd.make_mesh({dict(axes)!r})" if names is not None else ""
    try:
        names = (names,) if isinstance(names, str) else names
        pairs = axes if names is None else zip(names, axes, strict=True)
        meant = {str(name): int(size) for name, size in pairs}
    except (TypeError, ValueError):
        return ""
    return f"spmd.make_mesh({meant!r})"


def _size_failure(axes: Mapping[str, int], pool: Sequence[Any], *, chosen: bool) -> Failure:
    fixed = [s for s in axes.values() if s != -1]
    product = "*".join(map(str, fixed)) + (f" = {math.prod(fixed)}" if len(fixed) > 1 else "")
    fits = "divides" if -1 in axes.values() else "is at most"
    available, fix = len(pool), "choose other sizes, or pass other devices"
    if not chosen and pool[0].platform == "cpu" and math.prod(fixed) > available:
        fix = (
            "choose other sizes, or have JAX start on more virtual devices:\n"
            f"JAX_NUM_CPU_DEVICES={math.prod(fixed)} in the environment,\n"
            f"or --devices {math.prod(fixed)} for a command of spmd"
        )
    return Failure(
        what="cannot be built",
        given=show_axes(axes),
        expected=f"sizes whose product {fits} the number of devices",
        got=f"{product} on {available} device{'s' * (available != 1)}",
        fix=fix,
        error=MeshError,
    )


def current_mesh() -> Any:
    """Returns the mesh that a `pjit` call would use here, or None outside of any mesh.

    Raises:
        RuntimeError: JAX's ``with mesh:`` and ``jax.set_mesh`` are both active and differ.
    """
    if _context.meshes:
        return _context.meshes[-1]
    entered, was_set = _jax.mesh.thread_mesh(), _jax.mesh.set_mesh_value()
    if entered.empty:
        return _jax.mesh.abstract_mesh_value() if was_set.empty else was_set
    if not was_set.empty and was_set != entered:
        failure = Failure(
            what="is ambiguous here",
            given=f"`with mesh:` on {show_mesh(entered)} and jax.set_mesh on {show_mesh(was_set)}",
            expected="one mesh: JAX does not record which of the two is inner",
            fix="enter one of them only, use `with spmd.Mesh(...)`, or pass pjit(..., mesh=...)",
            error=MeshError,
        )
        raise explain("Mesh", [failure])
    return entered


def active_mesh() -> Any:
    """Returns :func:`current_mesh` as the JAX mesh that it stands for."""
    return plain_mesh(current_mesh())


def show_mesh(mesh: Any) -> str:
    """Returns ``mesh data=4, model=2``."""
    if mesh is None or not mesh.axis_names:
        return "an empty mesh"
    return f"mesh {show_axes(mesh.shape)}"


def show_axes(axes: Mapping[str, int]) -> str:
    """Returns ``data=4, model=2``."""
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def show_devices(devices: Sequence[Any]) -> str:
    """Returns ``8 devices cpu:0..7`` for a run of ids, or the ids where they are few."""
    ids = [d.id for d in devices]
    platform = devices[0].platform if devices else "no"
    if len(ids) == 1:
        return f"device {platform}:{ids[0]}"
    if ids == [*range(ids[0], ids[0] + len(ids))]:
        return f"{len(ids)} devices {platform}:{ids[0]}..{ids[-1]}"
    shown = ",".join(map(str, ids[:16])) + (",…" if len(ids) > 16 else "")
    return f"{len(ids)} devices {platform}:{shown}"


def is_described(mesh: Any) -> bool:
    """Whether the devices of a mesh are only described; they are all of one kind."""
    if isinstance(mesh, AbstractMesh):
        return False
    return _jax.mesh.is_described(next(iter(mesh.devices.flat), None))


def described_failure(mesh: Any) -> Failure | None:
    """Something is to run on devices that are only described, or not even that."""
    if isinstance(mesh, AbstractMesh):
        return Failure(
            what=f"cannot run on {show_mesh(mesh)}: it is an AbstractMesh, which has no devices",
            expected="a mesh of devices",
            fix="stop at .lower(...); to compile and run, use spmd.make_mesh or spmd.topology",
            error=MeshError,
        )
    if not is_described(mesh):
        return None
    devices = list(mesh.devices.flat)
    return Failure(
        what=f"cannot run on {show_mesh(mesh)}: its devices are only described",
        expected="devices that are attached to this machine",
        got=f"{show_devices(devices)} of kind {devices[0].device_kind}, of a topology",
        fix="stop at .lower(...).compile(), which needs no devices; to run, use a mesh of "
        "jax.devices()",
        error=MeshError,
    )


def check_parts(mesh: Any, subject: str) -> None:
    """Checks that the devices of this process form a box of a mesh: they hold a part of a value."""
    if not isinstance(mesh, AbstractMesh):
        refuse(subject, [scattered_failure(mesh, jax.process_index())])


def scattered_failure(mesh: Any, process: int) -> Failure | None:
    """Says why what a process holds is no part of a value on a mesh, or None if it is one."""
    owners = np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)
    places = np.argwhere(owners == process)
    if not len(places):
        return Failure(
            what=f"cannot use {show_mesh(mesh)} here: it has no device of process {process}",
            got=_show_owners(mesh, owners),
            fix="build the mesh from devices of every process that calls",
            error=MeshError,
        )
    if (places.max(0) - places.min(0) + 1).prod() == len(places):
        return None
    return Failure(
        what=f"cannot tell which part of a value process {process} holds",
        given=show_mesh(mesh),
        expected="the devices of each process to form a contiguous box of the mesh",
        got=_show_owners(mesh, owners),
        fix="build the mesh with spmd.make_mesh, which keeps the devices of a process together, "
        "or pass global arrays",
        error=MeshError,
    )


_MOST_ROWS = 16


def _show_owners(mesh: Any, owners: np.ndarray) -> str:
    """Draws which process has which device: the last axis from left to right."""
    names, last = mesh.axis_names[:-1], mesh.axis_names[-1]
    rows = [
        (", ".join(f"{n}={i}" for n, i in zip(names, place, strict=True)), owners[place])
        for place in np.ndindex(owners.shape[:-1])
    ]
    width = max(len(label) for label, _ in rows)
    digits = len(str(owners.max()))
    lines = [
        f"{label:<{width}}  {' '.join(f'{p:>{digits}}' for p in row)}".strip()
        for label, row in rows[:_MOST_ROWS]
    ]
    more = [f"... {len(rows) - _MOST_ROWS} more rows"] * (len(rows) > _MOST_ROWS)
    return "\n".join([f"these processes, {last} from left to right", *lines, *more])


@contextlib.contextmanager
def tracing(mesh: Any, subject: str) -> Iterator[None]:
    """Lets the body of a pjit function find the mesh of its call; `mesh` may be None."""
    if mesh is None:
        yield
        return
    ours: Any = mesh if isinstance(mesh, AbstractMesh) else Mesh(mesh.devices, mesh.axis_names)
    _context.meshes.append(ours)
    _context.tracing.append((auto_mesh(mesh), subject))
    try:
        with _jax.mesh.tracing_under(mesh):
            yield
    finally:
        _context.tracing.pop()
        _context.meshes.pop()


def traced_under(compute: Callable[..., Any]) -> Any:
    """Caches what is computed from a jaxpr, a call and more hashable values, under the call's mesh.

    The rules of a `custom_jvp`, `custom_vjp` or `custom_vmap` in the jaxpr are traced only then,
    and find the mesh. What mesh a caller has entered makes no difference to what is found; to ask
    for it again enters no mesh at all.
    """
    cached = _jax.core.weakref_lru_cache(compute)

    @_jax.core.weakref_lru_cache
    def lookup(jaxpr: Any, call: Any, *args: Any) -> Any:
        with tracing(call.mesh, call.subject):
            return cached(jaxpr, call, *args)

    def clear() -> None:
        cached.cache_clear()
        lookup.cache_clear()

    @functools.wraps(compute)
    def computed(jaxpr: Any, call: Any, *args: Any) -> Any:
        return lookup(jaxpr, call, *args)

    clearable: Any = computed
    clearable.cache_clear = clear
    return clearable


def enclosing_pjit() -> tuple[Any, str] | None:
    """Returns mesh and subject of the call that is being traced in this thread, if any."""
    return _context.tracing[-1] if _context.tracing else None
