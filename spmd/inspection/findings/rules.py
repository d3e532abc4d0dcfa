"""What costs a program more than it has to, and what to write instead.

Each rule is a function that gives findings; `RULES` lists those on the compiled program. What no
mesh axis splits is asked of Shardy as well: those on arguments that are whole, on batches, on
values between arguments and results, and on work that is repeated are in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
import sys
from typing import Any

import jax

from spmd.inspection.findings.batch import batch_finding, unsplit_batches
from spmd.inspection.findings.recomputed import recomputations
from spmd.inspection.findings.rematerialization import Rematerialization
from spmd.inspection.findings.values import Place, name_of, value_findings, whole_arguments
from spmd.inspection.findings.work import Made, Repeated, Work, made_by, work_finding
from spmd.inspection.hlo.calls import Modules, Visit
from spmd.inspection.hlo.ledger import is_collective
from spmd.inspection.hlo.memory import donations
from spmd.inspection.hlo.text import Computation, Instruction, Module, parse_shapes
from spmd.inspection.records.names import is_library, users_own
from spmd.inspection.records.report import Collective, Finding, Report, Shape, Source, axis_name
from spmd.inspection.shardy.propagation import Propagation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is known of a compiled program.

    Attributes:
        report: without findings.
        modules: its text, with how each computation runs.
        parameters: paths of the arguments that the last module takes, in its order.
        donated: paths of the arguments that the user gave away.
        rematerialized: what the partitioner warned of; none where it was compiled by others.
        ignored: the lines whose constraints it was traced without.
    """

    report: Report
    modules: Modules
    parameters: Sequence[str]
    donated: Sequence[str]
    rematerialized: Sequence[Rematerialization] = ()
    ignored: Sequence[Source] = ()


Findings = Callable[[Propagation | None], tuple[Finding, ...]]
"""All findings on a program, once it is known how its values are split.

That is None where it was compiled by others, or this jaxlib lacks the passes.
"""


def findings(program: Program) -> Findings:
    """All findings: constraints that do nothing, repeated work, then the most bytes first.

    Whole arguments, which may be meant so, are last. Nothing holds the program afterwards.
    """
    found = [finding for rule in RULES for finding in rule(program)]
    shapes, made = _buffer_shapes(program), made_by(program.modules)
    return functools.partial(_all, found, program.report, shapes, made)


def _all(
    found: Sequence[Finding],
    report: Report,
    shapes: Container[Shape],
    made: Mapping[Place, list[Made]],
    propagation: Propagation | None,
) -> tuple[Finding, ...]:
    every = [*found, *_splits(report, shapes, made, propagation)]
    ranks = {"ignored-constraint": 0, "replicated-argument": 2}
    return tuple(sorted(every, key=lambda one: (ranks.get(one.kind, 1), -one.flops, -one.nbytes)))


# Logical constraints of Flax that do nothing, and do not say so
#
# `flax.linen.with_logical_constraint` looks for the mesh of `jax.set_mesh`, and returns its operand
# where there is none. Nothing of that is left in the program: it is seen while that is traced.

#: How many lines a finding names.
_NAMED = 5


class _Rules(tuple):
    """Logical axis rules of Flax that know who reads them."""

    places: dict[Place, Source]

    def __iter__(self) -> Iterator[Any]:
        if jax.sharding.get_abstract_mesh().empty and (place := _reader()):
            self.places.setdefault((place.file, place.line), place)
        return super().__iter__()


@contextlib.contextmanager
def ignored_constraints() -> Iterator[dict[Place, Source]]:
    """Collects the lines whose logical constraints do nothing, in what is traced meanwhile.

    Only where rules are active; and what JAX has traced before, it does not trace again.
    """
    flax: Any = sys.modules.get("flax.linen")
    rules = flax.get_logical_axis_rules() if flax else ()
    if not rules:
        yield {}
        return
    watched = _Rules(rules)
    watched.places = {}
    with flax.logical_axis_rules(watched):
        yield watched.places


def _reader() -> Source | None:
    """The user's line that asks for a logical constraint without a mesh of its own."""
    frame: Any = sys._getframe(2)
    while frame and frame.f_code.co_name != "with_logical_constraint":
        frame = frame.f_back
    if frame is None or frame.f_locals.get("mesh") is not None:
        return None
    while frame and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    return Source(file=code.co_filename, line=frame.f_lineno, column=0, function=code.co_name)


def _ignored_constraints(program: Program) -> Iterator[Finding]:
    if not program.ignored:
        return
    count, named = len(program.ignored), program.ignored[:_NAMED]
    where = "on this line" if count == 1 else f"on {count} lines"
    yield Finding(
        kind="ignored-constraint",
        subject=f"with_logical_constraint does nothing {where}",
        source=named[0],
        nbytes=0,
        measure="",
        facts=(
            "Flax looks for the mesh of jax.set_mesh, which neither `with mesh` nor spmd.Mesh sets",
            *([f"on {', '.join(map(name_of, named))}"] if count > 1 else []),
            *([f"and on {count - _NAMED} more"] if count > _NAMED else []),
        ),
        fix="spmd.pjit in place of jax.jit, or with jax.set_mesh(mesh), or mesh=mesh in the call "
        "of with_logical_constraint",
    )


