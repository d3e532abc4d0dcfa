"""Every collective of a compiled program as a record, with how often it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses

from spmd.inspection import _groups, _hlo
from spmd.inspection._hlo import Computation, Instruction, Module, Shape

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
)
"""The opcodes that move data between devices, in the order in which reports name them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One place in a compiled program where devices exchange data.

    Args:
        name: the instruction's name in the HLO text.
        kind: one of `KINDS`.
        mesh_axes: axes of the mesh, in mesh order, that the exchange crosses.
        whole_axes: False where a group takes only a part of one of them.
        groups: the logical devices that exchange with each other; device ``i`` is
            ``mesh.devices.flat[i]``.
        group_size: devices in the largest group.
        operands: shapes on each device before the exchange.
        results: shapes on each device after it.
        payload_bytes: the larger of operands and results, in bytes, for each device and execution.
        executions: how often it runs in one call of the program; None where that is unknown
            because a loop around it prints no trip count.
        conditional: True inside a branch, which may not run at all.
        is_async: True for a pair of start and done instructions, which is one record.
        op_name: the name stack that JAX gave the operation.
    """

    name: str
    kind: str
    mesh_axes: tuple[str, ...]
    whole_axes: bool
    groups: tuple[tuple[int, ...], ...]
    group_size: int
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    payload_bytes: int
    executions: int | None
    conditional: bool
    is_async: bool
    op_name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A sum over collectives.

    Args:
        sites: places in the program.
        executions: how often they run in one call, all together; None where one is unknown.
        payload_bytes: bytes for each device in one call; None where a count is unknown.
    """

    sites: int
    executions: int | None
    payload_bytes: int | None

    @classmethod
    def zeros(cls) -> Total:
        """The sum over nothing."""
        return cls(sites=0, executions=0, payload_bytes=0)

    def __add__(self, other: Total) -> Total:
        return Total(
            sites=self.sites + other.sites,
            executions=_add(self.executions, other.executions),
            payload_bytes=_add(self.payload_bytes, other.payload_bytes),
        )


def collectives(hlo_text: str, axis_sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    """List every collective of a compiled program.

    Args:
        hlo_text: what ``compiled.as_text()`` gives.
        axis_sizes: the axes of the mesh that the program was compiled for, major to minor, as
            ``mesh.shape`` gives them.

    Returns:
        One record per place in the program, in the order in which the program reaches them.
    """
    module = _hlo.parse_module(hlo_text)
    return tuple(_walk(module, module.entry, axis_sizes, executions=1, conditional=False))


def totals(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], Total]:
    """Sum collectives by kind and mesh axes.

    Args:
        found: what `collectives` gives.

    Returns:
        A total by ``(kind, mesh_axes)``, kinds in the order of `KINDS`.
    """
    sums: dict[tuple[str, tuple[str, ...]], Total] = {}
    for one in sorted(found, key=lambda c: (KINDS.index(c.kind), c.mesh_axes)):
        key = one.kind, one.mesh_axes
        sums[key] = sums.get(key, Total.zeros()) + _total(one)
    return sums


def _total(one: Collective) -> Total:
    payload = None if one.executions is None else one.executions * one.payload_bytes
    return Total(sites=1, executions=one.executions, payload_bytes=payload)


def _add(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _walk(
    module: Module,
    name: str,
    axis_sizes: Mapping[str, int],
    *,
    executions: int | None,
    conditional: bool,
) -> Iterator[Collective]:
    computation = module.computations.get(name)
    if computation is None:
        return
    types = _types(computation)
    for instruction in computation.instructions:
        if _kind(instruction):
            yield _record(instruction, types, module, axis_sizes, executions, conditional)
        for callee, times, in_branch in _calls(instruction):
            yield from _walk(
                module,
                callee,
                axis_sizes,
                executions=_times(executions, times),
                conditional=conditional or in_branch,
            )


def _times(a: int | None, b: int | None) -> int | None:
    if a == 0 or b == 0:
        return 0
    return None if a is None or b is None else a * b


def _calls(instruction: Instruction) -> Iterator[tuple[str, int | None, bool]]:
    """Each computation that runs inside an instruction, how often, and whether it may not run."""
    # `to_apply` of anything but a call is a scalar function, and the update and done of an
    # asynchronous call name the computation that its start has already run.
    match instruction.opcode:
        case "while":
            trips = instruction.trip_count
            yield from _named(instruction, "condition", None if trips is None else trips + 1)
            yield from _named(instruction, "body", trips)
        case "conditional":
            for role in ("branch_computations", "true_computation", "false_computation"):
                yield from _named(instruction, role, 1, in_branch=True)
        case "call":
            yield from _named(instruction, "to_apply", 1)
        case "fusion" | "async-start":
            yield from _named(instruction, "calls", 1)


def _named(
    instruction: Instruction, role: str, times: int | None, *, in_branch: bool = False
) -> Iterator[tuple[str, int | None, bool]]:
    for name in instruction.callees().get(role, ()):
        yield name, times, in_branch


def _kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    # Transfers to and from the host share the opcodes of those between devices.
    to_host = kind in ("send", "recv") and instruction.attribute("is_host_transfer") == "true"
    return None if to_host else kind


def _record(
    instruction: Instruction,
    types: Mapping[str, str],
    module: Module,
    axis_sizes: Mapping[str, int],
    executions: int | None,
    conditional: bool,
) -> Collective:
    groups = _groups.logical_groups(instruction, module)
    mesh_axes, whole = _groups.mesh_axes_of(groups, axis_sizes)
    operands, results = _operand_shapes(instruction, types), _result_shapes(instruction)
    return Collective(
        name=instruction.name,
        kind=_kind(instruction) or "",
        mesh_axes=mesh_axes,
        whole_axes=whole,
        groups=groups,
        group_size=max(map(len, groups), default=1),
        operands=operands,
        results=results,
        payload_bytes=max(_nbytes(operands), _nbytes(results)),
        executions=executions,
        conditional=conditional,
        is_async=instruction.opcode.endswith("-start"),
        op_name=instruction.op_name,
    )


def _nbytes(shapes: Iterable[Shape]) -> int:
    return sum(shape.nbytes for shape in shapes)


def _types(computation: Computation) -> dict[str, str]:
    """Result types by name, of a computation with collectives; the others need none."""
    if not any(_kind(instruction) for instruction in computation.instructions):
        return {}
    return {instruction.name: instruction.type for instruction in computation.instructions}


def _operand_shapes(instruction: Instruction, types: Mapping[str, str]) -> tuple[Shape, ...]:
    # Some printers write the operands' types in place, others only their names.
    inline = _hlo.parse_shapes(instruction.operands)
    if inline:
        return inline
    return _hlo.parse_shapes(" ".join(types[n] for n in instruction.operand_names if n in types))


def _result_shapes(instruction: Instruction) -> tuple[Shape, ...]:
    # A start gives (operands, results, contexts...); that of an all-reduce gives the results.
    started = instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start"
    elements = _hlo.tuple_elements(instruction.type)
    text = elements[1] if started and len(elements) > 1 else instruction.type
    return _hlo.parse_shapes(text)
