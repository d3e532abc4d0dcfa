"""What is said of where a sharding comes from: sentences that a terminal and the page both draw.

A user's text stands in them as it is: whoever draws them escapes it.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import itertools
import sys

from spmd.inspection.records.arrays import Source
from spmd.inspection.records.names import short_path
from spmd.inspection.records.origins import (
    REASONS,
    Annotation,
    Conflict,
    Origin,
    Spec,
    Step,
    ValueOrigins,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """A piece of a sentence, and the mesh axis that it names, if it names one."""

    text: str
    axis: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One line of what is said.

    Args:
        words: one after another, with nothing in between.
        source: the user's line that stands behind them.
        depth: 1 for what is said of the value, 2 for what belongs to the sentence before.
        quiet: True for what is of less weight.
    """

    words: tuple[Word, ...]
    source: Source | None = None
    depth: int = 1
    quiet: bool = False


def sentences(
    value: ValueOrigins, *, steps: int = sys.maxsize, conflicts: int = sys.maxsize
) -> Iterator[Sentence]:
    """What is known of a value: origins, dimensions that are whole, conflicts.

    Args:
        value: the record.
        steps: of each axis, the most to tell: the first and the last half of as many.
        conflicts: the most to tell, the nearest. What is left out is counted.
    """
    for origin in value.origins:
        yield _origin(value, origin)
        yield from _steps(origin.steps, steps)
    yield from _whole(value)
    for conflict in value.conflicts[:conflicts]:
        yield from _conflict(conflict)
    if more := len(value.conflicts[conflicts:]):
        yield Sentence(words=(Word(f"and {more:,} more did not get through"),), quiet=True)


def show_shape(value: ValueOrigins) -> str:
    """Element type and dimensions: ``f32[8,16]``."""
    return f"{value.dtype}{_dims(value.shape)}"


def _dims(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def show_place(source: Source | None) -> str:
    """A line as its file and number; empty where there is none."""
    return f"{short_path(source.file)}:{source.line}" if source else ""


def spec_words(spec: Spec) -> tuple[Word, ...]:
    """Axes by dimension, as a PartitionSpec is written."""
    comma = Word(", ")
    entries = [_entry(axes) for axes in spec]
    inner = [word for entry in entries for word in (comma, *entry)][1:]
    return (Word("P("), *inner, Word(")"))


def _entry(axes: tuple[str, ...]) -> tuple[Word, ...]:
    if not axes:
        return (Word("None"),)
    names = [Word(f"'{axis}'", axis) for axis in axes]
    if len(names) == 1:
        return tuple(names)
    joined = itertools.chain.from_iterable((Word(", "), name) for name in names)
    return (Word("("), *[*joined][1:], Word(")"))


def annotation_words(one: Annotation | None) -> tuple[Word, ...]:
    """What the user wrote, and where."""
    if one is None:
        return (Word("an annotation that the passes do not name"),)
    # An annotation is a quotation: only axes of the value itself are told apart.
    spec = Word("".join(word.text for word in spec_words(one.spec)))
    if one.name:
        return Word(f"{one.kind} {one.name} "), spec
    at = f" at {show_place(one.source)}" if one.source else ""
    return Word(f"{one.kind} "), spec, Word(at)


# Origins

_ARROWS = {"forward": "->", "backward": "<-", "sideways": "<>"}


def _origin(value: ValueOrigins, origin: Origin) -> Sentence:
    own = not origin.steps and origin.annotation == value.annotation
    said = "its own annotation, " if own else "from "
    priority = "" if origin.priority is None else f", priority {origin.priority}"
    return Sentence(
        words=(
            Word(origin.axis, origin.axis),
            Word(f" on dimension {origin.dimension}: {said}"),
            *annotation_words(origin.annotation),
            Word(priority),
        )
    )


def _steps(steps: tuple[Step, ...], most: int) -> Iterator[Sentence]:
    if len(steps) <= most:
        yield from map(_step, steps)
        return
    half = most // 2
    yield from map(_step, steps[:half])
    between = f"and {len(steps) - 2 * half:,} operations in between"
    yield Sentence(words=(Word(between),), depth=2, quiet=True)
    yield from map(_step, steps[-half:])


def _step(step: Step) -> Sentence:
    reached = "" if step.value == step.operation else f" to {step.value}"
    text = f"{step.operation}{reached} {_dims(step.shape)}, dimension {step.dimension}"
    return Sentence(
        words=(Word(f"{_ARROWS.get(step.way, step.way)} {text}"),), source=step.source, depth=2
    )


def _whole(value: ValueOrigins) -> Iterator[Sentence]:
    """What is to be said of dimensions that are not split and met nothing."""
    if not value.shape:
        yield Sentence(words=(Word("a scalar has no dimension to split"),))
        return
    met = {conflict.dimension for conflict in value.conflicts}
    quiet = [d for d, axes in enumerate(value.spec) if not axes and d not in met]
    if quiet:
        noun = "dimension" if len(quiet) == 1 else "dimensions"
        text = f"{noun} {', '.join(map(str, quiet))}: not split, and no axis was kept out"
        yield Sentence(words=(Word(text),), quiet=True)


# Conflicts


def _conflict(one: Conflict) -> Iterator[Sentence]:
    reason = REASONS.get(one.reason, one.reason)
    head = Word(f" did not reach dimension {one.dimension}: {reason}")
    yield Sentence(words=(Word(one.axis, one.axis), head))
    operations = "operation" if one.distance == 1 else "operations"
    away = f"{one.distance:,} {operations} away" if one.distance else "at this value"
    met = Word(f"met at {one.operation}, {away}")
    yield Sentence(words=(met,), source=one.source, depth=2)
    sides = (("lost  ", one.lost, True), ("won   ", one.won, False), ("and   ", one.against, False))
    for said, annotation, always in sides:
        if always or annotation is not None:
            yield Sentence(words=(Word(said), *annotation_words(annotation)), depth=2)
