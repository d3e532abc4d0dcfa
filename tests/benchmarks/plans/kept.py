"""Figures on disk, so that a benchmark of hours goes on where it was ended.

What an expert's program compiles to is kept by all that it comes from. Plans are kept by the
planner itself: see `spmd.planner.cache`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import spmd
from spmd.errors import OutOfMemoryError

CACHE = "SPMD_PLAN_CACHE"
"""The environment variable of the folder of plans, and of these figures."""
_PACKAGES = "jax", "jaxlib", "libtpu"
_SOURCES = "hlo", "timing"


def figures(lowered: Any) -> dict[str, Any]:
    """Seconds, peak and wire bytes of a program; empty where it does not fit its hardware."""
    folder = os.environ.get(CACHE)
    file = Path(folder, f"expert-{_key(lowered)}.json") if folder else None
    if file and file.exists():
        return json.loads(file.read_text())
    found = _compiled(lowered)
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


def _key(lowered: Any) -> str:
    found = hashlib.sha256(_reader())
    places = [(one.device_kind, one.coords) for one in lowered.mesh.devices.flat]
    for one in (lowered.as_text(), places, dict(lowered.mesh.shape)):
        found.update(f"{one}\0".encode())
    return found.hexdigest()


@functools.cache
def _reader() -> bytes:
    """Of what compiles a program and reads its time."""
    found = hashlib.sha256(os.environ.get("LIBTPU_INIT_ARGS", "").encode())
    for name in _PACKAGES:
        try:
            found.update(f"{name} {importlib.metadata.version(name)}\0".encode())
        except importlib.metadata.PackageNotFoundError:
            found.update(f"no {name}\0".encode())
    root = Path(spmd.__file__).parent / "inspection"
    for path in sorted(path for one in _SOURCES for path in (root / one).glob("*.py")):
        found.update(path.read_bytes())
    return found.digest()
