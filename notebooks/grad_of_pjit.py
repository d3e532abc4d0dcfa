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
# # The gradient of a pjit function, and what it keeps
#
# `jax.grad` of a `pjit` function runs two programs: one computes the loss, the other the gradient.
# What the first one leaves for the second are the residuals. Here we look at them: which arrays
# they are, how they lie on the mesh, what they cost, and how to have fewer. Eight virtual devices
# will do.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# %%
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import PartitionSpec as P, pjit, with_sharding_constraint

mesh = spmd.make_mesh({"data": 4, "model": 2})

# %% [markdown]
# ## A loss
#
# A layer and its way back: rows of the batch are split over `data`, hidden units over `model`.

# %%
BATCH, WIDTH, HIDDEN = 64, 32, 128
specs = {"up": P(None, "model"), "down": P("model", None)}


def loss(params, x):
    hidden = jnp.tanh(x @ params["up"])
    return jnp.mean((hidden @ params["down"]) ** 2)


f = pjit(loss, in_axis_resources=(specs, P("data")), out_axis_resources=None, mesh=mesh)

rng = np.random.default_rng(0)
params = {
    "up": rng.standard_normal((WIDTH, HIDDEN), dtype=np.float32) / 6,
    "down": rng.standard_normal((HIDDEN, WIDTH), dtype=np.float32) / 11,
}
x = rng.standard_normal((BATCH, WIDTH), dtype=np.float32)
with mesh:
    params, x = with_sharding_constraint((params, x), (specs, P("data")))

# %% [markdown]
# Traced, the call is one equation. It carries the body, and the record that says how its arguments
# and results are split.

# %%
print(jax.make_jaxpr(f)(params, x))

# %% [markdown]
# ## Two halves
#
# `jax.vjp` runs the first half and returns the loss and the pullback, a function that runs the
# second. Residuals are the arrays that the pullback holds. One that has the buffer of an argument
# is the argument itself and costs nothing.


# %%
def buffers(array):
    """Where the shards of an array are in memory."""
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def residuals(pullback, params, x):
    """The arrays of a pullback that are no scalars, each with the argument that it is, or None."""
    arguments = {**params, "x": x}
    for array in jax.tree.leaves(pullback):
        if array.ndim:
            same = [name for name, a in arguments.items() if buffers(a) == buffers(array)]
            yield array, same[0] if same else None


value, pullback = jax.vjp(f, params, x)
for array, name in residuals(pullback, params, x):
    shard = array.addressable_shards[0].data
    what = f"the argument {name}" if name else f"{shard.nbytes:,} bytes, made by the first half"
    print(f"{array.shape!s:>9} {array.sharding.spec!s:<18} {shard.shape!s:>8} per device: {what}")

# %% [markdown]
# The hidden layer is there twice: `tanh` keeps its result, and its derivative. Nobody gave them a
# spec. The compiler split them over both axes, and so they stay between the halves: `spmd` reads
# the sharding back from the executable and gives it to the second half. Were they replicated, each
# device would hold eight times as much, and gather it first.
#
# ## On the mesh
#
# A table of who holds what: rows of the hidden layer over `data`, columns over `model`.


# %%
def block(index, shape):
    """A slice of an array as text."""
    return ", ".join("{}:{}".format(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


hidden = next(a for a, name in residuals(pullback, params, x) if a.shape == (BATCH, HIDDEN))
held = hidden.sharding.devices_indices_map(hidden.shape)
print(f"{'':8}{'model=0':<26}model=1")
for d, row in enumerate(mesh.devices):
    left, right = (f"device {one.id}: [{block(held[one], hidden.shape)}]" for one in row)
    print(f"data={d}  {left:<26}{right}")

# %% [markdown]
# JAX can draw it, too:

# %%
jax.debug.visualize_array_sharding(hidden, use_color=False)

# %% [markdown]
# ## The second half
#
# Each gradient is split like its argument, on every device.

# %%
gradients, x_gradient = pullback(jnp.ones_like(value))
for name, gradient in {**gradients, "x": x_gradient}.items():
    argument = {**params, "x": x}[name]
    print(f"{name:<5} {gradient.sharding.spec!s:<18} {gradient.addressable_shards[0].data.shape}")
    assert gradient.sharding.is_equivalent_to(argument.sharding, argument.ndim)

# %% [markdown]
# They are those of the function without `pjit`:

# %%
unsharded = jax.grad(loss)(jax.device_get(params), jax.device_get(x))
for name, expected in unsharded.items():
    np.testing.assert_allclose(gradients[name], expected, rtol=1e-4, atol=1e-6)

# %% [markdown]
# ## How often it compiles
#
# Each half compiles once, and a training loop compiles nothing after its first step.

# %%
spmd.clear_caches()
gradient = jax.value_and_grad(f)
for step in range(3):
    before = spmd.counts()
    value, gradients = gradient(params, x)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    print(f"step {step}: loss {float(value):.4f}, compiles {(spmd.counts() - before).compiles}")

# %% [markdown]
# ## Fewer residuals
#
# `jax.checkpoint` computes them again in the second half instead of keeping them. A policy says
# which to keep: here those of matrix products with no batch dimensions.


# %%
def kept(function):
    """Bytes of residuals on a device that are no arguments."""
    _, pullback = jax.vjp(function, params, x)
    made = [array for array, name in residuals(pullback, params, x) if name is None]
    return sum(array.addressable_shards[0].data.nbytes for array in made)


def partitioned(function):
    return pjit(function, in_axis_resources=(specs, P("data")), out_axis_resources=None, mesh=mesh)


some = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
for name, function in {
    "no checkpoint": f,
    "matrix products": partitioned(jax.checkpoint(loss, policy=some)),
    "checkpoint inside": partitioned(jax.checkpoint(loss)),
    "checkpoint around": jax.checkpoint(f),
}.items():
    print(f"{name:<18} {kept(function):>7,} bytes per device")

# %% [markdown]
# ## A donated argument
#
# A donated array gives its memory to a result. The second half needs `params` and `x`, so in a
# derivative they are not donated, and a warning says so. Here the gradient is taken of a function
# that donates; the other way round, as in a training step that donates its state and takes the
# gradient inside, is the one to use.

# %%
donating = pjit(
    loss,
    in_axis_resources=(specs, P("data")),
    out_axis_resources=None,
    mesh=mesh,
    donate_argnums=1,
)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jax.grad(donating)(params, x)

for one in caught:
    what, *_, fix = str(one.message).splitlines()
    print(f"{one.category.__name__}: {what}\n{fix}")
print("x is deleted:", x.is_deleted())
