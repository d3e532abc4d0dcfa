"""The command ``spmd show``: which device holds which part of an array.

Arguments are checked before anything here imports JAX.
"""

from __future__ import annotations

import argparse
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
  spmd show plan.json --html plan.html
  spmd show weights.npy --spec "P('model')" --mesh model=8
  spmd show train:batch --mesh data=8
"""

_ABOUT = """\
Show which device holds which part of an array.

WHAT is a PartitionSpec, which needs --mesh and --shape; a report that --json wrote, with the path
of one of its arguments; a plan that spmd plan saved, as a whole or with a path; a .npy file, of
which only the shape is read, with --spec and --mesh; or module:name of an array, a
ShapeDtypeStruct with a sharding, a tree of these, or a function without arguments that returns one
of them and is called within the mesh.
"""


def add_command(commands: Any) -> None:
    """Adds ``show`` to the commands of the command line."""
    about = "draw which device holds which part of an array"
    parser = add(commands, "show", _show, about, description=_ABOUT, epilog=_EXAMPLES)
    parser.add_argument("what", metavar="WHAT", help="such as \"P('data', None)\" or r.json")
    parser.add_argument("argument", metavar="ARGUMENT", nargs="?", help="of a report or a plan")
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
        return _of_file(args)
    if args.argument is not None:
        raise CommandError(f"show takes {args.argument} only with a report: write r.json first.")
    if args.what.endswith(".npy"):
        if args.spec is None:
            raise CommandError("show needs --spec for a .npy file, such as --spec \"P('data')\".")
        return _of_spec(args, options.parse_spec(args.spec), _npy_shape(args.what))
    # A name after a colon, which no spec has outside of its quotes.
    if re.fullmatch(r"[\w./\\-]+:[\w.]+", args.what):
        return _of_object(args)
    if args.shape is None:
        raise CommandError("show needs --shape for a PartitionSpec, such as --shape 8,16.")
    return _of_spec(args, options.parse_spec(args.what), parse_shape(args.shape))


def _of_file(args: argparse.Namespace) -> Any:
    for option in ("mesh", "shape", "spec", "topology"):
        if getattr(args, option) is not None:
            raise CommandError(f"--{option} is not for {args.what}, which says it.")
    from spmd.inspection.records import codec, plan_codec

    with options.reading(args.what):
        data = codec.read(args.what, "report.save() or plan.save()")
    subject = f"file `{args.what}`"
    if isinstance(data, dict) and str(data.get("schema")).startswith("spmd-plan/"):
        return _of_plan(args, plan_codec.decode(data, subject=subject))
    return _of_report(args, codec.decode(data, subject=subject))


def _of_plan(args: argparse.Namespace, plan: Any) -> Any:
    """A plan as a whole, or where one of its arrays lies."""
    if args.argument is None:
        return plan
    from spmd.inspection.show.plan import placed_at

    one = placed_at(plan, args.argument)
    from jax.sharding import AbstractMesh, PartitionSpec

    from spmd.inspection.compile.visualize import picture_on

    mesh: Any = AbstractMesh(tuple(plan.axes.values()), tuple(plan.axes))
    return picture_on(mesh, PartitionSpec(*(axes or None for axes in one.spec)), one.shape)


def _of_report(args: argparse.Namespace, report: Any) -> Any:
    from spmd.inspection.records.pictures import of_argument

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

    entries = [PartitionSpec.UNCONSTRAINED if e is options.UNCONSTRAINED else e for e in spec]
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
