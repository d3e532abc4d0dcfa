"""Layouts of programs: what is tied, what a layout costs, and what the compiler is given."""

import dataclasses
import itertools
import types

from hardware import WITHOUT_LIBTPU, needs_libtpu
import jax
import jax.numpy as jnp
import numpy as np
from planned_programs import ints, pins_of
import pytest

import spmd
from spmd import P
from spmd.inspection.compile.timed import links_of
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.passes import module_of
from spmd.inspection.timing.chips import CHIPS
from spmd.inspection.timing.torus import Transfer
from spmd.planner import choose as choosing
from spmd.planner.choose import Choice, choose
from spmd.planner.cost.estimate import Estimate, Estimator, Machine
from spmd.planner.pins import MisfitError, Way
from spmd.planner.program.graph import graph_of
from spmd.planner.program.layout import Layout
from spmd.planner.search.descent import Candidate, Rules, search
from spmd.planner.verify import Program, entries_of, pinned, planned

B, D, F = 64, 32, 128


def f32(*dims):
    """The description of an array."""
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def step(w, x):
    """A gradient step of a layer with a residual."""

    def loss(w):
        return jnp.mean((x + jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


MLP = Program(function=step, args=({"down": f32(F, D), "up": f32(D, F)}, f32(B, D)))


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


def classes(found):
    """The class of a dimension of an argument, by ``name:dimension``."""
    return {f"{name}:{d}": c for c, names in found.classes.items() for name, d in names}


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


def looking_at(pod, top, data, model, *, varied=False):
    """A search whose only layout splits rows, widths and hidden widths, of which `top` compile.

    No other layout is made of it, unless it is `varied`.
    """
    found = MLP.graph(pod)
    of = classes(found)
    letters = {"b": of["x:0"], "d": of["x:1"], "f": of["w['up']:1"]}
    layout = Layout.of({"data": [*map(letters.get, data)], "model": [*map(letters.get, model)]})
    cost = Estimate(compute=1.0, memory=0.0, exchange=0.0, hidden=0.0, peak=1.0)
    looking = choosing._Looking(MLP, CHIPS["v5e"], Rules(), top, False, 0, lambda one: None)
    looking._estimators[pod, None] = Estimator(found, looking._machine(pod))
    looking._estimated = lambda one, layout, way: one.estimate  # which is made up
    looking.choices = [looking._choice("found", Candidate(layout, cost, 1.0), found, pod)]
    if not varied:
        looking._split_width = lambda at: None
    return looking


def test_a_compiler_that_needs_more_memory_is_asked_about_smaller_layouts(monkeypatch, mesh):
    """What the first layouts need beyond their estimates says how much less to search for."""

    def report(one, lowered, chip):
        memory = types.SimpleNamespace(peak=2 * one.estimate.peak)
        time = types.SimpleNamespace(seconds=one.predicted, exchange=0.0)
        found = types.SimpleNamespace(time=time, memory=memory, collectives=())
        return dataclasses.replace(one, report=found)

    monkeypatch.setattr(choosing, "_compiled", report)
    options = {"chip": CHIPS["v5e"], "seeds": False, "cached": False}
    free = choose(MLP, [mesh], top=0, **options).choices[0]
    budget = 1.5 * free.estimate.peak
    wanted = choose(MLP, [mesh], rules=Rules(budget=budget / 2), top=0, **options).choices[0]
    assert wanted.estimate.peak <= budget / 2
    found = choose(MLP, [mesh], rules=Rules(budget=budget), top=1, **options)
    assert found.choices[0].report is not None
    assert found.choices[0].fits(budget)
    assert found.choices[0].seconds == pytest.approx(wanted.predicted)
    # Where the fastest one fits, nothing is searched for again.
    enough = choose(MLP, [mesh], rules=Rules(budget=2 * budget), top=1, **options)
    assert (
        enough.tried == choose(MLP, [mesh], rules=Rules(budget=2 * budget), top=0, **options).tried
    )


@pytest.mark.parametrize(
    ("data", "model", "wide"),
    [("b", "f", "fd"), ("bd", "f", "fd"), ("b", "fd", None), ("bd", "", None)],
    ids=["Megatron", "FSDP x TP", "split so already", "FSDP"],
)
def test_the_best_one_is_compiled_with_its_width_split_too(monkeypatch, data, model, wide):
    """Where an axis splits hidden widths alone; the faster of both is the answer."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    looking = looking_at(
        spmd.topology("v5e:2x2", {"data": 2, "model": 2}), 2, *(data, model), varied=True
    )
    of = classes(MLP.graph(looking.choices[0].mesh))
    letters = {of["x:1"]: "d", of["w['up']:1"]: "f", of["x:0"]: "b"}
    seen = []

    def report(one, lowered, chip):
        orders = {a: "".join(map(letters.get, order)) for a, order in one.layout.orders}
        seen.append((orders["data"], orders["model"]))
        time = types.SimpleNamespace(seconds=0.5 if orders["model"] == "fd" else 1.0)
        return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=None))

    monkeypatch.setattr(choosing, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    monkeypatch.setattr(looking, "_pin_otherwise", lambda at: None)
    looking.compile()
    assert seen == [(data, model)] + [(data, wide)] * bool(wide)
    assert looking.chosen().choices[0].seconds == (0.5 if "fd" in (model, wide) else 1.0)


def test_a_width_that_is_far_is_not_split(monkeypatch):
    """What is predicted to be much slower is not worth a compile."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    looking = looking_at(
        spmd.topology("v5e:2x2", {"data": 2, "model": 2}), 2, "b", "f", varied=True
    )
    (one,) = looking.choices
    estimate = dataclasses.replace(one.estimate, compute=1e-9)
    looking.choices = [dataclasses.replace(one, estimate=estimate, exchange=0.0, told=())]
    seen = []

    def report(one, lowered, chip):
        seen.append(one)
        time = types.SimpleNamespace(seconds=1.0)
        return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=None))

    monkeypatch.setattr(choosing, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    monkeypatch.setattr(looking, "_pin_otherwise", lambda at: None)
    looking.compile()
    assert len(seen) == 1 == len(looking.choices)


@pytest.mark.parametrize(
    ("seconds", "compiled", "best"),
    [
        ({}, 5, Way()),
        ({Way(whole=True): 0.5}, 5, Way(whole=True)),
        ({Way(whole=True): 0.999}, 5, Way(whole=True)),
        ({Way(whole=True): 0.999, Way(turned=False): 0.5}, 6, Way(turned=False)),
        ({Way(whole=True): 0.999, Way(ahead=False): 0.5}, 7, Way(ahead=False)),
        (
            {Way(whole=True): 0.999, Way(turned=False): 0.5, Way(True, True, False): 0.4},
            6,
            Way(True, True, False),
        ),
        (
            {Way(whole=True): 0.999, Way(ahead=False): 0.998, Way(False, True): 0.99},
            6,
            Way(False, True),
        ),
        ({Way(ahead=False): 0.999, Way(free=True): 0.5}, 5, Way(ahead=False)),
        ({Way(ahead=False): 0.5}, 6, Way(ahead=False)),
        ({Way(whole=True): 0.5, Way(ahead=False, whole=True): 0.4}, 6, Way(False, True)),
        ({Way(whole=True): 0.5, Way(ahead=False): 0.1}, 5, Way(whole=True)),
        ({Way(turned=False): 0.5}, 5, Way(turned=False)),
        ({Way(whole=True): 0.5, Way(True, True, turned=False): 0.4}, 5, Way(True, True, False)),
        ({Way(whole=True): 0.5, Way(loose=True): 0.4}, 5, Way(loose=True)),
        ({Way(ahead=False): 0.5, Way(ahead=False, loose=True): 0.4}, 6, Way(False, loose=True)),
        ({Way(ahead=False): 0.5, Way(free=True): 0.4}, 6, Way(free=True)),
    ],
)
def test_the_best_one_is_pinned_in_other_ways(monkeypatch, seconds, compiled, best):
    """What makes it faster is kept; the next change is made to it, if it is so beyond noise.

    What is faster by so little is tried together in the end.
    """
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x2", {"data": 2, "model": 2})
    seen = []

    def way_of(one):
        """That of its pins; of loose ones, sums are the same either way."""
        ways = [Way(free=True), Way(loose=True), Way(ahead=False, loose=True)]
        known = itertools.product((True, False), (None, True), (True, False))
        ways += itertools.starmap(Way, known)
        sizes = dict(pod.shape)
        found = {way: pins_of(one.graph, one.layout, sizes, way=way) for way in ways}
        assert len({*found.values()}) == 11
        return next(way for way, pins in found.items() if pins == one.pins)

    def report(one, lowered, chip):
        seen.append(way := way_of(one))
        time = types.SimpleNamespace(seconds=seconds.get(way, 1.0))
        return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=None))

    monkeypatch.setattr(choosing, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    looking = looking_at(pod, 2, "bd", "f")
    looking.compile()
    assert len(seen) == compiled == looking.chosen().compiles
    assert [way_of(one) for one in looking.choices] == [best]


def test_sums_that_are_to_be_made_first_are_tried_in_parts(monkeypatch):
    """Which is faster a compiler says; the estimate is of what was compiled."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x2", {"data": 2, "model": 2})
    looking = looking_at(pod, 2, "bd", "f")
    (one,) = looking.choices
    del looking._estimated
    every = frozenset(looking._estimators[pod, None].alike.values())
    one = dataclasses.replace(one, estimate=dataclasses.replace(one.estimate, first=every))
    whole, parts = (looking._pins(one, Way(whole=whole)) for whole in (True, False))
    assert looking._pins(one, Way()) == whole != parts
    looking.choices = [dataclasses.replace(one, pins=whole)]
    seen = []

    def report(one, lowered, chip):
        seen.append(one.pins)
        time = types.SimpleNamespace(seconds=0.5 if one.pins == parts else 1.0)
        return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=None))

    monkeypatch.setattr(choosing, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    looking.compile()
    (best,) = looking.choices
    assert (best.pins, best.seconds, best.estimate.first) == (parts, 0.5, frozenset())
    assert len({*seen}) == len(seen)


@pytest.mark.parametrize(("behind", "answer"), [(1.015, "second"), (1.03, "first")])
def test_a_second_mesh_that_is_hardly_slower_is_pinned_in_other_ways(monkeypatch, behind, answer):
    """Which of two is better is known only when both are compiled as they are fastest."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pods = [spmd.topology("v5e:2x2", axes) for axes in ({"data": 2, "model": 2}, {"data": 4})]
    looking, other = looking_at(pods[0], 3, "bd", "f"), looking_at(pods[1], 3, "bd", "")
    own = {pods[0]: looking.choices[0].pins, pods[1]: other.choices[0].pins}
    looking.choices += other.choices
    looking._estimators |= other._estimators

    def report(one, lowered, chip):
        first, plain = one.mesh == pods[0], one.pins == own[one.mesh]
        seconds = (1.0 if first else behind) if plain else (0.9 if first else 0.5)
        time = types.SimpleNamespace(seconds=seconds)
        return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=None))

    monkeypatch.setattr(choosing, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    looking.compile()
    best = looking.chosen().choices[0]
    wanted = {"first": (pods[0], 0.9), "second": (pods[1], 0.5)}
    assert (best.mesh, best.seconds) == wanted[answer]


@pytest.mark.parametrize(("behind", "seconds"), [(1.015, 0.5), (1.03, 0.9)])
@pytest.mark.parametrize(
    ("names", "is_alike"),
    [(("an expert",), False), (("an expert",), True), ((choosing.FOUND, "an expert"), False)],
)
def test_what_was_found_is_pinned_in_other_ways_beside_an_expert(
    monkeypatch, names, is_alike, behind, seconds
):
    """What is hardly faster does not keep another layout that was found from its best form.

    Whether an expert is that, which may place arguments alike, or what was found and an expert.
    """
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x2", {"data": 2, "model": 2})
    looking = looking_at(pod, 3, "bd", "f")
    (found,), (best,) = looking.choices, looking_at(pod, 3, "bd", "").choices
    if is_alike:
        looking.choices = [found := dataclasses.replace(found, ins=best.ins)]
    looking.choices += [dataclasses.replace(best, name=name) for name in names]

    def report(one, lowered, chip):
        own = found if one.layout == found.layout else best
        plain = behind if own is found else 1.0
        other = 0.5 if own is found else 0.9
        time = types.SimpleNamespace(seconds=plain if one.pins == own.pins else other)
        return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=None))

    monkeypatch.setattr(choosing, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    looking.compile()
    assert looking.chosen().choices[0].seconds == seconds


def test_what_does_not_fit_is_pinned_in_other_ways(monkeypatch):
    """Sums that are made at once may take less memory than those whose parts go around."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x2", {"data": 2, "model": 2})
    looking = looking_at(pod, 2, "bd", "f")
    looking.rules = Rules(budget=2.0)
    (one,) = looking.choices
    whole = looking._pins(one, Way(whole=True))

    def compiled(one, lowered, chip):
        peak, seconds = (1.0, 5.0) if one.pins == whole else (3.0, 1.0)
        memory, time = types.SimpleNamespace(peak=peak), types.SimpleNamespace(seconds=seconds)
        return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=memory))

    monkeypatch.setattr(choosing, "_compiled", compiled)
    looking.compile()
    (found,) = looking.chosen().choices
    assert (found.pins, found.peak) == (whole, 1.0)
    assert found.fits(2.0)


def test_nothing_is_pinned_in_other_ways_when_the_time_is_up(monkeypatch):
    """Shardy is not asked of what will not be compiled, which may take seconds each time."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    looking = looking_at(spmd.topology("v5e:2x2", {"data": 2, "model": 2}), 2, "bd", "f")
    seen = []

    def compiled(one, lowered, chip):
        looking.rules = Rules(deadline=0.0)
        time = types.SimpleNamespace(seconds=1.0)
        return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=None))

    real = looking._previewed
    monkeypatch.setattr(looking, "_previewed", lambda one: seen.append(one) or real(one))
    monkeypatch.setattr(choosing, "_compiled", compiled)
    looking.compile()
    assert len(seen) == 1
    assert not looking.chosen().complete


