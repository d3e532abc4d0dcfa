"""Never a hang: the table of the deadlock on two cores, each row in a process of its own."""

from pathlib import Path
import subprocess
import sys

import pytest

SCRIPT = Path(__file__).parent / "hang_cases.py"
WAYS = ("tap", "per_shard", "shard_map", "call", "call_per_shard", "call_shard_map")
SMALL = (1, 128 * 2**10, 2**20)
SIZES = (1, 2**10, 128 * 2**10, 4 * 2**20, 256 * 2**20)
LIMIT = 100  # seconds after which a row counts as hanging


def run_row(cores, layout, way, touch, sizes):
    """Runs one row; a hang is told with the case that it began in."""
    command = [sys.executable, str(SCRIPT), str(cores), layout, way, touch, *map(str, sizes)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"hangs in: {out.splitlines()[-1:]}\n{err[-2000:]}")
    assert out.splitlines()[-1:] == ["passed"], f"{out[-200:]}\n{err[-2000:]}"
    assert (process.returncode, err) == (0, "")
    assert len(out.splitlines()) == 3 * len(sizes) + 1


@pytest.mark.few(0)
@pytest.mark.parametrize(
    ("cores", "layout", "way", "touch"),
    [
        (2, "sharded", "tap", "touching"),
        (1, "sharded", "call", "touching"),
        pytest.param(2, "replicated", "call", "touching", marks=pytest.mark.slow),
        pytest.param(2, "sharded", "call_shard_map", "touching", marks=pytest.mark.slow),
    ],
)
def test_callbacks_on_eight_devices_never_hang(cores, layout, way, touch):
    """Up to 1 MiB on 8 devices: one program, 16 in flight and four threads end, with all calls."""
    run_row(cores, layout, way, touch, SMALL)


@pytest.mark.few(0)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("touch", ["touching", pytest.param("ignoring", marks=pytest.mark.soak)])
@pytest.mark.parametrize("layout", ["sharded", pytest.param("replicated", marks=pytest.mark.soak)])
def test_table_of_hangs(layout, way, touch):
    """From 1 B to 256 MiB on 8 devices and two cores: all programs end, with all calls."""
    run_row(2, layout, way, touch, SIZES)


@pytest.mark.few(0)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["sharded", pytest.param("replicated", marks=pytest.mark.soak)])
def test_table_of_hangs_on_one_core(layout, way):
    """The same up to 4 MiB where XLA has a single thread."""
    run_row(1, layout, way, "touching", SIZES[:-1])
