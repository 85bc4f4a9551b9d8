"""GLM-4.5 and 4.6 (arXiv 2508.06471), and GLM-4.7-Flash: keys of ``config.json``, and tensor names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from automoe.hf.families import deepseek_v3
from automoe.hf.families.as_transformers import not_computed
from automoe.hf.families.family import (
    COMMON_FIELDS,
    GQA,
    GROUPED_LEAST,
    GROUPED_MOE,
    GROUPED_ROUTER,
    HEAD_DIM,
    MTP,
    Family,
    Field,
)

FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=COMMON_FIELDS
    | GROUPED_MOE
    | MTP
    | {
        "attention.head_dim": HEAD_DIM,
        "attention.qk_norm": "use_qk_norm",
        "attention.qkv_bias": "attention_bias",
    },
    fixed=GQA | GROUPED_ROUTER,
    only={"hidden_act": "silu"},
    partial_rotary=True,
    least=GROUPED_LEAST,
)


def _kinds(dense: int, num_layers: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (num_layers - dense)


def _read_leading_dense(kinds: list[str], hf_config: Any) -> int:
    """Return the number of dense layers; raise ``ConfigError`` unless they come before all others.

    Args:
        kinds: ``mlp_layer_types``: dense or sparse, per layer.
        hf_config: transformers' configuration object.
    """
    dense = kinds.count("dense")
    if kinds != _kinds(dense, hf_config.num_hidden_layers):
        raise not_computed(
            hf_config.name_or_path,
            f"mlp_layer_types={kinds}, and layers without experts here come before all others",
        )
    return dense


# GLM-4.7-Flash has the attention and experts of DeepSeek-V3.
LITE = replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    fields=deepseek_v3.FAMILY.fields
    | {
        "first_k_dense": Field(
            "mlp_layer_types",
            read=_read_leading_dense,
            write=lambda dense, config: _kinds(dense, config.num_layers),
        )
    },
    written={"first_k_dense_replace": lambda config: config.first_k_dense},
    known_as=(),
)
