"""What is thought to be in memory at the worst moment, against counts by hand."""

import functools
import re

from hardware import needs_libtpu
import jax
import jax.numpy as jnp
from planned_programs import FLAT, MESH, f32, ints, priced, sending, tpu
import pytest

import spmd
from spmd import P
from spmd.planner.cost.fusion import Fusion
from spmd.planner.cost.lives import Lives, wider
from spmd.planner.cost.reads import Reads
from spmd.planner.cost.stacks import Stacks

F32 = 4


def test_memory_of_arguments_and_results():
    """A donated argument and its next value have one place; others have two."""

    def f(x, y):
        return x + 1.0, y * 2.0

    args = (f32(256, 256),) * 2
    size = 256 * 256 * F32
    assert priced(f, args, {})[1].peak == 4 * size
    assert priced(f, args, {}, donate_argnums=0)[1].peak == 3 * size
    _, split = priced(f, args, {"data": ["x:0", "y:0"], "model": ["x:1", "y:1"]})
    assert split.peak == 4 * size / 8


def test_memory_of_what_is_kept_for_the_gradient():
    """A scan of eight layers keeps what each of them was given, and not what it computes of it."""

    def loss(ws, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        return (jax.lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2).sum()

    layers, rows, width = 8, 4096, 64
    args = (f32(layers, width, width), f32(rows, width))
    _, cost = priced(jax.grad(loss), args, {})
    one, weights = rows * width * F32, layers * width * width * F32
    given = (1 + layers) * one + 2 * weights
    assert given <= cost.peak <= given + 6 * one
    _, split = priced(jax.grad(loss), args, {"data": ["x:0"]})
    assert split.peak <= 2 * weights + (cost.peak - 2 * weights) / 4 * 1.01


def test_gathered_weights_take_memory_while_they_are_used():
    """Split weights are a fraction; gathered for the product they are all there."""
    args = (f32(64, 2048), f32(2048, 2048))
    plain = priced(jnp.matmul, args, {})[1].peak
    split = priced(jnp.matmul, args, {"data": ["a:0", "b:0"]})[1].peak
    weight = 2048 * 2048 * F32
    assert split < plain + weight
    assert split >= weight / 4 + weight


def test_small_values_are_in_vector_memory():
    """On a TPU what is small between operations takes none of the main memory."""

    def f(x, a, b):
        return jnp.tanh(x @ a) @ b

    args = (f32(512, 512), f32(512, 512), f32(512, 512))
    ends, passes = 4 * 512 * 512 * F32, 2 * (512 / 128) ** 3 / 8
    assert priced(f, args, {}, on=tpu())[1].peak == ends + passes * 20 * 2**10
    assert priced(f, args, {})[1].peak > ends


def test_the_program_is_in_memory_on_a_tpu():
    """Of a large product it is no longer than of one that takes a few dozen passes."""

    def f(x, ws):
        for w in ws:
            x = x @ w
        return x

    args = (f32(2048, 2048), (f32(2048, 2048),) * 30)
    plain, there = (priced(f, args, {}, on=on)[1].peak for on in (sending(**MESH), tpu()))
    ends = 32 * 2048 * 2048 * F32
    assert there - ends == pytest.approx(30 * 0.45 * 2**20)
    assert plain >= ends  # results between products too, and no program


def test_arguments_are_padded_on_a_tpu():
    """Of 100 columns there are 128 in memory, where no dimension is laid out without padding."""

    def f(x, y, z):
        return x + 1.0, y + 1.0, z + 1.0

    def peak(*shape, on):
        args = (f32(*shape), f32(128, 128), f32(128))
        return priced(f, args, {}, on=on, donate_argnums=(0, 1, 2))[1].peak - 128 * 129 * F32

    assert peak(48, 100, 25, 60, on=tpu()) == 1.28 * 48 * 100 * 25 * 60 * F32  # 48 rows
    assert peak(48, 100, 6400, on=tpu()) == 48 * 100 * 6400 * F32  # 6,400 columns, 48 rows
    assert peak(3, 128, on=tpu()) == 4 * 128 * F32  # tiles of four rows
    assert peak(100, 0, on=tpu()) == 0
    assert peak(100, 25, on=sending(**MESH)) == 100 * 25 * F32


def halves(ws, x, *, narrow=jnp.bfloat16, jumps=True):
    """Two loops over layers whose weights are kept in float32, and used in another type."""

    def layer(x, w):
        return jnp.tanh(x @ w.astype(narrow)), None

    x = jax.lax.scan(layer, x, ws)[0]
    return jax.lax.scan(layer, x, ws)[0] if jumps else x


@pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float32])
def test_weights_that_loops_make_narrower_are_made_so_once(narrow):
    """All layers of them, before the first loop; what is not converted is read where it is."""
    layers, width = 16, 512
    args = (f32(layers, width, width), jax.ShapeDtypeStruct((8, width), narrow))
    weights, rest = layers * width * width * F32, 2 * width * width * F32
    found = priced(functools.partial(halves, narrow=narrow), args, {})[1].peak
    more = weights / 2 if narrow == jnp.bfloat16 else 0
    assert weights + more <= found <= weights + more + rest


