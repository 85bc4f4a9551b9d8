"""FLOPs of one training token, in the two conventions that published MFU figures use.

A multiply-add is 2 FLOPs and the backward pass costs twice the forward, so a weight that a token
meets costs 6. A gated delta net counts as its recurrence: reading a head's state with a key, changing it,
and reading it with a query are three products of Dk x Dv numbers a token. Router, norms, biases, softmax and
recomputation count for nothing in either convention.
"""

from __future__ import annotations

from dataclasses import dataclass

from automoe.config.schema import AttentionConfig, ModelConfig, is_linear, window_of
from automoe.cost.params import layer_params


@dataclass(frozen=True)
class TokenFlops:
    """Training FLOPs per token. ``causal`` counts the half of the attention matrix that is used."""

    causal: float
    full_attention: float

    def mfu(self, tokens_per_second: float, peak_flops: float) -> tuple[float, float]:
        """(``mfu``, ``mfu_full_attention``) as fractions of ``peak_flops`` of all GPUs together."""
        return (self.causal * tokens_per_second / peak_flops, self.full_attention * tokens_per_second / peak_flops)


def train_flops_per_token(model: ModelConfig, seq_len: int, num_mtp: int = 0) -> TokenFlops:
    """Forward and backward FLOPs per token of rows with ``seq_len`` tokens.

    Args:
        model: the architecture.
        seq_len: tokens a row; attention is taken over whole rows, whatever the documents in them.
        num_mtp: multi-token-prediction modules, each one more (last) layer, a 2H -> H projection
            and another use of the head (arXiv 2412.19437, section 2.2).
    """
    layers = [*range(model.num_layers), *[model.num_layers - 1] * num_mtp]
    matmul = sum(_layer_matmul_params(model, layer) for layer in layers)
    head = model.hidden_size * model.vocab_size
    matmul += head * (1 + num_mtp) + num_mtp * 2 * model.hidden_size**2
    causal = full = 0.0
    for layer in layers:
        if is_linear(model.attention, layer):
            causal += 6 * _state_numbers(model.attention) * 3
            full += 6 * _state_numbers(model.attention) * 3
            continue
        # The band of the attention matrix that a window leaves, of which the first rows are cut by the border.
        keys = min(window_of(model.attention, layer) or seq_len, seq_len)
        causal += 6 * _score_dims(model.attention) * keys * (1 - keys / (2 * seq_len))
        full += 6 * _score_dims(model.attention) * keys
    return TokenFlops(causal=6 * matmul + causal, full_attention=6 * matmul + full)


def _layer_matmul_params(model: ModelConfig, layer: int) -> int:
    """Weights of ``layer`` that one token is multiplied by."""
    active = 0
    for param in layer_params(model, layer):
        if not param.multiplies:
            continue
        if param.part == "routed_experts":
            active += param.numel * model.num_experts_per_token // model.num_experts
        elif param.part in ("attention", "dense_ffn", "shared_experts"):
            active += param.numel
    return active


def _state_numbers(attention: AttentionConfig) -> int:
    return attention.linear_num_value_heads * attention.linear_key_head_dim * attention.linear_value_head_dim


def _score_dims(attention: AttentionConfig) -> int:
    """Heads x (query-key dim + value dim): what one query does with one key."""
    if attention.kind == "gqa":
        return attention.num_heads * 2 * attention.head_dim
    qk = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    return attention.num_heads * (qk + attention.v_head_dim)
