"""`spmd plan`: what it asks the planner, prints, writes and returns; `spmd show` of a plan."""

import dataclasses
import io
import json
import os
import pty
import subprocess
import sys

from hardware import needs_libtpu
import pytest
from rich.console import Console

import spmd
from spmd import P, __main__ as cli
from spmd.cli import options
from spmd.inspection.records import plan_codec
from spmd.inspection.records.later import Later, known
from spmd.inspection.records.plan import Candidate, Inside, Placed, Plan
from spmd.inspection.show import progress
from spmd.planner import Progress

TRAIN = """
import jax, jax.numpy as jnp
from spmd import pjit

def loss(w, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ w["up"]) @ w["down"]) ** 2)

def step(w, batch, *, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, w, jax.grad(loss)(w, batch))

def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

def args():
    return {"down": f32(64, 32), "up": f32(32, 64)}, {"x": f32(16, 32)}

KEYWORDS = dict(zip(("w", "batch"), args()))
RATE = {**KEYWORDS, "rate": 0.1}
"""
ON_CPUS = ("--topology", "cpu:8")


@pytest.fixture(name="here", autouse=True)
def _here(tmp_path, monkeypatch):
    """A folder with a module, as the working directory; no plan is kept from test to test."""
    (tmp_path / "a_planned.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(options, "set_device_count", lambda count: None)
    monkeypatch.setenv("SPMD_PLAN_CACHE", "")
    monkeypatch.setenv("COLUMNS", "100")  # of the table, and not of a line in a log
    yield tmp_path
    sys.modules.pop("a_planned", None)


def run(*args, given="args"):
    """A command on the step."""
    return cli.main(["plan", "a_planned:step", "--args", f"a_planned:{given}", *args])


DATA = ("data",)


def placed(name, shape, *spec, **fields):
    """An array and where it lies."""
    return Placed(name=name, dtype="f32", shape=shape, spec=spec, **fields)


@pytest.fixture
def planned():
    """A plan of the step, as the planner gives one."""
    weights = [("down", (64, 32), (), DATA), ("up", (32, 64), DATA, ())]
    found = Candidate(
        name="found", axes={"data": 8}, orders={"data": ("batch",)}, estimated=0.002,
        estimated_peak=5000, compute=0.001, memory=0.0, exchange=0.001, predicted=0.002, sent=70,
    )  # fmt: skip
    return Plan(
        name="step", axes={"data": 8}, topology="cpu:8", device_kind="cpu", chip="v5e",
        budget=None, candidates=(found,), pins=(), report=None, tried=9, searched=0.1,
        arguments=(*(placed(f"w['{name}']", *at) for name, *at in weights),
                   placed("batch['x']", (16, 32), DATA, (), is_fixed=True)),
        results=tuple(placed(f"result['{name}']", *at) for name, *at in weights),
        compiled=0.0, complete=True, program="0a", versions={"spmd": "0.1.0"},
        inside=known(Inside(constraints=(), code="spec = P('data')")),
    )  # fmt: skip


@pytest.fixture(name="asked")
def _asked(monkeypatch, planned):
    """What the planner is asked, whose answer is known."""
    asked = []

    def plan(f, *args, progress, **wish):
        asked.append((f.__name__, args, wish))
        progress(Progress(12, None, ""))
        what = "Megatron, axes swapped on data=8, model=1"
        progress(Progress(2842, 0.0043, what))
        progress(Progress(2842, 0.0041, what))
        return planned

    monkeypatch.setattr(spmd, "plan", plan, raising=False)
    return asked


# What is asked


def test_what_the_planner_is_asked(asked):
    """Every option reaches the planner as what it stands for; those left out are its defaults."""
    assert run(*ON_CPUS) == 0
    (name, args, wish), = asked  # fmt: skip
    assert name == "step"
    assert {key: leaf.shape for one in args for key, leaf in one.items()} == {
        "down": (64, 32), "up": (32, 64), "x": (16, 32)
    }  # fmt: skip
    assert wish == {
        "topology": "cpu:8", "mesh": None, "axes": ("data", "model"), "memory": None, "chip": None,
        "fixed": {}, "never": [], "classes": {}, "top": 3, "timeout": None, "seed": 0,
        "seeds": True, "cache": True,
    }  # fmt: skip
    asked.clear()
    assert run(
        "--topology", "v5e:4x4", "--mesh", "data=-1,model=4", "--memory", "14GB",
        "--chip", "v5p", "--fix", "batch=P('data')",
        "--fix", "w['up'] = P(None, ('data', 'model'))", "--never", "batch['x']:1=data",
        "--class", "rows=batch['x']:0", "--top", "5", "--timeout", "1.5", "--seed", "7",
        "--no-seeds", "--no-cache",
    ) == 0  # fmt: skip
    assert asked[0][2] == {
        "topology": "v5e:4x4", "mesh": {"data": -1, "model": 4}, "axes": ("data", "model"),
        "memory": 14 * 10**9, "chip": "v5p",
        "fixed": {"batch": P("data"), "w['up']": P(None, ("data", "model"))},
        "never": [("batch['x']:1", "data")], "classes": {"rows": "batch['x']:0"}, "top": 5,
        "timeout": 1.5, "seed": 7, "seeds": False, "cache": False,
    }  # fmt: skip
    assert run(*ON_CPUS, "--axes", "rows, columns") == 0
    assert asked[1][2]["axes"] == ("rows", "columns")


def test_keyword_arguments_are_passed_by_position(asked, capsys):
    """A dict is bound by the signature; what has no position is told."""
    assert run(*ON_CPUS, given="KEYWORDS") == 0
    assert [sorted(one) for one in asked[0][1]] == [["down", "up"], ["x"]]
    assert run(*ON_CPUS, given="RATE") == 2
    assert "plan passes arguments by position, and rate takes none: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("60", 60), ("0.5", 0.5), ("90s", 90), ("5ms", 0.005)]
)
def test_timeouts(text, seconds, asked):
    """A time limit is in seconds where it has no unit."""
    assert run(*ON_CPUS, "--timeout", text) == 0
    assert asked[0][2]["timeout"] == seconds


