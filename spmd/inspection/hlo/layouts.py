"""What the arrays of a type take in main memory, by the layouts in its text."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

from spmd.inspection.hlo.text import parse_shapes, tuple_elements
from spmd.inspection.records.report import Shape

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=? ]*)\](?:\{([^{}]*)\})?")
_TILE = re.compile(r":[^T]*T\(([\d,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_ELEMENT_BITS = re.compile(r"E\((\d+)\)")
_HOST = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a type: where in the tuple it stands, and the memory that it takes."""

    path: tuple[int, ...]
    shape: Shape
    nbytes: int


@functools.lru_cache(maxsize=1 << 14)
def leaves(text: str, tiled: bool) -> tuple[Leaf, ...]:
    """The arrays of a type that lie in main memory.

    On TPU (`tiled`) layouts have tiles, and spaces other than 0 are on the chip.
    """
    if not text.startswith("("):
        shapes = parse_shapes(text)
        size = _nbytes(text, shapes[0], tiled) if shapes else 0
        return (Leaf((), shapes[0], size),) if size else ()
    return tuple(
        Leaf((i, *leaf.path), leaf.shape, leaf.nbytes)
        for i, element in enumerate(tuple_elements(text))
        for leaf in leaves(element, tiled)
    )


def _nbytes(text: str, shape: Shape, tiled: bool) -> int:
    """Bytes that an array takes, with what the layout adds; 0 outside of main memory."""
    found = _ARRAY.match(text)
    layout = (found[3] or "") if found else ""
    space = _SPACE.search(layout)
    if space and int(space[1]) and (tiled or int(space[1]) == _HOST):
        return 0
    if not tiled:
        return shape.nbytes
    bits = _ELEMENT_BITS.search(layout)
    padded = Shape(dtype=shape.dtype, dims=_padded(shape.dims, layout))
    return -(-math.prod(padded.dims) * int(bits[1]) // 8) if bits else padded.nbytes


def _padded(dims: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The dimensions, from major to minor, rounded up to whole tiles."""
    tile = _TILE.match(layout[layout.find(":") :]) if ":" in layout else None
    if not tile:
        return dims
    order = [int(d) for d in layout.partition(":")[0].split(",") if d]
    sizes = [dims[d] for d in reversed(order)] or [1]
    steps = [int(s) for s in tile[1].split(",") if s.isdigit()]
    # A tile of higher rank than the array has leading dimensions of one.
    sizes = [1] * (len(steps) - len(sizes)) + sizes
    steps = [1] * (len(sizes) - len(steps)) + steps
    return tuple(-(-size // step) * step for size, step in zip(sizes, steps, strict=True))
