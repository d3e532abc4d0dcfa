"""What a layout is thought to cost, against sums by hand."""

import collections
import dataclasses
import itertools
import math
import random

from hardware import needs_cuda, needs_libtpu
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
from planned_programs import FLAT, MESH, classes, f32, ints, pins_of, priced, read, sending, tpu
import pytest

import spmd
from spmd import P
from spmd.inspection.compile.timed import links_of
from spmd.inspection.timing.chips import CHIPS
from spmd.planner.cost import product
from spmd.planner.cost.demand import Demand
from spmd.planner.cost.estimate import Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.pins import Pinned, Way
from spmd.planner.program.layout import Fixed, Layout, places_of
from spmd.planner.verify import Program, entries_of, planned

F32 = 4
#: Each device and its neighbour along ``model``.
PAIRS = tuple((i, i ^ 1) for i in range(8))


def sent(function, args, orders, **more):
    """Bytes that a device sends."""
    return priced(function, args, orders, **more)[1].exchange


# Exchanges


@pytest.mark.parametrize(
    ("orders", "nbytes"),
    [
        (["ids:0", "tables:0"], 8 * 512 * 32 * F32 * 3 / 4),  # the words are split: all tables
        (["tables:0"], 0),  # the words of each are whole where it is
        (["ids:0"], 0),
    ],
)
def test_tables_are_whole_where_their_words_are_split(orders, nbytes):
    """Rows of many tables at once: each device has those of its words."""
    look_up = jax.vmap(lambda table, ids: table[ids], in_axes=(0, 1), out_axes=1)

    def f(tables, ids):
        return look_up(tables, ids)

    assert sent(f, (f32(8, 512, 32), ints(64, 8)), {"data": orders}) == nbytes


@pytest.mark.parametrize(("chip", "data"), [("v5e", 4), ("h100", 4), ("h200", 8)])
@pytest.mark.parametrize(
    "kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
)
@pytest.mark.parametrize("nbytes", [4, 2**16, 2**28])
@pytest.mark.parametrize("axes", [("data",), ("model",), ("data", "model")])
def test_an_exchange_takes_as_long_as_the_clock_has_it(chip, data, kind, nbytes, axes):
    """Its delay and its bytes, between TPUs, and GPUs of a server and of two."""
    sizes = {"data": data, "model": 2}
    devices = np.arange(2 * data).reshape(data, 2)
    along = {("data",): devices.T, ("model",): devices, ("data", "model"): devices.reshape(1, -1)}
    links, _ = links_of(CHIPS[chip], [], sizes)
    groups = tuple(map(tuple, along[axes].tolist()))
    if kind == "collective-permute":
        pairs = (zip(one, (*one[1:], one[0]), strict=True) for one in groups)
        groups = tuple(itertools.chain.from_iterable(pairs))
    found = Machine(CHIPS[chip], links, sizes).exchange(kind, axes, nbytes)
    assert found == pytest.approx(links.transfer(kind, groups, nbytes, nbytes).seconds, rel=1e-6)
    assert found >= CHIPS[chip].hop


def test_sums_that_are_added_are_sent_once():
    """Two products that are both summed over one axis need one sum of their sum."""

    def f(a, b, c, d):
        return a @ b + c @ d

    args = (f32(64, 32), f32(32, 128), f32(64, 48), f32(48, 128))
    found = sent(f, args, {"data": ["a:1", "c:1"]})
    assert found == pytest.approx(2 * 64 * 128 * F32 * 3 / 4)


def test_an_operand_of_two_products_is_gathered_once():
    """A weight that is used twice is sent once."""

    def f(x, y, w):
        return x @ w, y @ w

    args = (f32(64, 32), f32(128, 32), f32(32, 96))
    found = sent(f, args, {"data": ["x:0", "y:0", "w:0"]})
    assert found == pytest.approx(32 * 96 * F32 * 3 / 4)


def test_two_axes_send_at_once():
    """A gather over both axes is one, of eight devices: seven eighths come from others."""
    orders = {"data": ["a:0", "b:0"], "model": ["a:0", "b:0"]}
    found = sent(jnp.matmul, (f32(64, 32), f32(32, 128)), orders)
    assert found == pytest.approx(32 * 128 * F32 * 7 / 8)


def test_parts_that_are_out_of_order_change_places_first():
    """Where the inner axis stays and the outer one is gathered, parts are moved before."""
    args = (f32(64, 32), f32(32, 128))
    # The weight is split along what is summed over, by `data` and within that by `model`.
    orders = {"data": ["a:0", "a:1"], "model": ["a:1"]}
    plain = {"data": ["a:0"], "model": ["a:1"]}
    more = sent(jnp.matmul, args, orders) - sent(jnp.matmul, args, plain)
    gathered, moved = 32 * 128 * F32 / 2 * 3 / 4, 32 * 128 * F32 / 8
    assert more == pytest.approx(gathered + moved)


def test_columns_of_a_table_are_looked_up_in_parts():
    """Rows of a table whose columns are split are exchanged; the table is not gathered."""

    def f(table, words):
        return jnp.tanh(table[words])

    args = (f32(4096, 64), ints(8, 16))
    found = sent(f, args, {"data": ["words:0", "table:1"]})
    rows = 8 * 16 * 64 * F32
    assert found <= 1.2 * rows / 4 * 3 / 4 + 8 * 16 * 4


def test_a_table_split_by_rows_is_summed():
    """Each device has some of the words; what they find is added up."""

    def f(table, words):
        return table[words]

    found = sent(f, (f32(4096, 64), ints(8, 16)), {"data": ["table:0"]})
    assert found == pytest.approx(2 * 8 * 16 * 64 * F32 * 3 / 4)


def test_what_is_sorted_is_gathered():
    """A sort along a split dimension needs all of it."""
    x = 64 * 32 * F32
    fixed = Fixed.of({0: {"data": 1}})
    assert sent(lambda x: jnp.sort(x, axis=1), (f32(64, 32),), {}, fixed=fixed) == pytest.approx(
        x * 3 / 4
    )
    assert sent(lambda x: jnp.sort(x, axis=0), (f32(64, 32),), {}, fixed=fixed) == pytest.approx(
        x * 3 / 4  # it stays split on the way, and the result is wanted whole
    )


