"""Marks: values of user code that keep their number on the way into a lowered module.

A mark is a constraint that leaves all dimensions open. Whatever transformation the code is under,
it goes where `with_sharding_constraint` would go, so a module with marks shows what each of them
would do: one is closed to be tried, or taken out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import re
import threading
from typing import Any, NamedTuple

import jax
from jax.extend.mlir import ir

from spmd import _jax
from spmd._mesh import auto_mesh, current_mesh
from spmd._pjit import spmd_axes
from spmd.inspection.shardy import passes

Entries = tuple[tuple[str, ...] | None, ...]
"""Axes by dimension; dimensions past the end are not split."""

P = jax.P

_marking = threading.local()


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Lets `held` mark values, on this thread."""
    _marking.active = True
    try:
        yield
    finally:
        _marking.active = False


def held(number: int, value: Any) -> Any:
    """A value of user code; marked where it is an array whose sharding is open to constraints."""
    if not getattr(_marking, "active", False) or not isinstance(value, _jax.core.Tracer):
        return value
    aval, mesh = jax.typeof(value), current_mesh()
    plain = isinstance(aval, _jax.core.ShapedArray) and aval.ndim > 0
    if not plain or mesh is None or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return value
    if _jax.mesh.manual_axes() or _jax.mesh.has_explicit_type(value):
        return value
    own = tuple(range(aval.ndim))
    return mark_p.bind(value, number=number, own=own, turned=False, mesh=auto_mesh(mesh))


# Parameters
#
# number: of the place in the code
# own:    by dimension, that of the code's own value, or the axes over which `vmap` splits one
# turned: whether it is the cotangent of the value
# mesh:   the plain mesh

mark_p = _jax.core.Primitive("spmd_mark")
mark_p.def_impl(lambda x, **_: x)
mark_p.def_abstract_eval(lambda x, **_: x)


# Lowering

_NAME = "spmd.mark"


def _mark_lower(ctx: Any, x: Any, *, mesh: Any, **params: Any) -> Sequence[Any]:
    aval = ctx.avals_in[0]
    sharding = jax.NamedSharding(mesh, P(*[P.UNCONSTRAINED] * aval.ndim))
    value = _jax.lowering.wrap_with_sharding(ctx, x, aval, ctx.avals_out[0], sharding)
    found = [value, *_jax.lowering.free_in_branch([value])]
    text = json.dumps([params["number"], params["turned"], params["own"]])
    for one in found:
        passes.operation_of(one.owner).attributes[_NAME] = ir.StringAttr.get(text)
    return found[-1:]


_jax.lowering.register_lowering(mark_p, _mark_lower, cacheable=False)


# Batching


def _mark_batch(axis_data: Any, vals: Any, dims: Any, **params: Any) -> Any:
    (x,), (dim,) = vals, dims
    if dim is not None:
        own = params["own"]
        params["own"] = (*own[:dim], spmd_axes(axis_data), *own[dim:])
    return mark_p.bind(x, **params), dim


_jax.transform.fancy_batchers[mark_p] = _mark_batch

# JVP, Transpose


def _mark_transpose(ct: Any, _: Any, **params: Any) -> tuple[Any]:
    return (mark_p.bind(ct, **{**params, "turned": not params["turned"]}),)


_jax.transform.deflinear(mark_p, _mark_transpose)

# Modules with marks


class Mark(NamedTuple):
    """A mark in a module.

    Attributes:
        operation: that it is; one in a branch is a barrier as well, with a mark of its own.
        number: of the place in the code.
        turned: whether it is at a cotangent.
        own: as that of the primitive.
    """

    operation: Any
    number: int
    turned: bool
    own: tuple[int | tuple[str, ...], ...]

    @property
    def is_constraint(self) -> bool:
        """Whether it says where a value lies."""
        return self.operation.name == "sdy.sharding_constraint"

    def entries(self) -> Entries | None:
        """Where the code's own value lies; None where no spec says it."""
        found = passes.sharding_of(self.operation.results[0])
        axes = {d: one.axes for d, one in zip(self.own, found, strict=True) if isinstance(d, int)}
        if any(":(" in axis for of_one in axes.values() for axis in of_one):
            return None
        return trimmed([axes[d] or None for d in sorted(axes)])


def trimmed(entries: Sequence[tuple[str, ...] | None]) -> Entries:
    """Entries without what says nothing at their end."""
    found = [*entries]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def marks_in(operation: Any) -> list[Mark]:
    """The marks inside of an operation, such as a module, in order."""
    return [_read(one) for one in passes.operations_in(operation) if _NAME in one.attributes]


def _read(operation: Any) -> Mark:
    number, turned, own = json.loads(ir.StringAttr(operation.attributes[_NAME]).value)
    return Mark(operation, number, turned, tuple(d if isinstance(d, int) else (*d,) for d in own))


def keep(module: Any, specs: Mapping[int, Entries]) -> None:
    """Makes constraints of the marks of these numbers, and takes all others out."""
    with module.context:
        for one in marks_in(module.operation):
            operation = one.operation
            if one.number not in specs:
                operation.results[0].replace_all_uses_with(operation.operands[0])
                operation.erase()
            elif one.is_constraint:
                operation.attributes["sharding"] = _sharding(one, specs[one.number])


_MESH = re.compile(r"<@[^,]*")


def _sharding(one: Mark, entries: Entries) -> Any:
    """What `with_sharding_constraint` writes: dimensions that `vmap` added stay open."""
    mesh = _MESH.search(passes.text_of(one.operation, "sharding"))
    assert mesh is not None
    full = (*(axes or None for axes in entries), *[None] * len(one.own))
    texts = (_dimension(full[d] if isinstance(d, int) else d) for d in one.own)
    return ir.Attribute.parse(f"#sdy.sharding{mesh[0]}, [{', '.join(texts)}]>")


def _dimension(axes: tuple[str, ...] | None) -> str:
    """An entry; of a dimension that was added and that no axis splits, an open one."""
    return "{?}" if axes == () else "{" + ", ".join(map(passes.quoted, axes or ())) + "}"
