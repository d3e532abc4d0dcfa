"""SPMD partitioning for JAX: `pjit` over a device mesh, and an account of what it did."""

from pathlib import Path

from jax.sharding import NamedSharding as NamedSharding, PartitionSpec as PartitionSpec

from spmd import _jax
from spmd._api import clear_caches as clear_caches, pjit as pjit
from spmd._constraint import with_sharding_constraint as with_sharding_constraint
from spmd._counts import Counts as Counts, counts as counts
from spmd._dispatch import ImplicitReshardWarning as ImplicitReshardWarning
from spmd._mesh import Mesh as Mesh, current_mesh as current_mesh, make_mesh as make_mesh
from spmd._spec import FROM_ARRAY as FROM_ARRAY
from spmd.errors import (
    ArgumentError as ArgumentError,
    DonatedArrayError as DonatedArrayError,
    MeshError as MeshError,
    OptionError as OptionError,
    RecoveryError as RecoveryError,
    ShardingError as ShardingError,
    SpecTypeError as SpecTypeError,
    SpmdError as SpmdError,
)
from spmd.stages import Compiled as Compiled, Lowered as Lowered, Traced as Traced

# Frames of the core are no user's: hidden from tracebacks and from source locations. The demo's
# model, in a folder of its own, is user code.
_jax.exclude_from_tracebacks([str(file) for file in Path(__file__).parent.glob("*.py")])

P = PartitionSpec

__version__ = "0.1.0"
