"""Runs of several processes, by ``spmd launch``, under a hard limit."""

from dataclasses import dataclass
import os
import signal
import subprocess
import sys
import textwrap

#: What every program starts with; `say` tells the test something, `part` cuts what a process has.
HEAD = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import spmd
from spmd import P, distributed as d, pjit, pmap

def say(*words):
    with open(os.path.join(os.environ["SAID"], os.environ["SPMD_PROCESS_ID"]), "a") as f:
        print(*words, file=f)

def part(whole, axis=0):
    return np.split(np.asarray(whole), jax.process_count(), axis)[jax.process_index()]

def whole(x):
    return d.process_allgather(x, tiled=True)
"""

#: And what most of them go on with.
START = (
    HEAD
    + """
d.initialize()
me, count = jax.process_index(), jax.process_count()
mesh = spmd.make_mesh({"data": 4, "model": 2})
"""
)


@dataclass
class Run:
    """What came of a run: its exit code, what each process said, and all output."""

    code: int
    said: list[str]
    out: str
    err: str


def launch(
    tmp_path,
    program,
    processes=2,
    devices=4,
    *,
    head=START,
    options=(),
    arguments=(),
    limit=100,
    env=(),
):
    """Runs a program in several processes; what is left after `limit` seconds is killed."""
    path, said = tmp_path / "program.py", tmp_path / "said"
    path.write_text(head + textwrap.dedent(program))
    said.mkdir(exist_ok=True)
    outer = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "spmd", "launch", "-n", str(processes)]
    command += ["--devices", str(devices), *options, str(path), *map(str, arguments)]
    with subprocess.Popen(
        command,
        env={**outer, "SAID": str(said), **dict(env)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            out, err = running.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # the kernel ends the processes then
            out, err = running.communicate()
            raise AssertionError(f"hangs\n{out[-3000:]}\n{err[-5000:]}") from None
    told = [said / str(i) for i in range(processes)]
    lines = [t.read_text().rstrip("\n") if t.exists() else "" for t in told]
    return Run(code=running.returncode, said=lines, out=out, err=err)


def passed(tmp_path, program, processes=2, devices=4, **options):
    """Runs a program that has to end well in every process; returns what each said."""
    program = textwrap.dedent(program) + "\nsay('passed')\n"
    run = launch(tmp_path, program, processes, devices, **options)
    assert run.code == 0, f"exit {run.code}\n{run.out[-2000:]}\n{run.err[-5000:]}"
    assert [s.splitlines()[-1] for s in run.said] == ["passed"] * processes
    return [s.removesuffix("passed").rstrip("\n") for s in run.said]
