"""What goes wrong on a host, and how it is told where the arrays are."""

from __future__ import annotations

import functools
import platform
import traceback
from types import TracebackType

import jax

from spmd import _jax
from spmd.errors import SpmdError


class ColocatedPythonError(SpmdError, RuntimeError):
    """Colocated functions without results raised; the first error is the cause.

    Raised by :func:`barrier`, once for all errors since the last time.
    """

    __module__ = "spmd.colocated_python"


def subject(name: str) -> str:
    """How error texts call a function."""
    return f"colocated_python of `{name}`"


@functools.lru_cache(maxsize=1)
def host() -> str:
    """This host, as errors name it."""
    return f"process {jax.process_index()} ({platform.node()})"


_jax.core.register_cache(host, "host of colocated functions")


def _users_frames(where: TracebackType | None) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(where) if _jax.core.is_user_file(f.filename)]


def tell(name: str, error: BaseException) -> str:
    """Returns the text of an error that a function raised, for who has only its arrays."""
    if isinstance(error, SpmdError) and str(error).startswith(subject(name)):
        return str(error)
    what = "".join(traceback.format_exception_only(error)).rstrip()
    text = f"{subject(name)} failed on {host()}.\n  {what}"
    if frames := _users_frames(error.__traceback__):
        text += "\n" + "".join(traceback.format_list(frames)).rstrip()
    return text
