"""The fewest of some things with which a figure is as good as with all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import time
from typing import Any, TypeAlias

Judged: TypeAlias = tuple[int, ...]
"""How bad a set is: zeros where nothing is left to wish for."""


def is_over(deadline: float | None) -> bool:
    """Whether a deadline by `time.monotonic`, if there is one, is over."""
    return deadline is not None and time.monotonic() > deadline


class _LateError(Exception):
    """No further set may be tried."""


class Fewest:
    """Looks for a small set that is no worse than a larger one.

    Args:
        judge: how bad a set is; each is judged once.
        kept: to begin with.
        deadline: by `time.monotonic`, after which no further set is judged.
        most: sets that are judged beside the first one.

    Attributes:
        kept: what is left.
        is_late: whether it ended before all was tried.
    """

    def __init__(
        self,
        judge: Callable[[frozenset[int]], Judged],
        kept: frozenset[int],
        *,
        deadline: float | None = None,
        most: int | None = None,
    ):
        self.kept = kept
        self.is_late = False
        self._judge, self._deadline, self._most = judge, deadline, most
        self._judged = functools.cache(self._judge_new)
        self._now = judge(kept)

    def _judge_new(self, kept: frozenset[int]) -> Judged:
        if is_over(self._deadline) or self._most == 0:
            raise _LateError
        self._most = None if self._most is None else self._most - 1
        return self._judge(kept)

    def search(self, order: Sequence[int]) -> None:
        """Leaves out what it can, what stands first in the order sooner, until all is needed."""
        self._till_late(self._search, order)

    def grow(self, order: Sequence[int]) -> None:
        """Adds what is needed, where what is kept lacks some and nothing would lack with all.

        Each one that is needed is found in as many steps as halving takes: it is the last one of
        the shortest beginning that, with those found before, lacks nothing. What was kept may be
        left out for it.
        """
        self._till_late(self._grow, order)

    def _till_late(self, step: Callable[[Sequence[int]], Any], order: Sequence[int]) -> None:
        try:
            step(order)
        except _LateError:
            self.is_late = True

    def _search(self, order: Sequence[int]) -> None:
        self._drop_all(order)
        if any(self._now):
            for one in order:
                self._take(self.kept.union([one]), better=True)
            self._drop_all(order)
        if len(self.kept) > 1:  # one in another place may do for all
            any(self._take(frozenset([one])) for one in reversed(order))

    def _drop_all(self, order: Sequence[int]) -> None:
        before = None
        while self.kept != before:
            before = self.kept
            self._drop([one for one in order if one in before])

    def _drop(self, group: Sequence[int]) -> None:
        """Leaves out a group, or else what it can of its halves."""
        if group and not self._take(self.kept.difference(group)) and len(group) > 1:
            half = len(group) // 2
            self._drop(group[:half])
            self._drop(group[half:])

    def _grow(self, order: Sequence[int]) -> None:
        found, rest = self.kept, [one for one in order if one not in self.kept]
        first, self.kept = [*found], found.union(rest)
        while any(self._now):
            few, many = 0, len(rest)
            while many - few > 1:
                middle = (few + many) // 2
                if any(self._judged(found.union(rest[:middle]))):
                    few = middle
                else:
                    many = middle
                    self.kept = found.union(rest[:many])
            found, rest = found.union([rest[many - 1]]), rest[: many - 1]
            self._now = self._judged(found)
        self.kept = found
        for one in first:
            self._take(self.kept.difference([one]))

    def _take(self, kept: frozenset[int], *, better: bool = False) -> bool:
        """Goes over to a set that is no worse, or only to one that is better."""
        if kept == self.kept:
            return True
        then = self._judged(kept)
        if then > self._now or (better and then == self._now):
            return False
        self.kept, self._now = kept, then
        return True
