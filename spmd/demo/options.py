"""What the demo is asked to do, checked before JAX is imported."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from pathlib import Path

from spmd.cli.options import CommandError, parse_axes, writable

AXES = ("data", "model")
BATCH = 32
HEADS = 8
DEVICES = 8
DEFAULT_MESH = "data=4,model=2"
PAGE = "spmd-demo.html"


class DemoError(CommandError):
    """A demo that cannot run as asked; the message is one sentence for its user."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run of the demo.

    Attributes:
        mesh: sizes of the mesh axes, in the order given; both of `AXES` are there.
        devices: number of virtual CPU devices.
        steps: optimizer steps.
        seed: of the initial parameters and of the batches.
        verify: train the same steps unsharded, and compare.
        json: file to write the report to.
        html: file to write the page of the step to, and the other `pages` beside it; None for no
            page.
    """

    mesh: dict[str, int]
    devices: int = DEVICES
    steps: int = 400
    seed: int = 0
    verify: bool = False
    json: Path | None = None
    html: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options on a parser."""
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        help=f"sizes of the axes data and model, such as data=8 (default: {DEFAULT_MESH})",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help=f"virtual CPU devices (default: {DEVICES})"
    )
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="default: 400")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="train the same steps unsharded on one device, and compare the loss curves",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE too")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the page of the step to FILE, and those of the slip and of the difference "
        f"beside it (default: {PAGE}, where it can be written)",
    )


def options_from(args: argparse.Namespace) -> Options:
    """Check parsed arguments: what cannot be used or written is a `CommandError`."""
    devices = DEVICES if args.devices is None else args.devices
    for option, value in (("--devices", devices), ("--steps", args.steps)):
        if value < 1:
            raise DemoError(f"{option} {value} is too few: it has to be at least 1.")
    if not 0 <= args.seed < 2**31:
        raise DemoError(f"--seed {args.seed} is not between 0 and 2147483647.")
    mesh = parse_mesh(args.mesh) if args.mesh is not None else _default_mesh(devices)
    check_mesh(mesh, devices)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise DemoError(f"--json {args.json} is in a folder that does not exist.")
    # What was asked for comes first: its name is the one to say.
    for path in (args.html, *pages(args.html).values()) if args.html else ():
        writable(path, "--html", ".html")
    return Options(
        mesh=mesh,
        devices=devices,
        steps=args.steps,
        seed=args.seed,
        verify=args.verify,
        json=args.json,
        html=args.html or _default_page(),
    )


def pages(path: Path) -> dict[str, Path]:
    """The files that a page is written to, by what each is of."""
    return {
        "the slip": path.with_stem(f"{path.stem}-slip"),
        "the difference": path.with_stem(f"{path.stem}-difference"),
        "the step": path,
    }


def _default_page() -> Path | None:
    """A page that nobody asked for must not stop the demo."""
    try:
        for path in pages(Path(PAGE)).values():
            writable(path, "--html", ".html")
    except CommandError:
        return None
    return Path(PAGE)


def _default_mesh(devices: int) -> dict[str, int]:
    model = 2 if devices % 2 == 0 else 1
    return {"data": devices // model, "model": model}


def parse_mesh(text: str) -> dict[str, int]:
    """Read ``data=4,model=2``; an axis left out has size 1."""
    mesh = parse_axes(text)
    for name in mesh:
        if name not in AXES:
            close = difflib.get_close_matches(name, AXES, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else "."
            raise DemoError(
                f"--mesh {text} names the axis '{name}', "
                f"but the demo's are 'data' and 'model'{hint}"
            )
    return mesh | {name: 1 for name in AXES if name not in mesh}


def check_mesh(mesh: dict[str, int], devices: int) -> None:
    """See that there are devices enough, and that each axis divides what it splits."""
    shown = ",".join(f"{name}={size}" for name, size in mesh.items() if size > 1) or "data=1"
    needed = math.prod(mesh.values())
    if needed > devices:
        raise DemoError(
            f"--mesh {shown} needs {needed} devices, but there are {devices}: "
            f"add --devices {needed} or make the mesh smaller."
        )
    for axis, count, what in (("data", BATCH, "sequences of a batch"), ("model", HEADS, "heads")):
        if count % mesh[axis]:
            fits = [n for n in range(1, count + 1) if count % n == 0]
            raise DemoError(
                f"--mesh {shown} cannot split the {count} {what} over {axis}={mesh[axis]}: "
                f"choose one of {', '.join(map(str, fits))}."
            )
