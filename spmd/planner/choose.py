"""From a program and meshes to the few layouts that were compiled, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd import stages
from spmd.inspection.timing.chips import Chip
from spmd.planner.search.descent import Rules
from spmd.planner.tiers.choice import Chosen, Progress
from spmd.planner.tiers.compiled import compile_best
from spmd.planner.tiers.estimated import estimate_layouts
from spmd.planner.tiers.looking import Looking
from spmd.planner.tiers.previewed import add_written, preview_best
from spmd.planner.tiers.varied import pin_best_otherwise, split_width_of_best
from spmd.planner.verify import Program


def choose(
    program: Program,
    meshes: Sequence[Any],
    chip: Chip,
    *,
    rules: Rules | None = None,
    top: int = 3,
    seeds: bool = True,
    seed: int = 0,
    written: Sequence[stages.Lowered] = (),
    tell: Callable[[Progress], None] = lambda one: None,
    named: int | None = None,
    cached: bool = True,
) -> Chosen:
    """The best layouts of all meshes, and the experts.

    A time limit, or an interrupt, ends it with the best so far.

    Args:
        program: what to plan.
        meshes: to choose among.
        chip: whose figures to use.
        rules: what a layout may do.
        top: how many are compiled, beside the best experts.
        seeds: whether experts are starts of the search, and compiled too.
        seed: of what the search tries at random.
        written: the program as its user wrote it, for meshes that it is for.
        tell: is told how far it is.
        named: how many experts are compiled; one less than `top` by default, and at least one.
        cached: whether what compilers say is kept on disk and found again.
    """
    looking = Looking(
        program=program,
        chip=chip,
        rules=rules or Rules(),
        top=top,
        seeds=seeds,
        seed=seed,
        tell=tell,
        named=max(1, top - 1) if named is None else named,
        cached=cached,
    )
    try:
        estimate_layouts(looking, meshes)
        add_written(looking, written)
        preview_best(looking)
        compile_best(looking, meshes)
        if top > 1:
            split_width_of_best(looking)
            pin_best_otherwise(looking)
    except KeyboardInterrupt:
        if not looking.choices:
            raise
        looking.complete = False
    return looking.chosen()
