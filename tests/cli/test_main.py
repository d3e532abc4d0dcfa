"""The command line: what it says to bad arguments, and what it leaves alone."""

import importlib.util
import os
from pathlib import Path
import subprocess
import sys

import pytest

import spmd
from spmd import __main__ as cli
from spmd.cli import options

# Runs the command line beside an empty `spmd`, so that what it imports itself can be told from
# what the package imports.
_ALONE = """
import pathlib, sys, types
spmd = types.ModuleType("spmd")
spmd.__path__, spmd.__version__ = [sys.argv.pop(1)], "9"
sys.modules["spmd"] = spmd
from spmd.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
assert "jax" not in sys.modules, "JAX was imported"
sys.exit(code)
"""


def _alone(*args: str) -> subprocess.CompletedProcess:
    package = str(Path(spmd.__file__).parent)
    return subprocess.run(
        [sys.executable, "-c", _ALONE, package, *args], capture_output=True, text=True, timeout=60
    )


BAD = [
    (
        ("--mesh", "data=3"),
        "--mesh data=3 cannot split the 32 sequences of a batch over data=3: "
        "choose one of 1, 2, 4, 8, 16, 32.",
    ),
    (
        ("--mesh", "model=3"),
        "--mesh model=3 cannot split the 8 heads over model=3: choose one of 1, 2, 4, 8.",
    ),
    (("--mesh", "data=0"), "--mesh data=0 gives the axis 'data' size 0: at least 1 is needed."),
    (("--mesh", "data=-1"), "--mesh data=-1 gives the axis 'data' size -1: at least 1 is needed."),
    (
        ("--mesh", "foo"),
        "--mesh foo is not a mesh: write axis=size pairs, such as data=4,model=2.",
    ),
    (("--mesh", ""), "--mesh '' is not a mesh: write axis=size pairs, such as data=4,model=2."),
    (("--mesh", "data=2,data=4"), "--mesh data=2,data=4 names the axis 'data' twice."),
    (
        ("--mesh", "modle=2"),
        "--mesh modle=2 names the axis 'modle', but the demo's are 'data' and 'model'; "
        "did you mean 'model'?",
    ),
    (
        ("--mesh", "x=8"),
        "--mesh x=8 names the axis 'x', but the demo's are 'data' and 'model'.",
    ),
    (
        ("--mesh", "data=16"),
        "--mesh data=16 needs 16 devices, but there are 8: "
        "add --devices 16 or make the mesh smaller.",
    ),
    (("--devices", "0"), "--devices 0 is too few: it has to be at least 1."),
    (("--steps", "0"), "--steps 0 is too few: it has to be at least 1."),
    (("--seed", "-1"), "--seed -1 is not between 0 and 2147483647."),
    (
        ("--json", "/no/such/folder/r.json"),
        "--json /no/such/folder/r.json is in a folder that does not exist.",
    ),
    (("--html", "r.htm"), "--html r.htm does not end in .html."),
]


@pytest.mark.parametrize(("args", "sentence"), BAD, ids=lambda part: " ".join(part)[:30])
def test_a_bad_argument_gets_one_sentence(args, sentence, capsys):
    """Stderr has one sentence that names the option, stdout nothing, and the exit code is 2."""
    assert cli.main(["demo", *args]) == 2
    assert capsys.readouterr() == ("", f"spmd: {sentence}\n")


@pytest.mark.parametrize(
    ("args", "code"),
    [(("demo", "--mesh", "data=3"), 2), (("--help",), 0), (("demo", "--help"), 0), (("nope",), 2)],
)
def test_arguments_are_checked_without_jax(args, code):
    """Help and errors of the command line do not import JAX, and show no traceback."""
    done = _alone(*args)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_every_option():
    """The help of the demo lists its options and examples."""
    text = _alone("demo", "--help").stdout
    for option in (
        "--mesh",
        "--devices",
        "--steps",
        "--seed",
        "--verify",
        "--json",
        "--html",
        "examples:",
    ):
        assert option in text


def test_version(capsys):
    """``--version`` prints the version of the package."""
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"spmd {spmd.__version__}\n"


def test_without_optax_the_extra_is_named(monkeypatch, capsys):
    """A missing optax is one sentence with the command that installs it."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "optax" else find_spec(name)
    )
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "spmd: the demo needs optax: pip install 'spmd[demo]'\n"


_COUNT = """
import sys
from spmd.cli.options import set_device_count
set_device_count(int(sys.argv[1]))
import jax
print(jax.device_count(), jax.devices()[0].platform)
"""


@pytest.mark.few(0)
@pytest.mark.parametrize("flags", ["", "--xla_force_host_platform_device_count=3"])
def test_the_device_count_is_that_of_the_arguments(flags):
    """JAX starts on as many CPU devices as asked for, whatever the environment said."""
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": ""}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, "5"], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.stdout == "5 cpu\n", done.stderr


def test_other_xla_flags_are_kept(monkeypatch):
    """Only the flag of the device count, which JAX would count against ours, is taken away."""
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=3 --b=2")
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.setenv(name, "")
    monkeypatch.delitem(sys.modules, "jax")
    options.set_device_count(6)
    assert os.environ["XLA_FLAGS"] == "--a=1 --b=2"
    assert os.environ["JAX_NUM_CPU_DEVICES"] == "6"


def test_too_few_devices_in_a_started_process(monkeypatch, capsys):
    """A process whose JAX already runs on fewer devices gets one sentence."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(options, "set_device_count", lambda count: None)
    assert cli.main(["demo", "--mesh", "data=16", "--devices", "16", "--steps", "1"]) == 2
    assert capsys.readouterr().err == (
        "spmd: JAX has already started with 8 devices, and 16 are needed: "
        "start the demo in a process of its own.\n"
    )
