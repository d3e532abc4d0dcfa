"""Draws where shardings come from in a terminal or a log. Everything comes from the records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from spmd.inspection._layout import Indented, clean
from spmd.inspection._places import short_path
from spmd.inspection._records import Source
from spmd.inspection._text import Flow, axis_styles, plural, show_mesh
from spmd.inspection._why import (
    REASONS,
    Annotation,
    Conflict,
    Origin,
    Spec,
    Step,
    ValueOrigins,
    Why,
)


def show(why: Why, console: Console | None = None) -> None:
    """Prints origins, as `Why.show` does."""
    (console or Console()).print(render_why(why))


#: Values that are drawn; a line may make hundreds, most of them alike.
MOST = 12


def render_why(why: Why) -> RenderableType:
    """Every value that was found, with the origin of each axis, and with conflicts."""
    styles = axis_styles(why.mesh)
    head = Text.assemble((clean(why.name), "bold"), " in ", clean(why.function))
    where = Text.assemble("mesh ", show_mesh(why.mesh)) if why.mesh else Text("no mesh")
    count = len(why.values)
    parts: list[RenderableType] = [Flow(head, where, *[Text(plural(count, "value"))] * (count > 1))]
    for value in why.values[:MOST]:
        parts += [Text(), *_value(value, styles)]
    if count > MOST:
        parts += [Text(), Text(f"and {count - MOST} more values, which to_json() has", style="dim")]
    return Indented(Group(*parts), by=0)


def _value(value: ValueOrigins, styles: Mapping[str, str]) -> Iterator[RenderableType]:
    title = Text.assemble((clean(value.name), "bold"), " ", show_shape(value))
    yield Flow(Text.assemble(title, ": ", show_spec(value.spec, styles)), *_place(value.source))
    lines = [line for origin in value.origins for line in _origin(value, origin, styles)]
    lines += _whole(value)
    lines += [line for one in value.conflicts for line in _conflict(one, styles)]
    yield Indented(Group(*lines))


def show_shape(value: ValueOrigins) -> str:
    """Element type and dimensions: ``f32[8,16]``."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def show_spec(spec: Spec, styles: Mapping[str, str] | None = None) -> Text:
    """Axes by dimension, as a PartitionSpec is written."""
    return Text.assemble("P(", Text(", ").join(_entry(axes, styles or {}) for axes in spec), ")")


def _entry(axes: tuple[str, ...], styles: Mapping[str, str]) -> Text:
    if not axes:
        return Text("None")
    names = Text(", ").join(_axis(axis, styles, quoted=True) for axis in axes)
    return names if len(axes) == 1 else Text.assemble("(", names, ")")


def _axis(axis: str, styles: Mapping[str, str], *, quoted: bool = False) -> Text:
    name = clean(axis)
    return Text(f"'{name}'" if quoted else name, style=styles.get(axis.partition(":")[0], ""))


def _place(source: Source | None) -> Sequence[Text]:
    return [Text(f"{short_path(source.file)}:{source.line}", style="dim")] if source else []


def show_annotation(one: Annotation | None) -> Text:
    """What the user wrote, and where."""
    if one is None:
        return Text("an annotation that the passes do not name")
    spec = show_spec(one.spec)
    if one.name:
        return Text.assemble(f"{one.kind} {clean(one.name)} ", spec)
    at = f" at {short_path(one.source.file)}:{one.source.line}" if one.source else ""
    return Text.assemble(f"{one.kind} ", spec, at)


# Origins


def _origin(
    value: ValueOrigins, origin: Origin, styles: Mapping[str, str]
) -> Iterator[RenderableType]:
    what = Text.assemble(_axis(origin.axis, styles), f" on dimension {origin.dimension}: ")
    own = not origin.steps and origin.annotation == value.annotation
    said = "its own annotation, " if own else "from "
    priority = "" if origin.priority is None else f", priority {origin.priority}"
    yield Flow(Text.assemble(what, said, show_annotation(origin.annotation), priority))
    yield Indented(Group(*(_step(step) for step in origin.steps)))


def _step(step: Step) -> RenderableType:
    arrow = {"forward": "->", "backward": "<-", "sideways": "<>"}[step.way]
    shape = f"[{','.join(map(str, step.shape))}]"
    reached = "" if step.value == step.operation else f" to {clean(step.value)}"
    text = f"{arrow} {clean(step.operation)}{reached} {shape}, dimension {step.dimension}"
    return Flow(Text(text), *_place(step.source))


def _whole(value: ValueOrigins) -> Iterator[RenderableType]:
    """What is to be said of dimensions that are not split and met nothing."""
    if not value.shape:
        yield Flow(Text("a scalar has no dimension to split"))
        return
    met = {conflict.dimension for conflict in value.conflicts}
    quiet = [d for d, axes in enumerate(value.spec) if not axes and d not in met]
    if not quiet:
        return
    numbers = ", ".join(map(str, quiet))
    noun = "dimension" if len(quiet) == 1 else "dimensions"
    yield Flow(Text(f"{noun} {numbers}: not split, and no axis was kept out", style="dim"))


# Conflicts


def _conflict(one: Conflict, styles: Mapping[str, str]) -> Iterator[RenderableType]:
    axis = _axis(one.axis, styles)
    head = Text.assemble(axis, f" did not reach dimension {one.dimension}: ", REASONS[one.reason])
    away = f"{plural(one.distance, 'operation')} away" if one.distance else "at this value"
    met = Text(f"met at {clean(one.operation)}, {away}")
    yield Flow(head)
    lines: list[RenderableType] = [
        Flow(met, *_place(one.source)),
        Flow(Text.assemble("lost  ", show_annotation(one.lost))),
    ]
    if one.won is not None:
        lines.append(Flow(Text.assemble("won   ", show_annotation(one.won))))
    if one.against is not None:
        lines.append(Flow(Text.assemble("and   ", show_annotation(one.against))))
    yield Indented(Group(*lines))
