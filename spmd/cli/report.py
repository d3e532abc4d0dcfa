"""The commands ``spmd report``, ``why``, ``fits``, ``sweep``, ``diff`` and ``show``.

Options are checked, and the number of devices is set, before anything here imports JAX.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
import contextlib
import inspect
import json
import math
from pathlib import Path
import sys
from typing import Any

from spmd.cli import show as cli_show, supervised
from spmd.cli.options import (
    CommandError,
    load,
    parse_axes,
    parse_limits,
    parse_vary,
    writable,
)
from spmd.testing._budgets import check_axes, read_budget

_OK, _FAILED = 0, 1
_DEVICES = 8

_ABOUT_FUNCTION = """\
FUNCTION is module:name or file.py:name: a function of spmd.pjit or jax.jit. ARGS, written the
same way, is what it is called with: a tuple of arguments, a dict of keyword arguments, or a
function that returns one of them and is called within the mesh. Only shapes and shardings matter:
nothing is run, so jax.ShapeDtypeStruct does. With --mesh or --topology, shardings go over to that
mesh by the names of its axes.
"""

_REPORT = """\
examples:
  spmd report train:step --args train:example_args --mesh data=4,model=2
  spmd report train.py:step --args train.py:example_args --mesh data=32,model=8 \\
      --topology v5e:16x16 --json r.json --html r.html
  spmd report train:step --args train:example_args --mesh data=8 \\
      --none all-gather --max-bytes data=4MB

The exit code is 0, 1 where a limit is broken, and 2 for an error.
"""
_WHY = """\
examples:
  spmd why train:step "out['loss']" --args train:example_args --mesh data=4,model=2
  spmd why train.py:step train.py:42 --args train.py:example_args --mesh data=4,model=2

The exit code is 0, and 2 for an error.
"""
_FITS = """\
examples:
  spmd fits train:step --args train:example_args --mesh data=16 --topology v5e:4x4
  spmd fits train:step --args train:example_args --mesh data=8 --budget 16GB --vary "tokens:0"

The exit code is 0 where it fits, 1 where it does not, and 2 where that cannot be told.
"""
_SWEEP = """\
examples:
  spmd sweep train:step --args train:example_args --mesh data=-1,model=4 \\
      --topology v5e:4x4 --topology v5e:8x8 --topology v5e:16x16
"""
_DIFF = """\
examples:
  spmd diff before.json after.json
  spmd diff before.json after.json --json diff.json --html diff.html

