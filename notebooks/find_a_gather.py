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
# # Find an all-gather that nobody asked for
#
# A model that trains correctly can send half as many bytes again as it has to. Here is one. We look
# at what its training step exchanges, find the line, repair it, and keep it repaired with a test.
# Eight virtual devices will do.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# %%
import jax
import jax.numpy as jnp

import spmd
from spmd import PartitionSpec as P, pjit, with_sharding_constraint

mesh = spmd.make_mesh({"data": 4, "model": 2})

# %% [markdown]
# ## The model
#
# Four MLP blocks, scanned. Hidden units are split over `model`, rows of the batch over `data`, as
# in Megatron: all that a block needs is one sum over `model` for its output, and one for the
# gradient of its input. Constraints pin everything, to be safe.

# %%
LAYERS, BATCH, WIDTH, HIDDEN = 4, 1024, 256, 1024


def mlp(x, w):
    h = jax.nn.gelu(x @ w["up"])
    h = with_sharding_constraint(h, P("data", None))
    return h @ w["down"]


def loss(layers, x):
    def block(x, w):
        return x + mlp(x, w), None

    x, _ = jax.lax.scan(block, x, layers)
    return jnp.mean(x**2)


def step(layers, x):
    gradients = jax.grad(loss)(layers, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients)


specs = {"up": P(None, None, "model"), "down": P(None, "model")}
train = pjit(step, in_axis_resources=(specs, P("data")), out_axis_resources=specs)

layers = {
    "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
}
x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)

# %% [markdown]
# ## 1. What does a step exchange?
#
# Shapes are enough, nothing runs.

# %%
with mesh:
    before = spmd.report(train, layers, x)

for (kind, axes), total in before.totals("kind", "axis").items():
    over = ", ".join(axes)
    print(f"{kind} over {over}: {total.executions} runs, {total.wire_bytes:,} bytes")

# %% [markdown]
# An all-gather over `model`, which the plan above does not have.
#
# ## 2. Which line?

# %%
gathers = [one for one in before.collectives if one.kind == "all-gather"]
for one in gathers:
    print(
        f"line {one.source.line} in {one.source.function}, {one.direction}, "
        f"{one.shapes.operands[0]} -> {one.shapes.results[0]}, {one.executions} runs"
    )

# %% [markdown]
# Each runs once per layer. One of them takes the hidden layer: its operand has half of the columns,
# its result all of them, so the hidden units are brought together on every device. The constraint
# in `mlp` demands that: its `None` means "all of it here". The other takes weights, which the
# gradient of a whole hidden layer needs whole.
#
# The report says the same in one view, with the bytes of each line and with what the step holds in
# memory.

# %%
before.show()

# %% [markdown]
# ## 3. Repair
#
# The constraint should say what the plan says.


# %%
def mlp(x, w):
    h = jax.nn.gelu(x @ w["up"])
    h = with_sharding_constraint(h, P("data", "model"))
    return h @ w["down"]


spmd.clear_caches()  # the step is traced already, with the old function
with mesh:
    after = spmd.report(train, layers, x)

# %% [markdown]
# ## 4. What changed?

# %%
spmd.diff(before, after).show()

# %%
assert not [one for one in after.collectives if one.kind == "all-gather"]
print(f"{before.total.wire_bytes:,} -> {after.total.wire_bytes:,} bytes per device and step")
print(f"{before.cost.flops:,} -> {after.cost.flops:,} FLOPs per device and step")

# %% [markdown]
# What is left over `model` is what the plan has: one sum in each block, forward, and one backward.
# (The first block needs no gradient of its input, but the scan computes it for all.) By hand that
# is `2 * 4 layers * 1024/4 * 256 * 4 bytes`, and in a ring of two devices each sends all of these
# bytes once.

# %%
by_hand = 2 * LAYERS * (BATCH // 4) * WIDTH * 4
print(after.totals("axis")[("model",)].wire_bytes == by_hand)

# %% [markdown]
# ## 5. Keep it so
#
# In a test, this fails with the line of whatever brings the gather back.

# %%
from spmd.testing import assert_collectives

limits = {"none": ["all-gather"], "max_bytes": {"model": by_hand}}
report = assert_collectives(after, **limits)

# %%
try:
    assert_collectives(before, **limits)
except AssertionError as error:
    print(error)
