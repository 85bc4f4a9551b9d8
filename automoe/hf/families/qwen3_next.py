"""Qwen3-Next: ``config.json`` and key map. Its multi-token-prediction module is neither read nor written."""

from __future__ import annotations

from automoe.hf.families.family import (
    GQA,
    LEADING_DENSE,
    SHARED_EXPERTS,
    SOFTMAX_ROUTER,
    Family,
    Field,
    common_fields,
    layer_types,
)
from automoe.hf.keys import KeyMap

FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=common_fields(norm_eps=1e-6)
    | {
        "num_experts": Field("num_experts", aliases=("num_local_experts",)),
        "moe_intermediate_size": Field("moe_intermediate_size"),
        "num_shared_experts": SHARED_EXPERTS,
        "first_k_dense": LEADING_DENSE,
        "attention.head_dim": Field("head_dim", 256),
        "attention.full_attention_interval": layer_types("linear_attention", 4),
        "attention.linear_num_key_heads": Field("linear_num_key_heads", 16),
        "attention.linear_num_value_heads": Field("linear_num_value_heads", 32),
        "attention.linear_key_head_dim": Field("linear_key_head_dim", 128),
        "attention.linear_value_head_dim": Field("linear_value_head_dim", 128),
        "attention.linear_conv_kernel_dim": Field("linear_conv_kernel_dim", 4),
        "router.norm_topk_prob": Field("norm_topk_prob", True),
    },
    fixed=GQA
    | SOFTMAX_ROUTER
    | {
        "attention.qk_norm": True,
        "attention.output_gate": True,
        "attention.sliding_window": 0,
        "shared_expert_gate": True,
        "zero_centered_norms": True,
    },
    only={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1},
    keys=KeyMap(shared_experts="mlp.shared_expert"),
    partial_rotary=0.25,
)
