"""dots.llm1 (arXiv 2506.05767): grouped-query attention with normed heads, DeepSeek-V3's router and shared experts."""

from automoe.hf.families.family import GQA, GROUPED_ROUTER, HEAD_DIM, Family, Field, common_fields

FAMILY = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    fields=common_fields(norm_eps=1e-6)
    | {
        "num_experts": Field("n_routed_experts"),
        "moe_intermediate_size": Field("moe_intermediate_size", 1408),
        "num_shared_experts": Field("n_shared_experts"),
        "first_k_dense": Field("first_k_dense_replace", 0),
        "attention.head_dim": HEAD_DIM,
        "attention.qkv_bias": Field("attention_bias", False),
        "router.norm_topk_prob": Field("norm_topk_prob", False),
        "router.routed_scaling_factor": Field("routed_scaling_factor", 1.0),
        "router.num_groups": Field("n_group", 1),
        "router.topk_groups": Field("topk_group", 1),
    },
    fixed=GQA | GROUPED_ROUTER | {"attention.qk_norm": True},
    only={"hidden_act": "silu", "sliding_window": None},
)
