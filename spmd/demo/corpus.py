"""The demo's text as numbers, and the batches drawn from it."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import importlib.resources

import numpy as np

_FILE = "genesis_exodus.txt"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text as character numbers.

    Attributes:
        characters: the different characters, sorted; number ``i`` stands for ``characters[i]``.
        numbers: the text, ``[length]``, int32.
    """

    characters: str
    numbers: np.ndarray

    def batches(self, seed: int, batch: int, seq_len: int) -> Iterator[np.ndarray]:
        """Draw sequences at random, forever: ``[batch, seq_len + 1]``, int32.

        Equal seeds give equal batches. The last of the characters is a target only.
        """
        random = np.random.default_rng(seed)
        offsets = np.arange(seq_len + 1)
        while True:
            starts = random.integers(0, len(self.numbers) - seq_len, size=batch)
            yield self.numbers[starts[:, None] + offsets]


def load() -> Corpus:
    """Read the text that ships with the package."""
    text = importlib.resources.files("spmd.demo").joinpath(_FILE).read_text("ascii")
    characters, numbers = np.unique(list(text), return_inverse=True)
    return Corpus(characters="".join(characters), numbers=numbers.astype(np.int32))
