"""Shardy's passes on a copy of a lowered module, as XLA runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import math
import re
from typing import Any

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo

from spmd import _jax
from spmd.errors import Failure, ReportError, explain
from spmd.inspection.shardy import passes, ragged, reshards

PROPAGATION = "sdy-propagation-pipeline"
"""Shardy's propagation and what comes before and after it."""

RESHARDS = "func.func(sdy-insert-explicit-reshards{enable-full-version=true})"
"""Shardy's pass that makes explicit where an operation needs values placed otherwise."""

_HEAD = re.compile(r"[\w.-]+")


def run(module: Any, wanted: Sequence[str], *, subject: str, own: bool = False) -> Any:
    """Runs passes, with their options, on a copy of a module, and gives the copy's operation.

    Args:
        module: the lowered program.
        wanted: the passes, in their order.
        subject: the first words of a message.
        own: whether values are placed otherwise as Shardy asks for it, and not as XLA does it.
    """
    with module.context:
        copy = module.operation.clone().operation
        operations = _all_in(copy)
        has_loops = any(one.name == passes.LOOP for one in operations)
        _tell_rules(operations)
        _change(operations)
        del operations  # which the passes may replace
        i = wanted.index(RESHARDS) if RESHARDS in wanted else len(wanted)
        _run(copy, wanted[:i], subject, has_loops=has_loops)
        if i < len(wanted):
            operations = _all_in(copy)
            if not own:
                reshards.agree(copy, [one for one in operations if one.name not in _OPAQUE])
            ragged.replace(copy, operations)
            del operations
            _run(copy, [RESHARDS], subject, has_loops=has_loops)
            if not own:
                reshards.replace(copy, _all_in(copy))
            _run(copy, wanted[i + 1 :], subject, has_loops=has_loops)
    return copy


def _run(copy: Any, wanted: Sequence[str], subject: str, *, has_loops: bool) -> None:
    parse = passmanager.PassManager.parse
    try:
        manager = parse(f"builtin.module({', '.join(wanted)})")
        if has_loops:
            manager = parse(_propagating_twice(str(manager)))
    except (ValueError, ir.MLIRError) as error:
        raise explain(subject, [_missing(wanted, error)]) from None
    # On JAX 0.10.2 the records of propagation fail verification on every loop.
    manager.enable_verifier(False)
    try:
        manager.run(copy)
    except ir.MLIRError as error:
        failure = Failure(
            what="cannot be read by Shardy's passes",
            got=" ".join(str(error).split())[:300],
            fix="compile it, and see its report",
            error=ReportError,
        )
        raise explain(subject, [failure]) from None


def _all_in(copy: Any) -> list[Any]:
    """All operations of a module, inner ones first: sooner than by `operations_in`."""
    found: list[Any] = []

    def keep(operation: Any) -> Any:
        found.append(operation)
        return ir.WalkResult.ADVANCE

    copy.walk(keep)
    return found


_PROPAGATE = re.compile(r"sdy-user-priority-propagate(\{[^{}]*\})?")


def _propagating_twice(pipeline: str) -> str:
    """A pipeline that propagates again where it does so once, for programs with loops.

    Propagation is over before the shardings of a loop reach the functions that its body calls, such
    as those that take its turn of a stacked array: whatever they give stays whole. A second one
    starts from all that the first one knows; numbers of steps go on. Asked for origins, it would
    say of each that it cannot be found. XLA needs no second one: it has no calls when it
    propagates, and its loops do not carry what they only read.
    """
    # This one writes files if it is told where, and has no name that can be parsed.
    pipeline = pipeline.replace("sdy-save-module,", "")
    again = "debug-sharding-origins=true", "debug-sharding-origins=false"
    return _PROPAGATE.sub(lambda one: f"{one[0]},{one[0].replace(*again)}", pipeline)


#: What XLA keeps as a call that it does not partition.
_OPAQUE = ("chlo.erf",) if _jax.versions.ERF_IS_OPAQUE else ()


def _tell_rules(operations: Iterable[Any]) -> None:
    """Tells Shardy how operations propagate that XLA replaces before it propagates.

    The pass that replaces them cannot be reached from Python, and Shardy has no rule for those of
    CHLO.
    """
    for operation in operations:
        name = operation.name
        if not name.startswith("chlo.") or name in _OPAQUE:
            continue
        rule = ragged.rule(operation) if name == ragged.NAME else _rule_of_each(operation)
        if rule:
            operation.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)


