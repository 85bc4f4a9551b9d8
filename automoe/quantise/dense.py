"""The product of a linear layer with all three of its matrix products in 8 bits.

Shapes: T tokens in any leading dims, K input and N output features.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from automoe.quantise import products
from automoe.quantise.formats import E4M3, encode, transposed
from automoe.quantise.scaling import Scaling


class _Product(torch.autograd.Function):
    """Keeps x and the weight themselves, and quantises both again in the backward pass.

    Codes of x would be its second copy wherever others keep x too: the other products of it, attention's backward
    pass, the router. The weight is FSDP's, which may free it meanwhile.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, scaling: Scaling) -> torch.Tensor:
        rows = scaling.activation(x.flatten(0, -2))
        columns = scaling.weight(weight)
        ctx.save_for_backward(x, weight, columns.scales)
        ctx.scaling, ctx.weight_tile = scaling, columns.tile
        return products.scaled_product(rows, columns, x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, weight, weight_scales = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        rows = ctx.scaling.gradient(grad)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # With the scales that it had: found again they might need another rank.
            turned = transposed(encode(weight, weight_scales, E4M3, ctx.weight_tile))
            grad_x = products.scaled_product(rows, turned, grad.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            columns = ctx.scaling.gradient_transposed(grad, rows)
            # A scale of activations is this rank's own, and a history is what it was: the same codes again.
            turned = transposed(ctx.scaling.activation(x.flatten(0, -2)))
            grad_weight = products.scaled_product(columns, turned, weight.dtype)
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
