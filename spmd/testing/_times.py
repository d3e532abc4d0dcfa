"""Limits on the time of a program, as one assertion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import numbers
from typing import Any

from spmd.errors import ArgumentError, Failure, OptionError, did_you_mean, explain
from spmd.inspection.records.report import Report
from spmd.inspection.records.sizes import parse_seconds, show_seconds, show_share
from spmd.inspection.records.time import UNKNOWN_TIMES, Time
from spmd.inspection.show import words
from spmd.testing._assertions import as_report
from spmd.testing._budgets import refusal

# pytest shows the user's line and the message, and no frame of this file.
__tracebackhide__ = True

SUBJECT = "assert_time"

#: Lines of exchanges in a message.
_MOST_SHOWN = 10


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

    The chips that it is for need not be there. Where the time of a part is not known, so that the
    call may take longer than the figures say, every limit is broken: a loop that runs an unknown
    number of times, and text of the program that was not understood.

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
        kwargs: keyword arguments of `f`, and ``model_flops=`` of `spmd.report`.

    Returns:
        The report, for further assertions.

    Raises:
        AssertionError: a limit is broken; all of them are told, with what takes the time. Also a
            program on one device where a mesh of several is active.
        ValueError: no limit is given, one cannot be read, there is no such mesh axis, or the time
            of the program, or its MFU, is not known.
        TypeError: a limit has the wrong type, or a `Report` is given with arguments.

    Example:
        assert_time(step, params, batch, mesh=spmd.topology("v5e:4x4", {"data": 16}), max="20ms")
    """
    # A limit that cannot be read is told before anything compiles.
    limits = _Limits.read(max, max_exposed, min_mfu)
    given = kwargs if chip is None else {**kwargs, "chip": chip}
    report = as_report(f, args, mesh, given, subject=SUBJECT)
    _refuse_unknown(report, limits)
    if broken := [*_broken(report, limits)]:
        raise AssertionError(_tell(report, broken))
    return report


# Limits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What a call may take: text as the user wrote it, with the figures that it stands for."""

    most: tuple[Any, float] | None
    exposed: Mapping[str | None, tuple[Any, float]]
    min_mfu: float | None

    @classmethod
    def read(cls, most: Any, exposed: Any, min_mfu: Any) -> _Limits:
        by_axis = exposed if isinstance(exposed, Mapping) else {None: exposed}
        waits = {axis: time for axis, time in by_axis.items() if time is not None}
        if most is None and min_mfu is None and not waits:
            raise refusal(
                "is given no limit, so it would assert nothing",
                subject=SUBJECT,
                expected="max=, max_exposed= or min_mfu=",
                fix="spmd.report(f, *args).time, for the time alone",
            )
        given = {"max": most} if most is not None else {}
        given |= {
            "max_exposed" if a is None else f"max_exposed[{a!r}]": t for a, t in waits.items()
        }
        failures = [
            *filter(None, (_unreadable(*one) for one in given.items())),
            *_bad_share(min_mfu),
        ]
        if failures:
            raise explain(SUBJECT, failures)
        return cls(
            most=None if most is None else (most, parse_seconds(most)),
            exposed={axis: (time, parse_seconds(time)) for axis, time in waits.items()},
            min_mfu=None if min_mfu is None else float(min_mfu),
        )


def _unreadable(option: str, given: Any) -> Failure | None:
    try:
        parse_seconds(given)
    except ValueError as e:
        is_kind = isinstance(given, (str, numbers.Real)) and not isinstance(given, bool)
        return Failure(
            what=f"cannot read {option} = {given!r}",
            expected=str(e),
            error=OptionError if is_kind else ArgumentError,
        )
    return None


def _bad_share(given: Any) -> Iterator[Failure]:
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    if given is not None and not (is_number and 0 <= float(given) <= 1):
        yield Failure(
            what=f"cannot read min_mfu = {given!r}",
            expected="a share from 0 to 1, such as 0.4",
            error=OptionError if is_number else ArgumentError,
        )