def test_a_loop_sends_as_often_as_it_runs():
    """A weight of each of five layers is gathered once."""

    def f(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    found = sent(f, (f32(5, 32, 32), f32(64, 32)), {"data": ["x:0", "ws:1"]})
    assert found >= 5 * 32 * 32 * F32 * 3 / 4


def test_a_sum_of_a_split_value_is_made_where_its_parts_are():
    """A norm of a split gradient sends one number, and not the gradient."""
    found = sent(lambda x: (x * x).sum(), (f32(64, 32),), {"data": ["x:0"]})
    assert found == pytest.approx(2 * F32 * 3 / 4)


def _inside(x):
    """What a kernel computes of rows that each device has for itself."""
    spec = P("data", None)
    return jax.shard_map(jnp.tanh, in_specs=spec, out_specs=spec, mesh=spmd.current_mesh())(x)


def test_a_shard_map_takes_its_values_where_it_says():
    """Where the layout has them there nothing is sent; else they change places before it."""

    def f(x, w):
        return _inside(x @ w) @ w

    args = (f32(64, 32), f32(32, 32))
    program = Program(function=f, args=args)
    with spmd.make_mesh(MESH):
        found = read(program)
    of = classes(found)
    cost = Estimator(found, sending(**MESH))
    rows = Layout.of({"data": [of["x:0"]], "model": []})
    assert cost(rows).exchange == 0
    # Rows over the other axis: each device needs all of its kernel's rows, and gives them back.
    other = Layout.of({"data": [], "model": [of["x:0"]]})
    assert cost(other).exchange > 0


@pytest.mark.parametrize("inside", [_inside, jnp.tanh], ids=["shard_map", "plain"])
def test_layouts_that_say_the_same_are_pinned_alike(inside):
    """All places of arguments, results and pins, of layouts at random."""
    args = (f32(64, 32), f32(32, 128), f32(128, 16))
    program = Program(function=lambda x, w, v: (inside(x) @ w) @ v, args=args)
    with spmd.make_mesh(MESH):
        found = read(program)
    estimate = Estimator(found, sending(**MESH))
    draw = random.Random(0)
    same = collections.defaultdict(set)
    for _ in range(400):
        orders = {axis: draw.sample([*found.sizes], draw.randint(0, 3)) for axis in MESH}
        layout = Layout.of(orders)
        pins, places = pins_of(found, layout, MESH), entries_of(found, layout, MESH)
        same[estimate.said(layout)].add((pins, places))
    assert 10 < len(same) < 300
    assert {*map(len, same.values())} == {1}


def _by_blocks(x, w):
    """A product with a weight's rows, a block of them after the other."""
    blocks = (x @ w).reshape(64, 8, 16).swapaxes(0, 1)

    def add(total, block):
        return total + jnp.tanh(x) @ block.T.repeat(64, 1), None

    return jax.lax.scan(lambda t, b: add(t, b[:1]), jnp.zeros((64, 64)), blocks)[0]


@pytest.mark.parametrize(
    ("chip", "is_read", "times"),
    [
        ("h100", False, 1),
        ("v5e", False, 1),
        ("cpu", False, 16),  # its compiler leaves sums in loops
        ("h100", True, 16),  # what is added up so far is needed in each turn
    ],
)
def test_what_a_loop_adds_up_is_summed_after_it(chip, is_read, times):
    """The gradient of a weight that all turns have, of rows that are split."""

    def f(x, w):
        def turn(total, x):
            made = x.T @ (x @ w)
            return total + made, jnp.sum(total) if is_read else 0.0

        return jax.lax.scan(turn, jnp.zeros((32, 32)), x)

    on = Machine(CHIPS[chip], sending(**MESH)._links, MESH)
    nbytes = sent(f, (f32(16, 64, 32), f32(32, 32)), {"data": ["x:1"]}, on=on)
    assert nbytes == pytest.approx(times * 2 * 32 * 32 * F32 * 3 / 4)


def test_blocks_of_a_loop_are_gathered_before_it():
    """Columns that are split are gathered once, and not in each turn that takes a part of them."""
    args = (f32(64, 16), f32(16, 128))
    program = Program(function=_by_blocks, args=args)
    found = read(program)
    of = classes(found)
    layout = Layout.of({"data": [of["w:1"]], "model": []})
    cost = Estimator(found, sending(**MESH))(layout)
    assert cost.exchange == pytest.approx(64 * 128 * F32 * 3 / 4)
    ins, outs = entries_of(found, layout, MESH)
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    made = planned(program, mesh, ins, outs, pins_of(found, layout, MESH))
    sent = made.preview().collectives
    assert [(one.kind, one.executions) for one in sent] == [("all-gather", 1)]
    assert made.preview().total.wire_bytes == cost.exchange


@pytest.mark.parametrize(
    ("chip", "dtype", "part", "is_whole"),
    [
        ("v5e", jnp.bfloat16, 128, True),
        ("v5e", jnp.bfloat16, 256, False),
        ("v5e", jnp.float32, 128, False),
        ("tpu7x", jnp.bfloat16, 128, False),
        ("h100", jnp.bfloat16, 128, False),
    ],
)
def test_a_sum_of_odd_parts_is_made_whole_on_most_tpus(chip, dtype, part, is_whole):
    """Of bf16, in parts of 128 columns: twice the bytes of a sum that is scattered."""
    args = (jax.ShapeDtypeStruct((64, 512), dtype), jax.ShapeDtypeStruct((512, 2 * part), dtype))
    on = Machine(CHIPS[chip], sending(**MESH)._links, MESH)
    found = sent(jnp.matmul, args, {"data": ["a:0"], "model": ["a:1", "b:1"]}, on=on)
    scattered = 16 * 2 * part * jnp.dtype(dtype).itemsize / 2
    assert found == pytest.approx(scattered * (1 + is_whole))


def test_devices_that_would_do_the_same_sum_other_parts():
    """Of two parts each is summed by two pairs of four, and then they change places."""
    args = f32(64, 512), f32(512, 256)
    layout = {"model": ["a:1", "b:1"]}
    part = 64 * 128 * F32
    assert sent(jnp.matmul, args, layout) == pytest.approx(part + part)
    # Two devices are too few for four parts: the sum is scattered.
    whole = 64 * 256 * F32
    assert sent(jnp.matmul, args, {"data": ["a:1", "b:1"]}) == pytest.approx(whole * 3 / 4)


def test_a_sum_of_parts_of_rows_and_columns_is_whole_on_tpus():
    """Over both axes; another chip's is scattered."""
    args = f32(64, 512), f32(512, 256)
    layout = {"data": ["a:1", "a:0"], "model": ["a:1", "b:1"]}
    whole = 64 * 256 * F32 * 7 / 8
    tpu7x = Machine(CHIPS["tpu7x"], sending(**MESH)._links, MESH)
    assert sent(jnp.matmul, args, layout) == pytest.approx(whole)
    assert sent(jnp.matmul, args, layout, on=tpu7x) == pytest.approx(2 * whole)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "sizes", "is_beside"),
    [
        ("v5e:4x4", {"data": 4, "model": 4}, True),
        ("v5e:4x8", {"data": 4, "model": 8}, False),
        ("v5e:8x8", {"data": 16, "model": 4}, False),
        ("v5e:8x16", {"data": 16, "model": 8}, False),
        ("v5e:8x16", {"data": 8, "model": 16}, True),
        ("v6e:4x8", {"data": 8, "model": 4}, True),
        ("v5p:4x4x4", {"data": 8, "model": 8}, True),
    ],
)
def test_what_goes_around_lines_of_many_chips_is_waited_for(topology, sizes, is_beside):
    """As libtpu schedules it: parts that it does not start ahead are not hidden."""
    mesh = spmd.topology(topology, sizes)
    chip = CHIPS[topology.split(":")[0]]
    links, _ = links_of(chip, [*mesh.devices.flat], sizes)
    assert Machine(chip, links, sizes).is_beside(("model",)) == is_beside
    specs = P("data", "model"), P(None, "model")
    step = spmd.pjit(
        jnp.matmul, mesh=mesh, in_axis_resources=specs, out_axis_resources=P("data", "model")
    )
    shapes = (2048 * sizes["data"], 4096), (4096, 16_384)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = step.lower(*args).compile().as_text()
    assert ("collective-permute-start(" in text) == is_beside
    assert ("collective-permute(" in text) != is_beside


