"""What the devices of a mesh can do: seconds of exchanges, of products, and of main memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from spmd.inspection.compile.timed import slice_of
from spmd.inspection.hlo.groups import Groups, groups_along
from spmd.inspection.shardy.passes import Dimension
from spmd.inspection.shardy.places import moves
from spmd.inspection.shardy.targets.sums import (
    is_gathered_by_sum,
    is_one_sum,
    is_summed_whole,
)
from spmd.inspection.timing.chips import Chip, platform_of
from spmd.inspection.timing.clock import KERNEL, REACHED, Links
from spmd.inspection.timing.torus import Torus

_LEAST, _PROBE = 1, 2**30
"""Bytes with which the delay of a collective is measured, and the time of a byte: one that sends
nothing has no delay between boxes."""
_SIDE, _ROWS = 128, 8
"""Rows and columns of the smallest matrix unit; and rows of a tile, whose columns are as many."""
_NEAR, _BRIEF, _ROOM = 16 * 2**20, 64 * 2**20, 96 * 2**20
"""Bytes of a value that compilers put into vector memory, of one that is used at once, and of all
such values at a time: it has about 128 MiB (S), a part of which is for what operations need."""
_EVICTED = 0.45
"""How much of what is there for long is in main memory, where vector memory has room for it all."""
_AHEAD, _BESIDE = 0.9, 0.35
"""How much of the gathers starts ahead of its use, and beside how much of the work there is room
for them: the schedules of libtpu for steps of transformers hide between a quarter and a half."""
_LANES = 8 * 128
"""Of a vector unit."""
_CODE, _UNIT = 0.45 * 2**20, 20 * 2**10
"""Bytes of program code for a product with what is fused with it, at most and for each pass of the
matrix units: found by compiling steps of 10 to 330 products for v5e and v5p."""
_FETCHED = 0.75
"""The share of the bandwidth of main memory that a product reaches for what vector memory has no
room for: by libtpu's cycles for products of 8 to 768 rows with 128 to 256 MiB of weights on v5e."""

_FACTORS, _WHOLE, _MATRIX = 0.08, 0.04, 0.21
"""Cycles of a Fourier transform for each element, by factors of its length or by its whole matrix,
and for each element of that, which is made first: by libtpu's for lengths of 64 to 16,384 on v5e.
v6e, v5p and v4 count 0.8 to 2 times as many."""


class _Counted(NamedTuple):
    """What libtpu counts for a generation of chips, and does on it: found by compiling for each.

    Attributes:
        slots: steps that a lane takes in a cycle: it has four units (S), which are not always all
            busy, and on some bf16 is two at a time.
        pops: cycles after which the matrix units give the next result for each lane, of a product
            that sums over little, such as scores of attention, in float32.
        packs: likewise, where they are packed into fewer bytes.
        is_near: whether results of products stay in vector memory; else it has slices alone.
        fed: the share of the bandwidth of main memory that products of few rows reach.
        start: seconds before such a product begins.
        hides: whether gathers start ahead of their use.
        copied: what is left of the time of elementwise work by itself, such as an optimizer's,
            whose values fit in vector memory: they are copied there and back beside other work.
        waits: of a slice of so many devices, what goes around a line is waited for; what goes
            around a ring that links close is not, nor is anything on smaller slices.
    """

    slots: float = 1.5
    pops: float = 10.0
    packs: float = 0.0
    is_near: bool = True
    fed: float = REACHED
    start: float = 0.0
    hides: bool = False
    copied: float = 1.0
    waits: float = math.inf


_COUNTED = {
    "v5e": _Counted(packs=14.5, hides=True, copied=0.55, waits=32),
    "v5p": _Counted(packs=11.5, is_near=False, fed=0.62, start=1.7e-6),
    "v6e": _Counted(slots=4.0, pops=2.3),
    "tpu7x": _Counted(slots=2.5, pops=4.1, is_near=False, fed=0.8, start=0.9e-6),
    # XLA's GPU backend hides half of the gathers of an MLP's steps on eight H200.
    **dict.fromkeys(("h100", "h200"), _Counted(hides=True)),
}


