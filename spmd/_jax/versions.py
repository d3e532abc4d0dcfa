"""Where supported releases of JAX differ: a name and a reason for each difference."""

from __future__ import annotations

import jax
from jax._src import core
from jax._src.interpreters import ad
import jaxlib.version

#: ClosedJaxpr and Jaxpr are one class; DCE rules take live inputs; transposes return logs.
MERGED_JAXPR = not hasattr(core, "ClosedJaxpr") or core.ClosedJaxpr is core.Jaxpr

#: Linearization rules may return residuals that keep a structure of their own.
STRUCTURED_RESIDUALS = "structured_residuals" in ad.LinearizeTrace.__annotations__

#: Rematerialization rules return their residuals; before, a function that holds them.
REMAT_RETURNS_RESIDUALS = jax.__version_info__ >= (0, 12)

#: The C++ fast path looks whether an array was deleted. Before, it crashes the process.
FAST_PATH_CHECKS_DELETED = jax.__version_info__ >= (0, 12)

#: An empty result has shards of its whole shape, whatever its sharding says.
EMPTY_RESULTS_ARE_WHOLE = jax.__version_info__ < (0, 12)

#: XLA mistakes the body of a `shard_map` whose only operand is a token for one without operands.
WRAPS_TOKEN_ONLY_BODIES = jax.__version_info__ >= (0, 11)

#: A token that leaves a `shard_map` over some axes aborts the process in XLA.
CRASHES_ON_NESTED_TOKENS = jax.__version_info__ < (0, 12)

#: Whether XLA keeps the error function as a call that it does not partition.
ERF_IS_OPAQUE = jax.__version_info__ < (0, 12)

#: Whether programs on CPU devices of several processes never end once 33 of them are in flight.
HANGS_WHEN_CROWDED = jax.__version_info__ < (0, 12)
JAXLIB_VERSION = jaxlib.version.__version__
