"""The search against all layouts, its limits, and programs that leave it little."""

import dataclasses
import itertools
import math
import random
import time

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from planned_programs import classes, f32, graph_named, ints, mlp, read, sending
import pytest

import spmd
from spmd import P
from spmd.inspection.compile.timed import links_of
from spmd.inspection.timing.chips import CHIPS
from spmd.planner.cost.estimate import Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.program.layout import Fixed, Layout, spec_of
from spmd.planner.search import descent as searching
from spmd.planner.search.descent import Rules, search
from spmd.planner.search.experts import experts
from spmd.planner.search.moves import Space, _around
from spmd.planner.verify import Program

#: Seconds each: the README's command is to be short.
pytestmark = pytest.mark.slow

MESHES = ({"data": 4, "model": 2}, {"data": 2, "model": 4}, {"data": 8, "model": 1})


def machine(sizes, **figures):
    """A v5e with other figures."""
    mesh = spmd.make_mesh(sizes)
    chip = dataclasses.replace(CHIPS["v5e"], **figures)
    return Machine(chip, links_of(chip, [*mesh.devices.flat], sizes)[0], sizes)


def attend(q, k, v):
    """Attention without heads: queries and keys have one length."""
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k))
    return jnp.einsum("bts,bse->bte", scores, v)


def itself(x):
    """Attention of a sequence to itself."""
    return attend(x, x, x)


#: Programs of at most four classes that a plan may split.
SMALL = {
    "product": Program(function=jnp.matmul, args=(f32(64, 32), f32(32, 128))),
    "large product": Program(function=jnp.matmul, args=(f32(2048, 4096), f32(4096, 8192))),
    "layer": mlp(),
    "large layer": mlp(4096, 2048, 8192),
    "layer of few rows": mlp(16, 1024, 4096),
    "attention": Program(
        function=attend, args=(f32(4, 4096, 128), f32(4, 4096, 128), f32(4, 4096, 64))
    ),
    "table": Program(function=lambda t, i: t[i].sum(1), args=(f32(4096, 64), ints(64, 16))),
    "elementwise": Program(function=lambda x, y: jnp.tanh(x) * y, args=(f32(256, 512),) * 2),
    "odd": Program(function=jnp.matmul, args=(f32(6, 8), f32(8, 12))),
}


def every(graph, sizes):
    """All orders of all classes on all axes."""
    orders = [
        order
        for n in range(len(graph.classes) + 1)
        for order in itertools.permutations(graph.classes, n)
    ]
    for chosen in itertools.product(orders, repeat=len(sizes)):
        yield Layout.of(dict(zip(sizes, chosen, strict=True)))


