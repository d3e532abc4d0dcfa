"""The command ``spmd fits``: whether a function fits the memory of its devices."""

from __future__ import annotations

import argparse
from typing import Any

from spmd.cli.options import FAILED, OK, add_chip, parse_vary
from spmd.cli.programs import add_program_command, call, doing

_EXAMPLES = """\
examples:
  spmd fits train:step --args train:example_args --mesh data=16 --topology v5e:4x4
  spmd fits train:step --args train:example_args --mesh data=8 --budget 16GB --vary "tokens:0"

The exit code is 0 where it fits, 1 where it does not, and 2 where that cannot be told.
"""


def add_command(commands: Any) -> None:
    """Adds ``fits`` to the commands of the command line."""
    about = "say whether a function fits the memory of its devices"
    parser = add_program_command(commands, "fits", _fits, about, epilog=_EXAMPLES)
    parser.add_argument(
        "--budget", metavar="SIZE", help="bytes per device, such as 16GB or 15.75GiB"
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="ARG:DIM",
        help="find the largest size of this dimension that fits; several vary together",
    )
    add_chip(parser)


def _fits(args: argparse.Namespace) -> int:
    vary = [parse_vary(text) for text in args.vary]
    function, mesh, values, keywords = call(args)
    import spmd

    with doing(args, f"compiling {args.function}") as say:
        fit = spmd.fits(
            function,
            *values,
            mesh=mesh,
            budget=args.budget,
            vary=vary or None,
            chip=args.chip,
            model_flops=args.model_flops,
            progress=lambda size, one: say(f"size {size:,}: {one.verdict}"),
            **keywords,
        )
    print(fit)
    return OK if fit else FAILED
