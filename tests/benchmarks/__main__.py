"""Runs the benchmarks: `python -m tests.benchmarks [PART ...] [--turns N]`.

Where there is a peer, it took turns with us in the same process, and the figure is a ratio. No
timing is asserted: timings belong to machines, not to tests. Bytes and predictions come out the
same on all of them: the exit status is 1 where the part `grad` finds more than the peer's, or
`time` misses a target, or `predictions` finds one that is moved.
"""

import argparse
from collections.abc import Iterable
import os
import platform
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np

import spmd
import spmd.colocated_python  # it asks for threads, which has to be before JAX starts

from .plans import kept

PARTS = (
    *("calls", "compile", "import", "report", "preview", "grad"),
    *("taps", "pmap", "colocated", "bundle", "page", "fits"),
)
#: Parts that run only where they are named, since they take long.
LONG = ("models", "time", "operations", "plan", "predictions", "others", "steps")


def main() -> int:
    """Prints one line per comparison."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("parts", nargs="*", metavar="PART", help=" | ".join(PARTS + LONG))
    parser.add_argument("--turns", type=int, default=101, help="turns per comparison of calls")
    parser.add_argument(
        "--topology",
        help="of the parts `models`, with 16 devices, and `others` (v5e:4x4); for `plan` and "
        "`predictions`, instead of their own",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        help="of the parts `plan`, `predictions`, `others` and `steps`; all else",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the part `plan` with fewer compiles, and no seeds"
    )
    parser.add_argument(
        "--kept", default="", help="a folder for what `plan` compiled, to go on where it was ended"
    )
    parser.add_argument(
        "--record", action="store_true", help="the part `predictions`: record what is found"
    )
    options = parser.parse_args()
    os.environ[kept.CACHE] = options.kept  # never the plans of the person who runs this
    if unknown := {*options.parts} - {*PARTS, *LONG}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    print(
        f"spmd {spmd.__version__}, jax {jax.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"{jax.device_count()} {jax.default_backend()} devices"
    )
    missed, header = False, None
    for part in (*PARTS, *LONG):
        if part in (options.parts or PARTS):
            title, lines = _lines(part, options)
            if title not in (None, header):
                print(title)
                header = title
            for line in lines:
                print(line, flush=True)
                missed |= not getattr(line, "passed", True)
    return int(missed)


def _lines(part: str, options: argparse.Namespace) -> tuple[str | None, Iterable[Any]]:
    """What stands above the lines of a part, and the lines."""
    from . import (
        bundling,
        clocking,
        colocating,
        compiling,
        differentiating,
        dispatch,
        fitting,
        importing,
        inspecting,
        mapping,
        others,
        paging,
        planning,
        predicting,
        previewing,
        stepping,
        tapping,
    )
    from .paired import HEADER

    turns, where = options.turns, options.topology
    some, few = max(3, turns // 5), max(3, turns // 10)
    parts = {
        "calls": lambda: (HEADER, dispatch.run(turns)),
        "compile": lambda: (HEADER, compiling.run(few)),
        "import": lambda: (HEADER, [importing.run(some)]),
        "report": lambda: (None, inspecting.run(few)),
        "preview": lambda: (previewing.HEADER, previewing.run(few)),
        "grad": lambda: (differentiating.HEADER, differentiating.run()),
        "taps": lambda: (HEADER, tapping.run(max(5, turns // 2))),
        "pmap": lambda: (HEADER, mapping.run(turns)),
        "colocated": lambda: (HEADER, colocating.run(turns)),
        "bundle": lambda: (HEADER, bundling.run(some)),
        "models": lambda: (previewing.MODELS_HEADER, previewing.run_models(where or "v5e:4x4")),
        "page": lambda: (paging.HEADER, paging.run(max(1, turns // 10))),
        "fits": lambda: (fitting.HEADER, fitting.run()),
        "time": lambda: (clocking.HEADER, clocking.run()),
        "operations": lambda: (clocking.OPERATIONS_HEADER, clocking.run_operations()),
        "steps": lambda: (stepping.HEADER, stepping.run(options.case)),
        "others": lambda: (others.HEADER, others.run(options.case, where or "v5e:4x4")),
        "predictions": lambda: (
            predicting.HEADER,
            predicting.run(options.case, where, record=options.record),
        ),
        "plan": lambda: (
            planning.HEADER,
            planning.run(options.case, where, quick=options.quick),
        ),
    }
    return parts[part]()


if __name__ == "__main__":
    sys.exit(main())