BAD = [
    ((), "plan needs --topology, such as --topology v5e:4x4, or --mesh for the devices"),
    (("--mesh", "data"), "--mesh data is not a mesh: write axis=size"),
    (
        ("--mesh", "a=8", "--axes", "a"),
        "--axes names axes whose sizes are to be chosen, and --mesh",
    ),
    ((*ON_CPUS, "--memory", "14 Megs"), "--memory: 'Megs' is no unit of bytes: write"),
    ((*ON_CPUS, "--timeout", "soon"), "--timeout: 'soon' is no time"),
    ((*ON_CPUS, "--timeout", "0"), "--timeout 0 leaves no time to search."),
    ((*ON_CPUS, "--top", "-1"), "--top -1 is too few: it has to be at least 0."),
    ((*ON_CPUS, "--fix", "batch"), "--fix batch fixes nothing: write a path and a PartitionSpec"),
    ((*ON_CPUS, "--fix", "batch=data"), "--fix batch=data fixes nothing"),
    ((*ON_CPUS, "--fix", "batch=P(data)"), "P(data) is no PartitionSpec: write P("),
    ((*ON_CPUS, "--fix", "x=P(P.UNCONSTRAINED)"), "leaves a dimension open: a plan has a place"),
    ((*ON_CPUS, "--never", "tokens:1"), "--never tokens:1 says nothing: write it as in tokens:1="),
    ((*ON_CPUS, "--class", "vocab"), "--class vocab says nothing: write it as in vocab=state["),
    ((*ON_CPUS, "--fix", "x=P()", "--fix", "x=P('data')"), "--fix names x twice."),
    ((*ON_CPUS, "--class", "n=x:0", "--class", "n=x:1"), "--class names n twice."),
    ((*ON_CPUS, "--save", "plan.txt"), "--save plan.txt does not end in .json."),
    ((*ON_CPUS, "--html", "no/p.html"), "--html no/p.html is in a folder that does not exist."),
]


@pytest.mark.parametrize(("args", "sentence"), BAD, ids=lambda part: " ".join(part)[-40:])
def test_a_bad_option_gets_one_sentence(args, sentence, asked, capsys):
    """What cannot be read is said before anything is planned, with exit code 2."""
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spmd: ")
    assert sentence in err
    assert asked == []


