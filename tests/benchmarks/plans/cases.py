"""Programs with sizes, and the experts that have a layout for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax

from . import decoder, decoding, dense, experts, unet
from .decoder import Decoder
from .decoding import Decoding
from .dense import Perceptron
from .logical import Dims, Expert, dims
from .training import dims_of_state, state_of, train
from .unet import UNet


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program, and what it is laid out by.

    Attributes:
        step: takes `args` and, as ``keep``, what constrains it.
        args: descriptions of its arguments.
        dims: of their dimensions the names, `Dims` for each array.
        outs: of those of its results.
        experts: that have a layout for it.
        name: of it.
        options: of `pjit`.
        budget: bytes on a device, as text; it is planned with and without.
        topologies: that it is planned for.
        is_unrolled: whether it has many layers that are not in a loop.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    dims: tuple[Any, ...]
    outs: Any
    experts: Sequence[Expert]
    name: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: {"donate_argnums": 0})
    budget: str | None = None
    topologies: Sequence[str] = ("v5e:4x4",)
    is_unrolled: bool = False

    def size(self, name: str) -> int:
        """Of a dimension of an argument."""
        leaves = zip(jax.tree.leaves(self.args), jax.tree.leaves(self.dims), strict=True)
        return next(
            leaf.shape[of.names.split().index(name)]
            for leaf, of in leaves
            if name in of.names.split()
        )


Build = Callable[[bool], Case]
CASES: dict[str, Build] = {}
"""By name; each is built with real sizes, or with small ones for a test."""


def case(name: str) -> Callable[[Build], Build]:
    """Registers one."""

    def register(build: Build) -> Build:
        CASES[name] = build
        return build

    return register


def built(name: str, *, small: bool = False) -> Case:
    """A case by its name."""
    return dataclasses.replace(CASES[name](small), name=name)


def _training(program: ModuleType, model: Any, loss: Any, **rest: Any) -> Case:
    names = program.names(model)
    state = dims_of_state(names)
    return Case(
        step=functools.partial(train, loss, names),
        args=(state_of(program.params(model)), program.batch(model)),
        dims=(state, dims("activations", program.BATCH)),
        outs=(state, Dims("activations", "")),
        **rest,
    )


_SMALL = {
    "batch": 8, "length": 16, "layers": 2, "width": 32, "heads": 4, "head_dim": 8, "hidden": 64,
    "vocab": 64, "dtype": "float32",
}  # fmt: skip
_ALL = (
    experts.DATA, experts.ZERO1, experts.FSDP, experts.MEGATRON, experts.SEQUENCE,
    experts.FSDP_TENSOR, experts.FSDP_SEQUENCE, experts.CONTEXT,
)  # fmt: skip
_NO_SEQUENCE = (
    experts.DATA, experts.ZERO1, experts.FSDP, experts.MEGATRON, experts.FSDP_TENSOR
)  # fmt: skip
_EVERYWHERE = "v5e:4x4", "v5e:8x8", "v5p:2x2x4", "cpu:8", "cpu:4x2", "cpu:2x2x2"


def _decoder(model: Decoder, small: bool, *, own: Any = None, **rest: Any) -> Case:
    """A decoder; `own` are the small sizes that are not those of all."""
    model = dataclasses.replace(model, **_SMALL | (own or {})) if small else model
    return _training(decoder, model, functools.partial(decoder.loss, model), **rest)


@case("MLP")
def mlp(small: bool) -> Case:
    """Wide layers, and as many rows as they are wide."""
    model = Perceptron(batch=16_384, layers=4, width=4096, hidden=16_384)
    if small:
        model = Perceptron(batch=16, layers=2, width=32, hidden=64, dtype="float32")
    return _training(
        dense, model, dense.loss, experts=_NO_SEQUENCE, topologies=_EVERYWHERE, budget="2GB"
    )


@case("demo")
def demo(small: bool) -> Case:
    """The demo's GPT: 0.8 million parameters, which is less than any device wants."""
    from . import tiny

    state = tiny.dims_of_state()
    return Case(
        step=tiny.step,
        args=tiny.arguments(),
        dims=(state, Dims("activations", "batch length")),
        outs=(state, Dims("activations", "")),
        experts=_NO_SEQUENCE,
    )


GPT2_SMALL = Decoder(
    batch=64, length=1024, layers=12, width=768, heads=12, hidden=3072, vocab=50_304
)
FROM_A_BUDGET = "GPT-2 small, eight sequences"


@case("GPT-2 small")
def gpt2_small(small: bool) -> Case:
    """124 million parameters: Radford et al., 2019."""
    return _decoder(GPT2_SMALL, small, experts=_ALL, topologies=_EVERYWHERE, budget="1GB")


@case(FROM_A_BUDGET)
def gpt2_small_few(small: bool) -> Case:
    """The same for eight sequences, and with so little memory that one axis does not do."""
    model = dataclasses.replace(GPT2_SMALL, batch=8)
    return _decoder(model, small, experts=_ALL, budget="250MB")


