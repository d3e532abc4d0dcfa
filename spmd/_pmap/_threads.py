"""What the threads that call a mapped function share: its entries, and how its programs start.

Programs whose devices meet are started one after the other, under `starting`; see
`docs/design/pmap.md`.
"""

from __future__ import annotations

from collections.abc import Callable
import threading
from typing import Any
import weakref

from spmd import _jax
from spmd._starting import starting, threads, wait_now_and_then

# One entry per signature, made once however many threads ask for it


class _Making:
    """An entry that a thread is about to make."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.done = threading.Event()
        self.error: BaseException | None = None


_MISSING: Any = object()

#: As many as JAX keeps; beyond that the oldest goes.
_MOST = 4096


class Entries:
    """Entries by key. While one is made, who asks for it waits; others are made meanwhile.

    `keeps` says of an entry whether it is for others, too; else each who asks makes its own.
    """

    def __init__(self, keeps: Callable[[Any], bool] = lambda entry: True) -> None:
        self._keeps = keeps
        self._lock = threading.Lock()
        self._entries: dict[Any, Any] = {}
        self._making: dict[Any, _Making] = {}

    def after_fork(self) -> None:
        """Forgets what threads are making that a forked process does not have."""
        self._lock = threading.Lock()
        self._making = {}

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[Any]:
        """The keys, oldest first."""
        with self._lock:
            return [*self._entries]

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns the entry of a key; the first that asks makes it.

        What `make` raises, those who waited raise too; the next makes it anew.
        """
        found = self._entries.get(key, _MISSING)  # of every call in a trace
        if found is not _MISSING:
            return found
        own = _Making()
        try:
            with self._lock:
                if key in self._entries:
                    return self._entries[key]
                making = self._making.setdefault(key, own)
            if making is own:
                return self._make(key, make, own)
        finally:  # an interrupt may have come anywhere
            if self._making.get(key) is own:
                del self._making[key]
            own.done.set()
        if making.thread == threading.get_ident():
            return make()  # a function that calls itself
        making.done.wait()
        if making.error is not None:
            raise making.error
        return self.get(key, make)

    def _make(self, key: Any, make: Callable[[], Any], making: _Making) -> Any:
        try:
            entry = make()
        except Exception as error:  # an interrupt is this thread's own
            making.error = error
            raise
        if not self._keeps(entry):
            return entry
        with self._lock:
            self._entries[key] = entry
            if len(self._entries) > _MOST:
                del self._entries[next(iter(self._entries))]
        return entry

    def clear(self) -> None:
        """Forgets all entries."""
        with self._lock:
            self._entries.clear()


# Starting programs


class Starts:
    """What is known of the programs of one function, to start them.

    Attributes:
        misses: What the dispatcher has called for and is not through with, from any thread.
        meets: Whether the devices of any program wait for one another; None before the first one.
        crowds: Whether any program runs on several devices of the CPU.
        dispatcher: Returns JAX's dispatcher, while there is one.
    """

    def __init__(self) -> None:
        self.misses: set[object] = set()
        self.meets: bool | None = None
        self.crowds = False
        self.dispatcher: Callable[[], Any] = lambda: None

    def one_at_a_time(self, dispatch: Any, directly: Callable) -> Callable:
        """Returns what a user calls, of JAX's dispatcher and what goes `directly` round it.

        Nobody waits until a program has run. Some are started as they come: one on a single device
        may run in the thread that starts it, for as long as its host functions take. Where a
        function has both kinds, the dispatcher learns no program on a single device.

        While one thread is in a miss, the dispatcher lets others wait that come with the same
        arguments; they would wait with `starting` held, which the first one needs. They call by
        themselves.
        """

        def start(*args: Any, **kwargs: Any) -> Any:
            if len(threads) == 1:
                return dispatch(*args, **kwargs)
            if self.meets is None:
                return directly(*args, **kwargs)
            if not self.meets:
                outs = dispatch(*args, **kwargs)
            else:
                with starting:
                    idle = not self.misses
                    outs = dispatch(*args, **kwargs) if idle else None
                if not idle:
                    outs = directly(*args, **kwargs)
            if self.crowds:
                wait_now_and_then(outs)
            return outs

        start._clear_cache = dispatch._clear_cache  # type: ignore[attr-defined] - as a dispatcher
        self.dispatcher = weakref.ref(dispatch)
        return start

    def miss(self, call: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Makes a call that the dispatcher asks for."""
        miss = object()
        try:
            with starting:
                self.misses.add(miss)
            return call(*args, **kwargs)
        finally:  # without the lock: an interrupt that finds it waiting would leave the miss there
            self.misses.discard(miss)

    def program(self, jaxpr: Any, mesh: Any) -> Callable[[], bool]:
        """Notes a program that will start now; what it returns tells later if C++ may learn it."""
        several = mesh.size > 1
        meets = several and _meets(jaxpr, mesh)
        before, self.meets = self.meets, meets or bool(self.meets)
        self.crowds = self.crowds or (several and mesh.devices.item(0).platform == "cpu")
        if meets and not before:
            self.dispatcher()._clear_cache()  # what it has learned was to be started at any time

        def learns() -> bool:
            # Other threads may be in there, and start this program without `starting`.
            alone = before or not meets or len(threads) == 1
            return bool(alone and (several or not self.meets))

        return learns


@_jax.core.weakref_lru_cache
def _meets(jaxpr: Any, mesh: Any) -> bool:
    """Whether devices that run a program wait for one another."""
    # Between two levels it is the partitioner that adds collectives.
    return len(mesh.axis_names) > 1 or _jax.core.has_effects(jaxpr.jaxpr)
