"""Which scales a product's operands get: ``train.fp8`` as objects.

A product has three operands: activations x, a weight w, and the gradient of its output. The three
matrix products are x w.T (forward), grad w (gradient of x) and grad.T x (gradient of w); all have
operands in 8 bits.
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
    quantize,
    scales_for,
    tile_amax,
    transposed,
)

HISTORY = 16  # steps that a delayed scale looks back
X, W, GRAD = range(3)


AmaxReduce = Callable[[torch.Tensor], torch.Tensor]
"""Maximum over the ranks that hold parts of a tensor, of each part's largest numbers; may write into its argument."""


def _one_rank(amax: torch.Tensor) -> torch.Tensor:
    return amax


class Tensorwise(nn.Module):
    """One scale a matrix, from its own largest number ("current scaling").

    Args:
        gradients: format of gradients.
        reduce_rows: over the ranks that share activations and gradients.
        reduce_weight: over those that share the weight.
    """

    def __init__(
        self,
        gradients: torch.dtype,
        reduce_rows: AmaxReduce = _one_rank,
        reduce_weight: AmaxReduce = _one_rank,
    ) -> None:
        super().__init__()
        self.formats = {X: E4M3, W: E4M3, GRAD: gradients}
        self.reduce_rows, self.reduce_weight = reduce_rows, reduce_weight

    def scales(self, tensor: torch.Tensor, operand: int) -> torch.Tensor:
        """[..., 1, 1] scale of ``tensor``, or of anything with its largest number. Collective: once
        a product.

        To quantize the operand a second time, pass the same scale again.
        """
        amax = self.amax(tile_amax(tensor, WHOLE), operand)
        return scales_for(amax, self.formats[operand])

    def amax(self, local: torch.Tensor, operand: int) -> torch.Tensor:
        """[..., 1, 1] largest number of this rank's part -> the one that the scale of ``operand``
        must hold."""
        # A maximum over ranks may ignore NaN.
        local = local.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return self.reduce_weight(local) if operand == W else self.reduce_rows(local)

    def quantize(
        self, tensor: torch.Tensor, scales: torch.Tensor | None, operand: int
    ) -> Quantized:
        """x [R, C], w [..., N, K], or grad [R, C] for the product that sums over its columns.

        ``transposed`` makes the transposed form of x and of w from it.
        """
        assert scales is not None
        return encode(tensor, scales, self.formats[operand], WHOLE)

    def gradient_transposed(
        self, grad: torch.Tensor, scales: torch.Tensor | None, q: Quantized | None = None
    ) -> Quantized:
        """[C, R] for the product that sums over rows; ``q``: the result of ``quantize`` for it, if
        there is one."""
        return transposed(self.quantize(grad, scales, GRAD) if q is None else q)


class Delayed(Tensorwise):
    """One scale a matrix, from the largest number of the last ``HISTORY`` steps (arXiv 2209.05433,
    section 3).

    An operand without a history has the scale of its own numbers, as in ``Tensorwise``. Buffers:
    ``history`` [3, HISTORY] (saved, equal on all ranks) and ``seen`` [3], the largest numbers of
    the step so far (not saved, different on each rank until they are reduced before ``end_step``).

    Args:
        gradients: format of gradients.
        reduce: over the ranks that share an operand. The experts of all ranks share a history, so
            also for weights.
    """

    history: torch.Tensor
    seen: torch.Tensor
    known: list[bool] | None
    """Which operands have a history, on the host; None: read it from the device."""
    # a checkpoint of a run with other scales has none, and a new one begins
    optional_state = ("history",)

    def __init__(self, gradients: torch.dtype, reduce: AmaxReduce = _one_rank) -> None:
        super().__init__(gradients, reduce, reduce)
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
    def amax(self, local: torch.Tensor, operand: int) -> torch.Tensor:
        # experts share a history
        one = local.amax().view(1, 1) if local.numel() else local.new_zeros(1, 1)
        if self.training:
            self.seen[operand] = torch.maximum(self.seen[operand], one[0, 0])
        if self.known is None:
            self.known = (self.history.amax(-1) > 0).cpu().tolist()
        if self.known[operand]:
            one = self.history[operand].amax().view(1, 1)
        else:
            one = super().amax(one, operand)
        return one.expand_as(local).contiguous()

    @torch.no_grad()
    def end_step(self, remember: bool) -> None:
        """The largest numbers since the last call enter the history, or are forgotten."""
        if remember:
            self.history.copy_(torch.cat((self.seen.unsqueeze(1), self.history[:, :-1]), dim=1))
            self.known = None
        self.seen.zero_()


def clipped_share(history: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Share of delayed scales that were too small for their numbers, so that some became the
    largest code.

    Args:
        history, seen: [..., HISTORY] and [...], as in ``Delayed``. Operands without a history do
            not count.
    """
    past = history.amax(-1)
    # For both formats: their largest codes are 1.75 times a power of two, and scales are powers of
    # two.
    held = scales_for(past, E4M3) * LARGEST[E4M3]
    return ((past > 0) & (seen > held)).to(torch.float32).mean()


class Blockwise(nn.Module):
    """One scale for 128 numbers of a row in activations and gradients, for 128 x 128 in weights;
    e4m3 throughout.

    DeepSeek-V3, arXiv 2412.19437, section 3.3.2, with scales that are powers of two everywhere.
    """

    def scales(self, tensor: torch.Tensor, operand: int) -> None:
        """None: a rank has whole tiles, and finds their scales together with their codes."""

    def quantize(
        self, tensor: torch.Tensor, scales: torch.Tensor | None, operand: int
    ) -> Quantized:
        return quantize(tensor, E4M3, BLOCK if operand == W else LINE)

    def gradient_transposed(
        self, grad: torch.Tensor, scales: torch.Tensor | None, q: Quantized | None = None
    ) -> Quantized:
        return quantize(grad.T, E4M3, LINE)  # from the numbers themselves, which are still there


Scaling = Tensorwise | Blockwise
