"""Layers that are written out one after the other: their classes are one, as those of a scan are.

Two classes are alike if the same dimension of arguments of one pattern has them, such as
``layers[0]['up']`` and ``layers[1]['up']``, or if they take part in the same products in the same
way. Alike classes become one where they never meet in an operation or in a value: in a chain of
square matrices, every other width is one.

Arguments that have no class of a product may be many and of many shapes, such as those of an
optimizer's step alone. What classes there are too many of, or too small ones, become few: the
largest dimensions of these arguments are one, and so are the next ones. Likewise, of a program with
too many products of many sizes, the smallest ones share their classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import re
from typing import TypeAlias

from spmd.planner.program.structure import (
    Graph,
    Operation,
    Tensor,
    of_many,
    of_small_products,
    others,
    with_weights,
)

_NUMBER = re.compile(r"\d+")
# How far products are compared: as far as the widths next to a class and those next to them.
_ROUNDS = 2

Mates: TypeAlias = dict[int, set[int]]


def tied(graph: Graph) -> Graph:
    """A graph in which alike classes are one."""
    return _merged(_merged(graph, _alike), _rest)


def _merged(graph: Graph, groups_of: Callable[[Graph], Iterable[Sequence[int]]]) -> Graph:
    """A graph in which the classes of a group are one, as far as they never meet."""
    groups = [*groups_of(graph)]
    mates: Mates = _mates(graph) if any(len(group) > 1 for group in groups) else defaultdict(set)
    names: dict[int, int] = {}
    for group in groups:
        for together in _apart(group, mates):
            names |= dict.fromkeys(together, together[0])
    if all(c == name for c, name in names.items()):
        return graph
    return with_weights(_renamed(graph, names))


def _renamed(graph: Graph, names: Mapping[int, int]) -> Graph:
    @functools.cache
    def renamed(classes: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return tuple(None if c is None else names.get(c, c) for c in classes)

    return dataclasses.replace(
        graph,
        tensors=tuple(
            dataclasses.replace(one, classes=renamed(one.classes)) for one in graph.tensors
        ),
        operations=tuple(
            dataclasses.replace(
                one, by_class={names.get(c, c): found for c, found in one.by_class.items()}
            )
            for one in graph.operations
        ),
    )


def _mates(graph: Graph) -> Mates:
    """By class, those that an operation or a value has beside it."""
    groups = {frozenset(one.by_class) for one in graph.operations}
    groups |= {frozenset(c for c in one.classes if c is not None) for one in graph.tensors}
    found: Mates = defaultdict(set)
    for group in groups:
        for c in group:
            found[c] |= group - {c}
    return found


def _apart(group: Sequence[int], mates: Mates) -> Iterator[list[int]]:
    """The members of a group in as few parts as an order allows in which none meet."""
    parts: list[list[int]] = []
    for c in group:
        for part in parts:
            if mates[c].isdisjoint(part):
                part.append(c)
                break
        else:
            parts.append([c])
    yield from parts


def _alike(graph: Graph) -> list[list[int]]:
    """Classes in groups that are alike, in the order in which they come."""
    classes = {*graph.classes, *_classes_of(others(graph, graph.classes))}
    parents = {c: c for c in classes}

    def root(c: int) -> int:
        while parents[c] != c:
            c = parents[c]
        return c

    for group in (*_by_path(graph, classes), *_by_products(graph)):
        for c in group[1:]:
            parents[root(c)] = root(group[0])
    found: dict[int, list[int]] = defaultdict(list)
    for c in sorted(classes):
        found[root(c)].append(c)
    return [*found.values()]


def _rest(graph: Graph) -> list[list[int]]:
    """Classes that are too many, or too small: those of products, and those of arguments."""
    return [of_small_products(graph), _classes_of(of_many(graph))]


def _classes_of(tensors: Iterable[Tensor]) -> list[int]:
    """The classes of some arguments, those of the largest dimensions first."""
    found: list[tuple[int, int]] = []  # the place among the dimensions of its argument, and a class
    for one in tensors:
        largest = sorted(zip(one.shape, one.classes, strict=True), key=lambda pair: -pair[0])
        found += [(rank, c) for rank, (_, c) in enumerate(largest) if c is not None]
    return [*dict.fromkeys(c for _, c in sorted(found))]


def _by_path(graph: Graph, classes: Container[int]) -> list[list[int]]:
    """Classes of the same dimension of arguments whose paths differ in numbers only."""
    found: dict[Hashable, dict[int, None]] = defaultdict(dict)
    for one in graph.tensors:
        pattern = _NUMBER.sub("*", one.name)
        for d, c in enumerate(one.classes if one.kind == "argument" else ()):
            if c is not None and c in classes:
                found[pattern, one.shape, d][c] = None
    return [[*group] for group in found.values()]


def _by_products(graph: Graph) -> list[list[int]]:
    """Classes that take part in the same products in the same way."""
    products = [one for one in graph.operations if one.flops]
    colours: dict[int, Hashable] = {**graph.sizes}
    for _ in range(_ROUNDS):
        roles: dict[int, list[str]] = defaultdict(list)
        for one in products:
            for c in one.by_class:
                roles[c].append(_role(one, c, graph, colours))
        numbers: dict[Hashable, int] = {}
        colours = {
            c: numbers.setdefault((colours[c], tuple(sorted(roles[c]))), len(numbers))
            for c in colours
        }
    found: dict[Hashable, list[int]] = defaultdict(list)
    for c, colour in colours.items():
        found[colour].append(c)
    return [*found.values()]


def _role(one: Operation, own: int, graph: Graph, colours: Mapping[int, Hashable]) -> str:
    """What a class is in a product: its dimensions, and what the others look like."""
    classes = [graph.tensors[i].classes for i in one.tensors]
    seen = [["own" if c == own else colours.get(c, "") for c in each] for each in classes]  # pyright: ignore[reportArgumentType, reportCallIssue]
    return f"{one.name} {one.runs} {seen}"
