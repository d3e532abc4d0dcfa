"""What is sent, and a backend of which nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any

from spmd.inspection.hlo import groups as hlo_groups
from spmd.inspection.hlo.ledger import wire_bytes
from spmd.inspection.records.report import Shape, Shapes
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.passes import Dimensions

AXES = re.compile(r"\{((?:\"(?:[^\"\\]|\\.)*\"|[^{}\"])*)\}")
"""The axes of one dimension, in an attribute that lists them for each."""


def axes_by_dimension(operation: Any, name: str) -> dict[int, tuple[str, ...]]:
    """Axes by dimension, of an attribute such as ``[{"data"}, {}]``."""
    found = AXES.findall(passes.text_of(operation, name))
    return {d: axes for d, text in enumerate(found) if (axes := passes.axes_in(text))}


def local_shape(kind: Any, dimensions: Dimensions, sizes: Mapping[str, int]) -> Shape:
    """The shape on one device, the largest where a dimension does not divide."""
    dims, dtype = passes.dims_of(kind)
    parts = [passes.count_of(one.axes, sizes) for one in dimensions]
    parts += [1] * (len(dims) - len(parts))
    local = tuple(-(-dim // part) for dim, part in zip(dims, parts, strict=True))
    return Shape(dtype=passes.hlo_dtype(dtype), dims=local)


def part_of(shape: Shape, n: int) -> Shape:
    """One of `n` parts of a shape, along its first dimension that has as many."""
    dims = [*shape.dims]
    d = next((d for d, size in enumerate(dims) if size % n == 0), 0)
    if dims:
        dims[d] = -(-dims[d] // n)
    return dataclasses.replace(shape, dims=tuple(dims))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What one operation sends: kind, crossed axes, devices in a group, and shapes per device.

    The operation sends it `times` times in one execution, or once after the loop `after`, which
    only adds up what is sent. Sums of one `turn` are sent together, where they have one. Of a
    permute `groups` are the pairs of source and target, as XLA writes them, where they are known.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    group_size: int
    shapes: Shapes
    times: int = 1
    after: Any = None
    turn: int | None = None
    groups: str = ""

    @property
    def payload(self) -> int:
        """Bytes of the operands or of the results, whichever are more."""
        return max(self._nbytes)

    @property
    def wire(self) -> int:
        """Bytes that one device sends."""
        return wire_bytes(self.kind, *self._nbytes, self.group_size)

    def to(self, kind: str, shape: Shape) -> Exchange:
        """Another exchange between the same devices, of one shape before and after."""
        return dataclasses.replace(self, kind=kind, shapes=Shapes((shape,), (shape,)))

    def over(self, axes: tuple[str, ...], sizes: Mapping[str, int]) -> Exchange:
        """The same over other axes."""
        return dataclasses.replace(self, mesh_axes=axes, group_size=passes.count_of(axes, sizes))

    def between(self, pairs: hlo_groups.Groups, sizes: Mapping[str, int]) -> Exchange:
        """A permute of the same between pairs of source and target."""
        joined = hlo_groups.connected(pairs)
        return dataclasses.replace(
            self,
            kind="collective-permute",
            mesh_axes=hlo_groups.mesh_axes_of(joined, sizes),
            group_size=max(map(len, joined), default=1),
            groups=f"{{{','.join(f'{{{source},{target}}}' for source, target in pairs)}}}",
        )

    def with_shapes(self, change: Callable[[Shape], Shape]) -> Exchange:
        """The same of other shapes."""
        operands, results = (tuple(map(change, shapes)) for shapes in self.shapes)
        return dataclasses.replace(self, shapes=Shapes(operands, results))

    @property
    def _nbytes(self) -> tuple[int, int]:
        operand, result = (sum(shape.nbytes for shape in shapes) for shapes in self.shapes)
        return operand, result


class AnyTarget:
    """A backend of which nothing is known: what the shardings ask for."""

    rules = "for any backend: what the shardings ask for; the bytes of its compiler may differ"

    def __init__(
        self,
        main: Any,
        sizes: Mapping[str, int],
        chip: str = "",
        slice_of: Sequence[int] = (),
    ):
        self.main, self.sizes, self.chip, self.slice_of = main, sizes, chip, slice_of

    def sent(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        """What is sent in place of what an operation asks for."""
        return [asked]
