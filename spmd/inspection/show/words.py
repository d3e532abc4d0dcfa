"""What is said of a record: sentences, figures and cells that a terminal and the page both draw.

All are plain values. A user's text stands in them as it is: whoever draws them escapes it. Signs
are those of ASCII, which the page sets as ``≥`` and ``→``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools
import operator
import sys
from typing import Any, TypeAlias

from spmd.inspection.records import origins
from spmd.inspection.records.arrays import Source
from spmd.inspection.records.diff import Delta, Diff, ModuleDelta
from spmd.inspection.records.names import short_path
from spmd.inspection.records.report import (
    DIRECTIONS,
    Collective,
    Finding,
    Report,
    Reshard,
    Total,
    axis_name,
)
from spmd.inspection.records.sizes import show_bytes, show_count, show_seconds, show_share
from spmd.inspection.records.sums import NO_MODULE as NO_MODULE
from spmd.inspection.records.sweep import SweepRow
from spmd.inspection.records.time import Time
from spmd.inspection.timing.chips import chip_of

Show: TypeAlias = Callable[[Any], str]
"""How a figure is written, such as `show_bytes`."""

TITLES = {
    "time": "Time of a call",
    "times": "Time of a call, by the number of devices",
    "totals": "Totals, per device and call",
    "modules": "Bytes on the wire, by module",
    "figures": "Cost, memory and time, per device",
    "reshards": "Arguments moved before the program",
}
"""What stands above a section of a report, of a difference or of both."""

NO_LINE = "no line"
ANOTHER_BACKEND = "another backend fuses and combines differently"
NO_TIME = "no time for CPU; give topology= or chip="
PREDICTED = "predicted, before compilation: compilers combine, move and replace exchanges"


# Figures


def plural(count: int, noun: str, many: str = "") -> str:
    """A count with its noun: ``1 device``, ``8 devices``."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def show_flops(count: int) -> str:
    """FLOPs in steps of a thousand: ``1.2 GFLOP``."""
    return f"{show_count(count)}FLOP"


def known(figure: float | None, show: Show = "{:,}".format) -> str:
    """A figure, or that the compiler does not tell it: it is never guessed."""
    return "unknown" if figure is None else show(figure)


def bounded(total: Total, figure: str) -> str:
    """A figure of a sum, said to be a lower bound where some of it is unknown."""
    if total.unknown and total.unknown == total.sites:
        return "unknown"
    return f">= {figure}" if total.unknown else figure


def wire(total: Total) -> str:
    """Bytes on the wire of a sum, said to be a lower bound where they are one."""
    return bounded(total, show_bytes(total.wire_bytes))


def signed(change: float, show: Show = show_bytes) -> str:
    """A difference with its sign: ``+1.5 MiB``."""
    return f"{'+' if change > 0 else '-' if change < 0 else ''}{show(abs(change))}"


# A report


def number_of(axis: str, mesh: Iterable[str]) -> int | None:
    """The place on the mesh of an axis, or of the axis that it is a part of: it has one colour."""
    places = {name: i for i, name in enumerate(mesh)}
    # An axis may have a colon in its own name.
    return places.get(axis, places.get(axis.partition(":")[0]))


def show_backend(report: Report) -> str:
    """The platform, and what its devices call themselves."""
    kind = report.device_kind
    return report.backend if kind in ("", report.backend) else f"{report.backend} ({kind})"


def why_none(report: Report) -> str:
    """Why there is no collective; empty where there may be some in text that was not understood."""
    if report.num_devices == 1:
        return "the program runs on one device"
    return "" if report.unread else "the devices exchange nothing while the program runs"


# Time


def headline(report: Report) -> str:
    """How long a call takes, how well that uses the chip, and what bounds it; or why not known."""
    if report.time is not None:
        return str(report.time)
    if report.stand_in or report.backend == "cpu":
        return NO_TIME
    if chip_of(report.device_kind):
        return "no time: the report was made without one, or is of several slices"
    kind = report.device_kind or report.backend
    return f"no time: the figures of {kind} are not known; give chip="


def time_parts(time: Time) -> list[tuple[str, tuple[str, ...] | None, float]]:
    """What a call is made of: a label, the mesh axes of what is exposed, and seconds."""
    parts: list[tuple[str, tuple[str, ...] | None, float]] = [
        ("compute", None, time.compute),
        ("memory", None, time.memory),
    ]
    parts += [
        (f"exposed over {', '.join(axes) or 'no axis'}", axes, seconds)
        for axes, seconds in time.exposed_by_axes.items()
    ]
    return [part for part in parts if part[2]]


