"""Which work a compiler puts into which product, and what it moves through memory apart from these.

Elementwise operations become a part of the product whose result they change, or else of that which
they prepare an operand for. What needs a sum over that result, as a softmax does, is a part of the
product that takes it, as often as it is taken; or, if it is stored, it goes over what it is made of
once more. The update of an optimizer is a part of neither: it is as long as its bytes take.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
import math

import numpy as np

from spmd.planner.cost.lives import Lives
from spmd.planner.cost.stacks import Stacks
from spmd.planner.program.structure import NO_WORK, Graph, Operation

# What takes a vector unit more than one step for each element, and what takes it none.
_DEAR = frozenset((
    "atan2", "cbrt", "cosine", "divide", "erf", "erf_inv", "exponential", "exponential_minus_one",
    "log", "log_plus_one", "logistic", "power", "reduce", "remainder", "rsqrt", "sine", "sqrt",
    "tan", "tanh",
))  # fmt: skip
_STEPS = 4


class Fusion:
    """Elementwise work by product, and bytes of what is by itself.

    Attributes:
        beside: by the index of a product, the steps of vector units in all its runs, by the kind of
            value whose elements they are for.
        inside: by operation, the product that it is a part of.
        late: operations that need a sum over a product's result.
        alone: by kind, bytes that work by itself reads and writes, and those that elementwise work
            reads of arguments and writes of outputs.

    Args:
        graph: the program.
        kinds: by tensor, the number of its kind.
        count: of kinds.
        lives: which values are stored.
        stacks: those of changed slices.
    """

    def __init__(
        self, graph: Graph, kinds: Sequence[int], count: int, lives: Lives, stacks: Stacks
    ):
        self.graph, self.kinds, self.lives, self.stacks = graph, kinds, lives, stacks
        self.late: set[int] = set()
        self._filled = frozenset(_filled(graph))
        self.homes = self._upwards()
        self._downwards()
        self.inside = self._inside()
        self.beside: dict[int, Counter[int]] = defaultdict(Counter)
        for n, one in enumerate(graph.operations):
            if is_fusible(one) and one.name not in NO_WORK and n in self.inside:
                self._count(self.beside[self.inside[n]], one)
        self.alone = np.zeros(count)
        for i, runs in self._moved().items():  # a slice where its stack is
            self.alone[kinds[stacks.sources.get(i, i)]] += runs * graph.tensors[i].nbytes
        for i, times in stacks.moved.items():
            self.alone[kinds[i]] += times * graph.tensors[i].nbytes
        for i in self._ends():
            self.alone[kinds[i]] += graph.tensors[i].nbytes

    def _upwards(self) -> dict[int, int]:
        """By operation, the product whose result it changes; `late` has those after a sum of it."""
        owners: dict[int, int] = {}
        homes: dict[int, int] = {}
        summed: set[int] = set()
        for n, one in enumerate(self.graph.operations):
            operands = one.tensors[: one.operands]
            if one.flops:
                homes[n] = n
            elif is_fusible(one) and not _ends(one):
                found = [owners[i] for i in operands if i in owners and self.graph.tensors[i].shape]
                if found:
                    homes[n] = max(found)
                    if any(i in summed and owners[i] == homes[n] for i in operands):
                        self.late.add(n)
            if n not in homes:
                continue
            for result, _ in one.results:
                owners[result] = homes[n]
                if n in self.late or one.name == "reduce":
                    summed.add(result)
                else:
                    summed.discard(result)
        return homes

    def _downwards(self) -> None:
        """Finds homes of what only prepares operands of products."""
        users: dict[int, int] = {}
        for n in range(len(self.graph.operations) - 1, -1, -1):
            one = self.graph.operations[n]
            if n not in self.homes and is_fusible(one) and not _ends(one):
                found = [users[result] for result, _ in one.results if result in users]
                if found:
                    self.homes[n] = min(found)
            if n in self.homes and (one.flops or is_fusible(one)):
                users.update((i, self.homes[n]) for i in one.tensors[: one.operands])

    def _inside(self) -> dict[int, int]:
        """By operation, the product that it is a part of: of what is late, the one that takes it.

        What is late and stored is a part of none.
        """
        users: dict[int, int] = {}
        found: dict[int, int] = {}
        for n in range(len(self.graph.operations) - 1, -1, -1):
            one = self.graph.operations[n]
            if n not in self.late:
                products = [self.homes[n]] if n in self.homes else []
            elif one.name == "reduce" or self.lives.stored.isdisjoint(one.tensors[one.operands :]):
                products = [users[i] for i, _ in one.results if i in users]
            else:
                products = []
            if products:
                found[n] = min(products)
            if n in found and (one.flops or is_fusible(one)):
                users.update((i, found[n]) for i in one.tensors[: one.operands])
        return found

    def _count(self, found: Counter[int], one: Operation) -> None:
        tensors = self.graph.tensors
        largest = max(one.tensors, key=lambda i: tensors[i].nbytes)
        by_constant = one.name == "divide" and one.tensors[1] in self.graph.constants
        steps = _STEPS if one.name in _DEAR and not by_constant else 1
        elements = math.prod(tensors[largest].shape)
        found[self.kinds[largest]] += one.runs * steps * elements

    def _moved(self) -> dict[int, int]:
        """Values that go through memory between work by itself and all else, with their runs."""
        found: dict[int, int] = {}
        made: dict[int, bool] = {}
        constants = self.graph.constants
        for n, one in enumerate(self.graph.operations):
            if self._is_stacked(one) or one.tensors[-1] in self._filled:
                continue
            alone = n not in self.homes and is_fusible(one) and not one.passes_on
            for i in one.tensors[: one.operands]:
                # Arguments and outputs are counted by themselves. What a loop fills is made first,
                # which stands for what is put there.
                begins = one.name == "while" and i in constants and i in made
                if begins or (i in made and made[i] != alone and not one.passes_on):
                    # Work by itself reads what a product's result is written as.
                    for j in self.lives.behind[i] if alone else (i,):
                        found[j] = max(one.runs, found.get(j, 0))
            for result, _ in one.results:
                if self._fills(one) or (result in constants and one.name == "while"):
                    continue
                made[result] = made.get(one.tensors[0], False) if one.passes_on else alone
        return found

    def _ends(self) -> set[int]:
        """Arguments that elementwise work reads, and outputs that it makes.

        Products count what they read, and loops what they put into a result.
        """
        found: set[int] = set()
        made: dict[int, bool] = {}
        for one in self.graph.operations:
            if one.name == "return" and made.get(one.tensors[0], False):
                found.add(one.tensors[-1])
            if one.name == "return" or self._is_stacked(one) or self._fills(one):
                continue
            works = is_fusible(one) and not one.passes_on
            for i in one.tensors[: one.operands] if works and one.name not in NO_WORK else ():
                if i in self.graph.arguments:
                    found.add(i)
            for result, _ in one.results:
                made[result] = made.get(one.tensors[0], False) if one.passes_on else works
        return found

    def _fills(self, one: Operation) -> bool:
        """Whether a loop's result is a stack that it puts together from a constant."""
        return one.name == "while" and one.tensors[1] in self._filled

    def _is_stacked(self, one: Operation) -> bool:
        """Whether a loop's result is a stack, which is counted as it is written."""
        return one.name == "while" and one.tensors[-1] in self.stacks.filled


def _filled(graph: Graph) -> Iterator[int]:
    """Stacks that loops put together from constants, as they are after a turn."""
    put = {one.tensors[-1] for one in graph.operations if one.name == "dynamic_update_slice"}
    for one in graph.operations:
        if one.name == "while" and one.tensors[0] in graph.constants and one.tensors[1] in put:
            yield one.tensors[1]


def is_fusible(one: Operation) -> bool:
    """Whether a compiler makes an operation a part of its neighbours."""
    return one.is_fused or one.name == "reduce"


def _ends(one: Operation) -> bool:
    return one.name in ("while", "return")
