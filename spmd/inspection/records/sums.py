"""Sums over collectives, in which what the compiler combined is divided among its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
from typing import Any

from spmd.inspection.records.names import module
from spmd.inspection.records.report import Collective, Part, Shapes, Source, Total

KEYS: dict[str, Callable[[Collective], Any]] = {
    "kind": lambda one: one.kind,
    "axis": lambda one: one.mesh_axes,
    "line": lambda one: one.source and str(one.source),
    "module": lambda one: module(one.op_name),
    "direction": lambda one: one.direction,
}
"""What sums can be by."""

#: What a table says of collectives in no scope.
NO_MODULE = "no module"


def shares(one: Collective, key: Callable[[Collective], Any]) -> dict[Any, Collective]:
    """Divides a collective by a property of its parts, read from a collective of one part.

    Each value of the property has a collective with the bytes and the shapes of the parts that have
    it, and the place of the first of them. What was not combined is its own only share.
    """
    if not one.parts:
        return {key(one): one}
    groups: dict[Any, list[Part]] = {}
    for part in one.parts:
        groups.setdefault(key(_share(one, [part])), []).append(part)
    return {value: _share(one, parts) for value, parts in groups.items()}


def _share(one: Collective, parts: Sequence[Part]) -> Collective:
    first, directions = parts[0], {part.direction for part in parts}
    operands, results = (
        tuple(shape for part in parts for shape in part.shapes[side]) for side in (0, 1)
    )
    return dataclasses.replace(
        one,
        shapes=Shapes(operands, results),
        dtype=", ".join(dict.fromkeys(shape.dtype for shape in operands)),
        payload_bytes=sum(part.payload_bytes for part in parts),
        wire_bytes=sum(part.wire_bytes for part in parts),
        source=first.source,
        source_is_consumer=first.source_is_consumer,
        frames=first.frames,
        direction="backward" if "backward" in directions else first.direction,
        op_name=first.op_name,
        combined=len(parts),
        parts=tuple(parts),
    )


def grouped(
    found: Iterable[Collective], key: Callable[[Collective], Any]
) -> dict[Any, list[Collective]]:
    """The shares of collectives, by a property."""
    groups: dict[Any, list[Collective]] = {}
    for one in found:
        for value, share in shares(one, key).items():
            groups.setdefault(value, []).append(share)
    return groups


def by_line(one: Collective) -> list[Collective]:
    """The shares of a collective by line, the most bytes first."""
    return sorted(shares(one, line_of).values(), key=lambda share: -share.wire_bytes)


def line_of(one: Collective) -> Source | None:
    """The line of a collective; several operations of one line differ in their columns."""
    return one.source and dataclasses.replace(one.source, column=0)


def spread(one: Collective) -> str:
    """How many lines have a part in a collective, in words; empty where its own line says all."""
    places = [line_of(share) for share in by_line(one)]
    if len(places) < 2 or line_of(one) not in places:
        return ""
    known = sum(place is not None for place in places)
    return f"{known} line{'s' * (known != 1)}" + " + no line" * (known < len(places))


def once(found: Iterable[Collective]) -> Iterator[Collective]:
    """Collectives, of which those in loops of unknown length run once, as in times."""
    for one in found:
        yield dataclasses.replace(one, executions=1) if one.executions is None else one


def sum_of(found: Iterable[Collective]) -> Total:
    """The sum over collectives."""
    return sum(map(Total.of, found), Total.zeros())


def totals(found: Iterable[Collective], *by: str) -> dict[Any, Total]:
    """Sums collectives by one or several properties, as `Report.totals` does."""
    unknown = [key for key in by if key not in KEYS]
    if unknown or not by:
        got = ", ".join(map(repr, unknown)) or "nothing"
        raise ValueError(f"totals are by {', '.join(KEYS)}, or several of them; not by {got}")
    keys = [KEYS[name] for name in by]

    def key(one: Collective) -> Any:
        return keys[0](one) if len(keys) == 1 else tuple(read(one) for read in keys)

    sums = {value: sum_of(shares) for value, shares in grouped(found, key).items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].wire_bytes))
