"""Meshes of devices that are not there: TPUs and GPUs by their compilers, CPUs as stand-ins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import re
import threading
from typing import Any

import jax
import numpy as np

from spmd import _jax
from spmd._mesh import Mesh, laid_out, make_mesh, show_mesh
from spmd.errors import (
    ArgumentError,
    Failure,
    MeshError,
    OptionError,
    did_you_mean,
    explain,
)
from spmd.inspection.compile import gpus, libtpu
from spmd.inspection.timing.chips import CHIPS

#: Virtual CPU devices share this machine's cores and threads; more are no use to anyone.
MOST_STAND_INS = 512
# Seven times the largest pod there is; libtpu describes them in two seconds.
_MOST_CHIPS = 65_536


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A generation of TPUs.

    Attributes:
        dims: of the torus of chips.
        ring: on a 2D torus, the length at which an axis closes to a ring: that of a whole pod.
        longest: chips along a dimension at most, where libtpu ends the process that asks for more.
        per_chip: devices that JAX shows for each chip.
        per_type: what the number in an accelerator type such as ``v4-128`` counts for each chip.
        config: libtpu's name of the mode that its chips run in, where the default is another.
    """

    dims: int
    ring: int = 0
    longest: int = _MOST_CHIPS
    per_chip: int = 1
    per_type: int = 1
    config: str = ""

    def wrap(self, sizes: Sequence[int]) -> tuple[bool, ...]:
        """Per dimension whether links close it to a ring, as real slices of these sizes have.

        The compiler rotates data around rings: without them it chooses other collectives. Source:
        "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus): 3D slices are tori where
        all sizes are multiples of 4, 2D ones along axes as long as a pod.
        """
        if self.ring:
            return (*(size == self.ring for size in sizes), False)
        return (all(size % 4 == 0 for size in sizes),) * 3


_KINDS = {
    "v2": _Kind(dims=2, ring=16, per_chip=2, per_type=2),
    "v3": _Kind(dims=2, ring=32, per_chip=2, per_type=2),
    # libtpu shows two devices per chip unless asked for the mode that v4 pods run in.
    "v4": _Kind(dims=3, per_type=2, config="megacore"),
    "v5e": _Kind(dims=2, ring=16, longest=16),
    "v5p": _Kind(dims=3, per_type=2),
    "v6e": _Kind(dims=2, ring=16),
    "tpu7x": _Kind(dims=3, per_chip=2, per_type=2),
}
_ALSO_CALLED = {
    "v5": "v5p",
    "v5 lite": "v5e",
    "v5litepod": "v5e",
    "v6 lite": "v6e",
    "trillium": "v6e",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
}

# What the TPU compiler leaves to a program on one device, in GiB: programs of 384 GiB were compiled
# for each kind with libtpu 0.0.52 on 2026-11-21, and this is "exceeds available HBM (...G)".
_HBM_GIB = {
    "TPU v2": 7.48,
    "TPU v3": 15.48,
    "TPU v4": 30.75,
    "TPU v4 lite": 7.75,
    "TPU v5": 95.73,
    "TPU v5 lite": 15.75,
    "TPU v6 lite": 31.24,
    "TPU7x": 94.74,
}
_SAME_CHIP = {"TPU v5p": "TPU v5", "TPU v5e": "TPU v5 lite", "TPU v6e": "TPU v6 lite"}

_NAME = re.compile(r"([a-z0-9_ ]*[a-z0-9_])\s*:\s*(\d+(?:x\d+)*)")
_ACCELERATOR_TYPE = re.compile(r"([a-z0-9]+)-(\d+)")
_EXAMPLES = "a kind and its sizes, such as 'v5e:16x16', 'v5p:8x16x16', 'h100:64' or 'cpu:64'"