The exit code is 0 where both have the same collectives, 1 where they differ, and 2 for an error.
"""

SetDevices = Callable[[int], None]


def add_commands(commands: Any, set_device_count: SetDevices) -> None:
    """Declares the commands.

    Args:
        commands: what ``parser.add_subparsers`` gave.
        set_device_count: makes JAX start on so many virtual CPU devices.
    """
    report = _command(
        commands,
        "report",
        _report,
        "show every collective of a function with its line, axes, bytes",
    )
    report.epilog = _REPORT
    _add_program(report, set_device_count)
    report.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE too")
    report.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    report.add_argument("--trace", type=Path, metavar="FILE", help="write a Perfetto trace to FILE")
    report.add_argument(
        "--all-frames", action="store_true", help="show whole stacks, libraries too"
    )
    report.add_argument("--quiet", action="store_true", help="print only limits that are broken")
    report.add_argument("--all", action="store_true", help="list all collectives, not only 40")
    report.add_argument(
        "--preview", action="store_true", help="predict the collectives without compiling"
    )
    _add_limits(report)

    why = _command(
        commands, "why", _why, "say which annotations the sharding of a value comes from"
    )
    why.epilog = _WHY
    _add_program(why, set_device_count)
    why.add_argument(
        "value", metavar="VALUE", help="a path such as batch['x'] or out['loss'], or model.py:42"
    )
    why.add_argument("--json", type=Path, metavar="FILE", help="write the records to FILE too")

    fits = _command(
        commands, "fits", _fits, "say whether a function fits the memory of its devices"
    )
    fits.epilog = _FITS
    _add_program(fits, set_device_count)
    fits.add_argument("--budget", metavar="SIZE", help="bytes per device, such as 16GB or 15.75GiB")
    fits.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="ARG:DIM",
        help="find the largest size of this dimension that fits; several vary together",
    )

    sweep = _command(commands, "sweep", _sweep, "compare bytes and memory as the mesh grows")
    sweep.epilog = _SWEEP
    _add_program(sweep, set_device_count, several=True)
    _add_readers(commands, set_device_count)


def _add_readers(commands: Any, set_device_count: SetDevices) -> None:
    """Declares the commands that compile nothing."""
    diff = _command(commands, "diff", _diff, "show in what two reports differ")
    diff.epilog = _DIFF
    diff.add_argument("a", type=Path, metavar="A.json", help="a report that --json wrote")
    diff.add_argument("b", type=Path, metavar="B.json", help="another one")
    diff.add_argument("--json", type=Path, metavar="FILE", help="write the differences to FILE too")
    diff.add_argument("--html", type=Path, metavar="FILE", help="write the differences as a page")

    show = _command(
        commands, "show", cli_show.run, "draw which device holds which part of an array"
    )
    cli_show.add_arguments(show, set_device_count)


def _command(commands: Any, name: str, run: Callable, about: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = about[0].upper() + about[1:] + "."
    parser.description = what if name == "diff" else f"{what}\n\n{_ABOUT_FUNCTION}"
    parser.set_defaults(command=run)
    return parser


def _add_program(
    parser: argparse.ArgumentParser, set_device_count: SetDevices, *, several: bool = False
) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="such as train:step or train.py:step")
    parser.add_argument("--args", metavar="ARGS", help="what it is called with; default: nothing")
    parser.add_argument("--mesh", metavar="AXES", help="axis sizes, such as data=4,model=2")
    parser.add_argument(
        "--topology",
        metavar="NAME",
        action="append" if several else "store",
        help="devices that need not be there, such as v5e:4x4 or cpu:64"
        + ("; once for each mesh to compare" if several else ""),
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="virtual CPU devices to start JAX with (default: as many as the mesh has, else 8)",
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help="use the devices of this machine instead of virtual CPU devices",
    )
    parser.add_argument("--no-progress", action="store_true", help="say nothing while it compiles")
    parser.set_defaults(set_device_count=set_device_count, compiles=True)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits, for CI: the exit code is 1 where one is broken")
    limits.add_argument(
        "--none",
        action="append",
        default=[],
        metavar="KIND[@AXIS]",
        help="what must not occur, such as all-gather or all-gather@model",
    )
    limits.add_argument(
        "--max-bytes",
        action="append",
        default=[],
        metavar="WHAT=SIZE",
        help="most bytes that a device may send in one call: model=4MB, all-reduce=2GB, '*=1GB'",
    )
    limits.add_argument(
        "--max-count",
        action="append",
        default=[],
        metavar="WHAT=N",
        help="most executions in one call: all-gather=8",
    )


# Programs


def _start(args: argparse.Namespace) -> dict[str, int] | None:
    """Checks mesh and devices, and has JAX start on them; gives the axis sizes."""
    axes = None if args.mesh is None else parse_axes(args.mesh, open_size=True)
    if args.topology and axes is None and not isinstance(args.topology, str):
        raise CommandError("--topology needs --mesh, such as --mesh data=-1,model=4.")
    if args.devices is not None and args.devices < 1:
        raise CommandError(f"--devices {args.devices} is too few: it has to be at least 1.")
    needed = _device_count(args, axes)
    if args.devices is not None and not args.topology and axes and args.devices < needed:
        raise CommandError(
            f"--mesh {args.mesh} needs {needed} devices, and --devices {args.devices} starts "
            f"{args.devices}: leave --devices out."
        )
    if not args.real:
        args.set_device_count(args.devices or _device_count(args, axes))
    return axes


def _device_count(args: argparse.Namespace, axes: dict[str, int] | None) -> int:
    fixed = axes is not None and -1 not in axes.values()
    return math.prod(axes.values()) if fixed and axes and not args.topology else _DEVICES


def _mesh(topology: str | None, axes: dict[str, int] | None) -> Any:
    """The mesh to compile for, or None for the function's own."""
    import spmd

    if topology is not None:
        return spmd.topology(topology, mesh=axes)
    return None if axes is None else spmd.make_mesh(axes)


