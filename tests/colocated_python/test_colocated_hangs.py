"""What may hang, or needs a process with other settings; see `colocated_cases.py`.

As a program, ``PYTHONPATH=tests python tests/colocated_python/test_colocated_hangs.py RUNS``, it
counts how many of so many runs of `programs_with_consumers` end while the machine is busy.
"""

import contextlib
from pathlib import Path
import subprocess
import sys

from hardware import environment
import pytest

from spmd.launch._local import free_port

HERE = Path(__file__).parent

#: Seconds for a case on a busy machine.
LONG = 600


def start(case, *args, devices=8, limit=60, **environ):
    """Starts a case in a process of its own."""
    command = [sys.executable, str(HERE / "colocated_cases.py"), case, str(limit), *args]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(devices) | environ,
    )


def finish(process, limit=80):
    """Waits for it; kills it after so many seconds. Returns what it printed."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"hangs:\n{out[-1000:]}\n{err[-8000:]}")
    assert process.returncode == 0, f"exit {process.returncode}\n{out[-1000:]}\n{err[-8000:]}"
    return out, err


def passes(case, **options):
    """A case ends well, and says nothing on stderr."""
    out, err = finish(start(case, **options))
    assert (out.splitlines()[-1], err) == ("passed", "")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_more_threads_than_room(devices):
    """Functions of 40 threads meet, though XLA has no thread for a program of each."""
    passes("more_threads_than_room", devices=devices)


@pytest.mark.slow
def test_nested_without_room():
    """Functions of 40 threads call others, when there is no room for more."""
    passes("nested_without_room", devices=2)


@pytest.mark.few(0)
@pytest.mark.parametrize("devices", [8, 2])
def test_collectives_meanwhile(devices):
    """As many calls are pending as there is room for, and programs with collectives run."""
    passes("collectives_meanwhile", devices=devices)


@pytest.mark.slow
def test_calls_of_uneven_threads():
    """One thread makes all its calls before others begin, one by one: there is room for all."""
    passes("calls_of_uneven_threads", devices=2)


@contextlib.contextmanager
def busy(loops=10):
    """Has so many processes compete for the processors."""
    source = f"import time\nend = time.time() + {LONG}\nwhile time.time() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", source]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(LONG + 120)  # busy loops beside it
@pytest.mark.parametrize(
    ("devices", "rounds", "loops"),
    [(8, 100, 4), *(pytest.param(n, 300, 10, marks=pytest.mark.soak) for n in (8, 2))],
)
def test_programs_with_consumers(devices, rounds, loops):
    """Functions compute on all devices, while programs that need their results wait for them.

    However little of the processors they get.
    """
    with busy(loops):
        process = start("programs_with_consumers", str(rounds), devices=devices, limit=LONG)
        out, err = finish(process, LONG + 60)
    assert (out, err) == ("passed\n", "")


@pytest.mark.slow
def test_late_programs():
    """So they do where they start their programs long after they were called."""
    passes("late_programs")


@pytest.mark.slow
def test_places_of_idle_threads():
    """Programs that wait for a next call make room for the calls of others."""
    passes("places_of_idle_threads")


@pytest.mark.slow
def test_settings():
    """What a process looks at or forbids by settings of JAX does not concern pending results."""
    passes("settings")


@pytest.mark.slow
def test_no_room():
    """Without a thread of XLA to spare, calls are synchronous; it is said once."""
    passes("no_room", NPROC="8")


@pytest.mark.slow
def test_no_asynchronous_dispatch():
    """So they are where JAX was told to run programs of the CPU in their caller."""
    passes("no_asynchronous_dispatch")


@pytest.mark.slow
def test_exit():
    """What is pending at the end of the process still runs, and programs for no call end."""
    out, err = finish(start("exits"))
    assert (out.splitlines(), err) == (
        ["end of the program", "passed", "noted 0", "noted 1", "noted 2", "left: 0"],
        "",
    )


@pytest.mark.slow
def test_fork():
    """A child has no calls of its parent, and makes its own threads."""
    passes("fork")


@pytest.mark.slow
def test_interrupts():
    """An interrupt of who waits for a first call leaves the function usable."""
    passes("interrupts")


@pytest.mark.slow
def test_processes():
    """Of two processes each runs the function on its own shards; without any, it does not."""
    port = str(free_port())
    both = [start("processes", port, str(i), devices=4) for i in range(2)]
    try:
        for process in both:
            out, _ = finish(process)
            assert out.splitlines()[-1] == "passed"
    finally:
        for process in both:
            process.kill()


def soak(runs):
    """Prints how many runs under load end; each in a process of its own."""
    ended = 0
    with busy():
        for i in range(runs):
            with contextlib.suppress(pytest.fail.Exception, AssertionError):
                finish(start("programs_with_consumers", "300", limit=LONG), LONG + 60)
                ended += 1
            print(f"{ended} of {i + 1} runs ended", flush=True)


if __name__ == "__main__":
    soak(int(sys.argv[1]))
