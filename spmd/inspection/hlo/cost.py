"""What the instructions of a program compute, and what they move through main memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import math
import re

from spmd.inspection.hlo import text as hlo
from spmd.inspection.hlo.calls import IN_STEPS, STARTS, WAITS, Visit
from spmd.inspection.records.report import KINDS, Cost, Shape
from spmd.inspection.timing.chips import passes_of

_PRECISION = re.compile(r"\boperand_precision=\{(\w+),(\w+)\}")
_PRIMITIVES = re.compile(r"\balgorithm=dot_bf16_bf16_f32_x(\d)\b")


def cost_of(module: hlo.Module, visited: Mapping[str, Visit]) -> Cost:
    """Sum what one device computes and moves in one call, with the loops and calls not in it.

    Both branches of a conditional count, and what runs an unknown number of times does not.
    """
    traffic = Traffic(module)
    unknown = frozenset[str]().union(*(visit.unknown_loops for visit in visited.values()))
    flops = moved = opaque = 0
    for name, visit in visited.items():
        computation = module.computations[name]
        times = visit.executions or 0
        flops += times * sum(flops for _, flops in products_of(computation))
        moved += 0 if visit.in_fusion else times * sum(traffic.of(computation))
        opaque += _opaque_calls(computation)
    return Cost(flops=flops, hbm_bytes=moved, unknown_loops=len(unknown), opaque_calls=opaque)


# Computing


def products_of(computation: hlo.Computation) -> Iterator[tuple[hlo.Instruction, int]]:
    """What multiplies matrices or convolves in a computation, each with its FLOPs.

    A multiplication with its addition counts as two.
    """
    if computation.opcodes.isdisjoint(_FLOPS):
        return
    for one in computation.instructions:
        rule = _FLOPS.get(one.opcode)
        if rule and (flops := rule(one, _operands(one, computation))):
            yield one, flops


def element_types(one: hlo.Instruction, computation: hlo.Computation) -> set[str]:
    """Of the two operands of a product."""
    return {shape.dtype for shape in _operands(one, computation)[:2]}


def bf16_passes(one: hlo.Instruction, computation: hlo.Computation) -> int:
    """Products of bf16 that a TPU makes of one, as its algorithm or its precision says."""
    attributes, *_ = one.attributes.partition("metadata={")
    if found := _PRIMITIVES.search(attributes):
        return int(found[1])
    asked = _PRECISION.search(attributes)
    types = [shape.dtype for shape in _operands(one, computation)[:2]]
    return passes_of(types, asked.groups()) if asked and len(types) == 2 else 1


def _operands(one: hlo.Instruction, computation: hlo.Computation) -> Sequence[Shape]:
    types = computation.types
    named = (hlo.parse_shapes(types.get(name, "")) for name in one.operand_names)
    return hlo.parse_shapes(one.operands) or [shapes[0] for shapes in named if shapes]


def _product_flops(
    one: hlo.Instruction, operands: Sequence[Shape], contracted: Iterable[int] | None
) -> int:
    if contracted is None:
        return 0
    result = hlo.parse_shapes(hlo.result_type(one))[0]
    sums = math.prod(result.dims) * math.prod(operands[0].dims[d] for d in contracted)
    return _flops_per_term(result) * sums


def _flops_per_term(result: Shape) -> int:
    """Of a multiplication with its addition; one of complex numbers is four of real ones."""
    return 8 if result.dtype.startswith("c") else 2


def _convolution_flops(one: hlo.Instruction, operands: Sequence[Shape]) -> int:
    labels = re.match(r"(\w+)_(\w+)->(\w+)", one.attribute("dim_labels") or "")
    if not labels:
        return 0
    shapes = (*operands, hlo.parse_shapes(one.type)[0])
    return convolved(labels.groups(), shapes, _window(one.attribute("window") or ""))


def convolved(
    labels: Iterable[Iterable[str]], shapes: Sequence[Shape], window: Sequence[Sequence[int]]
) -> int:
    """FLOPs of a convolution.

    Each output adds up input features times those kernel positions that meet the input. TPU writes
    matrix products with batch dimensions as convolutions whose windows lie mostly outside of the
    input, so the positions that are inside have to be counted.

    Args:
        labels: of the dimensions of input, kernel and result: ``b``, ``f``, ``i``, ``o``, or the
            number of a spatial one.
        shapes: of the same.
        window: strides, low paddings and dilations of input and kernel, by spatial dimension.
    """
    sizes = [
        dict(zip(names, shape.dims, strict=True))
        for names, shape in zip(labels, shapes, strict=True)
    ]
    inputs, kernel, outputs = sizes
    met = math.prod(
        _met(inputs[d], kernel[d], outputs[d], *(w[int(d)] for w in window))
        for d in outputs
        if d.isdigit()
    )
    return _flops_per_term(shapes[-1]) * outputs["b"] * outputs["f"] * kernel["i"] * met


def _window(text: str) -> tuple[list[int], ...]:
    """Strides, low paddings and dilations of input and kernel, by spatial dimension."""
    fields = dict(field.split("=") for field in text.strip("{}").split() if "=" in field)
    rank = len(fields.get("size", "").split("x"))

    def read(name: str, default: str) -> list[int]:
        parts = fields.get(name, "x".join([default] * rank)).split("x")
        return [int(part.split("_")[0]) for part in parts]

    return read("stride", "1"), read("pad", "0"), read("lhs_dilate", "1"), read("rhs_dilate", "1")


@functools.lru_cache(maxsize=1024)
def _met(
    size: int, kernel: int, out: int, stride: int, low: int, spread: int, kernel_spread: int
) -> int:
    """Pairs of an output and a kernel position that meet an element of the input.

    Output o and position k lie at o * stride + k * kernel_spread - low of the input, whose elements
    are `spread` apart. A window may be as large as a batch, so outputs are counted, not listed.
    """
    divisor = math.gcd(stride, spread)
    period = spread // divisor
    inverse = pow(stride // divisor, -1, period)
    count = 0
    for start in range(-low, kernel * kernel_spread - low, kernel_spread):
        if start % divisor == 0:
            # Outputs first, first + period, ... lie on elements; some of them inside.
            first = -(start // divisor) * inverse % period
            lowest = max(0, -(start // stride))
            end = min(out, ((size - 1) * spread - start) // stride + 1)
            count += max(0, (end - 1 - first) // period - (lowest - 1 - first) // period)
    return count


# Matrix products that a library computes: GPU's cuBLAS and CPU's oneDNN.
_PRODUCT_CALL = re.compile(r"gemm|matmul")
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
# These stand for places in memory and for parts of other operations; they compute nothing.
_EMPTY_CALLS = re.compile(
    r"Sharding|SPMD|AllocateBuffer|AsyncCollective|AssumeGatherIndicesInBound|ConcatBitcast"
    r"|PrepareAsyncCall|SliceId|annotate_device_placement|MoveTo|LayoutConstraint|xla\.sdy"
)
# TPU splits numbers of 64 bits into two of 32, and joins them: they are moved, not computed with.
_HALVES = ("X64SplitLow", "X64SplitHigh")
_MOVING_CALLS = (*_HALVES, "X64Combine")
_CALLS = ("custom-call", "custom-call-start")


def _library_product(one: hlo.Instruction) -> tuple[int, ...] | None:
    """The dimensions that a library's matrix product sums over; None for another call."""
    if not _PRODUCT_CALL.search(_target(one)):
        return None
    found = _CONTRACTED.search(one.attributes)
    return hlo.integers(found[1]) if found else None


