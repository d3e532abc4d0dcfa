"""What a layout costs, from classes alone: a fraction of a millisecond, so that many are compared.

An operation is as long as its products or its bytes take. Exchanges run one after the other; some
of them go on beside work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
import copy
import dataclasses
import itertools
import math
from typing import NamedTuple, TypeAlias

import numpy as np

from spmd.planner.cost.demand import TABLES, Demand, Exchanged, last, totals, turns
from spmd.planner.cost.fusion import Fusion
from spmd.planner.cost.lives import Lives, wider
from spmd.planner.cost.machine import Machine
from spmd.planner.cost.parts import (
    Kind,
    Part,
    Parts,
    left_by_manual,
    tables_of,
    traffic,
)
from spmd.planner.cost.peaks import Peaks
from spmd.planner.cost.prefetch import Prefetch
from spmd.planner.cost.product import Product, Sending
from spmd.planner.cost.reads import Reads
from spmd.planner.cost.saying import Group, Pattern, Said, Sayings, grouped, regrouped, said_by
from spmd.planner.cost.stacks import Stacks
from spmd.planner.program.layout import Fixed, Layout
from spmd.planner.program.structure import Graph, Operation

_SUM = 4
"""Bytes of float32."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a layout is thought to cost a device in one call.

    Attributes:
        compute: seconds of products.
        memory: seconds in which main memory decides.
        exchange: seconds of exchanges, one after the other.
        hidden: seconds of them that go on beside work.
        peak: bytes of the program's code, of arguments, and of what is alive beside them at the
            worst moment.
        first: products whose sums are made before each device takes its part of them, by their
            results: see `Estimator.summed_first`.
    """

    compute: float
    memory: float
    exchange: float
    hidden: float
    peak: float
    first: frozenset[int] = dataclasses.field(default=frozenset(), compare=False)

    @property
    def seconds(self) -> float:
        """Of one call."""
        return self.compute + self.memory + self.exchange - self.hidden


_Joined: TypeAlias = tuple[tuple[str, ...], int, int]
"""The axes of sums that are sent together, how often they are, and after how many others."""


class _Costs(NamedTuple):
    """Seconds of a group; and exchanges of operands and sums, which others may ask for as well.

    Of sums that are sent together it is told which: each of these is a delay. What products take
    and make that are done in parts, one for each device, is told as well, and what those make whose
    sums are made first.
    """

    compute: float
    memory: float
    exchange: float
    beside: float
    shared: dict[Exchanged, Sending]
    joined: frozenset[_Joined]
    in_parts: frozenset[int]
    first: frozenset[int] = frozenset()


_NOTHING = _Costs(0.0, 0.0, 0.0, 0.0, {}, frozenset(), frozenset())


class _Placed(NamedTuple):
    """By kind, where its tensors lie under a layout, and what a device has of them.

    Attributes:
        places: the dimension that each axis splits.
        parts: the share of a device.
        kept: likewise, of the bytes that are kept of other values than arguments.
        ends: what that is in memory of an argument, with its padding.
        inside: likewise, of others, with wider rows.
    """

    places: list[dict[str, int]]
    parts: list[float]
    kept: list[float]
    ends: list[float]
    inside: list[float]


class Estimator:
    """A program on a machine, whose layouts are compared.

    What does not depend on a layout is worked out once: operations of the same kinds of tensors
    are one that runs more often, and those that no layout makes cost anything are left out. What
    depends on a layout is worked out once for all layouts that say the same of its classes.

    Args:
        graph: the program.
        machine: what it is for.
        fixed: places that arguments and outputs keep.
        apart: arguments and outputs that are each of a kind of its own, for `keeping`.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        fixed: Fixed | None = None,
        apart: Container[int] = (),
    ):
        self.graph, self.machine, self.sizes = graph, machine, machine.sizes
        self.fixed = fixed or Fixed()
        left = dict(left_by_manual(graph))
        kept = {**left, **dict(self.fixed.places)}
        wide = wider(graph)
        narrower = {w: graph.tensors[i].nbytes for i, w in wide.items()}
        kinds: dict[Kind, int] = {}
        self.kind_of = []
        for i, one in enumerate(graph.tensors):
            own = i if i in apart else None
            known = one.shape, one.classes, one.is_state, one.nbytes, kept.get(i)
            kind = Kind(*known, own, narrower.get(i))
            self.kind_of.append(kinds.setdefault(kind, len(kinds)))
        self.kinds = [*kinds]
        self.nbytes = [one.nbytes for one in graph.tensors]
        self.sizes_of_kinds = np.array([kind.nbytes for kind in self.kinds])
        placed = ((k, frozenset((self._pattern(one),)), (k,)) for k, one in enumerate(self.kinds))
        self._places = Sayings(grouped(placed))
        # What a `shard_map` leaves is pinned as a layout says.
        free = {self.kinds[self.kind_of[i]]._replace(fixed=None) for i in left}
        self._pinned = Sayings(grouped((one, frozenset((self._pattern(one),)), ()) for one in free))
        self.stacks = Stacks(graph, are_turned=bool(machine.chip.multipliers))
        lives = Lives(graph, self.kind_of, len(kinds), wide, self.stacks.beside)
        fusion = Fusion(graph, self.kind_of, len(kinds), lives, self.stacks)
        self.reads = Reads(graph, fusion, lives)
        # Of values that may be near, and of brief ones.
        self.passes = np.zeros((2, len(kinds)))
        for i, runs in self.reads.passes:
            self.passes[int(i in lives.brief), self.kind_of[i]] += runs * graph.tensors[i].nbytes
        # What has fewer bytes than sums in float32 have.
        self.packed = [one.nbytes < _SUM * math.prod(one.shape) for one in graph.tensors]
        self.last = last(graph)
        self.lives = lives
        self.tables = {self.kind_of[i] for i in tables_of(graph)}
        self.prefetch = Prefetch(graph, self.kind_of)
        self.moved = fusion.alone
        code = sum(machine.code(one.flops) for one in graph.operations)
        self.peaks = Peaks(lives, self.kind_of, self.sizes_of_kinds, self.nbytes, code)
        self.early = graph.early
        self.users = _users(graph)
        # What products find whole: what is gathered once for several of them, and ahead.
        self.lasting = self.early | {*self.users}
        self.ahead = True
        self.arguments = graph.arguments
        parts = Parts(graph, self.kind_of, fusion, lives, self.reads, self.last)
        self.alike = parts.alike
        about = ((part, self._kinds(part)) for part in parts.all)
        work = ((part, self._patterns(part, own), own) for part, own in about)
        self._work = Sayings(regrouped(grouped(work)))
        self.totals = {self.alike[i]: self.alike[j] for i, j in totals(graph).items()}
        self.turns = {self.alike[i]: n for i, n in turns(graph).items()}
        # Whether all sums are made first, or none; None for what is faster for each.
        self.sums_first: bool | None = None
        self._known: dict[Hashable, Estimate] = {}

    def on(self, machine: Machine) -> Estimator:
        """The same program on another mesh of as many devices."""
        assert machine.count == self.machine.count
        found = self._anew(range(len(self.kinds)))
        found.machine, found.sizes = machine, machine.sizes
        return found

    def keeping(self, places: Mapping[int, Mapping[str, int]]) -> Estimator:
        """The same program, of which more keeps its place: tensors that are `apart`."""
        found = self._anew({self.kind_of[i] for i in places})
        found.kinds = [*self.kinds]
        for i, at in places.items():
            k = self.kind_of[i]
            found.kinds[k] = self.kinds[k]._replace(fixed=tuple(at.items()))
        return found

    def as_pinned(self, *, sums_first: bool | None = None, ahead: bool = True) -> Estimator:
        """The same program, whose products are pinned in another way.

        Args:
            sums_first: whether all sums are made before devices take their parts, or none. None for
                what is faster for each product. Where Shardy places values the two are one.
            ahead: whether what is known before its use is gathered ahead. Else parts of it go
                around, but of what several products want in one place: that is gathered once.
        """
        found = self._anew(range(len(self.kinds)))
        found.sums_first, found.ahead = sums_first, ahead
        return found

    def summed_first(self, found: Estimate) -> frozenset[int]:
        """The results of products whose sums are made first, of an estimate."""
        if not found.first:
            return frozenset()
        return frozenset(i for i, own in self.alike.items() if own in found.first)

    def _anew(self, changed: Collection[int]) -> Estimator:
        """The same, that remembers nothing of these kinds, and of what they have a part in."""
        found = copy.copy(self)
        found._places, found._work = self._places.anew(changed), self._work.anew(changed)
        found._known = {}
        return found

    def _kinds(self, part: Part) -> set[int]:
        """Those of the values that an operation is about."""
        tensors = {*part.one.tensors, *itertools.chain(*part.reads), *part.written}
        tensors.update([self.stacks.sources[i] for i in tensors if i in self.stacks.sources])
        return {self.kind_of[i] for i in tensors} | {*part.beside}

    def _patterns(self, part: Part, kinds: Iterable[int]) -> frozenset[Pattern]:
        """What an operation and the values that it is about have."""
        one = part.one
        found = {self._pattern(self.kinds[k]) for k in kinds}
        own = frozenset(one.by_class)
        sure = frozenset(
            c
            for c, names in one.by_class.items()
            if all(self._is_sure(one.sizes[n]) for n in names)
        ) - {c for c, names in one.by_class.items() if one.whole.intersection(names)}
        turning = frozenset(c for c, names in one.by_class.items() if len(names) > 1)
        if one.name in TABLES:
            sure = frozenset()
        return frozenset((*found, Pattern(own, sure, turning, one.is_state)))

    def _pattern(self, kind: Kind) -> Pattern:
        pairs = [(c, n) for c, n in zip(kind.classes, kind.shape, strict=True) if c is not None]
        classes = frozenset(c for c, _ in pairs)
        own = [c for c, _ in pairs]
        if kind.fixed is not None:
            return Pattern(frozenset(), frozenset(), frozenset(), kind.is_state)
        return Pattern(
            classes,
            classes - {c for c, n in pairs if not self._is_sure(n)},
            frozenset(c for c in classes if own.count(c) > 1),
            kind.is_state,
        )

    def _is_sure(self, size: int) -> bool:
        """Whether no axis passes over a dimension, whatever others do with it."""
        return size % self.machine.count == 0

    def __call__(self, layout: Layout) -> Estimate:
        """What a layout costs."""
        said = said_by(layout)
        key = self._places.numbers(said), self._work.numbers(said)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._estimate(layout, said)
        return found

    def _estimate(self, layout: Layout, said: Said) -> Estimate:
        at = self._placed(layout, said)
        self._gather_once(layout, at)
        shares = np.array(at.parts)
        compute, exchange, beside, ahead = self.machine.kernels(self.graph.kernels), 0.0, 0.0, 0.0
        memory = self.machine.passing(self.moved * shares, self.sizes_of_kinds * shares)
        memory += self._passing(shares, np.array(at.kept))
        shared: dict[Exchanged, Sending] = {}
        joined: set[_Joined] = set()
        in_parts: set[int] = set()
        first: set[int] = set()
        for costs in self._costs(layout, said, at):
            compute += costs.compute
            memory += costs.memory
            exchange += costs.exchange
            beside += costs.beside
            if costs.joined:
                joined |= costs.joined
            if costs.in_parts:
                in_parts |= costs.in_parts
            first |= costs.first
            if costs.shared:
                _add(shared, costs.shared)
        exchange += sum(runs * self.machine.delay("all-reduce", axes) for axes, runs, _ in joined)
        if self.prefetch.slices:
            sent = {one.tensor: one.kind for one in shared if one.tensor is not None}
            at_once = in_parts.union(i for i, kind in sent.items() if kind == "all-gather")
            spilled = self.prefetch.spilled(at.parts, at_once, in_parts.union(sent), self.machine)
            memory += self.machine.moving(spilled)
        for sent, sending in shared.items():
            exchange += sending.seconds
            if sent.tensor in self.early:
                ahead += sending.ahead
            if sending.nbytes > self.machine.near:
                memory += self.machine.moving(2 * sending.turned)
        return Estimate(
            compute=float(compute),
            memory=float(memory),
            exchange=float(exchange),
            hidden=float(beside + self.machine.hidden(ahead, compute + memory)),
            peak=self.peaks.of(self.machine, at.ends, at.inside, shared, in_parts),
            first=frozenset(first),
        )

    def _costs(self, layout: Layout, said: Said, at: _Placed) -> Iterator[_Costs]:
        """What groups of operations cost, of those that cost anything."""
        for group, key in zip(self._work.groups, self._work.keys(said), strict=True):
            costs = group.known.get(key)
            if costs is None:
                found = [self._of_alike(one, layout, said, at) for one in group.members]
                costs = group.known[key] = _together(found)
            if costs is not _NOTHING:
                yield costs

    def _gather_once(self, layout: Layout, at: _Placed) -> None:
        """Finds what products have whole, where nothing is gathered ahead.

        XLA multiplies by parts of an operand only where no other user wants it in the same place.
        """
        if self.ahead:
            return
        found = {*self.users} - self.early
        for i in self.early.intersection(self.users):
            asked = set()
            for one, n in self.users[i]:
                demand = self._demand(one, [self.kind_of[j] for j in one.tensors], layout, at)
                asked.add(demand.asked(n, first=bool(self.sums_first)))
            if len(asked) < len(self.users[i]):
                found.add(i)
        if found != self.lasting:  # which decides what all products cost
            self.lasting, self._work = found, self._work.anew(range(len(self.kinds)))

    def _passing(self, shares: np.ndarray, kept: np.ndarray) -> float:
        """Seconds of passes over what is in main memory, between products."""
        (near, brief), sizes, machine = self.passes, self.sizes_of_kinds, self.machine
        away = (near * shares)[sizes * shares > machine.near].sum()
        return machine.moving(float(away + (brief * shares)[sizes * kept > machine.brief].sum()))

    def said(self, layout: Layout) -> Hashable:
        """All that a layout says of the program: layouts that say the same have the same pins."""
        said = said_by(layout)
        sayings = self._places, self._work, self._pinned
        return tuple(one.numbers(said) for one in sayings)

    def _placed(self, layout: Layout, said: Said) -> _Placed:
        count = len(self.kinds)
        found = _Placed([{}] * count, *([1.0] * count for _ in range(4)))
        places, parts, keeps, ends, inside = found
        for group, key in zip(self._places.groups, self._places.keys(said), strict=True):
            known = group.known.get(key)
            if known is None:
                known = group.known[key] = [(k, *self._place(k, layout)) for k in group.members]
            for k, place, part, kept, end, within in known:
                places[k] = place
                parts[k] = part
                keeps[k] = kept
                ends[k] = end
                inside[k] = within
        return found

    def _place(self, k: int, layout: Layout) -> tuple[dict[str, int], float, float, float, float]:
        kind = self.kinds[k]
        if kind.fixed is None:
            found = layout.places(kind, self.sizes)
        else:
            found = {axis: d for axis, d in kind.fixed if self.sizes[axis] > 1}
        part = 1 / math.prod(self.sizes[axis] for axis in found)
        shape: list[float] = [*kind.shape]
        for axis, d in found.items():
            shape[d] /= self.sizes[axis]
        kept = part
        # A dimension that is split to 1 stands between a product and the work on its result.
        if kind.own is not None and any(shape[d] == 1 for d in found.values()):
            kept *= kind.own / kind.nbytes
        end = part * self.machine.padded(tuple(shape))
        within = kept * self.machine.widened(shape[-1]) if k in self.tables else kept
        return found, part, kept, end, within

    def _of_alike(
        self,
        group: Group,
        layout: Layout,
        said: Said,
        at: _Placed,
    ) -> _Costs:
        """What operations of the same patterns cost."""
        key = group.key(said)
        costs = group.known.get(key)
        if costs is None:
            found = [self._cost(part, layout, at) for part in group.members]
            costs = group.known[key] = _together(found)
        return costs

    def _is_far(self, tensor: int, at: _Placed) -> bool:
        """Whether a value is in main memory: it is given, too large, or a slice of such a one."""
        if tensor in self.arguments:
            return True
        k, nbytes, machine = self.kind_of[tensor], self.nbytes[tensor], self.machine
        if tensor in self.lives.brief:
            is_large = nbytes * at.kept[k] > machine.brief
        else:
            is_large = nbytes * at.parts[k] > machine.near
        return is_large or self._source(tensor, at.parts) > machine.near

    def _read(self, part: Part, product: Product, at: _Placed) -> Iterator[float]:
        """Bytes of each value in main memory that a product reads.

        What is gathered for a product is in use only there.
        """
        brief = self.machine.brief
        for k, found in enumerate(part.reads):
            if gathered := product.gathered.get(k):
                yield gathered if gathered > brief else 0.0
                continue
            is_again = k < part.one.operands and product.around
            for i in found:
                nbytes = self._size(i, at)
                yield nbytes * product.passes(k) if is_again and nbytes > brief else nbytes

    def _size(self, tensor: int, at: _Placed) -> float:
        """Bytes on a device of a value that is in main memory, or else 0."""
        is_far = self._is_far(tensor, at)
        return self.nbytes[tensor] * at.parts[self.kind_of[tensor]] if is_far else 0.0

    def _multiplied(self, part: Part, product: Product, at: _Placed) -> tuple[float, float]:
        """Seconds of one run of a product, as compute or as memory: whichever decides."""
        machine, computing = self.machine, product.seconds()
        read = [*self._read(part, product, at)]
        fetched = sum(n for n in read if n > machine.brief)
        if fetched and not product.is_large:  # while it is read, no results are written
            computing = max(computing, machine.fetching(fetched) + product.popping)
        moving = machine.feeding(sum(read) + sum(self._size(i, at) for i in part.written))
        return (computing, 0.0) if computing >= moving else (0.0, moving)

    def _transforming(self, one: Operation, share: float) -> float:
        """Seconds of a Fourier transform, dimension by dimension, of a device's share.

        Of real numbers one side is about half as long: the transform is as long as the other.
        """
        sizes = dict(one.sizes)
        for i, names in zip(one.tensors, one.factors, strict=True):
            for name, size in zip(names, self.graph.tensors[i].shape, strict=True):
                if name is not None:
                    sizes[name] = max(size, sizes[name])
        elements = share * math.prod(sizes.values())
        return sum(self.machine.transforming(elements, sizes[name]) for name in one.whole)

    def _turns(self, sent: Exchanged, made: int) -> int:
        """For how many turns of a loop an exchange of a sum, or of another value, is made once."""
        is_after = sent.kind == "all-reduce" and self.machine.sums_after_loops
        return self.turns.get(made, 1) if is_after else 1

    def _source(self, tensor: int, parts: list[float]) -> float:
        """Bytes on a device of what a value is a slice of; 0 for one that is none."""
        i = self.stacks.sources.get(tensor)
        return 0.0 if i is None else self.nbytes[i] * parts[self.kind_of[i]]

    def _product(self, part: Part, demand: Demand, at: _Placed) -> tuple[Product, frozenset[int]]:
        """An operation as a product, and its result, if its sum is made first."""
        steps = sum(steps * at.parts[k] for k, steps in part.beside.items()) / part.runs

        def of(*, first: bool) -> Product:
            return Product(
                demand,
                self.machine,
                part.shapes,
                steps,
                self.lasting,
                is_last=part.turn is not None,
                is_packed=self.packed[part.written[0]],
                sums_around=not first,
            )

        product = of(first=False)
        if self.sums_first is False or not product.may_sum_first:
            return product, frozenset()
        whole = of(first=True)
        if self.sums_first or self._taken(part, whole, at) < self._taken(part, product, at):
            return whole, frozenset(part.one.tensors[-1:])
        return product, frozenset()

    def _taken(self, part: Part, product: Product, at: _Placed) -> float:
        """Seconds of one run of a product, with its exchanges."""
        found = map(product.sending, product.demand.sent)
        return sum(self._multiplied(part, product, at)) + sum(
            sending.seconds - sending.beside for sending in found
        )

    def _demand(self, one: Operation, kinds: Sequence[int], layout: Layout, at: _Placed) -> Demand:
        """What an operation asks of the links, whose values are of these kinds."""
        return Demand(
            one,
            layout,
            self.sizes,
            [at.places[k] for k in kinds],
            [self.nbytes[i] * at.parts[k] for i, k in zip(one.tensors, kinds, strict=True)],
            self.totals.get(one.tensors[-1]),
            one_sum=self.machine.one_sum,
        )

    def _cost(self, part: Part, layout: Layout, at: _Placed) -> _Costs:
        one, kinds = part.one, part.kinds
        demand = self._demand(one, kinds, layout, at)
        if part.is_fusible and not demand.sent:
            return _NOTHING
        product, first = self._product(part, demand, at)
        exchange, beside, shared = 0.0, 0.0, {}
        joined: set[_Joined] = set()
        for sent in demand.sent:
            sending = product.sending(sent)
            turns = self._turns(sent, one.tensors[-1])
            runs = part.runs // turns
            if sending.joined:
                joined.add((sending.joined, one.runs // turns, part.turn or 0))
            if sent.tensor is None or sent in product.around:
                exchange += runs * sending.seconds
                beside += runs * sending.beside
            else:
                shared[sent] = sending.times(runs)
        in_parts = frozenset(one.tensors if product.around else ())
        sent = exchange, beside, shared, frozenset(joined), in_parts, first
        if part.is_fusible:
            return _Costs(0.0, 0.0, *sent)
        if not one.flops:
            far = [
                n if self._is_far(i, at) else 0.0
                for i, n in zip(one.tensors, demand.nbytes, strict=True)
            ]
            is_changed = one.tensors[1] in self.stacks.changed
            moving = self.machine.moving(traffic(one, far, is_changed=is_changed))
            if one.name == "fft":
                moving = max(moving, self._transforming(one, at.parts[kinds[-1]]))
            return _Costs(0.0, part.runs * moving, *sent)
        compute, memory = self._multiplied(part, product, at)
        return _Costs(part.runs * compute, part.runs * memory, *sent)


def _users(graph: Graph) -> dict[int, list[tuple[Operation, int]]]:
    """By value that several products take, these, and as which operand each takes it."""
    found: dict[int, list[tuple[Operation, int]]] = defaultdict(list)
    for one in graph.operations:
        if one.flops:
            for i in {*one.tensors[: one.operands]}:
                found[i].append((one, one.tensors.index(i)))
    return {i: users for i, users in found.items() if len(users) > 1}


def _together(found: Sequence[_Costs]) -> _Costs:
    """What several cost."""
    found = [one for one in found if one is not _NOTHING]
    if len(found) < 2:
        return found[0] if found else _NOTHING
    shared: dict[Exchanged, Sending] = {}
    for one in found:
        _add(shared, one.shared)
    return _Costs(
        compute=sum(one.compute for one in found),
        memory=sum(one.memory for one in found),
        exchange=sum(one.exchange for one in found),
        beside=sum(one.beside for one in found),
        shared=shared,
        joined=frozenset().union(*(one.joined for one in found)),
        in_parts=frozenset().union(*(one.in_parts for one in found)),
        first=frozenset().union(*(one.first for one in found)),
    )


def _add(shared: dict[Exchanged, Sending], more: Mapping[Exchanged, Sending]) -> None:
    """Adds exchanges; of those that are one, the one that takes longest counts."""
    for sent, sending in more.items():
        known = shared.get(sent)
        if known is None or known.seconds < sending.seconds:
            shared[sent] = sending
