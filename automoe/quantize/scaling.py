"""Scaling recipes of float8 products, one class for each value of ``train.fp8``.

A linear layer's product has three operands: activations x, a weight w, and the gradient of its
output. The three matrix products are x w.T (forward), grad w (gradient of x) and grad.T x (gradient
of w). All three have float8 operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from automoe.passes.trace import trains
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

HISTORY = 16  # steps that a delayed scale looks back over
X, W, GRAD = range(3)


AmaxReduce = Callable[[Tensor], Tensor]
"""Element-wise maximum over the ranks that hold parts of a tensor; may write into its argument."""


def _one_rank(amax: Tensor) -> Tensor:
    return amax


class _Weights(nn.Module):
    """Base class of scaling rules, which quantize the operands of one float8 product and may cache the weight.

    Attributes:
        cached: the weight's ``scales`` and ``codes`` while it does not change, so that all micro-batches, passes and
            recomputations quantize it once; {} fills at the next call. None: quantize it at every call.
    """

    cached: dict[str, Any] | None = None

    def weight_scales(self, weight: Tensor) -> Any:
        """Return the scales [..., 1, 1] of the weight [..., N, K]; ``Blockwise`` returns None.

        Collective, unless they are cached.
        """
        return self._once("scales", lambda: self.scales(weight, W))

    def quantize_weight(self, weight: Tensor, scales: Tensor | None) -> Quantized:
        """Return the weight [..., N, K] in float8: from ``cached`` if it has the codes, else quantized now.

        ``scales`` is the result of ``weight_scales``, so None for ``Blockwise``, which computes its own.
        """
        return self._once("codes", lambda: self.quantize(weight, scales, W))

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if self.cached is None:
            return make()
        if name not in self.cached:
            self.cached[name] = make()
        return self.cached[name]


class Tensorwise(_Weights):
    """Scaling rule: one scale per matrix, from its own largest number ("current scaling").

    Args:
        gradients: float8 dtype of gradients.
        reduce_rows: function that takes the maximum over the ranks that hold other activations and
            gradients of the layer.
        reduce_weight: function that takes the maximum over the ranks that hold shards of the weight.
    """

    def __init__(
        self,
        gradients: torch.dtype,
        reduce_rows: AmaxReduce = _one_rank,
        reduce_weight: AmaxReduce = _one_rank,
    ) -> None:
        super().__init__()
        self.formats = {X: E4M3, W: E4M3, GRAD: gradients}
        self.reduce_rows = reduce_rows
        self.reduce_weight = reduce_weight

    def scales(self, tensor: Tensor, operand: int) -> Tensor:
        """Return the scale [..., 1, 1] of ``tensor``. Collective over the ranks that share it.

        The scale depends only on the largest number of ``tensor`` (of past steps in ``Delayed``,
        which also notes this step's). To quantize the operand a second time, pass the same scale
        again.

        Args:
            operand: ``X`` (activations), ``W`` (weight) or ``GRAD`` (gradient of the output).
        """
        amax = self.amax(tile_amax(tensor, WHOLE), operand)
        return scales_for(amax, self.formats[operand])

    def amax(self, local: Tensor, operand: int) -> Tensor:
        """Return the largest magnitude [..., 1, 1] that the scale of ``operand`` must represent.

        It is the maximum over the ranks that share the operand. Collective.

        Args:
            local: [..., 1, 1] largest magnitude in this rank's shard.
            operand: ``X`` (activations), ``W`` (weight) or ``GRAD`` (gradient of the output).
        """
        # A max-reduction over ranks may ignore NaN, so NaN becomes infinity.
        local = local.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return self.reduce_weight(local) if operand == W else self.reduce_rows(local)

    def quantize(self, tensor: Tensor, scales: Tensor | None, operand: int) -> Quantized:
        """Quantize x [R, C], w [..., N, K] or grad [R, C] for the product that sums over columns.

        The result has float8 codes and their scale. ``transposed`` turns that of x and w into the form
        for the product over rows.

        Args:
            scales: [..., 1, 1] scale of the tensor (method ``scales``); None is not allowed here.
            operand: ``X`` (activations), ``W`` (weight) or ``GRAD`` (gradient of the output).
        """
        assert scales is not None
        return encode(tensor, scales, self.formats[operand], WHOLE)

    def gradient_transposed(
        self, grad: Tensor, scales: Tensor | None, q: Quantized | None = None
    ) -> Quantized:
        """Quantize ``grad`` [R, C] to [C, R] for the product that sums over rows.

        Args:
            grad: the gradient [R, C]; unused if ``q`` is given.
            scales: [1, 1] scale of ``grad`` (method ``scales``); must not be None unless ``q`` is given.
            q: ``grad`` as ``quantize`` returned it, whose codes and scale are then reused; None: quantize now.
        """
        return transposed(self.quantize(grad, scales, GRAD) if q is None else q)


class Delayed(Tensorwise):
    """Scaling rule: one scale per matrix, from the largest number of the last 16 steps (``HISTORY``).

    This is delayed scaling (arXiv 2209.05433, section 3). An operand without a history is scaled by
    its own largest number.

    Attributes:
        history: buffer [3, HISTORY], saved and equal on all ranks: largest numbers of past steps.
        seen: buffer [3], not saved: largest numbers of the step so far. It differs between ranks
            until it is reduced before ``end_step``.
        known: for each operand, True if it has a history; None: not yet read from the device. The
            indices of all three are ``X``, ``W``, ``GRAD``.

    Args:
        gradients: float8 dtype of gradients.
        reduce: function that takes the maximum over the ranks that share an operand. It applies to
            weights as well, since the experts of all ranks share a history.
    """

    history: Tensor
    seen: Tensor
    known: list[bool] | None
    """Which operands have a history, on the host; None: read it from the device."""
    # A checkpoint of a run with another scaling has no history; a new history then begins.
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
    def amax(self, local: Tensor, operand: int) -> Tensor:
        # Experts share a history, so the maximum is over all of them.
        largest = local.amax().view(1, 1) if local.numel() else local.new_zeros(1, 1)
        if trains():
            self.seen[operand] = torch.maximum(self.seen[operand], largest[0, 0])
        if self.known is None:
            self.known = (self.history.amax(-1) > 0).cpu().tolist()
        if self.known[operand]:
            largest = self.history[operand].amax().view(1, 1)
        else:
            largest = super().amax(largest, operand)
        return largest.expand_as(local).contiguous()

    @torch.no_grad()
    def end_step(self, remember: bool) -> None:
        """Move this step's largest numbers into the history if ``remember``; then clear them."""
        if remember:
            self.history.copy_(torch.cat((self.seen.unsqueeze(1), self.history[:, :-1]), dim=1))
            self.known = None
        self.seen.zero_()


def clipped_share(history: Tensor, seen: Tensor) -> Tensor:
    """Return the share of delayed scales that were too small, so that some numbers were clipped.

    Clipped numbers became the largest code. Operands without a history never count as clipped.

    Args:
        history: [..., HISTORY] largest numbers of past steps.
        seen: [...] largest numbers of this step.

    Returns:
        A float32 scalar.
    """
    past = history.amax(-1)
    # E4M3 stands for both formats: the largest code of each is 1.75 times a power of two, and
    # scales are powers of two.
    held = scales_for(past, E4M3) * LARGEST[E4M3]
    return ((past > 0) & (seen > held)).to(torch.float32).mean()


class Blockwise(_Weights):
    """Scaling rule: a scale per 1 x 128 tile of activations and gradients, 128 x 128 of weights.

    All operands are e4m3. The tiles are those of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2); all
    scales are powers of two.
    """

    def scales(self, tensor: Tensor, operand: int) -> None:
        """Return None: scales of tiles need no communication, so ``quantize`` computes them itself."""

    def quantize(self, tensor: Tensor, scales: Tensor | None, operand: int) -> Quantized:
        return quantize(tensor, E4M3, BLOCK if operand == W else LINE)

    def gradient_transposed(
        self, grad: Tensor, scales: Tensor | None, q: Quantized | None = None
    ) -> Quantized:
        # The unquantized gradient still exists, so it is not rounded a second time from ``q``.
        return quantize(grad.T, E4M3, LINE)


Scaling = Tensorwise | Blockwise
