"""The command ``spmd report``: every collective of a function, and limits on them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from spmd.cli import supervised
from spmd.cli.options import (
    FAILED,
    OK,
    CommandError,
    add_chip,
    add_outputs,
    check_time,
    parse_limits,
    writable,
    writing,
)
from spmd.cli.programs import add_program_command, call, doing
from spmd.testing._budgets import check_axes, read_budget

_EXAMPLES = """\
examples:
  spmd report train:step --args train:example_args --mesh data=4,model=2
  spmd report train.py:step --args train.py:example_args --mesh data=32,model=8 \\
      --topology v5e:16x16 --json r.json --html r.html
  spmd report train:step --args train:example_args --mesh data=8 \\
      --none all-gather --max-bytes data=4MB
  spmd report train:step --args train:example_args --mesh data=16 --topology v5e:4x4 \\
      --max-time 20ms

The exit code is 0, 1 where a limit is broken, and 2 for an error.
"""


def add_command(commands: Any) -> None:
    """Adds ``report`` to the commands of the command line."""
    about = "show every collective of a function with its line, axes, bytes"
    parser = add_program_command(commands, "report", _report, about, epilog=_EXAMPLES)
    add_outputs(
        parser,
        json="write the report to FILE too",
        html="write the report as a page",
        trace="write a Perfetto trace to FILE",
    )
    for option, text in (
        ("--all-frames", "show whole stacks, libraries too"),
        ("--quiet", "print only limits that are broken"),
        ("--all", "list all collectives, not only 40"),
        ("--preview", "predict the collectives without compiling"),
    ):
        parser.add_argument(option, action="store_true", help=text)
    limits = parser.add_argument_group("limits, for CI: the exit code is 1 where one is broken")
    for option, metavar, text in (
        (
            "--none",
            "KIND[@AXIS]",
            "what must not occur, such as all-gather or all-gather@model",
        ),
        (
            "--max-bytes",
            "WHAT=SIZE",
            "most bytes that a device may send in one call: model=4MB, all-reduce=2GB, '*=1GB'",
        ),
        ("--max-count", "WHAT=N", "most executions in one call: all-gather=8"),
    ):
        limits.add_argument(option, action="append", default=[], metavar=metavar, help=text)
    limits.add_argument("--max-time", metavar="TIME", help="longest time of a call: 20ms")
    add_chip(parser)


def _report(args: argparse.Namespace) -> int:
    writable(args.json, "--json")
    writable(args.trace, "--trace")
    writable(args.html, "--html", ".html")
    limits = {
        "none": args.none,
        "max_bytes": parse_limits("--max-bytes", args.max_bytes),
        "max_count": _counts(parse_limits("--max-count", args.max_count)),
    }
    # A slip in a limit is told before anything compiles, which may take minutes.
    budget = read_budget(limits)
    check_time("--max-time", args.max_time)
    function, mesh, values, keywords = call(args)
    import spmd

    if mesh is not None:
        check_axes([budget], dict(mesh.shape))
    if supervised.asked_for_lines():
        return _suspects(function, values, keywords, mesh)
    verb, make = ("lowering", spmd.preview) if args.preview else ("compiling", spmd.report)
    with doing(args, f"{verb} {args.function}"):
        report = make(
            function, *values, mesh=mesh, chip=args.chip, model_flops=args.model_flops, **keywords
        )
    if not args.quiet:
        report.show(all_frames=args.all_frames, limit=None if args.all else 40)
    for path in (args.json, args.html):
        if path:
            with writing(path) as part:
                report.save(part)
    if args.trace:
        report.save_trace(args.trace)
    return _hold(report, limits, args.max_time)


def _counts(limits: dict[str, str]) -> dict[str, int]:
    for key, text in limits.items():
        if not text.isdecimal():
            raise CommandError(f"--max-count {key}={text} is no whole number.")
    return {key: int(text) for key, text in limits.items()}


def _suspects(function: Any, values: tuple, keywords: dict[str, Any], mesh: Any) -> int:
    """Prints the lines for which XLA may have ended the process that compiled.

    Its check fails where an array is split anew and it takes several mesh axes apart in another
    order than they are in, which works for powers of two alone. The prediction has these exchanges
    without a compile.
    """
    import spmd
    from spmd.testing._assertions import show

    found = spmd.preview(function, *values, mesh=mesh, **keywords).collectives
    moved = (one for one in found if one.kind in ("all-to-all", "collective-permute"))
    if lines := dict.fromkeys(f"            {show(one)}\n" for one in moved):
        text = (
            "  here      lines where an array is split anew, as a preview says:\n"
            f"{''.join(lines)}"
            "  fix       constrain the value to P() in between, or split dimensions over mesh\n"
            "            axes in the same order before and after"
        )
        print(text, file=sys.stderr)
    return FAILED


def _hold(report: Any, limits: dict[str, Any], max_time: str | None) -> int:
    from spmd.testing import assert_collectives, assert_time

    broken = False
    try:
        if any(limits.values()):
            assert_collectives(report, **limits)
    except AssertionError as error:
        print(error, file=sys.stderr)
        broken = True
    try:
        if max_time is not None:
            assert_time(report, max=max_time)
    except AssertionError as error:
        print(error, file=sys.stderr)
        broken = True
    return FAILED if broken else OK
