"""Models of Flax and of Equinox as they come: their authors wrote no constraint.

An expert writes them from outside, as users do: weights by patterns of their paths (EasyLM,
`match_partition_rules`), activations by catching the calls of Flax's modules
(`flax.linen.intercept_methods`), or by modules put around those of Equinox (`equinox.tree_at`).
Both are encoders of patches, as in Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import re
from typing import Any

import equinox as eqx
from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from .logical import BARE, Bare, Dims
from .training import array, ids


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Sizes of an encoder."""

    batch: int
    patches: int
    patch: int
    layers: int
    width: int
    heads: int
    hidden: int
    classes: int
    dtype: str = "bfloat16"

    @property
    def arguments(self) -> Any:
        """Shapes of patches and labels."""
        dtype = jnp.dtype(self.dtype)
        images = array(self.batch, self.patches, self.patch, dtype=dtype)
        return {"patches": images, "labels": ids(self.batch)}


BATCH = {"patches": "batch length patch", "labels": "batch"}
_RESIDUAL = "batch norm_length embed"
_ADAM = optax.adamw(3e-4, weight_decay=0.1)


def dims_of(tree: Any, patterns: Mapping[str, str]) -> Any:
    """The dimensions of arrays, by the first pattern that is in a path; what has none is whole."""

    def found(path: Any, leaf: Any) -> Dims:
        text = jax.tree_util.keystr(path)
        names = next((names for pattern, names in patterns.items() if re.search(pattern, text)), "")
        table = "state" if re.search(r"\.(mu|nu)\b", text) else "weights"
        return Dims(table, names or " ".join(["whole"] * leaf.ndim))

    return jax.tree_util.tree_map_with_path(found, tree)


def _entropy(scores: Any, labels: Any) -> Any:
    scores = scores.astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels))


def _used(params: Any, patterns: Mapping[str, str], keep: Bare) -> Any:
    return jax.tree.map(
        lambda leaf, of: keep.used(leaf, of.names), params, dims_of(params, patterns)
    )


def _stepped(loss: Any, patterns: Any, state: Any, batch: Any, keep: Bare) -> tuple[Any, Any]:
    params, moments = state

    def lost(params: Any) -> Any:
        return loss(_used(params, patterns, keep), batch)

    value, gradients = jax.value_and_grad(lost)(params)
    names = jax.tree.map(lambda of: of.names, dims_of(params, patterns))
    gradients = keep.moments(gradients, names)
    updates, moments = _ADAM.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


# Flax


class FlaxBlock(nn.Module):
    """A layer."""

    sizes: Encoder

    @nn.compact
    def __call__(self, x):
        """Of ``[batch, length, embed]``."""
        c = self.sizes
        y = nn.LayerNorm(dtype=c.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=c.heads, dtype=c.dtype)(y)
        y = nn.LayerNorm(dtype=c.dtype)(x)
        y = nn.Dense(c.hidden, dtype=c.dtype, name="up")(y)
        return x + nn.Dense(c.width, dtype=c.dtype, name="down")(nn.gelu(y))


class FlaxEncoder(nn.Module):
    """The layers, one after the other."""

    sizes: Encoder

    @nn.compact
    def __call__(self, patches):
        """Scores of the classes."""
        c = self.sizes
        x = nn.Dense(c.width, dtype=c.dtype, name="enter")(patches)
        places = self.param("places", nn.initializers.normal(0.02), (c.patches, c.width))
        x = x + places.astype(x.dtype)[None]
        for n in range(c.layers):
            x = FlaxBlock(c, name=f"layer{n}")(x)
        x = nn.LayerNorm(dtype=c.dtype)(jnp.mean(x, axis=1))
        return nn.Dense(c.classes, dtype=c.dtype, name="leave")(x)


FLAX = {
    r"'(query|key|value)'\]\['kernel": "embed heads dim",
    r"'(query|key|value)'\]\['bias": "heads dim",
    r"'out'\]\['kernel": "heads dim embed",
    r"'up'\]\['kernel": "embed hidden",
    r"'up'\]\['bias": "hidden",
    r"'down'\]\['kernel": "hidden embed",
    r"'enter'\]\['kernel": "patch embed",
    r"'leave'\]\['kernel": "embed classes",
    r"places": "positions embed",
}
"""Patterns of paths, and the names of dimensions."""

_FLAX_RESULTS = {
    "query": "batch length heads dim", "key": "batch keys heads dim",
    "value": "batch keys heads dim", "up": "batch length hidden", "down": _RESIDUAL,
    "out": _RESIDUAL, "enter": _RESIDUAL,
}  # fmt: skip


