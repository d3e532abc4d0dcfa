"""The rooms of `spmd.inspection` and the commands: each lists its files, and some load no JAX."""

import ast
from pathlib import Path
import re
import subprocess
import sys

import pytest

import spmd

PACKAGE = Path(spmd.__file__).parent
ROOMS = ("records", "hlo", "timing", "shardy", "findings", "compile", "show")
FOLDERS = (
    "_jax",
    "_pmap",
    "bundle",
    "cli",
    "colocated_python",
    "distributed",
    "host_callback",
    "inspection/shardy/targets",
    "launch",
    "planner",
)
#: The rooms of the planner that do not know those after them, nor what is on top of them.
PLANNER = ("program", "cost", "search")


@pytest.mark.parametrize(
    "room",
    [
        *(f"inspection/{room}" for room in ROOMS),
        *(f"planner/{room}" for room in (*PLANNER, "code")),
        *FOLDERS,
    ],
)
def test_a_room_lists_its_files(room):
    """A reader of a folder's docstring sees every file of it, once."""
    folder = PACKAGE / room
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    listed = re.findall(r"^- `(\w+)`: .+\.$", docstring, re.MULTILINE)
    files = {path.stem for path in folder.glob("*.py")} | {
        p.parent.name for p in folder.glob("*/*.py")
    }
    assert sorted(listed) == sorted(files - {"__init__"})


@pytest.mark.parametrize("room", PLANNER)
def test_rooms_of_the_planner_point_one_way(room):
    """What a plan sees of a program knows no costs, and costs know no search."""
    before = PLANNER[: PLANNER.index(room) + 1]
    for path in (PACKAGE / "planner" / room).glob("*.py"):
        taken = re.findall(r"^ *(?:from|import) spmd\.planner\S*", path.read_text(), re.MULTILINE)
        assert {one.split(".")[2] for one in taken} <= {*before}, path.name


@pytest.mark.parametrize("room", ["records", "hlo"])
def test_data_and_text_need_no_jax(room):
    """Records, and what reads the text of a program, load neither JAX nor what draws."""
    code = (
        "import importlib, pkgutil, sys\n"
        f"import spmd.inspection.{room} as room\n"
        "for one in pkgutil.iter_modules(room.__path__, f'{room.__name__}.'):\n"
        "    importlib.import_module(one.name)\n"
        "print(sorted({'jax', 'rich', 'jinja2'} & {*sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
