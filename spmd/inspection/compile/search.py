"""Finds the largest size that fits, with few and expensive trials."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
from typing import NamedTuple

MOST = 2**31
"""No larger size is tried: what has not failed up to there does not depend on the size."""


class Trial(NamedTuple):
    """One size that was tried.

    Attributes:
        size: the size.
        needed: bytes on each device; None where the compiler does not say.
        fits: whether that is within the budget.
    """

    size: int
    needed: int | None
    fits: bool


class IndivisibleSizeError(Exception):
    """A size is refused before it is compiled, because sizes go in steps.

    Attributes:
        factor: what sizes have to be a multiple of, besides what is known already.
    """

    def __init__(self, factor: int):
        super().__init__(factor)
        self.factor = factor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Args:
        largest: the largest size that fits; None where none does.
        too_large: the smallest size that does not; None where none failed.
        step: sizes are multiples of it.
        tried: all trials, in order.
    """

    largest: int | None
    too_large: int | None
    step: int
    tried: tuple[Trial, ...]

    @property
    def is_exact(self) -> bool:
        """Whether no size is left between what fits and what does not."""
        after = ((self.largest or 0) // self.step + 1) * self.step
        return self.too_large is not None and after >= self.too_large


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
    four trials.

    Args:
        trial: tries a size; may raise `IndivisibleSizeError`, which is no trial.
        start: the first size.
        budget: gives the bytes that there are, for the straight line, once that is known.
        max_trials: no more are made.
        tolerance: the search ends where what fits and what does not differ by no more than this
            part of what fits.

    Returns:
        The size, and whether it is exact.
    """
    state = _State(start=start, budget=budget, tolerance=tolerance)
    while len(state.tried) < max_trials and (size := state.next_size()) is not None:
        try:
            state.note(trial(size))
        except IndivisibleSizeError as e:
            state.step = math.lcm(state.step, e.factor)
    return state.found()


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

    def found(self) -> Found:
        return Found(
            largest=self.low or None,
            too_large=self.high,
            step=self.step,
            tried=tuple(self.tried),
        )

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
        most = MOST if self.high is None else self.high - 1
        most = most // self.step * self.step
        least = self._above(self.low)
        width = self._width()
        if least > most or (width is not None and width <= self.tolerance * self.low):
            return None
        size = self._beyond() if self.high is None else self._between()
        return min(max(size // self.step * self.step, least), most)

    def _above(self, size: int) -> int:
        return (size // self.step + 1) * self.step

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
