"""Where the sharding of a value comes from: which annotations reached it, and which did not.

Everything is read from what Shardy's propagation records: the sharding of each value, the origin of
each axis, and the steps by which it travelled. Only conflicts are worked out here; `Conflict` says
what counts as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePath
import re
from typing import Any

from spmd.errors import ArgumentError, Failure, ReportError, did_you_mean, explain, show_value
from spmd.inspection.compile.program import COMPILED, check_lowered, entered, lower, stage_of
from spmd.inspection.records.names import user_source
from spmd.inspection.records.origins import (
    Annotation,
    Conflict,
    Origin,
    Step,
    ValueOrigins,
    Why,
)
from spmd.inspection.shardy import conflicts, passes
from spmd.inspection.shardy.propagation import Mark, Propagation, Value, propagate
from spmd.inspection.shardy.routes import Route, route_of


def why(f: Any, name: str, /, *args: Any, mesh: Any = None, **kwargs: Any) -> Why:
    """Say which annotations the sharding of a value comes from, and through which operations.

    Nothing is compiled or run. It is the sharding that propagation chooses; where operands of one
    operation still differ, the partitioner reshards them later, as `preview` shows.

    Args:
        f: a function of `spmd.pjit` or `jax.jit`, or what one of them was traced or lowered to.
        name: the path of an argument or output, such as ``batch['x']`` or ``out['loss']`` (outputs
            are called ``result['loss']`` in errors, which does too), the beginning of a path, or
            a line such as ``model.py:42`` for all arrays that are made there.
        *args: what the function is called with; none for a stage.
        mesh: the mesh to lower for; by default the current one or the function's own.
        **kwargs: keyword arguments of the call.

    Returns:
        The values of that name, with the origin of each axis, and with conflicts.

    Raises:
        ReportError: nothing has that name, or this jaxlib lacks the passes of Shardy.
        TypeError: `f` cannot be lowered, or is compiled already; `name` is no string.
        RuntimeError: the program is for another mesh.
    """
    subject = "why"
    if not isinstance(name, str):
        raise explain(subject, [_no_name(name)])
    f = stage_of(f)
    if isinstance(f, COMPILED):
        raise explain(subject, [_compiled(f)])
    with entered(mesh):
        lowered = lower(f, args, kwargs, subject=subject, verb="why")
    module = passes.module_of(lowered, subject=subject)
    check_lowered(lowered, passes.count_devices(module), mesh, subject=subject)
    found = propagate(module, subject=subject)
    return Why(
        name=name,
        function=function_of(module),
        mesh=found.axis_sizes,
        values=tuple(describe(found, i) for i in _named(found, name, subject)),
    )


def _no_name(name: Any) -> Failure:
    return Failure(
        what="takes the name of a value as a string",
        expected="a path such as \"out['loss']\", or a line such as 'model.py:42'",
        got=show_value(name),
        error=ArgumentError,
    )


def _compiled(f: Any) -> Failure:
    return Failure(
        what="cannot read propagation out of a compiled program",
        got=f"{type(f).__module__}.{type(f).__name__}",
        expected="a function with its arguments, or what it was lowered to",
        fix="lowered = f.lower(*args); lowered.why(name); compiled = lowered.compile()",
        error=ReportError,
    )


def function_of(module: Any) -> str:
    """The name of the function that a module was lowered from."""
    name = passes.text_of(module.operation, "sym_name").strip('"')
    name = re.sub("^(p?jit|pmap)_", "", name)
    return "<lambda>" if name.strip("_") == "lambda" else name


# Names

_LINE = re.compile(r"(.+):(\d+)")
_OUT = re.compile(r"^out(?=\W|$)")
_MOST_NAMES = 12


def _named(found: Propagation, name: str, subject: str) -> list[int]:
    """The values that a name means.

    Raises:
        ReportError: there are none.
    """
    paths = [i for i, value in enumerate(found.values) if value.kind != "result"]
    for spelling in dict.fromkeys((name, _OUT.sub("result", name))):
        exact = [i for i in paths if found.values[i].name == spelling]
        if matches := exact or [i for i in paths if _is_below(found.values[i].name, spelling)]:
            return matches
    if line := _LINE.fullmatch(name):
        if matches := [*_made_at(found, line[1], int(line[2]))]:
            return matches
        raise explain(subject, [_no_line(found, name, line[1])])
    raise explain(subject, [_no_value(found, name)])


def _is_below(path: str, prefix: str) -> bool:
    return bool(prefix) and path.startswith(prefix) and path[len(prefix)] in "[."


def _made_at(found: Propagation, file: str, line: int) -> Iterator[int]:
    for i, value in enumerate(found.values):
        source = user_source(value.frames)
        if is_made(value) and source and source.line == line and _ends(source.file, file):
            yield i


def is_made(value: Value) -> bool:
    """Whether a value is an array that a line makes: no argument, output, constant or scalar."""
    result = value.kind == "result" and value.plain and value.name != "constant"
    return result and bool(value.shape)


def _ends(file: str, suffix: str) -> bool:
    parts, wanted = PurePath(file).parts, PurePath(suffix).parts
    return parts[-len(wanted) :] == wanted


def _no_value(found: Propagation, name: str) -> Failure:
    names = [value.name for value in found.values if value.kind != "result"]
    shown = ", ".join(names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    near = did_you_mean(_OUT.sub("result", name), names)
    others = f", or one of {shown}{more}" if names else ""
    return Failure(
        what=f"knows no value {name!r}{near}",
        expected=f"a line such as 'model.py:42'{others}",
        error=ReportError,
    )


def _no_line(found: Propagation, name: str, file: str) -> Failure:
    sources = {user_source(value.frames) for value in found.values if is_made(value)}
    known = sorted({(PurePath(s.file).name, s.line) for s in sources if s and _ends(s.file, file)})
    files = sorted({PurePath(s.file).name for s in sources if s})
    shown = [f"{where}:{line}" for where, line in known]
    more = " and more" if len(shown) > _MOST_NAMES else ""
    expected = f"a line of {', '.join(files[:_MOST_NAMES])}"
    if shown:
        expected = "one of " + ", ".join(shown[:_MOST_NAMES]) + more
    elif not files:
        expected = "the path of an argument or output: no line of this program makes an array"
    return Failure(
        what=f"knows no array that {name} makes",
        expected=expected,
        error=ReportError,
    )


# Records


def describe(found: Propagation, i: int) -> ValueOrigins:
    """The record of a value, by its index."""
    value = found.values[i]
    return ValueOrigins(
        kind=value.kind,
        name=value.name,
        shape=value.shape,
        dtype=value.dtype,
        spec=value.axes,
        source=user_source(value.frames),
        annotation=annotation_of(value.mark),
        origins=tuple(_origins(found, i)),
        conflicts=tuple(_conflict(found, one) for one in conflicts.conflicts(found, i)),
    )


def annotation_of(mark: Mark | None) -> Annotation | None:
    """The record of an annotation."""
    if mark is None:
        return None
    spec = tuple(dimension.axes for dimension in mark.dimensions)
    return Annotation(kind=mark.kind, name=mark.name, source=user_source(mark.frames), spec=spec)


def _origins(found: Propagation, i: int) -> Iterable[Origin]:
    for d, axes in enumerate(found.values[i].axes):
        for axis in axes:
            route = route_of(found, i, axis)
            yield Origin(
                axis=axis,
                dimension=d,
                annotation=annotation_of(route.mark),
                priority=_priority(route.mark, axis),
                steps=tuple(_steps(found, route, axis)),
            )


def _priority(mark: Mark | None, axis: str) -> int | None:
    dimensions = mark.dimensions if mark else ()
    return next((d.priority for d in dimensions if axis in d.axes), None)


def _steps(found: Propagation, route: Route, axis: str) -> Iterator[Step]:
    for hop in route.hops:
        link, target = found.links[hop.link], found.values[hop.target]
        yield Step(
            operation=link.name,
            source=user_source(link.frames),
            way=_way(hop.source, hop.target, link.values, link.operands),
            value=_label(target),
            shape=target.shape,
            dimension=_dimension(target, axis),
        )


def _way(source: int, target: int, values: tuple[int, ...], operands: int) -> str:
    if target in values[operands:]:
        return "forward"
    return "backward" if source in values[operands:] else "sideways"


def _dimension(value: Value, axis: str) -> int:
    found = (d for d, axes in enumerate(value.axes) if axis in axes)
    # Only a part of the axis may have stayed.
    name = axis.partition(":")[0]
    near = (
        d for d, axes in enumerate(value.axes) if any(a.partition(":")[0] == name for a in axes)
    )
    return next(found, next(near, 0))


def _label(value: Value) -> str:
    return value.name or "a value"


def _conflict(found: Propagation, one: conflicts.Stop) -> Conflict:
    link = found.links[one.link]
    return Conflict(
        axis=one.axis,
        dimension=one.dimension,
        operation=link.name,
        source=user_source(link.frames),
        at=_label(found.values[one.at]),
        reason=one.reason,
        lost=annotation_of(one.lost),
        won=annotation_of(one.won),
        against=annotation_of(one.against),
        kept=one.kept,
        distance=one.distance,
    )
