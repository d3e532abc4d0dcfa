"""What the planner answers for a program, and what it looks at on each mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import spmd
from spmd.planner import asked
from spmd.planner.choose import choose
from spmd.planner.search.descent import Rules
from spmd.planner.verify import Program, structs

from . import kept
from .cases import Case
from .compiled import STANDING_IN, every_mesh
from .experts import BOTH

_EXPERTS = 4
"""So many of each mesh are compiled, to have an order that predictions can be held against."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that was looked at closely.

    Attributes:
        name: ``found``, or that of a seed.
        sizes: of the mesh's axes.
        predicted: seconds.
        seconds: of the program, compiled for its hardware; or None.
        estimated: bytes at the peak.
        peak: the same of the program, compiled for its hardware; or None.
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
        seconds: of the compiled program; where virtual CPU devices stand in, compiled for hardware.
        peak: bytes on a device, of the same program.
        candidates: all that were looked at closely, the answer among them.
        searched: seconds of the search.
        tried: plans that it saw.
        specs: by path, what each dimension of an argument is split over: axes, or None.
        wire: bytes that a device sends in a call, as compiled where virtual CPU devices stand in.
        told: the same as Shardy tells it; None elsewhere.
    """

    sizes: Mapping[str, int]
    predicted: float
    seconds: float
    peak: float
    candidates: Sequence[Candidate]
    searched: float
    tried: int
    specs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    wire: int = 0
    told: int | None = None


def answered(
    function: Any,
    args: Sequence[Any],
    options: Mapping[str, Any],
    where: Any,
    *,
    memory: str | None = None,
    seeds: bool = True,
    top: int = 3,
    axes: Sequence[str] = BOTH,
    mesh: Any = None,
    hardware: Any = None,
) -> Answer:
    """Plans a program.

    What is planned on virtual CPU devices is compiled for the hardware that they stand in for, too.

    Args:
        function: that is planned.
        args: descriptions of its arguments.
        options: of `pjit`.
        where: a topology, whose mesh shapes are free, or a mesh.
        memory: of a device, as text; by default what the chip has.
        seeds: whether experts are starts of the search.
        top: how many layouts are compiled.
        axes: names of the mesh axes.
        mesh: whose shape a topology has, if it is not free.
        hardware: the mesh that virtual CPU devices stand in for.
    """
    chip = STANDING_IN if hardware is not None else None
    plan: Any = spmd.plan(
        function, *args, topology=where, mesh=mesh, axes=axes, memory=memory, top=top,
        seeds=seeds, chip=chip, progress=False, **options,
    )  # fmt: skip
    if chip is None:
        return _answer(plan, plan.seconds)
    step = spmd.pjit(function, plan=plan, **options)
    with where:
        lowered = step.lower(*args)
    before, after = spmd.preview(lowered), spmd.report(lowered)
    with hardware:
        found = spmd.report(step.lower(*args))
    assert found.time
    assert found.memory
    return dataclasses.replace(
        _answer(plan, found.time.seconds),
        peak=found.memory.peak,
        wire=after.total.wire_bytes,
        told=before.total.wire_bytes,
    )


def of_each_mesh(case: Case, where: str) -> Iterator[Candidate]:
    """The best layout that is found and a few unlike experts on each mesh of a topology, compiled.

    They are spread over the predictions: the three best of all meshes differ in a few per cent.
    """
    program = Program(function=case.step, args=structs(case.args), options=case.options)
    for sizes in every_mesh(where):
        on = asked.hardware(where, sizes, BOTH, None, None, subject="benchmark")
        lowered = program.lowered(on.meshes[0])
        found = kept.of_mesh(lowered, lambda on=on: [*map(dataclasses.asdict, _of(program, on))])
        yield from (Candidate(**one) for one in found)


def _of(program: Program, on: asked.Hardware) -> Iterator[Candidate]:
    """The best layout that is found and a few unlike experts, as far as they fit as compiled."""
    rules = Rules(budget=on.budget)
    found = choose(program, on.meshes, on.chip, rules=rules, top=1, named=_EXPERTS)
    for one in found.choices:
        if one.report and one.fits(on.budget):
            yield Candidate(
                name=one.name,
                sizes=dict(one.mesh.shape),
                predicted=float(one.predicted),
                seconds=float(one.seconds),
                estimated=float(one.estimate.peak),
                peak=float(one.peak),
            )


def _answer(plan: Any, seconds: float) -> Answer:
    return Answer(
        sizes=dict(plan.axes),
        predicted=plan.predicted,
        seconds=seconds,
        peak=plan.memory,
        candidates=[*map(_candidate, plan.candidates)],
        searched=plan.searched,
        tried=plan.tried,
        specs={one.name: one.spec for one in plan.arguments},
    )


def _candidate(one: Any) -> Candidate:
    return Candidate(
        name=one.name,
        sizes=dict(one.axes),
        predicted=one.predicted,
        seconds=one.seconds if one.verified == "time" else None,
        estimated=one.estimated_peak,
        peak=one.peak if one.verified == "time" else None,
    )
