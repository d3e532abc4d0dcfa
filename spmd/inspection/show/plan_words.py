"""What is said of a plan: figures and sentences that a terminal and the page both draw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import operator
from typing import Any, NamedTuple

from spmd.inspection.records.plan import Candidate, Deviation, Entries, Placed, Plan, Price
from spmd.inspection.records.sizes import show_bytes, show_seconds, show_share
from spmd.inspection.show import words
from spmd.inspection.show.folds import Fold, folded, parts_of

TITLES = {
    "specs": "Where arrays lie",
    "axes": "What each axis splits: the first of these that an array has",
    "candidates": "What was looked at",
    "deviations": "Bytes that were not predicted",
}
"""What stands above a section of a plan."""

BY_BYTES = (
    "verified by bytes: CPU devices stand in for the hardware; topology= asks its own compiler"
)
STAND_IN = (
    "CPU devices stand in for the hardware: this is the program of their compiler, with the "
    "figures of the chip. That of the hardware fuses, tiles and overlaps otherwise, and the time "
    "of the plan is a prediction of it."
)
UNVERIFIED = "not verified: no compiler has seen this plan"
LOOPS = "a loop of unknown length counts once"
ENDED = "the search was ended early: there may be a better plan"
REPLICATED = "replicated"
_SMALL = 0.005
"""A share of the time that is no difference."""


# The whole


def headline(plan: Plan) -> str:
    """How long a call takes, how well that uses the chip, and what bounds it."""
    chosen = plan.chosen
    if chosen.time and chosen.verified == "time":
        return str(chosen.time)
    parts = dict(zip(("compute", "memory", "exchange"), predicted_parts(chosen), strict=True))
    bound = max(parts, key=parts.__getitem__)
    added = f", {said}" if (said := added_said(chosen)) else ""
    took = f"{show_seconds(chosen.seconds)} a call on {plan.chip} (predicted{added})"
    return f"{took}; bound by {bound}" if parts[bound] else took


def memory_said(plan: Plan) -> str:
    """What a device holds at the peak, of what it may: ``3.0 GiB of 13.0 GiB a device, 23%``."""
    needed, how = show_bytes(plan.memory), "" if plan.chosen.peak is not None else ", estimated"
    if not plan.budget:
        return f"{needed} a device{how}"
    share = show_share(plan.memory / plan.budget)
    return f"{needed} of {show_bytes(plan.budget)} a device, {share}{how}"


def verified_said(plan: Plan) -> str:
    """What a compiler said of the plan, and how far off the prediction was."""
    chosen = plan.chosen
    if chosen.verified == "time":
        return f"compiled; {show_seconds(chosen.predicted)} a call was predicted{off(chosen)}"
    return BY_BYTES if chosen.verified == "bytes" else UNVERIFIED


def has_open_loops(plan: Plan) -> bool:
    """Whether the compiled program has a loop of unknown length, which counts once."""
    return plan.report is not None and plan.report.cost.unknown_loops > 0


def off(one: Candidate) -> str:
    """How much more or less a prediction was than the compiled time: `` (+22%)``."""
    if one.time is None or one.verified != "time" or not one.time.seconds:
        return ""
    return f" ({one.predicted / one.time.seconds - 1:+.0%})"


def search_said(plan: Plan) -> Iterator[str]:
    """What the search looked at, how many compiles there were, and how long both took."""
    yield f"{words.plural(plan.tried, 'plan')} tried in {show_seconds(plan.searched)}"
    if plan.compiles:
        yield f"{plan.compiles:,} compiled in {show_seconds(plan.compiled)}"


def passed_over_said(plan: Plan) -> Iterator[str]:
    """The meshes that were not planned for, those for the same reason together."""
    for why in dict.fromkeys(plan.passed_over.values()):
        meshes = "; ".join(name for name, said in plan.passed_over.items() if said == why)
        yield f"passed over: {meshes}, for which {plan.name} raises {why}"


def is_compiled(one: Candidate) -> bool:
    """Whether a compiler saw a candidate, and be it to refuse it."""
    return one.peak is not None or bool(one.verified or one.failure)


def sent_said(one: Candidate) -> str:
    """Bytes that a device sends in a call, and how many were predicted where that is known."""
    if one.told is None or not is_compiled(one):
        return show_bytes(one.sent)
    return f"{show_bytes(one.sent)}; {show_bytes(one.told)} predicted"


def wire_said(one: Deviation) -> tuple[str, str]:
    """Bytes as predicted and as compiled; ``none`` for 0."""
    predicted, compiled = (show_bytes(n) if n else "none" for n in (one.predicted, one.compiled))
    return predicted, compiled


# A candidate


def title(one: Candidate) -> str:
    """Its name, and that of an expert whose program it is: ``found = Megatron and 1 more``."""
    if not one.same:
        return one.name
    more = f" and {len(one.same) - 1} more" * (len(one.same) > 1)
    return f"{one.name} = {one.same[0]}{more}"


def verdict(one: Candidate, plan: Plan) -> str:
    """Whether it was chosen, and else why not."""
    if one.failure:
        return "refused"
    over = "" if one.fits(plan.budget) else "over the budget"
    if one is plan.chosen:
        return f"chosen, {over}" if over else "chosen"
    return over or slower(one, plan)


def slower(one: Candidate, plan: Plan) -> str:
    """How much longer than the chosen one it takes: ``12% slower``; of predictions, compared so."""
    alike = one.verified == plan.verified
    a, b = (one.seconds, plan.seconds) if alike else (one.predicted, plan.predicted)
    change = a / b - 1 if b else 0.0
    how = "" if is_compiled(one) or not is_compiled(plan.chosen) else "predicted "
    # The exchanges that Shardy was not asked for only add to a prediction.
    untold = one.told is None and plan.chosen.told is not None and not is_compiled(one)
    most = " at most" if untold and change < _SMALL else ""
    if abs(change) < _SMALL:
        return f"{how}as fast{most}"
    return f"{how}{abs(change):.0%} {'slower' if change > 0 else 'faster'}{most}"


def exposed(one: Candidate) -> dict[tuple[str, ...], float] | None:
    """Seconds of exchanges that no work hides, by mesh axes; None where no compiler tells."""
    return one.time.exposed_by_axes if one.time and one.verified == "time" else None


def predicted_parts(one: Candidate) -> tuple[float, float, float]:
    """Seconds of products, of main memory and of exchanges, with those that a compiler adds."""
    return one.compute, one.memory, one.exchange + one.added


def added_said(one: Candidate) -> str:
    """What the compiler for a stand-in adds to a prediction; empty for nothing."""
    return f"and {show_seconds(one.added)} of exchanges that the compiler adds" * bool(one.added)


def splits(plan: Plan) -> list[tuple[str, int, str]]:
    """Each mesh axis with its size and the classes of dimensions that it splits, in their order."""
    orders = plan.chosen.orders
    return [
        (axis, size, ", ".join(orders.get(axis, ())) or "nothing")
        for axis, size in plan.axes.items()
    ]


# Where arrays lie


def spec_words(spec: Entries) -> tuple[words.Word, ...]:
    """Axes by dimension, as a PartitionSpec is written without what is whole at its end."""
    return words.spec_words(trimmed(spec))


def show_spec(spec: Entries) -> str:
    """``P('data', None, 'model')``."""
    return "".join(word.text for word in spec_words(spec))


def trimmed(spec: Entries) -> Entries:
    """Without the whole dimensions at the end."""
    last = max((d for d, axes in enumerate(spec) if axes), default=-1)
    return spec[: last + 1]


def nbytes(found: Iterable[Placed], axes: Mapping[str, int]) -> int | None:
    """Bytes on a device of some arrays; None where an element type is not known."""
    sizes = [one.nbytes_on(axes) for one in found]
    return None if None in sizes else sum(filter(None, sizes))


class Lying(NamedTuple):
    """Arrays that lie alike, and the argument that they lie as, if it is all of one."""

    fold: Fold[Placed]
    like: str = ""


def rows(found: Sequence[Placed]) -> list[Lying]:
    """Arrays that lie alike, as few rows."""
    look = operator.attrgetter("is_fixed")
    return [*map(Lying, folded(found, _name, lambda one: (trimmed(one.spec), look(one))))]


def result_rows(plan: Plan) -> list[Lying]:
    """Results that lie alike; those that lie as an argument does that is a tree are one."""
    whole = dict(_trees(plan.arguments, 1))
    rest, found = [*plan.results], []
    for depth in (1, 2, 3):
        for root, below in _trees(rest, depth):
            like = next((name for name, one in whole.items() if one == below), None)
            if like and len(below) > 1:
                items = tuple(one for one in rest if parts_of(one.name)[:depth] == parts_of(root))
                found.append(Lying(Fold(((root,),), items), like))
                rest = [one for one in rest if one not in items]
    places = {one.name: i for i, one in enumerate(plan.results)}
    return sorted([*found, *rows(rest)], key=lambda row: places[row.fold.items[0].name])


def _trees(found: Iterable[Placed], depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What begins with so many steps: by the rest of a path, the array and its place."""
    trees: dict[str, dict[str, Any]] = {}
    for one in found:
        parts = parts_of(one.name)
        tree = trees.setdefault("".join(parts[:depth]), {})
        tree["".join(parts[depth:])] = one.dtype, one.shape, trimmed(one.spec)
    yield from trees.items()


