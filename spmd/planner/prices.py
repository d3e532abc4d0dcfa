"""What other places of an argument would cost, by the estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

from spmd.inspection.records.plan import Entries, Price
from spmd.planner.choose import Choice
from spmd.planner.estimate import Estimate, Estimator
from spmd.planner.layout import Fixed, places_of, spec_entries
from spmd.planner.machine import Machine
from spmd.planner.optimizer import outputs_of
from spmd.planner.structure import Tensor

_MOST_KINDS = 60
"""Programs have more arguments, which are mostly of few kinds."""

_Places = Mapping[str, int]


def prices_of(one: Choice, machine: Machine, fixed: Fixed) -> dict[int, tuple[Price, ...]]:
    """By index of an argument, what its other places cost; a returned state lies as it is given.

    Arguments of one shape, of the same classes and in the same place have the same prices; of
    programs with very many kinds of arguments, the largest are priced.
    """
    if one.layout is None:
        return {}
    twins = [(o, i) for o, i in outputs_of(one.graph).items() if i is not None]
    pricing = _Pricing(one, machine, fixed, twins)
    now = pricing.estimate({})
    arguments = [i for i, tensor in enumerate(one.graph.tensors) if tensor.kind == "argument"]
    arguments.sort(key=lambda i: -one.graph.tensors[i].nbytes)
    known: dict[Any, tuple[Price, ...]] = {}
    for i in arguments:
        key = pricing.kind(i)
        if key not in known and len(known) < _MOST_KINDS:
            found = pricing.prices(i, now)
            known[key] = tuple(sorted(found, key=lambda price: price.seconds))
    return {i: known.get(pricing.kind(i), ()) for i in arguments}


@dataclasses.dataclass(frozen=True, slots=True)
class _Pricing:
    """Other places of arguments under a layout; a twin is an output, and its argument."""

    one: Choice
    machine: Machine
    fixed: Fixed
    twins: Sequence[tuple[int, int]]

    def kind(self, i: int) -> Any:
        tensor = self.one.graph.tensors[i]
        return tensor.shape, tensor.classes, tensor.is_state, tensor.nbytes, self._own(i)

    def _own(self, i: int) -> tuple[tuple[str, int], ...]:
        assert self.one.layout
        tensors = self.one.graph.tensors
        if i in (kept := self.fixed.to_dict()):
            return tuple(kept[i].items())
        places = places_of(tensors, self.one.layout, self.machine.sizes, at=[i])
        return tuple(places[i].items())

    def prices(self, i: int, now: Estimate) -> Iterator[Price]:
        tensor, own = self.one.graph.tensors[i], dict(self._own(i))
        twins = [o for o, argument in self.twins if argument == i]
        for places in _others(tensor, own, self.machine.sizes):
            found = self.estimate(dict.fromkeys((i, *twins), places))
            yield Price(
                spec=_entries(places, tensor),
                seconds=float(found.seconds - now.seconds),
                nbytes=float(found.peak - now.peak),
            )

    def estimate(self, places: Mapping[int, _Places]) -> Estimate:
        assert self.one.layout
        fixed = Fixed.of({**self.fixed.to_dict(), **places})
        return Estimator(self.one.graph, self.machine, fixed)(self.one.layout)


def _entries(places: _Places, tensor: Tensor) -> Entries:
    return tuple(spec_entries(places, len(tensor.shape)))


def _others(tensor: Tensor, own: _Places, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Nothing split; one axis less; and one axis at another dimension."""
    seen = [dict(own)]
    moved = [{}, *({a: d for a, d in own.items() if a != axis} for axis in own)]
    moved += [
        {**own, axis: d}
        for axis, size in sizes.items()
        for d in range(len(tensor.shape))
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
