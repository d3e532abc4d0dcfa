"""What kernels written by hand compute, where their authors do not say it and their names tell."""

from __future__ import annotations

from collections.abc import Sequence
import math
import re

from spmd.inspection.records.report import Shape

# Attention of `jax.experimental.pallas.ops.tpu`, and how many products of queries and keys or
# values each of its kernels has.
_ATTENTION = re.compile(r"(splash|flash)_m[hq]a_(?:bwd_)?(fwd|dq|dkv)")
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
# Each of the two for gradients computes the products of queries and keys again; where there are
# two, both also need the gradient of the probabilities.
_WRITTEN = {"fwd": 2, "dq": 1, "dkv": 3}


def known_flops(
    op_name: str, operands: Sequence[Shape], results: Sequence[Shape], *, again: bool = True
) -> tuple[int, str] | None:
    """FLOPs of a kernel that is known by its name, and what they are taken for; else None.

    Splash attention skips blocks above the diagonal of a causal mask, which it is taken to have;
    its first operands have an entry for each block. Without `again`, what the kernels for gradients
    compute a second time is left out.
    """
    found = _ATTENTION.search(op_name)
    floats = [one for one in operands if one.dtype in ("bf16", "f16", "f32") and len(one.dims) > 2]
    if not found or len(floats) < 3:
        return None
    queries, keys = floats[0], floats[1]
    kind, role = found.groups()
    # A kernel that makes all three gradients has a product more.
    products = (_PRODUCTS if again else _WRITTEN)[role] + (role == "dkv" and len(results) > 2)
    flops = 2 * products * math.prod(queries.dims) * keys.dims[-2]
    if kind == "flash":
        return flops, "attention without a mask"
    blocks = next((one.dims[-1] for one in operands if one.dtype == "s8"), 1)
    return flops * (blocks + 1) // (2 * blocks), "attention with a causal mask"
