"""What XLA's TPU backend makes of exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

from spmd.inspection.records.report import Shape, Shapes
from spmd.inspection.shardy import operands, passes, ragged
from spmd.inspection.shardy.targets.base import Exchange, axes_by_dimension, part_of
from spmd.inspection.shardy.targets.partitioned import (
    Partitioned,
    axes_of_rows,
    contracted,
    only_use,
    rows_of,
    slice_after,
    sliced_over,
)
from spmd.inspection.shardy.targets.sums import (
    goes_around,
    is_gathered_by_sum,
    is_left_whole,
    is_placed_by_shardy,
    is_summed_whole,
    is_vector_of_sums,
)

_PRODUCTS = *passes.PRODUCTS, "stablehlo.custom_call"


class Tpu(Partitioned):
    """XLA's TPU backend."""

    rules = (
        "for tpu: f32 is sent to products as bf16, and sums that are added are one; bytes by axis "
        "are mostly within 15%, those by kind may be far off"
    )

    @functools.cached_property
    def merged(self) -> set[Any]:
        """Sums that are a part of others."""
        return {*_merged(self.main)}

    def sent(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        """Sums are merged, scattered, or moved out of loops; gathers and permutes narrower."""
        if operation in self.merged and self.made_apart(operation) is None:
            return []
        found = self._sent(operation, asked)
        if all(one.kind != "all-reduce" for one in found):
            return [self._added_up(one) if one.kind == "all-gather" else one for one in found]
        turn = self._turn(operation.results[0])
        return [
            dataclasses.replace(one, turn=turn) if one.kind == "all-reduce" else one
            for one in found
        ]

    def _added_up(self, one: Exchange) -> Exchange:
        """A gather, or the sum that it is made as."""
        whole, n = one.shapes.results, one.group_size
        nbytes = sum(shape.nbytes for shape in whole)
        over_all = n == math.prod(self.sizes.values())
        is_sum = over_all and is_gathered_by_sum(nbytes, self.slice_of, self.chip)
        if is_sum or all(is_vector_of_sums(shape.dims, n) for shape in whole):
            return dataclasses.replace(one, kind="all-reduce", shapes=Shapes(whole, whole))
        return one

    def _turn(self, total: Any) -> int | None:
        """Of sums that no product depends on, 0 for those that others do, and 1 for the others."""
        if self.flow.reaches(total, _PRODUCTS):
            return None
        return int(not self.flow.reaches(total, ("sdy.all_reduce",)))

    def _sent(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        found = super().sent(operation, asked)
        if [*found] != [asked]:
            return [self._kept(operation, one) for one in found]
        if operation.name == "sdy.all_reduce" and sliced_over(operation, self.flow):
            return self._scattered(operation, asked)
        if asked.kind == "all-reduce":
            return [dataclasses.replace(asked, after=self._added_up_by(operation))]
        if dtype := self._narrowed(operation, asked.kind):
            return [asked.with_shapes(lambda shape: dataclasses.replace(shape, dtype=dtype))]
        return [asked]

    def _kept(self, operation: Any, one: Exchange) -> Exchange:
        """A part of what stands for a gather: the devices keep their parts of its sum."""
        if one.kind != "all-reduce":
            return one
        user, _ = only_use(operation)
        if user is not None and user.name == "stablehlo.scatter":
            return self._kept_of_table(operation, user, one)
        return _around(one) if self._goes_around(user, one.group_size) else one

    def _kept_of_table(self, gather: Any, maker: Any, one: Exchange) -> Exchange:
        """A sum of tables, of which the devices keep rows in the order of what they add."""
        part = self.local(maker.results[0])
        axes = [axis for axis in axes_of_rows(maker) if axis in one.mesh_axes]
        is_turned = axes != [*passes.axes_in(passes.text_of(gather, "gathering_axes"))]
        n = one.group_size
        if is_turned or self._stays_whole(n, part, dict.fromkeys(rows_of(maker), n)):
            return one
        return _kept_in_parts(one, (part,))

    def _goes_around(self, maker: Any, n: int) -> bool:
        added = n * _added(maker, self.sizes)
        if not added or not self._is_split_by_all(maker):
            return False
        return goes_around(added, n, _itemsize(self.local(maker.results[0])), self.chip)

    def _is_split_by_all(self, maker: Any) -> bool:
        """Whether no two devices do the same part of a product."""
        held = (one for operand in maker.operands for one in passes.sharding_of(operand))
        splits = {passes.whole_of(axis) for one in held for axis in one.axes}
        return all(size == 1 or axis in splits for axis, size in self.sizes.items())

    def _narrowed(self, operation: Any, kind: str) -> str | None:
        """The type of fewer bytes that is sent, where no more is needed of a value.

        Of an all-to-all it is what nothing made. On a tpu7x it is all of them.
        """
        if kind == "all-to-all":
            maker = passes.maker_of(operation.operands[0])
            is_given = maker is None or maker.name.startswith("sdy.")
            is_narrower = is_given or is_placed_by_shardy(self.chip)
        else:
            is_narrower = kind in ("all-gather", "collective-permute")
        return "bf16" if is_narrower and self._for_products(operation) else None

    def _for_products(self, operation: Any) -> bool:
        """Whether all that is computed with a result is products of the default precision."""
        if passes.dims_of(operation.results[0].type)[1] != "f32":
            return False
        ends = [*self.flow.ends(operation.results[0])]
        return bool(ends) and all(_takes_bf16(user) for user, _ in ends)

    def _scattered(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        """A sum of which each device keeps a part."""
        kept = sliced_over(operation, self.flow)
        over = tuple(axis for axis in asked.mesh_axes if axis in kept)
        rest = tuple(axis for axis in asked.mesh_axes if axis not in kept)
        n = passes.count_of(over, self.sizes)
        if n < 2 or self.is_summed_at_once(operation):
            return [asked]
        maker = passes.maker_of(operation.operands[0])
        if not rest and self._goes_around(maker, n) and operands.is_made_in_parts(maker, over):
            return [_around(asked)]
        user = slice_after(operation, self.flow)
        slices = axes_by_dimension(user, "slicing_axes")
        parts = {d: passes.count_of(axes, self.sizes) for d, axes in slices.items()}
        if maker is None:
            return [asked]
        part = asked.with_shapes(lambda shape: self._kept_part(operation, shape, over))
        first = asked.over(over, self.sizes)
        along = [d for d, axes in slices.items() if {*axes} & {*over}]
        if len(along) == 1 and not self._stays_whole(n, self.local(user.results[0]), parts):
            first = _kept_in_parts(first, part.shapes.results)
        return [first, part.over(rest, self.sizes)] if rest else [first]

    def _kept_part(self, operation: Any, whole: Shape, over: Sequence[str]) -> Shape:
        """What a device keeps of a sum over axes, as far as nothing is done before it is sliced."""
        user = slice_after(operation, self.flow)
        if user.operands[0] != operation.results[0]:
            return part_of(whole, passes.count_of(over, self.sizes))
        dims = [*whole.dims]
        for d, axes in axes_by_dimension(user, "slicing_axes").items():
            parts = passes.count_of([axis for axis in axes if axis in over], self.sizes)
            dims[d] = -(-dims[d] // parts)
        return dataclasses.replace(whole, dims=tuple(dims))

    def _stays_whole(self, n: int, part: Shape, kept: Mapping[int, int]) -> bool:
        """Whether a sum over `n` devices is made whole where each keeps a part of this shape."""
        if n == math.prod(self.sizes.values()) and is_summed_whole(self.slice_of, self.chip):
            return True
        itemsize = int(_itemsize(part))
        return itemsize > 0 and is_left_whole(part.dims, kept, itemsize, self.chip)

    def _added_up_by(self, operation: Any) -> Any:
        """The loop that does nothing with a sum but add it to a total; None where there is none."""
        ends = [*self.flow.ends(operation.results[0])]
        if len(ends) != 1 or ends[0][0].name != "stablehlo.add":
            return None
        add, i = ends[0]
        uses = [*self.flow.uses(add.results[0])]
        read = any(user.block == add.block and user != add for user, _ in uses)
        if read or (add, 1 - i) not in uses:
            return None
        loop = next(iter(self.flow.loops(add.results[0])), None)
        # A sum in a loop of its own is made in each turn of that.
        return loop if passes.loop_around(operation) == loop else None


def _kept_in_parts(asked: Exchange, parts: tuple[Shape, ...]) -> Exchange:
    """A sum of which each device keeps parts of these shapes."""
    shapes = Shapes(asked.shapes.operands, parts)
    return dataclasses.replace(asked, kind="reduce-scatter", shapes=shapes)


def _around(asked: Exchange) -> Exchange:
    """A sum whose parts go around a ring of devices while they are made."""
    n = asked.group_size
    part = asked.with_shapes(lambda shape: part_of(shape, n))
    return dataclasses.replace(part, kind="collective-permute", times=n)


def _itemsize(shape: Shape) -> float:
    return shape.nbytes / max(1, math.prod(shape.dims))


def _takes_bf16(user: Any) -> bool:
    if user.name == "stablehlo.convert":
        return passes.dims_of(user.results[0].type)[1] == "bf16"
    if user.name != "stablehlo.dot_general" or ragged.stands_in(user):
        return False
    return "HIGH" not in passes.text_of(user, "precision_config")


def _added(maker: Any, sizes: Mapping[str, int]) -> int:
    """How many products each device adds for an element of a product; 0 for what is none."""
    if maker is None or maker.name != "stablehlo.dot_general" or ragged.stands_in(maker):
        return 0
    dims = passes.shape_of(maker.operands[0])
    held = passes.sharding_of(maker.operands[0])
    return math.prod(dims[d] // passes.count_of(held[d].axes, sizes) for d in contracted(maker))


_ADDED = ("sdy.all_slice", "stablehlo.transpose", "stablehlo.reshape")


def _merged(function: Any) -> Iterator[Any]:
    """The sums that need not be sent, since what they give is added to another such sum."""
    sums: dict[Any, tuple[Any, str]] = {}
    for one in passes.operations_in(function):
        if one.name == "sdy.all_reduce":
            sums[one.results[0]] = one, passes.text_of(one, "reduction_axes")
        elif one.name == "stablehlo.add" and all(v in sums for v in one.operands):
            left, right = (sums[value] for value in one.operands)
            if (
                left[1] == right[1]
                and left[0] != right[0]
                and all(map(passes.is_used_once, one.operands))
            ):
                sums[one.results[0]] = left
                yield right[0]
        elif (
            one.name in _ADDED and one.operands[0] in sums and passes.is_used_once(one.operands[0])
        ):
            # The same move of both may come after their sum.
            first, key = sums[one.operands[0]]
            sums[one.results[0]] = first, f"{key} {_said(one)}"


def _said(operation: Any) -> str:
    """What an operation does, whatever its operand."""
    names = ("permutation", "slicing_axes", "reduction_axes")
    texts = [passes.text_of(operation, name) for name in names]
    return " ".join([operation.name, *texts, str(operation.results[0].type)])
