"""Plans on disk, so that a second start of a program searches nothing.

A file is found by what was planned: the lowered program, the hardware, what was asked for, and the
versions. ``SPMD_PLAN_CACHE`` names another folder than that of the user's caches; empty: none.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import hashlib
import logging
import os
from pathlib import Path
import tempfile
from typing import Any

from spmd.errors import SpmdError
from spmd.inspection.records import codec
from spmd.inspection.records.plan import Plan
from spmd.inspection.records.plan_codec import encode, load

logger = logging.getLogger(__name__)


def key_of(parts: Sequence[Any]) -> str:
    """The name of a plan, by all that it depends on."""
    found = hashlib.sha256(_planner())
    for one in parts:
        found.update(f"{one!r}\0".encode())
    return found.hexdigest()


@functools.cache
def _planner() -> bytes:
    """Of this planner: another one may plan otherwise."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.digest()


def folder() -> Path | None:
    """Where plans are kept; None for nowhere."""
    given = os.environ.get("SPMD_PLAN_CACHE")
    if given is not None:
        return Path(given) if given else None
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no one knows whose home
        return None
    return Path(home) / "spmd" / "plans"


def find(key: str) -> Plan | None:
    """A plan that was kept, or None; a file that holds none counts as none."""
    where = folder()
    if where is None:
        return None
    try:
        return load(where / f"{key}.json")
    except (OSError, SpmdError) as e:
        logger.debug("No plan in %s: %s", where, e)
        return None


def keep(key: str, plan: Plan) -> None:
    """Keeps a plan; another process that reads meanwhile finds all of it or nothing."""
    where = folder()
    if where is None:
        return
    try:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=where) as own:
            whole = Path(own) / "plan.json"
            codec.write(encode(plan, force=False), whole)
            os.replace(whole, where / f"{key}.json")
    except OSError as e:
        logger.debug("Cannot keep a plan in %s: %s", where, e)
