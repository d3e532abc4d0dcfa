"""What chips and their links can do: every figure with its source.

Sources, by the letter that stands beside a figure:

- C: Google Cloud's pages of the TPU versions (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x):
  peak of bf16 products, memory bandwidth, bandwidth between chips.
- S: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapters "TPUs" and "Rooflines":
  bandwidth of one link in one direction, sizes of the matrix units, a microsecond for each hop, and
  vector memory about 22 times as fast as main memory.
"""

from __future__ import annotations

import dataclasses

MICROSECOND = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One device, as JAX shows it: a chip, or half of one on tpu7x.

    Attributes:
        name: as topologies are named, such as ``v5e``.
        flops: of bf16 products, in a second.
        multipliers: cells of all matrix units, each of which does a multiplication and an addition
            in a cycle.
        hbm: bytes of main memory in a second.
        vmem: bytes of vector memory in a second.
        link: bytes in a second over one link, in one direction.
        hop: seconds that a message takes from a chip to the next.
        on_chip: bytes in a second between the two devices of a chip; 0 where a chip is one device.
    """

    name: str
    flops: float
    multipliers: int
    hbm: float
    vmem: float
    link: float
    hop: float = MICROSECOND
    on_chip: float = 0.0

    @property
    def clock(self) -> float:
        """Cycles in a second: those with which the matrix units reach the peak."""
        return self.flops / (2 * self.multipliers)


_SMALL, _LARGE = 128 * 128, 256 * 256
_VMEM_PER_HBM = 22  # S


def _tpu(
    name: str, *, teraflops: float, multipliers: int, hbm: float, link: float, on_chip: float = 0.0
) -> Chip:
    return Chip(
        name=name,
        flops=teraflops * 1e12,
        multipliers=multipliers,
        hbm=hbm,
        vmem=_VMEM_PER_HBM * hbm,
        link=link,
        on_chip=on_chip,
    )


# teraflops: C; multipliers: S; hbm: C; link: S. A v4 or v5p chip has two cores of four units each
# and is one device; a tpu7x chip is two devices of four units, which share its 7.38 TB/s, and its
# 1.2 TB/s between chips are six links of two directions (C).
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4", teraflops=275, multipliers=8 * _SMALL, hbm=1.228e12, link=4.5e10),
        _tpu("v5e", teraflops=197, multipliers=4 * _SMALL, hbm=8.19e11, link=4.5e10),
        _tpu("v5p", teraflops=459, multipliers=8 * _SMALL, hbm=2.765e12, link=9e10),
        _tpu("v6e", teraflops=918, multipliers=4 * _LARGE, hbm=1.64e12, link=9e10),
        _tpu(
            "tpu7x",
            teraflops=2307 / 2,
            multipliers=4 * _LARGE,
            hbm=7.38e12 / 2,
            link=1e11,
            on_chip=6e11,
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
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device's own name, such as ``TPU v5 lite``; None for one not known here."""
    return CHIPS.get(_BY_DEVICE_KIND.get(device_kind, ""))
