"""The product of a linear layer with all three of its matrix products in 8 bits.

Shapes: T tokens in any leading dims, K input and N output features.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from automoe.quantise import products
from automoe.quantise.formats import E4M3, Quantised, encode, transposed
from automoe.quantise.scaling import Scaling


class _Product(torch.autograd.Function):
    """Keeps the codes of x, half of what bfloat16 takes, and the weight itself, which FSDP may free meanwhile."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, scaling: Scaling) -> torch.Tensor:
        rows = scaling.activation(x.flatten(0, -2))
        columns = scaling.weight(weight)
        ctx.save_for_backward(rows.codes, rows.scales, weight, columns.scales)
        ctx.scaling, ctx.tiles, ctx.shape = scaling, (rows.tile, columns.tile), x.shape
        return products.scaled_product(rows, columns, x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        codes, scales, weight, weight_scales = ctx.saved_tensors
        x = Quantised(codes, scales, ctx.tiles[0])
        grad = grad.reshape(-1, grad.shape[-1])
        rows = ctx.scaling.gradient(grad)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # With the scales that it had: found again they might need another rank.
            turned = transposed(encode(weight, weight_scales, E4M3, ctx.tiles[1]))
            grad_x = products.scaled_product(rows, turned, grad.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            columns = ctx.scaling.gradient_transposed(grad, rows)
            grad_weight = products.scaled_product(columns, transposed(x), weight.dtype)
        return grad_x, grad_weight, None


class QuantisedProduct(nn.Module):
    """What ``Linear.product`` becomes: x [..., K], weight [N, K], bias [N] or None -> [..., N]."""

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.scaling = scaling

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = _Product.apply(x, weight, self.scaling)
        return out if bias is None else out + bias
