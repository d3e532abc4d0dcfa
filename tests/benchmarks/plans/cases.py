"""Programs with sizes, and the experts that have a layout for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax

from . import decoder, dense, experts
from .decoder import Decoder
from .dense import Perceptron
from .logical import Dims, Expert, dims
from .training import dims_of_state, state_of, train


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program, and what it is laid out by.

    Attributes:
        name: of it.
        step: takes `args` and, as ``keep``, what constrains it.
        args: descriptions of its arguments.
        dims: of their dimensions the names, `Dims` for each array.
        outs: of those of its results.
        experts: that have a layout for it.
        options: of `pjit`.
        budget: bytes on a device, as text; it is planned with and without.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    dims: tuple[Any, ...]
    outs: Any
    experts: Sequence[Expert]
    options: dict[str, Any]
    budget: str | None = None

    def size(self, name: str) -> int:
        """Of a dimension of an argument."""
        leaves = zip(jax.tree.leaves(self.args), jax.tree.leaves(self.dims), strict=True)
        return next(
            leaf.shape[of.names.split().index(name)]
            for leaf, of in leaves
            if name in of.names.split()
        )


def _training(name: str, program: ModuleType, model: Any, loss: Any, **rest: Any) -> Case:
    names = program.names(model)
    state = dims_of_state(names)
    return Case(
        name=name,
        step=functools.partial(train, loss, names),
        args=(state_of(program.params(model)), program.batch(model)),
        dims=(state, dims("activations", program.BATCH)),
        outs=(state, Dims("activations", "")),
        options={"donate_argnums": 0},
        **rest,
    )


def _dense(name: str, model: Perceptron, **rest: Any) -> Case:
    return _training(name, dense, model, dense.loss, **rest)


def _decoder(name: str, model: Decoder, **rest: Any) -> Case:
    return _training(name, decoder, model, functools.partial(decoder.loss, model), **rest)


_ALL = (
    experts.DATA, experts.ZERO1, experts.FSDP, experts.MEGATRON, experts.SEQUENCE,
    experts.FSDP_TENSOR, experts.FSDP_SEQUENCE, experts.CONTEXT,
)  # fmt: skip
_NO_SEQUENCE = _ALL[:4] + _ALL[5:6]

MLP = _dense(
    "MLP",
    Perceptron(batch=16_384, layers=4, width=4096, hidden=16_384),
    experts=_NO_SEQUENCE,
)
GPT2_SMALL = _decoder(
    "GPT-2 small",
    Decoder(batch=64, length=1024, layers=12, width=768, heads=12, hidden=3072, vocab=50_304),
    experts=_ALL,
)
FEW_SEQUENCES = _decoder(
    "batch smaller than the chips",
    Decoder(batch=8, length=512, layers=4, width=1024, heads=16, hidden=4096, vocab=32_000),
    experts=_ALL,
)

CASES = {one.name: one for one in (MLP, GPT2_SMALL, FEW_SEQUENCES)}
