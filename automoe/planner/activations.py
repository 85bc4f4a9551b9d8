"""Bytes of activations that one micro-batch keeps on a rank until its backward pass.

A layer keeps what its backward formulas read: the input of every norm and every matmul, the
attention's q, k, v, output and log-sum-exp, the tokens copied for each chosen expert and the
experts' activations. The table uses b bytes per element (2 in bf16), w = max(b, 4), and these
letters: T tokens of the rank, Tk tokens whose keys and values the rank reads, S sequence, H hidden,
N heads, G key-value heads, D head dim (Dqk of queries and keys, Dv of values, Dj of an indexer), I
FFN width, K top-k, R = T K rows of routed experts.

    residual stream, norms     4 b T H
    n streams of the residual  2 b T H (n + 1) more            of each half of a layer: the streams,
                                                               the output that is spread over them
    gqa                        b [2 T N D + 2 Tk G D] + 4 T N
    gqa with sinks             b [3 T N + 2 Tk G] D + 4 T N    D is up to 8 larger; output copied
    mla                        b [(T + Tk) N (Dqk + Dv) + latents] + 4 T N
    indexer of J heads         w [T J (Dj + 1) + (T + Tk) Dj]  gradients, made in the forward pass
    ffn of width I             4 b T I                         gate, silu(gate), up, product
    attention=math             w N [T Dqk + Tk (Dqk + Dv) + T S] + b T N Dv
                                                               copies in at least float32, scores
    gate of shared experts     b T (H + 1)                     the experts' output, the gate
    routed experts             b R (H + 2 I) + router          gathered rows, gate, up
    an MTP module's inputs     4 b T H                         both, and both concatenated

With parallel.context=gather, Tk counts the keys and values of whole sequences, whatever cp is; with
ulysses a rank has those of whole sequences for 1 / cp of the heads, so Tk is T, and attention's
output is kept a second time, after the all-to-all. An attention mask is a tensor, one [S, S] matrix
per sequence. The product gate * up of the experts is recomputed. The experts' outputs are not kept:
routing weights were applied before, so the sum over a token's experts does not need the outputs in
its backward pass (a plain index_add would keep them). A recomputed module keeps its inputs:

    core_attn        q, k, v (the output is kept as the output projection's input)
    mlp              nothing more: its input is the norm's output, counted with the norms
    shared_experts   nothing more, for the same reason
    moe              nothing more but the K expert indices and weights per token
    full             b T H, and K expert indices per token

Three modules discard their outputs and keep their inputs:

    layernorm        saves the outputs of both norms of a layer: 2 b T H
    mla_up_proj      saves q, k, v; keeps the latents and the rotated keys, b T Drope
    moe_act          saves nothing: the output of the experts' activation is not kept anyway
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from automoe.config.batch import BatchPlan
from automoe.config.facts import ELEMENT_BYTES
from automoe.config.mesh_shape import MeshShape, uses_ulysses
from automoe.config.recompute import FULL
from automoe.config.rules_kernels import head_dims, wire_row_bytes
from automoe.config.schema import (
    AttentionConfig,
    Config,
    ModelConfig,
    has_indexer,
    is_linear,
    ratio_of,
    window_of,
)
from automoe.planner import compressed
from automoe.planner.residual import connection_bytes, joined_bytes

# Chunk length of automoe.kernels.delta_rule, repeated here because the planner must not import torch.
DELTA_CHUNK = 64

# Routers start at this multiple of the even expert load, and sometimes return to it.
UNEVEN = 2.0


def at_load(batch: BatchPlan, factor: float, config: Config, mesh: MeshShape) -> BatchPlan:
    """Return ``batch`` with ``factor`` times the mean number of (token, expert) pairs on a rank.

    It models a rank whose experts get more tokens than others. A factor above the largest possible
    load (``most_load``) is lowered to it.
    """
    rows = batch.expert_rows_per_rank * min(factor, most_load(config, mesh))
    return replace(batch, expert_rows_per_rank=rows)


def most_load(config: Config, mesh: MeshShape) -> float:
    """Return the largest possible expert load of a rank, as a multiple of the mean over ranks.

    It is reached if every rank of the ``ep`` group sends all its tokens to one rank, and is thus
    ``ep`` at most. ``moe.capacity_factor`` lowers it; with ``moe.pad_to_capacity`` it is always 1.
    """
    moe = config.moe
    if moe.pad_to_capacity:  # Padded ranks all compute the same number of rows.
        return 1.0
    return min(float(mesh.ep), max(1.0, moe.capacity_factor or inf))


@dataclass(frozen=True)
class TokenLoad:
    """Sizes of one micro-batch on a rank, and the operators that decide which activations are kept.

    Attributes:
        tokens: tokens of the rank; ``rows``: sequences of the micro-batch that contain them.
        kv_tokens: tokens whose keys and values attention reads.
        expert_rows: (token, expert) pairs that the rank computes.
        mask_numbers, window_numbers: elements of a layer's attention mask, with full attention (0:
            no mask tensor) and with a sliding window.
        number_bytes: bytes of an activation element.
        dispatched: True if experts read a buffer of received rows, False if they read local tokens.
        on_cpu: True on a CPU, whose attention keeps values and outputs padded to the width of keys.
        copies_groups: True if attention with a mask, or in float32, keeps keys and values of
            grouped heads copied to all heads.
        tp, etp: sizes of these mesh axes; ``head_ranks``: ranks over which the heads of one token
            are split: tp, times cp with ``parallel.context=ulysses``.
        read_rows: rows that experts read: local tokens, or received ones.
        loop: True with ``moe.experts=loop``; ``wgrad``: value of ``parallel.expert_wgrad``.
        scores, flex: True with ``kernels.attention=math``, which keeps all scores, and with flex.
        in_8_bits: True if experts keep the rows that they read in 8 bits.
    """

    tokens: int
    kv_tokens: int  # number of tokens whose keys and values attention reads
    expert_rows: float  # number of (token, expert) pairs that the rank computes
    mask_numbers: int  # elements of all attention masks of a micro-batch; 0: causal, no mask tensor
    window_numbers: int  # elements of the masks of sliding-window layers, which always have one
    number_bytes: int  # bytes of one activation element
    dispatched: bool  # True if expert rows arrive in a buffer; False if experts read local tokens
    # Attention on a CPU keeps values and outputs padded to the width of the keys. CUDA keeps values
    # as a view into the output of the projection that also produced the keys.
    on_cpu: bool
    # True if attention with a mask, or in float32, copies keys and values of grouped heads to all
    # heads.
    copies_groups: bool
    tp: int = 1
    # ranks that attend with other heads of the same tokens: tp, by cp with ulysses
    head_ranks: int = 1
    rows: int = 1  # rows of a micro-batch
    etp: int = 1
    # Rows that receive a gradient in the experts' backward pass: local tokens or received rows.
    read_rows: float = 0.0
    loop: bool = False  # True for moe.experts=loop, which runs experts one by one through autograd
    scores: bool = False  # True for kernels.attention=math, which keeps every attention score
    in_8_bits: bool = False  # True if experts keep the rows that they read in 8 bits
    flex: bool = False  # True for kernels.attention=flex, whose masks are lists of blocks
    wgrad: str = "autograd"  # parallel.expert_wgrad

    @classmethod
    def of(cls, config: Config, mesh: MeshShape, batch: BatchPlan) -> TokenLoad:
        """Return the sizes of one micro-batch on a rank, with the operators of ``config``.

        Args:
            batch: sizes of a step. Its expert rows per rank may exceed their mean (``at_load``).
        """
        gathered = mesh.cp if config.parallel.context == "gather" else 1
        tokens, on_cpu = batch.tokens_per_micro_batch, config.cluster.on_cpu
        # Attention runs on the sequence gathered over tp, so the mask covers the tokens of all tp
        # ranks.
        exchanged = mesh.cp if uses_ulysses(config, mesh) else 1
        whole = max(gathered, exchanged) // mesh.cp
        queries = tokens * mesh.tp * exchanged
        mask_numbers = queries * (
            config.train.seq_len if whole else config.train.seq_len // mesh.cp
        )
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
            rows=config.train.micro_batch_size,
            head_ranks=mesh.tp * exchanged,
            etp=mesh.etp,
            read_rows=read_rows,
            loop=config.moe.experts == "loop",
            scores=config.kernels.attention == "math",
            in_8_bits=config.moe.dispatch_dtype == "fp8" and config.moe.experts != "loop",
            flex=config.kernels.attention == "flex",
            wgrad=config.parallel.expert_wgrad,
        )

    def mask(self, window: int) -> int:
        """Return the number of elements of a layer's attention mask; 0: it has no mask tensor.

        Args:
            window: sliding window of the layer in tokens; 0: full attention.
        """
        if self.flex:
            return 0
        return self.window_numbers if window else self.mask_numbers


def layer_activation_bytes(
    model: ModelConfig, layer: int, load: TokenLoad, recompute: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Return the bytes that one layer keeps for a micro-batch's backward pass, by component.

    The keys are ``norms``, ``attention`` and ``ffn``, with routed experts also ``experts`` and
    ``router``. A fully recomputed layer has only those keys of which it keeps something.

    Args:
        layer: number of the layer; modules for multi-token prediction follow the model's layers.
        load: sizes of the micro-batch on the rank.
        recompute: modules that the layer recomputes, so that their activations are not kept.
    """
    size, tokens, hidden = load.number_bytes, load.tokens, model.hidden_size
    wide = max(4, size)
    routed = layer in model.moe_layers
    top_k = model.num_experts_per_token
    mtp = layer >= model.num_layers
    if FULL in recompute:
        choices = 2 if model.router.expert_bias or model.router.num_groups > 1 else 1
        more = mtp or (model.moe_shortcut and not routed)  # a second input
        by_part = {"norms": float(size * tokens * (model.residual_width + hidden * more))}
        if has_indexer(model.attention, layer):
            # the chosen keys or entries, a byte each
            by_part["attention"] = load.window_numbers / (ratio_of(model.attention, layer) or 1.0)
        return by_part | ({"router": 8.0 * choices * tokens * top_k} if routed else {})
    # Inputs of tp-sharded weights are kept gathered over tp. Routers and MLA's down projections
    # read only the rank's own tokens.
    gathered = load.tp * (load.tp > 1)
    outputs = load.tp if model.attention.kind == "gqa" else 1
    outputs += 1 + gathered * bool(model.shared_width) if routed else load.tp
    outputs *= "layernorm" not in recompute
    parts = {
        "norms": tokens * float(2 * _norm_input(hidden, size) + outputs * size * hidden)
        + tokens * 2 * (connection_bytes(model, size) + joined_bytes(model, size))
        + tokens * mtp * float(2 * _norm_input(hidden, size) + 2 * size * hidden),
        "attention": _attention_bytes(model.attention, layer, load, recompute),
    }
    ffn_width = model.shared_width if routed else model.intermediate_size
    again = ("shared_experts" if routed else "mlp") in recompute
    # Clamped, the gate after the clamp, its sigmoid and the raised up are kept too.
    factors = 7.0 if model.expert_activation == "clamped_swiglu" else 4.0
    parts["ffn"] = 0.0 if again else factors * size * tokens * ffn_width
    if routed and model.shared_expert_gate and not again:
        # The gate of the shared experts keeps their output and its own value.
        parts["ffn"] += size * tokens * (hidden + 1)
    if not routed:
        return parts
    width = model.moe_intermediate_size / load.etp
    read = model.expert_hidden_size
    per_row = read + 5 * width if load.loop else 2 * width
    received = size * read * load.read_rows * (load.dispatched and not load.loop)
    if load.in_8_bits:
        received = wire_row_bytes(read) * load.read_rows
    experts = size * load.expert_rows * per_row + received
    if model.post_norm_eps:  # the output, as it is and multiplied by the weight and normalised
        experts += load.expert_rows * (3 * size * read + 4)
    parts["experts"] = 0.0 if "moe" in recompute else experts
    if model.moe_latent_size:  # the norm's input and output, and the sum that is projected back
        parts["experts"] += tokens * (_norm_input(read, size) + 2 * size * read)
    # Bytes of each choice's expert index, weight and positions; a recomputed dispatch keeps no
    # positions.
    per_choice = (8 + 2 * wide) * tokens * top_k if "moe" in recompute else 32 * load.expert_rows
    # softmax_after_topk gathers chosen logits, which keeps all logits besides the scores.
    scored = 1 + model.router.softmax_after_topk
    parts["router"] = float(wide * tokens * scored * model.num_scored_experts + per_choice)
    return parts


