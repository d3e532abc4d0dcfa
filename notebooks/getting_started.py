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
# # Getting started
#
# A layer split over eight devices: how to say it, how to see what the partitioner was given and
# what it made of it, and how to train with it. The devices are virtual, so a laptop will do; they
# have to be set up before JAX is imported.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# %%
import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import PartitionSpec as P, make_mesh, pjit, with_sharding_constraint

mesh = make_mesh({"data": 4, "model": 2})
mesh

# %% [markdown]
# ## One function, two axes
#
# Batches are split over `data`, the columns of the weights over `model`. The constraint inside
# pins the hidden layer to both.

# %%
rng = np.random.default_rng(0)
x = rng.standard_normal((32, 64), dtype=np.float32)
params = {
    "w1": rng.standard_normal((64, 128), dtype=np.float32) / 8,
    "w2": rng.standard_normal((128, 1), dtype=np.float32) / 11,
}
specs = {"w1": P(None, "model"), "w2": P("model", None)}


def predict(params, x):
    hidden = with_sharding_constraint(jnp.tanh(x @ params["w1"]), P("data", "model"))
    return (hidden @ params["w2"])[:, 0]


forward = pjit(predict, in_axis_resources=(specs, P("data")), out_axis_resources=P("data"))

with mesh:
    y = forward(params, x)

y.sharding.spec, [shard.data.shape for shard in y.addressable_shards][:2]

# %% [markdown]
# The result equals what one device computes:

# %%
np.testing.assert_allclose(y, np.tanh(x @ params["w1"]) @ params["w2"][:, 0], rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## What the partitioner is given, and what it made of it

# %%
with mesh:
    lowered = forward.lower(params, x)
print("\n".join(line for line in lowered.as_text().splitlines() if "sdy" in line)[:900])

# %%
compiled = lowered.compile()
print("inputs ", compiled.in_specs)
print("output ", compiled.out_specs)
print("calls  ", [w for w in ("all-reduce", "all-gather") if f" {w}(" in compiled.as_text()])

# %% [markdown]
# The contraction over `model` needs one all-reduce, and nothing else travels.
#
# ## Training
#
# `grad` goes through `pjit`. A gradient is split like its parameter, and the parameters are donated
# to the step that replaces them.

# %%
target = np.sin(x.sum(axis=1))


def loss(params, x):
    return jnp.mean((predict(params, x) - target) ** 2)


def train(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


step = pjit(
    train,
    in_axis_resources=(specs, P("data")),
    out_axis_resources=(None, specs),
    donate_argnums=0,
)

before = spmd.counts()
with mesh:
    state, losses = with_sharding_constraint(params, specs), []
    for _ in range(50):
        value, state = step(state, x)
        losses.append(float(value))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
print(spmd.counts() - before)
assert losses[-1] < 0.5 * losses[0]

# %% [markdown]
# ## A mistake, answered

# %%
try:
    with mesh:
        forward(params, x[:30])
except spmd.ShardingError as error:
    print(error)
