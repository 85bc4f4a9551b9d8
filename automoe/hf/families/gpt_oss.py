"""GPT-OSS (arXiv 2508.10925): keys of ``config.json``, and tensor names.

Checkpoints are published in MXFP4, which the reader dequantizes.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from automoe.hf.families.family import BALANCED, COMMON_FIELDS, Family, Field, layer_types
from automoe.hf.families.mixtral import FAMILY as MIXTRAL
from automoe.hf.keys import DOWN, GATE_UP, ROUTER, KeyMap

_KEYS = KeyMap(
    {ROUTER: ROUTER, "mlp.router.bias": "mlp.router.bias"}
    | {GATE_UP: f"{GATE_UP} [E L I*2]", DOWN: f"{DOWN} [E I L]"}
    | {f"{GATE_UP}_bias": f"{GATE_UP}_bias [E I*2]"}
)

FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=COMMON_FIELDS
    | {
        "num_experts": "num_local_experts",
        "moe_intermediate_size": "intermediate_size",  # there are no dense layers
        "swiglu_alpha": Field("swiglu_alpha", 1.702),
        "swiglu_limit": Field("swiglu_limit", 7.0),
        "attention.head_dim": "head_dim",
        "attention.qkv_bias": "attention_bias",
        "attention.o_bias": "attention_bias",
        "attention.full_attention_interval": layer_types("sliding_attention"),
        "attention.sliding_window": Field(
            # 0 if no layer has a window, whatever config.json says. Written back as 128, since
            # transformers makes a mask of this size even then.
            "sliding_window",
            read=lambda keys, hf_config: (
                (keys or 0) * ("sliding_attention" in hf_config.layer_types)
            ),
            write=lambda keys, config: keys or 128,
        ),
    },
    fixed=MIXTRAL.fixed
    | {
        "attention.sinks": True,
        "biased_experts": True,
        "expert_activation": "clamped_swiglu",
        "swiglu_offset": 1.0,
        "router.softmax_after_topk": True,
        "router.logit_bias": True,
    },
    written={"hidden_act": "silu"},  # transformers does not read it
    unread=BALANCED
    | {"router_aux_loss_coef": 0.9, "experts_per_token": attrgetter("num_experts_per_token")}
    | {"initial_context_length": attrgetter("rope.original_seq_len")},
    keys=replace(_KEYS, layouts=(_KEYS,)),
    scaled_unless_said=True,
)