def test_what_needs_arguments_is_none_of_them(asked, capsys):
    """A function that is named for the arguments takes none itself."""
    assert run(*ON_CPUS, given="step") == 2
    assert "--args a_planned:step is a function that needs arguments" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["0", "1", "'bye'"])
def test_a_program_that_ends_itself_is_an_error(code, here, capsys):
    """Its exit code is not that of a plan, or of one that does not fit."""
    (here / "ending.py").write_text(f"import sys\nsys.exit({code})\n")
    assert cli.main(["plan", "ending:step", *ON_CPUS]) == 2
    assert "SystemExit" in capsys.readouterr().err


def test_words_of_the_planner(capsys):
    """What only the planner knows to be wrong is said in its words, with exit code 2."""
    for args, told in (
        (("--topology", "v5e:4"), "spmd: topology('v5e:4') has no such sizes."),
        ((*ON_CPUS, "--fix", "bach=P()"), "has no argument or result bach (did you mean"),
        ((*ON_CPUS, "--never", "batch['x']:7=data"), "has no dimension \"batch['x']:7\" to split"),
        ((*ON_CPUS, "--chip", "v5d"), "knows no chip 'v5d' (did you mean"),
    ):
        assert run(*args, "--no-progress", "--top", "0") == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert told in err


# What is answered


def test_a_plan_is_printed_and_written(planned, asked, here, capsys):
    """The terminal shows the screen of the plan; the files hold it and its page."""
    assert run(*ON_CPUS, "--save", "plan.json", "--html", "plan.html") == 0
    out, _ = capsys.readouterr()
    assert out.replace("─", "-").rstrip() == str(planned)
    assert plan_codec.load(here / "plan.json") == planned
    page = (here / "plan.html").read_text(encoding="utf-8")
    assert page == planned.to_html()
    assert "spec = P(&#39;data&#39;)" in page


def test_json_and_code_instead(planned, asked, capsys):
    """`--json` and `--code` print just that, for other programs; they exclude each other."""
    assert run(*ON_CPUS, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert plan_codec.decode(data, subject="what was printed") == planned
    assert run(*ON_CPUS, "--code") == 0
    assert capsys.readouterr().out == "spec = P('data')\n"
    with pytest.raises(SystemExit) as caught:
        run(*ON_CPUS, "--code", "--json")
    assert caught.value.code == 2


@pytest.mark.parametrize("shown", [[], ["--code"], ["--json"]])
def test_an_interrupt_while_the_code_is_worked_out(shown, planned, here, capsys, monkeypatch):
    """The plan is there already: it is printed and written without its code."""

    def work():
        raise KeyboardInterrupt

    unknown = dataclasses.replace(planned, inside=Later(work))
    monkeypatch.setattr(spmd, "plan", lambda *args, **wish: unknown, raising=False)
    assert run(*ON_CPUS, "--save", "plan.json", *shown) == 130
    out, err = capsys.readouterr()
    without = dataclasses.replace(planned, inside=None)
    assert plan_codec.load(here / "plan.json") == without
    if shown == ["--json"]:
        assert plan_codec.decode(json.loads(out), subject="what was printed") == without
    else:
        assert out.replace("─", "-").rstrip() == str(planned)
    lines = err.splitlines()
    assert lines[-1] == "spmd: interrupted"
    assert "working out the code ..." in lines


@pytest.mark.parametrize("shown", [[], ["--code"], ["--json"]])
def test_files_are_written_where_nobody_reads_the_output(shown, planned, asked, here, monkeypatch):
    """As of `spmd plan ... --save plan.json | head -1`."""
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch:
        closed = os.fdopen(write, "w")
        patch.setattr(sys, "stdout", closed)
        assert run(*ON_CPUS, "--save", "plan.json", *shown) == 141
        closed.close()
    assert plan_codec.load(here / "plan.json") == planned


@pytest.mark.parametrize(("option", "name"), [("--save", "p.json"), ("--html", "p.html")])
def test_a_file_that_cannot_be_written(option, name, planned, here, capsys, monkeypatch):
    """The plan is printed, and a sentence says why the file is not there: its folder went away."""
    (here / "gone").mkdir()

    def plan(*args, **wish):
        (here / "gone").rmdir()
        return planned

    monkeypatch.setattr(spmd, "plan", plan, raising=False)
    path = os.path.join("gone", name)
    assert run(*ON_CPUS, option, path) == 2
    out, err = capsys.readouterr()
    assert "data=8" in out
    assert err.endswith(f"spmd: {path} cannot be written: No such file or directory.\n")


def test_lines_of_a_log(asked, capsys, monkeypatch):
    """A log has a line when it begins, for each compile and at the end; none if so wished."""
    monkeypatch.setenv("COLUMNS", "40")
    assert run(*ON_CPUS) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "planning a_planned:step ...",
        "2,842 plans tried; best so far 4.30 ms; compiling Megatron, axes swapped on "
        "data=8, model=1",
    ]
    assert len(lines) == 3
    assert lines[2].startswith("planning a_planned:step: ")
    assert run(*ON_CPUS, "--no-progress") == 0
    assert capsys.readouterr().err == ""


