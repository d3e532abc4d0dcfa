"""Which sums TPUs make whole, and which go around a ring, by the shapes of their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math

from spmd.inspection.timing.chips import CHIPS

#: A product in parts takes as long as its parts are sent if it has so many operations for a byte,
#: by the figures of the chip; the compiler's own are a little lower.
_OVERLAPPED = 0.96

#: XLA does no product in more parts (`max_windowed_einsum_iteration` of its partitioner).
_MOST_PARTS = 32


def goes_around(rows: float, parts: int, itemsize: float, chip: str) -> bool:
    """Whether a product is done in parts, which go around a ring of devices beside it.

    Found by compiling for v5e, v5p and v6e: over 4 to 32 devices of an axis they do, and over 64
    and 128 not, however many devices there are, and however large the parts.

    Args:
        rows: that a gathered matrix is applied to, or terms of a sum of which devices keep parts.
        parts: devices that one ring has.
        itemsize: bytes of an element of what is sent.
        chip: the name of its generation; where it is unknown, a v5e.
    """
    return parts <= _MOST_PARTS and rows > overlapped_from(chip, itemsize)


def overlapped_from(chip: str, itemsize: float) -> float:
    """How many terms or rows a product needs, at least, for its parts to go around beside it.

    Found by compiling products over 4, 8 and 16 devices: of two bytes it lies between 4,096 and
    4,352 on a v5e, 5,120 on a v5p, 9,216 and 10,240 on a v6e, 10,240 and 12,288 on a tpu7x, and
    5,120 and 8,192 on a v4; of four bytes it is twice as much (v5e, v5p and v6e). On ``2x2x1`` of
    v4 and v5p none went around.

    Args:
        chip: the name of its generation; where it is unknown, that of a v5e.
        itemsize: bytes of an element of what is sent.
    """
    known = CHIPS.get(chip)
    if known is None or not known.multipliers:
        known = CHIPS["v5e"]
    return _OVERLAPPED * known.flops / known.link * itemsize / 2


#: A register of a TPU has eight rows of so many lanes, and two rows of two bytes each are one.
_LANES, _ROWS, _FEW_ROWS = 128, 8, 4
_NEWEST = ("tpu7x",)


def is_left_whole(part: Sequence[int], kept: Mapping[int, int], itemsize: int, chip: str) -> bool:
    """Whether a sum of which devices keep parts is made whole, for the shape of the parts.

    Where the last dimension is shorter than a register has lanes, and the one before it is not,
    the two are in memory in the other order.

    Args:
        part: the shape of one.
        kept: the dimensions along which these are parts, and how many.
        itemsize: bytes of an element.
        chip: the name of its generation; where it is unknown, one that does so.
    """
    last = len(part) - 1
    whole = [size * kept.get(d, 1) for d, size in enumerate(part)]
    is_turned = last > 0 and whole[last] < _LANES <= whole[last - 1]
    if is_turned:
        part = [*part[:-2], part[last], part[last - 1]]
        kept = {{last: last - 1, last - 1: last}.get(d, d): parts for d, parts in kept.items()}
    if last in kept and (
        _has_odd_columns(part[last], itemsize, chip)
        or _has_few_rows(part, chip)
        or _is_narrow(part, chip, turned=is_turned)
    ):
        return True
    return last - 1 in kept and _has_broken_rows(part, itemsize, chip)


def _has_odd_columns(size: int, itemsize: int, chip: str) -> bool:
    """Whether parts along the last dimension are odd.

    Found by compiling for v4, v5e, v5p, v6e and tpu7x, over 4 and 8 devices: of two bytes, parts
    of 128, 384, 640, 896 and 1,152 along the last dimension, and not of 16, 32, 48, 64, 96, 160,
    192, 256, 512 and 768. (Parts that are no multiple of 16 differ with the rank.)
    """
    return itemsize == 2 and size % (2 * _LANES) == _LANES and chip not in _NEWEST


def _has_few_rows(part: Sequence[int], chip: str) -> bool:
    """Whether parts of columns are of a vector, or of few rows.

    Found by compiling for v4, v5e, v5p and v6e: of 2 to 4 rows, of one matrix and of several, and
    not of 5, 6, 8 and more. A tpu7x scatters these, and no vectors.
    """
    rows = [size for size in part[:-1] if size > 1]
    return not rows or (rows[-1] <= _FEW_ROWS and chip not in _NEWEST)


def _is_narrow(part: Sequence[int], chip: str, *, turned: bool) -> bool:
    """Whether parts along the last dimension are fewer columns than lanes, and no fewer than rows.

    Found by compiling for v5e, v5p and v6e: of one matrix and of several, of two bytes and of four,
    parts of 48 to 96 columns with 32 rows, of 64 with 64 and of 96 with 96, and not of 48 with 64.
    In the other order they have to be more. A tpu7x has no such parts.
    """
    *_, rows, columns = (1, *part)
    is_more = columns > rows or (columns == rows and not turned)
    return columns < _LANES and is_more and chip not in _NEWEST


def _has_broken_rows(part: Sequence[int], itemsize: int, chip: str) -> bool:
    """Whether parts along the dimension before the last are no whole tiles of memory.

    Found by compiling for v5e, v5p, v6e and tpu7x: of matrices parts of 1, 2, 3 and 4 rows, and not
    of 8 and more; of several matrices parts of 4, 8, 12 and 24 rows of two bytes, and of 4 and 12
    of four bytes, and not of 16 and 48, and of 8, 16, 24 and 48. A tpu7x has no such tiles.
    """
    *outer, rows, _ = part
    if math.prod(outer) == 1 or chip in _NEWEST:
        return rows < _ROWS
    return rows % (_ROWS * 4 // itemsize) != 0


def is_summed_whole(slice_of: Sequence[int], chip: str) -> bool:
    """Whether a sum over all devices of a slice is made whole where devices keep parts of it.

    Found by compiling: on slices of three dimensions (v4 and v5p, 2x2x2 to 4x4x8) and square ones
    (v5e and v6e, 4x4 to 16x16), and not on others (1x4, 2x2, 2x4, 2x8, 4x8, 4x16, 8x16, 2x2x1), nor
    on any of tpu7x (2x2x1 to 4x4x4).

    Args:
        slice_of: the sizes of its dimensions; where they are unknown, one that does so.
        chip: the name of its generation.
    """
    sides = [size for size in slice_of if size > 1]
    is_square = len(sides) == 2 and sides[0] == sides[1] > 2
    return not slice_of or (chip not in _NEWEST and (is_square or len(sides) > 2))


def is_placed_by_shardy(chip: str) -> bool:
    """Whether the compiler for a chip places values otherwise as Shardy asks for it.

    Found by compiling 80 products whose operands and results lie anywhere: libtpu for a tpu7x does.
    """
    return chip in _NEWEST


def is_one_sum(chip: str) -> bool:
    """Whether a sum over several axes is one, and whole, where parts are kept over some of them.

    Found by compiling: on a tpu7x (2x2x1 to 2x2x4), and not on v4, v5e, v5p and v6e, which sum over
    the axes of the parts first, and over the others what is kept.
    """
    return chip in _NEWEST


#: A gather over all devices of so many, of which generations, is a sum where it gives few bytes.
_GATHERING = {"v5e": (64, 256), "v6e": (64, 128)}
_GATHERED = 16 * 2**20


def is_gathered_by_sum(nbytes: float, slice_of: Sequence[int], chip: str) -> bool:
    """Whether a gather over all devices of a slice is made as a sum, to which each adds its part.

    Found by compiling for v5e (2x4 to 16x16) and v6e (4x4 to 16x16): from 64 devices on up to 16
    MiB of what is gathered, and not above; of a v6e not on 16x16. Over an axis that has not all
    devices none was, nor any of v4, v5p (64 to 256 devices) and tpu7x.

    Args:
        nbytes: of what is gathered.
        slice_of: the sizes of its dimensions; where they are unknown, one that does not.
        chip: the name of its generation.
    """
    least, most = _GATHERING.get(chip, (1, 0))
    return least <= math.prod(slice_of) <= most and nbytes <= _GATHERED


def is_vector_of_sums(whole: Sequence[int], n: int) -> bool:
    """Whether what is gathered is a vector whose parts are no whole registers.

    Such a one is made as a sum, on all generations. Found by compiling for v4, v5e, v5p, v6e and
    tpu7x, over 4, 8 and 16 devices: parts of 1 to 127 and of 130 numbers, of two bytes and of four,
    and not of 128 and 1,024.

    Args:
        whole: the shape of what is gathered.
        n: devices that have a part of it.
    """
    return bool(whole) and max(whole) == math.prod(whole) and max(whole) // n % _LANES != 0