def whole_axes(mesh_axes: Iterable[str]) -> tuple[str, ...]:
    """Mesh axes without the suffix that names a part."""
    return tuple(axis_name(axis) for axis in mesh_axes)


def costs(one: Finding) -> Iterator[tuple[str, str, str]]:
    """What a finding costs: the figure, and what it is of, in short and in full."""
    if one.flops:
        yield show_flops(one.flops), "repeated", "repeated by each device in a call"
    if one.measure:
        yield show_bytes(one.nbytes), *_MEASURES.get(one.measure, ("", ""))


_MEASURES = {
    "memory": ("of memory", "held by each device"),
    "wire": ("on the wire", "sent by each device in a call"),
}


def directions(report: Report) -> list[tuple[str, str]]:
    """Bytes on the wire by direction."""
    sums = report.totals("direction")
    order = (*DIRECTIONS, *sorted(sums.keys() - {*DIRECTIONS}))
    return [(name, wire(sums[name])) for name in order if name in sums]


# A collective


def alike(found: Iterable[Collective]) -> list[list[int]]:
    """Places of collectives, those together that differ in nothing that a row shows but their runs.

    A product that the compiler cut into steps exchanges once for each step, and layers that are
    written out exchange once for each layer.
    """
    rows: dict[object, list[int]] = {}
    for i, one in enumerate(found):
        rows.setdefault(_look(one), []).append(i)
    return [*rows.values()]


#: What a row shows of a collective as it is. Names and groups it does not show; its line and name
#: stack it shows in part, and numbers of runs add up where they are known.
_SHOWN = operator.attrgetter(
    *(
        field.name
        for field in dataclasses.fields(Collective)
        if field.name
        not in ("executions", "source", "op_name", "name", "groups", "frames", "parts")
    )
)


def _look(one: Collective) -> tuple[Any, ...]:
    place = one.source
    line = (place.file, place.line, place.function) if place else one.op_name
    parts = tuple(dataclasses.replace(part, frames=()) for part in one.parts)
    return (*_SHOWN(one), one.executions is None, line, parts)


def together(found: Sequence[Collective]) -> Collective:
    """Collectives that are alike as one, which runs as often as all of them."""
    runs, names = [one.executions for one in found], {one.op_name for one in found}
    known = None if None in runs else sum(run or 0 for run in runs)
    op_name = found[0].op_name if len(names) == 1 else ""
    return dataclasses.replace(found[0], executions=known, op_name=op_name)


def times_sign(count: int) -> str:
    """How many are meant: `` x5``; empty for one."""
    return f" x{count:,}" if count > 1 else ""


def ranking(one: Collective) -> int:
    """Wire bytes of a call, or those of one execution where the number of them is unknown."""
    total = one.total_wire_bytes
    return one.wire_bytes if total is None else total


def show_place(source: Source | None) -> str:
    """A line as its file and number; empty where there is none."""
    return f"{short_path(source.file)}:{source.line}" if source else ""


def marks(one: Collective) -> Iterator[tuple[str, bool]]:
    """What sets a collective apart, and whether it is a doubt about the figures."""
    if one.conditional:
        yield "in a branch", True
    if one.executions is None and one.in_loop:
        yield "in a loop of unknown length", True
    if said := scattered(one):
        yield said, True
    if one.is_async:
        yield "async", False
    if one.combined > 1:
        yield f"combined from {one.combined}", False


def scattered(one: Collective) -> str:
    """That hardware would reduce-scatter what CPUs sum and then slice; empty for all else."""
    if not one.sliced:
        return ""
    this = "this" if len(one.sliced) == one.combined else f"{len(one.sliced)} of {one.combined}"
    return f"hardware would reduce-scatter {this}: each device keeps its own part of the sum"


# Pictures


def more_sheets(count: int) -> str:
    """That so many sheets of a picture are left out."""
    return f"{count:,} more of these, not shown"


def ends(count: int, most: int) -> list[int | None]:
    """All places, or the first and the last of them with None for those between."""
    if count <= most:
        return [*range(count)]
    first = max(1, most - 2)
    return [*range(first), None, *range(count - min(1, most - 1), count)]


