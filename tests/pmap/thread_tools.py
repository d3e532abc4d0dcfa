"""What `thread_cases.py` and `thread_stress.py` share: ``SCRIPT CASE LIMIT [ARGUMENT...]``.

Each case runs in a process of its own, since what is wrong there is a hang. After LIMIT seconds
the stacks of all threads are printed and the process ends.
"""

import contextlib
import faulthandler
import gc
import signal
import sys
import threading
import time
import warnings

import jax
import numpy as np

from spmd import _starting
from spmd._pmap import _api
import spmd.host_callback  # noqa: F401 - it asks for threads, which has to be before JAX starts

N = jax.device_count()
X = np.arange(N, dtype=np.float32)
LONG = 60  # seconds that one thread waits for another at most


def in_threads(works):
    """Runs functions in threads that start together; returns what each returned or raised."""
    start = threading.Barrier(len(works))
    found = [None] * len(works)

    def run(i, work):
        start.wait(LONG)
        try:
            found[i] = work()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def until(condition):
    """Lets the other threads run until a condition holds."""
    while not condition():
        time.sleep(0.0005)


def waiting():
    """How many threads wait for another one in `threading`, below a call of a mapped function."""
    count = 0
    for frame in [*sys._current_frames().values()]:
        if frame.f_code.co_name != "wait" or not frame.f_code.co_filename.endswith("threading.py"):
            continue
        while frame is not None and frame.f_code is not _api._call.__wrapped__.__code__:
            frame = frame.f_back
        count += frame is not None
    return count


def work_of(counts):
    """What `spmd.counts` says, without lowerings."""
    return counts.traces, counts.compiles


def same(got, want):
    """Asserts equal values."""
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)


def free():
    """Asserts that another thread can start programs."""

    def take():
        assert _starting.starting.acquire(timeout=LONG)
        _starting.starting.release()
        return True

    assert in_threads([take]) == [True]


def settled(fun, size, bindings=None):
    """Asserts that a function has so many programs and bindings, and none that is being made."""
    assert fun._cache_size == size
    line = fun._line
    for entries, count in (
        (line.programs, size),
        (line.bindings, size if bindings is None else bindings),
    ):
        assert (len(entries), entries._making) == (count, {})
    assert not fun._line.starts.misses


@contextlib.contextmanager
def at_event(name, act):
    """Has `act` called where JAX says how long a step took; the step still counts as running."""
    monitoring = jax.monitoring

    def listen(event, duration, **_):
        if event == name:
            act()

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        monitoring.unregister_event_duration_listener(listen)


LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


def collect():
    """Collects until nothing is left: what C++ held goes in the next collection."""
    while gc.collect():
        pass


def live():
    """The mapped functions that there are."""
    collect()
    return sum(isinstance(o, _api.PmapFunction) for o in gc.get_objects())


def main(cases):
    """Runs the case of the command line."""
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    warnings.simplefilter("error")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    cases[sys.argv[1]](*sys.argv[3:])
    print("passed")
