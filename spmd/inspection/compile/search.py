"""Finds the largest size that fits, with few and expensive trials."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math

from spmd.inspection.records.fit import MOST, Found, Trial


class IndivisibleSizeError(Exception):
    """A size is refused before it is compiled, because sizes go in multiples of a `factor`."""

    def __init__(self, factor: int):
        super().__init__(factor)
        self.factor = factor


def search(
    trial: Callable[[int], Trial],
    *,
    start: int,
    budget: Callable[[], int | None],
    max_trials: int,
    tolerance: float = 0.0,
) -> Found:
    """Finds the largest size that fits, where every size below one that fits does too.

    Sizes are doubled from `start` until one does not fit, then the interval is halved. Where two
    trials say how much is needed, a straight line through them says where to try next; a guess
    that gains less than halving is followed by halving. So memory in proportion to the size takes
    four trials. The search ends where what fits and what does not differ by no more than the
    part `tolerance` of what fits.

    A trial may raise `IndivisibleSizeError`, and then counts as none. The line needs the `budget`
    in bytes, which may be known only after a trial.
    """
    state = _State(start=start, budget=budget, tolerance=tolerance)
    while len(state.tried) < max_trials and (size := state.next_size()) is not None:
        try:
            state.note(trial(size))
        except IndivisibleSizeError as e:
            state.step = math.lcm(state.step, e.factor)
    return Found(
        largest=state.low or None,
        too_large=state.high,
        step=state.step,
        tried=tuple(state.tried),
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class _State:
    """An interval of sizes: `low` fits, or is 0; `high` does not, or is None."""

    start: int
    budget: Callable[[], int | None]
    tolerance: float
    step: int = 1
    low: int = 0
    high: int | None = None
    stride: int = 0
    halving: bool = False
    tried: list[Trial] = dataclasses.field(default_factory=list)

    def note(self, trial: Trial) -> None:
        before = self._width()
        self.tried.append(trial)
        if trial.fits:
            self.stride = trial.size - self.low
            self.low = max(self.low, trial.size)
        else:
            self.high = trial.size if self.high is None else min(self.high, trial.size)
        if self.high is not None and before is not None:
            # A guess that gained less than halving is not followed by another.
            self.halving = 2 * (self.high - self.low) > before

    def next_size(self) -> int | None:
        """The next size to try; None where there is nothing left to find out."""
        if not self.tried:
            return min(max(-(-self.start // self.step), 1) * self.step, MOST)
        most = (MOST if self.high is None else self.high - 1) // self.step * self.step
        least = (self.low // self.step + 1) * self.step
        width = self._width()
        if least > most or (width is not None and width <= self.tolerance * self.low):
            return None
        size = self._beyond() if self.high is None else self._between()
        return min(max(size // self.step * self.step, least), most)

    def _width(self) -> int | None:
        return None if self.high is None else self.high - self.low

    def _beyond(self) -> int:
        below, _ = self._known()
        guess = self._line(below[-2:])
        if guess is None:
            # What did not grow will hardly do so soon.
            return (16 if len(below) > 1 else 2) * self.low
        # The first size that should not fit; where one does after all, in growing strides.
        return max(guess + self.step, self.low + 2 * self.stride * (len(self.tried) > 2))

    def _between(self) -> int:
        assert self.high is not None
        below, above = self._known()
        # What does not fit is told roughly: sizes that fit draw the better line, if it leads here.
        for points in (below[-2:], [*below[-1:], *above[:1]]):
            guess = None if self.halving else self._line(points)
            if guess is not None and self.low <= guess < self.high:
                return guess
            if guess is not None and guess >= self.high:
                # What failed is the first that does, or nearly.
                return self.high - max((self.high - self.low) // 8, self.step)
        return (self.low + self.high) // 2

    def _known(self) -> tuple[list[Trial], list[Trial]]:
        """Trials that say how much is needed, by size: those that fit, and those that do not."""
        known = sorted((t for t in self.tried if t.needed is not None), key=lambda t: t.size)
        return [t for t in known if t.fits], [t for t in known if not t.fits]

    def _line(self, points: list[Trial]) -> int | None:
        """The largest size that fits if memory grows as between two trials; None if unknown."""
        budget = self.budget()
        if budget is None or len(points) < 2:
            return None
        (size, needed, _), (other, more, _) = points
        if needed is None or more is None or more <= needed:
            return None
        return size + (budget - needed) * (other - size) // (more - needed)
