"""Parts of a report that are worked out when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

_Part = TypeVar("_Part")


class Later(Generic[_Part]):
    """What is worked out when it is first asked for, once for all copies of a report.

    What works it out is let go afterwards, and with it the program.
    """

    __slots__ = ("_lock", "_made", "_make")

    def __init__(self, make: Callable[[], _Part]):
        self._make: Callable[[], _Part] | None = make
        self._made: _Part | None = None
        self._lock = threading.Lock()

    def get(self) -> _Part:
        """What is worked out."""
        with self._lock:
            if self._made is None:
                assert self._make  # one of the two is always there
                self._made = self._make()
                self._make = None
            return self._made

    def peek(self) -> _Part | None:
        """What is worked out already; None where that has not been asked for."""
        return self._made

    def __reduce__(self) -> Any:
        return known, (self.get(),)


def known(made: _Part) -> Later[_Part]:
    """What is there already."""
    later = Later(lambda: made)
    later.get()
    return later


class FindingsLater:
    """A record whose field `findings` may be empty until it is first asked for, by whatever asks.

    Its field `_findings_later` has them then.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # which would take every name for one that is there

        def __getattr__(self, name: str) -> Any:
            """Python asks here for what an object lacks."""
            if name != "findings":
                message = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(message, name=name, obj=self)
            object.__setattr__(self, name, self._findings_later.get())
            return self.findings


_Record = TypeVar("_Record", bound=FindingsLater)


def without_findings(record: _Record) -> _Record:
    """The record, whose findings are worked out when they are asked for."""
    object.__delattr__(record, "findings")
    return record
