"""RMSNorm (arXiv 1910.07467), computed in at least float32.

Letters: T rows (tokens, or tokens times heads), D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from automoe.comm.communicators import Communicator
from automoe.kernels.rms_norm import RMSNormOverRanks, output_norm, rms_norm
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
    """RMSNorm of a block's output x: ``y / sqrt(mean(y^2) + eps)`` of ``y = x * (1 + weight)``.

    ``weight`` has ``dim`` numbers, zeros at first; with ``dim`` 0 there is none and y is x. With
    ``eps`` None the module returns x.
    """

    first_values = {"weight": "zeros"}

    def __init__(self, eps: float | None, dim: int = 0) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim)) if eps and dim else None

    def forward(self, x: Tensor) -> Tensor:
        return output_norm(x, self.weight, self.eps)


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
    return RMSNormOverRanks.apply(ranks, norms[0].eps, *inputs, *weights)
