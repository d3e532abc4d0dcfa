"""Where products take their operands: previews of all placements against what XLA makes."""

import itertools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import models
import pytest

import spmd
from spmd import preview

_ONE = P(), P("data"), P(None, "data")
_BOTH = *_ONE, P("model"), P(None, "model"), P("data", "model"), P("model", "data")


@pytest.fixture(scope="module")
def grid():
    """A mesh of 8 devices."""
    return spmd.make_mesh({"data": 4, "model": 2})


def f32(*shape):
    """An array that need not be there."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _away(lowered):
    """How far a preview is from the report of a compiled program, of each kind and axis."""
    return models.distance(preview(lowered), spmd.report(lowered), "kind", "axis")


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [(64, 256, 128), (128, 64, 256), (8, 256, 256)])
def test_a_product_whose_operands_and_result_are_split_over_one_axis(grid, sizes):
    """All 27 ways, of rows, columns and what is summed over; another axis does nothing."""
    rows, summed, columns = sizes
    away = {}
    for places in itertools.product(_ONE, repeat=3):
        *ins, out = (NamedSharding(grid, one) for one in places)
        product = jax.jit(jnp.matmul, in_shardings=(*ins,), out_shardings=out)
        lowered = product.lower(f32(rows, summed), f32(summed, columns))
        away[places] = _away(lowered)
    assert not {places: one for places, one in away.items() if one}


#: Sums of products, or gathers of what one operand alone is split over: what sends less.
_ALONE = [
    ((512, 256, 128), P("data"), P("model"), P("data")),
    ((128, 256, 64), P("data"), P("model"), P("data")),
    ((512, 16, 512), P("data"), P("model"), P("data")),
    ((64, 256, 128), P(), P("data", "model"), P(None, "model")),
    ((512, 16, 512), P(), P("data", "model"), P(None, "model")),
    ((64, 256, 128), P(None, ("data", "model")), P(), P()),
    ((512, 16, 512), P(None, ("data", "model")), P(), P()),
]


@pytest.mark.parametrize(("sizes", "left", "right", "out"), _ALONE)
def test_one_operand_is_split_over_what_is_summed(grid, sizes, left, right, out):
    """As XLA does it, in kinds, axes and bytes."""
    rows, summed, columns = sizes
    ins = NamedSharding(grid, left), NamedSharding(grid, right)
    product = jax.jit(jnp.matmul, in_shardings=ins, out_shardings=NamedSharding(grid, out))
    lowered = product.lower(f32(rows, summed), f32(summed, columns))
    assert _away(lowered) == 0


def _step(weights, x):
    def loss(weights):
        a, b = weights
        return jnp.mean((jnp.tanh(x @ a) @ b - x) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


@pytest.mark.slow
def test_steps_of_a_perceptron_without_constraints(grid):
    """Bytes are the compiler's, with weights split in all ways over one dimension by one axis.

    Rows are split over data. CPU's compiler gathers the second ones twice, if they are split over
    model and then over data. Two steps are a tenth off with JAX 0.10 alone.
    """
    sent = {}
    for a, b in itertools.product(_BOTH, _BOTH[:-1]):
        places = tuple(NamedSharding(grid, one) for one in (a, b))
        step = jax.jit(
            _step, in_shardings=(places, NamedSharding(grid, P("data"))), out_shardings=places
        )
        lowered = step.lower((f32(64, 256), f32(256, 64)), f32(128, 64))
        sent[a, b] = [found(lowered).total.wire_bytes for found in (preview, spmd.report)]
    wrong = {places: (told, made) for places, (told, made) in sent.items() if told != made}
    assert len(wrong) <= (2 if jax.__version_info__ < (0, 11) else 0), wrong
    assert all(abs(told - made) <= 0.11 * made for told, made in wrong.values())
