"""What XLA's GPU backend makes of exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd.inspection.records.report import Shape
from spmd.inspection.shardy.targets.base import Exchange, local_shape
from spmd.inspection.shardy.targets.tpu import Tpu


class Gpu(Tpu):
    """XLA's GPU backend: sums are merged, scattered and moved out of loops as for a TPU.

    Each that is kept in parts is a reduce-scatter, no sum goes around a ring of products, and
    numbers are sent as they are; those that are converted to fewer bytes, after that.
    """

    rules = "for gpu: sums that are added are one, and those kept in parts are scattered"

    def _added_up(self, one: Exchange) -> Exchange:
        return one

    def _goes_around(self, maker: Any, n: int) -> bool:
        return False

    def _narrowed(self, operation: Any, kind: str) -> str | None:
        if kind not in ("all-gather", "all-to-all", "collective-permute"):
            return None
        value = operation.results[0]
        users = [user for user, _ in self.flow.ends(value)]
        if any(user.name != "stablehlo.convert" for user in users):
            return None
        made = [value, *(user.results[0] for user in users)]
        own, *others = (local_shape(one.type, (), self.sizes) for one in made)
        is_narrower = len({one.dtype for one in others}) == 1 and others[0].nbytes < own.nbytes
        return others[0].dtype if is_narrower else None

    def _stays_whole(self, n: int, part: Shape, kept: Mapping[int, int]) -> bool:
        return False
