"""What XLA's CPU backend makes of exchanges."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any

from spmd.inspection.records.report import Shape
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.targets.base import Exchange, axes_by_dimension, part_of
from spmd.inspection.shardy.targets.partitioned import Partitioned, contracted, slice_after


class Cpu(Partitioned):
    """XLA's CPU backend."""

    rules = "for cpu: bf16 exchanges are widened to f32"

    def sent(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        """Numbers that the CPU cannot add are wider; sums over several dimensions are apart."""
        found = super().sent(operation, asked)
        is_own = [*found] == [asked] and operation.name == "sdy.all_reduce"
        if is_own and not self.is_summed_at_once(operation):
            found = self._by_kept(operation, asked) or [
                asked.over(axes, self.sizes) for axes in _apart(operation, asked.mesh_axes)
            ]
        return [one.with_shapes(_widened) for one in found]

    def _by_kept(self, operation: Any, asked: Exchange) -> list[Exchange]:
        """For a product's sum of which each device keeps a part.

        It is summed for one kept dimension after the other, and over other axes the part alone.
        """
        maker, user = passes.maker_of(operation.operands[0]), slice_after(operation, self.flow)
        if user is None or maker is None or maker.name != "stablehlo.dot_general":
            return []
        kept, held = axes_by_dimension(user, "slicing_axes"), passes.sharding_of(user.operands[0])
        over = [tuple(a for a in asked.mesh_axes if a in axes) for axes in kept.values()]
        over = [axes for axes in over if axes]
        # Found by compiling: a dimension that is split already leaves the sum whole.
        if not over or any(held[d].axes for d in kept if d < len(held)):
            return []
        rest = tuple(a for a in asked.mesh_axes if not any(a in axes for axes in over))
        n = math.prod(passes.count_of(axes, self.sizes) for axes in over)
        part = asked.with_shapes(lambda shape: part_of(shape, n))
        whole = [asked.over(axes, self.sizes) for axes in over]
        return [*whole, part.over(rest, self.sizes)] if rest else whole


def _widened(shape: Shape) -> Shape:
    wider = "f16" if shape.dtype.startswith("f8") else {"bf16": "f32"}.get(shape.dtype)
    return dataclasses.replace(shape, dtype=wider) if wider else shape


def _apart(operation: Any, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The axes of a sum, together where they split one dimension of what is summed."""
    maker = passes.maker_of(operation.operands[0])
    if maker is None or maker.name not in ("stablehlo.reduce", "stablehlo.dot_general"):
        return [axes]
    held = passes.sharding_of(maker.operands[0])
    groups = [tuple(a for a in axes if a in held[d].axes) for d in contracted(maker)]
    together = sorted(itertools.chain.from_iterable(groups)) == sorted(axes)
    return [group for group in groups if group] if together else [axes]
