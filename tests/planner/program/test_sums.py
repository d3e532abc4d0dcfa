"""Products that are added up are added to each other first."""

from hardware import WITHOUT_LIBTPU
import jax
import jax.numpy as jnp
import numpy as np
from planned_programs import classes, f32, pins_of
import pytest

import spmd
from spmd import P
from spmd.inspection.shardy import passes
from spmd.planner.program.layout import Layout
from spmd.planner.program.sums import regroup
from spmd.planner.verify import Program, entries_of, planned


def shown(value):
    """How a value of a module is made: sums, products, and arguments by their number."""
    if isinstance(value.owner, passes.ir.Block):
        return f"c{value.arg_number}"
    one = passes.operation_of(value.owner)
    name = one.name.removeprefix("stablehlo.")
    if name == "add":
        return f"({shown(one.operands[0])} + {shown(one.operands[1])})"
    return "ab" if name == "dot_general" else f"{name}({shown(one.operands[0])})"


def lowered(function, count):
    """A function of so many matrices."""
    args = [f32(8, 8)] * count
    return jax.jit(function).lower(*args).compiler_ir("stablehlo")


def result_of(module):
    """What the function of a module returns."""
    main = passes.functions(module.operation)["main"]
    [*_, last] = main.regions[0].blocks[0].operations
    return last.operands


def regrouped(function, count):
    """The results of a function of so many matrices, as they are made before and after."""
    module = lowered(function, count)
    with module.context:
        before = [*map(shown, result_of(module))]
        regroup(module.operation)
        module.operation.verify()
        return before, [*map(shown, result_of(module))]


def mixed(c, a, b):
    """Products between others."""
    return ((c + a @ b) + b @ a) + c.T


@pytest.mark.parametrize(
    ("function", "after"),
    [
        (lambda c, a, b: ((c + a @ b) + b @ a) + a @ a, "(c0 + ((ab + ab) + ab))"),
        (lambda c, a, b: (a @ b + c) + (b @ a).T, "(c0 + (ab + transpose(ab)))"),
        (mixed, "((c0 + transpose(c0)) + (ab + ab))"),
    ],
    ids=["after each other", "turned", "among others"],
)
def test_products_are_added_to_each_other_first(function, after):
    """The module has the same sums, in another order."""
    before, found = regrouped(function, 3)
    assert before != [after]
    assert found == [after]


@pytest.mark.parametrize(
    "function",
    [
        lambda c, a, b: c + a @ b,
        lambda c, a, b: (a @ b + b @ a) + a @ a,
        lambda c, a, b: (c + jnp.tanh(a @ b)) + jnp.tanh(b @ a),
        lambda c, a, b: ((p := a @ b) + c) + (b @ a) * p,
    ],
    ids=["one product", "products alone", "no sums of products", "used elsewhere"],
)
def test_other_sums_stay_as_they_are(function):
    """Nothing changes where no products meet, or all do already."""
    before, after = regrouped(function, 3)
    assert before == after


def test_what_is_used_between_stays():
    """A part of a sum that something else needs is one term."""

    def function(c, a, b):
        part = c + a @ b
        return (part + b @ a) + a @ a, part

    before, after = regrouped(function, 3)
    assert before == ["(((c0 + ab) + ab) + ab)", "(c0 + ab)"]
    assert after == ["((c0 + ab) + (ab + ab))", "(c0 + ab)"]


def test_a_long_sum():
    """A sum of thousands of terms is as deep as it is long; the products end up beside it."""

    def function(c, a, b):
        c = c + a @ b
        for _ in range(2000):
            c = c + a
        return c + b @ a

    module = lowered(function, 3)
    with module.context:
        regroup(module.operation)
        module.operation.verify()
        last = result_of(module)[0].owner
        assert shown(last.operands[1]) == "(ab + ab)"
        names = [one.name for one in passes.operations_in(module.operation)]
        assert names.count("stablehlo.add") == 2002


def attend(w, x):
    """The gradient of two layers whose queries, keys and values take the same rows."""

    def loss(x):
        for _ in range(2):
            q, k, v = (x @ w[name] for name in "qkv")
            x = x + (jnp.tanh(q) * jnp.tanh(k) * v) @ w["out"]
        return (x**2).sum()

    return jax.grad(loss)(x)


ATTEND = Program(
    function=attend,
    args=({**{name: f32(16, 64) for name in "qkv"}, "out": f32(64, 16)}, f32(32, 16)),
)


def megatron(mesh):
    """Rows over the axis data, and what rows are multiplied to over the axis model."""
    graph, sizes = ATTEND.graph(mesh), dict(mesh.shape)
    of = classes(graph)
    layout = Layout.of({"data": [of["x:0"]], "model": [of["w['q']:1"]]})
    ins, outs = entries_of(graph, layout, sizes)
    return planned(ATTEND, mesh, ins, outs, pins_of(graph, layout, sizes))


@pytest.mark.slow
def test_a_gradient_of_several_products_is_sent_once():
    """A compiler for TPUs adds up what each layer makes, and one gradient of each."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    program = megatron(spmd.topology("v5e:2x4", {"data": 2, "model": 4}))
    for found in (spmd.preview(program), spmd.report(program.compile())):
        sums = [(one.kind, one.mesh_axes, len(one.shapes.operands)) for one in found.collectives]
        assert sums == [("all-reduce", ("model",), 1)] * 4


@pytest.mark.slow
def test_a_planned_gradient_is_that_of_the_function():
    """In another order the values are the same, up to rounding."""
    w, x = jax.tree.map(
        lambda s: np.random.default_rng(s.shape[0]).normal(size=s.shape).astype(np.float32) / 4,
        ATTEND.args,
    )
    got = megatron(spmd.make_mesh({"data": 2, "model": 4})).compile()(w, x)
    assert got.sharding.spec == P("data")
    np.testing.assert_allclose(got, attend(w, x), rtol=1e-4, atol=1e-5)