def _rule_of_each(operation: Any) -> str:
    """That of an operation that works on each element by itself; empty for others.

    JAX writes ``chlo.square`` where XLA then has ``stablehlo.multiply``. All that have operands and
    results of one shape work on each element.
    """
    values = [*operation.operands, *operation.results]
    shape, *others = {passes.dims_of(value.type)[0] for value in values}
    if others or not 0 < len(shape) <= len(passes.FACTORS):
        return ""
    names = passes.FACTORS[: len(shape)]
    sides = ([names] * len(side) for side in (operation.operands, operation.results))
    return passes.rule_text(*sides, sizes=dict(zip(names, shape, strict=True)))


def _change(operations: Sequence[Any]) -> None:
    """Makes operations what they are in XLA where it propagates."""
    calls: dict[str, list[Any]] = {}
    for one in operations:
        if one.name == "func.call":
            calls.setdefault(passes.callee_of(one), []).append(one)
    for one in operations:
        if one.name == "stablehlo.broadcast_in_dim":
            _reshape(one)
        elif one.name == "sdy.sharding_constraint":
            _move_out(one, calls)


def _reshape(broadcast: Any) -> None:
    """Puts a reshape in the place of a broadcast that only adds dimensions of size 1, as XLA does.

    A place goes through reshapes before it goes through broadcasts, and through lookups.
    """
    operand, result = broadcast.operands[0], broadcast.results[0]
    before, after = (passes.dims_of(side.type)[0] for side in (operand, result))
    if not before or math.prod(before) != math.prod(after):
        return
    with ir.InsertionPoint(broadcast), broadcast.location:
        made = stablehlo.ReshapeOp(result.type, operand)
    if "sdy.sharding" in broadcast.attributes:
        made.operation.attributes["sdy.sharding"] = broadcast.attributes["sdy.sharding"]
    result.replace_all_uses_with(made.result)
    broadcast.erase()


def _move_out(constraint: Any, calls: Mapping[str, Sequence[Any]]) -> None:
    """Constrains what a loop hands on as it is before the loop, and not in each turn, as XLA does.

    Where that is a gather, it is made once. XLA has no calls then: out of a function that is called
    once it is moved, too, on the way to a loop.
    """
    way: list[tuple[Any, int]] = []
    value = constraint.operands[0]
    while found := _given(value, calls):
        way.append(found)
        value = found[0].operands[found[1]]
    while way and way[-1][0].name != passes.LOOP:
        way.pop()
    for holder, i in way:
        with ir.InsertionPoint(holder):
            moved = constraint.clone()
        moved.operands[0] = holder.operands[i]
        if holder.name == passes.LOOP:
            made = moved.results[0]
        else:
            holder.operands[i], made = moved.results[0], constraint.operands[0]
        constraint.results[0].replace_all_uses_with(made)
        constraint.erase()
        constraint = moved


def _given(value: Any, calls: Mapping[str, Sequence[Any]]) -> tuple[Any, int] | None:
    """The loop that hands a value on as it is, or the only call of a function that it is given to.

    With it comes the number of the operand. A function may do nothing else with the value.
    """
    if passes.maker_of(value) is not None:
        return None
    i, holder = value.arg_number, passes.operation_of(value.owner.owner)
    if holder.name == passes.LOOP:
        *_, body = passes.blocks(holder)
        is_kept = value.owner == body and passes.end_of(body).operands[i] == value
        return (holder, i) if is_kept else None
    if holder.name != "func.func" or not passes.is_used_once(value):
        return None
    found = calls.get(passes.name_of(holder), ())
    return (found[0], i) if len(found) == 1 else None


def _missing(wanted: Sequence[str], error: Exception) -> Failure:
    names = dict.fromkeys(n for p in wanted for n in _HEAD.findall(p) if "sdy-" in n)
    return Failure(
        what="needs passes of Shardy that this jaxlib does not have",
        expected=", ".join(names),
        got=" ".join(str(error).split())[:200],
        fix="install a release of JAX that spmd is tested with: 0.10.2 up to 0.12",
        error=ReportError,
    )
