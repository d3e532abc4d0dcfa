"""What commands are asked, read before JAX is imported, and how they answer."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import difflib
import importlib
import importlib.util
import json
import os
from pathlib import Path
import re
import shutil
import sys
from typing import Any

from spmd.inspection.records.sizes import parse_seconds

#: Exit codes: all is well, a check says no, and there was nothing to check.
OK, FAILED, USAGE = 0, 1, 2

WITHOUT_OPTAX = "the demo needs optax: pip install 'spmd[demo]'"


class CommandError(Exception):
    """A command that cannot run as asked; the message is for its user."""


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, **more: Any
) -> argparse.ArgumentParser:
    """Adds a command to those of the command line; `about` is its line in their list."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=about, formatter_class=raw, **more)
    parser.set_defaults(command=run)
    return parser


def add_outputs(parser: argparse.ArgumentParser, **about: str) -> None:
    """Adds options that name a file to write, such as ``json="write it to FILE"``."""
    for name, text in about.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)


def add_devices(parser: argparse._ActionsContainer, about: str, default: int | None = None) -> None:
    """Adds ``--devices``, a number of virtual CPU devices."""
    parser.add_argument("--devices", type=int, default=default, metavar="N", help=about)


def add_chip(parser: argparse.ArgumentParser) -> None:
    """Adds ``--chip`` and ``--model-flops``, for the time of a program."""
    parser.add_argument(
        "--chip",
        metavar="CHIP",
        help="whose figures the time is for: a name such as v5e, or a file of spmd calibrate "
        "(default: those of the devices; CPUs have none)",
    )
    parser.add_argument(
        "--model-flops",
        type=float,
        metavar="N",
        help="FLOPs of one call on all devices, for the MFU (default: those of the products)",
    )


def check_time(option: str, text: str | None) -> None:
    """Sees that a limit is a time."""
    try:
        if text is not None:
            parse_seconds(text)
    except ValueError as error:
        raise CommandError(f"{option}: {error}.") from None


# What is asked


def parse_axes(text: str, *, open_size: bool = False) -> dict[str, int]:
    """Reads ``data=4,model=2``; `open_size` allows -1, which stands for what is left."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([A-Za-z_]\w*) *= *(-?\d+)\s*", part)
        if not found:
            raise CommandError(
                f"--mesh {text or repr(text)} is not a mesh: "
                "write axis=size pairs, such as data=4,model=2."
            )
        name, size = found[1], int(found[2])
        if name in mesh:
            raise CommandError(f"--mesh {text} names the axis '{name}' twice.")
        if size < 1 and not (open_size and size == -1):
            rest = ", or -1 for what is left" * open_size
            raise CommandError(
                f"--mesh {text} gives the axis '{name}' size {size}: at least 1 is needed{rest}."
            )
        mesh[name] = size
    return mesh


def parse_limits(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Reads ``model=4MB`` pairs, the values of an option; no two are on the same thing."""
    limits: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.rpartition("=")
        if not equals or not key or not value:
            raise CommandError(
                f"{option} {text} is not a limit: write what=most, such as model=4MB, "
                "all-reduce=2GB or '*=1GB'."
            )
        if key in limits:
            raise CommandError(f"{option} limits '{key}' twice.")
        limits[key] = value
    return limits


def parse_vary(text: str) -> tuple[str, int]:
    """Reads ``batch['x']:0``, an argument and a dimension."""
    argument, colon, dimension = text.rpartition(":")
    if not colon or not argument or not re.fullmatch(r"-?\d+", dimension):
        raise CommandError(
            f"--vary {text} is no dimension of an argument: "
            "write its path and the dimension, such as batch['x']:0."
        )
    return argument, int(dimension)


UNCONSTRAINED = object()
"""What `parse_spec` gives for an entry of that name."""


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
        return UNCONSTRAINED
    match ast.literal_eval(node):
        case None | str() as entry:
            return entry
        case tuple(names) if all(isinstance(name, str) for name in names):
            return names
    raise ValueError


def load(path: str, option: str) -> Any:
    """Imports what ``pkg.module:name`` or ``file.py:name.of.name`` stands for."""
    place, colon, names = path.rpartition(":")
    if not colon or not place or not names:
        raise CommandError(
            f"{option} {path} names no object: write module:name, such as train:step, "
            "or a file, such as train.py:step."
        )
    module = _file(place, option) if place.endswith(".py") else _module(place, option)
    value: Any = module
    for name in names.split("."):
        if not hasattr(value, name):
            raise CommandError(f"{option} {path}: {place} has no '{name}'{near(name, dir(value))}")
        value = getattr(value, name)
    return value


