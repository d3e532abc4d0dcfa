"""Records of arrays on a mesh and of source text: what the page and the pictures are drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How one dimension of an array is cut over a mesh.

    Attributes:
        axes: mesh axes that cut it, major to minor.
        parts: the product of their sizes.
        block: elements of a part. Where `parts` does not divide the dimension, the last parts have
            fewer, or none, as in XLA.
    """

    axes: tuple[str, ...]
    parts: int
    block: int

    @classmethod
    def of(cls, size: int, axes: Sequence[str], mesh: Mapping[str, int]) -> Split:
        """The split of a dimension of so many elements over axes of a mesh."""
        parts = math.prod(mesh[axis] for axis in axes)
        return cls(axes=tuple(axes), parts=parts, block=-(-size // parts))

    def range_at(
        self, coordinate: Mapping[str, int], size: int, mesh: Mapping[str, int]
    ) -> tuple[int, int]:
        """The elements, as ``(start, stop)``, that the device at a mesh coordinate holds.

        Args:
            coordinate: place on the mesh by axis name.
            size: of the dimension.
            mesh: size by axis name.
        """
        part = 0
        for axis in self.axes:
            part = part * mesh[axis] + coordinate[axis]
        return min(part * self.block, size), min((part + 1) * self.block, size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An array that a program takes, and how it lies on the mesh.

    Attributes:
        path: as the user calls it, such as ``batch['x']``.
        dtype: element type in short, such as ``f32``.
        shape: sizes of the whole array.
        sharding: as one writes it, such as ``P('data', None)``.
        splits: by dimension; None where no PartitionSpec says it.
        nbytes: bytes of the largest shard.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    sharding: str
    splits: tuple[Split, ...] | None
    nbytes: int

    def shard_at(
        self, coordinate: Mapping[str, int], mesh: Mapping[str, int]
    ) -> tuple[tuple[int, int], ...] | None:
        """The shard of the device at a mesh coordinate, as ``(start, stop)`` by dimension.

        Args:
            coordinate: place on the mesh by axis name.
            mesh: size by axis name.

        Returns:
            None where `splits` is None.
        """
        if self.splits is None:
            return None
        pairs = zip(self.splits, self.shape, strict=True)
        return tuple(split.range_at(coordinate, size, mesh) for split, size in pairs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Consecutive lines of a source file.

    Attributes:
        file: path as Python knows it.
        first: number of the first line, counted from one.
        lines: the text, without line ends.
    """

    file: str
    first: int
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A place in Python code.

    Attributes:
        file: path as Python knows it.
        line: counted from one.
        column: counted from one; 0 where it is not known.
        function: qualified name of the function that the line is in.
    """

    file: str
    line: int
    column: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"
