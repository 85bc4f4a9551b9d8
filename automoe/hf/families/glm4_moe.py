"""GLM-4.5 and 4.6 (arXiv 2508.06471): ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import (
    COMMON_FIELDS,
    GQA,
    GROUPED_MOE,
    GROUPED_ROUTER,
    HEAD_DIM,
    MTP,
    Family,
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
)
