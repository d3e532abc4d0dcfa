"""What the instructions of a program compute, and what they move through main memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import functools
import math
import re

import numpy as np

from spmd.inspection._hlo import Computation, Instruction, Module, parse_shapes, tuple_elements
from spmd.inspection._records import Cost, Shape
from spmd.inspection._walk import Visit


def cost_of(module: Module, visited: Mapping[str, Visit]) -> Cost:
    """Sum what one device computes and moves in one call of a program.

    Both branches of a conditional count, and what runs an unknown number of times does not.

    Args:
        module: the program.
        visited: how its computations run.

    Returns:
        The cost, with the number of loops and calls that are not in it.
    """
    traffic = _Traffic(module)
    callers = (v.caller for v in visited.values() if v.executions is None)
    unknown = {one.name for one in callers if one and one.opcode == "while"}
    total = Cost(flops=0, hbm_bytes=0, unknown_loops=len(unknown))
    for name, visit in visited.items():
        computation = module.computations[name]
        times = visit.executions or 0
        total += Cost(
            flops=times * sum(flops_of(computation)),
            hbm_bytes=0 if visit.in_fusion else times * sum(traffic.of(computation)),
            opaque_calls=sum(map(_is_opaque, computation.instructions)),
        )
    return total


# Computing


def flops_of(computation: Computation) -> Iterator[int]:
    """FLOPs of each matrix product and convolution, two for a multiplication with its addition."""
    types: dict[str, str] = {}
    for one in computation.instructions:
        rule = _FLOPS.get(one.opcode)
        if rule:
            types = types or {other.name: other.type for other in computation.instructions}
            yield rule(one, _operands(one, types))


def _operands(one: Instruction, types: Mapping[str, str]) -> list[Shape]:
    inline = parse_shapes(one.operands)
    named = (parse_shapes(types.get(name, "")) for name in one.operand_names)
    return [*inline] or [shapes[0] for shapes in named if shapes]


def _numbers(one: Instruction, attribute: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", one.attribute(attribute) or "")]


def _dot_flops(one: Instruction, operands: list[Shape]) -> int:
    contracted = _numbers(one, "lhs_contracting_dims")
    return _product_flops(one, operands, contracted)


def _product_flops(one: Instruction, operands: list[Shape], contracted: list[int]) -> int:
    result = parse_shapes(one.type)[0]
    return 2 * math.prod(result.dims) * math.prod(operands[0].dims[d] for d in contracted)


def _convolution_flops(one: Instruction, operands: list[Shape]) -> int:
    """Each output adds up input features times those kernel positions that meet the input.

    TPU writes matrix products with batch dimensions as convolutions whose windows lie mostly
    outside of the input, so the positions that are inside have to be counted.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", one.attribute("dim_labels") or "")
    if not labels:
        return 0
    result = parse_shapes(one.type)[0]
    sizes = [
        dict(zip(names, shape.dims, strict=True))
        for names, shape in zip(labels.groups(), (*operands, result), strict=True)
    ]
    window = _window(one.attribute("window") or "")
    inputs, kernel, outputs = sizes
    met = math.prod(
        _met(inputs[d], kernel[d], outputs[d], *(w[int(d)] for w in window))
        for d in outputs
        if d.isdigit()
    )
    return 2 * outputs["b"] * outputs["f"] * kernel["i"] * met


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
    """Pairs of an output and a kernel position that meet an element of the input."""
    steps = np.arange(out)[:, None] * stride + np.arange(kernel)[None] * kernel_spread - low
    inside = (steps >= 0) & (steps < (size - 1) * spread + 1) & (steps % spread == 0)
    return int(inside.sum())


# Matrix products that a library computes: GPU's cuBLAS and CPU's oneDNN.
_PRODUCT_CALL = re.compile(r"gemm|matmul")
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
# These stand for places in memory and for parts of other operations; they compute nothing.
_EMPTY_CALLS = re.compile(
    r"Sharding|SPMD|AllocateBuffer|AsyncCollective|AssumeGatherIndicesInBound|ConcatBitcast"
    r"|SliceId|annotate_device_placement|MoveTo|LayoutConstraint|xla\.sdy"
)


def _call_flops(one: Instruction, operands: list[Shape]) -> int:
    contracted = _library_product(one)
    return 0 if contracted is None else _product_flops(one, operands, contracted)


def _library_product(one: Instruction) -> list[int] | None:
    if not _PRODUCT_CALL.search(one.attribute("custom_call_target") or ""):
        return None
    found = _CONTRACTED.search(one.attributes)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else None


def _is_opaque(one: Instruction) -> bool:
    if one.opcode != "custom-call" or _library_product(one) is not None:
        return False
    return not _EMPTY_CALLS.search(one.attribute("custom_call_target") or "")


_FLOPS: dict[str, Callable[[Instruction, list[Shape]], int]] = {
    "dot": _dot_flops,
    "convolution": _convolution_flops,
    "custom-call": _call_flops,
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
        for shape in parse_shapes(text)
    )


