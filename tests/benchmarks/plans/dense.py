"""A multilayer perceptron: wide layers with a residual each, none of them scanned."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .logical import Bare
from .training import array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Perceptron:
    """Its sizes."""

    batch: int
    layers: int
    width: int
    hidden: int
    dtype: str = "bfloat16"


def names(model: Perceptron) -> Any:
    """Of the dimensions of the parameters."""
    return [{"up": "embed hidden", "bias": "hidden", "down": "hidden embed"}] * model.layers


def params(model: Perceptron) -> Any:
    """Their shapes."""
    d, f = model.width, model.hidden
    return [{"up": array(d, f), "bias": array(f), "down": array(f, d)}] * model.layers


BATCH = {"x": "batch embed", "y": "batch embed"}


def batch(model: Perceptron) -> Any:
    """Inputs and targets."""
    rows = array(model.batch, model.width, dtype=jnp.dtype(model.dtype))
    return {"x": rows, "y": rows}


def loss(params: Any, batch: Any, keep: Bare) -> Any:
    """The mean square error, in bfloat16."""
    x = keep.activation(batch["x"], "batch embed")
    for p in params:
        up, down = (p[name].astype(x.dtype) for name in ("up", "down"))
        up, down = keep.used(up, "embed hidden"), keep.used(down, "hidden embed")
        hidden = jax.nn.gelu(x @ up + p["bias"].astype(x.dtype)[None])
        hidden = keep.activation(hidden, "batch hidden")
        x = keep.activation(x + hidden @ down, "batch embed")
    return jnp.mean(jnp.square((x - batch["y"]).astype(jnp.float32)))
