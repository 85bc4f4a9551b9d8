"""Llama (arXiv 2407.21783), dense: ``config.json`` and key map."""

from __future__ import annotations

from automoe.hf.families.family import Family, Field, dense_fields, head_dim

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=dense_fields(norm_eps=1e-6) | {"attention.head_dim": Field("head_dim", None, read=head_dim)},
    fixed={"attention.kind": "gqa", "attention.qk_norm": False, "rope.interleaved": False},
    only={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    dense=True,
    whole_heads=True,
)
