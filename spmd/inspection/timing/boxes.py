"""How long an exchange takes between servers whose devices a switch joins.

Within a box each device sends to all others at once; out of it each has a network adapter of its
own, and the two ways work side by side. Source of the costs: "How to Scale Your Model", chapter
"GPUs" (jax-ml.github.io/scaling-book/gpus).
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from spmd.inspection.hlo.groups import Groups
from spmd.inspection.timing.torus import Lane, Transfer

INSIDE: Lane = (0, 1)
ACROSS: Lane = (1, 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Which box each device is in, and what joins them.

    Attributes:
        boxes: by logical device.
        link: bytes in a second from a device to those of its box.
        across: bytes in a second from a device out of its box.
        hop: seconds that a message takes.
    """

    boxes: tuple[int, ...]
    link: float
    across: float
    hop: float

    def transfer(self, kind: str, groups: Groups, operand: int, result: int) -> Transfer:
        """What a collective takes that all groups run at once, as `Torus.transfer` says it."""
        if kind in ("collective-permute", "send"):
            pairs = {self._is_inside(pair) for pair in groups if pair[0] != pair[1]}
            return self._both(operand * (True in pairs), operand * (False in pairs), 1)
        group = max(groups, key=len, default=())
        if kind == "recv" or len(group) < 2:
            return Transfer(0.0, frozenset())
        count = len(group)
        boxes = len({self.boxes[one] for one in group})
        near = count / boxes  # members in a box
        if kind in ("all-to-all", "ragged-all-to-all"):
            return self._both(operand * (near - 1) / count, operand * (1 - near / count), 1)
        phases = 2 if kind == "all-reduce" else 1
        payload = phases * max(operand, result)
        # What comes into a box comes through the adapters of all members that are in it.
        return self._both(
            payload * (1 - 1 / count) * (near > 1), payload * (1 - 1 / boxes) / near, phases
        )

    def lane_name(self, lane: Lane) -> str:
        """What a way is called."""
        return "in box" if lane == INSIDE else "between boxes"

    def _is_inside(self, pair: Sequence[int]) -> bool:
        return self.boxes[pair[0]] == self.boxes[pair[1]]

    def _both(self, inside: float, across: float, hops: int) -> Transfer:
        """The slower of the two ways, each with the bytes that a device sends on it."""
        ways = {INSIDE: inside / self.link if inside else 0.0}
        ways[ACROSS] = across / self.across if across else 0.0
        used = {lane: seconds for lane, seconds in ways.items() if seconds}
        if not used:
            return Transfer(0.0, frozenset())
        return Transfer(max(used.values()) + hops * self.hop, frozenset(used))
