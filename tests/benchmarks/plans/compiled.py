"""What the compiler makes of a case as experts lay it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import functools
import itertools
import math
import os
from typing import Any

import jax

import spmd
from spmd.inspection.compile.topology import places_for
from spmd.inspection.timing.chips import CHIPS, device_kind_of

from . import kept
from .cases import Case
from .experts import BOTH
from .logical import Expert


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of an expert's layout on a mesh.

    Attributes:
        expert: whose layout it is.
        sizes: of the mesh's axes.
        seconds: of a call of the compiled program; None where it does not fit the chip.
        peak: bytes on a device, as compiled; None likewise.
        wire: bytes that a device sends in a call; None likewise.
    """

    expert: Expert
    sizes: Mapping[str, int]
    seconds: float | None = None
    peak: int | None = None
    wire: int | None = None

    def fits(self, budget: float | None) -> bool:
        """Whether it keeps to a budget in bytes."""
        return self.peak is not None and (budget is None or self.peak <= budget)


STANDING_IN = "v5e"
"""The chip that virtual CPU devices stand in for."""


def is_fixed(where: str) -> bool:
    """Whether a place is a mesh, such as ``cpu:4x2``; else it is a topology with free shapes."""
    return where.startswith("cpu:")


def place_of(where: str, sizes: Mapping[str, int] | None = None) -> Any:
    """The mesh of a place; of a topology, by default all of it along the first axis."""
    if not is_fixed(where):
        count = math.prod(spmd.topology(where).shape.values())
        return spmd.topology(where, sizes or {"data": count, "model": 1})
    found = [*map(int, where.removeprefix("cpu:").split("x"))]
    names: list[str] = ["data", "model", "more"]
    axes = dict(zip(names, found, strict=False))
    return spmd.topology(f"cpu:{math.prod(found)}", axes)


def hardware_of(where: str, sizes: Mapping[str, int] | None = None) -> Any:
    """A mesh to compile for: of a topology its own, and of CPU devices that of what they stand for.

    The chips have the axes that the CPU devices have.
    """
    if not is_fixed(where):
        return place_of(where, sizes)
    return spmd.topology(slice_of(where), place_of(where).shape)


def slice_of(where: str) -> str:
    """The topology that virtual CPU devices stand in for."""
    sizes = tuple(place_of(where).shape.values())
    return places_for(STANDING_IN, device_kind_of(CHIPS[STANDING_IN]), sizes)[0]


def every_mesh(where: str) -> list[dict[str, int]]:
    """The sizes of ``data`` and ``model`` that fill a topology; of a mesh, its own."""
    sizes = dict(place_of(where).shape)
    if is_fixed(where):
        return [sizes]
    count = math.prod(sizes.values())
    return [{"data": count // m, "model": m} for m in range(1, count + 1) if not count % m]


def step_of(case: Case, expert: Expert, mesh: Any) -> Any:
    """The step as an expert writes it."""
    keep = expert.on(mesh.shape)
    outs = jax.eval_shape(case.step, *case.args)
    return spmd.pjit(
        functools.partial(case.step, keep=keep),
        mesh=mesh,
        in_axis_resources=keep.specs(case.args, case.dims),
        out_axis_resources=keep.specs(outs, case.outs),
        **case.options,
    )


def lowered(case: Case, expert: Expert, mesh: Any) -> Any:
    """The same, lowered."""
    return step_of(case, expert, mesh).lower(*case.args)


def shapes(case: Case, expert: Expert, where: str) -> list[dict[str, int]]:
    """The meshes of a topology that an expert's layout differs on.

    What splits the batch over both axes is the same on all that the batch fills (compiled: to 1%):
    the first of them counts, or the one that it fills best. What splits tensors over ``model``
    needs some there, and with FSDP over ``data`` there as well.
    """
    every = every_mesh(where)
    over = {axes for table in expert.tables for axes in table.values()}
    if over <= {BOTH}:
        rows = case.size("batch")
        return [next((one for one in every if rows % one["data"] == 0), every[-1])]
    every = [one for one in every if "model" in one]
    least = 2 if "data" in set(expert.weights.values()) else 1
    return [one for one in every if one["model"] > 1 and one["data"] >= least]


def compiled(case: Case, where: str, *, most: int = 0) -> Iterator[Figures]:
    """Each expert on each mesh, as they are found.

    Args:
        case: the program.
        where: a topology, or a mesh of virtual CPU devices.
        most: meshes of an expert that are compiled, those of the best previews; 0 for all.
    """
    steps = list(itertools.chain(*(_steps(case, one, where, most) for one in case.experts)))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield from threads.map(_figures, steps)


def _steps(case: Case, expert: Expert, where: str, most: int) -> list[Any]:
    """The lowered steps of an expert that are worth compiling."""
    found = []
    for sizes in shapes(case, expert, where):
        step = lowered(case, expert, hardware_of(where, sizes))
        found.append((expert, sizes, step))
    if 0 < most < len(found):
        found.sort(key=lambda one: _preview(one[2]))
    return found[: most or None]


def _preview(step: Any) -> float:
    time = spmd.preview(step).time
    return time.seconds if time else math.inf


def _figures(of: tuple[Expert, Mapping[str, int], Any]) -> Figures:
    expert, sizes, step = of
    found = kept.figures(step)
    return Figures(expert=expert, sizes=sizes, **found)
