"""Training and serving steps of real kinds, to be lowered for any mesh.

Widths are those of small real models, so that a compiler takes the ways that it takes with large
ones; there are few layers. `MODELS` names each with the axes of its mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

Build = Callable[[Mesh], Any]
MODELS: dict[str, tuple[Build, Mapping[str, int]]] = {}

#: Sizes of a model's dimensions: batch, length of a sequence, width, hidden width, heads, words.
B, T, D, F, H, V = 32, 512, 1024, 4096, 16, 8192
LAYERS = 4


def model(**axes: int) -> Callable[[Build], Build]:
    """Registers a program with the sizes of its mesh's axes."""

    def register(build: Build) -> Build:
        MODELS[build.__name__] = build, axes
        return build

    return register


def array(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The description of an array."""
    return jax.ShapeDtypeStruct(dims, dtype)


def ids(*dims: int) -> jax.ShapeDtypeStruct:
    """The description of an array of words."""
    return array(*dims, dtype=jnp.int32)


def _keep(mesh: Mesh, value: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(value, NamedSharding(mesh, P(*spec)))


def _lower(mesh: Mesh, fun: Callable, specs: Any, outs: Any, *args: Any) -> Any:
    def place(tree: Any) -> Any:
        def is_spec(leaf):
            return leaf is None or isinstance(leaf, P)

        def placed(spec):
            return None if spec is None else NamedSharding(mesh, spec)

        return jax.tree.map(placed, tree, is_leaf=is_spec)

    return jax.jit(fun, in_shardings=place(specs), out_shardings=place(outs)).lower(*args)


def _train(mesh: Mesh, loss: Callable, specs: Any, data: Any, params: Any, *batch: Any) -> Any:
    """Lowers a step of gradient descent; all of a batch lies as `data` says."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        new = jax.tree.map(lambda p, g: p - 0.01 * g.astype(p.dtype), params, grads)
        return new, value

    return _lower(mesh, step, (specs, *[data] * len(batch)), (specs, P()), params, *batch)


def _normed(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _entropy(logits: Any, labels: Any) -> Any:
    logits = logits.astype(jnp.float32)
    hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * hot, -1))


def distance(before: Any, after: Any, *by: str) -> float:
    """Bytes on the wire on another axis or kind, as a share of those of the second report."""
    a, b = (
        {key: total.wire_bytes for key, total in found.totals(*by).items()}
        for found in (before, after)
    )
    wrong = sum(abs(a.get(key, 0) - b.get(key, 0)) for key in {**a, **b})
    return wrong / max(sum(b.values()), 1)


# Transformers


def _attend(q: Any, k: Any, v: Any, *, causal: bool = True) -> Any:
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * (q.shape[-1] ** -0.5)
    if causal:
        seen = jnp.tril(jnp.ones((1, 1, q.shape[1], k.shape[1]), bool))
        scores = jnp.where(seen, scores, jnp.full((1, 1, 1, 1), -1e9))
    weights = jax.nn.softmax(scores, -1).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def _block(p: Any, x: Any, keep: Callable) -> Any:
    """A layer of a decoder; `keep` says how activations lie between its products."""
    y = _normed(x)
    q, k, v = (jnp.einsum("btm,mhd->bthd", y, p[name].astype(x.dtype)) for name in "qkv")
    x = x + keep(jnp.einsum("bthd,hdm->btm", _attend(q, k, v), p["o"].astype(x.dtype)))
    y = jax.nn.gelu(_normed(x) @ p["up"].astype(x.dtype))
    return x + keep(y @ p["down"].astype(x.dtype))