class Machine:
    """What the devices of a mesh can do.

    Attributes:
        near: bytes of a value up to which it is in vector memory.
        brief: likewise, of one that is made and needed no longer a few products later.
        room: bytes that vector memory has for such values.
        evicted: the share of them in main memory, of those that are there for more than a few
            products, although there is room.
        sums_whole: whether a sum over all devices is made whole where devices keep parts of it.
        one_sum: whether sums over several axes are one, where devices keep parts over some of them.
        sums_after_loops: whether what a loop adds to a total is summed over devices after the loop.

    Args:
        chip: whose figures to use.
        links: between the devices, in the order of the mesh.
        sizes: of the mesh axes, major to minor.
    """

    def __init__(self, chip: Chip, links: Links, sizes: Mapping[str, int]):
        self.chip = chip
        self.sizes = dict(sizes)
        self.count = math.prod(sizes.values())
        self._slice_of = slice_of(chip, links)
        self.sums_whole = is_summed_whole(self._slice_of, chip.name)
        self.one_sum = is_one_sum(chip.name)
        self.sums_after_loops = platform_of(chip) != "cpu"
        self._counted = _COUNTED.get(chip.name, _Counted())
        self.near, self.brief, self.room, self.evicted = 0, 0, _NEAR, _EVICTED
        if self._counted.is_near:
            self.near, self.brief, self.room = _NEAR, _BRIEF, _ROOM
        if not chip.vmem:
            self.near = self.brief = self.room = 0
        self._links = links
        self._line = functools.cache(self._measured)
        self._trade = functools.cache(self._traded)
        self._beside = functools.cache(self._is_beside)

    def exchange(self, kind: str, axes: tuple[str, ...], nbytes: float) -> float:
        """Seconds of a collective over axes, of so many bytes on its larger side."""
        delay, per_byte = self._line(kind, axes)
        return delay + nbytes * per_byte

    def gathers_by_sum(self, axes: Iterable[str], nbytes: float) -> bool:
        """Whether so many bytes are gathered over axes by a sum, as `is_gathered_by_sum` has it."""
        over_all = math.prod(self.sizes[axis] for axis in axes) == self.count
        return over_all and is_gathered_by_sum(nbytes, self._slice_of, self.chip.name)

    def delay(self, kind: str, axes: tuple[str, ...]) -> float:
        """Seconds of a collective over axes, however little it sends."""
        return self._line(kind, axes)[0]

    def around(self, axes: tuple[str, ...], nbytes: float, times: int) -> float:
        """Seconds of parts that go around a ring of devices."""
        return times * self.exchange("collective-permute", axes, nbytes)

    def trading(self, before: tuple[str, ...], after: tuple[str, ...], nbytes: float) -> float:
        """Seconds in which devices change places: each sends as many bytes to another one.

        Args:
            before: the axes that split what they have, as Shardy writes them.
            after: those that split it then.
            nbytes: on a device.
        """
        delay, per_byte = self._trade(before, after)
        return delay + nbytes * per_byte

    def _traded(self, before: tuple[str, ...], after: tuple[str, ...]) -> tuple[float, float]:
        pairs = moves((Dimension(before),), (Dimension(after),), self.sizes)
        return self._of_groups("collective-permute", pairs)

    def is_beside(self, axes: tuple[str, ...]) -> bool:
        """Whether parts that go around the devices along axes are sent beside a product.

        Found by compiling: on v5e slices of 32 chips and more (4x8 to 16x16) libtpu waits for each
        part, over axes of 4 to 32 devices, but for those whose links close a ring. On smaller
        slices, and on v4, v5p and v6e, it waits for none.
        """
        return self._beside(axes)

    def _is_beside(self, axes: tuple[str, ...]) -> bool:
        if self.count < self._counted.waits or not isinstance(self._links, Torus):
            return True
        return all(line.is_ring for line in self._links.lines(self._groups(axes)).values())

    def _groups(self, axes: Iterable[str]) -> Groups:
        """Devices along axes."""
        return groups_along([name for name in self.sizes if name in axes], self.sizes)

    def _measured(self, kind: str, axes: tuple[str, ...]) -> tuple[float, float]:
        groups = self._groups(axes)
        if kind == "collective-permute":
            groups = tuple(
                pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)
            )
        return self._of_groups(kind, groups)

    def _of_groups(self, kind: str, groups: Groups) -> tuple[float, float]:
        """Seconds of delay, and those for a byte."""
        least, most = (self._links.transfer(kind, groups, n, n).seconds for n in (_LEAST, _PROBE))
        per_byte = (most - least) / (_PROBE - _LEAST)
        return max(0.0, least - _LEAST * per_byte), per_byte

    def computing(self, flops: float) -> float:
        """Seconds of products."""
        return flops / (self.chip.product_share * self.chip.kept)

    def code(self, flops: float) -> float:
        """Bytes of the program for a product."""
        passes = flops / self.count / (2 * _SIDE**3)
        return min(_CODE, _UNIT * passes) if self.chip.multipliers else 0.0

    def kernels(self, flops: float) -> float:
        """Seconds of kernels written by hand."""
        return flops / (KERNEL * self.chip.kept)

    def moving(self, nbytes: float) -> float:
        """Seconds in which main memory moves bytes."""
        return nbytes / (REACHED * self.chip.hbm)

    def transforming(self, elements: float, length: int) -> float:
        """Seconds in which a Fourier transform of so many elements is made along one dimension."""
        if not self.chip.multipliers:
            return 0.0
        cycles = _FACTORS * elements
        if length <= 2 * _SIDE or length % _SIDE:
            cycles = _WHOLE * elements + _MATRIX * length**2
        return cycles / (self.chip.sustained * self.chip.clock)

    def passing(self, nbytes: np.ndarray, sizes: np.ndarray) -> float:
        """Seconds in which elementwise work by itself moves bytes of values of these sizes."""
        hidden = (1 - self._counted.copied) * nbytes[sizes <= self.near].sum()
        return self.moving(float(nbytes.sum() - hidden))

    def feeding(self, nbytes: float) -> float:
        """Seconds in which main memory moves what a product reads and writes there."""
        counted = self._counted
        return counted.start + nbytes / (counted.fed * self.chip.hbm) if nbytes else 0.0

    def fetching(self, nbytes: float) -> float:
        """Seconds in which main memory moves what a product reads and vector memory cannot hold."""
        counted = self._counted
        return counted.start + nbytes / (min(counted.fed, _FETCHED) * self.chip.hbm)

    def stepping(self, steps: float) -> float:
        """Seconds in which the vector units take steps, each for one element."""
        if not self.chip.multipliers:
            return 0.0
        return steps / (self._counted.slots * self._lanes)

    def hidden(self, gathers: float, work: float) -> float:
        """Seconds of gathers that go on beside work, where a compiler starts them ahead of it."""
        return min(_AHEAD * gathers, _BESIDE * work) if self._counted.hides else 0.0

    def popping(self, elements: float, *, is_packed: bool = False) -> float:
        """Seconds in which matrix units give so many results, however little each of them sums."""
        if not self.chip.multipliers:
            return 0.0
        counted = self._counted
        cycles = max(counted.pops, counted.packs * is_packed)
        return elements * cycles / self._lanes

    def widened(self, columns: float) -> float:
        """How much wider rows are than their columns: of scattered tables, and of results."""
        return _padded(columns, _SIDE) if self.chip.multipliers else 1.0

    def padded(self, shape: tuple[float, ...]) -> float:
        """How much more memory an array takes than its elements do, as it is laid out best.

        Its two minor dimensions are in tiles of 8 x 128, or of fewer rows where there are fewer.
        """
        is_tiled = self.chip.multipliers and len(shape) > 1 and math.prod(shape)
        return _tiled(shape) if is_tiled else 1.0

    @property
    def _lanes(self) -> float:
        """Of all vector units, in a second."""
        return self.chip.cores * _LANES * self.chip.sustained * self.chip.clock

    def filled(
        self, rows: float, columns: float, summed: float, *, is_convolution: bool = False
    ) -> float:
        """How much more a product costs whose sizes leave a part of the matrix units empty.

        Of a convolution, that what is summed and the columns are the units' own is given.
        """
        if not self.chip.multipliers:
            return 1.0
        wide, narrow = max(rows, columns), min(rows, columns)
        if is_convolution:
            wide, narrow = columns, rows
        return _padded(wide, _SIDE) * _padded(summed, _SIDE) * _padded(narrow, 8)


@functools.lru_cache(maxsize=4096)
def _tiled(shape: tuple[float, ...]) -> float:
    pairs = itertools.permutations(shape, 2)
    return min(_padded(row, _rows(row)) * _padded(column, _SIDE) for row, column in pairs)


def _rows(size: float) -> int:
    """Of a tile."""
    return min(_ROWS, 1 << max(0, math.ceil(size) - 1).bit_length())


def _padded(size: float, unit: int) -> float:
    return max(1.0, math.ceil(size / unit) * unit / size)
