"""Counters of the work that a call should not repeat: traces, lowerings, compiles.

Tests and users count compiles instead of guessing them from timings.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
import threading


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often `spmd` did each expensive step in this process.

    Attributes:
        traces: Functions traced to a jaxpr.
        lowerings: Modules lowered to StableHLO.
        compiles: Modules given to the compiler (a hit in JAX's persistent cache counts too).
    """

    traces: int = 0
    lowerings: int = 0
    compiles: int = 0

    def __sub__(self, earlier: Counts) -> Counts:
        """Returns what was done since `earlier`."""
        return Counts(**{n: getattr(self, n) - getattr(earlier, n) for n in _values})


_lock = threading.Lock()
_values = asdict(Counts())


def counts() -> Counts:
    """Returns the counters of this process; subtract two to count a stretch of code."""
    with _lock:
        return Counts(**_values)


def count(name: str) -> None:
    """Adds one to a counter."""
    with _lock:
        _values[name] += 1
