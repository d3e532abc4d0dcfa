"""Who runs calls, and in which order: one lane per calling thread that has calls in flight.

A lane has two threads. One runs the host functions, one after the other. The other starts the
programs that wait for them: XLA runs the programs that one thread starts on one device in order,
so started by the caller they would hold up its next programs.

To start programs takes longer than all else in a call. So a lane with no other calls starts those
of further ones like its last one: its *spares*. The next calls take them, or else they are given
up: at the latest when no call has come for a second, or when others need their place.
"""

from __future__ import annotations

import atexit
from collections import Counter, deque
from collections.abc import Callable, Iterator
import functools
import logging
import os
import queue
import threading
from typing import Any

import jax

from spmd import _jax
from spmd.colocated_python._promises import Outputs, Plan, Start, all_arrived, settings
from spmd.colocated_python._specs import ColocatedPythonError, host, subject
from spmd.errors import Failure, explain

logger = logging.getLogger(__name__)

#: XLA lets 32 programs wait for a device and blocks who starts another one: some are for others.
_MOST = 24

#: Seconds that the end of the process waits for XLA to run programs whose values are there.
_PATIENCE = 10.0

#: How many calls a lane prepares: so many in a row return at once.
_SPARES = 2

#: Seconds that they are kept: who waits for all live arrays of the process waits for them, too.
_KEPT = 1.0

_here = threading.local()


