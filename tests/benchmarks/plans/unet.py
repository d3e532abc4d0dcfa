"""A convolutional U-Net that takes noise out of images: Ronneberger et al., 2015; Ho et al., 2020.

Each level has a block of two convolutions on the way down and one on the way up, with group norms;
there is no attention and no embedding of the time.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from .logical import Bare
from .training import array

_GROUPS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UNet:
    """Its sizes.

    Attributes:
        batch: images.
        size: their height and width.
        widths: channels of each level, the finest one first.
        dtype: that is computed in.
    """

    batch: int
    size: int
    widths: tuple[int, ...]
    dtype: str = "bfloat16"


_CONV = "rows columns in out"
_BLOCK = {"first": _CONV, "norm1": "out", "second": _CONV, "norm2": "out", "skip": _CONV}


def names(model: UNet) -> Any:
    """Of the dimensions of the parameters."""
    levels = len(model.widths)
    return {
        "enter": _CONV, "down": [_BLOCK] * levels, "up": [_BLOCK] * (levels - 1), "leave": _CONV
    }  # fmt: skip


def params(model: UNet) -> Any:
    """Their shapes."""

    def block(a: int, b: int) -> dict[str, Any]:
        return {
            "first": array(3, 3, a, b), "norm1": array(b), "second": array(3, 3, b, b),
            "norm2": array(b), "skip": array(1, 1, a, b),
        }  # fmt: skip

    w = model.widths
    return {
        "enter": array(3, 3, 3, w[0]),
        "down": [block(a, b) for a, b in zip((w[0], *w), w, strict=False)],
        # What comes from below, beside what was there on the way down.
        "up": [block(b + a, a) for a, b in itertools.pairwise(w)],
        "leave": array(3, 3, w[0], 3),
    }


BATCH = dict.fromkeys(("noisy", "noise"), "batch height width color")


def batch(model: UNet) -> Any:
    """Images with noise, and the noise."""
    images = array(model.batch, model.size, model.size, 3, dtype=jnp.dtype(model.dtype))
    return dict.fromkeys(BATCH, images)


def loss(params: Any, batch: Any, keep: Bare) -> Any:
    """The mean square error of the noise that is found."""
    x = keep.activation(_conv(batch["noisy"], params["enter"], keep), _IMAGE)
    passed = []
    for level, p in enumerate(params["down"]):
        if level:
            x = keep.activation(_halved(x), _IMAGE)
        x = _block(x, p, keep)
        passed.append(x)
    passed.pop()
    for p in reversed(params["up"]):
        x = keep.activation(_doubled(x), _IMAGE)
        x = _block(jnp.concatenate((x, passed.pop()), axis=-1), p, keep)
    found = _conv(x, params["leave"], keep)
    return jnp.mean(jnp.square((found - batch["noise"]).astype(jnp.float32)))


_IMAGE = "batch height width channels"


def _block(x: Any, p: Any, keep: Bare) -> Any:
    y = keep.activation(_conv(x, p["first"], keep), _IMAGE)
    y = _conv(jax.nn.silu(_normed(y, p["norm1"])), p["second"], keep)
    y = jax.nn.silu(_normed(keep.activation(y, _IMAGE), p["norm2"]))
    return keep.activation(y + _conv(x, p["skip"], keep), _IMAGE)


def _conv(x: Any, w: Any, keep: Bare) -> Any:
    w = keep.used(w.astype(x.dtype), _CONV)
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _normed(x: Any, scale: Any) -> Any:
    """A group norm."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:3], _GROUPS, -1)
    wide = wide - jnp.mean(wide, axis=(1, 2, 4), keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(lax.square(wide), axis=(1, 2, 4), keepdims=True) + 1e-5)
    return wide.reshape(x.shape).astype(x.dtype) * scale.astype(x.dtype)[None, None, None]


def _halved(x: Any) -> Any:
    n, h, w, c = x.shape
    return jnp.mean(x.reshape(n, h // 2, 2, w // 2, 2, c), axis=(2, 4))


def _doubled(x: Any) -> Any:
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
