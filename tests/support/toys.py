"""Small models that several suites train: every kind of layer, and weights much larger than a trainer's.

With such weights routing is uneven, and no gradient drowns in rounding.
"""

from __future__ import annotations

from automoe.config.schema import AttentionConfig, ModelConfig, RouterConfig

VOCAB = 48
SIZES = dict(vocab_size=VOCAB, hidden_size=16, num_experts=8, moe_intermediate_size=8, initializer_range=0.3)

# Dense and MoE layers, MLA, a shared expert, groups, a bias.
DEEPSEEK = ModelConfig(
    family="deepseek_v3",
    num_layers=4,
    first_k_dense=1,
    intermediate_size=24,
    num_experts_per_token=3,
    num_shared_experts=1,
    attention=AttentionConfig(
        kind="mla",
        num_heads=2,
        num_kv_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=6,
    ),
    router=RouterConfig(score="sigmoid", num_groups=4, topk_groups=2, expert_bias=True),
    **SIZES,
)
QWEN3 = ModelConfig(
    family="qwen3_moe",
    num_layers=4,
    num_experts_per_token=3,
    attention=AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=True),
    **SIZES,
)
