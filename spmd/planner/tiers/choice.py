"""A layout on a mesh as a search knows it, and what comes of a search."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from spmd import stages
from spmd.inspection.records.plan import Entries, Pin, added_by_compiler
from spmd.inspection.records.report import Collective, Report
from spmd.inspection.records.sums import once, sum_of
from spmd.planner.cost.estimate import Estimate
from spmd.planner.program.layout import Layout
from spmd.planner.program.structure import Graph

FOUND = "found"
WRITTEN = "as written"


class Progress(NamedTuple):
    """How far a search is.

    Attributes:
        tried: layouts so far.
        best: seconds of the best one so far; None before the first.
        compiling: what the compiler works on; empty where it does not.
        kept: whether the plan was found on the disk: it was searched for in an earlier start.
    """

    tried: int
    best: float | None
    compiling: str
    kept: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout on a mesh, and what is known of it.

    Attributes:
        name: ``found``, that of an expert, or ``as written``.
        mesh: that it is for.
        graph: the program as it was lowered for this mesh.
        layout: what its axes split; None for a program as it was written.
        kept: the leaves of the arguments that the program has.
        ins: places of all leaves.
        outs: places of the results.
        pins: constraints inside.
        estimate: of the first tier; for a program as it was written that of the preview, which
            knows no peak.
        exchange: seconds of exchanges, as Shardy makes them; None before it did.
        told: the exchanges as Shardy makes them for the chip, or for the compiler that was asked;
            None before it did.
        report: of the compiled program; None for one that was not compiled.
        failure: what the compiler said of a program that it refused.
        needed: bytes that a refused program needs, where the compiler says it.
        written: the program as it was written.
    """

    name: str
    mesh: Any
    graph: Graph
    layout: Layout | None
    kept: tuple[int, ...]
    ins: tuple[Entries, ...]
    outs: tuple[Entries, ...]
    pins: tuple[Pin, ...]
    estimate: Estimate
    exchange: float | None = None
    told: tuple[Collective, ...] | None = None
    report: Report | None = None
    failure: str = ""
    needed: int | None = None
    written: stages.Lowered | None = None

    @property
    def predicted(self) -> float:
        """Seconds, before anything was compiled.

        Of exchanges the tier counts that sees more: classes know rings and gathers ahead of their
        use, and Shardy what lies between the values that are pinned.
        """
        more = (self.exchange or 0.0) - self.estimate.exchange
        return self.estimate.seconds + max(0.0, more)

    @property
    def seconds(self) -> float:
        """Of a call: compiled for hardware that has a time, or else predicted.

        What a compiler for CPUs adds to the exchanges, others may add as well.
        """
        if self.report is None or self.report.time is None:
            return self.predicted
        if not self.is_stand_in:
            return self.report.time.seconds
        if self.told is None:
            return self.predicted
        told, sent = (sum_of(once(x)).wire_bytes for x in (self.told, self.report.collectives))
        return self.predicted + added_by_compiler(told, sent, self.report.time.exchange)

    @property
    def is_stand_in(self) -> bool:
        """Whether CPUs stand in for the hardware."""
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def peak(self) -> float:
        """Bytes of a device: as the compiler says, or else estimated."""
        if self.needed is not None:
            return self.needed
        memory = self.report.memory if self.report else None
        return memory.peak if memory else self.estimate.peak

    def fits(self, budget: float | None) -> bool:
        """Whether the compiled program, or else the estimate, keeps to a budget in bytes."""
        return not self.failure and (budget is None or self.peak <= budget)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What was looked at, and how long that took.

    Attributes:
        choices: the best one first; those that keep to the budget come first.
        tried: layouts that were estimated.
        searched: seconds without compilers.
        compiled: seconds that compilers took.
        compiles: how many programs they were asked for, beside what they said before.
        complete: whether neither a time limit nor an interrupt ended it.
    """

    choices: tuple[Choice, ...]
    tried: int
    searched: float
    compiled: float
    compiles: int
    complete: bool

    @property
    def refused(self) -> str:
        """What the compiler said, where it took none of the layouts, and not for their memory."""
        asked = [one for one in self.choices if one.report or one.failure]
        lasting = [one.failure for one in asked if one.failure and one.needed is None]
        return lasting[0] if lasting and len(lasting) == len(asked) else ""


def program_of(one: Choice) -> Any:
    """What is equal for two layouts that are one program."""
    return one.mesh, one.ins, one.outs, one.pins, id(one.written)


def place_of(one: Choice) -> Any:
    """The same, on a mesh of which sizes."""
    return tuple(size for size in one.mesh.shape.values() if size > 1), places_of_large(one)


def places_of_large(one: Choice) -> Any:
    """Where arguments lie of which each is a hundredth of all bytes."""
    arguments = [tensor for tensor in one.graph.tensors if tensor.kind == "argument"]
    least = sum(tensor.nbytes for tensor in arguments) / 100
    own = arguments[len(arguments) - len(one.kept) :]
    places = zip(own, (one.ins[i] for i in one.kept), strict=True)
    return tuple(place for tensor, place in places if tensor.nbytes >= least)
