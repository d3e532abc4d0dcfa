"""How near `Report.time` is to training runs whose speed was published, without their hardware."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import statistics

import numpy as np
from numpy.typing import ArrayLike
import scipy.stats

from spmd.inspection import CHIPS

from .published import operations, runs

MEAN, LARGEST, ORDER = 0.10, 0.20, 0.85
HEADER = (
    f"{'TFLOP/s per chip':18}  {'script':14}  {'published':>9}  {'ours':>6}  {'error':>6}"
    f"  {'MFU':>5}  {'ours':>5}  {'exposed':>7}  set by"
)


class Line(str):
    """A line, and whether what it says reaches its target."""

    passed = True


def _against(text: str, figure: float, target: float, *, above: bool = False) -> Line:
    line = Line(f"{text}; target {'at least' if above else 'at most'} {target:g}")
    line.passed = figure >= target if above else figure <= target
    return line


def run() -> Iterator[str]:
    """A line for each run as it is found, and those of all against their targets."""
    every = runs.read()
    ours, peak = [], []
    for one in every:
        found = runs.clocked(one)
        ours.append(found["teraflops"])
        # As fast as the chip's peak would do what the program does.
        share = found["teraflops"] * found["seconds"] / found["hardware"]
        peak.append(share * _peak(one))
        yield _line(one, found)
    clocks = {name: chip.clock / 1e9 for name, chip in CHIPS.items() if chip.multipliers}
    yield "clocks, GHz: " + ", ".join(f"{name} {clock:.2f}" for name, clock in clocks.items())
    errors = [a / one.teraflops - 1 for a, one in zip(ours, every, strict=True)]
    held = [error for error, one in zip(errors, every, strict=True) if not one.tunes]
    yield from _summary("all", errors)
    yield from _summary("held out", held)
    published = np.array([one.teraflops for one in every])
    yield f"mean error of its FLOPs at the chip's peak: {_mean(peak / published - 1):.1%}"
    order = _spearman(published, ours)
    yield _against(f"Spearman of TFLOP/s {order:.3f}", order, ORDER, above=True)
    peaks = np.array([_peak(one) for one in every])
    yield f"Spearman of MFU {_spearman(published / peaks, ours / peaks):.2f}"


OPERATIONS_HEADER = (
    f"{'milliseconds of a device, and how far ours are off':52}"
    f"{''.join(f'{chip:>9}      ' for chip in operations.SLICES)}"
).rstrip()


def run_operations() -> Iterator[str]:
    """What products reach by the times; a line for each operation; then errors by chip and kind."""
    every = [*operations.read()]
    for chip in operations.SLICES:
        yield _share(chip, [*filter(_sets, every)])
    errors: dict[tuple[str, str], list[float]] = {}
    for one in every:
        cells = []
        for chip, measured in one.milliseconds.items():
            ours = operations.seconds(one, chip) * 1e3
            error = ours / measured - 1
            kind = f"{one.kind} of the fit" if _sets(one) else one.kind
            errors.setdefault((chip, kind), []).append(error)
            cells.append(f"{measured:9.3f} {error:+5.0%}")
        sizes = " ".join("x".join(map(str, dims)) for dims in (one.x, one.w) if dims)
        name = f"{one.kind}{f' over {one.axis}' * (not one.w)} {sizes}"
        yield f"{name:52}{''.join(cells)}"
    for (chip, kind), found in errors.items():
        yield (
            f"{chip}, {kind}: {len(found)}, median {statistics.median(found):+.0%}, "
            f"mean error {_mean(found):.0%}, largest {max(found, key=abs):+.0%}"
        )


_HALF = 4096
_LANES = 8 * 128


def _sets(one: operations.Operation) -> bool:
    """Whether `Chip.product_share` was set by an operation; all others were held out."""
    return one.kind == "cross_entropy" and one.x[0] <= _HALF


def _share(name: str, some: Sequence[operations.Operation]) -> str:
    """By least squares of relative errors: the product, and two passes over the logits.

    Each pass takes the same cycles for an element, on all vector units of a device.
    """
    chip = CHIPS[name]
    measured = np.array([one.milliseconds[name] / 1e3 for one in some])
    products = np.array([one.flops / chip.flops for one in some])
    elements = np.array([2 * one.x[0] * one.w[1] for one in some])
    cycles = elements / (chip.cores * _LANES * chip.clock)
    table = np.stack([products, cycles], axis=1) / measured[:, None]
    longer, each = np.linalg.lstsq(table, np.ones(len(some)), rcond=None)[0]
    return (
        f"{name}: by {len(some)} cross-entropies products reach {1 / longer:.2f} of the peak, and "
        f"a pass takes {each:.1f} cycles an element; {chip.product_share} is set"
    )


def _line(one: runs.Run, found: dict) -> str:
    mine, peak = found["teraflops"], _peak(one)
    return (
        f"{one.name:18}  {one.script:14}  {one.teraflops:9.0f}  {mine:6.1f}"
        f"  {mine / one.teraflops - 1:+6.1%}  {one.teraflops / peak:5.1%}  {mine / peak:5.1%}"
        f"  {found['exposed'] / found['seconds']:7.1%}  {'it' if one.tunes else ''}"
    ).rstrip()


def _summary(name: str, errors: Sequence[float]) -> Iterator[Line]:
    mean, largest = _mean(errors), max(map(abs, errors))
    yield _against(f"mean error, {name} {len(errors)}: {mean:.1%}", mean, MEAN)
    yield _against(f"largest error, {name} {len(errors)}: {largest:.1%}", largest, LARGEST)


def _mean(errors: Iterable[float]) -> float:
    return statistics.mean(map(abs, errors))


def _peak(one: runs.Run) -> float:
    return CHIPS[one.topology.partition(":")[0]].flops / 1e12


def _spearman(a: ArrayLike, b: ArrayLike) -> float:
    return float(scipy.stats.spearmanr(a, b).statistic)
