"""What is said of the time of a call, beside the bytes that it moves: for terminal and page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses
from typing import NamedTuple

from spmd.inspection.records.report import Collective, Finding, Part, Report, Source
from spmd.inspection.records.sizes import show_seconds, show_share
from spmd.inspection.records.sums import grouped, line_of
from spmd.inspection.records.sweep import Sweep, SweepRow
from spmd.inspection.records.time import Event, Exchange, Time
from spmd.inspection.show import words

DOUBTS = 6
"""The most doubts of a time that are told at once."""

HIDDEN, NONE = "hidden", show_share(0)

EXPLAINED = {
    "compute": "the core computes",
    "memory": "it waits for main memory",
    "exposed": "it waits for an exchange",
    "hidden": "an exchange goes on while the core works",
}
"""What the parts of a call are."""

UTILIZATION = {
    "MFU": "the products of the program as it is written",
    "HFU": "those that the chips execute",
}
"""What the shares of the peak count."""


class Took(NamedTuple):
    """Seconds of a call in which exchanges keep links busy, and those that no work hides."""

    seconds: float
    exposed: float


class Times:
    """How long the collectives of a report take, and shares of them."""

    def __init__(self, report: Report):
        self.time = report.time
        found = report.collectives
        self._exchanges = [*zip(found, _exchanges(report), strict=True)]
        # Names tell apart what was compiled; what was predicted is never divided.
        self._by_name = {whole.name: (whole, one) for whole, one in self._exchanges}
        self._by_identity = {id(whole): (whole, one) for whole, one in self._exchanges}

    def of(self, shares: Iterable[Collective]) -> Took | None:
        """The time of collectives, or of their parts by bytes; None where none is known."""
        found = [took for share in shares if (took := self._share(share))]
        return Took(*map(sum, zip(*found, strict=True))) if found else None

    def _share(self, share: Collective) -> Took | None:
        whole, one = self._by_identity.get(id(share)) or self._by_name.get(share.name, (None, None))
        if whole is None or one is None:
            return None
        part = _fraction(share, whole)
        return Took(part * one.seconds, part * one.exposed)

    def cells(self, shares: Iterable[Collective]) -> tuple[str, str]:
        """The time of collectives, and the share of a call that is exposed, as text."""
        return self.shown(self.of(shares))

    def shown(self, took: Took | None) -> tuple[str, str]:
        """A time, and the share of a call in which nothing hides it, as text."""
        if took is None or self.time is None:
            return "", ""
        if not took.seconds:
            return show_seconds(0), ""
        return show_seconds(took.seconds), show_share(took.exposed / self.time.seconds)

    def summary(self, shares: Iterable[Collective]) -> str:
        """``85.3 ms, 12% exposed``; empty where no time is known."""
        return self._summed(self.of(shares))

    def _summed(self, took: Took | None) -> str:
        seconds, share = self.shown(took)
        if took is None or not share:
            return seconds
        return f"{seconds}, {f'{share} exposed' if took.exposed else HIDDEN}"

    def cost(self, finding: Finding) -> str:
        """What a finding costs in time: ``about 3.50 ms, 2.0% exposed``; empty where unknown."""
        if self.time is None:
            return ""
        if finding.flops and self.time.hardware_flops:
            seconds = self.time.compute * finding.flops / self.time.hardware_flops
            share = show_share(seconds / self.time.seconds)
            return f"about {show_seconds(seconds)}, {share} of a call"
        said = self._summed(self._sent(finding)) if finding.measure == "wire" else ""
        return f"about {said}" if said else ""

    def _sent(self, finding: Finding) -> Took | None:
        """The time of what a finding says is sent: that of its line, by bytes."""
        if finding.source is None:
            return None
        line = finding.source.file, finding.source.line
        everything = (one for one, _ in self._exchanges)
        groups = grouped(everything, lambda one: one.source and (one.source.file, one.source.line))
        found = groups.get(line, [])
        took, sent = self.of(found), sum(map(words.ranking, found))
        if took is None or not 0 < finding.nbytes <= sent:
            return None
        return Took(*(one * finding.nbytes / sent for one in took))

    def waits(self) -> list[Wait]:
        """Where a device only waits for exchanges, longest first."""
        everything = (one for one, _ in self._exchanges)
        groups = grouped(everything, lambda one: (one.mesh_axes, line_of(one)))
        waits = []
        for (axes, line), shares in groups.items():
            took = self.of(shares)
            if took and took.exposed:
                found = (one.kind for one in shares if (own := self._share(one)) and own.exposed)
                waits.append(Wait(axes, line, tuple(dict.fromkeys(found)), took.exposed))
        return sorted(waits, key=lambda one: (-one.seconds, one.source is None))


class Wait(NamedTuple):
    """Seconds of one call in which a device only waits, by mesh axes and line, and for what."""

    mesh_axes: tuple[str, ...]
    source: Source | None
    kinds: tuple[str, ...]
    seconds: float


def _exchanges(report: Report) -> list[Exchange | None]:
    """How long each collective of a report takes, in their order; None where that is not known."""
    if report.time is None:
        return [None] * len(report.collectives)
    if report.predicted:
        return [*report.time.exchanges]
    known = {one.name: one for one in report.time.exchanges}
    return [known.get(one.name) for one in report.collectives]


def _fraction(share: Collective | Part, whole: Collective) -> float:
    """How much of a collective a part of it is: by bytes on the wire, or else by payload."""
    for part, all_of_it in (
        (share.wire_bytes, whole.wire_bytes),
        (share.payload_bytes, whole.payload_bytes),
    ):
        if all_of_it:
            return part / all_of_it
    return 1.0


# The whole


def beside(time: Time) -> str:
    """How long exchanges take, and how much of that is hidden; empty without exchanges."""
    if not time.exchange:
        return ""
    exposed = sum(one.exposed for one in time.exchanges)
    hidden = time.exchange - exposed
    whole = f"exchanges take {show_seconds(time.exchange)}"
    if hidden <= time.exchange / 1000:
        return f"{whole}, all of it exposed"
    if not exposed:
        return f"{whole}, all of it hidden"
    return f"{whole}: {show_seconds(exposed)} exposed, {show_seconds(hidden)} hidden"


# A layer as lanes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneOf:
    """What one core, memory or direction of links does during a layer.

    Attributes:
        title: what it is called.
        busy: share of the layer in which it does something.
        events: in order.
    """

    title: str
    busy: str
    events: tuple[Event, ...]

    @property
    def mesh_axes(self) -> tuple[tuple[str, ...], ...]:
        """The sets of mesh axes that its exchanges cross, in order."""
        crossed = (one.mesh_axes for one in self.events if one.kind == "exchange")
        return tuple(dict.fromkeys(crossed))


def lanes(time: Time) -> list[LaneOf]:
    """A layer by lane: the core first, then the memories, then links."""
    span = end_of(time.layer)
    return [
        LaneOf(title=lane_title(lane), busy=_busy(events, span), events=tuple(events))
        for lane, events in by_lane(time).items()
        if span
    ]


_FIRST = ("core", "memory", "host")


def by_lane(time: Time) -> dict[str, list[Event]]:
    """The events of a layer by lane, in order."""
    found: dict[str, list[Event]] = {lane: [] for lane in _FIRST}
    for one in sorted(time.layer, key=lambda one: (one.lane, one.start)):
        found.setdefault(one.lane, []).append(one)
    return {lane: events for lane, events in found.items() if events}


def lane_title(lane: str) -> str:
    """``core``, or ``links x+`` for those along a dimension of a torus."""
    return f"links {lane}" if lane[-1:] in ("+", "-") else lane


def _busy(events: Iterable[Event], span: float) -> str:
    busy = sum(one.seconds for one in events if one.kind != "exposed")
    return show_share(min(1.0, busy / span))


def end_of(events: Iterable[Event]) -> float:
    """When the last of some events ends."""
    return max((one.start + one.seconds for one in events), default=0.0)


def layer_title(time: Time) -> str:
    """What the lanes are of."""
    span = end_of(time.layer)
    if span >= 0.99 * time.seconds:
        return f"The whole call, {show_seconds(span)}"
    return f"One layer, {show_seconds(span)}: an iteration of the loop that takes longest"


def ticks(time: Time, count: int = 4) -> Iterator[str]:
    """Times at equal distances, from the beginning of a layer to its end."""
    span = end_of(time.layer)
    yield from (show_seconds(span * i / count) for i in range(count + 1))


# A sweep


def timed(sweep: Sweep) -> list[tuple[SweepRow, Time]]:
    """The rows whose time is known, by the number of devices, and then the fastest first."""
    found = [(row, row.time) for row in sweep if row.time is not None]
    return sorted(found, key=lambda pair: (pair[0].num_devices, pair[1].seconds))


def utilization(time: Time) -> str:
    """The MFU; where it is not known, the HFU under its name."""
    used = time.utilization
    return used.get("MFU", f"HFU {used['HFU']}")


def best(sweep: Sweep) -> str:
    """The fastest mesh, and the one that uses its chips best; empty for fewer than two."""
    found = timed(sweep)
    if len(found) < 2:
        return ""
    fastest = min(found, key=lambda pair: pair[1].seconds)
    fullest = max(found, key=lambda pair: _used(pair[1]))
    said = f"fastest: {show_seconds(fastest[1].seconds)} a call on {mesh_of(fastest[0])}"
    name = "HFU" if fullest[1].mfu is None else "MFU"
    share = show_share(_used(fullest[1]))
    return f"{said}; best {name}: {share} on {mesh_of(fullest[0])}"


def _used(time: Time) -> float:
    return time.hfu if time.mfu is None else time.mfu


def mesh_of(row: SweepRow) -> str:
    """``v5e:4x4 (data=8, model=2)``."""
    axes = ", ".join(f"{name}={size}" for name, size in row.mesh.items())
    return f"{row.label} ({axes or 'no mesh'})"
