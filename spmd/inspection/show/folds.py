"""Paths of arrays as few rows: those that differ in one place, and are alike, are one.

``w['q']`` and ``w['k']`` are ``w['q', 'k']``, and all that is below ``w`` is ``w``. A row stands
for exactly the arrays that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
import dataclasses
import itertools
import math
import re
from typing import Any, Generic, TypeAlias, TypeVar

_Item = TypeVar("_Item")
_Parts: TypeAlias = tuple[tuple[str, ...], ...]
"""Of each place of a path, what may stand there."""

_PART = re.compile(r"\[(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\]]*)\]|\.?[^.\[]+")
_LISTED = 3
"""The most that are named of what differs, where there is little room."""
_MOST_BETWEEN = 16
"""The most that is listed between a beginning and an end that are the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fold(Generic[_Item]):
    """Arrays that are alike.

    Attributes:
        parts: of each place of their paths, what may stand there.
        items: in order.
    """

    parts: _Parts
    items: tuple[_Item, ...]

    @property
    def spellings(self) -> list[str]:
        """What they are called: in full, and shorter."""
        most = max(map(len, self.parts))
        lengths = [most, min(most, _LISTED), min(most, 2), 1, 0]
        return [*dict.fromkeys(_spelled(self.parts, length) for length in lengths)]


def folded(
    items: Iterable[_Item], name: Callable[[_Item], str], look: Callable[[_Item], Hashable]
) -> list[Fold[_Item]]:
    """Items as few rows, each where its first one stands.

    Args:
        items: to fold.
        name: their paths.
        look: what those of a row have in common.
    """
    items = [*items]
    places = {id(one): i for i, one in enumerate(items)}
    rows = [
        Fold(tuple((part,) for part in parts_of(name(row.items[0]))), row.items)
        if len(row.items) == 1
        else row
        for row in _whole(_tree(items, name), (), look)
    ]
    rows.sort(key=lambda row: places[id(row.items[0])])
    rows = _all_merged(_bridged(_all_merged(rows, look), look), look)
    rows = [
        Fold(row.parts, tuple(sorted(row.items, key=lambda one: places[id(one)]))) for row in rows
    ]
    return sorted(rows, key=lambda row: places[id(row.items[0])])


def parts_of(path: str) -> tuple[str, ...]:
    """The steps of a path: ``state``, ``['params']``, ``.mu``, ``[0]``."""
    parts = tuple(_PART.findall(path))
    return parts if "".join(parts) == path and parts else (path,)


# What is whole: a part of the tree all of whose arrays are alike.

_Tree: TypeAlias = dict[str, Any]
"""By the next step of a path what is below; the items whose path ends here have an empty step."""


def _tree(items: Iterable[_Item], name: Callable[[_Item], str]) -> _Tree:
    root: _Tree = {}
    for one in items:
        at = root
        for part in parts_of(name(one)):
            at = at.setdefault(part, {})
        at.setdefault("", []).append(one)
    return root


def _whole(tree: _Tree, at: _Parts, look: Callable[[_Item], Hashable]) -> Iterator[Fold[_Item]]:
    """The largest parts of a tree whose items are all alike."""
    below: list[_Item] = [*_leaves(tree)]
    if at and len({look(one) for one in below}) == 1:
        yield Fold(at, tuple(below))
        return
    for part, inner in tree.items():
        if isinstance(inner, dict):
            yield from _whole(inner, (*at, (part,)), look)
        else:
            yield from (Fold(at, (one,)) for one in inner)


def _leaves(tree: _Tree) -> Iterator[Any]:
    for inner in tree.values():
        yield from _leaves(inner) if isinstance(inner, dict) else inner


# What differs in one place


def _all_merged(
    rows: Sequence[Fold[_Item]], look: Callable[[_Item], Hashable]
) -> list[Fold[_Item]]:
    while (merged := _merged(rows, look)) != rows:
        rows = merged
    return [*rows]


