"""The host's side: one queue and one thread per device that run host functions in order.

A program hands its operands over and goes on; it waits only where the queue is full, and where it
needs a result. Waiting is XLA's own: no thread of the runtime is ever blocked in here.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable
import contextlib
from dataclasses import dataclass
import logging
import os
import queue
import threading
import time
import traceback
from typing import Any

from spmd import _jax
from spmd.errors import Failure, OptionError, SpmdError, explain
from spmd.host_callback._ffi import bury
from spmd.host_callback._pools import LARGE, recycle, release, threads

logger = logging.getLogger(__name__)

_QUEUE = "SPMD_HOST_CALLBACK_MAX_QUEUE_BYTES"
_INLINE = "SPMD_HOST_CALLBACK_INLINE"
_TRUTH = {"1": True, "true": True, "yes": True, "on": True}
_TRUTH |= {"": False, "0": False, "false": False, "no": False, "off": False}

#: Seconds that a thread lets taps gather after the first: it and the device would interrupt one
#: another for each of them otherwise.
_GATHER = 0.0002


@dataclass(slots=True)
class _Options:
    max_queue_bytes: float = 0.0
    inline: bool = False


#: As :func:`configure` has set them.
options = _Options()


def _queue_bytes(value: object, given: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type] - what is no number is told below
    except (TypeError, ValueError):
        number = -1.0
    if not number > 0:
        raise _cannot_set("max_queue_bytes", given, "a positive number of bytes")
    return number


def _cannot_set(name: str, given: str, expected: str) -> SpmdError:
    failure = Failure(what=f"cannot set {name}", given=given, expected=expected, error=OptionError)
    return explain("host_callback", [failure])


def configure(max_queue_bytes: float | None = None, inline: bool | None = None) -> None:
    """Sets how taps are delivered, for the whole process; what is not given is its default again.

    Args:
        max_queue_bytes: How many bytes of operands may wait for host functions, over all devices.
            A program pauses where one more does not fit, and nothing is lost; an operand larger
            than that passes alone. By default 256e6, or what the environment variable
            `SPMD_HOST_CALLBACK_MAX_QUEUE_BYTES` says.
        inline: Whether eager calls run the host function in the caller's own thread, where a
            debugger sees the caller's stack. Calls inside of a traced function stay as they are.
            By default False, or what `SPMD_HOST_CALLBACK_INLINE` says.

    Raises:
        ValueError: `max_queue_bytes` is no positive number, or `inline` neither True nor False.
    """
    text = os.environ.get(_QUEUE)
    size = _queue_bytes(text, f"{_QUEUE}={text}") if text else 256e6
    text = os.environ.get(_INLINE, "")
    if text.lower() not in _TRUTH:
        raise _cannot_set("inline", f"{_INLINE}={text}", "1 or 0, true or false")
    if max_queue_bytes is not None:
        size = _queue_bytes(max_queue_bytes, f"configure(max_queue_bytes={max_queue_bytes!r})")
    if inline not in (None, True, False):
        raise _cannot_set("inline", f"configure(inline={inline!r})", "True or False")
    options.max_queue_bytes = size
    options.inline = _TRUTH[text.lower()] if inline is None else bool(inline)


configure()


class CallbackException(SpmdError, RuntimeError):  # noqa: N818 - the name that users' code has
    """Host functions raised; the last error is the cause.

    Raised by :func:`barrier_wait`, once for all errors since the last time.
    """

    __module__ = "spmd.host_callback"


class Item:
    """One call of a host function that is due on one device.

    Attributes:
        size: Bytes in the queue.
        urgent: Whether the device waits for the result.
        number: How many came from this device before.
        operands: Values of its own; None while they are in the memory of the device.
        resume: Lets the device go on that waits for a place in the queue.
        done: Whether the host function has returned or raised.
    """

    # One is made per call on a device: what most of them never set costs nothing here.
    device: Any
    size = 0
    urgent = False
    number = -1
    operands: Any = None
    resume: Callable[[], None] | None = None
    turn: Any = None
    done = False

    def may_wait(self) -> bool:
        """Whether nobody waits for it: neither a device, nor others for the memory that it has."""
        return not self.urgent and self.size < LARGE

    def read(self) -> Any:
        """Copies the operands out of the memory of the device."""
        raise NotImplementedError

    def run(self) -> None:
        """Calls the host function; raises nothing."""
        raise NotImplementedError

    def fetch(self) -> None:
        """Takes the operands in, once, and lets the device go on that waited for that."""
        with self.turn:
            resume, self.resume = self.resume, None
            if resume is not None:
                try:
                    self.operands = self.read()
                finally:
                    threads.run(resume)


class _Consumer:
    """The queue of one device, and the thread that works through it."""

    def __init__(self, receiver: Receiver, device: Any):
        self.device = device
        self.items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self.pending: deque[Item] = deque()
        self.received = 0
        self.barriers = 0
        #: Whether the host function that runs has started a program, which it may wait for.
        self.started_program = False
        self._receiver = receiver
        self.start_thread()

    def start_thread(self) -> None:
        """Starts a thread; the one before, if there is one, ends with the call that it is in."""
        name = f"spmd.host_callback {self.device}"
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        _here.consumer = self
        me = threading.current_thread()
        while self.thread is me:
            try:
                item = self.items.get_nowait()
            except queue.Empty:
                item = self.items.get()
                if item is not None and item.may_wait() and self.items.empty():
                    time.sleep(_GATHER)
            if item is None:
                return
            self._receiver.process(self, item)
            if self.thread is me:
                self.started_program = False
            del item  # the last host function is not kept until the next one comes

    def has_run(self, count: int) -> bool:
        """Whether the first `count` calls have ended."""
        return not self.pending or self.pending[0].number >= count


_here = threading.local()


def _consumer_here() -> _Consumer | None:
    """The queue whose host function runs in this thread."""
    return getattr(_here, "consumer", None)


class Receiver:
    """The queues of all devices, the errors, and who waits for them.

    Attributes:
        calls_used: Whether a program was made that waits for results of the host: it may fail.
    """

    def __init__(self) -> None:
        self.calls_used = False
        self._running: deque[Any] = deque()
        self._governs = False
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._consumers: dict[Any, _Consumer] = {}
        self._bytes = 0
        self._paused: deque[Item] = deque()
        # How many errors there were, and the last one: each keeps its frames, and so operands.
        self._errors = 0
        self._last_error: tuple[BaseException, str] | None = None
        # What those who wait wait for.
        self._awaited: list[Callable[[], bool]] = []

    def prepare(self) -> None:
        """Takes tokens over; called before the first program with a host function is made."""
        with self._lock:
            if self._governs:
                return
            self._governs = True
        self._running = _jax.host.govern_tokens(self._program_starts, lambda: self.calls_used)
        # Registered later than JAX's own handler and so called before it, which would wait for
        # programs that wait for a thread of ours.
        atexit.register(self._exit)
        os.register_at_fork(after_in_child=self._after_fork)

    def _program_starts(self) -> None:
        consumer = _consumer_here()
        if consumer is not None and consumer.thread is threading.current_thread():
            consumer.started_program = True
        with self._lock:
            while self._running and self._running[0].is_ready():
                self._running.popleft()

    # What programs do

    def submit(self, item: Item, suspend: Callable[[], Any]) -> None:
        """Takes a call on; where the queue is full the program is suspended until it has room."""
        with self._lock:
            consumer = self._consumers.get(item.device)
            if consumer is None:
                consumer = self._consumers[item.device] = _Consumer(self, item.device)
            item.number = consumer.received
            consumer.received += 1
            consumer.pending.append(item)
            fits = item.urgent or not self._bytes
            fits = fits or self._bytes + item.size <= options.max_queue_bytes
            if fits:
                self._bytes += item.size
            else:
                item.turn = threading.Lock()
                item.resume = suspend().set_available
                self._paused.append(item)
            if consumer.started_program and (item.urgent or not fits):
                # The host function may wait for the program that now waits for this queue.
                consumer.started_program = False
                consumer.start_thread()
        try:
            if fits and not item.urgent:
                item.operands = item.read()
        finally:  # there may be no memory for it; then the program fails, and nothing waits
            consumer.items.put(item)

    # What the threads do

    def process(self, consumer: _Consumer, item: Item) -> None:
        """Runs one call, and lets those go on who waited for it."""
        try:
            if item.turn is not None:
                # Its turn has come, however full the queue is.
                with self._lock:
                    if item in self._paused:
                        self._paused.remove(item)
                        self._bytes += item.size
                item.fetch()
            if item.urgent or item.operands is not None:
                item.run()
        except BaseException as error:  # whatever it is, the queue goes on
            self.failed(error, "A host callback")
        operands, item.operands = item.operands, None
        if operands:
            recycle(operands)
        with self._lock:
            item.done = True
            self._bytes -= item.size
            while consumer.pending and consumer.pending[0].done:
                consumer.pending.popleft()
            admitted = self._admit() if self._paused else ()
            self._tell_who_waits()
        for other in admitted:
            try:
                other.fetch()
            except BaseException as error:  # as above
                self.failed(error, "A host callback")

    def _tell_who_waits(self) -> None:
        # Woken for nothing they would take the interpreter from those that they wait for.
        if any(ended() for ended in self._awaited):
            self._ended.notify_all()

    def _admit(self) -> list[Item]:
        admitted = []
        while self._paused:
            size = self._paused[0].size
            if self._bytes and self._bytes + size > options.max_queue_bytes:
                break
            self._bytes += size
            admitted.append(self._paused.popleft())
        return admitted

    def failed(self, error: BaseException, what: str) -> None:
        """Records that a host function raised."""
        text = "".join(traceback.format_exception(error))
        with self._lock:
            self._errors += 1
            self._last_error = error, text
        with contextlib.suppress(Exception):  # a handler of the log must not end this thread
            logger.error("%s raised an exception:\n%s", what, text)

    # What users do

    def wait(self, name: str = "") -> None:
        """Waits for the calls of all programs that were started, on all devices."""
        logger.debug("barrier_wait[%s]: start", name)
        bury()
        me = _consumer_here()
        if me is None:
            for token in [*self._running]:
                _jax.host.ended_well(token)
        with self._lock:
            counts = [(c, c.received) for c in self._consumers.values() if c is not me]
            if me is not None:
                me.barriers += 1
                self._tell_who_waits()

            def ended() -> bool:
                # Two host functions that wait for one another's queue both go on.
                return all(c.has_run(n) or (me is not None and c.barriers > 0) for c, n in counts)

            self._awaited.append(ended)
            try:
                self._ended.wait_for(ended)
            finally:
                self._awaited.remove(ended)
                if me is not None:
                    me.barriers -= 1
        logger.debug("barrier_wait[%s]: done", name)

    def take_errors(self) -> tuple[int, tuple[BaseException, str] | None]:
        """Returns how many errors there were since the last time, and the last with its text."""
        with self._lock:
            found = self._errors, self._last_error
            self._errors, self._last_error = 0, None
        return found

    def stop(self) -> None:
        """Waits, and ends the threads; the next call starts new ones."""
        if _consumer_here() is not None:
            failure = Failure(
                what="cannot stop the thread that calls it",
                expected="a call from outside of host functions",
                fix="call it where the program is started",
                error=OptionError,
            )
            raise explain("stop_outfeed_receiver", [failure])
        while True:
            self.wait("stop")
            with self._lock:
                if not any(c.pending for c in self._consumers.values()):
                    stopped = [*self._consumers.values()]
                    self._consumers = {}
                    break
        release()
        for consumer in stopped:
            consumer.items.put(None)
            consumer.thread.join()

    def _exit(self) -> None:
        # Host functions may start programs, whose host functions may start more.
        for _ in range(1000):
            self.wait("exit")
            with self._lock:
                pending = any(c.pending for c in self._consumers.values())
                if not pending and all(token.is_ready() for token in self._running):
                    break
        _jax.host.drop_failed_tokens()

    def _after_fork(self) -> None:
        # The threads stay with the parent, and so does what they have to do.
        self._forget()
        self._running.clear()
        threads.forget()
        _jax.host.forget_tokens()
        _here.consumer = None


receiver = Receiver()
