"""One entry per signature, made once however many threads ask for it."""

from __future__ import annotations

from collections.abc import Callable
import threading
from typing import Any


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
