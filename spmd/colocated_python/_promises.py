"""Arrays that exist at once and are filled later, by programs that wait for a host function.

A program on one CPU device calls a handler of XLA's foreign function interface. The handler takes
the values if they are there, and else suspends the program with a future, which whoever brings the
values completes. So that XLA does not run it in the thread that starts it, which would have to
wait, the program has something to compute as well.

One program of a call, the *gate*, waits for the host function, on one device. What is small goes
into its results and is copied to the other devices. What is large would be copied twice that way: a
further program on its own device waits for a flag of the gate, and takes the values themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
from dataclasses import dataclass
import functools
import itertools
import math
import os
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd import _api, _jax
from spmd.colocated_python._specs import Specs
from spmd.host_callback._ffi import Frame, Future, capsule, execute_handler, write
from spmd.host_callback._registry import carrier

_TARGET = "spmd_colocated_python"

#: Bytes of a shard from which on it is worth a program of its own.
_LARGE = 1 << 20

#: The product of two matrices of this size has eight times the work that XLA runs inline.
_SIZE = 16

_numbers = itertools.count(1)
_promises: dict[int, Promise] = {}


class Promise:
    """The values of one call, which some programs write to their results.

    Attributes:
        number: What the programs know it by.
    """

    def __init__(self, programs: Sequence[tuple[int, ...]]):
        """Keeps which values each of the programs wants, by their places."""
        self.number = next(_numbers)
        self._programs = programs
        self._left = len(programs)
        self._lock = threading.Lock()
        self._values: Sequence[np.ndarray] | None = None
        self._error: str | None = None
        self._settled = False
        self._waiting: list[tuple[Future, int, list[int]]] = []
        _promises[self.number] = self

    def arrive(self, program: int, results: list[int], suspend: Callable[[], Future]) -> Any:
        """A program wants its values; returns the text of an error, or None."""
        with self._lock:
            if not self._settled:
                self._waiting.append((suspend(), program, results))
                return None
        return self._write(program, results)

    def settle(self, values: Sequence[np.ndarray] | None, error: str | None = None) -> None:
        """The values are there, or never will be; with neither nor an error nobody wants them."""
        with self._lock:
            if self._settled:
                return
            self._values, self._error, self._settled = values, error, True
            waiting, self._waiting = self._waiting, []
        for future, program, results in waiting:
            message = self._write(program, results)
            if message is None:
                future.set_available()
            else:
                future.set_error(message)

    def forget(self) -> None:
        """No program of it will come any more."""
        _promises.pop(self.number, None)
        self._values = None

    def _write(self, program: int, results: list[int]) -> str | None:
        if self._error is not None:
            # What depends on this program fails before it gets here.
            self.forget()
            return self._error
        if self._values is not None:
            for place, address in zip(self._programs[program], results, strict=False):
                write(address, self._values[place])
        with self._lock:
            self._left -= 1
            left = self._left
        if not left:
            self.forget()
        return None


# A forked process has no programs of its parent.
os.register_at_fork(after_in_child=_promises.clear)


def all_arrived(seconds: float) -> None:
    """Waits until every program has its values, but for no longer than so many seconds."""
    end = time.monotonic() + seconds
    while _promises and time.monotonic() < end:
        time.sleep(0.001)


# Programs


def _execute(frame: Frame) -> str | None:
    number, program = frame.numbers()
    promise = _promises.get(number)
    if promise is None:
        return "spmd.colocated_python: the call that this program belongs to is over"
    return promise.arrive(program, frame.places(0), frame.suspend)


_handler = execute_handler(_execute)
jax.ffi.register_ffi_target(_TARGET, {"execute": capsule(_handler)}, platform="cpu")


def _numbered(promise: Promise, place: int) -> np.ndarray:
    """What the program at a place of a promise is told."""
    n = promise.number
    return np.array((n & 0xFFFFFFFF, n >> 32, place, 0), np.uint32)  # read as two 64-bit numbers


@functools.lru_cache(maxsize=4096)
def _program(
    results: tuple[tuple[tuple[int, ...], Any], ...], *, waits: bool
) -> Callable[[np.ndarray, Any], Sequence[Any]]:
    """Returns a program with results of these shapes and dtypes.

    One that `waits` takes what another one makes that waits, and not something to compute with.
    """
    outs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    call = jax.ffi.ffi_call(_TARGET, outs)

    def colocated_python(number: Any, x: Any) -> Any:
        return call(number, x if waits else x @ x)

    return jax.jit(colocated_python)


@functools.lru_cache(maxsize=1024)
def _work(device: Any) -> Any:
    """Something to compute with, on a device."""
    return jax.device_put(np.zeros((_SIZE, _SIZE), np.float32), device)


_api.caches_of_features.extend((_program.cache_clear, _work.cache_clear))


class _Value(NamedTuple):
    """What one or more devices hold of a leaf."""

    leaf: int
    device: Any
    shape: tuple[int, ...]
    dtype: Any

    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(eq=False, kw_only=True)
class Plan:
    """How the arrays are made with the gate on one device.

    Attributes:
        gate: That device.
        programs: Per program the places of its values, the gate first.
        devices: Per program where it runs.
        copied: What of the gate's results is copied, by place, and to which device.
        sources: Per leaf whence it has its parts.
        small: Whether all that waits is the gate, with less than one large shard.
        starter: What starts the programs; made with the first call.
    """

    gate: Any
    programs: Sequence[tuple[int, ...]]
    devices: Sequence[Any]
    copied: Sequence[tuple[int, Any]]
    sources: Sequence[Sequence[tuple[str, int, int]]]
    small: bool
    starter: Callable[[Promise], list[Any]] | None = None


class Outputs:
    """What a call returns, once it is known.

    Attributes:
        asynchronous: Whether all leaves are of a kind that programs can be given later.
        home: The device whose results need no copy, or None where this process has none.
    """

    def __init__(self, specs: Specs):
        self.specs = specs
        self._plans: dict[Any, Plan] = {}
        self._values: list[_Value] = []
        self._targets: list[list[tuple[Any, int]]] = []
        self.asynchronous = all(_is_plain(leaf.dtype) for leaf in specs.leaves)
        if self.asynchronous:
            self._targets = [self._targets_of(i) for i in range(len(specs.leaves))]
        self.home = next((d for t in self._targets for d, _ in t), None)

    def _targets_of(self, i: int) -> list[tuple[Any, int]]:
        leaf = self.specs.leaves[i]
        shape = leaf.sharding.shard_shape(leaf.shape)
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        places: dict[Any, int] = {}
        targets = []
        for device in _jax.dispatch.local_device_order(leaf.sharding):
            part = str(indices[device])
            if part not in places:
                places[part] = len(self._values)
                self._values.append(_Value(i, device, shape, np.dtype(leaf.dtype)))
            targets.append((device, places[part]))
        return targets

    def take(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """Returns the values of a result, in the memory where they lie."""
        parts = [{s.device: s.data for s in x.addressable_shards} for x in leaves]
        return [np.asarray(parts[v.leaf][v.device]) for v in self._values]

    def plan(self, gate: Any) -> Plan:
        """Returns how the arrays are made with the gate on this device."""
        found = self._plans.get(gate)
        if found is None:
            found = self._plans[gate] = self._make_plan(gate)
        return found

    def _make_plan(self, gate: Any) -> Plan:
        inside: dict[int, int] = {}
        own: dict[Any, dict[int, int]] = {}
        copied: list[tuple[int, Any]] = []

        def source(device: Any, place: int) -> tuple[str, int, int]:
            if device != gate and self._values[place].nbytes() >= _LARGE:
                mine = own.setdefault(device, {})
                return "own", [*own].index(device), mine.setdefault(place, len(mine))
            at = inside.setdefault(place, len(inside))
            if device == gate:
                return "gate", 0, at
            copied.append((at, device))
            return "copy", 0, len(copied) - 1

        sources = [tuple(source(d, k) for d, k in targets) for targets in self._targets]
        return Plan(
            gate=gate,
            programs=(tuple(inside), *(tuple(p) for p in own.values())),
            devices=(gate, *own),
            copied=copied,
            sources=sources,
            small=not own and sum(self._values[k].nbytes() for k in inside) < _LARGE,
        )

    def start(self, promise: Promise, plan: Plan) -> list[Any]:
        """Starts the programs of a call; returns its arrays, which are there at once."""
        if plan.starter is None:
            plan.starter = self._starter(plan)
        return plan.starter(promise)

    def _starter(self, plan: Plan) -> Callable[[Promise], list[Any]]:
        """Makes everything that is the same for each call."""
        values = self._values
        results = [tuple((values[k].shape, values[k].dtype) for k in p) for p in plan.programs]
        # XLA drops a call whose results are all empty.
        needs_flag = len(results) > 1 or all(0 in shape for shape, _ in results[0])
        flag = ((1,), np.dtype(np.uint8))
        first = _program(results[0] + (flag,) * needs_flag, waits=False)
        others = [_program(r, waits=True) for r in results[1:]]
        copy = _jax.dispatch.copier([*(d for _, d in plan.copied), *plan.devices[1:]])
        work, count = _work(plan.gate), len(plan.copied)
        copied = [*(place for place, _ in plan.copied), *[len(results[0])] * len(others)]
        leaves = [*zip(self._assemblers(), plan.sources, strict=True)]

        def start(promise: Promise) -> list[Any]:
            gate = first(_numbered(promise, 0), work)
            copies = copy([gate[k] for k in copied]) if copied else []
            flags = enumerate(zip(others, copies[count:], strict=True), 1)
            own = [other(_numbered(promise, i), flag) for i, (other, flag) in flags]
            made = {"gate": [gate], "copy": [copies], "own": own}
            return [
                assemble([made[kind][i][k] for kind, i, k in parts]) for assemble, parts in leaves
            ]

        return start

    def _assemblers(self) -> list[Callable[[list[Any]], Any]]:
        """What makes each leaf of its parts."""
        leaves = self.specs.leaves
        return [_jax.dispatch.assembler(x.shape, x.dtype, x.sharding) for x in leaves]

    def nothing(self) -> Any:
        """Returns arrays of which this process has no part."""
        return self.specs.tree.unflatten([assemble([]) for assemble in self._assemblers()])


def _is_plain(dtype: Any) -> bool:
    """Whether elements are whole bytes in the memory of a device; those of strings are not."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return False
    return np.dtype(dtype).kind != "T" and carrier(dtype) == np.dtype(dtype)


