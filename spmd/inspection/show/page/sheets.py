"""What the HTML of a picture of shards shows, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.inspection.records.pictures import (
    Picture,
    Pictures,
    Shard,
    Sheet,
    directions,
    heading,
    sheets,
    show_devices,
    summary,
)

_COLORS = 8
_CELLS, _SHEETS = 64, 32
"""The most rows and columns of a sheet, and the most sheets."""


def view(picture: Picture) -> dict[str, Any]:
    """Everything that the template draws."""
    found = sheets(picture)
    numbers = {shard: i for i, shard in enumerate(picture.shards)}
    hidden = len(found) - _SHEETS
    more = (f"{hidden:,} more of these, not shown.",) if hidden > 0 else ()
    return {
        "title": f"{picture.dtype}[{','.join(map(str, picture.shape))}]",
        "heading": heading(picture),
        "summary": "; ".join(filter(None, (summary(picture), directions(picture))))
        if picture.shards
        else "",
        "sheets": [_sheet(picture, sheet, numbers) for sheet in found[:_SHEETS]],
        "notes": (*more, *picture.notes),
        "data": {"details": [], "frames": [], "mesh": [], "devices": [], "arguments": []},
    }


def view_of_tree(many: Pictures) -> dict[str, Any]:
    """Everything that the template of a tree draws."""
    views = [(path, view(picture)) for path, picture in many.drawn]
    count = len(many.pictures)
    return {
        "title": f"{count:,} array{'s' * (count != 1)}",
        "pictures": views,
        "rest": many.rest,
        "data": {"details": [], "frames": [], "mesh": [], "devices": [], "arguments": []},
    }


def _sheet(picture: Picture, sheet: Sheet, numbers: Mapping[Shard, int]) -> dict[str, Any]:
    rows, columns = _places(len(sheet.rows)), _places(len(sheet.columns))
    labels = [_label(sheet.columns, column) for column in columns]
    return {
        "title": sheet.title,
        "columns": labels if any(sheet.columns) else [],
        "labelled": any(sheet.rows),
        "rows": [
            {
                "label": _label(sheet.rows, row),
                "cells": [_cell(picture, sheet, row, column, numbers) for column in columns],
            }
            for row in rows
        ],
    }


def _places(count: int) -> list[int | None]:
    if count <= _CELLS:
        return [*range(count)]
    return [*range(_CELLS - 2), None, count - 1]


def _label(labels: Sequence[str], place: int | None) -> str:
    return "…" if place is None else labels[place]


def _cell(
    picture: Picture,
    sheet: Sheet,
    row: int | None,
    column: int | None,
    numbers: Mapping[Shard, int],
) -> dict[str, str]:
    if row is None or column is None:
        return {"class": "none", "text": "…", "title": ""}
    shard = sheet.cells.get((row, column))
    if shard is None:
        return {"class": "none", "text": "", "title": ""}
    index = ", ".join(f"{start}:{stop}" for start, stop in shard.index)
    many = f"{picture.platform} {show_devices(shard.devices, most=64)}".strip()
    color = f"s{numbers[shard] % _COLORS}" if all(shard.shape) else "none"
    return {"class": color, "text": show_devices(shard.devices), "title": f"[{index}] on {many}"}