def test_a_bar_in_a_terminal(monkeypatch):
    """A terminal has a bar with what was tried, the best time and what is compiled; it goes."""
    text = shown_in_a_terminal(120, monkeypatch)
    assert "2,842 plans tried; best so far 4.30 ms; compiling FSDP (planning step)" in text
    assert text.endswith("\x1b[2K")
    for width, said in ((40, "2,842 plans tried; bes…"), (20, "2,…")):
        narrow = shown_in_a_terminal(width, monkeypatch)
        assert said in narrow
        assert "0:00:0" in narrow  # the time goes on


def test_a_plan_from_the_disk_says_so(monkeypatch, capsys):
    """To a terminal and to a log, if a command asks for it; a search of a function stays silent."""
    one = Progress(2842, 0.0043, "", kept=True)
    said = "planning step: found on the disk, as an earlier start searched it"
    assert said in shown_in_a_terminal(120, monkeypatch, one, lines=True)
    assert said not in shown_in_a_terminal(120, monkeypatch, one)
    monkeypatch.undo()
    for lines in (True, False):
        with progress.planning("planning step", lines=lines) as tell:
            tell(one)
        assert ("found on the disk" in capsys.readouterr().err) == lines


def shown_in_a_terminal(width, monkeypatch, *more, lines=False):
    """What a terminal of some width gets."""
    file = io.StringIO()

    def terminal(**options):
        return Console(file=file, force_terminal=True, width=width, legacy_windows=False)

    monkeypatch.setattr(progress, "Console", terminal)
    with progress.planning("planning step", lines=lines) as tell:
        for one in more or (Progress(1, None, ""), Progress(2842, 0.0043, "FSDP")):
            tell(one)
    return file.getvalue()


def test_a_terminal_stays_one_while_warnings_are_caught(monkeypatch):
    """The descriptor of the standard error then leads to a file; the bar has to go on moving."""
    ours, theirs = pty.openpty()
    with open(ours, "rb"), open(theirs, "w") as terminal, open(os.devnull) as elsewhere:
        monkeypatch.setattr(sys, "stderr", terminal)
        console = progress._console()
        os.dup2(elsewhere.fileno(), theirs)
        assert not terminal.isatty()
        assert console.is_terminal


def test_words_of_progress():
    """What is not known yet is left out."""
    assert progress.progress_said(Progress(1, None, "")) == "1 plan tried"
    assert progress.progress_said(Progress(10, 2.0, "")) == "10 plans tried; best so far 2.00 s"


def test_an_interrupt_before_any_plan(monkeypatch, capsys):
    """Ctrl-C before there is anything to answer ends the command as any other."""

    def plan(*args, **wish):
        raise KeyboardInterrupt

    monkeypatch.setattr(spmd, "plan", plan, raising=False)
    assert run(*ON_CPUS, "--no-progress") == 130
    assert capsys.readouterr().err == "spmd: interrupted\n"


# The planner itself


@pytest.mark.slow
def test_nothing_fits(capsys):
    """A memory that no plan keeps to is exit code 1, with the nearest one."""
    assert run(*ON_CPUS, "--memory", "3KB", "--top", "0", "--no-progress") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spmd: plan of `step` finds no layout that fits.\n")
    assert "ask the compiler with top=1" in err  # estimates may be too large


