"""What the page of two reports' differences shows, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmd.inspection.records.diff import Delta, Diff, TotalDelta
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.show import words
from spmd.inspection.show.page.view import count, lines_of, place_name, show_shapes, typeset

_MARKS = {"+": "added", "-": "removed", "~": "changed"}


def view(diff: Diff) -> dict[str, Any]:
    """Everything that the template draws."""
    rows = [*map(_row, words.compared(diff))]
    everything = TotalDelta(kind="all", mesh_axes=(), a=diff.total[0], b=diff.total[1])
    return {
        "title": " → ".join(diff.names),
        "diff": diff,
        "mesh": {**diff.meshes[0], **diff.meshes[1]},
        "rows": sorted(rows, key=lambda row: -abs(row["rank"])),
        "totals": [(one, _total_cells(one)) for one in (*diff.totals, everything)],
        "modules": [(one, _total_cells(one)) for one in words.modules(diff)],
        "change": typeset(words.time_change(diff)),
        "tables": [
            (words.TITLES[name], [_figure(*figure) for figure in figures])
            for name, figures in (
                ("time", words.time_figures(diff)),
                ("figures", words.figures(diff, count, count)),
            )
        ],
        "reshards": [(_MARKS[mark], one) for mark, one in words.reshards(diff)],
    }


def _row(row: words.Compared) -> dict[str, Any]:
    mark, sides = row.mark, row.sides
    one = sides[-1]
    change = _change(mark, [side.total_wire_bytes for side in sides])
    place = "\n".join(lines_of(one)) or one.op_name
    return {
        "class": _MARKS[mark],
        "one": one,
        "count": row.count,
        "shapes": _both(show_shapes(side.shapes) for side in sides),
        "runs": _both(words.known(side.executions) for side in sides),
        "wire": _both(words.known(side.total_wire_bytes, show_bytes) for side in sides),
        "change": words.known(change, words.signed),
        "rank": change or 0,
        "place": place,
        "name": place_name(one) or place,
    }


def _change(mark: str, sent: list[int | None]) -> int | None:
    """How many more bytes the second report puts on the wire; None where that is not known."""
    first, last = sent[0], sent[-1]
    if first is None or last is None:
        return None
    return {"+": last, "-": -first, "~": last - first}[mark]


def _both(texts: Iterator[str]) -> str:
    return " → ".join(dict.fromkeys(texts))


def _total_cells(one: Any) -> list[str]:
    """Of a sum by anything: sites, bytes in the first and the second report, and the change."""
    cells = words.total_cells(one.a, one.b, lambda a, b: words.signed(b - a))
    return [*map(typeset, cells)]


_NAMES = {
    "flops": "FLOPs",
    "hbm_bytes": "main memory traffic",
    "peak": "memory, all together",
    "seconds": "time of a call",
    "mfu": "MFU",
    "hfu": "HFU",
}


def _figure(delta: Delta, show: words.Show) -> tuple[str, ...]:
    name = _NAMES.get(delta.name, delta.name.replace("_", " "))
    change_as = words.change_of(delta, show)
    change = words.known(delta.change, lambda change: words.signed(change, change_as))
    return name, words.known(delta.a, show), words.known(delta.b, show), change