def test_weights_without_elements_need_nothing():
    """Nor do those that a loop makes narrower."""
    args = (f32(2, 0, 0), jax.ShapeDtypeStruct((8, 0), jnp.bfloat16))
    assert priced(halves, args, {}, on=tpu())[1].peak == 0


@needs_libtpu
@pytest.mark.slow
def test_weights_that_loops_make_narrower_are_made_so_once_by_libtpu():
    """Beside the arguments the program has half as many bytes as they have."""
    layers, width = 64, 2048
    args = (f32(layers, width, width), jax.ShapeDtypeStruct((8, width), jnp.bfloat16))
    step = spmd.pjit(halves, mesh=spmd.topology("v5e:2x4", MESH))
    memory = spmd.report(step.lower(*args)).memory
    weights = layers * width * width * F32
    assert memory.peak - memory.code == pytest.approx(1.5 * weights, rel=0.05)


def unrolled(ws, x):
    """Layers written out: what is gathered for one of them is there until its gradient."""
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def test_gathered_weights_of_layers_that_are_written_out_stay():
    """Until the gradient needs them, however small; those of a loop are gathered again."""
    layers, rows, width = 24, 64, 1024
    orders = {"data": ["x:0", *(f"ws[{n}]:0" for n in range(layers))]}
    args = ((f32(width, width),) * layers, f32(rows, width))
    found = priced(jax.grad(unrolled), args, orders, on=tpu())[1].peak
    one = width * width * F32
    # A quarter of the weights and of their gradients, of all of which there is the program.
    ends = 2 * layers * one / 4 + 3 * layers * tpu().code(2 * rows * width * width)
    # Those of the last four layers are used again no more than eight products later.
    assert ends + (layers - 4) * one <= found <= ends + (layers - 3) * one

    def scanned(ws, x):
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2).sum()

    args = (f32(layers, width, width), f32(rows, width))
    found = priced(jax.grad(scanned), args, {"data": ["x:0", "ws:1"]}, on=tpu())[1].peak
    assert found <= ends + 2 * one


def feeding_forward(ws, x):
    """Layers whose hidden values a compiler computes again, where that costs no more."""
    for w in ws:
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    return (x.astype(jnp.float32) ** 2).mean()


LAYERS, WORDS, WIDTH, HIDDEN = 6, 65_536, 512, 2048
FORWARD = (
    [
        {
            "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.bfloat16),
            "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.bfloat16),
        }
    ]
    * LAYERS,
    jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.bfloat16),
)
HIDDEN_VALUE = WORDS * HIDDEN * 2 / 8


