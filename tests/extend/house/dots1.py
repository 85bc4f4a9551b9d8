"""dots.llm1 (arXiv 2506.05767): grouped-query attention with normed heads, DeepSeek-V3's router and shared experts."""

from automoe.hf.families.family import (
    COMMON_FIELDS,
    FULL_ATTENTION,
    GQA,
    GROUPED_ROUTER,
    HEAD_DIM,
    LEADING_DENSE,
    Family,
    Field,
)

FAMILY = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    fields=COMMON_FIELDS
    | FULL_ATTENTION
    | {
        "num_experts": Field("n_routed_experts"),
        "num_shared_experts": Field("n_shared_experts"),
        "first_k_dense": LEADING_DENSE,
        "attention.head_dim": HEAD_DIM,
        "attention.qkv_bias": Field("attention_bias"),
        "router.norm_topk_prob": Field("norm_topk_prob"),
        "router.routed_scaling_factor": Field("routed_scaling_factor"),
        "router.num_groups": Field("n_group"),
        "router.topk_groups": Field("topk_group"),
    },
    fixed=GQA | GROUPED_ROUTER | {"attention.qk_norm": True, "attention.full_attention_interval": 1},
    only={"hidden_act": "silu"},
)