def is_valid(graph, layout, sizes):
    """Whether JAX takes the specs of all values, and no part of one is uneven."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    for one in graph.tensors:
        places = layout.places(one, sizes)
        if not places:
            continue
        shape = NamedSharding(mesh, spec_of(places, len(one.shape))).shard_shape(one.shape)
        count = 1
        for axis in places:
            count *= sizes[axis]
        if count * jnp.prod(jnp.array(shape)) != jnp.prod(jnp.array(one.shape)):
            return False
    return True


@pytest.mark.parametrize("few", [0, 5000], ids=["moves", "all"])
def test_nothing_is_wrong_and_nothing_is_missing(few, monkeypatch):
    """Against all orders of all classes: no layout is invalid, and no better one is unseen."""
    monkeypatch.setattr(searching, "_FEW", few)
    wrong, missing = [], []
    for (name, program), sizes in itertools.product(SMALL.items(), MESHES[:2]):
        found = read(program)
        assert len(found.classes) <= 4 or name == "attention"
        for figures in ({}, {"hop": 0.0, "hbm": 1e15})[: 1 if few else 2]:
            on = machine(sizes, **figures)
            cost = Estimator(found, on)
            if len(found.classes) <= 4:
                best = min(cost(layout).seconds for layout in every(found, sizes))
            seen = search(Estimator(found, on), Rules())
            wrong += [
                (name, sizes, one) for one in seen[:3] if not is_valid(found, one.layout, sizes)
            ]
            if len(found.classes) <= 4 and seen[0].cost.seconds > best * (1 + 1e-9):
                missing.append((name, sizes, figures, best, seen[0]))
    assert not wrong
    assert not missing


SIZES = st.sampled_from([1, 3, 6, 8, 16, 24, 64, 256])


@settings(max_examples=15, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from(MESHES))
def test_products_of_any_sizes(rows, inner, hidden, columns, sizes):
    """Two products one after the other: also of sizes that no axis divides."""

    def f(x, a, b):
        return jnp.tanh(x @ a) @ b

    args = (f32(rows, inner), f32(inner, hidden), f32(hidden, columns))
    found = read(Program(function=f, args=args))
    on = machine(sizes)
    cost = Estimator(found, on)
    seen = search(Estimator(found, on), Rules())
    assert all(is_valid(found, one.layout, sizes) for one in seen[:3])
    if len(found.classes) <= 3:
        best = min(cost(layout).seconds for layout in every(found, sizes))
        assert seen[0].cost.seconds <= best * (1 + 1e-9)


def test_the_search_is_at_least_as_good_as_its_starts():
    """Given the experts, it finds nothing worse than the best of them, and tells each by name."""
    for name in ("gpt", "moe", "decoding"):
        found, on = graph_named(name), machine(MESHES[0])
        known = experts(found, MESHES[0])
        cost = Estimator(found, on)
        seen = search(Estimator(found, on), Rules(), starts=known.values())
        assert seen[0].cost.seconds <= min(cost(one).seconds for one in known.values())
        assert {*known.values()} <= {one.layout for one in seen}


def test_a_mesh_far_behind_another_is_looked_at_less():
    """Only near what comes of the given starts, and not near one that is over the budget."""
    found, on = graph_named("gpt"), machine(MESHES[0])
    cost = Estimator(found, on)
    first = min(experts(found, MESHES[0]).values(), key=lambda one: cost(one).seconds)
    large = Layout.of({"data": (), "model": ()})
    rules = Rules(budget=2 * cost(first).peak)
    assert not rules.fits(cost(large))

    def seen(starts, best=math.inf):
        layouts = search(Estimator(found, on), rules, starts=starts, best=best)
        return {one.layout for one in layouts}, layouts[0].score

    whole, score = seen([first])
    assert seen([first], 1.01 * score)[0] == whole
    few, _ = seen([first], score / 2)
    assert few < whole
    assert seen([first, large], score / 2)[0] == few
    assert len(seen((), score / 2)[0]) > len(few)


def test_a_descent_that_stays_behind_is_given_up(monkeypatch):
    """Two rounds of moves decide: so fewer layouts are looked at, for the same answer."""
    found, on = graph_named("gpt"), machine(MESHES[0])
    starts = [*experts(found, MESHES[0]).values()]
    fewer = search(Estimator(found, on), Rules(), starts=starts)
    monkeypatch.setattr(searching, "_ROUNDS", 1000)
    whole = search(Estimator(found, on), Rules(), starts=starts)
    assert len(fewer) < len(whole)
    assert fewer[0].score == whole[0].score


def test_the_best_mesh_alone_is_left_at_random():
    """Random moves are for a mesh that is better than those before: they are told by the seed."""
    found, on = graph_named("gpt"), machine(MESHES[0])
    starts = [*experts(found, MESHES[0]).values()]

    def seen(best, seed):
        return {
            one.layout
            for one in search(Estimator(found, on), Rules(), starts=starts, best=best, seed=seed)
        }

    score = search(Estimator(found, on), Rules(), starts=starts)[0].score
    assert seen(math.inf, 0) != seen(math.inf, 1)
    assert seen(score, 0) == seen(score, 1)


def test_a_small_program_is_searched_whole():
    """All orders are looked at where they are few, and the program is small."""
    on = machine({"data": 8, "model": 1})
    for name, is_whole in (("mlp", True), ("gpt", False)):
        found = graph_named(name)
        seen = {one.layout for one in search(Estimator(found, on), Rules())}
        space = Space(found, on, frozenset(), Fixed())
        assert space.count() < 9000
        assert (seen >= {*map(space.canonical, space.all())}) is is_whole


def test_a_start_has_all_axes():
    """Of what is fixed on one axis, moves may add what another one splits."""
    found = graph_named("mlp")
    space = Space(found, sending(data=4, model=2), frozenset(), Fixed())
    one = space.permitted(Layout.of({"data": [*found.classes][:1]}))
    assert [axis for axis, _ in one.orders] == ["data", "model"]
    assert any(dict(near.orders)["model"] for near in space.moves(one))


def test_what_a_shard_map_takes_is_a_start():
    """It says where arrays lie, as fixed places do: their classes come together."""
    mesh = spmd.make_mesh({"data": 4, "model": 2})

    def step(x, q, k, o):
        a, b = jnp.einsum("bd,dh->bh", x, q), jnp.einsum("bd,dh->bh", x, k)
        both = P("data", "model")
        c = jax.shard_map(
            lambda a, b: a * b.sum(), mesh=mesh, in_specs=(both, both), out_specs=both
        )(a, b)
        return jnp.einsum("bh,hd->bd", c, o)

    found = read(Program(function=step, args=(f32(16, 64), f32(64, 32), f32(64, 96), f32(32, 64))))
    x, q, k, o = (one.classes for one in found.tensors[:4])
    heads = {q[1], k[1], o[0]}
    assert len(heads) == 3
    space = Space(found, machine(MESHES[0]), frozenset(), Fixed())
    starts = [dict(one.orders) for one in space.starts()]
    assert any(heads <= {*one["model"]} and x[0] in one["data"] for one in starts)


def test_many_fixed_places_are_few_starts():
    """Each one comes first once, with those after it or before it: not in all orders."""
    count = 12
    dims = [64 * (i + 4) for i in range(count + 1)]

    def step(x, *weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    args = [f32(64, dims[0]), *(f32(*pair) for pair in itertools.pairwise(dims))]
    found = read(Program(function=step, args=tuple(args)))
    fixed = Fixed.of({i: {"model": 1} for i in range(1, count + 1)})
    space = Space(found, machine(MESHES[0]), frozenset(), fixed)
    own = {found.tensors[i].classes[1] for i in range(1, count + 1)} & {*found.classes}
    orders = [dict(one.orders)["model"] for one in space.starts()]
    assert len(own) > 4
    assert {one[0] for one in orders} >= own
    assert len(orders) < 200


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_fixed_places_come_in_all_orders(count):
    """Each of them once: one that comes twice would take the place of another start."""
    orders = [*_around(count)]
    assert sorted(orders) == [*itertools.permutations(range(count))]


def test_a_seed_gives_one_answer():
    """The same seed sees the same layouts in the same order."""
    found, on = graph_named("moe"), machine(MESHES[0])
    first, second = (search(Estimator(found, on), Rules(), seed=7) for _ in range(2))
    assert [one.layout for one in first] == [one.layout for one in second]
    told = []
    third = search(Estimator(found, on), Rules(), seed=7, saw=told.append)
    assert {one.layout for one in told} <= {one.layout for one in third}


def test_a_deadline_ends_the_search_with_what_was_seen():
    """One that is over already leaves a layout; a later one ends in between."""
    found, on = graph_named("gpt"), machine(MESHES[0])
    assert len(search(Estimator(found, on), Rules(deadline=time.monotonic() - 1))) == 1
    told = []
    clock = iter(itertools.chain([0.0] * 50, itertools.repeat(2.0)))
    monotonic, time.monotonic = time.monotonic, lambda: next(clock)
    try:
        seen = search(Estimator(found, on), Rules(deadline=1.0), saw=told.append)
    finally:
        time.monotonic = monotonic
    assert 10 < len(told) < 60
    assert {one.layout for one in told} <= {one.layout for one in seen}


def test_axes_that_are_alike_are_not_told_apart():
    """On two axes of one size, what differs in their names alone is seen once."""
    sizes = {"data": 2, "model": 2}
    found = graph_named("mlp")
    space = Space(found, sending(**sizes), frozenset(), Fixed())
    a, b = [*found.classes][:2]
    one = Layout.of({"data": [a], "model": [b]})
    other = Layout.of({"data": [b], "model": [a]})
    assert space.canonical(one) == space.canonical(other)
    kept = Space(found, sending(**sizes), frozenset({(a, "data")}), Fixed())
    assert kept.canonical(one) != kept.canonical(other)


def test_what_never_meets_has_one_order():
    """Two orders of classes that no value has both of are one layout."""
    found = graph_named("gpt")
    of = classes(found)
    words, hidden = of["state['p']['embed']:0"], of["state['p']['layers']['up']:2"]
    space = Space(found, sending(data=4, model=2), frozenset(), Fixed())
    orders = [
        Layout.of({"data": order, "model": []}) for order in ((words, hidden), (hidden, words))
    ]
    assert space.canonical(orders[0]) == space.canonical(orders[1])


def test_moves_turn_dimensions_and_the_optimizers_orders():
    """Of scores the other length is a move away, and of moments an order of their own."""
    found = graph_named("gpt")
    of = classes(found)
    length, width = of["batch[0]:1"], of["state['p']['embed']:1"]
    space = Space(found, sending(data=4, model=2), frozenset(), Fixed())
    near = {*space.moves(Layout.of({"data": [length], "model": []}))}
    assert any(one.last == {("data", length)} for one in near)
    assert any(one.state == (("data", (width,)),) for one in near)
    assert any(dict(one.orders)["model"] == (length,) for one in near)


def test_turned_scores_are_split_along_the_other_length():
    """First or last of two dimensions: keys instead of queries."""
    found = read(Program(function=itself, args=(f32(4, 1024, 64),)))
    length = classes(found)["x:1"]
    scores = next(one for one in found.tensors if one.classes.count(length) == 2)
    layout = Layout.of({"data": [length], "model": []})
    sizes = {"data": 4, "model": 2}
    assert layout.places(scores, sizes) == {"data": 1}
    assert layout.turned("data", length).places(scores, sizes) == {"data": 2}
    assert layout.turned("data", length).turned("data", length) == layout


def test_split_keys_are_priced():
    """With keys split instead of queries, what is summed over them is added up."""
    found = read(Program(function=itself, args=(f32(4, 1024, 64),)))
    length = classes(found)["x:1"]
    cost = Estimator(found, sending(data=4, model=1))
    layout = Layout.of({"data": [length], "model": []})
    first, last = cost(layout), cost(layout.turned("data", length))
    one = 4 * 1024 * 64 * 4
    # Keys and values are gathered; or queries are, and what they get is added up in parts.
    assert first.exchange == pytest.approx(one * 3 / 4)
    assert last.exchange > first.exchange


@pytest.mark.parametrize("name", ["mlp", "gpt", "moe", "decoding"])
def test_what_is_known_of_some_classes_holds_for_all_layouts(name):
    """An estimate is the same whether others were made before it or not."""
    draw = random.Random(0)
    found, on = graph_named(name), machine(MESHES[0])
    shared = Estimator(found, on)
    numbers = [*found.classes]
    for n in range(60):
        orders, state = (
            {axis: draw.sample(numbers, draw.randint(0, 3)) for axis in on.sizes} for _ in range(2)
        )
        last = {(axis, c) for axis in on.sizes for c in numbers if draw.random() < 0.2}
        layout = Layout.of(orders, state if n % 2 else None, last if n % 3 else ())
        got = shared(layout)
        if n > 40:
            alone = Estimator(found, on)(layout)
            assert got.seconds == pytest.approx(alone.seconds)
            assert got.peak == pytest.approx(alone.peak)


@pytest.mark.parametrize("name", ["mlp", "moe"])
def test_an_estimate_goes_on_with_another_mesh(name):
    """What was found for the first mesh is of that one alone."""
    found = graph_named(name)
    one, other = sending(data=4, model=2), sending(data=2, model=4)
    first = Estimator(found, one)
    layouts = [
        Layout.of({"data": [a], "model": [b]}) for a, b in itertools.permutations(found.classes, 2)
    ]
    before = [first(layout) for layout in layouts]
    assert [*map(first.on(other), layouts)] == [Estimator(found, other)(one) for one in layouts]
    assert [*map(first, layouts)] == before
