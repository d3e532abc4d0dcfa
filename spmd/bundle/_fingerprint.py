"""What a program was compiled for, and how this process differs from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import functools
import os
import platform
from typing import Any

import jax

from spmd import _jax
from spmd.bundle._codec import Field
from spmd.errors import BundleError, Failure

#: What of JAX's configuration changes programs, or the values that go into them.
_CONFIG = (
    "jax_default_matmul_precision",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)
#: Flags that leave the compiled program as it is; how many devices there are is compared itself.
_NO_MATTER = ("--xla_dump", "--xla_force_host_platform_device_count", "--xla_hlo_profile")

_Value = str | tuple[str, ...]


def fingerprint(devices: Sequence[Any]) -> dict[str, _Value]:
    """What decides whether a program for these devices runs here; names are for users to read."""
    device = devices[0]
    found: dict[str, _Value] = {
        "jax": jax.__version__,
        "jaxlib": _jax.versions.JAXLIB_VERSION,
        "platform": device.platform,
        "platform version": device.client.platform_version,
        "device kind": device.device_kind,
        "devices": str(len(devices)),
        "processes": str(jax.process_count()),
    }
    if device.platform == "cpu":  # other code is compiled for the device, which is named above
        found["CPU"], found["CPU features"] = cpu()
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        flags = os.environ.get(name, "").split()
        found[name] = tuple(sorted(f for f in flags if not f.startswith(_NO_MATTER)))
    values = jax.config.values
    return found | {name: str(values[name]) for name in _CONFIG if name in values}


@functools.cache
def cpu() -> tuple[str, tuple[str, ...]]:
    """The architecture of this machine, and what instructions its processor has.

    XLA compiles for exactly those. Elsewhere than on Linux, the processor's name stands for them.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return platform.machine(), tuple(sorted({*value.split()}))
    except OSError:
        # Only Linux has this file, and a sandbox may hide it: the processor's name is what is left.
        pass
    return platform.machine(), (platform.processor(),)


def decode(field: Field) -> dict[str, _Value]:
    """A fingerprint out of a header, in which JSON has made lists of its tuples."""
    return {
        name: value.strings() if type(value.value) is list else value.string()
        for name, value in field.pairs()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which a bundle and this process are not the same.

    Attributes:
        field: Its name.
        bundle: What the bundle says; of a list, what only the bundle has.
        here: What holds here, likewise.
    """

    field: str
    bundle: str
    here: str


def differences(bundle: Mapping[str, _Value], here: Mapping[str, _Value]) -> list[Difference]:
    """In what two fingerprints differ."""
    names = [*bundle, *(n for n in here if n not in bundle)]
    return [
        Difference(
            field=name,
            bundle=_show(bundle.get(name), here.get(name)),
            here=_show(here.get(name), bundle.get(name)),
        )
        for name in names
        if bundle.get(name) != here.get(name)
    ]


_MOST_SHOWN = 12


def _show(value: _Value | None, other: _Value | None) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str) or not isinstance(other, tuple):
        return value if isinstance(value, str) else " ".join(value)
    own = [v for v in value if v not in other]
    more = [f"and {len(own) - _MOST_SHOWN} more"] if len(own) > _MOST_SHOWN else []
    return " ".join(["with", *own[:_MOST_SHOWN], *more]) if own else "without those"


def failure_of(found: Sequence[Difference]) -> Failure:
    """The failure of a bundle for another process than this one."""
    names = [d.field for d in found]
    listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
    return Failure(
        what=f"cannot be loaded here: {listed} differ{'s' * (len(names) == 1)}",
        expected="\n".join(f"{d.field}: {d.bundle}" for d in found),
        got="\n".join(f"{d.field}: {d.here}" for d in found),
        fix="compile and save it again here, or load it where it was saved",
        error=BundleError,
    )
