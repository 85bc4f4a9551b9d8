"""GPT-OSS (arXiv 2508.10925): ``config.json`` and key map. Published in MXFP4, which the reader undoes."""

from __future__ import annotations

from dataclasses import replace

from automoe.hf.families.family import Family, Field, HFConfig, common_fields, layer_types
from automoe.hf.families.mixtral import FAMILY as MIXTRAL
from automoe.hf.keys import FUSED


def _window(keys: int | None, hf: HFConfig) -> int:
    """None where no layer has one, whatever number config.json gives."""
    kinds = hf.get("layer_types")
    return 0 if kinds is not None and "sliding_attention" not in kinds else keys or 0


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=common_fields(norm_eps=1e-5)
    | {
        "num_experts": Field("num_local_experts", aliases=("num_experts",)),
        "moe_intermediate_size": Field("intermediate_size"),  # there are no dense layers
        "swiglu_alpha": Field("swiglu_alpha", 1.702),
        "swiglu_limit": Field("swiglu_limit", 7.0),
        "attention.head_dim": Field("head_dim", 64),
        "attention.qkv_bias": Field("attention_bias", True),
        "attention.o_bias": Field("attention_bias", True),
        "attention.full_attention_interval": layer_types("sliding_attention", 2),
        "attention.sliding_window": Field(
            # transformers makes a mask of it even where no layer has a window.
            "sliding_window",
            128,
            read=_window,
            write=lambda keys, config: keys or 128,
        ),
    },
    fixed=MIXTRAL.fixed
    | {
        "attention.sinks": True,
        "biased_experts": True,
        "expert_activation": "clamped_swiglu",
        "router.softmax_after_topk": True,
        "router.logit_bias": True,
    },
    only={"hidden_act": "silu"},
    keys=replace(FUSED, router="mlp.router.weight", router_bias="mlp.router.bias", transposed=True),
    rope_theta=150000.0,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
)
