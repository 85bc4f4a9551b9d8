"""MiniMax-M2 and M2.1: keys of ``config.json``, and tensor names."""

from __future__ import annotations

from automoe.hf.families import mixtral
from automoe.hf.families.family import BALANCED, COMMON_FIELDS, GQA, Family
from automoe.hf.keys import FUSED, KeyMap

_BIAS = "mlp.router.expert_bias"

FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fields=COMMON_FIELDS
    | {
        "num_experts": "num_local_experts",
        "moe_intermediate_size": "intermediate_size",  # there are no dense layers
        "attention.head_dim": "head_dim",
    },
    fixed=GQA
    | {
        "attention.qk_norm": True,
        "attention.qk_norm_over_heads": True,
        "attention.qkv_bias": False,
        "first_k_dense": 0,
        "num_shared_experts": 0,
        "router.score": "sigmoid",
        "router.expert_bias": True,
        "router.num_groups": 1,
        "router.norm_topk_prob": True,
        "router.routed_scaling_factor": 1.0,
    },
    only={"hidden_act": "silu", "router_jitter_noise": 0.0},
    written={
        "shared_intermediate_size": 0,
        # servers take other values, or none, for granted; transformers reads none of these
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "rotary_dim": lambda config: round(
            config.rope.partial_rotary_factor * config.attention.head_dim
        ),
    },
    unread=BALANCED
    | {"attn_type_list": lambda config: [1] * config.num_layers}
    | {"use_mtp": False, "num_mtp_modules": 0, "mtp_transformer_layers": 1},
    keys=KeyMap(
        mixtral.FAMILY.keys.rows | {_BIAS: "block_sparse_moe.e_score_correction_bias"},
        layouts=(KeyMap(FUSED.rows | {_BIAS: "mlp.e_score_correction_bias"}),),
    ),
    partial_rotary=True,
)
