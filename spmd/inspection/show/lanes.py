"""Draws the time of a call in a terminal or a log: a bar of its parts, and a layer as lanes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import itertools

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from spmd.inspection.records.sizes import show_seconds, show_share
from spmd.inspection.records.time import Event, Time
from spmd.inspection.show import times, words
from spmd.inspection.show.cells import axis_style, source_cell
from spmd.inspection.show.layout import Cell, Column, Flow, Grid, Indented, Row, cell, clean

_SIGNS = {"compute": "█", "memory": "▒", "exposed": "░", "exchange": "█"}
"""What stands for each kind of event; without colour they are told apart all the same."""
_LONGEST, _SHORTEST = 100, 10

_PARTS = (Column(), Column(right=True), Column(right=True, rank=1), Column(rank=2))
_LANES = (Column(title="lane"), Column(title="busy", right=True), Column(title="over"))


def render_time(time: Time, waits: Sequence[times.Wait], mesh: Mapping[str, int]) -> RenderableType:
    """One bar for a call, what its parts are, what is not in the figures, and a layer as lanes."""
    rows = [_part_row(*part, time, waits, mesh) for part in words.time_parts(time)]
    said_of = [f"uncertain: {text}" for text in time.unknown[: times.DOUBTS]]
    said_of += [f"uncertain: {n} more" for n in [len(time.unknown) - times.DOUBTS] if n > 0]
    doubts = [Flow(Text(clean(text), style="yellow")) for text in said_of]
    said = [Flow(Text(times.beside(time)))] if times.beside(time) else []
    table = Grid(_PARTS, rows)
    body = Group(Stack(time, mesh), table, *said, explained(), *doubts, *_layer(time, mesh))
    return Indented(body, by=0)


def _part_row(
    label: str,
    axes: tuple[str, ...] | None,
    seconds: float,
    time: Time,
    waits: Iterable[times.Wait],
    mesh: Mapping[str, int],
) -> Row:
    sign = Text.assemble((_sign(label), _style(label, axes, mesh)), f" {clean(label)}")
    share = show_share(seconds / time.seconds)
    lines = [one for one in waits if one.mesh_axes == axes]
    return Row(cells=((sign,), cell(show_seconds(seconds)), cell(share), _lines_cell(lines)))


def _lines_cell(waits: Sequence[times.Wait]) -> Cell:
    """The line that waits longest, and how many others do."""
    if not waits:
        return cell("")
    more = f" + {words.plural(len(waits) - 1, 'line')}" if len(waits) > 1 else ""
    return tuple(Text(f"{one.plain}{more}", one.style) for one in source_cell(waits[0].source))


def _sign(label: str) -> str:
    return _SIGNS[label.partition(" ")[0]]


def _style(label: str, axes: Sequence[str] | None, mesh: Iterable[str]) -> str:
    if axes:
        return axis_style(axes[0], mesh)
    return "" if label == "compute" else "dim"


class Stack:
    """One bar of the parts of a call, as long as there is room."""

    def __init__(self, time: Time, mesh: Mapping[str, int]):
        self.time = time
        self.mesh = mesh

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield stack(self.time, self.mesh, min(options.max_width, _LONGEST))


def stack(time: Time, mesh: Mapping[str, int], width: int) -> Text:
    """The parts of a call beside each other, each as long as its share; what is not 0 is seen."""
    parts = words.time_parts(time)
    sizes = stacked([seconds for _, _, seconds in parts], width)
    pieces = (
        (_sign(label) * size, _style(label, axes, mesh))
        for (label, axes, _), size in zip(parts, sizes, strict=True)
    )
    return Text.assemble(*pieces, no_wrap=True, overflow="crop")


def explained() -> Flow:
    """What the parts of a call are."""
    return Flow(*(Text(f"{name}: {what}", "dim") for name, what in times.EXPLAINED.items()))


def legend() -> Flow:
    """Which sign stands for which part of a call."""
    kinds = ("compute", "memory", "exposed")
    return Flow(*(Text(f"{_SIGNS[kind]} {kind}", "dim") for kind in kinds))


def stacked(shares: Sequence[float], width: int) -> list[int]:
    """Whole numbers in proportion to shares that add up to a width, none below 1 if they can."""
    whole = sum(shares)
    sizes = [max(1, round(width * share / whole)) for share in shares] if whole else []
    for _ in range(abs(sum(sizes) - width) if sizes else 0):
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[longest] += 1 if sum(sizes) < width else -1
    return sizes


# Lanes


def _layer(time: Time, mesh: Mapping[str, int]) -> Iterator[RenderableType]:
    if found := times.lanes(time):
        yield Text()
        yield Flow(Text(times.layer_title(time), "bold"))
        yield Lanes(found, time, mesh)


class Lanes:
    """One layer of the schedule, from left to right: a strip for each lane."""

    def __init__(self, lanes: Sequence[times.LaneOf], time: Time, mesh: Mapping[str, int]):
        self.lanes = lanes
        self.time = time
        self.mesh = mesh

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heads = [
            (cell(one.title), cell(one.busy), _over(one.mesh_axes, self.mesh)) for one in self.lanes
        ]
        taken = sum(
            2 + max(len(column.title), *(row[i][-1].cell_len for row in heads))
            for i, column in enumerate(_LANES)
        )
        width = min(options.max_width - taken, _LONGEST)
        if width < _SHORTEST:
            yield Grid(_LANES, (Row(cells=cells) for cells in heads))
            return
        strips = (_strip(one.events, times.end_of(self.time.layer), width, self.mesh)
                  for one in self.lanes)  # fmt: skip
        rows = [Row(cells=(*cells, (s,))) for cells, s in zip(heads, strips, strict=True)]
        rows.append(Row(cells=(*(cell(""),) * 3, cell(self._ruler(width), style="dim"))))
        yield Grid((*_LANES, Column(ornament=True)), rows)

    def _ruler(self, width: int) -> str:
        first, *_, last = times.ticks(self.time)
        return f"{first}{last:>{width - len(first)}}"


def _over(found: Sequence[tuple[str, ...]], mesh: Iterable[str]) -> Cell:
    """The mesh axes whose exchanges use a lane; how many, where they are too many to name."""
    axes = dict.fromkeys(axis for one in found for axis in one)
    names = Text(", ").join(Text(clean(axis), axis_style(axis, mesh)) for axis in axes)
    return (names,) if names.cell_len <= 24 else cell(words.plural(len(axes), "axis", "axes"))


def _strip(events: Iterable[Event], span: float, width: int, mesh: Mapping[str, int]) -> Text:
    """A lane in signs: what takes most of each place, where that is half of it at least."""
    places: list[dict[tuple[str, str], float]] = [{} for _ in range(width)]
    for one in events:
        style = axis_style(one.mesh_axes[0], mesh) if one.mesh_axes else ""
        look = _SIGNS.get(one.kind, " "), style or ("dim" if one.kind == "memory" else "")
        start, end = (width * at / span for at in (one.start, one.start + one.seconds))
        for i in range(int(start), min(width, int(end) + 1)):
            inside = max(0.0, min(end, i + 1) - max(start, i))
            places[i][look] = places[i].get(look, 0.0) + inside
    runs = itertools.groupby(map(_most, places))
    return Text.assemble(*((sign * len([*run]), style) for (sign, style), run in runs))


def _most(place: Mapping[tuple[str, str], float]) -> tuple[str, str]:
    look = max(place, key=place.__getitem__, default=(" ", ""))
    return look if sum(place.values()) >= 0.5 else (" ", "")
