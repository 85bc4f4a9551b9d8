"""Bytes per token that the residual connections of a layer keep for the backward pass.

Needs no torch.
"""

from __future__ import annotations

from automoe.config.schema import ModelConfig


def connection_bytes(model: ModelConfig, size: int) -> float:
    """Return the bytes per token that a hyper-connection keeps; 0 if the model has none.

    These are the streams and the block's output, of ``size`` bytes per element, and in at least
    float32 the logits before and after the norm, their sigmoids and the mixing matrix.
    """
    if not (streams := model.hc_mult):
        return 0.0
    logits = (2 + streams) * streams
    numbers = 2 * logits + 2 * streams * streams + 5 * streams + 3
    return float(size * (model.residual_width + model.hidden_size) + max(4, size) * numbers)


def joined_bytes(model: ModelConfig, size: int) -> float:
    """Return the bytes per token that a block's output norm and residual gate keep for the backward pass.

    0 for a model without these. An element has ``size`` bytes. Of a layer's two output norms, only
    that of the feed-forward has a weight, and so keeps its input twice: before and after
    multiplication by the weight. The mean over both is returned.
    """
    hidden = model.hidden_size
    norm = (1.5 * size * hidden + 4) * (model.post_norm_eps is not None)
    return norm + size * hidden * (model.residual_gate_temperature > 0)
