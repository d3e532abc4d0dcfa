"""A report as JSON, and back: lossless, versioned, and told in `inspection/report.schema.json`.

The stack frames that collectives share stand once in a table, whose indices a collective holds; so
do the lines, annotations and steps that origins of shardings share.
Derived figures are written for readers in other languages and ignored here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
import re
import types
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from spmd.errors import Failure, ReportError, explain
from spmd.inspection.records.later import Later, known
from spmd.inspection.records.origins import Annotation, Origins, Step
from spmd.inspection.records.report import Collective, Part, Report, Source
from spmd.inspection.records.time import Time

SCHEMA = "spmd-report/1"
_T = TypeVar("_T")


# Writing


def encode(report: Report) -> dict[str, Any]:
    """A report as JSON values, as `Report.to_json` says."""
    frames = _Table[Source]()
    special = {
        Collective: functools.partial(_encode_collective, frames=frames),
        Time: encode_time,
    }
    data = {"schema": SCHEMA, **values(report, special)}
    data["mesh"] = encode_mesh(report.mesh)
    data["origins"] = _encode_origins(report.origins, frames)
    data["frames"] = values(tuple(frames))
    data["totals"] = _encode_totals(report)
    return data


def encode_mesh(mesh: Mapping[str, int]) -> list[dict[str, Any]]:
    """Axes of a mesh in their order, which not every reader of JSON keeps in an object."""
    return [{"axis": name, "size": size} for name, size in mesh.items()]


_Special: TypeAlias = Mapping[type, Callable[[Any], Any]]


def values(value: Any, special: _Special = types.MappingProxyType({})) -> Any:
    """JSON values of a record, and of all that it holds; `special` has those of some types."""
    if type(value) in special:
        return special[type(value)](value)
    if dataclasses.is_dataclass(value):
        return _fields(value, special)
    if isinstance(value, Mapping):
        return {key: values(inner, special) for key, inner in value.items()}
    if hasattr(value, "_asdict"):
        return values(value._asdict(), special)
    return [values(one, special) for one in value] if isinstance(value, tuple) else value


def _fields(record: Any, special: _Special) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(record))
    return {name: values(getattr(record, name), special) for name in names if name[0] != "_"}


class _Table(dict[_T, int]):
    """The index of each record, in the order in which they were asked for."""

    def __missing__(self, key: _T) -> int:
        return self.setdefault(key, len(self))


def without_frames(one: Collective) -> dict[str, Any]:
    """The JSON values of a collective whose stacks, and those of its parts, are left out."""
    parts = tuple(dataclasses.replace(part, frames=()) for part in one.parts)
    return values(dataclasses.replace(one, frames=(), parts=parts))


def _encode_collective(one: Collective, frames: _Table[Source]) -> dict[str, Any]:
    data = without_frames(one)
    data["frames"] = [frames[frame] for frame in one.frames]
    for part, encoded in zip(one.parts, data["parts"], strict=True):
        encoded["frames"] = [frames[frame] for frame in part.frames]
    data["total_payload_bytes"] = one.total_payload_bytes
    data["total_wire_bytes"] = one.total_wire_bytes
    return data


def encode_time(one: Time) -> dict[str, Any]:
    """A time, with the figures that follow from it."""
    derived = {"exchange": one.exchange, "exposed": values(one.exposed), "bound": one.bound}
    return {**values(one), **derived}


#: Records of origins that stand in tables of their own: by table, in the order of reading.
_SHARED = {"annotations": Annotation, "steps": Step}


def _encode_origins(origins: Origins, frames: _Table[Source]) -> dict[str, Any]:
    tables: dict[type, _Table[Any]] = {record: _Table() for record in _SHARED.values()}
    indices = {one: table.__getitem__ for one, table in (*tables.items(), (Source, frames))}
    data = values(origins, indices)
    for name, record in _SHARED.items():
        data[name] = [_fields(one, indices) for one in tables[record]]
    return data


def _encode_totals(report: Report) -> dict[str, Any]:
    data: dict[str, Any] = {"all": values(report.total)}
    for by in (("kind",), ("axis",), ("kind", "axis"), ("line",), ("module",), ("direction",)):
        names = ["mesh_axes" if key == "axis" else key for key in by]
        sums = (
            (key if len(by) > 1 else (key,), total) for key, total in report.totals(*by).items()
        )
        data["_and_".join(names)] = [
            {**dict(zip(names, values(key), strict=True)), **values(total)} for key, total in sums
        ]
    return data


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes a report to a file, as `Report.save` says."""
    if is_page(path, "report", f"report of `{report.name}`"):
        Path(path).write_text(report.to_html(), encoding="utf-8")
    else:
        write(encode(report), Path(path))


