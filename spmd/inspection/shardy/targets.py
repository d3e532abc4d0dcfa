"""What the compiler of a backend makes of the exchanges that shardings ask for.

Shardings ask for the same on all backends. The rules here are those of compilers that change how
many bytes cross an axis, as far as they could be measured: docs/preview.md has the programs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import re
from typing import Any

from spmd.inspection.hlo.ledger import wire_bytes
from spmd.inspection.records.report import Shape, Shapes
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.flow import Flow
from spmd.inspection.shardy.passes import Dimension, Dimensions
from spmd.inspection.timing.chips import CHIPS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What one operation sends: kind, crossed axes, devices in a group, and shapes per device.

    The operation sends it `times` times in one execution, or once after the loop `after`, which
    only adds up what is sent. Sums of one `turn` are sent together, where they have one.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    group_size: int
    shapes: Shapes
    times: int = 1
    after: Any = None
    turn: int | None = None

    @property
    def payload(self) -> int:
        """Bytes of the operands or of the results, whichever are more."""
        return max(self._nbytes)

    @property
    def wire(self) -> int:
        """Bytes that one device sends."""
        return wire_bytes(self.kind, *self._nbytes, self.group_size)

    @property
    def _nbytes(self) -> tuple[int, int]:
        operand, result = (sum(shape.nbytes for shape in shapes) for shapes in self.shapes)
        return operand, result


class AnyTarget:
    """A backend of which nothing is known: what the shardings ask for."""

    rules = "for any backend: what the shardings ask for; the bytes of its compiler may differ"

    def __init__(
        self,
        functions: Mapping[str, Any],
        sizes: Mapping[str, int],
        chip: str = "",
        slice_of: Sequence[int] = (),
    ):
        self.functions, self.sizes, self.chip, self.slice_of = functions, sizes, chip, slice_of

    def sent(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        """What is sent in place of what an operation asks for."""
        return [asked]


def target_of(platform: str) -> type[AnyTarget]:
    """The rules for a platform."""
    return {"cpu": Cpu, "tpu": Tpu}.get(platform, AnyTarget)


# The partitioner of XLA


AXES = re.compile(r"\{((?:\"(?:[^\"\\]|\\.)*\"|[^{}\"])*)\}")
"""The axes of one dimension, in an attribute that lists them for each."""


def axes_by_dimension(operation: Any, name: str) -> dict[int, tuple[str, ...]]:
    """Axes by dimension, of an attribute such as ``[{"data"}, {}]``."""
    found = AXES.findall(passes.text_of(operation, name))
    return {d: axes for d, text in enumerate(found) if (axes := passes.axes_in(text))}


def local_shape(kind: Any, dimensions: Dimensions, sizes: Mapping[str, int]) -> Shape:
    """The shape on one device, the largest where a dimension does not divide."""
    dims, dtype = passes.dims_of(kind)
    parts = [passes.count_of(one.axes, sizes) for one in dimensions]
    parts += [1] * (len(dims) - len(parts))
    local = tuple(-(-dim // part) for dim, part in zip(dims, parts, strict=True))
    return Shape(dtype=passes.hlo_dtype(dtype), dims=local)


class _Partitioned(AnyTarget):
    """A backend of XLA, whose partitioner goes another way where that is cheaper."""

    @functools.cached_property
    def flow(self) -> Flow:
        """Where the values of the functions go."""
        return Flow(self.functions)

    @functools.cached_property
    def turned(self) -> set[Any]:
        """Operands that are exchanged already, with the axes."""
        return set()

    def sent(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        """What is sent in place of what an operation asks for."""
        if operation.name == "sdy.all_gather":
            if _is_constant(operation.operands[0]):
                return []
            found = self._added_first(operation, asked)
            if found is not None:
                return found
            found = self._turned(operation, asked) or self._looked_up(operation, asked)
            if found is not None and sum(one.wire for one in found) < asked.wire:
                return found
        if operation.name == "sdy.all_reduce":
            found = self._scattered_words(operation, asked)
            if found is not None and found.wire < asked.wire:
                return [found]
        return [asked]

    def _turned(self, operation: Any, asked: Exchange) -> list[Exchange] | None:
        """For a product that sums over a gathered dimension, and whose other operand is split.

        An all-to-all splits the other operand as the first one is, and the results are summed.
        """
        user, i = _only_use(operation)
        if user is None or user.name != "stablehlo.dot_general":
            return None
        held = passes.sharding_of(operation.operands[0])
        gathered = {d for d, one in enumerate(held) if {*one.axes} & {*asked.mesh_axes}}
        other, result = user.operands[1 - i], user.results[0]
        if not gathered <= {*_contracted(user, i)} or not _splits(other, asked.mesh_axes):
            return None
        moved, total = self._local(other), self._local(result, but=asked.mesh_axes)
        key = other, asked.mesh_axes
        turns = [] if key in self.turned else [_same(asked, "all-to-all", moved)]
        self.turned.add(key)
        return [*turns, _same(asked, "all-reduce", total)]

    def _added_first(self, operation: Any, asked: Exchange) -> list[Exchange] | None:
        """For rows that are gathered to be added to a table, whose own rows the axes split.

        Rows that are no fewer bytes than the table are not sent, nor where they go: each device
        adds its own to a whole table, and the tables are summed.
        """
        user, i = _only_use(operation)
        if user is None or user.name != "stablehlo.scatter" or len(user.operands) != 3 or i == 0:
            return None
        before, _, rows = user.operands
        over = _axes_of_rows(user)
        is_gathered = _gathers(passes.maker_of(rows), asked.mesh_axes)
        if not _combines(user) or not is_gathered or not {*asked.mesh_axes} <= {*over}:
            return None
        table = user.results[0]
        if self._local(rows).nbytes < self._local(table, but=over).nbytes:
            return None
        if i == 1:
            return []
        part, whole = self._local(table), self._local(table, but=asked.mesh_axes)
        total = _same(asked, "all-reduce", whole)
        if _is_constant(before):
            return [total]
        return [dataclasses.replace(asked, shapes=Shapes((part,), (whole,))), total]

    def _looked_up(self, operation: Any, asked: Exchange) -> list[Exchange] | None:
        """For rows of a table whose columns are gathered: the rows' columns are, afterwards."""
        user, i = _only_use(operation)
        if user is None or user.name != "stablehlo.gather" or i != 0:
            return None
        is_of_rows = {*_rows(user)} & {*axes_by_dimension(operation, "gathering_axes")}
        if is_of_rows or not _splits(user.results[0], asked.mesh_axes):
            return None
        return [_same(asked, "all-to-all", self._local(user.results[0]))]

    def _scattered_words(self, operation: Any, asked: Exchange) -> Exchange | None:
        """For a sum of rows into a table, whose columns are split after it: before, instead."""
        maker = passes.maker_of(operation.operands[0])
        if maker is None or maker.name != "stablehlo.scatter":
            return None
        if not {*asked.mesh_axes} <= _sliced(operation, self.flow, but=_rows(maker)):
            return None
        return _same(asked, "all-to-all", self._local(maker.operands[2]))

    def _local(self, value: Any, but: Container[str] = ()) -> Shape:
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


