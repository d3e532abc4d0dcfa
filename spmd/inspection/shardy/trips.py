"""How often a loop of StableHLO runs, where its bounds are constants."""

from __future__ import annotations

import re
from typing import Any

from spmd.inspection.shardy import passes

_NUMBER = re.compile(r"dense<(-?\d+)>")
_SWAPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


def trip_count(loop: Any) -> int | None:
    """The executions of a loop's body; None where the data decide, or the form is another one.

    A counted loop compares one of its variables with a constant. The variable starts at a constant
    and changes by one each time.

    Args:
        loop: a ``stablehlo.while``.
    """
    condition, body = passes.blocks(loop)
    test = _made(_last(condition).operands[0], "compare")
    if test is None:
        return None
    way = _direction(test)
    left, right = test.operands
    if _variable(left, condition) is None:
        left, right, way = right, left, _SWAPPED.get(way, "")
    i, bound = _variable(left, condition), _constant(right, loop)
    if i is None or bound is None:
        return None
    start, step = _constant(loop.operands[i], loop), _step(_last(body).operands[i], i, body, loop)
    if start is None or not step:
        return None
    return _count(way, start, bound, step)


def _count(way: str, start: int, bound: int, step: int) -> int | None:
    """How many numbers from `start` on in steps satisfy the comparison with the bound."""
    if way in ("GT", "GE"):
        start, bound, step = -start, -bound, -step
    if way in ("LE", "GE"):
        bound += 1
    if way not in _SWAPPED or step < 0:
        return None
    return max(0, -(-(bound - start) // step))


def _direction(test: Any) -> str:
    found = re.search(r"\b(LT|LE|GT|GE|EQ|NE)\b", passes.text_of(test, "comparison_direction"))
    return found[1] if found else ""


def _last(block: Any) -> Any:
    return block.operations[len(block.operations) - 1].operation


def _made(value: Any, kind: str) -> Any:
    """The operation that makes a value, if it is of a kind."""
    owner = _owner(value)
    return owner if owner is not None and owner.name == f"stablehlo.{kind}" else None


def _owner(value: Any) -> Any:
    """The operation that makes a value; None for what enters a block."""
    if not hasattr(value, "result_number"):
        return None
    return getattr(value.owner, "operation", value.owner)


def _variable(value: Any, block: Any) -> int | None:
    """The number of a loop's variable."""
    if _owner(value) is None and value.owner == block:
        return value.arg_number
    return None


def _constant(value: Any, loop: Any) -> int | None:
    """The number that a value is."""
    owner = _owner(value)
    if owner is None:
        return _invariant(value, loop)
    if not owner.name.endswith(".constant"):
        return None
    found = _NUMBER.match(passes.text_of(owner, "value"))
    return int(found[1]) if found else None


def _invariant(value: Any, loop: Any) -> int | None:
    """The constant that a loop's variable always is, where the body hands it on as it is."""
    blocks = [*passes.blocks(loop)]
    if value.owner not in blocks:
        return None
    i = value.arg_number
    handed_on = _last(blocks[1]).operands[i]
    if _owner(handed_on) is not None or handed_on != blocks[1].arguments[i]:
        return None
    return _constant(loop.operands[i], loop) if _owner(loop.operands[i]) else None


def _step(value: Any, i: int, body: Any, loop: Any) -> int | None:
    """By how much a variable changes each time."""
    for kind, sign in (("add", 1), ("subtract", -1)):
        change = _made(value, kind)
        if change is None:
            continue
        left, right = change.operands
        if _variable(left, body) == i:
            amount = _constant(right, loop)
        elif kind == "add" and _variable(right, body) == i:
            amount = _constant(left, loop)
        else:
            return None
        return None if amount is None else sign * amount
    return None
