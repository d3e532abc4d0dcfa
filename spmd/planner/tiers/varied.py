"""The best layouts once more: activations split otherwise, and products pinned otherwise.

What of that is faster only a compiler knows.
"""

from __future__ import annotations

import dataclasses

from spmd.planner.pins import Way
from spmd.planner.search.descent import Candidate
from spmd.planner.search.experts import roles_of
from spmd.planner.tiers.choice import FOUND, Choice, places_of_large
from spmd.planner.tiers.compiled import compile_one
from spmd.planner.tiers.looking import NEAR, Looking

_AS_MUCH = 1.05
"""Up to so many times the seconds of exchanges, fewer pins are worth a compile."""
_MUCH_SLOWER = 1.3
"""More than so many times the prediction of the best, a way of pinning is not worth a compile."""
_HARDLY = 1.03
"""Up to so many times the seconds of the best, what is unlike it is pinned in other ways too."""
_SAME = 0.998
"""Above so many times the seconds before, a change of pins does not stay for the next ones."""


def split_width_of_best(looking: Looking) -> None:
    """The best one again, with the width of activations split."""
    for i in _best(looking)[:1]:
        _split_width(looking, i)


def pin_best_otherwise(looking: Looking) -> None:
    """The best ones again, with the products pinned in other ways."""
    for i in _best(looking):
        _pin_otherwise(looking, i)


def _best(looking: Looking) -> list[int]:
    """The best one that was compiled, and others that are hardly slower, if there are any.

    One is of another mesh, or an expert beside what was found; and one places large arguments
    otherwise. Where none keeps to the memory, the smallest of each mesh.
    """
    asked = [i for i, one in enumerate(looking.choices) if one.report or one.needed is not None]
    ranked = sorted(asked, key=lambda i: _standing(looking, looking.choices[i]))
    fitting = [i for i in ranked if looking.choices[i].fits(looking.rules.budget)]
    if not fitting:
        return looking.first_of_each(ranked, lambda one: one.mesh)[: looking.top]
    most = _HARDLY * looking.choices[fitting[0]].seconds
    near = [i for i in fitting if looking.choices[i].seconds <= most]
    by_name = looking.first_of_each(near, lambda one: (one.mesh, one.name == FOUND))
    by_place = looking.first_of_each(near, lambda one: (one.mesh, places_of_large(one)))
    return [*dict.fromkeys([*by_name[:2], *by_place[:2]])]


def _split_width(looking: Looking, at: int) -> None:
    """One again, whose activations are split by their width between products, if it is near.

    So MaxText's rules have it (`base.yml`, ``activation_embed``). Sums are scattered then and
    gathered again, in as many bytes as they are made whole. How much shorter the elementwise
    work in between is only a compiler knows.
    """
    best = looking.choices[at]
    if best.is_stand_in or best.layout is None or looking.is_late():
        return
    roles, layout = roles_of(best.graph), best.layout
    for axis, order in best.layout.orders:
        if {*order} & {*roles.hidden}:
            width = (c for c in roles.stored[:1] if c not in order)
            layout = layout.with_order(axis, (*order, *width))
    if layout == best.layout or not looking.rules.allow(layout):
        return
    found = Candidate(layout, looking.estimated(best, layout, Way()), 0.0)
    other = looking.previewed(looking.choice(FOUND, found, best.graph, best.mesh))
    if other.predicted <= NEAR * best.predicted:
        looking.choices.append(other)
        compile_one(looking, len(looking.choices) - 1)


def _pin_otherwise(looking: Looking, at: int) -> None:
    """One again, whose products gather and add up in other ways, or as they will.

    What is predicted to be much slower is not worth a compile. What gains nothing but noise does
    not stay for the next changes, which it may bar; all of that is tried together in the end.
    """
    usual, way = looking.choices[at], Way()
    if usual.layout is None or usual.pins == looking.pins(usual, Way(free=True)):
        return
    little: dict[str, bool] = {}
    for change in (
        {"whole": True},
        *[{"whole": False}] * bool(usual.estimate.first),
        {"ahead": False},
        {"turned": False},
        {"loose": True},
        {"free": True},
        little,
    ):
        best = looking.choices[at]
        if best.is_stand_in or looking.is_late():
            return
        other = way._replace(**change)
        pins = looking.pins(usual, other)
        if pins == best.pins or ("whole" in change and way.whole is not None):
            continue
        # What products gather ahead of their use they would not without pins.
        if other.free and _gathers_ahead(looking, usual, way):
            continue
        estimate = looking.estimated(best, usual.layout, other)
        one = dataclasses.replace(best, pins=pins, estimate=estimate)
        one = looking.previewed(dataclasses.replace(one, report=None, failure="", needed=None))
        sends_more = (one.exchange or 0.0) > (best.exchange or 0.0) * _AS_MUCH
        if sends_more and (other.loose or other.free):
            continue
        if one.predicted > _MUCH_SLOWER * best.predicted:
            continue
        looking.choices.append(one)
        compile_one(looking, len(looking.choices) - 1)
        found = looking.choices.pop()
        is_known = found.report or found.needed is not None
        if is_known and _standing(looking, found) < _standing(looking, best):
            looking.choices[at] = found
            if _is_same(looking, found, best):
                little |= change
            else:
                way = other


def _gathers_ahead(looking: Looking, one: Choice, way: Way) -> bool:
    return looking.pins(one, way._replace(ahead=False)) != looking.pins(one, way)


def _standing(looking: Looking, one: Choice) -> tuple[bool, float]:
    """Of two that were compiled, the faster one is better, or the smaller one if none fits."""
    fits = one.fits(looking.rules.budget)
    return not fits, one.seconds if fits else one.peak


def _is_same(looking: Looking, one: Choice, other: Choice) -> bool:
    """Whether one that was compiled is as good as another, but for what is noise."""
    (over, own), (is_other_over, before) = _standing(looking, one), _standing(looking, other)
    return over == is_other_over and own > _SAME * before
