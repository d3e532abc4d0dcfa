"""Budgets on the collectives of a program: read from what a user wrote, held against records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
from typing import Any, NamedTuple

from spmd.errors import ArgumentError, Failure, OptionError, SpmdError, did_you_mean, explain
from spmd.inspection.records.report import KINDS, Collective
from spmd.inspection.records.sizes import parse_bytes, show_bytes

# pytest shows the user's line and the message, and no frame of this file.
__tracebackhide__ = True

SUBJECT = "assert_collectives"


def refusal(
    what: str, *, subject: str = SUBJECT, error: type[SpmdError] = OptionError, **told: str
) -> SpmdError:
    """The error that an assertion was given something which it cannot take."""
    return explain(subject, [Failure(what=what, error=error, **told)])


# Keys


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a limit is on.

    Attributes:
        text: as the user wrote it.
        kind: the kind of collective; None for all.
        axis: the mesh axis that it crosses, wholly or in part; None for any or none.
    """

    text: str
    kind: str | None
    axis: str | None

    def matches(self, one: Collective) -> bool:
        """Whether the limit is on this collective."""
        kind_matches = self.kind in (None, one.kind)
        return kind_matches and (self.axis is None or self.axis in one.axis_names)

    def __str__(self) -> str:
        kind = "all collectives" if self.kind is None else self.kind
        return kind if self.axis is None else f"{kind} over {self.axis}"


def _key(text: Any, option: str, *, bare_axis: bool) -> Key:
    if not isinstance(text, str):
        axis = "a mesh axis, " if bare_axis else ""
        forms = f"a kind such as 'all-gather', {axis}both as 'all-gather@model', or '*'"
        raise refusal(f"cannot read {text!r} in {option}", expected=forms, error=ArgumentError)
    kind, at, axis = text.partition("@")
    if kind == "*" or kind in KINDS:
        return Key(text=text, kind=None if kind == "*" else kind, axis=axis if at else None)
    if bare_axis and not at:
        return Key(text=text, kind=None, axis=text)
    raise refusal(
        f"knows no collective {kind!r}{did_you_mean(kind, KINDS)}",
        given=f"{option} has {text!r}",
        expected=f"one of {', '.join(KINDS)}, or '*' for all of them",
        fix="for all collectives over a mesh axis write '*@axis'",
    )


# Budgets


class Limit(NamedTuple):
    """The most bytes or runs that are allowed of one key, and what the user wrote for it."""

    key: Key
    most: int
    given: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """All limits on one part of a ledger.

    Attributes:
        none: what must not occur.
        only: what alone may occur; None for no such limit.
        max_bytes: on bytes that a device sends in one call.
        max_count: on executions in one call.
        empty_ok: whether the part may be empty.
    """

    none: tuple[Key, ...] = ()
    only: tuple[Key, ...] | None = None
    max_bytes: tuple[Limit, ...] = ()
    max_count: tuple[Limit, ...] = ()
    empty_ok: bool = False

    def all_keys(self) -> tuple[Key, ...]:
        """Every key that a limit is on."""
        limits = (*self.max_bytes, *self.max_count)
        return (*self.none, *(self.only or ()), *(limit.key for limit in limits))


def read_budget(options: Mapping[str, Any], where: str = "") -> Budget:
    """Reads the limits on one part of a ledger, by option.

    An error says `where` before an option's name, such as ``"within['loop'] "``.
    """
    known = [field.name for field in dataclasses.fields(Budget)]
    for name in options:
        if name not in known:
            what = f"knows no option {name!r} of {where.strip()}{did_you_mean(name, known)}"
            raise refusal(what, expected=f"some of {', '.join(known)}")
    only = options.get("only")
    return Budget(
        none=_keys(options.get("none", ()), f"{where}none"),
        only=None if only is None else _keys(only, f"{where}only"),
        max_bytes=_limits(options.get("max_bytes"), f"{where}max_bytes", _read_bytes),
        max_count=_limits(options.get("max_count"), f"{where}max_count", _read_count),
        empty_ok=bool(options.get("empty_ok")),
    )