@pytest.mark.slow
def test_no_compiler_makes_arguments_fit(capsys):
    """Where arguments alone are too large, it is no help to ask a compiler."""
    assert run(*ON_CPUS, "--memory", "1KB", "--top", "0", "--no-progress") == 1
    err = capsys.readouterr().err
    assert "which is nearest" in err
    assert "top=" not in err


@pytest.mark.slow
def test_devices_of_this_machine(capsys, here):
    """With `--mesh` alone the devices that are here are planned for, and keep what is fixed."""
    fixed = ("--fix", "batch=P('data')", "--save", "plan.json")
    assert run("--mesh", "data=4,model=2", "--top", "0", "--no-progress", *fixed) == 0
    found = plan_codec.load(here / "plan.json")
    assert (found.topology, found.axes) == ("", {"data": 4, "model": 2})
    (batch,) = (one for one in found.arguments if one.name == "batch['x']")
    assert (batch.spec, batch.is_fixed) == ((("data",), ()), True)
    assert "not verified: no compiler has seen this plan" in capsys.readouterr().out


def demo(*args):
    """`spmd plan` of the demo's step, in a process of its own: what it prints."""
    env = {name: v for name, v in os.environ.items() if not name.startswith("JAX_")}
    program = ("spmd.demo.train:step", "--args", "spmd.demo.train:example", "--no-progress")
    done = subprocess.run(
        [sys.executable, "-m", "spmd", "plan", *program, "--save", "plan.json", *args],
        capture_output=True, text=True, env=env, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo(here):
    """The demo's step is planned in one line, for CPUs that stand in, and verified by bytes."""
    assert "verified by bytes" in demo(*ON_CPUS, "--top", "1", "--no-seeds")
    found = plan_codec.load(here / "plan.json")
    assert found.verified == "bytes"
    assert found.chosen.peak == found.report.memory.peak
    assert found.tried > 100


@pytest.mark.slow
@pytest.mark.soak
@needs_libtpu
def test_the_demo_on_a_slice(here):
    """For a described slice it is compiled, timed, and keeps to the memory that is given."""
    given = ("--topology", "v5e:4x4", "--memory", "1GB", "--top", "1", "--no-seeds")
    out = demo(*given)
    assert out.startswith("step on v5e:4x4 (TPU v5 lite); mesh data=")
    assert "\ncompiled; " in out
    found = plan_codec.load(here / "plan.json")
    assert (found.verified, found.budget, found.num_devices) == ("time", 10**9, 16)
    assert found.memory <= 10**9
    assert found.report.time.layer
    assert found.seconds == found.report.time.seconds


# spmd show


def test_show_of_a_plan(planned, here, capsys):
    """A saved plan is drawn as when it was made; of a path, the picture of its array."""
    plan_codec.save_json(planned, here / "plan.json")
    assert cli.main(["show", "plan.json"]) == 0
    assert capsys.readouterr().out.replace("─", "-").rstrip() == str(planned)
    one = planned.arguments[0]
    assert cli.main(["show", "plan.json", one.name]) == 0
    mesh = ", ".join(f"{axis}={size}" for axis, size in planned.axes.items())
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"[{','.join(map(str, one.shape))}] as P(")
    assert first.endswith(f"on mesh {mesh}")


def test_show_of_what_a_plan_lacks(planned, here, capsys):
    """An unknown path, and a file that is neither report nor plan, are told in a sentence."""
    plan_codec.save_json(planned, here / "plan.json")
    assert cli.main(["show", "plan.json", "w['u']"]) == 2
    assert (
        "plan of `step` has no argument or result w['u'] (did you mean" in capsys.readouterr().err
    )
    (here / "plan.json").write_text(json.dumps({"schema": "spmd-plan/9"}))
    assert cli.main(["show", "plan.json"]) == 2
    assert "is a plan of a version that this spmd does not read" in capsys.readouterr().err
    (here / "plan.json").write_text(json.dumps({"schema": "spmd-diff/1"}))
    assert cli.main(["show", "plan.json"]) == 2
    assert "is no report" in capsys.readouterr().err


def test_help(capsys):
    """The options and the exit codes are described."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "choose mesh, shardings and constraints" in out.lower()
    assert "Only shapes matter" in out
    assert "The exit code is 0, 1 where nothing fits, and 2 for an error." in out
