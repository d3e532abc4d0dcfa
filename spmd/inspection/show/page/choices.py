"""What the page of a plan shows, as plain values: what was looked at, where arrays lie, prices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from spmd.inspection.records.names import short_path
from spmd.inspection.records.plan import (
    Candidate,
    Deviation,
    Placed,
    Plan,
    SourceConstraint,
)
from spmd.inspection.records.sizes import show_bytes, show_seconds, show_share
from spmd.inspection.show import plan_words as said, words
from spmd.inspection.show.page import clock, scatter
from spmd.inspection.show.perfetto import layer_events
from spmd.inspection.show.times import Times


def view(plan: Plan) -> dict[str, Any]:
    """Everything that the template and the script of the page draw."""
    # Axes of the plan come first: their colours are those of its report.
    mesh = dict.fromkeys([*plan.axes, *(axis for one in plan.candidates for axis in one.axes)], 1)
    timed = plan.report if plan.report and plan.report.time else None
    found = [*_candidates(plan, mesh)]
    inside = plan.inside and plan.inside.get()
    priced = [one for one in (*plan.arguments, *plan.results) if one.prices]
    return {
        "title": plan.name or "plan",
        "plan": plan,
        "mesh": mesh,
        "head": [*_head(plan)],
        "figures": [*_figures(plan)],
        "scatter": scatter.view(plan),
        "candidates": found,
        "timed": any(one["compiled"] for one in found),
        "legend": [*dict.fromkeys(part for one in found for part in one["legend"])],
        "titles": said.TITLES,
        "told": said.sent_said(plan.chosen),
        "deviations": [_deviation(one) for one in plan.deviations],
        "axes": said.splits(plan),
        "rows": [_row(one, plan.axes) for one in _lying(plan)],
        "inside": inside,
        "constraints": [_constraint(one) for one in inside.constraints] if inside else [],
        "time": clock.view(Times(timed), mesh) if timed else None,
        "stand_in": said.STAND_IN,
        "priced": [_priced(one, mesh) for one in priced],
        "data": {
            "details": [], "frames": [], "mesh": [], "devices": [], "arguments": [],
            "candidates": [one["details"] for one in found],
            "trace": {"traceEvents": [*layer_events(timed)]} if timed else None,
        },
    }  # fmt: skip


# The whole


def _head(plan: Plan) -> Iterator[tuple[str, bool]]:
    """What is said below the name, and whether it is a doubt."""
    yield said.headline(plan), False
    if not plan.chosen.fits(plan.budget):
        yield f"over the budget: {said.memory_said(plan)}", True
    if plan.verified != "time":
        yield said.verified_said(plan), True
    if said.has_open_loops(plan):
        yield said.LOOPS, True
    if not plan.complete:
        yield said.ENDED, True
    yield from ((text, False) for text in said.passed_over_said(plan))


def _figures(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Label, figure and what it is of."""
    chosen = plan.chosen
    if chosen.verified == "time" and chosen.time:
        used = ", ".join(f"{name} {share}" for name, share in chosen.time.utilization.items())
        note = f"{used}; bound by {chosen.time.bound}"
        yield words.TITLES["time"], show_seconds(chosen.seconds), note
    yield "Predicted", show_seconds(chosen.predicted), f"before any compile{said.off(chosen)}"
    of = f"of {show_bytes(plan.budget)} on each device" if plan.budget else "on each device"
    yield "Memory", show_bytes(plan.memory), of
    yield "On the wire", show_bytes(chosen.sent), "sent by each device in a call"
    yield "Plans tried", f"{plan.tried:,}", f"in {show_seconds(plan.searched)}"
    if plan.compiles:
        yield "Compiled", f"{plan.compiles:,}", f"in {show_seconds(plan.compiled)}"


# Candidates


