"""`spmd report`, `sweep`, `fits` and `diff`: what they print, refuse and return."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

from spmd import __main__ as cli
from spmd.cli import options, supervised
from spmd.cli.options import CommandError, load, parse_axes, parse_limits, parse_vary
from spmd.inspection import Report, show_bytes

TRAIN = """
import jax, jax.numpy as jnp
from spmd import P, pjit

def predict(w, x):
    return jnp.tanh(x @ w) @ w.T

specs = P(None, "model"), P("data")
forward = pjit(predict, in_axis_resources=specs, out_axis_resources=P("data"))

class Nested:
    forward = forward

def example_args():
    return jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)

def arrays():
    return tuple(jnp.ones(a.shape, a.dtype) for a in example_args())

KEYWORDS = dict(zip("wx", example_args()))
"""
MESH = ("--mesh", "data=4,model=2")


@pytest.fixture(name="here", autouse=True)
def _here(tmp_path, monkeypatch):
    """A folder with a module `a_train`, as the working directory; the module is gone after."""
    (tmp_path / "a_train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "a.json").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # The process of the tests has its devices already.
    monkeypatch.setattr(options, "set_device_count", lambda count: None)
    yield tmp_path
    sys.modules.pop("a_train", None)


def _report(*args):
    return cli.main(["report", "a_train:forward", "--args", "a_train:example_args", *args])


def test_a_report_is_printed_and_written(here, capsys):
    """The terminal shows the ledger; the file holds the same report; the trace is JSON."""
    assert _report(*MESH, "--json", "r.json", "--trace", "t.json") == 0
    out, err = capsys.readouterr()
    report = Report.load(here / "r.json")
    (one,) = report.collectives
    assert (one.kind, one.mesh_axes) == ("all-reduce", ("model",))
    # 16 / 4 rows of 64 floats, on each device.
    assert one.payload_bytes == 16 // 4 * 64 * 4
    assert f"a_train.py:{one.source.line}" in out
    assert f"peak {show_bytes(report.memory.peak)}" in " ".join(out.split())
    assert err.startswith("compiling a_train:forward ...\n")
    assert json.loads((here / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    "args",
    [
        ("a_train.py:forward", "--args", "a_train.py:example_args"),
        ("a_train:Nested.forward", "--args", "a_train:KEYWORDS"),
        ("a_train:forward", "--args", "a_train:arrays"),
    ],
    ids=["files", "keywords", "arrays"],
)
def test_ways_to_name_things(args, here):
    """Files, attributes of attributes, keyword arguments and real arrays give the same report."""
    assert cli.main(["report", *args, *MESH, "--quiet", "--json", "r.json"]) == 0
    assert Report.load(here / "r.json").total.payload_bytes == 16 // 4 * 64 * 4


SPLIT_ARGS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
on = lambda *spec: NamedSharding(mesh, P(*spec))
struct = jax.ShapeDtypeStruct

@jax.jit
def forward(w, x):
    return jnp.tanh(x @ w) @ w.T

args = (
    struct((64, 32), jnp.float32, sharding=on(None, "model")),
    struct((16, 64), jnp.float32, sharding=on("data")),
)
bare = [struct(a.shape, a.dtype) for a in args]

def arrays():
    return [jax.device_put(np.zeros(a.shape, a.dtype), a.sharding) for a in args]

def uncommitted():
    return [jnp.zeros(a.shape, a.dtype) for a in args]

def first():
    return jax.device_put(uncommitted(), jax.devices()[0])
"""


@pytest.fixture(name="split_args")
def _split_args(here):
    """A module of a `jax.jit` function whose arguments alone say how it is split."""
    (here / "a_split.py").write_text(SPLIT_ARGS)
    yield
    sys.modules.pop("a_split", None)


def _of_split(command, given, *options):
    return cli.main([*command, "--args", f"a_split:{given}", *options])


@pytest.mark.parametrize("given", ["args", "arrays"])
@pytest.mark.parametrize("preview", [(), ("--preview",)], ids=["report", "preview"])
@pytest.mark.usefixtures("split_args")
def test_arguments_keep_their_shardings(given, preview, here, capsys):
    """Shardings of structs and arrays alone split a `jax.jit` function: its limits are on that."""
    limit = ("--none", "all-reduce", "--json", "r.json", *preview)
    assert _of_split(["report", "a_split:forward"], given, *limit) == 1
    assert "none, all-reduce: allowed 0, found 1" in capsys.readouterr().err
    report = Report.load(here / "r.json")
    assert dict(report.mesh) == {"data": 4, "model": 2}
    # Hand count: 16 / 4 rows of 64 floats on each device are partial sums over `model`.
    assert report.total.payload_bytes == 16 // 4 * 64 * 4


