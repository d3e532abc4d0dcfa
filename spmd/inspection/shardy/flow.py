"""Where the values of a lowered module go, and how often its loops run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
import itertools
import re
from typing import Any

from spmd.inspection.hlo.loops import count_trips
from spmd.inspection.shardy import passes

#: What puts elements elsewhere and leaves them as they are.
MOVES = frozenset(
    (
        *("stablehlo.transpose", "stablehlo.reshape", "stablehlo.broadcast_in_dim"),
        *("stablehlo.select", "stablehlo.slice", "stablehlo.dynamic_slice"),
        *("stablehlo.dynamic_update_slice", "stablehlo.concatenate", "stablehlo.all_gather"),
        *("stablehlo.collective_permute", "stablehlo.all_to_all", "sdy.all_gather"),
        *("sdy.all_slice", "sdy.all_to_all", "sdy.collective_permute"),
        *("sdy.sharding_constraint", "stablehlo.optimization_barrier"),
    )
)


class Flow:
    """The uses of values in a program without calls."""

    def __init__(self) -> None:
        self._without: dict[frozenset[str], set[Any]] = {}

    def uses(self, value: Any) -> Iterator[tuple[Any, int]]:
        """The operations that compute with a value, each with the number of its operand.

        What loops and manual computations do with it counts, and not they themselves. A
        result of the program is used by the ``func.return`` that gives it.
        """
        yield from ((user, i) for user, i, ways in self._steps(value) if not ways)

    def loops(self, value: Any) -> list[Any]:
        """The loops that take a value on to their next turn."""
        steps = (user for user, _, _ in self._steps(value) if user.name == "stablehlo.return")
        holders = (passes.operation_of(one.parent) for one in steps)
        return [one for one in holders if one.name == "stablehlo.while"]

    def ends(self, value: Any) -> Iterator[tuple[Any, int]]:
        """The uses of a value wherever it is moved, those that only move it left out."""
        yield from ((user, i) for user, i, ways in self._steps(value, moved=True) if not ways)

    def reaches(self, value: Any, names: Collection[str]) -> bool:
        """Whether any operation of these names depends on a value."""
        known = self._without.setdefault(frozenset(names), set())
        seen: set[Any] = set()
        pending = [value]
        while pending:
            one = pending.pop()
            if one in seen or one in known:
                continue
            seen.add(one)
            for use in one.uses:
                user, i = passes.user_of(use)
                if user.name in names:
                    return True
                pending += self._ways(user, i) or user.results
        known |= seen
        return False

    def _steps(self, value: Any, moved: bool = False) -> Iterator[tuple[Any, int, list[Any]]]:
        """Each use on all ways of a value, through what moves it if `moved`, and its names then."""
        seen: set[Any] = set()
        pending = [value]
        while pending:
            one = pending.pop()
            if one in seen:
                continue
            seen.add(one)
            for use in one.uses:
                user, i = passes.user_of(use)
                ways = [*user.results] if moved and user.name in MOVES else self._ways(user, i)
                pending += ways
                yield user, i, ways

    def _ways(self, user: Any, i: int) -> list[Any]:
        """What a value is called where it enters or leaves a part of the program."""
        match user.name:
            case "stablehlo.while":
                return [block.arguments[i] for block in passes.blocks(user)]
            case passes.MANUAL:
                return [passes.block_of(user).arguments[i]]
            case "sdy.return":
                return [user.parent.results[i]]
            case "stablehlo.return":
                return _left(user, i)
        return []


def _left(user: Any, i: int) -> list[Any]:
    """What a loop or branch calls a value that its block gives; nothing for other blocks."""
    holder = passes.operation_of(user.parent)
    if holder.name in ("stablehlo.if", "stablehlo.case"):
        return [holder.results[i]]
    if holder.name != "stablehlo.while" or user.operands[i].type != holder.results[i].type:
        return []
    again = (block.arguments[i] for block in passes.blocks(holder))
    return [holder.results[i], *again]


# Loops

_NUMBER = re.compile(r"dense<(-?\d+)>")
_WAY = re.compile(r"\b(LT|LE|GT|GE)\b")
_SWAPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


def trip_count(loop: Any) -> int | None:
    """The executions of a loop's body; None where the data decide, or the form is another one.

    A counted loop compares one of its variables with a constant. The variable starts at a constant
    and changes by the same each time.
    """
    condition, body = passes.blocks(loop)
    test = _made(passes.end_of(condition).operands[0], "compare")
    if test is None:
        return None
    found = _WAY.search(passes.text_of(test, "comparison_direction"))
    way = found[1] if found else ""
    left, right = test.operands
    if _variable(left, condition) is None:
        left, right, way = right, left, _SWAPPED.get(way, "")
    i, bound = _variable(left, condition), _constant(right, loop)
    if i is None or bound is None:
        return None
    start = _constant(loop.operands[i], loop)
    step = _step(passes.end_of(body).operands[i], i, body, loop)
    return None if start is None or not step else count_towards(way, start, bound, step)


def count_towards(way: str, start: int, bound: int, step: int) -> int | None:
    """How often a loop runs whose variable moves to its bound; None where it moves away."""
    towards = (step > 0) == (way in ("LT", "LE"))
    return count_trips(start, bound, step, way) if towards else None


def _maker(value: Any) -> Any:
    """The operation that makes a value, whatever propagation adds; None for what enters a block."""
    return passes.maker_of(value, through="sdy.data_flow_edge")


def _made(value: Any, kind: str) -> Any:
    """The operation that makes a value, if it is of a kind."""
    maker = _maker(value)
    return maker if maker is not None and maker.name == f"stablehlo.{kind}" else None


def _variable(value: Any, block: Any) -> int | None:
    """The number of a loop's variable."""
    own = passes.maker_of(value) is None and value.owner == block
    return value.arg_number if own else None


def _constant(value: Any, loop: Any) -> int | None:
    """The number that a value is."""
    maker = _maker(value)
    if maker is None:
        return _invariant(value, loop)
    found = _NUMBER.match(passes.text_of(maker, "value"))
    return int(found[1]) if found and maker.name.endswith(".constant") else None


def _invariant(value: Any, loop: Any) -> int | None:
    """The constant that a loop's variable always is, where the body hands it on as it is."""
    blocks = [*passes.blocks(loop)]
    if value.owner not in blocks:
        return None
    i, body = value.arg_number, blocks[1]
    start, kept = loop.operands[i], _variable(passes.end_of(body).operands[i], body) == i
    return _constant(start, loop) if kept and _maker(start) else None


def _step(value: Any, i: int, body: Any, loop: Any) -> int | None:
    """By how much a variable changes each time."""
    if (change := _made(value, "subtract")) and _variable(change.operands[0], body) == i:
        amount = _constant(change.operands[1], loop)
        return None if amount is None else -amount
    if change := _made(value, "add"):
        for one, other in itertools.permutations(change.operands):
            if _variable(one, body) == i:
                return _constant(other, loop)
    return None
