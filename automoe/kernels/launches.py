"""Launches of the experts' Triton kernels in ``products``, as functions of contiguous tensors.

If rows and tensors begin at multiples of 16 bytes and ``Blocks.tma`` is set, the tensor memory
accelerator copies all operands but gathered rows. Otherwise threads copy. Both give the same
numbers. Shapes: R rows sorted by expert, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from automoe.kernels import products
from automoe.kernels.tiling import Blocks, RowTiles, blocks_of, precision

# alpha, limit and offset of the clamped SwiGLU; None: plain SwiGLU
Clamp = tuple[float, float, float] | None
_SUM_COLUMNS = 1024


def gather_up_activate(
    x: Tensor,
    gather_idx: Tensor,
    gate_up_proj: Tensor,
    gate_up_proj_bias: Tensor | None,
    probs: Tensor,
    tiles: RowTiles,
    clamp: Clamp,
) -> tuple[Tensor, Tensor]:
    """Compute the first half of the experts: gate and up projection of gathered tokens, activation.

    Shapes: R (token, expert) rows sorted by expert, I expert width.

    Args:
        x: tokens [N, H].
        gather_idx: [R] token of each row.
        gate_up_proj: [E, 2, I, H] weights.
        gate_up_proj_bias: [E, 2, I], added to gate and up; None: no bias.
        probs: [R] routing weight of each row.
        tiles: the rows cut into tiles of one expert.
        clamp: alpha, limit and offset of the clamped SwiGLU; None: plain SwiGLU.

    Returns:
        Gate and up [R, 2I] before the activation, and probs * activation [R, I].
    """
    (num_rows,), (_, _, width, hidden) = gather_idx.shape, gate_up_proj.shape
    pre = x.new_empty(num_rows, 2 * width)
    act = x.new_empty(num_rows, width)
    blocks, step = _blocks("up", x, gate_up_proj, act)
    weights = gate_up_proj
    if blocks.tma:
        weights = _described(gate_up_proj.flatten(0, 1), (2, blocks.columns, blocks.summed))
    _over_rows(
        products.gather_up_activate, tiles, width, blocks, step, x.dtype,
        x, gather_idx, weights, gate_up_proj_bias, probs, pre, act,
        sizes=(hidden, width, *(clamp or (1.0, 0.0, 0.0))),
        CLAMPED=clamp is not None,
    )  # fmt: skip
    return pre, act


def rows_times_weights(
    product: str,
    rows: Tensor,
    weights: Tensor,
    tiles: RowTiles,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
) -> Tensor:
    """Multiply each of R rows [R, K], sorted by expert, by its expert's weight: [R, N].

    Args:
        product: ``down`` with weights [E, N, K], or ``grad_rows`` with weights [E, K, N].
        tiles: the rows cut into tiles of one expert.
        bias: [E, N]; the row's routing weight ``probs`` [R] times its expert's bias is added. None:
            no bias.
    """
    by_columns = product == "down"
    num_columns, summed = weights.shape[1:] if by_columns else weights.shape[:0:-1]
    out = rows.new_empty(rows.shape[0], num_columns)
    blocks, step = _blocks(product, rows, weights, out)
    operands = rows, weights
    if blocks.tma:
        box = (blocks.columns, blocks.summed) if by_columns else (blocks.summed, blocks.columns)
        operands = _described(rows, (tiles.height, blocks.summed)), _described(weights, (1, *box))
    _over_rows(
        products.rows_times_weights, tiles, num_columns, blocks, step, rows.dtype,
        *operands, bias, probs, out,
        sizes=(summed, num_columns), BY_COLUMNS=by_columns,
    )  # fmt: skip
    return out


def grad_down_activate(
    grad_out: Tensor, down_proj: Tensor, probs: Tensor, pre: Tensor, tiles: RowTiles, clamp: Clamp
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward pass through the experts' down projection and activation.

    Shapes: R rows sorted by expert, E experts, H hidden, I expert width.

    Args:
        grad_out: gradient [R, H] of the experts' outputs.
        down_proj: [E, H, I] weights.
        probs: [R] routing weight of each row.
        pre: gate and up [R, 2I] before the activation.
        tiles: the rows cut into tiles of one expert.
        clamp: alpha, limit and offset of the clamped SwiGLU; None: plain SwiGLU.

    Returns:
        The gradient of gate and up [R, 2I]; probs * activation [R, I]; and partial sums of the
        gradient of probs [R, blocks], to be summed over the last dim.
    """
    blocks, step = _blocks("back", grad_out, down_proj)
    _, hidden, width = down_proj.shape
    grad_pre = torch.empty_like(pre)
    act = pre.new_empty(pre.shape[0], width)
    shares = probs.new_empty(pre.shape[0], triton.cdiv(width, blocks.columns), dtype=torch.float32)
    if blocks.tma:
        grad_out = _described(grad_out, (tiles.height, blocks.summed))
        down_proj = _described(down_proj, (1, blocks.summed, blocks.columns))
    _over_rows(
        products.grad_down_activate, tiles, width, blocks, step, pre.dtype,
        grad_out, down_proj, probs, pre, grad_pre, act, shares,
        sizes=(hidden, width, *(clamp or (1.0, 0.0, 0.0))),
        CLAMPED=clamp is not None, COLUMNS_AT_ONCE=blocks.columns_at_once,
    )  # fmt: skip
    return grad_pre, act, shares


