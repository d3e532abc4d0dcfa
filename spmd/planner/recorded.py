"""The record of a plan, from the layouts that were looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from spmd.errors import Failure, PlanError
from spmd.inspection.records.plan import Candidate, Entries, Placed, Plan
from spmd.inspection.records.report import Shape
from spmd.inspection.records.sizes import show_bytes
from spmd.planner.asked import Hardware, label_of
from spmd.planner.choose import Choice
from spmd.planner.layout import spec_entries
from spmd.planner.pins import pins_of
from spmd.planner.verify import Program, open_leaves


def recorded(
    found: Sequence[Choice],
    on: Hardware,
    program: Program,
    *,
    labels: Mapping[str, int],
    name: str,
    versions: Mapping[str, str],
    program_key: str,
) -> Plan:
    """The record of the first choice, with the others beside it."""
    best = found[0]
    sizes = dict(best.mesh.shape)
    ins, outs = open_leaves(program.traced(best.mesh))
    return Plan(
        name=name,
        axes=sizes,
        topology=on.topology,
        device_kind=best.mesh.devices.flat[0].device_kind,
        chip=on.chip.name,
        budget=on.budget,
        arguments=_placed(ins, best, "argument"),
        results=_placed(outs, best, "output"),
        pins=pins_of(best.graph, best.layout, sizes),
        candidates=tuple(_candidate(one, labels) for one in found),
        report=best.report,
        tried=0,
        searched=0.0,
        compiled=0.0,
        complete=True,
        program=program_key,
        versions=versions,
    )


def _placed(leaves: Sequence[Placed], best: Choice, kind: str) -> tuple[Placed, ...]:
    """Leaves with their places; a module may have constants before its arguments."""
    sizes = best.mesh.shape
    tensors = [one for one in best.graph.tensors if one.kind == kind]
    specs = [tuple(spec_entries(best.layout.places(one, sizes), len(one.shape))) for one in tensors]
    own: list[Entries] = specs[len(specs) - len(leaves) :]
    return tuple(
        dataclasses.replace(leaf, spec=spec) for leaf, spec in zip(leaves, own, strict=True)
    )


def _candidate(one: Choice, labels: Mapping[str, int]) -> Candidate:
    report = one.report
    stand_in = one.mesh.devices.flat[0].platform == "cpu"
    memory = report.memory if report else None
    return Candidate(
        name=getattr(one, "name", "found"),
        axes=dict(one.mesh.shape),
        orders={
            axis: tuple(label_of(number, one.graph, labels) for number in order)
            for axis, order in one.layout.orders
        },
        estimated=one.estimate.seconds,
        estimated_peak=round(one.estimate.peak),
        compute=one.estimate.compute,
        memory=one.estimate.memory,
        exchange=one.predicted - one.estimate.compute - one.estimate.memory,
        predicted=one.predicted,
        sent=report.total.wire_bytes if report else 0,
        time=report.time if report else None,
        peak=memory.peak if memory else None,
        verified="" if not report else "bytes" if stand_in or not report.time else "time",
    )


def nothing_fits(plan: Plan, on: Hardware) -> Failure:
    """The failure of a program of which no layout keeps to the memory."""
    nearest, budget = min(plan.candidates, key=lambda one: one.needed), on.budget or 0
    largest = sorted(plan.arguments, key=_local_bytes(plan), reverse=True)[:3]
    held = [f"{one.name} {show_bytes(_local_bytes(plan)(one))}" for one in largest]
    axes = ", ".join(f"{axis}={size}" for axis, size in nearest.axes.items())
    return Failure(
        what="finds no layout that fits",
        given=f"memory={show_bytes(budget)} on each device",
        expected="a peak within it",
        got=f"{show_bytes(nearest.needed)} with {nearest.name} on {axes}, which is nearest: "
        f"{show_bytes(nearest.needed - budget)} too much;\nlargest: {', '.join(held)}",
        fix="take more devices or a smaller batch, donate what is returned, or recompute with "
        "jax.checkpoint",
        error=PlanError,
    )


def _local_bytes(plan: Plan) -> Any:
    def of(one: Placed) -> int:
        parts = math.prod(plan.axes[axis] for axes in one.spec for axis in axes)
        return Shape(dtype=one.dtype, dims=one.shape).nbytes // parts

    return of
