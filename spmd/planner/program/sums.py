"""Products that are added up, added to each other before they are added to anything else.

Each of ``((c + a @ b) + d @ e) + f @ g`` is a sum of its own where the products are split along
what they sum over. In ``c + ((a @ b + d @ e) + f @ g)`` compilers send one. The gradient of what
several products take, such as queries, keys and values, is of the first form in JAX's programs.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from spmd.inspection.shardy import passes

_ADD = "stablehlo.add"
_LINEAR = ("stablehlo.convert", "stablehlo.reshape", "stablehlo.transpose")


def regroup(operation: Any) -> None:
    """Adds products to each other first, in all sums of a module."""
    for root in [one for one in passes.operations_in(operation) if _is_root(one)]:
        adds, terms = _sum_of(root)
        products = [one for one in terms if _is_product(one)]
        others = [one for one in terms if not _is_product(one)]
        if len(products) < 2 or not others:
            continue
        with root.context, root.location, ir.InsertionPoint(root):
            total = _added([_added(others), _added(products)])
        root.results[0].replace_all_uses_with(total)
        for one in adds:
            one.erase()


def _is_root(one: Any) -> bool:
    """Whether it is a sum that is no term of another one."""
    if one.name != _ADD:
        return False
    users = [passes.operation_of(use.owner) for use in one.results[0].uses]
    return not (len(users) == 1 and users[0].name == _ADD and users[0].block == one.block)


def _sum_of(root: Any) -> tuple[list[Any], list[Any]]:
    """The additions of a sum, each before those that it takes, and its terms in order."""
    adds, terms, pending = [root], [], [*root.operands][::-1]
    while pending:
        value = pending.pop()
        maker = passes.maker_of(value)
        inner = maker and maker.name == _ADD and maker.block == root.block
        if inner and passes.is_used_once(value):
            adds.append(maker)
            pending += [*maker.operands][::-1]
        else:
            terms.append(value)
    return adds, terms


def _is_product(value: Any) -> bool:
    """Whether a value is that of a product, and of no other use."""
    while passes.is_used_once(value) and (maker := passes.maker_of(value)):
        if maker.name in passes.PRODUCTS:
            return True
        if maker.name not in _LINEAR:
            return False
        value = maker.operands[0]
    return False


def _added(values: list[Any]) -> Any:
    return functools.reduce(stablehlo.add, values)
