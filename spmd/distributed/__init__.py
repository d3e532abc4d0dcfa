"""Several processes: start-up, local and global arrays, and what all processes agree on.

In the order of reading:

- `_start`: the processes of a run come together, and compare what they are.
- `_watch`: another process has ended, and this one ends then.
- `_exchange`: what every process tells all others.
- `_arrays`: local and global arrays.
- `_agree`: values of all processes, gathered, broadcast from one, and compared.
- `_check`: what the processes are about to run is compared before they run it.
"""

from spmd._local import (
    global_shape as global_shape,
    global_to_local as global_to_local,
    local_to_global as local_to_global,
)
from spmd.distributed._agree import (
    assert_equal_across_processes as assert_equal_across_processes,
    broadcast_one_to_all as broadcast_one_to_all,
    process_allgather as process_allgather,
)
from spmd.distributed._arrays import (
    global_to_host_local as global_to_host_local,
    host_local_to_global as host_local_to_global,
)
from spmd.distributed._check import check as check
from spmd.distributed._start import initialize as initialize, shutdown as shutdown
