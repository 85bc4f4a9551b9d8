"""Which scales a product's operands get: ``train.fp8`` as objects.

A product has three operands: activations x, a weight w, and the gradient of its result. Their three products
are x w.T (forward), grad w (gradient of x) and grad.T x (gradient of w), none of them from anything wider.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from automoe.quantise.formats import (
    BLOCK,
    E4M3,
    LARGEST,
    LINE,
    WHOLE,
    Quantised,
    encode,
    largest_of_tiles,
    quantise,
    scales_for,
    transposed,
)

HISTORY = 16  # steps that a delayed scale looks back
X, W, GRAD = range(3)


class Tensorwise(nn.Module):
    """One scale a matrix, from its own largest number ("current scaling").

    Args:
        gradients: format of gradients.
        whole_weight: makes the largest number [..., 1, 1] of a part of a weight that of the whole weight.
    """

    def __init__(
        self, gradients: torch.dtype, whole_weight: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    ) -> None:
        super().__init__()
        self.gradients, self.whole_weight = gradients, whole_weight

    def activation(self, x: torch.Tensor) -> Quantised:
        """x [R, C], and what its transposed form (``transposed``) is made from."""
        return encode(x, scales_for(self.largest(x, X), E4M3), E4M3, WHOLE)

    def weight(self, w: torch.Tensor) -> Quantised:
        """w [..., N, K]."""
        return encode(w, scales_for(self.largest(w, W), E4M3), E4M3, WHOLE)

    def gradient(self, grad: torch.Tensor) -> Quantised:
        """grad [R, C] for the product that sums over its columns."""
        return encode(grad, scales_for(self.largest(grad, GRAD), self.gradients), self.gradients, WHOLE)

    def gradient_transposed(self, grad: torch.Tensor, q: Quantised | None = None) -> Quantised:
        """[C, R] for the product that sums over rows; ``q`` is what ``gradient`` made of it, if it did already."""
        return transposed(self.gradient(grad) if q is None else q)

    def largest(self, tensor: torch.Tensor, operand: int) -> torch.Tensor:
        """[..., 1, 1] number that the scale of ``operand`` must hold."""
        largest = largest_of_tiles(tensor, WHOLE)
        return self.whole_weight(largest) if operand == W else largest


class Delayed(Tensorwise):
    """One scale a matrix, from the largest number of the last ``HISTORY`` steps (arXiv 2209.05433, section 3).

    Until a step is done there is no history, and the scale is that of the numbers themselves. Buffers:
    ``history`` [3, HISTORY] (saved, equal on all ranks) and ``seen`` [3], the largest numbers of the step so far
    (not saved, each rank's own until somebody makes them equal before ``end_step``).
    """

    history: torch.Tensor
    seen: torch.Tensor

    def __init__(self, gradients: torch.dtype) -> None:
        super().__init__(gradients)
        self.register_buffer("history", torch.empty(3, HISTORY, dtype=torch.float32))
        self.register_buffer("seen", torch.empty(3, dtype=torch.float32), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.history.zero_()
        self.seen.zero_()

    @torch.no_grad()
    def largest(self, tensor: torch.Tensor, operand: int) -> torch.Tensor:
        now = largest_of_tiles(tensor, WHOLE)
        one = now.amax().view(1, 1) if now.numel() else now.new_zeros(1, 1)  # experts share a history
        if self.training:
            self.seen[operand] = torch.maximum(self.seen[operand], one[0, 0])
        past = self.history[operand].amax().view(1, 1)
        largest = torch.where(past > 0, past, one)
        return largest.expand_as(now).contiguous()

    @torch.no_grad()
    def end_step(self, remember: bool) -> None:
        """What was seen since the last call enters the history, or is forgotten."""
        if remember:
            self.history.copy_(torch.cat((self.seen.unsqueeze(1), self.history[:, :-1]), dim=1))
        self.seen.zero_()


def clipped_share(history: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Share of delayed scales that were too small for what they had to hold: numbers beyond became the largest code.

    Args:
        history, seen: [..., HISTORY] and [...], as ``Delayed`` has them. No history is no scale to exceed.
    """
    past = history.amax(-1)
    # Of either format: the largest codes of both are 1.75 times a power of two, and scales are such powers.
    held = scales_for(past, E4M3) * LARGEST[E4M3]
    return ((past > 0) & (seen > held)).to(torch.float32).mean()


class Blockwise(nn.Module):
    """Activations and gradients by 128 numbers of a row, weights by 128 x 128, e4m3 throughout.

    DeepSeek-V3, arXiv 2412.19437, section 3.3.2, with scales that are powers of two everywhere.
    """

    def activation(self, x: torch.Tensor) -> Quantised:
        return quantise(x, E4M3, LINE)

    def weight(self, w: torch.Tensor) -> Quantised:
        return quantise(w, E4M3, BLOCK)

    def gradient(self, grad: torch.Tensor) -> Quantised:
        return quantise(grad, E4M3, LINE)

    def gradient_transposed(self, grad: torch.Tensor, q: Quantised | None = None) -> Quantised:
        return quantise(grad.T, E4M3, LINE)  # from the numbers themselves, which are still there


Scaling = Tensorwise | Blockwise