# Names for places, and what is counted inside or was counted at its start.
_FREE = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "opt-barrier", "optimization-barrier",
    "domain", "async-update",
)  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_RENAMES = ("bitcast", "reshape", "copy")


class _Traffic:
    """Bytes that instructions read from and write to main memory."""

    def __init__(self, module: Module):
        self.module = module
        self.fusions: dict[str, int] = {}

    def of(self, computation: Computation) -> Iterator[int]:
        types = {one.name: one.type for one in computation.instructions}
        for one in computation.instructions:
            if one.opcode not in _FREE and not one.opcode.endswith("-done"):
                yield self._instruction(one, types)

    def _instruction(self, one: Instruction, types: Mapping[str, str]) -> int:
        sizes = [hbm_size(types.get(name, "")) for name in one.operand_names]
        match one.opcode:
            case "fusion" | "async-start":
                return sum(self._callee(name) for name in one.callees().get("calls", ()))
            case "dynamic-slice" | "slice" | "gather":
                return 2 * hbm_size(one.type) + sum(sizes[1:])
            case "dynamic-update-slice":
                return 2 * sizes[1] if len(sizes) > 1 else 0
            case "scatter":  # of operands, indices and updates: reads what it adds to
                count = len(sizes) // 2
                return sum(sizes[count:]) + 2 * sum(sizes[count + 1 :])
            case "custom-call" if _EMPTY_CALLS.search(one.attributes):
                return 0
        if one.opcode.endswith("-start"):
            result = tuple_elements(one.type)
            return sum(sizes) + hbm_size(_destination(one.opcode, result))
        return sum(sizes) + hbm_size(one.type)

    def _callee(self, name: str) -> int:
        """Bytes that a fused computation moves: what of its parameters it uses, and its result."""
        if name not in self.fusions:
            computation = self.module.computations.get(name)
            self.fusions[name] = _Fused(self, computation).total() if computation else 0
        return self.fusions[name]


def _destination(opcode: str, result: tuple[str, ...]) -> str:
    # Starts give (source, destination, ...), copies (destination, source, ...).
    return result[1 if len(result) > 1 and opcode != "copy-start" else 0]


class _Fused:
    """The inside of a fusion: only its parameters and its result touch memory."""

    def __init__(self, traffic: _Traffic, computation: Computation):
        self.traffic = traffic
        self.instructions = {one.name: one for one in computation.instructions}
        self.root = computation.root
        self.users: dict[str, list[Instruction]] = {}
        for one in computation.instructions:
            for name in dict.fromkeys(one.operand_names):
                self.users.setdefault(name, []).append(one)

    def total(self) -> int:
        read = sum(
            self.read(one.name, hbm_size(one.type))
            for one in self.instructions.values()
            if one.opcode == "parameter"
        )
        return read + (self.written(self.root.name) if self.root else 0)

    def read(self, name: str, size: int) -> int:
        """Bytes of a value that are used, at most its size."""
        return min(size, sum(self._used(name, user, size) for user in self.users.get(name, ())))

    def _used(self, name: str, user: Instruction, size: int) -> int:
        first = user.operand_names[0] == name
        if user.opcode in _SLICES and first:
            return min(size, _logical_size(user.type))
        if user.opcode == "dynamic-update-slice" and first:
            return 0  # it is written in place
        if user.opcode == "tuple":
            return 0  # it is passed on
        if user.opcode in _RENAMES and user is not self.root:
            return self.read(user.name, size)
        if user.opcode == "fusion":
            return self._used_in(name, user, size)
        return size

    def _used_in(self, name: str, user: Instruction, size: int) -> int:
        """What a fusion inside the fusion uses of it."""
        callee = self.traffic.module.computations.get(user.callees().get("calls", ("",))[0])
        if callee is None:
            return size
        inner = _Fused(self.traffic, callee)
        indices = [i for i, operand in enumerate(user.operand_names) if operand == name]
        return sum(
            inner.read(one.name, size)
            for one in callee.instructions
            if one.opcode == "parameter" and int(one.operands) in indices
        )

    def written(self, name: str) -> int:
        """Bytes of the result that are new."""
        one = self.instructions[name]
        match one.opcode:
            case "tuple":
                return sum(self.written(n) for n in one.operand_names if n in self.instructions)
            case "parameter":
                return 0
            case "bitcast":
                inner = self.instructions.get(one.operand_names[0])
                if inner and inner.opcode == "dynamic-update-slice":
                    return self.written(inner.name)
            case "dynamic-update-slice":
                update = self.instructions.get(one.operand_names[1])
                return min(hbm_size(one.type), _logical_size(update.type)) if update else 0
        return hbm_size(one.type)


def _logical_size(type_text: str) -> int:
    # Inside a fusion nothing has a place yet: what is sliced from main memory is read from there.
    return sum(shape.nbytes for shape in parse_shapes(type_text))
