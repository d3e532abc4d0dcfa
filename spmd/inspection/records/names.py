"""Name stacks as JAX writes them, in the parts that a user named; and places in source text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
import functools
import os
from pathlib import Path
import re
import sys
import sysconfig

from spmd.inspection.records.report import Collective, Source

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

# Names of functions and scopes may end in these words; transformations stand by themselves.
_TRANSFORM = re.compile(r"(?:^|[/(:])(transpose|jvp)\(")


def is_written(op_name: str) -> bool:
    """Whether a name stack is that of an exchange which the user wrote, such as a ``psum``."""
    return _WRITTEN.search(op_name) is not None


def components(op_name: str, wrappers: Set[str] = _WRAPPERS) -> tuple[str, ...]:
    """The parts of a name stack without the transformations around them.

    ``jit(step)/transpose(jvp(attention))/dot_general`` gives ``step``, ``attention`` and
    ``dot_general``.
    """
    found: tuple[str, ...] = ()
    for part in _split(op_name):
        wrapped = _WRAPPED.match(part)
        if wrapped and wrapped[1] in wrappers:
            found += components(wrapped[2], wrappers)
        elif part:
            found = (*found, part)
    return found


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
    alternatives = list(_split(op_name, ":"))
    if len(alternatives) > 1:
        return [stack for one in alternatives for stack in joined(one)]
    parts = list(_split(op_name))
    for i, part in enumerate(parts):
        inner = list(_split(part[1:-1], ":")) if part[:1] == "(" and part[-1:] == ")" else []
        if len(inner) > 1:
            ways = ("/".join([*parts[:i], one, *parts[i + 1 :]]) for one in inner)
            return [stack for way in ways for stack in joined(way)]
    return [op_name]


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
    scopes = components(op_name, _WRAPPERS - _FUNCTIONS)[:-1]
    return "/".join(_INDEX.sub("*", scope) for scope in scopes if not _NO_MODULE.fullmatch(scope))


# JAX's own calls come and go between its releases; so do numbers that make a name unique.
_CALL = re.compile(r"(?<![^/:])(?:p?jit\([^/:]*\)|closed_call|core_call)(?:/|$)")
_UNIQUE = re.compile(r"[._]?\d+(?=$|[/:)])")


def plain_path(op_name: str) -> str:
    """A name stack without jitted functions and without numbers at the ends of names."""
    return _UNIQUE.sub("", _CALL.sub("", op_name))


def direction_of(op_name: str) -> str:
    """Which half of a gradient a name stack belongs to: ``forward``, ``backward`` or ``other``.

    JAX writes ``jvp(...)`` around what a gradient differentiates, ``transpose(jvp(...))`` around
    its backward pass; what a rematerialization computes again stands inside the latter. Where the
    compiler combined several exchanges and joined their names, one backward part makes all of it
    backward.
    """
    found = set(_TRANSFORM.findall(op_name))
    if "transpose" in found:
        return "backward"
    return "forward" if found else "other"


# Places


def user_source(frames: Sequence[Source]) -> Source | None:
    """The innermost frame outside of libraries, or the innermost one if all are in libraries."""
    users = (frame for frame in frames if not is_library(frame.file))
    return next(users, frames[0] if frames else None)


def users_own(source: Source | None) -> Source | None:
    """A place, if it is the user's; None for one in a library."""
    return None if source is None or is_library(source.file) else source


def is_below(name: str, path: str) -> bool:
    """Whether the path of an array is this one, or goes on from it."""
    return name == path or name.startswith((f"{path}[", f"{path}."))


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to `spmd` itself.

    The model of `spmd demo`, in a folder of its own, counts as a user's code.
    """
    path = Path(file)
    ours = Path(__file__).parent.parent.parent
    if ours in path.parents:
        return ours / "demo" not in path.parents
    # A module's text may come from another machine, whose folders are not ours.
    if file.startswith("<frozen ") or _ELSEWHERE.search(file):
        return True
    return any(Path(sysconfig.get_path(s)) in path.parents for s in ("stdlib", "platstdlib"))


_ELSEWHERE = re.compile(r"[\\/](?:site-packages|dist-packages|lib(?:64)?[\\/]python3\.\d+t?)[\\/]")


def short_path(file: str) -> str:
    """A path relative to the working directory where the file is below it.

    A cell of the notebook that is running is named as IPython does: ``In[5]``.
    """
    # Outside of IPython there is no cell, and it need not be installed.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    name_of = getattr(shell and shell.compile, "format_code_name", None)
    if name_of and (cell := name_of(file)):
        return cell[1]
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # the directory is gone
        return file
    return file[len(here) :] if file.startswith(here) and len(file) > len(here) else file
