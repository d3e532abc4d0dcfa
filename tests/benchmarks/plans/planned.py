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
        sizes: of the mesh that was chosen.
        predicted: seconds.
        seconds: of the compiled program.
        peak: bytes on a device, of the compiled program.
        candidates: all that were looked at closely, the answer among them.
        searched: seconds of the search.
        tried: plans that it saw.
        verified: by what: ``time``, ``bytes`` or nothing.
    """

    sizes: Mapping[str, int]
    predicted: float
    seconds: float
    peak: float
    candidates: Sequence[Candidate]
    searched: float
    tried: int
    verified: str


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
    plan: Any = spmd.plan(
        case.step, *case.args, topology=where, axes=axes, memory=memory, top=top, seeds=seeds,
        cache=False, **case.options,
    )  # fmt: skip
    found = [
        Candidate(
            name=one.name,
            sizes=dict(one.axes),
            predicted=one.predicted,
            seconds=one.seconds if one.verified else None,
            estimated=one.estimated_peak,
            peak=one.peak if one.verified else None,
        )
        for one in plan.candidates
    ]
    return Answer(
        sizes=dict(plan.axes),
        predicted=plan.predicted,
        seconds=plan.seconds,
        peak=plan.memory,
        candidates=found,
        searched=plan.searched,
        tried=plan.tried,
        verified=plan.chosen.verified,
    )
