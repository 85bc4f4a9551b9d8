"""Qwen2-MoE (arXiv 2407.10671): ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import (
    GQA,
    HEAD_DIM,
    LEADING_DENSE,
    SHARED_EXPERTS,
    SOFTMAX_ROUTER,
    Family,
    Field,
    common_fields,
)
from automoe.hf.keys import KeyMap

FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=common_fields(norm_eps=1e-6)
    | {
        "num_experts": Field("num_experts", aliases=("num_local_experts",)),
        "moe_intermediate_size": Field("moe_intermediate_size"),
        "num_shared_experts": SHARED_EXPERTS,
        "first_k_dense": LEADING_DENSE,
        "attention.head_dim": HEAD_DIM,
        "attention.qkv_bias": Field("qkv_bias", True),
        "router.norm_topk_prob": Field("norm_topk_prob", False),
    },
    fixed=GQA | SOFTMAX_ROUTER | {"attention.qk_norm": False, "shared_expert_gate": True},
    only={"hidden_act": "silu", "use_sliding_window": False, "decoder_sparse_step": 1},
    keys=KeyMap(shared_experts="mlp.shared_expert"),
)
