"""Numbers of bytes and of seconds as people write and read them."""

from __future__ import annotations

import math
import numbers
import re

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SHOWN = ("KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*$")


def parse_bytes(size: int | float | str) -> int:
    """Reads a number of bytes.

    Args:
        size: a number, or text such as ``"16GB"`` (10^9) or ``"15.75 GiB"`` (2^30); upper and
            lower case are the same.

    Returns:
        Whole bytes, rounded down.

    Raises:
        ValueError: the text is no size, the unit is unknown, or the number is negative.
    """
    if isinstance(size, numbers.Real) and not isinstance(size, (bool, str)):
        if not 0 <= size < math.inf:
            raise ValueError(f"a number of bytes is at least 0 and finite, not {size}")
        return int(size)
    found = _SIZE.match(size) if isinstance(size, str) else None
    if not found:
        raise ValueError(f"{size!r} is no number of bytes: write 4096, '16GB' or '15.75GiB'")
    if found[2].upper() not in _UNITS:
        raise ValueError(_unknown_unit(*found.groups()))
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _unknown_unit(number: str, unit: str) -> str:
    """What to write for a unit such as ``Megs``, of which either of two may be meant."""
    text, letter = f"{unit!r} is no unit of bytes: write ", unit[0].upper()
    if letter not in "KMGT":
        return text + f"{number}B, or one of {', '.join(_SHOWN)}"
    both = (f"{number}{letter}{end}" for end in ("B", "iB"))
    return text + " or ".join(f"{size} ({parse_bytes(size):,} bytes)" for size in both)


def show_bytes(count: int) -> str:
    """A size in the largest binary unit that leaves at least one: ``1.5 MiB``."""
    if count < 1024:
        return f"{count} B"
    # What rounds to 1024.0 of a unit is 1.0 of the next.
    power = min(int(math.log(count / 1023.95, 1024)) + 1, 4)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def show_count(count: int) -> str:
    """A large number in steps of a thousand: ``1.2 G``."""
    power = min((len(str(count)) - 1) // 3, 6)
    return f"{count / 1000**power:.1f} {' KMGTPE'[power]}" if power > 0 else f"{count} "


# Both letters for micro: the sign of its own, and the Greek one.
_POWERS = {"s": 0, "ms": 3, "us": 6, "\u00b5s": 6, "\u03bcs": 6, "ns": 9}
_TIME = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d*)?|\.\d+)\s*([^\W\d_]*)\s*$")


def parse_seconds(time: float | str) -> float:
    """Reads a time.

    Args:
        time: a number of seconds, or text such as ``"20ms"``, ``"1.5 s"`` or ``"300us"``. A text
            has a unit: ``"20"`` may be meant as either.

    Raises:
        ValueError: the text is no time, the unit is missing or unknown, or the number is negative.
    """
    if not isinstance(time, (str, bool)) and isinstance(time, numbers.Real):
        if not 0 <= float(time) < math.inf:
            raise ValueError(f"a time is at least 0 and finite, not {time}")
        return float(time)
    found = _TIME.match(time) if isinstance(time, str) else None
    if not found:
        raise ValueError(f"{time!r} is no time: write '20ms', '1.5s' or '300us'")
    number, unit = found.groups()
    if unit not in _POWERS:
        what = f"{unit!r} is no unit of time" if unit else f"{time!r} has no unit"
        raise ValueError(f"{what}: write {number}s, {number}ms, {number}us or {number}ns")
    return float(number) / 10 ** _POWERS[unit]


def show_seconds(seconds: float) -> str:
    """A time with three digits, in the largest unit that leaves at least one: ``21.1 ms``."""
    # What rounds to 1,000 of a unit is 1 of the next.
    units = (("s", 0), ("ms", 3), ("us", 6), ("ns", 9))
    unit, power = next((one for one in units if seconds * 10 ** one[1] >= 0.9995), units[-1])
    value = seconds * 10**power
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}" if seconds else "0 s"


def show_share(share: float) -> str:
    """A share in percent, with a digit more below ten: ``41%``, ``3.9%``; ``<0.1%`` for less."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.0%}" if share >= 0.0995 or not share else f"{share:.1%}"
