"""Limits on the time of a program, as one assertion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spmd.errors import ArgumentError, OptionError
from spmd.inspection.records.report import Report
from spmd.inspection.records.sizes import parse_seconds, show_seconds
from spmd.inspection.records.time import Time
from spmd.inspection.show import words
from spmd.testing._assertions import as_report
from spmd.testing._budgets import refusal

# pytest shows the user's line and the message, and no frame of this file.
__tracebackhide__ = True

SUBJECT = "assert_time"


def assert_time(
    f: Any,
    /,
    *args: Any,
    max: float | str | None = None,
    max_exposed: Mapping[str, float | str] | float | str | None = None,
    min_mfu: float | None = None,
    mesh: Any = None,
    chip: Any = None,
    **kwargs: Any,
) -> Report:
    """Asserts that one call of a program takes no longer than it may.

    The chips that it is for need not be there.

    Args:
        f: what `spmd.report` takes (a `pjit` or `jax.jit` function, or a lowered or compiled one),
            or a `Report`.
        args: arguments of `f`, or structs of their shapes; none for a lowered or compiled `f`.
        max: the longest time of a call: seconds, or text such as ``"20ms"``.
        max_exposed: the longest time in which the device only waits for exchanges; in all, or by
            mesh axis: ``{"model": "2ms"}``. What crosses two axes counts for each of them.
        min_mfu: the least model FLOPs utilization, from 0 to 1.
        mesh: the mesh to compile for; by default the one that is active here.
        chip: whose figures to use, as `spmd.report` takes it.
        kwargs: keyword arguments of `f`.

    Returns:
        The report, for further assertions.

    Raises:
        AssertionError: a limit is broken; all of them are told, with what takes the time.
        ValueError: no limit is given, one cannot be read, there is no such mesh axis, or the time
            of the program, or its MFU, is not known.
        TypeError: a limit has the wrong type, or a `Report` is given with arguments.

    Example:
        assert_time(step, params, batch, mesh=spmd.topology("v5e:4x4", {"data": 16}), max="20ms")
    """
    limits = _read(max, max_exposed, min_mfu)
    given = kwargs if chip is None else {**kwargs, "chip": chip}
    report = as_report(f, args, mesh, given, subject=SUBJECT)
    if report.time is None:
        raise refusal(words.headline(report), subject=SUBJECT, given=f"`{report.name}`")
    if broken := [*_broken(report, report.time, *limits)]:
        raise AssertionError(_tell(report, report.time, broken))
    return report


_Limits = tuple[float | None, dict[str | None, float], float | None]


def _read(most: Any, exposed: Any, min_mfu: Any) -> _Limits:
    if most is None and exposed is None and min_mfu is None:
        raise refusal(
            "is given no limit, so it would assert nothing",
            subject=SUBJECT,
            expected="max=, max_exposed= or min_mfu=",
        )
    is_share = isinstance(min_mfu, (int, float)) and not isinstance(min_mfu, bool)
    if min_mfu is not None and not (is_share and 0 <= min_mfu <= 1):
        raise refusal(
            "cannot read min_mfu",
            subject=SUBJECT,
            expected="a share from 0 to 1",
            got=repr(min_mfu),
        )
    by_axis = exposed if isinstance(exposed, Mapping) else {None: exposed}
    waits = {a: _seconds(t, "max_exposed") for a, t in by_axis.items() if t is not None}
    return None if most is None else _seconds(most, "max"), waits, min_mfu


def _seconds(given: Any, option: str) -> float:
    try:
        return parse_seconds(given)
    except ValueError as e:
        error = OptionError if isinstance(given, (str, int, float)) else ArgumentError
        raise refusal(f"cannot read {option}: {e}", subject=SUBJECT, error=error) from None


def _broken(
    report: Report,
    time: Time,
    most: float | None,
    exposed: Mapping[str | None, float],
    min_mfu: float | None,
) -> Iterator[str]:
    if most is not None and time.seconds > most:
        yield f"a call takes {show_seconds(time.seconds)}, more than {show_seconds(most)}"
    for axis, limit in exposed.items():
        if axis is not None and axis not in report.mesh:
            raise refusal(
                f"knows no mesh axis {axis!r}",
                subject=SUBJECT,
                expected=f"one of {', '.join(report.mesh)}",
            )
        found = time.exposed_by_axes.items()
        waits = sum(s for axes, s in found if axis is None or axis in words.whole_axes(axes))
        if waits > limit:
            over = f" over {axis}" if axis else ""
            yield f"{show_seconds(waits)} exposed{over}, more than {show_seconds(limit)}"
    if min_mfu is not None:
        if time.mfu is None:
            raise refusal(
                "does not know the MFU of this program",
                subject=SUBJECT,
                fix="spmd.report(f, *args, model_flops=...), whose result is then `f`",
            )
        if time.mfu < min_mfu:
            yield f"the MFU is {words.show_share(time.mfu)}, less than {words.show_share(min_mfu)}"


def _tell(report: Report, time: Time, broken: list[str]) -> str:
    lines = [f"`{report.name}`: {words.headline(report)}."]
    lines += [f"{number}. {text}" for number, text in enumerate(broken, start=1)]
    lines += [
        f"     {show_seconds(seconds):>8}  {label}" for label, _, seconds in words.time_parts(time)
    ]
    places = ((one.seconds, words.show_place(one.source)) for one in time.exposed[:5])
    lines += [
        f"     {show_seconds(seconds):>8}  exposed at {place or words.NO_LINE}"
        for seconds, place in places
    ]
    return "\n".join(lines)
