"""What other places of an argument would cost, by the estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any

from spmd.inspection.records.plan import Entries, Price
from spmd.planner.choose import Choice
from spmd.planner.cost.estimate import Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.program.layout import Fixed, places_of, spec_entries
from spmd.planner.program.optimizer import outputs_of
from spmd.planner.program.structure import Tensor

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
    arguments = [i for i, tensor in enumerate(one.graph.tensors) if tensor.kind == "argument"]
    arguments.sort(key=lambda i: -one.graph.tensors[i].nbytes)
    first: dict[Any, int] = {}
    for i in arguments:
        first.setdefault(pricing.kind(i), i)
    priced = dict(itertools.islice(first.items(), _MOST_KINDS))
    of_kind = pricing.all_of([*priced.values()])
    known = dict(zip(priced, of_kind, strict=True))
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
        own = tensor.shape, tensor.inner, tensor.classes, tensor.is_state, tensor.nbytes
        return *own, self._own(i)

    def _own(self, i: int) -> tuple[tuple[str, int], ...]:
        assert self.one.layout
        tensors = self.one.graph.tensors
        if i in (kept := self.fixed.to_dict()):
            return tuple(kept[i].items())
        places = places_of(tensors, self.one.layout, self.machine.sizes, at=[i])
        return tuple(places[i].items())

    def all_of(self, arguments: Sequence[int]) -> Iterator[tuple[Price, ...]]:
        """What other places of each argument cost, the cheapest first."""
        assert self.one.layout
        own = {i: [i, *(o for o, argument in self.twins if argument == i)] for i in arguments}
        apart = {i for found in own.values() for i in found}
        estimate = Estimator(self.one.graph, self.machine, self.fixed, apart)
        now = estimate(self.one.layout)
        for i, twins in own.items():
            tensor, found = self.one.graph.tensors[i], []
            for places in _others(tensor, dict(self._own(i)), self.machine.sizes):
                other = estimate.keeping(dict.fromkeys(twins, places))(self.one.layout)
                seconds, nbytes = other.seconds - now.seconds, other.peak - now.peak
                found.append(Price(spec=_entries(places, tensor), seconds=seconds, nbytes=nbytes))
            yield tuple(sorted(found, key=lambda price: price.seconds))


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
