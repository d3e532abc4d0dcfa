"""A function of the user's with its arguments and its mesh, for the commands that compile it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
import contextlib
import inspect
import math
from typing import Any

from spmd.cli import options
from spmd.cli.options import CommandError

_DEVICES = 8

_ABOUT_FUNCTION = """\
FUNCTION is module:name or file.py:name: a function of spmd.pjit or jax.jit. ARGS, written the
same way, is what it is called with: a tuple of arguments, a dict of keyword arguments, or a
function that returns one of them"""
_PLACED = """\
 and is called within the mesh. Only shapes and shardings matter:
nothing is run, so jax.ShapeDtypeStruct does. With --mesh or --topology, shardings go over to that
mesh by the names of its axes.
"""
_UNPLACED = ". Only shapes matter: nothing is run, so\njax.ShapeDtypeStruct does.\n"


def add_program_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    about: str,
    *,
    epilog: str,
    several: bool = False,
    placed: bool = True,
) -> argparse.ArgumentParser:
    """Adds a command that takes a function.

    With `several` there may be more than one topology; `placed` says that it matters where
    arguments lie.
    """
    described = _ABOUT_FUNCTION + (_PLACED if placed else _UNPLACED)
    description = f"{about[0].upper()}{about[1:]}.\n\n{described}"
    parser = options.add_command(commands, name, run, about, description=description, epilog=epilog)
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
    which = parser.add_mutually_exclusive_group()
    options.add_devices(
        which, "virtual CPU devices to start JAX with (default: as many as the mesh has, else 8)"
    )
    which.add_argument(
        "--real",
        action="store_true",
        help="use the devices of this machine instead of virtual CPU devices",
    )
    parser.add_argument("--no-progress", action="store_true", help="say nothing while it compiles")
    parser.set_defaults(compiles=True)
    return parser


def start(args: argparse.Namespace) -> dict[str, int] | None:
    """Checks mesh and devices, and has JAX start on them; gives the axis sizes."""
    axes = None if args.mesh is None else options.parse_axes(args.mesh, open_size=True)
    if args.topology and axes is None and not isinstance(args.topology, str):
        raise CommandError("--topology needs --mesh, such as --mesh data=-1,model=4.")
    if args.devices is not None:
        options.at_least("--devices", args.devices)
    fixed = axes if axes and -1 not in axes.values() and not args.topology else None
    needed = math.prod(fixed.values()) if fixed else _DEVICES
    if args.devices is not None and not args.topology and axes and args.devices < needed:
        raise CommandError(
            f"--mesh {args.mesh} needs {needed} devices, and --devices {args.devices} starts "
            f"{args.devices}: leave --devices out."
        )
    if not args.real:
        options.set_device_count(args.devices or needed)
    return axes


def call(args: argparse.Namespace) -> tuple[Any, Any, tuple, dict[str, Any]]:
    """The function, the mesh to compile for, or None for its own, and what it is called with."""
    axes = start(args)
    function, mesh = options.load(args.function, "FUNCTION"), mesh_of(args.topology, axes)
    return (function, mesh, *called(args, function, mesh))


def called(args: argparse.Namespace, function: Any, mesh: Any) -> tuple[tuple, dict[str, Any]]:
    """What a function is called with, which has to be what it can be called with."""
    values, keywords = shapes(args.args, mesh)
    if why := misfit(function, *values, **keywords):
        given = f"--args {args.args} gives it" if args.args else "without --args it gets"
        count = len(values) + len(keywords)
        count = f"{count} argument{'s' * (count != 1)}" if args.args else "none"
        raise CommandError(f"{args.function} cannot be called so: {why}; {given} {count}.")
    return values, keywords


def mesh_of(topology: str | None, axes: dict[str, int] | None) -> Any:
    """The mesh to compile for; None for the function's own."""
    import spmd

    if topology is not None:
        return spmd.topology(topology, mesh=axes)
    return spmd.make_mesh(axes) if axes else None


def misfit(function: Any, /, *values: Any, **keywords: Any) -> str:
    """Why a function cannot be called so; nothing if it can, or has no signature."""
    try:
        inspect.signature(function).bind(*values, **keywords)
    except ValueError:
        pass  # some callables have no signature
    except TypeError as error:
        return str(error)
    return ""


def shapes(path: str | None, mesh: Any) -> tuple[tuple, dict[str, Any]]:
    """What the function is called with, arrays replaced by their shapes and shardings."""
    import jax

    from spmd.inspection.compile.carrying import shape_on

    given = () if path is None else options.load(path, "--args")
    with mesh if mesh is not None else contextlib.nullcontext():
        if callable(given):
            if why := misfit(given):
                raise CommandError(
                    f"--args {path} is a function that needs arguments: {why}. Name one that gives "
                    "what the function is called with, or the values themselves."
                )
            given = given()
    given = jax.tree_util.tree_map_with_path(
        lambda at, leaf: shape_on(leaf, mesh, f"--args {path}{jax.tree_util.keystr(at)}"), given
    )
    if isinstance(given, dict):
        return (), given
    return tuple(given) if isinstance(given, (tuple, list)) else (given,), {}


@contextlib.contextmanager
def doing(args: argparse.Namespace, what: str) -> Iterator[Callable[[str], None]]:
    """Shows on the standard error that something goes on; gives a function to say more.

    A missing mesh is answered in terms of the command line.
    """
    from spmd import MeshError, ShardingError
    from spmd.inspection.show.progress import quiet, showing

    with quiet() if args.no_progress else showing(what, lines=True) as say:
        try:
            yield say
        except (MeshError, ShardingError) as error:
            if args.mesh is not None:
                raise
            text = f"{error}\n  here      add --mesh, such as --mesh data=4,model=2"
            raise CommandError(text) from None
