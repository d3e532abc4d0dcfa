"""What is called a batch is one, and what may be a weight is not."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax
import pytest

from spmd import P, pjit
from spmd.inspection.findings.batch import batch_finding, unsplit_batches
from spmd.inspection.shardy.propagation import propagate

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
N, ROWS = 1024, 4096


class Everything:
    """A program in which values of all shapes take memory."""

    def __contains__(self, shape):
        return True


def f32(*shape):
    """An array that need not be there."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def findings(fun, specs, *args):
    """The findings on the batches of a function; nothing is compiled."""
    lowered = pjit(fun, in_axis_resources=specs, mesh=MESH).lower(*args)
    found = propagate(lowered.compiler_ir(), subject="test", steps=False)
    return [batch_finding(found, one, None) for one in unsplit_batches(found, Everything())]


def batches(fun, specs, *args):
    """What the findings say."""
    return [one.subject for one in findings(fun, specs, *args)]


W, X, COLUMNS = f32(N, N), f32(ROWS, N), f32(N, ROWS)
LAYERS = [f32(N, N), f32(N, 512)]


def mlp(ws, x):
    """Two layers of rows."""
    return jnp.tanh(x @ ws[0]) @ ws[1]


def column_mlp(ws, x):
    """Two layers of columns."""
    return ws[1] @ jnp.tanh(ws[0] @ x)


def column_heads(wq, wk, wv, x):
    """Attention whose heads are the first dimension of its weights, up to their sum."""
    q, k, v = (jnp.einsum("bsd,hdk->bhsk", x, w) for w in (wq, wk, wv))
    scores = jax.nn.softmax(jnp.einsum("bhsk,bhtk->bhst", q, k))
    return jnp.einsum("bhst,bhtk->bhsk", scores, v)


def experts(w1, w2, x):
    """Every expert on every row."""
    return jnp.einsum("ebf,efd->ebd", jax.nn.gelu(jnp.einsum("bd,edf->ebf", x, w1)), w2)


WEIGHTS = {
    "w first": (lambda w, x: jnp.tanh(w @ x), (None, P(None, "model")), W, COLUMNS),
    "w second": (lambda x, w: jnp.tanh(w @ x), (P(None, "model"), None), COLUMNS, W),
    "w only": (lambda w: jnp.tanh(w @ w.T), None, f32(ROWS, N)),
    "w and a constant": (lambda w: jnp.tanh(w @ jnp.ones((N, ROWS))), None, f32(512, N)),
    "w in a scalar": (lambda w, x: jnp.tanh(w @ x).sum(), None, f32(512, N), COLUMNS),
    "one layer of rows": (lambda x, w: jax.nn.softmax(x @ w), None, X, W),
    "columns": (column_mlp, None, [W, f32(ROWS, N)], COLUMNS),
    "gradient of columns": (
        jax.grad(lambda ws, x: column_mlp(ws, x).mean()),
        None,
        [W, f32(ROWS, N)],
        COLUMNS,
    ),
    "frozen layer of columns": (
        jax.grad(lambda w1, w2, x: column_mlp([w1, w2], x).mean()),
        None,
        f32(512, N),
        f32(ROWS, 512),
        COLUMNS,
    ),
    "adapter": (lambda a, b, x: (a @ b) @ x, None, f32(ROWS, 64), f32(64, N), COLUMNS),
    "tied table": (lambda t, x: jax.nn.softmax(x @ t.T), (None, P("data")), f32(8192, N), X),
    "heads": (
        column_heads,
        (None, None, None, P("data")),
        *[f32(16, 512, 64)] * 3,
        f32(8, 256, 512),
    ),
    "experts": (experts, (None, None, P("data")), f32(8, 512, N), f32(8, N, 512), f32(512, 512)),
    "positions": (
        lambda p, ws, x: mlp(ws, x + p[None]),
        (None, None, P("data")),
        f32(512, N),
        LAYERS,
        f32(64, 512, N),
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_may_be_a_weight(name):
    """Nothing is said where no evidence tells an argument from a weight."""
    assert batches(*WEIGHTS[name]) == []


def step(ws, x, y):
    """A step of training."""
    loss, grads = jax.value_and_grad(lambda ws: ((mlp(ws, x) - y) ** 2).mean())(ws)
    return jax.tree.map(lambda w, g: w - g, ws, grads), loss


# Adam mixes dtypes, which the tests forbid.
MOMENTUM = optax.sgd(1e-3, momentum=0.9)


def momentum_step(ws, state, x):
    """A step with an optimizer that has a state of the weights' shapes."""
    grads = jax.grad(lambda ws: (mlp(ws, x) ** 2).mean())(ws)
    updates, state = MOMENTUM.update(grads, state, ws)
    return optax.apply_updates(ws, updates), state


def scanned(ws, x):
    """The same layer several times, computed again in the backward pass."""

    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ w), None

    return (lax.scan(layer, x, ws)[0] ** 2).mean()


BATCHES = {
    "inference": (mlp, ([P(None, "model"), P("model")], None), LAYERS, X),
    "a loss": (lambda ws, x: (mlp(ws, x) ** 2).mean(), None, LAYERS, X),
    "its gradient": (jax.grad(lambda ws, x: (mlp(ws, x) ** 2).mean()), None, LAYERS, X),
    "jit within": (jax.grad(lambda ws, x: (jax.jit(mlp)(ws, x) ** 2).mean()), None, LAYERS, X),
    "momentum": (momentum_step, None, LAYERS, jax.eval_shape(MOMENTUM.init, LAYERS), X),
    "layers in a loop": (scanned, None, f32(4, N, N), X),
    "gradient of a loop": (jax.grad(scanned), None, f32(4, N, N), X),
    "gradient of one layer": (jax.grad(lambda w, x: jnp.tanh(x @ w).mean()), None, f32(N, 64), X),
    "tokens": (
        lambda table, w, x: table[x] @ w,
        None,
        f32(1000, N),
        f32(N, 2000),
        jax.ShapeDtypeStruct((ROWS, 8), np.int32),
    ),
    "images": (
        lambda k, x: lax.conv(x, k, (1, 1), "SAME"),
        None,
        f32(8, 3, 3, 3),
        f32(ROWS, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_what_is_a_batch(name):
    """The argument whose rows go through the whole program is named, and no weight is."""
    assert batches(*BATCHES[name]) == [f"the {ROWS} rows of x are on every device"]


@pytest.mark.parametrize(("rows", "axes"), [(4096, ["data"]), (4098, ["model"]), (4097, [])])
def test_the_axis_divides_the_rows(rows, axes):
    """The largest axis is named that divides the rows: 4 by 2 devices, and none for odd rows."""
    fixes = [one.fix for one in findings(mlp, None, LAYERS, f32(rows, N))]
    assert fixes == [f"P('{axis}') for x in in_axis_resources" for axis in axes]


def test_labels():
    """Labels are rows of the batch that they are compared with; weights of a step are none."""
    said = batches(step, None, LAYERS, X, f32(ROWS, 512))
    assert said == [f"the {ROWS} rows of x, y are on every device"]


@pytest.mark.parametrize("kind", ["dot", "convolution"])
def test_split_rows(kind):
    """A batch that an axis splits already is none that is not split."""
    fun, _, *args = BATCHES["inference" if kind == "dot" else "images"]
    assert batches(fun, (None, P("data")), *args) == []
