"""Cells of tables that several of those who draw in a terminal share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import itertools
from pathlib import PurePath

from rich.text import Text

from spmd.inspection.records.names import short_path
from spmd.inspection.records.report import Shape, Shapes, Source
from spmd.inspection.show import words
from spmd.inspection.show.layout import Cell, cell, clean

# Pairs that stay apart for most colour-blind readers; the names say the same without colour.
_AXIS_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")


def show_mesh(mesh: Mapping[str, int]) -> Text:
    """Mesh axes as one writes them for ``--mesh``, each in its own colour."""
    parts = (Text(f"{clean(name)}={n}", axis_style(name, mesh)) for name, n in mesh.items())
    return Text(", ").join(parts)


def axis_style(axis: str, mesh: Iterable[str]) -> str:
    """The colour of an axis, or of the one that it is a part of: the same in all sections."""
    number = words.number_of(axis, mesh)
    return "" if number is None else _AXIS_STYLES[number % len(_AXIS_STYLES)]


def axes_cell(mesh_axes: Sequence[str], mesh: Iterable[str]) -> Cell:
    """Mesh axes, each in its colour."""
    if not mesh_axes:
        return cell("none", style="dim")
    return (Text(", ").join(Text(clean(a), style=axis_style(a, mesh)) for a in mesh_axes),)


def source_cell(source: Source | None, *, prefix: str = "") -> Cell:
    """A line with its function, or as much of the path as there is room for."""
    if source is None:
        return cell(words.NO_LINE, style="dim")
    path = short_path(source.file)
    base = PurePath(path).name or path
    function = source.function
    # The function says more than the directories, which the tree of files has in full.
    spellings = [
        f"{path}:{source.line} {function}",
        f"{base}:{source.line} {function}",
        f"{base}:{source.line} {function.rpartition('.<locals>.')[2]}",
        f"{base}:{source.line}",
    ]
    return cell(*(f"{prefix}{spelling}".rstrip() for spelling in spellings))


def shapes_cell(shapes: Shapes) -> Cell:
    """Shapes before and after, in full and then in shorter and shorter spellings."""
    before, after = _counted(shapes.operands), _counted(shapes.results)
    if before == after:
        return cell(", ".join(after), *_shortened(after))
    full = f"{', '.join(before) or 'nothing'} -> {', '.join(after) or 'nothing'}"
    short = [" -> ".join(pair) for pair in zip(_shortened(before), _shortened(after), strict=True)]
    return cell(full, *short)


def _counted(shapes: Iterable[Shape]) -> list[str]:
    """Equal neighbours as one, with how many there are."""
    runs = ((shape, len(list(run))) for shape, run in itertools.groupby(shapes))
    return [f"{shape} x{count}" if count > 1 else str(shape) for shape, count in runs]


def _shortened(shapes: list[str]) -> list[str]:
    """The first shape and how many follow it."""
    if len(shapes) < 2:
        return ["".join(shapes) or "nothing"]
    return [f"{shapes[0]} + {len(shapes) - 1} more"]


def figure_cell(figure: str, style: str = "") -> Cell:
    """A figure, which stands out where it is unknown."""
    return cell(figure, style="yellow" if figure == "unknown" else style)


def show_ratio(a: int, b: int) -> str:
    """What `a` is in units of `b`, with three digits."""
    ratio = a / b
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