def _rows(of_table: Any) -> Sequence[int]:
    """The dimensions of a table along which indices say what is taken, or where it is added."""
    if of_table.name == "stablehlo.gather":
        return passes.numbers_of(of_table, "dimension_numbers")["start_index_map"]
    found = passes.numbers_of(of_table, "scatter_dimension_numbers")
    return found["scatter_dims_to_operand_dims"]


def _axes_of_rows(of_table: Any) -> list[str]:
    """The axes that split the rows of what a scatter makes."""
    held = passes.sharding_of(of_table.results[0])
    return [axis for d in _rows(of_table) if d < len(held) for axis in held[d].axes]


def _only_use(operation: Any) -> tuple[Any, int]:
    uses = [*operation.results[0].uses]
    return passes.user_of(uses[0]) if len(uses) == 1 else (None, 0)


def _same(asked: Exchange, kind: str, shape: Shape) -> Exchange:
    """An exchange between the same devices, of one shape before and after."""
    return dataclasses.replace(asked, kind=kind, shapes=Shapes((shape,), (shape,)))


def _is_constant(value: Any) -> bool:
    """Whether all elements are one constant, which every device has."""
    maker = passes.maker_of(value, through="stablehlo.broadcast_in_dim")
    return maker is not None and maker.name in ("sdy.constant", "stablehlo.constant")


