"""The demo's GPT, with the demo's own step, optimizer and place of a constraint."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax

from spmd.demo import BATCH, corpus, train

from .logical import BARE, Bare, Dims, dims
from .training import ids

_STEPS = 400
NAMES = {
    "embed": "vocab embed",
    "position": "positions embed",
    "block.norm1": "layers embed",
    "block.qkv": "layers embed heads three dim",
    "block.out": "layers heads dim embed",
    "block.norm2": "layers embed",
    "block.up": "layers embed hidden",
    "block.down": "layers hidden embed",
    "norm": "embed",
    "head": "embed vocab",
}
"""Of the dimensions of the demo's parameters."""


def step(state: Any, tokens: Any, keep: Bare = BARE) -> tuple[Any, Any]:
    """The demo's step, whose residual stream is constrained at the end of each block."""

    def constrain(x: Any) -> Any:
        return keep.activation(x, "batch norm_length embed")

    return train.train_step(state, tokens, train.optimizer(_STEPS), constrain)


@functools.cache
def arguments() -> Any:
    """Shapes of the state, and of the words of a batch."""
    config = train.config_of(corpus.load())
    init = functools.partial(train.init_state, 0, train.optimizer(_STEPS), config)
    return jax.eval_shape(init), ids(BATCH, config.seq_len + 1)


def dims_of_state() -> Any:
    """Names of its dimensions."""
    adam = train.optimizer(_STEPS)
    state = optax.tree_utils.tree_map_params(
        adam,
        lambda _, of: of,
        arguments()[0][1],
        dims("state", NAMES),
        transform_non_params=lambda leaf: Dims("state", ""),
    )
    return dims("weights", NAMES), state