def topology(name: str, mesh: Mapping[str, int] | None = None) -> Mesh:
    """Describes devices that need not be there, as a mesh to lower, compile and report for.

    Nothing is allocated, and arguments are `jax.ShapeDtypeStruct`. The compiler for TPUs is in
    ``libtpu`` (``pip install 'spmd[tpu]'``); it needs no TPU. Slices have the rings that real ones
    of the same sizes have, and axes are laid on the torus as `spmd.make_mesh` does. The compiler
    for GPUs is in JAX's plugin for CUDA (``pip install 'spmd[gpu]'``); it needs no GPU and no
    driver. GPUs are in servers of eight, each a process.

    A device is what JAX shows on the real machine: a chip, or half of one on v2, v3 and tpu7x. A
    v4 chip is one device (libtpu alone would show two).

    Args:
        name: A TPU and the chips of a slice by dimension: ``"v5e:16x16"``, ``"v5p:8x16x16"``; of
            v2, v3, v4, v5e, v5p, v6e, tpu7x or what else the installed libtpu knows. A GPU and
            how many: ``"h100:8"``, ``"h200:64"``. Or ``"cpu:64"``: up to 512 virtual CPU devices
            that stand in for hardware, for those without these compilers. They show what the
            partitioner decides, not what a compiler for the hardware makes of it: see
            `is_stand_in`.
        mesh: Size per axis name, major to minor, for all devices; one size may be -1: what is
            left. Without it, the mesh has a single axis ``device``.

    Returns:
        A mesh; the same devices each time for one name.

    Raises:
        RuntimeError: There is no such topology, sizes do not fit it, or its compiler is missing.
        TypeError: `name` is no string, or `mesh` maps no names to whole numbers.

    Example:
        >>> with topology("v5e:16x16", mesh={"data": 32, "model": 8}):
        ...     compiled = step.lower(state, batch).compile()
    """
    subject = f"topology({name!r})"
    kind, sizes = _parse(name, subject)
    try:
        with _lock:
            devices = _devices(kind, sizes)
    except _RefusedError as e:
        raise explain(subject, [e.args[0]]) from None
    axes = {"device": len(devices)} if mesh is None else mesh
    if failure := _misfit(axes, kind, sizes, len(devices)):
        raise explain(subject, [failure])
    return make_mesh(axes, devices=devices)


def is_described(where: Any) -> bool:
    """Whether programs can be compiled for devices and not run on them.

    Args:
        where: A mesh, a device, or devices.
    """
    return any(map(_jax.mesh.is_described, _devices_of(where)))


def is_stand_in(where: Any) -> bool:
    """Whether devices are CPUs, which stand in for other hardware in a report.

    Args:
        where: A mesh, a device, or devices.
    """
    return any(device.platform == "cpu" for device in _devices_of(where))


def hbm_bytes(device_kind: str) -> int | None:
    """Memory that one device leaves to a program, as the TPU compiler or a GPU's runtime counts it.

    Args:
        device_kind: The device's own name, such as ``"TPU v5 lite"`` or ``"NVIDIA H200"``.

    Returns:
        Bytes: of TPUs to 0.01 GiB, of GPUs the three quarters that JAX takes by default. None for
        kinds that are not known here.
    """
    gib = _HBM_GIB.get(_SAME_CHIP.get(device_kind, device_kind))
    return gpus.limit_of(device_kind) if gib is None else int(gib * 2**30)


def limit_of(device: Any) -> int | None:
    """Bytes that a device leaves to a program: as is known of its kind, or as its runtime says."""
    known = hbm_bytes(device.device_kind)
    if known is not None and device.platform != "gpu":
        return known
    try:
        return (device.memory_stats() or {}).get("bytes_limit", known)
    except (RuntimeError, NotImplementedError, AttributeError):
        return known  # described devices have no runtime, and CPUs no limit