def test_of_what_does_not_fit_one_of_each_mesh_is_pinned_in_other_ways(monkeypatch):
    """Which of several needs less when its sums are made at once is not known before."""
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pods = [spmd.topology("v5e:2x2", axes) for axes in ({"data": 2, "model": 2}, {"data": 4})]
    looking, other = looking_at(pods[0], 3, "bd", "f"), looking_at(pods[1], 3, "bd", "")
    looking.rules, looking.choices = Rules(budget=2.0), [*looking.choices, *other.choices]
    looking._estimators |= other._estimators
    whole = [looking._pins(one, Way(whole=True)) for one in looking.choices]

    def compiled(one, lowered, chip):
        at = pods.index(one.mesh)
        peak = (2.5, 1.0)[at] if one.pins == whole[at] else (3.0, 4.0)[at]
        memory, time = types.SimpleNamespace(peak=peak), types.SimpleNamespace(seconds=1.0)
        return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=memory))

    monkeypatch.setattr(choosing, "_compiled", compiled)
    looking.compile()
    first, second = looking.chosen().choices
    assert (first.mesh, first.pins, first.peak) == (pods[1], whole[1], 1.0)
    assert (second.mesh, second.peak) == (pods[0], 2.5)


@pytest.mark.parametrize(
    ("data", "model", "slower", "left"),
    [("b", "f", [], 0), ("bd", "f", [], 10), ("fd", "df", [], 10), ("b", "f", [0, 10], 15)],
    ids=["Megatron", "gathers ahead", "sends more without pins", "sends more without results"],
)
def test_the_best_one_has_the_fewest_pins(monkeypatch, data, model, slower, left):
    """Without those of results, or without any, it is compiled where it sends no more so.

    What is gathered ahead has to be pinned. Of products, two forward and three backward, there are
    ten operands and five results.
    """
    pytest.importorskip("libtpu", reason=WITHOUT_LIBTPU)
    pod = spmd.topology("v5e:2x2", {"data": 2, "model": 2})

    def count(one):
        return sum(spec is not None for pin in one.pins for spec in pin.specs)

    def report(one, lowered, chip):
        time = types.SimpleNamespace(seconds=1.0 + count(one))
        return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=None))

    monkeypatch.setattr(choosing, "_compiled", report)
    monkeypatch.setattr(Choice, "fits", lambda one, budget: True)
    looking = looking_at(pod, 2, data, model)
    assert count(looking.choices[0]) == 15
    real = looking._previewed

    def previewed(one):
        return dataclasses.replace(real(one), **({"exchange": 1.0} if count(one) in slower else {}))

    monkeypatch.setattr(looking, "_previewed", previewed)
    looking.compile()
    assert [count(one) for one in looking.choices] == [left]


