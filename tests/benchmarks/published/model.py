"""A training step as MaxText has it: a decoder of gated layers, splash attention, and AdamW.

Written from what MaxText 0.2.5 does (`models/llama2.py`, `layers/`, `configs/base.yml`), whose
scripts the runs are of: weights in float32 that are used in bfloat16, layers stacked along their
second dimension, its names for the checkpoint policies, and the axes that its logical rules give.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp

import spmd
from spmd import P, pjit, with_sharding_constraint

_PROJECTIONS = ("query_proj", "key_proj", "value_proj")
# The names of `remat_policy`, and what each keeps for the backward pass.
_KEPT = {
    "full": (),
    "minimal": (*_PROJECTIONS, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"),
    "qkv_proj_offloaded": _PROJECTIONS,
    "custom": (
        "decoder_layer_input", "context", *_PROJECTIONS, "out_proj", "mlpwi_0", "mlpwo",
    ),  # of OLMo's script
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a model, and how it is trained; names as in MaxText's configurations.

    `bare` leaves out what says where anything lies, but for the kernel: a planner gets it so.
    `windows` are those of attention in layers that repeat, 0 for none. With `norms_after` what
    attention and the MLP make is normed, and queries and keys, as OLMo 3 does (Team Olmo, 2025).
    `halved` counts half of attention, as MaxText does since July 2025.
    """

    emb_dim: int
    num_heads: int
    mlp_dim: int
    num_layers: int
    per_device_batch_size: int
    remat_policy: str = "full"
    head_dim: int = 128
    vocab_size: int = 32_000
    max_target_length: int = 2048
    fused: bool = False
    one_hot_embedding: bool = True
    windows: tuple[int, ...] = (0,)
    norms_after: bool = False
    logits_dot_in_fp32: bool = False
    sa_block: int = 512  # sa_block_q, sa_block_kv and the others of base.yml
    sa_use_fused_bwd_kernel: bool = False
    halved: bool = False
    bare: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Model:
        """That of a run in `runs.toml`."""
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        return cls.scaled(**settings) if "scale" in settings else cls(**settings)

    @classmethod
    def scaled(cls, scale: int, **settings: Any) -> Model:
        """A model of a `global_parameter_scale`, a power of two: so many billions of parameters."""
        base, left = divmod(scale.bit_length() - 1, 3)
        wide = 2 ** (base + (left > 0))
        return cls(
            emb_dim=2048 * 2 ** (base + (left > 1)),
            num_heads=16 * wide,
            mlp_dim=7168 * wide,
            num_layers=16 * 2**base,
            **settings,
        )

    def flops(self) -> int:
        """Floating-point operations of a step and device, as the published figures count them.

        `calculate_tflops_training_per_device`, which until July 2025 counted attention without its
        mask.
        """
        tokens = self.per_device_batch_size * self.max_target_length
        heads = self.num_heads * self.head_dim
        layer = 2 * tokens * self.emb_dim * (3 * self.mlp_dim + 4 * heads)
        attention = 4 * tokens * self.max_target_length * heads // (1 + self.halved)
        words = 2 * tokens * self.emb_dim * self.vocab_size
        return 3 * (self.num_layers * (layer + attention) + words)


def training(model: Model, mesh: Mapping[str, int]) -> tuple[Any, tuple[Any, Any]]:
    """A step of a run, and the shapes of its arguments.

    Args:
        model: what is trained.
        mesh: sizes of the axes ``fsdp`` and ``tensor``.
    """
    _, specs = _parameters(model)
    placed = {"params": specs, "mu": specs, "nu": specs, "count": P()}
    function, arguments = unplaced(model, mesh["fsdp"] * mesh["tensor"])
    step = pjit(
        function,
        in_axis_resources=(placed, P("fsdp")),
        out_axis_resources=(placed, None),
        donate_argnums=0,
    )
    return step, arguments


def unplaced(model: Model, devices: int) -> tuple[Any, tuple[Any, Any]]:
    """The same before it is said where arguments lie; the first one is to be donated."""
    shapes, _ = _parameters(model)
    states = {"params": shapes, "mu": shapes, "nu": shapes, "count": _of((), jnp.int32)}
    batch = _of((model.per_device_batch_size * devices, model.max_target_length), jnp.int32)
    names = "inputs", "targets", "segments", "positions"
    return functools.partial(_train_step, model), (states, dict.fromkeys(names, batch))


