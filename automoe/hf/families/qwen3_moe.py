"""Qwen3-MoE (arXiv 2505.09388): ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import Family, Field, common_fields, head_dim, leading_dense

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=common_fields(norm_eps=1e-6)
    | {
        "num_experts": Field("num_experts", aliases=("num_local_experts",)),
        "moe_intermediate_size": Field("moe_intermediate_size"),
        "first_k_dense": Field(
            "mlp_only_layers", None, read=leading_dense, write=lambda count, config: list(range(count))
        ),
        "attention.head_dim": Field("head_dim", None, read=head_dim),
        "router.norm_topk_prob": Field("norm_topk_prob", False),
    },
    fixed={
        "attention.kind": "gqa",
        "attention.qk_norm": True,
        "num_shared_experts": 0,
        "rope.interleaved": False,
        "router.score": "softmax",
        "router.expert_bias": False,
        "router.num_groups": 1,
        "router.routed_scaling_factor": 1.0,
    },
    only={
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
    },
)