def mask_bytes(config: Config, load: TokenLoad, recompute: dict[int, frozenset[str]]) -> float:
    """Return the bytes that all layers of a pipeline stage share for one micro-batch.

    These are the rotary angles, and the masks that recomputed attention reads again.

    Args:
        load: sizes of the micro-batch on the rank.
        recompute: for each layer of the stage, by its number, the modules that it recomputes.
    """
    attention = config.model.attention
    dims = attention.qk_rope_head_dim
    if attention.kind == "gqa":
        dims = int(attention.head_dim * config.model.rope.partial_rotary_factor)
    again = [
        layer
        for layer, modules in recompute.items()
        if modules & {FULL, "core_attn"} and not is_linear(attention, layer)
    ]
    if attention.kind == "compressed":
        return compressed.shared_bytes(attention, recompute, load, bool(again))
    masks = sum(map(load.mask, {window_of(attention, layer) for layer in again}))
    return float(load.number_bytes * load.tp * load.tokens * dims + masks)


def _norm_input(width: int, size: int) -> int:
    """Return the bytes that a norm over ``width`` elements keeps per token: input and float32 scale.

    The norm's output is excluded: the next matmul keeps and counts it.

    Args:
        size: bytes per element.
    """
    return size * width + 4


def _attention_bytes(
    attention: AttentionConfig, layer: int, load: TokenLoad, recompute: frozenset[str]
) -> float:
    again = "core_attn" in recompute
    if is_linear(attention, layer):
        return _delta_net_bytes(attention, load, again)
    if attention.kind == "compressed":
        return compressed.kept_bytes(attention, layer, load, again)
    size = load.number_bytes
    heads = attention.num_heads
    tokens = load.tokens
    kv_tokens = load.kv_tokens
    mask_numbers = load.mask(window_of(attention, layer) or attention.index_topk)
    by_math = load.scores and not again
    mask_bytes = mask_numbers * size  # Torch keeps one mask per layer in the dtype of the heads.
    # Attention keeps its log-sum-exp (4 bytes per token and head) and its mask.
    num_bytes = 0.0 if again or by_math else 4.0 * tokens * heads + mask_bytes
    if attention.kind == "gqa":
        dim, groups = attention.head_dim, max(attention.num_kv_heads, load.tp)
        if attention.qk_norm:
            norms = 2 * load.tp if attention.qk_norm_over_heads else heads + groups
            num_bytes += tokens * ((heads + groups) * size * dim + norms * _norm_input(0, size))
        if attention.clip_qkv is not None:
            num_bytes += tokens * (heads + 2 * groups) * size * dim
        # Fewer heads than ranks are repeated for an exchange.
        groups = max(groups, load.head_ranks)
        num_bytes += _exchanged_output(load, heads * dim, again)
        if load.copies_groups and not again and (mask_numbers or size > 2):
            groups = heads
        if attention.output_gate:
            # Autograd keeps the gate and the gated output; the query norm keeps the whole
            # projection, with rows of a gate that has no projection of its own.
            num_bytes += (2 + attention.joint_output_gate) * size * tokens * heads * dim
        if attention.output_norm:
            num_bytes += tokens * heads * (size * dim + 4)
        if by_math:
            return num_bytes + _math_bytes(load, heads, dim, dim, attention.sinks)
        if attention.sinks and load.flex and not again:
            num_bytes += (
                tokens * heads * (size * dim + 4 + size)
            )  # the keys' share, and the product
        elif attention.sinks and not again:
            # Sinks add one key per row and pad heads by one dim to a multiple of 8. The sliced
            # kernel output is a copy.
            num_bytes += size * tokens * heads * dim
            longer = 1 + tokens / load.window_numbers
            return num_bytes + longer * size * (dim + 8 - dim % 8) * (
                2 * tokens * heads + 2 * kv_tokens * groups
            )
        return num_bytes + size * dim * (2 * tokens * heads + 2 * kv_tokens * groups)
    num_bytes += _latent_bytes(attention, load, recompute, by_math)
    if has_indexer(attention, layer):
        # The indexer keeps gradients, which its loss computes in the forward pass, the input of its
        # keys' norm, and the chosen keys if attention is recomputed.
        dim, row = attention.index_head_dim, kv_tokens * load.tp
        numbers = tokens * attention.index_n_heads * (dim + 1) + (row + tokens) * dim
        num_bytes += max(4, size) * numbers + load.window_numbers * again
    return num_bytes


