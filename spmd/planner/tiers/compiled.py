"""Tier three: what the compiler says of the best layouts, and of the best experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import math
import statistics
import time
from typing import Any
import warnings

import spmd
from spmd import stages
from spmd._mesh import show_axes
from spmd.inspection.compile.preview import previewed
from spmd.inspection.compile.timed import Asked
from spmd.inspection.compile.warned import compile_and_catch
from spmd.inspection.hlo.oom import out_of_memory
from spmd.inspection.timing.chips import Chip
from spmd.planner import cache
from spmd.planner.tiers.choice import FOUND, WRITTEN, Choice, program_of
from spmd.planner.tiers.estimated import estimate_layouts
from spmd.planner.tiers.looking import INSTEAD, NEAR, Looking
from spmd.planner.tiers.previewed import preview_best
from spmd.planner.verify import places_of_compiled, planned


def compile_best(looking: Looking, meshes: Iterable[Any] = ()) -> None:
    """The compiler's word on the best ones, and on the best experts.

    Args:
        looking: the search.
        meshes: to search once more where the compiler needs more memory than the estimate says.
    """
    if not looking.top:
        return
    for is_wanted, count in (
        (lambda one: one.name == FOUND, looking.top),
        (lambda one: one.name not in (FOUND, WRITTEN), looking.named),
        (lambda one: one.name == WRITTEN, 1),
    ):
        at = [i for i, one in enumerate(looking.choices) if is_wanted(one)]
        if not _compile_first(looking, looking.unlike(looking.ranked(at)), count):
            return
    # Where none of these keeps to the memory, the smallest ones may.
    left = {
        one.peak: i
        for i, one in reversed([*enumerate(looking.choices)])
        if not one.report and not one.failure
    }
    for _, i in sorted(left.items())[: looking.top]:
        if any(one.report and one.fits(looking.rules.budget) for one in looking.choices):
            break
        if not compile_one(looking, i):
            return
    _look_again(looking, meshes)


def _compile_first(looking: Looking, ranked: Sequence[int], count: int) -> bool:
    """Compiles so many of them; False where the time is up.

    As many more take the places of those that do not keep to the memory as compiled, as far as
    these seem to.
    """
    left = count
    for n, i in enumerate(ranked[: INSTEAD * count]):
        if not left or (n >= count and not looking.choices[i].fits(looking.rules.budget)):
            break
        if not compile_one(looking, i):
            return False
        left -= looking.choices[i].fits(looking.rules.budget)
    return True


def _look_again(looking: Looking, meshes: Iterable[Any]) -> None:
    """What is best in less memory, where a compiler needs more than the estimate says.

    Only where what fits is slower than what seemed to fit: by what the compiler said of that, a
    search knows how much less to look for.
    """
    budget = looking.rules.budget
    asked = [one for one in looking.choices if one.report or one.needed is not None]
    over = [
        one
        for one in asked
        if one.layout and looking.rules.fits(one.estimate) and not one.fits(budget)
    ]
    if budget is None or not over or looking.is_late():
        return
    fits = min((one.seconds for one in asked if one.fits(budget)), default=math.inf)
    if fits <= NEAR * min(one.predicted for one in over):
        return
    given, before = looking.rules, [*looking.choices]
    more = statistics.median(one.peak / one.estimate.peak for one in over)
    smaller = dataclasses.replace(given, budget=budget / more)
    looking.rules = smaller
    try:
        estimate_layouts(looking, meshes)
        preview_best(looking)
    finally:
        looking.rules = given
    known = {program_of(one) for one in before}
    found = looking.choices[len(before) :]
    looking.choices = before + [one for one in found if program_of(one) not in known]
    left = [
        i
        for i, one in enumerate(looking.choices)
        if smaller.fits(one.estimate) and one.layout and not one.report and not one.failure
    ]
    _compile_first(looking, looking.unlike(looking.ranked(left)), looking.top)


def compile_one(looking: Looking, i: int) -> bool:
    """Compiles one; False where the time is up."""
    if looking.is_late():
        return False
    one = looking.choices[i]
    own = program_of(one)
    same = next((c for c in looking.choices if c.report and program_of(c) == own), None)
    if same:
        looking.choices[i] = dataclasses.replace(one, told=same.told, report=same.report)
        return True
    if one.told is None:
        one = looking.previewed(one)
    lowered = one.written or planned(looking.program, one.mesh, one.ins, one.outs, one.pins)
    if one.is_stand_in:  # its compiler is asked for bytes, which are others than the chip's
        told = previewed(lowered, Asked(), subject="plan").collectives
        one = dataclasses.replace(one, told=told)
    looking.choices[i] = _asked(looking, one, lowered)
    return True


def _asked(looking: Looking, one: Choice, lowered: stages.Lowered) -> Choice:
    """The same with what the compiler says of it, or said of it before."""
    # Of what its user wrote, only the compiled program tells where results lie.
    is_kept = looking.cached and cache.folder() is not None and not one.written
    key = cache.key_of_program(lowered, looking.chip) if is_kept else ""
    if key and (found := cache.find_compiled(key)):
        return dataclasses.replace(
            one, report=found.report, failure=found.failure, needed=found.needed
        )
    looking.say(f"{one.name} on {show_axes(one.mesh.shape)}")
    looking.compiles += 1
    start = time.monotonic()
    try:
        one = _compiled(one, lowered, looking.chip)
    finally:
        looking.compiled += time.monotonic() - start
    if key and (one.report or one.needed is not None):  # any other failure may be of the moment
        cache.keep_compiled(key, cache.Compiled(one.report, one.failure, one.needed))
    return one


def _compiled(one: Choice, lowered: stages.Lowered, chip: Chip) -> Choice:
    try:
        with warnings.catch_warnings(action="ignore"):  # of layouts that nobody asked for
            compiled = compile_and_catch(lowered, by_lines=False)
    except Exception as e:
        verdict = out_of_memory(e)
        text = str(e).strip().partition("\n")[0]
        needed = verdict and (verdict.needed or verdict.available)
        return dataclasses.replace(one, failure=text or type(e).__name__, needed=needed)
    if one.written:
        ins, outs = places_of_compiled(compiled)
        one = dataclasses.replace(one, ins=ins, outs=outs)
    return dataclasses.replace(one, report=spmd.report(compiled, chip=chip))
