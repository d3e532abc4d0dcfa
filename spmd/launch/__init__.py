"""``spmd launch``: several processes on one machine, started and stopped together."""

#: The variables that tell a process what it is; `spmd.distributed.initialize` reads them.
ADDRESS = "JAX_COORDINATOR_ADDRESS"
PROCESSES = "SPMD_NUM_PROCESSES"
PROCESS = "SPMD_PROCESS_ID"
