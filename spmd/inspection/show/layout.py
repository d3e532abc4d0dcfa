"""Lays out rows of text so that no number is ever cut and no blank trails, at any width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import functools
import io
import re
from typing import TypeAlias

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from spmd.inspection.show.words import plural

_GAP = 2
_BELOW = 4
# Each sign of ours has a substitute of the same width, so that layout does not depend on it.
_SUBSTITUTES = str.maketrans({"█": "#", "▒": "=", "░": ".", "─": "-", "│": "|", "├": "|", "└": "`"})
_FOREIGN = re.compile(r"[^\x00-\x7f]+")

Cell: TypeAlias = tuple[Text, ...]
"""What stands in one place of a table, in one or several spellings, the longest first."""


def clean(text: str) -> str:
    """A user's text with every character that is not printable written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cell(*spellings: object, style: str = "") -> Cell:
    """A cell of one or several spellings in one style."""
    return tuple(Text(clean(str(one)), style=style) for one in spellings)


def bar(count: float, most: float, width: int = 20) -> str:
    """A bar as long as the share of `count` in `most`; anything above 0 can be seen."""
    return "█" * max(round(width * count / most), 1) if count > 0 else ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """How one column of a `Grid` is set.

    Attributes:
        title: stands above it; empty for none.
        right: True for numbers.
        rank: where a line is too short, columns of the highest rank leave it first, the last of
            them first, and stand below their row; those of rank 0 stay as long as any table does.
        label: stands before the value where it stands below its row; values without one come
            first there.
        ornament: True for what is left out, instead of standing below its row.
    """

    title: str = ""
    right: bool = False
    rank: int = 0
    label: str = ""
    ornament: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a `Grid`.

    Attributes:
        cells: one for each column.
        notes: stand below the row, as many on a line as fit.
        lines: stand below the notes, each on a line of its own.
        style: of the row as a whole.
        rule: True for a line above it, as above a sum.
    """

    cells: tuple[Cell, ...]
    notes: tuple[Text, ...] = ()
    lines: tuple[Text, ...] = ()
    style: str = ""
    rule: bool = False


class Grid:
    """A table that fits any width: cells take shorter spellings, then columns move below."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[Row]):
        self.columns = tuple(columns)
        self.rows = tuple(rows)
        self._bounds = [self._bound(i) for i in range(len(self.columns))]

    def _bound(self, i: int) -> tuple[int, int]:
        """The least width that a column needs, and the width beyond which it gains nothing."""
        least = most = cell_len(self.columns[i].title)
        for row in self.rows:
            widths = [one.cell_len for one in row.cells[i]]
            least, most = max(least, min(widths)), max(most, max(widths))
        return least, most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        if not widths:
            for row in self.rows:
                yield from self._stacked(row, options.max_width)
            return
        rule = [self._rule(i, width) for i, width in widths.items()]
        if any(self.columns[i].title for i in widths):
            yield self._line([Text(self.columns[i].title, "bold") for i in widths], widths)
            yield self._line(rule, widths)
        for row in self.rows:
            if row.rule:
                yield self._line(rule, widths)
            yield self._line([_widest(row.cells[i], widths[i]) for i in widths], widths, row.style)
            yield from self._below(row, widths, options.max_width)

    def _widths(self, room: int) -> dict[int, int]:
        """The width of each column that stands in the table; empty where no table fits."""
        shown = list(range(len(self.columns)))
        while shown:
            spare = room - _GAP * (len(shown) - 1) - sum(self._bounds[i][0] for i in shown)
            if spare >= 0:
                return self._share(shown, spare)
            last = max(shown, key=lambda i: (self.columns[i].rank, i))
            if self.columns[last].rank == 0:
                break
            shown.remove(last)
        return {}

    def _share(self, shown: list[int], spare: int) -> dict[int, int]:
        """Gives what is left of a line to the columns, first to those that need least of it."""
        widths = {i: self._bounds[i][0] for i in shown}
        wishes = sorted(shown, key=lambda i: self._bounds[i][1] - self._bounds[i][0])
        for i in wishes:
            width = self._used(i, widths[i] + spare)
            spare -= width - widths[i]
            widths[i] = width
        return widths

    def _used(self, i: int, width: int) -> int:
        """What a column needs of a width, given the spellings that fit."""
        widest = (_widest(row.cells[i], width).cell_len for row in self.rows)
        return max(cell_len(self.columns[i].title), *widest, 0)

    def _rule(self, i: int, width: int) -> Text:
        untitled = not self.columns[i].title and any(column.title for column in self.columns)
        return Text("" if untitled or self.columns[i].ornament else "─" * width, "dim")

    def _line(self, texts: list[Text], widths: dict[int, int], style: str = "") -> Text:
        line = Text(style=style, no_wrap=True, overflow="ignore")
        for place, (i, width) in enumerate(widths.items()):
            blanks = " " * (width - texts[place].cell_len)
            line.append(" " * (_GAP * (place > 0)) + blanks * self.columns[i].right)
            line.append_text(texts[place])
            line.append(blanks * (not self.columns[i].right))
        line.rstrip()
        return line

    def _below(self, row: Row, widths: dict[int, int], room: int) -> Iterator[Text]:
        moved = [i for i in range(len(self.columns)) if i not in widths]
        moved.sort(key=lambda i: (bool(self.columns[i].label), self.columns[i].rank))
        notes = [*self._labelled(row, moved, room), *row.notes]
        yield from flow(notes, room, indent=_BELOW)
        for line in row.lines:
            yield from flow([line], room, indent=_BELOW)

    def _labelled(self, row: Row, moved: Iterable[int], room: int) -> Iterator[Text]:
        for i in moved:
            column = self.columns[i]
            text = _widest(row.cells[i], room - _BELOW)
            if text.plain and not column.ornament:
                yield Text.assemble(f"{column.label} " if column.label else "", text)

    def _stacked(self, row: Row, room: int) -> Iterator[Text]:
        """A row where no table fits: what names it, and below that everything else."""
        names = [i for i, c in enumerate(self.columns) if not (c.rank or c.label or c.ornament)]
        heading = Text("  ").join(_widest(row.cells[i], room) for i in names)
        yield from flow([heading], room)
        yield from self._below(row, dict.fromkeys(names, 0), room)


