"""FLOPs of the products in one call: of the whole program as it was written, and of a device.

A product is one of matrices, a convolution, or a kernel written by hand whose author says what it
computes, or whose name does. Of the branches of a conditional the one with most counts: one runs.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import math
import re
from typing import Any, NamedTuple

from spmd.inspection.hlo.cost import convolved
from spmd.inspection.records.report import Shape
from spmd.inspection.shardy import calls, passes, ragged
from spmd.inspection.shardy.flow import trip_count
from spmd.inspection.shardy.propagation import Link, Propagation
from spmd.inspection.timing.chips import Chip, passes_of
from spmd.inspection.timing.kernels import known_flops

# The scope that JAX gives to what the backward pass of `jax.checkpoint` computes again.
_AGAIN = "rematted_computation"
_BRANCHES = ("stablehlo.case", "stablehlo.if")
_NAME = re.compile(r'"([^"]*)"')
_KERNEL = re.compile(r"tpu_custom_call|triton|mosaic|cudnn")
_PRECISION = re.compile(r"precision (\w+)")
_PRIMITIVES = re.compile(r"num_primitive_operations = (\d+)")
_ESTIMATE = re.compile(r'"flops"\s*:\s*"?(\d+)')


class Work(NamedTuple):
    """What a part of a program computes.

    Attributes:
        flops: of its products.
        loops: whether there are some in loops that run an unknown number of times; they count once.
        left_out: kernels of which nobody says what they compute, by name.
        saved: of `flops` those that take no time, next to as many of bf16: see `Chip.taken`;
            negative where they take longer.
    """

    flops: int = 0
    loops: bool = False
    left_out: tuple[str, ...] = ()
    saved: int = 0

    @property
    def taken(self) -> int:
        """FLOPs of bf16 that take as long."""
        return self.flops - self.saved

    def __add__(self, other: Any) -> Work:
        names = dict.fromkeys(self.left_out + other.left_out)
        loops, saved = self.loops or other.loops, self.saved + other.saved
        return Work(self.flops + other.flops, loops, (*names,), saved)

    def times(self, count: int | None) -> Work:
        """As often as a loop runs; None where that is not known."""
        if count is None:
            return self._replace(loops=self.loops or self.flops > 0)
        return self.parts(count, 1) if count else Work()

    def parts(self, count: int, of: int) -> Work:
        """So many parts of as many."""
        return self._replace(flops=count * self.flops // of, saved=count * self.saved // of)


def model_work(module: Any, chip: Chip | None = None) -> Work:
    """The products of a lowered module in one call, on all devices, each once.

    What the backward pass computes again is left out. What stands in a `shard_map` counts once for
    each part into which its arguments and results are split.

    Args:
        module: of StableHLO.
        chip: that says which products are faster than those of bf16; None where all are alike.
    """
    sizes = passes.axis_sizes(module.operation)

    def of(operation: Any, path: str, parts: int) -> Work:
        if _AGAIN in path:
            return Work()
        return _work_of(operation, path, chip, again=False).parts(parts, 1)

    with module.context:
        return _Walk(module.operation, sizes, of).all()


def device_work(found: Propagation, chip: Chip | None = None) -> Work:
    """The products of one device in one call, as the annotations split them.

    Args:
        found: the program with its annotations.
        chip: as `model_work` takes it.
    """
    axes = {found.values[link.values[-1]].operation: _axes_of(link, found) for link in found.links}

    def of(operation: Any, path: str, parts: int) -> Work:
        split = passes.count_of(axes.get(operation, ()), found.axis_sizes)
        return _work_of(operation, path, chip, again=True).parts(1, max(1, split))

    with found.module.context:
        return _Walk(found.module, found.axis_sizes, of).all()


def _axes_of(link: Link, found: Propagation) -> set[str]:
    """The axes that split an operation."""
    values = [found.values[i] for i in link.values]
    if link.name == ragged.KIND:
        own = ragged.read(values[-1].operation)
        chosen = ragged.split(own, [one.dimensions for one in values])
        return {axis for axes in chosen.values() for axis in axes}
    return {axis for value in values for axes in value.axes for axis in axes}


def kernel_work(found: Propagation) -> Work:
    """The kernels written by hand of one device in one call: no annotation splits them."""

    def of(operation: Any, path: str, parts: int) -> Work:
        return Work() if operation.name in _FLOPS else _work_of(operation, path, None, again=True)

    with found.module.context:
        return _Walk(found.module, found.axis_sizes, of).all()


class _Walk:
    """Adds up what a module computes, through its calls, loops and branches.

    Args:
        module: an operation of MLIR.
        sizes: of mesh axes.
        of: says what an operation computes that has no others inside, from its path of names and
            the number of parts that the `shard_map`s around it make.
    """

    def __init__(self, module: Any, sizes: Any, of: Callable[[Any, str, int], Work]):
        self.functions = passes.functions(module)
        self.sizes = sizes
        self.of = of
        self.called = functools.cache(self._called)

    def all(self) -> Work:
        """What one call of the program computes."""
        return self.called("main", "", 1)

    def _called(self, name: str, path: str, parts: int) -> Work:
        return self.block(passes.block_of(self.functions[name]), path, parts)

    def block(self, block: Any, path: str, parts: int) -> Work:
        """What the operations of a block compute."""
        found = (self.one(view.operation, path, parts) for view in block.operations)
        return sum(found, Work())

    def one(self, operation: Any, path: str, parts: int) -> Work:
        """What an operation computes, with all that is in it."""
        name = operation.name
        if name in _COUNTED:
            return self.of(operation, _joined(path, operation), parts)
        if name in calls.CALLS:
            # A function of many calls is looked at once, unless its names say that it is another.
            return self.called(calls.callee_of(operation), _short(path, operation), parts)
        if name not in passes.HOLDERS:
            return Work()
        path = _short(path, operation)
        if name == passes.MANUAL:
            parts *= _parts(operation, self.sizes)
        inside = [self.block(block, path, parts) for block in passes.blocks(operation)]
        if name in _BRANCHES:
            return max(inside, key=lambda one: one.flops, default=Work())._replace(
                loops=any(one.loops for one in inside),
                left_out=sum(inside, Work()).left_out,
            )
        found = sum(inside, Work())
        return found.times(trip_count(operation)) if name == "stablehlo.while" else found


def _joined(path: str, operation: Any) -> str:
    return f"{path}/{passes.op_name_of(operation.location)}"


def _short(path: str, operation: Any) -> str:
    """Of the names around an operation only what decides how it counts."""
    return _AGAIN if _AGAIN in _joined(path, operation) else ""


def _parts(manual: Any, sizes: Any) -> int:
    """Into how many parts a `shard_map` splits what it takes and gives."""
    axes = {*_NAME.findall(passes.text_of(manual, "manual_axes"))}
    used = {
        axis
        for name in ("in_shardings", "out_shardings")
        for dimensions in passes.shardings_in(passes.text_of(manual, name))
        for dimension in dimensions
        for axis in dimension.axes
        if passes.whole_of(axis) in axes
    }
    return passes.count_of(used, sizes)


# Operations


def flops_of(operation: Any) -> int:
    """FLOPs of a product, two for a multiplication with its addition."""
    return _FLOPS[operation.name](operation)


def element_types(operation: Any) -> set[str]:
    """Of the two operands of a product, by the names of HLO."""
    return {_shape(one).dtype for one in [*operation.operands][:2]}


def bf16_passes(operation: Any) -> int:
    """Products of bf16 that a TPU makes of one, as its algorithm or its precision says."""
    if found := _PRIMITIVES.search(passes.text_of(operation, "algorithm")):
        return int(found[1])
    asked = _PRECISION.findall(passes.text_of(operation, "precision_config").lower())
    types = [_shape(_converted(one)).dtype for one in [*operation.operands][:2]]
    return passes_of(types, asked) if len(asked) == 2 else 1


def _converted(value: Any) -> Any:
    """What a value was before it was converted: one of bf16 has no more bits as float32."""
    maker = passes.maker_of(value)
    if maker is not None and maker.name == "stablehlo.convert":
        return maker.operands[0]
    return value


def _shape(value: Any) -> Shape:
    dims, dtype = passes.dims_of(value.type)
    return Shape(dtype=passes.hlo_dtype(dtype), dims=dims)


def _per_term(operation: Any) -> int:
    """Of a multiplication with its addition; one of complex numbers is four of real ones."""
    return 8 if _shape(operation.results[0]).dtype.startswith("c") else 2


def _dot(operation: Any) -> int:
    left = _shape(operation.operands[0]).dims
    summed = passes.numbers_of(operation, "dot_dimension_numbers")
    terms = math.prod(left[i] for i in summed.get("lhs_contracting_dimensions", ()))
    return _per_term(operation) * terms * math.prod(_shape(operation.results[0]).dims)


def _ragged(operation: Any) -> int:
    """A product in groups: each row, or each term of a sum, is in one of them."""
    left, right = (_shape(one).dims for one in operation.operands[:2])
    numbers = passes.numbers_of(operation, "ragged_dot_dimension_numbers")
    names = ("rhs_contracting_dimensions", "rhs_group_dimensions", "rhs_batching_dimensions")
    others = {i for name in names for i in numbers.get(name, ())}
    columns = math.prod(size for i, size in enumerate(right) if i not in others)
    return _per_term(operation) * math.prod(left) * columns


def _convolution(operation: Any) -> int:
    labels = passes.labels_of(operation)
    attributes, rank = operation.attributes, len(labels[0]) - 2

    def read(name: str, default: int) -> list[int]:
        return [int(n) for n in attributes[name]] if name in attributes else [default] * rank

    low = read("padding", 0)[::2] if "padding" in attributes else [0] * rank
    dilations = read("lhs_dilation", 1), read("rhs_dilation", 1)
    shapes = [_shape(one) for one in (*operation.operands, operation.results[0])]
    return convolved(labels, shapes, (read("window_strides", 1), low, *dilations))


_FLOPS: dict[str, Callable[[Any], int]] = {
    "stablehlo.dot_general": _dot,
    "stablehlo.convolution": _convolution,
    ragged.NAME: _ragged,
}
_COUNTED = (*_FLOPS, "stablehlo.custom_call")


def _work_of(operation: Any, path: str, chip: Chip | None, *, again: bool) -> Work:
    """What an operation computes; without `again`, less what a kernel's gradient computes again."""
    if operation.name in _FLOPS:
        flops = flops_of(operation)
        types, times = element_types(operation), bf16_passes(operation)
        taken = chip.taken(flops, types, times) if chip else flops
        return Work(flops, saved=round(flops - taken))
    target = passes.text_of(operation, "call_target_name").strip('"')
    if not _KERNEL.search(target):
        return Work()
    name = passes.text_of(operation, "kernel_name").strip('"') or path.rpartition("/")[2]
    operands, results = (
        [_shape(one) for one in side] for side in (operation.operands, operation.results)
    )
    known = known_flops(f"{path}/{name}", operands, results, again=again)
    config = passes.text_of(operation, "backend_config").replace("\\22", '"').replace("\\0A", "")
    estimate = _ESTIMATE.search(config)
    if estimate and (again or not known):
        return Work(int(estimate[1]))
    return Work(known[0]) if known else Work(left_out=(f"{name} ({target})",))
