"""Temporary bytes of the backward pass of a layer and of the head, besides kept activations.

The parts of a layer (attention, FFN, experts) run their backward pass one after another, last part
first. The layer's peak is therefore the largest sum of one part's temporaries and the activations
still kept then. The table gives the temporaries with b bytes per element and these letters: T
tokens, R rows of (token, expert) pairs on the rank, X rows that the experts read (T local, R
received, or P T gathered from P ranks), H hidden, I expert width, W parameters of the rank's
experts:

    experts          b [R (2 H + 2 I) + X H + W]    gradients of: output, gate and up, gathered
                                                    rows, the X rows, weights (which are added
                                                    to the existing gradients once complete)
    or, earlier      b [R (H + 4 I) + W / 3]        activation, its gradient, gradient of gate
                                                    and up; on CUDA R I more (clamped: 5 R I)
    with biases      b [R (3 H + 2 I) + W / 3]      bias of each row, and its gradient
    fused            W = 0                          products add to existing gradients
    delayed          b R I more                     the activation, until its product is computed
    in 8 bits        b X H more                     the X rows decoded again
    loop             b [R H + 2 X H + W]            one expert at a time, each with a gradient
                                                    of all X rows
    dense FFN        b [2 T I + T H + weights]      gradients of gate and up, without their
                                                    product, which is no longer used
    core attention   b [q, k, v and output]         their gradients; for ``math``, twice the
                                                    scores in at least float32; or, if
                                                    larger, what an indexer's loss needs

The gradient of the residual stream, b T H, is added in all cases.
"""

from __future__ import annotations

from dataclasses import dataclass

from automoe.config.recompute import DISCARDED_OUTPUTS, FULL
from automoe.config.rules_kernels import chunk_tokens, score_dims
from automoe.config.schema import ModelConfig
from automoe.planner import compressed
from automoe.planner.activations import TokenLoad, layer_activation_bytes, score_numbers

# Rows of the expert width that CUDA's backward keeps for each activation: silu(gate) for swiglu;
# gate, its sigmoid, up and their product for clamped_swiglu. CPU operators process blocks of rows
# and keep none of these whole.
_WHOLE_ROWS = {"swiglu": 1, "clamped_swiglu": 5}


@dataclass(frozen=True)
class Workspace:
    """Changes of memory while the backward pass of one part of a layer, such as attention, runs.

    Attributes:
        done: bytes of the layer's kept activations that are freed before this part's backward pass.
        recompute: bytes computed again for this part: activations, and discarded outputs that it reads.
        temporaries: gradients in transit and scratch of the operators.
    """

    done: float = 0.0
    recompute: float = 0.0
    temporaries: float = 0.0


def layer_workspaces(
    model: ModelConfig,
    layer: int,
    load: TokenLoad,
    recompute: frozenset[str],
    expert_numbers: int,
    ffn_numbers: int,
) -> list[Workspace]:
    """Return how memory changes in the backward pass of each part of a layer, in order of running.

    The parts are the dense or shared FFN, routed experts and attention.

    Args:
        layer: number of the layer.
        load: sizes of the micro-batch on the rank.
        recompute: recomputed modules of the layer.
        expert_numbers: number of trained parameters of the rank's routed experts in this layer.
        ffn_numbers: number of trained parameters of the layer's dense or shared FFN on this rank.
    """

    def kept_outputs(modules: frozenset[str]) -> dict[str, float]:
        return layer_activation_bytes(model, layer, load, modules)

    nothing = kept_outputs(frozenset())
    now = kept_outputs(recompute)
    whole = sum(nothing.values())
    dropped = {name: whole - sum(kept_outputs(frozenset((name,))).values()) for name in recompute}
    read = sum(dropped.pop(name) for name in DISCARDED_OUTPUTS if name in dropped)
    all_again = dropped.get(FULL, 0.0)
    kept_now = nothing if all_again else now
    routed = layer in model.moe_layers
    residual = load.number_bytes * load.tokens * model.residual_width
    # bytes freed by now, computed again, and temporary
    parts: list[tuple[float, float, float]] = []
    width = model.shared_width if routed else model.intermediate_size
    if width:
        again = dropped.get("shared_experts" if routed else "mlp", 0.0)
        ffn = load.number_bytes * (2 * load.tokens * width + ffn_numbers) + 2 * residual
        parts.append((0.0, read + again, ffn))
    gone = 0.0
    if routed:
        # On a CPU the shared experts' backward is over by now; on CUDA a second stream may run it
        # at the same time.
        gone = kept_now["ffn"] * load.on_cpu
        experts = _experts_temporaries(model, load, expert_numbers) + residual * (1 + bool(width))
        parts.append((gone, read + dropped.get("moe", 0.0), experts))
    gone = (
        sum(kept_now.get(part, 0.0) for part in ("ffn", "experts", "router"))
        + kept_now["norms"] / 2
    )
    again = dropped.get("core_attn", 0.0)
    attention = _attention_temporaries(model, layer, load) + residual
    parts.append((gone, read + again, attention))
    if all_again:  # what is freed was recomputed, not kept
        return [Workspace(0.0, again + all_again - gone, work) for gone, again, work in parts]
    return [Workspace(*part) for part in parts]


