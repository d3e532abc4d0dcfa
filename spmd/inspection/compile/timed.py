"""How long a program takes on the chips that it is for, or on others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import itertools
import math
import numbers
from typing import Any

from spmd.errors import ArgumentError, Failure, ReportError, explain
from spmd.inspection.compile.topology import places_for, rings_of
from spmd.inspection.hlo.calls import Modules
from spmd.inspection.hlo.groups import expand_replica_groups, groups_along
from spmd.inspection.records.report import Collective
from spmd.inspection.records.time import UNKNOWN_TIMES, Exchange, Time
from spmd.inspection.shardy.exchanges import Exchanges
from spmd.inspection.shardy.flops import Work, model_work
from spmd.inspection.shardy.passes import module_of
from spmd.inspection.timing.boxes import Boxes
from spmd.inspection.timing.chips import Chip, chip_of, device_kind_of, read_chip
from spmd.inspection.timing.clock import ASSUMED_PEAK, Links, time_of
from spmd.inspection.timing.torus import Torus, torus_of

_RINGS = "the places of the chips are not known: each mesh axis is taken as a ring of its own"
_SLICE = "the places of the chips are not known: taken as those that make_mesh gives on {}"
_BESIDE = "no exchange is taken to run beside work, and main memory is left out"
_NEIGHBOURS = "a permute is taken to send to the next device along its axes"
_STAND_IN = "the CPU's compiler fuses, widens and orders otherwise than that of the chip"
_ALONE = "exchanges were not measured: they are taken to be as fast as main memory"
_ONCE = f"a loop with products runs {UNKNOWN_TIMES}: once here"
_NO_MFU = "the MFU is not known, {}: give model_flops="
_LESS_MFU = "the MFU leaves out the kernel {}, which has no cost_estimate: give model_flops="


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a user says of time: a chip, and the FLOPs of a model; None for what is known."""

    chip: Chip | None = None
    model_flops: float | None = None


def asked(chip: Any, model_flops: Any, *, subject: str) -> Asked:
    """Reads ``chip=`` and ``model_flops=``."""
    is_number = isinstance(model_flops, numbers.Real) and not isinstance(model_flops, bool)
    failures = []
    if model_flops is not None and not (is_number and 0 < float(model_flops) < math.inf):
        failure = Failure(
            what="cannot read model_flops",
            expected="a number above 0: floating-point operations of one call on all devices",
            got=repr(model_flops)[:100],
            error=ArgumentError,
        )
        failures.append(failure)
    found = read_chip(chip, subject)
    if found is not None and (why := _wrong_figures(found)):
        failure = Failure(
            what=f"cannot use the chip {found.name!r}",
            expected=why,
            got=repr(found),
            error=ArgumentError,
        )
        failures.append(failure)
    if failures:
        raise explain(subject, failures)
    return Asked(chip=found, model_flops=None if model_flops is None else float(model_flops))


def _wrong_figures(chip: Chip) -> str:
    """What the figures of a chip have to be and are not; empty where they are right."""
    figures = dataclasses.asdict(chip)
    if not isinstance(figures.pop("name"), str):
        return "a name that is text"
    doubled = figures.pop("doubled")
    if not isinstance(doubled, tuple) or not all(isinstance(one, str) for one in doubled):
        return "doubled to be a tuple of element types"
    for name, value in figures.items():
        above = name in ("cores", "flops", "hbm", "link", "product_share") or (
            name == "across" and bool(chip.box)
        )
        whole = name in ("box", "cores", "multipliers")
        kind = numbers.Integral if whole else numbers.Real
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not 0 <= float(value) < math.inf or (above and not value):
            number = "whole number" if whole else "finite number"
            return f"{name} to be a {number} {'above 0' if above else 'of at least 0'}"
    return ""


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
    links, doubts = links_of(chip, devices, axis_sizes)
    if links is None:
        return None
    if devices[0].platform == "cpu":
        doubts = (*doubts, _STAND_IN)
    elif own is None or own.name != chip.name:
        doubts = (*doubts, _STAND_IN.replace("the CPU", devices[0].device_kind))
    cycles = own is not None and own.name == chip.name and chip.multipliers > 0
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
    found: Exchanges,
    axis_sizes: Mapping[str, int],
    devices: Sequence[Any],
    chip: Chip,
    work: Work,
) -> Time | None:
    """The time of a program that is not compiled: that of its products and of its exchanges.

    Args:
        found: what the program exchanges; of those that are sent together the first has the delay.
        axis_sizes: of its mesh.
        devices: that it is for, in their order; none for an abstract mesh.
        chip: whose figures to use.
        work: the products of a device in one call.
    """
    links, doubts = links_of(chip, devices, axis_sizes)
    if links is None:
        return None
    exchanges = []
    begun: set[int] = set()
    for one, number in zip(*found, strict=True):
        operand, result = (sum(shape.nbytes for shape in side) for side in one.shapes)
        groups = _groups(one, axis_sizes)
        seconds = links.transfer(one.kind, groups, operand, result).seconds
        if number in begun:
            seconds -= links.transfer(one.kind, groups, 0, 0).seconds
        if number is not None:
            begun.add(number)
        seconds *= one.executions or 0
        exchanges.append(
            Exchange(
                name=one.name,
                mesh_axes=one.mesh_axes,
                source=one.source,
                seconds=seconds,
                exposed=seconds,
            )
        )
        if one.kind == "collective-permute" and not one.groups:
            doubts = (*doubts, _NEIGHBOURS)
        if one.executions is None:
            doubts = (*doubts, f"an exchange that runs {UNKNOWN_TIMES} is left out")
    doubts = (*doubts, *[_ONCE] * work.loops)
    doubts += tuple(f"the kernel {one} has no cost_estimate: left out" for one in work.left_out)
    compute = work.taken / chip.kept
    seconds = compute + sum(one.seconds for one in exchanges)
    return Time(
        chip=chip.name,
        seconds=seconds,
        compute=compute,
        memory=0.0,
        exchanges=tuple(exchanges),
        hardware_flops=work.flops,
        hfu=work.taken / (chip.flops * seconds) if seconds else 0.0,
        source="predicted",
        unknown=(ASSUMED_PEAK, _BESIDE, *dict.fromkeys(doubts)),
    )


