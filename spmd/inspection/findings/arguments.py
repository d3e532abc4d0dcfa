"""Findings on arguments that are whole on every device, by the subtree that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
import re

from spmd.inspection.findings.values import LARGE, split_of
from spmd.inspection.records.arrays import Argument
from spmd.inspection.records.report import Finding

#: How many subtrees have a finding of their own, and how many leaves a finding names.
_NAMED = 5

_Keys = tuple[str, ...]
"""A path in parts: the name of the argument, then the key of each level below."""


def whole_arguments(arguments: Sequence[Argument], mesh: Mapping[str, int]) -> Iterator[Finding]:
    """A finding for each subtree all of whose large leaves are whole on every device.

    Args:
        arguments: of the program, those that are split too.
        mesh: size by axis name; on one device nothing can be split.
    """
    if math.prod(mesh.values()) == 1:
        return
    groups = sorted(_subtrees(arguments).items(), key=lambda one: -_nbytes(one[1]))
    for keys, leaves in groups[:_NAMED]:
        if len(leaves) == 1:
            yield _finding(f"{leaves[0].path} is whole on every device", leaves, _one(leaves, mesh))
            continue
        below = [a for a in arguments if _keys(a.path)[: len(keys)] == keys]
        subject = f"the {len(leaves)} large leaves of {''.join(keys)} are whole on every device"
        yield _finding(subject, leaves, _several("".join(keys), leaves, below, mesh))
    if rest := [leaf for _, leaves in groups[_NAMED:] for leaf in leaves]:
        rest.sort(key=lambda a: -a.nbytes)
        subject = (
            f"{len(rest)} more large arguments are whole on every device"
            if len(rest) > 1
            else f"{rest[0].path} is whole on every device"
        )
        yield _finding(subject, rest, _one(rest, mesh))


def _finding(subject: str, leaves: Sequence[Argument], fix: str) -> Finding:
    rest = len(leaves) - _NAMED
    return Finding(
        kind="replicated-argument",
        subject=subject,
        source=None,
        nbytes=_nbytes(leaves),
        measure="memory",
        facts=(
            *(f"{a.path}: {a.dtype}[{','.join(map(str, a.shape))}]" for a in leaves[:_NAMED]),
            *([f"and {rest} more"] if rest > 0 else []),
        ),
        fix=f"{fix}; if it has to be whole in a computation, a split argument is gathered where "
        "it is used",
    )


def _nbytes(leaves: Sequence[Argument]) -> int:
    return sum(a.nbytes for a in leaves)


# Subtrees


def _subtrees(arguments: Sequence[Argument]) -> Mapping[_Keys, list[Argument]]:
    """The leaves that are large and whole, largest first, by the subtree that they are all of.

    A subtree is as large as it can be without another large leaf in it, and named by what all of
    these leaves have in common.
    """
    large = [(_keys(a.path), a) for a in arguments if _is_large(a)]
    split = {keys[:n] for keys, a in large if not _is_whole(a) for n in range(len(keys))}
    tops: dict[_Keys, list[tuple[_Keys, Argument]]] = {}
    for keys, a in large:
        if _is_whole(a):
            above = (keys[:n] for n in range(1, len(keys)) if keys[:n] not in split)
            tops.setdefault(next(above, keys), []).append((keys, a))
    return {
        _common([keys for keys, _ in below]): sorted((a for _, a in below), key=_by_size)
        for below in tops.values()
    }


def _common(paths: Sequence[_Keys]) -> _Keys:
    """The keys that all paths begin with."""
    pairs = itertools.takewhile(lambda keys: len({*keys}) == 1, zip(*paths, strict=False))
    return tuple(keys[0] for keys in pairs)


def _by_size(a: Argument) -> int:
    return -a.nbytes


def _is_large(a: Argument) -> bool:
    """By all of it: a large leaf that is split is no reason to name a subtree that it is in."""
    if a.splits is None:
        return a.nbytes >= LARGE
    parts = math.prod(split.parts for split in a.splits)
    return a.nbytes * parts >= LARGE


def _is_whole(a: Argument) -> bool:
    return a.splits is not None and all(split.parts == 1 for split in a.splits)


_KEY = re.compile(r"""\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]'"])*\]|\.\w+""")


def _keys(path: str) -> _Keys:
    """The keys that a path consists of; one where it is not written as JAX writes paths."""
    name = re.match(r"[^.\[]*", path)
    keys = ((name[0] if name else ""), *_KEY.findall(path))
    return keys if "".join(keys) == path else (path,)


# What to write instead


def _one(leaves: Sequence[Argument], mesh: Mapping[str, int]) -> str:
    spec = split_of(leaves[0].shape, mesh)
    return f"split {leaves[0].path} " + (f"as {spec}" if spec else _PADDED)


_PADDED = "padded to a multiple of a mesh axis"


def _several(
    name: str, leaves: Sequence[Argument], below: Sequence[Argument], mesh: Mapping[str, int]
) -> str:
    """What to write for a subtree: one spec for all of it, or for its large leaves, or for one."""
    shapes = [a.shape for a in leaves]
    everything = [a.shape for a in below] if all(map(_is_whole, below)) else []
    if everything and (spec := _common_split(everything, mesh)):
        return f"split all of {name} as {spec}"
    if spec := _common_split(shapes, mesh):
        return f"split each of these leaves as {spec}"
    return f"a spec for each of these leaves: {_one(leaves, mesh)}"


def _common_split(shapes: Sequence[tuple[int, ...]], mesh: Mapping[str, int]) -> str | None:
    """A spec that splits all of some arrays, over the largest mesh axis that can."""
    for d in range(min(map(len, shapes))):
        common = math.gcd(*(shape[d] for shape in shapes))
        if spec := split_of((common,), mesh):
            return f"P({'None, ' * d}{spec[2:]}"
    return None
