"""What a layout says of some classes: layouts that say the same of them need one look.

An axis goes to the first class of its order that a value has. What comes after that class in the
order says nothing of the value, unless the axis may pass over the class.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
import copy
import itertools
from typing import Any, NamedTuple, TypeAlias

from spmd.planner.program.layout import Layout

Said: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...], frozenset[int]], ...]
"""By axis, its order, that of the optimizer's values, and the classes of which it splits the last
dimension."""


def said_by(layout: Layout) -> Said:
    """What a layout says of each axis."""
    state = dict(layout.state)
    return tuple(
        (order, state.get(axis, ()), frozenset([c for name, c in layout.last if name == axis]))
        for axis, order in layout.orders
    )


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
        patterns: of the things.
        classes: that they have.
        is_state: whether one of them is the optimizer's.
        members: the things.
        kinds: of the values that the things are about.
        known: by what a layout says, what was found.
    """

    def __init__(self, patterns: Iterable[Pattern], members: list[Any], kinds: Iterable[int]):
        self.patterns, self.kinds = frozenset(patterns), frozenset(kinds)
        self.classes = frozenset[int]().union(*(one.classes for one in self.patterns))
        self.is_state = any(one.is_state for one in self.patterns)
        self.members = members
        self.known: dict[tuple[int, ...], Any] = {}
        self._plain = [one for one in self.patterns if not one.is_state]
        self._state = [one for one in self.patterns if one.is_state]
        self._turning = frozenset[int]().union(*(one.turning for one in self.patterns))
        self._numbers: dict[Hashable, int] = {}
        self._said: dict[Hashable, int] = {}

    def anew(self, changed: Collection[int]) -> Group:
        """The same things, of which nothing is known yet; itself, where no kind has changed."""
        if self.kinds.isdisjoint(changed):
            return self
        found = copy.copy(self)
        found.members = [
            one.anew(changed) if isinstance(one, Group) else one for one in self.members
        ]
        found.known = {}
        return found

    def key(self, said: Said) -> tuple[int, ...]:
        """Equal for layouts that say the same."""
        return tuple([self.number(*one) for one in said])

    def number(self, order: tuple[int, ...], state: tuple[int, ...], last: frozenset[int]) -> int:
        """One for all orders of an axis that say the same."""
        has = self.classes.__contains__
        order = tuple(filter(has, order))
        state = tuple(filter(has, state)) if self.is_state and state else ()
        last = last & self._turning if last else last
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

    def __init__(self, groups: Iterable[Group]):
        self.groups = [*groups]
        self._columns: dict[Hashable, tuple[int, list[int]]] = {}
        self._numbers: dict[tuple[int, ...], int] = {}

    def anew(self, changed: Collection[int]) -> Sayings:
        """The same groups; of those about changed kinds of values nothing is known yet."""
        found = copy.copy(self)
        found.groups = [group.anew(changed) for group in self.groups]
        return found

    def keys(self, said: Said) -> Iterable[tuple[int, ...]]:
        """By group, its key."""
        columns = [self._column(one)[1] for one in said]
        return zip(*columns, strict=True) if columns else ((),) * len(self.groups)

    def numbers(self, said: Said) -> tuple[int, ...]:
        """Equal for layouts that say the same of all groups."""
        return tuple([self._column(one)[0] for one in said])

    def _column(self, one: Any) -> tuple[int, list[int]]:
        """What is said of one axis: its number, and by group a part of the key."""
        found = self._columns.get(one)
        if found is None:
            column = [group.number(*one) for group in self.groups]
            number = self._numbers.setdefault(tuple(column), len(self._numbers))
            found = self._columns[one] = number, column
        return found


def grouped(members: Iterable[tuple[Any, frozenset[Pattern], Collection[int]]]) -> list[Group]:
    """Things that have the same patterns, each with the kinds of the values that it is about."""
    found: dict[frozenset[Pattern], list[tuple[Any, Collection[int]]]] = {}
    for one, patterns, kinds in members:
        found.setdefault(patterns, []).append((one, kinds))
    return [
        Group(patterns, [one for one, _ in own], itertools.chain(*(kinds for _, kinds in own)))
        for patterns, own in found.items()
    ]


def regrouped(groups: Iterable[Group]) -> list[Group]:
    """Groups of the same classes as members of one."""
    found: dict[tuple[frozenset[int], bool], list[Group]] = {}
    for one in groups:
        found.setdefault((one.classes, one.is_state), []).append(one)
    return [
        Group(
            frozenset().union(*(g.patterns for g in own)),
            own,
            frozenset().union(*(g.kinds for g in own)),
        )
        for own in found.values()
    ]
