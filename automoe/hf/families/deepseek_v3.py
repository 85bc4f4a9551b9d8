"""DeepSeek-V3 (arXiv 2412.19437), Moonlight and Kimi-K2: keys of ``config.json``, and tensor names."""

from __future__ import annotations

from typing import Any

from automoe.hf.families.as_transformers import not_computed
from automoe.hf.families.family import (
    COMMON_FIELDS,
    GROUPED_LEAST,
    GROUPED_MOE,
    GROUPED_ROUTER,
    LATENT_HEADS,
    MTP,
    Family,
    Field,
    named,
)


def _read_turning(dims: int, hf: Any) -> int:
    """Return ``dims`` (qk_rope_head_dim).

    Raises ``ConfigError`` if ``hf.head_dim`` (None: hidden_size / num_attention_heads) differs.
    """
    angles = getattr(hf, "head_dim", dims) or hf.hidden_size // hf.num_attention_heads
    if angles != dims:
        raise not_computed(
            hf.name_or_path, f"head_dim={angles}, and here it must be qk_rope_head_dim={dims}"
        )
    return dims


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=COMMON_FIELDS
    | GROUPED_MOE
    | MTP
    | {"attention.num_kv_heads": LATENT_HEADS}
    | named("attention.q_lora_rank attention.kv_lora_rank attention.qk_nope_head_dim")
    | {"attention.qk_rope_head_dim": Field("qk_rope_head_dim", read=_read_turning)}
    | named("attention.v_head_dim rope.interleaved=rope_interleave"),
    fixed=GROUPED_ROUTER | {"attention.kind": "mla"},
    only={
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    unread={"aux_loss_alpha": 0.001, "ep_size": 1, "pretraining_tp": 1, "seq_aux": True},
    mscale=True,
    least=GROUPED_LEAST,
    known_as=("kimi_k2",),
)
