"""A program that one process saves and another loads, which has traced nothing."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

import spmd
from spmd.inspection import Report


def run(role, path, **env):
    """What the process prints."""
    script = Path(__file__).with_name("bundle_process.py")
    root = str(Path(spmd.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, script, role, path],
        env={**os.environ, "PYTHONPATH": root, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.few(0)
@pytest.mark.parametrize(
    "hoisted",
    [pytest.param("0", id="constants-inside"), pytest.param("1", id="constants-as-arguments")],
)
def test_another_process(tmp_path, hoisted):
    """Values and report are the same, and the other process traces, lowers and compiles nothing.

    The program calls LAPACK, whose functions nothing else has looked up there, and has constants,
    which JAX passes as arguments where it is asked to when it starts.
    """
    path = str(tmp_path / "step.spmd")
    env = {"JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": hoisted}
    saved, loaded = run("save", path, **env), run("load", path, **env)
    assert saved["work"] == [1, 1, 1]
    assert loaded["work"] == [0, 0, 0]
    assert loaded["results"] == saved["results"]
    assert Report.from_json(loaded["report"]) == Report.from_json(saved["report"])
    assert saved["constants"] == loaded["constants"] == int(hoisted)
