"""DeepSeek-V3.2 (arXiv 2512.02556) and GLM-5: DeepSeek-V3 with sparse attention by an indexer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from automoe.hf.families import glm4_moe
from automoe.hf.families.as_transformers import not_computed
from automoe.hf.families.family import Field, named, rope_parameters


def _read_topk(topk: int, hf_config: Any) -> int:
    """Return ``topk`` (``index_topk``) if it is at least 1; else raise ``ConfigError``.

    In our configuration 0 stands for attention without an indexer. ``hf_config`` is transformers'
    configuration object, for the error.
    """
    if topk < 1:
        raise not_computed(
            hf_config.name_or_path, f"index_topk={topk}, and a query sees at least 1 key"
        )
    return topk


_V3 = {key: spec for key, spec in glm4_moe.LITE.fields.items() if key != "rope.interleaved"}
FAMILY = replace(
    glm4_moe.LITE,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    fields=_V3
    | named("attention.qk_rope_head_dim")  # its class overwrites head_dim, whatever the file says
    | {
        "attention.index_topk": Field("index_topk", read=_read_topk),
        "attention.index_n_heads": "index_n_heads",
        "attention.index_head_dim": "index_head_dim",
    },
    fixed=glm4_moe.LITE.fixed | {"rope.interleaved": True},
)
GLM_MOE_DSA = replace(
    FAMILY,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    fields=FAMILY.fields
    | {
        "attention.index_shared_layers": Field(
            "indexer_types",
            read=lambda kinds, hf: [n for n in range(hf.num_hidden_layers) if kinds[n] == "shared"],
            write=lambda shared, config: [
                "shared" if layer in shared else "full" for layer in range(config.num_layers)
            ],
        )
    },
    fixed=FAMILY.fixed | {"attention.index_interleaved": True},
    written=FAMILY.written | {"rope_parameters": rope_parameters, "indexer_rope_interleave": True},
)
