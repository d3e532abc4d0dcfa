"""What the page of two reports' differences shows, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spmd.inspection.records.report import Collective, Total
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.records.sums import NO_MODULE
from spmd.inspection.show.page import view as page_view

if TYPE_CHECKING:
    from spmd.inspection.records.diff import Delta, Diff

_MARKS = {"+": "added", "-": "removed", "~": "changed"}


def view(diff: Diff) -> dict[str, Any]:
    """Everything that the template draws."""
    axes = {**diff.meshes[0], **diff.meshes[1]}
    rows = sorted(_sides(diff), key=lambda row: -abs(_change(*row[1:]) or 0))
    return {
        "title": " → ".join(diff.names),
        "diff": diff,
        "rows": [_row(*row, axes) for row in rows],
        "totals": [_total(d.kind, d.mesh_axes, d.a, d.b, axes) for d in diff.totals],
        "modules": [*_modules(diff)],
        "all": _total("all", (), *diff.total, axes),
        "figures": [*_figures(diff)],
        "reshards": [
            *(("added", one, show_bytes(one.nbytes)) for one in diff.reshards_added),
            *(("removed", one, show_bytes(one.nbytes)) for one in diff.reshards_removed),
        ],
        "data": {"details": [], "frames": [], "mesh": [], "devices": [], "arguments": []},
    }


def _sides(diff: Diff) -> Iterator[tuple[str, Collective | None, Collective | None]]:
    yield from (("+", None, one) for one in diff.added)
    yield from (("-", one, None) for one in diff.removed)
    yield from (("~", pair.a, pair.b) for pair in diff.changed)


def _change(a: Collective | None, b: Collective | None) -> int | None:
    """How many more bytes the second puts on the wire; None where one is not known."""
    sent = [0 if one is None else one.total_wire_bytes for one in (a, b)]
    return None if sent[0] is None or sent[1] is None else sent[1] - sent[0]


def _row(
    mark: str, a: Collective | None, b: Collective | None, axes: Mapping[str, int]
) -> dict[str, Any]:
    one = b or a
    assert one  # a row has at least one side
    change = _change(a, b)
    place = "\n".join(page_view.places(one)) or one.op_name
    return {
        "mark": mark,
        "class": _MARKS[mark],
        "one": one,
        "axes": page_view.chips(one.mesh_axes, axes),
        "shapes": _both(a, b, lambda c: page_view.show_shapes(c.shapes)),
        "runs": _both(a, b, lambda c: "unknown" if c.executions is None else f"{c.executions:,}"),
        "wire": _both(a, b, _wire),
        "change": "unknown" if change is None else signed(change),
        "rank": change or 0,
        "place": place,
        "name": page_view.place_name(one) or place,
    }


def _wire(one: Collective) -> str:
    total = one.total_wire_bytes
    return "unknown" if total is None else show_bytes(total)


def _both(a: Collective | None, b: Collective | None, show: Callable[[Collective], str]) -> str:
    return " → ".join(dict.fromkeys(show(one) for one in (a, b) if one is not None))


def signed(nbytes: int) -> str:
    """A difference with its sign: ``+1.5 MiB``."""
    return f"{'+' if nbytes > 0 else '-' if nbytes < 0 else ''}{show_bytes(abs(nbytes))}"


def _total(
    kind: str, mesh_axes: tuple[str, ...], a: Total, b: Total, axes: Mapping[str, int]
) -> dict[str, Any]:
    known = a == b or not (a.unknown or b.unknown)
    return {
        "kind": kind,
        "axes": page_view.chips(mesh_axes, axes),
        "sites": f"{a.sites:,}" if a.sites == b.sites else f"{a.sites:,} → {b.sites:,}",
        "a": page_view.bounded(a, a.wire_bytes),
        "b": page_view.bounded(b, b.wire_bytes),
        "change": signed(b.wire_bytes - a.wire_bytes) if known else "unknown",
    }


def _modules(diff: Diff) -> Iterator[dict[str, Any]]:
    """Sums that differ by module; nothing where no collective is in one."""
    differing = [delta for delta in diff.modules if delta.a != delta.b]
    if any(delta.module for delta in differing):
        for one in differing:
            yield {"name": one.module or NO_MODULE, **_total("", (), one.a, one.b, {})}


_NAMES = {"flops": "FLOPs", "hbm_bytes": "main memory traffic", "peak": "memory, all together"}


def _figures(diff: Diff) -> Iterator[dict[str, str]]:
    for delta in (*diff.cost, *diff.memory):
        nbytes = delta.name == "hbm_bytes" or delta in diff.memory
        if delta.a != delta.b:
            yield _figure(delta, show_bytes if nbytes else page_view.count)


def _figure(delta: Delta, show: Callable[[int], str]) -> dict[str, str]:
    change = delta.change
    sign = "+" if (change or 0) > 0 else "-"
    return {
        "name": _NAMES.get(delta.name, delta.name.replace("_", " ")),
        "a": "unknown" if delta.a is None else show(delta.a),
        "b": "unknown" if delta.b is None else show(delta.b),
        "change": "unknown" if change is None else f"{sign}{show(abs(change))}",
    }
