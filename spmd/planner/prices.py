"""What other places of an argument would cost: by the estimate, and of the cheapest by previews."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, NamedTuple

from spmd.inspection.records.plan import Entries, Price
from spmd.planner.cost.estimate import Estimate, Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.program.layout import Fixed, places_of, spec_entries
from spmd.planner.program.optimizer import outputs_of
from spmd.planner.program.structure import Tensor
from spmd.planner.tiers.choice import Choice
from spmd.planner.tiers.looking import as_shardy_makes
from spmd.planner.verify import Program, entries_of

_MOST_KINDS = 60
"""Programs have more arguments, which are mostly of few kinds."""

_LOOKED_AT = 12
"""Places that are previewed: those that cost least for the bytes of their argument by the estimate,
which knows nothing of what lies between the values that are pinned, and may take a place to be
faster that is far slower."""

_Places = Mapping[str, int]


def prices_of(
    one: Choice, machine: Machine, fixed: Fixed, source: Program | None
) -> dict[int, tuple[Price, ...]]:
    """By index of an argument, what its other places cost; a returned state lies as it is given.

    Arguments of one shape, of the same classes and in the same place have the same prices; of
    programs with very many kinds of arguments, the largest are priced.

    Args:
        one: the layout that other places are compared with.
        machine: that it is for.
        fixed: the places that the user gave.
        source: the program, for previews; None where there is no time for them.
    """
    if one.layout is None:
        return {}
    twins = [(o, i) for o, i in outputs_of(one.graph).items() if i is not None]
    pricing = _Pricing(one, machine, fixed, twins)
    arguments = [i for i, tensor in enumerate(one.graph.tensors) if tensor.kind == "argument"]
    arguments.sort(key=lambda i: -one.graph.tensors[i].nbytes)
    first: dict[Any, int] = {}
    for i in arguments:
        first.setdefault(pricing.kind(i), i)
    priced = [i for _, i in itertools.islice(first.items(), _MOST_KINDS)]
    known = pricing.all_of(priced, source)
    return {i: known.get(first[pricing.kind(i)], ()) for i in arguments}


class _Other(NamedTuple):
    """Another place of an argument and of the outputs that lie as it does, and what it costs."""

    argument: int
    at: Mapping[int, _Places]
    estimate: Estimate

    @property
    def places(self) -> _Places:
        return self.at[self.argument]


@dataclasses.dataclass(frozen=True, slots=True)
class _Pricing:
    """Other places of arguments under a layout; a twin is an output, and its argument."""

    one: Choice
    machine: Machine
    fixed: Fixed
    twins: Sequence[tuple[int, int]]

    def kind(self, i: int) -> Any:
        tensor = self.one.graph.tensors[i]
        own = tensor.shape, tensor.inner, tensor.classes, tensor.is_state, tensor.nbytes
        return *own, self._own(i)

    def _own(self, i: int) -> tuple[tuple[str, int], ...]:
        assert self.one.layout
        tensors = self.one.graph.tensors
        if i in (kept := self.fixed.to_dict()):
            return tuple(kept[i].items())
        places = places_of(tensors, self.one.layout, self.machine.sizes, at=[i])
        return tuple(places[i].items())

    def all_of(
        self, arguments: Sequence[int], source: Program | None
    ) -> dict[int, tuple[Price, ...]]:
        """What other places of each argument cost, the cheapest first."""
        assert self.one.layout
        own = {i: [i, *(o for o, argument in self.twins if argument == i)] for i in arguments}
        apart = {i for found in own.values() for i in found}
        estimate = Estimator(self.one.graph, self.machine, self.fixed, apart)
        now = estimate(self.one.layout)
        others = [
            _Other(i, at, estimate.keeping(at)(self.one.layout))
            for i, twins in own.items()
            for places in _others(self.one.graph.tensors[i], dict(self._own(i)), self.machine.sizes)
            for at in [dict.fromkeys(twins, places)]
        ]
        size = {i: self.one.graph.tensors[i].nbytes for i in arguments}
        others.sort(
            key=lambda other: (
                max(0.0, other.estimate.seconds - now.seconds) / max(1, size[other.argument]),
                -size[other.argument],
            )
        )
        one = dataclasses.replace(self.one, estimate=now)
        if source and others and one.exchange is None:
            one = as_shardy_makes(one, source, self.machine.chip)
        found: dict[int, list[Price]] = {i: [] for i in arguments}
        for count, other in enumerate(others):
            seconds = other.estimate.seconds - now.seconds
            if source and count < _LOOKED_AT:
                moved = self._moved(one, other, source)
                seconds = moved.predicted - one.predicted
            spec = _entries(other.places, self.one.graph.tensors[other.argument])
            nbytes = other.estimate.peak - now.peak
            found[other.argument].append(Price(spec=spec, seconds=seconds, nbytes=nbytes))
        by_seconds = (sorted(prices, key=lambda price: price.seconds) for prices in found.values())
        return dict(zip(found, map(tuple, by_seconds), strict=True))

    def _moved(self, one: Choice, other: _Other, source: Program) -> Choice:
        """The same layout with an argument elsewhere, as Shardy makes it."""
        assert one.layout
        fixed = Fixed.of({**self.fixed.to_dict(), **other.at})
        ins, outs = entries_of(one.graph, one.layout, self.machine.sizes, fixed)
        ins = source.whole(one.mesh, ins)
        moved = dataclasses.replace(one, ins=ins, outs=outs, estimate=other.estimate)
        return as_shardy_makes(moved, source, self.machine.chip)


def _entries(places: _Places, tensor: Tensor) -> Entries:
    return tuple(spec_entries(places, len(tensor.shape) - tensor.inner))


def _others(tensor: Tensor, own: _Places, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Nothing split; one axis less; and one axis at another dimension."""
    seen = [dict(own)]
    moved = [{}, *({a: d for a, d in own.items() if a != axis} for axis in own)]
    moved += [
        {**own, axis: d}
        for axis, size in sizes.items()
        for d in range(len(tensor.shape) - tensor.inner)
        if size > 1 and _divides({**own, axis: d}, d, tensor, sizes)
    ]
    for places in moved:
        if places not in seen:
            seen.append(places)
            yield places


def _divides(places: _Places, d: int, tensor: Tensor, sizes: Mapping[str, int]) -> bool:
    parts = 1
    for axis, at in places.items():
        parts *= sizes[axis] if at == d else 1
    return tensor.shape[d] % parts == 0
