"""Where the sharding of a value comes from: which annotations reached it, and which did not.

Everything is read from what Shardy's propagation records: the sharding of each value, the origin of
each axis, and the steps by which it travelled. `why` answers for the values of a name, and a report
holds the origins of many.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
import functools
import itertools
import logging
import math
from pathlib import PurePath
import re
from typing import Any

from spmd.errors import ArgumentError, Failure, ReportError, did_you_mean, explain, show_value
from spmd.inspection.compile.program import COMPILED, check_lowered, entered, lower, stage_of
from spmd.inspection.records import later, origins
from spmd.inspection.records.names import user_source
from spmd.inspection.records.origins import Origins, ValueOrigins, Why
from spmd.inspection.records.report import Collective, axis_name
from spmd.inspection.records.sums import grouped, sum_of
from spmd.inspection.shardy import conflicts, passes
from spmd.inspection.shardy.propagation import Mark, Propagation, Value, propagate

logger = logging.getLogger(__name__)


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
        failure = Failure(
            what="takes the name of a value as a string",
            expected="a path such as \"out['loss']\", or a line such as 'model.py:42'",
            got=show_value(name),
            error=ArgumentError,
        )
        raise explain(subject, [failure])
    f = stage_of(f)
    if isinstance(f, COMPILED):
        failure = Failure(
            what="cannot read propagation out of a compiled program",
            got=f"{type(f).__module__}.{type(f).__name__}",
            expected="a function with its arguments, or what it was lowered to",
            fix="lowered = f.lower(*args); lowered.why(name); compiled = lowered.compile()",
            error=ReportError,
        )
        raise explain(subject, [failure])
    with entered(mesh):
        lowered = lower(f, args, kwargs, subject=subject, verb="why")
    module = passes.module_of(lowered, subject=subject)
    check_lowered(lowered, passes.count_devices(module), mesh, subject=subject)
    found = propagate(module, subject=subject)
    return Why(
        name=name,
        function=function_of(passes.name_of(module)),
        mesh=found.axis_sizes,
        values=tuple(describe(found, i) for i in _named(found, name, subject)),
    )


def function_of(module: str) -> str:
    """The name of the function that a module of some name was lowered from."""
    name = re.sub("^(p?jit|pmap)_", "", module)
    # XLA's names hold no angle brackets.
    return "<lambda>" if name.strip("_") == "lambda" else name


# Names

_LINE = re.compile(r"(.+):(\d+)")
_OUT = re.compile(r"^out(?=\W|$)")
_MOST_NAMES = 12


def _named(found: Propagation, name: str, subject: str) -> list[int]:
    """The values that a name means; an error where there are none."""
    paths = [i for i, value in enumerate(found.values) if value.kind != "result"]
    for spelling in dict.fromkeys((name, _OUT.sub("result", name))):
        below = (f"{spelling}[", f"{spelling}.") if spelling else ()
        exact = [i for i in paths if found.values[i].name == spelling]
        if matches := exact or [i for i in paths if found.values[i].name.startswith(below)]:
            return matches
    if line := _LINE.fullmatch(name):
        if matches := [*_made_at(found, line[1], int(line[2]))]:
            return matches
        raise explain(subject, [_no_line(found, name, line[1])])
    raise explain(subject, [_no_value(found, name)])


def _made_at(found: Propagation, file: str, line: int) -> Iterator[int]:
    for i, value in enumerate(found.values):
        source = user_source(value.frames)
        if is_made(value) and source and source.line == line and _ends(source.file, file):
            yield i


def is_made(value: Value) -> bool:
    """Whether a value is an array that a line makes: no argument, output, constant or scalar."""
    made = value.kind == "result" and value.plain and value.name != "constant"
    return made and bool(value.shape)


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
        annotation=_annotation(value.mark),
        origins=tuple(_origin(found, i, d, a) for d, axes in enumerate(value.axes) for a in axes),
        conflicts=tuple(_conflict(found, one) for one in conflicts.conflicts(found, i)),
    )


def _annotation(mark: Mark | None) -> origins.Annotation | None:
    if mark is None:
        return None
    return origins.Annotation(
        kind=mark.kind,
        name=mark.name,
        source=user_source(mark.frames),
        spec=tuple(dimension.axes for dimension in mark.dimensions),
    )


def _origin(found: Propagation, i: int, d: int, axis: str) -> origins.Origin:
    mark, hops = conflicts.route_of(found, i, axis)
    asked = mark.dimensions if mark else ()
    return origins.Origin(
        axis=axis,
        dimension=d,
        annotation=_annotation(mark),
        priority=next((one.priority for one in asked if axis in one.axes), None),
        steps=tuple(_step(found, hop, axis) for hop in hops),
    )


def _step(found: Propagation, hop: conflicts.Hop, axis: str) -> origins.Step:
    link, target = found.links[hop.link], found.values[hop.target]
    results = link.values[link.operands :]
    sideways = "backward" if hop.source in results else "sideways"
    return origins.Step(
        operation=link.name,
        source=user_source(link.frames),
        way="forward" if hop.target in results else sideways,
        value=_label(target),
        shape=target.shape,
        dimension=_dimension(target, axis),
    )


def _dimension(value: Value, axis: str) -> int:
    found = (d for d, axes in enumerate(value.axes) if axis in axes)
    # Only a part of the axis may have stayed.
    name = axis_name(axis)
    near = (d for d, axes in enumerate(value.axes) if name in map(axis_name, axes))
    return next(found, next(near, 0))


def _label(value: Value) -> str:
    return value.name or "a value"


def _conflict(found: Propagation, one: conflicts.Stop) -> origins.Conflict:
    link = found.links[one.link]
    return origins.Conflict(
        axis=one.axis,
        dimension=one.dimension,
        operation=link.name,
        source=user_source(link.frames),
        at=_label(found.values[one.at]),
        reason=one.reason,
        lost=_annotation(one.lost),
        won=_annotation(one.won),
        against=_annotation(one.against),
        kept=one.kept,
        distance=one.distance,
    )


# What a report holds
#
# Propagation with its steps and the search for conflicts take longer than a report may add to a
# compile, so a report keeps the lowered module until somebody asks, and lets it go then.

MOST = {"argument": 256, "output": 256, "result": 192}
"""The most values of a kind that a report lists."""
OF_A_LINE = 24
"""The most values that it lists of one line."""

_Line = tuple[str, int]


NOT_AT_HAND = (
    "What the program was lowered from is not at hand: report the function, or what lower() gave, "
    "and not what was compiled elsewhere or loaded."
)


def origins_later(
    lowered: Any, found: Sequence[Collective], *, subject: str
) -> later.Later[Origins]:
    """The origins of a report, for when somebody asks for them.

    `lowered` is the stage that the program was compiled from, or None where it is not at hand, and
    `found` are the collectives, whose lines count.
    """
    if lowered is None:
        return later.known(Origins(missing=NOT_AT_HAND))
    try:
        # Not the stage: it holds the arrays that a function closes over.
        module = passes.module_of(lowered, subject=subject)
    except Exception as error:
        return later.known(_unknown(error))
    return later.Later(functools.partial(_work_out, module, found, subject))


def _work_out(module: Any, found: Sequence[Collective], subject: str) -> Origins:
    try:
        if not passes.axis_sizes(module.operation):
            return Origins(missing="The program has no mesh, over which something is split.")
        return _listed(propagate(module, subject=subject), _lines(found))
    except Exception as error:
        return _unknown(error)


def _unknown(error: Exception) -> Origins:
    """What is said where there are none: whatever a program has that is not foreseen."""
    if isinstance(error, ReportError):
        # Lowered for another partitioner, or by a jaxlib without the passes.
        return Origins(missing=str(error).partition("\n")[0])
    logger.warning("report: nothing says where its shardings come from", exc_info=error)
    return Origins(missing="They could not be worked out; the log says why.")


def _lines(found: Sequence[Collective]) -> dict[_Line, frozenset[str]]:
    """The lines of collectives, most bytes first, with the operations that exchange there."""
    groups = grouped(found, lambda one: one.source and (one.source.file, one.source.line))
    groups.pop(None, None)
    ranked = sorted(groups, key=lambda line: -sum_of(groups[line]).wire_bytes)
    parts = {line: [part for one in groups[line] for part in one.parts or [one]] for line in ranked}
    return {
        line: frozenset(re.split(r"[/:()]", "/".join(part.op_name for part in of_line)))
        for line, of_line in parts.items()
    }


def _listed(found: Propagation, lines: Mapping[_Line, frozenset[str]]) -> Origins:
    # A constant that JAX passes as an argument has no name.
    arguments = [i for i, one in enumerate(found.values) if one.kind == "argument" and one.name]
    outputs = [i for i, value in enumerate(found.values) if value.kind == "output"]
    groups = _by_line(found, lines)
    made = [i for line in lines for i in groups[line][:OF_A_LINE]]
    shown = (arguments[: MOST["argument"]], outputs[: MOST["output"]], made[: MOST["result"]])
    indices = [*itertools.chain.from_iterable(shown)]
    count = len(arguments) + len(outputs) + sum(map(len, groups.values()))
    return Origins(values=tuple(describe(found, i) for i in indices), left_out=count - len(indices))


def _by_line(found: Propagation, lines: Mapping[_Line, frozenset[str]]) -> dict[_Line, list[int]]:
    """What each line makes, one of each kind, what exchanges first and then by size."""
    groups: dict[_Line, dict[Any, int]] = {line: {} for line in lines}
    for i, value in enumerate(found.values):
        source = user_source(value.frames)
        line = (source.file, source.line) if source else ("", 0)
        if line in groups and is_made(value):
            axes = tuple(sorted(value.origins.items()))
            sharding = value.axes, axes, id(value.mark), value.local
            groups[line].setdefault((value.name, value.shape, value.dtype, *sharding), i)
    return {
        line: sorted(group.values(), key=lambda i: _rank(found.values[i], lines[line]))
        for line, group in groups.items()
    }


def _rank(value: Value, exchanged: Container[str]) -> tuple[int, int]:
    primitive = value.op_name.rpartition("/")[2]
    # JAX writes a broadcast for each number that an array is added to or multiplied with.
    filler = value.name == "broadcast_in_dim" and primitive != "broadcast_in_dim"
    first = 0 if primitive in exchanged and not filler else 1 + filler
    return first, -math.prod(value.shape)
