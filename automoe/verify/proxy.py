"""Proxy of a configuration that is too large to run here: the same structure with small sizes.

The proxy keeps every mesh axis, kind of layer, routing rule, backend and the schedule. ``list_cuts``
lists the changed keys, so that nobody takes the proxy for the configuration itself. This module does
not import torch.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from math import gcd
from operator import attrgetter

from automoe.config.convert import leaf_keys
from automoe.config.facts import BLOCK
from automoe.config.layout import module_sizes
from automoe.config.mesh_shape import (
    DEFAULT_AXES,
    MOE_AXES,
    MeshShape,
    largest_divisor,
    resolve_mesh,
)
from automoe.config.schema import AttentionConfig, Config, MeshConfig, ModelConfig
from automoe.config.tier import tier_of

MAX_AXIS = 2
MAX_LAYERS = 4
MAX_EXPERTS = 16
MAX_GROUPS = 4
MAX_TOP_K = 4
MAX_SEQ_LEN = 64
MAX_MICRO_BATCHES = 4
MAX_WINDOW = 16
MAX_HEADS = MAX_AXIS**2  # tp and cp both shard heads
# Largest sizes in the proxy, by kind of attention.
MAX_ATTENTION = {
    "mla": dict(
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        index_topk=MAX_WINDOW,
        index_n_heads=4,
        index_head_dim=16,
    ),
    "gqa": dict(
        head_dim=16,
        full_attention_interval=MAX_LAYERS,
        sliding_window=MAX_WINDOW,
        linear_num_key_heads=MAX_HEADS,
        linear_num_value_heads=2 * MAX_HEADS,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "compressed": dict(
        head_dim=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        sliding_window=MAX_WINDOW,
        o_groups=MAX_AXIS,
        o_lora_rank=16,
        index_topk=4,
        index_n_heads=4,
        index_head_dim=16,
    ),
}
HEAD_WIDTHS = (
    "head_dim index_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim"
).split()
# A width with blocks of 8-bit scales keeps two blocks, so that there is a border between blocks.
MAX_BLOCKED = 2 * BLOCK


def make_proxy(config: Config, shape: MeshShape, num_token_ids: int) -> tuple[Config, MeshShape]:
    """Return a small version of a configuration and its mesh that a laptop runs in seconds.

    Every mesh axis has at most 2 ranks, and model and batch are cut.

    Args:
        config: a configuration that is valid with ``shape``; it is not changed.
        shape: resolved mesh of ``config``.
        num_token_ids: number of ids of the tokenizer; the proxy's vocabulary holds all of them.

    Returns:
        The proxy and its resolved mesh, with ``ep_shard`` derived.
    """
    sizes = {a: min(getattr(shape, a), MAX_AXIS) for a in dict.fromkeys(DEFAULT_AXES + MOE_AXES)}
    small = resolve_mesh(MeshConfig(**(sizes | {"ep_shard": -1})), None)
    parallel = replace(config.parallel)
    parallel.stages_per_rank = min(parallel.stages_per_rank, MAX_AXIS)
    num_stages = small.pp * parallel.stages_per_rank
    blocked = config.train.fp8 == "blockwise"
    model = config.model
    if tier_of(model).resizable:
        model = _cut_model(model, small, num_stages, num_token_ids, blocked)
    if parallel.layers_per_stage is not None:
        # Stages keep different sizes, and modules for multi-token prediction that are on other
        # stages than the head stay on other stages.
        full = shape.pp * config.parallel.stages_per_rank
        apart = model.num_mtp_layers * any(module_sizes(config, full)[:-1])
        parallel.layout = None
        later = max(0, num_stages - 1 - apart)  # stages with a layer, besides the first
        unit = model.layers_together
        sizes = [model.num_layers - unit * later] + [unit] * later
        sizes += [0] * (num_stages - 1 - later)
        if apart and num_stages > 1:
            texts = ["t" * size for size in sizes]
            for module in range(apart):
                texts[max(0, num_stages - 2 - module)] += "m"
            parallel.layout = f"E{'|'.join(texts)}L"
        parallel.layers_per_stage = sizes
    if isinstance(parallel.recompute_layers, list):
        # For a listed layer that does not exist the last one of its kind recomputes.
        last = {layer in model.moe_layers: layer for layer in range(model.num_layers)}
        parallel.recompute_layers = sorted(
            {
                layer if layer < model.num_layers else last[layer in config.model.moe_layers]
                for layer in parallel.recompute_layers
            }
        )
    data = replace(config.data, on_long="truncate" if config.data.is_chat else "split")
    if data.is_preference:  # pairs are conversations that cannot be truncated
        data.on_long = "drop"
    train = config.train
    unit = 2 * small.cp
    micro_batches = train.global_batch_size // (shape.dp * train.micro_batch_size)
    # Interleaved schedules need a multiple of pp micro-batches, DualPipeV as many as stages.
    unit_of = small.pp * (2 if config.parallel.schedule == "DualPipeV" else 1)
    micro_batches = _multiple(min(micro_batches, MAX_MICRO_BATCHES), unit_of)
    rows = min(train.micro_batch_size, 2)
    proxy = replace(
        config,
        mesh=MeshConfig(**asdict(small)),
        model=model,
        parallel=parallel,
        train=replace(
            train,
            seq_len=min(train.seq_len, MAX_SEQ_LEN) // unit * unit,
            micro_batch_size=rows,
            global_batch_size=small.dp * rows * micro_batches,
            rampup_batch_size=None,
        ),
        data=data,
    )
    return proxy, small


def list_cuts(full: Config, proxy: Config) -> list[tuple[str, object, object]]:
    """Return (key, value in ``full``, value in ``proxy``) of each key that differs.

    The keys are in the schema's order.
    """
    pairs = [(key, attrgetter(key)(full), attrgetter(key)(proxy)) for key in leaf_keys()]
    return [(key, before, after) for key, before, after in pairs if before != after]


def _cut_model(
    model: ModelConfig, small: MeshShape, num_stages: int, num_token_ids: int, blocked: bool
) -> ModelConfig:
    widest = MAX_BLOCKED if blocked else 32
    # One stage at least has more than its pair or its one layer.
    unit = model.layers_together
    num_layers = min(model.num_layers, max(MAX_LAYERS, unit * (num_stages + 1)))
    num_experts = _multiple(min(model.num_experts, MAX_EXPERTS), small.ep)
    router = model.router
    groups = largest_divisor(num_experts, min(router.num_groups, MAX_GROUPS))
    limits = router.topk_groups < router.num_groups
    router = replace(
        router,
        num_groups=groups,
        topk_groups=max(1, groups // 2) if limits else groups,
        group_score_topk=min(router.group_score_topk, num_experts // groups),
        num_hash_layers=min(router.num_hash_layers, 1),
        num_zero_experts=-(-router.num_zero_experts * num_experts // model.num_experts),
    )
    allowed = num_experts // router.num_groups * router.topk_groups
    attention = (
        _cut_blocked(model.attention, small.tp) if blocked else _cut_attention(model.attention)
    )
    # Windows are so short that a row has several of each kind.
    longest, held = 2 * attention.sparse_ratio, num_layers + model.num_mtp_layers
    ratios = [min(ratio, longest) for ratio in attention.compress_ratios[:held]]
    return replace(
        model,
        vocab_size=min(model.vocab_size, _multiple(num_token_ids + 7, 8)),
        # Every ep_shard divides these rows, and they are multiples of grouped_mm's 16 bytes.
        hidden_size=_multiple(min(model.hidden_size, max(widest, 64)), 8),
        num_layers=num_layers,
        intermediate_size=min(model.intermediate_size, max(widest, 96)),
        # One dense layer stands for several; a model without dense layers keeps none.
        first_k_dense=min(model.first_k_dense, 1) if model.num_moe_layers else num_layers,
        num_experts=num_experts,
        num_experts_per_token=min(model.num_experts_per_token, MAX_TOP_K, allowed),
        moe_intermediate_size=_multiple(min(model.moe_intermediate_size, widest), 8),
        moe_latent_size=model.moe_latent_size and _multiple(min(model.moe_latent_size, widest), 8),
        num_shared_experts=min(model.num_shared_experts, 2),
        # of a pair as wide as the other dense FFN
        shared_intermediate_size=min(
            model.shared_intermediate_size, max(widest, 96) if model.moe_shortcut else widest
        ),
        attention=replace(attention, compress_ratios=ratios),
        router=router,
    )


def _multiple(size: int, unit: int) -> int:
    """Return the largest multiple of ``unit`` up to ``size``, at least ``unit``."""
    return max(size // unit, 1) * unit


def _cut_attention(attention: AttentionConfig) -> AttentionConfig:
    # Heads are never three: axes of three ranks become axes of two.
    heads = MAX_HEADS if attention.num_heads > MAX_AXIS else attention.num_heads
    kv_heads = heads if attention.num_kv_heads == attention.num_heads else attention.num_kv_heads
    kv_heads = min(kv_heads, heads)
    if attention.kind == "gqa" and 1 < attention.num_kv_heads < attention.num_heads:
        kv_heads = max(heads // 2, 1)  # fewer than query heads, as in the configuration
    cut = {}
    for name, limit in MAX_ATTENTION[attention.kind].items():
        if (size := getattr(attention, name)) is not None:
            cut[name] = min(size, limit)
    # The first stage has at least two layers, so the second one is beside the indexer it shares.
    cut["index_shared_layers"] = [1] if attention.index_shared_layers else []
    return replace(attention, num_heads=heads, num_kv_heads=kv_heads, **cut)


def _cut_blocked(attention: AttentionConfig, tp: int) -> AttentionConfig:
    """Return small attention settings for 8-bit products: heads keep their width, but are fewer.

    Enough heads stay for tp to shard at borders between blocks of 8-bit scales.
    """
    few = replace(
        _cut_attention(attention),
        q_lora_rank=attention.q_lora_rank and min(attention.q_lora_rank, MAX_BLOCKED),
        kv_lora_rank=min(attention.kv_lora_rank, MAX_BLOCKED),
        **{name: getattr(attention, name) for name in HEAD_WIDTHS},
    )
    if attention.kind == "mla":
        no_position = attention.qk_nope_head_dim
        value = attention.v_head_dim
        widths = [no_position + attention.qk_rope_head_dim, no_position + value, value]
    else:
        widths = [attention.head_dim]
    # A rank's heads fill whole blocks.
    heads_per_rank = max(BLOCK // gcd(BLOCK, width) for width in widths)
    if attention.kind == "mla" or attention.num_kv_heads == attention.num_heads:
        heads = min(max(few.num_heads, heads_per_rank * tp), attention.num_heads)
        return replace(few, num_heads=heads, num_kv_heads=heads)
    kv_heads = min(max(few.num_kv_heads, heads_per_rank * tp), attention.num_kv_heads)
    return replace(few, num_heads=min(2 * kv_heads, attention.num_heads), num_kv_heads=kv_heads)
