"""What a layout costs, from classes alone: a few milliseconds, so that thousands can be compared.

Each axis goes to one factor of an operation: the first in its order that the operation has. An
operand that the axis splits otherwise is gathered or exchanged, and a result whose factor was
summed over is added up. What compilers do beyond that is left to `predict` and `verify`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import math
from typing import NamedTuple

from spmd.inspection.hlo.groups import expand_replica_groups
from spmd.inspection.timing.chips import Chip
from spmd.inspection.timing.clock import PRODUCT_SHARE, REACHED, Links
from spmd.planner.graph import Graph, Operation
from spmd.planner.layout import Layout

_SLICES = ("dynamic_slice", "slice", "gather")
_UPDATES = ("dynamic_update_slice", "scatter")
_PROBE = 2**30


class Machine:
    """What the devices of a mesh can do.

    Args:
        chip: whose figures to use.
        links: between the devices, in the order of the mesh.
        sizes: of the mesh axes, major to minor.
    """

    def __init__(self, chip: Chip, links: Links, sizes: Mapping[str, int]):
        self.chip = chip
        self.sizes = dict(sizes)
        self.count = math.prod(sizes.values())
        self._links = links
        self._line = functools.cache(self._measured)

    def exchange(self, kind: str, axis: str, nbytes: float) -> float:
        """Seconds of a collective over an axis, of so many bytes on its larger side."""
        delay, per_byte = self._line(kind, axis)
        return delay + nbytes * per_byte

    def _measured(self, kind: str, axis: str) -> tuple[float, float]:
        mesh = ",".join(f"'{name}'={size}" for name, size in self.sizes.items())
        groups = expand_replica_groups(f"mesh[{mesh}] {{'{axis}'}}")
        delay = self._links.transfer(kind, groups, 0, 0).seconds
        return delay, (self._links.transfer(kind, groups, _PROBE, _PROBE).seconds - delay) / _PROBE

    def computing(self, flops: float) -> float:
        """Seconds of products."""
        return flops / (PRODUCT_SHARE * self.chip.kept)

    def moving(self, nbytes: float) -> float:
        """Seconds in which main memory moves bytes."""
        return nbytes / (REACHED * self.chip.hbm)


class Exchanged(NamedTuple):
    """An exchange that an operation demands: its kind, the axis, and bytes on its larger side."""

    kind: str
    axis: str
    nbytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a layout is thought to cost a device in one call.

    Attributes:
        compute: seconds of products.
        memory: seconds in which main memory decides.
        exchange: seconds of exchanges, one after the other.
        peak: bytes of arguments, and of what is alive beside them at the worst moment.
    """

    compute: float
    memory: float
    exchange: float
    peak: float

    @property
    def seconds(self) -> float:
        """Of one call."""
        return self.compute + self.memory + self.exchange


def estimate(graph: Graph, layout: Layout, machine: Machine) -> Estimate:
    """Adds up what all operations cost."""
    return _Estimator(graph, layout, machine).all()


class _Estimator:
    """A program under a layout."""

    def __init__(self, graph: Graph, layout: Layout, machine: Machine):
        self.graph = graph
        self.layout = layout
        self.machine = machine
        self.sizes = machine.sizes
        self.places = [layout.places(tensor, self.sizes) for tensor in graph.tensors]
        self.local = [
            tensor.nbytes / math.prod(self.sizes[axis] for axis in places)
            for tensor, places in zip(graph.tensors, self.places, strict=True)
        ]

    def all(self) -> Estimate:
        compute = memory = exchange = 0.0
        for one in self.graph.operations:
            chosen = self.chosen(one)
            exchange += one.runs * sum(
                self.machine.exchange(*found) for found in self.exchanges(one, chosen)
            )
            if one.is_fused:
                continue
            split = math.prod(self.sizes[axis] for axis in chosen)
            computing = self.machine.computing(one.flops / split)
            moving = self.machine.moving(self.traffic(one))
            if computing >= moving:
                compute += one.runs * computing
            else:
                memory += one.runs * moving
        ends = (
            size
            for tensor, size in zip(self.graph.tensors, self.local, strict=True)
            if tensor.kind != "result"
        )
        memory += self.machine.moving(sum(ends))
        return Estimate(compute=compute, memory=memory, exchange=exchange, peak=self.peak())

    def chosen(self, one: Operation) -> dict[str, str]:
        """The factor of an operation that each axis splits."""
        found: dict[str, str] = {}
        left = dict(one.sizes)
        for axis, classes in self.layout.orders:
            for name in (name for c in classes for name in one.by_class.get(c, ())):
                if left.get(name, 1) % self.sizes[axis] == 0:
                    found[axis] = name
                    left[name] //= self.sizes[axis]
                    break
        return found

    def exchanges(self, one: Operation, chosen: Mapping[str, str]) -> Iterator[Exchanged]:
        """What has to be sent before an operation and after it."""
        sides = [*zip(one.tensors, one.factors, strict=False)]
        for i, names in sides[: one.operands]:
            for axis, d in self.places[i].items():
                wanted, has = chosen.get(axis), names[d] if d < len(names) else None
                if has != wanted:
                    yield self._moved(i, axis, wanted in names and wanted is not None)
        for i, names in sides[one.operands :]:
            for axis, name in chosen.items():
                d = self.places[i].get(axis)
                if name not in names:
                    nbytes = self.local[i] * (1 if d is None else self.sizes[axis])
                    yield Exchanged("all-reduce" if d is None else "reduce-scatter", axis, nbytes)
                elif d is None:
                    yield Exchanged("all-gather", axis, self.local[i])
                elif names[d] != name:
                    yield Exchanged("all-to-all", axis, self.local[i])

    def _moved(self, i: int, axis: str, elsewhere: bool) -> Exchanged:
        if elsewhere:
            return Exchanged("all-to-all", axis, self.local[i])
        return Exchanged("all-gather", axis, self.local[i] * self.sizes[axis])

    def traffic(self, one: Operation) -> float:
        """Bytes that an operation reads and writes on a device."""
        operands, results = one.tensors[: one.operands], one.tensors[one.operands :]
        if one.name in _SLICES:
            return 2 * sum(self.local[i] for i in results)
        if one.name in _UPDATES:
            return 2 * min((self.local[i] for i in operands[1:2]), default=0.0)
        return sum(self.local[i] for i in one.tensors)

    def peak(self) -> float:
        """Bytes of arguments, and of what is alive beside them at the worst moment."""
        operations, tensors = self.graph.operations, self.graph.tensors
        last = {i: n for n, one in enumerate(operations) for i in one.tensors}
        arguments = sum(
            size
            for tensor, size in zip(tensors, self.local, strict=True)
            if tensor.kind == "argument"
        )
        alive: dict[int, float] = {}
        ends: dict[int, list[int]] = {}
        now = most = 0.0
        for n, one in enumerate(operations):
            if not one.is_fused or one.name == "while":
                for i in one.tensors:
                    if tensors[i].kind == "result" and i not in alive and last[i] > n:
                        alive[i] = self.local[i]
                        ends.setdefault(last[i], []).append(i)
                        now += self.local[i]
            most = max(most, now)
            now -= sum(alive[i] for i in ends.pop(n, ()))
        return arguments + most
