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
from spmd._pmap._options import UNNAMED, PmapOptions
from spmd.errors import Failure, MeshError, OptionError, explain


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


class Nest:
    """The levels of an outermost `pmap` that is being traced.

    Attributes:
        levels: Those that are known.
        depth: How many are open where the trace is.
        complete: Whether `levels` were all that the trace met.
    """

    def __init__(self, options: PmapOptions, levels: Sequence[Level]):
        self.options = options
        self.levels = [*levels]
        self.depth = 0
        self.complete = True

    @property
    def names(self) -> tuple[Hashable, ...]:
        """The axes of the mesh."""
        return tuple(
            UNNAMED + (str(i + 1) if i else "") if level.name is None else level.name
            for i, level in enumerate(self.levels)
        )

    def mesh(self) -> Any:
        """The mesh of the levels that are known.

        Raises:
            ValueError: There are too few devices.
        """
        sizes = tuple(level.size for level in self.levels)
        return _mesh(self.options, self.names, sizes)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """While a function of one device is traced: the next level is below it."""
        outer, _here.nest = _nest(), self
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            _here.nest = outer

    def axis(self, options: PmapOptions, size: int) -> Hashable:
        """Returns the axis of the mesh for a `pmap` that was met in the trace.

        Raises:
            ValueError: It does not go with the levels around it, or beside it.
            Deeper: The mesh has no such axis yet.
        """
        name = None if options.axis_name == UNNAMED else options.axis_name
        level = Level(name, size, options.subject)
        failures = _alone_failures(options, self.options)
        failures += [
            _taken_failure(name, other.subject)
            for other in self.levels[: self.depth]
            if name is not None and other.name == name
        ]
        known = self.levels[self.depth] if self.depth < len(self.levels) else None
        if known is not None and known.size != size:
            failures.append(_sibling_failure("size", size, known.size, known.subject))
        if known is not None and None not in (name, known.name) and known.name != name:
            failures.append(_sibling_failure("axis_name", name, known.name, known.subject))
        if failures:
            raise explain(options.subject, failures)
        if known is None or (name is not None and known.name is None):
            self.levels[self.depth : self.depth + 1] = [level]
            self.complete = False
            self.mesh()  # too few devices are said where the user's code is
            raise Deeper
        return self.names[self.depth]


_here = threading.local()


def _nest() -> Nest | None:
    return getattr(_here, "nest", None)


def nest_here() -> Nest | None:
    """The `pmap` whose function is being traced in this thread."""
    return None if _jax.trace_state_clean() else _nest()


def run_in_nest(options: PmapOptions, size: int, run: Callable[[Nest], Any]) -> Any:
    """Calls `run` with the levels of an outermost `pmap`, until a trace meets no further one."""
    levels = [Level(None if options.axis_name == UNNAMED else options.axis_name, size, "")]
    while True:
        nest = Nest(options, levels)
        outer, _here.nest = _nest(), None
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


@functools.lru_cache(maxsize=1024)
def _mesh(options: PmapOptions, names: tuple[Hashable, ...], sizes: tuple[int, ...]) -> Any:
    devices, size = options.devices, math.prod(sizes)
    if devices is None:
        devices = tuple(jax.devices(options.backend))
    if len(devices) < size:
        raise explain(options.subject, [_device_failure(options, sizes, len(devices))])
    return jax.sharding.Mesh(np.array(devices[:size]).reshape(sizes), names)


_jax.register_cache(_mesh, "meshes of pmap")


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
            error=MeshError,
        )
    what = "the size of the mapped axis" if len(sizes) == 1 else "the product of the mapped axes"
    return Failure(
        what="needs another number of devices",
        given=f"devices= with {count}",
        expected=f"{product}, {what}",
        error=MeshError,
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
        expected="another name than the pmap around it has",
        fix="name each level differently, or leave the inner name out",
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
