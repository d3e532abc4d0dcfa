"""What chips and their links can do: every figure with its source.

Sources, by the letter that stands beside a figure:

- C: Google Cloud's pages of the TPU versions (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x):
  peak of bf16 products, memory bandwidth, bandwidth between chips.
- S: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapters "TPUs" and "Rooflines":
  bandwidth of one link in one direction, sizes of the matrix units, a microsecond for each hop,
  vector memory about 22 times as fast as main memory, and PCIe to the host.
- M: ``spmd calibrate --devices 8`` on two cores of an AMD EPYC with nothing beside it, 2026-11-24.
  The eight virtual devices share the cores. It varies twofold from run to run: an order of size.
- R: the run "22B v4-128" of tests/benchmarks/published/runs.toml.
- T: the cross-entropies of up to 4,096 words of tests/benchmarks/published/operations.toml: what
  their products take of the peak, where a pass over the logits takes so many cycles an element.
  (v5p would have 0.91 by them; 0.9 was set by runs, and is there for all others.)
- L: libtpu 0.0.50, whose cycles of products of 4,096 x 4,096 matrices are half of those of bf16 on
  v5e and v5p, and on tpu7x, for these element types; on v6e 1.3 times fewer, where S has the half.
- N: NVIDIA's data sheets of H100 SXM and H200 SXM, and the DGX H100 user guide: dense bf16 (half of
  dense FP8 and INT8), memory, NVLink in one direction, and a network adapter of 400 Gb/s for each
  GPU of a box of eight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from spmd.errors import ArgumentError, Failure, did_you_mean, explain

MICROSECOND = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One device, as JAX shows it: a chip, or half of one on tpu7x.

    Attributes:
        name: as topologies are named, such as ``v5e``.
        flops: of bf16 products, in a second.
        hbm: bytes of main memory in a second.
        link: bytes in a second over one link, in one direction; of a box, from a device to all
            others of it.
        hop: seconds that a message takes from a chip to the next.
        sustained: the share of its peak clock that a chip keeps in a long run.
        product_share: of the peak, what a product of large matrices reaches with other work beside.
        multipliers: cells of all matrix units, each of which does a multiplication and an addition
            in a cycle; 0 where no compiler tells cycles.
        cores: each with a vector unit of its own.
        vmem: bytes of vector memory in a second; 0 where a chip has none.
        host: bytes in a second to and from the memory of the host; 0 where that is not known.
        on_chip: bytes in a second between the two devices of a chip; 0 where a chip is one device.
        box: devices that a switch joins, such as the GPUs of a server; 0 for chips on a torus.
        across: bytes in a second from one device out of its box.
        doubled: element types, by the names of HLO, whose products are twice as fast as of bf16.
    """

    name: str
    flops: float
    hbm: float
    link: float
    hop: float = MICROSECOND
    sustained: float = 1.0
    product_share: float = 0.9
    multipliers: int = 0
    cores: int = 1
    vmem: float = 0.0
    host: float = 0.0
    on_chip: float = 0.0
    box: int = 0
    across: float = 0.0
    doubled: tuple[str, ...] = ()

    @property
    def clock(self) -> float:
        """Cycles in a second: those with which the matrix units reach the peak."""
        return self.flops / (2 * self.multipliers)

    @property
    def kept(self) -> float:
        """FLOPs in a second at the clock that a chip keeps."""
        return self.sustained * self.flops

    def taken(self, flops: float, types: Collection[str], passes: int = 1) -> float:
        """FLOPs of bf16 that take as long as those of a product of these element types.

        One of complex numbers is four products of real ones, and libtpu makes do with three.

        Args:
            flops: of the product.
            types: of its operands, by the names of HLO.
            passes: as `passes_of` has them; on TPUs each one takes as long as a product of bf16.
        """
        if self.multipliers:
            flops *= passes
        if self.multipliers and types and all(one.startswith("c") for one in types):
            return flops * 3 / 4
        return flops / 2 if types and {*types} <= {*self.doubled} else flops

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values, which ``chip=`` reads from a file."""
        return {"schema": _SCHEMA, **dataclasses.asdict(self)}


_SCHEMA = "spmd-chip/1"
_PIECES = {"default": 1, "high": 2, "highest": 3}


def passes_of(types: Sequence[str], precisions: Sequence[str]) -> int:
    """Products of bf16 that libtpu makes of one, by the types and the precision of its operands.

    An operand of float32 is a sum of one, two or three values of bf16. Each one of the left operand
    is multiplied with each one of the right, but for the pairs that are too small to count.
    """
    left, right = (
        _PIECES.get(precision, 1) if dtype in ("f32", "c64") else 1
        for dtype, precision in zip(types, precisions, strict=True)
    )
    return sum(i + j < max(left, right) for i in range(left) for j in range(right))


_SMALL, _LARGE = 128 * 128, 256 * 256
_VMEM_PER_HBM = 22  # S
_PCIE = 1.6e10  # S
_INTEGERS = ("s8", "u8", "s4", "u4", "f8e5m2")
_FP8 = ("f8e4m3fn", "f8e5m2")


def _tpu(
    name: str,
    *,
    teraflops: float,
    multipliers: int,
    hbm: float,
    link: float,
    cores: int = 1,
    host: float = _PCIE,
    on_chip: float = 0.0,
    sustained: float = 1.0,
    product_share: float = 0.9,
    doubled: tuple[str, ...] = (),
) -> Chip:
    return Chip(
        name=name,
        flops=teraflops * 1e12,
        multipliers=multipliers,
        cores=cores,
        hbm=hbm,
        vmem=_VMEM_PER_HBM * hbm,
        link=link,
        host=host,
        on_chip=on_chip,
        sustained=sustained,
        product_share=product_share,
        doubled=doubled,
    )


def _box(name: str, *, hbm: float) -> Chip:
    doubled = ("s8", "u8", *_FP8)
    return Chip(
        name=name, flops=989.4e12, hbm=hbm, link=4.5e11, box=8, across=5e10, doubled=doubled
    )


# teraflops: C; multipliers and cores: S; hbm: C; link: S. A v4 or v5p chip has two cores of four
# units each and is one device; a tpu7x chip is two devices of four units, which share its
# 7.38 TB/s, and its 1.2 TB/s between chips are six links of two directions (C). sustained: R.
# product_share: T. doubled: S and L. Boxes: N.
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu(
            "v4",
            teraflops=275,
            multipliers=8 * _SMALL,
            cores=2,
            hbm=1.228e12,
            link=4.5e10,
            sustained=0.88,
        ),
        _tpu(
            "v5e",
            teraflops=197,
            multipliers=4 * _SMALL,
            hbm=8.19e11,
            link=4.5e10,
            doubled=_INTEGERS,
        ),
        _tpu(
            "v5p",
            teraflops=459,
            multipliers=8 * _SMALL,
            cores=2,
            hbm=2.765e12,
            link=9e10,
            doubled=_INTEGERS,
        ),
        _tpu(
            "v6e",
            teraflops=918,
            multipliers=4 * _LARGE,
            hbm=1.64e12,
            link=9e10,
            host=2 * _PCIE,
            product_share=0.83,
            doubled=_INTEGERS,
        ),
        _tpu(
            "tpu7x",
            teraflops=2307 / 2,
            multipliers=4 * _LARGE,
            hbm=7.38e12 / 2,
            link=1e11,
            host=0.0,
            on_chip=6e11,
            product_share=0.73,
            doubled=_FP8,
        ),
        _box("h100", hbm=3.35e12),
        _box("h200", hbm=4.8e12),
        Chip(  # M
            name="cpu", flops=6.2e10, hbm=1.9e9, link=8e8, hop=3.4e-4, box=8, across=8e8
        ),
    )
}
"""By name."""

_BY_DEVICE_KIND = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device's own name, such as ``TPU v5 lite``; None for one not known here."""
    return CHIPS.get(_BY_DEVICE_KIND.get(device_kind, ""))


