"""How long one call of a program takes, and what takes it."""

from __future__ import annotations

import dataclasses

from spmd.inspection.records.arrays import Source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """Time in which a device only waits for an exchange.

    Attributes:
        mesh_axes: that the exchange crosses.
        source: the user's line that it comes from, or None.
        seconds: in one call of the program.
    """

    mesh_axes: tuple[str, ...]
    source: Source | None
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
        exchange: seconds that exchanges take, those beside work included, one after the other.
        exposed: what no work hides of them, longest first.
        hardware_flops: floating-point operations of products that the device executes.
        hfu: these in a second, as a share of the chip's peak.
        source: ``compiler`` where its estimates were used, ``predicted`` where ours were.
        unknown: what is not in the figures, a sentence each.
    """

    chip: str
    seconds: float
    compute: float
    memory: float
    exchange: float
    exposed: tuple[Exposed, ...]
    hardware_flops: int
    hfu: float
    source: str
    unknown: tuple[str, ...] = ()

    @property
    def bound(self) -> str:
        """What takes most of the time: ``compute``, ``memory`` or ``exchange``."""
        waiting = sum(one.seconds for one in self.exposed)
        shares = {"compute": self.compute, "memory": self.memory, "exchange": waiting}
        return max(shares, key=shares.__getitem__)
