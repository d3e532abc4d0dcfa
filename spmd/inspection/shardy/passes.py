"""A module of StableHLO or Shardy: its operations, and what their attributes say.

The interface to MLIR is public (`jax.extend.mlir`); its attributes are read as text, whose form is
the same at both ends of the range of JAX.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import re
from typing import Any, NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from spmd.errors import Failure, ReportError, explain
from spmd.inspection.records.report import Source

_DTYPE = re.compile(r"(?:\d+|\?)x")


# Modules


def module_of(lowered: Any, *, subject: str) -> Any:
    """The MLIR module of a stage, which is compiled later and must stay as it is.

    One that was lowered for the partitioner before Shardy is refused.
    """
    module = lowered.compiler_ir()
    main = functions(module.operation)["main"]
    given = entries_of(main, "arg_attrs") + entries_of(main, "res_attrs")
    if not any("mhlo.sharding" in one for one in given):
        return module
    failure = Failure(
        what="was lowered without Shardy, whose passes say where a sharding comes from",
        given="jax_use_shardy_partitioner=False",
        expected="the default, True",
        fix="jax.config.update('jax_use_shardy_partitioner', True), and lower again",
        error=ReportError,
    )
    raise explain(subject, [failure])


# Operations

TOP_K = "chlo.top_k"
LOOP = "stablehlo.while"
MANUAL = "sdy.manual_computation"
PRODUCTS = "stablehlo.dot_general", "stablehlo.convolution"

HOLDERS = frozenset((LOOP, MANUAL, "stablehlo.case", "stablehlo.if"))
"""Operations whose regions are part of the program; others' say how to reduce or compare."""


def blocks(operation: Any) -> Iterator[Any]:
    """The blocks of all regions of an operation."""
    for region in operation.regions:
        yield from region.blocks


def block_of(operation: Any) -> Any:
    """The only block of an operation, or the first one."""
    return next(blocks(operation))


def operations_in(operation: Any, holders: Container[str] | None = None) -> Iterator[Any]:
    """All operations inside of one, in order; with `holders`, of others nothing that is inside."""
    for block in blocks(operation):
        for view in block.operations:
            operation = view.operation
            yield operation
            if operation.regions and (holders is None or operation.name in holders):
                yield from operations_in(operation, holders)


def all_in(operation: Any) -> list[Any]:
    """All operations inside of one, and itself, inner ones first: sooner than `operations_in`."""
    found: list[Any] = []

    def keep(one: Any) -> Any:
        found.append(one)
        return ir.WalkResult.ADVANCE

    operation.walk(keep)
    return found


def end_of(block: Any) -> Any:
    """The last operation of a block, whose operands the block gives."""
    return block.operations[len(block.operations) - 1].operation


def operation_of(view: Any) -> Any:
    """The operation of a view, of an owner or of a parent, which may be the operation itself."""
    return getattr(view, "operation", view)


def holders_of(operation: Any) -> Iterator[Any]:
    """The operations that one is inside of, such as loops, innermost first."""
    while (operation := operation.parent.operation).name != "func.func":
        yield operation


def loop_around(operation: Any) -> Any:
    """The innermost loop that one is inside of; None for none."""
    return next((one for one in holders_of(operation) if one.name == LOOP), None)


def is_manual(operation: Any) -> bool:
    """Whether it is inside of a `shard_map`."""
    return any(one.name == MANUAL for one in holders_of(operation))


def maker_of(value: Any, through: str = "") -> Any:
    """The operation that makes a value, past those of a name; None for what enters a block."""
    maker = operation_of(value.owner) if hasattr(value, "result_number") else None
    if maker is None or maker.name != through:
        return maker
    return maker_of(maker.operands[0], through)


def is_constant(value: Any) -> bool:
    """Whether all elements are one constant, which every device has."""
    maker = maker_of(value, through="stablehlo.broadcast_in_dim")
    return maker is not None and maker.name in ("sdy.constant", "stablehlo.constant")


def is_used_once(value: Any) -> bool:
    """Whether one operand alone is this value."""
    return len([*itertools.islice(value.uses, 2)]) == 1


def user_of(use: Any) -> tuple[Any, int]:
    """The operation of a use, and the number of its operand."""
    return operation_of(use.owner), use.operand_number


def name_of(function: Any) -> str:
    """The name of a function."""
    return text_of(operation_of(function), "sym_name").strip('"')


