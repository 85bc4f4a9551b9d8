"""The product of a linear layer with all three of its matrix products in 8 bits.

Shapes: T tokens in any leading dims, K input and N output features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from automoe.quantize import products
from automoe.quantize.formats import transposed
from automoe.quantize.scaling import GRAD, Scaling, W, X


class _Product(torch.autograd.Function):
    """Keeps x and the weight themselves, and quantizes both again in the backward pass.

    Codes of x would be its second copy wherever others keep x too: the other products of it, attention's backward
    pass, the router. The weight is FSDP's, which may free it meanwhile.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, scaling: Scaling) -> torch.Tensor:
        x_scales, weight_scales = scaling.scales(x.flatten(0, -2), X), scaling.scales(weight, W)
        rows, columns = scaling.activation(x.flatten(0, -2), x_scales), scaling.weight(weight, weight_scales)
        ctx.save_for_backward(x, weight, x_scales, weight_scales)
        ctx.scaling = scaling
        return products.scaled_product(rows, columns, x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, weight, x_scales, weight_scales = ctx.saved_tensors
        grad, scaling = grad.reshape(-1, grad.shape[-1]), ctx.scaling
        grad_scales = scaling.scales(grad, GRAD)
        rows = scaling.gradient(grad, grad_scales)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            turned = transposed(scaling.weight(weight, weight_scales))
            grad_x = products.scaled_product(rows, turned, grad.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            columns = scaling.gradient_transposed(grad, grad_scales, rows)
            turned = transposed(scaling.activation(x.flatten(0, -2), x_scales))
            grad_weight = products.scaled_product(columns, turned, weight.dtype)
        return grad_x, grad_weight, None


class QuantizedProduct(nn.Module):
    """What ``Linear.product`` becomes: x [..., K], weight [N, K], bias [N] or None -> [..., N].

    ``result`` is where somebody else may take hold of the product before its bias, and of its gradient.
    """

    result: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.scaling = scaling

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = _Product.apply(x, weight, self.scaling)
        if self.result is not None:
            out = self.result(out)
        return out if bias is None else out + bias
