"""The command ``spmd launch``: a program in several processes. Nothing here imports JAX."""

from __future__ import annotations

import argparse
from pathlib import Path
import shlex
import sys
from typing import Any

from spmd.cli.options import CommandError, add_command as add, add_devices, at_least
from spmd.launch import _local, _mpirun, _ray
from spmd.launch._local import Launch

_EXAMPLES = """\
examples:
  spmd launch -n 2 train.py                      two processes with the devices they find
  spmd launch -n 2 --devices 4 train.py --lr 3   each with four virtual CPU devices
  spmd launch -n 4 --devices 2 -m pkg.train      a module, as with python -m
  spmd launch -n 16 --on mpirun --engine-options "--hostfile hosts" train.py

The program calls spmd.distributed.initialize() first. When a process fails, the others are
stopped; the exit code is that of the first that failed.
"""


def add_command(commands: Any) -> None:
    """Adds ``launch`` to the commands of the command line."""
    parser = add(
        commands,
        "launch",
        lambda args: _ENGINES[args.on](_options(args)),
        "run a program in several processes on this machine",
        description="Run a Python program in several processes on this machine, as one run.",
        epilog=_EXAMPLES,
        usage="spmd launch -n N [options] (script.py | -m module) [arguments ...]",
    )
    parser.add_argument(
        "-n", "--processes", type=int, required=True, metavar="N", help="how many processes"
    )
    add_devices(parser, "virtual CPU devices of each process (default: the devices that JAX finds)")
    parser.add_argument(
        "--on",
        choices=[*_ENGINES],
        default="local",
        help="who starts the processes: this command, Open MPI or Ray (default: %(default)s)",
    )
    parser.add_argument(
        "--engine-options",
        default="",
        metavar="WORDS",
        help="more options for the engine, such as '--hostfile hosts' or 'address=auto num_gpus=1'",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="the port of this machine where the processes meet (default: a free one)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long the others may go on when one process has failed (default: %(default)g)",
    )
    parser.add_argument(
        "--no-prefix",
        action="store_true",
        help="do not write the number of the process before each line",
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a module instead of a script")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


_ENGINES = {"local": _local.run, "mpirun": _mpirun.run, "ray": _ray.run}


def _options(args: argparse.Namespace) -> Launch:
    at_least("-n", args.processes)
    if args.devices is not None:
        at_least("--devices", args.devices)
    at_least("--port", args.port, 0)
    if args.port > 65535:
        raise CommandError(f"--port {args.port} is too many: it has to be at most 65535.")
    if not args.grace >= 0:
        raise CommandError(f"--grace {args.grace:g} is negative.")
    command = _command(args.module, args.program)
    if args.on == "local" and args.engine_options:
        raise CommandError("--engine-options needs an engine: --on mpirun or --on ray.")
    return Launch(
        command=command,
        processes=args.processes,
        devices=args.devices,
        port=args.port,
        grace=args.grace,
        prefix=not args.no_prefix,
        engine_options=args.engine_options,
    )


def _command(module: str | None, program: list[str]) -> tuple[str, ...]:
    if module is not None:
        return ("-m", module, *program)
    program = program[program[:1] == ["--"] :]  # which may end the options, as elsewhere
    if not program:
        raise CommandError("launch needs a program: spmd launch -n 2 script.py [arguments ...].")
    script = program[0]
    if script.startswith("-"):
        raise CommandError(f"launch does not know the option {script}: see spmd launch --help.")
    if not Path(script).is_file():
        hint = _hint(script, program)
        raise CommandError(f"launch cannot find the script {shlex.quote(script)}{hint}.")
    return tuple(program)


def _hint(script: str, program: list[str]) -> str:
    """What who writes a command or a module as the program should write."""
    if Path(script).name.startswith("python"):
        rest = shlex.join(program[1:])
        return f": {Path(sys.executable).name} is started by itself, write {rest!r}"
    if "/" not in script and not script.endswith(".py"):
        return f": for a module, write -m {script}"
    return ""
