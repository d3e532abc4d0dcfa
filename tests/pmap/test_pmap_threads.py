"""Mapped functions in threads: each case in a process of its own, since what is wrong is a hang."""

from pathlib import Path
import re
import subprocess
import sys

from hardware import environment
import jax
import pytest

HERE = Path(__file__).parent


def alone(case, *args, devices=8, limit=60, script="thread_cases.py"):
    """Runs a case; a hang is told with the stacks of all threads.

    Args:
        case: The name of the case in `script`.
        args: What it takes.
        devices: On how many devices.
        limit: Seconds after which it counts as hanging; it then prints its stacks.
        script: Where the case is.
    """
    command = [sys.executable, str(HERE / script), case, str(limit), *map(str, args)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(devices),
    ) as process:
        try:
            out, err = process.communicate(timeout=limit + 20)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"hangs, without stacks:\n{out[-1000:]}\n{err[-8000:]}")
    assert process.returncode == 0, f"exit {process.returncode}\n{out[-1000:]}\n{err[-8000:]}"
    if devices == 1 and jax.__version_info__ < (0, 12):
        # There XLA is who refuses a donated array, and it writes a line of its own.
        err = re.sub(r"E\d{4} .*Invalid buffer .*Buffer has been deleted or donated\.\n", "", err)
    assert (out.splitlines()[-1], err) == ("passed", "")


@pytest.mark.slow
def test_eight_threads_share_a_function():
    """200 calls of each of 8 threads end, with the values of NumPy, by one trace and program."""
    alone("shared")


@pytest.mark.slow
def test_one_trace_and_compile_per_signature():
    """Seven threads wait for the trace, and then for the compile, of the eighth; it goes on."""
    alone("one_compile")


@pytest.mark.slow
def test_two_signatures_at_once():
    """Two traces, and two compiles, end only together; what is compiled is called meanwhile."""
    alone("at_once")


@pytest.mark.slow
def test_a_failure_releases_who_waits():
    """All get the error of a trace or a compile, no entry stays, and the next call works."""
    alone("failures")


@pytest.mark.slow
def test_an_interrupted_maker():
    """The interrupt is its own, one of the waiting threads traces anew, all others get values."""
    alone("interrupted_maker")


@pytest.mark.slow
def test_an_interrupted_waiter():
    """A thread that waits for an entry, or to start, is interrupted, and leaves the lock free."""
    alone("interrupted_waiter")


@pytest.mark.slow
def test_tracers_in_threads():
    """Calls with tracers leave no entry, beside calls with arrays, which make one."""
    alone("tracers")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_a_function_calls_itself(devices):
    """From a hook with other signatures, and in its own trace as a further level."""
    alone("itself", devices=devices)


@pytest.mark.slow
def test_a_tap_calls_a_mapped_function():
    """The host functions of taps run another one, while threads call the one that taps."""
    alone("from_taps")


@pytest.mark.few(0)
@pytest.mark.parametrize(
    ("way", "size"),
    [("call", 1), ("call", 8), ("io", 1), ("io", 8)],
)
def test_a_program_waits_for_a_mapped_function(way, size):
    """A host function that a program waits for runs mapped functions for their first time."""
    alone("from_calls", way, size, limit=20)


@pytest.mark.slow
def test_a_host_function_in_the_thread_of_the_caller():
    """It compiles while another thread calls what its own thread has not yet returned from."""
    alone("inline_and_waiting", limit=20)


@pytest.mark.slow
def test_caches_are_cleared_while_functions_are_made():
    """`jax.clear_caches` in one thread does not fail where others make functions."""
    alone("made_and_forgotten")


@pytest.mark.slow
def test_rounds_in_threads():
    """Functions that 8 threads make, call and drop leave no object and no program behind."""
    alone("rounds", 80)


@pytest.mark.slow
def test_a_fork():
    """A child takes the lock that a thread held at the fork, and makes what another was making."""
    alone("fork", limit=20)


@pytest.mark.slow
def test_interrupts_everywhere():
    """Wherever a call is interrupted, it raises just that, and others can call the function."""
    alone("everywhere", limit=200)


@pytest.mark.slow
def test_ten_thousand_rounds_in_threads():
    """10,000 rounds of 8 threads leave no more than few do."""
    alone("rounds", 10_000, limit=200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "seconds"),
    [
        pytest.param(8, 60, marks=pytest.mark.soak),
        (2, 10),
        pytest.param(1, 10, marks=pytest.mark.soak),
    ],
)
def test_stress(devices, seconds):
    """8 threads do everything at once: values are NumPy's, and at the end all counts are right."""
    limit = seconds + 90
    alone("stress", seconds, devices=devices, limit=limit, script="thread_stress.py")
