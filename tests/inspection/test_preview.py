"""The ledger before compilation: against hand counts, in its forms, and where it cannot be had."""

import json
from pathlib import Path

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
import programs
import pytest

import spmd
from spmd import P
from spmd.inspection import Report, _preview, _trips, preview

CPU = [name for name, (_, backends, _) in programs.PROGRAMS.items() if "cpu" in backends]

#: Programs for which compilers send something else than the shardings ask for.
EXCEPTIONS = {
    # The partitioner on CPU sums over one axis after the other; TPU sums over both at once.
    "loss_over_the_mesh": "sums apart",
    # CPU widens sums of bfloat16 to float32.
    "bfloat_sum": "widened",
    # Shardy of JAX 0.10 knows no rule that makes an FFT gather its dimension.
    **({} if programs.NEW else {"sharded_fft": "no rule"}),
}


def f32(*dims):
    """The shape of an array of floats."""
    return jax.ShapeDtypeStruct(dims, jnp.float32)


@pytest.fixture(scope="module")
def grid():
    """A mesh of 8 devices."""
    return spmd.make_mesh({"data": 4, "model": 2})


# Against hand counts


def _foreseen(name):
    lowered, rows = programs.PROGRAMS[name][0](programs.cpu_target())
    return preview(lowered), rows


def _by_exchange(pairs):
    sums = {}
    for key, wire in pairs:
        sums[key] = None if wire is None or sums.get(key, 0) is None else sums.get(key, 0) + wire
    return sums


def _predicted_bytes(found):
    return _by_exchange(((c.kind, c.mesh_axes), c.total_wire_bytes) for c in found.collectives)


def _counted_bytes(rows):
    # A bfloat16 row counts the width on the wire, a combined one the sum of its parts.
    return _by_exchange(
        ((r.kind, r.axes), None if r.times is None else r.times * r.wire) for r in rows
    )


@pytest.mark.parametrize("name", [name for name in CPU if name not in EXCEPTIONS])
def test_bytes_are_what_was_counted_by_hand(name):
    """Wire bytes of each kind and axis are the hand count's, loops and branches included."""
    found, rows = _foreseen(name)
    predicted, counted = _predicted_bytes(found), _counted_bytes(rows)
    assert predicted.keys() == counted.keys()
    for key, wire in counted.items():
        # Combined exchanges round up once, and not each.
        slack = sum(r.combined for r in rows if (r.kind, r.axes) == key)
        assert predicted[key] == wire or abs(predicted[key] - wire) < slack, key


@pytest.mark.parametrize("name", CPU)
def test_each_exchange_has_a_counted_line_and_way(name):
    """Source, direction, loop and branch of each prediction are those of a counted row."""
    found, rows = _foreseen(name)
    lines = Path(programs.__file__).read_text().splitlines()
    for one in found.collectives:
        assert one.source.file == programs.__file__
        marker = lines[one.source.line - 1].partition("# here: ")[2]
        near = [r for r in rows if marker in r.at and r.kind == one.kind] or [
            r for r in rows if r.kind == one.kind and name in PLACES
        ]
        assert near, (one.kind, marker)
        assert one.direction in {r.way for r in near}
        assert one.conditional in {r.conditional for r in near}


#: Where the prediction names another line than the compiler: that of the value that is resharded.
PLACES = {"swapped_axes"}


def test_what_cpu_widens_is_half_as_wide():
    """A sum of bfloat16 is predicted as such, and CPU sends twice the bytes."""
    found, (row,) = _foreseen("bfloat_sum")
    (one,) = found.collectives
    assert (one.dtype, 2 * one.wire_bytes) == ("bf16", row.wire)


def test_a_sum_over_the_whole_mesh_is_one():
    """A number that is summed over both axes crosses both at once, as on TPU."""
    found, _ = _foreseen("loss_over_the_mesh")
    (one,) = found.collectives
    assert (one.kind, one.mesh_axes, one.group_size) == ("all-reduce", ("data", "model"), 8)
    assert (one.payload_bytes, one.wire_bytes) == (4, 7)


def test_the_same_gather_twice_is_one(grid):
    """Two uses of one gathered value in a block take one gather."""

    def f(x):
        y = spmd.with_sharding_constraint(x, P("data"))
        whole = spmd.with_sharding_constraint(y, P(None))
        again = spmd.with_sharding_constraint(y, P(None))
        return jnp.outer(whole, again)

    found = preview(spmd.pjit(f, P("data"), P(), mesh=grid), f32(8))
    assert [(c.kind, c.mesh_axes) for c in found.collectives] == [("all-gather", ("data",))]


def test_functions_that_call_functions(grid):
    """Calls multiply: 6 functions, each of which calls the next one twice, sum 64 times."""

    def total(x):
        return jnp.sum(x)

    f = total
    for _ in range(6):
        f = jax.jit(lambda x, inner=f: inner(x) + inner(x))
    found = preview(spmd.pjit(f, P("data"), P(), mesh=grid), f32(8))
    assert {c.kind for c in found.collectives} == {"all-reduce"}
    assert found.total.executions == 2**6


# Loops


