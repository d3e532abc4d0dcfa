"""Layouts that the field knows by name, on the mesh axes ``data`` and ``model``.

Each is a table of logical axes, as MaxText writes them: see `logical`.
"""

from __future__ import annotations

import dataclasses

from .logical import Axes, Expert

BOTH = ("data", "model")
_TENSOR: dict[str, Axes] = {
    "heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"
}  # fmt: skip

DATA = Expert(
    name="data parallel",
    source="Goyal et al., Accurate, Large Minibatch SGD, 2017",
    activations={"batch": BOTH},
    weights={},
)
ZERO1 = Expert(
    name="ZeRO-1",
    source="Rajbhandari et al., ZeRO, 2020; on TPU: Xu et al., Automatic Cross-Replica Sharding of "
    "Weight Update, 2020",
    activations={"batch": BOTH},
    weights={},
    state={"embed": BOTH, "positions": BOTH},
)
FSDP = Expert(
    name="FSDP",
    source="Rajbhandari et al., ZeRO (stage 3), 2020; Zhao et al., PyTorch FSDP, 2023; MaxText: "
    "ici_fsdp_parallelism=-1",
    activations={"batch": BOTH},
    weights={"embed": BOTH},
    gathered={},
)
MEGATRON = Expert(
    name="Megatron",
    source="Shoeybi et al., Megatron-LM, 2019",
    activations={"batch": "data", **_TENSOR},
    weights=_TENSOR,
)
SEQUENCE = Expert(
    name="Megatron + sequence",
    source="Korthikanti et al., Reducing Activation Recomputation, 2022",
    activations={"batch": "data", "norm_length": "model", **_TENSOR},
    weights=_TENSOR,
)
FSDP_TENSOR = Expert(
    name="FSDP x TP",
    source="MaxText: ici_fsdp_parallelism and ici_tensor_parallelism; Xu et al., GSPMD, 2021, "
    "section 5.1 (2D finalized): the residual stream is split over width",
    activations={"batch": "data", "embed": "model", **_TENSOR},
    weights={"embed": "data", **_TENSOR},
    gathered=_TENSOR,
)
FSDP_SEQUENCE = Expert(
    name="FSDP x Megatron + sequence",
    source="Dubey et al., The Llama 3 Herd of Models, 2024, section 3.3.2; TorchTitan, 2024",
    activations={"batch": "data", "norm_length": "model", **_TENSOR},
    weights={"embed": "data", **_TENSOR},
    gathered=_TENSOR,
)
CONTEXT = Expert(
    name="context",
    source="Liu et al., Ring Attention, 2023; with keys and values gathered as in Dubey et al., "
    "The Llama 3 Herd of Models, 2024, and MaxText: ici_context_parallelism",
    activations={"batch": "data", "length": "model", "norm_length": "model"},
    weights={"embed": BOTH},
    gathered={},
)

EXPERTS = Expert(
    name="expert parallel",
    source="Lepikhin et al., GShard, 2020: experts and batch over all devices; the optimizer's "
    "state as in Rajbhandari et al., DeepSpeed-MoE, 2022",
    activations={"batch": BOTH, "experts": BOTH},
    weights={"experts": BOTH},
    state={"experts": BOTH, "embed": BOTH},
)
EXPERTS_FSDP = Expert(
    name="expert parallel x FSDP",
    source="MaxText: ici_expert_parallelism and ici_fsdp_parallelism",
    activations={"batch": BOTH, "experts": "model"},
    weights={"experts": "model", "embed": "data"},
    gathered={"experts": "model"},
)
EXPERTS_TENSOR = Expert(
    name="expert parallel x TP",
    source="Xu et al., GSPMD, 2021, section 5.4; Rajbhandari et al., DeepSpeed-MoE, 2022",
    activations={"batch": "data", "experts": "data", **_TENSOR},
    weights={"experts": "data", **_TENSOR},
)

_SERVED = {"batch": "data", "texts": "data", **_TENSOR}
DECODING = (
    Expert(
        name="Megatron",
        source="Pope et al., Efficiently Scaling Transformer Inference, 2022, section 3.2.1: 1D "
        "weight-stationary, texts over data",
        activations=_SERVED,
        weights=_TENSOR,
    ),
    Expert(
        name="2D weight-stationary",
        source="Pope et al., 2022, sections 3.2.2 and 3.3: the residual stream is split over "
        "width, attention over texts",
        activations={"embed": "data", "texts": "data", **_TENSOR},
        weights={"embed": "data", **_TENSOR},
    ),
    Expert(
        name="2D weight-stationary, attention over texts",
        source="Pope et al., 2022, section 3.3: multiquery attention over texts",
        activations={"embed": "data", "texts": BOTH, "hidden": "model", "vocab": "model"},
        weights={"embed": "data", **_TENSOR},
    ),
    Expert(
        name="weight-gathered",
        source="Pope et al., 2022, section 3.2.3; FSDP",
        activations={"batch": BOTH, "texts": BOTH},
        weights={"embed": BOTH},
        gathered={},
    ),
    Expert(
        name="keys over model",
        source="Dao et al., Flash-Decoding for long-context inference, 2023: keys and values are "
        "split by length",
        activations={
            "batch": "data",
            "texts": "data",
            "keys": "model",
            "hidden": "model",
            "vocab": "model",
        },
        weights=_TENSOR,
    ),
)

CONVOLUTIONS = (
    DATA,
    dataclasses.replace(ZERO1, state={"in": BOTH, "out": BOTH}),
    dataclasses.replace(FSDP, weights={"in": BOTH, "out": BOTH}),
    Expert(
        name="channels",
        source="Dryden et al., Channel and Filter Parallelism for Large-Scale CNN Training, 2019",
        activations={"batch": "data", "channels": "model"},
        weights={"out": "model"},
    ),
    Expert(
        name="spatial",
        source="Xu et al., GSPMD, 2021, section 5.6: images are split over their height",
        activations={"batch": "data", "height": "model"},
        weights={},
    ),
)
