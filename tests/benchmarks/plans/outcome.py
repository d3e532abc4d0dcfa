"""What was found in all cases, and every figure of it against its target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
import statistics

import scipy.stats

from spmd.inspection.records.sizes import parse_bytes

from .cases import FROM_A_BUDGET
from .compiled import Figures
from .planned import Answer, Candidate

SEEDED, SHARE, BARE = 1.00, 0.95, 1.05
PEAK, ORDER, TIME, BYTES = 0.15, 0.9, 0.15, 0.02
SEARCH, SLOW = 10.0, 30.0
_FEW, _SOME = 4, 16
_GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the planner answered for a case, and the expert that it has to reach.

    Attributes:
        name: of the case.
        where: the topology.
        there: the topology that virtual CPU devices stand in for, if the planner compiled for it.
        is_published: whether it is a run whose own layout is the expert.
        is_unrolled: whether it has many layers that are not in a loop.
        budget: bytes, as text.
        seeds: whether it began from layouts of experts, too.
        answer: the plan, or None where there was none.
        expert: the best one that keeps to the budget, or None.
    """

    name: str
    where: str
    there: str = ""
    is_published: bool = False
    is_unrolled: bool = False
    budget: str | None = None
    seeds: bool
    answer: Answer | None
    expert: Figures | None

    @property
    def ratio(self) -> float:
        """Of the compiled times, the expert's below."""
        if self.answer is None or self.expert is None or self.expert.seconds is None:
            return math.inf
        return self.answer.seconds / self.expert.seconds

    @property
    def chips(self) -> int:
        """Of the topology."""
        return math.prod(self.answer.sizes.values()) if self.answer else 0

    @property
    def keeps(self) -> bool:
        """To the budget, as compiled."""
        limit = parse_bytes(self.budget) if self.budget else math.inf
        return self.answer is not None and self.answer.peak <= limit

    def __str__(self) -> str:
        wishes = ["seeds"] * self.seeds + [one for one in (self.there, self.budget) if one]
        name = ", ".join(["plan", *wishes])
        if self.answer is None:
            return f"  {name:32} none"
        plan = self.answer
        mesh = shape_of(plan.sizes)
        sent = "" if plan.told is None else f"; {_off(plan):.1%} off in bytes"
        missed = "" if self.ratio <= (SEEDED if self.seeds else BARE) else "  MISSED"
        beside = "no expert fits"
        if self.expert:
            beside = f"{self.ratio:.2f} of {self.expert.expert.name}{missed}"
        return (
            f"  {name:32} {mesh:>6} {plan.seconds * 1e3:9.2f} {plan.peak / _GIB:7.2f}"
            f"  predicted {plan.predicted * 1e3:.2f}; {beside}"
            f"{'' if self.keeps else '  OVER ITS BUDGET'}; {plan.searched:.1f} s{sent}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A figure of all cases beside its target.

    Attributes:
        what: it says.
        value: of it, as text.
        target: likewise.
        reached: whether it is; None where nothing was measured.
    """

    what: str
    value: str
    target: str
    reached: bool | None

    def __str__(self) -> str:
        state = {True: "ok", False: "MISSED", None: "not measured"}[self.reached]
        return f"  {self.what:52} {self.value:>18}   {self.target:>8}   {state}"


def _off(plan: Answer) -> float:
    """How far the bytes that Shardy tells are from those that were compiled."""
    return abs((plan.told or 0) - plan.wire) / max(plan.wire, 1)


def shape_of(sizes: Mapping[str, int]) -> str:
    """Of a mesh, as text."""
    return "x".join(map(str, sizes.values()))


def table(found: Sequence[Found]) -> Iterator[str]:
    """All figures of sections 4 and 5 of the issue."""
    yield f"\n  {'':52} {'':>18}   {'target':>8}"
    parts = (_ratios, _budgets, _from_a_budget, _predictions, _bytes, _searches)
    for one in itertools.chain(*(part(found) for part in parts)):
        yield str(one)


def _ratios(found: Sequence[Found]) -> Iterator[Figure]:
    cases = [one for one in found if one.expert and not one.is_published]
    foretold = [one for one in cases if one.answer and one.answer.told is not None]
    cases = [one for one in cases if one not in foretold]
    for of, what in (
        (cases, "compiled time by the best expert's"),
        (foretold, "the same of a prediction on CPUs"),
    ):
        for seeds, target in ((True, SEEDED), (False, BARE)):
            ratios = [one.ratio for one in of if one.seeds is seeds]
            within = sum(ratio <= target for ratio in ratios)
            name = "with seeds" if seeds else "search alone"
            yield _all(f"{what}, {name}", within, ratios, f"{target:.2f}")
    ratios = [one.ratio for one in cases if one.seeds]
    below = sum(ratio <= SHARE for ratio in ratios)
    yield Figure(
        f"cases at {SHARE} of it or below, with seeds",
        f"{below} of {len(ratios)}",
        "a third",
        below >= len(ratios) / 3 if ratios else None,
    )
    ratios = [one.ratio for one in found if one.is_published]
    within = sum(ratio <= SEEDED for ratio in ratios)
    yield _all("published runs, by their own layout's time", within, ratios, f"{SEEDED:.2f}")


def _all(what: str, within: int, figures: Sequence[float], target: str) -> Figure:
    worst = f", worst {max(figures):.2f}" if figures else ""
    value = f"{within} of {len(figures)}{worst}"
    return Figure(what, value, target, within == len(figures) if figures else None)


def _budgets(found: Sequence[Found]) -> Iterator[Figure]:
    held = [one.keeps for one in found if one.budget and (one.answer or one.expert)]
    value = f"{sum(held)} of {len(held)}"
    yield Figure("plans that keep to their budget", value, "all", all(held) if held else None)


def _from_a_budget(found: Sequence[Found]) -> Iterator[Figure]:
    """Whether the search alone finds FSDP x TP: weights over both axes, and rows over one."""
    plans = [
        one.answer
        for one in found
        if one.name == FROM_A_BUDGET and one.budget and one.answer and not one.seeds
    ]
    both = [_is_fsdp_and_tensor(one) for one in plans]
    value = f"{sum(both)} of {len(both)}"
    yield Figure(
        "FSDP x TP for GPT-2 small from a budget", value, "all", all(both) if both else None
    )


def _is_fsdp_and_tensor(plan: Answer) -> bool:
    weights = plan.specs["state['params']['layers']['up']"]
    rows = plan.specs["batch['words']"][:1]
    axes = [axis for entry in weights for axis in entry or ()]
    return len(axes) == 2 and sum(map(bool, weights)) == 2 and len(rows[0] or ()) == 1


def _predictions(found: Sequence[Found]) -> Iterator[Figure]:
    """Of peaks and times, over all candidates that were compiled."""
    by_case = _compiled(found)
    every = [one for candidates in by_case.values() for one in candidates]
    peaks = [abs(one.estimated / one.peak - 1) for one in every if one.peak]
    yield _median("error of the predicted peak, median", peaks, PEAK)
    times = [abs(one.predicted / one.seconds - 1) for one in every if one.seconds]
    yield _median("error of the predicted time, median", times, TIME)
    orders = [_spearman(one) for one in by_case.values() if len(one) >= _FEW]
    within = sum(order >= ORDER for order in orders)
    worst = f", worst {min(orders):.2f}" if orders else ""
    yield Figure(
        "Spearman of predicted and compiled time, by case",
        f"{within} of {len(orders)}{worst}",
        f"{ORDER}",
        within == len(orders) if orders else None,
    )


def _bytes(found: Sequence[Found]) -> Iterator[Figure]:
    """Of plans that virtual CPU devices stand in for."""
    off = [_off(one.answer) for one in found if one.answer and one.answer.told is not None]
    within = sum(one <= BYTES for one in off)
    value = f"{within} of {len(off)}{f', worst {max(off):.1%}' if off else ''}"
    reached = within == len(off) if off else None
    yield Figure("bytes of CPU programs, predicted and compiled", value, f"{BYTES:.0%}", reached)


def _median(what: str, errors: Sequence[float], target: float) -> Figure:
    if not errors:
        return Figure(what, "", f"{target:.0%}", None)
    found = statistics.median(errors)
    return Figure(what, f"{found:.1%} of {len(errors)}", f"{target:.0%}", found <= target)


def _compiled(found: Iterable[Found]) -> dict[tuple[str, str], list[Candidate]]:
    """The different candidates of each case and topology that were compiled.

    A layout on 8x2 may be one on 2x8, whose axes have each other's names: it counts once.
    """
    by_case: dict[tuple[str, str], dict[tuple[float, float], Candidate]] = {}
    for one in found:
        for each in one.answer.candidates if one.answer else ():
            if each.seconds:
                own = by_case.setdefault((one.name, one.there or one.where), {})
                own[each.predicted, each.seconds] = each
    return {key: [*candidates.values()] for key, candidates in by_case.items()}


def _spearman(candidates: Sequence[Candidate]) -> float:
    columns = [one.predicted for one in candidates], [one.seconds for one in candidates]
    return float(scipy.stats.spearmanr(*columns).statistic)


def _searches(found: Sequence[Found]) -> Iterator[Figure]:
    """Seconds of a search over all mesh shapes."""
    groups = (
        ("search, scanned, to 16 chips, s", SEARCH, False, False),
        ("search, unrolled, to 16 chips, s", SLOW, True, False),
        ("search, more chips, s", SLOW, False, True),
    )
    for name, target, *belongs in groups:
        every = [
            one.answer.searched
            for one in found
            if one.answer and [one.is_unrolled, one.chips > _SOME] == belongs
        ]
        within = sum(seconds <= target for seconds in every)
        yield _all(name, within, every, f"{target:.0f}")
