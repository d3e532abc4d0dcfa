"""What Shardy's propagation did, as plain data: values, the operations between them, its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import re
from typing import Any, NamedTuple, TypeVar

from jax.extend.mlir import ir

from spmd.inspection.records.report import Source
from spmd.inspection.shardy import passes, pipeline
from spmd.inspection.shardy.passes import Dimensions, Rule

_RECORDS = " debug-sharding-origins=true debug-propagation-edge-sharding=true"
_PASSES = (
    "sdy-import-pipeline",
    f"sdy-user-priority-propagate{{keep-sharding-rules=true{_RECORDS}}}",
)
_EDGE = "sdy.data_flow_edge"
_CONSTRAINT = "sdy.sharding_constraint"
_STEPS = "sdy.propagation_edges"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A sharding that the user asked for, at a value.

    Attributes:
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

    Attributes:
        kind: ``argument``, ``output`` or ``result``.
        name: the path of an argument or output; for a result, the operation that makes it.
        shape: of the whole array.
        dtype: XLA's name of the element type.
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
        self.axes = tuple([dimension.axes for dimension in self.dimensions])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One axis that went from one value of an operation to others, in one step of the pass."""

    step: int
    axis: str
    source: int
    targets: tuple[int, ...]


class Link(NamedTuple):
    """An operation, or a way of control flow, that relates dimensions of values by a rule.

    Attributes:
        factors: as those of a `Rule`; so are `sizes` and `stops`.
        frames: of its Python code, innermost first.
        values: indices of its operands, then of its results.
        operands: how many of them are operands.
        edges: what the pass did here, as it writes that.
        op_name: its name stack.
    """

    factors: tuple[passes.Factors, ...]
    sizes: Mapping[str, int]
    stops: frozenset[str]
    name: str
    frames: tuple[Source, ...]
    values: tuple[int, ...]
    operands: int
    edges: str = ""
    op_name: str = ""

    @property
    def moves(self) -> tuple[Move, ...]:
        """What the pass did here; read when it is asked for, since few operations are."""
        return tuple(_moves(self))


@dataclasses.dataclass(slots=True, kw_only=True)
class Propagation:
    """A program after propagation.

    Attributes:
        names: of axes that one of several meshes has in another size.
        values: of the program, arguments first, outputs last.
        links: between them.
        marks: by the name that the pass gives the annotation.
        module: of MLIR; operations are gone without it.
        relations: by operation, the dimensions that it relates, as `conflicts` finds them.
        looks: by dimension of a value with an annotation, what lies next to it.
        regions: by dimension of a value, the region that it lies in.
        arrivals: by value, the axes that came to it.
        ends: by value, axis and step, the annotation that a way back ends at.
    """

    axis_sizes: Mapping[str, int]
    names: passes.Names = dataclasses.field(default_factory=dict)
    values: list[Value] = dataclasses.field(default_factory=list)
    links: list[Link] = dataclasses.field(default_factory=list)
    marks: dict[str, Mark] = dataclasses.field(default_factory=dict)
    module: Any = dataclasses.field(default=None, repr=False)
    # What several questions share:
    relations: dict[int, Any] = dataclasses.field(default_factory=dict, repr=False)
    looks: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict, repr=False)
    regions: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict, repr=False)
    arrivals: dict[int, dict[str, list[Any]]] = dataclasses.field(default_factory=dict, repr=False)
    ends: dict[Any, Mark | None] = dataclasses.field(default_factory=dict, repr=False)

    def links_of(self, i: int) -> Iterator[Link]:
        """The operations that a value takes part in."""
        return map(self.links.__getitem__, self.values[i].links)


_Place = TypeVar("_Place")


def walk(
    starts: Iterable[_Place], beyond: Callable[[_Place], Iterable[_Place]]
) -> Iterator[tuple[_Place, _Place, int]]:
    """All that one gets to from some places, with the nearest of these and the steps from there.

    Each is given before it is asked what is beyond; of equally near starts the first one counts.
    """
    pending = deque((start, start, 0) for start in dict.fromkeys(starts))
    seen = {start for start, _, _ in pending}
    while pending:
        place, start, steps = pending.popleft()
        yield place, start, steps
        for other in beyond(place):
            if other not in seen:
                seen.add(other)
                pending.append((other, start, steps + 1))


