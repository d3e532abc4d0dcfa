"""pmap: one program on several devices, each with its slice of the arguments.

In the order of reading:

- `_options`: what is said at decoration, and what it means for the arguments of one call.
- `_levels`: a `pmap` in a `pmap`: one mesh with an axis per level.
- `_mapping`: from a function of one device to a function of arrays over all of them.
- `_threads`: what the threads that call a mapped function share.
- `_api`: the straight line of a call, and what `pmap` returns.
- `_slices`: the slices of a mapped array, and arrays made of one value per device.
- `_sharding_spec`: what `spmd.sharding_spec` opens: where the parts of an array lie.
"""

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