def is_opaque(one: hlo.Instruction) -> bool:
    """Whether nobody but its author knows what a custom call computes."""
    if one.opcode not in _CALLS or _library_product(one) is not None:
        return False
    return not _is_empty_call(one) and _target(one) not in _MOVING_CALLS


def _opaque_calls(computation: hlo.Computation) -> int:
    if computation.opcodes.isdisjoint(_CALLS):
        return 0
    return sum(map(is_opaque, computation.instructions))


def _is_empty_call(one: hlo.Instruction) -> bool:
    return bool(_EMPTY_CALLS.search(_target(one)))


def _is_half(one: hlo.Instruction) -> bool:
    return one.opcode in _CALLS and _target(one) in _HALVES


def _target(one: hlo.Instruction) -> str:
    """What a custom call calls."""
    return (one.attribute("custom_call_target") or "").strip('"')


_FLOPS: dict[str, Callable[[hlo.Instruction, Sequence[Shape]], int]] = {
    "dot": lambda one, shapes: _product_flops(
        one, shapes, hlo.integers(one.attribute("lhs_contracting_dims"))
    ),
    "convolution": _convolution_flops,
    **dict.fromkeys(_CALLS, lambda one, shapes: _product_flops(one, shapes, _library_product(one))),
}


# Moving

_TYPE = re.compile(r"\b[a-z]\w*\[[\d,<=? ]*\](?:\{[^}]*\})?")
_OTHER_SPACE = re.compile(r"S\([1-9]\d*\)")


@functools.lru_cache(maxsize=65536)
def hbm_size(type_text: str) -> int:
    """Bytes of a type that lie in main memory, tuples summed.

    A layout such as ``{1,0:T(8,128)S(1)}`` says that an array lies in another memory: on TPU, 1 is
    the vector memory on the chip.
    """
    return sum(
        shape.nbytes
        for text in _TYPE.findall(type_text)
        if not _OTHER_SPACE.search(text)
        for shape in hlo.parse_shapes(text)
    )


