"""Rules for a model's sizes, their sharding over a mesh, routing and mixed layers. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, inf, isqrt
from pathlib import Path

from automoe.config.facts import BLOCK
from automoe.config.mesh_shape import MeshShape
from automoe.config.plugins import registered_names
from automoe.config.rules import Row, divides
from automoe.config.schema import Config, ModelConfig, TrainConfig
from automoe.config.tier import tier_of

MTP_FAMILIES = ("deepseek_v3", "glm4_moe", "deepseek_v32", "glm_moe_dsa")
BY_CROSS_ENTROPY = "modules for multi-token prediction learn the next tokens by cross-entropy"
NO_MODULES = "peft loads an adapter into the classes of transformers, which have no modules for multi-token prediction"

# Rows are laid out as a table: key and whether it is broken, the rule with its numbers, the remedy.
# fmt: off

def model_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    """Yield the rules for a model's sizes and for how a mesh shards them."""
    model = config.model
    yield ("model.random_weights", model.random_weights and (model.hf_path is None or model.upcycle),
           "it skips the weights of model.hf_path, which is not set or is upcycled",
           "Set model.random_weights=false")
    yield from tier_of(model).rows(config, shape) or _decoder_rows(config, shape)


def _decoder_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    model = config.model
    yield from _mtp_rows(config)
    yield ("model.first_k_dense", model.first_k_dense > model.num_layers,
           f"there are {model.num_layers} layers in all (model.num_layers)",
           f"Set model.first_k_dense={model.num_layers} or less")
    if model.num_moe_layers:
        yield from sharded_expert_rows(model, shape)
    yield from _routing_rows(model)
    yield from _gqa_rows(model) if model.attention.kind == "gqa" else _mla_rows(model)
    yield from _window_rows(config)
    yield from _indexer_rows(config, shape)
    if model.attention.linear_num_key_heads:
        yield from _delta_net_rows(config, shape)
    for key in ("swiglu_alpha", "swiglu_limit"):
        broken = model.expert_activation == "clamped_swiglu" and not 0 < getattr(model, key) < inf
        yield f"model.{key}", broken, "must be a number larger than 0", f"Set model.{key}=1.702"
    hidden = model.hidden_size
    ranks = shape.etp * shape.ep_shard
    yield ("model.hidden_size",
           model.biased_experts and model.num_moe_layers > 0 and hidden % ranks != 0,
           "etp and FSDP cut the bias of the experts' down projection evenly over mesh.etp*mesh.ep_shard = "
           f"{shape.etp}*{shape.ep_shard} = {ranks} ranks: {hidden} % {ranks} = {hidden % ranks}",
           f"Nearest valid choice: {ranks // gcd(hidden, ranks)} times more ranks on mesh.ep")
    if shape.tp > 1:
        yield from _tensor_rows(model, shape.tp)
    if max(shape.ep, shape.etp) > 1 and model.num_moe_layers:
        nodes = config.cluster.gpus_per_node
        ranks = shape.ep * shape.etp
        yield ("cluster.gpus_per_node", config.moe.dispatcher == "hierarchical" and not shape.ep_per_node(nodes),
               f"moe.dispatcher=hierarchical needs equal numbers of an ep group's ranks on its nodes of {nodes}, and "
               f"mesh.ep*mesh.etp = {shape.ep}*{shape.etp} = {ranks} consecutive ranks form a group",
               f"Set cluster.gpus_per_node={gcd(nodes, ranks)}, a mesh.ep*mesh.etp that divides {nodes} or is its multiple, "
               "or moe.dispatcher=alltoall")
        yield ("model.hidden_size", config.train.dtype == "bfloat16" and hidden % 2 != 0,
               f"float32 weights travel at the end of a row, so a bfloat16 row must hold whole ones: {hidden} % 2 = 1",
               f"Nearest valid choices: {hidden - 1} or {hidden + 1}")


