"""Two processes: each passes its part of the mapped arguments and gets its part of the results."""

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
process = int(sys.argv[1])
jax.distributed.initialize("localhost:" + sys.argv[2], 2, process)
import numpy as np
from jax import lax
import spmd

whole = np.arange(8, dtype=np.float32)
x = whole[4 * process : 4 * process + 4]

share = spmd.pmap(
    lambda x, w: (x / lax.psum(x, "i") * w, lax.axis_index("i")), "i", in_axes=(0, None)
)
y, index = share(x, np.float32(2))
np.testing.assert_allclose(y, 2 * x / 28, rtol=1e-6)
assert y.shape == (4,) and y.is_fully_addressable
assert [*map(int, index)] == [*range(4 * process, 4 * process + 4)]

# Results are arguments again, and stay where they are.
for _ in range(3):
    z, _ = share(y, np.float32(1))
np.testing.assert_allclose(z, np.asarray(y) / 2, rtol=1e-6)
assert share._cache_size == 1
assert spmd.shard_at(y, 1).devices() == {jax.local_devices()[1]}

number = spmd.pmap(lambda: lax.axis_index("i"), "i", axis_size=8)()
assert [*map(int, number)] == [*range(4 * process, 4 * process + 4)]

total = spmd.pmap(lambda x: lax.psum(x, "i"), "i", out_axes=None)(x)
assert float(total) == 28

both = spmd.pmap(lambda x: spmd.pmap(lambda y: lax.psum(y, ("i", "j")), "j")(x), "i")
np.testing.assert_array_equal(both(x.reshape(2, 2)), np.full((2, 2), 28, np.float32))

try:
    share(np.ones(5), 1.0)
except spmd.MeshError as error:
    assert "needs 10 devices" in str(error), error
else:
    raise AssertionError("5 elements on 4 devices")
print("all of it")
"""


@pytest.mark.slow
def test_each_process_has_its_part(tmp_path):
    """Sizes, collectives, indices and nested levels count over both processes."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    running = [
        subprocess.Popen(
            [sys.executable, str(path), str(i), port],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said = [p.communicate(timeout=120)[0] for p in running]
    finally:
        for p in running:
            p.kill()  # JAX catches SIGTERM
    for p, text in zip(running, said, strict=True):
        assert p.returncode == 0, text[-3000:]
        assert text.endswith("all of it\n")
