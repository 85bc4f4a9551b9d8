"""Mixtral (arXiv 2401.04088): keys of ``config.json``, and tensor names."""

from __future__ import annotations

from automoe.hf.families.family import (
    BALANCED,
    COMMON_FIELDS,
    GQA,
    HEAD_DIM,
    SOFTMAX_ROUTER,
    Family,
)
from automoe.hf.keys import DOWN, GATE_UP, ROUTER, KeyMap

_EXPERT = "block_sparse_moe.experts.{expert}"

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=COMMON_FIELDS
    | {
        "num_experts": "num_local_experts",
        "moe_intermediate_size": "intermediate_size",  # there are no dense layers
        "attention.head_dim": HEAD_DIM,
    },
    fixed=GQA
    | SOFTMAX_ROUTER
    | {
        "attention.qk_norm": False,
        "first_k_dense": 0,
        "num_shared_experts": 0,
        "router.norm_topk_prob": True,
    },
    only={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
    unread=BALANCED,
    keys=KeyMap(
        {
            ROUTER: "block_sparse_moe.gate.weight",
            GATE_UP: f"{_EXPERT}.w1.weight {_EXPERT}.w3.weight",
            DOWN: f"{_EXPERT}.w2.weight",
        }
    ),
)
