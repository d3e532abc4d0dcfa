"""Paired timing: two peers take turns in one process, and what counts is the ratio of a turn.

A machine that slows down slows both halves of a turn; the median over turns ignores the turns in
which something else ran.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import gc
import statistics
import time


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One comparison.

    Attributes:
        name: What was compared.
        ours: Median seconds of ours.
        peer: Median seconds of the peer.
        ratios: Ours over the peer, per turn.
        target: The ratio to stay at or under, or None where no one promised one.
    """

    name: str
    ours: float
    peer: float
    ratios: Sequence[float]
    target: float | None

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        low, _, high = statistics.quantiles(self.ratios, n=4)
        verdict = ""
        if self.target is not None:
            verdict = f"<= {self.target:.2f}  {'ok' if self.ratio <= self.target else 'MISSED'}"
        return (
            f"{self.name:<44} {seconds(self.ours):>10} {seconds(self.peer):>10} "
            f"{self.ratio:>7.3f} {low:>7.3f}-{high:.3f}  {verdict}".rstrip()
        )


HEADER = f"{'':<44} {'spmd':>10} {'peer':>10} {'ratio':>7} {'quartiles':>13}  target"


def seconds(t: float) -> str:
    """Returns a time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if t >= size:
            return f"{t / size:.2f} {unit}"
    return f"{t * 1e9:.0f} ns"


def compare(
    name: str, ours: Callable, peer: Callable, *, target: float | None, turns: int, calls: int = 1
) -> Result:
    """Times two functions in turns.

    Args:
        name: What is compared.
        ours: Runs `calls` times per turn; takes their number.
        peer: Likewise.
        target: The ratio to stay at or under, or None.
        turns: How many turns.
        calls: How many calls make one half of a turn.
    """
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    both = {"ours": ours, "peer": peer}
    for run in both.values():
        run(calls)
    gc.collect()
    gc.disable()
    try:
        for turn in range(turns):
            for who in ("ours", "peer") if turn % 2 else ("peer", "ours"):
                start = time.perf_counter()
                both[who](calls)
                times[who].append((time.perf_counter() - start) / calls)
    finally:
        gc.enable()
    return Result(
        name=name,
        ours=statistics.median(times["ours"]),
        peer=statistics.median(times["peer"]),
        ratios=[a / b for a, b in zip(times["ours"], times["peer"], strict=True)],
        target=target,
    )