@needs_libtpu
@pytest.mark.slow
def test_a_product_of_complex_numbers_is_three_of_real_ones_on_tpus():
    """As libtpu makes it; others have one that is made of four."""
    mesh = spmd.topology("v5e:2x2", {"data": 4})
    x = jax.ShapeDtypeStruct((512, 512), jnp.complex64)
    lowered = spmd.pjit(jnp.matmul, mesh=mesh, in_axis_resources=P("data")).lower(x, x)
    real = 2 * 512**3 / 4
    assert spmd.report(lowered.compile()).time.hardware_flops == pytest.approx(3 * real, rel=0.01)
    for name, times in (("v5e", 3), ("h100", 4)):
        assert CHIPS[name].taken(4 * real, {"c64"}) == times * real
        assert CHIPS[name].taken(real, {"f32"}) == CHIPS[name].taken(real, ()) == real


@needs_libtpu
@pytest.mark.few(0)
@pytest.mark.parametrize(
    ("function", "shape"),
    [(jnp.fft.fft, (512, 1024)), (jnp.fft.fft, (256, 500)), (jnp.fft.irfft, (512, 513))],
)
def test_a_fourier_transform_takes_as_long_as_libtpu_counts(function, shape):
    """By factors of its length, or by a whole matrix, which takes most of the time to make."""
    x = jax.ShapeDtypeStruct(shape, jnp.complex64)
    _, found = priced(function, (x,), {"data": ["a:0"]}, on=tpu())
    mesh = spmd.topology("v5e:2x4", MESH)
    lowered = spmd.pjit(function, mesh=mesh, in_axis_resources=P("data")).lower(x)
    compiled = spmd.report(lowered.compile()).time
    assert compiled.seconds / 1.5 < found.seconds < compiled.seconds * 1.5


def test_devices_change_places_as_a_preview_has_it():
    """Both have each device send to the one with its column and row: a mesh that is turned."""
    sizes = {"data": 4, "model": 4}
    mesh = spmd.topology("cpu:16", sizes)
    step = spmd.pjit(
        lambda x, y: spmd.with_sharding_constraint(x.T @ y, P("data")) * 2,
        mesh=mesh,
        in_axis_resources=(P("data"), P("data")),
        out_axis_resources=P("data"),
    )
    lowered = step.lower(f32(64, 512), f32(64, 256))
    _, permute = spmd.preview(lowered, chip="v5e").time.exchanges
    links, _ = links_of(CHIPS["v5e"], [], sizes)
    nbytes = 512 * 256 * F32 / 4
    machine = Machine(CHIPS["v5e"], links, sizes)
    assert machine.trading(("model",), ("data",), nbytes) == pytest.approx(permute.seconds)


# Time


@pytest.mark.parametrize(("dtype", "share"), [(jnp.int8, 0.5), (jnp.int16, 1)])
def test_products_of_types_that_are_twice_as_fast(dtype, share):
    """Large ones of int8 take half as long as of bf16 on a v5e."""

    def compute(dtype):
        x = jax.ShapeDtypeStruct((4096, 4096), dtype)
        return priced(jnp.matmul, (x, x), {}, on=tpu(hbm=1e30))[1].compute

    assert compute(dtype) == pytest.approx(share * compute(jnp.bfloat16))


def test_gathers_go_on_beside_work_where_a_compiler_starts_them_ahead():
    """There a part of them is hidden, and never more than a part of the work."""
    args = (f32(4096, 4096), f32(4096, 4096))
    orders = {"data": ["a:0", "b:0"]}
    for name in ("v5e", "h100", "h200"):
        on = (
            tpu()
            if name == "v5e"
            else Machine(CHIPS[name], links_of(CHIPS[name], [], MESH)[0], MESH)
        )
        _, there = priced(jnp.matmul, args, orders, on=on)
        work = there.compute + there.memory
        assert 0 < there.hidden <= 0.5 * work
        assert there.seconds == pytest.approx(work + there.exchange - there.hidden)
    # libtpu starts no gather ahead for other chips.
    for name in ("v4", "v5p", "v6e"):
        assert priced(jnp.matmul, args, orders, on=tpu(name=name))[1].hidden == 0


