"""Engines that others run: Open MPI starts the processes, and says to JAX who they are."""

import os
from pathlib import Path
import shutil
import sys
import time
import types

import pytest
from runs import HEAD, launch

from spmd import __main__ as cli
from spmd.launch import _ray
from spmd.launch._local import Launch
from spmd.launch._mpirun import command, untagged


def require_mpirun():
    """Skips where Open MPI is not installed; `.ci/run` installs it."""
    if shutil.which("mpirun") is None and not os.environ.get("CI"):
        pytest.skip("needs mpirun, of Debian's openmpi-bin")


#: Open MPI says which process it is, and nothing else does.
MPI = HEAD.replace("SPMD_PROCESS_ID", "OMPI_COMM_WORLD_RANK")


@pytest.mark.slow
def test_mpirun(tmp_path):
    """Open MPI's processes find one another without being told, and compute together."""
    require_mpirun()
    run = launch(
        tmp_path,
        """
        assert "SPMD_NUM_PROCESSES" not in os.environ
        d.initialize()
        mesh = spmd.make_mesh({"x": 8})
        x = d.host_local_to_global(part(np.arange(8.0)), mesh, P("x"))
        say(sys.argv[1:], jax.process_count(), float(pjit(lambda x: x.sum(), mesh=mesh)(x)))
        sys.stderr.write(f"line {jax.process_index()}\\n")  # gloo writes to the other one
        """,
        head=MPI,
        options=("--on", "mpirun"),
        arguments=("--lr", "3"),
    )
    assert run.code == 0, run.err
    assert run.said == ["['--lr', '3'] 2 28.0"] * 2
    assert {"[0] line 0", "[1] line 1"} <= {*run.err.splitlines()}


@pytest.mark.few(0)  # no JAX in it: one of the two ends is enough
def test_mpirun_says_what_failed(tmp_path):
    """The exit code of a process that fails is that of the run, and the others are stopped."""
    require_mpirun()
    run = launch(
        tmp_path,
        """
        import time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            sys.exit(7)
        time.sleep(60)
        """,
        head="import os, sys\n",
        options=("--on", "mpirun"),
    )
    assert run.code == 7


def require_ray():
    """Skips where there is no Ray, which has no release for this Python."""
    if not os.environ.get("CI") or sys.version_info >= (3, 14):
        pytest.importorskip("ray", reason="needs ray")


@pytest.mark.slow
def test_ray(tmp_path):
    """Actors of a local Ray cluster run the program together, and it is gone afterwards."""
    require_ray()
    run = launch(
        tmp_path,
        """
        x = d.host_local_to_global(part(np.arange(8.0)), mesh, P("data"))
        say(sys.argv[1:], count, float(pjit(lambda x: x.sum(), mesh=mesh)(x)))
        sys.stderr.write(f"line {me}\\n")  # gloo writes to the other one
        """,
        options=("--on", "ray"),
        arguments=("--lr", "3"),
    )
    assert run.code == 0, run.err
    assert run.said == ["['--lr', '3'] 2 28.0"] * 2
    assert {"[0] line 0", "[1] line 1"} <= {*run.err.splitlines()}


@pytest.mark.few(0)  # no JAX in it: one of the two ends is enough
def test_ray_says_what_failed(tmp_path):
    """The first process that fails is named, the others are stopped with their actors."""
    require_ray()
    run = launch(
        tmp_path,
        """
        import time
        with open(os.path.join(os.environ["SAID"], os.environ["SPMD_PROCESS_ID"]), "w") as f:
            print(os.getpid(), file=f)
        other = os.path.join(os.environ["SAID"], "0")
        if os.environ["SPMD_PROCESS_ID"] == "1":
            while not os.path.exists(other):
                time.sleep(0.01)
            sys.exit(7)
        time.sleep(60)
        """,
        head="import os, sys\n",
        options=("--on", "ray", "--grace", "0.5"),
    )
    assert run.code == 7, run.err
    assert "spmd: process 1 has failed with exit code 7; 1 other has 0.5 s to end\n" in run.err
    while Path(f"/proc/{int(run.said[0])}").exists():  # the limit of the test ends it otherwise
        time.sleep(0.01)


def test_the_options_of_ray(monkeypatch, capsys, tmp_path):
    """What an actor needs is said as NAME=VALUE; anything else, and no Ray, is one sentence."""
    assert _ray._options("num_cpus=4 num_gpus=1 address=auto") == {
        "num_cpus": 4.0,
        "num_gpus": 1.0,
        "address": "auto",
    }
    assert _ray._options("") == {"num_cpus": 1.0}
    script = tmp_path / "x.py"
    script.write_text("")
    start = ["launch", "-n", "2", "--on", "ray"]
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main([*start, str(script)]) == 2
    assert capsys.readouterr().err == "spmd: --on ray needs Ray: pip install 'spmd[ray]'.\n"
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    for words, sentence in (
        ("cpus=4", "--engine-options 'cpus' is none of ray's here"),
        ("num_cpus", "--engine-options 'num_cpus' is none of ray's here"),
        ("num_cpus=two", "--engine-options num_cpus=two is no number"),
    ):
        assert cli.main([*start, f"--engine-options={words}", str(script)]) == 2
        assert capsys.readouterr().err == (
            f"spmd: {sentence}: write num_cpus=4, num_gpus=1 or address=HOST:PORT.\n"
        )


def test_the_command_of_mpirun():
    """The engine gets the number of processes, the variables, the user's words and the program."""
    launch = Launch(
        command=("train.py", "--lr", "3"),
        processes=3,
        devices=2,
        port=0,
        grace=1.0,
        prefix=True,
        engine_options="--hostfile 'my hosts'",
    )
    words = command(launch, "mpirun", True)
    assert words[:8] == [
        *("mpirun", "-n", "3", "--tag-output", "--bind-to", "none", "--oversubscribe"),
        "--allow-run-as-root",
    ]
    assert words[words.index("JAX_NUM_CPU_DEVICES=2") - 1] == "-x"
    assert words[-9:-7] == ["--hostfile", "my hosts"]
    assert words[-3:] == ["train.py", "--lr", "3"]
    assert "--allow-run-as-root" not in command(launch, "mpirun", False)


def test_lines_of_mpirun():
    """A line has the number of its process once, however many pieces it was written in."""
    shown = untagged(True)
    assert shown(b"[1,12]<stdout>:a b\n") == b"[12] a b\n"
    assert shown(b"[1,0]<stderr>:a[1,0]<stderr>: b\n") == b"[0] a b\n"
    assert shown(b"mpirun noticed\n") == b"mpirun noticed\n"
    assert untagged(False)(b"[1,0]<stdout>:a\n") == b"a\n"


def test_without_an_engine(monkeypatch, capsys, tmp_path):
    """A missing mpirun, and options for no engine, are one sentence each."""
    script = tmp_path / "x.py"
    script.write_text("")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert cli.main(["launch", "-n", "2", "--on", "mpirun", str(script)]) == 2
    assert capsys.readouterr().err == (
        "spmd: --on mpirun needs Open MPI, and there is no mpirun on the path.\n"
    )
    assert cli.main(["launch", "-n", "2", "--engine-options=-v", str(script)]) == 2
    assert (
        capsys.readouterr().err
        == "spmd: --engine-options needs an engine: --on mpirun or --on ray.\n"
    )
