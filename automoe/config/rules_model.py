"""Rules for a model's sizes and their sharding, for routing and for kinds of layers. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from pathlib import Path

from automoe.config.facts import BLOCK
from automoe.config.mesh_shape import MeshShape
from automoe.config.plugins import registered_names
from automoe.config.rule_engine import Row, Scope, refused, table
from automoe.config.schema import Config
from automoe.config.tier import tier_of

MTP_FAMILIES = ("deepseek_v3", "glm4_moe", "deepseek_v32", "glm_moe_dsa")
BY_CROSS_ENTROPY = "modules for multi-token prediction learn the next tokens by cross-entropy"
NO_MODULES = "peft loads an adapter into the classes of transformers, which have no modules for multi-token prediction"
# fmt: off
_WEIGHTS = table("""
model.random_weights | model.hf_path == null | it skips the weights of model.hf_path, which is not set
lora.path != null | model.hf_path == null; model.random_weights; model.upcycle | it is an adapter of a checkpoint's weights
model.random_weights | model.upcycle | it skips the weights of model.hf_path, which is upcycled
""")
_MODULES = table("""
train.mtp_loss_weight != default | model.num_mtp_layers == 0 | there are no modules for multi-token prediction
    | Set model.num_mtp_layers=1, or leave it out
MODULES | model.family != FAMILIES
    | a {model.family} checkpoint has no place for multi-token prediction modules; NAMES have one
MODULES | model.first_k_dense >= model.num_layers | a module has experts, and no layer of the model has any
    | Set model.num_mtp_layers=0, or a lower model.first_k_dense
model.upcycle | MODULES | a dense checkpoint has no modules for multi-token prediction
    | Set model.num_mtp_layers=0, or upcycle first and train from the result
recipe == dpo | MODULES | BY_CROSS_ENTROPY | Set recipe=pretrain, or model.num_mtp_layers=0
train.loss != cross_entropy | MODULES | BY_CROSS_ENTROPY | , or model.num_mtp_layers=0
lora.export == adapter | lora.rank > 0 and MODULES | NO_MODULES
    | Set lora.export=merged, or model.num_mtp_layers=0
model.first_k_dense > model.num_layers | | there are {model.num_layers} layers in all (model.num_layers)
""", MODULES="model.num_mtp_layers > 0", FAMILIES="|".join(MTP_FAMILIES), NAMES=" and ".join(MTP_FAMILIES),
    BY_CROSS_ENTROPY=BY_CROSS_ENTROPY, NO_MODULES=NO_MODULES)
_EXPERTS = table("""
model.num_experts % mesh.ep | | mesh.ep={mesh.ep} ranks hold equal numbers of experts
model.moe_intermediate_size % mesh.etp * mesh.ep_shard |
    | etp and FSDP cut the width of the experts evenly over mesh.etp and mesh.ep_shard
    | , or {facts.width_fits}
model.expert_hidden_size % mesh.ep_shard |
    | FSDP cuts rows of the experts' down projection evenly | , or {facts.rows_fit}
""")
_BIASES = table("""
model.expert_hidden_size % mesh.etp * mesh.ep_shard | model.biased_experts and model.num_moe_layers > 0
    | etp and FSDP cut the bias of the experts' down projection evenly over mesh.etp and mesh.ep_shard
    | Set {facts.times} times more ranks on mesh.ep
model.attention.index_shared_layers: facts.outside |
    | {facts.outside}: layers 1 to {facts.last} can use the choice of a layer before them | Leave them out
""")
_NODES = table("""
cluster.gpus_per_node: facts.uneven | moe.dispatcher == hierarchical and mesh.ep * mesh.etp > 1
    and model.num_moe_layers > 0
    | moe.dispatcher=hierarchical needs equal numbers of an ep group's ranks on its nodes of {cluster.gpus_per_node}, and
    mesh.ep*mesh.etp = {mesh.ep}*{mesh.etp} = {mesh.ep * mesh.etp} consecutive ranks form a group
    | Set cluster.gpus_per_node={facts.per_node}, a mesh.ep*mesh.etp that divides {cluster.gpus_per_node} or is its
    multiple, or moe.dispatcher=alltoall
