"""What the planner makes of programs that none of its figures was found from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import spmd

from .plans.others import OTHERS

HEADER = (
    f"{'planned, compiled':22} {'mesh':>6} {'ms':>9} {'predicted':>9} {'':>5} {'GiB':>6} {'':>5}"
    f" {'best expert':>11}  {'search':>6}"
)
_GIB = 2**30


def run(chosen: Sequence[str], where: str) -> Iterator[str]:
    """A line for each program, with the best of the planner's own experts beside the answer."""
    if unknown := {*chosen} - {*OTHERS}:
        yield f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(OTHERS)}"
    for name in [one for one in OTHERS if one in (chosen or OTHERS)]:
        step, args = OTHERS[name]()
        plan = spmd.plan(step, *args, topology=where, progress=False, donate_argnums=0)
        (best, *_) = plan.candidates
        experts = [one for one in plan.candidates if one.name != "found" and one.seconds]
        known = [one.seconds for one in experts if one.verified == "time"]
        least = f"{min(known) * 1e3:11.2f}" if known else f"{'none':>11}"
        off = plan.predicted / plan.seconds - 1
        peak = best.estimated_peak / plan.memory - 1
        shape = "x".join(str(size) for size in plan.axes.values())
        yield (
            f"{name:22} {shape:>6} {plan.seconds * 1e3:9.2f} {plan.predicted * 1e3:9.2f} {off:5.0%}"
            f" {plan.memory / _GIB:6.2f} {peak:5.0%} {least}  {plan.searched:4.1f} s"
        )
