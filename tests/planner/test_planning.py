"""spmd.plan: what it is asked, what it answers, and what it refuses."""

import dataclasses
import functools
import json
import math
import subprocess
import sys

from hardware import needs_libtpu, require_libtpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import P
from spmd.inspection.records.plan import added_by_compiler
from spmd.inspection.records.sizes import show_seconds
from spmd.inspection.timing.chips import CHIPS
from spmd.planner import api, cache, recorded
from spmd.planner.asked import factorisations
from spmd.planner.choose import choose
from spmd.planner.tiers import compiled, previewed
from spmd.planner.tiers.choice import Progress, program_of
from spmd.planner.verify import Program

B, D, F = 64, 32, 128
f32 = jnp.float32


def step(w, batch):
    """A gradient step of a layer."""

    def loss(w):
        return jnp.mean((batch["x"] @ w["up"] @ w["down"] - batch["y"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w)), loss(w)


W = {"down": jax.ShapeDtypeStruct((F, D), f32), "up": jax.ShapeDtypeStruct((D, F), f32)}
BATCH = {"x": jax.ShapeDtypeStruct((B, D), f32), "y": jax.ShapeDtypeStruct((B, D), f32)}


@pytest.fixture(scope="module")
def mesh():
    """Of eight devices."""
    return spmd.make_mesh({"data": 4, "model": 2})


def plan(mesh, **options):
    """The plan of the step, which nothing keeps."""
    options = {"top": 0, "cache": False, "progress": False, **options}
    return spmd.plan(step, W, BATCH, mesh=mesh, **options)


def spec(found, name):
    """Where a plan puts an argument or a result."""
    return next(one.spec for one in (*found.arguments, *found.results) if one.name == name)


@pytest.mark.slow
def test_a_fixed_path_stands_for_all_below_it(mesh):
    """The longer path counts, and what is fixed is marked."""
    found = plan(mesh, fixed={"batch": P("data"), "batch['y']": P(None, "model"), "result[1]": P()})
    assert spec(found, "batch['x']") == (("data",), ())
    assert spec(found, "batch['y']") == ((), ("model",))
    marked = [one.name for one in (*found.arguments, *found.results) if one.is_fixed]
    assert marked == ["batch['x']", "batch['y']", "result[1]"]


def agreement(w, batch):
    """The gradient of how well each row tells its own pair from all others, both ways."""

    def told(scores):
        own = jnp.take_along_axis(scores, jnp.arange(len(scores))[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(scores, -1) - own)

    def loss(w):
        scores = (batch["x"] @ w["x"]) @ (batch["y"] @ w["y"]).T
        return told(scores) + told(scores.T)

    return jax.grad(loss)(w)


@pytest.mark.slow
@needs_libtpu
def test_a_layout_may_be_better_without_constraints(monkeypatch):
    """Where they ask for far more exchanges: propagation finds what the compiler exchanges less."""
    w, batch = ({n: jax.ShapeDtypeStruct((size, 256), f32) for n in "xy"} for size in (256, 8192))
    told = []
    for fewer in (previewed._FEWER, 0.0):
        monkeypatch.setattr(previewed, "_FEWER", fewer)
        options = {"topology": "v5e:4x2", "axes": ("data", "model"), "top": 1, "cache": False}
        found = spmd.plan(agreement, w, batch, progress=False, **options)
        assert bool(found.pins) == (not fewer)
        assert found.chosen.time is not None
        told.append((found.predicted, found.seconds, found.chosen.sent))
    assert all(least < 0.5 * most for least, most in zip(*told, strict=True))


@pytest.mark.slow
@pytest.mark.soak
@needs_libtpu
def test_a_layout_without_pins_is_taken_where_it_seems_best():
    """However little it seems to save: what the compiler makes of it takes less than experts do."""
    w, batch = ({n: jax.ShapeDtypeStruct((size, 512), f32) for n in "xy"} for size in (512, 32768))
    options = {"topology": "v5e:4x4", "axes": ("data", "model"), "top": 1, "cache": False}
    found = spmd.plan(agreement, w, batch, progress=False, **options)
    experts = [one.time for one in found.candidates if one.time and one.name != "found"]
    assert (found.chosen.name, found.pins) == ("found", ())
    assert found.seconds < min(one.seconds for one in experts)
    # Experts are compiled without pins as well, if these seem to cost much; this one never has any.
    rows, whole = P(("data", "model")), P()
    data_parallel = spmd.pjit(
        agreement,
        mesh=spmd.topology("v5e:4x4", {"data": 16, "model": 1}),
        in_axis_resources=(whole, rows),
        out_axis_resources=whole,
    )
    assert found.seconds < 0.9 * spmd.report(data_parallel.lower(w, batch)).time.seconds


@pytest.mark.slow
def test_an_axis_that_must_not_split_a_dimension_does_not(mesh):
    """By path and dimension, by a pair, or by a name that the user gave."""
    tied = ("batch['x']:0", "batch['y']:0")
    for never in ((tied[0], "data"), (("batch['y']", 0), "data"), ("rows", "data")):
        found = plan(mesh, never=[never], classes={"rows": "batch['x']:0"})
        for one in found.candidates:
            assert not {"rows", *tied} & {*one.orders["data"]}


@pytest.mark.slow
def test_candidates_differ_in_a_figure(mesh):
    """Several spellings of one layout, which is all that people could see, are one row."""
    rows = [
        (one.name, *one.axes.items(), one.predicted, one.estimated_peak, one.sent)
        for one in plan(mesh).candidates
    ]
    assert len(rows) == len({*rows}) > 1


@pytest.mark.slow
def test_a_program_is_one_row_with_the_names_of_its_experts(mesh):
    """Other layouts, and other figures of the first tier, may be one program all the same."""
    program = Program(function=step, args=(W, BATCH), options={})
    first, other, *_ = choose(program, [mesh], CHIPS["v5e"], top=0, seeds=False).choices
    figures = dataclasses.replace(first.estimate, memory=1.0)
    names = ("Megatron + sequence", "found", "Megatron", "found")
    twins = [dataclasses.replace(first, name=name, estimate=figures) for name in names]
    expert = dataclasses.replace(other, name="FSDP")
    rows = [*recorded._candidates([first, expert, *twins, other], {})]
    assert [(one.name, one.same) for one in rows] == [
        ("found", ("Megatron", "Megatron + sequence")),
        ("FSDP", ()),
    ]
    assert rows[0].memory == first.estimate.memory
    # What was pinned in another way, or has another mesh, is another program.
    others = dataclasses.replace(first, pins=()), dataclasses.replace(first, mesh=mesh.devices.size)
    assert len({program_of(one) for one in (first, *others)}) == 3


def test_without_a_compile_nothing_is_verified(mesh):
    """`top=0` answers with the prediction, and says so."""
    found = plan(mesh)
    assert found.verified == ""
    assert found.report is None
    assert found.seconds == found.predicted > 0


@pytest.mark.slow
def test_stand_ins_verify_bytes(mesh):
    """A CPU's compiler tells what is sent, and no time of a TPU."""
    found = plan(mesh, top=1)
    assert found.verified == "bytes"
    assert found.chosen.sent == found.report.total.wire_bytes
    assert found.chip == "v5e"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 4, "model": 2}, {"data": 2, "model": 2, "more": 2}])
