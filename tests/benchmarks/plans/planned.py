"""What the planner answers for a case, through its public door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import re
import time
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
    if not hasattr(spmd, "plan"):
        return _chosen(case, where, memory, top, axes)
    plan: Any = spmd.plan(
        case.step, *case.args, topology=where, axes=axes, memory=memory, top=top, seeds=seeds,
        cache=False, **case.options,
    )  # fmt: skip
    found = [
        Candidate(
            name=one.name,
            sizes=dict(one.axes),
            predicted=one.predicted,
            seconds=one.seconds,
            estimated=one.estimated_peak,
            peak=one.peak,
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
        verified=next((one.verified for one in plan.candidates if one.seconds == plan.seconds), ""),
    )


def _chosen(case: Case, where: str, memory: str | None, top: int, axes: Sequence[str]) -> Answer:
    """Until there is `spmd.plan`: its inner stages, whose search and compiles are one time."""
    from spmd.inspection import CHIPS
    from spmd.planner import choose, search, verify

    from .compiled import every_mesh

    program = verify.Program(function=case.step, args=case.args, options=case.options)
    meshes = [spmd.topology(where, one) for one in every_mesh(where, axes)]
    rules = search.Rules(budget=nbytes(memory) if memory else None)
    before = time.perf_counter()
    found = choose.choose(program, meshes, CHIPS[where.partition(":")[0]], rules=rules, top=top)
    took = time.perf_counter() - before
    candidates = [
        Candidate(
            name="found",
            sizes=dict(one.mesh.shape),
            predicted=one.predicted,
            seconds=one.seconds,
            estimated=one.estimate.peak,
            peak=one.report.memory.peak if one.report and one.report.memory else None,
        )
        for one in found
    ]
    best = candidates[0]
    return Answer(
        sizes=best.sizes,
        predicted=best.predicted,
        seconds=best.seconds or best.predicted,
        peak=best.peak or best.estimated,
        candidates=candidates,
        searched=took,
        tried=0,
        verified="time",
    )


def nbytes(text: str) -> float:
    """Bytes of a text such as ``14GB``."""
    number, unit = re.fullmatch(r"([\d.]+)\s*(\w+)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"B": 1, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}[unit]