def _shapes(path: str | None, mesh: Any) -> tuple[tuple, dict[str, Any]]:
    """What the function is called with, arrays replaced by their shapes and shardings."""
    import jax

    from spmd.inspection.compile.carrying import shape_on

    given = () if path is None else load(path, "--args")
    with mesh if mesh is not None else contextlib.nullcontext():
        given = given() if callable(given) else given
    given = jax.tree_util.tree_map_with_path(
        lambda at, leaf: shape_on(leaf, mesh, f"--args {path}{jax.tree_util.keystr(at)}"), given
    )
    if isinstance(given, dict):
        return (), given
    return tuple(given) if isinstance(given, (tuple, list)) else (given,), {}


def _call(args: argparse.Namespace, function: Any, mesh: Any) -> tuple[tuple, dict[str, Any]]:
    """The arguments of the call, which the function's parameters must take."""
    values, keywords = _shapes(args.args, mesh)
    try:
        inspect.signature(function).bind(*values, **keywords)
    except ValueError:
        pass  # some callables have no signature
    except TypeError as error:
        given = f"--args {args.args} gives it" if args.args else "without --args it gets"
        count = f"{len(values) + len(keywords)} arguments" if args.args else "none"
        raise CommandError(
            f"{args.function} cannot be called so: {error}; {given} {count}."
        ) from None
    return values, keywords


def _progress(args: argparse.Namespace, what: str) -> Any:
    """Shows on the standard error that something is going on; gives a function to say more."""
    from spmd.inspection.show.progress import quiet, showing

    return quiet() if args.no_progress else showing(what, lines=True)


@contextlib.contextmanager
def _mesh_needed(args: argparse.Namespace) -> Iterator[None]:
    """Answers a missing mesh in terms of the command line."""
    from spmd import MeshError, ShardingError

    try:
        yield
    except (MeshError, ShardingError) as error:
        if args.mesh is not None:
            raise
        text = f"{error}\n  here      add --mesh, such as --mesh data=4,model=2"
        raise CommandError(text) from None


# Commands


def _report(args: argparse.Namespace) -> int:
    writable(args.json, "--json")
    writable(args.trace, "--trace")
    writable(args.html, "--html", ".html")
    limits = {
        "none": args.none,
        "max_bytes": parse_limits("--max-bytes", args.max_bytes),
        "max_count": _counts(parse_limits("--max-count", args.max_count)),
    }
    limits = {name: limit for name, limit in limits.items() if limit}
    # A slip in a limit is told before anything compiles, which may take minutes.
    budget = read_budget(limits)
    axes = _start(args)
    function, mesh = load(args.function, "FUNCTION"), _mesh(args.topology, axes)
    values, keywords = _call(args, function, mesh)
    import spmd

    if mesh is not None:
        check_axes([budget], dict(mesh.shape))
    if supervised.asked_for_lines():
        return _suspects(function, values, keywords, mesh)
    doing, make = ("lowering", spmd.preview) if args.preview else ("compiling", spmd.report)
    with _progress(args, f"{doing} {args.function}"), _mesh_needed(args):
        report = make(function, *values, mesh=mesh, **keywords)
    if not args.quiet:
        report.show(all_frames=args.all_frames, limit=None if args.all else 40)
    if args.json:
        report.save(args.json)
    if args.html:
        report.save(args.html)
    if args.trace:
        report.save_trace(args.trace)
    return _hold(report, limits) if limits else _OK