# Arguments


def _moved_arguments(program: Program) -> Iterator[Finding]:
    for one in program.report.reshards:
        given, wanted = (text.partition(" on mesh ")[0] for text in (one.given, one.wanted))
        yield Finding(
            kind="moved-argument",
            subject=f"{one.argument} is moved before the program starts",
            source=None,
            nbytes=one.nbytes,
            measure="wire",
            facts=(f"it lies as {one.given}", f"the program takes {one.wanted}"),
            fix=f"jax.device_put(x, NamedSharding(mesh, {wanted})) where it is made, or "
            f"{given} in in_axis_resources",
        )


def _unused_donations(program: Program) -> Iterator[Finding]:
    if not program.modules:
        return
    module = program.modules[-1][0]
    taken = {number for number, _ in donations(module.header).values()}
    kept = {program.parameters[i] for i in taken if i < len(program.parameters)}
    arguments = {a.path: a for a in program.report.arguments}
    for path in program.donated:
        one = arguments.get(path)
        if one is None or path in kept or path not in program.parameters or not one.nbytes:
            continue
        yield Finding(
            kind="unused-donation",
            subject=f"{path} is donated, and its memory is not used again",
            source=None,
            nbytes=one.nbytes,
            measure="memory",
            facts=(f"it is {Shape(dtype=one.dtype, dims=one.shape)}, split as {one.sharding}",),
            fix="a donated argument makes room for a result of the same shape, dtype and sharding: "
            "return one, give that result the same spec in out_axis_resources, or do not donate it",
        )


# Loops


def _collectives_in_loops(program: Program) -> Iterator[Finding]:
    records = {one.name: one for one in program.report.collectives}
    for module, visited in program.modules:
        for name, visit in visited.items():
            loop = visit.caller
            if loop and loop.opcode == "while" and name in loop.callees().get("body", ()):
                for one in _repeated(module, visited, name):
                    if record := records.get(one.name):
                        yield _repeated_finding(record, visited[visit.home].executions)


def _repeated(module: Module, visited: Mapping[str, Visit], name: str) -> Iterator[Instruction]:
    """The collectives of a loop's body whose operands are the same each time.

    A permute of constants is not the user's: where the compiler makes a loop of a product and its
    exchange, it sends the zeros that the sum begins with.
    """
    body = module.computations[name]
    same, constants = _invariants(body), _constants(module, visited, name)
    for one in body.instructions:
        if is_collective(one) and {*one.operand_names} <= same:
            permute = one.opcode.startswith("collective-permute")
            if not (permute and {*one.operand_names} <= constants):
                yield one


#: What gives the same result for the same operands, and may be done elsewhere.
_IMPURE = {"parameter", "infeed", "outfeed", "send", "recv", "custom-call", "rng", "while"}


def _constants(module: Module, visited: Mapping[str, Visit], name: str) -> set[str]:
    """Values of a computation that are made of constants alone, be it outside of the loop."""
    visit, given = visited[name], set[int]()
    if visit.caller is not None and visit.caller.opcode == "while":
        outside = {one.name: one for one in module.computations[visit.home].instructions}
        first = outside.get(visit.caller.operand_names[0])
        if first is not None and first.opcode == "tuple":
            known = _constants(module, visited, visit.home)
            given = {i for i, one in enumerate(first.operand_names) if one in known}
    return _invariants(module.computations[name], given)


def _invariants(body: Computation, given: Container[int] | None = None) -> set[str]:
    """Values of a loop's body that are the same each time.

    Of what the loop carries, the elements that are `given` count, or all.
    """
    root = body.root
    made = {one.name: one for one in body.instructions}
    handed_on = root.operand_names if root and root.opcode == "tuple" else ()
    found: set[str] = set()
    for one in body.instructions:
        source = made.get(one.operand_names[0]) if one.opcode == "get-tuple-element" else None
        if source is not None and source.opcode == "parameter":
            index = int(one.attribute("index") or 0)
            same = index < len(handed_on) and _origin(made, handed_on[index]) == one.name
            if same and (given is None or index in given):
                found.add(one.name)
        elif one.opcode.removesuffix("-start") not in _IMPURE and {*one.operand_names} <= found:
            found.add(one.name)
    return found


def _origin(made: Mapping[str, Instruction], name: str) -> str:
    """What a value is a copy of."""
    while (one := made.get(name)) and one.opcode in ("copy", "bitcast"):
        name = one.operand_names[0]
    return name


