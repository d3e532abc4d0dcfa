"""Which values are in memory at the same time, whatever a layout makes of their sizes.

Compilers keep what operations make that they cannot fuse, and compute what lies between again,
where that needs nothing else to be kept. What a loop carries, or what is updated in place, has one
buffer; an output has that of a donated argument. Arguments and outputs are there all the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
import itertools
import math

import numpy as np

from spmd.planner.program.optimizer import outputs_of
from spmd.planner.program.structure import NO_WORK, UPDATES, Graph, Operation

# What is there for no more products than these is where it is used, if it is small.
_SHORT = 8
# What is needed for no more products than these is brief, however large.
_BRIEF = 4
_NEAR, _FAR, _COPIES, _USES, _AGAIN = range(5)
_PARTS = 5
# How far it is looked what a value is made of.
_DEPTH = 6


class Lives:
    """When the values of a program are in memory.

    Attributes:
        ends: by kind of value, bytes of arguments and outputs, which are there all the time.
        rows: moments at which memory may be fullest: by kind, the bytes of other values.
        short: likewise, of those that are there for a few products only.
        tables: values that are written as they are for who takes elements out of them, though they
            are not stored for others; with the operation that takes them last.
        brief: values that are made and needed no longer a few products later: compilers keep larger
            ones of these in vector memory than of others.
        behind: by value, the stored ones that it is made of by operations that are done again;
            without arguments, but where it is one.
        all: at the same moments, five tables side by side. After `short` and `rows` come values
            that are in use as operands of products, or are outputs: if those are gathered, so much
            more is there. Then those that are in use for a few products only. Last come operands
            that are computed again for each product: they are kept where one is done in parts.

    Args:
        graph: the program.
        kinds: by tensor, the number of its kind.
        count: of kinds.
        wide: the values that products' results are kept as, where these are of a wider type.
        beside: what is there once more in a loop, with that loop.
    """

    def __init__(
        self,
        graph: Graph,
        kinds: Sequence[int],
        count: int,
        wide: Mapping[int, int],
        beside: Iterable[tuple[int, int]] = (),
    ):
        self.graph, self.beside = graph, beside
        self.end = len(graph.operations)
        self.buffers = _Joined(len(graph.tensors))
        self.spans = self._spans()
        self._join()
        self.makers = {
            result: n for n, one in enumerate(graph.operations) for result, _ in one.results
        }
        self.readers = _readers(graph)
        self.users = {i: len(found) for i, found in self.readers.items()}
        self.wide = wide
        self.stored: set[int] = set()
        self.deaths: dict[int, int] = {}
        self._bury()
        self.tables = dict(self._tables())
        self.behind = self._behind()
        self.brief = frozenset(self._brief())
        self.ends = np.zeros(count)
        self.all = self._rows(kinds, count)
        self.short, self.rows, *_ = map(np.ascontiguousarray, np.split(self.all, _PARTS, axis=1))

    def _spans(self) -> dict[int, tuple[int, int]]:
        """The first and the last operation of each loop."""
        found: dict[int, tuple[int, int]] = {}
        for n, one in enumerate(self.graph.operations):
            for loop in one.loops:
                found[loop] = (found.get(loop, (n, n))[0], n)
        return found

    def _join(self) -> None:
        """Puts values into one buffer that have to be, or may be, in one place."""
        tensors = self.graph.tensors
        for one in self.graph.operations:
            first, *_, last = one.tensors
            if one.name in ("while", "return"):
                changed = one.name == "while" and one.tensors[1] != last
                for i in one.tensors[changed and self._is_given(first) : -1]:
                    self.buffers.join(i, last)
            elif one.name in UPDATES and not self._is_given(first):
                self.buffers.join(first, last)
        for output, i in outputs_of(self.graph).items():
            if i is not None and tensors[i].donated and tensors[i].nbytes == tensors[output].nbytes:
                self.buffers.join(i, output)

    def _is_given(self, i: int) -> bool:
        """Whether a value is an argument whose memory stays as it is."""
        one = self.graph.tensors[i]
        return one.kind == "argument" and not one.donated

    # Until when values are needed

    def _bury(self) -> None:
        """Finds what is stored, and when it is read for the last time."""
        for i, one in enumerate(self.graph.tensors):
            if one.kind != "result":
                self.deaths[i] = self.end
        for n in range(self.end - 1, -1, -1):
            one = self.graph.operations[n]
            if self._is_computed_again(one):
                times = [self.deaths[r] for r, _ in one.results if r in self.deaths]
            else:
                self.stored.update(result for result, _ in one.results)
                times = [n]
            if times:
                for i in one.tensors[: one.operands]:
                    self._needed(i, max(times), one)

    def _needed(self, i: int, time: int, by: Operation) -> None:
        maker = self.makers.get(i)
        around = self.graph.operations[maker].loops if maker is not None else ()
        inner = [loop for loop in by.loops if loop not in around]
        if inner:  # what comes from outside of a loop is there until its end
            time = max(time, self.spans[inner[0]][1])
        self.deaths[i] = max(time, self.deaths.get(i, 0))

    def _is_computed_again(self, one: Operation) -> bool:
        """Whether a result is not kept.

        So it is if it has one user, which it is a part of; and if all that it is made of is there
        as long as it is, or comes from one value.
        """
        if not _is_part(one) and one.name != "concatenate":
            return False
        result = one.tensors[-1]
        if self.users.get(result) == 1:
            return True
        sources = set(self._sources(one, self.graph.tensors[result].nbytes / 2, _DEPTH))
        last = self.deaths.get(result, 0)
        return len(sources) < 2 or all(self.deaths.get(i, 0) >= last for i in sources)

    def _sources(self, one: Operation, size: float, depth: int) -> Iterator[int]:
        """The large values that a result is made of, past those that have one user."""
        for i in one.tensors[: one.operands]:
            maker = self.graph.operations[self.makers[i]] if i in self.makers else None
            if self.users.get(i) == 1 and depth and maker is not None and maker.is_fused:
                yield from self._sources(maker, size, depth - 1)
            elif self.graph.tensors[i].nbytes >= size and i not in self.graph.constants:
                yield i

    def _tables(self) -> Iterator[tuple[int, int]]:
        """What elements are taken out of, such as scores in float32 of which each row has one.

        Compilers make no gather a part of what makes its table.
        """
        known = self.stored | self.graph.constants | {*self.wide.values()}
        for n, one in enumerate(self.graph.operations):
            if one.name == "gather" and one.is_fused:
                i = self._origin(one.tensors[0])
                maker = self.makers.get(i)
                if maker is not None and _is_part(self.graph.operations[maker]) and i not in known:
                    yield i, n

    def _origin(self, i: int) -> int:
        """What a value is, before it was given to functions of the module, or had another shape."""
        while i in self.makers and (one := self.graph.operations[self.makers[i]]).passes_on:
            i = one.tensors[0]
        return i

    def _brief(self) -> Iterator[int]:
        products = self._products()
        for i in self.makers:
            first, last = self._birth(i), self.deaths.get(i, self.end)
            if products[last] - products[first] <= _BRIEF:
                yield i

    def _products(self) -> list[int]:
        """By operation, how many products are before it."""
        return [0, *itertools.accumulate(bool(one.flops) for one in self.graph.operations), 0]

    # What is there at the same time

    def _rows(self, kinds: Sequence[int], count: int) -> np.ndarray:
        """By moment and kind, the bytes that are there; moments at which something comes."""
        changes: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for part, i, nbytes, first, last in self._all(kinds):
            changes[first].append((part * count + kinds[i], nbytes))
            changes[last + 1].append((part * count + kinds[i], -nbytes))
        now = np.zeros(_PARTS * count)
        rows = []
        for moment in sorted(changes):
            for kind, nbytes in changes[moment]:
                now[kind] += nbytes
            rows.append(now.copy())
        return _undominated(np.array(rows).reshape(len(rows), _PARTS * count))

    def _all(self, kinds: Sequence[int]) -> Iterator[tuple[int, int, float, int, int]]:
        """What is there beside arguments and outputs, its bytes, its first and its last moment."""
        tensors = self.graph.tensors
        products = self._products()

        def is_long(first: int, last: int) -> bool:
            return products[last] - products[first] > _SHORT

        for members in self.buffers.groups(self._kept()):
            largest = max(members, key=lambda i: tensors[i].nbytes)
            if any(tensors[i].kind != "result" for i in members):
                self.ends[kinds[largest]] += tensors[largest].nbytes
                continue
            life, i = self._life(members), self.written(largest)
            yield (_FAR if is_long(*life) else _NEAR), i, tensors[i].nbytes, *life
        for i, last in self.tables.items():
            life = self.makers[i], last
            yield (_FAR if is_long(*life) else _NEAR), i, tensors[i].nbytes, *life
        kept = self.stored | self.graph.constants
        for i, life in self._uses(kinds).items():
            yield (_COPIES if is_long(*life) else _USES), i, tensors[i].nbytes, *life
            if is_long(*life) and i in self.makers and i not in kept:
                yield _AGAIN, i, tensors[i].nbytes, self.makers[i], life[1]
        for i, nbytes, first, last in self._converted():
            yield _FAR, i, nbytes, first, last
        for i, loop in self.beside:
            yield _FAR, i, tensors[i].nbytes, *self.spans[loop]

    def _converted(self) -> Iterator[tuple[int, float, int, int]]:
        """Arguments of which loops take slices and make these narrower, and all of it so.

        A compiler makes the whole narrower before the first loop, and loops take slices of that.
        """
        tensors, found = self.graph.tensors, dict[int, tuple[float, int, int]]()
        given = {self.buffers.root(i): i for i, t in enumerate(tensors) if t.kind == "argument"}
        for one in self.graph.operations:
            stack = given.get(self.buffers.root(one.tensors[0]))
            if one.name != "dynamic_slice" or not one.loops or stack is None:
                continue
            share = self._narrowed(one.tensors[-1])
            if share < 1:
                first, last = self.spans[one.loops[0]]
                nbytes, start, _ = found.get(stack, (tensors[stack].nbytes * share, first, last))
                found[stack] = nbytes, start, last
        for i, (nbytes, first, last) in found.items():
            yield i, nbytes, first, last

    def _narrowed(self, i: int) -> float:
        """The share of a value's bytes that is left where it alone is converted, or else 1."""
        while len(readers := self.readers.get(i, ())) == 1:
            one = self.graph.operations[readers[0]]
            before, i = self.graph.tensors[i].nbytes, one.tensors[-1]
            if one.name == "convert":
                return self.graph.tensors[i].nbytes / before if before else 1.0
            if one.name not in NO_WORK:
                break
        return 1.0

    def _uses(self, kinds: Sequence[int]) -> dict[int, tuple[int, int]]:
        """From when to when a value is an operand of products; of what is returned, until the end.

        An output that is gathered does not lie where the argument does that it is the next of.
        """
        found: dict[int, tuple[int, int]] = {}
        for n, one in enumerate(self.graph.operations):
            for i in one.tensors[: one.operands] if one.flops else ():
                found[i] = found.get(i, (n, n))[0], n
            if one.name == "return" and kinds[one.tensors[0]] != kinds[one.tensors[-1]]:
                i = one.tensors[0]
                found[i] = self.makers.get(i, n), self.end
        return found

    def written(self, i: int) -> int:
        """What is kept in place of a value."""
        return self.wide.get(i, i)

    def _behind(self) -> list[frozenset[int]]:
        graph = self.graph
        found = [frozenset(() if i in graph.constants else (i,)) for i in range(len(graph.tensors))]
        for one in graph.operations:
            is_again = self._is_elementwise(one)
            for i in {i for i, _ in one.results} - graph.constants:
                if is_again and i not in self.stored:
                    own = frozenset().union(*(found[j] for j in one.tensors[: one.operands]))
                    found[i] = own - graph.arguments
                else:
                    found[i] = frozenset((self.written(i),))
        return found

    def _is_elementwise(self, one: Operation) -> bool:
        """Whether no operand has more elements than the result."""
        sizes = [math.prod(self.graph.tensors[i].shape) for i in one.tensors]
        return _is_part(one) and max(sizes[: one.operands], default=0) <= sizes[-1]

    def _kept(self) -> Iterator[int]:
        for i, one in enumerate(self.graph.tensors):
            if one.kind != "result" or (i in self.stored and i not in self.graph.constants):
                yield i

    def _life(self, members: Iterable[int]) -> tuple[int, int]:
        births = [self._birth(i) for i in members]
        deaths = [self.deaths.get(i, self._birth(i)) for i in members]
        return min(births), max([*births, *deaths])

    def _birth(self, i: int) -> int:
        maker = self.makers.get(i, 0)
        one = self.graph.operations[maker]
        return self.spans[one.loops[-1]][0] if one.name == "while" else maker


