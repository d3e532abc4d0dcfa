"""Products in groups before compilation: what is sent where axes split rows, columns and terms."""

from hardware import needs_libtpu
import jax
from jax import lax
import jax.numpy as jnp
import pytest

import spmd
from spmd import P, pjit

ROWS, TERMS, COLUMNS, GROUPS = 512, 256, 1024, 8
FLOPS = 2 * ROWS * TERMS * COLUMNS
SIZES = {"data": 4, "model": 2}

#: Bytes of a float32 row of the operand, and of the result.
_ROW, _MADE = 4 * TERMS, 4 * COLUMNS


def _array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _product(x, w, sizes):
    return lax.ragged_dot(x, w, sizes)


def _gradients(x, w, sizes):
    def loss(x, w):
        return jnp.sum(_product(x, w, sizes) ** 2)

    return jax.grad(loss, argnums=(0, 1))(x, w)


def _lowered(f, ins, out):
    given = _array(ROWS, TERMS), _array(GROUPS, TERMS, COLUMNS), _array(GROUPS, dtype=jnp.int32)
    with spmd.topology("v5e:2x4", SIZES):
        return pjit(f, in_axis_resources=(*ins, P()), out_axis_resources=out).lower(*given)


def _sent(found):
    """Each exchange: kind, axes, and bytes on the wire."""
    return sorted((one.kind, one.mesh_axes, one.total_wire_bytes) for one in found.collectives)


_WEIGHTS = 4 * GROUPS * TERMS * COLUMNS
#: Places of rows, weights and results; what is sent, and into how many parts the work is split.
LAYOUTS = {
    # Columns are split as they come.
    "columns": (P(), P(None, None, "model"), P(None, "model"), [], 2),
    # Terms are added up.
    "terms": (
        *(P(None, "data"), P(None, "data"), P()),
        [("all-reduce", ("data",), 2 * ROWS * _MADE * 3 // 4)],
        4,
    ),
    "terms and columns": (
        *(P(None, "data"), P(None, "data", "model"), P(None, "model")),
        [("all-reduce", ("data",), 2 * ROWS * _MADE // 2 * 3 // 4)],
        8,
    ),
    # Each device needs all rows, whose results are then its own.
    "rows": (P("data"), P(), P("data"), [("all-gather", ("data",), ROWS * _ROW * 3 // 4)], 1),
    # And all groups.
    "groups": (P(), P("model"), P(), [("all-gather", ("model",), _WEIGHTS // 2)], 1),
    "rows and groups": (
        *(P("data"), P("model"), P("data")),
        [
            ("all-gather", ("data",), ROWS * _ROW * 3 // 4),
            ("all-gather", ("model",), _WEIGHTS // 2),
        ],
        1,
    ),
    # Of two dimensions that one axis may split, that of more elements is: the weights' terms.
    "terms of the weights": (
        *(P(), P(None, "data"), P("data")),
        [("reduce-scatter", ("data",), ROWS * _MADE * 3 // 4)],
        4,
    ),
}


@needs_libtpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_product_in_groups_sends(name):
    """By hand: terms that are split are added up, and what is ragged is gathered."""
    *places, sent, parts = LAYOUTS[name]
    found = spmd.preview(_lowered(_product, places[:2], places[2]))
    assert _sent(found) == sent
    assert found.time.hardware_flops == FLOPS // parts


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_that_is_what_is_made(name):
    """Libtpu makes a kernel of it, whose program sends as many bytes over the same axes."""
    *places, _, _ = LAYOUTS[name]
    lowered = _lowered(_product, places[:2], places[2])
    told, made = spmd.preview(lowered), spmd.report(lowered)
    assert told.total.wire_bytes == pytest.approx(made.total.wire_bytes, rel=0.05)
    assert told.time.hardware_flops == pytest.approx(made.time.hardware_flops, rel=0.03)
    for axes in ("data",), ("model",):
        by_axis = [
            sum(one.total_wire_bytes for one in each.collectives if one.mesh_axes == axes)
            for each in (told, made)
        ]
        assert by_axis[0] == pytest.approx(by_axis[1], rel=0.1)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", ["columns", "terms", "terms and columns", "rows", "groups"])
def test_its_gradients(name):
    """The gradient of weights is a sum over rows in groups, and that of rows a product in them."""
    ins = LAYOUTS[name][:2]
    lowered = _lowered(_gradients, ins, ins)
    told, made = spmd.preview(lowered), spmd.report(lowered)
    assert told.total.wire_bytes == pytest.approx(made.total.wire_bytes, rel=0.02)
    if jax.__version_info__ >= (0, 11):  # before, libtpu multiplied all rows for each group
        assert told.time.hardware_flops == pytest.approx(made.time.hardware_flops, rel=0.03)
