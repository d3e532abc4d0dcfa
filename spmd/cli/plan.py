"""The command ``spmd plan``: mesh, shardings and constraints for a function."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import inspect
import json
import re
import sys
from typing import Any

from spmd.cli import options, supervised
from spmd.cli.options import FAILED, OK, USAGE, CommandError, add_outputs, at_least, writable
from spmd.cli.programs import add_program_command, called, start
from spmd.inspection.records.sizes import parse_bytes, parse_seconds

_EXAMPLES = """\
examples:
  spmd plan train:step --args train:example_args --topology v5e:4x4 --memory 14GB
  spmd plan train.py:step --args train.py:example_args --mesh data=8,model=2 --topology v5e:4x4 \\
      --fix "batch=P('data')" --never "state['embed']:0=data" --save plan.json --html plan.html
  spmd plan spmd.demo.train:step --args spmd.demo.train:example --topology cpu:8 --code

The exit code is 0, 1 where nothing fits, and 2 for an error.
"""


def add_command(commands: Any) -> None:
    """Adds ``plan`` to the commands of the command line."""
    about = "choose mesh, shardings and constraints for a function by predicted time"
    parser = add_program_command(commands, "plan", _plan, about, epilog=_EXAMPLES, placed=False)
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="bytes that a device may hold, such as 14GB (default: what the hardware has)",
    )
    parser.add_argument(
        "--axes",
        metavar="NAMES",
        help="names of mesh axes whose sizes are chosen, without --mesh (default: data,model)",
    )
    parser.add_argument("--chip", metavar="CHIP", help="whose figures to use, as spmd report")
    for option, metavar, text in (
        ("--fix", "PATH=SPEC", "where an array and all below it has to lie: \"batch=P('data')\""),
        ("--never", "DIM=AXIS", 'a dimension that an axis must not split: "tokens:1=data"'),
        ("--class", "NAME=DIM", "what to call a dimension: \"vocab=state['embed']:0\""),
    ):
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=text)
    for option, default, text in (
        ("--top", 3, "how many plans are compiled, beside the best experts"),
        ("--seed", 0, "of ties"),
    ):
        parser.add_argument(
            option, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--timeout", metavar="TIME", help="seconds after which the best so far is the answer: 60"
    )
    for option, text in (
        ("--no-seeds", "do not compare experts and the function's own specs"),
        ("--no-cache", "do not look for a plan on the disk, and keep none"),
    ):
        parser.add_argument(option, action="store_true", help=text)
    add_outputs(parser, save="write the plan to FILE (.json)", html="write it as a page to FILE")
    shown = parser.add_mutually_exclusive_group()
    for option, text in (
        ("--json", "print the plan as JSON instead of a table"),
        ("--code", "print the code to paste instead of a table"),
    ):
        shown.add_argument(option, action="store_true", help=text)


def _plan(args: argparse.Namespace) -> int:
    if supervised.asked_for_lines():
        return USAGE  # the same search would end in the same way
    wish = _wish(args)
    axes = start(args)
    function = options.load(args.function, "FUNCTION")
    values = _positional(args, function)
    import spmd

    try:
        with _telling(args) as progress:
            found = spmd.plan(
                function, *values, topology=args.topology, mesh=axes, progress=progress, **wish
            )
    except spmd.PlanMemoryError as error:
        print(f"spmd: {error}", file=sys.stderr)
        return FAILED
    return _answer(args, found)


def _wish(args: argparse.Namespace) -> dict[str, Any]:
    """What is asked of a plan, read and checked before JAX starts."""
    writable(args.save, "--save")
    writable(args.html, "--html", ".html")
    if args.topology is None and args.mesh is None:
        raise CommandError(
            "plan needs --topology, such as --topology v5e:4x4, or --mesh for the devices of this "
            "machine, such as --mesh data=4,model=2."
        )
    if args.axes is not None and args.mesh is not None:
        raise CommandError("--axes names axes whose sizes are to be chosen, and --mesh has them.")
    at_least("--top", args.top, 0)
    axes = "data,model" if args.axes is None else args.axes
    return {
        "axes": tuple(name.strip() for name in axes.split(",")),
        "memory": _memory(args.memory),
        "chip": args.chip,
        "fixed": _once("--fix", map(_fixed, args.fix)),
        "never": [_pair("--never", text, "tokens:1=data") for text in args.never],
        "classes": _once(
            "--class",
            (
                _pair("--class", text, "vocab=state['embed']:0", first=True)
                for text in getattr(args, "class")
            ),
        ),
        "top": args.top,
        "timeout": _timeout(args.timeout),
        "seed": args.seed,
        "seeds": not args.no_seeds,
        "cache": not args.no_cache,
    }


def _once(option: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dict, whose keys are given once each."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CommandError(f"{option} names {key} twice.")
        found[key] = value
    return found


def _memory(text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise CommandError(f"--memory: {error}.") from None


def _timeout(text: str | None) -> float | None:
    """Seconds, with or without a unit."""
    if text is None:
        return None
    plain = re.fullmatch(r"\s*\d+(\.\d*)?\s*", text)
    try:
        seconds = float(text) if plain else parse_seconds(text)
    except ValueError as error:
        raise CommandError(f"--timeout: {error}.") from None
    if not seconds:
        raise CommandError(f"--timeout {text} leaves no time to search.")
    return seconds


def _fixed(text: str) -> tuple[str, Any]:
    """Reads ``batch['x']=P('data')``."""
    found = re.fullmatch(r"(.+?)\s*=\s*((?:P|PartitionSpec)\(.*\))\s*", text, re.DOTALL)
    if not found:
        raise CommandError(
            f"--fix {text} fixes nothing: write a path and a PartitionSpec, such as "
            "\"batch=P('data')\"."
        )
    entries = options.parse_spec(found[2])
    if options.UNCONSTRAINED in entries:
        raise CommandError(f"--fix {text} leaves a dimension open: a plan has a place for each.")
    from jax.sharding import PartitionSpec

    return found[1].strip(), PartitionSpec(*entries)


def _pair(option: str, text: str, example: str, *, first: bool = False) -> tuple[str, str]:
    """Reads what stands before and after an equals sign: the last one, or the `first`."""
    left, equals, right = text.partition("=") if first else text.rpartition("=")
    if not equals or not left.strip() or not right.strip():
        raise CommandError(f"{option} {text} says nothing: write it as in {example}.")
    return left.strip(), right.strip()


def _positional(args: argparse.Namespace, function: Any) -> Sequence[Any]:
    """What the function is called with, keyword arguments at their positions."""
    values, keywords = called(args, function, None)
    if not keywords:
        return values
    bound = inspect.signature(function).bind(*values, **keywords)
    if bound.kwargs:
        names = ", ".join(bound.kwargs)
        raise CommandError(
            f"plan passes arguments by position, and {names} takes none: "
            "name a function that takes it so, and passes it on by name."
        )
    return bound.args


# What is seen


@contextlib.contextmanager
def _telling(args: argparse.Namespace) -> Iterator[Callable[[Any], None]]:
    """A bar in a terminal, a line for each compile elsewhere; nothing with --no-progress."""
    from spmd.inspection.show.progress import planning, quiet

    with quiet() if args.no_progress else planning(f"planning {args.function}", lines=True) as tell:
        yield tell


def _answer(args: argparse.Namespace, plan: Any) -> int:
    """Prints a plan as it was asked for, and writes it to the files that there are.

    Files have its code, which may take longer than the search: the table comes before. Who
    interrupts that has all the rest; and where nobody reads the output to its end, the files are
    there all the same.
    """
    is_table = not (args.json or args.code)
    has_code = True
    try:
        if is_table:
            options.draw(plan)
    finally:
        if args.save or args.html or not is_table:
            has_code = _work_out_code(args, plan)
        if not has_code:
            plan = dataclasses.replace(plan, inside=None)
        try:
            if not is_table:
                _print_instead(args, plan, has_code)
        finally:
            for path in (args.save, args.html):
                if path:
                    with options.writing(path) as part:
                        plan.save(part)
    if not has_code:
        raise KeyboardInterrupt
    return OK


def _print_instead(args: argparse.Namespace, plan: Any, has_code: bool) -> None:
    """Prints what stands for the table; the table, where the code was not worked out."""
    if args.json:
        from spmd.inspection.records.plan_codec import encode

        print(json.dumps(encode(plan, force=True), indent=1))
    elif has_code:
        print(plan.code())
    else:
        options.draw(plan)


def _work_out_code(args: argparse.Namespace, plan: Any) -> bool:
    """Works out the code of a plan; False where that was interrupted."""
    from spmd.inspection.show.progress import quiet, showing

    what = "working out the code"
    try:
        with quiet() if args.no_progress else showing(what, lines=True):
            plan.code()
    except KeyboardInterrupt:
        return False
    return True
