"""The fewest constraints in a user's code with which propagation gives the program of a plan.

The program is traced once with marks at all expressions that come into question. Each set of them
is then tried in the lowered module, by the passes of a preview. What is compiled, and judged in the
end, is traced with the marks of the set alone: a gradient is added up in another order where a
value has a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import copy
import functools
import logging
from typing import Any, NamedTuple

import jax

import spmd
from spmd import _jax, stages
from spmd.inspection.compile.warned import compile_and_catch
from spmd.inspection.records.names import short_path
from spmd.inspection.records.plan import SourceConstraint
from spmd.inspection.records.report import Report
from spmd.inspection.shardy import calls, passes, pipeline
from spmd.inspection.show.words import plural
from spmd.planner.code import marks
from spmd.planner.code.fewest import Fewest, Judged, is_over
from spmd.planner.code.marks import Entries
from spmd.planner.code.outcome import Outcome, difference, outcome_of, outcome_of_exchanges
from spmd.planner.code.source import Expression, Span, expressions_of, marked, users_spans
from spmd.planner.code.text import Constraints
from spmd.planner.pins import Pin
from spmd.planner.program.graph import TRANSPOSE, numbered
from spmd.planner.verify import Program, pinned

logger = logging.getLogger(__name__)

_SUBJECT = "plan"
_PROPAGATION = ("sdy-import-pipeline", "sdy-user-priority-propagate")
_MOST_PLACES = 3


def constraints_of(
    program: Program,
    mesh: Any,
    *,
    ins: Sequence[Any],
    outs: Sequence[Any],
    pins: Sequence[Pin],
    report: Report | None = None,
    compiles: int = 12,
    deadline: float | None = None,
    tell: Callable[[str], Any] = lambda one: None,
) -> Constraints:
    """The fewest constraints for the exchanges and products of a plan.

    Fewest means that each of them is needed: without any one of them the preview is another. Where
    the preview sees no difference and the compiler does, more are kept. These may say where the
    plan takes an operand, and its gradient, if that is elsewhere than the operand is.

    Args:
        program: what was planned.
        mesh: that the plan is for.
        ins: specs of the arguments, in the order of their leaves.
        outs: specs of the results, likewise.
        pins: of the plan.
        report: of the plan's compiled program; with it, the program of the code is compiled too.
        compiles: how many programs of codes are compiled at most, with a report.
        deadline: by `time.monotonic`, after which no further set is tried.
        tell: is told what is compiled.
    """
    with _jax.core.traced_anew():

        def lower() -> stages.Lowered:
            return program.fresh().lowered(mesh, ins, outs)

        case = _Case(lower(), pins, _platform_of(mesh))
        expressions, missing = case.expressions()
        trials, said = _trials(case, lower, expressions, missing, tell)
    order = sorted(trials.specs, key=lambda number: _dispensability(expressions[number]))
    trials.search(order, deadline)
    if report is not None:
        trials.settle(order, _near(trials, expressions), report, compiles, deadline)
    if missing:
        said += _shown(missing)
    return _told(trials, expressions, missing, said, report)


def _trials(
    case: _Case,
    lower: Callable[[], stages.Lowered],
    expressions: Sequence[Expression],
    missing: list[Span],
    tell: Callable[[str], Any],
) -> tuple[_Trials, str]:
    """What can be tried of expressions, of which some may be missing; why nothing can be, if so."""
    every = dict(enumerate(expressions))

    def lower_with(numbers: Collection[int]) -> stages.Lowered:
        if not numbers:
            return case.lowered
        # Another trace: that of the case has no marks.
        with _jax.core.traced_anew(), marked({n: every[n] for n in numbers}), marks.marking():
            return lower()

    try:
        with _jax.core.traced_anew(), marked(every) as changed, marks.marking():
            missing += [one.span for one in changed if not (one.is_operand or one.depth)]
            own = lower()
        return _Trials(case, own, lower_with, tell), ""
    except Exception as error:  # whatever the user's code does with a mark in it
        logger.info("plan: the program could not be lowered with marks", exc_info=error)
        said = f" Nothing was tried: with marks, the code raises {type(error).__name__}."
        return _Trials(case, case.lowered, lower_with, tell), said


def _platform_of(mesh: Any) -> str:
    """Whose compiler a program for a mesh is for; empty where no device says it."""
    return "" if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.devices.flat[0].platform


def _near(trials: _Trials, expressions: Sequence[Expression]) -> frozenset[int]:
    """What takes its values elsewhere than they are: these places, and those of its result."""
    lines = {expressions[~number].span[:2] for number in trials.pinned}
    results = {n for n in trials.specs if not expressions[n].is_operand}
    return frozenset(trials.pinned).union(n for n in results if expressions[n].span[:2] in lines)


def _dispensability(one: Expression) -> tuple[bool, int]:
    """What is left out first: what an expression takes, and what is further outside."""
    return not one.is_operand, -one.depth


class _Case:
    """A program with the specs of a plan, and what its pins make of it."""

    def __init__(self, lowered: stages.Lowered, pins: Sequence[Pin], platform: str):
        self.lowered, self.pins, self.platform = lowered, pins, platform
        self.module = passes.module_of(lowered, subject=_SUBJECT)
        self.target = self.outcome(pinned(lowered, pins).compiler_ir())

    def outcome(self, module: Any) -> Outcome:
        """What a module does."""
        return outcome_of(module, self.platform, subject=_SUBJECT)

    def operations(self) -> Iterator[tuple[Pin, Any]]:
        """What the plan pins."""
        found = numbered(self.module.operation)
        return ((one, found[one.number]) for one in self.pins)

    def expressions(self) -> tuple[list[Expression], list[Span]]:
        """What in the user's code may be constrained, and places that no text tells."""
        with self.module.context:
            return expressions_of(self._locations())

    def _locations(self) -> Iterator[Any]:
        """Of what the plan pins, and of the calls of the functions that it is in."""
        found: dict[str, list[Any]] = {}
        for one in passes.operations_in(self.module.operation):
            if one.name in calls.CALLS:
                found.setdefault(calls.callee_of(one), []).append(one)
        pending = [operation for _, operation in self.operations()]
        while pending:
            following = {}
            for one in pending:
                yield one.location
                following[_function_of(one)] = None
            pending = [call for name in following for call in found.pop(name, ())]


