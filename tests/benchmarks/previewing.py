"""How far a preview is from the compiled ledger, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import statistics
import time
from typing import Any

import jax

from spmd import preview, report, topology

from ..inspection import models, programs
from .inspecting import demo_step

LAYERS, SECONDS = 48, 1.0
HEADER = (
    f"{'wire bytes per device and call':42}  {'preview':>10}  {'compiled':>10}   error  differs in"
)


MODELS_HEADER = (
    f"{'MiB on the wire per device and call':30}  {'preview':>10}  {'compiled':>10}"
    f"  {'by axis':>8}  {'by kind':>8}"
)


def run_models(where: str) -> Iterator[str]:
    """A line for each model compiled for a topology, and the medians; for a TPU, many minutes."""
    errors = []
    for name, (build, axes) in models.MODELS.items():
        lowered = build(topology(where, axes))
        before, after = preview(lowered), report(lowered)
        error = [models.distance(before, after, *by) for by in (("axis",), ("kind", "axis"))]
        errors.append(error)
        sums = (f"{found.total.wire_bytes / 2**20:10,.1f}" for found in (before, after))
        yield f"{name:30}  {'  '.join(sums)}  {error[0]:8.1%}  {error[1]:8.1%}"
    medians = (statistics.median(one) for one in zip(*errors, strict=True))
    yield f"{'median':30}  {'':22}  {'  '.join(f'{one:8.1%}' for one in medians)}"


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
