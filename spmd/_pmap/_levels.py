"""A `pmap` in a `pmap`: one mesh with an axis per level.

How deep a function maps is known only when it is traced, while the mesh has to be known before. So
the outermost `pmap` begins with one axis; an inner one that finds no axis of its own says so by
:class:`Deeper`, and the trace begins anew with one more. Each level is a `shard_map` over its own
axis alone: one over all axes would take the values between two levels for those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
import contextlib
import functools
import math
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd import _jax
from spmd._mesh import enclosing_pjit
from spmd._pmap._options import UNNAMED, PmapOptions, parse
from spmd.errors import Failure, MeshError, OptionError, explain, refuse


class DeviceCountError(MeshError, ValueError):
    """A mapped axis needs another number of devices; a ValueError as in the classic API."""

    __module__ = "spmd"


class Level(NamedTuple):
    """The mapped axis of a `pmap`, counted from the outermost.

    Attributes:
        name: The name that the user gave it, or None.
        size: Its size.
        subject: Whose axis it is, in a message.
    """

    name: Hashable | None
    size: int
    subject: str


class Deeper(BaseException):
    """Ends a trace that met a further level; no error, and nothing for users to catch."""


class Part(NamedTuple):
    """Where a value comes from that a function of one device is called with.

    Attributes:
        value: The value.
        leaf: Which leaf of the outermost arguments it is a part of.
        dims: Per dimension that it has, which one of the leaf that is.
    """

    value: Any
    leaf: int
    dims: tuple[int, ...]


class Nest:
    """The levels of an outermost `pmap` that is being traced.

    Attributes:
        levels: Those that are known.
        depth: How many are open where the trace is.
        complete: Whether `levels` were all that the trace met.
        splits: Per leaf of the outermost arguments ``{dimension: axis}`` of inner levels.
        made: The mesh, where a rule of a function is being traced that was traced before.
    """

    def __init__(self, options: PmapOptions, levels: Sequence[Level], made: Any = None):
        self.options = options
        self.levels = [*levels]
        self.depth = 0
        self.complete = True
        self.splits: dict[int, dict[int, Hashable]] = {}
        self.made = made
        self._parts: list[Sequence[Part]] = []

    @property
    def names(self) -> tuple[Hashable, ...]:
        """The axes of the mesh: those that have no name get one that no other has."""
        given = {level.name for level in self.levels}
        names = []
        for i, level in enumerate(self.levels):
            name = UNNAMED + (str(i + 1) if i else "")
            while name in given:
                name += "_"
            names.append(name if level.name is None else level.name)
        return tuple(names)

    def mesh(self) -> Any:
        """The mesh of the levels that are known."""
        if self.made is not None:
            return self.made
        options, sizes = self.options, tuple(level.size for level in self.levels)
        devices = devices_of(options, math.prod(sizes))
        if len(devices) < math.prod(sizes):
            raise explain(options.subject, [_device_failure(options, sizes, len(devices))])
        return _mesh(tuple(devices), self.names, sizes)

    @property
    def innermost(self) -> bool:
        """Whether no level is below those that are open, as far as is known."""
        return self.depth >= len(self.levels)

    @contextlib.contextmanager
    def open(self, parts: Sequence[Part]) -> Iterator[None]:
        """While a function of one device is traced, with these arguments.

        Types say for which axes of the mesh a value is one of one device, and JAX refuses to mix
        values of two levels. So above the innermost they say no mesh.
        """
        outer, _here.nest = _here.nest, self
        mesh = contextlib.nullcontext() if self.innermost else _jax.mesh.abstract_mesh_set(None)
        self._parts.append(parts)
        try:
            with mesh:
                yield
        finally:
            self._parts.pop()
            _here.nest = outer

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """While the next level is entered: its `shard_map` needs the mesh of the last one."""
        outside = _jax.mesh.partly_manual(self.mesh(), self.names[: self.depth])
        with _jax.mesh.abstract_mesh_set(outside):
            yield

    def origin(self, value: Any) -> Part | None:
        """Where an argument of the next level comes from, if that is known."""
        parts = self._parts[-1] if self._parts else ()
        return next((p for p in parts if p.value is value), None)

    def split(self, part: Part, dim: int, axis: Hashable) -> None:
        """Takes down that an inner level maps a dimension of an argument."""
        split = self.splits.setdefault(part.leaf, {})
        if axis not in split.values():
            split.setdefault(part.dims[dim], axis)

    def axis(self, options: PmapOptions, size: int) -> Hashable:
        """Returns the axis of the mesh for a `pmap` met in the trace; Deeper if it has none yet."""
        name = options.axis_name
        level = Level(name, size, options.subject)
        failures = _alone_failures(options, self.options)
        failures += [
            _taken_failure(name, other.subject)
            for i, other in enumerate(self.levels)
            if name is not None and other.name == name and i != self.depth
        ]
        known = self.levels[self.depth] if self.depth < len(self.levels) else None
        if known is not None and known.size != size:
            failures.append(_sibling_failure("size", size, known.size, known.subject))
        if known is not None and None not in (name, known.name) and known.name != name:
            failures.append(_sibling_failure("axis_name", name, known.name, known.subject))
        refuse(options.subject, failures)
        if known is None and self.made is not None:
            raise explain(options.subject, [_rule_failure(self.levels[0].subject)])
        if known is None or (name is not None and known.name is None):
            self.levels[self.depth : self.depth + 1] = [level]
            self.complete = False
            self.mesh()  # too few devices are said where the user's code is
            raise Deeper
        return self.names[self.depth]


class _Here(threading.local):
    """The `pmap` whose function this thread is tracing."""

    nest: Nest | None = None


_here = _Here()

#: Stands for options that are not known any more: every device may be chosen, none was.
_OUTER = parse(
    lambda: None,
    axis_name=None,
    in_axes=0,
    out_axes=0,
    static_broadcasted_argnums=(),
    devices=None,
    backend=None,
    axis_size=None,
    donate_argnums=(),
    global_arg_shapes=None,
)


def nest_here() -> Nest | None:
    """The `pmap` whose function is being traced in this thread."""
    if _jax.core.trace_state_clean():
        return None
    return _here.nest or _rule_nest()


def _rule_nest() -> Nest | None:
    """The `pmap` of whose function a rule of `custom_vjp` or the like is traced only now."""
    mesh, subject = enclosing_pjit() or (None, "")
    if mesh is None or not subject.startswith("pmap of"):
        return None
    bound = _jax.mesh.bound_axes()
    depth = next((i for i, n in enumerate(mesh.axis_names) if n not in bound), len(mesh.shape))
    if not depth:
        return None
    levels = [Level(n, s, subject) for n, s in mesh.shape.items()]
    nest = Nest(_OUTER, levels, mesh)
    nest.depth = depth
    return nest


def run_in_nest(options: PmapOptions, size: int, run: Callable[[Nest], Any]) -> Any:
    """Calls `run` with the levels of an outermost `pmap`, until a trace meets no further one."""
    levels = [Level(options.axis_name, size, options.subject)]
    while True:
        nest = Nest(options, levels)
        outer, _here.nest = _here.nest, None
        try:
            result = run(nest)
        except Deeper:
            if nest.complete:
                raise  # of another one
            result = None
        finally:
            _here.nest = outer
        if nest.complete:
            _check_devices(options, levels)
            return result
        levels = nest.levels


def _check_devices(options: PmapOptions, levels: Sequence[Level]) -> None:
    """Refuses a list of devices that is longer than all levels need."""
    sizes = tuple(level.size for level in levels)
    if options.devices is not None and len(options.devices) != math.prod(sizes):
        raise explain(options.subject, [_device_failure(options, sizes, len(options.devices))])


def devices_of(options: PmapOptions, size: int) -> Sequence[Any]:
    """The devices to run on, at most `size`; of several processes as many of each."""
    devices, processes = options.devices, jax.process_count()
    if devices is None:
        devices = jax.devices(options.backend)
        if processes > 1:
            own = [[d for d in devices if d.process_index == p] for p in range(processes)]
            devices = [d for held in own for d in held[: size // processes]]
    return devices[:size]


@functools.lru_cache(maxsize=1024)
def _mesh(devices: tuple[Any, ...], names: tuple[Hashable, ...], sizes: tuple[int, ...]) -> Any:
    return jax.sharding.Mesh(np.array(devices).reshape(sizes), names)


_jax.core.register_cache(_mesh, "meshes of pmap")


# Failures


def _device_failure(options: PmapOptions, sizes: tuple[int, ...], count: int) -> Failure:
    product = " x ".join(map(str, sizes))
    if options.devices is None:
        platform = jax.devices(options.backend)[0].platform
        one = f"a mapped axis of size {count} or less: each element has a device"
        many = f"mapped axes of sizes whose product is {count} or less"
        return Failure(
            what=f"needs {product} devices",
            expected=one if len(sizes) == 1 else many,
            got=f"{count} {platform} devices",
            fix="map with jax.vmap, or with pmap of vmap over [devices, elements of each]",
            error=DeviceCountError,
        )
    what = "the size of the mapped axis" if len(sizes) == 1 else "the product of the mapped axes"
    return Failure(
        what="needs another number of devices",
        given=f"devices= with {count}",
        expected=f"{product}, {what}",
        error=DeviceCountError,
    )


def _alone_failures(inner: PmapOptions, outer: PmapOptions) -> list[Failure]:
    given = {"devices": inner.devices is not None}
    given["backend"] = inner.backend is not None and inner.backend != outer.backend
    return [
        Failure(
            what=f"cannot choose its {option} inside of {outer.subject}",
            given=f"{option}={getattr(inner, option)!r}"[:100],
            fix=f"say {option} where the outermost pmap is made; it counts for all of them",
            error=OptionError,
        )
        for option, is_given in given.items()
        if is_given
    ]


def _taken_failure(name: Hashable, subject: str) -> Failure:
    return Failure(
        what=f"cannot map over the axis {name!r} a second time",
        given=f"axis_name={name!r}",
        expected=f"another name than that of {subject}",
        fix="name each level differently, or leave the inner name out",
        error=OptionError,
    )


def _rule_failure(subject: str) -> Failure:
    return Failure(
        what=f"maps deeper than {subject}, in a rule of a function that it calls",
        expected="in rules of custom_jvp and custom_vjp only levels that the function has, too",
        fix="map with jax.vmap in the rule",
        error=OptionError,
    )


def _sibling_failure(what: str, own: Any, other: Any, subject: str) -> Failure:
    return Failure(
        what=f"has another {what} than {subject}, which the same function calls",
        expected=f"{other!r}: the devices form one grid for the whole function",
        got=repr(own),
        fix=f"give both the same {what}, or map one of them with jax.vmap",
        error=OptionError,
    )
