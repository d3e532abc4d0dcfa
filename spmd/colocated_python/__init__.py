"""Python functions and objects that run on the hosts of devices, and return arrays at once."""

from spmd.colocated_python._api import (
    ColocatedFunction as ColocatedFunction,
    barrier as barrier,
    colocated_python as colocated_python,
)
from spmd.colocated_python._classes import colocated_python_class as colocated_python_class
from spmd.colocated_python._devices import colocated_cpu_devices as colocated_cpu_devices
from spmd.colocated_python._errors import ColocatedPythonError as ColocatedPythonError
from spmd.host_callback._threads import prepare_xla as _prepare_xla

#: So many calling threads at a time, at least, have calls in flight whose results are awaited.
_prepare_xla(threads=8)
