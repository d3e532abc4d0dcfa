"""Two reports side by side: what one has and the other has not, and how much each costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import os
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from spmd.errors import ArgumentError, Failure, explain
from spmd.inspection.records import codec
from spmd.inspection.records.names import plain_path
from spmd.inspection.records.report import Collective, Report, Reshard, Total
from spmd.inspection.records.shown import Paged
from spmd.inspection.records.time import Time

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "spmd-diff/1"

#: What makes two collectives that correspond to each other different; lines and names do not.
COMPARED = (
    "shapes",
    "payload_bytes",
    "wire_bytes",
    "executions",
    "group_size",
    "conditional",
    "is_async",
    "combined",
)

Reportlike: TypeAlias = Report | Mapping[str, Any] | str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A property of two reports that is not the same, such as a version.

    Attributes:
        what: its name.
        a: its value in the first report, as text.
        b: its value in the second.
    """

    what: str
    a: str
    b: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two collectives that correspond to each other.

    Attributes:
        a: of the first report.
        b: of the second.
    """

    a: Collective
    b: Collective

    @property
    def changes(self) -> tuple[str, ...]:
        """Names of the fields that differ, of those that are compared."""
        return tuple(name for name in COMPARED if getattr(self.a, name) != getattr(self.b, name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One figure in two reports.

    Attributes:
        name: of the figure, such as ``peak``.
        a: in the first report; None where that has no such figure.
        b: in the second.
    """

    name: str
    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        """How much more the second has; None where one of them is not known."""
        return None if self.a is None or self.b is None else self.b - self.a


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TotalDelta:
    """The same sum over the collectives of two reports.

    Attributes:
        kind: of the collectives.
        mesh_axes: that they cross.
        a: in the first report.
        b: in the second.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    a: Total
    b: Total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDelta:
    """The same sum over what a module of two reports exchanges.

    Attributes:
        module: scopes of the name stack, numbers of layers as ``*``; empty for what is in no scope.
        a: in the first report.
        b: in the second.
    """

    module: str
    a: Total
    b: Total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diff(Paged):
    """How two reports differ; true where their collectives do.

    Attributes:
        names: what the two reports are called, such as the names of their files.
        meshes: of the two.
        header: properties of the whole that differ: backend, mesh, versions and the like.
        unchanged: collectives that are the same in both.
        changed: collectives that correspond to each other and differ.
        added: collectives of the second report only.
        removed: collectives of the first report only.
        total: the sums over all collectives, of the first and of the second.
        totals: by kind and mesh axes, the largest difference in wire bytes first.
        cost: FLOPs and bytes of main memory; empty where a report is predicted.
        memory: by class; empty where neither report has it.
        reshards_added: arguments that only the second moves first, or moves otherwise.
        reshards_removed: the same of the first.
        modules: sums by module, the largest difference in wire bytes first.
        time: seconds of a call and of its parts, and shares of the peak; empty where neither report
            has a time.
    """

    names: tuple[str, str]
    meshes: tuple[Mapping[str, int], Mapping[str, int]]
    header: tuple[Difference, ...]
    unchanged: tuple[Pair, ...]
    changed: tuple[Pair, ...]
    added: tuple[Collective, ...]
    removed: tuple[Collective, ...]
    total: tuple[Total, Total]
    totals: tuple[TotalDelta, ...]
    cost: tuple[Delta, ...]
    memory: tuple[Delta, ...]
    reshards_added: tuple[Reshard, ...]
    reshards_removed: tuple[Reshard, ...]
    modules: tuple[ModuleDelta, ...] = ()
    time: tuple[Delta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.removed)

    def __repr__(self) -> str:
        return (
            f"<Diff of {self.names[0]} and {self.names[1]}: {len(self.changed)} changed, "
            f"{len(self.added)} added, {len(self.removed)} removed collectives>"
        )

    def show(self, console: Console | None = None, *, limit: int | None = 40) -> None:
        """Prints the differences in colour, as wide as the terminal is.

        Args:
            console: a console of rich; None for one on the standard output.
            limit: the most collectives to list; None for all.
        """
        self._print(console, limit=limit)

    def to_json(self) -> dict[str, Any]:
        """The differences as JSON values, under the names of the fields of the records.

        Returns:
            A dictionary for `json.dumps` with schema ``spmd-diff/1``. Collectives are as in a
            report, without stack frames; ``different`` is what `bool` of this says.
        """
        data = codec.values(self, {Collective: codec.without_frames})
        for pair, record in zip(data["changed"], self.changed, strict=True):
            pair["changes"] = list(record.changes)
        return {"schema": SCHEMA, "different": bool(self), **data}


def diff(a: Reportlike, b: Reportlike) -> Diff:
    """Compares two reports: of two configurations, commits, or releases of JAX.

    Collectives correspond to each other if they have the same kind, mesh axes, direction and
    name-stack path, whatever their lines; among several, those of equal shapes and figures. Where
    paths differ by numbers or by the names of jitted functions, they are compared without these.

    Args:
        a: a report, what its `to_json` gave, or the path of a file that its `save` wrote.
        b: another one.

    Returns:
        The differences; true where the collectives differ.

    Raises:
        ReportError: a file or dictionary is no report.
        ArgumentError: an argument is something else.
        OSError: a file cannot be read.

    Example:
        print(spmd.diff("before.json", compiled.report()))
    """
    first, second = _report(a, "a"), _report(b, "b")
    pairs, removed, added = match(first.collectives, second.collectives)
    moved_a, moved_b = set(first.reshards), set(second.reshards)
    return Diff(
        names=_names(a, b, first, second),
        meshes=(first.mesh, second.mesh),
        header=tuple(_header(first, second)),
        unchanged=tuple(pair for pair in pairs if not pair.changes),
        changed=tuple(pair for pair in pairs if pair.changes),
        added=added,
        removed=removed,
        total=(first.total, second.total),
        totals=tuple(
            TotalDelta(kind=kind, mesh_axes=axes, a=x, b=y)
            for (kind, axes), x, y in _sums(first, second, "kind", "axis")
        ),
        # Nothing is known of the cost of what was not compiled.
        cost=() if first.predicted or second.predicted else _deltas(first.cost, second.cost),
        memory=_deltas(first.memory, second.memory),
        reshards_added=tuple(r for r in second.reshards if r not in moved_a),
        reshards_removed=tuple(r for r in first.reshards if r not in moved_b),
        modules=tuple(
            ModuleDelta(module=name, a=x, b=y) for name, x, y in _sums(first, second, "module")
        ),
        time=_times(first.time, second.time),
    )


def _report(given: Reportlike, name: str) -> Report:
    subject = f"argument {name} of `diff`"
    match given:
        case Report():
            return given
        case Mapping():
            return codec.decode(given, subject=subject)
        case str() | os.PathLike():
            return codec.load(given)
    failure = Failure(
        what="is no report",
        expected="a Report, the path of a file that report.save() wrote, or report.to_json()",
        got=f"a value of type {type(given).__name__}",
        error=ArgumentError,
    )
    raise explain(subject, [failure])


def _names(a: Reportlike, b: Reportlike, first: Report, second: Report) -> tuple[str, str]:
    x, y = (
        os.fspath(given) if isinstance(given, (str, os.PathLike)) else report.name
        for given, report in ((a, first), (b, second))
    )
    return (f"{x} (a)", f"{y} (b)") if x == y else (x, y)


def _header(a: Report, b: Report) -> Iterator[Difference]:
    properties: dict[str, Callable[[Report], object]] = {
        "function": lambda report: report.name,
        "backend": lambda report: report.backend,
        "device kind": lambda report: report.device_kind,
        "stand-in": lambda report: "yes" if report.stand_in else "no",
        "predicted": lambda report: "yes" if report.predicted else "no",
        "not understood": lambda report: report.unread or "none",
        "mesh": lambda report: ", ".join(f"{k}={n}" for k, n in report.mesh.items()) or "none",
        "devices": lambda report: report.num_devices,
        "chip": lambda report: report.time.chip if report.time else "none",
        "time from": lambda report: report.time.source if report.time else "nothing",
    }
    for name in sorted(a.versions.keys() | b.versions.keys()):
        properties[name] = lambda report, name=name: report.versions.get(name, "none")
    for what, of in properties.items():
        if of(a) != of(b):
            yield Difference(what=what, a=str(of(a)), b=str(of(b)))


def _sums(a: Report, b: Report, *by: str) -> list[tuple[Any, Total, Total]]:
    """Totals of both by a property, the largest difference in wire bytes first."""
    sums_a, sums_b, zero = a.totals(*by), b.totals(*by), Total.zeros()
    keys = sorted(sums_a.keys() | sums_b.keys())
    rows = [(key, sums_a.get(key, zero), sums_b.get(key, zero)) for key in keys]
    return sorted(rows, key=lambda row: -abs(row[2].wire_bytes - row[1].wire_bytes))


def _deltas(a: Any, b: Any) -> tuple[Delta, ...]:
    """The figures of two records, either of which may be missing."""
    fields = dataclasses.fields(a or b) if a or b else ()
    names = [f.name for f in fields if f.name not in ("buffers", "places", "live")]
    return tuple(Delta(name=n, a=getattr(a, n, None), b=getattr(b, n, None)) for n in names)


def _times(a: Time | None, b: Time | None) -> tuple[Delta, ...]:
    """The figures of two times; what one has not is 0 of the other's, and nothing without it."""
    if a is None and b is None:
        return ()
    names = ("seconds", "compute", "memory", "exchange")
    deltas = [Delta(name=n, a=getattr(a, n, None), b=getattr(b, n, None)) for n in names]
    waits = [one.exposed_by_axes if one else None for one in (a, b)]
    for axes in dict.fromkeys(axes for found in waits for axes in found or ()):
        sides = [None if found is None else found.get(axes, 0.0) for found in waits]
        deltas.append(Delta(name=f"exposed over {', '.join(axes)}", a=sides[0], b=sides[1]))
    deltas += [Delta(name=n, a=getattr(a, n, None), b=getattr(b, n, None)) for n in ("mfu", "hfu")]
    return tuple(deltas)


