"""What finds no room in vector memory beside an argument that is fetched first, counted by hand."""

import functools

from hardware import needs_libtpu
import jax
from jax import lax
import jax.numpy as jnp
from planned_programs import FLAT, MESH, classes, read
import pytest

import spmd
from spmd import P
from spmd.inspection.compile.timed import links_of
from spmd.inspection.timing.chips import CHIPS
from spmd.planner.cost.estimate import Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.program.layout import Layout
from spmd.planner.verify import Program

MIB = 2**20
LAYERS, TEXTS, WIDTH = 3, 32, 1024
#: Room for 64 MiB beside one of 32 MiB, as `Machine` has it for a v5e.
KEYS = 64 * MIB // (WIDTH * 2)


def decode(cache, x, words):
    """A word is written into each layer of a cache, and all of the layer is read; then logits."""

    def layer(carry, number):
        x, cache = carry
        cache = lax.dynamic_update_slice(cache, x[None, :1], (number, 0, 0))
        scores = x @ lax.dynamic_index_in_dim(cache, number, keepdims=False).T
        return (jnp.tanh(x + scores[:, :1]), cache), None

    (x, cache), _ = lax.scan(layer, (x, cache), jnp.arange(LAYERS))
    return cache, jnp.tanh(x) @ words


def read_only(cache, x, words):
    """The same of a cache in which nothing is written."""

    def layer(x, keys):
        return jnp.tanh(x + (x @ keys.T)[:, :1]), None

    x, _ = lax.scan(layer, x, cache)
    return cache, jnp.tanh(x) @ words


def first(cache, x, words):
    """The same where the argument is used before the loop."""
    cache, _ = decode(cache, x + (x @ words)[:, :1], jnp.zeros((WIDTH, 1), x.dtype))
    return cache


def attend(cache, x, keep=lambda x: x):
    """A word is written into the keys and values of each layer, which then look at all of them."""

    def layer(carry, number):
        x, cache = carry
        start = number, 0, 0, 0
        cache = {n: lax.dynamic_update_slice(one, x[None, :1], start) for n, one in cache.items()}
        k, v = (lax.dynamic_index_in_dim(cache[n], number, keepdims=False) for n in "kv")
        scores = jnp.einsum("thd,khd->thk", x, k)
        scores = jnp.where(jnp.arange(k.shape[0]) <= number, scores, 0)
        return (keep(jnp.tanh(jnp.einsum("thk,khd->thd", scores, v))), cache), None

    (x, cache), _ = lax.scan(layer, (x, cache), jnp.arange(LAYERS))
    return cache, x


def bf16(*dims):
    """The description of an array."""
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16)


