"""What Shardy's propagation did, as plain data: values, the operations between them, its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Any

from jax.extend.mlir import ir

from spmd.inspection.records.report import Source
from spmd.inspection.shardy import passes as shardy_passes
from spmd.inspection.shardy.passes import Dimensions
from spmd.inspection.shardy.rules import Factors, Rule, identity, nothing, parse_rule

_EDGES = "debug-propagation-edge-sharding=true"
_PASSES = (
    "sdy-import-pipeline",
    # Without it nothing is said about the inside of called functions.
    "sdy-import-func-calls",
    f"sdy-user-priority-propagate{{debug-sharding-origins=true {_EDGES}}}",
    # Again, since the first one is over too early (`_shardy`, `_propagating_twice`). The numbers of
    # steps go on. Asked for origins, it would say of each that it cannot be found.
    f"sdy-user-priority-propagate{{{_EDGES}}}",
    "func.func(sdy-populate-op-sharding-rules)",
)
#: Operations whose regions are part of the program; those of others say how to reduce or compare.
_HOLDERS = ("stablehlo.while", "stablehlo.case", "stablehlo.if", "sdy.named_computation")
_MANUAL = "sdy.manual_computation"
_EDGE = "sdy.data_flow_edge"
_CONSTRAINT = "sdy.sharding_constraint"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A sharding that the user asked for, at a value.

    Args:
        kind: ``argument``, ``output``, ``constraint`` or ``shard_map``.
        name: the path of an argument or output; empty for the others.
        frames: of the Python code that asked, innermost first; none for arguments and outputs.
        dimensions: what was asked for.
    """

    kind: str
    name: str
    frames: tuple[Source, ...]
    dimensions: Dimensions