def device_kind_of(chip: Chip) -> str:
    """How JAX calls the devices of a chip; empty for one not known here."""
    return next((kind for kind, name in _BY_DEVICE_KIND.items() if name == chip.name), "")


def platform_of(chip: Chip) -> str:
    """What JAX calls the backend of a chip; one that `calibrate` measured has its device's name."""
    return chip.name if chip.name == "cpu" else "gpu" if chip.box else "tpu"


def read_chip(given: Any, subject: str) -> Chip | None:
    """The chip that ``chip=`` means: a `Chip`, a name, or a file of ``spmd calibrate``.

    Raises:
        ArgumentError: it is none of them, or the file has no chip in it.
    """
    if given is None or isinstance(given, Chip):
        return given
    name = str(given) if isinstance(given, (str, os.PathLike)) else ""
    if found := CHIPS.get(name.lower()):
        return found
    if name.endswith(".json"):
        return _from_file(name, subject)
    failure = Failure(
        what=f"knows no chip {given!r}{did_you_mean(name, CHIPS)}"[:200],
        expected=f"one of {', '.join(CHIPS)}, a Chip, or the file of `spmd calibrate`",
        error=ArgumentError,
    )
    raise explain(subject, [failure])


def _from_file(path: str, subject: str) -> Chip:
    names = [field.name for field in dataclasses.fields(Chip)]
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(data, Mapping) or data.get("schema") != _SCHEMA:
            raise ValueError(f"not of schema {_SCHEMA!r}")
        chip = Chip(**{name: data[name] for name in names if name in data})
        if isinstance(chip.doubled, str) or not all(isinstance(one, str) for one in chip.doubled):
            raise ValueError("doubled has to be an array of element types")
        chip = dataclasses.replace(chip, doubled=tuple(chip.doubled))
        figures = [getattr(chip, name) for name in names if name not in ("name", "doubled")]
        right = all(isinstance(one, (int, float)) and math.isfinite(one) for one in figures)
        speeds = chip.cores, chip.flops, chip.hbm, chip.link, chip.product_share
        if not (right and min(speeds) > 0 and min(figures) >= 0):
            raise ValueError("its figures have to be finite, and those of its speed above 0")
    except (OSError, ValueError, TypeError) as e:
        failure = Failure(
            what=f"cannot read a chip from {path!r}",
            expected="a file that `spmd calibrate` wrote",
            got=str(e),
            error=ArgumentError,
        )
        raise explain(subject, [failure]) from None
    return chip
