"""What stands near an instruction: who uses its result, and who makes its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import heapq

from spmd.inspection.hlo.text import Computation, Instruction
from spmd.inspection.records.report import Source


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where an exchange comes from, under the names of the fields of its record."""

    frames: tuple[Source, ...]
    op_name: str
    direction: str
    is_consumer: bool = False


class Around:
    """What is near an instruction: the types, users and makers in one computation."""

    def __init__(self, computation: Computation):
        self.instructions = computation.instructions
        self.types = {one.name: one.type for one in computation.instructions}
        self.places = {one.name: i for i, one in enumerate(computation.instructions)}

    @functools.cached_property
    def _used_by(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, one in enumerate(self.instructions):
            for name in dict.fromkeys(one.operand_names):
                found.setdefault(name, []).append(i)
        return found

    def used_directly(self, one: Instruction) -> list[Instruction]:
        """The instructions that use a result, in program order."""
        return [self.instructions[i] for i in self._used_by.get(one.name, ())]

    def users(self, one: Instruction) -> Iterator[Instruction]:
        """The instructions that use a result, and those that use theirs, in program order."""
        return self._reached(one, lambda other: self._used_by.get(other.name, ()), 1)

    def makers(self, one: Instruction) -> Iterator[Instruction]:
        """The instructions that make the operands, and theirs, the nearest first."""
        places = self.places
        return self._reached(
            one, lambda other: (places[n] for n in other.operand_names if n in places), -1
        )

    def _reached(
        self, one: Instruction, after: Callable[[Instruction], Iterable[int]], way: int
    ) -> Iterator[Instruction]:
        pending = [way * i for i in after(one)]
        heapq.heapify(pending)
        seen: set[int] = set()
        while pending:
            i = way * heapq.heappop(pending)
            if i not in seen:
                seen.add(i)
                yield self.instructions[i]
                for j in after(self.instructions[i]):
                    heapq.heappush(pending, way * j)