def given_mesh(topology: Any, mesh: Any, subject: str) -> Any:
    """The mesh that is given as one of two options, whose names no topology; None for neither."""
    if topology is not None and mesh is not None:
        given = ", ".join(
            f"{name}={show_mesh(one) if isinstance(one, jax.sharding.Mesh) else repr(one)}"
            for name, one in (("topology", topology), ("mesh", mesh))
        )
        failure = Failure(
            what="got a mesh twice",
            given=given,
            expected="topology='v5e:4x4' with the sizes of its axes as mesh, or one mesh",
            error=OptionError,
        )
        raise explain(subject, [failure])
    found = mesh if topology is None else topology
    if isinstance(found, Mapping):
        return make_mesh(found)
    if found is not None and not isinstance(found, jax.sharding.Mesh):
        failure = Failure(
            what="cannot use this mesh",
            expected="a mesh, or sizes by axis name",
            got=type(found).__name__,
            error=ArgumentError,
        )
        raise explain(subject, [failure])
    return found


def rings_of(kind: str, sizes: Sequence[int]) -> tuple[bool, ...]:
    """Per dimension of a slice whether links close it; none where the kind is not known."""
    known = _KINDS.get(kind)
    return known.wrap(sizes) if known else (False,) * len(sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a device would be, as JAX's own devices tell it."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0


@functools.lru_cache(maxsize=64)
def places_for(kind: str, device_kind: str, sizes: tuple[int, ...]) -> tuple[str, Sequence[Place]]:
    """The slice that a mesh of these sizes would be of, and its places in the order of the mesh.

    It is the most compact one that hosts fill. Both are empty where there is none.

    Args:
        kind: of TPUs, such as ``v5e``.
        device_kind: as JAX calls its devices.
        sizes: of the mesh's axes.
    """
    known = _KINDS.get(kind)
    chips, rest = divmod(math.prod(sizes), known.per_chip) if known else (0, 0)
    shape = _compact(chips, known.dims) if known and chips and not rest else ()
    if known is None or not shape or (known.ring and max(shape) > known.ring):
        return "", ()  # a slice is no larger than a pod
    three = (*shape, 1)[:3]
    coords = (tuple(reversed(at)) for at in itertools.product(*map(range, reversed(three))))
    at = itertools.product(coords, range(known.per_chip))
    places = [Place(i, here, core, device_kind) for i, (here, core) in enumerate(at)]
    grid = laid_out(sizes, places)
    return f"{kind}:{_show(shape)}", tuple(grid.flat)


def _devices_of(where: Any) -> Iterable[Any]:
    return np.asarray(getattr(where, "devices", where), dtype=object).flat


# Names


def _parse(name: Any, subject: str) -> tuple[str, tuple[int, ...]]:
    """The kind and the sizes that a name says."""
    if not isinstance(name, str):
        got = type(name).__name__
        failure = Failure(what="is no name", expected=_EXAMPLES, got=got, error=ArgumentError)
        raise explain(subject, [failure])
    text = name.strip().lower()
    found = _NAME.fullmatch(text)
    if found is None:
        raise explain(subject, [_malformed(text)])
    kind = _ALSO_CALLED.get(found[1], found[1])
    sizes = tuple(map(int, found[2].split("x")))
    if failure := _bad_sizes(kind, sizes):
        raise explain(subject, [failure])
    return kind, sizes


def _malformed(text: str) -> Failure:
    fix = ""
    if found := _ACCELERATOR_TYPE.fullmatch(text):
        fix = _fix_of_type(_ALSO_CALLED.get(found[1], found[1]), int(found[2]))
    elif text.endswith(("_twisted", "_untwisted")):
        fix = "leave out how it is twisted: programs are described for plain tori"
    elif text.rstrip(": ") in (*_KINDS, "cpu"):
        fix = "say how many chips there are by dimension"
    elif text.rstrip(": ") in gpus.KINDS:
        fix = "say how many there are"
    return Failure(what="cannot be read", expected=_EXAMPLES, fix=fix, error=MeshError)


def _fix_of_type(kind: str, number: int) -> str:
    """How to write ``v4-128``, which counts cores on some kinds and has no shape."""
    known = _KINDS.get(kind)
    if known is None or not number or number % known.per_type or number > _MOST_CHIPS:
        return ""
    chips = number // known.per_type
    shape = _show(_compact(chips, known.dims))
    return f"write {kind}:{shape}, which has {_count(chips, 'chip')}" if shape else ""


def _compact(chips: int, dims: int) -> tuple[int, ...]:
    """The most cube-like sizes of so many chips that hosts of 2x2 fill; empty if there are none."""
    divisors = [d for d in range(1, chips + 1) if chips % d == 0]
    rows = [
        (*head, chips // math.prod(head))
        for head in itertools.product(divisors, repeat=dims - 1)
        if chips % math.prod(head) == 0
    ]
    fit = [row for row in rows if chips == 1 or all(size % 2 == 0 for size in row[:2])]
    return min(fit, key=lambda row: (sum(row), row), default=())


def _bad_sizes(kind: str, sizes: tuple[int, ...]) -> Failure | None:
    """What is wrong with the sizes, of which libtpu must not see all: zeros crash it."""
    expected, fix = "", ""
    known = _KINDS.get(kind)
    dims = known.dims if known else 0
    most = MOST_STAND_INS if kind == "cpu" else _MOST_CHIPS
    box = CHIPS[kind].box if kind in gpus.KINDS else 1
    what = "virtual devices" if kind == "cpu" else "GPUs" if kind in gpus.KINDS else "chips"
    if not all(sizes):
        expected = "sizes of at least 1"
    elif kind in gpus.KINDS and len(sizes) != 1:
        expected = f"one size, as in '{kind}:{math.prod(sizes)}'"
    elif dims and len(sizes) != dims:
        example = "v5e:16x16" if kind == "v5e" else f"{kind}:{'x'.join('4' * dims)}"
        expected = f"{'two' if dims == 2 else 'three'} sizes, as in {example!r}"
    elif math.prod(sizes) > most:
        expected = f"at most {most} {what}"
        fix = "describe TPUs instead: pip install 'spmd[tpu]'" if kind == "cpu" else ""
    elif rest := max(sizes[0], box) % box:
        expected = f"whole servers of {box}, or a part of one"
        fix = f"{kind}:{sizes[0] - rest} or {kind}:{sizes[0] - rest + box}"
    elif known and max(sizes) > known.longest:
        expected = f"at most {known.longest} chips along a dimension, as a pod has"
    if not expected:
        return None
    got = _show(sizes) + (f" = {math.prod(sizes)}" if len(sizes) > 1 else "")
    return Failure(what="has no such sizes", expected=expected, got=got, fix=fix, error=MeshError)


def _show(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# Axes


def _misfit(axes: Any, kind: str, sizes: tuple[int, ...], devices: int) -> Failure | None:
    """Sizes of axes that are all given, and do not take all devices; the rest is make_mesh's."""
    given: Any = axes.values() if isinstance(axes, Mapping) else [None]
    if not all(isinstance(size, (int, np.integer)) and size > 0 for size in given):
        return None
    product, chips = math.prod(given), math.prod(sizes)
    if product == devices:
        return None
    number = f"{devices}, the number of devices: {chips} chips of {devices // chips} each"
    if chips == devices:
        number = f"{devices}, the number of {'chips' if kind in _KINDS else 'devices'}"
    # Sizes that fit and differ in one axis from what was asked for.
    rest = {name: product // size for name, size in axes.items()}
    fitting = [f"{n}={devices // other}" for n, other in rest.items() if devices % other == 0]
    return Failure(
        what="cannot be a mesh of these axes",
        given=", ".join(f"{n}={s}" for n, s in axes.items()),
        expected=f"sizes whose product is {number}",
        got=" * ".join(map(str, given)) + (f" = {product}" if len(axes) > 1 else ""),
        fix=" or ".join(fitting) or f"choose sizes that divide {devices}",
        error=MeshError,
    )


# Devices

# Two threads that ask for one topology get one set of devices.
_lock = threading.Lock()


class _RefusedError(Exception):
    """Holds the `Failure` for what was asked, whatever it was called."""


def _stand_ins(sizes: tuple[int, ...]) -> list[Any]:
    """This process's own CPU devices where it has enough: programs can be run on them too."""
    count = math.prod(sizes)
    try:
        own = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves out the CPU
        own = []
    return own[:count] if count <= len(own) else _virtual(count)


_virtual = functools.lru_cache(maxsize=16)(_jax.mesh.new_cpu_devices)


def _devices(kind: str, sizes: tuple[int, ...]) -> list[Any]:
    if kind == "cpu":
        return _stand_ins(sizes)
    if kind not in gpus.KINDS:
        return _described(kind, sizes)
    try:
        return gpus.described(kind, math.prod(sizes))
    except gpus.MissingError:
        missing = Failure(
            what="needs the compiler for GPUs, which is not installed",
            fix="pip install 'spmd[gpu]', or let CPU devices stand in: topology('cpu:64')",
            error=MeshError,
        )
        raise _RefusedError(missing) from None
    except jax.errors.JaxRuntimeError as e:
        raise _RefusedError(_refused_by("the compiler for GPUs", e)) from None


@functools.lru_cache(maxsize=32)
def _described(kind: str, sizes: tuple[int, ...]) -> list[Any]:
    from jax.experimental import topologies

    if not (os.environ.get("TPU_LIBRARY_PATH") or importlib.util.find_spec("libtpu")):
        missing = Failure(
            what="needs the TPU compiler, which is not installed",
            fix="pip install 'spmd[tpu]', or let CPU devices stand in: topology('cpu:64')",
            error=MeshError,
        )
        raise _RefusedError(missing if kind in _KINDS else _unknown_kind(kind))
    known = _KINDS.get(kind)
    options: dict[str, Any] = {}
    if known and known.config:
        options["chip_config_name"] = known.config
    if known and any(known.wrap(sizes)):
        options["wrap"] = known.wrap(sizes)
    if 1 in sizes[:2]:
        # A part of a host, which older releases describe only when they are told so.
        options["chips_per_host_bounds"] = [min(2, size) for size in sizes[:2]] + [1]
    try:
        with libtpu.quiet():
            found = topologies.get_topology_desc(f"{kind}:{_show(sizes)}", "tpu", **options)
    except jax.errors.JaxRuntimeError as e:
        raise _RefusedError(_refused(str(e), kind, sizes)) from None
    return list(found.devices)


def _unknown_kind(kind: str) -> Failure:
    return Failure(
        what=f"names a kind that is not known{did_you_mean(kind, (*_KINDS, *gpus.KINDS, 'cpu'))}",
        expected=f"a TPU ({', '.join(_KINDS)}), a GPU ({', '.join(gpus.KINDS)}) or cpu",
        got=repr(kind),
        error=MeshError,
    )


def _refused(message: str, kind: str, sizes: tuple[int, ...]) -> Failure:
    """Why libtpu describes no such devices."""
    if "Invalid TPU external name" in message:
        return _unknown_kind(kind)
    if "is not divisible by" in message:
        even = tuple(s + s % 2 if s > 1 and i < 2 else s for i, s in enumerate(sizes))
        return Failure(
            what="has no such sizes",
            expected="sizes that whole hosts fill, which have 2x2 chips",
            got=f"{_show(sizes)} = {math.prod(sizes)}",
            fix=f"{kind}:{_show(even)}, which has {_count(math.prod(even), 'chip')}",
            error=MeshError,
        )
    return _refused_by("libtpu", message)


def _refused_by(compiler: str, message: Any) -> Failure:
    got = str(message).partition("\n")[0]
    return Failure(what=f"was refused by {compiler}", got=got, error=MeshError)
