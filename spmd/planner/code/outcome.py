"""What the devices do in a program, as far as two programs are compared: exchanges and products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
import dataclasses
from typing import Any, TypeAlias

from spmd.inspection.compile.preview import PASSES
from spmd.inspection.records.report import Collective
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.shardy import passes, pipeline
from spmd.inspection.shardy.exchanges import exchanges
from spmd.inspection.shardy.targets.base import local_shape
from spmd.planner.program.graph import PINNED

_MOST = 3
_Line: TypeAlias = tuple[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a program does.

    Attributes:
        sent: executions of each kind of exchange, over axes, of so many bytes; without a number of
            executions, how many places of it there are.
        wire: bytes that a device sends, by kind and axes.
        made: how often which product, gather or scatter is made, with its shape on one device.
    """

    sent: Counter[Any]
    wire: Counter[_Line]
    made: Counter[Any]

    def away(self, other: Outcome) -> tuple[int, int, int]:
        """How far it is from another: in bytes, in exchanges, in what is made; zeros for equal."""
        return (
            sum(abs(nbytes) for nbytes in self.more(other).values()),
            len(_differing(self.sent, other.sent)),
            len(_differing(self.made, other.made)),
        )

    def more(self, other: Outcome) -> dict[_Line, int]:
        """Bytes that it sends more than another, or less, by kind and axes; most first."""
        found = {line: self.wire[line] - other.wire[line] for line in {**self.wire, **other.wire}}
        ranked = sorted(found.items(), key=lambda pair: (-abs(pair[1]), pair[0]))
        return {line: nbytes for line, nbytes in ranked if nbytes}


def _differing(a: Counter[Any], b: Counter[Any]) -> list[Any]:
    return [key for key in {**a, **b} if a[key] != b[key]]


def outcome_of(module: Any, platform: str, *, subject: str) -> Outcome:
    """What Shardy makes of a lowered module, for the compiler of a platform."""
    done = pipeline.run(module, PASSES, subject=subject)
    with module.context:
        sizes = passes.axis_sizes(done)
        made = Counter(
            (one.name, *(local_shape(v.type, passes.sharding_of(v), sizes) for v in one.results))
            for one in passes.operations_in(done)
            if one.name in PINNED
        )
        return outcome_of_exchanges(exchanges(done, platform), made)


def outcome_of_exchanges(found: Iterable[Collective], made: Counter[Any] | None = None) -> Outcome:
    """What a report says of a program."""
    sent: Counter[Any] = Counter()
    wire: Counter[_Line] = Counter()
    for one in found:
        times = one.executions
        what = (one.kind, one.mesh_axes, one.payload_bytes, one.wire_bytes, one.conditional)
        sent[*what, times is None] += 1 if times is None else times
        wire[one.kind, one.mesh_axes] += (times or 1) * one.wire_bytes
    return Outcome(sent=sent, wire=wire, made=made or Counter())


def difference(code: Outcome, plan: Outcome) -> str:
    """What the program of a code sends, compared with that of a plan; empty for the same."""
    if code == plan:
        return ""
    found = code.more(plan)
    if not found:
        return "sends as many bytes as the plan's, in other pieces or for products split otherwise"
    total = sum(found.values())
    rows = [*found.items()]
    parts = [f"{kind} over {', '.join(axes)}: {_more(n)}" for (kind, axes), n in rows[:_MOST]]
    if len(rows) > _MOST:
        parts.append(f"and {len(rows) - _MOST} more kinds")
    said = f"sends {_more(total)} than the plan's" if total else "sends as many bytes as the plan's"
    return f"{said} ({'; '.join(parts)})"


def _more(nbytes: int) -> str:
    return f"{show_bytes(abs(nbytes))} {'more' if nbytes > 0 else 'less'}"
