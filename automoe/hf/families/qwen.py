"""Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE and dense Qwen3 (arXiv 2505.09388), Qwen3-Next: ``config.json`` and key maps.

Qwen3-Next's multi-token-prediction module is neither read nor written.
"""

from __future__ import annotations

from automoe.hf.families.family import (
    GQA,
    HEAD_DIM,
    SOFTMAX_ROUTER,
    Family,
    Field,
    HFConfig,
    common_fields,
    dense_fields,
    layer_types,
    not_computed,
)
from automoe.hf.keys import KeyMap


def _read_leading_dense(layers: list[int] | None, hf: HFConfig) -> int:
    """How many layers ``mlp_only_layers`` makes dense; this decoder has them before all others.

    Raises:
        ConfigError: they are elsewhere.
    """
    layers = layers or []
    if sorted(layers) != list(range(len(layers))):
        rule = f"mlp_only_layers={layers}, and dense layers here come before all others"
        raise not_computed(hf["model_type"], rule)
    return len(layers)


def _read_num_shared(width: int, hf: HFConfig) -> int:
    """Shared experts: the width of the shared FFN in routed ones."""
    unit = hf["moe_intermediate_size"]
    if width % unit:
        raise not_computed(
            hf["model_type"],
            f"shared_expert_intermediate_size={width}, and the shared FFN here is a "
            f"multiple of moe_intermediate_size={unit}: {width} % {unit} = {width % unit}",
        )
    return width // unit


_ATTENTION = GQA | {"attention.qk_norm": True}
_LAYERS = {
    "first_k_dense": Field("mlp_only_layers", None, read=_read_leading_dense, write=lambda n, config: list(range(n))),
    "attention.head_dim": HEAD_DIM,
}
_SHARED_EXPERTS = {
    "num_shared_experts": Field(
        "shared_expert_intermediate_size",
        read=_read_num_shared,
        write=lambda count, config: count * config.moe_intermediate_size,
    )
}

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=common_fields(norm_eps=1e-6)
    | _SHARED_EXPERTS
    | _LAYERS
    | {"attention.qkv_bias": Field("qkv_bias", True), "router.norm_topk_prob": Field("norm_topk_prob", False)},
    fixed=GQA | SOFTMAX_ROUTER | {"attention.qk_norm": False, "shared_expert_gate": True},
    only={"hidden_act": "silu", "use_sliding_window": False, "decoder_sparse_step": 1},
    keys=KeyMap(shared_experts="mlp.shared_expert"),
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=common_fields(norm_eps=1e-6) | _LAYERS | {"router.norm_topk_prob": Field("norm_topk_prob", False)},
    fixed=_ATTENTION | SOFTMAX_ROUTER | {"num_shared_experts": 0},
    only={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1},
)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=common_fields(norm_eps=1e-6)
    | _SHARED_EXPERTS
    | _LAYERS
    | {
        "attention.head_dim": Field("head_dim", 256),
        "attention.full_attention_interval": layer_types("linear_attention", 4),
        "attention.linear_num_key_heads": Field("linear_num_key_heads", 16),
        "attention.linear_num_value_heads": Field("linear_num_value_heads", 32),
        "attention.linear_key_head_dim": Field("linear_key_head_dim", 128),
        "attention.linear_value_head_dim": Field("linear_value_head_dim", 128),
        "attention.linear_conv_kernel_dim": Field("linear_conv_kernel_dim", 4),
        "router.norm_topk_prob": Field("norm_topk_prob", True),
    },
    fixed=_ATTENTION
    | SOFTMAX_ROUTER
    | {
        "attention.output_gate": True,
        "attention.sliding_window": 0,
        "shared_expert_gate": True,
        "zero_centered_norms": True,
    },
    only={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1},
    keys=KeyMap(shared_experts="mlp.shared_expert"),
    partial_rotary=0.25,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=dense_fields(norm_eps=1e-6) | {"attention.head_dim": Field("head_dim", 128)},
    fixed=_ATTENTION,
    only={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    dense=True,
)
