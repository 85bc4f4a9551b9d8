"""RMSNorm (arXiv 1910.07467) of rows, in plain torch or in the kernels of ``automoe.kernels.norm``.

Letters: T rows (tokens, or tokens times heads), D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automoe.comm.communicators import Communicator
from automoe.interop.torch_private import AsyncTensor
from automoe.kernels.activation import row_blocks


class _RMSNorm(torch.autograd.Function):
    """Autograd function: RMSNorm in plain torch operations, for the CPU and float64.

    Inputs are x [T, D] of any dtype, weight [D] and eps; the result r x * weight has the dtype of x,
    with r = 1 / sqrt(mean(x^2) + eps). The caller must give a weight of float32 or wider, since all
    is computed in the weight's dtype; x is saved in its own. With g the incoming gradient and
    p = g * x: dweight = sum over rows of r p, and dx = r g * weight - x r^3 (p @ weight) / D.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_D, eps: float):
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
    def backward(ctx, grad_TD):
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


class _TritonRMSNorm(torch.autograd.Function):
    """Autograd function: RMSNorm of x [T, D] by weight [D], in CUDA kernels that read and write each number once."""

    @staticmethod
    def forward(ctx, x_TD, weight_D, eps: float):
        from automoe.kernels.norm import norm_rows

        if isinstance(x_TD, AsyncTensor):  # a kernel reads by pointer, so it must have arrived
            x_TD = x_TD.trigger_wait()
        if x_TD.stride(-1) != 1:
            x_TD = x_TD.contiguous()
        out_TD, scales_T1 = norm_rows(x_TD, weight_D, eps)
        ctx.save_for_backward(x_TD, weight_D, scales_T1)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        from automoe.kernels.norm import norm_grads

        x_TD, weight_D, scales_T1 = ctx.saved_tensors
        return *norm_grads(grad_TD.contiguous(), x_TD, scales_T1, weight_D), None


class RMSNormOverRanks(torch.autograd.Function):
    """Autograd function: RMSNorm of tensors x [..., w] whose features are sharded, w on each rank.

    Its inputs are the ranks, eps, every x, and every weight [w] (``model.norm.norm_over_ranks``).
    It returns every normed x, and saves each x in its own dtype. With P ranks, r = 1 /
    sqrt(mean(x^2) + eps) and g the incoming gradient: dx = r g * weight - x r^3 sum over all
    features of (g * x * weight) / (P w).
    """

    @staticmethod
    def forward(ctx, ranks: Communicator, eps: float, *rows_and_weights):
        count = len(rows_and_weights) // 2
        xs, weights = rows_and_weights[:count], rows_and_weights[count:]
        wide = weights[0].dtype
        squares = [x.to(wide).square().sum(-1, keepdim=True) for x in xs]
        totals = ranks.all_reduce(torch.cat(squares, dim=-1)).split(1, dim=-1)
        scales = [
            torch.rsqrt(total / (x.shape[-1] * ranks.num_ranks) + eps)
            for x, total in zip(xs, totals, strict=True)
        ]
        ctx.ranks = ranks
        ctx.save_for_backward(*xs, *weights, *scales)
        return tuple(
            (x.to(wide) * scale * weight).to(x.dtype)
            for x, weight, scale in zip(xs, weights, scales, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        count = len(grads)
        saved = ctx.saved_tensors
        xs, weights, scales = saved[:count], saved[count : 2 * count], saved[2 * count :]
        products = [grad.to(w.dtype) * x for grad, x, w in zip(grads, xs, weights, strict=True)]
        dots = [(p @ w).unsqueeze(-1) for p, w in zip(products, weights, strict=True)]
        totals = ctx.ranks.all_reduce(torch.cat(dots, dim=-1)).split(1, dim=-1)
        grad_xs, grad_weights = [], []
        for grad, x, weight, scale, product, total in zip(
            grads, xs, weights, scales, products, totals, strict=True
        ):
            shrink = total * scale.pow(3) / (x.shape[-1] * ctx.ranks.num_ranks)
            grad_xs.append((grad * weight * scale - x * shrink).to(x.dtype))
            grad_weights.append((product * scale).flatten(0, -2).sum(0))
        return None, None, *grad_xs, *grad_weights


def output_norm(x: Tensor, weight_D: Tensor | None, eps: float | None) -> Tensor:
    """Return the RMSNorm of ``x * (1 + weight_D)`` over the last dim, in the dtype of ``x``.

    The weight (None: zeros) multiplies x before the mean square is taken, unlike in ``rms_norm``.
    With ``eps`` None, ``x`` is returned unchanged, without the weight.
    """
    if eps is None:
        return x
    if weight_D is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        x = (x * (1 + weight_D.to(wide))).to(x.dtype)
    return rms_norm(x, None, eps)


def rms_norm(x: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight_D`` over the last dim, in the dtype of ``x``.

    The weight must have at least float32, in which the norm is computed; None stands for ones.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if weight_D is None:
        weight_D = torch.ones(x.shape[-1], dtype=wide, device=x.device)
    if torch.compiler.is_compiling():
        # Compiled code gets plain operations: the compiler fuses them and decides what is kept.
        return F.rms_norm(x.to(wide), weight_D.shape, weight_D, eps).to(x.dtype)
    in_kernels = x.is_cuda and wide == torch.float32
    norm = _TritonRMSNorm if in_kernels else _RMSNorm
    return norm.apply(x.reshape(-1, x.shape[-1]), weight_D, eps).view(x.shape)
