"""A product of matrices on a device, and what becomes of the exchanges around it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
import functools
import math
from typing import NamedTuple

from spmd.inspection.shardy import ragged
from spmd.inspection.shardy.targets.sums import (
    goes_around,
    is_left_whole,
    is_placed_by_shardy,
)
from spmd.planner.cost.demand import Demand, Exchanged
from spmd.planner.cost.machine import Machine
from spmd.planner.program.structure import WINDOW

# Products of smaller sizes take as long as the matrix units are busy with parts of them, or as the
# vector units are with what is fused into them: a `gelu` adds 16 of its 71 us to a compiled one,
# and its gradient none of 98.
_LARGE = 1024
_SUM = "reduce-scatter"
_RINGS = ("all-gather", _SUM)
# Seconds that the smallest products take on a TPU: 0.3e-6 of operands in vector memory, and 2.7e-6
# of those that are read just then.
_LEAST = 0.75e-6
# How much of a ring goes on beside the product: between 45% and 65% in compiled steps.
_BESIDE = 0.6


class Sides(NamedTuple):
    """Sizes of a product on a device: rows, columns, what is summed over, and the batch."""

    rows: float
    columns: float
    summed: float
    batch: float


class Sending(NamedTuple):
    """What an exchange takes.

    Attributes:
        seconds: of the links.
        beside: seconds of them that go on beside the product itself.
        ahead: seconds of them for which it may be ahead of its use.
        nbytes: of memory for what is gathered.
        turned: bytes of it, in all runs, that are copied before a product takes them.
        joined: the axes, where it is sent with others of the same: the seconds are without the
            delay.
    """

    seconds: float
    beside: float = 0.0
    ahead: float = 0.0
    nbytes: float = 0.0
    turned: float = 0.0
    joined: tuple[str, ...] = ()

    def times(self, runs: int) -> Sending:
        """Of several runs, which use the memory one after the other."""
        return self._replace(
            seconds=runs * self.seconds, ahead=runs * self.ahead, turned=runs * self.turned
        )


class Product:
    """An operation on a device, as a product.

    Args:
        demand: the operation under a layout.
        machine: what it is for.
        shapes: of what it takes and makes, on all devices.
        steps: of vector units in one run, for what is done beside it.
        lasting: values that are whole before the product: it is not given parts of these.
        is_last: whether no product depends on it: what it sums is sent with others.
        is_packed: whether its result is written in fewer bytes than a sum has.
        sums_around: whether a sum may be made in parts that go around.
    """

    def __init__(
        self,
        demand: Demand,
        machine: Machine,
        shapes: Sequence[Sequence[int]],
        steps: float,
        lasting: Collection[int],
        *,
        is_last: bool = False,
        is_packed: bool = False,
        sums_around: bool = True,
    ):
        self.demand, self.machine, self.shapes = demand, machine, shapes
        self.is_packed, self.sums_around = is_packed, sums_around
        self.steps, self.lasting, self.is_last = steps, lasting, is_last
        self.around = [one for one in demand.sent if self._goes_around(one)]

    @property
    def may_sum_first(self) -> bool:
        """Whether its sum goes around, and what it takes if it is made first is known.

        Of convolutions that is not known: the U-Net with 17 sums of these made first takes 15 %
        longer than predicted.
        """
        if self.demand.one.name != "dot_general":
            return False
        is_around = any(one.kind == _SUM for one in self.around)
        return is_around and not is_placed_by_shardy(self.machine.chip.name)

    def seconds(self) -> float:
        """Of one run; one in parts is as slow as its parts are small.

        Where the parts are of what is summed over, each of them makes the whole result, two at a
        time.
        """
        if not self.around:
            return self.whole
        left, again = dict(self._left), 1.0
        for one in self.around:
            for axis in one.axes:
                if name := self._split_by(one, axis):
                    size = self.demand.sizes[axis]
                    left[name] = max(1, left[name] // size)
                    again *= size if name not in self.demand.one.factors[-1] else 1
        return self._seconds(self._sides_of(left), max(1.0, again / 2))

    def passes(self, n: int) -> float:
        """How often memory moves an operand.

        Of a product in parts, each part takes all of what they do not split; two at a time.
        """
        one, times = self.demand.one, 1.0
        for sent in self.around:
            for axis in sent.axes:
                name = self._split_by(sent, axis)
                if name and name not in one.factors[n]:
                    times *= self.demand.sizes[axis]
        return max(1.0, times / 2)

    @functools.cached_property
    def gathered(self) -> dict[int, float]:
        """Bytes of operands that are gathered before the product, by their place among these."""
        found: dict[int, float] = {}
        for one in self.demand.sent:
            if one.kind == "all-gather" and one.tensor is not None and one not in self.around:
                n = self._index(one)
                found[n] = max(found.get(n, 0.0), one.nbytes)
        return found

    @functools.cached_property
    def whole(self) -> float:
        """Seconds of one run that is not in parts."""
        return self._seconds(self._sides, 1.0)

    def _seconds(self, sides: Sides, again: float) -> float:
        one, machine = self.demand.one, self.machine
        flops = one.flops / self.demand.times([*self.demand.chosen])
        if one.name == ragged.KIND:
            return machine.kernels(flops)
        seconds = machine.computing(machine.chip.taken(flops, one.types, one.passes))
        if _is_large(sides):
            return seconds
        is_convolution = one.name == "convolution"
        seconds *= machine.filled(*sides[:3], is_convolution=is_convolution)
        is_by_channel = is_convolution and sides.batch > 1
        if is_by_channel or self._is_for_vectors(sides):
            seconds = min(seconds, machine.stepping(flops / 2) or seconds)
        least = _LEAST if machine.chip.multipliers else 0.0
        return max(seconds, again * self.popping, machine.stepping(self.steps), least)

    @functools.cached_property
    def is_large(self) -> bool:
        """Whether the peak decides what it takes, with all that is fused into it: see `clock`."""
        return _is_large(self._sides)

    @functools.cached_property
    def popping(self) -> float:
        """Seconds in which the matrix units give its results."""
        sides = self._sides
        if self._is_for_vectors(sides):
            return 0.0
        made = sides.rows * sides.columns * sides.batch
        made *= self.machine.widened(max(sides.rows, sides.columns))
        return self.machine.popping(made, is_packed=self.is_packed)

    def _is_for_vectors(self, sides: Sides) -> bool:
        """Whether it adds nothing up, or has one element for each of its batch.

        Compilers have vector units multiply then, and add.
        """
        is_one = sides.rows == sides.columns == 1 or sides.summed == 1
        return is_one and self.demand.one.name == "dot_general"

    @functools.cached_property
    def _left(self) -> dict[str, int]:
        """The size of each factor on a device."""
        left = dict(self.demand.one.sizes)
        for axis, name in self.demand.chosen.items():
            left[name] //= self.demand.sizes[axis]
        return left

    @functools.cached_property
    def _sides(self) -> Sides:
        return self._sides_of(self._left)

    def _sides_of(self, left: dict[str, int]) -> Sides:
        sizes = [1.0, 1.0, 1.0, 1.0]
        for n, names in enumerate(_names_of_sides(self.demand.one.factors)):
            for name in names:
                sizes[n] *= left[name]
        sizes[2] *= left.get(WINDOW, 1)
        return Sides(*sizes)

    # Exchanges

    def sending(self, sent: Exchanged) -> Sending:
        """What an exchange takes; parts that go around a ring go on beside the product itself."""
        machine = self.machine
        if sent in self.around:
            ring = self._ring(sent)
            share = _BESIDE if machine.is_beside(sent.axes) else 0.0
            return Sending(ring, beside=min(share * ring, self.seconds()))
        kind = sent.kind
        if kind == _SUM and machine.chip.multipliers and self._is_left_whole(sent):
            kind = "all-reduce"
        if sent.before:
            return Sending(machine.trading(sent.before, sent.after, sent.nbytes))
        seconds = machine.exchange(kind, sent.axes, sent.nbytes)
        if kind == "all-reduce" and self.is_last and machine.chip.multipliers:
            return Sending(seconds - machine.delay(kind, sent.axes), joined=sent.axes)
        if kind != "all-gather":
            return Sending(seconds)
        ahead = seconds
        if machine.gathers_by_sum(sent.axes, sent.nbytes):  # no sum starts ahead of its use
            seconds, ahead = machine.exchange("all-reduce", sent.axes, sent.nbytes), 0.0
        turned = sent.nbytes if self._is_turned(sent) else 0.0
        return Sending(seconds, ahead=ahead, nbytes=sent.nbytes, turned=turned)

    def _is_turned(self, sent: Exchanged) -> bool:
        """Whether what is gathered is copied: its parts are of the last dimension of an operand.

        A product without a batch takes them as they lie.
        """
        n, batch = self._index(sent), self._sides.batch
        last = len(self.demand.one.factors[n]) - 1
        return batch > 1 and any(self.demand.places[n].get(axis) == last for axis in sent.axes)

    def _is_left_whole(self, sent: Exchanged) -> bool:
        """Whether a sum of which devices keep parts is made whole by compilers for TPUs.

        So is one over all devices of some slices, and one of parts of some shapes, or of parts
        along several dimensions.
        """
        demand, machine = self.demand, self.machine
        if machine.sums_whole and demand.times(sent.axes) == machine.count:
            return True
        part = [*self.shapes[-1]]
        for axis, d in demand.places[-1].items():
            part[d] //= demand.sizes[axis]
        kept: dict[int, int] = {}
        for axis, d in demand.places[-1].items():
            if axis in sent.axes:
                kept[d] = kept.get(d, 1) * demand.sizes[axis]
        if len(kept) > 1:  # of rows and of columns
            return True
        itemsize = round(self._itemsize(-1))
        return bool(kept and itemsize) and is_left_whole(part, kept, itemsize, machine.chip.name)

    def _itemsize(self, n: int) -> float:
        """Bytes of an element of an operand, or of the result."""
        demand, elements = self.demand, math.prod(self.shapes[n])
        return demand.nbytes[n] * demand.times([*demand.places[n]]) / max(1, elements)

    def _goes_around(self, sent: Exchanged) -> bool:
        """Whether an exchange is done in parts, beside the product that needs or makes them."""
        one = self.demand.one
        if sent.kind not in _RINGS or not one.flops or one.name == ragged.KIND:
            return False
        if not self.machine.chip.multipliers:
            return False
        if sent.kind == _SUM and not self.sums_around:
            return False
        sizes, chosen = self.demand.sizes, self.demand.chosen
        if any(size > 1 and axis not in chosen for axis, size in sizes.items()):
            return False  # devices along an axis do the same
        if sent.kind == "all-gather":
            if sent.tensor not in one.tensors[: one.operands] or sent.tensor in self.lasting:
                return False
            taken = {chosen.get(axis) for axis in sent.axes}
            if any(name in taken for axis, name in chosen.items() if axis not in sent.axes):
                return False  # what takes its place is split over other axes as well
        elif any(
            name not in one.factors[-1] for axis, name in chosen.items() if axis not in sent.axes
        ):
            return False  # the result is a sum over other axes as well
        if self._sides.batch != 1:
            return False
        n = self._index(sent)
        own = {*one.factors[n]}
        # The rows that a gathered matrix is applied to, or the terms of a scattered sum.
        lacking = math.prod(size for name, size in one.sizes.items() if name not in own)
        parts = self.demand.times(sent.axes)
        return goes_around(lacking, parts, self._itemsize(n), self.machine.chip.name)

    def _index(self, sent: Exchanged) -> int:
        """Which operand is sent, or else the result."""
        if sent.kind == "all-gather" and sent.tensor is not None:
            return self.demand.one.tensors.index(sent.tensor)
        return -1

    def _ring(self, sent: Exchanged) -> float:
        n = self.demand.times(sent.axes)
        return self.machine.around(sent.axes, sent.nbytes / n, n)

    def _split_by(self, sent: Exchanged, axis: str) -> str | None:
        """The factor along which an exchange over an axis is in parts."""
        one = self.demand.one
        n = self._index(sent)
        d = self.demand.places[n].get(axis)
        return None if d is None else one.factors[n][d]


def _is_large(sides: Sides) -> bool:
    return sides.batch == 1 and min(sides[:3]) >= _LARGE


@functools.lru_cache(maxsize=1024)
def _names_of_sides(factors: tuple[tuple[str | None, ...], ...]) -> tuple[set[str], ...]:
    """The factors of a product that are its rows, columns, what is summed over, and the batch.

    The window of a convolution is in the kernel alone, or in the gradient of that.
    """
    a, b, made = ({n for n in one if n is not None} for one in (*factors[:2], factors[-1]))
    return made - b, (b & made) - a, b - made, a & b & made