def _refuse_unknown(report: Report, limits: _Limits) -> None:
    """Sees that what is limited is there and known."""
    shown = ", ".join(map(repr, report.mesh)) or "none: the program has no mesh"
    failures = [
        Failure(
            what=f"knows no mesh axis {axis!r}{did_you_mean(str(axis), report.mesh)}",
            given=f"a limit in max_exposed on {axis!r}",
            expected=f"an axis of the program's mesh, {shown}",
            error=OptionError,
        )
        for axis in limits.exposed
        if axis is not None and axis not in report.mesh
    ]
    if report.time is None:
        failure = Failure(
            what=f"knows no time of `{report.name}`",
            got=words.headline(report),
            fix="a mesh of spmd.topology('v5e:4x4', axes), or chip='v5e'",
            error=OptionError,
        )
        failures = [failure, *failures]
    elif limits.min_mfu is not None and report.time.mfu is None:
        failure = Failure(
            what=f"knows no MFU of `{report.name}`",
            got="; ".join(one for one in report.time.unknown if "MFU" in one),
            fix="spmd.report(f, *args, model_flops=...), whose result is then `f`",
            error=OptionError,
        )
        failures = [failure, *failures]
    if failures:
        raise explain(SUBJECT, failures)


# Against a program


def _broken(report: Report, limits: _Limits) -> Iterator[str]:
    time = report.time
    assert time is not None
    loops = report.cost.unknown_loops or any(UNKNOWN_TIMES in one for one in time.unknown)
    if report.unread:
        yield f"all limits: not known to be kept, {report.unread}"
    elif loops:
        yield f"all limits: not known to be kept, a loop runs {UNKNOWN_TIMES}"
    if limits.most is not None:
        yield from _exceeded("max", "a call", time.seconds, limits.most)
    for axis, limit in limits.exposed.items():
        what = "all exchanges" if axis is None else f"exchanges over {axis}"
        yield from _exceeded("max_exposed", what, _waits(time, axis), limit)
    if limits.min_mfu is not None and time.mfu is not None and time.mfu < limits.min_mfu:
        yield f"min_mfu: at least {limits.min_mfu:.4g}, found {time.mfu:.4g}"


def _waits(time: Time, axis: str | None) -> float:
    """Seconds in which nothing but exchanges over an axis goes on."""
    found = time.exposed_by_axes.items()
    return sum(s for axes, s in found if axis is None or axis in words.whole_axes(axes))


def _exceeded(option: str, what: str, found: float, limit: tuple[Any, float]) -> Iterator[str]:
    given, most = limit
    if found > most:
        allowed = given if isinstance(given, str) else show_seconds(most)
        more = show_seconds(found - most)
        yield f"{option}, {what}: allowed {allowed}, found {show_seconds(found)}, {more} too much"


def _tell(report: Report, broken: list[str]) -> str:
    time = report.time
    assert time is not None
    limits = "a limit" if len(broken) == 1 else f"{len(broken)} limits"
    mesh = ", ".join(f"{name}={size}" for name, size in report.mesh.items())
    target = f"{f'mesh {mesh}' if mesh else 'no mesh'}; {words.show_backend(report)}"
    lines = [f"`{report.name}` breaks {limits} on its time: {target}.", f"{time}"]
    lines += [f"{number}. {text}" for number, text in enumerate(broken, start=1)]
    lines += [_row(seconds, label, time) for label, _, seconds in words.time_parts(time)]
    waits = time.exposed
    if waits:
        lines.append("The device waits at these lines, longest first:")
    lines += [
        _row(one.seconds, f"over {', '.join(one.mesh_axes) or 'no axis'}, {_place(one)}", time)
        for one in waits[:_MOST_SHOWN]
    ]
    more = len(waits) - _MOST_SHOWN
    return "\n".join([*lines, *[f"     ... and {more} more"] * (more > 0)])


def _row(seconds: float, label: str, time: Time) -> str:
    return f"     {show_seconds(seconds)}, {show_share(seconds / time.seconds)}: {label}"


def _place(one: Any) -> str:
    if one.source is None:
        return "at an unknown line"
    function = f" ({one.source.function})" if one.source.function else ""
    return f"at {words.show_place(one.source)}{function}"