# Matching

Collectives: TypeAlias = tuple[Collective, ...]
_T = TypeVar("_T")
_Key: TypeAlias = Callable[[_T], object]


def match(a: Collectives, b: Collectives) -> tuple[tuple[Pair, ...], Collectives, Collectives]:
    """Pairs collectives of two programs that correspond to each other, in the order of `a`.

    What only `a` has and what only `b` has comes with them.
    """
    partners, left_a, left_b = matched(a, b, [(key, key) for key in _KEYS])
    pairs = tuple(Pair(a=a[i], b=b[partners[i]]) for i in sorted(partners))
    return pairs, tuple(a[i] for i in left_a), tuple(b[j] for j in left_b)


def matched(
    a: Sequence[_T], b: Sequence[_T], keys: Iterable[tuple[_Key[_T], _Key[_T]]]
) -> tuple[dict[int, int], list[int], list[int]]:
    """Pairs places of equal key, the first of one side with the first of the other, and so on.

    Of each pair of keys, one is of `a` and one of `b`; None has no equal. What a stricter key has
    paired, a looser one leaves alone. What is left of `a` and of `b` comes with the pairs.
    """
    partners: dict[int, int] = {}
    left_a, left_b = [*range(len(a))], [*range(len(b))]
    for of_a, of_b in keys:
        waiting: dict[object, list[int]] = {}
        for j in reversed(left_b):
            waiting.setdefault(of_b(b[j]), []).append(j)
        for i in left_a:
            key = of_a(a[i])
            if key is not None and waiting.get(key):
                partners[i] = waiting[key].pop()
        taken = {*partners.values()}
        left_a = [i for i in left_a if i not in partners]
        left_b = [j for j in left_b if j not in taken]
    return partners, left_a, left_b


# From the strictest to the loosest.
_KEYS: list[_Key[Collective]] = [
    lambda one, path=path, rest=rest: (
        one.kind,
        one.mesh_axes,
        one.direction,
        path(one.op_name),
        *(getattr(one, name) for name in rest),
    )
    for path in (str, plain_path)
    for rest in (COMPARED, ("shapes",), ())
]
