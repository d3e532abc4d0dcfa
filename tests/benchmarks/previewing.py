"""How far a preview is from the compiled ledger, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import statistics
import time
from typing import Any

import jax

from spmd import preview, report

from ..inspection import programs
from .inspecting import demo_step

LAYERS, SECONDS = 48, 1.0
HEADER = (
    f"{'wire bytes per device and call':42}  {'preview':>10}  {'compiled':>10}   error  differs in"
)


def run(turns: int) -> Iterator[str]:
    """A line for each counted program and the demo's step, their sum, and one for the time."""
    target = programs.cpu_target()
    errors = []
    for name, (build, backends, _) in programs.PROGRAMS.items():
        if "cpu" in backends:
            line, error = _compared(name, build(target)[0])
            errors.append(error)
            yield line
    line, error = _compared("the demo's step", demo_step())
    errors.append(error)
    yield line
    exact = sum(error == 0 for error in errors)
    yield (
        f"{exact} of {len(errors)} exact, {sum(e <= 0.01 for e in errors)} within 1%; "
        f"median error {statistics.median(errors):.1%}, mean {statistics.mean(errors):.1%}, "
        f"largest {max(errors):.1%}"
    )
    yield _time(turns)


def _compared(name: str, lowered: Any) -> tuple[str, float]:
    """A line, and the bytes on the wrong kind or axis as a share of those that are compiled."""
    before, after = _bytes(preview(lowered)), _bytes(report(lowered))
    differing = [key for key in {**before, **after} if before.get(key, 0) != after.get(key, 0)]
    wrong = sum(abs(before.get(key, 0) - after.get(key, 0)) for key in differing)
    error = wrong / max(sum(after.values()), 1)
    where = "; ".join(f"{kind} {'+'.join(axes)}" for kind, axes in differing)
    sums = (f"{sum(found.values()):>10,}" for found in (before, after))
    return f"{name:42}  {'  '.join(sums)}  {error:6.1%}  {where}".rstrip(), error


def _bytes(found: Any) -> Mapping[Any, int]:
    return {key: total.wire_bytes for key, total in found.totals("kind", "axis").items()}


def _time(turns: int) -> str:
    previews, compiles = [], []
    for turn in range(turns):
        jax.clear_caches()
        lowered = demo_step(LAYERS)
        start = time.perf_counter()
        preview(lowered)
        previews.append(time.perf_counter() - start)
        if turn < 3:
            start = time.perf_counter()
            lowered.compile()
            compiles.append(time.perf_counter() - start)
    median = statistics.median(previews)
    verdict = "ok" if median < SECONDS else "MISSED"
    return (
        f"preview of the step with {LAYERS} layers: {median * 1e3:.0f} ms, at most "
        f"{max(previews) * 1e3:.0f}; its compile {statistics.median(compiles):.1f} s  "
        f"< {SECONDS:.0f} s  {verdict}"
    )
