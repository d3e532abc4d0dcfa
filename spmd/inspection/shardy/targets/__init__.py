"""What the compiler of a backend makes of the exchanges that shardings ask for.

Shardings ask for the same on all backends. The rules here are those of compilers that change how
many bytes cross an axis, as far as they could be measured: docs/preview.md has the programs.

- `base`: what is sent, and a backend of which nothing is known.
- `partitioned`: the partitioner of XLA: products, and rows of tables.
- `cpu`: widened numbers, and sums over several dimensions.
- `tpu`: sums that are merged, scattered or moved out of loops, and narrower gathers.
- `gpu`: what of that GPUs have.
- `sums`: which sums a TPU makes whole, and which go around a ring.
"""

from spmd.inspection.shardy.targets.base import AnyTarget
from spmd.inspection.shardy.targets.cpu import Cpu
from spmd.inspection.shardy.targets.gpu import Gpu
from spmd.inspection.shardy.targets.tpu import Tpu


def target_of(platform: str) -> type[AnyTarget]:
    """The rules for a platform."""
    return {"cpu": Cpu, "gpu": Gpu, "tpu": Tpu}.get(platform, AnyTarget)