def wider(graph: Graph) -> dict[int, int]:
    """Of products' results that are kept as values of a wider type, these values.

    A compiler writes a product's result as the work leaves it that alone reads it, such as the mask
    of scores in float32. What is made wider and nothing else is written as it is: logits are made
    wider where they are read.
    """
    readers = _readers(graph)
    found: dict[int, int] = {}
    for product in graph.operations:
        last, is_worked = product.tensors[-1], False
        while product.flops and len(after := readers.get(last, ())) == 1:
            one = graph.operations[after[0]]
            if not _is_part(one):
                break
            last = one.tensors[-1]
            is_worked |= one.name not in (*NO_WORK, "convert")
        made, own = graph.tensors[last], graph.tensors[product.tensors[-1]]
        is_wider = made.nbytes > own.nbytes and math.prod(made.shape) == math.prod(own.shape)
        if is_worked and is_wider:
            found[product.tensors[-1]] = last
    return found


def _readers(graph: Graph) -> dict[int, list[int]]:
    """By value, the operations that take it."""
    found: dict[int, list[int]] = defaultdict(list)
    for n, one in enumerate(graph.operations):
        for i in {*one.tensors[: one.operands]}:
            found[i].append(n)
    return found


def _is_part(one: Operation) -> bool:
    """Whether a compiler may make an operation a part of another one."""
    return one.is_fused and one.name not in ("while", "return")


def _undominated(rows: np.ndarray) -> np.ndarray:
    """The rows without those that a neighbour exceeds in every kind."""
    kept: list[np.ndarray] = []
    for row in rows:
        if kept and (kept[-1] >= row).all():
            continue
        while kept and (row >= kept[-1]).all():
            kept.pop()
        kept.append(row)
    return np.array(kept).reshape(len(kept), rows.shape[1])


class _Joined:
    """Values that have one buffer."""

    def __init__(self, count: int):
        self.parents = [*range(count)]

    def root(self, i: int) -> int:
        while self.parents[i] != i:
            self.parents[i] = self.parents[self.parents[i]]
            i = self.parents[i]
        return i

    def join(self, i: int, j: int) -> None:
        self.parents[self.root(i)] = self.root(j)

    def groups(self, among: Iterable[int]) -> list[list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for i in among:
            found[self.root(i)].append(i)
        return [*found.values()]
