"""What products read of main memory, and what is read and written between them.

A compiler makes what is cheap again wherever it is used: a product reads what its operands are
made of, such as scores in place of their softmax. What is stored after a sum over a product's
result, such as the gradient of scores, takes a pass of its own; so does what is returned, and a sum
of terms that no product takes, such as that of a loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmd.planner.cost.fusion import Fusion, is_fusible
from spmd.planner.cost.lives import Lives
from spmd.planner.program.structure import Graph, Operation


class Reads:
    """By product, the values that it reads; and passes between products.

    Attributes:
        operands: by the index of a product, the stored values that each of its operands is made of.
        beside: likewise, of what is fused into it, beside its operands.
        written: likewise, what is written: the result, and tables that are made of it.
        passes: stored values that are read or written between products, with their runs.

    Args:
        graph: the program.
        fusion: which work is a part of which product.
        lives: which values are stored.
    """

    def __init__(self, graph: Graph, fusion: Fusion, lives: Lives):
        self.graph, self.fusion, self.lives = graph, fusion, lives
        self.operands: dict[int, tuple[frozenset[int], ...]] = {}
        self.beside: dict[int, frozenset[int]] = {}
        self.written: dict[int, tuple[int, ...]] = {}
        parts: dict[int, list[Operation]] = {}
        tables: dict[int, list[int]] = {}
        for n, one in enumerate(graph.operations):
            if n in fusion.inside and not one.flops:
                parts.setdefault(fusion.inside[n], []).append(one)
                if n not in fusion.late and one.tensors[-1] in lives.tables:
                    tables.setdefault(fusion.inside[n], []).append(one.tensors[-1])
        for n, one in enumerate(graph.operations):
            if one.flops:
                self.operands[n] = tuple(map(self._operand, one.tensors[: one.operands]))
                self.beside[n] = self._beside(n, parts.get(n, []))
                self.written[n] = lives.written(one.tensors[-1]), *tables.get(n, ())
        self.passes = [*self._passes()]

    def _operand(self, i: int) -> frozenset[int]:
        """What an operand is read as; one that is made of arguments is as it is, such as a cast."""
        if i in self.graph.constants:
            return frozenset()
        return self.lives.behind[i] or frozenset((i,))

    def _beside(self, n: int, parts: list[Operation]) -> frozenset[int]:
        """What the operations that are a part of a product take from elsewhere.

        What elementwise work reads of arguments `Fusion` counts.
        """
        own = {i for part in (self.graph.operations[n], *parts) for i, _ in part.results}
        taken = {i for part in parts for i in part.tensors[: part.operands]} - own
        found = frozenset().union(*(self.lives.behind[i] for i in taken if not self._is_given(i)))
        return found.difference(*self.operands[n], map(self.lives.written, own))

    def _is_given(self, i: int) -> bool:
        return i in self.graph.arguments

    def _passes(self) -> Iterator[tuple[int, int]]:
        free = self._free()
        returned = {one.tensors[0] for one in self.graph.operations if one.name == "return"}
        for n in sorted(self.fusion.late):
            one = self.graph.operations[n]
            result = one.tensors[-1]
            is_written = result in self.lives.stored or result in self.lives.tables
            is_kept = one.name != "reduce" and is_written
            is_sum = one.name == "reduce" and one.tensors[0] not in free
            if is_kept or is_sum or result in returned:
                read = (self.lives.behind[i] for i in one.tensors[: one.operands])
                for i in frozenset((result,) if is_kept else ()).union(*read):
                    yield i, one.runs

    def _free(self) -> set[int]:
        """Values that products take, or that what they take is made of by what is done again."""
        found: set[int] = set()
        for one in reversed(self.graph.operations):
            result = one.tensors[-1]
            is_again = is_fusible(one) and one.name != "reduce" and result not in self.lives.stored
            if one.flops or (is_again and result in found):
                found.update(one.tensors[: one.operands])
        return found
