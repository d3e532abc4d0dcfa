"""Records of where shardings come from: what `why` says of a value, and a report of several."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import TYPE_CHECKING, Any

from spmd.inspection.records.arrays import Source
from spmd.inspection.records.later import known
from spmd.inspection.records.shown import Shown, opened

if TYPE_CHECKING:
    from rich.console import Console

Spec = tuple[tuple[str, ...], ...]
"""Mesh axes by dimension; a part of an axis as ``data:(1)2``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A sharding that the user asked for.

    Attributes:
        kind: ``argument``, ``output``, ``constraint`` or ``shard_map``.
        name: the path of the argument or output, such as ``batch['x']``; empty for the others.
        source: the line of a constraint or of a ``shard_map``; None for arguments and outputs.
        spec: mesh axes by dimension, as asked for.
    """

    kind: str
    name: str
    source: Source | None
    spec: Spec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation through which an axis travelled.

    Attributes:
        operation: its name in StableHLO, ``return`` for the end of the program, ``while``,
            ``case`` or ``shard_map`` for the way into or out of one.
        source: the user's line.
        way: ``forward`` from operand to result, ``backward`` from result to operand, ``sideways``
            from operand to operand.
        value: what the axis reached: the path of an argument or output, or the operation that
            makes the value.
        shape: of that value, of the whole array.
        dimension: of that value that was split.
    """

    operation: str
    source: Source | None
    way: str
    value: str
    shape: tuple[int, ...]
    dimension: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where one mesh axis of a value comes from.

    Attributes:
        axis: of the mesh; a part of one as ``data:(1)2``.
        dimension: of the value that it splits.
        annotation: where the user asked for it; None where the passes do not tell.
        priority: that the user gave the annotation's dimension, 0 being the first; None without.
        steps: from the annotation to the value; none where the annotation is the value's own.
    """

    axis: str
    dimension: int
    annotation: Annotation | None
    priority: int | None
    steps: tuple[Step, ...]


REASONS = {
    "split": "the dimension is split over other axes",
    "taken": "the axis splits another dimension already",
    "closed": "the annotation keeps the dimension whole",
    "tie": "two operands ask for different axes, and neither gets its own",
    "operation": "the operation does not pass the axis on",
}
"""Why an axis stopped at a value."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A place where an annotation's axis did not get through to a value.

    From a dimension of the value one goes through operations to all dimensions that must be split
    alike and are: those with the same axes, up to annotations. A conflict is an operation at the
    border of that region, where an operand or result has an axis on the same dimension of the
    operation which the region lacks. Of conflicts that differ in neither axis, annotations nor
    reason, the nearest stands for all.

    Attributes:
        axis: that stopped.
        dimension: of the value that was asked about.
        operation: where the two met.
        source: the user's line of it.
        at: the value at which the axis stopped: a path, or the operation that makes it.
        reason: a key of `REASONS`.
        lost: the annotation that the axis comes from; None where the passes do not tell.
        won: the annotation that kept it out; None for a tie, or where it was the operation itself.
        against: in a tie, the annotation of the other operand, which lost as well.
        kept: the axes that the dimension has instead.
        distance: operations between the value and the conflict.
    """

    axis: str
    dimension: int
    operation: str
    source: Source | None
    at: str
    reason: str
    lost: Annotation | None
    won: Annotation | None
    against: Annotation | None
    kept: tuple[str, ...]
    distance: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueOrigins:
    """The sharding of one value, and where it comes from.

    Attributes:
        kind: ``argument``, ``output`` or ``result``.
        name: the path of an argument or output; the operation that makes a result.
        shape: of the whole array.
        dtype: XLA's name of the element type.
        spec: mesh axes by dimension, after propagation.
        source: the user's line that makes it; None for arguments.
        annotation: the user's own of this value, if any.
        origins: for each axis in `spec`.
        conflicts: annotations that did not get through, the nearest first.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    source: Source | None
    annotation: Annotation | None
    origins: tuple[Origin, ...]
    conflicts: tuple[Conflict, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Where the shardings of a report's values come from.

    Attributes:
        values: arguments, then outputs, then what the lines of collectives make, the lines with
            most bytes on the wire first. Values of one line that differ in nothing but the
            operations between them and their annotations are listed once.
        left_out: how many values more than these there are, since only so many are listed.
        missing: why nothing is known; empty where something is.
    """

    values: tuple[ValueOrigins, ...] = ()
    left_out: int = 0
    missing: str = ""


UNKNOWN = known(Origins(missing="The report does not hold where its shardings come from."))
"""Of a report that was written by an earlier release, or made by hand."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Why(Shown):
    """What `why` found.

    Attributes:
        name: what was asked for.
        function: the function's name.
        mesh: size by axis name.
        values: that have the name: one for a path, all below it for the beginning of one, all that
            a line makes for a line.
    """

    name: str
    function: str
    mesh: Mapping[str, int]
    values: tuple[ValueOrigins, ...]

    def __hash__(self) -> int:
        return hash((self.name, self.function, *self.mesh.items(), self.values))

    __repr__ = Shown.__str__

    def show(self, console: Console | None = None) -> None:
        """Prints it in colour, as wide as the terminal is.

        Args:
            console: a console of rich; None for one on the standard output.
        """
        self._print(console)

    def to_json(self) -> dict[str, Any]:
        """The records as JSON values, for `json.dumps`."""
        mesh = [{"axis": name, "size": size} for name, size in self.mesh.items()]
        return {"schema": "spmd-why/1", **opened("codec").values(self), "mesh": mesh}
