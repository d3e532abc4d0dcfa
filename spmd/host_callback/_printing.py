"""The printed form of `id_print`."""

from __future__ import annotations

from dataclasses import dataclass
import sys
from typing import Any

import numpy as np

from spmd.host_callback._records import ByIdentity
from spmd.host_callback._threads import fork_safe_lock

_lock = fork_safe_lock()
_WIDTH = 80


@dataclass(frozen=True, slots=True)
class Printer:
    """A tap that prints; equal ones share a compiled program.

    Attributes:
        labels: Pairs of a name and the text that is printed behind it.
        output: Whose target has a method `write`; None is the standard output, as it is then.
        threshold: Arrays of more elements are summarized; see `numpy.array2string`.
    """

    labels: tuple[tuple[str, str], ...]
    output: ByIdentity
    threshold: int | None

    __name__ = "id_print"

    def __call__(self, arg: Any, transforms: Any, *, device: Any = None, shard: Any = None) -> None:
        """Prints the labels, sorted, and then the value."""
        shown: dict[str, Any] = dict(self.labels)
        if transforms:
            shown["transforms"] = [(n, params) if params else n for n, params in transforms]
        if device is not None:
            shown["device"] = device
        if shard is not None:
            shown |= {"coordinates": shard.coordinates, "index": _index(shard.index)}
        text = self.text(arg) + "\n"
        if shown:
            text = " ".join(f"{k}: {v}" for k, v in sorted(shown.items())) + "\n" + text
        with _lock:
            stream = sys.stdout if self.output.target is None else self.output.target
            stream.write(text)

    def text(self, arg: Any, column: int = 0) -> str:
        """Returns the value, nested as it is; what is wider than a line is broken."""
        if isinstance(arg, tuple):
            return _nested("(", [(e, "") for e in arg], ")", self, column)
        if isinstance(arg, list):
            return _nested("[", [(e, "") for e in arg], "]", self, column)
        if isinstance(arg, dict):
            pairs = sorted(arg.items(), key=lambda pair: str(pair[0]))
            return _nested("{", [(v, f"{k}=") for k, v in pairs], "}", self, column)
        if isinstance(arg, np.ndarray):
            return np.array2string(arg, threshold=self.threshold)
        return str(arg)


def _nested(
    start: str, parts: list[tuple[Any, str]], end: str, printer: Printer, column: int
) -> str:
    texts = [name + printer.text(value) for value, name in parts]
    line = " ".join([start, *texts, end])
    if column + len(line) <= _WIDTH:
        return line
    inner = column + 2
    texts = [name + printer.text(value, inner + len(name)) for value, name in parts]
    return f"{start} " + ("\n" + " " * inner).join(texts) + f" {end}"


def _index(index: Any) -> Any:
    if isinstance(index, tuple) and all(isinstance(s, slice) for s in index):
        return "[" + ",".join(f"{s.start}:{s.stop}" for s in index) + "]"
    return index
