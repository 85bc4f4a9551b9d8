"""Which scales a product's operands get: ``train.fp8`` as objects.

A product has three operands: activations x, a weight w, and the gradient of its result. Their three products
are x w.T (forward), grad w (gradient of x) and grad.T x (gradient of w), none of them from anything wider.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from automoe.quantize.formats import (
    BLOCK,
    E4M3,
    LARGEST,
    LINE,
    WHOLE,
    Quantized,
    encode,
    largest_of_tiles,
    quantize,
    scales_for,
    transposed,
)

HISTORY = 16  # steps that a delayed scale looks back
X, W, GRAD = range(3)


Agreement = Callable[[torch.Tensor], torch.Tensor]
"""Makes the largest numbers of this rank's part of a tensor those of the whole tensor: a collective of its ranks.

It may write into what it is given.
"""


def _alone(largest: torch.Tensor) -> torch.Tensor:
    return largest


class Tensorwise(nn.Module):
    """One scale a matrix, from its own largest number ("current scaling").

    Args:
        gradients: format of gradients.
        of_rows: agrees on activations and gradients.
        of_weight: agrees on the weight.
    """

    def __init__(self, gradients: torch.dtype, of_rows: Agreement = _alone, of_weight: Agreement = _alone) -> None:
        super().__init__()
        self.gradients, self.of_rows, self.of_weight = gradients, of_rows, of_weight

    def scales(self, tensor: torch.Tensor, operand: int) -> torch.Tensor:
        """[..., 1, 1] scale of ``tensor``, or of anything with its largest number. Collective: once a product.

        Whoever quantizes the operand a second time gives the scale that it had.
        """
        largest = self.largest(largest_of_tiles(tensor, WHOLE), operand)
        return scales_for(largest, self.gradients if operand == GRAD else E4M3)

    def largest(self, mine: torch.Tensor, operand: int) -> torch.Tensor:
        """[..., 1, 1] largest number of this rank's part -> what the scale of ``operand`` must hold."""
        # A maximum over ranks may pass over what is not a number.
        mine = mine.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return self.of_weight(mine) if operand == W else self.of_rows(mine)

    def activation(self, x: torch.Tensor, scales: torch.Tensor | None) -> Quantized:
        """x [R, C], and what its transposed form (``transposed``) is made from."""
        return _under_one(x, scales, E4M3)

    def weight(self, w: torch.Tensor, scales: torch.Tensor | None) -> Quantized:
        """w [..., N, K]."""
        return _under_one(w, scales, E4M3)

    def gradient(self, grad: torch.Tensor, scales: torch.Tensor | None) -> Quantized:
        """grad [R, C] for the product that sums over its columns."""
        return _under_one(grad, scales, self.gradients)

    def gradient_transposed(
        self, grad: torch.Tensor, scales: torch.Tensor | None, q: Quantized | None = None
    ) -> Quantized:
        """[C, R] for the product that sums over rows; ``q`` is what ``gradient`` made of it, if it did already."""
        return transposed(self.gradient(grad, scales) if q is None else q)


def _under_one(tensor: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> Quantized:
    assert scales is not None
    return encode(tensor, scales, dtype, WHOLE)


class Delayed(Tensorwise):
    """One scale a matrix, from the largest number of the last ``HISTORY`` steps (arXiv 2209.05433, section 3).

    An operand without a history has the scale of the numbers themselves, as ``Tensorwise``. Buffers:
    ``history`` [3, HISTORY] (saved, equal on all ranks) and ``seen`` [3], the largest numbers of the step so far
    (not saved, each rank's own until somebody makes them equal before ``end_step``).

    Args:
        gradients: format of gradients.
        agree: agrees on each operand; the experts of all ranks share a history, so on weights too.
    """

    history: torch.Tensor
    seen: torch.Tensor
    known: list[bool] | None
    """Which operands have a history, for the host; None: ask."""

    def __init__(self, gradients: torch.dtype, agree: Agreement = _alone) -> None:
        super().__init__(gradients, agree, agree)
        self.register_buffer("history", torch.empty(3, HISTORY, dtype=torch.float32))
        self.register_buffer("seen", torch.empty(3, dtype=torch.float32), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.history.zero_()
        self.seen.zero_()
        self.known = None

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.known = None

    @torch.no_grad()
    def largest(self, mine: torch.Tensor, operand: int) -> torch.Tensor:
        one = mine.amax().view(1, 1) if mine.numel() else mine.new_zeros(1, 1)  # experts share a history
        if self.training:
            self.seen[operand] = torch.maximum(self.seen[operand], one[0, 0])
        if self.known is None:
            self.known = (self.history.amax(-1) > 0).cpu().tolist()
        if self.known[operand]:
            one = self.history[operand].amax().view(1, 1)
        else:
            one = super().largest(one, operand)
        return one.expand_as(mine).contiguous()

    @torch.no_grad()
    def end_step(self, remember: bool) -> None:
        """What was seen since the last call enters the history, or is forgotten."""
        if remember:
            self.history.copy_(torch.cat((self.seen.unsqueeze(1), self.history[:, :-1]), dim=1))
            self.known = None
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

    def scales(self, tensor: torch.Tensor, operand: int) -> None:
        """None: tiles lie within what a rank has, and their scales are found with their codes."""

    def activation(self, x: torch.Tensor, scales: torch.Tensor | None) -> Quantized:
        return quantize(x, E4M3, LINE)

    def weight(self, w: torch.Tensor, scales: torch.Tensor | None) -> Quantized:
        return quantize(w, E4M3, BLOCK)

    def gradient(self, grad: torch.Tensor, scales: torch.Tensor | None) -> Quantized:
        return quantize(grad, E4M3, LINE)

    def gradient_transposed(
        self, grad: torch.Tensor, scales: torch.Tensor | None, q: Quantized | None = None
    ) -> Quantized:
        return quantize(grad.T, E4M3, LINE)  # from the numbers themselves, which are still there


Scaling = Tensorwise | Blockwise
