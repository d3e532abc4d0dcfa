"""``spmd launch``: several processes on one machine, started and stopped together.

In the order of reading:

- `_local`: processes on this machine: their start, their output, and their end.
- `_mpirun`: processes that Open MPI starts.
- `_ray`: processes that Ray starts.
"""

#: The variables that tell a process what it is; `spmd.distributed.initialize` reads them.
ADDRESS = "JAX_COORDINATOR_ADDRESS"
PROCESSES = "SPMD_NUM_PROCESSES"
PROCESS = "SPMD_PROCESS_ID"