@settings(max_examples=200, deadline=None)
@given(
    way=st.sampled_from(["LT", "LE", "GT", "GE"]),
    start=st.integers(-20, 20),
    bound=st.integers(-20, 20),
    step=st.integers(-5, 5).filter(bool),
)
def test_trips_are_those_of_the_loop(way, start, bound, step):
    """The formula counts what a loop does, and knows when a loop would not end."""
    holds = {
        "LT": lambda i: i < bound,
        "LE": lambda i: i <= bound,
        "GT": lambda i: i > bound,
        "GE": lambda i: i >= bound,
    }[way]
    i, count = start, 0
    while holds(i) and count < 1000:
        i, count = i + step, count + 1
    # A loop that starts outside of its bound does not run, whichever way it counts.
    towards = (step > 0) == (way in ("LT", "LE"))
    assert _trips._count(way, start, bound, step) == (count if towards else None)


def test_a_loop_of_unknown_length(grid):
    """What runs as often as the data say has no known executions, and makes a lower bound."""

    def f(x):
        return jax.lax.while_loop(
            lambda v: jnp.sum(v) < 100.0, lambda v: v + jnp.sum(v, 0, keepdims=True), x
        )

    found = preview(spmd.pjit(f, P("data"), P("data"), mesh=grid), f32(8, 6))
    assert {c.executions for c in found.collectives} == {None}
    assert all(c.in_loop for c in found.collectives)
    assert found.total.unknown == len(found.collectives) > 0


# Forms


@pytest.fixture(scope="module")
def product(grid):
    """A lowered product whose sum crosses the axis model."""
    f = spmd.pjit(lambda x, w: x @ w, (P("data", "model"), P("model")), P("data"), mesh=grid)
    return f.lower(f32(64, 32), f32(32, 16))


def test_it_is_a_report_without_what_only_a_compiler_knows(product):
    """Name, mesh and collectives are there; cost and memory are not, and the report says so."""
    found = product.preview()
    assert isinstance(found, Report)
    assert (found.name, dict(found.mesh)) == ("<lambda>", {"data": 4, "model": 2})
    assert (found.num_devices, found.backend) == (8, "cpu")
    assert (found.predicted, found.memory, found.stand_in) == (True, None, False)
    (one,) = found.collectives
    assert (one.kind, one.mesh_axes, one.payload_bytes) == ("all-reduce", ("model",), 16 * 16 * 4)
    assert one.source.file == __file__


def test_it_says_what_the_compiler_says(product):
    """Compiled, the same product has the same exchange at the same line."""
    compiled, found = product.compile().report(), product.preview()
    assert not compiled.predicted
    assert found.totals("kind", "axis", "line") == compiled.totals("kind", "axis", "line")


def test_functions_and_stages_give_the_same(grid):
    """A function with its arguments, its stages, and JAX's stage are all previewed alike."""
    f = spmd.pjit(lambda x: jnp.sum(x), P("data"), mesh=grid)
    low = f.lower(f32(8))
    found = low.preview()
    assert len(found.collectives) == 1
    assert preview(f, f32(8)) == found == spmd.preview(f.trace(f32(8)))
    assert preview(low.jax_stage) == found


def test_a_mesh_without_devices():
    """An abstract mesh is enough: nothing is compiled."""
    mesh = AbstractMesh((64, 8), ("data", "model"))
    found = preview(spmd.pjit(lambda x: jnp.sum(x), P("data"), mesh=mesh), f32(512))
    (one,) = found.collectives
    assert (one.group_size, found.num_devices, found.backend) == (64, 512, "any backend")


def test_as_text(product):
    """The head says that it is predicted, and nothing is said about cost or memory."""
    text = str(product.preview())
    assert text.splitlines()[1] == (
        "predicted, before compilation: compilers combine, move and replace exchanges"
    )
    assert "FLOP" not in text
    assert "Memory" not in text
    assert "FLOP" in str(product.compile().report())


def test_as_json(product):
    """Written and read it is an equal report, still predicted; older files are not."""
    found = product.preview()
    data = json.loads(json.dumps(found.to_json()))
    assert data["predicted"] is True
    assert Report.from_json(data) == found
    del data["predicted"]
    assert not Report.from_json(data).predicted


def test_as_figures(product):
    """Loggers get the collectives and no cost."""
    figures = product.preview().scalars()
    assert figures["collectives/total/wire_bytes"] == 1024
    assert not any(name.startswith(("cost/", "memory/")) for name in figures)


def test_against_the_compiled_report(product):
    """A diff tells that one is predicted, and compares no cost."""
    found = spmd.diff(product.preview(), product.compile().report())
    assert ("predicted", "yes", "no") in [(d.what, d.a, d.b) for d in found.header]
    assert found.cost == ()


# Refusals


def test_a_compiled_program_has_a_report(product):
    """What is compiled is refused, with what to call instead."""
    with pytest.raises(spmd.ReportError) as error:
        preview(product.compile())
    assert str(error.value) == (
        "preview is for what is not compiled yet.\n"
        "  got       spmd.Compiled\n"
        "  fix       report(compiled), which says what the program does"
    )


def test_passes_that_are_missing(product, monkeypatch):
    """A jaxlib without the passes gets an error that names them."""
    monkeypatch.setattr(_preview, "_PASSES", ("sdy-see-the-future",))
    with pytest.raises(spmd.ReportError) as error:
        product.preview()
    lines = str(error.value).splitlines()
    assert lines[:2] == [
        "preview needs passes of Shardy that this jaxlib does not have.",
        "  expected  sdy-see-the-future",
    ]


def test_the_module_stays_as_it_is(product):
    """What is compiled later is what was lowered."""
    before = product.as_text(debug_info=True)
    product.preview()
    assert product.as_text(debug_info=True) == before
