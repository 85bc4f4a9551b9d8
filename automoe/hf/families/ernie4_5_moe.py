"""ERNIE 4.5 (21B-A3B and 300B-A47B, text): keys of ``config.json``, and tensor names."""

from __future__ import annotations

from typing import Any

from automoe.hf.families.as_transformers import not_computed
from automoe.hf.families.family import (
    BALANCED,
    COMMON_FIELDS,
    HEAD_DIM,
    SOFTMAX_ROUTER,
    Family,
    Field,
    named,
)
from automoe.hf.keys import FUSED, KeyMap

_BIAS, _STORED = "mlp.router.expert_bias", "moe_statics.e_score_correction_bias [1 E]"


def _read_start(first: int, hf: Any) -> int:
    """Return ``first``, the number of dense layers; raise ``ConfigError`` if dense layers follow
    layers with experts.
    """
    if hf.moe_layer_end_index is None or hf.moe_layer_end_index < hf.num_hidden_layers - 1:
        said = f"moe_layer_end_index={hf.moe_layer_end_index} of {hf.num_hidden_layers} layers"
        raise not_computed(
            hf.name_or_path, f"{said}, and layers without experts here come before all others"
        )
    return max(0, min(first, hf.num_hidden_layers))


FAMILY = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    fields=COMMON_FIELDS
    | named("num_experts=moe_num_experts num_experts_per_token=moe_k")
    | named("num_shared_experts=moe_num_shared_experts")
    | {
        "first_k_dense": Field("moe_layer_start_index", read=_read_start),
        "attention.head_dim": HEAD_DIM,
    },
    fixed=SOFTMAX_ROUTER
    | {"router.expert_bias": True, "router.norm_topk_prob": True}
    | {"attention.kind": "gqa", "attention.qk_norm": False, "rope.interleaved": True},
    only={"hidden_act": "silu", "use_bias": False, "moe_layer_interval": 1, "moe_norm_min": 1e-12},
    written={"moe_layer_end_index": lambda config: config.num_layers - 1}
    | {"moe_use_aux_free": True, "num_nextn_predict_layers": 0},
    unread=BALANCED,
    keys=KeyMap(
        {_BIAS: f"mlp.{_STORED}"},
        layouts=(KeyMap(FUSED.rows | {_BIAS: f"mlp.gate.{_STORED}"}),),
        unread=(r"model\.mtp.*",),
    ),
)