@dataclasses.dataclass(slots=True, kw_only=True)
class Value:
    """One value of the program with its sharding after propagation.

    Args:
        kind: ``argument``, ``output`` or ``result``.
        name: the path of an argument or output; for a result, the operation that makes it.
        shape: sizes of the dimensions, of the whole array.
        dtype: XLA's name of the element type.
        dimensions: how each is split.
        axes: the mesh axes of each dimension.
        frames: of what makes it, innermost first.
        mark: the user's annotation of this value, if any.
        origins: by axis, what the pass calls the annotation that the axis came from; ``self`` for
            the value's own.
        links: indices of the operations that it takes part in.
        plain: False where it stands for control flow, and not for an operation of the user's.
        local: True inside of a `shard_map`, where the shape is that of one device's part.
        op_name: the name stack of what makes it.
        operation: of MLIR, that makes it; None for arguments and outputs.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    dimensions: Dimensions
    axes: tuple[tuple[str, ...], ...] = dataclasses.field(init=False, repr=False)
    frames: tuple[Source, ...] = ()
    mark: Mark | None = None
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    links: list[int] = dataclasses.field(default_factory=list)
    plain: bool = True
    local: bool = False
    op_name: str = ""
    operation: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.axes = tuple(dimension.axes for dimension in self.dimensions)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One axis that went from one value of an operation to others, in one step of the pass."""

    step: int
    axis: str
    source: int
    targets: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An operation, or a way of control flow, that relates dimensions of values.

    Args:
        name: of the operation.
        frames: of its Python code, innermost first.
        values: indices of its operands, then of its results.
        operands: how many of them are operands.
        factors: of each value, by dimension.
        sizes: of the factors.
        stops: factors along which it passes no sharding on.
        edges: what the pass did here, as it writes that.
        op_name: its name stack.
    """

    name: str
    frames: tuple[Source, ...]
    values: tuple[int, ...]
    operands: int
    factors: tuple[Factors, ...]
    sizes: Mapping[str, int]
    stops: frozenset[str] = frozenset()
    edges: str = ""
    op_name: str = ""

    @property
    def moves(self) -> tuple[Move, ...]:
        """What the pass did here; read when it is asked for, since few operations are."""
        return tuple(_moves(self.edges, self.values, self.operands))


@dataclasses.dataclass(slots=True, kw_only=True)
class Propagation:
    """A program after propagation.

    Args:
        axis_sizes: of the mesh.
        names: of axes that one of several meshes has in another size.
        values: of the program, arguments first, outputs last.
        links: between them.
        marks: by the name that the pass gives the annotation.
        module: of MLIR; operations are gone without it.
        relations: by operation, the dimensions that it relates, as `_conflicts` finds them.
        looks: by dimension of a value with an annotation, what lies next to it.
        regions: by dimension of a value, the region that it lies in.
        arrivals: by value, the axes that came to it, as `_routes` finds them.
        ends: by value, axis and step, the annotation that a way back ends at.
    """

    axis_sizes: Mapping[str, int]
    names: shardy_passes.Names = dataclasses.field(default_factory=dict)
    values: list[Value] = dataclasses.field(default_factory=list)
    links: list[Link] = dataclasses.field(default_factory=list)
    marks: dict[str, Mark] = dataclasses.field(default_factory=dict)
    module: Any = dataclasses.field(default=None, repr=False)
    # What several questions share:
    relations: dict[int, Any] = dataclasses.field(default_factory=dict, repr=False)
    looks: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict, repr=False)
    regions: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict, repr=False)
    arrivals: dict[int, dict[str, list[Any]]] = dataclasses.field(default_factory=dict, repr=False)
    ends: dict[tuple[int, str, float], Mark | None] = dataclasses.field(
        default_factory=dict, repr=False
    )


def propagate(module: Any, *, subject: str, steps: bool = True) -> Propagation:
    """Runs propagation on a copy of a lowered module, and reads what it did.

    Args:
        module: as it was lowered.
        subject: the first words of an error.
        steps: whether to read by which steps axes travelled, and the lines of all operations, which
            takes most of the time. Without, `frames_at` has the lines of results.

    Raises:
        ReportError: this jaxlib lacks the passes.
    """
    passes = _PASSES if steps else [one.replace(_EDGES, "") for one in _PASSES]
    done = shardy_passes.run(module, passes, subject=subject)
    with module.context:
        return _Reader(module.operation, done, steps).read()


def frames_at(value: Value) -> tuple[Source, ...]:
    """The frames of what makes a value, also where they were not read."""
    return value.frames or (_frames(value.operation) if value.operation is not None else ())


class _Reader:
    """Turns an MLIR module into a `Propagation`."""

    def __init__(self, before: Any, done: Any, steps: bool):
        self.steps, self.has_manual = steps, False
        self.before = shardy_passes.functions(before)["main"]
        self.main = shardy_passes.functions(done)["main"]
        self.names = shardy_passes.apart(done)
        sizes = shardy_passes.axis_sizes(done)
        self.found = Propagation(axis_sizes=sizes, names=self.names, module=done)
        self.index: dict[Any, int] = {}
        # A program has hundreds of thousands of values, of few types.
        self.types: dict[Any, tuple[tuple[int, ...], str]] = {}
        self.frames: dict[Any, tuple[Source, ...]] = {}
        self.stands_for: dict[Any, Any] = {}

    def read(self) -> Propagation:
        (body,) = shardy_passes.blocks(self.main)
        operations = [*_program(body)]
        self._stand_ins(operations)
        self._arguments()
        self.has_manual = any(operation.name == _MANUAL for operation in operations)
        # What enters a loop is used inside of it before the loop's results come.
        for operation in operations:
            for i, result in enumerate(operation.results):
                self._result(operation, i, result)
        for operation in operations:
            self._relate(operation)
        self._outputs(_last(body))
        for i, link in enumerate(self.found.links):
            for value in dict.fromkeys(link.values):
                self.found.values[value].links.append(i)
        return self.found

    # Values

    def _stand_ins(self, operations: Sequence[Any]) -> None:
        """Finds what stands for the results and block arguments of control flow."""
        for operation in operations:
            if operation.name == _EDGE:
                self.stands_for[operation.operands[0]] = operation.results[0]
        for operation in operations:
            if operation.name == "stablehlo.while":
                for block in shardy_passes.blocks(operation):
                    for argument, result in zip(block.arguments, operation.results, strict=True):
                        self.stands_for[argument] = self.stands_for.get(result, result)

    def _at(self, value: Any) -> int:
        value = self.stands_for.get(value, value)
        if value not in self.index:  # of an operation that is no part of the program
            shape, dtype = self._type(value)
            self._add(value, name="", shape=shape, dtype=dtype, plain=False)
        return self.index[value]

    def _add(self, value: Any, **fields: Any) -> Value:
        fields.setdefault("dimensions", shardy_passes.open_sharding(len(fields["shape"])))
        fields["dtype"] = shardy_passes.hlo_dtype(fields["dtype"])
        made = Value(**{"kind": "result", **fields})
        if value is not None:
            self.index[value] = len(self.found.values)
        self.found.values.append(made)
        return made

    def _arguments(self) -> None:
        (body,) = shardy_passes.blocks(self.main)
        now = shardy_passes.entries_of(self.main, "arg_attrs")
        given = shardy_passes.entries_of(self.before, "arg_attrs")
        names = [shardy_passes.op_name_of(argument.location) for argument in body.arguments]
        if not any(names):  # JAX names none where one is a reference
            names = [f"argument {i}" for i in range(len(names))]
        for i, (name, argument) in enumerate(zip(names, body.arguments, strict=True)):
            shape, dtype = self._type(argument)
            entry = now[i] if i < len(now) else {}
            self._add(
                argument,
                kind="argument",
                name=name,
                shape=shape,
                dtype=dtype,
                dimensions=_dimensions(entry, len(shape), self.names),
                origins=_origins(entry.get("sdy.sharding_origins")),
                mark=self._boundary("argument", name, given[i] if i < len(given) else {}, i),
            )

    def _boundary(self, kind: str, name: str, entry: Mapping[str, Any], i: int) -> Mark | None:
        shardings = shardy_passes.shardings_of(str(entry.get("sdy.sharding", "")), self.names)
        # An output may say no more than that the partitioner chooses.
        if not shardings or not any(d.axes or d.closed for d in shardings[0]):
            return None
        mark = Mark(kind=kind, name=name, frames=(), dimensions=shardings[0])
        self.found.marks[f"{'input' if kind == 'argument' else kind}: {i}"] = mark
        return mark

    def _outputs(self, returned: Any) -> None:
        now = shardy_passes.entries_of(self.main, "res_attrs")
        given = shardy_passes.entries_of(self.before, "res_attrs")
        for i, operand in enumerate(returned.operands):
            entry = now[i] if i < len(now) else {}
            name = str(entry.get("jax.result_info", f"result[{i}]")).strip('"')
            inner = self._at(operand)
            value = self.found.values[inner]
            self._add(
                None,
                kind="output",
                name=name,
                shape=value.shape,
                dtype=value.dtype,
                dimensions=_dimensions(entry, len(value.shape), self.names),
                origins=_origins(entry.get("sdy.sharding_origins")),
                mark=self._boundary("output", name, given[i] if i < len(given) else {}, i),
                frames=value.frames,
            )
            pair = (inner, len(self.found.values) - 1)
            # The pass writes the steps of all outputs to the first one: they cannot be told apart.
            self._link("return", value.frames, pair, 1, identity(pair, value.shape), "")

    # Operations

    def _relate(self, operation: Any) -> None:
        if operation.name == _EDGE:
            self._flow(operation)
        elif operation.name == _CONSTRAINT:
            self._constraint(operation)
        elif rule := _rule_of(operation):
            self._operation(operation, rule)

    def _result(self, operation: Any, i: int, result: Any) -> None:
        edge = operation.name == _EDGE
        if not edge and result in self.stands_for:
            return
        shape, dtype = self._type(result)
        own = edge or operation.name == _CONSTRAINT
        text = shardy_passes.text_of(operation, "sharding" if own else "sdy.sharding")
        shardings = shardy_passes.shardings_of(text, self.names)
        dimensions = _of_rank(shardings[i] if i < len(shardings) else (), len(shape))
        origins = _origins(_attribute(operation, "sdy.sharding_origins"), i)
        frames = self._frames(operation)
        name = _owner_name(operation.operands[0]) if edge else _short(operation.name)
        self._add(
            result,
            name=name,
            shape=shape,
            dtype=dtype,
            dimensions=dimensions,
            origins=origins,
            frames=frames,
            mark=self._mark(operation, i, dimensions, origins, frames),
            plain=not edge,
            local=self.has_manual and _is_local(operation),
            op_name=_op_name(_owner(operation.operands[0]) if edge else operation),
            operation=operation,
        )

    def _mark(
        self,
        operation: Any,
        i: int,
        dimensions: Dimensions,
        origins: Mapping[str, str],
        frames: tuple[Source, ...],
    ) -> Mark | None:
        """The annotation that a result has by itself."""
        name = shardy_passes.text_of(operation, "sdy.sharding_origin_name").strip('"')
        if operation.name == _EDGE:
            raw = operation.operands[0]
            manual = _manual_boundary(raw)
            if manual is None:
                return None
            kind, frames = "shard_map", shardy_passes.frames_of(manual.location)
            name, dimensions = _manual_mark(manual, raw, self.names)
        elif operation.name == _CONSTRAINT:
            kind = "constraint"
        elif "self" in origins.values():
            # The pipeline may move a constraint to what makes its operand.
            kind, frames = "constraint", _constraint_frames(operation.results[i]) or frames
        else:
            return None
        mark = Mark(kind=kind, name="", frames=frames, dimensions=dimensions)
        if name:
            self.found.marks[name] = mark
        return mark

    def _frames(self, operation: Any) -> tuple[Source, ...]:
        if not self.steps:
            return ()
        if operation not in self.frames:
            self.frames[operation] = _frames(operation)
        return self.frames[operation]

    def _type(self, value: Any) -> tuple[tuple[int, ...], str]:
        if value.type not in self.types:
            self.types[value.type] = shardy_passes.dims_of(value.type)
        return self.types[value.type]

    def _operation(self, operation: Any, rule: str) -> None:
        values = tuple(map(self._at, (*operation.operands, *operation.results)))
        edges = shardy_passes.text_of(operation, "sdy.propagation_edges")
        frames = self._frames(operation)
        count = len(operation.operands)
        op_name = _op_name(operation)
        self._link(_short(operation.name), frames, values, count, parse_rule(rule), edges, op_name)

    def _constraint(self, operation: Any) -> None:
        values = (self._at(operation.operands[0]), self._at(operation.results[0]))
        edges = shardy_passes.text_of(operation, "sdy.propagation_edges")
        frames = self._frames(operation)
        shape = self.found.values[values[1]].shape
        self._link(_short(operation.name), frames, values, 1, identity(values, shape), edges)

    def _flow(self, edge: Any) -> None:
        raw = edge.operands[0]
        values = (*map(self._at, _sources(raw)), self._at(edge.results[0]))
        edges = shardy_passes.text_of(edge, "sdy.propagation_edges")
        # Inside of a shard_map a value has another shape, and only some of the axes.
        shape = self.found.values[values[-1]].shape
        rule = identity(values, shape) if _manual_boundary(raw) is None else nothing(values)
        frames = self._frames(_owner(raw))
        op_name = _op_name(_owner(raw))
        self._link(_owner_name(raw), frames, values, len(values) - 1, rule, edges, op_name)

    def _link(
        self,
        name: str,
        frames: tuple[Source, ...],
        values: tuple[int, ...],
        operands: int,
        rule: Rule,
        edges: str,
        op_name: str = "",
    ) -> None:
        self.found.links.append(
            Link(
                name=name,
                frames=frames,
                values=values,
                operands=operands,
                factors=rule.factors,
                sizes=rule.sizes,
                stops=rule.stops,
                edges=edges,
                op_name=op_name,
            )
        )


# Control flow


def _holds(operation: Any) -> bool:
    return operation.name in (*_HOLDERS, _MANUAL)


def _program(block: Any) -> Iterator[Any]:
    """All operations that are part of the program, in its order."""
    for view in block.operations:
        operation = view.operation
        yield operation
        if _holds(operation):
            for inner in shardy_passes.blocks(operation):
                yield from _program(inner)


def _last(block: Any) -> Any:
    return block.operations[len(block.operations) - 1].operation


def _owner(raw: Any) -> Any:
    """The operation of control flow that a value enters or leaves."""
    owner = raw.owner
    owner = owner.owner if isinstance(owner, ir.Block) else owner
    return owner.operation if hasattr(owner, "operation") else owner


def _frames(operation: Any) -> tuple[Source, ...]:
    """The frames of an operation, or of the call that it is part of: functions of JAX have none."""
    frames: tuple[Source, ...] = ()
    while operation.name != "func.func":
        if not frames or shardy_passes.takes_part_in_loops(operation):
            frames = shardy_passes.frames_of(operation.location)
        operation = operation.parent.operation
    return frames


def _rule_of(operation: Any) -> str:
    names = ("sdy.sharding_rule", shardy_passes.OWN_RULE)
    return next(filter(None, (shardy_passes.text_of(operation, name) for name in names)), "")


def _op_name(operation: Any) -> str:
    return shardy_passes.op_name_of(operation.location)


def _is_local(operation: Any) -> bool:
    while operation.name != "func.func":
        operation = operation.parent.operation
        if operation.name == _MANUAL:
            return True
    return False


def _sources(raw: Any) -> list[Any]:
    """The values that flow into a result or block argument."""
    owner = _owner(raw)
    if isinstance(raw.owner, ir.Block):
        return [owner.operands[raw.arg_number]]
    i = raw.result_number
    if not owner.regions:
        return [owner.operands[i]]
    ends = [_last(block).operands for block in shardy_passes.blocks(owner)]
    if owner.name == "stablehlo.while":  # regions: condition, body
        return [owner.operands[i], ends[1][i]]
    return [end[i] for end in ends]


def _manual_boundary(raw: Any) -> Any:
    owner = _owner(raw)
    return owner if owner.name == _MANUAL else None


def _manual_mark(manual: Any, raw: Any, names: shardy_passes.Names) -> tuple[str, Dimensions]:
    """What the pass calls an annotation of a shard_map, and what was asked for there."""
    inside = isinstance(raw.owner, ir.Block)
    way, i = ("input", raw.arg_number) if inside else ("output", raw.result_number)
    text = shardy_passes.text_of(manual, "in_shardings" if inside else "out_shardings")
    asked = shardy_passes.shardings_of(text, names)
    name = shardy_passes.text_of(manual, "sdy.sharding_origin_name").strip('"')
    return f"{name}_{way}: {i}", asked[i]


def _owner_name(raw: Any) -> str:
    owner = _owner(raw)
    if owner.name == _MANUAL:
        return "shard_map"
    if owner.name == "sdy.named_computation":
        return "call of " + shardy_passes.text_of(owner, "name").strip('"')
    return _short(owner.name)


def _constraint_frames(value: Any) -> tuple[Source, ...]:
    users = (use.owner.operation for use in value.uses)
    found = (shardy_passes.frames_of(one.location) for one in users if one.name == _CONSTRAINT)
    return next(found, ())


# Attributes


def _short(name: str) -> str:
    return name.partition(".")[2]


def _attribute(operation: Any, name: str) -> Any:
    return operation.attributes.get(name, None)


def _dimensions(entry: Mapping[str, Any], rank: int, names: shardy_passes.Names) -> Dimensions:
    found = shardy_passes.shardings_of(str(entry.get("sdy.sharding", "")), names)
    return _of_rank(found[0] if found else (), rank)


def _of_rank(found: Dimensions, rank: int) -> Dimensions:
    """A sharding of a value; that of one on one device, as callbacks return, says nothing."""
    return found if len(found) == rank else shardy_passes.open_sharding(rank)


def _origins(attribute: Any, i: int = 0) -> Mapping[str, str]:
    """By axis, the annotation that it came from, as the pass names it."""
    if isinstance(attribute, ir.ArrayAttr):
        attribute = attribute[i] if i < len(attribute) else None
    if attribute is None:
        return {}
    return {entry.name: str(entry.attr).strip('"') for entry in attribute}


_MOVES = re.compile(
    r'step-(?P<step>\d+) = |(?P<axis>"(?:[^"\\]|\\.)*"(?::\(\d+\)\d+)?) = '
    r"(?P<source>(?:operand|result)-\d+) -> \[(?P<targets>[^\]]*)\]"
)


def _moves(text: str, values: Sequence[int], operands: int) -> Iterator[Move]:
    """The steps in the text of an ``sdy.propagation_edges``."""

    def at(place: str) -> int:
        kind, _, number = place.partition("-")
        return values[int(number) + operands * (kind == "result")]

    step = 0
    for found in _MOVES.finditer(text):
        if found["step"]:
            step = int(found["step"])
            continue
        targets = tuple(at(place.strip()) for place in found["targets"].split(",") if place.strip())
        axis = shardy_passes.axes_in(found["axis"])[0]
        yield Move(step=step, axis=axis, source=at(found["source"]), targets=targets)
