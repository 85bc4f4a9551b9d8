"""RMSNorm (arXiv 1910.07467), computed in at least float32.

Letters: T rows (tokens, or tokens times heads), D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from automoe.interop.torch_private import fused_rms_norm, fused_rms_norm_backward
from automoe.moe.activation import row_blocks


class _RMSNorm(torch.autograd.Function):
    """RMSNorm for devices without torch's fused kernel (the CPU).

    x [T, D] may have any dtype, weight [D] is at least float32. It computes in the weight's dtype
    and keeps x in its own dtype. With r = 1 / sqrt(mean(x^2) + eps), g the incoming gradient and p
    = g * x: dweight = sum over rows of r p, and dx = r g * weight - x r^3 (p @ weight) / D.
    """

    @staticmethod
    def forward(ctx, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        out_TD = torch.empty_like(x_TD)
        scales_T1 = weight_D.new_empty(x_TD.shape[0], 1)
        for block in row_blocks(*x_TD.shape, x_TD.device):
            rows = x_TD[block].to(weight_D.dtype)
            into = out_TD[block]
            result = into if into.dtype == rows.dtype else torch.empty_like(rows)
            mean_square = torch.mul(rows, rows, out=result).mean(-1, keepdim=True)
            torch.rsqrt(mean_square.add_(eps), out=scales_T1[block])
            torch.mul(rows, scales_T1[block], out=result).mul_(weight_D)
            if result is not into:
                into.copy_(result)
        ctx.save_for_backward(x_TD, weight_D, scales_T1)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: torch.Tensor):
        x_TD, weight_D, scales_T1 = ctx.saved_tensors
        grad_x_TD = torch.empty_like(x_TD)
        grad_weight_D = torch.zeros_like(weight_D)
        for block in row_blocks(*x_TD.shape, x_TD.device):
            rows = x_TD[block].to(weight_D.dtype)
            grad = grad_TD[block].to(weight_D.dtype)
            scale = scales_T1[block]
            into = grad_x_TD[block]
            result = into if into.dtype == rows.dtype else torch.empty_like(rows)
            products = torch.mul(grad, rows, out=result)  # scratch until dx is computed
            grad_weight_D.addmv_(products.T, scale.squeeze(1))
            shrink = (products @ weight_D).unsqueeze(1) * scale.pow(3) / x_TD.shape[1]
            torch.mul(grad, weight_D, out=result).mul_(scale).addcmul_(rows, shrink, value=-1)
            if result is not into:
                into.copy_(result)
        return grad_x_TD, grad_weight_D, None


class _FusedRMSNorm(torch.autograd.Function):
    """RMSNorm with torch's fused kernels, which need x and weight in one dtype.

    x is widened in both passes, since ``F.rms_norm`` would keep the wide copy.
    """

    @staticmethod
    def forward(ctx, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        out_TD, scales_T1 = fused_rms_norm(x_TD.to(weight_D.dtype), weight_D, eps)
        ctx.save_for_backward(x_TD, weight_D, scales_T1)
        return out_TD.to(x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: torch.Tensor):
        x_TD, weight_D, scales_T1 = ctx.saved_tensors
        grad = grad_TD.to(weight_D.dtype).contiguous()
        grad_x_TD, grad_weight_D = fused_rms_norm_backward(
            grad, x_TD.to(weight_D.dtype), scales_T1, weight_D
        )
        return grad_x_TD.to(x_TD.dtype), grad_weight_D, None


class RMSNorm(nn.Module):
    """RMSNorm ``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in the dtype of ``x``.

    ``zero_centered`` multiplies by 1 + weight instead, and starts from zero.
    """

    def __init__(self, dim: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.zero_centered = zero_centered
        self.first_values = {"weight": "zeros" if zero_centered else "ones"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # promote_types keeps float64 runs in float64; .float() would not.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide)
        if self.zero_centered:
            weight = weight + 1
        if torch.compiler.is_compiling():
            # Compiled code gets plain operations: the compiler fuses them and decides what is kept.
            return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)
        norm = _RMSNorm if x.device.type == "cpu" else _FusedRMSNorm
        return norm.apply(x.reshape(-1, x.shape[-1]), weight, self.eps).view(x.shape)
