"""Sizes of small models of every family, as keys of ``config.json``: what ``hf_models`` builds."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
_DSA: dict[str, Any] = {key: value for key, value in _MLA.items() if key != "first_k_dense_replace"} | {
    "mlp_layer_types": None,
    "first_k_dense_replace": 1,
    "index_topk": 6,
    "index_n_heads": 2,
    "index_head_dim": 12,
}
_QWEN: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
_MIXTRAL: dict[str, Any] = {
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_QWEN2: dict[str, Any] = {
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
_GLM: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
}
_DENSE: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 48}
_GPT_OSS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 6,
    "intermediate_size": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_theta": 150000.0,
}
_OLMOE: dict[str, Any] = {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}
_GRANITE: dict[str, Any] = {
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
}
_ERNIE: dict[str, Any] = {
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "tie_word_embeddings": False,
    "pad_token_id": None,  # its row of the embedding would get no gradient
}
_DSV4: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 3,
    "index_head_dim": 12,
    "index_topk": 3,
    "sliding_window": 6,
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "heavily_compressed", "compressed_sparse", "compressed_sparse")
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "num_nextn_predict_layers": 0,
}
_LONGCAT: dict[str, Any] = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "moe_topk": 3,
    "routed_scaling_factor": 2.5,
}
_MUSE: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 6,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "moe_hidden_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "layer_rope_theta": [0, 500.0, 500.0, 0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "final_logit_softcapping": 3.0,
    "output_multiplier": 0.7,
    "residual_gate_temperature": 3.0,  # of less, gates and sharp attention would blow rounding up
    "qk_scale_factor": 2.0,
}
_QWEN3_NEXT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    # A row's first token reads beta (q.k) v from the state: where q and k are almost orthogonal, less would
    # let the norm behind it blow rounding up.
    "rms_norm_eps": 1e-3,
}
_QWEN3_5 = {key: value for key, value in _QWEN3_NEXT.items() if key not in ("intermediate_size", "norm_topk_prob")}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name -> (model_type, keys of config.json besides the sizes above)
SMALL_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dsv3": ("deepseek_v3", _MLA),
    "dsv3_groups_yarn": (
        "deepseek_v3",
        _MLA
        | {"q_lora_rank": None, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
        | {"rope_theta": 50000.0, "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "dsv3_odd": (
        "deepseek_v3",
        _MLA
        | {"vocab_size": 101, "kv_lora_rank": 18, "intermediate_size": 37, "n_routed_experts": 6}
        | {"moe_intermediate_size": 20, "rms_norm_eps": 1e-5, "rope_interleave": False}
        | {"rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}, "norm_topk_prob": False},
    ),
    "qwen3_moe": ("qwen3_moe", _QWEN),
    "qwen3_moe_tied": ("qwen3_moe", _QWEN | {"tie_word_embeddings": True, "norm_topk_prob": False, "vocab_size": 101}),
    "qwen3_moe_yarn": (
        "qwen3_moe",
        _QWEN
        | {"rope_scaling": _YARN, "num_key_value_heads": 1}
        # Top-1 without renormalisation: with it, the router would have no gradient to compare.
        | {"num_experts_per_tok": 1, "norm_topk_prob": False}
        # A dense first layer, one expert more than any power of two.
        | {"mlp_only_layers": [0], "num_experts": 9, "head_dim": 8},
    ),
    "mixtral": ("mixtral", _MIXTRAL),
    "mixtral_odd": (
        "mixtral",
        _MIXTRAL | {"vocab_size": 97, "intermediate_size": 36, "num_local_experts": 5, "hidden_size": 40},
    ),
    "mixtral_tied": (
        "mixtral",
        _MIXTRAL
        | {"head_dim": 12, "num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 3}
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 500.0},
    ),
    # As Kimi-K2: one group, YaRN from one rotation on, a large factor on the routed experts; one of them a token.
    "kimi": (
        "deepseek_v3",
        _MLA
        | {"q_lora_rank": 12, "n_routed_experts": 12, "num_experts_per_tok": 1, "norm_topk_prob": False}
        | {"rope_theta": 50000.0, "routed_scaling_factor": 2.827, "num_attention_heads": 2}
        | {"rope_scaling": _YARN | {"beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "qwen2_moe": ("qwen2_moe", _QWEN2),
    "qwen2_moe_odd": (
        "qwen2_moe",
        _QWEN2
        | {"vocab_size": 101, "hidden_size": 40, "num_key_value_heads": 1, "num_experts": 5}
        | {"intermediate_size": 37, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
        | {"mlp_only_layers": [0], "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen2_moe_yarn": ("qwen2_moe", _QWEN2 | {"rope_scaling": _YARN, "qkv_bias": False, "num_experts": 4}),
    "glm4_moe": ("glm4_moe", _GLM),
    "glm4_moe_odd": (
        "glm4_moe",
        _GLM
        | {"vocab_size": 101, "hidden_size": 40, "head_dim": 20, "n_routed_experts": 6}
        | {"intermediate_size": 37, "moe_intermediate_size": 20, "n_shared_experts": 2}
        # What keys share cancels in a softmax but for the rotation: slow or few dims would leave the gradient
        # of their bias to rounding.
        | {"first_k_dense_replace": 2, "use_qk_norm": False, "partial_rotary_factor": 0.3, "rope_theta": 50.0},
    ),
    "glm4_moe_groups": (
        "glm4_moe",
        _GLM
        | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "norm_topk_prob": False}
        | {"attention_bias": False, "first_k_dense_replace": 0, "rope_scaling": _YARN},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {key: value for key, value in _MLA.items() if key != "first_k_dense_replace"}),
    "glm4_moe_lite_odd": (
        "glm4_moe_lite",
        {key: value for key, value in _MLA.items() if key != "first_k_dense_replace"}
        | {"vocab_size": 101, "kv_lora_rank": 18, "intermediate_size": 37, "n_routed_experts": 6, "q_lora_rank": None}
        | {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "rope_interleave": False}
        | {"rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}, "norm_topk_prob": False},
    ),
    "dsv32": ("deepseek_v32", _DSA),
    # Three heads, two keys a query, ties: of one head, every key with a negative product scores zero.
    "dsv32_odd": (
        "deepseek_v32",
        _DSA
        | {"vocab_size": 101, "kv_lora_rank": 18, "intermediate_size": 37, "n_routed_experts": 6}
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "index_topk": 2, "index_n_heads": 1}
        | {"index_head_dim": 8, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "norm_topk_prob": False}
        | {"rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}},
    ),
    "dsv32_all_keys": ("deepseek_v32", _DSA | {"index_topk": 4096, "num_hidden_layers": 2}),
    "glm_moe_dsa": ("glm_moe_dsa", _DSA | {"indexer_types": ["full"] * 4}),
    "glm_moe_dsa_shared": (
        "glm_moe_dsa",
        _DSA
        | {"indexer_types": ["full", "shared", "shared", "full"], "index_n_heads": 3, "index_topk": 3}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "rope_scaling": _YARN, "n_shared_experts": 2},
    ),
    "gpt_oss": ("gpt_oss", _GPT_OSS | {"rope_scaling": _YARN | {"truncate": False}}),
    # Every third layer is full; a limit that some gates and ups exceed.
    "gpt_oss_odd": (
        "gpt_oss",
        _GPT_OSS
        | {"vocab_size": 101, "hidden_size": 40, "head_dim": 10, "num_key_value_heads": 1, "sliding_window": 5}
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "swiglu_limit": 0.8, "swiglu_alpha": 1.3}
        | {"layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]}
        | {"rope_scaling": {"rope_type": "default"}, "tie_word_embeddings": True},
    ),
    "gpt_oss_full": (
        "gpt_oss",
        _GPT_OSS
        | {"num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 20, "num_hidden_layers": 2}
        | {"layer_types": ["full_attention"] * 2, "attention_bias": False}
        | {"rope_scaling": _YARN | {"truncate": False, "factor": 32.0}, "rope_theta": 50.0},
    ),
    "qwen3_next": ("qwen3_next", _QWEN3_NEXT),
    "qwen3_next_odd": (
        "qwen3_next",
        _QWEN3_NEXT
        | {"vocab_size": 101, "hidden_size": 40, "num_key_value_heads": 1, "num_experts": 5, "head_dim": 20}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 13}
        | {"linear_value_head_dim": 7, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-2}
        | {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 24}
        | {"mlp_only_layers": [0], "intermediate_size": 37}
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "partial_rotary_factor": 0.5}
        | {"tie_word_embeddings": True, "norm_topk_prob": False},
    ),
    "qwen3_next_yarn": (
        "qwen3_next",
        _QWEN3_NEXT
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 4, "num_hidden_layers": 3, "num_experts": 4}
        | {"layer_types": ["linear_attention"] * 2 + ["full_attention"], "rope_scaling": _YARN},
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", _QWEN3_5 | {"rms_norm_eps": 1e-2}),
    "qwen3_5_moe_odd": (
        "qwen3_5_moe_text",
        _QWEN3_5
        | {"vocab_size": 101, "hidden_size": 40, "num_key_value_heads": 1, "num_experts": 5, "head_dim": 20}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 13}
        | {"linear_value_head_dim": 7, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-2}
        | {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "tie_word_embeddings": True}
        | {"layer_types": ["linear_attention", "full_attention"] * 2}
        # Sections of positions in time, height and width, which text has alike.
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
            | {"mrope_interleaved": True, "mrope_section": [2, 2, 1]}
        },
    ),
    "minimax_m2": ("minimax_m2", _MIXTRAL | {"intermediate_size": 16, "head_dim": 12, "partial_rotary_factor": 0.5}),
    "minimax_m2_odd": (
        "minimax_m2",
        _MIXTRAL
        | {"vocab_size": 101, "hidden_size": 40, "head_dim": 20, "num_key_value_heads": 1, "intermediate_size": 12}
        | {"num_local_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True, "rotary_dim": 6}
        | {"rope_scaling": _YARN},
    ),
    "olmoe": ("olmoe", _OLMOE),
    # A bound that some queries, keys and values exceed, biases, fewer key heads.
    "olmoe_odd": (
        "olmoe",
        _OLMOE
        | {"vocab_size": 101, "hidden_size": 40, "num_key_value_heads": 2, "num_experts": 5, "clip_qkv": 0.8}
        | {"attention_bias": True, "norm_topk_prob": True, "tie_word_embeddings": True, "rope_theta": 50.0},
    ),
    "granitemoe": ("granitemoe", _GRANITE),
    "granitemoe_odd": (
        "granitemoe",
        _GRANITE
        | {"vocab_size": 101, "hidden_size": 40, "head_dim": 12, "num_key_value_heads": 1, "num_local_experts": 5}
        | {"attention_bias": True, "tie_word_embeddings": True, "rope_theta": 50.0, "logits_scaling": 6.0}
        | {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.0884}
        | {"hidden_act": "gelu_pytorch_tanh"},
    ),
    "granitemoeshared": ("granitemoeshared", _GRANITE | {"shared_intermediate_size": 24}),
    "granitemoeshared_odd": (
        "granitemoeshared",
        _GRANITE
        | {"vocab_size": 101, "hidden_size": 40, "shared_intermediate_size": 20, "num_experts_per_tok": 2}
        | {"tie_word_embeddings": True, "rope_scaling": _YARN, "logits_scaling": 0.7, "hidden_act": "relu2"},
    ),
    "dsv2": ("deepseek_v2", _MLA | {"norm_topk_prob": False}),
    "dsv2_odd": (
        "deepseek_v2",
        _MLA
        | {"vocab_size": 101, "kv_lora_rank": 18, "intermediate_size": 37, "n_routed_experts": 9, "q_lora_rank": None}
        | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}
        | {"first_k_dense_replace": 2, "rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}}
        | {"n_shared_experts": 2, "rms_norm_eps": 1e-5, "norm_topk_prob": False},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", _ERNIE),
    "ernie4_5_moe_odd": (
        "ernie4_5_moe",
        _ERNIE
        | {"vocab_size": 101, "hidden_size": 40, "head_dim": 12, "num_key_value_heads": 1, "moe_num_experts": 5}
        | {"moe_num_shared_experts": 0, "moe_layer_start_index": 2, "tie_word_embeddings": True, "rope_theta": 50.0}
        | {"rope_scaling": _YARN, "moe_k": 2},
    ),
    "dsv4": ("deepseek_v4", _DSV4),
    # Three streams, a limit that some gates and ups exceed, all layers with tables but the last, one group.
    "dsv4_odd": (
        "deepseek_v4",
        _DSV4
        | {"vocab_size": 101, "hidden_size": 40, "head_dim": 12, "n_routed_experts": 5, "num_experts_per_tok": 3}
        | {"hc_mult": 3, "hc_sinkhorn_iters": 2, "hc_eps": 2e-2, "swiglu_limit": 0.6, "o_groups": 1, "index_topk": 2}
        | {"mlp_layer_types": ["hash_moe"] * 3 + ["moe"], "sliding_window": 5, "index_n_heads": 1}
        | {"moe_intermediate_size": 20, "rms_norm_eps": 1e-2, "routed_scaling_factor": 2.5, "rope_theta": 50.0}
        | {"compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5}}
        | {"rope_scaling": _YARN, "compress_rope_theta": 300.0},
    ),
    "muse": ("muse_spark_text", _MUSE),
    # A dense layer, biases, a window and a rotation in all layers but the second.
    "muse_odd": (
        "muse_spark_text",
        _MUSE
        | {"vocab_size": 101, "hidden_size": 40, "head_dim": 10, "num_key_value_heads": 1, "num_local_experts": 5}
        | {"attention_bias": True, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "moe_hidden_size": 12}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]}
        | {"layer_rope_theta": [50.0, 0, 50.0, 50.0], "hidden_act": "gelu_pytorch_tanh"}
        | {"post_norm_eps": 1e-2, "rms_norm_eps": 1e-3}
        | {"rope_parameters": _YARN | {"rope_theta": 50.0}}
        | {"output_multiplier": 1.3, "qk_scale_factor": 1.0, "sliding_window": 5},
    ),
    "longcat": ("longcat_flash", _LONGCAT),
    # As many identities as experts that compute, and YaRN.
    "longcat_odd": (
        "longcat_flash",
        _LONGCAT
        | {"vocab_size": 101, "hidden_size": 40, "kv_lora_rank": 18, "ffn_hidden_size": 37, "n_routed_experts": 5}
        | {"zero_expert_num": 5, "moe_topk": 4, "expert_ffn_hidden_size": 20, "rms_norm_eps": 1e-4}
        | {"rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}, "tie_word_embeddings": True},
    ),
    "llama": ("llama", _DENSE | {"head_dim": 8}),
    "llama_odd": (
        "llama",
        _DENSE
        | {"vocab_size": 97, "intermediate_size": 37, "head_dim": 10, "num_key_value_heads": 1}
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
        # A context so short that dims lie below, between and above the two bounds.
        | {"rope_scaling": _LLAMA3},
    ),
    # As Llama 2 and before: a key/value head for every query head, and nothing said of head_dim.
    "llama_plain": ("llama", {"intermediate_size": 44, "vocab_size": 99, "rms_norm_eps": 1e-6}),
    "qwen3": ("qwen3", _DENSE),
    "qwen3_tied": ("qwen3", _DENSE | {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 16}),
    "qwen3_odd": (
        "qwen3",
        _DENSE | {"vocab_size": 101, "hidden_size": 36, "intermediate_size": 27, "rope_scaling": _YARN},
    ),
}