def test_stand_ins_are_planned_as_hardware(sizes):
    """With the links of a slice, and sums of bf16 as a TPU's compiler sends them.

    So a layout is predicted the same on CPU devices as on the chips that they stand in for.
    """
    require_libtpu()
    weights = {name: jax.ShapeDtypeStruct((256, 256), jnp.bfloat16) for name in ("down", "up")}
    batch = {name: jax.ShapeDtypeStruct((512, 256), jnp.bfloat16) for name in ("x", "y")}
    meshes = spmd.make_mesh(sizes), spmd.topology("v5e:2x4", sizes)
    here, there = (
        spmd.plan(step, weights, batch, mesh=mesh, chip="v5e", top=0, cache=False, progress=False)
        for mesh in meshes
    )
    assert here.chosen.orders == there.chosen.orders
    assert here.predicted == pytest.approx(there.predicted)
    assert [one.predicted for one in here.candidates] == pytest.approx(
        [one.predicted for one in there.candidates]
    )


@pytest.mark.slow
def test_a_plan_for_the_slice_of_stand_ins_runs_on_them(mesh):
    """Compiled for the hardware that has the shape of the mesh, and run on the mesh."""
    require_libtpu()
    found = plan(mesh, topology="v5e:2x4", top=1)
    assert found.verified == "time"
    assert dict(found.axes) == dict(mesh.shape)
    rng = np.random.default_rng(0)
    given = jax.tree.map(lambda one: rng.standard_normal(one.shape, np.float32), (W, BATCH))
    with mesh:
        ours = spmd.pjit(step, plan=found)(*found.place(*given))
    assert {*ours[1].devices()} <= {*mesh.devices.flat}
    theirs = jax.jit(step)(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


@pytest.mark.slow
def test_what_a_compiler_adds_to_exchanges_counts(mesh, monkeypatch, tmp_path):
    """Where it sends thrice the bytes, two thirds of its exchanges are not predicted."""
    compile_one = compiled._compiled

    def sending(one, lowered, chip):
        one = compile_one(one, lowered, chip)
        times = 3 if one.predicted == plain.predicted else 1
        time = one.report.time
        longer = dataclasses.replace(time, exchanges=time.exchanges * times)
        return dataclasses.replace(
            one,
            report=dataclasses.replace(
                one.report, collectives=one.report.collectives * times, time=longer
            ),
        )

    def wide(*dims):
        return jax.ShapeDtypeStruct(dims, f32)

    weights = {"down": wide(4096, 1024), "up": wide(1024, 4096)}
    batch = {"x": wide(16384, 1024), "y": wide(16384, 1024)}

    def planned():
        return spmd.plan(step, weights, batch, mesh=mesh, top=2, cache=False, progress=False)

    plain = planned()
    assert (plain.chosen.name, plain.chosen.added) == ("found", 0)
    assert plain.seconds == plain.predicted
    monkeypatch.setattr(compiled, "_compiled", sending)
    other = planned()
    # Another one is chosen, whose prediction is longer.
    assert other.chosen.orders != plain.chosen.orders
    assert other.predicted > plain.predicted
    found = next(one for one in other.candidates if one.orders == plain.chosen.orders)
    assert found.told == plain.chosen.sent
    assert found.added == pytest.approx(2 * plain.chosen.time.exchange)
    assert found.seconds == pytest.approx(found.predicted + found.added)
    assert "of exchanges that the compiler adds" in str(other)
    assert "of exchanges that the compiler adds" not in str(plain)
    other.save(tmp_path / "plan.html")
    both = f"{show_seconds(found.predicted)} + {show_seconds(found.added)}"
    assert both in (tmp_path / "plan.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("sent", "added"), [(100, 0), (101, 0), (90, 0), (200, 5), (0, 0)])
def test_bytes_above_two_percent_are_added(sent, added):
    """Their share of the exchanges; fewer bytes take nothing off."""
    assert added_by_compiler(100, sent, 10.0) == added


def test_what_the_partitioner_warns_of_is_a_finding(capfd):
    """The plan's report has it; the standard error is the user's."""

    def split_anew(x):
        x = spmd.with_sharding_constraint(x, P("z"))
        return spmd.with_sharding_constraint(jnp.sin(x), P(None, ("z", "y")))

    cube = spmd.make_mesh({"x": 2, "y": 2, "z": 2})
    found = spmd.plan(split_anew, BATCH["x"], mesh=cube, top=1, cache=False, progress=False)
    assert "full-rematerialization" in {one.kind for one in found.report.findings}
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_planned_program_is_compiled_once_where_jax_keeps_programs(mesh, tmp_path):
    """The planner's compile is there for who runs the plan."""
    script = f"""
import jax, jax.numpy as jnp, spmd
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
told = []
jax.monitoring.register_event_listener(lambda name, **_: told.append(name.rpartition("/")[2]))
f = lambda x, w: jnp.tanh(x @ w)
args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
mesh = spmd.make_mesh({{"data": 4, "model": 2}})
found = spmd.plan(f, *args, mesh=mesh, top=1, cache=False, progress=False)
told.clear()
spmd.pjit(f, plan=found).lower(*args).compile()
print(sorted(one for one in told if one in ("cache_hits", "cache_misses")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=True
    )
    assert done.stdout == "['cache_hits']\n"


def test_factorisations_are_all_there():
    """Every way to write a count as an ordered product, once."""
    assert [*factorisations(8, 2)] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    for count in (1, 6, 16):
        found = [*factorisations(count, 3)]
        brute = {(a, b, c) for a in range(1, count + 1) for b in range(1, count + 1)
                 for c in range(1, count + 1) if a * b * c == count}  # fmt: skip
        assert len(found) == len({*found}) == len(brute)
        assert {*found} == brute


@pytest.mark.slow
def test_a_second_start_searches_nothing(mesh, tmp_path, monkeypatch):
    """A plan is found again by program and hardware; another budget or program is another plan."""
    monkeypatch.setenv("SPMD_PLAN_CACHE", str(tmp_path / "plans"))
    heard = []
    first = plan(mesh, cache=True, progress=heard.append)
    assert not any(one.kept for one in heard)
    searches, search = [], api.choose
    monkeypatch.setattr(api, "choose", lambda *a, **k: searches.append(a) or search(*a, **k))
    heard.clear()
    assert plan(mesh, cache=True, progress=heard.append) == first
    assert not searches
    assert heard == [Progress(first.tried, first.chosen.predicted, "", kept=True)]
    plan(mesh, cache=True, memory="1GB")
    assert len(searches) == 1
    plan(mesh)
    assert len(searches) == 2


@pytest.mark.slow
def test_a_broken_file_of_the_cache_is_no_plan(mesh, tmp_path, monkeypatch):
    """It is planned again, and a folder that cannot be written is none."""
    monkeypatch.setenv("SPMD_PLAN_CACHE", str(tmp_path))
    first = plan(mesh, cache=True)
    (file,) = tmp_path.glob("*.json")
    file.write_text(json.dumps({"schema": "spmd-plan/1"}))
    assert spec(plan(mesh, cache=True), "w['up']") == spec(first, "w['up']")
    assert len(json.loads(file.read_text())) > 1
    monkeypatch.setenv("SPMD_PLAN_CACHE", str(file / "no folder"))
    plan(mesh, cache=True)
    for nowhere in ("", "~a user that nobody is/plans"):
        monkeypatch.setenv("SPMD_PLAN_CACHE", nowhere)
        assert cache.folder() is None


def compiled_kept(folder):
    """The files of what compilers said."""
    return sorted(folder.glob("program-*.json"))


@pytest.mark.slow
def test_what_was_compiled_is_not_compiled_again(mesh, tmp_path, monkeypatch):
    """With another budget, after an interrupt, or with more of them: only what is new is."""
    monkeypatch.setenv("SPMD_PLAN_CACHE", str(tmp_path))
    first = plan(mesh, cache=True, top=1)
    assert first.compiles == len(compiled_kept(tmp_path)) > 0
    heard = []
    again = plan(mesh, cache=True, top=1, memory="1GB", progress=heard.append)
    assert heard
    assert not any(one.compiling for one in heard)
    assert (again.compiles, again.compiled, again.budget) == (0, 0.0, 10**9)
    assert again.report == first.report
    assert again.candidates == first.candidates
    more = plan(mesh, cache=True, top=3)
    assert more.compiles == len(compiled_kept(tmp_path)) - first.compiles > 0
    assert more.compiles > 1
    # An interrupt ends a plan, and what was compiled until then is there.
    for file in tmp_path.glob("*.json"):
        file.unlink()
    compile_one, asked = compiled._compiled, []

    def interrupted(*args):
        asked.append(args)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return compile_one(*args)

    with monkeypatch.context() as patched:
        patched.setattr(compiled, "_compiled", interrupted)
        assert not plan(mesh, cache=True, top=3).complete
    assert len(compiled_kept(tmp_path)) == 1
    assert plan(mesh, cache=True, top=3).compiles == more.compiles + first.compiles - 1
    # Who does not want it compiles, and keeps nothing.
    kept = compiled_kept(tmp_path)
    assert plan(mesh, top=1).compiles == first.compiles
    assert compiled_kept(tmp_path) == kept
    # What no report is in is compiled again.
    for file in kept:
        file.write_text("1")
    assert plan(mesh, cache=True, top=1, memory="2GB").compiles == first.compiles


def test_what_compilers_said_is_found_by_another_planner(mesh, tmp_path, monkeypatch):
    """It was read with the same code; a plan is made again."""
    chip, lowered = CHIPS["v5e"], spmd.pjit(jnp.sin, mesh=mesh).lower(1.0)
    files = [tmp_path / package / "file.py" for package in ("planner", "inspection")]
    for file in files:
        file.parent.mkdir()
        file.touch()
    monkeypatch.setattr(spmd, "__file__", str(tmp_path / "__init__.py"))

    def keys():
        monkeypatch.setattr(cache, "_sources", functools.cache(cache._sources.__wrapped__))
        return cache.key_of(()), cache.key_of_program(lowered, chip)

    first = keys()
    assert keys() == first
    files[0].write_text("another planner")
    second = keys()
    assert (second[0] == first[0], second[1] == first[1]) == (False, True)
    files[1].write_text("another reader")
    assert {*keys()}.isdisjoint({*first, *second})


@pytest.mark.slow
def test_other_lines_are_another_program(mesh, tmp_path, monkeypatch):
    """A plan and its report have the lines of their program: further down all is made anew.

    Where the planner is called from, and the process of a notebook, make no difference.
    """
    monkeypatch.setenv("SPMD_PLAN_CACHE", str(tmp_path))
    text, found = "import jax.numpy as jnp\ndef f(w, x):\n    return jnp.sum(jnp.tanh(x @ w))\n", []
    x = jax.ShapeDtypeStruct((64, 64), f32)
    wishes = {"mesh": mesh, "top": 1, "fixed": {"w": P("data")}, "progress": False}
    searches, search = [], api.choose
    monkeypatch.setattr(api, "choose", lambda *a, **k: searches.append(a) or search(*a, **k))

    def made(down, process, memory, text=text):
        space = {}
        file = tmp_path / f"ipykernel_{process}" / "source.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n" * down + text)
        exec(compile("\n" * down + text, str(file), "exec"), space)
        before = len(searches)
        found.append(spmd.plan(space["f"], x, x, memory=memory, **wishes))
        lines = {one.source.line - 3 for one in found[-1].report.collectives}
        return lines, len(searches) - before, found[-1].compiles > 0

    assert made(0, 7, "1GB") == ({0}, 1, True)
    assert made(0, 8, "1GB")[1] == 0
    assert made(0, 8, "2GB") == ({0}, 1, False)
    assert made(3, 8, "1GB") == ({3}, 1, True)
    assert made(0, 9, "1GB", text.replace("x @ w", "(x@w)"))[1] == 1
    assert made(0, 9, "1GB")[1] == 0


@pytest.mark.slow
def test_what_is_called_otherwise_is_another_program(mesh, tmp_path, monkeypatch):
    """The same operations with other containers, options or names of the function: other code."""
    monkeypatch.setenv("SPMD_PLAN_CACHE", str(tmp_path))

    def f(x, ws, m=None):
        return x @ ws[0] @ ws[1]

    x, ws = jax.ShapeDtypeStruct((64, 64), f32), (jax.ShapeDtypeStruct((64, 64), f32),) * 2
    fixed = {"x": P("data"), "ws[0]": P(None, "model"), "ws[1]": P("model")}
    codes = [
        spmd.plan(called, *args, mesh=mesh, top=0, fixed=fixed, progress=False, **options).code()
        for _ in range(2)
        for called, args, options in (
            (f, (x, ws), {}),
            (f, (x, [*ws]), {}),
            (f, (x, ws, None), {}),
            (f, (x, ws), {"keep_unused": True}),
            (functools.partial(f, m=None), (x, ws), {}),
            (f, (x, ws, "text"), {"static_argnums": 2}),
        )
    ]
    assert len({*codes}) == 6
    assert codes[:6] == codes[6:]
    assert len([*tmp_path.glob("*.json")]) == 6
    # Functions that a tree has are elsewhere in each start.
    keys = {cache.key_of((x, object())) for _ in range(3)}
    assert len(keys) == 1


@pytest.mark.slow
def test_one_of_several_functions_of_a_name_is_told_apart(mesh, tmp_path, monkeypatch):
    """What calls the planner may be a lambda, and so may the program be, in the same file."""
    monkeypatch.setenv("SPMD_PLAN_CACHE", str(tmp_path))
    x, found = jax.ShapeDtypeStruct((64, 64), f32), []
    wishes = {"mesh": mesh, "top": 1, "fixed": {"w": P("data")}, "progress": False}
    for down in (0, 3):
        text = (
            "\n" * down + "model = lambda w, x: jnp.sum(jnp.tanh(x @ w))\nask = lambda: plan(model)"
        )
        space = {"jnp": jnp, "plan": lambda one: spmd.plan(one, x, x, **wishes)}
        exec(compile(text, str(tmp_path / "lambdas.py"), "exec"), space)
        found.append({one.source.line for one in space["ask"]().report.collectives})
    assert found == [{1}, {4}]


@pytest.mark.slow
def test_code_is_kept_with_its_plan(mesh, tmp_path, monkeypatch):
    """It is worked out once on a disk, but for one that a time limit may have ended."""
    monkeypatch.setenv("SPMD_PLAN_CACHE", str(tmp_path))
    work_out, timeouts = api.inside_of, []

    def inside_of(*args, timeout, tell):
        timeouts.append(timeout)
        return work_out(*args, timeout=timeout, tell=tell)

    monkeypatch.setattr(api, "inside_of", inside_of)
    assert plan(mesh, cache=True, timeout=60).code() == plan(mesh, cache=True).code()
    assert timeouts == [60, None]
    found = plan(mesh, cache=True, timeout=60)
    assert found.code() == plan(mesh).code()
    assert timeouts == [60, None, None]
    assert found.inside.get().exact


@needs_libtpu
@pytest.mark.slow
def test_what_does_not_fit_is_not_compiled_again(tmp_path, monkeypatch):
    """What the compiler refuses for its memory is known the next time, with what it needs."""
    monkeypatch.setenv("SPMD_PLAN_CACHE", str(tmp_path))
    big = jax.ShapeDtypeStruct((2**17, 2**17), f32)
    found = []
    for memory in ("15GB", "14GB"):
        with pytest.raises(spmd.PlanError) as caught:
            spmd.plan(lambda w: jnp.tanh(w) @ w, big, topology="v5e:2x2", top=1, memory=memory,
                      progress=False)  # fmt: skip
        found.append((str(caught.value), compiled_kept(tmp_path)))
    assert found[0][1] == found[1][1] != []
    assert any(json.loads(one.read_text())["needed"] for one in found[0][1])


@pytest.mark.slow
def test_progress_tells_what_is_tried(mesh):
    """A callable hears of layouts, of the best one so far, and of compiles."""
    heard = []
    found = plan(mesh, top=1, progress=heard.append)
    assert heard[-1].tried == found.tried > 0
    assert any(one.compiling for one in heard)
    assert min(one.best for one in heard if one.best is not None) > 0


REFUSED = {
    "no mesh": ({}, spmd.MeshError, "needs a mesh or a topology"),
    "two meshes": ({"mesh": "m", "topology": "m"}, spmd.OptionError, "got a mesh twice"),
    "no such topology": ({"topology": "v5f:4x4"}, spmd.MeshError, "did you mean"),
    "unreadable memory": ({"mesh": "m", "memory": "14 gigs"}, spmd.OptionError, "memory"),
    "no memory": ({"mesh": "m", "memory": 0}, spmd.OptionError, "above 0"),
    "unknown path": (
        {"mesh": "m", "fixed": {"bach": P()}},
        spmd.ArgumentError,
        "did you mean 'batch'",
    ),
    "no division": (
        {"mesh": "m", "fixed": {"batch": P(None, ("data", "model"), "data")}},
        spmd.SpmdError,
        "twice",
    ),
    "rank": ({"mesh": "m", "fixed": {"batch": P(None, None, "data")}}, spmd.SpmdError, "batch"),
    "unknown axis": ({"mesh": "m", "fixed": {"batch": P("dta")}}, spmd.SpmdError, "dta"),
    "unknown class": (
        {"mesh": "m", "never": [("vocab", "data")]},
        spmd.ArgumentError,
        "no dimension 'vocab'",
    ),
    "never an axis": (
        {"mesh": "m", "never": [("batch['x']:0", "dat")]},
        spmd.ArgumentError,
        "did you mean 'data'",
    ),
    "fixed and never": (
        {"mesh": "m", "fixed": {"batch['y']": P("data")}, "never": [("batch['x']:0", "data")]},
        spmd.ArgumentError,
        r"batch\['y'\] as never= bars it",
    ),
    "never no pair": ({"mesh": "m", "never": ["x"]}, spmd.ArgumentError, "pairs"),
    "top": ({"mesh": "m", "top": -1}, spmd.OptionError, "cannot read top"),
    "timeout": ({"mesh": "m", "timeout": 0}, spmd.OptionError, "cannot read timeout"),
    "axes": ({"topology": "cpu:8", "axes": ("a", "a")}, spmd.OptionError, "each once"),
    "a misspelled option": (
        {"mesh": "m", "fix": {}},
        spmd.ArgumentError,
        "did you mean 'fixed'",
    ),
    "an option": ({"mesh": "m", "donate": 0}, spmd.ArgumentError, "did you mean 'donate_argnums'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(mesh, name):
    """Each in the house form, by the option's name, with what would do."""
    options, error, text = REFUSED[name]
    options = {key: mesh if value == "m" else value for key, value in options.items()}
    with pytest.raises(error, match=text) as caught:
        spmd.plan(step, W, BATCH, cache=False, progress=False, **options)
    assert str(caught.value).startswith("plan of `step` ") or "topology" in str(caught.value)


def test_arguments_as_one_tuple_are_refused(mesh):
    """As `report` refuses them, with what was meant."""
    with pytest.raises(spmd.ArgumentError, match=r"got +one tuple of 2") as caught:
        spmd.plan(step, (W, BATCH), mesh=mesh)
    assert "the arguments follow one by one" in str(caught.value)


@pytest.mark.slow
def test_what_does_not_divide_is_no_fixed_place():
    """A fixed spec that fits some meshes of a topology leaves those; one that fits none fails."""
    odd = {"x": jax.ShapeDtypeStruct((6, D), f32), "y": jax.ShapeDtypeStruct((6, D), f32)}
    options = {"top": 0, "cache": False, "progress": False, "topology": "cpu:8"}
    found = spmd.plan(step, W, odd, fixed={"batch": P("data")}, **options)
    assert {one.axes["data"] for one in found.candidates} <= {1, 2}
    with pytest.raises(spmd.ShardingError, match="divisible"):
        spmd.plan(step, W, odd, fixed={"batch": P("data")}, mesh={"data": 4, "model": 2},
                  top=0, cache=False, progress=False)  # fmt: skip


@pytest.mark.slow
def test_nothing_fits(mesh):
    """The nearest plan, what it is over, the largest arrays, and the chips that would do."""
    with pytest.raises(spmd.PlanMemoryError, match="finds no layout that fits") as caught:
        plan(mesh, memory="10KB", top=1)
    text = str(caught.value)
    # A row of the batch, and a weight, in eight parts.
    assert "w['down'] 2.0 KiB" in text or "w['up'] 2.0 KiB" in text
    assert "which is nearest" in text
    assert "devices (data=" in text
    assert "top=1" not in text  # the compiler was asked


@pytest.mark.slow
def test_nothing_fits_beside_what_is_fixed(mesh):
    """What is whole on each device needs as much on any number of devices."""
    whole = {"w": P(), "batch": P(), "result": P()}
    with pytest.raises(spmd.PlanMemoryError, match="finds no layout that fits") as caught:
        plan(mesh, memory="10KB", top=1, fixed=whole)
    text = str(caught.value)
    assert "devices (data=" not in text
    assert "fix fewer places" in text


def test_scalars_have_nothing_to_split(mesh):
    """A program without dimensions is said to be one."""
    with pytest.raises(spmd.PlanError, match="nothing to split"):
        spmd.plan(lambda a: a + 1, jnp.float32(1), mesh=mesh, cache=False)
    with pytest.raises(spmd.ArgumentError, match="needs a function"):
        spmd.plan(3, mesh=mesh)


@pytest.mark.slow
def test_options_of_pjit_are_taken_over(mesh):
    """A function of pjit is planned with its own donation and static arguments."""

    def scaled(w, x, power):
        return jax.tree.map(lambda p: p * x.sum() ** power, w)

    f = spmd.pjit(scaled, donate_argnums=0, static_argnums=2)
    options = {"top": 1, "cache": False, "progress": False, "mesh": mesh}
    found = spmd.plan(f, W, BATCH["x"], 2, **options)
    assert [one.name for one in found.arguments] == ["w['down']", "w['up']", "x"]
    assert found.report.memory.aliased > 0
    assert spmd.plan(jax.jit(step), W, BATCH, **options).pins


@pytest.mark.slow
def test_a_seed_gives_one_answer(mesh):
    """Twice the same question has one answer, up to how long it took."""
    one, other = (plan(mesh, seed=3) for _ in range(2))
    assert (one.arguments, one.pins) == (other.arguments, other.pins)
    assert [c.orders for c in one.candidates] == [c.orders for c in other.candidates]


@pytest.mark.slow
def test_written_specs_are_no_plan_before_they_are_compiled(mesh):
    """Without a compile the answer is a layout; with one, what its user wrote may win."""
    specs = ({"up": P(None, "model"), "down": P("model")}, P("data"))
    f = spmd.pjit(step, in_axis_resources=specs)
    options = {"cache": False, "progress": False, "mesh": mesh}
    bare = spmd.plan(f, W, BATCH, top=0, **options)
    assert bare.chosen.name != "as written"
    assert "as written" in [one.name for one in bare.candidates]
    (written,) = [
        one
        for one in spmd.plan(f, W, BATCH, top=1, **options).candidates
        if one.name == "as written"
    ]
    assert written.verified == "bytes"


def test_what_no_compiler_takes_has_no_plan(mesh):
    """The compiler's own words are in the message, which does not speak of memory."""

    def odd(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("there_is_no_such_target", shape)(x) @ x.T

    with pytest.raises(spmd.PlanError, match="in none of the layouts") as caught:
        spmd.plan(odd, BATCH["x"], mesh=mesh, top=1, cache=False, progress=False)
    assert "there_is_no_such_target" in str(caught.value)
    assert not isinstance(caught.value, spmd.PlanMemoryError)


def by_heads(count):
    """A function that divides so many heads among the devices of the axis model."""

    def function(x, w):
        rows = P("data", "model")
        heads = (x @ w).reshape(-1, count, 8)
        return jax.shard_map(
            jnp.tanh, in_specs=rows, out_specs=rows, mesh=spmd.current_mesh()
        )(heads)  # fmt: skip

    return function, BATCH["x"], jax.ShapeDtypeStruct((D, count * 8), f32)


@pytest.mark.slow
def test_a_mesh_that_a_function_is_not_for_is_passed_over():
    """Six heads are for one, two or six devices; other meshes of eight are no answer."""
    require_libtpu()
    options = {"topology": "v5e:2x4", "top": 0, "cache": False, "progress": False}
    found = spmd.plan(*by_heads(6), **options)
    assert {one.axes["model"] for one in found.candidates} == {1, 2}
    assert {*found.passed_over} == {"data=2, model=4", "data=1, model=8"}
    assert found.passed_over["data=2, model=4"].startswith("ValueError: shard_map applied to")
    assert "\npassed over: data=2, model=4; data=1, model=8, for which function" in str(found)
    # The first one that it is for, too, may come later.
    found = spmd.plan(*by_heads(6), axes=("model", "data"), **options)
    assert {one.axes["model"] for one in found.candidates} == {1, 2}
    assert {*found.passed_over} == {"model=8, data=1", "model=4, data=2"}
    assert spmd.plan(*by_heads(8), **options).passed_over == {}


@pytest.mark.parametrize("model", ["model", 'é"\\'])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "partial"])
def test_axes_that_a_function_names_tell_meshes_apart(whole, model):
    """A `shard_map` over model is another program on 8x1 than on 1x8; lowered on 8x1 it is gone."""
    require_libtpu()

    def function(x):
        rows = P("data", model) if whole else P(None, model)
        return jax.shard_map(
            jnp.tanh, in_specs=rows, out_specs=rows, mesh=spmd.current_mesh(),
            **({} if whole else {"axis_names": {model}}),
        )(x)  # fmt: skip

    options = {"topology": "v5e:2x4", "top": 0, "cache": False, "progress": False}
    options["axes"] = ("data", model)
    named = spmd.plan(function, BATCH["x"], **options)
    bare = spmd.plan(jnp.tanh, BATCH["x"], **options)
    assert {one.axes[model] for one in named.candidates} == {1, 2, 4, 8}
    assert {one.axes[model] for one in bare.candidates} == {1, 2, 4}


@pytest.mark.slow
def test_functions_that_a_shard_map_calls_may_be_pinned():
    """Such as kernels of JAX: constraints in them name axes that are manual there."""
    require_libtpu()

    @jax.jit
    def scores(q):
        return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, q))

    def loss(w, x):
        attend = jax.shard_map(
            lambda y: jnp.einsum("bts,bsd->btd", scores(y), y),
            in_specs=P("data"), out_specs=P("data"), mesh=spmd.current_mesh(),
        )  # fmt: skip
        return jnp.mean(attend(x @ w) ** 2)

    arrays = [jax.ShapeDtypeStruct(shape, f32) for shape in ((64, 64), (16, 32, 64))]
    options = {"topology": "v5e:2x4", "top": 0, "cache": False, "progress": False}
    found = spmd.plan(jax.grad(loss), *arrays, axes=("data", "model"), **options)
    assert math.prod(found.axes.values()) == 8
    assert len(found.candidates) > 1


