"""RMSNorm (arXiv 1910.07467), computed in at least float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from automoe.moe.activation import row_blocks


class _RMSNorm(torch.autograd.Function):
    """x [T, D] as it came, weight [D] at least float32; for devices without torch's fused kernel (the CPU).

    Computed in the weight's dtype, kept in that of x. With r = 1 / sqrt(mean(x^2) + eps), g the incoming
    gradient and p = g * x: dweight = sum over rows of r p, and dx = r g * weight - x r^3 (p @ weight) / D.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        scales = weight.new_empty(x.shape[0], 1)
        for block in row_blocks(*x.shape, x.device):
            rows, into = x[block].to(weight.dtype), out[block]
            result = into if into.dtype == rows.dtype else torch.empty_like(rows)
            mean_square = torch.mul(rows, rows, out=result).mean(-1, keepdim=True)
            torch.rsqrt(mean_square.add_(eps), out=scales[block])
            torch.mul(rows, scales[block], out=result).mul_(weight)
            if result is not into:
                into.copy_(result)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):
        x, weight, scales = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for block in row_blocks(*x.shape, x.device):
            rows, grad, scale = x[block].to(weight.dtype), grad_out[block].to(weight.dtype), scales[block]
            into = grad_x[block]
            result = into if into.dtype == rows.dtype else torch.empty_like(rows)
            products = torch.mul(grad, rows, out=result)  # scratch until dx is due
            grad_weight.addmv_(products.T, scale.squeeze(1))
            shrink = (products @ weight).unsqueeze(1) * scale.pow(3) / x.shape[1]
            torch.mul(grad, weight, out=result).mul_(scale).addcmul_(rows, shrink, value=-1)
            if result is not into:
                into.copy_(result)
        return grad_x, grad_weight, None


class _FusedRMSNorm(torch.autograd.Function):
    """The same with torch's fused kernels, which want x and weight in one dtype: x is widened in both passes.

    ``F.rms_norm`` would keep the wide copy.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, scales = torch.ops.aten._fused_rms_norm(x.to(weight.dtype), weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):
        x, weight, scales = ctx.saved_tensors
        grad = grad_out.to(weight.dtype).contiguous()
        grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
            grad, x.to(weight.dtype), weight.shape, scales, weight, [True, True]
        )
        return grad_x.to(x.dtype), grad_weight, None


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
        if torch.compiler.is_compiling():
            # The compiler has the chain in pieces to fuse, and decides by itself what is kept.
            return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)
        norm = _RMSNorm if x.device.type == "cpu" else _FusedRMSNorm
        return norm.apply(x.reshape(-1, x.shape[-1]), weight, self.eps).view(x.shape)
