"""What a layout says of some classes: layouts that say the same of them need one look.

An axis goes to the first class of its order that a value has. What comes after that class in the
order says nothing of the value, unless the axis may pass over the class.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from spmd.planner.layout import Layout


class Pattern(NamedTuple):
    """What a value or an operation has.

    Attributes:
        classes: of its dimensions.
        sure: those of them that no axis passes over.
        turning: those that it has twice.
        is_state: whether it is the optimizer's.
    """

    classes: frozenset[int]
    sure: frozenset[int]
    turning: frozenset[int]
    is_state: bool


class Group:
    """Things of the same classes, with what was found out of them by what a layout says.

    Attributes:
        members: the things.
        known: by what a layout says, what was found.

    Args:
        classes: that the things have.
        is_state: whether one of them is the optimizer's.
    """

    def __init__(self, classes: frozenset[int], *, is_state: bool):
        self.members: list[Any] = []
        self.known: dict[tuple[int, ...], Any] = {}
        self._classes, self._is_state = classes, is_state
        self._plain: set[Pattern] = set()
        self._state: set[Pattern] = set()
        self._turning: frozenset[int] = frozenset()
        self._numbers: dict[Hashable, int] = {}
        self._said: dict[Hashable, int] = {}

    def add(self, member: Any, patterns: Iterable[Pattern]) -> None:
        """Adds a thing that has patterns."""
        self.members.append(member)
        for one in patterns:
            (self._state if one.is_state else self._plain).add(one)
            self._turning |= one.turning

    def number(self, order: tuple[int, ...], state: tuple[int, ...], last: frozenset[int]) -> int:
        """One for all orders of an axis that say the same."""
        own = self._classes
        order = tuple([c for c in order if c in own])
        state = tuple([c for c in state if c in own]) if self._is_state and state else ()
        last &= self._turning
        key = order, state, last
        found = self._numbers.get(key)
        if found is None:
            said = _trimmed(order, self._plain), _trimmed((*state, *order), self._state), last
            found = self._numbers[key] = self._said.setdefault(said, len(self._said))
        return found


def _trimmed(order: tuple[int, ...], patterns: Iterable[Pattern]) -> tuple[int, ...]:
    """What an order says of patterns: a class counts while one that has it is undecided."""
    kept = []
    patterns = [*patterns]
    for c in order:
        having = [one for one in patterns if c in one.classes]
        if having and c not in kept:
            kept.append(c)
        patterns = [one for one in patterns if c not in one.sure]
        if not patterns:
            break
    return tuple(kept)


class Sayings:
    """What layouts say of groups.

    Args:
        groups: that are asked about.
    """

    def __init__(self, groups: list[Group]):
        self.groups = groups
        self._known: dict[Hashable, list[int]] = {}

    def keys(self, layout: Layout) -> Iterable[tuple[int, ...]]:
        """By group, what a layout says of it; equal for layouts that say the same."""
        state = dict(layout.state)
        columns = []
        for axis, order in layout.orders:
            last = frozenset(c for name, c in layout.last if name == axis)
            said = (order, state.get(axis, ()), last)
            if said not in self._known:
                self._known[said] = [group.number(*said) for group in self.groups]
            columns.append(self._known[said])
        return zip(*columns, strict=True) if columns else ((),) * len(self.groups)
