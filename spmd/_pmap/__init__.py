"""pmap: one program on several devices, each with its slice of the arguments."""

from spmd._pmap._api import PmapFunction as PmapFunction, pmap as pmap
from spmd._pmap._levels import DeviceCountError as DeviceCountError
from spmd._pmap._mapping import AxisNameError as AxisNameError
from spmd._pmap._slices import (
    SliceError as SliceError,
    device_put_replicated as device_put_replicated,
    device_put_sharded as device_put_sharded,
    shard_at as shard_at,
    unstack as unstack,
)
