"""What `import spmd` adds to `import jax` in CPU time, each time in a fresh process."""

import statistics
import subprocess
import sys

SCRIPT = """
import time
import jax
start = time.process_time()
import spmd; spmd.pjit
print(time.process_time() - start)
"""
TARGET = 0.060


def run(turns: int) -> str:
    """Returns a line with the median of `turns` processes, after one that warms the disk."""
    times = []
    for _ in range(turns + 1):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
        times.append(float(done.stdout))
    median = statistics.median(times[1:])
    verdict = "ok" if median <= TARGET else "MISSED"
    return (
        f"{'import spmd, spmd.pjit; after import jax':<44} {median * 1e3:>7.1f} ms "
        f"{'':>10} {'':>7} {'':>13}  <= {TARGET * 1e3:.0f} ms  {verdict}"
    )
