"""LongCat-Flash (arXiv 2509.01322): keys of ``config.json``, and tensor names.

A layer of its files is a pair of ours, each with attention and a dense FFN, the first with experts.
"""

from __future__ import annotations

from operator import attrgetter

from automoe.hf.families import deepseek_v2, deepseek_v3
from automoe.hf.families.family import COMMON_FIELDS, Field, named
from automoe.hf.families.longcat_flash_pairs import Pairs
from automoe.hf.keys import KeyMap

_V3 = deepseek_v3.FAMILY
_SAME = (
    "attention.q_lora_rank attention.kv_lora_rank attention.qk_nope_head_dim "
    "attention.qk_rope_head_dim attention.v_head_dim router.routed_scaling_factor"
).split()
_NAMES = (
    ("self_attn.", "self_attn.{half}."),
    ("input_layernorm.", "input_layernorm.{half}."),
    ("post_attention_layernorm.", "post_attention_layernorm.{half}."),
    ("mlp.shared_experts.", "mlps.0."),
    *((f"mlp.{name}_proj.", f"mlps.1.{name}_proj.") for name in ("gate", "up", "down")),
    ("mlp.gate.weight", "mlp.router.classifier.weight"),
    ("mlp.gate.", "mlp.router."),
)
FAMILY = Pairs(
    model_type="longcat_flash",
    architecture="LongcatFlashForCausalLM",
    fields=COMMON_FIELDS
    | {key: _V3.fields[key] for key in _SAME}
    | named("intermediate_size=ffn_hidden_size shared_intermediate_size=ffn_hidden_size")
    | named("num_experts=n_routed_experts num_experts_per_token=moe_topk")
    | named("moe_intermediate_size=expert_ffn_hidden_size")
    | {
        # whatever the file says: its class has no key heads
        "attention.num_kv_heads": deepseek_v2.FAMILY.fields["attention.num_kv_heads"],
        "num_layers": Field(
            "num_layers", read=lambda pairs, hf: 2 * pairs, write=lambda count, config: count // 2
        ),
        "router.num_zero_experts": Field("zero_expert_num", read=lambda count, hf: count or 0),
    },
    fixed={"attention.kind": "mla", "attention.scale_latents": True, "rope.interleaved": True}
    | {"router.score": "softmax", "router.expert_bias": True, "router.norm_topk_prob": False}
    | {"router.num_groups": 1, "router.zero_expert_type": "identity", "moe_shortcut": True}
    | {"first_k_dense": 0, "num_shared_experts": 0},
    only={"hidden_act": "silu", "attention_bias": False, "router_bias": False}
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}
    | {"norm_topk_prob": False},
    written={"head_dim": lambda config: config.attention.qk_rope_head_dim}
    | {"num_hidden_layers": attrgetter("num_layers")},
    unread={"attention_method": "MLA"},
    mscale=True,
    least={"num_experts_per_token": 2},  # its class squeezes one choice away
    keys=KeyMap(renames=_NAMES, layers_together=2, unread=(r"model\.mtp.*",)),
)
