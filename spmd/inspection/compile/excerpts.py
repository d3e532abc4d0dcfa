"""The source text of a report: the lines around what the report points at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import linecache
import os

from spmd.inspection.records.arrays import Excerpt
from spmd.inspection.records.names import is_library
from spmd.inspection.records.report import Collective, Memory, Source

AROUND = 4
"""Lines of context before and after each line that is pointed at."""
_WIDTH = 500


def excerpts(found: Iterable[Collective], memory: Memory | None) -> tuple[Excerpt, ...]:
    """The lines around the frames of collectives and around the lines of buffers, by file and line.

    Libraries are left out, and so are files that cannot be read, and lines that a file no longer
    has. Of a line longer than 500 characters the first 500 are kept.
    """
    lines: dict[str, set[int]] = {}
    for source in _pointed_at(found, memory):
        lines.setdefault(source.file, set()).add(source.line)
    return tuple(
        excerpt
        for file in sorted(lines)
        if not is_library(file)
        for excerpt in _of_file(file, sorted(lines[file]))
    )


def _pointed_at(found: Iterable[Collective], memory: Memory | None) -> Iterator[Source]:
    for one in found:
        for place in (one, *one.parts):
            yield from place.frames
            if place.source:
                yield place.source
    for buffer in memory.buffers if memory else ():
        if buffer.source:
            yield buffer.source


def _of_file(file: str, lines: Sequence[int]) -> Iterator[Excerpt]:
    text = _text(file)
    known = [line for line in lines if 0 < line <= len(text)]
    start = stop = 0
    for line in known:
        if line - AROUND > stop + 1:
            yield from _excerpt(file, text, start, stop)
            start = max(1, line - AROUND)
        start = start or max(1, line - AROUND)
        stop = min(len(text), line + AROUND)
    yield from _excerpt(file, text, start, stop)


def _excerpt(file: str, text: Sequence[str], start: int, stop: int) -> Iterator[Excerpt]:
    if start:
        lines = tuple(line.rstrip("\r\n")[:_WIDTH] for line in text[start - 1 : stop])
        yield Excerpt(file=file, first=start, lines=lines)


def _text(file: str) -> Sequence[str]:
    # Cells of a notebook are in the cache and in no file. A relative name would be looked for in
    # all of sys.path, and another file found.
    if file not in linecache.cache and not os.path.isabs(file):
        return ()
    linecache.checkcache(file)
    return linecache.getlines(file)
