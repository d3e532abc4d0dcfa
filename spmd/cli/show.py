"""The command ``spmd show``: which device holds which part of an array.

Arguments are checked before anything here imports JAX.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import math
import re
from typing import Any

from spmd.cli import options
from spmd.cli.options import OK, CommandError, add_command as add
from spmd.cli.programs import mesh_of, misfit

_EXAMPLES = """\
examples:
  spmd show "P('data', None)" --mesh data=4,model=2 --shape 8,16
  spmd show "P('data', 'model')" --mesh data=16,model=16 --topology v5e:16x16 --shape 4096,4096
  spmd show r.json "batch['x']" --html x.html
  spmd show weights.npy --spec "P('model')" --mesh model=8
  spmd show train:batch --mesh data=8
"""

_ABOUT = """\
Show which device holds which part of an array.

WHAT is a PartitionSpec, which needs --mesh and --shape; a report that --json wrote, with the path
of one of its arguments; a .npy file, of which only the shape is read, with --spec and --mesh; or
module:name of an array, a ShapeDtypeStruct with a sharding, a tree of these, or a function without
arguments that returns one of them and is called within the mesh.
"""


def add_command(commands: Any) -> None:
    """Adds ``show`` to the commands of the command line."""
    about = "draw which device holds which part of an array"
    parser = add(commands, "show", _show, about, description=_ABOUT, epilog=_EXAMPLES)
    parser.add_argument("what", metavar="WHAT", help="such as \"P('data', None)\" or r.json")
    parser.add_argument("argument", metavar="ARGUMENT", nargs="?", help="of a report")
    parser.add_argument("--mesh", metavar="AXES", help="axis sizes, such as data=4,model=2")
    parser.add_argument("--shape", metavar="SIZES", help="of the array, such as 8,16")
    parser.add_argument("--spec", metavar="SPEC", help="of a .npy file, such as \"P('data')\"")
    parser.add_argument("--topology", metavar="NAME", help="devices, such as v5e:4x4")
    options.add_outputs(parser, html="write a page to FILE too")


def _show(args: argparse.Namespace) -> int:
    options.writable(args.html, "--html", ".html")
    options.draw(_picture(args), html_file=args.html)
    return OK


def _picture(args: argparse.Namespace) -> Any:
    if args.what.endswith(".json"):
        return _of_report(args)
    if args.argument is not None:
        raise CommandError(f"show takes {args.argument} only with a report: write r.json first.")
    if args.what.endswith(".npy"):
        if args.spec is None:
            raise CommandError("show needs --spec for a .npy file, such as --spec \"P('data')\".")
        return _of_spec(args, parse_spec(args.spec), _npy_shape(args.what))
    # A name after a colon, which no spec has outside of its quotes.
    if re.fullmatch(r"[\w./\\-]+:[\w.]+", args.what):
        return _of_object(args)
    if args.shape is None:
        raise CommandError("show needs --shape for a PartitionSpec, such as --shape 8,16.")
    return _of_spec(args, parse_spec(args.what), parse_shape(args.shape))


def _of_report(args: argparse.Namespace) -> Any:
    from spmd.inspection import Report
    from spmd.inspection.records.pictures import of_argument

    with options.reading(args.what):
        report = Report.load(args.what)
    if args.argument is None:
        paths = ", ".join(one.path for one in report.arguments) or "none: it is of an older version"
        raise CommandError(f"show needs an argument of {args.what}; it has {paths}.")
    return of_argument(report, args.argument)


def _of_spec(args: argparse.Namespace, spec: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    if args.mesh is None:
        raise CommandError("show needs --mesh for a PartitionSpec, such as --mesh data=4,model=2.")
    axes = options.parse_axes(args.mesh, open_size=bool(args.topology))
    from jax.sharding import AbstractMesh, PartitionSpec

    import spmd
    from spmd.inspection.compile.visualize import picture_on

    entries = [PartitionSpec.UNCONSTRAINED if e is _UNCONSTRAINED else e for e in spec]
    if args.topology:
        mesh: Any = spmd.topology(args.topology, mesh=axes)
    else:
        # No device has to start for a picture of where they are.
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    return picture_on(mesh, PartitionSpec(*entries), shape)


def _of_object(args: argparse.Namespace) -> Any:
    axes = None if args.mesh is None else options.parse_axes(args.mesh)
    shape = None if args.shape is None else parse_shape(args.shape)
    options.set_device_count(math.prod(axes.values()) if axes else 8)
    import spmd

    mesh = mesh_of(args.topology or None, axes)
    found = options.load(args.what, "WHAT")
    with mesh if mesh is not None else contextlib.nullcontext():
        if callable(found) and not hasattr(found, "sharding"):
            if why := misfit(found):
                raise CommandError(
                    f"{args.what} is a function of arguments, and show draws arrays: {why}. For "
                    f"how it is split, write spmd report {args.what} --args ... --json r.json, "
                    "then spmd show r.json."
                )
            found = found()
        return spmd.visualize(found, shape=shape)


def parse_shape(text: str) -> tuple[int, ...]:
    """Reads ``8,16``; nothing between commas is a scalar."""
    parts = [part.strip() for part in text.strip("()[] ").split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise CommandError(f"--shape {text} is no shape: write sizes, such as 8,16.")
    return tuple(map(int, parts))


def _npy_shape(path: str) -> tuple[int, ...]:
    import numpy as np

    try:
        with options.reading(path):
            return np.load(path, mmap_mode="r", allow_pickle=False).shape
    except ValueError as error:
        raise CommandError(f"{path} holds no array: {error}.") from None


_UNCONSTRAINED = object()


def parse_spec(text: str) -> tuple[Any, ...]:
    """Reads ``P('data', None)``, without running anything: None, names and tuples of names."""
    with contextlib.suppress(SyntaxError, ValueError):
        match ast.parse(text.strip(), mode="eval").body:
            case ast.Call(func=ast.Name("P" | "PartitionSpec"), args=entries, keywords=[]):
                return tuple(map(_entry, entries))
    raise CommandError(
        f"{text} is no PartitionSpec: write P('data', None), with axis names in quotes."
    )


def _entry(node: ast.expr) -> Any:
    """One entry of a spec; a ValueError for anything else."""
    if isinstance(node, ast.Attribute) and node.attr == "UNCONSTRAINED":
        return _UNCONSTRAINED
    match ast.literal_eval(node):
        case None | str() as entry:
            return entry
        case tuple(names) if all(isinstance(name, str) for name in names):
            return names
    raise ValueError