def propagate(module: Any, *, subject: str, steps: bool = True) -> Propagation:
    """Runs propagation on a copy of a lowered module, and reads what it did.

    To record and read where axes come from, by which `steps` they travelled, and the lines of all
    operations, takes most of the time. Without, `frames_at` has the lines of results.
    """
    wanted = _PASSES if steps else [one.replace(_RECORDS, "") for one in _PASSES]
    done = pipeline.run(module, wanted, subject=subject)
    with module.context:
        return _Reader(module.operation, done, steps).read()


def frames_at(value: Value) -> tuple[Source, ...]:
    """The frames of what makes a value, also where they were not read."""
    return value.frames or (_frames(value.operation) if value.operation is not None else ())


class _Reader:
    """Turns an MLIR module into a `Propagation`."""

    def __init__(self, before: Any, done: Any, steps: bool):
        self.steps, self.has_manual = steps, False
        self.before = passes.functions(before)["main"]
        self.main = passes.functions(done)["main"]
        self.names = passes.apart(done)
        sizes = passes.axis_sizes(done)
        self.found = Propagation(axis_sizes=sizes, names=self.names, module=done)
        self.index: dict[Any, int] = {}
        self.stands_for: dict[Any, Any] = {}
        # A program has hundreds of thousands of values, of few types and shardings; MLIR has one
        # object for all attributes that say the same.
        self.type_of = functools.cache(_type_of)
        self.shardings_of = functools.cache(functools.partial(_shardings_of, names=self.names))
        self.origins_of = functools.cache(_origins)
        self.rule_of = functools.cache(lambda attribute: passes.parse_rule(str(attribute)))
        self.frames_of = functools.cache(_frames)

    def read(self) -> Propagation:
        body = passes.block_of(self.main)
        operations = [*passes.operations_in(self.main, passes.HOLDERS)]
        self._stand_ins(operations)
        self._arguments(body.arguments)
        self.has_manual = any(operation.name == passes.MANUAL for operation in operations)
        # What enters a loop is used inside of it before the loop's results come.
        for operation in operations:
            self._results(operation)
        for operation in operations:
            self._relate(operation)
        self._outputs(passes.end_of(body).operands)
        return self.found

    # Values

    def _stand_ins(self, operations: Sequence[Any]) -> None:
        """Finds what stands for the results and block arguments of control flow."""
        for operation in operations:
            if operation.name == _EDGE:
                self.stands_for[operation.operands[0]] = operation.results[0]
        for operation in operations:
            if operation.name == passes.LOOP:
                for block in passes.blocks(operation):
                    for argument, result in zip(block.arguments, operation.results, strict=True):
                        self.stands_for[argument] = self.stands_for.get(result, result)

    def _at(self, value: Any) -> int:
        try:
            return self.index[value]
        except KeyError:
            own = self.stands_for.get(value, value)
        if own not in self.index:  # of an operation that is no part of the program
            shape, dtype = self.type_of(own.type)
            dimensions = passes.open_sharding(len(shape))
            made = {"shape": shape, "dtype": dtype, "dimensions": dimensions}
            self._add(own, Value(kind="result", name="", plain=False, **made))
        self.index[value] = self.index[own]
        return self.index[value]

    def _add(self, value: Any, made: Value) -> None:
        self.index[value] = len(self.found.values)
        self.found.values.append(made)

    def _arguments(self, arguments: Sequence[Any]) -> None:
        names = [passes.op_name_of(argument.location) for argument in arguments]
        if not any(names):  # JAX names none where one is a reference
            names = [f"argument {i}" for i in range(len(names))]
        entries = self._entries("arg_attrs", len(names))
        for i, (name, argument) in enumerate(zip(names, arguments, strict=True)):
            shape, dtype = self.type_of(argument.type)
            self._add(argument, self._boundary("argument", i, name, entries[i], shape, dtype))

    def _entries(self, name: str, count: int) -> list[tuple[Any, ...]]:
        """The attributes of each argument or result, after the passes and before them."""
        sides = (passes.entries_of(one, name) for one in (self.main, self.before))
        return [*zip(*([*side, *[{}] * (count - len(side))] for side in sides), strict=False)]

    def _boundary(
        self,
        kind: str,
        i: int,
        name: str,
        entries: Sequence[Any],
        shape: tuple[int, ...],
        dtype: str,
    ) -> Value:
        """An argument or output, by its attributes."""
        own, asked = (self.shardings_of(passes.entry_of(one, "sdy.sharding")) for one in entries)
        mark = None
        # An output may say no more than that the partitioner chooses.
        if asked and any(d.axes or d.closed for d in asked[0]):
            mark = Mark(kind=kind, name=name, frames=(), dimensions=asked[0])
            self.found.marks[f"{'input' if kind == 'argument' else kind}: {i}"] = mark
        return Value(
            kind=kind,
            name=name,
            shape=shape,
            dtype=dtype,
            dimensions=_of_rank(own[0] if own else (), len(shape)),
            mark=mark,
            origins=self.origins_of(passes.entry_of(entries[0], "sdy.sharding_origins")),
        )

    def _outputs(self, returned: Sequence[Any]) -> None:
        entries = self._entries("res_attrs", len(returned))
        for i, operand in enumerate(returned):
            told = passes.entry_of(entries[i][0], "jax.result_info")
            name = f"result[{i}]" if told is None else str(told).strip('"')
            inner = self._at(operand)
            value = self.found.values[inner]
            made = self._boundary("output", i, name, entries[i], value.shape, value.dtype)
            made.frames = value.frames
            pair = (inner, len(self.found.values))
            self.found.values.append(made)
            # The pass writes the steps of all outputs to the first one: they cannot be told apart.
            rule = passes.identity(2, value.shape)
            self._link(rule, name="return", frames=value.frames, values=pair, operands=1)

    # Operations

    def _relate(self, operation: Any) -> None:
        kind, attributes = operation.name, operation.attributes
        if kind == _EDGE:
            self._flow(operation)
            return
        rule = attributes.get("sdy.sharding_rule")
        constraint = kind == _CONSTRAINT
        if constraint or rule is not None:
            operands = [self._at(one) for one in operation.operands]
            values = (*operands, *[self._at(one) for one in operation.results])
            last = self.found.values[values[-1]]
            self._link(
                passes.identity(2, last.shape) if constraint else self.rule_of(rule),
                name=_short(kind),
                frames=self.frames_of(operation) if self.steps else (),
                values=values,
                operands=len(operands),
                edges=passes.text_of(operation, _STEPS) if self.steps else "",
                op_name="" if constraint else passes.op_name_of(operation.location),
            )

    def _flow(self, edge: Any) -> None:
        raw = edge.operands[0]
        owner = _owner(raw)
        values = (*map(self._at, _sources(raw)), self._at(edge.results[0]))
        # Inside of a shard_map a value has another shape, and only some of the axes: none relate.
        shape = () if owner.name == passes.MANUAL else self.found.values[values[-1]].shape
        self._link(
            passes.identity(len(values), shape),
            name=_owner_name(raw),
            frames=self.frames_of(owner) if self.steps else (),
            values=values,
            operands=len(values) - 1,
            edges=passes.text_of(edge, _STEPS),
            op_name=passes.op_name_of(owner.location),
        )

    def _results(self, operation: Any) -> None:
        kind, attributes = operation.name, operation.attributes
        edge, constraint = kind == _EDGE, kind == _CONSTRAINT
        own = "sharding" if edge or constraint else "sdy.sharding"
        shardings = self.shardings_of(attributes.get(own))
        come = attributes.get("sdy.sharding_origins")
        name = _owner_name(operation.operands[0]) if edge else _short(kind)
        owner = _owner(operation.operands[0]) if edge else operation
        op_name = passes.op_name_of(owner.location)
        frames = self.frames_of(operation) if self.steps else ()
        local = self.has_manual and passes.is_manual(operation)
        for i, result in enumerate(operation.results):
            if result in self.stands_for and not edge:
                continue
            shape, dtype = self.type_of(result.type)
            dimensions = _of_rank(shardings[i] if i < len(shardings) else (), len(shape))
            origins = self.origins_of(come, i)
            mark = None
            if edge or constraint or "self" in origins.values():
                mark = self._mark(operation, i, dimensions, frames)
            made = Value(
                kind="result",
                name=name,
                shape=shape,
                dtype=dtype,
                dimensions=dimensions,
                frames=frames,
                mark=mark,
                origins=origins,
                plain=not edge,
                local=local,
                op_name=op_name,
                operation=operation,
            )
            self._add(result, made)

    def _mark(
        self, operation: Any, i: int, dimensions: Dimensions, frames: tuple[Source, ...]
    ) -> Mark | None:
        """The annotation that a result has by itself."""
        if operation.name == _EDGE:
            raw = operation.operands[0]
            manual = _owner(raw)
            if manual.name != passes.MANUAL:
                return None
            kind, frames = "shard_map", passes.frames_of(manual.location)
            name, dimensions = _manual_mark(manual, raw, self.names)
        else:
            kind = "constraint"
            # The pipeline may move a constraint to what makes its operand.
            if operation.name != _CONSTRAINT:
                frames = _constraint_frames(operation.results[i]) or frames
            name = passes.text_of(operation, "sdy.sharding_origin_name").strip('"')
        mark = Mark(kind=kind, name="", frames=frames, dimensions=dimensions)
        if not self.steps:  # the pass gives no names
            name = f"{kind} {len(self.found.marks)}"
        if name:
            self.found.marks[name] = mark
        return mark

    def _link(self, rule: Rule, **fields: Any) -> None:
        for value in dict.fromkeys(fields["values"]):
            self.found.values[value].links.append(len(self.found.links))
        self.found.links.append(Link(rule.factors, rule.sizes, rule.stops, **fields))


