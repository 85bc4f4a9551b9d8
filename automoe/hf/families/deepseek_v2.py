"""DeepSeek-V2, V2-Lite and Coder-V2 (arXiv 2405.04434): keys of ``config.json``, and tensor names.

They have DeepSeek-V3's attention and experts. Their routers score experts by a softmax, without a
bias, and the score of a group of experts is that of its best expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from automoe.hf.families import deepseek_v3
from automoe.hf.families.as_transformers import not_computed
from automoe.hf.families.family import SOFTMAX_ROUTER, Field, multiple, named

_GREEDY, _GROUPED = "greedy", "group_limited_greedy"


def _read_groups(count: int | None, hf: Any) -> int:
    """Return ``count`` (n_group or topk_group); 1 if ``hf.topk_method`` says that tokens choose among all experts."""
    if hf.topk_method not in (_GREEDY, _GROUPED):
        rule = f"{hf.model_type} here computes only {_GREEDY} and {_GROUPED}"
        raise not_computed(hf.name_or_path, f"topk_method={hf.topk_method}, and {rule}")
    return 1 if hf.topk_method == _GREEDY else count


_V3 = deepseek_v3.FAMILY
_OTHERS = ("num_mtp_layers", "rope.interleaved", "router.norm_topk_prob")
FAMILY = replace(
    _V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    fields={key: spec for key, spec in _V3.fields.items() if key not in _OTHERS}
    | {
        "router.num_groups": Field("n_group", read=_read_groups),
        "router.topk_groups": Field("topk_group", read=_read_groups),
    }
    # whatever the file says: its class overwrites head_dim
    | named("attention.qk_rope_head_dim")
    | multiple("hidden_size", lambda config: config.attention.num_heads)
    # it rotates pairs as complex numbers, which must lie at even places
    | multiple("attention.kv_lora_rank", lambda config: 2)
    | multiple("attention.qk_nope_head_dim", lambda config: 2),
    fixed={key: SOFTMAX_ROUTER[key] for key in ("router.score", "router.expert_bias")}
    | {"router.norm_topk_prob": False, "router.group_score_topk": 1}
    | {"attention.kind": "mla", "rope.interleaved": True},
    # transformers ignores norm_topk_prob, and DeepSeek's own code obeys it
    only={key: value for key, value in _V3.only.items() if key != "topk_method"}
    | {"mlp_bias": False, "norm_topk_prob": False, "scoring_func": "softmax"},
    written={"topk_method": lambda config: _GROUPED if config.router.num_groups > 1 else _GREEDY},
    least={"num_shared_experts": 1},  # its class always has them
    known_as=(),
)
