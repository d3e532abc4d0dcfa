"""What the planner answers for a case, through its public door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import spmd

from .cases import Case


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that was looked at closely.

    Attributes:
        name: ``found``, or that of a seed.
        sizes: of the mesh's axes.
        predicted: seconds.
        seconds: of the compiled program, or None.
        estimated: bytes at the peak.
        peak: the same of the compiled program, or None.
    """

    name: str
    sizes: Mapping[str, int]
    predicted: float
    seconds: float | None
    estimated: float
    peak: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan.

    Attributes:
        best: what was chosen.
        candidates: all that were looked at closely.
        searched: seconds of the search.
        tried: plans that it saw.
    """

    best: Candidate
    candidates: Sequence[Candidate]
    searched: float
    tried: int


def answer(
    case: Case,
    where: str,
    *,
    memory: str | None = None,
    seeds: bool = True,
    top: int = 3,
    axes: Sequence[str] = ("data", "model"),
) -> Answer:
    """Plans a case for a topology, whose mesh shapes are free."""
    plan = spmd.plan(
        case.step,
        *case.args,
        topology=where,
        axes=axes,
        memory=memory,
        top=top,
        seeds=seeds,
        cache=False,
        **case.options,
    )
    found = [_candidate(one) for one in plan.candidates]
    best = next(
        (one for one in found if one.seconds == plan.seconds and one.sizes == dict(plan.axes)),
        None,
    )
    return Answer(
        best=best
        or Candidate(
            name="found",
            sizes=dict(plan.axes),
            predicted=plan.predicted,
            seconds=plan.seconds,
            estimated=plan.memory,
            peak=plan.memory,
        ),
        candidates=found,
        searched=plan.searched,
        tried=plan.tried,
    )


def _candidate(one: Any) -> Candidate:
    return Candidate(
        name=one.name,
        sizes=dict(one.axes),
        predicted=one.predicted,
        seconds=one.seconds,
        estimated=one.estimated_peak,
        peak=one.peak,
    )
