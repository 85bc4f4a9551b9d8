"""The ``grouped_mm`` expert backend with its products in 8 bits (``train.fp8``).

On CUDA, torch's grouped product multiplies operands with one scale, and this project's kernels
those with block scales. Elsewhere operands are dequantized and multiplied in at least float32, as
in ``automoe.quantize.linear``. Shapes: R rows sorted by expert, E experts, N output and K input
features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automoe.moe.grouped_mm import GroupedProducts, QuantScales, grouped_mm, grouped_mm_experts
from automoe.quantize.formats import SIDE, WHOLE, Quantized, dequantize, tile_amax, transposed
from automoe.quantize.scaling import GRAD, Blockwise, Scaling, X


class QuantizedExperts(nn.Module):
    """Expert backend whose products are in 8 bits.

    Activation, routing weights and biases are applied in the dtype of x.

    Args:
        up, down: scaling rules (``Tensorwise`` or ``Blockwise``), by which the operands of the gate
            and up projection, and of the down projection, become 8-bit codes.
    """

    def __init__(self, up: Scaling, down: Scaling) -> None:
        super().__init__()
        self.up = QuantizedGroupedProducts(up)
        self.down = QuantizedGroupedProducts(down)

    def forward(self, *args: Any) -> Tensor:
        return grouped_mm_experts(*args, up=self.up, down=self.down)


class QuantizedGroupedProducts(nn.Module, GroupedProducts):
    """The products (forward, two gradients) of all experts' weight, with operands quantized to 8 bits.

    Rows past the last offset belong to no expert and may hold anything. They are set to zero before
    scales are computed.

    Args:
        scaling: rule by which x, weight and gradient are scaled to 8 bits.
    """

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.scaling = scaling

    def scales(self, x_RK, w_ENK, offsets_E) -> tuple[QuantScales, QuantScales]:
        return self._row_scales(x_RK, offsets_E, X), self.scaling.weight_scales(w_ENK)

    def grad_scales(self, grad_RN, offsets_E) -> QuantScales:
        return self._row_scales(grad_RN, offsets_E, GRAD)

    def _row_scales(self, rows: Tensor, offsets_E: Tensor, operand: int) -> QuantScales:
        if isinstance(self.scaling, Blockwise):
            return None
        amax_R1 = tile_amax(rows.unsqueeze(1), WHOLE).squeeze(
            1
        )  # reads all rows without copying them
        return self.scaling.scales(_zero_unowned(amax_R1, offsets_E), operand)

    def output(
        self, x_RK, w_ENK, offsets_E, x_scales: QuantScales, w_scales: QuantScales
    ) -> Tensor:
        rows = self.scaling.quantize(_zero_unowned(x_RK, offsets_E), x_scales, X)
        return grouped_product(
            rows, self.scaling.quantize_weight(w_ENK, w_scales), offsets_E, x_RK.dtype
        )

    def grad_input(
        self, grad_RN, w_ENK, offsets_E, grad_scales: QuantScales, w_scales: QuantScales
    ) -> Tensor:
        rows = self.scaling.quantize(_zero_unowned(grad_RN, offsets_E), grad_scales, GRAD)
        columns = transposed(self.scaling.quantize_weight(w_ENK, w_scales))
        return grouped_product(rows, columns, offsets_E, grad_RN.dtype)

    def grad_weight(
        self, grad_RN, x_RK, offsets_E, grad_scales: QuantScales, x_scales: QuantScales
    ) -> Tensor:
        """Quantize gradient and x with their scales; return the weight's gradient [E, N, K].

        ``offsets_E`` are the ends of the experts' rows, ``grad_scales`` the result of
        ``self.grad_scales``, ``x_scales`` the first result of ``self.scales``.
        """
        place_R, ends_E, size = whole_tiles(offsets_E, x_RK.shape[0])
        columns = self.scaling.gradient_transposed(
            _spread_rows(grad_RN, place_R, size), grad_scales
        )
        # As in a linear layer, the transpose is of the 8-bit numbers that the forward multiplied,
        # not of the wider originals.
        rows = self.scaling.quantize(_spread_rows(x_RK, place_R, size), x_scales, X)
        return grouped_product(columns, transposed(rows), ends_E, x_RK.dtype)


def whole_tiles(offsets_E: Tensor, num_rows: int) -> tuple[Tensor, Tensor, int]:
    """Return positions for rows so that every expert has whole tiles of 128, and at least one.

    Each tile then has rows of one expert, and no expert is empty, so that kernels need not write
    zeros for it. No host sync.

    Args:
        offsets_E: int32, end of each expert's rows among ``num_rows``.
        num_rows: number of rows R.

    Returns:
        The position of each row [R] int64, where rows past the last offset get the last position;
        the end of each expert's positions [E] int32; the number of positions: as many as any split
        of ``num_rows`` over the experts can need, plus one tile.
    """
    num_experts = offsets_E.numel()
    ends_E = offsets_E.long()
    counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
    sizes_E = ((counts_E + SIDE - 1) // SIDE).clamp_min(1) * SIDE
    new_ends_E = sizes_E.cumsum(0)
    size = (-(-num_rows // SIDE) + num_experts + 1) * SIDE
    row_R = torch.arange(num_rows, device=offsets_E.device)
    expert_R = torch.searchsorted(ends_E, row_R, right=True)
    shift_E = (new_ends_E - sizes_E) - (ends_E - counts_E)
    place_R = row_R + shift_E[expert_R.clamp_max(num_experts - 1)]
    return torch.where(expert_R < num_experts, place_R, size - 1), new_ends_E.int(), size


def _spread_rows(rows: Tensor, place_R: Tensor, size: int) -> Tensor:
    """Return [size, C] with the rows [R, C] at the positions ``place_R``, and zeros elsewhere.

    The last position is zero too: rows of no expert are sent there (``whole_tiles``).
    """
    spread = rows.new_zeros(size, rows.shape[1]).index_copy_(0, place_R, rows)
    spread[-1] = 0  # rows past the last offset were all written to this place
    return spread


def _zero_unowned(rows: Tensor, offsets_E: Tensor) -> Tensor:
    """Return ``rows`` [R, C] with zeros past the last of ``offsets_E``, the ends of the experts' rows."""
    past_R = torch.arange(rows.shape[0], device=rows.device) >= offsets_E[-1]
    return rows.masked_fill(past_R.unsqueeze(1), 0)


