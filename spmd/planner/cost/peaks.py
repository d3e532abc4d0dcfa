"""The most memory that a device needs at a time, of a layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spmd.planner.cost.demand import Exchanged
from spmd.planner.cost.lives import Lives
from spmd.planner.cost.machine import Machine
from spmd.planner.cost.product import Sending


class _Gathered(NamedTuple):
    """By kind, what products make of memory beside a device's shares.

    Attributes:
        whole: how much of an operand is there that is gathered.
        large: likewise, where that is too large for vector memory.
        kept: 1 where an operand is kept for a product that is done in parts, or else 0.
        beside: bytes of what is gathered while the one before is in use.
    """

    whole: np.ndarray
    large: np.ndarray
    kept: np.ndarray
    beside: float


class Peaks:
    """What is alive at the worst moment of a program.

    Args:
        lives: which values are there at the same time.
        kind_of: by value, the number of its kind.
        sizes: by kind, the bytes of a value.
        nbytes: of each value.
        code: bytes of the program itself.
    """

    def __init__(
        self,
        lives: Lives,
        kind_of: Sequence[int],
        sizes: np.ndarray,
        nbytes: Sequence[float],
        code: float,
    ):
        self.lives, self.kind_of, self.sizes = lives, kind_of, sizes
        self.nbytes, self.code = nbytes, code

    def of(
        self,
        machine: Machine,
        ends: Sequence[float],
        inside: Sequence[float],
        shared: Mapping[Exchanged, Sending],
        in_parts: Collection[int],
    ) -> float:
        """Bytes of code, of arguments and outputs, and of what is beside them at the worst moment.

        Args:
            machine: what the program is for.
            ends: by kind, the share of an argument that a device has.
            inside: likewise, of other values.
            shared: exchanges of operands.
            in_parts: operands of products that are done in parts.
        """
        lives, gathered = self.lives, self._gathered(machine, shared, in_parts)
        parts = np.array(inside)
        near = np.array(self.sizes * parts <= machine.brief)
        away = parts * ~near
        counted = away, away, gathered.whole, gathered.large, parts * gathered.kept
        far = lives.all @ np.concatenate(counted)
        long, short = lives.rows @ (parts * near), lives.short @ (parts * near)
        beside = np.where(
            long + short > machine.room,
            long + np.maximum(short - machine.room, 0.0),
            machine.evicted * long,
        )
        always = self.code + lives.ends @ np.array(ends) + gathered.beside
        return float(always + (far + beside).max(initial=0.0))

    def _gathered(
        self, machine: Machine, shared: Mapping[Exchanged, Sending], in_parts: Collection[int]
    ) -> _Gathered:
        """What exchanges of operands, and products in parts, have in memory."""
        whole: dict[int, float] = {}
        large: dict[int, float] = {}
        buffers = [0.0, 0.0]
        for sent, sending in shared.items():
            if sent.tensor is None or not sending.nbytes:
                continue
            k = self.kind_of[sent.tensor]
            whole[k] = max(whole.get(k, 0.0), sending.nbytes / self.nbytes[sent.tensor])
            if sending.nbytes > machine.near:
                large[k] = whole[k]
                buffers.append(sending.nbytes)
        kept = dict.fromkeys((self.kind_of[i] for i in in_parts), 1.0)
        by_kind = (self._by_kind(one) for one in (whole, large, kept))
        return _Gathered(*by_kind, beside=sorted(buffers)[-2])

    def _by_kind(self, values: Mapping[int, float]) -> np.ndarray:
        found = np.zeros(len(self.sizes))
        if values:
            found[[*values]] = [*values.values()]
        return found
