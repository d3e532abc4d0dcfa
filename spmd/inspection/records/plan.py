"""Where a program's arrays lie on a mesh, why, and what else was looked at. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from spmd.inspection.records.later import Later
from spmd.inspection.records.report import Report, Source
from spmd.inspection.records.shown import Paged, opened
from spmd.inspection.records.sizes import show_seconds
from spmd.inspection.records.time import Time

if TYPE_CHECKING:
    from rich.console import Console

Entries: TypeAlias = tuple[tuple[str, ...], ...]
"""Of each dimension the mesh axes that split it, major to minor."""


class Price(NamedTuple):
    """What another place of an array would cost.

    Attributes:
        spec: the place.
        seconds: that a call would take longer; below 0: less.
        nbytes: that a device would hold more at the peak; below 0: less.
    """

    spec: Entries
    seconds: float
    nbytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An argument or a result, and where a plan puts it.

    Attributes:
        name: its path, such as ``"state['params']['up']"``.
        dtype: of its elements.
        shape: of the whole array.
        spec: of each dimension the mesh axes that split it.
        is_fixed: whether the user said so.
        prices: what other places would cost, by the planner's estimate.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: Entries
    is_fixed: bool = False
    prices: tuple[Price, ...] = ()

    def nbytes_on(self, axes: Mapping[str, int]) -> int | None:
        """Bytes of it on a device of a mesh; None where its element type has no size.

        Args:
            axes: sizes of the mesh axes.
        """
        if (width := _width(self.dtype)) is None:
            return None
        parts = math.prod(axes.get(axis, 1) for entry in self.spec for axis in entry)
        return -(-math.prod(self.shape) * width // 8) // max(1, parts)


def _width(dtype: str) -> int | None:
    """Bits of an element: of ``float32`` and ``f32``, ``int4``, ``float8_e4m3fn``, ``bool``."""
    if dtype in ("bool", "pred"):
        return 8
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else None


class Pin(NamedTuple):
    """The shardings of what an operation takes and makes.

    Attributes:
        number: of the operation, among those that plans pin; of a transpose that of the product
            whose result it takes.
        name: of it in the module.
        specs: of its operands, then of its results; None for one that is left to propagation.
    """

    number: int
    name: str
    specs: tuple[Entries | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceConstraint:
    """A `with_sharding_constraint` around an expression of the user's source.

    Attributes:
        file: path of the file that has it, as Python knows it.
        line: where it begins, from 1.
        column: where it begins, in bytes of UTF-8 from 0, as `ast` counts them; None where the
            text is not there, as are both ends then.
        end_line: where it ends.
        end_column: where it ends.
        function: that it stands in.
        expression: its text; without the source, what is known of the value.
        spec: of each dimension the mesh axes that split it.
    """

    file: str
    line: int
    column: int | None
    end_line: int | None
    end_column: int | None
    function: str
    expression: str
    spec: Entries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The constraints that a person writes to get a planned program.

    Attributes:
        constraints: in the user's source, as few as possible.
        exact: whether they make the same program.
        note: what was compared, and what differs.
        code: all that is pasted, as text.
    """

    constraints: tuple[SourceConstraint, ...]
    exact: bool = True
    note: str = ""
    code: str = ""


LEAST = 0.02
"""The share of all bytes above which it is told that a compiled program sends others."""