# The start of programs, by one thread for another one


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Starts programs as they are meant, whatever the process has set for its own.

    Results have the dtypes that they were said to have, nobody looks at values that are not there
    (which would wait for them), and to tell a program which one it is, is no transfer of the user.
    """
    with (
        jax.enable_x64(True),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
    ):
        yield


class Latch:
    """What one thread waits for; a lock is the cheapest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.open = self._lock.release

    def wait(self, seconds: float = -1) -> bool:
        """Waits, for so many seconds at most; returns whether it is open, to one thread once."""
        return self._lock.acquire(timeout=seconds)


class Start:
    """The programs of one call, which a lane starts.

    Attributes:
        promise: What they wait for.
        error: Why they did not start.
    """

    def __init__(self, outputs: Outputs, plan: Plan):
        self.outputs = outputs
        self.plan = plan
        self.promise = Promise(plan.programs)
        self.error: BaseException | None = None
        self._arrays: list[Any] = []
        self._started = Latch()

    def begin(self) -> None:
        """Starts the programs, and wakes the caller."""
        try:
            self._arrays = self.outputs.start(self.promise, self.plan)
        except BaseException as error:  # for the caller
            self.error = error
            self.promise.settle(None, "its programs did not start")
            self.promise.forget()
        self._started.open()

    def arrays(self) -> list[Any]:
        """Waits until the programs are started; returns their arrays, to the caller alone."""
        self._started.wait()
        if self.error is not None:
            raise self.error
        arrays, self._arrays = self._arrays, []
        return arrays

    def give_up(self) -> None:
        """Lets the programs end: nobody wants their arrays."""
        self.promise.settle(None)

    def now(self) -> list[Any]:
        """Starts the programs of a call that is over: none of them has to wait."""
        with settings():
            return self.outputs.start(self.promise, self.plan)
