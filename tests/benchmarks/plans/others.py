"""Programs that no figure of the planner was found from: what it does with code that it never saw.

Each is a step as a person would write it, with sizes of the field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
import optax

from .training import array, ids

Program: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]

_HALF, _FULL = jnp.bfloat16, jnp.float32
_NHWC = ("NHWC", "HWIO", "NHWC")


def _step(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> Program:
    """A step of AdamW, and descriptions of its state and batch."""
    adam = optax.adamw(1e-3)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = adam.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, ((params, jax.eval_shape(adam.init, params)), batch)


def _entropy(scores: Any, labels: Any) -> Any:
    scores = scores.astype(_FULL)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def _half(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(_HALF), tree)


def recommender() -> Program:
    """DLRM (Naumov et al., 2019): tables of 3.7 million rows, and how those of an example agree."""
    rows = (2_000_000, 1_000_000, 500_000, 100_000, 50_000, 1000, 100)
    width, count, examples = 128, len(rows) + 1, 65_536
    params = {
        "tables": [array(n, width) for n in rows],
        "bottom": [array(13, 512), array(512, 256), array(256, width)],
        "top": [array(width + count * (count - 1) // 2, 1024), array(1024, 256), array(256, 1)],
    }

    def dense(weights: Any, x: Any) -> Any:
        for w in weights[:-1]:
            x = jax.nn.relu(x @ w)
        return x @ weights[-1]

    def loss(params: Any, batch: Any) -> Any:
        x = dense(params["bottom"], batch["dense"])
        found = [table[batch["ids"][:, i]] for i, table in enumerate(params["tables"])]
        every = jnp.stack([x, *found], 1)
        i, j = jnp.triu_indices(count, 1)
        agreeing = jnp.einsum("bid,bjd->bij", every, every)[:, i, j]
        scores = dense(params["top"], jnp.concatenate([x, agreeing], 1))[:, 0]
        return optax.sigmoid_binary_cross_entropy(scores, batch["clicked"]).mean()

    batch = {
        "dense": array(examples, 13), "ids": ids(examples, len(rows)), "clicked": array(examples)
    }  # fmt: skip
    return _step(loss, params, batch)


def tables_at_once() -> Program:
    """Eight tables of one size, in which an example looks up a row each, all at once."""
    tables, rows, width, examples = 8, 250_000, 128, 65_536
    params = {
        "tables": array(tables, rows, width),
        "top": [array(tables * width, 1024), array(1024, 1)],
    }
    look_up = jax.vmap(lambda table, ids: table[ids], in_axes=(0, 1), out_axes=1)

    def loss(params: Any, batch: Any) -> Any:
        first, last = params["top"]
        found = look_up(params["tables"], batch["ids"]).reshape(examples, -1)
        scores = (jax.nn.relu(found @ first) @ last)[:, 0]
        return optax.sigmoid_binary_cross_entropy(scores, batch["clicked"]).mean()

    return _step(loss, params, {"ids": ids(examples, tables), "clicked": array(examples)})


def graph_network() -> Program:
    """Two layers that sum what neighbours have (Kipf and Welling, 2017)."""
    nodes, edges, width, labels = 100_000, 1_000_000, 256, 16

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for w in params[:-1]:
            x = jax.nn.relu(jax.ops.segment_sum((x @ w)[batch["from"]], batch["to"], nodes))
        return _entropy(x @ params[-1], batch["labels"])

    params = [array(width, width), array(width, width), array(width, labels)]
    batch = {"x": array(nodes, width), "from": ids(edges), "to": ids(edges), "labels": ids(nodes)}
    return _step(loss, params, batch)


def lstm() -> Program:
    """Two layers over 128 words (Hochreiter and Schmidhuber, 1997)."""
    words, width, length, rows = 32_000, 2048, 128, 512

    def loss(params: Any, batch: Any) -> Any:
        half = _half(params)
        x = half["embed"][batch["words"]].swapaxes(0, 1)
        for w in half["cells"]:

            def cell(carry: Any, x: Any, w: Any = w) -> Any:
                h, c = carry
                i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            zeros = jnp.zeros((rows, width), _HALF)
            _, x = lax.scan(cell, (zeros, zeros), x)
        return _entropy(x @ half["scores"], batch["next"].T)

    params = {
        "embed": array(words, width),
        "cells": array(2, 2 * width, 4 * width),
        "scores": array(width, words),
    }
    return _step(loss, params, {"words": ids(rows, length), "next": ids(rows, length)})


def _attention(p: Any, x: Any, y: Any, *, causal: bool = False) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bthk", z, p[n]) for z, n in ((x, "q"), (y, "k"), (y, "v")))
    scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(_FULL) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -1e9)
    heads = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, -1).astype(_HALF), v)
    return jnp.einsum("bthk,hkd->btd", heads, p["o"])


def _normed(x: Any, scale: Any) -> Any:
    x = x.astype(_FULL)
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return x.astype(_HALF) * scale


def _hidden(p: Any, x: Any) -> Any:
    return jax.nn.gelu(_normed(x, p["norm2"]) @ p["up"]) @ p["down"]


def _attending(layers: int, width: int, heads: int) -> Any:
    inner = array(layers, width, heads, width // heads)
    out = array(layers, heads, width // heads, width)
    return {"norm1": array(layers, width), "q": inner, "k": inner, "v": inner, "o": out}


def _blocks(layers: int, width: int, heads: int) -> Any:
    return {
        **_attending(layers, width, heads),
        "norm2": array(layers, width),
        "up": array(layers, width, 4 * width),
        "down": array(layers, 4 * width, width),
    }


def vision_transformer() -> Program:
    """ViT-L/16 on 256 images (Dosovitskiy et al., 2021)."""
    width, images, labels = 1024, 256, 1000

    def loss(params: Any, batch: Any) -> Any:
        half = _half(params)
        pixels = batch["images"].astype(_HALF)
        x = lax.conv_general_dilated(
            pixels, half["patch"], (16, 16), "VALID", dimension_numbers=_NHWC
        )
        x = x.reshape(images, -1, width) + half["places"]

        @jax.checkpoint
        def block(x: Any, p: Any) -> Any:
            y = _normed(x, p["norm1"])
            x = x + _attention(p, y, y)
            return x + _hidden(p, x), None

        x, _ = lax.scan(block, x, half["blocks"])
        return _entropy(x.mean(1) @ half["scores"], batch["labels"])

    params = {
        "patch": array(16, 16, 3, width),
        "places": array(196, width),
        "blocks": _blocks(24, width, 16),
        "scores": array(width, labels),
    }
    return _step(loss, params, {"images": array(images, 224, 224, 3), "labels": ids(images)})


def encoder_decoder() -> Program:
    """T5 with twelve layers a side, 512 words given and 128 made (Raffel et al., 2020)."""
    layers, width, heads, words, rows = 12, 1024, 16, 32_128, 64

    def loss(params: Any, batch: Any) -> Any:
        half = _half(params)

        @jax.checkpoint
        def encode(x: Any, p: Any) -> Any:
            y = _normed(x, p["norm1"])
            x = x + _attention(p, y, y)
            return x + _hidden(p, x), None

        x, _ = lax.scan(encode, half["embed"][batch["given"]], half["encoder"])

        @jax.checkpoint
        def decode(y: Any, both: Any) -> Any:
            p, cross = both
            z = _normed(y, p["norm1"])
            y = y + _attention(p, z, z, causal=True)
            y = y + _attention(cross, _normed(y, cross["norm1"]), x)
            return y + _hidden(p, y), None

        y, _ = lax.scan(decode, half["embed"][batch["words"]], (half["decoder"], half["cross"]))
        return _entropy(y @ half["embed"].T, batch["next"])

    params = {
        "embed": array(words, width),
        "encoder": _blocks(layers, width, heads),
        "decoder": _blocks(layers, width, heads),
        "cross": _attending(layers, width, heads),
    }
    batch = {"given": ids(rows, 512), "words": ids(rows, 128), "next": ids(rows, 128)}
    return _step(loss, params, batch)


def state_space() -> Program:
    """Twelve selective layers with an associative scan (Gu and Dao, 2023)."""
    layers, width, states, length, rows, words = 12, 1024, 16, 2048, 16, 32_000

    def loss(params: Any, batch: Any) -> Any:
        half = _half({name: params[name] for name in ("embed", "layers")})

        @jax.checkpoint
        def layer(x: Any, p: Any) -> Any:
            gate, u = jnp.split(_normed(x, p["norm"]) @ p["in"], 2, -1)
            dt = jax.nn.softplus(u @ p["dt"]).astype(_FULL)
            b, c = jnp.split((u @ p["bc"]).astype(_FULL), 2, -1)
            decay = jnp.exp(-dt[..., None] * jnp.exp(p["decay"].astype(_FULL)))
            given = (dt * u.astype(_FULL))[..., None] * b[:, :, None]

            def after(left: Any, right: Any) -> Any:
                return left[0] * right[0], right[0] * left[1] + right[1]

            _, state = lax.associative_scan(after, (decay, given), axis=1)
            y = jnp.einsum("btdn,btn->btd", state, c).astype(_HALF)
            return x + (y * jax.nn.silu(gate)) @ p["out"], None

        x, _ = lax.scan(layer, half["embed"][batch["words"]], half["layers"])
        return _entropy(x @ half["embed"].T, batch["next"])

    inner = 2 * width
    params = {
        "embed": array(words, width),
        "layers": {
            "norm": array(layers, width),
            "in": array(layers, width, 2 * inner),
            "dt": array(layers, inner, inner),
            "bc": array(layers, inner, 2 * states),
            "decay": array(layers, inner, states),
            "out": array(layers, inner, width),
        },
    }
    return _step(loss, params, {"words": ids(rows, length), "next": ids(rows, length)})


def convnext() -> Program:
    """Six blocks whose convolutions are of each channel by itself (Liu et al., 2022)."""
    width, blocks, images, labels = 256, 6, 256, 1000

    def loss(params: Any, batch: Any) -> Any:
        half = _half(params)
        pixels = batch["images"].astype(_HALF)
        x = lax.conv_general_dilated(pixels, half["stem"], (4, 4), "VALID", dimension_numbers=_NHWC)

        def block(x: Any, p: Any) -> Any:
            y = lax.conv_general_dilated(
                x, p["window"], (1, 1), "SAME", dimension_numbers=_NHWC, feature_group_count=width
            )
            return x + jax.nn.gelu(y @ p["up"]) @ p["down"], None

        x, _ = lax.scan(block, x, half["blocks"])
        return _entropy(x.mean((1, 2)) @ half["scores"], batch["labels"])

    params = {
        "stem": array(4, 4, 3, width),
        "blocks": {
            "window": array(blocks, 7, 7, 1, width),
            "up": array(blocks, width, 4 * width),
            "down": array(blocks, 4 * width, width),
        },
        "scores": array(width, labels),
    }
    return _step(loss, params, {"images": array(images, 224, 224, 3), "labels": ids(images)})


def contrastive() -> Program:
    """Pairs among 8,192, told from all others (Radford et al., 2021)."""
    pairs = 8192

    def loss(params: Any, batch: Any) -> Any:
        x, y = (batch[n].astype(_HALF) @ params[n].astype(_HALF) for n in ("images", "texts"))
        x, y = (z / jnp.linalg.norm(z.astype(_FULL), axis=-1, keepdims=True) for z in (x, y))
        scores = x @ y.T * jnp.exp(params["scale"])
        own = jnp.arange(pairs)
        return (_entropy(scores, own) + _entropy(scores.T, own)) / 2

    params = {"images": array(4096, 1024), "texts": array(2048, 1024), "scale": array()}
    return _step(loss, params, {"images": array(pairs, 4096), "texts": array(pairs, 2048)})


def _decoded(params: Any, words: Any, layer: Callable[[Any], Any] = lambda p: p) -> Any:
    """What a decoder makes of words; its layers are computed again for their gradients.

    Args:
        params: embeddings, and blocks that are stacked.
        words: by text.
        layer: makes the weights of a layer of what a block has.
    """

    @jax.checkpoint
    def block(x: Any, p: Any) -> Any:
        p = layer(p)
        y = _normed(x, p["norm1"])
        x = x + _attention(p, y, y, causal=True)
        return x + _hidden(p, x), None

    return lax.scan(block, params["embed"][words], params["blocks"])[0]


def _words(params: Any, batch: Any, layer: Callable[[Any], Any] = lambda p: p) -> Any:
    """The loss of a decoder on the words that come next."""
    half = _half(params)
    x = _decoded(half, batch["words"], layer)
    return _entropy(x @ half["embed"].T, batch["next"])


def _decoder(layers: int, width: int, heads: int) -> Any:
    return {"embed": array(32_000, width), "blocks": _blocks(layers, width, heads)}


def _halves(tree: Any) -> Any:
    """Descriptions of the same arrays in bfloat16."""
    return jax.tree.map(lambda one: array(*one.shape, dtype=_HALF), tree)


def accumulation() -> Program:
    """Gradients of eight small batches, added up before the step of AdamW."""
    adam, params = optax.adamw(1e-3), _decoder(12, 1024, 16)

    def step(state: Any, batches: Any) -> Any:
        params, moments = state

        def add(total: Any, batch: Any) -> Any:
            value, gradients = jax.value_and_grad(_words)(params, batch)
            return jax.tree.map(jnp.add, total, gradients), value

        total, values = lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        mean = jax.tree.map(lambda g: g / len(values), total)
        updates, moments = adam.update(mean, moments, params)
        return (optax.apply_updates(params, updates), moments), values.mean()

    batches = {"words": ids(8, 32, 512), "next": ids(8, 32, 512)}
    return step, ((params, jax.eval_shape(adam.init, params)), batches)


def adapters() -> Program:
    """Adapters of rank 16 for queries and values; all else stays (LoRA, Hu et al., 2021)."""
    layers, width, heads, rank = 16, 2048, 16, 16
    adam, base = optax.adamw(1e-3), _halves(_decoder(layers, width, heads))

    def adapted(p: Any) -> Any:
        more = {name: jnp.einsum("dr,rhk->dhk", *pair) for name, pair in p["adapters"].items()}
        return {name: one + more.get(name, 0) for name, one in p.items() if name != "adapters"}

    def step(state: Any, base: Any, batch: Any) -> Any:
        def loss(adapters: Any) -> Any:
            blocks = {**base["blocks"], "adapters": adapters}
            return _words({**base, "blocks": blocks}, batch, adapted)

        adapters, moments = state
        value, gradients = jax.value_and_grad(loss)(adapters)
        updates, moments = adam.update(gradients, moments, adapters)
        return (optax.apply_updates(adapters, updates), moments), value

    pair = [array(layers, width, rank), array(layers, rank, heads, width // heads)]
    state = {"q": pair, "v": pair}
    batch = {"words": ids(32, 1024), "next": ids(32, 1024)}
    return step, ((state, jax.eval_shape(adam.init, state)), base, batch)


def eight_bits() -> Program:
    """The last word's scores for 16 texts, of weights in int8 with a scale for each column."""
    width, heads = 4096, 32
    decoder = _halves(_decoder(16, width, heads))

    def packed(name: str, one: Any) -> Any:
        if name.startswith("norm"):
            return one
        scales = array(one.shape[0], *one.shape[2:])
        return array(*one.shape, dtype=jnp.dtype("int8")), scales

    def unpacked(one: Any) -> Any:
        return one[0].astype(_HALF) * one[1].astype(_HALF) if isinstance(one, tuple) else one

    def layer(p: Any) -> Any:
        return {name: unpacked(one) for name, one in p.items()}

    def step(words: Any, params: Any) -> Any:
        return _decoded(params, words, layer)[:, -1] @ params["embed"].T

    blocks = {name: packed(name, one) for name, one in decoder["blocks"].items()}
    return step, (ids(16, 2048), {**decoder, "blocks": blocks})