def _function_of(operation: Any) -> str:
    while operation.name != "func.func":
        operation = operation.parent.operation
    return passes.name_of(operation)


class _Copy(NamedTuple):
    """What passes want of a module."""

    operation: Any
    context: Any


class _Trials:
    """Sets of constraints, each tried in a module with marks.

    Args:
        case: what is to be reached.
        lowered: the program with all marks.
        lower_with: lowers it with some of them.
        tell: is told what is compiled.

    Attributes:
        specs: by the number of a mark, where the plan's program has its value.
        pinned: by the complement of the number, where the plan takes the value, if elsewhere.
        kept: of all these numbers, those that are needed.
        is_late: whether the time was up before all was tried.
    """

    def __init__(
        self,
        case: _Case,
        lowered: stages.Lowered,
        lower_with: Callable[[Collection[int]], stages.Lowered],
        tell: Callable[[str], Any],
    ):
        self._tell = tell
        self.case, self.lowered, self.lower_with = case, lowered, lower_with
        self.specs, self.pinned = _specs(lowered, case.pins)
        self.kept: frozenset[int] = frozenset(self.specs)
        self.is_late = False
        self.compiled = functools.cache(self._compiled)
        self.pasted = functools.cache(self._pasted)

    def outcome(self, kept: frozenset[int]) -> Outcome:
        """What the program with all marks does with these constraints alone."""
        module = self.lowered.compiler_ir()
        with module.context:
            copied = _Copy(module.operation.clone().operation, module.context)
        marks.keep(copied, self.places(kept))
        return self.case.outcome(copied)

    def places(self, kept: frozenset[int]) -> dict[int, Entries]:
        """By the number of a mark, where its value is to lie."""
        found = {number: self.specs[number] for number in kept if number >= 0}
        return found | {~number: self.pinned[number] for number in kept if number < 0}

    def search(self, order: Sequence[int], deadline: float | None) -> None:
        """Leaves out what can be left out by the preview."""
        target = self.case.target
        found = Fewest(lambda kept: self.outcome(kept).away(target), self.kept, deadline=deadline)
        found.search(order)
        self.kept, self.is_late = found.kept, found.is_late

    def settle(
        self,
        order: Sequence[int],
        near: frozenset[int],
        report: Report,
        compiles: int,
        deadline: float | None,
    ) -> None:
        """Keeps more where only the compiler sees that they are needed.

        Where none of these is the program of the plan, what comes nearest to it.

        Args:
            order: what is left out first.
            near: what is tried first.
            report: of the plan's program.
            compiles: how many programs are compiled at most.
            deadline: as that of `constraints_of`.
        """
        target = outcome_of_exchanges(report.collectives)

        def away(kept: frozenset[int]) -> Judged:
            return self.compiled(kept).away(target)

        every, best = frozenset(self.specs), self.kept
        for kept in dict.fromkeys((self.kept, self.kept | near, every, every | near)):
            if not compiles or not any(away(best)):
                break
            if is_over(deadline):
                self.is_late = True
                break
            best = min(best, kept, key=away)
            compiles -= 1
        if best == self.kept:
            return

        def judge(kept: frozenset[int]) -> Judged:
            found = away(kept)
            return found if found > away(best) else (0,)

        if best >= every:
            found = Fewest(judge, self.kept, deadline=deadline, most=compiles)
            found.grow([*sorted(best - every), *order[::-1]])
        else:
            found = Fewest(judge, best, deadline=deadline, most=compiles)
            found.search([one for one in (*order, *sorted(near)) if one in best])
        self.kept, self.is_late = found.kept, self.is_late or found.is_late

    def _pasted(self, kept: frozenset[int]) -> stages.Lowered:
        """The program of a code with these constraints, and nothing else of ours."""
        places = self.places(kept)
        lowered = self.lower_with(places)
        own = copy.copy(lowered)
        edit = functools.partial(marks.keep, specs=places)
        own._lowering = _jax.lowering.edited(lowered._lowering, edit)
        return own

    def _compiled(self, kept: frozenset[int]) -> Outcome:
        """What the compiler makes of it."""
        self._tell(f"compiling it with {plural(len(kept), 'constraint')}")
        compiled = compile_and_catch(self.pasted(kept), by_lines=False)
        return outcome_of_exchanges(spmd.report(compiled).collectives)


