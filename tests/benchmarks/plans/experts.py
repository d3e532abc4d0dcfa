"""Layouts that the field knows by name, on the mesh axes ``data`` and ``model``.

Each is a table of logical axes, as MaxText writes them: see `logical`.
"""

from __future__ import annotations

import dataclasses

from .logical import Expert

BOTH = ("data", "model")
_TENSOR = dict.fromkeys(("heads", "kv_heads", "hidden", "vocab"), "model")

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
