"""The command line: ``spmd demo``, ``report``, ``fits``, ``sweep``, ``diff`` and the others.

JAX reads the number of CPU devices when it starts, so everything that arguments can get wrong is
said, and the devices are set, before anything here imports it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import contextlib
import importlib.util
import os
import sys
import traceback

import spmd
from spmd.cli import bundle as bundle_cli, launch as launch_cli, report as cli_report, supervised
from spmd.cli.options import CommandError
from spmd.demo.options import Options, add_arguments, options_from
from spmd.errors import SpmdError

_USAGE = 2
_FAILED = 1
_INTERRUPTED = 130

_EXAMPLES = """\
examples:
  spmd demo                          train on a mesh of 4 x 2 virtual CPU devices
  spmd demo --mesh data=8            pure data parallelism
  spmd demo --mesh data=2,model=8 --devices 16
  spmd demo --verify                 compare with the same training unsharded
  spmd demo --steps 50 --json r.json --html r.html
"""


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
        return _fail(str(error), _USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except Exception:
        # The user's code, mostly. Python's own exit code for it would be that of a failed check.
        traceback.print_exc()
        return _USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spmd", description="Partition JAX functions over a device mesh."
    )
    parser.add_argument("--version", action="version", version=f"spmd {spmd.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a small transformer on virtual devices and show what the partitioner did",
        description=(
            "Train a character transformer with spmd.pjit on virtual CPU devices, then show\n"
            "its parameters, one of them on the mesh, the collectives of a step, its memory."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(demo)
    demo.set_defaults(command=_demo)
    cli_report.add_commands(commands, set_device_count)
    bundle_cli.add_command(commands, set_device_count)
    launch_cli.add_command(commands)
    return parser


def _demo(args: argparse.Namespace) -> int:
    options = options_from(args)
    if importlib.util.find_spec("optax") is None:
        return _fail("the demo needs optax: pip install 'spmd[demo]'", _USAGE)
    set_device_count(options.devices)
    return _run_demo(options)


def _run_demo(options: Options) -> int:
    from rich.console import Console

    from spmd.demo.run import run

    report = run(options, Console(highlight=False))
    failed = report.verification is not None and not report.verification.passed
    return _FAILED if failed else 0


def set_device_count(count: int) -> None:
    """Have JAX start on so many virtual CPU devices, whatever the environment says.

    Args:
        count: number of devices. Where JAX has already started, nothing changes.
    """
    flag = "--xla_force_host_platform_device_count"
    kept = [word for word in os.environ.get("XLA_FLAGS", "").split() if not word.startswith(flag)]
    os.environ["XLA_FLAGS"] = " ".join(kept)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    if "jax" in sys.modules:
        # It has read the environment already, but not necessarily started.
        config = sys.modules["jax"].config
        with contextlib.suppress(RuntimeError):  # it has started: `run` counts the devices
            config.update("jax_platforms", "cpu")
            config.update("jax_num_cpu_devices", count)


def _fail(message: str, code: int) -> int:
    print(f"spmd: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
