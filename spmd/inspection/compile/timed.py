"""How long a program takes on the chips that it is for, or on others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

from spmd.errors import ArgumentError, Failure, explain
from spmd.inspection.compile.topology import rings_of
from spmd.inspection.hlo.calls import Modules
from spmd.inspection.hlo.groups import expand_replica_groups
from spmd.inspection.records.report import Collective
from spmd.inspection.records.time import Exchange, Time
from spmd.inspection.timing.boxes import Boxes
from spmd.inspection.timing.chips import Chip, chip_of, read_chip
from spmd.inspection.timing.clock import PREDICTED, Links, time_of
from spmd.inspection.timing.torus import torus_of

_RINGS = "the places of the chips are not known: each mesh axis is taken as a ring of its own"
_BESIDE = "no exchange is taken to run beside work, and main memory is left out"
_NEIGHBOURS = "a permute is taken to send to the next device along its axes"
_STAND_IN = "the CPU's compiler fuses, widens and orders otherwise than that of the chip"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a user says of time: a chip, and the FLOPs of a model; None for what is known."""

    chip: Chip | None = None
    model_flops: float | None = None


def asked(chip: Any, model_flops: Any, *, subject: str) -> Asked:
    """Reads ``chip=`` and ``model_flops=``."""
    is_number = isinstance(model_flops, (int, float)) and not isinstance(model_flops, bool)
    if model_flops is not None and not (is_number and 0 < model_flops < math.inf):
        failure = Failure(
            what="cannot read model_flops",
            expected="a number above 0: floating-point operations of one call on all devices",
            got=repr(model_flops)[:100],
            error=ArgumentError,
        )
        raise explain(subject, [failure])
    return Asked(chip=read_chip(chip, subject), model_flops=model_flops)


def time_of_program(
    modules: Modules, axis_sizes: Mapping[str, int], devices: Sequence[Any], wish: Asked
) -> Time | None:
    """The time of a compiled program; None where the figures of its devices are not known.

    Args:
        modules: of the program, with how their computations run; the last one is what is timed.
        axis_sizes: of its mesh.
        devices: that it is for, in their order.
        wish: what the user says of it.
    """
    own = chip_of(devices[0].device_kind)
    chip = wish.chip or own
    if chip is None or not modules:
        return None
    links, doubts = _links(chip, devices, axis_sizes)
    if links is None:
        return None
    if devices[0].platform == "cpu":
        doubts = (*doubts, _STAND_IN)
    cycles = own is not None and own.name == chip.name
    module, visited = modules[-1]
    time = time_of(module, visited, axis_sizes, chip, links, cycles=cycles)
    return dataclasses.replace(time, unknown=(*time.unknown, *doubts))


def with_scatters(time: Time, found: Iterable[Collective]) -> Time:
    """A time that says which all-reduces of a CPU's program it counts whole."""
    count = sum(bool(one.sliced) for one in found)
    if not count:
        return time
    some = "an all-reduce" if count == 1 else f"{count} all-reduces"
    text = f"{some} that hardware would reduce-scatter: counted whole, about twice as long"
    return dataclasses.replace(time, unknown=(*time.unknown, text))


