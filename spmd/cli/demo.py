"""The command ``spmd demo``: what it is asked, checked before JAX is imported."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

from spmd.cli import options
from spmd.cli.options import FAILED, OK, CommandError, add_command as add
from spmd.demo import AXES, BATCH, DEVICES, HEADS, Options, pages

_PAGE = "spmd-demo.html"

_ABOUT = """\
Train a character transformer with spmd.pjit on virtual CPU devices, then show
its parameters, one of them on the mesh, the collectives of a step, its memory."""

_EXAMPLES = """\
examples:
  spmd demo                          train on a mesh of 4 x 2 virtual CPU devices
  spmd demo --mesh data=8            pure data parallelism
  spmd demo --mesh data=2,model=8 --devices 16
  spmd demo --verify                 compare with the same training unsharded
  spmd demo --steps 50 --json r.json --html r.html
  spmd demo --real                   on the GPUs or TPUs of this machine
"""


def add_command(commands: Any) -> None:
    """Adds ``demo`` to the commands of the command line."""
    about = "train a small transformer on virtual devices and show what the partitioner did"
    parser = add(commands, "demo", _demo, about, description=_ABOUT, epilog=_EXAMPLES)
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        help="sizes of the axes data and model, such as data=8 (default: data=4,model=2)",
    )
    which = parser.add_mutually_exclusive_group()
    options.add_devices(which, f"virtual CPU devices (default: {DEVICES})")
    which.add_argument(
        "--real",
        action="store_true",
        help="train on the devices that JAX finds here, such as GPUs, instead of virtual ones",
    )
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="default: 400")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="train the same steps unsharded on one device, and compare the loss curves",
    )
    options.add_outputs(
        parser,
        json="write the report to FILE too",
        html="write the page of the step to FILE, and those of the slip and of the difference "
        f"beside it (default: {_PAGE}, where it can be written)",
    )


def _demo(args: argparse.Namespace) -> int:
    asked = options_from(args)
    if importlib.util.find_spec("optax") is None:
        raise CommandError(options.WITHOUT_OPTAX)
    if not asked.real:
        options.set_device_count(asked.devices)
    from rich.console import Console

    from spmd.demo.run import run

    report = run(asked, Console(highlight=False))
    failed = report.verification is not None and not report.verification.passed
    return FAILED if failed else OK


def options_from(args: argparse.Namespace) -> Options:
    """Checks parsed arguments."""
    devices = _real_devices() if args.real else DEVICES if args.devices is None else args.devices
    options.at_least("--devices", devices)
    options.at_least("--steps", args.steps)
    if not 0 <= args.seed < 2**31:
        raise CommandError(f"--seed {args.seed} is not between 0 and 2147483647.")
    mesh = _mesh_of(args.mesh, devices)
    _check_mesh(mesh, devices, real=args.real)
    if args.json is not None:
        options.in_a_folder(args.json, "--json")
    return Options(
        mesh=mesh,
        devices=devices,
        real=args.real,
        steps=args.steps,
        seed=args.seed,
        verify=args.verify,
        json=args.json,
        html=_page(args.html),
    )


def _real_devices() -> int:
    import jax

    return len(jax.devices())


def _page(given: Path | None) -> Path | None:
    """Where the page is written; one that nobody asked for must not stop the demo."""
    page = given or Path(_PAGE)
    try:
        # What was asked for comes first: its name is the one to say.
        for path in (page, *pages(page).values()):
            options.writable(path, "--html", ".html")
    except CommandError:
        if given:
            raise
        return None
    return page


def _mesh_of(text: str | None, devices: int) -> dict[str, int]:
    """Sizes of both axes, of which one that is left out has size 1."""
    if text is None:
        model = 2 if devices % 2 == 0 else 1
        return {"data": devices // model, "model": model}
    mesh = options.parse_axes(text)
    for name in mesh:
        if name not in AXES:
            raise CommandError(
                f"--mesh {text} names the axis '{name}', "
                f"but the demo's are 'data' and 'model'{options.near(name, AXES)}"
            )
    return mesh | {name: 1 for name in AXES if name not in mesh}


def _check_mesh(mesh: dict[str, int], devices: int, *, real: bool) -> None:
    """Sees that the model fits a mesh of so many devices."""
    shown = ",".join(f"{name}={size}" for name, size in mesh.items() if size > 1) or "data=1"
    needed = math.prod(mesh.values())
    if needed > devices:
        raise CommandError(
            f"--mesh {shown} needs {needed} devices, but there are {devices}: "
            f"{'' if real else f'add --devices {needed} or '}make the mesh smaller."
        )
    for axis, count, what in (("data", BATCH, "sequences of a batch"), ("model", HEADS, "heads")):
        if count % mesh[axis]:
            fits = [n for n in range(1, count + 1) if count % n == 0]
            raise CommandError(
                f"--mesh {shown} cannot split the {count} {what} over {axis}={mesh[axis]}: "
                f"choose one of {', '.join(map(str, fits))}."
            )
