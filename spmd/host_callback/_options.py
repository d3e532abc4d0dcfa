"""What can be configured, and the environment variables that say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import os

from spmd.errors import Failure, OptionError, explain

_QUEUE = "SPMD_HOST_CALLBACK_MAX_QUEUE_BYTES"
_INLINE = "SPMD_HOST_CALLBACK_INLINE"
_TRUTH = {"1": True, "true": True, "yes": True, "on": True}
_TRUTH |= {"": False, "0": False, "false": False, "no": False, "off": False}


@dataclass(slots=True)
class _Options:
    max_queue_bytes: float = 256e6
    inline: bool = False


def _from_environment(environ: Mapping[str, str]) -> _Options:
    found = _Options()
    if text := environ.get(_QUEUE):
        found.max_queue_bytes = _queue_bytes(text, f"{_QUEUE}={text}")
    text = environ.get(_INLINE, "")
    if text.lower() not in _TRUTH:
        raise explain(
            "host_callback", [_failure(f"{_INLINE}={text}", "1 or 0, true or false", _INLINE)]
        )
    found.inline = _TRUTH[text.lower()]
    return found


def _queue_bytes(value: object, given: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type] - what is no number is told below
    except (TypeError, ValueError):
        number = -1.0
    if not number > 0:
        raise explain("host_callback", [_failure(given, "a positive number of bytes", "queue")])
    return number


def _failure(given: str, expected: str, what: str) -> Failure:
    name = "inline" if what == _INLINE else "max_queue_bytes"
    return Failure(what=f"cannot set {name}", given=given, expected=expected, error=OptionError)


options = _from_environment(os.environ)


def configure(max_queue_bytes: float | None = None, inline: bool | None = None) -> None:
    """Sets how taps are delivered, for the whole process; what is not given is its default again.

    Args:
        max_queue_bytes: How many bytes of operands may wait for host functions, over all devices.
            A program pauses where one more does not fit, and nothing is lost; an operand larger
            than that passes alone. By default 256e6, or what the environment variable
            `SPMD_HOST_CALLBACK_MAX_QUEUE_BYTES` says.
        inline: Whether eager calls run the host function in the caller's own thread, where a
            debugger sees the caller's stack. Calls inside of a traced function stay as they are.
            By default False, or what `SPMD_HOST_CALLBACK_INLINE` says.

    Raises:
        ValueError: `max_queue_bytes` is no positive number, or `inline` neither True nor False.
    """
    defaults = _from_environment(os.environ)
    if max_queue_bytes is not None:
        given = f"configure(max_queue_bytes={max_queue_bytes!r})"
        defaults.max_queue_bytes = _queue_bytes(max_queue_bytes, given)
    if inline not in (None, True, False):
        given = f"configure(inline={inline!r})"
        raise explain("host_callback", [_failure(given, "True or False", _INLINE)])
    options.max_queue_bytes = defaults.max_queue_bytes
    options.inline = defaults.inline if inline is None else bool(inline)
