"""Which values only the optimizer has: moments, and gradients on the way to them.

They can lie elsewhere than the parameters (ZeRO-1, arXiv:1910.02054): gradients are scattered to
them, and the parameters that they make are gathered. Found by structure: from such a value, every
way leads through elementwise operations to the results of the program, and it meets the moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import re

from spmd.inspection.shardy.propagation import walk
from spmd.planner.program.structure import Graph, Operation

# What changes no more of a value than where its elements are, or sums it up.
_SOFT = frozenset(("concatenate", "dynamic_update_slice", "pad", "reduce", "slice"))
_KEY = re.compile(r"\['[^']*'\]|\[\d+\]|\.\w+")


def with_state(graph: Graph) -> Graph:
    """A graph that says which values are the optimizer's."""
    own = state_of(graph)
    return dataclasses.replace(
        graph,
        tensors=tuple(
            dataclasses.replace(one, is_state=True) if i in own else one
            for i, one in enumerate(graph.tensors)
        ),
        operations=tuple(
            dataclasses.replace(one, is_state=True) if _is_within(one, own, graph) else one
            for one in graph.operations
        ),
    )


def _is_within(one: Operation, own: set[int], graph: Graph) -> bool:
    sides = [i for i in one.tensors if graph.tensors[i].shape]
    operands, results = (
        [i for i in side if i in sides]
        for side in (one.tensors[: one.operands], one.tensors[one.operands :])
    )
    if not results or not own.issuperset(results):
        return False
    return is_soft(one) and (one.is_fused or own.issuperset(operands))


def is_soft(one: Operation) -> bool:
    """Whether an operation says nothing of where a value has to be."""
    return one.is_fused or one.name in _SOFT


def state_of(graph: Graph) -> set[int]:
    """The tensors that only the optimizer has; none where no parameter is updated by them."""
    inputs = outputs_of(graph)
    free = _like_arguments(graph, inputs.values()) - _asked_for(graph)
    moments = [
        i
        for i, one in enumerate(graph.tensors)
        if one.kind == "argument" and i in free and any(c in graph.classes for c in one.classes)
    ]
    near = _neighbours(graph, free)
    found = {i for i, _, _ in walk(moments, lambda i: near[i])}
    ends = {o: i for o, i in inputs.items() if _maker(graph, o) in found}
    if not any(i is not None and i not in free for i in ends.values()):
        return set()
    kept = {o for o, i in inputs.items() if i in found}
    results = {i for i in found if graph.tensors[i].kind == "result"}
    return results | {*moments} & found | kept


def _like_arguments(graph: Graph, updated: Iterable[int | None]) -> set[int]:
    """Values of which each dimension is one of an argument that is updated.

    What is summed up to the gradient of a scale has the dimensions of a batch as well.
    """
    own = {c for i in updated if i is not None for c in graph.tensors[i].classes}
    return {i for i, one in enumerate(graph.tensors) if own.union((None,)).issuperset(one.classes)}


def _asked_for(graph: Graph) -> set[int]:
    """Values from which a way leads to an operation that is not elementwise."""
    before: dict[int, set[int]] = defaultdict(set)
    starts: set[int] = set()
    for one in graph.operations:
        operands = one.tensors[: one.operands]
        if not is_soft(one):
            starts.update(operands)
        for result, _ in one.results:
            before[result].update(operands)
    return {i for i, _, _ in walk(sorted(starts), lambda i: before[i])}


def _neighbours(graph: Graph, among: set[int]) -> Mapping[int, set[int]]:
    """The values that meet in an elementwise operation."""
    found: dict[int, set[int]] = defaultdict(set)
    for one in filter(is_soft, graph.operations):
        sides = {i for i in one.tensors if i in among and graph.tensors[i].shape}
        for i in sides:
            found[i] |= sides - {i}
    return found


def _maker(graph: Graph, output: int) -> int | None:
    """The value that an output is."""
    for one in reversed(graph.operations):
        if one.name == "return" and one.tensors[-1] == output:
            return one.tensors[0]
    return None


# Which argument an output is the next one of


def outputs_of(graph: Graph) -> dict[int, int | None]:
    """By output, the argument that it is the next one of, as a step returns its state.

    It has the shape and classes of the argument, and as much as possible of its path; of several,
    the order decides.
    """
    arguments, outputs = (
        [(i, one) for i, one in enumerate(graph.tensors) if one.kind == kind]
        for kind in ("argument", "output")
    )
    keys = {i: _KEY.findall(one.name) for i, one in (*arguments, *outputs)}
    groups: dict[object, list[int]] = defaultdict(list)
    for i, one in arguments:
        groups[one.shape, one.classes].append(i)
    found: dict[int, int | None] = {}
    for o, one in outputs:
        group = groups[one.shape, one.classes] if one.shape else []
        found[o] = None
        if group:
            found[o] = i = max(group, key=lambda i: _common(keys[i], keys[o]))
            group.remove(i)
    return found


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many keys are the same at the end of two paths."""
    return sum(1 for _ in _while_same(reversed(a), reversed(b)))


def _while_same(a: Iterable[str], b: Iterable[str]) -> Iterator[str]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x
