"""Sharding rules of operations: which dimensions of operands and results are split alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import re

Factors = tuple[tuple[str, ...], ...]
"""For each dimension of a value, the factors of the operation that it consists of."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How an operation relates dimensions.

    Args:
        factors: of each operand and result, by dimension.
        sizes: of the factors.
        stops: factors along which the operation passes no sharding on.
    """

    factors: tuple[Factors, ...]
    sizes: Mapping[str, int]
    stops: frozenset[str] = frozenset()


_FACTOR = re.compile(r"[a-z](?:_\d+)?")
_SIZES = re.compile(r"([a-z](?:_\d+)?)=(\d+)")
_STOPS = re.compile(r"blocked_propagation=\{([^}]*)\}")


@functools.lru_cache(maxsize=1 << 12)
def parse_rule(text: str) -> Rule:
    """The factors of an operation, of the text of an ``sdy.op_sharding_rule``."""
    mapping, _, rest = text.partition("<")[2].partition(") {")
    factors = tuple(
        tuple(tuple(_FACTOR.findall(dim)) for dim in inner.split(", ")) if inner else ()
        for inner in re.findall(r"\[([^\]]*)\]", mapping)
    )
    sizes = {name: int(size) for name, size in _SIZES.findall(rest.partition("}")[0])}
    stops = frozenset(name for found in _STOPS.findall(rest) for name in _FACTOR.findall(found))
    return Rule(factors, sizes, stops)


def identity(values: Sequence[int], shape: Sequence[int]) -> Rule:
    """A rule by which each dimension of all values is the same."""
    names = [f"d{i}" for i in range(len(shape))]
    own = tuple((name,) for name in names)
    return Rule((own,) * len(values), dict(zip(names, shape, strict=True)))


def nothing(values: Sequence[int]) -> Rule:
    """A rule that relates no dimensions."""
    return Rule(((),) * len(values), {})