def is_page(path: str | os.PathLike[str], noun: str, subject: str) -> bool:
    """Whether a file is to be a page, by its ending; an error where it is to be neither."""
    path = Path(path)
    if (suffix := path.suffix.lower()) in (".json", ".html"):
        return suffix == ".html"
    near = ".html" if "htm" in suffix else ".json"
    failure = Failure(
        what=f"cannot be saved as `{path}`",
        expected="a file name that ends in .json or .html",
        got=f"the ending {path.suffix!r}" if path.suffix else "a name without an ending",
        fix=f"{noun}.save({str(path.with_suffix(near))!r})" if path.name else "",
        error=ReportError,
    )
    raise explain(subject, [failure])


def write(data: Mapping[str, Any], path: Path) -> None:
    """Writes JSON values to a file, a line for each element of a list: such files compare well."""
    path.write_text(_entries(data, "{\n", "\n}\n"), encoding="utf-8")


def _entries(data: Mapping[str, Any], start: str, end: str) -> str:
    lines = (f"{json.dumps(key)}: {_lines(value)}" for key, value in data.items())
    return start + ",\n".join(lines) + end


#: What objects have whose lists get lines: origins, and the report of a plan.
_HAVE_LINES = {"values", "collectives"}


def _lines(value: Any) -> str:
    if isinstance(value, dict) and _HAVE_LINES & value.keys():
        return _entries(value, "{", "}")
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"


# Reading


def load(path: str | os.PathLike[str]) -> Report:
    """Reads a report from a file, as `Report.load` says."""
    return decode(read(path), subject=f"file `{path}`")