# Control flow


def _owner(raw: Any) -> Any:
    """The operation of control flow that a value enters or leaves."""
    owner = raw.owner.owner if isinstance(raw.owner, ir.Block) else raw.owner
    return passes.operation_of(owner)


def _frames(operation: Any) -> tuple[Source, ...]:
    """The frames of an operation, or of what it is inside of if it has none."""
    holders = itertools.chain([operation], passes.holders_of(operation))
    return next(filter(None, (passes.frames_of(one.location) for one in holders)), ())


def _sources(raw: Any) -> list[Any]:
    """The values that flow into a result or block argument."""
    owner = _owner(raw)
    if isinstance(raw.owner, ir.Block):
        return [owner.operands[raw.arg_number]]
    i = raw.result_number
    if not owner.regions:
        return [owner.operands[i]]
    ends = [passes.end_of(block).operands for block in passes.blocks(owner)]
    if owner.name == "stablehlo.while":  # regions: condition, body
        return [owner.operands[i], ends[1][i]]
    return [end[i] for end in ends]


def _manual_mark(manual: Any, raw: Any, names: passes.Names) -> tuple[str, Dimensions]:
    """What the pass calls an annotation of a shard_map, and what was asked for there."""
    inside = isinstance(raw.owner, ir.Block)
    way, i = ("input", raw.arg_number) if inside else ("output", raw.result_number)
    text = passes.text_of(manual, "in_shardings" if inside else "out_shardings")
    asked = passes.shardings_of(text, names)
    name = passes.text_of(manual, "sdy.sharding_origin_name").strip('"')
    return f"{name}_{way}: {i}", asked[i]