def test_operands_of_products_in_parts_are_kept():
    """A gradient that goes around takes its operand from memory, and so does no other."""
    split = {"data": ["x:0", *(f"ws[{n}]['up']:0" for n in range(LAYERS))]}
    on = tpu(FLAT)
    whole, parts = (
        priced(jax.grad(feeding_forward), FORWARD, orders, on=on)[1].peak
        for orders in ({"data": ["x:0"]}, split)
    )
    weights = LAYERS * 2 * WIDTH * HIDDEN * 2
    more = parts - (whole - 2 * weights * 7 / 8)
    assert 3 * HIDDEN_VALUE <= more - weights <= LAYERS * HIDDEN_VALUE


@needs_libtpu
@pytest.mark.slow
@pytest.mark.soak
def test_operands_of_products_in_parts_are_kept_by_libtpu():
    """As many more hidden values are there at its peak."""

    def values(up, down):
        specs = [{"up": up, "down": down}] * LAYERS
        step = spmd.pjit(
            jax.grad(feeding_forward),
            mesh=spmd.topology("v5e:2x4", FLAT),
            in_axis_resources=(specs, P("data")),
            out_axis_resources=specs,
        )
        found = spmd.report(step.lower(*FORWARD)).memory.buffers
        return sum(one.at_peak and one.nbytes == HIDDEN_VALUE for one in found)

    whole, parts = values(P(), P()), values(P("data"), P(None, "data"))
    assert 3 <= parts - whole <= LAYERS


def next_table(table, ids):
    """A step of a table."""
    return table - 0.1 * jax.grad(lambda t: jnp.sum(jnp.sin(t[ids])))(table)


ROWS, COLUMNS = 2**20, 128
TABLE = (f32(ROWS, COLUMNS), ints(4096))
NARROW = [("table:1", P(None, tuple(MESH)), 16), ("table:0", P(tuple(MESH)), COLUMNS)]


@pytest.mark.parametrize(("by", "spec", "left"), NARROW)
def test_gradients_of_narrow_tables_are_padded_on_a_tpu(by, spec, left):
    """A scatter writes whole rows, of 128 columns at least; the table itself has no padding."""
    orders = {axis: [by] for axis in MESH}
    part = ROWS * COLUMNS * F32 / 8
    plain = priced(next_table, TABLE, orders, donate_argnums=0)[1].peak
    assert plain == pytest.approx(2 * part, rel=0.02)
    padded = priced(next_table, TABLE, orders, on=tpu(), donate_argnums=0)[1].peak
    gradient = COLUMNS / left if left < COLUMNS else 0  # one of whole rows is in vector memory
    assert padded == pytest.approx((1 + gradient) * part, rel=0.02)


def test_narrow_rows_that_are_looked_up_are_padded_on_a_tpu():
    """Those of each edge of a graph, which are summed by node."""

    def f(x, to, at):
        return jax.ops.segment_sum(x[at], to, x.shape[0])

    edges = 2**20
    args = (f32(2048, 128), ints(edges), ints(edges))
    orders = {axis: ["x:1"] for axis in MESH}
    plain, padded = (priced(f, args, orders, on=on)[1].peak for on in (sending(**MESH), tpu()))
    rows = edges * 128 * F32 / 8
    assert padded - plain == pytest.approx((128 / 16 - 1) * rows, rel=0.05)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(("by", "spec", "left"), NARROW)
def test_gradients_of_narrow_tables_are_padded_by_libtpu(by, spec, left):
    """By as much; of rows that are whole it makes the next table in place."""
    step = spmd.pjit(
        next_table,
        mesh=spmd.topology("v5e:2x4", MESH),
        in_axis_resources=(spec, P()),
        out_axis_resources=spec,
        donate_argnums=0,
    )
    peak = spmd.report(step.lower(*TABLE)).memory.peak
    pads = left < 128 and jax.__version_info__ >= (0, 11)  # libtpu 0.0.42 makes all in place
    padding = COLUMNS / left if pads else 0
    assert peak == pytest.approx((1 + padding) * ROWS * COLUMNS * F32 / 8, rel=0.1)


