"""The origins that a report holds: of which values, worked out when, and where there are none."""

import copy
import dataclasses
import gc
import logging
import pickle
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import pytest
from reports import ORIGINS, SMALL, report

import spmd
from spmd import P
from spmd.inspection import Origins, Report
from spmd.inspection.records.later import Later, known
from spmd.inspection.shardy import why as shardy_why

FILE = "test_origins.py"


def f32(*dims):
    """An array that is not there."""
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def step(batch, w):
    """Two products with a constraint between them; the second one sums over `model`."""
    h = jnp.tanh(batch["x"] @ w["up"])
    h = spmd.with_sharding_constraint(h, P("data", "model"))
    out = h @ w["down"]
    return {"out": out, "loss": jnp.mean(out**2)}


ARGUMENTS = {"x": f32(64, 16)}, {"up": f32(16, 32), "down": f32(32, 16)}


@pytest.fixture(scope="module")
def mesh():
    """Eight devices."""
    return spmd.make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def lowered(mesh):
    """The step, lowered."""
    specs = {"x": P("data")}, {"up": P(None, "model"), "down": P("model", None)}
    return spmd.pjit(step, in_axis_resources=specs, mesh=mesh).lower(*ARGUMENTS)


@pytest.fixture(scope="module")
def compiled(lowered):
    """The step, compiled once for all tests here."""
    return lowered.compile()


@pytest.fixture
def found(compiled):
    """A report of the step that nobody has asked anything."""
    return compiled.report()


@pytest.fixture
def asked(monkeypatch):
    """How often propagation ran for origins."""
    times = []
    propagate = shardy_why.propagate

    def counted(*args, **kwargs):
        times.append(args)
        return propagate(*args, **kwargs)

    monkeypatch.setattr(shardy_why, "propagate", counted)
    return times


# Which values


def test_arguments_and_outputs_are_those_of_why(lowered, found):
    """Each argument and output is there, with the records that `why` gives for its name."""
    values = found.origins.values
    assert [value.name for value in values if value.kind == "argument"] == [
        argument.path for argument in found.arguments
    ]
    outputs = [value for value in values if value.kind == "output"]
    assert [value.name for value in outputs] == ["result['loss']", "result['out']"]
    for value in values:
        if value.kind != "result":
            assert lowered.why(value.name).values == (value,)


def test_lines_of_collectives(lowered, found):
    """What a line with a collective makes is there as `why` says it; other lines are not."""
    lines = {one.source.line for one in found.collectives}
    made = [value for value in found.origins.values if value.kind == "result"]
    assert {value.source.line for value in made} == lines
    for line in lines:
        there = [value for value in made if value.source.line == line]
        assert there
        assert {*there} <= {*lowered.why(f"{FILE}:{line}").values}


def test_lines_with_most_bytes_come_first(found):
    """Lines stand in the order of the bytes that they put on the wire."""
    made = [str(value.source) for value in found.origins.values if value.kind == "result"]
    files = [name.rpartition(":") for name in found.totals("line")]
    assert [*dict.fromkeys(name.rpartition(":")[2] for name in made)] == [n for *_, n in files]


def test_alike_values_of_a_line_are_listed_once(mesh):
    """A line in a loop over layers makes the same values again: they stand there once."""

    def f(x, w):
        for _ in range(5):
            x = x @ w
        return x

    low = spmd.pjit(f, (P("data", "model"), P("model")), P("data", "model"), mesh=mesh).lower(
        f32(8, 4), f32(4, 4)
    )
    line = next(one.source.line for one in low.preview().collectives)
    every = low.why(f"{FILE}:{line}").values
    made = [value for value in low.preview().origins.values if value.kind == "result"]
    assert len(every) == 5
    assert len(made) < 5
    assert {(v.name, v.spec) for v in every} == {(v.name, v.spec) for v in made}


def test_limits(found, compiled, monkeypatch):
    """Only so many values are listed, what exchanges comes first, and the rest is counted."""
    whole = found.origins
    assert whole.left_out == 0
    monkeypatch.setattr(shardy_why, "MOST", {"argument": 2, "output": 1, "result": 100})
    monkeypatch.setattr(shardy_why, "OF_A_LINE", 1)
    few = compiled.report().origins
    kinds = [value.kind for value in few.values]
    assert kinds[:3] == ["argument", "argument", "output"]
    assert set(kinds[3:]) == {"result"}
    assert len(kinds[3:]) == len({value.source.line for value in few.values[3:]})
    assert len(few.values) + few.left_out == len(whole.values)


def test_what_exchanges_comes_first(mesh):
    """Of a line, first what has the operation of its collective, last numbers that JAX spreads."""
    f = spmd.pjit(lambda x, w: (2 * x) @ w + 1, (P("data", "model"), P("model")), mesh=mesh)
    made = [v for v in f.lower(f32(8, 16), f32(16, 2)).preview().origins.values if v.source]
    names = [(value.name, value.shape) for value in made if value.kind == "result"]
    assert names == [
        ("dot_general", (8, 2)),
        ("multiply", (8, 16)),
        ("add", (8, 2)),
        ("broadcast_in_dim", (8, 16)),
        ("broadcast_in_dim", (8, 2)),
    ]


# When


def test_worked_out_once_and_when_asked(compiled, asked):
    """A report alone, its text and its comparison work nothing out; asking does, once."""
    one = compiled.report()
    assert str(one)
    assert repr(one)
    assert one == compiled.report()
    assert one.scalars()
    assert not spmd.diff(one, one)
    assert not asked
    assert one.origins.values
    assert len(asked) == 1
    assert one.to_json()["origins"]["values"]
    assert "value-0" in one.to_html()
    assert one.origins is one.origins
    assert len(asked) == 1


