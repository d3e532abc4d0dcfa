"""How `pmap` says where the parts of an array lie: one value per dimension, one per mesh axis.

A `ShardingSpec` knows no devices and no axis names. `sharding` says, dimension by dimension, how an
array is split; each number of parts in it is a *sharded axis*, counted from 0 in that order.
`mesh_mapping` says, from major to minor, what each axis of a mesh does: it walks along one sharded
axis, or it replicates. The devices are numbered by their places in that mesh, row by row.
"""

from spmd._pmap._sharding_spec import (
    Chunked as Chunked,
    Index as Index,
    NoSharding as NoSharding,
    Replicated as Replicated,
    ShardedAxis as ShardedAxis,
    ShardingSpec as ShardingSpec,
    Unstacked as Unstacked,
    sharding_spec_of as sharding_spec_of,
    spec_to_indices as spec_to_indices,
)
