"""Name stacks, as JAX writes them into a compiled program, cut into the parts that a user named."""

from __future__ import annotations

from collections.abc import Iterator, Set
import re

from spmd.inspection.records.report import Collective

# Transformations and calls that JAX writes around a name.
_WRAPPERS = {
    "jit", "pjit", "jvp", "transpose", "vmap", "pmap", "remat", "checkpoint", "custom_jvp",
    "custom_vjp", "shard_map",
}  # fmt: skip
_FUNCTIONS = frozenset({"jit", "pjit"})
_WRAPPED = re.compile(r"(\w+)\((.*)\)$", re.DOTALL)

# Steps into a sub-program, which say how a function is built and not where in the model it is.
# Their names change between releases of JAX: `closed_call` of 0.10 is `eval_jaxpr` in 0.12.
_STRUCTURE = re.compile(
    r"while|body|cond|scan|closed_call|eval_jaxpr|call|core_call|core_closed_call|pjit|shard_map"
    r"|checkpoint|remat2?|rematted_computation|custom_(?:jvp|vjp)_call(?:_jaxpr)?|branch_\d+_fun"
)
_NO_MODULE = re.compile(rf"{_STRUCTURE.pattern}|p?jit\(.*\)|[^/]*->[^/]*", re.DOTALL)
# A layer's number: `layer_3`, `h.3`, `blocks[3]`, `fc1`; but not the digit of `conv2d`.
_NUMBER = re.compile(r"\d+(?![A-Za-z0-9])")
# An operation's own name keeps its digits (`exp2`), but not the compiler's or an index (`add.7`).
_INDEX = re.compile(r"(?<=[.\[_])\d+(?![A-Za-z0-9])")

# The operation's own name is that of an exchange in JAX.
_WRITTEN = re.compile(
    r"(?:^|/)(?:psum|pmax|pmin|ppermute|pbroadcast|all_gather|reduce_scatter|all_to_all)"
    r"(?:_invariant|_reduced)?\d*$"
)


def is_written(op_name: str) -> bool:
    """Whether a name stack is that of an exchange which the user wrote, such as a ``psum``."""
    return _WRITTEN.search(op_name) is not None


def components(op_name: str) -> tuple[str, ...]:
    """The parts of a name stack without the transformations around them.

    ``jit(step)/transpose(jvp(attention))/dot_general`` gives ``step``, ``attention`` and
    ``dot_general``.
    """
    return tuple(_components(op_name, _WRAPPERS))


def _components(path: str, wrappers: Set[str]) -> Iterator[str]:
    for part in _split(path):
        wrapped = _WRAPPED.match(part)
        if wrapped and wrapped[1] in wrappers:
            yield from _components(wrapped[2], wrappers)
        elif part:
            yield part


def _split(path: str, separator: str = "/") -> Iterator[str]:
    # A scope may hold a slash inside of `jvp(...)`, and an argument's path one inside of a string.
    depth, start = 0, 0
    for i, char in enumerate(path):
        depth += (char in "([") - (char in ")]")
        if char == separator and depth <= 0:
            yield path[start:i]
            start = i + 1
    yield path[start:]


def stacks(one: Collective) -> list[str]:
    """The name stacks of all exchanges that were combined into one collective, in their order."""
    if one.parts:
        return [part.op_name for part in one.parts]
    return joined(one.op_name) if one.combined > 1 else [one.op_name]


def joined(op_name: str) -> list[str]:
    """The name stacks in the name of a combined collective.

    On CPU, XLA joins them by colons and takes out what they have in common, as in
    ``jit(step)/(jvp(a)/add:jvp(b)/add)``; on TPU it keeps the first alone.
    """
    return list(_expand(op_name))


def _expand(path: str) -> Iterator[str]:
    alternatives = list(_split(path, ":"))
    if len(alternatives) > 1:
        for alternative in alternatives:
            yield from _expand(alternative)
        return
    parts = list(_split(path))
    for i, part in enumerate(parts):
        inner = list(_split(part[1:-1], ":")) if part[:1] == "(" and part[-1:] == ")" else []
        if len(inner) > 1:
            for alternative in inner:
                yield from _expand("/".join([*parts[:i], alternative, *parts[i + 1 :]]))
            return
    yield path


def place(op_name: str) -> str:
    """The part of a name stack that stays the same from layer to layer and from run to run.

    ``jit(step)/jvp(layer_3)/while/body/closed_call/attention/dot_general`` gives
    ``layer_*/attention/dot_general``. Without any name it is ``-``.
    """
    own = re.match(r"p?jit\([^/]*\)/", op_name)
    *scopes, leaf = components(op_name[own.end() :] if own else op_name) or ("-",)
    kept = [_NUMBER.sub("*", s) for s in scopes if not _STRUCTURE.fullmatch(s)]
    return "/".join([*kept, _INDEX.sub("*", leaf)])


def module(op_name: str) -> str:
    """The scopes in which an operation stands, numbers of layers folded.

    ``jit(step)/transpose(jvp(T5))/encoder/layers_3/mlp/wo/dot_general`` gives
    ``T5/encoder/layers_*/mlp/wo``. It is empty for what stands in no scope. Functions that are
    called are none, nor are the formulas that `jax.numpy.einsum` writes.
    """
    scopes = [*_components(op_name, _WRAPPERS - _FUNCTIONS)][:-1]
    return "/".join(_INDEX.sub("*", scope) for scope in scopes if not _NO_MODULE.fullmatch(scope))