def _specs(
    lowered: stages.Lowered, pins: Sequence[Pin]
) -> tuple[dict[int, Entries], dict[int, Entries]]:
    """Where the plan's program has the value of each mark that has one place only.

    And, by the complement of its number, where the plan pins what takes the value of a mark, and
    its gradient, in one other place.
    """
    module = pinned(lowered, pins).compiler_ir()
    done = pipeline.run(module, _PROPAGATION, subject=_SUBJECT)
    found: dict[int, set[Entries | None]] = {}
    taken: dict[int, set[Entries | None]] = {}
    with module.context:
        for one in marks.marks_in(done):
            if not one.is_constraint:
                continue
            if not one.turned:
                found.setdefault(one.number, set()).add(one.entries())
            taken.setdefault(one.number, set()).update(_pinned_beside(one))
    own, other = _lone(found), _lone(taken)
    return own, {
        ~number: other[number] for number in own if other.get(number, own[number]) != own[number]
    }


def _lone(found: Mapping[int, set[Entries | None]]) -> dict[int, Entries]:
    """Those of which there is one, and which can be said."""
    lone = ((number, *entries) for number, entries in found.items() if len(entries) == 1)
    return {number: entries for number, entries in lone if entries is not None}


def _pinned_beside(one: marks.Mark) -> Iterator[Entries | None]:
    """Where the plan pins what takes the value of a mark; or what makes that of its gradient."""
    if one.turned:
        makers = [passes.maker_of(one.operation.operands[0])]
    else:
        makers = [passes.user_of(use)[0] for use in one.operation.results[0].uses]
    for maker in makers:
        is_pin = maker is not None and maker.name == "sdy.sharding_constraint"
        yield one._replace(operation=maker).entries() if is_pin else None