def _owner_name(raw: Any) -> str:
    owner = _owner(raw)
    if owner.name == passes.MANUAL:
        return "shard_map"
    return _short(owner.name)


def _constraint_frames(value: Any) -> tuple[Source, ...]:
    users = (use.owner.operation for use in value.uses)
    found = (passes.frames_of(one.location) for one in users if one.name == _CONSTRAINT)
    return next(found, ())


# Attributes


def _type_of(kind: Any) -> tuple[tuple[int, ...], str]:
    """The dimensions of a type, and XLA's name of its element type."""
    dims, dtype = passes.dims_of(kind)
    return dims, passes.hlo_dtype(dtype)


@functools.cache
def _short(name: str) -> str:
    return name.partition(".")[2]


def _shardings_of(attribute: Any, names: passes.Names) -> tuple[Dimensions, ...]:
    return passes.shardings_of("" if attribute is None else str(attribute), names)


def _of_rank(found: Dimensions, rank: int) -> Dimensions:
    """A sharding of a value; that of one on one device, as callbacks return, says nothing."""
    return found if len(found) == rank else passes.open_sharding(rank)


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


def _moves(link: Link) -> Iterator[Move]:
    """The steps in the text of an ``sdy.propagation_edges``."""

    def at(place: str) -> int:
        kind, _, number = place.partition("-")
        return link.values[int(number) + link.operands * (kind == "result")]

    step = 0
    for found in _MOVES.finditer(link.edges):
        if found["step"]:
            step = int(found["step"])
            continue
        targets = tuple(at(place.strip()) for place in found["targets"].split(",") if place.strip())
        axis = passes.axes_in(found["axis"])[0]
        yield Move(step=step, axis=axis, source=at(found["source"]), targets=targets)
