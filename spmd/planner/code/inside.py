"""What a person pastes for a plan, worked out when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import inspect
import time
from typing import Any, NamedTuple

import jax.tree_util as jtu

from spmd import stages
from spmd.inspection.records.plan import Inside, Placed, Plan
from spmd.planner.code.constraints import constraints_of
from spmd.planner.code.folded import folded, literal
from spmd.planner.code.text import code_of, is_free
from spmd.planner.verify import Program, spec_of_entries

_COMPILES = 6
"""So many programs of codes are compiled at most: what the preview says of one may not be all."""


def inside_of(
    plan: Plan,
    program: Program,
    mesh: Any,
    *,
    timeout: float | None = None,
    tell: Callable[[str], Any] = lambda one: None,
) -> Inside:
    """The constraints of a plan in the user's source, and the text with them.

    Args:
        plan: what was chosen.
        program: what was planned.
        mesh: that the plan is for.
        timeout: seconds after which nothing more is tried.
        tell: is told what is compiled.
    """
    ins, outs = ([*map(_spec, side)] for side in (plan.arguments, plan.results))
    found = constraints_of(
        program,
        mesh,
        ins=ins,
        outs=outs,
        pins=plan.pins,
        report=plan.report,
        compiles=_COMPILES,
        deadline=None if timeout is None else time.monotonic() + timeout,
        tell=tell,
    )
    call = call_of(program, mesh)
    args, kwargs = jtu.tree_unflatten(call.in_tree, ins)
    text = code_of(
        name=call.name,
        axes=plan.axes,
        ins=folded((*args, *kwargs.values()), call.arguments, call.keys),
        outs=folded(jtu.tree_unflatten(call.out_tree, outs), "results"),
        constraints=found,
        arguments=call.arguments,
        given=call.given,
        options=dict(call.options),
        topology=plan.topology or None,
    )
    return Inside(constraints=found.records, exact=found.exact, note=found.note, code=text)


class Call(NamedTuple):
    """What the text says of a program beside its plan: for another one the text is another.

    Attributes:
        name: of the function.
        in_tree: of its positional and keyword arguments.
        out_tree: of its results.
        arguments: what they are called, those that are given by keyword last.
        keys: by which they have their specs, where some are given so.
        given: what a call is given.
        options: of `pjit`.
    """

    name: str
    in_tree: Any
    out_tree: Any
    arguments: Sequence[str]
    keys: Sequence[str]
    given: Sequence[str]
    options: Sequence[tuple[str, Any]]


def call_of(program: Program, mesh: Any) -> Call:
    """How a program is called."""
    traced = program.traced(mesh)
    tree, out = traced._signature.in_tree, traced._signature.out_tree
    args, kwargs = jtu.tree_unflatten(tree, range(tree.num_leaves))
    names = [*_argument_names(traced, len(args))]
    by_name = {key: _free(key) for key in kwargs}
    given, options = [*_given(traced, names, by_name)], [*_options(traced)]
    positions = traced._signature.positions[: len(args)]
    keys = [*map(traced._signature.params.call_name, positions), *kwargs] if kwargs else []
    if len({*keys}) < len(keys):  # `f(x, /, **more)` with another `x`, which no dict tells apart
        keys = []
    return Call(program.called, tree, out, [*names, *by_name.values()], keys, given, options)


def called(function: Any) -> str:
    """What a function is called in code; words for one that has no name of its own there."""
    name = getattr(function, "__name__", None)
    if name is None or inspect.ismethod(function):
        return f"a {type(function).__name__}" if name is None else f"a method {name}"
    return name


def _spec(one: Placed) -> Any:
    return spec_of_entries(one.spec)


def _argument_names(traced: stages.Traced, count: int) -> Iterator[str]:
    """What each positional argument that is not static is called."""
    signature = traced._signature
    names = signature.params.names
    for at in signature.positions[:count]:
        variadic = signature.params.variadic or "args"
        name = names[at] if at < len(names) else f"{variadic}[{at - len(names)}]"
        yield name if at >= len(names) else _free(name)


def _free(name: str) -> str:
    return name if is_free(name) else f"{name}_"


def _given(
    traced: stages.Traced, names: Sequence[str], by_keyword: Mapping[str, str]
) -> Iterator[str]:
    """What a call is given; of static arguments numbers and texts as they are, others by name."""
    signature = traced._signature
    by_position = dict(zip(signature.positions, names, strict=False))
    by_name = [f"{key}={name}" for key, name in by_keyword.items()]
    for where, static in signature.statics:
        is_literal = static.value is None or type(static.value) in (bool, int, float, str)
        text = literal(static.value) if is_literal else signature.params.call_name(where)
        if isinstance(where, str):
            by_name.append(f"{where}={text}")
        else:
            by_position[where] = text
    yield from (by_position[at] for at in sorted(by_position))
    yield from by_name


def _options(traced: stages.Traced) -> Iterator[tuple[str, Any]]:
    """Options of `pjit` that are not the default."""
    params, call = traced._signature.params, traced._call
    found: tuple[tuple[str, Any], ...] = (
        *_selected("static", params.static_nums, params.static_names, params.names),
        *_selected("donate", params.donate_nums, params.donate_names, params.names),
        ("keep_unused", call.keep_unused),
        ("compiler_options", dict(call.compiler_options)),
    )
    for name, value in found:
        if value:
            yield name, value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _selected(
    verb: str, nums: Sequence[int], selected: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Arguments by their positions, and by name those that have none."""
    by_position = {names[at] for at in nums if at < len(names)}
    yield f"{verb}_argnums", nums
    yield f"{verb}_argnames", tuple(name for name in selected if name not in by_position)