def test_what_shardy_was_not_asked_of_is_compiled_later(monkeypatch):
    """A prediction without Shardy's exchanges is too low to be compared with one that has them."""
    pod = spmd.make_mesh({"data": 4, "model": 2})
    looking = looking_at(pod, 1, "b", "f")
    known = looking._previewed(*looking_at(pod, 1, "b", "").choices)
    assert known.exchange > 0
    looking.choices.append(known)
    assert looking.choices[0].predicted < known.predicted
    report = types.SimpleNamespace(time=None, memory=None)
    monkeypatch.setattr(
        choosing, "_compiled", lambda one, *_: dataclasses.replace(one, report=report)
    )
    looking.compile()
    assert [one.report is not None for one in looking.choices] == [False, True]


@pytest.mark.parametrize(
    ("least", "more", "asked"),
    [
        (0.0, 12, [True, True, True, False]),  # the last one is slower than the first in any case
        (0.0, 1, [True, True, False, False]),
        (0.0, 0, [True, False, False, False]),
        (0.7, 12, [True, True, False, False]),
        (1.0, 12, [True, False, False, False]),
    ],
)
def test_shardy_is_asked_of_what_seems_better(monkeypatch, least, more, asked):
    """The first one takes 2 s with its exchanges; others that may take less are timed, too.

    Exchanges add so much at least: to one that is known, and far behind.
    """
    monkeypatch.setattr(choosing, "_LOOKED_AT", 2)
    monkeypatch.setattr(choosing, "_OF_EACH", 1)
    monkeypatch.setattr(choosing, "_AFTER_THOSE", more)
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 1, "b", "f")
    one = looking.choices[0]
    looking.choices = [
        dataclasses.replace(one, estimate=dataclasses.replace(one.estimate, compute=seconds))
        for seconds in (1.0, 1.2, 1.4, 2.1, 9.0)
    ]
    looking.choices[-1] = dataclasses.replace(looking.choices[-1], exchange=least, told=())
    monkeypatch.setattr(
        looking,
        "_previewed",
        lambda one: one if one.told == () else dataclasses.replace(one, exchange=1.0, told=()),
    )
    looking.preview()
    assert [one.told is not None for one in looking.choices[:-1]] == asked


