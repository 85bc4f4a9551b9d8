"""Granite 3, PowerMoE (arXiv 2408.13359), also with a shared expert: keys of config.json, tensor names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from automoe.hf.families.family import (
    BALANCED,
    COMMON_FIELDS,
    GQA,
    HEAD_DIM,
    HIDDEN_ACT,
    SOFTMAX_ROUTER,
    Family,
    Field,
    named,
)
from automoe.hf.keys import DOWN, GATE_UP, ROUTER, KeyMap

_MOE = "block_sparse_moe"


def _usual_scale(hf: Any) -> float:
    """Return the scale of attention scores that transformers takes where a file states none."""
    return HEAD_DIM.read(getattr(hf, "head_dim", None), hf) ** -0.5


_MULTIPLIER = Field(
    "attention_multiplier",
    read=lambda factor, hf: _usual_scale(hf) if factor is None else factor,
    write=lambda factor, config: factor or config.attention.head_dim**-0.5,
)
_SHARED = {
    f"mlp.shared_experts.{ours}_proj.weight": f"shared_mlp.{theirs}_linear.weight{half}"
    for ours, theirs, half in (
        ("gate", "input", " [0/2]"),
        ("up", "input", " [1/2]"),
        ("down", "output", ""),
    )
}
_IN_MEMORY = KeyMap(
    {ROUTER: f"{_MOE}.router.weight", DOWN: f"{_MOE}.experts.down_proj"}
    | {GATE_UP: f"{_MOE}.experts.gate_up_proj [E 2*I L]"}
    | _SHARED
)
FAMILY = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    fields=COMMON_FIELDS
    | {"attention.head_dim": HEAD_DIM, "hidden_act": HIDDEN_ACT}
    # there are no dense layers
    | named("num_experts=num_local_experts moe_intermediate_size=intermediate_size")
    | named("attention.qkv_bias=attention_bias attention.o_bias=attention_bias")
    | {"attention.multiplier": _MULTIPLIER}
    | named("embedding_multiplier residual_multiplier logits_scaling"),
    fixed=GQA
    | SOFTMAX_ROUTER
    | {"router.softmax_after_topk": True, "router.norm_topk_prob": True}
    | {"attention.qk_norm": False, "first_k_dense": 0, "num_shared_experts": 0},
    unread=BALANCED,
    keys=KeyMap(
        {ROUTER: f"{_MOE}.router.layer.weight", DOWN: f"{_MOE}.output_linear.weight"}
        | {GATE_UP: f"{_MOE}.input_linear.weight [E 2*I L]"}
        | _SHARED,
        layouts=(_IN_MEMORY,),
    ),
)
SHARED = replace(
    FAMILY,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    fields=FAMILY.fields | named("shared_intermediate_size"),
)