def _exchanged_output(load: TokenLoad, width: int, again: bool) -> float:
    """Return the bytes of the second copy of attention's output that Ulysses keeps.

    It is the result of the all-to-all from heads back to positions, which the output projection
    reads. It is 0 without Ulysses, or if attention is recomputed (``again``).

    Args:
        load: sizes of the micro-batch on the rank.
        width: elements of the output per token.
    """
    return load.number_bytes * load.tokens * width * (load.head_ranks > load.tp and not again)


def _latent_bytes(
    attention: AttentionConfig, load: TokenLoad, recompute: frozenset[str], by_math: bool
) -> float:
    """Return the bytes that multi-head latent attention keeps, except mask and log-sum-exp.

    Args:
        load: sizes of the micro-batch on the rank.
        recompute: modules that the layer recomputes.
        by_math: True if ``kernels.attention=math`` computes attention and the layer does not
            recompute it: scores are kept then, and more of queries, keys and values.
    """
    again = "core_attn" in recompute
    size, heads, tokens, kv_tokens = (
        load.number_bytes,
        attention.num_heads,
        load.tokens,
        load.kv_tokens,
    )
    num_bytes = _exchanged_output(load, heads * attention.v_head_dim, again)
    qk, value = head_dims(attention)
    padded = load.on_cpu and value < qk
    in_place = not load.on_cpu or (padded and again)
    stored_value = value + attention.qk_nope_head_dim if in_place else value
    out = value
    if padded and not again:
        stored_value, out = qk, qk + value
    query = key = qk
    promised = "mla_up_proj" in recompute
    # Padded values stay: they are the attention's own copy, not an output of the projection.
    if promised:
        query, key, stored_value = 0, 0, qk if padded and not again else 0
    if by_math:
        num_bytes += _math_bytes(load, heads, qk, value)
    else:
        num_bytes += size * heads * (tokens * (query + out) + kv_tokens * (key + stored_value))
    latent, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
    # A gather over cp sends latents and rotated keys together in one tensor.
    gathered = kv_tokens > tokens
    num_bytes += tokens * _norm_input(latent, size) + size * load.tp * kv_tokens * (
        latent + rope * (gathered or promised)
    )
    # The rotated keys share the storage of the latents, which the latents' norm keeps.
    num_bytes += size * tokens * rope
    if attention.q_lora_rank is not None:
        num_bytes += tokens * (
            _norm_input(attention.q_lora_rank, size) + size * load.tp * attention.q_lora_rank
        )
    return num_bytes


