"""A report as flat figures for loggers."""

from __future__ import annotations

import dataclasses

from spmd.inspection.records.report import DIRECTIONS, Report, Total


def scalars(report: Report) -> dict[str, float | int]:
    """Figures by name, as `Report.scalars` documents them."""
    total, by_direction = report.total, report.totals("direction")
    found: dict[str, float | int] = {
        "collectives/unread_lines": report.unread.lines if report.unread else 0,
        "collectives/unknown_sites": total.unknown,
    }
    found |= _sums("total", total)
    for direction in DIRECTIONS:
        found |= _sums(direction, by_direction.get(direction, Total.zeros()))
    for (kind, axes), part in sorted(report.totals("kind", "axis").items()):
        found |= _sums(f"{kind}/{'+'.join(axes) or 'none'}", part)
    reshards = {
        "reshards/arguments": len(report.reshards),
        "reshards/bytes": sum(one.nbytes for one in report.reshards),
    }
    return found | _cost(report, total.wire_bytes) | _memory(report) | reshards | _time(report)


def _sums(name: str, total: Total) -> dict[str, int]:
    figures = ("sites", "executions", "payload_bytes", "wire_bytes")
    return {f"collectives/{name}/{figure}": getattr(total, figure) for figure in figures}


def _cost(report: Report, wire_bytes: int) -> dict[str, float | int]:
    if report.predicted:
        return {}
    cost = report.cost
    found: dict[str, float | int] = {
        f"cost/{name}": count for name, count in dataclasses.asdict(cost).items()
    }
    if wire_bytes:
        found["cost/flops_per_wire_byte"] = cost.flops / wire_bytes
    if cost.hbm_bytes:
        found["cost/wire_bytes_per_hbm_byte"] = wire_bytes / cost.hbm_bytes
    return found


def _memory(report: Report) -> dict[str, int]:
    if report.memory is None:
        return {}
    parts = ("arguments", "outputs", "temporaries", "aliased", "code", "peak")
    return {f"memory/{part}_bytes": getattr(report.memory, part) for part in parts}


def _time(report: Report) -> dict[str, float | int]:
    time = report.time
    if time is None:
        return {}
    names = ("seconds", "compute", "memory", "exchange", "hfu", "mfu")
    found = {f"time/{name}": value for name in names if (value := getattr(time, name)) is not None}
    waits = time.exposed_by_axes
    found["time/exposed"] = sum(waits.values())
    return found | {f"time/exposed/{'+'.join(a) or 'none'}": s for a, s in waits.items()}