def read(path: str | os.PathLike[str], writer: str = "report.save()") -> Any:
    """The JSON values in a file; an error where it cannot be read, or holds none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:  # not UTF-8, or not JSON, or no report's
        failure = Failure(
            what="holds no JSON",
            expected=f"a file that {writer} wrote",
            got=str(e),
            error=ReportError,
        )
        raise explain(f"file `{path}`", [failure]) from None


def decode(data: Any, *, subject: str = "argument of `Report.from_json`") -> Report:
    """Makes a report of JSON values, as `Report.from_json` says; `subject` begins an error."""
    if failure := other_version(data):
        raise explain(subject, [failure])
    reader = Reader(data)
    report = reader.read(Report, data, "")
    if reader.failures:
        raise explain(subject, reader.failures)
    return report


_FIX = "pass what report.to_json() gives or report.save() writes"


def other_version(data: Any, schema: str = SCHEMA, fix: str = _FIX) -> Failure | None:
    """Why values are of no file of a kind and version, such as ``spmd-report/1``; None if so."""
    is_object = isinstance(data, Mapping)
    given = data.get("schema") if is_object else None
    if given == schema:
        return None
    kind = schema.partition("/")[0]
    noun = kind.removeprefix("spmd-")
    expected, got = f"schema {schema!r}", f"schema {given!r}"
    if not isinstance(given, str) or not re.fullmatch(rf"{kind}/\d+", given):
        got = got if given is not None else "an object without a schema"
        return Failure(
            what=f"is no {noun}",
            expected=f"a JSON object with {expected}",
            got=got if is_object else f"a value of type {type(data).__name__}",
            fix=fix,
            error=ReportError,
        )
    versions = data.get("versions")
    writer = versions.get("spmd") if isinstance(versions, Mapping) else None
    return Failure(
        what=f"is a {noun} of a version that this spmd does not read",
        expected=expected,
        got=got + (f", written by spmd {writer}" if writer else ""),
        fix=f"install the version of spmd that wrote it, or write the {noun} anew",
        error=ReportError,
    )


_get_hints = functools.cache(get_type_hints)


@functools.cache
def _defaults(record: type) -> frozenset[str]:
    """Fields that a file may lack: those that came later have a default."""
    if not dataclasses.is_dataclass(record):
        return frozenset()
    missing = dataclasses.MISSING
    return frozenset(
        f.name
        for f in dataclasses.fields(record)
        if f.default is not missing or f.default_factory is not missing
    )


class Reader:
    """Reads values by the types of the records, and collects everything that is wrong."""

    def __init__(self, data: Mapping[str, Any], at: str = ""):
        self.failures: list[Failure] = []
        place = f"{at}.frames".lstrip(".")
        self.frames = self.read(tuple[Source, ...], data.get("frames", []), place) or ()

    def read(self, hint: Any, value: Any, path: str) -> Any:
        """The value as a field of type `hint` holds it; None where it is wrong."""
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is tuple:
            return self._items(arguments[0], value, path)
        if origin is not None and issubclass(origin, Mapping):
            return self._mapping(arguments[1], value, path)
        if types.NoneType in arguments:
            return None if value is None else self.read(arguments[0], value, path)
        if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
            return self._record(hint, value, path)
        if hint is float and type(value) is int:
            return float(value)  # JSON has one kind of number
        # A bool is an int to Python and not to JSON.
        right = isinstance(value, hint) and isinstance(value, bool) == (hint is bool)
        # Python reads NaN and infinities, which JSON has none of.
        right = right and (hint is not float or math.isfinite(value))
        return value if right else self.wrong(path, _JSON_NAMES[hint], value)

    def _items(self, hint: Any, value: Any, path: str) -> tuple | None:
        if not isinstance(value, list):
            return self.wrong(path, "an array", value)
        return tuple(self.read(hint, item, f"{path}[{i}]") for i, item in enumerate(value))

    def _mapping(self, hint: Any, value: Any, path: str) -> dict | None:
        if not isinstance(value, Mapping):
            return self.wrong(path, "an object", value)
        return {key: self.read(hint, item, f"{path}.{key}") for key, item in value.items()}

    def _record(self, record: Any, value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            return self.wrong(path, "an object", value)
        fields, complete = {}, True
        for name, hint in _get_hints(record).items():
            key = name.lstrip("_")
            place = f"{path}.{key}".lstrip(".")
            if key in value:
                read = self.SPECIAL.get((record, key), Reader.read)
                fields[name] = read(self, hint, value[key], place)
            elif name not in _defaults(record):
                complete = False
                self.failures.append(Failure(what=f"misses the key {place}", error=ReportError))
        return record(**fields) if complete else None

    def mesh(self, hint: Any, value: Any, path: str) -> dict | None:
        """Axes as `encode_mesh` writes them."""
        if not isinstance(value, list) or not all(isinstance(a, Mapping) for a in value):
            return self.wrong(path, "an array of objects", value)
        if not all(isinstance(axis.get("axis"), str) for axis in value):
            return self.wrong(path, "an array of objects with an axis and a size", value)
        sizes = ((axis["axis"], axis.get("size")) for axis in value)
        return {name: self.read(int, size, f"{path}.{name}") for name, size in sizes}

    def _frames(self, hint: Any, value: Any, path: str) -> tuple | None:
        indices = self._items(int, value, path) or ()
        known = [i for i in indices if i is not None and 0 <= i < len(self.frames)]
        if len(known) < len(indices):
            return self.wrong(path, f"indices into the {len(self.frames)} frames", value)
        return tuple(self.frames[i] for i in known)

    def _origins(self, hint: Any, value: Any, path: str) -> Later[Origins] | None:
        reader = _OriginsReader(self, value, path)
        origins = reader.read(Origins, value, path)
        return None if origins is None else known(origins)

    def wrong(self, path: str, expected: str, value: Any) -> None:
        """Keeps in mind that a value is wrong."""
        got = json.dumps(value, default=repr)
        got = got if len(got) <= 60 else f"{got[:57]}..."
        what = f"has a wrong value in {path or 'its root'}"
        self.failures.append(Failure(what=what, expected=expected, got=got, error=ReportError))

    SPECIAL: Mapping[tuple[type, str], Callable[..., Any]] = {
        (Report, "mesh"): mesh,
        (Report, "origins"): _origins,
        (Collective, "frames"): _frames,
        (Part, "frames"): _frames,
    }


class _OriginsReader(Reader):
    """Reads origins, in which an index stands for each record that others share."""

    def __init__(self, whole: Reader, data: Any, path: str):
        self.failures = whole.failures
        self.tables: dict[Any, tuple[Any, ...]] = {Source: whole.frames}
        for name, record in _SHARED.items():
            rows = data.get(name, []) if isinstance(data, Mapping) else []
            place = f"{path}.{name}"
            if not isinstance(rows, list):
                self.wrong(place, "an array", rows)
                rows = []
            # A row refers to those of the tables before its own.
            read = (self._record(record, row, f"{place}[{i}]") for i, row in enumerate(rows))
            self.tables[record] = tuple(read)

    def read(self, hint: Any, value: Any, path: str) -> Any:
        table = self.tables.get(hint)
        if table is None:
            return super().read(hint, value, path)
        if type(value) is not int or not 0 <= value < len(table):
            return self.wrong(path, f"an index below {len(table)}", value)
        return table[value]


_JSON_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
