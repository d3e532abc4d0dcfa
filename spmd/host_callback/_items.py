"""Calls of host functions that are due, with where they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from spmd.host_callback._receiver import Item, receiver
from spmd.host_callback._registry import Entry, Site
from spmd.host_callback._running import call_results, called_with, error_text, without_own_frames


class Origin(NamedTuple):
    """Where a call comes from.

    Attributes:
        device: The device.
        site: How its program is split; None for a program on one device.
        partition: Its number in the program.
    """

    device: Any
    site: Site | None
    partition: int


class Tap(Item):
    """A host function that nobody waits for."""

    __slots__ = ("_read", "entry", "origin")

    def __init__(self, entry: Entry, origin: Origin, read: Callable[[], Any], size: int):
        super().__init__(origin.device, size)
        self.entry = entry
        self.origin = origin
        self._read = read

    def read(self) -> Any:
        """Copies the operands."""
        return self._read()

    def run(self) -> None:
        """Calls the host function."""
        entry = self.entry
        try:
            called_with(entry, self.operands, *self.origin)
        except BaseException as error:  # a host function may well call sys.exit
            receiver.failed(without_own_frames(error), f"{entry.call.kind} of `{entry.call.name}`")


class Call(Tap):
    """A host function whose results a device waits for; its operands stay where they are so long.

    Attributes:
        finish: What is done with its results, or with the text of an error.
    """

    __slots__ = ("finish",)

    urgent = True

    def __init__(
        self,
        entry: Entry,
        origin: Origin,
        read: Callable[[], Any],
        finish: Callable[[Any, str | None], None],
    ):
        super().__init__(entry, origin, read, 0)
        self.finish = finish

    def run(self) -> None:
        """Calls the host function, and passes on what it returns."""
        call = self.entry.call
        try:
            self.operands = self.read()
            results = call_results(call, called_with(self.entry, self.operands, *self.origin))
        except BaseException as error:  # as above
            receiver.failed(without_own_frames(error), f"call of `{call.name}`")
            self.finish(None, error_text(call, error))
        else:
            self.finish(results, None)
