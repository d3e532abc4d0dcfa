"""Training steps of the sizes of real models, for a mesh with the axes ``data`` and ``model``.

They are lowered and compiled; nothing of them runs, since arguments are shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from spmd import P, pjit, with_sharding_constraint

Params = Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A transformer that predicts the next word.

    Attributes:
        width: of the residual stream.
        hidden: width of the MLP of a layer.
        heads: of queries.
        groups: of keys and values, each of which serves several heads.
        gated: whether it is as Llama: an MLP with a gate, positions by rotation, norms without
            a mean; else it is as GPT-2.
        scanned: whether layers are stacked and scanned, and computed again in the backward pass.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    groups: int
    vocab: int
    length: int
    gated: bool = False
    scanned: bool = False

    def shapes(self) -> Params:
        """The parameters."""
        d, size = self.width, self.width // self.heads
        layer = {
            "norm": (2, d),
            "q": (d, self.heads, size),
            "k": (d, self.groups, size),
            "v": (d, self.groups, size),
            "out": (self.heads, size, d),
            "up": (d, self.hidden),
            "down": (self.hidden, d),
            **({"gate": (d, self.hidden)} if self.gated else {"bias": (2, d)}),
        }
        whole = {"embed": (self.vocab, d), "norm": (1, d)}
        if not self.gated:
            whole["position"] = (self.length, d)
        layers = (
            {name: (self.layers, *dims) for name, dims in layer.items()}
            if self.scanned
            else [layer] * self.layers
        )
        return jax.tree.map(
            lambda dims: jax.ShapeDtypeStruct(dims, np.float32),
            {**whole, "layers": layers},
            is_leaf=lambda x: isinstance(x, tuple),
        )

    def specs(self) -> Params:
        """Of the parameters: Megatron's."""
        split = {
            **dict.fromkeys(("q", "k", "v", "up", "gate"), P(None, "model")),
            **dict.fromkeys(("out", "down"), P("model")),
        }
        stack = (None,) * self.scanned

        def of(path: Any, leaf: Any) -> Any:
            name = path[-1].key
            if name == "embed":
                return P("model")
            return P(*stack, *split[name]) if name in split else P()

        return jax.tree_util.tree_map_with_path(of, self.shapes())

    def loss(self, params: Params, words: Any) -> Any:
        """Mean cross entropy of each word by those before it."""
        table = params["embed"].astype(jnp.bfloat16)
        x = table[words[:, :-1]]
        if not self.gated:
            x = x + params["position"].astype(x.dtype)[None]
        x = _keep(x)
        layer = functools.partial(_layer, self)
        if self.scanned:
            layer = jax.checkpoint(layer)
            x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = layer(x, p)
        scores = jnp.einsum("btd,vd->btv", _norm(self, x, params["norm"][0]), table)
        scores = jax.nn.log_softmax(scores.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(scores, words[:, 1:, None], axis=-1))


def _keep(x: Any) -> Any:
    return with_sharding_constraint(x, P("data"))


def _norm(c: Decoder, x: Any, gain: Any) -> Any:
    wide = x.astype(jnp.float32)
    if not c.gated:
        wide = wide - jnp.mean(wide, -1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale * gain[None, None]).astype(x.dtype)


def _turned(x: Any) -> Any:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half)[None] / half)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _layer(c: Decoder, x: Any, p: Params) -> Any:
    p = {name: one.astype(x.dtype) for name, one in p.items()}
    y = _norm(c, x, p["norm"][0])
    q, k, v = (jnp.einsum("btd,dhe->bthe", y, p[name]) for name in "qkv")
    if c.gated:
        q, k = _turned(q), _turned(k)
    k, v = (jnp.repeat(one, c.heads // c.groups, axis=2) for one in (k, v))
    scores = jnp.einsum("bthe,bshe->bhts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9)).astype(x.dtype)
    x = _keep(x + jnp.einsum("bhts,bshe,hed->btd", weights, v, p["out"]))
    y = _norm(c, x, p["norm"][1])
    inner = jax.nn.silu(y @ p["gate"]) * (y @ p["up"]) if c.gated else jax.nn.gelu(y @ p["up"])
    x = x + inner @ p["down"]
    return _keep(x if c.gated else x + p["bias"].sum(0)[None, None])


GPT2 = Decoder(layers=12, width=768, hidden=3072, heads=12, groups=12, vocab=50304, length=1024)
LLAMA = Decoder(
    layers=8, width=2048, hidden=5632, heads=32, groups=8, vocab=32000, length=2048, gated=True
)


def lowered(loss: Callable, shapes: Params, specs: Params, *batch: Any) -> Any:
    """A step of AdamW, lowered for the current mesh; a batch is split over ``data``."""
    adam = optax.adamw(1e-3)
    moments = jax.eval_shape(adam.init, shapes)
    placed = optax.tree_utils.tree_map_params(
        adam, lambda _, spec: spec, moments, specs, transform_non_params=lambda _: P()
    )

    def step(state: Any, *batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, moments = adam.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    state = (specs, placed)
    partitioned = pjit(
        step,
        in_axis_resources=(state, *[P("data")] * len(batch)),
        out_axis_resources=(state, P()),
        donate_argnums=0,
    )
    return partitioned.lower((shapes, moments), *batch)


def _decoder(model: Decoder) -> Any:
    words = jax.ShapeDtypeStruct((8, model.length + 1), np.int32)
    return lowered(model.loss, model.shapes(), model.specs(), words)


def _mlp() -> Any:
    sizes = [1024, *[4096] * 8, 1024]
    shapes = [jax.ShapeDtypeStruct(pair, np.float32) for pair in itertools.pairwise(sizes)]
    specs = [P(None, "model") if i % 2 == 0 else P("model") for i in range(len(shapes))]

    def loss(params: Params, x: Any, y: Any) -> Any:
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x @ params[-1] - y) ** 2)

    rows = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    return lowered(loss, shapes, specs, rows, rows)


STEPS: Mapping[str, Callable[[], Any]] = {
    "an MLP of 9 layers": _mlp,
    "GPT-2 small, scanned": lambda: _decoder(dataclasses.replace(GPT2, scanned=True)),
    "GPT-2 small, unrolled": lambda: _decoder(GPT2),
    "Llama of 8 layers, unrolled": lambda: _decoder(LLAMA),
}