def test_pins_that_cost_most_are_left_out(monkeypatch):
    """Also of the layout that is best by its estimate, and not as it is pinned."""
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 1, "b", "f")
    (one,) = looking.choices
    without = looking._pins(one, Way(free=True))
    assert without != one.pins
    best, other = (dataclasses.replace(one.estimate, compute=seconds) for seconds in (1.0, 1.5))
    looking.choices = [
        dataclasses.replace(one, estimate=best),
        dataclasses.replace(one, estimate=other, outs=()),  # another program
    ]
    sent = {best: 5.0, other: 1.0}
    monkeypatch.setattr(
        looking,
        "_previewed",
        lambda one: dataclasses.replace(
            one, exchange=0.0 if one.pins == without else sent[one.estimate], told=()
        ),
    )
    looking.preview()
    assert sorted(one.predicted for one in looking.choices) == [1.0, 1.5, 2.5, 6.0]


@pytest.mark.parametrize(
    ("named", "asked"),
    [
        (1, [True, True, True, False, False]),  # the last one is slower than the best of them
        (2, [True, True, True, True, False]),
    ],
)
def test_shardy_is_asked_of_the_experts_that_seem_best(monkeypatch, named, asked):
    """What was found seems faster than they are; the best of them are known all the same."""
    monkeypatch.setattr(choosing, "_LOOKED_AT", 1)
    monkeypatch.setattr(choosing, "_OF_EACH", 1)
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 1, "b", "f")
    looking.named = named
    one = looking.choices[0]
    looking.choices = [
        dataclasses.replace(
            one, name=name, estimate=dataclasses.replace(one.estimate, compute=seconds)
        )
        for name, seconds in (("found", 1.0), ("FSDP", 2.0), ("DP", 2.5), ("TP", 3.2), ("2D", 9.0))
    ]
    sent = {1.0: 0.0, 2.0: 3.0, 2.5: 0.5, 3.2: 0.1}
    monkeypatch.setattr(
        looking,
        "_previewed",
        lambda one: dataclasses.replace(one, exchange=sent[one.estimate.compute], told=()),
    )
    looking.preview()
    assert [one.told is not None for one in looking.choices] == asked


