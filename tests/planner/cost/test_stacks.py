"""Stacks that loops take slices of, change and put together again."""

import functools

from hardware import needs_libtpu
import jax
from jax import lax
import jax.numpy as jnp
from planned_programs import classes, read, sending
import pytest

import spmd
from spmd import P
from spmd.inspection.timing.chips import CHIPS
from spmd.planner.cost.estimate import Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.program.layout import Layout
from spmd.planner.verify import Program

LAYERS, TEXTS, WORDS, HEADS, WIDTH, TURNS = 8, 64, 1024, 16, 128, 16
ORDERS = {"b": TEXTS, "s": WORDS, "h": HEADS, "d": WIDTH}
FLAT = {"data": 8}
# Bytes of both stacks on a device, and how much of its memory's rate a v5e has.
SHARE = 2 * LAYERS * TEXTS * WORDS * HEADS * WIDTH * 2 / 8
FUSED = 0.83


def half(*dims):
    """The description of an array of halves."""
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16)


def cached(order="bshd", turns=TURNS, by="update"):
    """A decoder whose layers' keys and values are scanned, for one word or for several."""
    axis = order.index("s")

    def put(cache, word, at):
        if by == "update":
            return lax.dynamic_update_index_in_dim(cache, word, at, axis)
        return cache.at[(slice(None),) * axis + (at,)].set(word)

    def layer(at, x, given):
        (keys, values), w = given
        keys, values = put(keys, x, at), put(values, x, at)
        scores = jax.nn.softmax(jnp.einsum(f"bhd,{order}->bhs", x, keys), -1)
        return jnp.tanh(jnp.einsum(f"bhs,{order},de->bhe", scores, values, w)), (keys, values)

    def word(at, x, caches, w):
        return lax.scan(functools.partial(layer, at), x, (caches, w))

    def step(caches, w, x):
        if turns == 1:
            return word(jnp.int32(3), x, caches, w)
        start = jnp.int32(0), x, caches
        return lax.while_loop(
            lambda carry: carry[0] < turns,
            lambda carry: (carry[0] + 1, *word(*carry, w)),
            start,
        )[1:]

    cache = half(LAYERS, *(ORDERS[name] for name in order))
    return step, ((cache, cache), half(LAYERS, WIDTH, WIDTH), half(TEXTS, HEADS, WIDTH))


# How often each byte of the stacks is read or written, and how many buffers these have.
CASES = [
    # The slices are read, and written to other stacks.
    ({"turns": 1}, (), 2, 2),
    # Which are copied to the memory that the first ones have.
    ({"turns": 1}, (0,), 2 + 2, 2),
    ({"turns": 1, "by": "scatter"}, (0,), 2 + 2, 2),
    # Turned before the loop and after it, where positions do not come first.
    ({}, (0,), 2 * TURNS + 4, 2),
    ({}, (), 2 * TURNS + 4, 3),
    ({"order": "sbhd"}, (0,), 2 * TURNS, 1),
    # What a scatter writes into is copied in each turn.
    ({"by": "scatter"}, (0,), 2 * TURNS + 2 * TURNS + 4, 3),
    ({"order": "sbhd", "by": "scatter"}, (0,), 2 * TURNS + 2 * TURNS, 2),
]


def estimated(step, args, donated=(), chip="v5e"):
    """Of a layout that splits the texts among 8 devices."""
    found = read(Program(function=step, args=args, options={"donate_argnums": donated}))
    machine = Machine(CHIPS[chip], sending(**FLAT)._links, FLAT)
    return Estimator(found, machine)(Layout.of({"data": [classes(found)["x:0"]]}))


def moving(times):
    """Seconds in which main memory moves a device's share of the stacks so often."""
    return times * SHARE / (FUSED * CHIPS["v5e"].hbm)


@pytest.mark.parametrize(("options", "donated", "times", "buffers"), CASES)
def test_stacks_are_moved_as_often_as_by_hand(options, donated, times, buffers):
    """Beside them there is little in the program."""
    found = estimated(*cached(**options), donated)
    assert found.memory == pytest.approx(moving(times), rel=0.02)
    assert found.peak == pytest.approx(buffers * SHARE, rel=0.02)


def test_no_stack_is_turned_on_gpus():
    """Their compiler leaves arrays as they are."""
    assert estimated(*cached(), (0,), chip="h100").peak < 1.5 * SHARE


def test_a_slice_that_is_changed_is_read_where_the_stack_is():
    """However small it is, also where nobody stacks it again."""
    step, args = cached(turns=1)
    found = estimated(lambda caches, w, x: step(caches, w, x)[0], args)
    assert found.memory == pytest.approx(moving(1), rel=0.02)


@needs_libtpu
@pytest.mark.few(0)
@pytest.mark.parametrize(("options", "donated", "times", "buffers"), CASES)
def test_libtpu_moves_stacks_as_often(options, donated, times, buffers):
    """By the time that main memory takes, and by the peak of the compiled program."""
    step, (caches, w, x) = cached(**options)
    order = options.get("order", "bshd")
    at = P(None, *("data" if name == "b" else None for name in order))
    with spmd.topology("v5e:2x4", FLAT):
        program = spmd.pjit(
            step,
            in_axis_resources=(at, P(), P("data")),
            out_axis_resources=(P("data"), at),
            donate_argnums=donated,
        )
        report = spmd.report(program.lower(caches, w, x).compile())
    assert report.time.memory == pytest.approx(moving(times), rel=0.08)
    assert report.memory.peak < 1.02 * buffers * SHARE
    if jax.__version_info__ >= (0, 12):  # an older libtpu turns one cache in the memory of another
        assert report.memory.peak == pytest.approx(buffers * SHARE, rel=0.02)
