"""Programs that leave a planner little, or that it has never heard of, end in a valid plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from planned_programs import f32, ints, mlp, pins_of
import pytest

import spmd
from spmd.inspection.compile.timed import links_of
from spmd.inspection.shardy.passes import module_of
from spmd.inspection.timing.chips import CHIPS
from spmd.planner.cost.estimate import Estimator
from spmd.planner.cost.machine import Machine
from spmd.planner.program.graph import graph_of
from spmd.planner.search.descent import Rules, search
from spmd.planner.search.experts import experts
from spmd.planner.verify import Program, entries_of, planned

#: Seconds each: the README's command is to be short.
pytestmark = pytest.mark.slow

SIZES = {"data": 4, "model": 2}


def on_host(x):
    """A product of what the host gives."""
    made = jax.pure_callback(lambda a: np.asarray(a) * 2, f32(*x.shape), x)
    return made @ made.T


def told(x):
    """A product, with a print on the way."""
    jax.debug.print("{}", x.sum())
    return x @ x.T


def sliced(x, i):
    """Slices whose place is not known, steps, and turns."""
    return (
        jax.lax.dynamic_slice(x, (i, 0), (8, 32)),
        jax.lax.dynamic_update_slice(x, x[:8] * 2, (i, 0)),
        x[::2],
        x[::-1],
        jnp.roll(x, 3, 0),
    )


def sorted_(x):
    """What needs whole rows."""
    return jnp.sort(x, axis=1), jax.lax.top_k(x, 4)[0], jnp.fft.fft(x).real, jnp.argsort(x, axis=0)


def branched(x, w, p):
    """One of two ways."""
    return jax.lax.cond(p, lambda: x @ w, lambda: jnp.tanh(x @ w))


def repeated(x, n):
    """A loop whose length is not known."""
    return jax.lax.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[1])), (0, x)
    )[1]


def solved(x):
    """Linear algebra."""
    eye = jnp.eye(x.shape[0])
    return jnp.linalg.cholesky(x @ x.T + eye), jnp.linalg.qr(x)[0], jnp.linalg.solve(x, x)


def one_after_another(x, count=2000):
    """So many operations in a row."""
    for i in range(count):
        x = jnp.sin(x) * (1.0 + i)
    return x


def drawn(key, x):
    """Random numbers."""
    return x + jax.random.normal(key, x.shape) @ jax.random.uniform(key, (32, 32))


def graph_network(ws, x, to, at):
    """The gradient of two layers that sum what neighbours have."""

    def loss(ws):
        y = x
        for w in ws:
            y = jnp.tanh(jax.ops.segment_sum((y @ w)[at], to, x.shape[0]))
        return jnp.mean(y**2)

    return jax.grad(loss)(ws)


def looked_up(tables, ids):
    """The next tables of a recommender, whose rows are few beside all."""

    def loss(tables):
        return jnp.mean(jnp.stack([t[i] for t, i in zip(tables, ids, strict=True)]) ** 2)

    return jax.tree.map(lambda t, g: t - g, tables, jax.grad(loss)(tables))


PROGRAMS = {
    "nothing divides": Program(function=jnp.matmul, args=(f32(7, 5), f32(5, 3))),
    "primes": mlp(31, 37, 101),
    "scalars": Program(function=lambda a, b: a * b + 1, args=(f32(), f32())),
    "no arguments": Program(function=lambda: jnp.ones((64, 64)) @ jnp.ones((64, 64)), args=()),
    "no products": Program(function=lambda x, y: jnp.tanh(x) * y, args=(f32(64, 256),) * 2),
    "identity": Program(function=lambda x: x, args=(f32(64, 32),)),
    "unused": Program(function=lambda x, y: x * 2, args=(f32(64, 32), f32(8, 8))),
    "no elements": Program(function=lambda x: x @ x.T, args=(f32(0, 32),)),
    "host": Program(function=on_host, args=(f32(16, 16),)),
    "print": Program(function=told, args=(f32(16, 16),)),
    "sort, fft, top_k": Program(function=sorted_, args=(f32(64, 32),)),
    "slices": Program(function=sliced, args=(f32(64, 32), ints())),
    "branches": Program(
        function=branched,
        args=(f32(16, 32), f32(32, 64), jax.ShapeDtypeStruct((), jnp.bool_)),
    ),
    "a loop of unknown length": Program(function=repeated, args=(f32(32, 32), ints())),
    "linear algebra": Program(function=solved, args=(f32(32, 32),)),
    "random": Program(function=drawn, args=(jax.ShapeDtypeStruct((2,), jnp.uint32), f32(64, 32))),
    "graph network": Program(
        function=graph_network,
        args=([f32(64, 64)] * 2, f32(512, 64), ints(4096), ints(4096)),
    ),
    "recommender": Program(
        function=looked_up, args=([f32(8192, 64), f32(1024, 64)], [ints(128)] * 2)
    ),
    "scatter": Program(
        function=lambda x, i, u: x.at[i].add(u), args=(f32(64, 32), ints(16), f32(16, 32))
    ),
}


def best(program, mesh):
    """The best layout of a program, with its graph."""
    found = graph_of(module_of(program.lowered(mesh), subject="plan"), subject="plan")
    chip = CHIPS["v5e"]
    on = Machine(chip, links_of(chip, [*mesh.devices.flat], SIZES)[0], SIZES)
    seen = search(Estimator(found, on), Rules(), starts=experts(found, SIZES).values())
    return found, seen[0].layout


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_a_layout_that_compiles(name):
    """A graph, a search, and a program with its pins that the compiler takes."""
    program, mesh = PROGRAMS[name], spmd.make_mesh(SIZES)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found, layout = best(program, mesh)
        ins, outs = entries_of(found, layout, SIZES)
        planned(program, mesh, ins, outs, pins_of(found, layout, SIZES)).compile()


def test_two_thousand_operations_in_a_row_are_read():
    """They are a graph of one class for each dimension, and the rows are split."""
    program = Program(function=one_after_another, args=(f32(64, 64),))
    found, layout = best(program, spmd.make_mesh(SIZES))
    assert len(found.operations) > 4000
    assert len(found.classes) == 2
    assert any(order for _, order in layout.orders)


@functools.cache
def without_products():
    """A program of elementwise work alone."""
    return best(PROGRAMS["no products"], spmd.make_mesh(SIZES))


def test_without_products_large_arguments_count():
    """What is elementwise is split along anything that divides: an eighth on each device."""
    found, layout = without_products()
    (first, *_) = found.tensors
    assert {*first.classes} <= {*found.classes}
    count = 1
    for axis in layout.places(first, SIZES):
        count *= SIZES[axis]
    assert count == 8


def test_what_needs_whole_rows_is_not_split_along_them():
    """A sort along a dimension is priced as a gather of it, so that another one is split."""
    program = Program(function=lambda x: jnp.sort(x, axis=1), args=(f32(4096, 4096),))
    found, layout = best(program, spmd.make_mesh(SIZES))
    assert {*layout.places(found.tensors[0], SIZES).values()} == {0}
