"""Runs a script in a process of its own, under a hard limit."""

import subprocess
import sys
import textwrap

from hardware import environment
import pytest

HEAD = """
import os, sys, threading, logging
import spmd.host_callback  # before JAX counts the threads it needs
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding
import spmd
from spmd import P, host_callback as hcb, pjit

mesh = spmd.make_mesh({"x": 8})
plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
X = np.arange(8, dtype=np.float32)
XS = jax.device_put(X, NamedSharding(plain, P("x")))

def sharded(fun):
    return jax.jit(
        jax.shard_map(fun, mesh=plain, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )

def say(*args):
    os.write(1, (" ".join(map(str, args)) + "\\n").encode())
"""


def run_alone(source, limit=60, stderr="", head=HEAD, **env):
    """Returns the lines that a script printed; a hang is told with the lines before it.

    Args:
        source: The script, behind a few imports and a mesh of 8 devices.
        limit: Seconds after which it counts as hanging.
        stderr: What it has to write to the standard error; None for anything.
        head: What comes before it.
        env: More environment variables.
    """
    script = head + textwrap.dedent(source)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | env,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"hangs after:\n{out[-1000:]}\n{err[-2000:]}")
    assert process.returncode == 0, f"exit {process.returncode}\n{out[-1000:]}\n{err[-3000:]}"
    assert stderr is None or err == stderr, err[-3000:]
    return out.splitlines()