def time_of_prediction(
    found: Iterable[Collective],
    axis_sizes: Mapping[str, int],
    devices: Sequence[Any],
    chip: Chip,
    flops: int,
) -> Time | None:
    """The time of a program that is not compiled: that of its products and of its exchanges.

    Args:
        found: what the program exchanges.
        axis_sizes: of its mesh.
        devices: that it is for, in their order; none for an abstract mesh.
        chip: whose figures to use.
        flops: of the products of a device in one call.
    """
    links, doubts = _links(chip, devices, axis_sizes)
    if links is None:
        return None
    exchanges = []
    for i, one in enumerate(found):
        operand, result = (sum(shape.nbytes for shape in side) for side in one.shapes)
        groups = _groups(one, axis_sizes)
        seconds = links.transfer(one.kind, groups, operand, result).seconds * (one.executions or 0)
        exchanges.append(
            Exchange(
                name=one.name or str(i),
                mesh_axes=one.mesh_axes,
                source=one.source,
                seconds=seconds,
                exposed=seconds,
            )
        )
        if one.kind == "collective-permute":
            doubts = (*doubts, _NEIGHBOURS)
        if one.executions is None:
            doubts = (*doubts, "an exchange that runs an unknown number of times is left out")
    compute = flops / chip.flops
    seconds = compute + sum(one.seconds for one in exchanges)
    return Time(
        chip=chip.name,
        seconds=seconds,
        compute=compute,
        memory=0.0,
        exchanges=tuple(exchanges),
        hardware_flops=flops,
        hfu=compute / seconds if seconds else 0.0,
        source="predicted",
        unknown=(PREDICTED_PRODUCTS, _BESIDE, *dict.fromkeys(doubts)),
    )


PREDICTED_PRODUCTS = PREDICTED[0].partition(",")[0]


def with_model_flops(
    time: Time, model_flops: float | None, wish: Asked, devices: Sequence[Any], count: int = 0
) -> Time:
    """A time with its MFU, where the FLOPs of one call on all devices are known."""
    chip = wish.chip or (chip_of(devices[0].device_kind) if devices else None)
    if not model_flops or not time.seconds or chip is None:
        return time
    mfu = model_flops / ((len(devices) or count) * chip.flops * time.seconds)
    return dataclasses.replace(time, model_flops=round(model_flops), mfu=mfu)


def _groups(one: Collective, axis_sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """Logical devices that exchange with each other, as the axes say; of a permute, the pairs."""
    mesh = ",".join(f"'{name}'={size}" for name, size in axis_sizes.items())
    # A part that no name describes counts as all of its axis.
    refs = (axis.removesuffix(":part").partition(":") for axis in one.mesh_axes)
    names = ",".join(f"'{name}'{colon}{part}" for name, colon, part in refs)
    groups = expand_replica_groups(f"mesh[{mesh}] {{{names}}}")
    if one.kind != "collective-permute":
        return groups
    return tuple(
        pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)
    )


def _links(
    chip: Chip, devices: Sequence[Any], axis_sizes: Mapping[str, int]
) -> tuple[Links | None, tuple[str, ...]]:
    """What joins devices, and what is assumed of it; None for several slices."""
    count = len(devices) or math.prod(axis_sizes.values())
    if chip.box:
        own = devices and devices[0].platform == "gpu"
        ids = [device.id for device in devices] if own else range(count)
        boxes = tuple(i // chip.box for i in ids)
        return Boxes(boxes=boxes, link=chip.link, across=chip.across, hop=chip.hop), ()
    if len({getattr(device, "slice_index", 0) for device in devices}) > 1:
        return None, ()
    coords = [getattr(device, "coords", None) or () for device in devices]
    if not all(coords) or not coords:
        sizes = tuple(axis_sizes.values()) or (count,)
        places = tuple(itertools.product(*map(range, sizes)))
        rings = tuple(size > 2 for size in sizes)
        return torus_of(sizes, rings, chip.link, 0.0, chip.hop, places), (_RINGS,)
    places = [tuple(place) for place in coords]
    lowest = [min(column) for column in zip(*places, strict=True)]
    sizes = tuple(
        max(column) - low + 1 for column, low in zip(zip(*places, strict=True), lowest, strict=True)
    )
    own = chip_of(devices[0].device_kind)
    rings = rings_of(own.name if own else "", sizes)
    places = [tuple(n - low for n, low in zip(place, lowest, strict=True)) for place in places]
    if chip.on_chip:
        cores = [getattr(device, "core_on_chip", 0) for device in devices]
        places = [(*place, core) for place, core in zip(places, cores, strict=True)]
        sizes, rings = (*sizes, max(cores) + 1), (*rings, False)
    return torus_of(sizes, rings, chip.link, chip.on_chip, chip.hop, tuple(places)), ()
