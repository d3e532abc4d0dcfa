"""OpSharding protos and the PartitionSpecs that they stand for."""

from spmd._recover import (
    explode_superdims as explode_superdims,
    get_array_mapping as get_array_mapping,
    parse_op_sharding as parse_op_sharding,
    strides_for_sizes as strides_for_sizes,
    unflatten_array as unflatten_array,
    unflatten_superdims as unflatten_superdims,
)
from spmd._resolve import get_aval_sharding_proto as get_aval_sharding_proto
