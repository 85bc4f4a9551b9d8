"""Activation bytes that one micro-batch leaves on a rank until its backward pass.

What a layer must keep is what its backward formulas read: the input of every norm and every matmul,
the attention's q, k, v, output and log-sum-exp, the routed rows and the experts' activations. With b
bytes a number (2 in bf16) and T tokens on the rank:

    residual stream and norms    4 b T H
    gqa                          b [2 T N D + 2 Tk G D] + 4 T N         N heads, G key-value heads
    gqa with sinks               b [3 T N + 2 Tk G] D + 4 T N           heads wider by 8, and the output's copy
    mla                          b [(T + Tk) N (Dqk + Dv) + latents] + 4 T N
    ffn of width I               4 b T I                                gate, silu(gate), up, their product
    attention by ``math``        w N [T Dqk + Tk (Dqk + Dv) + T S] + b T N Dv   copies of w >= 4 bytes, and the scores
    gate of shared experts       b T (H + 1)                            their output, the gate
    routed experts               b R (H + 2 I) + router                 R = T K rows, K experts a token; gate, up

Tk counts keys and values: whole rows, whatever cp is, when the context is gathered. A mask is kept as numbers, one
[S, S] per row. The experts' product is made again. Their outputs are not kept: their sum to tokens does not need them
(the probabilities were applied before), though a plain index_add would hold on to what it adds. A recomputed region
keeps its inputs:

    core_attn        q, k, v (its output is the output projection's input)
    mlp              its input, which the norm before it made and counts
    shared_experts   likewise
    moe              likewise, and K expert numbers and weights a token
    full             b T H, and K expert numbers a token

Of these the outputs are not kept, since their inputs are:

    layernorm        of both norms of a layer: 2 b T H less
    mla_up_proj      q, k, v: the latents and the rotated keys are kept, b T Drope
    moe_act          of the experts' activation: nothing to be less, it is not kept anyway
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from automoe.config.batch import BatchPlan
from automoe.config.mesh_shape import MeshShape
from automoe.config.recompute import FULL
from automoe.config.rules_kernels import ELEMENT_BYTES
from automoe.config.schema import AttentionConfig, Config, ModelConfig, is_linear, window_of

# Of automoe.model.loss and automoe.model.delta_net, which this package must not import.
DELTA_CHUNK = 64

UNEVEN = 2.0  # times the even load of experts: where routers start, and at times stay


def at_load(batch: BatchPlan, factor: float, config: Config, mesh: MeshShape) -> BatchPlan:
    """``batch`` where the experts of one rank get ``factor`` times their even share of rows, or as many as they can."""
    return replace(
        batch,
        expert_rows_per_rank=batch.expert_rows_per_rank * min(factor, most_load(config, mesh)),
    )


def most_load(config: Config, mesh: MeshShape) -> float:
    """Times their even share that experts of a rank can get: what all of ``ep`` send, what capacity lets through."""
    most = min(
        float(mesh.ep), max(1.0, config.moe.capacity_factor) if config.moe.capacity_factor else inf
    )
    return 1.0 if config.moe.pad_to_capacity else most  # every rank computes as much as any


@dataclass(frozen=True)
class TokenLoad:
    """What one micro-batch puts on a rank, and what the rank's operators make of it."""

    tokens: int
    kv_tokens: int  # keys and values that its attention reads
    expert_rows: float  # (token, expert) pairs
    mask_numbers: int  # of the attention masks, over the micro-batch's rows; 0: plain causality
    window_numbers: int  # the same of layers with a sliding window, which always have a mask
    number_bytes: int  # of an activation
    dispatched: (
        bool  # expert rows are received in a buffer; else experts read the rank's own tokens
    )
    # Attention on a CPU keeps values and outputs at the width of the keys. CUDA's keeps the values as a view into the
    # projection that also made the keys.
    on_cpu: bool
    # Keys and values of grouped heads are copied to all heads where there is a mask, or float32.
    copies_groups: bool
    tp: int = 1
    etp: int = 1
    read_rows: float = (
        0.0  # that the experts' backward gives a gradient: the rank's tokens, or what it received
    )
    loop: bool = False  # experts by autograd, one after the other
    scores: bool = False  # attention keeps every one of them (kernels.attention=math)

    @classmethod
    def of(cls, config: Config, mesh: MeshShape, batch: BatchPlan) -> TokenLoad:
        """Of the operators that the planned cluster runs."""
        gathered = mesh.cp if config.parallel.context == "gather" else 1
        tokens, on_cpu = batch.tokens_per_micro_batch, config.cluster.gpu == "cpu"
        # Attention has the positions of all tp ranks.
        mask_numbers = tokens * mesh.tp * (config.train.seq_len * gathered // mesh.cp)
        dispatched = mesh.ep * mesh.etp > 1 or config.moe.pad_to_capacity
        read_rows: float = tokens
        if dispatched:
            gathers = config.moe.dispatcher == "allgather" and mesh.ep > 1
            read_rows = tokens * mesh.ep if gathers else batch.expert_rows_per_rank
        return cls(
            tokens=tokens,
            kv_tokens=tokens * gathered,
            expert_rows=batch.expert_rows_per_rank,
            mask_numbers=mask_numbers if config.data.document_mask or gathered > 1 else 0,
            window_numbers=mask_numbers,
            number_bytes=ELEMENT_BYTES[config.train.dtype],
            dispatched=dispatched,
            on_cpu=on_cpu,
            copies_groups=not on_cpu and config.kernels.attention == "sdpa",
            tp=mesh.tp,
            etp=mesh.etp,
            read_rows=read_rows,
            loop=config.moe.experts == "loop",
            scores=config.kernels.attention == "math",
        )


def layer_activation_bytes(
    model: ModelConfig, layer: int, load: TokenLoad, recompute: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Bytes by component (``norms attention ffn experts router``) of one layer and micro-batch.

    Args:
        recompute: what the layer runs again (``automoe.config.recompute.recomputed_modules``).
    """
    size, tokens, hidden = load.number_bytes, load.tokens, model.hidden_size
    wide = max(4, size)
    routed = layer >= model.first_k_dense
    top_k = model.num_experts_per_token
    if FULL in recompute:
        choices = 2 if model.router.expert_bias or model.router.num_groups > 1 else 1
        kept = {"norms": float(size * tokens * hidden)}
        return kept | ({"router": 8.0 * choices * tokens * top_k} if routed else {})
    # What tp ranks multiply by slices of weights is gathered; routers, and MLA's projections down, read their own part.
    gathered = load.tp * (load.tp > 1)
    outputs = load.tp if model.attention.kind == "gqa" else 1
    outputs += 1 + gathered * bool(model.shared_width) if routed else load.tp
    outputs *= "layernorm" not in recompute
    parts = {
        "norms": tokens * float(2 * _norm_input(hidden, size) + outputs * size * hidden),
        "attention": _attention_bytes(model.attention, layer, load, recompute),
    }
    ffn_width = model.shared_width if routed else model.intermediate_size
    again = ("shared_experts" if routed else "mlp") in recompute
    parts["ffn"] = 0.0 if again else 4.0 * size * tokens * ffn_width
    if routed and model.shared_expert_gate and not again:
        parts["ffn"] += size * tokens * (hidden + 1)  # what is gated, and the gate
    if not routed:
        return parts
    width = model.moe_intermediate_size / load.etp
    per_row = hidden + 5 * width if load.loop else 2 * width
    received = hidden * load.read_rows * (load.dispatched and not load.loop)
    parts["experts"] = 0.0 if "moe" in recompute else size * (load.expert_rows * per_row + received)
    # Scores; then a choice's expert, weight and places, of which a recomputed dispatch keeps none.
    per_choice = (8 + 2 * wide) * tokens * top_k if "moe" in recompute else 32 * load.expert_rows
    scored = (
        1 + model.router.softmax_after_topk
    )  # the gather of chosen logits keeps them all, and the scores
    parts["router"] = float(wide * tokens * scored * model.num_experts + per_choice)
    return parts


def mask_bytes(
    config: Config, load: TokenLoad, layers: list[int], recompute: dict[int, frozenset[str]]
) -> float:
    """What a micro-batch keeps for all layers of a stage: angles, and masks where a recomputed attention reads them."""
    attention = config.model.attention
    dims = attention.qk_rope_head_dim
    if attention.kind == "gqa":
        dims = int(attention.head_dim * config.model.rope.partial_rotary_factor)
    again = [
        layer
        for layer in layers
        if recompute[layer] & {FULL, "core_attn"} and not is_linear(attention, layer)
    ]
    plain = load.mask_numbers * any(not window_of(attention, layer) for layer in again)
    window = load.window_numbers * any(window_of(attention, layer) for layer in again)
    return float(load.number_bytes * load.tp * load.tokens * dims + plain + window)


def _norm_input(width: int, size: int) -> int:
    """Bytes per token that a norm over ``width`` keeps, its output (which the next matmul keeps) apart."""
    return size * width + 4


def _attention_bytes(
    attention: AttentionConfig, layer: int, load: TokenLoad, recompute: frozenset[str]
) -> float:
    again = "core_attn" in recompute
    if is_linear(attention, layer):
        return _delta_net_bytes(attention, load, again)
    size, heads, tokens, kv_tokens = (
        load.number_bytes,
        attention.num_heads,
        load.tokens,
        load.kv_tokens,
    )
    mask_numbers = load.window_numbers if window_of(attention, layer) else load.mask_numbers
    by_math = load.scores and not again
    mask_bytes = mask_numbers * size  # one a layer, in the dtype of heads
    kept = 0.0 if again or by_math else 4.0 * tokens * heads + mask_bytes  # log-sum-exp, mask
    if attention.kind == "gqa":
        dim, groups = attention.head_dim, max(attention.num_kv_heads, load.tp)
        if attention.qk_norm:
            kept += tokens * (heads + groups) * _norm_input(dim, size)
        if load.copies_groups and not again and (mask_numbers or size > 2):
            groups = heads
        if attention.output_gate:
            # The gate and what it has let through; and the queries' norm keeps the whole projection.
            kept += 3 * size * tokens * heads * dim
        if by_math:
            return kept + _math_bytes(load, heads, dim, dim, attention.sinks)
        if attention.sinks and not again:
            # A key more a row; one more dim, to a multiple of 8, holds the sinks; what leaves the kernel is cut.
            kept += size * tokens * heads * dim
            longer = 1 + tokens / load.window_numbers
            return kept + longer * size * (dim + 8 - dim % 8) * (
                2 * tokens * heads + 2 * kv_tokens * groups
            )
        return kept + size * dim * (2 * tokens * heads + 2 * kv_tokens * groups)
    qk, value = attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
    padded = load.on_cpu and value < qk
    in_place = not load.on_cpu or (padded and again)
    stored_value = value + attention.qk_nope_head_dim if in_place else value
    out = value
    if padded and not again:
        stored_value, out = qk, qk + value
    query = key = qk
    promised = "mla_up_proj" in recompute
    if promised:  # but for padded values, which are the attention's own copy
        query, key, stored_value = 0, 0, qk if padded and not again else 0
    if by_math:
        kept += _math_bytes(load, heads, qk, value)
    else:
        kept += size * heads * (tokens * (query + out) + kv_tokens * (key + stored_value))
    latent, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
    gathered = kv_tokens > tokens  # latents and rotated keys travel side by side
    kept += tokens * _norm_input(latent, size) + size * load.tp * kv_tokens * (
        latent + rope * (gathered or promised)
    )
    kept += size * tokens * rope  # in the storage of the latent, which its norm keeps
    if attention.q_lora_rank is not None:
        kept += tokens * (
            _norm_input(attention.q_lora_rank, size) + size * load.tp * attention.q_lora_rank
        )
    return kept


def score_numbers(load: TokenLoad, heads: int) -> float:
    """Of the rank's queries, with every key of their rows."""
    return heads * load.window_numbers / load.tp


def _math_bytes(load: TokenLoad, heads: int, qk: int, value: int, sinks: bool = False) -> float:
    """Scaled queries and keys, values for every head, and scores, all wide; and the output that is projected."""
    tokens, kv_tokens, wide = load.tokens, float(load.kv_tokens), max(4, load.number_bytes)
    scores, output = score_numbers(load, heads), heads * tokens * value
    if (
        sinks
    ):  # one key more a row; heads are wider, to a multiple of 8, and what leaves the kernel is cut
        longer = 1 + tokens / load.window_numbers
        qk, kv_tokens, scores = qk + 8 - qk % 8, longer * kv_tokens, longer * scores
        value = qk
    return float(
        wide * (heads * (tokens * qk + kv_tokens * (qk + value)) + scores)
        + load.number_bytes * output
    )


def _delta_net_bytes(attention: AttentionConfig, load: TokenLoad, again: bool) -> float:
    """What autograd keeps of ``automoe.model.delta_net``: inside the rule everything is wide.

    Outside it, the convolution's padded input, its output and that through silu; the rule's result as the norm
    reads it, normed, the gate before and after silu, and their product. Inside, six [C, C] matrices a chunk of C
    positions, the system's right side and solution, ten times the keys, a state a chunk.
    """
    size, wide, tokens = load.number_bytes, max(4, load.number_bytes), load.tokens
    heads, groups = attention.linear_num_value_heads, attention.linear_num_key_heads
    key, value = attention.linear_key_head_dim, attention.linear_value_head_dim
    channels = 2 * groups * key + heads * value
    convolved = (
        3 if again or size == wide else 2
    )  # the rule keeps wider copies of what it was given
    kept = size * tokens * (convolved * channels + 2 * heads * value) + wide * tokens * heads * (
        3 * value + 5
    )
    if again:
        return float(kept)
    inside = (
        heads * (6 * DELTA_CHUNK + 3 * value + 10 * key + key * value / DELTA_CHUNK + 3)
        + 2 * groups
    )
    if size < wide:
        inside += 2 * groups * key
    return kept + wide * tokens * inside