@needs_cuda
@pytest.mark.slow
def test_gathers_go_on_beside_work_by_the_compiler_for_gpus():
    """Of a step whose weights are gathered layer by layer, work hides a part of the exchanges."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    mesh = spmd.topology("h200:8", {"data": 8})
    split = NamedSharding(mesh, P("data"))
    weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 4
    x = jax.ShapeDtypeStruct((65_536, 4096), jnp.bfloat16)
    step = jax.jit(jax.grad(loss), in_shardings=split, out_shardings=split)
    time = spmd.report(step.lower(weights, x).compile()).time
    waiting = sum(one.exposed for one in time.exchanges)
    assert 0 < waiting < 0.75 * time.exchange


def test_a_ring_goes_on_beside_its_product():
    """All that is sent counts, and some of it is hidden: no more than its product takes."""

    def f(x, w, v):
        return jnp.tanh(x @ w) @ v

    args = (f32(65_536, 2048), f32(2048, 2048), f32(2048, 16_384))
    links, _ = links_of(CHIPS["v5e"], [], MESH)
    orders = {"data": ["x:0"], "model": ["v:1", "w:1"]}
    hidden = []
    for flops in (CHIPS["v5e"].flops, 10 * CHIPS["v5e"].flops):
        chip = dataclasses.replace(CHIPS["v5e"], flops=flops)
        _, found = priced(f, args, orders, on=Machine(chip, links, MESH))
        ring = 2 * links.transfer("collective-permute", PAIRS, 16_384 * 1024 * F32, 0).seconds
        assert found.exchange == pytest.approx(ring, rel=0.01)
        hidden.append(found.hidden)
        assert 0 < found.hidden <= min(found.exchange, found.compute + found.memory)
    assert hidden[1] < hidden[0]


#: Terms of a product whose sum is faster made first, and of one beside which its parts go around.
_TERMS = [(8192, True), (65_536, False)]


def _gradient(terms):
    """A gradient of which each device keeps rows, with the layout that says so."""
    args = [jax.ShapeDtypeStruct((terms, 2048), jnp.bfloat16)] * 2
    program = Program(function=lambda a, b: jnp.einsum("ki,kj->ij", a, b), args=args)
    found = read(program)
    of = classes(found)
    return program, found, Layout.of({"data": [of["a:0"], of["a:1"]], "model": []})


@pytest.mark.parametrize(("terms", "is_first"), _TERMS)
def test_a_sum_is_made_first_where_its_parts_would_be_waited_for(terms, is_first):
    """By what either takes; pins leave it whole after its product, or have it in parts there."""
    _, found, layout = _gradient(terms)
    links, _ = links_of(CHIPS["v5e"], [], FLAT)
    estimate = Estimator(found, Machine(CHIPS["v5e"], links, FLAT))
    either, first, none = (
        one(layout)
        for one in (
            estimate,
            estimate.as_pinned(sums_first=True),
            estimate.as_pinned(sums_first=False),
        )
    )
    assert (first.seconds < none.seconds) == is_first
    assert either == (first if is_first else none)
    (product,) = (one for one in found.operations if one.flops)
    results = estimate.summed_first(either)
    assert results == ({product.tensors[-1]} if is_first else set())
    assert estimate.summed_first(first) == {product.tensors[-1]}
    assert estimate.summed_first(none) == set()
    (pin,) = Pinned(found).pins(layout, FLAT, Way(), results)
    assert pin.specs[-1] == ((() if is_first else ("data",)), ())


@needs_libtpu
@pytest.mark.few(0)
@pytest.mark.parametrize(("terms", "is_first"), _TERMS)
def test_a_sum_is_made_first_where_libtpu_waits_for_its_parts(terms, is_first):
    """The compiled steps are in the same order."""
    program, found, layout = _gradient(terms)
    mesh = spmd.topology("v5e:2x4", FLAT)
    ins, outs = entries_of(found, layout, FLAT)
    seconds = [
        spmd.report(planned(program, mesh, ins, outs, pins).compile()).time.seconds
        for pins in (Pinned(found).pins(layout, FLAT, Way(whole=whole)) for whole in (True, False))
    ]
    assert (seconds[0] < seconds[1]) == is_first


def _products(count):
    """As many of which each takes a weight that lies split, with the layout that says so."""

    def f(x, w):
        return [jnp.tanh(n * x) @ w for n in range(1, count + 1)]

    args = [jax.ShapeDtypeStruct((rows, 2048), jnp.bfloat16) for rows in (65_536, 2048)]
    program = Program(function=f, args=args)
    found = read(program)
    of = classes(found)
    return program, found, Layout.of({"data": [of["x:0"], of["w:0"]], "model": []})


@pytest.mark.parametrize("count", [1, 2])
def test_weights_go_around_where_one_product_takes_them(count):
    """What two products take is gathered once for both, however it is pinned."""
    _, found, layout = _products(count)
    links, _ = links_of(CHIPS["v5e"], [], FLAT)
    usual = Estimator(found, Machine(CHIPS["v5e"], links, FLAT))
    ahead, around = usual(layout), usual.as_pinned(ahead=False)(layout)
    assert (around == ahead) == (count == 2)
    if count == 1:
        ring = usual.machine.around(("data",), 2048 * 2048 * 2 / 8, 8)
        assert around.exchange == pytest.approx(ring)
        assert around.exchange > ahead.exchange
        assert around.compute >= ahead.compute


@pytest.mark.parametrize(("model", "wanted"), [("f", [1, 1]), ("fd", [1, 0])])
def test_what_a_product_wants_of_a_weight(model, wanted):
    """The dimension over `model`, forward and backward, where it splits hidden widths, or both.

    Forward its columns are the result's. Backward the other operand says the same; but where the
    result lies in columns, these are the weight's rows.
    """

    def f(x, w, y):
        return x @ w, jax.lax.dot_general(y, w, (((1,), (1,)), ((), ())))

    found = read(Program(function=f, args=(f32(64, 32), f32(32, 128), f32(64, 128))))
    of = classes(found)
    letters = {"f": of["w:1"], "d": of["w:0"]}
    orders = {"data": [of["x:0"], of["y:0"]], "model": [*map(letters.get, model)]}
    layout = Layout.of(orders)
    places = places_of(found.tensors, layout, MESH)
    asked = []
    for one in found.operations:
        if one.flops:
            own = [places[i] for i in one.tensors]
            demand = Demand(one, layout, MESH, own, [1.0] * len(own))
            asked.append(dict(demand.asked(1, first=False)))
    assert asked == [{"model": d} for d in wanted]


@needs_libtpu
@pytest.mark.few(0)
@pytest.mark.parametrize("count", [1, 2])
def test_libtpu_sends_weights_around_where_one_product_takes_them(count):
    """Else, and where they are put ahead, it gathers them."""
    program, found, layout = _products(count)
    mesh = spmd.topology("v5e:2x4", FLAT)
    ins, outs = entries_of(found, layout, FLAT)
    kinds = []
    for ahead in (True, False):
        pins = Pinned(found).pins(layout, FLAT, Way(ahead=ahead))
        report = spmd.report(planned(program, mesh, ins, outs, pins).compile())
        kinds.append({one.kind for one in report.collectives})
    assert kinds == [{"all-gather"}, {"collective-permute" if count == 1 else "all-gather"}]


def test_sums_of_convolutions_are_not_made_first():
    """What they take so is not known."""

    def loss(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    kernel, x = (
        jax.ShapeDtypeStruct(d, jnp.bfloat16) for d in ((1, 1, 128, 128), (256, 64, 64, 128))
    )
    found = read(Program(function=jax.grad(loss), args=(kernel, x)))
    of = classes(found)
    layout = Layout.of({"data": [of["x:0"], of["kernel:2"]], "model": []})
    estimate = Estimator(found, tpu(FLAT))
    assert estimate(layout).exchange > 0
    for one in (estimate, estimate.as_pinned(sums_first=True)):
        assert one.summed_first(one(layout)) == set()


def test_on_a_tpu7x_no_sum_is_made_first():
    """Shardy places values there, and makes one exchange of both."""
    _, found, layout = _gradient(65_536)
    links, _ = links_of(CHIPS["tpu7x"], [], FLAT)
    estimate = Estimator(found, Machine(CHIPS["tpu7x"], links, FLAT)).as_pinned(sums_first=True)
    cost = estimate(layout)
    assert cost.hidden > 0
    assert estimate.summed_first(cost) == set()


SPLIT = {"data": ["w:1", "x:0"]}


def rows_around(x, v, w):
    """A device has some of the rows, and some of the columns: the rows go around."""
    return jnp.tanh(x @ v) @ w


@pytest.mark.parametrize(
    ("sizes", "goes_around"),
    [(FLAT, True), ({"data": 32}, True), ({"data": 64}, False), (MESH, False)],
)
def test_nothing_goes_around_many_devices_or_where_they_do_the_same(sizes, goes_around):
    """More than 32, or those along an axis that nothing is split over."""
    args = (f32(4096, 8), f32(8, 1024), f32(1024, 131_072))
    found = priced(rows_around, args, SPLIT, on=tpu(sizes))[1]
    rows = 4096 * 1024 * F32
    sent = rows if goes_around else rows * (1 - 1 / sizes["data"])
    assert found.exchange == pytest.approx(sent, rel=0.01)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "goes_around"), [(FLAT, True), (MESH, False)])
def test_nothing_goes_around_in_what_libtpu_makes_where_devices_do_the_same(sizes, goes_around):
    """It gathers the rows in one."""
    shapes = (4096, 8), (8, 1024), (1024, 131_072)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    specs = P("data"), P(), P(None, "data")
    step = spmd.pjit(
        rows_around,
        mesh=spmd.topology("v5e:2x4", sizes),
        in_axis_resources=specs,
        out_axis_resources=specs[-1],
    )
    kinds = {one.kind for one in spmd.report(step.lower(*args)).collectives}
    assert kinds == {"collective-permute" if goes_around else "all-gather"}


def test_a_weight_is_gathered_ahead_of_its_product():
    """It does not go around: one gather is sent, however many rows there are."""
    args = (f32(65_536, 2048), f32(2048, 2048))
    links, _ = links_of(CHIPS["v5e"], [], MESH)
    on = Machine(CHIPS["v5e"], links, MESH)
    _, found = priced(jnp.matmul, args, {"data": ["a:0", "b:0"]}, on=on)
    assert found.exchange == pytest.approx(on.exchange("all-gather", ("data",), 2048 * 2048 * F32))


@pytest.mark.parametrize(
    ("devices", "columns", "kind"),
    [(64, 2048, "all-reduce"), (64, 2304, "all-gather"), (32, 2048, "all-gather")],
)
def test_a_small_weight_is_gathered_by_a_sum_over_many_devices(devices, columns, kind):
    """And not ahead of its product."""
    sizes = {"data": devices}
    links, _ = links_of(CHIPS["v5e"], [], sizes)
    on = Machine(CHIPS["v5e"], links, sizes)
    args = (f32(65_536, 2048), f32(2048, columns))
    _, found = priced(jnp.matmul, args, {"data": ["a:0", "b:0"]}, on=on)
    assert found.exchange == pytest.approx(on.exchange(kind, ("data",), 2048 * columns * F32))
    assert (found.hidden > 0) == (kind == "all-gather")


def test_a_product_that_sums_over_little_takes_as_long_as_its_results():
    """Over 64 as over 128 it gives a result a time; over 2,048 it takes what its FLOPs take."""
    on = tpu(hbm=1e18, vmem=1e18)
    times = {
        n: priced(jnp.matmul, (f32(2048, n), f32(n, 2048)), {}, on=on)[1].compute
        for n in (64, 128, 2048)
    }
    cycles = times[64] * CHIPS["v5e"].clock
    assert times[64] == times[128]
    assert cycles == pytest.approx(10 * 2048 * 2048 / 1024)
    assert times[2048] == pytest.approx(2 * 2048**3 / CHIPS["v5e"].flops, rel=0.2)


def _steps(count, elements):
    """Seconds in which the vector unit of a v5e takes so many steps for each element."""
    return count * elements / (1.5 * 1024 * CHIPS["v5e"].clock)


def test_elementwise_work_goes_on_beside_its_product():
    """Both together take as long as the longer of the two."""
    on = tpu(hbm=1e18, vmem=1e18)
    args = (f32(4096, 512), f32(512, 2048))
    alone = priced(jnp.matmul, args, {}, on=on)[1].compute
    assert priced(lambda a, b: jnp.abs(a @ b), args, {}, on=on)[1].compute == alone

    def f(a, b):
        y = a @ b
        for _ in range(50):
            y = jnp.tanh(y)
        return y

    assert priced(f, args, {}, on=on)[1].compute == pytest.approx(_steps(50 * 4, 4096 * 2048))
    # What prepares an operand is a part of the product too.
    before = priced(lambda a, b: jnp.abs(a) @ b, args, {}, on=on)[1].compute
    assert before == alone


@pytest.mark.parametrize("inner", [512, 1024])
def test_what_needs_a_sum_and_is_returned_goes_over_the_result_once_more(inner):
    """It reads the result again, of a large product as of another; its steps go on beside that."""
    args = (f32(16384, inner), f32(inner, 2048))

    def twice(a, b):
        y = a @ b
        return y * jnp.sum(y, axis=1, keepdims=True)

    fast, slow = tpu(hbm=1e18, vmem=1e18), tpu(hbm=1e9)
    once, more = (
        [priced(f, args, {}, on=on)[1] for on in (fast, slow)]
        for f in (lambda a, b: 2.0 * (a @ b), twice)
    )
    assert [one.compute for one in once] == [one.compute for one in more]
    again = 16384 * 2048 * F32 / (0.83 * 1e9)
    assert more[1].memory - once[1].memory == pytest.approx(again, rel=0.01)


def _attended(q, k, v):
    """Of a head each: rows of 4,096 words, whose scores are larger than vector memory."""
    scores = jnp.einsum("htd,hsd->hts", q, k)
    kept = jnp.tril(jnp.ones(scores.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(kept, 0.1 * scores.astype(jnp.float32), -1e9), axis=-1)
    return jnp.einsum("hts,hsd->htd", weights.astype(q.dtype), v)


def test_a_product_reads_what_its_operand_is_made_of():
    """The softmax is made again where it is used: scores are written and read once, in float32.

    So libtpu does: of the gradient of GPT-2 small, each of these takes 4.0 to 4.4 ms on a v5e, by
    this rule 3.9 to 4.3.
    """
    heads, words, width = 4, 4096, 64
    one = jax.ShapeDtypeStruct((heads, words, width), jnp.bfloat16)
    found = priced(_attended, (one, one, one), {}, on=tpu(hbm=1e9))[1]
    scores, given = heads * words * words * F32, heads * words * width * 2
    written = (scores + 2 * given) / (0.83 * 1e9)
    fetched = scores / (0.75 * 1e9)
    assert found.memory + found.compute == pytest.approx(written + fetched, rel=0.02)


def test_what_is_stored_after_a_sum_takes_a_pass():
    """The gradient of scores has two users, is stored, and is made of scores and their gradient."""
    heads, words, width = 4, 4096, 64
    one = jax.ShapeDtypeStruct((heads, words, width), jnp.bfloat16)

    def loss(q, k, v):
        return jnp.sum(_attended(q, k, v).astype(jnp.float32))

    found = read(Program(function=jax.grad(loss, (0, 1, 2)), args=(one, one, one), options={}))
    passes = Estimator(found, tpu(), None).reads.passes
    scores = heads * words * words
    large = sorted(found.tensors[i].nbytes for i, _ in passes if found.tensors[i].nbytes >= scores)
    assert large == [2 * scores, 2 * scores, 4 * scores]


def test_an_update_by_a_norm_takes_no_pass():
    """It is as long as its bytes take; the sum that scales it is one number."""

    def step(w, x):
        slope = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w - 0.1 * slope / jnp.sqrt(jnp.sum(slope * slope))

    found = read(Program(function=step, args=(f32(512, 256), f32(64, 512)), options={}))
    assert Estimator(found, tpu(), None).reads.passes == []


@pytest.mark.parametrize(("rows", "inner", "columns"), [(128, 8192, 8192), (512, 1024, 65_536)])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_results_wait_for_an_operand_that_has_no_room(rows, inner, columns, is_gathered):
    """Weights of 128 MiB are read, and then results are given: beside each other they are not.

    libtpu's cycles on a v5e are 374,000 and 892,000 for these.
    """
    parts = MESH["data"] if is_gathered else 1
    shapes = (parts * rows, inner), (inner, columns)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    orders = {"data": ["a:0", "b:0"]} if is_gathered else {}
    found = priced(jnp.matmul, args, orders, on=tpu())[1]
    cycles = found.compute * CHIPS["v5e"].clock * CHIPS["v5e"].sustained
    reading = 2 * inner * columns / (0.75 * CHIPS["v5e"].hbm) * CHIPS["v5e"].clock
    results = 14.5 * rows * columns / 1024
    assert cycles == pytest.approx(reading + results, rel=0.03)
    told = {8192: 374_000, 1024: 892_000}[inner]
    assert cycles == pytest.approx(told, rel=0.15)


@pytest.mark.parametrize(("spec", "copies"), [("w:1", 0), ("w:2", 2)])
def test_gathered_matrices_of_a_batch_are_turned(spec, copies):
    """Parts of the last dimension are copied to their places; others lie where a product reads."""
    experts, rows, width = 16, 64, 2048
    shapes = (experts, rows, width), (experts, width, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def f(x, w):
        return jnp.einsum("ecm,emf->ecf", x, w)

    on = tpu(hbm=1e9)
    found = priced(f, args, {"data": ["x:1", spec]}, on=on)[1]
    whole = experts * width * width * 2 / (0.83 * 1e9)
    fetched = found.compute + found.memory - copies * whole
    assert fetched == pytest.approx(whole * 0.83 / 0.75, rel=0.05)


def test_parts_of_a_ring_read_the_other_operand_again():
    """A gradient that is scattered by columns reads all rows for each pair of them."""
    rows, inner, columns = 65_536, 1024, 8192
    args = [jax.ShapeDtypeStruct(d, jnp.bfloat16) for d in ((rows, inner), (rows, columns))]
    on = tpu(FLAT, hbm=1e9)
    whole, parts = (
        priced(
            lambda a, b: jnp.einsum("ki,kj->ij", a, b),
            args,
            {"data": ["a:0", *more]},
            fixed=None,
            on=on,
        )[1].memory
        for more in ([], ["a:1"])
    )
    large = rows // FLAT["data"] * columns * 2
    assert parts > whole
    again = FLAT["data"] / 2 - 1
    assert parts - whole == pytest.approx(again * large / (0.83 * 1e9), rel=0.05)


def test_kernels_take_half_of_the_peak():
    """What is written by hand is on each device, whatever a layout says."""
    args = (f32(64, 64), f32(64, 64))
    found = read(Program(function=jnp.matmul, args=args, options={}))
    on, layout = tpu(), Layout.of({})
    more = dataclasses.replace(found, kernels=10**12)
    without, with_it = (Estimator(one, on, None)(layout) for one in (found, more))
    seconds = 10**12 / (0.5 * CHIPS["v5e"].flops)
    assert with_it.compute - without.compute == pytest.approx(seconds, rel=0.01)
    assert with_it.seconds > without.seconds


def test_the_smallest_products_take_a_time():
    """Of TPUs, three quarters of a microsecond."""
    args = (f32(8, 8), f32(8, 8))
    assert priced(jnp.matmul, args, {}, on=tpu(hbm=1e18))[1].compute == 0.75e-6
    assert priced(jnp.matmul, args, {}, on=tpu(name="h100", multipliers=0))[1].compute < 1e-9


def test_two_cores_have_two_vector_units():
    """Work on elements of a product takes half of the time on a chip that has them twice."""

    def f(a, b):
        return jnp.exp(a @ b)

    one, two = (
        priced(f, (f32(2048, 64), f32(64, 2048)), {}, on=tpu(hbm=1e18, vmem=1e18, cores=cores))[1]
        for cores in (1, 2)
    )
    assert one.compute == pytest.approx(2 * two.compute)


def test_sums_that_no_product_waits_for_have_one_delay():
    """The gradients of two weights are one message; a sum between two products is another."""

    def f(a, b, x):
        return jax.grad(lambda a, b: jnp.sum(jnp.tanh(jnp.tanh(x @ a) @ b)), (0, 1))(a, b)

    args = (f32(64, 64), f32(64, 64), f32(512, 64))
    links, _ = links_of(CHIPS["v5e"], [], MESH)
    on = Machine(CHIPS["v5e"], links, MESH)
    delay = on.delay("all-reduce", ("data",))
    assert delay > 0
    _, found = priced(f, args, {"data": ["x:0"]}, on=on)
    least = 2 * on.exchange("all-reduce", ("data",), 64 * 64 * F32) - delay
    assert found.exchange == pytest.approx(least, rel=0.01)
    # Each device has a part of what is summed over: the first sum comes before the second product.
    _, found = priced(lambda a, b, x: jnp.tanh(x @ a) @ b, args, {"data": ["x:1", "a:1"]}, on=on)
    assert found.exchange > 1.5 * delay  # parts of the second sum may go around a ring


def test_narrow_products_leave_units_empty():
    """Eight rows take as long as one, since the units take eight at a time."""
    on = tpu(hbm=1e18, vmem=1e18)
    one, eight, sixteen = (
        priced(jnp.matmul, (f32(n, 8192), f32(8192, 8192)), {}, on=on)[1].compute
        for n in (1, 8, 16)
    )
    assert one == pytest.approx(eight)
    assert sixteen == pytest.approx(2 * eight)


def test_the_optimizer_takes_what_its_bytes_take():
    """Elementwise work alone reads its arguments and writes its results, and no more."""

    def f(p, m):
        m = 0.9 * m + 0.1 * p
        return p - m * m, m

    args = (f32(4096, 2048),) * 2
    _, cost = priced(f, args, {}, on=tpu(hbm=1e9))
    nbytes = 4 * 4096 * 2048 * F32
    assert cost.memory == pytest.approx(nbytes / (0.83 * 1e9), rel=0.01)


@pytest.mark.parametrize(("chip", "left"), [("v5e", 0.55), ("v5p", 1.0)])
def test_small_moments_are_copied_beside_other_work(chip, left):
    """On a v5e: they come to vector memory ahead of their update, and leave it behind that."""

    def f(p, m):
        return p - 0.1 * m

    args = (f32(1024, 1024),) * 2
    on = Machine(dataclasses.replace(CHIPS[chip], hbm=1e9), sending(**MESH)._links, MESH)
    nbytes = 3 * 1024 * 1024 * F32
    wanted = left * nbytes / (0.83 * 1e9)
    assert priced(f, args, {}, on=on)[1].memory == pytest.approx(wanted, rel=0.01)


def test_what_is_used_at_once_may_be_larger_in_vector_memory():
    """Up to 64 MiB, where what is needed five products later has 16; no more than its room."""

    def at_once(x, a):
        return (jnp.tanh(x @ a) @ a).sum()

    def later(x, a):
        y = jnp.tanh(x @ a)
        z = y[:8]
        for _ in range(5):
            z = jnp.tanh(z @ a)
        return (y @ a).sum() + z.sum()

    def moved(f, rows, products):
        """Elements that go through main memory, without those of the arguments."""
        args = (f32(rows, 2048), f32(2048, 2048))
        found = priced(f, args, {}, on=tpu(hbm=1.0, multipliers=0))[1].memory
        return 0.83 * found / F32 - rows * 2048 - products * 2048 * 2048

    size = 6144 * 2048
    assert moved(at_once, 6144, 2) == pytest.approx(0, abs=1e-3 * size)
    # What is needed later is written and read.
    assert moved(later, 6144, 7) == pytest.approx(2 * size, rel=1e-3)
    # Both results are too large: they are written, and the first one is read.
    assert moved(at_once, 12288, 2) == pytest.approx(3 * 2 * size, rel=1e-3)


def convolved(x, w):
    """A convolution of images; of each channel by itself where the kernel has one for each."""
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1] // w.shape[2],
    )  # fmt: skip


def test_a_window_is_a_part_of_what_is_summed():
    """3 x 3 x 104 terms take as long as 1,024 do, and not as 9 times 128."""
    args = (f32(8, 32, 32, 104), f32(3, 3, 104, 256))
    chip = tpu().chip
    # At the edges a part of the window is outside.
    flops = 2 * 8 * (32 * 3 - 2) ** 2 * 104 * 256
    seconds = flops / (chip.product_share * chip.kept)
    assert priced(convolved, args, {}, on=tpu())[1].compute == pytest.approx(
        seconds * 1024 / 936, rel=1e-3
    )


def test_channels_by_themselves_are_for_vector_units():
    """A multiplication and an addition are a step of theirs: matrix units would have one column."""
    args = (f32(8, 32, 32, 256), f32(7, 7, 1, 256))
    steps = 8 * 256 * (32 * 7 - 2 * (3 + 2 + 1)) ** 2
    found = priced(convolved, args, {}, on=tpu())[1].compute
    assert found == pytest.approx(_steps(1, steps), rel=1e-3)
    grad = jax.grad(lambda w, x: convolved(x, w).sum())
    found = priced(grad, args[::-1], {}, on=tpu())[1].compute
    assert found == pytest.approx(_steps(1, steps), rel=1e-3)


def test_the_best_of_each_row_are_found_in_one_pass():
    """And lie where their row does: rows that are split are read by their device alone."""
    rows, width, taken = 65536, 2048, 8
    args, on = (f32(rows, width),), tpu(FLAT, hbm=1e9)
    for orders, parts in (({}, 1), ({"data": ["x:0"]}, 8)):
        found, cost = priced(lambda x: jax.lax.top_k(x, taken), args, orders, on=on)
        assert len({found.tensors[i].classes[0] for i in (0, -1)}) == 1
        nbytes = rows * (width + 2 * taken) * F32 / parts
        assert cost.seconds == pytest.approx(nbytes / (0.83 * 1e9), rel=0.02)


WITHOUT_SUMS = [
    ("btd,btd->btd", lambda x, y: x * y, (64, 2048, 256), (64, 2048, 256)),
    ("bt,btd->btd", lambda x, y: x[..., None] * y, (64, 2048), (64, 2048, 256)),
    ("bi,bj->bij", lambda x, y: x[:, :, None] * y[:, None], (4096, 64), (4096, 128)),
    ("i,j->ij", lambda x, y: x[:, None] * y[None], (8192,), (4096,)),
]


@pytest.mark.parametrize(("spelled", "multiplied", "x", "y"), WITHOUT_SUMS)
def test_a_product_that_adds_nothing_up_is_a_multiplication(spelled, multiplied, x, y):
    """It has no work for matrix units, and its bytes decide what it takes."""
    args = (f32(*x), f32(*y))
    found, cost = priced(lambda x, y: jnp.einsum(spelled, x, y), args, {}, on=tpu(hbm=1e9))
    assert not any(one.flops for one in found.operations)
    nbytes = (math.prod(x) + math.prod(y)) * F32 + found.tensors[-1].nbytes
    assert cost.seconds == pytest.approx(nbytes / (0.83 * 1e9), rel=0.02)
    wanted = priced(multiplied, args, {}, on=tpu(hbm=1e9))[1]
    assert cost.seconds == pytest.approx(wanted.seconds, rel=0.02)


@pytest.mark.parametrize(
    ("spelled", "x", "y", "steps"),
    [
        # One element for each of a batch, and on each device one term of a sum.
        ("btd,btd->bt", (64, 2048, 256), (64, 2048, 256), 64 * 2048 * 256 / 8),
        ("bi,bj->ij", (8, 4096), (8, 8192), 4096 * 8192),
    ],
)
def test_products_of_vectors_are_for_vector_units(spelled, x, y, steps):
    """A multiplication and an addition are a step, and matrix units have nothing to give."""
    args, on = (f32(*x), f32(*y)), tpu(FLAT, hbm=1e18, vmem=1e18)
    _, cost = priced(lambda x, y: jnp.einsum(spelled, x, y), args, {"data": ["x:0"]}, on=on)
    assert cost.compute == pytest.approx(_steps(1, steps), rel=1e-3)


@needs_libtpu
@pytest.mark.few(0)
@pytest.mark.parametrize(
    ("spelled", "x", "y"),
    [
        ("btd,btd->btd", (8192, 64, 512), (8192, 64, 512)),
        ("btd,btd->bt", (8192, 64, 512), (8192, 64, 512)),
        ("bi,bj->bij", (65536, 64), (65536, 128)),
    ],
)
def test_libtpu_multiplies_vectors_as_fast_as_they_are_read(spelled, x, y):
    """Which is what is predicted."""
    args = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (x, y))
    options = {"topology": "v5e:2x4", "axes": ("data",), "top": 1, "cache": False}
    found = spmd.plan(lambda x, y: jnp.einsum(spelled, x, y), *args, progress=False, **options)
    assert found.seconds == pytest.approx(found.predicted, rel=0.05)


def test_slices_of_what_is_in_main_memory_are_read_there():
    """A loop reads a weight of each layer from the stack, however small the weight is."""

    def f(x, stack):
        return jax.lax.scan(lambda y, w: (y @ w, None), x, stack)[0].sum()

    layers, width = 64, 512
    args = (f32(8, width), f32(layers, width, width))
    on = tpu(hbm=1e9, vmem=1e12)
    weights = layers * width * width * F32 / (0.83 * 1e9)
    assert priced(f, args, {}, on=on)[1].memory == pytest.approx(weights, rel=0.01)


def _running(xs):
    """Elementwise work on what a loop takes of one stack and puts into another."""
    return jax.lax.scan(lambda y, x: (y + x, jnp.tanh(y + x)), xs[0], xs)[1]


def _multiplied(x, w):
    """What a product makes in each turn of a loop, as a stack."""
    return jax.lax.scan(lambda y, _: (jnp.tanh(y @ w),) * 2, x, None, length=32)[1]


def _multiplied_again(x, w):
    """The same, where one more product takes the whole stack."""
    return _multiplied(x, w) @ w[:, :8]


STACK = 32 * 8192 * 512
STACKS = [
    # It is read and written, each turn one slice, though these would be in vector memory.
    (_running, (f32(32, 8192, 512),), 2, 1e-3),
    # It is written, and not once more as what is returned.
    (_multiplied, (f32(8192, 512), f32(512, 512)), 1, 0.01),
    # How long that product reads it is a part of the product's own time.
    (_multiplied_again, (f32(8192, 512), f32(512, 512)), 1, 0.02),
]


@pytest.mark.parametrize(("function", "args", "times", "rel"), STACKS)
def test_a_stack_that_a_loop_puts_together_is_written_once(function, args, times, rel):
    """As many bytes go through main memory as are counted by hand."""
    found = priced(function, args, {}, on=tpu(hbm=1.0))[1]
    assert found.memory == pytest.approx(times * STACK * F32 / 0.83, rel=rel)


@needs_libtpu
@pytest.mark.slow
def test_libtpu_reads_and_writes_such_a_stack_once():
    """As it is predicted."""
    xs = jax.ShapeDtypeStruct((32, 65536, 512), jnp.bfloat16)
    options = {"topology": "v5e:2x4", "axes": ("data",), "top": 1, "cache": False}
    found = spmd.plan(_running, xs, progress=False, **options)
    assert found.seconds == pytest.approx(found.predicted, rel=0.05)


def test_products_of_a_v5p_are_fed_from_main_memory():
    """What lies between them is in main memory, each has to begin, and its bytes take longer."""

    def f(x, a, b):
        return jnp.sum(x @ a @ b)

    args = (f32(512, 512), f32(512, 512), f32(512, 512))
    matrix = 512 * 512 * F32
    slow = {"hbm": 1e9, "vmem": 1e12}
    _, near = priced(f, args, {}, on=tpu(**slow))
    _, far = priced(f, args, {}, on=tpu(name="v5p", **slow))
    assert near.memory == pytest.approx(3 * matrix / (0.83 * 1e9), rel=1e-4)
    assert far.memory == pytest.approx(2 * 1.7e-6 + 6 * matrix / (0.62 * 1e9), rel=1e-4)
    code = 2 * tpu().code(2 * 512**3)
    assert near.peak - code == pytest.approx(3 * matrix, rel=1e-4)
    assert far.peak - code == pytest.approx(5 * matrix, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype", "pops"),
    [
        ("v4", jnp.float32, 10),
        ("v5e", jnp.bfloat16, 14.5),
        ("v5p", jnp.float32, 10),
        ("v5p", jnp.bfloat16, 11.5),
        ("v6e", jnp.float32, 2.3),
        ("tpu7x", jnp.bfloat16, 4.1),
    ],
)
def test_results_of_a_product_by_chip(name, dtype, pops):
    """Matrix units of each chip give the results of a product that sums over little in a time.

    Some take longer where they are packed.
    """
    on = tpu(name=name, hbm=1e18, vmem=1e18)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((2048, 8), (8, 2048))]
    found = priced(jnp.matmul, args, {}, on=on)[1].compute
    began = {"v5p": 1.7e-6, "tpu7x": 0.9e-6}.get(name, 0.0)  # the operands come from main memory
    assert (found - began) * CHIPS["v5e"].clock == pytest.approx(pops * 2048 * 2048 / 1024)


def test_narrow_results_take_whole_rows():
    """Scores of 32 words fill a quarter of a unit's lanes, and take as long as those of 128 do."""
    on = tpu(hbm=1e18, vmem=1e18)

    def scores(q, k):
        return jnp.einsum("htd,hsd->hts", q, k)

    narrow, wide = (
        priced(scores, (f32(4096, 32, 16), f32(4096, words, 16)), {}, on=on)[1].compute
        for words in (32, 128)
    )
    assert narrow == wide
    assert wide * CHIPS["v5e"].clock == pytest.approx(10 * 4096 * 32 * 128 / 1024)


