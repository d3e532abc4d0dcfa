"""How long one call of a program takes, and what takes it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from spmd.inspection.records.arrays import Source
from spmd.inspection.records.sizes import show_seconds, show_share

UNKNOWN_TIMES = "an unknown number of times"
"""In a sentence of `Time.unknown`: a call may take longer than the figures say."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How long a collective takes, all its runs in one call together.

    Attributes:
        name: of the collective in the report.
        mesh_axes: that it crosses.
        source: the user's line that it comes from, or None.
        seconds: in which it keeps links busy.
        exposed: of them those in which the device only waits.
    """

    name: str
    mesh_axes: tuple[str, ...]
    source: Source | None
    seconds: float
    exposed: float


class Exposed(NamedTuple):
    """What no work hides of the exchanges of a line over some mesh axes.

    Attributes:
        mesh_axes: that are crossed.
        source: the user's line, or None.
        seconds: of one call in which the device only waits for them.
    """

    mesh_axes: tuple[str, ...]
    source: Source | None
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that keeps a core, a memory or links busy for a while.

    Attributes:
        lane: ``core``, ``memory``, or links of one direction, such as ``x+``.
        name: scope of the operation, or the kind of a collective.
        kind: ``compute``, ``memory``, ``exchange``, or ``exposed`` for a wait.
        mesh_axes: of an exchange, those that it crosses.
        start: seconds from the beginning of the layer.
        seconds: how long.
    """

    lane: str
    name: str
    kind: str
    mesh_axes: tuple[str, ...]
    start: float
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """How long one call of a program takes on a device.

    `compute`, `memory` and all of `exposed` add up to `seconds`.

    Attributes:
        chip: whose figures were used.
        seconds: of the call.
        compute: seconds in which the core computes.
        memory: seconds in which it waits for main memory.
        exchanges: how long each collective takes, in program order.
        hardware_flops: floating-point operations of products that the device executes.
        hfu: hardware FLOPs utilization: these in a second, as a share of the chip's peak.
        source: ``compiler`` where its estimates were used, ``predicted`` where ours were.
        model_flops: floating-point operations of the products of the whole program on all devices,
            as it was written: without what is computed again. None where that is not known.
        mfu: model FLOPs utilization: these in a second, as a share of the peak of all chips.
        unknown: what is not in the figures, or only assumed, a sentence each.
        layer: the schedule of one iteration of the loop that takes most of the time; of the whole
            program where no loop takes half of it. Short neighbours on the core are one event.
    """

    chip: str
    seconds: float
    compute: float
    memory: float
    exchanges: tuple[Exchange, ...]
    hardware_flops: int
    hfu: float
    source: str
    model_flops: int | None = None
    mfu: float | None = None
    unknown: tuple[str, ...] = ()
    layer: tuple[Event, ...] = ()

    @property
    def exchange(self) -> float:
        """Seconds that exchanges take, those beside work included, one after the other."""
        return sum(one.seconds for one in self.exchanges)

    @property
    def exposed(self) -> tuple[Exposed, ...]:
        """What no work hides of the exchanges, by mesh axes and line, longest first."""
        sums: dict[tuple[tuple[str, ...], Source | None], float] = {}
        for one in self.exchanges:
            if one.exposed:
                key = one.mesh_axes, one.source
                sums[key] = sums.get(key, 0.0) + one.exposed
        rows = (Exposed(*key, seconds) for key, seconds in sums.items())
        return tuple(sorted(rows, key=lambda one: -one.seconds))

    @property
    def exposed_by_axes(self) -> dict[tuple[str, ...], float]:
        """Seconds that no work hides, by the mesh axes that are crossed, longest first."""
        sums: dict[tuple[str, ...], float] = {}
        for one in self.exposed:
            sums[one.mesh_axes] = sums.get(one.mesh_axes, 0.0) + one.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def bound(self) -> str:
        """What takes most of the time: ``compute``, ``memory`` or ``exchange``."""
        waiting = sum(one.exposed for one in self.exchanges)
        shares = {"compute": self.compute, "memory": self.memory, "exchange": waiting}
        return max(shares, key=shares.__getitem__)

    @property
    def utilization(self) -> dict[str, str]:
        """The shares of the peak that are known, as text: ``{"MFU": "40%", "HFU": "46%"}``."""
        shares = {"MFU": self.mfu, "HFU": self.hfu}
        return {name: show_share(share) for name, share in shares.items() if share is not None}

    def __str__(self) -> str:
        used = ", ".join(f"{name} {share}" for name, share in self.utilization.items())
        axes = next(iter(self.exposed_by_axes), ()) if self.bound == "exchange" else ()
        how = " (predicted)" if self.source == "predicted" else ""
        over = f" over {', '.join(axes)}" if axes else ""
        took = f"{show_seconds(self.seconds)} a call on {self.chip}{how}"
        return f"{took}; {used}; bound by {self.bound}{over}"