def test_a_mesh_that_fixed_places_leave_may_be_passed_over():
    """Four rows over data leave 4x2, for which the function raises, and two others."""
    require_libtpu()

    def function(x):
        if spmd.current_mesh().shape["data"] == 4:
            raise ValueError("\n four \n rows")
        return x + 1

    options = {"topology": "v5e:2x4", "top": 0, "cache": False, "progress": False}
    rows = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    found = spmd.plan(function, rows, fixed={"x": P("data")}, **options)
    assert found.passed_over == {"data=4, model=2": "ValueError: four"}
    assert {one.axes["data"] for one in found.candidates} <= {1, 2}


def test_what_a_function_raises_for_every_mesh_is_said():
    """That of the first mesh."""
    require_libtpu()
    options = {"topology": "v5e:2x4", "top": 0, "cache": False, "progress": False}

    def never(x):
        raise ZeroDivisionError(f"of {spmd.current_mesh().shape['data']}")

    with pytest.raises(ZeroDivisionError, match="of 8"):
        spmd.plan(never, BATCH["x"], **options)


@pytest.mark.slow
def test_a_plan_is_found_by_all_that_it_says(mesh, tmp_path, monkeypatch):
    """Equal programs with other names of arguments, or other compiler options, are others."""
    monkeypatch.setenv("SPMD_PLAN_CACHE", str(tmp_path))

    def renamed(weights, batch):
        return step(weights, batch)

    renamed.__name__ = "step"
    plan(mesh, cache=True)
    other = spmd.plan(renamed, W, BATCH, mesh=mesh, top=0, progress=False)
    assert other.arguments[0].name == "weights['down']"
    plan(mesh, cache=True, compiler_options={"xla_embed_ir_in_executable": True})
    assert len([*tmp_path.glob("*.json")]) == 3


