"""GLM-4.5 and 4.6 (arXiv 2508.06471): ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import (
    COMMON_FIELDS,
    GQA,
    GROUPED_ROUTER,
    HEAD_DIM,
    LEADING_DENSE,
    Family,
)

FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=COMMON_FIELDS
    | {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "first_k_dense": LEADING_DENSE,
        "attention.head_dim": HEAD_DIM,
        "attention.qk_norm": "use_qk_norm",
        "attention.qkv_bias": "attention_bias",
        "router.norm_topk_prob": "norm_topk_prob",
        "router.routed_scaling_factor": "routed_scaling_factor",
        "router.num_groups": "n_group",
        "router.topk_groups": "topk_group",
    },
    fixed=GQA | GROUPED_ROUTER,
    only={"hidden_act": "silu"},
    written={"num_nextn_predict_layers": 0},  # MTP modules are neither read nor written
    partial_rotary=True,
)
