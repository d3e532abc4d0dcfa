"""How files are named for people."""

import os
import sys
import types

import pytest

from spmd.inspection.records.names import short_path


@pytest.mark.parametrize(
    ("below", "short"),
    [("model.py", "model.py"), ("a/b.py", "a/b.py"), ("", ""), ("../x.py", "../x.py")],
)
def test_paths_below_the_working_directory_are_short(below, short, monkeypatch, tmp_path):
    """What is below the working directory is named from there; other paths stay whole."""
    monkeypatch.chdir(tmp_path)
    assert short_path(os.path.join(tmp_path, below)) == (short or f"{tmp_path}{os.sep}")
    assert short_path(f"{tmp_path}x/model.py") == f"{tmp_path}x/model.py"
    assert short_path("<string>") == "<string>"


def test_cells_of_a_notebook_are_named_as_ipython_does(monkeypatch):
    """A cell is `In[5]`, as in IPython's own tracebacks; another file is its path."""
    compiler = types.SimpleNamespace(
        format_code_name={"/tmp/ipykernel_1/2.py": ("Cell", "In[5]")}.get
    )
    shell = types.SimpleNamespace(compile=compiler)
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    assert short_path("/tmp/ipykernel_1/2.py") == "In[5]"
    assert short_path("/other.py") == "/other.py"
    module.get_ipython = lambda: None  # imported, and not running
    assert short_path("/tmp/ipykernel_1/2.py") == "/tmp/ipykernel_1/2.py"
