"""How `pmap` says where the parts of an array lie: one value per dimension, one per mesh axis."""

from spmd._pmap._sharding_spec import (
    Chunked as Chunked,
    NoSharding as NoSharding,
    Replicated as Replicated,
    ShardedAxis as ShardedAxis,
    ShardingSpec as ShardingSpec,
    Unstacked as Unstacked,
    sharding_spec_of as sharding_spec_of,
    spec_to_indices as spec_to_indices,
)
