"""Memory and traffic of a gradient: a loss of `spmd.pjit` against the same loss of `jax.jit`.

The loss is that of the demo's transformer, scaled up. The figures are the compiler's and the
runtime's, in bytes, and come out the same in each run; nothing is timed.
"""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import gc
import importlib.util
import itertools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

import spmd
from spmd import P
from spmd.demo import model
from spmd.inspection import Total, collectives, show_bytes

SMALL = model.Config(vocab=72)
MIDDLE = model.Config(vocab=72, seq_len=128, layers=12, d_model=256, d_ff=1024)
LARGE = model.Config(vocab=72, seq_len=512, layers=24, d_model=1024, heads=16, d_ff=4096)

TWO_AXES, THREE_AXES = {"data": 4, "model": 2}, {"replica": 2, "data": 2, "model": 2}

#: Where `jax.checkpoint` stands: nowhere, on each block, on the loss inside of pjit, on the pjit.
CHECKPOINTS = ("off", "layers", "loss", "pjit")

Loss = Callable[[model.Params, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One loss on one mesh.

    Attributes:
        config: Shape of the transformer.
        mesh: Over which it is split; all axes but ``model`` split the batch.
        checkpoint: One of `CHECKPOINTS`.
        scanned: Whether the layers are a `lax.scan`, as in the demo, or stand one after another.
        nested: Whether each block is a call of its own, of pjit or jit, inside of the loss.
        batch: Sequences in a batch.
    """

    config: model.Config
    mesh: spmd.Mesh
    checkpoint: str = "off"
    scanned: bool = True
    nested: bool = False
    batch: int = 32

    def __str__(self) -> str:
        shape = f"{self.config.layers}x{self.config.d_model}"
        layers = shape + " unrolled" * (not self.scanned) + " nested" * self.nested
        sizes = "x".join(map(str, self.mesh.shape.values()))
        return f"{layers:<15} {sizes:<5} {self.checkpoint:<6}"

    @property
    def batch_spec(self) -> P:
        """How the batch is split."""
        return P(tuple(axis for axis in self.mesh.axis_names if axis != "model"))

    @property
    def specs(self) -> tuple[dict[str, P], P]:
        """PartitionSpecs of the parameters and of the batch."""
        return model.param_specs(), self.batch_spec

    @property
    def shardings(self) -> Any:
        """The same as shardings of JAX."""
        return jax.tree.map(self.on_mesh, self.specs, is_leaf=lambda s: isinstance(s, P))

    def on_mesh(self, spec: P) -> NamedSharding:
        """A sharding over the plain mesh."""
        return NamedSharding(jax.sharding.Mesh(self.mesh.devices, self.mesh.axis_names), spec)

    def shapes(self) -> Any:
        """Parameters and batch as shapes with their shardings."""
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), self.config))
        tokens = jax.ShapeDtypeStruct((self.batch, self.config.seq_len + 1), np.int32)
        return _placed((params, tokens), self.shardings)

    def arrays(self) -> Any:
        """The same as arrays, of ones."""
        ones = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), self.shapes())
        return jax.device_put(ones, self.shardings)


def _placed(arrays: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arrays, shardings
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes:
    """What a gradient takes, per device and call.

    Attributes:
        peak: The most memory at any time, arguments included.
        wire: What a device sends in collectives.
        held: Where a forward and a backward program run, what lives between them beside the
            arguments; else None.
    """

    peak: int
    wire: int
    held: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same gradient through `spmd.pjit` and through `jax.jit`."""

    name: str
    ours: Bytes
    peer: Bytes

    @property
    def ratios(self) -> dict[str, float]:
        """Ours over the peer, by figure."""
        ours, peer = dataclasses.asdict(self.ours), dataclasses.asdict(self.peer)
        return {n: _ratio(ours[n], peer[n]) for n in ours if ours[n] is not None}

    @property
    def passed(self) -> bool:
        """Whether no figure is larger than the peer's."""
        return all(ratio <= 1 for ratio in self.ratios.values())

    def __str__(self) -> str:
        cells = [
            f"{show_bytes(getattr(self.ours, n)):>10} {show_bytes(getattr(self.peer, n)):>10} "
            f"{ratio:>6.3f}"
            for n, ratio in self.ratios.items()
        ]
        cells += [" " * 28] * (3 - len(cells))
        return f"{self.name:<40} {' '.join(cells)}  {'ok' if self.passed else 'MISSED'}"


HEADER = (
    f"{'':<40} {'peak':>10} {'jax.jit':>10} {'ratio':>6} {'wire':>10} {'jax.jit':>10} {'ratio':>6} "
    f"{'residuals':>10} {'jax.jit':>10} {'ratio':>6}  <= 1.00"
)


def _ratio(ours: int, peer: int) -> float:
    return ours / peer if peer else math.inf if ours else 1.0


# The loss


def losses(case: Case) -> tuple[Loss, Loss]:
    """The loss of a case through `spmd.pjit` and through `jax.jit`, with the same shardings."""
    residual = P(*case.batch_spec, None, None)
    ours: Loss = spmd.pjit(
        _loss(case, spmd.pjit, lambda x: spmd.with_sharding_constraint(x, residual)),
        in_axis_resources=case.specs,
        out_axis_resources=None,
        mesh=case.mesh,
    )
    peer: Loss = jax.jit(
        _loss(case, jax.jit, lambda x: lax.with_sharding_constraint(x, case.on_mesh(residual))),
        in_shardings=case.shardings,
        out_shardings=case.on_mesh(P()),
    )
    if case.checkpoint == "pjit":
        return jax.checkpoint(ours), jax.checkpoint(peer)
    return ours, peer


def _loss(case: Case, jit: Callable, constrain: model.Constrain) -> Loss:
    def loss(params: model.Params, tokens: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(_logits(case, jit, constrain, params, tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    return jax.checkpoint(loss) if case.checkpoint == "loss" else loss


def _logits(
    case: Case,
    jit: Callable,
    constrain: model.Constrain,
    params: model.Params,
    tokens: jax.Array,
) -> jax.Array:
    """`model.logits`, with a choice of calls, checkpoint and scan."""

    def block(x: jax.Array, p: model.Params) -> jax.Array:
        return model._block(x, p, constrain)

    if case.nested:
        block = jit(block)
    if case.checkpoint == "layers":
        block = jax.checkpoint(block)
    x = jnp.take(params["embed"], tokens, axis=0) + params["position"][None]
    blocks = {n.removeprefix("block."): p for n, p in params.items() if n.startswith("block.")}
    if case.scanned:
        x, _ = lax.scan(lambda x, p: (block(x, p), None), x, blocks)
    else:
        for i in range(case.config.layers):
            x = block(x, {name: stacked[i] for name, stacked in blocks.items()})
    return model._rms_norm(x, params["norm"]) @ params["head"]


# Three ways to a gradient


def one_program(loss: Loss, case: Case) -> Bytes:
    """`jax.grad` inside of `jax.jit`: one program."""
    compiled = jax.jit(jax.value_and_grad(loss)).lower(*case.shapes()).compile()
    return _bytes_of(compiled, case)


def _bytes_of(compiled: Any, case: Case) -> Bytes:
    report = spmd.report(compiled, mesh=case.mesh)
    return Bytes(peak=report.memory.peak, wire=report.total.wire_bytes)


def two_programs(loss: Loss, case: Case) -> Bytes:
    """`jax.vjp` inside of one `jax.jit`, and what it returns inside of another.

    The residuals are results of the first program: they stay where its compiler put them.
    """
    params, tokens = case.shapes()
    forward = jax.jit(lambda params, tokens: jax.vjp(lambda p: loss(p, tokens), params))
    lowered = forward.lower(params, tokens)
    compiled = lowered.compile()
    _, backward = _placed(lowered.out_info, compiled.output_shardings)
    ct = jax.ShapeDtypeStruct((), np.float32, sharding=case.on_mesh(P()))
    second = jax.jit(lambda f, ct: f(ct)).lower(backward, ct).compile()
    halves = [_bytes_of(half, case) for half in (compiled, second)]
    return Bytes(
        peak=max(half.peak for half in halves),
        wire=sum(half.wire for half in halves),
        held=_size_of(backward),
    )


def _size_of(tree: Any) -> int:
    """Bytes of arrays on each device."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree)
    )


def eager(loss: Loss, case: Case) -> Bytes:
    """`jax.vjp` and a call of what it returns, as they run: every program that this compiles."""
    params, tokens = case.arrays()

    def forward() -> Any:
        return jax.block_until_ready(jax.vjp(lambda p: loss(p, tokens), params))

    def backward() -> Any:
        value, pull = results.pop()
        return jax.block_until_ready(pull(jnp.ones_like(value)))

    results: list[Any] = []
    first = _compiled_by(case, lambda: results.append(forward()))
    second = _compiled_by(case, backward)
    # Everything is compiled now, so what lives after the call and not before are its results.
    before = _alive()
    results.append(forward())
    between = _alive()
    return Bytes(
        peak=max(_peak(before, first), _peak(between, second)),
        wire=sum(_wire(one, case) for one in (*first, *second)),
        held=between - before,
    )


def _compiled_by(case: Case, call: Callable[[], Any]) -> list[Any]:
    """The executables that are new after a call."""
    client = case.mesh.devices.flat[0].client
    old = client.live_executables()
    call()
    return [one for one in client.live_executables() if not any(one is other for other in old)]


def _peak(alive: int, programs: list[Any]) -> int:
    """The most memory while programs run beside arrays that are alive all the time."""
    peaks = [alive]
    for plan in (one.get_compiled_memory_stats() for one in programs):
        own = plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
        # Arguments that an earlier one of the programs made are not among the arrays.
        peaks.append(max(alive, plan.argument_size_in_bytes) + own)
    return max(peaks)


def _wire(program: Any, case: Case) -> int:
    found = [
        Total.of(one)
        for module in program.hlo_modules()
        for one in collectives(module.to_string(), case.mesh.shape)
    ]
    return sum(found, Total.zeros()).wire_bytes


def _alive() -> int:
    """Bytes of all arrays on the device that holds most, each buffer once."""
    gc.collect()
    buffers = {
        (shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    }
    held: dict[int, int] = {}
    for (device, _), nbytes in buffers.items():
        held[device] = held.get(device, 0) + nbytes
    return max(held.values(), default=0)


WAYS = {"one program": one_program, "two programs": two_programs, "eager": eager}


def compare(way: str, case: Case) -> Comparison:
    """Measures the gradient of a case in one of the `WAYS`."""
    jax.clear_caches()
    ours, peer = (WAYS[way](loss, case) for loss in losses(case))
    platform = case.mesh.devices.flat[0].platform
    return Comparison(name=f"{platform} {way:<12} {case}", ours=ours, peer=peer)


def cases() -> Iterator[tuple[str, Case]]:
    """Every comparison of the page: a way, and what is differentiated."""
    two, three = (spmd.make_mesh(axes) for axes in (TWO_AXES, THREE_AXES))
    every, some, compiled = CHECKPOINTS, ("off", "layers"), ("one program", "two programs")
    yield from _cases(WAYS, every, config=SMALL, mesh=two)
    yield from _cases(WAYS, some, config=SMALL, mesh=three)
    yield from _cases(WAYS, some, config=SMALL, mesh=two, scanned=False)
    yield from _cases(WAYS, some, config=SMALL, mesh=two, nested=True)
    yield from _cases(WAYS, some, config=MIDDLE, mesh=two)
    if importlib.util.find_spec("libtpu") is not None:
        described = spmd.topology("v5e:2x4", TWO_AXES)
        yield from _cases(compiled, every, config=MIDDLE, mesh=described)
        yield from _cases(["one program"], some, config=LARGE, mesh=described)


def _cases(
    ways: Iterable[str], checkpoints: Iterable[str], **options: Any
) -> Iterator[tuple[str, Case]]:
    for checkpoint, way in itertools.product(checkpoints, ways):
        yield way, Case(checkpoint=checkpoint, **options)


def run() -> Iterator[Comparison]:
    """A line for each of the cases."""
    for way, case in cases():
        yield compare(way, case)
