"""The command ``spmd diff``: in what two reports differ. Nothing here imports JAX."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from spmd.cli.options import FAILED, OK, add_command as add, add_outputs, draw, reading, writable

_EXAMPLES = """\
examples:
  spmd diff before.json after.json
  spmd diff before.json after.json --json diff.json --html diff.html

The exit code is 0 where both have the same collectives, 1 where they differ, and 2 for an error.
"""


def add_command(commands: Any) -> None:
    """Adds ``diff`` to the commands of the command line."""
    about, description = "show in what two reports differ", "Show in what two reports differ."
    parser = add(commands, "diff", _diff, about, description=description, epilog=_EXAMPLES)
    parser.add_argument("a", type=Path, metavar="A.json", help="a report that --json wrote")
    parser.add_argument("b", type=Path, metavar="B.json", help="another one")
    add_outputs(
        parser, json="write the differences to FILE too", html="write the differences as a page"
    )


def _diff(args: argparse.Namespace) -> int:
    writable(args.json, "--json")
    writable(args.html, "--html", ".html")
    from spmd.inspection.records.diff import diff

    with reading():
        found = diff(args.a, args.b)
    draw(found, args.json, args.html)
    return FAILED if found else OK
