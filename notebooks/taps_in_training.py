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
# # Gradients, tapped shard by shard
#
# A training loop runs as one program on a mesh. We look into it while it runs: each device hands
# the gradients that it holds to a function of the host, nothing is gathered, and the program does
# not wait. Then we plot them, find out what is wrong with the data, and let a tap fail. Eight
# virtual devices will do.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# %%
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import PartitionSpec as P, host_callback as hcb, pjit, with_sharding_constraint

mesh = spmd.make_mesh({"data": 4, "model": 2})

# %% [markdown]
# ## A loop with a tap in it
#
# A small network learns a function of 32 features. Its first matrix is split over both axes of the
# mesh, `[features / 4, hidden / 2]` per device, and so is its gradient: the constraint says so, and
# the tap takes what it finds. With `per_shard=True` the host function is called once per device,
# and told whose values it gets.

# %%
BATCH, FEATURES, HIDDEN, STEPS = 256, 32, 64, 60
specs = {"up": P("data", "model"), "down": P("model")}


def predict(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def loss(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def training(tap=None, bar=lambda i, value: value):
    """The training loop, as one program on the mesh, with a tap on the gradient of `up`."""

    def step(params, i):
        value, gradients = jax.value_and_grad(loss)(params, X, Y)
        gradients = with_sharding_constraint(gradients, specs)
        if tap is not None:
            hcb.id_tap(tap, (i, gradients["up"]), per_shard=True)
        params = jax.tree.map(lambda p, g: p - 0.02 * g, params, gradients)
        return params, bar(i, value)

    def train(params):
        return jax.lax.scan(step, params, jnp.arange(STEPS))

    return pjit(train, in_axis_resources=(specs,), out_axis_resources=(specs, None), mesh=mesh)


# %% [markdown]
# The data: the target is a sum of sines of all features. (We forgot something about these features.
# The gradients will tell.)

# %%
rng = np.random.default_rng(0)
X = rng.standard_normal((BATCH, FEATURES), dtype=np.float32)
Y = np.sin(X).sum(1) / 4
X[:, 8:16] *= 12
start = {
    "up": rng.standard_normal((FEATURES, HIDDEN), dtype=np.float32) / 20,
    "down": rng.standard_normal(HIDDEN, dtype=np.float32) / 8,
}

# %% [markdown]
# The host function keeps the size of each gradient by device. It runs in a thread of that device's
# queue, while the devices go on.

# %%
sizes = defaultdict(list)


def keep(arg, transforms, *, shard):
    _, gradient = arg
    sizes[tuple(shard.coordinates.values())].append(float(np.linalg.norm(gradient)))


train = training(keep, hcb.progress(STEPS, description="training"))
params, losses = train(start)
hcb.barrier_wait()
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
print("calls per device:", [len(s) for s in sizes.values()])

# %% [markdown]
# ## A plot
#
# One panel per device, as they stand in the mesh: the norm of its part of the gradient at each
# step, on a logarithmic scale.


# %%
class Plot:
    """Small line plots in a grid, drawn as SVG."""

    def __init__(self, lines, low=1e-3, high=3.0):
        self.lines = lines
        self.low, self.high = np.log(low), np.log(high)

    def __repr__(self):
        return f"a plot of {len(self.lines)} lines"

    def _repr_svg_(self):
        panels = [self.panel(place, values) for place, values in sorted(self.lines.items())]
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 520 328" width="520" '
            f'font-family="sans-serif" font-size="11">{"".join(panels)}</svg>'
        )

    def panel(self, place, values):
        row, column = place
        heights = 62 * (1 - (np.log(values) - self.low) / (self.high - self.low))
        xs = np.linspace(0, 240, len(values))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, heights, strict=True))
        return (
            f'<g transform="translate({10 + 258 * column},{8 + 80 * row})">'
            '<rect width="240" height="70" fill="#f4f4f4"/>'
            f'<text x="6" y="64" fill="#555">data={row}, model={column}</text>'
            f'<polyline points="{points}" fill="none" stroke="#0072b2" stroke-width="1.8"/></g>'
        )


Plot(sizes)

# %% [markdown]
# The same as text, the mean over the steps:

# %%
for d in range(4):
    row = [np.mean(sizes[d, m]) for m in range(2)]
    print(f"data={d}  " + "  ".join(f"{r:7.4f} {'#' * round(40 * r)}".ljust(34) for r in row))

# %% [markdown]
# The devices of one row stand out: their part of the gradient is several times larger than that of
# the others. Rows of `up` are features, so this is about features 8 to 15, which somebody forgot to
# scale. Where in the array a shard lies is in `shard.index`; with it, the parts make up the whole
# gradient, that of the function without a mesh.

# %%
whole = np.full((FEATURES, HIDDEN), np.nan, np.float32)


def assemble(arg, transforms, *, shard):
    step, gradient = arg
    if step == 0:
        _, index = shard.index
        whole[index] = gradient


training(assemble)(start)
hcb.barrier_wait()
expected = jax.grad(loss)(start, X, Y)["up"]
np.testing.assert_allclose(whole, expected, rtol=1e-3, atol=1e-5)
by_feature = np.linalg.norm(whole, axis=1)
print("largest:", sorted(int(i) for i in np.argsort(by_feature)[-8:]))

# %% [markdown]
# ## What the tap costs the program
#
# No collective: the ledger of the program is what it is without a tap.


# %%
def collectives(function):
    with mesh:
        report = spmd.report(function, start)
    return sorted((c.kind, c.mesh_axes, c.payload_bytes) for c in report.collectives)


print(len(collectives(train)), "collectives")
assert collectives(train) == collectives(training())

# %% [markdown]
# ## A tap that fails
#
# An alarm that raises is a mistake, and one that happens. The loop does not stop, every later tap
# is delivered, and the result is the same to the last bit. The error is logged where it happens (we
# silence that here), and `barrier_wait` raises it, once.

# %%
import logging

logging.getLogger("spmd.host_callback").setLevel(logging.CRITICAL)

delivered = []


def alarm(arg, transforms, *, shard):
    step, gradient = arg
    delivered.append((int(step), shard.device.id))
    if shard.coordinates == {"data": 1, "model": 0} and step % 20 == 5:
        raise FloatingPointError(f"step {step}: the gradient is {np.linalg.norm(gradient):.2f}")


params_again, losses_again = training(alarm)(start)
try:
    hcb.barrier_wait()
except hcb.CallbackException as error:
    print(str(error).splitlines()[0])
    print(repr(error.__cause__))

assert len(delivered) == 8 * STEPS
np.testing.assert_array_equal(losses_again, losses)
jax.tree.map(np.testing.assert_array_equal, params_again, params)
hcb.barrier_wait()  # clear again
