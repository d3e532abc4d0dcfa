"""How long an exchange takes on the links of a slice.

What a link carries decides, and not what a device sends: a ring sends both ways, a line one, the
dimensions of a group add up, and groups that are spread over the same links share them. Source of
the costs: "How to Scale Your Model", chapter "Sharded matrices" (jax-ml.github.io/scaling-book).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

from spmd.inspection.hlo.groups import Groups

Lane = tuple[int, int]
"""The links of one dimension in one direction: 1 or -1."""


class Transfer(NamedTuple):
    """How long an exchange takes, in seconds, and the links that it keeps busy."""

    seconds: float
    lanes: frozenset[Lane]


class _Line(NamedTuple):
    """What a group has along one dimension.

    Attributes:
        members: coordinates that it takes.
        is_ring: whether links close them to a ring.
        hops: between those farthest apart.
        shared: groups that use the same links at the same time.
    """

    members: int
    is_ring: bool
    hops: int
    shared: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """Where devices are, and what links them.

    Attributes:
        sizes: of the dimensions. Where a chip is two devices, the last one counts them.
        rings: by dimension, whether links close it.
        widths: by dimension, bytes in a second over a link in one direction.
        places: coordinates, by logical device.
        hop: seconds from a chip to the next.
    """

    sizes: tuple[int, ...]
    rings: tuple[bool, ...]
    widths: tuple[float, ...]
    places: tuple[tuple[int, ...], ...]
    hop: float

    def transfer(self, kind: str, groups: Groups, operand: int, result: int) -> Transfer:
        """What a collective takes that all groups run at once.

        Args:
            kind: one of `spmd.inspection.KINDS`.
            groups: logical devices; of a permute, the pairs of source and target.
            operand: bytes on each device before it.
            result: bytes on each device after it.
        """
        if kind in ("collective-permute", "send"):
            return self._permute(groups, operand)
        largest = max(groups, key=len, default=())
        if kind == "recv" or len(largest) < 2:
            return Transfer(0.0, frozenset())
        lines = _lines(self, groups)
        lanes = frozenset((d, way) for d in lines for way in (1, -1))
        delay = self.hop * sum(line.hops for line in lines.values())
        if kind in ("all-to-all", "ragged-all-to-all"):
            crossing = max(
                line.members * line.shared / ((8 if line.is_ring else 4) * self.widths[d])
                for d, line in lines.items()
            )
            return Transfer(operand * crossing + delay, lanes)
        phases = 2 if kind == "all-reduce" else 1
        payload = max(operand, result) * (1 - 1 / len(largest))
        return Transfer(phases * (self._gather(lines, payload) + delay), lanes)

    def lane_name(self, lane: Lane) -> str:
        """What links are called: ``x+`` for those along the first dimension, upwards."""
        dimension, way = lane
        if self._on_chip(dimension):
            return "on chip"
        return f"{'xyz'[dimension] if dimension < 3 else dimension}{'+' if way > 0 else '-'}"

    def _gather(self, lines: dict[int, _Line], payload: float) -> float:
        """Seconds until each device of a group has received a payload from the others."""

        def width(dimension: int) -> float:
            line = lines[dimension]
            return (1 + line.is_ring) * self.widths[dimension] / line.shared

        slowest = min(width(d) for d in lines)
        # Links on a chip are far wider than those between: they work one after the other.
        far = [width(d) for d in lines if width(d) < 4 * slowest]
        return payload / sum(far)

    def lines(self, groups: Groups) -> dict[int, _Line]:
        """By dimension that the largest of all groups extends over."""
        group = max(groups, key=len)
        columns = [sorted({self.places[one][d] for one in group}) for d in range(len(self.sizes))]
        group_of = {one: number for number, each in enumerate(groups) for one in each}
        found: dict[int, _Line] = {}
        for d, column in enumerate(columns):
            if len(column) > 1:
                is_ring = self._is_ring(d, column)
                span = column[-1] - column[0]
                hops = self.sizes[d] // 2 if is_ring else span
                shared = self._shared(d, self.places[group[0]], groups, group_of)
                found[d] = _Line(len(column), is_ring, hops, shared)
        return found

    def _is_ring(self, dimension: int, column: Sequence[int]) -> bool:
        """Whether coordinates are evenly spread over a whole closed dimension."""
        step = column[1] - column[0]
        return (
            self.rings[dimension]
            and len(column) * step == self.sizes[dimension]
            and all(b - a == step for a, b in itertools.pairwise(column))
        )

    def _shared(
        self, dimension: int, place: tuple[int, ...], groups: Groups, group_of: dict[int, int]
    ) -> int:
        """The most groups that use one link of the line through a place.

        Devices of one chip are at the same place of all dimensions between chips.
        """
        fixed = [d for d in range(len(self.sizes)) if d != dimension and not self._on_chip(d)]
        if self._on_chip(dimension):
            return 1
        columns: dict[int, set[int]] = {}
        for device, other in enumerate(self.places):
            if device in group_of and all(other[d] == place[d] for d in fixed):
                columns.setdefault(group_of[device], set()).add(other[dimension])
        loads: Counter[int] = Counter()
        for column in map(sorted, columns.values()):
            if len(column) > 1:
                is_ring = self._is_ring(dimension, column)
                loads.update(
                    range(self.sizes[dimension]) if is_ring else range(column[0], column[-1])
                )
        return max(loads.values(), default=1)

    def _on_chip(self, dimension: int) -> bool:
        return self.widths[dimension] > self.widths[0]

    def _permute(self, pairs: Groups, nbytes: int) -> Transfer:
        per_byte, delay, lanes = _permuted(self, pairs)
        return Transfer(nbytes * per_byte + delay, lanes)

    def permuted(self, pairs: Groups) -> tuple[float, float, frozenset[Lane]]:
        """Seconds for a byte of the busiest link, seconds of the longest way, and the links.

        Every pair takes the shortest way, one dimension after the other.
        """
        loads: Counter[tuple[tuple[int, ...], int, int]] = Counter()
        farthest = 0
        for source, target in pairs:
            ways = [*self._way(self.places[source], self.places[target])]
            loads.update(ways)
            farthest = max(farthest, len(ways))
        busiest = max((load / self.widths[d] for (_, d, _), load in loads.items()), default=0.0)
        lanes = frozenset((d, way) for _, d, way in loads)
        return busiest, farthest * self.hop, lanes

    def _way(
        self, source: tuple[int, ...], target: tuple[int, ...]
    ) -> Iterable[tuple[tuple[int, ...], int, int]]:
        """The links from a place to another: where each starts, its dimension and direction."""
        here = list(source)
        for d, size in enumerate(self.sizes):
            distance = target[d] - here[d]
            if self.rings[d] and abs(distance) > size / 2:
                distance -= int(math.copysign(size, distance))
            way = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                yield tuple(here), d, way
                here[d] = (here[d] + way) % size


@functools.lru_cache(maxsize=256)
def _lines(torus: Torus, groups: Groups) -> dict[int, _Line]:
    """`Torus.lines`, kept: many exchanges of a program have the same groups."""
    return torus.lines(groups)


@functools.lru_cache(maxsize=256)
def _permuted(torus: Torus, pairs: Groups) -> tuple[float, float, frozenset[Lane]]:
    """`Torus.permuted`, kept likewise."""
    return torus.permuted(pairs)


@functools.lru_cache(maxsize=8)
def torus_of(
    sizes: tuple[int, ...], rings: tuple[bool, ...], link: float, on_chip: float, hop: float,
    places: tuple[tuple[int, ...], ...],
) -> Torus:  # fmt: skip
    """The torus of devices at these places; with `on_chip`, the last coordinate counts devices."""
    widths = (link,) * len(sizes)
    if on_chip:
        widths = (*widths[:-1], on_chip)
    return Torus(sizes=sizes, rings=rings, widths=widths, places=places, hop=hop)
