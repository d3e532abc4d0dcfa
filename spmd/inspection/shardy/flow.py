"""Where the values of a lowered module go, through calls, loops and branches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
    """The uses of values in a module of functions that call each other."""

    def __init__(self, functions: Mapping[str, Any]):
        self.functions = functions
        self.calls: dict[str, list[Any]] = {}
        for function in functions.values():
            for one in passes.operations_in(function):
                if one.name == "func.call":
                    self.calls.setdefault(passes.callee_of(one), []).append(one)

    def uses(self, value: Any) -> Iterator[tuple[Any, int]]:
        """The operations that compute with a value, each with the number of its operand.

        What calls, loops and manual computations do with it counts, and not they themselves. A
        result of the program is used by the ``func.return`` that gives it.
        """
        yield from ((user, i) for user, i, ways in self._steps(value) if not ways)

    def loops(self, value: Any) -> list[Any]:
        """The loops that take a value on to their next turn."""
        steps = (user for user, _, _ in self._steps(value) if user.name == "stablehlo.return")
        holders = (getattr(one.parent, "operation", one.parent) for one in steps)
        return [one for one in holders if one.name == "stablehlo.while"]

    def ends(self, value: Any) -> Iterator[tuple[Any, int]]:
        """The uses of a value wherever it is moved, those that only move it left out."""
        yield from ((user, i) for user, i, ways in self._steps(value, moved=True) if not ways)

    def _steps(self, value: Any, moved: bool = False) -> Iterator[tuple[Any, int, list[Any]]]:
        """Each use on all ways of a value, and what the value is called after it.

        Args:
            value: of the module.
            moved: whether to follow it through what moves it.
        """
        seen: set[Any] = set()
        pending = [value]
        while pending:
            one = pending.pop()
            if one in seen:
                continue
            seen.add(one)
            for use in one.uses:
                user, i = getattr(use.owner, "operation", use.owner), use.operand_number
                ways = [*user.results] if moved and user.name in MOVES else self._ways(user, i)
                pending += ways
                yield user, i, ways

    def _ways(self, user: Any, i: int) -> list[Any]:
        """What a value is called where it enters or leaves a part of the program."""
        match user.name:
            case "func.call":
                function = self.functions[passes.callee_of(user)]
                return [passes.block_of(function).arguments[i]]
            case "stablehlo.while":
                return [block.arguments[i] for block in passes.blocks(user)]
            case "sdy.manual_computation" | "sdy.named_computation":
                return [passes.block_of(user).arguments[i]]
            case "func.return":
                name = passes.name_of(user.parent)
                return [call.results[i] for call in self.calls.get(name, ())]
            case "sdy.return":
                return [user.parent.results[i]]
            case "stablehlo.return":
                return _left(user, i)
        return []


def _left(user: Any, i: int) -> list[Any]:
    """What a loop or branch calls a value that its block gives; nothing for other blocks."""
    holder = getattr(user.parent, "operation", user.parent)
    if holder.name in ("stablehlo.if", "stablehlo.case"):
        return [holder.results[i]]
    if holder.name != "stablehlo.while" or user.operands[i].type != holder.results[i].type:
        return []
    again = (block.arguments[i] for block in passes.blocks(holder))
    return [holder.results[i], *again]
