"""Shardy's passes on a copy of a lowered module, as XLA runs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import math
import re
from typing import Any

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo

from spmd import _jax
from spmd.errors import Failure, ReportError, explain
from spmd.inspection.shardy import calls, passes, ragged, reshards

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
        calls.inline(copy)
        operations = passes.all_in(copy)
        _tell_rules(operations)
        _change(operations)
        del operations  # which the passes may replace
        i = wanted.index(RESHARDS) if RESHARDS in wanted else len(wanted)
        _run(copy, wanted[:i], subject)
        if i < len(wanted):
            operations = passes.all_in(copy)
            if not own:
                reshards.agree(copy, [one for one in operations if one.name not in _OPAQUE])
            ragged.replace(copy, operations)
            del operations
            _run(copy, [RESHARDS], subject)
            if not own:
                reshards.replace(copy, passes.all_in(copy))
            _run(copy, wanted[i + 1 :], subject)
    return copy


def _run(copy: Any, wanted: Sequence[str], subject: str) -> None:
    try:
        manager = passmanager.PassManager.parse(f"builtin.module({', '.join(wanted)})")
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
        if rule := _RULES.get(name, _rule_of_each)(operation):
            operation.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)


def _rule_of_each(operation: Any) -> str:
    """That of an operation that works on each element by itself; empty for others.

    JAX writes ``chlo.square`` where XLA then has ``stablehlo.multiply``. All that have operands and
    results of one shape work on each element.
    """
    values = [*operation.operands, *operation.results]
    shape, *others = {passes.shape_of(value) for value in values}
    if others or not 0 < len(shape) <= len(passes.FACTORS):
        return ""
    names = passes.FACTORS[: len(shape)]
    sides = ([names] * len(side) for side in (operation.operands, operation.results))
    return passes.rule_text(*sides, sizes=dict(zip(names, shape, strict=True)))


def _rule_of_rows(operation: Any) -> str:
    """That of `jax.lax.top_k`: a device needs all of a row, and what it takes lies with the row."""
    operand = passes.shape_of(operation.operands[0])
    result = passes.shape_of(operation.results[0])
    if len(operand) + 1 > len(passes.FACTORS):
        return ""
    *batch, row, taken = passes.FACTORS[: len(operand) + 1]
    return passes.rule_text(
        ((*batch, row),), ((*batch, taken),) * 2,
        sizes=dict(zip((*batch, row, taken), (*operand, result[-1]), strict=True)),
        kinds={"need_replication": (row, taken)},
    )  # fmt: skip


#: By operation, what gives its rule; all others work on each element by itself, or have none.
_RULES = {ragged.NAME: ragged.rule, passes.TOP_K: _rule_of_rows}


def _change(operations: Iterable[Any]) -> None:
    """Makes operations what they are in XLA where it propagates."""
    for one in operations:
        if one.name == "stablehlo.broadcast_in_dim":
            _reshape(one)
        elif one.name == "sdy.sharding_constraint":
            _move_out(one)


def _reshape(broadcast: Any) -> None:
    """Puts a reshape in the place of a broadcast that only adds dimensions of size 1, as XLA does.

    A place goes through reshapes before it goes through broadcasts, and through lookups.
    """
    operand, result = broadcast.operands[0], broadcast.results[0]
    before, after = (passes.shape_of(side) for side in (operand, result))
    if not before or math.prod(before) != math.prod(after):
        return
    with ir.InsertionPoint(broadcast), broadcast.location:
        made = stablehlo.ReshapeOp(result.type, operand)
    if "sdy.sharding" in broadcast.attributes:
        made.operation.attributes["sdy.sharding"] = broadcast.attributes["sdy.sharding"]
    result.replace_all_uses_with(made.result)
    broadcast.erase()


def _move_out(constraint: Any) -> None:
    """Constrains what loops hand on as it is before them, and not in each turn, as XLA does.

    Where that is a gather, it is made once.
    """
    while loop := _loop_of(value := constraint.operands[0]):
        with ir.InsertionPoint(loop):
            moved = constraint.clone()
        moved.operands[0] = loop.operands[value.arg_number]
        constraint.results[0].replace_all_uses_with(moved.results[0])
        constraint.erase()
        constraint = moved


def _loop_of(value: Any) -> Any:
    """The loop that hands a value on as it is, or None."""
    if passes.maker_of(value) is not None:
        return None
    loop = passes.operation_of(value.owner.owner)
    if loop.name != passes.LOOP:
        return None
    *_, body = passes.blocks(loop)
    is_kept = value.owner == body and passes.end_of(body).operands[value.arg_number] == value
    return loop if is_kept else None


def _missing(wanted: Sequence[str], error: Exception) -> Failure:
    names = dict.fromkeys(n for p in wanted for n in _HEAD.findall(p) if "sdy-" in n)
    return Failure(
        what="needs passes of Shardy that this jaxlib does not have",
        expected=", ".join(names),
        got=" ".join(str(error).split())[:200],
        fix="install a release of JAX that spmd is tested with: 0.10.2 up to 0.12",
        error=ReportError,
    )
