"""What a layer's backward pass, and the head's, take for their own work beside what was kept for them.

Gradients of a layer's parts are made one part after another, the last part first, so the most is what one of them
takes, with what of the layer is still kept then. With b bytes a number, T tokens, R rows of (token, expert) pairs on
the rank, H hidden, I the experts' width, and W numbers of the rank's experts:

    experts          b [R (2 H + 2 I) + X H + W]    gradients of their output, of gate and up, of the gathered rows, of
                                                    the X rows that they read (T of the rank's own, R received, P T
                                                    gathered from P ranks), and of
                                                    the weights, which join those that are there when they are whole
    or               b [R (H + 4 I) + W / 3]        before: the activation, its gradient, that of gate and up
    with biases      b [R (3 H + 2 I) + W / 3]      each row's bias, and its gradient
    loop             b [R H + 2 X H + W]            one expert at a time, each with a gradient of all X rows
    dense FFN        b [2 T I + T H + its weights]  gradients of gate and up, less their product, which is done with
    core attention   b [q, k, v and its output]     their gradients; of ``math``, twice the scores, wide

The gradient of the residual, b T H, is there in all cases.
"""

from __future__ import annotations

from dataclasses import dataclass

from automoe.config.recompute import DISCARDED_OUTPUTS, FULL
from automoe.config.rules_kernels import chunk_tokens
from automoe.config.schema import ModelConfig
from automoe.planner.activations import TokenLoad, layer_activation_bytes, score_numbers

# Operators of a CPU take the routed experts' backward in blocks of rows, those of CUDA as a whole: of the activation's
# width, silu(gate); clamped: gate, its sigmoid, up and their product.
_WHOLE_ROWS = {"swiglu": 1, "clamped_swiglu": 5}


@dataclass(frozen=True)
class Workspace:
    """Bytes in the backward pass of one part of a layer.

    Attributes:
        done: of what the layer has kept, what is used up and gone by then.
        recompute: made again, or of results that another part reads.
        temporaries: gradients on their way, and their operators' own scratch.
    """

    done: float = 0.0
    recompute: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        return self.recompute + self.temporaries - self.done


def layer_workspaces(
    model: ModelConfig,
    layer: int,
    load: TokenLoad,
    recompute: frozenset[str],
    expert_numbers: int,
    ffn_numbers: int,
) -> list[Workspace]:
    """Of each part of a layer, in the order of a backward pass.

    Args:
        expert_numbers: W, weights of the rank's routed experts in this layer.
        ffn_numbers: the weights of its dense or shared FFN on this rank.
    """

    def kept(modules: frozenset[str]) -> dict[str, float]:
        return layer_activation_bytes(model, layer, load, modules)

    nothing, now = kept(frozenset()), kept(recompute)
    whole = sum(nothing.values())
    dropped = {name: whole - sum(kept(frozenset((name,))).values()) for name in recompute}
    read = sum(dropped.pop(name) for name in DISCARDED_OUTPUTS if name in dropped)
    all_again = dropped.get(FULL, 0.0)
    kept_now = nothing if all_again else now
    routed, residual = (
        layer >= model.first_k_dense,
        load.number_bytes * load.tokens * model.hidden_size,
    )
    found = []
    width = model.shared_width if routed else model.intermediate_size
    if width:
        again = dropped.get("shared_experts" if routed else "mlp", 0.0)
        ffn = load.number_bytes * (2 * load.tokens * width + ffn_numbers) + 2 * residual
        found.append(Workspace(0.0, read + all_again + again, ffn))
    gone = 0.0
    if routed:
        # The shared experts' backward is over on one stream; on two it runs beside this.
        gone = kept_now["ffn"] * load.on_cpu
        experts = _experts_temporaries(model, load, expert_numbers) + residual * (1 + bool(width))
        found.append(_used_up(gone, read + dropped.get("moe", 0.0), all_again, experts))
    gone = (
        sum(kept_now.get(part, 0.0) for part in ("ffn", "experts", "router"))
        + kept_now["norms"] / 2
    )
    again = dropped.get("core_attn", 0.0)
    found.append(
        _used_up(gone, read + again, all_again, _attention_temporaries(model, load) + residual)
    )
    return found


def _used_up(gone: float, again: float, all_again: float, temporaries: float) -> Workspace:
    # Of a layer that is recomputed whole, what is used up is part of what was made again.
    used = gone if all_again else 0.0
    return Workspace(gone - used, again + all_again - used, temporaries)


def _experts_temporaries(model: ModelConfig, load: TokenLoad, expert_numbers: int) -> float:
    rows, hidden, width = (
        load.expert_rows,
        model.hidden_size,
        model.moe_intermediate_size / load.etp,
    )
    read = load.read_rows
    if load.loop:
        numbers = (rows + 2 * read) * hidden + expert_numbers
    else:
        scratch = 0 if load.on_cpu else _WHOLE_ROWS[model.expert_activation]
        numbers = max(
            rows * (2 * hidden + 2 * width) + read * hidden + expert_numbers,
            rows * (hidden + (4 + scratch) * width) + expert_numbers / 3,
            (rows * (3 * hidden + 2 * width) + expert_numbers / 3) * model.biased_experts,
        )
    return load.number_bytes * numbers


def _attention_temporaries(model: ModelConfig, load: TokenLoad) -> float:
    attention, scores = model.attention, 0.0
    if load.scores:  # their gradient, before and after the softmax
        scores = 2 * max(4, load.number_bytes) * score_numbers(load, attention.num_heads)
    if attention.kind == "gqa":
        numbers = load.tokens * attention.num_heads + load.kv_tokens * max(
            attention.num_kv_heads, load.tp
        )
        return scores + 2.0 * load.number_bytes * attention.head_dim * numbers
    dims = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    numbers = load.tokens * (dims + attention.v_head_dim) + load.kv_tokens * (
        dims + attention.v_head_dim
    )
    return scores + float(load.number_bytes) * attention.num_heads * numbers


def head_workspace_bytes(
    model: ModelConfig,
    tokens: int,
    bytes_per_number: int,
    tp: int = 1,
    trained: bool = True,
    on_cpu: bool = False,
) -> float:
    """Peak of the chunked cross-entropy: hidden states, normed and not, their gradient, and the most of three moments.

    One chunk of logits, wide, beside the one before and a trained head's gradient, which is wide; that gradient and
    what a chunk adds to it, or its stored copy; in the backward pass both gradients as they are kept, and scaled.

    Args:
        tokens: of the micro-batch on this rank; each tp rank takes those of all, and its part of the vocabulary.
    """
    wide = max(4, bytes_per_number)
    narrower = bytes_per_number * (bytes_per_number < wide)  # else in place
    tokens, rows = tokens * tp, -(-model.vocab_size // tp)
    chunk = chunk_tokens(tokens, model.hidden_size)
    before = bytes_per_number * (chunk < tokens)
    rounding = wide * on_cpu * (narrower > 0)  # a CPU's product is rounded from a copy
    gradient = model.hidden_size * rows * trained
    hidden = bytes_per_number * tokens * model.hidden_size
    return float(
        3 * hidden
        + max(
            chunk * rows * (wide + narrower + before + rounding) + gradient * wide,
            chunk * rows * bytes_per_number + gradient * (wide + narrower),
            2 * gradient * bytes_per_number + hidden,
        )
    )
