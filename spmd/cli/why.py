"""The command ``spmd why``: which annotations the sharding of a value comes from."""

from __future__ import annotations

import argparse
from typing import Any

from spmd.cli.options import OK, add_outputs, draw, writable
from spmd.cli.programs import add_program_command, call, doing

_EXAMPLES = """\
examples:
  spmd why train:step "out['loss']" --args train:example_args --mesh data=4,model=2
  spmd why train.py:step train.py:42 --args train.py:example_args --mesh data=4,model=2

The exit code is 0, and 2 for an error.
"""


def add_command(commands: Any) -> None:
    """Adds ``why`` to the commands of the command line."""
    about = "say which annotations the sharding of a value comes from"
    parser = add_program_command(commands, "why", _why, about, epilog=_EXAMPLES)
    parser.add_argument(
        "value", metavar="VALUE", help="a path such as batch['x'] or out['loss'], or model.py:42"
    )
    add_outputs(parser, json="write the records to FILE too")


def _why(args: argparse.Namespace) -> int:
    writable(args.json, "--json")
    function, mesh, values, keywords = call(args)
    import spmd

    with doing(args, f"lowering {args.function}"):
        found = spmd.why(function, args.value, *values, mesh=mesh, **keywords)
    draw(found, args.json)
    return OK
