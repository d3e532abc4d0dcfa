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
# # From a finding to its fix
#
# A training step is split over a mesh of two axes, gives the right numbers, and does a good part
# of its work four times. Its report says so; `why` says where a sharding is missing; `preview`
# tries the repair before anything is compiled; and the difference of two reports says what it
# brought. Eight virtual devices will do.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# %%
import warnings

import jax
import jax.numpy as jnp

import spmd
from spmd import PartitionSpec as P, pjit

mesh = spmd.make_mesh({"data": 4, "model": 2})
# JAX says by itself that a donated array was of no use; so does the report.
warnings.filterwarnings("ignore", message="Some donated buffers were not usable")

# %% [markdown]
# ## The step
#
# Four layers of two matrices, split over `model`. The batch is donated, since the next one is
# another one.

# %%
D, HIDDEN, LAYERS, BATCH = 256, 1024, 4, 2048


def layer(h, w):
    up = jnp.tanh(h @ w["up"])
    return h + up @ w["down"], None


def loss(weights, x):
    h, _ = jax.lax.scan(layer, x, weights)
    return (h**2).mean()


def step(weights, x):
    value, grads = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


weights = {
    "up": jax.ShapeDtypeStruct((LAYERS, D, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, D), jnp.float32),
}
x = jax.ShapeDtypeStruct((BATCH, D), jnp.float32)
specs = {"up": P(None, None, "model"), "down": P(None, "model")}

first = pjit(
    step,
    in_axis_resources=(specs, None),
    out_axis_resources=(specs, None),
    donate_argnums=(0, 1),
    mesh=mesh,
)
before = spmd.report(first, weights, x)
for one in before.findings:
    print(one.subject + (f" ({one.nbytes:,} bytes)" if one.nbytes else ""))
    print(f"    {'; '.join(one.facts)}")
    print(f"    fix: {one.fix}")

# %% [markdown]
# The first finding is the cause: no spec says how the batch is split, so the devices along `data`
# repeat one another. Its facts say how much work that is; what follows from it is not told again.
# The second finding stands alone: a donated batch makes room for nothing, since no result has its
# shape.
#
# ## What is known of a value
#
# `why` takes a path or a line; the cell of a notebook is a file with a number for its name. Of `x`
# it knows that nobody asked for anything; on the line of the hidden layer it follows the axis that
# did arrive, from the weights on.

# %%
lowered = first.lower(weights, x)
print(lowered.why("x"))

# %%
place = f"{os.path.basename(layer.__code__.co_filename)}:{layer.__code__.co_firstlineno + 1}"
print("\n\n".join(str(lowered.why(place)).split("\n\n")[:2]))  # of several values the first

# %% [markdown]
# ## The repair, before it is compiled
#
# One spec says it: rows over `data`. `preview` runs the passes of Shardy alone and predicts the
# exchanges: each device now has a part of the rows, so the gradients have to be summed over
# `data`.

# %%
second = pjit(
    step,
    in_axis_resources=(specs, P("data")),
    out_axis_resources=(specs, None),
    donate_argnums=0,
    mesh=mesh,
)
print(lowered.preview())

# %%
print(second.lower(weights, x).preview())

# %% [markdown]
# ## What it brought

# %%
after = spmd.report(second, weights, x)
print("findings:", [one.subject for one in after.findings])
for name, report in (("before", before), ("after", after)):
    print(f"{name:7} {report.cost.flops:>14,} FLOPs {report.memory.peak:>12,} bytes at the peak")

# %% [markdown]
# A quarter of the operations, and much less memory, for the bytes on the wire that the difference
# of the two reports lists:

# %%
print(spmd.diff(before, after))

# %% [markdown]
# ## What lies where

# %%
print(spmd.visualize(jax.sharding.NamedSharding(mesh, P("data")), shape=(BATCH, D)))

# %% [markdown]
# `after.save("step.html")` writes all of it as a page. In CI, `spmd.testing.assert_collectives`
# holds what was won; see [hold a budget in CI](../docs/budgets.md).