def test_picked_elements_make_no_table():
    """A loss that picks one element of each row keeps no second array of all of them."""

    def loss(x, w, y):
        logits = x @ w
        picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
        return (jax.nn.logsumexp(logits, 1) - picked).mean()

    rows, words = 4096, 8192
    args = (f32(rows, 16), f32(16, words), ints(rows))
    _, cost = priced(jax.grad(loss, 1), args, {})
    assert cost.peak <= 1.2 * rows * words * F32 + 1e6


def test_values_side_by_side_are_not_kept_twice():
    """Products read what is put together where its parts are, if these are there as long."""

    def f(x, a, b, c, d):
        u, v = x @ a, x @ b
        both = jnp.concatenate([u, v], axis=1)
        return both @ c, both @ d, jnp.sum(u * v)

    args = f32(512, 8), f32(8, 256), f32(8, 256), f32(512, 8), f32(512, 8)
    found, _ = priced(f, args, {})
    lives = Lives(found, [0] * len(found.tensors), 1, wider(found))
    (both,) = (one for one in found.operations if one.name == "concatenate")
    assert len(lives.readers[both.tensors[-1]]) == 2
    assert both.tensors[-1] not in lives.stored
    assert {*both.tensors[:2]} <= lives.stored


def bf16(*dims):
    """The shape of an array of bfloat16."""
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16)


def test_logits_are_kept_as_their_product_makes_them():
    """What reads them makes them wider on the way, and their gradient where it is used."""

    def loss(x, w, y):
        logits = (x @ w).astype(jnp.float32)
        right = jax.nn.one_hot(y, words)
        return jnp.mean(jax.nn.logsumexp(logits, 1) - jnp.sum(right * logits, 1))

    rows, words = 4096, 8192
    _, cost = priced(jax.grad(loss, (0, 1)), (bf16(rows, 16), bf16(16, words), ints(rows)), {})
    assert cost.peak == pytest.approx(rows * words * 2, rel=0.05)


def _along(logits, y):
    return jnp.take_along_axis(logits, y[:, None], 1)[:, 0]


def _by_number(logits, y):
    return logits[jnp.arange(len(y)), y]


def _picked(x, w, y, *, normed, pick=_along):
    """A loss of bfloat16 logits that takes one element of each row, in float32."""
    logits = (x @ w).astype(jnp.float32)
    if normed:
        return -pick(jax.nn.log_softmax(logits), y).mean()
    return (jax.nn.logsumexp(logits, 1) - pick(logits, y)).mean()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("differentiated", [False, True])
def test_elements_are_picked_of_a_table_of_their_type(normed, differentiated):
    """It is written for them beside the logits, which all others read."""
    loss = functools.partial(_picked, normed=normed)
    f = jax.value_and_grad(loss, (0, 1)) if differentiated else loss
    rows, words = 4096, 8192
    _, cost = priced(f, (bf16(rows, 16), bf16(16, words), ints(rows)), {})
    assert cost.peak == pytest.approx(rows * words * (2 + 4), rel=0.05)


@needs_libtpu
@pytest.mark.few(0)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("pick", "itemsize"), [(_along, 2 + 4), (_by_number, 4 + 4)])
def test_elements_are_picked_of_a_table_of_their_type_by_libtpu(normed, pick, itemsize):
    """Beside the logits; what is told by numbers has its gradient in a table of its own."""
    f = jax.value_and_grad(functools.partial(_picked, normed=normed, pick=pick), (0, 1))
    rows, words, width = 4096, 16384, 512
    args = bf16(rows, width), bf16(width, words), ints(rows)
    step = spmd.pjit(f, mesh=spmd.topology("v5e:2x2", {"data": 4}), in_axis_resources=P())
    memory = spmd.report(step.lower(*args)).memory
    ends = 2 * (rows + words) * width * 2
    assert memory.peak - memory.code - ends == pytest.approx(rows * words * itemsize, rel=0.05)
    _, cost = priced(f, args, {}, on=tpu())
    assert cost.peak == pytest.approx(memory.peak, rel=0.05)


