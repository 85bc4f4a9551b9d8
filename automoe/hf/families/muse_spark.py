"""The text model of Muse-Spark: keys of ``config.json``, and tensor names."""

from __future__ import annotations

from automoe.hf.families.family import (
    BALANCED,
    COMMON_FIELDS,
    GQA,
    HIDDEN_ACT,
    Family,
    Field,
    named,
    rope_parameters,
)
from automoe.hf.families.glm4_moe import LITE
from automoe.hf.families.gpt_oss import FAMILY as GPT_OSS
from automoe.hf.families.layers import NOPE_FULL, window_layers
from automoe.hf.keys import FUSED, KeyMap

_INTERVAL, _OFFSET = "full_attention_interval", "full_attention_offset"
_NAMES = {
    "post_attention_layernorm.weight": "pre_feedforward_layernorm.weight",
    "attn_residual.gate": "post_attention_residual_gate.gate",
    "ffn_residual.gate": "post_feedforward_residual_gate.gate",
}

FAMILY = Family(
    model_type="muse_spark_text",
    architecture="MuseSparkForConditionalGeneration",
    fields=COMMON_FIELDS
    | named("num_experts=num_local_experts attention.head_dim attention.qk_scale_factor")
    | named("attention.qkv_bias=attention_bias attention.o_bias=attention_bias")
    | named("moe_latent_size=moe_hidden_size post_norm_eps residual_gate_temperature")
    | named("final_logit_softcapping router.logit_scale=output_multiplier")
    | named("router.routed_scaling_factor")
    | {
        "hidden_act": HIDDEN_ACT,
        "logits_scaling": Field(
            "output_multiplier",
            read=lambda factor, hf: 1 / factor,
            write=lambda _, config: config.router.logit_scale,
        ),
        "first_k_dense": LITE.fields["first_k_dense"],
        f"attention.{_INTERVAL}": window_layers(_INTERVAL),
        f"attention.{_OFFSET}": window_layers(_OFFSET),
        "attention.nope_full_attention": NOPE_FULL,
        "attention.sliding_window": GPT_OSS.fields["attention.sliding_window"],
    },
    fixed=GQA
    | {"attention.qk_norm": True, "attention.output_gate": True, "num_shared_experts": 0}
    | {"attention.split_output_gate": True, "attention.output_norm": True, "embedding_norm": True}
    | {"zero_centered_norms": True, "plain_final_norm": True, "tie_embeddings": False}
    | {"router.score": "sigmoid", "router.norm_topk_prob": True, "router.num_groups": 1}
    | {"router.expert_bias": True},
    only={"tie_word_embeddings": False},
    written={"rope_parameters": rope_parameters},
    unread=BALANCED,
    keys=KeyMap(FUSED.rows | _NAMES),
)