def _layer_shapes(*stack: int) -> dict[str, Any]:
    heads = array(*stack, D, H, D // H)
    return {
        **dict.fromkeys("qkv", heads),
        "o": array(*stack, H, D // H, D),
        "up": array(*stack, D, F),
        "down": array(*stack, F, D),
    }


def _layer_specs(*stack: None, wide: Any = "model", other: Any = None) -> dict[str, P]:
    """Megatron's split over `wide`, and all weights over `other` as well."""
    heads = P(*stack, other, wide)
    return {
        **dict.fromkeys("qkv", heads),
        "o": P(*stack, wide, None, other),
        "up": P(*stack, other, wide),
        "down": P(*stack, wide, other),
    }


def _decoder(params: Any, words: Any, keep: Callable, dtype: Any, *, remat: bool) -> Any:
    x = keep(params["words"].astype(dtype)[words])
    layer = functools.partial(_block, keep=keep)
    layer = jax.checkpoint(layer) if remat else layer
    if isinstance(params["layers"], dict):
        x, _ = lax.scan(lambda h, p: (layer(p, h), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = layer(p, x)
    return _normed(x) @ params["words"].astype(dtype).T


def _gpt(
    mesh: Mesh,
    *,
    data: Any = "data",
    wide: Any = "model",
    other: Any = None,
    between: Any = (),
    dtype: Any = jnp.float32,
    scan: bool = False,
    remat: bool = False,
) -> Any:
    """A training step of a GPT; `between` is how the sequence lies between products."""

    def keep(x):
        return _keep(mesh, x, data, *between)

    if scan:
        shapes, specs = _layer_shapes(LAYERS), _layer_specs(None, wide=wide, other=other)
    else:
        shapes = [_layer_shapes()] * 2
        specs = [_layer_specs(wide=wide, other=other)] * 2

    def loss(params: Any, words: Any, labels: Any) -> Any:
        return _entropy(_decoder(params, words, keep, dtype, remat=remat), labels)

    params = {"words": array(V, D), "layers": shapes}
    # Words are split over both axes of weights, as most codes do.
    specs = {"words": P(wide, other), "layers": specs}
    return _train(mesh, loss, specs, P(data), params, ids(B, T), ids(B, T))


@model(data=4, model=4)
def gpt_megatron(mesh: Mesh) -> Any:
    """Layers one after the other, split over heads and hidden units, in float32."""
    return _gpt(mesh)


@model(data=4, model=4)
def gpt_megatron_scan_bf16(mesh: Mesh) -> Any:
    """The same in a loop, computed in bfloat16."""
    return _gpt(mesh, scan=True, dtype=jnp.bfloat16)


@model(data=4, model=4)
def gpt_sequence_parallel_bf16(mesh: Mesh) -> Any:
    """Megatron with the sequence split between products."""
    return _gpt(mesh, scan=True, between=("model",), dtype=jnp.bfloat16, remat=True)


@model(data=16)
def gpt_fsdp_scan(mesh: Mesh) -> Any:
    """All weights split over the devices of the batch, in float32."""
    return _gpt(mesh, wide=None, other="data", scan=True)


@model(data=16)
def gpt_fsdp_unrolled_bf16(mesh: Mesh) -> Any:
    """The same without a loop, in bfloat16."""
    return _gpt(mesh, wide=None, other="data", dtype=jnp.bfloat16)


@model(data=4, model=4)
def gpt_fsdp_megatron_bf16(mesh: Mesh) -> Any:
    """Both, in a loop that computes activations again."""
    return _gpt(mesh, other="data", scan=True, dtype=jnp.bfloat16, remat=True)


@model(data=4, model=4)
def t5(mesh: Mesh) -> Any:
    """An encoder and a decoder that looks at it, in bfloat16, with relative positions."""

    def keep(x):
        return _keep(mesh, x, "data")

    dtype = jnp.bfloat16

    def cross(p: Any, x: Any, seen: Any) -> Any:
        q = jnp.einsum("btm,mhd->bthd", _normed(x), p["q"].astype(dtype))
        k, v = (jnp.einsum("btm,mhd->bthd", seen, p[n].astype(dtype)) for n in "kv")
        out = _attend(q, k, v, causal=False)
        return x + keep(jnp.einsum("bthd,hdm->btm", out, p["o"].astype(dtype)))

    def encode(p: Any, x: Any) -> Any:
        y = _normed(x)
        q, k, v = (jnp.einsum("btm,mhd->bthd", y, p[n].astype(dtype)) for n in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) + p["near"][None]
        out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1).astype(dtype), v)
        x = x + keep(jnp.einsum("bthd,hdm->btm", out, p["o"].astype(dtype)))
        y = jax.nn.relu(_normed(x) @ p["up"].astype(dtype))
        return x + keep(y @ p["down"].astype(dtype))

    def loss(params: Any, source: Any, target: Any) -> Any:
        words = params["words"].astype(dtype)
        seen, x = keep(words[source]), keep(words[target])
        for p in params["encoder"]:
            seen = encode(p, seen)
        for p, q in zip(params["decoder"], params["cross"], strict=True):
            x = _block(p, cross(q, x, _normed(seen)), keep)
        return _entropy(_normed(x) @ words.T, target)

    shapes, specs = _layer_shapes(), _layer_specs()
    params = {
        "words": array(V, D),
        "encoder": [{**shapes, "near": array(H, T, T)}] * 2,
        "decoder": [shapes] * 2,
        "cross": [{n: shapes[n] for n in "qkvo"}] * 2,
    }
    places = {
        "words": P("model"),
        "encoder": [{**specs, "near": P("model")}] * 2,
        "decoder": [specs] * 2,
        "cross": [{n: specs[n] for n in "qkvo"}] * 2,
    }
    return _train(mesh, loss, places, P("data"), params, ids(B, T), ids(B, T))


@model(data=4, expert=4)
def mixture_of_experts(mesh: Mesh) -> Any:
    """Tokens go to experts by products with a mask, and back, in bfloat16."""
    experts, room, dtype = 16, 128, jnp.bfloat16

    def loss(params: Any, x: Any) -> Any:
        x = x.astype(dtype)
        gates = jax.nn.softmax((x @ params["gate"].astype(dtype)).astype(jnp.float32), -1)
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts, dtype=jnp.int32)
        place = jnp.cumsum(chosen, 1) * chosen - 1
        mask = jax.nn.one_hot(place, room, dtype=dtype)
        inside = jnp.einsum("gsec,gsm->egcm", mask, x)
        inside = _keep(mesh, inside, "expert", "data")
        inside = jax.nn.relu(jnp.einsum("egcm,emf->egcf", inside, params["up"].astype(dtype)))
        out = jnp.einsum("egcf,efm->egcm", inside, params["down"].astype(dtype))
        out = _keep(mesh, out, "expert", "data")
        weights = mask * jnp.max(gates, -1)[..., None, None].astype(dtype)
        y = jnp.einsum("gsec,egcm->gsm", weights, out)
        y = _keep(mesh, y, ("data", "expert"))
        return jnp.mean(jnp.square((x + y).astype(jnp.float32)))

    params = {"gate": array(D, experts), "up": array(experts, D, F), "down": array(experts, F, D)}
    specs = {"gate": P(), "up": P("expert"), "down": P("expert")}
    return _train(mesh, loss, specs, P(("data", "expert")), params, array(B, T, D))


# Other kinds of models


@model(data=16)
def conv_net(mesh: Mesh) -> Any:
    """Convolutions and norms over the batch, data parallel."""
    widths = [64, 128, 256]

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = images
        for p in params["layers"]:
            x = lax.conv_general_dilated(
                x, p["w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            mean = jnp.mean(x, (0, 1, 2), keepdims=True)
            spread = jnp.mean(jnp.square(x - mean), (0, 1, 2), keepdims=True)
            x = jax.nn.relu((x - mean) * lax.rsqrt(spread + 1e-5) * p["scale"])
        return _entropy(jnp.mean(x, (1, 2)) @ params["out"], labels)

    pairs = zip([3, *widths], widths, strict=False)
    layers = [{"w": array(3, 3, a, b), "scale": array(1, 1, 1, b)} for a, b in pairs]
    params = {"layers": layers, "out": array(widths[-1], 1000)}
    specs = jax.tree.map(lambda _: P(), params)
    return _train(mesh, loss, specs, P("data"), params, array(128, 64, 64, 3), ids(128))


@model(data=4, model=4)
def two_towers(mesh: Mesh) -> Any:
    """Tables of words split by rows, and products over the whole batch."""

    def tower(p: Any, x: Any) -> Any:
        hidden = jax.nn.relu(jnp.sum(p["words"][x], 1) @ p["up"])
        y = hidden @ p["down"]
        return y * lax.rsqrt(jnp.sum(jnp.square(y), -1, keepdims=True) + 1e-6)

    def loss(params: Any, users: Any, items: Any) -> Any:
        a, b = tower(params["users"], users), tower(params["items"], items)
        return _entropy(20.0 * a @ b.T, jnp.arange(a.shape[0]))

    one = {"words": array(100_000, 128), "up": array(128, 1024), "down": array(1024, 256)}
    spec = {"words": P("model"), "up": P(None, "model"), "down": P("model")}
    params, specs = ({"users": x, "items": x} for x in (one, spec))
    return _train(mesh, loss, specs, P("data"), params, ids(4096, 8), ids(4096, 8))


@model(data=4, sequence=4)
def ring_attention(mesh: Mesh) -> Any:
    """Keys and values go around a ring in a ``shard_map``, with their gradients."""

    def ring(q: Any, k: Any, v: Any) -> Any:
        n = lax.axis_size("sequence")
        pairs = [(i, (i + 1) % n) for i in range(n)]

        def turn(carry: Any, _: Any) -> Any:
            k, v, total, weight = carry
            scores = jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k) * 0.125)
            total = total + jnp.einsum("bhts,bshd->bthd", scores, v)
            weight = weight + jnp.sum(scores, -1)
            k, v = (lax.ppermute(x, "sequence", pairs) for x in (k, v))
            return (k, v, total, weight), None

        weight = jnp.zeros_like(q[..., 0]).transpose(0, 2, 1)
        start = k, v, jnp.zeros_like(q), weight
        (_, _, total, weight), _ = lax.scan(turn, start, None, length=n)
        return total / weight.transpose(0, 2, 1)[..., None]

    split = P("data", "sequence")
    attend = jax.shard_map(ring, mesh=mesh, in_specs=split, out_specs=split)

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            q, k, v = (jnp.einsum("btm,mhd->bthd", x, p[n]) for n in "qkv")
            x = x + jnp.einsum("bthd,hdm->btm", attend(q, k, v), p["o"])
        return jnp.mean(jnp.square(x))

    shapes = [{n: _layer_shapes()[n] for n in "qkvo"}] * 2
    specs = jax.tree.map(lambda _: P(), shapes)
    return _train(mesh, loss, specs, split, shapes, array(B, T, D))


@model(stage=4, data=4)
def pipeline(mesh: Mesh) -> Any:
    """Microbatches pass through stages on different devices."""
    stages, turns = mesh.shape["stage"], 8

    def run(weights: Any, x: Any) -> Any:
        here = lax.axis_index("stage")
        pairs = [(i, (i + 1) % stages) for i in range(stages)]

        def turn(held: Any, t: Any) -> Any:
            mine = lax.dynamic_index_in_dim(x, jnp.minimum(t, turns - 1), 0, keepdims=False)
            h = jnp.where(here == 0, mine, held)
            h = jnp.tanh(h @ weights[0])
            return lax.ppermute(h, "stage", pairs), h

        start = lax.pcast(jnp.zeros_like(x[0]), ("stage",), to="varying")
        _, out = lax.scan(turn, start, jnp.arange(turns + stages - 1))
        last = jnp.where(here == stages - 1, out[stages - 1 :], jnp.zeros_like(out[stages - 1 :]))
        return lax.psum(last, "stage")

    specs = P("stage"), P(None, "data")
    piped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(None, "data"))

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(piped(weights, x)))

    return _train(mesh, loss, *specs, array(stages, D, D), array(turns, 256, D))


