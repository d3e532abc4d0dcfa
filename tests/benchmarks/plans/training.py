"""A step of training: gradients, clipped by their norm, and AdamW in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .logical import BARE, Bare, Dims, dims

_RATE, _DECAY, _SMALL = 3e-4, 0.1, 1e-8
_BETAS = 0.9, 0.95


def array(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The description of an array."""
    return jax.ShapeDtypeStruct(dims, dtype)


def ids(*dims: int) -> jax.ShapeDtypeStruct:
    """The description of an array of words."""
    return array(*dims, dtype=jnp.int32)


def state_of(params: Any) -> dict[str, Any]:
    """Shapes of parameters, and of what Adam knows of them."""
    return {"params": params, "mu": params, "nu": params, "count": ids()}


def dims_of_state(names: Any) -> dict[str, Any]:
    """The names of its dimensions."""
    state = dims("state", names)
    return {"params": dims("weights", names), "mu": state, "nu": state, "count": Dims("state", "")}


def train(
    loss: Callable[[Any, Any, Bare], Any],
    names: Any,
    state: Any,
    batch: Any,
    keep: Bare = BARE,
) -> tuple[Any, Any]:
    """One step: the next state, and the loss before it.

    Args:
        loss: of parameters and a batch.
        names: of the dimensions of the parameters.
        state: parameters and what Adam knows of them.
        batch: that is learned from.
        keep: constrains what it is given.
    """
    value, gradients = jax.value_and_grad(loss)(state["params"], batch, keep)
    gradients = keep.moments(gradients, names)
    norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradients)
    count = state["count"] + 1
    mu = jax.tree.map(lambda m, g: _mixed(m, g, _BETAS[0]), state["mu"], gradients)
    nu = jax.tree.map(lambda v, g: _mixed(v, g * g, _BETAS[1]), state["nu"], gradients)
    small, large = (1 - jnp.float32(beta) ** count.astype(jnp.float32) for beta in _BETAS)

    def update(p: Any, m: Any, v: Any) -> Any:
        return p - _RATE * (m / small / (jnp.sqrt(v / large) + _SMALL) + _DECAY * p)

    params = jax.tree.map(update, state["params"], mu, nu)
    return {"params": params, "mu": mu, "nu": nu, "count": count}, value


def _mixed(old: Any, new: Any, beta: float) -> Any:
    return beta * old + (1 - beta) * new
