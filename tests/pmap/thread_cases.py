"""Cases of `spmd.pmap` in threads: ``thread_cases.py CASE LIMIT [ARGUMENT...]``."""

import contextlib
import faulthandler
import functools
import itertools
import os
import signal
import sys
import threading
import warnings

import jax
from jax import lax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np
from thread_tools import (
    COMPILED,
    LONG,
    LOWERED,
    N,
    X,
    at_event,
    collect,
    free,
    in_threads,
    live,
    main,
    same,
    settled,
    until,
    waiting,
    work_of,
)

import spmd
from spmd import _dispatch, _jax, _lower, _starting, host_callback as hcb, pmap
from spmd._pmap import _api, _threads


def shared():
    """Eight threads call one function."""
    fun = pmap(lambda x: x / lax.psum(x, "i"), "i")

    def work(i):
        x = X + i + 1
        for _ in range(200):
            same(fun(x), x / x.sum())

    before = spmd.counts()
    found = in_threads([functools.partial(work, i) for i in range(8)])
    assert found == [None] * 8, found
    assert work_of(spmd.counts() - before) == (1, 1)
    settled(fun, 1)


def one_compile():
    """Seven wait for the trace of the eighth, and for its compile."""
    progress = []

    def fun(x):
        until(lambda: waiting() == 7)  # and the interpreter goes on meanwhile
        progress.append("traced")
        return x * 2 + lax.axis_index("i").astype(x.dtype)

    mapped = pmap(fun, "i")

    def lowered():
        until(lambda: waiting() == 7)
        progress.append("compiles")

    before = spmd.counts()
    with at_event(LOWERED, lowered):
        found = in_threads([lambda: mapped(X)] * 8)
    for out in found:
        same(out, X * 2 + np.arange(N))
    assert progress == ["traced", "compiles"]
    assert work_of(spmd.counts() - before) == (1, 1)
    settled(mapped, 1)


class Step:
    """Two threads that are in it wait for one another, and for what a third does meanwhile."""

    def __init__(self):
        self._all = threading.Barrier(3)
        self._done = threading.Event()

    def meet(self):
        """What the two call."""
        self._all.wait(LONG)
        assert self._done.wait(LONG)

    @contextlib.contextmanager
    def meanwhile(self):
        """What the third does: both are in the step until its end."""
        self._all.wait(LONG)
        yield
        self._done.set()


def at_once():
    """Two signatures are traced, and compiled, at the same time; calls go on meanwhile."""
    tracing, compiling = Step(), Step()
    makers = set()
    ready = pmap(lambda x: x + lax.psum(x, "i"), "i")
    mapped = pmap(lambda x: (tracing.meet() if x.ndim else None, x * 3)[1])

    def calls():
        for _ in range(10):
            same(mapped(X), X * 3)  # the same function, which is in a miss
            same(ready(X), X + X.sum())
            same(ready(jnp.asarray(X)), X + X.sum())

    def third():
        with tracing.meanwhile():
            calls()
            same(pmap(lambda x: x - 1)(X), X - 1)  # compiles
        with compiling.meanwhile():
            calls()

    def maker(x):
        makers.add(threading.get_ident())
        return mapped(x)

    calls()
    rows = [np.ones((N, k), np.float32) for k in (1, 2)]
    works = [*(functools.partial(maker, x) for x in rows), third]
    compiled = lambda: threading.get_ident() in makers and compiling.meet()  # noqa: E731 - one expression
    with at_event(COMPILED, compiled):
        *outs, error = in_threads(works)
    assert error is None, error
    for out, x in zip(outs, rows, strict=True):
        same(out, x * 3)
    settled(mapped, 3)