@functools.lru_cache(maxsize=65536)
def _logical_size(type_text: str) -> int:
    # Inside a fusion nothing has a place yet: what is sliced from main memory is read from there.
    return sum(shape.nbytes for shape in hlo.parse_shapes(type_text))


# Names for places, and what is counted inside or was counted at its start.
FREE = frozenset((
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional",
    "call", "while-start", "conditional-start", "call-start", "async-start", "after-all",
    "add-dependency", "partition-id", "replica-id", "opt-barrier", "domain",
))  # fmt: skip
_LATER = ("-done", "-update")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
_RENAMES = ("bitcast", "reshape")
_IN_PLACE = frozenset(("parameter", *_UPDATES, *_RENAMES))
_TURNS = (*_RENAMES, "copy", "transpose", "convert")
_PARTIAL = frozenset((*_SLICES, *_UPDATES, "fusion"))
_DEEPEST = 50


class Traffic:
    """Bytes that instructions read from and write to main memory."""

    def __init__(self, module: hlo.Module):
        self.module = module
        self.fusions: dict[str, _Fused | None] = {}
        self.depth = 0

    def of(self, computation: hlo.Computation) -> Iterator[int]:
        """By instruction that reads or writes main memory."""
        for one in computation.instructions:
            if one.opcode not in FREE and not one.opcode.endswith(_LATER):
                yield self.instruction(one, computation.types)

    def instruction(self, one: hlo.Instruction, types: Mapping[str, str]) -> int:
        """Of one instruction, whose operands have these types by name."""
        if hlo.base_opcode(one) == "fusion":
            names = one.callees().get("calls", ())
            return sum(fused.total() for name in names if (fused := self.fused(name)))
        names = one.operand_names
        operands = [types.get(name, "") for name in names]
        result = hlo.result_type(one)
        match hlo.base_opcode(one):
            case "custom-call" if _is_empty_call(one):
                return 0
            case kind if operands and (kind in _SLICES or _is_half(one)):
                read = min(hbm_size(operands[0]), _logical_size(result))
                return read + sum(map(hbm_size, operands[1:])) + hbm_size(result)
            case "dynamic-update-slice" if len(operands) > 1:
                written = min(hbm_size(result), _logical_size(operands[1]))
                return written + sum(map(hbm_size, operands[1:]))
            case "scatter":  # of operands, indices and updates: reads what it adds to
                count = len(operands) // 2
                updates = sum(map(_logical_size, operands[count + 1 :]))
                return 2 * min(hbm_size(result), updates) + sum(map(hbm_size, operands[count:]))
            case "send":  # gives its operand back
                result = ""
        read = dict(zip(names, map(hbm_size, operands), strict=True))
        return sum(read.values()) + hbm_size(result)

    def fused(self, name: str) -> _Fused | None:
        """The inside of a fusion; None where the text has none, or one that is too deep."""
        if name not in self.fusions:
            self.fusions[name] = None
            computation = self.module.computations.get(name)
            if computation and self.depth < _DEEPEST:
                self.depth += 1
                self.fusions[name] = _Fused(self, computation)
                self.depth -= 1
        return self.fusions[name]