# Against libtpu


def _attending(weights, x):
    """A step of a block with attention."""

    def loss(weights):
        q, k, v = (jnp.einsum("bte,ehd->bthd", x, weights[name]) for name in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(x.dtype), v)
        y = x + jnp.einsum("bthd,hde->bte", mixed, weights["o"])
        y += jax.nn.gelu(y @ weights["up"]) @ weights["down"]
        return jnp.sum(y.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: (w - 1e-3 * g).astype(w.dtype), weights, grads), loss


@needs_libtpu
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("where", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_predictions_are_near_the_compiled_time_on_every_generation(where):
    """Chips differ in where values lie, and in what products cost beside their FLOPs."""
    shapes = dict.fromkeys("qkv", (768, 12, 64))
    shapes |= {"o": (12, 64, 768), "up": (768, 3072), "down": (3072, 768)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    sizes = {"data": spmd.topology(where).size // 2, "model": 2}
    with jax.numpy_dtype_promotion("standard"):
        plan = spmd.plan(
            _attending, weights, jax.ShapeDtypeStruct((8, 1024, 768), jnp.bfloat16),
            topology=where, mesh=sizes, top=1, seeds=False, cache=False, progress=False,
            donate_argnums=0,
        )  # fmt: skip
    assert plan.predicted == pytest.approx(plan.seconds, rel=0.25)