def score_numbers(load: TokenLoad, heads: int) -> float:
    """Return the number of attention scores of one layer and micro-batch on a rank.

    Args:
        load: sizes of the micro-batch on the rank.
        heads: attention heads of the layer, before tp.
    """
    return heads * load.window_numbers / load.head_ranks


def _math_bytes(load: TokenLoad, heads: int, qk: int, value: int, sinks: bool = False) -> float:
    """Return the bytes that attention keeps with ``kernels.attention=math``.

    Scaled queries and keys, the values of every head and the scores are kept in at least float32;
    the output that is projected is kept in the activation dtype.

    Args:
        load: sizes of the micro-batch on the rank.
        heads: attention heads of the layer, before tp.
        qk: width of a head's queries and keys.
        value: width of a head's values.
        sinks: True if attention has sinks, which add a key per row and pad widths to a multiple of
            8.
    """
    tokens, kv_tokens, wide = load.tokens, float(load.kv_tokens), max(4, load.number_bytes)
    scores, output = score_numbers(load, heads), heads * tokens * value
    # Sinks add one key per row and pad heads to a multiple of 8; the sliced output is a copy.
    if sinks:
        longer = 1 + tokens / load.window_numbers
        qk, kv_tokens, scores = qk + 8 - qk % 8, longer * kv_tokens, longer * scores
        value = qk
    return float(
        wide * (heads * (tokens * qk + kv_tokens * (qk + value)) + scores)
        + load.number_bytes * output
    )


