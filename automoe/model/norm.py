"""RMSNorm (arXiv 1910.07467), computed in at least float32.

Letters: T rows (tokens, or tokens times heads), D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automoe.comm.communicators import Communicator
from automoe.kernels.rms_norm import output_norm, rms_norm
from automoe.model.linear import Features, take_features


class RMSNorm(nn.Module):
    """RMSNorm ``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in the dtype of ``x``.

    ``zero_centered`` multiplies by 1 + weight instead; the weight then starts from zero, else from
    one.
    """

    def __init__(self, dim: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.zero_centered = zero_centered
        self.first_values = {"weight": "zeros" if zero_centered else "ones"}

    def forward(self, x: Tensor) -> Tensor:
        # promote_types keeps float64 runs in float64; .float() would not.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide)
        if self.zero_centered:
            weight = weight + 1
        return rms_norm(x, weight, self.eps)


class OutputNorm(nn.Module):
    """RMSNorm with the weight [``dim``] before the mean (``output_norm``); with ``dim`` 0 without a weight."""

    first_values = {"weight": "zeros"}

    def __init__(self, eps: float | None, dim: int = 0) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim)) if eps and dim else None

    def forward(self, x: Tensor) -> Tensor:
        return output_norm(x, self.weight, self.eps)


class _NormOverRanks(torch.autograd.Function):
    """Autograd function of ``norm_over_ranks``; x [..., w] are this rank's w features.

    It saves each x in its own dtype. With P ranks, r = 1 / sqrt(mean(x^2) + eps) and g the incoming
    gradient: dx = r g * weight - x r^3 sum over all features of (g * x * weight) / (P w).
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


def norm_over_ranks(
    norms: Sequence[RMSNorm],
    inputs: Sequence[Tensor],
    features: Sequence[Features],
    ranks: Communicator,
) -> tuple[Tensor, ...]:
    """Apply RMSNorms over features that are sharded over ranks, with one all-reduce for all norms.

    Returns the normed inputs, in their order and dtypes.

    Args:
        norms: norms with the same epsilon.
        inputs: for each norm this rank's features [..., w]. If features are replicated, each is on
            equally many ranks, so copies do not change the mean.
        features: for each norm the ranges of its whole weight that belong to this rank's
            features; None: all.
    """
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    weights = [
        take_features(norm.weight, held).to(wide) + float(norm.zero_centered)
        for norm, held in zip(norms, features, strict=True)
    ]
    return _NormOverRanks.apply(ranks, norms[0].eps, *inputs, *weights)
