"""GLM-4.5 and 4.6 (arXiv 2508.06471): ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import GQA, GROUPED_ROUTER, HEAD_DIM, Family, Field, common_fields

FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=common_fields(norm_eps=1e-5)
    | {
        "num_experts": Field("n_routed_experts", aliases=("num_local_experts",)),
        "num_shared_experts": Field("n_shared_experts", 1),
        "first_k_dense": Field("first_k_dense_replace", 1),
        "attention.head_dim": HEAD_DIM,
        "attention.qk_norm": Field("use_qk_norm", False),
        "attention.qkv_bias": Field("attention_bias", False),
        "router.norm_topk_prob": Field("norm_topk_prob", True),
        "router.routed_scaling_factor": Field("routed_scaling_factor", 1.0),
        "router.num_groups": Field("n_group", 1),
        "router.topk_groups": Field("topk_group", 1),
    },
    fixed=GQA | GROUPED_ROUTER,
    only={"hidden_act": "silu"},
    written={"num_nextn_predict_layers": 0},  # MTP modules are neither read nor written
    partial_rotary=0.5,
)
