# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Plan GPT-2 small, and see what two experts would have cost
#
# Which mesh, and what is split along which of its axes? We let `spmd.plan` answer for a training
# step of GPT-2 small, for eight devices and for a `v5e:4x4` that nobody here has, and put two plans
# that people write by hand beside the answer: FSDP and Megatron. Nothing runs but the compilers.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# %%
import jax
import jax.numpy as jnp

import spmd
from spmd import PartitionSpec as P

# %% [markdown]
# ## The step
#
# Twelve scanned and recomputed layers of 768, 12 heads, 50,304 words (50,257 padded to a multiple
# of 128), bf16 with moments of Adam in f32, and a batch of 32 sequences of 512.

# %%
LAYERS, WIDTH, HEADS, WORDS, BATCH, LENGTH = 12, 768, 12, 50_304, 32, 512


def shapes():
    def bf16(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    params = {
        "embed": bf16(WORDS, WIDTH),
        "layers": {
            "qkv": bf16(LAYERS, 3, WIDTH, HEADS, WIDTH // HEADS),
            "out": bf16(LAYERS, HEADS, WIDTH // HEADS, WIDTH),
            "up": bf16(LAYERS, WIDTH, 4 * WIDTH),
            "down": bf16(LAYERS, 4 * WIDTH, WIDTH),
            "norms": bf16(LAYERS, 2, WIDTH),
        },
    }
    moment = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    return {"params": params, "m": moment, "v": moment}


def norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def layer(x, w):
    h = norm(x, w["norms"][0])
    q, k, v = jnp.einsum("btd,ndhk->nbthk", h, w["qkv"])
    scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    h = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores).astype(x.dtype), v)
    x = x + jnp.einsum("bthk,hkd->btd", h, w["out"])
    h = norm(x, w["norms"][1])
    return x + jax.nn.gelu(h @ w["up"]) @ w["down"]


def loss(params, tokens):
    x = params["embed"][tokens]
    block = jax.checkpoint(lambda x, w: (layer(x, w), None))
    x, _ = jax.lax.scan(block, x, params["layers"])
    logits = (x @ params["embed"].T).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def train_step(state, tokens):
    value, grads = jax.value_and_grad(loss)(state["params"], tokens)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(m.dtype), state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g.astype(v.dtype) ** 2, state["v"], grads)

    def update(p, m, v):
        return p - (1e-3 * m / (jnp.sqrt(v) + 1e-8)).astype(p.dtype)

    params = jax.tree.map(update, state["params"], m, v)
    return {"params": params, "m": m, "v": v}, value


args = shapes(), jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)

# %% [markdown]
# ## Sixteen chips that are not here
#
# The planner compares layouts over every mesh of 16 chips with axes `data` and `model`, and has the
# TPU's compiler look at the best ones.

# %%
plan = spmd.plan(
    train_step,
    *args,
    topology="v5e:4x4",
    donate_argnums=0,
    top=2,
    classes={"rows": "tokens:0", "length": "tokens:1", "words": "state['params']['embed']:0"},
)
print(plan)

# %% [markdown]
# ## Beside two experts
#
# FSDP splits the rows and, where an array has none, the width, over all chips. Megatron splits
# heads, hidden units and words over `model`. People write them as specs of the state, and leave the
# inside to the partitioner. That is what we compile here, for meshes that suit each. The planner
# has tried both ideas as well, with constraints inside. Without them the compiler leaves FSDP's
# weights in parts while it multiplies, and sends the parts around: that is why it takes so long.

# %%
FSDP = {
    "embed": P(None, "data"),
    "layers": {
        "qkv": P(None, None, "data"),
        "out": P(None, None, None, "data"),
        "up": P(None, "data"),
        "down": P(None, None, "data"),
        "norms": P(),
    },
}
MEGATRON = {
    "embed": P("model"),
    "layers": {
        "qkv": P(None, None, None, "model"),
        "out": P(None, "model"),
        "up": P(None, None, "model"),
        "down": P(None, "model"),
        "norms": P(),
    },
}


def compiled(specs, axes):
    state = dict.fromkeys(("params", "m", "v"), specs)
    step = spmd.pjit(
        train_step,
        in_axis_resources=(state, P("data")),
        out_axis_resources=(state, P()),
        donate_argnums=0,
    )
    with spmd.topology("v5e:4x4", axes):
        return spmd.report(step, *args)


experts = {
    "FSDP, data=16": compiled(FSDP, {"data": 16}),
    "Megatron, data=4, model=4": compiled(MEGATRON, {"data": 4, "model": 4}),
}
for name, report in experts.items():
    print(f"{name:30}{report.time.seconds * 1e3:8.1f} ms{report.memory.peak / 2**30:8.2f} GiB")
print(f"{'the plan':30}{plan.seconds * 1e3:8.1f} ms{plan.memory / 2**30:8.2f} GiB")
assert plan.verified == "time"
assert plan.seconds <= min(report.time.seconds for report in experts.values())

# %% [markdown]
# ## What another place would cost
#
# The prices are the planner's estimates: how much longer a call would take, and how much more a
# device would hold.

# %%
print(plan.why("state['params']['layers']['up']"))

# %% [markdown]
# ## Eight devices that are here
#
# The devices of this notebook are CPUs. The planner uses the figures of a v5e for them, and the
# CPU's compiler verifies what is sent, and no time. `code()` is what you would write yourself.

# %%
mesh = spmd.make_mesh({"data": 4, "model": 2})
here = spmd.plan(train_step, *args, mesh=mesh, donate_argnums=0, top=1)
print(here.verified)
print(here.code())
