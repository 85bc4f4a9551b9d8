"""OLMoE (arXiv 2409.02060): keys of ``config.json``, and tensor names."""

from __future__ import annotations

from typing import Any

from automoe.config.schema import ModelConfig
from automoe.errors import ConfigError
from automoe.hf.families import family as base
from automoe.hf.families.as_transformers import not_computed
from automoe.hf.families.family import GQA, SOFTMAX_ROUTER, Family, Field, named

_WHOLE = "the query heads of an olmoe model are together as wide as its hidden size"


def _read_head_dim(size: int | None, hf_config: Any) -> int:
    """Return the head dim; raise ``ConfigError`` unless the query heads are together ``hidden_size`` wide.

    Args:
        size: ``head_dim``; None stands for hidden_size / num_attention_heads.
    """
    heads = hf_config.num_attention_heads
    size = size or hf_config.hidden_size // heads
    if size * heads != hf_config.hidden_size:
        said = f"{heads} heads of head_dim={size} in a hidden_size of {hf_config.hidden_size}"
        raise not_computed(hf_config.name_or_path, f"{said}, and {_WHOLE}")
    return size


def _write_head_dim(size: int, config: ModelConfig) -> int:
    heads = config.attention.num_heads
    if size * heads != config.hidden_size:
        rule = f"{_WHOLE}: {heads} * {size} = {heads * size}, not {config.hidden_size}"
        remedy = f"Set model.hidden_size={heads * size}"
        raise ConfigError("model.attention.head_dim", size, rule, remedy)
    return size


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    fields=base.COMMON_FIELDS
    | {
        "moe_intermediate_size": "intermediate_size",  # there are no dense layers
        "attention.head_dim": Field("head_dim", None, _read_head_dim, _write_head_dim),
    }
    | named(
        "attention.qkv_bias=attention_bias attention.o_bias=attention_bias attention.clip_qkv router.norm_topk_prob"
    ),
    fixed=GQA
    | SOFTMAX_ROUTER
    | {
        "attention.qk_norm": True,
        "attention.qk_norm_over_heads": True,
        "first_k_dense": 0,
        "num_shared_experts": 0,
    },
    only={"hidden_act": "silu"},
    unread=base.BALANCED | {"router_aux_loss_coef": 0.01},
)
