"""RMSNorm (arXiv 1910.07467), computed in at least float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from automoe.blocks import row_blocks


class _RMSNorm(torch.autograd.Function):
    """x [T, D] and weight [D] of one dtype, for devices without torch's fused kernel (the CPU).

    With r = 1 / sqrt(mean(x^2) + eps), g the incoming gradient and p = g * x:
    dweight = sum over rows of r p, and dx = r g * weight - x r^3 (p @ weight) / D.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        scales = x.new_empty(x.shape[0], 1)
        for block in row_blocks(*x.shape, x.device):
            mean_square = torch.mul(x[block], x[block], out=out[block]).mean(-1, keepdim=True)
            torch.rsqrt(mean_square.add_(eps), out=scales[block])
            torch.mul(x[block], scales[block], out=out[block]).mul_(weight)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):
        x, weight, scales = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for block in row_blocks(*x.shape, x.device):
            scale, into = scales[block], grad_x[block]
            products = torch.mul(grad_out[block], x[block], out=into)  # scratch until dx is due
            grad_weight.addmv_(products.T, scale.squeeze(1))
            shrink = (products @ weight).unsqueeze(1) * scale.pow(3) / x.shape[1]
            torch.mul(grad_out[block], weight, out=into).mul_(scale).addcmul_(x[block], shrink, value=-1)
        return grad_x, grad_weight, None


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim; the result has the dtype of ``x``.

    ``zero_centered`` multiplies by 1 + weight instead, and starts from zero.
    """

    def __init__(self, dim: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.zero_centered = eps, zero_centered
        self.first_values = {"weight": "zeros" if zero_centered else "ones"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # promote_types and not .float(): float64 runs must stay float64.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide)
        if self.zero_centered:
            weight = weight + 1
        if x.device.type == "cpu":
            rows = x.to(wide).reshape(-1, x.shape[-1])
            return _RMSNorm.apply(rows, weight, self.eps).view(x.shape).to(x.dtype)
        return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)
