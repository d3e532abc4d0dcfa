"""Layouts of programs: what is tied, what a layout costs, and what the compiler is given."""

import dataclasses
import itertools

from hardware import WITHOUT_LIBTPU, needs_libtpu
import jax
import jax.numpy as jnp
import numpy as np
from planned_programs import MLP, B, D, F, classes, f32, ints, pins_of, step
import pytest

import spmd
from spmd import P
from spmd.inspection.compile.timed import links_of
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.passes import module_of
from spmd.inspection.timing.chips import CHIPS
from spmd.inspection.timing.torus import Transfer
from spmd.planner.choose import choose
from spmd.planner.cost.estimate import Estimator, Machine
from spmd.planner.pins import MisfitError, Way
from spmd.planner.program.graph import graph_of
from spmd.planner.program.layout import Layout
from spmd.planner.search.descent import Rules, search
from spmd.planner.verify import Program, entries_of, pinned, planned


def attend(q, k):
    """Scores of queries and keys, whose lengths are one class."""
    return jnp.einsum("btd,bsd->bts", q, k) + jnp.einsum("btd,bsd->bts", k, q)


def graph(program, mesh):
    """A program as a plan sees it."""
    return graph_of(module_of(program.lowered(mesh), subject="plan"), subject="plan")


UNTURNED = Way(turned=False)
"""With which each operation that plans pin has one pin."""


def lowered(program, mesh, found, layout, way=None):
    """A program as a layout wants it."""
    sizes = dict(mesh.shape)
    ins, outs = entries_of(found, layout, sizes)
    return planned(program, mesh, ins, outs, pins_of(found, layout, sizes, way=way))


def machine(mesh, **figures):
    """A v5e whose messages take no time, with other figures."""
    chip = dataclasses.replace(CHIPS["v5e"], hop=0.0, **figures)
    devices = [*mesh.devices.flat]
    return Machine(chip, links_of(chip, devices, dict(mesh.shape))[0], dict(mesh.shape))


@pytest.fixture(scope="module")
def mesh():
    """Of eight devices."""
    return spmd.make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def mlp(mesh):
    """The step as a plan sees it."""
    return graph(MLP, mesh)


def test_dimensions_that_operations_tie_are_one_class(mlp):
    """An MLP has three: rows, width and hidden width, in arguments and gradients alike."""
    found = classes(mlp)
    assert found["w['up']:0"] == found["w['down']:1"] == found["x:1"]
    assert found["w['up']:1"] == found["w['down']:0"]
    assert len({found["x:0"], found["x:1"], found["w['up']:1"]}) == 3 == len(mlp.classes)
    assert [mlp.sizes[found[name]] for name in ("x:0", "x:1", "w['up']:1")] == [B, D, F]


def test_rows_of_a_large_table_are_a_class(mesh):
    """No product has the words of an embedding that is not tied; small tables are left out."""

    def f(w, ids):
        return jnp.tanh(w["words"][ids] + w["kinds"][ids % 4]) @ w["up"]

    args = ({"words": f32(4096, D), "kinds": f32(4, D), "up": f32(D, F)}, ints(B))
    found = graph(Program(function=f, args=args), mesh)
    of = classes(found)
    words = of["w['words']:0"]
    assert "w['kinds']:0" not in of
    assert len({words, of["ids:0"], of["w['up']:0"], of["w['up']:1"]}) == 4 == len(found.classes)
    layout = Layout.of({"data": [of["ids:0"]], "model": [words]})
    table = next(one for one in found.tensors if one.name == "w['words']")
    assert layout.spec(table, mesh.shape) == P("model", None)


