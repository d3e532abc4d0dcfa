"""MLPs of which each word goes to one: the Switch Transformer (Fedus et al., 2021).

Words are sent by products with a mask, as GShard does (Lepikhin et al., 2020), within a sequence.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .logical import Bare

NAMES = {"router": "embed experts", "up": "experts embed hidden", "down": "experts hidden embed"}
_ROOM = 1.25  # the capacity factor


def mixed(w: Any, x: Any, keep: Bare) -> Any:
    """The results of the experts of ``[batch, length, embed]``."""
    sent, back = _routes(w, x)
    inside = jnp.einsum("bsec,bsm->ebcm", sent, x)
    inside = keep.activation(inside, "experts batch room embed")
    hidden = jax.nn.gelu(jnp.einsum("ebcm,emf->ebcf", inside, w["up"]))
    hidden = keep.activation(hidden, "experts batch room hidden")
    out = jnp.einsum("ebcf,efm->ebcm", hidden, w["down"])
    out = keep.activation(out, "experts batch room embed")
    return keep.activation(jnp.einsum("bsec,ebcm->bsm", back, out), "batch norm_length embed")


def _routes(w: Any, x: Any) -> tuple[Any, Any]:
    """Masks ``[batch, length, experts, room]``: where a word goes, and with which weight back."""
    gates = jax.nn.softmax((x @ w["router"]).astype(jnp.float32), axis=-1)
    count = gates.shape[-1]
    room = max(1, int(_ROOM * x.shape[1] / count))
    chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), count, dtype=jnp.int32)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1  # -1, and no room: the word goes nowhere
    sent = jax.nn.one_hot(place, room, dtype=x.dtype)
    return sent, sent * jnp.max(gates, axis=-1)[..., None, None].astype(x.dtype)
