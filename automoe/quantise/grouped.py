"""The grouped products of routed experts in 8 bits: what ``automoe.moe.grouped_mm`` is handed for its own.

Shapes: R rows sorted by expert, E experts, N output and K input features.
"""

from __future__ import annotations

import torch
from torch import nn

from automoe.quantise import products
from automoe.quantise.formats import SIDE, transposed
from automoe.quantise.scaling import Scaling


class QuantisedGroupedProducts(nn.Module):
    """The three products of one weight [E, N, K] of all experts, each operand quantised.

    Rows past the last offset belong to nobody and may hold anything: they are zeros before a scale sees them.
    """

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.scaling = scaling

    def out(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """x [R, K] -> [R, N]."""
        rows = self.scaling.activation(_owned(x, offsets))
        return products.grouped_product(rows, self.scaling.weight(weight), offsets, x.dtype)

    def grad_rows(self, grad: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """grad [R, N] -> [R, K]."""
        rows = self.scaling.gradient(_owned(grad, offsets))
        return products.grouped_product(rows, transposed(self.scaling.weight(weight)), offsets, grad.dtype)

    def grad_weight(self, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """grad [R, N], x [R, K] -> [E, N, K], in the dtype of x."""
        place, ends, size = whole_tiles(offsets, x.shape[0])
        grad, x = (
            _spread_rows(_owned(grad, offsets), place, size),
            _spread_rows(_owned(x, offsets), place, size),
        )
        scaling = self.scaling
        columns = scaling.gradient_transposed(grad, scaling.gradient(grad))
        return products.grouped_weight_product(columns, transposed(scaling.activation(x)), ends, x.dtype)


def whole_tiles(offsets: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Where rows lie if every expert has whole tiles of 128 rows and at least one. Nothing waits for the host.

    A tile has the rows of one expert then, and no expert is empty, for which kernels need not write zeros.

    Args:
        offsets: [E] int32, end of each expert's rows among ``num_rows``.

    Returns:
        [R] int64 place of each row, the last place for those past the last offset; [E] int32 end of each
        expert's places; the number of places, the most that these counts can need, and one.
    """
    num_experts, ends = offsets.numel(), offsets.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    new_ends = ((counts + SIDE - 1) // SIDE).clamp_min(1).mul(SIDE).cumsum(0)
    size = (-(-num_rows // SIDE) + num_experts + 1) * SIDE
    row = torch.arange(num_rows, device=offsets.device)
    expert = torch.searchsorted(ends, row, right=True)
    from_end = (new_ends - ((counts + SIDE - 1) // SIDE).clamp_min(1) * SIDE) - (ends - counts)
    place = row + from_end[expert.clamp_max(num_experts - 1)]
    return torch.where(expert < num_experts, place, size - 1), new_ends.int(), size


def _spread_rows(rows: torch.Tensor, place: torch.Tensor, size: int) -> torch.Tensor:
    return rows.new_zeros(size, rows.shape[1]).index_copy_(0, place, rows)


def _owned(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    past = torch.arange(rows.shape[0], device=rows.device) >= offsets[-1]
    return rows.masked_fill(past.unsqueeze(1), 0)