class _Fused:
    """The inside of a fusion: only its parameters and its result touch memory.

    `used` has the bytes that are needed of a value; all of one that is not in it. `begun` are the
    collectives that another fusion starts: it has counted what they read and write.
    """

    def __init__(self, traffic: Traffic, computation: hlo.Computation):
        self.used: dict[str, int] = {}
        self.computation = computation
        self.root = computation.root
        self.inner: dict[str, _Fused | None] = {}
        self.begun = _begun(computation)
        # Most fusions use all that they get.
        if (
            not self.begun
            and computation.opcodes.isdisjoint(_PARTIAL)
            and (self.root is None or self.root.opcode != "tuple")
        ):
            return
        self.inner = {
            one.name: traffic.fused(one.callees().get("calls", ("",))[0])
            for one in computation.instructions
            if one.opcode == "fusion"
        }
        self.in_place = {one.name for output, _ in self._outputs() for one in self._updates(output)}
        self.users: dict[str, list[hlo.Instruction]] = {}
        for one in computation.instructions:
            for name in dict.fromkeys(one.operand_names):
                self.users.setdefault(name, []).append(one)
        # Users stand behind what they use.
        for one in reversed(computation.instructions):
            if one.opcode in ("parameter", *_UPDATES) or self._turns(one):
                size = _logical_size(one.type)
                uses = (self._used_by(one, u, size) for u in self.users.get(one.name, ()))
                self.used[one.name] = min(size, sum(uses))

    @functools.cached_property
    def instructions(self) -> dict[str, hlo.Instruction]:
        return {one.name: one for one in self.computation.instructions}

    def total(self) -> int:
        return sum(
            min(hbm_size(one.type), self.used.get(one.name, hbm_size(one.type)))
            for one in self.computation.instructions
            if one.opcode == "parameter"
        ) + sum(self._written(one, text) for one, text in self._outputs())

    def parameter_use(self, index: int) -> int | None:
        """Bytes that are used of a parameter; None for all."""
        found = (
            self.used.get(one.name)
            for one in self.computation.instructions
            if one.opcode == "parameter" and one.operands == str(index)
        )
        return next(found, None)

    def _used_by(self, one: hlo.Instruction, user: hlo.Instruction, size: int) -> int:
        """Bytes of a value that one of its users needs."""
        if user.opcode == "fusion" and not self._turns(user):
            return self._used_in_fusion(one, user, size)
        if user.opcode == "tuple" and user is self.root:
            return 0  # it is passed on
        if user.name in self.begun:
            return 0
        if one.name in user.operand_names[1:]:
            return size
        if user.opcode in _SLICES:
            return _logical_size(user.type)
        if user.opcode in _UPDATES:
            return self._used_by_update(user, size)
        if self._turns(user) and user is not self.root:
            # Only those elements are turned or converted that are used then.
            return self.used.get(user.name, size) * size // max(1, _logical_size(user.type))
        return size

    def _turns(self, one: hlo.Instruction) -> bool:
        """Whether a value is its operand, turned or converted; also by a fusion of nothing else."""
        fused = self.inner.get(one.name)
        inside = fused is not None and fused.computation.opcodes <= {"parameter", *_TURNS}
        return one.opcode in _TURNS or inside

    def _renames(self, one: hlo.Instruction) -> bool:
        """Whether a value is its operand; a tpu7x has fusions that only say how it is tiled."""
        return one.opcode in _RENAMES or (
            self._turns(one) and one.attribute("output_to_operand_aliasing") is not None
        )

    def _used_by_update(self, user: hlo.Instruction, size: int) -> int:
        if user.name not in self.in_place:
            return self.used.get(user.name, size) if user is not self.root else size
        # A slice is overwritten; what a scatter adds to is read.
        return self._new(user) if user.opcode == "scatter" else 0

    def _used_in_fusion(self, one: hlo.Instruction, user: hlo.Instruction, size: int) -> int:
        fused = self.inner[user.name]
        places = [i for i, name in enumerate(user.operand_names) if name == one.name]
        uses = [fused.parameter_use(i) if fused else None for i in places]
        return sum(size if use is None else use for use in uses)

    def _outputs(self) -> list[tuple[hlo.Instruction, str]]:
        """What makes each element of the result, with the type that says where it lies."""
        if self.root is None:
            return []
        if _target(self.root) == STARTS:
            operand, *others = hlo.tuple_elements(self.root.type)
            return [(self.root, others[0] if others else operand)]
        if self.root.opcode != "tuple":
            return [(self.root, self.root.type)]
        elements = zip(self.root.operand_names, hlo.tuple_elements(self.root.type), strict=False)
        return [(self.instructions[n], text) for n, text in elements if n in self.instructions]

    def _updates(self, one: hlo.Instruction) -> list[hlo.Instruction]:
        """The updates that make a value of a parameter, in its place; none for one that is new."""
        if one.opcode not in _IN_PLACE and not self._renames(one):
            return []
        found = []
        for _ in self.instructions:
            if one.opcode == "parameter":
                return found
            is_scatter = one.opcode == "scatter" and len(one.operand_names) == 3
            if one.opcode == "dynamic-update-slice" or is_scatter:
                found.append(one)
            elif not self._renames(one):
                break
            operand = one.operand_names[:1]
            if not operand or operand[0] not in self.instructions:
                break
            one = self.instructions[operand[0]]
        return []

    def _written(self, one: hlo.Instruction, text: str) -> int:
        """Bytes of an element of the result that are new."""
        if one.opcode == "parameter" or one.name in self.begun:
            return 0
        updates = self._updates(one)
        return min(hbm_size(text), sum(map(self._new, updates))) if updates else hbm_size(text)

    def _new(self, update: hlo.Instruction) -> int:
        name = update.operand_names[2 if update.opcode == "scatter" else 1]
        return _logical_size(self.instructions[name].type) if name in self.instructions else 0


def _begun(computation: hlo.Computation) -> frozenset[str]:
    """The steps in a fusion of a collective that another one starts, and the call that waits."""
    if computation.opcodes.isdisjoint(KINDS):
        return frozenset()
    targets = {one.name: _target(one) for one in computation.instructions if one.opcode in _CALLS}
    if STARTS in targets.values():
        return frozenset()
    steps = (one.name for one in computation.instructions if IN_STEPS in one.attributes)
    return frozenset((*steps, *(name for name, target in targets.items() if target == WAITS)))
