"""A process that saves a program, and one that loads it: run by `test_bundle_process.py`."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import P, load

X = np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8)
TABLE = np.linspace(0, 1, 4096, dtype=np.float32)


def step(x, key):
    """A solve by a library, a constant that is large, random numbers, and a collective."""
    factor = jnp.linalg.cholesky(x.T @ x + 8 * jnp.eye(8))
    return factor + jnp.asarray(TABLE)[None, :8], jax.random.normal(key, (8,)), x.sum()


def arguments():
    """The arguments of the step."""
    return X, jax.random.wrap_key_data(np.array([1, 2], np.uint32))


def main(role, path):
    """Saves or loads the step, and prints its results and the work that was done."""
    if role == "save":
        mesh = spmd.make_mesh({"data": 4, "model": 2})
        f = spmd.pjit(step, in_axis_resources=(P("data", "model"), P()), mesh=mesh)
        compiled = f.lower(*arguments()).compile()
        compiled.save(path)
    else:
        compiled = load(path)
    results = [np.asarray(x).tobytes().hex() for x in compiled(*arguments())]
    work = spmd.counts()
    print(
        json.dumps(
            {
                "results": results,
                "constants": len(compiled._hoisted),
                "work": [work.traces, work.lowerings, work.compiles],
                "report": compiled.report().to_json(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
