"""Which layouts the compiler is asked of."""

import dataclasses
import types

from looked_at import MLP, looking_at
import pytest

import spmd
from spmd.inspection.timing.chips import CHIPS
from spmd.planner.choose import choose
from spmd.planner.search.descent import Rules
from spmd.planner.tiers import compiled as tier
from spmd.planner.tiers.compiled import compile_best
from spmd.planner.tiers.previewed import preview_best


@pytest.mark.slow
def test_a_compiler_that_needs_more_memory_is_asked_about_smaller_layouts(monkeypatch, mesh):
    """What the first layouts need beyond their estimates says how much less to search for."""

    def report(one, lowered, chip):
        memory = types.SimpleNamespace(peak=2 * one.estimate.peak)
        time = types.SimpleNamespace(seconds=one.predicted, exchange=0.0)
        found = types.SimpleNamespace(time=time, memory=memory, collectives=())
        return dataclasses.replace(one, report=found)

    monkeypatch.setattr(tier, "_compiled", report)
    options = {"chip": CHIPS["v5e"], "seeds": False, "cached": False}
    free = choose(MLP, [mesh], top=0, **options).choices[0]
    budget = 1.5 * free.estimate.peak
    wanted = choose(MLP, [mesh], rules=Rules(budget=budget / 2), top=0, **options).choices[0]
    assert wanted.estimate.peak <= budget / 2
    found = choose(MLP, [mesh], rules=Rules(budget=budget), top=1, **options)
    assert found.choices[0].report is not None
    assert found.choices[0].fits(budget)
    assert found.choices[0].seconds == pytest.approx(wanted.predicted)
    # Where the fastest one fits, nothing is searched for again.
    enough = choose(MLP, [mesh], rules=Rules(budget=2 * budget), top=1, **options)
    assert (
        enough.tried == choose(MLP, [mesh], rules=Rules(budget=2 * budget), top=0, **options).tried
    )


def test_what_shardy_was_not_asked_of_is_compiled_later(monkeypatch):
    """A prediction without Shardy's exchanges is too low to be compared with one that has them."""
    pod = spmd.make_mesh({"data": 4, "model": 2})
    looking = looking_at(pod, 1, "b", "f")
    known = looking.previewed(*looking_at(pod, 1, "b", "").choices)
    assert known.exchange > 0
    looking.choices.append(known)
    assert looking.choices[0].predicted < known.predicted
    report = types.SimpleNamespace(time=None, memory=None)
    monkeypatch.setattr(tier, "_compiled", lambda one, *_: dataclasses.replace(one, report=report))
    compile_best(looking)
    assert [one.report is not None for one in looking.choices] == [False, True]


@pytest.mark.parametrize("other", [{"data": 2, "model": 2}, {"data": 4, "model": 1}])
def test_equal_figures_are_compiled_later(monkeypatch, other):
    """Rows over one axis or the other are one program; over both they are not, though slower.

    Nor are they more on another mesh.
    """
    looking = looking_at(spmd.make_mesh({"data": 2, "model": 2}), 2, "b", "")
    (one,) = looking_at(spmd.make_mesh(other), 2, "b", "").choices
    looking.choices.append(one)
    for orders, seconds in (("", "b"), 1.0), (("b", "b"), 1.1):
        (one,) = looking_at(spmd.make_mesh({"data": 2, "model": 2}), 2, *orders).choices
        estimate = dataclasses.replace(one.estimate, compute=seconds)
        looking.choices.append(dataclasses.replace(one, estimate=estimate))
    seen = []

    def report(one, *_):
        seen.append(one.estimate.seconds)
        return dataclasses.replace(one, report=types.SimpleNamespace(time=None, memory=None))

    monkeypatch.setattr(tier, "_compiled", report)
    compile_best(looking)
    assert seen == [1.0, 1.1]


@pytest.mark.parametrize(
    ("compiled", "estimated", "asked"),
    [
        ([1, 1, 1, 1, 1], [1] * 5, 2),
        ([9, 1, 9, 1, 1], [1] * 5, 4),
        ([9, 9, 9, 9, 1], [1] * 5, 4),  # at most twice as many
        ([9, 1, 1, 1, 1], [1, 1, 9, 9, 9], 2),  # the others do not even seem to fit
        ([None, None, 1, 1, 1], [1] * 5, 4),  # those that the compiler refuses
    ],
)
def test_what_does_not_fit_as_compiled_is_none_of_the_best(monkeypatch, compiled, estimated, asked):
    """Others take its place, as long as they seem to fit: two of five are wanted."""
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 2, "b", "f")
    one = looking.choices[0]
    looking.choices = [
        dataclasses.replace(
            one,
            ins=(i,),  # another program
            told=(),
            estimate=dataclasses.replace(one.estimate, compute=1.0 + i / 100, peak=peak),
        )
        for i, peak in enumerate(estimated)
    ]
    looking.rules = Rules(budget=2.0)
    seen = []

    def report(one, *_):
        (i,) = one.ins
        seen.append(i)
        if compiled[i] is None:
            return dataclasses.replace(one, failure="out of memory", needed=9)
        memory = types.SimpleNamespace(peak=compiled[i])
        return dataclasses.replace(one, report=types.SimpleNamespace(time=None, memory=memory))

    monkeypatch.setattr(tier, "_compiled", report)
    monkeypatch.setattr(tier, "planned", lambda *_: None)
    monkeypatch.setattr(tier, "previewed", lambda *_, **__: types.SimpleNamespace(collectives=()))
    tier._compile_first(looking, range(5), 2)
    assert seen == [*range(asked)]


@pytest.mark.parametrize(("budget", "first"), [(1.0, 1.1), (3.0, 1.0), (None, 1.0)])
def test_of_what_does_not_fit_less_comes_first(monkeypatch, budget, first):
    """The slower one of two, which needs half as much, where the budget is too small for both."""
    looking = looking_at(spmd.make_mesh({"data": 2, "model": 2}), 1, "b", "f")
    (other,) = looking_at(spmd.make_mesh({"data": 2, "model": 2}), 1, "b", "b").choices
    for one, seconds, peak in ((looking.choices.pop(), 1.0, 3.0), (other, 1.1, 1.5)):
        estimate = dataclasses.replace(one.estimate, compute=seconds, peak=peak)
        looking.choices.append(dataclasses.replace(one, estimate=estimate))
    looking.rules = Rules(budget=budget)
    preview_best(looking)
    assert min(looking.choices, key=looking.rank).estimate.compute == first
