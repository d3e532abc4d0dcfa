"""The record of a plan, from the layouts that were looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

from spmd._mesh import show_axes
from spmd.errors import Failure, PlanMemoryError
from spmd.inspection.compile.timed import links_of
from spmd.inspection.records.plan import Candidate, Deviation, Entries, Placed, Plan
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.records.sums import once, sum_of
from spmd.planner.asked import Hardware, label_of
from spmd.planner.cost.estimate import Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.deviations import deviations
from spmd.planner.prices import prices_of
from spmd.planner.program.layout import Fixed
from spmd.planner.tiers.choice import FOUND, Choice, Chosen, program_of
from spmd.planner.verify import Program


def recorded(
    found: Chosen,
    on: Hardware,
    leaves: tuple[Sequence[Placed], Sequence[Placed]],
    *,
    fixed: Collection[str],
    keeps: Fixed,
    labels: Mapping[str, int],
    source: Program,
    **known: Any,
) -> Plan:
    """The record of the first choice, with the others beside it.

    Args:
        found: what was looked at.
        on: what it is for.
        leaves: arguments and results, without places.
        fixed: names of those whose places the user gave.
        keeps: their places.
        labels: classes that the user named.
        source: what was planned.
        **known: fields that do not depend on what was found.
    """
    best = found.choices[0]
    looks = source if found.complete else None  # who has no time for more waits for nothing else
    return Plan(
        axes=dict(best.mesh.shape),
        topology=on.topology,
        device_kind=best.mesh.devices.flat[0].device_kind,
        chip=on.chip.name,
        budget=on.budget,
        arguments=_priced(_placed(leaves[0], best.ins, fixed), best, on, keeps, looks),
        results=_placed(leaves[1], best.outs, fixed),
        pins=best.pins,
        candidates=tuple(itertools.islice(_candidates(found.choices, labels), _MOST)),
        report=best.report,
        tried=found.tried,
        searched=found.searched,
        compiled=found.compiled,
        compiles=found.compiles,
        complete=found.complete,
        deviations=_deviations(best),
        **known,
    )


def _deviations(best: Choice) -> tuple[Deviation, ...]:
    if best.told is None or best.report is None:
        return ()
    return deviations(best.told, best.report.collectives)


def _left(whole: float, parts: float) -> float:
    """What parts leave of a sum; nothing where that is what rounding leaves."""
    left = float(whole - parts)
    return left if left > whole * _ROUNDING else 0.0


_ROUNDING = 1e-12
"""Of a sum, more than numbers of 64 bits lose in it."""

_MOST = 40
"""Candidates that a plan keeps."""


def _placed(
    leaves: Sequence[Placed], entries: Sequence[Entries], fixed: Collection[str]
) -> tuple[Placed, ...]:
    """Leaves with their places; tokens of effects that are ordered come before them."""
    own = entries[len(entries) - len(leaves) :]
    return tuple(
        # A key is an array of one dimension more inside of the program.
        dataclasses.replace(leaf, spec=spec[: len(leaf.shape)], is_fixed=leaf.name in fixed)
        for leaf, spec in zip(leaves, own, strict=True)
    )


def _priced(
    arguments: tuple[Placed, ...],
    best: Choice,
    on: Hardware,
    keeps: Fixed,
    source: Program | None,
) -> tuple[Placed, ...]:
    sizes = dict(best.mesh.shape)
    links, _ = links_of(on.chip, [*best.mesh.devices.flat], sizes)
    prices = prices_of(best, Machine(on.chip, links, sizes), keeps, source) if links else {}
    by_tensor = [found for _, found in sorted(prices.items())]
    own = by_tensor[len(by_tensor) - len(best.kept) :]
    by_leaf = dict(zip(best.kept, own, strict=False))
    return tuple(
        one if one.is_fixed else dataclasses.replace(one, prices=by_leaf.get(i, ()))
        for i, one in enumerate(arguments)
    )


def _candidates(choices: Sequence[Choice], labels: Mapping[str, int]) -> Iterator[Candidate]:
    """Of those that are one program the first one, with the names of all experts.

    Of those that have one name and the same figures the first one, too: people see no difference.
    """
    programs: dict[Any, list[Choice]] = {}
    for choice in choices:
        programs.setdefault(program_of(choice), []).append(choice)
    seen: set[Any] = set()
    for first, *others in programs.values():
        names = dict.fromkeys(one.name for one in others if one.name not in (first.name, FOUND))
        same = tuple(sorted(names, key=len))  # a plainer expert has a shorter name
        one = dataclasses.replace(_candidate(first, labels), same=same)
        figures = one.estimated, one.predicted, one.estimated_peak, one.sent, one.peak, one.seconds
        if (key := (one.name, *one.axes.items(), figures)) not in seen:
            seen.add(key)
            yield one


def _candidate(one: Choice, labels: Mapping[str, int]) -> Candidate:
    report, estimate = one.report, one.estimate
    compute, memory = estimate.compute, estimate.memory
    told = None if one.told is None else sum_of(once(one.told)).wire_bytes
    return Candidate(
        name=one.name,
        axes=dict(one.mesh.shape),
        orders=_orders(one, labels),
        estimated=float(estimate.seconds),
        estimated_peak=round(estimate.peak) if math.isfinite(estimate.peak) else 0,
        compute=float(compute),
        memory=float(memory),
        exchange=_left(one.predicted, compute + memory),
        predicted=float(one.predicted),
        sent=sum_of(once(report.collectives)).wire_bytes if report else told or 0,
        told=told,
        time=report.time if report else None,
        peak=report.memory.peak if report and report.memory else one.needed,
        verified="" if not report else "bytes" if one.is_stand_in or not report.time else "time",
        failure=one.failure,
    )


def _orders(one: Choice, labels: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    if one.layout is None:
        return {}
    own = dict(one.layout.state)
    return {
        axis: (
            *(f"{label_of(n, one.graph, labels)} (optimizer)" for n in own.get(axis, ())),
            *(label_of(n, one.graph, labels) for n in order),
        )
        for axis, order in one.layout.orders
    }


# Nothing fits


def nothing_fits(plan: Plan, on: Hardware, choices: Sequence[Choice], keeps: Fixed) -> Failure:
    """The failure of a program of which no layout keeps to the memory; the smallest comes first."""
    nearest, budget = plan.chosen, on.budget or 0
    largest = sorted(plan.arguments, key=lambda one: -_local_bytes(one, plan.axes))[:3]
    held = [f"{one.name} {show_bytes(_local_bytes(one, plan.axes))}" for one in largest]
    early = "" if plan.complete else "the search was ended early: give it more time;\nor "
    memory = plan.report.memory if plan.report else None
    buffers = memory.buffers[:1] if memory else ()
    held += [f"inside {one.name} {show_bytes(one.nbytes)}" for one in buffers]
    enough = _enough(choices, on, keeps)
    how, ask = "", ""
    if nearest.peak is None:
        is_asked = any(one.report or one.failure for one in choices)
        how = " by the estimate" * is_asked
        # Of a peak a compiler may need less than the estimate; of arguments none does.
        given = sum(_local_bytes(one, plan.axes) for one in plan.arguments)
        if plan.complete and given <= budget:
            more = "a larger top=" if is_asked else "top=1, which may need less than this"
            ask = f"ask the compiler with {more};\nor "
    return Failure(
        what="finds no layout that fits",
        given=f"memory={show_bytes(budget)} on each device",
        expected="a peak within it",
        got=f"{show_bytes(nearest.needed)}{how} with {nearest.name} on {show_axes(nearest.axes)}, "
        f"which is nearest: {show_bytes(nearest.needed - budget)} too much;\n"
        f"largest on a device: {', '.join(held)}",
        fix=early
        + (f"take {enough}, by the estimate; or " if enough else "")
        + ask
        + ", ".join(_remedies(plan, choices)),
        error=PlanMemoryError,
    )


def _remedies(plan: Plan, choices: Sequence[Choice]) -> Iterator[str]:
    """What takes less memory, of what was not done already."""
    yield "take a smaller batch"
    if any(one.is_fixed for one in (*plan.arguments, *plan.results)):
        yield "fix fewer places"
    if not any(one.donated for choice in choices for one in choice.graph.tensors):
        yield "donate what is returned"
    yield "or recompute with jax.checkpoint"


def _local_bytes(one: Placed, axes: Mapping[str, int]) -> int:
    return one.nbytes_on(axes) or 0


_MOST_TIMES = 64


def _enough(choices: Sequence[Choice], on: Hardware, keeps: Fixed) -> str:
    """The fewest devices, in doublings, on which a layout that was looked at would fit."""
    layouts = [one for one in choices if one.layout]
    known = [one.peak / one.estimate.peak for one in layouts[:_MOST] if one.report]
    # What the compiler needed more than the estimate, it will need there.
    budget = (on.budget or 0) / max(1.0, min(known, default=1.0))
    of_graph: dict[int, list[Choice]] = {}
    for one in layouts:
        of_graph.setdefault(id(one.graph), []).append(one)
    times = 2
    while times <= _MOST_TIMES:
        for found in of_graph.values():
            meshes = dict.fromkeys(one.mesh for one in found[:_MOST])
            grown = (sizes for mesh in meshes for sizes in _grown(mesh.shape, times))
            for sizes in {tuple(one.items()): one for one in grown}.values():
                links, _ = links_of(on.chip, [], sizes)
                if links and _smallest(found, Machine(on.chip, links, sizes), keeps) <= budget:
                    return f"{math.prod(sizes.values())} devices ({show_axes(sizes)})"
        times *= 2
    return ""


def _grown(shape: Mapping[str, int], times: int) -> Iterator[dict[str, int]]:
    """Meshes of so many times the devices, one or two axes of which are longer; first one alone."""
    for axis in shape:
        yield {**shape, axis: shape[axis] * times}
    for first, second in itertools.combinations(shape, 2):
        part = 2
        while part < times:
            yield {**shape, first: shape[first] * times // part, second: shape[second] * part}
            part *= 2


def _smallest(found: Sequence[Choice], machine: Machine, keeps: Fixed) -> float:
    """The least peak of layouts of one program, in bytes."""
    estimate = Estimator(found[0].graph, machine, keeps)
    return min(estimate(one.layout).peak for one in found if one.layout)