def _widest(spellings: Cell, room: int) -> Text:
    """The longest spelling that fits, else the shortest."""
    return next((one for one in spellings if one.cell_len <= room), spellings[-1])


def flow(parts: Iterable[Text], room: int, *, indent: int = 0) -> Iterator[Text]:
    """The lines of parts with semicolons between them, each line as `room` cells wide at most.

    Lines are broken between parts; only a part that is longer than a line is broken itself.
    """
    indent = min(indent, room // 2)
    line = Text()
    for part in filter(None, parts):
        # The semicolon that may follow this part has to fit as well.
        if line and line.cell_len + 2 + part.cell_len + 1 > room - indent:
            line.append(";")
            yield from _folded(line, room, indent)
            line = Text()
        line = Text.assemble(line, "; ", part) if line else part.copy()
    if line:
        yield from _folded(line, room, indent)


def _folded(line: Text, room: int, indent: int) -> Iterator[Text]:
    if line.cell_len <= room - indent:
        yield _shifted(line, indent)
        return
    for piece in line.wrap(_wrapper(), max(room - indent, 1), overflow="fold"):
        piece.rstrip()
        yield _shifted(piece, indent)


@functools.cache
def _wrapper() -> Console:
    """What rich asks for to wrap a text, and does not draw on."""
    return Console(file=io.StringIO(), width=80, color_system=None, legacy_windows=False)


def _shifted(line: Text, indent: int) -> Text:
    shifted = Text.assemble(" " * indent, line)
    shifted.no_wrap, shifted.overflow = True, "ignore"
    return shifted


class Flow:
    """Parts of a sentence, with lines broken between them."""

    def __init__(self, *parts: Text):
        self.parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from flow(self.parts, options.max_width)


def sections(
    head: RenderableType, bodies: Iterable[tuple[str, RenderableType | None]]
) -> RenderableType:
    """Bodies under their titles, and first what is said of the whole."""
    parts = [head]
    for title, body in bodies:
        if body is not None:
            parts += [Text(), Text(title, style="bold"), Indented(body)]
    return Indented(Group(*parts), by=0)


def not_shown(count: int, noun: str, more: str = "") -> list[Flow]:
    """That so many rows are left out; nothing where none is."""
    text = f"{plural(count, f'more {noun}')}{more}, not shown"
    return [Flow(Text(text, style="dim"))] * bool(count)


class Indented:
    """Blanks before each line and none after it: a log keeps no trailing blanks.

    In a terminal that shows ASCII only, our own signs are replaced by ASCII, and the characters
    of others by question marks.
    """

    def __init__(self, body: RenderableType, by: int = 2):
        self.body = body
        self.by = by

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.update(width=max(options.max_width - self.by, 1))
        for line in console.render_lines(self.body, inner, pad=False):
            line = _stripped(line)
            if line and self.by:
                yield Segment(" " * self.by)
            for segment in line:
                yield _ascii(segment) if options.ascii_only else segment
            yield Segment.line()


def _stripped(line: list[Segment]) -> list[Segment]:
    while line and not line[-1].text.strip() and not _background(line[-1].style):
        line.pop()
    if line and not _background(line[-1].style):
        line[-1] = line[-1]._replace(text=line[-1].text.rstrip())
    return line


def _background(style: Style | None) -> bool:
    return style is not None and style.bgcolor is not None


def _ascii(segment: Segment) -> Segment:
    text = segment.text.translate(_SUBSTITUTES)
    return segment._replace(text=_FOREIGN.sub(lambda run: "?" * cell_len(run[0]), text))


def plain(body: RenderableType, *, width: int = 100) -> str:
    """What is drawn, as text for a log: without colours, control characters or signs of ours."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, color_system=None, force_jupyter=False, legacy_windows=False
    )
    console.print(body)
    return file.getvalue().translate(_SUBSTITUTES).rstrip("\n")
