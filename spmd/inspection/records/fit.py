"""Whether a program fits, up to which size, and the words for it. Nothing here knows JAX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
from typing import Any, NamedTuple

from spmd.inspection.hlo.oom import OutOfMemory, buffer_lines, shortage
from spmd.inspection.records.report import Buffer, Memory
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.records.time import Time

MOST = 2**31
"""No larger size is tried: what has not failed up to there does not depend on the size."""


class Trial(NamedTuple):
    """One size that was tried.

    Attributes:
        size: the size.
        needed: bytes on each device; None where the compiler does not say.
        fits: whether that is within the budget.
    """

    size: int
    needed: int | None
    fits: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Found:
    """What a search found; the fields are those of `Fit`."""

    largest: int | None = None
    too_large: int | None = None
    step: int = 1
    tried: tuple[Trial, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether no size is left to try between `largest` and `too_large`."""
        after = ((self.largest or 0) // self.step + 1) * self.step
        return self.too_large is not None and after >= self.too_large


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Fit(Found):
    """Whether a program fits the memory of its devices; true in a condition if it does.

    Attributes:
        fits: whether it does; with `vary`, whether any size does.
        needed: bytes on each device, arguments and results included; None where the compiler
            refuses the program and does not say how much it needs.
        budget: bytes that each device has: what was asked for, or less where the compiler said so.
        memory: the compiler's plan; None where it refused the program.
        buffers: the largest arrays; those that the compiler names where it refused the program.
        verdict: the answer in a sentence.
        name: of the function.
        mesh: size by axis name; empty without a mesh.
        num_devices: that the program is for; 0 where that is not known.
        device_kind: the devices' own name.
        backend: platform.
        stand_in: True where CPU devices stand in for the hardware, whose compiler plans otherwise.
        vary: arguments and dimensions whose size was varied.
        time: how long a call takes, of the largest size that fits; None where that is not known.
        largest: the largest size that fits; None where none does, or nothing was varied.
        too_large: the smallest size that was found not to fit; None where none was.
        step: what sizes are a multiple of, as the shardings demand.
        tried: sizes in the order in which they were tried.
    """

    fits: bool
    needed: int | None
    budget: int
    memory: Memory | None
    buffers: tuple[Buffer, ...]
    verdict: str
    name: str
    mesh: Mapping[str, int]
    num_devices: int
    device_kind: str
    backend: str
    stand_in: bool
    vary: tuple[tuple[str, int], ...] = ()
    time: Time | None = None

    @property
    def margin(self) -> int | None:
        """Bytes that are left on each device, below 0 where they are too few; None if unknown."""
        return None if self.needed is None else self.budget - self.needed

    def __bool__(self) -> bool:
        return self.fits

    def __repr__(self) -> str:
        return f"<Fit: {self.verdict}>"

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # the last value of a notebook's cell


# Words


def verdict_of(fit: Fit) -> str:
    """The answer in a sentence, for one size."""
    known = OutOfMemory(needed=fit.needed, available=fit.budget)
    where = _where(fit)
    if not fit.fits:
        return f"does not fit: {fit.name} {shortage(known, where)}"
    given = f"{show_bytes(fit.needed or 0)} of {show_bytes(fit.budget)}"
    return f"fits: {fit.name} needs {given} on {where}; {show_bytes(fit.margin or 0)} to spare"


def _where(fit: Fit) -> str:
    if not fit.num_devices:
        return "each device"
    kind = "CPU stand-ins" if fit.stand_in else f"{fit.device_kind} devices"
    if fit.num_devices == 1:
        return f"one of the {kind}".replace("one of the CPU stand-ins", "a CPU stand-in")
    return f"each of {fit.num_devices:,} {kind}"


def size_verdict_of(fit: Fit) -> str:
    """The answer in a sentence, where sizes were tried."""
    what = show_vary(fit.vary)
    if fit.largest is None:
        least = min(trial.size for trial in fit.tried)
        more = "" if fit.is_exact else f"; {_so_often(fit)}, and smaller ones may fit"
        return f"does not fit: not even {least:,} for {what}, which {_needs(fit)}{more}"
    if fit.is_exact:
        after = f"{fit.too_large:,} does not fit"
    elif fit.too_large is not None:
        after = f"{_so_often(fit)}, and more may fit, but not {fit.too_large:,}"
    elif fit.largest + fit.step > MOST:
        after = "no larger size was tried: the memory does not seem to depend on it"
    else:
        after = f"{_so_often(fit)}, and larger ones may fit"
    return f"fits: {fit.largest:,} for {what}, which {_needs(fit)}; {after}"


def show_vary(vary: Iterable[tuple[str, int]]) -> str:
    """The arguments and dimensions whose size is varied, in words."""
    return " and ".join(f"dimension {dim} of {path}" for path, dim in vary)


def _so_often(fit: Fit) -> str:
    count = len(fit.tried)
    return f"{count} size{'s were' if count != 1 else ' was'} compiled"


def _needs(fit: Fit) -> str:
    return verdict_of(dataclasses.replace(fit, name="")).partition(":")[2].strip()


def _lines(fit: Fit) -> Iterator[str]:
    yield fit.verdict
    if fit.stand_in:
        yield "  the CPU stands in: another backend's compiler plans memory differently"
    if fit.time is not None:
        yield f"  {fit.time}"
    if fit.memory is not None:
        yield f"  {_parts(fit.memory)}"
    yield from buffer_lines(fit.buffers)
    if fit.tried:
        yield "  tried"
    for size, needed, fitted in fit.tried:
        shown = "" if needed is None else show_bytes(needed)
        yield f"    {size:>13,}  {shown:>10}  {'fits' if fitted else 'does not fit'}"


def _parts(memory: Memory) -> str:
    parts = [("arguments", memory.arguments), ("outputs", memory.outputs - memory.aliased)]
    parts += [("temporaries", memory.temporaries), ("code", memory.code)]
    text = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts if size)
    donated = f", and outputs of {show_bytes(memory.aliased)} in donated arguments"
    return text + (donated if memory.aliased else "")
