"""Which layouts Shardy is asked of."""

import dataclasses

from looked_at import looking_at
import pytest

import spmd
from spmd.planner.pins import Way
from spmd.planner.tiers import previewed
from spmd.planner.tiers.previewed import preview_best


@pytest.mark.parametrize(
    ("least", "more", "asked"),
    [
        (0.0, 12, [True, True, True, False]),  # the last one is slower than the first in any case
        (0.0, 1, [True, True, False, False]),
        (0.0, 0, [True, False, False, False]),
        (0.7, 12, [True, True, False, False]),
        (1.0, 12, [True, False, False, False]),
    ],
)
def test_shardy_is_asked_of_what_seems_better(monkeypatch, least, more, asked):
    """The first one takes 2 s with its exchanges; others that may take less are timed, too.

    Exchanges add so much at least: to one that is known, and far behind.
    """
    monkeypatch.setattr(previewed, "_LOOKED_AT", 2)
    monkeypatch.setattr(previewed, "_OF_EACH", 1)
    monkeypatch.setattr(previewed, "_AFTER_THOSE", more)
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 1, "b", "f")
    one = looking.choices[0]
    looking.choices = [
        dataclasses.replace(one, estimate=dataclasses.replace(one.estimate, compute=seconds))
        for seconds in (1.0, 1.2, 1.4, 2.1, 9.0)
    ]
    looking.choices[-1] = dataclasses.replace(looking.choices[-1], exchange=least, told=())
    monkeypatch.setattr(
        looking,
        "previewed",
        lambda one: one if one.told == () else dataclasses.replace(one, exchange=1.0, told=()),
    )
    preview_best(looking)
    assert [one.told is not None for one in looking.choices[:-1]] == asked


def test_pins_that_cost_most_are_left_out(monkeypatch):
    """Also of the layout that is best by its estimate, and not as it is pinned."""
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 1, "b", "f")
    (one,) = looking.choices
    without = looking.pins(one, Way(free=True))
    assert without != one.pins
    best, other = (dataclasses.replace(one.estimate, compute=seconds) for seconds in (1.0, 1.5))
    looking.choices = [
        dataclasses.replace(one, estimate=best),
        dataclasses.replace(one, estimate=other, outs=()),  # another program
    ]
    sent = {best: 5.0, other: 1.0}
    monkeypatch.setattr(
        looking,
        "previewed",
        lambda one: dataclasses.replace(
            one, exchange=0.0 if one.pins == without else sent[one.estimate], told=()
        ),
    )
    preview_best(looking)
    assert sorted(one.predicted for one in looking.choices) == [1.0, 1.5, 2.5, 6.0]


@pytest.mark.parametrize(
    ("named", "asked"),
    [
        (1, [True, True, True, False, False]),  # the last one is slower than the best of them
        (2, [True, True, True, True, False]),
    ],
)
def test_shardy_is_asked_of_the_experts_that_seem_best(monkeypatch, named, asked):
    """What was found seems faster than they are; the best of them are known all the same."""
    monkeypatch.setattr(previewed, "_LOOKED_AT", 1)
    monkeypatch.setattr(previewed, "_OF_EACH", 1)
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 1, "b", "f")
    looking.named = named
    one = looking.choices[0]
    looking.choices = [
        dataclasses.replace(
            one, name=name, estimate=dataclasses.replace(one.estimate, compute=seconds)
        )
        for name, seconds in (("found", 1.0), ("FSDP", 2.0), ("DP", 2.5), ("TP", 3.2), ("2D", 9.0))
    ]
    sent = {1.0: 0.0, 2.0: 3.0, 2.5: 0.5, 3.2: 0.1}
    monkeypatch.setattr(
        looking,
        "previewed",
        lambda one: dataclasses.replace(one, exchange=sent[one.estimate.compute], told=()),
    )
    preview_best(looking)
    assert [one.told is not None for one in looking.choices] == asked