def with_model_flops(
    time: Time, lowered: Any, wish: Asked, devices: Sequence[Any], count: int = 0
) -> Time:
    """A time with its MFU, where the FLOPs of one call on all devices are known.

    Args:
        time: of the program.
        lowered: what it was compiled from; None where that is gone.
        wish: what the user says of it.
        devices: that it is for.
        count: of devices, where they are not known.
    """
    chip = wish.chip or (chip_of(devices[0].device_kind) if devices else None)
    flops = taken = wish.model_flops
    if flops is None:
        work, doubts = _model_work(lowered, chip)
        time = dataclasses.replace(time, unknown=(*time.unknown, *doubts))
        if work is not None:
            flops, taken = work.flops, work.taken
    if flops is None or taken is None or chip is None:
        return time
    peak = (len(devices) or count) * chip.flops * time.seconds
    return dataclasses.replace(time, model_flops=round(flops), mfu=taken / peak if peak else None)


def _model_work(lowered: Any, chip: Chip | None) -> tuple[Work | None, tuple[str, ...]]:
    """The products of a program as it was written, and what is not known of them."""
    if lowered is None:
        return None, (_NO_MFU.format("since the program was compiled elsewhere"),)
    try:
        work = model_work(module_of(lowered, subject="report"), chip)
    except ReportError:  # lowered for another partitioner
        return None, (_NO_MFU.format("since the program was lowered without Shardy"),)
    if work.loops:
        return None, (_NO_MFU.format(f"since a loop with products runs {UNKNOWN_TIMES}"),)
    return work, tuple(map(_LESS_MFU.format, work.left_out))


def _groups(one: Collective, axis_sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """Logical devices that exchange with each other, as the axes say; of a permute, the pairs."""
    if one.groups:
        return expand_replica_groups(one.groups)
    groups = groups_along(one.mesh_axes, axis_sizes)
    if one.kind != "collective-permute":
        return groups
    return tuple(
        pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)
    )


def links_of(
    chip: Chip, devices: Sequence[Any], axis_sizes: Mapping[str, int]
) -> tuple[Links | None, tuple[str, ...]]:
    """What joins devices, and what is assumed of it; None for several slices."""
    count = len(devices) or math.prod(axis_sizes.values())
    if chip.box:
        own = devices and devices[0].platform == "gpu"
        ids = [device.id for device in devices] if own else range(count)
        boxes = tuple(i // chip.box for i in ids)
        alone = (_ALONE,) * (chip.box == 1 and count > 1)
        return Boxes(boxes=boxes, link=chip.link, across=chip.across, hop=chip.hop), alone
    if len({getattr(device, "slice_index", 0) for device in devices}) > 1:
        return None, ()
    coords = [getattr(device, "coords", None) or () for device in devices]
    known = all(coords) and bool(coords)
    doubts: tuple[str, ...] = ()
    # Two devices of one place need a link on the chip, which another kind of chip may not have.
    if not known or (len({*map(tuple, coords)}) < len(coords) and not chip.on_chip):
        sizes = tuple(axis_sizes.values()) or (count,)
        name, devices = places_for(chip.name, device_kind_of(chip), sizes)
        if not devices:
            places = tuple(itertools.product(*map(range, sizes)))
            rings = tuple(size > 2 for size in sizes)
            return torus_of(sizes, rings, chip.link, 0.0, chip.hop, places), (_RINGS,)
        doubts = (_SLICE.format(name),)
    places = [tuple(device.coords) for device in devices]
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
    return torus_of(sizes, rings, chip.link, chip.on_chip, chip.hop, tuple(places)), doubts


def slice_of(chip: Chip | None, links: Links | None) -> tuple[int, ...]:
    """The sizes of the dimensions of a slice, without devices on a chip; empty where unknown."""
    if chip is None or not isinstance(links, Torus):
        return ()
    return links.sizes[:-1] if chip.on_chip else links.sizes
