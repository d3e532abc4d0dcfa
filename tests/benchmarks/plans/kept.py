"""Figures on disk, so that a benchmark of hours goes on where it was ended.

What an expert's program compiles to is kept by all that it comes from, and so is what the planner
finds on one mesh. Plans are kept by the planner itself: see `spmd.planner.cache`.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import spmd
from spmd.errors import OutOfMemoryError
from spmd.planner import cache

CACHE = "SPMD_PLAN_CACHE"
"""The environment variable of the folder of plans, and of these figures."""
_READ = "inspection/hlo", "inspection/timing"
_PLANNED = *_READ, "planner"


def figures(lowered: Any) -> dict[str, Any]:
    """Seconds, peak and wire bytes of a program; empty where it does not fit its hardware."""
    return _kept(f"expert-{_key(lowered, _READ)}", lambda: _compiled(lowered))


def of_mesh(lowered: Any, find: Callable[[], Any]) -> Any:
    """What the planner finds for a bare program on its mesh, as JSON values.

    Args:
        lowered: the program.
        find: finds it, where it is not there.
    """
    return _kept(f"mesh-{_key(lowered, _PLANNED)}", find)


def _kept(name: str, find: Callable[[], Any]) -> Any:
    folder = os.environ.get(CACHE)
    file = Path(folder, f"{name}.json") if folder else None
    if file and file.exists():
        return json.loads(file.read_text())
    found = find()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(found))
        os.replace(whole, file)
    return found


def _compiled(lowered: Any) -> dict[str, Any]:
    try:
        report = spmd.report(lowered.compile())
    except OutOfMemoryError:
        return {}
    return {
        "seconds": report.time.seconds if report.time else None,
        "peak": report.memory.peak if report.memory else None,
        "wire": report.total.wire_bytes,
    }


def _key(lowered: Any, sources: tuple[str, ...]) -> str:
    found = hashlib.sha256(_reader(sources))
    places = [(one.device_kind, one.coords) for one in lowered.mesh.devices.flat]
    for one in (lowered.as_text(), places, dict(lowered.mesh.shape)):
        found.update(f"{one}\0".encode())
    return found.hexdigest()


@functools.cache
def _reader(sources: tuple[str, ...]) -> bytes:
    """Of what compiles a program, and of our folders that have a part in it."""
    found = hashlib.sha256(os.environ.get("LIBTPU_INIT_ARGS", "").encode())
    found.update(f"{cache.compilers()}\0".encode())
    root = Path(spmd.__file__).parent
    for path in sorted(path for one in sources for path in (root / one).rglob("*.py")):
        found.update(path.read_bytes())
    return found.digest()
