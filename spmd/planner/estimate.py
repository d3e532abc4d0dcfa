"""What a layout costs, from classes alone: a few milliseconds, so that thousands can be compared.

Each axis goes to one factor of an operation: the first in its order that the operation has. An
operand that the axis splits otherwise is gathered or exchanged, and a result whose factor was
summed over is added up. What compilers do beyond that is left to `predict` and `verify`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math
from typing import Any, NamedTuple

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


class _Kind(NamedTuple):
    """What tensors that a layout places alike have in common."""

    shape: tuple[int, ...]
    classes: tuple[int | None, ...]


class Estimator:
    """A program on a machine, whose layouts are compared.

    What does not depend on a layout is worked out once: operations of the same kinds of tensors
    are one that runs more often, and those that no layout makes cost anything are left out.

    Args:
        graph: the program.
        machine: what it is for.
    """

    def __init__(self, graph: Graph, machine: Machine):
        self.machine = machine
        self.sizes = machine.sizes
        kinds: dict[_Kind, int] = {}
        self.kind_of = [
            kinds.setdefault(_Kind(one.shape, one.classes), len(kinds)) for one in graph.tensors
        ]
        self.kinds = [*kinds]
        self.nbytes = [one.nbytes for one in graph.tensors]
        self.ends = [i for i, one in enumerate(graph.tensors) if one.kind != "result"]
        self.arguments = [i for i, one in enumerate(graph.tensors) if one.kind == "argument"]
        merged: dict[Any, list[Any]] = {}
        for one in graph.operations:
            if not (one.is_fused and self._is_aligned(one)):
                key = (
                    one.name, one.factors, tuple(self.kind_of[i] for i in one.tensors),
                    tuple(self.nbytes[i] for i in one.tensors), one.flops,
                )  # fmt: skip
                merged.setdefault(key, [one, 0])[1] += one.runs
        self.operations = [(one, runs) for one, runs in merged.values()]
        self.births, self.deaths = _lives(graph)

    def _is_aligned(self, one: Operation) -> bool:
        return len({self.kind_of[i] for i in one.tensors}) == 1

    def __call__(self, layout: Layout) -> Estimate:
        """What a layout costs."""
        return _Estimation(self, layout).all()


def _lives(graph: Graph) -> tuple[list[list[int]], list[list[int]]]:
    """By operation, the tensors that are stored from there on, and those last used there."""
    last = {i: n for n, one in enumerate(graph.operations) for i in one.tensors}
    births: list[list[int]] = [[] for _ in graph.operations]
    deaths: list[list[int]] = [[] for _ in graph.operations]
    known = {i for i, one in enumerate(graph.tensors) if one.kind != "result"}
    for n, one in enumerate(graph.operations):
        for i in () if one.is_fused and one.name != "while" else one.tensors:
            if i not in known and last[i] > n:
                known.add(i)
                births[n].append(i)
                deaths[last[i]].append(i)
    return births, deaths


class _Estimation:
    """A program under a layout."""

    def __init__(self, of: Estimator, layout: Layout):
        self.of = of
        self.layout = layout
        self.machine, self.sizes = of.machine, of.sizes
        self.places = [layout.places(kind, self.sizes) for kind in of.kinds]
        self.split = [math.prod(self.sizes[axis] for axis in found) for found in self.places]

    def local(self, i: int) -> float:
        """Bytes of a tensor on a device."""
        return self.of.nbytes[i] / self.split[self.of.kind_of[i]]

    def all(self) -> Estimate:
        """What all operations cost, and the arguments and results of the program."""
        compute = memory = exchange = 0.0
        for one, runs in self.of.operations:
            chosen = self.chosen(one)
            for found in self.exchanges(one, chosen):
                exchange += runs * self.machine.exchange(*found)
            if one.is_fused:
                continue
            computing = moving = 0.0
            if one.flops:
                computing = self.machine.computing(
                    one.flops / math.prod(self.sizes[axis] for axis in chosen)
                )
            moving = self.machine.moving(self.traffic(one))
            if computing >= moving:
                compute += runs * computing
            else:
                memory += runs * moving
        memory += self.machine.moving(sum(map(self.local, self.of.ends)))
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
            for axis, d in self.places[self.of.kind_of[i]].items():
                wanted, has = chosen.get(axis), names[d] if d < len(names) else None
                if has != wanted:
                    yield self._moved(i, axis, wanted in names and wanted is not None)
        for i, names in sides[one.operands :]:
            for axis, name in chosen.items():
                d = self.places[self.of.kind_of[i]].get(axis)
                if name not in names:
                    nbytes = self.local(i) * (1 if d is None else self.sizes[axis])
                    yield Exchanged("all-reduce" if d is None else "reduce-scatter", axis, nbytes)
                elif d is None:
                    yield Exchanged("all-gather", axis, self.local(i))
                elif names[d] != name:
                    yield Exchanged("all-to-all", axis, self.local(i))

    def _moved(self, i: int, axis: str, elsewhere: bool) -> Exchanged:
        if elsewhere:
            return Exchanged("all-to-all", axis, self.local(i))
        return Exchanged("all-gather", axis, self.local(i) * self.sizes[axis])

    def traffic(self, one: Operation) -> float:
        """Bytes that an operation reads and writes on a device."""
        operands, results = one.tensors[: one.operands], one.tensors[one.operands :]
        if one.name in _SLICES:
            return 2 * sum(map(self.local, results))
        if one.name in _UPDATES:
            return 2 * min((self.local(i) for i in operands[1:2]), default=0.0)
        return sum(map(self.local, one.tensors))

    def peak(self) -> float:
        """Bytes of arguments, and of what is alive beside them at the worst moment."""
        now = most = 0.0
        for births, deaths in zip(self.of.births, self.of.deaths, strict=True):
            for i in births:
                now += self.local(i)
            most = max(most, now)
            for i in deaths:
                now -= self.local(i)
        return most + sum(map(self.local, self.of.arguments))
