"""What a person pastes for a plan: specs of arguments and results, and constraints inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import keyword
import math
import textwrap
from typing import Any

from spmd._mesh import show_axes
from spmd.inspection.records.names import short_path
from spmd.inspection.records.plan import SourceConstraint
from spmd.planner.code.folded import HELPER, Folded, Names, Text, lines_of, literal, spec_text

_OWN = ("P", "fun", "jax", "mesh", "specs_like", "spmd")
"""Names in the text, beside `step`, which is `planned` where the function is called so."""


_STATIC = ("static_argnums", "static_argnames")
"""Options that say which arguments are no arrays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a person adds to the code for the program of a plan.

    Attributes:
        records: the expressions, in the order of the code.
        exact: whether the program of the code was found to be that of the plan.
        note: what was compared, and what differs.
    """

    records: tuple[SourceConstraint, ...]
    exact: bool
    note: str


def code_of(
    *,
    name: str,
    axes: Mapping[str, int],
    ins: Folded,
    outs: Folded,
    constraints: Constraints,
    arguments: Sequence[str] = (),
    given: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    topology: str | None = None,
) -> str:
    """Python text for a plan: the mesh, the function with its specs, and constraints as comments.

    All of it can be run where the function is.

    Args:
        name: of the function.
        axes: of the mesh, with their sizes.
        ins: specs of the arguments.
        outs: specs of the results.
        constraints: of expressions inside.
        arguments: what the arguments are called; values of these names are needed where specs are
            made of them.
        given: what a call is given, static arguments among them; by default the arguments.
        options: of `pjit`, such as ``donate_argnums``.
        topology: that the plan is for, such as ``v5e:4x4``.
    """
    names = Names([ins, outs])
    parts = [
        "\n".join(_imports(ins, outs)),
        HELPER.rstrip() if ins.needs_helper or outs.needs_helper else "",
        "\n".join(_mesh(axes, topology)),
        *names.definitions(),
        "\n".join(_function(name, ins, outs, names, arguments, given or arguments, options or {})),
        "\n".join(_places(constraints)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def is_free(name: str) -> bool:
    """Whether a person may call something so: the text has names of its own."""
    return name.isidentifier() and not keyword.iskeyword(name) and name not in _OWN


def _imports(ins: Folded, outs: Folded) -> Iterator[str]:
    if ins.needs_helper or outs.needs_helper:
        yield "import jax"
    yield "import spmd"
    yield "from spmd import P"
    yield from sorted({*ins.imports, *outs.imports})


def _mesh(axes: Mapping[str, int], topology: str | None) -> Iterator[str]:
    devices = f"{math.prod(axes.values())} devices" + (f", {topology}" if topology else "")
    yield " ".join(f"# mesh: {show_axes(axes)} ({devices})".splitlines())
    shape = ", ".join(f"{literal(axis)}: {size}" for axis, size in axes.items())
    yield f"mesh = spmd.make_mesh({{{shape}}})"


def _function(
    name: str,
    ins: Folded,
    outs: Folded,
    names: Names,
    arguments: Sequence[str],
    given: Sequence[str],
    options: Mapping[str, Any],
) -> Iterator[str]:
    if not is_free(name):
        yield f"# fun: the function that was planned, {name}"
        name = "fun"
    if ins.needs_helper or outs.needs_helper:
        yield f"# {', '.join(arguments)}: what a call is given, or structs of its shapes"
    if outs.needs_helper:
        yield f"{outs.name} = {_shaped(name, given, options)}"
    yield f"{'planned' if name == 'step' else 'step'} = spmd.pjit("
    yield f"    {name},"
    yield from _option("in_axis_resources", names.body(ins.body))
    yield from _option("out_axis_resources", names.body(outs.body))
    for key, value in options.items():
        yield from _option(key, literal(value))
    yield "    mesh=mesh,"
    yield ")"


def _shaped(name: str, given: Sequence[str], options: Mapping[str, Any]) -> str:
    """The shapes of the results, as Python text."""
    static = [f"{key}={literal(value)}" for key, value in options.items() if key in _STATIC]
    if not static:
        return f"jax.eval_shape({', '.join([name, *given])})"
    return f"jax.jit({', '.join([name, *static])}).eval_shape({', '.join(given)})"


def _option(name: str, value: Text) -> list[str]:
    first, *more = lines_of(value, 4, len(name) + 2)
    lines = [f"    {name}={first}", *more]
    lines[-1] += ","
    return lines


def _places(constraints: Constraints) -> Iterator[str]:
    """What to replace in the code, in its order, as comments."""
    for line in textwrap.wrap(constraints.note, width=86, break_on_hyphens=False):
        yield f"# {line}"
    if constraints.records:
        yield "# Where constraints stand: from spmd import P, with_sharding_constraint"
    for one in constraints.records:
        yield from (f"# {line}".rstrip() for line in _place(one))


def _place(one: SourceConstraint) -> Iterator[str]:
    where = f"{short_path(one.file)}:{one.line} in {one.function}"
    if one.column is None:
        yield f"{where}: {one.expression} is to lie in {spec_text(one.spec)}"
        return
    yield f"{where}, column {one.column + 1}: replace the expression by"
    first, *more = wrapped(one).split("\n")
    yield f"    {first}"
    # Lines of the code keep their distance from each other.
    yield from (f"    {line}" for line in textwrap.dedent("\n".join(more)).split("\n") if more)


def wrapped(one: SourceConstraint) -> str:
    """An expression with its constraint, as it is to stand in the code."""
    return f"with_sharding_constraint({one.expression}, {spec_text(one.spec)})"