def _repeated_finding(one: Collective, outside: int | None) -> Finding:
    times = one.executions
    once = max(outside or 1, 1)
    article = "an" if one.kind[0] in "aeiou" else "a"
    return Finding(
        kind="collective-in-loop",
        subject=f"a loop repeats {article} {one.kind} of the same values",
        source=users_own(one.source),
        nbytes=one.wire_bytes * max((times or 2) - once, 0),
        measure="wire",
        facts=(
            f"{', '.join(map(str, one.shapes.operands))} over "
            f"{', '.join(one.mesh_axes) or 'no axis of the mesh'}",
            f"{times} times in one call, where {once} would do"
            if times is not None
            else "an unknown number of times in one call",
        ),
        fix="do it before the loop: with_sharding_constraint on the value there, to what the body "
        "needs, where its memory allows it",
    )


# Reshards


def _rematerializations(program: Program) -> Iterator[Finding]:
    for one in program.rematerialized:
        name = one.op_name.rpartition("/")[2] if one.source else one.op_name
        yield Finding(
            kind="full-rematerialization",
            subject=f"{one.shape} of {name or 'a value'} is gathered whole, "
            "only to be split otherwise",
            source=users_own(one.source),
            nbytes=one.nbytes,
            measure="memory",
            facts=(
                f"it is split as {one.given}",
                f"it is wanted as {one.wanted}",
                "every device holds all of it in between",
                *([f"at {one.sites} places in the program"] if one.sites > 1 else []),
            ),
            fix=_ONE_DEVICE if "maximal" in one.wanted else _constraints(one.route),
        )


_ONE_DEVICE = (
    "a callback of JAX runs on one device and takes all of it there: host_callback.id_tap(f, x, "
    "per_shard=True) calls with what each device holds"
)


def _constraints(route: Sequence[str]) -> str:
    steps = ", then ".join(f"with_sharding_constraint(value, {spec})" for spec in route or ["..."])
    more = ", to a sharding that shares a mesh axis with both, or the same sharding on both sides"
    return f"{steps} in between{'' if route else more}"


# What no axis splits


def _splits(
    report: Report,
    shapes: Container[Shape],
    made: Mapping[Place, list[Made]],
    found: Propagation | None,
) -> Iterator[Finding]:
    """What no mesh axis splits: each cause once, with what follows from it."""
    if found is None:
        yield from whole_arguments(report.arguments, report.mesh)
        return
    work = Work(found, report, made)
    batches = [*unsplit_batches(found, shapes)]
    for batch in batches:
        yield batch_finding(found, batch, work.take(batch.axis, batch.splits))
    unused = [*_unused_axes(found, report)]
    for axis in unused:
        if axis not in {batch.axis for batch in batches}:
            yield _unused_axis(axis, report.mesh[axis], work.take(axis))
    told = {i for batch in batches for i in batch.values}
    values = [*value_findings(found, shapes, told)]
    for repeated in work.rest():
        here = [one for one in values if repeated.makes_whole(one, report.mesh, unused)]
        values = [one for one in values if one not in here]
        yield work_finding(found, repeated, here)
    yield from values
    names = {found.values[i].name for batch in batches for i in batch.arguments}
    rest = [one for one in report.arguments if one.path not in names]
    yield from whole_arguments(rest, report.mesh)


def _unused_axes(found: Propagation, report: Report) -> Iterator[str]:
    if all(math.prod(value.shape) <= 1 for value in found.values):
        return
    splits = {value.axes for value in found.values}
    values = {axis for split in splits for axes in split for axis in axes}
    marks = {axis for m in found.marks.values() for d in m.dimensions for axis in d.axes}
    exchanged = {axis for one in report.collectives for axis in one.axis_names}
    used = {*map(axis_name, values | marks | exchanged)}
    for axis, size in report.mesh.items():
        if size > 1 and axis not in used:
            yield axis


def _unused_axis(axis: str, size: int, work: Repeated | None) -> Finding:
    repeated = [work.fact] if work else []
    return Finding(
        kind="unused-axis",
        subject=f"nothing is split over mesh axis {axis!r}",
        source=None,
        nbytes=0,
        flops=work.flops if work else 0,
        measure="",
        facts=(f"the {size} devices along it all do the same work", *repeated),
        fix=f"name {axis!r} in a spec of an argument or in a constraint, or use a mesh without it",
    )


def _buffer_shapes(program: Program) -> set[Shape]:
    """The shapes of everything that takes memory in the compiled program."""
    types = {
        one.type
        for module, visited in program.modules
        for name, visit in visited.items()
        if not visit.in_fusion
        for one in module.computations[name].instructions
    }
    return {shape for text in types for shape in parse_shapes(text)}


def _recomputations(program: Program) -> Iterator[Finding]:
    return recomputations(program.modules)


RULES = (
    _ignored_constraints,
    _moved_arguments,
    _unused_donations,
    _collectives_in_loops,
    _rematerializations,
    _recomputations,
)
