"""`colocated_python`: a wrapped function, its specializations, and the straight line of a call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
import functools
import itertools
from typing import Any, overload

import jax
from jax.sharding import Mesh
import numpy as np

from spmd import _jax
from spmd._options import global_name
from spmd.colocated_python import _specs
from spmd.colocated_python._calls import Function, Functions, fast_key
from spmd.colocated_python._lanes import lanes
from spmd.colocated_python._specs import Specs, cannot_wrap, leaf_of, refuse, show_devices, subject
from spmd.colocated_python._travel import pack, unpack
from spmd.colocated_python._waiting import Habit
from spmd.errors import Failure, MeshError, OptionError, explain, show_value


def colocated_python(fun: Callable) -> ColocatedFunction:
    """Wraps a function to run on the hosts of the devices that its arguments are on.

    A call returns arrays at once; the function runs later, with the arrays of the call itself.
    Calls of one thread run in the order in which they were made, and those of several threads at
    the same time. What the function raises is raised where its arrays are waited for.

    The first call with arguments of a new kind runs to its end, since only then it is known what
    the function returns; with :meth:`ColocatedFunction.specialize` it can be said beforehand.

    Args:
        fun: Takes and returns pytrees of `jax.Array`, all on the same CPU devices.

    Returns:
        A function with the name, text and signature of `fun`.

    Raises:
        ArgumentError: `fun` is not callable.
    """
    if not callable(fun):
        raise cannot_wrap("colocated_python", "a function", fun)
    return ColocatedFunction(fun, Specialization())


def barrier() -> None:
    """Waits until every call so far is over.

    Inside of a colocated function, those that it made itself.

    Raises:
        ColocatedPythonError: Functions without results raised since the last time; the first
            error is the cause. Errors of functions with results are raised by their arrays.
    """
    lanes.wait()
    lanes.raise_errors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """What is said about a function beforehand, by :meth:`ColocatedFunction.specialize`."""

    in_specs: Specs | None = None
    out_specs_fn: Callable | None = None
    devices: Any = None


class ColocatedFunction:
    """A function that runs on the hosts of devices; see :func:`colocated_python`."""

    __module__ = "spmd.colocated_python"

    def __init__(self, fun: Callable, specialization: Specialization, habit: Habit | None = None):
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._specialization = specialization
        self._functions = Functions()
        self._habit = habit or Habit()

    def __repr__(self) -> str:
        return f"<spmd.colocated_python of `{self._name}`>"

    def __reduce__(self) -> Any:
        """Travels by its name where it is found under that in a module, else as it is."""
        name = global_name(self)
        if name and self.__module__ != "__main__":  # which is another one in another process
            return name
        said = self._specialization
        parts = {
            "the function": self._fun,
            "in_specs": said.in_specs and said.in_specs.structs(),
            "out_specs_fn": said.out_specs_fn,
            "devices": said.devices and [*said.devices],
        }
        return _restore, pack(subject(self._name), self, parts)

    @_jax.core.api_boundary
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function on the hosts; returns its arrays, ready or not."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        for x in leaves:
            if type(x) is not _jax.core.Array or x.is_deleted():
                self._check_arrays(leaves, tree)
        key = fast_key(tree, leaves)
        function = self._functions.find(key)
        if function is None:
            function = self._functions.get(key, tree, leaves, self._make)
        return function(args, kwargs)

    def specialize(
        self,
        in_specs: Any = None,
        out_specs_fn: Callable | None = None,
        devices: Sequence[Any] | Mesh | None = None,
    ) -> ColocatedFunction:
        """Returns the function with more said about it; this one stays as it is.

        Args:
            in_specs: What the arguments have to look like: ``(args, kwargs)`` with a
                `jax.ShapeDtypeStruct` with a sharding for each array.
            out_specs_fn: Takes specs as the function takes arrays, and returns those of its
                results. Runs once per kind of arguments, where the function is called from; with
                it the first call returns at once, too.
            devices: CPU devices, or a mesh of them, that the arrays are on, each in an order of
                its own. A function without arguments needs them.

        Returns:
            Another function.

        Raises:
            OptionError: One of them is said already, or is not of this kind.
        """
        given = {"in_specs": in_specs, "out_specs_fn": out_specs_fn, "devices": devices}
        given = {name: value for name, value in given.items() if value is not None}
        failures = [
            Failure(
                what=f"has its {name} already",
                given=f"specialize({name}=...), twice",
                fix="specialize the function that does not have it yet",
                error=OptionError,
            )
            for name in given
            if getattr(self._specialization, name) is not None
        ]
        refuse(self._name, *failures)
        if "in_specs" in given:
            given["in_specs"] = _in_specs(self._name, self._fun, in_specs)
        if "devices" in given:
            given["devices"] = _devices(self._name, devices)
        said = replace(self._specialization, **given)
        return ColocatedFunction(self._fun, said, self._habit)

    def _check_arrays(self, leaves: Sequence[Any], tree: Any) -> None:
        paths = _specs.argument_paths(self._fun, tree)
        refuse(self._name, *_specs.not_arrays(leaves, paths, "cannot take"))
        refuse(self._name, *_specs.gone(leaves, paths))

    # A function for arguments of a new kind

    def _make(self, specs: Specs) -> Function:
        said = self._specialization
        devices = said.devices and frozenset(said.devices)
        paths = _specs.argument_paths(self._fun, specs.tree)
        if (expected := said.in_specs) is not None:
            what = "was called with another tree than its in_specs"
            refuse(self._name, *_specs.other_tree(expected.tree, specs.tree, what))
            verb = "was called with something else than in_specs as"
            refuse(self._name, *_specs.mismatches(expected.leaves, specs.leaves, paths, verb))
        if devices is None:
            if not specs.leaves:
                failure = Failure(
                    what="has no arguments to tell its devices",
                    expected="arrays as arguments, or devices",
                    fix="specialize it: f.specialize(devices=...)",
                )
                raise explain(subject(self._name), [failure])
            devices = _jax.dispatch.device_list(specs.leaves[0].sharding)
        refuse(self._name, *_specs.elsewhere(devices, specs.leaves, paths, "cannot take"))
        if any(d.platform != "cpu" for d in devices):
            failure = Failure(
                what="cannot run on these devices",
                expected="CPU devices",
                got=f"devices {show_devices(devices)}",
                fix="spmd.colocated_python.colocated_cpu_devices(devices) has those of the same "
                "hosts",
            )
            raise explain(subject(self._name), [failure])
        return Function(self._fun, self._name, specs, devices, said.out_specs_fn, self._habit)


def _restore(version: int, form: bytes) -> ColocatedFunction:
    """Makes the function that another process has pickled."""
    made = ColocatedFunction.__new__(ColocatedFunction)
    fun, *said = unpack(made, version, form).values()
    made.__init__(fun, Specialization())
    made._specialization = made.specialize(*said)._specialization
    return made


def _in_specs(name: str, fun: Callable, in_specs: Any) -> Specs:
    is_pair = isinstance(in_specs, tuple) and len(in_specs) == 2
    if not is_pair or not isinstance(in_specs[0], tuple) or not isinstance(in_specs[1], dict):
        failure = Failure(
            what="cannot use these in_specs",
            expected="(args, kwargs): a tuple with a tuple and a dict",
            got=show_value(in_specs),
            error=OptionError,
        )
        raise explain(subject(name), [failure])
    leaves, tree = jax.tree.flatten(in_specs)
    paths = _specs.argument_paths(fun, tree)
    refuse(name, *_specs.not_specs(leaves, paths, "cannot use what in_specs says of"))
    return Specs(tree, tuple(leaf_of(x) for x in leaves))


def _devices(name: str, devices: Any) -> Any:
    if isinstance(devices, Mesh):
        devices = devices.devices.flat
    devices = [*devices]
    if not devices or not all(isinstance(d, jax.Device) for d in devices):
        failure = Failure(
            what="cannot run on these devices",
            expected="at least one jax.Device, or a mesh",
            got=show_value(devices),
            error=OptionError,
        )
        raise explain(subject(name), [failure])
    mesh = Mesh(np.array(devices), ("devices",))
    return _jax.dispatch.device_list(jax.sharding.NamedSharding(mesh, jax.P()))


# CPU devices on the hosts of other devices


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
        MeshError: A process has fewer CPU devices than accelerators, or JAX started without them.
    """
    if not isinstance(devices_or_mesh, Mesh):
        return tuple(_colocated([*devices_or_mesh]))
    mesh = devices_or_mesh
    devices = np.array(_colocated([*mesh.devices.flat]), object).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _colocated(devices: list[Any]) -> list[Any]:
    if all(d.platform == "cpu" for d in devices):
        return devices
    # Which of the accelerators of its process each is.
    clients = {d.client for d in devices if d.platform != "cpu"}
    accelerators = sorted((d for c in clients for d in c.devices()), key=lambda d: d.id)
    counts = defaultdict(itertools.count)
    places = {d: next(counts[d.client, d.process_index]) for d in accelerators}
    cpus = defaultdict(list)
    for device in _cpu_devices():
        cpus[device.process_index].append(device)

    def stand_in(device: Any) -> Any:
        if device.platform == "cpu":
            return device
        there = cpus[device.process_index]
        if places[device] < len(there):
            return there[places[device]]
        failure = Failure(
            what=f"has no CPU device for {device}",
            expected="as many CPU devices as accelerators in each process",
            got=f"devices {show_devices(there)} in process {device.process_index}",
            fix="set jax_num_cpu_devices to the number of accelerators before JAX starts",
            error=MeshError,
        )
        raise explain("colocated_cpu_devices", [failure])

    return [stand_in(d) for d in devices]


def _cpu_devices() -> Sequence[Any]:
    try:
        return jax.devices("cpu")
    except RuntimeError as e:
        platforms = jax.config.values["jax_platforms"]
        if not platforms:
            raise
        failure = Failure(
            what="finds no CPU devices",
            expected="JAX to start the CPU beside the accelerators",
            got=f"JAX_PLATFORMS={platforms}",
            fix=f"set JAX_PLATFORMS={platforms},cpu before JAX starts, or leave it out",
            error=MeshError,
        )
        raise explain("colocated_cpu_devices", [failure]) from e
