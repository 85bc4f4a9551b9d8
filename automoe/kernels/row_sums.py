"""Deterministic sums of rows with equal index, such as the outputs of a token's experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sum_rows(rows_MH: Tensor, index_M: Tensor, num_sums: int) -> Tensor:
    """Sum the rows that have the same index, in their order: [num_sums, H], in the rows' dtype.

    Rows with the index ``num_sums`` are ignored. On CUDA ``index_add_`` would add with atomics, in
    any order, and round after each addition, so ``sum_in_order`` is used there. It is also used
    for float32 on the CPU, where it gives the same bits in less time.
    """
    if rows_MH.device.type == "cpu" and rows_MH.dtype != torch.float32:
        out = rows_MH.new_zeros(num_sums + 1, rows_MH.shape[1])
        return out.index_add_(0, index_M, rows_MH)[:num_sums]
    return sum_in_order(rows_MH, index_M, num_sums)


def sum_in_order(rows_MH: Tensor, index_M: Tensor, num_sums: int) -> Tensor:
    """Sum the rows that have the same index, in their order, on any device: [num_sums, H].

    ``embedding_bag`` computes it: one thread per column sums the rows of an index, without atomics.
    On CUDA it accumulates rows of 16-bit dtypes in float32. There is no host sync. Rows with the
    index ``num_sums`` are ignored.
    """
    if not rows_MH.shape[0]:
        return rows_MH.new_zeros(num_sums, rows_MH.shape[1])
    sorted_M, order_M = index_M.int().sort(stable=True)
    bags = torch.arange(num_sums + 1, dtype=torch.int32, device=index_M.device)
    first = torch.searchsorted(sorted_M, bags)
    # A last bag takes the rows of no sum, since CUDA's kernel extends the last bag to the last row.
    return F.embedding_bag(order_M, rows_MH, first, mode="sum")[:num_sums]


def sum_within_rows(x_BS: Tensor, index_BS: Tensor, num_sums: int) -> Tensor:
    """Sum the entries of each row that have the same index, in their order: [B, num_sums].

    Entries with a negative index are ignored. On CUDA ``scatter_add`` would add with atomics, in
    any order.
    """
    total = len(x_BS) * num_sums
    first_B1 = torch.arange(0, total, num_sums, device=x_BS.device).unsqueeze(1)
    place_BS = torch.where(index_BS < 0, total, first_B1 + index_BS)
    return sum_rows(x_BS.reshape(-1, 1), place_BS.flatten(), total).view(len(x_BS), num_sums)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NH, index_M):
        ctx.save_for_backward(index_M)
        ctx.num_rows = x_NH.shape[0]
        return x_NH.index_select(0, index_M)

    @staticmethod
    def backward(ctx, grad_MH):
        return sum_rows(grad_MH, *ctx.saved_tensors, ctx.num_rows), None


def gather_rows(x_NH: Tensor, index_M: Tensor) -> Tensor:
    """Return the rows x[index] [M, H]; the backward pass sums gradients in a fixed order."""
    return _GatherRows.apply(x_NH, index_M)