@model(data=16)
def zero_1(mesh: Mesh) -> Any:
    """Whole weights, whose Adam moments are split over the devices of the batch."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        for p in params:
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return jnp.mean(jnp.square(x - y))

    def step(params: Any, m: Any, v: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        grads = jax.tree.map(lambda g: _keep(mesh, g, "data"), grads)
        m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, grads)
        v = jax.tree.map(lambda a, g: 0.99 * a + 0.01 * g * g, v, grads)
        moves = jax.tree.map(lambda a, b: a * lax.rsqrt(b + 1e-8), m, v)
        moves = jax.tree.map(lambda u: _keep(mesh, u), moves)
        return jax.tree.map(lambda p, u: p - 0.001 * u, params, moves), m, v, value

    params = [{"up": array(D, F), "down": array(F, D)}] * LAYERS
    whole, split = (jax.tree.map(lambda _, s=s: s, params) for s in (P(), P("data")))
    ins = whole, split, split, P("data"), P("data")
    data = array(4096, D), array(4096, D)
    return _lower(mesh, step, ins, (whole, split, split, P()), params, params, params, *data)


@model(data=4, model=4)
def decode(mesh: Mesh) -> Any:
    """A model writes 16 words with the keys and values that it keeps, in bfloat16."""
    dtype = jnp.bfloat16

    def layer(x: Any, inputs: Any) -> Any:
        p, keys, values, at = inputs
        y = _normed(x)
        q, k, v = (jnp.einsum("btm,mhd->bthd", y, p[n]) for n in "qkv")
        keys = lax.dynamic_update_slice_in_dim(keys, k, at, 1)
        values = lax.dynamic_update_slice_in_dim(values, v, at, 1)
        out = _attend(q, keys, values, causal=False)
        x = x + jnp.einsum("bthd,hdm->btm", out, p["o"])
        return x + jax.nn.gelu(_normed(x) @ p["up"]) @ p["down"], (keys, values)

    def write(params: Any, keys: Any, values: Any, words: Any) -> Any:
        def one(carry: Any, at: Any) -> Any:
            words, keys, values = carry
            x = params["words"][words]
            ats = jnp.broadcast_to(at, (LAYERS,))
            x, (keys, values) = lax.scan(layer, x, (params["layers"], keys, values, ats))
            words = jnp.argmax(_normed(x) @ params["words"].T, -1).astype(jnp.int32)
            return (words, keys, values), words[:, 0]

        return lax.scan(one, (words, keys, values), jnp.arange(16))

    layers = jax.tree.map(lambda x: array(*x.shape, dtype=dtype), _layer_shapes(LAYERS))
    params = {"words": array(V, D, dtype=dtype), "layers": layers}
    specs = {"words": P("model"), "layers": _layer_specs(None)}
    kept, place = array(LAYERS, B, T, H, D // H, dtype=dtype), P(None, "data", None, "model")
    ins = specs, place, place, P("data")
    outs = (P("data"), place, place), P(None, "data")
    return _lower(mesh, write, ins, outs, params, kept, kept, ids(B, 1))
