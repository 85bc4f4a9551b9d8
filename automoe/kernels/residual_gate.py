"""Gates that weight the residual and a block's output dim by dim, as Muse-Spark has them.

Letters: B sequences, s positions, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-3  # smallest square of the residual's weight


def gate_weights(gate_H: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the weights [H] of the residual and of a block's output, in at least float32.

    The output's weight is b = sigmoid(gate / temperature), the residual's sqrt(1 - b^2), so that
    the weighted sum of independent terms of equal variance keeps that variance. 1 - b^2 is at
    least ``LEAST`` (0.001).
    """
    wide = torch.promote_types(gate_H.dtype, torch.float32)
    logits_H = gate_H.to(wide) / temperature
    output_H = logits_H.sigmoid()
    # (1 - b) (1 + b), with 1 - b computed as a sigmoid: it does not vanish where b rounds to one
    square_H = (-logits_H).sigmoid() * (1 + output_H)
    return square_H.clamp_min(LEAST).sqrt(), output_H


def gated_sum(x_BsH: Tensor, out_BsH: Tensor, residual_H: Tensor, output_H: Tensor) -> Tensor:
    """Return ``residual_H * x_BsH + output_H * out_BsH`` in the dtype of ``x_BsH``, the residual."""
    return (residual_H * x_BsH + output_H * out_BsH).to(x_BsH.dtype)
