"""The command ``spmd sweep``: time, bytes and memory as the mesh grows."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from spmd.cli.options import OK, CommandError, add_chip, add_outputs, draw, load, writable
from spmd.cli.programs import add_program_command, doing, shapes, start

_EXAMPLES = """\
examples:
  spmd sweep train:step --args train:example_args --mesh data=-1,model=4 \\
      --topology v5e:4x4 --topology v5e:8x8 --topology v5e:16x16 --html sweep.html
"""


def add_command(commands: Any) -> None:
    """Adds ``sweep`` to the commands of the command line."""
    about = "compare time, bytes and memory as the mesh grows"
    parser = add_program_command(commands, "sweep", _sweep, about, epilog=_EXAMPLES, several=True)
    add_chip(parser)
    add_outputs(parser, html="write a page to FILE too")


def _sweep(args: argparse.Namespace) -> int:
    writable(args.html, "--html", ".html")
    axes = start(args)
    if not args.topology:
        raise CommandError("sweep needs --topology, once for each mesh to compare.")
    function = load(args.function, "FUNCTION")
    import spmd

    def args_of(mesh: Any) -> tuple:
        values, keywords = shapes(args.args, mesh)
        return inspect.signature(function).bind(*values, **keywords).args

    with doing(args, f"compiling {args.function} for {len(args.topology)} meshes"):
        sweep = spmd.sweep(
            function,
            meshes=[(name, axes) for name in args.topology],
            args_of=args_of,
            chip=args.chip,
            model_flops=args.model_flops,
        )
    draw(sweep, html_file=args.html)
    return OK
