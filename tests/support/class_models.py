"""Small models of classes of transformers without a native family, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = dict(
    vocab_size=300, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, n_routed_experts=8, num_local_experts=8,
    num_experts_per_tok=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MLA: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, num_key_value_heads=4,
    head_dim=4, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
INDEXER: dict[str, Any] = dict(index_topk=8, index_n_heads=2, index_head_dim=8)
# What a class wants beyond the sizes above.
MORE: dict[str, dict[str, Any]] = {
    "axk1": MLA,
    "qwen3_5_moe_text": dict(
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
    ),
    "deepseek_v2": MLA,
    "deepseek_v32": MLA | INDEXER,
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA | INDEXER,
    "dots1": dict(n_shared_experts=1, n_group=1, topk_group=1),
    "phimoe": dict(router_jitter_noise=0.0, input_jitter_noise=0.0, lm_head_bias=False),
    "gemma4_text": dict(enable_moe_block=True, top_k_experts=2, hidden_size_per_layer_input=0, global_head_dim=8),
    "lfm2_moe": dict(layer_types=["full_attention", "conv", "full_attention"], num_dense_layers=1),
}


def hf_class_config(model_type: str, **more: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**(SIZES | MORE.get(model_type, {}) | more))


def save_class(model_type: str, folder: Path, **more: Any) -> Any:
    """Save a model with weights that tell experts apart; return it, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(hf_class_config(model_type, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model