def functions(module: Any) -> dict[str, Any]:
    """The functions of a module by name."""
    found = (view.operation for view in block_of(module).operations)
    return {name_of(f): f for f in found if f.name == "func.func"}


def axis_sizes(module: Any) -> dict[str, int]:
    """Sizes of the axes of all meshes of a module, by the names that `apart` gives them."""
    names = apart(module)
    return {
        names.get((symbol, name), name): size
        for symbol, sizes in meshes(module).items()
        for name, size in sizes.items()
    }


def count_devices(module: Any) -> int:
    """How many devices a module is for."""
    counts = (text_of(module.operation, f"mhlo.num_{what}") for what in ("partitions", "replicas"))
    return math.prod(int(text.partition(" ")[0] or 1) for text in counts)


def meshes(module: Any) -> dict[str, dict[str, int]]:
    """Sizes of the axes of each mesh, by its symbol."""
    found = (view.operation for view in block_of(module).operations)
    return {
        name_of(mesh): {_unquoted(n): int(size) for n, size in _SIZE.findall(text_of(mesh, "mesh"))}
        for mesh in found
        if mesh.name == "sdy.mesh"
    }


def mesh_with(axes: Iterable[str], meshes: Mapping[str, Mapping[str, int]]) -> str | None:
    """The symbol of a mesh that has some axes; None where there are none, or no such mesh."""
    wanted = {whole_of(axis) for axis in axes}
    return next((name for name, sizes in meshes.items() if wanted and wanted <= {*sizes}), None)


Names = Mapping[tuple[str, str], str]
"""By symbol of a mesh and name of an axis, what to call it, where that is not its name."""


def apart(module: Any) -> Names:
    """Names for axes that have another size in a mesh before: ``data@mesh_0``.

    JAX lowers programs with such meshes, and axes do not propagate from one of them to another.
    """
    first: dict[str, int] = {}
    names = {}
    for symbol, sizes in meshes(module).items():
        for name, size in sizes.items():
            if first.setdefault(name, size) != size:
                names[symbol, name] = f"{name}@{symbol}"
    return names


def text_of(operation: Any, name: str) -> str:
    """An attribute as text; empty where there is none."""
    attributes = operation.attributes
    return str(attributes[name]) if name in attributes else ""


def entries_of(operation: Any, name: str) -> list[Any]:
    """The attributes of each argument or result of a function, as in ``arg_attrs``."""
    return [*operation.attributes.get(name, ())]


def entry_of(entries: Any, name: str) -> Any:
    """One attribute of an argument or result; None where there is none."""
    return entries[name] if name in entries else None  # noqa: SIM401  MLIR's have no `get`


_NUMBERS = re.compile(r"(\w+) = \[([\d, ]*)\]")


def numbers_of(operation: Any, name: str) -> dict[str, tuple[int, ...]]:
    """The lists of numbers in an attribute such as the dimensions of a product, by their names."""
    return numbers_in(text_of(operation, name))


def numbers_in(text: str) -> dict[str, tuple[int, ...]]:
    """The same, of such an attribute as text."""
    found = _NUMBERS.findall(text)
    return {key: tuple(map(int, numbers.split(", "))) if numbers else () for key, numbers in found}


_LABELS = re.compile(r"\[([^\]]*)\]")


def labels_of(convolution: Any) -> list[list[str]]:
    """The labels of the dimensions of a convolution's input, kernel and result, as `convolved`."""
    found = _LABELS.findall(text_of(convolution, "dimension_numbers"))
    return [text.split(", ") for text in found]


# Types


def shape_of(value: Any) -> tuple[int, ...]:
    """The dimensions of a value: none of a token, and 0 for one that is not known."""
    shape = tuple(getattr(value.type, "shape", ()))
    return shape if min(shape, default=0) >= 0 else tuple([max(0, size) for size in shape])


def dims_of(kind: Any) -> tuple[tuple[int, ...], str]:
    """The dimensions of a type and its element type, as MLIR writes it; none for a token."""
    return _dims_in(str(kind))


@functools.lru_cache(maxsize=1 << 12)
def _dims_in(text: str) -> tuple[tuple[int, ...], str]:
    if not text.startswith("tensor<"):
        return (), text
    text = text.removeprefix("tensor<").removesuffix(">")
    sizes = []
    while found := _DTYPE.match(text):
        sizes.append(int(found[0][:-1]) if found[0] != "?x" else 0)
        text = text[found.end() :]
    return tuple(sizes), text.partition(",")[0]