def _keys(given: Any, option: str) -> tuple[Key, ...]:
    # A lone string would be read letter by letter.
    entries = (given,) if isinstance(given, str) else given
    if isinstance(entries, Mapping) or not isinstance(entries, Iterable):
        forms = "a list of kinds, such as ['all-gather']"
        raise refusal(f"cannot read {option} = {given!r}", expected=forms, error=ArgumentError)
    return tuple(_key(entry, option, bare_axis=False) for entry in entries)


def _limits(given: Any, option: str, read: Any) -> tuple[Limit, ...]:
    if given is None:
        return ()
    entries = given if isinstance(given, Mapping) else {"*": given}
    return tuple(
        Limit(key=_key(key, option, bare_axis=True), most=read(most, option), given=most)
        for key, most in entries.items()
    )


def _read_bytes(given: Any, option: str) -> int:
    try:
        return parse_bytes(given)
    except ValueError as error:
        raise refusal(f"cannot read {option} = {given!r}", expected=str(error)) from None


def _read_count(given: Any, option: str) -> int:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    raise refusal(f"cannot read {option} = {given!r}", expected="a whole number of runs")


def check_axes(budgets: Iterable[Budget], mesh: Mapping[str, int]) -> None:
    """Refuses keys on axes that the mesh does not have, all in one error."""
    axes = {
        key.axis: key for budget in budgets for key in budget.all_keys() if key.axis is not None
    }
    shown = ", ".join(map(repr, mesh)) or "none: the program has no mesh"
    failures = [
        Failure(
            what=f"knows no mesh axis {axis!r}{did_you_mean(axis, (*mesh, *KINDS))}",
            given=f"a limit on {key.text!r}",
            expected=f"an axis of the program's mesh, {shown}; or a kind of collective",
            error=OptionError,
        )
        for axis, key in axes.items()
        if axis not in mesh
    ]
    if failures:
        raise explain(SUBJECT, failures)


# Violations


class Violation(NamedTuple):
    """Which limit a program breaks, and by how much; and what breaks it."""

    text: str
    collectives: tuple[Collective, ...]


def violations(found: Iterable[Collective], budget: Budget) -> Iterator[Violation]:
    """Limits of a budget that a part of a ledger breaks, in the order of `Budget`."""
    found = tuple(found)

    def matching(key: Key) -> tuple[Collective, ...]:
        return tuple(one for one in found if key.matches(one))

    for key in budget.none:
        if broken := matching(key):
            yield Violation(f"none, {key}: allowed 0, found {len(broken)}", broken)
    if budget.only is not None:
        others = tuple(one for one in found if not any(key.matches(one) for key in budget.only))
        if others:
            allowed = ", ".join(map(str, budget.only)) or "nothing"
            text = f"only: allowed {allowed}; found {len(others)} of something else"
            yield Violation(text, others)
    for limit in budget.max_bytes:
        given = f" ({limit.given})" if isinstance(limit.given, str) else ""
        allowed = f"max_bytes, {limit.key}: allowed {limit.most:,} bytes{given} per device and call"
        each, shown = (lambda one: one.wire_bytes), (lambda n: f"{n:,} ({show_bytes(n)})")
        yield from _exceeded(matching(limit.key), limit.most, each, shown, allowed)
    for limit in budget.max_count:
        runs = f"{limit.most:,} run{'s' * (limit.most != 1)}"
        allowed = f"max_count, {limit.key}: allowed {runs} per call"
        each, shown = (lambda one: 1), (lambda n: f"{n:,}")
        yield from _exceeded(matching(limit.key), limit.most, each, shown, allowed)


def _exceeded(
    found: tuple[Collective, ...],
    most: int,
    each: Callable[[Collective], int],
    show: Callable[[int], str],
    allowed: str,
) -> Iterator[Violation]:
    """Says that a sum over all executions is too large, or that it cannot be known."""
    # Nothing, however often, is nothing.
    unknown = tuple(one for one in found if one.executions is None and each(one))
    total = sum((one.executions or 0) * each(one) for one in found)
    if total > most:
        at_least = "at least " if unknown else ""
        text = f"{allowed}, found {at_least}{show(total)}, {total - most:,} too many"
        yield Violation(text, found)
    elif unknown:
        text = (
            f"{allowed}, found an unknown number: {len(unknown)} of {len(found)} in a loop without "
            f"a known trip count; all others together {show(total)}"
        )
        yield Violation(text, unknown)
