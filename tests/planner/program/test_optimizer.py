"""Values that only the optimizer has, and ZeRO-1."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
from planned_programs import classes, graph_named, mlp, pins_of, read, sending
import pytest

import spmd
from spmd import P
from spmd.planner.cost.estimate import Estimator
from spmd.planner.program.layout import Layout
from spmd.planner.program.optimizer import outputs_of
from spmd.planner.search.experts import experts
from spmd.planner.verify import Program, entries_of, planned

MESH = {"data": 4, "model": 2}


def ends(found):
    """The arguments and outputs that are the optimizer's."""
    return {one.name for one in found.tensors if one.is_state and one.kind != "result"}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mlp", "gpt", "unrolled", "moe"])
def test_moments_are_the_optimizers_and_parameters_are_not(name):
    """Of a step of Adam, m and v before and after it, and nothing else of what goes in or out."""
    found = graph_named(name)
    expected = {
        one.name
        for one in found.tensors
        if one.kind != "result" and re.match(r"(state|result\[0\])\['[mv]'\]", one.name)
    }
    assert ends(found) == expected


@pytest.mark.slow
def test_gradients_on_their_way_are_the_optimizers():
    """The product that makes a gradient of a weight may leave it split as the moments are."""
    found = graph_named("gpt")
    results = [found.tensors[one.tensors[-1]] for one in found.operations if one.flops]
    split = [one for one in results if one.is_state]
    assert len(split) == 7  # six matrices of a layer, and the table of words
    assert all(len(one.shape) <= 3 for one in split)


def test_what_is_summed_to_a_gradient_is_not_the_optimizers():
    """The gradient of a scale is a sum over all examples: the sum is on its way, they are not."""
    found = graph_named("gpt")
    batch = classes(found)["batch[0]:0"]
    assert not [one for one in found.tensors if one.is_state and batch in one.classes]
    scales = [one for one in found.tensors if one.is_state and one.shape == (32,)]
    assert scales


def test_a_program_that_learns_nothing_has_none():
    """A cache is used by products, and elementwise programs have no parameters."""
    assert not ends(graph_named("decoding"))
    assert not ends(graph_named("elementwise"))


def test_outputs_follow_arguments_by_their_paths():
    """Of several arguments of one shape, the output's path tells which one it is the next of."""
    found = graph_named("gpt")
    for output, argument in outputs_of(found).items():
        name = found.tensors[output].name
        if name.startswith("result[0]"):
            assert found.tensors[argument].name == "state" + name.removeprefix("result[0]")


def test_swapped_outputs_follow_their_own_arguments():
    """Also where the outputs come in another order than the arguments."""

    def step(a, b):
        return {"b": b + 1, "a": a @ a}

    f = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    found = read(Program(function=lambda t: step(**t), args=({"a": f, "b": f},)))
    names = {found.tensors[o].name: found.tensors[i].name for o, i in outputs_of(found).items()}
    assert names == {"result['a']": "t['a']", "result['b']": "t['b']"}


def test_zero_sends_what_data_parallelism_sends():
    """Gradients are scattered and parameters gathered: together one sum of the gradients."""
    found = graph_named("mlp")
    cost = Estimator(found, sending(data=4, model=1))
    known = experts(found, {"data": 4, "model": 1})
    plain, zero = cost(known["data parallel"]), cost(known["ZeRO-1"])
    weights = sum(one.nbytes for one in found.tensors if one.name.startswith("state['p']"))
    assert plain.exchange == pytest.approx(weights * 2 * 3 / 4, rel=0.01)
    assert zero.exchange == pytest.approx(plain.exchange, rel=0.01)
    # Three quarters of the moments, before and after the step, are elsewhere.
    assert plain.peak - zero.peak >= 0.74 * 2 * weights


def test_shardy_scatters_to_moments_that_are_split():
    """Its own bytes are those of the estimate, and results are as the function's."""
    program, mesh = mlp(), jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    found = read(program)
    layout = experts(found, MESH)["ZeRO-1 x TP"]
    ins, outs = entries_of(found, layout, MESH)
    lowered = planned(program, mesh, ins, outs, pins_of(found, layout, MESH))
    sent = lowered.preview().total.wire_bytes
    ours = Estimator(found, sending(**MESH))(layout).exchange
    assert 0.6 * sent <= ours <= 1.6 * sent


@pytest.mark.slow
def test_a_planned_step_with_split_moments_computes_the_same():
    """ZeRO-1's step gives the values of the function, and leaves moments split."""
    program, mesh = mlp(), spmd.make_mesh(MESH)
    found = read(program)
    layout = experts(found, MESH)["ZeRO-1"]
    ins, outs = entries_of(found, layout, MESH)
    random = np.random.default_rng(0)
    args = jax.tree.map(lambda a: abs(random.normal(size=a.shape)).astype(np.float32), program.args)
    compiled = planned(program, mesh, ins, outs, pins_of(found, layout, MESH)).compile()
    state, loss = compiled(*args)
    expected, value = program.function(*args)
    assert state["m"][0]["up"].sharding.spec == P(("data", "model"))
    assert state["p"][0]["up"].sharding.is_fully_replicated
    np.testing.assert_allclose(loss, value, rtol=1e-4)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5)


def test_layouts_without_an_order_of_the_optimizer_are_as_before():
    """An empty order says nothing: all values are split by the other one."""
    found = graph_named("mlp")
    of = classes(found)
    layout = Layout.of({"data": [of["batch[0]:0"]], "model": []})
    zero = dataclasses.replace(layout, state=(("data", ()),))
    for one in found.tensors:
        assert layout.places(one, MESH) == zero.places(one, MESH)


def test_a_record_says_what_the_optimizer_splits():
    """What splits moments alone is marked, before what splits all other values."""
    program = mlp()
    options = {"mesh": MESH, "top": 0, "cache": False, "progress": False}
    found = spmd.plan(program.function, *program.args, **options)
    zero = next(one for one in found.candidates if one.name == "ZeRO-1")
    own = [name.endswith(" (optimizer)") for name in zero.orders["data"]]
    assert own[0]
    assert not own[-1]
    assert own == sorted(own, reverse=True)
