"""Draws where shardings come from in a terminal or a log. Everything comes from the records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from spmd.inspection.records.arrays import Source
from spmd.inspection.records.origins import ValueOrigins, Why
from spmd.inspection.show import words
from spmd.inspection.show.cells import axis_style, show_mesh
from spmd.inspection.show.layout import Flow, Indented, clean

#: Values that are drawn; a line may make hundreds, most of them alike.
MOST = 12


def render_why(why: Why) -> RenderableType:
    """Every value that was found, with the origin of each axis, and with conflicts."""
    head = Text.assemble((clean(why.name), "bold"), " in ", clean(why.function))
    where = Text.assemble("mesh ", show_mesh(why.mesh)) if why.mesh else Text("no mesh")
    count = len(why.values)
    counted = [Text(words.plural(count, "value"))] * (count > 1)
    parts: list[RenderableType] = [Flow(head, where, *counted)]
    for value in why.values[:MOST]:
        parts += [Text(), *_value(value, why.mesh)]
    if count > MOST:
        parts += [Text(), Text(f"and {count - MOST} more values, which to_json() has", style="dim")]
    return Indented(Group(*parts), by=0)


def _value(value: ValueOrigins, mesh: Iterable[str]) -> Iterator[RenderableType]:
    array = words.show_array(value.dtype, value.shape)
    title = Text.assemble((clean(value.name), "bold"), " ", array, ": ")
    yield Flow(title + _text(words.spec_words(value.spec), mesh), *_place(value.source))
    for sentence in words.sentences(value):
        text = _text(sentence.words, mesh)
        if sentence.quiet:
            text.stylize("dim")
        yield Indented(Flow(text, *_place(sentence.source)), by=2 * sentence.depth)


def _text(said: Iterable[words.Word], mesh: Iterable[str]) -> Text:
    return Text.assemble(*((clean(word.text), axis_style(word.axis, mesh)) for word in said))


def _place(source: Source | None) -> Sequence[Text]:
    return [Text(words.show_place(source), style="dim")] if source else []
