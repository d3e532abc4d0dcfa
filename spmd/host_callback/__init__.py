"""Taps, prints, calls and a barrier: functions of the host, called from inside of sharded code.

In the order of reading:

- `_records`: what an equation says about its host function, and what a host function is told.
- `_api`: what users call: taps, prints, calls and the barrier; for tests, a record of all of them.
- `_primitive`: the primitives of a tap and of a call, and all their rules.
- `_lowering`: from an equation to the call of a handler, and what the handlers do.
- `_registry`: host functions by the numbers that programs know them by, and how those are split.
- `_running`: how host functions are called, and what is made of their results.
- `_receiver`: the queues, the threads that run host functions in order, and what can be configured.
- `_ffi`: XLA's foreign function interface from pure Python.
- `_pools`: threads and memory that are used again, and what XLA reads when it starts.
- `_progress`: a progress bar that is driven from inside of a compiled loop.
- `_metrics`: scalars by name: to a function, JSON lines, or a TensorBoard writer.
"""

from spmd.host_callback._api import (
    Recorded as Recorded,
    ResultShapeError as ResultShapeError,
    barrier_wait as barrier_wait,
    call as call,
    id_print as id_print,
    id_tap as id_tap,
    record as record,
    stop_outfeed_receiver as stop_outfeed_receiver,
)
from spmd.host_callback._metrics import metrics_tap as metrics_tap
from spmd.host_callback._pools import prepare_xla as _prepare_xla
from spmd.host_callback._primitive import TransformationError as TransformationError
from spmd.host_callback._progress import Progress as Progress, progress as progress
from spmd.host_callback._receiver import (
    CallbackException as CallbackException,
    configure as configure,
)
from spmd.host_callback._records import Shard as Shard
from spmd.host_callback._running import ResultError as ResultError

TapFunctionException = CallbackException

_prepare_xla()