def near(name: str, known: Iterable[str]) -> str:
    """The end of a sentence on an unknown name: the one that was meant, if one is like it."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else "."


def _module(name: str, option: str) -> Any:
    # `python -m` finds modules in the current folder; a console script does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name.startswith("spmd.demo.") and missing == "optax":
            raise CommandError(WITHOUT_OPTAX) from None
        if name != missing and not name.startswith(f"{missing}."):
            raise  # the module is there, and what it imports is not: its traceback says where
        raise CommandError(
            f"{option}: there is no module '{name}' here or among the installed packages."
        ) from None


def _file(path: str, option: str) -> Any:
    file = Path(path).resolve()
    if not file.is_file():
        raise CommandError(f"{option}: there is no file {path}.")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec  # it ends in ".py"
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module


def at_least(option: str, value: int, least: int = 1) -> None:
    """Sees that a number is not too small."""
    if value < least:
        raise CommandError(f"{option} {value} is too few: it has to be at least {least}.")


def writable(path: Path | None, option: str, ending: str = ".json") -> None:
    """Sees that a file of this ending can be written, before anything takes long."""
    if path is None:
        return
    if path.suffix != ending:
        raise CommandError(f"{option} {path} does not end in {ending}.")
    in_a_folder(path, option)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise CommandError(f"{option} {path} cannot be written.")
    if ending == ".html" and importlib.util.find_spec("jinja2") is None:
        raise CommandError(f"{option} needs Jinja2: pip install 'spmd[html]'.")


def in_a_folder(path: Path, option: str) -> None:
    """Sees that the folder of a file is there."""
    if not path.absolute().parent.is_dir():
        raise CommandError(f"{option} {path} is in a folder that does not exist.")


# Virtual CPU devices


def cpu_variables(count: int, outer: Mapping[str, str]) -> dict[str, str]:
    """The variables with which JAX starts on so many CPU devices, whatever the outer ones say."""
    flag = "--xla_force_host_platform_device_count"
    kept = [word for word in outer.get("XLA_FLAGS", "").split() if not word.startswith(flag)]
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(count),
        "XLA_FLAGS": " ".join(kept),
    }


def set_device_count(count: int) -> None:
    """Has JAX start on so many virtual CPU devices; where it has started, nothing changes."""
    os.environ.update(cpu_variables(count, os.environ))
    if "jax" in sys.modules:
        # It has read the environment already, but not necessarily started.
        config = sys.modules["jax"].config
        with contextlib.suppress(RuntimeError):  # it has started: commands count the devices
            config.update("jax_platforms", "cpu")
            config.update("jax_num_cpu_devices", count)


# Answers


@contextlib.contextmanager
def reading(path: str = "") -> Iterator[None]:
    """Answers a file that cannot be read; without a path, by the name that the error has."""
    try:
        yield
    except OSError as error:
        name, why = path or error.filename, error.strerror or error
        raise CommandError(f"{name} cannot be read: {why}.") from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Where to write a file: beside it, until it is whole; answers one that cannot be written.

    What was there stays until then. A pipe or a device is written as it is, and so is a file in a
    folder that takes no other.
    """
    whole = path.resolve()  # of a link, what it leads to
    is_plain = path.is_file() and os.access(whole.parent, os.W_OK)
    is_beside = is_plain or not path.exists()
    part = whole.with_name(f".spmd-{os.getpid()}{path.suffix}") if is_beside else path
    try:
        yield part
        if is_plain:
            shutil.copymode(whole, part)
        if is_beside:
            os.replace(part, whole)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}.") from None
    finally:
        if is_beside:
            with contextlib.suppress(OSError):
                part.unlink()


def draw(drawable: Any, json_file: Path | None = None, html_file: Path | None = None) -> None:
    """Prints a record or a picture, and writes it to the files that there are."""
    from rich.console import Console

    Console(highlight=False).print(drawable)
    if json_file:
        with writing(json_file) as part:
            part.write_text(json.dumps(drawable.to_json(), indent=1) + "\n", encoding="utf-8")
    if html_file:
        with writing(html_file) as part:
            part.write_text(drawable.to_html(), encoding="utf-8")
