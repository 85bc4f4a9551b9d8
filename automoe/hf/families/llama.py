"""Llama (arXiv 2407.21783), dense: keys of ``config.json``, and tensor names."""

from __future__ import annotations

from automoe.hf.families.family import DENSE_FIELDS, GQA, HEAD_DIM, Family, multiple

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=DENSE_FIELDS
    | {"attention.head_dim": HEAD_DIM}
    | multiple("hidden_size", lambda config: config.attention.num_heads),
    fixed=GQA | {"attention.qk_norm": False},
    only={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    unread={"pretraining_tp": 1},
    dense=True,
    most={"initializer_range": 1},
)
