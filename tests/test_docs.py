"""README, documentation and notebooks are executed: what they print is what they say."""

import contextlib
import io
import json
import os
from pathlib import Path
import re
import shlex
import subprocess
import sys

from hardware import require_cuda, require_libtpu
import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if p.exists()]
#: These compile for whole pods, and one program after another for tests that fail.
LONG = {"budgets.md", "pods.md"}
#: These start many processes, compile for a TPU, or plan.
SLOW = {"distributed.md", "plan.md", "time.md"}
SOAKS = (pytest.mark.slow, pytest.mark.soak)
#: A block, what stands after its language, its text, and the output below it. Executed are
#: ``python`` (in one namespace per page), ``python file=NAME`` (written to a file instead) and
#: ``console run`` (each line after a ``$``, with its output below it).
BLOCK = re.compile(
    r"^```(python|console)(?: ([^\n]*))?\n(.*?)^```\n(?:```output\n(.*?)^```\n)?", re.S | re.M
)
#: What differs from one machine, release or run to the next.
VARIES = (
    (re.compile(r"\b(spmd|jax|jaxlib)(:?) \d[\w.]*"), r"\1\2 VERSION"),
    (re.compile(r"\bin \d+\.\d+s\b"), "in N s"),
)


def _same(text: str) -> str:
    """A text without what varies, and without trailing blanks."""
    for pattern, constant in VARIES:
        text = pattern.sub(constant, text)
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _run(code: str, namespace: dict) -> str:
    """Executes a block and returns what it printed, its exception included."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, "<doc>", "exec"), namespace)
        except Exception as e:
            print(f"{type(e).__name__}: {e}")
    return printed.getvalue()


def _shell(text: str) -> str:
    """Executes the commands of a console block and returns the block with what they print."""
    shown = []
    for command in re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, re.M):
        words = shlex.split(command.replace("\\\n", " "))
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTEST_"))}
        done = subprocess.run(
            [sys.executable, "-m", *words],
            capture_output=True,
            text=True,
            timeout=240,
            env=env | {"COLUMNS": "100", "PYTHONIOENCODING": "utf-8"},
            check=False,
        )
        shown += [f"$ {command}", done.stdout.rstrip("\n")]
        if done.returncode:
            # Otherwise the standard error is progress, which says how many seconds went by.
            errors = (e for e in done.stderr.splitlines() if not e.startswith("compiling "))
            shown += ["\n".join(errors).rstrip(), f"(exit code {done.returncode})"]
    return "\n".join(part for part in shown if part.strip("\n"))


def _marks(name: str) -> tuple:
    if name in LONG:
        return SOAKS
    return (pytest.mark.slow,) if name in SLOW else ()


@pytest.mark.few(1, shared=False)  # each page runs on the newest JAX
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=_marks(p.name), id=p.name) for p in PAGES],
)
def test_page(page, monkeypatch, tmp_path):
    """Every block of a page runs, and prints the output below it to the letter."""
    text = page.read_text()
    if "--topology v" in text or 'topology("v' in text:
        require_libtpu()
    if 'topology("h' in text:
        require_cuda()
    monkeypatch.chdir(tmp_path)
    # Readers do not run under the strict promotion of the test suite.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        namespace: dict = {}
        for number, block in enumerate(BLOCK.finditer(text), start=1):
            language, info, code, expected = block.groups()
            if language == "console":
                if info == "run":
                    assert _same(_shell(code)) == _same(code), f"{page.name}, block {number}"
            elif info and info.startswith("file="):
                Path(info.removeprefix("file=")).write_text(code)
            else:
                got = _run(code, namespace)
                assert _same(got) == _same(expected or ""), f"{page.name}, block {number}"


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


def _to_run(notebook):
    """Compilers for a TPU take minutes: that notebook is for `.ci/nightly`."""
    marks = pytest.mark.soak if notebook.stem == "plan_gpt2" else ()
    return pytest.param(notebook, id=notebook.stem, marks=marks)


@pytest.mark.slow
@pytest.mark.timeout(920)  # the process itself has 900 s
@pytest.mark.parametrize("notebook", [*map(_to_run, NOTEBOOKS)])
def test_notebook_runs(notebook):
    """The script half of each notebook runs to its end in a process of its own."""
    done = subprocess.run(
        [sys.executable, notebook], capture_output=True, text=True, timeout=900, check=False
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
