"""What a report consists of: frozen records, before anyone draws or stores them.

All bytes are per device. Nothing here reads HLO, knows JAX or prints.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from spmd.inspection.records.arrays import Argument, Excerpt, Source as Source
from spmd.inspection.records.later import FindingsLater, Later, known
from spmd.inspection.records.origins import UNKNOWN, Origins
from spmd.inspection.records.shown import Paged, opened
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.records.time import Time as Time

if TYPE_CHECKING:
    from rich.console import Console

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
)
"""The opcodes that move data between devices, in the order in which reports name them."""

DIRECTIONS = ("forward", "backward", "other")
"""Which half of a gradient a collective belongs to; ``other`` is everything outside of one."""

# Sizes in bits, from XLA's primitive types; sub-byte elements are packed.
_BITS = {
    "pred": 8, "token": 0, "opaque": 0,
    "s1": 1, "s2": 2, "s4": 4, "s8": 8, "s16": 16, "s32": 32, "s64": 64,
    "u1": 1, "u2": 2, "u4": 4, "u8": 8, "u16": 16, "u32": 32, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8, "f8e4m3fn": 8,
    "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
}  # fmt: skip
DTYPES = frozenset(_BITS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The element type and the dimensions of one array in a program.

    Attributes:
        dtype: XLA's name of the element type, such as ``f32`` or ``bf16``.
        dims: sizes per device.
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes on one device, with elements below a byte packed."""
        return -(-math.prod(self.dims) * _BITS[self.dtype] // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


# An axis may have a colon in its own name.
_PART = re.compile(r":(?:\(\d+\)\d+|part)$")


def axis_name(axis: str) -> str:
    """A mesh axis without the suffix that names a part of it."""
    return _PART.sub("", axis)


class Shapes(NamedTuple):
    """Shapes on each device before and after a collective."""

    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one exchange of the program has in a collective that the compiler combined.

    Attributes:
        shapes: of its operand and its result, per device.
        payload_bytes: its share of the payload. The shares of all parts add up to the whole.
        wire_bytes: its share of the bytes that each device sends; these add up likewise.
        source: the user's line that makes what is sent, or else the one that uses what comes back;
            None where the compiler left nothing that tells: the part is not attributed.
        source_is_consumer: True where `source` is the line that uses it.
        frames: all frames, innermost first, libraries included.
        direction: one of `DIRECTIONS`, as the name stack of the part tells.
        op_name: its name-stack path; for an argument, the argument's path.
    """

    shapes: Shapes
    payload_bytes: int
    wire_bytes: int
    source: Source | None
    direction: str
    op_name: str
    source_is_consumer: bool = False
    frames: tuple[Source, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One place in a compiled program where devices exchange data.

    Attributes:
        kind: one of `KINDS`.
        mesh_axes: axes of the mesh, in mesh order, that the exchange crosses. A part of an axis is
            named as Shardy does: ``data:(2)2`` takes 2 devices at a time where ``data`` has split
            in 2 already; ``data:part`` is a part that no such name describes.
        shapes: of operands and results, per device.
        dtype: element type of the data, or several joined by a comma.
        payload_bytes: the larger of operands and results, in bytes, per device and execution.
        wire_bytes: bytes that each device sends, per execution, by the ring formula of
            `spmd.inspection.wire_bytes`.
        group_size: devices in the largest group that exchange with each other.
        executions: how often it runs in one call of the program: the product of the trip counts of
            the loops around it; None where one of them is unknown.
        source: the user's line that it comes from: the innermost frame outside of libraries. Where
            the compiler gave the exchange itself none, the line of the first operation that uses
            its result, or else of the last one that makes its data; None without any of them.
        source_is_consumer: True where `source` is the line of the operation that uses it.
        frames: all frames, innermost first, libraries included.
        direction: one of `DIRECTIONS`, as the name stack tells.
        op_name: the name-stack path that JAX gave the operation; for a resharded argument, the
            argument's path.
        is_async: True for a pair of start and done instructions, which is one record.
        combined: how many exchanges of the program the compiler combined into this one.
        conditional: True inside a branch, which may not run at all.
        in_loop: True inside the body or condition of a loop.
        name: the instruction's name in the HLO text.
        groups: which devices exchange with each other, or send to each other, as XLA prints it;
            `spmd.inspection.expand_replica_groups` reads it.
        parts: the exchanges that were combined, one for each operand; none for what is one
            exchange. `source`, `frames` and `op_name` of the whole are what the compiler kept;
            sums by line, module and direction go by the parts.
        sliced: of an all-reduce in a program for CPUs, the numbers of the operands whose sum each
            device only takes its own part of. CPUs have no reduce-scatter: the compiler of a TPU or
            a GPU would write one, which sends half of the bytes.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    shapes: Shapes
    dtype: str
    payload_bytes: int
    wire_bytes: int
    group_size: int
    executions: int | None
    source: Source | None
    direction: str
    op_name: str
    is_async: bool
    combined: int
    source_is_consumer: bool = False
    frames: tuple[Source, ...] = ()
    conditional: bool = False
    in_loop: bool = False
    name: str = ""
    groups: str = ""
    parts: tuple[Part, ...] = ()
    sliced: tuple[int, ...] = ()

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The mesh axes without the suffix that names a part."""
        return tuple(map(axis_name, self.mesh_axes))

    @property
    def total_payload_bytes(self) -> int | None:
        """Payload of all executions in one call; None where their number is unknown."""
        return None if self.executions is None else self.executions * self.payload_bytes

    @property
    def total_wire_bytes(self) -> int | None:
        """Wire bytes of all executions in one call; None where their number is unknown."""
        return None if self.executions is None else self.executions * self.wire_bytes


class _Sum:
    """Records whose fields add up."""

    __slots__ = ()

    @classmethod
    def zeros(cls) -> Self:
        """The sum over nothing."""
        return cls(**dict.fromkeys(_names(cls), 0))

    def __add__(self, other: Self) -> Self:
        return type(self)(**{n: getattr(self, n) + getattr(other, n) for n in _names(type(self))})


def _names(record: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(record))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Total(_Sum):
    """A sum over collectives, for one device and one call of the program.

    Attributes:
        sites: places in the program.
        unknown: how many of them run an unknown number of times. They count in `sites` only, so
            the other figures are lower bounds where this is not 0.
        executions: how often they run, all together.
        payload_bytes: bytes of data.
        wire_bytes: bytes that a device sends.
    """

    sites: int
    unknown: int
    executions: int
    payload_bytes: int
    wire_bytes: int

    @classmethod
    def of(cls, one: Collective) -> Total:
        """The sum over one collective."""
        times = one.executions or 0
        return cls(
            sites=1,
            unknown=int(one.executions is None),
            executions=times,
            payload_bytes=times * one.payload_bytes,
            wire_bytes=times * one.wire_bytes,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost(_Sum):
    """What one device computes in one call of the program.

    Attributes:
        flops: floating-point operations of matrix products and convolutions, two for each
            multiplication with its addition, over all executions.
        hbm_bytes: bytes read from and written to the device's main memory by the operations of the
            compiled program, each operand and result once per execution: an estimate from above,
            since caches are not modelled.
        unknown_loops: loops of unknown trip count; what runs in them is not in the figures.
        opaque_calls: custom calls whose work is not in `flops`, such as hand-written kernels.
    """

    flops: int
    hbm_bytes: int
    unknown_loops: int = 0
    opaque_calls: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One array that the program keeps in a device's memory.

    Attributes:
        name: of the instruction that makes it, in the HLO text.
        shape: per device.
        nbytes: its size in bytes.
        kind: ``argument``, ``output`` or ``temporary``.
        source: the user's line that it comes from, or None.
        op_name: its name-stack path; for an argument, the argument's path.
        at_peak: True where it is alive when the program needs most memory.
        first: place in program order where it is made.
        last: place where it is read last. An argument or output takes its memory all the time.
    """

    name: str
    shape: Shape
    nbytes: int
    kind: str
    source: Source | None
    op_name: str
    at_peak: bool
    first: int = 0
    last: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory that one call takes on each device, in bytes, as the compiler planned it.

    Attributes:
        arguments: what is passed in.
        outputs: what comes back.
        temporaries: what is allocated in between, on TPU with what fragmentation leaves free.
        aliased: the part of the outputs that lies in donated arguments.
        code: the program itself.
        peak: all of it together: arguments, outputs that are not aliased, temporaries and code. A
            TPU's compiler accepts a program where it is no more than the memory of the device.
        buffers: the largest arrays, largest first.
        places: in program order; `Buffer.first` and `last` are below it.
        live: bytes of temporaries that are alive, as the schedule tells: the most in each of as
            many equal stretches of the program as there are numbers.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    code: int
    peak: int
    buffers: tuple[Buffer, ...] = ()
    places: int = 0
    live: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """An argument that a call moves before the program starts, because it lies elsewhere.

    Attributes:
        argument: its path, such as ``batch['x']``.
        given: the sharding that it has.
        wanted: the sharding that the program takes.
        nbytes: bytes of the argument that each device needs and does not hold, the most of any.
    """

    argument: str
    given: str
    wanted: str
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """Text of a compiled program that the reader did not understand.

    Attributes:
        lines: how many there are; whatever they do is missing in the report.
        first: the first of them, cut short where it is long.
    """

    lines: int
    first: str

    def __str__(self) -> str:
        noun = "1 line" if self.lines == 1 else f"{self.lines:,} lines"
        return f"{noun} of the compiled program not understood; first: {self.first}"


FINDINGS = {
    "ignored-constraint": "a logical constraint of Flax does nothing",
    "moved-argument": "an argument is moved before the program starts",
    "replicated-argument": "large arguments are whole on every device",
    "unsharded-batch": "the batch is not split",
    "duplicated-work": "devices along a mesh axis compute the same products",
    "replicated-residual": "a value that the backward pass needs is whole on every device",
    "replicated-value": "a large value is whole on every device",
    "full-rematerialization": "a value is gathered whole, only to be split otherwise",
    "recomputed": "the compiler makes values again to make room in memory",
    "collective-in-loop": "a loop exchanges the same values each time",
    "uneven-split": "a split needs padding",
    "unused-donation": "a donated argument is not used again",
    "unused-axis": "nothing is split over a mesh axis",
}
"""Kinds of findings, and what each says."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that costs a program more than it has to.

    Attributes:
        kind: a key of `FINDINGS`.
        subject: a sentence that names what it is about.
        source: the user's line; None for what has none, such as an argument.
        nbytes: what it costs each device: bytes that it holds, or sends in one call; 0 where no
            bytes tell.
        measure: ``memory`` or ``wire``; empty where no bytes tell.
        facts: what is known, a sentence each.
        fix: what to write instead.
        flops: that each device computes in one call though others compute the same, and would not
            if the work were split; or that it computes again.
    """

    kind: str
    subject: str
    source: Source | None
    nbytes: int
    measure: str
    facts: tuple[str, ...]
    fix: str
    flops: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report(FindingsLater, Paged):
    """What one compiled program does between and on its devices.

    Attributes:
        name: of the function.
        backend: platform that it was compiled for: ``cpu``, ``gpu`` or ``tpu``.
        device_kind: the devices' own name, such as ``TPU v5 lite``.
        stand_in: True where CPU devices stand in for the hardware: the partitioner's decisions
            are real, but another backend fuses, combines and widens differently.
        mesh: size by axis name, major to minor; empty for a program of one device without a mesh.
        num_devices: that the program runs on.
        versions: of ``spmd``, ``jax`` and ``jaxlib``, by name.
        collectives: every exchange, in program order.
        cost: FLOPs and bytes of main memory.
        memory: per device; None where the backend tells nothing.
        reshards: arguments that the call moves first.
        arguments: what the program takes, and how each lies on the mesh.
        device_ids: of the mesh, in its order: the last axis varies fastest.
        excerpts: the source text around the lines of collectives and buffers.
        findings: what costs more than it has to: repeated work first, then the most bytes, whole
            arguments last. They are worked out when they are first asked for, as printing does.
        predicted: True where nothing was compiled: the collectives are those that the shardings
            demand, changed by the rules that `prediction` names; `cost` is zero and `memory` None.
        unread: text of the program that was not understood, so that collectives, cost and
            findings may lack what it does; None where all was.
        prediction: whose compiler a prediction is for, and by which of its rules; else empty.
        time: how long a call takes; None where the figures of the devices are not known, as those
            of CPUs, and no chip was named.

    `origins` takes no part in comparisons.
    """

    name: str
    backend: str
    device_kind: str
    stand_in: bool
    mesh: Mapping[str, int]
    num_devices: int
    versions: Mapping[str, str]
    collectives: tuple[Collective, ...]
    cost: Cost
    memory: Memory | None
    reshards: tuple[Reshard, ...] = ()
    arguments: tuple[Argument, ...] = ()
    device_ids: tuple[int, ...] = ()
    excerpts: tuple[Excerpt, ...] = ()
    findings: tuple[Finding, ...] = ()
    predicted: bool = False
    unread: Unread | None = None
    prediction: str = ""
    time: Time | None = None
    _origins: Later[Origins] = dataclasses.field(default=UNKNOWN, repr=False, compare=False)
    _findings_later: Later[tuple[Finding, ...]] = dataclasses.field(
        default=known(()), repr=False, compare=False
    )

    @property
    def origins(self) -> Origins:
        """Where the shardings of arguments, outputs and values on lines of collectives come from.

        It is worked out when it is first asked for, which `to_json`, `to_html` and pickling do.
        """
        return self._origins.get()

    @property
    def total(self) -> Total:
        """The sum over all collectives."""
        return sum(map(Total.of, self.collectives), Total.zeros())

    def totals(self, *by: str) -> dict[Any, Total]:
        """Sums the collectives by one or several of their properties.

        Bytes of what the compiler combined are divided among its parts, so that they add up to
        those of `total` whatever they are summed by. A collective of several lines is a site, with
        all its executions, of each of them.

        Args:
            by: of ``kind``, ``axis`` (the mesh axes), ``line`` (the source), ``module`` (the scopes
                of the name stack, numbers of layers as ``*``) and ``direction``.

        Returns:
            A `Total` by the value of the property, or by a tuple of the values of several; the
            most wire bytes first. What has no line is under None, what is in no scope under an
            empty string.

        Raises:
            ValueError: there is no such property.

        Example:
            report.totals("kind", "axis")["all-reduce", ("data",)].wire_bytes
        """
        return opened("sums").totals(self.collectives, *by)

    def __repr__(self) -> str:
        mesh = "".join(f", {name}={size}" for name, size in self.mesh.items())
        sent = show_bytes(self.total.wire_bytes)
        kind = ", predicted" if self.predicted else ""
        return (
            f"<Report of {self.name} on {self.backend}{mesh}{kind}: "
            f"{len(self.collectives)} collectives, {sent} on the wire>"
        )

    def __hash__(self) -> int:
        return hash((self.name, self.backend, *self.mesh.items(), self.collectives))

    def show(
        self, console: Console | None = None, *, all_frames: bool = False, limit: int | None = 40
    ) -> None:
        """Prints the report in colour, as wide as the terminal is.

        Args:
            console: a console of rich; None for one on the standard output.
            all_frames: show the whole stack of each collective, libraries included.
            limit: the most rows of collectives, those with most bytes on the wire; None for all.
        """
        self._print(console, all_frames=all_frames, limit=limit)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values, as ``spmd/inspection/report.schema.json`` describes them.

        Returns:
            A dictionary for `json.dumps`; `from_json` makes an equal report of it. Totals are in
            it for readers in other languages.
        """
        return opened("codec").encode(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """Makes a report of what `to_json` gave.

        Args:
            data: JSON values; totals and unknown keys in it are ignored.

        Returns:
            A report equal to the one that was written.

        Raises:
            ReportError: `data` is something else, of a newer version, or misses keys.
        """
        return opened("codec").decode(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report to a file.

        Args:
            path: ends in ``.json``, which `load` reads, or in ``.html``: a page for a browser that
                needs no other file and no network.

        Raises:
            ReportError: the ending is another one, or Jinja2 is missing for a page.
            OSError: the file cannot be written.
        """
        opened("codec").save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Reads a report that `save` wrote.

        Args:
            path: of the file.

        Returns:
            A report equal to the one that was written.

        Raises:
            ReportError: the file holds something else, is of a newer version, or misses keys.
            OSError: the file cannot be read.
        """
        return opened("codec").load(path)

    def trace_events(self) -> list[dict[str, Any]]:
        """The program order as trace events, whose durations are bytes on the wire and no times.

        Returns:
            Events of the Chrome trace format: one track per set of mesh axes, one event per
            collective, in program order. Where `time` is known, a second process has one layer of
            the schedule in microseconds: a track for the core, each memory and direction of links.
        """
        return opened("perfetto").trace_events(self)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes `trace_events` to a file that ui.perfetto.dev and chrome://tracing open.

        Args:
            path: of the file, usually ending in ``.json``.

        Raises:
            OSError: the file cannot be written.
        """
        opened("perfetto").save_trace(self, path)

    def scalars(self) -> dict[str, float | int]:
        """Figures under flat names, for loggers such as TensorBoard or Weights & Biases.

        Returns:
            Finite numbers by name, all per device and call. ``[axes]`` is the names of mesh axes
            joined by a plus sign, or ``none``.

            - ``collectives/total/`` followed by ``sites``, ``executions``, ``payload_bytes`` or
              ``wire_bytes``; the same under ``collectives/[kind]/[axes]/``, for the kinds and axes
              that occur, and under ``collectives/forward/``, ``backward`` and ``other``.
            - ``collectives/unread_lines``: lines of the program that were not understood; if it is
              not 0, collectives may be missing.
            - ``collectives/unknown_sites``: places that run an unknown number of times; if it is
              not 0, sums of the collectives are lower bounds.
            - ``cost/flops``, ``cost/hbm_bytes``, ``cost/unknown_loops``, ``cost/opaque_calls``;
              ``cost/flops_per_wire_byte`` and ``cost/wire_bytes_per_hbm_byte`` where their
              divisor is not 0; none of these where the report is predicted.
            - ``memory/arguments_bytes``, ``outputs``, ``temporaries``, ``aliased``, ``code`` and
              ``peak`` likewise, where the backend tells them.
            - ``reshards/arguments`` and ``reshards/bytes``: what the call moves first.
        """
        return opened("scalars").scalars(self)


def skipped_findings(report: Report) -> str:
    """Why a report has no findings on shardings, as a sentence; empty where it may have some."""
    if report.predicted or report.num_devices > 1:
        return ""
    return (
        "Findings on shardings were skipped: the program runs on one device, where nothing can be "
        "split. Compile it for a mesh of several to have them."
    )