def _mtp_rows(config: Config) -> Iterator[Row]:
    model = config.model
    weight = config.train.mtp_loss_weight
    yield ("train.mtp_loss_weight", not model.num_mtp_layers and weight != TrainConfig.mtp_loss_weight,
           "there are no modules for multi-token prediction", "Set model.num_mtp_layers=1, or leave it out")
    if not model.num_mtp_layers:
        return
    off = "model.num_mtp_layers=0"
    yield ("model.num_mtp_layers", model.family not in MTP_FAMILIES,
           f"a {model.family} checkpoint has no place for multi-token prediction modules; {' and '.join(MTP_FAMILIES)} "
           "have one", f"Set {off}")
    yield ("model.num_mtp_layers", model.first_k_dense >= model.num_layers,
           "a module has experts, and no layer of the model has any", f"Set {off}, or a lower model.first_k_dense")
    yield ("model.upcycle", model.upcycle, "a dense checkpoint has no modules for multi-token prediction",
           f"Set {off}, or upcycle first and train from the result")
    for key, value, plain in (("recipe", config.recipe == "dpo", "pretrain"),
                              ("train.loss", config.train.loss != "cross_entropy", "cross_entropy")):
        yield key, value, BY_CROSS_ENTROPY, f"Set {key}={plain}, or {off}"
    yield ("lora.export", config.lora.rank > 0 and config.lora.export == "adapter", NO_MODULES,
           f"Set lora.export=merged, or {off}")


def sharded_expert_rows(model: ModelConfig, shape: MeshShape) -> Iterator[Row]:
    """Yield the rules for sharding experts over ep, etp and ep_shard."""
    yield divides("model.num_experts", model.num_experts, shape.ep,
        f"mesh.ep={shape.ep} ranks hold equal numbers of experts: {model.num_experts} % {shape.ep} = "
        f"{model.num_experts % shape.ep}", f"mesh.ep={gcd(model.num_experts, shape.ep)}")
    width = model.moe_intermediate_size
    ranks = shape.etp * shape.ep_shard
    yield divides("model.moe_intermediate_size", width, ranks,
        "etp and FSDP cut the width of the experts evenly over mesh.etp*mesh.ep_shard = "
        f"{shape.etp}*{shape.ep_shard} = {ranks} ranks: {width} % {ranks} = {width % ranks}",
        f"mesh.etp={gcd(width, shape.etp)}" if width % shape.etp else _fewer_shards(model, shape, width))
    hidden = model.hidden_size
    yield divides("model.hidden_size", hidden, shape.ep_shard,
        f"FSDP cuts the rows of the experts' down projection evenly over mesh.ep_shard={shape.ep_shard} ranks: "
        f"{hidden} % {shape.ep_shard} = {hidden % shape.ep_shard}",
        _fewer_shards(model, shape, hidden))


