"""Programs whose exchanges between devices are counted by hand.

Each program says what it must exchange as expressions of its own sizes: what the shardings demand,
not what some output said. All sizes of a program differ, so that no number can stand for another.
A line that an exchange must be traced back to ends in ``# here: NAME``.

The mesh is ``data=4, model=2`` on 8 virtual CPU devices or on a described TPU v5e:2x4. Where the
backends or the two ends of the JAX range differ by right, the count says why. Compilers turn,
squeeze and split what they exchange, so shapes are compared up to layout, bytes exactly.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from fractions import Fraction
import functools
import math
from pathlib import Path
from typing import Any

import jax
from jax.experimental import pallas
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np

import spmd
from spmd import topology, with_sharding_constraint as constrain

AXES = {"data": 4, "model": 2}
DATA, MODEL = AXES["data"], AXES["model"]
NEW = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)
_LINES = Path(__file__).read_text().splitlines()


@functools.cache
def line_of(marker: str) -> int:
    """The line of this file that ends in ``# here: marker``."""
    (line,) = (n for n, text in enumerate(_LINES, 1) if text.endswith(f"# here: {marker}"))
    return line


# What a ledger must say


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One exchange, as counted by hand.

    Args:
        kind: as in the ledger.
        axes: names of mesh axes, with a part of one as ``data:(2)2``.
        operands: per device, such as ``f32[8,24]``; one for each exchange that is combined.
        results: likewise.
        payload: bytes per device and execution, the larger of before and after.
        sent: bytes that the ring formula is about, where they are not the payload.
        n: devices that exchange with each other.
        times: executions; None where only the data know.
        way: direction.
        at: markers of lines, any of which is right; none where the compiler gives no line at all.
        is_async: None where TPU's scheduler may decide either way; on CPU nothing is.
        combined: exchanges of the program in this one.
        conditional: whether it may not run.
    """

    kind: str
    axes: tuple[str, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    payload: int
    n: int
    times: int | None = 1
    way: str = "other"
    at: tuple[str, ...] = ()
    is_async: bool | None = None
    combined: int = 1
    conditional: bool = False
    sent: int | None = None

    @property
    def wire(self) -> int:
        """Bytes that each device sends in a ring, rounded up."""
        times = {
            "all-reduce": Fraction(2 * (self.n - 1), self.n),
            "all-gather": Fraction(self.n - 1, self.n),
            "reduce-scatter": Fraction(self.n - 1, self.n),
            "all-to-all": Fraction(self.n - 1, self.n),
            "ragged-all-to-all": Fraction(self.n - 1, self.n),
            "collective-permute": Fraction(1),
        }[self.kind]
        return math.ceil(times * (self.payload if self.sent is None else self.sent))


def f32(*dims: int) -> str:
    """The shape of an array of floats, as the ledger writes it."""
    return f"f32[{','.join(map(str, dims))}]"


def bf16(*dims: int) -> str:
    """The shape of an array of bfloat16."""
    return f32(*dims).replace("f32", "bf16")


# Where a program runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A backend and its mesh ``data=4, model=2``."""

    backend: str
    mesh: Mesh

    @property
    def tpu(self) -> bool:
        """Whether programs are compiled for a TPU."""
        return self.backend == "tpu"

    def place(self, specs: Any) -> Any:
        """A tree of specs as shardings; None stays None."""
        return jax.tree.map(
            lambda spec: spec if spec is None else NamedSharding(self.mesh, spec),
            specs,
            is_leaf=lambda spec: spec is None or isinstance(spec, P),
        )

    def keep(self, value: Any, *spec: Any) -> Any:
        """A constraint that needs no active mesh."""
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, P(*spec)))

    def jit(self, fun: Callable, ins: Any, outs: Any, *args: Any) -> Any:
        """Lowers `fun` by `jax.jit` with shardings."""
        placed = {"in_shardings": self.place(ins), "out_shardings": self.place(outs)}
        return jax.jit(fun, **placed).lower(*args)

    def pjit(self, fun: Callable, ins: Any, outs: Any, *args: Any) -> Any:
        """Lowers `fun` by `spmd.pjit` with specs."""
        return spmd.pjit(fun, ins, outs, mesh=self.mesh).lower(*args)

    def manual(self, fun: Callable, ins: Any, outs: Any, *args: Any, **options: Any) -> Any:
        """Lowers `fun`, which says its exchanges itself, by `jax.shard_map`."""
        mapped = jax.shard_map(fun, mesh=self.mesh, in_specs=ins, out_specs=outs, **options)
        return self.jit(mapped, ins, outs, *args)


def cpu_target(order: tuple[int, ...] = tuple(range(8))) -> Target:
    """Eight virtual CPU devices, in any order."""
    devices = np.array(jax.devices("cpu")[:8])[list(order)]
    return Target(backend="cpu", mesh=Mesh(devices.reshape(DATA, MODEL), tuple(AXES)))


def tpu_target() -> Target:
    """Eight chips of a described TPU v5e, which needs libtpu."""
    described = topology("v5e:2x4").devices.reshape(DATA, MODEL)
    return Target(backend="tpu", mesh=Mesh(described, tuple(AXES)))


def gpu_target() -> Target:
    """Eight described GPUs, which need JAX's plugin for CUDA."""
    described = topology("h200:8").devices.reshape(DATA, MODEL)
    return Target(backend="gpu", mesh=Mesh(described, tuple(AXES)))


