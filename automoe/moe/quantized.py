"""The ``grouped_mm`` expert backend with its products in 8 bits (``train.fp8``).

On CUDA operands under one scale go to torch's grouped product, blocks to this project's kernels, which have not run
on a GPU yet. Elsewhere dequantized operands are multiplied in float32, as in ``automoe.quantize.products``.
Shapes: R rows sorted by expert, E experts, N output and K input features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from automoe.moe.activation import SWIGLU, Activation
from automoe.moe.grouped_mm import Scales, grouped_mm, grouped_mm_experts
from automoe.quantize.formats import SIDE, WHOLE, Quantized, dequantize, largest_of_tiles, transposed
from automoe.quantize.scaling import GRAD, Blockwise, Scaling, W, X


class QuantizedExperts(nn.Module):
    """An ``ExpertFn``; the gate and up projection has one scaling, the down projection another.

    Activation, routing weights and biases are applied in the dtype of x.
    """

    def __init__(self, up: Scaling, down: Scaling) -> None:
        super().__init__()
        self.up, self.down = QuantizedGroupedProducts(up), QuantizedGroupedProducts(down)

    def forward(
        self,
        x: torch.Tensor,
        gather_idx: torch.Tensor,
        offsets: torch.Tensor,
        probs: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
        activation: Activation = SWIGLU,
    ) -> torch.Tensor:
        weights = (w_gate_up, w_down, b_gate_up, b_down)
        return grouped_mm_experts(
            x, gather_idx, offsets, probs, *weights, activation, up_products=self.up, down_products=self.down
        )


class QuantizedGroupedProducts(nn.Module):
    """The three products of one weight [E, N, K] of all experts, each operand quantized.

    Rows past the last offset belong to nobody and may hold anything: they are zeros before a scale sees them.
    """

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.scaling = scaling

    def scales(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> tuple[Scales, Scales]:
        """Of x [R, K] and of the weight."""
        return self._of_rows(x, offsets, X), self.scaling.scales(weight, W)

    def gradient_scales(self, grad: torch.Tensor, offsets: torch.Tensor) -> Scales:
        """Of grad [R, N]."""
        return self._of_rows(grad, offsets, GRAD)

    def _of_rows(self, rows: torch.Tensor, offsets: torch.Tensor, operand: int) -> Scales:
        if isinstance(self.scaling, Blockwise):
            return None
        largest_of_rows = largest_of_tiles(rows.unsqueeze(1), WHOLE).squeeze(1)  # [R, 1], and no copy of all
        return self.scaling.scales(_owned(largest_of_rows, offsets), operand)

    def out(
        self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, of_x: Scales, of_weight: Scales
    ) -> torch.Tensor:
        """x [R, K] -> [R, N]."""
        rows = self.scaling.activation(_owned(x, offsets), of_x)
        return grouped_product(rows, self.scaling.weight(weight, of_weight), offsets, x.dtype)

    def grad_rows(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor,
        of_grad: Scales,
        of_weight: Scales,
    ) -> torch.Tensor:
        """grad [R, N] -> [R, K]."""
        rows = self.scaling.gradient(_owned(grad, offsets), of_grad)
        columns = transposed(self.scaling.weight(weight, of_weight))
        return grouped_product(rows, columns, offsets, grad.dtype)

    def grad_weight(
        self, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, of_grad: Scales, of_x: Scales
    ) -> torch.Tensor:
        """grad [R, N], x [R, K] -> [E, N, K], in the dtype of x."""
        place, ends, size = whole_tiles(offsets, x.shape[0])
        columns = self.scaling.gradient_transposed(_spread_rows(grad, place, size), of_grad)
        # Turned from 8 bits, as a linear layer's is: of the rows that were multiplied, no wider ones.
        rows = self.scaling.activation(_spread_rows(x, place, size), of_x)
        return grouped_weight_product(columns, transposed(rows), ends, x.dtype)


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
    """rows [R, C] -> [size, C], zeros between experts and for rows past the last offset."""
    spread = rows.new_zeros(size, rows.shape[1]).index_copy_(0, place, rows)
    spread[-1] = 0  # no expert's place, but that of every row past the last offset
    return spread


def _owned(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    past = torch.arange(rows.shape[0], device=rows.device) >= offsets[-1]
    return rows.masked_fill(past.unsqueeze(1), 0)


def grouped_product(a: Quantized, b: Quantized, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a [R, K] @ b[e] [E, N, K].T, each row by its expert's -> [R, N]; rows past the last offset may hold anything.

    Args:
        a: in lines, or under one scale.
        b: in blocks, or under one scale an expert.
        offsets: [E] int32, end of each expert's rows.
    """
    if not a.codes.is_cuda:
        wide = torch.promote_types(dtype, torch.float32)
        columns = dequantize(b).to(wide).transpose(-2, -1)
        return grouped_mm(dequantize(a).to(wide), columns, offsets).to(dtype)
    if a.tile != WHOLE:
        from automoe.kernels.scaled import block_scaled_rows

        return block_scaled_rows(a.codes, a.scales, b.codes, b.scales, offsets, dtype)
    return _scaled_grouped_mm(
        a.codes,
        b.codes.transpose(-2, -1),
        a.scales.view(1).expand(a.codes.shape[0]),
        b.scales.view(-1, 1).expand(b.codes.shape[:2]),
        offsets,
        dtype,
    )


def grouped_weight_product(a: Quantized, b: Quantized, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a [M, R] @ b [N, R].T over each expert's columns -> [E, M, N].

    Args:
        a, b: in lines, or under one scale.
        offsets: [E] int32, end of each expert's columns, where lines end; no expert is empty.
    """
    if not a.codes.is_cuda:
        wide = torch.promote_types(dtype, torch.float32)
        return grouped_mm(dequantize(a).to(wide), dequantize(b).to(wide).T, offsets).to(dtype)
    if a.tile != WHOLE:
        from automoe.kernels.scaled import block_scaled_weights

        return block_scaled_weights(a.codes, a.scales, b.codes, b.scales, offsets, dtype)
    experts = offsets.numel()
    scale_a, scale_b = (q.scales.view(1).expand(experts * q.codes.shape[0]) for q in (a, b))
    return _scaled_grouped_mm(a.codes, b.codes.T, scale_a, scale_b, offsets, dtype)


def _scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One scale a row, all of a matrix alike: the one kind that torch's kernel for Hopper knows. Its result is bf16."""
    by_row = F.ScalingType.RowWise
    scale_a, scale_b = (s.clone(memory_format=torch.contiguous_format) for s in (scale_a, scale_b))
    out = F.scaled_grouped_mm(a, b, scale_a, by_row, scale_b, by_row, offs=offsets, output_dtype=torch.bfloat16)
    return out.to(dtype)
