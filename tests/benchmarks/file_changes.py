"""How often the line of an eager first call changes files; `--edges` names from where to where.

    python -m tests.benchmarks.file_changes

Counted is each call of a function in `spmd/` whose file is another than that of the nearest frame
of `spmd/` below it, in a process where another function was called before.
"""

import collections
import gc
import os
import pathlib
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import spmd

PACKAGE = f"{pathlib.Path(spmd.__file__).parent}{os.sep}"


def count_changes(work):
    """Runs `work`; returns how often it called from file to file, by pair and function."""
    edges = collections.Counter()

    def profile(frame, event, arg):
        del arg
        callee = frame.f_code.co_filename
        if event != "call" or not callee.startswith(PACKAGE):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and (before := caller.f_code.co_filename) != callee:
            name = frame.f_code.co_qualname
            edges[before.removeprefix(PACKAGE), callee.removeprefix(PACKAGE), name] += 1

    gc.collect()  # one in the middle would call what waits for it
    gc.disable()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return edges


def first_call(shape):
    """Counts the changes of files while a function of 8 devices is decorated and called."""
    mesh = spmd.Mesh(np.array(jax.devices()), ("x",))
    x = jnp.ones(shape)

    def f(x):
        return 2 * x

    def call():
        with mesh:
            spmd.pjit(f, in_axis_resources=P("x"), out_axis_resources=P("x"))(x)

    return count_changes(call)


if __name__ == "__main__":
    first_call((16,))  # what is imported and built once per process
    found = first_call((8, 4))
    if "--edges" in sys.argv:
        for edge, n in sorted(found.items(), key=lambda e: (e[0][:2], -e[1])):
            print(f"{n:4d}  {edge[0]:24s} {edge[1]:24s} {edge[2]}")
    print(sum(found.values()), "changes of files")
