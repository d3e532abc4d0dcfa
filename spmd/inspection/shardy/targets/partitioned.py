"""The partitioner of XLA, which goes another way than shardings ask for where that is cheaper."""

from __future__ import annotations

from collections.abc import Container, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from spmd.inspection.records.report import Shape, Shapes
from spmd.inspection.shardy import passes, places, ragged, tables
from spmd.inspection.shardy.flow import Flow
from spmd.inspection.shardy.passes import Dimension, Dimensions
from spmd.inspection.shardy.targets.base import AnyTarget, Exchange, axes_by_dimension, local_shape
from spmd.inspection.shardy.targets.sums import is_one_sum


class _Kept(NamedTuple):
    """What devices keep of a product's sum.

    Attributes:
        placement: of what they keep.
        axes: of the sum, over which they keep parts.
        free: over which they do the same.
        rest: the other axes of the sum.
    """

    placement: Dimensions
    axes: Sequence[str]
    free: Sequence[str]
    rest: Sequence[str]


class Partitioned(AnyTarget):
    """A backend of XLA, whose partitioner goes another way where that is cheaper."""

    @functools.cached_property
    def flow(self) -> Flow:
        """Where the values of the program go."""
        return Flow()

    @functools.cached_property
    def turned(self) -> set[Any]:
        """Operands that are exchanged already, with the axes."""
        return set()

    def sent(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        """What is sent in place of what an operation asks for."""
        if operation.name == "sdy.all_gather":
            if passes.is_constant(operation.operands[0]):
                return []
            found = self._added_first(operation, asked)
            if found is not None:
                return found
            found = self._turned(operation, asked) or self._looked_up(operation, asked)
            if found is not None and sum(one.wire for one in found) < asked.wire:
                return found
        if operation.name == "sdy.all_reduce":
            words = self._scattered_words(operation, asked)
            if words is not None and words.wire < asked.wire:
                return [words]
            return self._made_apart(operation, asked) or [asked]
        return [asked]

    def _turned(self, operation: Any, asked: Exchange) -> list[Exchange] | None:
        """For a product that sums over a gathered dimension, and whose other operand is split.

        An all-to-all splits the other operand as the first one is, and the results are summed.
        """
        user, i = only_use(operation)
        if user is None or user.name != "stablehlo.dot_general" or ragged.stands_in(user):
            return None
        held = passes.sharding_of(operation.operands[0])
        gathered = {d for d, one in enumerate(held) if {*one.axes} & {*asked.mesh_axes}}
        other, result = user.operands[1 - i], user.results[0]
        if _splits(result, asked.mesh_axes):  # its rows stay where they are
            return None
        if not gathered <= {*contracted(user, i)} or not _splits(other, asked.mesh_axes):
            return None
        moved, total = self.local(other), self.local(result, but=asked.mesh_axes)
        key = other, asked.mesh_axes
        turns = [] if key in self.turned else [asked.to("all-to-all", moved)]
        self.turned.add(key)
        return [*turns, asked.to("all-reduce", total)]

    def _added_first(self, operation: Any, asked: Exchange) -> list[Exchange] | None:
        """For rows that are gathered to be added to a table, whose own rows the axes split.

        Rows that are no fewer bytes than the table are not sent, nor where they go: each device
        adds its own to a whole table, and the tables are summed.
        """
        user, i = only_use(operation)
        if user is None or user.name != "stablehlo.scatter" or len(user.operands) != 3 or i == 0:
            return None
        before, _, rows = user.operands
        over = axes_of_rows(user)
        is_gathered = _gathers(passes.maker_of(rows), asked.mesh_axes)
        if not _combines(user) or not is_gathered or not {*asked.mesh_axes} <= {*over}:
            return None
        table = user.results[0]
        if self.local(rows).nbytes < self.local(table, but=over).nbytes:
            return None
        if i == 1:
            return []
        part, whole = self.local(table), self.local(table, but=asked.mesh_axes)
        total = asked.to("all-reduce", whole)
        if passes.is_constant(before):
            return [total]
        return [dataclasses.replace(asked, shapes=Shapes((part,), (whole,))), total]

    def _looked_up(self, operation: Any, asked: Exchange) -> list[Exchange] | None:
        """For rows of a table whose columns are gathered: the rows' columns are, afterwards."""
        user, i = only_use(operation)
        if user is None or user.name != "stablehlo.gather" or i != 0:
            return None
        rows = {*rows_of(user), *tables.numbering(user)}
        is_of_rows = rows & {*axes_by_dimension(operation, "gathering_axes")}
        if is_of_rows or not _splits(user.results[0], asked.mesh_axes):
            return None
        return [asked.to("all-to-all", self.local(user.results[0]))]

    def _scattered_words(self, operation: Any, asked: Exchange) -> Exchange | None:
        """For a sum of rows into a table, whose columns are split after it: before, instead."""
        maker = passes.maker_of(operation.operands[0])
        if maker is None or maker.name != "stablehlo.scatter":
            return None
        rows = *rows_of(maker), *tables.numbering(maker)
        if not {*asked.mesh_axes} <= sliced_over(operation, self.flow, but=rows):
            return None
        return asked.to("all-to-all", self.local(maker.operands[2]))

    def _made_apart(self, operation: Any, asked: Exchange) -> list[Exchange] | None:
        """For a product's sum of which devices keep parts, where others do the same.

        Those that do the same make each another part, which they sum up, and the parts change
        places. Found by compiling for CPUs, v5e and v5p, over 8 to 64 devices.
        """
        if (found := self.made_apart(operation)) is None:
            return None
        part = slice_after(operation, self.flow).results[0]
        total = asked.to("all-reduce", self.local(part))
        return [total, total.between(places.moves(*found, self.sizes), self.sizes)]

    def made_apart(self, total: Any) -> tuple[Dimensions, Dimensions] | None:
        """How the parts of a product's sum lie before they change places, and after; or None."""
        kept = self._kept_of(total)
        others = kept and places.stand_ins(kept.axes, kept.free, self.sizes)
        if not kept or others is None:
            return None
        after = kept.placement
        lying = (tuple(a for axis in one.axes for a in others.get(axis, (axis,))) for one in after)
        return tuple(map(Dimension, lying)), after

    def is_summed_at_once(self, total: Any) -> bool:
        """Whether a product's sum is one over all its axes, although parts over some are kept.

        Of one that is not made apart: so it is where devices do the same along other axes, but are
        too few to make other parts.
        """
        kept = self._kept_of(total)
        return kept is not None and bool(kept.rest) and (bool(kept.free) or is_one_sum(self.chip))

    def _kept_of(self, total: Any) -> _Kept | None:
        """What is kept of a product's sum; None where all of it is, or where it is no such sum."""
        maker, user = passes.maker_of(total.operands[0]), slice_after(total, self.flow)
        if user is None or maker is None or maker.name not in passes.PRODUCTS:
            return None
        summed = passes.axes_in(passes.text_of(total, "reduction_axes"))
        is_of_parts = not {*summed} <= {*self.sizes}
        if ragged.stands_in(maker) or is_of_parts or passes.is_manual(total):
            return None
        after = passes.out_sharding(user)
        held = {passes.whole_of(axis) for one in after for axis in one.axes}
        slices = axes_by_dimension(user, "slicing_axes").values()
        kept = [axis for axes in slices for axis in axes if axis in summed]
        free = [a for a, size in self.sizes.items() if size > 1 and a not in (*held, *summed)]
        rest = [axis for axis in summed if axis not in kept]
        return _Kept(after, kept, free, rest) if kept else None

    def local(self, value: Any, but: Container[str] = ()) -> Shape:
        """The shape of a value on a device, as if some axes did not split it."""
        axes = (tuple(a for a in one.axes if a not in but) for one in passes.sharding_of(value))
        return local_shape(value.type, tuple(map(Dimension, axes)), self.sizes)


def _splits(value: Any, axes: Sequence[str]) -> bool:
    return {*axes} <= {axis for one in passes.sharding_of(value) for axis in one.axes}


def _gathers(operation: Any, axes: Sequence[str]) -> bool:
    """Whether an operation gathers over these axes, among others."""
    if operation is None or operation.name != "sdy.all_gather":
        return False
    return {*axes} <= {*passes.axes_in(passes.text_of(operation, "gathering_axes"))}


def _combines(scatter: Any) -> bool:
    """Whether a scatter adds to what is there, or the like, and does not only replace it."""
    (block,) = passes.blocks(scatter)
    return len([*block.operations]) > 1


def rows_of(of_table: Any) -> Sequence[int]:
    """The dimensions of a table along which indices say what is taken, or where it is added."""
    if of_table.name == "stablehlo.gather":
        return passes.numbers_of(of_table, "dimension_numbers")["start_index_map"]
    found = passes.numbers_of(of_table, "scatter_dimension_numbers")
    return found["scatter_dims_to_operand_dims"]


def axes_of_rows(of_table: Any) -> list[str]:
    """The axes that split the rows of what a scatter makes."""
    held = passes.sharding_of(of_table.results[0])
    return [axis for d in rows_of(of_table) if d < len(held) for axis in held[d].axes]


def only_use(operation: Any) -> tuple[Any, int]:
    """What uses a result, and as which operand; None where it is not one operation."""
    uses = [*operation.results[0].uses]
    return passes.user_of(uses[0]) if len(uses) == 1 else (None, 0)


def sliced_over(operation: Any, flow: Flow, but: Container[int] = ()) -> frozenset[str]:
    """The axes over which the only use of a sum slices it, in whatever function that is.

    Args:
        operation: the sum.
        flow: where values go.
        but: dimensions whose axes do not count.
    """
    user = slice_after(operation, flow)
    found = axes_by_dimension(user, "slicing_axes") if user else {}
    return frozenset(axis for d, axes in found.items() if d not in but for axis in axes)


def slice_after(operation: Any, flow: Flow) -> Any:
    """The slice that is the only use of a sum; None where there is none."""
    user = operation
    while True:
        uses = [*flow.uses(user.results[0])]
        if len(uses) != 1:
            return None
        user, _ = uses[0]
        if user.name == "sdy.all_slice":
            return user
        if user.name not in ("stablehlo.transpose", "stablehlo.reshape"):
            return None


def contracted(maker: Any, operand: int = 0) -> Sequence[int]:
    """The dimensions of an operand that a sum or a product sums over."""
    if maker.name == "stablehlo.reduce":
        return [*maker.attributes["dimensions"]]
    found = passes.numbers_of(maker, "dot_dimension_numbers")
    return found.get(f"{'lr'[operand]}hs_contracting_dimensions", ())
