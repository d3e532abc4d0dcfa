"""What `why` calls a conflict, against a direct and slow definition, and the work it takes."""

import collections
import functools

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import programs
import pytest

import spmd
from spmd import P
from spmd.inspection.shardy import conflicts, passes, propagation
from spmd.inspection.shardy.passes import Dimension
from spmd.inspection.shardy.propagation import Link, Mark, Propagation, Value

# The definition


def defined(found, i):
    """Of each kind of stop at the regions of a value, the nearest; of these, the first.

    Everything is looked for anew: from the dimension, an operation further at a time.
    """
    stops = []
    for dimension in range(len(found.values[i].shape)):
        for distance, places in enumerate(rings(found, (i, dimension))):
            stops += [
                (distance, dimension, *stop) for place in places for stop in at_border(found, place)
            ]
    nearest = {}
    for stop in sorted(stops, key=lambda stop: stop[:5]):
        _, dimension, _, _, _, axis, reason, lost, won, *_ = stop
        nearest.setdefault((dimension, axis, reason, id(lost), id(won)), stop)
    return sorted(nearest.values(), key=lambda stop: stop[:5])


def rings(found, start):
    """The dimensions of a region, by the number of operations between them and one of it."""
    seen, ring = {start}, [start]
    while ring:
        yield ring
        ring = list(
            dict.fromkeys(
                (j, e)
                for i, d in ring
                if found.values[i].mark is None
                for k, factor, mine, j, e, theirs in related(found, (i, d))
                if factor not in found.links[k].stops and mine == theirs and (j, e) not in seen
            )
        )
        seen.update(ring)


def related(found, place):
    """What operations relate to a dimension: operation, factor, axes here, place, axes there."""
    i, d = place
    for k in found.values[i].links:
        link = found.links[k]
        for p in (p for p, one in enumerate(link.values) if one == i):
            # Inside of a shard_map an operation may relate no dimension.
            for factor in link.factors[p][d] if d < len(link.factors[p]) else ():
                mine = split(found, link, p, d, factor)
                for q, e in others_of(link, p, factor):
                    yield k, factor, mine, link.values[q], e, split(found, link, q, e, factor)


def others_of(link, p, factor):
    """The dimensions of an operation's other operands and results that consist of a factor."""
    for q, dimensions in enumerate(link.factors):
        for e, factors in enumerate(dimensions):
            if q != p and factor in factors:
                yield q, e


def split(found, link, p, d, factor):
    """The axes that split a factor: those that the more major factors leave."""
    rest, sizes = list(found.values[link.values[p]].axes[d]), link.sizes
    if len(link.factors[p][d]) == 1:
        return tuple(rest)
    for name in link.factors[p][d]:
        left, mine = sizes[name], []
        while rest and left > 1:
            left //= max(passes.size_of(rest[0], found.axis_sizes), 1)
            mine.append(rest.pop(0))
        if name == factor:
            return tuple(mine)
    raise AssertionError(factor)


def at_border(found, place):
    """The axes that stop at a dimension, with the reason and the annotations."""
    i, d = place
    rows = [*related(found, place)]
    for k, factor, mine, j, e, theirs in rows:
        others = [row for row in rows if row[0] == k]
        for axis in theirs:
            if not has(mine, axis):
                lost = conflicts.route_of(found, j, axis)[0]
                why, met = reason(found, place, k, factor, axis, (j, e), others)
                won, against = (None, met) if why == "tie" else (met, None)
                yield k, i, d, axis, why, lost, won, against, found.values[i].axes[d]


def has(axes, axis):
    """Whether an axis, or the whole that it is a part of, is among axes."""
    return axis in axes or axis.split(":(")[0] in axes


def reason(found, place, k, factor, axis, other, others):
    """The first of the reasons of `REASONS` that holds, and the annotation that was met."""
    (i, d), value, link = place, found.values[place[0]], found.links[k]
    if factor in link.stops:
        return "operation", None
    elsewhere = [(i, axes) for e, axes in enumerate(value.axes) if e != d]
    met = [
        *(("taken", mark(found, *one, axis)) for one in elsewhere if has(one[1], axis)),
        *(("split", mark(found, i, value.axes[d], one)) for one in value.axes[d]),
    ]
    if not met and value.mark and value.dimensions[d].closed:
        return "closed", value.mark
    elsewhere = [
        (j, found.values[j].axes[e])
        for j, factors in zip(link.values, link.factors, strict=True)
        for e, names in enumerate(factors)
        if factor not in names
    ]
    met += [("taken", mark(found, *one, axis)) for one in elsewhere if has(one[1], axis)]
    theirs = {*found.values[other[0]].axes[other[1]]}
    met += [
        ("tie", mark(found, j, axes, axes[0]))
        for _, _, _, j, _, axes in others
        if j != other[0] and axes and not {*axes} & theirs
    ]
    return met[0] if met else ("operation", None)


def mark(found, i, axes, axis):
    """The annotation that an axis of a value comes from, of which a part may be asked for."""
    return conflicts.route_of(found, i, axis if axis in axes else axis.split(":(")[0])[0]


def told(found, i):
    """What `why` tells of a value, in the form of the definition."""
    return [
        (
            *(stop.distance, stop.dimension, stop.link, stop.at, stop.axis, stop.reason),
            *(id(stop.lost), id(stop.won), id(stop.against), stop.kept),
        )
        for stop in conflicts.conflicts(found, i)
    ]