@case("GPT-2 XL")
def gpt2_xl(small: bool) -> Case:
    """1.6 billion parameters, and 25 heads, which no axis of these meshes divides."""
    model = Decoder(
        batch=32, length=1024, layers=48, width=1600, heads=25, hidden=6400, vocab=50_304
    )
    return _decoder(model, small, own={"heads": 5}, experts=_ALL)


@case("12 unrolled layers")
def unrolled(small: bool) -> Case:
    """Layers one after the other, which nothing is computed again of."""
    model = Decoder(
        batch=32, length=512, layers=12, width=1024, heads=16, hidden=4096, vocab=32_000,
        scanned=False, remat=False, gated=True,
    )  # fmt: skip
    return _decoder(model, small, experts=_ALL, is_unrolled=True)


@case("Llama, GQA, splash")
def llama(small: bool) -> Case:
    """Eight layers of Llama 3 8B (Dubey et al., 2024), with words of Llama 2."""
    model = Decoder(
        batch=16, length=2048, layers=8, width=4096, heads=32, kv_heads=8, head_dim=128,
        hidden=14_336, vocab=32_000, gated=True, attend="splash",
    )  # fmt: skip
    return _decoder(model, small, own={"kv_heads": 2}, experts=_ALL[:-1])


@case("batch smaller than the chips")
def few_sequences(small: bool) -> Case:
    """Eight sequences."""
    model = Decoder(batch=8, length=512, layers=4, width=1024, heads=16, hidden=4096, vocab=32_000)
    return _decoder(model, small, own={"batch": 4}, experts=_ALL)


@case("32k sequence")
def long_sequence(small: bool) -> Case:
    """Four sequences of 32,768 words, whose scores are never there at once."""
    model = Decoder(
        batch=4, length=32_768, layers=8, width=2048, heads=16, head_dim=128, hidden=8192,
        vocab=32_000, gated=True, attend="blocks",
    )  # fmt: skip
    return _decoder(model, small, own={"batch": 2, "length": 64}, experts=_ALL)


@case("mixture of experts")
def mixture_of_experts(small: bool) -> Case:
    """Layers of 16 experts."""
    model = Decoder(
        batch=64, length=1024, layers=4, width=1024, heads=16, hidden=4096, vocab=32_000, experts=16
    )
    of_experts = (experts.EXPERTS, experts.EXPERTS_FSDP, experts.EXPERTS_TENSOR)
    return _decoder(model, small, own={"experts": 8}, experts=(*_NO_SEQUENCE, *of_experts))


@case("decoding")
def decode(small: bool) -> Case:
    """A word for each of 128 texts by Llama 3 8B."""
    model = Decoding(
        batch=128, length=4096, layers=32, width=4096, heads=32, kv_heads=8, head_dim=128,
        hidden=14_336, vocab=128_256,
    )  # fmt: skip
    if small:
        model = Decoding(**_SMALL, kv_heads=2)
    params, cache, words, count = decoding.shapes(model)
    places = dims("activations", decoding.CACHE)
    of_words = Dims("activations", "batch")
    return Case(
        step=decoding.step,
        args=(params, cache, words, count),
        dims=(dims("weights", decoding.NAMES), places, of_words, Dims("activations", "")),
        outs=(places, of_words),
        options={"donate_argnums": 1},
        experts=experts.DECODING,
    )


@case("U-Net")
def u_net(small: bool) -> Case:
    """Of images, in four levels."""
    model = UNet(batch=256, size=64, widths=(128, 256, 256, 512))
    if small:
        model = UNet(batch=8, size=16, widths=(16, 32), dtype="float32")
    return _training(unet, model, unet.loss, experts=experts.CONVOLUTIONS)


@case("Flax")
def flax(small: bool) -> Case:
    """An encoder of patches as ViT-B/16, with four of its layers."""
    from . import libraries

    sizes = _encoder(libraries, small)
    return _of_library(
        libraries.flax_step, sizes, libraries.flax_state(sizes), libraries, libraries.FLAX
    )


@case("Equinox")
def equinox(small: bool) -> Case:
    """The same."""
    from . import libraries

    sizes = _encoder(libraries, small)
    return _of_library(
        libraries.equinox_step, sizes, libraries.equinox_state(sizes), libraries, libraries.EQUINOX
    )


def _encoder(libraries: Any, small: bool) -> Any:
    if small:
        return libraries.Encoder(
            batch=8, patches=16, patch=24, layers=2, width=32, heads=4, hidden=64, classes=16,
            dtype="float32",
        )  # fmt: skip
    return libraries.Encoder(
        batch=256, patches=256, patch=768, layers=4, width=768, heads=12, hidden=3072, classes=1000
    )


def _of_library(step: Any, sizes: Any, state: Any, libraries: Any, patterns: Any) -> Case:
    of_state = libraries.dims_of(state, patterns)
    return Case(
        step=functools.partial(step, sizes),
        args=(state, sizes.arguments),
        dims=(of_state, dims("activations", libraries.BATCH)),
        outs=(of_state, Dims("activations", "")),
        experts=_ALL[:-1],
    )
