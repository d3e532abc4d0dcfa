"""The runs of `runs.toml`, and how long spmd says that a step of each takes.

A run is compiled in a process of its own, since libtpu reads its flags at the start:
``python -m tests.benchmarks.published.runs NAME`` prints what was found as a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
import subprocess
import sys
import tomllib
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published training run.

    Attributes:
        name: model and slice.
        script: in MaxText's ``configs/tpu``, or ``trainers/pre_train/scripts``.
        teraflops: that each chip reached in a second, as published; a device of tpu7x is half one.
        topology: the slice.
        model: sizes, as `Model` takes them.
        tensor: devices along the axis ``tensor``; all others are along ``fsdp``.
        tunes: whether the clock's constants were set by it.
        flags: of libtpu, as in the script.
        more_flags: of libtpu, which the script has not.
    """

    name: str
    script: str
    teraflops: float
    topology: str
    model: dict[str, Any]
    tensor: int = 1
    tunes: bool = False
    flags: str
    more_flags: str = ""


def read() -> list[Run]:
    """All runs, in the order of the file."""
    data = tomllib.loads(Path(__file__).with_name("runs.toml").read_text(encoding="utf-8"))
    flags = {kind: " ".join(text.split()) for kind, text in data["flags"].items()}
    return [Run(**one, flags=flags[one["script"].partition("/")[0]]) for one in data["runs"]]


def clocked(run: Run, *, seconds: float = 1200) -> dict[str, Any]:
    """What `main` finds in a process with the flags of a run."""
    return flagged(run, __spec__.name, run.name, seconds=seconds)


def flagged(run: Run, module: str, *words: str, seconds: float) -> dict[str, Any]:
    """The JSON that a module prints last, in a process with the flags of a run."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        env={**os.environ, "LIBTPU_INIT_ARGS": f"{run.flags} {run.more_flags}"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        raise RuntimeError(f"{run.name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(name: str) -> None:
    """Compiles one run and prints its time."""
    import spmd

    from .model import Model, training

    run = next(one for one in read() if one.name == name)
    model = Model.of(run.model)
    mesh = spmd.topology(run.topology, {"fsdp": -1, "tensor": run.tensor})
    step, arguments = training(model, mesh.shape)
    with mesh:
        compiled = step.lower(*arguments).compile()
    time = spmd.report(compiled).time
    assert time is not None
    found = {
        "teraflops": model.flops() / time.seconds / 1e12,
        "hardware": time.hardware_flops / 1e12,
        "seconds": time.seconds,
        "hfu": time.hfu,
        "exposed": sum(time.exposed_by_axes.values()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