def _suspects(function: Any, values: tuple, keywords: dict[str, Any], mesh: Any) -> int:
    """Prints the lines for which XLA may have ended the process that compiled.

    Its check fails where an array is split anew and it takes several mesh axes apart in another
    order than they are in, which works for powers of two alone. The prediction has these exchanges
    without a compile.
    """
    import spmd
    from spmd.testing._assertions import show

    found = spmd.preview(function, *values, mesh=mesh, **keywords).collectives
    moved = [one for one in found if one.kind in ("all-to-all", "collective-permute")]
    if moved:
        lines = dict.fromkeys(f"            {show(one)}\n" for one in moved)
        text = (
            "  here      lines where an array is split anew, as a preview says:\n"
            f"{''.join(lines)}"
            "  fix       constrain the value to P() in between, or split dimensions over mesh\n"
            "            axes in the same order before and after"
        )
        print(text, file=sys.stderr)
    return _FAILED


def _why(args: argparse.Namespace) -> int:
    writable(args.json, "--json")
    axes = _start(args)
    function, mesh = load(args.function, "FUNCTION"), _mesh(args.topology, axes)
    values, keywords = _call(args, function, mesh)
    import spmd

    with _progress(args, f"lowering {args.function}"), _mesh_needed(args):
        found = spmd.why(function, args.value, *values, mesh=mesh, **keywords)
    _print(found)
    if args.json:
        args.json.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    return _OK


def _counts(limits: dict[str, str]) -> dict[str, int]:
    for key, text in limits.items():
        if not text.isdecimal():
            raise CommandError(f"--max-count {key}={text} is no whole number.")
    return {key: int(text) for key, text in limits.items()}


def _hold(report: Any, limits: dict[str, Any]) -> int:
    from spmd.testing import assert_collectives

    try:
        assert_collectives(report, **limits)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return _FAILED
    return _OK


def _fits(args: argparse.Namespace) -> int:
    vary = [parse_vary(text) for text in args.vary]
    axes = _start(args)
    function, mesh = load(args.function, "FUNCTION"), _mesh(args.topology, axes)
    values, keywords = _call(args, function, mesh)
    import spmd

    with _progress(args, f"compiling {args.function}") as say, _mesh_needed(args):
        fit = spmd.fits(
            function,
            *values,
            mesh=mesh,
            budget=args.budget,
            vary=vary or None,
            progress=lambda size, one: say(f"size {size:,}: {one.verdict}"),
            **keywords,
        )
    print(fit)
    return _OK if fit else _FAILED


def _sweep(args: argparse.Namespace) -> int:
    axes = _start(args)
    if not args.topology:
        raise CommandError("sweep needs --topology, once for each mesh to compare.")
    function = load(args.function, "FUNCTION")
    import spmd

    places = [(name, axes) for name in args.topology]

    def args_of(mesh: Any) -> tuple:
        values, keywords = _shapes(args.args, mesh)
        return inspect.signature(function).bind(*values, **keywords).args

    with _progress(args, f"compiling {args.function} for {len(places)} meshes"):
        sweep = spmd.sweep(function, meshes=places, args_of=args_of)
    _print(sweep)
    return _OK


def _diff(args: argparse.Namespace) -> int:
    writable(args.json, "--json")
    writable(args.html, "--html", ".html")
    from spmd.inspection.records.diff import diff

    try:
        found = diff(args.a, args.b)
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be read: {error.strerror}.") from None
    _print(found)
    if args.json:
        args.json.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    if args.html:
        args.html.write_text(found.to_html(), encoding="utf-8")
    return _FAILED if found else _OK


def _print(drawable: Any) -> None:
    from rich.console import Console

    Console(highlight=False).print(drawable)
