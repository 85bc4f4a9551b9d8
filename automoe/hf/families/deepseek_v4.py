"""DeepSeek-V4: keys of ``config.json``, and tensor names."""

from __future__ import annotations

from operator import attrgetter

from automoe.hf.families.deepseek_v4_layers import KEYS, LAYERS, rotation
from automoe.hf.families.family import BALANCED, COMMON_FIELDS, Family, named

FAMILY = Family(
    model_type="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    fields={key: spec for key, spec in COMMON_FIELDS.items() if key != "intermediate_size"}
    | named(
        "num_experts=n_routed_experts router.routed_scaling_factor swiglu_limit attention.head_dim"
    )
    | named(
        "attention.q_lora_rank attention.o_groups attention.o_lora_rank attention.sliding_window"
    )
    | named("attention.index_topk attention.index_n_heads attention.index_head_dim")
    | named("hc_mult hc_sinkhorn_iters hc_eps")
    | LAYERS,
    fixed={
        "attention.kind": "compressed",
        "attention.num_kv_heads": 1,
        "attention.sinks": True,
        "rope.interleaved": True,
        "rope.truncate": True,
        "first_k_dense": 0,
        "tie_embeddings": False,
        "num_shared_experts": 1,
        "expert_activation": "clamped_swiglu",
        "swiglu_alpha": 1.0,
        "swiglu_offset": 0.0,
        "router.score": "sqrt_softplus",
        "router.expert_bias": True,
        "router.norm_topk_prob": True,
        "router.num_groups": 1,
    },
    only={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "scoring_func": "sqrtsoftplus",
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    written={
        # one more, for the module for multi-token prediction
        "compress_ratios": lambda config: [*config.attention.compress_ratios, 0],
        "num_hash_layers": attrgetter("router.num_hash_layers"),
    },
    unread=BALANCED | {"num_nextn_predict_layers": 0, "topk_method": "noaux_tc"},
    keys=KEYS,
    rotation=rotation,
)