def test_a_product_writes_a_table_too():
    """The logits in float32 are written with it: two thirds of what it writes."""

    def f(x, w, y):
        logits = x @ w
        wide = logits.astype(jnp.float32)
        return jnp.exp(logits), jnp.take_along_axis(wide, y[:, None], 1)

    rows, words = 4096, 8192
    args = (bf16(rows, 16), bf16(16, words), ints(rows))
    found, _ = priced(f, args, {})
    (product,) = (n for n, one in enumerate(found.operations) if one.flops)
    lives = Lives(found, [0] * len(found.tensors), 1, wider(found))
    stacks = Stacks(found, are_turned=False)
    reads = Reads(found, Fusion(found, [0] * len(found.tensors), 1, lives, stacks), lives)
    nbytes = [found.tensors[i].nbytes for i in reads.written[product]]
    assert nbytes == [rows * words * 2, rows * words * 4]


def test_a_jitted_function_does_not_work_on_what_it_is_given():
    """Logits that are made wider and given to one are written as their product makes them."""

    def loss(x, w):
        return jax.jit(jax.nn.logsumexp, static_argnums=1)((x @ w).astype(jnp.float32), 1).mean()

    rows, words = 4096, 8192
    found, _ = priced(loss, (bf16(rows, 16), bf16(16, words)), {})
    assert not wider(found)


def test_scores_are_kept_as_their_mask_leaves_them():
    """A product, its wider type and its mask are one operation, which writes float32."""

    def f(q, k, v):
        scores = (q @ k.T).astype(jnp.float32)
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
        return (jax.nn.softmax(scores) @ v.astype(jnp.float32)).sum()

    length = 4096
    _, cost = priced(f, (bf16(length, 16),) * 3, {})
    assert cost.peak == pytest.approx(length * length * 4, rel=0.05)


def _masked(q, k, v):
    """Attention of ``[batch, length, width]``, whose mask is of float32."""
    scores = jnp.einsum("btd,bsd->bts", q, k).astype(jnp.float32)
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores).astype(v.dtype), v)


@pytest.mark.parametrize(("axis", "itemsize"), [("data", 2), ("model", 4)])
def test_scores_of_a_row_each_are_kept_as_their_product_makes_them(axis, itemsize):
    """A dimension that is split to 1 stands between the product and its mask."""
    batch, length = 4, 2048
    _, cost = priced(_masked, (bf16(batch, length, 16),) * 3, {axis: ["q:0"]})
    rows = batch // MESH[axis]
    assert cost.peak == pytest.approx(rows * length * length * itemsize, rel=0.05)


@needs_libtpu
@pytest.mark.few(0, shared=False)
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize(("rows", "kept"), [(1, "bf16"), (2, "f32")])
def test_what_libtpu_keeps_of_scores(topology, rows, kept):
    """In bfloat16 where each device has a row of the batch, and else in float32 behind the mask."""
    mesh = spmd.topology(topology, {"data": -1})
    length = 1024
    args = (bf16(rows * mesh.shape["data"], length, 128),) * 3
    attend = spmd.pjit(_masked, in_axis_resources=P("data"), out_axis_resources=P("data"))
    with mesh:
        text = attend.lower(*args).compile().as_text()
    _, _, main = text.partition("\nENTRY")
    results = [line.partition(" fusion(")[0] for line in main.splitlines() if " fusion(" in line]
    shape = re.compile(rf"(bf16|f32)\[(?:{rows},)?{length},{length}\]")
    assert {found for one in results for found in shape.findall(one)} == {kept}
