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
# # Reading and saving beside the step
#
# A training loop has work for the hosts: it reads batches, writes checkpoints, keeps a count of
# what it has seen. Written as plain Python between two steps, that work makes the devices wait.
# Here it is *colocated Python*: functions and objects that run on the hosts of the devices, and
# return arrays at once. The loop stays as it was; only who waits for whom changes. Eight virtual
# devices will do.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# %%
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import spmd
from spmd import PartitionSpec as P
from spmd.colocated_python import (
    barrier,
    colocated_cpu_devices,
    colocated_python,
    colocated_python_class,
)

mesh = spmd.make_mesh({"data": 4, "model": 2})
hosts = colocated_cpu_devices(mesh)  # the same mesh here; on a GPU or TPU, CPU devices of its hosts

# %% [markdown]
# ## What happens when
#
# Everything below notes when it begins and ends, so that we can draw it.

# %%
spans = []
begin = time.perf_counter()


class Noted:
    """Notes one span of time in a row of the picture."""

    def __init__(self, row, label=""):
        self.row, self.label = row, label

    def __enter__(self):
        self.start = time.perf_counter() - begin

    def __exit__(self, *_):
        spans.append((self.row, self.label, self.start, time.perf_counter() - begin))


# %% [markdown]
# ## A reader with state
#
# The data: rows of features, and a target that depends on them. Reading a batch takes 100 ms here,
# as if it came from a disk. `Reader` is an ordinary class. Wrapped, its constructor does not run
# yet: an object is made on each host that has a part of the batch, by the first call there, and
# keeps its position in the data between calls.
#
# It returns `jax.Array`s on the devices of its argument; NumPy in between. A function of the hosts
# should not run programs on several devices while others wait for it, so it does not compute with
# `jax.numpy`.

# %%
BATCH, FEATURES, STEPS = 64, 16, 6
rows = jax.NamedSharding(hosts, P("data"))
truth = np.random.default_rng(0).standard_normal(FEATURES).astype(np.float32)


class Reader:
    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.batches = 0

    def next(self, like):
        with Noted("read", str(self.batches)):
            time.sleep(0.1)
            x = self.random.standard_normal(like.shape, dtype=np.float32)
            self.batches += 1
            return jax.device_put(x, like.sharding), jax.device_put(x @ truth, like.sharding)

    def count(self, like):
        return jax.device_put(np.full(like.shape, self.batches, np.int32), like.sharding)


RemoteReader = colocated_python_class(Reader)


def batch_specs(like):
    y = jax.ShapeDtypeStruct(like.shape[:1], np.float32, sharding=like.sharding)
    return like, y


# %% [markdown]
# A call returns arrays before the batch is read, and a program takes them as any others; it starts
# when they are there. What a call returns has to be known for that: `out_specs_fn` says it.

# %%
like = jax.device_put(np.zeros((BATCH, FEATURES), np.float32), rows)
reader = RemoteReader(seed=1)
read = reader.next.specialize(out_specs_fn=batch_specs)

x, y = read(like)
print("read already:", x.is_ready())
error = jax.jit(lambda x, y: jnp.abs(x @ truth - y).max())(x, y)
print(f"largest difference: {error:.0e}")

# %% [markdown]
# ## A writer of checkpoints
#
# Orbax writes the parts that a host has. The function returns nothing, so nothing waits for it; it
# keeps its place in the order of calls, and `barrier` waits for it and raises what it raised.

# %%
folder = tempfile.mkdtemp()


class Saver:
    def __init__(self, folder):
        self.folder, self.checkpointer = folder, ocp.StandardCheckpointer()

    def save(self, step, state):
        with Noted("save", str(int(step))):
            self.checkpointer.save(f"{self.folder}/{int(step)}", state, force=True)
            self.checkpointer.wait_until_finished()


save = colocated_python_class(Saver)(folder).save.specialize(out_specs_fn=lambda *_: None)

# %% [markdown]
# ## The loop
#
# The step is a program on the mesh. It is donated its state, so what is saved is a copy: an
# argument must not be given away before its function has run. We repeat each step to make it last
# about as long as reading does.


