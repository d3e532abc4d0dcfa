"""A product of matrices on a device, and what becomes of the exchanges around it."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from spmd.planner.demand import Demand, Exchanged
from spmd.planner.machine import Machine

# Products of smaller sizes take as long as the matrix units are busy with parts of them, and what
# is fused into them comes on top: see `clock`.
_LARGE = 1024
# A compiler for TPUs sends parts around a ring while it computes with others, where the product
# takes at least this share of the time of the ring. Found by compiling steps of transformers of
# 512 to 8,192 words on a device.
_WORTH_A_RING = 0.6
_PAIR = 2
_RINGS = ("all-gather", "reduce-scatter")


class Sides(NamedTuple):
    """Sizes of a product on a device: rows, columns, what is summed over, and the batch."""

    rows: float
    columns: float
    summed: float
    batch: float


class Product:
    """An operation on a device, as a product.

    Args:
        demand: the operation under a layout.
        machine: what it is for.
        steps: of vector units in one run, for what is fused into it.
    """

    def __init__(self, demand: Demand, machine: Machine, steps: float):
        self.demand, self.machine, self.steps = demand, machine, steps
        self.sent = [*demand.exchanges()]
        self.around = [one for one in self.sent if self._goes_around(one)]

    def seconds(self) -> float:
        """Of one run; one in parts is as slow as its parts are small."""
        left = dict(self._left)
        for one in self.around:
            for axis in one.axes:
                if name := self._split_by(one, axis):
                    left[name] = max(1, left[name] // self.demand.sizes[axis])
        return self._seconds(self._sides(left))

    @functools.cached_property
    def whole(self) -> float:
        """Seconds of one run that is not in parts."""
        return self._seconds(self._sides(self._left))

    def _seconds(self, sides: Sides) -> float:
        one = self.demand.one
        seconds = self.machine.computing(one.flops / self.demand.times([*self.demand.chosen]))
        if sides.batch == 1 and min(sides[:3]) >= _LARGE:
            return seconds
        return seconds * self.machine.filled(*sides[:3]) + self.machine.stepping(self.steps)

    @functools.cached_property
    def _left(self) -> dict[str, int]:
        """The size of each factor on a device."""
        left = dict(self.demand.one.sizes)
        for axis, name in self.demand.chosen.items():
            left[name] //= self.demand.sizes[axis]
        return left

    def _sides(self, left: dict[str, int]) -> Sides:
        factors = self.demand.one.factors
        a, b, made = ({n for n in one if n is not None} for one in (*factors[:2], factors[-1]))

        def size(names: set[str]) -> float:
            return math.prod(left[name] for name in names)

        return Sides(
            size((a & made) - b), size((b & made) - a), size((a & b) - made), size(a & b & made)
        )

    # Exchanges

    def sending(self, sent: Exchanged) -> tuple[float, float]:
        """Seconds of an exchange, and those of them for which it may be ahead of its use.

        Of parts that go around a ring, they are those that are left beside the product itself.
        """
        machine = self.machine
        if sent in self.around:
            return max(0.0, self._ring(sent) - self.whole), 0.0
        kind, n = sent.kind, self.demand.times(sent.axes)
        if kind == "reduce-scatter" and n == machine.count and machine.chip.multipliers:
            kind = "all-reduce"  # a sum over all devices stays whole
        seconds = machine.exchange(kind, sent.axes, sent.nbytes)
        return seconds, seconds if kind == "all-gather" else 0.0

    def _goes_around(self, sent: Exchanged) -> bool:
        """Whether an exchange is done in parts, beside the product that needs or makes them."""
        one = self.demand.one
        if not one.flops or not self.machine.chip.multipliers:
            return False
        if sent.kind not in _RINGS or self.demand.times(sent.axes) <= _PAIR:
            return False
        if sent.kind == "all-gather" and sent.tensor not in one.tensors:
            return False
        others = (axis for axis in self.demand.chosen if axis not in sent.axes)
        is_summed = any(self.demand.chosen[axis] not in one.factors[-1] for axis in others)
        if is_summed and sent.kind == "reduce-scatter":
            return False
        is_batched = self._sides(self._left).batch > 1
        return not is_batched and self.whole >= _WORTH_A_RING * self._ring(sent)

    def _ring(self, sent: Exchanged) -> float:
        n = self.demand.times(sent.axes)
        return self.machine.around(sent.axes, sent.nbytes / n, n)

    def _split_by(self, sent: Exchanged, axis: str) -> str | None:
        """The factor along which an exchange over an axis is in parts."""
        one = self.demand.one
        n = -1
        if sent.kind == "all-gather" and sent.tensor is not None:
            n = one.tensors.index(sent.tensor)
        d = self.demand.places[n].get(axis)
        return None if d is None else one.factors[n][d]
