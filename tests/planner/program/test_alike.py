"""Layers that are written out have the classes of one, and only those that may."""

import itertools

import jax
import jax.numpy as jnp
from planned_programs import classes, f32, graph_named, mlp, read, sending
import pytest

from spmd.planner.cost.estimate import Estimator
from spmd.planner.program.alike import tied
from spmd.planner.verify import Program

NAMES = ("q", "o", "up", "down")


@pytest.mark.slow
def test_layers_written_out_have_the_classes_of_one():
    """Four layers have as many classes as a scan of four, and each layer's are the first one's."""
    found, scanned = graph_named("unrolled"), graph_named("gpt")
    assert len(found.classes) == len(scanned.classes)
    assert sorted(found.sizes.values()) == sorted(scanned.sizes.values())
    of = classes(found)
    for name in NAMES:
        for d in range(2):
            numbers = {of[f"state['p']['layers'][{n}]['{name}']:{d}"] for n in range(4)}
            assert len(numbers) == 1, (name, d)


def chain(widths, names="list"):
    """Matrices one after the other, whose paths tell their number, or do not."""
    count = len(widths) - 1
    pairs = [f32(a, b) for a, b in itertools.pairwise(widths)]
    keys = range(count) if names == "list" else "abcdefgh"[:count]
    weights = dict(zip(keys, pairs, strict=True)) if names != "list" else pairs

    def loss(weights, x):
        for key in keys:
            x = jnp.tanh(x @ weights[key])
        return (x**2).mean()

    return Program(function=jax.grad(loss), args=(weights, f32(24, widths[0])))


@pytest.mark.slow
def test_of_many_widths_the_smallest_products_share_theirs():
    """Sixty matrices, no two of a size: every other width is one, but for the largest ones."""
    widths = [16 * (i + 1) for i in range(61)]
    found = read(chain(widths))
    of = classes(found)
    assert len(found.classes) == 26  # the batch and 23 widths by themselves, and two of all others
    small, large = ([of[f"weights[{n}]:1"] for n in range(*ends)] for ends in ((0, 30), (37, 59)))
    assert small == [small[0], small[1]] * 15
    assert len({*large}) == len(large)


@pytest.mark.parametrize("names", ["list", "letters"])
def test_in_a_chain_every_other_width_is_one(names):
    """Two widths of one matrix are never one: it could not be split by both."""
    found = read(chain([64] * 9, names))
    for one in found.tensors:
        numbers = [c for c in one.classes if c is not None]
        assert len({*numbers}) == len(numbers) or one.shape[0] != one.shape[1], one
    for one in found.operations:
        if one.flops:
            assert all(len(factors) == 1 for factors in one.by_class.values())
    of = classes(found)
    keys = [f"weights[{n}]" if names == "list" else f"weights['{'abcdefgh'[n]}']" for n in range(8)]
    # Paths say nothing of letters: what is near an end of the chain looks otherwise.
    middle = [of[f"{keys[n]}:1"] for n in (range(7) if names == "list" else (2, 3, 4))]
    assert middle[0] == middle[2] != middle[1]


def test_other_sizes_are_other_classes():
    """Layers of unlike widths stay apart."""
    found = read(chain([64, 32, 64, 48, 64]))
    of = classes(found)
    assert of["weights[0]:1"] != of["weights[2]:1"]


def test_alike_layers_have_one_product_that_runs_more_often():
    """What a layout costs does not grow with the number of layers that have to be looked at."""
    two, eight = (Estimator(read(mlp(layers=n)), sending(data=4, model=2)) for n in (2, 8))
    assert len(eight._work.groups) <= len(two._work.groups) + 2


@pytest.mark.slow
def test_a_graph_without_alike_layers_is_itself():
    """A scanned program is not changed."""
    found = graph_named("gpt")
    assert tied(found) is found
