"""The functions that a module calls, in the places of their calls."""

from __future__ import annotations

import re
from typing import Any

from jax.extend.mlir import ir

from spmd.inspection.shardy import passes

CALL = "func.call"

#: MLIR numbers functions of one name.
_LOOPS_OWN = re.compile(r"dynamic_(?:update_)?index_in_dim(?:_\d+)?")


def inline(module: Any) -> None:
    """Puts the operations of functions in the places of all calls, as XLA does early.

    A place goes otherwise into a function, and comes otherwise out of it, than it goes on between
    operations.
    """
    functions = passes.functions(module)
    main = functions.pop("main")
    pending = _calls_in(main)
    while pending:
        call = pending.pop()
        function = functions[passes.callee_of(call)].clone().operation
        pending += _calls_in(function)
        _replace(call, function)
    for function in functions.values():
        function.erase()


def _calls_in(operation: Any) -> list[Any]:
    found: list[Any] = []

    def keep(one: Any) -> Any:
        if one.name == CALL:
            found.append(one)
        return ir.WalkResult.ADVANCE

    operation.walk(keep)
    return found


def _replace(call: Any, function: Any) -> None:
    """Puts the operations of a function of its own in the place of a call."""
    block = passes.block_of(function)
    for argument, operand in zip(block.arguments, call.operands, strict=True):
        argument.replace_all_uses_with(operand)
    outer = passes.op_name_of(call.location)
    is_loops = _LOOPS_OWN.fullmatch(passes.callee_of(call)) is not None
    *operations, end = (view.operation for view in block.operations)
    for one in operations:
        one.location = _within(one.location, call.location, outer, is_loops)
        one.move_before(call)
    for result, given in zip(call.results, end.operands, strict=True):
        result.replace_all_uses_with(given)
    call.erase()


def _within(own: Any, call: Any, outer: str, is_loops: bool) -> Any:
    """The location of an operation of a function, in the place of its call.

    JAX lowers such a function once: its operations have the frames and the name stack from there
    on, and the call has the rest. What takes loops' arrays apart, or stacks them, JAX traces once
    in a process, with the frames of the loop that came first.
    """
    frames = call if is_loops else ir.Location.callsite(own, [call])
    return ir.Location.name(passes.joined(outer, passes.op_name_of(own)), frames)