def flax_state(sizes: Encoder) -> Any:
    """Shapes of parameters and of the optimizer's state."""

    def init() -> Any:
        patches = jnp.zeros((1, sizes.patches, sizes.patch), sizes.dtype)
        params = FlaxEncoder(sizes).init(jax.random.key(0), patches)
        return params, _ADAM.init(params)

    return jax.eval_shape(init)


def flax_step(sizes: Encoder, state: Any, batch: Any, keep: Bare = BARE) -> tuple[Any, Any]:
    """The next state, and the loss before."""

    def caught(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        found = call(*args, **kwargs)
        name = context.module.name or ""
        if context.method_name != "__call__":
            return found
        names = _RESIDUAL if name.startswith("layer") else _FLAX_RESULTS.get(name)
        return keep.activation(found, names) if names else found

    def loss(params: Any, batch: Any) -> Any:
        with nn.intercept_methods(caught):
            scores = FlaxEncoder(sizes).apply(params, batch["patches"])
        return _entropy(scores, batch["labels"])

    return _stepped(loss, FLAX, state, batch, keep)


# Equinox


class EqxBlock(eqx.Module):
    """A layer."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: Any
    down: eqx.nn.Linear

    def __init__(self, c: Encoder, key: Any):
        first, second, third = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(c.width), eqx.nn.LayerNorm(c.width)
        self.attention = eqx.nn.MultiheadAttention(c.heads, c.width, key=first)
        self.up = eqx.nn.Linear(c.width, c.hidden, key=second)
        self.down = eqx.nn.Linear(c.hidden, c.width, key=third)

    def __call__(self, x):
        """Of ``[length, embed]``."""
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.norm2)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))


class EqxEncoder(eqx.Module):
    """The layers, one after the other."""

    enter: eqx.nn.Linear
    places: jax.Array
    layers: list[Any]
    leave: eqx.nn.Linear

    def __init__(self, c: Encoder, key: Any):
        keys = jax.random.split(key, c.layers + 3)
        self.enter = eqx.nn.Linear(c.patch, c.width, key=keys[0])
        self.places = 0.02 * jax.random.normal(keys[1], (c.patches, c.width))
        self.layers = [EqxBlock(c, one) for one in keys[3:]]
        self.leave = eqx.nn.Linear(c.width, c.classes, key=keys[2])

    def __call__(self, patches):
        """Scores of the classes, of the patches of one image."""
        x = jax.vmap(self.enter)(patches) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.leave(jnp.mean(x, axis=0))


class _Kept(eqx.Module):
    """A module whose result an expert constrains."""

    module: Any
    keep: Any = eqx.field(static=True)
    names: str = eqx.field(static=True)

    def __call__(self, x):
        return self.keep.activation(self.module(x), self.names)


EQUINOX = {
    r"(query|key|value)_proj\.weight": "heads embed",
    r"output_proj\.weight": "embed heads",
    r"\.up\.weight": "hidden embed",
    r"\.up\.bias": "hidden",
    r"\.down\.weight": "embed hidden",
    r"enter\.weight": "embed patch",
    r"leave\.weight": "classes embed",
    r"places": "positions embed",
}
"""Patterns of paths, and the names of dimensions; all heads are one."""


def _equinox(sizes: Encoder) -> Any:
    return EqxEncoder(sizes, jax.random.key(0))


def equinox_state(sizes: Encoder) -> Any:
    """Shapes of parameters and of the optimizer's state."""
    params = eqx.filter(eqx.filter_eval_shape(_equinox, sizes), _is_array)
    return params, jax.eval_shape(_ADAM.init, params)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def equinox_step(sizes: Encoder, state: Any, batch: Any, keep: Bare = BARE) -> tuple[Any, Any]:
    """The next state, and the loss before."""
    static = eqx.filter(eqx.filter_eval_shape(_equinox, sizes), _is_array, inverse=True)

    def loss(params: Any, batch: Any) -> Any:
        cast = jax.tree.map(lambda leaf: leaf.astype(sizes.dtype), params)
        model = eqx.combine(cast, static)
        if keep is not BARE:
            model = _constrained(model, keep)
        rows = keep.local(batch["patches"], BATCH["patches"])[0] if keep is not BARE else None
        scores = jax.vmap(model, spmd_axis_name=rows)(batch["patches"])
        return _entropy(scores, batch["labels"])

    return _stepped(loss, EQUINOX, state, batch, keep)


def _constrained(model: Any, keep: Bare) -> Any:
    """With constraints after each layer, and within; the batch is that of `jax.vmap`."""
    wrapped = functools.partial(_Kept, keep=keep)
    for layer in range(len(model.layers)):
        up = model.layers[layer].up
        model = eqx.tree_at(lambda m, n=layer: m.layers[n].up, model, wrapped(up, names="hidden"))
        whole = model.layers[layer]
        model = eqx.tree_at(
            lambda m, n=layer: m.layers[n], model, wrapped(whole, names="norm_length embed")
        )
    return model
