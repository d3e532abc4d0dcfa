"""A product of matrices on a device, and what becomes of the exchanges around it."""

from __future__ import annotations

import functools
import math

from spmd.planner.demand import Demand, Exchanged
from spmd.planner.machine import Machine

# Products of smaller sizes take as long as the matrix units are busy with parts of them, and what
# is fused into them comes on top: see `clock`.
_LARGE = 1024
# How many terms a device has to add for the partitioner to send a sum around while it is made: see
# `spmd.inspection.shardy.targets`.
_AROUND = 512


class Product:
    """An operation on a device, as a product.

    Args:
        demand: the operation under a layout.
        machine: what it is for.
    """

    def __init__(self, demand: Demand, machine: Machine):
        self.demand, self.machine = demand, machine

    @functools.cached_property
    def sides(self) -> tuple[float, float, float, float]:
        """Rows, columns, what is summed over, and the batch."""
        one, left = self.demand.one, dict(self.demand.one.sizes)
        for axis, name in self.demand.chosen.items():
            left[name] //= self.demand.sizes[axis]
        a, b, made = (
            {n for n in names if n is not None} for names in (*one.factors[:2], one.factors[-1])
        )

        def size(names: set[str]) -> float:
            return math.prod(left[name] for name in names)

        return size((a & made) - b), size((b & made) - a), size((a & b) - made), size(a & b & made)

    def seconds(self, steps: float) -> float:
        """Of one run, with so many steps of vector units for what is fused into it."""
        one = self.demand.one
        seconds = self.machine.computing(one.flops / self.demand.times([*self.demand.chosen]))
        rows, columns, summed, batch = self.sides
        around = max((self.rounds(sent) for sent in self.demand.exchanges()), default=1)
        if batch == 1 and min(rows, columns) / around >= _LARGE and summed >= _LARGE:
            return seconds
        return seconds * self.machine.filled(rows, columns, summed) + self.machine.stepping(steps)

    def sending(self, sent: Exchanged) -> tuple[float, float]:
        """Seconds of an exchange, and those of it that may go on beside other work."""
        machine, n = self.machine, self.demand.times(sent.axes)
        if self.rounds(sent) > 1:
            seconds = machine.around(sent.axes, sent.nbytes / n, n)
            return seconds, seconds
        kind = sent.kind
        if kind == "reduce-scatter" and n == machine.count and machine.chip.multipliers:
            kind = "all-reduce"  # a sum over all devices stays whole
        seconds = machine.exchange(kind, sent.axes, sent.nbytes)
        return seconds, seconds if kind == "all-gather" else 0.0

    def rounds(self, sent: Exchanged) -> int:
        """In how many parts a sum is sent around a ring while it is made.

        A compiler for TPUs does so where each device keeps a part of it.
        """
        one = self.demand.one
        if sent.kind != "reduce-scatter" or not one.flops or not self.machine.chip.multipliers:
            return 1
        others = (axis for axis in self.demand.chosen if axis not in sent.axes)
        whole = any(self.demand.chosen[axis] not in one.factors[-1] for axis in others)
        return 1 if whole or self.sides[2] <= _AROUND else self.demand.times(sent.axes)
