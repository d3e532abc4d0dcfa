"""The command ``spmd bundle``: what a bundle holds, and whether this process could load it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from spmd.cli import options
from spmd.cli.options import FAILED, OK, CommandError, add_command as add

_EXAMPLES = """\
examples:
  spmd bundle step.spmd

The exit code is 0 where this machine could load it, 1 where it could not, and 2 for an error.
"""


def add_command(commands: Any) -> None:
    """Adds ``bundle`` to the commands of the command line."""
    about = "show what a saved program holds, and whether it could be loaded here"
    holds = "Show what a bundle holds: names, types, specs, versions. Its code is not run."
    parser = add(commands, "bundle", _bundle, about, description=holds, epilog=_EXAMPLES)
    parser.add_argument("path", metavar="PATH", help="the file that Compiled.save wrote")
    options.add_devices(
        parser, "compare with so many virtual CPU devices instead of those that JAX finds"
    )


def _bundle(args: argparse.Namespace) -> int:
    if args.devices is not None:
        if args.devices < 1:
            raise CommandError(f"--devices {args.devices} is too few: at least 1 is needed.")
        options.set_device_count(args.devices)
    from spmd.bundle import contents

    with options.reading(args.path):
        found = contents(args.path)
    print("\n".join(_lines(found)))
    return FAILED if found.differences else OK


def _lines(found: Any) -> list[str]:
    axes = ", ".join(f"{n}={s}" for n, s in found.mesh.items())
    names = ("jax", "jaxlib", "platform", "device kind")
    jax, jaxlib, platform, kind = (found.compiled_for.get(n, "unknown") for n in names)
    lines = [
        f"{found.name}: mesh {axes} of {len(found.devices)} devices ({platform}, {kind})",
        f"spmd {found.spmd}, jax {jax}, jaxlib {jaxlib}",
        f"{found.total_bytes:,} bytes, of which {found.code_bytes:,} are compiled code",
        "",
        *_table("arguments", found.arguments),
        "",
        *_table("results", found.results),
        "",
    ]
    if not found.differences:
        return [*lines, "It can be loaded here."]
    rows = [f"  {d.field}: {d.bundle}; here: {d.here}" for d in found.differences]
    return [*lines, "It cannot be loaded here:", *rows]


def _table(title: str, values: Sequence[Any]) -> list[str]:
    rows = [(v.name, v.type, v.sharding + " donated" * v.donated) for v in values]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    shown = [f"  {n:<{widths[0]}}  {t:<{widths[1]}}  {s}" for n, t, s in rows]
    return [f"{title}:", *(shown or ["  none"])]
