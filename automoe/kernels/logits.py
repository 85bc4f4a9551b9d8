"""Bound of logits, and scaling of their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 4096  # scaled at a time


def cap_logits(logits: Tensor, soft_cap: float) -> tuple[Tensor, Tensor | None]:
    """Return ``soft_cap * tanh(logits / soft_cap)``, in at least float32, and its derivative.

    A ``soft_cap`` of 0 is no cap: the logits themselves and None are returned.
    """
    if not soft_cap:
        return logits, None
    tanh = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / soft_cap).tanh_()
    slope = 1 - tanh.square()
    return tanh.mul_(soft_cap), slope


def scaled(grad: Tensor | None, factor: Tensor) -> Tensor | None:
    """Return ``grad * factor``, computed in the dtype of ``factor``, in the dtype of ``grad``.

    A narrow dtype would round the factor itself, such as 1 / tokens, by up to 0.4% in bfloat16.
    None stays None.
    """
    if grad is None:
        return None
    out = torch.empty_like(grad)
    for part, rows in zip(out.split(_ROWS), grad.split(_ROWS), strict=True):
        torch.mul(rows.to(factor.dtype), factor, out=part)
    return out