@functools.lru_cache(maxsize=1 << 8)
def hlo_dtype(dtype: str) -> str:
    """XLA's name of an element type that MLIR writes otherwise."""
    if dtype == "i1":
        return "pred"
    if dtype.endswith(".token"):
        return "token"
    if found := re.fullmatch(r"complex<f(\d+)>", dtype):
        return f"c{2 * int(found[1])}"
    if found := re.fullmatch(r"(u?)i(\d+)", dtype):
        return f"{'u' if found[1] else 's'}{found[2]}"
    return dtype.lower()


# Sharding rules

Factors = tuple[tuple[str, ...], ...]
"""For each dimension of a value, the factors of the operation that it consists of."""


class Rule(NamedTuple):
    """Which dimensions of an operation's operands and results are split alike.

    Attributes:
        factors: of each operand and result, by dimension.
        sizes: of the factors.
        stops: factors along which the operation passes no sharding on.
    """

    factors: tuple[Factors, ...]
    sizes: Mapping[str, int]
    stops: frozenset[str] = frozenset()


FACTORS = "ijklmnopqrstuvwxyz"
"""What factors are called in rules that are written here."""

_FACTOR = re.compile(r"[a-z](?:_\d+)?")
_FACTOR_SIZE = re.compile(r"([a-z](?:_\d+)?)=(\d+)")
_STOPS = re.compile(r"blocked_propagation=\{([^}]*)\}")


@functools.lru_cache(maxsize=1 << 12)
def parse_rule(text: str) -> Rule:
    """The factors of an operation, of the text of an ``sdy.op_sharding_rule``."""
    mapping, _, rest = text.partition("<")[2].partition(") {")
    factors = tuple(
        tuple(tuple(_FACTOR.findall(dim)) for dim in inner.split(", ")) if inner else ()
        for inner in re.findall(r"\[([^\]]*)\]", mapping)
    )
    sizes = {name: int(size) for name, size in _FACTOR_SIZE.findall(rest.partition("}")[0])}
    stops = frozenset(name for found in _STOPS.findall(rest) for name in _FACTOR.findall(found))
    return Rule(factors, sizes, stops)


