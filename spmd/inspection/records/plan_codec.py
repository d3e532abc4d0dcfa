"""A plan as JSON, and back: lossless, versioned, and told in `inspection/plan.schema.json`.

The report of the compiled program stands inside as `codec` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import os
from pathlib import Path
from typing import Any

from spmd.errors import Failure, ReportError, explain
from spmd.inspection.records import codec
from spmd.inspection.records.later import Later, known
from spmd.inspection.records.plan import Candidate, Inside, Placed, Plan
from spmd.inspection.records.report import Report
from spmd.inspection.records.time import Time

SCHEMA = "spmd-plan/1"
_FIX = "pass what plan.save() writes"


# Writing


def encode(plan: Plan, *, force: bool) -> dict[str, Any]:
    """A plan as JSON values; `force` works out the constraints in the source, if need be."""
    inside = plan.inside and (plan.inside.get() if force else plan.inside.peek())
    special = {
        Candidate: _encode_candidate,
        Later: lambda _: codec.values(inside),
        Report: codec.encode,
    }
    data = {"schema": SCHEMA, **codec.values(plan, special)}
    return data | {"axes": codec.encode_mesh(plan.axes)}


def _encode_candidate(one: Candidate) -> dict[str, Any]:
    orders = [{"axis": axis, "classes": [*names]} for axis, names in one.orders.items()]
    data = codec.values(one, {Time: codec.encode_time})
    return data | {"axes": codec.encode_mesh(one.axes), "orders": orders}


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan to a file, as `Plan.save` says."""
    if codec.is_page(path, "plan", f"plan of `{plan.name}`"):
        Path(path).write_text(plan.to_html(), encoding="utf-8")
    else:
        save_json(plan, path)


def save_json(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan to a file, with the constraints in the source."""
    codec.write(encode(plan, force=True), Path(path))


# Reading


def load(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan from a file, as `Plan.load` says."""
    return decode(codec.read(path, "plan.save()"), subject=f"file `{path}`")


def decode(data: Any, *, subject: str) -> Plan:
    """Makes a plan of JSON values; `subject` begins an error."""
    if failure := codec.other_version(data, SCHEMA, _fix(data)):
        raise explain(subject, [failure])
    reader = _Reader(data)
    plan = reader.read(Plan, data, "")
    failures = reader.failures or [*_misfits(plan)]
    if failures:
        raise explain(subject, failures)
    return plan


def _fix(data: Any) -> str:
    is_report = isinstance(data, Mapping) and codec.other_version(data) is None
    return "spmd.Report.load(...) reads it: it is a report" if is_report else _FIX


class _Reader(codec.Reader):
    """Reads a plan, and the report inside of it."""

    def __init__(self, data: Mapping[str, Any]):
        report = data.get("report")
        super().__init__(report if isinstance(report, Mapping) else {}, "report")

    def _report(self, hint: Any, value: Any, path: str) -> Any:
        if value is not None and (failure := codec.other_version(value)):
            return self.wrong(path, failure.expected, value)
        return self.read(hint, value, path)

    def _inside(self, hint: Any, value: Any, path: str) -> Later[Inside] | None:
        inside = None if value is None else self.read(Inside, value, path)
        return None if inside is None else known(inside)

    def _orders(self, hint: Any, value: Any, path: str) -> dict | None:
        if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
            return self.wrong(path, "an array of objects", value)
        if not all(isinstance(one.get("axis"), str) for one in value):
            return self.wrong(path, "an array of objects with an axis and classes", value)
        classes = ((one["axis"], one.get("classes")) for one in value)
        return {
            axis: self.read(tuple[str, ...], names, f"{path}.{axis}") for axis, names in classes
        }

    SPECIAL: Mapping[tuple[type, str], Callable[..., Any]] = {
        **codec.Reader.SPECIAL,
        (Plan, "axes"): codec.Reader.mesh,
        (Plan, "report"): _report,
        (Plan, "inside"): _inside,
        (Candidate, "axes"): codec.Reader.mesh,
        (Candidate, "orders"): _orders,
    }


def _misfits(plan: Plan) -> Iterator[Failure]:
    """What no plan is, though every value has the right type."""
    if not plan.candidates:
        yield _wrong("candidates", "at least one candidate: the chosen one", "none")
    for where, arrays in (("arguments", plan.arguments), ("results", plan.results)):
        yield from _misplaced(where, arrays, plan.axes)


def _misplaced(where: str, arrays: Sequence[Placed], axes: Mapping[str, int]) -> Iterator[Failure]:
    for i, one in enumerate(arrays):
        place, named = f"{where}[{i}].spec", [axis for entry in one.spec for axis in entry]
        if len(one.spec) != len(one.shape):
            expected = f"an entry for each of the {len(one.shape)} dimensions of {one.name}"
            yield _wrong(place, expected, f"{len(one.spec)} entries")
        if foreign := [axis for axis in named if axis not in axes]:
            yield _wrong(place, f"axes of the mesh: {', '.join(axes) or 'none'}", foreign[0])
        elif len({*named}) < len(named):
            yield _wrong(place, "each axis once", ", ".join(named))


def _wrong(place: str, expected: str, got: str) -> Failure:
    what = f"has a wrong value in {place}"
    return Failure(what=what, expected=expected, got=got, error=ReportError)
