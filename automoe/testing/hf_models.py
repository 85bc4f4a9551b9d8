"""Small random models of every family, made by ``transformers``: what adapters are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SIZES: dict[str, Any] = {
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
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
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
    "qwen3_moe_tied": (
        "qwen3_moe",
        _QWEN | {"tie_word_embeddings": True, "norm_topk_prob": False, "vocab_size": 101},
    ),
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
}


def small_hf_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers model of ``SMALL_MODELS`` with random weights, norms and selection biases."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = SMALL_MODELS[name]
    config = AutoConfig.for_model(model_type, **(_SIZES | sizes))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Large enough that experts differ and attention is not flat.
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def save_small_hf(
    name: str, path: str | Path, seed: int = 0, dtype: torch.dtype = torch.float32, **save_options: Any
) -> Any:
    """Write ``small_hf_model`` as a checkpoint directory and return it."""
    model = small_hf_model(name, seed, dtype)
    model.save_pretrained(path, **save_options)
    return model