@pytest.mark.parametrize(
    "through",
    [
        lambda one: pickle.loads(pickle.dumps(one)),
        copy.copy,
        copy.deepcopy,
        lambda one: Report.from_json(one.to_json()),
        lambda one: dataclasses.replace(one, excerpts=one.excerpts),
    ],
    ids=["pickle", "copy", "deepcopy", "json", "replace"],
)
def test_copies_have_them(through, compiled, asked):
    """However a report is copied, before or after anyone asked, its origins come along."""
    one = compiled.report()
    assert through(one).origins == one.origins
    assert through(one).origins.values
    assert through(one) == one
    assert len(asked) == 1


def test_origins_are_not_compared(compiled):
    """Two reports that differ in their origins alone are equal, and neither shows them."""
    bare = dataclasses.replace(SMALL, _origins=known(Origins()))
    assert bare == SMALL
    assert hash(bare) == hash(SMALL)
    assert bare.origins != SMALL.origins == ORIGINS
    assert "origins" not in repr(dataclasses.replace(SMALL))


@pytest.mark.slow
def test_the_program_is_let_go():
    """What origins are worked out of lives until they are asked for, and no longer."""

    class Program:
        pass

    program = Program()
    alive = weakref.ref(program)
    later = Later(lambda held=program: Origins(left_out=0 if held else 1))
    del program
    gc.collect()
    assert alive() is not None
    assert later.get() == Origins()
    gc.collect()
    assert alive() is None
    assert later.get() == Origins()


def test_an_interrupt_leaves_them_to_be_asked_for_again():
    """Who is interrupted while they are worked out can ask again."""
    answers = [KeyboardInterrupt(), ORIGINS]

    def make():
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    later = Later(make)
    with pytest.raises(KeyboardInterrupt):
        later.get()
    assert later.get() is ORIGINS


def test_several_threads_ask_once():
    """Threads that ask at once get the same records, worked out once."""
    ready = threading.Barrier(4)
    made, got = [], []

    def make():
        made.append(True)
        time.sleep(0.05)  # in which the others come
        return Origins(left_out=len(made))

    later = Later(make)

    def ask():
        ready.wait()
        got.append(later.get())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [True]
    assert got == [Origins(left_out=1)] * 4


# Where there are none


def test_a_preview_has_them(lowered):
    """A preview says the same of arguments and outputs as the report does."""
    values = lowered.preview().origins.values
    outer = [value for value in values if value.kind != "result"]
    assert outer == [v for v in lowered.compile().report().origins.values if v.kind != "result"]


def test_a_program_that_was_compiled_elsewhere(compiled, tmp_path):
    """Where the lowered program is not at hand, that is what the report says."""
    shape = f32(8)
    foreign = jax.jit(jnp.sin).lower(shape).compile()
    assert spmd.report(foreign).origins == Origins(missing=shardy_why.NOT_AT_HAND)
    compiled.save(tmp_path / "step.spmd")
    loaded = spmd.bundle.load(tmp_path / "step.spmd")
    assert loaded.report().origins == Origins(missing=shardy_why.NOT_AT_HAND)


def test_a_lowered_program_of_jax(mesh):
    """What `jax.jit` lowered has origins, and those of a function as well."""
    by_data = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    f = jax.jit(lambda x: x + 1, in_shardings=by_data)
    for one in (spmd.report(f.lower(f32(8, 4))), spmd.report(f, f32(8, 4))):
        argument, output = one.origins.values
        assert (argument.name, argument.spec) == ("x", (("data",), ()))
        assert output.origins[0].annotation == argument.annotation


def test_one_device():
    """Without a mesh nothing is split, and nothing is listed."""
    one = spmd.report(jax.jit(jnp.sin), f32(8))
    assert one.origins == Origins(missing="The program has no mesh, over which something is split.")


def test_the_older_partitioner(mesh):
    """Without Shardy there are none, and the report says why."""
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        one = spmd.report(spmd.pjit(lambda x: x + 1, P("data"), mesh=mesh), f32(8))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert one.origins == Origins(
        missing="report was lowered without Shardy, whose passes say where a sharding comes from."
    )


def test_passes_that_are_missing(found, monkeypatch):
    """A jaxlib without the passes costs the origins, and not the report."""
    monkeypatch.setattr("spmd.inspection.shardy.propagation._PASSES", ("sdy-no-such-pass",))
    assert found.origins == Origins(
        missing="report needs passes of Shardy that this jaxlib does not have."
    )


def test_what_fails_costs_the_origins_alone(compiled, monkeypatch, caplog):
    """An error that nobody foresaw is in the log; the report and its page are there."""

    def broken(*args):
        raise IndexError("no such thing")

    one = compiled.report()
    monkeypatch.setattr(shardy_why, "describe", broken)
    with caplog.at_level(logging.WARNING):
        assert "They could not be worked out; the log says why." in one.to_html()
        assert one.to_json()["origins"]["values"] == []
    (record,) = caplog.records
    assert record.getMessage() == "report: nothing says where its shardings come from"
    assert record.exc_info[1].args == ("no such thing",)


def test_a_stage_that_cannot_be_read_costs_the_origins_alone(lowered, monkeypatch, caplog):
    """So does an error before anything is asked."""

    def broken(*args, **kwargs):
        raise RuntimeError("no module")

    monkeypatch.setattr("spmd.inspection.shardy.passes.module_of", broken)
    with caplog.at_level(logging.WARNING):
        later = shardy_why.origins_later(lowered, (), subject="report")
    assert later.get().missing == "They could not be worked out; the log says why."
    assert len(caplog.records) == 1


def test_a_report_made_by_hand():
    """A report that says nothing of origins has none."""
    assert report().origins.values == ()
    assert report().origins.missing == ("The report does not hold where its shardings come from.")
