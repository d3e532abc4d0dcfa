"""Calls of host functions that are due, with where they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from spmd.host_callback._receiver import Item, receiver
from spmd.host_callback._registry import Entry, Site
from spmd.host_callback._running import call_results, called_with, error_text, without_own_frames


class Operand(Protocol):
    """Memory that holds an operand until it is copied."""

    def size(self, dtype: np.dtype) -> int:
        """How many bytes it has."""
        raise NotImplementedError

    def copy(self, dtype: np.dtype) -> np.ndarray:
        """Returns the values as an array that the host function may keep."""
        raise NotImplementedError


class Tap(Item):
    """A host function that nobody waits for.

    Attributes:
        entry: What calls it.
        site: How its program is split; None for a program on one device.
        partition: The number of the device in the program.
        buffers: The operands in the memory of the device.
    """

    def __init__(
        self,
        entry: Entry,
        device: Any,
        site: Site | None,
        partition: int,
        buffers: Sequence[Operand],
    ):
        self.device = device
        self.entry = entry
        self.site = site
        self.partition = partition
        self.buffers = buffers
        if self.urgent:
            return
        if site is None:
            self.size = entry.size
        else:
            self.size = sum(b.size(d) for b, d in zip(buffers, entry.carriers, strict=True))

    def read(self) -> list[np.ndarray]:
        """Copies the operands, without the padding of uneven shards."""
        buffers, self.buffers = self.buffers, ()
        values = [b.copy(d) for b, d in zip(buffers, self.entry.carriers, strict=True)]
        trims = None if self.site is None else self.site.part(self.partition).trims
        if trims is None:
            return values
        return [v if t is None else v[t].copy() for v, t in zip(values, trims, strict=True)]

    def call(self, operands: Sequence[np.ndarray]) -> Any:
        """Calls the host function."""
        return called_with(self.entry, operands, self.device, self.site, self.partition)

    def run(self) -> None:
        """Calls the host function."""
        entry = self.entry
        try:
            self.call(self.operands)
        except BaseException as error:  # a host function may well call sys.exit
            receiver.failed(without_own_frames(error), f"{entry.call.kind} of `{entry.call.name}`")


class Call(Tap):
    """A host function whose results a device waits for; its operands stay where they are so long.

    Attributes:
        finish: What is done with its results, or with the text of an error.
    """

    urgent = True

    def __init__(
        self,
        entry: Entry,
        device: Any,
        site: Site | None,
        partition: int,
        buffers: Sequence[Operand],
        finish: Callable[[Any, str | None], None],
    ):
        super().__init__(entry, device, site, partition, buffers)
        self.finish = finish

    def run(self) -> None:
        """Calls the host function, and passes on what it returns."""
        call = self.entry.call
        try:
            self.operands = self.read()
            results = call_results(call, self.call(self.operands))
        except BaseException as error:  # as above
            receiver.failed(without_own_frames(error), f"call of `{call.name}`")
            self.finish(None, error_text(call, error))
        else:
            self.finish(results, None)
