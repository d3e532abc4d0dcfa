"""Arguments and outputs that keep a place, whatever a layout says."""

import jax
import jax.numpy as jnp
import numpy as np
from planned_programs import classes, f32, gpt, graph_named, mlp, pins_of, read, sending
import pytest

import spmd
from spmd import P
from spmd.planner.cost.estimate import Estimator
from spmd.planner.program.layout import Fixed, Layout, places_of, spec_of
from spmd.planner.search.descent import Rules, search
from spmd.planner.verify import Program, entries_of, planned

MESH = {"data": 4, "model": 2}


def index(found, name):
    """Of an argument or output."""
    return next(i for i, one in enumerate(found.tensors) if one.name == name)


def product():
    """Of two matrices."""
    return read(Program(function=jnp.matmul, args=(f32(64, 32), f32(32, 128))))


#: Bytes that a device sends, worked out by hand, of one product of ``f32[64,32]`` and
#: ``f32[32,128]`` over four devices: where `a` lies, what the layout says, what is sent.
KEPT = {
    "as the layout says": ({"data": 0}, ["a:0"], 0),
    # Where it lies whole, each device takes its rows of it.
    "whole": ({}, ["a:0"], 0),
    # Where its columns are split, a device has to send three quarters of its rows for others'.
    "otherwise": ({"data": 1}, ["a:0"], 64 * 32 * 4 / 4 * 3 / 4),
    # Where nothing is split, all of it is gathered.
    "split alone": ({"data": 0}, [], 64 * 32 * 4 * 3 / 4),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_fixed_argument_costs(name):
    """An exchange between where it lies and where the product wants it."""
    kept, order, expected = KEPT[name]
    found = product()
    fixed = Fixed.of({index(found, "a"): kept})
    layout = Layout.of({"data": [classes(found)[one] for one in order], "model": []})
    assert Estimator(found, sending(**MESH), fixed)(layout).exchange == pytest.approx(expected)


@pytest.mark.parametrize("name", KEPT)
def test_what_another_place_costs_of_an_argument_that_is_apart(name):
    """An estimate that was made without that place does not stand in its way."""
    kept, order, expected = KEPT[name]
    found = product()
    estimate = Estimator(found, sending(**MESH), apart=[index(found, "a")])
    layout = Layout.of({"data": [classes(found)[one] for one in order], "model": []})
    assert estimate(layout).exchange == 0
    other = estimate.keeping({index(found, "a"): kept})
    assert other(layout).exchange == pytest.approx(expected)
    assert estimate(layout).exchange == 0


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_what_is_apart_costs_no_less(name):
    """Arguments of a kind of their own are estimated as those that share one are."""
    found = graph_named(name)
    arguments = [i for i, one in enumerate(found.tensors) if one.kind == "argument"]
    plain = Estimator(found, sending(**MESH))
    apart = Estimator(found, sending(**MESH), apart=arguments)
    first, second, *_ = found.classes
    for orders in ({"data": [], "model": []}, {"data": [first, second], "model": [second]}):
        ours, own = plain(Layout.of(orders)), apart(Layout.of(orders))
        assert (own.peak, own.compute) == pytest.approx((ours.peak, ours.compute))
        assert own.exchange == pytest.approx(ours.exchange)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_another_place_costs_the_same_whatever_is_remembered(name):
    """What was found out of other values is used again, and nothing of what is elsewhere now."""
    found = graph_named(name)
    arguments = [i for i, one in enumerate(found.tensors) if one.kind == "argument"]
    first, second, *_ = found.classes
    layout = Layout.of({"data": [first, second], "model": [second]})
    warm = Estimator(found, sending(**MESH), apart=arguments)
    own = warm(layout)
    moved = 0
    for i in arguments:
        places = {"model": 0} if found.tensors[i].shape else {}
        cold = Estimator(found, sending(**MESH), apart=arguments).keeping({i: places})(layout)
        assert warm.keeping({i: places})(layout) == cold
        moved += cold != own
    assert moved > 1
    assert warm(layout) == own


def test_a_fixed_output_is_gathered():
    """The rows of a product that is wanted whole are sent to all."""
    found = product()
    output = next(i for i, one in enumerate(found.tensors) if one.kind == "output")
    layout = Layout.of({"data": [classes(found)["a:0"]], "model": []})
    cost = Estimator(found, sending(**MESH), Fixed.of({output: {}}))(layout)
    assert cost.exchange == pytest.approx(64 * 128 * 4 * 3 / 4)


def test_places_agree_everywhere():
    """The places that `places_of` gives are those of specs; products move what they take."""
    program, layout_of = mlp(), {"data": ["batch[0]:0"], "model": ["state['p'][0]['up']:1"]}
    found = read(program)
    of = classes(found)
    layout = Layout.of({axis: [of[one] for one in order] for axis, order in layout_of.items()})
    up = index(found, "state['p'][0]['up']")
    fixed = Fixed.of({up: {"model": 0, "data": 0}})
    places = places_of(found.tensors, layout, MESH, fixed)
    assert spec_of(places[up], 2) == P(("model", "data"), None)
    ins, _ = entries_of(found, layout, MESH, fixed)
    assert ins[up] == (("model", "data"), ())
    pinned = {
        spec
        for one in pins_of(found, layout, MESH, fixed)
        for operation in found.operations
        if (operation.number, f"stablehlo.{operation.name}") == one[:2]
        for i, spec in zip(operation.tensors, one.specs, strict=True)
        if i == up
    }
    # The product splits its rows by data, and what is fixed by model where the layout does.
    assert pinned == {((), ("model",))}
    others = places_of(found.tensors, layout, MESH)
    assert all(a == b for i, (a, b) in enumerate(zip(places, others, strict=True)) if i != up)


def test_a_fixed_dimension_may_have_no_class():
    """A dimension that no product has can be fixed as well, and costs what it costs."""

    def f(x, scale):
        return (x * scale[:, None]).sum(0), x @ x.T

    found = read(Program(function=f, args=(f32(64, 16), f32(64))))
    fixed = Fixed.of({index(found, "scale"): {"data": 0, "model": 0}})
    best = search(Estimator(found, sending(**MESH), fixed), Rules())[0]
    assert best.cost.seconds >= 0
    assert places_of(found.tensors, best.layout, MESH, fixed)[1] == {"data": 0, "model": 0}


@pytest.mark.slow
def test_the_search_follows_what_is_fixed():
    """Words that are split by an axis make it the axis of examples, without being told so."""
    found = graph_named("gpt")
    words = index(found, "batch[0]")
    fixed = Fixed.of({words: {"model": 0}})
    best = search(Estimator(found, sending(data=2, model=4), fixed), Rules())[0]
    free = search(Estimator(found, sending(data=2, model=4)), Rules())[0]
    assert best.cost.seconds >= free.cost.seconds - 1e-9


@pytest.mark.slow
def test_a_fixed_weight_makes_a_layout_of_its_own():
    """With the table of words split by `model`, that axis splits words first, not examples."""
    found = graph_named("gpt")
    table = index(found, "state['p']['embed']")
    fixed = Fixed.of({table: {"model": 0}})
    seen = search(Estimator(found, sending(**MESH), fixed), Rules())
    number = classes(found)["state['p']['embed']:0"]
    starts = [one for one in seen if dict(one.layout.orders)["model"][:1] == (number,)]
    assert starts


@pytest.mark.slow
def test_a_planned_program_with_fixed_places_computes_the_same():
    """Arguments lie where they are fixed, and values are those of the function."""
    program, mesh = mlp(), spmd.make_mesh(MESH)
    found = read(program)
    of = classes(found)
    fixed = Fixed.of(
        {
            index(found, "state['p'][0]['up']"): {"model": 0},
            index(found, "result[0]['p'][0]['up']"): {"data": 1},
        }
    )
    layout = Layout.of({"data": [of["batch[0]:0"]], "model": [of["state['p'][0]['up']:1"]]})
    random = np.random.default_rng(0)
    args = jax.tree.map(lambda a: abs(random.normal(size=a.shape)).astype(np.float32), program.args)
    ins, outs = entries_of(found, layout, MESH, fixed)
    compiled = planned(program, mesh, ins, outs, pins_of(found, layout, MESH, fixed)).compile()
    state, loss = compiled(*args)
    expected, value = program.function(*args)
    assert state["p"][0]["up"].sharding.spec == P(None, "data")
    np.testing.assert_allclose(loss, value, rtol=1e-4)
    np.testing.assert_allclose(state["p"][0]["up"], expected["p"][0]["up"], rtol=2e-3, atol=1e-5)


def test_fixed_places_are_data():
    """Equal places are equal, hash alike, and come back as a mapping."""
    one = Fixed.of({3: {"data": 0}, 1: {"model": 1, "data": 1}})
    assert one == Fixed.of({1: {"model": 1, "data": 1}, 3: {"data": 0}})
    assert hash(one) == hash(Fixed.of(one.to_dict()))
    assert one.to_dict() == {1: {"model": 1, "data": 1}, 3: {"data": 0}}


@pytest.mark.slow
def test_scanned_weights_that_are_fixed_are_read_in_the_loop():
    """A stack that is split as FSDP does is gathered as often as it is used, not more."""
    found = read(gpt())
    up = index(found, "state['p']['layers']['up']")
    layout = Layout.of({"data": [classes(found)["batch[0]:0"]], "model": []})
    on = sending(data=4, model=1)
    plain = Estimator(found, on)(layout).exchange
    fixed = Estimator(found, on, Fixed.of({up: {"data": 1}}))(layout).exchange
    whole = found.tensors[up].nbytes * 3 / 4
    assert whole <= fixed - plain <= 3.01 * whole
