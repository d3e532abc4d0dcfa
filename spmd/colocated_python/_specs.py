"""What arrays look like: specs of arguments and results, and what differs from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import inspect
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr

from spmd import _jax
from spmd.errors import DonatedArrayError, Failure, OptionError, ShardingError, show_value


class Leaf(NamedTuple):
    """Shape, dtype and sharding of an array."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any

    def __str__(self) -> str:
        return (
            f"{_jax.core.short_aval(_jax.core.ShapedArray(self.shape, self.dtype))} {self.sharding}"
        )

    def struct(self) -> jax.ShapeDtypeStruct:
        """The same for users' functions."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def matches(self, got: Leaf) -> bool:
        """Whether an array like `got` may stand for this."""
        return (
            self.shape == got.shape
            and self.dtype == got.dtype
            and (self.sharding == got.sharding or self._is_split_like(got))
        )

    def _is_split_like(self, got: Leaf) -> bool:
        mine, other = (
            _jax.dispatch.device_list(self.sharding),
            _jax.dispatch.device_list(got.sharding),
        )
        return mine == other and self.sharding.is_equivalent_to(got.sharding, len(self.shape))


class Specs(NamedTuple):
    """A tree and its leaves; hashable, since treedefs and shardings are."""

    tree: Any
    leaves: tuple[Leaf, ...]

    def structs(self) -> Any:
        """The tree for users' functions."""
        return self.tree.unflatten([leaf.struct() for leaf in self.leaves])


def leaf_of(x: Any) -> Leaf:
    """What an array looks like."""
    return Leaf(x.shape, x.dtype, x.sharding)


def is_array(x: Any) -> bool:
    """Whether something is an array with values, or that will have some."""
    return isinstance(x, jax.Array) and not isinstance(x, _jax.core.Tracer)


# Names of leaves


def _parameters(fun: Callable) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # a function written in C may have none
        return ()
    return tuple(p.name for p in parameters if p.kind in kinds)


def argument_paths(fun: Callable, tree: Any) -> list[str]:
    """How error texts call the leaves of ``(args, kwargs)``."""
    names = _parameters(fun)

    def show(path: Any) -> str:
        if path[0].idx == 1:
            name = str(path[1].key)
        else:
            i = path[1].idx
            name = names[i] if i < len(names) else f"args[{i}]"
        return f"argument {name}{keystr(path[2:])}"

    return [show(path) for path in _paths(tree)]


def result_paths(tree: Any) -> list[str]:
    """How error texts call the leaves of a result."""
    return [f"result{keystr(path)}" for path in _paths(tree)]


def _paths(tree: Any) -> list[Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree.unflatten([0] * tree.num_leaves))
    return [path for path, _ in flat]


# Checks: each returns what is wrong


def not_arrays(leaves: Sequence[Any], paths: Sequence[str], verb: str) -> list[Failure]:
    """Arguments or results that are no arrays."""
    return [_not_an_array(x, f"{verb} {p}") for x, p in zip(leaves, paths, strict=True)
            if not is_array(x)]  # fmt: skip


def _not_an_array(x: Any, what: str) -> Failure:
    fix = "put it on the devices with jax.device_put(value, sharding)"
    if isinstance(x, _jax.core.Tracer):
        fix = "call it outside of jit, grad and vmap, or use spmd.host_callback.call inside"
    return Failure(
        what=what, expected="a jax.Array", got=show_value(x), fix=fix, error=ShardingError
    )


def gone(leaves: Sequence[Any], paths: Sequence[str]) -> list[Failure]:
    """Arguments whose buffers are not there any more."""
    return [
        Failure(
            what=f"cannot use {p}: its buffers are gone",
            expected="an array that was not donated to an earlier call and not deleted",
            error=DonatedArrayError,
        )
        for x, p in zip(leaves, paths, strict=True)
        if x.is_deleted()
    ]


def other_tree(expected: Any, got: Any, what: str) -> list[Failure]:
    """Trees that differ."""
    if expected == got:
        return []
    return [Failure(what=what, expected=str(expected), got=str(got))]


def mismatches(
    expected: Sequence[Leaf], got: Sequence[Leaf], paths: Sequence[str], verb: str
) -> list[Failure]:
    """Leaves that are not as they were said to be."""
    return [
        Failure(what=f"{verb} {path}", expected=str(e), got=str(g))
        for e, g, path in zip(expected, got, paths, strict=True)
        if not e.matches(g)
    ]


def elsewhere(
    devices: Any, leaves: Sequence[Leaf], paths: Sequence[str], verb: str
) -> list[Failure]:
    """Leaves that lie on other devices than those of a list, or a set: they have no order."""
    order = frozenset if isinstance(devices, frozenset) else lambda found: found
    return [
        Failure(
            what=f"{verb} {path}: it is on other devices",
            expected=f"devices {show_devices(devices)}",
            got=f"devices {show_devices(_jax.dispatch.device_list(leaf.sharding))}",
            fix=_IN_ANY_ORDER
            if set(_jax.dispatch.device_list(leaf.sharding)) == set(devices)
            else "",
        )
        for leaf, path in zip(leaves, paths, strict=True)
        if order(_jax.dispatch.device_list(leaf.sharding)) != devices
    ]


_IN_ANY_ORDER = "say which devices: f.specialize(devices=...) takes them in any order"


def show_devices(devices: Any) -> str:
    """The devices of a list or a set, by their numbers."""
    kinds = {d.platform for d in devices}
    if isinstance(devices, frozenset):
        devices = sorted(devices, key=lambda d: d.id)
    return f"{', '.join(str(d.id) for d in devices)} ({', '.join(sorted(kinds))})"


def not_specs(leaves: Sequence[Any], paths: Sequence[str], what: str) -> list[Failure]:
    """What should say how an array looks and does not say all of it."""
    return [
        Failure(
            what=f"{what} {path}",
            expected="a jax.ShapeDtypeStruct with a sharding",
            got=show_value(x),
            error=OptionError,
        )
        for x, path in zip(leaves, paths, strict=True)
        if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is None
    ]
