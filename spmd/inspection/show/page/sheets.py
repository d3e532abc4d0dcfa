"""What the HTML of pictures of shards shows, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.inspection.records.pictures import (
    Picture,
    Pictures,
    Shard,
    Sheet,
    heading,
    sheets,
    show_devices,
    summary,
)
from spmd.inspection.show.words import ends, more_sheets, plural, show_array

_COLORS = 8
_CELLS, _SHEETS = 64, 32
"""The most rows and columns of a sheet, and the most sheets."""


def view(shown: Picture | Pictures) -> dict[str, Any]:
    """Everything that the template draws: one picture without a name, or those of a tree."""
    if isinstance(shown, Picture):
        title = show_array(shown.dtype, shown.shape)
        return {"title": title, "pictures": [("", _picture(shown))], "rest": ""}
    pictures = [(path, _picture(picture)) for path, picture in shown.drawn]
    count = plural(len(shown.pictures), "array")
    return {"title": count, "pictures": pictures, "rest": shown.rest}


def _picture(picture: Picture) -> dict[str, Any]:
    found = sheets(picture)
    numbers = {shard: i for i, shard in enumerate(picture.shards)}
    hidden = len(found) - _SHEETS
    more = (f"{more_sheets(hidden)}.",) if hidden > 0 else ()
    return {
        "heading": heading(picture),
        "summary": summary(picture),
        "sheets": [_sheet(picture, sheet, numbers) for sheet in found[:_SHEETS]],
        "notes": (*more, *picture.notes),
    }


def _sheet(picture: Picture, sheet: Sheet, numbers: Mapping[Shard, int]) -> dict[str, Any]:
    rows, columns = ends(len(sheet.rows), _CELLS), ends(len(sheet.columns), _CELLS)
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