def args(keys=KEYS, words=64):
    """Of a cache of 64 MiB a layer, and of a matrix of so many MiB."""
    return bf16(LAYERS, keys, WIDTH), bf16(TEXTS, WIDTH), bf16(WIDTH, words * MIB // (WIDTH * 2))


def keys_and_values(nbytes):
    """Of as many bytes a layer, in parts of four devices, and of words that look at them."""
    shape = LAYERS, 4 * nbytes // (WIDTH * 2), 8, WIDTH // 8
    return dict.fromkeys("kv", bf16(*shape)), bf16(TEXTS, 8, WIDTH // 8)


def seconds_more(function, args, orders=None, chip="v5e", sizes=MESH):
    """Of main memory, by what finds no room in vector memory."""
    graph = read(Program(function=function, args=args, options={"donate_argnums": 0}))
    of = classes(graph)
    layout = Layout.of({axis: [of[one] for one in (orders or {}).get(axis, ())] for axis in MESH})
    links, _ = links_of(CHIPS[chip], [], sizes)
    found, without = (Estimator(graph, Machine(CHIPS[chip], links, sizes)) for _ in range(2))
    without.prefetch.slices = []
    return found(layout).memory - without(layout).memory


def twice(nbytes):
    """Seconds in which layers of so many bytes are written and read again."""
    return 2 * LAYERS * nbytes / (0.83 * CHIPS["v5e"].hbm)


def test_a_layer_of_a_cache_beside_the_matrix_that_comes_after_it():
    """64 MiB beside 64 find no room: the layer is written to main memory and read again."""
    assert seconds_more(decode, args()) == pytest.approx(twice(64 * MIB))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (decode, args(words=16)),  # both fit
        (decode, args(words=256)),  # the matrix does not fit by itself, and is not fetched
        (decode, args(keys=KEYS // 8, words=80)),  # small layers are in vector memory
        (first, args()),  # the matrix is used before the loop
        (read_only, args()),  # a product reads the layer in main memory
    ],
)  # fmt: skip
def test_what_finds_room(function, args):
    """It is where products read it, and nothing is added."""
    assert seconds_more(function, args) == 0


def test_a_layer_that_is_larger_than_vector_memory():
    """No argument has to be there."""
    assert seconds_more(decode, args(2 * KEYS, 256)) == pytest.approx(twice(128 * MIB))


@pytest.mark.parametrize("chip", ["v5p", "tpu7x"])
def test_chips_whose_vector_memory_has_small_slices_alone(chip):
    """There the layer goes through main memory, whatever else is fetched first."""
    taken = 2 * LAYERS * 64 * MIB / (0.83 * CHIPS[chip].hbm)
    for words in 16, 256:
        assert seconds_more(decode, args(words=words), chip=chip) == pytest.approx(taken)
    assert seconds_more(decode, args(keys=KEYS // 8, words=80), chip=chip) == 0


def test_shares_of_a_device_count():
    """A matrix whose half is on a device is fetched; one that is gathered first is not."""
    columns = {"model": ["words:1"]}
    assert seconds_more(decode, args(words=256), columns) == 0
    assert seconds_more(decode, args(words=128), columns) == pytest.approx(twice(64 * MIB))
    gathered = {"data": ["x:0", "words:1"]}
    assert seconds_more(decode, args(words=256), gathered) == 0


def test_a_product_in_parts_reads_its_matrix_in_a_loop_of_its_own():
    """Such a matrix is not fetched first. Words go around where they take the columns' place."""
    around = {"data": ["words:1", "x:0"]}
    assert seconds_more(decode, args(words=512), around, sizes=FLAT) == 0
    # Devices along an axis that nothing is split over do the same: the words are gathered.
    assert seconds_more(decode, args(words=256), around) == pytest.approx(twice(64 * MIB))
    # The columns are split over both axes, the words over one: these are gathered.
    both = {"data": ["words:1", "x:0"], "model": ["words:1"]}
    assert seconds_more(decode, args(words=512), both) == pytest.approx(twice(64 * MIB))


@pytest.mark.parametrize(("mib", "beside"), [(40, 0), (56, 56)])
def test_a_loop_with_gathers_makes_its_slices_at_once(mib, beside):
    """There is room for 96 MiB: of keys and values of 56 the second ones find none."""
    args = keys_and_values(mib * MIB)
    keys = {"data": ["cache['k']:1"]}
    assert seconds_more(attend, args, keys) == 0
    gathered = {"data": ["cache['k']:1", "x:0"]}  # words that need all keys are gathered first
    assert seconds_more(attend, args, gathered) == pytest.approx(twice(beside * MIB))


def test_what_each_device_makes_for_itself_is_not_gathered():
    """A mask of the keys comes from sizes alone; here the heads are split."""
    args = keys_and_values(56 * MIB)
    assert seconds_more(attend, args, {"data": ["cache['k']:2", "cache['k']:1"]}) == 0


def test_a_chip_without_vector_memory():
    """A GPU copies nothing there."""
    assert seconds_more(decode, args(), chip="h100") == 0


@pytest.mark.slow
@needs_libtpu
def test_as_the_compiler_does():
    """Beside 16 MiB, and beside what it does not fetch, a layer is in vector memory."""
    waits = []
    for words in (16, 64, 256):
        step = spmd.pjit(decode, mesh=spmd.topology("v5e:2x2"), donate_argnums=0)
        time = spmd.report(step, *args(words=words)).time
        waits.append(time.memory)
    assert waits[0] == pytest.approx(waits[2], rel=0.05)
    assert waits[1] > 1.5 * waits[0]


@pytest.mark.slow
@needs_libtpu
def test_gathers_as_the_compiler_has_them():
    """Words that are gathered in the loop take the room of the values, where it is scarce."""
    waits = {}
    for mib in 40, 64:
        for rows in None, "data":
            args, keys = keys_and_values(mib * MIB), P(None, "data")
            keep = functools.partial(spmd.with_sharding_constraint, axis_resources=P(rows))
            step = spmd.pjit(
                functools.partial(attend, keep=keep),
                mesh=spmd.topology("v5e:2x2", {"data": 4}),
                in_axis_resources=({"k": keys, "v": keys}, P(rows)),
                donate_argnums=0,
            )
            waits[mib, rows] = spmd.report(step, *args).time.memory
    assert waits[40, "data"] == pytest.approx(waits[40, None], rel=0.1)
    assert waits[64, "data"] > 1.5 * waits[64, None]
