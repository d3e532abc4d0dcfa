"""Two reports side by side: what one has and the other has not, and how much each costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any, TypeAlias

from spmd.errors import ArgumentError, Failure, explain
from spmd.inspection.records import codec
from spmd.inspection.records.report import Collective, Memory, Report, Reshard, Total
from spmd.inspection.records.shown import Paged

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

    Args:
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

    Args:
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

    Args:
        name: of the figure, such as ``peak``.
        a: in the first report; None where that has no such figure.
        b: in the second.
    """

    name: str
    a: int | None
    b: int | None

    @property
    def change(self) -> int | None:
        """How much more the second has; None where one of them is not known."""
        return None if self.a is None or self.b is None else self.b - self.a


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TotalDelta:
    """The same sum over the collectives of two reports.

    Args:
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

    Args:
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

    Args:
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

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.removed)

    def __repr__(self) -> str:
        counts = (f"{len(self.changed)} changed", f"{len(self.added)} added")
        return (
            f"<Diff of {self.names[0]} and {self.names[1]}: {', '.join(counts)}, "
            f"{len(self.removed)} removed collectives>"
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
        slim = {
            name: tuple(map(_without_frames, getattr(self, name)))
            for name in ("unchanged", "changed", "added", "removed")
        }
        data = codec.values(dataclasses.replace(self, **slim))
        for pair, record in zip(data["changed"], self.changed, strict=True):
            pair["changes"] = list(record.changes)
        return {"schema": SCHEMA, "different": bool(self), **data}


def _without_frames(one: Pair | Collective) -> Pair | Collective:
    if isinstance(one, Collective):
        return codec.without_frames(one)
    return Pair(a=codec.without_frames(one.a), b=codec.without_frames(one.b))


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
        totals=_totals(first, second),
        cost=_cost(first, second),
        memory=_memory(first.memory, second.memory),
        reshards_added=tuple(r for r in second.reshards if r not in moved_a),
        reshards_removed=tuple(r for r in first.reshards if r not in moved_b),
        modules=_modules(first, second),
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
    names = tuple(
        os.fspath(given) if isinstance(given, (str, os.PathLike)) else report.name
        for given, report in ((a, first), (b, second))
    )
    if names[0] == names[1]:
        return f"{names[0]} (a)", f"{names[1]} (b)"
    return names[0], names[1]


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
    }
    for name in sorted(a.versions.keys() | b.versions.keys()):
        properties[name] = lambda report, name=name: report.versions.get(name, "none")
    for what, of in properties.items():
        if of(a) != of(b):
            yield Difference(what=what, a=str(of(a)), b=str(of(b)))


def _totals(a: Report, b: Report) -> tuple[TotalDelta, ...]:
    sums_a, sums_b = a.totals("kind", "axis"), b.totals("kind", "axis")
    zero = Total.zeros()
    deltas = (
        TotalDelta(kind=k[0], mesh_axes=k[1], a=sums_a.get(k, zero), b=sums_b.get(k, zero))
        for k in sorted(sums_a.keys() | sums_b.keys())
    )
    return tuple(sorted(deltas, key=lambda d: -abs(d.b.wire_bytes - d.a.wire_bytes)))


def _modules(a: Report, b: Report) -> tuple[ModuleDelta, ...]:
    sums_a, sums_b = a.totals("module"), b.totals("module")
    zero = Total.zeros()
    deltas = (
        ModuleDelta(module=name, a=sums_a.get(name, zero), b=sums_b.get(name, zero))
        for name in sorted(sums_a.keys() | sums_b.keys())
    )
    return tuple(sorted(deltas, key=lambda d: -abs(d.b.wire_bytes - d.a.wire_bytes)))


def _cost(a: Report, b: Report) -> tuple[Delta, ...]:
    if a.predicted or b.predicted:  # nothing is known of what was not compiled
        return ()
    return tuple(_deltas(a.cost, b.cost, _fields(a.cost)))


def _memory(a: Memory | None, b: Memory | None) -> tuple[Delta, ...]:
    names = [name for name in _fields(a or b) if name not in ("buffers", "places", "live")]
    return tuple(_deltas(a, b, names))


def _fields(record: Any) -> tuple[str, ...]:
    return () if record is None else tuple(field.name for field in dataclasses.fields(record))


def _deltas(a: object, b: object, names: Iterable[str]) -> Iterator[Delta]:
    for name in names:
        yield Delta(name=name, a=getattr(a, name, None), b=getattr(b, name, None))


# Matching

Collectives: TypeAlias = tuple[Collective, ...]


def match(a: Collectives, b: Collectives) -> tuple[tuple[Pair, ...], Collectives, Collectives]:
    """Pairs collectives that correspond to each other, each with one other at most.

    Args:
        a: of one program, in program order.
        b: of another one.

    Returns:
        Pairs in the order of `a`, what only `a` has, and what only `b` has.
    """
    partners: dict[int, int] = {}
    left_a, left_b = list(range(len(a))), list(range(len(b)))
    for key in _KEYS:
        found = dict(_paired(a, b, left_a, left_b, key))
        partners |= found
        taken = set(found.values())
        left_a = [i for i in left_a if i not in found]
        left_b = [j for j in left_b if j not in taken]
    pairs = tuple(Pair(a=a[i], b=b[partners[i]]) for i in sorted(partners))
    return pairs, tuple(a[i] for i in left_a), tuple(b[j] for j in left_b)


def _paired(
    a: Collectives,
    b: Collectives,
    left_a: list[int],
    left_b: list[int],
    key: Callable[[Collective], object],
) -> Iterator[tuple[int, int]]:
    """Places of equal key, the first of one program with the first of the other, and so on."""
    waiting: dict[object, list[int]] = {}
    for j in reversed(left_b):
        waiting.setdefault(key(b[j]), []).append(j)
    for i in left_a:
        if places := waiting.get(key(a[i])):
            yield i, places.pop()


def _raw_path(one: Collective) -> str:
    return one.op_name


# JAX's own wrappers come and go between its releases; so do numbers that make a name unique.
_WRAPPER = re.compile(r"(?<![^/:])(?:p?jit\([^/:]*\)|closed_call|core_call)(?:/|$)")
_NUMBER = re.compile(r"[._]?\d+(?=$|[/:)])")


def plain_path(one: Collective) -> str:
    """The name-stack path without jitted functions and without numbers at the ends of names."""
    return _NUMBER.sub("", _WRAPPER.sub("", one.op_name))


def _figures(one: Collective) -> tuple[object, ...]:
    return tuple(getattr(one, name) for name in COMPARED)


def _key(
    path: Callable[[Collective], str], rest: Callable[[Collective], object]
) -> Callable[[Collective], object]:
    return lambda one: (one.kind, one.mesh_axes, one.direction, path(one), rest(one))


# From the strictest to the loosest; what a stricter one has paired, a looser one leaves alone.
_KEYS = tuple(
    _key(path, rest)
    for path in (_raw_path, plain_path)
    for rest in (_figures, lambda one: one.shapes, lambda one: None)
)
