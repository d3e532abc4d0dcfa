"""What XLA's GPU backend makes of exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd.inspection.records.report import Shape
from spmd.inspection.shardy.targets.base import Exchange
from spmd.inspection.shardy.targets.tpu import Tpu


class Gpu(Tpu):
    """XLA's GPU backend: sums are merged, scattered and moved out of loops as for a TPU.

    Each that is kept in parts is a reduce-scatter, no sum goes around a ring of products, and
    numbers are sent as they are.
    """

    rules = "for gpu: sums that are added are one, and those kept in parts are scattered"

    def _added_up(self, one: Exchange) -> Exchange:
        return one

    def _goes_around(self, maker: Any, n: int) -> bool:
        return False

    def _is_narrowed(self, operation: Any, kind: str) -> bool:
        return False

    def _stays_whole(self, n: int, part: Shape, kept: Mapping[int, int]) -> bool:
        return False
