"""Cases that may hang or change the process: ``SCRIPT CASE LIMIT``; each in a process of its own.

After LIMIT seconds the stacks of all threads are printed and the process ends.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
import warnings

import jax
import numpy as np
import pytest

from spmd import P
from spmd.colocated_python import _lanes, _promises, barrier, colocated_python

LONG = 60
N = 8


def array(values=None, count=None):
    """An array over so many devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("x",))
    values = np.ones(N, np.float32) if values is None else values
    return jax.device_put(values, jax.sharding.NamedSharding(mesh, P("x")))


def in_threads(works):
    """Runs functions in threads; returns what each returned or raised."""
    found = [None] * len(works)

    def run(i):
        try:
            found[i] = works[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def same(x):
    """An `out_specs_fn`."""
    return x


def everyone(fun, count):
    """Calls a function in so many threads; each gets its own values."""
    works = [lambda i=i: np.asarray(fun(array(np.full(N, i, np.float32)))) for i in range(count)]
    for i, result in enumerate(in_threads(works)):
        np.testing.assert_array_equal(result, np.full(N, i))


def more_threads_than_room():
    """Functions of 40 threads meet, though XLA has no thread for a program of each."""
    count = 40
    assert 0 < _lanes.most_gates() < count
    all_here = threading.Barrier(count)

    def meet(x):
        all_here.wait(LONG)
        return x

    everyone(colocated_python(meet).specialize(out_specs_fn=same), count)


def nested_without_room():
    """Functions of 40 threads call others, when there is no room for more."""
    count = 40
    all_here = threading.Barrier(count)
    inner = colocated_python(lambda x: x).specialize(out_specs_fn=same)

    def outer(x):
        all_here.wait(LONG)
        return inner(inner(x))

    everyone(colocated_python(outer).specialize(out_specs_fn=same), count)


def collectives_meanwhile():
    """As many calls are pending as there is room for, and programs with collectives run."""
    go = threading.Event()
    began = threading.Semaphore(0)

    def wait(x):
        began.release()
        assert go.wait(LONG)
        return x

    fun = colocated_python(wait).specialize(out_specs_fn=same)
    # More would have to wait: XLA lets only so many programs wait for a device.
    each = _lanes._MOST // -(-_lanes.most_gates() // jax.device_count())
    pending = in_threads([lambda: [fun(array()) for _ in range(each)]] * _lanes.most_gates())
    for _ in pending:
        began.acquire()
    x = array(np.ones((N, N), np.float32))
    for _ in range(30):
        assert float(jax.jit(lambda x: (x @ x.T).sum())(x)) == N * N * N
    assert not any(y.is_ready() for results in pending for y in results)
    go.set()
    jax.block_until_ready(pending)


def calls_of_uneven_threads():
    """One thread makes all its calls before others begin, one by one: there is room for all."""
    go, count = threading.Event(), _lanes.most_gates()
    each = _lanes._MOST // -(-count // jax.device_count())
    turns, begun = [threading.Event() for _ in range(count)], threading.Barrier(count)

    def wait(x):
        assert go.wait(LONG)
        return x

    fun = colocated_python(wait).specialize(out_specs_fn=same)

    def calls(i):
        assert turns[i].wait(LONG)
        found = [fun(array()) for _ in range(1 if i else each)]
        turns[(i + 1) % count].set()
        begun.wait(LONG)
        return [*found, *(fun(array()) for _ in range(each - len(found)))]

    turns[0].set()
    pending = in_threads([lambda i=i: calls(i) for i in range(count)])
    assert not any(y.is_ready() for results in pending for y in results)
    go.set()
    jax.block_until_ready(pending)


def places_of_idle_threads():
    """Programs that wait for a next call make room for the calls of others."""
    room = _lanes.most_gates()
    together = threading.Barrier(room)
    mine, go = threading.Event(), threading.Event()

    def meet(x):
        together.wait(LONG)
        return x

    def wait(x):
        assert go.wait(LONG)
        return x

    _lanes._KEPT = LONG
    # This thread has a lane, which starts nothing.
    colocated_python(lambda x: mine.wait(LONG) and None).specialize(out_specs_fn=lambda x: None)(
        array()
    )
    fun = colocated_python(meet).specialize(out_specs_fn=same)
    in_threads([lambda: fun(array())] * room)
    mine.set()
    barrier()
    assert sum(bool(lane.spares) for lane in _lanes.lanes._idle) == room
    y = colocated_python(wait).specialize(out_specs_fn=same)(array())
    assert not y.is_ready()
    go.set()
    np.testing.assert_array_equal(y, np.ones(N))


def settings():
    """What a process looks at or forbids by settings of JAX does not concern pending results."""
    go = threading.Event()

    def wait(x):
        assert go.wait(LONG)
        return x

    x = array()
    for name, value in [
        ("jax_debug_nans", True),
        ("jax_debug_infs", True),
        ("jax_disable_jit", True),
        ("jax_transfer_guard", "disallow"),
    ]:
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        fun = colocated_python(wait).specialize(out_specs_fn=same)
        for _ in range(3):
            go.clear()
            y = fun(x)
            assert not y.is_ready(), name
            go.set()
            y.block_until_ready()
        barrier()
        jax.config.update(name, before)
        np.testing.assert_array_equal(y, np.ones(N))


def programs_with_consumers():
    """Functions compute on all devices, while programs on all devices wait for their results."""
    rounds = int(sys.argv[3])
    fun = colocated_python(lambda x: x + 1)
    step = jax.jit(lambda y: y * 2)
    x = array()
    stated = fun.specialize(out_specs_fn=same)
    for call in (fun, stated):
        for _ in range(rounds):
            z = step(call(x))
        np.testing.assert_array_equal(z, np.full(N, 4))
    y = x
    for _ in range(rounds // 3):
        y = step(call(y))
        y = call(y) - y
    np.testing.assert_array_equal(y, np.ones(N))


def late_programs():
    """Functions start programs on all devices long after they were called."""
    seconds = 0.2
    x = array()
    step = jax.jit(lambda y: y * 2)
    step(x)

    def sleep(x):
        time.sleep(seconds)
        return x + 1

    def spin(x):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return x + 1

    asleep, spinning = colocated_python(sleep), colocated_python(spin)
    asleep(x)
    stated = spinning.specialize(out_specs_fn=same)  # it has never run
    inner = colocated_python(sleep)
    outer = colocated_python(lambda x: inner(x))
    outer(x)
    # What was seen of a function is so for other arguments, and for more said about it.
    few = asleep.specialize(out_specs_fn=same)
    for fun in (asleep, stated, outer, few):
        for _ in range(2):
            np.testing.assert_array_equal(step(fun(x)), np.full(N, 4))


def no_room():
    """Without a thread of XLA to spare, calls are synchronous; it is said once."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("spmd").addHandler(handler)
    assert _lanes.most_gates() <= 0
    ended = []

    def add(x):
        ended.append(1)
        return jax.device_put(np.asarray(x) + 1, x.sharding)

    fun = colocated_python(add).specialize(out_specs_fn=same)
    for i in range(3):
        y = fun(array())
        assert len(ended) == i + 1
        np.testing.assert_array_equal(y, np.full(N, 2))
    assert [r.getMessage()[:50] for r in records] == [
        "spmd.colocated_python: calls are synchronous in th"
    ]


def no_asynchronous_dispatch():
    """Where programs of the CPU run in their caller, none can wait for a function."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    no_room()


def exits():
    """What is pending at the end of the process still runs, and programs for no call end."""
    import atexit

    go = threading.Event()
    atexit.register(lambda: print("left:", len(_promises._promises), flush=True))
    _lanes._KEPT = LONG
    colocated_python(lambda x: x).specialize(out_specs_fn=same)(array()).block_until_ready()

    def note(x):
        assert go.wait(LONG)
        print("noted", int(x[0]), flush=True)

    fun = colocated_python(note).specialize(out_specs_fn=lambda x: None)
    for i in range(3):
        fun(array(np.full(N, i, np.int32)))
    atexit.register(go.set)
    print("end of the program", flush=True)


def fork():
    """A child has no calls of its parent, and makes its own threads."""
    go = threading.Event()

    def wait(x):
        go.wait(LONG)

    colocated_python(wait).specialize(out_specs_fn=lambda x: None)(array())
    warnings.simplefilter("ignore")
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert status == 0
        go.set()
        barrier()
    else:
        done = []
        barrier()
        fun = colocated_python(lambda: done.append(1))
        lane = _lanes.lanes.enter()
        lane.run(lambda: (fun._fun(), _lanes.lanes.leave(lane)))
        barrier()
        os._exit(0 if done == [1] else 1)


def interrupts():
    """An interrupt of who waits for a first call leaves the function usable."""
    import signal

    # Who starts a process in the background may have told it to ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began, go = threading.Event(), threading.Event()

    def slow(x):
        began.set()
        assert go.wait(LONG)
        return x

    def interrupt():
        began.wait(LONG)
        time.sleep(0.2)  # until the main thread waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    fun = colocated_python(slow)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        fun(array())
    go.set()
    np.testing.assert_array_equal(fun(array()), np.ones(N))
    barrier()


def processes():
    """Each process runs the function on its own shards; here is one of two."""
    port, number = sys.argv[3:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    values = np.arange(8, dtype=np.float32)
    sharding = array().sharding

    def make(values):
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    x = make(values)
    seen = []

    def add(x):
        seen.append([float(s.data[0]) for s in x.addressable_shards])
        parts = {str(s.index): np.asarray(s.data) + 1 for s in x.addressable_shards}
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: parts[str(index)])

    fun = colocated_python(add)
    stated = fun.specialize(out_specs_fn=same)
    for y in (fun(x), fun(x), stated(x)):
        assert y.sharding == x.sharding
        total = jax.jit(lambda y: (y * y).sum(), out_shardings=None)(y)
        assert float(total) == float(((values + 1) ** 2).sum())
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(shard.data, values[shard.index] + 1)
    assert seen == [[4.0 * int(number) + i for i in range(4)]] * 3
    there = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",)), P("x")
    )
    z = jax.make_array_from_callback((4,), there, lambda index: values[:4][index], dtype="float32")
    moved = stated(z)
    assert len(moved.addressable_shards) == (4 if number == "0" else 0)
    barrier()
    assert len(seen) == (4 if number == "0" else 3)
    if number == "1":
        with pytest.raises(ValueError, match=r"^colocated_python of `add` does not run in this "):
            fun(z)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(int(sys.argv[2]), exit=True)
    warnings.simplefilter("error")
    globals()[sys.argv[1]]()
    print("passed", flush=True)
