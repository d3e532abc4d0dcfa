"""The values of a program whose origins a report holds, and when they are worked out.

Propagation with its steps and the search for conflicts take longer than a report may add to a
compile, so a report keeps the lowered module until somebody asks, and lets it go then.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
import functools
import itertools
import logging
import math
import re
from typing import Any

from spmd.errors import ReportError
from spmd.inspection.records.names import user_source
from spmd.inspection.records.origins import Later, Origins, known
from spmd.inspection.records.report import Collective
from spmd.inspection.records.sums import shares, totals
from spmd.inspection.shardy import passes
from spmd.inspection.shardy.propagation import Propagation, Value, propagate
from spmd.inspection.shardy.why import describe, is_made

logger = logging.getLogger(__name__)

MOST = {"argument": 256, "output": 256, "result": 192}
"""The most values of a kind that a report lists."""
OF_A_LINE = 24
"""The most values that it lists of one line."""

_Line = tuple[str, int]


NOT_AT_HAND = (
    "What the program was lowered from is not at hand: report the function, or what lower() gave, "
    "and not what was compiled elsewhere or loaded."
)


def origins_later(lowered: Any, found: Sequence[Collective], *, subject: str) -> Later:
    """The origins of a report, for when somebody asks for them.

    Args:
        lowered: the stage that the program was compiled from; None where it is not at hand.
        found: the collectives, whose lines count.
        subject: the first words of an error.
    """
    if lowered is None:
        return known(Origins(missing=NOT_AT_HAND))
    try:
        # Not the stage: it holds the arrays that a function closes over.
        module = passes.module_of(lowered, subject=subject)
    except Exception as error:
        return known(_unknown(error))
    return Later(functools.partial(_work_out, module, found, subject))


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
    words: dict[str | None, tuple[_Line, set[str]]] = {}
    parts = (shares(one, lambda part: (part.source, part.op_name)) for one in found)
    for one in itertools.chain.from_iterable(share.values() for share in parts):
        if one.source:
            place = (one.source.file, one.source.line)
            _, names = words.setdefault(str(one.source), (place, set()))
            names.update(re.split(r"[/:()]", one.op_name))
    ranked = totals(found, "line")
    return {words[line][0]: frozenset(words[line][1]) for line in ranked if line in words}


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
            groups[line].setdefault(_kind(value), i)
    return {
        line: sorted(group.values(), key=lambda i: _rank(found.values[i], lines[line]))
        for line, group in groups.items()
    }


def _kind(value: Value) -> Any:
    """What values of one line have in common that are listed once."""
    origins = tuple(sorted(value.origins.items()))
    return value.name, value.shape, value.dtype, value.axes, origins, id(value.mark), value.local


def _rank(value: Value, exchanged: Container[str]) -> tuple[int, int]:
    primitive = value.op_name.rpartition("/")[2]
    # JAX writes a broadcast for each number that an array is added to or multiplied with.
    filler = value.name == "broadcast_in_dim" and primitive != "broadcast_in_dim"
    first = 0 if primitive in exchanged and not filler else 1 + filler
    return first, -math.prod(value.shape)
