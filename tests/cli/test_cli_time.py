"""The time of a call on the command line: `--chip`, `--max-time`, `--model-flops`, calibrate."""

import dataclasses
import json
import re
import sys

import pytest

from spmd import __main__ as cli
from spmd.cli import options
from spmd.inspection import CHIPS, Chip, Report
from spmd.inspection.compile import calibrate

TRAIN = """
import jax, jax.numpy as jnp
from spmd import P, pjit

forward = pjit(lambda x, w: x @ w, in_axis_resources=(P("data"), None))
args = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)
"""
#: FLOPs of the product; of eight devices each does an eighth.
WHOLE = 2 * 64 * 32 * 16
#: A chip on which that takes 32 ms, and nothing else takes time.
SLOW = Chip(name="slow", flops=WHOLE / 8 / 0.032, hbm=1e30, link=1e30, hop=0.0)


@pytest.fixture(name="here", autouse=True)
def _here(tmp_path, monkeypatch):
    """A folder with a module and the file of a chip, as the working directory."""
    (tmp_path / "a_timed.py").write_text(TRAIN)
    (tmp_path / "slow.json").write_text(json.dumps(SLOW.to_json()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(options, "set_device_count", lambda count: None)
    yield tmp_path
    sys.modules.pop("a_timed", None)


def run(command, *args):
    """A command on the product, on eight virtual devices."""
    mesh = () if "--topology" in args else ("--mesh", "data=8")
    return cli.main([command, "a_timed:forward", "--args", "a_timed:args", *mesh, *args])


# report


def test_a_report_for_a_chip(here, capsys):
    """The head has the time; the file has it too."""
    assert run("report", "--chip", "slow.json", "--json", "r.json") == 0
    out = capsys.readouterr().out
    line = "32.0 ms a call on slow (predicted); MFU 100%, HFU 100%; bound by compute"
    assert out.splitlines().count(line) == 1
    time = Report.load(here / "r.json").time
    assert (time.chip, time.model_flops) == ("slow", WHOLE)
    assert time.seconds == pytest.approx(0.032)


def test_a_report_without_one(capsys):
    """CPUs have no time: the head says so once, and what to add."""
    assert run("report") == 0
    assert capsys.readouterr().out.count("no time for CPU; give topology= or chip=") == 1


def test_a_preview_for_a_chip(capsys):
    """A prediction has the time of its products."""
    assert run("report", "--preview", "--chip", "slow.json") == 0
    assert "32.0 ms a call on slow (predicted)" in capsys.readouterr().out


def test_flops_of_the_model(here):
    """`--model-flops` is what the MFU counts."""
    options = ("--chip", "slow.json", "--model-flops", str(WHOLE / 4), "--quiet")
    assert run("report", *options, "--json", "r.json") == 0
    assert Report.load(here / "r.json").time.mfu == pytest.approx(0.25)


def test_a_limit_on_time(capsys):
    """Kept it gives 0, broken 1 and the message; no table with `--quiet`."""
    chip = ("--chip", "slow.json", "--quiet", "--no-progress")
    assert run("report", *chip, "--max-time", "33ms") == 0
    assert capsys.readouterr() == ("", "")
    assert run("report", *chip, "--max-time", "30 ms") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "`<lambda>` breaks a limit on its time: mesh data=8; cpu.",
        "32.0 ms a call on slow (predicted); MFU 100%, HFU 100%; bound by compute",
        "1. max, a call: allowed 30 ms, found 32.0 ms, 2.00 ms too much",
        "     32.0 ms, 100%: compute",
    ]


def test_limits_of_both_kinds(capsys):
    """Limits on collectives and on time are both told, whichever is broken."""
    chip = ("--chip", "slow.json", "--quiet", "--no-progress")
    split = ("--mesh", "data=4,model=2", "--none", "*@model", "--max-time", "1ms")
    args = ["report", "a_timed:summed", "--args", "a_timed:args", *chip, *split]
    with open("a_timed.py", "a") as file:
        file.write("summed = pjit(lambda x, w: x @ w, (P('data', 'model'), P('model')), P('data'))")
    assert cli.main(args) == 1
    err = capsys.readouterr().err
    assert "breaks a limit on its collectives" in err
    assert "breaks a limit on its time" in err
    args[args.index("1ms")] = "1s"
    assert cli.main(args) == 1
    assert "on its time" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("20", "--max-time: '20' has no unit: write 20s, 20ms, 20us or 20ns."),
        ("0.02", "--max-time: '0.02' has no unit: write 0.02s, 0.02ms, 0.02us or 0.02ns."),
        ("20 megs", "--max-time: 'megs' is no unit of time: write 20s, 20ms, 20us or 20ns."),
        ("soon", "--max-time: 'soon' is no time: write '20ms', '1.5s' or '300us'."),
    ],
)
def test_limits_that_are_no_times(text, told, capsys):
    """They are told in a line, before anything compiles; the exit code is 2."""
    assert run("report", "--max-time", text) == 2
    assert capsys.readouterr() == ("", f"spmd: {told}\n")