def muon() -> Program:
    """Updates of matrices are made orthogonal by five products each (Jordan et al., 2024)."""
    params = _decoder(12, 1024, 16)

    def orthogonal(one: Any) -> Any:
        x = one.astype(_HALF)
        x = x.swapaxes(-1, -2) if (is_tall := x.shape[-2] > x.shape[-1]) else x
        norms = jnp.linalg.norm(x.astype(_FULL), axis=(-2, -1), keepdims=True)
        x = x / (norms + 1e-7).astype(_HALF)
        for _ in range(5):
            square = x @ x.swapaxes(-1, -2)
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
        return (x.swapaxes(-1, -2) if is_tall else x).astype(_FULL)

    def updated(name: str, one: Any, moment: Any) -> Any:
        if name.startswith("norm"):
            return one - 1e-3 * jnp.sign(moment)
        rows = -1 if name == "o" else moment.shape[1]  # heads and their widths are one dimension
        columns = moment.shape[-1] if name == "o" else -1
        return one - 0.02 * orthogonal(moment.reshape(len(moment), rows, columns)).reshape(
            one.shape
        )

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(_words)(params, batch)
        moments = jax.tree.map(lambda m, g: 0.95 * m + g, moments, gradients)
        embed = params["embed"] - 1e-3 * jnp.sign(moments["embed"])
        blocks = {
            name: updated(name, one, moments["blocks"][name])
            for name, one in params["blocks"].items()
        }
        return ({"embed": embed, "blocks": blocks}, moments), value

    return step, ((params, params), {"words": ids(64, 512), "next": ids(64, 512)})


