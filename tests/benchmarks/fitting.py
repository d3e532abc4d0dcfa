"""How near the figure of `spmd.fits` is to what the TPU compiler accepts and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd import P

WIDTH = 512
HEADER = (
    f"{'program, rows of bf16[rows,512]':34}  {'accepted':>10}  {'our figure':>10}"
    f"  {'refused':>10}  {'the verdict':>11}  {'error':>6}"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of four devices whose memory grows with the rows of its batch.

    Args:
        forward: from ``{"up": [layers, 512, 2048], "down": [layers, 2048, 512]}`` and a batch
            ``[rows, 512]`` to a batch.
        chips: their kind.
        rows: to start the search from.
        trains: whether the program is the gradient and an update, or only forward.
        donates: whether the weights are donated.
        fsdp: whether they are split over the devices, too.
        layers: how many there are.
    """

    forward: Callable[[Any, jax.Array], jax.Array]
    chips: str = "v5e:2x2"
    rows: int = 2**21
    trains: bool = True
    donates: bool = True
    fsdp: bool = False
    layers: int = 4

    def function(self) -> Any:
        """The program, for a mesh with the axis ``data``."""
        split = {"up": P(None, "data"), "down": P(None, None, "data")}
        specs = split if self.fsdp else {"up": P(), "down": P()}
        return spmd.pjit(
            functools.partial(_step, self.forward) if self.trains else self.forward,
            in_axis_resources=(specs, P("data")),
            out_axis_resources=specs if self.trains else P("data"),
            donate_argnums=(0,) if self.donates else (),
        )

    def arguments(self, rows: int) -> tuple[Any, Any]:
        """Shapes of the weights and of a batch."""
        up, down = (self.layers, WIDTH, 4 * WIDTH), (self.layers, 4 * WIDTH, WIDTH)
        return {"up": _bf16(*up), "down": _bf16(*down)}, _bf16(rows, WIDTH)


def _bf16(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _step(forward: Any, w: Any, x: Any) -> Any:
    gradients = jax.grad(lambda w: jnp.mean(forward(w, x).astype(jnp.float32) ** 2))(w)
    return jax.tree.map(lambda a, g: a - (0.1 * g).astype(a.dtype), w, gradients)


def _block(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def _scanned(w: Any, x: Any, block: Any = _block) -> Any:
    return jax.lax.scan(lambda x, w: (block(w, x), None), x, w)[0]


def _unrolled(w: Any, x: Any, block: Any = _block) -> Any:
    for layer in range(w["up"].shape[0]):
        x = block(jax.tree.map(lambda a, layer=layer: a[layer], w), x)
    return x


def _in_a_loop(w: Any, x: Any) -> Any:
    def more(layer: Any, x: Any) -> Any:
        w_up = jax.lax.dynamic_index_in_dim(w["up"], layer, keepdims=False)
        return x + jnp.tanh(jnp.roll(x, 1, axis=1) @ w_up)[:, :WIDTH]

    return jax.lax.fori_loop(0, w["up"].shape[0], more, x)


def _with_a_kernel(w: Any, x: Any) -> Any:
    return _scanned(w, x, lambda w, x: x + _tanh(x @ w["up"]) @ w["down"])


@jax.custom_vjp
def _tanh(x: Any) -> Any:
    """A Pallas kernel, on the rows that each device has."""
    from jax.experimental import pallas

    def kernel(from_: Any, to: Any) -> None:
        to[...] = jnp.tanh(from_[...])

    def local(x: Any) -> Any:
        block = pallas.BlockSpec((256, x.shape[1]), lambda i: (i, 0))
        return pallas.pallas_call(
            kernel, out_shape=x, grid=(x.shape[0] // 256,), in_specs=[block], out_specs=block
        )(x)

    mesh = spmd.current_mesh()
    return jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )(x)


_tanh.defvjp(
    lambda x: (y := _tanh(x), y),
    lambda y, cotangent: (cotangent * (1 - y * y),),
)

_scanned_again = functools.partial(_scanned, block=jax.checkpoint(_block))
_unrolled_again = functools.partial(_unrolled, block=jax.checkpoint(_block))

#: Searches start where a refusal is near, which takes a second; a compile takes many.
PROGRAMS = {
    "scan": Program(forward=_scanned, rows=1_540_096),
    "scan, not donated": Program(forward=_scanned, donates=False, rows=1_540_096),
    "scan, FSDP": Program(forward=_scanned, fsdp=True, rows=1_560_576),
    "scan of checkpoint": Program(forward=_scanned_again, rows=5_996_544),
    "scan, forward": Program(forward=_scanned, trains=False, donates=False, rows=22_044_672),
    "scan of a Pallas kernel": Program(forward=_with_a_kernel, rows=2_211_840),
    "unrolled": Program(forward=_unrolled, layers=2, rows=6_631_424),
    "unrolled, checkpoint": Program(forward=_unrolled_again, layers=2, rows=2**23),
    "fori_loop, forward": Program(forward=_in_a_loop, trains=False, donates=False, rows=10_618_880),
    "scan, v4": Program(forward=_scanned, chips="v4:2x2x1", rows=3_010_560),
    "unrolled, forward, v4": Program(
        forward=_unrolled, chips="v4:2x2x1", trains=False, donates=False, rows=2**25
    ),
    "scan of checkpoint, v5p": Program(forward=_scanned_again, chips="v5p:2x2x1", rows=37_748_736),
    "scan of a Pallas kernel, v5p": Program(
        forward=_with_a_kernel, chips="v5p:2x2x1", rows=13_516_800
    ),
}


def run() -> Iterator[str]:
    """A line for each program, and one for all of them."""
    errors = []
    for name, program in PROGRAMS.items():
        line, error = _bracketed(name, program)
        errors.append(error)
        yield line
    yield f"{sum(error <= 0.02 for error in errors)} of {len(errors)} within 2%"


def _bracketed(name: str, program: Program) -> tuple[str, float]:
    """The figure where the compiler just accepts and where it just refuses, against its memory.

    The error is by how much the figure, carried on to the size that is refused, misses the memory.
    """
    accepted, refused = bracket(program)
    (rows, fit), (more, verdict) = accepted, refused
    error = max(1 - fit.needed / fit.budget * more / rows, 0)
    # Where the compiler rounds what it needs to what there is, the verdict is that.
    told = (verdict.needed or verdict.budget) / 2**30
    sizes = f"{rows:>10,}  {fit.needed / 2**30:>6.2f} GiB  {more:>10,}  {told:>7.2f} GiB"
    return f"{name:34}  {sizes}  {error:6.1%}", error


def bracket(program: Program, within: float = 0.01) -> tuple[Any, Any]:
    """The largest number of rows that is known to be accepted, the smallest refused, and the fits.

    A refusal takes a second and an accepted compile many, so this comes down from what is refused,
    by the figure of the refusal.

    Args:
        program: which one.
        within: how far apart the two may be, as a part of the smaller one.
    """
    accepted, refused, rows = None, None, program.rows
    while accepted is None or refused is None or refused[0] > (1 + within) * accepted[0]:
        fit = spmd.fits(
            program.function(),
            *program.arguments(rows),
            topology=program.chips,
            mesh={"data": 4},
        )
        if fit:
            accepted = rows, fit
        else:
            refused = rows, fit
        share = (fit.needed or fit.budget) / fit.budget
        if accepted and refused:
            rows = (accepted[0] + refused[0]) // 2
        elif fit:
            rows = int(rows / share * 0.998 if share < 0.97 else rows * (1 + 0.8 * within))
        else:
            rows = int(rows / share * 0.997)
        rows -= rows % 1024
    return accepted, refused