def rule_text(
    operands: Iterable[Iterable[str]],
    results: Iterable[Iterable[str]],
    *,
    sizes: Mapping[str, int],
    kinds: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """A rule as Shardy writes it, from the factors of each dimension."""
    sides = (", ".join(f"[{', '.join(one)}]" for one in side) for side in (operands, results))
    said = ", ".join(f"{name}={size}" for name, size in sizes.items())
    more = (f"{kind}={{{', '.join(names)}}}" for kind, names in (kinds or {}).items() if names)
    return f"#sdy.op_sharding_rule<({')->('.join(sides)}) {' '.join([f'{{{said}}}', *more])}>"


def identity(count: int, shape: Sequence[int]) -> Rule:
    """A rule by which each dimension of all values is the same."""
    sizes = {f"d{i}": size for i, size in enumerate(shape)}
    return Rule((tuple((name,) for name in sizes),) * count, sizes)


# Shardings

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_SIZE = re.compile(rf"({_QUOTED})=(\d+)")
_AXIS = re.compile(rf"({_QUOTED})(:\(\d+\)\d+)?")
_LIST = re.compile(rf"\{{((?:{_QUOTED}|[^{{}}\"])*)\}}(p\d+)?")
_SHARDING = re.compile(rf"<@([^,]*), \[((?:{_QUOTED}|[^\]\"])*)\]")
_ESCAPED = re.compile(rb"\\(?:([0-9A-F]{2})|(.))")


def _unquoted(name: str) -> str:
    """A string of MLIR, in which two digits stand for a byte that is not printable ASCII."""
    if "\\" not in name:
        return name[1:-1]
    raw = _ESCAPED.sub(
        lambda one: bytes.fromhex(one[1].decode()) if one[1] else one[2], name[1:-1].encode()
    )
    return raw.decode("utf-8", "replace")


def quoted(name: str) -> str:
    """A name as MLIR writes it."""
    plain = name.replace("\\", "\\\\").encode()
    shown = (chr(b) if 32 <= b < 127 and b != 34 else f"\\{b:02X}" for b in plain)
    return f'"{"".join(shown)}"'


def axes_in(text: str) -> tuple[str, ...]:
    """The axes that a text names; a part of one as ``data:(1)2``."""
    return tuple(_unquoted(name) + part for name, part in _AXIS.findall(text))


@dataclasses.dataclass(frozen=True, slots=True)
class Dimension:
    """How one dimension is split: over which axes, and whether further ones may come."""

    axes: tuple[str, ...] = ()
    closed: bool = False
    priority: int | None = None


Dimensions = tuple[Dimension, ...]


@functools.lru_cache(maxsize=1 << 14)
def shardings_in(text: str) -> tuple[Dimensions, ...]:
    """Every sharding that an attribute holds, in order."""
    return tuple(
        tuple(
            Dimension(axes_in(inner), "?" not in _AXIS.sub("", inner), int(p[1:]) if p else None)
            for inner, p in _LIST.findall(dimensions)
        )
        for _, dimensions in _SHARDING.findall(text)
    )


def shardings_of(text: str, names: Names) -> tuple[Dimensions, ...]:
    """Every sharding that an attribute holds, with axes as `apart` calls them."""
    found = shardings_in(text)
    if not names:
        return found

    def renamed(one: Dimension, mesh: str) -> Dimension:
        wholes = [(axis, whole_of(axis)) for axis in one.axes]
        axes = (names.get((mesh, own), own) + axis.removeprefix(own) for axis, own in wholes)
        return dataclasses.replace(one, axes=tuple(axes))

    meshes = [symbol.strip('"') for symbol, _ in _SHARDING.findall(text)]
    return tuple(
        tuple(renamed(dimension, mesh) for dimension in dimensions)
        for mesh, dimensions in zip(meshes, found, strict=True)
    )


def mesh_in(text: str) -> str:
    """The symbol of the mesh of the first sharding in an attribute; empty where there is none."""
    found = _SHARDING.search(text)
    return found[1].strip('"') if found else ""


def written(axis: str, names: Names) -> str:
    """An axis, or a part of one, as the program calls it, whatever `apart` calls it."""
    whole = whole_of(axis)
    name = next((name for (_, name), own in names.items() if own == whole), whole)
    return name + axis.removeprefix(whole)


def open_sharding(rank: int) -> Dimensions:
    """What a value has that nothing was said about."""
    return (Dimension(),) * rank


_PART = re.compile(r":\((\d+)\)(\d+)$")


def whole_of(axis: str) -> str:
    """The axis that a part such as ``data:(1)2`` is one of; a whole one as it is."""
    return _PART.sub("", axis) if ":(" in axis else axis


def size_of(axis: str, sizes: Mapping[str, int]) -> int:
    """How many devices an axis, or a part of one, has."""
    part = _PART.search(axis) if axis not in sizes else None
    return int(part[2]) if part else sizes.get(axis, 1)


def overlap(axis: str, other: str) -> bool:
    """Whether two axes, or parts of one, are the same one or have devices in common ways.

    Parts such as ``data:(1)2`` and ``data:(2)2`` have none.
    """
    if whole_of(axis) != whole_of(other):
        return False
    parts = [_PART.search(one) for one in (axis, other)]
    if None in parts:
        return True
    (first, size), (second, own) = ((int(p[1]), int(p[2])) for p in parts if p)
    return first < second * own and second < first * size


def count_of(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """How many devices several axes have, or in how many parts they split a dimension."""
    return math.prod(size_of(axis, sizes) for axis in axes)


def sharding_text(entries: Iterable[Iterable[str]], mesh: str) -> str:
    """A sharding as Shardy writes it, all of whose dimensions are closed."""
    dimensions = ("{" + ", ".join(map(_axis_text, axes)) + "}" for axes in entries)
    return f"#sdy.sharding<@{mesh}, [{', '.join(dimensions)}]>"


def sharding_attribute(entries: Iterable[Iterable[str]], mesh: str) -> Any:
    """The same as an attribute."""
    return ir.Attribute.parse(sharding_text(entries, mesh))


def per_value(*shardings: str) -> str:
    """The shardings of an operation's results, as an attribute of the operation."""
    own = ", ".join(one.removeprefix("#sdy.sharding") for one in shardings)
    return f"#sdy.sharding_per_value<[{own}]>"


def _axis_text(axis: str) -> str:
    whole = whole_of(axis)
    return quoted(whole) + axis.removeprefix(whole)


def out_sharding(operation: Any) -> Dimensions:
    """The sharding that a collective of Shardy gives its result."""
    return _nth(text_of(operation, "out_sharding"), 0, operation.results[0])


_PLACING = ("sdy.sharding_constraint", "sdy.reshard")


def sharding_of(value: Any, default: Dimensions | None = None) -> Dimensions:
    """The sharding of an operand, as what makes it says; `default` where nothing can say it."""
    operation = maker_of(value)
    if operation is None:
        return _entering(value, default)
    if "out_sharding" in operation.attributes:
        return out_sharding(operation)
    name = "sharding" if operation.name in _PLACING else "sdy.sharding"
    return _nth(text_of(operation, name), value.result_number, value)


def made_at(operation: Any) -> tuple[tuple[str, ...], ...]:
    """The axes that split each dimension of the only result of an operation on each element."""
    found = _nth(text_of(operation, "sdy.sharding"), 0, operation.results[0])
    return tuple([dimension.axes for dimension in found])


def axes_of(value: Any) -> tuple[tuple[str, ...], ...]:
    """The axes that split each dimension of an operand, as what makes it says."""
    return tuple([dimension.axes for dimension in sharding_of(value)])


def _entering(value: Any, default: Dimensions | None) -> Dimensions:
    """The sharding of what enters a block."""
    operation, i = value.owner.owner.operation, value.arg_number
    if operation.name == "func.func":
        entries = entry_of(operation.attributes, "arg_attrs")
        own = entry_of(entries[i], "sdy.sharding") if entries is not None else None
        return _nth("" if own is None else str(own), 0, value)
    if operation.name == "stablehlo.while":
        return _nth(text_of(operation, "sdy.sharding"), i, value)
    return _nth("", 0, value) if default is None else default


def _nth(text: str, i: int, value: Any) -> Dimensions:
    found = shardings_in(text)
    if i < len(found) and found[i]:
        return found[i]
    # What one device has alone, such as a value of the host, is told without dimensions.
    return open_sharding(len(shape_of(value)))


def placed_after(result: Any, kind: Any, sharding: Any) -> Any:
    """What a kind of operation makes of a result, for all that used it before."""
    users = [*result.uses]
    with ir.InsertionPoint.after(result.owner):
        placed = kind(result, sharding).result
    for use in users:
        operation_of(use.owner).operands[use.operand_number] = placed
    return placed


def placed_for(operation: Any, value: Any, place: Iterable[Iterable[str]], mesh: str) -> Any:
    """A value in another place, for an operation."""
    with ir.InsertionPoint(operation):
        return sdy.ReshardOp(value, sharding_attribute(place, mesh)).result


def make_at(operation: Any, place: Iterable[Iterable[str]], mesh: str) -> None:
    """Has an operation make its result in a place; all that used it has it where it was."""
    result = operation.results[0]
    wanted = sharding_attribute(axes_of(result), mesh)
    text = per_value(sharding_text(place, mesh))
    operation.attributes["sdy.sharding"] = ir.Attribute.parse(text)
    placed_after(result, sdy.ReshardOp, wanted)


# Places


def frames_of(location: Any) -> tuple[Source, ...]:
    """The Python frames of an operation, innermost first."""
    return tuple(
        [
            Source(file=one.filename, line=one.start_line, column=one.start_col, function=function)
            for one, function in places_of(location)
        ]
    )


def places_of(location: Any) -> list[tuple[Any, str]]:
    """The places of code that an operation has, innermost first, each with its function."""
    found = []
    pending = [(location, "")]
    while pending:  # a loop: a program has hundreds of thousands of frames
        one, function = pending.pop()
        kind = type(one)
        if kind is ir.CallSiteLoc:
            pending += [(one.caller, ""), (one.callee, "")]
        elif kind is ir.NameLoc:
            pending.append((one.child_loc, one.name_str))
        elif kind is ir.FusedLoc:
            # Several operations in one: the first has a line of its own.
            found += next(filter(None, map(places_of, one.locations)), [])
        elif kind is ir.FileLineColLoc:
            found.append((one, function))
    return found


def op_name_of(location: Any) -> str:
    """The name stack that JAX gave an operation, or the name of an argument."""
    if isinstance(location, ir.NameLoc):
        return location.name_str
    if isinstance(location, ir.FusedLoc):
        return next(filter(None, map(op_name_of, location.locations)), "")
    return ""


def joined(outer: str, inner: str) -> str:
    """A name stack; functions that are lowered once have only the end of theirs."""
    first = outer.partition("/")[0]
    if not outer or not inner or inner.startswith(first):
        return inner or outer
    return f"{outer}/{inner}"