""")
_ROUTING = table("""
model.num_experts_per_token > model.num_scored_experts |
    | a token cannot choose more than all {model.num_scored_experts} experts (model.num_experts, with zero experts)
model.router.zero_expert_type != default | model.router.num_zero_experts == 0 | there are no zero experts
model.router.num_zero_experts > 0 | model.router.num_groups > 1 | zero experts are in no group
model.router.num_zero_experts > 0 | model.num_moe_layers == 0 | no layer has experts
model.router.num_zero_experts > 0 | model.post_norm_eps != null | a zero expert's output has no norm
model.router.num_zero_experts > 0 | model.router.num_hash_layers > 0 | a table of token ids names experts that compute
model.router.num_groups: model.num_experts % model.router.num_groups | | groups hold equal numbers of experts
model.router.topk_groups > model.router.num_groups |
    | there are only {model.router.num_groups} groups (model.router.num_groups)
""")
_SCORES = table("""
model.router.topk_groups: facts.chosen < model.num_experts_per_token |
    | {model.router.topk_groups} groups of {model.num_experts // model.router.num_groups} experts hold {facts.chosen},
    fewer than model.num_experts_per_token={model.num_experts_per_token} | Set model.router.topk_groups={facts.needed}
model.router.group_score_topk: model.router.group_score_topk * model.router.num_groups > model.num_experts
    | model.router.num_groups > 1 | a group has {model.num_experts // model.router.num_groups} experts
    | Set model.router.group_score_topk={model.num_experts // model.router.num_groups} or less
""")
_PAIRS = "rotary embedding rotates pairs of dimensions"
_ROTARY = table("""
model.rope.partial_rotary_factor: facts.odd | model.rope.partial_rotary_factor < 1
    | PAIRS, and int({model.attention.head_dim} * {model.rope.partial_rotary_factor}) = {facts.rotary} of a head
    | Set model.rope.partial_rotary_factor={facts.share}
model.attention.head_dim % 2 | model.rope.partial_rotary_factor == 1 | PAIRS
""", PAIRS=_PAIRS)
_GQA = table("""
model.attention.num_kv_heads: model.attention.num_heads % model.attention.num_kv_heads |
    | key/value heads serve equal numbers of query heads
model.attention.qk_norm_over_heads | not model.attention.qk_norm | queries and keys have no norms
    | Set model.attention.qk_norm=true
model.attention.clip_qkv != null and model.attention.clip_qkv <= 0 |
    | it bounds the absolute values of queries, keys and values | Set model.attention.clip_qkv=null
model.attention.qk_scale_factor != null | not model.attention.qk_norm; model.attention.qk_norm_over_heads
    | it follows norms of each head's queries and keys | Set model.attention.qk_scale_factor=null
model.attention.clip_qkv != null | model.attention.qk_scale_factor != null | no model clips before a factor
model.attention.qk_scale_factor != null and model.attention.qk_scale_factor <= 0 |
    | must be a number larger than 0 | Set model.attention.qk_scale_factor=1.0
model.attention.split_output_gate | not model.attention.output_gate | there is no output gate to project
    | Set model.attention.output_gate=true
model.attention.multiplier != null and model.attention.multiplier <= 0 |
    | must be a number larger than 0 | Set model.attention.multiplier=null
""")
_MLA = table("""
model.attention.kv_lora_rank < 1; model.attention.qk_nope_head_dim < 1; model.attention.qk_rope_head_dim < 1;
    model.attention.v_head_dim < 1 | | attention kind mla needs this size
model.attention.sinks; model.attention.sliding_window > 0 | model.attention.kind == mla
    | attention kind mla does not have it
""")
_OTHERS = table("""
model.attention.qkv_bias; model.attention.qk_norm_over_heads; model.attention.clip_qkv != null;
    model.attention.multiplier != null; model.rope.partial_rotary_factor != 1; model.attention.split_output_gate;
    model.attention.linear_num_key_heads > 0; model.attention.o_bias; model.attention.output_gate;
    model.attention.qk_scale_factor != null; model.attention.output_norm; model.attention.nope_full_attention
    | model.attention.kind != gqa | only attention kind gqa has it
model.attention.qk_rope_head_dim % 2 | | PAIRS
""", PAIRS=_PAIRS)
_COMPRESSED = table("""
model.attention.q_lora_rank == null | | queries are projected from a latent | Set model.attention.q_lora_rank=1 or more
model.attention.qk_rope_head_dim < 1; model.attention.sliding_window < 1; model.attention.o_groups < 1;
    model.attention.o_lora_rank < 1; model.attention.sparse_ratio < 1
    | model.attention.kind == compressed | attention kind compressed needs this size
model.attention.qk_rope_head_dim > model.attention.head_dim |
    | the last dims of a head rotate, and it has {model.attention.head_dim} (model.attention.head_dim)
model.attention.compress_rope_theta <= 1 | | YaRN divides by its logarithm, so it must be larger than 1
model.attention.num_heads % model.attention.o_groups | | groups have equal numbers of heads (model.attention.o_groups)
model.attention.compress_ratios: facts.ratios != facts.layers |
    | it has {facts.ratios} ratios, and the model {facts.layers} layers
    | Set one for each layer, 0 for a layer without entries
model.attention.compress_ratios: facts.least < 0 | | an entry stands for {facts.least} positions | Set 0 for no entries
model.attention.index_topk == 0 | model.attention.compress_ratios has model.attention.sparse_ratio
    | in layers of model.attention.sparse_ratio={model.attention.sparse_ratio} an indexer chooses entries | Set 1 or more
model.attention.qk_norm; model.attention.full_attention_interval > 1; model.attention.index_interleaved;
    model.attention.index_shared_layers | model.attention.kind == compressed
    | attention kind compressed does not have it
model.attention.qk_rope_head_dim: facts.rotary != model.attention.qk_rope_head_dim |
    | transformers rotates int({model.attention.head_dim} * ({model.attention.qk_rope_head_dim} /
    {model.attention.head_dim})) = {facts.rotary} dims of a head | Set model.attention.qk_rope_head_dim={facts.exact}
model.rope.mscale != 0; model.rope.mscale_all_dim != 0 | model.attention.kind == compressed
    | compressed attention scales by model.rope.attention_factor alone | Set 0
mesh.cp > 1 | model.attention.kind == compressed
    | compressed attention pools windows that would lie on several cp ranks
mesh.tp: model.attention.o_groups % mesh.tp |
    | tp ranks hold equal numbers of groups of heads (model.attention.o_groups)
""")
_LAYERS = table("""
model.attention.full_attention_offset >= model.attention.full_attention_interval |
    | an interval has no more layers
model.attention.full_attention_interval > 1
    | model.attention.sliding_window == 0 and model.attention.linear_num_key_heads == 0 | OTHERS
    | Set model.attention.full_attention_interval=1, or model.attention.sliding_window=128
model.attention.full_attention_interval: model.attention.sliding_window > 0
    | model.attention.linear_num_key_heads > 0 | OTHERS
    | Set model.attention.sliding_window=0, or model.attention.linear_num_key_heads=0
model.attention.full_attention_interval == 1
    | model.attention.sliding_window > 0 and model.attention.kind == gqa; model.attention.linear_num_key_heads > 0
    | OTHERS | Set model.attention.full_attention_interval=2
model.attention.linear_num_value_heads < 1; model.attention.linear_key_head_dim < 1;
    model.attention.linear_value_head_dim < 1; model.attention.linear_conv_kernel_dim < 1
    | model.attention.linear_num_key_heads > 0 | a delta net needs this size
model.attention.linear_num_value_heads % model.attention.linear_num_key_heads
    | model.attention.linear_num_key_heads > 0 | a delta net's key heads serve equal numbers of value heads
mesh.tp: model.attention.linear_num_key_heads % mesh.tp |
    | tp ranks hold equal numbers of a delta net's key heads (model.attention.linear_num_key_heads)
""", OTHERS="layers without full attention have a window or are delta nets, and there are none at an interval of 1")
_INDEXER = table("""
INDEXER | model.attention.kind == gqa | only the attention kinds mla and compressed have it
model.attention.index_topk == 0 | model.family == deepseek_v32|glm_moe_dsa
    | models of family {model.family} have indexers | Set 1 or more, or model.family=deepseek_v3
train.indexer != sparse; model.attention.index_shared_layers | model.attention.index_topk == 0
    | the model has no indexers
model.attention.q_lora_rank == null | INDEXER
    | an indexer's queries are projected from the latent of attention's
    | Set model.attention.q_lora_rank=1 or more
model.attention.index_n_heads < 1 | INDEXER | an indexer needs 1 or more
model.attention.index_head_dim < model.attention.qk_rope_head_dim | INDEXER
    | an indexer needs {model.attention.qk_rope_head_dim} or more:
    model.attention.qk_rope_head_dim={model.attention.qk_rope_head_dim} dims of its heads are rotated
parallel.context != gather | mesh.cp > 1 and INDEXER
    | {parallel.context} takes no mask that differs between ranks, and a query sees only chosen keys
""", INDEXER="model.attention.index_topk > 0")
_SIZES = table("""
model.swiglu_alpha <= 0; model.swiglu_limit <= 0 | model.expert_activation == clamped_swiglu
    | must be a number larger than 0
model.hidden_act != silu | model.expert_activation == clamped_swiglu | it has a sigmoid in every FFN and expert
model.hc_mult > 0 | model.num_mtp_layers > 0
    | modules for multi-token prediction read one stream of the residual
    | Set model.num_mtp_layers=0
model.residual_multiplier != 1; model.residual_gate_temperature != 0 | model.hc_mult > 0 | WEIGHTED
model.residual_multiplier != 1 | model.residual_gate_temperature != 0 | WEIGHTED
model.plain_final_norm | not model.zero_centered_norms | norms multiply by their weights alone
model.post_norm_eps != null and model.post_norm_eps <= 0 | | a norm divides by its root | Set model.post_norm_eps=1e-8
model.post_norm_eps != null | mesh.etp > 1
    | each expert's output is normalised whole, and etp ranks have terms of it | Set mesh.etp=1
model.post_norm_eps == null; model.residual_gate_temperature == 0; model.moe_latent_size < 1;
    model.final_logit_softcapping == null; model.attention.qk_scale_factor == null | model.family == muse_spark_text
    | models of family {model.family} have it | Set it to a number above 0
checkpoint.export_hf | model.family == muse_spark_text and model.hf_path == null
    | transformers loads its text model only in a wrapper with vision and audio, which a checkpoint has
    | Set checkpoint.export_hf=false, or model.hf_path=DIR
model.hc_mult < 1 | model.family == deepseek_v4 | models of family {model.family} have hyper-connections | Set 1 or more
model.moe_shortcut: model.num_layers % model.layers_together | | layers are pairs, and there are {model.num_layers}
    | Set an even model.num_layers, or model.moe_shortcut=false
model.moe_shortcut | model.shared_width == 0 | the first layer of a pair has a dense FFN beside its experts
    | Set model.shared_intermediate_size={model.intermediate_size}
model.moe_shortcut | model.first_k_dense > 0; model.num_mtp_layers > 0; model.hc_mult > 0; model.post_norm_eps != null;
    model.router.num_hash_layers > 0 | layers are pairs of one stream: the second adds what the first's experts give
not model.moe_shortcut | model.family == longcat_flash | its layers are pairs | Set model.moe_shortcut=true
model.shared_intermediate_size != model.intermediate_size | model.family == longcat_flash
    | config.json has one width for the dense FFNs of a pair, and the first one is the shared experts
    | Set model.shared_intermediate_size={model.intermediate_size}
model.attention.scale_latents | model.attention.kind != mla; model.attention.q_lora_rank == null
    | both factors are of the width of a latent
model.router.num_hash_layers: model.router.num_hash_layers > model.num_moe_layers |
    | there are {model.num_moe_layers} layers with experts
model.rope.attention_factor == null | model.family == deepseek_v4 and model.rope.scaling == yarn
    | transformers multiplies rotated dims of a {model.family} by 1 | Set model.rope.attention_factor=1.0
model.final_logit_softcapping != null and model.final_logit_softcapping <= 0 | | it bounds the absolute values of logits
    | Set model.final_logit_softcapping=null
""", WEIGHTED="streams and gates weight what a block adds")
_TENSOR = table("""
model.attention.num_heads % mesh.tp | | mesh.tp={mesh.tp} ranks hold equal numbers of attention heads
model.vocab_size % mesh.tp | | mesh.tp={mesh.tp} ranks hold equal numbers of rows of the embedding
model.intermediate_size % mesh.tp | model.num_dense_layers > 0
    | mesh.tp={mesh.tp} ranks hold equal numbers of columns of the dense FFN
model.shared_intermediate_size % mesh.tp |
    | mesh.tp={mesh.tp} ranks hold equal numbers of columns of the shared experts
model.moe_intermediate_size: model.num_shared_experts * model.moe_intermediate_size % mesh.tp
    | model.shared_intermediate_size == 0
    | mesh.tp={mesh.tp} ranks hold equal numbers of columns of the shared experts
mesh.tp: model.attention.num_kv_heads % mesh.tp
    | model.attention.kind == gqa and mesh.tp % model.attention.num_kv_heads
    | tp divides the key/value heads or is a multiple of them: {model.attention.num_kv_heads} heads
    (model.attention.num_kv_heads)
model.expert_hidden_size % 2 | train.dtype == bfloat16 and mesh.ep * mesh.etp > 1 and model.num_moe_layers > 0
    | float32 weights travel at the end of a row, so a bfloat16 row must hold whole ones
""")
_MOE = table("""
moe.router_jitter >= 1 |
    | the router's input is multiplied by uniform(1 - jitter, 1 + jitter), which must stay above 0
    | Set moe.router_jitter=0.01, or anything below 1
model.shared_expert_gate | model.shared_width == 0
    | there is no shared expert to gate (model.num_shared_experts=0)
    | Set model.num_shared_experts=1, or model.shared_expert_gate=false
model.router.softmax_after_topk | model.router.score != softmax
    | a softmax over the chosen logits and score={model.router.score} exclude each other
    | Set model.router.score=softmax, or model.router.softmax_after_topk=false
model.router.softmax_after_topk | not model.router.norm_topk_prob
    | a softmax over the K chosen logits always sums to one, and norm_topk_prob=false says otherwise
    | Set model.router.norm_topk_prob=true, or model.router.softmax_after_topk=false
moe.pad_to_capacity | moe.capacity_factor == 0 | training is dropless, so there is no capacity to pad to
    | Set moe.capacity_factor=1.0, or moe.pad_to_capacity=false
train.dtype != bfloat16 | moe.dispatcher == deepep | moe.dispatcher=deepep sums rows only in bfloat16
model.expert_hidden_size: 2 * model.expert_hidden_size % 16 | moe.dispatcher == deepep
    | moe.dispatcher=deepep sends rows of a multiple of 16 bytes | , or moe.dispatcher=alltoall
model.expert_hidden_size % BLOCK | moe.dispatch_dtype == fp8 and moe.dispatcher == deepep
    | DeepEP takes rows in 8 bits with scales of whole blocks of BLOCK columns
    | Set moe.dispatch_dtype=auto, or moe.dispatcher=alltoall
moe.replay_routing != null | moe.gate != learned | replayed choices leave moe.gate={moe.gate} nothing to choose
moe.gate == empty | model.router.num_zero_experts > 0 | it leaves the last expert out, a zero expert without rows
    | Set moe.gate=balanced
moe.gate == empty | model.num_experts_per_token >= model.num_scored_experts
    | it leaves one expert out, and a token chooses model.num_experts_per_token={model.num_experts_per_token} of
    {facts.others}
    | Set moe.gate=balanced, or choose fewer experts
moe.dispatch_dtype == fp8 | facts.foreign
    | the dispatcher {moe.dispatcher} of a plugin sends tokens in its own format
    | Set moe.dispatch_dtype=auto, or moe.dispatcher=alltoall
moe.record_routing: facts.replays | facts.same
    | the same directory as moe.replay_routing, which would be written over while it is read | Name another directory
moe.replay_routing: facts.replays | not facts.recorded | no recorded steps in {facts.replays}
    | Name the moe.record_routing directory of an earlier run
""", BLOCK=BLOCK)


def model_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    """Yield (key, broken=True, rule, remedy) of broken rules on a model's sizes and their sharding."""
    yield from refused(Scope(config, shape), _WEIGHTS)
    yield from tier_of(config.model).rows(config, shape) or _decoder_rows(config, shape)


def _decoder_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    model, see = config.model, Scope(config, shape)
    yield from refused(see, _MODULES)
    if model.num_moe_layers:
        yield from sharded_expert_rows(config, shape)
    yield from refused(see, _ROUTING)
    group = model.num_scored_experts // model.router.num_groups
    chosen = see.knowing(
        chosen=model.router.topk_groups * group, needed=-(-model.num_experts_per_token // group)
    )
    yield from refused(chosen, _SCORES)
    if model.attention.kind == "gqa":
        yield from refused(see, _GQA)
        rotary = int(model.attention.head_dim * model.rope.partial_rotary_factor)
        share = max(rotary // 2 * 2, 2) / model.attention.head_dim
        yield from refused(see.knowing(rotary=rotary, odd=rotary % 2 or not rotary, share=share), _ROTARY)
    else:
        ratios, dim, rotary = model.attention.compress_ratios, model.attention.head_dim, model.attention.qk_rope_head_dim
        see_ratios = see.knowing(
            ratios=len(ratios), layers=len(model.all_layers), least=min(ratios, default=0), rotary=_rotated(dim, rotary),
            exact=next((even for even in range(rotary // 2 * 2, 0, -2) if _rotated(dim, even) == even), 2),
        )
        yield from refused(see_ratios, _MLA if model.attention.kind == "mla" else _COMPRESSED, _OTHERS)
    yield from refused(see, _LAYERS, _INDEXER, _SIZES)
    ranks, nodes = shape.etp * shape.ep_shard, config.cluster.gpus_per_node
    last = model.num_layers - 1
    see = see.knowing(
        times=ranks // gcd(model.expert_hidden_size, ranks),
        outside=[layer for layer in model.attention.index_shared_layers if not 1 <= layer <= last],
        last=last,
        uneven=config.moe.dispatcher == "hierarchical" and not shape.ep_per_node(nodes),
        per_node=gcd(nodes, shape.ep * shape.etp),
    )
    yield from refused(see, _BIASES, _TENSOR, _NODES)


def _rotated(dim: int, rotary: int) -> int:
    return int(dim * (rotary / dim))  # as transformers computes it, from a share


def sharded_expert_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    """Yield (key, broken=True, rule, remedy) of broken rules on experts over ep, etp and ep_shard."""
    model, width = config.model, config.model.moe_intermediate_size

    def fewer_shards(size: int) -> str:
        """Return mesh overrides, for an error, with which FSDP splits an expert's dim of ``size`` evenly.

        They lower ``ep_shard`` of the mesh and raise ``ep`` by the same factor, such as ``mesh.ep=8
        mesh.ep_shard=2``; or ``ep_replicate``, if the number of experts is no multiple of that
        ``ep``.
        """
        shards = gcd(size // gcd(size, shape.etp), shape.ep_shard)
        times = shape.ep_shard // shards
        if model.num_experts % (shape.ep * times) == 0:
            return f"mesh.ep={shape.ep * times} mesh.ep_shard={shards}"
        return f"mesh.ep_replicate={shape.ep_replicate * times} mesh.ep_shard={shards}"

    see = Scope(config, shape).knowing(
        width_fits=f"mesh.etp={gcd(width, shape.etp)}" if width % shape.etp else fewer_shards(width),
        rows_fit=fewer_shards(model.expert_hidden_size),
    )
    yield from refused(see, _EXPERTS)


def moe_rows(config: Config) -> Iterator[Row]:
    """Yield (key, broken=True, rule, remedy) of broken rules on routing, dropping and auxiliary losses."""
    replayed, recorded = (
        folder and Path(folder).expanduser().absolute()
        for folder in (config.moe.replay_routing, config.moe.record_routing)
    )
    see = Scope(config, config.mesh).knowing(
        others=config.model.num_scored_experts - 1,
        foreign=config.moe.dispatcher in registered_names("moe.dispatcher"),
        replays=replayed,
        same=replayed == recorded,
        recorded=replayed and any(replayed.glob("step-*/rank-*.npz")),
    )
    yield from refused(see, _MOE)
