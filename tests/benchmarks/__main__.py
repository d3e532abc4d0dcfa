"""Runs the benchmarks: `python -m tests.benchmarks [calls|compile|import|report] [--turns N]`.

Where there is a peer, it took turns with us in the same process, and the figure is a ratio. Nothing
here is asserted: timings belong to machines, not to tests.
"""

import argparse
import os
import platform

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np

import spmd


def main() -> None:
    """Prints one line per comparison."""
    from . import compiling, dispatch, importing, inspecting
    from .paired import HEADER

    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("parts", nargs="*", default=[], metavar="calls | compile | import | report")
    parser.add_argument("--turns", type=int, default=101, help="turns per comparison of calls")
    options = parser.parse_args()
    parts = options.parts or ["calls", "compile", "import", "report"]
    print(
        f"spmd {spmd.__version__}, jax {jax.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"{jax.device_count()} {jax.default_backend()} devices"
    )
    print(HEADER)
    if "calls" in parts:
        for result in dispatch.run(options.turns):
            print(result, flush=True)
    if "compile" in parts:
        for result in compiling.run(max(3, options.turns // 10)):
            print(result, flush=True)
    if "import" in parts:
        print(importing.run(max(3, options.turns // 5)), flush=True)
    if "report" in parts:
        for line in inspecting.run(max(3, options.turns // 10)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
