"""The command ``spmd calibrate``: what this machine can do, for ``--chip``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from spmd.cli import options
from spmd.cli.options import OK, writable

_EXAMPLES = """\
examples:
  spmd calibrate --json chip.json
  spmd report train:step --args train:example_args --mesh data=8 --chip chip.json
"""


def add_command(commands: Any) -> None:
    """Adds ``calibrate`` to the commands of the command line."""
    about = "measure products, copies and exchanges of this machine"
    parser = options.add_command(
        commands,
        "calibrate",
        _calibrate,
        about,
        description=f"{about.capitalize()}.",
        epilog=_EXAMPLES,
    )
    options.add_outputs(parser, json="write the figures to FILE, for --chip and chip=")
    options.add_devices(parser, "virtual CPU devices to start JAX with (default: the real devices)")
    parser.add_argument("--no-progress", action="store_true", help="say nothing while it measures")


def _calibrate(args: argparse.Namespace) -> int:
    writable(args.json, "--json")
    if args.devices is not None:
        options.at_least("--devices", args.devices)
        options.set_device_count(args.devices)
    from spmd.inspection import calibrate
    from spmd.inspection.show.progress import quiet, showing

    with quiet() if args.no_progress else showing("measuring", lines=True) as say:
        chip = calibrate(say=say)
    print(chip.name)
    print(f"  products   {chip.flops / 1e12:10.3f} TFLOP/s")
    print(f"  memory     {chip.hbm / 1e9:10.1f} GB/s")
    if chip.box == 1:
        print("  exchanges  not measured: one device; with --devices N, of N virtual CPU devices")
    else:
        print(f"  exchanges  {chip.link / 1e9:10.1f} GB/s, {1e6 * chip.hop:.0f} us each")
    if args.json:
        with options.writing(args.json) as part:
            part.write_text(json.dumps(chip.to_json(), indent=1) + "\n", encoding="utf-8")
    return OK