def added_by_compiler(told: int, sent: int, exchange: float) -> float:
    """The part of the seconds of exchanges that was not predicted, by its share of the bytes.

    Args:
        told: bytes that a device was said to send.
        sent: those that it sends in the compiled program.
        exchange: seconds of the exchanges of that program.
    """
    more = 1 - told / sent if sent else 0.0
    return exchange * more if more > LEAST else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that was looked at, and what is known of it.

    Attributes:
        name: ``found``, or that of an expert, such as ``FSDP``; ``as written`` for the program
            with the specs that its user gave.
        axes: sizes of the mesh axes, major to minor.
        orders: by mesh axis the classes of dimensions that it splits, the first one first; those
            of values that only the optimizer has are marked ``(optimizer)``.
        estimated: seconds by the first tier, from classes alone.
        estimated_peak: bytes of a device at the worst moment, by the first tier.
        compute: seconds of products, of `predicted`.
        memory: seconds in which main memory decides, of `predicted`.
        exchange: seconds of exchanges, of `predicted`.
        predicted: seconds, before anything was compiled.
        sent: bytes that a device sends in a call; of the compiled program, where there is one.
        told: the same as Shardy's exchanges say it, before a compile; None where nobody asked.
        time: of the compiled program; None for one that was not compiled, or has none.
        peak: bytes of a device, as the compiler planned them; None for one not compiled.
        verified: ``time``, ``bytes`` where a CPU stood in for the hardware, or empty.
        failure: what the compiler said of a program that it refused.
        same: names of experts whose program this is as well, the shortest one first.
    """

    name: str
    axes: Mapping[str, int]
    orders: Mapping[str, tuple[str, ...]]
    estimated: float
    estimated_peak: int
    compute: float
    memory: float
    exchange: float
    predicted: float
    sent: int
    told: int | None = None
    time: Time | None = None
    peak: int | None = None
    verified: str = ""
    failure: str = ""
    same: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of a call: of the compiled program, or else predicted.

        Where CPUs stand in for the hardware, with the exchanges that the compiler adds.
        """
        if self.time and self.verified == "time":
            return self.time.seconds
        return self.predicted + self.added

    @property
    def added(self) -> float:
        """Seconds of exchanges that only the compiled program has, where CPUs stand in."""
        if self.time is None or self.told is None or self.verified != "bytes":
            return 0.0
        return added_by_compiler(self.told, self.sent, self.time.exchange)

    @property
    def needed(self) -> int:
        """Bytes of a device at the peak: as compiled, or else estimated."""
        return self.estimated_peak if self.peak is None else self.peak

    def fits(self, budget: int | None) -> bool:
        """Whether it keeps to a budget in bytes."""
        return not self.failure and (budget is None or self.needed <= budget)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Bytes of a compiled program that were predicted otherwise, and why.

    Attributes:
        kind: of the collectives as predicted; of those that only the compiler has, theirs.
        mesh_axes: that they cross, likewise.
        source: the user's line of most of the bytes; None where none is known.
        predicted: bytes that a device sends in a call, by Shardy's exchanges.
        compiled: bytes that it sends, by the compiled program.
        cause: what the compiler does otherwise, such as ``runs 4 times, not 8``.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    source: Source | None
    predicted: int
    compiled: int
    cause: str

    @property
    def change(self) -> int:
        """Bytes that the compiled program sends more; below 0: less."""
        return self.compiled - self.predicted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Paged):
    """Mesh, shardings and constraints for a program, chosen by predicted time.

    Attributes:
        name: of the function.
        axes: sizes of the mesh axes, major to minor.
        topology: name of the described hardware; empty for a mesh that was there.
        device_kind: the devices' own name.
        chip: whose figures were used.
        budget: bytes that a device may hold; None for no limit.
        arguments: where each lies, in their order.
        results: where each lies, in their order.
        pins: constraints inside, as the program is compiled with them.
        candidates: what was looked at, the chosen one first.
        report: of the compiled program; None where it was not compiled.
        tried: how many layouts were looked at.
        searched: seconds that the search took.
        compiled: seconds that compilers took.
        complete: whether neither a time limit nor an interrupt ended it.
        program: fingerprint of what was planned.
        versions: of JAX, jaxlib and spmd.
        deviations: where the compiled program sends other bytes than predicted, as far as that is
            more than 2% of all that is sent; the largest difference first.
        passed_over: meshes that the function cannot be traced for, such as ``data=16, model=1``,
            with what it raised.
        compiles: how many programs compilers were asked for, beside what they had said before.
        inside: the constraints that a person writes; None where that is not known.
    """

    name: str
    axes: Mapping[str, int]
    topology: str
    device_kind: str
    chip: str
    budget: int | None
    arguments: tuple[Placed, ...]
    results: tuple[Placed, ...]
    pins: tuple[Pin, ...]
    candidates: tuple[Candidate, ...]
    report: Report | None
    tried: int
    searched: float
    compiled: float
    complete: bool
    program: str
    versions: Mapping[str, str]
    deviations: tuple[Deviation, ...] = ()
    passed_over: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compiles: int = 0
    inside: Later[Inside] | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def num_devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.axes.values())

    @property
    def constraints(self) -> tuple[SourceConstraint, ...]:
        """The fewest constraints in the user's source that make the same program.

        They are worked out when they are first asked for, which takes seconds; for a TPU, whose
        compiler is asked again, minutes.
        """
        return self.inside.get().constraints if self.inside else ()

    @property
    def chosen(self) -> Candidate:
        """The layout that this plan is."""
        return self.candidates[0]

    @property
    def seconds(self) -> float:
        """Of a call: of the compiled program, or else predicted."""
        return self.chosen.seconds

    @property
    def predicted(self) -> float:
        """Seconds of a call, before anything was compiled."""
        return self.chosen.predicted

    @property
    def memory(self) -> int:
        """Bytes of a device at the peak: as compiled, or else estimated."""
        return self.chosen.needed

    @property
    def verified(self) -> str:
        """How a compiler verified it: ``time``, ``bytes``, or empty."""
        return self.chosen.verified

    @property
    def mesh(self) -> Any:
        """A mesh of this process's devices with the axes of the plan.

        Raises:
            MeshError: there are not so many devices.
        """
        return opened("plans").mesh_of(self)

    def place(self, *args: Any) -> Any:
        """Puts arrays where the plan wants them.

        Args:
            *args: the arguments of the function that are not static, or the first ones of them.
                Those that it takes by keyword stand last, in the order of their names.

        Returns:
            The same trees on the mesh that is active, else on that of the plan: one tree for one
            argument, a tuple for several.

        Raises:
            ArgumentError: they are not the arguments that were planned.
        """
        return opened("plans").placed(self, args)

    def code(self) -> str:
        """What a person pastes: the specs, folded, and the fewest constraints inside."""
        return opened("plans").code_of(self)

    def why(self, path: str) -> str:
        """What other places of an argument or result would cost.

        Args:
            path: of it, such as ``"state['params']['up']"``, or of several: ``"batch"``.

        Raises:
            ArgumentError: there is no such path.
        """
        return opened("plans").why(self, path)

    def diff(self, other: Plan) -> str:
        """What another plan does otherwise.

        Args:
            other: the plan to compare with.

        Raises:
            ArgumentError: it is no plan.
        """
        return opened("plans").difference(self, other)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file.

        Args:
            path: ends in ``.json``, or in ``.html`` for a page.

        Raises:
            ReportError: the ending is another one.
            OSError: the file cannot be written.
        """
        opened("plans").save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads it from a file that `save` wrote.

        Args:
            path: of a ``.json`` file.

        Raises:
            ReportError: the file holds no plan.
            OSError: the file cannot be read.
        """
        return opened("plans").load(path)

    def __repr__(self) -> str:
        mesh = "".join(f", {name}={size}" for name, size in self.axes.items())
        where = f" on {self.topology}" if self.topology else ""
        how = f"verified by {self.verified}" if self.verified else "not verified"
        return f"<Plan of {self.name}{where}{mesh}: {show_seconds(self.seconds)} a call, {how}>"

    def print(self, console: Console | None = None) -> None:
        """Prints it in colour, as wide as the terminal is.

        Args:
            console: to print to.
        """
        self._print(console)