def flattened(w, x):
    """Heads are one dimension again before they are projected."""
    heads = jnp.einsum("bsd,dhk->bshk", x, w["q"])
    return heads.reshape(*x.shape[:2], -1) @ w["o"]


def test_sums_of_merged_dimensions_have_the_shapes_of_values(monkeypatch):
    """Whatever a layout splits: the parts of a sum, and the bytes of its elements."""
    asked, ours = [], product.is_left_whole

    def is_left_whole(part, kept, itemsize, chip):
        asked.append((math.prod(part) * math.prod(kept.values()), itemsize))
        return ours(part, kept, itemsize, chip)

    monkeypatch.setattr(product, "is_left_whole", is_left_whole)
    args = {"q": f32(32, 12, 64), "o": f32(768, 32)}, f32(8, 256, 32)
    found = read(Program(function=flattened, args=args))
    estimate = Estimator(found, tpu())
    for pair in itertools.permutations(found.classes, 2):
        estimate(Layout.of({axis: [c] for axis, c in zip(MESH, pair, strict=True)}))
        estimate(Layout.of({"data": [*pair], "model": []}))
    assert {itemsize for _, itemsize in asked} == {4}
    whole = {math.prod(one.shape) for one in found.tensors}
    assert {n for n, _ in asked} <= {n // parts for n in whole for parts in (1, 2, 4)}
