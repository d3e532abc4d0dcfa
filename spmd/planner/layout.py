"""A plan: which classes of dimensions each mesh axis splits, in an order.

An axis goes to the first class of its order that a value has. This one rule says data parallelism
(``data: batch``), FSDP (``data: batch, width``), Megatron (``model: heads, hidden, vocabulary``),
and sequence, context and expert parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Protocol

from spmd import P


class Placed(Protocol):
    """What a layout wants of an array: its shape, and the class of each dimension, or None."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        ...

    @property
    def classes(self) -> tuple[int | None, ...]:
        """Of its dimensions."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What each mesh axis splits.

    Attributes:
        orders: by axis, major to minor, the classes that it splits, the first one first.
    """

    orders: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, orders: Mapping[str, Sequence[int]]) -> Layout:
        """From a mapping."""
        return cls(tuple((axis, tuple(classes)) for axis, classes in orders.items()))

    def with_order(self, axis: str, classes: Sequence[int]) -> Layout:
        """With another order of one axis."""
        return Layout.of({**dict(self.orders), axis: classes})

    def places(self, tensor: Placed, sizes: Mapping[str, int]) -> dict[str, int]:
        """The dimension that each axis splits.

        An axis passes over a dimension that it does not divide. Of two dimensions of one class it
        takes the first one.
        """
        found: dict[str, int] = {}
        left = list(tensor.shape)
        for axis, classes in self.orders:
            for d in _candidates(tensor, classes):
                if left[d] % sizes[axis] == 0:
                    found[axis] = d
                    left[d] //= sizes[axis]
                    break
        return found

    def spec(self, tensor: Placed, sizes: Mapping[str, int]) -> P:
        """Where an array lies: an entry for each dimension."""
        return P(*(e or None for e in spec_entries(self.places(tensor, sizes), len(tensor.shape))))


def _candidates(tensor: Placed, classes: Sequence[int]) -> Iterator[int]:
    for wanted in classes:
        yield from (d for d, number in enumerate(tensor.classes) if number == wanted)


def spec_entries(places: Mapping[str, int], rank: int) -> list[tuple[str, ...]]:
    """Axes by dimension."""
    entries: list[list[str]] = [[] for _ in range(rank)]
    for axis, d in places.items():
        entries[d].append(axis)
    return [*map(tuple, entries)]
