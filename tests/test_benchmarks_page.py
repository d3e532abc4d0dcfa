"""The benchmark of the page does in the page what it says it does."""

from pathlib import Path
import re
import subprocess
import sys

from browser import require_chromium
import pytest


@pytest.mark.slow
def test_page():
    """One turn has a time for the load and each action, on pages of 200 and 2,000 collectives."""
    require_chromium()
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "page", "--turns", "1"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        check=True,
        text=True,
        timeout=250,
    )
    lines = done.stdout.splitlines()[3:]
    pattern = r"([\d,]+) collectives, \d\.\d MB: (.*\S) +\d+\.\d\d (?:s|ms)"
    found = [match and match.groups() for match in (re.fullmatch(pattern, one) for one in lines)]
    actions = ["load", "a sort", "a filter", "a keystroke", "a hover on the mesh"]
    assert found == [(count, action) for count in ("200", "2,000") for action in actions]