# %%
def loss_of(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


@spmd.pjit(
    in_axis_resources=(P("model"), P("data"), P("data")),
    out_axis_resources=(P("model"), None),
    donate_argnums=0,
    mesh=mesh,
)
def step(w, x, y):
    def descend(_, w):
        return w - 0.0005 * jax.grad(loss_of)(w, x, y)

    w = jax.lax.fori_loop(0, 400, descend, w)
    return w, loss_of(w, x, y)


placed = jax.NamedSharding(mesh, P("model"))
one = jax.NamedSharding(mesh, P())
w, _ = step(jax.device_put(np.zeros(FEATURES, np.float32), placed), x, y)  # compiles
save(jax.device_put(np.int32(0), one), {"w": jnp.copy(w)})  # makes the checkpointer
barrier()


def train(reads_ahead):
    """Six steps; returns the losses. Reads the next batch while a step runs, or after it."""
    global w
    spans.clear()
    losses = []
    batch = read(like)
    for i in range(STEPS):
        jax.block_until_ready(batch)
        with Noted("step", str(i)):
            w, loss = step(w, *batch)
            if reads_ahead:
                batch = read(like)
            losses.append(float(loss))
        if not reads_ahead:
            batch = read(like)
        if i % 3 == 2:
            save(jax.device_put(np.int32(i), one), {"w": jnp.copy(w)})
            if not reads_ahead:
                barrier()
    barrier()
    return losses


# %% [markdown]
# First as plain code does it, one after the other; then each beside the other.

# %%
train(reads_ahead=False)
apart = [*spans]
losses = train(reads_ahead=True)
together = [*spans]


# %%
def seconds(spans):
    return max(b for _, _, _, b in spans) - min(a for _, _, a, _ in spans)


COLORS = {"step": "#0072b2", "read": "#e69f00", "save": "#009e73"}


class Timeline:
    """Rows of spans of time, drawn as SVG."""

    def __init__(self, **groups):
        self.groups = groups

    def __repr__(self):
        return f"a timeline of {sum(map(len, self.groups.values()))} spans"

    def _repr_svg_(self):
        drawn = [self.draw(i, *group) for i, group in enumerate(self.groups.items())]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {130 * len(drawn)}" '
            f'width="640" font-family="sans-serif" font-size="11">{"".join(drawn)}</svg>'
        )

    def draw(self, i, name, spans):
        start = min(a for _, _, a, _ in spans)
        scale = 590 / max(map(seconds, self.groups.values()))
        parts = [f'<text x="0" y="{130 * i + 12}">{name}</text>']
        for j, (row, color) in enumerate(COLORS.items()):
            y = 130 * i + 22 + 32 * j
            parts.append(f'<text x="0" y="{y + 15}" fill="#555">{row}</text>')
            parts += [
                f'<rect x="{40 + scale * (a - start):.1f}" y="{y}" width="{scale * (b - a):.1f}" '
                f'height="22" fill="{color}" stroke="white"/>'
                f'<text x="{43 + scale * (a - start):.1f}" y="{y + 15}" fill="white">{label}</text>'
                for r, label, a, b in spans
                if r == row
            ]
        return "".join(parts)


print(f"{seconds(apart):.2f} s one after the other, {seconds(together):.2f} s beside one another")
Timeline(**{"one after the other": apart, "beside one another": together})

# %% [markdown]
# The order is that of the calls in both: batch after batch, and the checkpoint between two of them,
# since one thread has made all the calls. Calls of several threads overlap.
#
# ## What came of it
#
# The state of the reader is on the hosts; its methods return it. And the last checkpoint is what
# the loop has now.

# %%
print("loss:", " ".join(f"{loss:.4f}" for loss in losses))
print("batches:", int(reader.count(jax.device_put(np.zeros(()), one))))

with ocp.StandardCheckpointer() as checkpointer:
    shape = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)
    restored = checkpointer.restore(f"{folder}/{STEPS - 1}", {"w": shape})
np.testing.assert_array_equal(restored["w"], w)

# %% [markdown]
# ## When reading fails
#
# The error is raised where the arrays are waited for, and names the function, the process and the
# line. What does not depend on them goes on.


# %%
@colocated_python
def broken(like):
    raise FileNotFoundError("shard-00017.npz")


batch = broken.specialize(out_specs_fn=lambda like: like)(like)
doubled = jax.jit(lambda x: x * 2)(batch)
try:
    doubled.block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print(str(error).splitlines()[1].strip())

w, loss = step(w, *read(like))
print(f"and on: {loss:.4f}")
