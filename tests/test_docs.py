"""README, documentation and notebook are executed: what they print is what they say."""

import contextlib
import io
import json
from pathlib import Path
import re
import subprocess
import sys

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if p.exists()]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```output\n(.*?)^```\n)?", re.S | re.M)


def _run(code: str, namespace: dict) -> str:
    """Executes a block and returns what it printed, its exception included."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, "<doc>", "exec"), namespace)
        except Exception as e:
            print(f"{type(e).__name__}: {e}")
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_page(page, monkeypatch):
    """Every Python block of a page runs, and prints the output block below it to the letter."""
    # Readers do not run under the strict promotion of the test suite.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        namespace: dict = {}
        for number, block in enumerate(BLOCK.finditer(page.read_text()), start=1):
            code, expected = block.groups()
            got = _run(code, namespace)
            # Addresses and trailing blanks are no part of what a page says.
            assert got.rstrip() == (expected or "").rstrip(), f"{page.name}, block {number}"


def test_links():
    """Every relative link of README and documentation leads to a file."""
    pages = [*PAGES, *(ROOT / "docs" / "design").glob("*.md")]
    missing = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not missing


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(notebook):
    """The script half of each notebook runs to its end in a process of its own."""
    done = subprocess.run(
        [sys.executable, notebook], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_executed(notebook):
    """The notebook half holds the same cells as the script, each executed without an error."""
    cells = json.loads(notebook.with_suffix(".ipynb").read_text())["cells"]
    script = notebook.read_text()
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert source in script
            assert cell["execution_count"] is not None
            assert not [o for o in cell["outputs"] if o["output_type"] == "error"]
        else:
            assert all(f"# {line}".rstrip() in script for line in source.splitlines())
    assert len(cells) == len(re.findall(r"^# %%", script, re.M))