@pytest.mark.usefixtures("split_args")
def test_why_knows_the_shardings_of_arguments(capsys):
    """`spmd why` follows an axis to the argument that is split over it."""
    assert _of_split(["why", "a_split:forward", "out"], "arrays") == 0
    out, _ = capsys.readouterr()
    assert out.startswith("out in forward; mesh data=4, model=2\n")
    assert "data on dimension 0: from argument x P('data', None)" in out


@pytest.mark.usefixtures("split_args")
def test_arguments_go_over_to_another_mesh_by_axis_names(here):
    """The axes of `--mesh` and of `--topology` take the place of those that arguments are on."""
    command = ["report", "a_split:forward"]
    other = ("--mesh", "data=2,model=4", "--quiet", "--json", "r.json")
    for more, devices in (((), 8), (("--topology", "cpu:8"), 8)):
        assert _of_split(command, "arrays", *other, *more) == 0
        report = Report.load(here / "r.json")
        assert (dict(report.mesh), report.num_devices) == ({"data": 2, "model": 4}, devices)
        assert [one.mesh_axes for one in report.collectives] == [("model",)]
        assert report.total.payload_bytes == 16 // 2 * 64 * 4
    sixteen = ("--mesh", "model=4,data=4", "--topology", "cpu:16", "--quiet", "--json", "r.json")
    assert _of_split(command, "arrays", *sixteen) == 0
    assert Report.load(here / "r.json").total.payload_bytes == 16 // 4 * 64 * 4


@pytest.mark.usefixtures("split_args")
def test_an_axis_that_the_other_mesh_lacks(capsys):
    """A sharding that has no counterpart on the mesh is told, and nothing is compiled."""
    assert _of_split(["report", "a_split:forward"], "args", "--mesh", "data=8") == 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        "spmd: --args a_split:args[0] cannot be placed on the mesh by the names of its axes.\n"
        "  given     P(None, 'model') on mesh data=4, model=2\n"
        "  expected  axes that mesh data=8 has, for which it is compiled\n"
        "  got       no axis 'model'\n"
        "  fix       name these axes in --mesh, or give shapes without shardings\n",
    )


@pytest.mark.parametrize(
    ("command", "first"),
    [
        (("report", "a_split:forward"), "report"),
        (("report", "a_split:forward", "--preview"), "preview"),
        (("why", "a_split:forward", "out"), "why"),
    ],
    ids=["report", "preview", "why"],
)
@pytest.mark.usefixtures("split_args")
def test_a_program_on_one_device_is_no_program_of_the_mesh(command, first, capsys):
    """Where a mesh is given, a program that uses one device is an error and keeps no limit."""
    limits = ("--none", "*") if command[0] == "report" else ()
    for given in ("bare", "uncommitted"):
        assert _of_split(command, given, *MESH, *limits) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"spmd: {first} cannot match the program with this mesh.\n" in err
        assert "  given     mesh data=4, model=2\n" in err
        assert "  got       a program for " in err


@pytest.mark.usefixtures("split_args")
def test_what_lies_on_one_device_is_placed_nowhere_on_described_ones(here, capsys):
    """An array of device 0 stays there on this machine, and is a shape for other devices."""
    (here / "a_split.py").write_text(SPLIT_ARGS + TRAIN.partition("class")[0])
    command = ["report", "a_split:forward"]
    assert _of_split(command, "first", *MESH) == 2
    assert "spmd: pjit of `predict` cannot take argument w from other" in capsys.readouterr().err
    elsewhere = ("--topology", "cpu:16", "--mesh", "data=8,model=2", "--json", "r.json")
    assert _of_split(command, "first", *elsewhere) == 0
    assert Report.load(here / "r.json").total.payload_bytes == 16 // 8 * 64 * 4


