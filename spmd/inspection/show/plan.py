"""Draws a plan in a terminal or a log, the differences of two, and what other places would cost.

All figures come from the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from spmd.errors import ArgumentError, Failure, did_you_mean, explain
from spmd.inspection.records.names import is_below
from spmd.inspection.records.plan import Candidate, Deviation, Entries, Placed, Plan, Price
from spmd.inspection.records.sizes import show_bytes, show_seconds
from spmd.inspection.show import plan_words as said, words
from spmd.inspection.show.cells import axes_cell, axis_style, show_mesh, source_cell
from spmd.inspection.show.folds import Fold
from spmd.inspection.show.layout import (
    Cell,
    Column,
    Flow,
    Grid,
    Indented,
    Row,
    cell,
    clean,
    not_shown,
    plain,
    sections,
)

MOST_ROWS, MOST_RESULTS, MOST_CANDIDATES, MOST_DEVIATIONS = 12, 5, 10, 6
"""The most rows that a screen has of arguments, of results, of candidates and of deviations."""


def render_plan(plan: Plan) -> RenderableType:
    """A plan in a screen: where arrays lie, what the axes split, and what else was looked at."""
    bodies = [
        (said.TITLES["specs"], _specs(plan)),
        (said.TITLES["axes"], _axes(plan)),
        (said.TITLES["candidates"], _candidates(plan)),
        (said.TITLES["deviations"], _deviations(plan)),
    ]
    search = Flow(*(Text(clean(text), "dim") for text in said.search_said(plan)))
    passed_over = (Flow(Text(clean(text), "dim")) for text in said.passed_over_said(plan))
    return Indented(Group(sections(_head(plan), bodies), Text(), search, *passed_over), by=0)


def _head(plan: Plan) -> RenderableType:
    where = f"{plan.topology} ({plan.device_kind})" if plan.topology else plan.device_kind
    devices = words.plural(plan.num_devices, "device")
    name = Text.assemble((clean(plan.name), "bold"), f" on {clean(where)}" if where else "")
    fits = plan.chosen.fits(plan.budget)
    lines = [
        Flow(name, Text.assemble("mesh ", show_mesh(plan.axes), f" of {devices}")),
        Flow(Text(clean(said.headline(plan)), "bold")),
        Flow(Text(said.memory_said(plan), "" if fits else "bold red")),
        Flow(Text(said.verified_said(plan), "" if plan.verified == "time" else "yellow")),
        *[Flow(Text(said.LOOPS, "yellow"))] * said.has_open_loops(plan),
        *[Flow(Text(said.ENDED, "yellow"))] * (not plan.complete),
    ]
    return Group(*lines)


# Specs

_SPECS = (
    Column(title="array"),
    Column(title="spec"),
    Column(title="on a device", right=True, rank=1, label="on a device"),
    Column(rank=1),
)


def _specs(plan: Plan) -> RenderableType | None:
    shown, hidden = [], []
    both = ((said.rows(plan.arguments), MOST_ROWS), (said.result_rows(plan), MOST_RESULTS))
    for found, most in both:
        kept, rest = _largest(found, plan.axes, most)
        shown += kept
        hidden += rest
    if not shown:
        return None
    arrays = words.plural(sum(len(row.fold.items) for row in hidden), "array")
    more = not_shown(len(hidden), "row", f" of {arrays}")
    return Group(Grid(_SPECS, (_spec_row(row, plan.axes) for row in shown)), *more)


def _largest(
    rows: Sequence[said.Lying], axes: Mapping[str, int], most: int
) -> tuple[list[said.Lying], list[said.Lying]]:
    """The rows of most bytes in their order, and the others."""
    ranked = sorted(rows, key=lambda row: -(said.nbytes(row.fold.items, axes) or 0))
    kept = {id(row) for row in ranked[:most]}
    return (
        [row for row in rows if id(row) in kept],
        [row for row in rows if id(row) not in kept],
    )


def _spec_row(row: said.Lying, axes: Mapping[str, int]) -> Row:
    items = row.fold.items
    first, held = items[0], said.nbytes(items, axes)
    return Row(
        cells=(
            cell(*(f"{name}{words.times_sign(len(items))}" for name in row.fold.spellings)),
            cell(f"as {row.like}") if row.like else _spec_cell(first.spec, axes),
            cell("" if held is None else show_bytes(held)),
            cell("fixed" if first.is_fixed else "", style="yellow"),
        )
    )


def _spec_cell(spec: Entries, axes: Iterable[str]) -> Cell:
    pieces = ((clean(one.text), axis_style(one.axis, axes)) for one in said.spec_words(spec))
    return (Text.assemble(*pieces),)


def _axes(plan: Plan) -> RenderableType | None:
    if not plan.axes:
        return None
    rows = (
        Row(cells=((show_mesh_axis(axis, size, plan.axes),), cell(classes)))
        for axis, size, classes in said.splits(plan)
    )
    return Grid((Column(), Column()), rows)


def show_mesh_axis(axis: str, size: int, mesh: Iterable[str]) -> Text:
    """An axis with its size, in its colour."""
    return Text(f"{clean(axis)}={size}", axis_style(axis, mesh))


# Candidates

_FIGURES = (
    Column(title="compiled", right=True, label="compiled"),
    Column(title="predicted", right=True, rank=2, label="predicted"),
    Column(title="memory", right=True, rank=1, label="memory"),
    Column(title="waits", rank=4, label="waits"),
    Column(rank=1),
)


def _candidates(plan: Plan) -> RenderableType:
    shown = plan.candidates[:MOST_CANDIDATES]
    # Meshes of the same axes are told by their sizes, below the names of the axes.
    alike = {tuple(one.axes) for one in shown} == {tuple(plan.axes)} != {()}
    title = " x ".join(map(clean, plan.axes)) if alike else "mesh"
    columns = (Column(title="name"), Column(title=title, rank=3), *_FIGURES)
    rows = (_candidate_row(one, plan, alike) for one in shown)
    hidden = not_shown(len(plan.candidates) - len(shown), "candidate")
    return Group(Grid(columns, rows), *hidden)


def _sizes(axes: Mapping[str, int]) -> Text:
    """``8 x 2``, each size in the colour of its axis."""
    return Text(" x ").join(Text(str(n), axis_style(name, axes)) for name, n in axes.items())


def _candidate_row(one: Candidate, plan: Plan, alike: bool) -> Row:
    is_chosen, fits = one is plan.chosen, one.fits(plan.budget)
    timed = one.time if one.verified == "time" else None
    return Row(
        cells=(
            cell(said.title(one), style="bold" if is_chosen else ""),
            (_sizes(one.axes) if alike else show_mesh(one.axes),),
            cell(show_seconds(timed.seconds) if timed else "", style="bold" * is_chosen),
            cell(show_seconds(one.predicted)),
            cell(show_bytes(one.needed) if one.needed else "", style="" if fits else "red"),
            _waits(one, plan.axes),
            cell(said.verdict(one, plan), style=_verdict_style(is_chosen, fits)),
        ),
        notes=tuple(_notes(one)),
    )


def _notes(one: Candidate) -> Iterator[Text]:
    if one.failure:
        yield Text(clean(one.failure), "red")
    if added := said.added_said(one):
        yield Text(added)


def _verdict_style(is_chosen: bool, fits: bool) -> str:
    return ("green" if is_chosen else "") if fits else "red"


def _waits(one: Candidate, axes: Iterable[str]) -> Cell:
    """Seconds in which a device only waits, by axes; of a prediction those of all exchanges."""
    found = said.exposed(one)
    if found is None and one.exchange:
        return cell(f"{show_seconds(one.exchange)} at most", style="dim")
    if not found:
        return cell("none", style="dim")
    pieces = [
        Text.assemble(
            (clean(", ".join(over) or "no axis"), axis_style(over[0], axes) if over else ""),
            f" {show_seconds(seconds)}",
        )
        for over, seconds in found.items()
    ]
    more = [Text.assemble(pieces[0], f" + {len(pieces) - 1}{word}") for word in (" more", "")]
    short = more if len(pieces) > 1 else []
    return (Text("; ").join(pieces), *short, Text(show_seconds(sum(found.values()))))


# Predicted and compiled bytes

_DEVIATIONS = (
    Column(title="collectives"),
    Column(title="mesh axes"),
    Column(title="predicted", right=True, label="predicted"),
    Column(title="compiled", right=True, label="compiled"),
    Column(title="cause", rank=1),
    Column(title="line", rank=2),
)


def _deviations(plan: Plan) -> RenderableType | None:
    if not plan.deviations:
        return None
    rows = [_deviation_row(one, plan.axes) for one in plan.deviations[:MOST_DEVIATIONS]]
    told, sent = plan.chosen.told, plan.chosen.sent
    if told is not None:
        cells = ("all", "", show_bytes(told), show_bytes(sent), "", "")
        rows.append(Row(cells=tuple(map(cell, cells)), style="bold", rule=True))
    hidden = not_shown(len(plan.deviations[MOST_DEVIATIONS:]), "difference")
    return Group(Grid(_DEVIATIONS, rows), *hidden)


def _deviation_row(one: Deviation, axes: Iterable[str]) -> Row:
    return Row(
        cells=(
            cell(one.kind),
            axes_cell(one.mesh_axes, axes),
            *map(cell, said.wire_said(one)),
            cell(one.cause),
            source_cell(one.source) if one.source else cell(""),
        )
    )


# Prices


def why(plan: Plan, path: str) -> str:
    """What other places of an argument or result would cost, as `Plan.why` says.

    A path that holds several arrays says it of each.
    """
    found = [*plan.arguments, *plan.results]
    below = [one for one in found if is_below(one.name, path)]
    if not below or any(one.name == path for one in found):
        below = [placed_at(plan, path)]
    shown = [_prices(one, plan) for one in below[:_MOST_PRICED]]
    return plain(Group(*shown, *not_shown(len(below[_MOST_PRICED:]), "array")))


def placed_at(plan: Plan, path: str) -> Placed:
    """The argument or result of a path; an error with the nearest one where there is none."""
    found = [*plan.arguments, *plan.results]
    if one := next((one for one in found if one.name == path), None):
        return one
    paths = [one.name for one in found]
    shown = ", ".join(paths[:12]) + (f" and {len(paths) - 12} more" if paths[12:] else "")
    failure = Failure(
        what=f"has no argument or result {path}{did_you_mean(path, paths)}",
        expected=f"one of {shown}" if paths else "a program with arguments or results",
        error=ArgumentError,
    )
    raise explain(f"plan of `{plan.name}`", [failure])


_PRICES = (Column(), Column(right=True), Column(right=True))
_MOST_PRICED = 12


def _prices(one: Placed, plan: Plan) -> RenderableType:
    array = words.show_array(one.dtype, one.shape)
    lies = Text.assemble("lies as ", said.show_spec(one.spec)) if one.spec else Text("is a scalar")
    head = Flow(
        Text.assemble((clean(one.name), "bold"), f" {array} ", lies),
        *[Text("as it was said to")] * one.is_fixed,
    )
    if not one.prices:
        return Group(head, Text("no other place was looked at", "dim"))
    note = Flow(Text("estimated: how much longer a call takes, and a device holds more", "dim"))
    rows = (_price_row(price, plan.axes) for price in said.priced(one))
    return Indented(Group(head, Indented(Grid(_PRICES, rows)), note), by=0)


def _price_row(one: Price, axes: Mapping[str, int]) -> Row:
    place = _spec_cell(one.spec, axes) if said.trimmed(one.spec) else cell(said.REPLICATED)
    return Row(cells=(place, *map(cell, said.price_said(one))))


# Two plans

_CHANGED = (Column(title="array"), Column(title="a"), Column(title="b"))


def difference(a: Plan, b: Plan) -> str:
    """What another plan does otherwise, as `Plan.diff` says."""
    return plain(render_difference(a, b))


def render_difference(a: Plan, b: Plan) -> RenderableType:
    """The whole of two plans, and the arrays that lie elsewhere."""
    whole = [Row(cells=tuple(map(cell, row))) for row in _wholes(a, b)]
    bodies = [
        ("The whole", Grid((Column(title="what"), *_CHANGED[1:]), whole) if whole else None),
        (said.TITLES["specs"], _changed(a, b)),
    ]
    return sections(Flow(Text.assemble(_named(a), " -> ", _named(b))), bodies)


def _named(plan: Plan) -> Text:
    where = f" of {clean(plan.topology)}" if plan.topology else ""
    return Text.assemble((clean(plan.name), "bold"), " on ", show_mesh(plan.axes), where)


def _wholes(a: Plan, b: Plan) -> Iterator[tuple[str, str, str]]:
    """What is said of both as a whole, where it is not the same."""
    pairs = {
        "plan": [said.title(one.chosen) for one in (a, b)],
        "time of a call": [show_seconds(one.seconds) for one in (a, b)],
        "verified by": [one.verified or "nothing" for one in (a, b)],
        "memory of a device": [show_bytes(one.memory) for one in (a, b)],
        "budget": ["none" if one.budget is None else show_bytes(one.budget) for one in (a, b)],
        "sent by a device": [show_bytes(one.chosen.sent) for one in (a, b)],
    }
    splits = [
        {axis: f"{size}: {classes}" for axis, size, classes in said.splits(p)} for p in (a, b)
    ]
    for axis in dict.fromkeys([*splits[0], *splits[1]]):
        pairs[f"axis {axis}"] = [side.get(axis, "none") for side in splits]
    for what, (left, right) in pairs.items():
        if left != right:
            yield what, left, right


def _changed(a: Plan, b: Plan) -> RenderableType:
    rows, same = said.changed((*a.arguments, *a.results), (*b.arguments, *b.results))
    axes = {**a.axes, **b.axes}
    table = Grid(_CHANGED, (Row(cells=_changed_cells(row, axes)) for row in rows))
    alike = Flow(Text(f"{words.plural(same, 'array')} the same in both", "dim"))
    return Group(*[table] * bool(rows), *[alike] * bool(same or not rows))


def _changed_cells(row: Fold[said.Changed], axes: Mapping[str, int]) -> tuple[Cell, ...]:
    sides = (row.items[0].a, row.items[0].b)
    places = (cell("none", style="dim") if s is None else _spec_cell(s, axes) for s in sides)
    return (cell(*row.spellings), *places)
