"""One call of a host function, and the program that it keeps: what is known of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import functools
import logging
import threading
import time
from typing import Any
import weakref

import jax

from spmd import _api
from spmd.colocated_python import _specs
from spmd.colocated_python._lanes import Lane, inside, lanes, most_gates
from spmd.colocated_python._promises import Latch, Outputs, Start
from spmd.colocated_python._specs import Specs, host, leaf_of, refuse, subject, tell
from spmd.colocated_python._waiting import Habit, Visit, started
from spmd.errors import Failure, explain

logger = logging.getLogger(__name__)


#: Seconds that the programs of a next call take to start, and more.
_QUICK = 0.005


class Call:
    """A host function with its arguments, to be run in a lane."""

    def __init__(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._function = function
        self._arguments: Any = (args, kwargs)
        self.result: list[Any] | None = None  # its leaves
        self.tree: Any = None
        self.error: BaseException | None = None
        self.arrays: Any = None  # what the caller gets, where it waits for the function
        self.visit = Visit(function.name, function.habit)

    def run(self, outputs: Outputs | None) -> None:
        """Runs the function once its arguments are there, and checks what it returns."""
        (args, kwargs), self._arguments = self._arguments, None
        try:
            jax.block_until_ready((args, kwargs))
            start = time.perf_counter()
            with self.visit:
                result = self._function.fun(*args, **kwargs)
            self._function.is_slow = time.perf_counter() - start >= _QUICK
            leaves, self.tree = jax.tree.flatten(result)
            del result
            self._function.check_result(leaves, self.tree, outputs)
            jax.block_until_ready(leaves)
            self.result = leaves
        except BaseException as error:  # whatever it is, the lane goes on
            self.error = error.with_traceback(_behind(error.__traceback__))

    def take_error(self) -> BaseException | None:
        """Returns the error, once: its frames hold this, which must not hold it for long."""
        error, self.error = self.error, None
        return error


def _behind(where: Any) -> Any:
    # Of its own, since the frame that keeps an error must not name its traceback, too.
    return where and where.tb_next


@dataclass(eq=False)
class Function:
    """A host function for one kind of arguments.

    Attributes:
        name: How errors call it.
        habit: What it was seen to do, for any arguments.
        outputs: What it returns, once that is known.
        is_slow: Whether it took longer than programs take to start.
        held: The shardings whose identities a fast lookup knows this by.
        fast_key: By which key that is.
    """

    fun: Callable
    name: str
    inputs: Specs
    _devices: Any
    _out_specs_fn: Callable | None
    habit: Habit
    outputs: Outputs | None = None
    is_slow: bool = False
    held: tuple[Any, ...] = ()
    fast_key: Any = None
    _discovering: Any = None

    def __post_init__(self) -> None:
        local = [d for d in self._devices if d.process_index == jax.process_index()]
        self._is_here = bool(local)
        self._is_spread = len(local) > 1
        self._changed = threading.Condition(threading.Lock())

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function; returns arrays that are filled later, where that is possible."""
        try:
            return self._call(args, kwargs)
        finally:
            if self.habit.meets:
                started()  # so has the host function that calls this one, if it is one

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = self.outputs
        if outputs is None:
            if self._out_specs_fn is None:
                return self._call_first(args, kwargs)
            outputs = self._ask_for_outputs()
        if not self._is_here:
            return outputs.nothing()
        return self._call_known(Call(self, args, kwargs), outputs)

    # What it returns

    def _ask_for_outputs(self) -> Outputs:
        with self._changed:
            if self.outputs is None:
                fun: Any = self._out_specs_fn
                args, kwargs = self.inputs.structs()
                self.outputs = self._stated(fun(*args, **kwargs))
            return self.outputs

    def _stated(self, result: Any) -> Outputs:
        leaves, tree = jax.tree.flatten(result)
        paths = _specs.result_paths(tree)
        refuse(self.name, *_specs.not_specs(leaves, paths, "cannot use what out_specs_fn says of"))
        leaves = tuple(leaf_of(x) for x in leaves)
        refuse(self.name, *_specs.elsewhere(self._devices, leaves, paths, "cannot use the spec of"))
        return Outputs(Specs(tree, leaves))

    def check_result(self, leaves: list[Any], tree: Any, outputs: Outputs | None) -> None:
        """Refuses a result that is not arrays on the devices, or not as it is known to be."""
        paths = _specs.result_paths(tree)
        refuse(self.name, *_specs.not_arrays(leaves, paths, "cannot return"))
        got = [leaf_of(x) for x in leaves]
        if outputs is not None:
            what = "returned another tree than it is known to return"
            refuse(self.name, *_specs.other_tree(outputs.specs.tree, tree, what))
        refuse(self.name, *_specs.elsewhere(self._devices, got, paths, "cannot return"))
        if outputs is not None:
            verb = "returned something else than it is known to return as"
            refuse(self.name, *_specs.mismatches(outputs.specs.leaves, got, paths, verb))

    # The first call

    def _call_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call to its end, which says what the others return; threads wait for it."""
        if not self._is_here:
            failure = Failure(
                what="does not run in this process, which cannot find out what it returns",
                expected="at least one device of this process, or out_specs_fn",
                fix="specialize it: f.specialize(out_specs_fn=...)",
            )
            raise explain(subject(self.name), [failure])
        call = Call(self, args, kwargs)
        if self._discovering == threading.get_ident():
            return self.fun(*args, **kwargs)  # it calls itself
        with self._changed:
            self._changed.wait_for(lambda: self.outputs is not None or self._discovering is None)
            if self.outputs is None:
                self._discovering = "a thread that is not known yet"
        if self.outputs is not None:
            return self._call_known(call, self.outputs)
        done = Latch()
        try:
            lane = lanes.enter()
            lane.run(lambda: self._discover(call, lane, done))
        except BaseException:  # an interrupt
            self._discovered(None)
            raise
        done.wait()
        self._raise(call)
        return call.arrays

    def _raise(self, call: Call) -> None:
        """Raises what the function raised, in the thread that waits for it."""
        error = call.take_error()
        try:
            if error is not None:
                error.add_note(f"raised by {subject(self.name)} on {host()}")
                raise error
        finally:
            del error

    def _discover(self, call: Call, lane: Lane, done: Latch) -> None:
        self._discovering = threading.get_ident()
        call.run(None)
        found = None
        try:
            if call.error is None:
                leaves: Any = call.result
                outputs = Outputs(Specs(call.tree, tuple(leaf_of(x) for x in leaves)))
                self._deliver(call, outputs)
                found = outputs
        except BaseException as error:  # as in `Call.run`
            call.error = error
        self._discovered(found)
        lanes.leave(lane)
        done.open()

    def _discovered(self, found: Outputs | None) -> None:
        with self._changed:
            self.outputs = found
            self._discovering = None
            self._changed.notify_all()

    # The others

    def _call_known(self, call: Call, outputs: Outputs) -> Any:
        lane = lanes.enter()
        if not outputs.specs.leaves:
            lane.run(lambda: self._run_for_nothing(call, lane, outputs))
            return outputs.specs.tree.unflatten(())
        start = lanes.start(lane, outputs) if outputs.asynchronous else None
        if start is None:
            return self._call_now(call, lane, outputs)
        try:
            arrays = start.arrays()
        finally:  # an interrupt leaves arrays somewhere, too
            lane.run(lambda: self._run(call, lane, start))
        call.visit.wait(lane.worker, is_spread=self._is_spread)
        return outputs.specs.tree.unflatten(arrays)

    def _run(self, call: Call, lane: Lane, start: Start) -> None:
        if start.error is None:
            if self.is_slow:
                lanes.prepare(lane, start)
            call.run(start.outputs)
            self._settle(call, start)
        lanes.leave(lane, start)

    def _settle(self, call: Call, start: Start) -> None:
        values = None
        if call.error is None:
            try:
                leaves: Any = call.result
                values = start.outputs.take(leaves)
            except BaseException as error:  # as in `Call.run`
                call.error = error
        error = call.take_error()
        start.promise.settle(values, None if error is None else tell(self.name, error))

    def _run_for_nothing(self, call: Call, lane: Lane, outputs: Outputs) -> None:
        call.run(outputs)
        if (error := call.take_error()) is not None:
            lanes.failed(self.name, error)
        lanes.leave(lane)

    def _call_now(self, call: Call, lane: Lane, outputs: Outputs) -> Any:
        """Where no program can wait for the function, its caller does."""
        if outputs.asynchronous and not inside() and most_gates() <= 0:
            _warn_once()
        done = Latch()

        def run() -> None:
            call.run(outputs)
            self._deliver(call, outputs)
            lanes.leave(lane)
            done.open()

        lane.run(run)
        done.wait()
        self._raise(call)
        return call.arrays

    def _deliver(self, call: Call, outputs: Outputs) -> None:
        """Makes the results of a call that is over: copies, as those of later calls are."""
        tree, arrays = outputs.specs.tree, call.result
        if outputs.asynchronous and outputs.specs.leaves:
            start = Start(outputs, outputs.plan(outputs.home))
            self._settle(call, start)
            try:
                arrays = start.now()
            except BaseException as error:  # for the caller
                call.error = error
        if arrays is not None:
            call.arrays = tree.unflatten(arrays)


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "spmd.colocated_python: calls are synchronous in this process: XLA has no thread in which "
        "a program could wait for a host function; import spmd.colocated_python before the first "
        "array, set NPROC to more than the number of CPU devices, and leave "
        "jax_cpu_enable_async_dispatch on"
    )


# A function per kind of arguments


_lock = threading.Lock()
_all: weakref.WeakSet[Functions] = weakref.WeakSet()


def fast_key(tree: Any, leaves: Sequence[Any]) -> Any:
    """A key by the identity of shardings."""
    return tree, tuple([(x.shape, x.dtype, id(x.sharding)) for x in leaves])


class Functions:
    """The functions of one wrapped function, by the identity of shardings, else by equality.

    To compare shardings is slow and to compare their identities is not. Of each function only the
    latest identities are known; it holds those shardings, so no other has their place in memory.
    """

    def __init__(self) -> None:
        self._fast: dict[Any, Function] = {}
        self.find = self._fast.get  # by a key that :func:`fast_key` made
        self._by_specs: dict[Specs, Function] = {}
        self._lock = threading.Lock()
        with _lock:
            _all.add(self)

    def __len__(self) -> int:
        return len(self._by_specs)

    def get(
        self, key: Any, tree: Any, leaves: Sequence[Any], make: Callable[[Specs], Function]
    ) -> Function:
        """Returns the function for arguments, which is made for the first of their kind."""
        specs = Specs(tree, tuple(leaf_of(x) for x in leaves))
        with self._lock:
            found = self._by_specs.get(specs)
            if found is None:
                found = self._by_specs[specs] = make(specs)
            # The old key goes first: while it is there, what it names is held.
            self._fast.pop(found.fast_key, None)
            found.held = tuple(leaf.sharding for leaf in specs.leaves)
            found.fast_key = key
            self._fast[key] = found
            return found

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._fast.clear()
            self._by_specs.clear()


def _clear() -> None:
    with _lock:
        every = [*_all]
    for functions in every:
        functions.clear()


_api.caches_of_features.append(_clear)
