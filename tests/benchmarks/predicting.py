"""The planner's predictions, beside those that were recorded: what a change of an estimate moves.

Nothing is compiled, so that all of it takes minutes. A prediction that is moved is no error by
itself: plan what is moved again with the compiler (`plan`), and record the predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import csv
import dataclasses
from pathlib import Path
from typing import Any

import jax

import spmd

from .plans.cases import CASES, built
from .plans.others import OTHERS
from .plans.outcome import shape_of

HEADER = (
    f"{'predicted alone':30} {'topology':11} {'mesh':>6} {'ms':>9}  {'recorded':>16}  {'moved':>6}"
)
RECORDED = Path(__file__).parent / "plans" / "predictions.csv"
TOPOLOGIES = "v5e:4x4", "v5e:8x8", "v5p:2x2x4"
#: Predictions come out the same on all machines, but for the last digits.
ALIKE = 0.002
_FIELDS = "case", "topology", "mesh", "ms", "jax"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The best prediction for a program.

    Attributes:
        case: its name.
        topology: that it is planned for.
        mesh: its shape, such as ``4x4``.
        ms: milliseconds of a call.
        jax: the version whose program was planned.
    """

    case: str
    topology: str
    mesh: str
    ms: float
    jax: str = jax.__version__

    def moved(self, before: Prediction) -> float:
        """By which share it takes longer than before."""
        return self.ms / before.ms - 1

    def is_as(self, before: Prediction) -> bool:
        """Whether it is what was recorded."""
        return abs(self.moved(before)) <= ALIKE and self.mesh == before.mesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A prediction beside the one that was recorded, if one was."""

    found: Prediction
    before: Prediction | None

    @property
    def passed(self) -> bool:
        """Whether nothing moved."""
        return self.before is not None and self.found.is_as(self.before)

    def __str__(self) -> str:
        one, before = self.found, self.before
        text = f"{one.case:30} {one.topology:11} {one.mesh:>6} {one.ms:9.3f}"
        if before is None:
            return f"{text}  {'none':>16}"
        return f"{text}  {before.mesh:>6} {before.ms:9.3f}  {one.moved(before):+6.1%}"


def rows() -> list[tuple[str, str]]:
    """Each program with each topology that it is predicted for."""
    found = [(name, where) for where in TOPOLOGIES for name in CASES]
    return [*found, *((name, TOPOLOGIES[0]) for name in OTHERS)]


def predicted(name: str, where: str) -> Prediction:
    """The best prediction for a program, whose mesh shape is free."""
    if name in CASES:
        case = built(name)
        step, args, options = case.step, case.args, case.options
    else:
        (step, args), options = OTHERS[name](), {"donate_argnums": 0}
    plan: Any = spmd.plan(
        step, *args, topology=where, axes=("data", "model"), top=0, cache=False, progress=False,
        **options,
    )  # fmt: skip
    mesh = shape_of(plan.axes)
    return Prediction(case=name, topology=where, mesh=mesh, ms=round(plan.predicted * 1e3, 5))


def recorded() -> dict[tuple[str, str], Prediction]:
    """What was recorded, by program and topology."""
    with RECORDED.open(newline="") as file:
        found = [Prediction(**{**row, "ms": float(row["ms"])}) for row in csv.DictReader(file)]
    return {(one.case, one.topology): one for one in found}


def run(chosen: Sequence[str], where: str | None, *, record: bool = False) -> Iterator[Line | str]:
    """A line for each program, beside what was recorded; one that is moved did not pass.

    Args:
        chosen: names of programs; none for all.
        where: a topology, instead of all.
        record: whether what is found takes the place of what was recorded.
    """
    names = {name: None for name, _ in rows()}
    if unknown := {*chosen} - {*names}:
        yield f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(names)}"
    known = recorded()
    for name, topology in rows():
        if name in (chosen or (name,)) and topology == (where or topology):
            found = predicted(name, topology)
            line = Line(found=found, before=known.get((name, topology)))
            yield str(line) if record else line
            if record:
                known[name, topology] = found
                _write(known)


def _write(known: dict[tuple[str, str], Prediction]) -> None:
    found = (known[key] for key in rows() if key in known)
    with RECORDED.open("w", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, found))