def test_a_limit_where_no_time_is_known(capsys):
    """A limit that nothing can be held to is no broken one: the exit code is 2."""
    assert run("report", "--max-time", "20ms", "--quiet", "--no-progress") == 2
    assert capsys.readouterr().err == (
        "spmd: assert_time knows no time of `<lambda>`.\n"
        "  got       no time for CPU; give topology= or chip=\n"
        "  fix       a mesh of spmd.topology('v5e:4x4', axes), or chip='v5e'\n"
    )


@pytest.mark.parametrize("command", [("report",), ("fits", "--budget", "1GB")])
def test_chips_that_are_none(command, capsys):
    """A wrong name, a missing file and impossible FLOPs: a line each, and the exit code is 2."""
    cases = {
        ("--chip", "v5d"): " knows no chip 'v5d' (did you mean 'v5p'?).",
        ("--chip", "none.json"): " cannot read a chip from 'none.json'.",
        ("--model-flops", "nan"): " cannot read model_flops.",
        ("--model-flops", "-1"): " cannot read model_flops.",
    }
    for options_given, told in cases.items():
        assert run(*command, "--no-progress", *options_given) == 2
        err = capsys.readouterr().err
        assert told in err.splitlines()[0]
        assert "Traceback" not in err
    with pytest.raises(SystemExit) as caught:
        run(*command, "--model-flops", "many")
    assert caught.value.code == 2


# fits, sweep, diff


def test_fits_for_a_chip(capsys):
    """What fits is told with its time; with `--vary`, that of the largest size."""
    fits = ("fits", "--budget", "1MB", "--chip", "slow.json", "--no-progress")
    assert run(*fits) == 0
    line = "  32.0 ms a call on slow (predicted); MFU 100%, HFU 100%; bound by compute"
    assert line in capsys.readouterr().out.splitlines()
    assert run(*fits, "--model-flops", str(WHOLE / 2)) == 0
    assert "MFU 50%, HFU 100%" in capsys.readouterr().out
    assert run("fits", "--budget", "1MB") == 0
    assert "a call" not in capsys.readouterr().out
    assert run(*fits, "--vary", "x:0", "--budget", "20KB") == 0
    out = capsys.readouterr().out
    # On each device all of the weights, 2,048 bytes, and rows / 8 of 32 and 16 floats.
    rows = (20_000 - 2048) // (48 * 4) * 8
    assert f"{rows:,}" in out
    assert f"{32 * rows / 64:,.0f} ms a call on slow" in out


def test_a_sweep_for_a_chip(capsys):
    """The table has times and MFUs beside the meshes."""
    topologies = ("--mesh", "data=-1", "--topology", "cpu:2", "--topology", "cpu:4")
    assert run("sweep", *topologies, "--chip", "slow.json", "--no-progress") == 0
    out = capsys.readouterr().out
    assert re.search(r"^\s*cpu:2 \*? +data=2 +128 ms +100% ", out, re.M)
    assert re.search(r"^\s*cpu:4 \*? +data=4 +64\.0 ms +100% ", out, re.M)
    assert run("sweep", *topologies, "--no-progress") == 0
    assert "MFU" not in capsys.readouterr().out


