"""The printed form of `id_print`."""

from __future__ import annotations

from dataclasses import dataclass
import sys
import threading
from typing import Any

import numpy as np

_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Printer:
    """A tap that prints; equal ones share a compiled program.

    Attributes:
        labels: Pairs of a name and what is printed behind it.
        output_stream: Has a method `write`; None for the standard output at the time of printing.
        threshold: Arrays of more elements are summarized; see `numpy.array2string`.
    """

    labels: tuple[tuple[str, Any], ...]
    output_stream: Any
    threshold: int | None

    __name__ = "id_print"

    def __call__(self, arg: Any, transforms: Any, *, device: Any = None, shard: Any = None) -> None:
        """Prints the labels, sorted, and then the value."""
        shown = dict(self.labels)
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
            stream = sys.stdout if self.output_stream is None else self.output_stream
            stream.write(text)

    def text(self, arg: Any) -> str:
        """Returns the value, nested as it is."""
        if isinstance(arg, tuple):
            return f"( {' '.join(map(self.text, arg))} )"
        if isinstance(arg, list):
            return f"[ {' '.join(map(self.text, arg))} ]"
        if isinstance(arg, dict):
            pairs = sorted(arg.items(), key=lambda pair: str(pair[0]))
            return "{ " + " ".join(f"{k}={self.text(v)}" for k, v in pairs) + " }"
        if isinstance(arg, np.ndarray):
            return np.array2string(arg, threshold=self.threshold)
        return str(arg)


def _index(index: Any) -> Any:
    if isinstance(index, tuple) and all(isinstance(s, slice) for s in index):
        return "[" + ",".join(f"{s.start}:{s.stop}" for s in index) + "]"
    return index