def grad_weights(
    left: Tensor, right: Tensor, gather_idx: Tensor | None, offsets: Tensor, out: Tensor
) -> Tensor:
    """Compute left.T @ right over each expert's rows, the gradient of its weight, into ``out``.

    Args:
        left: [R, M], rows sorted by expert.
        right: [R, N] in the same order, or with ``gather_idx`` [tokens, N].
        gather_idx: [R] row of ``right`` for each row of ``left``; None: the same row.
        offsets: [E] end of each expert's rows.
        out: [E, M, N], or M as several dims; zeros for an expert without rows. Also returned.
    """
    product = "grad_weights" if gather_idx is None else "grad_weights_gathered"
    blocks, step = _blocks(product, left, right)
    m = left.shape[1]
    n = right.shape[1]
    grid = offsets.numel() * triton.cdiv(m, blocks.rows) * triton.cdiv(n, blocks.columns)
    products.grad_weights[(grid,)](
        left, right, gather_idx, out, offsets, m, n, STEP=step, PRECISION=precision(left.dtype),
        BLOCK_M=blocks.rows, BLOCK_N=blocks.columns, BLOCK_R=blocks.summed,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    return out


def sum_of_tokens(rows: Tensor, gather_idx: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
    """Sum the gradients ``rows`` [R, H] of (token, expert) pairs for each token: [N, H].

    Args:
        gather_idx: [R] token of each row; rows are sorted by expert.
        offsets: [E] end of each expert's rows; rows after the last one are ignored.
        x: the tokens [N, H], for shape and dtype of the result.
    """
    num_tokens, hidden = x.shape
    # Rows past the last offset were never computed: they go to a token that does not exist.
    row = torch.arange(gather_idx.numel(), device=x.device)
    token = gather_idx.masked_fill(row >= offsets[-1], num_tokens)
    tokens, order = torch.sort(token, stable=True)
    first = torch.searchsorted(tokens, torch.arange(num_tokens + 1, device=x.device))
    out = torch.empty_like(x)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(hidden, _SUM_COLUMNS))
        products.sum_rows_of_token[grid](
            rows, order, first, out, hidden, PRECISION=precision(x.dtype), BLOCK_H=_SUM_COLUMNS
        )
    return out


def _over_rows(
    kernel: Any, tiles: RowTiles, num_columns: int, blocks: Blocks, step: int, dtype: torch.dtype, *operands: Any,
    sizes: tuple[float, ...], **constants: int,
) -> None:  # fmt: skip
    """Launch a Triton kernel with one program for each tile of rows and block of columns.

    Args:
        kernel: kernel of ``products`` whose first arguments are the operands.
        tiles: the rows cut into tiles of one expert.
        num_columns: columns of the result.
        blocks: block sizes and launch parameters.
        step: number that divides the length of every operand's rows.
        dtype: dtype of the operands.
        operands: tensors or tensor descriptors.
        sizes: the kernel's arguments after operands and tiles, such as K and N.
        constants: further compile-time constants.
    """
    kernel[(tiles.slots * triton.cdiv(num_columns, blocks.columns),)](
        *operands,
        tiles.expert, tiles.first_row, tiles.offsets, tiles.slots, tiles.offsets.numel(),
        *sizes, **constants, STEP=step, TMA=blocks.tma, PRECISION=precision(dtype),
        BLOCK_M=tiles.height, BLOCK_N=blocks.columns, BLOCK_K=blocks.summed,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip


def _blocks(product: str, *tensors: Tensor) -> tuple[Blocks, int]:
    """Return the block sizes for a product, and a number that divides the length of all rows.

    The number fills 16 bytes if all rows begin at multiples of 16 bytes; otherwise it is 1, and the
    tensor memory accelerator is not used. The allocator aligns storages, so only the tensors'
    storage offsets and row lengths are checked.

    Args:
        product: name of the product, a key of ``tiling.HOPPER``.
        tensors: contiguous operands of the product.
    """
    step = 16 // tensors[0].element_size()
    starts = [start for tensor in tensors for start in (tensor.shape[-1], tensor.storage_offset())]
    aligned = all(start % step == 0 for start in starts)
    blocks = blocks_of(product, tensors[0].dtype, aligned)
    return (blocks, step) if aligned else (replace(blocks, tma=False), 1)


def _described(tensor: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    # The stride of a dim of size 1 may be anything.
    strides = [prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim())]
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(box))