def test_times_of_two_reports(capsys, here):
    """`spmd diff` shows both times; they alone make no difference of the exit code."""
    (here / "fast.json").write_text(
        json.dumps(dataclasses.replace(SLOW, name="fast", flops=2 * SLOW.flops).to_json())
    )
    for name in ("slow", "fast"):
        assert run("report", "--chip", f"{name}.json", "--quiet", "--json", f"r_{name}.json") == 0
    capsys.readouterr()
    assert cli.main(["diff", "r_slow.json", "r_fast.json", "--json", "d.json"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "time of a call 32.0 ms 16.0 ms -16.0 ms (-50.0%)" in out
    assert "chip slow fast" in out
    (first, *_) = json.loads((here / "d.json").read_text())["time"]
    assert (first["name"], first["a"]) == ("seconds", pytest.approx(0.032))


# calibrate


@pytest.fixture(name="quick")
def _quick(monkeypatch):
    """Small arrays: what is measured does not matter here."""
    monkeypatch.setattr(calibrate, "_LARGE_ON_CPU", 2**20)
    monkeypatch.setattr(calibrate, "_LARGEST", 256)


@pytest.mark.slow
def test_calibrate(quick, capsys, here):
    """It tells and writes the figures of this machine; the file is a chip for a report."""
    assert cli.main(["calibrate", "--json", "chip.json"]) == 0
    out, err = capsys.readouterr()
    name, *rows = out.splitlines()
    assert name == "cpu"
    number = r"[\d,]+\.\d+"
    for row, pattern in zip(
        rows,
        (
            rf"  products   +{number} TFLOP/s",
            rf"  memory     +{number} GB/s",
            rf"  exchanges  +{number} GB/s, \d+ us each",
        ),
        strict=True,
    ):
        assert re.fullmatch(pattern, row)
    lines = err.splitlines()
    assert lines[:4] == ["measuring ...", "copies", "products", "exchanges"]
    assert re.fullmatch(r"measuring: \d+\.\d s", lines[4])
    data = json.loads((here / "chip.json").read_text())
    assert (data["schema"], data["name"], data["box"]) == ("spmd-chip/1", "cpu", 8)
    assert run("report", "--chip", "chip.json") == 0
    assert " a call on cpu (predicted); MFU " in capsys.readouterr().out
    assert cli.main(["calibrate", "--no-progress"]) == 0
    assert capsys.readouterr().err == ""


def test_calibrate_of_one_device(quick, capsys, monkeypatch):
    """Without another device no exchange is measured, and none is told."""
    monkeypatch.setattr(calibrate.jax, "local_devices", lambda: calibrate.jax.devices()[:1])
    assert cli.main(["calibrate", "--no-progress"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "  exchanges  not measured: one device; with --devices N, of N virtual CPU devices"
    )


def test_what_calibrate_refuses(capsys, here, monkeypatch):
    """Slips are told before anything is measured; the exit code is 2."""
    monkeypatch.setattr(calibrate, "_seconds", None)
    (here / "taken.json").mkdir()
    for args, told in (
        (["--devices", "0"], "--devices 0 is too few: it has to be at least 1."),
        (["--json", "chip.txt"], "--json chip.txt does not end in .json."),
        (["--json", "no/chip.json"], "--json no/chip.json is in a folder that does not exist."),
        (["--json", "taken.json"], "--json taken.json cannot be written."),
    ):
        assert cli.main(["calibrate", *args]) == 2
        assert capsys.readouterr() == ("", f"spmd: {told}\n")


# help


@pytest.mark.parametrize("command", ["report", "fits", "sweep"])
def test_help_of_commands_with_a_time(command, capsys):
    """The options are described where they are."""
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--chip CHIP whose figures the time is for: a name such as v5e, or a file of spmd" in out
    assert "--model-flops N FLOPs of one call on all devices, for the MFU" in out
    assert ("--max-time TIME longest time of a call" in out) == (command == "report")


def test_help_of_calibrate(capsys):
    """What it does, what it writes, and how the file is used."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["calibrate", "--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Measure products, copies and exchanges of this machine." in out
    assert "--json FILE write the figures to FILE, for --chip and chip=" in out
    assert "--chip chip.json" in out


def test_known_chips_have_their_names():
    """A chip is called what it is asked for by."""
    assert {name: chip.name for name, chip in CHIPS.items()} == {name: name for name in CHIPS}
