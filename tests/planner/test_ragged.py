"""Plans of products in groups, such as those of experts that take as many rows as there are."""

from hardware import needs_libtpu
import jax
from jax import lax
import jax.numpy as jnp
import pytest

import spmd
from spmd import P, pjit
from spmd.inspection.shardy import passes
from spmd.planner.program.graph import graph_of

ROWS, WIDTH, HIDDEN, EXPERTS = 4096, 512, 2048, 8


def loss(params, x):
    """Each row goes to the expert that scores highest, and no row is dropped."""
    scores = (x @ params["gate"]).astype(jnp.float32)
    expert = jnp.argmax(scores, -1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=EXPERTS)
    hidden = jax.nn.silu(lax.ragged_dot(x[order], params["up"], sizes))
    made = lax.ragged_dot(hidden, params["down"], sizes)
    back = jnp.zeros_like(x).at[order].set(made)
    weights = jax.nn.softmax(scores).max(-1, keepdims=True)
    return jnp.mean((back.astype(jnp.float32) * weights) ** 2)


def step(params, x):
    """One of gradient descent."""
    cost, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, gradients), cost


def _array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


PARAMS = {
    "gate": _array(WIDTH, EXPERTS),
    "up": _array(EXPERTS, WIDTH, HIDDEN),
    "down": _array(EXPERTS, HIDDEN, WIDTH),
}
X = _array(ROWS, WIDTH)


@needs_libtpu
def test_rows_and_groups_are_split_by_no_layout():
    """Two products and their gradients: what they add up and their columns may be split alone."""
    with spmd.topology("v5e:2x4", {"data": 4, "model": 2}):
        lowered = pjit(step, in_axis_resources=None).lower(PARAMS, X)
    graph = graph_of(passes.module_of(lowered, subject="test"), subject="test")
    products = [one for one in graph.operations if one.name == "ragged_dot"]
    assert [one.flops for one in products] == [2 * ROWS * WIDTH * HIDDEN] * len(products)
    assert {one.runs for one in products} == {1}
    for one in products:
        assert sorted(one.sizes[name] for name in one.whole) == [EXPERTS, ROWS]
        assert sorted(one.sizes[name] for name in {*one.sizes} - one.whole) == [WIDTH, HIDDEN]
        assert one.number is not None


@pytest.mark.slow
@pytest.mark.soak
@needs_libtpu
def test_a_plan_of_experts_that_drop_nothing():
    """The plan splits the hidden numbers of all experts, and is what was predicted."""
    plan = spmd.plan(step, PARAMS, X, topology="v5e:2x4", axes=("data", "model"), progress=False)
    assert plan.verified == "time"
    if jax.__version_info__ >= (0, 11):  # before, libtpu multiplied all rows for each expert
        assert plan.seconds == pytest.approx(plan.predicted, rel=0.35)
    places = {one.name: one.spec for one in plan.arguments}
    assert places["params['up']"][2]
    assert places["params['up']"][2] == places["params['down']"][1]
    # Whole weights on all devices, and rows on each, take longer.
    with spmd.topology("v5e:2x4", dict(plan.axes)):
        plain = pjit(step, in_axis_resources=(P(), P("data"))).lower(PARAMS, X)
        own = pjit(step, plan=plan).lower(PARAMS, X)
    assert spmd.report(plain).time.seconds > 1.5 * plan.seconds
    told, made = spmd.preview(own), spmd.report(own)
    assert told.total.wire_bytes == pytest.approx(made.total.wire_bytes, rel=0.02)
    # CPU devices multiply by other operations.
    with spmd.make_mesh(dict(plan.axes)), pytest.raises(spmd.PlanError) as caught:
        pjit(step, plan=plan).lower(PARAMS, X)
    assert f"as JAX lowers it for {plan.device_kind!r}" in str(caught.value)
    assert "lowered for 'cpu'" in str(caught.value)
