"""The planner's answers beside those of experts, every figure against its target.

Every line is printed as soon as it is known. Experts and plans are compiled for described hardware.
What is planned on virtual CPU devices, whose programs have no time of their own, is compiled for
the chips that they stand in for. It is planned once more with those named, so that the planner has
their compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import math
from typing import Any

from spmd.inspection.records.sizes import parse_bytes

from .plans import compiled, planned, published
from .plans.cases import CASES, Case, built
from .plans.compiled import Figures, hardware_of, is_fixed, place_of, slice_of
from .plans.outcome import Found, shape_of, table

HEADER = f"{'':34} {'mesh':>6} {'ms':>9} {'GiB':>7}"
_TOP = 3
_GIB = 2**30


def names() -> list[str]:
    """Of all cases and published runs."""
    return [*CASES, *published.names()]


def run(chosen: Sequence[str], where: str | None, *, quick: bool = False) -> Iterator[str]:
    """Lines as they are found, then the table of all figures.

    Args:
        chosen: names of cases and published runs; none for all.
        where: a topology, instead of those of a case.
        quick: one mesh for each expert, one compile for a plan, no seeds and no budgets.
    """
    if unknown := {*chosen} - {*names()}:
        yield f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(names())}"
    found: list[Found] = []
    for name in [one for one in names() if one in (chosen or names())]:
        for one in _lines(name, where, quick):
            if isinstance(one, Found):
                found.append(one)
            yield str(one)
    yield from table(found)


def _lines(name: str, where: str | None, quick: bool) -> Iterator[str | Found]:
    if name not in CASES:
        yield f"\n{name}, published"
        yield from _published(name, quick)
        return
    case = built(name)
    for place in [where] if where else case.topologies[: 1 if quick else None]:
        yield f"\n{name} on {place}"
        yield from _case(case, place, quick)


def _case(case: Case, where: str, quick: bool) -> Iterator[str | Found]:
    experts = []
    for one in compiled.compiled(case, where, most=1 if quick else 0):
        experts.append(one)
        yield _expert_line(one)
    budgets = [None] if quick or is_fixed(where) or not case.budget else [None, case.budget]
    slices = ["", slice_of(where)] if is_fixed(where) else [""]
    wishes = itertools.product(budgets, slices, [False] if quick else [True, False])
    for budget, there, seeds in wishes:
        limit = parse_bytes(budget) if budget else None
        fitting = [one for one in experts if one.seconds and one.fits(limit)]
        best = min(fitting, key=lambda one: one.seconds or math.inf, default=None)
        answer = None
        try:
            answer = _answer(case, where, there, budget, seeds, 1 if quick else _TOP)
            if seeds and budget is None and not is_fixed(where):
                others = planned.of_each_mesh(case, where)
                answer = dataclasses.replace(answer, candidates=[*answer.candidates, *others])
        except Exception as e:  # the other cases are to be seen all the same
            yield f"  no plan: {type(e).__name__}: {str(e)[:500]}"
        yield Found(
            name=case.name,
            where=where,
            there=there,
            is_unrolled=case.is_unrolled,
            budget=budget,
            seeds=seeds,
            answer=answer,
            expert=best,
        )


def _answer(case: Case, where: str, there: str, budget: str | None, seeds: bool, top: int) -> Any:
    """The plan for a place, or for the slice `there` that it stands in for."""
    place, fixed = place_of(where), is_fixed(where)
    alone = fixed and not there
    return planned.answered(
        case.step,
        case.args,
        case.options,
        place if alone else there or where,
        memory=budget,
        seeds=seeds,
        top=top,
        axes=[*place.shape],
        mesh=place if there else None,
        hardware=hardware_of(where) if alone else None,
    )


def _published(name: str, quick: bool) -> Iterator[str | Found]:
    """A run as MaxText laid it out, and as it is planned."""
    for seeds in [False] if quick else [True, False]:
        try:
            own, answer = published.found(name, top=1 if quick else _TOP, seeds=seeds)
        except Exception as e:
            yield f"  no plan: {type(e).__name__}: {str(e)[:500]}"
            continue
        if seeds or quick:
            yield _expert_line(own)
        yield Found(
            name=name,
            where=published.topology_of(name),
            is_published=True,
            seeds=seeds,
            answer=answer,
            expert=own,
        )


def _expert_line(one: Figures) -> str:
    mesh = shape_of(one.sizes)
    if one.seconds is None or one.peak is None:
        return f"  {one.expert.name:32} {mesh:>6} does not fit"
    return f"  {one.expert.name:32} {mesh:>6} {one.seconds * 1e3:9.2f} {one.peak / _GIB:7.2f}"
