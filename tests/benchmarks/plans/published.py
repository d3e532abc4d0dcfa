"""The published runs of issue J: their own layout as an expert, and what the planner answers.

A run is compiled and planned in a process of its own, since libtpu reads its flags at the start:
``python -m tests.benchmarks.plans.published NAME`` prints what was found as a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys

from ..published import runs
from ..published.model import Model, training, unplaced
from . import planned
from .compiled import Figures
from .logical import Expert
from .planned import Answer, Candidate

AXES = "fsdp", "tensor"
SOURCE = "MaxText 0.2.5, configs/tpu"


def names() -> list[str]:
    """Of all runs."""
    return [one.name for one in runs.read()]


def topology_of(name: str) -> str:
    """The slice of a run."""
    return _run(name).topology


def _run(name: str) -> runs.Run:
    return next(one for one in runs.read() if one.name == name)


def found(name: str, *, top: int, seeds: bool, seconds: float = 3600) -> tuple[Figures, Answer]:
    """What `main` finds in a process with the flags of a run: its own layout, and the planner's."""
    run = _run(name)
    words = (name, str(top), "seeds" if seeds else "")
    data = runs.flagged(run, __spec__.name, *words, seconds=seconds)
    expert = Expert(
        name="its own layout", source=f"{SOURCE}/{run.script}", activations={}, weights={}
    )
    answer = data["answer"]
    candidates = [Candidate(**one) for one in answer.pop("candidates")]
    return Figures(expert=expert, **data["own"]), Answer(candidates=candidates, **answer)


def main(name: str, top: str, seeds: str) -> None:
    """Compiles a run as it was, and plans it."""
    import spmd

    run = _run(name)
    model = Model.of(run.model)
    mesh = spmd.topology(run.topology, {"fsdp": -1, "tensor": run.tensor})
    step, arguments = training(model, mesh.shape)
    with mesh:
        report = spmd.report(step.lower(*arguments).compile())
    assert report.time is not None
    assert report.memory is not None
    own = {
        "sizes": dict(mesh.shape),
        "seconds": report.time.seconds,
        "peak": report.memory.peak,
        "wire": report.total.wire_bytes,
    }
    devices = math.prod(mesh.shape.values())
    function, arguments = unplaced(dataclasses.replace(model, bare=True), devices)
    answer = planned.answered(
        function,
        arguments,
        {"donate_argnums": 0},
        run.topology,
        top=int(top),
        seeds=bool(seeds),
        axes=AXES,
    )
    print(json.dumps({"own": own, "answer": dataclasses.asdict(answer)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
