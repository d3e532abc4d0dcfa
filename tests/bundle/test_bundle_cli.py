"""``spmd bundle`` shows what a bundle holds and whether it could be loaded."""

from bundles import forged, header_of
import jax
import numpy as np
import pytest

import spmd
from spmd import P, pjit
from spmd.__main__ import main


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A bundle in the current folder."""
    monkeypatch.chdir(tmp_path)
    mesh = spmd.make_mesh({"data": 4, "model": 2})

    def step(w, batch):
        return w - batch["x"].mean(), batch["x"].sum()

    f = pjit(step, in_axis_resources=(P(("data", "model")), P()), donate_argnums=0, mesh=mesh)
    f.lower(np.ones((8, 4), np.float32), {"x": np.ones(3, np.float32)}).compile().save("step.spmd")
    return tmp_path / "step.spmd"


def test_what_it_shows(path, capsys):
    """Function, mesh, versions, sizes, arguments and results, to the letter."""
    assert main(["bundle", "step.spmd"]) == 0
    code = header_of(path.read_bytes())["sections"][0]
    version = jax.__version__
    assert capsys.readouterr().out.splitlines() == [
        "step: mesh data=4, model=2 of 8 devices (cpu, cpu)",
        f"spmd {spmd.__version__}, jax {version}, jaxlib {version}",
        f"{path.stat().st_size:,} bytes, of which {code:,} are compiled code",
        "",
        "arguments:",
        "  w           f32[8,4]  P(('data', 'model')) donated",
        "  batch['x']  f32[3]    P()",
        "",
        "results:",
        "  result[0]  f32[8,4]  P(('data', 'model'))",
        "  result[1]  f32[]     P()",
        "",
        "It can be loaded here.",
    ]


def test_what_keeps_it_out(path, capsys):
    """What differs is told field by field, and the exit code is 1."""
    header = header_of(path.read_bytes())
    header["fingerprint"] |= {"jax": "0.1", "device kind": "TPU v5e"}
    path.write_bytes(forged(path.read_bytes(), header))
    assert main(["bundle", "step.spmd"]) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "It cannot be loaded here:",
        f"  jax: 0.1; here: {jax.__version__}",
        "  device kind: TPU v5e; here: cpu",
    ]


def test_what_is_no_bundle(path, capsys):
    """A file that cannot be read, and one that is no bundle, are errors for the user."""
    assert main(["bundle", "missing.spmd"]) == 2
    error = capsys.readouterr().err
    assert error == "spmd: missing.spmd cannot be read: No such file or directory.\n"
    path.write_bytes(b"no")
    assert main(["bundle", "step.spmd"]) == 2
    assert capsys.readouterr().err.startswith("spmd: bundle `step.spmd` is no bundle, or only the")
    assert main(["bundle", "step.spmd", "--devices", "0"]) == 2
    error = capsys.readouterr().err
    assert error == "spmd: --devices 0 is too few: at least 1 is needed.\n"
