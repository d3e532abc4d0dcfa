"""Plans on disk, so that a second start of a program searches nothing.

A file is found by what was planned: the lowered program with its lines, the hardware, what was
asked for, and the versions. What compilers said of layouts is there too, for who plans the same
program with another budget, or goes on after an interrupt. ``SPMD_PLAN_CACHE`` names another folder
than that of the user's caches; empty: none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import importlib.metadata
import linecache
import logging
import os
from pathlib import Path
import re
import tempfile
import traceback
from typing import Any, TypeVar

import spmd
from spmd.errors import SpmdError
from spmd.inspection.records import codec
from spmd.inspection.records.plan import Plan
from spmd.inspection.records.plan_codec import encode, load
from spmd.inspection.records.report import Report
from spmd.inspection.shardy.passes import op_name_of, operations_in, places_of
from spmd.inspection.timing.chips import Chip
from spmd.stages import Lowered

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
#: What compiles programs.
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
#: Cells of a notebook are in a folder, or have a number, of this start alone; so have objects.
_OF_ONE_START = re.compile(r"(?<=ipykernel_)\d+|(?<=python-input-)\d+|(?<= at 0x)[0-9a-f]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler said of a program.

    Attributes:
        report: of the compiled program; None for one that it refused.
        failure: what it said of that.
        needed: bytes that a refused program needs, where the compiler says it.
    """

    report: Report | None = None
    failure: str = ""
    needed: int | None = None


def key_of(parts: Sequence[Any]) -> str:
    """The name of a plan, by all that it depends on."""
    return _key(("planner", "inspection"), parts)


def _key(packages: Sequence[str], parts: Sequence[Any]) -> str:
    found = hashlib.sha256(b"".join(map(_sources, packages)))
    for one in (*parts, spmd.__version__, *compilers(), *map(os.environ.get, _FLAGS)):
        found.update(_OF_ONE_START.sub("", f"{one!r}\0").encode())
    return found.hexdigest()


def key_of_program(lowered: Lowered, chip: Chip) -> str:
    """The name of what a compiler says of a program, by its text, its lines and its hardware."""
    devices = [*lowered.mesh.devices.flat]
    return "program-" + _key(("inspection",), (
        lowered.as_text(), places_in(lowered.compiler_ir()),
        lowered._call.compiler_options, dict(lowered.mesh.shape),
        [(one.id, one.device_kind, getattr(one, "coords", None)) for one in devices], chip,
    ))  # fmt: skip


def places_in(module: Any) -> str:
    """The lines and names of a program, which plans and reports tell: with others it is another.

    What calls the planner may move, or be another script. That is told by its functions: of what
    JAX traces once in a process, such as `jnp.mean`, the lines are those of the first call.
    """
    around: dict[tuple[str, str], set[int | None]] = {}
    for code in {frame.f_code for frame, _ in traceback.walk_stack(None)}:
        lines = around.setdefault((code.co_filename, code.co_qualname), set())
        lines.update(line for _, _, line in code.co_lines())  # of several lambdas its own
    linecache.checkcache()

    @functools.cache
    def told(location: Any) -> str:
        parts = [op_name_of(location)]
        for one, function in places_of(location):
            if one.start_line not in around.get((one.filename, function), ()):
                lines = range(one.start_line, one.end_line + 1)
                text = [linecache.getline(one.filename, line) for line in lines]
                parts.append(f"{one.filename}:{lines}:{one.start_col}:{function}:{text}")
        return _OF_ONE_START.sub("", f"{parts}")

    with module.context:
        found = hashlib.sha256()
        for one in operations_in(module.operation):
            found.update(told(one.location).encode())
        return found.hexdigest()


def compilers() -> list[tuple[str, str | None]]:
    """The packages that compile programs, with their versions; None where one is not there."""
    return [(name, _version(name)) for name in _PACKAGES]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _sources(package: str) -> bytes:
    """Of the planner, or of what it reads programs with: others may plan or read otherwise."""
    found = hashlib.sha256()
    for path in sorted(Path(spmd.__file__).parent.joinpath(package).rglob("*.py")):
        found.update(path.read_bytes())
    return found.digest()


def folder() -> Path | None:
    """Where plans are kept; None for nowhere."""
    given = os.environ.get("SPMD_PLAN_CACHE")
    try:
        if given is not None:
            return Path(given).expanduser() if given else None
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no one knows whose home
        return None
    return Path(home) / "spmd" / "plans"


def find(key: str) -> Plan | None:
    """A plan that was kept, or None; a file that holds none counts as none."""
    return _found(key, load)


def find_compiled(key: str) -> Compiled | None:
    """What a compiler said that was kept, or None."""
    return _found(key, _load_compiled)


def _load_compiled(path: Path) -> Compiled:
    data = codec.read(path)
    if not isinstance(data, dict) or set(data) != {"report", "failure", "needed"}:
        raise ValueError(f"{path} holds nothing that a compiler said")
    report = data["report"]
    return Compiled(**{**data, "report": report and codec.decode(report, subject=f"file `{path}`")})


def _found(key: str, read: Callable[[Path], _T]) -> _T | None:
    where = folder()
    if where is None:
        return None
    try:
        return read(where / f"{key}.json")
    except (OSError, ValueError, SpmdError) as e:
        logger.debug("Nothing in %s: %s", where, e)
        return None


def keep(key: str, plan: Plan) -> None:
    """Keeps a plan; another process that reads meanwhile finds all of it or nothing."""
    _keep(key, lambda: encode(plan, force=False))


def keep_compiled(key: str, one: Compiled) -> None:
    """Keeps what a compiler said, likewise."""
    report = one.report and codec.encode(one.report)
    _keep(key, lambda: {"report": report, "failure": one.failure, "needed": one.needed})


def _keep(key: str, data: Callable[[], Mapping[str, Any]]) -> None:
    where = folder()
    if where is None:
        return
    try:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=where) as own:
            whole = Path(own) / "whole.json"
            codec.write(data(), whole)
            os.replace(whole, where / f"{key}.json")
    except OSError as e:
        logger.debug("Cannot keep anything in %s: %s", where, e)
