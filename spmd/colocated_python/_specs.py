"""What arrays look like, and what is wrong with them; how errors are told where the arrays are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import platform
import traceback
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr

from spmd import _jax, errors
from spmd._arguments import parse_parameters
from spmd.errors import Failure, SpmdError, explain, show_value


class Leaf(NamedTuple):
    """Shape, dtype and sharding of an array."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any

    def __str__(self) -> str:
        aval = _jax.core.ShapedArray(self.shape, self.dtype)
        return f"{_jax.core.short_aval(aval)} {self.sharding}"

    def struct(self) -> jax.ShapeDtypeStruct:
        """The same for users' functions."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def matches(self, got: Leaf) -> bool:
        """Whether an array like `got` may stand for this."""
        if (self.shape, self.dtype) != (got.shape, got.dtype):
            return False
        return self.sharding == got.sharding or (
            _devices(self) == _devices(got)
            and self.sharding.is_equivalent_to(got.sharding, len(self.shape))
        )


def _devices(leaf: Leaf) -> Any:
    return _jax.dispatch.device_list(leaf.sharding)


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


# Errors


class ColocatedPythonError(SpmdError, RuntimeError):
    """Colocated functions without results raised; the first error is the cause.

    Raised by :func:`barrier`, once for all errors since the last time.
    """

    __module__ = "spmd.colocated_python"


def subject(name: str) -> str:
    """How error texts call a function."""
    return f"colocated_python of `{name}`"


@functools.lru_cache(maxsize=1)
def host() -> str:
    """This host, as errors name it."""
    return f"process {jax.process_index()} ({platform.node()})"


_jax.core.register_cache(host, "host of colocated functions")


def tell(name: str, error: BaseException) -> str:
    """Returns the text of an error that a function raised, for who has only its arrays."""
    if isinstance(error, SpmdError) and str(error).startswith(subject(name)):
        return str(error)
    what = "".join(traceback.format_exception_only(error)).rstrip()
    text = f"{subject(name)} failed on {host()}.\n  {what}"
    frames = traceback.extract_tb(error.__traceback__)
    if users := [f for f in frames if _jax.core.is_user_file(f.filename)]:
        text += "\n" + "".join(traceback.format_list(users)).rstrip()
    return text


def cannot_wrap(wrapper: str, expected: str, got: Any) -> SpmdError:
    """The error of a wrapper that is given something else than a function or a class."""
    failure = Failure(
        what="cannot wrap this", expected=expected, got=show_value(got), error=errors.ArgumentError
    )
    return explain(wrapper, [failure])


def refuse(name: str, *failures: Failure) -> None:
    """Raises what is wrong with a function or with a call of it, if anything is."""
    errors.refuse(subject(name), failures)


# How error texts call leaves


def argument_paths(fun: Callable, tree: Any) -> list[str]:
    """How error texts call the leaves of ``(args, kwargs)``."""
    names = parse_parameters(fun, "colocated_python", (), (), (), ()).names

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


def show_devices(devices: Any) -> str:
    """The devices of a list or a set, by their numbers."""
    kinds = {d.platform for d in devices}
    if isinstance(devices, frozenset):
        devices = sorted(devices, key=lambda d: d.id)
    return f"{', '.join(str(d.id) for d in devices)} ({', '.join(sorted(kinds))})"


# Checks: each returns what is wrong


def not_arrays(leaves: Sequence[Any], paths: Sequence[str], verb: str) -> list[Failure]:
    """Arguments or results that are no arrays with values, or that will have some."""
    return [
        Failure(
            what=f"{verb} {path}",
            expected="a jax.Array",
            got=show_value(x),
            fix="call it outside of jit, grad and vmap, or use spmd.host_callback.call inside"
            if isinstance(x, _jax.core.Tracer)
            else "put it on the devices with jax.device_put(value, sharding)",
        )
        for x, path in zip(leaves, paths, strict=True)
        if not isinstance(x, jax.Array) or isinstance(x, _jax.core.Tracer)
    ]


def gone(leaves: Sequence[Any], paths: Sequence[str]) -> list[Failure]:
    """Arguments whose buffers are not there any more."""
    return [
        Failure(
            what=f"cannot use {path}: its buffers are gone",
            expected="an array that was not donated to an earlier call and not deleted",
            error=errors.DonatedArrayError,
        )
        for x, path in zip(leaves, paths, strict=True)
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
            got=f"devices {show_devices(_devices(leaf))}",
            fix="say which devices: f.specialize(devices=...) takes them in any order"
            if {*_devices(leaf)} == {*devices}
            else "",
        )
        for leaf, path in zip(leaves, paths, strict=True)
        if order(_devices(leaf)) != devices
    ]


def not_specs(leaves: Sequence[Any], paths: Sequence[str], what: str) -> list[Failure]:
    """What should say how an array looks and does not say all of it."""
    return [
        Failure(
            what=f"{what} {path}",
            expected="a jax.ShapeDtypeStruct with a sharding",
            got=show_value(x),
            error=errors.OptionError,
        )
        for x, path in zip(leaves, paths, strict=True)
        if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is None
    ]
