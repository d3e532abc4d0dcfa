"""Taps, prints, calls and a barrier: functions of the host, called from inside of sharded code."""

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