class Lane:
    """Two threads, for one calling thread at a time.

    Attributes:
        owner: The calling thread that has calls in flight here.
        pending: How many.
        gates: On which devices programs of them wait, and how many.
        entered: How many calls there ever were.
        left: How many of them are over.
        spares: Programs for further calls.
        run: Runs something after the calls before it; it does not raise.
        start: Runs something in the thread that starts programs; it does not raise.
        worker: The thread that runs host functions.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.owner: Any = None
        self.spares: deque[Start] = deque()
        self.pending = 0
        self.gates: Counter[Any] = Counter()
        self.entered = 0
        self.left = 0
        self._lanes = lanes
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._starts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.run, self.start = self._calls.put, self._starts.put
        self._threads = [
            threading.Thread(target=work, name=f"spmd.colocated_python {name}", daemon=True)
            for name, work in (("run", self._run), ("start", self._start))
        ]
        for thread in self._threads:
            thread.start()
        self.worker = self._threads[0]

    def stop(self) -> None:
        """Ends the threads, which have nothing to do."""
        self._calls.put(None)
        self._starts.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        _here.lane_of_worker = self
        while (call := self._next()) is not None:
            call()
            del call  # what it holds lives no longer than it

    def _next(self) -> Callable[[], None] | None:
        if self.spares:
            try:
                return self._calls.get(timeout=_KEPT)
            except queue.Empty:
                self._lanes.give_up(self)
        return self._calls.get()

    def _start(self) -> None:
        with settings():
            while (task := self._starts.get()) is not None:
                task()
                del task


class Lanes:
    """All lanes of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._idle: list[Lane] = []
        self._all: list[Lane] = []
        self._load: Counter[Any] = Counter()
        self._errors: list[tuple[str, BaseException]] = []
        self._prepared = False

    def enter(self) -> Lane:
        """Returns the lane of the calling thread, with one more call in flight."""
        owner = _owner()
        with self._changed:
            lane: Lane | None = getattr(_here, "lane", None)
            if lane is None or lane.owner is not owner:
                lane = self._idle_lane(lane)
                lane.owner, _here.lane = owner, lane
            lane.pending += 1
            lane.entered += 1
            return lane

    def _idle_lane(self, last: Lane | None) -> Lane:
        """Returns the lane that a thread had last, or another one, or a new one."""
        if last in self._idle:
            self._idle.remove(last)
            return last
        return self._idle.pop() if self._idle else self._new()

    def _new(self) -> Lane:
        if not self._prepared:
            self._prepared = True
            atexit.register(self._exit)
        lane = Lane(self)
        self._all.append(lane)
        return lane

    def leave(self, lane: Lane, start: Start | None = None) -> None:
        """A call is over."""
        with self._changed:
            lane.pending -= 1
            lane.left += 1
            if start is not None:
                self._free(lane, start.plan)
                if not lane.pending:
                    self._prepare(lane, start)
            if not lane.pending:
                lane.owner = None
                self._idle.append(lane)
            self._changed.notify_all()

    # Programs that wait, and room for them

    def start(self, lane: Lane, outputs: Outputs) -> Start | None:
        """Starts the programs of a call, once there is room for them beside those of this thread.

        Returns None where there is none: the call has to be over before its programs start.
        """
        with self._changed:
            if lane.spares:
                if lane.spares[0].outputs is outputs:
                    return lane.spares.popleft()
                self._give_up(lane)  # what is started after them would wait for them
            while True:
                plan = self._plan(lane, outputs)
                if plan is not None:
                    return self._begin(lane, outputs, plan)
                if self._give_up_all():
                    continue
                if not lane.gates:
                    return None
                self._changed.wait()

    def _begin(self, lane: Lane, outputs: Outputs, plan: Plan) -> Start:
        lane.gates[plan.gate] += 1
        self._load.update(plan.devices)
        start = Start(outputs, plan)
        lane.start(start.begin)
        return start

    def prepare(self, lane: Lane, last: Start) -> None:
        """Starts programs like these, unless more calls are in flight."""
        with self._changed:
            if lane.pending == 1:
                self._prepare(lane, last)

    def _prepare(self, lane: Lane, last: Start) -> None:
        busy = any(self._load[d] + _SPARES > _MOST for d in last.plan.devices)
        if last.error is None and last.plan.small and not busy:
            while len(lane.spares) < _SPARES:
                lane.spares.append(self._begin(lane, last.outputs, last.plan))

    def give_up(self, lane: Lane) -> None:
        """Gives up the spares of a lane."""
        with self._changed:
            self._give_up(lane)

    def _give_up_all(self) -> bool:
        """Gives up all spares; returns whether there were any."""
        return sum(self._give_up(lane) for lane in self._all) > 0

    def _give_up(self, lane: Lane) -> bool:
        spares = [*lane.spares]
        lane.spares.clear()
        for spare in spares:
            self._free(lane, spare.plan)
            lane.start(spare.give_up)
        return bool(spares)

    def _plan(self, lane: Lane, outputs: Outputs) -> Plan | None:
        for device in self._candidates(lane, outputs.home):
            plan = outputs.plan(device)
            if all(self._load[d] < _MOST for d in plan.devices):
                return plan
        return None

    def _candidates(self, lane: Lane, home: Any) -> Iterator[Any]:
        """Devices for a gate: those where the lane has one do not cost another thread of XLA."""
        if home in lane.gates or (not lane.gates and not self._load[home] and self._has_room()):
            yield home
        yield from [d for d in lane.gates if d != home]
        if self._has_room():
            # By what may come: a lane that has begun on a device keeps to it, whatever it starts.
            gates = Counter(d for lane in self._all for d in lane.gates)
            others = [home, *jax.local_devices(backend="cpu")]
            yield from sorted(others, key=lambda d: (gates[d], self._load[d]))

    def _has_room(self) -> bool:
        return sum(len(lane.gates) for lane in self._all) < most_gates()

    def _free(self, lane: Lane, plan: Plan) -> None:
        lane.gates[plan.gate] -= 1
        if not lane.gates[plan.gate]:
            del lane.gates[plan.gate]
        self._load.subtract(plan.devices)

    # Waiting

    def wait(self) -> None:
        """Waits for the calls so far: inside of a host function, for those that it made."""
        mine = _owner() if inside() else None
        with self._changed:
            lanes = [x for x in self._all if mine is None or x.owner is mine]
            counts = [(lane, lane.entered) for lane in lanes]
            self._changed.wait_for(lambda: all(lane.left >= n for lane, n in counts))

    def failed(self, name: str, error: BaseException) -> None:
        """Keeps the error of a call that has no arrays to tell it."""
        with self._changed:
            self._errors.append((name, error))
        logger.error("%s failed", subject(name), exc_info=error)

    def raise_errors(self) -> None:
        """Raises what was kept, once."""
        with self._changed:
            errors, self._errors = self._errors, []
        if errors:
            failures = [
                Failure(
                    what=f"failed on {host()}: {type(e).__name__}: {e}".rstrip("."),
                    error=ColocatedPythonError,
                )
                for _, e in errors
            ]
            raise explain(subject(errors[0][0]), failures) from errors[0][1]

    def _exit(self) -> None:
        """Leaves no thread in C++ that asks for an interpreter which is gone: Python aborts."""
        self.wait()
        with self._changed:
            self._give_up_all()
        all_arrived(_PATIENCE)
        with self._changed:
            idle, self._idle, self._all = self._idle, [], []
        for lane in idle:
            lane.stop()

    def forget(self) -> None:
        """Drops what a forked process does not have."""
        self.__init__()
        _here.__dict__.clear()


def _owner() -> Any:
    """What stands for this thread."""
    try:
        return _here.owner
    except AttributeError:
        _here.owner = object()
        return _here.owner


def inside() -> bool:
    """Whether this thread runs host functions."""
    return hasattr(_here, "lane_of_worker")


def most_gates() -> int:
    """How many programs may wait at a time: each holds a thread of XLA, and all devices need one.

    Only the first of a lane on a device waits in there; those behind it have not started.
    """
    return _spare_threads() if _jax.dispatch.asynchronous_cpu() else 0


@functools.lru_cache(maxsize=1)
def _spare_threads() -> int:
    """How many threads XLA has beyond those for one program on all devices."""
    devices = jax.local_device_count("cpu")
    cores = int(os.environ.get("NPROC") or len(os.sched_getaffinity(0)))
    return max(cores, devices) - devices


_jax.core.register_cache(_spare_threads, "threads of XLA")


lanes = Lanes()
os.register_at_fork(after_in_child=lanes.forget)