def _with_shapes(found: Exchange, change: Any) -> Exchange:
    operands, results = (tuple(change(shape) for shape in shapes) for shapes in found.shapes)
    return dataclasses.replace(found, shapes=Shapes(operands, results))


# CPU


class Cpu(_Partitioned):
    """XLA's CPU backend."""

    rules = "for cpu: bf16 exchanges are widened to f32"

    def sent(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        """Numbers that the CPU cannot add are wider; sums over several dimensions are apart."""
        found = super().sent(operation, asked)
        if [*found] == [asked] and operation.name == "sdy.all_reduce":
            found = self._by_kept(operation, asked) or [
                _over(asked, axes, self.sizes) for axes in _apart(operation, asked.mesh_axes)
            ]
        return [_with_shapes(one, _widened) for one in found]

    def _by_kept(self, operation: Any, asked: Exchange) -> list[Exchange]:
        """For a product's sum of which each device keeps a part.

        It is summed for one kept dimension after the other, and over other axes the part alone.
        """
        maker, user = passes.maker_of(operation.operands[0]), _slice_after(operation, self.flow)
        if user is None or maker is None or maker.name != "stablehlo.dot_general":
            return []
        kept, held = axes_by_dimension(user, "slicing_axes"), passes.sharding_of(user.operands[0])
        over = [tuple(a for a in asked.mesh_axes if a in axes) for axes in kept.values()]
        over = [axes for axes in over if axes]
        # Found by compiling: a dimension that is split already leaves the sum whole.
        if not over or any(held[d].axes for d in kept if d < len(held)):
            return []
        rest = tuple(a for a in asked.mesh_axes if not any(a in axes for axes in over))
        n = math.prod(passes.count_of(axes, self.sizes) for axes in over)
        part = _with_shapes(asked, lambda shape: _part(shape, n))
        whole = [_over(asked, axes, self.sizes) for axes in over]
        return [*whole, _over(part, rest, self.sizes)] if rest else whole


def _widened(shape: Shape) -> Shape:
    wider = "f16" if shape.dtype.startswith("f8") else {"bf16": "f32"}.get(shape.dtype)
    return dataclasses.replace(shape, dtype=wider) if wider else shape


def _apart(operation: Any, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The axes of a sum, together where they split one dimension of what is summed."""
    maker = passes.maker_of(operation.operands[0])
    if maker is None or maker.name not in ("stablehlo.reduce", "stablehlo.dot_general"):
        return [axes]
    held = passes.sharding_of(maker.operands[0])
    groups = [tuple(a for a in axes if a in held[d].axes) for d in _contracted(maker)]
    together = sorted(itertools.chain.from_iterable(groups)) == sorted(axes)
    return [group for group in groups if group] if together else [axes]


def _over(one: Exchange, axes: tuple[str, ...], sizes: Mapping[str, int]) -> Exchange:
    return dataclasses.replace(one, mesh_axes=axes, group_size=passes.count_of(axes, sizes))


def _contracted(maker: Any, operand: int = 0) -> Sequence[int]:
    """The dimensions of an operand that a sum or a product sums over."""
    if maker.name == "stablehlo.reduce":
        return [*maker.attributes["dimensions"]]
    found = passes.numbers_of(maker, "dot_dimension_numbers")
    return found.get(f"{'lr'[operand]}hs_contracting_dimensions", ())


# TPU

#: A product in parts takes as long as its parts are sent if it has so many operations for a byte,
#: by the figures of the chip; the compiler's own are a little lower.
_OVERLAPPED = 0.96


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
_SCATTERS_MORE = ("tpu7x",)


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
    return itemsize == 2 and size % (2 * _LANES) == _LANES and chip not in _SCATTERS_MORE


def _has_few_rows(part: Sequence[int], chip: str) -> bool:
    """Whether parts of columns are of a vector, or of few rows.

    Found by compiling for v4, v5e, v5p and v6e: of 2 to 4 rows, of one matrix and of several, and
    not of 5, 6, 8 and more. A tpu7x scatters these, and no vectors.
    """
    rows = [size for size in part[:-1] if size > 1]
    return not rows or (rows[-1] <= _FEW_ROWS and chip not in _SCATTERS_MORE)


def _is_narrow(part: Sequence[int], chip: str, *, turned: bool) -> bool:
    """Whether parts along the last dimension are fewer columns than lanes, and no fewer than rows.

    Found by compiling for v5e, v5p and v6e: of one matrix and of several, of two bytes and of four,
    parts of 48 to 96 columns with 32 rows, of 64 with 64 and of 96 with 96, and not of 48 with 64.
    In the other order they have to be more. A tpu7x has no such parts.
    """
    *_, rows, columns = (1, *part)
    is_more = columns > rows or (columns == rows and not turned)
    return columns < _LANES and is_more and chip not in _SCATTERS_MORE


def _has_broken_rows(part: Sequence[int], itemsize: int, chip: str) -> bool:
    """Whether parts along the dimension before the last are no whole tiles of memory.

    Found by compiling for v5e, v5p, v6e and tpu7x: of matrices parts of 1, 2, 3 and 4 rows, and not
    of 8 and more; of several matrices parts of 4, 8, 12 and 24 rows of two bytes, and of 4 and 12
    of four bytes, and not of 16 and 48, and of 8, 16, 24 and 48. A tpu7x has no such tiles.
    """
    *outer, rows, _ = part
    if math.prod(outer) == 1 or chip in _SCATTERS_MORE:
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
    return not slice_of or (chip not in _SCATTERS_MORE and (is_square or len(sides) > 2))


_PRODUCTS = "stablehlo.dot_general", "stablehlo.convolution", "stablehlo.custom_call"


class Tpu(_Partitioned):
    """XLA's TPU backend."""

    rules = (
        "for tpu: f32 is sent to products as bf16, and sums that are added are one; bytes by axis "
        "are mostly within 15%, those by kind may be far off"
    )

    @functools.cached_property
    def merged(self) -> set[Any]:
        """Sums that are a part of others."""
        return {op for one in self.functions.values() for op in _merged(one)}

    def sent(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        """Sums are merged, scattered, or moved out of loops; gathers and permutes narrower."""
        if operation in self.merged:
            return []
        found = self._sent(operation, asked)
        if all(one.kind != "all-reduce" for one in found):
            return found
        turn = self._turn(operation.results[0])
        return [
            dataclasses.replace(one, turn=turn) if one.kind == "all-reduce" else one
            for one in found
        ]

    def _turn(self, total: Any) -> int | None:
        """Of sums that no product depends on, 0 for those that others do, and 1 for the others."""
        if self.flow.reaches(total, _PRODUCTS):
            return None
        return int(not self.flow.reaches(total, ("sdy.all_reduce",)))

    def _sent(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        found = super().sent(operation, asked)
        if [*found] != [asked]:
            return [self._kept(operation, one) for one in found]
        if operation.name == "sdy.all_reduce" and _sliced(operation, self.flow):
            return self._scattered(operation, asked)
        if asked.kind == "all-reduce":
            return [dataclasses.replace(asked, after=self._added_up_by(operation))]
        if asked.kind in ("all-gather", "collective-permute") and self._for_products(operation):
            return [_with_shapes(asked, lambda shape: dataclasses.replace(shape, dtype="bf16"))]
        return [asked]

    def _kept(self, operation: Any, one: Exchange) -> Exchange:
        """A part of what stands for a gather: the devices keep their parts of its sum."""
        if one.kind != "all-reduce":
            return one
        user, _ = _only_use(operation)
        if user is not None and user.name == "stablehlo.scatter":
            return self._kept_of_table(operation, user, one)
        return _around(one) if self._goes_around(user, one.group_size) else one

    def _kept_of_table(self, gather: Any, maker: Any, one: Exchange) -> Exchange:
        """A sum of tables, of which the devices keep rows in the order of what they add."""
        part = self._local(maker.results[0])
        axes = [axis for axis in _axes_of_rows(maker) if axis in one.mesh_axes]
        is_turned = axes != [*passes.axes_in(passes.text_of(gather, "gathering_axes"))]
        n = one.group_size
        if is_turned or self._stays_whole(n, part, dict.fromkeys(_rows(maker), n)):
            return one
        return _kept_in_parts(one, (part,))

    def _goes_around(self, maker: Any, n: int) -> bool:
        added = n * _added(maker, self.sizes)
        if not added or not self._is_split_by_all(maker):
            return False
        return added > overlapped_from(self.chip, _itemsize(self._local(maker.results[0])))

    def _is_split_by_all(self, maker: Any) -> bool:
        """Whether no two devices do the same part of a product."""
        held = (one for operand in maker.operands for one in passes.sharding_of(operand))
        splits = {passes.whole_of(axis) for one in held for axis in one.axes}
        return all(size == 1 or axis in splits for axis, size in self.sizes.items())

    def _for_products(self, operation: Any) -> bool:
        """Whether all that is computed with a result is products of the default precision."""
        if passes.dims_of(operation.results[0].type)[1] != "f32":
            return False
        ends = [*self.flow.ends(operation.results[0])]
        return bool(ends) and all(_takes_bf16(user) for user, _ in ends)

    def _scattered(self, operation: Any, asked: Exchange) -> Sequence[Exchange]:
        """A sum of which each device keeps a part."""
        kept = _sliced(operation, self.flow)
        over = tuple(axis for axis in asked.mesh_axes if axis in kept)
        rest = tuple(axis for axis in asked.mesh_axes if axis not in kept)
        n = passes.count_of(over, self.sizes)
        if n < 2:
            return [asked]
        maker = passes.maker_of(operation.operands[0])
        if not rest and self._goes_around(maker, n):
            return [_around(asked)]
        user = _slice_after(operation, self.flow)
        slices = axes_by_dimension(user, "slicing_axes")
        parts = {d: passes.count_of(axes, self.sizes) for d, axes in slices.items()}
        if maker is None or self._stays_whole(n, self._local(user.results[0]), parts):
            return [asked]
        part = _with_shapes(asked, lambda shape: self._kept_part(operation, shape, over))
        first = _over(_kept_in_parts(asked, part.shapes.results), over, self.sizes)
        return [first, _over(part, rest, self.sizes)] if rest else [first]

    def _kept_part(self, operation: Any, whole: Shape, over: Sequence[str]) -> Shape:
        """What a device keeps of a sum over axes, as far as nothing is done before it is sliced."""
        user = _slice_after(operation, self.flow)
        if user.operands[0] != operation.results[0]:
            return _part(whole, passes.count_of(over, self.sizes))
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
        return next(iter(self.flow.loops(add.results[0])), None)


def _kept_in_parts(asked: Exchange, parts: tuple[Shape, ...]) -> Exchange:
    """A sum of which each device keeps parts of these shapes."""
    shapes = Shapes(asked.shapes.operands, parts)
    return dataclasses.replace(asked, kind="reduce-scatter", shapes=shapes)


def _around(asked: Exchange) -> Exchange:
    """A sum whose parts go around a ring of devices while they are made."""
    n = asked.group_size
    part = _with_shapes(asked, lambda shape: _part(shape, n))
    return dataclasses.replace(part, kind="collective-permute", times=n)


def _part(shape: Shape, n: int) -> Shape:
    """One of `n` parts of a shape, along its first dimension that has as many."""
    dims = [*shape.dims]
    d = next((d for d, size in enumerate(dims) if size % n == 0), 0)
    if dims:
        dims[d] = -(-dims[d] // n)
    return dataclasses.replace(shape, dims=tuple(dims))


def _itemsize(shape: Shape) -> float:
    return shape.nbytes / max(1, math.prod(shape.dims))


def _takes_bf16(user: Any) -> bool:
    if user.name == "stablehlo.convert":
        return passes.dims_of(user.results[0].type)[1] == "bf16"
    if user.name != "stablehlo.dot_general":
        return False
    return "HIGH" not in passes.text_of(user, "precision_config")


def _sliced(operation: Any, flow: Flow, but: Container[int] = ()) -> frozenset[str]:
    """The axes over which the only use of a sum slices it, in whatever function that is.

    Args:
        operation: the sum.
        flow: where values go.
        but: dimensions whose axes do not count.
    """
    user = _slice_after(operation, flow)
    found = axes_by_dimension(user, "slicing_axes") if user else {}
    return frozenset(axis for d, axes in found.items() if d not in but for axis in axes)


def _slice_after(operation: Any, flow: Flow) -> Any:
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


def _added(maker: Any, sizes: Mapping[str, int]) -> int:
    """How many products each device adds for an element of a product; 0 for what is none."""
    if maker is None or maker.name != "stablehlo.dot_general":
        return 0
    dims, _ = passes.dims_of(maker.operands[0].type)
    held = passes.sharding_of(maker.operands[0])
    return math.prod(dims[d] // passes.count_of(held[d].axes, sizes) for d in _contracted(maker))


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