# A difference


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Collectives that are not the same in two reports; several that are alike stand for one.

    Attributes:
        mark: ``+`` for one report only, ``-`` for the other, ``~`` for both.
        sides: that of one report, or that of the first and that of the second.
        count: how many there are.
    """

    mark: str
    sides: tuple[Collective, ...]
    count: int


def compared(diff: Diff) -> Iterator[Compared]:
    """Collectives that are not the same in both."""
    marked = [("+", (one,)) for one in diff.added] + [("-", (one,)) for one in diff.removed]
    rows: dict[tuple[Any, ...], list[tuple[Collective, ...]]] = {}
    for mark, sides in [*marked, *(("~", (pair.a, pair.b)) for pair in diff.changed)]:
        rows.setdefault((mark, *map(_look, sides)), []).append(sides)
    for (mark, *_), found in rows.items():
        sides = tuple(together(side) for side in zip(*found, strict=True))
        yield Compared(mark=mark, sides=sides, count=len(found))


def total_cells(a: Total, b: Total, change: Callable[[int, int], str]) -> tuple[str, ...]:
    """Sites and bytes on the wire of two sums, and how the bytes changed."""
    sites = " -> ".join(dict.fromkeys(f"{total.sites:,}" for total in (a, b)))
    both_known = a == b or not (a.unknown or b.unknown)
    changed = change(a.wire_bytes, b.wire_bytes) if both_known else "unknown"
    return sites, wire(a), wire(b), changed


def modules(diff: Diff) -> list[ModuleDelta]:
    """Sums that differ by module; none where no collective is in a module."""
    differing = [delta for delta in diff.modules if delta.a != delta.b]
    return differing if any(delta.module for delta in differing) else []


def figures(diff: Diff, flops: Show, count: Show) -> Iterator[tuple[Delta, Show]]:
    """Figures of cost and of memory that differ, and how each is written."""
    shows = {"flops": flops, "hbm_bytes": show_bytes}
    yield from ((d, shows.get(d.name, count)) for d in diff.cost if d.a != d.b)
    yield from ((d, show_bytes) for d in diff.memory if d.a != d.b)


def time_figures(diff: Diff) -> Iterator[tuple[Delta, Show]]:
    """Figures of time that differ, and how each is written."""
    yield from (
        (d, show_share if d.name in _SHARES else show_seconds) for d in diff.time if d.a != d.b
    )


_SHARES = ("mfu", "hfu")


def time_change(diff: Diff) -> str:
    """``248 ms -> 230 ms a call (-7.3%); HFU 54% -> 58%``; empty where neither time is known."""
    found = {one.name: one for one in diff.time}
    if "seconds" not in found:
        return ""
    time = found["seconds"]
    change = f" ({time.change / time.a:+.1%})" if time.a and time.change else ""
    said = [f"{_sides(time, show_seconds)} a call{change}"]
    for name in _SHARES:
        if (used := found.get(name)) and (used.a, used.b) != (None, None):
            said.append(f"{name.upper()} {_sides(used, show_share)}")
    return "; ".join(said)


def show_points(share: float) -> str:
    """A difference of two shares: ``5.5 points``, of a hundred."""
    return f"{100 * share:.1f} points"


def change_of(delta: Delta, show: Show) -> Show:
    """How the change of a figure is written."""
    return show_points if delta.name in _SHARES else show


def _sides(delta: Delta, show: Show) -> str:
    return " -> ".join(dict.fromkeys(known(side, show) for side in (delta.a, delta.b)))


def reshards(diff: Diff) -> list[tuple[str, Reshard]]:
    """Arguments that one report moves and the other does not, marked."""
    added = [("+", one) for one in diff.reshards_added]
    return added + [("-", one) for one in diff.reshards_removed]


# A sweep


def refused(row: SweepRow) -> str:
    """That a program does not fit, or that not all of it was understood; empty for others."""
    if row.unread:
        return str(row.unread)
    if row.report:
        return ""
    needed = "more" if row.needed is None else show_bytes(row.needed)
    have = "" if row.capacity is None else f" of {show_bytes(row.capacity)}"
    return f"does not fit: the compiler needs {needed}{have}"


# Origins


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """A piece of a sentence, and the mesh axis that it names, if it names one."""

    text: str
    axis: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One line of what is said.

    Attributes:
        words: one after another, with nothing in between.
        source: the user's line that stands behind them.
        depth: 1 for what is said of the value, 2 for what belongs to the sentence before.
        quiet: True for what is of less weight.
    """

    words: tuple[Word, ...]
    source: Source | None = None
    depth: int = 1
    quiet: bool = False