def failures():
    """Who waits gets the error of the trace or compile, and the next call begins anew."""
    seven = lambda: until(lambda: waiting() == 7)  # noqa: E731 - one expression
    fails = True

    def fun(x):
        if fails:
            seven()
            raise ValueError("not yet")
        return x * 2

    mapped = pmap(fun)
    found = in_threads([lambda: mapped(X)] * 8)
    assert {(type(e), str(e)) for e in found} == {(ValueError, "not yet")}
    settled(mapped, 0)
    fails = False
    same(mapped(X), X * 2)
    settled(mapped, 1)

    def unknown(x):
        if not fails:
            return x * 2
        return jax.ffi.ffi_call("spmd_no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    fails, mapped = True, pmap(unknown)
    with at_event(LOWERED, seven):
        found = in_threads([lambda: mapped(X)] * 8)
    assert len({str(e) for e in found}) == 1
    assert all("spmd_no_such_target" in str(e) for e in found), found[0]
    assert (mapped._cache_size, mapped._line.programs._making) == (0, {})
    fails = False
    mapped.clear_cache()
    same(mapped(X), X * 2)
    settled(mapped, 1)
    free()


def interrupted_maker():
    """An interrupt reaches the thread that traces; one of those that wait traces anew."""
    traced = []

    def fun(x):
        traced.append(threading.get_ident())
        if len(traced) == 1:
            until(lambda: waiting() == 7)
            raise KeyboardInterrupt
        return x * 2

    mapped = pmap(fun)
    found = in_threads([lambda: mapped(X)] * 8)
    (interrupt,) = (f for f in found if isinstance(f, BaseException))
    assert type(interrupt) is KeyboardInterrupt
    for out in found:
        if out is not interrupt:
            same(out, X * 2)
    assert len(set(traced)) == len(traced) == 2
    settled(mapped, 1)
    free()


def interrupt(thread, until_set):
    """Interrupts a thread until it says so: a signal just before it waits does not end the wait."""
    for _ in range(LONG):
        signal.pthread_kill(thread, signal.SIGINT)
        if until_set.wait(1):
            return


def interrupted_waiter():
    """The main thread waits for another one's trace, or for its start, and is interrupted."""
    release = threading.Event()
    main = threading.main_thread().ident

    def fun(x):
        until(lambda: waiting() == 1)
        interrupt(main, release)
        assert release.wait(LONG)
        return x * 2

    mapped, found = pmap(fun), []
    maker = threading.Thread(target=lambda: found.append(mapped(X)))
    maker.start()
    until(lambda: mapped._line.bindings._making)
    try:
        mapped(X)
    except KeyboardInterrupt:
        release.set()
        found.append("interrupted")
    free()
    maker.join()
    assert found[0] == "interrupted"
    same(found[1], X * 2)
    settled(mapped, 1)

    taken, give_back = threading.Event(), threading.Event()

    def hold():
        with _starting.starting:
            taken.set()
            until(lambda: sys._current_frames()[main].f_code.co_filename == _threads.__file__)
            interrupt(main, give_back)
            assert give_back.wait(LONG)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(LONG)
    try:
        mapped(X)
    except KeyboardInterrupt:
        give_back.set()
    assert give_back.is_set()
    holder.join()
    free()
    same(mapped(X), X * 2)


def tracers():
    """Calls with tracers trace once and make no program, beside calls that do."""
    traced_shapes = []

    def square(x):
        traced_shapes.append(x.shape)
        return x * x

    fun = pmap(square)
    rows = np.ones((3, N), np.float32)

    def traced():
        for _ in range(3):
            jax.make_jaxpr(fun)(X)
            assert jax.eval_shape(jax.vmap(fun), rows).shape == rows.shape
            jax.make_jaxpr(jax.grad(lambda x: fun(x).sum()))(X)
            out, tangent = jax.jvp(fun, (X,), (X,))
            same(out, X * X)
            same(tangent, 2 * X * X)

    def concrete():
        for _ in range(50):
            same(fun(X), X * X)

    before = in_threads([traced] * 2)
    assert before == [None] * 2, before
    settled(fun, 0, bindings=1)
    found = in_threads([traced] * 2 + [concrete] * 4)
    assert found == [None] * 6, found
    settled(fun, 1)
    assert traced_shapes == [()], traced_shapes


def itself():
    """A function calls itself and others from its hooks, its trace and host functions."""
    other = pmap(lambda x: x - 1)
    fun, told = pmap(lambda x: x * 2), threading.local()

    def hook(function, args, kwargs, outputs):
        (x,) = args
        if x.ndim < 4:
            same(function(x[:, None]), x[:, None] * 2)
            same(other(outputs), x * 2 - 1)
        told.depth = max(getattr(told, "depth", 0), x.ndim)

    fun.add_post_hook(hook)

    def call():
        for _ in range(5):
            same(fun(X), X * 2)
        return told.depth

    assert in_threads([call] * 8) == [4] * 8
    settled(fun, 4)
    settled(other, 3)

    half = X[: N // 2]
    two = np.arange(2, dtype=np.int32)

    def inside(x):
        if x.dtype == np.int32:
            return x.astype(np.float32) * 3
        return x + nested(two).sum() + doubled(two.astype(np.float32))[1]

    nested, doubled = pmap(inside), pmap(lambda x: x * 2)
    for out in in_threads([lambda: nested(half)] * 4):
        same(out, half + 3 + 2)
    settled(nested, 1)
    settled(doubled, 0)


def from_taps():
    """A host function of a tap runs mapped functions, whose thread calls others meanwhile."""
    inner = pmap(lambda x: x + 1)
    seen = []

    def host(x, transforms):
        seen.append(inner(np.asarray(x).reshape(1)).item())

    fun = pmap(lambda x: hcb.id_tap(host, x * 2))

    def call(size):
        for _ in range(5):
            same(fun(X[:size]), X[:size] * 2)

    found = in_threads([functools.partial(call, size) for size in (1, N, 1, N)])
    assert found == [None] * 4, found
    hcb.barrier_wait()
    assert sorted(seen) == sorted([1.0] * 10 + [*(X * 2 + 1)] * 10)
    settled(inner, 1)


def from_calls(way, size):
    """A program waits for its host function, which runs a mapped function for the first time."""
    kind = jax.ShapeDtypeStruct((), np.float32)
    new = [pmap(lambda x, k=k: x + k) for k in range(3)]

    def host(x):
        return np.asarray(sum(f(np.asarray(x).reshape(1)) for f in new))[0]

    def one(x):
        if way == "call":
            return hcb.call(host, x, result_shape=kind)
        return io_callback(host, kind, x)

    fun, x = pmap(one), X[: int(size)]
    found = in_threads([lambda: np.asarray(fun(x))] * 3)
    for out in found:
        same(out, 3 * x + 3)
    settled(fun, 1)
    same(fun(x), 3 * x + 3)  # from the thread that is alone, too
    free()


def inline_and_waiting():
    """A host function that runs in the caller's thread compiles, and another thread calls."""
    inside, other = threading.Event(), pmap(lambda x: x + 1)
    begun = []

    def host(x):
        inside.set()
        until(lambda: begun)
        return np.asarray(other(np.asarray(x).reshape(1)))[0]

    fun = pmap(lambda x: io_callback(host, jax.ShapeDtypeStruct((), np.float32), x))

    def second():
        assert inside.wait(LONG)
        begun.append(True)
        return np.asarray(fun(X[:1]))

    for out in in_threads([lambda: np.asarray(fun(X[:1])), second]):
        same(out, X[:1] + 1)
    settled(fun, 1)


def made_and_forgotten():
    """Threads make functions while another one clears all caches."""
    stop = threading.Event()

    def make():
        made = 0
        while not made or not stop.is_set():
            made += len([pmap(lambda x: x) for _ in range(20)])
        return made

    def clear():
        try:
            for _ in range(500):
                _api._clearer.cache_clear()
        finally:
            stop.set()

    sys.setswitchinterval(1e-5)
    cleared, *made = in_threads([clear, make, make])
    assert cleared is None, cleared
    assert all(made), made
    collect()
    assert len(_api._lines) == 0


def rounds(count):
    """Threads make, call and drop functions; nothing stays."""

    def sizes():
        caches = [_dispatch._prepare, _lower._compile, _dispatch._repeater]
        caches = [c.cache_info().currsize for c in caches]
        return live(), len(_api._lines), *caches, _jax.dispatch._dispatch_cache().size()

    def base(x):
        return x * 2

    def work(i, count):
        for k in range(count):
            mapped = pmap(base)
            mapped.me = mapped
            mapped.add_post_hook(lambda *_, mapped=mapped: mapped)
            if k % 100 == 0:
                same(mapped(X + i), (X + i) * 2)

    def run(count):
        found = in_threads([functools.partial(work, i, count) for i in range(8)])
        assert found == [None] * 8, found
        del found
        return sizes()

    run(1)
    before = run(1)
    assert before[:2] == (0, 0), before
    after = run(int(count) // 8)
    assert after[:2] == before[:2], (before, after)
    assert all(a <= b for a, b in zip(after, before, strict=True)), (before, after)


def fork():
    """A forked child takes the lock that another thread held, and makes what it was making."""
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
    fun = pmap(lambda x: x * 2)
    same(fun(X[:1]), X[:1] * 2)
    held, traced, go = threading.Event(), threading.Event(), threading.Event()

    def hold():
        with _starting.starting:
            held.set()
            assert go.wait(LONG)

    def slow(x):
        if threading.get_ident() == maker.ident:
            traced.set()
            assert go.wait(LONG)
        return x * 3

    unfinished = pmap(slow)
    maker = threading.Thread(target=lambda: unfinished.eval_shape(X))
    holder = threading.Thread(target=hold)
    maker.start()
    assert traced.wait(LONG)
    holder.start()
    assert held.wait(LONG)
    child = os.fork()
    if not child:
        code = 1
        try:
            # Tells and ends it: the thread of `faulthandler` is with the parent.
            faulthandler.register(signal.SIGALRM, chain=True)
            signal.alarm(10)
            assert _starting.starting.acquire(timeout=5), "locked"
            _starting.starting.release()
            assert unfinished.eval_shape(X).shape == (N,)
            code = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    go.set()
    for thread in (holder, maker):
        thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


# Interrupts


def ours(frame):
    """Whether a frame is of a function whose locks an interrupt must not leave behind."""
    code = frame.f_code
    if code.co_filename in (
        _api.__file__,
        _dispatch.__file__,
        _starting.__file__,
        _threads.__file__,
    ):
        return True
    if not code.co_filename.endswith("contextlib.py") or "self" not in code.co_varnames:
        return False
    generator = getattr(frame.f_locals.get("self"), "gen", None)
    return generator is not None and generator.gi_code.co_filename == _dispatch.__file__


def interrupted(at, call):
    """Interrupts a call where it enters the `at`-th function of ours; returns its name, or None."""
    entered = itertools.count(1)
    where = []

    def tracer(frame, event, arg):
        if event == "call" and ours(frame) and next(entered) == at:
            where.append(frame.f_code.co_name)
            raise KeyboardInterrupt

    sys.settrace(tracer)
    try:
        call()
    except KeyboardInterrupt:
        assert where
    finally:
        sys.settrace(None)
    return where[0] if where else None


def everywhere():
    """Wherever a call is interrupted, other threads can call the same function after it."""
    stop = threading.Event()
    idle = threading.Thread(target=stop.wait)  # with which calls take the lock
    idle.start()
    places = []
    for at in itertools.count(1):
        fun = pmap(lambda x: x * 2)
        fun(X[:, None])  # from now on by the dispatcher
        where = interrupted(at, lambda fun=fun: fun(X))
        if where is None:
            break
        places.append(where)
        assert not _starting.starting._is_owned(), (at, where)
        free()
        for out in in_threads([lambda fun=fun: fun(X)] * 2):
            assert not isinstance(out, BaseException), (at, where, out)
            same(out, X * 2)
        settled(fun, 2)
    stop.set()
    idle.join()
    assert {"get", "_miss", "_call", "run", "execute"} <= {*places}, places


if __name__ == "__main__":
    main(globals())