def test_stand_ins_and_other_topologies(here):
    """A topology takes the place of the devices of this machine."""
    assert _report("--mesh", "data=-1,model=2", "--topology", "cpu:16", "--json", "r.json") == 0
    report = Report.load(here / "r.json")
    assert (dict(report.mesh), report.stand_in) == ({"data": 8, "model": 2}, True)


def test_a_broken_limit_is_an_exit_code(capsys):
    """A limit that holds gives 0, a broken one 1 and the reason; `--quiet` prints only that."""
    assert _report(*MESH, "--quiet", "--none", "all-gather", "--max-bytes", "model=1KiB") == 0
    assert capsys.readouterr().out == ""
    limits = ("--none", "all-reduce@model", "--max-bytes", "*=100", "--max-count", "all-reduce=0")
    assert _report(*MESH, "--quiet", *limits) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "breaks 3 limits" in err
    assert "1. none, all-reduce over model: allowed 0, found 1" in err


def test_a_preview_is_held_to_limits_too(here, capsys):
    """`--preview` gives the same exchange without compiling, marked as predicted."""
    limits = ("--max-bytes", "model=100")
    assert _report(*MESH, "--preview", "--json", "p.json", *limits) == 1
    out, err = capsys.readouterr()
    assert "predicted, before compilation" in out
    assert err.startswith("lowering a_train:forward ...\n")
    assert "breaks a limit" in err
    found = Report.load(here / "p.json")
    assert (found.predicted, found.total.payload_bytes) == (True, 16 // 4 * 64 * 4)


def test_why_is_printed_and_written(here, capsys):
    """`spmd why` prints where a sharding comes from, and writes the records."""
    program = ("a_train:forward", "out", "--args", "a_train:example_args")
    assert cli.main(["why", *program, *MESH, "--json", "w.json"]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("out in predict; mesh data=4, model=2\n")
    assert "data on dimension 0: its own annotation, output result P('data', None)" in out
    data = json.loads((here / "w.json").read_text())
    assert data["schema"] == "spmd-why/1"
    assert data["values"][0]["spec"] == [["data"], []]


def test_why_of_an_unknown_value(capsys):
    """A name that is not there is an error of one exit code, with what there is."""
    program = ("a_train:forward", "y", "--args", "a_train:example_args")
    assert cli.main(["why", *program, *MESH]) == 2
    assert "why knows no value 'y'" in capsys.readouterr().err


BAD = [
    (("report", "a_train"), "FUNCTION a_train names no object: write module:name, such as"),
    (("report", "a_trian:forward"), "FUNCTION: there is no module 'a_trian' here"),
    (("report", "no.py:forward"), "FUNCTION: there is no file no.py."),
    (("report", "a_train:forwrad"), "a_train has no 'forwrad'; did you mean 'forward'?"),
    (("report", "a_train:forward", "--mesh", "data"), "--mesh data is not a mesh: write axis=size"),
    (("report", "a_train:forward", "--mesh", "a=0"), "--mesh a=0 gives the axis 'a' size 0"),
    (("report", "a_train:forward", "--mesh", "a=1,a=2"), "--mesh a=1,a=2 names the axis 'a' twice"),
    (("report", "a_train:forward", *MESH), "a_train:forward cannot be called so: missing a"),
    (("report", "a_train:forward", "--devices", "0"), "--devices 0 is too few"),
    (("report", "a_train:forward", "--json", "no/r.json"), "--json no/r.json is in a folder that"),
    (("report", "a_train:forward", "--max-bytes", "4MB"), "--max-bytes 4MB is not a limit: write"),
    (("report", "a_train:forward", "--max-count", "a=b"), "--max-count a=b is no whole number."),
    (("report", "a_train:forward", "--max-bytes", "model=1XB"), "is no unit of bytes"),
    (("report", "a_train:forward", "--none", "all-gathers"), "did you mean 'all-gather'?"),
    (("report", "a_train:forward", "--json", "r.txt"), "--json r.txt does not end in .json."),
    (("report", "a_train:forward", "--json", "a.json"), "--json a.json cannot be written."),
    (("fits", "a_train:forward", "--vary", "x"), "--vary x is no dimension of an argument: write"),
    (("sweep", "a_train:forward", *MESH), "sweep needs --topology, once for each mesh to compare."),
    (("sweep", "a_train:forward", "--topology", "cpu:8"), "--topology needs --mesh, such as"),
    (("sweep", "a_train:forward", "--html", "s.txt"), "--html s.txt does not end in .html."),
    (("diff", "no.json", "no.json"), "no.json cannot be read: No such file or directory."),
    (("diff", "a.json", "b.json", "--html", "d.txt"), "--html d.txt does not end in .html."),
    (("show", "P('x')", "--mesh", "x=2"), "show needs --shape for a PartitionSpec"),
    (("show", "P('x')", "--shape", "4"), "show needs --mesh for a PartitionSpec"),
    (("show", "P('x')", "--mesh", "x=2", "--shape", "a"), "--shape a is no shape: write sizes"),
    (("show", "P(x)", "--mesh", "x=2", "--shape", "4"), "P(x) is no PartitionSpec: write P("),
    (("show", "exit()", "--mesh", "x=2", "--shape", "4"), "exit() is no PartitionSpec"),
    (("show", "P('y')", "--mesh", "x=2", "--shape", "4"), "unknown axis 'y'"),
    (("show", "P('x')", "w", "--mesh", "x=2"), "show takes w only with a report"),
    (("show", "no.json", "w"), "no.json cannot be read: No such file or directory."),
    (("show", "a.json", "--shape", "8"), "--shape is not for a.json, which says it."),
    (("show", "a.json", "w", "--spec", "P()"), "--spec is not for a.json, which says it."),
    (("show", "no.npy", "--spec", "P()", "--mesh", "x=2"), "no.npy cannot be read: No such file"),
    (("show", "no.npy"), "show needs --spec for a .npy file"),
    (
        ("show", "a_train:forward", *MESH),
        "spmd: a_train:forward is a function of arguments, and show draws arrays: missing a "
        "required argument: 'w'. For how it is split, write spmd report a_train:forward "
        "--args ... --json r.json, then spmd show r.json.\n",
    ),
    (
        ("report", "a_train:forward", "--mesh", "data=16", "--devices", "8"),
        "spmd: --mesh data=16 needs 16 devices, and --devices 8 starts 8: leave --devices out.\n",
    ),
]


@pytest.mark.parametrize(("args", "sentence"), BAD, ids=lambda part: " ".join(part)[:40])
def test_a_bad_argument_gets_one_sentence(args, sentence, capsys):
    """What cannot be done is said in a sentence on the standard error, with exit code 2."""
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spmd: ")
    assert sentence in err


def test_a_slip_in_an_axis_is_told_before_the_compile(capsys):
    """A limit on an axis that the mesh lacks is an error before anything is compiled."""
    assert _report(*MESH, "--max-bytes", "modle=1KB") == 2
    out, err = capsys.readouterr()
    assert (out, "compiling" in err) == ("", False)
    assert "knows no mesh axis 'modle'" in err


def test_names_are_not_read_as_emoji(here, capsys):
    """A function `train` of a module `train` is not a train."""
    (here / "train.py").write_text((here / "a_train.py").read_text() + "\ntrain = forward\n")
    args = ("--args", "train:example_args", *MESH, "--quiet")
    assert cli.main(["report", "train:train", *args]) == 0
    sys.modules.pop("train")
    assert "compiling train:train: " in capsys.readouterr().err


def test_a_missing_mesh_is_answered_with_the_option(capsys):
    """A function that needs a mesh, and has none, is told the option."""
    assert cli.main(["report", "a_train:forward", "--args", "a_train:example_args"]) == 2
    assert "add --mesh, such as --mesh data=4,model=2" in capsys.readouterr().err


def test_axes_that_a_topology_lacks_are_answered_with_the_option(capsys):
    """A topology without `--mesh` has one axis, which is rarely meant."""
    args = ["a_train:forward", "--args", "a_train:example_args", "--topology", "cpu:8"]
    for command in (["report", *args], ["fits", *args, "--budget", "1GB"]):
        assert cli.main(command) == 2
        err = capsys.readouterr().err
        assert "unknown axis 'data'" in err
        assert "add --mesh, such as --mesh data=4,model=2" in err


def test_an_error_of_the_package_is_printed_without_a_traceback(capsys):
    """An error that names its cause is enough; the exit code is 2."""
    args = ["report", "a_train:forward", "--args", "a_train:example_args", "--mesh", "data=8"]
    assert cli.main(args) == 2
    assert "mesh axes out of 'data'" in capsys.readouterr().err


def test_errors_in_the_users_code_keep_their_traceback(here, capsys):
    """What fails inside of the named module is not dressed up, and is no failed check."""
    (here / "a_broken.py").write_text("import no_such_package\n")
    assert cli.main(["report", "a_broken:f"]) == 2
    err = capsys.readouterr().err
    assert "a_broken.py" in err
    assert err.endswith("ModuleNotFoundError: No module named 'no_such_package'\n")


def test_the_demo_says_what_it_needs(monkeypatch, capsys):
    """Its modules may be named without the extra that they need."""
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.delitem(sys.modules, "spmd.demo.train", raising=False)
    assert cli.main(["report", "spmd.demo.train:step"]) == 2
    assert capsys.readouterr().err == "spmd: the demo needs optax: pip install 'spmd[demo]'\n"


def test_differences_are_an_exit_code(here, capsys):
    """Equal ledgers give 0, others 1 and a table; `--json` writes it."""
    assert _report(*MESH, "--quiet", "--json", "1.json") == 0
    assert _report("--mesh", "data=8,model=1", "--quiet", "--json", "2.json") == 0
    capsys.readouterr()
    assert cli.main(["diff", "1.json", "1.json"]) == 0
    assert cli.main(["diff", "1.json", "2.json", "--json", "d.json"]) == 1
    assert "1 removed (-)" in capsys.readouterr().out
    assert json.loads((here / "d.json").read_text())["removed"]
    (here / "x.json").write_text("{}")
    assert cli.main(["diff", "1.json", "x.json"]) == 2
    assert "x.json" in capsys.readouterr().err


GRID = """\
+-----+-----+-----+
|     | 0:3 | 3:5 |
+-----+-----+-----+
| 0:4 |  0  |  1  |
+-----+-----+-----+
| 4:8 |  2  |  3  |
+-----+-----+-----+"""


def test_show_draws_what_it_is_given(here, capsys):
    """A spec, a file, an argument of a report and an object of a module, each as a picture."""
    np.save(here / "x.npy", np.zeros((8, 5), np.float32))
    mesh = ("--mesh", "data=2,model=2")
    spec = "P('data', 'model')"
    assert cli.main(["show", spec, *mesh, "--shape", "8,5"]) == 0
    assert GRID in capsys.readouterr().out
    assert cli.main(["show", "x.npy", "--spec", spec, *mesh, "--html", "x.html"]) == 0
    assert GRID in capsys.readouterr().out
    assert "<!doctype html>" in (here / "x.html").read_text()
    assert _report(*MESH, "--quiet", "--json", "r.json") == 0
    assert cli.main(["show", "r.json", "x"]) == 0
    assert "f32[16,64] as P('data') on mesh data=4, model=2" in capsys.readouterr().out
    assert cli.main(["show", "r.json"]) == 2
    assert "show needs an argument of r.json; it has w, x." in capsys.readouterr().err
    (here / "placed.py").write_text(PLACED)
    assert cli.main(["show", "placed.py:placed", *MESH]) == 0
    assert "bf16[8,4] as P(None, 'model') on mesh data=4, model=2" in capsys.readouterr().out
    assert (
        cli.main(
            [
                "show",
                "P(('a', 'b'), None, P.UNCONSTRAINED)",
                "--mesh",
                "a=2,b=2",
                "--shape",
                "4,2,2",
            ]
        )
        == 0
    )
    assert "Unconstrained dimensions are drawn whole" in capsys.readouterr().out


PLACED = """
import jax, jax.numpy as jnp
import spmd
from spmd import P

def placed():
    sharding = jax.NamedSharding(spmd.current_mesh(), P(None, "model"))
    return jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=sharding)
"""


def test_pages_are_written(here):
    """`--html` writes the page of a report and that of a difference."""
    assert _report(*MESH, "--quiet", "--json", "1.json", "--html", "1.html") == 0
    assert _report("--mesh", "data=8,model=1", "--quiet", "--json", "2.json") == 0
    assert (here / "1.html").read_text() == Report.load(here / "1.json").to_html()
    assert cli.main(["diff", "1.json", "2.json", "--html", "d.html"]) == 1
    assert "1.json → 2.json" in (here / "d.html").read_text()


def test_a_sweep_has_a_row_for_each_topology(capsys):
    """Meshes are compared in one table, the axis that was left open filled in."""
    args = ("--topology", "cpu:4", "--topology", "cpu:8", "--mesh", "data=-1,model=2")
    function = ("a_train:forward", "--args", "a_train:example_args")
    assert cli.main(["sweep", *function, *args]) == 0
    out = capsys.readouterr().out
    assert "data=2, model=2" in out
    assert "data=4, model=2" in out


def test_the_page_of_a_sweep_is_written(here, capsys):
    """`--html` writes the page of a sweep, whose charts have the times for a chip."""
    args = ("--topology", "cpu:4", "--topology", "cpu:8", "--mesh", "data=-1,model=2")
    function = ("a_train:forward", "--args", "a_train:example_args")
    assert cli.main(["sweep", *function, *args, "--chip", "v5e", "--html", "s.html"]) == 0
    assert "Time of a call, by the number of devices" in capsys.readouterr().out
    page = (here / "s.html").read_text()
    assert page.count("<circle") == 4
    assert "data=4" in page


def test_fits_is_an_exit_code(capsys):
    """What fits gives 0, what does not 1, and a varied dimension its largest size."""
    function = ("a_train:forward", "--args", "a_train:example_args", *MESH)
    assert cli.main(["fits", *function, "--budget", "1MB"]) == 0
    assert cli.main(["fits", *function, "--budget", "1KB"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert cli.main(["fits", *function, "--budget", "100KB", "--vary", "x:0"]) == 0
    assert "compiling a_train:forward" in capsys.readouterr().err
    assert cli.main(["fits", *function, "--budget", "1MB", "--no-progress"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["report", "fits", "sweep", "diff", "show"])
def test_help_has_examples(command, capsys):
    """`--help` says what the command does, and how it is used."""
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"  spmd {command} " in capsys.readouterr().out


@pytest.mark.slow
def test_help_and_diff_import_no_jax(here):
    """Neither needs JAX, which takes a second to import."""
    _report(*MESH, "--quiet", "--json", "1.json")
    code = (
        "import sys\n"
        "from spmd.__main__ import main\n"
        "assert main(['diff', '1.json', '1.json']) == 0\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_the_command_sets_its_devices(here):
    """In a process of its own, as many virtual devices start as the mesh has."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-m", "spmd", "report", "a_train:forward", "--args"]
        + ["a_train:example_args", "--mesh", "data=3,model=4", "--json", "r.json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "dimension 0 to be divisible by 3" in done.stderr  # of 16 rows


def test_readers_of_options():
    """What options say, and what they may not say."""
    assert parse_axes(" data = 4 ,model=-1", open_size=True) == {"data": 4, "model": -1}
    assert parse_limits("--x", ["model=4MB", "a=b=3"]) == {"model": "4MB", "a=b": "3"}
    assert parse_vary("batch['x:y']:-1") == ("batch['x:y']", -1)
    with pytest.raises(CommandError, match="limits 'a' twice"):
        parse_limits("--x", ["a=1", "a=2"])
    with pytest.raises(CommandError, match="names no object"):
        load(":x", "FUNCTION")


ENDED = """
import os
import jax, jax.numpy as jnp
from spmd import P, pjit, with_sharding_constraint

def resplit(x):
    x = with_sharding_constraint(x, P(("a", "b"))) * 2  # here
    if not os.path.exists("ended"):
        HOW
    return with_sharding_constraint(x, P("b", "a")) * 3

step = pjit(resplit)
args = (jax.ShapeDtypeStruct((12, 12), jnp.float32),)
"""


def _ended(here, end, *more):
    """Runs a report in processes of its own; gives its exit code, output and errors."""
    (here / "a_ended.py").write_text(ENDED.replace("HOW", end))
    command = [sys.executable, "-m", "spmd", "report", "a_ended:step", "--args", "a_ended:args"]
    command += ["--mesh", "a=2,b=3", *more]
    done = subprocess.run(
        command, cwd=here, capture_output=True, text=True, timeout=180, check=False
    )
    return done.returncode, done.stdout, done.stderr


def _told(signal_name):
    return f"spmd: the compiler ended its process with {signal_name}; its last words are above.\n"


@pytest.mark.slow
def test_a_command_survives_the_end_of_its_compiler(here):
    """A process that is aborted takes no command with it: exit code 2, the line, and a way out."""
    line = 1 + next(i for i, s in enumerate(ENDED.splitlines()) if s.endswith("# here"))
    code, out, err = _ended(
        here, 'open("ended", "w").close(); os.write(2, b"last words\\n"); os.abort()'
    )
    assert (code, out) == (2, "")
    assert "last words\n" in err
    said = err.partition(_told("SIGABRT"))[2]
    assert "  here      lines where an array is split anew, as a preview says:\n" in said
    assert f"all-to-all over a: payload 96 B, wire 48 B, 1 run, at a_ended.py:{line}" in said
    assert "  fix       constrain the value to P() in between, or split dimensions" in said


@pytest.mark.slow
def test_a_command_tells_the_signal_that_ended_its_compiler(here):
    """What the system killed, for its memory say, is told; nothing is compiled again for it."""
    code, out, err = _ended(here, "os.kill(os.getpid(), 9)")
    assert (code, out) == (2, "")
    assert err.endswith(_told("SIGKILL"))


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="this compiler splits it")
def test_a_mesh_on_which_the_compiler_ends_its_process(here, monkeypatch):
    """XLA of JAX 0.12 cannot take axes of 2 and 3 apart in the other order, and aborts."""
    late = here / "bin" / "cat"  # another process writes what the compiler said last
    late.parent.mkdir()
    late.write_text(f"#!/bin/sh\nsleep 0.5\nexec {shutil.which('cat')}\n")
    late.chmod(0o755)
    monkeypatch.setenv("PATH", f"{late.parent}:{os.environ['PATH']}")
    code, out, err = _ended(here, "pass")
    assert (code, out) == (2, "")
    words, told, lines = err.partition(_told("SIGABRT"))
    assert "Could not slice dimension 0 with size 3" in words
    assert told
    assert "xla::spmd::" in words
    assert "xla::" not in lines
    assert "all-to-all over a: payload 96 B, wire 48 B, 1 run, at a_ended.py:" in lines


STARTS_ANOTHER = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "spmd", "report", "a_started:step"])
"""


@pytest.mark.slow
def test_a_command_that_the_users_code_starts_is_its_own(here):
    """A command that a module starts while another one reads it is nobody's child process."""
    (here / "a_starter.py").write_text(STARTS_ANOTHER)
    (here / "a_started.py").write_text("import time; time.sleep(0.3)")
    done = subprocess.run(
        [sys.executable, "-m", "spmd", "report", "a_starter:step"],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stderr.splitlines() == [
        "spmd: FUNCTION a_started:step: a_started has no 'step'.",
        "spmd: FUNCTION a_starter:step: a_starter has no 'step'.",
    ]


@pytest.mark.slow
def test_an_answer_goes_through_the_child(here):
    """Exit codes, the standard output and limits are those of the child."""
    code, out, err = _ended(here, "return x", "--quiet", "--none", "*", "--json", "r.json")
    assert (code, out) == (0, "")
    assert "lowering" not in err
    assert dict(Report.load(here / "r.json").mesh) == {"a": 2, "b": 3}


def _running(here, text):
    """A report on a module of such a text, in a session of its own."""
    (here / "a_ended.py").write_text(text)
    command = [sys.executable, "-m", "spmd", "report", "a_ended:step", "--args", "a_ended:args"]
    return subprocess.Popen(
        [*command, "--mesh", "a=2,b=3", "--no-progress"],
        cwd=here,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _wait_for(path, running):
    """Until a process has made a file."""
    while not path.exists():
        assert running.poll() is None
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_who_ends_a_command_is_not_told_that_its_compiler_did(sent, here):
    """The code is that of the signal, as a shell gives it."""
    waiting = (
        "import signal, sys, time; signal.signal(2, signal.SIG_DFL); "
        'signal.signal(15, lambda *_: print("*** SIGTERM received", file=sys.stderr)); '
        'open("there", "w").close(); time.sleep(60)'
    )
    with _running(here, ENDED.replace("HOW", waiting)) as running:
        _wait_for(here / "there", running)
        if sent is signal.SIGTERM:
            running.terminate()
        else:
            os.killpg(running.pid, sent)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 128 + sent
    assert err == "spmd: interrupted\n"


HEARD = """
import signal, time
try:
    open("there", "w").close()
    time.sleep(60)
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as deaf as in a compile, from here on
    open("heard", "w").close()
    time.sleep(60)
"""


def test_a_file_is_there_when_it_is_whole(tmp_path):
    """What fails on the way leaves what was there; links and the mode of a file stay."""
    folder = tmp_path / "written"
    folder.mkdir()
    path, link = folder / "plan.json", folder / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    refused = pytest.raises(CommandError, match=r"link\.json cannot be written: full")
    with refused, options.writing(link) as part:
        part.write_text("hal")
        raise OSError(28, "full")
    assert path.read_text() == "old"
    with options.writing(link) as part:
        part.write_text("new")
    assert (path.read_text(), link.is_symlink()) == ("new", True)
    assert path.stat().st_mode & 0o777 == 0o640
    with options.writing(folder / "other.html") as part:
        part.write_text("<p>")
    names = ["link.json", "other.html", "plan.json"]
    assert sorted(one.name for one in folder.iterdir()) == names
    with options.writing(pathlib.Path(os.devnull)) as part:
        part.write_text("gone")
    assert not pathlib.Path(os.devnull).is_file()


@pytest.mark.slow
def test_an_interrupt_that_is_not_heard(here):
    """Python hears of one when the compiler is done. Until then one more ends the command."""
    with _running(here, HEARD) as running:
        for name in ("there", "heard"):  # the first one is heard, and what it ends goes on
            _wait_for(here / name, running)
            time.sleep(1.0)  # two before the command's turn would be one to it
            os.killpg(running.pid, signal.SIGINT)
        # Said once, and once more where the machine kept the child from hearing the first in time.
        notice = "spmd: ends when the compiler is done; interrupt again to end at once\n"
        lines = []
        for line in running.stderr:
            lines += [line] if line.strip() else []
            if line == notice:
                os.killpg(running.pid, signal.SIGINT)
    assert running.returncode == 130
    assert set(lines[:-1]) == {notice}
    assert lines[-1] == "spmd: interrupted\n"


EARLY = """
import runpy, sys
class Interrupted:
    def find_spec(self, name, *rest):
        if name == "spmd.cli.plan":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_module("spmd", run_name="__main__")
"""


@pytest.mark.slow
def test_an_interrupt_before_the_command_runs():
    """While its modules are read it ends the command as any other does."""
    command = [sys.executable, "-c", EARLY, "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stderr) == (130, "spmd: interrupted\n")


DROPPED = """
import time
class Large:
    def __del__(self):
        open("there", "w").close()
        time.sleep(60)
large = Large()
del large
time.sleep(60)
"""


@pytest.mark.slow
def test_an_interrupt_that_python_drops(here):
    """Within a finalizer its exception is told and ignored: it comes once more."""
    with _running(here, DROPPED) as running:
        _wait_for(here / "there", running)
        os.killpg(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=50)
    assert (running.returncode, err) == (130, "spmd: interrupted\n")


def test_an_interrupt_within_the_notice(monkeypatch):
    """Who is told to interrupt again may do so before the telling has returned."""

    class Deaf:
        """A child that hears nothing and ends when it is killed."""

        waits, killed = 0, False

        def wait(self, timeout=None):
            self.waits += 1
            if self.waits == 1:
                signal.raise_signal(signal.SIGINT)
            if self.killed or self.waits > 100:
                return 0
            raise subprocess.TimeoutExpired("a compiler", timeout)

        def kill(self):
            self.killed = True

    monkeypatch.setattr(supervised, "_AT_ONCE", -1)
    monkeypatch.setattr(
        supervised, "print", lambda *_, **__: signal.raise_signal(signal.SIGINT), raising=False
    )
    child, (ours, theirs) = Deaf(), socket.socketpair()
    with ours, theirs, supervised._interrupts() as times:
        assert supervised._ended(child, ours, times) == -signal.SIGINT
    assert child.killed


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("show", "P('data')", "--shape", "8,16", "--mesh", "data=8"),
        ("plan", "a_train:predict", "--args", "a_train:example_args", *MESH, "--top=0", "--json"),
    ],
    ids=["show", "plan"],
)
def test_an_output_that_takes_no_more(command):
    """A full disk is said in a sentence; a reader that has enough, such as `head`, is no error."""
    line = [sys.executable, "-m", "spmd", *command]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.endswith("spmd: cannot write the output: No space left on device\n")
    assert "Traceback" not in ended.stderr
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert ended.returncode == 141
    assert "spmd: " not in ended.stderr
    assert "Error" not in ended.stderr
