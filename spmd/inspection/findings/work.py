"""Findings on products of matrices that several devices compute alike."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import NamedTuple

from spmd.inspection.findings import values
from spmd.inspection.hlo.calls import Modules
from spmd.inspection.hlo.cost import products_of
from spmd.inspection.hlo.text import frames_of
from spmd.inspection.records.report import Finding, Report, Source
from spmd.inspection.records.sizes import show_count
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.products import products_in
from spmd.inspection.shardy.propagation import Link, Propagation

#: FLOPs that a device repeats in one call from which on they are worth a finding: an accelerator
#: takes about a microsecond for them.
MANY = 10**8

#: Their least share of all that the device computes.
SHARE = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of matrices, or a convolution, as the annotations split it.

    Each device computes `flops` in one call; `missing` are the mesh axes that split nothing of it,
    whose devices all compute the same.
    """

    link: Link
    flops: int
    missing: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Products that all devices along some mesh axes compute alike.

    Attributes:
        devices: how many are along the axes.
        flops: that each device computes in one call, and would not if the axes split them.
        most: the products of the line that costs most.
        source: that line; None where all is in libraries.
        total: FLOPs of all that each device computes.
        lines: of all products.
    """

    axes: tuple[str, ...]
    devices: int
    flops: int
    most: Sequence[Product]
    source: Source | None
    total: int
    lines: frozenset[values.Place]

    def makes_whole(self, one: Finding, mesh: Mapping[str, int], unused: Container[str]) -> bool:
        """Whether a value is whole since no axis at all splits the product on its line."""
        others = (axis for axis, size in mesh.items() if size > 1 and axis not in self.axes)
        everywhere = all(axis in unused for axis in others)
        own = one.kind in ("replicated-value", "replicated-residual") and one.source
        return everywhere and bool(own) and (own.file, own.line) in self.lines

    @property
    def fact(self) -> str:
        """What is repeated, in a sentence."""
        place = f", most of it at {values.name_of(self.source)}" if self.source else ""
        return (
            f"{_show(self.flops)} of the {_show(self.total)} that each device computes in one "
            f"call would be saved if {_names(self.axes)} split them{place}"
        )


class Work:
    """What devices compute alike. A cause takes what follows from it, so nothing is said twice."""

    def __init__(self, found: Propagation, report: Report, made: Mapping[values.Place, list[Made]]):
        self._sizes, self._total = found.axis_sizes, report.cost.flops
        self._lines = values.Lines(found)
        devices = math.prod(self._sizes.values())
        # Of several meshes that give an axis several sizes, which one is missing cannot be known.
        known = devices > 1 and not found.names and devices == report.num_devices
        self._products = [*_products(found, made)] if known else []

    def take(
        self, axis: str, follows: Callable[[Link], bool] = lambda link: True
    ) -> Repeated | None:
        """What is repeated along an axis by operations that follow from a cause, if it is much.

        It is no other finding's from then on.
        """
        mine, left = [], []
        for one in self._products:
            if axis in one.missing and follows(one.link):
                mine.append(dataclasses.replace(one, missing=frozenset([axis])))
                one = dataclasses.replace(one, missing=one.missing - {axis})
            left.append(one)
        self._products = left
        return self._repeated(mine)

    def rest(self) -> Iterator[Repeated]:
        """What is repeated for no cause that is known, by the axes along which it is."""
        groups: dict[frozenset[str], list[Product]] = {}
        for one in self._products:
            if one.missing:
                groups.setdefault(one.missing, []).append(one)
        yield from filter(None, map(self._repeated, groups.values()))

    def _repeated(self, products: Sequence[Product]) -> Repeated | None:
        # What a device would not compute if the axes split the products too.
        flops = sum(
            one.flops - one.flops // math.prod(self._sizes[axis] for axis in one.missing)
            for one in products
        )
        if flops < max(MANY, SHARE * self._total):
            return None
        lines: dict[values.Place, list[Product]] = {}
        for one in products:
            lines.setdefault(self._lines[one.link.values[-1]].key, []).append(one)
        most = max(lines.values(), key=lambda ones: sum(one.flops for one in ones))
        axes = tuple(axis for axis in self._sizes if axis in products[0].missing)
        return Repeated(
            axes=axes,
            devices=math.prod(self._sizes[axis] for axis in axes),
            flops=flops,
            most=most,
            source=self._lines[most[0].link.values[-1]].own,
            total=self._total,
            lines=frozenset(lines),
        )


def work_finding(found: Propagation, one: Repeated, wholes: Sequence[Finding]) -> Finding:
    """The finding on work repeated for no known cause, with those on values whole because of it."""
    largest = max(one.most, key=lambda product: product.flops)
    return Finding(
        kind="duplicated-work",
        subject=f"the {one.devices} devices along {_names(one.axes)} compute the same products",
        source=one.source,
        nbytes=max((value.nbytes for value in wholes), default=0),
        flops=one.flops,
        measure="memory" if wholes else "",
        facts=(one.fact, *(value.subject for value in wholes)),
        fix=_fix(found, one, largest),
    )


def _names(axes: Sequence[str]) -> str:
    return " and ".join(map(repr, axes))


def _show(flops: int) -> str:
    return f"{show_count(flops)}FLOP"


# What to write


def _fix(found: Propagation, one: Repeated, product: Product) -> str:
    """A constraint on the result of the costliest product that splits it over the axes as well."""
    value = found.values[product.link.values[-1]]
    entries = [[*axes] for axes in value.axes]
    split = {passes.whole_of(axis) for axes in entries for axis in axes}
    for axis in one.axes:
        if axis in split:  # which the compiler did not heed
            continue
        d = _dimension(found, value.shape, entries, axis)
        if d is None:
            return f"use a mesh without {axis!r}, or sizes that its {found.axis_sizes[axis]} divide"
        entries[d].append(axis)
    spec, there = values.show_axes(entries), values.where(one.source)
    return (
        f"with_sharding_constraint(value, {spec}) {there}, or {_names(one.axes)} in the spec of an "
        "argument that it is made of"
    )


def _dimension(
    found: Propagation, shape: Sequence[int], entries: Sequence[Sequence[str]], axis: str
) -> int | None:
    """The dimension that an axis should split: a whole one first, then the largest on a device."""
    parts = [values.parts_of(found, axes) for axes in entries]
    n = found.axis_sizes[axis]
    fits = [d for d, size in enumerate(shape) if size % (parts[d] * n) == 0]
    return max(fits, key=lambda d: (not entries[d], shape[d] // parts[d]), default=None)


# What the annotations demand, and what the compiler made of it


class Made(NamedTuple):
    """A product of the compiled program: FLOPs in one call, and the scopes of its name."""

    flops: int
    scope: str


def made_by(modules: Modules) -> dict[values.Place, list[Made]]:
    """The products of the compiled program by their innermost line."""
    found: dict[values.Place, list[Made]] = {}
    for module, visited in modules:
        for name, visit in visited.items():
            for one, flops in products_of(module.computations[name]):
                caller = [visit.caller] if visit.caller else []
                frames = (source for i in (one, *caller) for source in frames_of(i, module))
                made = Made(flops * (visit.executions or 0), _scope(one.op_name))
                found.setdefault(values.place_of(next(frames, None)), []).append(made)
    return found


def _scope(op_name: str) -> str:
    return op_name.rpartition("/")[0]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Demand:
    """A product before it is known how the compiler split it.

    Attributes:
        link: the operation.
        flops: of all of it, or of one device's part in a `shard_map`.
        ways: how it may be split, likely ones first: in how many parts, and by which axes not.
        local: whether it is in a `shard_map`, which is meant as it is.
    """

    link: Link
    flops: int
    ways: Sequence[tuple[int, frozenset[str]]]
    local: bool


def _products(found: Propagation, compiled: Mapping[values.Place, list[Made]]) -> Iterator[Product]:
    """The products of a program, with what each device computes of them.

    The partitioner does better than the annotations demand, or worse: so each product is found
    again in the compiled program, by its line, its scopes and its FLOPs.
    """
    # What the compiler writes anew may have no line.
    nowhere = compiled.get(values.place_of(None), [])
    for place, demands in _demands(found).items():
        pool = compiled.get(place, nowhere)
        local = [one for one in demands if one.local]
        others = [one for one in demands if not one.local]
        _each(local, pool)
        total = sum(one.flops for one in pool)
        made = _each(others, pool)
        if pool is not nowhere and (len(made) < len(others) or any(one.flops for one in pool)):
            made = _together(others, total) or made
        yield from made


def _each(demands: Sequence[_Demand], pool: list[Made]) -> list[Product]:
    """The products that are in the compiled program as they are, which leave the pool.

    Products of one line are told apart by their scopes, such as those of the two directions; the
    compiler may have written some in another way.
    """
    made = []
    for one in demands:
        scope = _scope(one.link.op_name)
        own = [product for product in pool if product.scope == scope]
        hits = (
            (near, missing)
            for some in (own, pool)
            for parts, missing in one.ways
            if (near := _nearest(some, one.flops // parts)).flops
        )
        if hit := next(hits, None):
            pool.remove(hit[0])
            made.append(Product(link=one.link, flops=hit[0].flops, missing=hit[1]))
    return made


def _nearest(pool: Iterable[Made], flops: int) -> Made:
    """What is next to the FLOPs that are expected: padding adds some, borders take some."""
    near = [one for one in pool if abs(one.flops - flops) <= flops // 10]
    return min(near, key=lambda one: abs(one.flops - flops), default=Made(0, ""))


def _together(demands: Sequence[_Demand], flops: int) -> list[Product]:
    """The products of a line that the compiler has made one, or has taken apart into loops."""
    total = sum(one.flops for one in demands)
    for parts, missing in demands[0].ways if demands else ():
        if _nearest([Made(flops, "")], total // parts).flops:
            return [
                Product(link=one.link, flops=one.flops // parts, missing=missing) for one in demands
            ]
    return []


def _demands(found: Propagation) -> dict[values.Place, list[_Demand]]:
    """The products of a program by their innermost line."""
    lines, demands = values.Lines(found), {}
    for link, made, runs, flops in products_in(found):
        if runs:  # what runs an unknown number of times is left out
            one = _Demand(link=link, flops=runs * flops, ways=_ways(found, link), local=made.local)
            demands.setdefault(values.place_of(lines[link.values[-1]].inner), []).append(one)
    return demands


def _ways(found: Propagation, link: Link) -> list[tuple[int, frozenset[str]]]:
    """How a product may be split: as annotations demand, by more axes, or else by any."""
    sizes = {axis: n for axis, n in found.axis_sizes.items() if n > 1}
    axes = {axis for i in link.values for d in found.values[i].axes for axis in d}
    wholes = {passes.whole_of(axis) for axis in axes}
    # A part of an axis counts only where all of it does not occur.
    parts = {axis for axis in axes if axis in wholes or passes.whole_of(axis) not in axes}
    counts = range(len(sizes) + 1)
    subsets = [frozenset(some) for n in counts for some in itertools.combinations(sizes, n)]
    subsets.sort(key=lambda chosen: (not chosen >= wholes, len(chosen ^ wholes)))
    return [
        (values.parts_of(found, parts), frozenset(sizes) - wholes),
        *((values.parts_of(found, chosen), frozenset(sizes) - chosen) for chosen in subsets),
    ]