def _of(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _parameters(model: Model) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes and specs: layers are the second dimension of what is stacked."""
    e, h, d, f, n, v = (
        model.emb_dim, model.num_heads, model.head_dim, model.mlp_dim, model.num_layers,
        model.vocab_size,
    )  # fmt: skip
    both = {
        "embedding": ((v, e), P("tensor", "fsdp")),
        "attention_norm": ((e, n), P("tensor")),
        "mlp_norm": ((e, n), P("tensor")),
        "out": ((h, n, d, e), P("tensor", None, None, "fsdp")),
        "wo": ((f, n, e), P("tensor", None, "fsdp")),
        "norm": ((e,), P("tensor")),
        **({"q_norm": ((h * d, n), P()), "k_norm": ((h * d, n), P())} if model.norms_after else {}),
        "logits": ((e, v), P("fsdp", "tensor")),
    }
    if model.fused:
        both["qkv"] = (e, n, 3, h, d), P("fsdp", None, None, "tensor")
        both["wi"] = (e, n, 2, f), P("fsdp", None, None, "tensor")
    else:
        both |= {name: ((e, n, h, d), P("fsdp", None, "tensor")) for name in "qkv"}
        both |= {name: ((e, n, f), P("fsdp", None, "tensor")) for name in ("wi_0", "wi_1")}
    shapes = {name: _of(shape) for name, (shape, _) in both.items()}
    return shapes, {name: spec for name, (_, spec) in both.items()}


_STACKED = (
    "attention_norm", "mlp_norm", "out", "wo", "qkv", "wi", "q", "k", "v", "wi_0", "wi_1", "q_norm",
    "k_norm",
)  # fmt: skip

_RESIDUAL = P("fsdp", None, "tensor")
_BY_HEAD = P("fsdp", None, "tensor", None)


def _train_step(model: Model, state: Any, batch: Any) -> Any:
    loss, gradients = jax.value_and_grad(functools.partial(_loss, model))(state["params"], batch)
    norm = _norm(gradients)
    gradients = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradients)
    count = state["count"] + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
    nu = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["nu"], gradients)
    small, large = (1 - jnp.float32(beta) ** count for beta in (0.9, 0.95))

    def update(p: Any, m: Any, v: Any) -> Any:
        return p - 3e-5 * (m / small / (jnp.sqrt(v / large) + 1e-8) + 0.1 * p)

    params = jax.tree.map(update, state["params"], mu, nu)
    metrics = {"loss": loss, "grad_norm": _norm(gradients), "param_norm": _norm(params)}
    return {"params": params, "mu": mu, "nu": nu, "count": count}, metrics | {"raw": norm}


def _norm(tree: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)))


def _loss(model: Model, params: Any, batch: Any) -> Any:
    """The mean cross-entropy of the next words."""
    embedding = params["embedding"].astype(jnp.bfloat16)
    if model.one_hot_embedding:
        x = jax.nn.one_hot(batch["inputs"], model.vocab_size, dtype=jnp.bfloat16) @ embedding
    else:
        x = embedding[batch["inputs"]]
    x = _keep(model, x, _RESIDUAL)
    stacked = {name: jnp.moveaxis(params[name], 1, 0) for name in _STACKED if name in params}
    if (cycle := len(model.windows)) > 1:
        stacked = {
            name: w.reshape(w.shape[0] // cycle, cycle, *w.shape[1:]) for name, w in stacked.items()
        }

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        if cycle == 1:
            return _layer(model, w, x, batch, model.windows[0]), None
        for i, window in enumerate(model.windows):
            x = _layer(model, {name: leaf[i] for name, leaf in w.items()}, x, batch, window)
        return x, None

    x, _ = lax.scan(jax.checkpoint(layer, policy=_policy(model.remat_policy)), x, stacked)
    x = _rms_norm(model, x, params["norm"])
    dtype = jnp.float32 if model.logits_dot_in_fp32 else jnp.bfloat16
    logits = x.astype(dtype) @ params["logits"].astype(dtype)
    logits = _keep(model, logits, _RESIDUAL).astype(jnp.float32)
    right = jax.nn.one_hot(batch["targets"], model.vocab_size, dtype=jnp.float32)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(right * logits, axis=-1)
    return jnp.sum(losses * (batch["segments"] != 0)) / jnp.sum(batch["segments"] != 0)


def _keep(model: Model, x: Any, spec: P) -> Any:
    return x if model.bare else with_sharding_constraint(x, spec)


def _policy(name: str) -> Any:
    kept = _KEPT[name]
    if name.endswith("offloaded"):
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[*kept],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint_policies.save_only_these_names(*kept)


def _rms_norm(model: Model, x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(lax.square(wide), axis=-1, keepdims=True)
    normed = (wide * lax.rsqrt(mean + 1e-5)).astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
    return _keep(model, normed, _RESIDUAL)


def _layer(model: Model, w: Any, x: Any, batch: Any, window: int) -> Any:
    w = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), w)
    x = checkpoint_name(_keep(model, x, _RESIDUAL), "decoder_layer_input")
    if model.norms_after:
        attended = _keep(model, _attention(model, w, x, batch, window), _RESIDUAL)
        x = x + _rms_norm(model, attended, w["attention_norm"])
        hidden = _rms_norm(model, _keep(model, _gated(model, w, x), _RESIDUAL), w["mlp_norm"])
        return _keep(model, x + hidden, _RESIDUAL)
    attended = _attention(model, w, _rms_norm(model, x, w["attention_norm"]), batch, window)
    x = x + _keep(model, attended, _RESIDUAL)
    hidden = _gated(model, w, _rms_norm(model, x, w["mlp_norm"]))
    return _keep(model, x + _keep(model, hidden, _RESIDUAL), _RESIDUAL)


def _gated(model: Model, w: Any, x: Any) -> Any:
    if model.fused:
        both = jnp.einsum("bte,enf->btnf", x, w["wi"])
        both = checkpoint_name(_keep(model, both, _BY_PART), "mlpwi")
        gate, up = both[:, :, 0], both[:, :, 1]
    else:
        gate = checkpoint_name(x @ w["wi_0"], "mlpwi_0")
        up = checkpoint_name(x @ w["wi_1"], "mlpwi_1")
    hidden = _keep(model, jax.nn.silu(gate) * up, _RESIDUAL)
    return checkpoint_name(hidden @ w["wo"], "mlpwo")


_BY_PART = P("fsdp", None, None, "tensor")


def _attention(model: Model, w: Any, x: Any, batch: Any, window: int) -> Any:
    if model.fused:
        every = checkpoint_name(jnp.einsum("bte,enhd->btnhd", x, w["qkv"]), "qkv_proj")
        q, k, v = (every[:, :, i] for i in range(3))
    else:
        q, k, v = (jnp.einsum("bte,ehd->bthd", x, w[name]) for name in "qkv")
    if model.norms_after:  # over all heads
        q, k = (
            _rms_norm(model, a.reshape(*a.shape[:2], -1), w[f"{n}_norm"]).reshape(a.shape)
            for n, a in (("q", q), ("k", k))
        )
    q, k = (_rotated(one, batch["positions"]) for one in (q, k))
    named = zip((q, k, v), _PROJECTIONS, strict=True)
    q, k, v = (checkpoint_name(_keep(model, a, _BY_HEAD), n) for a, n in named)
    found = _splash(model, q / model.head_dim**0.5, k, v, batch["segments"], window)
    found = _keep(model, found, _BY_HEAD)
    return checkpoint_name(jnp.einsum("bthd,hde->bte", found, w["out"]), "out_proj")


def _rotated(x: Any, positions: Any) -> Any:
    """Rotary embedding of ``[batch, length, heads, head_dim]``."""
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = (f(angles).astype(jnp.bfloat16) for f in (jnp.sin, jnp.cos))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _splash(model: Model, q: Any, k: Any, v: Any, segments: Any, window: int) -> Any:
    """Causal attention by JAX's Pallas kernel, on the heads and rows of each device."""
    mesh = spmd.current_mesh()
    length = model.max_target_length
    sides = length, length
    mask = splash.LocalMask(sides, (window, 0), 0) if window else splash.CausalMask(sides)
    heads = model.num_heads // mesh.shape["tensor"]
    sizes = {field.name: model.sa_block for field in dataclasses.fields(splash.BlockSizes)}
    sizes |= {"use_fused_bwd_kernel": model.sa_use_fused_bwd_kernel} | {
        name: splash.QKVLayout.HEAD_DIM_MINOR for name in sizes if name.endswith("layout")
    }
    if model.sa_use_fused_bwd_kernel:  # which makes the gradient of queries as well
        sizes |= {"block_q_dq": None, "block_kv_dq": None}

    def local(q: Any, k: Any, v: Any, segments: Any) -> Any:
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * heads),
            block_sizes=splash.BlockSizes(**sizes),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name="context",
        )
        return jax.vmap(kernel)(q, k, v, splash.SegmentIds(segments, segments))

    spec = P("fsdp", "tensor")
    turned = (jnp.swapaxes(one, 1, 2) for one in (q, k, v))
    found = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec, spec, P("fsdp")), out_specs=spec, check_vma=False
    )(*turned, segments)
    return jnp.swapaxes(found, 1, 2)
