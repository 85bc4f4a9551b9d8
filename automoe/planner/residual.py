"""Bytes per token that connections around attention and a feed-forward keep for the backward pass. No torch."""

from __future__ import annotations

from automoe.config.schema import ModelConfig


def connection_bytes(model: ModelConfig, size: int) -> float:
    """Return the bytes per token that a hyper-connection keeps, with ``size`` bytes per element; 0 without.

    Beside the streams and the block's output these are, in at least float32, the logits before and
    after the norm, their sigmoids and the mixing matrix.
    """
    if not (streams := model.hc_mult):
        return 0.0
    logits = (2 + streams) * streams
    numbers = 2 * logits + 2 * streams * streams + 5 * streams + 3
    return float(size * (model.residual_width + model.hidden_size) + max(4, size) * numbers)


def joined_bytes(model: ModelConfig, size: int) -> float:
    """Return the bytes per token that norms of a block's output and gates of the residual keep, of half a layer.

    A norm with a weight keeps its input before and after the product with it; of a layer's two one has it.
    """
    hidden = model.hidden_size
    norm = (1.5 * size * hidden + 4) * (model.post_norm_eps is not None)
    return norm + size * hidden * (model.residual_gate_temperature > 0)
