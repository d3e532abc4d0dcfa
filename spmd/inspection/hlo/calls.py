"""Which computations of a module run, in which order, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import operator

from spmd.inspection.hlo.loops import Constants, Reader
from spmd.inspection.hlo.text import Instruction, Module, base_opcode

# TPU writes a gather that runs beside other work into three fusions or more: one that starts it,
# those with the work, one that waits. The gather stands in each, with the same channel.
IN_STEPS = '"async_collective_fusion_config"'
STARTS, WAITS = "AsyncCollectiveStart", "AsyncCollectiveDone"
"""What the first of them and the last of them call."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """How one computation runs, over all places that it is called from.

    Attributes:
        executions: how often, in one call of the program; None where that is unknown.
        conditional: True where every way to it leads through a branch, which may not be taken.
        in_loop: True where a way to it leads through a loop.
        in_fusion: True where it is the inside of one operation.
        is_async: True where it is started, and waited for later.
        caller: the instruction that calls it first; None for the entry.
        home: the name of the computation that `caller` stands in.
        constants: elements of its parameter that have one known value whenever it runs.
        unknown_loops: names of the loops of unknown trip count that it is the body or condition of.
    """

    executions: int | None
    conditional: bool = False
    in_loop: bool = False
    in_fusion: bool = False
    is_async: bool = False
    caller: Instruction | None = None
    home: str = ""
    constants: Constants = dataclasses.field(default_factory=dict)
    unknown_loops: frozenset[str] = frozenset()

    def __add__(self, other: Visit) -> Visit:
        a, b = self.executions, other.executions
        return dataclasses.replace(
            self,
            executions=None if a is None or b is None else a + b,
            conditional=self.conditional and other.conditional,
            in_loop=self.in_loop or other.in_loop,
            in_fusion=self.in_fusion and other.in_fusion,
            is_async=self.is_async and other.is_async,
            constants=dict(self.constants.items() & other.constants.items()),
            unknown_loops=self.unknown_loops | other.unknown_loops,
        )


Modules = Sequence[tuple[Module, Mapping[str, Visit]]]
"""The modules of a program, each with how its computations run."""

_Call = tuple[Instruction, str, str]
"""An instruction, a computation that runs inside it, and the attribute that names that."""


def visits(module: Module) -> dict[str, Visit]:
    """How every computation of a module runs, by name, in the order in which they are reached.

    A computation that several instructions call is one entry, with its executions summed; what is
    never called, such as the function of a reduction, is not there.
    """
    if module.entry not in module.computations:
        return {}
    calls = {name: _calls(module, name) for name in module.computations}
    found: dict[str, Visit] = {module.entry: Visit(executions=1)}
    for name in filter(calls.__getitem__, _callers_first(module.entry, calls)):
        for callee, visit in _called(module, name, calls[name], found[name]):
            found[callee] = found[callee] + visit if callee in found else visit
    return {name: found[name] for name in _program_order(module.entry, calls)}


def _calls(module: Module, name: str) -> list[_Call]:
    computation = module.computations[name]
    if computation.opcodes.isdisjoint(CALLERS):
        return []
    return [
        (one, callee, role)
        for one in computation.instructions
        for callee, role in calls_of(one)
        if callee in module.computations
    ]


def _callers_first(entry: str, calls: Mapping[str, list[_Call]]) -> list[str]:
    """The computations that run, each after all that call it."""
    done: list[str] = []
    seen: set[str] = set()
    pending = [(entry, False)]
    while pending:
        name, entered = pending.pop()
        if entered:
            done.append(name)
        elif name not in seen:
            seen.add(name)
            pending.append((name, True))
            pending += [(callee, False) for _, callee, _ in calls[name]]
    return done[::-1]


def _program_order(entry: str, calls: Mapping[str, list[_Call]]) -> list[str]:
    """The computations that run, in the order in which the program reaches them."""
    seen: dict[str, None] = {}
    pending = [entry]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen[name] = None
            pending += [callee for _, callee, _ in reversed(calls[name])]
    return [*seen]


def _called(
    module: Module, name: str, calls: list[_Call], here: Visit
) -> Iterator[tuple[str, Visit]]:
    around = Reader(module, module.computations[name], here.constants)
    for one, group in itertools.groupby(calls, key=operator.itemgetter(0)):
        kind = base_opcode(one)
        loop = around.loop(one) if kind == "while" else None
        inside = functools.partial(
            Visit,
            conditional=here.conditional or kind == "conditional",
            in_loop=here.in_loop or kind == "while",
            in_fusion=here.in_fusion or kind == "fusion",
            is_async=here.is_async or one.opcode.endswith("-start"),
            caller=one,
            home=name,
            unknown_loops=frozenset([one.name] if loop and loop.trips is None else []),
        )
        for index, (_, callee, role) in enumerate(group):
            if loop:
                times = _times(here.executions, loop.trips, tests=role == "condition")
                constants = loop.constants
            else:
                argument, times = _argument(one, index), here.executions
                constants = around.constants_of(argument) if argument else {}
            yield callee, inside(executions=times, constants=constants)


def _times(executions: int | None, trips: int | None, *, tests: bool) -> int | None:
    if executions == 0 or (trips == 0 and not tests):
        return 0
    # A loop tests once more than its body runs.
    return None if executions is None or trips is None else executions * (trips + tests)


def _argument(one: Instruction, branch: int) -> str:
    """The operand that is the only parameter of a computation that an instruction calls."""
    if base_opcode(one) == "fusion":  # no loop stands in it
        return ""
    names = one.operand_names
    if base_opcode(one) == "conditional":  # a predicate or index, and an operand for each branch
        return names[branch + 1] if branch + 1 < len(names) else ""
    return names[0] if len(names) == 1 else ""


def calls_of(one: Instruction) -> list[tuple[str, str]]:
    """The computations that run inside an instruction, each with the attribute that names it.

    The `to_apply` of anything but a call is a scalar function, and the update and done of an
    asynchronous call name the computation that its start has already run.
    """
    roles = _ROLES.get(one.opcode)
    if not roles:
        return []
    named = one.callees()
    return [(callee, role) for role in roles for callee in named.get(role, ())]


_ROLES = {
    "while": ("condition", "body"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async": ("calls",),
}
_ROLES |= {f"{opcode}-start": roles for opcode, roles in _ROLES.items()}

CALLERS = frozenset(_ROLES)
"""Opcodes of instructions inside which computations run."""
