"""Product with a weight in a wider dtype; autograd saves the input in its own dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _WideProduct(torch.autograd.Function):
    """Autograd function: x @ weight.T in the weight's dtype; it saves x in its own dtype."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(weight.dtype), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = x.flatten(0, -2).to(weight.dtype)
        grad_rows = grad.flatten(0, -2)
        return (grad @ weight).to(x.dtype), (rows.T @ grad_rows).T


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in the dtype of ``weight`` [O, I], for x [..., I] of the same or a narrower one."""
    # torch.compile recomputes the cast in the backward by itself, so it needs no autograd function
    if x.dtype == weight.dtype or torch.compiler.is_compiling():
        return F.linear(x.to(weight.dtype), weight)
    return _WideProduct.apply(x, weight)
