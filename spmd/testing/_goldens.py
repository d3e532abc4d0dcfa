"""Goldens: what a program exchanges, in a text file that a later run is compared with.

A row of the file is a group of equal exchanges. It holds what a person decides about (kind, axes,
shapes, bytes, runs, place in the model) and nothing that a compiler changes on the way: no order,
no names of instructions, no line numbers, not whether it is asynchronous, and what the compiler has
combined into one exchange is taken apart again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
import dataclasses
import itertools
import os
from pathlib import Path
import re
import sys
from typing import Any

from spmd.inspection.records.diff import matched
from spmd.inspection.records.names import direction_of, joined, place, short_path, stacks
from spmd.inspection.records.report import Collective, Report, Shape
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.show.words import show_backend
from spmd.testing._assertions import as_report
from spmd.testing._budgets import refusal

# pytest shows the user's line and the message, and no frame of this file.
__tracebackhide__ = True

SUBJECT = "assert_golden"
_TITLE = (
    "# spmd golden, version 1: collectives per device and call, one row per group of equal ones"
)
_COLUMNS = "# kind | axes | shapes | payload | runs | how many | direction | place"
#: What a difference of a fact means.
_NOTES = {
    "backend": "; rows of two backends cannot agree: keep a golden for each",
    "jax": "; places are not compared",
}

#: Exchanges of several arrays at once that could as well be several exchanges.
_SPLITTABLE = (
    "all-reduce", "all-gather", "reduce-scatter", "collective-permute", "collective-broadcast",
)  # fmt: skip

#: Rows in one part of a message.
_MOST_SHOWN = 40


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """What one test run does with goldens.

    Attributes:
        update: whether files are written instead of compared.
        texts: what was to be written so far, by path.
        updated: the files that changed by it.
    """

    update: bool = False
    texts: dict[Path, str] = dataclasses.field(default_factory=dict)
    updated: list[Path] = dataclasses.field(default_factory=list)


#: The plugin pushes its own; a test run can be inside of another one.
sessions = [Session()]


def assert_golden(
    f: Any,
    path: str | os.PathLike[str],
    /,
    *args: Any,
    mesh: Any = None,
    update: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Asserts that a program exchanges what it did when its golden file was written.

    Kinds, mesh axes, shapes, payload bytes, runs and numbers have to be equal. So does the place
    (direction and name stack, without numbers of layers), with two exceptions. Exchanges that the
    compiler combined may have kept the place of one of them only. And where the file was written
    with another release of JAX, places are not compared: releases name operations differently.

    Args:
        f: what `spmd.report` takes, or a `Report`.
        path: of the file, relative to the folder of the file that calls this; a mere name stands
            for ``goldens/<name>.ledger``.
        args: arguments of `f`.
        mesh: the mesh to compile for; by default the one that is active here.
        update: write the file instead; by default only where pytest runs with ``--spmd-update``.
        kwargs: keyword arguments of `f`.

    Returns:
        The report, for further assertions.

    Raises:
        AssertionError: the program differs, or there is no such file; the message shows the rows.
            Also where text of the program was not understood (`Report.unread`).
        ValueError: the file is no golden, or another test has just written it otherwise.

    Example:
        assert_golden(step, "train_step", params, batch)
    """
    where = _locate(Path(path), sys._getframe(1).f_code.co_filename)
    report = as_report(f, args, mesh, kwargs, subject=SUBJECT)
    if report.unread:  # neither a golden nor a comparison would tell what the program exchanges
        raise AssertionError(f"The exchanges of `{report.name}` are not known: {report.unread}")
    if sessions[-1].update if update is None else update:
        _write(where, golden_text(report))
    elif not where.is_file():
        raise AssertionError(_missing(report, where))
    elif told := _compare(report, where):
        raise AssertionError(told)
    return report


def _locate(path: Path, caller: str) -> Path:
    if len(path.parts) == 1 and path.suffix != ".ledger":
        path = Path("goldens", f"{path}.ledger")
    # The code of a notebook or of a prompt is in no folder.
    folder = Path(caller).parent if Path(caller).is_file() else Path.cwd()
    return Path(os.path.abspath(folder / path))


def golden_text(report: Report) -> str:
    """The text of the golden file of a report.

    Args:
        report: any report.

    Returns:
        Lines of a header and a line for each group of equal exchanges, sorted.
    """
    facts = [f"# {name}: {value}" for name, value in _facts(report).items()]
    rows = sorted(
        f"{row.kind} | {row.axes} | {row.shapes} | {row.payload_bytes} B | {row.runs} | x{count}"
        f" | {row.direction} | {'~ ' * row.combined}{row.place}"
        for row, count in rows_of(report).items()
    )
    return "\n".join([_TITLE, f"# function: {report.name}", *facts, _COLUMNS, *rows]) + "\n"