def sampling() -> Program:
    """64 words of 64 texts, one after the other, each drawn from the 40 likeliest."""
    layers, width, heads, rows, length = 12, 2048, 16, 64, 1024
    params = _halves(_decoder(layers, width, heads))

    def attended(p: Any, y: Any, caches: Any, at: Any) -> Any:
        q, k, v = (jnp.einsum("bd,dhk->bhk", y, p[name]) for name in "qkv")
        keys, values = (
            lax.dynamic_update_index_in_dim(cache, one, at, 1)
            for cache, one in zip(caches, (k, v), strict=True)
        )
        scores = jnp.einsum("bhk,bshk->bhs", q, keys).astype(_FULL) / q.shape[-1] ** 0.5
        scores = jax.nn.softmax(jnp.where(jnp.arange(length) <= at, scores, -1e9), -1)
        return jnp.einsum("bhs,bshk->bhk", scores.astype(_HALF), values), (keys, values)

    def step(caches: Any, params: Any, words: Any, key: Any) -> Any:
        def after(carry: Any) -> Any:
            at, words, caches, key = carry

            def block(x: Any, given: Any) -> Any:
                p, own = given
                found, own = attended(p, _normed(x, p["norm1"]), own, at)
                x = x + jnp.einsum("bhk,hkd->bd", found, p["o"])
                return x + _hidden(p, x), own

            x, caches = lax.scan(block, params["embed"][words], (params["blocks"], caches))
            likely, which = lax.top_k((x @ params["embed"].T).astype(_FULL), 40)
            key, own = jax.random.split(key)
            drawn = jax.random.categorical(own, likely)
            return at + 1, jnp.take_along_axis(which, drawn[:, None], 1)[:, 0], caches, key

        start = jnp.int32(0), words, caches, key
        _, words, caches, _ = lax.while_loop(lambda carry: carry[0] < 64, after, start)
        return caches, words

    caches = [array(layers, rows, length, heads, width // heads, dtype=_HALF)] * 2
    return step, (tuple(caches), params, ids(rows), jax.eval_shape(lambda: jax.random.key(0)))


OTHERS: dict[str, Callable[[], Program]] = {
    "recommender": recommender,
    "tables at once": tables_at_once,
    "graph network": graph_network,
    "LSTM": lstm,
    "vision transformer": vision_transformer,
    "encoder and decoder": encoder_decoder,
    "state space": state_space,
    "ConvNeXt": convnext,
    "contrastive": contrastive,
    "accumulation": accumulation,
    "adapters": adapters,
    "eight bits": eight_bits,
    "Muon": muon,
    "sampling": sampling,
}