@pytest.mark.parametrize(
    ("sent", "seconds", "asked"), [(0.6, 1.4, True), (0.6, 1.6, False), (0.3, 1.4, False)]
)
def test_shardy_is_asked_of_another_mesh_that_is_near(monkeypatch, sent, seconds, asked):
    """Of each mesh some are timed, but where exchanges, which only add, would make up for none.

    Nor where it is behind what is known of as many as may be compiled.
    """
    monkeypatch.setattr(choosing, "_LOOKED_AT", 1)
    first, second = ({"data": 4, "model": 2}, {"data": 2, "model": 4})
    looking = looking_at(spmd.make_mesh(first), 1, "b", "f")
    looking.choices *= 3
    other = looking_at(spmd.make_mesh(second), 1, "b", "f")
    looking._estimators |= other._estimators
    (one,) = other.choices
    estimate = dataclasses.replace(one.estimate, compute=seconds)
    looking.choices.append(dataclasses.replace(one, estimate=estimate))
    monkeypatch.setattr(
        looking, "_previewed", lambda one: dataclasses.replace(one, exchange=sent, told=())
    )
    looking.preview()
    assert [one.told is not None for one in looking.choices] == [True, True, False, asked]


@pytest.mark.parametrize(
    ("top", "asked"), [(1, [True, True, False, False]), (2, [True, True, True, True])]
)
def test_shardy_is_asked_of_as_many_as_may_be_compiled(monkeypatch, top, asked):
    """Twice as many as are wanted, since some may not fit; of others, as far as they may be best.

    Of two that are wanted the first four are timed, though exchanges make none of them slower.
    """
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), top, "b", "f")
    one = looking.choices[0]
    looking.choices = [
        dataclasses.replace(one, estimate=dataclasses.replace(one.estimate, compute=seconds))
        for seconds in (1.0, 1.1, 1.2, 1.3)
    ]
    monkeypatch.setattr(
        looking, "_previewed", lambda one: dataclasses.replace(one, exchange=0.0, told=())
    )
    looking.preview()
    assert [one.told is not None for one in looking.choices] == asked


