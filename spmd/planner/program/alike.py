"""Layers that are written out one after the other: their classes are one, as those of a scan are.

Two classes are alike if the same dimension of arguments of one pattern has them, such as
``layers[0]['up']`` and ``layers[1]['up']``, or if they take part in the same products in the same
way. Alike classes become one where they never meet in an operation or in a value: in a chain of
square matrices, every other width is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
import dataclasses
import functools
import re
from typing import TypeAlias

from spmd.planner.program.structure import Graph, Operation, with_weights

_NUMBER = re.compile(r"\d+")
# How far products are compared: as far as the widths next to a class and those next to them.
_ROUNDS = 2

Mates: TypeAlias = dict[int, set[int]]


def tied(graph: Graph) -> Graph:
    """A graph in which alike classes are one."""
    mates = _mates(graph)
    names: dict[int, int] = {}
    for group in _alike(graph):
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


def _apart(group: list[int], mates: Mates) -> Iterator[list[int]]:
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
    """The classes of a plan in groups that are alike, in the order in which they come."""
    parents = {c: c for c in graph.classes}

    def root(c: int) -> int:
        while parents[c] != c:
            c = parents[c]
        return c

    for group in (*_by_path(graph), *_by_products(graph)):
        for c in group[1:]:
            parents[root(c)] = root(group[0])
    found: dict[int, list[int]] = defaultdict(list)
    for c in sorted(graph.classes):
        found[root(c)].append(c)
    return [*found.values()]


def _by_path(graph: Graph) -> list[list[int]]:
    """Classes of the same dimension of arguments whose paths differ in numbers only."""
    found: dict[Hashable, dict[int, None]] = defaultdict(dict)
    for one in graph.tensors:
        pattern = _NUMBER.sub("*", one.name)
        for d, c in enumerate(one.classes if one.kind == "argument" else ()):
            if c in graph.classes:
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
