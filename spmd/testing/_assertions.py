"""Budgets on the collectives of a program, as one assertion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
from pathlib import Path
import sys
from typing import Any

from spmd.errors import ArgumentError, Failure, did_you_mean, explain
from spmd.inspection.records.names import components, direction_of, is_written, stacks
from spmd.inspection.records.report import DIRECTIONS, Collective, Report, Source
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.records.sums import line_of, shares
from spmd.inspection.show import words
from spmd.testing import _budgets
from spmd.testing._budgets import SUBJECT, Budget, Violation, read_budget, refusal

# pytest shows the user's line and the message, and no frame of this file.
__tracebackhide__ = True

#: Places that are always there, so that an empty one is no misspelled one.
_PLACES = ("loop", *DIRECTIONS)

#: Lines of collectives in one part of a message.
_MOST_SHOWN = 20


def assert_collectives(
    f: Any,
    /,
    *args: Any,
    mesh: Any = None,
    none: Iterable[str] | str = (),
    only: Iterable[str] | str | None = None,
    max_bytes: Mapping[str, int | float | str] | int | float | str | None = None,
    max_count: Mapping[str, int] | int | None = None,
    within: Mapping[str, Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> Report:
    """Asserts that a program keeps a budget of collectives.

    A limit is on a kind of collective (``"all-gather"``), on a mesh axis (``"model"``, in
    `max_bytes` and `max_count`), on both (``"all-gather@model"``, ``"*@model"``), or on everything
    (``"*"``). A collective over two axes counts for each of them, one over a part of an axis for
    that axis, one within groups of one device for none: it is no exchange. Both branches of a
    conditional count as if they ran. A limit on a collective whose number of executions is unknown
    is broken: unknown is not taken for one. So is every limit on a program with text that was not
    understood (`Report.unread`), since what it exchanges is not known. What the compiler combined
    into one exchange is in the place of each of its parts, with the bytes of the parts that are
    there.

    Args:
        f: what `spmd.report` takes (a `pjit` or `jax.jit` function, or a lowered or compiled one),
            or a `Report`.
        args: arguments of `f`, or structs of their shapes; none for a lowered or compiled `f`.
        mesh: the mesh to compile for; by default the one that is active here.
        none: what must not occur: kinds, ``"kind@axis"``, ``"*@axis"`` or ``"*"``.
        only: what alone may occur, spelled as in `none`; ``()`` allows nothing.
        max_bytes: bytes that each device may send in one call, by what they are on, such as
            ``{"model": "4MB", "*": 10**9}``; these are the wire bytes of the ledger, over all
            executions. A lone size is on everything.
        max_count: executions in one call, in the same way.
        within: by place in the program, a dict of the four options above, which hold for what is
            there: ``"loop"``; ``"forward"``, ``"backward"`` or ``"other"``; a source file
            (``"model.py"``, ``"model.py:42"``), where the line of the ledger has to be in it; a
            function, with all that it calls; or a `jax.named_scope`. A place without collectives
            is taken for misspelled, unless its dict has ``"empty_ok": True``.
        kwargs: keyword arguments of `f`. One that has the name of an option here can be given with
            ``spmd.report(f, ...)``, whose result is then `f`.

    Returns:
        The report, for further assertions.

    Raises:
        AssertionError: limits are broken; all of them are told, each with its collectives. Also a
            program on one device where a mesh of several is active: it breaks no limit, whatever
            it does.
        ValueError: there is no such kind, mesh axis, option or place.
        TypeError: a limit has the wrong type, or a `Report` is given with arguments.

    Example:
        assert_collectives(
            step, params, batch,
            none=["all-to-all"],
            max_bytes={"model": "4MB"},
            within={"loop": {"none": ["all-gather"]}},
        )
    """
    given = {"none": none, "only": only, "max_bytes": max_bytes, "max_count": max_count}
    # Misspelled limits are told before anything compiles.
    budgets = {None: read_budget(given), **_read_within(within)}
    if within is None and budgets[None] == Budget():
        raise refusal(
            "is given no limit, so it would assert nothing",
            expected="none=, only=, max_bytes=, max_count= or within=",
            fix="spmd.report(f, *args), for the report alone",
        )
    report = as_report(f, args, mesh, kwargs, subject=SUBJECT)
    _budgets.check_axes(budgets.values(), report.mesh)
    if broken := [*_broken(report, budgets)]:
        raise AssertionError(_tell(report, broken))
    return report


def as_report(f: Any, args: Any, mesh: Any, kwargs: Mapping[str, Any], *, subject: str) -> Report:
    """The report on a function, or the one that was given; arguments do not go with that."""
    if not isinstance(f, Report):
        from spmd.inspection import report

        f = report(f, *args, mesh=mesh, **kwargs)
    elif args or kwargs or mesh is not None:
        raise refusal(
            "takes no arguments and no mesh with a Report",
            subject=subject,
            got=", ".join([f"{len(args)} arguments"] * bool(args) + [f"{k}=" for k in kwargs])
            or "mesh=",
            fix="give the Report alone, or the function instead of it",
            error=ArgumentError,
        )
    _refuse_one_device(f, subject)
    return f


def _refuse_one_device(report: Report, subject: str) -> None:
    """Sees that a program is not on one device where a mesh of several is active.

    It exchanges nothing, so it keeps every limit on collectives, and says nothing about the mesh.
    """
    # A stored report is held to its limits without JAX, and then no mesh is active.
    if report.num_devices > 1 or "spmd._mesh" not in sys.modules:
        return
    from spmd._mesh import current_mesh, show_mesh

    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return
    kept = ", where no limit can be broken" * (subject == SUBJECT)
    failure = Failure(
        what=f"finds that `{report.name}` uses one device{kept}",
        given=f"{show_mesh(mesh)}, which is active here",
        expected=f"a program for its {mesh.size} devices",
        got="a program in which no argument and no constraint has a sharding on the mesh",
        fix="spmd.pjit(f, specs), jax.jit(f, in_shardings=...) or arguments with shardings; "
        "leave the mesh if one device is meant",
    )
    raise AssertionError(str(explain(subject, [failure])))


# Places


def _read_within(within: Any) -> dict[str | None, Budget]:
    if within is None:
        return {}
    if not isinstance(within, Mapping) or not all(
        isinstance(place, str) and isinstance(given, Mapping) for place, given in within.items()
    ):
        raise refusal(
            "cannot read within",
            given=f"{within!r}"[:200],
            expected="a dict of limits by place: {'loop': {'none': ['all-gather']}}",
            error=ArgumentError,
        )
    return {place: read_budget(given, f"within[{place!r}] ") for place, given in within.items()}


def _broken(report: Report, budgets: Mapping[str | None, Budget]) -> Iterator[tuple]:
    if report.unread:
        yield None, Violation(f"all limits: not known to be kept, {report.unread}", ())
    for place, budget in budgets.items():
        found = report.collectives if place is None else _part(report, place, budget)
        # Over an axis of size 1 some backends keep an exchange of a device with itself.
        part = tuple(one for one in found if one.group_size > 1)
        for violation in _budgets.violations(part, budget):
            yield place, violation


def _part(report: Report, place: str, budget: Budget) -> tuple[Collective, ...]:
    part = tuple(share for one in report.collectives for share in _shares_in(one, place))
    if part or place in _PLACES or budget.empty_ok:
        return part
    known = sorted({name for one in report.collectives for name in _places(one)})
    shown = ", ".join(map(repr, (*_PLACES, *known[:_MOST_SHOWN])))
    raise refusal(
        f"finds no collective within {place!r}{did_you_mean(place, (*_PLACES, *known))}",
        expected=f"a place where `{report.name}` has collectives: {shown}",
        fix=f"if it is meant to have none, write within={{{place!r}: {{..., 'empty_ok': True}}}}",
    )


def _shares_in(one: Collective, place: str) -> list[Collective]:
    """What of a collective is in a place: of what was combined, those parts that are."""
    if place == "loop":
        return [one] * one.in_loop
    if found := shares(one, lambda part: _is_in(part, place)).get(True):
        return [found]
    # A psum that the user wrote is in its own place, too, and its parts where their data come from.
    as_written = dataclasses.replace(one, parts=())
    written = all(map(is_written, stacks(as_written)))
    return [one] * (bool(one.parts) and written and _is_in(as_written, place))


def _is_in(one: Collective, place: str) -> bool:
    if place in _PLACES:
        # What the compiler combined can be of both passes at once.
        others = map(direction_of, stacks(one)) if one.combined > 1 else ()
        return place in {one.direction, *others}
    frames = (*one.frames, one.source) if one.source else one.frames
    return (
        _in_file(one.source, place)
        # A qualified name is `Block.attend` or `loss.<locals>.body`.
        or any(f".{frame.function}".endswith(f".{place}") for frame in frames)
        or any(f"/{place}/" in f"/{'/'.join(components(s))}/" for s in stacks(one))
    )


def _in_file(source: Source | None, place: str) -> bool:
    file, colon, line = place.rpartition(":")
    if source is None or (colon and line.isdigit() and int(line) != source.line):
        return False
    file = file if colon and line.isdigit() else place
    return f"/{source.file}".replace("\\", "/").endswith("/" + file.lstrip("/"))


def _places(one: Collective) -> Iterator[str]:
    for source in filter(None, (part.source for part in one.parts or (one,))):
        yield Path(source.file.replace("\\", "/")).name
        yield source.function.rpartition(".")[2]
    for stack in stacks(one):
        yield from components(stack)


# Text


def _tell(report: Report, broken: list[tuple[str | None, Violation]]) -> str:
    limits = "a limit" if len(broken) == 1 else f"{len(broken)} limits"
    mesh = ", ".join(f"{name}={size}" for name, size in report.mesh.items())
    target = f"{f'mesh {mesh}' if mesh else 'no mesh'}; {words.show_backend(report)}"
    lines = [f"`{report.name}` breaks {limits} on its collectives ({target})."]
    for number, (place, (text, found)) in enumerate(broken, start=1):
        where = "" if place is None else f"within {place!r}: "
        lines += [f"{number}. {where}{text}", *_rows(found)]
    count = len(report.collectives)
    if any(len(found) == count for _, (_, found) in broken):
        return "\n".join(lines)
    if count > _MOST_SHOWN:
        lines.append(f"The program has {count} collectives; print(report) lists them.")
    else:
        lines.append("All collectives of the program, most bytes first:")
        lines += _rows(report.collectives)
    return "\n".join(lines)


def _rows(found: tuple[Collective, ...]) -> list[str]:
    # What is unknown may be the most.
    ordered = sorted(
        found, key=lambda one: (one.executions is None, words.ranking(one)), reverse=True
    )
    rows = [f"     {show(one)}" for one in ordered[:_MOST_SHOWN]]
    more = len(ordered) - len(rows)
    return [*rows, f"     ... and {more} more"] if more else rows


def show(one: Collective) -> str:
    """One collective in a line: kind, axes, bytes, runs, place."""
    axes = ", ".join(one.mesh_axes) or f"{one.group_size} devices"
    marks = [one.direction] * (one.direction != "other")
    marks += ["in a loop"] * one.in_loop + ["in a branch"] * one.conditional
    about = f" [{', '.join(marks)}]" if marks else ""
    return (
        f"{one.kind} over {axes}: payload {show_bytes(one.payload_bytes)}, wire {_wire(one)}, "
        f"{_where(one)}{about}"
    )


def _wire(one: Collective) -> str:
    each = show_bytes(one.wire_bytes)
    if one.executions is None:
        return f"{each} x unknown runs"
    if one.executions == 1:
        return f"{each}, 1 run"
    return f"{each} x {one.executions:,} runs = {show_bytes(one.total_wire_bytes or 0)}"


def _where(one: Collective) -> str:
    if one.source is None:
        return f"at an unknown line ({one.op_name or one.name or 'no name'})"
    function = f" ({one.source.function})" if one.source.function else ""
    used = "used " if one.source_is_consumer else ""
    more = len(shares(one, line_of)) - 1
    others = f" and {more} more line{'s' * (more > 1)}" if more else ""
    return f"{used}at {words.show_place(one.source)}{function}{others}"