def _experts_temporaries(model: ModelConfig, load: TokenLoad, expert_numbers: int) -> float:
    rows = load.expert_rows
    hidden = model.expert_hidden_size
    width = model.moe_intermediate_size / load.etp
    read = load.read_rows
    if load.loop:
        numbers = (rows + 2 * read) * hidden + expert_numbers
    else:
        scratch = 0 if load.on_cpu else _WHOLE_ROWS[model.expert_activation]
        expert_numbers *= load.wgrad == "autograd"
        waits = load.wgrad == "delayed"
        numbers = max(
            rows * (2 * hidden + (2 + waits) * width) + read * hidden + expert_numbers,
            rows * (hidden + (4 + scratch) * width) + expert_numbers / 3,
            (rows * (3 * hidden + 2 * width) + expert_numbers / 3) * model.biased_experts,
        )
        numbers += read * hidden * load.in_8_bits
    return load.number_bytes * numbers


def _attention_temporaries(model: ModelConfig, layer: int, load: TokenLoad) -> float:
    attention = model.attention
    if attention.kind == "compressed":
        return compressed.temporary_bytes(attention, layer, load)
    scores = 0.0
    if load.scores:  # gradient of the scores, before and after the softmax
        scores = 2 * max(4, load.number_bytes) * score_numbers(load, attention.num_heads)
    dims, value = score_dims(attention)
    groups = attention.num_heads
    if attention.kind == "gqa":
        groups = max(attention.num_kv_heads, load.head_ranks)
    numbers = (dims + value) * (load.tokens * attention.num_heads + load.kv_tokens * groups)
    num_bytes = scores + float(load.number_bytes) * numbers
    if not attention.index_topk:
        return num_bytes
    # An indexer's loss, computed after attention, sums attention's probabilities over heads. The
    # probabilities of each head exist three times, for a chunk of queries of each row; the sums
    # exist twice when they are concatenated. The keys of several rows are copied.
    by_head = max(attention.num_heads, attention.index_n_heads)
    chunk = min(1.0, compressed.INDEX_CHUNK * load.rows / (load.tokens * load.tp))
    held = max(2.0, 1 + 3 * chunk * by_head)
    copied = load.number_bytes * attention.num_heads * dims * load.kv_tokens * (load.rows > 1)
    return max(num_bytes, max(4, load.number_bytes) * load.window_numbers * held + copied)


def head_workspace_bytes(
    model: ModelConfig,
    tokens: int,
    bytes_per_number: int,
    tp: int = 1,
    trained: bool = True,
    on_cpu: bool = False,
    in_place: bool = False,
) -> float:
    """Return the peak bytes of the output head's cross-entropy, which runs in chunks of tokens.

    The hidden states, their normed values and their gradient are always counted. The largest of
    three moments is added: a chunk of logits in at least float32, with the chunk before it and the
    gradient of a trained head; this gradient with a chunk's contribution; the gradients of head and
    hidden states in the backward pass.

    Args:
        tokens: tokens of the micro-batch on this rank; each tp rank processes the tokens of all tp
            ranks with its part of the vocabulary.
        bytes_per_number: bytes of an activation element.
        trained: True if the head's weight gets a gradient.
        on_cpu: True on a CPU, which rounds the logits from a float32 copy.
        in_place: True if logits become their gradient without a float32 copy
            (``kernels.loss=triton``).
    """
    wide = max(4, bytes_per_number)
    narrower = bytes_per_number * (bytes_per_number < wide)  # equal widths are converted in place
    tokens = tokens * tp
    rows = -(-model.vocab_size // tp)
    chunk = chunk_tokens(tokens, model.hidden_size)
    before = bytes_per_number * (chunk < tokens)
    rounding = wide * on_cpu * (narrower > 0)  # a CPU rounds the product from a wide copy
    logits = bytes_per_number if in_place else wide + narrower + rounding
    gradient = model.hidden_size * rows * trained
    hidden = bytes_per_number * tokens * model.hidden_size
    return float(
        3 * hidden
        + max(
            chunk * rows * (logits + before) + gradient * wide,
            chunk * rows * bytes_per_number + gradient * (wide + narrower),
            2 * gradient * bytes_per_number + hidden,
        )
    )