def wanted(found, i):
    """What is to be told of a value."""
    return [
        (distance, dimension, k, at, axis, why, id(lost), id(won), id(against), kept)
        for distance, dimension, k, at, _, axis, why, lost, won, against, kept in defined(found, i)
    ]


# Against the definition

_AXES = ("data", "model", "data:(1)2", "data:(2)2")


@st.composite
def _values(draw, marks):
    rank = draw(st.integers(0, 3))
    axes = draw(st.lists(st.sampled_from(_AXES), unique=True, max_size=2)) if rank else []
    split: list[tuple[str, ...]] = [()] * rank
    for axis in axes:
        split[draw(st.integers(0, rank - 1))] += (axis,)
    dimensions = tuple(Dimension(one, draw(st.booleans())) for one in split)
    mark = draw(st.none() | st.none() | st.sampled_from(range(len(marks))))
    own = None
    if mark is not None:
        own = Mark(kind="constraint", name=str(mark), frames=(), dimensions=dimensions)
    origins = {axis.partition(":")[0]: draw(st.sampled_from([*marks, ""])) for axis in axes}
    return Value(
        kind="result",
        name="",
        shape=(8,) * rank,
        dtype="f32",
        dimensions=dimensions,
        mark=own,
        origins=origins,
    )


@st.composite
def _links(draw, values):
    chosen = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=4))
    names = st.lists(st.sampled_from("ijk"), min_size=1, max_size=2, unique=True)
    factors = []
    for i in chosen:
        # A factor belongs to one dimension of a value, or to several, as in a diagonal.
        factors.append(tuple(tuple(draw(names)) for _ in values[i].shape))
    return Link(
        name="operation",
        frames=(),
        values=tuple(chosen),
        operands=len(chosen) - 1,
        factors=tuple(factors),
        sizes={name: draw(st.sampled_from([1, 2, 4])) for name in "ijk"},
        stops=frozenset(draw(st.lists(st.sampled_from("ijk"), max_size=1))),
    )


@st.composite
def _found(draw):
    marks = {
        name: Mark(kind="argument", name=name, frames=(), dimensions=()) for name in ("a", "b", "c")
    }
    values = draw(st.lists(_values([*marks]), min_size=1, max_size=6))
    links = draw(st.lists(_links(values), max_size=8))
    for k, link in enumerate(links):
        for i in dict.fromkeys(link.values):
            values[i].links.append(k)
    sizes = {"data": 4, "model": 2}
    return Propagation(axis_sizes=sizes, values=values, links=links, marks=marks)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(_found(), st.randoms(use_true_random=False))
def test_of_any_relations_the_nearest_stops_are_told(found, random):
    """In whatever order values are asked about, and however often, the definition is told."""
    asked = [*range(len(found.values))] * 3
    random.shuffle(asked)
    for i in asked:
        assert told(found, i) == wanted(found, i)


def _read(lowered):
    module = passes.module_of(lowered, subject="why")
    return propagation.propagate(module, subject="why")


@pytest.mark.parametrize(
    "name", ["megatron_block", "fsdp_scan", "call_graph", "swapped_axes", "gathered_argument"]
)
def test_of_programs_the_nearest_stops_are_told(name):
    """Programs with conflicts, loops and calls: every value gets what the definition says."""
    found = _read(programs.PROGRAMS[name][0](programs.cpu_target())[0])
    everything = [told(found, i) for i in range(len(found.values))]
    assert any(everything)
    assert everything == [wanted(found, i) for i in range(len(found.values))]


# Work


def _unrolled(layers):
    """A program of equal layers after propagation: an axis stops before all, and one in each."""
    mesh = spmd.make_mesh({"data": 4, "model": 2})

    def f(x, w, ws):
        y = spmd.with_sharding_constraint(w, P(None, None))
        for _ in range(layers):
            x, y = jnp.tanh(x @ ws), jnp.sin(y)
        return x, y

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (8, 8), (4, 4))]
    specs = P("data"), P("data"), P("model", None)
    return _read(spmd.pjit(f, specs, mesh=mesh).lower(*shapes))


def _work(layers, monkeypatch):
    """How often each part of the work is done where all values are asked about."""
    found, counts = _unrolled(layers), collections.Counter()

    def counted(owner, name, size):
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args):
            counts[name] += size(*args)
            return function(*args)

        patch.setattr(owner, name, call)

    with monkeypatch.context() as patch:
        counted(conflicts, "_look", lambda *_: 1)
        counted(conflicts, "_reached", lambda *_: 1)
        counted(conflicts._Region, "_walk", lambda region, _: len(region.beyond))
        counted(conflicts._Region, "_search", lambda region, _: len(region.beyond))
        stops = [conflicts.conflicts(found, i) for i in range(len(found.values))]
    # One goes from the last layer to the first for it.
    assert max(stop.distance for one in stops for stop in one) > layers
    return counts


def test_the_work_grows_with_the_program_and_not_with_its_square(monkeypatch):
    """Where one stop is asked about from all of 30 layers, each layer adds what one of 15 adds."""
    small, large = (_work(layers, monkeypatch) for layers in (15, 30))
    assert {*small} == {"_look", "_reached", "_walk", "_search"}
    for name, count in small.items():
        assert count < large[name] <= 2.2 * count, name
