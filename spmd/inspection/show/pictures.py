"""Draws which device holds which part of an array in a terminal. All facts are in the record."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from spmd.inspection.records import pictures
from spmd.inspection.show.layout import Indented, clean
from spmd.inspection.show.words import ends, more_sheets

# Pairs that stay apart for most colour-blind readers; the devices say the same without colour.
_STYLES = (
    "black on cyan",
    "black on yellow",
    "white on blue",
    "black on green",
    "white on magenta",
    "black on white",
)
_ROWS, _SHEETS = 16, 6


def render_picture(picture: pictures.Picture) -> RenderableType:
    """The picture with its heading, the sizes of shards, and notes."""
    parts: list[RenderableType] = [Text(clean(pictures.heading(picture)), style="bold")]
    if picture.shards:
        parts.append(Text(pictures.summary(picture)))
    found = pictures.sheets(picture)
    for sheet in found[:_SHEETS]:
        parts += [Text(sheet.title)] if sheet.title else []
        parts.append(_Drawn(picture, sheet))
    if hidden := len(found) - _SHEETS:
        parts += [Text(more_sheets(hidden), style="dim")] * (hidden > 0)
    parts += [Text(clean(note), style="dim") for note in picture.notes]
    return Indented(Group(*parts), by=0)


def render_pictures(many: pictures.Pictures) -> RenderableType:
    """The pictures of a tree, each under its path."""
    parts: list[RenderableType] = []
    for path, picture in many.drawn:
        parts += [Text(clean(path), style="bold"), render_picture(picture)]
    if many.rest:
        parts.append(Text(many.rest, style="dim"))
    return Group(*parts)


class _Drawn:
    """One sheet, with as many columns as there is room for."""

    def __init__(self, picture: pictures.Picture, sheet: pictures.Sheet):
        self.picture, self.sheet = picture, sheet
        self.number = {shard: i for i, shard in enumerate(picture.shards)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sheet = self.sheet
        label = max(map(len, sheet.rows)) + 3
        texts = [*map(self._text, sheet.cells.values()), *sheet.columns]
        width = 5 + max(map(len, texts))
        rows = ends(len(sheet.rows), _ROWS)
        columns = ends(len(sheet.columns), max(1, (options.max_width - label) // width))
        # Logs get no signs that an editor may lack, as everywhere in `str` of a record.
        plain = console.color_system is None or options.ascii_only
        table = Table(box=box.ASCII2 if plain else box.SQUARE, show_lines=True, show_header=False)
        labelled = any(sheet.rows)
        for _ in range(len(columns) + labelled):
            table.add_column(justify="center", no_wrap=True, overflow="ellipsis")
        if any(sheet.columns):
            table.add_row(*[Text()] * labelled, *(_label(sheet.columns, i) for i in columns))
        for row in rows:
            head = [_label(sheet.rows, row)] * labelled
            table.add_row(*head, *(self._cell(row, column) for column in columns))
        yield table

    def _cell(self, row: int | None, column: int | None) -> Text:
        if row is None or column is None:
            return Text("...", style="dim")
        shard = self.sheet.cells.get((row, column))
        if shard is None:
            return Text()
        style = _STYLES[self.number[shard] % len(_STYLES)]
        return Text(f" {self._text(shard)} ", style=style if all(shard.shape) else "dim")

    def _text(self, shard: pictures.Shard) -> str:
        devices = pictures.show_devices(shard.devices)
        return f"{self.picture.platform} {devices}".strip() if all(shard.shape) else devices


def _label(labels: Sequence[str], place: int | None) -> Text:
    return Text("..." if place is None else clean(labels[place]), style="dim")
