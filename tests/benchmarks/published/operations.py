"""Operations whose time on hardware is published, as programs for one device that is described."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
from pathlib import Path
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import P, pjit

SLICES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""The smallest topologies of these chips; one device of each is compiled for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation with a time on hardware.

    Attributes:
        kind: ``cross_entropy`` of logits that are a product, ``gated`` for a gated linear unit, or
            ``normalization`` to mean 0 and variance 1.
        x: dimensions of what goes in.
        w: of the matrix, ``[inner, words]`` or ``[inner, 2, outer]``; none for a normalization.
        activation: of a gated unit: a function of `jax.nn`.
        axis: that is normalized.
        milliseconds: by the name of the chip.
    """

    kind: str
    x: tuple[int, ...]
    w: tuple[int, ...] = ()
    activation: str = ""
    axis: int = -1
    milliseconds: Mapping[str, float]

    @property
    def flops(self) -> int:
        """Of its product."""
        return 2 * int(np.prod(self.x)) * int(np.prod(self.w[1:])) if self.w else 0


def read() -> Iterator[Operation]:
    """All operations, in the order of the file."""
    text = Path(__file__).with_name("operations.toml").read_text(encoding="utf-8")
    for one in tomllib.loads(text)["operations"]:
        yield Operation(**{k: tuple(v) if isinstance(v, list) else v for k, v in one.items()})


def seconds(one: Operation, chip: str) -> float:
    """What the clock says of it on a device of a chip."""
    device = spmd.topology(SLICES[chip]).devices.flat[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    function, shapes = _program(one)
    report = spmd.report(pjit(function, mesh=mesh, out_axis_resources=P()), *shapes)
    assert report.time is not None
    return report.time.seconds


def _program(one: Operation) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def of(*dims: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype)

    match one.kind:
        case "cross_entropy":
            return _cross_entropy, (of(*one.x), of(*one.w), of(one.x[0], dtype=jnp.int32))
        case "gated":
            activation = getattr(jax.nn, one.activation)
            return functools.partial(_gated, activation), (of(*one.x), of(*one.w))
    rows = of(one.x[one.axis], dtype=jnp.float32)
    return functools.partial(_normalized, one.axis), (of(*one.x), rows, rows)


def _cross_entropy(x: Any, w: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(x @ w, axis=-1)
    right = jax.nn.one_hot(labels, w.shape[1], dtype=x.dtype)
    return jnp.mean(-jnp.sum(right * logs, axis=-1, dtype=jnp.float32))


def _gated(activation: Callable[[Any], Any], x: Any, w: Any) -> Any:
    # Both halves are one row and then two, as in tokamax: that decides what XLA copies.
    both = jnp.einsum("...k,kjn->...jn", x, w)
    both = both.reshape(*x.shape[:-1], -1).astype(jnp.float32)
    gate, value = jnp.split(both, 2, axis=-1)
    return (activation(gate) * value).astype(x.dtype)


def _normalized(axis: int, x: Any, scale: Any, offset: Any) -> Any:
    y = x.astype(jnp.float32)
    y -= jnp.mean(y, axis, keepdims=True)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis, keepdims=True) + 1e-6)
    dims = [-1 if d == axis % x.ndim else 1 for d in range(x.ndim)]
    return (y * scale.reshape(dims) + offset.reshape(dims)).astype(x.dtype)
