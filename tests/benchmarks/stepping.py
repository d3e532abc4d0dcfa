"""How long a step takes on one device of this machine, and what a report says that it takes.

Each program runs in a process of its own, so that the device says how much memory that one took.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd.inspection import Chip, calibrate
from spmd.inspection.timing.chips import chip_of

from .plans.cases import CASES, built

HEADER = (
    f"{'ms a call on one device':30} {'measured':>9} {'roofline':>9} {'':>6} {'calibrated':>10}"
    f" {'':>6} {'MFU':>6} {'peak GiB':>8} {'report':>7} {'compile':>8}"
)
#: Those that one chip of 80 GB holds, and whose kernels are not those of a TPU.
FITTING = (
    *("MLP", "demo", "GPT-2 small", "GPT-2 small, eight sequences", "12 unrolled layers"),
    *("batch smaller than the chips", "mixture of experts", "U-Net", "Flax", "Equinox"),
)
_GIB = 2**30
_WARM, _LIMIT = 3, 300
_SECONDS = 3.0


def run(chosen: Sequence[str]) -> Iterator[str]:
    """A line for each program as it is known, and what the errors of all are."""
    if unknown := {*chosen} - {*CASES}:
        yield f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}"
        return
    chip = calibrate()
    yield f"{chip.name}: {chip.flops / 1e12:.0f} TFLOP/s, {chip.hbm / 1e9:.0f} GB/s, calibrated"
    errors: dict[str, list[float]] = {"roofline": [], "calibrated": []}
    for name in chosen or FITTING:
        found = _alone(name, chip)
        if isinstance(found, str):
            yield f"{name:30} {found}"
            continue
        for which, of_it in errors.items():
            if found[which]:
                of_it.append(found[which] / found["measured"] - 1)
        yield _line(name, found)
    for which, of_it in errors.items():
        if of_it:
            sizes = [abs(one) for one in of_it]
            yield f"{which}: median error {statistics.median(sizes):.0%}, largest {max(sizes):.0%}"


def _line(name: str, found: dict[str, Any]) -> str:
    times = " ".join(
        f"{1e3 * found[which]:{width}.2f} {found[which] / found['measured'] - 1:+6.0%}"
        if found[which]
        else f"{'-':>{width}} {'':6}"
        for which, width in (("roofline", 9), ("calibrated", 10))
    )
    mfu = f"{found['mfu']:6.1%}" if found["mfu"] else f"{'-':>6}"
    took = f"{found['took'] / _GIB:8.2f}" if found["took"] else f"{'-':>8}"
    return (
        f"{name:30} {1e3 * found['measured']:9.2f} {times} {mfu} {took}"
        f" {found['peak'] / _GIB:7.2f} {found['compiling']:6.1f} s"
    )


def _alone(name: str, chip: Chip) -> dict[str, Any] | str:
    """What a process of its own finds; or why it finds nothing."""
    command = [sys.executable, "-m", "tests.benchmarks.stepping", name]
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command, env=env, input=json.dumps(chip.to_json()), capture_output=True, text=True,
            timeout=_LIMIT, check=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no result within {_LIMIT} s"
    except subprocess.CalledProcessError as e:
        return f"ended with {e.returncode}: {(e.stderr.strip().splitlines() or [''])[-1][:300]}"
    return json.loads(done.stdout.splitlines()[-1])


def step(name: str, chip: Chip, *, small: bool = False) -> dict[str, Any]:
    """Compiles and runs a case on the first device.

    Returns:
        Seconds of a call, `measured` and as reports say it; bytes that the device took at most, and
        those of the report; the MFU by the measured time; seconds that the compile took.
    """
    case = built(name, small=small)
    device = jax.devices()[0]
    known = chip_of(device.device_kind)
    start = time.perf_counter()
    compiled = jax.jit(case.step, **case.options).lower(*case.args).compile()
    compiling = time.perf_counter() - start
    report = spmd.report(compiled)
    calibrated = spmd.report(compiled, chip=chip).time
    model = spmd.report(jax.jit(case.step, **case.options), *case.args, chip=chip).time
    measured = _measured(compiled, case)
    peak = (known or chip).flops
    return {
        "measured": measured,
        "roofline": report.time.seconds if report.time else None,
        "calibrated": calibrated.seconds if calibrated else None,
        "mfu": model.model_flops / (peak * measured) if model and model.model_flops else None,
        "took": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "peak": report.memory.peak,
        "compiling": compiling,
    }


def _measured(compiled: Any, case: Any) -> float:
    """The median of calls that hand their state on."""
    donated = case.options["donate_argnums"]
    args = [_filled(arg, seed) for seed, arg in enumerate(case.args)]
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < _WARM + 3 or time.perf_counter() - began < _SECONDS:
        start = time.perf_counter()
        outs = jax.block_until_ready(compiled(*args))
        taken.append(time.perf_counter() - start)
        args[donated] = outs[0]
    return statistics.median(taken[_WARM:])


def _filled(tree: Any, seed: int) -> Any:
    """Arrays of a tree of descriptions: small numbers, and small indices."""

    def fill(leaf: Any, key: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return (0.02 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)
        if leaf.ndim:
            return jax.random.randint(key, leaf.shape, 0, 50, leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return structure.unflatten(map(fill, leaves, keys))


def main() -> None:
    """Prints what `step` finds, for the chip that stands in the input."""
    figures = json.load(sys.stdin)
    figures.pop("schema")
    figures["doubled"] = tuple(figures["doubled"])  # JSON has arrays only
    print(json.dumps(step(sys.argv[1], Chip(**figures))))


if __name__ == "__main__":
    main()
