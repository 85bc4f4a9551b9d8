"""Every parameter of a model as a name and a shape, their sums, and the FLOPs of one training token. No torch.

Names and shapes are those of ``automoe.model``, which this package must not import: it would take
seconds, and a plan is printed before torch is imported.

FLOPs come in the two conventions that published MFU figures use. A multiply-add is 2 FLOPs and the backward pass costs
twice the forward, so a weight that a token meets costs 6; a frozen one 4, or 2 where nothing below it is trained. A
gated delta net counts as its recurrence: reading a head's state with a key, changing it, and reading it with a query
are three products of Dk x Dv numbers a token. Router, norms, biases, softmax and recomputation are not counted.

Letters: V vocabulary, H hidden, I expert width, E experts, K top-k, D head dim, R low rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from automoe.config.schema import AttentionConfig, ModelConfig, is_linear, window_of

# Projections cut by output features (dim 0) or input features (dim 1) under tensor parallelism.
_TP_DIMS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), 0)
_TP_DIMS |= {"in_proj_qkvz": 0, "in_proj_ba": 0, "out_proj": 1}
_TP_DIMS |= {"embed_tokens": 0, "lm_head": 0, "o_proj": 1, "down_proj": 1}

# Added or compared, not multiplied by: no matrix products, and no FLOPs worth counting.
_ADDED = ("bias", "b_gate_up", "b_down", "sinks", "dt_bias", "A_log")
# Vectors of one number a head, which go with their heads.
_BY_HEAD = ("sinks", "dt_bias", "A_log")

# The modules of a layer in the order in which a token meets them; a place has those that do not wait for each other.
_PLACES = (
    "input_layernorm",
    "q_proj k_proj v_proj q_a_proj kv_a_proj_with_mqa in_proj_qkvz in_proj_ba",
    "q_norm k_norm q_a_layernorm kv_a_layernorm conv1d dt_bias A_log",
    "q_b_proj kv_b_proj sinks",
    "norm",
    "o_proj out_proj",
    "post_attention_layernorm",
    "gate_proj up_proj w_gate_up b_gate_up A13 B13 router output_gate",
    "down_proj w_down b_down A2 B2",
)
_SCORES = 3  # attention itself comes behind this place
_PLACE_OF = {name: place for place, names in enumerate(_PLACES) for name in names.split()}
_LORA_B = (".lora.B", ".lora.B13", ".lora.B2")  # adapters multiply by A first, which is trained

Shapes = dict[str, tuple[int, ...]]  # name within its layer -> dims
PARTS = ("embedding", "attention", "dense_ffn", "routed_experts", "shared_experts", "router", "norms", "head")
# What the names of a layer's parameters hold, and their part. The first that fits counts.
_PART_BY_NAME = {
    "norm": "norms",
    "self_attn.": "attention",
    "linear_attn.": "attention",
    "mlp.router.": "router",
    "mlp.experts.": "routed_experts",
    "mlp.shared_experts.": "shared_experts",
    "mlp.": "dense_ffn",
}


@dataclass(frozen=True)
class Param:
    """One trained tensor. ``layer`` is None outside the decoder layers (embedding, final norm, head)."""

    name: str
    shape: tuple[int, ...]
    part: str
    layer: int | None = None
    kv_heads: int | None = None  # of a key or value projection
    trained: bool = True
    packed: int = 0  # then its last two dims are blocks of so many numbers and their bytes (``lora.base``)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def bytes_each(self, size: int) -> int:
        """What one entry of ``shape`` takes, where a number takes ``size`` bytes."""
        return 1 if self.packed else size

    @property
    def expert(self) -> bool:
        """Whether it lives on the moe mesh: sharded over ep and ep_shard instead of dp_shard and cp."""
        return self.part == "routed_experts"

    @property
    def whole_over_etp(self) -> bool:
        """Whether ranks that share the width of an expert each keep all of it: adapters of the other dims."""
        return self.name.endswith((".lora.A13", ".lora.B2"))

    @property
    def multiplies(self) -> bool:
        """Whether tokens are multiplied by it as a matrix: not a bias, nor a convolution over a few positions."""
        module, last = self.name.split(".")[-2:]
        return last not in _ADDED and module != "conv1d"

    @property
    def place(self) -> int:
        """Where in its layer a token meets it (``_PLACES``)."""
        return next(_PLACE_OF[word] for word in reversed(self.name.split(".")) if word in _PLACE_OF)

    def tp_dim(self, tp: int) -> int | None:
        """The dim that ``tp`` ranks cut it on, or None where each keeps it whole."""
        if tp == 1 or (self.kv_heads is not None and self.kv_heads < tp):
            return None
        before, module, last = f".{self.name}".split(".")[-3:]
        if module == "lora":  # the matrix with the dim that its target is cut on
            dim = _TP_DIMS.get(before)
            return dim if (dim, last) in ((0, "B"), (1, "A")) else None
        dim = 0 if last in _BY_HEAD else _TP_DIMS.get(module)
        return dim if dim is not None and dim < len(self.shape) else None  # a bias behind a sum stays whole


@dataclass(frozen=True)
class ParamCount:
    """Parameters of a whole model, or of a piece of it.

    ``active`` counts what one token meets: everything but the routed experts it was not sent to.
    """

    total: int
    active: int
    by_part: dict[str, int]


def layer_params(model: ModelConfig, layer: int) -> list[Param]:
    """Parameters of decoder layer ``layer``. The router's selection bias is a buffer, not listed."""
    hidden = model.hidden_size
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes |= (_delta_net_shapes if is_linear(model.attention, layer) else _attention_shapes)(hidden, model.attention)
    if layer < model.first_k_dense:
        shapes |= _ffn_shapes("mlp", hidden, model.intermediate_size)
    else:
        experts, width = model.num_experts, model.moe_intermediate_size
        shapes["mlp.router.weight"] = (experts, hidden)
        shapes["mlp.experts.w_gate_up"] = (experts, 2, width, hidden)
        shapes["mlp.experts.w_down"] = (experts, hidden, width)
        if model.router.logit_bias:
            shapes["mlp.router.bias"] = (experts,)
        if model.biased_experts:
            shapes |= {"mlp.experts.b_gate_up": (experts, 2, width), "mlp.experts.b_down": (experts, hidden)}
        if model.shared_width:
            shapes |= _ffn_shapes("mlp.shared_experts", hidden, model.shared_width)
            if model.shared_expert_gate:
                shapes["mlp.shared_experts.output_gate.weight"] = (1, hidden)
    params = []
    for name, shape in shapes.items():
        part = next(part for word, part in _PART_BY_NAME.items() if word in name)
        cut_by_heads = name.startswith(("self_attn.k_proj", "self_attn.v_proj"))
        kv_heads = model.attention.num_kv_heads if cut_by_heads else None
        params.append(Param(f"layers.{layer}.{name}", shape, part, layer, kv_heads))
    return params