def grouped_product(a: Quantized, b: Quantized, offsets_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply quantized operands by expert, over rows or over columns.

    If b has 3 dims, each row of a is multiplied by its expert's weight: a [R, K] @ b[e] [E, N, K].T
    -> [R, N]; rows past the last offset may hold anything. If b has 2 dims, each expert's columns
    are multiplied: a [M, R] @ b [N, R].T -> [E, M, N].

    Args:
        a: quantized with one scale per 1 x 128 numbers of a row, or with one scale.
        b: with 3 dims quantized with one scale per block of 128 x 128 numbers, or per expert; with
            2 dims with one scale per 1 x 128 numbers of a row, or with one scale.
        offsets_E: int32, end of each expert's rows or columns along R. Over columns no expert is
            empty, and offsets are multiples of 128, so that no scale is of two experts' columns.
        dtype: of the result.
    """
    if not a.codes.numel():  # a rank without rows
        return torch.zeros(0, b.codes.shape[-2], dtype=dtype, device=a.codes.device)
    if not a.codes.is_cuda:
        wide = torch.promote_types(dtype, torch.float32)
        columns = dequantize(b).to(wide).transpose(-2, -1)
        return grouped_mm(dequantize(a).to(wide), columns, offsets_E).to(dtype)
    if a.tile != WHOLE:
        from automoe.kernels.fp8 import block_scaled_product

        return block_scaled_product(a.codes, a.scales, b.codes, b.scales, offsets_E, dtype)
    # Torch's kernel for Hopper takes only one scale per row (here all rows have the same) and
    # returns bfloat16.
    if b.codes.dim() == 3:
        scale_a = a.scales.view(1).expand(a.codes.shape[0])
        scale_b = b.scales.view(-1, 1).expand(b.codes.shape[:2])
    else:
        scale_a, scale_b = (
            q.scales.view(1).expand(offsets_E.numel() * q.codes.shape[0]) for q in (a, b)
        )
    scale_a, scale_b = (s.clone(memory_format=torch.contiguous_format) for s in (scale_a, scale_b))
    of_rows = F.ScalingType.RowWise
    columns = b.codes.transpose(-2, -1)
    out = F.scaled_grouped_mm(
        a.codes,
        columns,
        scale_a,
        of_rows,
        scale_b,
        of_rows,
        offs=offsets_E,
        output_dtype=torch.bfloat16,
    )
    return out.to(dtype)