def _fewer_shards(model: ModelConfig, shape: MeshShape, size: int) -> str:
    """Return settings with which FSDP cuts ``size`` of an expert evenly, on the same ranks."""
    kept = gcd(size // gcd(size, shape.etp), shape.ep_shard)
    times = shape.ep_shard // kept
    if model.num_experts % (shape.ep * times) == 0:
        return f"mesh.ep={shape.ep * times} mesh.ep_shard={kept}"
    return f"mesh.ep_replicate={shape.ep_replicate * times} mesh.ep_shard={kept}"


def _tensor_rows(model: ModelConfig, tp: int) -> Iterator[Row]:
    for key, size, what in (
        ("attention.num_heads", model.attention.num_heads, "attention heads"),
        ("vocab_size", model.vocab_size, "rows of the embedding"),
        ("intermediate_size", model.first_k_dense and model.intermediate_size, "columns of the dense FFN"),
        ("shared_intermediate_size", model.shared_intermediate_size, "columns of the shared experts"),
    ):
        rule = f"mesh.tp={tp} ranks hold equal numbers of {what}: {size} % {tp} = {size % tp}"
        yield divides(f"model.{key}", size, tp, rule, f"mesh.tp={gcd(size, tp)}")
    if not model.shared_intermediate_size:
        shared = model.shared_width
        yield divides("model.moe_intermediate_size", model.moe_intermediate_size,
            tp // gcd(tp, model.num_shared_experts),
            f"mesh.tp={tp} ranks hold equal numbers of columns of the shared experts: num_shared_experts * "
            f"moe_intermediate_size = {shared}, {shared} % {tp} = {shared % tp}", f"mesh.tp={gcd(shared, tp)}")
    heads = model.attention.num_kv_heads
    yield ("mesh.tp", model.attention.kind == "gqa" and heads % tp != 0 and tp % heads != 0,
           f"tp divides the key/value heads or is a multiple of them: {heads} heads (model.attention.num_kv_heads)",
           f"Nearest valid choice: mesh.tp={gcd(heads, tp)}")


def _routing_rows(model: ModelConfig) -> Iterator[Row]:
    experts = model.num_experts
    k = model.num_experts_per_token
    router = model.router
    yield ("model.num_experts_per_token", k > experts,
           f"a token cannot choose more than all {experts} experts (model.num_experts)",
           f"Set model.num_experts_per_token={experts} or less")
    divisors = [d for n in range(1, isqrt(experts) + 1) if experts % n == 0 for d in (n, experts // n)]
    near = min(divisors, key=lambda n: (abs(n - router.num_groups), n))
    yield ("model.router.num_groups", experts % router.num_groups != 0,
           f"groups hold equal numbers of experts: {experts} % {router.num_groups} = {experts % router.num_groups}",
           f"Nearest valid choice: model.router.num_groups={near}")
    yield ("model.router.topk_groups", router.topk_groups > router.num_groups,
           f"there are only {router.num_groups} groups (model.router.num_groups)",
           f"Set model.router.topk_groups={router.num_groups} or less")
    group = experts // router.num_groups
    yield ("model.router.topk_groups", k > router.topk_groups * group,
           f"{router.topk_groups} groups of {group} experts hold {router.topk_groups * group}, fewer than "
           f"model.num_experts_per_token={k}", f"Nearest valid choice: model.router.topk_groups={-(-k // group)}")
    yield ("model.router.group_score_topk", router.num_groups > 1 and router.group_score_topk > group,
           f"a group has {group} experts", f"Set model.router.group_score_topk={group} or less")


_PAIRS = "rotary embedding rotates pairs of dimensions"


def _gqa_rows(model: ModelConfig) -> Iterator[Row]:
    a = model.attention
    share = model.rope.partial_rotary_factor
    yield ("model.attention.num_kv_heads", a.num_heads % a.num_kv_heads != 0,
           f"key/value heads serve equal numbers of query heads: {a.num_heads} % {a.num_kv_heads} = "
           f"{a.num_heads % a.num_kv_heads}",
           f"Nearest valid choice: model.attention.num_kv_heads={gcd(a.num_heads, a.num_kv_heads)}")
    rotary = int(a.head_dim * share)
    yield ("model.rope.partial_rotary_factor", share < 1 and (rotary % 2 != 0 or not rotary),
           f"{_PAIRS}, and int({a.head_dim} * {share}) = {rotary} of a head",
           f"Nearest valid choice: model.rope.partial_rotary_factor={max(rotary // 2 * 2, 2) / a.head_dim}")
    yield divides("model.attention.head_dim", rotary, 2, _PAIRS)
    yield ("model.attention.qk_norm_over_heads", a.qk_norm_over_heads and not a.qk_norm,
           "model.attention.qk_norm=false norms neither queries nor keys", "Set model.attention.qk_norm=true")
    yield ("model.attention.clip_qkv", a.clip_qkv is not None and not a.clip_qkv > 0,
           "it bounds the absolute values of queries, keys and values", "Set model.attention.clip_qkv=null")


def _mla_rows(model: ModelConfig) -> Iterator[Row]:
    a = model.attention
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        yield (f"model.attention.{name}", getattr(a, name) < 1,
               "attention kind mla needs this size",
               f"Set model.attention.{name}=1 or more")
    yield _gqa_alone("attention.qkv_bias", a.qkv_bias, "false")
    yield _gqa_alone("attention.qk_norm_over_heads", a.qk_norm_over_heads, "false")
    yield _gqa_alone("attention.clip_qkv", a.clip_qkv is not None, "null")
    yield _gqa_alone("rope.partial_rotary_factor", model.rope.partial_rotary_factor != 1, "1.0")
    yield divides("model.attention.qk_rope_head_dim", a.qk_rope_head_dim, 2, _PAIRS)


def _indexer_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    a = config.model.attention
    yield ("train.indexer", config.train.indexer != "sparse" and not a.index_topk,
           "the model has no indexers (model.attention.index_topk=0)", "Set train.indexer=sparse")
    yield ("model.attention.index_topk", a.index_topk > 0 and a.kind != "mla", "only attention kind mla has it",
           "Set model.attention.index_topk=0")
    family = config.model.family
    yield ("model.attention.index_topk", not a.index_topk and family in ("deepseek_v32", "glm_moe_dsa"),
           f"models of family {family} have indexers", "Set 1 or more, or model.family=deepseek_v3")
    yield ("model.attention.index_shared_layers", not a.index_topk and bool(a.index_shared_layers),
           "the model has no indexers (model.attention.index_topk=0)", "Set model.attention.index_shared_layers=[]")
    if not a.index_topk:
        return
    given = f"(model.attention.index_topk={a.index_topk})"
    yield ("model.attention.q_lora_rank", a.q_lora_rank is None,
           f"an indexer's queries are projected from the latent of attention's {given}",
           "Set model.attention.q_lora_rank=1 or more")
    for key, least in (("index_n_heads", 1), ("index_head_dim", a.qk_rope_head_dim)):
        yield (f"model.attention.{key}", getattr(a, key) < least,
               f"an indexer needs {least} or more {given}; the first model.attention.qk_rope_head_dim="
               f"{a.qk_rope_head_dim} dims of its heads are rotated",
               f"Set model.attention.{key}={least} or more")
    shared = a.index_shared_layers
    layers = range(1, config.model.num_layers)
    yield ("model.attention.index_shared_layers", any(layer not in layers for layer in shared),
           f"{shared}: layers 1 to {layers.stop - 1} can use the choice of a layer before them",
           "Leave the others out")
    context = config.parallel.context
    yield ("parallel.context", shape.cp > 1 and context != "gather",
           f"{context} takes no mask that differs between ranks, and a query sees only chosen keys {given}",
           "Set parallel.context=gather")


def _gqa_alone(key: str, broken: bool, plain: str) -> Row:
    return f"model.{key}", broken, "only attention kind gqa has it", f"Set model.{key}={plain}"


def _window_rows(config: Config) -> Iterator[Row]:
    attention = config.model.attention
    for key, least in (("full_attention_interval", 1), ("sliding_window", 0)):
        broken = getattr(attention, key) < least
        yield f"model.attention.{key}", broken, f"must be at least {least}", f"Set model.attention.{key}={least}"
    kinds = (attention.sliding_window > 0) + (attention.linear_num_key_heads > 0)
    yield ("model.attention.full_attention_interval", kinds != (attention.full_attention_interval > 1),
           "layers without full attention have a window or are delta nets, and there are none at an interval of 1; "
           f"model.attention.sliding_window={attention.sliding_window}, linear_num_key_heads="
           f"{attention.linear_num_key_heads}",
           ("Set model.attention.full_attention_interval=1, or model.attention.sliding_window=128",
            "Set model.attention.full_attention_interval=2",
            "Set model.attention.sliding_window=0, or model.attention.linear_num_key_heads=0")[kinds])
    for key in ("sinks", "sliding_window", "linear_num_key_heads", "o_bias", "output_gate"):
        value = getattr(attention, key)
        plain = "false" if isinstance(value, bool) else "0"
        yield _gqa_alone(f"attention.{key}", value and attention.kind != "gqa", plain)


def _delta_net_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    attention = config.model.attention
    heads = attention.linear_num_key_heads
    values = attention.linear_num_value_heads
    given = f"(model.attention.linear_num_key_heads={heads})"
    for key in ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"):
        key = f"model.attention.{key}"
        broken = getattr(attention, key.rpartition(".")[2]) < 1
        yield key, broken, f"a delta net needs this size {given}", f"Set {key}=1 or more"
    yield ("model.attention.linear_num_value_heads", values % heads != 0,
           f"a delta net's key heads serve equal numbers of value heads: {values} % {heads} = {values % heads}",
           f"Nearest valid choices: {max(values // heads, 1) * heads} or {(values // heads + 1) * heads}")
    yield ("mesh.tp", heads % shape.tp != 0,
           f"tp ranks hold equal numbers of a delta net's key heads (model.attention.linear_num_key_heads): "
           f"{heads} % {shape.tp} = {heads % shape.tp}", f"Nearest valid choice: mesh.tp={gcd(heads, shape.tp)}")


def moe_rows(config: Config) -> Iterator[Row]:
    """Yield the rules of routing, token dropping and the auxiliary losses."""
    moe = config.moe
    model = config.model
    router = model.router
    yield ("moe.router_jitter", moe.router_jitter >= 1,
           "the router's input is multiplied by uniform(1 - jitter, 1 + jitter), which must stay above 0",
           "Set moe.router_jitter=0.01, or anything below 1")
    yield ("model.shared_expert_gate", model.shared_expert_gate and not model.shared_width,
           "there is no shared expert to gate (model.num_shared_experts=0)",
           "Set model.num_shared_experts=1, or model.shared_expert_gate=false")
    yield ("model.router.softmax_after_topk", router.softmax_after_topk and router.score != "softmax",
           f"a softmax over the chosen logits and score={router.score} exclude each other",
           "Set model.router.score=softmax, or model.router.softmax_after_topk=false")
    yield ("model.router.softmax_after_topk", router.softmax_after_topk and not router.norm_topk_prob,
           "a softmax over the K chosen logits always sums to one, and norm_topk_prob=false says otherwise",
           "Set model.router.norm_topk_prob=true, or model.router.softmax_after_topk=false")
    yield ("moe.gate", moe.gate == "empty" and model.num_experts_per_token >= model.num_experts,
           "it leaves one expert out, and a token chooses model.num_experts_per_token="
           f"{model.num_experts_per_token} of {model.num_experts - 1}",
           "Set moe.gate=balanced, or choose fewer experts")
    yield ("moe.pad_to_capacity", moe.pad_to_capacity and not moe.capacity_factor,
           "moe.capacity_factor=0 means dropless, so there is no capacity to pad to",
           "Set moe.capacity_factor=1.0, or moe.pad_to_capacity=false")
    deepep = moe.dispatcher == "deepep"  # ``automoe.launch.hardware`` checks if it is installed
    yield ("train.dtype", deepep and config.train.dtype != "bfloat16",
           "moe.dispatcher=deepep sums rows only in bfloat16",
           "Set train.dtype=bfloat16, or moe.dispatcher=alltoall")
    hidden = model.hidden_size
    yield ("model.hidden_size", deepep and 2 * hidden % 16 != 0,
           f"moe.dispatcher=deepep sends rows of a multiple of 16 bytes: 2 * {hidden} % 16 = {2 * hidden % 16}",
           f"Set model.hidden_size={-(-hidden // 8) * 8}, or moe.dispatcher=alltoall")
    in_8_bits = moe.dispatch_dtype == "fp8"
    yield ("model.hidden_size", in_8_bits and deepep and hidden % BLOCK != 0,
           f"DeepEP takes rows in 8 bits with scales of whole blocks of {BLOCK} columns: {hidden} % {BLOCK} = "
           f"{hidden % BLOCK}", "Set moe.dispatch_dtype=auto, or moe.dispatcher=alltoall")
    yield ("moe.dispatch_dtype", in_8_bits and moe.dispatcher in registered_names("moe.dispatcher"),
           f"the dispatcher {moe.dispatcher} of a plugin sends tokens in its own format",
           "Set moe.dispatch_dtype=auto, or moe.dispatcher=alltoall")
    if moe.replay_routing is None:
        return
    folder = Path(moe.replay_routing).expanduser().absolute()
    yield ("moe.replay_routing", moe.gate != "learned",
           f"replayed choices leave moe.gate={moe.gate} nothing to choose",
           "Set moe.gate=learned, or moe.replay_routing=null")
    recorded = None if moe.record_routing is None else Path(moe.record_routing).expanduser().absolute()
    yield ("moe.record_routing", recorded == folder,
           "the same directory as moe.replay_routing, which would be written over while it is read",
           "Name another directory")
    yield ("moe.replay_routing", not any(folder.glob("step-*/rank-*.npz")),
           f"no recorded steps in {folder}", "Name the moe.record_routing directory of an earlier run")