def stage_params(model: ModelConfig, layers: list[range], stage: int) -> list[Param]:
    """Parameters of pipeline stage ``stage``, whose layers are ``layers[stage]``, in order.

    A tied head is the embedding and adds nothing, or a copy of it where it has a stage of its own.
    """
    first, last = stage == 0, stage == len(layers) - 1
    embedding = Param("embed_tokens.weight", (model.vocab_size, model.hidden_size), "embedding")
    params = [embedding] if first else []
    for layer in layers[stage]:
        params += layer_params(model, layer)
    if last:
        params.append(Param("norm.weight", (model.hidden_size,), "norms"))
        if not model.tie_embeddings:
            params.append(replace(embedding, name="lm_head.weight", part="head"))
        elif not first:
            params.append(replace(embedding, part="head"))
    return params


def model_params(model: ModelConfig) -> list[Param]:
    """All parameters of the model, in order: embedding, layers, final norm, head."""
    return stage_params(model, [range(model.num_layers)], 0)


def count_params(model: ModelConfig) -> ParamCount:
    """Total and active parameters, and the total by part (keys of ``PARTS``)."""
    by_part = dict.fromkeys(PARTS, 0)
    for param in model_params(model):
        by_part[param.part] += param.numel
    total = sum(by_part.values())
    routed = by_part["routed_experts"]
    idle = routed - routed * model.num_experts_per_token // model.num_experts
    return ParamCount(total=total, active=total - idle, by_part=by_part)


def _attention_shapes(hidden: int, attention: AttentionConfig) -> Shapes:
    heads = attention.num_heads
    shapes: Shapes
    if attention.kind == "gqa":
        dim, groups = attention.head_dim, attention.num_kv_heads
        shapes = {
            "self_attn.q_proj.weight": ((1 + attention.output_gate) * heads * dim, hidden),
            "self_attn.k_proj.weight": (groups * dim, hidden),
            "self_attn.v_proj.weight": (groups * dim, hidden),
            "self_attn.o_proj.weight": (hidden, heads * dim),
        }
        if attention.qkv_bias:
            shapes |= {f"self_attn.{x}_proj.bias": (n * dim,) for x, n in (("q", heads), ("k", groups), ("v", groups))}
        if attention.o_bias:
            shapes["self_attn.o_proj.bias"] = (hidden,)
        if attention.sinks:
            shapes["self_attn.sinks"] = (heads,)
        if attention.qk_norm:
            shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
        return shapes
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    rank, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
    key_value = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    if attention.q_lora_rank is None:
        shapes = {"self_attn.q_proj.weight": (query, hidden)}
    else:
        shapes = {
            "self_attn.q_a_proj.weight": (attention.q_lora_rank, hidden),
            "self_attn.q_a_layernorm.weight": (attention.q_lora_rank,),
            "self_attn.q_b_proj.weight": (query, attention.q_lora_rank),
        }
    return shapes | {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (key_value, rank),
        "self_attn.o_proj.weight": (hidden, heads * attention.v_head_dim),
    }


