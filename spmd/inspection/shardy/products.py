"""The products of matrices in a program before it is partitioned, and how they are split."""

from __future__ import annotations

from collections.abc import Iterator
import functools
import math
from typing import NamedTuple

from spmd.inspection.shardy import passes, ragged
from spmd.inspection.shardy.flops import flops_of
from spmd.inspection.shardy.flow import trip_count
from spmd.inspection.shardy.propagation import Link, Propagation, Value

PRODUCTS = ("dot_general", "convolution", ragged.KIND)


class Product(NamedTuple):
    """A product of matrices, or a convolution, of the whole program.

    Attributes:
        link: the operation.
        made: its result.
        runs: in one call; None where a loop around it runs an unknown number of times.
        flops: of one run; in a `shard_map`, of one device's part.
    """

    link: Link
    made: Value
    runs: int | None
    flops: int


def products_in(found: Propagation) -> Iterator[Product]:
    """The products of a program, in its order."""
    trips = functools.cache(trip_count)
    for link in found.links:
        if link.name in PRODUCTS:
            made = found.values[link.values[-1]]
            loops = (o for o in passes.holders_of(made.operation) if o.name == "stablehlo.while")
            counts = [trips(loop) for loop in loops]
            runs = None if None in counts else math.prod(count or 0 for count in counts)
            yield Product(link, made, runs, flops_of(made.operation))