def sentences(
    value: origins.ValueOrigins, *, steps: int = sys.maxsize, conflicts: int = sys.maxsize
) -> Iterator[Sentence]:
    """What is known of a value: origins, dimensions that are whole, conflicts.

    Of more than `steps` of an axis, the first and the last half of as many are told; of more than
    `conflicts`, the nearest. What is left out is counted.
    """
    for origin in value.origins:
        yield _origin(value, origin)
        yield from _steps(origin.steps, steps)
    yield from _whole(value)
    for conflict in value.conflicts[:conflicts]:
        yield from _conflict(conflict)
    if more := len(value.conflicts[conflicts:]):
        yield Sentence(words=(Word(f"and {more:,} more did not get through"),), quiet=True)


def show_array(dtype: str, shape: Iterable[int]) -> str:
    """Element type and dimensions: ``f32[8,16]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def spec_words(spec: origins.Spec) -> tuple[Word, ...]:
    """Axes by dimension, as a PartitionSpec is written."""
    comma = Word(", ")
    entries = [_entry(axes) for axes in spec]
    inner = [word for entry in entries for word in (comma, *entry)][1:]
    return (Word("P("), *inner, Word(")"))


def _entry(axes: tuple[str, ...]) -> tuple[Word, ...]:
    if not axes:
        return (Word("None"),)
    names = [Word(f"'{axis}'", axis) for axis in axes]
    if len(names) == 1:
        return tuple(names)
    joined = itertools.chain.from_iterable((Word(", "), name) for name in names)
    return (Word("("), *[*joined][1:], Word(")"))


def annotation_words(one: origins.Annotation | None) -> tuple[Word, ...]:
    """What the user wrote, and where."""
    if one is None:
        return (Word("an annotation that the passes do not name"),)
    # An annotation is a quotation: only axes of the value itself are told apart.
    spec = Word("".join(word.text for word in spec_words(one.spec)))
    if one.name:
        return Word(f"{one.kind} {one.name} "), spec
    at = f" at {show_place(one.source)}" if one.source else ""
    return Word(f"{one.kind} "), spec, Word(at)


_ARROWS = {"forward": "->", "backward": "<-", "sideways": "<>"}


def _origin(value: origins.ValueOrigins, origin: origins.Origin) -> Sentence:
    own = not origin.steps and origin.annotation == value.annotation
    said = "its own annotation, " if own else "from "
    priority = "" if origin.priority is None else f", priority {origin.priority}"
    return Sentence(
        words=(
            Word(origin.axis, origin.axis),
            Word(f" on dimension {origin.dimension}: {said}"),
            *annotation_words(origin.annotation),
            Word(priority),
        )
    )


def _steps(steps: tuple[origins.Step, ...], most: int) -> Iterator[Sentence]:
    if len(steps) <= most:
        yield from map(_step, steps)
        return
    half = most // 2
    yield from map(_step, steps[:half])
    between = f"and {len(steps) - 2 * half:,} operations in between"
    yield Sentence(words=(Word(between),), depth=2, quiet=True)
    yield from map(_step, steps[-half:])


def _step(step: origins.Step) -> Sentence:
    reached = "" if step.value == step.operation else f" to {step.value}"
    text = f"{step.operation}{reached} {show_array('', step.shape)}, dimension {step.dimension}"
    return Sentence(
        words=(Word(f"{_ARROWS.get(step.way, step.way)} {text}"),), source=step.source, depth=2
    )


def _whole(value: origins.ValueOrigins) -> Iterator[Sentence]:
    """What is to be said of dimensions that are not split and met nothing."""
    if not value.shape:
        yield Sentence(words=(Word("a scalar has no dimension to split"),))
        return
    met = {conflict.dimension for conflict in value.conflicts}
    quiet = [d for d, axes in enumerate(value.spec) if not axes and d not in met]
    if quiet:
        noun = "dimension" if len(quiet) == 1 else "dimensions"
        text = f"{noun} {', '.join(map(str, quiet))}: not split, and no axis was kept out"
        yield Sentence(words=(Word(text),), quiet=True)


def _conflict(one: origins.Conflict) -> Iterator[Sentence]:
    reason = origins.REASONS.get(one.reason, one.reason)
    head = Word(f" did not reach dimension {one.dimension}: {reason}")
    yield Sentence(words=(Word(one.axis, one.axis), head))
    away = f"{plural(one.distance, 'operation')} away" if one.distance else "at this value"
    met = Word(f"met at {one.operation}, {away}")
    yield Sentence(words=(met,), source=one.source, depth=2)
    sides = (("lost  ", one.lost, True), ("won   ", one.won, False), ("and   ", one.against, False))
    for said, annotation, always in sides:
        if always or annotation is not None:
            yield Sentence(words=(Word(said), *annotation_words(annotation)), depth=2)
