"""DeepSeek-V3 (arXiv 2412.19437), Moonlight and Kimi-K2: ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import GROUPED_ROUTER, Family, Field, common_fields

FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=common_fields(norm_eps=1e-6)
    | {
        "num_experts": Field("n_routed_experts", aliases=("num_local_experts",)),
        "num_shared_experts": Field("n_shared_experts"),
        "first_k_dense": Field("first_k_dense_replace"),
        "attention.q_lora_rank": Field("q_lora_rank"),
        "attention.kv_lora_rank": Field("kv_lora_rank"),
        "attention.qk_nope_head_dim": Field("qk_nope_head_dim"),
        "attention.qk_rope_head_dim": Field("qk_rope_head_dim"),
        "attention.v_head_dim": Field("v_head_dim"),
        "rope.interleaved": Field("rope_interleave", True),
        "router.norm_topk_prob": Field("norm_topk_prob", True),
        "router.routed_scaling_factor": Field("routed_scaling_factor"),
        "router.num_groups": Field("n_group", 8),
        "router.topk_groups": Field("topk_group", 4),
    },
    fixed=GROUPED_ROUTER | {"attention.kind": "mla"},
    only={
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    written={"num_nextn_predict_layers": 0},  # MTP modules are neither read nor written
    mscale=True,
    known_as=("kimi_k2",),
)