# What is told


def _told(
    trials: _Trials,
    expressions: Sequence[Expression],
    missing: Sequence[Span],
    said: str,
    report: Report | None,
) -> Constraints:
    places = trials.places(trials.kept)
    records = [_record(expressions[number], spec) for number, spec in places.items()]
    exact, note = _compared(trials, report)
    if not exact:
        records += _unread(trials.case, missing)
        note += said
    if trials.is_late:
        note += " Not all was tried: fewer lines may do."
    records.sort(key=_place)
    return Constraints(records=tuple(records), exact=exact, note=note)


def _place(one: SourceConstraint) -> tuple[str, int, int, int, int]:
    """Where it stands: of several that begin at one place, the longest is first."""
    return one.file, one.line, one.column or 0, -(one.end_line or 0), -(one.end_column or 0)


def _shown(missing: Sequence[Span]) -> str:
    places = [*dict.fromkeys(f"{short_path(one.file)}:{one.line}" for one in missing)]
    more = ", and more" if len(places) > _MOST_PLACES else ""
    shown = ", ".join(places[:_MOST_PLACES]) + more
    return f" No expression can be read at {shown}: nothing was tried there."


def _compared(trials: _Trials, report: Report | None) -> tuple[bool, str]:
    """Whether the program of the code is the plan's, and what was seen of it."""
    found = trials.case.outcome(trials.pasted(trials.kept).compiler_ir())
    differs = difference(found, trials.case.target)
    same = "has the exchanges and the products of the plan's"
    said = f"By the preview, the program of this code {differs or same}"
    if report is None:
        return not differs, f"{said}."
    target = outcome_of_exchanges(report.collectives)
    differs = difference(trials.compiled(trials.kept), target)
    return not differs, f"{said}; compiled, it {differs or 'has the same exchanges'}."


def _record(one: Expression, spec: Entries) -> SourceConstraint:
    span = one.span
    return SourceConstraint(
        file=span.file,
        line=span.line,
        column=span.column,
        end_line=span.end_line,
        end_column=span.end_column,
        function=span.function,
        expression=one.text,
        spec=tuple(axes or () for axes in spec),
    )


def _unread(case: _Case, missing: Collection[Span]) -> list[SourceConstraint]:
    """What the plan says of results whose expression cannot be read, once for each place."""
    found: dict[tuple[Span, str], SourceConstraint] = {}
    with case.module.context:
        for one, operation in case.operations():
            span = next(iter(users_spans(operation.location)), None)
            spec = one.specs[-1]
            # The gradient of what is there may be transposed.
            is_more = one.name == TRANSPOSE and span in {place for place, _ in found}
            if spec is not None and span is not None and span in missing and not is_more:
                name = one.name.removeprefix("stablehlo.")
                said = SourceConstraint(
                    file=span.file,
                    line=span.line,
                    column=None,
                    end_line=None,
                    end_column=None,
                    function=span.function,
                    expression=f"the result of {name} at line {span.line}",
                    spec=tuple(axes or () for axes in marks.trimmed(spec)),
                )
                found.setdefault((span, name), said)
    return [*found.values()]