def _candidates(plan: Plan, mesh: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    longest = max((one.seconds for one in plan.candidates), default=0.0)
    sent = f"{_SENT}, as predicted"
    if any(one.added for one in plan.candidates):
        sent += ", with those that the compiler adds"
    for i, one in enumerate(plan.candidates):
        share = one.seconds / longest if longest else 0.0
        parts = [*_parts(one, mesh, share)]
        timed = said.exposed(one) is not None
        yield {
            "i": i,
            "one": one,
            "title": said.title(one),
            "kind": scatter.kind_of(one),
            "chosen": one is plan.chosen,
            "compiled": show_seconds(one.seconds) if timed else "",
            "predicted": show_seconds(one.predicted)
            + (f" + {show_seconds(one.added)}" if one.added else ""),
            "parts": parts,
            "pale": not timed,
            "legend": [_key(part["class"], part["label"], sent) for part in parts],
            "memory": show_bytes(one.needed) if one.needed else "",
            "fits": one.fits(plan.budget),
            "verdict": said.verdict(one, plan),
            "details": {"name": said.title(one), "rows": [*_details(one, plan)]},
        }


_SENT = "Exchanges"


def _key(look: str, label: str, sent: str) -> tuple[str, str]:
    return (f"{look} pale", sent) if label == _SENT else (look, label)


def _parts(one: Candidate, mesh: Mapping[str, int], share: float) -> Iterator[dict[str, Any]]:
    """The bar of a candidate in percent of the longest; a prediction has no axes."""
    if one.time and said.exposed(one) is not None:
        yield from clock.parts(one.time, mesh, share)
        return
    start, whole = 0.0, sum(said.predicted_parts(one))
    looks = (("Compute", "time-compute"), ("Memory", "time-memory"), (_SENT, "time-exposed"))
    for (label, look), seconds in zip(looks, said.predicted_parts(one), strict=True):
        width = 100 * share * seconds / whole if whole else 0.0
        if seconds:
            yield {
                "class": f"{look} axis-none", "label": label, "shown": show_seconds(seconds),
                "start": round(start, 3), "width": round(width, 3),
            }  # fmt: skip
        start += width


def _details(one: Candidate, plan: Plan) -> Iterator[tuple[str, str]]:
    """What the panel beside the picture says of a candidate."""
    yield "mesh", ", ".join(f"{axis}={size}" for axis, size in one.axes.items()) or "none"
    if one.same:
        yield "the same program as", ", ".join(one.same)
    if one.time and (waits := said.exposed(one)) is not None:
        used = "; ".join(f"{name} {share}" for name, share in one.time.utilization.items())
        yield "time of a call", f"{show_seconds(one.seconds)}; {used}"
        yield from (
            (f"waits over {', '.join(axes) or 'no axis'}", show_seconds(seconds))
            for axes, seconds in waits.items()
        )
    added = f", {more}" if (more := said.added_said(one)) else ""
    yield "predicted", f"{show_seconds(one.predicted)}{said.off(one)}{added}"
    share = f", {show_share(one.needed / plan.budget)} of the budget" if plan.budget else ""
    how = "" if one.peak is not None else ", estimated"
    yield "memory", f"{show_bytes(one.needed)}{share}{how}"
    if one.sent:
        yield "on the wire", said.sent_said(one)
    yield from (
        (f"{axis} splits", ", ".join(names) or "nothing") for axis, names in one.orders.items()
    )
    yield "verdict", said.verdict(one, plan)
    if one.failure:
        yield "the compiler", one.failure


def _deviation(one: Deviation) -> dict[str, Any]:
    predicted, compiled = said.wire_said(one)
    place = words.show_place(one.source)
    return {"one": one, "predicted": predicted, "compiled": compiled, "place": place}


# Where arrays lie


def _lying(plan: Plan) -> list[said.Lying]:
    return [*said.rows(plan.arguments), *said.result_rows(plan)]


def _row(row: said.Lying, axes: Mapping[str, int]) -> dict[str, Any]:
    items = row.fold.items
    held = said.nbytes(items, axes)
    return {
        "name": row.fold.spellings[0],
        "like": row.like,
        "spec": said.spec_words(items[0].spec),
        "items": [(one.name, words.show_array(one.dtype, one.shape)) for one in items],
        "held": "" if held is None else show_bytes(held),
        "nbytes": held or 0,
        "is_fixed": items[0].is_fixed,
    }


def _constraint(one: SourceConstraint) -> dict[str, Any]:
    return {
        "place": f"{short_path(one.file)}:{one.line}",
        "function": one.function.rpartition(".<locals>.")[2],
        "expression": one.expression,
        "spec": said.spec_words(one.spec),
    }


# Prices


def _priced(one: Placed, mesh: Iterable[str]) -> dict[str, Any]:
    prices = [
        {"spec": said.spec_words(price.spec), "whole": not said.trimmed(price.spec),
         "time": time, "held": held, "more": price.seconds > 0}
        for price in said.priced(one)
        for time, held in (said.price_said(price),)
    ]  # fmt: skip
    return {
        "name": one.name,
        "array": words.show_array(one.dtype, one.shape),
        "spec": said.spec_words(one.spec),
        "prices": prices,
    }