def _facts(report: Report) -> dict[str, str]:
    mesh = ", ".join(f"{name}={size}" for name, size in report.mesh.items()) or "none"
    jax = report.versions.get("jax", "unknown")
    return {"mesh": mesh, "backend": show_backend(report), "jax": jax}


# Rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An exchange, without what a compiler changes on the way.

    Attributes:
        kind: of the collective.
        axes: that it crosses, joined; the number of devices where it crosses none.
        shapes: before and after.
        payload_bytes: per device and execution.
        runs: how often it runs, in words.
        direction: forward, backward or other.
        place: the name stack without numbers of layers.
        combined: whether the compiler combined it with others and kept the place of some only.
    """

    kind: str
    axes: str
    shapes: str
    payload_bytes: int
    runs: str
    direction: str
    place: str
    combined: bool

    def without_place(self) -> Row:
        """What stays when the compiler names the operation otherwise."""
        return dataclasses.replace(self, direction="", place="", combined=False)


def rows_of(report: Report) -> Counter[Row]:
    """How many of each row a report has.

    What stays within one device, over an axis of size 1, is no exchange: not every backend has it.
    """
    found = (one for one in report.collectives if one.group_size > 1)
    return Counter(row for one in found for row in _rows(one))


def _rows(one: Collective) -> Iterator[Row]:
    parts, names = _arrays(one), stacks(one)
    each_named = _has_every_name(one, len(parts))
    if len(names) != len(parts):
        names = [names[0]] * len(parts)
    for (operands, results), name in zip(parts, names, strict=True):
        yield Row(
            kind=one.kind,
            axes=_cell(", ".join(one.mesh_axes)) or f"{one.group_size} devices",
            shapes=f"{_join(operands)} -> {_join(results)}",
            payload_bytes=max(sum(s.nbytes for s in side) for side in (operands, results)),
            runs=_runs(one),
            direction=direction_of(name) if one.combined > 1 else one.direction,
            place=_cell(place(name)),
            combined=not each_named,
        )


def _has_every_name(one: Collective, count: int) -> bool:
    """Whether the compiler named every array; else it kept a name of some, and others are found."""
    if one.combined == 1:
        return count == 1
    same = bool(one.parts) and {*stacks(one)} == {one.op_name}
    return count > 1 and (len(joined(one.op_name)) == count or same)


def _arrays(one: Collective) -> list[tuple[tuple[Shape, ...], tuple[Shape, ...]]]:
    operands, results = one.shapes
    if one.kind in _SPLITTABLE and len(operands) == len(results):
        return [((operand,), (result,)) for operand, result in zip(*one.shapes, strict=True)]
    return [(operands, results)]


def _join(shapes: Iterable[Shape]) -> str:
    runs = [(text, len([*same])) for text, same in itertools.groupby(map(str, shapes))]
    return " ".join(text if n == 1 else f"{n}*{text}" for text, n in runs) or "nothing"


def _runs(one: Collective) -> str:
    branch = " in a branch" if one.conditional else ""
    if one.executions is None:
        return f"unknown runs{branch}"
    return f"{one.executions} run{'s' * (one.executions != 1)}{branch}"


def _cell(text: str) -> str:
    """Text that cannot be taken for the end of a cell or of a line."""
    return " ".join(text.replace("|", "\N{BROKEN BAR}").split())


# Files


_ROW = re.compile(
    r"(?P<kind>[\w\-]+) \| (?P<axes>[^|]+) \| (?P<shapes>[^|]+) \| (?P<payload_bytes>\d+) B"
    r" \| (?P<runs>[^|]+) \| x(?P<count>\d+) \| (?P<direction>\w+)"
    r" \| (?P<combined>~ )?(?P<place>.+)"
)


def _read(path: Path) -> tuple[dict[str, str], Counter[Row]]:
    """The facts and the rows of a golden file; another file is an error."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or lines[0] != _TITLE:
        raise _unreadable(path, 1, lines[0] if lines else "", _TITLE)
    facts: dict[str, str] = {}
    rows: Counter[Row] = Counter()
    for number, line in enumerate(lines[1:], start=2):
        if line.startswith("#"):
            name, _, value = line[2:].partition(": ")
            facts[name] = value
        elif line.strip():
            row, count = _parse(line, path, number)
            rows[row] += count
    return facts, rows


