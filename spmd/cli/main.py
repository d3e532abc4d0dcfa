"""The command line: ``spmd demo``, ``report``, ``fits``, ``sweep``, ``diff`` and the others.

JAX reads the number of CPU devices when it starts, so everything that arguments can get wrong is
said, and the devices are set, before anything here imports it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import contextlib
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

_INTERRUPTED, _BROKEN_PIPE = 130, 141
"""What a shell says of a process that SIGINT or SIGPIPE ended."""
_WRITERS = ("rich.", "spmd.cli.")
"""Modules that write to the standard output."""


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
    try:
        # A program that calls this keeps all in its own process.
        if argv is None and getattr(args, "compiles", False) and os.name == "posix":
            if not supervised.is_child():
                return supervised.run(sys.argv[1:])
            supervised.follow_parent()
        code = args.command(args)
        _flush()
        return code
    except (CommandError, SpmdError) as error:
        return _failed(f"spmd: {error}\n")
    except KeyboardInterrupt:
        return _failed("spmd: interrupted\n", _INTERRUPTED)
    except (Exception, SystemExit) as error:
        if (failure := _of_output(error)) is None:
            # The user's code, mostly. Python's own exit code would be that of a failed check.
            return _failed(traceback.format_exc())
        if isinstance(failure, BrokenPipeError):  # who reads has enough: as `head` has of `yes`
            return _BROKEN_PIPE
        return _failed(f"spmd: cannot write the output: {failure.strerror}\n")


def _failed(text: str, code: int = USAGE) -> int:
    """The exit code of a failure, which is said where there is somewhere to say it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
    return code


def _flush() -> None:
    if sys.stdout is not None:  # as it is where it was closed before
        sys.stdout.flush()


def _of_output(error: BaseException) -> OSError | None:
    """Why the standard output takes no more; None where the error is another one.

    What is left of the output would be an error of Python's own at its end; it is dropped.
    """
    found = error.__context__ if isinstance(error, SystemExit) else error  # rich ends so
    if not isinstance(found, OSError) or found.filename is not None:
        return None
    *_, (frame, _) = traceback.walk_tb(found.__traceback__)
    if not frame.f_globals["__name__"].startswith(_WRITERS):
        return None
    with open(os.devnull, "w") as nowhere, contextlib.suppress(OSError):
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spmd", description="Partition JAX functions over a device mesh."
    )
    parser.add_argument("--version", action="version", version=f"spmd {spmd.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, report, why, fits, plan, sweep, calibrate, diff, show, bundle, launch):
        command.add_command(commands)
    return parser