def _delta_net_shapes(hidden: int, attention: AttentionConfig) -> Shapes:
    keys = attention.linear_num_key_heads * attention.linear_key_head_dim
    heads, width = attention.linear_num_value_heads, attention.linear_value_head_dim
    values, kernel = heads * width, attention.linear_conv_kernel_dim
    return {
        "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * heads, hidden),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, kernel),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.norm.weight": (width,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _ffn_shapes(name: str, hidden: int, width: int) -> Shapes:
    inwards: Shapes = {f"{name}.{x}_proj.weight": (width, hidden) for x in ("gate", "up")}
    return inwards | {f"{name}.down_proj.weight": (hidden, width)}


@dataclass(frozen=True)
class TokenFlops:
    """Training FLOPs per token. ``causal`` counts the half of the attention matrix that is used."""

    causal: float
    full_attention: float

    def mfu(self, tokens_per_second: float, peak_flops: float) -> tuple[float, float]:
        """(``mfu``, ``mfu_full_attention``) as fractions of ``peak_flops`` of all GPUs together."""
        return (self.causal * tokens_per_second / peak_flops, self.full_attention * tokens_per_second / peak_flops)


def train_flops_per_token(
    model: ModelConfig, seq_len: int, num_mtp: int = 0, made: Callable[[list[Param]], list[Param]] = list
) -> TokenFlops:
    """Forward and backward FLOPs per token of rows with ``seq_len`` tokens.

    Args:
        model: the architecture.
        seq_len: tokens a row; attention is taken over whole rows, whatever the documents in them.
        num_mtp: multi-token-prediction modules, each one more (last) layer, a 2H -> H projection
            and another use of the head (arXiv 2412.19437, section 2.2).
        made: of the model's parameters, what there is to multiply by: frozen ones, adapters.
    """
    attention, params = model.attention, made(model_params(model))
    by_layer: dict[int | None, list[Param]] = {}
    for param in params:
        by_layer.setdefault(param.layer, []).append(param)
    embedding, *tail = by_layer[None]
    flows = embedding.trained  # whether what comes next is given something that has a gradient
    matmul = causal = full = 0.0
    for layer in [*range(model.num_layers), *[model.num_layers - 1] * num_mtp]:
        for place in range(len(_PLACES)):
            here = [param for param in by_layer[layer] if param.place == place]
            matmul += sum(_active(model, param) * _passes(param, flows) for param in here)
            flows = flows or any(param.trained for param in here)
            if place != _SCORES:
                continue
            # Two products, forward and for both of their factors backward.
            passes = 6 if flows else 2
            if is_linear(attention, layer):
                state = attention.linear_key_head_dim * attention.linear_value_head_dim
                causal += passes * attention.linear_num_value_heads * state * 3
                full += passes * attention.linear_num_value_heads * state * 3
                continue
            # The band of the attention matrix that a window leaves, of which the first rows are cut by the border.
            keys = min(window_of(attention, layer) or seq_len, seq_len)
            causal += passes * _score_dims(attention) * keys * (1 - keys / (2 * seq_len))
            full += passes * _score_dims(attention) * keys
    flows = flows or tail[0].trained
    head = model.hidden_size * model.vocab_size
    matmul += head * (1 + num_mtp) * _passes(tail[-1] if len(tail) > 1 else embedding, flows)
    matmul += num_mtp * 2 * model.hidden_size**2 * 6
    return TokenFlops(causal=matmul + causal, full_attention=matmul + full)


def _passes(param: Param, flows: bool) -> int:
    """FLOPs of one weight and token: forward, for the gradient of its input if that has one, for its own."""
    return 2 + 2 * (flows or param.name.endswith(_LORA_B)) + 2 * param.trained


def _active(model: ModelConfig, param: Param) -> int:
    """Numbers of ``param`` that one token is multiplied by."""
    if not param.multiplies:
        return 0
    if param.part == "routed_experts":
        return param.numel * model.num_experts_per_token // model.num_experts
    return param.numel if param.part in ("attention", "dense_ffn", "shared_experts") else 0


def _score_dims(attention: AttentionConfig) -> int:
    """Heads x (query-key dim + value dim): what one query does with one key."""
    if attention.kind == "gqa":
        return attention.num_heads * 2 * attention.head_dim
    qk = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    return attention.num_heads * (qk + attention.v_head_dim)
