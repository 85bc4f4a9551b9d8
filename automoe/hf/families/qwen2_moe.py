"""Qwen2-MoE (arXiv 2407.10671): ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import (
    Family,
    Field,
    common_fields,
    head_dim,
    leading_dense,
    num_shared,
    shared_width,
)
from automoe.hf.keys import KeyMap

FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=common_fields(norm_eps=1e-6)
    | {
        "num_experts": Field("num_experts", aliases=("num_local_experts",)),
        "moe_intermediate_size": Field("moe_intermediate_size"),
        "num_shared_experts": Field("shared_expert_intermediate_size", read=num_shared, write=shared_width),
        "first_k_dense": Field(
            "mlp_only_layers", None, read=leading_dense, write=lambda count, config: list(range(count))
        ),
        "attention.head_dim": Field("head_dim", None, read=head_dim),
        "attention.qkv_bias": Field("qkv_bias", True),
        "router.norm_topk_prob": Field("norm_topk_prob", False),
    },
    fixed={
        "attention.kind": "gqa",
        "attention.qk_norm": False,
        "shared_expert_gate": True,
        "rope.interleaved": False,
        "router.score": "softmax",
        "router.expert_bias": False,
        "router.num_groups": 1,
        "router.routed_scaling_factor": 1.0,
    },
    only={"hidden_act": "silu", "use_sliding_window": False, "decoder_sparse_step": 1},
    keys=KeyMap(shared_experts="mlp.shared_expert"),
)
