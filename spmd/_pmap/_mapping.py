"""From a function of one device to a function of arrays over all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import jax.tree_util as jtu

from spmd import _jax
from spmd._arguments import join_arguments
from spmd._pmap._levels import Nest, Part
from spmd._pmap._options import PmapOptions
from spmd._spec import ParsedPartitionSpec, broadcast_prefix
from spmd._trace import Signature, no_array
from spmd.errors import Failure, OptionError, SpmdError, explain, refuse


def spec_along(
    axis: int | None, name: Any, inner: dict[int, Hashable] | None = None
) -> ParsedPartitionSpec:
    """The spec of an array whose dimension `axis` is the mapped one; None: all have it whole.

    `inner` has further dimensions with their axes, where inner levels map them.
    """
    names = {**(inner or {}), **({} if axis is None else {axis: name})}
    size = max(names, default=-1) + 1
    partitions = tuple((names[i],) if i in names else () for i in range(size))
    return ParsedPartitionSpec(PartitionSpec(*[p or None for p in partitions]), partitions)


class AxisNameError(SpmdError, NameError):
    """A mapped function names an axis that is not mapped."""

    __module__ = "spmd"


class Mapped:
    """A function of whole arrays, of which each device computes its slice.

    `axes` are those of the leaves; `axis` is that of the mesh of the levels in `nest`. In an inner
    level `parts` say where each leaf comes from.

    Attributes:
        out_axes: After the first call, per leaf of the results where the mapped axis is.
    """

    def __init__(
        self,
        fun: Callable,
        options: PmapOptions,
        signature: Signature,
        axes: Sequence[int | None],
        nest: Nest,
        axis: Hashable,
        parts: Sequence[Part | None] = (),
    ):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._options = options
        self._signature = signature
        self._axes = axes
        self._nest = nest
        self._axis = axis
        self._parts = parts
        self.out_axes: tuple[int | None, ...] = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Computes the results of all devices."""
        name = self._axis
        outs = self._options.out_axes
        # What is counted from the end stands in front until the rank is known.
        out_specs = [spec_along(a and max(a, 0), name).to_partition_spec() for a in outs.leaves]
        on_devices = jax.shard_map(
            self._on_device,
            # Inside of another one the mesh is that of the context.
            mesh=None if self._nest.depth else self._nest.mesh(),
            axis_names={name},
            in_specs=tuple(spec_along(a, name).to_partition_spec() for a in self._axes),
            out_specs=jtu.tree_unflatten(outs.treedef, out_specs),
            check_vma=False,
        )
        results, tree = jtu.tree_flatten(on_devices(*jtu.tree_leaves((args, kwargs))))
        moved = [
            x if a is None else jnp.moveaxis(x, 0, a)
            for x, a in zip(results, self._moves(results), strict=True)
        ]
        return jtu.tree_unflatten(tree, moved)

    def _on_device(self, *leaves: Any) -> Any:
        """Calls the user's function with what one device has."""
        pairs = zip(leaves, self._axes, strict=True)
        slices = [x if a is None else jax.lax.squeeze(x, [a]) for x, a in pairs]
        self._nest.depth += 1
        try:
            return self._call_fun(slices)
        finally:
            self._nest.depth -= 1

    def _call_fun(self, slices: Sequence[Any]) -> Any:
        signature, options = self._signature, self._options
        if not self._nest.innermost:
            slices = [_jax.transform.untyped(x) for x in slices]
        dynamic = jtu.tree_unflatten(signature.tree, slices)
        args, kwargs = join_arguments(signature.positions, signature.statics, dynamic)
        with self._nest.open(self._slice_parts(slices)):
            try:
                results = self._fun(*args, **kwargs)
            except NameError as error:
                if failure := _axis_failure(error, options.axis_name):
                    raise explain(options.subject, [failure]) from error
                raise
        paths, tree = jtu.tree_flatten_with_path(results)
        names = ["result" + jtu.keystr(path) for path, _ in paths]
        values = [value for _, value in paths]
        refuse(options.subject, map(no_array, values, names))
        found = broadcast_prefix(options.out_axes.axes(), tree, "out_axes", "result")
        if isinstance(found, Failure):
            raise explain(options.subject, [found])
        self.out_axes = tuple(axis.value for axis in found)
        refuse(options.subject, map(_range_failure, self.out_axes, values, names))
        stacked = [
            v if a is None else jnp.expand_dims(v, max(a, 0))
            for v, a in zip(values, self.out_axes, strict=True)
        ]
        return jtu.tree_unflatten(tree, stacked)

    def _slice_parts(self, slices: Sequence[Any]) -> list[Part]:
        """Where the slices come from."""
        outermost = self._nest.depth == 1 and self._nest.made is None
        parts = []
        rows = zip(slices, self._axes, self._signature.avals, strict=True)
        for i, (x, axis, aval) in enumerate(rows):
            known = self._parts[i] if self._parts else None
            whole = Part(x, i, tuple(range(aval.ndim))) if outermost else known
            if whole is not None:
                dims = tuple(d for k, d in enumerate(whole.dims) if k != axis)
                parts.append(Part(x, whole.leaf, dims))
        return parts

    def _moves(self, results: Sequence[Any]) -> list[int | None]:
        """Where results have to go whose axis is counted from the end; they get that axis."""
        pairs = zip(results, self.out_axes, strict=True)
        ends = [None if a is None or a >= 0 else a + x.ndim for x, a in pairs]
        self.out_axes = tuple(
            a if e is None else e for a, e in zip(self.out_axes, ends, strict=True)
        )
        return ends


def _range_failure(axis: int | None, value: Any, name: str) -> Failure | None:
    aval = _jax.core.abstractify(value)
    if axis is None or -aval.ndim - 1 <= axis <= aval.ndim:
        return None
    return Failure(
        what=f"cannot put the mapped axis of {name} at {axis}",
        given=f"{_jax.core.short_aval(aval)} on each device",
        expected=f"an axis from {-aval.ndim - 1} to {aval.ndim}",
        error=OptionError,
    )


def _axis_failure(error: NameError, own: str | None) -> Failure | None:
    """Says of an axis that JAX does not know which ones there are; None of another name."""
    found = re.match(r"Found an unbound axis name: ([^\s.]+)\.", str(error))
    if found is None or isinstance(error, AxisNameError):
        return None
    name, bound = found[1], sorted(map(str, _jax.mesh.bound_axes()))
    return Failure(
        what=f"names the axis {name!r}, which nothing around it maps",
        expected=f"one of {', '.join(map(repr, bound))}" if own or len(bound) > 1 else "a name",
        got="no axis_name" if own is None else f"axis_name={own!r}",
        fix=f"pmap(fun, axis_name={name!r})",
        error=AxisNameError,
    )