def _parse(line: str, path: Path, number: int) -> tuple[Row, int]:
    found = _ROW.fullmatch(line.rstrip())
    if not found:
        raise _unreadable(path, number, line, _COLUMNS.removeprefix("# "))
    cells = found.groupdict()
    combined, count = cells.pop("combined") is not None, int(cells.pop("count"))
    payload = int(cells.pop("payload_bytes"))
    return Row(**cells, payload_bytes=payload, combined=combined), count


def _unreadable(path: Path, number: int, line: str, expected: str) -> Exception:
    return refusal(
        f"cannot read {short_path(str(path))}, line {number}",
        subject=SUBJECT,
        given=line[:200] or "nothing",
        expected=expected,
        fix="write it again with pytest --spmd-update",
    )


def _write(path: Path, text: str) -> None:
    session = sessions[-1]
    if session.texts.setdefault(path, text) != text:
        raise refusal(
            f"has written {short_path(str(path))} otherwise a moment ago",
            subject=SUBJECT,
            expected="a file of its own for each golden",
            fix="give one of the two another name",
        )
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        # Another worker of the same run may read or write here: no one sees half a file.
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(text, encoding="utf-8", newline="\n")
        draft.replace(path)
        session.updated.append(path)


# Comparison


def _compare(report: Report, path: Path) -> str:
    """Says how a report differs from a golden file; an empty string where it does not."""
    then, golden = _read(path)
    now, rows = _facts(report), rows_of(report)
    told = [fact for fact in now if then.get(fact) != now[fact]]
    missing, extra = _unmatched(golden, rows, any_place="jax" in told)
    if not missing and not extra and set(told) <= {"jax"}:
        return ""
    lines = [f"`{report.name}` does not exchange what its golden {short_path(str(path))} says."]
    for fact in told:
        both = f"golden {then.get(fact, 'unknown')}, now {now[fact]}"
        lines.append(f"  {fact:<8} {both}{_NOTES.get(fact, '')}")
    lines += _section("only now", "+", extra, golden, rows)
    lines += _section("only in the golden", "-", missing, golden, rows)
    if missing or extra:
        sums = f"golden {_sum(golden)}, now {_sum(rows)}"
        lines.append(f"payload of all rows, per device: {sums}")
    return "\n".join([*lines, "If this is meant: pytest --spmd-update, and review the file."])


def _unmatched(
    then: Counter[Row], now: Counter[Row], *, any_place: bool
) -> tuple[Counter[Row], Counter[Row]]:
    """Rows of either side that none of the other side stands for."""
    missing, extra = [*(then - now).elements()], [*(now - then).elements()]

    def exact(old: Row) -> Row | None:
        return None if old.combined else old.without_place()

    def movable(new: Row) -> Row | None:
        return new.without_place() if any_place or new.combined else None

    def combined(old: Row) -> Row | None:
        return old.without_place() if old.combined else None

    # A combined row can stand for any place: those that need one are served first.
    keys = [(exact, movable), (combined, Row.without_place)]
    _, left_missing, left_extra = matched(missing, extra, keys)
    return Counter(missing[i] for i in left_missing), Counter(extra[j] for j in left_extra)


def _section(
    title: str, sign: str, rows: Counter[Row], then: Counter[Row], now: Counter[Row]
) -> list[str]:
    if not rows:
        return []
    lines = [f"{title}:"]
    for row, count in sorted(rows.items(), key=lambda item: _show_row(item[0]))[:_MOST_SHOWN]:
        times = f" ({count} times)" if count > 1 else ""
        if then[row] and now[row]:
            times = f" ({then[row]} in the golden, {now[row]} now)"
        lines.append(f"  {sign} {_show_row(row)}{times}")
    more = len(rows) - _MOST_SHOWN
    return [*lines, f"  ... and {more} more rows"] if more > 0 else lines


def _show_row(row: Row) -> str:
    about = f"{row.place}, combined with others" if row.combined else row.place
    return (
        f"{row.kind} over {row.axes}: {row.shapes}, payload {show_bytes(row.payload_bytes)}, "
        f"{row.runs}, {row.direction}, at {about}"
    )


def _sum(rows: Counter[Row]) -> str:
    total, unknown = 0, False
    for row, count in rows.items():
        runs = row.runs.partition(" ")[0]
        unknown |= not runs.isdigit()
        total += row.payload_bytes * count * (int(runs) if runs.isdigit() else 0)
    return "at least " * unknown + show_bytes(total)


def _missing(report: Report, path: Path) -> str:
    rows = rows_of(report)
    lines = _section("it would hold", "+", rows, Counter(), rows) or ["it would hold no rows"]
    first = f"`{report.name}` has no golden {short_path(str(path))}."
    return "\n".join([first, *lines, "Write it with pytest --spmd-update, and commit it."])
