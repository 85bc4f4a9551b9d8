"""GLM-4.5 and 4.6 (arXiv 2508.06471): ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import (
    COMMON_FIELDS,
    GQA,
    GROUPED_ROUTER,
    HEAD_DIM,
    LEADING_DENSE,
    Family,
    Field,
)

FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=COMMON_FIELDS
    | {
        "num_experts": Field("n_routed_experts"),
        "num_shared_experts": Field("n_shared_experts"),
        "first_k_dense": LEADING_DENSE,
        "attention.head_dim": HEAD_DIM,
        "attention.qk_norm": Field("use_qk_norm"),
        "attention.qkv_bias": Field("attention_bias"),
        "router.norm_topk_prob": Field("norm_topk_prob"),
        "router.routed_scaling_factor": Field("routed_scaling_factor"),
        "router.num_groups": Field("n_group"),
        "router.topk_groups": Field("topk_group"),
    },
    fixed=GQA | GROUPED_ROUTER,
    only={"hidden_act": "silu"},
    written={"num_nextn_predict_layers": 0},  # MTP modules are neither read nor written
    partial_rotary=True,
)