def _delta_net_bytes(attention: AttentionConfig, load: TokenLoad, again: bool) -> float:
    """Return the bytes that a gated delta net (linear attention) keeps for its backward pass.

    Outside the delta rule these are the convolution's padded input and output, its silu, the rule's
    result, its normed value, the gate before and after silu, and their product. Inside, in at least
    float32: six [C, C] matrices per chunk of C positions, both sides of the linear system, ten
    tensors of the keys' size, and one state per chunk.

    Args:
        load: sizes of the micro-batch on the rank.
        again: True if the rule is computed again in the backward pass, so only its arguments are
            kept.
    """
    size, wide, tokens = load.number_bytes, max(4, load.number_bytes), load.tokens
    heads, groups = attention.linear_num_value_heads, attention.linear_num_key_heads
    key, value = attention.linear_key_head_dim, attention.linear_value_head_dim
    channels = 2 * groups * key + heads * value
    convolved = 3 if again or size == wide else 2  # the rule keeps wider copies of its inputs
    num_bytes = size * tokens * (
        convolved * channels + 2 * heads * value
    ) + wide * tokens * heads * (3 * value + 5)
    if again:
        return float(num_bytes)
    inside = (
        heads * (6 * DELTA_CHUNK + 3 * value + 10 * key + key * value / DELTA_CHUNK + 3)
        + 2 * groups
    )
    if size < wide:
        inside += 2 * groups * key
    return num_bytes + wide * tokens * inside
