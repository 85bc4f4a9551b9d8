"""Qwen2-MoE, Qwen3-MoE, dense Qwen3, Qwen3-Next and Qwen3.5-MoE: ``config.json`` and tensor names.

Qwen2-MoE is described in arXiv 2407.10671, Qwen3 in arXiv 2505.09388.

Multi-token-prediction modules of Qwen3-Next and Qwen3.5 are copied, not trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from automoe.hf.families.as_transformers import not_computed
from automoe.hf.families.family import (
    BALANCED,
    COMMON_FIELDS,
    DENSE_FIELDS,
    FULL_ATTENTION,
    GQA,
    HEAD_DIM,
    SOFTMAX_ROUTER,
    WINDOWS,
    Family,
    Field,
    layer_types,
    named,
    rope_parameters,
)
from automoe.hf.keys import FUSED, KeyMap


def _read_leading_dense(listed: list[int], hf_config: Any) -> int:
    """Return the number of layers without experts, which must come before all others here.

    Args:
        listed: ``mlp_only_layers``: indices of layers without experts. Layers that
            ``decoder_sparse_step`` skips have none either.
        hf_config: transformers' configuration object.

    Raises:
        ConfigError: layers without experts follow layers with experts.
    """
    step = hf_config.decoder_sparse_step
    dense = [
        layer
        for layer in range(hf_config.num_hidden_layers)
        if layer in listed or (layer + 1) % step
    ]
    if dense != list(range(len(dense))):
        said = f"mlp_only_layers={listed} and decoder_sparse_step={step}"
        raise not_computed(
            hf_config.name_or_path,
            f"{said}, and layers without experts here come before all others",
        )
    return len(dense)


def _num_shared(width: int, hf_config: Any) -> int:
    """Return the shared FFN's width divided by that of a routed expert: a number of shared experts.

    ``width`` is the shared FFN's, ``hf_config`` transformers' configuration object. If the division
    leaves a remainder, the result is 1: one shared expert with a width of its own.
    """
    count, rest = divmod(width, hf_config.moe_intermediate_size)
    return 1 if rest else count


_ATTENTION = GQA | {"attention.qk_norm": True}
_LAYERS = {
    "first_k_dense": Field(
        "mlp_only_layers", read=_read_leading_dense, write=lambda n, config: list(range(n))
    ),
    "attention.head_dim": HEAD_DIM,
}
_SHARED_EXPERTS = {
    "num_shared_experts": Field("shared_expert_intermediate_size", read=_num_shared),
    "shared_intermediate_size": Field(
        "shared_expert_intermediate_size",
        read=lambda width, hf_config: width if width % hf_config.moe_intermediate_size else 0,
        write=lambda width, config: config.shared_width,
    ),
}
_SHARED_ROWS = {
    f"mlp.shared_experts.{name}_proj.weight": f"mlp.shared_expert.{name}_proj.weight"
    for name in ("gate", "up", "down")
}
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=COMMON_FIELDS
    | _SHARED_EXPERTS
    | _LAYERS
    | FULL_ATTENTION
    | {"attention.qkv_bias": "qkv_bias", "router.norm_topk_prob": "norm_topk_prob"},
    fixed=GQA
    | SOFTMAX_ROUTER
    | {"attention.full_attention_interval": 1}
    | {"attention.qk_norm": False, "shared_expert_gate": True},
    only={"hidden_act": "silu"},
    written={"use_sliding_window": False, "decoder_sparse_step": 1},
    unread=BALANCED | WINDOWS,
    keys=KeyMap(_SHARED_ROWS),
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=COMMON_FIELDS | _LAYERS | {"router.norm_topk_prob": "norm_topk_prob"},
    fixed=_ATTENTION | SOFTMAX_ROUTER | {"num_shared_experts": 0},
    only={"hidden_act": "silu", "attention_bias": False, "sliding_window": None},
    written={"use_sliding_window": False, "decoder_sparse_step": 1},
    # the last three are of Qwen3-Coder
    unread=BALANCED
    | WINDOWS
    | {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=COMMON_FIELDS
    | _SHARED_EXPERTS
    | _LAYERS
    | {
        "attention.head_dim": "head_dim",
        "attention.full_attention_interval": layer_types("linear_attention"),
    }
    | named(
        "attention.linear_num_key_heads attention.linear_num_value_heads attention.linear_key_head_dim "
        "attention.linear_value_head_dim attention.linear_conv_kernel_dim router.norm_topk_prob"
    ),
    fixed=_ATTENTION
    | SOFTMAX_ROUTER
    | {
        "attention.output_gate": True,
        "attention.sliding_window": 0,
        "shared_expert_gate": True,
        "zero_centered_norms": True,
    },
    only={"hidden_act": "silu", "attention_bias": False},
    written={
        "decoder_sparse_step": 1,
        "full_attention_interval": lambda config: config.attention.full_attention_interval,
    },
    unread=BALANCED | {"use_sliding_window": False},
    keys=KeyMap(_SHARED_ROWS),
    partial_rotary=True,
)

# The text model of Qwen3.5 and 3.6: weights of a token's experts always sum to one, and every layer
# has experts.
_IN_NEXT_ALONE = ("first_k_dense", "intermediate_size", "router.norm_topk_prob")
QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields={key: spec for key, spec in QWEN3_NEXT.fields.items() if key not in _IN_NEXT_ALONE},
    fixed=QWEN3_NEXT.fixed
    | {"first_k_dense": 0, "router.norm_topk_prob": True}
    | {"attention.linear_split_projections": True},
    written=QWEN3_NEXT.written | {"rope_parameters": rope_parameters},
    unread=QWEN3_NEXT.unread
    | {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    | {"mtp_num_hidden_layers": 0, "mtp_use_dedicated_embeddings": False},
    keys=KeyMap(FUSED.rows | _SHARED_ROWS),
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=DENSE_FIELDS | FULL_ATTENTION | {"attention.head_dim": "head_dim"},
    fixed=_ATTENTION | {"attention.full_attention_interval": 1},
    only={"hidden_act": "silu", "attention_bias": False},
    written={"use_sliding_window": False},
    unread=WINDOWS,
    dense=True,
)