def test_what_lies_as_another_is_asked_of_where_it_seems_faster(monkeypatch):
    """One with the figures of the first comes later, and may lie as what is asked of before it.

    The last one lies so as well, and is behind; what it might take is less than is known of two.
    """
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 1, "b", "f")
    one = looking.choices[0]
    elsewhere = tuple(((),) * len(entries) for entries in one.ins)
    assert elsewhere != one.ins
    looking.choices = [
        dataclasses.replace(
            one, ins=ins, estimate=dataclasses.replace(one.estimate, compute=seconds)
        )
        for seconds, ins in ((1.0, one.ins), (1.0, elsewhere), (1.1, elsewhere), (1.2, elsewhere))
    ]
    monkeypatch.setattr(
        looking, "_previewed", lambda one: dataclasses.replace(one, exchange=0.5, told=())
    )
    looking.preview()
    assert [one.told is not None for one in looking.choices] == [True, True, True, False]


def test_what_has_the_figures_of_another_is_not_asked_of_again(monkeypatch):
    """It may well be the same program, and seems to be better only as long as it is not known.

    The last one is known, far behind, and says that exchanges may add nothing.
    """
    monkeypatch.setattr(choosing, "_LOOKED_AT", 2)
    monkeypatch.setattr(choosing, "_OF_EACH", 1)
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 1, "b", "f")
    one = looking.choices[0]
    looking.choices = [
        dataclasses.replace(one, estimate=dataclasses.replace(one.estimate, compute=seconds))
        for seconds in (1.0, 1.0, 1.4, 1.4, 9.0)
    ]
    looking.choices[-1] = dataclasses.replace(looking.choices[-1], exchange=0.0, told=())
    monkeypatch.setattr(
        looking,
        "_previewed",
        lambda one: one if one.told == () else dataclasses.replace(one, exchange=1.0, told=()),
    )
    looking.preview()
    assert [one.told is not None for one in looking.choices[:-1]] == [True, False, True, False]


