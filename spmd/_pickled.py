"""What pickled forms have in common: a version, and devices that are known by their numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from spmd.errors import ArgumentError, Failure, explain


def check_version(subject: str, version: Any, own: int) -> None:
    """Refuses a form that another version of this library has written."""
    if version != own:
        failure = Failure(
            what="cannot be read: another version of spmd wrote it",
            expected=f"version {own}",
            got=f"version {version!r}",
            fix="read it with the version that wrote it, or pickle the function alone",
            error=ArgumentError,
        )
        raise explain(subject, [failure])


def find_device(subject: str, platform: str, number: int) -> Any:
    """Returns the device of this process that a form speaks of."""
    with contextlib.suppress(RuntimeError):  # there is no such platform
        for device in jax.devices(platform):
            if device.id == number:
                return device
    failure = Failure(
        what="cannot run here: a device is missing",
        expected=f"{platform}:{number}",
        got=", ".join(f"{d.platform}:{d.id}" for d in jax.devices()),
        error=ArgumentError,
    )
    raise explain(subject, [failure])
