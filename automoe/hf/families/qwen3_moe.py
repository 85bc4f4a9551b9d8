"""Qwen3-MoE (arXiv 2505.09388): ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import GQA, HEAD_DIM, LEADING_DENSE, SOFTMAX_ROUTER, Family, Field, common_fields

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=common_fields(norm_eps=1e-6)
    | {
        "num_experts": Field("num_experts", aliases=("num_local_experts",)),
        "moe_intermediate_size": Field("moe_intermediate_size"),
        "first_k_dense": LEADING_DENSE,
        "attention.head_dim": HEAD_DIM,
        "router.norm_topk_prob": Field("norm_topk_prob", False),
    },
    fixed=GQA | SOFTMAX_ROUTER | {"attention.qk_norm": True, "num_shared_experts": 0},
    only={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1},
)
