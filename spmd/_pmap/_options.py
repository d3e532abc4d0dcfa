"""What is said of a `pmap` at decoration, and what it means for the arguments of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.tree_util as jtu
import numpy as np

from spmd import _jax
from spmd._arguments import Parameters, parse_parameters
from spmd._binding import Flat
from spmd._spec import broadcast_prefix
from spmd._trace import Signature
from spmd.errors import ArgumentError, Failure, OptionError, explain, refuse, show_value

#: The name of an axis that the user has not named.
UNNAMED = "pmap"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTree:
    """A parsed `in_axes` or `out_axes`; each leaf stands for all leaves below it.

    Attributes:
        leaves: Per leaf an axis, negative ones counted from the end, or None.
        treedef: The structure; None is a leaf.
    """

    leaves: tuple[int | None, ...]
    treedef: Any

    def axes(self) -> Any:
        """The tree, with one-element tuples as leaves: JAX takes None for an empty tree."""
        return jtu.tree_unflatten(self.treedef, [_Axis(a) for a in self.leaves])


@dataclass(frozen=True, slots=True)
class _Axis:
    value: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PmapOptions:
    """Everything that was said at decoration.

    Attributes:
        name: Name of the function.
        axis_name: Name of the mapped axis, or None.
        in_axes: Which axis of each argument is mapped.
        out_axes: Where it stands in each result.
        params: The parameters; keyword arguments stay where they are.
        devices: The devices to run on, or None.
        backend: The platform to run on, or None.
        axis_size: The size of the mapped axis, or None.
        global_arg_shapes: Per positional argument the shape of an element, or None.
    """

    name: str
    axis_name: str | None
    in_axes: AxisTree
    out_axes: AxisTree
    params: Parameters
    devices: tuple[Any, ...] | None
    backend: str | None
    axis_size: int | None
    global_arg_shapes: tuple[tuple[int, ...] | None, ...] | None

    #: What to declare an argument static with.
    static_option: ClassVar[str] = "static_broadcasted_argnums"

    @property
    def positional_semantics(self) -> str:
        """Of several processes each passes and gets its own part."""
        return "global" if jax.process_count() == 1 else "local"

    @property
    def subject(self) -> str:
        """The first words of a message."""
        return f"pmap of `{self.name}`"


def parse(
    fun: Callable,
    *,
    axis_name: Any,
    in_axes: Any,
    out_axes: Any,
    static_broadcasted_argnums: Any,
    devices: Any,
    backend: str | None,
    axis_size: int | None,
    donate_argnums: Any,
    global_arg_shapes: Any,
) -> PmapOptions:
    """Reads everything that can be read without arguments."""
    name = _jax.core.fun_name(fun)
    subject = f"pmap of `{name}`"
    static = PmapOptions.static_option
    params = parse_parameters(
        fun, subject, static_broadcasted_argnums, (), donate_argnums, (), static
    )
    # Here an argument that is passed by name is no positional one.
    params = replace(params, own=None, static_names=(), donate_names=())
    failures: list[Failure | None] = []
    trees = [
        _parse_axes(option, tuple(tree) if isinstance(tree, list) else tree, failures)
        for option, tree in (("in_axes", in_axes), ("out_axes", out_axes))
    ]
    failures += [_name_failure(axis_name), _axis_size_failure(axis_size)]
    failures += [*_devices_failures(devices), _shapes_failure(global_arg_shapes)]
    refuse(subject, failures)
    return PmapOptions(
        name=name,
        axis_name=axis_name,
        in_axes=trees[0],
        out_axes=trees[1],
        params=params,
        devices=None if devices is None else tuple(devices),
        backend=backend,
        axis_size=None if axis_size is None else int(axis_size),
        global_arg_shapes=_shapes(global_arg_shapes),
    )


def _shapes(given: Any) -> tuple[tuple[int, ...] | None, ...] | None:
    if given is None:
        return None
    return tuple(None if s is None else tuple(int(n) for n in s) for s in given)


def _shapes_failure(given: Any) -> Failure | None:
    try:
        _shapes(given)
    except (TypeError, ValueError):
        return Failure(
            what="cannot read global_arg_shapes",
            expected="per positional argument the shape of one element, or None",
            got=show_value(given),
            error=ArgumentError,
        )
    return None


def _parse_axes(name: str, tree: Any, failures: list[Failure | None]) -> AxisTree:
    paths, treedef = jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    failures += [
        Failure(
            what=f"cannot read {name}{jtu.keystr(path)}",
            expected="the number of an axis, or None",
            got=show_value(leaf),
            error=ArgumentError,
        )
        for path, leaf in paths
        if leaf is not None and not is_integer(leaf)
    ]
    leaves = [leaf if not isinstance(leaf, np.integer) else int(leaf) for _, leaf in paths]
    return AxisTree(leaves=tuple(leaves), treedef=treedef)


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number, and no truth value."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _name_failure(axis_name: Any) -> Failure | None:
    if axis_name is None or isinstance(axis_name, str):
        return None
    return Failure(
        what="cannot use this axis_name",
        expected="a string, or None",
        got=show_value(axis_name),
        error=ArgumentError,
    )


def _axis_size_failure(axis_size: Any) -> Failure | None:
    if axis_size is None or (is_integer(axis_size) and axis_size > 0):
        return None
    return Failure(
        what="cannot map over an axis of this size",
        given=f"axis_size={axis_size!r}"[:100],
        expected="a positive integer",
        error=OptionError if is_integer(axis_size) else ArgumentError,
    )


def _devices_failures(devices: Any) -> Iterator[Failure]:
    if devices is None:
        return
    if not len(devices):
        yield Failure(
            what="has no device to run on",
            given=f"devices={devices!r}",
            expected="at least one device, or None for those of the backend",
            error=OptionError,
        )
    yield from repeated_devices(devices, given=f"devices= with {len(devices)}")


def repeated_devices(devices: Sequence[Any], given: str = "") -> list[Failure]:
    """A failure for each device that is there more than once; `given` is what a user wrote."""
    twice = [d for d in dict.fromkeys(devices) if [*devices].count(d) > 1]
    expected = "each device once"
    return [
        Failure(what=f"has {d} twice", given=given, expected=expected, error=OptionError)
        for d in twice
    ]


# One call


def find_mapping(options: PmapOptions, signature: Signature) -> tuple[tuple[int | None, ...], int]:
    """Returns which axis of each leaf is mapped, not negative, or None; and the size."""
    axes = leaf_axes(options, signature)
    rows = list(zip(axes, signature.avals, signature.arg_names, strict=True))
    refuse(options.subject, [_range_failure(*row) for row in rows])
    found = tuple(a if a is None or a >= 0 else a + aval.ndim for a, aval, _ in rows)
    sizes = [
        (aval.shape[a], a, name)
        for a, (_, aval, name) in zip(found, rows, strict=True)
        if a is not None
    ]
    elements = _element_failures(options, signature, found)
    refuse(options.subject, [_sizes_failure(options, sizes), *elements])
    return found, sizes[0][0] if options.axis_size is None else options.axis_size


def _element_failures(
    options: PmapOptions, signature: Signature, axes: Sequence[int | None]
) -> list[Failure]:
    """Compares arguments with `global_arg_shapes`: an entry stands for all leaves of its own."""
    if options.global_arg_shapes is None:
        return []
    shapes = dict(enumerate(options.global_arg_shapes))
    args = zip(signature.positions, signature.tree.children()[0].children(), strict=True)
    told = [shapes.get(i) for i, arg in args for _ in range(arg.num_leaves)]
    # What is passed by name comes last, and has no entry.
    rows = zip(signature.arg_names, signature.avals, axes, told, strict=False)
    elements = [
        (name, tuple(n for i, n in enumerate(aval.shape) if i != axis), shape)
        for name, aval, axis, shape in rows
    ]
    return [
        Failure(
            what=f"was told another shape of argument {name}",
            expected=f"elements of shape {expected}, from global_arg_shapes",
            got=f"elements of shape {got}",
            fix="leave global_arg_shapes out: an element is never split between processes here",
            error=OptionError,
        )
        for name, got, expected in elements
        if expected not in (None, got)
    ]


def leaf_axes(options: PmapOptions, signature: Signature) -> tuple[int | None, ...]:
    """Returns per leaf of the arguments the axis that `in_axes` says, negative ones as they are."""
    args, kwargs = signature.tree.children()
    tree = options.in_axes.axes()
    if isinstance(tree, tuple) and options.params.static_nums:
        # The entries count static arguments, too.
        tree = tuple(tree[i] for i in signature.positions if i < len(tree))
    found = broadcast_prefix(tree, args, "in_axes", "args")
    if isinstance(found, Failure):
        by_name = "leave out what is passed by name: that is mapped over its axis 0"
        fix = by_name if kwargs.num_leaves else found.fix
        raise explain(options.subject, [replace(found, fix=fix)])
    return (*(axis.value for axis in found), *(0 for _ in range(kwargs.num_leaves)))


def _range_failure(axis: int | None, aval: Any, name: str) -> Failure | None:
    if axis is None or -aval.ndim <= axis < aval.ndim:
        return None
    return Failure(
        what=f"cannot map argument {name} over axis {axis}",
        expected=f"an axis of {_jax.core.short_aval(aval)}",
        got="a scalar" if not aval.ndim else f"{aval.ndim} axes",
        fix="say None in in_axes for what all devices get whole" if not aval.ndim else "",
        error=OptionError,
    )


def _sizes_failure(options: PmapOptions, sizes: Sequence[tuple[int, int, str]]) -> Failure | None:
    wanted = options.axis_size
    if not sizes and wanted is None:
        return Failure(
            what="maps nothing: no argument has an axis to map",
            expected="at least one argument without None in in_axes, or axis_size",
            error=OptionError,
        )
    if sizes and sizes[0][0] == 0:
        return Failure(
            what=f"cannot map argument {sizes[0][2]} over an axis of size 0",
            expected="at least one element",
            error=OptionError,
        )
    if len({size for size, *_ in sizes} | ({wanted} - {None})) <= 1:
        return None
    rows = [f"argument {name}: {size} along axis {axis}" for size, axis, name in sizes]
    return Failure(
        what="cannot map over axes of different sizes",
        expected="one size" if wanted is None else f"axis_size={wanted}",
        got="\n".join(rows[:20] + [f"and {len(rows) - 20} more"] * (len(rows) > 20)),
        error=OptionError,
    )


# One call of several processes


def globally(options: PmapOptions, flat: Flat) -> Flat:
    """Says what the arguments of one process are parts of; what is global already stays.

    The values become global when the mesh is known, by their semantics.
    """
    processes = jax.process_count()
    is_local = [_is_local(x) for x in flat.leaves]
    own = None if options.axis_size is None else max(1, options.axis_size // processes)
    part = _scaled(options, flat.signature, [not local for local in is_local], 1, processes)
    find_mapping(replace(options, axis_size=own), part)
    return replace(
        flat,
        signature=_scaled(options, flat.signature, is_local, processes, 1),
        semantics=tuple("local" if local else "global" for local in is_local),
    )


def _is_local(value: Any) -> bool:
    if isinstance(value, _jax.core.Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def _scaled(
    options: PmapOptions, signature: Signature, which: Sequence[bool], times: int, over: int
) -> Signature:
    """The signature with other sizes of the mapped axis in some of the leaves."""
    avals = []
    rows = zip(signature.avals, leaf_axes(options, signature), which, strict=True)
    for aval, axis, chosen in rows:
        shape = [*aval.shape]
        if chosen and axis is not None and -aval.ndim <= axis < aval.ndim:
            shape[axis] = shape[axis] * times // over
        avals.append(aval.update(shape=tuple(shape)))
    return replace(signature, avals=tuple(avals))