@pytest.mark.parametrize(
    ("sent", "seconds", "asked"), [(0.6, 1.4, True), (0.6, 1.6, False), (0.3, 1.4, False)]
)
def test_shardy_is_asked_of_another_mesh_that_is_near(monkeypatch, sent, seconds, asked):
    """Of each mesh some are timed, but where exchanges, which only add, would make up for none.

    Nor where it is behind what is known of as many as may be compiled.
    """
    monkeypatch.setattr(previewed, "_LOOKED_AT", 1)
    first, second = ({"data": 4, "model": 2}, {"data": 2, "model": 4})
    looking = looking_at(spmd.make_mesh(first), 1, "b", "f")
    looking.choices *= 3
    other = looking_at(spmd.make_mesh(second), 1, "b", "f")
    looking.estimators |= other.estimators
    (one,) = other.choices
    estimate = dataclasses.replace(one.estimate, compute=seconds)
    looking.choices.append(dataclasses.replace(one, estimate=estimate))
    monkeypatch.setattr(
        looking, "previewed", lambda one: dataclasses.replace(one, exchange=sent, told=())
    )
    preview_best(looking)
    assert [one.told is not None for one in looking.choices] == [True, True, False, asked]


@pytest.mark.parametrize(
    ("top", "asked"), [(1, [True, True, False, False]), (2, [True, True, True, True])]
)
def test_shardy_is_asked_of_as_many_as_may_be_compiled(monkeypatch, top, asked):
    """Twice as many as are wanted, since some may not fit; of others, as far as they may be best.

    Of two that are wanted the first four are timed, though exchanges make none of them slower.
    """
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), top, "b", "f")
    one = looking.choices[0]
    looking.choices = [
        dataclasses.replace(one, estimate=dataclasses.replace(one.estimate, compute=seconds))
        for seconds in (1.0, 1.1, 1.2, 1.3)
    ]
    monkeypatch.setattr(
        looking, "previewed", lambda one: dataclasses.replace(one, exchange=0.0, told=())
    )
    preview_best(looking)
    assert [one.told is not None for one in looking.choices] == asked


def test_what_lies_as_another_is_asked_of_where_it_seems_faster(monkeypatch):
    """One with the figures of the first comes later, and may lie as what is asked of before it.

    The last one lies so as well, and is behind; what it might take is less than is known of two.
    """
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 1, "b", "f")
    one = looking.choices[0]
    elsewhere = tuple(((),) * len(entries) for entries in one.ins)
    assert elsewhere != one.ins
    looking.choices = [
        dataclasses.replace(
            one, ins=ins, estimate=dataclasses.replace(one.estimate, compute=seconds)
        )
        for seconds, ins in ((1.0, one.ins), (1.0, elsewhere), (1.1, elsewhere), (1.2, elsewhere))
    ]
    monkeypatch.setattr(
        looking, "previewed", lambda one: dataclasses.replace(one, exchange=0.5, told=())
    )
    preview_best(looking)
    assert [one.told is not None for one in looking.choices] == [True, True, True, False]


def test_what_has_the_figures_of_another_is_not_asked_of_again(monkeypatch):
    """It may well be the same program, and seems to be better only as long as it is not known.

    The last one is known, far behind, and says that exchanges may add nothing.
    """
    monkeypatch.setattr(previewed, "_LOOKED_AT", 2)
    monkeypatch.setattr(previewed, "_OF_EACH", 1)
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 1, "b", "f")
    one = looking.choices[0]
    looking.choices = [
        dataclasses.replace(one, estimate=dataclasses.replace(one.estimate, compute=seconds))
        for seconds in (1.0, 1.0, 1.4, 1.4, 9.0)
    ]
    looking.choices[-1] = dataclasses.replace(looking.choices[-1], exchange=0.0, told=())
    monkeypatch.setattr(
        looking,
        "previewed",
        lambda one: one if one.told == () else dataclasses.replace(one, exchange=1.0, told=()),
    )
    preview_best(looking)
    assert [one.told is not None for one in looking.choices[:-1]] == [True, False, True, False]
