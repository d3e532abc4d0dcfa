"""The main job: a character transformer trained with `spmd.pjit`, and what that cost.

Nothing here imports JAX before the number of virtual devices is set; `spmd.demo.run` does.
"""

import dataclasses
from pathlib import Path

AXES = ("data", "model")
BATCH = 32
HEADS = 8
DEVICES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run of the demo.

    Attributes:
        mesh: Sizes of the mesh axes, in the order given; both of `AXES` are there.
        devices: How many there are.
        real: Whether they are those that JAX finds, instead of virtual CPU devices.
        steps: Optimizer steps.
        seed: Of the initial parameters and of the batches.
        verify: Whether to train the same steps unsharded, and compare.
        json: File to write the report to.
        html: File to write the page of the step to, and the other `pages` beside it; None for no
            page.
    """

    mesh: dict[str, int]
    devices: int = DEVICES
    real: bool = False
    steps: int = 400
    seed: int = 0
    verify: bool = False
    json: Path | None = None
    html: Path | None = None


def pages(path: Path) -> dict[str, Path]:
    """The files that a page is written to, by what each is of."""
    return {
        "the slip": path.with_stem(f"{path.stem}-slip"),
        "the difference": path.with_stem(f"{path.stem}-difference"),
        "the step": path,
    }
