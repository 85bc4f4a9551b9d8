"""Qwen3 (arXiv 2505.09388), dense: ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import GQA, Family, Field, dense_fields

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=dense_fields(norm_eps=1e-6) | {"attention.head_dim": Field("head_dim", 128)},
    fixed=GQA | {"attention.qk_norm": True},
    only={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    dense=True,
)