def test_products_have_their_flops_and_runs(mesh):
    """Two forward and three backward products; in a loop of five, each five times."""
    flops = 2 * B * D * F
    assert [one.flops for one in graph(MLP, mesh).operations if one.flops] == [flops] * 5

    def scanned(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    found = graph(Program(function=scanned, args=(f32(5, D, D), f32(B, D))), mesh)
    assert [(one.flops, one.runs) for one in found.operations if one.flops] == [(2 * B * D * D, 5)]


def test_an_axis_goes_to_the_first_class_that_a_value_has(mlp, mesh):
    """FSDP is one order: what has a batch is split by it, and the weights by their width."""
    of = classes(mlp)
    fsdp = Layout.of({"data": [of["x:0"], of["x:1"]], "model": []})
    specs = {one.name: fsdp.spec(one, mesh.shape) for one in mlp.tensors if one.kind == "argument"}
    assert specs == {
        "w['down']": P(None, "data"),
        "w['up']": P("data", None),
        "x": P("data", None),
    }


def test_what_an_axis_does_not_divide_it_passes_over(mesh):
    """Six rows are not for four devices; two axes on one dimension need their product."""
    program = Program(function=jnp.matmul, args=(f32(6, 8), f32(8, 12)))
    found = graph(program, mesh)
    of = classes(found)
    rows, inner, columns = of["a:0"], of["a:1"], of["b:1"]
    layout = Layout.of({"data": [rows, inner], "model": [inner, rows]})
    a, b = (one for one in found.tensors if one.kind == "argument")
    assert layout.spec(a, mesh.shape) == P(None, ("data", "model"))
    assert layout.spec(b, mesh.shape) == P(("data", "model"), None)
    assert Layout.of({"data": [columns], "model": [columns]}).spec(b, mesh.shape) == P(None, "data")


def test_of_two_dimensions_of_a_class_the_first_is_split(mesh):
    """Queries and keys have one length; scores are split along the first of the two."""
    found = graph(Program(function=attend, args=(f32(2, 16, 8), f32(2, 16, 8))), mesh)
    of = classes(found)
    assert of["q:1"] == of["k:1"]
    scores = next(one for one in found.tensors if one.kind == "output")
    assert Layout.of({"data": [of["q:1"]], "model": []}).spec(scores, mesh.shape) == P(
        None, "data", None
    )


#: Bytes that a device sends on the larger side, worked out by hand: of one product of
#: ``f32[64,32]`` and ``f32[32,128]`` over four devices.
PRODUCTS = {
    "rows": (["a:0"], []),
    "summed": (["a:1"], [("all-reduce", ("data",), 64 * 128 * 4)]),
    "columns": (["b:1"], []),
    # The weights are gathered, since the batch comes first.
    "rows, then summed": (["a:0", "a:1"], [("all-gather", ("data",), 32 * 128 * 4)]),
    # The batch is gathered along what is summed over, as it is needed whole.
    "columns, then summed": (["b:1", "a:1"], [("all-gather", ("data",), 64 * 32 * 4)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_exchanges_of_a_product(name, mesh):
    """What is sent for a product, against sums by hand."""
    found = graph(Program(function=jnp.matmul, args=(f32(64, 32), f32(32, 128))), mesh)
    of = classes(found)
    order, expected = PRODUCTS[name]
    layout = Layout.of({"data": [of[one] for one in order], "model": []})
    on = machine(mesh)
    cost = Estimator(found, on)(layout)
    assert cost.exchange == pytest.approx(sum(on.exchange(*one) for one in expected))


ORDERS = ("", "b", "f", "bd", "fd", "d", "bf")


@pytest.mark.parametrize("orders", [*itertools.product(ORDERS, repeat=2)])
def test_exchanges_are_about_those_that_shardy_makes(orders, mlp, mesh):
    """Against Shardy's own bytes: equal where each axis splits a class of its own."""
    of = classes(mlp)
    letters = {"b": of["x:0"], "d": of["x:1"], "f": of["w['up']:1"]}
    named = zip(mesh.shape, orders, strict=True)
    layout = Layout.of({axis: [letters[c] for c in order] for axis, order in named})
    pod = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    found = lowered(MLP, pod, mlp, layout).preview().total.wire_bytes
    # Over links of a byte a second that send one way, seconds are the bytes that a device sends.
    estimate = Estimator(
        mlp, Machine(dataclasses.replace(CHIPS["h100"], hbm=1e30), Sent(), pod.shape)
    )
    ours = estimate(layout).exchange
    if orders[0] != orders[1] and max(map(len, orders)) == 1:
        assert ours == pytest.approx(found)
    else:  # Shardy adds up over two axes at once, and does not scatter what it then gathers
        assert 0.45 * found <= ours <= 1.5 * found


class Sent:
    """Links on which a collective takes a second for each byte that a device sends."""

    def transfer(self, kind, groups, operand, result):
        size = len(groups[0])
        if kind == "all-to-all":
            return Transfer(operand * (1 - 1 / size), frozenset())
        return Transfer(
            (1 + (kind == "all-reduce")) * max(operand, result) * (1 - 1 / size), frozenset()
        )

    def lane_name(self, lane):
        return ""


def test_the_search_finds_the_best_of_all(mlp, mesh):
    """Against all orders of three classes on two axes."""
    on = machine(mesh)
    cost = Estimator(mlp, on)
    orders = [p for n in range(4) for p in itertools.permutations(mlp.classes, n)]
    best = min(
        cost(Layout.of({"data": a, "model": b})).seconds
        for a, b in itertools.product(orders, repeat=2)
    )
    found = search(Estimator(mlp, on), Rules())
    assert found[0].cost.seconds == pytest.approx(best)
    assert [one.score for one in found] == sorted(one.score for one in found)


def test_a_budget_and_what_is_never_wanted_bind(mlp, mesh):
    """Under a tight budget more is split, and a pair that is barred is left alone."""
    on = machine(mesh)
    seen = search(Estimator(mlp, on), Rules())
    free = seen[0]
    budget = (free.cost.peak + min(one.cost.peak for one in seen)) / 2
    tight = search(Estimator(mlp, on), Rules(budget=budget))[0]
    assert tight.cost.peak <= budget < free.cost.peak
    batch = classes(mlp)["x:0"]
    barred = search(Estimator(mlp, on), Rules(never=frozenset({(batch, "data"), (batch, "model")})))
    assert not any(batch in order for one in barred for _, order in one.layout.orders)


def test_a_planned_program_computes_the_same(mlp, mesh):
    """The pinned program's values are those of the function without any mesh."""
    of = classes(mlp)
    layout = Layout.of({"data": [of["x:0"], of["x:1"]], "model": [of["w['up']:1"]]})
    random = np.random.default_rng(0)
    w, x = jax.tree.map(lambda a: random.normal(size=a.shape).astype(np.float32), MLP.args)
    program = lowered(MLP, mesh, mlp, layout)
    got = program.compile()(w, x)
    assert got["up"].sharding.spec == P("data", "model")
    for name, value in step(w, x).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6)


def test_a_product_takes_whole_weights_under_fsdp(mlp, mesh):
    """FSDP splits weights by their width, and gathers them for products of split rows."""
    of = classes(mlp)
    layout = Layout.of({"data": [of["x:0"], of["x:1"]], "model": []})
    up = next(i for i, one in enumerate(mlp.tensors) if one.name == "w['up']")
    pins = {one.number: one for one in pins_of(mlp, layout, dict(mesh.shape), way=UNTURNED)}
    taken = [
        pins[one.number].specs[n]
        for one in mlp.operations
        if one.flops
        for n, i in enumerate(one.tensors[: one.operands])
        if i == up
    ]
    assert taken == [((), ())]
    assert layout.spec(mlp.tensors[up], mesh.shape) == P("data", None)


@pytest.mark.parametrize(
    ("way", "name", "entries"),
    [
        (Way(), "transpose", '{}, {"data"}, {"model"}'),
        (Way(turned=False), "dot_general", '{"data"}, {"model"}, {}'),
        (Way(loose=True), "", ""),
    ],
)
def test_a_result_that_is_transposed_is_pinned_as_it_is_then(mesh, way, name, entries):
    """The partitioner's exchange comes after, so that the product is made in that order."""

    def f(a, b):
        return jnp.einsum("gbd,gdf->gbf", a, b).transpose(2, 0, 1)

    program = Program(function=f, args=(f32(4, B, D), f32(4, D, F)))
    found = graph(program, mesh)
    of = classes(found)
    layout = Layout.of({"data": [of["a:0"]], "model": [of["a:1"]]})
    module = module_of(lowered(program, mesh, found, layout, way), subject="test")
    operations = {one.name: one for one in passes.operations_in(module.operation)}
    found = {
        name.removeprefix("stablehlo."): str(passes.operation_of(use.owner))
        for name in ("stablehlo.dot_general", "stablehlo.transpose")
        for use in operations[name].results[0].uses
    }
    pinned = {name for name, user in found.items() if "sdy.sharding_constraint" in user}
    assert pinned == {*filter(None, [name])}
    assert not name or f"[{entries}]" in found[name]


def test_a_result_with_another_use_is_pinned_as_it_is_made(mesh):
    """Where more than a transpose takes it."""

    def f(a, b):
        made = a @ b
        return made.T, jnp.sin(made)

    program = Program(function=f, args=(f32(B, D), f32(D, F)))
    found = graph(program, mesh)
    layout = Layout.of({"data": [classes(found)["a:0"]], "model": []})
    (pin,) = pins_of(found, layout, dict(mesh.shape))
    assert pin.name == "stablehlo.dot_general"
    assert pin.specs[-1] == (("data",), ())


def passed(x, to, at):
    """Sums of rows by number, of rows that are looked up."""
    return jax.ops.segment_sum(x[at], to, x.shape[0])


def passed_by(mesh, data, model, count):
    """A sum of so many rows, and a layout and its pins, by what each axis splits."""
    program = Program(function=passed, args=(f32(1024, 256), ints(count), ints(count)))
    found = graph(program, mesh)
    of = classes(found)
    named = {"rows": of["x:0"], "columns": of["x:1"]}
    orders = {"data": [named[one] for one in data], "model": [named[one] for one in model]}
    layout = Layout.of(orders)
    return program, found, layout, pins_of(found, layout, dict(mesh.shape))


APART = (("model",), ("data",))
"""A table whose rows are split over one axis, and its columns over the other."""
COLUMNS = ((), ("data", "model"))


@pytest.mark.parametrize(
    ("data", "model", "count", "table", "rows"),
    [
        # Many rows lie by columns, and so does the table: it is sent, and not all rows of parts.
        (["columns"], ["rows", "columns"], 4096, COLUMNS, COLUMNS),
        (["rows", "columns"], ["rows", "columns"], 4096, COLUMNS, COLUMNS),
        # Of few rows all columns of a part are looked up: XLA ends the process where they are
        # split over the table's axes and more.
        (["columns"], ["rows", "columns"], 16, APART, ((), ("data",))),
        (["columns"], ["rows"], 4096, APART, ((), ("data",))),
    ],
)
def test_rows_of_a_table_lie_as_the_table_does(mesh, data, model, count, table, rows):
    """So they are read and written where they are."""
    *_, (gather, scatter) = passed_by(mesh, data, model, count)
    assert (gather.name, *gather.specs) == ("stablehlo.gather", table, ((), ()), rows)
    assert (scatter.name, *scatter.specs) == ("stablehlo.scatter", table, ((), ()), rows, table)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("count", [16, 4096])
def test_libtpu_partitions_sums_of_rows(mesh, count):
    """A device sends less than all rows; with rows of another place this ends the process."""
    pod = spmd.topology("v5e:2x4", dict(mesh.shape))
    program, found, layout, _ = passed_by(pod, ["columns"], ["rows", "columns"], count)
    report = spmd.report(lowered(program, pod, found, layout))
    assert report.total.wire_bytes < max(1024, count) * 256 * 4


def test_activations_are_taken_where_they_lie(mlp, mesh):
    """What a product has to gather and is not known before: parts of it may go around."""
    of = classes(mlp)
    layout = Layout.of({"data": [of["x:0"]], "model": [of["x:1"], of["w['up']:1"]]})
    pins = {one.number: one for one in pins_of(mlp, layout, dict(mesh.shape), way=UNTURNED)}
    taken = [
        pins[one.number].specs[n]
        for one in mlp.operations
        if one.flops
        for n, i in enumerate(one.tensors[: one.operands])
        if mlp.tensors[i].shape == (B, F)
    ]
    assert taken
    assert {*taken} == {(("data",), ("model",))}


def test_products_may_gather_weights_themselves(mlp, mesh):
    """With pins of the other kind each operand is taken where it lies."""
    of = classes(mlp)
    layout = Layout.of({"data": [of["x:0"], of["x:1"]], "model": [of["w['up']:1"]]})
    sizes = dict(mesh.shape)
    way = UNTURNED._replace(ahead=False)
    pins = {one.number: one for one in pins_of(mlp, layout, sizes, way=way)}
    products = [one for one in mlp.operations if one.flops]
    assert len(products) == 5
    for one in products:
        for spec, i in zip(pins[one.number].specs, one.tensors, strict=True):
            assert P(*(e or None for e in spec)) == P(*layout.spec(mlp.tensors[i], sizes))


def test_a_sum_is_made_before_parts_of_a_split_dimension_are_taken(mlp, mesh):
    """Where other axes split the dimension, or where a plan says so; else parts are made."""
    of = classes(mlp)
    b, d, f = of["x:0"], of["x:1"], of["w['up']:1"]
    up = next(
        one for one in mlp.operations if one.flops and mlp.tensors[one.tensors[-1]].shape == (D, F)
    )

    def lies(data, model, **way):
        layout = Layout.of({"data": data, "model": model})
        found = pins_of(mlp, layout, dict(mesh.shape), way=Way(turned=False, **way))
        return next(one for one in found if one.number == up.number).specs[-1]

    assert lies([b, f], []) == ((), ("data",))
    assert lies([b, f], [], whole=True) == ((), ())
    # The rows are split over data, and the hidden width over model and, of weights, over data too.
    assert lies([b, f], [f]) == ((), ("model",))
    assert lies([b, f], [b, f]) == ((), ("data", "model"))
    assert lies([b, d], [f]) == (("data",), ("model",))


def test_pins_reach_no_other_program(mlp, mesh):
    """The lowered program that pins are given to stays as it is, and so does JAX's own."""
    of = classes(mlp)
    layout = Layout.of({"data": [of["w['up']:1"]], "model": []})
    plain = MLP.lowered(mesh)
    before = plain.as_text()
    own = pinned(plain, pins_of(mlp, layout, dict(mesh.shape)))
    assert own.as_text().count("sdy.sharding_constraint") >= 10
    assert plain.as_text() == before == MLP.lowered(mesh).as_text()
    assert jax.jit(step).lower(*MLP.args).as_text().count("sdy.sharding_constraint") == 0


def test_pins_of_another_program_are_refused(mlp, mesh):
    """A constraint of another rank would end the process; it is an error."""
    pins = pins_of(mlp, Layout.of({"data": [], "model": []}), dict(mesh.shape))
    other = Program(function=attend, args=(f32(2, 16, 8), f32(2, 16, 8)))
    with pytest.raises(MisfitError):
        pinned(other.lowered(mesh), pins)


@pytest.mark.parametrize("wrong", [("nope",), ("data", "data")])
def test_pins_of_other_axes_are_refused(wrong, mlp, mesh):
    """A plan file may have been edited, and Shardy would say no more than that it is invalid."""
    pins = pins_of(mlp, Layout.of({"data": [], "model": []}), dict(mesh.shape))
    specs = ((wrong, *pins[0].specs[0][1:]), *pins[0].specs[1:])
    with pytest.raises(MisfitError, match=wrong[0]):
        pinned(MLP.lowered(mesh), [pins[0]._replace(specs=specs), *pins[1:]])


@pytest.mark.slow
def test_choices_of_several_meshes():
    """The best one computes what the function computes, keeps to the budget, and comes first."""
    meshes = [spmd.make_mesh({"data": 8 // m, "model": m}) for m in (1, 2)]
    found = choose(MLP, meshes, CHIPS["cpu"], top=2).choices
    compiled = [one for one in found if one.report]
    assert [one.name for one in compiled].count("found") == 2
    assert found[0] is compiled[0]
    assert [one.seconds for one in compiled] == sorted(one.seconds for one in compiled)
    assert all(one.report.time.source == "predicted" for one in compiled)
    peaks = sorted(one.peak for one in compiled)
    budget = (peaks[0] + peaks[-1]) / 2
    tight = choose(MLP, meshes, CHIPS["cpu"], rules=Rules(budget=budget), top=1).choices[0]
    assert tight.peak <= budget
    random = np.random.default_rng(1)
    w, x = jax.tree.map(lambda a: random.normal(size=a.shape).astype(np.float32), MLP.args)
    best = found[0]
    got = planned(MLP, best.mesh, best.ins, best.outs, best.pins).compile()(w, x)
    for name, value in step(w, x).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6)


BIG = Program(
    function=step, args=({"down": f32(8192, 2048), "up": f32(2048, 8192)}, f32(512, 2048))
)
#: What people do by hand, as orders of the rows, the width and the hidden width.
EXPERTS = {
    "data parallel": (("b",), ()),
    "data parallel on both": (("b",), ("b",)),
    "FSDP": (("b", "d"), ("b", "d")),
    "Megatron": (("b",), ("f",)),
    "FSDP and Megatron": (("b", "d"), ("f",)),
}


@pytest.mark.slow
def test_the_compiler_agrees_about_the_order():
    """On a described TPU, the cheaper one of two experts that are not near is cheaper compiled."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x4", {"data": 4, "model": 2})
    found, sizes = graph(BIG, pod), dict(pod.shape)
    of = classes(found)
    letters = {"b": of["x:0"], "d": of["x:1"], "f": of["w['up']:1"]}
    links = links_of(CHIPS["v5e"], [*pod.devices.flat], sizes)[0]
    cost = Estimator(found, Machine(CHIPS["v5e"], links, sizes))
    compiled, ours = [], []
    for orders in EXPERTS.values():
        named = zip(sizes, orders, strict=True)
        layout = Layout.of({axis: [letters[c] for c in order] for axis, order in named})
        ours.append(cost(layout).seconds)
        report = spmd.report(lowered(BIG, pod, found, layout).compile())
        compiled.append(report.time.seconds)
    for i, j in itertools.permutations(range(len(ours)), 2):
        assert not (ours[i] > 1.25 * ours[j] and compiled[i] < compiled[j]), (ours, compiled)
    best = choose(BIG, [pod], CHIPS["v5e"], top=1, seeds=False).choices[0]
    assert best.seconds <= min(compiled)
