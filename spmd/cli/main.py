"""The command line: ``spmd demo``, ``report``, ``fits``, ``sweep``, ``diff`` and the others.

JAX reads the number of CPU devices when it starts, so everything that arguments can get wrong is
said, and the devices are set, before anything here imports it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import os
import sys
import traceback

import spmd
from spmd.cli import (
    bundle,
    calibrate,
    demo,
    diff,
    fits,
    launch,
    plan,
    report,
    show,
    supervised,
    sweep,
    why,
)
from spmd.cli.options import USAGE, CommandError
from spmd.errors import SpmdError

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0; 1 where a check says no: a broken limit, a program that does not fit,
        reports that differ, a loss that is another; 2 where there was nothing to check, for bad
        arguments or an error.
    """
    args = _parser().parse_args(argv)
    # A program that calls this keeps all in its own process.
    if argv is None and getattr(args, "compiles", False) and os.name == "posix":
        if not supervised.is_child():
            return supervised.run(sys.argv[1:])
        supervised.follow_parent()
    try:
        return args.command(args)
    except (CommandError, SpmdError) as error:
        print(f"spmd: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("spmd: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (Exception, SystemExit):
        # The user's code, mostly. Python's own exit code for it would be that of a failed check.
        traceback.print_exc()
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spmd", description="Partition JAX functions over a device mesh."
    )
    parser.add_argument("--version", action="version", version=f"spmd {spmd.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, report, why, fits, plan, sweep, calibrate, diff, show, bundle, launch):
        command.add_command(commands)
    return parser
