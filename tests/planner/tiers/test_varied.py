"""The best layouts once more: which ways of pinning are compiled, and what stays of them."""

import dataclasses
import itertools

from hardware import WITHOUT_LIBTPU
from looked_at import MLP, as_compiled, looking_at
from planned_programs import classes, pins_of
import pytest

import spmd
from spmd.planner.pins import Way
from spmd.planner.search.descent import Rules
from spmd.planner.tiers import compiled as tier
from spmd.planner.tiers.choice import FOUND, Choice
from spmd.planner.tiers.compiled import compile_best
from spmd.planner.tiers.varied import pin_best_otherwise, split_width_of_best


@pytest.mark.parametrize(
    ("data", "model", "wide"),
    [("b", "f", "fd"), ("bd", "f", "fd"), ("b", "fd", None), ("bd", "", None)],
    ids=["Megatron", "FSDP x TP", "split so already", "FSDP"],
)
def test_the_best_one_is_compiled_with_its_width_split_too(monkeypatch, data, model, wide):
    """Where an axis splits hidden widths alone; the faster of both is the answer."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    looking = looking_at(spmd.topology("v5e:2x2", {"data": 2, "model": 2}), 2, *(data, model))
    of = classes(MLP.graph(looking.choices[0].mesh))
    letters = {of["x:1"]: "d", of["w['up']:1"]: "f", of["x:0"]: "b"}
    seen = []

    def report(one, lowered, chip):
        orders = {a: "".join(map(letters.get, order)) for a, order in one.layout.orders}
        seen.append((orders["data"], orders["model"]))
        return as_compiled(one, 0.5 if orders["model"] == "fd" else 1.0)

    monkeypatch.setattr(tier, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    compile_best(looking)
    split_width_of_best(looking)
    assert seen == [(data, model)] + [(data, wide)] * bool(wide)
    assert looking.chosen().choices[0].seconds == (0.5 if "fd" in (model, wide) else 1.0)


def test_a_width_that_is_far_is_not_split(monkeypatch):
    """What is predicted to be much slower is not worth a compile."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    looking = looking_at(spmd.topology("v5e:2x2", {"data": 2, "model": 2}), 2, "b", "f")
    (one,) = looking.choices
    estimate = dataclasses.replace(one.estimate, compute=1e-9)
    looking.choices = [dataclasses.replace(one, estimate=estimate, exchange=0.0, told=())]
    seen = []

    def report(one, lowered, chip):
        seen.append(one)
        return as_compiled(one, 1.0)

    monkeypatch.setattr(tier, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    compile_best(looking)
    split_width_of_best(looking)
    assert len(seen) == 1 == len(looking.choices)


@pytest.mark.parametrize(
    ("seconds", "compiled", "best"),
    [
        ({}, 5, Way()),
        ({Way(whole=True): 0.5}, 5, Way(whole=True)),
        ({Way(whole=True): 0.999}, 5, Way(whole=True)),
        ({Way(whole=True): 0.999, Way(turned=False): 0.5}, 6, Way(turned=False)),
        ({Way(whole=True): 0.999, Way(ahead=False): 0.5}, 7, Way(ahead=False)),
        (
            {Way(whole=True): 0.999, Way(turned=False): 0.5, Way(True, True, False): 0.4},
            6,
            Way(True, True, False),
        ),
        (
            {Way(whole=True): 0.999, Way(ahead=False): 0.998, Way(False, True): 0.99},
            6,
            Way(False, True),
        ),
        ({Way(ahead=False): 0.999, Way(free=True): 0.5}, 5, Way(ahead=False)),
        ({Way(ahead=False): 0.5}, 6, Way(ahead=False)),
        ({Way(whole=True): 0.5, Way(ahead=False, whole=True): 0.4}, 6, Way(False, True)),
        ({Way(whole=True): 0.5, Way(ahead=False): 0.1}, 5, Way(whole=True)),
        ({Way(turned=False): 0.5}, 5, Way(turned=False)),
        ({Way(whole=True): 0.5, Way(True, True, turned=False): 0.4}, 5, Way(True, True, False)),
        ({Way(whole=True): 0.5, Way(loose=True): 0.4}, 5, Way(loose=True)),
        ({Way(ahead=False): 0.5, Way(ahead=False, loose=True): 0.4}, 6, Way(False, loose=True)),
        ({Way(ahead=False): 0.5, Way(free=True): 0.4}, 6, Way(free=True)),
    ],
)
def test_the_best_one_is_pinned_in_other_ways(monkeypatch, seconds, compiled, best):
    """What makes it faster is kept; the next change is made to it, if it is so beyond noise.

    What is faster by so little is tried together in the end.
    """
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x2", {"data": 2, "model": 2})
    seen = []

    def way_of(one):
        """That of its pins; of loose ones, sums are the same either way."""
        ways = [Way(free=True), Way(loose=True), Way(ahead=False, loose=True)]
        known = itertools.product((True, False), (None, True), (True, False))
        ways += itertools.starmap(Way, known)
        sizes = dict(pod.shape)
        found = {way: pins_of(one.graph, one.layout, sizes, way=way) for way in ways}
        assert len({*found.values()}) == 11
        return next(way for way, pins in found.items() if pins == one.pins)

    def report(one, lowered, chip):
        seen.append(way := way_of(one))
        return as_compiled(one, seconds.get(way, 1.0))

    monkeypatch.setattr(tier, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    looking = looking_at(pod, 2, "bd", "f")
    compile_best(looking)
    pin_best_otherwise(looking)
    assert len(seen) == compiled == looking.chosen().compiles
    assert [way_of(one) for one in looking.choices] == [best]


@pytest.mark.parametrize(("slower", "is_compiled"), [(1.25, True), (1.35, False)])
def test_a_way_that_seems_far_slower_is_not_compiled(monkeypatch, slower, is_compiled):
    """Such as weights that go around, where these would be waited for."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    looking = looking_at(spmd.topology("v5e:2x2", {"data": 2, "model": 2}), 2, "bd", "f")
    (one,) = looking.choices
    longer = dataclasses.replace(one.estimate, compute=slower)
    looking.estimated = lambda one, layout, way: one.estimate if way.ahead else longer
    seen = []

    def report(one, lowered, chip):
        seen.append(one.pins)
        return as_compiled(one, 1.0)

    monkeypatch.setattr(tier, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    compile_best(looking)
    pin_best_otherwise(looking)
    assert looking.pins(one, Way(whole=True)) in seen
    assert (looking.pins(one, Way(ahead=False)) in seen) == is_compiled


def test_sums_that_are_to_be_made_first_are_tried_in_parts(monkeypatch):
    """Which is faster a compiler says; the estimate is of what was compiled."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x2", {"data": 2, "model": 2})
    looking = looking_at(pod, 2, "bd", "f")
    (one,) = looking.choices
    del looking.estimated
    every = frozenset(looking.estimators[pod].alike.values())
    one = dataclasses.replace(one, estimate=dataclasses.replace(one.estimate, first=every))
    whole, parts = (looking.pins(one, Way(whole=whole)) for whole in (True, False))
    assert looking.pins(one, Way()) == whole != parts
    looking.choices = [dataclasses.replace(one, pins=whole)]
    seen = []

    def report(one, lowered, chip):
        seen.append(one.pins)
        return as_compiled(one, 0.5 if one.pins == parts else 1.0)

    monkeypatch.setattr(tier, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    compile_best(looking)
    pin_best_otherwise(looking)
    (best,) = looking.choices
    assert (best.pins, best.seconds, best.estimate.first) == (parts, 0.5, frozenset())
    assert len({*seen}) == len(seen)


@pytest.mark.parametrize(("behind", "answer"), [(1.025, "second"), (1.04, "first")])
def test_a_second_mesh_that_is_hardly_slower_is_pinned_in_other_ways(monkeypatch, behind, answer):
    """Which of two is better is known only when both are compiled as they are fastest."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pods = [spmd.topology("v5e:2x2", axes) for axes in ({"data": 2, "model": 2}, {"data": 4})]
    looking, other = looking_at(pods[0], 3, "bd", "f"), looking_at(pods[1], 3, "bd", "")
    own = {pods[0]: looking.choices[0].pins, pods[1]: other.choices[0].pins}
    looking.choices += other.choices
    looking.estimators |= other.estimators

    def report(one, lowered, chip):
        first, plain = one.mesh == pods[0], one.pins == own[one.mesh]
        seconds = (1.0 if first else behind) if plain else (0.9 if first else 0.5)
        return as_compiled(one, seconds)

    monkeypatch.setattr(tier, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    compile_best(looking)
    pin_best_otherwise(looking)
    best = looking.chosen().choices[0]
    wanted = {"first": (pods[0], 0.9), "second": (pods[1], 0.5)}
    assert (best.mesh, best.seconds) == wanted[answer]


@pytest.mark.parametrize(("behind", "seconds"), [(1.025, 0.5), (1.04, 0.9)])
@pytest.mark.parametrize(
    ("names", "is_alike"),
    [(("an expert",), False), (("an expert",), True), ((FOUND, "an expert"), False)],
)
def test_what_was_found_is_pinned_in_other_ways_beside_an_expert(
    monkeypatch, names, is_alike, behind, seconds
):
    """What is hardly faster does not keep another layout that was found from its best form.

    Whether an expert is that, which may place arguments alike, or what was found and an expert.
    """
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x2", {"data": 2, "model": 2})
    looking = looking_at(pod, 3, "bd", "f")
    (found,), (best,) = looking.choices, looking_at(pod, 3, "bd", "").choices
    if is_alike:
        looking.choices = [found := dataclasses.replace(found, ins=best.ins)]
    looking.choices += [dataclasses.replace(best, name=name) for name in names]

    def report(one, lowered, chip):
        own = found if one.layout == found.layout else best
        plain = behind if own is found else 1.0
        other = 0.5 if own is found else 0.9
        return as_compiled(one, plain if one.pins == own.pins else other)

    monkeypatch.setattr(tier, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    compile_best(looking)
    pin_best_otherwise(looking)
    assert looking.chosen().choices[0].seconds == seconds


def test_what_does_not_fit_is_pinned_in_other_ways(monkeypatch):
    """Sums that are made at once may take less memory than those whose parts go around."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x2", {"data": 2, "model": 2})
    looking = looking_at(pod, 2, "bd", "f")
    looking.rules = Rules(budget=2.0)
    (one,) = looking.choices
    whole = looking.pins(one, Way(whole=True))

    def compiled(one, lowered, chip):
        peak, seconds = (1.0, 5.0) if one.pins == whole else (3.0, 1.0)
        return as_compiled(one, seconds, peak)

    monkeypatch.setattr(tier, "_compiled", compiled)
    compile_best(looking)
    pin_best_otherwise(looking)
    (found,) = looking.chosen().choices
    assert (found.pins, found.peak) == (whole, 1.0)
    assert found.fits(2.0)


def test_nothing_is_pinned_in_other_ways_when_the_time_is_up(monkeypatch):
    """Shardy is not asked of what will not be compiled, which may take seconds each time."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    looking = looking_at(spmd.topology("v5e:2x2", {"data": 2, "model": 2}), 2, "bd", "f")
    seen = []

    def compiled(one, lowered, chip):
        looking.rules = Rules(deadline=0.0)
        return as_compiled(one, 1.0)

    real = looking.previewed
    monkeypatch.setattr(looking, "previewed", lambda one: seen.append(one) or real(one))
    monkeypatch.setattr(tier, "_compiled", compiled)
    compile_best(looking)
    pin_best_otherwise(looking)
    assert len(seen) == 1
    assert not looking.chosen().complete


def test_of_what_does_not_fit_one_of_each_mesh_is_pinned_in_other_ways(monkeypatch):
    """Which of several needs less when its sums are made at once is not known before."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pods = [spmd.topology("v5e:2x2", axes) for axes in ({"data": 2, "model": 2}, {"data": 4})]
    looking, other = looking_at(pods[0], 3, "bd", "f"), looking_at(pods[1], 3, "bd", "")
    looking.rules, looking.choices = Rules(budget=2.0), [*looking.choices, *other.choices]
    looking.estimators |= other.estimators
    whole = [looking.pins(one, Way(whole=True)) for one in looking.choices]

    def compiled(one, lowered, chip):
        at = pods.index(one.mesh)
        peak = (2.5, 1.0)[at] if one.pins == whole[at] else (3.0, 4.0)[at]
        return as_compiled(one, 1.0, peak)

    monkeypatch.setattr(tier, "_compiled", compiled)
    compile_best(looking)
    pin_best_otherwise(looking)
    first, second = looking.chosen().choices
    assert (first.mesh, first.pins, first.peak) == (pods[1], whole[1], 1.0)
    assert (second.mesh, second.peak) == (pods[0], 2.5)


@pytest.mark.parametrize(
    ("data", "model", "slower", "left"),
    [("b", "f", [], 0), ("bd", "f", [], 10), ("fd", "df", [], 10), ("b", "f", [0, 10], 15)],
    ids=["Megatron", "gathers ahead", "sends more without pins", "sends more without results"],
)
def test_the_best_one_has_the_fewest_pins(monkeypatch, data, model, slower, left):
    """Without those of results, or without any, it is compiled where it sends no more so.

    What is gathered ahead has to be pinned. Of products, two forward and three backward, there are
    ten operands and five results.
    """
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x2", {"data": 2, "model": 2})

    def count(one):
        return sum(spec is not None for pin in one.pins for spec in pin.specs)

    def report(one, lowered, chip):
        return as_compiled(one, 1.0 + count(one))

    monkeypatch.setattr(tier, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    looking = looking_at(pod, 2, data, model)
    assert count(looking.choices[0]) == 15
    real = looking.previewed

    def previewed(one):
        return dataclasses.replace(real(one), **({"exchange": 1.0} if count(one) in slower else {}))

    monkeypatch.setattr(looking, "previewed", previewed)
    compile_best(looking)
    pin_best_otherwise(looking)
    assert [count(one) for one in looking.choices] == [left]