@pytest.mark.parametrize("other", [{"data": 2, "model": 2}, {"data": 4, "model": 1}])
def test_equal_figures_are_compiled_later(monkeypatch, other):
    """Rows over one axis or the other are one program; over both they are not, though slower.

    Nor are they more on another mesh.
    """
    looking = looking_at(spmd.make_mesh({"data": 2, "model": 2}), 2, "b", "")
    (one,) = looking_at(spmd.make_mesh(other), 2, "b", "").choices
    looking.choices.append(one)
    for orders, seconds in (("", "b"), 1.0), (("b", "b"), 1.1):
        (one,) = looking_at(spmd.make_mesh({"data": 2, "model": 2}), 2, *orders).choices
        estimate = dataclasses.replace(one.estimate, compute=seconds)
        looking.choices.append(dataclasses.replace(one, estimate=estimate))
    seen = []

    def report(one, *_):
        seen.append(one.estimate.seconds)
        return dataclasses.replace(one, report=types.SimpleNamespace(time=None, memory=None))

    monkeypatch.setattr(choosing, "_compiled", report)
    looking.compile()
    assert seen == [1.0, 1.1]


@pytest.mark.parametrize(
    ("compiled", "estimated", "asked"),
    [
        ([1, 1, 1, 1, 1], [1] * 5, 2),
        ([9, 1, 9, 1, 1], [1] * 5, 4),
        ([9, 9, 9, 9, 1], [1] * 5, 4),  # at most twice as many
        ([9, 1, 1, 1, 1], [1, 1, 9, 9, 9], 2),  # the others do not even seem to fit
        ([None, None, 1, 1, 1], [1] * 5, 4),  # those that the compiler refuses
    ],
)
def test_what_does_not_fit_as_compiled_is_none_of_the_best(monkeypatch, compiled, estimated, asked):
    """Others take its place, as long as they seem to fit: two of five are wanted."""
    looking = looking_at(spmd.make_mesh({"data": 4, "model": 2}), 2, "b", "f")
    one = looking.choices[0]
    looking.choices = [
        dataclasses.replace(
            one,
            ins=(i,),  # another program
            told=(),
            estimate=dataclasses.replace(one.estimate, compute=1.0 + i / 100, peak=peak),
        )
        for i, peak in enumerate(estimated)
    ]
    looking.rules = Rules(budget=2.0)
    seen = []

    def report(one, *_):
        (i,) = one.ins
        seen.append(i)
        if compiled[i] is None:
            return dataclasses.replace(one, failure="out of memory", needed=9)
        memory = types.SimpleNamespace(peak=compiled[i])
        return dataclasses.replace(one, report=types.SimpleNamespace(time=None, memory=memory))

    monkeypatch.setattr(choosing, "_compiled", report)
    monkeypatch.setattr(choosing, "planned", lambda *_: None)
    monkeypatch.setattr(
        choosing, "previewed", lambda *_, **__: types.SimpleNamespace(collectives=())
    )
    looking._compile_first(range(5), 2)
    assert seen == [*range(asked)]


@pytest.mark.parametrize(("budget", "first"), [(1.0, 1.1), (3.0, 1.0), (None, 1.0)])
def test_of_what_does_not_fit_less_comes_first(monkeypatch, budget, first):
    """The slower one of two, which needs half as much, where the budget is too small for both."""
    looking = looking_at(spmd.make_mesh({"data": 2, "model": 2}), 1, "b", "f")
    (other,) = looking_at(spmd.make_mesh({"data": 2, "model": 2}), 1, "b", "b").choices
    for one, seconds, peak in ((looking.choices.pop(), 1.0, 3.0), (other, 1.1, 1.5)):
        estimate = dataclasses.replace(one.estimate, compute=seconds, peak=peak)
        looking.choices.append(dataclasses.replace(one, estimate=estimate))
    looking.rules = Rules(budget=budget)
    looking.preview()
    assert min(looking.choices, key=looking._rank).estimate.compute == first


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