def array(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The description of an array."""
    return jax.ShapeDtypeStruct(dims, dtype)


Counted = tuple[Any, list[Row]]
PROGRAMS: dict[str, tuple[Callable[[Target], Counted], tuple[str, ...], dict]] = {}


def program(*backends: str, **options: Any) -> Callable:
    """Registers a program for some backends (default: all), with options of the compiler."""

    def register(fun: Callable[[Target], Counted]) -> Callable[[Target], Counted]:
        PROGRAMS[fun.__name__] = fun, backends or ("cpu", "tpu"), options
        return fun

    return register


# Data parallel


@program()
def data_parallel_mlp(on: Target) -> Counted:
    """The gradient of an MLP whose batch is split: both weights' gradients are summed over data."""
    batch, d, h, o = 32, 24, 40, 56

    def loss(params, x):
        hidden = jnp.tanh(x @ params["up"])  # here: mlp up
        return jnp.sum((hidden @ params["down"]) ** 2)  # here: mlp down

    args = {"up": array(d, h), "down": array(h, o)}, array(batch, d)
    lowered = on.jit(jax.grad(loss), (P(), P("data")), P(), *args)
    shapes = f32(d, h), f32(h, o)
    summed = Row(
        kind="all-reduce",
        axes=("data",),
        operands=shapes,
        results=shapes,
        payload=(d * h + h * o) * 4,  # the two are small: the compiler sends them together
        n=DATA,
        way="backward",
        at=("mlp up", "mlp down"),
        combined=2,
    )
    return lowered, [summed]


@program()
def loss_over_the_mesh(on: Target) -> Counted:
    """A loss whose terms lie along both axes: one number is summed over the whole mesh."""
    rows, columns = 24, 40

    def loss(x):
        return jnp.sum(jnp.sin(x))  # here: loss sum

    outs = P(), P("data", "model")
    lowered = on.pjit(jax.value_and_grad(loss), outs[1], outs, array(rows, columns))
    summed = Row(
        kind="all-reduce",
        axes=("data", "model"),
        operands=(f32(),),
        results=(f32(),),
        payload=4,
        n=DATA * MODEL,
        way="forward",
        at=("loss sum",),
    )
    if on.tpu:
        return lowered, [summed]
    # The partitioner sums over one dimension after the other; CPU does not join the two.
    over_data = dataclasses.replace(summed, axes=("data",), n=DATA)
    return lowered, [over_data, dataclasses.replace(summed, axes=("model",), n=MODEL)]


@program()
def nothing_to_exchange(on: Target) -> Counted:
    """A loop over elements that every device has: no exchange at all."""

    def body(x, w):
        return jnp.tanh(x * w), None

    def run(x, ws):
        return jax.lax.scan(body, x, ws)[0]

    specs = P("data", "model"), P(None, "data", "model")
    return on.pjit(run, specs, P("data", "model"), array(24, 40), array(3, 24, 40)), []


# Layers


@program()
def megatron_block(on: Target) -> Counted:
    """Column then row parallel weights, layer by layer, with the sequence split in between."""
    layers, batch, seq, d, h = 5, 8, 64, 128, 512

    def layer(x, weights):
        up, down = weights
        full = constrain(x, P("data"))  # here: sequence gather
        hidden = constrain(jnp.tanh(full @ up), P("data", None, "model"))  # here: column parallel
        partial = hidden @ down  # here: row parallel
        return x + constrain(partial, P("data", "model")), None  # here: sequence scatter

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)  # here: megatron scan

    specs = (P(None, None, "model"), P(None, "model")), P("data", "model")
    weights = array(layers, d, h), array(layers, h, d)
    lowered = on.pjit(jax.grad(loss), specs, specs[0], weights, array(batch, seq, d))
    b = batch // DATA
    gather = Row(
        kind="all-gather",
        axes=("model",),
        operands=(f32(b, seq // MODEL, d),),
        results=(f32(b, seq, d),),
        payload=b * seq * d * 4,
        n=MODEL,
        times=layers,
        way="forward",
        at=("sequence gather",),
    )
    # The sum of a product over `model`, of which each device keeps its part of the sequence: TPU
    # scatters what it sums, CPU sums all of it and slices.
    scatter = dataclasses.replace(
        gather,
        kind="reduce-scatter" if on.tpu else "all-reduce",
        operands=gather.results,
        results=gather.operands if on.tpu else gather.results,
        at=("row parallel",),
    )
    # Backward, the two change places. TPU multiplies in bfloat16, so that is what it gathers.
    gather_back = dataclasses.replace(
        gather, way="backward", at=("row parallel", "sequence scatter")
    )
    if on.tpu:
        gather_back = dataclasses.replace(
            gather_back,
            operands=(bf16(b, seq // MODEL, d),),
            results=(bf16(b, seq, d),),
            payload=b * seq * d * 2,
        )
    scatter_back = dataclasses.replace(scatter, way="backward", at=("column parallel",))
    shapes = f32(d, h // MODEL), f32(h // MODEL, d)
    gradients = Row(
        kind="all-reduce",
        axes=("data",),
        operands=shapes,
        results=shapes,
        payload=2 * d * (h // MODEL) * 4,
        n=DATA,
        times=layers,
        way="backward",
        at=("column parallel", "row parallel"),
        combined=2,
    )
    return lowered, [gather, scatter, gather_back, scatter_back, gradients]


@program()
def fsdp_scan(on: Target) -> Counted:
    """Weights split over data, gathered layer by layer, twice: forward and, again, backward."""
    layers, batch, d, h = 6, 512, 128, 256

    @jax.checkpoint
    def layer(x, weights):
        up = constrain(weights[0], P())  # here: gather up
        down = constrain(weights[1], P())  # here: gather down
        return jnp.tanh(x @ up) @ down, None  # here: fsdp matmuls

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)  # here: fsdp scan

    specs = (P(None, "data"), P(None, "data")), P("data")
    weights = array(layers, d, h), array(layers, h, d)
    lowered = on.pjit(jax.grad(loss), specs, specs[0], weights, array(batch, d))
    # TPU multiplies in bfloat16, so that is what it gathers.
    shape, size = (bf16, 2) if on.tpu else (f32, 4)
    gather_up = Row(
        kind="all-gather",
        axes=("data",),
        operands=(shape(d // DATA, h),),
        results=(shape(d, h),),
        payload=d * h * size,
        n=DATA,
        times=layers,
        way="forward",
        # Often the line of the scan: the layer's weights are a slice that the scan takes.
        at=("gather up", "fsdp scan"),
    )
    gather_down = dataclasses.replace(
        gather_up,
        operands=(shape(h // DATA, d),),
        results=(shape(h, d),),
        at=("gather down", "fsdp scan"),
    )
    again = [dataclasses.replace(one, way="backward") for one in (gather_up, gather_down)]
    # TPU scatters the sums of the gradients, CPU slices them.
    full, mine = (f32(d, h), f32(h, d)), (f32(d // DATA, h), f32(h // DATA, d))
    gradients = Row(
        kind="reduce-scatter" if on.tpu else "all-reduce",
        axes=("data",),
        operands=full,
        results=mine if on.tpu else full,
        payload=2 * d * h * 4,
        n=DATA,
        times=layers,
        way="backward",
        at=("fsdp matmuls",),
        combined=2,
    )
    return lowered, [gather_up, gather_down, *again, gradients]


@program()
def remat_scan(on: Target) -> Counted:
    """A rematerialized layer: what the forward pass summed, the backward pass sums once more."""
    layers, batch, d, h = 7, 16, 24, 40

    @jax.checkpoint
    def layer(x, weights):
        up, down = weights
        y = on.keep(jnp.tanh(x @ up) @ down)  # here: remat sum
        return jnp.sin(y), None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0])  # here: remat scan

    specs = (P(None, None, "model"), P(None, "model")), P()
    weights = array(layers, d, h), array(layers, h, d)
    lowered = on.jit(jax.grad(loss), specs, specs[0], weights, array(batch, d))
    forward = Row(
        kind="all-reduce",
        axes=("model",),
        operands=(f32(batch, d),),
        results=(f32(batch, d),),
        payload=batch * d * 4,
        n=MODEL,
        times=layers,
        way="forward",
        at=("remat sum",),
    )
    # Backward: the same sum again, for the derivative of sin, and the gradient of x.
    backward = dataclasses.replace(forward, way="backward", times=2 * layers)
    return lowered, [forward, backward]


# Exchanges that the program says itself


def _ring(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


@program()
def ring_permute(on: Target) -> Counted:
    """Blocks that go around the ring of data, one step a turn of a scan."""
    turns, rows, columns = 3, 20, 36

    def turn(block, _):
        block = jax.lax.ppermute(block, "data", _ring(DATA))  # here: ring step
        return block, jnp.sum(block)

    def run(block):
        return jax.lax.scan(turn, block, None, length=turns)

    lowered = on.manual(run, P("data"), (P("data"), P(None)), array(rows, columns), check_vma=False)
    block = f32(rows // DATA, columns)
    step = Row(
        kind="collective-permute",
        axes=("data",),
        operands=(block,),
        results=(block,),
        payload=rows // DATA * columns * 4,
        n=DATA,
        times=turns,
        at=("ring step",),
        is_async=on.tpu,
    )
    return lowered, [step]


@program()
def halo_exchange(on: Target) -> Counted:
    """A stencil that needs one row of each neighbour along data: two open-ended permutes."""
    rows, columns = 24, 20

    def stencil(block):
        down = [(i, i + 1) for i in range(DATA - 1)]
        up = [(i + 1, i) for i in range(DATA - 1)]
        above = jax.lax.ppermute(block[-1:], "data", down)  # here: halo down
        below = jax.lax.ppermute(block[:1], "data", up)  # here: halo up
        padded = jnp.concatenate([above, block, below])
        return padded[:-2] + padded[2:]

    lowered = on.manual(stencil, P("data"), P("data"), array(rows, columns))
    row = f32(1, columns)
    sent = Row(
        kind="collective-permute",
        axes=("data",),
        operands=(row,),
        results=(row,),
        payload=columns * 4,
        n=DATA,
        at=("halo down",),
        is_async=on.tpu,
    )
    return lowered, [sent, dataclasses.replace(sent, at=("halo up",))]


@program()
def moe_dispatch(on: Target) -> Counted:
    """Tokens to their experts and back, and the same for the gradients."""
    experts, capacity, d, h = 8, 6, 20, 28  # capacity of one device for one expert

    def forward(tokens, w):
        mine = jax.lax.all_to_all(tokens, "data", 0, 1, tiled=True)  # here: dispatch
        out = jnp.tanh(jnp.einsum("ecd,edh->ech", mine, w))
        return jax.lax.all_to_all(out, "data", 1, 0, tiled=True)  # here: combine

    mapped = jax.shard_map(
        forward, mesh=on.mesh, in_specs=(P(None, "data"), P("data")), out_specs=P(None, "data")
    )

    def loss(tokens, w):
        return jnp.sum(mapped(tokens, w) ** 2)

    specs = P(None, "data"), P("data")
    args = array(experts, capacity * DATA, d), array(experts, d, h)
    lowered = on.jit(jax.grad(loss, argnums=(0, 1)), specs, specs, *args)

    def exchange(width: int, marker: str, way: str, shape: Callable = f32, size: int = 4) -> Row:
        # CPU exchanges one array for each device, TPU one array with a row for each.
        part = experts // DATA * capacity * width
        shapes = (
            (shape(DATA, part),) if on.tpu else (shape(experts // DATA, capacity, width),) * DATA
        )
        return Row(
            kind="all-to-all",
            axes=("data",),
            operands=shapes,
            results=shapes,
            payload=experts * capacity * width * size,
            n=DATA,
            way=way,
            at=(marker,),
        )

    # TPU multiplies in bfloat16 and narrows what goes into the product before it is sent.
    narrow = (bf16, 2) if on.tpu else (f32, 4)
    return lowered, [
        exchange(d, "dispatch", "forward", *narrow),
        exchange(h, "combine", "forward"),
        exchange(h, "combine", "backward"),
        exchange(d, "dispatch", "backward"),
    ]


@program()
def psum_over_both_axes(on: Target) -> Counted:
    """A sum over the whole mesh."""
    rows, columns = 24, 20

    def run(block):
        return jax.lax.psum(block, ("model", "data"))  # here: psum both

    lowered = on.manual(run, P("data", "model"), P(), array(rows, columns))
    block = f32(rows // DATA, columns // MODEL)
    summed = Row(
        kind="all-reduce",
        axes=("data", "model"),
        operands=(block,),
        results=(block,),
        payload=rows // DATA * columns // MODEL * 4,
        n=DATA * MODEL,
        at=("psum both",),
    )
    return lowered, [summed]


@program()
def psum_of_a_tree(on: Target) -> Counted:
    """Three sums over model of independent values, of which the compiler combines two."""
    a, b, c = 24, 20, 36

    def run(tree):
        return jax.lax.psum(tree, "model")  # here: psum tree

    spec = {"a": P("model"), "b": P("model"), "c": P(None, "model")}
    tree = {"a": array(a), "b": array(b), "c": array(3, c, dtype=jnp.int32)}
    outs = {"a": P(None), "b": P(None), "c": P(None, None)}
    lowered = on.manual(run, (spec,), outs, tree)
    floats = f32(a // MODEL), f32(b // MODEL)
    two = Row(
        kind="all-reduce",
        axes=("model",),
        operands=floats,
        results=floats,
        payload=(a // MODEL + b // MODEL) * 4,
        n=MODEL,
        at=("psum tree",),
        combined=2,
    )
    integers = f"s32[3,{c // MODEL}]"
    one = Row(  # only what has one element type is combined
        kind="all-reduce",
        axes=("model",),
        operands=(integers,),
        results=(integers,),
        payload=3 * (c // MODEL) * 4,
        n=MODEL,
        at=("psum tree",),
    )
    return lowered, [two, one]


def _psum_scatter(on: Target, rows: int, columns: int) -> Counted:
    def run(block):
        return jax.lax.psum_scatter(block, "model", tiled=True)  # here: psum scatter

    lowered = on.manual(run, P("data"), P(("data", "model")), array(rows, columns))
    scattered = Row(
        kind="reduce-scatter",
        axes=("model",),
        operands=(f32(rows // DATA, columns),),
        results=(f32(rows // DATA // MODEL, columns),),
        payload=rows // DATA * columns * 4,
        n=MODEL,
        at=("psum scatter",),
    )
    return lowered, [scattered]


@program()
def psum_scatter(on: Target) -> Counted:
    """A sum over model of which each device keeps its half."""
    return _psum_scatter(on, 128, 256)


@program()
def psum_scatter_of_odd_rows(on: Target) -> Counted:
    """The same for 3 rows a device: no whole tile of TPU's memory, so it sums all and slices."""
    lowered, (scattered,) = _psum_scatter(on, 24, 20)
    if on.tpu:  # which forgets the line of the sum, and keeps that of its reduction
        summed = dataclasses.replace(scattered, kind="all-reduce", results=scattered.operands)
        return lowered, [summed]
    return lowered, [scattered]


@program()
def manual_all_gather(on: Target) -> Counted:
    """Blocks of 1 byte an element, gathered over data."""
    rows, columns = 32, 256

    def run(block):
        return jax.lax.all_gather(block, "data", axis=1, tiled=True)  # here: all gather

    lowered = on.manual(
        run, P(None, "data"), P(None, None), array(rows, columns, dtype=jnp.int8), check_vma=False
    )
    gathered = Row(
        kind="all-gather",
        axes=("data",),
        operands=(f"s8[{rows},{columns // DATA}]",),
        results=(f"s8[{rows},{columns}]",),
        payload=rows * columns,
        n=DATA,
        at=("all gather",),
    )
    return lowered, [gathered]


@program()
def parts_of_an_axis(on: Target) -> Counted:
    """Sums over neighbours, over every second device, and over a diagonal pairing, of data."""
    rows, columns = 24, 20

    def run(block):
        near = jax.lax.psum(block, "data", axis_index_groups=[[0, 1], [2, 3]])  # here: near
        far = jax.lax.psum(jnp.sin(near), "data", axis_index_groups=[[0, 2], [1, 3]])  # here: far
        return jax.lax.psum(jnp.sin(far), "data", axis_index_groups=[[0, 3], [1, 2]])  # here: cross

    lowered = on.manual(run, P("data"), P("data"), array(rows, columns), check_vma=False)
    block = f32(rows // DATA, columns)
    near = Row(
        kind="all-reduce",
        axes=("data:(2)2",),  # after data has split in 2
        operands=(block,),
        results=(block,),
        payload=rows // DATA * columns * 4,
        n=2,
        at=("near",),
    )
    far = dataclasses.replace(near, axes=("data:(1)2",), at=("far",))
    cross = dataclasses.replace(near, axes=("data:part",), at=("cross",))
    return lowered, [near, far, cross]


@program("tpu")  # XLA's CPU backend does not implement it
def ragged_exchange(on: Target) -> Counted:
    """Rows to wherever sizes known at run time say: the buffers bound what is sent."""
    rows, columns = 96, 128

    def run(x, out, *sizes):
        return jax.lax.ragged_all_to_all(x, out, *sizes, axis_name="data")  # here: ragged

    sizes = (array(DATA * DATA, dtype=jnp.int32),) * 4
    lowered = on.manual(
        run, (P("data"),) * 6, P("data"), array(rows, columns), array(2 * rows, columns), *sizes
    )
    sent = Row(
        kind="ragged-all-to-all",
        axes=("data",),
        operands=(f32(rows // DATA, columns),),  # without offsets and sizes
        results=(f32(2 * rows // DATA, columns),),
        payload=2 * rows // DATA * columns * 4,
        sent=rows // DATA * columns * 4,  # no more than what it has, whatever it has room for
        n=DATA,
        at=("ragged",),
    )
    return lowered, [sent]


@program("tpu")
def ragged_exchange_and_back(on: Target) -> Counted:
    """The gradient of two layers: each exchanges in both passes; JAX's rule moves two offsets, too.

    The offsets are those of all layers, so the compiler moves them before the loop. All have one
    channel: who counts by channels finds one exchange of each kind.
    """
    layers, rows, columns = 2, 96, 128

    def layer(x, sizes):
        room = jnp.zeros_like(x)
        return x + jax.lax.ragged_all_to_all(x, room, *sizes, axis_name="data")  # here: trip

    def run(x, *sizes):
        return jax.lax.fori_loop(0, layers, lambda i, x: layer(jnp.sin(x), sizes), x)

    def loss(x, *sizes):
        specs = (P("data"),) * 5
        mapped = jax.shard_map(run, mesh=on.mesh, in_specs=specs, out_specs=P("data"))
        return jnp.sum(mapped(x, *sizes) ** 2)

    sizes = (array(DATA * DATA, dtype=jnp.int32),) * 4
    lowered = on.jit(jax.grad(loss), (P("data"),) * 5, P("data"), array(rows, columns), *sizes)
    shape = f32(rows // DATA, columns)
    there = Row(
        kind="ragged-all-to-all",
        axes=("data",),
        operands=(shape,),
        results=(shape,),
        payload=rows // DATA * columns * 4,
        n=DATA,
        times=layers,
        way="forward",
        at=("trip",),
    )
    offsets = Row(
        kind="all-to-all",
        axes=("data",),
        operands=(f"s32[{DATA}]",),
        results=(f"s32[{DATA}]",),
        payload=DATA * 4,
        n=DATA,
        times=2,
        way="backward",
        at=("trip",),
    )
    return lowered, [there, dataclasses.replace(there, way="backward"), offsets]


@program("tpu")
def weights_from_the_host(on: Target) -> Counted:
    """Layers whose weights come from the memory of the host: a copy from there is no exchange.

    The compiler takes one round out of the loop, so that one channel stands in two places.
    """
    layers, batch, d = 8, 32, 256

    def layer(x, w):
        here = jax.device_put(w, NamedSharding(on.mesh, P("data"), memory_kind="device"))
        return jnp.tanh(x @ here), None  # here: streamed

    def run(x, weights):
        return jax.lax.scan(layer, x, weights)[0]

    host = NamedSharding(on.mesh, P(None, "data"), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((batch, d), jnp.bfloat16, sharding=NamedSharding(on.mesh, P("data")))
    weights = jax.ShapeDtypeStruct((layers, d, d), jnp.bfloat16, sharding=host)
    gathered = Row(
        kind="all-gather",
        axes=("data",),
        operands=(bf16(d // DATA, d),),
        results=(bf16(d, d),),
        payload=d * d * 2,
        n=DATA,
        times=layers,
        at=("streamed",),
    )
    return jax.jit(run).lower(x, weights), [gathered]


# Kernels


@program("tpu")
def kernel_with_metadata(on: Target) -> Counted:
    """Layers with a Pallas kernel whose metadata the compiler prints over several lines."""
    layers, batch, d, h = 8, 64, 128, 256
    # Brackets in a string, and a number that looks like that of a stack frame.
    notes = {"block": '{"q": 128}', "note": "}}, stack_frame_id=1 ({["}

    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2.0

    def layer(x, w):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        doubled = pallas.pallas_call(double, out_shape=shape, metadata=notes)(x)
        return jax.lax.psum(doubled @ w @ w.T, "model"), None  # here: kernel sum

    def run(x, weights):
        return jax.lax.scan(layer, x, weights)[0]

    specs = P("data"), P(None, None, "model")
    args = array(batch, d), array(layers, d, h)
    lowered = on.manual(run, specs, P("data"), *args, check_vma=False)
    shape = f32(batch // DATA, d)
    summed = Row(
        kind="all-reduce",
        axes=("model",),
        operands=(shape,),
        results=(shape,),
        payload=batch // DATA * d * 4,
        n=MODEL,
        times=layers,
        at=("kernel sum",),
    )
    return lowered, [summed]


# Control flow


@program()
def nested_scans(on: Target) -> Counted:
    """A sum inside a scan inside a scan runs as often as both turn together."""
    outer, inner, rows, d = 3, 5, 16, 24

    def layer(x, w):
        return jnp.tanh(x * jnp.sum(w, axis=0)), None  # here: nested sum

    def stage(x, ws):
        return jax.lax.scan(layer, x, ws)[0], None

    def run(x, ws):
        return jax.lax.scan(stage, x, ws)[0]

    specs = P(), P(None, None, "data")
    lowered = on.pjit(run, specs, P(), array(d), array(outer, inner, rows, d))
    summed = Row(
        kind="all-reduce",
        axes=("data",),
        operands=(f32(d),),
        results=(f32(d),),
        payload=d * 4,
        n=DATA,
        times=outer * inner,
        at=("nested sum",),
    )
    return lowered, [summed]


@program()
def counted_loops(on: Target) -> Counted:
    """Loops that start elsewhere than 0, step by more than 1, or count down."""
    a, b, c = 24, 20, 36

    def late(x):
        return jax.lax.fori_loop(2, 11, lambda i, x: jax.lax.psum(x, "data") * 0.1, x)  # here: late

    def wide(x):
        def body(state):
            return state[0] + 3, jax.lax.psum(state[1], "data") * 0.1  # here: wide

        return jax.lax.while_loop(lambda state: state[0] < 20, body, (1, x))[1]

    def down(x):
        def body(state):
            return state[0] - 2, jax.lax.psum(state[1], "data") * 0.1  # here: down

        return jax.lax.while_loop(lambda state: state[0] > 0, body, (11, x))[1]

    def run(x, y, z):
        return late(x), wide(y), down(z)

    specs = (P("model"),) * 3
    lowered = on.manual(run, specs, specs, array(a), array(b), array(c), check_vma=False)
    rows = [
        Row(
            kind="all-reduce",
            axes=("data",),
            operands=(f32(size // MODEL),),
            results=(f32(size // MODEL),),
            payload=size // MODEL * 4,
            n=DATA,
            times=times,
            at=(marker,),
        )
        for size, times, marker in (
            (a, 11 - 2, "late"),
            (b, 7, "wide"),  # 1, 4, ..., 19
            (c, 6, "down"),  # 11, 9, ..., 1
        )
    ]
    return lowered, rows


@program()
def until_the_data_say_so(on: Target) -> Counted:
    """Loops of unknown length: around a known one, inside a known one, and in a condition."""
    turns, rows, columns = 3, 24, 20

    def inner(block, _):
        return block + jax.lax.psum(block, "model"), None  # here: known in unknown

    def body(carry):
        return jax.lax.scan(inner, carry, None, length=turns)[0]

    def unfinished(carry):
        return jax.lax.psum(jnp.sum(carry), ("data", "model")) < 9.0  # here: unknown condition

    def step(carry, _):
        return jax.lax.while_loop(unfinished, body, carry), None

    def run(block):
        return jax.lax.scan(step, block, None, length=turns)[0]

    lowered = on.manual(
        run, P("data", "model"), P("data", "model"), array(rows, columns), check_vma=False
    )
    block = f32(rows // DATA, columns // MODEL)
    body_sum = Row(
        kind="all-reduce",
        axes=("model",),
        operands=(block,),
        results=(block,),
        payload=rows // DATA * columns // MODEL * 4,
        n=MODEL,
        times=None,
        at=("known in unknown",),
    )
    condition = Row(
        kind="all-reduce",
        axes=("data", "model"),
        operands=(f32(),),
        results=(f32(),),
        payload=4,
        n=DATA * MODEL,
        times=None,
        at=("unknown condition",),
    )
    return lowered, [body_sum, condition]


@program()
def either_branch(on: Target) -> Counted:
    """A conditional: each branch's exchange is listed, once, as one that may not run."""
    rows, columns = 24, 20

    def first(block):
        return jax.lax.psum(block, "data")  # here: first branch

    def second(block):
        return jax.lax.pmax(block, "model") + block  # here: second branch

    def run(flag, block):
        return jax.lax.cond(flag, first, second, block)

    lowered = on.manual(
        run,
        (P(), P("data", "model")),
        P("data", "model"),
        array(dtype=jnp.bool_),
        array(rows, columns),
        check_vma=False,
    )
    block = f32(rows // DATA, columns // MODEL)
    over_data = Row(
        kind="all-reduce",
        axes=("data",),
        operands=(block,),
        results=(block,),
        payload=rows // DATA * columns // MODEL * 4,
        n=DATA,
        at=("first branch",),
        conditional=True,
    )
    over_model = dataclasses.replace(over_data, axes=("model",), n=MODEL, at=("second branch",))
    return lowered, [over_data, over_model]


@program()
def branches_in_a_loop(on: Target) -> Counted:
    """A switch in a scan: each branch is listed for every turn, as one that may not run."""
    turns, rows, columns = 5, 24, 20

    def calm(block):
        return jnp.tanh(block)

    def sums(block):
        return jax.lax.psum(jnp.sin(block), "data")  # here: sums

    def moves(block):
        return jax.lax.ppermute(jnp.cos(block), "model", [(0, 1), (1, 0)])  # here: moves

    def turn(block, which):
        return jax.lax.switch(which, [calm, sums, moves], block), None

    def run(block, which):
        return jax.lax.scan(turn, block, which)[0]

    specs = P("data", "model"), P()
    args = array(rows, columns), array(turns, dtype=jnp.int32)
    lowered = on.manual(run, specs, specs[0], *args, check_vma=False)
    block = f32(rows // DATA, columns // MODEL)
    summed = Row(
        kind="all-reduce",
        axes=("data",),
        operands=(block,),
        results=(block,),
        payload=rows // DATA * columns // MODEL * 4,
        n=DATA,
        times=turns,
        at=("sums",),
        conditional=True,
    )
    moved = dataclasses.replace(
        summed, kind="collective-permute", axes=("model",), n=MODEL, at=("moves",)
    )
    return lowered, [summed, dataclasses.replace(moved, is_async=on.tpu)]


# Programs in programs


@program()
def call_graph(on: Target) -> Counted:
    """A custom gradient in a pjit in a jit, called twice: its two sums, each at each call."""
    rows, d, h = 16, 24, 40

    @jax.custom_vjp
    def project(x, w):
        return on.keep(x @ w)  # here: project

    def forward(x, w):
        return project(x, w), (x, w)

    def backward(saved, ct):
        x, w = saved
        return on.keep(ct @ w.T, None, "data"), on.keep(x.T @ ct, "data")

    project.defvjp(forward, backward)

    def stage(x, w):
        return project(x, w)  # here: project

    inner = spmd.pjit(stage, (P(None, "data"), P("data")), P(), mesh=on.mesh)

    def loss(x, w, v):
        y = jnp.sin(jax.jit(inner)(x, w))  # here: first call
        z = jax.jit(inner)(y, v)  # here: second call
        return jnp.sum(z**2)

    specs = P(None, "data"), P("data"), P("data")
    args = array(rows, d), array(d, h), array(h, d)
    lowered = on.jit(jax.grad(loss, argnums=(1, 2)), specs, specs[1:], *args)
    first = Row(
        kind="all-reduce",
        axes=("data",),
        operands=(f32(rows, h),),
        results=(f32(rows, h),),
        payload=rows * h * 4,
        n=DATA,
        way="forward",
        at=("project",),  # of a custom gradient JAX keeps the line that calls it, not those inside
    )
    second = dataclasses.replace(
        first, operands=(f32(rows, d),), results=(f32(rows, d),), payload=rows * d * 4
    )
    # The gradient of the second call's argument comes split over its columns; the gradient of the
    # first call's weights takes all of them.
    back = dataclasses.replace(
        first,
        kind="all-gather",
        operands=(f32(rows, h // DATA),),
        way="backward",
        at=("project", "first call", "second call"),
    )
    return lowered, [first, second, back]


@program()
def partly_manual(on: Target) -> Counted:
    """Manual over data, where a sum is said; the partitioner's over model, where one is needed."""
    rows, d, h = 16, 24, 40

    def run(block, w):
        total = jax.lax.psum(block, "data")  # here: said
        return constrain(total @ w, P())  # here: needed

    mapped = jax.shard_map(
        run,
        mesh=on.mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
        axis_names={"data"},
    )
    lowered = on.pjit(mapped, (P("data", "model"), P("model")), P(), array(rows, d), array(d, h))
    said = Row(
        kind="all-reduce",
        axes=("data",),
        operands=(f32(rows // DATA, d // MODEL),),
        # TPU narrows the result for the product that follows, in the same operation.
        results=((bf16 if on.tpu else f32)(rows // DATA, d // MODEL),),
        payload=rows // DATA * (d // MODEL) * 4,
        n=DATA,
        at=("said",),
    )
    needed = dataclasses.replace(
        said,
        axes=("model",),
        operands=(f32(rows // DATA, h),),
        results=(f32(rows // DATA, h),),
        payload=rows // DATA * h * 4,
        n=MODEL,
        at=("needed",),
    )
    return lowered, [said, needed]


# Vocabulary


@program()
def sharded_vocabulary(on: Target) -> Counted:
    """An embedding and a cross-entropy over a vocabulary that is split over model."""
    batch, d, vocab = 16, 24, 80

    def lookup(table, ids):
        local = vocab // MODEL
        at = ids - jax.lax.axis_index("model") * local
        inside = (at >= 0) & (at < local)
        rows = jnp.where(inside[:, None], table[jnp.clip(at, 0, local - 1)], 0.0)
        return jax.lax.psum(rows, "model")  # here: embedding

    def entropy(table, x):
        logits = x @ table.T
        top = jax.lax.pmax(jnp.max(logits, axis=1), "model")  # here: softmax top
        total = jnp.sum(jnp.exp(logits - top[:, None]), axis=1)
        return jnp.log(jax.lax.psum(total, "model")) + top  # here: softmax total

    def run(table, ids):
        return entropy(table, lookup(table, ids))

    ids = array(batch, dtype=jnp.int32)
    lowered = on.manual(run, (P("model"), P("data")), P("data"), array(vocab, d), ids)
    b = batch // DATA
    embedding = Row(
        kind="all-reduce",
        axes=("model",),
        operands=(f32(b, d),),
        # TPU narrows the result for the product that follows, in the same operation.
        results=(bf16(b, d) if on.tpu else f32(b, d),),
        payload=b * d * 4,
        n=MODEL,
        at=("embedding",),
    )
    top = Row(
        kind="all-reduce",
        axes=("model",),
        operands=(f32(b),),
        results=(f32(b),),
        payload=b * 4,
        n=MODEL,
        at=("softmax top",),
    )
    return lowered, [embedding, top, dataclasses.replace(top, at=("softmax total",))]


@program()
def partitioned_cross_entropy(on: Target) -> Counted:
    """The same entropy, where the partitioner finds the exchanges."""
    batch, d, vocab = 16, 24, 80

    def run(table, x):
        logits = constrain(x @ table.T, P("data", "model"))
        return jax.nn.logsumexp(logits, axis=1)  # here: logsumexp

    lowered = on.pjit(run, (P("model"), P("data")), P("data"), array(vocab, d), array(batch, d))
    b = batch // DATA
    both = Row(  # the maximum, then the sum
        kind="all-reduce",
        axes=("model",),
        operands=(f32(b),),
        results=(f32(b),),
        payload=b * 4,
        n=MODEL,
        times=2,
        at=("logsumexp",),
    )
    return lowered, [both]


# Reshards and number formats


@program()
def sharded_fft(on: Target) -> Counted:
    """A batch of transforms, which needs no exchange."""
    batch, points = 24, 40

    def run(x):
        return jnp.fft.fft(x)  # here: fft

    lowered = on.jit(run, P("data"), P("data"), array(batch, points, dtype=jnp.complex64))
    gathered = Row(
        kind="all-gather",
        axes=("data",),
        operands=(f"c64[{batch // DATA},{points}]",),
        results=(f"c64[{batch},{points}]",),
        payload=batch * points * 8,
        n=DATA,
        at=("fft",),
    )
    # CPU's partitioner of the oldest JAX does not know that the batch may stay split.
    return lowered, [] if on.tpu or NEW else [gathered]


@program()
def bfloat_sum(on: Target) -> Counted:
    """A sum of 2-byte numbers."""
    rows, columns = 16, 256

    def run(block):
        return jax.lax.psum(block, "data")  # here: bfloat sum

    args = array(rows, columns, dtype=jnp.bfloat16)
    lowered = on.manual(run, P(None, "data"), P(None, None), args)
    shape, size = (bf16, 2) if on.tpu else (f32, 4)  # CPU sums in float32, which is twice as much
    summed = Row(
        kind="all-reduce",
        axes=("data",),
        operands=(shape(rows, columns // DATA),),
        results=(shape(rows, columns // DATA),),
        payload=rows * columns // DATA * size,
        n=DATA,
        at=("bfloat sum",),
    )
    return lowered, [summed]


def _parts(on: Target, rows: int, columns: int, n: int) -> dict[str, tuple[str, ...]]:
    """Shapes of an all-to-all: CPU exchanges one array for each device, TPU one for all."""
    shapes = (f32(rows, n, columns),) if on.tpu else (f32(rows, columns),) * n
    return {"operands": shapes, "results": shapes}


@program()
def turned_split(on: Target) -> Counted:
    """From rows over data to columns over data."""
    rows, columns = 24, 40

    def run(x):
        return constrain(jnp.sin(x), P(None, "data")) * 2.0  # here: turn

    lowered = on.pjit(run, P("data"), P(None, "data"), array(rows, columns))
    turned = Row(
        kind="all-to-all",
        axes=("data",),
        **_parts(on, rows // DATA, columns // DATA, DATA),
        payload=rows // DATA * columns * 4,
        n=DATA,
        at=("turn",),
    )
    return lowered, [turned]


@program("tpu", xla_tpu_decompose_all_gather_einsum="true")
def windowed_einsum(on: Target) -> Counted:
    """A matrix product whose gather is taken apart into permutes that overlap with it."""
    rows, d, columns = 4096, 1024, 8192

    def run(x, w):
        return x @ w  # here: windowed

    both = ("data", "model")
    args = array(rows, d, dtype=jnp.bfloat16), array(d, columns, dtype=jnp.bfloat16)
    lowered = on.pjit(run, (P(both), P(None, both)), P(None, both), *args)
    n = DATA * MODEL
    block = bf16(rows // n, d)
    # A ring in both directions: a first step, then two for each of n/2 turns; the last turn's two
    # are sent although nobody uses them.
    step = Row(
        kind="collective-permute",
        axes=both,
        operands=(block,),
        results=(block,),
        payload=rows // n * d * 2,
        n=n,
        times=1 + 2 * (n // 2),
        at=("windowed",),
        is_async=True,
    )
    return lowered, [step]


@program()
def gathered_argument(on: Target) -> Counted:
    """A reshard of an argument, which the newest JAX gives the line of its first use."""
    rows, columns = 24, 40

    def run(x):
        whole = constrain(x, P())  # here: gather argument
        return jnp.sin(whole) @ jnp.cos(whole).T  # here: use argument

    lowered = on.pjit(run, P("data"), P(), array(rows, columns))
    gathered = Row(
        kind="all-gather",
        axes=("data",),
        operands=(f32(rows // DATA, columns),),
        results=(f32(rows, columns),),
        payload=rows * columns * 4,
        n=DATA,
        at=("gather argument", "use argument"),
    )
    return lowered, [gathered]


@program()
def uneven_rows(on: Target) -> Counted:
    """A dimension that does not divide is padded, and what is padded is gathered too."""
    rows, columns = 10, 24

    def run(x):
        return constrain(jnp.sin(constrain(x, P("data"))), P())  # here: uneven

    lowered = on.pjit(run, P(), P(), array(rows, columns))
    each = -(-rows // DATA)
    gathered = Row(
        kind="all-gather",
        axes=("data",),
        operands=(f32(each, columns),),
        results=(f32(each * DATA, columns),),
        payload=each * DATA * columns * 4,
        n=DATA,
        at=("uneven",),
    )
    return lowered, [gathered]


@program()
def swapped_axes(on: Target) -> Counted:
    """Rows over data and columns over model become the other way round."""
    rows, columns = 24, 40

    def run(x):
        return constrain(jnp.sin(x), P("model", "data")) * 2.0  # here: swap

    lowered = on.pjit(run, P("data", "model"), P("model", "data"), array(rows, columns))
    # Call the halves of data d1 (major) and d0. The minor half moves from rows to columns, which
    # are then split by (model, d0); they shall be split by (d1, d0), and rows by model instead of
    # d1. So the devices (d1=0, model=1) and (d1=1, model=0) change places, for each d0.
    local = rows // DATA, columns // MODEL // 2
    turned = Row(
        kind="all-to-all",
        axes=("data:(2)2",),
        **_parts(on, *local, 2),
        payload=rows // DATA * columns // MODEL * 4,
        n=2,
        at=("swap",),
    )
    block = f32(rows // MODEL, columns // DATA)
    placed = Row(
        kind="collective-permute",
        axes=("data:part", "model:part"),  # a diagonal through both
        operands=(block,),
        results=(block,),
        payload=rows // MODEL * columns // DATA * 4,
        n=2,
        at=("swap",),
        is_async=on.tpu,
    )
    return lowered, [turned, placed]


# For a backend by its name; it stands here so that goldens keep the line numbers above


@functools.cache
def target(backend: str) -> Any:
    """The devices of a backend, "cpu" or "tpu"; skips the test that asks where there is no TPU."""
    if backend == "cpu":
        return cpu_target()
    from hardware import require_libtpu

    require_libtpu()
    return tpu_target()
