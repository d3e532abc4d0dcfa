"""A walk through a scheduled program, on a core, its main memory and its links.

Compilers print instructions in the order of execution; that of TPUs says on most of them how many
cycles it expects (``estimated_cycles``). A core runs them one after the other; the start of an
exchange takes the links of its dimensions, and its end waits for them; copies between memories have
a lane of their own. Where there are no cycles, an instruction takes what its FLOPs and bytes take
at the chip's peak (a roofline), and the time is called predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import functools
import itertools
import math
import re
from typing import NamedTuple, Protocol, TypeAlias

from spmd.inspection.hlo import text as hlo
from spmd.inspection.hlo.calls import STARTS, WAITS, Visit, calls_of
from spmd.inspection.hlo.cost import (
    FREE,
    Traffic,
    bf16_passes,
    element_types,
    hbm_size,
    is_opaque,
    products_of,
)
from spmd.inspection.hlo.groups import Groups, expand_replica_groups, logical_groups
from spmd.inspection.hlo.ledger import is_collective, ledger
from spmd.inspection.hlo.loops import Reader
from spmd.inspection.records.names import place
from spmd.inspection.records.report import Collective
from spmd.inspection.records.time import Event, Exchange, Time
from spmd.inspection.timing.chips import Chip
from spmd.inspection.timing.kernels import known_flops
from spmd.inspection.timing.torus import Lane, Transfer

# How much of the bandwidth of main memory elementwise work reaches: a lead of issue J, which the
# published runs have to confirm.
REACHED = 0.83
# How much of the peak a kernel reaches of which only the FLOPs are known; likewise.
KERNEL = 0.5

# The compiler's cycles hold for a product by itself. For one with other work fused into it they are
# up to twice too many: one of large matrices takes a share of the peak (`Chip.product_share`), or
# what its bytes take.
_LARGE = 1024
_PRODUCTS = ("dot", "convolution")
_BESIDE_PRODUCTS = {*FREE, "fusion", "convert", "copy", "transpose", "reshape"}

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ESTIMATE = re.compile(r'"cost_estimate":\{([^}]*)\}')
_FIGURE = re.compile(r'"(flops|bytes_accessed)":"?(\d+)')
_MEMORY: Lane = (-1, 0)
_HOST: Lane = (-2, 0)
_HOST_SPACE = "S(5)"

ASSUMED_PEAK = (
    "products are taken at the peak of bf16, or at twice that for 8 bits where the chip has it"
)
"""What is assumed of products where no compiler tells how long they take."""
PREDICTED = f"{ASSUMED_PEAK}, and all else at the bandwidth of main memory"
"""What is assumed where none tells how long anything takes."""

Axes: TypeAlias = tuple[str, ...]
_Key: TypeAlias = str | tuple[str, str]
_State: TypeAlias = tuple[
    float,
    defaultdict[_Key, float],
    dict[Lane, float],
    dict[str, tuple[float, Collective | None]],
]
"""What time it is, what it was spent on, when lanes are free, and when what was started ends."""


class Links(Protocol):
    """What exchanges go over: a torus, or boxes."""

    def transfer(self, kind: str, groups: Groups, operand: int, result: int) -> Transfer:
        """How long a collective takes, and what it keeps busy."""
        ...

    def lane_name(self, lane: Lane) -> str:
        """What is kept busy, in words."""
        ...


def time_of(
    module: hlo.Module,
    visited: Mapping[str, Visit],
    axis_sizes: Mapping[str, int],
    chip: Chip,
    links: Links,
    *,
    cycles: bool = True,
) -> Time:
    """How long a scheduled program takes.

    Args:
        module: of a compiled program.
        visited: how its computations run.
        axis_sizes: of the mesh, major to minor.
        chip: whose figures to use.
        links: between the devices, which are in the order of the mesh.
        cycles: whether the compiler's are those of the chip.
    """
    told = cycles and any(
        _CYCLES.search(one.attributes)
        for name in visited
        for one in module.computations[name].instructions
    )
    clock = _Clock(module, visited, axis_sizes, chip, links, told)
    clock.run(module.computations[module.entry])
    flops = round(clock.spent["flops"])
    return Time(
        chip=chip.name,
        seconds=clock.now,
        compute=clock.spent["compute"],
        memory=clock.spent["memory"],
        exchanges=tuple(
            Exchange(
                name=one.name,
                mesh_axes=one.mesh_axes,
                source=one.source,
                seconds=clock.spent["links", one.name],
                exposed=clock.spent["exposed", one.name],
            )
            for one in clock.collectives.values()
            if ("links", one.name) in clock.spent
        ),
        hardware_flops=flops,
        hfu=clock.spent["taken"] / (chip.flops * clock.now) if clock.now else 0.0,
        source="compiler" if told else "predicted",
        unknown=(*(() if told else (PREDICTED,)), *clock.unknown),
        layer=tuple(_coarse(clock.longest_layer())),
    )


def _added(found: Iterable[tuple[int, float]]) -> tuple[int, float]:
    flops, taken = zip((0, 0.0), *found, strict=True)
    return sum(flops), sum(taken)


def _moved_by(one: hlo.Instruction) -> tuple[int, bool]:
    """Bytes that a copy moves beside the core, and whether it is to or from the host's memory.

    Its type is ``(to, from, context)``; of a slice or an update, ``((operands), result, context)``.
    """
    first, *others = hlo.tuple_elements(one.type) or (one.type,)
    operands = hlo.tuple_elements(first)
    if not operands:
        texts = (first, *others[:1])
    elif one.opcode.startswith("dynamic-update-slice"):
        texts = (operands[1], others[0])
    else:
        texts = (operands[0], others[0])
    moved = min(sum(shape.nbytes for shape in hlo.parse_shapes(text)) for text in texts)
    return moved, any(_HOST_SPACE in text for text in texts)


class _Layer(NamedTuple):
    """What happened in one iteration of a loop, and how long all of them take."""

    seconds: float
    start: float
    events: list[Event]


# A layer has at most about twice as many events on a core.
_FINEST = 1 / 200


def _coarse(layer: _Layer) -> Iterator[Event]:
    """Events from the beginning of a layer, where short neighbours on a core are one."""
    events = [dataclasses.replace(one, start=one.start - layer.start) for one in layer.events]
    span = max((one.start + one.seconds for one in events), default=0.0)
    for kind, run in itertools.groupby(events, lambda one: (one.lane, one.kind)):
        if kind[0] != "core" or kind[1] == "exposed":
            yield from run
            continue
        together: list[Event] = []
        for one in run:
            together.append(one)
            if sum(other.seconds for other in together) >= span * _FINEST:
                yield _joined(together)
                together = []
        if together:
            yield _joined(together)


def _joined(events: list[Event]) -> Event:
    """Neighbours as one, with the name of the longest."""
    longest = max(events, key=lambda one: one.seconds)
    end = events[-1].start + events[-1].seconds
    return dataclasses.replace(longest, start=events[0].start, seconds=end - events[0].start)


class _Clock:
    """The time on a device, and what it was spent on.

    `spent` has seconds by what they were spent on; of exchanges, by ``links`` or ``exposed`` and
    the collective's name.
    """

    def __init__(
        self,
        module: hlo.Module,
        visited: Mapping[str, Visit],
        axis_sizes: Mapping[str, int],
        chip: Chip,
        links: Links,
        told: bool,
    ):
        self.module = module
        self.visited = visited
        self.chip = chip
        self.links = links
        self.told = told
        self.now = 0.0
        self.free: dict[Lane, float] = {}
        self.spent: defaultdict[_Key, float] = defaultdict(float)
        self.unknown: dict[str, None] = {}
        # Ends of what was started, by channel or by name.
        self.ends: dict[str, tuple[float, Collective | None]] = {}
        self.traffic = Traffic(module)
        # By the identity of the instruction: names may come again in another computation.
        self.products: dict[int, tuple[int, float]] = {}
        self.flops_in = functools.cache(self._flops_in)
        self.sizes_in = functools.cache(self._sizes_in)
        self.collectives = {one.name: one for one in ledger(module, visited, axis_sizes)}
        self.transfers: dict[str, Transfer] = {}
        self.events: list[Event] = []
        self.layer: _Layer | None = None

    def longest_layer(self) -> _Layer:
        """An iteration of the loop that takes at least half of the time, or else everything."""
        if self.layer and self.layer.seconds >= self.now / 2:
            return self.layer
        return _Layer(self.now, 0.0, self.events)

    def mark(
        self, lane: str, name: str, kind: str, start: float, end: float, axes: Axes = ()
    ) -> None:
        """Notes that something is busy from a time to another."""
        if end > start:
            self.events.append(
                Event(
                    lane=lane,
                    name=name,
                    kind=kind,
                    mesh_axes=axes,
                    start=start,
                    seconds=end - start,
                )
            )

    def run(self, computation: hlo.Computation) -> None:
        """Executes one computation."""
        self.flops_in(computation.name)
        types = {one.name: one.type for one in computation.instructions}
        for one in computation.instructions:
            self.step(one, types, computation)

    def step(self, one: hlo.Instruction, types: Mapping[str, str], home: hlo.Computation) -> None:
        """Executes one instruction."""
        if one.opcode not in ("while", "conditional", "call"):
            # Of the branch that is taken, and of each trip.
            self.spent["flops"] += self.flops(one)
            self.spent["taken"] += self.taken(one)
        match hlo.base_opcode(one):
            case "while":
                self.loop(one, home)
            case "conditional":
                self.branch(one)
            case "call":
                for name, _ in calls_of(one):
                    self.run(self.module.computations[name])
            case "fusion" if held := self.held(one):
                self.fused(*held)
            case _ if one.opcode.endswith("-done"):
                self.wait(one.operand_names[0])
            case _ if is_collective(one) or one.opcode.endswith("-start"):
                self.started(one)
            case _:
                self.compute(one, types)

    # Exchanges

    def held(self, one: hlo.Instruction) -> tuple[hlo.Instruction, str] | None:
        """The collective that a fusion starts, ends or is, and which of these; else None.

        A fusion that does a step of one beside its own work is that work.
        """
        for name, _ in calls_of(one):
            inside = self.module.computations[name].instructions
            found = next(filter(is_collective, inside), None)
            if found is None:
                continue
            targets = (i.attribute("custom_call_target") for i in inside)
            roles = {(target or "").strip('"') for target in targets}
            for role in (STARTS, WAITS):
                if role in roles:
                    return found, role
            if found.name in self.collectives:
                return found, ""
        return None

    def fused(self, one: hlo.Instruction, role: str) -> None:
        """A fusion around a collective, which it starts, ends or is."""
        key = f"channel {one.attribute('channel_id')}"
        if role == WAITS:
            self.wait(key)
        else:
            self.start(one, key, sync=not role)

    def start(self, one: hlo.Instruction, key: str, *, sync: bool) -> None:
        row = self.collectives.get(one.name)
        if row is None:
            return
        transfer = self.transfer(one, row)
        begin = max([self.now, *(self.free.get(lane, 0.0) for lane in transfer.lanes)])
        end = begin + transfer.seconds
        self.free.update(dict.fromkeys(transfer.lanes, end))
        for lane in sorted(transfer.lanes, reverse=True):
            self.mark(self.links.lane_name(lane), row.kind, "exchange", begin, end, row.mesh_axes)
        self.spent["links", row.name] += transfer.seconds
        self.ends[key] = end, row
        if sync:
            self.wait(key)

    def wait(self, key: str) -> None:
        """The core stands still until what was started has ended."""
        end, row = self.ends.pop(key, (self.now, None))
        if end > self.now:
            spent = "memory" if row is None else ("exposed", row.name)
            self.spent[spent] += end - self.now
            if row is None:
                self.mark("core", "wait for memory", "memory", self.now, end)
            else:
                name = f"wait for {row.kind}"
                self.mark("core", name, "exposed", self.now, end, row.mesh_axes)
            self.now = end

    def started(self, one: hlo.Instruction) -> None:
        """A collective; or a copy between memories, which has a lane of its own."""
        inside = (i for n, _ in calls_of(one) for i in self.module.computations[n].instructions)
        found = one if is_collective(one) else next(filter(is_collective, inside), None)
        if found is not None:
            self.start(found, one.name, sync=not one.opcode.endswith("-start"))
            return
        nbytes, to_host = _moved_by(one)
        lane, speed = (_HOST, self.chip.host) if to_host else (_MEMORY, self.chip.hbm)
        if not speed:
            self.unknown["copies to and from the host's memory are taken to cost nothing"] = None
            self.ends[one.name] = self.now, None
            return
        begin = max(self.now, self.free.get(lane, 0.0))
        self.free[lane] = end = begin + nbytes / speed
        self.ends[one.name] = end, None
        self.mark("host" if to_host else "memory", "copy", "memory", begin, end)

    def transfer(self, one: hlo.Instruction, row: Collective) -> Transfer:
        """How long a collective takes, worked out once for each."""
        if one.name not in self.transfers:
            if row.kind in ("collective-permute", "send"):
                groups = expand_replica_groups(row.groups)
            else:
                groups = logical_groups(one, self.module)
            operand, result = (sum(shape.nbytes for shape in side) for side in row.shapes)
            self.transfers[one.name] = self.links.transfer(row.kind, groups, operand, result)
        return self.transfers[one.name]

    # Calls

    def loop(self, one: hlo.Instruction, home: hlo.Computation) -> None:
        """The first iteration, one of the others, and that one as often as it comes again."""
        visit = self.visited.get(home.name)
        found = Reader(self.module, home, visit.constants if visit else {}).loop(one)
        trips = found.trips
        if trips is None:
            self.unknown[f"the loop {one.name} runs an unknown number of times: once here"] = None
            trips = 1
        body = self.module.computations[one.callees()["body"][0]]
        start, spent, free, ends = self._state()
        around, self.layer, first = self.layer, None, len(self.events)
        for _ in range(min(trips, 2)):
            start, spent, free, ends = self._state()
            first = len(self.events)
            self.run(body)
        own = _Layer(trips * (self.now - start), start, self.events[first:])
        if self.layer and self.layer.seconds >= (self.now - start) / 2:
            own = self.layer._replace(seconds=own.seconds)
        self.layer = max(around or own, own, key=lambda layer: layer.seconds)
        if trips > 2:
            again = trips - 2
            length = again * (self.now - start)
            self.now += length
            # What an iteration began goes on as long after the last one as after this one.
            for lane, end in self.free.items():
                self.free[lane] = end + (end != free.get(lane)) * length
            for key, (end, row) in self.ends.items():
                self.ends[key] = end + ((end, row) != ends.get(key)) * length, row
            for key, value in self.spent.items():
                self.spent[key] += again * (value - spent[key])

    def branch(self, one: hlo.Instruction) -> None:
        """The branch that takes longest."""
        before = longest = self._state()
        first, events = len(self.events), []
        for name, _ in calls_of(one):
            self.now, self.spent, self.free, self.ends = (
                before[0],
                before[1].copy(),
                before[2].copy(),
                before[3].copy(),
            )
            self.run(self.module.computations[name])
            if self.now >= longest[0]:
                longest, events = self._state(), self.events[first:]
            del self.events[first:]
        self.events += events
        self.now, self.spent, self.free, self.ends = longest

    def _state(self) -> _State:
        return self.now, self.spent.copy(), self.free.copy(), self.ends.copy()

    # The core

    def compute(self, one: hlo.Instruction, types: Mapping[str, str]) -> None:
        """What the core does itself: the compiler's cycles, or what main memory takes of it."""
        if one.opcode in FREE:
            return
        if is_opaque(one):
            seconds, spent = self.kernel(one, types)
        elif self.told:
            found = _CYCLES.search(one.attributes)
            seconds, spent = (
                (int(found[1]) / (self.chip.sustained * self.chip.clock) if found else 0.0),
                "compute",
            )
            if found and not self.flops(one):
                moved = self.moved(one, types)
                if moved < seconds:
                    seconds, spent = moved, "memory"
            elif found and self.is_large(one) and not self.is_bare(one):
                alone = self.taken(one) / (self.chip.product_share * self.chip.kept)
                seconds, spent = self.slower(alone, self.moved(one, types))
        else:
            seconds, spent = self.slower(self.taken(one) / self.chip.kept, self.moved(one, types))
        self.spent[spent] += seconds
        name = place(one.op_name) if one.op_name else one.name
        self.mark("core", name, spent, self.now, self.now + seconds)
        self.now += seconds

    @staticmethod
    def slower(computing: float, moving: float) -> tuple[float, str]:
        """What two kinds of work take that go on side by side, and which of them decides."""
        return (computing, "compute") if computing > moving else (moving, "memory")

    def moved(self, one: hlo.Instruction, types: Mapping[str, str]) -> float:
        """Seconds in which the memories move what an instruction reads and writes."""
        far = self.traffic.instruction(one, types) / (REACHED * self.chip.hbm)
        if not self.chip.vmem:
            return far
        texts = [*(types.get(name, "") for name in one.operand_names), one.type]
        near = sum(
            sum(shape.nbytes for shape in hlo.parse_shapes(text)) - hbm_size(text) for text in texts
        )
        return max(far, near / self.chip.vmem)

    def flops(self, one: hlo.Instruction) -> int:
        """Of the products in an instruction, and in what it calls."""
        return self._of_products(one)[0]

    def taken(self, one: hlo.Instruction) -> float:
        """FLOPs of bf16 that take as long as these."""
        return self._of_products(one)[1]

    def _of_products(self, one: hlo.Instruction) -> tuple[int, float]:
        own = self.products.get(id(one), (0, 0.0))
        return _added([own, *(self.flops_in(name) for name, _ in calls_of(one))])

    def taken_by(self, one: hlo.Instruction, flops: int, home: hlo.Computation) -> float:
        """The same, of one product."""
        return self.chip.taken(flops, element_types(one, home), bf16_passes(one, home))

    def _flops_in(self, name: str) -> tuple[int, float]:
        computation = self.module.computations[name]
        found = {
            id(one): (flops, self.taken_by(one, flops, computation))
            for one, flops in products_of(computation)
        }
        self.products |= found
        inner = (
            self.flops_in(called) for one in computation.instructions for called, _ in calls_of(one)
        )
        return _added([*found.values(), *inner])

    def is_large(self, one: hlo.Instruction) -> bool:
        """Whether the products of an instruction are all of large matrices."""
        names = [name for name, _ in calls_of(one)]
        return bool(names) and all(self.sizes_in(name) >= _LARGE for name in names)

    def is_bare(self, one: hlo.Instruction) -> bool:
        """Whether nothing but its products is computed in a fusion."""
        return all(
            i.opcode in _PRODUCTS or (i.opcode in _BESIDE_PRODUCTS and self.is_bare(i))
            for name, _ in calls_of(one)
            for i in self.module.computations[name].instructions
        )

    def _sizes_in(self, name: str) -> float:
        """The smallest size of the products in a computation; 0 for one with a batch."""
        computation, smallest = self.module.computations[name], math.inf
        types = {one.name: one.type for one in computation.instructions}
        for one, flops in products_of(computation):
            shapes = [hlo.parse_shapes(types.get(n, "")) for n in one.operand_names[:2]]
            made = math.prod(hlo.parse_shapes(hlo.result_type(one))[0].dims)
            contracted = flops // (2 * max(1, made))
            left, right = (math.prod(s[0].dims) // max(1, contracted) if s else 0 for s in shapes)
            smallest = min(smallest, contracted, left, right) if left * right == made else 0
        inner = [self.sizes_in(c) for i in computation.instructions for c, _ in calls_of(i)]
        return min(smallest, *inner, math.inf)

    def kernel(self, one: hlo.Instruction, types: Mapping[str, str]) -> tuple[float, str]:
        """A kernel written by hand, of which the compiler knows what its author says."""
        found = _ESTIMATE.search(one.attributes)
        figures = {name: int(value) for name, value in _FIGURE.findall(found[1])} if found else {}
        flops = figures.get("flops", 0)
        if not flops:
            operands = [hlo.parse_shapes(types.get(name, "")) for name in one.operand_names]
            known = known_flops(
                one.op_name, [*itertools.chain(*operands)], hlo.parse_shapes(one.type)
            )
            flops, why = known or (0, "only what it moves")
            target = (one.attribute("custom_call_target") or "").strip('"')
            name = one.op_name.rpartition("/")[0].rpartition("/")[2] or one.name
            sentence = f"the kernel {name} ({target}) has no cost_estimate: counted as {why}"
            self.unknown[sentence] = None
        self.spent["flops"] += flops
        self.spent["taken"] += flops
        computing = flops / (KERNEL * self.chip.kept)
        return self.slower(computing, self.moved(one, types))
