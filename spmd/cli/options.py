"""What the commands of the command line are asked, read before JAX is imported."""

from __future__ import annotations

from collections.abc import Sequence
import difflib
import importlib
import importlib.util
import os
from pathlib import Path
import re
import sys
from typing import Any


class CommandError(Exception):
    """A command that cannot run as asked; the message is for its user."""


def parse_axes(text: str, *, open_size: bool = False) -> dict[str, int]:
    """Reads ``data=4,model=2``.

    Args:
        text: sizes by name.
        open_size: whether a size may be -1, which stands for what is left.

    Returns:
        Size by axis name, in the order given.

    Raises:
        CommandError: the text is no mesh.
    """
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
    """Reads ``model=4MB`` pairs.

    Args:
        option: how the option is called, for errors.
        texts: the values that were given.

    Raises:
        CommandError: a value is no pair, or two are on the same thing.
    """
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
    """Reads ``batch['x']:0``, an argument and a dimension.

    Raises:
        CommandError: the text is neither.
    """
    argument, colon, dimension = text.rpartition(":")
    if not colon or not argument or not re.fullmatch(r"-?\d+", dimension):
        raise CommandError(
            f"--vary {text} is no dimension of an argument: "
            "write its path and the dimension, such as batch['x']:0."
        )
    return argument, int(dimension)


def load(path: str, option: str) -> Any:
    """Imports what ``pkg.module:name`` or ``file.py:name`` stands for.

    Args:
        path: where it is; names after the colon may be dotted.
        option: how the argument is called, for errors.

    Returns:
        The object.

    Raises:
        CommandError: there is no such module or no such name in it.
    """
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
            close = difflib.get_close_matches(name, dir(value), n=1)
            hint = f"; did you mean '{close[0]}'?" if close else "."
            raise CommandError(f"{option} {path}: {place} has no '{name}'{hint}")
        value = getattr(value, name)
    return value


def _module(name: str, option: str) -> Any:
    # `python -m` finds modules in the current folder; a console script does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
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


def writable(path: Path | None, option: str, ending: str = ".json") -> None:
    """Sees that a file can be written, before anything takes long.

    Raises:
        CommandError: it cannot, or has another ending than `ending`.
    """
    if path is None:
        return
    if path.suffix != ending:
        raise CommandError(f"{option} {path} does not end in {ending}.")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"{option} {path} is in a folder that does not exist.")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise CommandError(f"{option} {path} cannot be written.")
    if ending == ".html" and importlib.util.find_spec("jinja2") is None:
        raise CommandError(f"{option} needs Jinja2: pip install 'spmd[html]'.")
