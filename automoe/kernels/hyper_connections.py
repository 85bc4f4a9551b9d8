"""Arithmetic of hyper-connections: n streams of the residual, collapsed, expanded and mixed.

Manifold-constrained hyper-connections, mHC (arXiv 2512.24880), as DeepSeek-V4 has them. Streams lie
side by side in the last dim of hidden states. Letters: B sequences, s positions, n streams, H hidden
size, W = n H.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automoe.kernels.wide_product import wide_product


def stream_logits(x_BsW: Tensor, fn_MW: Tensor, eps: float) -> Tensor:
    """Return M logits per token, [B, s, M]: the product of its RMS-normed streams with ``fn_MW``.

    ``x_BsW`` has n streams of width H side by side, W = n H, which one RMS norm covers. The result
    is in at least float32. The product of the unscaled streams is divided by their root mean
    square, so autograd keeps no scaled copy of them. ``eps`` is added to the mean square.
    """
    wide = torch.promote_types(x_BsW.dtype, torch.float32)
    norm_Bs1 = torch.linalg.vector_norm(x_BsW, dim=-1, keepdim=True, dtype=wide)
    scale_Bs1 = (norm_Bs1.square() / x_BsW.shape[-1] + eps).rsqrt()
    return wide_product(x_BsW, fn_MW.to(wide)) * scale_Bs1


def collapse(x_BsW: Tensor, weights_Bsn: Tensor) -> Tensor:
    """Return the weighted sum [B, s, H] of n streams, which lie side by side in W = n H, in their dtype."""
    x_BsnH = x_BsW.unflatten(-1, (weights_Bsn.shape[-1], -1))
    return (weights_Bsn.unsqueeze(-1) * x_BsnH).sum(-2).to(x_BsW.dtype)


def expand(x_BsW: Tensor, out_BsH: Tensor, post_Bsn: Tensor, comb_Bsnn: Tensor) -> Tensor:
    """Return the next n streams [B, s, W = n H]: mixed streams, plus a block's output times factors.

    Args:
        x_BsW: the n streams of width H, side by side.
        out_BsH: output of attention or of a feed-forward.
        post_Bsn: factor of the output in each stream.
        comb_Bsnn: [from stream, to stream], factors of the streams ``x_BsW``.
    """
    post_Bsn1, comb_Bsnn = post_Bsn.to(x_BsW.dtype).unsqueeze(-1), comb_Bsnn.to(x_BsW.dtype)
    mixed_BsnH = comb_Bsnn.mT @ x_BsW.unflatten(-1, (comb_Bsnn.shape[-1], -1))
    # The sum is no view of another tensor, which could lose the hooks that FSDP sets on outputs.
    return mixed_BsnH.flatten(-2) + (post_Bsn1 * out_BsH.unsqueeze(-2)).flatten(-2)


def doubly_stochastic(logits_Bsnn: Tensor, iterations: int, eps: float) -> Tensor:
    """Return exp(logits) of n x n matrices, rows and columns scaled in turn to sums of one (Sinkhorn).

    Section 4.2 of arXiv 2512.24880. The first scaling of rows is a softmax; columns come last.

    Args:
        iterations: how often rows and columns are scaled, at least 1.
        eps: added to the softmax, and to the sums that divide.
    """
    return _Sinkhorn.apply(logits_Bsnn, iterations, eps)


class _Sinkhorn(torch.autograd.Function):
    """Autograd function of ``doubly_stochastic``; the backward repeats it from saved logits."""

    @staticmethod
    def forward(ctx, logits, iterations, eps):
        ctx.save_for_backward(logits)
        ctx.given = iterations, eps
        return _scaled(logits.softmax(-1), iterations, eps)[-1][1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        first = logits.softmax(-1)
        for dim, scaled, total in reversed(_scaled(first, *ctx.given)):
            grad = (grad - (grad * scaled).sum(dim, keepdim=True)) / total
        return first * (grad - (grad * first).sum(-1, keepdim=True)), None, None


def _scaled(first: Tensor, iterations: int, eps: float) -> list[tuple[int, Tensor, Tensor]]:
    """Return (dim of the sums, matrices divided by their sums, sums) of each Sinkhorn step after ``first``.

    ``first`` [..., n, n] is a softmax over the last dim; ``eps`` is added to it and to the sums.
    """
    steps = []
    matrix = first + eps
    for dim in [-2, *[-1, -2] * (iterations - 1)]:
        total = matrix.sum(dim, keepdim=True) + eps
        matrix = matrix / total
        steps.append((dim, matrix, total))
    return steps
