"""What the page says of where shardings come from, as plain values, in the words of `why`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from spmd.inspection.records.origins import Origins, ValueOrigins
from spmd.inspection.show.words import (
    Sentence,
    Word,
    sentences,
    show_place,
    show_shape,
    spec_words,
)

#: Of a value; a program with many layers has routes of hundreds of operations.
_MOST = {"steps": 24, "conflicts": 8}
_TITLES = {"argument": "Arguments", "output": "Outputs"}


def view(origins: Origins, colors: Mapping[str, int]) -> dict[str, Any]:
    """The values in groups: arguments, outputs, and those of each line.

    Args:
        origins: of a report.
        colors: number of the colour by mesh axis.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for i, value in enumerate(origins.values):
        key = _group(value)
        group = groups.setdefault(key, _head(len(groups), value))
        group["rows"].append(_row(i, value, colors))
    return {
        "groups": [*groups.values()],
        "count": len(origins.values),
        "left_out": f"{origins.left_out:,}" if origins.left_out else "",
        "missing": origins.missing or ("" if origins.values else "The program has no values."),
    }


def anchors(origins: Origins) -> tuple[dict[str, str], dict[tuple[str, int], str]]:
    """What leads to a value of the section: arguments by path, and groups by file and line."""
    arguments: dict[str, str] = {}
    lines: dict[tuple[str, int], str] = {}
    groups: dict[Any, str] = {}
    for i, value in enumerate(origins.values):
        group = groups.setdefault(_group(value), f"made-{len(groups)}")
        if value.kind == "argument":
            arguments.setdefault(value.name, f"value-{i}")
        elif value.kind == "result" and value.source:
            lines.setdefault((value.source.file, value.source.line), group)
    return arguments, lines


def _group(value: ValueOrigins) -> Any:
    if value.kind != "result":
        return value.kind
    return value.source and (value.source.file, value.source.line)


def _head(number: int, value: ValueOrigins) -> dict[str, Any]:
    made = show_place(value.source) or "no line"
    return {"id": f"made-{number}", "title": _TITLES.get(value.kind, made), "rows": []}


def _row(i: int, value: ValueOrigins, colors: Mapping[str, int]) -> dict[str, Any]:
    axes = dict.fromkeys(conflict.axis for conflict in value.conflicts)
    return {
        "id": f"value-{i}",
        "name": value.name or "(no name)",
        "shape": show_shape(value),
        "spec": [*_pieces(spec_words(value.spec), colors)],
        "place": show_place(value.source) if value.kind == "output" else "",
        "kept_out": ", ".join(axes),
        "said": [_line(sentence, colors) for sentence in sentences(value, **_MOST)],
    }


def _line(sentence: Sentence, colors: Mapping[str, int]) -> dict[str, Any]:
    return {
        "pieces": [*_pieces(sentence.words, colors)],
        "place": show_place(sentence.source),
        "deep": sentence.depth > 1,
        "quiet": sentence.quiet,
    }


def _pieces(words: Iterable[Word], colors: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for word in words:
        color = colors.get(word.axis.partition(":")[0], 0) if word.axis else None
        if word.text:
            yield {"text": word.text, "color": color}