def _name(one: Placed) -> str:
    return one.name


# Prices


def priced(one: Placed) -> list[Price]:
    """What other places would cost, the least time first."""
    return sorted(one.prices, key=lambda price: (price.seconds, price.nbytes))


def price_said(one: Price) -> tuple[str, str]:
    """The time and the bytes of another place, each with its sign."""
    return words.signed(one.seconds, show_seconds), words.signed(one.nbytes, _whole_bytes)


def _whole_bytes(count: float) -> str:
    return show_bytes(round(count))


# Two plans


class Changed(NamedTuple):
    """An array that two plans put elsewhere; None where one of them has no such array."""

    name: str
    a: Entries | None
    b: Entries | None


def changed(a: Sequence[Placed], b: Sequence[Placed]) -> tuple[list[Fold[Changed]], int]:
    """Arrays that lie elsewhere in another plan, as few rows, and how many lie alike."""
    sides = [{one.name: trimmed(one.spec) for one in side} for side in (a, b)]
    both = [
        Changed(name, sides[0].get(name), sides[1].get(name))
        for name in dict.fromkeys([*sides[0], *sides[1]])
    ]
    rows = folded(both, lambda one: one.name, lambda one: (one.a, one.b))
    found = [row for row in rows if row.items[0].a != row.items[0].b]
    return found, len(both) - sum(len(row.items) for row in found)
