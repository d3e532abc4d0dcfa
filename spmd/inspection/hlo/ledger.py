"""Every collective of a compiled program as a record: its data, its axes, its line, its count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import warnings

from spmd.inspection.hlo import text as hlo
from spmd.inspection.hlo.calls import (
    CALLERS,
    IN_STEPS,
    STARTS,
    WAITS,
    Visit,
    calls_of,
    visits,
)
from spmd.inspection.hlo.groups import logical_groups, mesh_axes_of, numbering, written_groups
from spmd.inspection.hlo.parts import Around, Divider, Origin, Place
from spmd.inspection.hlo.scatters import Scatters
from spmd.inspection.records.names import direction_of, user_source
from spmd.inspection.records.report import KINDS, Collective, Shapes, Source


def collectives(hlo_text: str, axis_sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    """List every collective of a compiled program.

    Args:
        hlo_text: what ``compiled.as_text()`` gives.
        axis_sizes: the axes of the mesh that the program was compiled for, major to minor, as
            ``mesh.shape`` gives them.

    Returns:
        One record per place in the program, in the order in which the program reaches them. Lines
        that were not understood are in the `unread` of `parse_modules`, and a warning says so.
    """
    modules = hlo.parse_modules(hlo_text)
    if unread := [line for module in modules for line in module.unread]:
        text = f"collectives: {len(unread)} lines not understood; first: {unread[0].strip()[:200]}"
        warnings.warn(text, stacklevel=2)
    return tuple(one for module in modules for one in ledger(module, visits(module), axis_sizes))


def ledger(
    module: hlo.Module,
    visited: Mapping[str, Visit],
    axis_sizes: Mapping[str, int],
    *,
    for_cpu: bool = False,
) -> Iterator[Collective]:
    """List the collectives of a module whose computations run as `visited` says.

    In a program `for_cpu`, which has no reduce-scatter, all-reduces that stand for one are marked.
    """
    reader = _Reader(module, visited, axis_sizes, for_cpu)
    for one, home in _in_program_order(module, visited):
        if is_collective(one) and not reader.goes_on(one, home):
            yield reader.record(one, home)


def _in_program_order(module: hlo.Module, visited: Mapping[str, Visit]) -> Iterator[Place]:
    """Every exchange and every call that runs, where the program first reaches it."""
    looked_at = {name: _looked_at(module.computations[name]) for name in visited}
    rest = {name: iter(found) for name, found in looked_at.items() if found}
    entered = {module.entry}
    pending = [module.entry] if module.entry in rest else []
    while pending:
        home = pending[-1]
        one = next(rest[home], None)
        if one is None:
            pending.pop()
            continue
        yield one, home
        inside = dict.fromkeys(name for name, _ in calls_of(one) if name in rest)
        pending += [name for name in reversed(inside) if name not in entered]
        entered.update(inside)


def _looked_at(computation: hlo.Computation) -> list[hlo.Instruction]:
    """The instructions that may exchange data, and those inside which others may."""
    if computation.opcodes.isdisjoint(_LOOKED_AT):
        return []
    return [one for one in computation.instructions if one.opcode in _LOOKED_AT]


def wire_bytes(kind: str, operand: int, result: int, group_size: int) -> int:
    """Bytes that one device sends in one collective when devices form a ring.

    With S bytes of payload and n devices in a group: an all-reduce sends 2(n-1)/n S, the reduce-
    scatter, all-gather and all-to-all (n-1)/n S, where S is the larger of operand and result; a
    permute, a broadcast and a send S, and a recv nothing, since its bytes are counted where they
    are sent. The first two are lower bounds of any algorithm, and a ring reaches them: P. Patarasuk
    and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
    Distrib. Comput. 69 (2009). NCCL's documentation calls them bus bandwidth factors. How much a
    ragged all-to-all sends is known only at run time: this is the most that its operand allows.

    Args:
        kind: one of `KINDS`.
        operand: bytes on one device before it.
        result: bytes on one device after it.
        group_size: devices in a group.

    Returns:
        Bytes, rounded up.
    """
    others = group_size - 1
    if others < 1 or kind == "recv":
        return 0
    match kind:
        case "all-reduce":
            return -(-2 * others * operand // group_size)
        case "all-gather" | "reduce-scatter" | "all-to-all":
            return -(-others * max(operand, result) // group_size)
        case "ragged-all-to-all":
            return -(-others * operand // group_size)
    return operand


def is_collective(one: hlo.Instruction) -> bool:
    """Whether an instruction exchanges data between devices, or starts to."""
    if one.opcode not in _EXCHANGES:
        return False
    # Transfers to and from the host share the opcodes of those between devices.
    return one.opcode not in _SENDS or one.attribute("is_host_transfer") != "true"


_SENDS = frozenset(("send", "recv", "send-start", "recv-start"))
_EXCHANGES = frozenset((*KINDS, *(f"{kind}-start" for kind in KINDS)))
_LOOKED_AT = _EXCHANGES | CALLERS


def _channels(module: hlo.Module, target: str) -> dict[str, list[str]]:
    """The computations that call a target, by the channel of the collective beside the call."""
    mark = f'custom_call_target="{target}"'
    found: dict[str, list[str]] = {}
    for computation in module.computations.values():
        if "custom-call" not in computation.opcodes:
            continue
        if any(mark in i.attributes for i in computation.instructions if i.opcode == "custom-call"):
            for one in filter(is_collective, computation.instructions):
                found.setdefault(_channel(one), []).append(computation.name)
    return found


def _channel(one: hlo.Instruction) -> str:
    return one.attribute("channel_id") or ""


class _Reader:
    """Turns instructions of one module into records; groups that occur again are read once."""

    def __init__(
        self,
        module: hlo.Module,
        visited: Mapping[str, Visit],
        axis_sizes: Mapping[str, int],
        for_cpu: bool,
    ):
        self.module = module
        self.visited = visited
        self.axis_sizes = axis_sizes
        self.crossed: dict[object, tuple[tuple[str, ...], int]] = {}
        self.around = functools.cache(lambda name: Around(module.computations[name]))
        self.starts = _channels(module, STARTS)
        self.waits = _channels(module, WAITS) if self.starts else {}
        self.divider = Divider(module, visited, self.around)
        self.scatters = Scatters(module, visited, self.around) if for_cpu else None

    def goes_on(self, one: hlo.Instruction, home: str) -> bool:
        """Whether this is a later part of a collective that another fusion starts."""
        if not self.starts or IN_STEPS not in one.attributes:
            return False
        return home not in self.starts.get(_channel(one), [home])

    def record(self, one: hlo.Instruction, home: str) -> Collective:
        visit, starts = self.visited[home], home in self.starts.get(_channel(one), ())
        kind, shapes = _exchange(one, home, self.around(home).types, visit)
        mesh_axes, group_size = self._crossing(one)
        places = [(one, home), *self._holder(one, visit, starts)]
        origin = self._origin(places)
        operand, result = (sum(shape.nbytes for shape in side) for side in shapes)
        payload, wire = max(operand, result), wire_bytes(kind, operand, result, group_size)
        # One all-to-all takes its operand in pieces, one for each member of a group.
        combined = 1 if kind == "all-to-all" else max(1, len(shapes.operands))
        whole = Collective(
            kind=kind,
            mesh_axes=mesh_axes,
            shapes=shapes,
            dtype=", ".join(dict.fromkeys(shape.dtype for shape in shapes.operands)),
            payload_bytes=payload,
            wire_bytes=wire,
            group_size=group_size,
            executions=visit.executions,
            source=user_source(origin.frames),
            **origin._asdict(),
            is_async=one.opcode.endswith("-start") or visit.is_async or starts,
            combined=combined,
            conditional=visit.conditional,
            in_loop=visit.in_loop,
            name=one.name,
            groups=written_groups(one),
            sliced=self._sliced(one, home),
        )
        parts = self.divider.parts(whole, places) if combined > 1 else ()
        return dataclasses.replace(whole, parts=parts) if parts else whole

    def _sliced(self, one: hlo.Instruction, home: str) -> tuple[int, ...]:
        is_sum = self.scatters and hlo.base_opcode(one) == "all-reduce"
        return self.scatters.sliced(one, home) if self.scatters and is_sum else ()

    def _crossing(self, one: hlo.Instruction) -> tuple[tuple[str, ...], int]:
        key = numbering(one), written_groups(one)
        if key not in self.crossed:
            groups = logical_groups(one, self.module)
            axes = mesh_axes_of(groups, self.axis_sizes)
            self.crossed[key] = axes, max(map(len, groups), default=1)
        return self.crossed[key]

    def _origin(self, places: Sequence[Place]) -> Origin:
        """The frames and the name of a collective.

        What has no frames takes those of the operation around it, of its reduction, of the first
        operation that uses its result, or of the last that makes its data.
        """
        op_name = next((place.op_name for place, _ in places if place.op_name), "")
        for place, _ in places:
            if frames := hlo.frames_of(place, self.module):
                return Origin(frames, op_name, direction_of(place.op_name))
        near = self._nearest(places, op_name)
        # A reduction that the user wrote has its line in the function that adds two elements.
        frames = self._reduction_frames(places[0][0])
        return near._replace(frames=frames, source_is_consumer=False) if frames else near

    def _nearest(self, places: Sequence[Place], op_name: str) -> Origin:
        for others, uses in ((Around.users, True), (Around.makers, False)):
            near = (others(self.around(home), one) for one, home in places)
            for other in itertools.chain.from_iterable(near):
                op_name = op_name or other.op_name
                if frames := hlo.frames_of(other, self.module):
                    direction = direction_of(other.op_name)
                    return Origin(frames, op_name, direction, source_is_consumer=uses)
        return Origin((), op_name, direction_of(op_name))

    def _reduction_frames(self, one: hlo.Instruction) -> tuple[Source, ...]:
        function = self.module.computations.get(one.callees().get("to_apply", ("",))[0])
        found = (hlo.frames_of(i, self.module) for i in function.instructions) if function else ()
        return next(filter(None, found), ())

    def _holder(self, one: hlo.Instruction, visit: Visit, starts: bool) -> Iterator[Place]:
        """The operation that holds a collective; of one that starts it, what waits for it."""
        for waiting in self.waits.get(_channel(one), ()) if starts else ():
            visit = self.visited.get(waiting, visit)
        if (visit.in_fusion or visit.is_async) and visit.caller:
            yield visit.caller, visit.home


# What is exchanged


def _exchange(
    one: hlo.Instruction, home: str, types: Mapping[str, str], visit: Visit
) -> tuple[str, Shapes]:
    """The kind of a collective, and its shapes."""
    kind = hlo.base_opcode(one)
    # Some printers write the operands' types in place, others only their names.
    named = (types[name] for name in one.operand_names if name in types)
    operands = hlo.parse_shapes(one.operands) or hlo.parse_shapes(" ".join(named))
    results = hlo.parse_shapes(hlo.result_type(one))
    fusion = visit.caller if visit.in_fusion else None
    match kind:
        case "all-reduce" if fusion and home.startswith("all-reduce-scatter"):
            # On TPU a reduce-scatter is a fusion around an all-reduce and the slice of it.
            return "reduce-scatter", Shapes(operands, hlo.parse_shapes(hlo.result_type(fusion)))
        case "ragged-all-to-all":  # the others are where to write, offsets and sizes
            operands = operands[:1]
        case "send" | "recv":  # of data, a context and a token
            results = hlo.parse_shapes(hlo.tuple_elements(one.type)[0])
            operands = results
    return kind, Shapes(operands, results)
