"""A walk through a scheduled program, on a core, its main memory and its links.

A TPU's compiler prints instructions in the order of execution, and on most of them how many cycles
it expects (``estimated_cycles``). A core runs them one after the other; the start of an exchange
takes the links of its dimensions, and its end waits for them; copies between memories have a lane
of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
import functools
import re
from typing import TypeAlias

from spmd.inspection.hlo import text as hlo
from spmd.inspection.hlo.calls import Visit, calls_of
from spmd.inspection.hlo.cost import Traffic, cost_of, is_opaque, products_of
from spmd.inspection.hlo.groups import expand_replica_groups, logical_groups
from spmd.inspection.hlo.ledger import is_collective, ledger
from spmd.inspection.hlo.loops import Reader
from spmd.inspection.records.report import Collective
from spmd.inspection.records.time import Exposed, Time
from spmd.inspection.timing.chips import Chip
from spmd.inspection.timing.torus import Lane, Torus, Transfer

# How much of the bandwidth of main memory elementwise work reaches: a lead of issue J, which the
# published runs have to confirm.
_REACHED = 0.83
# How much of the peak a kernel reaches of which only the FLOPs are known; likewise.
_KERNEL = 0.5

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ESTIMATE = re.compile(r'"cost_estimate":\{([^}]*)\}')
_FIGURE = re.compile(r'"(flops|bytes_accessed)":"?(\d+)')
_MEMORY: Lane = (-1, 0)

_State: TypeAlias = tuple[
    float,
    defaultdict[object, float],
    dict[Lane, float],
    dict[str, tuple[float, Collective | None]],
]
"""What time it is, what it was spent on, when lanes are free, and when what was started ends."""


def time_of(
    module: hlo.Module,
    visited: Mapping[str, Visit],
    axis_sizes: Mapping[str, int],
    chip: Chip,
    torus: Torus,
) -> Time:
    """How long a scheduled TPU program takes.

    Args:
        module: of a compiled program.
        visited: how its computations run.
        axis_sizes: of the mesh, major to minor.
        chip: whose figures to use.
        torus: where the devices are, in the order of the mesh.
    """
    clock = _Clock(module, visited, axis_sizes, chip, torus)
    clock.run(module.computations[module.entry])
    exposed = [
        Exposed(mesh_axes=key[1], source=key[2], seconds=seconds)
        for key, seconds in clock.spent.items()
        if isinstance(key, tuple)
    ]
    flops = cost_of(module, visited).flops + round(clock.spent["kernel flops"])
    return Time(
        chip=chip.name,
        seconds=clock.now,
        compute=clock.spent["compute"],
        memory=clock.spent["memory"],
        exchange=clock.spent["exchange"],
        exposed=tuple(sorted(exposed, key=lambda one: -one.seconds)),
        hardware_flops=flops,
        hfu=flops / (chip.flops * clock.now) if clock.now else 0.0,
        source="compiler",
        unknown=tuple(clock.unknown),
    )


class _Clock:
    """The time on a device, and what it was spent on."""

    def __init__(
        self,
        module: hlo.Module,
        visited: Mapping[str, Visit],
        axis_sizes: Mapping[str, int],
        chip: Chip,
        torus: Torus,
    ):
        self.module = module
        self.visited = visited
        self.chip = chip
        self.torus = torus
        self.now = 0.0
        self.free: dict[Lane, float] = {}
        self.spent: defaultdict[object, float] = defaultdict(float)
        self.unknown: dict[str, None] = {}
        # Ends of what was started, by channel or by name.
        self.ends: dict[str, tuple[float, Collective | None]] = {}
        self.traffic = Traffic(module)
        self.has_products = functools.cache(self._has_products)
        self.collectives = {one.name: one for one in ledger(module, visited, axis_sizes)}
        self.transfers: dict[str, Transfer] = {}

    def run(self, computation: hlo.Computation) -> None:
        """Executes one computation."""
        types = {one.name: one.type for one in computation.instructions}
        for one in computation.instructions:
            self.step(one, types, computation)

    def step(self, one: hlo.Instruction, types: Mapping[str, str], home: hlo.Computation) -> None:
        """Executes one instruction."""
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
            for role in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
                if role in roles:
                    return found, role
            if found.name in self.collectives:
                return found, ""
        return None

    def fused(self, one: hlo.Instruction, role: str) -> None:
        """A fusion around a collective, which it starts, ends or is."""
        key = f"channel {one.attribute('channel_id')}"
        if role == "AsyncCollectiveDone":
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
        self.spent["exchange"] += transfer.seconds
        self.ends[key] = end, row
        if sync:
            self.wait(key)

    def wait(self, key: str) -> None:
        """The core stands still until what was started has ended."""
        end, row = self.ends.pop(key, (self.now, None))
        if end > self.now:
            spent = "memory" if row is None else ("exposed", row.mesh_axes, row.source)
            self.spent[spent] += end - self.now
            self.now = end

    def started(self, one: hlo.Instruction) -> None:
        """A collective; or a copy between memories, which has a lane of its own."""
        inside = (i for n, _ in calls_of(one) for i in self.module.computations[n].instructions)
        found = one if is_collective(one) else next(filter(is_collective, inside), None)
        if found is not None:
            self.start(found, one.name, sync=not one.opcode.endswith("-start"))
            return
        result = hlo.tuple_elements(one.type)[:1] or (one.type,)
        nbytes = sum(shape.nbytes for shape in hlo.parse_shapes(result[0]))
        begin = max(self.now, self.free.get(_MEMORY, 0.0))
        self.free[_MEMORY] = end = begin + nbytes / self.chip.hbm
        self.ends[one.name] = end, None

    def transfer(self, one: hlo.Instruction, row: Collective) -> Transfer:
        """How long a collective takes, worked out once for each."""
        if one.name not in self.transfers:
            if row.kind in ("collective-permute", "send"):
                groups = expand_replica_groups(row.groups)
            else:
                groups = logical_groups(one, self.module)
            operand, result = (sum(shape.nbytes for shape in side) for side in row.shapes)
            self.transfers[one.name] = self.torus.transfer(row.kind, groups, operand, result)
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
        for _ in range(min(trips, 2)):
            start, spent, free, ends = self._state()
            self.run(body)
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
        for name, _ in calls_of(one):
            self.now, self.spent, self.free, self.ends = (
                before[0],
                before[1].copy(),
                before[2].copy(),
                before[3].copy(),
            )
            self.run(self.module.computations[name])
            if self.now >= longest[0]:
                longest = self._state()
        self.now, self.spent, self.free, self.ends = longest

    def _state(self) -> _State:
        return self.now, self.spent.copy(), self.free.copy(), self.ends.copy()

    # The core

    def compute(self, one: hlo.Instruction, types: Mapping[str, str]) -> None:
        """What the core does itself: the compiler's cycles, or what main memory takes of it."""
        if one.opcode == "custom-call":
            seconds, spent = self.kernel(one, types)
        else:
            found = _CYCLES.search(one.attributes)
            seconds, spent = (int(found[1]) / self.chip.clock if found else 0.0), "compute"
            if found and not self.multiplies(one):
                moved = self.moved(one, types)
                if moved < seconds:
                    seconds, spent = moved, "memory"
        self.spent[spent] += seconds
        self.now += seconds

    def moved(self, one: hlo.Instruction, types: Mapping[str, str]) -> float:
        """Seconds in which the memories move what an instruction reads and writes."""
        texts = [*(types.get(name, "") for name in one.operand_names), one.type]
        near = sum(shape.nbytes for text in texts for shape in hlo.parse_shapes(text))
        far = self.traffic.instruction(one, types)
        return max(far / (_REACHED * self.chip.hbm), near / self.chip.vmem)

    def multiplies(self, one: hlo.Instruction) -> bool:
        """Whether an instruction has a matrix product or a convolution in it."""
        if one.opcode in ("dot", "convolution"):
            return True
        return any(self.has_products(name) for name, _ in calls_of(one))

    def _has_products(self, name: str) -> bool:
        computation = self.module.computations[name]
        return any(True for _ in products_of(computation)) or any(
            self.has_products(inner) for i in computation.instructions for inner, _ in calls_of(i)
        )

    def kernel(self, one: hlo.Instruction, types: Mapping[str, str]) -> tuple[float, str]:
        """A kernel written by hand, of which the compiler knows what its author says."""
        if not is_opaque(one):
            return 0.0, "compute"
        found = _ESTIMATE.search(one.attributes)
        figures = {name: int(value) for name, value in _FIGURE.findall(found[1])} if found else {}
        moved = self.moved(one, types)
        flops = figures.get("flops", 0)
        if not flops:
            target = (one.attribute("custom_call_target") or "").strip('"')
            name = one.op_name.rpartition("/")[2] or one.name
            sentence = f"the kernel {name} ({target}) says not what it computes: counted as memory"
            self.unknown[sentence] = None
        self.spent["kernel flops"] += flops
        seconds = flops / (_KERNEL * self.chip.flops)
        return (seconds, "compute") if seconds > moved else (moved, "memory")