def _merged(rows: Sequence[Fold[_Item]], look: Callable[[_Item], Hashable]) -> list[Fold[_Item]]:
    """Rows of one look whose paths differ in one place as one; the last place comes first."""
    most = max((len(row.parts) for row in rows), default=0)
    for place in range(1, most + 1):
        found: dict[Hashable, list[Fold[_Item]]] = {}
        for row in rows:
            key: Hashable = id(row)
            if len(row.parts) >= place + 1:  # what is called otherwise altogether stays apart
                others = (*row.parts[:-place], *row.parts[len(row.parts) - place + 1 :])
                key = (others, place, look(row.items[0]))
            found.setdefault(key, []).append(row)
        if len(found) < len(rows):
            return [_together(group, place) for group in found.values()]
    return [*rows]


def _together(group: Sequence[Fold[_Item]], place: int) -> Fold[_Item]:
    first = group[0]
    if len(group) == 1:
        return first
    at = len(first.parts) - place
    alternatives = tuple(dict.fromkeys(one for row in group for one in row.parts[at]))
    parts = (*first.parts[:at], alternatives, *first.parts[at + 1 :])
    return Fold(parts, tuple(one for row in group for one in row.items))


# What differs between a beginning and an end, such as parameters and their moments


def _bridged(rows: Sequence[Fold[_Item]], look: Callable[[_Item], Hashable]) -> list[Fold[_Item]]:
    found: dict[Hashable, list[Fold[_Item]]] = {}
    for row in rows:
        found.setdefault((row.parts[0], row.parts[-1], look(row.items[0])), []).append(row)
    return [row for group in found.values() for row in _bridge(group)]


def _bridge(group: list[Fold[_Item]]) -> list[Fold[_Item]]:
    """Rows of one look, first step and last step as one, if what is between can be listed."""
    paths = [row.parts for row in group]
    shortest = min(map(len, paths))
    start = _alike(paths, shortest - 2)
    end = _alike([path[::-1] for path in paths], shortest - start - 1)
    middles = [path[start : len(path) - end] for path in paths]
    count = sum(math.prod(map(len, middle)) for middle in middles)
    if len(group) < 2 or not start or not end or count > _MOST_BETWEEN:
        return group
    between = tuple("".join(one) for middle in middles for one in itertools.product(*middle))
    parts = (*paths[0][:start], between, *paths[0][len(paths[0]) - end :])
    return [Fold(parts, tuple(one for row in group for one in row.items))]


def _alike(paths: Sequence[_Parts], most: int) -> int:
    """How many steps all paths begin with alike, up to a number."""
    steps = zip(*paths, strict=False)
    same = itertools.takewhile(
        lambda step: len({*step}) == 1, itertools.islice(steps, max(0, most))
    )
    return sum(1 for _ in same)


# Spelling


def _spelled(parts: _Parts, most: int) -> str:
    return "".join(_alternatives(one, most) for one in parts)


def _alternatives(all_: Sequence[str], most: int) -> str:
    """``['q', 'k']``, ``[0 to 11]``, ``.{mu, nu}``; of more than `most` the first ones.

    Whole ways between a beginning and an end are dots where none is to be named.
    """
    if len(all_) == 1:
        return all_[0]
    is_a_step = all(len(parts_of(one)) == 1 for one in all_)
    if not most and not is_a_step:
        return "..."
    most = max(1, most)
    if is_a_step and all(one[0] == "[" for one in all_):
        return f"[{_listed([one[1:-1] for one in all_], most)}]"
    if is_a_step and all(one[0] == "." for one in all_):
        return f".{{{_listed([one[1:] for one in all_], most)}}}"
    return f"{{{_listed(all_, most)}}}"


def _listed(all_: Sequence[str], most: int) -> str:
    if len(all_) > 2 and all(one.isdecimal() for one in all_):
        first, last = int(all_[0]), int(all_[-1])
        if [*map(int, all_)] == [*range(first, last + 1)]:
            return f"{first} to {last}"
    more = f", {len(all_) - most} more" if len(all_) > most else ""
    return ", ".join(all_[:most]) + more
