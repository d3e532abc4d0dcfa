"""Python functions and objects that run on the hosts of devices, and return arrays at once.

In the order of reading:

- `_specs`: what arrays look like, and how errors are told where the arrays are.
- `_promises`: arrays that are filled later, and the programs that make them.
- `_waiting`: how long a caller waits for a function that starts programs of its own.
- `_lanes`: which threads run calls, and in which order.
- `_calls`: one call of a function, and what is known of its results.
- `_travel`: how functions travel to other processes.
- `_api`: `colocated_python`, from a call to its function; CPU devices of the same hosts.
- `_classes`: `colocated_python_class`: objects whose methods are such functions.
"""

from spmd.colocated_python._api import (
    ColocatedFunction as ColocatedFunction,
    barrier as barrier,
    colocated_cpu_devices as colocated_cpu_devices,
    colocated_python as colocated_python,
)
from spmd.colocated_python._classes import colocated_python_class as colocated_python_class
from spmd.colocated_python._specs import ColocatedPythonError as ColocatedPythonError
from spmd.host_callback._pools import prepare_xla as _prepare_xla

#: So many calling threads at a time, at least, have calls in flight whose results are awaited.
_prepare_xla(threads=8)
