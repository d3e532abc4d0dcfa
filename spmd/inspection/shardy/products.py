"""The products of matrices in a program before it is partitioned, and their FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
import functools
import math
import re
from typing import NamedTuple

from spmd.inspection.shardy import passes
from spmd.inspection.shardy.flow import trip_count
from spmd.inspection.shardy.propagation import Link, Propagation, Value

PRODUCTS = ("dot_general", "convolution")

_MANUAL = "sdy.manual_computation"
_NAME = re.compile(r'"([^"]*)"')
# The scope that JAX gives to what the backward pass of `jax.checkpoint` computes again.
_AGAIN = "rematted_computation"


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
            yield Product(link, made, runs, _flops(found, link))


def model_flops(found: Propagation) -> int | None:
    """FLOPs of all products in one call, on all devices, without those that are computed again.

    None where a loop runs an unknown number of times. What stands in a `shard_map` counts once for
    each part into which its arguments and results are split.
    """
    total = 0
    for one in products_in(found):
        if one.runs is None:
            return None
        if _AGAIN not in one.link.op_name:
            total += one.runs * one.flops * (_parts(found, one.made) if one.made.local else 1)
    return total


def device_flops(found: Propagation) -> int | None:
    """FLOPs of the products of one device in one call, as the annotations split them."""
    total = 0
    for one in products_in(found):
        if one.runs is None:
            return None
        axes = {axis for i in one.link.values for d in found.values[i].axes for axis in d}
        split = 1 if one.made.local else passes.count_of(axes, found.axis_sizes)
        total += one.runs * one.flops // max(1, split)
    return total


def _parts(found: Propagation, made: Value) -> int:
    """Into how many parts the `shard_map`s around a value split what they take and give."""
    parts = 1
    for holder in passes.holders_of(made.operation):
        if holder.name == _MANUAL:
            manual = {*_NAME.findall(passes.text_of(holder, "manual_axes"))}
            used = {
                axis
                for name in ("in_shardings", "out_shardings")
                for dimensions in passes.shardings_in(passes.text_of(holder, name))
                for dimension in dimensions
                for axis in dimension.axes
                if passes.whole_of(axis) in manual
            }
            parts *= passes.count_of(used, found.axis_sizes)
    return parts


def _flops(found: Propagation, link: Link) -> int:
    """FLOPs of a whole product, two for a multiplication with its addition."""
    made = found.values[link.values[-1]]
    if link.name == "dot_general":
        terms = math.prod(link.sizes.values())
    else:  # each output adds up what the kernel has for its feature
        kernel = found.values[link.values[1]]
        features = {name for dims in link.factors[-1] for name in dims}
        own = [names for names in link.factors[1] if features.intersection(names)]
        outputs = math.prod(link.sizes[name] for names in own for name in names)
        terms = math.prod(made.shape) * math.prod(kernel.shape) // max(1, outputs)
    return terms * (8 if made.dtype.startswith("c") else 2)
