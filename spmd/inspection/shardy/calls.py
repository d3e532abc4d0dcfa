"""The functions that a module calls, in the places of their calls."""

from __future__ import annotations

import re
from typing import Any

from jax.extend.mlir import ir, passmanager

from spmd.inspection.shardy import passes

CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""Operations that stand for those of a function, and the attribute that names it."""

#: MLIR numbers functions of one name.
_LOOPS_OWN = re.compile(r"dynamic_(?:update_)?index_in_dim(?:_\d+)?")


def inline(module: Any) -> None:
    """Puts the operations of functions in the places of all calls, as XLA does early.

    A place goes otherwise into a function, and comes otherwise out of it, than it goes on between
    operations. Functions that an operation calls for each element, say, stay.
    """
    functions = passes.functions(module)
    pending = _calls_in(functions["main"])
    while pending:
        call = pending.pop()
        name = callee_of(call)
        function = functions[name].clone().operation
        pending += _calls_in(function)
        _replace(call, name, function)
    manager = passmanager.PassManager.parse("builtin.module(symbol-dce)")
    # A plan's constraints in functions that a `shard_map` calls may name its axes.
    manager.enable_verifier(False)
    manager.run(module)


def _calls_in(operation: Any) -> list[Any]:
    return [one for one in passes.all_in(operation) if one.name in CALLS]


def callee_of(call: Any) -> str:
    """The name of the function that a call stands for."""
    return passes.text_of(call, CALLS[call.name]).removeprefix("@").strip('"')


def _replace(call: Any, name: str, function: Any) -> None:
    """Puts the operations of a function of its own in the place of a call."""
    block = passes.block_of(function)
    for argument, operand in zip(block.arguments, call.operands, strict=True):
        argument.replace_all_uses_with(operand)
    outer = passes.op_name_of(call.location)
    is_loops = _LOOPS_OWN.fullmatch(name) is not None
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
